//! What the kernel tests, the traffic tests and the demo stand on.
//!
//! * `guest` and `guest-init` (programs): run a command in a guest kernel that has IPVS
//! * [`daemon`]: the daemon as its users start it
//! * `unharmed` (program): runs a command and fails when it changed what other software has in the kernel
//! * [`foreign`]: that other software's things
//! * [`netns`]: network namespaces of this process
//! * [`strace`], [`tap`]: what a process asks of the kernel, seen from outside of it
//! * [`topology`]: one node, its pods and an outside client, as namespaces
//! * [`traffic`]: servers that say who asked, clients that say why not
//!
//! ```no_run
//! use tests::topology::Topology;
//! use tests::traffic::http_get;
//!
//! let topology = Topology::new(2);
//! let _server = topology.serve(1, 8080);
//! let [pod, _] = tests::topology::pod_addresses(1);
//! let answer = topology.pod(0).enter(|| http_get((pod, 8080).into())).expect("an answer");
//! assert_eq!(answer.name, "pod1");
//! ```
//!
//! Everything here panics when the kernel refuses: a test that can't be set up has failed.

pub mod daemon;
pub mod foreign;
pub mod netns;
pub mod strace;
pub mod tap;
pub mod topology;
pub mod traffic;

use std::path::Path;

/// Set to 1 to let kernel tests run on this machine's kernel: for those that need no IPVS, in a namespace of their own.
pub const HERE: &str = "KERNEL_TESTS_HERE";

/// Whether the tests may take minutes: `hack/test --long`.
pub fn long() -> bool {
    std::env::var_os("TESTS_LONG").is_some()
}

/// Panics outside of a guest: kernel tests change what they find, and must not pass by not running. [`HERE`] allows it.
pub fn require_guest() {
    assert!(
        Path::new("/run/out/argv").exists()
            || std::env::var_os(HERE).is_some_and(|value| value == "1"),
        "kernel tests run in a guest kernel only: `hack/test kernel`, or `hack/guest -- PROGRAM`"
    );
}
