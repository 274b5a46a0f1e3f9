//! Events in every order on a real kernel: one batch, one by one, reversed, with a new process in between. However they come, the end
//! is that of a build from scratch, no virtual server is removed that is there before and after, no TCP real server is removed that
//! has a connection, and a second pass writes nothing.
//!
//! `crates/proxy/tests/ordering.rs` has the same rows for a kernel in memory, with an op that fails at every place besides. Row 14
//! (the deadline of a drain to the millisecond), 16 (traffic policies) and 22 (what a kernel refuses on demand) are there only; row 19
//! is `crash`.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ipvs_proxy_core::model::{Change, Endpoint, Service};
use ipvs_proxy_core::op::Op;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::state::Key;
use ipvs_proxy_dataplane::kernel::Kernel;
use tests::foreign;
use tests::netns::Namespace;
use tests::tap::Tap;
use tests::topology::{NODE, Topology, pod_addresses};
use tests::traffic::{HeldConnection, Server, hold};

use crate::driver::{Driver, Held, held, least, rules, words};
use crate::world::{
    TCP, UDP, balanced, external, gone, node, node_ports, put, put_slice, ready, service, slice,
    slice_gone, sticky,
};

const VIP: &str = "10.96.0.20";

fn http(cluster_ip: &str) -> Service {
    service(cluster_ip, &[("http", TCP, 80)])
}

/// These pods as endpoints at a port.
fn pods(of: &str, slice_name: &str, port: u16, numbers: &[u8]) -> Change {
    let endpoints: Vec<Endpoint> = numbers
        .iter()
        .map(|pod| ready(&pod_addresses(*pod)[0].to_string()))
        .collect();
    put_slice(slice_name, slice(of, &[("http", TCP, port)], &endpoints))
}

/// The last word on each object.
fn last(changes: &[Change]) -> Vec<Change> {
    let mut last: BTreeMap<String, Change> = BTreeMap::new();
    for change in changes {
        let name = match change {
            Change::Service(name, _) => format!("service {name}"),
            Change::Slice(name, _) => format!("slice {name}"),
            Change::Needed(by, _) => by.to_string(),
            Change::Node(_)
            | Change::NodeAddresses(_)
            | Change::PodCidrs(_)
            | Change::Listeners(_) => String::new(),
        };
        last.insert(name, change.clone());
    }
    last.into_values().collect()
}

struct Row {
    topology: Topology,
    tap: Tap,
    foreign: String,
    /// The sockets of all processes, which share them: they carry nothing over. By then the rules are in force.
    kernel: RefCell<Option<Kernel>>,
    _servers: Vec<Server>,
}

impl Row {
    fn new() -> Row {
        let topology = Topology::new(3);
        foreign::make(topology.node());
        topology.node().sysctl("ipv4/vs/conntrack", "1");
        Row {
            tap: Tap::new(topology.node()),
            foreign: foreign::said(topology.node()),
            kernel: RefCell::new(None),
            _servers: [
                (0, 8080),
                (1, 8080),
                (2, 8080),
                (0, 9090),
                (1, 9090),
                (2, 9090),
            ]
            .map(|(pod, port)| topology.serve(pod, port))
            .into(),
            topology,
        }
    }

    fn node(&self) -> &Namespace {
        self.topology.node()
    }

    /// Brings the kernel to what these objects need, whatever it holds.
    fn build(&self, objects: &[Change]) -> Driver {
        let kernel = self.kernel.take();
        self.node().enter(|| {
            let mut driver = match kernel {
                None => Driver::start(&Config::default(), objects),
                Some(kernel) => Driver::with(kernel, false, &Config::default(), objects),
            };
            driver.rest();
            driver
        })
    }

    /// The events in every way. `to` is where a connection is held, if anywhere.
    fn vary(&self, before: &[Change], events: &[Change], to: Option<&str>) {
        let all: Vec<Change> = before.iter().chain(events).cloned().collect();
        let mut reversed = events.to_vec();
        reversed.reverse();
        let back: Vec<Change> = before.iter().chain(&reversed).cloned().collect();
        for (events, all) in [(events, &all), (&reversed[..], &back)] {
            let wanted = clean_build(&last(all));
            let short = [(false, false), (true, true)];
            let more = tests::long().then_some([(false, true), (true, false)]);
            for (restart, single) in short.into_iter().chain(more.into_iter().flatten()) {
                let what = format!("restart {restart}, one by one {single}");
                let mut driver = self.build(&undone(before, events));
                let mut connection = to.map(|to| {
                    self.topology
                        .outside()
                        .enter(|| hold(to.parse().unwrap()))
                        .unwrap()
                });
                self.tap.take();
                let mut heard = before.to_vec();
                let batches: Vec<&[Change]> = if single {
                    events.chunks(1).collect()
                } else {
                    vec![events]
                };
                for batch in batches {
                    let mut ops = Vec::new();
                    let first = held(self.node());
                    heard.extend_from_slice(batch);
                    driver = self.node().enter(|| {
                        driver.tell(batch);
                        if restart {
                            // The news comes in the middle of a round, and a new process hears it again.
                            ops.extend(driver.some(2));
                            driver = Driver::with(
                                driver.end(),
                                false,
                                &Config::default(),
                                &last(&heard),
                            );
                        }
                        ops.extend(driver.rest());
                        driver
                    });
                    self.judge(&what, &ops, &first, &held(self.node()), connection.as_mut());
                }
                let end = held(self.node());
                let differs = least(&ours(&end), &wanted.0);
                let drains = differs.iter().all(|op| {
                    op.starts_with("remove real server") || op.starts_with("update real server")
                });
                assert!(
                    differs.is_empty() || connection.is_some() && drains,
                    "{what}: {differs:#?}"
                );
                // A second pass of this process, and one of a new one.
                let (kernel, again) = self.node().enter(|| {
                    driver.read();
                    let mut again = driver.rest();
                    let config = Config::default();
                    let mut next = Driver::with(driver.end(), false, &config, &last(&heard));
                    again.extend(next.rest());
                    (next.end(), words(&again))
                });
                self.kernel.replace(Some(kernel));
                assert_eq!(again, [""; 0], "{what}");
            }
            assert_eq!(rules(self.node()), wanted.1);
            assert_eq!(foreign::said(self.node()), self.foreign);
        }
    }

    /// No virtual server goes that is there before and after, nor a real server that has a connection.
    fn judge(
        &self,
        what: &str,
        ops: &[Op],
        before: &Held,
        after: &Held,
        connection: Option<&mut HeldConnection>,
    ) {
        for op in ops {
            let key = op.key().to_string();
            if let Op::Remove(Key::VirtualServer(_)) = op {
                assert!(
                    !(before.contains_key(&key) && after.contains_key(&key)),
                    "{what}: {op}"
                );
            }
        }
        // What was really asked of the kernel, as its own tap has it.
        for asked in self.tap.take() {
            if let Some(server) = asked.text.strip_prefix("ipvs DEL_SERVICE ") {
                let [tcp, udp] =
                    ["tcp", "udp"].map(|protocol| format!("virtual server {server}/{protocol}"));
                let stays = |key: &String| before.contains_key(key) && after.contains_key(key);
                assert!(
                    !(stays(&tcp) && (stays(&udp) || !before.contains_key(&udp))),
                    "{what}: {}",
                    asked.text
                );
            }
        }
        if let Some(held) = connection {
            held.ping().unwrap_or_else(|error| {
                panic!("{what}: the connection to {}: {error}", held.answer.name)
            });
        }
    }
}

/// What undoes the events: the objects of before, and the others gone.
fn undone(before: &[Change], events: &[Change]) -> Vec<Change> {
    let gone = events.iter().filter_map(|event| match event {
        Change::Service(name, Some(_)) => Some(Change::Service(name.clone(), None)),
        Change::Slice(name, Some(_)) => Some(Change::Slice(name.clone(), None)),
        _ => None,
    });
    last(&gone.chain(before.iter().cloned()).collect::<Vec<_>>())
}

/// All but what is of other software.
fn ours(held: &Held) -> Held {
    let theirs = [
        "ELSE",
        "203.0.113.200:",
        "192.168.10.11:5353",
        "[fd99::200]",
        "-f ",
    ];
    let kept = held
        .iter()
        .filter(|(key, _)| !theirs.iter().any(|mark| key.contains(mark)));
    kept.map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// What a fresh node holds for these objects, and its rules.
fn clean_build(objects: &[Change]) -> (Held, Vec<String>) {
    let namespace = Namespace::new();
    namespace.enter(|| Driver::start(&Config::default(), objects).rest());
    (held(&namespace), rules(&namespace))
}

#[test]
fn row_01_an_endpoint_moves_between_slices() {
    let before = [
        put("s", http(VIP)),
        pods("s", "a", 8080, &[0, 1]),
        pods("s", "b", 8080, &[]),
    ];
    let events = [pods("s", "a", 8080, &[0]), pods("s", "b", 8080, &[1])];
    Row::new().vary(&before, &events, Some("10.96.0.20:80"));
}

#[test]
fn row_03_a_port_is_renamed_and_the_slices_follow() {
    let renamed = |of: &str, pod: u8| {
        put_slice(
            of,
            slice(
                "s",
                &[("web", TCP, 8080)],
                &[ready(&pod_addresses(pod)[0].to_string())],
            ),
        )
    };
    let before = [
        put("s", http(VIP)),
        pods("s", "a", 8080, &[0]),
        pods("s", "b", 8080, &[1]),
    ];
    let events = [
        put("s", service(VIP, &[("web", TCP, 80)])),
        renamed("a", 0),
        renamed("b", 1),
    ];
    Row::new().vary(&before, &events, Some("10.96.0.20:80"));
}

#[test]
fn row_04_a_target_port_changes_slice_by_slice() {
    let at = |port| {
        [
            pods("s", "a", port, &[0]),
            pods("s", "b", port, &[1]),
            pods("s", "c", port, &[2]),
        ]
    };
    let mut before = at(8080).to_vec();
    before.push(put("s", http(VIP)));
    Row::new().vary(&before, &at(9090), Some("10.96.0.20:80"));
}

#[test]
fn row_07_the_type_of_a_service_changes() {
    let cluster_ip = || service(VIP, &[("http", TCP, 80), ("dns", UDP, 53)]);
    let node_port = || node_ports(cluster_ip(), &[30080, 30053]);
    let ports = [("http", TCP, 8080), ("dns", UDP, 53)];
    let endpoint = ready(&pod_addresses(0)[0].to_string());
    let before = [
        node(&[&NODE[0].to_string()]),
        put_slice("s-1", slice("s", &ports, &[endpoint])),
        put("s", balanced(node_port(), &["203.0.113.5"])),
    ];
    let events = [
        put("s", node_port()),
        put("s", cluster_ip()),
        gone("s"),
        put("s", cluster_ip()),
    ];
    Row::new().vary(&before, &events, None);
}

#[test]
fn row_08_another_service_at_the_same_cluster_ip() {
    let row = Row::new();
    let before = [put("s1", http(VIP)), pods("s1", "a", 8080, &[0])];
    let events = [
        gone("s1"),
        slice_gone("a"),
        put("s2", http(VIP)),
        pods("s2", "b", 8080, &[1]),
    ];
    row.vary(&before, &events, None);
    for cluster_ip in [VIP, "10.96.0.21"] {
        let anew = Service {
            uid: "two".into(),
            created: Some(7),
            ..http(cluster_ip)
        };
        row.vary(
            &before,
            &[put("s1", anew), pods("s1", "a", 8080, &[1])],
            None,
        );
    }
}

#[test]
fn row_09_two_services_share_an_address_but_no_port() {
    let of = |cluster_ip, ports| external(service(cluster_ip, ports), &["203.0.113.5"]);
    let before = [
        put("s1", of("10.96.0.1", &[("http", TCP, 80)])),
        put("s2", of("10.96.0.2", &[("http", TCP, 443)])),
        pods("s1", "a", 8080, &[0]),
        pods("s2", "b", 8080, &[0]),
    ];
    let more = [("http", TCP, 443), ("more", TCP, 444)];
    Row::new().vary(
        &before,
        &[gone("s1"), put("s2", of("10.96.0.2", &more))],
        Some("203.0.113.5:443"),
    );
}

#[test]
fn row_10_two_services_claim_one_address_and_port() {
    let of = |cluster_ip, created, port| Service {
        created: Some(created),
        ..external(
            service(cluster_ip, &[("http", TCP, port)]),
            &["203.0.113.5"],
        )
    };
    let before = [
        put("s1", of("10.96.0.1", 1, 80)),
        put("s2", of("10.96.0.2", 2, 80)),
        pods("s1", "a", 8080, &[0]),
        pods("s2", "b", 8080, &[1]),
    ];
    let rolls = pods("s2", "b", 8080, &[2]);
    let row = Row::new();
    row.vary(&before, &[gone("s1"), rolls.clone()], None);
    row.vary(
        &before,
        &[put("s1", of("10.96.0.1", 1, 81)), rolls.clone()],
        None,
    );
    // Made anew, it is the younger one.
    row.vary(&before, &[put("s1", of("10.96.0.1", 3, 80)), rolls], None);
}

#[test]
fn row_12_affinity_changes_while_endpoints_roll() {
    let with = |timeout_s| put("s", sticky(http(VIP), timeout_s));
    let before = [with(None), pods("s", "a", 8080, &[0, 1])];
    let events = [
        with(Some(10800)),
        pods("s", "a", 8080, &[1, 2]),
        with(None),
        pods("s", "a", 8080, &[2, 0]),
    ];
    Row::new().vary(&before, &events, Some("10.96.0.20:80"));
}

#[test]
fn row_13_another_scheduler_after_a_restart_with_a_drain() {
    for scheduler in ["lc", "sh", "mh"] {
        for returns in [false, true] {
            let row = Row::new();
            let both = [put("s", http(VIP)), pods("s", "a", 8080, &[0, 1])];
            let one = [put("s", http(VIP)), pods("s", "a", 8080, &[0])];
            row.build(&both);
            let to = "10.96.0.20:80".parse().unwrap();
            let mut held: Vec<HeldConnection> = (0..2)
                .map(|_| row.topology.outside().enter(|| hold(to)).unwrap())
                .collect();
            row.build(&one);
            let config = Config {
                scheduler: scheduler.parse().unwrap(),
                ..Config::default()
            };
            let objects = if returns { &both } else { &one };
            let ops = row.node().enter(|| Driver::start(&config, objects).rest());
            let mut expected = vec![format!("update virtual server {VIP}:80/tcp")];
            if returns {
                expected.insert(
                    0,
                    format!("update real server 10.0.0.3:8080 of {VIP}:80/tcp"),
                );
            }
            assert_eq!(words(&ops), expected, "{scheduler}, {returns}");
            assert!(
                matches!(ops[0], Op::Update(Key::VirtualServer(_), _)),
                "{ops:?}"
            );
            for held in &mut held {
                held.ping().unwrap_or_else(|error| {
                    panic!("{scheduler}, {returns}: {}: {error}", held.answer.name)
                });
            }
        }
    }
}

#[test]
fn row_18_a_restart_repairs_damage_with_the_least_ops() {
    const DAMAGES: [&[&str]; 10] = [
        &["ipvsadm -A -t 10.96.0.3:9999 -s rr"],
        &["ipvsadm -D -t 10.96.0.3:80"],
        &["ipvsadm -a -t 10.96.0.1:80 -r 10.244.9.9:8080 -m"],
        &["ipvsadm -d -t 10.96.0.1:80 -r 10.0.0.2:8080"],
        &["ipvsadm -e -t 10.96.0.1:80 -r 10.0.0.3:8080 -m -w 3"],
        &["ipvsadm -E -t 10.96.0.2:80 -s rr -p 360"],
        &["ipset add KUBE-CLUSTER-IP 10.96.9.9,tcp:80"],
        &["ipset del KUBE-CLUSTER-IP 10.96.0.2,tcp:80"],
        &["ip addr del 10.96.0.1/32 dev kube-ipvs0"],
        &["ip addr add 10.96.9.8/32 dev kube-ipvs0"],
    ];
    let row = Row::new();
    let mut objects = Vec::new();
    for number in 1..=3 {
        let of = format!("s{number}");
        objects.push(put(&of, http(&format!("10.96.0.{number}"))));
        objects.push(pods(&of, &of, 8080, &[0, 1]));
    }
    row.build(&objects);
    let wanted = held(row.node());
    let all = [DAMAGES.concat()];
    for damages in DAMAGES.iter().copied().chain(all.iter().map(Vec::as_slice)) {
        for damage in damages {
            row.node().tool(damage);
        }
        let expected = least(&held(row.node()), &wanted);
        assert!(expected.len() >= damages.len(), "{damages:?}: {expected:?}");
        let ops = row
            .node()
            .enter(|| Driver::start(&Config::default(), &objects).rest());
        assert_eq!(words(&ops), expected, "{damages:?}");
        assert_eq!(held(row.node()), wanted, "{damages:?}");
    }
    assert_eq!(foreign::said(row.node()), row.foreign);
}

#[test]
fn row_21_tables_are_emptied_between_two_unrelated_events() {
    for damage in [
        "ipvsadm -D -t 10.96.0.1:80",
        "ipset flush KUBE-CLUSTER-IP",
        "iptables -t nat -F KUBE-SERVICES",
    ] {
        let row = Row::new();
        let s = |number: u8, numbers: &[u8]| {
            let of = format!("s{number}");
            [
                put(&of, http(&format!("10.96.0.{number}"))),
                pods(&of, &of, 8080, numbers),
            ]
        };
        let before: Vec<Change> = [s(1, &[0, 1]), s(2, &[0, 1])].concat();
        let after: Vec<Change> = [s(1, &[0, 1, 2]), s(2, &[0, 1, 2])].concat();
        let mut driver = row.build(&before);
        row.node().tool(damage);
        row.node().enter(|| {
            driver.tell(&after);
            driver.rest_whatever();
        });
        let wanted = clean_build(&after);
        let now = || (ours(&held(row.node())), rules(row.node()));
        if damage.starts_with("ipvsadm") {
            // The kernel's refusal was enough to look at it again.
            assert_eq!(now(), wanted, "{damage}");
        }
        row.node().enter(|| {
            driver.read();
            driver.rest();
        });
        assert_eq!(now(), wanted, "{damage}");
        assert_eq!(foreign::said(row.node()), row.foreign, "{damage}");
    }
}

#[test]
fn row_25_a_large_service_rolls() {
    const ENDPOINTS: u16 = 1000;
    const SLICE: u16 = 100;
    let row = Row::new();
    let address = |number: u16| {
        let [high, low] = number.to_be_bytes();
        ready(&format!("10.244.{high}.{low}"))
    };
    // Each slice holds a hundred, and the first `rolled` endpoints of all are new ones.
    let slices = |rolled: u16| -> Vec<Change> {
        (0..ENDPOINTS / SLICE)
            .map(|part| {
                let endpoints: Vec<Endpoint> = (part * SLICE..(part + 1) * SLICE)
                    .map(|number| {
                        address(if number < rolled {
                            number + ENDPOINTS
                        } else {
                            number
                        })
                    })
                    .collect();
                put_slice(
                    &format!("s-{part}"),
                    slice("s", &[("http", TCP, 8080)], &endpoints),
                )
            })
            .collect()
    };
    let mut before = slices(0);
    before.push(put("s", http(VIP)));
    let mut driver = row.build(&before);
    row.tap.take();
    for step in 1..=10 {
        let ops = row.node().enter(|| {
            driver.tell(&slices(step * SLICE));
            driver.work()
        });
        // Each is added before one is quiesced; what drains goes later.
        let (added, quiesced): (Vec<_>, Vec<_>) = ops
            .iter()
            .filter(|op| !matches!(op, Op::Remove(_)))
            .partition(|op| matches!(op, Op::Add(..)));
        assert_eq!((added.len(), quiesced.len()), (100, 100), "step {step}");
        let first = ops
            .iter()
            .position(|op| matches!(op, Op::Update(..)))
            .unwrap();
        assert!(
            ops[first..].iter().all(|op| !matches!(op, Op::Add(..))),
            "step {step}"
        );
        row.node().enter(|| driver.rest());
    }
    let asked = row.tap.take();
    assert!(
        !asked
            .iter()
            .any(|asked| asked.text == "ipvs GET_SERVICE" || asked.text.contains("DEL_SERVICE"))
    );
    let count = |what: &str| {
        asked
            .iter()
            .filter(|asked| asked.text.starts_with(what))
            .count()
    };
    assert_eq!(
        [
            count("ipvs NEW_DEST"),
            count("ipvs SET_DEST"),
            count("ipvs DEL_DEST")
        ],
        [1000, 1000, 1000]
    );
    let mut after = slices(ENDPOINTS);
    after.push(put("s", http(VIP)));
    assert_eq!(ours(&held(row.node())), clean_build(&after).0);
}
