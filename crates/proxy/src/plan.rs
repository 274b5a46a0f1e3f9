//! What one Service needs in the kernel of one node: the one place that says so.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use ipset_rs::Entry;
use ipvs_netlink::{
    Persistence, PersistenceMask, RealServerKey, Scheduler, SchedulerFlags, VirtualServer,
    VirtualServerKey,
};
use ipvs_proxy_netlink::{Family, Protocol};

use crate::endpoints::Endpoints;
use crate::guard::{Allowed, Cause, Guard, Refused};
use crate::health::HealthPort;
use crate::model::{
    DrainTimeout, Node, NodePortAddresses, ObjectName, Service, ServicePort, Slice, TrafficPolicy,
};
use crate::rules;
use crate::state::{Key, Role, Set, State, Value};

/// What shapes the kernel's state besides the objects. Fixed while the process runs, but for the
/// networks of [`node_cidrs`](Self::node_cidrs).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The name of this node. Real servers come in an order of its own, so that the first connections of many nodes do not all
    /// go to one endpoint; without a name they come by their addresses.
    pub node_name: Arc<str>,
    /// The families that are served.
    pub families: Vec<Family>,
    /// The scheduler of every virtual server.
    pub scheduler: Scheduler,
    /// The pods' networks: what comes from there keeps its address on the way to a ClusterIP.
    pub cluster_cidrs: Vec<IpNet>,
    /// The pods' networks are those of this node's Node (`detectLocalMode: NodeCIDR`): none until
    /// [`Change::PodCidrs`](crate::model::Change::PodCidrs) tells them.
    pub node_cidrs: bool,
    /// The link by which pods' packets enter, instead of their networks: its name, or how the names of
    /// such links begin, with a `+` behind.
    pub pod_interface: Option<String>,
    /// Masquerade all that goes to a ClusterIP.
    pub masquerade_all: bool,
    /// The bit of the packet mark that asks for masquerading, 0 to 31.
    pub masquerade_bit: u8,
    /// Where node ports are served.
    pub node_port_addresses: NodePortAddresses,
    /// How long a real server may drain, for Services that say nothing else.
    pub drain_timeout: DrainTimeout,
    /// The bit of the packet mark by which packets to an address that this node needs are routed to this node, 0 to 31, another
    /// one than [`masquerade_bit`](Self::masquerade_bit).
    pub route_bit: u8,
    /// Masquerading picks ports at random (iptables 1.6.2 and later can say so).
    pub random_fully: bool,
    /// Virtual servers on addresses of these networks are never removed, nor are their real servers
    /// while no Service has the virtual server (`--ipvs-exclude-cidrs`).
    pub exclude_cidrs: Vec<IpNet>,
    /// Which external IPs are served.
    pub external_ips: Allowed,
    /// Which addresses of load balancers are served.
    pub load_balancer_ips: Allowed,
    /// A port of the node on which a process listens is not given to an external IP or load balancer that is the node's address.
    pub keep_node_listeners: bool,
    /// How many virtual servers a Service may have; zero for no bound.
    pub max_virtual_servers: usize,
    /// How many real servers a Service may have, counted for each virtual server; zero for no bound.
    pub max_real_servers: usize,
}

impl Default for Config {
    /// Both families, round robin, nothing known of the pods' networks.
    fn default() -> Config {
        Config {
            node_name: "".into(),
            families: Family::ALL.to_vec(),
            scheduler: Scheduler::RoundRobin,
            cluster_cidrs: Vec::new(),
            node_cidrs: false,
            pod_interface: None,
            masquerade_all: false,
            masquerade_bit: 14,
            route_bit: 13,
            node_port_addresses: NodePortAddresses::default(),
            drain_timeout: DrainTimeout::Unlimited,
            random_fully: true,
            exclude_cidrs: Vec::new(),
            external_ips: Allowed::All,
            load_balancer_ips: Allowed::All,
            keep_node_listeners: true,
            max_virtual_servers: 5_000,
            max_real_servers: 100_000,
        }
    }
}

/// What is needed whatever the Services are: sets, rules, the link.
#[must_use]
pub fn base(config: &Config) -> State {
    let mut state = State::new();
    for family in &config.families {
        state.extend(Set::all(*family).map(|set| (Key::Set(set), Value::Present)));
        for (table, rules) in rules::by_table(config, *family) {
            state.insert(Key::Rules(*family, table), Value::Rules(Box::new(rules)));
        }
    }
    state.insert(Key::Link, Value::Present);
    state
}

/// What one Service needs, and what of it is left out.
pub(crate) struct ServicePlan {
    /// Sorted by key, each key once.
    pub(crate) items: Vec<(Key, Value)>,
    pub(crate) refused: Vec<Refused>,
    /// Its health check node port.
    pub(crate) health: Option<(u16, HealthPort)>,
}

/// A port of a Service in one family, with the endpoints that serve it.
struct Served<'a> {
    family: Family,
    port: &'a ServicePort,
    /// By the policy `Cluster`.
    cluster: Vec<RealServerKey>,
    /// By the policy `Local`.
    local: Vec<RealServerKey>,
}

impl Served<'_> {
    fn by(&self, policy: TrafficPolicy) -> &[RealServerKey] {
        match policy {
            TrafficPolicy::Cluster => &self.cluster,
            TrafficPolicy::Local => &self.local,
        }
    }
}

/// What a Service needs, given all its slices: the ClusterIPs first, then node ports, load balancers' addresses and external IPs,
/// as much as [`Config::max_virtual_servers`] and [`Config::max_real_servers`] leave room for. Nothing grows with what does not fit.
pub(crate) fn plan<'a>(
    name: &ObjectName,
    service: &Service,
    slices: impl Iterator<Item = &'a Slice> + Clone,
    node: &Node,
    guard: &Guard,
    config: &Config,
) -> ServicePlan {
    let mut plan = Plan {
        config,
        service,
        node,
        guard,
        room: Room::new(config),
        made: BTreeSet::new(),
        items: Vec::new(),
        refused: BTreeMap::new(),
    };
    let mut served: Vec<Served<'_>> = Vec::new();
    let mut ready_here: BTreeMap<Family, BTreeSet<IpAddr>> = BTreeMap::new();
    for cluster_ip in &service.cluster_ips {
        let family = Family::of(*cluster_ip);
        if !config.families.contains(&family) {
            continue;
        }
        for (n, port) in service.ports.iter().enumerate() {
            if let Some(cause) = plan.room.lacks() {
                let key = virtual_server_key(*cluster_ip, port.port, port.protocol);
                plan.refuse(cause, || key.to_string(), service.ports.len() - n);
                break;
            }
            let zone = node.zone.as_deref();
            let all = Endpoints::of_port(slices.clone(), port, family, zone);
            plan.room.look(all.len());
            for key in all.local() {
                let entry = Entry::IpPortIp(key.address, port.protocol, key.port, key.address);
                plan.entry(family, Role::LoopBack, entry);
            }
            if service.health_check_node_port.is_some() {
                let ready = all.ready_here().map(|key| key.address);
                ready_here.entry(family).or_default().extend(ready);
            }
            let port = Served {
                family,
                port,
                cluster: all.taken(TrafficPolicy::Cluster),
                local: all.taken(TrafficPolicy::Local),
            };
            plan.vip(Role::ClusterIp, *cluster_ip, &port);
            served.push(port);
        }
    }
    plan.node_ports(&served);
    for (role, field, vips) in [
        (
            Role::LoadBalancer,
            "status.loadBalancer.ingress",
            &service.load_balancer_ips,
        ),
        (Role::ExternalIp, "spec.externalIPs", &service.external_ips),
    ] {
        let mut seen = BTreeSet::new();
        for vip in vips {
            let ports = || served.iter().filter(|s| s.family == Family::of(*vip));
            let Some(first) = ports().next().filter(|_| seen.insert(*vip)) else {
                continue;
            };
            if let Some(cause) = guard.refuses(role, *vip, node, config) {
                plan.refuse(cause, || format!("{field} {vip}"), 1);
            } else if let Some(cause) = plan.room.lacks() {
                let key = virtual_server_key(*vip, first.port.port, first.port.protocol);
                plan.refuse(cause, || key.to_string(), ports().count());
            } else {
                if guard.needs(*vip) && !node.addresses.contains(vip) {
                    plan.refuse(Cause::Routed, || format!("{field} {vip}"), 1);
                }
                for port in ports() {
                    plan.vip(role, *vip, port);
                }
            }
        }
    }
    let health = service
        .health_check_node_port
        .filter(|_| !served.is_empty());
    let health = health.map(|port| {
        for Served { family, .. } in &served {
            plan.entry(*family, Role::HealthCheckNodePort, Entry::Port(port));
        }
        let local_endpoints = ready_here.values().map(BTreeSet::len).max();
        let health = HealthPort {
            service: name.clone(),
            addresses: plan.to_listen_on(),
            local_endpoints: local_endpoints.unwrap_or_default(),
        };
        (port, health)
    });
    plan.items.sort_by_key(|(key, _)| *key);
    plan.items.dedup_by_key(|(key, _)| *key);
    let refused = plan.refused.into_iter();
    let refused = refused.map(|(cause, (first, count))| Refused {
        service: name.clone(),
        cause,
        first,
        count,
    });
    ServicePlan {
        items: plan.items,
        refused: refused.collect(),
        health,
    }
}

/// How much more a Service may have.
struct Room {
    virtual_servers: usize,
    real_servers: usize,
    /// Endpoints that may be looked at: one that is not ready costs time, too.
    looks: usize,
    most: (usize, usize),
}

impl Room {
    fn new(config: &Config) -> Room {
        let bound = |most| if most == 0 { usize::MAX } else { most };
        let real_servers = bound(config.max_real_servers);
        Room {
            virtual_servers: bound(config.max_virtual_servers),
            real_servers,
            looks: real_servers.saturating_mul(4),
            most: (config.max_virtual_servers, config.max_real_servers),
        }
    }

    /// Why there is no room for any more.
    fn lacks(&self) -> Option<Cause> {
        if self.virtual_servers == 0 {
            Some(Cause::VirtualServers(self.most.0))
        } else if self.real_servers == 0 || self.looks == 0 {
            Some(Cause::RealServers(self.most.1))
        } else {
            None
        }
    }

    fn look(&mut self, endpoints: usize) {
        self.looks = self.looks.saturating_sub(endpoints);
    }
}

struct Plan<'a> {
    config: &'a Config,
    service: &'a Service,
    node: &'a Node,
    guard: &'a Guard,
    room: Room,
    made: BTreeSet<VirtualServerKey>,
    items: Vec<(Key, Value)>,
    /// The first thing that was left out for a cause, and how many there are.
    refused: BTreeMap<Cause, (String, usize)>,
}

impl Plan<'_> {
    fn entry(&mut self, family: Family, role: Role, entry: Entry) {
        self.items
            .push((Key::Entry(Set { family, role }, entry), Value::Present));
    }

    fn refuse(&mut self, cause: Cause, first: impl FnOnce() -> String, count: usize) {
        let refused = self.refused.entry(cause).or_insert_with(|| (first(), 0));
        refused.1 = refused.1.saturating_add(count);
    }

    /// A VIP of this role. One that is an address of the node already is not bound to the link: the node keeps it when the Service
    /// goes, and keeps its other ports, and those on which it listens. Nor is one that the node needs, whose other ports are those
    /// of another host: packets to it are routed here by their mark.
    fn vip(&mut self, role: Role, address: IpAddr, served: &Served<'_>) {
        let (family, port) = (served.family, served.port);
        // Also where a ClusterIP has another role besides.
        let policy = match self.service.cluster_ips.contains(&address) {
            true => self.service.internal_policy,
            false => self.service.external_policy,
        };
        let servers = served.by(policy);
        let entry = Entry::IpPort(address, port.protocol, port.port);
        let of_node = self.node.addresses.contains(&address);
        if of_node
            && role != Role::ClusterIp
            && self.config.keep_node_listeners
            && self.guard.listens(port.protocol, address, port.port)
        {
            let key = virtual_server_key(address, port.port, port.protocol);
            return self.refuse(Cause::Listener, || key.to_string(), 1);
        }
        let routed = !of_node && role != Role::ClusterIp && self.guard.needs(address);
        if routed && self.guard.needs_port(address, port.port) {
            let key = virtual_server_key(address, port.port, port.protocol);
            return self.refuse(Cause::Needed, || key.to_string(), 1);
        }
        if !self.virtual_server(address, port.port, port.protocol, servers) {
            return;
        }
        self.masquerading(role, policy, family, entry);
        if of_node {
            self.entry(family, Role::Owned, entry);
            return;
        }
        if routed {
            let rule = Key::RoutingRule(family, rules::bit(self.config.route_bit));
            let route = Key::Route(address);
            self.items
                .extend([rule, route].map(|key| (key, Value::Present)));
            self.entry(family, Role::Routed, entry);
        } else {
            self.entry(family, Role::IpvsIps, Entry::Ip(address));
            self.items.push((Key::Address(address), Value::Present));
        }
        // Without a real server IPVS refuses by an ICMP error, which TCP on this very machine takes
        // note of only a second later; the filter refuses at once.
        if !servers.is_empty() {
            self.entry(family, Role::Serving, entry);
        }
    }

    /// The entries that say who is masqueraded on the way to an address of this role.
    fn masquerading(&mut self, role: Role, policy: TrafficPolicy, family: Family, entry: Entry) {
        match (role, policy) {
            (Role::ExternalIp, TrafficPolicy::Local) => {
                self.entry(family, Role::ExternalIpLocal, entry);
            }
            (Role::LoadBalancer, TrafficPolicy::Local) => {
                self.entry(family, role, entry);
                self.entry(family, Role::LoadBalancerLocal, entry);
            }
            _ => self.entry(family, role, entry),
        }
    }

    /// Where the health check node port is to be reached: as node ports are, and on the addresses of the Service's load balancers,
    /// which are local here.
    fn to_listen_on(&self) -> BTreeSet<IpAddr> {
        let mut all = BTreeSet::new();
        for family in &self.config.families {
            let selected = &self.config.node_port_addresses;
            let addresses = selected.to_listen_on(*family, self.node);
            if !addresses.iter().any(IpAddr::is_unspecified) {
                let vips = self.items.iter().filter_map(|(key, _)| match key {
                    Key::Address(vip) if Family::of(*vip) == *family => Some(*vip),
                    _ => None,
                });
                let balanced = |vip: &IpAddr| self.service.load_balancer_ips.contains(vip);
                all.extend(vips.filter(balanced));
            }
            all.extend(addresses);
        }
        all
    }

    /// The node ports on each address of the node that serves them.
    fn node_ports(&mut self, served: &[Served<'_>]) {
        let selected = &self.config.node_port_addresses;
        let node = self.node;
        let addresses = node.addresses.iter();
        let addresses: Vec<IpAddr> = addresses
            .filter(|address| selected.select(**address, node))
            .copied()
            .collect();
        let policy = self.service.external_policy;
        for served in served {
            let (family, port) = (served.family, served.port);
            let Some(number) = port.node_port else {
                continue;
            };
            for address in addresses.iter().filter(|a| Family::of(**a) == family) {
                if !self.virtual_server(*address, number, port.protocol, served.by(policy)) {
                    continue;
                }
                let owned = Entry::IpPort(*address, port.protocol, number);
                let (all, local, entry) = match port.protocol {
                    Protocol::Tcp => {
                        let entry = Entry::Port(number);
                        (Role::NodePortTcp, Role::NodePortLocalTcp, entry)
                    }
                    Protocol::Udp => {
                        let entry = Entry::Port(number);
                        (Role::NodePortUdp, Role::NodePortLocalUdp, entry)
                    }
                    _ => (Role::NodePortSctp, Role::NodePortLocalSctp, owned),
                };
                self.entry(family, all, entry);
                if policy == TrafficPolicy::Local {
                    self.entry(family, local, entry);
                }
                self.entry(family, Role::Owned, owned);
            }
        }
    }

    /// A virtual server with as many of these real servers as there is room for; whether there is room for it.
    fn virtual_server(
        &mut self,
        address: IpAddr,
        port: u16,
        protocol: Protocol,
        servers: &[RealServerKey],
    ) -> bool {
        let key = virtual_server_key(address, port, protocol);
        if self.made.contains(&key) {
            return true;
        }
        if let Some(cause) = self.room.lacks() {
            self.refuse(cause, || key.to_string(), 1);
            return false;
        }
        let fitting = servers.get(..self.room.real_servers).unwrap_or(servers);
        if fitting.len() < servers.len() {
            let cause = Cause::RealServers(self.room.most.1);
            self.refuse(cause, || format!("a part of {key}"), 1);
        }
        self.room.virtual_servers -= 1;
        self.room.real_servers -= fitting.len();
        self.made.insert(key);
        let server = VirtualServer {
            key,
            scheduler: self.config.scheduler,
            scheduler_flags: scheduler_flags(self.config.scheduler),
            persistence: self
                .service
                .affinity_timeout_s
                .map(|timeout_s| Persistence {
                    timeout_s,
                    mask: PersistenceMask::Prefix(Family::of(address).host_prefix()),
                }),
            one_packet: false,
            persistence_engine: None,
        };
        self.items.push((
            Key::VirtualServer(key),
            Value::VirtualServer(Arc::new(server)),
        ));
        self.items.extend(
            fitting
                .iter()
                .map(|s| (Key::RealServer(key, *s), Value::RealServer(1))),
        );
        true
    }
}

fn virtual_server_key(address: IpAddr, port: u16, protocol: Protocol) -> VirtualServerKey {
    VirtualServerKey::Address {
        address,
        port,
        protocol,
    }
}

/// The flags that a scheduler needs here. The hashing schedulers refuse the clients that hash to
/// a draining real server unless they may fall back to another; `mh` hashes the port too, as
/// kube-proxy has it.
fn scheduler_flags(scheduler: Scheduler) -> SchedulerFlags {
    match scheduler {
        Scheduler::SourceHash => SchedulerFlags::FALLBACK,
        Scheduler::MaglevHash => SchedulerFlags::FALLBACK.union(SchedulerFlags::PORT),
        _ => SchedulerFlags::NONE,
    }
}
