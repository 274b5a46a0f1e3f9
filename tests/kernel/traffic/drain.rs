//! Endpoints that go and come back, and the connections that must not notice.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tests::daemon::{wait_until, wait_up_to};
use tests::traffic::{Client, HeldConnection, hold, http_get};

use super::{CLUSTER_CIDR, Scene, vips, web_slices};

/// IPVS forgets a reset connection after 10 s; the daemon looks every 3 s.
const DRAINED: Duration = Duration::from_secs(45);

/// A connection to `web` from that pod for each family and each of that many endpoints.
fn hold_each(scene: &Scene, client: u8, endpoints: usize) -> Vec<HeldConnection> {
    let held = vips().map(|vip| {
        let one = || scene.topology.pod(client).enter(|| hold(vip)).unwrap();
        (0..endpoints).map(|_| one()).collect::<Vec<_>>()
    });
    held.into_iter().flatten().collect()
}

fn ping_all(held: &mut [HeldConnection], when: &str) {
    for held in held {
        let name = held.answer.name.clone();
        held.ping()
            .unwrap_or_else(|error| panic!("{when}: the connection to {name}: {error}"));
    }
}

#[test]
fn a_removed_endpoint_keeps_its_connections_until_they_end() {
    let scene = Scene::web(3, &[1], &[CLUSTER_CIDR]);
    // Those that await_answer made went to pod1, so only these hold pod0.
    scene.endpoints(&[0, 1]);
    let mut held = hold_each(&scene, 2, 2);
    assert_eq!(
        held.iter()
            .filter(|held| held.answer.name == "pod0")
            .count(),
        2
    );

    scene.endpoints(&[1]);
    for vip in vips() {
        assert_eq!(
            scene.servers("-t", vip),
            Some([(0, 0), (1, 1)].into()),
            "{vip}"
        );
        scene.await_servers("-u", vip, |servers| servers == [(1, 1)].into());
        for (client, namespace) in scene.clients(2) {
            for _ in 0..4 {
                let answer = namespace.enter(|| http_get(vip)).unwrap();
                assert_eq!(answer.name, "pod1", "{client} {vip}");
            }
        }
    }
    ping_all(&mut held, "draining");

    // It returns: its weight does, and its connection never noticed.
    scene.endpoints(&[0, 1]);
    for vip in vips() {
        assert_eq!(
            scene.servers("-t", vip),
            Some([(0, 1), (1, 1)].into()),
            "{vip}"
        );
    }
    ping_all(&mut held, "returned");

    scene.endpoints(&[1]);
    ping_all(&mut held, "draining again");
    let (of_pod0, mut others): (Vec<_>, Vec<_>) = held
        .into_iter()
        .partition(|held| held.answer.name == "pod0");
    of_pod0.into_iter().for_each(HeldConnection::reset);
    for vip in vips() {
        wait_up_to(DRAINED, &format!("pod0 leaves {vip}"), || {
            scene.servers("-t", vip) == Some([(1, 1)].into())
        });
    }
    ping_all(&mut others, "the other endpoint is gone");
}

#[test]
fn dh_removes_an_endpoint_at_once() {
    let scene = Scene::web(3, &[0], &["--scheduler=dh"]);
    let mut held = hold_each(&scene, 2, 1);
    ping_all(&mut held, "before");
    scene.write_endpoints(&[1]);
    for vip in vips() {
        scene.await_servers("-t", vip, |servers| {
            assert_ne!(servers.get(&0), Some(&0), "pod0 drains");
            servers == [(1, 1)].into()
        });
        for (client, namespace) in scene.clients(2) {
            let answer = namespace.enter(|| http_get(vip)).unwrap();
            assert_eq!(answer.name, "pod1", "{client} {vip}");
        }
    }
}

#[test]
fn a_udp_client_goes_on_with_another_endpoint() {
    let scene = Scene::web(4, &[0, 1], &[CLUSTER_CIDR]);
    let quick = Client {
        timeout: Duration::from_millis(500),
        ..Client::default()
    };
    for vip in vips() {
        scene.endpoints(&[0, 1]);
        let mut talks = Vec::new();
        for (client, namespace) in scene.clients(3) {
            // rr: one of two new flows goes to each endpoint.
            for _ in 0..2 {
                let talk = namespace.enter(|| quick.datagrams(vip)).unwrap();
                let first = talk.ask().unwrap();
                assert_eq!(talk.ask().unwrap().name, first.name, "{client} {vip}");
                talks.push((client, first.name, talk));
            }
        }
        assert_eq!(
            talks.iter().filter(|(_, name, _)| name == "pod0").count(),
            3
        );
        scene.endpoints(&[1]);
        assert_eq!(scene.servers("-u", vip), Some([(1, 1)].into()));
        for (client, before, talk) in talks {
            let what = format!("the {client}'s flow to {before} by {vip} goes on");
            if before == "pod1" {
                assert_eq!(talk.ask().map(|answer| answer.name), Ok(before), "{what}");
            } else {
                wait_until(&what, || {
                    talk.ask().is_ok_and(|answer| answer.name == "pod1")
                });
            }
        }
    }
}

#[test]
fn no_connection_breaks_while_endpoints_come_and_go() {
    for scheduler in ["rr", "lc", "sh", "mh"] {
        let scene = Scene::web(
            4,
            &[0, 1],
            &[CLUSTER_CIDR, &format!("--scheduler={scheduler}")],
        );
        let outside = scene.topology.outside();
        // Several clients, for the schedulers that go by the client's address.
        let hosts = 120..128_u8;
        let v4 = hosts.clone().map(|host| Ipv4Addr::new(192, 168, 10, host));
        let v6 = hosts.map(|host| Ipv6Addr::new(0xfd00, 0x192, 0, 0, 0, 0, 0, host.into()));
        let lines: String = v4
            .clone()
            .map(|source| format!("addr add {source}/24 dev eth0\n"))
            .chain(
                v6.clone()
                    .map(|source| format!("addr add {source}/64 dev eth0 nodad\n")),
            )
            .collect();
        outside.tool_with_input("ip -batch -", &lines);
        let [vip4, vip6] = vips();
        let sources = v4
            .map(|source| (SocketAddr::from((source, 0)), vip4))
            .chain(v6.map(|source| (SocketAddr::from((source, 0)), vip6)));
        let mut held: Vec<HeldConnection> = sources
            .map(|(source, vip)| {
                let client = Client {
                    source: Some(source),
                    ..Client::default()
                };
                outside.enter(|| client.hold(vip)).unwrap()
            })
            .collect();
        held.extend(hold_each(&scene, 3, 2));
        for pod in ["pod0", "pod1"] {
            assert!(
                held.iter().any(|held| held.answer.name == pod),
                "{scheduler}: none to {pod}"
            );
        }
        for step in [&[0, 1, 2][..], &[0, 2], &[0], &[0, 1], &[2], &[0, 1, 2]] {
            scene.endpoints(step);
            ping_all(&mut held, &format!("{scheduler}, endpoints {step:?}"));
            for vip in vips() {
                let name = outside.enter(|| http_get(vip)).unwrap().name;
                let wanted: Vec<String> = step.iter().map(|pod| format!("pod{pod}")).collect();
                assert!(
                    wanted.contains(&name),
                    "{scheduler}: {vip} led to {name}, not {wanted:?}"
                );
            }
        }
        // Unready, then ready again.
        for ready in [false, true] {
            let endpoints = [(0, true), (1, ready), (2, true)];
            scene
                .manifests
                .write("web-slices.yaml", &web_slices(&endpoints));
            for vip in vips() {
                let weight = u32::from(ready);
                scene.await_servers("-t", vip, |servers| {
                    servers.get(&1).is_none_or(|w| *w == weight)
                });
            }
            ping_all(&mut held, &format!("{scheduler}, pod1 ready: {ready}"));
        }
    }
}
