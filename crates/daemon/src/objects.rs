//! Services, EndpointSlices and Nodes as the API writes them, with the fields that a proxy needs and no others: what is
//! wrong with any other field is nothing to us. A field that is missing or null is `None`, as for the API server; what that
//! means is decided where it is used ([`crate::translate`]).

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// Structs of the API: every field may be missing, and has the API's name unless it says another.
macro_rules! objects {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)+ })+) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(rename_all = "camelCase", expecting = "an object")]
        #[allow(missing_docs, reason = "the API's fields")]
        pub struct $name {
            $($(#[$field_meta])* pub $field: Option<$type>,)+
        }
    )+};
}

/// `v1` Service.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(expecting = "an object")]
#[expect(missing_docs, reason = "the API's fields")]
pub struct Service {
    #[serde(default, deserialize_with = "or_none")]
    pub metadata: Metadata,
    pub spec: Option<ServiceSpec>,
    pub status: Option<ServiceStatus>,
}

/// `discovery.k8s.io/v1` EndpointSlice.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an object")]
#[expect(missing_docs, reason = "the API's fields")]
pub struct EndpointSlice {
    #[serde(default, deserialize_with = "or_none")]
    pub metadata: Metadata,
    pub address_type: Option<String>,
    pub endpoints: Option<Vec<Endpoint>>,
    pub ports: Option<Vec<EndpointPort>>,
}

/// `v1` Node.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(expecting = "an object")]
#[expect(missing_docs, reason = "the API's fields")]
pub struct Node {
    #[serde(default, deserialize_with = "or_none")]
    pub metadata: Metadata,
    pub spec: Option<NodeSpec>,
    pub status: Option<NodeStatus>,
}

fn or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metadata, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

objects! {
    /// What names an object, and says whose it is.
    Metadata {
        name: String,
        namespace: String,
        uid: String,
        creation_timestamp: String,
        deletion_timestamp: IgnoredAny,
        labels: Labels,
        annotations: Annotations,
    }
    /// The labels that say something to a proxy.
    Labels {
        /// The Service belongs to the proxy that this names.
        #[serde(rename = "service.kubernetes.io/service-proxy-name")]
        proxy_name: String,
        /// The EndpointSlice belongs to a headless Service.
        #[serde(rename = "service.kubernetes.io/headless")]
        headless: String,
        /// The Service of an EndpointSlice.
        #[serde(rename = "kubernetes.io/service-name")]
        service_name: String,
        /// The zone of a Node.
        #[serde(rename = "topology.kubernetes.io/zone")]
        zone: String,
    }
    /// The annotations that say something to this proxy.
    Annotations {
        /// How long a real server drains at most.
        #[serde(rename = "ipvs-proxy.io/drain-timeout")]
        drain_timeout: String,
        /// When what an EndpointSlice says happened, RFC 3339.
        #[serde(rename = "endpoints.kubernetes.io/last-change-trigger-time")]
        last_change: String,
    }
    /// What a Service asks for.
    ServiceSpec {
        #[serde(rename = "type")]
        type_: String,
        #[serde(rename = "clusterIP")]
        cluster_ip: String,
        #[serde(rename = "clusterIPs")]
        cluster_ips: Vec<String>,
        #[serde(rename = "externalIPs")]
        external_ips: Vec<String>,
        ports: Vec<ServicePort>,
        session_affinity: String,
        session_affinity_config: SessionAffinityConfig,
        internal_traffic_policy: String,
        external_traffic_policy: String,
        load_balancer_source_ranges: Vec<String>,
        health_check_node_port: i32,
    }
    /// A port of a Service.
    ServicePort {
        name: String,
        protocol: String,
        port: i32,
        node_port: i32,
    }
    /// More on session affinity.
    SessionAffinityConfig {
        #[serde(rename = "clientIP")]
        client_ip: ClientIpConfig,
    }
    /// Session affinity by the client's address.
    ClientIpConfig {
        timeout_seconds: i32,
    }
    /// What others made for a Service.
    ServiceStatus {
        load_balancer: LoadBalancerStatus,
    }
    /// The load balancers of a Service.
    LoadBalancerStatus {
        ingress: Vec<LoadBalancerIngress>,
    }
    /// An address of a load balancer.
    LoadBalancerIngress {
        ip: String,
        ip_mode: String,
    }
    /// An endpoint.
    Endpoint {
        addresses: Vec<String>,
        conditions: EndpointConditions,
        node_name: String,
        hints: EndpointHints,
    }
    /// Whose clients an endpoint is meant for.
    EndpointHints {
        for_nodes: Vec<EndpointHint>,
        for_zones: Vec<EndpointHint>,
    }
    /// A node or zone for which an endpoint is meant.
    EndpointHint {
        name: String,
    }
    /// How an endpoint is.
    EndpointConditions {
        ready: bool,
        serving: bool,
        terminating: bool,
    }
    /// A port of all endpoints of a slice.
    EndpointPort {
        name: String,
        protocol: String,
        port: i32,
    }
    /// What was given to a Node.
    NodeSpec {
        #[serde(rename = "podCIDR")]
        pod_cidr: String,
        #[serde(rename = "podCIDRs")]
        pod_cidrs: Vec<String>,
        taints: Vec<Taint>,
    }
    /// Why a Node is to be avoided.
    Taint {
        key: String,
    }
    /// What a Node says of itself.
    NodeStatus {
        addresses: Vec<NodeAddress>,
    }
    /// An address of a Node.
    NodeAddress {
        #[serde(rename = "type")]
        type_: String,
        address: String,
    }
}
