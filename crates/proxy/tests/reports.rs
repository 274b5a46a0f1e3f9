//! Public bug reports around IPVS service proxies, turned into tests of the pure core: one module
//! for each section of the list, one test for each report, named after its id. Addresses are
//! those of documentation and private ranges.
//!
//! What is not here, and where it belongs:
//!
//! | report | where |
//! |---|---|
//! | A02 (a kept connection), A03 (a live session), A04 (50 packets a second), A06 (reused ports) | kernel |
//! | A07 (the listing shows a drain and its deadline) | daemon inspection |
//! | B07 (the reject of a VIP without endpoints) | rules, kernel (I02) |
//! | B11 (FQDN slices), B12 (ExternalName, headless), B13 (labels) | daemon translate; here: what they come down to |
//! | C04 (source kept, forwarded packets unmarked), C10 (link-local addresses) | kernel |
//! | C05 (health check node port, source ranges, local sets), D04 (Local with affinity) | waits for traffic policies |
//! | D02 (`expire_quiescent_template`), D05 (probing a scheduler) | kernel, daemon check |
//! | D07 (a scheduler for each Service) | waits for per-Service schedulers |
//! | E01 (restart under load), E05 (rules, sets, link flushed for real) | kernel |
//! | E02 (foreign virtual servers; here: excluded networks), E06, E07, E08, E11 | dataplane, kernel, cleanup |
//! | E04 (watch death, 410, the health of it) | daemon watch; here: what a re-list comes down to |
//! | F01 (answers to others), F03 (sockets), F05 (attributes in any order) | netlink, ipvs, kernel |
//! | F08 (latency samples at the first sync) | daemon metrics |
//! | G04 (names for swapping), G05, G06, G07, G09 | ipset, dataplane, kernel |

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test"
)]

mod world;

use std::time::{Duration, Instant};

use ipvs_netlink::{PersistenceMask, Scheduler, VirtualServerKey};
use ipvs_proxy_core::model::{Change, DrainTimeout, Endpoint, Service, Slice};
use ipvs_proxy_core::op::Op;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::planner::DrainStep;
use ipvs_proxy_core::state::{Key, Value};
use world::*;

const SECOND: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(60);
const NOTHING: [&str; 0] = [];

fn http(cluster_ip: &str) -> Service {
    service(cluster_ip, &[("http", TCP, 80)])
}

fn http_slice(of: &str, endpoints: &[Endpoint]) -> Slice {
    slice(of, &[("http", TCP, 8080)], endpoints)
}

/// `s` at 10.96.0.20:80 with these endpoints, all at port 8080, at rest.
fn web(endpoints: &[Endpoint]) -> World {
    World::of([
        put("s", http("10.96.0.20")),
        put_slice("s-1", http_slice("s", endpoints)),
    ])
}

fn endpoints(endpoints: &[Endpoint]) -> Change {
    put_slice("s-1", http_slice("s", endpoints))
}

fn web_vs() -> VirtualServerKey {
    vs("10.96.0.20:80", TCP)
}

fn limited() -> World {
    World::with(Config {
        drain_timeout: DrainTimeout::After(LIMIT),
        ..Config::default()
    })
}

fn words(ops: &[Op]) -> Vec<String> {
    ops.iter().map(ToString::to_string).collect()
}

/// Every order of some things.
fn orders<T: Clone>(things: &[T]) -> Vec<Vec<T>> {
    if things.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (i, first) in things.iter().enumerate() {
        let mut rest = things.to_vec();
        rest.remove(i);
        for mut order in orders(&rest) {
            order.insert(0, first.clone());
            all.push(order);
        }
    }
    all
}

/// Draining, weight 0, endpoint removal.
mod a {
    use super::*;

    #[test]
    fn a01_weight_zero_survives_a_restart() {
        let mut world = web(&[ready("10.244.1.5"), ready("10.244.2.5")]);
        let key = Key::RealServer(web_vs(), rs("10.244.1.5:8080"));
        world.kernel.state.insert(key, Value::RealServer(0));
        world.restart();
        assert_eq!(
            words(&world.settle()),
            ["update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 1"]
        );
        world.at_rest();
    }

    #[test]
    fn a01_weight_zero_of_an_endpoint_that_is_gone_is_adopted_as_a_drain() {
        for (connections, limit, ends) in [
            (0, DrainTimeout::Unlimited, SECOND * 3),
            (3, DrainTimeout::After(LIMIT), LIMIT),
        ] {
            let mut world = World::with(Config {
                drain_timeout: limit,
                ..Config::default()
            });
            world.settled([
                put("s", http("10.96.0.20")),
                endpoints(&[ready("10.244.2.5")]),
            ]);
            let key = Key::RealServer(web_vs(), rs("10.244.1.5:8080"));
            world.kernel.state.insert(key, Value::RealServer(0));
            world.connect(web_vs(), "10.244.1.5:8080", connections);
            world.restart();
            assert_eq!(words(&world.settle()), NOTHING);
            assert_eq!(world.draining(), 1);
            let ops = world.later(ends);
            assert_eq!(
                ops,
                ["remove real server 10.244.1.5:8080 of 10.96.0.20:80/tcp"]
            );
            assert_eq!(world.draining(), 0);
            world.at_rest();
        }
    }

    fn draining(world: &mut World) {
        world.settled([
            put("s", http("10.96.0.20")),
            endpoints(&[ready("10.244.1.5")]),
        ]);
        world.connect(web_vs(), "10.244.1.5:8080", 3);
        let ops = world.ipvs([endpoints(&[])]);
        assert_eq!(
            ops,
            ["update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 0"]
        );
    }

    #[test]
    fn a02_an_endpoint_that_returns_is_edited_and_its_reaper_cancelled() {
        let mut world = limited();
        draining(&mut world);
        let ops = world.ipvs([endpoints(&[ready("10.244.1.5")])]);
        assert_eq!(
            ops,
            ["update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 1"]
        );
        assert_eq!(world.draining(), 0);
        assert_eq!(world.later(LIMIT * 2), NOTHING);
        world.at_rest();
    }

    #[test]
    fn a02_a_reaper_that_has_decided_looks_again() {
        // By the deadline, and by the end of the last connection.
        for expired in [true, false] {
            let mut world = limited();
            draining(&mut world);
            if expired {
                world.now += LIMIT;
                let given = world.planner.next(world.now);
                assert!(matches!(given[..], [Op::Remove(_)]), "{given:?}");
            } else {
                world.kernel.connections.clear();
                world.now += SECOND * 3;
                world.look_at_drains();
            }
            let ops = world.ipvs([endpoints(&[ready("10.244.1.5")])]);
            assert_eq!(
                ops,
                ["update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 1"]
            );
            assert_eq!(world.later(LIMIT * 2), NOTHING);
            world.at_rest();
        }
    }

    #[test]
    fn a02_flaps_within_a_batch_are_one_op_at_most() {
        let flaps = |ends_ready: bool| {
            (0..5).flat_map(move |_| {
                let (up, down) = (
                    endpoints(&[ready("10.244.1.5")]),
                    endpoints(&[unready("10.244.1.5")]),
                );
                if ends_ready { [down, up] } else { [up, down] }
            })
        };
        let mut world = web(&[ready("10.244.1.5")]);
        world.connect(web_vs(), "10.244.1.5:8080", 1);
        assert_eq!(world.ipvs(flaps(true)), NOTHING);
        let ops = world.ipvs(flaps(false));
        assert_eq!(
            ops,
            ["update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 0"]
        );
        let ops = world.ipvs(flaps(true));
        assert_eq!(
            ops,
            ["update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 1"]
        );
        world.at_rest();
    }

    #[test]
    fn a03_tcp_and_sctp_drain_until_the_last_connection() {
        for protocol in [TCP, SCTP] {
            let vs = vs("10.96.0.20:80", protocol);
            let port = [("p", protocol, 80)];
            let mut world = World::of([
                put("s", service("10.96.0.20", &port)),
                put_slice(
                    "s-1",
                    slice("s", &port, &[ready("10.244.1.5"), ready("10.244.1.6")]),
                ),
            ]);
            world.connect(vs, "10.244.1.6:80", 1);
            world.settled([put_slice("s-1", slice("s", &port, &[ready("10.244.1.5")]))]);
            assert_eq!(world.servers(vs), ["10.244.1.5:80 w1", "10.244.1.6:80 w0"]);
            assert_eq!(world.later(SECOND * 3600), NOTHING);
            world.kernel.connections.clear();
            assert_eq!(
                world.later(SECOND * 3),
                [format!("remove real server 10.244.1.6:80 of {vs}")]
            );
            world.at_rest();
        }
    }

    #[test]
    fn a04_udp_is_not_drained() {
        let ports = [("t", TCP, 53), ("u", UDP, 53)];
        let mut world = World::of([
            put("dns", service("10.96.0.10", &ports)),
            put_slice(
                "dns-1",
                slice("dns", &ports, &[ready("10.244.1.5"), ready("10.244.2.5")]),
            ),
        ]);
        let (tcp, udp) = (vs("10.96.0.10:53", TCP), vs("10.96.0.10:53", UDP));
        world.connect(tcp, "10.244.1.5:53", 1);
        world.connect(udp, "10.244.1.5:53", 1);
        world.kernel.forgotten.clear();
        let ops = world.ipvs([put_slice(
            "dns-1",
            slice("dns", &ports, &[ready("10.244.2.5")]),
        )]);
        assert_eq!(
            ops,
            [
                "update real server 10.244.1.5:53 of 10.96.0.10:53/tcp, weight 0",
                "remove real server 10.244.1.5:53 of 10.96.0.10:53/udp",
            ]
        );
        // Its flows go with it, and only its flows.
        let stale = std::mem::take(&mut world.kernel.forgotten);
        assert_eq!(
            stale.into_iter().collect::<Vec<_>>(),
            [(udp, Some(rs("10.244.1.5:53")))]
        );
        world.at_rest();
    }

    #[test]
    fn a06_a_drain_that_starves_ends_at_its_deadline_once() {
        let mut world = limited();
        draining(&mut world);
        for _ in 0..19 {
            assert_eq!(world.later(SECOND * 3), NOTHING);
        }
        assert_eq!(world.later(SECOND * 2), NOTHING, "59 s");
        let removed = ["remove real server 10.244.1.5:8080 of 10.96.0.20:80/tcp"];
        assert_eq!(world.later(SECOND), removed, "60 s");
        assert_eq!(world.later(LIMIT * 2), NOTHING);
        world.at_rest();
    }

    #[test]
    fn a06_a_deadline_is_kept_over_a_restart_and_a_service_may_have_its_own() {
        let mut world = limited();
        draining(&mut world);
        world.later(SECOND * 40);
        let kept: Vec<_> = world
            .planner
            .drains()
            .1
            .filter_map(|(v, r, at)| Some((v, r, at?)))
            .collect();
        world.crash();
        world.planner.remember_drains(kept);
        let read = world.read_agreed().unwrap();
        world.planner.resync(read, true, world.now);
        assert_eq!(words(&world.settle()), NOTHING);
        assert_eq!(world.later(SECOND * 19), NOTHING, "59 s");
        assert_eq!(world.later(SECOND).len(), 1, "60 s");

        let mut world = limited();
        let own = Service {
            drain_timeout: Some(DrainTimeout::After(SECOND * 5)),
            ..http("10.96.0.20")
        };
        world.settled([put("s", own), endpoints(&[ready("10.244.1.5")])]);
        world.connect(web_vs(), "10.244.1.5:8080", 1);
        world.settled([endpoints(&[])]);
        assert_eq!(world.later(SECOND * 4), NOTHING);
        assert_eq!(world.later(SECOND).len(), 1);
    }

    #[test]
    fn a06_where_there_is_no_drain_a_real_server_goes_at_once() {
        let remove = ["remove real server 10.244.1.5:8080 of 10.96.0.20:80/tcp"];
        let own = |drain_timeout| Service {
            drain_timeout,
            ..http("10.96.0.20")
        };
        let now = || {
            World::with(Config {
                drain_timeout: DrainTimeout::Now,
                ..Config::default()
            })
        };
        for (mut world, of_service) in [
            (now(), None),
            (limited(), Some(DrainTimeout::Now)),
            (World::with(Config::default()), Some(DrainTimeout::Now)),
        ] {
            let both = [ready("10.244.1.5"), ready("10.244.2.5")];
            world.settled([put("s", own(of_service)), endpoints(&both)]);
            world.connect(web_vs(), "10.244.1.5:8080", 3);
            assert_eq!(world.ipvs([endpoints(&both[1..])]), remove);
            assert_eq!(world.draining(), 0);
            assert_eq!(news(&mut world), []);
            // One that an earlier process left draining goes as well.
            let key = Key::RealServer(web_vs(), rs("10.244.1.5:8080"));
            world.kernel.state.insert(key, Value::RealServer(0));
            world.restart();
            assert_eq!(words(&world.settle()), remove);
            world.at_rest();
        }
        // The Service's own word goes before.
        let mut world = now();
        world.settled([
            put("s", own(Some(DrainTimeout::Unlimited))),
            endpoints(&[ready("10.244.1.5")]),
        ]);
        world.connect(web_vs(), "10.244.1.5:8080", 3);
        world.settled([endpoints(&[])]);
        assert_eq!(world.draining(), 1);
        // A drain that goes on is over when the Service comes to want none, with the next change of it.
        world.settled([put("s", own(Some(DrainTimeout::Now)))]);
        world.settled([endpoints(&[ready("10.244.1.5")])]);
        assert_eq!(world.ipvs([endpoints(&[])]), remove);
    }

    /// What each pass of the loop asks and does beside so many drains with a deadline.
    fn passes_beside(drains: u16) -> Duration {
        let mut world = limited();
        let many: Vec<Endpoint> = (0..drains)
            .map(|n| ready(&format!("10.245.{}.{}", n / 250, n % 250 + 1)))
            .collect();
        world.settled([
            put("many", http("10.96.0.21")),
            put("s", http("10.96.0.20")),
            endpoints(&[ready("10.244.1.5")]),
            put_slice("many-1", http_slice("many", &many)),
        ]);
        for n in 0..drains {
            let address = format!("10.245.{}.{}:8080", n / 250, n % 250 + 1);
            world.connect(vs("10.96.0.21:80", TCP), &address, 1);
        }
        world.settled([put_slice("many-1", http_slice("many", &[]))]);
        assert_eq!(world.planner.draining(), usize::from(drains));
        let began = Instant::now();
        for _ in 0..1000 {
            assert!(world.planner.drains_due(world.now).is_empty());
            assert!(world.planner.next(world.now).is_empty());
            assert!(world.planner.next_deadline().is_some());
            world.planner.look_later(web_vs(), world.now);
        }
        began.elapsed()
    }

    #[test]
    fn a06_a_pass_costs_the_same_beside_many_drains() {
        let (few, many) = (passes_beside(10), passes_beside(6000));
        assert!(many < few * 20, "{few:?} beside 10, {many:?} beside 6000");
    }

    #[test]
    fn a06_a_deadline_of_before_a_restart_is_not_of_a_later_drain() {
        let mut world = limited();
        draining(&mut world);
        let (_, drains) = world.planner.drains();
        let kept: Vec<_> = drains.filter_map(|(v, r, at)| Some((v, r, at?))).collect();
        world.crash();
        world.planner.remember_drains(kept);
        // It came back while there was no daemon.
        world.apply(endpoints(&[ready("10.244.1.5")]));
        let read = world.read_agreed().unwrap();
        world.planner.resync(read, true, world.now);
        world.settle();
        world.later(LIMIT * 2);
        world.settled([endpoints(&[])]);
        assert_eq!(world.later(SECOND * 59), NOTHING, "59 s");
        assert_eq!(world.later(SECOND).len(), 1, "60 s");
    }

    /// The news of drains since the last call, without where.
    fn news(world: &mut World) -> Vec<DrainStep> {
        let news = world.planner.take_drain_news().into_iter();
        news.map(|news| {
            assert_eq!(news.service.as_ref(), Some(&name("s")));
            assert_eq!(news.virtual_server, web_vs());
            assert_eq!(news.real_server, rs("10.244.1.5:8080"));
            news.step
        })
        .collect()
    }

    #[test]
    fn a06_the_course_of_a_drain_is_told() {
        // It began, and was cut at its deadline with what it had then.
        let mut world = limited();
        draining(&mut world);
        let began = DrainStep::Began(Some(world.now + LIMIT));
        assert_eq!(news(&mut world), [began]);
        world.later(LIMIT - SECOND);
        world.connect(web_vs(), "10.244.1.5:8080", 7);
        assert_eq!(news(&mut world), []);
        world.later(SECOND);
        assert_eq!(news(&mut world), [DrainStep::Cut(7)]);

        // Its last connection went.
        let mut world = limited();
        draining(&mut world);
        world.kernel.connections.clear();
        world.later(SECOND * 3);
        assert_eq!(news(&mut world)[1..], [DrainStep::Emptied]);

        // Without a deadline; it came back.
        let mut world = web(&[ready("10.244.1.5")]);
        world.connect(web_vs(), "10.244.1.5:8080", 1);
        world.settled([endpoints(&[])]);
        world.settled([endpoints(&[ready("10.244.1.5")])]);
        assert_eq!(
            news(&mut world),
            [DrainStep::Began(None), DrainStep::Returned]
        );

        // Its Service went; somebody else took it away.
        let mut world = limited();
        draining(&mut world);
        world.settled([gone("s")]);
        assert_eq!(news(&mut world)[1..], [DrainStep::Gone]);
        let mut world = limited();
        draining(&mut world);
        let key = Key::RealServer(web_vs(), rs("10.244.1.5:8080"));
        world.kernel.state.remove(&key);
        world.later(SECOND * 3);
        assert_eq!(news(&mut world)[1..], [DrainStep::Gone]);
        world.later(LIMIT);
        assert_eq!(news(&mut world), []);
    }

    #[test]
    fn a07_a_dead_node_keeps_its_real_servers_until_the_deadline_only() {
        let mut world = limited();
        draining(&mut world);
        let (_, drains) = world.planner.drains();
        let drains: Vec<_> = drains.collect();
        let until = Some(world.now + LIMIT);
        assert_eq!(drains, [(web_vs(), rs("10.244.1.5:8080"), until)]);
        world.later(LIMIT);
        assert_eq!(world.servers(web_vs()), NOTHING);
        assert_eq!(world.draining(), 0);
    }

    #[test]
    fn a08_a_deleted_service_takes_its_drains_along() {
        for draining in 0..=2 {
            for order in ["service first", "slice first", "one batch"] {
                let all = [ready("10.244.1.5"), ready("10.244.1.6")];
                let mut world = web(&all);
                world.connect(web_vs(), "10.244.1.5:8080", 1);
                world.connect(web_vs(), "10.244.1.6:8080", 1);
                world.settled([endpoints(&all[draining..])]);
                assert_eq!(world.draining(), draining);
                let batches: Vec<Vec<Change>> = match order {
                    "service first" => vec![vec![gone("s")], vec![slice_gone("s-1")]],
                    "slice first" => vec![vec![slice_gone("s-1")], vec![gone("s")]],
                    _ => vec![vec![slice_gone("s-1"), gone("s")]],
                };
                for batch in batches {
                    world.settled(batch);
                }
                assert!(
                    !world.has(web_vs()) && !world.bound("10.96.0.20"),
                    "{order}"
                );
                assert_eq!(world.draining(), 0, "{order}");
                same(&world.kernel.state, &World::new().wanted());
                // Again there 10 ms later: old drains do not touch it.
                world.now += Duration::from_millis(10);
                world.settled([put("s", http("10.96.0.20")), endpoints(&all)]);
                assert_eq!(world.later(SECOND * 3600), NOTHING);
                assert_eq!(
                    world.servers(web_vs()),
                    ["10.244.1.5:8080 w1", "10.244.1.6:8080 w1"]
                );
                world.at_rest();
            }
        }
    }

    #[test]
    fn a09_a_drain_whose_real_server_is_gone_already_is_forgotten() {
        for with_server in [false, true] {
            let mut world = web(&[ready("10.244.1.5"), ready("10.244.1.6")]);
            world.connect(web_vs(), "10.244.1.5:8080", 1);
            world.settled([endpoints(&[ready("10.244.1.6")])]);
            assert_eq!(world.draining(), 1);
            world.guarded = !with_server;
            world.kernel.state.retain(|key, _| match key {
                Key::RealServer(_, server) => !with_server && *server != rs("10.244.1.5:8080"),
                Key::VirtualServer(_) => !with_server,
                _ => true,
            });
            world.later(SECOND * 3);
            assert_eq!(world.draining(), 0);
            assert_eq!(world.failed, 0);
            assert_eq!(world.later(LIMIT * 60), NOTHING);
            world.audit();
            world.at_rest();
            assert_eq!(world.failed, 0);
        }
    }

    #[test]
    fn a11_lost_transitions_change_nothing() {
        let news = [
            endpoints(&[ready("10.244.1.5"), ready("10.244.1.6")]),
            endpoints(&[terminating("10.244.1.5"), ready("10.244.1.6")]),
            endpoints(&[dead("10.244.1.5"), ready("10.244.1.6")]),
            endpoints(&[ready("10.244.1.6")]),
        ];
        for heard in 0..8 {
            let mut world = web(&[ready("10.244.1.5"), ready("10.244.1.6")]);
            world.connect(web_vs(), "10.244.1.5:8080", 1);
            let mut ops = Vec::new();
            for (i, news) in news.iter().enumerate() {
                if i == 3 || heard & (1 << i) != 0 {
                    ops.extend(world.ipvs([news.clone()]));
                }
            }
            assert_eq!(
                ops,
                ["update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 0"]
            );
            world.at_rest();
        }
    }

    #[test]
    fn a11_a_long_random_walk_ends_at_the_build_from_scratch() {
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % below
        };
        let mut world = World::new();
        world.guarded = false;
        for event in 0..10_000 {
            let s = next(20);
            let of = format!("s{s}");
            let change = match next(10) {
                0 => gone(&of),
                1 | 2 => put(&of, http(&format!("10.96.0.{s}"))),
                3 => slice_gone(&format!("{of}-{}", next(2))),
                _ => {
                    let kinds: [fn(&str) -> Endpoint; 4] = [ready, unready, terminating, dead];
                    let some: Vec<Endpoint> = (0..next(4))
                        .map(|_| {
                            kinds[usize::try_from(next(4)).unwrap()](&format!(
                                "10.244.1.{}",
                                next(8)
                            ))
                        })
                        .collect();
                    put_slice(&format!("{of}-{}", next(2)), http_slice(&of, &some))
                }
            };
            world.apply(change);
            if next(7) == 0 {
                world.settle();
            }
            if event % 500 == 0 {
                world.now += SECOND * 3;
            }
        }
        assert_eq!(world.failed, 0);
        world.at_rest();
    }
}

/// EndpointSlices: content and differences.
mod b {
    use super::*;

    fn part(slice: &str, endpoints: &[Endpoint]) -> Change {
        put_slice(slice, http_slice("s", endpoints))
    }

    fn two_slices() -> World {
        World::of([
            put("s", http("10.96.0.20")),
            part("a", &[ready("10.244.1.1"), ready("10.244.1.2")]),
            part("b", &[]),
        ])
    }

    #[test]
    fn b01_an_endpoint_that_moves_between_slices_within_a_batch_is_no_op() {
        let out = part("a", &[ready("10.244.1.1")]);
        let into = part("b", &[ready("10.244.1.2")]);
        assert_eq!(
            words(&two_slices().settled([out.clone(), into.clone()])),
            NOTHING
        );
        assert_eq!(
            words(&two_slices().settled([into.clone(), out.clone()])),
            NOTHING
        );
        // In first, and out much later: no op either.
        let mut world = two_slices();
        assert_eq!(words(&world.settled([into])), NOTHING);
        assert_eq!(words(&world.settled([out])), NOTHING);
        world.at_rest();
    }

    #[test]
    fn b01_an_endpoint_that_moves_beyond_the_batch_is_edited_twice() {
        let mut world = two_slices();
        world.connect(web_vs(), "10.244.1.2:8080", 1);
        let ops = world.ipvs([part("a", &[ready("10.244.1.1")])]);
        assert_eq!(
            ops,
            ["update real server 10.244.1.2:8080 of 10.96.0.20:80/tcp, weight 0"]
        );
        assert_eq!(world.later(SECOND * 30), NOTHING);
        let ops = world.ipvs([part("b", &[ready("10.244.1.2")])]);
        assert_eq!(
            ops,
            ["update real server 10.244.1.2:8080 of 10.96.0.20:80/tcp, weight 1"]
        );
        world.at_rest();
    }

    /// The report has the newer of two records win, and slices carry no time that could tell.
    /// Ours is a rule on the records alone, whatever their order and their slices' names: not
    /// terminating before terminating, then this node's, then ready before not ready.
    #[test]
    fn b01_of_two_records_of_one_endpoint_the_better_counts() {
        let better = [
            (ready("10.244.1.2"), unready("10.244.1.2")),
            (ready("10.244.1.2"), terminating("10.244.1.2")),
            (unready("10.244.1.2"), terminating("10.244.1.2")),
            (
                Endpoint {
                    local: true,
                    ..unready("10.244.1.2")
                },
                ready("10.244.1.2"),
            ),
            (terminating("10.244.1.2"), dead("10.244.1.2")),
        ];
        for (better, worse) in better {
            for (a, b) in [(better, worse), (worse, better)] {
                let mut world = World::of([
                    put("s", http("10.96.0.20")),
                    part("a", &[a]),
                    part("b", &[b]),
                ]);
                let expected: &[&str] = if better.ready || better.terminating && better.serving {
                    &["10.244.1.2:8080 w1"]
                } else {
                    &[]
                };
                assert_eq!(world.servers(web_vs()), expected, "{a:?} {b:?}");
                // Not in doubt once the worse one is gone.
                let worse_in = if a == worse { "a" } else { "b" };
                let ops = world.settled([part(worse_in, &[])]);
                assert_eq!(words(&ops), NOTHING, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn b01_a_slice_that_goes_after_its_members_were_copied_is_no_op() {
        let mut world = two_slices();
        let copies = [
            part("b", &[ready("10.244.1.2")]),
            part("c", &[ready("10.244.1.1")]),
        ];
        assert_eq!(words(&world.settled(copies)), NOTHING);
        assert_eq!(words(&world.settled([slice_gone("a")])), NOTHING);
        world.at_rest();
    }

    #[test]
    fn b02_a_ghost_with_the_same_address_does_not_count() {
        let (x, y) = (dead("10.244.1.9"), ready("10.244.1.9"));
        for (a, b) in [
            (vec![x, y], vec![]),
            (vec![y, x], vec![]),
            (vec![x], vec![y]),
            (vec![y], vec![x]),
        ] {
            let start = || World::of([put("s", http("10.96.0.20")), part("a", &a), part("b", &b)]);
            let without = |gone: Endpoint| {
                let left = |from: &[Endpoint]| {
                    from.iter()
                        .filter(|e| **e != gone)
                        .copied()
                        .collect::<Vec<_>>()
                };
                [part("a", &left(&a)), part("b", &left(&b))]
            };
            let mut world = start();
            assert_eq!(world.servers(web_vs()), ["10.244.1.9:8080 w1"]);
            assert_eq!(words(&world.settled(without(x))), NOTHING);
            let mut world = start();
            world.connect(web_vs(), "10.244.1.9:8080", 1);
            world.settled(without(y));
            assert_eq!(world.servers(web_vs()), ["10.244.1.9:8080 w0"]);
            assert_eq!(world.draining(), 1);
            world.at_rest();
        }
    }

    #[test]
    fn b04_a_changed_port_of_an_endpoint_replaces_it() {
        for protocol in [TCP, UDP] {
            let vs = vs("10.96.0.20:80", protocol);
            let at = |port| {
                put_slice(
                    "s-1",
                    slice("s", &[("p", protocol, port)], &[ready("10.244.1.5")]),
                )
            };
            let mut world = World::of([
                put("s", service("10.96.0.20", &[("p", protocol, 80)])),
                at(33550),
            ]);
            for port in [33550, 34276] {
                world.connect(vs, &format!("10.244.1.5:{port}"), 1);
            }
            world.settled([at(34276)]);
            world.settled([at(34484)]);
            let expected: &[&str] = if protocol == TCP {
                &[
                    "10.244.1.5:33550 w0",
                    "10.244.1.5:34276 w0",
                    "10.244.1.5:34484 w1",
                ]
            } else {
                &["10.244.1.5:34484 w1"]
            };
            assert_eq!(world.servers(vs), expected);
            world.at_rest();
            assert_eq!(world.servers(vs), ["10.244.1.5:34484 w1"]);
        }
    }

    #[test]
    fn b04_slices_with_the_old_and_the_new_port_serve_together() {
        let part = |slice_name: &str, port, endpoint| {
            put_slice(
                slice_name,
                slice("s", &[("http", TCP, port)], &[ready(endpoint)]),
            )
        };
        let mut world = World::of([
            put("s", http("10.96.0.20")),
            part("a", 8080, "10.244.1.1"),
            part("b", 8080, "10.244.1.2"),
        ]);
        world.settled([part("a", 9090, "10.244.1.1")]);
        world.later(SECOND * 3);
        assert_eq!(
            world.servers(web_vs()),
            ["10.244.1.1:9090 w1", "10.244.1.2:8080 w1"]
        );
        world.settled([part("b", 9090, "10.244.1.2")]);
        world.later(SECOND * 3);
        assert_eq!(
            world.servers(web_vs()),
            ["10.244.1.1:9090 w1", "10.244.1.2:9090 w1"]
        );
        world.at_rest();
    }

    #[test]
    fn b06_named_ports_may_lead_to_different_pods() {
        let world = World::of([
            put(
                "s",
                service(
                    "10.96.0.20",
                    &[("a", TCP, 80), ("b", TCP, 81), ("c", TCP, 82)],
                ),
            ),
            put_slice(
                "s-1",
                slice("s", &[("a", TCP, 3000)], &[ready("10.244.1.1")]),
            ),
            put_slice(
                "s-2",
                slice("s", &[("b", TCP, 3000)], &[ready("10.244.1.2")]),
            ),
        ]);
        assert_eq!(
            world.servers(vs("10.96.0.20:80", TCP)),
            ["10.244.1.1:3000 w1"]
        );
        assert_eq!(
            world.servers(vs("10.96.0.20:81", TCP)),
            ["10.244.1.2:3000 w1"]
        );
        assert!(world.has(vs("10.96.0.20:82", TCP)));
        assert_eq!(world.servers(vs("10.96.0.20:82", TCP)), NOTHING);
    }

    #[test]
    fn b07_the_last_endpoint_that_leaves_drains() {
        for last in [
            endpoints(&[]),
            slice_gone("s-1"),
            endpoints(&[unready("10.244.1.5")]),
        ] {
            let mut world = web(&[ready("10.244.1.5")]);
            world.connect(web_vs(), "10.244.1.5:8080", 1);
            let ops = words(&world.settled([last]));
            assert_eq!(
                ops,
                [
                    "update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 0",
                    "remove entry 10.96.0.20,tcp:80 of set KUBE-IPVS-SERVING",
                ]
            );
            world.at_rest();
            assert!(world.has(web_vs()));
            assert_eq!(world.servers(web_vs()), NOTHING);
        }
    }

    #[test]
    fn b09_a_service_without_endpoints_is_made_once() {
        let mut world = World::new();
        assert!(
            !world
                .settled([put("s", http("10.96.0.20")), endpoints(&[])])
                .is_empty()
        );
        for _ in 0..2 {
            let again = [put("s", http("10.96.0.20")), endpoints(&[])];
            assert_eq!(words(&world.settled(again)), NOTHING);
            world.audit();
            assert_eq!(words(&world.settle()), NOTHING);
        }
        world.at_rest();
    }

    #[test]
    fn b11_each_family_has_its_own_endpoints() {
        let both = Service {
            cluster_ips: vec![ip("10.96.0.20"), ip("fd00:96::20")],
            ..http("10.96.0.20")
        };
        let mut world = World::of([
            put("s", both),
            put_slice("s-4", http_slice("s", &[ready("10.244.1.5")])),
            put_slice("s-6", http_slice("s", &[ready("fd00:244::5")])),
        ]);
        let v6 = vs("[fd00:96::20]:80", TCP);
        assert_eq!(world.servers(web_vs()), ["10.244.1.5:8080 w1"]);
        assert_eq!(world.servers(v6), ["[fd00:244::5]:8080 w1"]);
        // The pod goes.
        let empty6 = Slice {
            endpoints: Vec::new(),
            ..http_slice("s", &[ready("fd00:244::5")])
        };
        world.settled([
            put_slice("s-4", http_slice("s", &[])),
            put_slice("s-6", empty6),
        ]);
        world.at_rest();
        assert_eq!(world.servers(web_vs()), NOTHING);
        assert_eq!(world.servers(v6), NOTHING);
    }

    /// ExternalName, headless and other proxies' Services come as none.
    #[test]
    fn b12_b13_a_service_that_is_not_ours_for_a_while_comes_back_with_its_endpoints() {
        let outside = external(http("10.96.0.20"), &["203.0.113.5"]);
        let mut world = World::of([put("s", outside.clone()), endpoints(&[ready("10.244.1.5")])]);
        let before = world.kernel.state.clone();
        for _ in 0..2 {
            world.settled([gone("s")]);
            same(&world.kernel.state, &World::new().wanted());
            // It changes meanwhile, and what is served later is what is then.
            world.settled([put("s", outside.clone())]);
            same(&world.kernel.state, &before);
        }
        world.settled([gone("s")]);
        world.settled([endpoints(&[ready("10.244.1.6")])]);
        world.settled([put("s", outside)]);
        assert_eq!(world.servers(web_vs()), ["10.244.1.6:8080 w1"]);
        world.at_rest();
    }

    /// A slice labelled headless comes as none.
    #[test]
    fn b13_a_slice_that_is_not_for_us_any_more_is_as_if_gone() {
        let mut world = web(&[ready("10.244.1.5")]);
        world.settled([slice_gone("s-1")]);
        world.at_rest();
        assert_eq!(world.servers(web_vs()), NOTHING);
        world.settled([endpoints(&[ready("10.244.1.5")])]);
        assert_eq!(world.servers(web_vs()), ["10.244.1.5:8080 w1"]);
    }

    #[test]
    fn b14_slices_may_come_before_their_service() {
        let mut world = World::new();
        world.settled([endpoints(&[ready("10.244.1.4")])]);
        world.settled([endpoints(&[ready("10.244.1.5")])]);
        assert_eq!(
            world.ipvs([put("s", http("10.96.0.20"))]),
            [
                "add virtual server 10.96.0.20:80/tcp, scheduler rr",
                "add real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 1",
            ]
        );
    }

    #[test]
    fn b14_a_slice_may_move_to_another_service() {
        let mut world = World::of([
            put("s", http("10.96.0.20")),
            put("t", http("10.96.0.21")),
            endpoints(&[ready("10.244.1.5")]),
        ]);
        world.settled([put_slice("s-1", http_slice("t", &[ready("10.244.1.5")]))]);
        world.at_rest();
        assert_eq!(world.servers(web_vs()), NOTHING);
        assert_eq!(
            world.servers(vs("10.96.0.21:80", TCP)),
            ["10.244.1.5:8080 w1"]
        );
    }

    #[test]
    fn b14_slices_that_outlive_their_service_serve_its_successor_where_ports_match() {
        let ports = [("http", TCP, 8080), ("old", TCP, 8081)];
        let mut world = World::of([
            put(
                "s",
                service("10.96.0.20", &[("http", TCP, 80), ("old", TCP, 81)]),
            ),
            put_slice("s-1", slice("s", &ports, &[ready("10.244.1.5")])),
        ]);
        world.settled([gone("s")]);
        same(&world.kernel.state, &World::new().wanted());
        world.settled([put(
            "s",
            service("10.96.0.20", &[("http", TCP, 88), ("new", TCP, 89)]),
        )]);
        assert_eq!(
            world.servers(vs("10.96.0.20:88", TCP)),
            ["10.244.1.5:8080 w1"]
        );
        assert_eq!(world.servers(vs("10.96.0.20:89", TCP)), NOTHING);
        world.at_rest();
    }
}

/// Who owns a VIP, conflicts, shared addresses.
mod c {
    use super::*;

    const VIP: &str = "203.0.113.5";

    fn on_address(ops: &[Op]) -> usize {
        ops.iter()
            .filter(|op| matches!(op.key(), Key::Address(a) if a == ip(VIP)))
            .count()
    }

    #[test]
    fn c01_an_address_stays_while_any_service_uses_it() {
        type Kind = fn(Service, &[&str]) -> Service;
        let kinds: [Kind; 2] = [external, balanced];
        for (first, second) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for second_has_endpoints in [true, false] {
                let one = kinds[first](service("10.96.0.1", &[("p", TCP, 80)]), &[VIP]);
                let two = kinds[second](service("10.96.0.2", &[("p", TCP, 443)]), &[VIP]);
                let some = [ready("10.244.1.5")];
                let mut world = World::of([
                    put("s1", one),
                    put("s2", two),
                    put_slice("s1", slice("s1", &[("p", TCP, 80)], &some)),
                    put_slice(
                        "s2",
                        slice(
                            "s2",
                            &[("p", TCP, 443)],
                            &some[usize::from(!second_has_endpoints)..],
                        ),
                    ),
                ]);
                let (vs80, vs443) = (vs("203.0.113.5:80", TCP), vs("203.0.113.5:443", TCP));
                let kept = world.servers(vs443);
                let ops = world.settled([gone("s1")]);
                assert_eq!(on_address(&ops), 0);
                assert!(
                    !ops.iter()
                        .any(|op| op.to_string().contains("203.0.113.5:443")),
                    "{ops:?}"
                );
                assert!(!world.has(vs80) && world.has(vs443) && world.bound(VIP));
                assert_eq!(world.servers(vs443), kept);
                let ops = world.settled([gone("s2")]);
                assert_eq!(on_address(&ops), 1);
                assert!(!world.bound(VIP));
                world.at_rest();
            }
        }
    }

    #[test]
    fn c01_an_address_stays_when_a_service_loses_one_port_of_two() {
        let ports = [("a", TCP, 80), ("b", TCP, 443)];
        let with = |n: usize| external(service("10.96.0.1", &ports[..n]), &[VIP]);
        let mut world = World::of([put("s", with(2))]);
        let ops = world.settled([put("s", with(1))]);
        assert_eq!(on_address(&ops), 0);
        assert!(world.has(vs("203.0.113.5:80", TCP)) && !world.has(vs("203.0.113.5:443", TCP)));
        assert!(world.bound(VIP) && world.bound("10.96.0.1"));
        world.at_rest();
    }

    #[test]
    fn c01_a_cluster_ip_may_be_the_external_ip_of_another() {
        let s1 = service("10.96.0.1", &[("p", TCP, 80)]);
        let s2 = external(service("10.96.0.2", &[("p", TCP, 443)]), &["10.96.0.1"]);
        let mut world = World::of([put("s1", s1), put("s2", s2)]);
        world.settled([gone("s1")]);
        assert!(world.bound("10.96.0.1") && world.has(vs("10.96.0.1:443", TCP)));
        assert!(!world.has(vs("10.96.0.1:80", TCP)));
        world.at_rest();
        world.settled([gone("s2")]);
        assert!(!world.bound("10.96.0.1"));
        world.at_rest();
    }

    /// `b` is older than `a`.
    fn rivals() -> [Change; 4] {
        let of = |cluster_ip, created| Service {
            created: Some(created),
            ..external(http(cluster_ip), &["203.0.113.7"])
        };
        [
            put("a", of("10.96.0.1", 200)),
            put("b", of("10.96.0.2", 100)),
            put_slice("a-1", http_slice("a", &[ready("10.244.1.1")])),
            put_slice("b-1", http_slice("b", &[ready("10.244.1.2")])),
        ]
    }

    #[test]
    fn c03_the_older_of_two_claims_wins_in_every_order() {
        let contested = vs("203.0.113.7:80", TCP);
        for order in orders(&rivals()) {
            let mut world = World::new();
            for change in order {
                world.settled([change]);
            }
            world.later(SECOND * 3);
            assert_eq!(world.servers(contested), ["10.244.1.2:8080 w1"]);
            world.restart();
            assert_eq!(words(&world.settle()), NOTHING);
            let conflicts = world.planner.take_conflicts();
            let told: Vec<_> = conflicts
                .iter()
                .map(|c| (&c.winner, &c.loser, c.key))
                .collect();
            assert_eq!(told, [(&name("b"), &name("a"), contested)]);
        }
    }

    #[test]
    fn c03_the_next_takes_over_when_the_winner_goes() {
        let contested = vs("203.0.113.7:80", TCP);
        let mut world = World::of(rivals());
        world.connect(contested, "10.244.1.2:8080", 1);
        let ops = world.ipvs([gone("b")]);
        let here: Vec<_> = ops.iter().filter(|op| op.contains("203.0.113.7")).collect();
        assert_eq!(
            here,
            [
                "add real server 10.244.1.1:8080 of 203.0.113.7:80/tcp, weight 1",
                "update real server 10.244.1.2:8080 of 203.0.113.7:80/tcp, weight 0",
            ]
        );
        assert!(world.bound("203.0.113.7"));
        let told = |world: &mut World| -> Vec<String> {
            let all = world.planner.take_takeovers();
            all.iter().map(ToString::to_string).collect()
        };
        assert_eq!(
            told(&mut world),
            ["Service ns/a: took 203.0.113.7:80/tcp over from Service ns/b"]
        );
        assert_eq!(told(&mut world), NOTHING);
        world.at_rest();
        assert_eq!(world.servers(contested), ["10.244.1.1:8080 w1"]);
        // Both go, the winner first: nobody took over.
        let mut world = World::of(rivals());
        world.settled([gone("b")]);
        world.settled([gone("a")]);
        assert_eq!(told(&mut world), NOTHING);
        // The winner stays, by another port.
        let mut world = World::of(rivals());
        let mut moved = external(http("10.96.0.2"), &["203.0.113.7"]);
        moved.created = Some(100);
        moved.ports[0].port = 81;
        world.settled([put("b", moved)]);
        assert_eq!(told(&mut world).len(), 1);
        // The loser goes: nothing at the contested server.
        let mut world = World::of(rivals());
        let ops = world.settled([gone("a")]);
        assert!(
            !ops.iter().any(|op| op.to_string().contains("203.0.113.7")),
            "{ops:?}"
        );
        assert_eq!(told(&mut world), NOTHING);
        world.at_rest();
    }

    #[test]
    fn c04_no_external_address_is_bound_before_the_nodes_are_known() {
        let links = |addresses: &[&str]| {
            Change::NodeAddresses(addresses.iter().map(|text| ip(text)).collect())
        };
        let vips = [
            "203.0.113.7",
            "203.0.113.8",
            "192.168.10.11",
            "192.168.10.12",
        ];
        let mut world = World::new();
        world.planner.await_node_addresses();
        // The Node object knows one of the node's addresses only.
        world.settled([
            node(&["192.168.10.11"]),
            put("e", external(http("10.96.0.20"), &[vips[0], vips[2]])),
            put("l", balanced(http("10.96.0.21"), &[vips[1], vips[3]])),
            put_slice("e-1", http_slice("e", &[ready("10.244.1.5")])),
            put_slice("l-1", http_slice("l", &[ready("10.244.1.6")])),
        ]);
        // A listing of nothing is one that failed.
        world.settled([links(&[])]);
        assert!(world.planner.awaits_node_addresses());
        assert!(world.bound("10.96.0.20") && world.bound("10.96.0.21"));
        for vip in vips {
            assert!(!world.bound(vip) && !world.has(vs(&format!("{vip}:80"), TCP)));
        }
        world.settled([links(&["192.168.10.11", "192.168.10.12"])]);
        assert!(!world.planner.awaits_node_addresses());
        for (vip, bound) in vips.into_iter().zip([true, true, false, false]) {
            assert_eq!(world.bound(vip), bound, "{vip}");
            assert!(world.has(vs(&format!("{vip}:80"), TCP)), "{vip}");
        }
        let ever = world.kernel.log.iter().map(ToString::to_string);
        let on_link: Vec<String> = ever
            .filter(|op| op.contains("add address 192.168"))
            .collect();
        assert_eq!(on_link, NOTHING);
    }

    #[test]
    fn c04_a_cluster_ip_port_may_equal_a_node_port() {
        let a = service("10.96.0.30", &[("p", TCP, 31000)]);
        let b = node_ports(service("10.96.0.31", &[("p", TCP, 80)]), &[31000]);
        let mut world = World::of([
            node(&["192.168.10.11"]),
            put("a", a),
            put("b", b),
            put_slice("a", slice("a", &[("p", TCP, 80)], &[ready("10.244.1.1")])),
            put_slice("b", slice("b", &[("p", TCP, 80)], &[ready("10.244.1.2")])),
        ]);
        assert_eq!(
            world.servers(vs("10.96.0.30:31000", TCP)),
            ["10.244.1.1:80 w1"]
        );
        assert_eq!(
            world.servers(vs("192.168.10.11:31000", TCP)),
            ["10.244.1.2:80 w1"]
        );
        assert!(!world.has(vs("10.96.0.31:31000", TCP)));
        world.settled([gone("b")]);
        assert_eq!(
            world.servers(vs("10.96.0.30:31000", TCP)),
            ["10.244.1.1:80 w1"]
        );
        assert!(!world.has(vs("192.168.10.11:31000", TCP)));
        world.at_rest();
    }

    #[test]
    fn c05_every_change_of_type_ends_at_the_build_from_scratch() {
        let cluster_ip = || service("10.96.0.20", &[("http", TCP, 80), ("dns", UDP, 53)]);
        let node_port = || node_ports(cluster_ip(), &[30080, 30053]);
        // LoadBalancer, NodePort, ClusterIP, ExternalName.
        let types = [
            put("s", balanced(node_port(), &[VIP])),
            put("s", node_port()),
            put("s", cluster_ip()),
            gone("s"),
        ];
        let ports = [("http", TCP, 8080), ("dns", UDP, 53)];
        for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
            let mut world = World::of([
                node(&["192.168.10.11", "192.168.10.99"]),
                put_slice("s-1", slice("s", &ports, &[ready("10.244.1.5")])),
                types[from].clone(),
            ]);
            same(&world.kernel.state, &world.wanted());
            world.settled([types[to].clone()]);
            same(&world.kernel.state, &world.wanted());
            world.at_rest();
            assert_eq!(world.bound(VIP), to == 0);
            assert_eq!(world.has(vs("192.168.10.99:30080", TCP)), to <= 1);
            assert_eq!(world.bound("10.96.0.20"), to <= 2);
        }
    }

    #[test]
    fn c05_a_load_balancers_address_may_change_and_go() {
        let with = |ips: &[&str]| put("s", balanced(http("10.96.0.20"), ips));
        for restart in [false, true] {
            let mut world = World::of([with(&[VIP]), endpoints(&[ready("10.244.1.5")])]);
            for ips in [&["203.0.113.6"][..], &[], &[VIP]] {
                world.apply(with(ips));
                if restart {
                    // It changed while no process ran.
                    world.restart();
                }
                world.settle();
                same(&world.kernel.state, &world.wanted());
                assert_eq!(world.bound(VIP), ips.contains(&VIP));
                assert_eq!(
                    world.has(vs("203.0.113.6:80", TCP)),
                    ips.contains(&"203.0.113.6")
                );
            }
            world.at_rest();
        }
    }

    #[test]
    fn c05_a_load_balancers_address_may_move_to_another_service() {
        let s1 = |ips: &[&str]| put("s1", balanced(http("10.96.0.1"), ips));
        let s2 = |ips: &[&str]| put("s2", balanced(http("10.96.0.2"), ips));
        for batch in [[s1(&[]), s2(&[VIP])], [s2(&[VIP]), s1(&[])]] {
            let mut world = World::of([
                s1(&[VIP]),
                s2(&[]),
                put_slice("s1", http_slice("s1", &[ready("10.244.1.1")])),
                put_slice("s2", http_slice("s2", &[ready("10.244.1.2")])),
            ]);
            let ops = words(&world.settled(batch));
            assert_eq!(
                ops,
                [
                    "add real server 10.244.1.2:8080 of 203.0.113.5:80/tcp, weight 1",
                    "update real server 10.244.1.1:8080 of 203.0.113.5:80/tcp, weight 0",
                ]
            );
            world.at_rest();
        }
    }

    /// A slice's ports join a Service's by name, so there is a time without endpoints for new
    /// connections until the slices follow. Nothing that is connected is cut.
    #[test]
    fn c07_a_renamed_port_keeps_its_server_and_its_connections() {
        let mut world = web(&[ready("10.244.1.5")]);
        world.connect(web_vs(), "10.244.1.5:8080", 1);
        let ops = words(&world.settled([put("s", service("10.96.0.20", &[("web", TCP, 80)]))]));
        assert_eq!(
            ops,
            [
                "update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 0",
                "remove entry 10.96.0.20,tcp:80 of set KUBE-IPVS-SERVING",
            ]
        );
        assert_eq!(world.later(SECOND * 5), NOTHING);
        let follows = slice("s", &[("web", TCP, 8080)], &[ready("10.244.1.5")]);
        let ops = words(&world.settled([put_slice("s-1", follows)]));
        assert_eq!(
            ops,
            [
                "update real server 10.244.1.5:8080 of 10.96.0.20:80/tcp, weight 1",
                "add entry 10.96.0.20,tcp:80 of set KUBE-IPVS-SERVING",
            ]
        );
        world.at_rest();
    }

    #[test]
    fn c07_a_new_owner_of_the_same_server_edits_it() {
        for reversed in [false, true] {
            let mut batch = vec![
                gone("a"),
                put("b", http("10.96.0.40")),
                put_slice("b-1", http_slice("b", &[ready("10.244.1.2")])),
            ];
            if reversed {
                batch.reverse();
            }
            let mut world = World::of([
                put("a", http("10.96.0.40")),
                put_slice("a-1", http_slice("a", &[ready("10.244.1.1")])),
            ]);
            let ops = words(&world.settled(batch));
            assert_eq!(
                ops,
                [
                    "add real server 10.244.1.2:8080 of 10.96.0.40:80/tcp, weight 1",
                    "update real server 10.244.1.1:8080 of 10.96.0.40:80/tcp, weight 0",
                ]
            );
            world.at_rest();
        }
    }

    #[test]
    fn c07_ports_may_be_swapped_in_one_update() {
        let of = |p, q| {
            let ports = service("10.96.0.40", &[("p", TCP, p), ("q", TCP, q)]);
            put("s", node_ports(ports, &[30000 + p, 30000 + q]))
        };
        let ports = [("p", TCP, 8080), ("q", TCP, 9090)];
        let mut world = World::of([
            node(&["192.168.10.11"]),
            of(80, 81),
            put_slice("s-1", slice("s", &ports, &[ready("10.244.1.5")])),
        ]);
        let ops = world.ipvs([of(81, 80)]);
        assert!(
            !ops.iter().any(|op| op.contains("virtual server")),
            "{ops:?}"
        );
        world.later(SECOND * 3);
        for address in ["10.96.0.40:", "192.168.10.11:300"] {
            let at = |port| world.servers(vs(&format!("{address}{port}"), TCP));
            assert_eq!(at(80), ["10.244.1.5:9090 w1"]);
            assert_eq!(at(81), ["10.244.1.5:8080 w1"]);
        }
        world.at_rest();
    }

    #[test]
    fn c07_a_node_port_may_be_handed_on() {
        let of = |name: &str, cluster_ip, number: Option<u16>| {
            put(name, node_ports(http(cluster_ip), number.as_slice()))
        };
        let after = [
            of("a", "10.96.0.1", None),
            of("b", "10.96.0.2", Some(30001)),
        ];
        for batch in orders(&after) {
            let mut world = World::of([
                node(&["192.168.10.11"]),
                of("a", "10.96.0.1", Some(30001)),
                of("b", "10.96.0.2", None),
                put_slice("a-1", http_slice("a", &[ready("10.244.1.1")])),
                put_slice("b-1", http_slice("b", &[ready("10.244.1.2")])),
            ]);
            let ops = words(&world.settled(batch));
            assert_eq!(
                ops,
                [
                    "add real server 10.244.1.2:8080 of 192.168.10.11:30001/tcp, weight 1",
                    "update real server 10.244.1.1:8080 of 192.168.10.11:30001/tcp, weight 0",
                ]
            );
            world.at_rest();
        }
    }

    #[test]
    fn c08_protocols_of_one_port_number_are_apart() {
        let ports = [("t", TCP, 53), ("u", UDP, 53), ("s", SCTP, 53)];
        let with = |ports| put("dns", service("10.96.0.10", ports));
        let mut world = World::of([
            with(&ports),
            put_slice("dns-1", slice("dns", &ports, &[ready("10.244.1.5")])),
        ]);
        for protocol in [TCP, UDP, SCTP] {
            assert_eq!(
                world.servers(vs("10.96.0.10:53", protocol)),
                ["10.244.1.5:53 w1"]
            );
        }
        let ops = world.ipvs([with(&[ports[0], ports[2]])]);
        assert_eq!(ops, ["remove virtual server 10.96.0.10:53/udp"]);
        assert!(world.bound("10.96.0.10"));
        world.at_rest();
    }

    #[test]
    fn c08_a_port_may_change_its_protocol() {
        let with = |protocol| {
            [
                put("s", service("10.96.0.10", &[("p", protocol, 53)])),
                put_slice(
                    "s-1",
                    slice("s", &[("p", protocol, 53)], &[ready("10.244.1.5")]),
                ),
            ]
        };
        let mut world = World::of(with(TCP));
        world.connect(vs("10.96.0.10:53", TCP), "10.244.1.5:53", 1);
        world.settled([put_slice("s-1", slice("s", &[("p", TCP, 53)], &[]))]);
        assert_eq!(world.draining(), 1);
        world.settled(with(UDP));
        assert_eq!(world.draining(), 0);
        same(&world.kernel.state, &world.wanted());
        assert!(!world.has(vs("10.96.0.10:53", TCP)));
        assert_eq!(
            world.servers(vs("10.96.0.10:53", UDP)),
            ["10.244.1.5:53 w1"]
        );
        let entries = world
            .kernel
            .state
            .keys()
            .filter(|key| matches!(key, Key::Entry(..)));
        let entries: Vec<_> = entries.map(ToString::to_string).collect();
        assert!(
            !entries.iter().any(|entry| entry.contains("tcp")),
            "{entries:?}"
        );
        world.at_rest();
    }
}

/// Affinity and schedulers.
mod d {
    use super::*;

    #[test]
    fn d01_affinity_is_edited_on_every_virtual_server() {
        let with = |timeout_s| {
            let outside = balanced(
                external(http("10.96.0.20"), &["203.0.113.5"]),
                &["203.0.113.6"],
            );
            let both = Service {
                cluster_ips: vec![ip("10.96.0.20"), ip("fd00:96::20")],
                ..node_ports(outside, &[30001])
            };
            put("s", sticky(both, timeout_s))
        };
        let mut world = World::of([
            node(&["192.168.10.11", "192.168.10.99", "2001:db8::11"]),
            with(None),
            put_slice("s-4", http_slice("s", &[ready("10.244.1.5")])),
            put_slice("s-6", http_slice("s", &[ready("fd00:244::5")])),
        ]);
        let servers: Vec<_> = world
            .kernel
            .state
            .keys()
            .filter(|k| matches!(k, Key::VirtualServer(_)))
            .collect();
        // Cluster, external, load balancer, two nodes; cluster and node.
        assert_eq!(servers.len(), 7);
        for timeout_s in [Some(10800), Some(60), None] {
            let ops = world.settled([with(timeout_s)]);
            assert_eq!(ops.len(), 7, "{ops:?}");
            for op in &ops {
                let Op::Update(Key::VirtualServer(key), Value::VirtualServer(server)) = op else {
                    panic!("{op:?}");
                };
                let persistence = server.persistence.map(|p| (p.timeout_s, p.mask));
                let prefix = if key.to_string().starts_with('[') {
                    128
                } else {
                    32
                };
                let mask = PersistenceMask::Prefix(prefix);
                assert_eq!(persistence, timeout_s.map(|timeout_s| (timeout_s, mask)));
            }
            assert_eq!(words(&world.settle()), NOTHING);
        }
        world.at_rest();
    }

    #[test]
    fn d05_another_scheduler_is_an_edit_of_what_is_there() {
        let mut world = World::new();
        for n in 1..=3 {
            let of = format!("s{n}");
            world.apply(put(&of, http(&format!("10.96.0.{n}"))));
            world.apply(put_slice(&of, http_slice(&of, &[ready("10.244.1.5")])));
        }
        world.settle();
        world.config.scheduler = Scheduler::LeastConnection;
        world.restart();
        assert_eq!(
            words(&world.settle()),
            [
                "update virtual server 10.96.0.1:80/tcp, scheduler lc",
                "update virtual server 10.96.0.2:80/tcp, scheduler lc",
                "update virtual server 10.96.0.3:80/tcp, scheduler lc",
            ]
        );
        world.at_rest();
    }
}

/// Start, restart, re-list, others' changes.
mod e {
    use ipset_rs::Entry;
    use ipvs_proxy_core::planner::Planner;
    use ipvs_proxy_core::state::{Role, Set};
    use ipvs_proxy_netlink::Family;

    use super::*;

    /// What an excluded network has and no Service has stays, real servers and all; a Service in
    /// there is served as any other, and leaves its virtual server behind.
    #[test]
    fn e02_excluded_networks() {
        let (inside, beside) = (vs("203.0.113.7:80", TCP), vs("203.0.113.200:80", TCP));
        let slice = |of| http_slice(of, &[ready("10.244.1.5"), ready("10.244.1.6")]);
        let before = World::of([
            put("a", http("203.0.113.7")),
            put_slice("a-1", slice("a")),
            put("b", http("203.0.113.200")),
            put_slice("b-1", slice("b")),
        ]);
        let mut world = World::with(Config {
            exclude_cidrs: vec!["203.0.113.0/25".parse().unwrap()],
            ..Config::default()
        });
        world.kernel = before.kernel;
        world.restart();
        world.settle();
        let left = ["10.244.1.5:8080 w1", "10.244.1.6:8080 w1"];
        assert_eq!(
            (world.servers(inside), world.has(beside)),
            (left.map(str::to_owned).into(), false)
        );
        assert!(!world.bound("203.0.113.7"));

        world.settled([
            put("c", http("203.0.113.7")),
            put_slice("c-1", http_slice("c", &[ready("10.244.1.5")])),
        ]);
        assert!(world.bound("203.0.113.7"));
        world.later(Duration::from_secs(4));
        assert_eq!(world.servers(inside), ["10.244.1.5:8080 w1"]);
        assert_eq!(world.ipvs([gone("c"), slice_gone("c-1")]), NOTHING);
        assert!(world.has(inside) && !world.bound("203.0.113.7"));

        // At rest: nothing to write for an audit, a reading, a new process.
        world.audit();
        assert_eq!(world.settle(), []);
        world.restart();
        assert_eq!(world.settle(), []);
    }

    fn three() -> World {
        let mut world = World::new();
        for n in 1..=3 {
            let of = format!("s{n}");
            world.apply(put(&of, http(&format!("10.96.0.{n}"))));
            world.apply(put_slice(
                &of,
                http_slice(&of, &[ready("10.244.1.5"), ready("10.244.1.6")]),
            ));
        }
        world.settle();
        world
    }

    #[test]
    fn e01_nothing_is_written_before_the_lists_are_whole() {
        let mut world = three();
        let objects = world.objects.list();
        world.planner = Planner::new(world.config.clone());
        let read = world.read().unwrap();
        world.planner.resync(read, false, world.now);
        // The API server can't be reached for five minutes.
        for _ in 0..5 {
            world.now += SECOND * 60;
            assert_eq!(words(&world.settle()), NOTHING);
        }
        // Services have come, and no slice.
        for change in objects.iter().filter(|c| matches!(c, Change::Service(..))) {
            world.planner.apply(change.clone());
            assert_eq!(words(&world.settle()), NOTHING);
        }
        assert_eq!(world.draining(), 0);
        for change in objects.iter().filter(|c| matches!(c, Change::Slice(..))) {
            world.planner.apply(change.clone());
            assert_eq!(words(&world.settle()), NOTHING);
        }
        let read = world.read().unwrap();
        world.planner.resync(read, true, world.now);
        assert_eq!(words(&world.settle()), NOTHING);
        world.at_rest();
    }

    #[test]
    fn e01_a_slice_that_comes_first_after_a_restart_takes_no_other_away() {
        let mut world = three();
        world.settled([put_slice("s1-b", http_slice("s1", &[ready("10.244.1.7")]))]);
        world.connect(vs("10.96.0.1:80", TCP), "10.244.1.7:8080", 1);
        let objects = world.objects.list();
        for reversed in [false, true] {
            world.planner = Planner::new(world.config.clone());
            let read = world.read().unwrap();
            world.planner.resync(read, false, world.now);
            let mut objects = objects.clone();
            if reversed {
                objects.reverse();
            }
            for change in objects {
                world.planner.apply(change);
                assert_eq!(words(&world.settle()), NOTHING);
            }
            let read = world.read().unwrap();
            world.planner.resync(read, true, world.now);
            assert_eq!(words(&world.settle()), NOTHING);
        }
    }

    #[test]
    fn e01_the_api_servers_own_service_comes_first() {
        let mut world = World::new();
        for n in 1..=50 {
            world.apply(put(&format!("a{n}"), http(&format!("10.96.0.{}", n + 100))));
        }
        world.apply(Change::Service(
            ipvs_proxy_core::model::ObjectName::new("default", "kubernetes"),
            Some(service("10.96.0.1", &[("https", TCP, 443)])),
        ));
        let ops = world.settle();
        let servers: Vec<_> = ops
            .iter()
            .filter(|op| matches!(op.key(), Key::VirtualServer(_) | Key::Address(_)))
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            servers[..2],
            [
                "add virtual server 10.96.0.1:443/tcp, scheduler rr",
                "add address 10.96.0.1 on kube-ipvs0",
            ]
        );
        // Rules and sets are before all.
        let rules = ops
            .iter()
            .rposition(|op| matches!(op.key(), Key::Rules(..) | Key::Set(_)))
            .unwrap();
        let first = ops
            .iter()
            .position(|op| matches!(op.key(), Key::VirtualServer(_)))
            .unwrap();
        assert!(rules < first);
        world.at_rest();
    }

    #[test]
    fn e04_what_a_new_list_lacks_goes_and_nothing_else() {
        for restart in [false, true] {
            let mut world = three();
            world.apply_all([gone("s3"), slice_gone("s3"), slice_gone("s2")]);
            world.connect(vs("10.96.0.2:80", TCP), "10.244.1.5:8080", 1);
            world.connect(vs("10.96.0.2:80", TCP), "10.244.1.6:8080", 1);
            if restart {
                world.restart();
            }
            let mut ops = in_ipvs(&world.settle());
            ops.sort();
            assert_eq!(
                ops,
                [
                    "remove virtual server 10.96.0.3:80/tcp",
                    "update real server 10.244.1.5:8080 of 10.96.0.2:80/tcp, weight 0",
                    "update real server 10.244.1.6:8080 of 10.96.0.2:80/tcp, weight 0",
                ]
            );
            assert!(!world.bound("10.96.0.3") && world.bound("10.96.0.2"));
            world.at_rest();
        }
    }

    #[test]
    fn e04_a_service_made_anew_under_its_name_has_its_new_address_only() {
        for restart in [false, true] {
            let mut world = three();
            world.apply(put(
                "s1",
                Service {
                    uid: "two".into(),
                    ..http("10.96.0.77")
                },
            ));
            if restart {
                world.restart();
            }
            world.settle();
            same(&world.kernel.state, &world.wanted());
            assert!(world.bound("10.96.0.77") && !world.bound("10.96.0.1"));
            world.at_rest();
        }
    }

    /// Whatever somebody else takes away, changes or adds is put right with the ops that it
    /// takes and no more, while no object changes.
    #[test]
    fn e05_what_others_change_is_repaired() {
        let world = three();
        let whole = world.kernel.state.clone();
        let damaged = |damage: &dyn Fn(&mut World)| {
            let mut world = three();
            world.guarded = false;
            damage(&mut world);
            world.audit();
            let ops = world.settle();
            same(&world.kernel.state, &whole);
            assert_eq!(world.failed, 0);
            ops
        };
        for key in whole.keys() {
            let under = |k: &Key| match (key, k) {
                (Key::VirtualServer(vs), Key::RealServer(of, _)) => of == vs,
                (Key::Set(set), Key::Entry(of, _)) => of == set,
                (Key::Link, Key::Address(_)) => true,
                _ => k == key,
            };
            let lost = whole.keys().filter(|k| *k == key || under(k)).count();
            let ops = damaged(&|world| world.kernel.state.retain(|k, _| k != key && !under(k)));
            assert_eq!(ops.len(), lost, "{key} taken away: {ops:?}");
        }
        let (vs1, rs1) = (vs("10.96.0.1:80", TCP), rs("10.244.1.5:8080"));
        let ops = damaged(&|world| {
            world
                .kernel
                .state
                .insert(Key::RealServer(vs1, rs1), Value::RealServer(3));
        });
        assert_eq!(
            words(&ops),
            ["update real server 10.244.1.5:8080 of 10.96.0.1:80/tcp, weight 1"]
        );
        let ops = damaged(&|world| {
            if let Some(Value::VirtualServer(server)) =
                world.kernel.state.get_mut(&Key::VirtualServer(vs1))
            {
                std::sync::Arc::make_mut(server).scheduler = Scheduler::SourceHash;
            }
        });
        assert_eq!(
            words(&ops),
            ["update virtual server 10.96.0.1:80/tcp, scheduler rr"]
        );
        let extra = [
            Key::Entry(
                Set {
                    family: Family::V4,
                    role: Role::ClusterIp,
                },
                Entry::IpPort(ip("10.96.9.9"), TCP, 80),
            ),
            Key::Address(ip("10.96.9.9")),
        ];
        for key in extra {
            let ops = damaged(&|world| drop(world.kernel.state.insert(key, Value::Present)));
            assert_eq!(ops, [Op::Remove(key)]);
        }
        // All servers at once (`ipvsadm -C`).
        let is_server = |key: &Key| matches!(key, Key::VirtualServer(_) | Key::RealServer(..));
        let ops = damaged(&|world| world.kernel.state.retain(|key, _| !is_server(key)));
        assert_eq!(ops.len(), whole.keys().filter(|key| is_server(key)).count());
    }

    #[test]
    fn e05_a_real_server_that_somebody_else_added_goes() {
        let mut world = three();
        let key = Key::RealServer(vs("10.96.0.1:80", TCP), rs("10.244.9.9:8080"));
        world.kernel.state.insert(key, Value::RealServer(1));
        world.audit();
        assert_eq!(
            words(&world.settle()),
            ["update real server 10.244.9.9:8080 of 10.96.0.1:80/tcp, weight 0"]
        );
        world.at_rest();
    }
}

/// Readings, lost answers, scale.
mod f {
    use ipvs_proxy_core::memory::faults::{BadReading, Fault};

    use super::*;

    /// What a socket that two use does to its users: answers are lost, or come to who did not ask.
    /// (One thread owns each of our sockets, and the socket drops answers that it did not wait for.)
    #[test]
    fn f01_whatever_answers_are_lost_the_next_ops_are_right() {
        for first in 0..20 {
            for apart in [1, 2, 5] {
                let mut world = web(&[ready("10.244.1.5"), ready("10.244.1.6")]);
                world.settled([put("t", http("10.96.0.21")), put("u", http("10.96.0.22"))]);
                world.connect(web_vs(), "10.244.1.5:8080", 1);
                for (nth, fault) in [
                    (first, Fault::LostAnswer),
                    (first + apart, Fault::LostRequest),
                    (first + apart * 2, Fault::LostAnswer),
                ] {
                    world.kernel.faults.strike(nth, fault);
                }
                // Mixed: one to edit, one to add, some to take away, some to make.
                let events = [
                    endpoints(&[ready("10.244.1.6"), ready("10.244.1.7")]),
                    gone("t"),
                    put("v", http("10.96.0.23")),
                    put("u", sticky(http("10.96.0.22"), Some(60))),
                ];
                world.settled(events);
                let again: Vec<Op> = (0..5)
                    .flat_map(|_| {
                        world.now += SECOND;
                        world.settle()
                    })
                    .collect();
                assert!(again.len() <= 6, "no more than was lost: {again:?}");
                assert_eq!(world.planner.next(world.now), []);
                assert_eq!(
                    world.servers(web_vs()),
                    [
                        "10.244.1.5:8080 w0",
                        "10.244.1.6:8080 w1",
                        "10.244.1.7:8080 w1"
                    ]
                );
                world.at_rest();
            }
        }
    }

    #[test]
    fn f02_an_interrupted_listing_is_not_used() {
        for interrupted in 1..=5 {
            let mut world = web(&[ready("10.244.1.5")]);
            world.settled([put("t", http("10.96.0.21"))]);
            world.apply(gone("t"));
            world.crash();
            world.kernel.faults.readings = vec![BadReading::Interrupted; interrupted].into();
            // Both readings that must agree may be hit.
            let (read, failed) = (0..6).fold((None, 0_usize), |(read, failed), _| match read {
                Some(read) => (Some(read), failed),
                None => match world.read_agreed() {
                    Ok(read) => (Some(read), failed),
                    Err(_) => (None, failed + 1),
                },
            });
            assert_eq!(failed, interrupted);
            world.planner.resync(read.unwrap(), true, world.now);
            assert_eq!(world.ipvs([]), ["remove virtual server 10.96.0.21:80/tcp"]);
            world.at_rest();
        }
    }

    #[test]
    fn f02_no_node_address_at_all_removes_no_node_port() {
        let mut world = World::of([
            node(&["192.168.10.11"]),
            put("s", node_ports(http("10.96.0.20"), &[30001])),
            endpoints(&[ready("10.244.1.5")]),
        ]);
        for nothing in [
            node(&[]),
            Change::NodeAddresses(std::collections::BTreeSet::new()),
        ] {
            world.planner.apply(nothing);
            assert_eq!(words(&world.settle()), NOTHING);
        }
        assert!(world.has(vs("192.168.10.11:30001", TCP)));
    }

    #[test]
    fn f03_a_lost_answer_is_a_reading_and_no_op_is_done_twice() {
        let objects = [
            put("s", http("10.96.0.20")),
            endpoints(&[ready("10.244.1.5")]),
        ];
        let total = World::new().settled(objects.clone()).len();
        for nth in 0..total {
            let mut world = World::new();
            world.kernel.faults.strike(nth, Fault::LostAnswer);
            let ops = world.settled(objects.clone());
            assert_eq!(ops.len(), total, "each op once");
            assert!((1..=2).contains(&world.kernel.readings), "op {nth}");
            world.at_rest();

            let mut world = World::new();
            world.kernel.faults.strike(nth, Fault::LostRequest);
            world.settled(objects.clone());
            // What was lost is asked for again after a pause, not at once.
            world.now += SECOND;
            world.settle();
            same(&world.kernel.state, &world.wanted());
            world.at_rest();
        }
    }

    #[test]
    fn f06_one_endpoint_among_ten_thousand_services_is_one_op() {
        let mut world = World::new();
        world.guarded = false;
        for n in 0..10_000_u32 {
            let of = format!("s{n}");
            world.apply(put(&of, http(&format!("10.97.{}.{}", n / 250, n % 250))));
            world.apply(put_slice(
                &of,
                http_slice(&of, &[ready("10.244.1.5"), ready("10.244.1.6")]),
            ));
        }
        world.settle();
        let readings = world.kernel.readings;
        let flip = |endpoints: &[Endpoint]| [put_slice("s777", http_slice("s777", endpoints))];
        let ops = words(&world.settled(flip(&[ready("10.244.1.5"), unready("10.244.1.6")])));
        assert_eq!(
            ops,
            ["update real server 10.244.1.6:8080 of 10.97.3.27:80/tcp, weight 0"]
        );
        let ops = words(&world.settled(flip(&[ready("10.244.1.5"), ready("10.244.1.6")])));
        assert_eq!(
            ops,
            ["update real server 10.244.1.6:8080 of 10.97.3.27:80/tcp, weight 1"]
        );
        assert_eq!(world.kernel.readings, readings);
    }
}

/// UDP flows.
mod u {
    use std::collections::BTreeSet;

    use ipvs_proxy_core::op::{Dataplane as _, Outcome};
    use ipvs_proxy_core::state::Set;

    use super::*;

    const DNS: [(&str, ipvs_proxy_netlink::Protocol, u16); 1] = [("dns", UDP, 53)];

    fn dns(endpoints: &[Endpoint]) -> Change {
        put_slice("dns-1", slice("dns", &DNS, endpoints))
    }

    /// Works until there is nothing to do now; after which ops all flows of which virtual servers
    /// were to be forgotten.
    fn forgotten(world: &mut World) -> Vec<(String, VirtualServerKey)> {
        let mut forgotten = Vec::new();
        loop {
            let ops = world.planner.next(world.now);
            let Some(last) = ops.last().map(ToString::to_string) else {
                return forgotten;
            };
            let outcomes: Vec<Outcome> = world.kernel.apply(&ops);
            world
                .planner
                .commit(ops.into_iter().zip(outcomes), world.now);
            let stale = world.planner.take_stale_flows();
            forgotten.extend(stale.into_iter().map(|(vs, _)| (last.clone(), vs)));
        }
    }

    #[test]
    fn u01_flows_of_before_are_forgotten_once_packets_come() {
        let mut world = World::of([
            node(&["192.168.10.11"]),
            put(
                "dns",
                node_ports(
                    external(service("10.96.0.10", &DNS), &["192.168.10.11"]),
                    &[30053],
                ),
            ),
        ]);
        let of = |text: &str| vs(text, UDP);
        let let_in = "add entry 10.96.0.10,udp:53 of set KUBE-IPVS-SERVING".to_owned();
        let served =
            "add real server 10.244.1.5:53 of 192.168.10.11:30053/udp, weight 1".to_owned();
        world.apply(dns(&[ready("10.244.1.5")]));
        // Those on the node's address have nothing more to wait for.
        assert_eq!(
            forgotten(&mut world),
            [
                (served.clone(), of("192.168.10.11:53")),
                (served, of("192.168.10.11:30053")),
                (let_in.clone(), of("10.96.0.10:53")),
            ]
        );
        world.apply(dns(&[ready("10.244.1.5"), ready("10.244.1.6")]));
        assert_eq!(forgotten(&mut world), []);

        // All at once, and the address fails at first: with the address.
        let mut world = World::new();
        let address = Key::Address(ip("10.96.0.10"));
        world.apply(put("dns", service("10.96.0.10", &DNS)));
        world.apply(dns(&[ready("10.244.1.5")]));
        world
            .kernel
            .refuse
            .insert(address, ipvs_proxy_core::op::FailureKind::Busy);
        assert_eq!(forgotten(&mut world), []);
        world.kernel.refuse.clear();
        world.now += SECOND * 2;
        let bound = "add address 10.96.0.10 on kube-ipvs0".to_owned();
        let all: BTreeSet<_> = forgotten(&mut world).into_iter().collect();
        assert!(
            all == BTreeSet::from([(bound.clone(), of("10.96.0.10:53"))])
                || all == BTreeSet::from([(let_in.clone(), of("10.96.0.10:53"))]),
            "{all:?}"
        );

        // What others took away, and a process that ended before packets came.
        let role = ipvs_proxy_core::state::Role::Serving;
        let set = Set {
            family: ipvs_proxy_netlink::Family::V4,
            role,
        };
        let entry = ipset_rs::Entry::IpPort(ip("10.96.0.10"), UDP, 53);
        for (key, back) in [(address, &bound), (Key::Entry(set, entry), &let_in)] {
            world.kernel.state.remove(&key);
            world.restart();
            assert_eq!(forgotten(&mut world), [(back.clone(), of("10.96.0.10:53"))]);
        }
    }
}

/// Sets.
mod g {
    use std::collections::BTreeSet;

    use ipset_rs::SetType;
    use ipvs_proxy_core::state::Set;
    use ipvs_proxy_netlink::Family;

    use super::*;

    #[test]
    fn g02_every_set_has_the_family_of_its_addresses() {
        for family in Family::ALL {
            for set in Set::all(family) {
                match set.kind() {
                    SetType::HashIp(f)
                    | SetType::HashIpPort(f)
                    | SetType::HashIpPortIp(f)
                    | SetType::HashIpPortNet(f)
                    | SetType::HashNet(f) => assert_eq!(f, family, "{set:?}"),
                    SetType::BitmapPort => {}
                }
            }
        }
        let world = World::of([
            put(
                "s",
                Service {
                    cluster_ips: vec![ip("fd00:96::20")],
                    ..http("10.96.0.20")
                },
            ),
            put_slice(
                "s-6",
                http_slice(
                    "s",
                    &[Endpoint {
                        local: true,
                        ..ready("fd00:244::5")
                    }],
                ),
            ),
        ]);
        for key in world.kernel.state.keys() {
            if let Key::Entry(set, _) = key {
                assert_eq!(set.family, Family::V6, "{key}");
            }
        }
    }

    #[test]
    fn g04_set_names_fit_and_are_unique() {
        let sets = Family::ALL.into_iter().flat_map(Set::all);
        let names: Vec<String> = sets.map(|set| set.name().to_string()).collect();
        assert!(names.iter().all(|name| name.len() <= 31), "{names:?}");
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        // kube-proxy's names, cut as it cuts them.
        for name in [
            "KUBE-6-LOAD-BALANCER-SOURCE-CID",
            "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS",
        ] {
            assert!(names.iter().any(|n| n == name), "{name}");
        }
    }
}
