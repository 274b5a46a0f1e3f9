//! `run`: the loop between what comes in and the kernel.
//!
//! One thread owns the planner and every socket to the kernel: the kernel does its work inside
//! the system call, so there is nothing to wait for elsewhere. It works in turns: a turn is one round of ops, which is
//! bounded, or one part of an audit, and between two turns all news is taken in.
//!
//! What may take long, the tools of iptables, runs elsewhere and wakes the loop when it has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::op::{Dataplane, Op, Outcome, ReadError};
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::Key;
use ipvs_proxy_dataplane::addresses::AddressNotice;
use ipvs_proxy_dataplane::sysctl;
use ipvs_proxy_dataplane::timeouts::Timeouts;
use ipvs_proxy_netlink::{Causes, Family};
use tokio::sync::mpsc;
use tracing::{debug, error, info, warn};

use crate::api::{ApiEvent, Kind, News, Unread};
use crate::cli::Drift;
use crate::drains::{Deadline, Drains};
use crate::events::{Finding, Reason};
use crate::findings::{self, NO_POD_CIDRS};
use crate::glances::Glances;
use crate::hurry::Hurry;
use crate::manifests;
use crate::metrics::families_of;
use crate::report::{Reports, Topic, say};
use crate::serve::ports::HealthPorts;
use crate::serve::{Status, unusable};
use crate::surroundings::Surroundings;

mod audit;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests;

use audit::{Audit, GLANCE};

/// What wakes the loop.
#[derive(Debug)]
pub enum Event {
    /// The manifests say something new.
    Manifests(manifests::News),
    /// The API server said something, or can't be followed.
    Api(ApiEvent),
    /// Addresses of the node changed.
    Addresses(Vec<AddressNotice>),
    /// Somebody else changed iptables rules.
    Rules,
    /// Something that the kernel was asked for has ended.
    Kernel,
    /// The configuration's file, as it is now, can't be used, and why; or it can again.
    Configuration(Option<String>),
    /// It is time to stop; the kernel's state stays.
    Stop,
}

/// Where objects come from.
#[derive(Debug)]
pub enum Objects {
    /// Manifests, read by a thread of its own: whether all could be read, once they were looked at.
    Manifests(Option<bool>),
    /// The API server, followed by a thread of its own: what of it was listed.
    Api(BTreeSet<Kind>),
}

impl Objects {
    /// Whether all objects are known, so that what none of them needs may go.
    fn is_complete(&self) -> bool {
        match self {
            Objects::Manifests(complete) => *complete == Some(true),
            Objects::Api(listed) => {
                listed.contains(&Kind::Services) && listed.contains(&Kind::EndpointSlices)
            }
        }
    }

    /// Whether they were heard of. Nothing is written before.
    fn were_told(&self) -> bool {
        matches!(self, Objects::Manifests(Some(_))) || self.is_complete()
    }
}

/// How long to wait before the kernel is read again, when the last reading was not enough.
const READ_AGAIN: Duration = Duration::from_secs(1);
/// How long the first rules wait for the Node whose podCIDRs they are to name, so that a restart does not
/// write them twice.
const NODE_WAIT: Duration = Duration::from_secs(30);
/// The most events that are taken in between two turns.
const NEWS: usize = 64;
/// While there is always more to do, each turn of so many is the audit's.
const AUDIT_SHARE: u32 = 16;
/// How long a line of the log sums up what was applied, at most.
const SUM: Duration = Duration::from_secs(1);

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
    /// Sets the sysctls that differ; those that could not be set ([`sysctl::set`]).
    pub set_sysctls: fn(strict_arp: bool) -> Vec<sysctl::SysctlError>,
    /// The sysctls of connection tracking, to be set once.
    pub conntrack: sysctl::Once,
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
    /// Who listens on health check node ports; without it nobody does.
    pub health_ports: Option<Arc<HealthPorts>>,
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
pub struct Controller<D, C> {
    objects: Objects,
    planner: Planner,
    kernel: D,
    settings: Settings,
    clock: C,
    /// The kernel was read once: nothing is written before.
    adopted: bool,
    /// All was written once, as far as the kernel took it.
    in_force: bool,
    /// Kinds of which there are objects that could never be read.
    unread: BTreeSet<Kind>,
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
    audit: Option<Audit>,
    /// When the next glance at the kernel is due.
    glance_at: Instant,
    glances: Glances,
    /// What was applied since the log told of it.
    applied: Applied,
    turns: u32,
    /// What was found in this turn is to be put right in the next.
    again: bool,
    /// Rules that could not be read, as told.
    unread_rules: BTreeMap<Key, ReadError>,
    /// Why the op failed last that has failed for longest of those that all Services rest on.
    node_failure: Option<(Key, String)>,
    /// How many times, and when last, rules had to be moved before those of others.
    moves: BTreeMap<Key, (u32, Instant)>,
    /// An audit although its time has not come: rules changed.
    hurry: Hurry,
    /// What the last audit found and left alone.
    reported: BTreeSet<findings::Finding>,
    /// The sysctls that are not as they must be and can't be set, as told.
    sysctls: BTreeSet<String>,
    /// What the log says of objects.
    reports: Reports,
}

/// What was applied.
#[derive(Debug, Default)]
struct Applied {
    since: Option<Instant>,
    done: usize,
    failed: usize,
    families: BTreeSet<Family>,
}

impl<D: Dataplane, C: Fn() -> Instant> Controller<D, C> {
    /// A loop that has read nothing yet. `clock` tells what time it is.
    pub fn new(
        objects: Objects,
        mut planner: Planner,
        kernel: D,
        settings: Settings,
        clock: C,
    ) -> Controller<D, C> {
        let now = clock();
        if settings.follow_addresses {
            planner.await_node_addresses();
        }
        if settings.health_ports.is_some() {
            planner.await_health_ports();
        }
        Controller {
            planner,
            kernel,
            adopted: false,
            in_force: false,
            unread: BTreeSet::new(),
            pruned: false,
            // Objects come later.
            read_at: None,
            read_error: None,
            last_read: None,
            audit_at: now + settings.sync_period,
            audit: None,
            glance_at: now + GLANCE,
            glances: Glances::default(),
            applied: Applied::default(),
            turns: 0,
            again: false,
            unread_rules: BTreeMap::new(),
            node_failure: None,
            moves: BTreeMap::new(),
            clock,
            hurry: Hurry::default(),
            reported: BTreeSet::new(),
            sysctls: BTreeSet::new(),
            reports: Reports::new(settings.status.metrics.lines.clone(), now),
            objects,
            settings,
        }
    }

    /// Runs until [`Event::Stop`] or until nobody can send events any more.
    pub fn run(mut self, events: &Receiver<Event>) {
        self.settings.status.works();
        self.start();
        let mut more = true;
        loop {
            let mut event = if more {
                events.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                })
            } else {
                let wait = self.wait();
                self.settings.status.waits();
                events.recv_timeout(wait)
            };
            self.settings.status.works();
            // All news that there is, so that what follows sees its sum.
            for _ in 0..NEWS {
                match event {
                    Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => {
                        if let Some(file) = self.settings.drains.take() {
                            let (number, drains) = self.planner.drains();
                            file.finish(number, || drains.filter_map(with_deadline).collect());
                        }
                        info!("stopped; what the kernel holds stays in force");
                        return;
                    }
                    Ok(event) => self.note(event),
                    Err(RecvTimeoutError::Timeout) => break,
                }
                event = events.try_recv().map_err(|_| RecvTimeoutError::Timeout);
            }
            more = self.turn();
        }
    }

    /// What comes before the first turn.
    fn start(&mut self) {
        if self.planner.awaits_pod_cidrs() {
            self.settings.status.pod_cidrs(false);
        }
        let started = || Finding::of_node(Reason::Starting, "ipvs-proxy started".to_owned());
        self.settings.find(started);
        self.set_sysctls();
        match self.settings.drains.as_ref().map(Drains::read).transpose() {
            Ok(None) => {}
            Ok(Some(deadlines)) => self.planner.remember_drains(deadlines),
            Err(error) => {
                warn!(error = %Causes(&error), "deadlines of drains could not be read; they begin anew")
            }
        }
        self.list_addresses();
        self.look_around();
    }

    fn now(&self) -> Instant {
        (self.clock)()
    }

    /// Takes in one event.
    fn note(&mut self, event: Event) {
        match event {
            Event::Manifests(news) => self.note_manifests(news),
            Event::Api(event) => self.note_api(event),
            Event::Addresses(notices) => self.note_addresses(&notices),
            Event::Rules => self.hurry.note(self.now()),
            Event::Configuration(fault) => self.note_configuration(fault),
            // The next turn asks what it is.
            Event::Kernel | Event::Stop => {}
        }
    }

    /// Works for a bounded time; whether there is more to do at once.
    fn turn(&mut self) -> bool {
        let more = self.work();
        for finding in self.reports.flush(self.now()) {
            self.settings.find(|| finding);
        }
        self.keep_drains();
        self.turns = self.turns.wrapping_add(1);
        if !more || self.turns.is_multiple_of(AUDIT_SHARE) {
            self.audit_some();
        }
        if !more {
            self.glance();
        }
        more || self.audit.is_some() || std::mem::take(&mut self.again)
    }

    /// Looks at what no Service takes.
    fn look_around(&mut self) {
        let changes = self.settings.surroundings.look(self.now());
        changes.into_iter().for_each(|c| self.planner.apply(c));
        self.free_needed();
    }

    /// As long as the objects are not known, takes back what keeps the node from hearing of them.
    fn free_needed(&mut self) {
        if !self.objects.is_complete() {
            self.settings.surroundings.free(&mut self.kernel);
        }
    }

    /// How long there is nothing to do without news.
    fn wait(&self) -> Duration {
        let now = self.now();
        let working = self.adopted && !self.planner.in_doubt();
        let audits = [self.audit_at, self.glance_at].into_iter();
        let audits = audits
            .chain(self.hurry.at())
            .chain(self.planner.next_deadline())
            .chain(self.reports.next_at())
            .chain(self.settings.drains.as_ref().and_then(Drains::due));
        let next = audits.filter(|_| working && self.read_at.is_none());
        let next = next.chain(self.read_at).min();
        next.map_or(Duration::MAX, |at| at.saturating_duration_since(now))
    }

    fn note_manifests(&mut self, news: manifests::News) {
        let told = self.objects.were_told();
        self.objects = Objects::Manifests(Some(news.complete));
        self.settings.status.manifests(news.faults);
        self.reports
            .problems(&news.changes, news.problems, self.now());
        self.settings.status.queued(&news.changes, Vec::new(), true);
        self.apply(news.changes);
        if !told {
            self.read_at = Some(self.now());
        }
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

    /// Whether what nobody claims may go: all that could claim it has been listed and read.
    fn may_prune(&self) -> bool {
        self.objects.is_complete()
            && self.unread.is_empty()
            && !self.planner.awaits_node_addresses()
    }

    fn read_to_prune(&mut self) {
        if !self.pruned && self.may_prune() {
            self.read_at = Some(self.now());
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
        let refusals = news.refusals.into_iter().map(|refusal| (None, refusal));
        self.reports.refused(&news.changes, refusals, self.now());
        if let Some(unread) = news.unread {
            self.note_unread(unread);
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
                self.read_at = Some(self.now() + wait);
            } else if first && self.objects.is_complete() && !self.adopted {
                self.read_at = Some(self.now());
            }
        }
    }

    fn note_unread(&mut self, unread: Unread) {
        let Unread { kind, objects, .. } = unread;
        let resource = kind.resource();
        if objects.is_empty() {
            info!(resource, "all objects can be read again");
        }
        let changed = match unread.never_read {
            true => self.unread.insert(kind),
            false => self.unread.remove(&kind),
        };
        if changed && unread.never_read && !self.pruned {
            warn!(
                resource,
                "what nobody claims stays in the kernel until all objects can be read"
            );
        } else if changed && self.adopted {
            self.read_to_prune();
        }
        self.settings.status.unread(kind, unusable(objects.iter()));
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
                self.audit_at = self.audit_at.min(self.now() + READ_AGAIN);
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
                    self.audit_at = self.now();
                    continue;
                }
            };
            // A change of our own is known already.
            if self.planner.holds(&Key::Address(address)) != added {
                self.audit_at = self.audit_at.min(self.now() + Duration::from_millis(100));
            }
        }
        if list {
            self.list_addresses();
        }
    }

    /// Gives one round to the kernel; whether there is more to do now.
    fn work(&mut self) -> bool {
        if !self.objects.were_told() {
            return false;
        }
        let now = self.now();
        if self.planner.in_doubt() && self.read_at.is_none() {
            let again = self.last_read.map_or(now, |last| last + READ_AGAIN);
            self.read_at = Some(again.max(now));
        }
        if self.read_at.is_some_and(|at| at <= now) {
            self.read(now);
        }
        // Nothing is written before the kernel was read, nor while it is not known.
        if !self.adopted || self.planner.in_doubt() || self.settings.stop.load(Ordering::Relaxed) {
            return false;
        }
        self.note_health_ports(now);
        let step = self.planner.step(&mut self.kernel, &self.clock);
        self.answer_health_checks(now);
        let conflicts = self.planner.take_conflicts();
        let number = u64::try_from(conflicts.len()).unwrap_or(u64::MAX);
        self.settings.status.metrics.conflicts.inc_by(number);
        self.reports.conflicts(conflicts, now);
        self.reports.takeovers(self.planner.take_takeovers(), now);
        for refused in self.planner.take_refused() {
            self.settings.status.metrics.refused(refused.cause);
            self.reports.not_served(&refused, now);
            self.settings.find(|| Finding::from(&refused));
        }
        for (server, error) in &step.unseen {
            let say = self.reports.about(Topic::Drain, "", &error.0, now);
            say!(say, warn, %server, %error, "connections could not be read");
        }
        self.note_ops(&step.ops, now);
        self.note_rules(&step);
        let drains = self.planner.take_drain_news();
        findings::tell_drains(&drains, &mut self.reports, now);
        if step.rests {
            self.note_rest();
        }
        if step.rests
            || self
                .applied
                .since
                .is_some_and(|since| since + SUM <= self.now())
        {
            self.tell_applied();
        }
        let rests = step.rests && !self.planner.has_started();
        if rests && !std::mem::replace(&mut self.in_force, true) {
            self.reports.flush_applied(true, now);
            self.tell_in_force();
        }
        !step.rests
    }

    /// Takes in which health check node ports are listened on.
    fn note_health_ports(&mut self, now: Instant) {
        let ports = self.settings.health_ports.as_ref();
        for (port, listening) in ports
            .map(|ports| ports.take_listening())
            .unwrap_or_default()
        {
            self.planner.note_health_port(port, listening.families);
            if let Some(service) = self.planner.health_port(port) {
                let error = listening.error.as_deref();
                self.reports.health_port(service, port, error, now);
            }
        }
    }

    /// Says what is to be answered on health check node ports, now that the kernel has it.
    fn answer_health_checks(&mut self, now: Instant) {
        let news = self.planner.take_health_ports();
        for (port, _) in news.iter().filter(|(_, answer)| answer.is_none()) {
            self.reports.health_port_over(*port, now);
        }
        if let Some(ports) = &self.settings.health_ports
            && !news.is_empty()
        {
            ports.answer(news);
        }
    }

    fn note_ops(&mut self, ops: &[(Op, Outcome)], started: Instant) {
        let now = self.now();
        for (op, outcome) in ops {
            self.applied.since.get_or_insert(started);
            self.settings.status.metrics.op(op, outcome);
            self.applied.families.extend(families_of(op));
            match outcome {
                Outcome::Done => {
                    self.applied.done += 1;
                    if self.settings.drift == Drift::Repair {
                        self.glances.repaired();
                    }
                }
                Outcome::Started => {}
                Outcome::Failed(_) => self.applied.failed += 1,
            }
            debug!(%op, ?outcome, "given to the kernel");
        }
        if let Some((key, _)) = self.planner.node_failing() {
            let of_key = ops.iter().rfind(|(op, _)| op.key() == *key);
            if let Some((_, Outcome::Failed(failure))) = of_key {
                self.node_failure = Some((*key, failure.text.clone()));
            }
        }
        let failed = ops.iter().filter_map(|(op, outcome)| match outcome {
            Outcome::Done | Outcome::Started => None,
            Outcome::Failed(failure) => Some((self.planner.owner(&op.key()), op, failure)),
        });
        self.reports.failed(failed, now);
    }

    /// What can't be read or written of a key that all Services rest on, and why.
    fn why_failing(&self, key: &Key) -> String {
        let unread = self.unread_rules.get(key).map(ToString::to_string);
        let failed = self.node_failure.as_ref().filter(|(of, _)| of == key);
        match unread.or_else(|| failed.map(|(_, why)| why.clone())) {
            Some(why) => format!("{key}: {why}"),
            None => format!("{key} can't be read or written"),
        }
    }

    /// Tells of what was applied since the last time.
    fn tell_applied(&mut self) {
        let applied = std::mem::take(&mut self.applied);
        if let (Some(since), true) = (applied.since, applied.done + applied.failed > 0) {
            let took = self.now().saturating_duration_since(since);
            self.settings.status.metrics.worked(&applied.families, took);
            let now = self.now();
            self.reports
                .applied(applied.done, applied.failed, took, now);
        }
    }

    /// Tells that a start is over.
    fn tell_in_force(&self) {
        match self.planner.failing().count() {
            0 if !self.objects.is_complete() => {
                warn!("what could be read is in force; not all manifests could be read");
            }
            0 => info!("what the objects say is in force"),
            failed => warn!(failed, "not all of what the objects say is in force"),
        }
        self.look_at_ports();
    }

    /// Notes that there is nothing left to do now, and what fails.
    fn note_rest(&mut self) {
        let failing = self.planner.failing();
        let services = failing.map(|(key, _)| self.planner.owner(key));
        self.reports.still_fail(services, self.now());
        let failing = || self.planner.failing();
        let base = self.planner.node_failing();
        let base = base.map(|(key, since)| (self.why_failing(key), since));
        let status = &self.settings.status;
        status.rests(failing().map(|(_, since)| since), base);
        if self.planner.node_failing().is_none()
            && self.objects.is_complete()
            && !self.planner.has_started()
        {
            status.ready();
        }
    }

    /// Reads all at once and takes it in: at start, and after a doubt.
    fn read(&mut self, now: Instant) {
        self.audit = None;
        self.hurry.begun(now);
        self.last_read = Some(now);
        match self.planner.read_agreed(&mut self.kernel) {
            Ok(reading) => {
                info!(items = reading.state.len(), "read the kernel");
                self.pruned = self.may_prune();
                self.settings.status.read(Ok(()));
                self.settings.status.metrics.recount(&reading.state);
                self.planner.resync(reading, self.pruned, now);
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
                self.note_read_error(error);
                self.read_at = Some(now + READ_AGAIN);
            }
        }
    }

    /// The kernel could not be read: it is told once, and health tells it until it can.
    fn note_read_error(&mut self, error: ReadError) {
        if self.read_error.as_ref() != Some(&error) {
            error!(%error, "the kernel could not be read; will be tried again");
            let note = format!("the kernel could not be read: {error}");
            let finding = || Finding::of_node(Reason::FailedToReadKernel, note);
            self.settings.find(finding);
        }
        self.settings.status.read(Err(error.to_string()));
        self.read_error = Some(error);
    }

    /// Has the deadlines of drains written when one began or ended.
    fn keep_drains(&mut self) {
        let draining = i64::try_from(self.planner.draining()).unwrap_or(i64::MAX);
        self.settings.status.metrics.drains.set(draining);
        let now = self.now();
        if let Some(file) = &mut self.settings.drains {
            let (number, drains) = self.planner.drains();
            let deadlines = || drains.filter_map(with_deadline).collect();
            file.keep(number, deadlines, now);
        }
    }
}

fn with_deadline(
    (vs, rs, until): (VirtualServerKey, RealServerKey, Option<Instant>),
) -> Option<Deadline> {
    Some((vs, rs, until?))
}
