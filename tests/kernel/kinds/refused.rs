//! Addresses that no Service takes from whom they belong to, and a Service that asks for more than it may have.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tests::daemon::{binary, service, wait_until, wait_up_to};
use tests::topology::{BRIDGE, NODE, OUTSIDE, pod_addresses};
use tests::traffic::{Server, http_get, udp_ask};

use super::{PORT, Scene, WEB, vips, web};

fn external(addresses: &[String]) -> String {
    let quoted: Vec<String> = addresses.iter().map(|a| format!("\"{a}\"")).collect();
    format!("  externalIPs: [{}]\n", quoted.join(", "))
}

fn node(name: &str) -> String {
    let [v4, v6] = OUTSIDE;
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nstatus:\n  addresses:\n  \
         - {{type: InternalIP, address: {v4}}}\n  - {{type: InternalIP, address: \"{v6}\"}}\n"
    )
}

/// That a host is reached at a port by the node and by a pod.
fn assert_reached(scene: &Scene, port: u16, when: &str) {
    for address in OUTSIDE {
        let to = SocketAddr::new(address, port);
        for (client, namespace) in [
            ("node", scene.topology.node()),
            ("pod", scene.topology.pod(1)),
        ] {
            let answer = namespace.enter(|| http_get(to));
            let answer = answer.unwrap_or_else(|error| panic!("{when}: {client}, {to}: {error}"));
            assert_eq!(answer.name, "host", "{when}: {client}, {to}");
        }
    }
}

/// That the node and pods reach the Service by addresses of the machine outside, over TCP and UDP, masqueraded.
fn assert_served(scene: &Scene, when: &str) {
    for (to, bridge) in OUTSIDE.map(|a| SocketAddr::new(a, PORT)).iter().zip(BRIDGE) {
        for (client, namespace) in [
            ("node", scene.topology.node()),
            ("pod", scene.topology.pod(1)),
            ("the pod itself", scene.topology.pod(0)),
        ] {
            for (protocol, answer) in [
                ("TCP", namespace.enter(|| http_get(*to))),
                ("UDP", namespace.enter(|| udp_ask(*to))),
            ] {
                let answer =
                    answer.unwrap_or_else(|e| panic!("{when}: {client} {protocol} {to}: {e}"));
                assert_eq!(
                    (answer.name.as_str(), answer.peer.ip()),
                    ("pod0", bridge),
                    "{when}: {client} {protocol} {to}"
                );
            }
        }
    }
}

/// A Service on another node's address is served, and that node is reached as before on all other ports; when it is no node any
/// more, the Service has the address.
#[test]
fn an_address_of_another_node_is_served_and_stays_that_nodes() {
    let mut scene = Scene::new(2);
    let host = scene.topology.outside();
    let _api = host.enter(|| Server::listen("host", 6443)).unwrap();
    let _web = host.enter(|| Server::listen("host", PORT)).unwrap();
    let node_of_scene = scene.topology.node();
    // As WireGuard's and strict hosts' are.
    for sysctl in ["rp_filter", "src_valid_mark"] {
        node_of_scene.sysctl(&format!("ipv4/conf/all/{sysctl}"), "1");
    }
    let taken = external(&OUTSIDE.map(|a| a.to_string()));
    scene.manifests.write("web.yaml", &web(&taken));
    scene.manifests.write("n2.yaml", &node("n2"));
    scene.endpoints(&[0]);
    scene.launch(&[]);
    let first = SocketAddr::new(OUTSIDE[0], PORT);
    let is_routed = |scene: &Scene| {
        let bound = scene.addresses("kube-ipvs0");
        OUTSIDE.iter().all(|address| !bound.contains(address))
            && scene.members("KUBE-6-IPVS-ROUTED").len() == 2
    };
    scene.await_servers("-t", first, &[(0, 1)]);
    wait_until("it is routed", || is_routed(&scene));
    wait_until("it is told", || {
        let log = scene.daemon.as_ref().unwrap().log();
        log.contains("is an address that the node needs")
    });
    assert_reached(&scene, 6443, "served");
    assert_served(&scene, "served");

    scene.manifests.remove("n2.yaml");
    wait_until("it is bound", || {
        let bound = scene.addresses("kube-ipvs0");
        OUTSIDE.iter().all(|address| bound.contains(address))
    });
    wait_until("the rules are gone", || {
        let node = scene.topology.node();
        let rules = node.tool("ip rule") + &node.tool("ip -6 rule");
        !rules.contains("18768")
    });
    assert_served(&scene, "bound");
    // It becomes one: the address is let go.
    scene.manifests.write("n2.yaml", &node("n2"));
    wait_until("the address is let go", || is_routed(&scene));
    assert_reached(&scene, 6443, "let go");
    assert_served(&scene, "let go");

    // Whatever others take away of it comes back.
    let node = scene.topology.node();
    node.tool("ip rule del pref 50");
    node.tool("ip -6 route flush table 18768");
    wait_up_to(Duration::from_secs(60), "it is put right", || {
        node.tool("ip rule").contains("18768")
            && node
                .tool("ip -6 route show table all")
                .contains("table 18768")
    });
    assert_served(&scene, "put right");

    scene.manifests.remove("web.yaml");
    wait_until("all of it goes", || {
        let node = scene.topology.node();
        let routes =
            node.tool("ip route show table all") + &node.tool("ip -6 route show table all");
        let rules = node.tool("ip rule") + &node.tool("ip -6 rule");
        !routes.contains("18768") && !rules.contains("18768")
    });
    assert_reached(&scene, 6443, "gone");
    assert_reached(&scene, PORT, "gone");
}

/// What `cleanup` finds of a daemon that was killed is taken away, and nothing else of policy routing.
#[test]
fn a_cleanup_takes_the_routes_along() {
    let mut scene = Scene::new(1);
    scene
        .manifests
        .write("web.yaml", &web(&external(&OUTSIDE.map(|a| a.to_string()))));
    scene.manifests.write("n2.yaml", &node("n2"));
    scene.endpoints(&[0]);
    let node = scene.topology.node();
    let foreign = [
        "rule add fwmark 0x10/0x10 table 77",
        "route add local 198.51.100.9 dev lo table 18768 proto static",
    ];
    for words in foreign {
        node.tool(&format!("ip {words}"));
    }
    let all = |scene: &Scene| {
        let node = scene.topology.node();
        let routes =
            node.tool("ip route show table all") + &node.tool("ip -6 route show table all");
        let ours: Vec<&str> = routes
            .lines()
            .filter(|l| l.contains("table 18768"))
            .collect();
        node.tool("ip rule") + &node.tool("ip -6 rule") + &ours.join("\n")
    };
    let before = all(&scene);
    scene.launch(&[]);
    scene.await_servers("-t", SocketAddr::new(OUTSIDE[0], PORT), &[(0, 1)]);
    wait_until("it is routed", || {
        scene.members("KUBE-IPVS-ROUTED").len() == 2
            && scene.members("KUBE-6-IPVS-ROUTED").len() == 2
    });
    assert_ne!(all(&scene), before);
    scene.daemon.take().unwrap().crash();
    let program = binary();
    scene
        .topology
        .node()
        .tool(&format!("{} cleanup", program.display()));
    assert_eq!(all(&scene), before);
}

/// A next hop of the node's routes, as the machine outside is one, is reached whatever a Service asks for, also by a node that starts without
/// being able to hear of any object while the address is on its link.
#[test]
fn a_router_stays_a_router_and_a_node_that_was_cut_off_frees_itself() {
    let mut scene = Scene::new(2);
    let _api = scene
        .topology
        .outside()
        .enter(|| Server::listen("host", 6443))
        .unwrap();
    let taken = external(&OUTSIDE.map(|a| a.to_string()));
    scene.manifests.write("web.yaml", &web(&taken));
    scene.endpoints(&[0]);
    scene.launch(&[]);
    let vip = SocketAddr::new(OUTSIDE[0], PORT);
    scene.await_servers("-t", vip, &[(0, 1)]);
    wait_until("it is bound", || {
        scene.addresses("kube-ipvs0").contains(&OUTSIDE[1])
    });
    scene.daemon = None;

    // An earlier process made that; now the machine is a router, and the objects can't be had.
    let node = scene.topology.node();
    for (address, network) in OUTSIDE.iter().zip(["203.0.113.0/24", "2001:db8:113::/48"]) {
        let own = format!("{address} dev kube-ipvs0");
        node.tool(&format!("ip addr del {own}"));
        node.tool(&format!("ip route add {network} via {address}"));
        node.tool(&format!("ip addr add {own}"));
    }
    let away = scene.manifests.path().with_extension("away");
    std::fs::rename(scene.manifests.path(), &away).unwrap();
    scene.launch(&[]);
    wait_until("the node frees itself", || {
        let bound = scene.addresses("kube-ipvs0");
        OUTSIDE.iter().all(|address| !bound.contains(address)) && scene.servers("-t", vip).is_none()
    });
    assert_reached(&scene, 6443, "without objects");
    for address in WEB {
        assert!(
            scene
                .addresses("kube-ipvs0")
                .contains(&address.parse().unwrap())
        );
    }
    // And it stays free when they come.
    std::fs::rename(&away, scene.manifests.path()).unwrap();
    wait_until("it is told", || {
        let log = scene.daemon.as_ref().unwrap().log();
        log.contains("is an address that the node needs")
    });
    assert!(!scene.addresses("kube-ipvs0").contains(&OUTSIDE[0]));
    assert_reached(&scene, 6443, "with objects");
    wait_until("it is routed", || {
        scene.members("KUBE-6-IPVS-ROUTED").len() == 2
    });
    assert_served(&scene, "with objects");
}

/// The broadcast address of a link stays one, whatever a Service asks for.
#[test]
fn a_broadcast_address_stays_one() {
    let mut scene = Scene::new(1);
    let IpAddr::V4(bridge) = BRIDGE[0] else {
        panic!("{BRIDGE:?}")
    };
    let broadcast = IpAddr::V4(bridge | Ipv4Addr::new(0, 0, 0, 255));
    scene
        .manifests
        .write("web.yaml", &web(&external(&[broadcast.to_string()])));
    scene.endpoints(&[0]);
    scene.launch(&[]);
    scene.await_servers("-t", SocketAddr::new(broadcast, PORT), &[(0, 1)]);
    wait_until("it is told", || {
        let log = scene.daemon.as_ref().unwrap().log();
        log.contains("is an address that the node needs")
    });
    scene.daemon.as_mut().unwrap().settle();
    assert!(!scene.addresses("kube-ipvs0").contains(&broadcast));
    let node = scene.topology.node();
    let route = node.tool(&format!("ip route get {broadcast}"));
    assert!(route.starts_with("broadcast"), "{route}");
    assert_eq!(scene.members("KUBE-IPVS-ROUTED").len(), 2);
}

/// A pod's address, one of the pods' networks, and a port of the node's own on which it listens.
#[test]
fn a_pod_and_a_listener_keep_what_is_theirs() {
    let [pod4, pod6] = pod_addresses(1).map(|a| a.to_string());
    let [node4, node6] = NODE.map(|a| a.to_string());
    let mut scene = Scene::new(2);
    let _host = scene
        .topology
        .node()
        .enter(|| Server::listen("host", PORT))
        .unwrap();
    let wanted = external(&[pod4, pod6, node4, node6, "198.51.100.7".to_owned()]);
    scene.manifests.write("web.yaml", &web(&wanted));
    scene.endpoints(&[0]);
    scene.launch(&[]);
    let free = SocketAddr::new("198.51.100.7".parse().unwrap(), PORT);
    scene.await_servers("-t", free, &[(0, 1)]);
    for address in NODE {
        let to = SocketAddr::new(address, PORT);
        let answer = scene.topology.outside().enter(|| http_get(to));
        assert_eq!(answer.unwrap().name, "host", "{to}");
    }
    let bound = scene.addresses("kube-ipvs0");
    for address in pod_addresses(1) {
        assert!(!bound.contains(&address), "{bound:?}");
    }
    scene.launch(&["--keep-node-listeners=false"]);
    scene.await_servers("-t", SocketAddr::new(NODE[0], PORT), &[(0, 1)]);
}

/// One Service of a few KiB that would be a million virtual servers: others are served at once, and the daemon stays small.
#[test]
fn a_thousand_addresses_and_ports_harm_nobody() {
    let scene = Scene::web(1, &[0], "", &[]);
    let mut ports = String::new();
    let mut addresses = Vec::new();
    for n in 0..1000_u16 {
        let _ = writeln!(ports, "  - {{name: p{n}, port: {}}}", 1000 + n);
        addresses.push(format!("198.18.{}.{}", n / 250, n % 250 + 1));
    }
    let giant = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: giant}}\nspec:\n  clusterIP: 10.96.7.7\n  ports:\n{ports}{}",
        external(&addresses)
    );
    scene.manifests.write("giant.yaml", &giant);
    wait_up_to(Duration::from_secs(60), "it is told", || {
        let log = scene.daemon.as_ref().unwrap().log();
        log.contains("is over the 5000 virtual servers that a Service may have")
    });
    wait_up_to(Duration::from_secs(60), "what fits is served", || {
        let saved = scene.topology.node().tool("ipvsadm -Sn");
        saved.lines().filter(|line| line.starts_with("-A")).count() >= 5000
    });
    let other = service("other", &["10.96.0.11"], &[("tcp", "TCP", PORT, 0)]);
    scene.manifests.write("other.yaml", &other);
    scene.topology.outside().enter(|| {
        assert!(http_get(vips()[0]).is_ok());
    });
    let added = "10.96.0.11:80";
    wait_until("another Service is served", || {
        scene.topology.node().tool("ipvsadm -Sn").contains(added)
    });
    let status = std::fs::read_to_string(format!(
        "/proc/{}/status",
        scene.daemon.as_ref().unwrap().pid()
    ));
    let status = status.unwrap();
    let peak = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .unwrap();
    let peak_kib: u32 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    println!("peak of the daemon: {peak_kib} KiB");
    assert!(peak_kib < 100 * 1024, "{peak_kib} KiB");
}
