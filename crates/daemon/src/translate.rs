//! Kubernetes objects into the words of [`ipvs_proxy_core::model`], checked at the door.
//!
//! Three things can become of an object or of a part of it: it is taken; it is left out without
//! a word, because it is not for this proxy (headless, ExternalName, another proxy's); or it is
//! refused, because it can't be right, with one line that says where and why. A broken part
//! leaves the rest of its object working.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::SystemTime;

use ipnet::IpNet;
use ipvs_proxy_core::model;
use ipvs_proxy_netlink::{Family, Protocol};

use crate::config::parse_drain_timeout;
use crate::objects::{Endpoint, EndpointSlice, Labels, Metadata, Node, Service, ServiceSpec};

mod hints;

use hints::Hints;

/// `sessionAffinityConfig.clientIP.timeoutSeconds` where an object has none, in seconds.
const DEFAULT_AFFINITY_S: u32 = 10_800;
/// The longest timeout of session affinity that the API takes, in seconds.
const MAX_AFFINITY_S: u32 = 86_400;

/// The most refusals of one object that are told one by one.
const MOST_REFUSALS: usize = 10;
/// The most characters of a value that are told.
const LONGEST_VALUE: usize = 200;

/// What became of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translated<T> {
    /// Its namespace (`default` where it has none) and name.
    pub name: model::ObjectName,
    /// The object in our words; `None` when it is left out or refused whole.
    pub object: Option<T>,
    /// What of it can't be used.
    pub refusals: Vec<Refusal>,
}

/// A value that can't be used. Displays as one line:
/// `Service default/app1: spec.clusterIP: "10.96.0.300" is not an IP address`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Refusal {
    /// Kind, namespace and name: `Service default/app1`.
    pub object: String,
    /// The path of the field: `spec.ports[0].port`.
    pub field: String,
    /// The value as found, quoted when it is text.
    pub value: String,
    /// What is wrong with it and what is allowed; reads on from the value.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}: {} {}",
            self.object, self.field, self.value, self.reason
        )
    }
}

/// Namespace and name of an object; an object without a namespace is in `default`.
#[must_use]
pub fn object_name(namespace: Option<&str>, name: Option<&str>) -> model::ObjectName {
    let namespace = namespace.filter(|namespace| !namespace.is_empty());
    model::ObjectName::new(namespace.unwrap_or("default"), name.unwrap_or_default())
}

fn name_of(metadata: &Metadata) -> model::ObjectName {
    object_name(metadata.namespace.as_deref(), metadata.name.as_deref())
}

/// A Service. Headless ones, those of type ExternalName and those of another proxy are left out;
/// one without any usable clusterIP is refused whole.
#[must_use]
pub fn service(service: &Service) -> Translated<model::Service> {
    let name = name_of(&service.metadata);
    let mut refusals = Refusals::new("Service", &name.to_string());
    let object = match &service.spec {
        Some(spec) if is_served(&service.metadata, spec) => {
            let cluster_ips = cluster_ips(spec, &mut refusals);
            let ports = service_ports(spec, &mut refusals);
            let affinity_timeout_s = affinity(spec, &mut refusals);
            let internal = ("spec.internalTrafficPolicy", &spec.internal_traffic_policy);
            let external = ("spec.externalTrafficPolicy", &spec.external_traffic_policy);
            let [internal_policy, external_policy] =
                [internal, external].map(|(field, text)| policy(field, text, &mut refusals));
            let health_check_node_port = health_check_node_port(spec, &ports, &mut refusals);
            unsupported(spec, &mut refusals);
            let created = created(&service.metadata, &mut refusals);
            (!cluster_ips.is_empty()).then(|| model::Service {
                created,
                uid: service.metadata.uid.as_deref().unwrap_or_default().into(),
                cluster_ips,
                external_ips: external_ips(spec, &mut refusals),
                load_balancer_ips: load_balancer_ips(service, &mut refusals),
                ports,
                affinity_timeout_s,
                drain_timeout: drain_timeout(&service.metadata, &mut refusals),
                internal_policy,
                external_policy,
                health_check_node_port,
            })
        }
        _ => None,
    };
    Translated {
        name,
        object,
        refusals: refusals.all(),
    }
}

/// An EndpointSlice, as seen from the node `node_name`. Slices that name no Service, those of
/// headless Services and FQDN slices are left out.
#[must_use]
pub fn slice(slice: &EndpointSlice, node_name: &str) -> Translated<model::Slice> {
    let name = name_of(&slice.metadata);
    let mut refusals = Refusals::new("EndpointSlice", &name.to_string());
    let metadata = &slice.metadata;
    let service = label(metadata, |labels| &labels.service_name).unwrap_or_default();
    let mut object = None;
    if !service.is_empty() && label(metadata, |labels| &labels.headless).is_none() {
        let family = match slice.address_type.as_deref().unwrap_or_default() {
            "IPv4" => Some(Family::V4),
            "IPv6" => Some(Family::V6),
            "FQDN" => None,
            other => {
                refusals.text("addressType", other, "is not IPv4 or IPv6");
                None
            }
        };
        object = family.map(|family| {
            let ports = slice_ports(slice, &mut refusals);
            let listed = slice.endpoints.as_deref().unwrap_or_default();
            let mut hints = Hints::new(node_name);
            let endpoints = endpoints(listed, family, &mut hints, &mut refusals);
            model::Slice {
                service: model::ObjectName::new(&name.namespace, service),
                family,
                ports,
                endpoints,
                zone_hints: hints.zones,
            }
        });
    }
    Translated {
        name,
        object,
        refusals: refusals.all(),
    }
}

/// This node: its zone, and its addresses of the types InternalIP and ExternalIP. The first InternalIP of each
/// family is a primary one, or the first ExternalIP where a family has no other
/// (`GetNodeHostIPs` of Kubernetes).
#[must_use]
pub fn node(node: &Node) -> Translated<model::Node> {
    let name = name_of(&node.metadata);
    let mut refusals = Refusals::new("Node", &name.name);
    let listed = node
        .status
        .as_ref()
        .and_then(|status| status.addresses.as_deref());
    let mut addresses = BTreeSet::new();
    let (mut internal, mut external) = (Vec::new(), Vec::new());
    for (i, entry) in listed.unwrap_or_default().iter().enumerate() {
        let primary = match entry.type_.as_deref() {
            Some("InternalIP") => &mut internal,
            Some("ExternalIP") => &mut external,
            _ => continue,
        };
        let field = || format!("status.addresses[{i}].address");
        let text = entry.address.as_deref().unwrap_or_default();
        let address = refusals.address(field, text);
        let address = address.filter(|address| {
            let why = no_vip(*address);
            if let Some(why) = why {
                refusals.text(field(), text, format!("is {why}"));
            }
            why.is_none()
        });
        addresses.extend(address);
        primary.extend(address);
    }
    internal.extend(external);
    let primary = model::Node::primary_of(&internal);
    let zone = label(&node.metadata, |labels| &labels.zone);
    let zone = zone.filter(|zone| !zone.is_empty()).map(Arc::from);
    Translated {
        name,
        object: Some(model::Node {
            addresses,
            primary,
            zone,
        }),
        refusals: refusals.all(),
    }
}

/// The networks of a Node's pods (`spec.podCIDRs`), at most one for each family, and what of them
/// can't be used. `spec.podCIDR` counts where there are none.
#[must_use]
pub fn pod_cidrs(node: &Node) -> (Vec<IpNet>, Vec<Refusal>) {
    let name = name_of(&node.metadata);
    let mut refusals = Refusals::new("Node", &name.name);
    let spec = node.spec.as_ref();
    let listed = spec.and_then(|spec| spec.pod_cidrs.as_deref());
    let listed = listed.unwrap_or_default();
    let texts = match listed {
        [] => spec.map_or(&[][..], |spec| spec.pod_cidr.as_slice()),
        listed => listed,
    };
    let mut networks: Vec<IpNet> = Vec::new();
    for (i, text) in texts.iter().enumerate().filter(|(_, t)| !t.is_empty()) {
        let field = || match listed {
            [] => "spec.podCIDR".to_owned(),
            _ => format!("spec.podCIDRs[{i}]"),
        };
        let family = |network: &IpNet| Family::of(network.addr());
        match text.parse::<IpNet>() {
            Ok(network) if networks.iter().any(|n| family(n) == family(&network)) => {
                let reason = "is one too many; a Node has one network a family for its pods";
                refusals.text(field(), text, reason);
            }
            Ok(network) => networks.push(network),
            Err(_) => refusals.text(field(), text, "is not a network such as 10.244.1.0/24"),
        }
    }
    (networks, refusals.all())
}

/// Reads an address as kube-proxy does (`netutils.ParseIPSloppy` of Kubernetes, Go's parser
/// before 1.17): IPv4 with leading zeros, which are decimal, and any spelling of IPv6. An
/// IPv4-mapped IPv6 address is the IPv4 address.
#[must_use]
pub fn parse_address(text: &str) -> Option<IpAddr> {
    if text.contains(':') {
        return text
            .parse::<Ipv6Addr>()
            .ok()
            .map(|address| address.to_canonical());
    }
    let mut octets = [0; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        let part = parts.next()?;
        let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        *octet = digits.then(|| part.parse().ok()).flatten()?;
    }
    parts
        .next()
        .is_none()
        .then(|| IpAddr::V4(Ipv4Addr::from(octets)))
}

/// Reads a time as the API writes it (RFC 3339).
#[must_use]
pub fn parse_time(text: &str) -> Option<SystemTime> {
    let time: k8s_openapi::jiff::Timestamp = text.parse().ok()?;
    Some(time.into())
}

/// When a Service was made, in seconds; the older one has what two claim.
fn created(metadata: &Metadata, refusals: &mut Refusals) -> Option<i64> {
    let text = metadata.creation_timestamp.as_deref()?;
    let parsed: Result<k8s_openapi::jiff::Timestamp, _> = text.parse();
    if parsed.is_err() {
        let reason = "is not a time such as 2024-01-02T03:04:05Z";
        refusals.text("metadata.creationTimestamp", text, reason);
    }
    Some(parsed.ok()?.as_second())
}

fn drain_timeout(metadata: &Metadata, refusals: &mut Refusals) -> Option<model::DrainTimeout> {
    let text = metadata.annotations.as_ref()?.drain_timeout.as_deref()?;
    let parsed = parse_drain_timeout(text);
    if parsed.is_none() {
        let field = "metadata.annotations[ipvs-proxy.io/drain-timeout]";
        refusals.text(
            field,
            text,
            "is not a time such as 30s or 1m30s, nor 0 for no limit, nor now",
        );
    }
    parsed
}

/// The refusals of one object, as they are found.
struct Refusals {
    object: String,
    list: Vec<Refusal>,
    more: bool,
}

impl Refusals {
    fn new(kind: &str, name: &str) -> Refusals {
        Refusals {
            object: format!("{kind} {name}"),
            list: Vec::new(),
            more: false,
        }
    }

    /// So many, and a sum for what is more.
    fn all(mut self) -> Vec<Refusal> {
        if self.more {
            let field = format!("more fields than these {MOST_REFUSALS}");
            self.list.push(Refusal {
                object: self.object,
                field,
                value: "also".to_owned(),
                reason: "can't be used".to_owned(),
            });
        }
        self.list
    }

    fn add(
        &mut self,
        field: impl Into<String>,
        value: impl fmt::Display,
        reason: impl Into<String>,
    ) {
        if self.list.len() == MOST_REFUSALS {
            self.more = true;
            return;
        }
        self.list.push(Refusal {
            object: self.object.clone(),
            field: field.into(),
            value: value.to_string(),
            reason: reason.into(),
        });
    }

    fn text(&mut self, field: impl Into<String>, value: &str, reason: impl Into<String>) {
        // Quoted and escaped: a value with a line break must not make two lines of one.
        match value.char_indices().nth(LONGEST_VALUE) {
            None => self.add(field, format_args!("{value:?}"), reason),
            Some((end, _)) => {
                let start = value.get(..end).unwrap_or_default();
                self.add(field, format_args!("{start:?}…"), reason);
            }
        }
    }

    fn address(&mut self, field: impl FnOnce() -> String, text: &str) -> Option<IpAddr> {
        let address = parse_address(text);
        if address.is_none() {
            self.text(field(), text, "is not an IP address");
        }
        address
    }

    fn port(&mut self, field: impl FnOnce() -> String, number: i32) -> Option<u16> {
        let port = u16::try_from(number).ok().filter(|port| *port != 0);
        if port.is_none() {
            self.add(field(), number, "is not a port (1 to 65535)");
        }
        port
    }

    fn protocol(&mut self, field: impl FnOnce() -> String, text: Option<&str>) -> Option<Protocol> {
        match text {
            None | Some("" | "TCP") => Some(Protocol::Tcp),
            Some("UDP") => Some(Protocol::Udp),
            Some("SCTP") => Some(Protocol::Sctp),
            Some(other) => {
                self.text(field(), other, "is not TCP, UDP or SCTP");
                None
            }
        }
    }
}

fn label(metadata: &Metadata, of: impl Fn(&Labels) -> &Option<String>) -> Option<&str> {
    of(metadata.labels.as_ref()?).as_deref()
}

/// Neither another proxy's, nor an alias of a name, nor headless.
fn is_served(metadata: &Metadata, spec: &ServiceSpec) -> bool {
    let listed = spec.cluster_ips.as_deref().unwrap_or_default();
    let first = listed
        .first()
        .or(spec.cluster_ip.as_ref())
        .map_or("", String::as_str);
    label(metadata, |labels| &labels.proxy_name).is_none()
        && spec.type_.as_deref() != Some("ExternalName")
        && !matches!(first, "" | "None")
        && spec.cluster_ip.as_deref() != Some("None")
}

fn cluster_ips(spec: &ServiceSpec, refusals: &mut Refusals) -> Vec<IpAddr> {
    let listed = spec.cluster_ips.as_deref().unwrap_or_default();
    let texts = if listed.is_empty() {
        spec.cluster_ip.as_slice()
    } else {
        listed
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for (i, text) in texts.iter().enumerate() {
        let field = || match listed {
            [] => "spec.clusterIP".to_owned(),
            _ => format!("spec.clusterIPs[{i}]"),
        };
        let Some(address) = refusals.address(field, text) else {
            continue;
        };
        if let Some(what) = no_vip(address) {
            refusals.text(
                field(),
                text,
                format!("is {what}, which can't be a clusterIP"),
            );
        } else if addresses
            .iter()
            .any(|a| Family::of(*a) == Family::of(address))
        {
            refusals.text(
                field(),
                text,
                "is one too many; a Service has one address a family",
            );
        } else {
            addresses.push(address);
        }
    }
    addresses
}

fn policy(field: &str, text: &Option<String>, refusals: &mut Refusals) -> model::TrafficPolicy {
    match text.as_deref() {
        None | Some("" | "Cluster") => model::TrafficPolicy::Cluster,
        Some("Local") => model::TrafficPolicy::Local,
        Some(other) => {
            refusals.text(field, other, "is not Cluster or Local; Cluster is used");
            model::TrafficPolicy::Cluster
        }
    }
}

/// What a Service may ask for and does not get yet: whoever relies on it must know.
fn unsupported(spec: &ServiceSpec, refusals: &mut Refusals) {
    let ranges = spec
        .load_balancer_source_ranges
        .as_deref()
        .unwrap_or_default();
    if !ranges.is_empty() {
        let text = ranges.join(",");
        let reason = "is not supported yet: load balancer addresses are open to all";
        refusals.text("spec.loadBalancerSourceRanges", &text, reason);
    }
}

fn external_ips(spec: &ServiceSpec, refusals: &mut Refusals) -> Vec<IpAddr> {
    let texts = spec.external_ips.as_deref().unwrap_or_default();
    let mut addresses = Vec::new();
    for (i, text) in texts.iter().enumerate() {
        let field = || format!("spec.externalIPs[{i}]");
        addresses.extend(outside_vip(text, field, refusals));
    }
    addresses
}

/// The addresses of load balancers. Those with a host name only, and those of `ipMode: Proxy`,
/// lead to the Service by another way.
fn load_balancer_ips(service: &Service, refusals: &mut Refusals) -> Vec<IpAddr> {
    let status = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref());
    let ingress = status
        .and_then(|balancer| balancer.ingress.as_deref())
        .unwrap_or_default();
    let mut addresses = Vec::new();
    for (i, entry) in ingress.iter().enumerate() {
        let text = entry.ip.as_deref().unwrap_or_default();
        match entry.ip_mode.as_deref() {
            _ if text.is_empty() => {}
            None | Some("VIP") => {
                let field = || format!("status.loadBalancer.ingress[{i}].ip");
                addresses.extend(outside_vip(text, field, refusals));
            }
            Some("Proxy") => {}
            Some(other) => {
                let field = format!("status.loadBalancer.ingress[{i}].ipMode");
                refusals.text(field, other, "is not VIP or Proxy");
            }
        }
    }
    addresses
}

/// An address from outside of the cluster.
fn outside_vip(text: &str, field: impl Fn() -> String, refusals: &mut Refusals) -> Option<IpAddr> {
    let address = refusals.address(&field, text)?;
    match no_endpoint(address) {
        Some(what) => {
            refusals.text(field(), text, format!("is {what}, which can't be a VIP"));
            None
        }
        None => Some(address),
    }
}

/// Why an address can't be a VIP: bound to a link it would take traffic that is not a Service's.
fn no_vip(address: IpAddr) -> Option<&'static str> {
    if address.is_unspecified() {
        Some("the unspecified address")
    } else if address.is_loopback() {
        Some("a loopback address")
    } else if address.is_multicast() {
        Some("a multicast address")
    } else if address == IpAddr::V4(Ipv4Addr::BROADCAST) {
        Some("the broadcast address")
    } else {
        None
    }
}

/// Why an address can't be an endpoint (`ValidateEndpointIP` of Kubernetes), nor come from outside of the cluster.
fn no_endpoint(address: IpAddr) -> Option<&'static str> {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    if link_local {
        Some("a link-local address")
    } else {
        no_vip(address)
    }
}

fn service_ports(spec: &ServiceSpec, refusals: &mut Refusals) -> Vec<model::ServicePort> {
    let with_node_ports = match spec.type_.as_deref() {
        Some("NodePort" | "LoadBalancer") => true,
        None | Some("" | "ClusterIP") => false,
        Some(other) => {
            let allowed = "is not ClusterIP, NodePort, LoadBalancer or ExternalName; \
                           it is served as ClusterIP";
            refusals.text("spec.type", other, allowed);
            false
        }
    };
    let mut ports: Vec<model::ServicePort> = Vec::new();
    let (mut numbers, mut names, mut node_ports) = (HashSet::new(), HashSet::new(), HashSet::new());
    for (i, entry) in spec.ports.as_deref().unwrap_or_default().iter().enumerate() {
        let field = |name: &str| format!("spec.ports[{i}].{name}");
        let name = entry.name.as_deref().unwrap_or_default();
        let protocol = refusals.protocol(|| field("protocol"), entry.protocol.as_deref());
        let port = refusals.port(|| field("port"), entry.port.unwrap_or_default());
        let (Some(protocol), Some(port)) = (protocol, port) else {
            continue;
        };
        if numbers.contains(&(protocol, port)) {
            let reason = format!("is already a {} port of this Service", upper(protocol));
            refusals.add(field("port"), port, reason);
            continue;
        }
        // Slices join by name and protocol, so two ports of one name would share endpoints.
        if !names.insert((protocol, name)) {
            refusals.text(
                field("name"),
                name,
                "is already the name of a port of this Service",
            );
            continue;
        }
        numbers.insert((protocol, port));
        let node_port = entry
            .node_port
            .filter(|number| with_node_ports && *number != 0);
        let mut node_port = node_port.and_then(|n| refusals.port(|| field("nodePort"), n));
        if let Some(number) = node_port
            && !node_ports.insert((protocol, number))
        {
            let reason = format!("is already a {} nodePort of this Service", upper(protocol));
            refusals.add(field("nodePort"), number, reason);
            node_port = None;
        }
        ports.push(model::ServicePort {
            name: name.into(),
            protocol,
            port,
            node_port,
        });
    }
    ports
}

/// Load balancers ask there which keep to nodes with endpoints; for all others it says nothing.
fn health_check_node_port(
    spec: &ServiceSpec,
    ports: &[model::ServicePort],
    refusals: &mut Refusals,
) -> Option<u16> {
    let asked = spec.type_.as_deref() == Some("LoadBalancer")
        && spec.external_traffic_policy.as_deref() == Some("Local");
    let number = spec.health_check_node_port;
    let number = number.filter(|number| asked && *number != 0)?;
    let field = "spec.healthCheckNodePort";
    let port = refusals.port(|| field.to_owned(), number)?;
    let taken = |p: &model::ServicePort| p.protocol == Protocol::Tcp && p.node_port == Some(port);
    if ports.iter().any(taken) {
        refusals.add(field, port, "is already a TCP nodePort of this Service");
        return None;
    }
    Some(port)
}

fn upper(protocol: Protocol) -> String {
    protocol.to_string().to_uppercase()
}

fn affinity(spec: &ServiceSpec, refusals: &mut Refusals) -> Option<u32> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return None,
        Some("ClientIP") => {}
        Some(other) => {
            refusals.text("spec.sessionAffinity", other, "is not None or ClientIP");
            return None;
        }
    }
    let config = spec.session_affinity_config.as_ref();
    let asked = config
        .and_then(|c| c.client_ip.as_ref())
        .and_then(|c| c.timeout_seconds);
    let Some(asked) = asked else {
        return Some(DEFAULT_AFFINITY_S);
    };
    match u32::try_from(asked) {
        Ok(timeout_s @ 1..=MAX_AFFINITY_S) => Some(timeout_s),
        _ => {
            let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
            let reason = format!("is not 1 to {MAX_AFFINITY_S}; {DEFAULT_AFFINITY_S} is used");
            refusals.add(field, asked, reason);
            Some(DEFAULT_AFFINITY_S)
        }
    }
}

fn slice_ports(slice: &EndpointSlice, refusals: &mut Refusals) -> Vec<model::SlicePort> {
    let Some(ports) = &slice.ports else {
        // So the API server's controller makes the slice of a Service that has no endpoints yet.
        if slice.endpoints.as_deref().unwrap_or_default().is_empty() {
            return Vec::new();
        }
        let reason = "names no ports, so the endpoints of this slice are not used; \
                      list the ports of the Service";
        refusals.add("ports", "null", reason);
        return Vec::new();
    };
    let mut taken = Vec::new();
    for (i, entry) in ports.iter().enumerate() {
        let field = |name: &str| format!("ports[{i}].{name}");
        let protocol = refusals.protocol(|| field("protocol"), entry.protocol.as_deref());
        // For the API that is each port; kube-proxy ignores it.
        let Some(number) = entry.port else {
            let reason = "is no number, so this port is not used; write that of the endpoints";
            refusals.add(field("port"), "null", reason);
            continue;
        };
        let port = refusals.port(|| field("port"), number);
        if let (Some(protocol), Some(port)) = (protocol, port) {
            taken.push(model::SlicePort {
                name: entry.name.as_deref().unwrap_or_default().into(),
                protocol,
                port,
            });
        }
    }
    taken
}

fn endpoints<'a>(
    endpoints: &'a [Endpoint],
    family: Family,
    hints: &mut Hints<'a>,
    refusals: &mut Refusals,
) -> Vec<model::Endpoint> {
    let mut taken = Vec::new();
    for (i, endpoint) in endpoints.iter().enumerate() {
        let field = || format!("endpoints[{i}].addresses[0]");
        let listed = endpoint.addresses.as_deref().unwrap_or_default();
        let Some(text) = listed.first() else {
            refusals.add(
                format!("endpoints[{i}].addresses"),
                "[]",
                "holds no address",
            );
            continue;
        };
        let Some(address) = refusals.address(field, text) else {
            continue;
        };
        if Family::of(address) != family {
            let number = if family == Family::V4 { 4 } else { 6 };
            let reason = format!("is not an IPv{number} address, which this slice holds");
            refusals.text(field(), text, reason);
            continue;
        }
        if let Some(what) = no_endpoint(address) {
            refusals.text(
                field(),
                text,
                format!("is {what}, which can't be an endpoint"),
            );
            continue;
        }
        let conditions = endpoint.conditions.as_ref();
        taken.push(model::Endpoint {
            address,
            ready: conditions.and_then(|c| c.ready).unwrap_or(true),
            serving: conditions.and_then(|c| c.serving).unwrap_or(true),
            terminating: conditions.and_then(|c| c.terminating).unwrap_or(false),
            local: endpoint.node_name.as_deref() == Some(hints.node_name),
            placed: endpoint
                .node_name
                .as_deref()
                .is_some_and(|name| !name.is_empty()),
            node_hint: hints.node(i, endpoint, refusals),
            zone_hints: hints.zones(i, endpoint, refusals),
        });
    }
    taken
}

#[cfg(test)]
mod tests;
