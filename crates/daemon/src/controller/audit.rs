//! What others changed: the kernel is read in parts and compared, and between two audits glanced at; rules are read elsewhere, and
//! their answers come one by one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipvs_proxy_core::op::{Dataplane, Finished, Reading};
use ipvs_proxy_core::state::{Key, State};
use ipvs_proxy_core::step::Step;
use ipvs_proxy_dataplane::ports;
use ipvs_proxy_netlink::Causes;
use tracing::{debug, error, info, warn};

use super::{Controller, READ_AGAIN};
use crate::cli::Drift;
use crate::events::{Finding, Reason};
use crate::findings;

/// How often the kernel is looked at for what others changed, as far as that costs almost nothing.
pub(super) const GLANCE: Duration = Duration::from_secs(1);
/// How many virtual servers are looked at then.
const SAMPLE: usize = 16;
/// How many times rules of others are followed by ours again, before that is only reported.
const MOVES: u32 = 3;

/// An audit on its way.
#[derive(Debug, Default)]
pub(super) struct Audit {
    reading: Reading,
    /// What differed at the first reading: this is the second.
    drift: Option<BTreeSet<Key>>,
}

impl<D: Dataplane, C: Fn() -> Instant> Controller<D, C> {
    /// Takes in what the kernel tells of rules.
    pub(super) fn note_rules(&mut self, step: &Step) {
        let now = self.now();
        for finished in &step.rules {
            match finished {
                Finished::Read(key, Ok(_)) => {
                    if self.unread_rules.remove(key).is_some() {
                        info!(%key, "rules can be read again");
                    }
                    let misplaced =
                        |other: &Finished| matches!(other, Finished::Misplaced(k, _) if k == key);
                    if !step.rules.iter().any(misplaced) {
                        self.moves.remove(key);
                    }
                    if !step.drift.contains(key) {
                        self.reported.retain(|told| !told.is_of(key));
                    }
                }
                Finished::Read(key, Err(error)) => {
                    if self.unread_rules.get(key) != Some(error) {
                        error!(%key, %error, "rules could not be read; what needs them waits");
                        let note = format!("{key} could not be read: {error}");
                        let finding = || Finding::of_node(Reason::FailedToReadKernel, note);
                        self.settings.find(finding);
                        self.unread_rules.insert(*key, error.clone());
                    }
                }
                Finished::Misplaced(key, lines) => self.note_misplaced(*key, lines, now),
                Finished::Op(..) | Finished::Tools(..) => {}
            }
        }
        if step.drift.is_empty() {
            return;
        }
        let found = findings::of_drift(&step.drift, &State::new(), &self.planner, &mut self.kernel);
        let reports = &mut self.reports;
        findings::tell(&found, &self.reported, &self.planner, reports, now);
        let metrics = &self.settings.status.metrics;
        match self.settings.drift {
            Drift::Repair => {
                metrics.drifted(step.drift.len(), true);
                self.planner.adopt(&step.drift, &State::new(), now);
                self.again = true;
            }
            Drift::Report => {
                metrics.drifted(found.difference(&self.reported).count(), false);
                let again = |told: &findings::Finding| step.drift.iter().any(|key| told.is_of(key));
                self.reported.retain(|told| !again(told));
                self.reported.extend(found);
            }
        }
    }

    /// Rules of others come before ours: ours are moved before them, but not without end, since others may do the same.
    fn note_misplaced(&mut self, key: Key, lines: &[String], now: Instant) {
        let (moved, last) = self.moves.get(&key).copied().unwrap_or((0, now));
        let rules = lines.join("; ");
        if moved > 0 && now < last + self.settings.sync_period {
            return;
        }
        if moved < MOVES && self.settings.drift == Drift::Repair {
            warn!(%key, rules, "rules of others come before ours; moving ours before them");
            self.settings.status.metrics.drifted(1, true);
            self.planner.rewrite_rules(key, now);
            self.again = true;
        } else if moved == MOVES || self.settings.drift == Drift::Report && moved == 0 {
            error!(%key, rules, "rules of others come before ours, and may keep packets from Services");
            self.settings.status.metrics.drifted(1, false);
            let note = format!("{key}: rules of others come before ours: {rules}");
            let finding = || Finding::of_node(Reason::RulesMisplaced, note);
            self.settings.find(finding);
        }
        self.moves.insert(key, (moved.saturating_add(1), now));
    }

    /// One part of an audit, when it is time for one.
    pub(super) fn audit_some(&mut self) {
        let now = self.now();
        let due = self.audit_at <= now || self.hurry.at().is_some_and(|at| at <= now);
        if !self.adopted || self.read_at.is_some() || self.audit.is_none() && !due {
            return;
        }
        if self.audit.is_none() {
            self.hurry.begun(now);
            self.set_sysctls();
            self.look_at_ports();
            self.list_addresses();
            self.look_around();
            self.planner.begin_reading();
        }
        let mut audit = self.audit.take().unwrap_or_default();
        let read = self
            .kernel
            .read_part(self.planner.base(), &mut audit.reading);
        match read {
            Ok(false) => self.audit = Some(audit),
            Ok(true) => self.audited(audit, now),
            Err(error) => {
                self.note_read_error(error);
                self.audit_at = now + READ_AGAIN;
            }
        }
    }

    /// Looks at what can be had for almost nothing: where much is gone, the audit does not wait for its time.
    pub(super) fn glance(&mut self) {
        let now = self.now();
        if now < self.glance_at || !self.adopted || self.audit.is_some() || self.planner.in_doubt()
        {
            return;
        }
        self.glance_at = now + GLANCE;
        let servers = self.planner.sample(SAMPLE);
        match self.kernel.glance(&servers) {
            Ok(glance) => {
                if self.glances.renewed(&glance) {
                    self.set_sysctls();
                }
                let (entries, references) = (self.planner.entries(), self.planner.references());
                if self.glances.differ(&glance, entries, &references) {
                    self.hurry.note(now);
                }
            }
            // The audit finds out what it is, and tells.
            Err(_) => self.hurry.note(now),
        }
    }

    /// Sets the timeouts and the sysctls that differ. What can't be set is told once, and again when it is another.
    pub(super) fn set_sysctls(&mut self) {
        match self.settings.timeouts.keep() {
            Ok(None) => {}
            Ok(Some(were)) => info!(?were, "set the timeouts of IPVS"),
            Err(error) => {
                error!(error = %Causes(&error), "the timeouts of IPVS are not as they must be")
            }
        }
        let mut failed = (self.settings.set_sysctls)(self.settings.strict_arp);
        failed.extend(self.settings.conntrack.set());
        let told = std::mem::take(&mut self.sysctls);
        for failure in failed {
            let finding = failure.to_string();
            if !told.contains(&finding) {
                error!(error = %Causes(&failure.source), "{finding}");
                let note = || Finding::of_node(Reason::FailedToSetSysctl, finding.clone());
                self.settings.find(note);
            }
            self.sysctls.insert(finding);
        }
        self.settings.status.sysctls(&self.sysctls);
    }

    /// Whether the kernel may give node ports to connections of the node's own; told when it changes.
    pub(super) fn look_at_ports(&self) {
        let mut node_ports = self.planner.node_ports();
        if node_ports.is_empty() {
            node_ports.extend(ports::NODE_PORTS);
        }
        let finding = ports::given_away(&node_ports).unwrap_or_else(|error| {
            debug!(%error, "the range of local ports could not be read");
            None
        });
        if self.settings.status.node_ports(finding.as_deref())
            && let Some(finding) = finding
        {
            warn!("{finding}");
        }
    }

    /// A reading of an audit is complete.
    fn audited(&mut self, audit: Audit, now: Instant) {
        self.audit_at = now + self.settings.sync_period;
        self.glances.audited();
        if self.read_error.take().is_some() {
            info!("the kernel can be read again");
        }
        self.settings.status.read(Ok(()));
        let Some(first) = audit.drift else {
            let drift = self.planner.differing(&audit.reading);
            if drift.is_empty() {
                self.reported.retain(findings::Finding::is_of_rules);
            } else {
                // Listings don't tell when they lack something.
                self.audit = Some(Audit {
                    reading: Reading::default(),
                    drift: Some(drift),
                });
            }
            return;
        };
        let again = audit.reading;
        let drift = self.planner.differing_again(first, &again);
        let found = findings::of_drift(&drift, &again.state, &self.planner, &mut self.kernel);
        let reports = &mut self.reports;
        findings::tell(&found, &self.reported, &self.planner, reports, now);
        let metrics = &self.settings.status.metrics;
        match self.settings.drift {
            Drift::Repair => metrics.drifted(drift.len(), true),
            Drift::Report => metrics.drifted(found.difference(&self.reported).count(), false),
        }
        metrics.recount(&again.state);
        match self.settings.drift {
            Drift::Repair => {
                self.planner.adopt(&drift, &again.state, now);
                self.again = true;
            }
            Drift::Report => {
                self.reported.retain(findings::Finding::is_of_rules);
                self.reported.extend(found);
            }
        }
    }
}
