//! What is told of objects, by topic.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipvs_proxy_core::guard::{Cause, Refused};
use ipvs_proxy_core::model::{Change, ObjectName};
use ipvs_proxy_core::op::{Failure, Op};
use ipvs_proxy_core::planner::{Conflict, Takeover};
use tracing::{debug, info};

use super::{Reports, Say, Topic, say};
use crate::api::in_a_line;
use crate::events::Finding;
use crate::manifests::Problem;
use crate::translate::Refusal;

/// How long an op fails until there is an Event.
const FAILS_LONG: Duration = Duration::from_secs(60);
/// How often there is a line about what was applied.
const APPLIED: Duration = Duration::from_secs(1);

/// What was applied since the last line about it.
#[derive(Debug, Default)]
pub(super) struct Applied {
    ops: usize,
    failed: usize,
    took: Duration,
    passes: u32,
    /// An op fails that did not fail before.
    news: bool,
    last: Option<Instant>,
}

impl Applied {
    pub(super) fn due(&self) -> Option<Instant> {
        let last = self.last.filter(|_| self.passes > 0)?;
        Some(last + APPLIED)
    }
}

impl Reports {
    /// What a Service asks for and can't have: addresses that are somebody's, more than one Service may have.
    pub fn not_served(&mut self, refused: &Refused, now: Instant) {
        let (service, cause) = (refused.service.to_string(), refused.cause.to_string());
        let say = self.about(Topic::NotServed, &service, (&cause, &refused.first), now);
        let (first, count) = (&refused.first, refused.count);
        match refused.cause {
            Cause::Routed => say!(say, warn, service, first, count, %cause, "served but not bound"),
            _ => say!(say, warn, service, first, count, %cause, "not served"),
        }
    }

    /// A health check node port of a Service is listened on, or why it is not, or not on all addresses.
    pub fn health_port(
        &mut self,
        service: &ObjectName,
        port: u16,
        error: Option<&str>,
        now: Instant,
    ) {
        let Some(error) = error else {
            if self.health_port_over(port, now) {
                say!(self.line(Topic::HealthPort, now), info, %service, port,
                    "the health check node port is listened on again");
            }
            return;
        };
        let say = self.about(Topic::HealthPort, &port.to_string(), error, now);
        say!(say, warn, %service, port, error, "no health check node port; will be tried again");
        self.find(say, Finding::health_port(service, port, error));
    }

    /// Nothing stands of a health check node port; whether something did.
    pub fn health_port_over(&mut self, port: u16, now: Instant) -> bool {
        self.end(Topic::HealthPort, &port.to_string(), now)
            .is_some()
    }

    /// What of objects can't be used: all that there is to say of those that changed, each with the place
    /// where it stands in a file. What is not said again of an object that changed is over.
    pub fn refused(
        &mut self,
        changes: &[Change],
        refusals: impl IntoIterator<Item = (Option<String>, Refusal)>,
        now: Instant,
    ) {
        for object in changes.iter().filter_map(object) {
            self.end(Topic::Refused, &object, now);
        }
        // A list may hold the same fault a thousand times.
        let mut causes = BTreeMap::new();
        for (number, (place, refusal)) in refusals.into_iter().enumerate() {
            let key = (
                refusal.object.clone(),
                without_indexes(&refusal.field),
                refusal.reason.clone(),
            );
            let (.., count) = causes
                .entry(key)
                .or_insert((number, place, refusal, 0_usize));
            *count += 1;
        }
        let mut causes: Vec<_> = causes.into_iter().collect();
        causes.sort_by_key(|(_, (number, ..))| *number);
        for ((object, field, reason), (_, place, refusal, count)) in causes {
            let known_as = match object.split_once(' ') {
                Some(("Node", _)) => "Node",
                _ => &object,
            };
            let cause = (&field, &reason);
            let (say, _) = self.note(Topic::Refused, known_as, cause, &refusal.value, now);
            let [object, field, value, reason] =
                [&object, &refusal.field, &refusal.value, &reason].map(|text| in_a_line(text));
            let count = (count > 1).then_some(count);
            say!(say, warn, place, object, %field, %value, %reason, count, "refused a part of an object");
            self.find(say, Finding::from(&refusal));
        }
    }

    /// What is wrong with manifests, and the refused parts of those that changed.
    pub fn problems(&mut self, changes: &[Change], problems: Vec<Problem>, now: Instant) {
        let mut refusals = Vec::new();
        for problem in problems {
            let text = problem.to_string();
            match problem {
                Problem::Refused {
                    file,
                    line,
                    refusal,
                } => refusals.push((Some(format!("{file}:{line}")), refusal)),
                Problem::BadFile { .. } | Problem::Unreachable { .. } => {
                    let say = self.line(Topic::Manifest, now);
                    say!(say, error, error = %text, "manifests can't be used");
                }
                Problem::Twice { .. } => {
                    let say = self.about(Topic::Manifest, "", &text, now);
                    say!(say, warn, error = %text, "an object stands twice");
                }
                Problem::Mended { path } => {
                    say!(self.line(Topic::Manifest, now), info, path, "is good again");
                }
            }
        }
        self.refused(changes, refusals, now);
    }

    /// Services that go without what an older one has: one line for each two.
    pub fn conflicts(&mut self, conflicts: impl IntoIterator<Item = Conflict>, now: Instant) {
        let mut pairs: BTreeMap<_, (Conflict, usize)> = BTreeMap::new();
        for conflict in conflicts {
            let pair = (conflict.loser.clone(), conflict.winner.clone());
            pairs.entry(pair).or_insert((conflict, 0)).1 += 1;
        }
        for ((loser, winner), (first, virtual_servers)) in pairs {
            let object = loser.to_string();
            let say = self.about(Topic::Conflict, &object, &winner, now);
            say!(say, warn, service = %loser, %winner, virtual_server = %first.key, virtual_servers,
                "not served: a Service that comes first has it");
            self.find(say, Finding::from(&first));
        }
    }

    /// Virtual servers that went to another Service: one line for each two.
    pub fn takeovers(&mut self, takeovers: impl IntoIterator<Item = Takeover>, now: Instant) {
        let mut pairs: BTreeMap<_, (Takeover, usize)> = BTreeMap::new();
        for takeover in takeovers {
            let pair = (takeover.to.clone(), takeover.from.clone());
            pairs.entry(pair).or_insert((takeover, 0)).1 += 1;
        }
        for ((to, from), (first, virtual_servers)) in pairs {
            let say = self.about(Topic::Takeover, &to.to_string(), &from, now);
            say!(say, info, service = %to, %from, virtual_server = %first.key, virtual_servers, "took over");
        }
    }

    /// Ops that failed, each with the Service that it is for: one line for each Service and cause, however
    /// many ops and however often they are tried.
    pub fn failed<'a>(
        &mut self,
        ops: impl IntoIterator<Item = (Option<&'a ObjectName>, &'a Op, &'a Failure)>,
        now: Instant,
    ) {
        let mut causes: BTreeMap<_, (_, _, usize)> = BTreeMap::new();
        for (service, op, failure) in ops {
            let key = (service, cause_of(&failure.text));
            causes.entry(key).or_insert((op, failure, 0)).2 += 1;
        }
        for ((name, cause), (op, failure, count)) in causes {
            let service = name.map(ToString::to_string);
            let known_as = service.as_deref().unwrap_or_default();
            let (say, since) = self.note(Topic::Failed, known_as, &cause, (), now);
            self.applied.news |= say != Say::Nothing;
            say!(say, warn, service, %op, error = %failure, count, "failed; will be tried again");
            if now.saturating_duration_since(since) >= FAILS_LONG {
                let finding = Finding::failed(name, op.to_string(), &failure.text);
                self.find(say, Finding { cause, ..finding });
            }
        }
    }

    /// There is nothing to do now, and these Services (`None`: what all rest on) still wait for ops that
    /// fail: the others no longer do.
    pub fn still_fail<'a>(
        &mut self,
        services: impl Iterator<Item = Option<&'a ObjectName>>,
        now: Instant,
    ) {
        let from = (Topic::Failed, String::new());
        let known = self.known.range(from..);
        let known = known.take_while(|((topic, _), _)| *topic == Topic::Failed);
        let standing = known.filter(|(_, causes)| causes.values().any(|known| !known.over));
        let mut over: BTreeSet<String> = standing.map(|((_, name), _)| name.clone()).collect();
        if over.is_empty() {
            return;
        }
        for service in services.collect::<BTreeSet<_>>() {
            over.remove(&service.map(ToString::to_string).unwrap_or_default());
        }
        for name in over {
            let Some((since, failures)) = self.end(Topic::Failed, &name, now) else {
                continue;
            };
            let service = (!name.is_empty()).then_some(name);
            let after_s = now.saturating_duration_since(since).as_secs();
            say!(
                self.line(Topic::Recovered, now),
                info,
                service,
                failures,
                after_s,
                "no longer fails"
            );
        }
    }

    /// Notes that nothing stands of an object. If there is a line due about it: since when, and how often
    /// it was so.
    fn end(&mut self, topic: Topic, object: &str, now: Instant) -> Option<(Instant, u64)> {
        let causes = self.known.get_mut(&(topic, object.to_owned()))?;
        let standing = causes.values_mut().filter(|known| !known.over);
        let mut ended = None;
        for known in standing {
            known.over = true;
            known.seen = now;
            if !std::mem::replace(&mut known.ends_told, true) {
                let (since, times) = ended.unwrap_or((known.since, 0));
                ended = Some((known.since.min(since), times + known.times));
            }
        }
        ended
    }

    /// Ops were given to the kernel: a line, or a part of the next one.
    pub fn applied(&mut self, ops: usize, failed: usize, took: Duration, now: Instant) {
        let applied = &mut self.applied;
        let news = std::mem::take(&mut applied.news);
        if ops == 0 && !news {
            debug!(ops, failed, "tried again");
            return;
        }
        applied.ops += ops;
        applied.failed += failed;
        applied.took += took;
        applied.passes += 1;
        self.flush_applied(false, now);
    }

    /// Writes the line about what was applied, when it is time for one, or `at_once`.
    pub fn flush_applied(&mut self, at_once: bool, now: Instant) {
        let applied = &mut self.applied;
        if applied.passes == 0 || !at_once && applied.due().is_some_and(|due| due > now) {
            return;
        }
        let (ops, failed, took_ms) = (applied.ops, applied.failed, applied.took.as_millis());
        let passes = (applied.passes > 1).then_some(applied.passes);
        info!(ops, failed, took_ms, passes, "applied");
        *applied = Applied {
            last: Some(now),
            ..Applied::default()
        };
    }
}

/// What refusals call the object that changed. There is one Node.
fn object(change: &Change) -> Option<String> {
    match change {
        Change::Service(name, _) => Some(format!("Service {name}")),
        Change::Slice(name, _) => Some(format!("EndpointSlice {name}")),
        Change::Node(_) | Change::PodCidrs(_) => Some("Node".to_owned()),
        Change::NodeAddresses(_) | Change::Needed(..) | Change::Listeners(_) => None,
    }
}

/// `endpoints[3].addresses[0]` as `endpoints[].addresses[]`: the place changes with each endpoint before.
fn without_indexes(field: &str) -> String {
    field.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// What a failure says, without the address or name that it is about: words that hold a number.
fn cause_of(text: &str) -> String {
    let number = |word: &&str| !word.contains("::") && !word.contains(|c: char| c.is_ascii_digit());
    let words: Vec<&str> = text.split_whitespace().filter(number).collect();
    words.join(" ")
}
