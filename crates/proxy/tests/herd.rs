//! Many nodes with the same objects: their first connections go to different endpoints. By the order in which a planner adds real
//! servers, and a model of the kernel's schedulers.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test"
)]

mod world;

use std::collections::{BTreeMap, BTreeSet};

use ipvs_netlink::{RealServerKey, Scheduler, VirtualServerKey};
use ipvs_proxy_core::model::{Change, Endpoint};
use ipvs_proxy_core::op::Op;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::state::Key;
use world::schedulers::Model;
use world::*;

const NODES: usize = 20;
const SPREAD: [Scheduler; 6] = [
    Scheduler::RoundRobin,
    Scheduler::WeightedRoundRobin,
    Scheduler::LeastConnection,
    Scheduler::WeightedLeastConnection,
    Scheduler::ShortestExpectedDelay,
    Scheduler::NeverQueue,
];

fn endpoints(of: &str, count: u8) -> Change {
    let endpoints: Vec<Endpoint> = (1..=count)
        .map(|n| ready(&format!("10.244.1.{n}")))
        .collect();
    put_slice(of, slice(of, &[("http", TCP, 8080)], &endpoints))
}

fn web(address: &str) -> VirtualServerKey {
    vs(&format!("{address}:80"), TCP)
}

/// A node with this name that serves `count` endpoints.
fn node(name: &str, scheduler: Scheduler, count: u8) -> World {
    let config = Config {
        node_name: name.into(),
        scheduler,
        ..Config::default()
    };
    let mut world = World::with(config);
    world.guarded = false;
    let service = service("10.96.0.20", &[("http", TCP, 80)]);
    world.settled([put("s", service), endpoints("s", count)]);
    world
}

fn names() -> Vec<String> {
    (0..NODES).map(|n| format!("node-{n}")).collect()
}

/// The scheduler of a node's kernel, after the ops so far.
fn model(world: &World, of: VirtualServerKey, scheduler: Scheduler) -> Model {
    let mut model = Model::new(scheduler);
    for op in &world.kernel.log {
        match op {
            Op::Add(Key::RealServer(vs, rs), _) if *vs == of => model.add(*rs),
            Op::Remove(Key::RealServer(..)) => panic!("{op}"),
            _ => {}
        }
    }
    model
}

/// How many of the first connections of all nodes each endpoint gets.
fn firsts(nodes: &[World], scheduler: Scheduler, each: usize) -> BTreeMap<RealServerKey, usize> {
    let mut load = BTreeMap::new();
    for node in nodes {
        let mut model = model(node, web("10.96.0.20"), scheduler);
        for _ in 0..each {
            *load.entry(model.pick()).or_default() += 1;
        }
    }
    load
}

#[test]
fn the_first_connections_of_twenty_nodes_spread() {
    for scheduler in SPREAD {
        for count in [2, 3, 10, 40] {
            let nodes: Vec<World> = names().iter().map(|n| node(n, scheduler, count)).collect();
            let load = firsts(&nodes, scheduler, 1);
            let (most, used) = (*load.values().max().unwrap(), load.len());
            println!(
                "{scheduler}, {count} endpoints: {used} of them get the first, one at most {most} of {NODES}"
            );
            // Of 20 that choose at random, that many choose alike once in a thousand times: 17, 14, 8, 5.
            let bound = [(2, 17), (3, 14), (10, 8), (40, 5)];
            let bound = bound.iter().find(|(n, _)| *n == count).unwrap().1;
            assert!(most <= bound, "{scheduler}, {count}: {load:?}");
            // Three of each: no endpoint has to bear all second ones either.
            let more = firsts(&nodes, scheduler, 3);
            assert!(*more.values().max().unwrap() <= 3 * bound, "{more:?}");
        }
        // As nodes without a name do, and kube-proxy does.
        let alike: Vec<World> = (0..NODES).map(|_| node("", scheduler, 10)).collect();
        assert_eq!(firsts(&alike, scheduler, 1).len(), 1);
    }
}

#[test]
fn each_virtual_server_of_a_node_has_its_own_order() {
    let mut world = node("n1", Scheduler::RoundRobin, 10);
    let mut first = BTreeSet::new();
    for n in 0..NODES {
        let (of, address) = (format!("s{n}"), format!("10.96.1.{n}"));
        world.settled([
            put(&of, service(&address, &[("http", TCP, 80)])),
            endpoints(&of, 10),
        ]);
        first.insert(model(&world, web(&address), Scheduler::RoundRobin).pick());
    }
    assert!(first.len() >= 5, "{first:?}");
}

#[test]
fn an_order_is_the_nodes_own_for_good() {
    for scheduler in SPREAD {
        let order = |world: &World| model(world, web("10.96.0.20"), scheduler).order();
        let mut world = node("n1", scheduler, 10);
        let before = order(&world);
        assert_eq!(order(&node("n1", scheduler, 10)), before);
        // A new process writes nothing.
        world.restart();
        assert_eq!(world.settle(), []);
        // One more endpoint is one op, and the others stay as they are.
        let ops = world.settled([endpoints("s", 11)]);
        assert_eq!(ops.len(), 1, "{ops:?}");
        assert_eq!(order(&world)[1..], before);
        world.at_rest();
    }
}

#[test]
fn a_large_service_spreads_as_well() {
    // More than one round can add.
    let nodes = ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"].map(|name| {
        let mut world = node(name, Scheduler::LeastConnection, 0);
        let of = |n: u16| ready(&format!("10.244.{}.{}", n / 200, n % 200));
        let endpoints: Vec<Endpoint> = (0..1000).map(of).collect();
        world.settled([put_slice(
            "s",
            slice("s", &[("http", TCP, 8080)], &endpoints),
        )]);
        world
    });
    let load = firsts(&nodes, Scheduler::LeastConnection, 1);
    assert!(load.len() >= 6, "{load:?}");
    // Also those of low addresses, which a round that goes by address adds first.
    let low = load.keys().filter(|rs| rs.address < ip("10.244.4.0"));
    assert!(low.count() >= 2, "{load:?}");
}

#[test]
fn schedulers_that_choose_alike_keep_one_order() {
    for scheduler in [
        Scheduler::SourceHash,
        Scheduler::DestinationHash,
        Scheduler::MaglevHash,
        Scheduler::WeightedFailover,
        Scheduler::WeightedOverflow,
    ] {
        let order =
            |name: &str| model(&node(name, scheduler, 10), web("10.96.0.20"), scheduler).order();
        assert_eq!(order("n1"), order("n2"), "{scheduler}");
    }
}
