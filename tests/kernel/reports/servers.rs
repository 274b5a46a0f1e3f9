//! Virtual and real servers: drains, claims, attributes.

use std::time::{Duration, Instant};

use tests::daemon::{service, slice, wait_until, wait_up_to};
use tests::tap::Tap;
use tests::topology::{BRIDGE, NODE, OUTSIDE, pod_addresses};
use tests::traffic::{Client, Error, HeldConnection, Server, hold, http_get};

use super::{NODE_PORT, Scene, TARGET, audits, await_writes, slices, web, writes};

/// The virtual servers of `web`.
const SERVERS: [&str; 4] = [
    "10.96.0.20:80",
    "192.168.10.11:30080",
    "[fd96::20]:80",
    "[fd00:192::11]:30080",
];

/// The same message for each virtual server of `web`.
fn each(what: &str) -> Vec<String> {
    SERVERS.map(|server| format!("ipvs {what} {server}")).into()
}

/// A message about a pod's real server for each virtual server of `web`.
fn each_real(what: &str, pod: u8, weight: u32) -> Vec<String> {
    let real = |server: &str| {
        let [v4, v6] = pod_addresses(pod);
        match server.starts_with('[') {
            true => format!("[{v6}]:{TARGET}"),
            false => format!("{v4}:{TARGET}"),
        }
    };
    SERVERS
        .map(|server| format!("ipvs {what} {server} {} weight {weight}", real(server)))
        .into()
}

fn sorted(mut texts: Vec<String>) -> Vec<String> {
    texts.sort_unstable();
    texts
}

/// A connection from outside to the first virtual server that ends up at that pod.
fn held_at(scene: &Scene, pod: &str) -> HeldConnection {
    let vip = SERVERS[0].parse().unwrap();
    let once = || scene.topology.outside().enter(|| hold(vip)).unwrap();
    let mut all = std::iter::repeat_with(once).take(8);
    all.find(|held| held.answer.name == pod).unwrap()
}

#[test]
fn a01_weight_zero_survives_a_restart() {
    let mut scene = Scene::web(2, &[0, 1], "", &[]);
    let mut held = held_at(&scene, "pod0");
    scene.daemon.take().unwrap().crash();
    for server in [SERVERS[0], SERVERS[1]] {
        scene.node().tool(&format!(
            "ipvsadm -e -t {server} -r 10.0.0.2:{TARGET} -m -w 0"
        ));
    }
    let tap = Tap::new(scene.node());
    scene.launch(&[]);
    scene.settle();
    let back = [SERVERS[0], SERVERS[1]]
        .map(|server| format!("ipvs SET_DEST {server} 10.0.0.2:{TARGET} weight 1"));
    assert_eq!(writes(&tap), back);
    held.ping().unwrap();

    // Gone from the slices while no process runs: it drains, and goes with its last connection.
    scene.daemon.take().unwrap().crash();
    scene.node().tool(&format!(
        "ipvsadm -e -t {} -r 10.0.0.2:{TARGET} -m -w 0",
        SERVERS[0]
    ));
    scene.endpoints(&[1]);
    scene.launch(&[]);
    scene.settle();
    let line = format!("-a -t {} -r 10.0.0.2:{TARGET} -m -w ", SERVERS[0]);
    assert!(
        scene
            .node()
            .tool("ipvsadm -Sn")
            .contains(&format!("{line}0"))
    );
    held.ping().unwrap();
    held.reset();
    wait_until("the adopted drain ends", || {
        !scene.node().tool("ipvsadm -Sn").contains(&line)
    });
}

#[test]
fn a02_an_endpoint_that_flaps_is_edited_and_keeps_its_connections() {
    let scene = Scene::web(2, &[0, 1], "", &[]);
    let mut held = held_at(&scene, "pod0");
    // Each of its virtual servers has a connection to it, so that no drain ends in between.
    let node = scene.node();
    let _others: Vec<HeldConnection> = SERVERS[1..]
        .iter()
        .flat_map(|server| {
            (0..2).map(|_| {
                scene
                    .topology
                    .outside()
                    .enter(|| hold(server.parse().unwrap()))
                    .unwrap()
            })
        })
        .collect();
    let tap = Tap::new(node);
    for flap in 0..5 {
        for (ready, weight) in [(false, 0), (true, 1)] {
            scene.manifests.write(
                "slices.yaml",
                &slices("web", TARGET, &[(0, ready), (1, true)]),
            );
            let edits = each_real("SET_DEST", 0, weight);
            assert_eq!(
                sorted(await_writes(&tap, &edits)),
                sorted(edits),
                "flap {flap}"
            );
            held.ping().unwrap();
        }
    }
    assert_eq!(writes(&tap), [""; 0]);
}

#[test]
fn c04_a_cluster_ip_port_may_equal_a_node_port() {
    const BOTH: u16 = 31000;
    let mut scene = Scene::new(3);
    let a = service("a", &["10.96.0.30"], &[("", "TCP", BOTH, 0)]);
    let b = service("b", &["10.96.0.31"], &[("", "TCP", 80, BOTH)]);
    let of = |name: &str, pod: u8| {
        let endpoint = (pod_addresses(pod)[0], true, "node");
        slice(name, name, &[("", "TCP", TARGET)], &[endpoint])
    };
    scene
        .manifests
        .write("both.yaml", &(a + &b + &of("a", 0) + &of("b", 1)));
    scene.launch(&[]);
    scene.settle();
    let from_pod = |to: &str| {
        scene
            .topology
            .pod(2)
            .enter(|| http_get(to.parse().unwrap()))
    };
    let answer = from_pod("10.96.0.30:31000").unwrap();
    assert_eq!(
        (answer.name.as_str(), answer.peer.ip()),
        ("pod0", pod_addresses(2)[0])
    );
    for namespace in [
        scene.topology.outside(),
        scene.node(),
        scene.topology.pod(2),
    ] {
        let answer = namespace
            .enter(|| http_get((NODE[0], BOTH).into()))
            .unwrap();
        assert_eq!(
            (answer.name.as_str(), answer.peer.ip()),
            ("pod1", BRIDGE[0])
        );
    }
    // No node port on a VIP: this one has no such port.
    assert_eq!(from_pod("10.96.0.31:31000"), Err(Error::Refused));
    // A packet that only passes through to that port of another machine is none of ours.
    let _far = scene
        .topology
        .outside()
        .enter(|| Server::listen("far", BOTH))
        .unwrap();
    let answer = from_pod(&format!("{}:{BOTH}", OUTSIDE[0])).unwrap();
    assert_eq!(
        (answer.name.as_str(), answer.peer.ip()),
        ("far", pod_addresses(2)[0])
    );
}

#[test]
fn c10_addresses_that_the_kernel_gives_the_link_are_left_alone() {
    let scene = Scene::web(1, &[0], "", &["--sync-period=1s"]);
    let node = scene.node();
    node.sysctl("ipv6/conf/kube-ipvs0/addr_gen_mode", "0");
    node.tool("ip link set kube-ipvs0 down");
    node.tool("ip link set kube-ipvs0 up");
    let link_local = || node.tool("ip -o -6 addr show dev kube-ipvs0 scope link");
    wait_until("the kernel gives it an address", || {
        link_local().contains("fe80:")
    });
    // VIPs of IPv6 go when a link goes down, and come back.
    wait_until("its VIPs are back", || {
        node.tool("ip -o addr show dev kube-ipvs0")
            .contains("fd96::20")
    });
    let log = scene.log();
    let tap = Tap::new(node);
    assert_eq!(audits(&tap, 3), [""; 0]);
    assert!(link_local().contains("fe80:"));
    assert_eq!(scene.log(), log);
    assert!(!log.contains("ERROR") && !log.contains("failed=1"), "{log}");
}

#[test]
fn d01_affinity_is_edited_on_every_virtual_server() {
    let external = "  externalIPs: [203.0.113.7]\n";
    let scene = Scene::web(2, &[0, 1], external, &[]);
    let mut held = held_at(&scene, "pod0");
    let tap = Tap::new(scene.node());
    let mut all = each("SET_SERVICE");
    all.push("ipvs SET_SERVICE 203.0.113.7:80".to_owned());
    let affinity = |seconds: u32| {
        format!(
            "{external}  sessionAffinity: ClientIP\n  sessionAffinityConfig: {{clientIP: {{timeoutSeconds: {seconds}}}}}\n"
        )
    };
    for (more, saved) in [
        (affinity(10800), Some(" -p 10800")),
        (affinity(60), Some(" -p 60")),
        (external.to_owned(), None),
    ] {
        let written = |text: &str| scene.manifests.write("web.yaml", &web(text));
        written(&more);
        let mut asked = await_writes(&tap, &all);
        // The same once more: nothing is to be done.
        written(&(more.clone() + "  # the same\n"));
        scene.manifests.write(
            "marker.yaml",
            &service("marker", &["10.96.0.77"], &[("", "TCP", 80, 0)]),
        );
        let marker = ["ipvs NEW_SERVICE 10.96.0.77:80".to_owned()];
        asked.extend(await_writes(&tap, &marker));
        scene.manifests.remove("marker.yaml");
        asked.extend(await_writes(
            &tap,
            &["ipset DEL KUBE-CLUSTER-IP".to_owned()],
        ));
        asked.retain(|text| text.starts_with("ipvs") && !text.contains("10.96.0.77"));
        assert_eq!(sorted(asked), sorted(all.clone()), "{saved:?}");
        for line in scene.node().tool("ipvsadm -Sn").lines() {
            let ours =
                line.starts_with("-A") && (line.contains(":80 ") || line.contains(":30080 "));
            if ours {
                assert_eq!(
                    line.split("-s rr").nth(1),
                    Some(saved.unwrap_or_default()),
                    "{line}"
                );
            }
        }
        held.ping().unwrap();
    }
}

#[test]
fn d02_a_client_with_affinity_leaves_a_pod_that_goes() {
    const LIMIT: Duration = Duration::from_secs(4);
    let sticky = "  sessionAffinity: ClientIP\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: 10800}}\n";
    let scene = Scene::web(3, &[0, 1], sticky, &["--drain-timeout=4s"]);
    let vip = SERVERS[0].parse().unwrap();
    let ask = || scene.topology.pod(2).enter(|| http_get(vip)).unwrap().name;
    let first = ask();
    assert!((0..8).all(|_| ask() == first));
    let (gone, left) = if first == "pod0" { (0, 1) } else { (1, 0) };
    let mut held = scene.topology.pod(2).enter(|| hold(vip)).unwrap();
    scene.endpoints(&[left]);
    let began = Instant::now();
    let real = format!("-a -t {vip} -r {}:{TARGET} ", pod_addresses(gone)[0]);
    let is_there = || scene.node().tool("ipvsadm -Sn").contains(&real);
    wait_until("it drains", || {
        let saved = scene.node().tool("ipvsadm -Sn");
        saved.contains(&format!("{real}-m -w 0"))
    });
    let next = Client {
        timeout: Duration::from_secs(2),
        ..Client::default()
    };
    let answer = scene.topology.pod(2).enter(|| next.http_get(vip));
    assert_eq!(answer.unwrap().name, format!("pod{left}"));
    assert!(is_there() || began.elapsed() > LIMIT);
    let _ = held.ping();
    wait_up_to(LIMIT * 3, "its deadline ends the drain", || !is_there());
    assert_eq!(ask(), format!("pod{left}"));
}

#[test]
fn d05_another_scheduler_is_an_edit_and_a_wrong_one_changes_nothing() {
    let mut scene = Scene::web(2, &[0, 1], "", &[]);
    let mut held = held_at(&scene, "pod1");
    scene.daemon.take().unwrap().crash();
    let tap = Tap::new(scene.node());
    let before = scene.node().tool("ipvsadm -Sn");
    scene.launch(&["--scheduler=nosuch"]);
    let (status, log) = scene.daemon.take().unwrap().ended();
    assert!(!status.success() && log.contains("nosuch"), "{log}");
    assert_eq!(scene.node().tool("ipvsadm -Sn"), before);
    tap.take();
    scene.launch(&["--scheduler=lc"]);
    scene.settle();
    let mut written = writes(&tap);
    // One more asks for the scheduler, and changes nothing.
    written.retain(|text| !text.starts_with("ipvs NEW_SERVICE"));
    assert_eq!(sorted(written), sorted(each("SET_SERVICE")));
    let after = scene.node().tool("ipvsadm -Sn");
    let ours = |line: &&str| {
        line.starts_with("-A")
            && (line.contains(":80 ") || line.contains(&format!(":{NODE_PORT} ")))
    };
    assert_eq!(
        after
            .lines()
            .filter(ours)
            .filter(|line| line.contains("-s lc"))
            .count(),
        4
    );
    assert_eq!(after.lines().count(), before.lines().count());
    held.ping().unwrap();
}
