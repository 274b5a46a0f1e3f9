//! The order of ops: what goes first within a Service, and what an op rests on.

use ipset_rs::Entry;
use ipvs_netlink::VirtualServerKey;
use ipvs_proxy_netlink::{Family, Protocol};

use super::Planner;
use crate::op::Op;
use crate::state::{Key, Role, Set, Value};

/// The order of ops within a Service. Appearing: what masquerades and owns, the servers, the
/// address, then what lets packets in. Disappearing: the other way round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Sets,
    Rules,
    Entries,
    Servers,
    Addresses,
    Accept,
    Refuse,
    DropAddresses,
    DropServers,
    DropEntries,
    DropRules,
    DropSets,
}

pub(super) fn phase(op: &Op) -> Phase {
    let gone = matches!(op, Op::Remove(_));
    match (op.key(), gone) {
        (Key::Set(_), false) => Phase::Sets,
        (Key::Rules(_) | Key::Link, false) => Phase::Rules,
        (
            Key::Entry(
                Set {
                    role: Role::Serving,
                    ..
                },
                _,
            ),
            false,
        ) => Phase::Accept,
        (
            Key::Entry(
                Set {
                    role: Role::Serving,
                    ..
                },
                _,
            ),
            true,
        ) => Phase::Refuse,
        (Key::Entry(..), false) => Phase::Entries,
        (Key::Entry(..), true) => Phase::DropEntries,
        (Key::VirtualServer(_) | Key::RealServer(..), false) => Phase::Servers,
        (Key::VirtualServer(_) | Key::RealServer(..), true) => Phase::DropServers,
        (Key::Address(_), false) => Phase::Addresses,
        (Key::Address(_), true) => Phase::DropAddresses,
        (Key::Rules(_), true) => Phase::DropRules,
        (Key::Set(_) | Key::Link, true) => Phase::DropSets,
    }
}

/// Whether an op takes a real server out of service. Within a phase such ops come last: what is
/// to take its place is there before, and a virtual server never lacks one in between.
pub(super) fn quiesces(op: &Op) -> bool {
    matches!(op, Op::Update(_, Value::RealServer(0)))
}

impl Planner {
    /// Whether what an op rests on is in the kernel (or, for a real server, goes before it in
    /// the same round), and whether nothing rests on what it takes away.
    pub(super) fn may(&self, op: &Op) -> bool {
        let there = |key: Key| self.applied(&key).is_some();
        match op {
            Op::Add(Key::Rules(family), _) => Set::all(*family).all(|set| there(Key::Set(set))),
            Op::Add(Key::Entry(set, entry), _) => {
                self.applied(&Key::Set(*set)) == Some(&Value::Present)
                    && match (set.role, entry) {
                        (Role::Serving, Entry::IpPort(address, protocol, port)) => {
                            there(Key::VirtualServer(VirtualServerKey::Address {
                                address: *address,
                                port: *port,
                                protocol: *protocol,
                            }))
                        }
                        _ => true,
                    }
            }
            Op::Add(Key::VirtualServer(vs), _) => self
                .owning_entries(vs)
                .all(|key| self.wanted(&key).is_none() || there(key)),
            Op::Add(Key::RealServer(vs, _), _) => {
                let key = Key::VirtualServer(*vs);
                there(key)
                    || !self.failures.contains_key(&key)
                        && self.op(&key).is_some_and(|op| self.may(&op))
            }
            Op::Add(Key::Address(address), _) => {
                let family = Family::of(*address);
                let set = Set {
                    family,
                    role: Role::IpvsIps,
                };
                let at = |port, protocol| {
                    Key::VirtualServer(VirtualServerKey::Address {
                        address: *address,
                        port,
                        protocol,
                    })
                };
                let servers = at(0, Protocol::Tcp)..=at(u16::MAX, Protocol::Other(u8::MAX));
                there(Key::Link)
                    && there(Key::Rules(family))
                    && there(Key::Entry(set, Entry::Ip(*address)))
                    && self
                        .records
                        .range(servers)
                        .any(|(_, record)| record.applied.is_some())
            }
            Op::Remove(Key::VirtualServer(vs)) => match vs {
                VirtualServerKey::Address {
                    address,
                    port,
                    protocol,
                } => {
                    let set = Set {
                        family: vs.family(),
                        role: Role::Serving,
                    };
                    !there(Key::Entry(set, Entry::IpPort(*address, *protocol, *port)))
                }
                VirtualServerKey::FirewallMark { .. } => true,
            },
            // It goes with its virtual server.
            Op::Remove(Key::RealServer(vs, _)) => {
                self.claimed(&Key::VirtualServer(*vs)).is_some() && there(Key::VirtualServer(*vs))
            }
            // Its rules look into it, and its entries go with it.
            Op::Remove(Key::Set(set)) => !there(Key::Rules(set.family)),
            Op::Remove(Key::Entry(set, entry)) => match (set.role, entry) {
                (Role::IpvsIps, Entry::Ip(address)) => !there(Key::Address(*address)),
                (role, Entry::IpPort(address, protocol, port)) if Role::OWNING.contains(&role) => {
                    let vs = VirtualServerKey::Address {
                        address: *address,
                        port: *port,
                        protocol: *protocol,
                    };
                    // The virtual server is gone, or stays ours by another entry.
                    !there(Key::VirtualServer(vs))
                        || self.owning_entries(&vs).any(|key| {
                            key != op.key() && there(key) && self.claimed(&key).is_some()
                        })
                }
                _ => true,
            },
            _ => true,
        }
    }

    /// The set entries by which a virtual server is known as ours.
    pub(super) fn owning_entries(&self, vs: &VirtualServerKey) -> impl Iterator<Item = Key> {
        let family = vs.family();
        let entry = match vs {
            VirtualServerKey::Address {
                address,
                port,
                protocol,
            } => Some(Entry::IpPort(*address, *protocol, *port)),
            VirtualServerKey::FirewallMark { .. } => None,
        };
        Role::OWNING
            .into_iter()
            .filter_map(move |role| entry.map(|entry| Key::Entry(Set { family, role }, entry)))
    }

    /// A real server whose virtual server is not in the kernel.
    pub(super) fn is_orphan(&self, op: &Op) -> bool {
        matches!(op.key(), Key::RealServer(vs, _)
            if self.applied(&Key::VirtualServer(vs)).is_none())
    }
}
