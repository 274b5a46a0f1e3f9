//! What a kernel holds: the same words for what is wanted, what was applied and what was read.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipset_rs::{Entry, SetName, SetType};
use ipvs_netlink::{Forwarding, RealServer, RealServerKey, VirtualServer, VirtualServerKey};
use ipvs_proxy_iptables::{Ruleset, Table};
use ipvs_proxy_netlink::Family;

/// The dummy link that holds the VIPs.
pub const LINK: &str = "kube-ipvs0";

/// The routing table with the VIPs that are not on the link ("IP" in ASCII). It is looked at for packets with a mark only.
pub const ROUTING_TABLE: u32 = 0x4950;

/// A role that a set plays. All but the last four are kube-proxy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Endpoints of this node, for a pod that reaches itself through its own Service.
    LoopBack,
    /// ClusterIP and port of each Service.
    ClusterIp,
    /// External addresses, masqueraded.
    ExternalIp,
    /// External addresses whose clients are kept.
    ExternalIpLocal,
    /// Load balancer addresses.
    LoadBalancer,
    /// Load balancer addresses whose clients are kept.
    LoadBalancerLocal,
    /// Load balancer addresses with source ranges.
    LoadBalancerFw,
    /// The source ranges.
    LoadBalancerSourceCidr,
    /// Load balancer addresses that this node itself may reach.
    LoadBalancerSourceIp,
    /// TCP node ports.
    NodePortTcp,
    /// TCP node ports whose clients are kept.
    NodePortLocalTcp,
    /// UDP node ports.
    NodePortUdp,
    /// UDP node ports whose clients are kept.
    NodePortLocalUdp,
    /// SCTP node ports, by node address.
    NodePortSctp,
    /// SCTP node ports whose clients are kept.
    NodePortLocalSctp,
    /// Health check node ports.
    HealthCheckNodePort,
    /// The VIPs on the dummy link: what the filter guards.
    IpvsIps,
    /// Ours, not kube-proxy's: virtual servers on addresses that are not on the dummy link, so
    /// that they are known as ours after a crash.
    Owned,
    /// Ours, not kube-proxy's: the firewall marks of virtual servers, for the same reason. A mark
    /// is the address with its number ([`mark_entry`]).
    Marks,
    /// Ours, not kube-proxy's: VIP and port that a virtual server with real servers serves now. It
    /// is what the filter lets pass: filled last, emptied first, so that no VIP and port ever reaches a
    /// socket of the host.
    Serving,
    /// Ours, not kube-proxy's: VIP and port of virtual servers whose address is another host's, which this node needs. Packets
    /// to them get a mark by which they are routed to this node; all others go on to that host.
    Routed,
}

/// The roles by whose entries packets reach a virtual server.
const SERVING: [Role; 2] = [Role::Serving, Role::Routed];

/// The roles whose entries own the virtual server on their address and port.
const OWNING: [Role; 5] = [
    Role::ClusterIp,
    Role::ExternalIp,
    Role::ExternalIpLocal,
    Role::LoadBalancer,
    Role::Owned,
];

/// The roles whose entries take others out of masquerading: so clients keep their address. Each entry stands beside one of
/// another role, which owns the virtual server or names the same node port.
const KEEPING: [Role; 4] = [
    Role::LoadBalancerLocal,
    Role::NodePortLocalTcp,
    Role::NodePortLocalUdp,
    Role::NodePortLocalSctp,
];

/// The set entries by which a virtual server is known as ours; each of them is enough. They come
/// before it is made and go after it is gone.
pub fn owning_entries(server: &VirtualServerKey) -> impl Iterator<Item = Key> + use<> {
    let family = server.family();
    let (roles, entry) = match *server {
        VirtualServerKey::Address {
            address,
            port,
            protocol,
        } => (&OWNING[..], Entry::IpPort(address, protocol, port)),
        VirtualServerKey::FirewallMark { mark, family } => {
            (&[Role::Marks][..], mark_entry(mark, family))
        }
    };
    roles.iter().map(move |role| {
        Key::Entry(
            Set {
                family,
                role: *role,
            },
            entry,
        )
    })
}

/// The entries that let packets pass to a virtual server on an address; none for one of a mark, which needs none.
pub fn serving_entries(server: &VirtualServerKey) -> impl Iterator<Item = Key> + use<> {
    let family = server.family();
    let entry = match *server {
        VirtualServerKey::Address {
            address,
            port,
            protocol,
        } => Some(Entry::IpPort(address, protocol, port)),
        VirtualServerKey::FirewallMark { .. } => None,
    };
    let entries = entry
        .into_iter()
        .flat_map(|entry| SERVING.map(|role| (role, entry)));
    entries.map(move |(role, entry)| Key::Entry(Set { family, role }, entry))
}

/// What an entry by which clients keep their address goes with: a virtual server, or the entry of the same node port for all
/// addresses of the node; `None` for an entry of another set.
#[must_use]
pub fn kept_with(set: Set, entry: &Entry) -> Option<Key> {
    let beside = |role| {
        let family = set.family;
        Key::Entry(Set { family, role }, *entry)
    };
    match *entry {
        Entry::IpPort(address, protocol, port) if KEEPING.contains(&set.role) => {
            Some(Key::VirtualServer(VirtualServerKey::Address {
                address,
                port,
                protocol,
            }))
        }
        Entry::Port(_) if set.role == Role::NodePortLocalTcp => Some(beside(Role::NodePortTcp)),
        Entry::Port(_) if set.role == Role::NodePortLocalUdp => Some(beside(Role::NodePortUdp)),
        _ => None,
    }
}

/// The entries that go with a key by [`kept_with`].
pub fn keeping_entries(key: &Key) -> impl Iterator<Item = Key> + use<> {
    let (family, entry) = match *key {
        Key::VirtualServer(VirtualServerKey::Address {
            address,
            port,
            protocol,
        }) => {
            let entry = Entry::IpPort(address, protocol, port);
            (Family::of(address), Some(entry))
        }
        Key::Entry(set, entry @ Entry::Port(_)) => (set.family, Some(entry)),
        _ => (Family::V4, None),
    };
    let key = *key;
    let entries = entry
        .into_iter()
        .flat_map(move |entry| KEEPING.map(|role| (Set { family, role }, entry)));
    let entries = entries.filter(move |(set, entry)| kept_with(*set, entry) == Some(key));
    entries.map(|(set, entry)| Key::Entry(set, entry))
}

/// The virtual server to which a set's entry lets packets pass, `None` for an entry of another set.
#[must_use]
pub fn served_by(set: Set, entry: &Entry) -> Option<VirtualServerKey> {
    match *entry {
        Entry::IpPort(address, protocol, port) if SERVING.contains(&set.role) => {
            Some(VirtualServerKey::Address {
                address,
                port,
                protocol,
            })
        }
        _ => None,
    }
}

/// A firewall mark as the entry of a set of [`Role::Marks`]: mark 7 is `0.0.0.7`, and `::7` in the
/// set of IPv6. (A set can't hold `0.0.0.0`, and no virtual server can have mark 0.)
#[must_use]
pub fn mark_entry(mark: u32, family: Family) -> Entry {
    Entry::Ip(match family {
        Family::V4 => IpAddr::V4(mark.into()),
        Family::V6 => IpAddr::V6(u128::from(mark).into()),
    })
}

/// The virtual server that a set's entry makes ours, `None` for an entry that owns none.
#[must_use]
pub fn owned_by(set: Set, entry: &Entry) -> Option<VirtualServerKey> {
    match *entry {
        Entry::IpPort(address, protocol, port) if OWNING.contains(&set.role) => {
            Some(VirtualServerKey::Address {
                address,
                port,
                protocol,
            })
        }
        Entry::Ip(address) if set.role == Role::Marks => {
            let mark = match address {
                IpAddr::V4(v4) => v4.to_bits(),
                IpAddr::V6(v6) => u32::try_from(v6.to_bits()).ok()?,
            };
            let family = set.family;
            Some(VirtualServerKey::FirewallMark { mark, family })
        }
        _ => None,
    }
}

/// Whether a virtual server is ours by what a kernel holds: its address is on the link, or a set
/// owns it. All others are somebody else's.
#[must_use]
pub fn is_ours(server: &VirtualServerKey, state: &State) -> bool {
    let bound = match server {
        VirtualServerKey::Address { address, .. } => state.contains_key(&Key::Address(*address)),
        VirtualServerKey::FirewallMark { .. } => false,
    };
    bound || owning_entries(server).any(|entry| state.contains_key(&entry))
}

const ROLES: [(Role, &str); 21] = [
    (Role::LoopBack, "LOOP-BACK"),
    (Role::ClusterIp, "CLUSTER-IP"),
    (Role::ExternalIp, "EXTERNAL-IP"),
    (Role::ExternalIpLocal, "EXTERNAL-IP-LOCAL"),
    (Role::LoadBalancer, "LOAD-BALANCER"),
    (Role::LoadBalancerLocal, "LOAD-BALANCER-LOCAL"),
    (Role::LoadBalancerFw, "LOAD-BALANCER-FW"),
    (Role::LoadBalancerSourceCidr, "LOAD-BALANCER-SOURCE-CIDR"),
    (Role::LoadBalancerSourceIp, "LOAD-BALANCER-SOURCE-IP"),
    (Role::NodePortTcp, "NODE-PORT-TCP"),
    (Role::NodePortLocalTcp, "NODE-PORT-LOCAL-TCP"),
    (Role::NodePortUdp, "NODE-PORT-UDP"),
    (Role::NodePortLocalUdp, "NODE-PORT-LOCAL-UDP"),
    (Role::NodePortSctp, "NODE-PORT-SCTP-HASH"),
    (Role::NodePortLocalSctp, "NODE-PORT-LOCAL-SCTP-HASH"),
    (Role::HealthCheckNodePort, "HEALTH-CHECK-NODE-PORT"),
    (Role::IpvsIps, "IPVS-IPS"),
    (Role::Owned, "IPVS-OWNED"),
    (Role::Marks, "IPVS-MARKS"),
    (Role::Serving, "IPVS-SERVING"),
    (Role::Routed, "IPVS-ROUTED"),
];

/// A set of ours: a role in one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Set {
    /// The family of its addresses, also of a bitmap of ports.
    pub family: Family,
    /// What it is for.
    pub role: Role,
}

impl Set {
    /// Every set of a family.
    pub fn all(family: Family) -> impl Iterator<Item = Set> {
        ROLES.iter().map(move |(role, _)| Set {
            family,
            role: *role,
        })
    }

    /// Its name in the kernel: `KUBE-CLUSTER-IP`, and `KUBE-6-CLUSTER-IP` for IPv6, cut to the
    /// kernel's 31 characters as kube-proxy cuts it.
    ///
    /// # Panics
    /// Never: all names are constants that fit.
    #[must_use]
    pub fn name(self) -> SetName {
        let role = ROLES
            .iter()
            .find(|(role, _)| *role == self.role)
            .map_or("", |(_, name)| name);
        let prefix = match self.family {
            Family::V4 => "KUBE-",
            Family::V6 => "KUBE-6-",
        };
        let full: String = prefix.chars().chain(role.chars()).take(31).collect();
        full.parse()
            .expect("the constants above are valid set names")
    }

    /// Its type in the kernel.
    #[must_use]
    pub fn kind(self) -> SetType {
        match self.role {
            Role::LoopBack | Role::LoadBalancerSourceIp => SetType::HashIpPortIp(self.family),
            Role::LoadBalancerSourceCidr => SetType::HashIpPortNet(self.family),
            Role::IpvsIps | Role::Marks => SetType::HashIp(self.family),
            Role::NodePortTcp
            | Role::NodePortLocalTcp
            | Role::NodePortUdp
            | Role::NodePortLocalUdp
            | Role::HealthCheckNodePort => SetType::BitmapPort,
            _ => SetType::HashIpPort(self.family),
        }
    }
}

/// What names one thing in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A set of ours.
    Set(Set),
    /// The constant iptables rules of a family in one table.
    Rules(Family, Table),
    /// The dummy link.
    Link,
    /// A member of a set of ours.
    Entry(Set, Entry),
    /// A virtual server.
    VirtualServer(VirtualServerKey),
    /// A real server of a virtual server.
    RealServer(VirtualServerKey, RealServerKey),
    /// An address on the dummy link.
    Address(IpAddr),
    /// The rule by which packets of a family with this mark are routed by [`ROUTING_TABLE`].
    RoutingRule(Family, u32),
    /// An address that [`ROUTING_TABLE`] routes to this node.
    Route(IpAddr),
}

/// The key in the words of the tools that show it.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Set(set) => write!(f, "set {}", set.name()),
            Key::Rules(Family::V4, table) => write!(f, "iptables rules in table {table}"),
            Key::Rules(Family::V6, table) => write!(f, "ip6tables rules in table {table}"),
            Key::Link => write!(f, "link {LINK}"),
            Key::Entry(set, entry) => write!(f, "entry {entry} of set {}", set.name()),
            Key::VirtualServer(vs) => write!(f, "virtual server {vs}"),
            Key::RealServer(vs, rs) => write!(f, "real server {rs} of {vs}"),
            Key::Address(address) => write!(f, "address {address} on {LINK}"),
            Key::RoutingRule(family, mark) => {
                let family = match family {
                    Family::V4 => "IPv4",
                    Family::V6 => "IPv6",
                };
                write!(
                    f,
                    "{family} routing rule for mark {mark:#x}/{mark:#x}, table {ROUTING_TABLE}"
                )
            }
            Key::Route(address) => write!(f, "local route {address} in table {ROUTING_TABLE}"),
        }
    }
}

/// What there is to say about a key besides that it is there. Compared whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// It is there: sets, entries, the link, addresses, routes.
    Present,
    /// A set of our name that other hands made with another type. Its entries don't count.
    OddSet,
    /// A link of our name that other hands made of another kind. Its addresses don't count.
    OddLink,
    /// The rules of a family in one table.
    Rules(Box<Ruleset>),
    /// The virtual server.
    VirtualServer(Arc<VirtualServer>),
    /// A real server as this proxy makes them, masqueraded and without thresholds: its weight.
    RealServer(u32),
    /// A real server that was made otherwise by other hands.
    OddRealServer(Box<RealServer>),
}

impl Value {
    /// The value of a real server that the kernel holds.
    #[must_use]
    pub fn of_real_server(server: &RealServer) -> Value {
        match (
            server.forwarding,
            server.upper_threshold,
            server.lower_threshold,
        ) {
            (Forwarding::Masquerade, 0, 0) => Value::RealServer(server.weight),
            _ => Value::OddRealServer(Box::new(*server)),
        }
    }

    /// The real server that this value stands for, `None` for other kinds of value.
    #[must_use]
    pub fn real_server(&self, key: RealServerKey) -> Option<RealServer> {
        match self {
            Value::RealServer(weight) => Some(RealServer {
                key,
                forwarding: Forwarding::Masquerade,
                weight: *weight,
                upper_threshold: 0,
                lower_threshold: 0,
            }),
            Value::OddRealServer(server) => Some(**server),
            _ => None,
        }
    }
}

/// What a kernel holds, or should hold, of ours.
pub type State = BTreeMap<Key, Value>;
