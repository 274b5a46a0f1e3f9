//! When a change of rules by somebody else brings an audit forward.

use std::time::{Duration, Instant};

/// How long to wait for the rest of a change that takes several transactions.
const LET_FINISH: Duration = Duration::from_millis(100);

/// So many audits for one reason follow each other without a pause.
const BURST: u32 = 3;

/// How often there may be one more: some software rewrites rules without end.
const PAUSE: Duration = Duration::from_secs(5);

/// What brings an audit forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// Notices of rules that somebody else changed.
    Notices,
    /// What is gone from the kernel by a glance. It waits for no other software that changes rules.
    Glance,
}

/// Audits that do not wait for their time.
#[derive(Debug, Default)]
pub(crate) struct Hurry {
    notices: Budget,
    glances: Budget,
}

#[derive(Debug, Default)]
struct Budget {
    /// When the next audit begins.
    at: Option<Instant>,
    /// From when on there is a full burst again.
    full_at: Option<Instant>,
}

impl Budget {
    /// When there may be one at the earliest.
    fn earliest(&self, now: Instant) -> Instant {
        let full_at = self.full_at.unwrap_or(now);
        full_at
            .checked_sub(PAUSE * (BURST - 1))
            .unwrap_or(now)
            .max(now)
    }

    fn begun(&mut self, now: Instant) {
        if self.at.take().is_some() {
            self.full_at = Some(self.full_at.unwrap_or(now).max(now) + PAUSE);
        }
    }
}

impl Hurry {
    /// Something changed. What comes before the audit begins belongs to it.
    pub(crate) fn note(&mut self, why: Why, now: Instant) {
        let budget = match why {
            Why::Notices => &mut self.notices,
            Why::Glance => &mut self.glances,
        };
        let at = budget.earliest(now).max(now + LET_FINISH);
        budget.at.get_or_insert(at);
    }

    /// When the next such audit begins, if there is a reason for one.
    pub(crate) fn at(&self) -> Option<Instant> {
        self.notices.at.into_iter().chain(self.glances.at).min()
    }

    /// The kernel is read from now on, for whatever reason.
    pub(crate) fn begun(&mut self, now: Instant) {
        self.notices.begun(now);
        self.glances.begun(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_of_changes_is_three_audits_and_then_one_each_five_seconds() {
        let start = Instant::now();
        let mut hurry = Hurry::default();
        assert_eq!(hurry.at(), None);
        let mut begun = Vec::new();
        // 100 changes a second for 12 seconds
        for change in 0..1200 {
            let now = start + Duration::from_millis(10 * change);
            hurry.note(Why::Notices, now);
            if hurry.at().is_some_and(|at| at <= now) {
                hurry.begun(now);
                begun.push(now.duration_since(start).as_millis());
            }
        }
        assert_eq!(begun, [100, 210, 320, 5100, 10_100]);
        // The last changes are not forgotten, nor looked at twice.
        let rest = hurry.at().expect("the changes since then");
        assert_eq!(rest.duration_since(start).as_millis(), 15_100);
        hurry.begun(rest);
        assert_eq!(hurry.at(), None);
        // What a glance finds waits for none of them.
        hurry.note(Why::Notices, rest);
        hurry.note(Why::Glance, rest);
        assert_eq!(hurry.at(), Some(rest + LET_FINISH));
        hurry.begun(rest);
        // After a rest the next is looked at without delay; a reading for another reason will do.
        let later = rest + Duration::from_secs(60);
        hurry.note(Why::Notices, later);
        assert_eq!(hurry.at(), Some(later + LET_FINISH));
        hurry.begun(later);
        assert_eq!(hurry.at(), None);
    }
}
