//! What the node needs, and where its processes listen: addresses and ports that no Service takes.
//!
//! Looked at when the loop starts and with each audit. A node that can't hear the API server because an earlier process gave
//! one of these addresses to a Service frees itself ([`Surroundings::free`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipset_rs::Entry;
use ipvs_netlink::VirtualServerKey;
use ipvs_proxy_core::guard::{Listener, Needed};
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::op::{Dataplane, Op, Outcome};
use ipvs_proxy_core::state::{Key, Role, State, serving_entries};
use ipvs_proxy_dataplane::routers::routers_and_broadcasts;
use ipvs_proxy_netlink::Protocol;
use tracing::warn;

use crate::translate::parse_address;

/// By whose name the addresses of the API server are needed.
pub const API_SERVER: &str = "API server";
/// The port of name servers.
const DNS: u16 = 53;
/// Where the node's resolvers are named: the second are those behind systemd's own.
const RESOLVERS: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// Sockets by protocol, and the state in which one waits for clients (`TCP_LISTEN`, `TCP_CLOSE` of <net/tcp_states.h>).
const SOCKETS: [(Protocol, &str, &str); 4] = [
    (Protocol::Tcp, "/proc/net/tcp", "0A"),
    (Protocol::Tcp, "/proc/net/tcp6", "0A"),
    (Protocol::Udp, "/proc/net/udp", "07"),
    (Protocol::Udp, "/proc/net/udp6", "07"),
];
/// How long a port stays the node's after nobody listens there any more: kubelet may be on its way back.
const KEPT: Duration = Duration::from_secs(600);

/// What was seen the last time.
#[derive(Debug, Default)]
pub struct Surroundings {
    needed: BTreeMap<Arc<str>, BTreeSet<Needed>>,
    listeners: BTreeMap<Listener, Instant>,
    told: BTreeSet<String>,
}

impl Surroundings {
    /// Looks again; what changed.
    pub fn look(&mut self, now: Instant) -> Vec<Change> {
        let mut changes = Vec::new();
        match routers_and_broadcasts() {
            Ok(hosts) => {
                changes.extend(self.need("routes", hosts.into_iter().map(Needed::host).collect()));
            }
            Err(error) => self.tell(format!("the node's routes can't be listed: {error}")),
        }
        let files = RESOLVERS.iter().filter_map(|path| {
            let file = File::open(path).ok()?;
            let lines = BufReader::new(file).lines().map_while(Result::ok);
            Some(resolvers(lines.take(1000)))
        });
        let resolvers = files.flatten().map(|address| Needed {
            address,
            port: Some(DNS),
        });
        changes.extend(self.need("resolvers", resolvers.collect()));
        for (protocol, path, waits) in SOCKETS {
            let Ok(file) = File::open(path) else { continue };
            let lines = BufReader::new(file).lines().map_while(Result::ok).skip(1);
            // The kernel lists what listens over TCP first.
            let first = |line: &String| protocol != Protocol::Tcp || state(line) == Some(waits);
            let sockets = lines.take_while(first);
            let sockets = sockets.filter_map(|line| listener(&line, protocol, waits));
            self.listeners
                .extend(sockets.map(|listener| (listener, now)));
        }
        self.listeners
            .retain(|_, seen| now.saturating_duration_since(*seen) < KEPT);
        changes.push(Change::Listeners(self.listeners.keys().copied().collect()));
        changes
    }

    /// Notes addresses that are needed, as a source of objects tells them.
    pub fn note(&mut self, change: &Change) {
        if let Change::Needed(by, addresses) = change {
            self.needed.insert(Arc::clone(by), addresses.clone());
        }
    }

    fn need(&mut self, by: &str, mut addresses: BTreeSet<Needed>) -> Option<Change> {
        addresses.retain(|needed| !needed.address.is_loopback());
        let old = self.needed.insert(by.into(), addresses.clone());
        (old.as_ref() != Some(&addresses)).then(|| Change::Needed(by.into(), addresses))
    }

    fn tell(&mut self, text: String) {
        if !self.told.contains(&text) {
            warn!("{text}");
            self.told.insert(text);
        }
    }

    /// Takes back the addresses that the node needs and that a Service has as an external one: for the time in which nobody
    /// can say what the objects are. A ClusterIP stays, which may well be the node's resolver.
    pub fn free(&mut self, kernel: &mut impl Dataplane) {
        // Rules don't matter here.
        let state = match kernel.read(&State::new()) {
            Ok(reading) => reading.state,
            Err(error) => return self.tell(format!("the kernel could not be read: {error}")),
        };
        let ops = to_free(&self.needed, &state);
        let outcomes = kernel.apply(&ops);
        for (op, outcome) in ops.iter().zip(outcomes) {
            match outcome {
                Outcome::Done | Outcome::Started => warn!(%op, "the node needs this address"),
                Outcome::Failed(error) => {
                    self.tell(format!("{op}: the node needs this address: {error}"))
                }
            }
        }
    }
}

/// What to remove from a kernel so that needed addresses lead where they should: first the address, then what marks packets, then
/// what IPVS does with the node's own packets to it.
fn to_free(needed: &BTreeMap<Arc<str>, BTreeSet<Needed>>, state: &State) -> Vec<Op> {
    let of_cluster = state.keys().filter_map(|key| match key {
        Key::Entry(set, Entry::IpPort(address, ..)) if set.role == Role::ClusterIp => {
            Some(*address)
        }
        _ => None,
    });
    let of_cluster: BTreeSet<IpAddr> = of_cluster.collect();
    let mut all: BTreeSet<Needed> = needed.values().flatten().copied().collect();
    // Behind the ClusterIP of the API server is what the node needs.
    let api_server = needed.get(API_SERVER);
    let at_api_server = |at: &VirtualServerKey| {
        let VirtualServerKey::Address { address, port, .. } = *at else {
            return false;
        };
        let port = Some(port);
        api_server.is_some_and(|needed| needed.contains(&Needed { address, port }))
    };
    all.extend(state.keys().filter_map(|key| match key {
        Key::RealServer(vs, server) if at_api_server(vs) => Some(Needed {
            address: server.address,
            port: Some(server.port),
        }),
        _ => None,
    }));
    all.retain(|needed| !of_cluster.contains(&needed.address));
    let bound: BTreeSet<IpAddr> = { all.iter().map(|needed| needed.address) }
        .filter(|address| state.contains_key(&Key::Address(*address)))
        .collect();
    let servers = state.keys().filter_map(|key| match key {
        Key::VirtualServer(vs @ VirtualServerKey::Address { address, port, .. }) => {
            let (address, port) = (*address, Some(*port));
            let taken = bound.contains(&address) || all.contains(&Needed { address, port });
            taken.then_some(vs)
        }
        _ => None,
    });
    let servers: Vec<&VirtualServerKey> = servers.collect();
    let entries = servers.iter().flat_map(|vs| serving_entries(vs));
    let entries = entries.filter(|entry| state.contains_key(entry));
    let addresses = bound.iter().map(|address| Key::Address(*address));
    let servers = servers.iter().map(|vs| Key::VirtualServer(**vs));
    addresses
        .chain(entries)
        .chain(servers)
        .map(Op::Remove)
        .collect()
}

/// The addresses that lines of resolv.conf name, zones of IPv6 link-local ones aside.
fn resolvers(lines: impl Iterator<Item = String>) -> BTreeSet<IpAddr> {
    let address = |line: String| {
        let mut words = line.split_whitespace();
        words.next().filter(|word| *word == "nameserver")?;
        parse_address(words.next()?)
    };
    lines.filter_map(address).collect()
}

fn state(line: &str) -> Option<&str> {
    line.split_whitespace().nth(3)
}

/// A line of /proc/net/tcp and the like: `0: 0100007F:1F90 00000000:0000 0A …`.
fn listener(line: &str, protocol: Protocol, waits: &str) -> Option<Listener> {
    state(line).filter(|state| *state == waits)?;
    let (address, port) = line.split_whitespace().nth(1)?.split_once(':')?;
    let word = |text: &str| Some(u32::from_str_radix(text, 16).ok()?.to_ne_bytes());
    let address: IpAddr = match address.len() {
        8 => Ipv4Addr::from(word(address)?).into(),
        32 => {
            let words: Option<Vec<[u8; 4]>> = (0..4)
                .map(|n| word(address.get(n * 8..n * 8 + 8)?))
                .collect();
            let bytes: [u8; 16] = words?.concat().try_into().ok()?;
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(Listener {
        protocol,
        address: (!address.is_unspecified()).then_some(address),
        port: u16::from_str_radix(port, 16).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use ipvs_proxy_core::memory::MemoryKernel;
    use ipvs_proxy_core::model::{ObjectName, Service, ServicePort, TrafficPolicy};
    use ipvs_proxy_core::plan::Config;
    use ipvs_proxy_core::planner::Planner;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Real sockets of both families, bound to one address and to all.
    #[test]
    fn listeners_are_seen() {
        let on_v4 = TcpListener::bind("127.0.0.1:0").unwrap();
        let on_v6 = TcpListener::bind("[::1]:0").unwrap();
        let on_all = TcpListener::bind("[::]:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut seen = Surroundings::default();
        let now = Instant::now();
        let listeners = |seen: &mut Surroundings, now| match seen.look(now).pop() {
            Some(Change::Listeners(listeners)) => listeners,
            other => panic!("{other:?}"),
        };
        let tcp = |listener: &TcpListener, address| Listener {
            protocol: Protocol::Tcp,
            address,
            port: listener.local_addr().unwrap().port(),
        };
        let expected = [
            tcp(&on_v4, Some(ip("127.0.0.1"))),
            tcp(&on_v6, Some(ip("::1"))),
            tcp(&on_all, None),
            Listener {
                protocol: Protocol::Udp,
                address: Some(ip("127.0.0.1")),
                port: udp.local_addr().unwrap().port(),
            },
        ];
        let found = listeners(&mut seen, now);
        assert!(found.is_superset(&expected.into()), "{found:?}");
        // One that restarts keeps its port meanwhile; one that is gone does not.
        drop((on_v4, on_v6, on_all, udp));
        let soon = listeners(&mut seen, now + KEPT / 2);
        assert!(soon.is_superset(&expected.into()), "{soon:?}");
        let later = listeners(&mut seen, now + KEPT * 2);
        assert!(later.is_disjoint(&expected.into()), "{later:?}");
    }

    #[test]
    fn resolvers_are_read() {
        let text = "# comment\nnameserver 10.0.0.1\nsearch a.example\nnameserver   fd00::1\nnameserver fe80::1%eth0\nnameserver\n";
        let found = resolvers(text.lines().map(str::to_owned));
        assert_eq!(found, [ip("10.0.0.1"), ip("fd00::1")].into());
    }

    /// An external address goes with its virtual servers although no object is known; a ClusterIP that is a resolver stays.
    #[test]
    fn a_node_frees_what_it_needs() {
        let service = Service {
            created: None,
            uid: "".into(),
            cluster_ips: vec![ip("10.96.0.10")],
            external_ips: vec![ip("192.0.2.1"), ip("192.0.2.2")],
            load_balancer_ips: vec![ip("192.0.2.3")],
            ports: vec![ServicePort {
                name: "".into(),
                protocol: Protocol::Tcp,
                port: 443,
                node_port: None,
            }],
            affinity_timeout_s: None,
            drain_timeout: None,
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            health_check_node_port: None,
        };
        let (mut kernel, now) = (MemoryKernel::new(), Instant::now());
        let mut before = Planner::new(Config::default());
        before.apply(Change::Service(ObjectName::new("a", "b"), Some(service)));
        loop {
            let ops = before.next(now);
            if ops.is_empty() {
                break;
            }
            let outcomes = kernel.apply(&ops);
            before.commit(ops.into_iter().zip(outcomes), now);
        }
        let mut surroundings = Surroundings::default();
        let at = |address, port| Needed {
            address: ip(address),
            port: Some(port),
        };
        let of_api_server = [
            at("10.96.0.10", 443),
            at("192.0.2.1", 6443),
            at("192.0.2.9", 6443),
        ];
        surroundings.note(&Change::Needed(API_SERVER.into(), of_api_server.into()));
        let router = [Needed::host(ip("192.0.2.3"))];
        surroundings.note(&Change::Needed("routes".into(), router.into()));
        surroundings.free(&mut kernel);
        let server = |address| {
            Key::VirtualServer(VirtualServerKey::Address {
                address,
                port: 443,
                protocol: Protocol::Tcp,
            })
        };
        for (address, stays) in [
            ("10.96.0.10", true),
            ("192.0.2.1", false),
            ("192.0.2.2", true),
            ("192.0.2.3", false),
        ] {
            let address = ip(address);
            assert_eq!(
                kernel.state.contains_key(&Key::Address(address)),
                stays,
                "{address}"
            );
            assert_eq!(
                kernel.state.contains_key(&server(address)),
                stays,
                "{address}"
            );
        }
    }
}
