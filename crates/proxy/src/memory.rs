//! A kernel in memory: answers as the kernel does, for tests of the pure core. It proves nothing
//! about a real kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipset_rs::Entry;
use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_iptables::{Present, Ruleset, Table};
use ipvs_proxy_netlink::Family;

use self::faults::{Fault, Faults};
use crate::op::{
    Dataplane, Failure, FailureKind, Finished, Glance, Op, Outcome, ReadError, Reading, StaleFlows,
};
use crate::state::{Key, Role, Set, State, Value, is_ours, served_by};

pub mod faults;

/// A kernel in memory.
#[derive(Debug, Clone, Default)]
pub struct MemoryKernel {
    /// What it holds, also virtual servers of others: [`Dataplane::read_part`] leaves them out.
    pub state: State,
    /// Connections of real servers, as [`Dataplane::connections`] gives them.
    pub connections: BTreeMap<(VirtualServerKey, RealServerKey), u64>,
    /// Every op that it was given, in order.
    pub log: Vec<Op>,
    /// The addresses of its links.
    pub addresses: BTreeSet<IpAddr>,
    /// The UDP flows that it was told to forget.
    pub forgotten: StaleFlows,
    /// Keys whose ops it refuses.
    pub refuse: BTreeMap<Key, FailureKind>,
    /// What else goes wrong.
    pub faults: Faults,
    /// Keys whose ops are [started](Outcome::Started), and end by [`MemoryKernel::finish_slow`].
    pub slow: BTreeSet<Key>,
    /// The ops that were started.
    started: Vec<Op>,
    /// Keys of rules that can't be read.
    pub unreadable: BTreeSet<Key>,
    /// What [`Dataplane::finished`] tells next.
    pub finished: Vec<Finished>,
    /// Looks after each op at what is [exposed](MemoryKernel::exposed).
    pub guarded: bool,
    /// What was exposed after which op.
    pub leaks: Vec<(Op, Vec<Key>)>,
    /// What [`Glance::module`] is.
    pub module: u16,
    /// How many times it was read.
    pub readings: usize,
}

impl MemoryKernel {
    /// An empty kernel.
    #[must_use]
    pub fn new() -> MemoryKernel {
        MemoryKernel::default()
    }

    /// Where a packet to a VIP and port could reach a socket of the host: an address on the link
    /// without the rules, without the filter's guard, or let through with no virtual server.
    #[must_use]
    pub fn exposed(&self) -> Vec<Key> {
        let there = |key: Key| self.state.contains_key(&key);
        let mut exposed = Vec::new();
        for key in self.state.keys() {
            let open = match key {
                Key::Address(address) => {
                    let family = Family::of(*address);
                    let guard = Set {
                        family,
                        role: Role::IpvsIps,
                    };
                    !there(Key::Rules(family, Table::Filter))
                        || !there(Key::Entry(guard, Entry::Ip(*address)))
                }
                Key::Entry(
                    Set {
                        role: Role::Serving,
                        ..
                    },
                    Entry::IpPort(address, protocol, port),
                ) => {
                    there(Key::Address(*address))
                        && !there(Key::VirtualServer(VirtualServerKey::Address {
                            address: *address,
                            port: *port,
                            protocol: *protocol,
                        }))
                }
                Key::Entry(
                    set @ Set {
                        role: Role::Routed, ..
                    },
                    entry,
                ) => served_by(*set, entry).is_some_and(|vs| !there(Key::VirtualServer(vs))),
                _ => false,
            };
            if open {
                exposed.push(*key);
            }
        }
        exposed
    }

    /// Carries out the ops that were started; nothing is slow any more.
    pub fn finish_slow(&mut self) {
        self.slow.clear();
        for op in std::mem::take(&mut self.started) {
            let outcome = self.carry_out(&op);
            self.finished.push(Finished::Op(op, outcome));
        }
    }

    /// What must be there before a key can be.
    fn parent(key: &Key) -> Vec<Key> {
        match key {
            Key::Entry(set, _) => vec![Key::Set(*set)],
            Key::RealServer(vs, _) => vec![Key::VirtualServer(*vs)],
            Key::Address(_) => vec![Key::Link],
            Key::Rules(family, _) => Set::all(*family).map(Key::Set).collect(),
            Key::Set(_) | Key::Link | Key::VirtualServer(_) => Vec::new(),
            Key::RoutingRule(..) | Key::Route(_) => Vec::new(),
        }
    }

    fn carry_out(&mut self, op: &Op) -> Outcome {
        let failed = |kind, text: &str| {
            Outcome::Failed(Failure {
                kind,
                text: text.to_owned(),
            })
        };
        let key = op.key();
        if self.slow.contains(&key) {
            self.started.push(op.clone());
            return Outcome::Started;
        }
        if let Some(kind) = self.refuse.get(&key) {
            return failed(*kind, "refused on demand");
        }
        match self.faults.of(&key) {
            Some(Fault::Refused(kind)) => failed(kind, "refused on demand"),
            Some(Fault::LostRequest) => failed(FailureKind::Unknown, "no answer"),
            Some(Fault::LostAnswer) => {
                self.change(op);
                failed(FailureKind::Unknown, "no answer")
            }
            None => self.change(op),
        }
    }

    fn change(&mut self, op: &Op) -> Outcome {
        let failed = |text: &str| {
            Outcome::Failed(Failure {
                kind: FailureKind::Drift,
                text: text.to_owned(),
            })
        };
        let key = op.key();
        if Self::parent(&key)
            .iter()
            .any(|parent| !self.state.contains_key(parent))
        {
            return match op {
                Op::Remove(_) => Outcome::Done,
                _ => failed("ESRCH"),
            };
        }
        let there = self.state.contains_key(&key);
        match op {
            Op::Add(Key::VirtualServer(_) | Key::RealServer(..), _) if there => failed("EEXIST"),
            Op::Update(..) if !there => failed("ESRCH"),
            Op::Add(_, value) | Op::Update(_, value) => {
                self.state.insert(key, value.clone());
                Outcome::Done
            }
            Op::Remove(Key::VirtualServer(vs)) => {
                self.state.remove(&key);
                self.state
                    .retain(|k, _| !matches!(k, Key::RealServer(of, _) if of == vs));
                Outcome::Done
            }
            Op::Remove(_) => {
                self.state.remove(&key);
                Outcome::Done
            }
        }
    }
}

impl Dataplane for MemoryKernel {
    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        self.log.extend_from_slice(ops);
        let mut outcomes = Vec::with_capacity(ops.len());
        for op in ops {
            outcomes.push(self.carry_out(op));
            let exposed = if self.guarded {
                self.exposed()
            } else {
                Vec::new()
            };
            if !exposed.is_empty() {
                self.leaks.push((op.clone(), exposed));
            }
        }
        outcomes
    }

    fn read_part(&mut self, wanted: &State, reading: &mut Reading) -> Result<bool, ReadError> {
        self.readings += 1;
        reading.state = self.faults.read(self.state.clone())?;
        let servers = reading.state.keys().filter_map(|key| match key {
            Key::VirtualServer(vs) => Some(*vs),
            _ => None,
        });
        let ours: BTreeSet<VirtualServerKey> =
            servers.filter(|vs| is_ours(vs, &reading.state)).collect();
        reading.state.retain(|key, value| match key {
            Key::Rules(..) => wanted.get(key) == Some(value),
            Key::VirtualServer(vs) | Key::RealServer(vs, _) => ours.contains(vs),
            _ => true,
        });
        Ok(true)
    }

    fn finished(&mut self) -> Vec<Finished> {
        std::mem::take(&mut self.finished)
    }

    fn read_rules(&mut self, key: Key, wanted: &Ruleset) {
        let there = match self.state.get(&key) {
            _ if self.unreadable.contains(&key) => Err(ReadError("unreadable".to_owned())),
            Some(Value::Rules(rules)) if **rules == *wanted => Ok(self.state.get(&key).cloned()),
            _ => Ok(None),
        };
        self.finished.push(Finished::Read(key, there));
    }

    fn glance(&mut self, servers: &[VirtualServerKey]) -> Result<Glance, ReadError> {
        let mut glance = Glance {
            module: self.module,
            ..Glance::default()
        };
        for (key, value) in &self.state {
            match key {
                Key::Set(set) if *value == Value::Present => {
                    glance.sets.entry(*set).or_default();
                }
                Key::Entry(set, _) => glance.sets.entry(*set).or_default().0 += 1,
                _ => {}
            }
        }
        for (set, (_, references)) in &mut glance.sets {
            for table in Table::ALL {
                if let Some(Value::Rules(rules)) = self.state.get(&Key::Rules(set.family, table)) {
                    let named = rules.references();
                    *references += named.get(set.name().as_str()).copied().unwrap_or_default();
                }
            }
        }
        let there = |vs: &VirtualServerKey| self.state.contains_key(&Key::VirtualServer(*vs));
        glance.missing = servers.iter().filter(|vs| !there(vs)).copied().collect();
        Ok(glance)
    }

    fn rule_differences(&mut self, wanted: &Ruleset) -> Result<Vec<String>, ReadError> {
        let tables = wanted.tables.iter();
        let mut keys = tables.map(|rules| Key::Rules(wanted.family, rules.table));
        let there = keys.all(|key| match self.state.get(&key) {
            Some(Value::Rules(rules)) => rules.tables.iter().all(|t| wanted.tables.contains(t)),
            _ => false,
        });
        if there {
            Ok(Vec::new())
        } else {
            Ok(wanted.difference_lines(&Present::default()))
        }
    }

    fn connections(
        &mut self,
        of: VirtualServerKey,
    ) -> Result<BTreeMap<RealServerKey, u64>, ReadError> {
        let servers = self.state.keys().filter_map(|key| match key {
            Key::RealServer(vs, rs) if *vs == of => Some(*rs),
            _ => None,
        });
        Ok(servers
            .map(|rs| (rs, self.connections.get(&(of, rs)).copied().unwrap_or(0)))
            .collect())
    }

    fn node_addresses(&mut self) -> Result<BTreeSet<IpAddr>, ReadError> {
        Ok(self.addresses.clone())
    }

    fn forget_flows(&mut self, stale: &StaleFlows) {
        self.forgotten.extend(stale.iter().copied());
    }
}
