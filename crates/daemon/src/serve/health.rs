//! What the process knows about itself, and the verdicts on it. Pure: time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::api::Kind;
use crate::findings::NO_POD_CIDRS;

/// The most objects that are named of those that can't be read.
const FEW: usize = 3;

/// A moment, on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// On the clock that never jumps.
    pub at: Instant,
    /// On the clock that people read.
    pub wall: SystemTime,
}

impl Moment {
    /// The moment of the call.
    #[must_use]
    pub fn now() -> Moment {
        Moment {
            at: Instant::now(),
            wall: SystemTime::now(),
        }
    }

    fn passed(self, now: Moment) -> Duration {
        now.at.saturating_duration_since(self.at)
    }
}

/// Which verdict is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// /healthz: what load balancers ask before they send new connections.
    Health,
    /// /livez: what kubelet asks before it starts the process again.
    Life,
    /// /readyz: whether all is in force since the start.
    Readiness,
}

/// How a kind is followed at the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Followed {
    /// When it was listed first.
    pub listed: Option<SystemTime>,
    /// Since when it can't be followed, and why.
    pub failing: Option<(Moment, String)>,
    /// The objects whose last version can't be read, as told, and when that was found.
    pub unread: Option<(String, SystemTime)>,
}

/// How long the loop may be at one thing. Where others hold the lock of iptables, it waits 10 s at a time.
pub(super) const LIFE: Duration = Duration::from_secs(30);

/// What the process knows about itself.
#[derive(Debug, Clone)]
pub struct Health {
    /// How long a change may wait.
    pub patience: Duration,
    /// When the process started.
    pub started: Moment,
    /// The last sign of life of the loop, while it has something to do.
    pub busy: Option<Moment>,
    /// The oldest change that is not in the kernel, failures of single Services aside.
    pub queued: Option<Moment>,
    /// When all was last in the kernel.
    pub applied: Option<SystemTime>,
    /// When all was in force the first time.
    pub in_force: Option<SystemTime>,
    /// The manifests that can't be read, or not all of which can be used, and since when there are some.
    pub manifests: Option<(String, SystemTime)>,
    /// Since when sets, rules or the link, on which every Service rests, can't be read or written, and why.
    pub base_failing: Option<(Moment, String)>,
    /// How many things can't be written, and since when the first of them.
    pub failing: Option<(usize, Moment)>,
    /// Since when the kernel can't be read, and why.
    pub unread: Option<(Moment, String)>,
    /// The sysctls that can't be set, and when that was found.
    pub sysctls: Option<(BTreeSet<String>, SystemTime)>,
    /// Node ports that the kernel may give to others, and since when.
    pub node_ports: Option<(String, SystemTime)>,
    /// Why UDP flows can't be forgotten that lead to where nobody is, and since when.
    pub flows: Option<(String, SystemTime)>,
    /// Why load balancers should send the node nothing new, and since when.
    pub ineligible: Option<(&'static str, SystemTime)>,
    /// Where pods are to be told by the Node's podCIDRs: whether these are known, and since when they are
    /// or are not.
    pub pod_cidrs: Option<(bool, SystemTime)>,
    /// Each kind at the API server; empty where objects come from manifests.
    pub api: BTreeMap<Kind, Followed>,
    /// When checks that had failed were well again, by their names.
    pub recovered: BTreeMap<&'static str, SystemTime>,
    /// Why the configuration's file, as it is now, can't be used, and since when.
    pub config: Option<(String, SystemTime)>,
}

/// One thing that is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    name: &'static str,
    /// What is wrong, if anything.
    fault: Option<String>,
    since: SystemTime,
    /// Whether it decides.
    counts: bool,
}

impl Health {
    /// Of a process that starts now.
    #[must_use]
    pub fn new(sync_period: Duration, started: Moment) -> Health {
        Health {
            patience: sync_period * 2,
            started,
            busy: None,
            queued: None,
            applied: None,
            in_force: None,
            manifests: None,
            base_failing: None,
            failing: None,
            unread: None,
            sysctls: None,
            node_ports: None,
            flows: None,
            ineligible: None,
            pod_cidrs: None,
            api: BTreeMap::new(),
            recovered: BTreeMap::new(),
            config: None,
        }
    }

    /// Whether the answer is yes, code 200; else it is 503.
    #[must_use]
    pub fn is(&self, question: Question, now: Moment) -> bool {
        let mut checks = self.checks(question, now).into_iter();
        checks.all(|check| !check.counts || check.fault.is_none())
    }

    /// The same whatever the Node says: kube-proxy's `healthy`.
    #[must_use]
    pub fn works(&self, question: Question, now: Moment) -> bool {
        let mut eligible = self.clone();
        eligible.ineligible = None;
        eligible.is(question, now)
    }

    /// How long the oldest change waits that is not in the kernel, those that fail included.
    #[must_use]
    pub fn oldest_unapplied(&self, now: Moment) -> Duration {
        let failing = self.failing.map(|(_, since)| since);
        let waits = self.queued.into_iter().chain(failing);
        waits
            .map(|since| since.passed(now))
            .max()
            .unwrap_or_default()
    }

    /// A check that had failed is well again.
    pub(super) fn recover(&mut self, check: &'static str) {
        self.recovered.insert(check, SystemTime::now());
    }

    /// As [`recover`](Self::recover), if what is gone had lasted longer than it may.
    pub(super) fn recover_late(
        &mut self,
        check: &'static str,
        gone: Option<Moment>,
        may: Duration,
        now: Moment,
    ) {
        if gone.is_some_and(|since| since.passed(now) > may) {
            self.recover(check);
        }
    }

    fn checks(&self, question: Question, now: Moment) -> Vec<Check> {
        let later = |since: Option<Moment>, than| since.filter(|s| s.passed(now) > than);
        let late = |since| later(since, self.patience);
        let mut checks = Vec::new();
        let mut add = |name, on: &[Question], fault: Option<(String, SystemTime)>, ok_since| {
            let (fault, since) = match fault {
                Some((fault, since)) => (Some(fault), since),
                None => (None, self.recovered.get(name).copied().unwrap_or(ok_since)),
            };
            checks.push(Check {
                name,
                fault,
                since,
                counts: on.contains(&question),
            });
        };
        let started = self.started.wall;
        let asked = [Question::Health, Question::Life, Question::Readiness];
        let stuck = later(self.busy, LIFE).map(|m| ("no sign of life".to_owned(), m.wall));
        add("loop", &asked, stuck, started);
        let waits = late(self.queued).map(|m| {
            let waits_s = m.passed(now).as_secs();
            (format!("a change waits for {waits_s} s"), m.wall)
        });
        add("programming", &asked[..1], waits, started);
        // A node that lacks these is not ready at once; it is unhealthy when that lasts.
        let health_and_readiness = [Question::Health, Question::Readiness];
        let lasts = |since: Option<Moment>| match late(since) {
            Some(_) => &health_and_readiness[..],
            None => &health_and_readiness[1..],
        };
        let since = self.base_failing.as_ref().map(|(since, _)| *since);
        let base = self
            .base_failing
            .clone()
            .map(|(since, why)| (why, since.wall));
        add("base", lasts(since), base, started);
        let ineligible = self.ineligible.map(|(why, since)| (why.to_owned(), since));
        add("node", &asked[..1], ineligible, started);
        let waiting = "not all is listed and in force yet".to_owned();
        let not_ready = self.in_force.is_none().then_some((waiting, started));
        add(
            "in-force",
            &asked[2..],
            not_ready,
            self.in_force.unwrap_or(started),
        );
        let since = self.unread.as_ref().map(|(since, _)| *since);
        let unread = self.unread.clone().map(|(moment, why)| (why, moment.wall));
        add("kernel-read", lasts(since), unread, started);
        let failing = self
            .failing
            .map(|(number, since)| (format!("{number} can't be written"), since.wall));
        add("objects", &[], failing, started);
        let sysctls = self
            .sysctls
            .clone()
            .map(|(all, since)| (all.into_iter().collect::<Vec<_>>().join("; "), since));
        add("sysctls", &[], sysctls, started);
        add("node-ports", &[], self.node_ports.clone(), started);
        add("udp-flows", &[], self.flows.clone(), started);
        if let Some((why, since)) = &self.config {
            add("config", &[], Some((why.clone(), *since)), *since);
        }
        if let Some((files, since)) = &self.manifests {
            add("manifests", &[], Some((files.clone(), *since)), *since);
        }
        if let Some((known, since)) = self.pod_cidrs {
            let fault = (!known).then(|| (NO_POD_CIDRS.to_owned(), since));
            add("pod-cidrs", &[], fault, since);
        }
        for (kind, followed) in &self.api {
            let name = check_of(*kind);
            let fault = match (&followed.failing, followed.listed, &followed.unread) {
                (Some((since, why)), ..) => Some((why.clone(), since.wall)),
                (None, None, _) => Some(("not listed yet".to_owned(), started)),
                (None, Some(_), Some((objects, since))) => Some((objects.clone(), *since)),
                (None, Some(_), None) => None,
            };
            add(name, &[], fault, followed.listed.unwrap_or(started));
        }
        checks
    }

    /// The answer of /healthz and /livez: kube-proxy's fields. Only /healthz says whether the node
    /// is eligible.
    #[must_use]
    pub fn body(&self, question: Question, now: Moment) -> Value {
        let healthy = self.works(question, now);
        let last = match healthy {
            true => now.wall,
            false => self.applied.unwrap_or(self.started.wall),
        };
        let mut body = json!({
            "lastUpdated": rfc3339(last),
            "currentTime": rfc3339(now.wall),
            "healthy": healthy,
        });
        if let (Question::Health, Some(fields)) = (question, body.as_object_mut()) {
            fields.insert("nodeEligible".to_owned(), self.ineligible.is_none().into());
        }
        body
    }

    /// All checks, one a line: `[+]` fine, `[-]` not, `[~]` not, but it does not decide.
    #[must_use]
    pub fn verbose(&self, question: Question, now: Moment) -> String {
        let mut text = String::new();
        for check in self.checks(question, now) {
            let since = rfc3339(check.since);
            text += &match (check.fault, check.counts) {
                (None, _) => format!("[+]{} ok since {since}\n", check.name),
                (Some(why), true) => format!("[-]{} failed since {since}: {why}\n", check.name),
                (Some(why), false) => format!("[~]{} failed since {since}: {why}\n", check.name),
            };
        }
        text += match self.is(question, now) {
            true => "check passed\n",
            false => "check failed\n",
        };
        text
    }
}

/// The check of how a kind is followed.
pub(super) fn check_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Services => "api-services",
        Kind::EndpointSlices => "api-endpointslices",
        Kind::Node => "api-node",
    }
}

/// How many can't be read, and a few of them; `None` for none.
pub(crate) fn unusable(all: impl ExactSizeIterator<Item = impl AsRef<str>>) -> Option<String> {
    let number = all.len();
    let few: Vec<_> = all.take(FEW).collect();
    let few: Vec<&str> = few.iter().map(AsRef::as_ref).collect();
    (number > 0).then(|| format!("{number} can't be read: {}", few.join("; ")))
}

/// A time as the API writes it, to the microsecond.
fn rfc3339(time: SystemTime) -> String {
    match Timestamp::try_from(time) {
        Ok(time) => format!("{time:.6}"),
        Err(_) => String::new(),
    }
}
