//! Which endpoints serve a port of a Service.

use std::collections::BTreeMap;

use ipvs_netlink::RealServerKey;
use ipvs_proxy_netlink::Family;

use crate::model::{Endpoint, ServicePort, Slice};

/// The endpoints of a port in one family, from all slices of its Service, one for each address
/// and port. Where two slices list the same one, the one that is not terminating counts, then
/// the one of this node.
pub(crate) fn of_port<'a>(
    slices: impl Iterator<Item = &'a Slice>,
    port: &ServicePort,
    family: Family,
) -> BTreeMap<RealServerKey, Endpoint> {
    let mut found: BTreeMap<RealServerKey, Endpoint> = BTreeMap::new();
    for slice in slices.filter(|slice| slice.family == family) {
        let ports = slice
            .ports
            .iter()
            .filter(|p| p.protocol == port.protocol && p.name == port.name)
            .map(|p| p.port);
        for number in ports {
            for endpoint in &slice.endpoints {
                let key = RealServerKey {
                    address: endpoint.address,
                    port: number,
                };
                found
                    .entry(key)
                    .and_modify(|known| {
                        let rank = |e: &Endpoint| (!e.terminating, e.local, e.ready, e.serving);
                        if rank(endpoint) > rank(known) {
                            *known = *endpoint;
                        }
                    })
                    .or_insert(*endpoint);
            }
        }
    }
    found
}

/// The endpoints that take new connections: the ready ones; where there is none, those that are
/// terminating and still serve (KEP-1669).
pub(crate) fn serving(all: &BTreeMap<RealServerKey, Endpoint>) -> Vec<RealServerKey> {
    let pick = |wanted: fn(&Endpoint) -> bool| -> Vec<RealServerKey> {
        all.iter()
            .filter(|(_, endpoint)| wanted(endpoint))
            .map(|(key, _)| *key)
            .collect()
    };
    let ready = pick(|e| e.ready);
    if ready.is_empty() {
        pick(|e| e.serving && e.terminating)
    } else {
        ready
    }
}
