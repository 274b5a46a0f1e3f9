//! What every process tells of itself, by the names that all exporters use.

use std::fs;
use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::{Float, add};

/// What times in /proc are counted in: USER_HZ, 100 a second on every architecture that Rust has
/// Linux for (<asm-generic/param.h>).
const TICKS_A_SECOND: f64 = 100.0;

#[derive(Debug)]
pub(super) struct Process {
    cpu: Counter<f64, AtomicU64>,
    resident: Float,
    virtual_size: Float,
    open_files: Gauge,
    max_files: Float,
}

impl Process {
    pub(super) fn new(r: &mut Registry) -> Process {
        let started = add(
            r,
            "process_start_time_seconds",
            "Start of the process, in seconds since 1970",
            Float::default(),
        );
        started.set(start().unwrap_or_default());
        Process {
            cpu: add(
                r,
                "process_cpu_seconds",
                "Processor time, user's and system's",
                Counter::default(),
            ),
            resident: add(
                r,
                "process_resident_memory_bytes",
                "Resident memory",
                Float::default(),
            ),
            virtual_size: add(
                r,
                "process_virtual_memory_bytes",
                "Virtual memory",
                Float::default(),
            ),
            open_files: add(
                r,
                "process_open_fds",
                "Open file descriptors",
                Gauge::default(),
            ),
            max_files: add(
                r,
                "process_max_fds",
                "Most file descriptors that may be open",
                Float::default(),
            ),
        }
    }

    /// Reads /proc. What can't be read stays.
    pub(super) fn look(&self) {
        if let Some(cpu) = cpu() {
            self.cpu.inc_by((cpu - self.cpu.get()).max(0.0));
        }
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |name: &str| Some(number_after(&status, name)? * 1024.0);
        bytes("VmRSS:").map(|bytes| self.resident.set(bytes));
        bytes("VmSize:").map(|bytes| self.virtual_size.set(bytes));
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // One of them reads the folder.
            let files = i64::try_from(files.count()).unwrap_or(i64::MAX) - 1;
            self.open_files.set(files);
        }
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        number_after(&limits, "Max open files").map(|most| self.max_files.set(most));
    }
}

/// The first word after a name at the start of a line.
fn number_after(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// A field of /proc/self/stat, by its number in proc(5). The name before, in parentheses, may hold
/// blanks.
fn stat(field: usize) -> Option<f64> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    let rest = text.rsplit_once(')')?.1;
    rest.split_whitespace().nth(field - 3)?.parse().ok()
}

fn cpu() -> Option<f64> {
    Some((stat(14)? + stat(15)?) / TICKS_A_SECOND)
}

fn start() -> Option<f64> {
    let boot = number_after(&fs::read_to_string("/proc/stat").ok()?, "btime")?;
    Some(boot + stat(22)? / TICKS_A_SECOND)
}
