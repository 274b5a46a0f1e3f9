//! Whatever is wrong with what a user gives: one line that names the thing and what to do, an exit code other than 0 where nothing
//! can go on, and everything else served.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};
use tests::daemon::{Daemon, Manifests, binary, service, slice, wait_until};
use tests::netns::{self, Namespace, loopback_up};

const NOBODY: u32 = 65534;

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs the binary to its end, which must come soon.
fn ipvs_proxy(words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.arg("10").arg(binary()).args(words);
    command.output().unwrap()
}

/// It fails with that code and says one line with all of these texts.
fn assert_refused(output: &Output, code: i32, texts: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    for text in texts {
        assert!(said.contains(text), "{text} is not in: {said}");
    }
}

#[test]
fn a_bad_command_line() {
    let manifests = Manifests::new();
    let folder = manifests.path().to_str().unwrap();
    let run = ["run", "--manifests", folder];
    let plan = ["plan", "--node-name", "node", "--manifests", folder];
    let cases: [(&[&str], &[&str], &[&str]); 13] = [
        (&run, &["--no-such-flag"], &["--no-such-flag", "--help"]),
        (&plan, &["--no-such-flag"], &["--no-such-flag", "--help"]),
        (
            &run,
            &["--node-ips", "10.0.0.300"],
            &["--node-ips", "10.0.0.300", "not an IP address"],
        ),
        (
            &run,
            &["--cluster-cidr", "10.0.0.0/33"],
            &["--cluster-cidr", "10.0.0.0/33", "10.244.0.0/16"],
        ),
        (
            &run,
            &["--cluster-cidr", "10.1.0.0/16,10.2.0.0/16"],
            &["--cluster-cidr", "10.2.0.0/16", "at most one"],
        ),
        (
            &plan,
            &["--cluster-cidr", "10.1.0.0/16,10.2.0.0/16"],
            &["--cluster-cidr", "10.2.0.0/16", "at most one"],
        ),
        (
            &run,
            &["--scheduler", "r r"],
            &["--scheduler", "r r", "name"],
        ),
        (
            &run,
            &["--masquerade-all=maybe"],
            &["--masquerade-all", "maybe", "true, false"],
        ),
        (
            &run,
            &["--iptables-backend", "ebpf"],
            &["--iptables-backend", "ebpf", "auto", "nft", "legacy"],
        ),
        (
            &run,
            &["--log-format", "xml"],
            &["--log-format", "xml", "text", "json"],
        ),
        (
            &plan,
            &["--output", "xml"],
            &["--output", "xml", "ipvsadm", "ipset"],
        ),
        (
            &["plan", "--manifests", folder],
            &[],
            &["--node-name", "--help"],
        ),
        (&["no-such-command"], &[], &["no-such-command", "--help"]),
    ];
    for (command, flags, texts) in cases {
        let output = ipvs_proxy(&[command, flags].concat());
        assert_refused(&output, 2, texts);
        assert!(output.stdout.is_empty());
    }
    assert_refused(&ipvs_proxy(&["run"]), 1, &["--manifests"]);
}

#[test]
fn a_scheduler_that_the_kernel_has_not() {
    netns::run(|| {
        let manifests = Manifests::new();
        let folder = manifests.path().to_str().unwrap();
        for scheduler in ["nope", "twos"] {
            let output = ipvs_proxy(&["run", "--manifests", folder, "--scheduler", scheduler]);
            let module = format!("modprobe ip_vs_{scheduler}");
            assert_refused(&output, 1, &[&format!("no scheduler {scheduler}"), &module]);
        }
        assert!(
            Command::new("ip")
                .args(["link", "show", "kube-ipvs0"])
                .output()
                .unwrap()
                .stdout
                .is_empty()
        );
    });
}

#[test]
fn no_privilege() {
    netns::run(|| {
        use std::os::unix::process::CommandExt;
        let manifests = Manifests::new();
        let as_nobody = |program: &Path, words: &[&str]| {
            Command::new(program)
                .args(words)
                .uid(NOBODY)
                .gid(NOBODY)
                .output()
                .unwrap()
        };
        let folder = manifests.path().to_str().unwrap();
        let output = as_nobody(&binary(), &["run", "--manifests", folder]);
        assert_refused(&output, 1, &["CAP_NET_ADMIN"]);
        for words in [["-L", "-n"], ["-S", "-n"]] {
            let real = as_nobody(Path::new("ipvsadm"), &words);
            let ours = as_nobody(&binary(), &["ipvsadm", words[0], words[1]]);
            assert_eq!(
                (text(&ours.stderr), ours.status),
                (text(&real.stderr), real.status)
            );
            assert!(!ours.status.success() && text(&ours.stderr).contains("you must be root"));
        }
        // What asks nothing of the kernel needs no privilege.
        let output = as_nobody(
            &binary(),
            &["plan", "--node-name", "node", "--manifests", folder],
        );
        assert!(output.status.success(), "{output:?}");
    });
}

#[test]
fn no_iptables() {
    netns::run(|| {
        let manifests = Manifests::new();
        let folder = manifests.path().to_str().unwrap();
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(
            Some("tmpfs"),
            "/usr/sbin",
            Some("tmpfs"),
            MsFlags::empty(),
            none,
        )
        .unwrap();
        for backend in ["auto", "nft", "legacy"] {
            let output = ipvs_proxy(&["run", "--manifests", folder, "--iptables-backend", backend]);
            assert_refused(&output, 1, &["iptables", "not in PATH", "install"]);
        }
    });
}

const PORTS: [(&str, &str, u16); 1] = [("", "TCP", 8080)];

fn good(name: &str, vip: &str) -> String {
    let endpoint = "10.0.0.9".parse().unwrap();
    service(name, &[vip], &[("", "TCP", 80, 0)])
        + &slice(name, name, &PORTS, &[(endpoint, true, "node")])
}

/// `plan` of the manifests: its exit code, what it prints, what it says.
fn plan(path: &Path) -> (i32, String, String) {
    let words = [
        "plan",
        "--node-name",
        "node",
        "-o",
        "ipvsadm",
        "--manifests",
        path.to_str().unwrap(),
    ];
    let output = ipvs_proxy(&words);
    (
        output.status.code().unwrap(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

const PLANNED: &str = "-A -t 10.96.0.1:80 -s rr\n-a -t 10.96.0.1:80 -r 10.0.0.9:8080 -m -w 1\n";

/// A wrong object costs itself, or its wrong part: said in one line, the rest is planned, and the plan is a success.
#[test]
fn a_wrong_object_costs_only_itself() {
    let bad_address = service("bad", &["10.96.0.300"], &[("", "TCP", 80, 0)]);
    let wrong_type = good("bad", "10.96.0.2").replacen("port: 80", "port: eighty", 1);
    let no_ports = service("bad", &["10.96.0.2"], &[("", "TCP", 80, 0)])
        + &slice(
            "bad",
            "bad",
            &PORTS,
            &[("10.0.0.9".parse().unwrap(), true, "node")],
        )
        .replacen(
            "ports:\n- name: \"\"\n  protocol: TCP\n  port: 8080",
            "ports: null",
            1,
        );
    let bad_endpoint = service("bad", &["10.96.0.2"], &[("", "TCP", 80, 0)])
        + &slice(
            "bad",
            "bad",
            &PORTS,
            &[("10.0.0.9".parse().unwrap(), true, "node")],
        )
        .replace("10.0.0.9", "10.0.0");
    let no_endpoints = "-A -t 10.96.0.2:80 -s rr\n";
    let cases: [(&str, &[&str], &str); 4] = [
        (
            &bad_address,
            &[
                "Service default/bad",
                "spec.clusterIPs[0]",
                "10.96.0.300",
                "is not an IP address",
            ],
            "",
        ),
        (
            &wrong_type,
            &["Service default/bad", "spec.ports[0].port", "invalid"],
            "",
        ),
        (
            &no_ports,
            &["EndpointSlice default/bad", "ports", "null"],
            no_endpoints,
        ),
        (
            &bad_endpoint,
            &[
                "EndpointSlice default/bad",
                "endpoints[0].addresses[0]",
                "10.0.0",
            ],
            no_endpoints,
        ),
    ];
    for (bad, texts, more) in cases {
        let manifests = Manifests::new();
        manifests.write("all.yaml", &(good("good", "10.96.0.1") + bad));
        let (code, planned, said) = plan(manifests.path());
        assert_eq!((code, planned), (0, format!("{PLANNED}{more}")), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        for text in texts.iter().chain(&["all.yaml:"]) {
            assert!(said.contains(text), "{text} is not in: {said}");
        }
        let line = said
            .split("all.yaml:")
            .nth(1)
            .unwrap()
            .split(':')
            .next()
            .unwrap();
        assert!(line.parse::<u32>().is_ok(), "a line number: {said}");
    }
}

/// What can't be read at all makes the plan fail, and what can be read is planned all the same.
#[test]
fn an_unreadable_file_makes_a_plan_fail() {
    let manifests = Manifests::new();
    manifests.write("good.yaml", &good("good", "10.96.0.1"));
    manifests.write("bad.yaml", "kind: Service\n  apiVersion: v1\n");
    let (code, planned, said) = plan(manifests.path());
    assert_eq!(
        (code, planned.as_str(), said.lines().count()),
        (1, PLANNED, 1),
        "{said}"
    );
    assert!(said.contains("bad.yaml:2"), "{said}");

    let missing = manifests.path().join("missing");
    let (code, planned, said) = plan(&missing);
    assert_eq!(
        (code, planned.as_str(), said.lines().count()),
        (1, "", 1),
        "{said}"
    );
    assert!(
        said.contains(missing.to_str().unwrap()) && said.contains("No such file"),
        "{said}"
    );
}

/// Waits until the daemon has said a line with all of these texts; the line.
fn said(daemon: &Daemon, texts: &[&str]) -> String {
    let has_all = |line: &&str| texts.iter().all(|text| line.contains(text));
    wait_until(&format!("the log names {texts:?}"), || {
        daemon.log().lines().any(|line| has_all(&line))
    });
    daemon
        .log()
        .lines()
        .find(has_all)
        .unwrap_or_default()
        .to_owned()
}

fn serves(node: &Namespace, vip: &str) -> bool {
    node.tool("ipvsadm -S -n")
        .contains(&format!("-a -t {vip}:80 -r 10.0.0.9:8080"))
}

#[test]
fn what_breaks_while_it_runs_stays_in_force_until_it_is_repaired() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    manifests.write("app.yaml", &good("app", "10.96.0.1"));
    manifests.write(
        "bad.yaml",
        &service("bad", &["10.96.0.300"], &[("", "TCP", 80, 0)]),
    );
    let mut daemon = Daemon::start(&node, &manifests, &[]);
    daemon.settle();
    said(
        &daemon,
        &[
            "WARN",
            "bad.yaml:1",
            "Service default/bad",
            "spec.clusterIPs[0]",
            "10.96.0.300",
        ],
    );
    assert!(serves(&node, "10.96.0.1"));

    // No YAML any more: what it said last stays, and others go on.
    manifests.write("app.yaml", "kind: Service\n  apiVersion: v1\n");
    said(
        &daemon,
        &["ERROR", "app.yaml:2", "last good content stays in force"],
    );
    manifests.write("other.yaml", &good("other", "10.96.0.2"));
    wait_until("the other Service is served", || serves(&node, "10.96.0.2"));
    assert!(serves(&node, "10.96.0.1"));

    // Repaired, with another address.
    manifests.write("app.yaml", &good("app", "10.96.0.3"));
    wait_until("the repaired Service is served", || {
        serves(&node, "10.96.0.3")
    });
    wait_until("its old address is not", || !serves(&node, "10.96.0.1"));

    // The whole directory goes: nothing changes, and the daemon says so.
    let aside = manifests.path().with_extension("aside");
    fs::rename(manifests.path(), &aside).unwrap();
    said(
        &daemon,
        &[
            "ERROR",
            manifests.path().to_str().unwrap(),
            "stays in force",
        ],
    );
    assert!(serves(&node, "10.96.0.2") && serves(&node, "10.96.0.3"));
    fs::rename(&aside, manifests.path()).unwrap();
    manifests.write("other.yaml", &good("other", "10.96.0.4"));
    wait_until("it reads the directory again", || {
        serves(&node, "10.96.0.4")
    });
    assert!(daemon.stop().success());
}

#[test]
fn a_directory_that_is_not_there_yet_is_waited_for() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    let aside = manifests.path().with_extension("later");
    fs::rename(manifests.path(), &aside).unwrap();
    let daemon = Daemon::start(&node, &manifests, &[]);
    said(
        &daemon,
        &["ERROR", manifests.path().to_str().unwrap(), "No such file"],
    );
    fs::rename(&aside, manifests.path()).unwrap();
    manifests.write("app.yaml", &good("app", "10.96.0.1"));
    wait_until("it is served", || serves(&node, "10.96.0.1"));
    assert!(daemon.stop().success());
}

/// What is under the mount is not what the manifests said last.
#[test]
fn a_directory_of_manifests_that_is_unmounted() {
    let node = Namespace::new();
    node.enter(loopback_up).unwrap();
    let manifests = Manifests::new();
    let none = None::<&str>;
    let node_ips = ["--node-ips=192.168.10.11"];
    let tmpfs = || {
        let flags = MsFlags::empty();
        mount(Some("tmpfs"), manifests.path(), Some("tmpfs"), flags, none).unwrap();
    };
    tmpfs();
    manifests.write("a.yaml", &good("a", "10.96.0.1"));
    let mut daemon = Daemon::start(&node, &manifests, &node_ips);
    daemon.settle();
    let served = || node.tool("ipvsadm -S -n").contains("10.96.0.1:80");
    assert!(served());
    let said = |daemon: &Daemon, what: &str| wait_until(what, || daemon.log().contains(what));

    umount(manifests.path()).unwrap();
    said(
        &daemon,
        "another directory than before and holds no manifest",
    );
    daemon.settle();
    assert!(served(), "{}", daemon.log());
    // A restart sees the empty directory alone, however often.
    for _ in 0..2 {
        daemon.stop();
        daemon = Daemon::start(&node, &manifests, &node_ips);
        said(
            &daemon,
            "another directory than before and holds no manifest",
        );
        daemon.settle();
        assert!(served(), "{}", daemon.log());
    }
    // Another file system, which the kernel may number as the first.
    tmpfs();
    std::thread::sleep(Duration::from_millis(2500));
    assert!(served(), "{}", daemon.log());
    manifests.write("b.yaml", &good("b", "10.96.0.2"));
    said(&daemon, "is good again");
    wait_until("the other manifests are in force", || {
        node.tool("ipvsadm -S -n").contains("10.96.0.2:80") && !served()
    });
    // A directory that became empty while no daemon ran is none of this.
    daemon.stop();
    fs::remove_file(manifests.path().join("b.yaml")).unwrap();
    let mut daemon = Daemon::start(&node, &manifests, &node_ips);
    daemon.settle();
    wait_until("what nothing names is gone", || {
        !node.tool("ipvsadm -S -n").contains("10.96.0.2:80")
    });
    drop(daemon);
    umount(manifests.path()).unwrap();
}
