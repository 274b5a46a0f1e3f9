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
    /// What does as well.
    or: Or,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Or {
    Nothing,
    /// A higher number.
    More,
    /// One of these.
    Of(&'static [&'static str]),
}

impl Needed {
    fn is_met_by(&self, present: &str) -> bool {
        present == self.value
            || match self.or {
                Or::Nothing => false,
                Or::More => {
                    let numbers = (present.parse::<u64>(), self.value.parse());
                    matches!(numbers, (Ok(is), Ok(must)) if is >= must)
                }
                Or::Of(values) => values.contains(&present),
            }
    }

    fn name(&self) -> String {
        self.path.replace('/', ".")
    }

    /// Sets it if it differs.
    fn set(&self, root: &Path) -> Result<(), SysctlError> {
        let file = root.join(self.path);
        let present = match fs::read_to_string(&file) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if self.optional && error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) => String::new(),
        };
        if self.is_met_by(&present) {
            return Ok(());
        }
        fs::write(&file, &self.value).map_err(|source| SysctlError {
            name: self.name(),
            present,
            needed: self.value.clone(),
            source,
        })
    }
}

fn needed(path: &'static str, value: &str) -> Needed {
    Needed {
        path,
        value: value.to_owned(),
        optional: false,
        or: Or::Nothing,
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
        all.extend(of_strict_arp());
    }
    all
}

/// Only the link that has an address answers for it, and no VIP is a source of ARP.
fn of_strict_arp() -> [Needed; 2] {
    let ignore = Needed {
        // Only senders of the address's network are answered; nobody is.
        or: Or::Of(&["2", "8"]),
        ..needed("net/ipv4/conf/all/arp_ignore", "1")
    };
    [ignore, needed("net/ipv4/conf/all/arp_announce", "2")]
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

/// Strict ARP, and what it found: its end puts that back, where nobody changed it since.
#[derive(Debug)]
pub struct StrictArp {
    root: PathBuf,
    /// What was there before, a line each: `net/ipv4/conf/all/arp_ignore=0`.
    record: PathBuf,
}

impl StrictArp {
    /// By this file, which need not be there.
    #[must_use]
    pub fn new(record: &Path) -> StrictArp {
        StrictArp {
            root: PathBuf::from("/proc/sys"),
            record: record.to_owned(),
        }
    }

    /// Notes what [`set`] is going to change; or, where strict ARP is not wanted any more, puts back what
    /// it changed.
    ///
    /// # Errors
    /// When that can't be noted, or put back.
    pub fn keep(&self, wanted: bool) -> io::Result<()> {
        match (wanted, fs::read_to_string(&self.record)) {
            // Noted when it began.
            (true, Ok(_)) => Ok(()),
            (true, Err(_)) => self.note(),
            (false, Ok(before)) => self.put_back(&before),
            (false, Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            (false, Err(error)) => Err(error),
        }
    }

    fn note(&self) -> io::Result<()> {
        let mut before = String::new();
        for needed in of_strict_arp() {
            let present = fs::read_to_string(self.root.join(needed.path))?;
            if !needed.is_met_by(present.trim()) {
                before += &format!("{}={}\n", needed.path, present.trim());
            }
        }
        match before.is_empty() {
            true => Ok(()),
            false => fs::write(&self.record, before),
        }
    }

    fn put_back(&self, before: &str) -> io::Result<()> {
        for needed in of_strict_arp() {
            let mut lines = before.lines().filter_map(|line| line.split_once('='));
            let Some((_, value)) = lines.find(|(path, _)| *path == needed.path) else {
                continue;
            };
            let file = self.root.join(needed.path);
            if fs::read_to_string(&file)?.trim() == needed.value {
                fs::write(&file, value)?;
            }
        }
        fs::remove_file(&self.record)
    }
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

/// Sysctls that are set once: what a person sets later stays.
#[derive(Debug, Default)]
pub struct Once {
    left: Vec<Needed>,
}

impl Once {
    /// Those of connection tracking. The number of connections and of buckets holds for the whole
    /// machine, and can be set in its first network namespace only; the others are those of the
    /// thread's.
    #[must_use]
    pub fn conntrack(conntrack: &Conntrack) -> Once {
        Once {
            left: of_conntrack(conntrack),
        }
    }

    /// Sets those that were not set before, and that differ. Each failure is reported, stops no other,
    /// and is tried again with the next call.
    pub fn set(&mut self) -> Vec<SysctlError> {
        self.set_in(Path::new("/proc/sys"))
    }

    fn set_in(&mut self, root: &Path) -> Vec<SysctlError> {
        let failed = set_in(root, &self.left);
        self.left
            .retain(|needed| failed.iter().any(|failure| failure.name == needed.name()));
        failed
    }
}

fn of_conntrack(conntrack: &Conntrack) -> Vec<Needed> {
    let number = |path, value: Option<u64>| value.map(|value| needed(path, &value.to_string()));
    let max = conntrack.max.map(u64::from);
    let all = [
        number("net/netfilter/nf_conntrack_max", max),
        number("net/netfilter/nf_conntrack_buckets", max.map(|max| max / 4)).map(|buckets| {
            Needed {
                or: Or::More,
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
    all.iter()
        .filter_map(|needed| needed.set(root).err())
        .collect()
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
            or: Or::More,
            ..needed("a/more", "100")
        };
        let less = Needed {
            or: Or::More,
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

    /// A folder with the two sysctls of strict ARP.
    fn arp(name: &str, ignore: &str) -> (PathBuf, StrictArp) {
        let root = std::env::temp_dir().join(format!("arp-{name}-{}", std::process::id()));
        fs::create_dir_all(root.join("net/ipv4/conf/all")).unwrap();
        fs::write(
            root.join("net/ipv4/conf/all/arp_ignore"),
            format!("{ignore}\n"),
        )
        .unwrap();
        fs::write(root.join("net/ipv4/conf/all/arp_announce"), "0\n").unwrap();
        let strict = StrictArp {
            record: root.join("record"),
            root: root.clone(),
        };
        (root, strict)
    }

    fn present(root: &Path) -> [String; 2] {
        ["arp_ignore", "arp_announce"].map(|name| {
            let text = fs::read_to_string(root.join("net/ipv4/conf/all").join(name));
            text.unwrap().trim().to_owned()
        })
    }

    #[test]
    fn the_end_of_strict_arp_puts_back_what_was_there() {
        let (root, strict) = arp("end", "0");
        strict.keep(false).unwrap();
        assert_eq!(present(&root), ["0", "0"]);
        for _ in 0..2 {
            strict.keep(true).unwrap();
            assert!(set_in(&root, &of_strict_arp()).is_empty());
            assert_eq!(present(&root), ["1", "2"]);
        }
        strict.keep(false).unwrap();
        assert_eq!(present(&root), ["0", "0"]);
        // A second end leaves alone what somebody sets.
        fs::write(root.join("net/ipv4/conf/all/arp_ignore"), "1").unwrap();
        strict.keep(false).unwrap();
        assert_eq!(present(&root), ["1", "0"]);
        // So does an end after somebody changed it.
        strict.keep(true).unwrap();
        assert!(set_in(&root, &of_strict_arp()).is_empty());
        fs::write(root.join("net/ipv4/conf/all/arp_announce"), "1").unwrap();
        strict.keep(false).unwrap();
        assert_eq!(present(&root), ["1", "1"]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_stricter_than_strict_arp_stays() {
        for stricter in ["2", "8"] {
            let (root, strict) = arp(&format!("stricter-{stricter}"), stricter);
            strict.keep(true).unwrap();
            assert!(set_in(&root, &of_strict_arp()).is_empty());
            assert_eq!(present(&root), [stricter, "2"]);
            strict.keep(false).unwrap();
            assert_eq!(present(&root), [stricter, "0"]);
            fs::remove_dir_all(root).unwrap();
        }
        // With 3 the addresses of the dummy link are still answered for.
        let (root, _) = arp("other", "3");
        assert!(set_in(&root, &of_strict_arp()).is_empty());
        assert_eq!(present(&root), ["1", "2"]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_set_once_is_tried_until_it_is_set_and_left_alone_then() {
        let root = std::env::temp_dir().join(format!("once-{}", std::process::id()));
        fs::create_dir_all(root.join("net")).unwrap();
        let mut once = Once::conntrack(&Conntrack {
            max: Some(1000),
            udp_s: Some(10),
            ..Conntrack::default()
        });
        assert_eq!(once.set_in(&root).len(), 3);
        fs::create_dir_all(root.join("net/netfilter")).unwrap();
        fs::write(root.join("net/netfilter/nf_conntrack_buckets"), "4096\n").unwrap();
        assert!(once.set_in(&root).is_empty());
        let max = root.join("net/netfilter/nf_conntrack_max");
        assert_eq!(fs::read_to_string(&max).unwrap(), "1000");
        fs::write(&max, "5").unwrap();
        assert!(once.set_in(&root).is_empty());
        assert_eq!(fs::read_to_string(&max).unwrap(), "5");
        fs::remove_dir_all(root).unwrap();
    }
}
