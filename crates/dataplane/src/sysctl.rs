//! The sysctls without which Services do not work.

use std::fs;
use std::path::PathBuf;

/// A sysctl, the value that it needs, and why.
const NEEDED: [(&str, &str); 4] = [
    // Connections to real servers are tracked: without it masquerading does not see them.
    ("net/ipv4/vs/conntrack", "1"),
    // A connection whose real server is gone ends, so that its client is scheduled anew.
    ("net/ipv4/vs/expire_nodest_conn", "1"),
    // A client's persistence ends when its real server's weight is 0.
    ("net/ipv4/vs/expire_quiescent_template", "1"),
    // Pods are reached by forwarding.
    ("net/ipv4/ip_forward", "1"),
];

/// A sysctl that is not as it must be and could not be set.
#[derive(Debug, thiserror::Error)]
#[error(
    "sysctl {name} is {present:?} and must be {needed:?}: set it with sysctl -w {name}={needed}"
)]
pub struct SysctlError {
    /// Its name, with dots.
    pub name: String,
    /// What it is now, empty when it can't be read.
    pub present: String,
    /// What it must be.
    pub needed: &'static str,
    /// Why it could not be set.
    #[source]
    pub source: std::io::Error,
}

/// Sets the sysctls that IPVS with masquerading needs in the thread's network namespace, those
/// that differ only. Each failure is reported and stops no other.
pub fn set() -> Vec<SysctlError> {
    let mut failed = Vec::new();
    for (path, needed) in NEEDED {
        let file = PathBuf::from("/proc/sys").join(path);
        let present = fs::read_to_string(&file)
            .unwrap_or_default()
            .trim()
            .to_owned();
        if present != needed
            && let Err(source) = fs::write(&file, needed)
        {
            failed.push(SysctlError {
                name: path.replace('/', "."),
                present,
                needed,
                source,
            });
        }
    }
    failed
}
