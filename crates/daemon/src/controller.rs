//! `run`: the loop between what comes in and the kernel.
//!
//! One thread owns the planner and every socket to the kernel: the kernel does its work inside
//! the system call, so there is nothing to wait for elsewhere. While it works, news pile up in
//! the channel, and the next round sees their sum.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use ipvs_proxy_core::op::{Dataplane, Outcome};
use ipvs_proxy_core::planner::Planner;
use tracing::{debug, error, info, warn};

use crate::manifests::{Problem, Source};

/// What wakes the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The manifests may have changed.
    Manifests,
    /// It is time to stop; the kernel's state stays.
    Stop,
}

/// How long to wait before the kernel is read again, when the last reading was not enough.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// The state of the loop.
#[derive(Debug)]
pub struct Controller<D> {
    source: Source,
    planner: Planner,
    kernel: D,
    /// The kernel was read once: nothing is written before.
    adopted: bool,
    /// All was written once, as far as the kernel took it.
    in_force: bool,
    /// Every source had listed when the kernel was read last.
    pruned: bool,
    /// The kernel must be read, but not before this.
    read_at: Option<Instant>,
}

impl<D: Dataplane> Controller<D> {
    /// A loop that has read nothing yet.
    pub fn new(source: Source, planner: Planner, kernel: D) -> Controller<D> {
        Controller {
            source,
            planner,
            kernel,
            adopted: false,
            in_force: false,
            pruned: false,
            read_at: Some(Instant::now()),
        }
    }

    /// Runs until [`Event::Stop`] or until nobody can send events any more.
    pub fn run(mut self, events: &Receiver<Event>) {
        self.rescan();
        loop {
            self.work();
            let now = Instant::now();
            let deadline = self.planner.next_deadline().into_iter().chain(self.read_at).min();
            let wait = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
            match events.recv_timeout(wait) {
                Ok(Event::Manifests) => self.rescan(),
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        info!("stopped; what the kernel holds stays in force");
    }

    fn rescan(&mut self) {
        let (changes, problems) = self.source.rescan();
        for problem in problems {
            match problem {
                Problem::BadFile { .. } | Problem::Unreachable { .. } => error!("{problem}"),
                Problem::Refused { .. } | Problem::Twice { .. } => warn!("{problem}"),
            }
        }
        changes.into_iter().for_each(|change| self.planner.apply(change));
        if !self.pruned && self.source.is_complete() {
            self.read_at = Some(Instant::now());
        }
    }

    /// Works until there is nothing to do now.
    fn work(&mut self) {
        let started = Instant::now();
        let (mut done, mut refused) = (0_usize, 0_usize);
        loop {
            let now = Instant::now();
            if self.planner.in_doubt() && self.read_at.is_none() {
                self.read_at = Some(now + READ_AGAIN);
            }
            if self.read_at.is_some_and(|at| at <= now) {
                self.read(now);
            }
            if !self.adopted {
                return;
            }
            self.look_at_drains(now);
            for conflict in self.planner.take_conflicts() {
                warn!("{conflict}");
            }
            let ops = self.planner.next(now);
            if ops.is_empty() {
                break;
            }
            let outcomes = self.kernel.apply(&ops);
            for (op, outcome) in ops.iter().zip(&outcomes) {
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
            self.planner.commit(ops.into_iter().zip(outcomes), now);
        }
        if done + refused > 0 {
            let took_ms = started.elapsed().as_millis();
            info!(ops = done, failed = refused, took_ms, "applied");
        }
        if !std::mem::replace(&mut self.in_force, true) {
            info!(failed = refused, "what the manifests say is in force");
        }
    }

    fn read(&mut self, now: Instant) {
        match self.kernel.read(self.planner.base()) {
            Ok(state) => {
                info!(items = state.len(), "read the kernel");
                self.pruned = self.source.is_complete();
                self.planner.resync(state, self.pruned, now);
                self.adopted = true;
                self.read_at = None;
            }
            Err(error) => {
                error!(%error, "the kernel could not be read; will be tried again");
                self.read_at = Some(now + READ_AGAIN);
            }
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
}
