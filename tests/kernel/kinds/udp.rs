//! A UDP client that never stops sending from its one socket, as resolvers do.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::daemon::{wait_until, wait_up_to};
use tests::topology::pod_addresses;
use tests::traffic::Client;

use super::{Scene, vips};

/// How long a client may be without an answer: connection tracking is looked at once a second.
const GAP: Duration = Duration::from_secs(2);
/// How soon the kernel must follow a manifest.
const AT_ONCE: Duration = Duration::from_secs(2);

/// What a client saw last: who answered (or that nobody did), and how many times so far.
type Seen = Mutex<BTreeMap<String, u32>>;

/// Sends from one socket until told to stop.
fn talk(to: SocketAddr, seen: &Seen, stop: &AtomicBool) {
    let quick = Client {
        timeout: Duration::from_millis(100),
        ..Client::default()
    };
    let talk = quick.datagrams(to).unwrap();
    while !stop.load(Ordering::SeqCst) {
        let name = talk
            .ask()
            .map_or_else(|_| "nobody".to_owned(), |answer| answer.name);
        *seen.lock().unwrap().entry(name).or_default() += 1;
        thread::sleep(Duration::from_millis(5));
    }
}

fn count(seen: &Seen, name: &str) -> u32 {
    seen.lock().unwrap().get(name).copied().unwrap_or(0)
}

/// Lets clients of each place and family talk all the time while `body` goes on.
fn while_talking(scene: &Scene, body: impl FnOnce(&[(String, Seen)])) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let clients = scene.clients(3).into_iter();
    let talks: Vec<_> = clients
        .flat_map(|client| vips().map(|vip| (client, vip)))
        .collect();
    let seen: Vec<(String, Seen)> = talks
        .iter()
        .map(|((client, _), vip)| (format!("{client} {vip}"), Seen::default()))
        .collect();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stopper = Stop(&stop);
        for (((_, namespace), vip), (_, seen)) in talks.iter().zip(&seen) {
            let stop = &stop;
            scope.spawn(move || namespace.enter(|| talk(*vip, seen, stop)));
        }
        body(&seen);
    });
}

/// The connection tracking entries of UDP flows to a VIP that this pod answers.
fn tracked(scene: &Scene, vip: SocketAddr, pod: u8) -> Vec<String> {
    let family = if vip.is_ipv4() { "ipv4" } else { "ipv6" };
    let listed = scene
        .topology
        .node()
        .tool(&format!("conntrack -L -f {family} -p udp -d {}", vip.ip()));
    let answered_by = format!("src={} ", pod_addresses(pod)[usize::from(vip.is_ipv6())]);
    // The address is also the client's where a pod asks, so only the second direction counts.
    let reply = |line: &str| {
        let second = line.rmatch_indices("src=").next().map(|(at, _)| at);
        second.is_some_and(|at| line[at..].starts_with(&answered_by))
    };
    listed
        .lines()
        .filter(|line| reply(line))
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_client_that_never_stops_goes_on_with_another_endpoint() {
    let scene = Scene::web(4, &[0], "", &[]);
    // Those that are silent as well: IPVS itself forgets the flows of those that send.
    let silent = vips().map(|vip| {
        let outside = scene.topology.outside();
        let talk = outside.enter(|| Client::default().datagrams(vip)).unwrap();
        wait_until("pod0 answers", || talk.ask().is_ok());
        talk
    });
    while_talking(&scene, |seen| {
        wait_until("pod0 answers all", || {
            seen.iter().all(|(_, seen)| count(seen, "pod0") > 3)
        });
        for vip in vips() {
            assert_eq!(tracked(&scene, vip, 0).len(), 4, "{vip}");
        }
        scene.endpoints(&[1]);
        for vip in vips() {
            wait_up_to(AT_ONCE, "pod0 is gone, without a drain", || {
                let servers = scene.servers("-u", vip);
                servers.is_some_and(|servers| servers == [(1, 1)].into())
            });
        }
        let before: Vec<u32> = seen.iter().map(|(_, seen)| count(seen, "pod1")).collect();
        let gone = Instant::now();
        wait_until("pod1 answers all", || {
            let all = seen.iter().zip(&before);
            all.clone()
                .all(|((_, seen), before)| count(seen, "pod1") > *before)
        });
        let took = gone.elapsed();
        assert!(took < GAP, "answers took {took:?}: {seen:?}");
        for vip in vips() {
            wait_up_to(GAP, &format!("no flow of {vip} leads to pod0"), || {
                tracked(&scene, vip, 0).is_empty()
            });
            assert_eq!(tracked(&scene, vip, 1).len(), 3, "{vip}");
        }
        let of_pod0: Vec<u32> = seen.iter().map(|(_, seen)| count(seen, "pod0")).collect();
        let more = |(_, seen): &(String, Seen)| count(seen, "pod1");
        let so_far: Vec<u32> = seen.iter().map(more).collect();
        wait_until("they go on", || {
            seen.iter()
                .zip(&so_far)
                .all(|(talk, so_far)| more(talk) > so_far + 3)
        });
        let still: Vec<u32> = seen.iter().map(|(_, seen)| count(seen, "pod0")).collect();
        assert_eq!(still, of_pod0, "pod0 answers on: {seen:?}");
    });
    let log = scene.daemon.as_ref().unwrap().log();
    assert!(!log.contains("UDP flows may go on"), "{log}");
    for talk in silent {
        // The first datagram may still meet what IPVS remembers.
        wait_until("the silent ones go on as well", || {
            talk.ask().is_ok_and(|answer| answer.name == "pod1")
        });
    }
}

#[test]
fn a_client_that_asked_all_along_is_answered_by_the_first_endpoint() {
    let scene = Scene::web(4, &[0], "", &[]);
    scene.endpoints(&[]);
    for vip in vips() {
        scene.await_servers("-u", vip, &[]);
    }
    while_talking(&scene, |seen| {
        wait_until("nobody answers", || {
            seen.iter().all(|(_, seen)| count(seen, "nobody") > 5)
        });
        for (client, seen) in seen {
            assert_eq!(count(seen, "pod0"), 0, "{client}");
        }
        // The second time with flows that the kernel translates.
        for pod in [0, 1] {
            let name = format!("pod{pod}");
            scene.endpoints(&[pod]);
            for vip in vips() {
                wait_up_to(AT_ONCE, "the endpoint is there", || {
                    let servers = scene.servers("-u", vip);
                    servers.is_some_and(|servers| servers == [(pod, 1)].into())
                });
            }
            let there = Instant::now();
            wait_until(&format!("{name} answers all"), || {
                seen.iter().all(|(_, seen)| count(seen, &name) > 0)
            });
            let took = there.elapsed();
            assert!(took < GAP, "answers took {took:?}: {seen:?}");
            for vip in vips() {
                assert_eq!(tracked(&scene, vip, pod).len(), 3, "{vip}");
            }
            scene.endpoints(&[]);
            for vip in vips() {
                scene.await_servers("-u", vip, &[]);
            }
            let before: Vec<u32> = seen.iter().map(|(_, seen)| count(seen, "nobody")).collect();
            wait_until("nobody answers again", || {
                let all = seen.iter().zip(&before);
                all.clone()
                    .all(|((_, seen), before)| count(seen, "nobody") > before + 2)
            });
        }
    });
}
