//! The loop on a kernel in memory, with a clock that the test moves.

use std::cell::Cell;
use std::rc::Rc;

use ipvs_proxy_core::memory::MemoryKernel;
use ipvs_proxy_core::memory::faults::BadReading;
use ipvs_proxy_core::model::{
    Endpoint, Hint, ObjectName, Service, ServicePort, Slice, SlicePort, TrafficPolicy,
};
use ipvs_proxy_core::op::{FailureKind, Finished};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::state::{State, Value};
use ipvs_proxy_netlink::Protocol;

use super::*;
use crate::serve::{Moment, Question};

type Loop = Controller<MemoryKernel, Box<dyn Fn() -> Instant>>;

struct World {
    controller: Loop,
    now: Rc<Cell<Instant>>,
    status: Arc<Status>,
    findings: mpsc::Receiver<Finding>,
}

thread_local! {
    /// How many times the sysctls were set.
    static SYSCTLS_SET: Cell<u32> = const { Cell::new(0) };
}

const SYNC: Duration = Duration::from_secs(30);

impl World {
    /// A loop whose objects are those of an API server: one Service with two endpoints.
    fn new() -> World {
        let mut world = World::empty(Objects::Api(BTreeSet::new()));
        for (kind, change) in [
            (Kind::Services, service("web", 1)),
            (Kind::EndpointSlices, endpoints("web", 2)),
        ] {
            world.hear(News {
                changes: vec![change],
                listed: Some(kind),
                ..News::default()
            });
        }
        world.settle();
        world
    }

    /// A loop that has heard of nothing.
    fn empty(objects: Objects) -> World {
        let now = Rc::new(Cell::new(Instant::now()));
        let (found, findings) = mpsc::channel(64);
        let status = Status::new(&Family::ALL, SYNC, true, serde_json::Value::Null);
        let status = Arc::new(status);
        let zero = Duration::ZERO;
        let timeouts = ipvs_netlink::Timeouts {
            tcp: zero,
            tcp_fin: zero,
            udp: zero,
        };
        let settings = Settings {
            follow_addresses: false,
            stop: Arc::default(),
            sync_period: SYNC,
            strict_arp: false,
            set_sysctls: |_| {
                SYSCTLS_SET.set(SYSCTLS_SET.get() + 1);
                Vec::new()
            },
            conntrack: sysctl::Once::default(),
            timeouts: Timeouts::open(timeouts).unwrap(),
            drift: Drift::Repair,
            drains: None,
            status: Arc::clone(&status),
            surroundings: Surroundings::default(),
            health_ports: None,
            findings: Some(found),
        };
        let clock: Box<dyn Fn() -> Instant> = {
            let now = Rc::clone(&now);
            Box::new(move || now.get())
        };
        let planner = Planner::new(Config::default());
        World {
            controller: Controller::new(objects, planner, MemoryKernel::new(), settings, clock),
            now,
            status,
            findings,
        }
    }

    fn hear(&mut self, news: News) {
        self.controller.note(Event::Api(ApiEvent::News(news)));
    }

    fn tell(&mut self, change: Change) {
        self.hear(News {
            changes: vec![change],
            ..News::default()
        });
    }

    /// Turns until there is nothing to do now.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.controller.turn() {
                return;
            }
        }
        panic!("no end of turns");
    }

    /// Time goes by, as the loop waits for it.
    fn pass(&mut self, time: Duration) {
        let end = self.now.get() + time;
        self.settle();
        let mut turns = 0;
        loop {
            let next = self.now.get() + self.controller.wait().min(time * 2);
            if next > end {
                break;
            }
            self.now.set(next);
            self.settle();
            turns += 1;
            assert!(turns < 20 * (time.as_secs() + 1), "it spins");
        }
        self.now.set(end);
    }

    fn kernel(&mut self) -> &mut MemoryKernel {
        &mut self.controller.kernel
    }

    fn holds(&self, text: &str) -> bool {
        let mut keys = self.controller.kernel.state.keys();
        keys.any(|key| key.to_string() == text)
    }

    /// What the kernel does not hold of this.
    fn lacking(&self, of: &State) -> Vec<String> {
        let held = &self.controller.kernel.state;
        let lacking = of
            .iter()
            .filter(|(key, value)| held.get(key) != Some(value));
        lacking.map(|(key, _)| key.to_string()).collect()
    }

    fn is(&self, question: Question) -> bool {
        let now = Moment {
            at: self.now.get(),
            ..Moment::now()
        };
        self.status.health().is(question, now)
    }

    fn found(&mut self) -> Vec<String> {
        let mut found = Vec::new();
        while let Ok(finding) = self.findings.try_recv() {
            found.push(format!("{finding:?}"));
        }
        found
    }
}

fn name(of: &str) -> ObjectName {
    ObjectName::new("default", of)
}

fn service(of: &str, number: u8) -> Change {
    Change::Service(
        name(of),
        Some(Service {
            created: None,
            uid: "".into(),
            cluster_ips: vec![[10, 96, 0, number].into()],
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
        }),
    )
}

fn endpoints(of: &str, number: u16) -> Change {
    let endpoint = |n: u16| {
        let [high, low] = n.to_be_bytes();
        Endpoint {
            address: [10, 244, high, low].into(),
            ready: true,
            serving: true,
            terminating: false,
            local: false,
            placed: true,
            node_hint: Hint::Absent,
            zone_hints: None,
        }
    };
    Change::Slice(
        name(of),
        Some(Slice {
            service: name(of),
            family: Family::V4,
            ports: vec![SlicePort {
                name: "".into(),
                protocol: Protocol::Tcp,
                port: 8080,
            }],
            endpoints: (1..=number).map(endpoint).collect(),
            zone_hints: Vec::new(),
        }),
    )
}

const THIRD: &str = "real server 10.244.0.3:8080 of 10.96.0.1:80/tcp";

#[test]
fn news_is_taken_in_between_two_rounds_of_a_big_service() {
    let mut world = World::new();
    world.tell(service("big", 2));
    world.tell(endpoints("big", 20_000));
    for _ in 0..5 {
        assert!(world.controller.turn(), "there is more");
    }
    world.tell(endpoints("web", 3));
    assert!(world.controller.turn());
    assert!(world.holds(THIRD));
}

/// The loop reads no file: it is told what they say. Nothing is written before, and nothing goes before all could be read.
#[test]
fn manifests_are_waited_for_and_what_they_do_not_name_goes_when_all_are_read() {
    let mut world = World::empty(Objects::Manifests(None));
    let old = Key::Address([10, 96, 0, 99].into());
    world.kernel().state.insert(Key::Link, Value::Present);
    world.kernel().state.insert(old, Value::Present);
    let before = world.kernel().state.clone();
    world.pass(SYNC * 3);
    assert_eq!(world.kernel().state, before);
    assert!(!world.is(Question::Readiness));
    let read = |changes, complete: bool| {
        let faults = [(!complete).then(|| "a.yaml".to_owned())];
        Event::Manifests(manifests::News {
            changes,
            faults: faults.into_iter().flatten().collect(),
            complete,
            ..Default::default()
        })
    };
    let changes = vec![service("web", 1), endpoints("web", 3)];
    world.controller.note(read(changes, false));
    world.pass(SYNC);
    assert!(world.holds(THIRD) && world.kernel().state.contains_key(&old));
    assert!(!world.is(Question::Readiness));
    world.controller.note(read(Vec::new(), true));
    world.pass(Duration::from_secs(3));
    assert!(world.holds(THIRD) && !world.kernel().state.contains_key(&old));
    assert!(world.is(Question::Readiness));
}

#[test]
fn an_audit_that_cannot_read_is_told_by_health_metric_and_event() {
    let mut world = World::new();
    assert!(world.is(Question::Health) && world.is(Question::Readiness));
    world.found();
    world.kernel().faults.readings = vec![BadReading::Interrupted; 200].into();
    world.pass(SYNC + Duration::from_secs(1));
    assert!(!world.is(Question::Readiness));
    assert!(world.is(Question::Health), "not yet");
    let found = world.found();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("FailedToReadKernel"), "{found:?}");
    assert!(world.status.metrics.read_failures.get() > 0);
    world.pass(SYNC * 2 + Duration::from_secs(1));
    assert!(!world.is(Question::Health));
    assert_eq!(world.found().len(), 0, "once");
    // Changes go on meanwhile, and it is over soon after its cause.
    world.tell(endpoints("web", 3));
    world.settle();
    assert!(world.holds(THIRD));
    world.kernel().faults.readings.clear();
    world.pass(Duration::from_secs(2));
    assert!(world.is(Question::Readiness) && world.is(Question::Health));
}

#[test]
fn a_link_that_others_replaced_makes_the_node_unready_until_it_is_put_right() {
    let mut world = World::new();
    let address = "address 10.96.0.1 on kube-ipvs0";
    assert!(world.holds(address));
    let of_link = |key: &Key| matches!(key, Key::Link | Key::Address(_));
    world.kernel().state.retain(|key, _| !of_link(key));
    world
        .kernel()
        .refuse
        .insert(Key::Link, FailureKind::Refused);
    world.pass(SYNC * 10);
    assert!(!world.is(Question::Readiness) && !world.is(Question::Health));
    assert!(!world.holds(address));
    // No pause of what failed for it goes on.
    world.kernel().refuse.clear();
    world.kernel().state.insert(Key::Link, Value::Present);
    world.pass(SYNC + Duration::from_secs(1));
    assert!(world.holds(address));
    assert!(world.is(Question::Readiness) && world.is(Question::Health));
}

#[test]
fn what_is_flushed_is_back_within_two_seconds() {
    let flushed: [fn(&Key) -> bool; 3] = [
        |key| matches!(key, Key::VirtualServer(_) | Key::RealServer(..)),
        |key| matches!(key, Key::Entry(..)),
        |key| matches!(key, Key::Rules(..)),
    ];
    for flushed in flushed {
        let mut world = World::new();
        world.pass(Duration::from_secs(7));
        let before = world.kernel().state.clone();
        world.kernel().state.retain(|key, _| !flushed(key));
        assert!(world.kernel().state != before);
        world.pass(Duration::from_secs(2));
        assert_eq!(world.lacking(&before), [""; 0]);
        // A second flush is looked at after a pause.
        world.kernel().state.retain(|key, _| !flushed(key));
        world.pass(Duration::from_secs(7));
        assert_eq!(world.lacking(&before), [""; 0]);
    }
}

/// An update of the module puts IPVS's sysctls back to what they are at the machine's start.
#[test]
fn sysctls_are_set_when_ipvs_was_loaded_anew() {
    let mut world = World::new();
    world.pass(Duration::from_secs(5));
    let before = SYSCTLS_SET.get();
    world.pass(Duration::from_secs(5));
    assert_eq!(SYSCTLS_SET.get(), before);
    world.kernel().module += 1;
    world.pass(Duration::from_secs(2));
    assert_eq!(SYSCTLS_SET.get(), before + 1);
}

#[test]
fn rules_that_others_come_before_are_moved_three_times_and_then_told() {
    let mut world = World::new();
    world.found();
    let rules = world.controller.planner.wanted_rules().next().unwrap().0;
    let misplaced = || Finished::Misplaced(rules, vec!["INPUT: -i cbr0 -j ACCEPT".to_owned()]);
    let mut moved = Vec::new();
    for period in 0..8_u32 {
        world.kernel().log.clear();
        world.kernel().finished.push(misplaced());
        world.settle();
        if world.kernel().log.iter().any(|op| op.key() == rules) {
            moved.push(period);
        }
        world.pass(SYNC);
    }
    assert_eq!(moved, [0, 1, 2]);
    let found = world.found();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("RulesMisplaced"), "{found:?}");
    // One that came once, and not again, is no fight.
    let value = world.kernel().state[&rules].clone();
    let same = Finished::Read(rules, Ok(Some(value)));
    world.kernel().finished.push(same);
    world.settle();
    world.kernel().log.clear();
    world.kernel().finished.push(misplaced());
    world.settle();
    assert!(world.kernel().log.iter().any(|op| op.key() == rules));
}

#[test]
fn the_nodes_zone_counts_where_a_flag_says_its_addresses() {
    let mut world = World::new();
    let Change::Slice(of, Some(mut slice)) = endpoints("web", 2) else {
        unreachable!("a slice")
    };
    slice.zone_hints = vec![vec!["a".into()], vec!["b".into()]];
    for (endpoint, place) in slice.endpoints.iter_mut().zip(1..) {
        endpoint.zone_hints = std::num::NonZeroU16::new(place);
    }
    world.tell(Change::Slice(of, Some(slice)));
    let Change::Service(of, Some(mut service)) = service("web", 1) else {
        unreachable!("a Service")
    };
    for port in &mut service.ports {
        port.node_port = Some(30080);
    }
    world.tell(Change::Service(of, Some(service)));
    let node = |address: &str, zone: &str| {
        Change::Node(ipvs_proxy_core::model::Node {
            addresses: [address.parse().unwrap()].into(),
            primary: vec![address.parse().unwrap()],
            zone: Some(zone.into()),
        })
    };
    // As a start does for the flag.
    world
        .controller
        .planner
        .apply(node("192.168.10.11", "nowhere"));
    world.tell(node("192.168.10.99", "b"));
    // The one that drains has left by then.
    world.pass(Duration::from_secs(10));
    let server = |at: &str, pod: u8| format!("real server 10.244.0.{pod}:8080 of {at}");
    for at in ["10.96.0.1:80/tcp", "192.168.10.11:30080/tcp"] {
        assert!(world.holds(&server(at, 2)), "{at}");
        assert!(!world.holds(&server(at, 1)), "{at}");
    }
    assert!(!world.holds("virtual server 192.168.10.99:30080/tcp"));
}
