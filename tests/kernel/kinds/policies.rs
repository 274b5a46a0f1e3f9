//! Traffic policies and hints: which endpoints serve whom, and whose address they see. "Elsewhere" is a pod that its slice puts on
//! another node.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};

use tests::daemon::{slice, wait_until};
use tests::topology::{BRIDGE, NODE, OUTSIDE, pod_addresses};
use tests::traffic::{Error, hold, http_get, udp_ask};

use super::{NODE_PORT, PORT, Scene, TARGET, vips, web};

const EXTERNAL: [&str; 2] = ["198.51.100.7", "2001:db8:7::7"];
const BALANCED: [&str; 2] = ["203.0.113.5", "2001:db8:5::5"];

/// `web` with all kinds of addresses and these policies.
fn policies(internal: &str, external: &str) -> String {
    let ([e4, e6], [b4, b6]) = (EXTERNAL, BALANCED);
    web(&format!(
        "  internalTrafficPolicy: {internal}\n  externalTrafficPolicy: {external}\n  externalIPs: [{e4}, \"{e6}\"]\n\
         status: {{loadBalancer: {{ingress: [{{ip: {b4}}}, {{ip: \"{b6}\"}}]}}}}\n"
    ))
}

/// Where clients from outside reach `web`: external IP, load balancer, node port.
fn outside_vips() -> Vec<SocketAddr> {
    let of = |addresses: [&str; 2]| addresses.map(|a| SocketAddr::new(a.parse().unwrap(), PORT));
    let node = NODE.map(|address| SocketAddr::new(address, NODE_PORT));
    [of(EXTERNAL), of(BALANCED), node].concat()
}

/// Puts each pod on a node, with the zone for which it is hinted where there is one.
fn place(scene: &Scene, pods: &[(u8, &str, Option<&str>)]) {
    let ports = [("tcp", "TCP", TARGET), ("udp", "UDP", TARGET)];
    let mut text = String::new();
    for family in [0, 1] {
        let endpoints: Vec<(IpAddr, bool, &str)> = pods
            .iter()
            .map(|(pod, node, _)| (pod_addresses(*pod)[family], true, *node))
            .collect();
        text += &slice(&format!("web-{family}"), "web", &ports, &endpoints);
        for (pod, _, zone) in pods {
            if let Some(zone) = zone {
                let line = format!("- addresses: [\"{}\"]\n", pod_addresses(*pod)[family]);
                let hints = format!("{line}  hints: {{forZones: [{{name: {zone}}}]}}\n");
                text = text.replace(&line, &hints);
            }
        }
    }
    scene.manifests.write("web-slices.yaml", &text);
}

/// Waits until these pods have a weight at a VIP, TCP and UDP.
fn await_pods(scene: &Scene, vip: SocketAddr, pods: &[u8]) {
    for protocol in ["-t", "-u"] {
        wait_until(&format!("{protocol} {vip} has {pods:?}"), || {
            scene.servers(protocol, vip).is_some_and(|servers| {
                let up = servers.iter().filter(|(_, weight)| **weight > 0);
                up.map(|(pod, _)| *pod).eq(pods.iter().copied())
            })
        });
    }
}

/// Who answers four clients from outside there, and whose address that pod sees.
fn answers(scene: &Scene, to: SocketAddr) -> BTreeSet<(String, IpAddr)> {
    let ask = |ask: fn(SocketAddr) -> _| {
        let answer: Result<tests::traffic::Answer, Error> = ask(to);
        let answer = answer.unwrap_or_else(|error| panic!("{to}: {error}"));
        (answer.name, answer.peer.ip())
    };
    scene
        .topology
        .outside()
        .enter(|| (0..4).flat_map(|_| [ask(http_get), ask(udp_ask)]).collect())
}

fn family(to: SocketAddr) -> usize {
    usize::from(to.is_ipv6())
}

#[test]
fn external_traffic_policy_local_keeps_clients_and_stays_on_the_node() {
    let mut scene = Scene::serving(2, &[0], &policies("Cluster", "Cluster"), &[]);
    place(&scene, &[(0, "node", None), (1, "elsewhere", None)]);
    let all = |seen: IpAddr| BTreeSet::from(["pod0", "pod1"].map(|pod| (pod.to_owned(), seen)));
    let here = |seen: IpAddr| BTreeSet::from([("pod0".to_owned(), seen)]);
    let masqueraded = |scene: &Scene| {
        for to in outside_vips() {
            await_pods(scene, to, &[0, 1]);
            assert_eq!(answers(scene, to), all(BRIDGE[family(to)]), "{to}");
        }
    };
    masqueraded(&scene);
    // Connections to both endpoints of each, from before the change.
    let outside = scene.topology.outside();
    let mut held: Vec<_> = outside.enter(|| {
        let twice = outside_vips().into_iter().flat_map(|to| [to, to]);
        twice.map(|to| hold(to).unwrap()).collect()
    });
    let of_pod1 = held
        .iter()
        .filter(|held| held.answer.name == "pod1")
        .count();
    assert_eq!(of_pod1, outside_vips().len());

    scene
        .manifests
        .write("web.yaml", &policies("Cluster", "Local"));
    let kept = |scene: &Scene| {
        for to in outside_vips() {
            await_pods(scene, to, &[0]);
            wait_until(&format!("{to} keeps clients"), || {
                answers(scene, to) == here(OUTSIDE[family(to)])
            });
        }
    };
    kept(&scene);
    let [e4, _] = EXTERNAL;
    assert_eq!(scene.members("KUBE-EXTERNAL-IP"), [""; 0]);
    assert!(
        scene
            .members("KUBE-EXTERNAL-IP-LOCAL")
            .contains(&format!("{e4},tcp:{PORT}"))
    );
    // ClusterIPs keep all endpoints, and masquerade clients from outside.
    for vip in vips() {
        assert_eq!(answers(&scene, vip), all(BRIDGE[family(vip)]), "{vip}");
    }
    for held in &mut held {
        held.ping().unwrap();
    }

    // A crash in this state: the next process finds nothing that it does not know, and writes nothing.
    let saved = |scene: &Scene| {
        let node = scene.topology.node();
        [node.tool("ipvsadm -Sn"), node.tool("ipset save")]
    };
    let before = saved(&scene);
    scene.launch(&[]);
    let log = |scene: &Scene| scene.daemon.as_ref().unwrap().log();
    wait_until("the new process has read the kernel", || {
        log(&scene).contains("what the objects say is in force")
    });
    assert_eq!(saved(&scene), before, "{}", log(&scene));
    for held in &mut held {
        held.ping().unwrap();
    }

    // And back.
    scene
        .manifests
        .write("web.yaml", &policies("Cluster", "Cluster"));
    masqueraded(&scene);
    assert_eq!(scene.members("KUBE-EXTERNAL-IP-LOCAL"), [""; 0]);
    assert_eq!(scene.members("KUBE-NODE-PORT-LOCAL-TCP"), [""; 0]);
    for held in &mut held {
        held.ping().unwrap();
    }
}

#[test]
fn an_address_of_another_node_keeps_its_clients_as_well() {
    let [v4, v6] = OUTSIDE;
    let of = |policy: &str| {
        web(&format!(
            "  externalTrafficPolicy: {policy}\n  externalIPs: [{v4}, \"{v6}\"]\n"
        ))
    };
    let mut scene = Scene::new(2);
    let other = format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: n2}}\nstatus:\n  addresses:\n  \
         - {{type: InternalIP, address: {v4}}}\n  - {{type: InternalIP, address: \"{v6}\"}}\n"
    );
    scene.manifests.write("n2.yaml", &other);
    scene.manifests.write("web.yaml", &of("Local"));
    scene.endpoints(&[0]);
    scene.launch(&[]);
    for (policy, seen) in [
        ("Local", pod_addresses(1)),
        ("Cluster", BRIDGE),
        ("Local", pod_addresses(1)),
    ] {
        scene.manifests.write("web.yaml", &of(policy));
        for (to, seen) in OUTSIDE.map(|a| SocketAddr::new(a, PORT)).iter().zip(seen) {
            for ask in [http_get, udp_ask] {
                scene.topology.pod(1).enter(|| {
                    wait_until(&format!("{policy}: {to} sees {seen}"), || {
                        ask(*to).is_ok_and(|a| (&*a.name, a.peer.ip()) == ("pod0", seen))
                    });
                });
            }
        }
    }
}

#[test]
fn internal_traffic_policy_local_refuses_without_a_local_endpoint() {
    let scene = Scene::serving(3, &[0], &policies("Local", "Cluster"), &[]);
    place(&scene, &[(0, "node", None), (1, "elsewhere", None)]);
    for vip in vips() {
        await_pods(&scene, vip, &[0]);
        for (client, namespace) in scene.clients(2) {
            for ask in [http_get, udp_ask] {
                let names = (0..3).map(|_| namespace.enter(|| ask(vip)).unwrap().name);
                assert!(
                    names.collect::<Vec<_>>().iter().all(|name| name == "pod0"),
                    "{client} {vip}"
                );
            }
        }
    }
    for to in outside_vips() {
        await_pods(&scene, to, &[0, 1]);
    }
    // Its pod is elsewhere now, as the other one.
    place(&scene, &[(0, "elsewhere", None), (1, "elsewhere", None)]);
    for vip in vips() {
        await_pods(&scene, vip, &[]);
        for (client, namespace) in scene.clients(2) {
            for ask in [http_get, udp_ask] {
                let error = namespace.enter(|| ask(vip)).unwrap_err();
                // IPVS drops what the node itself sends while it is being sent: EPERM.
                let own = client == "node" && error == Error::Other(ErrorKind::PermissionDenied);
                assert!(own || error == Error::Refused, "{client} {vip}: {error}");
            }
        }
    }
    for to in outside_vips() {
        let names: BTreeSet<String> = answers(&scene, to).into_iter().map(|(n, _)| n).collect();
        assert_eq!(names.len(), 2, "{to}: {names:?}");
    }
}

#[test]
fn a_node_that_moves_to_another_zone_serves_from_there() {
    let scene = Scene::serving(3, &[0], &web(""), &[]);
    place(
        &scene,
        &[(0, "elsewhere", Some("a")), (1, "node", Some("b"))],
    );
    let node = |labels: &str| {
        let text =
            format!("apiVersion: v1\nkind: Node\nmetadata:\n  name: node\n  labels: {labels}\n");
        scene.manifests.write("node.yaml", &text);
    };
    for (labels, pods) in [
        ("{topology.kubernetes.io/zone: a}", &[0][..]),
        ("{topology.kubernetes.io/zone: b}", &[1]),
        ("{topology.kubernetes.io/zone: c}", &[0, 1]),
        ("{topology.kubernetes.io/zone: a}", &[0]),
        ("{}", &[0, 1]),
    ] {
        node(labels);
        for vip in vips() {
            await_pods(&scene, vip, pods);
            let names = scene.topology.pod(2).enter(|| {
                let names = (0..4).map(|_| http_get(vip).unwrap().name);
                names.collect::<BTreeSet<_>>()
            });
            let expected = pods.iter().map(|pod| format!("pod{pod}"));
            assert_eq!(names, expected.collect(), "{labels} {vip}");
        }
    }
}
