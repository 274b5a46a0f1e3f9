//! The configuration file and the flags of kube-proxy in a real kernel: what needs privilege first, timeouts, a file that changes.

use std::fs;
use std::process::{Command, Output};

use tests::daemon::{Daemon, Manifests, binary, wait_until};
use tests::netns::{self, Namespace};

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// Not the machine's own numbers: they can be written in the first network namespace only.
const LEAVE_MAX: &str = "conntrack: {maxPerCore: 0, udpTimeout: 77s}\n";

fn ipvs_proxy(words: &[&str]) -> Output {
    Command::new(binary()).args(words).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A file of configuration in a folder of its own.
fn file(manifests: &Manifests, text: &str) -> String {
    manifests.write("config.conf", &format!("{HEAD}{text}"));
    let path = manifests.path().join("config.conf");
    path.to_str().unwrap().to_owned()
}

fn sysctl(name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap();
    text.trim().to_owned()
}

fn timeouts(node: &Namespace) -> String {
    let text = node.tool("ipvsadm -L --timeout");
    text.trim().rsplit_once(": ").unwrap().1.to_owned()
}

#[test]
fn init_only_sets_up_what_needs_privilege_and_ends() {
    netns::run(|| {
        let folder = Manifests::new();
        let text = format!(
            "{LEAVE_MAX}ipvs: {{scheduler: sh, strictARP: true, tcpTimeout: 2h, udpTimeout: 30s}}\n"
        );
        let config = file(&folder, &text);
        assert_eq!(sysctl("ipv4/vs/conntrack"), "0");
        let output = ipvs_proxy(&["run", "--init-only", "--config", &config]);
        assert!(output.status.success(), "{}", said(&output));
        for (name, value) in [
            ("ipv4/vs/conntrack", "1"),
            ("ipv4/vs/expire_nodest_conn", "1"),
            ("ipv4/ip_forward", "1"),
            ("ipv4/conf/all/arp_ignore", "1"),
            ("ipv4/conf/all/arp_announce", "2"),
            ("netfilter/nf_conntrack_tcp_timeout_established", "86400"),
            ("netfilter/nf_conntrack_tcp_timeout_close_wait", "3600"),
            ("netfilter/nf_conntrack_udp_timeout", "77"),
        ] {
            assert_eq!(sysctl(name), value, "{name}");
        }
        let tool = |words: &[&str]| {
            let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
            assert!(output.status.success(), "{words:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(tool(&["ip", "-d", "link", "show", "kube-ipvs0"]).contains("dummy"));
        assert!(tool(&["ipset", "list", "-n"]).contains("KUBE-CLUSTER-IP\n"));
        assert!(tool(&["ipvsadm", "-L", "--timeout"]).contains("7200 120 30"));
        // It does not serve, nor guard.
        assert!(!tool(&["iptables-save"]).contains("KUBE-"));
        // A second time there is nothing to do, and one that can't be made is named.
        assert!(
            ipvs_proxy(&["run", "--init-only", "--config", &config])
                .status
                .success()
        );
        tool(&["ip", "link", "del", "kube-ipvs0"]);
        tool(&["ip", "link", "add", "kube-ipvs0", "type", "bridge"]);
        let output = ipvs_proxy(&["run", "--init-only", "--config", &config]);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains("kube-ipvs0"), "{}", said(&output));
        let scheduler = ["--scheduler=nope"];
        let words = [&["run", "--init-only", "--config", &config][..], &scheduler].concat();
        let output = ipvs_proxy(&words);
        assert!(
            said(&output).contains("no scheduler nope"),
            "{}",
            said(&output)
        );
    });
}

/// K02: timeouts are set, come back when somebody changes them, and stay when nobody asks for any.
#[test]
fn k02_timeouts_are_kept() {
    let node = Namespace::new();
    let (manifests, folder) = (Manifests::new(), Manifests::new());
    let config = file(&folder, "ipvs: {tcpTimeout: 7200s, udpTimeout: 30s}\n");
    let flags = ["--config", &config, "--sync-period=300ms"];
    let mut daemon = Daemon::start(&node, &manifests, &flags);
    daemon.settle();
    assert_eq!(timeouts(&node), "7200 120 30");
    node.tool("ipvsadm --set 900 60 300");
    // What was left alone is.
    wait_until("the timeouts come back", || timeouts(&node) == "7200 60 30");
    assert!(daemon.stop().success());
    let mut daemon = Daemon::start(&node, &manifests, &["--sync-period=300ms"]);
    daemon.settle();
    assert_eq!(timeouts(&node), "7200 60 30");
}

/// The process ends well, so that it is started again, when its file says something else; not when the file says the same, nor
/// when it says nothing that can be.
#[test]
fn a_changed_file_ends_the_daemon() {
    let node = Namespace::new();
    let (manifests, folder) = (Manifests::new(), Manifests::new());
    let config = file(&folder, "ipvs: {scheduler: lc}\n");
    let mut daemon = Daemon::start(&node, &manifests, &["--config", &config]);
    daemon.settle();
    file(&folder, "# the same\nipvs: {scheduler: lc}\n");
    file(&folder, "ipvs: {scheduler: l c}\n");
    let wrong = "ipvs.scheduler (--scheduler)";
    wait_until("it says what is wrong", || daemon.log().contains(wrong));
    assert!(daemon.log().contains("stays in force"), "{}", daemon.log());
    daemon.settle();
    file(&folder, "ipvs: {scheduler: sh}\n");
    let (status, log) = daemon.ended();
    assert!(status.success(), "{log}");
    assert!(log.contains("the configuration changed"), "{log}");
}

#[test]
fn a_file_of_configuration_is_written() {
    let folder = Manifests::new();
    let path = folder.path().join("written.yaml");
    let written = path.to_str().unwrap();
    let config = file(&folder, "mode: ipvs\nresourceContainer: /kube-proxy\n");
    let output = ipvs_proxy(&[
        "run",
        "--config",
        &config,
        "--ipvs_scheduler=sh",
        "--write-config-to",
        written,
    ]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("resourceContainer"),
        "{}",
        said(&output)
    );
    let text = fs::read_to_string(&path).unwrap();
    for line in [
        "  scheduler: sh",
        "  syncPeriod: 30s",
        "  masqueradeBit: 14",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}: {text}");
    }
    let again = folder.path().join("again.yaml");
    let words = [
        "run",
        "--config",
        written,
        "--write-config-to",
        again.to_str().unwrap(),
    ];
    assert_eq!(said(&ipvs_proxy(&words)), "");
    assert_eq!(fs::read_to_string(again).unwrap(), text);
}
