//! A planner, a kernel in memory and the objects of a small cluster, driven as the controller
//! drives them; and short words for objects.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod schedulers;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_core::memory::MemoryKernel;
use ipvs_proxy_core::model::{
    Change, Endpoint, Hint, Node, ObjectName, Service, ServicePort, Slice, SlicePort, TrafficPolicy,
};
use ipvs_proxy_core::op::{Dataplane, Op, Outcome, ReadError};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, State};
use ipvs_proxy_netlink::{Family, Protocol};

pub(crate) const TCP: Protocol = Protocol::Tcp;
pub(crate) const UDP: Protocol = Protocol::Udp;
pub(crate) const SCTP: Protocol = Protocol::Sctp;

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn vs(text: &str, protocol: Protocol) -> VirtualServerKey {
    let socket: std::net::SocketAddr = text.parse().unwrap();
    VirtualServerKey::Address {
        address: socket.ip(),
        port: socket.port(),
        protocol,
    }
}

pub(crate) fn rs(text: &str) -> RealServerKey {
    let socket: std::net::SocketAddr = text.parse().unwrap();
    RealServerKey {
        address: socket.ip(),
        port: socket.port(),
    }
}

pub(crate) fn name(name: &str) -> ObjectName {
    ObjectName::new("ns", name)
}

/// A Service without a creation time: its name is its place in the order.
pub(crate) fn service(cluster_ip: &str, ports: &[(&str, Protocol, u16)]) -> Service {
    let ports = ports.iter().map(|(name, protocol, port)| ServicePort {
        name: (*name).into(),
        protocol: *protocol,
        port: *port,
        node_port: None,
    });
    Service {
        created: None,
        uid: "".into(),
        cluster_ips: vec![ip(cluster_ip)],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: ports.collect(),
        affinity_timeout_s: None,
        drain_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
    }
}

pub(crate) fn external(mut service: Service, ips: &[&str]) -> Service {
    service.external_ips = ips.iter().map(|text| ip(text)).collect();
    service
}

pub(crate) fn balanced(mut service: Service, ips: &[&str]) -> Service {
    service.load_balancer_ips = ips.iter().map(|text| ip(text)).collect();
    service
}

/// With these node ports, in the order of its ports.
pub(crate) fn node_ports(mut service: Service, numbers: &[u16]) -> Service {
    for (port, number) in service.ports.iter_mut().zip(numbers) {
        port.node_port = Some(*number);
    }
    service
}

/// With these traffic policies: internal, external.
pub(crate) fn policies(mut service: Service, policies: [TrafficPolicy; 2]) -> Service {
    [service.internal_policy, service.external_policy] = policies;
    service
}

/// On this node.
pub(crate) fn here(endpoint: Endpoint) -> Endpoint {
    Endpoint {
        local: true,
        ..endpoint
    }
}

/// A node with this address and zone.
pub(crate) fn in_zone(address: &str, zone: Option<&str>) -> Change {
    Change::Node(Node {
        addresses: [ip(address)].into(),
        primary: Vec::new(),
        zone: zone.map(Into::into),
    })
}

pub(crate) fn sticky(mut service: Service, timeout_s: Option<u32>) -> Service {
    service.affinity_timeout_s = timeout_s;
    service
}

/// A slice; its family is that of its first endpoint, IPv4 if it has none.
pub(crate) fn slice(of: &str, ports: &[(&str, Protocol, u16)], endpoints: &[Endpoint]) -> Slice {
    let ports = ports.iter().map(|(name, protocol, port)| SlicePort {
        name: (*name).into(),
        protocol: *protocol,
        port: *port,
    });
    Slice {
        service: name(of),
        family: endpoints
            .first()
            .map_or(Family::V4, |e| Family::of(e.address)),
        ports: ports.collect(),
        endpoints: endpoints.to_vec(),
        zone_hints: Vec::new(),
    }
}

pub(crate) fn ready(address: &str) -> Endpoint {
    Endpoint {
        address: ip(address),
        ready: true,
        serving: true,
        terminating: false,
        local: false,
        placed: true,
        node_hint: Hint::Absent,
        zone_hints: None,
    }
}

pub(crate) fn unready(address: &str) -> Endpoint {
    Endpoint {
        ready: false,
        serving: false,
        ..ready(address)
    }
}

pub(crate) fn terminating(address: &str) -> Endpoint {
    Endpoint {
        ready: false,
        terminating: true,
        ..ready(address)
    }
}

/// Terminating, and it does not answer any more.
pub(crate) fn dead(address: &str) -> Endpoint {
    Endpoint {
        serving: false,
        ..terminating(address)
    }
}

pub(crate) fn put(of: &str, service: Service) -> Change {
    Change::Service(name(of), Some(service))
}

pub(crate) fn gone(of: &str) -> Change {
    Change::Service(name(of), None)
}

pub(crate) fn put_slice(of: &str, slice: Slice) -> Change {
    Change::Slice(name(of), Some(slice))
}

pub(crate) fn slice_gone(of: &str) -> Change {
    Change::Slice(name(of), None)
}

pub(crate) fn node(addresses: &[&str]) -> Change {
    let addresses = addresses.iter().map(|text| ip(text)).collect();
    Change::Node(Node {
        addresses,
        primary: Vec::new(),
        zone: None,
    })
}

/// The last word on each object, as an API server keeps it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Objects {
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, Slice>,
    node: Option<Change>,
}

impl Objects {
    pub(crate) fn take(&mut self, change: &Change) {
        match change.clone() {
            Change::Service(name, Some(service)) => drop(self.services.insert(name, service)),
            Change::Service(name, None) => drop(self.services.remove(&name)),
            Change::Slice(name, Some(slice)) => drop(self.slices.insert(name, slice)),
            Change::Slice(name, None) => drop(self.slices.remove(&name)),
            node => self.node = Some(node),
        }
    }

    /// A list of all, as a new process gets it.
    pub(crate) fn list(&self) -> Vec<Change> {
        let services = self
            .services
            .iter()
            .map(|(n, s)| Change::Service(n.clone(), Some(s.clone())));
        let slices = self
            .slices
            .iter()
            .map(|(n, s)| Change::Slice(n.clone(), Some(s.clone())));
        self.node
            .clone()
            .into_iter()
            .chain(services)
            .chain(slices)
            .collect()
    }
}

pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) planner: Planner,
    pub(crate) kernel: MemoryKernel,
    pub(crate) now: Instant,
    pub(crate) objects: Objects,
    /// Whether the exposure of VIPs is looked at after each op (slow in a large cluster).
    pub(crate) guarded: bool,
    /// How many ops failed.
    pub(crate) failed: usize,
}

impl World {
    pub(crate) fn new() -> World {
        World::with(Config::default())
    }

    pub(crate) fn with(config: Config) -> World {
        World {
            planner: Planner::new(config.clone()),
            config,
            kernel: MemoryKernel::new(),
            now: Instant::now(),
            objects: Objects::default(),
            guarded: true,
            failed: 0,
        }
    }

    /// A cluster that has come to rest.
    pub(crate) fn of(changes: impl IntoIterator<Item = Change>) -> World {
        let mut world = World::new();
        world.settled(changes);
        world
    }

    pub(crate) fn apply(&mut self, change: Change) {
        self.objects.take(&change);
        self.planner.apply(change);
    }

    pub(crate) fn apply_all(&mut self, changes: impl IntoIterator<Item = Change>) {
        changes.into_iter().for_each(|change| self.apply(change));
    }

    /// What is written for these changes, taken as one batch.
    pub(crate) fn settled(&mut self, changes: impl IntoIterator<Item = Change>) -> Vec<Op> {
        self.apply_all(changes);
        self.settle()
    }

    /// As [`World::settled`], but only what is written to IPVS, in words.
    pub(crate) fn ipvs(&mut self, changes: impl IntoIterator<Item = Change>) -> Vec<String> {
        in_ipvs(&self.settled(changes))
    }

    /// Time goes by; what is written to IPVS then.
    pub(crate) fn later(&mut self, time: Duration) -> Vec<String> {
        self.now += time;
        in_ipvs(&self.settle())
    }

    /// A reading of what is ours.
    pub(crate) fn read(&mut self) -> Result<State, ReadError> {
        self.kernel
            .read(self.planner.base())
            .map(|reading| reading.state)
    }

    /// As the controller reads.
    pub(crate) fn read_agreed(&mut self) -> Result<State, ReadError> {
        let reading = self.planner.read_agreed(&mut self.kernel);
        reading.map(|reading| reading.state)
    }

    pub(crate) fn look_at_drains(&mut self) {
        for server in self.planner.drains_due(self.now) {
            let connections = self.kernel.connections(server).unwrap();
            self.planner.observe(server, &connections, self.now);
        }
    }

    /// Everything a controller does once; whether there may be more to do.
    pub(crate) fn round(&mut self) -> bool {
        if self.planner.in_doubt()
            && let Ok(read) = self.read_agreed()
        {
            self.planner.resync(read, true, self.now);
        }
        self.kernel.guarded = self.guarded;
        let now = self.now;
        let step = self.planner.step(&mut self.kernel, &|| now);
        assert_eq!(self.kernel.leaks, []);
        let failed = step.ops.iter().filter(|(_, o)| *o != Outcome::Done);
        self.failed += failed.count();
        !step.rests || self.planner.in_doubt()
    }

    pub(crate) fn write(&mut self, ops: &[Op]) {
        self.kernel.guarded = self.guarded;
        let outcomes = self.kernel.apply(ops);
        assert_eq!(self.kernel.leaks, []);
        self.failed += outcomes.iter().filter(|o| **o != Outcome::Done).count();
        let results = ops.iter().cloned().zip(outcomes);
        self.planner.commit(results, self.now);
    }

    /// Works until there is nothing to do now; what was written.
    pub(crate) fn settle(&mut self) -> Vec<Op> {
        let before = self.kernel.log.len();
        for _ in 0..2000 {
            if !self.round() {
                return self.kernel.log[before..].to_vec();
            }
        }
        panic!("no end of ops");
    }

    /// A new process with the same objects, which has not read the kernel yet.
    pub(crate) fn crash(&mut self) {
        self.planner = Planner::new(self.config.clone());
        for change in self.objects.list() {
            self.planner.apply(change);
        }
    }

    pub(crate) fn restart(&mut self) {
        self.crash();
        let read = self.read_agreed().unwrap();
        self.planner.resync(read, true, self.now);
    }

    /// Somebody else writes to the kernel, and the next audit finds it.
    pub(crate) fn audit(&mut self) {
        self.planner.begin_reading();
        let read = self.read().unwrap();
        let drift = self.planner.differing(&read.into());
        let again = self.read().unwrap().into();
        let drift = self.planner.differing_again(drift, &again);
        self.planner.adopt(&drift, &again.state, self.now);
    }

    /// The plan from scratch for the objects as they are now.
    pub(crate) fn wanted(&self) -> State {
        let mut planner = Planner::new(self.config.clone());
        for change in self.objects.list() {
            planner.apply(change);
        }
        planner.desired()
    }

    /// Connections of a real server.
    pub(crate) fn connect(&mut self, of: VirtualServerKey, server: &str, count: u64) {
        self.kernel.connections.insert((of, rs(server)), count);
    }

    pub(crate) fn has(&self, of: VirtualServerKey) -> bool {
        self.kernel.state.contains_key(&Key::VirtualServer(of))
    }

    pub(crate) fn bound(&self, address: &str) -> bool {
        self.kernel.state.contains_key(&Key::Address(ip(address)))
    }

    /// The real servers of a virtual server: `10.0.0.1:80 w1`.
    pub(crate) fn servers(&self, of: VirtualServerKey) -> Vec<String> {
        let servers = self
            .kernel
            .state
            .iter()
            .filter_map(|(key, value)| match key {
                Key::RealServer(vs, rs) if *vs == of => {
                    Some(format!("{rs} w{}", value.real_server(*rs)?.weight))
                }
                _ => None,
            });
        servers.collect()
    }

    pub(crate) fn draining(&self) -> usize {
        self.planner.drains().1.count()
    }

    /// Every connection ends, and every pause and drain comes to its end.
    pub(crate) fn finish(&mut self) {
        self.kernel.refuse.clear();
        self.kernel.faults.clear();
        self.kernel.connections.clear();
        for _ in 0..50 {
            self.settle();
            match self.planner.next_deadline() {
                Some(deadline) => self.now = deadline.max(self.now) + Duration::from_millis(1),
                None => return,
            }
        }
        panic!(
            "there is always another deadline: {:?}",
            self.planner.next_deadline()
        );
    }

    /// The end is the plan from scratch, and nothing is left to write: not for another pass, not
    /// for a reading, not for a new process.
    pub(crate) fn at_rest(&mut self) {
        self.finish();
        same(&self.kernel.state, &self.wanted());
        assert_eq!(self.settle(), [], "a second pass");
        let read = self.read().unwrap();
        self.planner.resync(read, true, self.now);
        assert_eq!(self.settle(), [], "after a reading");
        self.restart();
        assert_eq!(self.settle(), [], "after a restart");
    }
}

/// Two states are the same; else only what differs is shown.
#[track_caller]
pub(crate) fn same(left: &State, right: &State) {
    let lacking: Vec<_> = right
        .iter()
        .filter(|(k, v)| left.get(k) != Some(v))
        .collect();
    let extra: Vec<_> = left
        .iter()
        .filter(|(k, v)| right.get(k) != Some(v))
        .collect();
    assert!(
        lacking.is_empty() && extra.is_empty(),
        "lacking: {lacking:?}\nextra: {extra:?}"
    );
}

/// The ops on virtual and real servers, in words.
pub(crate) fn in_ipvs(ops: &[Op]) -> Vec<String> {
    let servers = ops
        .iter()
        .filter(|op| matches!(op.key(), Key::VirtualServer(_) | Key::RealServer(..)));
    servers.map(ToString::to_string).collect()
}
