//! Health check node ports: what load balancers are told that keep to the nodes with endpoints (KEP-1669, KEP-3458).

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::model::ObjectName;

/// A health check node port as it is to be answered now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthPort {
    /// The Service that it is for.
    pub service: ObjectName,
    /// On which addresses it is to be listened; an unspecified one for all of its family.
    pub addresses: BTreeSet<IpAddr>,
    /// How many ready endpoints run on this node: addresses of endpoints, over all ports of the Service; where it has two
    /// families, the number of the one that has more, since a pod has an address of each. An endpoint that is terminating is not
    /// ready, even where packets go to it, unless the Service has `publishNotReadyAddresses`.
    pub local_endpoints: usize,
}
