//! The metrics. Names, labels and buckets with the prefix `kubeproxy_` are kube-proxy's where the
//! meaning is the same; what it has not has the prefix `ipvs_proxy_`.
//!
//! What an event costs here does not depend on how much the kernel holds: things are counted as ops
//! are done, and counted anew when the whole kernel was read anyway.

mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipset_rs::{SetName, SetType};
use ipvs_netlink::VirtualServerKey;
use ipvs_proxy_core::guard::Cause;
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::op::{FailureKind, Op, Outcome};
use ipvs_proxy_core::state::{Key, Set, State};
use ipvs_proxy_netlink::Family;
use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family as Labelled;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};

use process::Process;

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Labelled<Labels<N>, Counter>;
type Gauges<const N: usize> = Labelled<Labels<N>, Gauge>;
type Float = Gauge<f64, AtomicU64>;
type Histograms = Labelled<Labels<1>, Histogram>;
type OfSet = Labelled<[(&'static str, String); 1], Gauge>;

/// The requests to the API server. Clones count together.
#[derive(Debug, Clone)]
pub struct Requests {
    total: Labelled<[(&'static str, String); 3], Counter>,
    duration: Labelled<[(&'static str, String); 2], Histogram>,
}

impl Default for Requests {
    fn default() -> Requests {
        Requests {
            total: Labelled::default(),
            duration: Labelled::new_with_constructor(request_buckets),
        }
    }
}

impl Requests {
    /// One ended, with this status code, or by an error.
    pub fn ended(&self, code: Option<u16>, method: &str, host: &str) {
        let code = code.map_or("<error>".to_owned(), |code| code.to_string());
        let labels = [
            ("code", code),
            ("method", method.to_owned()),
            ("host", host.to_owned()),
        ];
        self.total.get_or_create(&labels).inc();
    }

    /// One took so long, its answer's body included.
    pub fn took(&self, time: Duration, method: &str, host: &str) {
        let labels = [("verb", method.to_owned()), ("host", host.to_owned())];
        self.duration
            .get_or_create(&labels)
            .observe(time.as_secs_f64());
    }
}

/// Ports of a bitmap of ports, which has no other limit.
const PORTS: u32 = 65_536;

/// All metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    families: Vec<Family>,
    process_started: SystemTime,
    process: Process,
    sync_duration: Histograms,
    sync_last: Labelled<Labels<1>, Float>,
    sync_queued: Labelled<Labels<1>, Float>,
    programming: Histograms,
    endpoint_changes: Counters<1>,
    endpoint_changes_pending: Gauges<1>,
    service_changes: Counters<1>,
    service_changes_pending: Gauges<1>,
    restore_failures: Counters<1>,
    healthz: Counters<1>,
    livez: Counters<1>,
    ops: Counters<3>,
    pub(crate) unapplied: Float,
    pub(crate) failing: Gauge,
    pub(crate) drains: Gauge,
    health_ports: Gauges<1>,
    pub(crate) conflicts: Counter,
    pub(crate) sysctls: Gauge,
    pub(crate) config_unusable: Gauge,
    pub(crate) read_failures: Counter,
    pub(crate) forgotten_flows: Counter,
    pub(crate) forget_failures: Counter,
    drift: Counters<1>,
    refused: Counters<1>,
    set_max_entries: OfSet,
    set_entries: OfSet,
    virtual_servers: Gauges<1>,
    real_servers: Gauges<1>,
    pub(crate) api_up: Gauges<1>,
    pub(crate) api_failing: Labelled<Labels<1>, Float>,
    pub(crate) events: Counters<1>,
    pub(crate) lines: Counters<2>,
    pub(crate) requests: Requests,
    /// How many real servers each virtual server has in the kernel: it takes them with it.
    held: Mutex<BTreeMap<VirtualServerKey, u32>>,
}

/// The label that says of which family a thing is.
fn by_family(family: Family) -> Labels<1> {
    let name = match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    };
    [("ip_family", name)]
}

/// Seconds since 1970.
fn unix(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}

/// 1 ms, doubled up to 16 s.
fn sync_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// The buckets of the SLI: 0.25, 0.5, each second to 59, each fifth to 115, each thirtieth to 300.
fn programming_buckets() -> Histogram {
    let steps = |from: u32, to: u32, step: usize| (from..=to).step_by(step).map(f64::from);
    let fine = [0.25, 0.5].into_iter().chain(steps(1, 59, 1));
    Histogram::new(fine.chain(steps(60, 115, 5)).chain(steps(120, 300, 30)))
}

/// The buckets of client-go.
fn request_buckets() -> Histogram {
    Histogram::new([
        0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0,
    ])
}

/// Registers a metric and gives it back.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

impl Metrics {
    /// All at zero, for a proxy of these families.
    #[must_use]
    pub fn new(families: &[Family]) -> Metrics {
        let mut registry = Registry::default();
        let process = Process::new(&mut registry);
        let requests = Requests::default();
        registry.register(
            "rest_client_requests",
            "Requests to the API server, by what became of them",
            requests.total.clone(),
        );
        registry.register(
            "rest_client_request_duration_seconds",
            "How long a request to the API server took, watches aside",
            requests.duration.clone(),
        );
        let r = registry.sub_registry_with_prefix("kubeproxy");
        let sync_duration = add(
            r,
            "sync_proxy_rules_duration_seconds",
            "How long a pass that wrote to the kernel took",
            Labelled::new_with_constructor(sync_buckets as fn() -> Histogram),
        );
        let programming = add(
            r,
            "network_programming_duration_seconds",
            "From the change of an endpoint, as its EndpointSlice says it, until it is in the kernel",
            Labelled::new_with_constructor(programming_buckets as fn() -> Histogram),
        );
        let sync_last = add(
            r,
            "sync_proxy_rules_last_timestamp_seconds",
            "When all that was told was last in the kernel",
            Labelled::default(),
        );
        let sync_queued = add(
            r,
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "When a change was last told",
            Labelled::default(),
        );
        let endpoint_changes = add(
            r,
            "sync_proxy_rules_endpoint_changes",
            "Changes of EndpointSlices; one that is gone counts in each family",
            Counters::default(),
        );
        let endpoint_changes_pending = add(
            r,
            "sync_proxy_rules_endpoint_changes_pending",
            "Changes of EndpointSlices that are not in the kernel yet",
            Gauges::default(),
        );
        let service_changes = add(
            r,
            "sync_proxy_rules_service_changes",
            "Changes of Services",
            Counters::default(),
        );
        let service_changes_pending = add(
            r,
            "sync_proxy_rules_service_changes_pending",
            "Changes of Services that are not in the kernel yet",
            Gauges::default(),
        );
        let restore_failures = add(
            r,
            "sync_proxy_rules_iptables_restore_failures",
            "Times that the iptables rules could not be written",
            Counters::default(),
        );
        let healthz = add(
            r,
            "proxy_healthz",
            "Answers of /healthz",
            Counters::default(),
        );
        let livez = add(r, "proxy_livez", "Answers of /livez", Counters::default());

        let r = registry.sub_registry_with_prefix("ipvs_proxy");
        let build = add(
            r,
            "build_info",
            "The version, and 1",
            Labelled::<Labels<1>, Gauge>::default(),
        );
        build
            .get_or_create(&[("version", env!("CARGO_PKG_VERSION"))])
            .set(1);
        let set_max_entries = add(
            r,
            "set_max_entries",
            "The most entries that an ipset takes before it is given more room",
            OfSet::default(),
        );
        let set_entries = add(r, "set_entries", "Entries of an ipset", OfSet::default());
        let drift = add(
            r,
            "drift",
            "Things that somebody else changed, by what was done about it",
            Counters::default(),
        );
        for action in ["repaired", "reported"] {
            let _ = drift.get_or_create(&[("action", action)]);
        }
        let metrics = Metrics {
            ops: add(
                r,
                "kernel_ops",
                "Ops given to the kernel, by what they are about and what became of them",
                Counters::default(),
            ),
            unapplied: add(
                r,
                "oldest_unapplied_change_seconds",
                "Age of the oldest change that is not in the kernel, 0 for none",
                Float::default(),
            ),
            failing: add(
                r,
                "failed_objects",
                "Things that the kernel should hold and could not be written, to be tried again",
                Gauge::default(),
            ),
            drains: add(
                r,
                "draining_real_servers",
                "Real servers that drain",
                Gauge::default(),
            ),
            health_ports: add(
                r,
                "health_check_node_ports",
                "Health check node ports of Services, by whether all their addresses are listened on",
                Gauges::default(),
            ),
            conflicts: add(
                r,
                "conflicts",
                "Times that a Service went without a VIP and port, since an older one has it",
                Counter::default(),
            ),
            sysctls: add(
                r,
                "failed_sysctls",
                "Sysctls that are not as they must be and can't be set",
                Gauge::default(),
            ),
            config_unusable: add(
                r,
                "config_unusable",
                "1 while the configuration's file can't be used as it is now",
                Gauge::default(),
            ),
            read_failures: add(
                r,
                "kernel_read_failures",
                "Times that the kernel could not be read",
                Counter::default(),
            ),
            forgotten_flows: add(
                r,
                "forgotten_udp_flows",
                "UDP flows that connection tracking was made to forget, since they lead elsewhere now",
                Counter::default(),
            ),
            forget_failures: add(
                r,
                "forget_udp_flows_failures",
                "Times that UDP flows could not be forgotten, to be tried again",
                Counter::default(),
            ),
            drift,
            refused: add(
                r,
                "refused_addresses",
                "Times that a part of a Service was found that is not served, by cause",
                Counters::default(),
            ),
            virtual_servers: add(
                r,
                "virtual_servers",
                "Virtual servers in the kernel",
                Gauges::default(),
            ),
            real_servers: add(
                r,
                "real_servers",
                "Real servers in the kernel, those that drain included",
                Gauges::default(),
            ),
            api_up: add(
                r,
                "api_up",
                "1 if the kind is followed at the API server and was listed",
                Gauges::default(),
            ),
            api_failing: add(
                r,
                "api_failing_seconds",
                "How long the kind can't be followed at the API server, 0 if it can",
                Labelled::default(),
            ),
            events: add(
                r,
                "events",
                "Events for the API server, by what became of them",
                Counters::default(),
            ),
            lines: add(
                r,
                "log_lines",
                "What there was to log about objects: told, known before, or left out for its number",
                Counters::default(),
            ),
            requests,
            registry: Registry::default(),
            families: families.to_vec(),
            process_started: SystemTime::now(),
            process,
            sync_duration,
            sync_last,
            sync_queued,
            programming,
            endpoint_changes,
            endpoint_changes_pending,
            service_changes,
            service_changes_pending,
            restore_failures,
            healthz,
            livez,
            set_max_entries,
            set_entries,
            held: Mutex::default(),
        };
        for family in families.iter().map(|family| by_family(*family)) {
            drop(metrics.sync_duration.get_or_create(&family));
            drop(metrics.programming.get_or_create(&family));
            drop(metrics.endpoint_changes.get_or_create(&family));
            drop(metrics.service_changes.get_or_create(&family));
            drop(metrics.restore_failures.get_or_create(&family));
            drop(metrics.virtual_servers.get_or_create(&family));
            drop(metrics.real_servers.get_or_create(&family));
        }
        Metrics {
            registry,
            ..metrics
        }
    }

    /// All of them in Prometheus' text format, version 0.0.4.
    #[must_use]
    pub fn text(&self) -> String {
        self.process.look();
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }

    /// A change was told, and is not in the kernel yet.
    pub fn queued(&self, change: &Change) {
        let (total, pending, families) = match change {
            Change::Slice(_, slice) => (
                &self.endpoint_changes,
                &self.endpoint_changes_pending,
                slice.as_ref().map(|slice| slice.family),
            ),
            Change::Service(..) => (&self.service_changes, &self.service_changes_pending, None),
            Change::Node(_)
            | Change::NodeAddresses(_)
            | Change::PodCidrs(_)
            | Change::Needed(..)
            | Change::Listeners(_) => return,
        };
        let now = unix(SystemTime::now());
        for family in &self.families {
            if families.is_none_or(|only| only == *family) {
                let label = by_family(*family);
                total.get_or_create(&label).inc();
                pending.get_or_create(&label).inc();
                self.sync_queued.get_or_create(&label).set(now);
            }
        }
    }

    /// What became of an op.
    pub fn op(&self, op: &Op, outcome: &Outcome) {
        let key = op.key();
        let kind = match key {
            Key::Set(_) => "set",
            Key::Rules(..) => "rules",
            Key::Link => "link",
            Key::Entry(..) => "entry",
            Key::VirtualServer(_) => "virtual_server",
            Key::RealServer(..) => "real_server",
            Key::Address(_) => "address",
            Key::Route(_) => "route",
            Key::RoutingRule(..) => "routing_rule",
        };
        let verb = match op {
            Op::Add(..) => "add",
            Op::Update(..) => "update",
            Op::Remove(_) => "remove",
        };
        let result = match outcome {
            Outcome::Done => "done",
            // It is counted when it has ended.
            Outcome::Started => return,
            Outcome::Failed(failure) => match failure.kind {
                FailureKind::Drift => "drift",
                FailureKind::Unknown => "unknown",
                FailureKind::Busy => "busy",
                FailureKind::Refused => "refused",
                FailureKind::Node => "node",
            },
        };
        let labels = [("kind", kind), ("op", verb), ("result", result)];
        self.ops.get_or_create(&labels).inc();
        match (outcome, key) {
            (Outcome::Done, _) => self.count(op),
            (Outcome::Failed(_), Key::Rules(family, _)) => {
                self.restore_failures
                    .get_or_create(&by_family(family))
                    .inc();
            }
            _ => {}
        }
    }

    /// Counts what an op that was done brought or took.
    fn count(&self, op: &Op) {
        match (op, op.key()) {
            (Op::Add(..), Key::VirtualServer(vs)) if self.held().insert(vs, 0).is_none() => {
                self.virtual_servers
                    .get_or_create(&by_family(vs.family()))
                    .inc();
            }
            (Op::Remove(_), Key::VirtualServer(vs)) => {
                if let Some(with_it) = self.held().remove(&vs) {
                    let family = by_family(vs.family());
                    self.virtual_servers.get_or_create(&family).dec();
                    self.real_servers
                        .get_or_create(&family)
                        .dec_by(with_it.into());
                }
            }
            (Op::Add(..), Key::RealServer(vs, _)) => {
                *self.held().entry(vs).or_default() += 1;
                self.real_servers
                    .get_or_create(&by_family(vs.family()))
                    .inc();
            }
            (Op::Remove(_), Key::RealServer(vs, _)) => {
                if let Some(count) = self.held().get_mut(&vs).filter(|count| **count > 0) {
                    *count -= 1;
                    self.real_servers
                        .get_or_create(&by_family(vs.family()))
                        .dec();
                }
            }
            _ => {}
        }
    }

    /// Counts anew what the kernel holds, after all of it was read.
    pub fn recount(&self, state: &State) {
        let mut servers = BTreeMap::<_, u32>::new();
        for key in state.keys() {
            match key {
                Key::VirtualServer(vs) => *servers.entry(*vs).or_default() += 0,
                Key::RealServer(vs, _) => *servers.entry(*vs).or_default() += 1,
                _ => {}
            }
        }
        for family in &self.families {
            let of_family = || servers.iter().filter(|(vs, _)| vs.family() == *family);
            let label = by_family(*family);
            let number = i64::try_from(of_family().count()).unwrap_or(i64::MAX);
            self.virtual_servers.get_or_create(&label).set(number);
            let number = of_family().map(|(_, count)| i64::from(*count)).sum();
            self.real_servers.get_or_create(&label).set(number);
        }
        *self.held() = servers;
    }

    /// How full the sets of ours among these are.
    pub(crate) fn sets(&self, sets: &[ipset_rs::Set]) {
        let ours = self.families.iter().flat_map(|family| Set::all(*family));
        let ours: BTreeSet<SetName> = ours.map(Set::name).collect();
        for set in sets.iter().filter(|set| ours.contains(&set.name)) {
            let name = [("set", set.name.to_string())];
            let most = match set.kind {
                Some(SetType::BitmapPort) => PORTS,
                _ => set.max_elements,
            };
            self.set_max_entries.get_or_create(&name).set(most.into());
            if let Some(entries) = set.entries {
                self.set_entries.get_or_create(&name).set(entries.into());
            }
        }
    }

    fn held(&self) -> std::sync::MutexGuard<'_, BTreeMap<VirtualServerKey, u32>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pass wrote things of these families.
    pub fn worked(&self, families: &BTreeSet<Family>, took: Duration) {
        for family in families {
            let histogram = self.sync_duration.get_or_create(&by_family(*family));
            histogram.observe(took.as_secs_f64());
        }
    }

    /// All that was told is in the kernel, as far as it took it; `triggers` says when the changes of
    /// endpoints happened.
    pub fn in_kernel(&self, triggers: &[(Family, SystemTime)], now: SystemTime) {
        for family in &self.families {
            let label = by_family(*family);
            self.endpoint_changes_pending.get_or_create(&label).set(0);
            self.service_changes_pending.get_or_create(&label).set(0);
            self.sync_last.get_or_create(&label).set(unix(now));
        }
        // What happened before this process started is no measure of it.
        let own = triggers.iter().filter(|(_, at)| *at > self.process_started);
        for (family, at) in own {
            let took = now.duration_since(*at).unwrap_or_default();
            let histogram = self.programming.get_or_create(&by_family(*family));
            histogram.observe(took.as_secs_f64());
        }
    }

    /// Somebody else changed things, and they were repaired or only reported.
    pub fn drifted(&self, things: usize, repaired: bool) {
        let action = if repaired { "repaired" } else { "reported" };
        let things = u64::try_from(things).unwrap_or(u64::MAX);
        self.drift
            .get_or_create(&[("action", action)])
            .inc_by(things);
    }

    /// So many health check node ports are listened on, and so many not, or not on all addresses.
    pub(crate) fn health_ports(&self, listening: usize, failing: usize) {
        for (state, number) in [("listening", listening), ("failing", failing)] {
            let number = i64::try_from(number).unwrap_or(i64::MAX);
            self.health_ports
                .get_or_create(&[("state", state)])
                .set(number);
        }
    }

    /// A part of a Service is not served.
    pub(crate) fn refused(&self, cause: Cause) {
        self.refused.get_or_create(&[("cause", cause.name())]).inc();
    }

    /// /healthz, or /livez, was answered.
    pub(crate) fn answered(&self, live: bool, ok: bool) {
        let counters = if live { &self.livez } else { &self.healthz };
        let code = if ok { "200" } else { "503" };
        counters.get_or_create(&[("code", code)]).inc();
    }
}

/// The families that an op concerns: the link is of both.
pub fn families_of(op: &Op) -> impl Iterator<Item = Family> {
    let one = match op.key() {
        Key::Set(set) | Key::Entry(set, _) => Some(set.family),
        Key::Rules(family, _) => Some(family),
        Key::VirtualServer(vs) | Key::RealServer(vs, _) => Some(vs.family()),
        Key::Address(address) | Key::Route(address) => Some(Family::of(address)),
        Key::RoutingRule(family, _) => Some(family),
        Key::Link => None,
    };
    Family::ALL
        .into_iter()
        .filter(move |family| one.is_none_or(|one| one == *family))
}

#[cfg(test)]
mod tests;
