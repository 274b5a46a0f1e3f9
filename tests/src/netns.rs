//! Network namespaces. A thread belongs to one; the processes and threads it starts are born into it.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::panic::resume_unwind;
use std::process::{Child, Command, Output, Stdio};
use std::thread;

use ipvs_proxy_netlink::{Error, Request, Socket, Subsystem};
use nix::sched::{CloneFlags, setns, unshare};

const RTM_NEWLINK: u16 = 16; // <linux/rtnetlink.h>
const IFF_UP: u32 = 1; // <linux/if.h>
const LOOPBACK: i32 = 1; // the index of `lo` in every network namespace (LOOPBACK_IFINDEX, <net/flow.h>)

/// A network namespace with `lo` up. It lives until this value, the processes in it and the sockets made in it are gone.
#[derive(Debug)]
pub struct Namespace {
    file: File,
}

impl Namespace {
    /// Makes a fresh one.
    pub fn new() -> Self {
        crate::require_guest();
        let file = on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("a new network namespace (are you root?)");
            loopback_up().expect("lo up");
            File::open("/proc/thread-self/ns/net").expect("the namespace's file")
        });
        Self { file }
    }

    /// The one of the calling thread.
    pub fn current() -> Self {
        crate::require_guest();
        let file = File::open("/proc/thread-self/ns/net").expect("the namespace's file");
        Self { file }
    }

    /// Runs `body` on a thread inside the namespace, and waits for it. A panic in it is a panic here.
    /// Inside, `/proc/sys/net` is the namespace's; of `/proc/net` use `/proc/thread-self/net`.
    pub fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        on_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET).expect("entering the network namespace");
            body()
        })
    }

    /// Starts a process inside the namespace.
    ///
    /// # Errors
    /// As [`Command::spawn`].
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        self.enter(|| command.spawn())
    }

    /// Runs a program inside the namespace, words divided by blanks, and gives what it prints.
    /// Panics with its error output when it fails.
    pub fn tool(&self, line: &str) -> String {
        self.tool_with_input(line, "")
    }

    /// As [`tool`](Self::tool), with `input` as standard input.
    pub fn tool_with_input(&self, line: &str, input: &str) -> String {
        let Output {
            status,
            stdout,
            stderr,
        } = self
            .enter(|| output(line, input))
            .unwrap_or_else(|error| panic!("{line}: {error}"));
        assert!(
            status.success(),
            "{line}: {status}: {}{input}",
            String::from_utf8_lossy(&stderr)
        );
        String::from_utf8_lossy(&stdout).into_owned()
    }

    /// Writes a value below `/proc/sys/net`, for instance `sysctl("ipv4/vs/conntrack", "1")`.
    pub fn sysctl(&self, name: &str, value: &str) {
        let path = format!("/proc/sys/net/{name}");
        self.enter(|| std::fs::write(&path, value))
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// A path that names the namespace to other programs while this value lives, as in `ip link set eth0 netns PATH`.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }
}

impl Default for Namespace {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs a test's body in a fresh namespace of its own.
pub fn run<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    Namespace::new().enter(body)
}

/// Brings `lo` of the current namespace up. Without it there is no local routing table, and IPVS refuses every real server.
///
/// # Errors
/// What the kernel says.
pub fn loopback_up() -> Result<(), Error> {
    let mut payload = vec![0; 4]; // struct ifinfomsg: family, padding, device type
    payload.extend(LOOPBACK.to_ne_bytes());
    payload.extend(IFF_UP.to_ne_bytes());
    payload.extend(IFF_UP.to_ne_bytes()); // the flags that change
    let request = Request {
        kind: RTM_NEWLINK,
        flags: 0,
        payload,
    };
    Socket::open(Subsystem::Route)?
        .batch(&[request])
        .into_iter()
        .collect()
}

fn on_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(body).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

fn output(line: &str, input: &str) -> io::Result<Output> {
    let mut words = line.split_whitespace();
    let mut child = Command::new(words.next().unwrap_or_default())
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // The tools read all of it before they print.
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    child.wait_with_output()
}
