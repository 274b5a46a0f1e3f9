//! What a Service needs on a node, case by case: one table with the cases of kube-proxy's own
//! IPVS tests (1 to 77) and those that its behaviour implies (E1 to E30).
//!
//! A row runs, or says what it waits for, or why it is not ours, or where else it is decided.
//! Where we differ from kube-proxy on purpose the row says "ours". Common to all: Service `svc1`,
//! scheduler `rr`, ports named `p` and their number; [`World::holds`] compares the whole kernel.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test"
)]

mod common;
#[path = "cases/guard.rs"]
mod guard;
#[path = "cases/health.rs"]
mod health;
#[path = "cases/selection.rs"]
mod selection;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use common::{SliceWords, World, ip, rs, service, slice, vs};
use ipvs_netlink::{Persistence, PersistenceMask, Scheduler};
use ipvs_proxy_core::model::{Change, NodePortAddresses};
use ipvs_proxy_core::op::FailureKind;
use ipvs_proxy_core::plan::{Config, base};
use ipvs_proxy_core::state::{Key, Value};
use ipvs_proxy_iptables::Table;
use ipvs_proxy_netlink::Family::{V4, V6};

struct Row {
    id: &'static str,
    shows: &'static str,
    kind: Kind,
}

enum Kind {
    /// It runs whole.
    Runs(fn()),
    /// What this crate can show runs; the rest waits for something, or is decided elsewhere.
    Partly(&'static str, fn()),
    /// It waits for a feature, or for another kind of test.
    Waits(&'static str),
    /// It can't apply to us.
    NotOurs(&'static str),
    /// Its decision falls before an object reaches this crate's model.
    Elsewhere(&'static str),
}
use Kind::{Elsewhere, NotOurs, Partly, Runs, Waits};

fn row(id: &'static str, shows: &'static str, kind: Kind) -> Row {
    Row { id, shows, kind }
}

const RANGES: &str = "load balancer source ranges";
const KERNEL: &str = "a test with the real kernel";
const CONNTRACK: &str = "the deletion from conntrack itself: the data plane's tests";

#[test]
fn every_case_is_there_once() {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for row in rows() {
        *seen.entry(row.id.to_owned()).or_default() += 1;
        assert!(!row.shows.is_empty(), "{} shows nothing", row.id);
        if let Partly(why, _) | Waits(why) | NotOurs(why) | Elsewhere(why) = row.kind {
            assert!(!why.is_empty(), "{} gives no reason", row.id);
        }
    }
    let numbered = (1..=77).map(|n| n.to_string());
    let ids = numbered.chain((1..=30).map(|n| format!("E{n}")));
    assert_eq!(seen, ids.map(|id| (id, 1)).collect());
}

#[test]
fn every_case_holds() {
    let mut failed = Vec::new();
    for row in rows() {
        let (Runs(test) | Partly(_, test)) = row.kind else {
            continue;
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(test)) {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            failed.push(format!(
                "case {}: {}\n{}",
                row.id,
                row.shows,
                text.unwrap_or_default()
            ));
        }
    }
    assert!(
        failed.is_empty(),
        "{} cases fail\n\n{}",
        failed.len(),
        failed.join("\n\n")
    );
}

fn rows() -> Vec<Row> {
    let tables = [
        node_ports(),
        vips(),
        endpoints(),
        changes(),
        primitives(),
        extra(),
    ];
    tables.into_iter().flatten().collect()
}

// ---- 1 to 12: node ports -------------------------------------------------------------------

// A row stays in one piece: rustfmt would tear each over three lines more, two steps to the right.
#[rustfmt::skip]
fn node_ports() -> Vec<Row> {
    vec![
        row("1", "a node port in the Service's one family", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103", "2001:db8::1:1"]);
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80).node_port(3001));
            w.put(slice("svc1").named("v4").tcp(80).endpoint("10.180.0.1"));
            w.put(slice("svc1").named("v6").tcp(80).endpoint("1002:ab8::2:10"));
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80",
                "100.101.102.103:3001/tcp -> 10.180.0.1:80",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
            ]);
        })),
        row("2", "UDP, node ports on 0.0.0.0/0, and the rules that they need", Runs(|| {
            let mut w = World::with(Config {
                node_port_addresses: networks(&["0.0.0.0/0"]),
                ..Config::default()
            });
            w.node(&["100.101.102.103", "2001:db8::1:1"]);
            w.put(service("svc1").cluster_ip("10.20.30.41").udp(80).node_port(3001));
            w.put(slice("svc1").udp(80).endpoint("10.180.0.1"));
            w.holds(&[
                "10.20.30.41:80/udp -> 10.180.0.1:80",
                "100.101.102.103:3001/udp -> 10.180.0.1:80",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,udp:80",
                "KUBE-NODE-PORT-UDP: 3001",
            ]);
            let accept = "-m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT";
            assert_eq!(w.chain(V4, Table::Filter, "KUBE-NODE-PORT"), [accept]);
            let rules = w.chain(V4, Table::Nat, "KUBE-NODE-PORT");
            let udp = "-p udp -m set --match-set KUBE-NODE-PORT-UDP dst -j KUBE-MARK-MASQ";
            assert!(rules.iter().any(|rule| rule == udp), "{rules:#?}");
            in_this_order(
                &w.chain(V4, Table::Nat, "KUBE-SERVICES"),
                &[
                    "KUBE-CLUSTER-IP src,dst -j KUBE-MARK-MASQ",
                    "KUBE-CLUSTER-IP dst,dst -j ACCEPT",
                    "-j KUBE-NODE-PORT",
                ],
            );
        })),
        row("3", "a node port without endpoints", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103", "2001:db8::1:1"]);
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80).node_port(3001));
            w.holds(&[
                "10.20.30.41:80/tcp ->",
                "100.101.102.103:3001/tcp ->",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
            ]);
        })),
        row("4", "an SCTP node port on three addresses", Runs(|| {
            let mut w = World::new();
            w.node(&[
                "100.101.102.103",
                "100.101.102.104",
                "100.101.102.105",
                "2001:db8::1:1",
                "2001:db8::1:2",
                "2001:db8::1:3",
            ]);
            w.put(service("svc1").cluster_ip("10.20.30.41").sctp(80).node_port(3001));
            w.put(slice("svc1").sctp(80).endpoint("10.180.0.1"));
            w.holds(&[
                "10.20.30.41:80/sctp -> 10.180.0.1:80",
                "100.101.102.103:3001/sctp -> 10.180.0.1:80",
                "100.101.102.104:3001/sctp -> 10.180.0.1:80",
                "100.101.102.105:3001/sctp -> 10.180.0.1:80",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,sctp:80",
                "KUBE-NODE-PORT-SCTP-HASH: 100.101.102.103,sctp:3001, \
             100.101.102.104,sctp:3001, 100.101.102.105,sctp:3001",
            ]);
        })),
        row("5", "an SCTP node port keeps to local endpoints", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103"]);
            let object = service("svc1").cluster_ip("10.20.30.41").sctp(80).node_port(3001);
            w.put(object.external_local());
            w.put(slice("svc1").sctp(80).endpoint("10.180.0.1").local().endpoint("10.180.1.1"));
            w.holds(&[
                "10.20.30.41:80/sctp -> 10.180.0.1:80, 10.180.1.1:80",
                "100.101.102.103:3001/sctp -> 10.180.0.1:80",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,sctp:80",
                "KUBE-NODE-PORT-SCTP-HASH: 100.101.102.103,sctp:3001",
                "KUBE-NODE-PORT-LOCAL-SCTP-HASH: 100.101.102.103,sctp:3001",
                "KUBE-LOOP-BACK: 10.180.0.1,sctp:80,10.180.0.1",
            ]);
            let rules = w.chain(V4, Table::Nat, "KUBE-NODE-PORT");
            in_this_order(
                &rules,
                &[
                    "KUBE-NODE-PORT-LOCAL-SCTP-HASH dst,dst -j RETURN",
                    "KUBE-NODE-PORT-SCTP-HASH dst,dst -j KUBE-MARK-MASQ",
                ],
            );
        })),
        row("6", "an IPv6 node port", Runs(|| {
            let mut w = World::only(V6);
            w.node(&["100.101.102.103", "2001:db8::1:1"]);
            w.put(service("svc1").cluster_ip("2020::1").tcp(80).node_port(3001));
            w.put(slice("svc1").named("v4").tcp(80).endpoint("10.180.0.1"));
            w.put(slice("svc1").named("v6").tcp(80).endpoint("1002:ab8::2:10"));
            w.holds(&[
                "[2020::1]:80/tcp -> [1002:ab8::2:10]:80",
                "[2001:db8::1:1]:3001/tcp -> [1002:ab8::2:10]:80",
                "bound: 2020::1",
                "KUBE-6-CLUSTER-IP: 2020::1,tcp:80",
                "KUBE-6-NODE-PORT-TCP: 3001",
            ]);
        })),
        row("7", "an IPv4 Service where only IPv6 is served", Runs(|| {
            let mut w = World::only(V6);
            w.node(&["100.101.102.103", "2001:db8::1:1"]);
            w.put(service("svc1").cluster_ip("10.20.30.41").udp(80).node_port(3001));
            w.put(slice("svc1").udp(80).endpoint("10.180.0.1"));
            w.holds(&[]);
        })),
        row("8", "an IPv6 node port without endpoints", Runs(|| {
            let mut w = World::only(V6);
            w.node(&["2001:db8::1:1"]);
            w.put(service("svc1").cluster_ip("2020::1").tcp(80).node_port(3001));
            w.holds(&[
                "[2020::1]:80/tcp ->",
                "[2001:db8::1:1]:3001/tcp ->",
                "bound: 2020::1",
                "KUBE-6-CLUSTER-IP: 2020::1,tcp:80",
                "KUBE-6-NODE-PORT-TCP: 3001",
            ]);
        })),
        row("9", "an IPv6 SCTP node port on two addresses", Runs(|| {
            let mut w = World::only(V6);
            w.node(&["2001:db8::1:1", "2001:db8::1:2"]);
            w.put(service("svc1").cluster_ip("2020::1").sctp(80).node_port(3001));
            w.put(slice("svc1").sctp(80).endpoint("2001::1"));
            w.holds(&[
                "[2020::1]:80/sctp -> [2001::1]:80",
                "[2001:db8::1:1]:3001/sctp -> [2001::1]:80",
                "[2001:db8::1:2]:3001/sctp -> [2001::1]:80",
                "bound: 2020::1",
                "KUBE-6-CLUSTER-IP: 2020::1,sctp:80",
                "KUBE-6-NODE-PORT-SCTP-HASH: 2001:db8::1:1,sctp:3001, 2001:db8::1:2,sctp:3001",
            ]);
        })),
        row("10", "node port networks, keeping to local endpoints", Runs(|| {
            let mut w = World::with(Config {
                node_port_addresses: networks(&["100.101.102.0/24", "2001:db8::/64"]),
                ..Config::default()
            });
            w.node(&["100.101.102.103", "2001:db8::1", "192.0.2.1"]);
            let object = service("svc1").cluster_ip("10.20.30.41").tcp(80).node_port(3001);
            w.put(object.external_local());
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1").local().endpoint("10.180.1.1"));
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.1.1:80",
                "100.101.102.103:3001/tcp -> 10.180.0.1:80",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
                "KUBE-NODE-PORT-LOCAL-TCP: 3001",
                "KUBE-LOOP-BACK: 10.180.0.1,tcp:80,10.180.0.1",
            ]);
            let rules = w.chain(V4, Table::Nat, "KUBE-NODE-PORT");
            for (protocol, set) in [("tcp", "TCP"), ("udp", "UDP")] {
                in_this_order(
                    &rules,
                    &[
                        &format!("-p {protocol} -m set --match-set KUBE-NODE-PORT-LOCAL-{set} dst -j RETURN"),
                        &format!("-p {protocol} -m set --match-set KUBE-NODE-PORT-{set} dst -j KUBE-MARK-MASQ"),
                    ],
                );
            }
        })),
        row("11", "node port networks that match no address", Runs(|| {
            let mut w = World::with(Config {
                node_port_addresses: networks(&["192.0.2.0/24"]),
                ..Config::default()
            });
            w.node(&["100.101.102.103"]);
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80).node_port(3001));
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
            ]);
        })),
        row("12", "no node port on loopback and IPv6 link-local addresses, but on all else",
            Runs(|| {
            let served = [
                "10.20.30.41:80/tcp ->",
                "[2020::1]:80/tcp ->",
                "169.254.1.1:3001/tcp ->",
                "198.18.0.9:3001/tcp ->",
                "[2001:db8::1:1]:3001/tcp ->",
                "bound: 10.20.30.41, 2020::1",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-6-CLUSTER-IP: 2020::1,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
                "KUBE-6-NODE-PORT-TCP: 3001",
            ];
            let none: Vec<&str> =
                served.into_iter().filter(|line| !line.contains("3001")).collect();
            for (selected, expected) in [
                (NodePortAddresses::default(), &served[..]),
                (networks(&["0.0.0.0/0", "::/0"]), &served[..]),
                (networks(&["127.0.0.0/8", "::1/128"]), &none[..]),
                (
                    NodePortAddresses { localhost: true, ..NodePortAddresses::default() },
                    &none[..],
                ),
            ] {
                let node_port_addresses = selected;
                let mut w = World::with(Config { node_port_addresses, ..Config::default() });
                w.node(&[
                    "127.0.0.1",
                    "127.0.0.53",
                    "169.254.1.1",
                    "198.18.0.9",
                    "::1",
                    "fe80::1",
                    "2001:db8::1:1",
                ]);
                let both = service("svc1").cluster_ip("10.20.30.41").cluster_ip("2020::1");
                w.put(both.tcp(80).node_port(3001));
                w.holds(expected);
            }
        })),
    ]
}

/// By that the loss of any of them is noticed: the kernel counts for each set the rules that name it.
#[test]
fn every_chain_and_every_place_of_jumps_names_a_set() {
    for (family, state) in [V4, V6].map(|family| (family, base(&Config::default()))) {
        for (key, value) in &state {
            let (Key::Rules(of, table), Value::Rules(rules)) = (key, value) else {
                continue;
            };
            if *of != family {
                continue;
            }
            let rules = &rules.tables[0];
            let names = |rule: &String| rule.contains("--match-set KUBE-");
            for chain in &rules.chains {
                assert!(
                    chain.rules.iter().any(names),
                    "{family:?} {table} {}",
                    chain.name
                );
            }
            for jump in &rules.jumps {
                let same = rules.jumps.iter().filter(|other| other.from == jump.from);
                let named = same.map(|jump| &jump.rule).any(names);
                assert!(named, "{family:?} {table} {}", jump.from);
            }
        }
    }
}

// ---- 13 to 30: VIPs and rules --------------------------------------------------------------

#[rustfmt::skip]
fn vips() -> Vec<Row> {
    /// A Service of each family with an endpoint.
    fn one_of_each_family(w: &mut World) {
        w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
        w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
        w.put(service("svc2").cluster_ip("1002:ab8::2:1").tcp(8080));
        w.put(slice("svc2").tcp(8080).endpoint("1009:ab8::5:6"));
    }
    vec![
        row("13", "only IPv4 is served", Runs(|| {
            let mut w = World::only(V4);
            one_of_each_family(&mut w);
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
            ]);
        })),
        row("14", "only IPv6 is served", Runs(|| {
            let mut w = World::only(V6);
            one_of_each_family(&mut w);
            w.holds(&[
                "[1002:ab8::2:1]:8080/tcp -> [1009:ab8::5:6]:8080",
                "bound: 1002:ab8::2:1",
                "KUBE-6-CLUSTER-IP: 1002:ab8::2:1,tcp:8080",
            ]);
        })),
        row("15", "a ClusterIP without endpoints", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
            w.holds(&[
                "10.20.30.41:80/tcp ->",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
            ]);
        })),
        row("16", "an externalIP without endpoints", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("10.20.30.41").external_ip("50.60.70.81").tcp(80));
            w.holds(&[
                "10.20.30.41:80/tcp ->",
                "50.60.70.81:80/tcp ->",
                "bound: 10.20.30.41, 50.60.70.81",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-EXTERNAL-IP: 50.60.70.81,tcp:80",
            ]);
        })),
        row("17", "externalIPs: the Service's family only; a loopback one is not served", Runs(|| {
            let mut w = World::only(V4);
            let object = service("svc1").cluster_ip("10.20.30.41").tcp(80);
            w.put(
                object
                    .external_ip("50.60.70.81")
                    .external_ip("2012::51")
                    .external_ip("127.0.0.1"),
            );
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80",
                "50.60.70.81:80/tcp -> 10.180.0.1:80",
                "bound: 10.20.30.41, 50.60.70.81",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-EXTERNAL-IP: 50.60.70.81,tcp:80",
            ]);
        })),
        row("18", "an externalIP keeps to local endpoints", Runs(|| {
            let mut w = World::new();
            let object = service("svc1").cluster_ip("10.20.30.41").external_ip("50.60.70.81");
            w.put(object.tcp(80).external_local());
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1").local().endpoint("10.180.1.1"));
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.1.1:80",
                "50.60.70.81:80/tcp -> 10.180.0.1:80",
                "bound: 10.20.30.41, 50.60.70.81",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-EXTERNAL-IP-LOCAL: 50.60.70.81,tcp:80",
                "KUBE-LOOP-BACK: 10.180.0.1,tcp:80,10.180.0.1",
            ]);
            // Port maps of container networks stay away from it, and nobody is masqueraded.
            let rules = w.chain(V4, Table::Nat, "KUBE-SERVICES");
            let local = rules.iter().filter(|rule| rule.contains("KUBE-EXTERNAL-IP-LOCAL"));
            let expected = "-m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j ACCEPT";
            assert_eq!(local.collect::<Vec<_>>(), [expected]);
        })),
        row("19", "a load balancer's address; a node without addresses has no node port", Runs(|| {
            let mut w = World::new();
            let object = service("svc1").cluster_ip("10.20.30.41").ingress("1.2.3.4");
            w.put(object.tcp(80).node_port(3001));
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80",
                "1.2.3.4:80/tcp -> 10.180.0.1:80",
                "bound: 1.2.3.4, 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-LOAD-BALANCER: 1.2.3.4,tcp:80",
            ]);
            in_this_order(
                &w.chain(V4, Table::Nat, "KUBE-SERVICES"),
                &[
                    "KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER",
                    "KUBE-LOAD-BALANCER dst,dst -j ACCEPT",
                    "-j KUBE-NODE-PORT",
                ],
            );
        })),
        row("20", "a load balancer's address keeps to local endpoints",
            Runs(|| {
            let mut w = World::new();
            let object = service("svc1").cluster_ip("10.20.30.41").ingress("1.2.3.4");
            w.put(object.tcp(80).node_port(3001).external_local());
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1").local().endpoint("10.180.1.1"));
            w.holds(&[
                "10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.1.1:80",
                "1.2.3.4:80/tcp -> 10.180.0.1:80",
                "bound: 1.2.3.4, 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-LOAD-BALANCER: 1.2.3.4,tcp:80",
                "KUBE-LOAD-BALANCER-LOCAL: 1.2.3.4,tcp:80",
                "KUBE-LOOP-BACK: 10.180.0.1,tcp:80,10.180.0.1",
            ]);
            assert_eq!(
                w.chain(V4, Table::Nat, "KUBE-LOAD-BALANCER"),
                [
                    "-m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN",
                    "-j KUBE-MARK-MASQ",
                ]
            );
        })),
        row("21", "a load balancer's source range", Waits(RANGES)),
        row("22", "a source range that the node is in", Waits(RANGES)),
        row("23", "three kinds of Service at once; ours: constant rules", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103"]);
            w.put(service("svc1").cluster_ip("10.20.30.40").external_ip("5.6.7.8").tcp(80));
            w.put(service("svc2").cluster_ip("10.20.30.41").ingress("1.2.3.4").tcp(80));
            w.put(service("svc3").cluster_ip("10.20.30.42").tcp(80).node_port(3001));
            w.holds(&[
                "10.20.30.40:80/tcp ->",
                "5.6.7.8:80/tcp ->",
                "10.20.30.41:80/tcp ->",
                "1.2.3.4:80/tcp ->",
                "10.20.30.42:80/tcp ->",
                "100.101.102.103:3001/tcp ->",
                "bound: 1.2.3.4, 5.6.7.8, 10.20.30.40, 10.20.30.41, 10.20.30.42",
                "KUBE-CLUSTER-IP: 10.20.30.40,tcp:80, 10.20.30.41,tcp:80, 10.20.30.42,tcp:80",
                "KUBE-EXTERNAL-IP: 5.6.7.8,tcp:80",
                "KUBE-LOAD-BALANCER: 1.2.3.4,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
            ]);
            let rules = w.chain(V4, Table::Nat, "KUBE-SERVICES");
            for (set, flags, to) in [
                ("KUBE-CLUSTER-IP", "src,dst", "KUBE-MARK-MASQ"),
                ("KUBE-EXTERNAL-IP", "dst,dst", "KUBE-MARK-MASQ"),
                ("KUBE-LOAD-BALANCER", "dst,dst", "KUBE-LOAD-BALANCER"),
            ] {
                in_this_order(
                    &rules,
                    &[
                        &format!("{set} {flags} -j {to}"),
                        &format!("{set} dst,dst -j ACCEPT"),
                        "-j KUBE-NODE-PORT",
                    ],
                );
            }
        })),
        row("24", "ipMode Proxy of a load balancer's address",
            Elsewhere("crates/daemon translate tests: the model has the usable addresses only")),
        row("25", "health check node ports of three Services", Runs(|| {
            let mut w = World::new();
            let svc = |n: u8, port| {
                let svc = service(&format!("svc{n}")).cluster_ip(&format!("10.20.30.{n}")).tcp(80);
                svc.health_check(port)
            };
            w.put(svc(1, 30001));
            w.put(svc(2, 30002));
            w.put(svc(3, 30003));
            w.holds(&[
                "10.20.30.1:80/tcp ->",
                "10.20.30.2:80/tcp ->",
                "10.20.30.3:80/tcp ->",
                "bound: 10.20.30.1, 10.20.30.2, 10.20.30.3",
                "KUBE-CLUSTER-IP: 10.20.30.1,tcp:80, 10.20.30.2,tcp:80, 10.20.30.3,tcp:80",
                "KUBE-HEALTH-CHECK-NODE-PORT: 30001, 30002, 30003",
            ]);
            let accept = "-m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT";
            assert_eq!(w.chain(V4, Table::Filter, "KUBE-NODE-PORT"), [accept]);
        })),
        row("26", "nothing that loopback sends is marked", Runs(|| {
            let mut w = World::new();
            for (family, loopback) in
                [(V4, "-s 127.0.0.0/8 -j RETURN"), (V6, "-s ::1/128 -j RETURN")]
            {
                let rules = w.chain(family, Table::Nat, "KUBE-SERVICES");
                let before = rules.iter().position(|rule| rule == loopback).unwrap();
                // What is not for a local address leaves first.
                assert!(
                    rules[..before].iter().all(|rule| rule.ends_with("-j RETURN")),
                    "{rules:#?}"
                );
            }
        })),
        row("27", "masquerading at random ports, where iptables can", Runs(|| {
            for (random_fully, masquerade) in
                [(true, "-j MASQUERADE --random-fully"), (false, "-j MASQUERADE")]
            {
                let mut w = World::with(Config { random_fully, ..Config::default() });
                for family in [V4, V6] {
                    let rules = w.chain(family, Table::Nat, "KUBE-POSTROUTING");
                    assert_eq!(rules.last().unwrap(), masquerade);
                }
            }
        })),
        row("28", "who is masqueraded on the way to a ClusterIP", Runs(|| {
            let pods = || vec!["10.180.0.0/16".parse().unwrap()];
            let set = "-m set --match-set KUBE-CLUSTER-IP";
            for (cluster_cidrs, masquerade_all, expected) in [
                (vec![], false, format!("{set} src,dst")),
                (pods(), false, format!("! -s 10.180.0.0/16 {set} dst,dst")),
                (vec![], true, format!("{set} dst,dst")),
                (pods(), true, format!("{set} dst,dst")),
            ] {
                let config = Config { cluster_cidrs, masquerade_all, ..Config::default() };
                let rules = World::with(config).chain(V4, Table::Nat, "KUBE-SERVICES");
                let marks = rules.iter().filter(|rule| {
                    rule.contains("KUBE-CLUSTER-IP") && rule.ends_with("-j KUBE-MARK-MASQ")
                });
                let marks: Vec<&String> = marks.collect();
                assert_eq!(marks, [&format!("{expected} -j KUBE-MARK-MASQ")]);
            }
        })),
        row("29", "session affinity holds on every virtual server", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103"]);
            let object = service("svc1").cluster_ip("10.20.30.41").external_ip("50.60.70.81");
            w.put(object.sticky(10800).tcp(80).node_port(3001));
            w.holds(&[
                "10.20.30.41:80/tcp (persistent 10800) ->",
                "50.60.70.81:80/tcp (persistent 10800) ->",
                "100.101.102.103:3001/tcp (persistent 10800) ->",
                "bound: 10.20.30.41, 50.60.70.81",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-EXTERNAL-IP: 50.60.70.81,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
            ]);
        })),
        row("30", "no session affinity: no persistence, no flag", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103"]);
            let object = service("svc1").cluster_ip("10.20.30.41").external_ip("50.60.70.81");
            w.put(object.tcp(80).node_port(3001));
            w.holds(&[
                "10.20.30.41:80/tcp ->",
                "50.60.70.81:80/tcp ->",
                "100.101.102.103:3001/tcp ->",
                "bound: 10.20.30.41, 50.60.70.81",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-EXTERNAL-IP: 50.60.70.81,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
            ]);
        })),
    ]
}

// ---- 31 to 41: traffic policy and terminating endpoints ------------------------------------

#[rustfmt::skip]
fn endpoints() -> Vec<Row> {
    vec![
        row("31", "ready endpoints serve; local ones are in LOOP-BACK; all go with the slice",
            Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("172.20.1.1").tcp(80));
            let mixed = slice("svc1").tcp(80).endpoint("10.0.1.1").local();
            let mixed = mixed.endpoint("10.0.1.2").endpoint("10.0.1.3");
            w.put(mixed.endpoint("10.0.1.4").not_ready());
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.3:80",
                "bound: 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1",
            ]);
            w.no_slice("svc1");
            w.pass(Duration::from_secs(3));
            w.holds(&[
                "172.20.1.1:80/tcp ->",
                "bound: 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
            ]);
        })),
        row("32", "internalTrafficPolicy Cluster, one endpoint local", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("172.20.1.1").tcp(80));
            let three = slice("svc1").tcp(80).endpoint("10.0.1.1").local();
            w.put(three.endpoint("10.0.1.2").endpoint("10.0.1.3"));
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.3:80",
                "bound: 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1",
            ]);
        })),
        row("33", "internalTrafficPolicy Cluster, none local", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("172.20.1.1").tcp(80));
            let three = slice("svc1").tcp(80).endpoint("10.0.1.1");
            w.put(three.endpoint("10.0.1.2").endpoint("10.0.1.3"));
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.3:80",
                "bound: 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
            ]);
        })),
        row("34", "internalTrafficPolicy Local, one local", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("172.20.1.1").tcp(80).internal_local());
            let three = slice("svc1").tcp(80).endpoint("10.0.1.1").local();
            w.put(three.endpoint("10.0.1.2").endpoint("10.0.1.3"));
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.1:80",
                "bound: 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1",
            ]);
        })),
        row("35", "internalTrafficPolicy Local, none local; ours: also of a Service reachable from outside",
            Runs(|| {
            let mut w = World::new();
            let object = service("svc1").cluster_ip("172.20.1.1").external_ip("1.2.3.4");
            w.put(object.tcp(80).internal_local());
            w.put(slice("svc1").tcp(80).endpoint("10.0.1.1").endpoint("10.0.1.2"));
            w.holds(&[
                "172.20.1.1:80/tcp ->",
                "1.2.3.4:80/tcp -> 10.0.1.1:80, 10.0.1.2:80",
                "bound: 1.2.3.4, 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-EXTERNAL-IP: 1.2.3.4,tcp:80",
            ]);
        })),
        row("36", "no terminating endpoint serves while there are ready ones", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("172.20.1.1").external_ip("1.2.3.4").tcp(80));
            let mixed = slice("svc1").tcp(80).endpoint("10.0.1.1").local();
            let mixed = mixed.endpoint("10.0.1.2").local();
            let mixed = mixed.endpoint("10.0.1.3").local().terminating();
            w.put(mixed.endpoint("10.0.1.4").local().dying().endpoint("10.0.1.5"));
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.5:80",
                "1.2.3.4:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.5:80",
                "bound: 1.2.3.4, 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-EXTERNAL-IP: 1.2.3.4,tcp:80",
                "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1, 10.0.1.2,tcp:80,10.0.1.2, \
             10.0.1.3,tcp:80,10.0.1.3, 10.0.1.4,tcp:80,10.0.1.4",
            ]);
        })),
        row("37", "36 with externalTrafficPolicy Local", Runs(|| {
            let mut w = World::new();
            let object = service("svc1").cluster_ip("172.20.1.1").external_ip("1.2.3.4");
            w.put(object.tcp(80).external_local());
            let mixed = slice("svc1").tcp(80).endpoint("10.0.1.1").local();
            let mixed = mixed.endpoint("10.0.1.2").local();
            let mixed = mixed.endpoint("10.0.1.3").local().terminating();
            w.put(mixed.endpoint("10.0.1.4").local().dying().endpoint("10.0.1.5"));
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.5:80",
                "1.2.3.4:80/tcp -> 10.0.1.1:80, 10.0.1.2:80",
                "bound: 1.2.3.4, 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-EXTERNAL-IP-LOCAL: 1.2.3.4,tcp:80",
                "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1, 10.0.1.2,tcp:80,10.0.1.2, \
             10.0.1.3,tcp:80,10.0.1.3, 10.0.1.4,tcp:80,10.0.1.4",
            ]);
        })),
        row("38", "without a ready endpoint, those that terminate and still serve", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("172.20.1.1").external_ip("1.2.3.4").tcp(80));
            let mixed = slice("svc1").tcp(80).endpoint("10.0.1.1").local().terminating();
            let mixed = mixed.endpoint("10.0.1.2").local().terminating();
            let mixed = mixed.endpoint("10.0.1.3").local().dying();
            w.put(mixed.endpoint("10.0.1.4").terminating().endpoint("10.0.1.5").dying());
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.4:80",
                "1.2.3.4:80/tcp -> 10.0.1.1:80, 10.0.1.2:80, 10.0.1.4:80",
                "bound: 1.2.3.4, 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-EXTERNAL-IP: 1.2.3.4,tcp:80",
                "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1, 10.0.1.2,tcp:80,10.0.1.2, \
             10.0.1.3,tcp:80,10.0.1.3",
            ]);
        })),
        row("39", "38 with externalTrafficPolicy Local and a ready endpoint elsewhere", Runs(|| {
            let mut w = World::new();
            let object = service("svc1").cluster_ip("172.20.1.1").external_ip("1.2.3.4");
            w.put(object.tcp(80).external_local());
            let mixed = slice("svc1").tcp(80).endpoint("10.0.1.1").local().terminating();
            let mixed = mixed.endpoint("10.0.1.2").local().terminating();
            let mixed = mixed.endpoint("10.0.1.3").local().dying();
            w.put(mixed.endpoint("10.0.1.4").terminating().endpoint("10.0.1.5"));
            w.holds(&[
                "172.20.1.1:80/tcp -> 10.0.1.5:80",
                "1.2.3.4:80/tcp -> 10.0.1.1:80, 10.0.1.2:80",
                "bound: 1.2.3.4, 172.20.1.1",
                "KUBE-CLUSTER-IP: 172.20.1.1,tcp:80",
                "KUBE-EXTERNAL-IP-LOCAL: 1.2.3.4,tcp:80",
                "KUBE-LOOP-BACK: 10.0.1.1,tcp:80,10.0.1.1, 10.0.1.2,tcp:80,10.0.1.2, \
             10.0.1.3,tcp:80,10.0.1.3",
            ]);
        })),
        row("40", "terminating endpoints do not count for the health check", Runs(|| {
            let mut w = health::asked(30001);
            let both = slice("svc1").tcp(80).endpoint("10.0.1.1").terminating().local();
            w.put(both.endpoint("10.0.1.2").dying().local());
            assert_eq!(health::told(&mut w), ["30001: ns1/svc1 0 on 0.0.0.0, ::"]);
            // Packets go there all the same.
            let servers = "172.20.1.1:80/tcp -> 10.0.1.1:80".to_owned();
            assert!(w.lines().contains(&servers), "{:?}", w.lines());
        })),
        row("41", "the gauge of Services without local endpoints",
            Waits("the gauge itself")),
    ]
}

// ---- 42 to 56: Services and slices as they change ------------------------------------------

#[rustfmt::skip]
fn changes() -> Vec<Row> {
    /// A Service with the UDP ports 11 and 12.
    fn two_ports(w: &mut World) {
        w.put(service("svc1").cluster_ip("172.20.1.1").udp(11).udp(12));
    }
    const VIPS: [&str; 2] =
        ["bound: 172.20.1.1", "KUBE-CLUSTER-IP: 172.20.1.1,udp:11, 172.20.1.1,udp:12"];
    /// The Service's two virtual servers as these lines, and nothing else.
    #[track_caller]
    fn two_ports_are(w: &mut World, servers: [&str; 2]) {
        w.holds(&[servers[0], servers[1], VIPS[0], VIPS[1]]);
    }
    vec![
        row("42", "four Services with twelve ports shrink to one port", Runs(|| {
            let mut w = World::new();
            let one = service("one").cluster_ip("172.16.55.4");
            w.put(one.clone().udp(1234).udp(1235).sctp(1236));
            let two = service("two").cluster_ip("172.16.55.10");
            w.put(
                two.udp(345)
                    .node_port(678)
                    .tcp(344)
                    .node_port(677)
                    .sctp(343)
                    .node_port(676),
            );
            let three = service("three").cluster_ip("172.16.55.11").ingress("10.1.2.4");
            w.put(three.udp(8675).node_port(30061).udp(8676).node_port(30062).sctp(8677));
            let four = service("four").cluster_ip("172.16.55.12").ingress("10.1.2.3");
            let four = four.udp(8677).node_port(30063).udp(8678).node_port(30064).sctp(8679);
            w.put(four.health_check(345));
            w.holds(&[
        "172.16.55.4:1234/udp ->", "172.16.55.4:1235/udp ->", "172.16.55.4:1236/sctp ->",
        "172.16.55.10:345/udp ->", "172.16.55.10:344/tcp ->", "172.16.55.10:343/sctp ->",
        "172.16.55.11:8675/udp ->", "172.16.55.11:8676/udp ->", "172.16.55.11:8677/sctp ->",
        "10.1.2.4:8675/udp ->", "10.1.2.4:8676/udp ->", "10.1.2.4:8677/sctp ->",
        "172.16.55.12:8677/udp ->", "172.16.55.12:8678/udp ->", "172.16.55.12:8679/sctp ->",
        "10.1.2.3:8677/udp ->", "10.1.2.3:8678/udp ->", "10.1.2.3:8679/sctp ->",
        "bound: 10.1.2.3, 10.1.2.4, 172.16.55.4, 172.16.55.10, 172.16.55.11, 172.16.55.12",
        "KUBE-CLUSTER-IP: 172.16.55.4,udp:1234, 172.16.55.4,udp:1235, \
         172.16.55.4,sctp:1236, 172.16.55.10,tcp:344, 172.16.55.10,udp:345, \
         172.16.55.10,sctp:343, 172.16.55.11,udp:8675, 172.16.55.11,udp:8676, \
         172.16.55.11,sctp:8677, 172.16.55.12,udp:8677, 172.16.55.12,udp:8678, \
         172.16.55.12,sctp:8679",
        "KUBE-LOAD-BALANCER: 10.1.2.3,udp:8677, 10.1.2.3,udp:8678, 10.1.2.3,sctp:8679, \
         10.1.2.4,udp:8675, 10.1.2.4,udp:8676, 10.1.2.4,sctp:8677",
        "KUBE-HEALTH-CHECK-NODE-PORT: 345",
    ]);
            assert_eq!(health::told(&mut w), ["345: ns1/four 0 on 0.0.0.0, ::"]);
            w.put(one.udp(1235));
            ["two", "three", "four"].into_iter().for_each(|gone| w.no_service(gone));
            w.holds(&[
                "172.16.55.4:1235/udp ->",
                "bound: 172.16.55.4",
                "KUBE-CLUSTER-IP: 172.16.55.4,udp:1235",
            ]);
        })),
        row("43", "headless Services",
            Elsewhere("crates/daemon translate tests: the model has no headless Service")),
        row("44", "an ExternalName Service with a clusterIP",
            Elsewhere("crates/daemon translate tests: the model has no ExternalName Service")),
        row("45", "ClusterIP to LoadBalancer, the same again, and back", Runs(|| {
            let mut w = World::new();
            let plain = service("svc1").cluster_ip("172.16.55.4").udp(1234).udp(1235);
            let plain_state = [
                "172.16.55.4:1234/udp ->",
                "172.16.55.4:1235/udp ->",
                "bound: 172.16.55.4",
                "KUBE-CLUSTER-IP: 172.16.55.4,udp:1234, 172.16.55.4,udp:1235",
            ];
            w.put(plain.clone());
            w.holds(&plain_state);
            let balanced = plain.clone().ingress("1.2.3.4").health_check(345);
            w.put(balanced.clone());
            w.holds(&[
                "172.16.55.4:1234/udp ->",
                "172.16.55.4:1235/udp ->",
                "1.2.3.4:1234/udp ->",
                "1.2.3.4:1235/udp ->",
                "bound: 1.2.3.4, 172.16.55.4",
                "KUBE-CLUSTER-IP: 172.16.55.4,udp:1234, 172.16.55.4,udp:1235",
                "KUBE-LOAD-BALANCER: 1.2.3.4,udp:1234, 1.2.3.4,udp:1235",
                "KUBE-HEALTH-CHECK-NODE-PORT: 345",
            ]);
            assert_eq!(health::told(&mut w), ["345: ns1/svc1 0 on 0.0.0.0, ::"]);
            w.ops();
            w.put(balanced);
            assert_eq!(w.ops(), NOTHING);
            assert_eq!(health::told(&mut w), NOTHING);
            w.put(plain);
            assert_eq!(health::told(&mut w), ["345: closed"]);
            assert!(!w.ops().iter().any(|op| op.contains("172.16.55.4")));
            w.holds(&plain_state);
        })),
        row("46", "unchanged endpoints: no op, no stale flow", Runs(|| {
            let mut w = World::new();
            two_ports(&mut w);
            let same = slice("svc1").udp(11).endpoint("10.1.1.1").local();
            w.put(same.clone());
            w.ops();
            w.forgotten();
            w.put(same);
            assert_eq!(w.ops(), NOTHING);
            assert_eq!(w.forgotten(), NOTHING);
        })),
        row("47", "a Service in two slices of a port each", Runs(|| {
            let mut w = World::new();
            two_ports(&mut w);
            w.put(slice("svc1").named("a").udp(11).endpoint("10.1.1.1"));
            w.put(slice("svc1").named("b").udp(12).endpoint("10.1.1.2"));
            two_ports_are(
                &mut w,
                ["172.20.1.1:11/udp -> 10.1.1.1:11", "172.20.1.1:12/udp -> 10.1.1.2:12"],
            );
        })),
        row("48", "two ports of a local endpoint count once for the health check", Runs(|| {
            let mut w = World::new();
            let svc1 = service("svc1").cluster_ip("172.20.1.1").tcp(80).tcp(443);
            w.put(svc1.health_check(30001));
            let pods = |of| slice("svc1").named(of).endpoint("10.0.1.1").local();
            w.put(pods("a").tcp(80).tcp(443));
            w.put(pods("b").tcp(443).endpoint("10.0.1.2").local().endpoint("10.0.2.1"));
            assert_eq!(health::told(&mut w), ["30001: ns1/svc1 2 on 0.0.0.0, ::"]);
        })),
        row("49", "local endpoints of several Services for the health check", Runs(|| {
            let mut w = World::new();
            for (n, local) in [(1, 0), (2, 1), (3, 2)] {
                let name = format!("svc{n}");
                let svc = service(&name).cluster_ip(&format!("172.20.1.{n}")).tcp(80);
                w.put(if n == 1 { svc } else { svc.health_check(30000 + n) });
                let mut pods = slice(&name).tcp(80).endpoint("10.0.9.9");
                for pod in 0..local {
                    pods = pods.endpoint(&format!("10.0.{n}.{pod}")).local();
                }
                w.put(pods);
            }
            assert_eq!(
                health::told(&mut w),
                ["30002: ns1/svc2 1 on 0.0.0.0, ::", "30003: ns1/svc3 2 on 0.0.0.0, ::"]
            );
        })),
        row("50", "none to one endpoint, and one to none: UDP flows are stale",
            Partly(CONNTRACK, || {
            let mut w = World::new();
            two_ports(&mut w);
            w.forgotten();
            w.put(slice("svc1").udp(11).endpoint("10.1.1.1"));
            two_ports_are(
                &mut w,
                ["172.20.1.1:11/udp -> 10.1.1.1:11", "172.20.1.1:12/udp ->"],
            );
            w.forgotten();
            w.no_slice("svc1");
            assert_eq!(w.forgotten(), ["172.20.1.1:11/udp -> 10.1.1.1:11"]);
            two_ports_are(&mut w, ["172.20.1.1:11/udp ->", "172.20.1.1:12/udp ->"]);
        })),
        row("51", "an address and a port come, and go", Partly(CONNTRACK, || {
            let mut w = World::new();
            two_ports(&mut w);
            w.put(slice("svc1").udp(11).endpoint("10.1.1.1"));
            w.settle();
            w.put(
                slice("svc1")
                    .udp(11)
                    .udp(12)
                    .endpoint("10.1.1.1")
                    .endpoint("10.1.1.2")
                    .local(),
            );
            w.holds(&[
                "172.20.1.1:11/udp -> 10.1.1.1:11, 10.1.1.2:11",
                "172.20.1.1:12/udp -> 10.1.1.1:12, 10.1.1.2:12",
                VIPS[0],
                VIPS[1],
                "KUBE-LOOP-BACK: 10.1.1.2,udp:11,10.1.1.2, 10.1.1.2,udp:12,10.1.1.2",
            ]);
            w.forgotten();
            w.put(slice("svc1").udp(11).endpoint("10.1.1.1"));
            assert_eq!(
                w.forgotten(),
                [
                    "172.20.1.1:11/udp -> 10.1.1.2:11",
                    "172.20.1.1:12/udp -> 10.1.1.1:12",
                    "172.20.1.1:12/udp -> 10.1.1.2:12",
                ]
            );
            two_ports_are(
                &mut w,
                ["172.20.1.1:11/udp -> 10.1.1.1:11", "172.20.1.1:12/udp ->"],
            );
        })),
        row("52", "a slice comes, and goes", Partly(CONNTRACK, || {
            let mut w = World::new();
            two_ports(&mut w);
            w.put(slice("svc1").named("a").udp(11).endpoint("10.1.1.1"));
            w.settle();
            w.put(slice("svc1").named("b").udp(11).udp(12).endpoint("10.1.1.2"));
            two_ports_are(
                &mut w,
                [
                    "172.20.1.1:11/udp -> 10.1.1.1:11, 10.1.1.2:11",
                    "172.20.1.1:12/udp -> 10.1.1.2:12",
                ],
            );
            w.forgotten();
            w.no_slice("b");
            assert_eq!(
                w.forgotten(),
                ["172.20.1.1:11/udp -> 10.1.1.2:11", "172.20.1.1:12/udp -> 10.1.1.2:12",]
            );
            two_ports_are(
                &mut w,
                ["172.20.1.1:11/udp -> 10.1.1.1:11", "172.20.1.1:12/udp ->"],
            );
        })),
        row("53", "a slice's port gets another name", Partly(CONNTRACK, || {
            let mut w = World::new();
            two_ports(&mut w);
            w.put(slice("svc1").udp(11).endpoint("10.1.1.1"));
            w.settle();
            w.forgotten();
            w.put(slice("svc1").udp(12).target(11).endpoint("10.1.1.1"));
            two_ports_are(
                &mut w,
                ["172.20.1.1:11/udp ->", "172.20.1.1:12/udp -> 10.1.1.1:11"],
            );
            let forgotten = w.forgotten();
            assert!(
                forgotten.contains(&"172.20.1.1:11/udp -> 10.1.1.1:11".to_owned()),
                "{forgotten:?}"
            );
        })),
        row("54", "a slice's port gets another number", Partly(CONNTRACK, || {
            let mut w = World::new();
            two_ports(&mut w);
            w.put(slice("svc1").udp(11).endpoint("10.1.1.1"));
            w.settle();
            w.forgotten();
            w.put(slice("svc1").udp(11).target(22).endpoint("10.1.1.1"));
            two_ports_are(
                &mut w,
                ["172.20.1.1:11/udp -> 10.1.1.1:22", "172.20.1.1:12/udp ->"],
            );
            let forgotten = w.forgotten();
            assert!(
                forgotten.contains(&"172.20.1.1:11/udp -> 10.1.1.1:11".to_owned()),
                "{forgotten:?}"
            );
        })),
        row("55", "all of these at once over four Services", Runs(|| {
            let mut w = World::new();
            for (of, vip) in [
                ("a", "172.20.1.1"),
                ("b", "172.20.1.2"),
                ("c", "172.20.1.3"),
                ("d", "172.20.1.4"),
            ] {
                w.put(service(of).cluster_ip(vip).udp(11).udp(12));
            }
            w.put(slice("a").udp(11).endpoint("10.1.1.1").local());
            w.put(
                slice("b")
                    .named("b1")
                    .udp(11)
                    .endpoint("10.2.2.1")
                    .endpoint("10.2.2.2")
                    .local(),
            );
            w.put(slice("b").named("b2").udp(12).endpoint("10.2.2.3").local());
            w.put(slice("d").named("d1").udp(11).endpoint("10.4.4.1").endpoint("10.4.4.2"));
            w.put(slice("d").named("d2").udp(12).endpoint("10.4.4.3"));
            w.settle();
            // a: renumbered; b: an address and a slice go; c: its first; d: a slice moves to c.
            w.put(slice("a").udp(11).target(22).endpoint("10.1.1.1").local());
            w.put(slice("b").named("b1").udp(11).endpoint("10.2.2.1"));
            w.no_slice("b2");
            w.put(slice("c").udp(12).endpoint("10.3.3.1"));
            w.put(slice("c").named("d2").udp(12).endpoint("10.4.4.3"));
            w.holds(&[
                "172.20.1.1:11/udp -> 10.1.1.1:22",
                "172.20.1.1:12/udp ->",
                "172.20.1.2:11/udp -> 10.2.2.1:11",
                "172.20.1.2:12/udp ->",
                "172.20.1.3:11/udp ->",
                "172.20.1.3:12/udp -> 10.3.3.1:12, 10.4.4.3:12",
                "172.20.1.4:11/udp -> 10.4.4.1:11, 10.4.4.2:11",
                "172.20.1.4:12/udp ->",
                "bound: 172.20.1.1, 172.20.1.2, 172.20.1.3, 172.20.1.4",
                "KUBE-CLUSTER-IP: 172.20.1.1,udp:11, 172.20.1.1,udp:12, 172.20.1.2,udp:11, \
             172.20.1.2,udp:12, 172.20.1.3,udp:11, 172.20.1.3,udp:12, 172.20.1.4,udp:11, \
             172.20.1.4,udp:12",
                "KUBE-LOOP-BACK: 10.1.1.1,udp:22,10.1.1.1",
            ]);
        })),
        row("56", "a UDP port's first endpoint: flows from before it are stale",
            Partly(CONNTRACK, || {
            let mut w = World::new();
            two_ports(&mut w);
            assert_eq!(w.forgotten(), NOTHING);
            w.put(slice("svc1").udp(11).endpoint("10.1.1.1"));
            assert_eq!(w.forgotten(), ["172.20.1.1:11/udp"]);
            w.put(slice("svc1").udp(11).endpoint("10.1.1.1").endpoint("10.1.1.2"));
            assert_eq!(w.forgotten(), NOTHING);
            // A TCP port's never are.
            w.put(service("svc2").cluster_ip("172.20.1.2").tcp(80));
            w.put(slice("svc2").tcp(80).endpoint("10.1.1.1"));
            assert_eq!(w.forgotten(), NOTHING);
            // A new process finds what is served, and breaks none of it.
            w.restart();
            assert_eq!(w.forgotten(), NOTHING);
        })),
    ]
}

// ---- 57 to 77: virtual servers, real servers, drains ---------------------------------------

#[rustfmt::skip]
fn primitives() -> Vec<Row> {
    /// A Service of the endpoints 10.180.0.1 and 10.180.0.2, in the kernel.
    fn two_endpoints(protocol: &str) -> World {
        let mut w = World::new();
        let object = service("svc1").cluster_ip("10.20.30.41");
        let ends = slice("svc1").endpoint("10.180.0.1").endpoint("10.180.0.2");
        match protocol {
            "tcp" => (w.put(object.tcp(80)), w.put(ends.tcp(80))),
            "udp" => (w.put(object.udp(80)), w.put(ends.udp(80))),
            _ => (w.put(object.sctp(80)), w.put(ends.sctp(80))),
        };
        w.ops();
        w
    }
    const VIP: [&str; 2] = ["bound: 10.20.30.41", "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80"];
    const WITHOUT: &str = "10.20.30.41:80/tcp -> 10.180.0.1:80";
    const DRAINING: &str = "10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.0.2:80 (weight 0)";
    vec![
        row("57", "a virtual server that is as wanted is not written", Runs(|| {
            let mut w = two_endpoints("tcp");
            w.resync(true);
            assert_eq!(w.ops(), NOTHING);
            w.restart();
            assert_eq!(w.ops(), NOTHING);
        })),
        row("58", "other scheduler or persistence: changed in place", Runs(|| {
            let w = two_endpoints("tcp");
            let key = Key::VirtualServer(vs("10.20.30.41:80/tcp"));
            let Value::VirtualServer(as_wanted) = w.kernel.state[&key].clone() else {
                panic!()
            };
            let mut other_scheduler = as_wanted.clone();
            Arc::make_mut(&mut other_scheduler).scheduler = Scheduler::WeightedLeastConnection;
            let mut persistent = as_wanted;
            Arc::make_mut(&mut persistent).persistence = Some(Persistence { timeout_s: 60, mask: PersistenceMask::Prefix(32) });
            for found in [other_scheduler, persistent] {
                let mut w = two_endpoints("tcp");
                w.kernel.state.insert(key, Value::VirtualServer(found));
                w.restart();
                assert_eq!(w.ops(), ["update virtual server 10.20.30.41:80/tcp, scheduler rr"]);
                w.holds(&[
                    "10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.0.2:80",
                    VIP[0],
                    VIP[1],
                ]);
            }
            // The other way: the process is told of another scheduler.
            let mut other = two_endpoints("tcp");
            other.config.scheduler = Scheduler::WeightedLeastConnection;
            other.restart();
            assert_eq!(
                other.ops(),
                ["update virtual server 10.20.30.41:80/tcp, scheduler wlc"]
            );
        })),
        row("59", "a new UDP virtual server and its address", Runs(|| {
            let mut w = World::new();
            w.ops();
            w.put(service("svc1").cluster_ip("10.20.30.41").udp(53));
            assert_eq!(
                w.ops(),
                [
                    "add entry 10.20.30.41,udp:53 of set KUBE-CLUSTER-IP",
                    "add entry 10.20.30.41 of set KUBE-IPVS-IPS",
                    "add virtual server 10.20.30.41:53/udp, scheduler rr",
                    "add address 10.20.30.41 on kube-ipvs0",
                ]
            );
        })),
        row("60", "a new SCTP virtual server, and a change of it", Runs(|| {
            let mut w = World::new();
            w.ops();
            w.put(service("svc1").cluster_ip("10.20.30.41").sctp(80));
            assert_eq!(
                w.ops(),
                [
                    "add entry 10.20.30.41,sctp:80 of set KUBE-CLUSTER-IP",
                    "add entry 10.20.30.41 of set KUBE-IPVS-IPS",
                    "add virtual server 10.20.30.41:80/sctp, scheduler rr",
                    "add address 10.20.30.41 on kube-ipvs0",
                ]
            );
            w.put(service("svc1").cluster_ip("10.20.30.41").sctp(80).sticky(60));
            assert_eq!(w.ops(), ["update virtual server 10.20.30.41:80/sctp, scheduler rr"]);
        })),
        row("61", "an address that is bound is not bound again", Runs(|| {
            let mut w = World::new();
            w.kernel.state.insert(Key::Link, Value::Present);
            w.kernel.state.insert(Key::Address(ip("10.20.30.41")), Value::Present);
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
            w.resync(true);
            let ops = w.ops();
            assert!(!ops.iter().any(|op| op.contains(" address ")), "{ops:#?}");
            w.holds(&["10.20.30.41:80/tcp ->", VIP[0], VIP[1]]);
        })),
        row("62", "excludeCIDRs keep foreign virtual servers, the others go",
            NotOurs("kube-proxy deletes foreign virtual servers, we never: none is ever read")),
        row("63", "62 for IPv6",
            NotOurs("kube-proxy deletes foreign virtual servers, we never: none is ever read")),
        row("64", "a stale virtual server of ours goes with its real servers", Runs(|| {
            let mut w = two_endpoints("tcp");
            w.put(service("svc2").cluster_ip("10.20.30.42").tcp(80));
            w.put(slice("svc2").tcp(80).endpoint("10.180.0.3"));
            w.ops();
            // It goes while no process runs.
            w.no_service("svc2");
            w.restart();
            assert_eq!(
                w.ops(),
                [
                    "remove entry 10.20.30.42,tcp:80 of set KUBE-IPVS-SERVING",
                    "remove address 10.20.30.42 on kube-ipvs0",
                    "remove virtual server 10.20.30.42:80/tcp",
                    "remove entry 10.20.30.42,tcp:80 of set KUBE-CLUSTER-IP",
                    "remove entry 10.20.30.42 of set KUBE-IPVS-IPS",
                ]
            );
            w.holds(&["10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.0.2:80", VIP[0], VIP[1]]);
        })),
        row("65", "an excluded virtual server keeps its real servers",
            NotOurs("a foreign virtual server is never read, so no drain can touch it")),
        row("66", "2 ports, 1, 3, Service deleted: its address is bound once, and goes", Runs(|| {
            let mut w = World::new();
            w.settle();
            let object = || service("svc1").cluster_ip("172.16.55.4");
            let mut ops = Vec::new();
            for ports in
                [object().tcp(80).tcp(81), object().tcp(80), object().tcp(80).tcp(82).udp(53)]
            {
                w.put(ports);
                ops.extend(w.ops());
            }
            w.no_service("svc1");
            ops.extend(w.ops());
            ops.retain(|op| op.contains(" address "));
            assert_eq!(
                ops,
                [
                    "add address 172.16.55.4 on kube-ipvs0",
                    "remove address 172.16.55.4 on kube-ipvs0",
                ]
            );
            w.holds(&[]);
        })),
        row("67", "TCP without connections: gone; ours: at the first look, 3 s later", Runs(|| {
            let mut w = two_endpoints("tcp");
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.holds(&[DRAINING, VIP[0], VIP[1]]);
            w.pass(Duration::from_secs(3));
            w.holds(&[WITHOUT, VIP[0], VIP[1]]);
            assert_eq!(
                w.ops(),
                [
                    "update real server 10.180.0.2:80 of 10.20.30.41:80/tcp, weight 0",
                    "remove real server 10.180.0.2:80 of 10.20.30.41:80/tcp",
                ]
            );
        })),
        row("68", "TCP with connections: weight 0 as long as there are any", Runs(|| {
            let mut w = two_endpoints("tcp");
            w.connections("10.20.30.41:80/tcp", "10.180.0.2:80", 10);
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.pass(Duration::from_secs(120));
            w.holds(&[DRAINING, VIP[0], VIP[1]]);
            w.connections("10.20.30.41:80/tcp", "10.180.0.2:80", 0);
            w.pass(Duration::from_secs(3));
            w.holds(&[WITHOUT, VIP[0], VIP[1]]);
        })),
        row("69", "TCP with inactive connections: weight 0",
            Waits("a test with the real kernel: to this crate all connections are one number")),
        row("70", "UDP with connections: gone at once; ours: SCTP drains as TCP does", Runs(|| {
            let mut w = two_endpoints("udp");
            w.connections("10.20.30.41:80/udp", "10.180.0.2:80", 10);
            w.put(slice("svc1").udp(80).endpoint("10.180.0.1"));
            assert_eq!(w.ops(), ["remove real server 10.180.0.2:80 of 10.20.30.41:80/udp"]);
            let mut w = two_endpoints("sctp");
            w.connections("10.20.30.41:80/sctp", "10.180.0.2:80", 10);
            w.put(slice("svc1").sctp(80).endpoint("10.180.0.1"));
            assert_eq!(
                w.ops(),
                ["update real server 10.180.0.2:80 of 10.20.30.41:80/sctp, weight 0"]
            );
        })),
        row("71", "the real server to remove is not in the kernel: nothing else changes", Runs(|| {
            let mut w = two_endpoints("tcp");
            let gone = Key::RealServer(vs("10.20.30.41:80/tcp"), rs("10.180.0.2:80"));
            w.kernel.state.remove(&gone).unwrap();
            let before = w.kernel.state.clone();
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.settle();
            assert_eq!(w.kernel.state, before);
            w.pass(Duration::from_secs(120));
            w.holds(&[WITHOUT, VIP[0], VIP[1]]);
        })),
        row("72", "the list of drains under concurrent use",
            NotOurs("the planner is a plain value that one thread has; nothing shares its drains")),
        row("73", "weight 0 of a wanted endpoint becomes 1", Runs(|| {
            let mut w = two_endpoints("tcp");
            let zero = Key::RealServer(vs("10.20.30.41:80/tcp"), rs("10.180.0.2:80"));
            w.kernel.state.insert(zero, Value::RealServer(0));
            w.restart();
            assert_eq!(
                w.ops(),
                ["update real server 10.180.0.2:80 of 10.20.30.41:80/tcp, weight 1"]
            );
        })),
        row("74", "the probe of ipset, scheduler and permission", NotOurs(
            "no ipset tool to probe; what the kernel can't do is a finding of the data plane",
        )),
        row("75", "cleaning up where nothing is", Waits("cleanup, in a test with the real kernel")),
        row("76", "networks count for their own family only", Runs(|| {
            let cluster_cidrs =
                ["10.180.0.0/16", "fd00:180::/64"].map(|net| net.parse().unwrap());
            let mut w = World::with(Config {
                cluster_cidrs: cluster_cidrs.to_vec(),
                node_port_addresses: networks(&["100.101.102.0/24", "2001:db8::/32"]),
                ..Config::default()
            });
            for (family, ours, other) in [
                (V4, "! -s 10.180.0.0/16 ", "fd00:180::"),
                (V6, "! -s fd00:180::/64 ", "10.180.0.0"),
            ] {
                let rules = w.chain(family, Table::Nat, "KUBE-SERVICES").join("\n");
                assert!(rules.contains(ours) && !rules.contains(other), "{rules}");
            }
            w.node(&["100.101.102.103", "198.51.100.1", "2001:db8::1:1", "2002::1"]);
            let both = service("svc1").cluster_ip("10.20.30.41").cluster_ip("2020::1");
            w.put(both.tcp(80).node_port(3001));
            w.holds(&[
                "10.20.30.41:80/tcp ->",
                "[2020::1]:80/tcp ->",
                "100.101.102.103:3001/tcp ->",
                "[2001:db8::1:1]:3001/tcp ->",
                "bound: 10.20.30.41, 2020::1",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
                "KUBE-6-CLUSTER-IP: 2020::1,tcp:80",
                "KUBE-NODE-PORT-TCP: 3001",
                "KUBE-6-NODE-PORT-TCP: 3001",
            ]);
        })),
        row("77", "port 53 in TCP and UDP on one ClusterIP", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(53).udp(53));
            w.put(slice("svc1").named("t").tcp(53).endpoint("10.180.0.1"));
            w.put(slice("svc1").named("u").udp(53).endpoint("10.180.0.2"));
            // A second Service with that ClusterIP has no say.
            w.put(service("svc2").cluster_ip("10.20.30.41").udp(53));
            w.put(slice("svc2").udp(53).endpoint("10.180.0.3"));
            w.holds(&[
                "10.20.30.41:53/tcp -> 10.180.0.1:53",
                "10.20.30.41:53/udp -> 10.180.0.2:53",
                "bound: 10.20.30.41",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:53, 10.20.30.41,udp:53",
            ]);
        })),
    ]
}

// ---- E1 to E30: what the behaviour implies -------------------------------------------------

#[rustfmt::skip]
fn extra() -> Vec<Row> {
    const VIP: [&str; 2] = ["bound: 10.20.30.41", "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80"];
    const SERVED: [&str; 3] = ["10.20.30.41:80/tcp -> 10.180.0.1:80", VIP[0], VIP[1]];
    /// `svc1` with one endpoint, in the kernel.
    fn served() -> World {
        let mut w = World::new();
        w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
        w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
        w.holds(&SERVED);
        w.ops();
        w
    }
    /// A Service with 10.180.0.1 and 10.180.0.2, hinted so, on a node in zone a.
    fn hinted(
        one: impl Fn(SliceWords) -> SliceWords,
        two: impl Fn(SliceWords) -> SliceWords,
        expected: &[&str],
    ) {
        let mut w = World::new();
        w.zone(Some("a"));
        w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
        let hinted = one(slice("svc1").tcp(80).endpoint("10.180.0.1"));
        w.put(two(hinted.endpoint("10.180.0.2")));
        let servers = format!("10.20.30.41:80/tcp -> {}", expected.join(", "));
        w.holds(&[&servers, VIP[0], VIP[1]]);
    }
    vec![
        row("E1", "one endpoint in two slices; ours: not terminating, then local", Runs(|| {
            let loop_back = "KUBE-LOOP-BACK: 10.180.0.1,tcp:80,10.180.0.1";
            let ready = || slice("svc1").tcp(80).endpoint("10.180.0.1");
            for (one, two, local) in [
                (ready(), ready().local(), true),
                (ready(), ready().local().terminating(), false),
                (ready().local(), ready().terminating(), true),
            ] {
                for (one, two) in [(one.clone(), two.clone()), (two, one)] {
                    let mut w = World::new();
                    w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
                    w.put(one.named("a"));
                    w.put(two.named("b"));
                    let expected = [SERVED[0], SERVED[1], SERVED[2], loop_back];
                    w.holds(if local { &expected } else { &expected[..3] });
                }
            }
        })),
        row("E2", "a slice that names no Service",
            Elsewhere("crates/daemon translate tests: every slice of the model has a Service")),
        row("E3", "a slice of FQDNs",
            Elsewhere("crates/daemon translate tests: the model's slices are IPv4 or IPv6")),
        row("E4", "an endpoint's second address",
            Elsewhere("crates/daemon translate tests: the model's endpoints have one address")),
        row("E5", "a slice's port without name or number",
            Elsewhere("crates/daemon translate tests: the model's ports have both")),
        row("E6", "zone hints on all endpoints", Runs(|| {
            hinted(|s| s.for_zones(&["a"]), |s| s.for_zones(&["b"]), &["10.180.0.1:80"]);
        })),
        row("E7", "one endpoint without a zone hint", Runs(|| {
            hinted(|s| s.for_zones(&["a"]), |s| s, &["10.180.0.1:80", "10.180.0.2:80"]);
        })),
        row("E8", "no endpoint hinted for this zone", Runs(|| {
            let of_b = |s: SliceWords| s.for_zones(&["b"]);
            hinted(of_b, of_b, &["10.180.0.1:80", "10.180.0.2:80"]);
        })),
        row("E9", "a node hint before a zone hint", Runs(|| {
            hinted(
                |s| s.for_zones(&["a"]).for_another_node(),
                |s| s.for_zones(&["b"]).for_this_node(),
                &["10.180.0.2:80"],
            );
        })),
        row("E10", "node hints, none for this node", Runs(|| {
            hinted(
                |s| s.for_zones(&["a"]).for_another_node(),
                |s| s.for_zones(&["b"]).for_another_node(),
                &["10.180.0.1:80"],
            );
        })),
        row("E11", "hints count on ready endpoints only", Runs(|| {
            // The one for this zone is not ready, and another that is not ready has no hint.
            let not_ready = |s: SliceWords| s.not_ready().endpoint("10.180.0.3").not_ready();
            let of_b = |s: SliceWords| s.for_zones(&["b"]);
            hinted(|s| not_ready(s.for_zones(&["a"])), of_b, &["10.180.0.2:80"]);
            hinted(|s| not_ready(s.for_zones(&["a"])), |s| s.for_zones(&["a"]), &["10.180.0.2:80"]);
        })),
        row("E12", "a Service stops being ours, and is ours again",
            Partly("the label service-proxy-name itself: crates/daemon translate tests", || {
            let mut w = served();
            w.no_service("svc1");
            w.holds(&[]);
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
            w.holds(&SERVED);
        })),
        row("E13", "an externalIP that is the node's own is not bound", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103"]);
            w.put(
                service("svc1")
                    .cluster_ip("10.20.30.41")
                    .external_ip("100.101.102.103")
                    .tcp(80),
            );
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.holds(&[
                SERVED[0],
                "100.101.102.103:80/tcp -> 10.180.0.1:80",
                VIP[0],
                VIP[1],
                "KUBE-EXTERNAL-IP: 100.101.102.103,tcp:80",
            ]);
        })),
        row("E14", "a load balancer's address that is the node's own is not bound", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103"]);
            w.put(service("svc1").cluster_ip("10.20.30.41").ingress("100.101.102.103").tcp(80));
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
            w.holds(&[
                SERVED[0],
                "100.101.102.103:80/tcp -> 10.180.0.1:80",
                VIP[0],
                VIP[1],
                "KUBE-LOAD-BALANCER: 100.101.102.103,tcp:80",
            ]);
        })),
        row("E15", "a VIP leaves its Service: nothing of it stays", Runs(|| {
            let mut w = served();
            let object = || service("svc1").cluster_ip("10.20.30.41").tcp(80);
            w.put(object().external_ip("5.6.7.8").ingress("1.2.3.4"));
            w.holds(&[
                SERVED[0],
                "5.6.7.8:80/tcp -> 10.180.0.1:80",
                "1.2.3.4:80/tcp -> 10.180.0.1:80",
                "bound: 1.2.3.4, 5.6.7.8, 10.20.30.41",
                VIP[1],
                "KUBE-EXTERNAL-IP: 5.6.7.8,tcp:80",
                "KUBE-LOAD-BALANCER: 1.2.3.4,tcp:80",
            ]);
            w.put(object().external_ip("5.6.7.8"));
            w.holds(&[
                SERVED[0],
                "5.6.7.8:80/tcp -> 10.180.0.1:80",
                "bound: 5.6.7.8, 10.20.30.41",
                VIP[1],
                "KUBE-EXTERNAL-IP: 5.6.7.8,tcp:80",
            ]);
            w.put(object());
            w.holds(&SERVED);
        })),
        row("E16", "an externalIP of two Services is bound until the last goes", Runs(|| {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("10.20.30.41").external_ip("5.6.7.8").tcp(80));
            w.put(service("svc2").cluster_ip("10.20.30.42").external_ip("5.6.7.8").tcp(443));
            w.holds(&[
                "10.20.30.41:80/tcp ->",
                "10.20.30.42:443/tcp ->",
                "5.6.7.8:80/tcp ->",
                "5.6.7.8:443/tcp ->",
                "bound: 5.6.7.8, 10.20.30.41, 10.20.30.42",
                "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80, 10.20.30.42,tcp:443",
                "KUBE-EXTERNAL-IP: 5.6.7.8,tcp:80, 5.6.7.8,tcp:443",
            ]);
            w.ops();
            w.no_service("svc1");
            assert!(!w.ops().contains(&"remove address 5.6.7.8 on kube-ipvs0".to_owned()));
            w.holds(&[
                "10.20.30.42:443/tcp ->",
                "5.6.7.8:443/tcp ->",
                "bound: 5.6.7.8, 10.20.30.42",
                "KUBE-CLUSTER-IP: 10.20.30.42,tcp:443",
                "KUBE-EXTERNAL-IP: 5.6.7.8,tcp:443",
            ]);
            w.no_service("svc2");
            w.holds(&[]);
        })),
        row("E17", "one externalIP and port in two Services; ours: the older has it", Runs(|| {
            let young = service("a")
                .cluster_ip("10.20.30.42")
                .external_ip("5.6.7.8")
                .tcp(80)
                .created(2);
            let old = service("z")
                .cluster_ip("10.20.30.41")
                .external_ip("5.6.7.8")
                .tcp(80)
                .created(1);
            for order in [[young.clone(), old.clone()], [old, young]] {
                let mut w = World::new();
                w.put(slice("a").tcp(80).endpoint("10.180.0.2"));
                w.put(slice("z").tcp(80).endpoint("10.180.0.1"));
                for object in order {
                    w.put(object);
                    w.settle();
                }
                w.pass(Duration::from_secs(3));
                w.holds(&[
                    "10.20.30.41:80/tcp -> 10.180.0.1:80",
                    "10.20.30.42:80/tcp -> 10.180.0.2:80",
                    "5.6.7.8:80/tcp -> 10.180.0.1:80",
                    "bound: 5.6.7.8, 10.20.30.41, 10.20.30.42",
                    "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80, 10.20.30.42,tcp:80",
                    "KUBE-EXTERNAL-IP: 5.6.7.8,tcp:80",
                ]);
                let conflicts = w.planner.take_conflicts();
                let texts: Vec<String> = conflicts.iter().map(ToString::to_string).collect();
                assert_eq!(
                    texts,
                    [
                        "Service ns1/a: 5.6.7.8:80/tcp belongs to Service ns1/z, which comes first: \
                         not served",
                    ]
                );
                w.no_service("z");
                w.pass(Duration::from_secs(3));
                w.holds(&[
                    "10.20.30.42:80/tcp -> 10.180.0.2:80",
                    "5.6.7.8:80/tcp -> 10.180.0.2:80",
                    "bound: 5.6.7.8, 10.20.30.42",
                    "KUBE-CLUSTER-IP: 10.20.30.42,tcp:80",
                    "KUBE-EXTERNAL-IP: 5.6.7.8,tcp:80",
                ]);
            }
        })),
        row("E18", "a node port gets another number", Runs(|| {
            let mut w = served();
            w.node(&["100.101.102.103"]);
            for number in [3001, 3002] {
                w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80).node_port(number));
                w.holds(&[
                    SERVED[0],
                    &format!("100.101.102.103:{number}/tcp -> 10.180.0.1:80"),
                    VIP[0],
                    VIP[1],
                    &format!("KUBE-NODE-PORT-TCP: {number}"),
                ]);
            }
        })),
        row("E19", "the node gets an address, and loses one; ours: node ports follow at once",
            Runs(|| {
            let mut w = served();
            w.node(&["100.101.102.103"]);
            w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80).node_port(3001));
            w.settle();
            let on = |last: u8| format!("100.101.102.{last}:3001/tcp -> 10.180.0.1:80");
            w.links(&["100.101.102.103", "100.101.102.104"]);
            w.holds(&[
                SERVED[0],
                &on(103),
                &on(104),
                VIP[0],
                VIP[1],
                "KUBE-NODE-PORT-TCP: 3001",
            ]);
            w.links(&["100.101.102.104"]);
            w.holds(&[SERVED[0], &on(104), VIP[0], VIP[1], "KUBE-NODE-PORT-TCP: 3001"]);
            // No address at all is a reading that failed.
            w.links(&[]);
            w.holds(&[SERVED[0], &on(104), VIP[0], VIP[1], "KUBE-NODE-PORT-TCP: 3001"]);
        })),
        row("E20", "a foreign address on kube-ipvs0 goes: the link is ours", Runs(|| {
            let mut w = served();
            w.kernel.state.insert(Key::Address(ip("10.99.99.99")), Value::Present);
            w.resync(true);
            assert_eq!(w.ops(), ["remove address 10.99.99.99 on kube-ipvs0"]);
            w.holds(&SERVED);
        })),
        row("E21", "a foreign virtual server goes",
            NotOurs("kube-proxy deletes foreign virtual servers, we never: none is ever read")),
        row("E22", "an interrupted listing is not an empty one",
            Waits("a test with the real kernel: a reading that fails never reaches the planner")),
        row("E23", "a fresh node: sets and rules before any virtual server", Runs(|| {
            let mut w = World::new();
            w.node(&["100.101.102.103"]);
            w.put(
                service("svc1")
                    .cluster_ip("10.20.30.41")
                    .external_ip("5.6.7.8")
                    .tcp(80)
                    .node_port(3001),
            );
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1").local());
            let ops = w.ops();
            let first_server =
                ops.iter().position(|op| op.starts_with("add virtual server")).unwrap();
            let last = |of: &dyn Fn(&String) -> bool| ops.iter().rposition(of).unwrap();
            assert!(last(&|op| op.starts_with("add set ")) < first_server);
            assert!(last(&|op| op.contains("tables rules in table ")) < first_server);
            // All that masquerades, too; only what lets packets in comes after.
            let entry =
                |op: &String| op.starts_with("add entry") && !op.ends_with("KUBE-IPVS-SERVING");
            assert!(last(&entry) < first_server, "{ops:#?}");
            let first_address =
                ops.iter().position(|op| op.starts_with("add address")).unwrap();
            assert!(last(&|op| op.starts_with("add real server")) < first_address, "{ops:#?}");
        })),
        row("E24", "66,000 entries in a set", Waits(KERNEL)),
        row("E25", "the rules can't be written: what serves goes on, a new try within seconds",
            Runs(|| {
            let mut w = served();
            let rules = Key::Rules(V4, Table::Filter);
            w.kernel.state.remove(&rules).unwrap();
            w.kernel.refuse.insert(rules, FailureKind::Refused);
            w.resync(true);
            assert_eq!(w.ops(), ["add iptables rules in table filter"]);
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.1").endpoint("10.180.0.2"));
            assert_eq!(
                w.ops(),
                ["add real server 10.180.0.2:80 of 10.20.30.41:80/tcp, weight 1"]
            );
            w.kernel.refuse.clear();
            w.pass(Duration::from_secs(3));
            assert_eq!(w.ops(), ["add iptables rules in table filter"]);
            w.holds(&["10.20.30.41:80/tcp -> 10.180.0.1:80, 10.180.0.2:80", VIP[0], VIP[1]]);
        })),
        row("E26", "nothing listed yet at start: the kernel stays as it is", Runs(|| {
            let served = served();
            let mut w = World::new();
            w.kernel.state = served.kernel.state.clone();
            w.resync(false);
            assert_eq!(w.ops(), NOTHING);
            w.pass(Duration::from_secs(3600));
            assert_eq!(w.ops(), NOTHING);
            assert_eq!(w.kernel.state, served.kernel.state);
        })),
        row("E27", "a rolling update under load refuses no connection", Waits(KERNEL)),
        row("E28", "another affinity timeout: changed in place", Runs(|| {
            let mut w = served();
            let sticky = |s: u32| service("svc1").cluster_ip("10.20.30.41").tcp(80).sticky(s);
            w.put(sticky(10800));
            w.ops();
            w.put(sticky(60));
            assert_eq!(w.ops(), ["update virtual server 10.20.30.41:80/tcp, scheduler rr"]);
            w.holds(&["10.20.30.41:80/tcp (persistent 60) -> 10.180.0.1:80", VIP[0], VIP[1]]);
        })),
        row("E29", "a UDP endpoint goes while a client sends on: its flows are stale at once",
            Partly(KERNEL, || {
            let mut w = World::new();
            w.put(service("svc1").cluster_ip("10.20.30.41").udp(53));
            w.put(slice("svc1").udp(53).endpoint("10.180.0.1").endpoint("10.180.0.2"));
            w.ops();
            w.forgotten();
            w.connections("10.20.30.41:53/udp", "10.180.0.2:53", 1);
            w.put(slice("svc1").udp(53).endpoint("10.180.0.1"));
            assert_eq!(w.ops(), ["remove real server 10.180.0.2:53 of 10.20.30.41:53/udp"]);
            assert_eq!(w.forgotten(), ["10.20.30.41:53/udp -> 10.180.0.2:53"]);
        })),
        row("E30", "a restart while a real server drains: it goes on draining", Runs(|| {
            let mut w = served();
            w.put(slice("svc1").tcp(80).endpoint("10.180.0.2"));
            w.connections("10.20.30.41:80/tcp", "10.180.0.1:80", 1);
            w.ops();
            w.restart();
            assert_eq!(w.ops(), NOTHING);
            w.pass(Duration::from_secs(60));
            let draining = "10.20.30.41:80/tcp -> 10.180.0.1:80 (weight 0), 10.180.0.2:80";
            w.holds(&[draining, VIP[0], VIP[1]]);
            w.connections("10.20.30.41:80/tcp", "10.180.0.1:80", 0);
            w.pass(Duration::from_secs(3));
            w.holds(&["10.20.30.41:80/tcp -> 10.180.0.2:80", VIP[0], VIP[1]]);
        })),
    ]
}

const NOTHING: [&str; 0] = [];

fn networks(texts: &[&str]) -> NodePortAddresses {
    let networks = texts.iter().map(|text| text.parse().unwrap()).collect();
    NodePortAddresses {
        networks,
        ..NodePortAddresses::default()
    }
}

/// Rules that end in these are there, in this order.
#[track_caller]
fn in_this_order(rules: &[String], ends: &[&str]) {
    let mut from = 0;
    for end in ends {
        let found = rules[from..].iter().position(|rule| rule.ends_with(end));
        from += found.unwrap_or_else(|| panic!("{end} is not there, or too early: {rules:#?}")) + 1;
    }
}

fn pod_cidrs(networks: &[&str]) -> Change {
    Change::PodCidrs(networks.iter().map(|net| net.parse().unwrap()).collect())
}

/// How the rules tell a packet on its way to a ClusterIP that is masqueraded, IPv4 and IPv6.
fn masqueraded(w: &mut World) -> [String; 2] {
    [V4, V6].map(|family| {
        let rules = w.chain(family, Table::Nat, "KUBE-SERVICES");
        let mark = |rule: &&String| rule.contains("-CLUSTER-IP ") && rule.ends_with("-MASQ");
        let rule = rules.iter().find(mark).unwrap();
        rule.replace("-m set --match-set ", "")
            .replace(" -j KUBE-MARK-MASQ", "")
    })
}

const VIP: [&str; 2] = ["bound: 10.20.30.41", "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80"];
const NOBODY_KNOWN: [&str; 2] = ["KUBE-CLUSTER-IP src,dst", "KUBE-6-CLUSTER-IP src,dst"];

#[test]
fn pods_are_told_by_the_networks_of_the_node_as_these_come() {
    let config = Config {
        node_cidrs: true,
        ..Config::default()
    };
    let mut w = World::with(config);
    w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
    w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
    // Without them all is served, as if nobody told pods from others.
    assert!(w.planner.awaits_pod_cidrs());
    w.holds(&["10.20.30.41:80/tcp -> 10.180.0.1:80", VIP[0], VIP[1]]);
    assert_eq!(masqueraded(&mut w), NOBODY_KNOWN);
    w.ops();
    w.put(pod_cidrs(&["10.180.0.0/24", "fd00:180::/64"]));
    assert!(!w.planner.awaits_pod_cidrs());
    let rules = [
        "update iptables rules in table nat",
        "update ip6tables rules in table nat",
    ];
    assert_eq!(w.ops(), rules, "nothing but the rules");
    let by_both = [
        "! -s 10.180.0.0/24 KUBE-CLUSTER-IP dst,dst",
        "! -s fd00:180::/64 KUBE-6-CLUSTER-IP dst,dst",
    ];
    assert_eq!(masqueraded(&mut w), by_both);
    // The same again, and a Node that was made anew and has none yet.
    for known in [&["10.180.0.0/24", "fd00:180::/64"][..], &[]] {
        w.put(pod_cidrs(known));
        assert_eq!(w.ops(), NOTHING);
    }
    // A restart that is told all before it reads the kernel writes nothing.
    w.restart();
    assert_eq!(w.ops(), NOTHING);
    // Others: only the rules of the family that they change.
    w.put(pod_cidrs(&["10.180.7.0/24", "fd00:180::/64"]));
    assert_eq!(w.ops(), ["update iptables rules in table nat"]);
    assert_eq!(
        masqueraded(&mut w)[0],
        "! -s 10.180.7.0/24 KUBE-CLUSTER-IP dst,dst"
    );
    // One family is left without.
    w.put(pod_cidrs(&["10.180.7.0/24"]));
    assert_eq!(w.ops(), ["update ip6tables rules in table nat"]);
    assert_eq!(masqueraded(&mut w)[1], NOBODY_KNOWN[1]);
}

#[test]
fn the_networks_of_the_node_count_only_where_they_are_asked_for() {
    let mut w = World::with(Config {
        cluster_cidrs: vec!["10.180.0.0/16".parse().unwrap()],
        ..Config::default()
    });
    let before = masqueraded(&mut w);
    w.ops();
    w.put(pod_cidrs(&["10.180.7.0/24"]));
    assert!(!w.planner.awaits_pod_cidrs());
    assert_eq!(w.ops(), NOTHING);
    assert_eq!(masqueraded(&mut w), before);
}

#[test]
fn rules_that_cannot_be_changed_hold_up_no_service() {
    let mut w = World::with(Config {
        node_cidrs: true,
        ..Config::default()
    });
    w.settle();
    for table in [Table::Nat, Table::Filter] {
        w.kernel
            .refuse
            .insert(Key::Rules(V4, table), FailureKind::Busy);
    }
    w.put(pod_cidrs(&["10.180.0.0/24"]));
    w.put(service("svc1").cluster_ip("10.20.30.41").tcp(80));
    w.put(slice("svc1").tcp(80).endpoint("10.180.0.1"));
    w.settle();
    assert!(
        w.planner
            .holds(&Key::VirtualServer(vs("10.20.30.41:80/tcp")))
    );
    w.kernel.refuse.clear();
    w.pass(Duration::from_secs(2));
    w.holds(&["10.20.30.41:80/tcp -> 10.180.0.1:80", VIP[0], VIP[1]]);
}

#[test]
fn a_node_without_addresses_keeps_its_primary_ones() {
    let mut w = World::with(Config {
        node_port_addresses: NodePortAddresses {
            primary: true,
            ..NodePortAddresses::default()
        },
        ..Config::default()
    });
    let addresses = ["100.101.102.103", "100.101.102.104", "2001:db8::1"];
    w.links(&addresses);
    w.put(
        service("svc1")
            .cluster_ip("10.20.30.41")
            .tcp(80)
            .node_port(3001),
    );
    w.node(&["100.101.102.103", "2001:db8::1"]);
    let with_node_port = [
        "10.20.30.41:80/tcp ->",
        "100.101.102.103:3001/tcp ->",
        "KUBE-NODE-PORT-TCP: 3001",
        VIP[0],
        VIP[1],
    ];
    w.holds(&with_node_port);
    w.ops();
    w.node(&[]);
    assert_eq!(
        w.ops(),
        NOTHING,
        "a Node made anew gets its addresses later"
    );
    w.node(&["100.101.102.104"]);
    w.holds(&with_node_port.map(|line| match line {
        "100.101.102.103:3001/tcp ->" => "100.101.102.104:3001/tcp ->",
        line => line,
    }));
}

/// Beside E17: an older Service asks for another's ClusterIP; that one keeps it.
#[test]
fn an_external_ip_takes_no_cluster_ip() {
    let thief = service("a")
        .cluster_ip("10.20.30.41")
        .external_ip("10.20.30.42")
        .tcp(80)
        .created(1);
    let web = service("z").cluster_ip("10.20.30.42").tcp(80).created(2);
    for order in [[thief.clone(), web.clone()], [web.clone(), thief.clone()]] {
        let mut w = World::new();
        w.put(slice("a").tcp(80).endpoint("10.180.0.1"));
        w.put(slice("z").tcp(80).endpoint("10.180.0.2"));
        for object in order {
            w.put(object);
            w.settle();
        }
        let served = [
            "10.20.30.41:80/tcp -> 10.180.0.1:80",
            "10.20.30.42:80/tcp -> 10.180.0.2:80",
            "bound: 10.20.30.41, 10.20.30.42",
            "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80, 10.20.30.42,tcp:80",
        ];
        w.pass(Duration::from_secs(3));
        w.holds(&served);
        let conflicts = w.planner.take_conflicts();
        let texts: Vec<String> = conflicts.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "Service ns1/a: 10.20.30.42:80/tcp belongs to Service ns1/z, which comes first: not served"
            ]
        );
        // While nobody has the ClusterIP, it is an external IP like any other.
        w.no_service("z");
        w.pass(Duration::from_secs(3));
        w.holds(&[
            "10.20.30.41:80/tcp -> 10.180.0.1:80",
            "10.20.30.42:80/tcp -> 10.180.0.1:80",
            "bound: 10.20.30.41, 10.20.30.42",
            "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80",
            "KUBE-EXTERNAL-IP: 10.20.30.42,tcp:80",
        ]);
        w.put(web.clone());
        w.pass(Duration::from_secs(3));
        w.holds(&served);
    }
}

/// Beside E17: an external IP becomes the load balancer's address, and goes before an older external IP.
#[test]
fn a_load_balancers_address_goes_before_an_older_external_ip() {
    let old = service("a")
        .cluster_ip("10.20.30.41")
        .external_ip("5.6.7.8")
        .tcp(80)
        .created(1);
    let young = service("z").cluster_ip("10.20.30.42").tcp(80).created(2);
    let mut w = World::new();
    w.put(slice("a").tcp(80).endpoint("10.180.0.1"));
    w.put(slice("z").tcp(80).endpoint("10.180.0.2"));
    w.put(old);
    w.put(young.clone().external_ip("5.6.7.8"));
    w.settle();
    let holds = |w: &mut World, pod: &str, set: &str| {
        w.pass(Duration::from_secs(3));
        w.holds(&[
            "10.20.30.41:80/tcp -> 10.180.0.1:80",
            "10.20.30.42:80/tcp -> 10.180.0.2:80",
            &format!("5.6.7.8:80/tcp -> {pod}:80"),
            "bound: 5.6.7.8, 10.20.30.41, 10.20.30.42",
            "KUBE-CLUSTER-IP: 10.20.30.41,tcp:80, 10.20.30.42,tcp:80",
            &format!("{set}: 5.6.7.8,tcp:80"),
        ]);
    };
    holds(&mut w, "10.180.0.1", "KUBE-EXTERNAL-IP");
    w.put(young.clone().ingress("5.6.7.8"));
    holds(&mut w, "10.180.0.2", "KUBE-LOAD-BALANCER");
    w.put(young.external_ip("5.6.7.8"));
    holds(&mut w, "10.180.0.1", "KUBE-EXTERNAL-IP");
}
