//! What the cluster says, without Kubernetes types: compact, checked, in the words of this crate.
//!
//! Objects are translated at the door (the daemon's `translate`), and dropped.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipvs_proxy_netlink::{Family, Protocol};

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
    pub uid: Box<str>,
    /// One ClusterIP for each family that the Service has.
    pub cluster_ips: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// `sessionAffinity: ClientIP`: how long a client stays with its endpoint, in seconds.
    pub affinity_timeout_s: Option<u32>,
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
}

/// This node, as its Node object says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Node {
    /// The addresses on which node ports are served.
    pub addresses: BTreeSet<IpAddr>,
}

/// One news of the cluster: the last word on one object, or on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The Service as it is now; `None` when it is gone or not ours to serve.
    Service(ObjectName, Option<Service>),
    /// The slice as it is now; `None` when it is gone or not ours to use.
    Slice(ObjectName, Option<Slice>),
    /// This node as it is now.
    Node(Node),
}
