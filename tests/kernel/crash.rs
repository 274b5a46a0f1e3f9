//! The process ends after any op of a large change, or at any message to the kernel: the next one does the rest and no more.

use std::fs;

use ipvs_proxy_core::model::{Change, Endpoint};
use ipvs_proxy_core::plan::Config;
use tests::daemon::{Daemon, Manifests, wait_until};
use tests::foreign;
use tests::topology::{NODE, Topology, pod_addresses};
use tests::traffic::{HeldConnection, Server, hold};

use ipvs_proxy_dataplane::kernel::Kernel;

use crate::driver::{Driver, Held, held, least, open, words};
use crate::world;

const TARGET: u16 = 8080;
const WEB: u16 = 80;
const DNS: u16 = 53;

/// A Service of both families: its name, the number of its addresses, its ports as protocol, port and node port, its affinity, its
/// pods.
type App = (
    &'static str,
    u8,
    &'static [(&'static str, u16, u16)],
    Option<u32>,
    &'static [u8],
);

/// In both states: the held connections go here.
const STAYS: [(&str, u16, u16); 2] = [("TCP", WEB, 30080), ("UDP", WEB, 30080)];
const BOTH: [(&str, u16, u16); 2] = [("TCP", DNS, 0), ("UDP", DNS, 0)];

const OLD: [App; 7] = [
    ("held", 10, &STAYS, None, &[0]),
    ("grows", 11, &BOTH, None, &[0]),
    ("sticks", 12, &BOTH, None, &[1]),
    (
        "ports",
        13,
        &[("TCP", 80, 0), ("TCP", 81, 30081)],
        None,
        &[1, 2],
    ),
    ("goes1", 14, &BOTH, None, &[0, 1]),
    (
        "goes2",
        15,
        &[("TCP", 80, 30082), ("UDP", 80, 30083)],
        None,
        &[0, 2],
    ),
    ("goes3", 16, &BOTH, Some(60), &[2]),
];
const NEW: [App; 7] = [
    ("held", 10, &STAYS, None, &[0, 1]),
    ("grows", 11, &BOTH, None, &[0, 1, 2]),
    ("sticks", 12, &BOTH, Some(600), &[1]),
    (
        "ports",
        13,
        &[("TCP", 80, 0), ("TCP", 443, 30081)],
        None,
        &[1, 2],
    ),
    ("comes1", 17, &BOTH, None, &[0, 1]),
    (
        "comes2",
        18,
        &[("TCP", 80, 30084), ("UDP", 80, 30085)],
        None,
        &[0, 2],
    ),
    ("comes3", 19, &BOTH, Some(60), &[2]),
];

fn vips(number: u8) -> [String; 2] {
    [format!("10.96.0.{number}"), format!("fd96::{number}")]
}

/// What a process is told of these Services.
fn changes(apps: &[App]) -> Vec<Change> {
    let [v4, v6] = NODE.map(|address| address.to_string());
    let mut changes = vec![world::node(&[&v4, &v6])];
    for (name, number, ports, affinity, pods) in apps {
        let named: Vec<(String, _, u16, u16)> = ports
            .iter()
            .map(|(protocol, port, node_port)| {
                let number = if *protocol == "TCP" {
                    world::TCP
                } else {
                    world::UDP
                };
                (
                    format!("{protocol}{port}").to_lowercase(),
                    number,
                    *port,
                    *node_port,
                )
            })
            .collect();
        let of_service: Vec<_> = named
            .iter()
            .map(|(name, p, port, _)| (name.as_str(), *p, *port))
            .collect();
        let of_slice: Vec<_> = named
            .iter()
            .map(|(name, p, ..)| (name.as_str(), *p, TARGET))
            .collect();
        let mut service = world::sticky(world::service(&vips(*number)[0], &of_service), *affinity);
        service.cluster_ips = vips(*number).iter().map(|vip| world::ip(vip)).collect();
        for (port, (.., node_port)) in service.ports.iter_mut().zip(&named) {
            port.node_port = (*node_port != 0).then_some(*node_port);
        }
        changes.push(world::put(name, service));
        for family in [0, 1] {
            let endpoints: Vec<Endpoint> = pods
                .iter()
                .map(|pod| Endpoint {
                    local: true,
                    ..world::ready(&pod_addresses(*pod)[family].to_string())
                })
                .collect();
            changes.push(world::put_slice(
                &format!("{name}-{family}"),
                world::slice(name, &of_slice, &endpoints),
            ));
        }
    }
    changes
}

/// The same as manifests.
fn manifest(apps: &[App]) -> String {
    let mut text = String::new();
    for (name, number, ports, affinity, pods) in apps {
        let named: Vec<String> = ports
            .iter()
            .map(|(p, port, _)| format!("{p}{port}").to_lowercase())
            .collect();
        let of_service: Vec<_> = ports
            .iter()
            .zip(&named)
            .map(|((p, port, np), name)| (name.as_str(), *p, *port, *np))
            .collect();
        let of_slice: Vec<_> = ports
            .iter()
            .zip(&named)
            .map(|((p, ..), name)| (name.as_str(), *p, TARGET))
            .collect();
        let vips = vips(*number);
        text.push_str(&tests::daemon::service(
            name,
            &vips.each_ref().map(String::as_str),
            &of_service,
        ));
        if let Some(seconds) = affinity {
            text.push_str(&format!(
                "  sessionAffinity: ClientIP\n  sessionAffinityConfig: {{clientIP: {{timeoutSeconds: {seconds}}}}}\n"
            ));
        }
        for family in [0, 1] {
            let endpoints: Vec<_> = pods
                .iter()
                .map(|pod| (pod_addresses(*pod)[family], true, "node"))
                .collect();
            text.push_str(&tests::daemon::slice(
                &format!("{name}-{family}"),
                name,
                &of_slice,
                &endpoints,
            ));
        }
    }
    text
}

/// A node in the old state beside things of other software, and connections to a pod that is in both states.
struct Scene {
    topology: Topology,
    _server: Server,
    held: Vec<HeldConnection>,
    foreign: String,
}

impl Scene {
    fn new() -> Scene {
        let topology = Topology::new(3);
        let node = topology.node();
        foreign::make(node);
        node.sysctl("ipv4/vs/conntrack", "1");
        let server = topology.serve(0, TARGET);
        node.enter(|| Driver::start(&Config::default(), &changes(&OLD)).rest());
        let held = ["10.96.0.10:80", "[fd96::10]:80", "192.168.10.11:30080"].map(|to| {
            topology
                .outside()
                .enter(|| hold(to.parse().unwrap()))
                .unwrap()
        });
        Scene {
            foreign: foreign::said(node),
            _server: server,
            held: held.into(),
            topology,
        }
    }

    fn check(&mut self, what: &str) {
        assert_eq!(foreign::said(self.topology.node()), self.foreign, "{what}");
        for held in &mut self.held {
            held.ping().unwrap_or_else(|error| {
                panic!("{what}: the connection to {}: {error}", held.answer.peer)
            });
        }
    }
}

/// A process does that many ops of the change that leads to `wanted`, and ends. The next one does what is left. Sockets carry nothing
/// over, so they share them; and the rules are not part of the change.
fn interrupted(
    scene: &Scene,
    kernel: Kernel,
    objects: &[Change],
    wanted: &Held,
    after: usize,
) -> (Kernel, usize) {
    let node = scene.topology.node();
    let config = Config::default();
    let (kernel, done) = match after {
        0 => (kernel, 0),
        _ => node.enter(|| {
            let mut process = Driver::with(kernel, false, &config, objects);
            let done = process.some(after).len();
            (process.end(), done)
        }),
    };
    let between = held(node);
    let (kernel, ops) = node.enter(|| {
        let mut process = Driver::with(kernel, false, &config, objects);
        let ops = process.rest();
        (process.end(), ops)
    });
    assert_eq!(words(&ops), least(&between, wanted), "after {after} ops");
    (kernel, done)
}

#[test]
fn a_process_that_ends_after_any_op_leaves_the_rest_to_the_next() {
    let mut scene = Scene::new();
    let (old, new) = (changes(&OLD), changes(&NEW));
    let old_state = held(scene.topology.node());
    // Undisturbed, there and back.
    let node = scene.topology.node();
    let there = node.enter(|| Driver::start(&Config::default(), &new).rest());
    let new_state = held(node);
    assert_eq!(words(&there), least(&old_state, &new_state));
    let back = node.enter(|| Driver::start(&Config::default(), &old).rest());
    assert_eq!(words(&back), least(&new_state, &old_state));
    assert_eq!(held(node), old_state);
    scene.check("undisturbed");
    println!("{} ops there, {} back", there.len(), back.len());
    assert!(
        (180..300).contains(&there.len()) && back.len() >= 180,
        "{}, {}",
        there.len(),
        back.len()
    );
    let mut kernel = scene.topology.node().enter(|| open(&Config::default()));
    for after in (0..=there.len().max(back.len())).step_by(stride(12)) {
        let done;
        (kernel, done) = interrupted(&scene, kernel, &new, &new_state, after);
        assert_eq!(done, after.min(there.len()));
        // The way back, on which endpoints drain, ends early at every eighth place.
        let early = if after % 8 == 0 { after } else { 0 };
        (kernel, _) = interrupted(&scene, kernel, &old, &old_state, early);
        if after % 12 == 0 {
            assert_eq!(held(scene.topology.node()), old_state);
            scene.check(&format!("after {after} ops"));
        }
    }
    scene.check("at the end");
}

/// Every place where a process may end is looked at by the long tests; else one of so many.
fn stride(short: usize) -> usize {
    if tests::long() { 1 } else { short }
}

/// The ops that the daemon says it carried out, and those that failed.
fn told(daemon: &Daemon) -> (usize, usize) {
    let log = daemon.log();
    let sum = |what: &str| {
        let numbers = log.split(what).skip(1).map(|rest| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse::<usize>().unwrap()
        });
        numbers.sum()
    };
    (sum(" ops="), sum(" failed="))
}

#[test]
fn a_daemon_killed_at_any_message_leaves_the_rest_to_the_next() {
    let mut scene = Scene::new();
    let old = changes(&OLD);
    let old_state = held(scene.topology.node());
    let manifests = Manifests::new();
    manifests.write("all.yaml", &manifest(&NEW));
    let node_ips = format!("--node-ips={},{}", NODE[0], NODE[1]);
    let start = |trace: &str, inject: &str| {
        let by = [
            "strace",
            "-D",
            "-f",
            "-e",
            "trace=sendto",
            "-e",
            inject,
            "-o",
            trace,
        ];
        Daemon::start_by(scene.topology.node(), &manifests, &by, &[&node_ips])
    };
    let trace = manifests.path().with_extension("sends");
    let trace = trace.to_str().unwrap();

    // Undisturbed: how many messages the main thread sends.
    // The first one also puts its own rules in place of the driver's.
    let node = scene.topology.node();
    let mut first = Daemon::start(node, &manifests, &[&node_ips]);
    first.settle();
    first.crash();
    node.enter(|| {
        let kernel = open(&Config::default());
        Driver::with(kernel, false, &Config::default(), &old).rest();
    });
    let daemon = start(trace, "signal=none");
    wait_until("all is in force", || daemon.log().contains("is in force"));
    let pid = format!("{} ", daemon.pid());
    let sent = fs::read_to_string(trace).unwrap();
    let sent = sent.lines().filter(|line| line.starts_with(&pid));
    let sends = sent.filter(|line| line.contains("sendto(")).count();
    daemon.crash();
    let new_state = held(node);
    let ops = least(&old_state, &new_state).len();
    assert!(ops > 180 && sends > 60, "{ops} ops, {sends} messages");

    let mut killed = Vec::new();
    let mut kernel = node.enter(|| open(&Config::default()));
    for nth in (1..=sends).rev().step_by(stride(8)) {
        kernel = node.enter(|| {
            let mut process = Driver::with(kernel, false, &Config::default(), &old);
            process.rest();
            process.end()
        });
        assert_eq!(held(node), old_state);
        let inject = format!("inject=sendto:signal=KILL:when={nth}");
        let daemon = start("/dev/null", &inject);
        let stat = format!("/proc/{}/stat", daemon.pid());
        let is_dead = || fs::read_to_string(&stat).unwrap().contains(") Z ");
        wait_until("it is killed, or done", || {
            is_dead() || daemon.log().contains("is in force")
        });
        if !is_dead() {
            // The last messages of the undisturbed one were looks at what it had done.
            daemon.crash();
            continue;
        }
        let (status, log) = daemon.ended();
        assert!(!status.success(), "{status}: {log}");
        let between = held(node);
        let expected = least(&between, &new_state);
        let mut next = Daemon::start(node, &manifests, &[&node_ips]);
        next.settle();
        assert_eq!(
            told(&next),
            (expected.len(), 0),
            "killed at message {nth}: {expected:#?}"
        );
        next.crash();
        assert_eq!(held(node), new_state, "killed at message {nth}");
        println!(
            "killed at message {nth} of {sends}: {} ops left",
            expected.len()
        );
        killed.push(expected.len());
        // All before this one only read.
        if between == old_state {
            break;
        }
    }
    println!("of {sends} messages; left to do after each kill: {killed:?}");
    assert!(killed.iter().any(|left| *left > 0), "{killed:?}");
    scene.check("at the end");
    let _ = fs::remove_file(trace);
}
