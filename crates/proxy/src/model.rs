//! What the cluster says, without Kubernetes types: compact, checked, in the words of this crate.
//!
//! Objects are translated at the door (the daemon's `translate`), and dropped.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use ipvs_proxy_netlink::{Family, Protocol};

use crate::guard::{Listener, Needed};

/// Namespace and name of an object. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

impl ObjectName {
    /// The name of an object in a namespace.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> ObjectName {
        ObjectName {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl ObjectName {
    /// The Service of the API server itself, `default/kubernetes`.
    #[must_use]
    pub fn is_api_server(&self) -> bool {
        &*self.namespace == "default" && &*self.name == "kubernetes"
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl fmt::Debug for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A Service that this proxy serves: not headless, not ExternalName, not another proxy's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Creation time in seconds since 1970 (`metadata.creationTimestamp`), where the object has
    /// one: the oldest Service wins a VIP and port that two of them claim.
    pub created: Option<i64>,
    /// `metadata.uid`, empty where the object has none: the tie-break after `created`.
    pub uid: Arc<str>,
    /// One ClusterIP for each family that the Service has.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses outside of the cluster that lead to it (`spec.externalIPs`).
    pub external_ips: Vec<IpAddr>,
    /// Addresses of load balancers that hand packets on unchanged (`status.loadBalancer.ingress`
    /// with an `ip`, and with `ipMode` VIP or none, KEP-1860).
    pub load_balancer_ips: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// `sessionAffinity: ClientIP`: how long a client stays with its endpoint, in seconds.
    pub affinity_timeout_s: Option<u32>,
    /// Which endpoints its ClusterIPs lead to (`spec.internalTrafficPolicy`, KEP-2086).
    pub internal_policy: TrafficPolicy,
    /// Which endpoints its node ports and outside addresses lead to (`spec.externalTrafficPolicy`).
    pub external_policy: TrafficPolicy,
    /// How long its real servers may drain (annotation `ipvs-proxy.io/drain-timeout`), `None` for
    /// what the process was told.
    pub drain_timeout: Option<DrainTimeout>,
    /// The port on which load balancers ask this node whether it has endpoints of the Service (`spec.healthCheckNodePort`), where
    /// they shall know: type LoadBalancer with `externalTrafficPolicy: Local`.
    pub health_check_node_port: Option<u16>,
}

/// Which endpoints may serve a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum TrafficPolicy {
    /// Those of all nodes, nearer ones where hints say so.
    #[default]
    Cluster,
    /// Those of this node. Clients from outside keep their address.
    Local,
}

/// How long a real server that is not wanted any more may keep its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DrainTimeout {
    /// As long as there are any.
    #[default]
    Unlimited,
    /// So long at most.
    After(Duration),
    /// Not at all: it goes at once.
    Now,
}

impl Service {
    /// It has addresses from outside of the cluster, or tells load balancers of this node.
    #[must_use]
    pub fn is_external(&self) -> bool {
        !self.external_ips.is_empty()
            || !self.load_balancer_ips.is_empty()
            || self.health_check_node_port.is_some()
    }

    /// The same without those addresses and that port.
    #[must_use]
    pub fn without_external(&self) -> Service {
        Service {
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            health_check_node_port: None,
            ..self.clone()
        }
    }
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name, empty for the only port of a Service. Joins it with a slice's port.
    pub name: Arc<str>,
    /// Its protocol: TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// The port on the Service's VIPs, never 0.
    pub port: u16,
    /// The port on the node's addresses, where one is allocated.
    pub node_port: Option<u16>,
}

/// An EndpointSlice of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The Service that it belongs to (label `kubernetes.io/service-name`).
    pub service: ObjectName,
    /// The family of its addresses.
    pub family: Family,
    /// The ports that every endpoint of the slice serves.
    pub ports: Vec<SlicePort>,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// The zone hints of its endpoints, each list once ([`Endpoint::zone_hints`]). Empty where no endpoint has any.
    pub zone_hints: Vec<Vec<Arc<str>>>,
}

/// A port of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlicePort {
    /// The name of the Service's port that it stands for.
    pub name: Arc<str>,
    /// Its protocol, which must be the Service port's too.
    pub protocol: Protocol,
    /// The port on the endpoint, never 0.
    pub port: u16,
}

/// An endpoint of an EndpointSlice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Its address (the first that the slice lists).
    pub address: IpAddr,
    /// It takes new connections.
    pub ready: bool,
    /// It answers, ready or on its way out.
    pub serving: bool,
    /// It is on its way out.
    pub terminating: bool,
    /// It runs on this node.
    pub local: bool,
    /// Its slice names the node on which it runs, as it does for each pod (`nodeName`).
    pub placed: bool,
    /// For which nodes it is hinted (`hints.forNodes`, KEP-3015).
    pub node_hint: Hint,
    /// For which zones it is hinted (`hints.forZones`, KEP-2433): the place in [`Slice::zone_hints`], counted from 1; `None`
    /// where it has no such hint.
    pub zone_hints: Option<NonZeroU16>,
}

/// Whether an endpoint is hinted for this node, or for its zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Hint {
    /// It has no hint.
    #[default]
    Absent,
    /// It has hints, and they name others.
    Elsewhere,
    /// A hint names it.
    Here,
}

/// This node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Node {
    /// All addresses of its links other than the dummy link: a VIP among them is not bound, and
    /// node ports are served on those that [`NodePortAddresses`] selects.
    pub addresses: BTreeSet<IpAddr>,
    /// The address of each family by which the cluster knows it.
    pub primary: Vec<IpAddr>,
    /// Its zone (label `topology.kubernetes.io/zone`): without one, hints for zones don't count.
    pub zone: Option<Arc<str>>,
}

impl Node {
    /// The first address of each family.
    #[must_use]
    pub fn primary_of(addresses: &[IpAddr]) -> Vec<IpAddr> {
        let first = |family| {
            addresses
                .iter()
                .find(|a| Family::of(**a) == family)
                .copied()
        };
        Family::ALL.into_iter().filter_map(first).collect()
    }
}

/// On which addresses of the node node ports are served (`--nodeport-addresses`). Never on
/// loopback and IPv6 link-local addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodePortAddresses {
    /// Networks that select their addresses. A family without any network has all its addresses,
    /// as with kube-proxy, unless `primary` or `localhost` was given.
    pub networks: Vec<IpNet>,
    /// The node's primary addresses (`primary`).
    pub primary: bool,
    /// The node's primary address of its family, whatever the Node says (`--bind-address`).
    pub bind_address: Option<IpAddr>,
    /// No address by itself (`localhost`, where IPVS serves nothing).
    pub localhost: bool,
}

impl NodePortAddresses {
    /// Whether node ports are served on an address of the node.
    #[must_use]
    pub fn select(&self, address: IpAddr, node: &Node) -> bool {
        let link_local = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        if address.is_loopback() || link_local {
            return false;
        }
        let family = Family::of(address);
        self.is_all(family)
            || self.networks.iter().any(|net| net.contains(&address))
            || self.primary
                && match self.bind_address {
                    Some(bound) if Family::of(bound) == family => bound == address,
                    _ => node.primary.contains(&address),
                }
    }

    /// The addresses of a family on which a process of the node listens to be reached where node ports are: the unspecified one
    /// for all, else those that are selected, and loopback's where it was asked for.
    #[must_use]
    pub fn to_listen_on(&self, family: Family, node: &Node) -> BTreeSet<IpAddr> {
        let (all, loopback) = match family {
            Family::V4 => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
            Family::V6 => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
        };
        if self.is_all(family) {
            return BTreeSet::from([all]);
        }
        let of_family = node.addresses.iter().filter(|a| Family::of(**a) == family);
        let mut addresses: BTreeSet<IpAddr> = of_family
            .filter(|address| self.select(**address, node))
            .copied()
            .collect();
        if self.localhost || self.networks.iter().any(|net| net.contains(&loopback)) {
            addresses.insert(loopback);
        }
        addresses
    }

    fn is_all(&self, family: Family) -> bool {
        let mut networks = self.networks.iter();
        let some = networks.any(|net| Family::of(net.addr()) == family);
        !some && !self.primary && !self.localhost
    }
}

/// One news of the cluster: the last word on one object, or on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The Service as it is now; `None` when it is gone or not ours to serve.
    Service(ObjectName, Option<Service>),
    /// The slice as it is now; `None` when it is gone or not ours to use.
    Slice(ObjectName, Option<Slice>),
    /// This node as its Node object, or a flag, says it is now. Addresses that it does not tell stay.
    Node(Node),
    /// The addresses that this node's links have now. From the first time on they count instead
    /// of those of [`Change::Node`].
    NodeAddresses(BTreeSet<IpAddr>),
    /// The networks of this node's pods (`spec.podCIDRs`), which count where the configuration says
    /// so. None are no word: those told before stay.
    PodCidrs(Vec<IpNet>),
    /// All addresses of one kind, or of one other node, that this node needs in order to work and to hear of any change: of the
    /// API server, of other nodes, of routers and resolvers. None of them is taken by a Service.
    Needed(Arc<str>, BTreeSet<Needed>),
    /// Where processes of this node listen.
    Listeners(BTreeSet<Listener>),
}
