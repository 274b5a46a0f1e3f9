//! Short words for the objects of a cluster, and a node that is driven as the controller drives
//! one: a planner with a kernel in memory, which tells what it holds as lines of text.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipset_rs::Entry;
use ipvs_netlink::{
    PersistenceMask, RealServerKey, Scheduler, SchedulerFlags, VirtualServer, VirtualServerKey,
};
use ipvs_proxy_core::endpoints::{Endpoints, Reason};
use ipvs_proxy_core::memory::MemoryKernel;
use ipvs_proxy_core::model::{
    Change, Endpoint, Hint, Node, ObjectName, Service, ServicePort, Slice, SlicePort, TrafficPolicy,
};
use ipvs_proxy_core::op::{Dataplane, Op};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, Role, Set, State, Value};
use ipvs_proxy_iptables::Table;
use ipvs_proxy_netlink::{Family, Protocol};

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn name(name: &str) -> ObjectName {
    ObjectName::new("ns1", name)
}

/// A virtual server: `10.20.30.41:80/tcp`.
pub(crate) fn vs(text: &str) -> VirtualServerKey {
    let (socket, protocol) = text.split_once('/').unwrap();
    let socket: SocketAddr = socket.parse().unwrap();
    let protocols = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
    let protocol = protocols
        .into_iter()
        .find(|p| p.to_string() == protocol)
        .unwrap();
    VirtualServerKey::Address {
        address: socket.ip(),
        port: socket.port(),
        protocol,
    }
}

/// A real server: `10.180.0.1:80`.
pub(crate) fn rs(text: &str) -> RealServerKey {
    let socket: SocketAddr = text.parse().unwrap();
    RealServerKey {
        address: socket.ip(),
        port: socket.port(),
    }
}

/// A Service on its way: `service("svc1").cluster_ip("10.20.30.41").tcp(80).node_port(3001)`.
#[derive(Clone)]
pub(crate) struct ServiceWords(ObjectName, Service);

pub(crate) fn service(of: &str) -> ServiceWords {
    let object = Service {
        created: None,
        uid: "".into(),
        cluster_ips: Vec::new(),
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: Vec::new(),
        affinity_timeout_s: None,
        drain_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
    };
    ServiceWords(name(of), object)
}

impl ServiceWords {
    pub(crate) fn cluster_ip(mut self, address: &str) -> ServiceWords {
        self.1.cluster_ips.push(ip(address));
        self
    }

    pub(crate) fn external_ip(mut self, address: &str) -> ServiceWords {
        self.1.external_ips.push(ip(address));
        self
    }

    /// An address of a load balancer.
    pub(crate) fn ingress(mut self, address: &str) -> ServiceWords {
        self.1.load_balancer_ips.push(ip(address));
        self
    }

    pub(crate) fn tcp(self, port: u16) -> ServiceWords {
        self.port(Protocol::Tcp, port)
    }

    pub(crate) fn udp(self, port: u16) -> ServiceWords {
        self.port(Protocol::Udp, port)
    }

    pub(crate) fn sctp(self, port: u16) -> ServiceWords {
        self.port(Protocol::Sctp, port)
    }

    /// A port whose name is `p` and its number.
    fn port(mut self, protocol: Protocol, port: u16) -> ServiceWords {
        let name = format!("p{port}").into();
        self.1.ports.push(ServicePort {
            name,
            protocol,
            port,
            node_port: None,
        });
        self
    }

    /// The node port of its last port.
    pub(crate) fn node_port(mut self, number: u16) -> ServiceWords {
        self.1.ports.last_mut().unwrap().node_port = Some(number);
        self
    }

    pub(crate) fn sticky(mut self, timeout_s: u32) -> ServiceWords {
        self.1.affinity_timeout_s = Some(timeout_s);
        self
    }

    /// `internalTrafficPolicy: Local`.
    pub(crate) fn internal_local(mut self) -> ServiceWords {
        self.1.internal_policy = TrafficPolicy::Local;
        self
    }

    /// `externalTrafficPolicy: Local`.
    pub(crate) fn external_local(mut self) -> ServiceWords {
        self.1.external_policy = TrafficPolicy::Local;
        self
    }

    /// Load balancers ask there.
    pub(crate) fn health_check(mut self, port: u16) -> ServiceWords {
        self.1.health_check_node_port = Some(port);
        self
    }

    pub(crate) fn created(mut self, at: i64) -> ServiceWords {
        self.1.created = Some(at);
        self
    }
}

impl From<ServiceWords> for Change {
    fn from(words: ServiceWords) -> Change {
        Change::Service(words.0, Some(words.1))
    }
}

/// A slice on its way: `slice("svc1").tcp(80).endpoint("10.180.0.1").local()`. Its name is that
/// of its Service unless told.
#[derive(Clone)]
pub(crate) struct SliceWords(ObjectName, Slice);

pub(crate) fn slice(of: &str) -> SliceWords {
    let (ports, endpoints) = (Vec::new(), Vec::new());
    SliceWords(
        name(of),
        Slice {
            service: name(of),
            family: Family::V4,
            ports,
            endpoints,
            zone_hints: Vec::new(),
        },
    )
}

impl SliceWords {
    pub(crate) fn named(mut self, slice: &str) -> SliceWords {
        self.0 = name(slice);
        self
    }

    /// It belongs to the API server's own Service.
    pub(crate) fn of_api_server(&mut self) {
        self.1.service = ObjectName::new("default", "kubernetes");
    }

    pub(crate) fn tcp(self, port: u16) -> SliceWords {
        self.port(Protocol::Tcp, port)
    }

    pub(crate) fn udp(self, port: u16) -> SliceWords {
        self.port(Protocol::Udp, port)
    }

    pub(crate) fn sctp(self, port: u16) -> SliceWords {
        self.port(Protocol::Sctp, port)
    }

    fn port(mut self, protocol: Protocol, port: u16) -> SliceWords {
        let name = format!("p{port}").into();
        self.1.ports.push(SlicePort {
            name,
            protocol,
            port,
        });
        self
    }

    /// The number of its last port on the endpoints, where it is not the one in its name.
    pub(crate) fn target(mut self, port: u16) -> SliceWords {
        self.1.ports.last_mut().unwrap().port = port;
        self
    }

    /// An endpoint of another node, ready until told otherwise. It decides the slice's family.
    pub(crate) fn endpoint(mut self, address: &str) -> SliceWords {
        let address = ip(address);
        self.1.family = Family::of(address);
        let (ready, serving, terminating, local) = (true, true, false, false);
        self.1.endpoints.push(Endpoint {
            address,
            ready,
            serving,
            terminating,
            local,
            placed: true,
            node_hint: Hint::Absent,
            zone_hints: None,
        });
        self
    }

    /// No node is named for the last endpoint: it may be anything.
    pub(crate) fn unplaced(self) -> SliceWords {
        self.last(|endpoint| endpoint.placed = false)
    }

    /// The last endpoint runs on this node.
    pub(crate) fn local(self) -> SliceWords {
        self.last(|endpoint| endpoint.local = true)
    }

    /// The last endpoint is hinted for this node.
    pub(crate) fn for_this_node(self) -> SliceWords {
        self.last(|endpoint| endpoint.node_hint = Hint::Here)
    }

    /// The last endpoint is hinted for another node.
    pub(crate) fn for_another_node(self) -> SliceWords {
        self.last(|endpoint| endpoint.node_hint = Hint::Elsewhere)
    }

    /// The last endpoint is hinted for these zones.
    pub(crate) fn for_zones(mut self, zones: &[&str]) -> SliceWords {
        let zones = zones.iter().map(|zone| Arc::from(*zone)).collect();
        self.1.zone_hints.push(zones);
        let place = NonZeroU16::new(self.1.zone_hints.len().try_into().unwrap());
        self.last(|endpoint| endpoint.zone_hints = place)
    }

    /// The last endpoint is on its way out and counts as ready (`publishNotReadyAddresses`).
    pub(crate) fn published(self) -> SliceWords {
        self.last(|endpoint| (endpoint.ready, endpoint.terminating) = (true, true))
    }

    /// The last endpoint takes no connection.
    pub(crate) fn not_ready(self) -> SliceWords {
        self.last(|endpoint| (endpoint.ready, endpoint.serving) = (false, false))
    }

    /// The last endpoint is on its way out and still serves.
    pub(crate) fn terminating(self) -> SliceWords {
        self.last(|endpoint| (endpoint.ready, endpoint.terminating) = (false, true))
    }

    /// The last endpoint is on its way out and serves no more.
    pub(crate) fn dying(self) -> SliceWords {
        self.terminating().last(|endpoint| endpoint.serving = false)
    }

    fn last(mut self, change: impl FnOnce(&mut Endpoint)) -> SliceWords {
        change(self.1.endpoints.last_mut().unwrap());
        self
    }
}

impl SliceWords {
    /// Why each endpoint of the port `p80` serves it in this zone, or why not.
    pub(crate) fn reasons(&self, policy: TrafficPolicy, zone: Option<&str>) -> Vec<Reason> {
        let port = ServicePort {
            name: "p80".into(),
            protocol: Protocol::Tcp,
            port: 80,
            node_port: None,
        };
        let slices = std::iter::once(&self.1);
        let endpoints = Endpoints::of_port(slices, &port, self.1.family, zone);
        endpoints.judged(policy).map(|(_, reason)| reason).collect()
    }
}

impl From<SliceWords> for Change {
    fn from(words: SliceWords) -> Change {
        Change::Slice(words.0, Some(words.1))
    }
}

/// This node: what it was told, its planner and its kernel.
pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) planner: Planner,
    pub(crate) kernel: MemoryKernel,
    pub(crate) now: Instant,
    told: Vec<Change>,
}

impl World {
    pub(crate) fn new() -> World {
        World::with(Config::default())
    }

    pub(crate) fn only(family: Family) -> World {
        World::with(Config {
            families: vec![family],
            ..Config::default()
        })
    }

    pub(crate) fn with(config: Config) -> World {
        World {
            planner: Planner::new(config.clone()),
            config,
            kernel: MemoryKernel::new(),
            now: Instant::now(),
            told: Vec::new(),
        }
    }

    /// A node with these addresses, the first of each family being its primary ones.
    pub(crate) fn node(&mut self, addresses: &[&str]) {
        let listed: Vec<IpAddr> = addresses.iter().map(|text| ip(text)).collect();
        let primary = Node::primary_of(&listed);
        self.tell(Change::Node(Node {
            addresses: listed.into_iter().collect(),
            primary,
            zone: None,
        }));
    }

    /// The zone of the node, of whose addresses nothing is said.
    pub(crate) fn zone(&mut self, zone: Option<&str>) {
        self.tell(Change::Node(Node {
            zone: zone.map(Arc::from),
            ..Node::default()
        }));
    }

    /// The addresses that the links of the node have now.
    pub(crate) fn links(&mut self, addresses: &[&str]) {
        self.tell(Change::NodeAddresses(
            addresses.iter().map(|text| ip(text)).collect(),
        ));
    }

    pub(crate) fn put(&mut self, object: impl Into<Change>) {
        self.tell(object.into());
    }

    pub(crate) fn no_service(&mut self, of: &str) {
        self.tell(Change::Service(name(of), None));
    }

    pub(crate) fn no_slice(&mut self, of: &str) {
        self.tell(Change::Slice(name(of), None));
    }

    fn tell(&mut self, change: Change) {
        self.told.push(change.clone());
        self.planner.apply(change);
    }

    /// Works until there is nothing to do now.
    pub(crate) fn settle(&mut self) {
        let now = self.now;
        self.planner
            .work(&mut self.kernel, &|| now, 1000)
            .expect("an end of ops");
    }

    /// Works on for this long.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        self.settle();
        while let Some(deadline) = self.planner.next_deadline().filter(|at| *at <= end) {
            self.now = deadline.max(self.now);
            self.settle();
        }
        self.now = end;
    }

    /// Reads the kernel whole.
    pub(crate) fn resync(&mut self, prune: bool) {
        let read = self.kernel.read(self.planner.base()).unwrap();
        self.planner.resync(read, prune, self.now);
    }

    /// A new process, which is told all that the last one was, then reads the kernel.
    pub(crate) fn restart(&mut self) {
        self.planner = Planner::new(self.config.clone());
        for change in &self.told {
            self.planner.apply(change.clone());
        }
        self.resync(true);
    }

    /// So many connections to a real server.
    pub(crate) fn connections(&mut self, server: &str, real_server: &str, count: u64) {
        self.kernel
            .connections
            .insert((vs(server), rs(real_server)), count);
    }

    /// Works until there is nothing to do now; the ops since the last call, in order.
    pub(crate) fn ops(&mut self) -> Vec<String> {
        self.settle();
        std::mem::take(&mut self.kernel.log)
            .iter()
            .map(Op::to_string)
            .collect()
    }

    /// The UDP flows that were forgotten since the last call: `VIP` for all, or `VIP -> server`.
    pub(crate) fn forgotten(&mut self) -> Vec<String> {
        self.settle();
        let flows = std::mem::take(&mut self.kernel.forgotten);
        let show = |(vs, rs): (VirtualServerKey, Option<RealServerKey>)| match rs {
            Some(rs) => format!("{vs} -> {rs}"),
            None => vs.to_string(),
        };
        flows.into_iter().map(show).collect()
    }

    /// The rules of a chain without their comments.
    pub(crate) fn chain(&mut self, family: Family, table: Table, name: &str) -> Vec<String> {
        self.settle();
        let Some(Value::Rules(rules)) = self.kernel.state.get(&Key::Rules(family, table)) else {
            panic!("no rules");
        };
        let mut tables = rules.tables.iter().filter(|t| t.table == table);
        let chains = &tables.next().unwrap().chains;
        let chain = chains.iter().find(|chain| chain.name == name).unwrap();
        chain
            .rules
            .iter()
            .map(|rule| without_comment(rule))
            .collect()
    }

    /// Works until there is nothing to do now; what the kernel holds then, in the lines of [`World::holds`].
    pub(crate) fn lines(&mut self) -> BTreeSet<String> {
        self.settle();
        lines(&self.kernel.state)
    }

    /// Works until there is nothing to do now, then compares all that the kernel holds with
    /// these lines, in any order:
    ///
    /// - `10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.1.1:80`: a virtual server with its real
    ///   servers. One that is not `rr`, persistent or has flags says so: `... (persistent 60) ->`,
    ///   and so does a weight that is not 1: `10.180.0.1:80 (weight 0)`.
    /// - `bound: 10.20.30.41`: the addresses on the dummy link.
    /// - `KUBE-CLUSTER-IP: 10.20.30.41,tcp:80`: the entries of a set.
    ///
    /// What follows from these is not listed but checked each time: all sets and the constant
    /// rules are there; KUBE-IPVS-IPS holds the bound addresses; KUBE-IPVS-SERVING the serving virtual
    /// servers on them, KUBE-IPVS-OWNED the others; and what the kernel holds is what the planner
    /// wants, but for real servers that drain.
    #[track_caller]
    pub(crate) fn holds(&mut self, expected: &[&str]) {
        self.settle();
        let state = self.kernel.state.clone();
        for (key, value) in self.planner.base() {
            assert_eq!(state.get(key), Some(value), "{key}");
        }
        let drains: BTreeSet<Key> = self
            .planner
            .drains()
            .1
            .map(|(vs, rs, _)| Key::RealServer(vs, rs))
            .collect();
        let mut lasting = state.clone();
        lasting.retain(|key, _| !drains.contains(key));
        assert_eq!(
            lasting,
            self.planner.desired(),
            "the kernel is not as planned"
        );

        let bound = bound(&state);
        let servers = state.keys().filter_map(|key| match key {
            Key::VirtualServer(VirtualServerKey::Address {
                address,
                port,
                protocol,
            }) => Some((*address, *protocol, *port)),
            _ => None,
        });
        let (on_link, elsewhere): (Vec<_>, Vec<_>) =
            servers.partition(|(address, ..)| bound.contains(address));
        // The filter refuses what has no real server for new connections.
        let serves = |(address, protocol, port): &(IpAddr, Protocol, u16)| {
            let vs = VirtualServerKey::Address {
                address: *address,
                protocol: *protocol,
                port: *port,
            };
            lasting
                .keys()
                .any(|key| matches!(key, Key::RealServer(of, _) if *of == vs))
        };
        let on_link: Vec<_> = on_link.into_iter().filter(serves).collect();
        let texts = |servers: &[(IpAddr, Protocol, u16)]| -> BTreeSet<String> {
            servers
                .iter()
                .map(|(a, p, n)| Entry::IpPort(*a, *p, *n).to_string())
                .collect()
        };
        assert_eq!(
            entries(&state, Role::Serving),
            texts(&on_link),
            "KUBE-IPVS-SERVING"
        );
        assert_eq!(
            entries(&state, Role::Owned),
            texts(&elsewhere),
            "KUBE-IPVS-OWNED"
        );
        let addresses: BTreeSet<String> = bound.iter().map(IpAddr::to_string).collect();
        assert_eq!(entries(&state, Role::IpvsIps), addresses, "KUBE-IPVS-IPS");

        let expected: BTreeSet<String> = expected.iter().map(|line| (*line).to_owned()).collect();
        assert_eq!(
            lines(&state),
            expected,
            "left: the kernel, right: as it should be"
        );
    }
}

fn bound(state: &State) -> BTreeSet<IpAddr> {
    let addresses = state.keys().filter_map(|key| match key {
        Key::Address(address) => Some(*address),
        _ => None,
    });
    addresses.collect()
}

/// The entries of a role's sets of both families.
fn entries(state: &State, of: Role) -> BTreeSet<String> {
    let entries = state.keys().filter_map(|key| match key {
        Key::Entry(Set { role, .. }, entry) if *role == of => Some(entry.to_string()),
        _ => None,
    });
    entries.collect()
}

/// The state in the lines of [`World::holds`].
fn lines(state: &State) -> BTreeSet<String> {
    let mut lines: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (key, value) in state {
        match (key, value) {
            (Key::VirtualServer(_), Value::VirtualServer(server)) => {
                lines.entry(format!("{} ->", title(server))).or_default();
            }
            (Key::RealServer(of, real_server), _) => {
                let Some(Value::VirtualServer(server)) = state.get(&Key::VirtualServer(*of)) else {
                    panic!("{key} has no virtual server");
                };
                let text = match value {
                    Value::RealServer(1) => real_server.to_string(),
                    Value::RealServer(weight) => format!("{real_server} (weight {weight})"),
                    odd => format!("{odd:?}"),
                };
                lines
                    .entry(format!("{} ->", title(server)))
                    .or_default()
                    .push(text);
            }
            (Key::Address(address), _) => {
                lines
                    .entry("bound:".to_owned())
                    .or_default()
                    .push(address.to_string());
            }
            (Key::Entry(set, entry), _) => {
                let derived = [Role::IpvsIps, Role::Serving, Role::Owned];
                if !derived.contains(&set.role) {
                    let line = lines.entry(format!("{}:", set.name())).or_default();
                    line.push(entry.to_string());
                }
            }
            _ => {}
        }
    }
    let join = |(title, items): (String, Vec<String>)| format!("{title} {}", items.join(", "));
    lines
        .into_iter()
        .map(join)
        .map(|line| line.trim_end().to_owned())
        .collect()
}

fn title(server: &VirtualServer) -> String {
    let mut title = server.key.to_string();
    if server.scheduler != Scheduler::RoundRobin {
        title += &format!(" ({})", server.scheduler);
    }
    if server.scheduler_flags != SchedulerFlags::NONE {
        title += &format!(" (flags {})", server.scheduler_flags.bits());
    }
    if let Some(persistence) = server.persistence {
        let address = match server.key {
            VirtualServerKey::Address { address, .. } => address,
            VirtualServerKey::FirewallMark { .. } => panic!("{title} has no address"),
        };
        // The client's whole address: netmask 255.255.255.255, prefix 128.
        let whole = if address.is_ipv4() { 32 } else { 128 };
        assert_eq!(persistence.mask, PersistenceMask::Prefix(whole), "{title}");
        title += &format!(" (persistent {})", persistence.timeout_s);
    }
    assert!(
        !server.one_packet && server.persistence_engine.is_none(),
        "{title}"
    );
    title
}

fn without_comment(rule: &str) -> String {
    const COMMENT: &str = "-m comment --comment \"";
    match rule.split_once(COMMENT) {
        None => rule.to_owned(),
        Some((before, rest)) => {
            let (_, after) = rest.split_once("\" ").unwrap();
            format!("{before}{after}")
        }
    }
}
