//! What the process tells over HTTP: metrics on one address, health on another.
//!
//! | address | paths |
//! |---|---|
//! | metrics, 127.0.0.1:10249 | `/metrics`, `/healthz` (ok), `/proxyMode`, `/configz` |
//! | health, 0.0.0.0:10256 | `/healthz`, `/livez`, `/readyz`, each with `?verbose` |
//! | health check node ports | any: whether this node has endpoints of the Service ([`ports`]) |
//!
//! A thread of its own for each (one for all health check node ports) answers, from what the loop notes in [`Status`] and, of how full the sets are, from
//! the kernel: an answer never waits for the loop, nor the loop for an answer.
//!
//! Whoever connects is served as HTTP/1. Clients hold no more than [`CONNECTIONS`], and keep nobody out: who
//! has the most of them loses one first, one that asks nothing, and the node itself loses none to others.

mod accept;
mod health;
pub mod ports;

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName, X_CONTENT_TYPE_OPTIONS};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ipvs_proxy_core::model::Change;
use ipvs_proxy_dataplane::flows::Forgotten;
use ipvs_proxy_netlink::{Causes, Family};
use prometheus_client::encoding::prometheus_text;
use tracing::{error, info};

use crate::api::{Kind, NodeFacts};
use crate::metrics::Metrics;

pub use accept::{CONNECTIONS, CONNECTIONS_OF_ONE, HEADER_TIMEOUT};
use accept::{Connections, accept};
pub(crate) use health::unusable;
pub use health::{Followed, Health, Moment, Question};

/// How often an address is tried that can't be listened on.
const AGAIN: Duration = Duration::from_secs(5);

/// The most changes of endpoints whose time until they are in the kernel is measured at once: the first ones, which
/// wait the longest.
const TRIGGERS: usize = 10_000;

/// What the loop notes, and what is told of it.
#[derive(Debug)]
pub struct Status {
    /// The metrics.
    pub metrics: Metrics,
    health: Mutex<Health>,
    /// The running configuration, as `/configz` shows it.
    config: serde_json::Value,
    triggers: Mutex<Vec<(Family, SystemTime)>>,
}

impl Status {
    /// Of a process that starts now. With `api`, objects come from the API server.
    #[must_use]
    pub fn new(
        families: &[Family],
        sync_period: Duration,
        api: bool,
        config: serde_json::Value,
    ) -> Status {
        let mut health = Health::new(sync_period, Moment::now());
        if api {
            health.api = Kind::ALL.map(|kind| (kind, Followed::default())).into();
        }
        Status {
            metrics: Metrics::new(families),
            health: Mutex::new(health),
            config,
            triggers: Mutex::default(),
        }
    }

    /// What is known now. To be held for a moment only.
    pub fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loop lives, and has something to do.
    pub fn works(&self) {
        self.health().busy = Some(Moment::now());
    }

    /// The loop waits for news.
    pub fn waits(&self) {
        let mut health = self.health();
        let busy = health.busy.take();
        health.recover_late("loop", busy, health::LIFE, Moment::now());
    }

    /// Changes came, with the times at which those of endpoints happened. Nothing waits for long as
    /// long as not all kinds are listed: that is the API server's affair.
    pub fn queued(&self, changes: &[Change], triggers: Vec<(Family, SystemTime)>, complete: bool) {
        changes
            .iter()
            .for_each(|change| self.metrics.queued(change));
        let mut waiting = self.triggers();
        let room = TRIGGERS.saturating_sub(waiting.len());
        waiting.extend(triggers.into_iter().take(room));
        drop(waiting);
        if complete && !changes.is_empty() {
            self.health().queued.get_or_insert_with(Moment::now);
        }
    }

    /// All kinds are listed: from now on what waits, waits for us.
    pub fn complete(&self) {
        self.health().queued.get_or_insert_with(Moment::now);
    }

    /// There is nothing left to do now: all is in the kernel but what fails, each with its time.
    pub fn rests(&self, failing: impl Iterator<Item = Instant>, base: Option<(String, Instant)>) {
        let now = Moment::now();
        let moment = |at: Instant| Moment {
            at,
            wall: now.wall - now.at.saturating_duration_since(at),
        };
        let (mut number, mut first) = (0_usize, None);
        for since in failing {
            number += 1;
            first = Some(first.map_or(since, |first: Instant| first.min(since)));
        }
        self.metrics
            .failing
            .set(i64::try_from(number).unwrap_or(i64::MAX));
        let triggers = std::mem::take(&mut *self.triggers());
        self.metrics.in_kernel(&triggers, now.wall);
        let mut health = self.health();
        let queued = health.queued.take();
        let patience = health.patience;
        health.recover_late("programming", queued, patience, now);
        let failing = first.map(|first| (number, moment(first)));
        if std::mem::replace(&mut health.failing, failing).is_some() && failing.is_none() {
            health.recover("objects");
        }
        let well = base.is_none();
        let base = base.map(|(why, since)| (moment(since), why));
        let base_failing = std::mem::replace(&mut health.base_failing, base);
        if well {
            let since = base_failing.map(|(since, _)| since);
            health.recover_late("base", since, patience, now);
            health.applied = Some(now.wall);
        }
    }

    /// All that is listed is in force.
    pub fn ready(&self) {
        self.health().in_force.get_or_insert_with(SystemTime::now);
    }

    /// The kernel was read, or not.
    pub fn read(&self, result: Result<(), String>) {
        let mut health = self.health();
        match result {
            Ok(()) => {
                if health.unread.take().is_some() {
                    health.recover("kernel-read");
                }
            }
            Err(why) => {
                self.metrics.read_failures.inc();
                let since = health.unread.take().map(|(since, _)| since);
                health.unread = Some((since.unwrap_or_else(Moment::now), why));
            }
        }
    }

    /// The sysctls that can't be set.
    pub fn sysctls(&self, failed: &BTreeSet<String>) {
        let number = i64::try_from(failed.len()).unwrap_or(i64::MAX);
        self.metrics.sysctls.set(number);
        let mut health = self.health();
        if health
            .sysctls
            .as_ref()
            .is_none_or(|(known, _)| known != failed)
        {
            let before = health.sysctls.take();
            if failed.is_empty() && before.is_some() {
                health.recover("sysctls");
            }
            health.sysctls = (!failed.is_empty()).then(|| (failed.clone(), SystemTime::now()));
        }
    }

    /// What there is to say of node ports that the kernel may give to others. Returns whether that is
    /// another word than before.
    pub fn node_ports(&self, finding: Option<&str>) -> bool {
        let mut health = self.health();
        let before = health
            .node_ports
            .as_ref()
            .map(|(finding, _)| finding.as_str());
        if before == finding {
            return false;
        }
        if finding.is_none() {
            health.recover("node-ports");
        }
        health.node_ports = finding.map(|finding| (finding.to_owned(), SystemTime::now()));
        true
    }

    /// What became of a pass that was to make connection tracking forget UDP flows.
    pub fn flows(&self, forgotten: &Forgotten) {
        let mut health = self.health();
        match forgotten {
            Ok(flows) => {
                let flows = u64::try_from(*flows).unwrap_or(u64::MAX);
                self.metrics.forgotten_flows.inc_by(flows);
                if health.flows.take().is_some() {
                    health.recover("udp-flows");
                }
            }
            Err(error) => {
                self.metrics.forget_failures.inc();
                let since = health.flows.take().map(|(_, since)| since);
                health.flows = Some((error.to_string(), since.unwrap_or_else(SystemTime::now)));
            }
        }
    }

    /// Whether the Node's podCIDRs are known, by which pods are to be told.
    pub fn pod_cidrs(&self, known: bool) {
        self.health().pod_cidrs = Some((known, SystemTime::now()));
    }

    /// What the own Node says. Returns whether it is another word than before on whether load balancers should send the node
    /// anything new.
    pub fn node(&self, facts: &NodeFacts) -> bool {
        let mut health = self.health();
        let changed = health.ineligible.map(|(why, _)| why) != facts.ineligible;
        if changed {
            health.ineligible = facts.ineligible.map(|why| (why, SystemTime::now()));
            health.recover("node");
        }
        changed
    }

    /// Why the configuration's file can't be used as it is now, if that is so.
    pub fn config(&self, why: Option<String>) {
        self.metrics.config_unusable.set(why.is_some().into());
        let mut health = self.health();
        let since = health.config.take().map(|(_, since)| since);
        health.config = why.map(|why| (why, since.unwrap_or_else(SystemTime::now)));
    }

    /// The objects of a kind whose last version can't be read, in a line; `None` for none.
    pub fn unread(&self, kind: Kind, objects: Option<String>) {
        let unread = objects.map(|objects| (objects, SystemTime::now()));
        let mut health = self.health();
        health.api.entry(kind).or_default().unread = unread;
        health.recover(health::check_of(kind));
    }

    /// The manifests that can't be read, or not all of which can be used.
    pub fn manifests(&self, faults: Vec<String>) {
        let health = &mut self.health().manifests;
        let since = health.take().map(|(_, since)| since);
        let faults = health::unusable(faults.iter());
        *health = faults.map(|faults| (faults, since.unwrap_or_else(SystemTime::now)));
    }

    /// A kind was listed.
    pub fn listed(&self, kind: Kind) {
        let mut health = self.health();
        let listed = &mut health.api.entry(kind).or_default().listed;
        listed.get_or_insert_with(SystemTime::now);
    }

    /// A kind can't be followed, or can; since when it could not until now, and why.
    pub fn followed(&self, kind: Kind, result: Result<(), &str>) -> Option<(Moment, String)> {
        let mut health = self.health();
        let failing = &mut health.api.entry(kind).or_default().failing;
        let before = failing.take();
        let since = before.as_ref().map(|(since, _)| *since);
        let recovered = before.is_some() && result.is_ok();
        *failing = result
            .err()
            .map(|why| (since.unwrap_or_else(Moment::now), why.to_owned()));
        if recovered {
            health.recover(health::check_of(kind));
        }
        before
    }

    fn triggers(&self) -> MutexGuard<'_, Vec<(Family, SystemTime)>> {
        self.triggers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The metrics as text, with what is counted only when it is asked for.
    fn scrape(&self) -> String {
        let now = Moment::now();
        let health = self.health().clone();
        let waits = health.oldest_unapplied(now);
        self.metrics.unapplied.set(waits.as_secs_f64());
        for (kind, followed) in &health.api {
            let label = [("resource", kind.resource())];
            let failing = followed.failing.as_ref();
            let fails = failing.map_or(0.0, |(since, _)| (now.at - since.at).as_secs_f64());
            self.metrics.api_failing.get_or_create(&label).set(fails);
            let up = failing.is_none() && followed.listed.is_some();
            self.metrics.api_up.get_or_create(&label).set(up.into());
        }
        // The kernel knows best, and this costs it less than counting along would cost us.
        let sets = ipset_rs::Client::open().and_then(|mut ipset| ipset.list_headers());
        if let Ok(sets) = sets {
            self.metrics.sets(&sets);
        }
        self.metrics.text()
    }
}

/// Where to listen; `None` switches off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen {
    /// For metrics.
    pub metrics: Option<SocketAddr>,
    /// For health.
    pub health: Option<SocketAddr>,
    /// An address that can't be had ends the process at start.
    pub hard_fail: bool,
}

/// Starts to answer, each on a thread of its own: what metrics cost is nothing to probes.
///
/// # Errors
/// If an address can't be listened on and that is to be an error.
pub fn start(status: &Arc<Status>, listen: Listen) -> Result<()> {
    let wanted = [
        (
            listen.metrics,
            "metrics",
            metrics_router(Arc::clone(status)),
        ),
        (listen.health, "health", health_router(Arc::clone(status))),
    ];
    for (address, what, router) in wanted {
        let Some(address) = address else { continue };
        let listener = match bind(address) {
            Ok(listener) => Some(listener),
            Err(error) if listen.hard_fail => {
                return Err(error).with_context(|| format!("{what}: can't listen on {address}"));
            }
            Err(error) => {
                error!(what, %address, error = %Causes(&error), "can't listen; will be tried again");
                None
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("no runtime for HTTP")?;
        std::thread::Builder::new()
            .name(format!("http-{what}"))
            .spawn(move || runtime.block_on(serve(address, what, listener, router)))?;
    }
    Ok(())
}

fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // As many as the kernel takes: a probe that finds the queue full comes again after a second.
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::MAXCONN)?;
    Ok(listener)
}

async fn serve(
    address: SocketAddr,
    what: &'static str,
    mut listener: Option<TcpListener>,
    router: Router,
) {
    loop {
        if listener.is_none() {
            tokio::time::sleep(AGAIN).await;
            // It was said once why it can't be had.
            listener = bind(address).ok();
        }
        let Some(listener) = listener.take() else {
            continue;
        };
        match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => {
                info!(what, %address, "listening");
                let connections = Connections::at_most(CONNECTIONS);
                accept(listener, address.port(), &router, &connections).await
            }
            Err(error) => {
                error!(what, %address, error = %Causes(&error), "can't listen; will be tried again")
            }
        }
    }
}

const NOSNIFF: (HeaderName, &str) = (X_CONTENT_TYPE_OPTIONS, "nosniff");

fn metrics_router(status: Arc<Status>) -> Router {
    let plain = |text: &'static str| move || async move { text_plain(text.to_owned()) };
    let metrics = |State(status): State<Arc<Status>>| async move {
        let content_type = (CONTENT_TYPE, prometheus_text::CONTENT_TYPE);
        ([content_type, NOSNIFF], status.scrape())
    };
    let config = |State(status): State<Arc<Status>>| async move {
        let content_type = (CONTENT_TYPE, "application/json");
        ([content_type, NOSNIFF], status.config.to_string())
    };
    Router::new()
        .route("/healthz", get(plain("ok")))
        .route("/proxyMode", get(plain("ipvs")))
        .route("/metrics", get(metrics))
        .route("/configz", get(config))
        .with_state(status)
}

fn health_router(status: Arc<Status>) -> Router {
    let answer = |question| {
        move |State(status): State<Arc<Status>>, RawQuery(query): RawQuery| async move {
            verdict(&status, question, query.as_deref().unwrap_or_default())
        }
    };
    Router::new()
        .route("/healthz", get(answer(Question::Health)))
        .route("/livez", get(answer(Question::Life)))
        .route("/readyz", get(answer(Question::Readiness)))
        .with_state(status)
}

fn text_plain(text: String) -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/plain; charset=utf-8"), NOSNIFF], text)
}

fn verdict(status: &Status, question: Question, query: &str) -> Response {
    let now = Moment::now();
    let health = status.health().clone();
    let yes = health.is(question, now);
    let code = match yes {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    match question {
        Question::Health => status.metrics.answered(false, yes),
        Question::Life => status.metrics.answered(true, yes),
        Question::Readiness => {}
    }
    let verbose = query
        .split('&')
        .any(|word| word == "verbose" || word.starts_with("verbose="));
    if verbose {
        return (code, text_plain(health.verbose(question, now))).into_response();
    }
    if question == Question::Readiness {
        let text = if yes { "ok" } else { "not ready" };
        return (code, text_plain(text.to_owned())).into_response();
    }
    let body = health.body(question, now).to_string();
    let headers = [(CONTENT_TYPE, "application/json"), NOSNIFF];
    (code, headers, body).into_response()
}

#[cfg(test)]
mod tests;
