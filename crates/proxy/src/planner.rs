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

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_netlink::{Family, Protocol};

use crate::cluster::Cluster;
use crate::model::{Change, Node, ObjectName, Service};
use crate::op::{FailureKind, Op, Outcome, StaleFlows};
use crate::plan::{self, Config};
use crate::state::{Key, Set, State, Value};

mod claims;
mod dirty;
mod drains;
mod failures;
mod health;
mod order;
mod pending;
mod reading;
mod refusals;
mod servers;

pub use claims::{Conflict, Takeover};
pub use drains::{DrainNews, DrainStep};

use claims::{Planned, Record};
use dirty::Dirty;
use drains::{Drains, is_udp};
use failures::Failures;
use health::HealthPorts;
use order::Place;
use pending::Pending;
use refusals::Refusals;
use servers::RealServers;

/// The most that a round costs; most ops cost 1 ([`Planner::cost`]).
const ROUND: usize = 256;
/// A virtual server with so many real servers makes each that is added cost 1 more: the kernel looks through them all.
const CROWD: usize = 1000;
/// The same of addresses on the link, for one that comes or goes.
const ADDRESSES: usize = 400;
/// A Service with more virtual servers and real servers than this is planned when no other has to be, and then not again for
/// [`REST`].
const LARGE: usize = 10_000;
const REST: Duration = Duration::from_secs(1);
/// How long after its weight went to 0, and how often from then on, a draining real server is
/// asked for its connections.
const POLL: Duration = Duration::from_secs(3);
/// How many more readings there may be until two agree.
const READINGS: usize = 5;

type ServiceId = u32;

/// Which ops belong together: the base first, then the API server's own Service, then the rest.
type Group = u32;
const BASE: Group = 0;
const API_SERVER: Group = 1;
const FIRST_OTHER: Group = 2;
/// What no Service claims any more.
const UNCLAIMED: Group = Group::MAX;

/// The planner. See the module's documentation.
#[derive(Debug)]
pub struct Planner {
    config: Config,
    node: Node,
    links_known: bool,
    /// The addresses of the links will be told, and have not been yet.
    links_awaited: bool,
    cluster: Cluster,
    base: State,
    dirty: Dirty,
    /// Keys of large Services that are still to be marked.
    marking: VecDeque<(Group, std::vec::IntoIter<Key>)>,
    ids: BTreeMap<ObjectName, ServiceId>,
    plans: BTreeMap<ServiceId, Planned>,
    next_id: ServiceId,
    /// All but real servers.
    records: BTreeMap<Key, Record>,
    /// How many entries the kernel's sets hold.
    entries: BTreeMap<Set, u32>,
    /// How many addresses the kernel's link holds.
    addresses: usize,
    /// The last virtual server that [`Planner::sample`] named.
    sampled: Option<Key>,
    real_servers: RealServers,
    pending: Pending,
    failures: Failures,
    drains: Drains,
    /// Deadlines of drains that an earlier process began, until they are found in the kernel.
    remembered: BTreeMap<(VirtualServerKey, RealServerKey), Instant>,
    /// Changes whenever a drain begins or ends.
    drain_changes: u64,
    drain_news: Vec<DrainNews>,
    /// UDP virtual servers to which packets come once all that leads to them is there.
    reached: BTreeSet<VirtualServerKey>,
    /// UDP flows whose real server went; all of a virtual server (`None`) that went, or that got
    /// its first real server.
    stale: StaleFlows,
    /// What the kernel holds and nobody claims, while not every source has listed: it stays.
    held: BTreeSet<Key>,
    conflicts: BTreeSet<Conflict>,
    refusals: Refusals,
    health: HealthPorts,
    /// By virtual server: the Service that had it and the one that has it now.
    takeovers: BTreeMap<VirtualServerKey, (ObjectName, ObjectName)>,
    /// Keys whose op was given out and has not ended.
    started: BTreeSet<Key>,
    /// Rules that could not be read, so that they get no op; whether they are being read.
    unread: BTreeMap<Key, bool>,
    /// What ops touched since a reading began.
    touched: Option<BTreeSet<Key>>,
    doubt: bool,
}

impl Planner {
    /// A planner that knows of no object and of nothing in the kernel.
    #[must_use]
    pub fn new(config: Config) -> Planner {
        let base = plan::base(&config);
        let mut planner = Planner {
            config,
            node: Node::default(),
            links_known: false,
            links_awaited: false,
            cluster: Cluster::default(),
            dirty: Dirty::default(),
            marking: VecDeque::new(),
            ids: BTreeMap::new(),
            plans: BTreeMap::new(),
            next_id: 0,
            records: BTreeMap::new(),
            entries: BTreeMap::new(),
            addresses: 0,
            sampled: None,
            real_servers: RealServers::default(),
            pending: Pending::default(),
            failures: Failures::default(),
            drains: Drains::default(),
            remembered: BTreeMap::new(),
            drain_changes: 0,
            drain_news: Vec::new(),
            reached: BTreeSet::new(),
            stale: BTreeSet::new(),
            held: BTreeSet::new(),
            conflicts: BTreeSet::new(),
            refusals: Refusals::default(),
            health: HealthPorts::default(),
            takeovers: BTreeMap::new(),
            started: BTreeSet::new(),
            unread: BTreeMap::new(),
            touched: None,
            doubt: false,
            base: State::new(),
        };
        for key in base.keys() {
            planner.mark(*key, BASE);
        }
        planner.base = base;
        planner
    }

    /// A planner that wants nothing at all in the kernel: what a reading shows goes, in the order
    /// in which it can, but for virtual servers in these networks.
    #[must_use]
    pub fn of_nothing(exclude_cidrs: Vec<IpNet>) -> Planner {
        let mut planner = Planner::new(Config {
            exclude_cidrs,
            ..Config::default()
        });
        planner.base.clear();
        planner.pending = Pending::default();
        planner
    }

    /// Says that [`Change::NodeAddresses`] will come. External addresses are not served before:
    /// one of them may be the node's own, and must never be on the dummy link then.
    pub fn await_node_addresses(&mut self) {
        self.links_awaited = true;
    }

    /// Whether the node's addresses are still to come, so that nobody knows what is served on
    /// them: nothing that seems unclaimed may go before.
    #[must_use]
    pub fn awaits_node_addresses(&self) -> bool {
        self.links_awaited
    }

    /// Takes in a change of the cluster. Its cost depends on the change alone; changed addresses of the node touch every Service
    /// with node ports, another zone those whose endpoints are hinted for zones. Planning waits for [`Planner::next`], so that
    /// many changes of one Service cost one plan.
    pub fn apply(&mut self, change: Change) {
        let touched = match change {
            Change::Service(name, service) => self.cluster.service(name, service),
            Change::Slice(name, slice) => self.cluster.slice(name, slice),
            Change::Node(mut node) => {
                if self.links_known {
                    node.addresses.clone_from(&self.node.addresses);
                }
                // A Node that was made anew may get its addresses later.
                if node.primary.is_empty() {
                    node.primary.clone_from(&self.node.primary);
                }
                self.change_node(node)
            }
            Change::PodCidrs(networks) => {
                let touched = self.cluster.guard.note_pod_cidrs(&networks);
                self.change_pod_cidrs(networks);
                touched
            }
            Change::Needed(by, addresses) => self.cluster.guard.note_needed(by, addresses),
            Change::Listeners(listeners) => {
                self.cluster.guard.note_listeners(listeners, &self.node)
            }
            Change::NodeAddresses(addresses) => {
                let known = !addresses.is_empty();
                self.links_known |= known;
                let mut touched = self.change_node(Node {
                    addresses,
                    ..self.node.clone()
                });
                if known && std::mem::replace(&mut self.links_awaited, false) {
                    let external = self.cluster.services().filter(|(_, s)| s.is_external());
                    touched.extend(external.map(|(name, _)| name.clone()));
                }
                touched
            }
        };
        self.dirty.extend(touched);
    }

    /// Notes the networks of the node's pods, where they count: the rules that name them change.
    fn change_pod_cidrs(&mut self, networks: Vec<IpNet>) {
        let config = &mut self.config;
        if !config.node_cidrs || networks.is_empty() || config.cluster_cidrs == networks {
            return;
        }
        config.cluster_cidrs = networks;
        self.base = plan::base(&self.config);
        let keys = self.base.keys().filter(|key| matches!(key, Key::Rules(..)));
        for key in keys.copied().collect::<Vec<_>>() {
            self.mark(key, BASE);
        }
    }

    /// Takes in that the node can serve other families, or its tools do something else, than was known: what is of another
    /// family goes or comes.
    pub fn suit(&mut self, families: Vec<Family>, random_fully: bool) {
        let config = &mut self.config;
        if config.families == families && config.random_fully == random_fully {
            return;
        }
        (config.families, config.random_fully) = (families, random_fully);
        let before = std::mem::replace(&mut self.base, plan::base(&self.config));
        let keys: BTreeSet<Key> = before.keys().chain(self.base.keys()).copied().collect();
        for key in keys {
            if self.base.contains_key(&key) {
                self.mark(key, BASE);
            } else {
                self.unread.remove(&key);
                self.failures.remove(&key);
                self.mark(key, UNCLAIMED);
            }
        }
        let services = self.cluster.services().map(|(name, _)| name.clone());
        self.dirty.extend(services);
    }

    /// The networks by which pods are told, empty where they are not, or not yet.
    #[must_use]
    pub fn pod_cidrs(&self) -> &[IpNet] {
        &self.config.cluster_cidrs
    }

    /// Whether [`Change::PodCidrs`] is still to come: until then the rules are those of a node that
    /// knows nothing of its pods' networks.
    #[must_use]
    pub fn awaits_pod_cidrs(&self) -> bool {
        self.config.node_cidrs && self.config.cluster_cidrs.is_empty()
    }

    /// Notes the node; the Services that this touches. Of a node without addresses we know none.
    fn change_node(&mut self, mut node: Node) -> BTreeSet<ObjectName> {
        if node.addresses.is_empty() {
            node.addresses.clone_from(&self.node.addresses);
        }
        let mut touched = BTreeSet::new();
        if node.zone != self.node.zone {
            touched.extend(self.cluster.zoned().cloned());
        }
        if (&node.addresses, &node.primary) == (&self.node.addresses, &self.node.primary) {
            self.node = node;
            return touched;
        }
        let changed: BTreeSet<IpAddr> = self
            .node
            .addresses
            .symmetric_difference(&node.addresses)
            .copied()
            .collect();
        self.node = node;
        // Whether a VIP is bound depends on the node's addresses, too.
        let vips = |s: &Service| {
            let all = [&s.cluster_ips, &s.external_ips, &s.load_balancer_ips];
            all.into_iter().flatten().any(|vip| changed.contains(vip))
        };
        let concerned = |s: &Service| {
            vips(s)
                || s.health_check_node_port.is_some()
                || s.ports.iter().any(|port| port.node_port.is_some())
        };
        let services = self.cluster.services().filter(|(_, s)| concerned(s));
        touched.extend(services.map(|(name, _)| name.clone()));
        touched
    }

    /// The next round of ops, empty when there is nothing to do now. Each op given out must be
    /// reported with [`Planner::commit`] before the next call.
    ///
    /// A round is bounded, however much one Service needs: news can be taken in between two rounds, and goes first.
    pub fn next(&mut self, now: Instant) -> Vec<Op> {
        loop {
            let (round, more) = self.next_or_more(now);
            if !round.is_empty() || !more {
                return round;
            }
        }
    }

    /// The next round of ops, which is empty also when none is known yet; then there is more to find out.
    pub(crate) fn next_or_more(&mut self, now: Instant) -> (Vec<Op>, bool) {
        self.wake(now);
        let more = self.replan_some(now);
        (self.round(now), more)
    }

    /// Whether Services wait to be planned, so that what nobody claims now may be claimed in a moment. Large ones may wait
    /// for longer and do not count.
    fn is_behind(&self) -> bool {
        !self.dirty.is_empty()
    }

    fn round(&mut self, now: Instant) -> Vec<Op> {
        let mut round: Vec<(Place, Group, Op)> = Vec::new();
        let mut left = ROUND;
        // The base and the API server's own Service are rounds of their own.
        for group in [BASE, API_SERVER] {
            round.extend(self.ops_of(group, &mut left, now));
            if !round.is_empty() {
                break;
            }
        }
        while round.is_empty() {
            let groups = self.pending.next_groups(ROUND);
            if groups.is_empty() {
                break;
            }
            for group in groups {
                let before = round.len();
                round.extend(self.ops_of(group, &mut left, now));
                if round.len() > before {
                    self.pending.worked(group);
                } else if left > 0 {
                    self.pending.stuck(group);
                }
                if left == 0 {
                    break;
                }
            }
        }
        round.sort_by_key(|(place, group, op)| (place.phase, *group, *place, op.key()));
        round.into_iter().map(|(_, _, op)| op).collect()
    }

    /// The ops of a group's first phase that has any, as far as they may cost.
    fn ops_of(&mut self, group: Group, left: &mut usize, now: Instant) -> Vec<(Place, Group, Op)> {
        if self.is_marking(group) {
            return Vec::new();
        }
        loop {
            let (mut settled, mut moved, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
            let mut ops: Vec<(Place, Group, Op)> = Vec::new();
            let mut cost = 0;
            let mut added = BTreeSet::new();
            for (at, key) in self.pending.of(group) {
                if ops
                    .first()
                    .is_some_and(|(first, ..)| first.phase < at.phase)
                {
                    break;
                }
                let Some(op) = self.op(&key) else {
                    settled.push(key);
                    continue;
                };
                let place = self.place(&op);
                if place != at {
                    moved.push((key, place));
                    continue;
                }
                if let Op::Add(Key::RealServer(vs, _), _) = &op
                    && !added.contains(vs)
                    && self.applied(&Key::VirtualServer(*vs)).is_none()
                {
                    // Its virtual server marks it when it is there.
                    waiting.push(key);
                    continue;
                }
                if !self.may(&op) {
                    continue;
                }
                cost += self.cost(&op);
                if cost > *left && !ops.is_empty() {
                    break;
                }
                if let Op::Add(Key::VirtualServer(vs), _) = op {
                    added.insert(vs);
                }
                ops.push((place, group, op));
            }
            for key in settled {
                self.pending.unmark(&key);
                self.settle(key, now);
            }
            for key in waiting {
                self.pending.unmark(&key);
            }
            if moved.is_empty() {
                *left = left.saturating_sub(cost);
                return ops;
            }
            for (key, place) in moved {
                self.pending.mark(key, group, place);
            }
        }
    }

    /// What an op costs, 1 for most.
    fn cost(&self, op: &Op) -> usize {
        match op {
            Op::Add(Key::RealServer(vs, _), _) => 1 + self.real_servers.count(vs) / CROWD,
            Op::Add(Key::Address(_), _) | Op::Remove(Key::Address(_)) => {
                1 + self.addresses / ADDRESSES
            }
            _ => 1,
        }
    }

    /// Takes in what became of the ops of a round.
    pub fn commit(&mut self, results: impl IntoIterator<Item = (Op, Outcome)>, now: Instant) {
        for (op, outcome) in results {
            let key = op.key();
            if let Some(touched) = &mut self.touched {
                touched.insert(key);
            }
            let group = self.pending.unmark(&key).unwrap_or(UNCLAIMED);
            self.started.remove(&key);
            match outcome {
                Outcome::Started => {
                    self.started.insert(key);
                }
                Outcome::Done => {
                    self.retry_after(&key);
                    if let Op::Add(key, _) = &op {
                        self.note_reached(key);
                    }
                    if let Op::Update(Key::Set(set), _) = op {
                        self.set_replaced(set, now);
                    }
                    match op {
                        Op::Add(_, value) | Op::Update(_, value) => {
                            self.set_applied(key, Some(value));
                        }
                        Op::Remove(_) => self.forget(key),
                    }
                    self.check(key, group, now);
                    if let Key::VirtualServer(vs) = key {
                        self.mark_real_servers(vs);
                    }
                }
                // It failed because its virtual server did: it waits for that.
                Outcome::Failed(_) if self.is_orphan(&op) => {}
                Outcome::Failed(failure) => {
                    self.doubt |= matches!(failure.kind, FailureKind::Drift | FailureKind::Unknown);
                    let of_node = failure.kind == FailureKind::Node;
                    self.failures.note(key, group, of_node, now);
                }
            }
            self.pending.moved();
        }
        self.look_at_reached();
    }

    /// When [`Planner::next`] or [`Planner::drains_due`] has something to say again without any
    /// news.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let retries = self.failures.next_end().into_iter();
        retries
            .chain(self.dirty.next_large())
            .chain(self.drains.next())
            .min()
    }

    /// The keys whose ops fail, and since when.
    pub fn failing(&self) -> impl Iterator<Item = (&Key, Instant)> {
        self.failures.iter()
    }

    /// Whether something that was given to the kernel, or asked of it, has not ended.
    #[must_use]
    pub fn has_started(&self) -> bool {
        !self.started.is_empty() || self.unread.values().any(|asked| *asked)
    }

    /// What has failed for longest of what all Services rest on, and since when: sets, rules, the link, or what the node lacks,
    /// as a module.
    #[must_use]
    pub fn node_failing(&self) -> Option<(&Key, Instant)> {
        self.failures
            .first_of_node(|key| self.base.contains_key(key))
    }

    /// Since when the op of a key fails, if it does.
    #[must_use]
    pub fn failing_since(&self, key: &Key) -> Option<Instant> {
        self.failures.since(key)
    }

    /// What the kernel should hold for the objects as they are now, drains aside.
    pub fn desired(&mut self) -> State {
        self.replan();
        let mut state = self.base.clone();
        for planned in self.plans.values() {
            for key in planned.keys() {
                if let Some(value) = self.claimed(key) {
                    state.insert(*key, value.clone());
                }
            }
        }
        state
    }

    /// The node ports of all Services.
    #[must_use]
    pub fn node_ports(&self) -> BTreeSet<u16> {
        let services = self.cluster.services();
        let ports = services.flat_map(|(_, service)| &service.ports);
        ports.filter_map(|port| port.node_port).collect()
    }

    /// The rules and sets that are needed whatever the Services are.
    #[must_use]
    pub fn base(&self) -> &State {
        &self.base
    }

    /// What the kernel should hold at a key now: what is claimed, what is held, or a drain.
    fn wanted(&self, key: &Key) -> Option<Value> {
        match self.claimed(key) {
            Some(value) => match self.health.listens(key) {
                Some(true) => Some(value.clone()),
                Some(false) => None,
                None => self.applied(key).cloned(),
            },
            None if self.held.contains(key) || self.is_spared(key) => self.applied(key).cloned(),
            None => self.drains_to(key),
        }
    }

    /// A virtual server that no Service has, in a network where none is ever removed; or its real
    /// server.
    fn is_spared(&self, key: &Key) -> bool {
        let (Key::VirtualServer(vs) | Key::RealServer(vs, _)) = key else {
            return false;
        };
        let VirtualServerKey::Address { address, .. } = vs else {
            return false;
        };
        let excluded = &self.config.exclude_cidrs;
        excluded.iter().any(|net| net.contains(address))
            && self.claimed(&Key::VirtualServer(*vs)).is_none()
    }

    /// What the kernel holds at a key, as far as this planner knows.
    fn applied(&self, key: &Key) -> Option<&Value> {
        match key {
            Key::RealServer(vs, rs) => self.real_servers.get(vs, rs),
            key => self.records.get(key)?.applied.as_ref(),
        }
    }

    fn set_applied(&mut self, key: Key, value: Option<Value>) {
        if let Key::Entry(set, _) = key {
            let held = u32::from(self.applied(&key).is_some());
            let entries = self.entries.entry(set).or_default();
            *entries = entries.saturating_sub(held) + u32::from(value.is_some());
        }
        if let Key::Address(_) = key {
            let held = usize::from(self.applied(&key).is_some());
            self.addresses = self.addresses.saturating_sub(held) + usize::from(value.is_some());
        }
        match (key, value) {
            (Key::RealServer(vs, rs), value) => self.real_servers.set(vs, rs, value),
            (key, Some(value)) => self.records.entry(key).or_default().applied = Some(value),
            (key, None) => {
                if let Some(record) = self.records.get_mut(&key) {
                    record.applied = None;
                }
            }
        }
    }

    /// The keys at which the kernel holds something, as far as this planner knows.
    fn applied_keys(&self) -> impl Iterator<Item = Key> {
        let others = self
            .records
            .iter()
            .filter(|(_, record)| record.applied.is_some());
        others.map(|(key, _)| *key).chain(self.real_servers.keys())
    }

    /// The op that a key needs, if any.
    fn op(&self, key: &Key) -> Option<Op> {
        if self.started.contains(key) || self.unread.contains_key(key) {
            return None;
        }
        match (self.applied(key), self.wanted(key)) {
            (None, Some(value)) => Some(Op::Add(*key, value)),
            (Some(applied), Some(value)) if *applied != value => Some(Op::Update(*key, value)),
            (Some(_), None) => Some(Op::Remove(*key)),
            _ => None,
        }
    }

    fn mark(&mut self, key: Key, group: Group) {
        // One that needs nothing is found at once, and settled.
        let op = self.op(&key);
        let place = op.map_or(Place::FIRST, |op| self.place(&op));
        self.pending.mark(key, group, place);
    }

    /// A virtual server came: its real servers, which [waited](Planner::ops_of) for it, go on.
    fn mark_real_servers(&mut self, vs: VirtualServerKey) {
        let owner = self.records.get(&Key::VirtualServer(vs));
        let owner = owner.and_then(|record| record.claims.first);
        let group = owner.map_or(UNCLAIMED, |id| self.group(id));
        for key in self.real_servers_of(vs) {
            if !self.pending.contains(&key)
                && !self.failures.contains(&key)
                && self.op(&key).is_some()
            {
                self.mark(key, group);
            }
        }
    }

    /// A key is as it should be again, or for the first time: what failed for the lack of it is tried at once.
    fn retry_after(&mut self, key: &Key) {
        self.failures.remove(key);
        let (low, high) = match *key {
            Key::Link => (
                Key::Address(IpAddr::from([0; 4])),
                Key::Address(IpAddr::from([u8::MAX; 16])),
            ),
            Key::VirtualServer(vs) => real_servers(vs),
            Key::Set(set) => {
                let entry = |key: &Key| matches!(key, Key::Entry(of, _) if *of == set);
                let failing = self.failures.iter().map(|(key, _)| *key);
                let failing: Vec<Key> = failing.filter(entry).collect();
                return self.retry(failing);
            }
            Key::Rules(..) | Key::Entry(..) | Key::RealServer(..) | Key::Address(_) => return,
            Key::RoutingRule(..) | Key::Route(_) => return,
        };
        self.retry(self.failures.between(low, high));
    }

    fn retry(&mut self, failing: Vec<Key>) {
        for key in failing {
            let group = self.failures.remove(&key).unwrap_or(UNCLAIMED);
            self.mark(key, group);
        }
    }

    /// Marks a key if it needs an op, and tidies up after it if not. One that pauses after a
    /// failure goes on pausing: reading the kernel again is no reason to try again.
    fn check(&mut self, key: Key, group: Group, now: Instant) {
        if self.op(&key).is_some() {
            if !self.failures.contains(&key) {
                self.mark(key, group);
            }
        } else {
            self.settle(key, now);
        }
    }

    /// A key is as it should be: note a drain that has begun, forget one that has ended.
    fn settle(&mut self, key: Key, now: Instant) {
        if self.op(&key).is_some() || self.started.contains(&key) || self.unread.contains_key(&key)
        {
            return;
        }
        if let Key::RealServer(vs, rs) = key {
            let held = self.held.contains(&key) || self.is_spared(&key);
            if self.claimed(&key).is_none() && self.applied(&key).is_some() && !held {
                self.begin_drain(vs, rs, now);
            } else {
                self.end_drain(vs, rs, self.applied(&key).is_some());
                if !held {
                    // It came back: its next drain is another one.
                    self.remembered.remove(&(vs, rs));
                }
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
        match key {
            Key::RealServer(vs, rs) if is_udp(&vs) => {
                self.stale.insert((vs, Some(rs)));
            }
            Key::VirtualServer(vs) if is_udp(&vs) => {
                self.stale.insert((vs, None));
            }
            _ => {}
        }
        self.set_applied(key, None);
        let Key::VirtualServer(vs) = key else { return };
        self.reached.remove(&vs);
        for child in self.real_servers.remove(vs) {
            if let Key::RealServer(vs, rs) = child {
                self.end_drain(vs, rs, false);
            }
            if self.op(&child).is_none() {
                self.pending.unmark(&child);
                self.failures.remove(&child);
            }
        }
    }

    /// A set of another type made room for ours: the rules, which look into it, and its entries
    /// went with it.
    fn set_replaced(&mut self, set: Set, now: Instant) {
        let entry = |key: &Key| matches!(key, Key::Entry(of, _) if *of == set);
        let entries = self.records.keys().filter(|key| entry(key)).copied();
        let mut gone: Vec<(Key, Group)> = entries.map(|key| (key, UNCLAIMED)).collect();
        let rules = |key: &&Key| matches!(key, Key::Rules(family, _) if *family == set.family);
        gone.extend(self.base.keys().filter(rules).map(|key| (*key, BASE)));
        for (key, group) in gone {
            self.set_applied(key, None);
            self.check(key, group, now);
        }
    }

    /// Marks the keys whose pause after a failure is over, and the drains whose deadline is.
    fn wake(&mut self, now: Instant) {
        for key in self.drains.cut(now) {
            self.mark(key, UNCLAIMED);
        }
        for (key, group) in self.failures.woken(now) {
            self.mark(key, group);
        }
    }
}

/// The keys that virtual servers on an address can have.
fn virtual_servers(address: IpAddr) -> RangeInclusive<Key> {
    let at = |port, protocol| {
        Key::VirtualServer(VirtualServerKey::Address {
            address,
            port,
            protocol,
        })
    };
    at(0, Protocol::Tcp)..=at(u16::MAX, Protocol::Other(u8::MAX))
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
