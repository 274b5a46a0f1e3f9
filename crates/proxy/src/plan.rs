//! What one Service needs in the kernel of one node: the one place that says so.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use ipset_rs::Entry;
use ipvs_netlink::{
    Persistence, RealServerKey, Scheduler, SchedulerFlags, VirtualServer, VirtualServerKey,
};
use ipvs_proxy_netlink::{Family, Protocol};

use crate::endpoints;
use crate::model::{DrainTimeout, Node, NodePortAddresses, Service, ServicePort, Slice};
use crate::rules;
use crate::state::{Key, Role, Set, State, Value};

/// What shapes the kernel's state besides the objects. Fixed while the process runs, but for the
/// networks of [`node_cidrs`](Self::node_cidrs).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
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
    /// Masquerading picks ports at random (iptables 1.6.2 and later can say so).
    pub random_fully: bool,
    /// Virtual servers on addresses of these networks are never removed, nor are their real servers
    /// while no Service has the virtual server (`--ipvs-exclude-cidrs`).
    pub exclude_cidrs: Vec<IpNet>,
}

impl Default for Config {
    /// Both families, round robin, nothing known of the pods' networks.
    fn default() -> Config {
        Config {
            families: Family::ALL.to_vec(),
            scheduler: Scheduler::RoundRobin,
            cluster_cidrs: Vec::new(),
            node_cidrs: false,
            pod_interface: None,
            masquerade_all: false,
            masquerade_bit: 14,
            node_port_addresses: NodePortAddresses::default(),
            drain_timeout: DrainTimeout::Unlimited,
            random_fully: true,
            exclude_cidrs: Vec::new(),
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

/// What a Service needs, given all its slices. Sorted by key, each key once.
#[must_use]
pub fn plan<'a>(
    service: &Service,
    slices: impl Iterator<Item = &'a Slice> + Clone,
    node: &Node,
    config: &Config,
) -> Vec<(Key, Value)> {
    let mut plan = Plan {
        config,
        service,
        node,
        items: Vec::new(),
    };
    for cluster_ip in &service.cluster_ips {
        let family = Family::of(*cluster_ip);
        if !config.families.contains(&family) {
            continue;
        }
        for port in &service.ports {
            let all = endpoints::of_port(slices.clone(), port, family);
            for (key, _) in all.iter().filter(|(_, endpoint)| endpoint.local) {
                let entry = Entry::IpPortIp(key.address, port.protocol, key.port, key.address);
                plan.entry(family, Role::LoopBack, entry);
            }
            let servers = endpoints::serving(&all);
            plan.vip(Role::ClusterIp, *cluster_ip, port, &servers);
            for (role, vips) in [
                (Role::ExternalIp, &service.external_ips),
                (Role::LoadBalancer, &service.load_balancer_ips),
            ] {
                for vip in vips.iter().filter(|vip| Family::of(**vip) == family) {
                    plan.vip(role, *vip, port, &servers);
                }
            }
            plan.node_port(family, port, &servers);
        }
    }
    plan.items.sort_by_key(|(key, _)| *key);
    plan.items.dedup_by_key(|(key, _)| *key);
    plan.items
}

struct Plan<'a> {
    config: &'a Config,
    service: &'a Service,
    node: &'a Node,
    items: Vec<(Key, Value)>,
}

impl Plan<'_> {
    fn entry(&mut self, family: Family, role: Role, entry: Entry) {
        self.items
            .push((Key::Entry(Set { family, role }, entry), Value::Present));
    }

    /// A VIP of this role. One that is an address of the node already, or of its loopback, is not
    /// bound to the link: the node keeps it when the Service goes, and keeps its other ports.
    fn vip(&mut self, role: Role, address: IpAddr, port: &ServicePort, servers: &[RealServerKey]) {
        let family = Family::of(address);
        let entry = Entry::IpPort(address, port.protocol, port.port);
        self.entry(family, role, entry);
        self.virtual_server(address, port.port, port.protocol, servers);
        let elsewhere = self.node.addresses.contains(&address) || address.is_loopback();
        if elsewhere {
            self.entry(family, Role::Owned, entry);
            return;
        }
        self.entry(family, Role::IpvsIps, Entry::Ip(address));
        self.items.push((Key::Address(address), Value::Present));
        // Without a real server IPVS refuses by an ICMP error, which TCP on this very machine takes
        // note of only a second later; the filter refuses at once.
        if !servers.is_empty() {
            self.entry(family, Role::Serving, entry);
        }
    }

    /// The port on each address of the node that serves node ports.
    fn node_port(&mut self, family: Family, port: &ServicePort, servers: &[RealServerKey]) {
        let Some(number) = port.node_port else { return };
        let selected = &self.config.node_port_addresses;
        let addresses = self.node.addresses.iter().filter(|address| {
            Family::of(**address) == family && selected.select(**address, self.node)
        });
        for address in addresses {
            let entry = Entry::IpPort(*address, port.protocol, number);
            match port.protocol {
                Protocol::Tcp => self.entry(family, Role::NodePortTcp, Entry::Port(number)),
                Protocol::Udp => self.entry(family, Role::NodePortUdp, Entry::Port(number)),
                _ => self.entry(family, Role::NodePortSctp, entry),
            }
            self.entry(family, Role::Owned, entry);
            self.virtual_server(*address, number, port.protocol, servers);
        }
    }

    fn virtual_server(
        &mut self,
        address: IpAddr,
        port: u16,
        protocol: Protocol,
        servers: &[RealServerKey],
    ) {
        let key = VirtualServerKey::Address {
            address,
            port,
            protocol,
        };
        let server = VirtualServer {
            key,
            scheduler: self.config.scheduler,
            scheduler_flags: scheduler_flags(self.config.scheduler),
            persistence: self
                .service
                .affinity_timeout_s
                .map(|timeout_s| Persistence {
                    timeout_s,
                    prefix: Family::of(address).host_prefix(),
                }),
            one_packet: false,
            persistence_engine: None,
        };
        self.items.push((
            Key::VirtualServer(key),
            Value::VirtualServer(Arc::new(server)),
        ));
        self.items.extend(
            servers
                .iter()
                .map(|s| (Key::RealServer(key, *s), Value::RealServer(1))),
        );
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
