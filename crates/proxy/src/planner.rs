//! The planner: what is wanted against what was applied, key by key.
//!
//! A change of the cluster makes the Services that it touches dirty; planning a Service again
//! marks the keys that came, went or changed as *pending*. A failed op, a drift found by reading
//! the kernel and a full resync mark keys pending as well, and [`Planner::next`] turns pending
//! keys into ops: one code path for all.
//!
//! Ops come in rounds. A round holds, for each Service, the ops of its first phase that has any;
//! the caller carries them out, reports with [`Planner::commit`] and asks for the next round
//! until there is none. So an op is only ever given out once what it rests on is known to be in
//! the kernel, and when that failed, it waits instead of attracting packets that nobody serves.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipset_rs::Entry;
use ipvs_netlink::{RealServerKey, Scheduler, VirtualServer, VirtualServerKey};
use ipvs_proxy_netlink::{Family, Protocol};

use crate::cluster::Cluster;
use crate::model::{Change, Node, ObjectName, Service};
use crate::op::{FailureKind, Op, Outcome};
use crate::plan::{self, Config};
use crate::state::{Key, Role, Set, State, Value};

/// The most ops of a round, but for a single Service that has more.
const ROUND: usize = 1024;
/// How long after its weight went to 0, and how often from then on, a draining real server is
/// asked for its connections.
const POLL: Duration = Duration::from_secs(3);
/// The first pause after a failure, doubled each time up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

type ServiceId = u32;

/// Which ops belong together: the base first, then the API server's own Service, then the rest.
type Group = u32;
const BASE: Group = 0;
const API_SERVER: Group = 1;
const FIRST_OTHER: Group = 2;
/// What no Service claims any more.
const UNCLAIMED: Group = Group::MAX;

/// Two Services claim one virtual server; the first in creation order has it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// What they both claim.
    pub key: VirtualServerKey,
    /// The Service that has it.
    pub winner: ObjectName,
    /// The Service that goes without, until the winner is gone.
    pub loser: ObjectName,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conflict { key, winner, loser } = self;
        write!(f, "Service {loser}: {key} belongs to the older Service {winner}: not served")
    }
}

/// The planner. See the module's documentation.
#[derive(Debug)]
pub struct Planner {
    config: Config,
    node: Node,
    cluster: Cluster,
    base: State,
    dirty: BTreeSet<ObjectName>,
    ids: BTreeMap<ObjectName, ServiceId>,
    plans: BTreeMap<ServiceId, Planned>,
    next_id: ServiceId,
    records: BTreeMap<Key, Record>,
    pending: BTreeMap<Key, Group>,
    groups: BTreeMap<Group, BTreeSet<Key>>,
    failures: BTreeMap<Key, Pause>,
    drains: BTreeMap<(VirtualServerKey, RealServerKey), Drain>,
    /// What the kernel holds and nobody claims, while not every source has listed: it stays.
    held: BTreeSet<Key>,
    conflicts: BTreeSet<Conflict>,
    doubt: bool,
}

#[derive(Debug)]
struct Planned {
    name: ObjectName,
    /// Creation time and UID: what decides between claims, with the name as the last resort.
    /// Services that have no creation time come last.
    rank: (bool, i64, Box<str>),
    items: Box<[(Key, Value)]>,
}

impl Planned {
    fn get(&self, key: &Key) -> Option<&Value> {
        let index = self.items.binary_search_by_key(key, |(key, _)| *key).ok()?;
        self.items.get(index).map(|(_, value)| value)
    }

    fn order(&self) -> impl Ord {
        (self.rank.clone(), self.name.clone())
    }
}

/// What is known of one key: who claims it and what the kernel holds.
#[derive(Debug, Default)]
struct Record {
    applied: Option<Value>,
    claims: Claims,
}

/// The Services that claim a key; most have one. A real server has none of its own: who has its
/// virtual server decides.
#[derive(Debug, Default)]
struct Claims {
    first: Option<ServiceId>,
    #[expect(clippy::box_collection, reason = "8 bytes a record, of which there are many, not 24")]
    more: Option<Box<Vec<ServiceId>>>,
}

impl Claims {
    fn iter(&self) -> impl Iterator<Item = ServiceId> {
        self.first
            .into_iter()
            .chain(self.more.iter().flat_map(|more| more.iter().copied()))
    }

    fn add(&mut self, id: ServiceId) {
        match self.first {
            None => self.first = Some(id),
            Some(_) => self.more.get_or_insert_default().push(id),
        }
    }

    fn remove(&mut self, id: ServiceId) {
        let left: Vec<ServiceId> = self.iter().filter(|claim| *claim != id).collect();
        *self = Claims::default();
        left.into_iter().for_each(|id| self.add(id));
    }
}

#[derive(Debug)]
struct Pause {
    attempts: u32,
    until: Instant,
    group: Group,
}

#[derive(Debug)]
struct Drain {
    next_poll: Instant,
    /// Its last connection is gone: it may be removed.
    empty: bool,
}

/// The order of ops within a Service. Appearing: what masquerades and owns, the servers, the
/// address, then what lets packets in. Disappearing: the other way round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
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
    DropBase,
}

fn phase(op: &Op) -> Phase {
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
        (Key::Set(_) | Key::Rules(_) | Key::Link, true) => Phase::DropBase,
    }
}

impl Planner {
    /// A planner that knows of no object and of nothing in the kernel.
    #[must_use]
    pub fn new(config: Config) -> Planner {
        let base = plan::base(&config);
        let mut planner = Planner {
            config,
            node: Node::default(),
            cluster: Cluster::default(),
            dirty: BTreeSet::new(),
            ids: BTreeMap::new(),
            plans: BTreeMap::new(),
            next_id: 0,
            records: BTreeMap::new(),
            pending: BTreeMap::new(),
            groups: BTreeMap::new(),
            failures: BTreeMap::new(),
            drains: BTreeMap::new(),
            held: BTreeSet::new(),
            conflicts: BTreeSet::new(),
            doubt: false,
            base: State::new(),
        };
        for key in base.keys() {
            planner.mark(*key, BASE);
        }
        planner.base = base;
        planner
    }

    /// Takes in a change of the cluster. Its cost depends on the change alone; a changed node
    /// touches every Service with node ports. Planning waits for [`Planner::next`], so that
    /// many changes of one Service cost one plan.
    pub fn apply(&mut self, change: Change) {
        let touched = match change {
            Change::Service(name, service) => self.cluster.service(name, service),
            Change::Slice(name, slice) => self.cluster.slice(name, slice),
            Change::Node(node) => {
                // A node without addresses is a node that we know nothing of.
                if node.addresses.is_empty() || node == self.node {
                    return;
                }
                self.node = node;
                let has_node_port = |s: &Service| s.ports.iter().any(|p| p.node_port.is_some());
                let services = self.cluster.services().filter(|(_, s)| has_node_port(s));
                services.map(|(name, _)| name.clone()).collect()
            }
        };
        self.dirty.extend(touched);
    }

    /// The next round of ops, empty when there is nothing to do now. Each op given out must be
    /// reported with [`Planner::commit`] before the next call.
    pub fn next(&mut self, now: Instant) -> Vec<Op> {
        self.replan();
        self.wake(now);
        let mut round: Vec<(Phase, Group, Op)> = Vec::new();
        let mut settled = Vec::new();
        for (group, keys) in &self.groups {
            let mut ops: Vec<(Phase, Op)> = Vec::new();
            for key in keys {
                match self.op(key) {
                    Some(op) => ops.push((phase(&op), op)),
                    None => settled.push(*key),
                }
            }
            ops.retain(|(_, op)| self.may(op));
            let Some(first) = ops.iter().map(|(phase, _)| *phase).min() else {
                continue;
            };
            round.extend(
                ops.into_iter()
                    .filter(|(phase, _)| *phase == first)
                    .map(|(phase, op)| (phase, *group, op)),
            );
            // The base and the API server's own Service are rounds of their own.
            if *group <= API_SERVER || round.len() >= ROUND {
                break;
            }
        }
        for key in settled {
            self.unmark(&key);
            self.settle(key, now);
        }
        round.sort_by(|(p, g, a), (q, h, b)| (p, g, a.key()).cmp(&(q, h, b.key())));
        round.into_iter().map(|(_, _, op)| op).collect()
    }

    /// Takes in what became of the ops of a round.
    pub fn commit(&mut self, results: impl IntoIterator<Item = (Op, Outcome)>, now: Instant) {
        for (op, outcome) in results {
            let key = op.key();
            let group = self.unmark(&key).unwrap_or(UNCLAIMED);
            match outcome {
                Outcome::Done => {
                    self.failures.remove(&key);
                    match op {
                        Op::Add(_, value) | Op::Update(_, value) => {
                            self.records.entry(key).or_default().applied = Some(value);
                        }
                        Op::Remove(_) => self.forget(key),
                    }
                    self.check(key, group, now);
                }
                // It failed because its virtual server did: it waits for that.
                Outcome::Failed(_) if self.is_orphan(&op) => self.mark(key, group),
                Outcome::Failed(failure) => {
                    self.doubt |= matches!(failure.kind, FailureKind::Drift | FailureKind::Unknown);
                    let attempts = self.failures.get(&key).map_or(0, |pause| pause.attempts);
                    let pause = FIRST_PAUSE * 2_u32.saturating_pow(attempts.min(6));
                    self.failures.insert(
                        key,
                        Pause {
                            attempts: attempts + 1,
                            until: now + pause.min(LONGEST_PAUSE),
                            group,
                        },
                    );
                }
            }
        }
    }

    /// Takes in what the kernel holds of ours, whole, and marks whatever differs. At start this
    /// adopts what an earlier process left.
    ///
    /// With `prune`, what nobody claims goes. Without, it stays until it is claimed, or until a
    /// resync with `prune`: not every source of objects has listed, and what seems unclaimed may
    /// be in use.
    pub fn resync(&mut self, read: State, prune: bool, now: Instant) {
        self.replan();
        self.doubt = false;
        self.held.clear();
        if !prune {
            let unclaimed = read.keys().filter(|key| self.claimed(key).is_none());
            self.held = unclaimed.copied().collect();
        }
        for record in self.records.values_mut() {
            record.applied = None;
        }
        for (key, value) in read {
            self.records.entry(key).or_default().applied = Some(value);
        }
        self.drains.retain(|(vs, rs), _| {
            self.records
                .get(&Key::RealServer(*vs, *rs))
                .is_some_and(|r| r.applied.is_some())
        });
        let base = self.base.keys().copied();
        let keys: BTreeSet<Key> = self.records.keys().copied().chain(base).collect();
        let planned: Vec<(Key, Group)> = self
            .plans
            .iter()
            .flat_map(|(id, p)| {
                let group = self.group(*id);
                p.items.iter().map(move |(key, _)| (*key, group))
            })
            .collect();
        for (key, group) in planned {
            self.check(key, group, now);
        }
        for key in keys {
            let group = if self.base.contains_key(&key) {
                BASE
            } else {
                UNCLAIMED
            };
            self.check(key, group, now);
        }
        self.records
            .retain(|_, r| r.applied.is_some() || r.claims.first.is_some());
    }

    /// The kernel must be read again and handed to [`Planner::resync`]: it is not as we thought,
    /// or the outcome of an op is unknown.
    #[must_use]
    pub fn in_doubt(&self) -> bool {
        self.doubt
    }

    /// The virtual servers whose draining real servers are due for a look at their connections.
    #[must_use]
    pub fn drains_due(&self, now: Instant) -> BTreeSet<VirtualServerKey> {
        let due = self
            .drains
            .iter()
            .filter(|(_, drain)| !drain.empty && drain.next_poll <= now);
        due.map(|((server, _), _)| *server).collect()
    }

    /// Takes in the connections of the real servers of a virtual server: a draining one without
    /// any is removed in the next round, and one that is not there any more is forgotten.
    pub fn observe(
        &mut self,
        of: VirtualServerKey,
        connections: &BTreeMap<RealServerKey, u64>,
        now: Instant,
    ) {
        let lowest = RealServerKey {
            address: IpAddr::from([0, 0, 0, 0]),
            port: 0,
        };
        let ours = self
            .drains
            .range_mut((of, lowest)..)
            .take_while(|((vs, _), _)| *vs == of);
        let mut finished = Vec::new();
        for ((vs, rs), drain) in ours {
            drain.next_poll = now + POLL;
            if connections.get(rs).is_some_and(|count| *count > 0) {
                continue;
            }
            drain.empty = true;
            finished.push((Key::RealServer(*vs, *rs), connections.contains_key(rs)));
        }
        for (key, there) in finished {
            if !there && let Some(record) = self.records.get_mut(&key) {
                record.applied = None;
            }
            self.mark(key, UNCLAIMED);
        }
    }

    /// When [`Planner::next`] or [`Planner::drains_due`] has something to say again without any
    /// news.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let paused = self
            .failures
            .iter()
            .filter(|(key, _)| !self.pending.contains_key(key));
        let retries = paused.map(|(_, pause)| pause.until);
        let polls = self
            .drains
            .values()
            .filter(|d| !d.empty)
            .map(|d| d.next_poll);
        retries.chain(polls).min()
    }

    /// What the kernel should hold for the objects as they are now, drains aside.
    pub fn desired(&mut self) -> State {
        self.replan();
        let mut state = self.base.clone();
        for planned in self.plans.values() {
            for (key, _) in &planned.items {
                if let Some(value) = self.claimed(key) {
                    state.insert(*key, value.clone());
                }
            }
        }
        state
    }

    /// The rules and sets that are needed whatever the Services are.
    #[must_use]
    pub fn base(&self) -> &State {
        &self.base
    }

    /// The conflicts that came up since the last call: virtual servers that a Service claims and
    /// another has, or had until now.
    pub fn take_conflicts(&mut self) -> BTreeSet<Conflict> {
        self.replan();
        std::mem::take(&mut self.conflicts)
    }

    /// Puts off the look at the connections of a virtual server's draining real servers.
    pub fn look_later(&mut self, server: VirtualServerKey, now: Instant) {
        let ours = self.drains.iter_mut().filter(|((vs, _), _)| *vs == server);
        ours.for_each(|(_, drain)| drain.next_poll = now + POLL);
    }

    /// The Service that a key belongs to now.
    #[must_use]
    pub fn owner(&self, key: &Key) -> Option<&ObjectName> {
        let key = match key {
            Key::RealServer(vs, _) => Key::VirtualServer(*vs),
            other => *other,
        };
        self.winner(self.records.get(&key)?)
            .map(|planned| &planned.name)
    }

    /// Plans every dirty Service and marks what differs from its last plan.
    fn replan(&mut self) {
        for name in std::mem::take(&mut self.dirty) {
            let service = self.cluster.get(&name);
            let items = service.map_or_else(Vec::new, |service| {
                plan::plan(
                    service,
                    self.cluster.slices_of(&name),
                    &self.node,
                    &self.config,
                )
            });
            let rank = service
                .map(|s| (s.created.is_none(), s.created.unwrap_or(0), s.uid.clone()))
                .unwrap_or_default();
            let gone = service.is_none();
            let id = match self.ids.get(&name) {
                Some(id) => *id,
                None if gone => continue,
                None => self.new_id(&name),
            };
            let old = self
                .plans
                .get(&id)
                .map_or(&[][..], |planned| &planned.items);
            let touched = differing(old, &items);
            let rerank = self
                .plans
                .get(&id)
                .is_some_and(|planned| planned.rank != rank);
            // A new rank may turn every conflict, so everything is looked at again.
            let (came, went): (Vec<Key>, Vec<Key>) = (
                touched.iter().filter(|t| t.came()).map(|t| t.key).collect(),
                touched.iter().filter(|t| t.went()).map(|t| t.key).collect(),
            );
            let mut marks: BTreeSet<Key> = touched.iter().map(|t| t.key).collect();
            if rerank {
                marks.extend(items.iter().map(|(key, _)| *key));
            }
            // Real servers follow their virtual server's winner: before and after.
            for key in came
                .iter()
                .chain(&went)
                .chain(rerank.then_some(&marks).into_iter().flatten())
            {
                if let Key::VirtualServer(vs) = key {
                    self.real_servers_of_all_claims(*vs)
                        .into_iter()
                        .for_each(|rs| self.mark(rs, self.group(id)));
                }
            }
            for key in went {
                if !matches!(key, Key::RealServer(..))
                    && let Some(record) = self.records.get_mut(&key)
                {
                    record.claims.remove(id);
                }
            }
            let contested = came.clone();
            for key in came {
                self.held.remove(&key);
                if !matches!(key, Key::RealServer(..)) {
                    self.records.entry(key).or_default().claims.add(id);
                }
            }
            let group = self.group(id);
            if gone {
                self.plans.remove(&id);
                self.ids.remove(&name);
            } else {
                let planned = Planned {
                    name,
                    rank,
                    items: items.into_boxed_slice(),
                };
                self.plans.insert(id, planned);
            }
            for key in marks {
                self.mark(key, group);
            }
            for key in contested {
                self.note_conflict(&key);
            }
        }
    }

    /// Notes who goes without a virtual server that more than one Service claims.
    fn note_conflict(&mut self, key: &Key) {
        let Key::VirtualServer(vs) = key else { return };
        let Some(record) = self.records.get(key).filter(|r| r.claims.more.is_some()) else { return };
        let Some(winner) = self.winner(record) else { return };
        let losers = record.claims.iter().filter_map(|id| self.plans.get(&id));
        let conflicts: Vec<Conflict> = losers
            .filter(|loser| loser.name != winner.name)
            .map(|loser| Conflict {
                key: *vs,
                winner: winner.name.clone(),
                loser: loser.name.clone(),
            })
            .collect();
        self.conflicts.extend(conflicts);
    }

    /// Every real server that any claimant of a virtual server, or the kernel, has under it.
    /// Few virtual servers have more than one claimant.
    fn real_servers_of_all_claims(&self, vs: VirtualServerKey) -> Vec<Key> {
        let Some(record) = self.records.get(&Key::VirtualServer(vs)) else {
            return Vec::new();
        };
        let (low, high) = real_servers(vs);
        let mut keys: Vec<Key> = self
            .records
            .range(low..=high)
            .map(|(key, _)| *key)
            .collect();
        for planned in record.claims.iter().filter_map(|id| self.plans.get(&id)) {
            let start = planned.items.partition_point(|(key, _)| *key < low);
            let under = planned.items.get(start..).unwrap_or_default();
            keys.extend(
                under
                    .iter()
                    .map(|(key, _)| *key)
                    .take_while(|key| *key <= high),
            );
        }
        keys
    }

    fn new_id(&mut self, name: &ObjectName) -> ServiceId {
        // The API server's own Service is the first of all.
        let id = if &*name.namespace == "default" && &*name.name == "kubernetes" {
            0
        } else {
            self.next_id = self.next_id.wrapping_add(1).max(1);
            while self.plans.contains_key(&self.next_id) {
                self.next_id = self.next_id.wrapping_add(1).max(1);
            }
            self.next_id
        };
        self.ids.insert(name.clone(), id);
        id
    }

    fn group(&self, id: ServiceId) -> Group {
        if id == 0 {
            API_SERVER
        } else {
            FIRST_OTHER.saturating_add(id).min(UNCLAIMED - 1)
        }
    }

    fn winner(&self, record: &Record) -> Option<&Planned> {
        let claims = record.claims.iter().filter_map(|id| self.plans.get(&id));
        match record.claims.more {
            None => { claims }.next(),
            Some(_) => claims.min_by_key(|planned| planned.order()),
        }
    }

    /// What the claims say that the kernel should hold at a key.
    fn claimed(&self, key: &Key) -> Option<&Value> {
        if let Some(value) = self.base.get(key) {
            return Some(value);
        }
        let decides = match key {
            Key::RealServer(vs, _) => Key::VirtualServer(*vs),
            other => *other,
        };
        self.winner(self.records.get(&decides)?)?.get(key)
    }

    /// What the kernel should hold at a key now: what is claimed, what is held, or a drain.
    fn wanted(&self, key: &Key) -> Option<Value> {
        match self.claimed(key) {
            Some(value) => Some(value.clone()),
            None if self.held.contains(key) => self.applied(key).cloned(),
            None => self.drains_to(key),
        }
    }

    /// The draining form of a real server that nobody claims: weight 0, all else as it is. `None`
    /// when it has not to drain: it is not there, its virtual server goes, it is UDP, it has no
    /// connection left, or the scheduler is `dh`, which has one real server for all clients of a
    /// VIP and would refuse them all.
    fn drains_to(&self, key: &Key) -> Option<Value> {
        let Key::RealServer(vs, rs) = key else {
            return None;
        };
        let applied = self.applied(key)?;
        if matches!(self.claimed(&Key::VirtualServer(*vs))?, Value::VirtualServer(server) if !drains(server))
            || self
                .drains
                .get(&(*vs, *rs))
                .is_some_and(|drain| drain.empty)
        {
            return None;
        }
        let mut server = applied.real_server(*rs)?;
        server.weight = 0;
        Some(Value::of_real_server(&server))
    }

    fn applied(&self, key: &Key) -> Option<&Value> {
        self.records.get(key)?.applied.as_ref()
    }

    /// The op that a key needs, if any.
    fn op(&self, key: &Key) -> Option<Op> {
        match (self.applied(key), self.wanted(key)) {
            (None, Some(value)) => Some(Op::Add(*key, value)),
            (Some(applied), Some(value)) if *applied != value => Some(Op::Update(*key, value)),
            (Some(_), None) => Some(Op::Remove(*key)),
            _ => None,
        }
    }

    /// Whether what an op rests on is in the kernel (or, for a real server, goes before it in
    /// the same round), and whether nothing rests on what it takes away.
    fn may(&self, op: &Op) -> bool {
        let there = |key: Key| self.applied(&key).is_some();
        match op {
            Op::Add(Key::Rules(family), _) => Set::all(*family).all(|set| there(Key::Set(set))),
            Op::Add(Key::Entry(set, entry), _) => {
                there(Key::Set(*set))
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
            Op::Remove(Key::Entry(set, entry)) => match (set.role, entry) {
                (Role::IpvsIps, Entry::Ip(address)) => !there(Key::Address(*address)),
                (Role::ClusterIp | Role::Owned, Entry::IpPort(address, protocol, port)) => {
                    !there(Key::VirtualServer(VirtualServerKey::Address {
                        address: *address,
                        port: *port,
                        protocol: *protocol,
                    }))
                }
                _ => true,
            },
            _ => true,
        }
    }

    /// The set entries by which a virtual server is known as ours.
    fn owning_entries(&self, vs: &VirtualServerKey) -> impl Iterator<Item = Key> {
        let family = vs.family();
        let entry = match vs {
            VirtualServerKey::Address {
                address,
                port,
                protocol,
            } => Some(Entry::IpPort(*address, *protocol, *port)),
            VirtualServerKey::FirewallMark { .. } => None,
        };
        [Role::ClusterIp, Role::Owned]
            .into_iter()
            .filter_map(move |role| entry.map(|entry| Key::Entry(Set { family, role }, entry)))
    }

    fn mark(&mut self, key: Key, group: Group) {
        let group = match self.pending.get(&key) {
            Some(known) if *known <= group => return,
            Some(known) => {
                if let Some(keys) = self.groups.get_mut(known) {
                    keys.remove(&key);
                }
                group
            }
            None => group,
        };
        self.pending.insert(key, group);
        self.groups.entry(group).or_default().insert(key);
    }

    fn unmark(&mut self, key: &Key) -> Option<Group> {
        let group = self.pending.remove(key)?;
        if let Some(keys) = self.groups.get_mut(&group) {
            keys.remove(key);
            if keys.is_empty() {
                self.groups.remove(&group);
            }
        }
        Some(group)
    }

    /// Marks a key if it needs an op, and tidies up after it if not. One that pauses after a
    /// failure goes on pausing: reading the kernel again is no reason to try again.
    fn check(&mut self, key: Key, group: Group, now: Instant) {
        if self.op(&key).is_some() {
            if !self.failures.contains_key(&key) {
                self.mark(key, group);
            }
        } else {
            self.settle(key, now);
        }
    }

    /// A key is as it should be: note a drain that has begun, forget one that has ended.
    fn settle(&mut self, key: Key, now: Instant) {
        if self.op(&key).is_some() {
            return;
        }
        if let Key::RealServer(vs, rs) = key {
            let held = self.held.contains(&key);
            if self.claimed(&key).is_none() && self.applied(&key).is_some() && !held {
                let drain = Drain {
                    next_poll: now + POLL,
                    empty: false,
                };
                self.drains.entry((vs, rs)).or_insert(drain);
            } else {
                self.drains.remove(&(vs, rs));
            }
        }
        self.failures.remove(&key);
        if self
            .records
            .get(&key)
            .is_some_and(|r| r.applied.is_none() && r.claims.first.is_none())
        {
            self.records.remove(&key);
        }
    }

    /// The kernel holds nothing at a key any more; a virtual server took its real servers along.
    fn forget(&mut self, key: Key) {
        if let Some(record) = self.records.get_mut(&key) {
            record.applied = None;
        }
        let Key::VirtualServer(vs) = key else { return };
        let (low, high) = real_servers(vs);
        let children: Vec<Key> = self
            .records
            .range(low..=high)
            .map(|(key, _)| *key)
            .collect();
        for child in children {
            self.records.remove(&child);
            if let Key::RealServer(vs, rs) = child {
                self.drains.remove(&(vs, rs));
            }
            if self.op(&child).is_none() {
                self.unmark(&child);
                self.failures.remove(&child);
            }
        }
    }

    /// A real server whose virtual server is not in the kernel.
    fn is_orphan(&self, op: &Op) -> bool {
        matches!(op.key(), Key::RealServer(vs, _)
            if self.applied(&Key::VirtualServer(vs)).is_none())
    }

    /// Marks the keys whose pause after a failure is over.
    fn wake(&mut self, now: Instant) {
        let over: Vec<(Key, Group)> = self
            .failures
            .iter()
            .filter(|(_, pause)| pause.until <= now)
            .map(|(key, pause)| (*key, pause.group))
            .collect();
        for (key, group) in over {
            self.mark(key, group);
        }
    }
}

/// Whether a real server of this virtual server drains when it goes.
fn drains(server: &VirtualServer) -> bool {
    let tcp_like = match server.key {
        VirtualServerKey::Address { protocol, .. } => {
            matches!(protocol, Protocol::Tcp | Protocol::Sctp)
        }
        VirtualServerKey::FirewallMark { .. } => false,
    };
    tcp_like && server.scheduler != Scheduler::DestinationHash
}

/// The lowest and the highest key that a real server of a virtual server can have.
fn real_servers(vs: VirtualServerKey) -> (Key, Key) {
    let low = RealServerKey {
        address: IpAddr::from([0; 4]),
        port: 0,
    };
    let high = RealServerKey {
        address: IpAddr::from([u8::MAX; 16]),
        port: u16::MAX,
    };
    (Key::RealServer(vs, low), Key::RealServer(vs, high))
}

struct Touched {
    key: Key,
    old: bool,
    new: bool,
}

impl Touched {
    fn came(&self) -> bool {
        self.new && !self.old
    }

    fn went(&self) -> bool {
        self.old && !self.new
    }
}

/// The keys that are in one of two sorted plans only, or in both with another value.
fn differing(old: &[(Key, Value)], new: &[(Key, Value)]) -> Vec<Touched> {
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    let mut touched = Vec::new();
    loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return touched,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some((a, _)), Some((b, _))) => a.cmp(b),
        };
        let a = order.is_le().then(|| old.next()).flatten();
        let b = order.is_ge().then(|| new.next()).flatten();
        let Some((key, _)) = a.or(b) else {
            return touched;
        };
        if a.map(|(_, value)| value) != b.map(|(_, value)| value) {
            touched.push(Touched {
                key: *key,
                old: a.is_some(),
                new: b.is_some(),
            });
        }
    }
}
