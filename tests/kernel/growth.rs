//! A set of ours that is full gets more room, and at no moment lacks an entry.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ipset_rs::{Client, Entry};
use ipvs_proxy_core::op::{Dataplane as _, Failure, FailureKind, Op, Outcome};
use ipvs_proxy_core::state::{Key, Role, Set, Value};
use ipvs_proxy_dataplane::growth::GROWING;
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_iptables::Choice;
use ipvs_proxy_netlink::{Family, Protocol};
use tests::daemon::{Daemon, Manifests, binary, service, wait_until};
use tests::netns::Namespace;
use tests::topology::Topology;

const SET: Set = Set {
    family: Family::V4,
    role: Role::ClusterIp,
};

fn entry(number: u32) -> Entry {
    let address = Ipv4Addr::from(0x0a60_0000 + number);
    Entry::IpPort(address.into(), Protocol::Tcp, 80)
}

fn add(number: u32) -> Op {
    Op::Add(Key::Entry(SET, entry(number)), Value::Present)
}

fn kernel(node: &Namespace) -> Kernel {
    node.enter(|| Kernel::open(&[Family::V4], Choice::Legacy))
        .expect("a kernel with IPVS and ipset")
}

fn set_names(client: &mut Client) -> Vec<String> {
    let sets = client.list_headers().unwrap();
    sets.iter().map(|set| set.name.to_string()).collect()
}

#[test]
fn a_set_holds_more_than_it_was_made_for() {
    let node = Namespace::new();
    let mut kernel = kernel(&node);
    let mut client = node.enter(Client::open).unwrap();
    let set = Op::Add(Key::Set(SET), Value::Present);
    assert_eq!(kernel.apply(&[set]), [Outcome::Done]);
    node.tool("iptables-legacy -A OUTPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT");

    // Entries that are there before the set is full, and looked at all the time.
    let first: Vec<Op> = (0..1000).map(add).collect();
    assert!(kernel.apply(&first).iter().all(|o| *o == Outcome::Done));
    let done = AtomicBool::new(false);
    let rest: Vec<Op> = (1000..66_000).map(add).collect();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut client = node.enter(Client::open).unwrap();
            let mut looks = 0;
            while !done.load(Ordering::Relaxed) {
                let number = looks % 1000;
                let there = client.contains(&SET.name(), &entry(number));
                assert_eq!(there, Ok(true), "look {looks}");
                looks += 1;
            }
            looks
        });
        let outcomes = kernel.apply(&rest);
        done.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Done));
        let looks = reader.join().unwrap();
        println!("{looks} looks");
        assert!(looks > 100, "{looks}");
    });

    let (header, entries) = client.list(&SET.name()).unwrap();
    assert_eq!(entries.len(), 66_000);
    let expected: BTreeSet<Entry> = (0..66_000).map(entry).collect();
    assert!(entries.into_iter().collect::<BTreeSet<_>>() == expected);
    assert_eq!((header.max_elements, header.references), (131_072, 1));
    assert_eq!(set_names(&mut client), ["KUBE-CLUSTER-IP"]);

    // More of it goes as always.
    let more = [
        add(66_000),
        Op::Remove(Key::Entry(SET, entry(0))),
        add(66_001),
    ];
    assert_eq!(kernel.apply(&more), [const { Outcome::Done }; 3]);
}

#[test]
fn what_can_not_grow_stays_as_it_was() {
    let node = Namespace::new();
    let mut kernel = kernel(&node);
    let mut client = node.enter(Client::open).unwrap();
    node.tool("ipset create KUBE-CLUSTER-IP hash:ip,port hashsize 64 maxelem 100");
    // In the way, and held by a rule that is not ours
    node.tool(&format!("ipset create {GROWING} hash:ip"));
    let rule = format!("OUTPUT -m set --match-set {GROWING} dst -j ACCEPT");
    node.tool(&format!("iptables-legacy -A {rule}"));
    let ops: Vec<Op> = (0..300).map(add).collect();
    let outcomes = kernel.apply(&ops);
    let failed = outcomes.iter().find(|outcome| **outcome != Outcome::Done);
    let Some(Outcome::Failed(Failure { kind, text })) = failed else {
        panic!("{outcomes:?}");
    };
    assert_eq!(*kind, FailureKind::Busy);
    assert_eq!(
        text,
        "the set is full, and KUBE-IPVS-GROWING could not take its place: the set is in use by a \
         rule, another set or a listing"
    );
    let (header, entries) = client.list(&SET.name()).unwrap();
    let done = outcomes.iter().filter(|o| **o == Outcome::Done).count();
    assert_eq!((header.max_elements, entries.len()), (100, done));

    // Once the rule is gone, it goes, too, without a new start.
    node.tool(&format!("iptables-legacy -D {rule}"));
    let outcomes = kernel.apply(&ops);
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Done));
    let (header, entries) = client.list(&SET.name()).unwrap();
    assert_eq!((header.max_elements, entries.len()), (65_536, 300));
    assert_eq!(set_names(&mut client), ["KUBE-CLUSTER-IP"]);
}

#[test]
fn a_daemon_outgrows_a_set_that_it_found() {
    const SERVICES: usize = 400;
    let topology = Topology::new(1);
    let node = topology.node();
    let mut client = node.enter(Client::open).unwrap();
    node.tool("ipset create KUBE-CLUSTER-IP hash:ip,port hashsize 64 maxelem 128");
    // Of a crash, with another type
    let leave = format!("ipset create {GROWING} hash:ip,port,ip family inet6");
    node.tool(&leave);
    let manifests = Manifests::new();
    let services = |count: usize| -> String {
        let one = |number| {
            let address = format!("10.96.{}.{}", 1 + number / 250, 1 + number % 250);
            service(&format!("web-{number}"), &[&address], &[("", "TCP", 80, 0)])
        };
        (0..count).map(one).collect()
    };
    manifests.write("web.yaml", &services(100));
    let mut daemon = Daemon::start(node, &manifests, &["--sync-period=1h"]);
    daemon.settle();
    assert!(!set_names(&mut client).iter().any(|name| name == GROWING));
    let mut held = || {
        let (header, entries) = client.list(&SET.name()).unwrap();
        (header.max_elements, entries.len())
    };
    assert_eq!(held(), (128, 100));

    manifests.write("web.yaml", &services(SERVICES));
    wait_until("all are in the set", || held() == (65_536, SERVICES));
    let servers = || node.tool("ipvsadm -Sn").matches("-A -t 10.96.").count();
    wait_until("all have a virtual server", || servers() == SERVICES);
    let log = daemon.log();
    assert!(!log.contains("will be tried again"), "{log}");

    daemon.crash();
    node.tool(&leave);
    let mut command = Command::new(binary());
    let output = node.enter(|| command.arg("cleanup").output()).unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(node.tool("ipset save"), "");
}
