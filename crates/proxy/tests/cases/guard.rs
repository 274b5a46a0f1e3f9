//! Addresses that a Service does not get, and the bounds of one Service.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use ipvs_proxy_core::guard::{Allowed, Cause, Listener, Needed};
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::state::{Key, Role};
use ipvs_proxy_netlink::{Family, Protocol};

use crate::common::*;

fn networks(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn needed(addresses: &[&str]) -> Change {
    Change::Needed(
        "routers".into(),
        addresses
            .iter()
            .map(|text| Needed::host(ip(text)))
            .collect(),
    )
}

fn listens(address: Option<&str>, port: u16) -> Listener {
    Listener {
        protocol: Protocol::Tcp,
        address: address.map(ip),
        port,
    }
}

/// `10.20.30.41:80` and, as an external IP and as a load balancer's address, `vip`; a pod 10.180.0.1.
fn asking(config: Config, vip: &str) -> World {
    let mut w = World::with(config);
    w.node(&["100.101.102.103"]);
    let svc1 = service("svc1")
        .cluster_ip("10.20.30.41")
        .cluster_ip("fd00::41");
    w.put(svc1.external_ip(vip).ingress(vip).tcp(80));
    w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
    w
}

fn serves(w: &mut World, vip: &str) -> bool {
    w.settle();
    let held = |key: &Key| match key {
        Key::VirtualServer(ipvs_netlink::VirtualServerKey::Address { address, .. })
        | Key::Address(address) => *address == ip(vip),
        _ => false,
    };
    w.kernel.state.keys().any(held)
}

fn causes(w: &mut World) -> BTreeSet<Cause> {
    let refused = w.planner.take_refused();
    refused.into_iter().map(|refused| refused.cause).collect()
}

/// What is somebody's already stays theirs, as an external IP and as a load balancer's address; what is nobody's is served.
#[test]
fn an_address_that_is_somebodys_is_not_taken() {
    for (vip, cause) in [
        ("5.6.7.8", None),
        ("127.0.0.1", Some(Cause::Reserved)),
        ("::1", Some(Cause::Reserved)),
        ("169.254.169.254", Some(Cause::Reserved)),
        ("fe80::1", Some(Cause::Reserved)),
        ("224.0.0.251", Some(Cause::Reserved)),
        ("ff02::1", Some(Cause::Reserved)),
        ("0.0.0.0", Some(Cause::Reserved)),
        ("::", Some(Cause::Reserved)),
        ("255.255.255.255", Some(Cause::Reserved)),
        ("10.244.7.7", Some(Cause::PodNetwork)),
        ("fd44::7", Some(Cause::PodNetwork)),
        ("10.245.1.9", Some(Cause::PodNetwork)),
        ("10.180.0.1", Some(Cause::Endpoint)),
        ("10.180.0.2", Some(Cause::Endpoint)),
        // The node's own: only its ports can be somebody's.
        ("100.101.102.103", None),
    ] {
        let mut w = asking(
            Config {
                cluster_cidrs: networks(&["10.244.0.0/16", "fd44::/64"]),
                ..Config::default()
            },
            vip,
        );
        w.put(Change::PodCidrs(networks(&["10.245.1.0/24"])));
        w.put(slice("other").tcp(80).endpoint("10.180.0.2"));
        // A pod of the host network.
        w.put(slice("agent").tcp(80).endpoint("100.101.102.103").local());
        assert_eq!(serves(&mut w, vip), cause.is_none(), "{vip}");
        assert!(serves(&mut w, "10.20.30.41"));
        assert_eq!(causes(&mut w), BTreeSet::from_iter(cause), "{vip}");
    }
}

/// Whoever may write a slice could take any Service's address away else.
#[test]
fn an_endpoint_that_is_no_pod_takes_no_address_away() {
    let mut w = asking(Config::default(), "192.0.2.7");
    w.put(slice("other").tcp(80).endpoint("192.0.2.7").unplaced());
    assert!(serves(&mut w, "192.0.2.7"));
    assert_eq!(causes(&mut w), BTreeSet::new());
    // Also beside a pod, and after one.
    w.put(slice("pod").tcp(80).endpoint("192.0.2.7"));
    assert!(!serves(&mut w, "192.0.2.7"));
    w.put(slice("pod").tcp(80).endpoint("192.0.2.7").unplaced());
    assert!(serves(&mut w, "192.0.2.7"));
    w.no_slice("other");
    assert!(serves(&mut w, "192.0.2.7"));
}

/// Whatever comes first: an address that becomes somebody's is let go, and served again when it is nobody's.
#[test]
fn an_address_follows_what_becomes_of_it() {
    let mut w = asking(Config::default(), "192.0.2.7");
    assert!(serves(&mut w, "192.0.2.7"));
    w.put(slice("other").tcp(80).endpoint("192.0.2.7"));
    assert!(!serves(&mut w, "192.0.2.7"));
    // Another slice with the same endpoint goes: it is still one.
    w.put(slice("other").named("again").tcp(80).endpoint("192.0.2.7"));
    w.no_slice("again");
    assert!(!serves(&mut w, "192.0.2.7"));
    w.no_slice("other");
    assert!(serves(&mut w, "192.0.2.7"));
    w.put(Change::PodCidrs(networks(&["192.0.2.0/24"])));
    assert!(!serves(&mut w, "192.0.2.7"));
    assert_eq!(causes(&mut w), [Cause::PodNetwork, Cause::Endpoint].into());
    // What comes and goes is told once.
    w.put(Change::PodCidrs(networks(&["10.1.0.0/24"])));
    w.put(slice("other").tcp(80).endpoint("192.0.2.7"));
    assert!(!serves(&mut w, "192.0.2.7"));
    assert_eq!(causes(&mut w), BTreeSet::new());
}

/// What of a VIP is in the kernel: whether it is bound, routed, and the ports that are marked.
fn routed(w: &mut World, vip: &str) -> (bool, bool, Vec<String>) {
    w.settle();
    let state = &w.kernel.state;
    let marked = state.keys().filter_map(|key| match key {
        Key::Entry(set, entry) if set.role == Role::Routed => Some(entry.to_string()),
        _ => None,
    });
    let [bound, route] = [Key::Address(ip(vip)), Key::Route(ip(vip))];
    (
        state.contains_key(&bound),
        state.contains_key(&route),
        marked.collect(),
    )
}

/// An address that the node needs is served without being local, but for the ports by which the node uses it. Whatever comes
/// first, and whoever needs it.
#[test]
fn an_address_that_the_node_needs_is_routed_by_mark() {
    let vip = "192.0.2.7";
    let api_server = |port| {
        let mut api = slice("kubernetes").tcp(443).target(port).endpoint(vip);
        api.of_api_server();
        api
    };
    let rule = Key::RoutingRule(Family::V4, 0x2000);
    for needed_first in [true, false] {
        let mut w = asking(Config::default(), vip);
        if !needed_first {
            assert_eq!(routed(&mut w, vip), (true, false, vec![]));
        }
        w.put(needed(&[vip, "192.0.2.8"]));
        let expected = (false, true, vec!["192.0.2.7,tcp:80".to_owned()]);
        assert_eq!(routed(&mut w, vip), expected);
        assert!(serves(&mut w, vip) && w.kernel.state.contains_key(&rule));
        let told = w.planner.take_refused();
        assert_eq!(
            told[0].to_string(),
            "Service ns1/svc1: status.loadBalancer.ingress 192.0.2.7 is an address that the node needs (of the API server, another \
             node, a router, a resolver or a link's broadcasts): its ports are served, but it is not made local to the node, so are 1 more"
        );
        // A port that it needs there is not taken from it.
        w.put(Change::Needed(
            "API server".into(),
            [Needed {
                address: ip(vip),
                port: Some(80),
            }]
            .into(),
        ));
        assert_eq!(routed(&mut w, vip), (false, false, vec![]));
        assert!(!serves(&mut w, vip) && !w.kernel.state.contains_key(&rule));
        let told = w.planner.take_refused();
        assert_eq!(
            told[0].to_string(),
            "Service ns1/svc1: 192.0.2.7:80/tcp is a port that the node needs (of the API server or a resolver): not served, nor are 1 more"
        );
        w.put(Change::Needed("API server".into(), BTreeSet::new()));
        assert_eq!(routed(&mut w, vip), expected);
        w.put(needed(&["192.0.2.8"]));
        assert_eq!(routed(&mut w, vip), (true, false, vec![]));
        assert!(!w.kernel.state.contains_key(&rule));
        // The endpoints of the API server's own Service, at their ports.
        w.put(api_server(6443));
        assert_eq!(routed(&mut w, vip), expected);
        w.put(api_server(80));
        assert_eq!(routed(&mut w, vip), (false, false, vec![]));
        w.no_slice("kubernetes");
        assert_eq!(routed(&mut w, vip), (true, false, vec![]));
        assert_eq!(w.kernel.leaks, []);
        w.ops();
        w.restart();
        assert_eq!(w.ops(), [""; 0]);
    }
}

/// Two Services at one such address share its route; it goes with the last.
#[test]
fn services_share_a_routed_address() {
    let vip = "2001:db8::7";
    let mut w = asking(Config::default(), vip);
    w.put(needed(&[vip]));
    let other = service("svc2")
        .cluster_ip("fd00::42")
        .external_ip(vip)
        .tcp(81);
    w.put(other);
    let (_, route, marked) = routed(&mut w, vip);
    assert_eq!((route, marked.len()), (true, 2));
    w.no_service("svc1");
    let expected = (false, true, vec!["2001:db8::7,tcp:81".to_owned()]);
    assert_eq!(routed(&mut w, vip), expected);
    w.ops();
    w.restart();
    assert_eq!(w.ops(), [""; 0]);
    w.no_service("svc2");
    assert_eq!(routed(&mut w, vip), (false, false, vec![]));
    let left = w
        .kernel
        .state
        .keys()
        .find(|key| matches!(key, Key::RoutingRule(..)));
    assert_eq!(left, None);
}

/// Without an endpoint they are refused by IPVS, and do not reach what the other host has on that port.
#[test]
fn a_routed_address_without_endpoints_is_still_marked() {
    let vip = "192.0.2.7";
    let mut w = asking(Config::default(), vip);
    w.put(needed(&[vip]));
    w.no_slice("svc1");
    let expected = (false, true, vec!["192.0.2.7,tcp:80".to_owned()]);
    assert_eq!(routed(&mut w, vip), expected);
}

/// A ClusterIP is the API server's word: the cluster's name server is a resolver of many nodes.
#[test]
fn a_cluster_ip_is_served_although_the_node_needs_it() {
    let mut w = World::new();
    w.put(needed(&["10.20.30.41"]));
    w.put(service("svc1").cluster_ip("10.20.30.41").tcp(53));
    w.put(slice("svc1").tcp(53).endpoint("10.20.30.41"));
    assert!(serves(&mut w, "10.20.30.41"));
    assert_eq!(causes(&mut w), BTreeSet::new());
}

#[test]
fn kinds_of_addresses_can_be_denied() {
    for (external, balancer, held) in [
        (Allowed::All, Allowed::All, [true, true]),
        (Allowed::Nothing, Allowed::All, [false, true]),
        (Allowed::All, Allowed::Nothing, [true, false]),
        (
            Allowed::Networks(networks(&["5.6.7.0/24", "2001:db8::/32"])),
            Allowed::Networks(networks(&["1.2.0.0/16"])),
            [true, true],
        ),
        (
            Allowed::Networks(networks(&["1.2.0.0/16"])),
            Allowed::Networks(networks(&["5.6.7.0/24"])),
            [false, false],
        ),
    ] {
        let mut w = World::with(Config {
            external_ips: external,
            load_balancer_ips: balancer,
            ..Config::default()
        });
        let svc1 = service("svc1").cluster_ip("10.20.30.41").tcp(80);
        w.put(svc1.external_ip("5.6.7.8").ingress("1.2.3.4"));
        assert_eq!([serves(&mut w, "5.6.7.8"), serves(&mut w, "1.2.3.4")], held);
        assert_eq!(causes(&mut w).is_empty(), held == [true, true]);
    }
}

/// `ssh` goes on reaching the node by its own address.
#[test]
fn a_port_on_which_the_node_listens_stays_the_nodes() {
    let node = "100.101.102.103";
    for keep in [true, false] {
        let mut w = World::with(Config {
            keep_node_listeners: keep,
            ..Config::default()
        });
        w.node(&[node]);
        let ports = service("svc1")
            .cluster_ip("10.20.30.41")
            .tcp(22)
            .tcp(80)
            .tcp(10250);
        w.put(ports.external_ip(node).external_ip("5.6.7.8"));
        let listeners = [
            listens(None, 22),
            listens(Some(node), 10250),
            // Another address's.
            listens(Some("127.0.0.1"), 80),
        ];
        w.put(Change::Listeners(listeners.into()));
        w.settle();
        let has = |w: &World, text| w.kernel.state.contains_key(&Key::VirtualServer(vs(text)));
        assert_eq!(has(&w, "100.101.102.103:22/tcp"), !keep);
        assert_eq!(has(&w, "100.101.102.103:10250/tcp"), !keep);
        assert!(has(&w, "100.101.102.103:80/tcp"));
        assert!(has(&w, "5.6.7.8:22/tcp") && has(&w, "10.20.30.41:22/tcp"));
        let told = w.planner.take_refused();
        if keep {
            assert_eq!(told.len(), 1, "{told:?}");
            assert_eq!((told[0].cause, told[0].count), (Cause::Listener, 2));
        }
        w.put(Change::Listeners([listens(None, 80)].into()));
        w.settle();
        assert!(has(&w, "100.101.102.103:22/tcp"));
        assert_eq!(has(&w, "100.101.102.103:80/tcp"), !keep);
    }
}

fn counts(w: &World) -> (usize, usize) {
    let count = |wanted: fn(&Key) -> bool| w.kernel.state.keys().filter(|k| wanted(k)).count();
    (
        count(|key| matches!(key, Key::VirtualServer(_))),
        count(|key| matches!(key, Key::RealServer(..))),
    )
}

/// What fits is served in a stable order: ClusterIP, node ports, load balancer, external IP.
#[test]
fn a_service_over_its_bounds_keeps_what_fits() {
    let giant = || {
        let mut s = service("svc1").cluster_ip("10.20.30.41");
        for port in [80, 81, 82] {
            s = s.tcp(port).node_port(30000 + port);
        }
        s.ingress("1.2.3.4").external_ip("5.6.7.8")
    };
    let endpoints = slice("svc1").tcp(80).tcp(81).tcp(82);
    let endpoints = endpoints.endpoint("10.180.0.1").endpoint("10.180.0.2");
    for (virtual_servers, real_servers, held) in [
        (0, 0, (12, 24)),
        (12, 24, (12, 24)),
        (2, 0, (2, 4)),
        (5, 0, (5, 10)),
        (0, 3, (2, 3)),
        (0, 7, (4, 7)),
    ] {
        let mut w = World::with(Config {
            max_virtual_servers: virtual_servers,
            max_real_servers: real_servers,
            ..Config::default()
        });
        w.node(&["100.101.102.103"]);
        w.put(giant());
        w.put(endpoints.clone());
        w.put(service("svc2").cluster_ip("10.20.30.42").tcp(80));
        w.settle();
        assert_eq!(counts(&w), (held.0 + 1, held.1));
        let order = [
            "10.20.30.41:80/tcp",
            "10.20.30.41:81/tcp",
            "10.20.30.41:82/tcp",
            "100.101.102.103:30080/tcp",
            "100.101.102.103:30081/tcp",
            "100.101.102.103:30082/tcp",
            "1.2.3.4:80/tcp",
        ];
        for server in order.iter().take(held.0) {
            assert!(
                w.kernel.state.contains_key(&Key::VirtualServer(vs(server))),
                "{server}"
            );
        }
        let told = w.planner.take_refused();
        let left: usize = told.iter().map(|refused| refused.count).sum();
        let cut = usize::from(held.1 % 2 == 1);
        assert_eq!(left > 0, held != (12, 24));
        // What a port without its ClusterIP would have besides is not counted.
        if held.0 >= 3 {
            assert_eq!(left, 12 - held.0 + cut, "{told:?}");
        }
        w.ops();
        w.restart();
        assert_eq!(w.ops(), [""; 0]);
    }
}

/// 80 KiB of a Service that would be a million virtual servers, and others beside it.
#[test]
fn a_thousand_addresses_and_a_thousand_ports() {
    let mut giant = service("svc1").cluster_ip("10.20.30.41");
    for n in 0..1000_u16 {
        let address = format!("5.6.{}.{}", n / 250, n % 250 + 1);
        giant = giant.external_ip(&address).tcp(1000 + n);
    }
    let mut w = World::new();
    w.put(service("svc2").cluster_ip("10.20.30.42").tcp(80));
    let started = Instant::now();
    w.put(giant);
    w.settle();
    // With a product of 1,000,000 it takes minutes.
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(counts(&w), (5001, 0));
    let told = w.planner.take_refused();
    assert_eq!(told.len(), 1);
    assert_eq!(
        told[0].to_string(),
        "Service ns1/svc1: 5.6.0.5:1000/tcp is over the 5000 virtual servers that a Service may have \
         (--max-virtual-servers-per-service): not served, nor are 995999 more"
    );
}
