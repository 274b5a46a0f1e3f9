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

use crate::model::{Node, ObjectName, Service, Slice};
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

/// Why a part of a Service is not served.
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
    /// The node needs it: the API server, another node, a router, a resolver.
    Needed,
    /// A process of the node listens there.
    Listener,
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
            Cause::Listener => "listener",
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
            Cause::Needed => {
                "is an address that the node needs (of the API server, another node, a router or a resolver)"
            }
            Cause::Listener => {
                "is a port of the node on which a process listens (--keep-node-listeners=false gives it away)"
            }
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

/// A part of a Service that is not served.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refused {
    /// The Service.
    pub service: ObjectName,
    /// Why.
    pub cause: Cause,
    /// The first thing that is left out: an address and its field, or a virtual server.
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
        write!(f, "Service {service}: {first} {cause}: not served")?;
        match count {
            0 | 1 => Ok(()),
            count => write!(f, ", nor are {} more", count - 1),
        }
    }
}

/// What is known of addresses that are somebody's.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    /// How many endpoints of slices have an address.
    endpoints: BTreeMap<IpAddr, u32>,
    /// The same of the API server's own Service.
    api_servers: BTreeMap<IpAddr, u32>,
    /// External addresses, with the Services that ask for them.
    asked: BTreeSet<(IpAddr, ObjectName)>,
    pod_cidrs: Vec<IpNet>,
    /// By whom, or by what, they are the node's to reach.
    needed: BTreeMap<Arc<str>, BTreeSet<IpAddr>>,
    listeners: BTreeSet<Listener>,
}

impl Guard {
    /// How an external address is served, if it may be.
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
        if self.is_needed(address) {
            Some(Cause::Needed)
        } else if networks.any(|net| net.contains(&address)) {
            Some(Cause::PodNetwork)
        } else if self.endpoints.contains_key(&address) {
            Some(Cause::Endpoint)
        } else {
            None
        }
    }

    fn is_needed(&self, address: IpAddr) -> bool {
        let mut needed = self.needed.values();
        self.api_servers.contains_key(&address) || needed.any(|of| of.contains(&address))
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
        if let Some(slice) = new {
            for counts in self.counts(slice) {
                for endpoint in &slice.endpoints {
                    let count = counts.entry(endpoint.address).or_default();
                    *count = count.saturating_add(1);
                    if *count == 1 {
                        changed.insert(endpoint.address);
                    }
                }
            }
        }
        if let Some(slice) = old {
            for counts in self.counts(slice) {
                for endpoint in &slice.endpoints {
                    let Some(count) = counts.get_mut(&endpoint.address) else {
                        continue;
                    };
                    *count = count.saturating_sub(1);
                    if *count == 0 {
                        counts.remove(&endpoint.address);
                        changed.insert(endpoint.address);
                    }
                }
            }
        }
        self.asking_for(&changed)
    }

    fn counts(&mut self, slice: &Slice) -> impl Iterator<Item = &mut BTreeMap<IpAddr, u32>> {
        let api_server = slice.service.is_api_server();
        let api_servers = api_server.then_some(&mut self.api_servers);
        [&mut self.endpoints].into_iter().chain(api_servers)
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
        needed: BTreeSet<IpAddr>,
    ) -> BTreeSet<ObjectName> {
        let old = self.needed.remove(&by).unwrap_or_default();
        let changed = old.symmetric_difference(&needed).copied().collect();
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

fn asked_for(service: &Service) -> impl Iterator<Item = &IpAddr> {
    service
        .external_ips
        .iter()
        .chain(&service.load_balancer_ips)
}

/// An address that is no single host's anywhere, or one of every host.
fn is_reserved(address: IpAddr) -> bool {
    let of_family = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    of_family || address.is_loopback() || address.is_multicast() || address.is_unspecified()
}
