//! What the objects say, seen by clients.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use tests::daemon::{service, slice, wait_until};
use tests::topology::pod_addresses;
use tests::traffic::{Server, hold, http_get};

use super::{ASKS, CLUSTER_CIDR, Scene, WEB, at, tally, vips, web_service, web_slices};

#[test]
fn session_affinity_keeps_a_client_on_its_endpoint() {
    let scene = Scene::web(4, &[0, 1, 2], &[CLUSTER_CIDR]);
    let with_affinity = |timeout: &str| {
        let affinity = format!("{}  sessionAffinity: ClientIP\n{timeout}", web_service());
        scene.manifests.write("web.yaml", &affinity);
    };
    let await_timeout = |seconds: u32| {
        wait_until(&format!("persistent {seconds}"), || {
            let listed = scene.topology.node().tool("ipvsadm -Ln");
            // ClusterIP and node port, TCP and UDP, both families.
            let persistent = format!("persistent {seconds}");
            listed
                .lines()
                .filter(|line| line.trim_end().contains(&persistent))
                .count()
                == 8
        });
    };
    let of_clients = || -> Vec<String> {
        let asked = scene
            .clients(3)
            .into_iter()
            .flat_map(|client| vips().map(|vip| (client, vip)));
        let names = asked.map(|((client, namespace), vip)| {
            let names = namespace.enter(|| {
                (0..12)
                    .map(|_| http_get(vip).unwrap().name)
                    .collect::<BTreeSet<_>>()
            });
            assert_eq!(names.len(), 1, "{client} {vip}: {names:?}");
            names.into_iter().next().unwrap()
        });
        names.collect()
    };
    let mut held = vips().map(|vip| scene.topology.pod(3).enter(|| hold(vip)).unwrap());
    with_affinity("");
    await_timeout(10800);
    let before = of_clients();
    // Round robin gave each new client another endpoint.
    assert!(
        before.iter().collect::<BTreeSet<_>>().len() > 1,
        "{before:?}"
    );

    with_affinity("  sessionAffinityConfig: {clientIP: {timeoutSeconds: 600}}\n");
    await_timeout(600);
    assert_eq!(of_clients(), before, "an edit of the timeout moved clients");

    // An edit in place: what was counted stays counted.
    scene.manifests.write("web.yaml", &web_service());
    wait_until("affinity ends", || {
        !scene
            .topology
            .node()
            .tool("ipvsadm -Ln")
            .contains("persistent")
    });
    for vip in vips() {
        // The kernel adds its counters up every 2 s.
        wait_until("the connections of before are counted", || {
            let listed = scene
                .topology
                .node()
                .tool(&format!("ipvsadm -Ln --stats -t {vip}"));
            let line = listed.lines().find(|line| line.starts_with("TCP")).unwrap();
            line.split_whitespace()
                .nth(2)
                .unwrap()
                .parse::<u32>()
                .unwrap()
                >= 72
        });
    }
    held.iter_mut().for_each(|held| held.ping().unwrap());
    for vip in vips() {
        let names = scene.topology.pod(3).enter(|| {
            (0..12)
                .map(|_| http_get(vip).unwrap().name)
                .collect::<Vec<_>>()
        });
        let even = ["pod0", "pod1", "pod2"].map(|pod| (pod.to_owned(), 4));
        assert_eq!(tally(names), even.into(), "{vip} without affinity");
    }
}

#[test]
fn named_ports_lead_where_each_slice_says() {
    let scene = Scene::start(3, &[CLUSTER_CIDR]);
    let listen = |pod: u8, port: u16| {
        let name = format!("pod{pod}:{port}");
        scene
            .topology
            .pod(pod)
            .enter(|| Server::listen(&name, port))
            .unwrap()
    };
    let _servers = [
        listen(0, 9000),
        listen(0, 9001),
        listen(1, 9100),
        listen(1, 9101),
    ];
    let ports = [
        ("http", "TCP", 80, 0),
        ("http-udp", "UDP", 80, 0),
        ("admin", "TCP", 81, 0),
        ("admin-udp", "UDP", 81, 0),
    ];
    scene
        .manifests
        .write("web.yaml", &service("web", &WEB, &ports));
    for (pod, http, admin) in [(0, 9000, 9001), (1, 9100, 9101)] {
        for (family, address) in pod_addresses(pod).into_iter().enumerate() {
            let ports = [
                ("admin", "TCP", admin),
                ("http", "TCP", http),
                ("admin-udp", "UDP", admin),
                ("http-udp", "UDP", http),
                ("other", "TCP", 7),
            ];
            let name = format!("web-{pod}-{family}");
            let text = slice(&name, "web", &ports, &[(address, true, "node")]);
            scene.manifests.write(&format!("{name}.yaml"), &text);
        }
    }
    let answers = |to: SocketAddr, ask: super::Ask| {
        let names = scene.topology.pod(2).enter(|| {
            (0..6)
                .map(|_| ask(to).map_or_else(|e| e.to_string(), |answer| answer.name))
                .collect::<Vec<_>>()
        });
        tally(names)
    };
    for (port, names) in [
        (80, ["pod0:9000", "pod1:9100"]),
        (81, ["pod0:9001", "pod1:9101"]),
    ] {
        let even = names.map(|name| (name.to_owned(), 3)).into();
        for (to, (protocol, ask)) in at(port)
            .into_iter()
            .flat_map(|to| ASKS.map(|ask| (to, ask)))
        {
            wait_until(
                &format!("{protocol} {to} leads to {names:?} evenly"),
                || answers(to, ask) == even,
            );
        }
    }
    // A slice goes, and only its endpoints with it.
    scene.manifests.remove("web-0-0.yaml");
    let [v4, v6] = at(81);
    scene.await_servers("-u", v4, |servers| servers == [(1, 1)].into());
    assert_eq!(answers(v4, ASKS[0].1), [("pod1:9101".to_owned(), 6)].into());
    assert_eq!(answers(v6, ASKS[0].1).len(), 2);
}

#[test]
fn unready_endpoints_get_nothing() {
    let scene = Scene::web(4, &[1], &[CLUSTER_CIDR]);
    let unready_first = web_slices(&[(0, false), (1, true), (2, true)]);
    scene.manifests.write("web-slices.yaml", &unready_first);
    for vip in vips() {
        for protocol in ["-t", "-u"] {
            scene.await_servers(protocol, vip, |servers| servers == [(1, 1), (2, 1)].into());
        }
        for (protocol, ask) in ASKS {
            let names = scene
                .topology
                .pod(3)
                .enter(|| (0..12).map(|_| ask(vip).unwrap().name).collect::<Vec<_>>());
            let even = ["pod1", "pod2"].map(|pod| (pod.to_owned(), 6));
            assert_eq!(tally(names), even.into(), "{protocol} {vip}");
        }
    }
}
