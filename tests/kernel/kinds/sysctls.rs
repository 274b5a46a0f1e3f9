//! Sysctls that can't be written, and sysctls that somebody changes.

use std::fs;

use tests::daemon::{Daemon, wait_up_to};
use tests::traffic::http_get;

use super::{CLUSTER_CIDR, Scene, vips, web};

const CONNTRACK: &str = "/proc/sys/net/ipv4/vs/conntrack";

#[test]
fn a_read_only_proc_sys_is_a_finding() {
    let scene = Scene::new(2);
    scene.manifests.write("web.yaml", &web(""));
    scene.endpoints(&[0]);
    let node = scene.topology.node();
    assert_eq!(node.enter(|| fs::read_to_string(CONNTRACK).unwrap()), "0\n");
    // As in a container that is not privileged.
    let read_only = "mount -o bind,ro /proc/sys /proc/sys && exec \"$@\"";
    let by = ["unshare", "-m", "sh", "-c", read_only, "sh"];
    let flags = [CLUSTER_CIDR, "--sync-period=300ms"];
    let mut daemon = Daemon::start_by(node, &scene.manifests, &by, &flags);
    daemon.settle();
    let log = daemon.log();
    for name in [
        "conntrack",
        "expire_nodest_conn",
        "expire_quiescent_template",
    ] {
        let finding = format!("sysctl net.ipv4.vs.{name} is \"0\" and must be \"1\"");
        assert!(log.contains(&finding), "{finding}: {log}");
    }
    assert!(log.contains("sysctl -w net.ipv4.vs.conntrack=1"), "{log}");
    assert!(!log.contains("net.ipv4.ip_forward"), "it is right: {log}");
    assert_eq!(scene.servers("-t", vips()[0]), Some([(0, 1)].into()));
    // A pod needs no masquerading, so it is served all the same.
    let answer = scene.topology.pod(1).enter(|| http_get(vips()[0]));
    assert_eq!(answer.unwrap().name, "pod0");

    // The finding is told once, not with every audit: a drift shows that there was one.
    let [vip, _] = vips();
    node.tool(&format!("ipvsadm -d -t {vip} -r 10.0.0.2:8080"));
    scene.await_servers("-t", vip, &[(0, 1)]);
    node.tool(&format!("ipvsadm -d -t {vip} -r 10.0.0.2:8080"));
    scene.await_servers("-t", vip, &[(0, 1)]);
    let told = daemon
        .log()
        .matches("sysctl net.ipv4.vs.conntrack is")
        .count();
    assert_eq!(told, 1, "{}", daemon.log());
}

#[test]
fn a_sysctl_that_somebody_changes_comes_back() {
    let scene = Scene::web(2, &[0], "", &["--sync-period=1s"]);
    let node = scene.topology.node();
    let read = |path: &str| node.enter(|| fs::read_to_string(path).unwrap());
    assert_eq!(read(CONNTRACK), "1\n");
    for path in [CONNTRACK, "/proc/sys/net/ipv4/vs/expire_nodest_conn"] {
        node.sysctl(path.strip_prefix("/proc/sys/net/").unwrap(), "0");
        wait_up_to(std::time::Duration::from_secs(4), path, || {
            read(path) == "1\n"
        });
    }
    // Masquerading works: it needs the first of them.
    let answer = scene.topology.outside().enter(|| http_get(vips()[0]));
    assert_eq!(answer.unwrap().peer.ip(), tests::topology::BRIDGE[0]);
}
