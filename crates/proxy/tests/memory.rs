//! What the planner holds for a large cluster, and what one change costs: counted in bytes and
//! allocations, which do not depend on the machine's mood.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test")]

use std::alloc::System;
use std::time::{Duration, Instant};

use ipvs_proxy_core::memory::MemoryKernel;
use ipvs_proxy_core::model::{
    Change, Endpoint, Hint, Node, ObjectName, Service, ServicePort, Slice, SlicePort, TrafficPolicy,
};
use ipvs_proxy_core::op::Dataplane;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_netlink::{Family, Protocol};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const ENDPOINTS: u32 = 10;

fn name(number: u32) -> ObjectName {
    ObjectName::new("namespace", &format!("service-{number}"))
}

fn service(number: u32) -> Service {
    Service {
        created: Some(i64::from(number)),
        uid: format!("00000000-0000-0000-0000-{number:012}").into(),
        cluster_ips: vec![std::net::Ipv4Addr::from(0x0a60_0000 + number).into()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: vec![ServicePort {
            name: "http".into(),
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

fn slice(number: u32, endpoints: u32) -> Slice {
    let endpoint = |i| Endpoint {
        address: std::net::Ipv4Addr::from(0x0b00_0000 + number * 16 + i).into(),
        ready: true,
        serving: true,
        terminating: false,
        local: i == 0,
        placed: true,
        node_hint: Hint::Absent,
        zone_hints: None,
    };
    Slice {
        service: name(number),
        family: Family::V4,
        ports: vec![SlicePort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            port: 8080,
        }],
        endpoints: (0..endpoints).map(endpoint).collect(),
        zone_hints: Vec::new(),
    }
}

/// A planner that knows of the Services and has planned nothing yet.
fn informed(services: u32) -> Planner {
    let mut planner = Planner::new(Config::default());
    for number in 0..services {
        planner.apply(Change::Service(name(number), Some(service(number))));
        let slice = slice(number, ENDPOINTS);
        planner.apply(Change::Slice(name(number), Some(slice)));
    }
    planner
}

/// Everything planned and written.
fn settled(services: u32) -> (Planner, MemoryKernel) {
    let mut planner = informed(services);
    let mut kernel = MemoryKernel::new();
    settle(&mut planner, &mut kernel);
    (planner, kernel)
}

fn settle(planner: &mut Planner, kernel: &mut MemoryKernel) -> usize {
    let mut count = 0;
    loop {
        let step = planner.step(kernel, &Instant::now);
        count += step.ops.len();
        kernel.log.clear();
        if step.rests {
            return count;
        }
    }
}

/// How long a start takes with Services that all lead to the same pods, into a kernel that has nothing.
fn start_with_the_same_pods(services: u32) -> Duration {
    let mut planner = informed(services);
    for number in 0..services {
        let same = Slice {
            service: name(number),
            ..slice(0, 2)
        };
        planner.apply(Change::Slice(name(number), Some(same)));
    }
    let mut kernel = MemoryKernel::new();
    let started = Instant::now();
    let read = planner.read_agreed(&mut kernel).unwrap();
    planner.resync(read, true, started);
    settle(&mut planner, &mut kernel);
    started.elapsed()
}

/// The allocations and bytes that one more endpoint of one Service costs.
fn one_endpoint(services: u32) -> (usize, usize) {
    let (mut planner, mut kernel) = settled(services);
    let region = Region::new(ALLOCATOR);
    planner.apply(Change::Slice(name(7), Some(slice(7, ENDPOINTS + 1))));
    let ops = planner.next(Instant::now());
    let cost = region.change();
    assert_eq!(ops.len(), 1, "{ops:?}");
    let outcomes = kernel.apply(&ops);
    planner.commit(ops.into_iter().zip(outcomes), Instant::now());
    (cost.allocations, cost.bytes_allocated)
}

// One test: the counters are the process's.
#[test]
fn ten_thousand_services_and_one_change() {
    let held = |change: stats_alloc::Stats| {
        change.bytes_allocated as f64 - change.bytes_deallocated as f64
    };
    // What objects themselves take is beside it, and measured before anything is planned.
    let region = Region::new(ALLOCATOR);
    let mut planner = informed(10_000);
    let model = held(region.change());
    let region = Region::new(ALLOCATOR);
    let mut kernel = MemoryKernel::new();
    settle(&mut planner, &mut kernel);
    let both = held(region.change());
    let region = Region::new(ALLOCATOR);
    drop(kernel);
    let planned = both + held(region.change());
    drop(planner);
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    println!(
        "10,000 Services with 10 endpoints: {:.1} MiB for desired, applied and claims; {:.1} MiB \
         for the objects",
        mib(planned),
        mib(model)
    );
    assert!(mib(planned) <= 25.0, "{:.1} MiB", mib(planned));

    // One Service of 1,000 external IPs, 1,000 ports and 1,000 endpoints keeps what fits.
    let mut planner = Planner::new(Config::default());
    let mut giant = service(1);
    let port = giant.ports.remove(0);
    let ports = (1000..2000).map(|port_number| ServicePort {
        name: format!("p{port_number}").into(),
        port: port_number,
        ..port.clone()
    });
    giant.ports.extend(ports);
    let external = |n: u32| std::net::IpAddr::from(std::net::Ipv4Addr::from(0xc612_0000 + n));
    giant.external_ips.extend((0..1000).map(external));
    let mut endpoints = slice(1, 1000);
    let target = endpoints.ports.remove(0);
    endpoints
        .ports
        .extend(giant.ports.iter().map(|port| SlicePort {
            name: port.name.clone(),
            ..target.clone()
        }));
    planner.apply(Change::Service(name(1), Some(giant)));
    planner.apply(Change::Slice(name(1), Some(endpoints)));
    let region = Region::new(ALLOCATOR);
    let started = Instant::now();
    let ops = planner.next(started).len();
    let refused = planner.take_refused();
    let took = started.elapsed();
    let change = region.change();
    println!(
        "a Service over its bounds: {:.1} MiB allocated, {:.1} MiB held, {took:?}, {ops} ops at first; {refused:?}",
        mib(change.bytes_allocated as f64),
        mib(held(change)),
    );
    assert_eq!(refused.len(), 1);
    assert!(mib(change.bytes_allocated as f64) <= 128.0, "{change:?}");
    drop(planner);

    let (small, large) = (one_endpoint(100), one_endpoint(10_000));
    println!("one endpoint, (allocations, bytes): {small:?} at 100 Services, {large:?} at 10,000");
    // Trees are a level deeper with a hundred times the keys.
    assert!(large.0 <= small.0 + 16, "{small:?} {large:?}");
    assert!(large.1 <= small.1 * 2, "{small:?} {large:?}");

    // Another zone is nothing to Services whose endpoints have no hints.
    let (mut planner, _) = settled(1_000);
    let zone = |zone: &str| {
        Change::Node(Node {
            zone: Some(zone.into()),
            ..Node::default()
        })
    };
    planner.apply(zone("a"));
    let region = Region::new(ALLOCATOR);
    planner.apply(zone("b"));
    let ops = planner.next(Instant::now());
    let cost = region.change();
    assert_eq!(ops, []);
    assert!(cost.allocations < 10, "{cost:?}");

    // Ten times the Services: ten times the work and a little, not a hundred times.
    let (few, many) = (
        start_with_the_same_pods(500),
        start_with_the_same_pods(5_000),
    );
    println!("a start with the same pods: {few:?} at 500 Services, {many:?} at 5,000");
    assert!(many < few * 40, "{few:?} {many:?}");
}
