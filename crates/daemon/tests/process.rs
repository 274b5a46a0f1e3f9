//! How the process ends when its start goes wrong. No kernel with IPVS is needed.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

fn ipvs_proxy(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ipvs-proxy"));
    command
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// A name in the folder for temporary files, gone with this value.
struct Name(PathBuf);

impl Name {
    fn new(name: &str) -> Name {
        let name = format!("ipvs-proxy-{name}-{}", std::process::id());
        Name(std::env::temp_dir().join(name))
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A log on a full disk, or one that nobody reads, ends nothing by itself.
#[test]
fn a_log_that_cannot_be_written_changes_no_exit_code() {
    for (words, code) in [
        (&["run", "--scheduler", "a b"][..], 2),
        (&["run", "--no-such-flag"], 2),
        // Without a subcommand, as kube-proxy.
        (&["--scheduler", "a b"], 2),
        (&["--hostname_override=n", "--kubeconfig=/nonexistent"], 1),
        (&["--version"], 0),
        (&["run", "--version"], 0),
        (&["run", "--kubeconfig", "/nonexistent"], 1),
        (
            &["run", "--kubeconfig", "/nonexistent", "--log-format=json"],
            1,
        ),
        (
            &["plan", "--manifests", "/nonexistent", "--node-name", "n"],
            1,
        ),
        // What can't be read says nothing of the kernel.
        (
            &[
                "plan",
                "--manifests",
                "/nonexistent",
                "--node-name",
                "n",
                "--diff",
            ],
            2,
        ),
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (reader, closed) = std::io::pipe().unwrap();
        drop(reader);
        for stderr in [Stdio::from(full), Stdio::from(closed)] {
            let status = ipvs_proxy(words).stderr(stderr).status().unwrap();
            assert_eq!(status.code(), Some(code), "{words:?}: {status}");
        }
    }
}

/// A start that waits for what never comes can be ended.
#[test]
fn a_signal_ends_a_start_that_waits() {
    let fifo = Name::new("fifo");
    mkfifo(&fifo.0, Mode::S_IRWXU).unwrap();
    let kubeconfig = Name::new("kubeconfig");
    let text = format!(
        "current-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         clusters: [{{name: c, cluster: {{server: 'https://192.0.2.1'}}}}]\n\
         users: [{{name: u, user: {{tokenFile: {}}}}}]\n",
        fifo.0.display()
    );
    fs::write(&kubeconfig.0, text).unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let path = kubeconfig.0.to_str().unwrap();
        let mut process = ipvs_proxy(&["run", "--kubeconfig", path])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(i32::try_from(process.id()).unwrap());
        let status = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let started = Instant::now();
        // It handles both signals itself from then on.
        while !status().contains("SigBlk:\t0000000000004002") {
            assert!(started.elapsed() < Duration::from_secs(30), "{}", status());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(process.try_wait().unwrap().is_none(), "it waits");
        kill(pid, signal).unwrap();
        let ended = loop {
            if let Some(status) = process.try_wait().unwrap() {
                break Some(status);
            }
            if started.elapsed() > Duration::from_secs(30) {
                process.kill().unwrap();
                process.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(ended.and_then(|status| status.code()), Some(0), "{signal}");
    }
}
