//! The ground the other tests stand on: plain traffic works, and IPVS as kube-proxy sets it up works with it.

use std::net::SocketAddr;

use tests::topology::{BRIDGE, NODE, OUTSIDE, Topology, pod_addresses};
use tests::traffic::{Client, Error, hold, http_get, udp_ask};

#[test]
fn plain_traffic_keeps_its_source() {
    let topology = Topology::new(2);
    let _servers = [topology.serve(0, 8080), topology.serve(1, 8080)];
    let from = [
        (topology.pod(0), pod_addresses(0)),
        (topology.outside(), OUTSIDE),
        (topology.node(), BRIDGE),
    ];
    for (namespace, own) in from {
        for (to, source) in pod_addresses(1).into_iter().zip(own) {
            let to = SocketAddr::new(to, 8080);
            for answer in namespace.enter(|| [http_get(to), udp_ask(to)]) {
                let answer = answer.unwrap_or_else(|error| panic!("{source} to {to}: {error}"));
                assert_eq!((answer.name.as_str(), answer.peer.ip()), ("pod1", source));
            }
        }
    }
}

#[test]
fn pods_reach_the_outside_and_the_outside_the_node() {
    let topology = Topology::new(1);
    let _outside = topology
        .outside()
        .enter(|| tests::traffic::Server::listen("outside", 9000))
        .unwrap();
    let _node = topology
        .node()
        .enter(|| tests::traffic::Server::listen("node", 9001))
        .unwrap();
    for family in [0, 1] {
        let answer = topology
            .pod(0)
            .enter(|| http_get((OUTSIDE[family], 9000).into()))
            .unwrap();
        assert_eq!(
            (answer.name.as_str(), answer.peer.ip()),
            ("outside", pod_addresses(0)[family])
        );
        let answer = topology
            .outside()
            .enter(|| http_get((NODE[family], 9001).into()))
            .unwrap();
        assert_eq!(
            (answer.name.as_str(), answer.peer.ip()),
            ("node", OUTSIDE[family])
        );
    }
}

#[test]
fn refused_and_silent_are_different() {
    let topology = Topology::new(1);
    let short = Client {
        timeout: std::time::Duration::from_millis(300),
        ..Client::default()
    };
    for address in pod_addresses(0) {
        let to = SocketAddr::new(address, 8080);
        assert_eq!(
            topology.node().enter(|| http_get(to)).unwrap_err(),
            Error::Refused
        );
        assert_eq!(
            topology.node().enter(|| udp_ask(to)).unwrap_err(),
            Error::Refused
        );
    }
    topology.pod(0).tool("iptables -I INPUT -j DROP");
    let to = SocketAddr::new(pod_addresses(0)[0], 8080);
    assert_eq!(
        topology.node().enter(|| short.http_get(to)).unwrap_err(),
        Error::Timeout
    );
    assert_eq!(
        topology.node().enter(|| short.udp_ask(to)).unwrap_err(),
        Error::Timeout
    );
}

#[test]
fn a_held_connection_outlives_its_listener() {
    let topology = Topology::new(1);
    let server = topology.serve(0, 8080);
    let to = SocketAddr::new(pod_addresses(0)[1], 8080);
    let source = SocketAddr::new(NODE[1], 40000);
    let mut held = topology
        .node()
        .enter(|| {
            Client {
                source: Some(source),
                ..Client::default()
            }
            .hold(to)
        })
        .unwrap();
    assert_eq!(held.answer.peer, source);
    drop(server);
    assert_eq!(
        topology.node().enter(|| hold(to)).unwrap_err(),
        Error::Refused
    );
    assert_eq!(
        topology.node().enter(|| udp_ask(to)).unwrap_err(),
        Error::Refused
    );
    held.ping().unwrap();
    held.ping().unwrap();
}

#[test]
fn ipvs_with_masquerade_reaches_every_pod() {
    let topology = Topology::new(3);
    let servers: Vec<_> = (0..3).map(|pod| topology.serve(pod, 8080)).collect();
    let node = topology.node();
    node.sysctl("ipv4/vs/conntrack", "1");
    node.tool_with_input(
        "ip -batch -",
        "link add kube-ipvs0 type dummy\naddr add 10.96.0.10/32 dev kube-ipvs0\naddr add fd96::10/128 dev kube-ipvs0 nodad\n",
    );
    let mut rules = String::new();
    for vip in ["10.96.0.10:80", "[fd96::10]:80"] {
        rules.push_str(&format!("-A -t {vip} -s rr\n-A -u {vip} -s rr\n"));
        for pod in 0..3 {
            let real = SocketAddr::new(pod_addresses(pod)[usize::from(vip.starts_with('['))], 8080);
            rules.push_str(&format!(
                "-a -t {vip} -r {real} -m\n-a -u {vip} -r {real} -m\n"
            ));
        }
    }
    node.tool_with_input("ipvsadm --restore", &rules);
    node.tool("iptables -t nat -A POSTROUTING ! -s 10.0.0.0/24 -m ipvs --ipvs -j MASQUERADE");
    node.tool("ip6tables -t nat -A POSTROUTING ! -s fd00:10::/64 -m ipvs --ipvs -j MASQUERADE");
    for vip in ["10.96.0.10:80", "[fd96::10]:80"] {
        let to: SocketAddr = vip.parse().unwrap();
        let node_address = BRIDGE[usize::from(to.is_ipv6())];
        for ask in [http_get, udp_ask] {
            let mut names: Vec<String> = Vec::new();
            for _ in 0..servers.len() {
                let answer = topology
                    .outside()
                    .enter(|| ask(to))
                    .unwrap_or_else(|error| panic!("{vip}: {error}"));
                assert_eq!(answer.peer.ip(), node_address);
                names.push(answer.name);
            }
            names.sort();
            assert_eq!(names, ["pod0", "pod1", "pod2"]);
        }
    }
}
