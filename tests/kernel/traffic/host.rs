//! No VIP and port ever reaches a socket of the host.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::daemon::service;
use tests::topology::NODE;
use tests::traffic::{Client, Error, Server, http_get};

use super::{ASKS, CLUSTER_CIDR, NODE_PORT, PORT, Scene, Stop, at, vips};

/// A port of the host that no Service has.
const HOST_PORT: u16 = 22;

#[test]
fn a_vip_does_not_lead_to_the_hosts_own_ports() {
    let scene = Scene::web(3, &[0, 1], &[CLUSTER_CIDR]);
    let node = scene.topology.node();
    let _host = node.enter(|| Server::listen("host", HOST_PORT)).unwrap();
    let answer = scene
        .topology
        .outside()
        .enter(|| http_get((NODE[0], HOST_PORT).into()));
    assert_eq!(answer.unwrap().name, "host");
    for (client, namespace) in scene.clients(2) {
        for (protocol, ask) in ASKS {
            for to in at(HOST_PORT) {
                let start = Instant::now();
                let answer = namespace.enter(|| ask(to));
                let took = start.elapsed();
                assert_eq!(answer, Err(Error::Refused), "{client} {protocol} {to}");
                assert!(took.as_millis() < 900, "{client} {protocol} {to}: {took:?}");
            }
        }
    }
}

#[test]
fn a_port_that_comes_and_goes_never_leads_to_the_host() {
    let scene = Scene::web(3, &[0, 1], &[CLUSTER_CIDR]);
    let node = scene.topology.node();
    let _host = node.enter(|| Server::listen("host", PORT)).unwrap();
    let stop = AtomicBool::new(false);
    let counts: [AtomicU32; 9] = Default::default();
    let seen = thread::scope(|scope| {
        let kinds = scene.clients(2).into_iter().flat_map(|client| {
            [Kind::Tcp, Kind::Udp, Kind::UdpFromOnePort].map(|kind| (client, kind))
        });
        let loads: Vec<_> = kinds
            .zip(&counts)
            .map(|(((client, namespace), kind), count)| {
                let stop = &stop;
                let load = move || namespace.enter(|| hammer(kind, count, stop));
                (client, kind, scope.spawn(load))
            })
            .collect();
        let stopper = Stop(&stop);
        let ports = [
            ("tcp", "TCP", PORT, NODE_PORT),
            ("udp", "UDP", PORT, NODE_PORT),
        ];
        let others = [("x", "TCP", 443, 0), ("y", "UDP", 443, 0)];
        let without = service("web", &super::WEB, &others);
        let with = service("web", &super::WEB, &[ports, others].concat());
        for round in 0..6 {
            // Every third time the whole Service goes, and its VIPs with it.
            match round % 3 {
                0 => scene.manifests.remove("web.yaml"),
                _ => scene.manifests.write("web.yaml", &without),
            }
            await_presence(&scene, false);
            await_requests(&counts);
            scene.manifests.write("web.yaml", &with);
            await_presence(&scene, true);
            await_requests(&counts);
        }
        drop(stopper);
        let results = loads
            .into_iter()
            .map(|(client, kind, load)| (format!("{client}, {kind:?}"), load.join().unwrap()));
        results.collect::<BTreeMap<_, _>>()
    });
    for (load, words) in &seen {
        assert!(
            !words.contains_key("host"),
            "the host answered {load}: {seen:#?}"
        );
        for word in ["pod", "refused"] {
            let found = words.keys().any(|seen| seen.starts_with(word));
            assert!(found, "{load} never saw {word}: {seen:#?}");
        }
    }
}

fn await_presence(scene: &Scene, there: bool) {
    tests::daemon::wait_until("the virtual servers came or went", || {
        let saved = scene.topology.node().tool("ipvsadm -Sn");
        vips().iter().all(|vip| {
            ["-t", "-u"]
                .iter()
                .all(|protocol| saved.contains(&format!("-A {protocol} {vip} ")) == there)
        })
    });
}

/// Waits until every load has done something more, begun after this call.
fn await_requests(counts: &[AtomicU32]) {
    let before: Vec<u32> = counts
        .iter()
        .map(|count| count.load(Ordering::SeqCst))
        .collect();
    tests::daemon::wait_until("the loads go on", || {
        counts
            .iter()
            .zip(&before)
            .all(|(count, before)| count.load(Ordering::SeqCst) >= before + 4)
    });
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Tcp,
    Udp,
    /// As resolvers do it: the kernel knows the flow from before.
    UdpFromOnePort,
}

/// Asks until told to stop; who answered, or what went wrong, how often.
fn hammer(kind: Kind, count: &AtomicU32, stop: &AtomicBool) -> BTreeMap<String, u32> {
    let quick = Client {
        timeout: Duration::from_millis(300),
        ..Client::default()
    };
    let mut talks = BTreeMap::new();
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    while !stop.load(Ordering::SeqCst) {
        for vip in vips() {
            let answer = match kind {
                Kind::Tcp => quick.http_get(vip),
                Kind::Udp => quick.udp_ask(vip),
                Kind::UdpFromOnePort => {
                    // Without a route, while the VIP is gone, there is no socket either.
                    if !talks.contains_key(&vip)
                        && let Ok(talk) = quick.datagrams(vip)
                    {
                        talks.insert(vip, talk);
                    }
                    talks
                        .get(&vip)
                        .ok_or(Error::Timeout)
                        .and_then(|talk| talk.ask())
                }
            };
            let word = answer.map_or_else(|error| error.to_string(), |answer| answer.name);
            *seen.entry(word).or_default() += 1;
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
    seen
}
