//! What other hands change of ours comes back, by the writes that it takes and no others; or, where the daemon shall only
//! report, it stays and is told once.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use tests::daemon::{Daemon, Manifests, service, slice, wait_until};
use tests::netns::Namespace;
use tests::strace::Trace;
use tests::tap::Tap;
use tests::topology::{NODE, Topology, pod_addresses};
use tests::traffic::{Server, http_get};

const TARGET: u16 = 8080;
/// A node with a served Service: two families, a ClusterIP and a node port of each, two endpoints.
pub(crate) struct Scene {
    // First, so that it is gone before what it works on.
    pub(crate) daemon: Daemon,
    topology: Topology,
    trace: Trace,
    _manifests: Manifests,
    _servers: Vec<Server>,
}

impl Scene {
    pub(crate) fn start(flags: &[&str]) -> Scene {
        let topology = Topology::new(2);
        let manifests = Manifests::new();
        manifests.write("web.yaml", &web());
        let trace = Trace::new();
        let [v4, v6] = NODE;
        let node_ips = format!("--node-ips={v4},{v6}");
        let all: Vec<&str> = std::iter::once(node_ips.as_str())
            .chain(flags.iter().copied())
            .collect();
        let mut daemon = Daemon::start_by(topology.node(), &manifests, &trace.by(), &all);
        daemon.settle();
        Scene {
            daemon,
            _servers: [0, 1].map(|pod| topology.serve(pod, TARGET)).into(),
            topology,
            trace,
            _manifests: manifests,
        }
    }

    pub(crate) fn node(&self) -> &Namespace {
        self.topology.node()
    }

    pub(crate) fn all_answer(&self, when: &str) {
        let virtual_servers = [
            "10.96.0.10:80",
            "[fd96::10]:80",
            "192.168.10.11:30080",
            "[fd00:192::11]:30080",
        ];
        for to in virtual_servers {
            let to: SocketAddr = to.parse().unwrap();
            self.topology.outside().enter(|| {
                http_get(to).unwrap_or_else(|error| panic!("{when}: {to}: {error}"));
            });
        }
    }
}

fn web() -> String {
    let ips = ["10.96.0.10", "fd96::10"];
    let mut text = service("web", &ips, &[("", "TCP", 80, 30080)]);
    for family in [0, 1] {
        let endpoints = [0, 1].map(|pod| (pod_addresses(pod)[family], true, "node"));
        let name = format!("web-{family}");
        text.push_str(&slice(&name, "web", &[("", "TCP", TARGET)], &endpoints));
    }
    text
}

/// All that the daemon keeps in the kernel, line by line, without what the kernel chooses or counts.
pub(crate) fn held(node: &Namespace) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let mut add = |of: &str, text: &str| {
        lines.extend(text.lines().map(|line| format!("{of}: {line}")));
    };
    add("ipvs", &node.tool("ipvsadm -Sn"));
    add("ipset", &node.tool("ipset list -o save"));
    for tool in ["iptables-save", "ip6tables-save"] {
        for table in ["mangle", "nat", "filter"] {
            let saved = node.tool(&format!("{tool} -t {table}"));
            let rules: Vec<&str> = saved.lines().filter(|l| l.starts_with("-A")).collect();
            add(&format!("{tool} {table}"), &rules.join("\n"));
        }
    }
    let show = "ip -o address show";
    for line in node.tool(show).lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words[1] == "kube-ipvs0" {
            add("address", words[3]);
        }
    }
    lines
}

/// What is asked for while a change is made and put right.
struct Watch<'a> {
    tap: &'a Tap,
    writes: Vec<String>,
    audits: usize,
}

impl<'a> Watch<'a> {
    fn new(tap: &'a Tap) -> Self {
        tap.take();
        Self {
            tap,
            writes: Vec::new(),
            audits: 0,
        }
    }

    fn take(&mut self) {
        for asked in self.tap.take() {
            // One listing of the virtual servers for each reading of the kernel.
            self.audits += usize::from(asked.text == "ipvs GET_SERVICE");
            self.writes.extend(asked.writes.then_some(asked.text));
        }
    }

    /// Waits until the kernel was read twice more from its beginning.
    fn two_audits(&mut self) {
        self.take();
        let before = self.audits;
        wait_until("two more audits", || {
            self.take();
            self.audits >= before + 2
        });
    }
}

/// Damages, and what is then asked of the kernel: by the damage itself, and by its repair.
const DAMAGES: [(&str, &[&str]); 17] = [
    ("iptables-legacy -t nat -F", &[]),
    ("iptables-legacy -t nat -D PREROUTING 1", &[]),
    ("ip6tables-legacy -t filter -D INPUT 1", &[]),
    (
        "ipset flush KUBE-CLUSTER-IP",
        &["ipset FLUSH KUBE-CLUSTER-IP", "ipset ADD KUBE-CLUSTER-IP"],
    ),
    (
        "ipset flush KUBE-6-IPVS-SERVING",
        &[
            "ipset FLUSH KUBE-6-IPVS-SERVING",
            "ipset ADD KUBE-6-IPVS-SERVING",
        ],
    ),
    // By it the virtual servers of node ports are known as ours.
    (
        "ipset flush KUBE-IPVS-OWNED",
        &["ipset FLUSH KUBE-IPVS-OWNED", "ipset ADD KUBE-IPVS-OWNED"],
    ),
    (
        "ipset add KUBE-NODE-PORT-TCP 31999",
        &[
            "ipset ADD KUBE-NODE-PORT-TCP",
            "ipset DEL KUBE-NODE-PORT-TCP",
        ],
    ),
    (
        "ipvsadm -d -t 10.96.0.10:80 -r 10.0.0.2:8080",
        &[
            // ipvsadm names a weight there, too.
            "ipvs DEL_DEST 10.96.0.10:80 10.0.0.2:8080 weight 1",
            "ipvs NEW_DEST 10.96.0.10:80 10.0.0.2:8080 weight 1",
        ],
    ),
    (
        "ipvsadm -e -t [fd96::10]:80 -r [fd00:10::2]:8080 -m -w 3",
        &[
            "ipvs SET_DEST [fd96::10]:80 [fd00:10::2]:8080 weight 3",
            "ipvs SET_DEST [fd96::10]:80 [fd00:10::2]:8080 weight 1",
        ],
    ),
    (
        "ipvsadm -E -t 192.168.10.11:30080 -s wlc",
        &[
            "ipvs SET_SERVICE 192.168.10.11:30080",
            "ipvs SET_SERVICE 192.168.10.11:30080",
        ],
    ),
    (
        "ipvsadm -D -t [fd96::10]:80",
        &[
            "ipvs DEL_SERVICE [fd96::10]:80",
            "ipvs NEW_SERVICE [fd96::10]:80",
            "ipvs NEW_DEST [fd96::10]:80 [fd00:10::2]:8080 weight 1",
            "ipvs NEW_DEST [fd96::10]:80 [fd00:10::3]:8080 weight 1",
        ],
    ),
    (
        "ipvsadm -C",
        &[
            "ipvs FLUSH",
            "ipvs NEW_SERVICE 10.96.0.10:80",
            "ipvs NEW_SERVICE 192.168.10.11:30080",
            "ipvs NEW_SERVICE [fd00:192::11]:30080",
            "ipvs NEW_SERVICE [fd96::10]:80",
            "ipvs NEW_DEST 10.96.0.10:80 10.0.0.2:8080 weight 1",
            "ipvs NEW_DEST 10.96.0.10:80 10.0.0.3:8080 weight 1",
            "ipvs NEW_DEST 192.168.10.11:30080 10.0.0.2:8080 weight 1",
            "ipvs NEW_DEST 192.168.10.11:30080 10.0.0.3:8080 weight 1",
            "ipvs NEW_DEST [fd00:192::11]:30080 [fd00:10::2]:8080 weight 1",
            "ipvs NEW_DEST [fd00:192::11]:30080 [fd00:10::3]:8080 weight 1",
            "ipvs NEW_DEST [fd96::10]:80 [fd00:10::2]:8080 weight 1",
            "ipvs NEW_DEST [fd96::10]:80 [fd00:10::3]:8080 weight 1",
        ],
    ),
    (
        "ipvsadm -a -t 10.96.0.10:80 -r 10.0.0.99:8080 -m -w 1",
        &[
            "ipvs NEW_DEST 10.96.0.10:80 10.0.0.99:8080 weight 1",
            "ipvs SET_DEST 10.96.0.10:80 10.0.0.99:8080 weight 0",
            "ipvs DEL_DEST 10.96.0.10:80 10.0.0.99:8080",
        ],
    ),
    // The link's messages: 16 new, 17 delete; the addresses': 20 new, 21 delete.
    (
        "ip address del 10.96.0.10/32 dev kube-ipvs0",
        &["route 21", "route 20"],
    ),
    (
        "ip link del kube-ipvs0",
        // `ip` first tries whether the kernel knows RTM_NEWLINK.
        &["route 16", "route 17", "route 16", "route 20", "route 20"],
    ),
    (
        "ip address add 203.0.113.5/32 dev kube-ipvs0",
        &["route 20", "route 21"],
    ),
    (
        "ip address add fd99::5/64 dev kube-ipvs0",
        // The kernel finds it by its own prefix only.
        &["route 20", "route 21", "route 21"],
    ),
];

#[test]
fn what_others_change_comes_back() {
    let scene = Scene::start(&["--sync-period=1s"]);
    let node = scene.node();
    let before = held(node);
    assert!(before.len() > 80, "{before:#?}");
    scene.all_answer("at first");
    let tap = Tap::new(node);
    let mut watch = Watch::new(&tap);
    let restores = || -> Vec<String> {
        let started = scene.trace.started().into_iter();
        started.filter(|call| call.contains("-restore\"")).collect()
    };
    let all_writes = scene.trace.writes().len();
    for (damage, asked) in DAMAGES {
        let known = restores().len();
        let started = Instant::now();
        node.tool(damage);
        // Each damage is there to be seen before its repair, or was repaired already.
        wait_until(&format!("all is as before {damage:?}"), || {
            watch.take();
            watch.writes.len() >= asked.len() && held(node) == before
        });
        println!("{damage}: {} ms", started.elapsed().as_millis());
        scene.all_answer(damage);
        // What is written beyond that shows with the next damage, or at the end.
        watch.take();
        // Each node adds real servers in an order of its own.
        let mut writes = std::mem::take(&mut watch.writes);
        let adds = |write: &String| write.starts_with("ipvs NEW_DEST");
        for same in writes.chunk_by_mut(|a, b| adds(a) == adds(b)) {
            if adds(&same[0]) {
                same.sort_unstable();
            }
        }
        assert_eq!(writes, asked, "{damage}");
        let restored = restores().split_off(known);
        let expected: &[&str] = match damage.split_once(' ') {
            Some(("iptables-legacy", _)) => &["/iptables-legacy-restore\""],
            Some(("ip6tables-legacy", _)) => &["/ip6tables-legacy-restore\""],
            _ => &[],
        };
        assert!(
            restored.len() == expected.len()
                && restored.iter().zip(expected).all(|(a, b)| a.contains(b)),
            "{damage}: {restored:#?}"
        );
    }
    watch.two_audits();
    assert_eq!(watch.writes, [""; 0]);
    // Three times rules were restored, and no sysctl was written.
    assert_eq!(scene.trace.writes().len(), all_writes + 3);
    let log = scene.daemon.log();
    assert!(
        !log.contains("failed=1") && !log.contains("will be tried again"),
        "{log}"
    );
}

/// However long the audit's period is. iptables-legacy tells nobody.
#[test]
fn each_chain_that_is_flushed_is_noticed_without_an_audit() {
    let scene = Scene::start(&["--sync-period=1h"]);
    let node = scene.node();
    let before = held(node);
    for program in ["iptables-legacy", "ip6tables-legacy"] {
        for table in ["mangle", "nat", "filter"] {
            let rules = node.tool(&format!("{program} -t {table} -S"));
            let words = rules.lines().map(|line| line.split(' '));
            let chains: BTreeSet<&str> = words
                .filter(|words| words.clone().any(|word| word.starts_with("KUBE-")))
                .filter_map(|mut words| (words.next() == Some("-A")).then(|| words.next())?)
                .collect();
            assert!(chains.len() >= 4, "{program} {table}: {chains:?}");
            for chain in chains {
                let damage = format!("{program} -t {table} -F {chain}");
                node.tool(&damage);
                wait_until(&format!("all is as before {damage:?}"), || {
                    held(node) == before
                });
            }
        }
    }
    let reads = scene.daemon.log().matches("read the kernel").count();
    assert_eq!(reads, 1, "no audit's time came");
}

#[test]
fn an_audit_of_an_unchanged_kernel_writes_nothing() {
    let scene = Scene::start(&["--sync-period=1s"]);
    let tap = Tap::new(scene.node());
    let (written, log) = (scene.trace.writes(), scene.daemon.log());
    let mut watch = Watch::new(&tap);
    watch.two_audits();
    watch.two_audits();
    assert_eq!(watch.writes, [""; 0]);
    assert_eq!(scene.trace.writes(), written);
    assert_eq!(scene.daemon.log(), log);
}

#[test]
fn addresses_come_back_at_once_whatever_the_period_is() {
    let node_ips = format!("--node-ips={},{}", NODE[0], NODE[1]);
    for flags in [&["--sync-period=1h"][..], &["--sync-period=1h", &node_ips]] {
        let topology = Topology::new(2);
        let node = topology.node();
        let manifests = Manifests::new();
        manifests.write("web.yaml", &web());
        let mut daemon = Daemon::start(node, &manifests, flags);
        daemon.settle();
        let before = held(node);
        for damage in [
            "ip address del 10.96.0.10/32 dev kube-ipvs0",
            "ip address del fd96::10/128 dev kube-ipvs0",
            "ip address add 203.0.113.5/24 dev kube-ipvs0",
            "ip link del kube-ipvs0",
        ] {
            let findings = daemon.log().matches("changed by somebody else").count();
            let started = Instant::now();
            node.tool(damage);
            wait_until(&format!("{flags:?}: all is as before {damage:?}"), || {
                daemon.log().matches("changed by somebody else").count() > findings
                    && held(node) == before
            });
            println!("{flags:?}: {damage}: {} ms", started.elapsed().as_millis());
        }
        // The links of pods come and go all the time: that alone is no reason to read the kernel.
        let tap = Tap::new(node);
        let findings = daemon.log().matches("changed by somebody else").count();
        for number in 0..5 {
            node.tool(&format!("ip link add other{number} type dummy"));
            node.tool(&format!("ip link del other{number}"));
        }
        let mut watch = Watch {
            tap: &tap,
            writes: Vec::new(),
            audits: 0,
        };
        node.tool("ip address add 203.0.113.5/24 dev kube-ipvs0");
        wait_until("the address is gone again", || {
            watch.take();
            watch
                .writes
                .ends_with(&["route 20", "route 21", "route 21"].map(str::to_owned))
        });
        assert_eq!(
            daemon.log().matches("changed by somebody else").count(),
            findings + 1
        );
        // The reading that found it and the one that made sure.
        assert_eq!(watch.audits, 2, "{flags:?}");
    }
}

#[test]
fn a_daemon_that_only_reports_says_each_thing_once_and_writes_nothing() {
    let scene = Scene::start(&["--sync-period=1s", "--drift=report"]);
    let node = scene.node();
    let damages = [
        "ip6tables-legacy -t nat -D PREROUTING 1",
        "ipset flush KUBE-6-CLUSTER-IP",
        "ipvsadm -e -t 10.96.0.10:80 -r 10.0.0.2:8080 -m -w 3",
        "ipvsadm -D -t 192.168.10.11:30080",
        "ipvsadm -a -t 10.96.0.10:80 -r 10.0.0.99:8080 -m -w 1",
        "ip address del fd96::10/128 dev kube-ipvs0",
        "ip address add 203.0.113.5/32 dev kube-ipvs0",
    ];
    for damage in damages {
        node.tool(damage);
    }
    let tap = Tap::new(node);
    let written = scene.trace.writes();
    let damaged = held(node);
    // Its real servers went with a virtual server.
    let findings = [
        (
            "ip6tables rules in table nat",
            "missing: -t nat -A PREROUTING -m comment --comment \"kubernetes service portals\" -m set ! --match-set KUBE-6-IPVS-MARKS dst -j KUBE-SERVICES",
        ),
        ("entry fd96::10,tcp:80 of set KUBE-6-CLUSTER-IP", "missing"),
        ("real server 10.0.0.2:8080 of 10.96.0.10:80/tcp", "changed"),
        ("real server 10.0.0.99:8080 of 10.96.0.10:80/tcp", "added"),
        ("virtual server 192.168.10.11:30080/tcp", "missing"),
        ("address fd96::10 on kube-ipvs0", "missing"),
        ("address 203.0.113.5 on kube-ipvs0", "added"),
    ];
    let told = |what: &str, found: &str| {
        let end = format!("key={what} found={found}");
        let log = scene.daemon.log();
        let lines = log
            .lines()
            .filter(|line| line.contains("changed by somebody else"));
        lines.filter(|line| line.ends_with(&end)).count()
    };
    wait_until("all is told", || {
        findings.iter().all(|(what, found)| told(what, found) > 0)
    });
    let mut watch = Watch::new(&tap);
    watch.two_audits();
    watch.two_audits();
    for (what, found) in findings {
        assert_eq!(told(what, found), 1, "{what}");
    }
    let all = scene.daemon.log();
    assert_eq!(
        all.matches("changed by somebody else").count(),
        findings.len()
    );
    assert_eq!(watch.writes, [""; 0]);
    assert_eq!(scene.trace.writes(), written);
    assert_eq!(held(node), damaged);

    // Put right by hand, and done again: told again.
    for weight in [1, 3] {
        node.tool(&format!(
            "ipvsadm -e -t 10.96.0.10:80 -r 10.0.0.2:8080 -m -w {weight}"
        ));
        Watch::new(&tap).two_audits();
    }
    let (what, found) = findings[2];
    wait_until("it is told again", || told(what, found) == 2);
}

#[test]
fn much_drift_is_told_in_a_few_lines_and_a_sum() {
    let topology = Topology::new(2);
    let node = topology.node();
    let manifests = Manifests::new();
    let endpoints = [0, 1].map(|pod| (pod_addresses(pod)[0], true, "node"));
    let mut text = String::new();
    for number in 1..=40 {
        let (name, vip) = (format!("s{number}"), format!("10.96.1.{number}"));
        text += &service(&name, &[&vip], &[("", "TCP", 80, 0)]);
        text += &slice(&name, &name, &[("", "TCP", TARGET)], &endpoints);
    }
    manifests.write("many.yaml", &text);
    let mut daemon = Daemon::start(node, &manifests, &["--sync-period=1s"]);
    daemon.settle();
    let before = held(node);
    node.tool("ipvsadm -C");
    let lines = || -> Vec<String> {
        let log = daemon.log();
        let lines = log
            .lines()
            .filter(|line| line.contains("changed by somebody else"));
        lines.map(str::to_owned).collect()
    };
    wait_until("all is as before", || {
        !lines().is_empty() && held(node) == before
    });
    let told = lines();
    assert_eq!(told.len(), 11, "{told:#?}");
    let (sum, few) = told.split_last().unwrap();
    for line in few {
        assert!(
            line.contains("service=\"default/s") && line.ends_with(":80/tcp found=missing"),
            "{line}"
        );
    }
    assert!(
        sum.ends_with(
            "much was changed by somebody else findings=40 told=10 kinds=40 virtual servers"
        ),
        "{sum}"
    );
}
