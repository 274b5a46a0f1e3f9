//! Who claims what: plans of Services against each other, and what they want in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use ipvs_netlink::VirtualServerKey;

use super::{API_SERVER, FIRST_OTHER, Group, Planner, ServiceId, UNCLAIMED, real_servers};
use crate::model::{ObjectName, Service};
use crate::plan;
use crate::state::{
    Key, Role, Value, keeping_entries, kept_with, owned_by, owning_entries, served_by,
    serving_entries,
};

/// Two Services claim one virtual server. An address and port that the API server gives to one Service only (a ClusterIP, a node
/// port) goes before a load balancer's, and that before an external IP, which anybody may ask for; among equals the Service that
/// was created first has it, and of the same second the first by UID and name.
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
        write!(
            f,
            "Service {loser}: {key} belongs to Service {winner}, which comes first: not served"
        )
    }
}

/// A virtual server that a Service had went to the next one that claims it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Takeover {
    /// What they both claimed.
    pub key: VirtualServerKey,
    /// The Service that had it.
    pub from: ObjectName,
    /// The Service that has it now.
    pub to: ObjectName,
}

impl fmt::Display for Takeover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Takeover { key, from, to } = self;
        write!(f, "Service {to}: took {key} over from Service {from}")
    }
}

/// Whether a Service has no creation time, that time, and its UID.
pub(super) type Rank = (bool, i64, Arc<str>);

#[derive(Debug)]
pub(super) struct Planned {
    pub(super) name: ObjectName,
    /// Creation time and UID: what decides between claims, with the name as the last resort.
    /// Services that have no creation time come last.
    pub(super) rank: Rank,
    // Side by side, they take no room for alignment.
    keys: Box<[Key]>,
    values: Box<[Value]>,
}

impl Planned {
    pub(super) fn get(&self, key: &Key) -> Option<&Value> {
        self.values.get(self.keys.binary_search(key).ok()?)
    }

    pub(super) fn keys(&self) -> &[Key] {
        &self.keys
    }

    fn items(&self) -> impl Iterator<Item = (&Key, &Value)> {
        self.keys.iter().zip(&self.values)
    }

    /// By what the first of those that claim a key is found.
    fn order(&self, key: &Key) -> impl Ord {
        (self.grade(key), &self.rank, &self.name)
    }

    /// How a Service comes by a virtual server: 0 as its ClusterIP or node port, 1 by its load balancer, 2 as an external IP.
    fn grade(&self, key: &Key) -> u8 {
        let Key::VirtualServer(vs) = key else {
            return 0;
        };
        let entries = owning_entries(vs).filter(|entry| self.get(entry).is_some());
        let grade = |entry: Key| match entry {
            Key::Entry(set, _) if set.role == Role::ClusterIp => Some(0),
            Key::Entry(set, _) if set.role == Role::LoadBalancer => Some(1),
            Key::Entry(set, _) if matches!(set.role, Role::ExternalIp | Role::ExternalIpLocal) => {
                Some(2)
            }
            _ => None,
        };
        entries.filter_map(grade).min().unwrap_or(0)
    }
}

/// What is known of one key: who claims it and what the kernel holds.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) applied: Option<Value>,
    pub(super) claims: Claims,
}

/// The Services that claim a key: the one that has it, and the others in order. Most keys have one, but a thousand Services
/// may lead to one pod. What [follows](decides) a virtual server has none of its own.
#[derive(Debug, Default)]
pub(super) struct Claims {
    pub(super) first: Option<ServiceId>,
    #[expect(
        clippy::box_collection,
        reason = "8 bytes a record, of which there are many, not 24"
    )]
    more: Option<Box<Vec<ServiceId>>>,
}

impl Claims {
    /// Adds a Service, by its plan's order.
    fn add(&mut self, id: ServiceId, key: &Key, plans: &BTreeMap<ServiceId, Planned>) {
        let order = |id: ServiceId| plans.get(&id).map(|planned| planned.order(key));
        let Some(first) = self.first else {
            self.first = Some(id);
            return;
        };
        let more = self.more.get_or_insert_default();
        if order(id) < order(first) {
            self.first = Some(id);
            more.insert(0, first);
        } else {
            more.insert(more.partition_point(|other| order(*other) < order(id)), id);
        }
    }

    /// Removes a Service, whose plan is still the one by which it was added.
    fn remove(&mut self, id: ServiceId, key: &Key, plans: &BTreeMap<ServiceId, Planned>) {
        let order = |id: ServiceId| plans.get(&id).map(|planned| planned.order(key));
        let mut more = self.more.take();
        if self.first == Some(id) {
            self.first = more.as_mut().map(|more| more.remove(0));
        } else if let Some(more) = &mut more {
            let place = more.partition_point(|other| order(*other) < order(id));
            if more.get(place) == Some(&id) {
                more.remove(place);
            }
        }
        self.more = more.filter(|more| !more.is_empty());
    }
}

/// The key whose claims decide on a key: of real servers, and of the entries by which it is known and reached, their virtual
/// server; of what keeps the clients' addresses, what it [goes with](kept_with).
pub(super) fn decides(key: &Key) -> Key {
    match key {
        Key::RealServer(vs, _) => Key::VirtualServer(*vs),
        Key::Entry(set, entry) => owned_by(*set, entry)
            .or_else(|| served_by(*set, entry))
            .map(Key::VirtualServer)
            .or_else(|| kept_with(*set, entry))
            .unwrap_or(*key),
        other => *other,
    }
}

/// The key whose claims may be others when a Service's plan gained or lost this one; `None` when that only follows them.
fn claimed_anew(key: &Key) -> Option<Key> {
    match key {
        Key::RealServer(..) => None,
        Key::Entry(set, entry)
            if served_by(*set, entry).is_some() || kept_with(*set, entry).is_some() =>
        {
            None
        }
        key => Some(decides(key)),
    }
}

pub(super) struct Touched {
    pub(super) key: Key,
    pub(super) old: bool,
    pub(super) new: bool,
}

impl Touched {
    pub(super) fn came(&self) -> bool {
        self.new && !self.old
    }

    pub(super) fn went(&self) -> bool {
        self.old && !self.new
    }
}

/// The keys that are in one of two sorted plans only, or in both with another value.
pub(super) fn differing<'a>(
    old: impl Iterator<Item = (&'a Key, &'a Value)>,
    new: impl Iterator<Item = (&'a Key, &'a Value)>,
) -> Vec<Touched> {
    let (mut old, mut new) = (old.peekable(), new.peekable());
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

impl Planner {
    /// The conflicts that came up since the last call: virtual servers that a Service claims and
    /// another has. None while Services wait to be planned, of which one may give up what another gets.
    pub fn take_conflicts(&mut self) -> BTreeSet<Conflict> {
        if self.is_behind() {
            return BTreeSet::new();
        }
        let mut conflicts = std::mem::take(&mut self.conflicts);
        let stands = |conflict: &Conflict| {
            let key = Key::VirtualServer(conflict.key);
            let loser = self
                .ids
                .get(&conflict.loser)
                .and_then(|id| self.plans.get(id));
            self.owner(&key) == Some(&conflict.winner)
                && loser.is_some_and(|planned| planned.get(&key).is_some())
        };
        conflicts.retain(stands);
        conflicts
    }

    /// The virtual servers that went from one Service to another since the last call, because the
    /// first does not claim them any more.
    pub fn take_takeovers(&mut self) -> Vec<Takeover> {
        let takeovers = std::mem::take(&mut self.takeovers).into_iter();
        let takeovers = takeovers.map(|(key, (from, to))| Takeover { key, from, to });
        // It may have gone on, or back.
        takeovers
            .filter(|t| t.from != t.to)
            .filter(|t| self.owner(&Key::VirtualServer(t.key)) == Some(&t.to))
            .collect()
    }

    /// The Service that a key belongs to now.
    #[must_use]
    pub fn owner(&self, key: &Key) -> Option<&ObjectName> {
        self.winner(self.records.get(&decides(key))?)
            .map(|planned| &planned.name)
    }

    pub(super) fn replan_one(&mut self, name: ObjectName) {
        let mut service = self.cluster.get(&name);
        let waiting = service
            .filter(|s| self.links_awaited && s.is_external())
            .map(Service::without_external);
        service = waiting.as_ref().or(service);
        let planned = service.map(|service| {
            plan::plan(
                &name,
                service,
                self.cluster.slices_of(&name),
                &self.node,
                &self.cluster.guard,
                &self.config,
            )
        });
        let refused = planned.as_ref().map(|plan| &*plan.refused);
        self.refusals.note(&name, refused);
        let (items, health) =
            planned.map_or_else(Default::default, |plan| (plan.items, plan.health));
        let rank = service
            .map(|s| (s.created.is_none(), s.created.unwrap_or(0), s.uid.clone()))
            .unwrap_or_default();
        let gone = service.is_none();
        let id = match self.ids.get(&name) {
            Some(id) => *id,
            None if gone => return,
            None => self.new_id(&name),
        };
        let order = (rank.clone(), name.clone());
        if let Some(refused) = self.health.plan(id, order, health) {
            self.refusals.note_more(refused);
        }
        let old = self.plans.get(&id);
        let touched = differing(
            old.into_iter().flat_map(Planned::items),
            items.iter().map(|(key, value)| (key, value)),
        );
        let mut marks: Vec<Key> = touched.iter().map(|t| t.key).collect();
        let had = |key: &Key| old.is_some_and(|planned| planned.get(key).is_some());
        let has = |key: &Key| items.binary_search_by(|(new, _)| new.cmp(key)).is_ok();
        // It may come by a virtual server in another way than before, when an entry that owns it came or went.
        let came_or_went = touched.iter().filter(|t| t.came() || t.went());
        let mut anew: BTreeSet<Key> = came_or_went.filter_map(|t| claimed_anew(&t.key)).collect();
        if old.is_some_and(|planned| planned.rank != rank) {
            let all = old.into_iter().flat_map(|planned| planned.keys());
            anew.extend(all.chain(items.iter().map(|(key, _)| key)));
            marks.extend(&anew);
            anew.retain(|key| decides(key) == *key);
        }
        let came: Vec<Key> = touched.iter().filter(|t| t.came()).map(|t| t.key).collect();
        let leaves: Vec<Key> = anew.iter().filter(|key| had(key)).copied().collect();
        let comes: Vec<Key> = anew.iter().filter(|key| has(key)).copied().collect();
        let standing = anew.iter().map(|key| (*key, self.standing(key, id)));
        let before: Vec<(Key, _)> = standing.collect();
        // What follows a key is its winner's: before and after.
        let won_before: Vec<Key> = anew.iter().flat_map(|key| self.followers(key)).collect();
        for key in leaves {
            let owner = self.owner(&key).filter(|_| !has(&key)).cloned();
            if let Some(record) = self.records.get_mut(&key) {
                record.claims.remove(id, &key, &self.plans);
            }
            if let (Key::VirtualServer(key), Some(from), Some(to)) = (key, owner, self.owner(&key))
            {
                let to = to.clone();
                let takeover = self.takeovers.entry(key).or_insert((from, to.clone()));
                takeover.1 = to;
            }
        }
        let group = self.group(id);
        if gone {
            self.plans.remove(&id);
            self.ids.remove(&name);
        } else {
            let (keys, values): (Vec<Key>, Vec<Value>) = items.into_iter().unzip();
            let (keys, values) = (keys.into_boxed_slice(), values.into_boxed_slice());
            let planned = Planned {
                name,
                rank,
                keys,
                values,
            };
            self.plans.insert(id, planned);
        }
        for key in comes {
            let record = self.records.entry(key).or_default();
            record.claims.add(id, &key, &self.plans);
        }
        for (key, before) in before {
            if self.standing(&key, id) != before {
                marks.extend(self.followers(&key));
                if let Key::VirtualServer(vs) = key {
                    self.note_conflict(vs, id);
                }
            }
        }
        marks.extend(won_before);
        for key in &came {
            self.held.remove(key);
        }
        marks.sort(); // cheap: a few sorted runs
        marks.dedup();
        self.mark_all(marks, group);
    }

    /// Who has a key, and whether this Service claims it.
    fn standing(&self, key: &Key, id: ServiceId) -> (Option<ServiceId>, bool) {
        let first = self.records.get(key).and_then(|record| record.claims.first);
        let planned = self.plans.get(&id);
        (
            first,
            planned.is_some_and(|planned| planned.get(key).is_some()),
        )
    }

    /// Notes who goes without a virtual server that this Service has come to claim beside another.
    fn note_conflict(&mut self, vs: VirtualServerKey, id: ServiceId) {
        let key = Key::VirtualServer(vs);
        let Some(record) = self.records.get(&key) else {
            return;
        };
        if !self.standing(&key, id).1 {
            return;
        }
        let claims = &record.claims;
        let loser = match claims.first {
            // The one that had it.
            Some(first) if first == id => claims.more.as_ref().and_then(|more| more.first()),
            _ => Some(&id),
        };
        let name = |id: &ServiceId| self.plans.get(id).map(|planned| planned.name.clone());
        if let (Some(winner), Some(loser)) =
            (claims.first.as_ref().and_then(name), loser.and_then(name))
        {
            self.conflicts.insert(Conflict {
                key: vs,
                winner,
                loser,
            });
        }
    }

    /// All other keys on which a key's claims [decide](decides), as far as there is anything to do with them.
    fn followers(&self, key: &Key) -> Vec<Key> {
        let mut keys: Vec<Key> = keeping_entries(key).collect();
        if let Key::VirtualServer(vs) = key {
            keys.extend(self.real_servers_of(*vs));
            keys.extend(owning_entries(vs).chain(serving_entries(vs)));
        }
        keys
    }

    /// The real servers of a virtual server: those that the Service wants that has it, and the kernel's.
    pub(super) fn real_servers_of(&self, vs: VirtualServerKey) -> Vec<Key> {
        let mut keys: Vec<Key> = self.real_servers.of(vs).collect();
        let record = self.records.get(&Key::VirtualServer(vs));
        if let Some(planned) = record.and_then(|record| self.winner(record)) {
            let (low, high) = real_servers(vs);
            let start = planned.keys.partition_point(|key| *key < low);
            let under = planned.keys.get(start..).unwrap_or_default();
            keys.extend(under.iter().copied().take_while(|key| *key <= high));
        }
        keys
    }

    pub(super) fn new_id(&mut self, name: &ObjectName) -> ServiceId {
        // The API server's own Service is the first of all.
        let id = if name.is_api_server() {
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

    pub(super) fn group(&self, id: ServiceId) -> Group {
        if id == 0 {
            API_SERVER
        } else {
            FIRST_OTHER.saturating_add(id).min(UNCLAIMED - 1)
        }
    }

    fn winner(&self, record: &Record) -> Option<&Planned> {
        self.plans.get(&record.claims.first?)
    }

    /// What the claims say that the kernel should hold at a key.
    pub(super) fn claimed(&self, key: &Key) -> Option<&Value> {
        if let Some(value) = self.base.get(key) {
            return Some(value);
        }
        self.winner(self.records.get(&decides(key))?)?.get(key)
    }
}
