//! What was read from the kernel: taken in whole, or where it differs.

use std::collections::BTreeSet;
use std::time::Instant;

use super::{BASE, Group, Planner, READINGS, UNCLAIMED};
use crate::op::{Dataplane, ReadError};
use crate::state::{Key, State, is_ours, owning_entries};

impl Planner {
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
        self.real_servers.clear();
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

    /// From now on notes the keys that ops touch, until [`Planner::differing`] leaves them aside:
    /// a reading that goes on meanwhile can't tell what they are.
    pub fn begin_reading(&mut self) {
        self.touched = Some(BTreeSet::new());
    }

    /// The keys at which the kernel is not as this planner left it, by a reading that began with
    /// [`Planner::begin_reading`].
    #[must_use]
    pub fn differing(&self, read: &State) -> BTreeSet<Key> {
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
            .filter(|key| !touched(key) && !self.is_hidden(key, read) && !self.is_spared(key));
        keys.filter(|key| self.applied(key) != read.get(key))
            .collect()
    }

    /// Of the keys at which a reading differed, those at which the next one does too. Where that one
    /// lacks something, what it rests on is missed with it: it may have gone while the first
    /// reading was made, which then shows it, but no longer what rested on it.
    #[must_use]
    pub fn differing_again(&self, mut drift: BTreeSet<Key>, again: &State) -> BTreeSet<Key> {
        let also = self.differing(again);
        drift.retain(|key| also.contains(key));
        let grounds: Vec<Key> = drift
            .iter()
            .filter_map(ground)
            .filter(|key| also.contains(key) && !again.contains_key(key))
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
        self.replan();
        for key in keys {
            self.set_applied(*key, read.get(key).cloned());
            self.check(*key, UNCLAIMED, now);
        }
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
    pub fn read_agreed(&mut self, kernel: &mut impl Dataplane) -> Result<State, ReadError> {
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
    pub(super) fn is_as_wanted(&self, read: &State) -> bool {
        let plans = self.plans.values().flat_map(|planned| planned.keys());
        let mut keys = read.keys().chain(self.base.keys()).chain(plans);
        keys.all(|key| read.get(key) == self.claimed(key) || self.is_spared(key))
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
    }
}
