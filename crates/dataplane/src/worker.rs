//! A thread for what runs iptables, which may take long: for its lock, or because a tool hangs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use ipvs_proxy_core::op::{Op, Outcome, ReadError};
use ipvs_proxy_core::state::{Key, Set};
use ipvs_proxy_iptables::{Error, Ruleset, Tools, program::Stop};

use crate::families;
use crate::outcomes::{failed, unread};
use crate::rules::{self, Compared, Rules};

/// How long the end of the thread is waited for. What it runs is killed within some milliseconds.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// Something to do with rules.
#[derive(Debug)]
pub(crate) enum Job {
    /// An op on rules.
    Rules(Op),
    /// Puts a set in the place of one of another type, by this op.
    Replace(Op, Set),
    /// Destroys a set that is in use, by this op.
    Destroy(Op, Set),
    /// Compares the rules of a key with these.
    Read(Key, Box<Ruleset>),
}

/// What became of a job.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The tools were looked for, of which no job has to tell.
    Tools(Result<Shown, Error>),
    Done(Op, Outcome),
    Read(Key, Box<Ruleset>, Result<Compared, ReadError>),
}

/// What the tools show of the node.
#[derive(Debug)]
pub(crate) struct Shown {
    /// Why it can't serve IPv6.
    pub(crate) no_ipv6: Option<String>,
    pub(crate) random_fully: bool,
}

impl Shown {
    fn by(tools: &Tools) -> Result<Shown, Error> {
        Ok(Shown {
            random_fully: tools.version()?.has_random_fully(),
            no_ipv6: families::no_ipv6_by(tools),
        })
    }
}

impl Job {
    /// What becomes of it without tools.
    fn fail(self, error: &Error) -> Answer {
        match self {
            Job::Rules(op) | Job::Replace(op, _) | Job::Destroy(op, _) => {
                Answer::Done(op, failed(rules::kind(error), error))
            }
            Job::Read(key, wanted) => Answer::Read(key, wanted, Err(unread(error))),
        }
    }

    pub(crate) fn run(self, rules: &mut Rules) -> Answer {
        match self {
            Job::Rules(op) => {
                let outcome = rules.apply(&op);
                Answer::Done(op, outcome)
            }
            Job::Replace(op, set) => Answer::Done(op, rules.replace(set)),
            Job::Destroy(op, set) => Answer::Done(op, rules.destroy(set)),
            Job::Read(key, wanted) => {
                let read = rules.compare(&wanted);
                Answer::Read(key, wanted, read)
            }
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    answers: Vec<Answer>,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread. When it is dropped the program that runs is killed, and what is queued is left.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    stop: Stop,
    thread: JoinHandle<()>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Worker").field(&self.thread).finish()
    }
}

impl Worker {
    /// Starts the thread in the network namespace of the calling one. It looks for the tools first, and before each job until
    /// it has found them; then it calls `found`, once. It calls `notify` after each answer.
    pub(crate) fn start(
        mut rules: Rules,
        found: impl FnOnce(&Tools) + Send + 'static,
        notify: impl Fn() + Send + 'static,
    ) -> io::Result<Worker> {
        let shared = Arc::new(Shared::default());
        let stop = rules.tools.stop();
        let of_thread = Arc::clone(&shared);
        let mut found = (!rules.tools.are_found()).then_some(found);
        let work = move || {
            // The first time for no job.
            let mut job = None;
            loop {
                let shown = found.as_ref().map(|_| Shown::by(&rules.tools));
                let answers = match (shown, job) {
                    (None, job) => [None, job.map(|job: Job| job.run(&mut rules))],
                    (Some(Ok(shown)), job) => {
                        if let Some(found) = found.take() {
                            found(&rules.tools);
                        }
                        let done = job.map(|job| job.run(&mut rules));
                        [Some(Answer::Tools(Ok(shown))), done]
                    }
                    (Some(Err(error)), Some(job)) => [Some(job.fail(&error)), None],
                    (Some(Err(error)), None) => [Some(Answer::Tools(Err(error))), None],
                };
                let mut queue = of_thread.queue();
                if queue.ended {
                    return;
                }
                queue.answers.extend(answers.into_iter().flatten());
                drop(queue);
                notify();
                let mut queue = of_thread.queue();
                job = loop {
                    if queue.ended {
                        return;
                    }
                    match queue.jobs.pop_front() {
                        Some(job) => break Some(job),
                        None => {
                            let woken = of_thread.wake.wait(queue);
                            queue = woken.unwrap_or_else(PoisonError::into_inner);
                        }
                    }
                };
            }
        };
        let thread = thread::Builder::new()
            .name("iptables".to_owned())
            .spawn(work)?;
        Ok(Worker {
            shared,
            stop,
            thread,
        })
    }

    /// Queues a job behind all others. Of readings of one key with nothing else in between, the last is made.
    pub(crate) fn give(&self, job: Job) {
        let mut queue = self.shared.queue();
        if let Job::Read(key, _) = &job {
            let same = |queued: &Job| matches!(queued, Job::Read(of, _) if of == key);
            let writes = queue
                .jobs
                .iter()
                .rposition(|job| !matches!(job, Job::Read(..)));
            let after = writes.map_or(0, |at| at + 1);
            let mut n = 0;
            queue.jobs.retain(|queued| {
                n += 1;
                n <= after || !same(queued)
            });
        }
        queue.jobs.push_back(job);
        self.shared.wake.notify_one();
    }

    /// What became of jobs since the last call.
    pub(crate) fn answers(&self) -> Vec<Answer> {
        std::mem::take(&mut self.shared.queue().answers)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.queue().ended = true;
        self.shared.wake.notify_one();
        self.stop.stop();
        // It may be in `notify`, which may wait for who drops this.
        let end = Instant::now() + LAST_WAIT;
        while !self.thread.is_finished() && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
