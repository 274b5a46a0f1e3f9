//! What was read from the kernel: taken in whole, or where it differs.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Instant;

use super::{BASE, Group, Planner, READINGS, UNCLAIMED};
use ipvs_proxy_iptables::Ruleset;

use crate::op::{Dataplane, ReadError, Reading};
use crate::state::{Key, Set, State, Value, is_ours, owning_entries};
use ipvs_netlink::VirtualServerKey;

impl Planner {
    /// Takes in what the kernel holds of ours, whole, and marks whatever differs. At start this
    /// adopts what an earlier process left.
    ///
    /// With `prune`, what nobody claims goes. Without, it stays until it is claimed, or until a
    /// resync with `prune`: not every source of objects has listed, and what seems unclaimed may
    /// be in use.
    ///
    /// What is [unread](Reading::unread) is taken for what it was, and gets no op until [`Planner::note_rules`].
    pub fn resync(&mut self, reading: impl Into<Reading>, prune: bool, now: Instant) {
        let Reading {
            state: mut read,
            unread,
            ..
        } = reading.into();
        self.replan();
        self.doubt = false;
        for key in &unread {
            if let Some(value) = self.applied(key) {
                read.insert(*key, value.clone());
            }
        }
        self.unread = unread.into_iter().map(|key| (key, true)).collect();
        self.held.clear();
        if !prune {
            let unclaimed = read.keys().filter(|key| self.claimed(key).is_none());
            self.held = unclaimed.copied().collect();
        }
        for record in self.records.values_mut() {
            record.applied = None;
        }
        self.real_servers.clear();
        self.entries.clear();
        self.addresses = 0;
        for (key, value) in read {
            self.set_applied(key, Some(value));
        }
        let drains = self.drains.keys();
        let ended: Vec<_> = drains
            .filter(|(vs, rs)| self.real_servers.get(vs, rs).is_none())
            .copied()
            .collect();
        for (vs, rs) in ended {
            self.end_drain(vs, rs, false);
        }
        let base = self.base.keys().copied();
        let known = self.records.keys().copied().chain(self.real_servers.keys());
        let keys: BTreeSet<Key> = known.chain(base).collect();
        let planned: Vec<(Key, Group)> = self
            .plans
            .iter()
            .flat_map(|(id, p)| {
                let group = self.group(*id);
                p.keys().iter().map(move |key| (*key, group))
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

    /// Takes in the rules of a table as they were read: those that are wanted, or `None` for others. Whether others changed
    /// what this planner left there, which is for [`Planner::adopt`] to take in.
    pub fn note_rules(&mut self, key: Key, value: Option<&Value>, now: Instant) -> bool {
        // An op was given out meanwhile, and tells more.
        if self.started.contains(&key) {
            return false;
        }
        if self.unread.remove(&key).is_some() {
            self.failures.remove(&key);
        }
        let known = self.applied(&key).is_some();
        if !known {
            self.set_applied(key, value.cloned());
        }
        self.check(key, BASE, now);
        self.pending.moved();
        known && self.applied(&key) != value
    }

    /// The rules of a table could not be read: they get no op, and are to be read again after a pause.
    pub fn note_unread(&mut self, key: Key, now: Instant) {
        if !self.started.contains(&key) {
            self.unread.insert(key, false);
            self.failures.note(key, BASE, false, now);
            self.pending.moved();
        }
    }

    /// The rules that are to be read again now, for [`Dataplane::read_rules`].
    pub fn rules_to_read(&mut self, now: Instant) -> Vec<(Key, Ruleset)> {
        self.wake(now);
        let failures = &self.failures;
        let due = self
            .unread
            .iter_mut()
            .filter(|(key, asked)| !**asked && !failures.pauses(key));
        due.filter_map(|(key, asked)| match self.base.get(key) {
            Some(Value::Rules(rules)) => {
                *asked = true;
                Some((*key, (**rules).clone()))
            }
            _ => None,
        })
        .collect()
    }

    /// All rules that are wanted, to be compared with the kernel's.
    pub fn wanted_rules(&self) -> impl Iterator<Item = (Key, &Ruleset)> {
        self.base.iter().filter_map(|(key, value)| match value {
            Value::Rules(rules) => Some((*key, &**rules)),
            _ => None,
        })
    }

    /// The rules of a table are to be written again although they are as wanted: they are not where they must be.
    pub fn rewrite_rules(&mut self, key: Key, now: Instant) {
        self.set_applied(key, None);
        self.check(key, BASE, now);
    }

    /// From now on notes the keys that ops touch, until [`Planner::differing`] leaves them aside:
    /// a reading that goes on meanwhile can't tell what they are.
    pub fn begin_reading(&mut self) {
        self.touched = Some(BTreeSet::new());
    }

    /// The keys at which the kernel is not as this planner left it, by a reading that began with
    /// [`Planner::begin_reading`].
    #[must_use]
    pub fn differing(&self, reading: &Reading) -> BTreeSet<Key> {
        let read = &reading.state;
        let touched = |key: &Key| {
            self.touched.as_ref().is_some_and(|touched| {
                touched.contains(key)
                    || matches!(key, Key::RealServer(vs, _)
                        if touched.contains(&Key::VirtualServer(*vs)))
            })
        };
        let keys = self
            .applied_keys()
            .chain(read.keys().copied())
            .filter(|key| !touched(key) && !self.is_hidden(key, read) && !self.is_spared(key))
            .filter(|key| !reading.unread.contains(key) && !self.unread.contains_key(key));
        keys.filter(|key| self.applied(key) != read.get(key))
            .collect()
    }

    /// Of the keys at which a reading differed, those at which the next one does too. Where that one
    /// lacks something, what it rests on is missed with it: it may have gone while the first
    /// reading was made, which then shows it, but no longer what rested on it.
    #[must_use]
    pub fn differing_again(&self, mut drift: BTreeSet<Key>, again: &Reading) -> BTreeSet<Key> {
        let also = self.differing(again);
        drift.retain(|key| also.contains(key));
        let grounds: Vec<Key> = drift
            .iter()
            .filter_map(ground)
            .filter(|key| also.contains(key) && !again.state.contains_key(key))
            .collect();
        drift.extend(grounds);
        drift
    }

    /// Whether a reading can't tell of a virtual server, or of its real server, because what it is
    /// known by is gone: an entry of a set, or the address. That is put right first.
    fn is_hidden(&self, key: &Key, read: &State) -> bool {
        let (Key::VirtualServer(vs) | Key::RealServer(vs, _)) = key else {
            return false;
        };
        !is_ours(vs, read) && owning_entries(vs).any(|key| self.applied(&key).is_some())
    }

    /// Takes in what was read at these keys, and marks them if they need an op.
    pub fn adopt(&mut self, keys: &BTreeSet<Key>, read: &State, now: Instant) {
        for key in keys {
            // It failed for what was there before.
            self.failures.remove(key);
            self.set_applied(*key, read.get(key).cloned());
            self.check(*key, UNCLAIMED, now);
            if let (Key::VirtualServer(vs), true) = (key, read.contains_key(key)) {
                self.mark_real_servers(*vs);
            }
        }
        self.pending.moved();
        // Real servers went with their virtual server, and what rests on an address with it.
        let gone: Vec<Key> = keys
            .iter()
            .filter(|key| !read.contains_key(key))
            .copied()
            .collect();
        for key in gone {
            if let Key::VirtualServer(vs) = key {
                for child in self.real_servers_of(vs) {
                    self.set_applied(child, read.get(&child).cloned());
                    self.check(child, UNCLAIMED, now);
                }
            }
        }
    }

    /// Reads the kernel for [`Planner::resync`]. Listings of IPVS and ipset don't tell when they
    /// lack something, so a reading from which any op would follow counts only once the next one
    /// is equal to it.
    ///
    /// # Errors
    /// If the kernel can't be read whole, or no two readings are equal.
    pub fn read_agreed(&mut self, kernel: &mut impl Dataplane) -> Result<Reading, ReadError> {
        self.replan();
        let mut read = kernel.read(&self.base)?;
        if self.is_as_wanted(&read) {
            return Ok(read);
        }
        for _ in 0..READINGS {
            let again = kernel.read(&self.base)?;
            if again == read {
                return Ok(read);
            }
            read = again;
        }
        Err(ReadError("no two readings are equal".to_owned()))
    }

    /// Whether a reading shows what is claimed and nothing else.
    pub(super) fn is_as_wanted(&self, reading: &Reading) -> bool {
        let read = &reading.state;
        let plans = self.plans.values().flat_map(|planned| planned.keys());
        let mut keys = read.keys().chain(self.base.keys()).chain(plans);
        keys.all(|key| {
            read.get(key) == self.claimed(key)
                || self.is_spared(key)
                || reading.unread.contains(key)
        })
    }

    /// How many entries the kernel's sets hold, as far as this planner knows, those of sets without any left out.
    #[must_use]
    pub fn entries(&self) -> &BTreeMap<Set, u32> {
        &self.entries
    }

    /// How many of our rules in the kernel name each set, as far as this planner knows.
    #[must_use]
    pub fn references(&self) -> BTreeMap<Set, u32> {
        let mut references = BTreeMap::new();
        for (key, value) in &self.base {
            let (Key::Rules(family, _), Value::Rules(rules)) = (key, value) else {
                continue;
            };
            if self.applied(key) != Some(value) {
                continue;
            }
            let named = rules.references();
            for set in Set::all(*family) {
                if let Some(number) = named.get(set.name().as_str()) {
                    *references.entry(set).or_default() += number;
                }
            }
        }
        references
    }

    /// So many virtual servers that the kernel holds, as far as this planner knows; others at the next call.
    pub fn sample(&mut self, number: usize) -> Vec<VirtualServerKey> {
        let after = self.sampled.map_or(Bound::Unbounded, Bound::Excluded);
        // After the last one it begins anew.
        let range = self.records.range((after, Bound::Unbounded));
        let servers = range
            .chain(&self.records)
            .filter_map(|(key, record)| match key {
                Key::VirtualServer(vs) if record.applied.is_some() => Some(*vs),
                _ => None,
            });
        let sample: Vec<VirtualServerKey> = servers.take(number).collect();
        self.sampled = sample.last().map(|vs| Key::VirtualServer(*vs));
        sample
    }

    /// Whether the kernel holds something at a key, as far as this planner knows.
    #[must_use]
    pub fn holds(&self, key: &Key) -> bool {
        self.applied(key).is_some()
    }

    /// The kernel must be read again and handed to [`Planner::resync`]: it is not as we thought,
    /// or the outcome of an op is unknown.
    #[must_use]
    pub fn in_doubt(&self) -> bool {
        self.doubt
    }
}

/// What goes out of the kernel together with its ground.
fn ground(key: &Key) -> Option<Key> {
    match key {
        Key::RealServer(vs, _) => Some(Key::VirtualServer(*vs)),
        Key::Address(_) => Some(Key::Link),
        Key::Entry(set, _) => Some(Key::Set(*set)),
        Key::Set(_) | Key::Rules(..) | Key::Link | Key::VirtualServer(_) => None,
        Key::RoutingRule(..) | Key::Route(_) => None,
    }
}
