//! The demonstration that `hack/demo` starts: a node, its pods, the daemon on `deploy/examples`, and requests through it.
//!
//! Everything it says has been checked; what is not so ends it with exit code 1. With `--shell` it leaves the reader on the node.

// Its output is what it is for.
#![allow(clippy::print_stdout)]

mod shell;
mod show;
mod tour;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use tests::daemon::{Daemon, Manifests, PATIENCE, binary};
use tests::topology::Topology;
use tests::traffic::Server;

const APP1: &str = include_str!("../../../../deploy/examples/app1.yaml");
const NODE_OBJECT: &str = include_str!("../../../../deploy/examples/node.yaml");
const FLAGS: [&str; 3] = [
    "--scheduler=lc",
    "--cluster-cidr=10.0.0.0/24",
    "--nodeport-addresses=192.168.10.0/24",
];
/// The pods of app1 and one more, that asks.
const PODS: u8 = 4;
const CLIENT: u8 = 3;
/// The ports on which app1's pods answer.
const PORTS: [u16; 2] = [8080, 5353];

fn main() -> ExitCode {
    let shell = std::env::args()
        .nth(1)
        .is_some_and(|word| word == "--shell");
    std::panic::set_hook(Box::new(|panic| {
        eprintln!(
            "\ndemo: {}",
            panic.payload_as_str().unwrap_or("it panicked")
        );
    }));
    let body = || {
        let stage = Stage::new();
        if shell {
            shell::run(&stage)
        } else {
            tour::run(stage)
        }
    };
    match std::panic::catch_unwind(body) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE, // the hook said why
    }
}

/// Where it plays. Gone with this value.
struct Stage {
    topology: Topology,
    manifests: Manifests,
    daemon: Daemon,
    _servers: Vec<Server>,
}

impl Stage {
    fn new() -> Self {
        let topology = Topology::new(PODS);
        let served = (0..PODS).flat_map(|pod| PORTS.map(|port| (pod, port)));
        let servers = served.map(|(pod, port)| {
            let listen = || Server::listen(&pod_name(pod), port);
            topology
                .pod(pod)
                .enter(listen)
                .unwrap_or_else(|error| panic!("port {port}: {error}"))
        });
        let servers = servers.collect();
        let manifests = Manifests::new();
        manifests.write("app1.yaml", APP1);
        manifests.write("node.yaml", NODE_OBJECT);
        let mut daemon = Daemon::start(topology.node(), &manifests, &FLAGS);
        daemon.settle();
        Self {
            topology,
            manifests,
            daemon,
            _servers: servers,
        }
    }

    /// What `ipvs-proxy ipvsadm -Ln` prints on the node.
    fn listing(&self) -> String {
        let mut command = Command::new(binary());
        command.args(["ipvsadm", "-Ln"]);
        let output = self
            .topology
            .node()
            .enter(|| command.output())
            .expect("starting ipvs-proxy");
        let error = String::from_utf8_lossy(&output.stderr);
        check(
            output.status.success(),
            "`ipvs-proxy ipvsadm -Ln` to list",
            &error,
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Waits for a listing that is as expected.
    fn await_listing(&self, expected: &str, is_so: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let listing = self.listing();
            if is_so(&listing) {
                return listing;
            }
            check(Instant::now() < deadline, expected, &listing);
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends the demonstration when something is not as it was told.
fn check(is_so: bool, expected: &str, seen: &str) {
    assert!(is_so, "expected {expected}, but saw: {}", seen.trim_end());
}

/// A pod is called by the end of its address: pod2 is 10.0.0.2.
fn pod_name(number: u8) -> String {
    format!("pod{}", number + 2)
}

/// The kernel's name and release.
fn kernel() -> String {
    let read = |name| fs::read_to_string(PathBuf::from("/proc/sys/kernel").join(name));
    let [name, release] = ["ostype", "osrelease"].map(|file| read(file).unwrap_or_default());
    format!("{} {}", name.trim(), release.trim())
}
