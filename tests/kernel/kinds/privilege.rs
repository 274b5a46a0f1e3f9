//! The daemon with as little as the DaemonSet in `deploy` gives it, after `--init-only` with all there is.

use std::net::SocketAddr;
use std::process::Command;

use tests::daemon::{Daemon, binary, wait_until};
use tests::netns::Namespace;
use tests::topology::{BRIDGE, Topology};
use tests::traffic::{HeldConnection, hold, udp_ask};

use super::{CLUSTER_CIDR, Scene, vips, web};

/// As a container runtime starts a process: uid 0 without other capabilities than these, /proc/sys and all files read-only but
/// for the two that are mounted from the host.
fn contained(capabilities: &str) -> Vec<String> {
    let script = format!(
        "mkdir -p /run/ipvs-proxy && touch /run/xtables.lock && \
         mount --bind /run/ipvs-proxy /run/ipvs-proxy && \
         mount --bind /run/xtables.lock /run/xtables.lock && \
         mount -o bind,ro /proc/sys /proc/sys && \
         for at in /sys /tmp /run /; do \
             mountpoint -q $at && mount -o remount,bind,ro $at; \
         done; \
         ! touch /made && ! touch /run/made && ! touch /tmp/made && \
         exec setpriv --inh-caps=-all --bounding-set=-all{capabilities} --no-new-privs \"$@\""
    );
    let words = ["unshare", "-m", "sh", "-c", &script, "sh"];
    words.into_iter().map(str::to_owned).collect()
}

fn start(scene: &Scene, capabilities: &str, flags: &[&str]) -> Daemon {
    let by = contained(capabilities);
    let by: Vec<&str> = by.iter().map(String::as_str).collect();
    let flags = [&[CLUSTER_CIDR, "--sync-period=1s"], flags].concat();
    Daemon::start_by(scene.topology.node(), &scene.manifests, &by, &flags)
}

fn init(node: &Namespace) {
    let mut command = Command::new(binary());
    let words = [
        "run",
        "--init-only",
        "--conntrack-max-per-core=0",
        "--ipvs-tcp-timeout=2h",
    ];
    let output = node.enter(|| command.args(words).output()).unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Lines of the log that call for a person.
fn complaints(daemon: &Daemon) -> Vec<String> {
    let log = daemon.log();
    let calls = |line: &&str| line.contains("ERROR") || line.contains("WARN");
    log.lines().filter(calls).map(str::to_owned).collect()
}

/// All that the kernel holds.
fn everything(node: &Namespace) -> String {
    [
        "ipvsadm -Sn",
        "ipset save",
        "iptables-save",
        "ip6tables-save",
        "ip -o addr show dev kube-ipvs0",
    ]
    .map(|line| {
        let text = node.tool(line);
        // Comments have the time in them, chains their counters.
        let lines = text.lines().filter(|line| !line.starts_with(['#', ':']));
        lines.map(|line| format!("{line}\n")).collect::<String>()
    })
    .concat()
}

fn status(daemon: &Daemon, field: &str) -> String {
    let path = format!("/proc/{}/status", daemon.pid());
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    line.unwrap().trim().to_owned()
}

fn served(topology: &Topology, vip: SocketAddr, pod: &str) {
    for place in [topology.pod(2), topology.node(), topology.outside()] {
        let held = place.enter(|| hold(vip)).unwrap();
        assert_eq!(held.answer.name, pod);
        // A drain does not wait for it for long then.
        held.reset();
        assert_eq!(place.enter(|| udp_ask(vip)).unwrap().name, pod);
    }
}

#[test]
fn net_admin_and_net_raw_are_enough_after_init_only() {
    let mut scene = Scene::new(3);
    scene.manifests.write("web.yaml", &web(""));
    scene.endpoints(&[0]);
    init(scene.topology.node());
    let timeouts = ["--ipvs-tcp-timeout=2h"];
    let mut daemon = start(&scene, ",+net_admin,+net_raw", &timeouts);
    daemon.settle();
    for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
        assert_eq!(status(&daemon, set), "0000000000003000", "{set}");
    }
    assert_eq!(status(&daemon, "NoNewPrivs:"), "1");
    assert_eq!(status(&daemon, "Uid:").split('\t').next(), Some("0"));
    let node = scene.topology.node();
    for vip in vips() {
        served(&scene.topology, vip, "pod0");
    }
    // A drain with a connection goes on, one without ends; UDP's flows are forgotten.
    let outside = scene.topology.outside();
    let mut held = vips().map(|vip| outside.enter(|| hold(vip)).unwrap());
    // Masqueraded, so the rules are in force.
    assert_eq!(held[0].answer.peer.ip(), BRIDGE[0]);
    scene.endpoints(&[1]);
    for vip in vips() {
        scene.await_servers("-t", vip, &[(0, 0), (1, 1)]);
        scene.await_servers("-u", vip, &[(1, 1)]);
        served(&scene.topology, vip, "pod1");
    }
    held.iter_mut().for_each(|held| held.ping().unwrap());

    // What somebody takes away comes back.
    node.tool("iptables -t nat -F KUBE-SERVICES");
    node.tool("ip addr del 10.96.0.10/32 dev kube-ipvs0");
    node.tool("ipset flush KUBE-6-CLUSTER-IP");
    wait_until("it is repaired", || {
        node.tool("iptables-save").contains("-A KUBE-SERVICES")
            && !scene.members("KUBE-6-CLUSTER-IP").is_empty()
            && scene.addresses("kube-ipvs0").contains(&vips()[0].ip())
    });
    let said = complaints(&daemon);
    assert!(
        said.iter()
            .all(|line| line.contains("changed by somebody else")),
        "{said:?}"
    );

    // The next one takes it all over, with the drain.
    let before = everything(node);
    assert!(daemon.stop().success());
    let mut daemon = start(&scene, ",+net_admin,+net_raw", &timeouts);
    daemon.settle();
    assert_eq!(everything(node), before);
    assert!(!daemon.log().contains("ops="), "{}", daemon.log());
    held.iter_mut().for_each(|held| held.ping().unwrap());
    held.into_iter().for_each(HeldConnection::reset);
    for vip in vips() {
        scene.await_servers("-t", vip, &[(1, 1)]);
    }
    assert!(complaints(&daemon).is_empty(), "{:?}", complaints(&daemon));
    scene.daemon = Some(daemon);
}

/// Without `--init-only` nothing is loaded or set: what is not as it must be is told once, and all else works.
#[test]
fn without_init_only_sysctls_are_findings() {
    let mut scene = Scene::new(3);
    scene.manifests.write("web.yaml", &web(""));
    scene.endpoints(&[0]);
    let mut daemon = start(&scene, ",+net_admin,+net_raw", &[]);
    daemon.settle();
    for vip in vips() {
        assert_eq!(scene.servers("-t", vip), Some([(0, 1)].into()));
    }
    let said = complaints(&daemon);
    assert!(
        !said.is_empty() && said.iter().all(|line| line.contains("sysctl ")),
        "{said:?}"
    );
    scene.daemon = Some(daemon);
}

#[test]
fn a_capability_that_is_missing_is_named() {
    let scene = Scene::new(0);
    for (capabilities, named) in [
        ("", "CAP_NET_ADMIN and CAP_NET_RAW"),
        (",+net_raw", "CAP_NET_ADMIN"),
        (",+net_admin", "CAP_NET_RAW"),
    ] {
        let (status, log) = start(&scene, capabilities, &[]).ended();
        assert_eq!(status.code(), Some(1), "{log}");
        let told = format!("not permitted without {named}:");
        assert!(log.contains(&told), "{told} {log}");
        assert_eq!(log.matches("ERROR").count(), 1, "{log}");
        assert_eq!(log.matches("WARN").count(), 0, "{log}");
    }
}
