//! `run`: the loop between what comes in and the kernel.
//!
//! One thread owns the planner and every socket to the kernel: the kernel does its work inside
//! the system call, so there is nothing to wait for elsewhere. While it works, news pile up in
//! the channel, and the next round sees their sum.
//!
//! The audit reads the kernel in parts, and takes news in between two of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::op::{Dataplane, Op, Outcome, ReadError, Reading};
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, State};
use ipvs_proxy_dataplane::addresses::AddressNotice;
use ipvs_proxy_dataplane::sysctl;
use ipvs_proxy_dataplane::timeouts::Timeouts;
use tokio::sync::mpsc;
use tracing::{debug, error, info, warn};

use crate::api::{ApiEvent, Kind, News};
use crate::cli::Drift;
use crate::drains::Drains;
use crate::events::{Finding, Reason};
use crate::findings::{self, NO_POD_CIDRS};
use crate::hurry::Hurry;
use crate::manifests::{Problem, Source};
use crate::metrics::families_of;
use crate::serve::Status;
use crate::surroundings::Surroundings;

/// What wakes the loop.
#[derive(Debug)]
pub enum Event {
    /// The manifests may have changed.
    Manifests,
    /// The API server said something, or can't be followed.
    Api(ApiEvent),
    /// Addresses of the node changed.
    Addresses(Vec<AddressNotice>),
    /// Somebody else changed iptables rules.
    Rules,
    /// The configuration's file, as it is now, can't be used, and why; or it can again.
    Configuration(Option<String>),
    /// It is time to stop; the kernel's state stays.
    Stop,
}

/// Where objects come from.
#[derive(Debug)]
pub enum Objects {
    /// Manifests, read by the loop itself.
    Manifests(Box<Source>),
    /// The API server, followed by a thread of its own: what of it was listed.
    Api(BTreeSet<Kind>),
}

impl Objects {
    /// Whether all objects are known, so that what none of them needs may go.
    fn is_complete(&self) -> bool {
        match self {
            Objects::Manifests(source) => source.is_complete(),
            Objects::Api(listed) => {
                listed.contains(&Kind::Services) && listed.contains(&Kind::EndpointSlices)
            }
        }
    }
}

/// How long to wait before the kernel is read again, when the last reading was not enough.
const READ_AGAIN: Duration = Duration::from_secs(1);
/// How long the first rules wait for the Node whose podCIDRs they are to name, so that a restart does not
/// write them twice.
const NODE_WAIT: Duration = Duration::from_secs(30);
/// How long an op fails until there is an Event.
const FAILS_LONG: Duration = Duration::from_secs(60);

/// What the loop is told besides objects.
#[derive(Debug)]
pub struct Settings {
    /// The node's addresses come from the kernel's links.
    pub follow_addresses: bool,
    /// Set when it is time to stop, also in the middle of much work.
    pub stop: Arc<AtomicBool>,
    /// How often the kernel is compared with what it should hold.
    pub sync_period: Duration,
    /// Whether the sysctls of strict ARP are kept, too.
    pub strict_arp: bool,
    /// The timeouts of IPVS that are kept, too.
    pub timeouts: Timeouts,
    /// What to do with what somebody else changed.
    pub drift: Drift,
    /// Where deadlines of drains are kept.
    pub drains: Option<Drains>,
    /// What is told of the loop over HTTP.
    pub status: Arc<Status>,
    /// What no Service takes.
    pub surroundings: Surroundings,
    /// Where Events go; `None` without an API server.
    pub findings: Option<mpsc::Sender<Finding>>,
}

impl Settings {
    /// Hands a finding over. When too many wait, it is left.
    fn find(&self, finding: impl FnOnce() -> Finding) {
        if let Some(findings) = &self.findings
            && findings.try_send(finding()).is_err()
        {
            let left = [("result", "left")];
            self.status.metrics.events.get_or_create(&left).inc();
        }
    }
}

/// The state of the loop.
#[derive(Debug)]
pub struct Controller<D> {
    objects: Objects,
    planner: Planner,
    kernel: D,
    settings: Settings,
    /// The kernel was read once: nothing is written before.
    adopted: bool,
    /// All was written once, as far as the kernel took it.
    in_force: bool,
    /// Every source had listed when the kernel was read last, the node's addresses being one.
    pruned: bool,
    /// The kernel must be read, but not before this.
    read_at: Option<Instant>,
    /// Why it could not be read the last time, as told.
    read_error: Option<ReadError>,
    /// When it was read last as a whole.
    last_read: Option<Instant>,
    /// When the next audit begins.
    audit_at: Instant,
    audit: Option<Reading>,
    /// An audit although its time has not come: rules changed.
    hurry: Hurry,
    /// What the last audit found and left alone.
    reported: BTreeSet<findings::Finding>,
    /// The sysctls that are not as they must be and can't be set, as told.
    sysctls: BTreeSet<String>,
    /// The number of the drains as the file has them.
    drains_written: u64,
}

impl<D: Dataplane> Controller<D> {
    /// A loop that has read nothing yet.
    pub fn new(
        objects: Objects,
        mut planner: Planner,
        kernel: D,
        settings: Settings,
    ) -> Controller<D> {
        let now = Instant::now();
        if settings.follow_addresses {
            planner.await_node_addresses();
        }
        Controller {
            planner,
            kernel,
            adopted: false,
            in_force: false,
            pruned: false,
            // The API server's objects come later.
            read_at: matches!(objects, Objects::Manifests(_)).then_some(now),
            read_error: None,
            last_read: None,
            audit_at: now + settings.sync_period,
            audit: None,
            hurry: Hurry::default(),
            reported: BTreeSet::new(),
            sysctls: BTreeSet::new(),
            drains_written: 0,
            objects,
            settings,
        }
    }

    /// Runs until [`Event::Stop`] or until nobody can send events any more.
    pub fn run(mut self, events: &Receiver<Event>) {
        self.settings.status.works();
        if self.planner.awaits_pod_cidrs() {
            self.settings.status.pod_cidrs(false);
        }
        let started = || Finding::of_node(Reason::Starting, "ipvs-proxy started".to_owned());
        self.settings.find(started);
        self.set_sysctls();
        match self
            .settings
            .drains
            .as_ref()
            .map(|drains| drains.read(Instant::now()))
            .transpose()
        {
            Ok(None) => {}
            Ok(Some(deadlines)) => self.planner.remember_drains(deadlines),
            Err(error) => warn!(%error, "deadlines of drains could not be read; they begin anew"),
        }
        self.list_addresses();
        self.rescan();
        self.look_around();
        loop {
            self.work();
            self.keep_drains();
            let wait = self.wait(Instant::now());
            self.settings.status.waits();
            let event = events.recv_timeout(wait);
            self.settings.status.works();
            match event {
                Ok(Event::Manifests) => self.rescan(),
                Ok(Event::Api(event)) => self.note_api(event),
                Ok(Event::Addresses(notices)) => self.note_addresses(&notices),
                Ok(Event::Rules) => self.hurry.note(Instant::now()),
                Ok(Event::Configuration(fault)) => self.note_configuration(fault),
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => self.audit_some(),
            }
        }
        info!("stopped; what the kernel holds stays in force");
    }

    /// Looks at what no Service takes.
    fn look_around(&mut self) {
        let changes = self.settings.surroundings.look(Instant::now());
        changes.into_iter().for_each(|c| self.planner.apply(c));
        self.free_needed();
    }

    /// As long as the objects are not known, takes back what keeps the node from hearing of them.
    fn free_needed(&mut self) {
        if !self.objects.is_complete() {
            let base = self.planner.base();
            self.settings.surroundings.free(&mut self.kernel, base);
        }
    }

    /// How long there is nothing to do without news.
    fn wait(&self, now: Instant) -> Duration {
        if self.audit.is_some() {
            return Duration::ZERO;
        }
        let deadlines = self.planner.next_deadline().into_iter().chain(self.read_at);
        // No audit begins before the kernel was read.
        let audit = self.hurry.at().into_iter().chain([self.audit_at]);
        let next = deadlines
            .chain(audit.filter(|_| self.adopted && self.read_at.is_none()))
            .min();
        next.map_or(Duration::MAX, |at| at.saturating_duration_since(now))
    }

    fn rescan(&mut self) {
        let Objects::Manifests(source) = &mut self.objects else {
            return;
        };
        let (changes, problems) = source.rescan();
        self.settings.status.manifests(source.faults());
        for problem in problems {
            match problem {
                Problem::BadFile { .. } | Problem::Unreachable { .. } => error!("{problem}"),
                Problem::Refused { .. } | Problem::Twice { .. } => warn!("{problem}"),
                Problem::Mended { .. } => info!("{problem}"),
            }
        }
        self.settings.status.queued(&changes, Vec::new(), true);
        self.apply(changes);
        self.read_to_prune();
    }

    /// Takes in what the objects say.
    fn apply(&mut self, changes: Vec<Change>) {
        let told = self.planner.pod_cidrs().to_vec();
        for change in changes {
            self.settings.surroundings.note(&change);
            // Addresses that a flag names are the last word.
            let of_flag = !self.settings.follow_addresses && matches!(change, Change::Node(_));
            if !of_flag {
                self.planner.apply(change);
            }
        }
        let pod_cidrs = self.planner.pod_cidrs();
        if pod_cidrs != told {
            info!(?pod_cidrs, "pods are told by the Node's podCIDRs");
            self.settings.status.pod_cidrs(true);
        }
    }

    /// Whether what nobody claims may go: all that could claim it has been listed.
    fn may_prune(&self) -> bool {
        self.objects.is_complete() && !self.planner.awaits_node_addresses()
    }

    fn read_to_prune(&mut self) {
        if !self.pruned && self.may_prune() {
            self.read_at = Some(Instant::now());
        }
    }

    fn note_configuration(&self, fault: Option<String>) {
        if let Some(why) = &fault {
            let note = format!(
                "{why}; what was said at start stays in force, but the next start will fail"
            );
            self.settings
                .find(|| Finding::of_node(Reason::UnusableConfiguration, note));
        }
        self.settings.status.config(fault);
    }

    fn note_api(&mut self, event: ApiEvent) {
        match event {
            ApiEvent::News(news) => self.note_news(news),
            ApiEvent::Failed(kind, error) => {
                self.free_needed();
                let resource = kind.resource();
                let before = self.settings.status.followed(kind, Err(&error));
                // The same again each half minute would hide all else.
                if before.is_none_or(|(_, told)| told != error) {
                    error!(resource, %error, "the API server can't be followed; what the kernel holds stays");
                }
            }
            ApiEvent::Followed(kind) => {
                let resource = kind.resource();
                if let Some((since, _)) = self.settings.status.followed(kind, Ok(())) {
                    let after_s = since.at.elapsed().as_secs();
                    info!(resource, after_s, "the API server is followed again");
                }
            }
        }
    }

    fn note_news(&mut self, news: News) {
        for refusal in news.refusals {
            warn!("{refusal}");
            self.settings.find(|| Finding::from(&refusal));
        }
        if let Some((kind, objects)) = news.unread {
            let resource = kind.resource();
            if objects.is_empty() {
                info!(resource, "all objects can be read again");
            }
            self.settings.status.unread(kind, objects);
        }
        if let Some(facts) = &news.node
            && self.settings.status.node(facts)
        {
            match facts.ineligible {
                Some(why) => warn!("{why}: load balancers are told to send nothing new here"),
                None => info!("the Node may get new connections again"),
            }
        }
        let complete = self.objects.is_complete();
        let status = &self.settings.status;
        status.queued(&news.changes, news.triggers, complete);
        let needed = news.changes.iter().any(|c| matches!(c, Change::Needed(..)));
        self.apply(news.changes);
        if needed {
            self.free_needed();
        }
        if let (Objects::Api(listed), Some(kind)) = (&mut self.objects, news.listed) {
            let first = listed.insert(kind);
            let awaits_node = self.planner.awaits_pod_cidrs() && !listed.contains(&Kind::Node);
            self.settings.status.listed(kind);
            if first && kind != Kind::Node && self.objects.is_complete() {
                info!("Services and EndpointSlices are listed");
                self.settings.status.complete();
                let wait = if awaits_node {
                    NODE_WAIT
                } else {
                    Duration::ZERO
                };
                self.read_at = Some(Instant::now() + wait);
            } else if first && self.objects.is_complete() && !self.adopted {
                self.read_at = Some(Instant::now());
            }
        }
    }

    /// Lists the node's addresses where they are followed. None at all is a listing that failed.
    fn list_addresses(&mut self) {
        if !self.settings.follow_addresses {
            return;
        }
        match self.kernel.node_addresses() {
            Ok(addresses) => {
                let awaited = self.planner.awaits_node_addresses();
                self.planner.apply(Change::NodeAddresses(addresses));
                if awaited && self.adopted {
                    self.read_to_prune();
                }
            }
            Err(error) => {
                error!(%error, "the node's addresses could not be listed; node ports stay");
                self.audit_at = self.audit_at.min(Instant::now() + READ_AGAIN);
            }
        }
    }

    /// Looks at changed addresses: the node's own, and those on our link that we did not change.
    fn note_addresses(&mut self, notices: &[AddressNotice]) {
        let mut list = false;
        for notice in notices {
            let (address, added) = match notice {
                AddressNotice::Added(address) => (*address, true),
                AddressNotice::Removed(address) => (*address, false),
                AddressNotice::Node => {
                    list = true;
                    continue;
                }
                AddressNotice::Unknown => {
                    list = true;
                    self.audit_at = Instant::now();
                    continue;
                }
            };
            // A change of our own is known already.
            if self.planner.holds(&Key::Address(address)) != added {
                self.audit_at = self
                    .audit_at
                    .min(Instant::now() + Duration::from_millis(100));
            }
        }
        if list {
            self.list_addresses();
        }
    }

    /// Works until there is nothing to do now.
    fn work(&mut self) {
        if matches!(self.objects, Objects::Api(_)) && !self.objects.is_complete() {
            return;
        }
        let started = Instant::now();
        let (mut done, mut refused) = (0_usize, 0_usize);
        let mut families = BTreeSet::new();
        loop {
            self.settings.status.works();
            let now = Instant::now();
            if self.planner.in_doubt() && self.read_at.is_none() {
                let again = self.last_read.map_or(now, |last| last + READ_AGAIN);
                self.read_at = Some(again.max(now));
            }
            if self.read_at.is_some_and(|at| at <= now) {
                self.read(now);
            }
            // Nothing is written before the kernel was read, nor while it is not known.
            if !self.adopted
                || self.planner.in_doubt()
                || self.settings.stop.load(Ordering::Relaxed)
            {
                break;
            }
            self.look_at_drains(now);
            for conflict in self.planner.take_conflicts() {
                warn!("{conflict}");
                self.settings.status.metrics.conflicts.inc();
                self.settings.find(|| Finding::from(&conflict));
            }
            for refused in self.planner.take_refused() {
                warn!("{refused}");
                self.settings.status.metrics.refused(refused.cause);
                self.settings.find(|| Finding::from(&refused));
            }
            for takeover in self.planner.take_takeovers() {
                info!("{takeover}");
            }
            let ops = self.planner.next(now);
            if ops.is_empty() {
                self.note_rest();
                break;
            }
            let outcomes = self.kernel.apply(&ops);
            for (op, outcome) in ops.iter().zip(&outcomes) {
                self.settings.status.metrics.op(op, outcome);
                families.extend(families_of(op));
                let service = self.planner.owner(&op.key()).map(ToString::to_string);
                match outcome {
                    Outcome::Done => {
                        done += 1;
                        debug!(service, op = %op, "applied");
                    }
                    Outcome::Failed(failure) => {
                        refused += 1;
                        warn!(service, op = %op, error = %failure, "failed; will be tried again");
                    }
                }
            }
            self.find_failing(&ops, &outcomes, now);
            self.planner.commit(ops.into_iter().zip(outcomes), now);
            self.forget_flows();
        }
        findings::tell_drains(&self.planner.take_drain_news(), Instant::now());
        if done + refused > 0 {
            let took = started.elapsed();
            self.settings.status.metrics.worked(&families, took);
            let took_ms = took.as_millis();
            info!(ops = done, failed = refused, took_ms, "applied");
        }
        let stopped = self.settings.stop.load(Ordering::Relaxed);
        if self.adopted && !stopped && !std::mem::replace(&mut self.in_force, true) {
            match refused {
                0 if matches!(&self.objects, Objects::Manifests(source) if !source.is_complete()) =>
                {
                    warn!("what could be read is in force; not all manifests could be read");
                }
                0 => info!("what the objects say is in force"),
                failed => warn!(failed, "not all of what the objects say is in force"),
            }
        }
    }

    /// Notes that there is nothing left to do now, and what fails.
    fn note_rest(&self) {
        let failing = || self.planner.failing();
        let base = failing().filter(|(key, _)| self.planner.base().contains_key(key));
        let base = base.map(|(_, since)| since).min();
        let status = &self.settings.status;
        status.rests(failing().map(|(_, since)| since), base);
        if base.is_none() && self.objects.is_complete() {
            status.ready();
        }
    }

    /// What fails for long becomes an Event.
    fn find_failing(&self, ops: &[Op], outcomes: &[Outcome], now: Instant) {
        if self.settings.findings.is_none() {
            return;
        }
        for (op, outcome) in ops.iter().zip(outcomes) {
            let Outcome::Failed(failure) = outcome else {
                continue;
            };
            let key = op.key();
            let since = self.planner.failing_since(&key);
            if since.is_some_and(|since| now.saturating_duration_since(since) >= FAILS_LONG) {
                let service = self.planner.owner(&key);
                self.settings
                    .find(|| Finding::failed(service, op.to_string(), &failure.text));
            }
        }
    }

    fn forget_flows(&mut self) {
        let stale = self.planner.take_stale_flows();
        if stale.is_empty() {
            return;
        }
        match self.kernel.forget_flows(&stale) {
            Ok(0) => {}
            Ok(flows) => info!(flows, "forgot UDP flows that lead elsewhere now"),
            Err(error) => warn!(%error, "UDP flows may go on to where they went"),
        }
    }

    /// Reads all at once and takes it in: at start, and after a doubt.
    fn read(&mut self, now: Instant) {
        self.audit = None;
        self.hurry.begun(now);
        self.last_read = Some(now);
        match self.planner.read_agreed(&mut self.kernel) {
            Ok(state) => {
                info!(items = state.len(), "read the kernel");
                self.pruned = self.may_prune();
                self.settings.status.read(Ok(()));
                self.settings.status.metrics.recount(&state);
                self.planner.resync(state, self.pruned, now);
                if !std::mem::replace(&mut self.adopted, true) && self.planner.awaits_pod_cidrs() {
                    match self.objects {
                        Objects::Manifests(_) => error!("{NO_POD_CIDRS}"),
                        Objects::Api(_) => warn!("{NO_POD_CIDRS}"),
                    }
                }
                self.read_error = None;
                self.read_at = None;
                self.audit_at = now + self.settings.sync_period;
            }
            Err(error) => {
                // The same again each second would hide all else.
                if self.read_error.as_ref() != Some(&error) {
                    error!(%error, "the kernel could not be read; will be tried again");
                    let note = format!("the kernel could not be read: {error}");
                    let finding = || Finding::of_node(Reason::FailedToReadKernel, note);
                    self.settings.find(finding);
                }
                self.settings.status.read(Err(error.to_string()));
                self.read_error = Some(error);
                self.read_at = Some(now + READ_AGAIN);
            }
        }
    }

    /// One part of an audit, when it is time for one.
    fn audit_some(&mut self) {
        let now = Instant::now();
        let due = self.audit_at <= now || self.hurry.at().is_some_and(|at| at <= now);
        if !self.adopted || self.read_at.is_some() || self.audit.is_none() && !due {
            return;
        }
        if self.audit.is_none() {
            self.hurry.begun(now);
            self.set_sysctls();
            self.list_addresses();
            self.look_around();
            self.planner.begin_reading();
        }
        let mut reading = self.audit.take().unwrap_or_default();
        match self.kernel.read_part(self.planner.base(), &mut reading) {
            Ok(false) => self.audit = Some(reading),
            Ok(true) => self.audited(&reading.state, now),
            Err(error) => {
                warn!(%error, "the audit could not read the kernel; will be tried again");
                self.audit_at = now + self.settings.sync_period;
            }
        }
    }

    /// Sets the timeouts and the sysctls that differ. What can't be set is told once, and again when it is another.
    fn set_sysctls(&mut self) {
        match self.settings.timeouts.keep() {
            Ok(None) => {}
            Ok(Some(were)) => info!(?were, "set the timeouts of IPVS"),
            Err(error) => error!(%error, "the timeouts of IPVS are not as they must be"),
        }
        let failed = sysctl::set(self.settings.strict_arp);
        let told = std::mem::take(&mut self.sysctls);
        for failure in failed {
            let finding = failure.to_string();
            if !told.contains(&finding) {
                error!(error = %failure.source, "{finding}");
                let note = || Finding::of_node(Reason::FailedToSetSysctl, finding.clone());
                self.settings.find(note);
            }
            self.sysctls.insert(finding);
        }
        self.settings.status.sysctls(&self.sysctls);
    }

    fn audited(&mut self, read: &State, now: Instant) {
        self.audit_at = now + self.settings.sync_period;
        let drift = self.planner.differing(read);
        if drift.is_empty() {
            self.reported.clear();
            return;
        }
        let again = match self.kernel.read(self.planner.base()) {
            Ok(again) => again,
            Err(error) => {
                warn!(%error, "the audit could not read the kernel; will be tried again");
                return;
            }
        };
        let drift = self.planner.differing_again(drift, &again);
        let found = findings::of_drift(&drift, &again, &self.planner, &mut self.kernel);
        findings::tell(&found, &self.reported, &self.planner);
        let metrics = &self.settings.status.metrics;
        match self.settings.drift {
            Drift::Repair => metrics.drifted(drift.len(), true),
            Drift::Report => metrics.drifted(found.difference(&self.reported).count(), false),
        }
        metrics.recount(&again);
        match self.settings.drift {
            Drift::Repair => self.planner.adopt(&drift, &again, now),
            Drift::Report => self.reported = found,
        }
    }

    fn look_at_drains(&mut self, now: Instant) {
        for server in self.planner.drains_due(now) {
            match self.kernel.connections(server) {
                Ok(connections) => self.planner.observe(server, &connections, now),
                Err(error) => {
                    warn!(%server, %error, "connections could not be read");
                    self.planner.look_later(server, now);
                }
            }
        }
    }

    /// Writes the deadlines of drains when one began or ended.
    fn keep_drains(&mut self) {
        let (number, drains) = self.planner.drains();
        if number == self.drains_written {
            return;
        }
        let drains: Vec<_> = drains.collect();
        let draining = i64::try_from(drains.len()).unwrap_or(i64::MAX);
        self.settings.status.metrics.drains.set(draining);
        let deadlines = drains
            .into_iter()
            .filter_map(|(vs, rs, until)| Some((vs, rs, until?)));
        let written = self
            .settings
            .drains
            .as_ref()
            .map(|d| d.write(deadlines, Instant::now()));
        if let Some(Err(error)) = written {
            warn!(%error, "deadlines of drains could not be kept; a restart begins them anew");
        }
        self.drains_written = number;
    }
}
