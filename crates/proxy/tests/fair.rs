//! What one Service needs, or others wait for, holds up nobody else's changes.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

use std::cell::Cell;
use std::time::{Duration, Instant};

use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::op::{FailureKind, Finished, Outcome, ReadError};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::state::{Key, LINK};
use ipvs_proxy_core::step::Step;
use ipvs_proxy_iptables::Table;
use ipvs_proxy_netlink::Family;

#[allow(dead_code, reason = "shared with other tests")]
mod common;

use common::{World, service, slice};

const SMALL_COMES: &str = "add real server 10.180.0.2:80 of 10.20.0.1:80/tcp, weight 1";

/// The most ops of a step.
const ROUND: usize = 256;

fn small() -> [Change; 2] {
    [
        service("small").cluster_ip("10.20.0.1").tcp(80).into(),
        slice("small").tcp(80).endpoint("10.180.0.1").into(),
    ]
}

/// The small Service gets another endpoint.
fn change() -> Change {
    let two = slice("small").tcp(80).endpoint("10.180.0.1");
    two.endpoint("10.180.0.2").into()
}

/// Endpoints of the Service `big`, in slices of a thousand.
fn endpoints(number: u32) -> Vec<Change> {
    let all: Vec<u32> = (0..number).collect();
    let slices = all.chunks(1000).enumerate().map(|(n, addresses)| {
        let empty = slice("big").named(&format!("big-{n}")).tcp(80);
        let filled = addresses.iter().fold(empty, |slice, n| {
            slice.endpoint(&format!(
                "10.{}.{}.{}",
                200 + (n >> 16),
                n >> 8 & 255,
                n & 255
            ))
        });
        filled.into()
    });
    slices.collect()
}

fn step(world: &mut World) -> Step {
    let now = world.now;
    world.planner.step(&mut world.kernel, &|| now)
}

fn words(step: &Step) -> Vec<String> {
    step.ops.iter().map(|(op, _)| op.to_string()).collect()
}

/// The steps until an op is carried out, each with its number of ops.
fn steps_until(world: &mut World, op: &str) -> Vec<usize> {
    let mut steps = Vec::new();
    loop {
        let step = step(world);
        steps.push(step.ops.len());
        if words(&step).iter().any(|done| done == op) {
            return steps;
        }
        assert!(!step.rests, "nothing is left and {op} was not done");
    }
}

/// A change of another Service is in the very next rounds, whatever a big one needs, and no round is long.
#[track_caller]
fn beside(big: impl IntoIterator<Item = Change>) {
    let mut world = World::new();
    small().into_iter().for_each(|change| world.put(change));
    world.settle();
    big.into_iter().for_each(|change| world.put(change));
    let mut done = 0;
    for after in [1, 2, 5, 20] {
        for _ in 0..after {
            done += step(&mut world).ops.len();
        }
        world.put(change());
        let comes = match after {
            1 => SMALL_COMES,
            _ => "update real server 10.180.0.2:80 of 10.20.0.1:80/tcp, weight 1",
        };
        let steps = steps_until(&mut world, comes);
        assert!(steps.len() <= 2, "{steps:?}");
        assert!(steps.iter().all(|ops| *ops <= ROUND), "{steps:?}");
        let [_, one] = small();
        world.put(one);
        let gone = "update real server 10.180.0.2:80 of 10.20.0.1:80/tcp, weight 0";
        assert!(steps_until(&mut world, gone).len() <= 2);
    }
    // It goes on meanwhile, and comes to its end.
    assert!(done > ROUND, "{done}");
    world.settle();
    assert!(world.kernel.state.len() > 10_000);
}

#[test]
fn beside_twenty_thousand_endpoints() {
    let service: Change = service("big").cluster_ip("10.20.0.2").tcp(80).into();
    beside(endpoints(20_000).into_iter().chain([service]));
}

#[test]
fn beside_four_thousand_external_addresses() {
    let empty = service("big").cluster_ip("10.20.0.2").tcp(80);
    let big = (0..4000).fold(empty, |service, n: u32| {
        service.external_ip(&format!("198.18.{}.{}", n >> 8, n & 255))
    });
    beside(endpoints(1).into_iter().chain([big.into()]));
}

#[test]
fn beside_many_services_that_come_at_once() {
    beside((0..3000_u32).flat_map(|n| {
        let name = format!("s{n}");
        let address = format!("10.21.{}.{}", n >> 8, n & 255);
        let one = slice(&name).tcp(80).endpoint("10.180.0.7");
        let service = service(&name).cluster_ip(&address).tcp(80);
        [service.into(), one.into()]
    }));
}

/// Services that go, and others that come in the same moment and claim what these had: planned in portions, but nothing is taken
/// away that another one keeps, and nobody is told of a conflict that was over before it could be one.
#[test]
fn what_passes_from_thousands_of_services_to_others_stays() {
    for comes_first in [true, false] {
        let mut world = World::new();
        let vip = |n: u32| format!("10.21.{}.{}", n >> 8, n & 255);
        let coming = |world: &mut World, generation: &str| {
            for n in 0..2000_u32 {
                let name = format!("{generation}{n}");
                world.put(service(&name).cluster_ip(&vip(n)).tcp(80));
                world.put(slice(&name).tcp(80).endpoint("10.180.0.7"));
            }
        };
        let going = |world: &mut World| (0..2000).for_each(|n| world.no_service(&format!("a{n}")));
        coming(&mut world, "a");
        world.settle();
        let before = world.kernel.state.clone();
        if comes_first {
            coming(&mut world, "b");
            going(&mut world);
        } else {
            going(&mut world);
            coming(&mut world, "b");
        }
        loop {
            let step = step(&mut world);
            assert_eq!(words(&step), Vec::<String>::new(), "{comes_first}");
            assert!(world.planner.take_conflicts().is_empty(), "{comes_first}");
            if step.rests {
                break;
            }
        }
        assert_eq!(world.kernel.state, before);
    }
}

/// What is held back while Services wait to be planned goes, also when a reading of the kernel planned them all at once.
#[test]
fn what_was_held_back_goes_after_a_reading() {
    let mut world = World::new();
    for n in 0..2000_u32 {
        let address = format!("10.21.{}.{}", n >> 8, n & 255);
        world.put(service(&format!("s{n}")).cluster_ip(&address).tcp(80));
    }
    world.settle();
    // Nothing comes of these, which wait for longer.
    (0..1900).for_each(|n| world.put(slice(&format!("s{n}")).tcp(80)));
    (1900..2000).for_each(|n| world.no_service(&format!("s{n}")));
    assert_eq!(words(&step(&mut world)), Vec::<String>::new());
    let wanted = world.planner.desired();
    while !step(&mut world).rests {}
    assert_eq!(world.kernel.state, wanted);
}

/// How many ops of a kind each step carries out until there is nothing left to do, steps without any left out.
fn rounds_of(world: &mut World, kind: fn(&Key) -> bool) -> Vec<usize> {
    let mut rounds = Vec::new();
    loop {
        let step = step(world);
        let ops = step.ops.iter().filter(|(op, _)| kind(&op.key())).count();
        rounds.extend((ops > 0).then_some(ops));
        if step.rests {
            return rounds;
        }
    }
}

/// Real servers that are added to a crowd make a round shorter: the kernel looks through all of them for each.
#[test]
fn a_round_costs_about_the_same_however_many_real_servers_there_are() {
    let mut world = World::new();
    world.put(service("big").cluster_ip("10.20.0.2").tcp(80));
    endpoints(20_000)
        .into_iter()
        .for_each(|change| world.put(change));
    let rounds = rounds_of(&mut world, |key| matches!(key, Key::RealServer(..)));
    // The last one is what is left.
    let late = rounds[rounds.len() - 2];
    assert!(late * 10 < ROUND && rounds.contains(&ROUND), "{rounds:?}");
}

/// So do addresses on a link that has many.
#[test]
fn a_round_costs_about_the_same_however_many_addresses_there_are() {
    let mut world = World::new();
    let empty = service("big").cluster_ip("10.20.0.2").tcp(80);
    world.put((0..4000).fold(empty, |service, n: u32| {
        service.external_ip(&format!("198.18.{}.{}", n >> 8, n & 255))
    }));
    let is_address = |key: &Key| matches!(key, Key::Address(_));
    let came = rounds_of(&mut world, is_address);
    let late = came[came.len() - 2];
    assert!(late * 8 < ROUND && came.contains(&ROUND), "{came:?}");
    world.no_service("big");
    let went = rounds_of(&mut world, is_address);
    assert!(went[0] * 8 < ROUND, "{went:?}");
}

/// A Service that is large is planned once a second at most, others at once.
#[test]
fn a_large_service_that_changes_all_the_time_is_planned_once_a_second() {
    let mut world = World::new();
    world.put(service("big").cluster_ip("10.20.0.2").tcp(80));
    endpoints(20_000)
        .into_iter()
        .for_each(|change| world.put(change));
    small().into_iter().for_each(|change| world.put(change));
    world.settle();
    let flap = |ready: bool| {
        let one = slice("big")
            .named("flapping")
            .tcp(80)
            .endpoint("10.180.9.9");
        if ready { one } else { one.not_ready() }
    };
    let start = world.now;
    let mut written = 0;
    for n in 0..50 {
        world.now = start + Duration::from_millis(100 * n);
        world.put(flap(n % 2 == 0));
        written += step(&mut world).ops.len();
    }
    assert!((1..=6).contains(&written), "{written} in 5 s");
    world.put(change());
    assert_eq!(steps_until(&mut world, SMALL_COMES).len(), 1);
    // Its last word counts.
    let due = world.planner.next_deadline().unwrap();
    assert!(due <= world.now + Duration::from_secs(1));
    world.now = due;
    world.put(flap(true));
    world.settle();
    let flapping = "real server 10.180.9.9:80 of 10.20.0.2:80/tcp";
    assert!(
        world
            .kernel
            .state
            .keys()
            .any(|key| key.to_string() == flapping)
    );
}

/// A pause after a failure begins when the op has failed, not when its round began: one that takes long is not tried again at once.
#[test]
fn a_pause_begins_when_the_op_has_failed() {
    let mut world = World::new();
    small().into_iter().for_each(|change| world.put(change));
    let rules = Key::Rules(Family::V4, Table::Filter);
    world.kernel.refuse.insert(rules, FailureKind::Busy);
    let start = world.now;
    let passed = Cell::new(Duration::ZERO);
    // The clock goes on by 20 s while the kernel works.
    let clock = || start + passed.replace(passed.get() + Duration::from_secs(20));
    let mut tries = 0;
    for _ in 0..20 {
        let before = clock();
        let step = world.planner.step(&mut world.kernel, &clock);
        let failed = step.ops.iter().filter(|(_, o)| *o != Outcome::Done).count();
        if failed > 0 {
            tries += failed;
            let next = world.planner.next_deadline().unwrap();
            assert!(next >= before + Duration::from_secs(41), "not at once");
        }
    }
    assert!(tries > 0);
}

/// What an op that was started elsewhere is about gets no other; all that does not rest on it goes on.
#[test]
fn only_what_rests_on_rules_waits_for_them() {
    let mut world = World::new();
    small().into_iter().for_each(|change| world.put(change));
    let rules: Vec<Key> = world.planner.wanted_rules().map(|(key, _)| key).collect();
    world.kernel.slow.extend(&rules);
    world.settle();
    let bound = |world: &World| {
        let keys = world.kernel.state.keys();
        keys.filter(|key| matches!(key, Key::Address(_))).count()
    };
    let server = "virtual server 10.20.0.1:80/tcp";
    assert!(
        world
            .kernel
            .state
            .keys()
            .any(|key| key.to_string() == server)
    );
    assert_eq!(bound(&world), 0, "not before the filter");
    world.put(change());
    assert_eq!(words(&step(&mut world)), [SMALL_COMES]);
    // They have come to their end.
    world.kernel.finish_slow();
    world.settle();
    assert_eq!(bound(&world), 1);
    assert_eq!(
        world
            .kernel
            .log
            .iter()
            .filter(|op| rules.contains(&op.key()))
            .count(),
        rules.len()
    );
}

/// Rules that can't be read are their table's fault alone, and are read again after a pause that grows.
#[test]
fn rules_that_cannot_be_read_hold_up_nothing_else() {
    let mut world = World::new();
    small().into_iter().for_each(|change| world.put(change));
    let broken = Key::Rules(Family::V6, Table::Nat);
    let wanted = world.planner.base().clone();
    let mut reading = ipvs_proxy_core::op::Dataplane::read(&mut world.kernel, &wanted).unwrap();
    reading.unread.insert(broken);
    world.planner.resync(reading, true, world.now);
    let error = || Finished::Read(broken, Err(ReadError("incompatible".to_owned())));
    world.kernel.finished.push(error());
    world.settle();
    let address = format!("address 10.20.0.1 on {LINK}");
    assert!(
        world
            .kernel
            .state
            .keys()
            .any(|key| key.to_string() == address)
    );
    assert!(
        !world.kernel.state.contains_key(&broken),
        "not written unread"
    );
    // It is read again at its deadline, not before, and nothing is due in the past.
    for _ in 0..5 {
        world.kernel.unreadable.insert(broken);
        let due = world.planner.next_deadline().unwrap();
        assert!(due > world.now, "there is nothing to do now");
        world.now = due;
        world.settle();
    }
    world.kernel.unreadable.clear();
    world.now = world.planner.next_deadline().unwrap();
    world.settle();
    assert!(world.kernel.state.contains_key(&broken));
    assert_eq!(world.planner.failing().count(), 0);
}

/// What the tools of iptables show comes late where they hang; then the kernel is as if it had been known before.
#[test]
fn what_the_tools_show_late_counts_as_known_before() {
    let both = || -> [Change; 3] {
        [
            service("both")
                .cluster_ip("10.20.0.9")
                .cluster_ip("fd20::9")
                .tcp(80)
                .into(),
            slice("both").tcp(80).endpoint("10.180.0.9").into(),
            slice("both")
                .named("both-6")
                .tcp(80)
                .endpoint("fd80::9")
                .into(),
        ]
    };
    let shown =
        |families: &[Family], random_fully| Finished::Tools(families.to_vec(), random_fully);
    let mut world = World::new();
    let wanted = world.planner.base().clone();
    let mut reading = ipvs_proxy_core::op::Dataplane::read(&mut world.kernel, &wanted).unwrap();
    let rules = wanted.keys().filter(|key| matches!(key, Key::Rules(..)));
    reading.unread.extend(rules);
    let failures: Vec<Finished> = reading
        .unread
        .iter()
        .map(|key| Finished::Read(*key, Err(ReadError("it hangs".to_owned()))))
        .collect();
    world.planner.resync(reading, true, world.now);
    both().into_iter().for_each(|change| world.put(change));
    world.kernel.finished.extend(failures);
    world.settle();
    let without_rules = world.kernel.state.clone();
    assert!(
        !without_rules
            .keys()
            .any(|key| matches!(key, Key::Rules(..) | Key::Address(_)))
    );
    assert!(
        without_rules
            .keys()
            .any(|key| matches!(key, Key::RealServer(..)))
    );
    for (families, random_fully) in [
        (&[Family::V4][..], false),
        (&Family::ALL, false),
        (&Family::ALL, true),
        (&[Family::V4], true),
    ] {
        world.kernel.finished.push(shown(families, random_fully));
        world.pass(Duration::from_secs(70));
        let mut known = World::with(Config {
            families: families.to_vec(),
            random_fully,
            ..Config::default()
        });
        both().into_iter().for_each(|change| known.put(change));
        known.settle();
        assert_eq!(world.kernel.state, known.kernel.state, "{families:?}");
        assert_eq!(world.planner.failing().count(), 0);
        world.kernel.finished.push(shown(families, random_fully));
        assert!(step(&mut world).ops.is_empty(), "nothing new");
    }
}

/// What failed for the lack of something is tried as soon as that is there, however long its pause.
#[test]
fn a_cause_that_is_gone_frees_what_it_held_up() {
    let mut world = World::new();
    small().into_iter().for_each(|change| world.put(change));
    world.kernel.refuse.insert(Key::Link, FailureKind::Refused);
    world.settle();
    world.kernel.refuse.clear();
    world.pass(Duration::from_secs(2));
    assert!(
        world
            .kernel
            .state
            .keys()
            .any(|key| matches!(key, Key::Address(_)))
    );
    // Others put something else in its place; addresses fail, for minutes.
    let server = *world
        .kernel
        .state
        .keys()
        .find(|key| matches!(key, Key::VirtualServer(_)))
        .unwrap();
    world.kernel.refuse.insert(server, FailureKind::Refused);
    world
        .kernel
        .state
        .retain(|key, _| !matches!(key, Key::VirtualServer(_) | Key::RealServer(..)));
    world.resync(true);
    world.pass(Duration::from_secs(600));
    assert!(!world.kernel.state.contains_key(&server));
    world.kernel.refuse.clear();
    world.pass(Duration::from_secs(61));
    let real = world
        .kernel
        .state
        .keys()
        .filter(|key| matches!(key, Key::RealServer(..)));
    assert_eq!(real.count(), 1, "with its virtual server");
}

/// An endpoint's change touches its own keys, and tells no conflict again.
#[test]
fn one_endpoint_among_thousands_is_one_op_and_no_news() {
    let mut world = World::new();
    for name in ["big", "other"] {
        world.put(service(name).cluster_ip("10.20.0.2").tcp(80));
    }
    endpoints(2000)
        .into_iter()
        .for_each(|change| world.put(change));
    world.settle();
    assert_eq!(world.planner.take_conflicts().len(), 1);
    world.put(slice("big").named("more").tcp(80).endpoint("10.180.9.9"));
    let now = world.now;
    let ops = world.planner.next(now);
    assert_eq!(ops.len(), 1);
    assert_eq!(world.planner.take_conflicts().len(), 0, "told before");
    let outcomes = vec![Outcome::Done; 1];
    world
        .planner
        .commit(ops.into_iter().zip(outcomes), Instant::now());
}
