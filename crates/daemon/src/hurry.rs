//! When a change of rules by somebody else brings an audit forward.

use std::time::{Duration, Instant};

/// How long to wait for the rest of a change that takes several transactions.
const LET_FINISH: Duration = Duration::from_millis(100);

/// The least time between two audits for this reason: some software rewrites rules without end.
const PAUSE: Duration = Duration::from_secs(5);

/// An audit that does not wait for its time.
#[derive(Debug, Default)]
pub(crate) struct Hurry {
    /// When it begins.
    at: Option<Instant>,
    /// The last one began then.
    last: Option<Instant>,
}

impl Hurry {
    /// Something changed. What comes before the audit begins belongs to it.
    pub(crate) fn note(&mut self, now: Instant) {
        let soon = now + LET_FINISH;
        let earliest = self.last.map_or(soon, |last| soon.max(last + PAUSE));
        self.at.get_or_insert(earliest);
    }

    /// When the next audit for this reason begins, if there is a reason.
    pub(crate) fn at(&self) -> Option<Instant> {
        self.at
    }

    /// The kernel is read from now on, for whatever reason.
    pub(crate) fn begun(&mut self, now: Instant) {
        if self.at.take().is_some() {
            self.last = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_of_changes_is_an_audit_each_five_seconds() {
        let start = Instant::now();
        let mut hurry = Hurry::default();
        assert_eq!(hurry.at(), None);
        let mut begun = Vec::new();
        // 100 changes a second for 12 seconds
        for change in 0..1200 {
            let now = start + Duration::from_millis(10 * change);
            hurry.note(now);
            if hurry.at().is_some_and(|at| at <= now) {
                hurry.begun(now);
                begun.push(now.duration_since(start).as_millis());
            }
        }
        assert_eq!(begun, [100, 5100, 10_100]);
        // The last changes are not forgotten, nor looked at twice.
        let rest = hurry.at().expect("the changes since then");
        assert_eq!(rest.duration_since(start).as_millis(), 15_100);
        hurry.begun(rest);
        assert_eq!(hurry.at(), None);
        // After a rest the next is looked at without delay; a reading for another reason will do.
        let later = rest + Duration::from_secs(60);
        hurry.note(later);
        assert_eq!(hurry.at(), Some(later + LET_FINISH));
        hurry.begun(later);
        assert_eq!(hurry.at(), None);
    }
}
