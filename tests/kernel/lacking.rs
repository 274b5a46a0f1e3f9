//! What can't be read or served of one table or family is the fault of that alone.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use tests::daemon::{Daemon, Manifests, binary, service, slice, wait_until};
use tests::netns::Namespace;

use crate::audit::held;
use crate::health::get;

fn web() -> String {
    let mut text = service("web", &["10.96.0.10", "fd96::10"], &[("", "TCP", 80, 0)]);
    for (n, address) in ["10.0.0.2", "fd00:10::2"].into_iter().enumerate() {
        let endpoints = [(address.parse().unwrap(), true, "node")];
        text.push_str(&slice(
            &format!("web-{n}"),
            "web",
            &[("", "TCP", 8080)],
            &endpoints,
        ));
    }
    text
}

/// A folder in front of PATH. Gone with this value.
struct Tools(PathBuf);

impl Tools {
    /// In it, a tool is this script first.
    fn with(name: &str, tool: &str, script: &str) -> Tools {
        let folder = std::env::temp_dir().join(format!("tools-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join(tool);
        let text = format!("#!/bin/sh\n{script}\nexec /usr/sbin/{tool} \"$@\"\n");
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        Tools(folder)
    }

    fn path(&self) -> String {
        format!("{}:{}", self.0.display(), std::env::var("PATH").unwrap())
    }
}

impl Drop for Tools {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn ask(node: &Namespace, tools: Option<&Tools>, words: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(words);
    if let Some(tools) = tools {
        command.env("PATH", tools.path());
    }
    node.enter(|| command.output()).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

const NODE_IPS: &str = "--node-ips=192.168.10.11,fd00:192::11";

#[test]
fn a_table_that_iptables_cannot_show_stops_nothing_else() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web());
    let mut daemon = Daemon::start(&node, &manifests, &[NODE_IPS, "--iptables-backend=legacy"]);
    daemon.settle();
    assert!(daemon.stop().success());
    let incompatible = Tools::with(
        "incompatible",
        "iptables-legacy-save",
        "case \"$*\" in *filter*) echo '# Table `filter'\"'\"' is incompatible, use '\"'\"'nft'\"'\"' tool.'; exit;; esac",
    );
    let folder = manifests.path().to_str().unwrap();
    let plan = [
        "plan",
        "--manifests",
        folder,
        "--node-name=node",
        NODE_IPS,
        "--diff",
    ];
    let output = ask(&node, Some(&incompatible), &plan);
    let why = "incompatible, use 'nft' tool";
    assert_eq!(
        (output.status.code(), said(&output).lines().count()),
        (Some(1), 1),
        "{output:?}"
    );
    assert!(said(&output).contains(why), "{output:?}");

    let output = ask(
        &node,
        Some(&incompatible),
        &["cleanup", "--iptables-backend=legacy"],
    );
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("iptables rules in table filter: ") && text.contains(why),
        "{text}"
    );
    // All but what the rules of that table look into.
    let left = held(&node);
    let is_of = |of: &str| left.iter().filter(|line| line.starts_with(of)).count();
    assert_eq!(
        (is_of("ipvs"), is_of("address"), is_of("iptables-save nat")),
        (0, 0, 0),
        "{left:#?}"
    );
    assert_eq!(is_of("ip6tables-save"), 0, "{left:#?}");
    assert!(is_of("iptables-save filter") > 0, "{left:#?}");
    assert_eq!(is_of("ipset: create"), 4, "{left:#?}");

    let output = ask(&node, None, &["cleanup", "--iptables-backend=legacy"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(held(&node).len(), 0);
}

#[test]
fn a_tool_that_hangs_is_no_longer_waited_for() {
    let node = Namespace::new();
    let hanging = Tools::with(
        "hanging",
        "iptables-legacy-save",
        "case \"$*\" in *nat*) sleep 1000;; esac",
    );
    let started = Instant::now();
    let output = ask(
        &node,
        Some(&hanging),
        &["cleanup", "--iptables-backend=legacy"],
    );
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let why = "iptables-legacy-save did not end within 10s and was killed";
    assert!(
        text.contains(&format!("iptables rules in table nat: {why}")),
        "{text}"
    );
    // For reading, and for who holds a chain.
    assert!(
        started.elapsed() < Duration::from_secs(30),
        "{:?}",
        started.elapsed()
    );
}

/// A daemon that starts while iptables hangs serves what needs no change of a rule, says what waits, ends when it is asked to,
/// and does the rest when iptables answers.
#[test]
fn a_start_waits_for_no_tool_that_hangs() {
    let node = Namespace::new();
    node.enter(|| tests::netns::loopback_up().unwrap());
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web());
    let hangs = manifests.path().with_extension("hangs");
    let script = format!("[ ! -e {} ] || sleep 1000", hangs.display());
    let tools = Tools::with("start", "iptables-legacy", &script);
    let path = format!("PATH={}", tools.path());
    let start = || {
        let flags = [NODE_IPS, "--iptables-backend=legacy"];
        Daemon::start_by(&node, &manifests, &["env", &path], &flags)
    };
    let health = || get(&node, "127.0.0.1:10256", "/readyz?verbose").unwrap_or_default();
    let ends = |daemon: Daemon| {
        let asked = Instant::now();
        assert!(daemon.stop().success());
        assert!(
            asked.elapsed() < Duration::from_secs(3),
            "{:?}",
            asked.elapsed()
        );
    };
    let servers = || node.tool("ipvsadm -Ln");
    // The first one ever: nothing is bound that no rule guards.
    fs::write(&hangs, "").unwrap();
    let daemon = start();
    wait_until("virtual servers are there", || {
        servers().contains("10.0.0.2:8080")
    });
    wait_until("health says why", || {
        let (code, text) = health();
        code == 503 && text.contains(": iptables-legacy did not end within 3s and was killed")
    });
    assert!(!held(&node).contains("address: 10.96.0.10/32"));
    ends(daemon);
    let mut daemon = start();
    thread::sleep(Duration::from_secs(2));
    fs::remove_file(&hangs).unwrap();
    wait_until("all is in force", || {
        held(&node).contains("address: 10.96.0.10/32")
    });
    wait_until("it is ready", || health().0 == 200);
    assert!(daemon.runs());
    daemon.crash();
    // One after another: endpoints change as ever.
    fs::write(&hangs, "").unwrap();
    let daemon = start();
    manifests.write("web.yaml", &web().replace("10.0.0.2", "10.0.0.3"));
    let began = Instant::now();
    wait_until("an endpoint is changed", || {
        servers().contains("10.0.0.3:8080")
    });
    assert!(
        began.elapsed() < Duration::from_secs(3),
        "{:?}",
        began.elapsed()
    );
    assert!(held(&node).contains("address: 10.96.0.10/32"));
    ends(daemon);
    fs::remove_file(&hangs).unwrap();
}

#[test]
fn no_back_end_is_chosen_by_guess_while_a_tool_hangs() {
    let node = Namespace::new();
    for (tool, hang) in [
        ("iptables-nft", ""),
        ("iptables-nft-save", "exec 2>&1; yes;"),
    ] {
        let hanging = Tools::with(tool, tool, &format!("{hang} sleep 1000"));
        let started = Instant::now();
        let output = ask(&node, Some(&hanging), &["cleanup"]);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{tool}: {text}");
        let why = "which back end of iptables the host uses can't be found out: ";
        assert!(
            text.contains(&format!("{why}{tool}")) && text.contains("--iptables-backend"),
            "{tool}: {text}"
        );
        assert!(
            started.elapsed() < Duration::from_secs(12),
            "{tool}: {:?}",
            started.elapsed()
        );
    }
}

#[test]
fn a_node_without_ipv6_serves_ipv4_and_says_why_once() {
    let node = Namespace::new();
    node.sysctl("ipv6/conf/all/disable_ipv6", "1");
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web());
    let folder = manifests.path().to_str().unwrap().to_owned();
    let plan = [
        "plan",
        "--manifests",
        &folder,
        "--node-name=node",
        NODE_IPS,
        "--diff",
    ];
    let why = "IPv4 only: the sysctl net.ipv6.conf.default.disable_ipv6 is 1: addresses can't be bound to kube-ipvs0";
    let init = [
        "run",
        "--manifests",
        &folder,
        NODE_IPS,
        "--init-only",
        "--conntrack-max-per-core=0",
    ];
    let output = ask(&node, None, &init);
    let text = said(&output);
    assert!(output.status.success() && text.contains(why), "{text}");
    let mut daemon = Daemon::start(&node, &manifests, &[NODE_IPS]);
    daemon.settle();
    let log = daemon.log();
    // The link is there by now.
    let why = why.replace("default", "kube-ipvs0");
    assert_eq!(log.matches(&why).count(), 1, "{log}");
    assert_eq!(log.matches("WARN").count(), 1, "{log}");
    let there = held(&node);
    assert!(there.contains("address: 10.96.0.10/32"), "{there:#?}");
    assert!(
        !there
            .iter()
            .any(|line| line.contains("fd96::10") || line.contains("KUBE-6-")),
        "{there:#?}"
    );
    let output = ask(&node, None, &plan);
    assert_eq!(
        (output.status.code(), said(&output).trim()),
        (Some(0), why.as_str())
    );
    assert!(daemon.stop().success());
    let output = ask(&node, None, &["cleanup"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(held(&node).len(), 0);
}
