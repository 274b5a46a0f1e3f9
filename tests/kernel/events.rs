//! What one changed endpoint costs among a thousand Services: one message for each virtual server of its Service, and one for the
//! set of the endpoints of this node.

use std::net::SocketAddr;

use tests::daemon::{Daemon, Manifests, service, slice};
use tests::strace::Trace;
use tests::tap::{Asked, Tap};
use tests::topology::{NODE, Topology, pod_addresses};
use tests::traffic::{Client, HeldConnection};

const PORT: u16 = 8080;
/// The virtual servers of the Service that changes.
const SERVERS: [&str; 3] = ["10.96.0.10:80", "192.168.10.11:30080", "[fd96::10]:80"];
/// The families of their real servers.
const FAMILIES: [usize; 3] = [0, 0, 1];

/// An endpoint of the Service: the number of its pod, whether it is ready, its node.
type Endpoint = (u8, bool, &'static str);

struct Cluster {
    manifests: Manifests,
}

impl Cluster {
    /// A thousand Services, each with an endpoint on this node and one elsewhere.
    fn new() -> Cluster {
        let manifests = Manifests::new();
        let mut others = String::new();
        for number in 0..999_u16 {
            let [high, low] = number.to_be_bytes();
            let name = format!("other{number}");
            others.push_str(&service(
                &name,
                &[&format!("10.96.{}.{low}", high + 1)],
                &[("", "TCP", 80, 0)],
            ));
            let endpoints = [10, 11].map(|net| format!("10.{net}.{high}.{low}").parse().unwrap());
            let endpoints = [
                (endpoints[0], true, "node"),
                (endpoints[1], true, "elsewhere"),
            ];
            others.push_str(&slice(&name, &name, &[("", "TCP", PORT)], &endpoints));
        }
        manifests.write("others.yaml", &others);
        manifests.write(
            "app.yaml",
            &service(
                "app",
                &["10.96.0.10", "fd96::10"],
                &[("", "TCP", 80, 30080)],
            ),
        );
        Cluster { manifests }
    }

    fn set(&self, endpoints: &[Endpoint]) {
        let of = |family: usize| {
            let endpoints: Vec<_> = endpoints
                .iter()
                .map(|(pod, ready, node)| (pod_addresses(*pod)[family], *ready, *node))
                .collect();
            slice(
                &format!("app-{family}"),
                "app",
                &[("", "TCP", PORT)],
                &endpoints,
            )
        };
        self.manifests.write("app-slices.yaml", &(of(0) + &of(1)));
    }
}

/// `command` of a pod for each virtual server of the Service.
fn servers(command: &str, pod: u8, weight: &str) -> Vec<String> {
    let each = SERVERS.iter().zip(FAMILIES);
    each.map(|(server, family)| {
        let real = SocketAddr::new(pod_addresses(pod)[family], PORT);
        format!("ipvs {command} {server} {real}{weight}")
    })
    .collect()
}

fn both_sets(command: &str) -> Vec<String> {
    ["KUBE-LOOP-BACK", "KUBE-6-LOOP-BACK"]
        .map(|set| format!("ipset {command} {set}"))
        .to_vec()
}

/// A connection from outside to a virtual server that ended up at that pod.
fn held_at(topology: &Topology, server: &str, pod: &str) -> HeldConnection {
    let to = server.parse().unwrap();
    let once = || {
        topology
            .outside()
            .enter(|| Client::default().hold(to))
            .unwrap()
    };
    let held = std::iter::repeat_with(once)
        .take(8)
        .find(|held| held.answer.name == pod);
    held.unwrap_or_else(|| panic!("{server} never reaches {pod}"))
}

#[test]
fn one_endpoint_costs_one_message_a_virtual_server() {
    let topology = Topology::new(3);
    let _pods = [0, 1, 2].map(|pod| topology.serve(pod, PORT));
    let node = topology.node();
    let cluster = Cluster::new();
    let stays: Endpoint = (0, true, "node");
    cluster.set(&[stays]);
    let trace = Trace::new();
    let flags = ["--node-ips", &NODE[0].to_string()];
    let mut daemon = Daemon::start_by(node, &cluster.manifests, &trace.by(), &flags);
    daemon.settle();
    let saved = node.tool("ipvsadm -S -n");
    assert_eq!(
        saved.lines().filter(|line| line.starts_with("-A")).count(),
        1002
    );

    let tap = Tap::new(node);
    let mut held: Vec<_> = SERVERS
        .iter()
        .map(|server| held_at(&topology, server, "pod0"))
        .collect();
    let programs = trace.started();
    let mut change = |what: &str, endpoints: &[Endpoint], mut expected: Vec<String>| {
        cluster.set(endpoints);
        // Each node adds real servers in an order of its own.
        let mut asked: Vec<Asked> = Vec::new();
        for text in &expected {
            if !asked.iter().any(|asked| asked.text == *text) {
                asked.extend(tap.until(text));
            }
        }
        let texts = asked.into_iter().map(|asked| asked.text);
        // A draining real server is looked at every three seconds.
        let drains = endpoints.len() == 1 || expected.iter().any(|text| text.contains("SET_DEST"));
        let mut texts: Vec<_> = texts
            .filter(|text| !(drains && text.starts_with("ipvs GET_DEST")))
            // What is looked at each second, of the same cost whatever changes.
            .filter(|text| text != "ipset LIST" && !text.starts_with("ipvs GET_SERVICE "))
            .collect();
        texts.sort_unstable();
        expected.sort_unstable();
        assert_eq!(texts, expected, "{what}");
        assert_eq!(trace.started(), programs, "{what}");
        for held in &mut held {
            held.ping()
                .unwrap_or_else(|error| panic!("{what}: {error}"));
        }
    };

    // Elsewhere, without connections: it goes at the first look at them.
    change(
        "added elsewhere",
        &[stays, (2, true, "elsewhere")],
        servers("NEW_DEST", 2, " weight 1"),
    );
    change(
        "removed elsewhere",
        &[stays],
        servers("SET_DEST", 2, " weight 0"),
    );
    let gone = tap.until("ipvs DEL_DEST [fd96::10]:80");
    let gone: Vec<_> = gone
        .into_iter()
        .filter(|asked| asked.writes)
        .map(|asked| asked.text)
        .collect();
    assert_eq!(gone, servers("DEL_DEST", 2, ""));

    // On this node, with connections: it keeps them as long as they are open.
    let added = [both_sets("ADD"), servers("NEW_DEST", 1, " weight 1")].concat();
    change("added", &[stays, (1, true, "node")], added);
    let mut drained: Vec<_> = SERVERS
        .iter()
        .map(|server| held_at(&topology, server, "pod1"))
        .collect();
    let unready = servers("SET_DEST", 1, " weight 0");
    change(
        "made unready",
        &[stays, (1, false, "node")],
        unready.clone(),
    );
    change(
        "made ready",
        &[stays, (1, true, "node")],
        servers("SET_DEST", 1, " weight 1"),
    );
    change("removed", &[stays], [unready, both_sets("DEL")].concat());

    for held in &mut drained {
        held.ping().unwrap();
    }
    assert!(daemon.log().contains("failed=0") && !daemon.log().contains("failed=1"));
}
