//! Modules that the kernel lacks or loses while the product works. They are all namespaces' at once, so these tests have a guest of
//! their own: `hack/test bare`.

// clippy.toml allows these in test functions; what they call is test code as well.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use ipvs_netlink::{Scheduler, VirtualServerKey};
use ipvs_proxy_core::op::{Dataplane as _, Failure, FailureKind, Op, Outcome};
use ipvs_proxy_core::state::{Key, State, Value};
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_iptables::Choice;
use ipvs_proxy_netlink::Family;
use tests::daemon::{Daemon, Manifests, binary, service, slice, wait_until};
use tests::netns::Namespace;

use servers::{SET, adds, server};

#[path = "../kernel/servers.rs"]
mod servers;

/// Modules that modprobe does not load, as long as this value lives.
struct Lacking(&'static str);

impl Lacking {
    /// Unloads them, too.
    fn new(modules: &'static [&'static str]) -> Lacking {
        tests::require_guest();
        let file = "/etc/modprobe.d/lacking.conf";
        let lines = modules
            .iter()
            .map(|name| format!("install {name} /bin/false\n"));
        fs::write(file, lines.collect::<String>()).unwrap();
        modules.iter().for_each(|name| unload(name));
        Lacking(file)
    }
}

impl Drop for Lacking {
    fn drop(&mut self) {
        fs::remove_file(self.0).unwrap();
    }
}

fn unload(module: &str) {
    if Path::new("/sys/module").join(module).exists() {
        let output = Command::new("rmmod").arg(module).output().unwrap();
        assert!(output.status.success(), "{module}: {output:?}");
    }
}

/// IPVS with all that rests on it.
fn unload_ipvs() {
    let loaded = fs::read_to_string("/proc/modules").unwrap();
    let names = loaded.lines().map(|line| line.split(' ').next().unwrap());
    names
        .filter(|name| name.starts_with("ip_vs_"))
        .for_each(unload);
    unload("xt_ipvs");
    unload("ip_vs");
}

fn failure(outcome: &Outcome) -> &Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ipvs_that_was_unloaded_serves_again_when_it_can() {
    let node = Namespace::new();
    node.enter(|| {
        let mut kernel = Kernel::open(&[Family::V4], Choice::Legacy).unwrap();
        let base = State::from([(Key::Set(SET), Value::Present), (Key::Link, Value::Present)]);
        let done =
            |outcomes: Vec<Outcome>| outcomes.iter().all(|outcome| *outcome == Outcome::Done);
        assert!(done(kernel.apply(&adds(&base))));
        let servers = server(1, 2);
        assert!(done(kernel.apply(&adds(&servers))));
        let ours: Vec<VirtualServerKey> = servers
            .keys()
            .filter_map(|key| match key {
                Key::VirtualServer(server) => Some(*server),
                _ => None,
            })
            .collect();
        let of_ipvs: Vec<Op> = adds(&servers)
            .into_iter()
            .filter(|op| matches!(op.key(), Key::VirtualServer(_) | Key::RealServer(..)))
            .collect();

        // By an update of the module.
        let module = kernel.glance(&ours).unwrap().module;
        node.tool("ipvsadm -C");
        unload_ipvs();
        node.tool("modprobe ip_vs");
        let glance = kernel.glance(&ours).unwrap();
        assert_eq!(glance.missing.len(), 1);
        assert_ne!(glance.module, module);
        assert!(done(kernel.apply(&of_ipvs)));
        let read = kernel.read(&State::new()).unwrap();
        assert!(
            servers.keys().all(|key| read.state.contains_key(key)),
            "{read:?}"
        );

        // It is not there for a while.
        node.tool("ipvsadm -C");
        unload_ipvs();
        let lacking = Lacking::new(&["ip_vs"]);
        for outcome in kernel.apply(&of_ipvs) {
            let failure = failure(&outcome);
            assert_eq!(failure.kind, FailureKind::Node);
            assert!(failure.text.contains("modprobe ip_vs"), "{failure}");
        }
        for error in [
            kernel.glance(&ours).unwrap_err(),
            kernel.read(&State::new()).unwrap_err(),
            kernel.connections(ours[0]).unwrap_err(),
        ] {
            assert!(error.to_string().contains("modprobe ip_vs"), "{error}");
        }
        drop(lacking);
        wait_until("it can be used again", || done(kernel.apply(&of_ipvs)));
        assert_eq!(kernel.glance(&ours).unwrap().missing.len(), 0);
        node.tool("ipvsadm -C");
    });
}

#[test]
fn a_scheduler_that_is_missing_is_a_fault_of_the_node() {
    Namespace::new().enter(|| {
        let mut kernel = Kernel::open(&[Family::V4], Choice::Legacy).unwrap();
        let _lacking = Lacking::new(&["ip_vs_lblc"]);
        for (key, value) in server(1, 0) {
            if let Value::VirtualServer(server) = value {
                let mut server = (*server).clone();
                server.scheduler = Scheduler::LocalityLeastConnection;
                let add = Op::Add(key, Value::VirtualServer(server.into()));
                let outcome = kernel.apply(&[add]).remove(0);
                assert_eq!(failure(&outcome).kind, FailureKind::Node, "{outcome:?}");
            }
        }
    });
}

const NODE_IPS: &str = "--node-ips=192.168.10.11,fd00:192::11";

fn ask(node: &Namespace, words: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(binary());
    let Output {
        status,
        stdout,
        stderr,
    } = node.enter(|| command.args(words).output()).unwrap();
    let said = [stdout, stderr].concat();
    (status.code(), String::from_utf8(said).unwrap())
}

#[test]
fn without_a_table_of_ipv6_ipv4_is_served() {
    let _lacking = Lacking::new(&["ip6table_nat"]);
    let node = Namespace::new();
    let manifests = Manifests::new();
    let mut text = service("web", &["10.96.0.10", "fd96::10"], &[("", "TCP", 80, 0)]);
    let endpoint = [("10.0.0.2".parse().unwrap(), true, "node")];
    text.push_str(&slice("web", "web", &[("", "TCP", 8080)], &endpoint));
    manifests.write("web.yaml", &text);
    let folder = manifests.path().to_str().unwrap();
    let why = "IPv4 only: ip6tables-legacy-save: the kernel has no table nat: ";
    let words = [
        "run",
        "--manifests",
        folder,
        NODE_IPS,
        "--init-only",
        "--conntrack-max-per-core=0",
    ];
    let (code, said) = ask(&node, &words);
    assert_eq!((code, said.matches(why).count()), (Some(0), 1), "{said}");
    let mut daemon = Daemon::start(&node, &manifests, &[NODE_IPS]);
    daemon.settle();
    let log = daemon.log();
    assert_eq!(
        (log.matches(why).count(), log.matches("WARN").count()),
        (1, 1),
        "{log}"
    );
    assert!(
        node.tool("ipvsadm -Sn")
            .contains("-a -t 10.96.0.10:80 -r 10.0.0.2:8080")
    );
    assert!(
        node.tool("iptables-legacy-save -t nat")
            .contains("KUBE-SERVICES")
    );
    let (code, said) = ask(
        &node,
        &[
            "plan",
            "--manifests",
            folder,
            "--node-name=node",
            NODE_IPS,
            "--diff",
        ],
    );
    assert!(
        code == Some(0) && said.contains(why) && said.lines().count() == 1,
        "{said}"
    );
    assert!(daemon.stop().success());
    assert_eq!(ask(&node, &["cleanup"]).0, Some(0));
    assert_eq!(node.tool("ipvsadm -Sn") + &node.tool("ipset save"), "");
}
