//! The order of ops: what goes first within a Service, and what an op rests on.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::net::IpAddr;

use ipset_rs::Entry;
use ipvs_netlink::{RealServerKey, Scheduler, VirtualServerKey};
use ipvs_proxy_iptables::Table;
use ipvs_proxy_netlink::{Family, Protocol};

use super::{Planner, virtual_servers};
use crate::op::Op;
use crate::state::{
    Key, Role, Set, Value, keeping_entries, kept_with, owned_by, owning_entries, served_by,
    serving_entries,
};

/// The order of ops within a Service. Appearing: what masquerades and owns, the servers, the
/// address, then what lets packets in. Disappearing: the other way round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Sets,
    Rules,
    Entries,
    Servers,
    /// A real server gets weight 0: what takes its place is there before, so that a virtual server never lacks one in between.
    Quiesce,
    Addresses,
    Accept,
    Refuse,
    DropAddresses,
    DropServers,
    DropEntries,
    DropRules,
    DropSets,
}

/// Where an op stands among those of its Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) phase: Phase,
    /// Real servers are added in this order, before that of their keys.
    turn: u32,
}

impl Place {
    /// Before all others: of a key that needs no op.
    pub(super) const FIRST: Place = Place {
        phase: Phase::Sets,
        turn: 0,
    };
}

fn phase(op: &Op) -> Phase {
    let gone = matches!(op, Op::Remove(_));
    match (op.key(), gone) {
        (Key::Set(_), false) => Phase::Sets,
        (Key::Rules(..) | Key::Link, false) => Phase::Rules,
        (Key::Entry(set, entry), _)
            if served_by(set, &entry).is_some() || set.role == Role::HealthCheckNodePort =>
        {
            match gone {
                false => Phase::Accept,
                true => Phase::Refuse,
            }
        }
        (Key::RealServer(..), false) if matches!(op, Op::Update(_, Value::RealServer(0))) => {
            Phase::Quiesce
        }
        (Key::Entry(..), false) => Phase::Entries,
        // What masquerades comes first, and this stands against it.
        (Key::Entry(set, entry), true) if kept_with(set, &entry).is_some() => Phase::Entries,
        (Key::Entry(..), true) => Phase::DropEntries,
        (Key::VirtualServer(_) | Key::RealServer(..), false) => Phase::Servers,
        (Key::VirtualServer(_) | Key::RealServer(..), true) => Phase::DropServers,
        (Key::Address(_) | Key::Route(_) | Key::RoutingRule(..), false) => Phase::Addresses,
        (Key::Address(_) | Key::Route(_), true) => Phase::DropAddresses,
        (Key::RoutingRule(..), true) => Phase::DropEntries,
        (Key::Rules(..), true) => Phase::DropRules,
        (Key::Set(_) | Key::Link, true) => Phase::DropSets,
    }
}

impl Planner {
    pub(super) fn place(&self, op: &Op) -> Place {
        let phase = phase(op);
        let turn = match op {
            Op::Add(Key::RealServer(vs, rs), _) => self.turn(*vs, *rs),
            _ => 0,
        };
        Place { phase, turn }
    }

    /// When a real server is added. The kernel puts each at the head of the virtual server's list (`__ip_vs_update_dest`), and
    /// its schedulers begin there, or take the first of equals: so the one that is added last gets the first connection. Which
    /// one that is differs from node to node and from virtual server to virtual server, evenly.
    fn turn(&self, vs: VirtualServerKey, rs: RealServerKey) -> u32 {
        let name = &*self.config.node_name;
        let Some(Value::VirtualServer(server)) = self.claimed(&Key::VirtualServer(vs)) else {
            return 0;
        };
        if name.is_empty() || has_one_order_for_all(server.scheduler) {
            return 0;
        }
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one((name, vs, rs));
        // Behind the virtual server itself.
        u32::try_from(hash >> 32).map_or(1, |turn| turn.max(1))
    }

    /// Whether what an op rests on is in the kernel (or, for a real server, goes before it in
    /// the same round), and whether nothing rests on what it takes away.
    pub(super) fn may(&self, op: &Op) -> bool {
        let there = |key: Key| self.applied(&key).is_some();
        match op {
            _ if self.is_behind() && self.gives_up(op) => false,
            Op::Add(Key::Rules(family, _), _) => Set::all(*family).all(|set| there(Key::Set(set))),
            Op::Add(Key::Entry(set, entry), _) => {
                self.applied(&Key::Set(*set)) == Some(&Value::Present)
                    && self
                        .kept(*set, entry)
                        .iter()
                        .all(|vs| self.serves_as_wanted(vs))
                    && served_by(*set, entry).is_none_or(|vs| {
                        there(Key::VirtualServer(vs)) && self.is_bound_as_wanted(&vs)
                    })
            }
            // Nobody is masqueraded for the moment who is not to be.
            Op::Add(Key::VirtualServer(vs), _) => {
                self.is_masqueraded(vs)
                    && self
                        .keeping(vs)
                        .all(|key| self.wanted(&key).is_none() || there(key))
            }
            Op::Add(Key::RealServer(vs, _), _)
            | Op::Update(Key::RealServer(vs, _), Value::RealServer(1..)) => self.is_masqueraded(vs),
            Op::Add(Key::Address(address), _) => {
                let family = Family::of(*address);
                let set = Set {
                    family,
                    role: Role::IpvsIps,
                };
                self.applied(&Key::Link) == Some(&Value::Present)
                    && self.is_guarded(family)
                    && there(Key::Entry(set, Entry::Ip(*address)))
                    && self
                        .records
                        .range(virtual_servers(*address))
                        .any(|(_, record)| record.applied.is_some())
            }
            // Without the mark no packet takes it.
            Op::Add(Key::Route(address), _) => {
                let family = Family::of(*address);
                self.is_guarded(family) && there(Key::Rules(family, Table::Mangle))
            }
            Op::Remove(Key::VirtualServer(vs)) => !serving_entries(vs).any(there),
            // It goes with its virtual server.
            Op::Remove(Key::RealServer(vs, _)) => {
                self.claimed(&Key::VirtualServer(*vs)).is_some() && there(Key::VirtualServer(*vs))
            }
            // Its rules look into it, and its entries go with it, but of these some are removed before others.
            Op::Remove(Key::Set(set)) => {
                let rules = |table| there(Key::Rules(set.family, table));
                !Table::ALL.into_iter().any(rules)
                    && self.entries.get(set).is_none_or(|number| *number == 0)
            }
            Op::Remove(Key::Entry(set, entry)) => match (set.role, entry) {
                (Role::IpvsIps, Entry::Ip(address)) => !there(Key::Address(*address)),
                // What it stands against is to masquerade, or is gone.
                _ if let Some(with) = kept_with(*set, entry) => {
                    self.claimed(&with).is_some() || !there(with) || self.is_spared(&with)
                }
                // The virtual server is gone, or stays ours by another entry.
                _ => owned_by(*set, entry).is_none_or(|vs| {
                    let other = |key| key != op.key() && there(key) && self.claimed(&key).is_some();
                    !there(Key::VirtualServer(vs))
                        || self.is_spared(&Key::VirtualServer(vs))
                        || owning_entries(&vs).any(other) && self.serves_as_wanted(&vs)
                }),
            },
            _ => true,
        }
    }

    /// Whether an op takes away what a Service that is yet to be planned may keep.
    fn gives_up(&self, op: &Op) -> bool {
        match op {
            Op::Remove(Key::RealServer(vs, _)) | Op::Update(Key::RealServer(vs, _), _) => {
                self.claimed(&Key::VirtualServer(*vs)).is_none()
            }
            Op::Remove(_) => true,
            Op::Add(..) | Op::Update(..) => false,
        }
    }

    /// Whether the sets know a virtual server as ours, and all its clients are masqueraded who are to be: a real server of
    /// another node answers only those who are.
    fn is_masqueraded(&self, vs: &VirtualServerKey) -> bool {
        let there = |key: &Key| self.applied(key).is_some();
        owning_entries(vs).all(|key| self.wanted(&key).is_none() || there(&key))
            && self
                .keeping(vs)
                .all(|key| self.wanted(&key).is_some() || !there(&key))
    }

    /// Whether a virtual server takes new connections to no real server but those that it is to have.
    fn serves_as_wanted(&self, vs: &VirtualServerKey) -> bool {
        let mut servers = self.real_servers.of(*vs);
        self.is_spared(&Key::VirtualServer(*vs))
            || servers.all(|key| {
                self.claimed(&key).is_some() || self.applied(&key) == Some(&Value::RealServer(0))
            })
    }

    /// The virtual servers whose clients keep their address by an entry.
    fn kept(&self, set: Set, entry: &Entry) -> Vec<VirtualServerKey> {
        match (kept_with(set, entry), entry) {
            (Some(Key::VirtualServer(vs)), _) => vec![vs],
            (Some(_), Entry::Port(port)) => {
                let protocol = match set.role {
                    Role::NodePortLocalUdp => Protocol::Udp,
                    _ => Protocol::Tcp,
                };
                let addresses = self.node.addresses.iter();
                let addresses = addresses.filter(|a| Family::of(**a) == set.family);
                let server = |address: &IpAddr| VirtualServerKey::Address {
                    address: *address,
                    port: *port,
                    protocol,
                };
                addresses.map(server).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The entries by which the clients of a virtual server keep their address.
    fn keeping(&self, vs: &VirtualServerKey) -> impl Iterator<Item = Key> {
        let node_port = match *vs {
            VirtualServerKey::Address {
                address,
                port,
                protocol,
            } if self.node.addresses.contains(&address) => {
                let family = Family::of(address);
                let role = match protocol {
                    Protocol::Tcp => Some(Role::NodePortTcp),
                    Protocol::Udp => Some(Role::NodePortUdp),
                    _ => None,
                };
                role.map(|role| Key::Entry(Set { family, role }, Entry::Port(port)))
            }
            _ => None,
        };
        let with = node_port.into_iter().chain([Key::VirtualServer(*vs)]);
        with.flat_map(|key| keeping_entries(&key))
    }

    /// Whether a virtual server's address is on the link, or has its route, where it is to be.
    pub(super) fn is_bound_as_wanted(&self, vs: &VirtualServerKey) -> bool {
        let VirtualServerKey::Address { address, .. } = *vs else {
            return true;
        };
        let there = |key| self.applied(&key).is_some() || self.claimed(&key).is_none();
        there(Key::Address(address)) && there(Key::Route(address))
    }

    /// Whether VIPs of a family may be bound: the filter keeps packets to them from the node's own sockets, and the
    /// other tables have their rules, or can't have them.
    fn is_guarded(&self, family: Family) -> bool {
        let there = |key: &Key| self.applied(key).is_some();
        let tables = self.base.keys().filter_map(|key| match key {
            Key::Rules(of, table) if *of == family => Some((key, table)),
            _ => None,
        });
        there(&Key::Rules(family, Table::Filter))
            && tables
                .filter(|(_, table)| **table != Table::Filter)
                .all(|(key, _)| there(key) || self.failures.contains(key))
    }

    /// A real server whose virtual server is not in the kernel.
    pub(super) fn is_orphan(&self, op: &Op) -> bool {
        matches!(op.key(), Key::RealServer(vs, _)
            if self.applied(&Key::VirtualServer(vs)).is_none())
    }
}

/// Whether all nodes are to choose alike: those that hash give places in their table by the list, and shall send a client to one
/// endpoint; those that fill one real server before the next begin with the first of the list.
fn has_one_order_for_all(scheduler: Scheduler) -> bool {
    matches!(
        scheduler,
        Scheduler::SourceHash
            | Scheduler::DestinationHash
            | Scheduler::MaglevHash
            | Scheduler::WeightedFailover
            | Scheduler::WeightedOverflow
    )
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test")]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use ipvs_netlink::{RealServerKey, Scheduler, SchedulerFlags, VirtualServer, VirtualServerKey};

    use super::*;
    use crate::memory::MemoryKernel;
    use crate::op::Dataplane as _;
    use crate::plan::Config;
    use crate::planner::BASE;
    use crate::state::{State, mark_entry};

    /// Virtual servers of this mark, one of each family, each with a real server.
    fn servers(mark: u32) -> State {
        let mut state = State::new();
        for (family, address) in [(Family::V4, "10.0.0.2"), (Family::V6, "fd00:10::2")] {
            let key = VirtualServerKey::FirewallMark { mark, family };
            let server = VirtualServer {
                key,
                scheduler: Scheduler::RoundRobin,
                scheduler_flags: SchedulerFlags::NONE,
                persistence: None,
                one_packet: false,
                persistence_engine: None,
            };
            let real_server = RealServerKey {
                address: address.parse().unwrap(),
                port: 0,
            };
            state.insert(
                Key::VirtualServer(key),
                Value::VirtualServer(Arc::new(server)),
            );
            state.insert(Key::RealServer(key, real_server), Value::RealServer(1));
        }
        state
    }

    /// Those of [`servers`] with the entries that own them.
    fn ours(mark: u32) -> State {
        let mut state = servers(mark);
        for family in Family::ALL {
            let role = Role::Marks;
            let key = Key::Entry(Set { family, role }, mark_entry(mark, family));
            state.insert(key, Value::Present);
        }
        state
    }

    /// A planner that wants this besides the usual.
    fn wanting(more: &State) -> Planner {
        let mut planner = Planner::new(Config::default());
        for (key, value) in more {
            planner.base.insert(*key, value.clone());
            planner.mark(*key, BASE);
        }
        planner
    }

    /// What is written until there is nothing to do, without what every process writes.
    fn written(planner: &mut Planner, kernel: &mut MemoryKernel, now: Instant) -> Vec<String> {
        let mut words = Vec::new();
        loop {
            let ops = planner.next(now);
            if ops.is_empty() {
                return words;
            }
            let usual = |op: &&Op| matches!(op.key(), Key::Set(_) | Key::Rules(..) | Key::Link);
            words.extend(ops.iter().filter(|op| !usual(op)).map(Op::to_string));
            let outcomes = kernel.apply(&ops);
            planner.commit(ops.into_iter().zip(outcomes), now);
        }
    }

    const MARKS: [u32; 5] = [1, 7, 0x4000, 0x7fff_ffff, u32::MAX];

    #[test]
    fn every_mark_is_an_entry_and_back() {
        for (mark, family) in MARKS.into_iter().flat_map(|m| Family::ALL.map(|f| (m, f))) {
            let server = VirtualServerKey::FirewallMark { mark, family };
            let entries: Vec<Key> = owning_entries(&server).collect();
            let [Key::Entry(set, entry)] = entries[..] else {
                panic!("{entries:?}");
            };
            assert_eq!(owned_by(set, &entry), Some(server));
        }
        let text = |mark, family| mark_entry(mark, family).to_string();
        assert_eq!(text(0x0102_0304, Family::V4), "1.2.3.4");
        assert_eq!(text(7, Family::V6), "::7");
        // No mark has more than 32 bits.
        let set = Set {
            family: Family::V6,
            role: Role::Marks,
        };
        let beyond = Entry::Ip("::1:0:1".parse().unwrap());
        assert_eq!(owned_by(set, &beyond), None);
    }

    #[test]
    fn a_mark_is_ours_before_its_server_comes_and_until_it_is_gone() {
        let now = Instant::now();
        let mut kernel = MemoryKernel::new();
        assert_eq!(
            written(&mut wanting(&ours(7)), &mut kernel, now),
            [
                "add entry 0.0.0.7 of set KUBE-IPVS-MARKS",
                "add entry ::7 of set KUBE-6-IPVS-MARKS",
                "add virtual server fwmark 7 (IPv4), scheduler rr",
                "add virtual server fwmark 7 (IPv6), scheduler rr",
                "add real server 10.0.0.2:0 of fwmark 7 (IPv4), weight 1",
                "add real server [fd00:10::2]:0 of fwmark 7 (IPv6), weight 1",
            ]
        );
        // The next process is told of no Service that has it; another mark is nobody's of ours.
        let foreign = servers(8);
        kernel.state.extend(foreign.clone());
        let mut planner = Planner::new(Config::default());
        let read = planner.read_agreed(&mut kernel).unwrap();
        planner.resync(read, true, now);
        assert_eq!(
            written(&mut planner, &mut kernel, now),
            [
                "remove virtual server fwmark 7 (IPv4)",
                "remove virtual server fwmark 7 (IPv6)",
                "remove entry 0.0.0.7 of set KUBE-IPVS-MARKS",
                "remove entry ::7 of set KUBE-6-IPVS-MARKS",
            ]
        );
        let mut left = planner.desired();
        left.extend(foreign.clone());
        assert_eq!(kernel.state, left);

        // A cleanup leaves it as well.
        let mut planner = Planner::of_nothing(Vec::new());
        kernel.state.extend(ours(9));
        let read = kernel.read(&planner.desired()).unwrap();
        planner.resync(read, true, now);
        written(&mut planner, &mut kernel, now);
        kernel.state.retain(|key, _| !matches!(key, Key::Rules(..)));
        assert_eq!(kernel.state, foreign);
    }

    #[test]
    fn a_server_whose_mark_was_removed_from_the_set_is_not_taken_for_gone() {
        let now = Instant::now();
        let (mut kernel, mut planner) = (MemoryKernel::new(), wanting(&ours(7)));
        written(&mut planner, &mut kernel, now);
        let entry = "entry 0.0.0.7 of set KUBE-IPVS-MARKS";
        kernel.state.retain(|key, _| key.to_string() != entry);
        planner.begin_reading();
        let base = planner.base.clone();
        let read = kernel.read(&base).unwrap();
        let drift = planner.differing(&read);
        assert_eq!(
            drift.iter().map(Key::to_string).collect::<Vec<_>>(),
            [entry]
        );
        planner.adopt(&drift, &read.state, now);
        assert_eq!(
            written(&mut planner, &mut kernel, now),
            [format!("add {entry}")]
        );
    }

    #[test]
    fn an_entry_of_a_mark_waits_while_its_server_stays() {
        let now = Instant::now();
        let (mut kernel, mut planner) = (MemoryKernel::new(), wanting(&ours(7)));
        written(&mut planner, &mut kernel, now);
        let mut planner = Planner::new(Config::default());
        let read = planner.read_agreed(&mut kernel).unwrap();
        planner.resync(read, true, now);
        let server = VirtualServerKey::FirewallMark {
            mark: 7,
            family: Family::V4,
        };
        let busy = crate::op::FailureKind::Busy;
        kernel.refuse.insert(Key::VirtualServer(server), busy);
        written(&mut planner, &mut kernel, now);
        let there: Vec<String> = kernel.state.keys().map(Key::to_string).collect();
        let has = |text: &str| there.iter().any(|key| key == text);
        assert!(has("entry 0.0.0.7 of set KUBE-IPVS-MARKS"), "{there:?}");
        assert!(!has("entry ::7 of set KUBE-6-IPVS-MARKS"), "{there:?}");
    }
}
