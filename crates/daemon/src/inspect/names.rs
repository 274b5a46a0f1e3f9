//! Names of ports and addresses.

use std::collections::{BTreeSet, HashMap};
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use ipvs_proxy_netlink::Protocol;

/// How many addresses one run of `getent` is asked for: its answer fits into a pipe.
const ADDRESSES_A_RUN: usize = 100;
/// About how many runs there are for many addresses, and how many at once.
const RUNS: usize = 256;
const AT_ONCE: usize = 16;
/// How long all names of addresses may take, and how long the address of one name.
const PATIENCE: Duration = Duration::from_secs(3);
/// How often it is looked whether a run has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Names of ports (`services(5)`) and of addresses.
#[derive(Debug, Clone, Default)]
pub struct Names {
    by_port: HashMap<(u16, String), String>,
    by_name: HashMap<(String, String), u16>,
    hosts: HashMap<IpAddr, String>,
}

impl Names {
    /// The names of ports in the form of `/etc/services`; lines that have another are skipped.
    #[must_use]
    pub fn parse(services: &str) -> Names {
        let mut names = Names::default();
        for line in services.lines() {
            let words = line.split('#').next().unwrap_or_default();
            let mut words = words.split_whitespace();
            let (Some(name), Some((port, protocol))) = (
                words.next(),
                words.next().and_then(|word| word.split_once('/')),
            ) else {
                continue;
            };
            let Ok(port) = port.parse() else { continue };
            // The first line that fits wins, as `getservbyport(3)` and `getservbyname(3)` look.
            names
                .by_port
                .entry((port, protocol.to_owned()))
                .or_insert_with(|| name.to_owned());
            for name in std::iter::once(name).chain(words) {
                names
                    .by_name
                    .entry((name.to_owned(), protocol.to_owned()))
                    .or_insert(port);
            }
        }
        names
    }

    /// The names of ports of this system; none where it has no `/etc/services`.
    #[must_use]
    pub fn system() -> Names {
        Names::parse(&std::fs::read_to_string("/etc/services").unwrap_or_default())
    }

    /// Adds the names of these addresses, as `getent hosts` tells them: of `/etc/hosts`, then by all means that the system
    /// has. Each may cost a question to a name server; what is not told within 3 s has no name here, as an address that has
    /// none, and as all in a system without `getent`.
    #[must_use]
    pub fn with_hosts(self, addresses: &BTreeSet<IpAddr>) -> Names {
        self.with_hosts_of(Path::new("getent"), addresses, Instant::now() + PATIENCE)
    }

    /// The same, by a program of these arguments and until then.
    pub(super) fn with_hosts_of(
        mut self,
        getent: &Path,
        addresses: &BTreeSet<IpAddr>,
        deadline: Instant,
    ) -> Names {
        let all: Vec<&IpAddr> = addresses.iter().collect();
        let files = |some: &[&IpAddr]| ask(getent, &["-s", "hosts:files", "hosts"], some, deadline);
        for lines in all.chunks(ADDRESSES_A_RUN).filter_map(files) {
            self.add_hosts(&lines);
        }
        let left: Vec<&IpAddr> = all
            .into_iter()
            .filter(|address| self.host(**address).is_none())
            .collect();
        // A run that does not end tells nothing, so few are asked for in one.
        let together = (left.len() / RUNS).clamp(1, ADDRESSES_A_RUN);
        let groups = Mutex::new(left.chunks(together));
        let next = || groups.lock().unwrap_or_else(PoisonError::into_inner).next();
        let answers = || -> Vec<String> {
            let asked = std::iter::from_fn(next);
            asked
                .filter_map(|some| ask(getent, &["hosts"], some, deadline))
                .collect()
        };
        let lines = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(answers)).collect();
            let joined = threads.into_iter().filter_map(|thread| thread.join().ok());
            joined.flatten().collect::<Vec<_>>()
        });
        for lines in lines {
            self.add_hosts(&lines);
        }
        self
    }

    /// Adds names in the form of `/etc/hosts`.
    pub(super) fn add_hosts(&mut self, lines: &str) {
        for line in lines.lines() {
            let mut words = line.split_whitespace();
            if let (Some(Ok(address)), Some(name)) = (words.next().map(str::parse), words.next()) {
                self.hosts.entry(address).or_insert_with(|| name.to_owned());
            }
        }
    }

    pub(super) fn port(&self, port: u16, protocol: Protocol) -> Option<&str> {
        self.by_port
            .get(&(port, protocol.to_string()))
            .map(String::as_str)
    }

    pub(super) fn host(&self, address: IpAddr) -> Option<&str> {
        self.hosts.get(&address).map(String::as_str)
    }

    pub(super) fn port_of(&self, name: &str, protocol: Protocol) -> Option<u16> {
        self.by_name
            .get(&(name.to_owned(), protocol.to_string()))
            .copied()
    }
}

/// The first IPv4 address of a name, as the system resolves it, if it does so in time.
pub(super) fn look_up(host: &str) -> Option<Ipv4Addr> {
    let host = host.to_owned();
    let first = |address: std::net::SocketAddr| match address.ip() {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    };
    in_time(PATIENCE, move || {
        (host, 0).to_socket_addrs().ok()?.find_map(first)
    })
    .flatten()
}

/// What comes of it, unless it takes longer: it goes on by itself then.
pub(super) fn in_time<T: Send + 'static>(
    patience: Duration,
    body: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (told, answer) = mpsc::channel();
    std::thread::spawn(move || told.send(body()));
    answer.recv_timeout(patience).ok()
}

/// What `getent` says of addresses, if it ends in time.
fn ask(
    getent: &Path,
    arguments: &[&str],
    addresses: &[&IpAddr],
    deadline: Instant,
) -> Option<String> {
    if Instant::now() >= deadline {
        return None;
    }
    let mut child = Command::new(getent)
        .args(arguments)
        .args(addresses.iter().map(ToString::to_string))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    while child.try_wait().ok()?.is_none() {
        if Instant::now() >= deadline {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    let mut lines = Vec::new();
    child.stdout?.read_to_end(&mut lines).ok()?;
    Some(String::from_utf8_lossy(&lines).into_owned())
}
