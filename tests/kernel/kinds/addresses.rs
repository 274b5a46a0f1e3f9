//! Addresses that a Service has besides its ClusterIPs, and node ports on addresses that come and go.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tests::daemon::{wait_until, wait_up_to};
use tests::topology::{BRIDGE, NODE};
use tests::traffic::{Server, http_get, udp_ask};

use super::{NODE_PORT, PORT, Scene, vips, web};

/// How soon node ports must follow an address.
const SOON: Duration = Duration::from_secs(2);
const EXTERNAL: [&str; 2] = ["198.51.100.7", "2001:db8:7::7"];
const BALANCED: [&str; 2] = ["203.0.113.5", "2001:db8:5::5"];
/// An ingress whose balancer sends to node ports by itself.
const BY_PROXY: &str = "203.0.113.6";
/// An address that comes to the node and goes.
const GUEST: &str = "192.168.10.99";

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// Lines below a Service's `spec` that give it external addresses.
fn external(addresses: &[&str]) -> String {
    let quoted: Vec<String> = addresses.iter().map(|a| format!("\"{a}\"")).collect();
    format!("  externalIPs: [{}]\n", quoted.join(", "))
}

/// A line below a Service's top that gives it ingresses.
fn balanced() -> String {
    let [v4, v6] = BALANCED;
    format!(
        "status: {{loadBalancer: {{ingress: [{{ip: {v4}}}, {{ip: \"{v6}\", ipMode: VIP}}, \
         {{ip: {BY_PROXY}, ipMode: Proxy}}]}}}}\n"
    )
}

/// That pods, the node and the outside reach it, and all of them masqueraded.
fn assert_served_masqueraded(scene: &Scene, to: SocketAddr) {
    let bridge = BRIDGE[usize::from(to.is_ipv6())];
    for (client, namespace) in scene.clients(1) {
        for (protocol, answer) in [
            ("TCP", namespace.enter(|| http_get(to))),
            ("UDP", namespace.enter(|| udp_ask(to))),
        ] {
            let answer = answer.unwrap_or_else(|error| panic!("{client} {protocol} {to}: {error}"));
            assert_eq!(
                (answer.name.as_str(), answer.peer.ip()),
                ("pod0", bridge),
                "{client} {protocol} {to}"
            );
        }
    }
}

/// Whether TCP and UDP are served there.
fn is_served(scene: &Scene, to: SocketAddr) -> bool {
    ["-t", "-u"]
        .iter()
        .all(|protocol| scene.servers(protocol, to) == Some([(0, 1)].into()))
}

fn is_absent(scene: &Scene, to: SocketAddr) -> bool {
    ["-t", "-u"]
        .iter()
        .all(|protocol| scene.servers(protocol, to).is_none())
}

#[test]
fn external_and_load_balancer_addresses_are_served() {
    let more = external(&EXTERNAL) + &balanced();
    let scene = Scene::web(2, &[0], &more, &[]);
    let bound = scene.addresses("kube-ipvs0");
    for (address, set) in EXTERNAL
        .iter()
        .zip(["KUBE-EXTERNAL-IP", "KUBE-6-EXTERNAL-IP"])
        .chain(
            BALANCED
                .iter()
                .zip(["KUBE-LOAD-BALANCER", "KUBE-6-LOAD-BALANCER"]),
        )
    {
        let to = at(address, PORT);
        assert!(bound.contains(&to.ip()), "{address}: {bound:?}");
        let member = format!("{address},tcp:{PORT}");
        assert!(scene.members(set).contains(&member), "{set}");
        assert_served_masqueraded(&scene, to);
    }
    assert!(!bound.contains(&BY_PROXY.parse().unwrap()), "{bound:?}");
    assert!(!scene.topology.node().tool("ipvsadm -Sn").contains(BY_PROXY));

    // They go, and the ClusterIP stays.
    scene.manifests.write("web.yaml", &web(""));
    for address in EXTERNAL.iter().chain(&BALANCED) {
        let to = at(address, PORT);
        wait_until(&format!("{address} goes"), || {
            is_absent(&scene, to) && !scene.addresses("kube-ipvs0").contains(&to.ip())
        });
    }
    assert!(vips().iter().all(|vip| is_served(&scene, *vip)));
}

#[test]
fn an_external_address_of_the_node_stays_the_nodes() {
    let [v4, v6] = NODE.map(|address| address.to_string());
    let scene = Scene::web(2, &[0], &external(&[&v4, &v6]), &[]);
    let node = scene.topology.node();
    let before = scene.addresses("eth0");
    let _host = node.enter(|| Server::listen("host", 22)).unwrap();
    let host_answers = |when: &str| {
        for address in NODE {
            let answer = scene
                .topology
                .outside()
                .enter(|| http_get((address, 22).into()));
            assert_eq!(answer.unwrap().name, "host", "{when}: {address}");
        }
    };
    for address in NODE {
        assert_served_masqueraded(&scene, (address, PORT).into());
        assert!(!scene.addresses("kube-ipvs0").contains(&address));
    }
    host_answers("served");

    scene.manifests.remove("web.yaml");
    for address in NODE {
        wait_until("the Service goes", || {
            is_absent(&scene, (address, PORT).into())
        });
    }
    wait_until("its ClusterIPs go", || {
        scene.addresses("kube-ipvs0").is_empty()
    });
    assert_eq!(scene.addresses("eth0"), before);
    host_answers("the Service is gone");
}

#[test]
fn an_external_address_is_handed_over_when_the_node_gets_it() {
    let scene = Scene::web(2, &[0], &external(&EXTERNAL), &[]);
    let node = scene.topology.node();
    let bound = |address: IpAddr| scene.addresses("kube-ipvs0").contains(&address);
    for (address, length) in EXTERNAL.iter().zip([32, 128]) {
        let to = at(address, PORT);
        assert_served_masqueraded(&scene, to);
        node.tool(&format!("ip addr add {address}/{length} dev eth0"));
        wait_up_to(SOON, &format!("{address} is the node's"), || {
            !bound(to.ip())
        });
        assert!(is_served(&scene, to));
        assert_served_masqueraded(&scene, to);
        node.tool(&format!("ip addr del {address}/{length} dev eth0"));
        wait_up_to(SOON, &format!("{address} is bound again"), || {
            bound(to.ip())
        });
        assert_served_masqueraded(&scene, to);
    }
}

#[test]
fn node_ports_follow_the_nodes_addresses() {
    let scene = Scene::web(2, &[0], &external(&EXTERNAL), &[]);
    let node = scene.topology.node();
    let guest = at(GUEST, NODE_PORT);
    for address in NODE.iter().chain(&BRIDGE) {
        assert!(is_served(&scene, (*address, NODE_PORT).into()), "{address}");
    }
    for round in 0..2 {
        assert!(is_absent(&scene, guest));
        node.tool(&format!("ip addr add {GUEST}/24 dev eth0"));
        wait_up_to(SOON, &format!("{guest} is served, {round}"), || {
            is_served(&scene, guest)
        });
        assert_served_masqueraded(&scene, guest);
        node.tool(&format!("ip addr del {GUEST}/24 dev eth0"));
        wait_up_to(SOON, &format!("{guest} is gone, {round}"), || {
            is_absent(&scene, guest)
        });
    }
    // A link that goes takes its addresses along.
    node.tool("ip link add extra type dummy");
    node.tool("ip link set extra up");
    node.tool(&format!("ip addr add {GUEST}/24 dev extra"));
    wait_up_to(SOON, "the other link's address is served", || {
        is_served(&scene, guest)
    });
    node.tool("ip link del extra");
    wait_up_to(SOON, "it goes with its link", || is_absent(&scene, guest));

    let saved = node.tool("ipvsadm -Sn");
    let served: Vec<&str> = saved
        .lines()
        .filter(|line| line.starts_with("-A") && line.contains(&format!(":{NODE_PORT} ")))
        .collect();
    // TCP and UDP on the node's and the bridge's two addresses each.
    assert_eq!(served.len(), 8, "{served:#?}");
    for never in EXTERNAL
        .iter()
        .chain(&super::WEB)
        .chain(&["127.0.0.1", "::1"])
    {
        assert!(is_absent(&scene, at(never, NODE_PORT)), "{served:#?}");
    }
}

#[test]
fn node_ports_keep_to_the_chosen_networks() {
    let flags = ["--nodeport-addresses=192.168.10.0/24,fd00:192::/64"];
    let scene = Scene::web(2, &[0], "", &flags);
    let node = scene.topology.node();
    for address in NODE {
        assert!(is_served(&scene, (address, NODE_PORT).into()), "{address}");
        assert_served_masqueraded(&scene, (address, NODE_PORT).into());
    }
    for address in BRIDGE {
        assert!(is_absent(&scene, (address, NODE_PORT).into()), "{address}");
    }
    let elsewhere = at("192.168.11.99", NODE_PORT);
    node.tool("ip addr add 192.168.11.99/24 dev eth0");
    node.tool(&format!("ip addr add {GUEST}/24 dev eth0"));
    // The one that came later is served, so the other one was seen as well.
    wait_up_to(SOON, "the chosen one is served", || {
        is_served(&scene, at(GUEST, NODE_PORT))
    });
    assert!(is_absent(&scene, elsewhere));
}

/// As with kube-proxy: MASQUERADE takes the link's address in the network of the next hop, not the route's.
#[test]
fn masquerading_takes_the_address_of_the_link_whatever_the_route_says() {
    let scene = Scene::web(2, &[0], "", &[]);
    let node = scene.topology.node();
    node.tool("ip address add 10.0.9.1/24 dev cbr0");
    node.tool("ip route replace 10.0.0.0/24 dev cbr0 src 10.0.9.1");
    let route = node.tool("ip route get 10.0.0.2");
    assert!(route.contains("src 10.0.9.1"), "{route}");
    let answer = scene.topology.outside().enter(|| http_get(vips()[0]));
    assert_eq!(answer.unwrap().peer.ip(), BRIDGE[0]);
}
