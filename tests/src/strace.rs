//! The programs that a process starts and the sysctls that it writes, seen from outside by `strace`.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::daemon::wait_until;

/// The record of one run of a program and its children. Gone with this value.
#[derive(Debug)]
pub struct Trace {
    file: PathBuf,
}

impl Trace {
    /// A record that is empty yet.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let file = std::env::temp_dir().join(format!("strace-{}-{number}", std::process::id()));
        Self { file }
    }

    /// The words to put in front of the program. It keeps the process id that it would have without them.
    pub fn by(&self) -> [&str; 9] {
        let file = self.file.to_str().expect("a path of text");
        [
            "strace",
            "-D",
            "-f",
            "--seccomp-bpf",
            "-s256",
            "-e",
            "trace=execve,openat",
            "-o",
            file,
        ]
    }

    /// The programs started so far, the first one included, each with its arguments as strace writes them.
    pub fn started(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        let started = |line: &str| {
            let call = line.split_once("execve(")?.1;
            // A search along PATH meets many folders that have no such program.
            (!call.contains(" = -1 ")).then(|| call.split(", 0x").next().unwrap_or(call).to_owned())
        };
        text.lines().filter_map(started).collect()
    }

    /// What was written to the kernel by other ways than netlink: rules restored, sysctls opened for writing.
    pub fn writes(&self) -> Vec<String> {
        let restores = self
            .started()
            .into_iter()
            .filter(|call| call.contains("-restore"));
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        let sysctls = text.lines().filter(|line| {
            line.contains("\"/proc/sys/") && (line.contains("O_WRONLY") || line.contains("O_RDWR"))
        });
        restores.chain(sysctls.map(str::to_owned)).collect()
    }

    /// How often files were opened whose path contains that text.
    pub fn opened(&self, path: &str) -> usize {
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        text.lines()
            .filter(|line| line.contains("openat(") && line.contains(path))
            .count()
    }

    /// Waits until the process that was started first has ended and all of it is written.
    pub fn finish(&self) {
        wait_until("strace wrote the end of the process", || {
            let text = fs::read_to_string(&self.file).unwrap_or_default();
            let first = text
                .split_whitespace()
                .next()
                .unwrap_or_default()
                .to_owned();
            !first.is_empty()
                && text
                    .lines()
                    .any(|line| line.starts_with(&first) && line.contains("+++"))
        });
    }
}

impl Default for Trace {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file);
    }
}
