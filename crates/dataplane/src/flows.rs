//! Forgets UDP flows on a thread of its own: the connection tracking table may be long, and nobody
//! waits for it.
//!
//! What became stale is merged until the next pass: the first comes at once, the next a second after
//! it, and later where a pass takes long. What could not be forgotten is kept for the next try. A real
//! server that came back meanwhile loses its flows all the same: some of its clients were given another
//! one while it was away, and of those that were not the next packet makes the entry anew, since IPVS
//! knows where it belongs.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ipvs_proxy_core::op::StaleFlows;
use ipvs_proxy_netlink::Error;

use crate::conntrack::{Conntrack, ForgetError, Stale};

/// The shortest time between two passes.
const PAUSE: Duration = Duration::from_secs(1);
/// A pass is followed by so many times its length without one.
const REST: u32 = 4;
/// The longest time until a failed pass is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long the end of this value waits for what is still to be forgotten.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// How often at most it is told how many flows were forgotten.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// What became of a pass.
pub type Forgotten = Result<usize, ForgetError>;

type Report = Box<dyn Fn(&Forgotten) + Send>;

/// The worker. It ends with this value, which waits a second at most for what is left to do.
pub struct Flows {
    shared: Arc<Shared>,
    report: Report,
    /// What the thread is to run, until it does.
    work: Option<Box<dyn FnOnce(Report) + Send>>,
}

impl std::fmt::Debug for Flows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flows").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stale: Stale,
    /// A pass goes on.
    working: bool,
    /// Somebody waits for the end: no pause.
    hurry: bool,
    /// How many passes failed.
    failures: u64,
    ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flows {
    /// A worker on the network namespace of the calling thread. Its thread starts with the first flow to
    /// forget.
    ///
    /// # Errors
    /// If the kernel gives no socket.
    pub fn open() -> Result<Flows, Error> {
        let mut conntrack = Some(Conntrack::open()?);
        let pass = move |stale: &Stale| {
            let open = match &mut conntrack {
                Some(open) => open,
                none => none.insert(Conntrack::open()?),
            };
            let forgotten = open.forget(stale);
            if matches!(forgotten, Err(ForgetError::Netlink(_))) {
                // Whatever is wrong with the sockets is not wrong with the next ones.
                conntrack = None;
            }
            forgotten
        };
        Ok(Flows::by(pass, PAUSE))
    }

    fn by(pass: impl FnMut(&Stale) -> Forgotten + Send + 'static, pause: Duration) -> Flows {
        let shared = Arc::new(Shared::default());
        let of_worker = Arc::clone(&shared);
        let run = move |report: Report| {
            let mut told = Told::default();
            let report = |forgotten: &Forgotten| {
                told.tell(forgotten, Instant::now());
                report(forgotten);
            };
            work(&of_worker, pass, report, pause);
        };
        Flows {
            shared,
            report: Box::new(|_| ()),
            work: Some(Box::new(run)),
        }
    }

    /// Has `report` called with what became of each pass. To be called before the first flow is to be
    /// forgotten.
    pub fn report_to(&mut self, report: impl Fn(&Forgotten) + Send + 'static) {
        self.report = Box::new(report);
    }

    /// Forgets these as well, soon. Never waits.
    pub fn forget(&mut self, stale: &StaleFlows) {
        let mut state = self.shared.lock();
        let left = state.stale.add(stale);
        let idle = state.stale.is_empty();
        drop(state);
        tell_left(left);
        if idle {
            return;
        }
        self.shared.changed.notify_all();
        if let Some(work) = self.work.take() {
            let report = std::mem::replace(&mut self.report, Box::new(|_| ()));
            let thread = thread::Builder::new().name("conntrack".to_owned());
            if let Err(error) = thread.spawn(move || work(report)) {
                tracing::error!(%error, "UDP flows are not forgotten: no thread for it");
            }
        }
    }

    /// Waits until all is forgotten that was to be; false when it could not be, or not in this time.
    #[must_use]
    pub fn finish(&self, within: Duration) -> bool {
        let mut state = self.shared.lock();
        let failures = state.failures;
        state.hurry = true;
        self.shared.changed.notify_all();
        let busy = |s: &mut State| (s.working || !s.stale.is_empty()) && s.failures == failures;
        let waited = self.shared.changed.wait_timeout_while(state, within, busy);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.hurry = false;
        !state.working && state.stale.is_empty()
    }
}

impl Drop for Flows {
    fn drop(&mut self) {
        if self.work.is_none() && !self.finish(LAST_WAIT) {
            tracing::warn!(
                "some UDP flows may go on to where they went: there was no time to forget them"
            );
        }
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

fn work(
    shared: &Shared,
    mut pass: impl FnMut(&Stale) -> Forgotten,
    mut report: impl FnMut(&Forgotten),
    pause: Duration,
) {
    let mut next = Instant::now();
    let mut failed = 0;
    while let Some(stale) = await_work(shared, next) {
        let began = Instant::now();
        let forgotten = pass(&stale);
        let now = Instant::now();
        let mut rest = pause.max((now - began) * REST);
        let mut left = 0;
        let mut state = shared.lock();
        state.working = false;
        match &forgotten {
            Ok(_) => failed = 0,
            Err(error) => {
                left = state.stale.merge(stale);
                state.failures += 1;
                failed = match error {
                    // Nobody waits for a module that is not there.
                    ForgetError::NoModule => u32::MAX,
                    ForgetError::Netlink(_) => failed + 1,
                };
                rest = rest.max(
                    pause
                        .saturating_mul(2_u32.saturating_pow(failed))
                        .min(LONGEST_PAUSE),
                );
            }
        }
        drop(state);
        next = now + rest;
        tell_left(left);
        report(&forgotten);
        shared.changed.notify_all();
    }
}

/// Waits for something to forget, and for the time to do so; `None` at the end.
fn await_work(shared: &Shared, next: Instant) -> Option<Stale> {
    let mut state = shared.lock();
    loop {
        let now = Instant::now();
        if !state.stale.is_empty() && (now >= next || state.hurry) {
            state.working = true;
            return Some(std::mem::take(&mut state.stale));
        }
        if state.ended {
            return None;
        }
        state = match state.stale.is_empty() {
            true => shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner),
            false => {
                let waited = shared.changed.wait_timeout(state, next - now);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

fn tell_left(left: usize) {
    if left > 0 {
        tracing::warn!(
            addresses = left,
            "too many wait for their UDP flows to be forgotten; these go on to where they went"
        );
    }
}

/// What the log says of passes: a failure once for each cause, and a sum of the rest.
#[derive(Default)]
struct Told {
    failure: Option<ForgetError>,
    flows: usize,
    at: Option<Instant>,
}

impl Told {
    fn tell(&mut self, forgotten: &Forgotten, now: Instant) {
        match forgotten {
            Ok(flows) => {
                self.flows += flows;
                if self.failure.take().is_some() {
                    tracing::info!("UDP flows can be forgotten again");
                }
                let late = self
                    .at
                    .is_none_or(|at| now.saturating_duration_since(at) >= TOLD_EVERY);
                if self.flows > 0 && late {
                    tracing::info!(
                        flows = self.flows,
                        "forgot UDP flows that lead elsewhere now"
                    );
                    self.at = Some(now);
                    self.flows = 0;
                }
            }
            Err(error) if self.failure.as_ref() != Some(error) => {
                tracing::warn!(%error, "UDP flows may go on to where they went; will be tried again");
                self.failure = Some(error.clone());
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use ipvs_netlink::VirtualServerKey;
    use ipvs_proxy_netlink::Protocol;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    fn all_of(port: u16) -> StaleFlows {
        let server = VirtualServerKey::Address {
            address: [10, 96, 0, 10].into(),
            port,
            protocol: Protocol::Udp,
        };
        [(server, None)].into()
    }

    fn stale(ports: &[u16]) -> Stale {
        let mut stale = Stale::default();
        for port in ports {
            stale.add(&all_of(*port));
        }
        stale
    }

    /// A worker whose passes are told, and end with what is sent back.
    fn worker(pause: Duration) -> (Flows, mpsc::Receiver<Stale>, mpsc::Sender<Forgotten>) {
        let (told, passes) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let pass = move |stale: &Stale| {
            told.send(stale.clone()).unwrap();
            answers.recv().unwrap_or(Ok(0))
        };
        (Flows::by(pass, pause), passes, answer)
    }

    #[test]
    fn nobody_waits_and_what_comes_meanwhile_is_one_pass() {
        let pause = Duration::from_millis(300);
        let (mut flows, passes, answer) = worker(pause);
        flows.forget(&all_of(1));
        assert_eq!(passes.recv_timeout(SOON), Ok(stale(&[1])));
        for n in 0..1000 {
            flows.forget(&all_of(2 + n % 2));
        }
        let ended = Instant::now();
        answer.send(Ok(1)).unwrap();
        assert_eq!(passes.recv_timeout(SOON), Ok(stale(&[2, 3])));
        assert!(ended.elapsed() >= pause, "{:?}", ended.elapsed());
        answer.send(Ok(1)).unwrap();
        assert!(flows.finish(SOON));
        assert!(passes.try_recv().is_err());
    }

    #[test]
    fn what_failed_is_kept_for_the_next_try() {
        let (mut flows, passes, answer) = worker(Duration::from_millis(1));
        answer.send(Err(Error::Overrun.into())).unwrap();
        flows.forget(&all_of(1));
        assert_eq!(passes.recv_timeout(SOON), Ok(stale(&[1])));
        assert_eq!(passes.recv_timeout(SOON), Ok(stale(&[1])));
        flows.forget(&all_of(2));
        answer.send(Err(Error::Interrupted.into())).unwrap();
        assert_eq!(passes.recv_timeout(SOON), Ok(stale(&[1, 2])));
        answer.send(Ok(2)).unwrap();
        assert!(flows.finish(SOON));
    }

    #[test]
    fn without_the_module_it_is_tried_seldom_and_whoever_waits_learns_of_it() {
        let (mut flows, passes, answer) = worker(Duration::from_millis(1));
        answer.send(Err(ForgetError::NoModule)).unwrap();
        flows.forget(&all_of(1));
        assert_eq!(passes.recv_timeout(SOON), Ok(stale(&[1])));
        for _ in 0..100 {
            flows.forget(&all_of(1));
        }
        assert!(passes.recv_timeout(Duration::from_millis(300)).is_err());
        // Whoever waits has it tried once more.
        answer.send(Err(ForgetError::NoModule)).unwrap();
        assert!(!flows.finish(SOON));
        assert_eq!(passes.try_recv(), Ok(stale(&[1])));
    }

    #[test]
    fn a_pass_that_hangs_holds_nobody_for_long() {
        let (mut flows, passes, _answer) = worker(Duration::ZERO);
        flows.forget(&all_of(1));
        assert_eq!(passes.recv_timeout(SOON), Ok(stale(&[1])));
        let began = Instant::now();
        drop(flows);
        let took = began.elapsed();
        assert!(took >= LAST_WAIT && took < SOON, "{took:?}");
    }
}
