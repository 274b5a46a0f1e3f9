//! Random histories of a small cluster against the kernel in memory.
//!
//! Whatever the order of changes, failures and restarts: the end is the plan from scratch, what
//! was there all along was never taken away, parents come before children, no VIP ever
//! reaches a socket of the host, and no client is sent to an endpoint that can't answer it, not even between two ops.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use ipvs_netlink::Scheduler;
use ipvs_proxy_core::guard::Needed;
use ipvs_proxy_core::health::HealthPort;
use ipvs_proxy_core::memory::MemoryKernel;
use ipvs_proxy_core::memory::faults::{BadReading, Fault};
use ipvs_proxy_core::model::{
    Change, Endpoint, Hint, Node, ObjectName, Service, ServicePort, Slice, SlicePort, TrafficPolicy,
};
use ipvs_proxy_core::op::{Dataplane, FailureKind, Op, Outcome};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, State, Value as KernelValue};
use ipvs_proxy_netlink::{Family, Protocol};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Change(Change),
    /// Let the planner work until it has nothing to do.
    Settle,
    /// Let it work for one round only.
    Round,
    /// From now on refuse ops on the nth key of the wanted state.
    Refuse(usize, FailureKind),
    /// The nth op from now is carried out or not, and its answer is lost.
    Lose(usize, Fault),
    /// The next reading is interrupted, or lacks something.
    Misread(BadReading),
    /// Refuse nothing any more.
    Forgive,
    /// A new process reads the kernel.
    Restart,
    /// Connections of every real server.
    Connections(u64),
    /// Somebody takes away the nth thing that the kernel holds, and it is noticed.
    Tamper(usize),
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![
        Just(Protocol::Tcp),
        Just(Protocol::Udp),
        Just(Protocol::Sctp)
    ]
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)]
}

fn hint() -> impl Strategy<Value = Hint> {
    prop_oneof![
        2 => Just(Hint::Absent),
        1 => Just(Hint::Elsewhere),
        1 => Just(Hint::Here),
    ]
}

/// Zones a and b, or none.
fn zone_hints() -> impl Strategy<Value = Option<NonZeroU16>> {
    (0..3_u16).prop_map(NonZeroU16::new)
}

fn service(index: usize) -> impl Strategy<Value = Service> {
    let port = (
        0..2_usize,
        protocol(),
        80..82_u16,
        prop::option::of(30000..30003_u16),
    );
    (
        prop::collection::vec(port, 1..3),
        // ClusterIPs clash on purpose: two Services may claim one.
        (index..index + 2, prop::bool::ANY),
        prop::option::of(Just(10800)),
        prop::option::of(0..3_i64),
        // Outside addresses clash, too, and may be the node's own.
        prop::collection::vec(0..3_u8, 0..3),
        prop::collection::vec(1..4_u8, 0..2),
        // These clash as well.
        prop::option::of(30010..30012_u16),
        [policy(), policy()],
    )
        .prop_map(
            move |(
                ports,
                (address, dual),
                affinity_timeout_s,
                created,
                external,
                lb,
                health,
                policies,
            )| {
                let mut cluster_ips = vec![ip(&format!("10.96.0.{address}"))];
                if dual {
                    cluster_ips.push(ip(&format!("fd96::{address}")));
                }
                let ports =
                    ports
                        .into_iter()
                        .map(|(name, protocol, port, node_port)| ServicePort {
                            name: format!("p{name}").into(),
                            protocol,
                            port,
                            node_port,
                        });
                Service {
                    created,
                    uid: "".into(),
                    cluster_ips,
                    external_ips: external
                        .iter()
                        .map(|n| ip(&format!("203.0.113.{n}")))
                        .collect(),
                    load_balancer_ips: lb.iter().map(|n| ip(&format!("192.168.0.{n}"))).collect(),
                    ports: ports.collect(),
                    affinity_timeout_s,
                    drain_timeout: None,
                    internal_policy: policies[0],
                    external_policy: policies[1],
                    health_check_node_port: health,
                }
            },
        )
}

fn name(index: usize) -> ObjectName {
    match index {
        0 => ObjectName::new("default", "kubernetes"),
        _ => ObjectName::new("ns", &format!("svc{index}")),
    }
}

fn slice() -> impl Strategy<Value = Slice> {
    let endpoint = (
        1..5_u8,
        prop::bool::ANY,
        prop::bool::ANY,
        prop::bool::ANY,
        prop::bool::ANY,
        hint(),
        zone_hints(),
    );
    let port = (0..2_usize, protocol(), 8080..8082_u16);
    (
        0..4_usize,
        prop::bool::ANY,
        prop::collection::vec(port, 0..4),
        prop::collection::vec(endpoint, 0..4),
    )
        .prop_map(|(owner, v6, ports, endpoints)| Slice {
            service: name(owner),
            family: if v6 { Family::V6 } else { Family::V4 },
            ports: ports
                .into_iter()
                .map(|(name, protocol, port)| SlicePort {
                    name: format!("p{name}").into(),
                    protocol,
                    port,
                })
                .collect(),
            endpoints: endpoints
                .into_iter()
                .map(
                    |(last, ready, serving, terminating, local, node_hint, zone_hints)| Endpoint {
                        address: ip(&if v6 {
                            format!("fd44::{last}")
                        } else {
                            format!("10.0.0.{last}")
                        }),
                        ready,
                        serving,
                        terminating,
                        local,
                        placed: true,
                        node_hint,
                        zone_hints,
                    },
                )
                .collect(),
            zone_hints: vec![vec!["a".into()], vec!["b".into()]],
        })
}

fn change() -> impl Strategy<Value = Change> {
    let zone = prop_oneof![Just(None), Just(Some("a".into())), Just(Some("b".into()))];
    let addresses = prop::collection::btree_set(1..4_u8, 0..3);
    let node = (addresses, zone).prop_map(|(lasts, zone)| {
        let addresses = lasts
            .into_iter()
            .map(|last| ip(&format!("192.168.0.{last}")))
            .collect();
        Change::Node(Node {
            addresses,
            primary: Vec::new(),
            zone,
        })
    });
    let needed = prop::collection::btree_set((0..4_u8, prop::option::of(80..82_u16)), 0..3)
        .prop_map(|all| {
            let all = all.into_iter().map(|(last, port)| Needed {
                address: ip(&format!("203.0.113.{last}")),
                port,
            });
            Change::Needed("others".into(), all.collect())
        });
    prop_oneof![
        6 => (0..4_usize).prop_flat_map(|i| prop::option::weighted(0.8, service(i))
            .prop_map(move |s| Change::Service(name(i), s))),
        6 => (0..5_usize, prop::option::weighted(0.8, slice()))
            .prop_map(|(i, s)| Change::Slice(ObjectName::new("ns", &format!("slice{i}")), s)),
        1 => node,
        1 => needed,
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = prop_oneof![
        Just(FailureKind::Busy),
        Just(FailureKind::Refused),
        Just(FailureKind::Unknown),
    ];
    let step = prop_oneof![
        10 => change().prop_map(Step::Change),
        6 => Just(Step::Settle),
        3 => Just(Step::Round),
        1 => (0..400_usize, kind).prop_map(|(n, kind)| Step::Refuse(n, kind)),
        1 => (0..30_usize, prop_oneof![Just(Fault::LostAnswer), Just(Fault::LostRequest)])
            .prop_map(|(n, fault)| Step::Lose(n, fault)),
        1 => prop_oneof![Just(BadReading::Interrupted), any::<u64>().prop_map(BadReading::Torn)]
            .prop_map(Step::Misread),
        1 => Just(Step::Forgive),
        1 => Just(Step::Restart),
        1 => (0..2_u64).prop_map(Step::Connections),
        1 => (0..400_usize).prop_map(Step::Tamper),
    ];
    prop::collection::vec(step, 1..40)
}

struct World {
    config: Config,
    planner: Planner,
    kernel: MemoryKernel,
    now: Instant,
    /// The kernel was read since the process began.
    adopted: bool,
    /// A reading lacked something that was there.
    misread: bool,
    history: Vec<Change>,
    /// What is answered on health check node ports.
    answers: BTreeMap<u16, HealthPort>,
}

impl World {
    fn new(config: Config) -> World {
        World {
            planner: Planner::new(config.clone()),
            config,
            kernel: MemoryKernel::new(),
            now: Instant::now(),
            adopted: true,
            misread: false,
            history: Vec::new(),
            answers: BTreeMap::new(),
        }
    }

    /// Everything a controller does once: one round, drains, and reading when in doubt.
    fn round(&mut self) -> bool {
        if !self.adopted || self.planner.in_doubt() {
            self.read();
        }
        if !self.adopted {
            return true;
        }
        self.kernel.guarded = true;
        let now = self.now;
        let step = self.planner.step(&mut self.kernel, &|| now);
        assert_eq!(self.kernel.leaks, []);
        self.answer();
        for (op, outcome) in &step.ops {
            if let Outcome::Failed(failure) = outcome {
                let refused = self.kernel.refuse.contains_key(&op.key());
                let orphan = matches!(op.key(), Key::RealServer(vs, _)
                    if !self.kernel.state.contains_key(&Key::VirtualServer(vs)));
                // What was not seen for what it is, is found out this way.
                let lost = failure.text == "no answer" || self.misread;
                assert!(refused || orphan || lost, "{op:?} failed: {failure}");
            }
        }
        !step.rests || self.planner.in_doubt()
    }

    fn answer(&mut self) {
        for (port, answer) in self.planner.take_health_ports() {
            let before = match answer {
                Some(answer) => self.answers.insert(port, answer),
                None => self.answers.remove(&port),
            };
            assert_ne!(before.as_ref(), self.answers.get(&port), "no news");
        }
    }

    fn settle(&mut self) {
        for _ in 0..2000 {
            if !self.round() {
                return;
            }
        }
        panic!("no end of ops");
    }

    fn restart(&mut self) {
        self.planner = Planner::new(self.config.clone());
        for change in &self.history {
            self.planner.apply(change.clone());
        }
        self.adopted = false;
        self.answers.clear();
        self.read();
    }

    /// As the controller reads: an interrupted reading is none.
    fn read(&mut self) {
        if let Ok(read) = self.planner.read_agreed(&mut self.kernel) {
            self.planner.resync(read, true, self.now);
            self.adopted = true;
        }
    }

    /// What the controller does from time to time.
    fn audit(&mut self) {
        self.planner.begin_reading();
        let read = self.kernel.read(self.planner.base()).unwrap();
        let drift = self.planner.differing(&read);
        assert!(self.misread || drift.is_empty(), "{drift:?}");
        self.planner.adopt(&drift, &read.state, self.now);
    }

    /// The plan from scratch.
    fn wanted(&self) -> State {
        let mut planner = Planner::new(self.config.clone());
        for change in &self.history {
            planner.apply(change.clone());
        }
        planner.desired()
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Change(change) => {
                self.history.push(change.clone());
                self.planner.apply(change);
            }
            Step::Settle => self.settle(),
            Step::Round => {
                self.round();
            }
            Step::Refuse(n, kind) => {
                if let Some(key) = self.wanted().keys().nth(n) {
                    self.kernel.refuse.insert(*key, kind);
                }
            }
            Step::Lose(nth, fault) => self.kernel.faults.strike(nth, fault),
            // One at a time: what two readings lack is not there, as far as anybody can tell.
            Step::Misread(bad) => {
                self.misread |= matches!(bad, BadReading::Torn(_));
                self.kernel.faults.readings = [bad].into();
            }
            Step::Forgive => self.kernel.refuse.clear(),
            Step::Restart => self.restart(),
            Step::Connections(count) => {
                let servers = self.kernel.state.keys().filter_map(|key| match key {
                    Key::RealServer(vs, rs) => Some(((*vs, *rs), count)),
                    _ => None,
                });
                self.kernel.connections = servers.collect();
            }
            Step::Tamper(n) => {
                let key = self.kernel.state.keys().nth(n).copied();
                // The guard itself taken away exposes what it guarded, whatever we do.
                if let Some(key @ (Key::VirtualServer(_) | Key::RealServer(..))) = key {
                    if let Key::VirtualServer(vs) = key {
                        self.kernel.state.retain(|k, _| match k {
                            Key::RealServer(of, _) => *of != vs,
                            _ => true,
                        });
                        // Whoever removes a server also lets nobody in, for the guard's sake.
                        self.kernel.state.retain(|k, _| {
                            !matches!((k, vs), (
                            Key::Entry(_, ipset_rs::Entry::IpPort(a, p, n)),
                            ipvs_netlink::VirtualServerKey::Address { address, port, protocol },
                        ) if *a == address && *p == protocol && *n == port)
                        });
                    }
                    self.kernel.state.remove(&key);
                    self.adopted = false;
                    self.read();
                }
            }
        }
    }

    /// Lets every pause and drain come to its end, and an audit find what a bad reading hid.
    fn finish(&mut self) {
        self.rest();
        self.audit();
        self.rest();
    }

    fn rest(&mut self) {
        self.kernel.refuse.clear();
        self.kernel.faults.clear();
        self.kernel.connections.clear();
        for _ in 0..20 {
            self.settle();
            match self.planner.next_deadline() {
                Some(deadline) => self.now = deadline.max(self.now) + Duration::from_millis(1),
                None => return,
            }
        }
        panic!(
            "there is always another deadline: {:?}",
            self.planner.next_deadline()
        );
    }
}

fn scheduler() -> impl Strategy<Value = Config> {
    prop_oneof![
        Just(Scheduler::LeastConnection),
        Just(Scheduler::DestinationHash),
        Just(Scheduler::SourceHash),
    ]
    .prop_map(|scheduler| Config {
        scheduler,
        ..Config::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_history_ends_at_the_plan_from_scratch(config in scheduler(), steps in steps()) {
        let mut world = World::new(config);
        for step in steps {
            world.take(step);
        }
        world.finish();
        prop_assert_eq!(&world.kernel.state, &world.wanted());
        let mut anew = World::new(world.config.clone());
        world.history.iter().for_each(|c| anew.take(Step::Change(c.clone())));
        anew.settle();
        prop_assert_eq!(&world.answers, &anew.answers);

        // A second pass, a full reading and a restart write nothing.
        world.kernel.log.clear();
        world.settle();
        let read = world.kernel.read(world.planner.base()).unwrap();
        world.planner.resync(read, true, world.now);
        world.settle();
        world.restart();
        world.settle();
        prop_assert_eq!(&world.kernel.log, &Vec::<Op>::new());
    }

    #[test]
    fn what_stays_is_never_taken_away(
        config in scheduler(),
        before in prop::collection::vec(change(), 1..25),
        after in prop::collection::vec(change(), 1..6),
        restart in prop::bool::ANY,
    ) {
        let mut world = World::new(config);
        for change in before {
            world.take(Step::Change(change));
        }
        world.settle();
        let old = world.wanted();
        world.kernel.log.clear();
        for change in after {
            world.take(Step::Change(change));
        }
        if restart {
            world.restart();
        }
        world.settle();
        let new = world.wanted();
        let mut seen: BTreeMap<Key, usize> = BTreeMap::new();
        for op in &world.kernel.log {
            *seen.entry(op.key()).or_default() += 1;
            let key = op.key();
            if let (Some(a), Some(b)) = (old.get(&key), new.get(&key)) {
                prop_assert!(a != b && matches!(op, Op::Update(..)), "{:?}", op);
            }
        }
        // Nothing is done twice in one pass, but for a server that drains with no connection.
        for (key, count) in seen {
            prop_assert!(count == 1 || matches!(key, Key::RealServer(..)), "{key:?} {count} times");
        }
    }
}

#[test]
fn nothing_unclaimed_goes_before_every_source_has_listed() {
    let mut world = World::new(Config::default());
    for i in 1..3 {
        world.take(Step::Change(Change::Service(name(i), Some(one_port(i)))));
    }
    world.settle();
    let before = world.kernel.state.clone();
    world
        .history
        .retain(|c| !matches!(c, Change::Service(n, _) if *n == name(1)));
    world.planner = Planner::new(world.config.clone());
    world
        .history
        .iter()
        .for_each(|change| world.planner.apply(change.clone()));
    world.planner.resync(before.clone(), false, world.now);
    world.kernel.log.clear();
    world.settle();
    assert_eq!(world.kernel.log, []);
    // It is listed after all, changed: only the difference is written.
    let changed = Service {
        affinity_timeout_s: Some(60),
        ..one_port(1)
    };
    world.take(Step::Change(Change::Service(name(1), Some(changed))));
    world.settle();
    assert_eq!(world.kernel.log.len(), 1, "{:?}", world.kernel.log);
    // And what is known to be gone goes, held or not.
    world.take(Step::Change(Change::Service(name(1), None)));
    world.settle();
    assert_eq!(world.kernel.state, world.wanted());
}

fn one_port(index: usize) -> Service {
    Service {
        created: None,
        uid: "".into(),
        cluster_ips: vec![ip(&format!("10.96.0.{index}"))],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: vec![ServicePort {
            name: "".into(),
            protocol: Protocol::Tcp,
            port: 80,
            node_port: None,
        }],
        affinity_timeout_s: None,
        drain_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
    }
}

#[test]
fn a_refused_key_stops_nothing_else_and_is_tried_again() {
    let mut world = World::new(Config::default());
    for i in 1..4 {
        let change = Change::Service(name(i), Some(one_port(i)));
        world.take(Step::Change(change));
    }
    let wanted = world.wanted();
    let servers: Vec<Key> = wanted
        .keys()
        .filter(|k| matches!(k, Key::VirtualServer(_)))
        .copied()
        .collect();
    world.kernel.refuse.insert(servers[1], FailureKind::Refused);
    world.settle();
    let missing: BTreeSet<&Key> = wanted
        .keys()
        .filter(|k| !world.kernel.state.contains_key(k))
        .collect();
    // Its address waits for it; all else is there.
    assert_eq!(missing.len(), 2, "{missing:?}");
    assert!(missing.contains(&servers[1]));
    let tries = world
        .kernel
        .log
        .iter()
        .filter(|op| op.key() == servers[1])
        .count();
    assert_eq!(tries, 1);
    world.finish();
    assert_eq!(world.kernel.state, wanted);
    assert!(
        wanted
            .values()
            .all(|v| !matches!(v, KernelValue::RealServer(0)))
    );
}
