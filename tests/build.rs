//! Builds what `guest` preloads into user-mode Linux (guest/xstate.c).

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=guest/xstate.c");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo names it"));
    let built = Command::new("cc")
        .args(["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
        .arg(out.join("xstate.so"))
        .args(["guest/xstate.c", "-ldl"])
        .status()
        .expect("cc, which links Rust programs as well");
    assert!(built.success(), "guest/xstate.c could not be built");
}
