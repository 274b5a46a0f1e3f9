//! Keys that may need an op, in the order in which they get it.
//!
//! Each belongs to a group, a Service's, which is worked on phase by phase. Groups with little to do go first, so that
//! news of one Service never waits for all that another one needs.

use std::collections::{BTreeMap, BTreeSet};

use super::Group;
use super::order::Place;
use crate::state::Key;

/// Groups with fewer pending keys than 2 to the power of this share rounds; one with more has rounds of its own.
const HEAVY: u32 = 8;
/// One round in so many is that of the group that waits for the longest, whatever it has to do.
const OLDEST_EVERY: u32 = 4;

/// The pending keys. See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Pending {
    keys: BTreeMap<Key, (Group, Place)>,
    groups: BTreeMap<Group, Waiting>,
    /// The groups that may have something to do now: by their size, then by their turn.
    queue: BTreeSet<(u32, u64, Group)>,
    /// The same by their turn alone.
    oldest: BTreeSet<(u64, Group)>,
    /// The groups of which nothing can be done before something else is.
    stuck: BTreeSet<Group>,
    /// Something was done since a group got stuck.
    moved: bool,
    turn: u64,
    /// Rounds since the group that waited for the longest had one.
    rounds: u32,
}

#[derive(Debug)]
struct Waiting {
    keys: BTreeSet<(Place, Key)>,
    /// The binary logarithm of how many these are.
    size: u32,
    turn: u64,
}

impl Pending {
    pub(super) fn contains(&self, key: &Key) -> bool {
        self.keys.contains_key(key)
    }

    /// Adds a key, or moves it to a group that goes before its own, or to another place.
    pub(super) fn mark(&mut self, key: Key, group: Group, place: Place) {
        let group = match self.keys.get(&key) {
            Some((known, _)) => group.min(*known),
            None => group,
        };
        self.unmark(&key);
        self.keys.insert(key, (group, place));
        let turn = self.turn;
        let waiting = self.groups.entry(group).or_insert_with(|| Waiting {
            keys: BTreeSet::new(),
            size: 0,
            turn,
        });
        if waiting.keys.is_empty() {
            self.turn += 1;
        }
        waiting.keys.insert((place, key));
        if size(&waiting.keys) != waiting.size || self.stuck.contains(&group) {
            self.file(group);
        }
    }

    /// Takes a key out; the group that it belonged to.
    pub(super) fn unmark(&mut self, key: &Key) -> Option<Group> {
        let (group, place) = self.keys.remove(key)?;
        if let Some(waiting) = self.groups.get_mut(&group) {
            waiting.keys.remove(&(place, *key));
            if waiting.keys.is_empty() {
                self.unfile(group);
                self.groups.remove(&group);
            } else if size(&waiting.keys) != waiting.size && !self.stuck.contains(&group) {
                self.file(group);
            }
        }
        Some(group)
    }

    /// Whether something of a group waits for its op.
    pub(super) fn has(&self, group: Group) -> bool {
        self.groups.contains_key(&group)
    }

    /// The keys of a group with their places, the first first.
    pub(super) fn of(&self, group: Group) -> impl Iterator<Item = (Place, Key)> {
        let waiting = self.groups.get(&group);
        waiting.into_iter().flat_map(|w| w.keys.iter().copied())
    }

    /// Something was done that a stuck group may wait for.
    pub(super) fn moved(&mut self) {
        self.moved = true;
    }

    /// At most so many groups for the next round, in their order; none when nothing can be done now.
    pub(super) fn next_groups(&mut self, most: usize) -> Vec<Group> {
        if self.queue.is_empty() && std::mem::take(&mut self.moved) {
            for group in std::mem::take(&mut self.stuck) {
                self.file(group);
            }
        }
        let heavy = |group: &Group| self.groups.get(group).is_some_and(|w| w.size > HEAVY);
        let oldest = self.oldest.first().map(|(_, group)| *group);
        let light = self
            .queue
            .iter()
            .take_while(|(size, ..)| *size <= HEAVY)
            .map(|(.., group)| *group);
        let mut groups: Vec<Group> = light.take(most).collect();
        self.rounds += 1;
        if let Some(oldest) = oldest
            && (groups.is_empty() || self.rounds >= OLDEST_EVERY)
        {
            self.rounds = 0;
            if heavy(&oldest) {
                return vec![oldest];
            }
            groups.retain(|group| *group != oldest);
            groups.insert(0, oldest);
        }
        groups
    }

    /// A group had its turn; it goes behind the others of its size.
    pub(super) fn worked(&mut self, group: Group) {
        self.unfile(group);
        self.turn += 1;
        if let Some(waiting) = self.groups.get_mut(&group) {
            waiting.turn = self.turn;
            self.file(group);
        }
    }

    /// Nothing of a group can be done now.
    pub(super) fn stuck(&mut self, group: Group) {
        self.unfile(group);
        if self.groups.contains_key(&group) {
            self.stuck.insert(group);
        }
    }

    fn file(&mut self, group: Group) {
        self.unfile(group);
        if let Some(waiting) = self.groups.get_mut(&group) {
            waiting.size = size(&waiting.keys);
            self.queue.insert((waiting.size, waiting.turn, group));
            self.oldest.insert((waiting.turn, group));
        }
    }

    fn unfile(&mut self, group: Group) {
        self.stuck.remove(&group);
        if let Some(waiting) = self.groups.get(&group) {
            self.queue.remove(&(waiting.size, waiting.turn, group));
            self.oldest.remove(&(waiting.turn, group));
        }
    }
}

fn size(keys: &BTreeSet<(Place, Key)>) -> u32 {
    usize::BITS - keys.len().leading_zeros()
}
