//! Services whose plan is out of date, and in which order they are planned.
//!
//! What became so last is planned first, a bounded amount at once, so that news of one Service does not wait until thousands of
//! others are planned; each fourth time what waits for the longest goes first, so that nothing waits without end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{Group, LARGE, Planner, REST};
use crate::model::ObjectName;
use crate::state::Key;

/// About how many keys are planned, or marked, before ops are given out and news is taken in.
const AT_ONCE: usize = 2_000;
/// What a Service costs besides its virtual and real servers: the entries of sets by which it is known and reached.
const EACH: usize = 8;
/// One time in so many the oldest is planned first.
const OLDEST_EVERY: u32 = 4;

/// The Services to plan. See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    /// When each became dirty.
    turns: BTreeMap<ObjectName, u64>,
    queue: BTreeMap<u64, ObjectName>,
    turn: u64,
    calls: u32,
    /// Those that are [large](LARGE).
    large: BTreeSet<ObjectName>,
    /// When large ones were planned last, for as long as it counts.
    planned: BTreeMap<ObjectName, Instant>,
}

impl Dirty {
    pub(super) fn extend(&mut self, names: impl IntoIterator<Item = ObjectName>) {
        for name in names {
            self.turn += 1;
            if let Some(before) = self.turns.insert(name.clone(), self.turn) {
                self.queue.remove(&before);
            }
            self.queue.insert(self.turn, name);
        }
    }

    /// Whether there are none but large ones.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// When the next large one may be planned, if there is one.
    pub(super) fn next_large(&self) -> Option<Instant> {
        let planned = self.large.iter().filter_map(|name| self.planned.get(name));
        planned.map(|at| *at + REST).min()
    }

    fn pop(&mut self, oldest: bool) -> Option<ObjectName> {
        let (_, name) = match oldest {
            true => self.queue.pop_first(),
            false => self.queue.pop_last(),
        }?;
        self.turns.remove(&name);
        Some(name)
    }

    /// A large one that has rested for long enough, and whether it is the only one.
    fn pop_large(&mut self, now: Instant) -> Option<(ObjectName, bool)> {
        let rested = |name: &&ObjectName| {
            let last = self.planned.get(name);
            last.is_none_or(|last| *last + REST <= now)
        };
        let mut due = self.large.iter().filter(rested);
        let (next, alone) = (due.next()?.clone(), due.next().is_none());
        self.large.remove(&next);
        self.planned.retain(|_, last| *last + REST > now);
        self.planned.insert(next.clone(), now);
        Some((next, alone))
    }
}

impl Planner {
    /// Plans every dirty Service and marks what differs from its last plan.
    pub(super) fn replan(&mut self) {
        while let Some(name) = self.dirty.pop(true) {
            self.replan_one(name);
        }
        for name in std::mem::take(&mut self.dirty.large) {
            self.replan_one(name);
        }
        while self.mark_some() {}
        // What was held back may go.
        self.pending.moved();
    }

    /// Plans some dirty Services, a [large](LARGE) one only when no other is dirty, and marks keys of large ones; whether there
    /// is more of that to do now.
    pub(super) fn replan_some(&mut self, now: Instant) -> bool {
        self.dirty.calls = self.dirty.calls.wrapping_add(1);
        let oldest = self.dirty.calls.is_multiple_of(OLDEST_EVERY);
        let waited = !self.dirty.is_empty();
        let mut left = AT_ONCE;
        while left > 0
            && let Some(name) = self.dirty.pop(oldest)
        {
            let size = self.size(&name);
            if size > LARGE {
                self.dirty.large.insert(name);
                continue;
            }
            self.replan_one(name);
            left = left.saturating_sub(size + EACH);
        }
        if !self.dirty.is_empty() {
            return true;
        }
        if waited {
            // What was held back may go.
            self.pending.moved();
        }
        let mut more = self.mark_some();
        if !more && let Some((name, alone)) = self.dirty.pop_large(now) {
            self.replan_one(name);
            more = !alone || !self.marking.is_empty();
        }
        more
    }

    /// Marks these keys, a part of them now where they are many. Until all are marked their group gets no op.
    pub(super) fn mark_all(&mut self, keys: Vec<Key>, group: Group) {
        if keys.len() > AT_ONCE {
            self.marking.push_back((group, keys.into_iter()));
            return;
        }
        for key in keys {
            self.mark(key, group);
        }
    }

    /// Whether keys of a group are still to be marked.
    pub(super) fn is_marking(&self, group: Group) -> bool {
        self.marking.iter().any(|(of, _)| *of == group)
    }

    /// Marks some of the keys that wait for it; whether there are more.
    fn mark_some(&mut self) -> bool {
        let mut left = AT_ONCE;
        while left > 0
            && let Some((group, keys)) = self.marking.front_mut()
        {
            let group = *group;
            let Some(key) = keys.next() else {
                self.marking.pop_front();
                self.pending.moved();
                continue;
            };
            self.mark(key, group);
            left -= 1;
        }
        !self.marking.is_empty()
    }

    /// About how many virtual servers and real servers a Service has, or had when it was planned last.
    fn size(&self, name: &ObjectName) -> usize {
        let id = self.ids.get(name);
        let known = id.and_then(|id| self.plans.get(id));
        known
            .map_or(0, |planned| planned.keys().len())
            .max(self.cluster_size(name))
    }

    fn cluster_size(&self, name: &ObjectName) -> usize {
        let Some(service) = self.cluster.get(name) else {
            return 0;
        };
        let node_ports = match service.ports.iter().any(|port| port.node_port.is_some()) {
            true => self.node.addresses.len(),
            false => 0,
        };
        let vips = [
            service.cluster_ips.len(),
            service.external_ips.len(),
            service.load_balancer_ips.len(),
            node_ports,
        ];
        let vips = vips.iter().sum::<usize>().max(1);
        let endpoints = self
            .cluster
            .slices_of(name)
            .map(|slice| slice.endpoints.len());
        let servers = service.ports.len().saturating_mul(vips);
        servers.saturating_mul(endpoints.sum::<usize>().max(1))
    }
}
