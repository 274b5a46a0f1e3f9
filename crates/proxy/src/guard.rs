//! Which addresses from outside of the cluster a Service may have on this node, and what of a Service is left out.
//!
//! Anybody who may write a Service may ask for any address ([`Service::external_ips`], CVE-2020-8554). One that
//! is somebody's already (a pod's, a host's that this node needs, a port on which this node listens) stays theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use ipvs_proxy_netlink::Protocol;

use crate::model::{Endpoint, Node, ObjectName, Service, Slice};
use crate::plan::Config;
use crate::state::Role;

/// Which addresses of a kind are served.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Allowed {
    /// All that nothing else speaks against.
    #[default]
    All,
    /// None.
    Nothing,
    /// Those in these networks.
    Networks(Vec<IpNet>),
}

impl Allowed {
    fn holds(&self, address: IpAddr) -> bool {
        match self {
            Allowed::All => true,
            Allowed::Nothing => false,
            Allowed::Networks(networks) => networks.iter().any(|net| net.contains(&address)),
        }
    }
}

/// A port on which a process of the node listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listener {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its address; `None` for all of the node.
    pub address: Option<IpAddr>,
    /// Its port.
    pub port: u16,
}

/// An address that this node needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Needed {
    /// The address.
    pub address: IpAddr,
    /// The port at which the node uses it, for any protocol: it stays that host's. `None` where none is known.
    pub port: Option<u16>,
}

impl Needed {
    /// An address of which no port is known by which it is used.
    #[must_use]
    pub fn host(address: IpAddr) -> Needed {
        Needed {
            address,
            port: None,
        }
    }
}

/// Why a part of a Service is not served, or not as others are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// No address of this kind is served, or none but those of other networks.
    NotAllowed,
    /// A loopback, link-local, multicast, unspecified or broadcast address.
    Reserved,
    /// It is in a network of pods.
    PodNetwork,
    /// An endpoint has it.
    Endpoint,
    /// The node needs that port of the address: of the API server, of a resolver.
    Needed,
    /// The node needs the address: of the API server, another node, a router, a resolver, a link's broadcasts. Its ports are served without it.
    Routed,
    /// A process of the node listens there.
    Listener,
    /// Another Service comes first that has this health check node port.
    HealthCheckNodePort,
    /// The Service has more virtual servers than this.
    VirtualServers(usize),
    /// The Service has more real servers, counted for each virtual server, than this.
    RealServers(usize),
}

impl Cause {
    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Cause::NotAllowed => "not-allowed",
            Cause::Reserved => "reserved",
            Cause::PodNetwork => "pod-network",
            Cause::Endpoint => "endpoint",
            Cause::Needed => "needed-by-node",
            Cause::Routed => "routed",
            Cause::Listener => "listener",
            Cause::HealthCheckNodePort => "health-check-node-port",
            Cause::VirtualServers(_) => "virtual-servers",
            Cause::RealServers(_) => "real-servers",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::NotAllowed => {
                "is not among the addresses that --external-ips, --load-balancer-ips or the feature \
                 gate AllowServiceExternalIPs allow"
            }
            Cause::Reserved => {
                "is a loopback, link-local, multicast, unspecified or broadcast address"
            }
            Cause::PodNetwork => "is in a network of pods",
            Cause::Endpoint => "is the address of an endpoint",
            Cause::Needed => "is a port that the node needs (of the API server or a resolver)",
            Cause::Routed => {
                "is an address that the node needs (of the API server, another node, a router, a resolver or a link's broadcasts)"
            }
            Cause::Listener => {
                "is a port of the node on which a process listens (--keep-node-listeners=false gives it away)"
            }
            Cause::HealthCheckNodePort => "is that of another Service, which comes first",
            Cause::VirtualServers(most) => {
                return write!(
                    f,
                    "is over the {most} virtual servers that a Service may have \
                     (--max-virtual-servers-per-service)"
                );
            }
            Cause::RealServers(most) => {
                return write!(
                    f,
                    "is over the {most} real servers that a Service may have, counted for each virtual \
                     server (--max-real-servers-per-service)"
                );
            }
        })
    }
}

/// A part of a Service that is not served, or not as others are ([`Cause::Routed`]).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refused {
    /// The Service.
    pub service: ObjectName,
    /// Why.
    pub cause: Cause,
    /// The first thing that this is about: an address and its field, or a virtual server.
    pub first: String,
    /// How many there are.
    pub count: usize,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused {
            service,
            cause,
            first,
            count,
        } = self;
        let routed = *cause == Cause::Routed;
        let (what, more) = match routed {
            true => (
                "its ports are served, but it is not made local to the node",
                "so are",
            ),
            false => ("not served", "nor are"),
        };
        write!(f, "Service {service}: {first} {cause}: {what}")?;
        match count {
            0 | 1 => Ok(()),
            count => write!(f, ", {more} {} more", count - 1),
        }
    }
}

/// What is known of addresses that are somebody's.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    /// How many endpoints that run on some node have an address. What a slice lists beside these may be anything, a VIP as well: it
    /// takes no address away.
    endpoints: BTreeMap<IpAddr, u32>,
    /// How many endpoints of the API server's own Service have an address and port.
    api_servers: BTreeMap<(IpAddr, u16), u32>,
    /// External addresses, with the Services that ask for them.
    asked: BTreeSet<(IpAddr, ObjectName)>,
    pod_cidrs: Vec<IpNet>,
    /// By whom, or by what, they are the node's to reach.
    needed: BTreeMap<Arc<str>, BTreeSet<Needed>>,
    /// By how many.
    needing: BTreeMap<Needed, u32>,
    listeners: BTreeSet<Listener>,
}

impl Guard {
    /// Why an external address may not be served, if so.
    pub(crate) fn refuses(
        &self,
        role: Role,
        address: IpAddr,
        node: &Node,
        config: &Config,
    ) -> Option<Cause> {
        let allowed = match role {
            Role::ExternalIp => &config.external_ips,
            _ => &config.load_balancer_ips,
        };
        if is_reserved(address) {
            return Some(Cause::Reserved);
        }
        if !allowed.holds(address) {
            return Some(Cause::NotAllowed);
        }
        // Of the node's own only ports can be somebody's: pods of the host network are endpoints there.
        if node.addresses.contains(&address) {
            return None;
        }
        let mut networks = self.pod_cidrs.iter().chain(&config.cluster_cidrs);
        if self.needs(address) {
            None
        } else if networks.any(|net| net.contains(&address)) {
            Some(Cause::PodNetwork)
        } else if self.endpoints.contains_key(&address) {
            Some(Cause::Endpoint)
        } else {
            None
        }
    }

    /// Whether the node needs an address, so that it is never local to the node.
    pub(crate) fn needs(&self, address: IpAddr) -> bool {
        let ports = (address, 0)..=(address, u16::MAX);
        let mut needed = self.needing.range(Needed::host(address)..);
        self.api_servers.range(ports).next().is_some()
            || needed
                .next()
                .is_some_and(|(needed, _)| needed.address == address)
    }

    /// Whether the node needs this port of an address.
    pub(crate) fn needs_port(&self, address: IpAddr, port: u16) -> bool {
        let needed = Needed {
            address,
            port: Some(port),
        };
        self.api_servers.contains_key(&(address, port)) || self.needing.contains_key(&needed)
    }

    /// Whether a process of the node listens there.
    pub(crate) fn listens(&self, protocol: Protocol, address: IpAddr, port: u16) -> bool {
        [None, Some(address)].into_iter().any(|address| {
            let listener = Listener {
                protocol,
                address,
                port,
            };
            self.listeners.contains(&listener)
        })
    }

    /// Notes what a Service asks for.
    pub(crate) fn note_service(
        &mut self,
        name: &ObjectName,
        old: Option<&Service>,
        new: Option<&Service>,
    ) {
        for address in old.into_iter().flat_map(asked_for) {
            self.asked.remove(&(*address, name.clone()));
        }
        let new = new.into_iter().flat_map(asked_for);
        self.asked
            .extend(new.map(|address| (*address, name.clone())));
    }

    /// Notes the endpoints of a slice; the Services that this touches.
    pub(crate) fn note_slice(
        &mut self,
        old: Option<&Slice>,
        new: Option<&Slice>,
    ) -> BTreeSet<ObjectName> {
        let mut changed = BTreeSet::new();
        // What stays is never gone in between.
        for endpoint in new.into_iter().flat_map(placed) {
            if count(&mut self.endpoints, endpoint.address) {
                changed.insert(endpoint.address);
            }
        }
        for at in new.into_iter().flat_map(of_api_server) {
            if count(&mut self.api_servers, at) {
                changed.insert(at.0);
            }
        }
        for endpoint in old.into_iter().flat_map(placed) {
            if discount(&mut self.endpoints, endpoint.address) {
                changed.insert(endpoint.address);
            }
        }
        for at in old.into_iter().flat_map(of_api_server) {
            if discount(&mut self.api_servers, at) {
                changed.insert(at.0);
            }
        }
        self.asking_for(&changed)
    }

    /// Notes the networks of this node's pods; the Services that this touches.
    pub(crate) fn note_pod_cidrs(&mut self, networks: &[IpNet]) -> BTreeSet<ObjectName> {
        if self.pod_cidrs == networks {
            return BTreeSet::new();
        }
        self.pod_cidrs = networks.to_vec();
        self.asked.iter().map(|(_, name)| name.clone()).collect()
    }

    /// Notes the addresses that the node needs; the Services that this touches.
    pub(crate) fn note_needed(
        &mut self,
        by: Arc<str>,
        needed: BTreeSet<Needed>,
    ) -> BTreeSet<ObjectName> {
        let old = self.needed.remove(&by).unwrap_or_default();
        // What stays is never gone in between.
        let mut changed = BTreeSet::new();
        for of in &needed {
            if count(&mut self.needing, *of) {
                changed.insert(of.address);
            }
        }
        for of in &old {
            if discount(&mut self.needing, *of) {
                changed.insert(of.address);
            }
        }
        if !needed.is_empty() {
            self.needed.insert(by, needed);
        }
        self.asking_for(&changed)
    }

    /// Notes where processes of the node listen; the Services that this touches.
    pub(crate) fn note_listeners(
        &mut self,
        listeners: BTreeSet<Listener>,
        node: &Node,
    ) -> BTreeSet<ObjectName> {
        if self.listeners == listeners {
            return BTreeSet::new();
        }
        self.listeners = listeners;
        self.asking_for(&node.addresses)
    }

    fn asking_for(&self, addresses: &BTreeSet<IpAddr>) -> BTreeSet<ObjectName> {
        if self.asked.is_empty() {
            return BTreeSet::new();
        }
        let asking = addresses.iter().flat_map(|address| {
            self.asked
                .range((*address, ObjectName::new("", ""))..)
                .take_while(move |(asked, _)| asked == address)
        });
        asking.map(|(_, name)| name.clone()).collect()
    }
}

/// Counts one more; whether it is the first.
fn count<T: Ord>(counts: &mut BTreeMap<T, u32>, of: T) -> bool {
    let count = counts.entry(of).or_default();
    *count = count.saturating_add(1);
    *count == 1
}

/// Counts one less; whether it was the last.
fn discount<T: Ord>(counts: &mut BTreeMap<T, u32>, of: T) -> bool {
    let Some(count) = counts.get_mut(&of) else {
        return false;
    };
    *count = count.saturating_sub(1);
    let last = *count == 0;
    if last {
        counts.remove(&of);
    }
    last
}

/// Where the API server is reached, by a slice of its own Service.
fn of_api_server(slice: &Slice) -> impl Iterator<Item = (IpAddr, u16)> {
    let own = slice.service.is_api_server();
    let ports = slice.ports.iter().filter(move |_| own);
    ports.flat_map(|port| {
        let endpoints = slice.endpoints.iter();
        endpoints.map(|endpoint| (endpoint.address, port.port))
    })
}

fn asked_for(service: &Service) -> impl Iterator<Item = &IpAddr> {
    service
        .external_ips
        .iter()
        .chain(&service.load_balancer_ips)
}

/// The endpoints of a slice that run on some node, as pods do.
fn placed(slice: &Slice) -> impl Iterator<Item = &Endpoint> {
    slice.endpoints.iter().filter(|endpoint| endpoint.placed)
}

/// An address that is no single host's anywhere, or one of every host.
fn is_reserved(address: IpAddr) -> bool {
    let of_family = match address {
        // 0.0.0.0/8 is "this network" (RFC 1122), 240.0.0.0/4 is reserved (RFC 1112); Linux routes to neither, but binds both.
        IpAddr::V4(v4) => v4.is_link_local() || matches!(v4.octets()[0], 0 | 240..),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    of_family || address.is_loopback() || address.is_multicast() || address.is_unspecified()
}
