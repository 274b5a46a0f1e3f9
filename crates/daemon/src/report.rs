//! What the log says of objects: one line per object and cause, of many a few lines and a sum, and never
//! more lines than a person can read.
//!
//! - [`Reports::about`] remembers what stands, so that it is told once; what is over is forgotten after
//!   [`AGAIN`], so that something that comes and goes all the time is no news
//! - of each topic [`FEW`] lines are written in [`WINDOW`], then a sum; over all topics [`BURST`] lines at
//!   once and one in [`REFILL`] in the long run
//! - what is written, known or left out is counted in metrics
//!
//! No clock is read here: the time is an argument.

mod objects;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tracing::{info, warn};

use crate::events::Finding;

/// The most lines of a topic in a [`WINDOW`].
pub const FEW: usize = 10;
/// How long lines of a topic count together.
pub const WINDOW: Duration = Duration::from_secs(10);
/// The most lines at once, over all topics.
pub const BURST: u32 = 60;
/// How often there may be one more.
pub const REFILL: Duration = Duration::from_secs(1);
/// Of these, kept for sums.
const FOR_SUMS: u32 = 10;
/// What was over for less than this is no news when it begins again.
pub const AGAIN: Duration = Duration::from_secs(60);
/// Most causes that are remembered. What is beyond is counted only.
pub const REMEMBERED: usize = 20_000;
/// Most findings that wait to become Events.
const FINDINGS: usize = 256;

/// What a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topic {
    /// A part of an object that can't be used.
    Refused,
    /// A file of manifests.
    Manifest,
    /// What a Service asks for and can't have.
    NotServed,
    /// A VIP and port that an older Service has.
    Conflict,
    /// A VIP and port that went to another Service.
    Takeover,
    /// The kernel refuses what an object needs.
    Failed,
    /// It no longer does.
    Recovered,
    /// Health check node ports that can't be listened on.
    HealthPort,
    /// Real servers that begin to drain, and flows that lead elsewhere.
    Drain,
    /// Real servers that no longer drain.
    DrainEnd,
    /// What somebody else changed in the kernel.
    Drift,
}

impl Topic {
    /// As a field and a label.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Topic::Refused => "refused",
            Topic::Manifest => "manifest",
            Topic::NotServed => "not_served",
            Topic::Conflict => "conflict",
            Topic::Takeover => "takeover",
            Topic::Failed => "failed",
            Topic::Recovered => "recovered",
            Topic::HealthPort => "health_port",
            Topic::Drain => "drain",
            Topic::DrainEnd => "drain_end",
            Topic::Drift => "drift",
        }
    }

    /// Whether it is told when such a thing is over; else it is over when it is not told for [`AGAIN`].
    fn ends(self) -> bool {
        matches!(self, Topic::Refused | Topic::Failed | Topic::HealthPort)
    }
}

/// What to do with a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Say {
    /// It is news.
    Line,
    /// It is news, but there are too many: for debugging only.
    Detail,
    /// It was told.
    Nothing,
}

/// Writes a line of a level (`warn`, …) as [`Say`] has it, with tracing's words.
macro_rules! say {
    ($say:expr, $level:ident, $($line:tt)+) => {
        match $say {
            $crate::report::Say::Line => tracing::$level!($($line)+),
            $crate::report::Say::Detail => tracing::debug!($($line)+),
            $crate::report::Say::Nothing => {}
        }
    };
}
pub(crate) use say;

/// Lines by topic, and whether they were `told`, `known` or `left_out`.
pub type Lines = Family<[(&'static str, &'static str); 2], Counter>;

/// What is known of one cause.
#[derive(Debug)]
struct Known {
    /// When it began.
    since: Instant,
    /// When it was last so.
    seen: Instant,
    /// When there was a line about it, or would have been.
    told: Instant,
    /// What it was about.
    value: u64,
    /// How often.
    times: u64,
    over: bool,
    /// There was a line about its end since there was one about its beginning.
    ends_told: bool,
}

/// The lines of a topic that count together.
#[derive(Debug)]
struct Window {
    began: Instant,
    told: usize,
    left: u64,
}

/// Decides which lines are written.
#[derive(Debug)]
pub struct Reports {
    /// By topic and object, then by cause.
    known: BTreeMap<(Topic, String), BTreeMap<u64, Known>>,
    /// How many causes that are.
    causes: usize,
    forgot: Instant,
    /// Nobody can foresee which two causes are taken for one.
    hash: RandomState,
    windows: BTreeMap<Topic, Window>,
    tokens: u32,
    refilled: Instant,
    lines: Lines,
    findings: Vec<Finding>,
    applied: objects::Applied,
}

impl Reports {
    /// Nothing is known; lines are counted there.
    #[must_use]
    pub fn new(lines: Lines, now: Instant) -> Reports {
        Reports {
            known: BTreeMap::new(),
            causes: 0,
            forgot: now,
            hash: RandomState::new(),
            windows: BTreeMap::new(),
            tokens: BURST,
            refilled: now,
            lines,
            findings: Vec::new(),
            applied: objects::Applied::default(),
        }
    }

    /// Notes that something is so, and says what to do with the line about it. The object is what a person
    /// knows it by (`Service default/web`), the cause what tells two things of one object apart.
    pub fn about(&mut self, topic: Topic, object: &str, cause: impl Hash, now: Instant) -> Say {
        self.note(topic, object, cause, (), now).0
    }

    /// The same; with another value than before it is news, unless it was told a moment ago. Also since
    /// when it is so.
    fn note(
        &mut self,
        topic: Topic,
        object: &str,
        cause: impl Hash,
        value: impl Hash,
        now: Instant,
    ) -> (Say, Instant) {
        let (cause, value) = (self.hash.hash_one(cause), self.hash.hash_one(value));
        let key = (topic, object.to_owned());
        let causes = self.known.get_mut(&key);
        if let Some(known) = causes.and_then(|causes| causes.get_mut(&cause)) {
            let long = |at| now.saturating_duration_since(at) >= AGAIN;
            let ended = (known.over || !topic.ends()) && long(known.seen);
            let other = known.value != value && long(known.told);
            known.seen = now;
            known.over = false;
            if ended {
                known.since = now;
                known.times = 0;
            }
            known.times += 1;
            let since = known.since;
            if !ended && !other {
                self.count(topic, "known", 1);
                return (Say::Nothing, since);
            }
            known.ends_told = false;
            known.told = now;
            known.value = value;
            return (self.line(topic, now), since);
        }
        if self.causes >= REMEMBERED {
            // Else it would be news each time.
            return (self.leave(topic, now), now);
        }
        self.causes += 1;
        let known = Known {
            since: now,
            seen: now,
            told: now,
            value,
            times: 1,
            over: false,
            ends_told: false,
        };
        self.known.entry(key).or_default().insert(cause, known);
        (self.line(topic, now), now)
    }

    /// Says what to do with a line about something that is news each time.
    pub fn line(&mut self, topic: Topic, now: Instant) -> Say {
        self.refill(now);
        let few = self.window(topic, now).told < FEW;
        if !few || self.tokens <= FOR_SUMS {
            return self.leave(topic, now);
        }
        self.tokens -= 1;
        self.window(topic, now).told += 1;
        self.count(topic, "told", 1);
        Say::Line
    }

    /// Says what to do with a sum of what was left out of a topic. Where it is a line, no other sum follows.
    pub fn sum(&mut self, topic: Topic, now: Instant) -> Say {
        self.refill(now);
        if self.tokens == 0 {
            return Say::Detail;
        }
        self.tokens -= 1;
        self.window(topic, now).left = 0;
        Say::Line
    }

    fn leave(&mut self, topic: Topic, now: Instant) -> Say {
        self.window(topic, now).left += 1;
        self.count(topic, "left_out", 1);
        Say::Detail
    }

    fn window(&mut self, topic: Topic, now: Instant) -> &mut Window {
        let new = Window {
            began: now,
            told: 0,
            left: 0,
        };
        let window = self.windows.entry(topic).or_insert(new);
        if window.left == 0 && now.saturating_duration_since(window.began) >= WINDOW {
            window.began = now;
            window.told = 0;
        }
        window
    }

    fn count(&self, topic: Topic, what: &'static str, lines: u64) {
        let labels = [("topic", topic.word()), ("line", what)];
        self.lines.get_or_create(&labels).inc_by(lines);
    }

    fn refill(&mut self, now: Instant) {
        while self.refilled + REFILL <= now && self.tokens < BURST {
            self.refilled += REFILL;
            self.tokens += 1;
        }
        if self.tokens == BURST {
            self.refilled = now;
        }
    }

    /// Keeps a finding that is to become an Event; also one that was told, since Events come again each hour, but news has
    /// room before that. When too many wait, it is left.
    fn find(&mut self, say: Say, finding: Finding) {
        let room = match say {
            Say::Nothing => FINDINGS / 2,
            Say::Line | Say::Detail => FINDINGS,
        };
        if self.findings.len() < room {
            self.findings.push(finding);
        }
    }

    /// Writes the sums that are due, and forgets what is long over. What is to become an Event.
    pub fn flush(&mut self, now: Instant) -> Vec<Finding> {
        self.refill(now);
        self.flush_applied(false, now);
        for (topic, window) in &mut self.windows {
            let due = now.saturating_duration_since(window.began) >= WINDOW && window.left > 0;
            if !due || self.tokens == 0 {
                continue;
            }
            self.tokens -= 1;
            let (topic, told, left_out) = (topic.word(), window.told, window.left);
            match topic {
                "takeover" | "recovered" | "drain" | "drain_end" => {
                    info!(topic, told, left_out, "more of the same");
                }
                _ => warn!(topic, told, left_out, "more of the same"),
            }
            *window = Window {
                began: now,
                told: 0,
                left: 0,
            };
        }
        if now.saturating_duration_since(self.forgot) >= AGAIN {
            self.forget(now);
        }
        std::mem::take(&mut self.findings)
    }

    /// When [`Reports::flush`] has something to write, unless there is more before.
    #[must_use]
    pub fn next_at(&self) -> Option<Instant> {
        let token = match self.tokens {
            0 => self.refilled + REFILL,
            _ => self.refilled,
        };
        let left = self.windows.values().filter(|window| window.left > 0);
        let sums = left.map(|window| (window.began + WINDOW).max(token));
        sums.chain(self.applied.due()).min()
    }

    fn forget(&mut self, now: Instant) {
        self.forgot = now;
        let mut left = 0;
        self.known.retain(|(topic, _), causes| {
            causes.retain(|_, known| {
                let stands = topic.ends() && !known.over;
                stands || now.saturating_duration_since(known.seen) < AGAIN
            });
            left += causes.len();
            !causes.is_empty()
        });
        self.causes = left;
    }
}

#[cfg(test)]
mod tests;
