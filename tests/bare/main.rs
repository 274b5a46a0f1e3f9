//! On a kernel that has no IPVS and can't load it: the product says so, and says what to do. It runs in a guest without modules:
//! `hack/test bare`.

// clippy.toml allows these in test functions; what they call is test code as well.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Once;

use nix::mount::{MsFlags, mount};
use tests::daemon::{Manifests, binary};

/// Runs a program on a kernel that has no IPVS and finds no module to load.
fn without_ipvs(program: &Path, words: &[&str]) -> Output {
    static HIDDEN: Once = Once::new();
    HIDDEN.call_once(|| {
        tests::require_guest();
        // The kernel starts the one, ipvsadm finds by the other.
        fs::write("/proc/sys/kernel/modprobe", "/bin/false").unwrap();
        mount(
            Some("tmpfs"),
            "/lib/modules",
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap();
    });
    assert!(
        !Path::new("/proc/net/ip_vs").exists(),
        "this needs a guest without modules: hack/test bare"
    );
    Command::new("timeout")
        .arg("10")
        .arg(program)
        .args(words)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn run_names_the_module_to_load() {
    let manifests = Manifests::new();
    let folder = manifests.path().to_str().unwrap();
    let output = without_ipvs(&binary(), &["run", "--manifests", folder]);
    let said = text(&output.stderr);
    assert_eq!(
        (output.status.code(), said.lines().count()),
        (Some(1), 1),
        "{said}"
    );
    assert!(said.contains("modprobe ip_vs"), "{said}");
}

#[test]
fn each_part_that_the_kernel_lacks_is_named_with_its_module() {
    without_ipvs(Path::new("true"), &[]);
    let ipset = ipset_rs::Client::open().unwrap_err().to_string();
    assert!(ipset.contains("modprobe ip_set"), "{ipset}");
    let mut links = ipvs_proxy_dataplane::links::Links::open().unwrap();
    let dummy = links.create().unwrap_err().to_string();
    assert!(dummy.contains("modprobe dummy"), "{dummy}");
}

#[test]
fn listings_fail_as_ipvsadms_do() {
    for words in [
        &["-Ln"] as &[&str],
        &["-L", "-n", "--stats"],
        &["-Sn"],
        &["-S"],
    ] {
        let real = without_ipvs(Path::new("ipvsadm"), words);
        let mut all = vec!["ipvsadm"];
        all.extend(words);
        let ours = without_ipvs(&binary(), &all);
        // ipvsadm starts modprobe, which has something to say as well.
        let said = text(&real.stderr)
            .lines()
            .filter(|line| !line.starts_with("modprobe:"));
        assert_eq!(
            text(&ours.stderr).lines().collect::<Vec<_>>(),
            said.collect::<Vec<_>>()
        );
        assert_eq!(
            (text(&ours.stdout), text(&real.stdout)),
            ("", ""),
            "{words:?}"
        );
        assert_eq!(
            (ours.status.code(), real.status.code()),
            (Some(2), Some(2)),
            "{words:?}"
        );
        assert_eq!(text(&ours.stderr).lines().count(), 2, "{words:?}");
    }
}

#[test]
fn plan_needs_no_kernel() {
    let manifests = Manifests::new();
    let folder = manifests.path().to_str().unwrap();
    let output = without_ipvs(
        &binary(),
        &["plan", "--node-name", "node", "--manifests", folder],
    );
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}
