//! One step of the work: what the kernel finished is taken in, one round is given out.
//!
//! Whoever drives a planner does so by [`Planner::step`], and by [`Planner::read_kernel`] when the kernel has to be read; to
//! work until there is nothing left to do now is [`Planner::work`].

use std::collections::BTreeSet;
use std::time::Instant;

use ipvs_netlink::VirtualServerKey;

use crate::op::{Dataplane, Finished, Op, Outcome, ReadError};
use crate::planner::Planner;
use crate::state::{Key, State};

/// What became of one step.
#[derive(Debug, Default)]
pub struct Step {
    /// Ops with what became of them, also of those that an earlier step started.
    pub ops: Vec<(Op, Outcome)>,
    /// What the kernel told of rules.
    pub rules: Vec<Finished>,
    /// Those of them that others changed: what is there now is not what is wanted.
    pub drift: BTreeSet<Key>,
    /// Draining real servers could not be looked at.
    pub unseen: Vec<(VirtualServerKey, ReadError)>,
    /// Nothing was given out: there is nothing to do before the next event, the [deadline](Planner::next_deadline), or the
    /// end of what was started.
    pub rests: bool,
}

impl Planner {
    /// Takes in what has ended, looks at drains that are due, and gives one round to the kernel, unless the kernel has to be
    /// [read](Planner::read_kernel) before. `clock` is asked again after the kernel has worked: a pause after a failure
    /// begins when it failed.
    pub fn step(&mut self, kernel: &mut impl Dataplane, clock: &impl Fn() -> Instant) -> Step {
        let mut step = Step::default();
        self.take_in(kernel, clock(), &mut step);
        if self.in_doubt() {
            return step;
        }
        let now = clock();
        for server in self.drains_due(now) {
            match kernel.connections(server) {
                Ok(connections) => self.observe(server, &connections, now),
                Err(error) => {
                    self.look_later(server, now);
                    step.unseen.push((server, error));
                }
            }
        }
        let unread = self.rules_to_read(now);
        for (key, rules) in &unread {
            kernel.read_rules(*key, rules);
        }
        let (ops, more) = self.next_or_more(now);
        step.rests = ops.is_empty() && unread.is_empty() && !more;
        let outcomes = kernel.apply(&ops);
        let results: Vec<(Op, Outcome)> = ops.into_iter().zip(outcomes).collect();
        self.commit(results.iter().cloned(), clock());
        step.ops.extend(results);
        let stale = self.take_stale_flows();
        if !stale.is_empty() {
            kernel.forget_flows(&stale);
        }
        step
    }

    /// Takes in what the kernel tells later than it was asked.
    fn take_in(&mut self, kernel: &mut impl Dataplane, now: Instant, step: &mut Step) {
        for finished in kernel.finished() {
            match finished {
                Finished::Op(op, outcome) => {
                    self.commit([(op.clone(), outcome.clone())], now);
                    step.ops.push((op, outcome));
                }
                Finished::Read(key, ref result) => {
                    match result {
                        Ok(value) => {
                            if self.note_rules(key, value.as_ref(), now) {
                                step.drift.insert(key);
                            }
                        }
                        Err(_) => self.note_unread(key, now),
                    }
                    step.rules.push(finished);
                }
                Finished::Tools(families, random_fully) => self.suit(families, random_fully),
                Finished::Misplaced(..) => step.rules.push(finished),
            }
        }
    }

    /// Reads the kernel until two readings agree and takes in what it holds ([`Planner::resync`]); how many things these are.
    ///
    /// # Errors
    /// As [`Planner::read_agreed`].
    pub fn read_kernel(
        &mut self,
        kernel: &mut impl Dataplane,
        prune: bool,
        now: Instant,
    ) -> Result<usize, ReadError> {
        let reading = self.read_agreed(kernel)?;
        let items = reading.state.len();
        self.resync(reading, prune, now);
        Ok(items)
    }

    /// Works until there is nothing to do now, reading the kernel where that is needed; all ops with what became of them.
    /// What others do in the meantime is not waited for.
    ///
    /// # Errors
    /// As [`Planner::read_agreed`]; and when there is no end after `most` steps.
    pub fn work(
        &mut self,
        kernel: &mut impl Dataplane,
        clock: &impl Fn() -> Instant,
        most: usize,
    ) -> Result<Vec<(Op, Outcome)>, ReadError> {
        let mut done = Vec::new();
        for _ in 0..most {
            if self.in_doubt() {
                self.read_kernel(kernel, true, clock())?;
            }
            let step = self.step(kernel, clock);
            done.extend(step.ops);
            self.adopt(&step.drift, &State::new(), clock());
            if step.rests && step.drift.is_empty() {
                return Ok(done);
            }
        }
        Err(ReadError(format!("no end after {most} steps")))
    }
}
