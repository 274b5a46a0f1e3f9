//! Which endpoints serve a port of a Service on this node, and why the others don't.
//!
//! A policy of `Local` goes before hints, hints for nodes before those for zones, and hints count only where each ready endpoint
//! has one and some name this node, or its zone (KEP-2086, KEP-2433, KEP-3015). Where no endpoint is ready, those that are
//! terminating and still serve take over, whatever their hints (KEP-1669).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use ipvs_netlink::RealServerKey;
use ipvs_proxy_netlink::Family;

use crate::model::{Endpoint, Hint, ServicePort, Slice, TrafficPolicy};

/// Why an endpoint takes new connections, or why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// It takes them: it is ready, and nothing speaks against it.
    Ready,
    /// It takes them though it is terminating: it still serves, and no endpoint is ready.
    LastResort,
    /// It is neither ready nor serving while it terminates.
    NotReady,
    /// It is terminating, and others are ready.
    Terminating,
    /// It runs on another node, and the policy is `Local`.
    OtherNode,
    /// It is hinted for other nodes, and others are hinted for this one.
    HintedElsewhere,
    /// It is hinted for other zones, and others are hinted for this node's.
    OtherZone,
}

impl Reason {
    /// Whether it takes new connections.
    #[must_use]
    pub fn is_taken(self) -> bool {
        matches!(self, Reason::Ready | Reason::LastResort)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Ready => "ready",
            Reason::LastResort => "terminating, but no other is ready",
            Reason::NotReady => "not ready",
            Reason::Terminating => "terminating",
            Reason::OtherNode => "on another node",
            Reason::HintedElsewhere => "hinted for another node",
            Reason::OtherZone => "hinted for another zone",
        })
    }
}

/// The endpoints of a port in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoints(BTreeMap<RealServerKey, Candidate>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Candidate {
    endpoint: Endpoint,
    zone_hint: Hint,
}

/// Which hints count.
#[derive(Clone, Copy)]
enum Hints {
    None,
    Node,
    Zone,
}

impl Endpoints {
    /// The endpoints of a port in one family, from all slices of its Service, one for each address
    /// and port, seen from a node in this zone. Where two slices list the same one, the one that is not terminating counts,
    /// then the one of this node.
    #[must_use]
    pub fn of_port<'a>(
        slices: impl Iterator<Item = &'a Slice>,
        port: &ServicePort,
        family: Family,
        zone: Option<&str>,
    ) -> Endpoints {
        let mut found: BTreeMap<RealServerKey, Candidate> = BTreeMap::new();
        for slice in slices.filter(|slice| slice.family == family) {
            let ports = slice
                .ports
                .iter()
                .filter(|p| p.protocol == port.protocol && p.name == port.name)
                .map(|p| p.port);
            let here = |zones: &Vec<Arc<str>>| zones.iter().any(|name| Some(&**name) == zone);
            let here: Vec<bool> = slice.zone_hints.iter().map(here).collect();
            let zone_hint = |endpoint: &Endpoint| match endpoint.zone_hints {
                None => Hint::Absent,
                Some(place) => match here.get(usize::from(place.get()) - 1) {
                    Some(true) => Hint::Here,
                    _ => Hint::Elsewhere,
                },
            };
            for number in ports {
                for endpoint in &slice.endpoints {
                    let key = RealServerKey {
                        address: endpoint.address,
                        port: number,
                    };
                    let candidate = Candidate {
                        endpoint: *endpoint,
                        zone_hint: zone_hint(endpoint),
                    };
                    found
                        .entry(key)
                        .and_modify(|known| {
                            let rank = |e: &Endpoint| (!e.terminating, e.local, e.ready, e.serving);
                            if rank(endpoint) > rank(&known.endpoint) {
                                *known = candidate;
                            }
                        })
                        .or_insert(candidate);
                }
            }
        }
        Endpoints(found)
    }

    /// How many there are, taken or not.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Those of this node, taken or not.
    pub(crate) fn local(&self) -> impl Iterator<Item = &RealServerKey> {
        let local = self.0.iter().filter(|(_, c)| c.endpoint.local);
        local.map(|(key, _)| key)
    }

    /// Those of this node that are ready, which load balancers ask for (KEP-1669: not those that are terminating).
    pub(crate) fn ready_here(&self) -> impl Iterator<Item = &RealServerKey> {
        let ready = self.0.iter();
        let ready = ready.filter(|(_, c)| c.endpoint.local && c.endpoint.ready);
        ready.map(|(key, _)| key)
    }

    /// Those that take new connections by a policy.
    #[must_use]
    pub fn taken(&self, policy: TrafficPolicy) -> Vec<RealServerKey> {
        let taken = self.judged(policy).filter(|(_, reason)| reason.is_taken());
        taken.map(|(key, _)| key).collect()
    }

    /// All endpoints, and why each takes new connections by a policy, or does not.
    pub fn judged(&self, policy: TrafficPolicy) -> impl Iterator<Item = (RealServerKey, Reason)> {
        let within = move |e: &Endpoint| policy == TrafficPolicy::Cluster || e.local;
        let ready = |c: &Candidate| c.endpoint.ready && within(&c.endpoint);
        let any_ready = self.0.values().any(ready);
        let hints = match policy {
            TrafficPolicy::Cluster => self.hints(),
            TrafficPolicy::Local => Hints::None,
        };
        self.0.iter().map(move |(key, candidate)| {
            let Candidate {
                endpoint,
                zone_hint,
            } = candidate;
            let reason = if !within(endpoint) {
                Reason::OtherNode
            } else if endpoint.ready {
                match hints {
                    Hints::Node if endpoint.node_hint != Hint::Here => Reason::HintedElsewhere,
                    Hints::Zone if *zone_hint != Hint::Here => Reason::OtherZone,
                    _ => Reason::Ready,
                }
            } else if !(endpoint.serving && endpoint.terminating) {
                Reason::NotReady
            } else if any_ready {
                Reason::Terminating
            } else {
                Reason::LastResort
            };
            (*key, reason)
        })
    }

    fn hints(&self) -> Hints {
        let ready = || self.0.values().filter(|c| c.endpoint.ready);
        let count = |hint: fn(&Candidate) -> Hint| {
            ready().all(|c| hint(c) != Hint::Absent) && ready().any(|c| hint(c) == Hint::Here)
        };
        if count(|c| c.endpoint.node_hint) {
            Hints::Node
        } else if count(|c| c.zone_hint) {
            Hints::Zone
        } else {
            Hints::None
        }
    }
}
