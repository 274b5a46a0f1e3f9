//! Who gets the next connection.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};

use tests::daemon::wait_until;
use tests::traffic::{Client, HeldConnection, http_get};

use super::{ASKS, Scene, tally, vips};

#[test]
fn rr_spreads_evenly() {
    let scene = Scene::web(4, &[0, 1, 2], &[]);
    for ((client, namespace), vip) in scene
        .clients(3)
        .into_iter()
        .flat_map(|client| vips().map(|vip| (client, vip)))
    {
        // IPVS keeps a place in the round for each virtual server; a whole number of rounds is even.
        let count = if client == "pod" { 300 } else { 30 };
        let names = namespace.enter(|| {
            (0..count)
                .map(|_| http_get(vip).unwrap().name)
                .collect::<Vec<_>>()
        });
        let even = ["pod0", "pod1", "pod2"].map(|pod| (pod.to_owned(), count / 3));
        assert_eq!(tally(names), even.into(), "{client} to {vip}");
    }
}

#[test]
fn the_least_busy_endpoint_gets_the_next_connection() {
    let mut scene = Scene::web(4, &[0, 1, 2], &["--scheduler=lc"]);
    for scheduler in ["lc", "sed", "nq"] {
        // An edit of the virtual servers that are there.
        scene.launch(&[&format!("--scheduler={scheduler}")]);
        wait_until(&format!("scheduler {scheduler}"), || {
            let saved = scene.topology.node().tool("ipvsadm -Sn");
            let servers: Vec<&str> = saved
                .lines()
                .filter(|line| line.starts_with("-A"))
                .collect();
            !servers.is_empty()
                && servers
                    .iter()
                    .all(|line| line.ends_with(&format!(" -s {scheduler}")))
        });
        for vip in vips() {
            let hold = || {
                scene
                    .topology
                    .pod(3)
                    .enter(|| Client::default().hold(vip))
                    .unwrap()
            };
            let mut held: Vec<HeldConnection> = (0..6).map(|_| hold()).collect();
            let names = held.iter().map(|held| held.answer.name.clone());
            let even = ["pod0", "pod1", "pod2"].map(|pod| (pod.to_owned(), 2));
            assert_eq!(tally(names), even.into(), "{scheduler} {vip}");

            held.retain(|held| held.answer.name != "pod1");
            wait_until("the connections of pod1 have ended", || {
                scene.active(vip) == [(0, 2), (1, 0), (2, 2)].into()
            });
            let next = [hold(), hold()];
            assert_eq!(
                next.each_ref().map(|held| held.answer.name.as_str()),
                ["pod1", "pod1"],
                "{scheduler} {vip}"
            );
            drop((held, next));
            wait_until("all connections have ended", || {
                scene.active(vip).values().all(|active| *active == 0)
            });
        }
    }
}

#[test]
fn sh_keeps_a_client_on_one_endpoint() {
    let scene = Scene::web(4, &[0, 1, 2], &["--scheduler=sh"]);
    for (client, namespace) in scene.clients(3) {
        for vip in vips() {
            let names = namespace.enter(|| {
                (0..12)
                    .map(|_| http_get(vip).unwrap().name)
                    .collect::<BTreeSet<_>>()
            });
            assert_eq!(names.len(), 1, "{client} to {vip}: {names:?}");
        }
    }
    let outside = scene.topology.outside();
    let [vip, _] = vips();
    let sources: Vec<Ipv4Addr> = (120..140)
        .map(|host| Ipv4Addr::new(192, 168, 10, host))
        .collect();
    let lines: String = sources
        .iter()
        .map(|source| format!("addr add {source}/24 dev eth0\n"))
        .collect();
    outside.tool_with_input("ip -batch -", &lines);
    let mut names = BTreeSet::new();
    for source in sources {
        let client = Client {
            source: Some(SocketAddr::new(source.into(), 0)),
            ..Client::default()
        };
        let of_one: BTreeSet<String> =
            outside.enter(|| (0..3).map(|_| client.http_get(vip).unwrap().name).collect());
        assert_eq!(of_one.len(), 1, "{source}: {of_one:?}");
        names.extend(of_one);
    }
    assert_eq!(names.len(), 3, "20 clients use {names:?} only");
}

#[test]
fn dh_has_one_endpoint_for_all_clients_of_a_vip() {
    let scene = Scene::web(4, &[0, 1, 2], &["--scheduler=dh"]);
    for vip in vips() {
        let mut names = BTreeSet::new();
        for (client, namespace) in scene.clients(3) {
            for (protocol, ask) in ASKS {
                for _ in 0..6 {
                    let answer = namespace.enter(|| ask(vip));
                    names.insert(
                        answer
                            .unwrap_or_else(|e| panic!("{client} {protocol} {vip}: {e}"))
                            .name,
                    );
                }
            }
        }
        assert_eq!(names.len(), 1, "{vip}: {names:?}");
    }
}

#[test]
fn the_first_connections_of_several_nodes_go_to_several_endpoints() {
    let mut scene = Scene::web(4, &[0, 1, 2, 3], &[]);
    for scheduler in ["rr", "lc"] {
        let mut first = |name: &str| {
            scene.daemon = None;
            // A node that starts: nobody has connected yet.
            scene.topology.node().tool("ipvsadm -C");
            scene.launch(&["--node-name", name, &format!("--scheduler={scheduler}")]);
            wait_until(&format!("{name} serves"), || {
                let log = scene.daemon.as_ref().unwrap().log();
                log.contains("what the objects say is in force")
            });
            let outside = scene.topology.outside();
            outside.enter(|| vips().map(|vip| ASKS.map(|(_, ask)| ask(vip).unwrap().name)))
        };
        let nodes: Vec<_> = ["n1", "n2", "n3", "n4", "n5", "n6"].map(&mut first).into();
        for (family, ask) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let chosen = nodes.iter().map(|firsts| &firsts[family][ask]);
            let chosen: BTreeSet<&String> = chosen.collect();
            assert!(chosen.len() >= 2, "{scheduler}: {nodes:?}");
        }
        let all: BTreeSet<&String> = nodes.iter().flatten().flatten().collect();
        assert_eq!(all.len(), 4, "{scheduler}: {nodes:?}");
        // A node's order is its own.
        assert_eq!(first("n3"), nodes[2], "{scheduler}");
    }
}
