//! What can go wrong between a [`MemoryKernel`](super::MemoryKernel) and who talks to it.

use std::collections::{BTreeMap, BTreeSet};

use crate::op::{FailureKind, ReadError};
use crate::state::{Key, State};

/// What goes wrong with an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The kernel refuses it.
    Refused(FailureKind),
    /// It was carried out, but its answer was lost: the outcome is unknown.
    LostAnswer,
    /// It never came to the kernel, and nobody knows: the outcome is unknown.
    LostRequest,
}

/// What goes wrong with a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadReading {
    /// The kernel said that the listing was interrupted.
    Interrupted,
    /// About a quarter of what IPVS and ipset list is lacking and nothing tells so: their
    /// listings carry no mark of an interruption. The number picks which. (What is listed twice
    /// makes no difference to a [`State`], which has each key once.)
    Torn(u64),
}

/// What goes wrong from now on.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// With every op on a key.
    pub at: BTreeMap<Key, Fault>,
    /// With the next readings: the first with the next one, and so on.
    pub readings: std::collections::VecDeque<BadReading>,
    /// With single ops, by their number.
    nth: BTreeMap<usize, Fault>,
    ops: usize,
}

impl Faults {
    /// Something goes wrong with the nth op from now, the next one being 0.
    pub fn strike(&mut self, nth: usize, fault: Fault) {
        self.nth.insert(self.ops + nth, fault);
    }

    /// Nothing goes wrong any more.
    pub fn clear(&mut self) {
        self.at.clear();
        self.readings.clear();
        self.nth.clear();
    }

    /// The fault of the next op.
    pub(super) fn of(&mut self, key: &Key) -> Option<Fault> {
        let struck = self.nth.remove(&self.ops);
        self.ops += 1;
        struck.or_else(|| self.at.get(key).copied())
    }

    /// What the next reading shows of a state.
    pub(super) fn read(&mut self, mut state: State) -> Result<State, ReadError> {
        match self.readings.pop_front() {
            None => {}
            Some(BadReading::Interrupted) => {
                return Err(ReadError("the listing was interrupted".to_owned()));
            }
            Some(BadReading::Torn(seed)) => tear(&mut state, seed),
        }
        Ok(state)
    }
}

fn tear(state: &mut State, seed: u64) {
    let mut random = seed;
    let listed = |key: &&Key| {
        matches!(
            key,
            Key::Entry(..) | Key::VirtualServer(_) | Key::RealServer(..)
        )
    };
    let keys = state
        .keys()
        .filter(listed)
        .filter(|_| next(&mut random).is_multiple_of(4));
    let lacking: BTreeSet<Key> = keys.copied().collect();
    // The real servers of a virtual server that was not listed are not asked for.
    state.retain(|key, _| {
        let orphan =
            matches!(key, Key::RealServer(vs, _) if lacking.contains(&Key::VirtualServer(*vs)));
        !orphan && !lacking.contains(key)
    });
}

/// SplitMix64.
fn next(random: &mut u64) -> u64 {
    *random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *random;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
