//! Events in every order: what happens to one cluster while events come in order, reversed, in
//! one batch, one by one, with a new process in between, and with an op that fails in between.
//!
//! However they come: the end is the plan from scratch, no virtual server is removed that is
//! there before and after, no TCP real server is removed while it has connections (unless its
//! time is over or its virtual server goes), and a second pass writes nothing.
//!
//! | row | what | test |
//! |---|---|---|
//! | 1 | an endpoint moves between slices | `row_01` |
//! | 3 | a port is renamed, the slices follow | `row_03` |
//! | 4 | a target port changes, slice by slice | `row_04` |
//! | 7 | LoadBalancer, NodePort, ClusterIP, ExternalName, ClusterIP | `row_07` |
//! | 8 | another Service, or one of the same name, at one ClusterIP | `row_08` |
//! | 9 | two Services share an address, not a port | `row_09` |
//! | 10 | two Services claim one address and port | `row_10` |
//! | 12 | affinity changes while endpoints roll | `row_12` |
//! | 13 | another scheduler after a restart, with a drain | `row_13` |
//! | 14 | readiness flaps around the deadline of a drain | `row_14` |
//! | 16 | traffic policies, zone and hints change while endpoints move and go | `row_16` |
//! | 18 | a restart over damage of every kind | `row_18` |
//! | 19 | a crash after every op | `row_19` |
//! | 21 | tables emptied between two unrelated events | `row_21` |
//! | 22 | every op fails in every way | `row_22` |
//! | 25 | a large Service rolls for a minute | `row_25` |

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test"
)]

mod world;

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::time::Duration;

use ipset_rs::Entry;
use ipvs_netlink::{Persistence, PersistenceMask, Scheduler};
use ipvs_proxy_core::memory::faults::Fault;
use ipvs_proxy_core::model::{Change, DrainTimeout, Endpoint, Service, TrafficPolicy};
use ipvs_proxy_core::op::{Dataplane, FailureKind, Op};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, Role, Set, State, Value};
use ipvs_proxy_netlink::Family;
use world::*;

const SECOND: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(60);

const FAULTS: [Fault; 6] = [
    Fault::Refused(FailureKind::Drift),
    Fault::Refused(FailureKind::Busy),
    Fault::Refused(FailureKind::Refused),
    Fault::Refused(FailureKind::Unknown),
    Fault::LostAnswer,
    Fault::LostRequest,
];

/// Every real server that there is has a connection.
fn connect_all(world: &mut World) {
    let servers = world.kernel.state.keys().filter_map(|key| match key {
        Key::RealServer(vs, rs) => Some(((*vs, *rs), 1)),
        _ => None,
    });
    world.kernel.connections = servers.collect();
}

/// Lets a batch through and judges every op of it.
fn judged(world: &mut World, batch: &[Change], restart: bool) {
    connect_all(world);
    let before = world.kernel.state.clone();
    let start = world.kernel.log.len();
    world.apply_all(batch.iter().cloned());
    if restart {
        // The news comes in the middle of a round, and a new process hears it again.
        world.round();
        world.restart();
    }
    let wanted = world.wanted();
    world.settle();
    world.now += SECOND * 5;
    world.settle();
    judge(world, &world.kernel.log[start..], &before, &wanted);
}

fn judge(world: &World, ops: &[Op], before: &State, wanted: &State) {
    for op in ops {
        let Op::Remove(key) = op else { continue };
        match key {
            Key::VirtualServer(_) => {
                let stays = before.contains_key(key) && wanted.contains_key(key);
                assert!(!stays, "{op}\nof {ops:#?}");
            }
            Key::RealServer(vs, rs) if !vs.to_string().ends_with("udp") => {
                let connections = world.kernel.connections.get(&(*vs, *rs));
                let stays = wanted.contains_key(&Key::VirtualServer(*vs));
                assert!(!stays || connections.is_none(), "{op}\nof {ops:#?}");
            }
            _ => {}
        }
    }
}

/// Every variation of a row.
fn vary(before: &[Change], events: &[Change]) {
    let start = || World::of(before.iter().cloned());
    let mut reversed = events.to_vec();
    reversed.reverse();
    for events in [events, &reversed] {
        // One batch, and a batch for each event, with and without a new process in each.
        for restart in [false, true] {
            let mut world = start();
            judged(&mut world, events, restart);
            assert_eq!(world.failed, 0);
            world.at_rest();

            let mut world = start();
            for event in events {
                judged(&mut world, std::slice::from_ref(event), restart);
            }
            assert_eq!(world.failed, 0);
            world.at_rest();

            for at in 1..events.len() {
                let mut world = start();
                judged(&mut world, &events[..at], restart);
                judged(&mut world, &events[at..], restart);
                world.at_rest();
            }
        }
        // An op that fails, whichever it is, in a batch and between batches.
        let mut world = start();
        let ops = world.settled(events.iter().cloned()).len();
        for (nth, fault) in (0..ops).flat_map(|nth| FAULTS.map(|fault| (nth, fault))) {
            let mut world = start();
            world.kernel.faults.strike(nth, fault);
            judged(&mut world, events, false);
            world.at_rest();

            let mut world = start();
            world.kernel.faults.strike(nth, fault);
            for event in events {
                judged(&mut world, std::slice::from_ref(event), false);
            }
            world.at_rest();
        }
    }
}

fn http(cluster_ip: &str) -> Service {
    service(cluster_ip, &[("http", TCP, 80)])
}

fn part(of: &str, slice_name: &str, port: u16, endpoints: &[Endpoint]) -> Change {
    put_slice(slice_name, slice(of, &[("http", TCP, port)], endpoints))
}

#[test]
fn row_01_an_endpoint_moves_between_slices() {
    let (p1, p2) = (ready("10.244.1.1"), ready("10.244.1.2"));
    vary(
        &[
            put("s", http("10.96.0.20")),
            part("s", "a", 8080, &[p1, p2]),
            part("s", "b", 8080, &[]),
        ],
        &[part("s", "a", 8080, &[p1]), part("s", "b", 8080, &[p2])],
    );
}

#[test]
fn row_03_a_port_is_renamed_and_the_slices_follow() {
    let some = [ready("10.244.1.1"), ready("10.244.2.2")];
    let renamed = |of: &str, e: Endpoint| put_slice(of, slice("s", &[("web", TCP, 8080)], &[e]));
    vary(
        &[
            put("s", http("10.96.0.20")),
            part("s", "a", 8080, &some[..1]),
            part("s", "b", 8080, &some[1..]),
        ],
        &[
            put("s", service("10.96.0.20", &[("web", TCP, 80)])),
            renamed("a", some[0]),
            renamed("b", some[1]),
        ],
    );
}

#[test]
fn row_04_a_target_port_changes_slice_by_slice() {
    let some = [
        ready("10.244.1.1"),
        ready("10.244.2.2"),
        ready("10.244.2.3"),
    ];
    let at = |port| {
        ["a", "b", "c"]
            .into_iter()
            .zip(some)
            .map(move |(name, e)| part("s", name, port, &[e]))
    };
    let before: Vec<_> = at(8080).chain([put("s", http("10.96.0.20"))]).collect();
    vary(&before, &at(9090).collect::<Vec<_>>());
}

#[test]
fn row_07_the_type_of_a_service_changes() {
    let cluster_ip = || service("10.96.0.20", &[("http", TCP, 80), ("dns", UDP, 53)]);
    let node_port = || node_ports(cluster_ip(), &[30080, 30053]);
    let ports = [("http", TCP, 8080), ("dns", UDP, 53)];
    vary(
        &[
            node(&["192.168.10.11"]),
            put_slice("s-1", slice("s", &ports, &[ready("10.244.1.5")])),
            put("s", balanced(node_port(), &["203.0.113.5"])),
        ],
        &[
            put("s", node_port()),
            put("s", cluster_ip()),
            gone("s"),
            put("s", cluster_ip()),
        ],
    );
}

#[test]
fn row_08_another_service_at_the_same_cluster_ip() {
    let before = [
        put("s1", http("10.96.0.20")),
        part("s1", "a", 8080, &[ready("10.244.1.1")]),
    ];
    let successor = part("s2", "b", 8080, &[ready("10.244.1.2")]);
    vary(
        &before,
        &[
            gone("s1"),
            slice_gone("a"),
            put("s2", http("10.96.0.20")),
            successor,
        ],
    );
    // The same name, and its deletion was never heard of.
    for cluster_ip in ["10.96.0.20", "10.96.0.21"] {
        let anew = Service {
            uid: "two".into(),
            created: Some(7),
            ..http(cluster_ip)
        };
        vary(
            &before,
            &[
                put("s1", anew),
                part("s1", "a", 8080, &[ready("10.244.1.2")]),
            ],
        );
    }
}

#[test]
fn row_09_two_services_share_an_address_but_no_port() {
    let of = |cluster_ip, ports| external(service(cluster_ip, ports), &["203.0.113.5"]);
    let some = [ready("10.244.1.1")];
    let before = [
        put("s1", of("10.96.0.1", &[("http", TCP, 80)])),
        put("s2", of("10.96.0.2", &[("http", TCP, 443)])),
        part("s1", "a", 8080, &some),
        part("s2", "b", 8080, &some),
    ];
    let two = [("http", TCP, 443), ("more", TCP, 444)];
    vary(&before, &[gone("s1"), put("s2", of("10.96.0.2", &two))]);
    let two = [("http", TCP, 80), ("more", TCP, 443)];
    vary(&before, &[gone("s2"), put("s1", of("10.96.0.1", &two))]);
}

#[test]
fn row_10_two_services_claim_one_address_and_port() {
    let of = |cluster_ip, created, ports| Service {
        created: Some(created),
        ..external(service(cluster_ip, ports), &["203.0.113.5"])
    };
    let port = &[("http", TCP, 80)];
    let before = [
        put("s1", of("10.96.0.1", 1, port)),
        put("s2", of("10.96.0.2", 2, port)),
        part("s1", "a", 8080, &[ready("10.244.1.1")]),
        part("s2", "b", 8080, &[ready("10.244.1.2")]),
    ];
    let s2_rolls = part("s2", "b", 8080, &[ready("10.244.1.3")]);
    vary(&before, &[gone("s1"), s2_rolls.clone()]);
    vary(
        &before,
        &[
            put("s1", sticky(of("10.96.0.1", 1, port), Some(60))),
            s2_rolls.clone(),
        ],
    );
    vary(
        &before,
        &[
            put("s1", of("10.96.0.1", 1, &[("http", TCP, 81)])),
            s2_rolls.clone(),
        ],
    );
    // Made anew, it is the younger one.
    vary(&before, &[put("s1", of("10.96.0.1", 3, port)), s2_rolls]);
}

/// With a policy changes who is masqueraded.
#[test]
fn row_16_a_traffic_policy_changes_while_endpoints_go() {
    use TrafficPolicy::{Cluster, Local};
    const NODE: &str = "192.168.10.11";
    let of = |policies| {
        let web = service("10.96.0.20", &[("http", TCP, 80)]);
        let web = external(balanced(web, &["203.0.113.5"]), &["203.0.113.6"]);
        put("s", world::policies(node_ports(web, &[30080]), policies))
    };
    let (one, two) = (here(ready("10.244.1.1")), ready("10.244.2.2"));
    let before = [
        in_zone(NODE, None),
        of([Cluster, Cluster]),
        part("s", "a", 8080, &[one, two]),
    ];
    vary(&before, &[of([Cluster, Local]), of([Local, Cluster])]);
    let mut local = before.clone();
    local[1] = of([Local, Local]);
    vary(&local, &[of([Cluster, Cluster])]);
    let terminating = Endpoint {
        ready: false,
        terminating: true,
        ..one
    };
    vary(
        &local,
        &[
            part("s", "a", 8080, &[terminating, two]),
            of([Cluster, Local]),
            part("s", "a", 8080, &[two]),
        ],
    );
}

/// The same of UDP, whose real servers go at once.
#[test]
fn row_16_a_traffic_policy_of_udp_changes() {
    use TrafficPolicy::{Cluster, Local};
    let of = |policy| {
        let dns = external(service("10.96.0.20", &[("dns", UDP, 53)]), &["203.0.113.6"]);
        let dns = node_ports(balanced(dns, &["203.0.113.5"]), &[30053]);
        put("s", world::policies(dns, [Cluster, policy]))
    };
    let both = [here(ready("10.244.1.1")), ready("10.244.2.2")];
    let before = [
        in_zone("192.168.10.11", None),
        put_slice("a", slice("s", &[("dns", UDP, 53)], &both)),
        of(Cluster),
    ];
    vary(&before, &[of(Local)]);
    vary(&before, &[of(Local), of(Cluster)]);
}

#[test]
fn row_16_the_zone_of_the_node_and_hints_change() {
    const NODE: &str = "192.168.10.11";
    let hinted = |address: &str, zone| Endpoint {
        zone_hints: NonZeroU16::new(zone),
        ..ready(address)
    };
    let slice = |first, second| {
        let endpoints = [hinted("10.244.1.1", first), hinted("10.244.2.2", second)];
        let mut slice = slice("s", &[("http", TCP, 8080)], &endpoints);
        slice.zone_hints = vec![vec!["a".into()], vec!["b".into()]];
        put_slice("a", slice)
    };
    let before = [
        in_zone(NODE, Some("a")),
        put("s", http("10.96.0.20")),
        slice(1, 2),
    ];
    vary(&before, &[in_zone(NODE, Some("b")), slice(2, 1)]);
    vary(&before, &[slice(1, 0), in_zone(NODE, None), slice(2, 2)]);
}

#[test]
fn row_12_affinity_changes_while_endpoints_roll() {
    let with = |timeout_s| put("s", sticky(http("10.96.0.20"), timeout_s));
    vary(
        &[
            with(None),
            part("s", "a", 8080, &[ready("10.244.1.1"), ready("10.244.1.2")]),
        ],
        &[
            with(Some(10800)),
            part("s", "a", 8080, &[ready("10.244.1.2"), ready("10.244.1.3")]),
            with(None),
            part("s", "a", 8080, &[ready("10.244.1.3"), ready("10.244.1.1")]),
        ],
    );
}

#[test]
fn row_13_another_scheduler_after_a_restart_with_a_drain() {
    let of = vs("10.96.0.20:80", TCP);
    let both = [ready("10.244.1.1"), ready("10.244.1.2")];
    for scheduler in [
        Scheduler::LeastConnection,
        Scheduler::SourceHash,
        Scheduler::MaglevHash,
    ] {
        for returns in [false, true] {
            let mut world = World::of([put("s", http("10.96.0.20")), part("s", "a", 8080, &both)]);
            connect_all(&mut world);
            world.settled([part("s", "a", 8080, &both[..1])]);
            world.config.scheduler = scheduler;
            if returns {
                world.apply(part("s", "a", 8080, &both));
            }
            world.restart();
            let ops = in_ipvs(&world.settle());
            let edit = format!("update virtual server 10.96.0.20:80/tcp, scheduler {scheduler}");
            assert_eq!(ops[0], edit);
            assert_eq!(ops.len(), if returns { 2 } else { 1 }, "{ops:?}");
            assert_eq!(world.draining(), usize::from(!returns));
            assert_eq!(world.servers(of).len(), 2);
            world.at_rest();
        }
    }
}

#[test]
fn row_14_readiness_flaps_around_the_deadline_of_a_drain() {
    let tick = Duration::from_millis(1);
    let of = vs("10.96.0.20:80", TCP);
    let up = part("s", "a", 8080, &[ready("10.244.1.1")]);
    let down = part("s", "a", 8080, &[unready("10.244.1.1")]);
    let set = |weight: &str| {
        [format!(
            "update real server 10.244.1.1:8080 of {of}, weight {weight}"
        )]
    };
    for (at, restart) in [LIMIT - tick, LIMIT, LIMIT + tick]
        .into_iter()
        .flat_map(|at| [(at, false), (at, true)])
    {
        let mut world = World::with(Config {
            drain_timeout: DrainTimeout::After(LIMIT),
            ..Config::default()
        });
        world.settled([put("s", http("10.96.0.20")), up.clone()]);
        connect_all(&mut world);
        for _ in 0..3 {
            assert_eq!(world.ipvs([down.clone()]), set("0"));
            world.now += at;
            // It is ready again before the process looks at the clock.
            world.apply(up.clone());
            if restart {
                world.restart();
            }
            assert_eq!(world.ipvs([]), set("1"));
            assert_eq!(world.later(LIMIT * 2), Vec::<String>::new());
        }
        // Each drain has its whole time.
        assert_eq!(world.ipvs([down.clone()]), set("0"));
        assert_eq!(world.later(LIMIT - tick), Vec::<String>::new());
        assert_eq!(
            world.later(tick),
            [format!("remove real server 10.244.1.1:8080 of {of}")]
        );
        assert_eq!(
            world.ipvs([up.clone()]),
            [format!("add real server 10.244.1.1:8080 of {of}, weight 1")]
        );
        world.at_rest();
    }
}

fn three() -> Vec<Change> {
    let mut changes = vec![node(&["192.168.10.11"])];
    for n in 1..=3 {
        let of = format!("s{n}");
        changes.push(put(&of, http(&format!("10.96.0.{n}"))));
        changes.push(part(
            &of,
            &of,
            8080,
            &[ready("10.244.1.5"), ready("10.244.1.6")],
        ));
    }
    changes
}

type Damage = (&'static str, usize, fn(&mut State));

/// Damage, and how many ops it takes to repair it.
const DAMAGE: [Damage; 10] = [
    ("extra virtual server", 1, |state| {
        let stranger = state[&Key::VirtualServer(vs("10.96.0.1:80", TCP))].clone();
        if let Value::VirtualServer(mut server) = stranger {
            std::sync::Arc::make_mut(&mut server).key = vs("10.96.0.3:9999", TCP);
            state.insert(Key::VirtualServer(server.key), Value::VirtualServer(server));
        }
    }),
    ("missing virtual server with two real servers", 3, |state| {
        let of = vs("10.96.0.3:80", TCP);
        state.retain(|key, _| match key {
            Key::VirtualServer(vs) | Key::RealServer(vs, _) => *vs != of,
            _ => true,
        });
    }),
    ("extra real server, which drains and goes", 2, |state| {
        let key = Key::RealServer(vs("10.96.0.1:80", TCP), rs("10.244.9.9:8080"));
        state.insert(key, Value::RealServer(1));
    }),
    ("missing real server", 1, |state| {
        state.remove(&Key::RealServer(
            vs("10.96.0.1:80", TCP),
            rs("10.244.1.5:8080"),
        ));
    }),
    ("wrong weight", 1, |state| {
        let key = Key::RealServer(vs("10.96.0.1:80", TCP), rs("10.244.1.6:8080"));
        state.insert(key, Value::RealServer(3));
    }),
    ("wrong flags", 1, |state| {
        let server = state.get_mut(&Key::VirtualServer(vs("10.96.0.2:80", TCP)));
        if let Some(Value::VirtualServer(server)) = server {
            std::sync::Arc::make_mut(server).persistence = Some(Persistence {
                timeout_s: 360,
                mask: PersistenceMask::Prefix(32),
            });
        }
    }),
    ("extra set entry", 1, |state| {
        state.insert(cluster_ip_entry("10.96.9.9"), Value::Present);
    }),
    ("missing set entry", 1, |state| {
        state.remove(&cluster_ip_entry("10.96.0.2"));
    }),
    ("missing address", 1, |state| {
        state.remove(&Key::Address(ip("10.96.0.1")));
    }),
    ("extra address", 1, |state| {
        state.insert(Key::Address(ip("10.96.9.8")), Value::Present);
    }),
];

fn cluster_ip_entry(address: &str) -> Key {
    let set = Set {
        family: Family::V4,
        role: Role::ClusterIp,
    };
    Key::Entry(set, Entry::IpPort(ip(address), TCP, 80))
}

#[test]
fn row_18_a_restart_repairs_damage_with_the_least_ops() {
    let all: Vec<Vec<&Damage>> = DAMAGE
        .iter()
        .map(|damage| vec![damage])
        .chain([DAMAGE.iter().collect()])
        .collect();
    for some in all {
        let mut world = World::of(three());
        // The damage exposes by itself, before anything is done.
        world.guarded = false;
        some.iter()
            .for_each(|(_, _, damage)| damage(&mut world.kernel.state));
        let what: Vec<&str> = some.iter().map(|(what, ..)| *what).collect();
        let before = world.kernel.log.len();
        world.restart();
        world.finish();
        let ops = world.kernel.log[before..].to_vec();
        assert_eq!(
            ops.len(),
            some.iter().map(|(_, ops, _)| ops).sum(),
            "{what:?}: {ops:#?}"
        );
        assert_eq!(world.failed, 0, "{what:?}");
        world.at_rest();
    }
}

/// Others' virtual servers: elsewhere, and on an address of the node.
fn foreign(state: &State) -> State {
    let mut foreign = State::new();
    for text in ["203.0.113.200:6443", "192.168.10.11:31999"] {
        let key = vs(text, TCP);
        let some = state
            .values()
            .find(|value| matches!(value, Value::VirtualServer(_)));
        if let Some(Value::VirtualServer(mut server)) = some.cloned() {
            std::sync::Arc::make_mut(&mut server).key = key;
            foreign.insert(Key::VirtualServer(key), Value::VirtualServer(server));
        }
        foreign.insert(
            Key::RealServer(key, rs("192.168.10.12:6443")),
            Value::RealServer(7),
        );
    }
    foreign
}

/// Some Services of every kind: the first `from` of them, up to `to`.
fn many(from: u8, to: u8) -> Vec<Change> {
    let mut changes = vec![node(&["192.168.10.11"])];
    for n in from..to {
        let of = format!("s{n}");
        let ports = [("http", TCP, 80), ("dns", UDP, 53)];
        let plain = service(&format!("10.96.0.{n}"), &ports[..1 + usize::from(n % 2)]);
        let service = match n % 4 {
            0 => node_ports(plain, &[30000 + u16::from(n)]),
            1 => external(plain, &["203.0.113.5"]),
            2 => balanced(plain, &[&format!("203.0.113.{n}")]),
            // On the node's own address: never bound.
            _ => external(plain, &["192.168.10.11"]),
        };
        changes.push(put(&of, service));
        let local = Endpoint {
            local: true,
            ..ready("10.244.1.5")
        };
        let both = [local, ready(&format!("10.244.2.{n}"))];
        changes.push(put_slice(
            &of,
            slice(&of, &[("http", TCP, 8080), ("dns", UDP, 53)], &both),
        ));
    }
    changes
}

/// A process that has taken over the kernel of another one, with the same objects.
fn again(first: &World, objects: &[Change]) -> World {
    let mut world = World::new();
    world.kernel = first.kernel.clone();
    world.apply_all(objects.iter().cloned());
    let read = world.read().unwrap();
    world.planner.resync(read, true, world.now);
    assert_eq!(world.settle(), []);
    world
}

/// After any op a process may end; the next one, with the same objects, goes on where it was:
/// nothing of ours looks as if it were another's, nothing that was right is written again, and
/// nothing of others' is touched.
fn crash_everywhere(before: &[Change], events: &[Change], about: std::ops::Range<usize>) {
    let mut first = World::of(before.iter().cloned());
    let foreign = foreign(&first.wanted());
    first.kernel.state.extend(foreign.clone());
    connect_all(&mut first);
    first.kernel.log.clear();
    let start = || again(&first, before);
    let mut world = start();
    let total = world.settled(events.iter().cloned()).len();
    assert!(about.contains(&total), "{total} ops");
    let mut whole = world.wanted();
    whole.extend(foreign.clone());
    for k in 0..=total {
        let mut world = start();
        // These ops were looked at above.
        world.guarded = false;
        world.apply_all(events.iter().cloned());
        let mut left = k;
        while left > 0 {
            let mut ops = world.planner.next(world.now);
            ops.truncate(left);
            assert!(!ops.is_empty());
            left -= ops.len();
            world.write(&ops);
        }
        world.crash();
        world.guarded = k % 16 == 0 || total < 60;
        let middle = world.kernel.state.clone();
        let read = world.read_agreed().unwrap();
        world.planner.resync(read, true, world.now);
        let ops = world.settle();
        for op in &ops {
            let key = op.key();
            assert!(!foreign.contains_key(&key), "crash after {k}: {op}");
            assert!(
                middle.get(&key) != whole.get(&key),
                "crash after {k}: {op} of what is right"
            );
        }
        let keys: BTreeSet<Key> = ops.iter().map(Op::key).collect();
        assert_eq!(keys.len(), ops.len(), "crash after {k}: each key once");
        assert_eq!(ops.len(), total - k, "crash after {k}: {ops:#?}");
        assert_eq!(world.failed, 0);
        world.finish();
        same(&world.kernel.state, &whole);
    }
}

#[test]
fn row_19_a_crash_after_every_op_of_a_small_change() {
    let before = many(1, 4);
    let mut events = many(4, 6);
    events.extend([gone("s1"), slice_gone("s1")]);
    crash_everywhere(&before, &events, 25..50);
}

#[test]
fn row_19_a_crash_after_every_op_of_a_large_change() {
    let before = many(1, 12);
    let mut events = many(12, 28);
    events.extend((1..8).map(|n| gone(&format!("s{n}"))));
    events.push(put_slice(
        "s9",
        slice(
            "s9",
            &[("http", TCP, 8080), ("dns", UDP, 53)],
            &[ready("10.244.2.9")],
        ),
    ));
    crash_everywhere(&before, &events, 180..300);
}

#[test]
fn row_19_a_crash_after_every_op_of_a_first_start() {
    crash_everywhere(&[], &many(1, 8), 60..160);
}

#[test]
fn row_19_a_crash_after_every_op_of_an_end() {
    let events: Vec<Change> = (1..8).map(|n| gone(&format!("s{n}"))).collect();
    crash_everywhere(&many(1, 8), &events, 40..120);
}

#[test]
fn row_21_tables_emptied_between_two_unrelated_events() {
    let is_server = |key: &Key| matches!(key, Key::VirtualServer(_) | Key::RealServer(..));
    let more = part(
        "s1",
        "s1",
        8080,
        &[
            ready("10.244.1.5"),
            ready("10.244.1.6"),
            ready("10.244.1.7"),
        ],
    );
    // `ipvsadm -C`: the next op, of whatever, finds its virtual server gone. All of them are
    // back at once, and the op that failed is tried again as soon as its virtual server is.
    let mut world = World::of(three());
    world.guarded = false;
    world.kernel.state.retain(|key, _| !is_server(key));
    world.settled([more.clone()]);
    assert_eq!(world.failed, 1);
    let missing = |world: &World| {
        let wanted = world.wanted();
        wanted
            .into_keys()
            .filter(|key| !world.kernel.state.contains_key(key))
            .collect::<Vec<_>>()
    };
    assert_eq!(missing(&world), []);
    world.at_rest();
    // Sets and rules: the event itself succeeds, and the audit finds them.
    let emptied: [fn(&Key) -> bool; 2] = [
        |key| matches!(key, Key::Entry(..)),
        |key| matches!(key, Key::Rules(..)),
    ];
    for emptied in emptied {
        let mut world = World::of(three());
        world.guarded = false;
        let lost = world.kernel.state.keys().filter(|key| emptied(key)).count();
        world.kernel.state.retain(|key, _| !emptied(key));
        assert_eq!(world.ipvs([more.clone()]).len(), 1);
        world.audit();
        assert_eq!(world.settle().len(), lost);
        assert_eq!(world.failed, 0);
        world.at_rest();
    }
}

#[test]
fn row_21_what_goes_while_the_kernel_is_read_comes_back_with_what_it_rests_on() {
    let three: Vec<Change> = many(1, 3);
    let grounds: [fn(&Key) -> Option<bool>; 3] = [
        |key| match key {
            Key::VirtualServer(_) => Some(true),
            Key::RealServer(..) => Some(false),
            _ => None,
        },
        |key| match key {
            Key::Link => Some(true),
            Key::Address(_) => Some(false),
            _ => None,
        },
        |key| match key {
            Key::Set(_) => Some(true),
            Key::Entry(..) => Some(false),
            _ => None,
        },
    ];
    for is_ground in grounds {
        let mut world = World::of(three.clone());
        world.guarded = false;
        let before = world.kernel.state.len();
        // The first reading meets the grounds before they go, and nothing on them after.
        world
            .kernel
            .state
            .retain(|key, _| is_ground(key) != Some(false));
        world.planner.begin_reading();
        let first = world.kernel.state.clone();
        let drift = world.planner.differing(&first.clone().into());
        world.kernel.state.retain(|key, _| is_ground(key).is_none());
        let lost = before - world.kernel.state.len();
        let second = world.kernel.state.clone();
        let drift = world.planner.differing_again(drift, &second.clone().into());
        world.planner.adopt(&drift, &second, world.now);
        let written = world.settle().len();
        assert_eq!(written, drift.len());
        // Empty sets showed no loss in the first reading.
        world.audit();
        assert_eq!(written + world.settle().len(), lost);
        assert_eq!(world.failed, 0);
        world.at_rest();
    }
}

#[test]
fn row_22_an_op_that_fails_holds_nobody_else_up() {
    let (before, events) = (many(1, 3), {
        let mut events = many(3, 7);
        events.extend([gone("s1"), part("s2", "s2", 8080, &[ready("10.244.2.77")])]);
        events
    });
    let first = World::of(before.clone());
    let mut world = again(&first, &before);
    let ops = world.settled(events.clone());
    let whole = world.wanted();
    // Whose a key is, or was: s1 is still there.
    let mut owners = Planner::new(Config::default());
    before
        .iter()
        .chain(&events[..events.len() - 2])
        .for_each(|c| owners.apply(c.clone()));
    owners.desired();
    for (nth, fault) in (0..ops.len()).flat_map(|nth| FAULTS.map(|fault| (nth, fault))) {
        let failing = ops[nth].key();
        let mut world = again(&first, &before);
        world.kernel.faults.at.insert(failing, fault);
        world.apply_all(events.clone());
        world.settle();
        for key in whole.keys() {
            let of = owners.owner(key);
            if of.is_some() && of != owners.owner(&failing) {
                assert_eq!(
                    world.kernel.state.get(key),
                    whole.get(key),
                    "{fault:?} at {failing} held {key} up"
                );
            }
        }
        // Not taken for done while it is not: it is tried again.
        world.kernel.faults.clear();
        world.at_rest();
    }
}

#[test]
fn row_22_what_is_refused_is_tried_again_ever_less_often() {
    let key = Key::VirtualServer(vs("10.96.0.1:80", TCP));
    for kind in [
        FailureKind::Busy,
        FailureKind::Refused,
        FailureKind::Drift,
        FailureKind::Unknown,
    ] {
        let mut world = World::new();
        world.kernel.faults.at.insert(key, Fault::Refused(kind));
        world.settled(three());
        let mut tries = Vec::new();
        let mut seen = 0;
        for second in 0..=300 {
            world.settle();
            let count = world.kernel.log.iter().filter(|op| op.key() == key).count();
            tries.extend((seen..count).map(|_| second));
            seen = count;
            world.now += SECOND;
        }
        assert_eq!(tries, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243], "{kind:?}");
        world.at_rest();
    }
}

#[test]
fn row_22_a_server_that_is_there_already_or_gone_already_is_not_an_error_for_ever() {
    let of = vs("10.96.0.1:80", TCP);
    let child = Key::RealServer(of, rs("10.244.1.7:8080"));
    let with = |last: &[&str]| {
        let endpoints: Vec<Endpoint> = last
            .iter()
            .map(|last| ready(&format!("10.244.1.{last}")))
            .collect();
        part("s1", "s1", 8080, &endpoints)
    };
    // EEXIST: somebody was faster, with another weight.
    let mut world = World::of(three());
    world.kernel.state.insert(child, Value::RealServer(5));
    world.settled([with(&["5", "6", "7"])]);
    world.later(SECOND);
    assert_eq!(world.failed, 1);
    assert_eq!(world.kernel.state[&child], Value::RealServer(1));
    world.at_rest();
    // ESRCH on an update: the real server is not there any more.
    let mut world = World::of(three());
    world
        .kernel
        .state
        .remove(&Key::RealServer(of, rs("10.244.1.6:8080")));
    world.settled([with(&["5"])]);
    world.later(SECOND);
    assert_eq!(world.failed, 1);
    assert_eq!(world.servers(of), ["10.244.1.5:8080 w1"]);
    world.at_rest();
    // ENOENT on a removal is success.
    let mut world = World::of(three());
    let entry = cluster_ip_entry("10.96.0.1");
    world.kernel.state.remove(&entry);
    world.settled([gone("s1")]);
    assert_eq!(world.failed, 0);
    world.at_rest();
}

#[test]
fn row_25_a_large_service_rolls_for_a_minute() {
    let endpoints = |part: u16, generation: u16| -> Vec<Endpoint> {
        (0..100)
            .map(|n| ready(&format!("10.{}.{part}.{n}", 100 + generation)))
            .collect()
    };
    let mut world = World::new();
    world.guarded = false;
    world.apply(put("s", http("10.96.0.20")));
    for p in 0..10 {
        world.apply(part("s", &format!("s-{p}"), 8080, &endpoints(p, 0)));
    }
    world.settle();
    let (readings, start) = (world.kernel.readings, world.kernel.log.len());
    for second in 0..60_u16 {
        world.now += SECOND;
        let p = second % 10;
        // Older addresses sort after newer ones as well as before them.
        let generation = if second / 10 % 2 == 0 {
            50 - second / 10
        } else {
            60 + second / 10
        };
        let ops = world.settled([part(
            "s",
            &format!("s-{p}"),
            8080,
            &endpoints(p, generation),
        )]);
        let last_add = ops.iter().rposition(|op| matches!(op, Op::Add(..)));
        let first_zero = ops
            .iter()
            .position(|op| matches!(op, Op::Update(_, Value::RealServer(0))));
        assert!(last_add < first_zero, "second {second}");
    }
    world.finish();
    // Each change of an endpoint adds one, sets one to 0 and removes it.
    let (ops, real) = (world.kernel.log.len() - start, 60 * 100 * 3);
    assert!(
        (real * 95 / 100..=real * 105 / 100).contains(&ops),
        "{ops} ops for {real} changes"
    );
    assert_eq!(world.kernel.readings, readings);
    assert_eq!(world.failed, 0);
    world.at_rest();
    let read = world.kernel.read(&world.wanted()).unwrap();
    same(&read.state, &world.wanted());
}
