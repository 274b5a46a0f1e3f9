//! Names of ports and addresses.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::process::{Command, Stdio};

use ipvs_proxy_netlink::Protocol;

/// How many addresses one run of `getent` is asked for: far below the longest command line.
const ADDRESSES_A_RUN: usize = 1000;

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

    /// Adds the names of these addresses, as `getent hosts` tells them. Each may cost a question
    /// to a name server; an address that has no name, or a system without `getent`, has none
    /// here either.
    #[must_use]
    pub fn with_hosts(mut self, addresses: &BTreeSet<IpAddr>) -> Names {
        let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        for some in addresses.chunks(ADDRESSES_A_RUN) {
            let mut getent = Command::new("getent");
            getent
                .arg("hosts")
                .args(some)
                .stdin(Stdio::null())
                .stderr(Stdio::null());
            let Ok(output) = getent.output() else { break };
            self.add_hosts(&String::from_utf8_lossy(&output.stdout));
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
