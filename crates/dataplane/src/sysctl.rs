//! The sysctls without which Services do not work.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A sysctl, the value that it needs, and whether every kernel must have it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Needed {
    path: &'static str,
    value: String,
    /// Kernels without it do without.
    optional: bool,
    /// More is as good.
    at_least: bool,
}

fn needed(path: &'static str, value: &str) -> Needed {
    Needed {
        path,
        value: value.to_owned(),
        optional: false,
        at_least: false,
    }
}

/// What this kernel needs, by its version.
fn all(version: (u32, u32), strict_arp: bool) -> Vec<Needed> {
    let mut all = vec![
        // Connections to real servers are tracked: without it masquerading does not see them.
        needed("net/ipv4/vs/conntrack", "1"),
        // A connection whose real server is gone ends, so that its client is scheduled anew.
        needed("net/ipv4/vs/expire_nodest_conn", "1"),
        // A client's persistence ends when its real server's weight is 0.
        needed("net/ipv4/vs/expire_quiescent_template", "1"),
        // Pods are reached by forwarding.
        needed("net/ipv4/ip_forward", "1"),
    ];
    // A client that uses a port again is scheduled anew (1), so that it can't hold a draining real
    // server. Before 5.9 that cost it a second (Linux d752c3645717), so it stays where it was (0).
    let value = if version >= (5, 9) { "1" } else { "0" };
    all.push(Needed {
        optional: true,
        ..needed("net/ipv4/vs/conn_reuse_mode", value)
    });
    if strict_arp {
        // Only the link that has an address answers for it, and no VIP is a source of ARP.
        all.push(needed("net/ipv4/conf/all/arp_ignore", "1"));
        all.push(needed("net/ipv4/conf/all/arp_announce", "2"));
    }
    all
}

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
    pub needed: String,
    /// Why it could not be set.
    #[source]
    pub source: io::Error,
}

/// Sets the sysctls that IPVS with masquerading needs in the thread's network namespace, those
/// that differ only. `strict_arp` adds those by which the node answers ARP only for the addresses
/// of the asked link. Each failure is reported and stops no other.
pub fn set(strict_arp: bool) -> Vec<SysctlError> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    set_in(Path::new("/proc/sys"), &all(version(&release), strict_arp))
}

/// The sysctls of connection tracking (`net.netfilter.nf_conntrack_*`). `None` leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Conntrack {
    /// How many connections are tracked. The table gets as many buckets as that needs (a quarter) if
    /// it has fewer.
    pub max: Option<u32>,
    /// How long an established TCP connection is kept without traffic, in seconds.
    pub tcp_established_s: Option<u64>,
    /// The same of one in `CLOSE_WAIT`.
    pub tcp_close_wait_s: Option<u64>,
    /// Packets out of a TCP connection's window are not INVALID.
    pub tcp_be_liberal: bool,
    /// How long a flow of UDP is kept without traffic, in seconds.
    pub udp_s: Option<u64>,
    /// The same of one that was answered for some time.
    pub udp_stream_s: Option<u64>,
}

/// Sets the sysctls of connection tracking, those that differ only. The number of connections and of
/// buckets holds for the whole machine, and can be set in its first network namespace only; the
/// others are those of the thread's. Each failure is reported and stops no other.
pub fn set_conntrack(conntrack: &Conntrack) -> Vec<SysctlError> {
    set_in(Path::new("/proc/sys"), &of_conntrack(conntrack))
}

fn of_conntrack(conntrack: &Conntrack) -> Vec<Needed> {
    let number = |path, value: Option<u64>| value.map(|value| needed(path, &value.to_string()));
    let max = conntrack.max.map(u64::from);
    let all = [
        number("net/netfilter/nf_conntrack_max", max),
        number("net/netfilter/nf_conntrack_buckets", max.map(|max| max / 4)).map(|buckets| {
            Needed {
                at_least: true,
                ..buckets
            }
        }),
        number(
            "net/netfilter/nf_conntrack_tcp_timeout_established",
            conntrack.tcp_established_s,
        ),
        number(
            "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
            conntrack.tcp_close_wait_s,
        ),
        number(
            "net/netfilter/nf_conntrack_tcp_be_liberal",
            conntrack.tcp_be_liberal.then_some(1),
        ),
        number("net/netfilter/nf_conntrack_udp_timeout", conntrack.udp_s),
        number(
            "net/netfilter/nf_conntrack_udp_timeout_stream",
            conntrack.udp_stream_s,
        ),
    ];
    all.into_iter().flatten().collect()
}

fn set_in(root: &Path, all: &[Needed]) -> Vec<SysctlError> {
    let mut failed = Vec::new();
    for Needed {
        path,
        value,
        optional,
        at_least,
    } in all
    {
        let file: PathBuf = root.join(path);
        let present = match fs::read_to_string(&file) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if *optional && error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => String::new(),
        };
        let enough = *at_least
            && matches!((present.parse::<u64>(), value.parse()), (Ok(is), Ok(must)) if is >= must);
        if present != *value
            && !enough
            && let Err(source) = fs::write(&file, value)
        {
            let name = path.replace('/', ".");
            failed.push(SysctlError {
                name,
                present,
                needed: value.clone(),
                source,
            });
        }
    }
    failed
}

/// The first two numbers of a kernel's release; of one that has none, what new kernels have.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => (u32::MAX, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuse_by_version() {
        let mode = |release: &str| {
            let all = all(version(release), false);
            all.iter()
                .find(|n| n.path.ends_with("conn_reuse_mode"))
                .unwrap()
                .value
                .clone()
        };
        assert_eq!(mode("4.18.0-553.el8.x86_64"), "0");
        assert_eq!(mode("5.8.18"), "0");
        assert_eq!(mode("5.9.0"), "1");
        assert_eq!(mode("5.10.46"), "1");
        assert_eq!(mode("6.1.0-57-amd64"), "1");
        assert_eq!(mode("strange"), "1");
    }

    #[test]
    fn what_is_right_is_not_written_and_what_cannot_be_is_named() {
        let root = std::env::temp_dir().join(format!("sysctl-{}", std::process::id()));
        fs::create_dir_all(root.join("a")).unwrap();
        fs::write(root.join("a/right"), "1\n").unwrap();
        fs::write(root.join("a/wrong"), "0\n").unwrap();
        let absent = Needed {
            optional: true,
            ..needed("a/folder/absent", "1")
        };
        let more = Needed {
            at_least: true,
            ..needed("a/more", "100")
        };
        let less = Needed {
            at_least: true,
            ..needed("a/less", "100")
        };
        fs::write(root.join("a/more"), "101\n").unwrap();
        fs::write(root.join("a/less"), "99\n").unwrap();
        let all = [
            needed("a/right", "1"),
            needed("a/wrong", "1"),
            absent,
            more,
            less,
        ];
        assert!(set_in(&root, &all).is_empty());
        assert_eq!(fs::read_to_string(root.join("a/right")).unwrap(), "1\n");
        assert_eq!(fs::read_to_string(root.join("a/wrong")).unwrap(), "1");
        assert_eq!(fs::read_to_string(root.join("a/more")).unwrap(), "101\n");
        assert_eq!(fs::read_to_string(root.join("a/less")).unwrap(), "100");
        let failed = set_in(&root, &[needed("a/folder/absent", "1")]);
        let said = failed.first().unwrap().to_string();
        assert!(
            said.contains("a.folder.absent") && said.contains("sysctl -w"),
            "{said}"
        );
        fs::remove_dir_all(root).unwrap();
    }
}
