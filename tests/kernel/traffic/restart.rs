//! The daemon goes and comes back under load.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use tests::daemon::{Daemon, service, wait_until};
use tests::traffic::{Client, hold};

use super::{CLUSTER_CIDR, Scene, Stop, node_ports, slices, vips};

#[test]
fn no_request_fails_while_the_daemon_is_killed_and_started_again() {
    under_load(Daemon::crash);
}

#[test]
fn no_request_fails_while_the_daemon_is_stopped_and_started_again() {
    under_load(|daemon| assert!(daemon.stop().success()));
}

fn under_load(end: fn(Daemon)) {
    let mut scene = Scene::web(4, &[0, 1, 2], &[CLUSTER_CIDR]);
    let mut held = vips().map(|vip| scene.topology.pod(3).enter(|| hold(vip)).unwrap());
    let targets: Vec<SocketAddr> = vips().into_iter().chain(node_ports()).collect();
    let stop = AtomicBool::new(false);
    let counts: [AtomicU32; 3] = Default::default();
    let daemon = &mut scene.daemon;
    let (topology, manifests) = (&scene.topology, &scene.manifests);
    let clients = [topology.pod(3), topology.node(), topology.outside()];
    let failed = thread::scope(|scope| {
        let loads: Vec<_> = clients
            .into_iter()
            .zip(&counts)
            .map(|(namespace, count)| {
                let (stop, targets) = (&stop, &targets);
                scope.spawn(move || namespace.enter(|| load(targets, stop, count)))
            })
            .collect();
        let stopper = Stop(&stop);
        let more_load = |what: &str| {
            let before = counts.each_ref().map(|count| count.load(Ordering::SeqCst));
            wait_until(&format!("requests are answered {what}"), || {
                counts
                    .iter()
                    .zip(before)
                    .all(|(count, before)| count.load(Ordering::SeqCst) >= before + 8)
            });
        };
        let table = || topology.node().tool("ipvsadm -Sn");
        more_load("at first");
        for round in 0..2 {
            let before = table();
            end(daemon.take().unwrap());
            assert_eq!(
                table(),
                before,
                "round {round}: the daemon took something along"
            );
            more_load("without a daemon");
            let flags = ["--node-ips=192.168.10.11,fd00:192::11", CLUSTER_CIDR];
            *daemon = Some(Daemon::start(topology.node(), manifests, &flags));
            // A new Service shows that the new daemon has read the kernel and acts.
            let name = format!("new{round}");
            let vip = format!("10.96.1.{round}");
            let ports = [("tcp", "TCP", 80, 0)];
            let text = service(&name, &[&vip], &ports)
                + &slices(&name, &[("tcp", "TCP", 8080)], &[(0, true)]);
            manifests.write(&format!("{name}.yaml"), &text);
            wait_until("the new daemon acts", || {
                table().contains(&format!("-a -t {vip}:80 -r 10.0.0.2:8080"))
            });
            let left: String = table()
                .lines()
                .filter(|line| !line.contains(&format!(" {vip}:80 ")))
                .map(|line| format!("{line}\n"))
                .collect();
            assert_eq!(
                sorted(&left),
                sorted(&before),
                "round {round}: the new daemon changed it"
            );
            more_load("with the new daemon");
        }
        drop(stopper);
        loads
            .into_iter()
            .map(|load| load.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert!(
        failed.iter().all(Vec::is_empty),
        "of {counts:?} requests failed: {failed:?}"
    );
    for held in &mut held {
        held.ping().unwrap();
    }
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// Asks until told to stop; what went wrong.
fn load(targets: &[SocketAddr], stop: &AtomicBool, count: &AtomicU32) -> Vec<String> {
    // Longer than a busy machine may keep the guest from its only processor.
    let client = Client {
        timeout: Duration::from_secs(10),
        ..Client::default()
    };
    let mut failed = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        for to in targets {
            for (protocol, answer) in [("TCP", client.http_get(*to)), ("UDP", client.udp_ask(*to))]
            {
                let number = count.fetch_add(1, Ordering::SeqCst);
                if let Err(error) = answer {
                    failed.push(format!("request {number}, {protocol} {to}: {error}"));
                }
            }
        }
    }
    failed
}
