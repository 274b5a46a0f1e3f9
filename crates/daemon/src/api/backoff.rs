//! When the API server is asked again.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Also the most that is waited longer because the server asks for it.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// After a watch that stood that long, whatever ends it is the first of its kind.
const LONG: Duration = Duration::from_secs(10);

/// The pauses between requests for one kind: one back-off for failures of all sorts, whatever client met them.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// Until the server may be asked.
    pub(super) async fn wait(&self) {
        if let Some(until) = self.until {
            sleep_until(until).await;
        }
    }

    /// The server may be asked at once: it, or who asks, is another. A further failure is no first one.
    pub(super) fn try_now(&mut self) {
        self.until = None;
    }

    /// A list or a watch failed, after the watch had stood that long, and the server asked for a pause. Whether it is
    /// the first failure since a watch stood.
    pub(super) fn failed(&mut self, stood: Duration, asked: Duration) -> bool {
        if stood >= LONG {
            self.failures = 0;
        }
        let pause = self.pause(LONGEST_PAUSE) + asked.min(LONGEST_PAUSE);
        self.until = Some(Instant::now() + pause);
        self.failures = self.failures.saturating_add(1);
        self.failures == 1
    }

    /// The server ended a watch that had stood that long. If each watch is that short, news wait for the next one, so it
    /// comes sooner than after a failure.
    pub(super) fn ended(&mut self, stood: Duration) {
        if stood >= LONG {
            *self = Backoff::default();
        } else {
            self.until = Some(Instant::now() + self.pause(LONG));
            self.failures = self.failures.saturating_add(1);
        }
    }

    /// Twice as long each time, no two processes alike.
    fn pause(&self, most: Duration) -> Duration {
        let longest = FIRST_PAUSE * 2_u32.saturating_pow(self.failures.min(6));
        // From 50 % to 100 %.
        longest.min(most).mul_f64(0.5 + 0.5 * share())
    }
}

/// A number from 0 to 1 that differs from process to process and from call to call.
fn share() -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    // The keys of the hash are random.
    let number = RandomState::new().hash_one(0_u8) >> 32;
    f64::from(u32::try_from(number).unwrap_or_default()) / f64::from(u32::MAX)
}
