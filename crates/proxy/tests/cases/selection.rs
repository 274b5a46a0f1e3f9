//! Which endpoints take new connections, why the others don't, and what is written when that changes.

use std::time::Duration;

use ipvs_proxy_core::endpoints::Reason::{
    self, HintedElsewhere, LastResort, NotReady, OtherNode, OtherZone, Ready, Terminating,
};
use ipvs_proxy_core::model::TrafficPolicy::{self, Cluster, Local};
use ipvs_proxy_core::op::FailureKind;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::Key;

use crate::common::*;

/// An endpoint for each letter: upper case on this node, lower case on another; R is ready, N not, T terminates and still serves,
/// D serves no more. Behind it `+` hints it for this node, `-` for another, and a digit for a zone of that name.
fn letters(text: &str) -> SliceWords {
    let mut words = slice("svc1").tcp(80);
    for (n, endpoint) in text.split(' ').enumerate() {
        words = words.endpoint(&format!("10.0.1.{}", n + 1));
        for letter in endpoint.chars() {
            if letter.is_ascii_uppercase() {
                words = words.local();
            }
            words = match letter.to_ascii_uppercase() {
                'R' => words,
                'N' => words.not_ready(),
                'T' => words.terminating(),
                'D' => words.dying(),
                '+' => words.for_this_node(),
                '-' => words.for_another_node(),
                zone => words.for_zones(&[&zone.to_string()]),
            };
        }
    }
    words
}

#[test]
fn each_endpoint_has_its_reason() {
    let rows: [(&str, TrafficPolicy, &[Reason]); 22] = [
        // KEP-1669: who is terminating serves only where nobody is ready.
        (
            "R r N t d",
            Cluster,
            &[Ready, Ready, NotReady, Terminating, NotReady],
        ),
        (
            "n t T d",
            Cluster,
            &[NotReady, LastResort, LastResort, NotReady],
        ),
        ("n d", Cluster, &[NotReady, NotReady]),
        // The same of this node alone, whoever is ready elsewhere.
        (
            "R r T t N",
            Local,
            &[Ready, OtherNode, Terminating, OtherNode, NotReady],
        ),
        ("T r N", Local, &[LastResort, OtherNode, NotReady]),
        ("r n", Local, &[OtherNode, OtherNode]),
        // Zones: all that are ready have a hint, and one is for this zone.
        ("r1 r2 R1", Cluster, &[Ready, OtherZone, Ready]),
        ("r1 r2 r", Cluster, &[Ready, Ready, Ready]),
        ("r2 r3", Cluster, &[Ready, Ready]),
        (
            "r1 r2 n t",
            Cluster,
            &[Ready, OtherZone, NotReady, Terminating],
        ),
        ("n1 r2 t1", Cluster, &[NotReady, Ready, Terminating]),
        // Who is terminating takes over whatever its zone.
        ("n1 t1 t2", Cluster, &[NotReady, LastResort, LastResort]),
        // Local goes before hints.
        ("R2 r1 R2", Local, &[Ready, OtherNode, Ready]),
        ("R- r+ R", Local, &[Ready, OtherNode, Ready]),
        // Nodes go before zones.
        ("r1- r2+", Cluster, &[HintedElsewhere, Ready]),
        ("r1- r2-", Cluster, &[Ready, OtherZone]),
        ("r1+ r2", Cluster, &[Ready, OtherZone]),
        ("r+ r-", Cluster, &[Ready, HintedElsewhere]),
        ("r+ r", Cluster, &[Ready, Ready]),
        ("r- r-", Cluster, &[Ready, Ready]),
        ("n+ r-", Cluster, &[NotReady, Ready]),
        ("n+ r- r-1", Cluster, &[NotReady, Ready, Ready]),
    ];
    for (text, policy, expected) in rows {
        let found = letters(text).reasons(policy, Some("1"));
        assert_eq!(found, expected, "{text}, {policy:?}");
    }
    // A node without a zone has no hint for its zone.
    assert_eq!(letters("r1 r2").reasons(Cluster, None), [Ready, Ready]);
    assert_eq!(
        letters("r1- r2+").reasons(Cluster, None),
        [HintedElsewhere, Ready]
    );
    // Several zones of one endpoint, and one that names none at all: it is a hint for nobody.
    let several = slice("svc1")
        .tcp(80)
        .endpoint("10.0.1.1")
        .for_zones(&["3", "1"]);
    let several = several.endpoint("10.0.1.2").for_zones(&[""]);
    assert_eq!(several.reasons(Cluster, Some("1")), [Ready, OtherZone]);
    assert_eq!(several.reasons(Cluster, Some("2")), [Ready, Ready]);
}

/// The ops on real servers, and on entries that say who is masqueraded, since the last call.
fn written(w: &mut World) -> Vec<String> {
    w.ops()
        .into_iter()
        .filter(|op| !op.contains("SERVING"))
        .collect()
}

#[test]
fn a_policy_that_changes_masquerades_all_whom_another_node_serves() {
    let plain = || {
        let words = service("svc1")
            .cluster_ip("10.20.30.41")
            .external_ip("1.2.3.4");
        words.ingress("5.6.7.8").tcp(80).node_port(3001)
    };
    let mut w = World::new();
    w.node(&["100.101.102.103"]);
    w.put(plain());
    w.put(letters("R r"));
    w.settle();
    let vips = [
        "1.2.3.4:80/tcp",
        "5.6.7.8:80/tcp",
        "100.101.102.103:3001/tcp",
    ];
    for vip in vips {
        w.connections(vip, "10.0.1.2:80", 1);
    }
    w.ops();
    w.kernel.guarded = true;

    w.put(plain().external_local());
    assert_eq!(
        written(&mut w),
        [
            "add entry 1.2.3.4,tcp:80 of set KUBE-EXTERNAL-IP-LOCAL",
            "update real server 10.0.1.2:80 of 1.2.3.4:80/tcp, weight 0",
            "update real server 10.0.1.2:80 of 5.6.7.8:80/tcp, weight 0",
            "update real server 10.0.1.2:80 of 100.101.102.103:3001/tcp, weight 0",
            "add entry 5.6.7.8,tcp:80 of set KUBE-LOAD-BALANCER-LOCAL",
            "add entry 3001 of set KUBE-NODE-PORT-LOCAL-TCP",
            "remove entry 1.2.3.4,tcp:80 of set KUBE-EXTERNAL-IP",
        ]
    );
    // And back, while the other node's real server drains: it gets its weight again.
    w.put(plain());
    assert_eq!(
        written(&mut w),
        [
            "add entry 1.2.3.4,tcp:80 of set KUBE-EXTERNAL-IP",
            "remove entry 5.6.7.8,tcp:80 of set KUBE-LOAD-BALANCER-LOCAL",
            "remove entry 3001 of set KUBE-NODE-PORT-LOCAL-TCP",
            "update real server 10.0.1.2:80 of 1.2.3.4:80/tcp, weight 1",
            "update real server 10.0.1.2:80 of 5.6.7.8:80/tcp, weight 1",
            "update real server 10.0.1.2:80 of 100.101.102.103:3001/tcp, weight 1",
            "remove entry 1.2.3.4,tcp:80 of set KUBE-EXTERNAL-IP-LOCAL",
        ]
    );
    // What comes new keeps its clients' addresses from the first packet to the last.
    w.no_service("svc1");
    w.settle();
    w.ops();
    w.put(plain().external_local());
    let ops = w.ops();
    let at = |ops: &[String], op: &str| ops.iter().position(|o| o == op).expect(op);
    for (vip, entry) in vips.into_iter().zip([
        "entry 1.2.3.4,tcp:80 of set KUBE-EXTERNAL-IP-LOCAL",
        "entry 5.6.7.8,tcp:80 of set KUBE-LOAD-BALANCER-LOCAL",
        "entry 3001 of set KUBE-NODE-PORT-LOCAL-TCP",
    ]) {
        let server = format!("add virtual server {vip}, scheduler rr");
        assert!(
            at(&ops, &format!("add {entry}")) < at(&ops, &server),
            "{ops:#?}"
        );
    }
    w.no_service("svc1");
    let ops = w.ops();
    for (vip, entry) in vips.into_iter().zip([
        "entry 1.2.3.4,tcp:80 of set KUBE-EXTERNAL-IP-LOCAL",
        "entry 5.6.7.8,tcp:80 of set KUBE-LOAD-BALANCER-LOCAL",
        "entry 3001 of set KUBE-NODE-PORT-LOCAL-TCP",
    ]) {
        let server = format!("remove virtual server {vip}");
        assert!(
            at(&ops, &server) < at(&ops, &format!("remove {entry}")),
            "{ops:#?}"
        );
    }
    assert_eq!(w.kernel.leaks, []);
}

#[test]
fn an_address_that_two_services_want_keeps_the_clients_of_its_own() {
    for external in [false, true] {
        let of = |name: &str, at| {
            let words = service(name)
                .cluster_ip(&format!("10.20.30.{at}"))
                .created(at);
            let words = match external {
                true => words.external_ip("1.2.3.4"),
                false => words.ingress("1.2.3.4"),
            };
            words.tcp(80).node_port(3001)
        };
        let mut w = World::new();
        w.node(&["100.101.102.103"]);
        w.kernel.guarded = true;
        w.put(
            slice("a")
                .tcp(80)
                .endpoint("10.0.1.1")
                .local()
                .endpoint("10.0.1.2"),
        );
        w.put(
            slice("b")
                .tcp(80)
                .endpoint("10.0.2.1")
                .local()
                .endpoint("10.0.2.2"),
        );
        w.put(of("b", 2).external_local());
        w.settle();
        // The older one has no such policy.
        w.put(of("a", 1));
        w.settle();
        let kept = |w: &World| {
            let kept = w.kernel.state.keys().map(ToString::to_string);
            kept.filter(|key| key.starts_with("entry") && key.contains("-LOCAL"))
                .count()
        };
        assert_eq!(kept(&w), 0, "external: {external}");
        w.no_service("a");
        w.settle();
        assert_eq!(kept(&w), 2, "external: {external}");
        w.put(of("a", 1));
        w.settle();
        assert_eq!(kept(&w), 0, "external: {external}");
        w.put(of("a", 1).external_local());
        w.put(of("b", 2));
        w.settle();
        assert_eq!(kept(&w), 2, "external: {external}");
        w.no_service("b");
        w.settle();
        assert_eq!(kept(&w), 2, "external: {external}");
        assert_eq!(w.kernel.leaks, []);
    }
}

#[test]
fn what_changes_of_an_endpoint_or_the_node_is_one_op() {
    let mut w = World::new();
    w.node(&["100.101.102.103"]);
    w.zone(Some("1"));
    w.put(
        service("svc1")
            .cluster_ip("10.20.30.41")
            .tcp(80)
            .node_port(3001),
    );
    w.put(letters("r1 r2"));
    w.put(
        service("svc2")
            .cluster_ip("10.20.30.42")
            .external_ip("1.2.3.4")
            .tcp(80),
    );
    w.put(
        slice("svc2")
            .tcp(80)
            .endpoint("10.0.2.1")
            .endpoint("10.0.2.2"),
    );
    w.settle();
    w.ops();
    let (add, weight) = (", weight 1", Duration::from_secs(4));
    let both = |op: &str, server: &str, tail: &str| {
        let on = ["10.20.30.41:80/tcp", "100.101.102.103:3001/tcp"];
        on.map(|vip| format!("{op} real server {server} of {vip}{tail}"))
    };
    let moves = |w: &mut World, from: &str, to: &str| {
        let mut expected = both("add", to, add).to_vec();
        expected.extend(both("update", from, ", weight 0"));
        expected.extend(both("remove", from, ""));
        w.pass(weight);
        assert_eq!(w.ops(), expected);
    };
    let (first, second) = ("10.0.1.1:80", "10.0.1.2:80");
    w.zone(Some("2"));
    moves(&mut w, first, second);
    w.put(letters("r2 r1"));
    moves(&mut w, second, first);
    // A hint for this node goes before that.
    w.put(letters("r2- r1+"));
    moves(&mut w, first, second);
    // Nothing is hinted for its zone any more, or all of one; nobody has a zone.
    w.put(letters("r2 r1"));
    moves(&mut w, second, first);
    w.zone(None);
    assert_eq!(w.ops(), both("add", second, add));
    // Addresses that are told do not take the zone away.
    w.zone(Some("1"));
    w.pass(weight);
    w.links(&["100.101.102.103"]);
    w.ops();
    w.put(letters("r2 r1"));
    assert_eq!(w.ops(), [""; 0]);
    w.put(letters("n2 r1"));
    assert_eq!(w.ops(), [""; 0]);
}

/// What can't be written holds up what would leave clients without an answer, or without their address.
#[test]
fn a_failure_leaves_no_client_without_an_answer() {
    let of = |external: bool| {
        let words = service("svc1").cluster_ip("10.20.30.41");
        let words = match external {
            true => words.external_ip("1.2.3.4"),
            false => words.ingress("1.2.3.4"),
        };
        words.tcp(80)
    };
    let key = |w: &World, text: &str| {
        let keys = w.kernel.state.keys().map(ToString::to_string);
        keys.filter(|key| key == text).count() == 1
    };
    let server = "real server 10.0.1.2:80 of 1.2.3.4:80/tcp";
    for external in [true, false] {
        let (all, kept) = match external {
            true => ("KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL"),
            false => ("KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER-LOCAL"),
        };
        let [all, kept] = [all, kept].map(|set| format!("entry 1.2.3.4,tcp:80 of set {set}"));
        let refuse = |w: &mut World, text: &str| {
            let mut planner = Planner::new(w.config.clone());
            planner.apply(of(external).external_local().into());
            planner.apply(letters("R r").into());
            let mut keys: Vec<Key> = planner.desired().into_keys().collect();
            planner.apply(of(external).into());
            keys.extend(planner.desired().into_keys());
            let key = keys.into_iter().find(|key| key.to_string() == text);
            w.kernel.refuse.insert(key.unwrap(), FailureKind::Refused);
        };
        let masqueraded = |w: &World| key(w, &all) && (external || !key(w, &kept));
        // To Local: the other node's real server can't get weight 0.
        let mut w = World::new();
        w.put(of(external));
        w.put(letters("R r"));
        w.settle();
        w.connections("1.2.3.4:80/tcp", "10.0.1.2:80", 1);
        refuse(&mut w, server);
        w.put(of(external).external_local());
        w.settle();
        assert!(masqueraded(&w) && key(&w, server), "external: {external}");
        w.kernel.refuse.clear();
        w.pass(Duration::from_secs(60));
        assert!(!masqueraded(&w) && key(&w, &kept), "external: {external}");

        // Back: what stands against masquerading can't go, or what masquerades can't come.
        let mut w = World::new();
        w.put(of(external).external_local());
        w.put(letters("R r"));
        w.settle();
        refuse(&mut w, if external { &all } else { &kept });
        w.put(of(external));
        w.settle();
        assert!(!masqueraded(&w) && !key(&w, server), "external: {external}");
        w.kernel.refuse.clear();
        w.pass(Duration::from_secs(60));
        assert!(masqueraded(&w) && key(&w, server), "external: {external}");

        // New: clients can't keep their address.
        let mut w = World::new();
        w.put(letters("R r"));
        refuse(&mut w, &kept);
        w.put(of(external).external_local());
        w.settle();
        assert!(
            !key(&w, "virtual server 1.2.3.4:80/tcp"),
            "external: {external}"
        );
        w.kernel.refuse.clear();
        w.pass(Duration::from_secs(60));
        assert!(
            key(&w, "virtual server 1.2.3.4:80/tcp"),
            "external: {external}"
        );
    }
}
