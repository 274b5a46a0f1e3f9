//! Health check node ports: what is told to load balancers, and when packets may come.

use ipvs_proxy_core::guard::Cause;
use ipvs_proxy_core::health::HealthPort;
use ipvs_proxy_core::model::NodePortAddresses;
use ipvs_proxy_core::op::FailureKind;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::state::{Key, Role};
use ipvs_proxy_netlink::Family::{V4, V6};

use crate::common::*;

/// `172.20.1.1:80` with a load balancer's address and this health check node port.
pub(crate) fn asked(port: u16) -> World {
    let mut w = World::new();
    w.put(asking(port));
    w
}

fn asking(port: u16) -> ServiceWords {
    let svc1 = service("svc1").cluster_ip("172.20.1.1").ingress("1.2.3.4");
    svc1.tcp(80).health_check(port)
}

fn pods(local: u8) -> SliceWords {
    let mut pods = slice("svc1").tcp(80).endpoint("10.0.2.1");
    for pod in 1..=local {
        pods = pods.endpoint(&format!("10.0.1.{pod}")).local();
    }
    pods
}

fn shown(news: Vec<(u16, Option<HealthPort>)>) -> Vec<String> {
    let text = |(port, health)| match health {
        None => format!("{port}: closed"),
        Some(HealthPort {
            service,
            addresses,
            local_endpoints,
        }) => {
            let on: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            format!("{port}: {service} {local_endpoints} on {}", on.join(", "))
        }
    };
    news.into_iter().map(text).collect()
}

/// Works until there is nothing to do now; what is told since the last call.
pub(crate) fn told(w: &mut World) -> Vec<String> {
    w.settle();
    shown(w.planner.take_health_ports())
}

/// The ops since the last call that let packets pass to the port, or no longer.
fn passes(w: &mut World) -> Vec<String> {
    let ops = w.ops().into_iter();
    ops.filter(|op| op.contains("entry") && op.contains("HEALTH-CHECK"))
        .collect()
}

#[test]
fn what_counts_is_told_and_each_change_once() {
    let mut w = asked(30001);
    let at = |number: usize| [format!("30001: ns1/svc1 {number} on 0.0.0.0, ::")];
    assert_eq!(told(&mut w), at(0));
    assert_eq!(told(&mut w), [""; 0]);
    w.put(pods(2));
    assert_eq!(told(&mut w), at(2));
    w.put(pods(2).endpoint("10.0.2.2"));
    assert_eq!(told(&mut w), [""; 0], "it runs elsewhere");
    let mut last = 2;
    for (words, number) in [
        (pods(1).not_ready(), 0),
        (pods(1).terminating(), 0),
        (pods(1).dying(), 0),
        // As if it were ready, which is what it was asked to be.
        (pods(1).published(), 1),
        (pods(0), 0),
        (pods(3), 3),
    ] {
        w.put(words);
        let now = w.planner.take_health_ports();
        assert_eq!(now, [], "it is not planned yet");
        let news = told(&mut w);
        let expected = at(number).into_iter().filter(|_| number != last);
        assert_eq!(news, expected.collect::<Vec<_>>());
        last = number;
    }
    // An address of each family is one pod.
    w.put(
        service("svc1")
            .cluster_ip("172.20.1.1")
            .cluster_ip("fd00::1")
            .tcp(80)
            .health_check(30001),
    );
    w.put(pods(2));
    w.put(
        slice("svc1")
            .named("v6")
            .tcp(80)
            .endpoint("fd00:10::1")
            .local()
            .endpoint("fd00:10::2")
            .local()
            .endpoint("fd00:10::3")
            .not_ready()
            .local(),
    );
    assert_eq!(told(&mut w), at(2));
    assert_eq!(
        passes(&mut w),
        [
            "add entry 30001 of set KUBE-HEALTH-CHECK-NODE-PORT",
            "add entry 30001 of set KUBE-6-HEALTH-CHECK-NODE-PORT",
        ]
    );
}

#[test]
fn a_port_opens_moves_and_closes() {
    let mut w = asked(30001);
    w.put(pods(1));
    told(&mut w);
    w.put(asking(30002));
    assert_eq!(
        told(&mut w),
        ["30001: closed", "30002: ns1/svc1 1 on 0.0.0.0, ::"]
    );
    // Of another policy, or another type, it is not asked: the model has no port then.
    w.put(service("svc1").cluster_ip("172.20.1.1").tcp(80));
    assert_eq!(told(&mut w), ["30002: closed"]);
    w.put(asking(30002));
    told(&mut w);
    w.no_service("svc1");
    assert_eq!(told(&mut w), ["30002: closed"]);
    let set = "of set KUBE-HEALTH-CHECK-NODE-PORT";
    assert_eq!(
        passes(&mut w),
        [
            format!("add entry 30001 {set}"),
            format!("add entry 30002 {set}"),
            format!("remove entry 30001 {set}"),
            format!("remove entry 30002 {set}"),
            format!("add entry 30002 {set}"),
            format!("remove entry 30002 {set}"),
        ]
    );
    // Without a port, or in a family that is not served, nobody can come.
    w.put(service("svc1").cluster_ip("172.20.1.1").health_check(30001));
    assert_eq!(told(&mut w), [""; 0]);
    let mut w = World::only(V6);
    w.put(asking(30001));
    assert_eq!(told(&mut w), [""; 0]);
}

/// The kernel has it before, and until after, packets may come; and what can't be in the kernel is not told.
#[test]
fn a_port_opens_when_the_kernel_has_its_service() {
    let mut w = asked(30001);
    w.put(pods(1));
    let ops = w.ops();
    let at = |text: &str| ops.iter().position(|op| op.contains(text)).unwrap();
    assert!(
        at("add entry 30001") > at("add address 1.2.3.4"),
        "{ops:#?}"
    );
    assert!(at("add entry 30001") > at("add real server"), "{ops:#?}");

    let mut w = World::new();
    w.kernel.refuse.insert(Key::Link, FailureKind::Busy);
    w.put(asking(30001));
    w.put(pods(2));
    assert_eq!(told(&mut w), [""; 0]);
    w.kernel.refuse.clear();
    w.pass(std::time::Duration::from_secs(60));
    assert_eq!(told(&mut w), ["30001: ns1/svc1 2 on 0.0.0.0, ::"]);

    // More is told when it is there, less at once.
    for (number, at_once) in [(3, false), (1, true)] {
        w.put(pods(number));
        let news = [format!("30001: ns1/svc1 {number} on 0.0.0.0, ::")];
        let ops = w.planner.next(w.now);
        assert!(!ops.is_empty());
        let now = shown(w.planner.take_health_ports());
        assert_eq!(now == news, at_once, "{now:?}");
        let outcomes = ipvs_proxy_core::op::Dataplane::apply(&mut w.kernel, &ops);
        w.planner.commit(ops.into_iter().zip(outcomes), w.now);
        let later = told(&mut w);
        assert_eq!(later == news, !at_once, "{later:?}");
    }
}

/// Who asks for another Service's port goes without, and has it when that is gone, whatever came first.
#[test]
fn the_older_of_two_services_has_a_port() {
    let svc = |n: u8| {
        let svc = service(&format!("svc{n}")).cluster_ip(&format!("172.20.1.{n}"));
        svc.tcp(80).health_check(30001).created(n.into())
    };
    for order in [[1, 2], [2, 1]] {
        let mut w = World::new();
        w.put(slice("svc2").tcp(80).endpoint("10.0.1.1").local());
        let mut lost = Vec::new();
        for n in order {
            w.put(svc(n));
            told(&mut w);
            lost.extend(w.planner.take_refused());
        }
        let lost: Vec<_> = lost.iter().map(|r| (&r.service, r.cause)).collect();
        assert_eq!(lost, [(&name("svc2"), Cause::HealthCheckNodePort)]);
        assert_eq!(w.planner.health_port(30001), Some(&name("svc1")));
        // What changes of the other one is no news.
        w.put(slice("svc2").tcp(80).endpoint("10.0.1.2").local());
        assert_eq!(told(&mut w), [""; 0]);
        assert_eq!(w.planner.take_refused(), []);
        w.no_service("svc1");
        assert_eq!(told(&mut w), ["30001: ns1/svc2 1 on 0.0.0.0, ::"]);
        assert_eq!(
            passes(&mut w),
            ["add entry 30001 of set KUBE-HEALTH-CHECK-NODE-PORT"]
        );
    }
}

/// `--nodeport-addresses` counts here, too; and the Service's own load balancer's address is local to the node.
#[test]
fn where_it_is_listened() {
    for (networks, primary, localhost, expected) in [
        (&[][..], false, false, "0.0.0.0, ::"),
        (&["192.0.2.0/24"], false, false, "1.2.3.4, 192.0.2.1, ::"),
        (
            &["192.0.2.0/24", "fd00::/64"],
            false,
            false,
            "1.2.3.4, 192.0.2.1, fd00::1",
        ),
        (
            &["0.0.0.0/0"],
            false,
            false,
            "1.2.3.4, 127.0.0.1, 192.0.2.1, 198.51.100.1, ::",
        ),
        (&["127.0.0.0/8"], false, false, "1.2.3.4, 127.0.0.1, ::"),
        (&["203.0.113.0/24"], false, false, "1.2.3.4, ::"),
        (&[], true, false, "1.2.3.4, 192.0.2.1, fd00::1"),
        (&[], false, true, "1.2.3.4, 127.0.0.1, ::1"),
    ] {
        let networks: Vec<_> = networks
            .iter()
            .map(|net: &&str| net.parse().unwrap())
            .collect();
        let node_port_addresses = NodePortAddresses {
            networks: networks.clone(),
            primary,
            localhost,
            ..NodePortAddresses::default()
        };
        let mut w = World::with(Config {
            node_port_addresses,
            ..Config::default()
        });
        w.planner.await_node_addresses();
        w.put(asking(30001));
        assert_eq!(told(&mut w), [""; 0], "no address is known");
        w.node(&["192.0.2.1", "198.51.100.1", "fd00::1"]);
        w.links(&["192.0.2.1", "198.51.100.1", "fd00::1"]);
        let expected = format!("30001: ns1/svc1 0 on {expected}");
        assert_eq!(told(&mut w), [expected], "{networks:?}");
        w.links(&["192.0.2.1", "192.0.2.7", "198.51.100.1", "fd00::1"]);
        let news = told(&mut w);
        let more = networks.iter().any(|net| net.contains(&ip("192.0.2.7")));
        assert_eq!(news.len(), usize::from(more), "{networks:?}: {news:?}");
        assert!(news.iter().all(|news| news.contains("192.0.2.7")));
    }
    // Another node's address is not bound here.
    let mut w = World::with(Config {
        node_port_addresses: NodePortAddresses {
            primary: true,
            ..NodePortAddresses::default()
        },
        families: vec![V4],
        ..Config::default()
    });
    w.node(&["192.0.2.1"]);
    w.put(asking(30001));
    let needed = ipvs_proxy_core::guard::Needed::host(ip("1.2.3.4"));
    w.put(ipvs_proxy_core::model::Change::Needed(
        "router".into(),
        [needed].into(),
    ));
    assert_eq!(told(&mut w), ["30001: ns1/svc1 0 on 192.0.2.1"]);
}

/// Packets may pass to a port only where it is the daemon that listens on it.
#[test]
fn entries_follow_what_is_listened_on() {
    let svc = || asking(30001).cluster_ip("fd00::1");
    let add = |family| format!("add entry 30001 of set KUBE-{family}HEALTH-CHECK-NODE-PORT");
    let remove = |family| format!("remove entry 30001 of set KUBE-{family}HEALTH-CHECK-NODE-PORT");
    let mut w = World::new();
    w.planner.await_health_ports();
    w.put(svc());
    assert_eq!(told(&mut w).len(), 1);
    assert_eq!(passes(&mut w), [""; 0]);
    w.planner.note_health_port(30001, vec![V6]);
    assert_eq!(passes(&mut w), [add("6-")]);
    w.planner.note_health_port(30001, vec![V4, V6]);
    assert_eq!(passes(&mut w), [add("")]);
    w.planner.note_health_port(30001, vec![V4]);
    assert_eq!(passes(&mut w), [remove("6-")]);
    // Closed and opened again: what was listened on before counts no more.
    w.no_service("svc1");
    assert_eq!(told(&mut w), ["30001: closed"]);
    assert_eq!(passes(&mut w), [remove("")]);
    w.planner.note_health_port(30001, vec![V4, V6]);
    w.put(svc());
    assert_eq!(told(&mut w).len(), 1);
    assert_eq!(passes(&mut w), [""; 0]);
    w.planner.note_health_port(30001, vec![V4, V6]);
    assert_eq!(passes(&mut w), [add(""), add("6-")]);

    // A new process touches nothing before it knows.
    w.restart();
    w.planner.await_health_ports();
    assert_eq!(told(&mut w).len(), 1);
    assert_eq!(w.ops(), [""; 0]);
    w.planner.note_health_port(30001, vec![V4, V6]);
    assert_eq!(w.ops(), [""; 0]);
    w.restart();
    w.planner.await_health_ports();
    told(&mut w);
    w.planner.note_health_port(30001, vec![]);
    assert_eq!(w.ops(), [remove(""), remove("6-")]);
    let held =
        |key: &Key| matches!(key, Key::Entry(set, _) if set.role == Role::HealthCheckNodePort);
    assert!(!w.kernel.state.keys().any(held));
}

/// Without node ports (`allocateLoadBalancerNodePorts: false`) all else is as with them.
#[test]
fn a_load_balancer_needs_no_node_ports() {
    let mut w = World::new();
    w.node(&["100.101.102.103"]);
    w.put(asking(30001));
    w.put(pods(1));
    w.holds(&[
        "172.20.1.1:80/tcp -> 10.0.1.1:80, 10.0.2.1:80",
        "1.2.3.4:80/tcp -> 10.0.1.1:80, 10.0.2.1:80",
        "bound: 1.2.3.4, 172.20.1.1",
        "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
        "KUBE-LOAD-BALANCER: 1.2.3.4,tcp:80",
        "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1",
        "KUBE-HEALTH-CHECK-NODE-PORT: 30001",
    ]);
    assert_eq!(told(&mut w), ["30001: ns1/svc1 1 on 0.0.0.0, ::"]);
}
