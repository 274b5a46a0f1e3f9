//! The daemon as its users start it: the binary beside this program, on a directory of manifests.

use std::fmt::Write as _;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::netns::Namespace;

/// How long a condition may take to come true.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The daemon's binary, `ipvs-proxy`, which cargo puts beside the folder of this program.
pub fn binary() -> PathBuf {
    let this = std::env::current_exe().expect("this program's path");
    let folders = this.ancestors().skip(1).take(2);
    let found = folders
        .map(|folder| folder.join("ipvs-proxy"))
        .find(|file| file.is_file());
    found.expect("ipvs-proxy beside this program: cargo build --package ipvs-proxy")
}

/// Waits until a condition is true, and panics with `what` when it takes too long.
pub fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_up_to(PATIENCE, what, condition);
}

/// As [`wait_until`], with another patience.
pub fn wait_up_to(patience: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "it did not come true within {patience:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A directory of manifests. Gone with this value.
#[derive(Debug)]
pub struct Manifests {
    folder: PathBuf,
}

impl Manifests {
    /// An empty one.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("manifests-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for manifests");
        Self { folder }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Puts a file in place, in one step as a careful writer does.
    pub fn write(&self, file: &str, text: &str) {
        let hidden = self.folder.join(format!(".{file}"));
        fs::write(&hidden, text).expect("writing a manifest");
        fs::rename(hidden, self.folder.join(file)).expect("renaming a manifest");
    }

    /// Takes a file away.
    pub fn remove(&self, file: &str) {
        fs::remove_file(self.folder.join(file)).expect("removing a manifest");
    }
}

impl Default for Manifests {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Manifests {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A running daemon. Killed with this value, as a crash would.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts `ipvs-proxy run --manifests DIR --node-name node` (where the flags name no other) and more flags in a node's
    /// namespace; does not wait for it to have done anything.
    pub fn start(node: &Namespace, manifests: &Manifests, flags: &[&str]) -> Self {
        Self::start_by(node, manifests, &[], flags)
    }

    /// As [`start`](Self::start), with the words of another program in front, such as `strace`.
    pub fn start_by(node: &Namespace, manifests: &Manifests, by: &[&str], flags: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let log = manifests.path().with_extension(format!("log{number}"));
        let binary = binary();
        let mut words: Vec<&std::ffi::OsStr> = by.iter().map(std::ffi::OsStr::new).collect();
        words.push(binary.as_os_str());
        let (first, rest) = words.split_first().expect("at least the binary");
        let mut command = Command::new(first);
        command
            .args(rest)
            .args(["run", "--manifests"])
            .arg(manifests.path())
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log).expect("the log"));
        // That sysctl can be set in the first network namespace alone.
        if !flags.iter().any(|flag| flag.starts_with("--conntrack")) {
            command.args(["--conntrack-max-per-core", "0"]);
        }
        if !flags.contains(&"--node-name") {
            command.args(["--node-name", "node"]);
        }
        let child = node.spawn(&mut command).expect("starting the daemon");
        Self { child, log }
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("the log")
    }

    /// The file of its log, gone with this value.
    pub fn log_file(&self) -> &Path {
        &self.log
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().expect("the daemon's state").is_none()
    }

    /// Waits until all is in force, and then until it says nothing more for a while.
    pub fn settle(&mut self) {
        wait_until("the daemon applied what it read", || {
            let exited = self.child.try_wait().expect("the daemon's state");
            assert!(
                exited.is_none(),
                "the daemon ended: {exited:?}\n{}",
                self.log()
            );
            self.log().contains("is in force")
        });
        let mut before = String::new();
        wait_until("the daemon came to rest", || {
            let now = self.log();
            let rests = now == before;
            before = now;
            std::thread::sleep(Duration::from_millis(150));
            rests
        });
    }

    /// Asks it to stop, and waits.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.child.wait().expect("waiting for the daemon")
    }

    /// Ends it without a word, as a crash does.
    pub fn crash(mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().expect("waiting for the daemon");
    }

    /// Waits for it to end by itself; its exit status and log.
    pub fn ended(mut self) -> (ExitStatus, String) {
        wait_until("the daemon ends by itself", || {
            self.child.try_wait().expect("the daemon's state").is_some()
        });
        (self.child.wait().expect("the daemon's state"), self.log())
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a process id");
        kill(Pid::from_raw(pid), signal).expect("signalling the daemon");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!(
                "the daemon's log:\n{}",
                fs::read_to_string(&self.log).unwrap_or_default()
            );
        }
        let _ = fs::remove_file(&self.log);
    }
}

/// A Service in YAML: its ClusterIPs, and its ports as `(name, protocol, port, node port)`; 0 for
/// no node port.
pub fn service(name: &str, cluster_ips: &[&str], ports: &[(&str, &str, u16, u16)]) -> String {
    let node_ports = ports.iter().any(|(.., node_port)| *node_port != 0);
    let mut text = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n  namespace: default\n\
         spec:\n  type: {}\n  clusterIP: {first}\n  clusterIPs: [{}]\n  ports:\n",
        if node_ports { "NodePort" } else { "ClusterIP" },
        cluster_ips
            .iter()
            .map(|ip| format!("\"{ip}\""))
            .collect::<Vec<_>>()
            .join(", "),
        first = cluster_ips
            .first()
            .map_or_else(String::new, |ip| format!("\"{ip}\"")),
    );
    for (name, protocol, port, node_port) in ports {
        let _ = writeln!(
            text,
            "  - name: \"{name}\"\n    protocol: {protocol}\n    port: {port}"
        );
        if *node_port != 0 {
            let _ = writeln!(text, "    nodePort: {node_port}");
        }
    }
    text
}

/// An EndpointSlice in YAML, with ports as `(name, protocol, port)` and endpoints as
/// `(address, ready, node name)`.
pub fn slice(
    name: &str,
    service: &str,
    ports: &[(&str, &str, u16)],
    endpoints: &[(IpAddr, bool, &str)],
) -> String {
    let family = match endpoints.first() {
        Some((IpAddr::V6(_), ..)) => "IPv6",
        _ => "IPv4",
    };
    let mut text = format!(
        "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}\n  \
         namespace: default\n  labels:\n    kubernetes.io/service-name: {service}\n\
         addressType: {family}\nports:\n"
    );
    for (name, protocol, port) in ports {
        let _ = writeln!(
            text,
            "- name: \"{name}\"\n  protocol: {protocol}\n  port: {port}"
        );
    }
    text.push_str(if endpoints.is_empty() {
        "endpoints: []\n"
    } else {
        "endpoints:\n"
    });
    for (address, ready, node) in endpoints {
        let _ = writeln!(
            text,
            "- addresses: [\"{address}\"]\n  nodeName: {node}\n  conditions: {{ready: {ready}, \
             serving: {ready}, terminating: false}}"
        );
    }
    text
}
