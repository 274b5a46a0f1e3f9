//! Keys whose op failed, each with a pause that grows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::{BASE, Group};
use crate::state::Key;

/// The first pause after a failure, doubled each time up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Of what all Services rest on. It is a few keys, which when they fail alone cost nothing to others.
const LONGEST_PAUSE_OF_BASE: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Pause {
    /// When it failed first.
    since: Instant,
    attempts: u32,
    /// When the pause is over; `None` while it is tried again.
    until: Option<Instant>,
    group: Group,
    /// It fails for what the node lacks, not for what the object says.
    of_node: bool,
}

/// The keys whose last op failed.
#[derive(Debug, Default)]
pub(super) struct Failures {
    pauses: BTreeMap<Key, Pause>,
    /// When pauses end.
    ends: BTreeSet<(Instant, Key)>,
}

impl Failures {
    pub(super) fn contains(&self, key: &Key) -> bool {
        self.pauses.contains_key(key)
    }

    /// Whether a key waits for the end of its pause.
    pub(super) fn pauses(&self, key: &Key) -> bool {
        self.pauses
            .get(key)
            .is_some_and(|pause| pause.until.is_some())
    }

    /// Notes that an op failed just now.
    pub(super) fn note(&mut self, key: Key, group: Group, of_node: bool, now: Instant) {
        let failed = self.pauses.get(&key);
        let since = failed.map_or(now, |pause| pause.since);
        let attempts = failed.map_or(0, |pause| pause.attempts);
        let pause = FIRST_PAUSE * 2_u32.saturating_pow(attempts.min(6));
        let longest = match group {
            BASE => LONGEST_PAUSE_OF_BASE,
            _ => LONGEST_PAUSE,
        };
        let until = now + pause.min(longest);
        self.remove(&key);
        self.ends.insert((until, key));
        let pause = Pause {
            since,
            attempts: attempts + 1,
            until: Some(until),
            group,
            of_node,
        };
        self.pauses.insert(key, pause);
    }

    /// Forgets a failure; the group of its key, if there was one.
    pub(super) fn remove(&mut self, key: &Key) -> Option<Group> {
        let pause = self.pauses.remove(key)?;
        if let Some(until) = pause.until {
            self.ends.remove(&(until, *key));
        }
        Some(pause.group)
    }

    /// The keys whose pause has ended since the last call.
    pub(super) fn woken(&mut self, now: Instant) -> Vec<(Key, Group)> {
        let mut woken = Vec::new();
        while let Some((_, key)) = self
            .ends
            .first()
            .filter(|(until, _)| *until <= now)
            .copied()
        {
            self.ends.pop_first();
            if let Some(pause) = self.pauses.get_mut(&key) {
                pause.until = None;
                woken.push((key, pause.group));
            }
        }
        woken
    }

    /// When the next pause ends.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(until, _)| *until)
    }

    /// The failing keys between two, both included.
    pub(super) fn between(&self, low: Key, high: Key) -> Vec<Key> {
        self.pauses.range(low..=high).map(|(key, _)| *key).collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Key, Instant)> {
        self.pauses.iter().map(|(key, pause)| (key, pause.since))
    }

    /// The key that has failed for longest of these, and since when: those that this picks, and those that fail for what the
    /// node lacks.
    pub(super) fn first_of_node(&self, also: impl Fn(&Key) -> bool) -> Option<(&Key, Instant)> {
        let counts = |(key, pause): &(&Key, &Pause)| pause.of_node || also(key);
        let of_node = self.pauses.iter().filter(counts);
        let since = of_node.map(|(key, pause)| (key, pause.since));
        since.min_by_key(|(_, since)| *since)
    }

    pub(super) fn since(&self, key: &Key) -> Option<Instant> {
        self.pauses.get(key).map(|pause| pause.since)
    }
}
