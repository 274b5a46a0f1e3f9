//! `ipvs-proxy cleanup` takes all of ours and nothing else, `plan --diff` says where the kernel differs, and what other software
//! has in the same tables is as it was, whatever the daemon does.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output};

use ipvs_proxy_core::state::Set;
use ipvs_proxy_netlink::Family;
use tests::daemon::{Daemon, Manifests, binary, service, slice, wait_until};
use tests::netns::Namespace;
use tests::topology::{NODE, Topology, pod_addresses};
use tests::traffic::http_get;

/// The chains that are ours.
const CHAINS: [&str; 7] = [
    "KUBE-SERVICES",
    "KUBE-LOAD-BALANCER",
    "KUBE-NODE-PORT",
    "KUBE-MARK-MASQ",
    "KUBE-POSTROUTING",
    "KUBE-IPVS-FILTER",
    "KUBE-FORWARD",
];
/// Those in mangle.
const MANGLE: [&str; 2] = ["KUBE-IPVS-ROUTE", "KUBE-IPVS-MASQ"];

/// Things of other software in each place where the daemon has its own, some with names much like ours.
const FOREIGN: [&str; 30] = [
    "ip link add other0 type dummy",
    "ip link set other0 up",
    "ip address add 203.0.113.201/32 dev other0",
    "ip address add fd99::201/128 dev other0 nodad",
    "ipvsadm -A -t 203.0.113.200:6443 -s wrr -p 60",
    "ipvsadm -a -t 203.0.113.200:6443 -r 10.1.0.1:6443 -m -w 7",
    "ipvsadm -a -t 203.0.113.200:6443 -r 10.1.0.2:6443 -g -w 3",
    // On the node's own address
    "ipvsadm -A -u 192.168.10.11:53 -s lc",
    "ipvsadm -a -u 192.168.10.11:53 -r 10.1.0.3:53 -m -w 1",
    "ipvsadm -A -f 7 -s rr",
    "ipvsadm -a -f 7 -r 10.1.0.4:0 -m -w 2",
    "ipvsadm -A -f 8 -6 -s rr",
    "ipvsadm -a -f 8 -6 -r [fd00:1::4]:0 -m -w 2",
    "ipset create MINE hash:ip",
    "ipset add MINE 198.51.100.1",
    "ipset create KUBE-6-MINE hash:ip,port family inet6 timeout 3000",
    "ipset create KUBE-SERVICES list:set",
    "ipset add KUBE-SERVICES MINE",
    "iptables-legacy -N KUBE-FIREWALL",
    "iptables-legacy -A KUBE-FIREWALL -s 198.51.100.0/24 -j DROP",
    "iptables-legacy -A INPUT -j KUBE-FIREWALL",
    "iptables-legacy -A INPUT -m set --match-set MINE src -j ACCEPT",
    "iptables-legacy -P FORWARD DROP",
    "iptables-legacy -t nat -N MINE-DNAT",
    "iptables-legacy -t nat -A MINE-DNAT -p tcp -m tcp --dport 9999 -j DNAT --to-destination 10.1.0.5:99",
    "iptables-legacy -t nat -A PREROUTING -j MINE-DNAT",
    // A chain of our name, in a table where we have none
    "iptables-legacy -t mangle -N KUBE-SERVICES",
    "iptables-legacy -t mangle -A PREROUTING -j KUBE-SERVICES",
    "ip6tables-legacy -A INPUT -p tcp -m tcp --dport 9999 -j REJECT",
    "ip6tables-legacy -t nat -A PREROUTING -p tcp -m tcp --dport 9999 -j REDIRECT --to-ports 99",
];

fn web(node_port: u16, pods: &[u8]) -> String {
    let ips = ["10.96.0.10", "fd96::10"];
    let ports = [("tcp", "TCP", 80, node_port), ("udp", "UDP", 80, node_port)];
    let mut text = service("web", &ips, &ports);
    for family in [0, 1] {
        let endpoints: Vec<_> = pods
            .iter()
            .map(|pod| (pod_addresses(*pod)[family], true, "node"))
            .collect();
        let ports = [("tcp", "TCP", 8080), ("udp", "UDP", 8080)];
        text.push_str(&slice(&format!("web-{family}"), "web", &ports, &endpoints));
    }
    text
}

fn node_ips() -> String {
    format!("--node-ips={},{}", NODE[0], NODE[1])
}

/// A subcommand of the daemon's binary in a node's namespace.
fn ask(node: &Namespace, words: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(words);
    node.enter(|| command.output()).unwrap()
}

/// Runs `cleanup`; its exit code and what it says.
fn cleanup(node: &Namespace) -> (i32, String) {
    let output = ask(node, &["cleanup"]);
    assert!(output.stdout.is_empty(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), said)
}

/// What each tool prints of the kernel, in its order, without counters and comments.
fn kernel(node: &Namespace) -> BTreeMap<String, Vec<String>> {
    let mut lines: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut add = |of: &str, text: &str| {
        let kept = text.lines().filter(|line| !line.starts_with('#'));
        let uncounted = kept.map(|line| match line.starts_with(':') {
            true => line.split(" [").next().unwrap().to_owned(),
            false => line.to_owned(),
        });
        lines.insert(of.to_owned(), uncounted.collect());
    };
    add("ipvs", &node.tool("ipvsadm -Sn"));
    add("ipset", &node.tool("ipset save"));
    add("links", &node.tool("ip -o address show"));
    for tool in ["iptables-legacy-save", "ip6tables-legacy-save"] {
        for table in ["raw", "mangle", "nat", "filter"] {
            add(
                &format!("{tool} {table}"),
                &node.tool(&format!("{tool} -t {table}")),
            );
        }
    }
    // The table's order is that of its hash.
    lines.get_mut("ipvs").unwrap().sort_unstable();
    // Times go on.
    for line in lines.values_mut().flatten() {
        *line = line.split(" valid_lft").next().unwrap().to_owned();
    }
    lines
}

/// The same without what is ours by its name or address.
fn foreign(node: &Namespace) -> BTreeMap<String, Vec<String>> {
    let sets: BTreeSet<String> = Family::ALL
        .into_iter()
        .flat_map(Set::all)
        .map(|set| set.name().as_str().to_owned())
        .collect();
    let servers = [
        "10.96.0.10:80",
        "[fd96::10]:80",
        "10.96.7.7:80",
        "192.168.10.11:30080",
        "[fd00:192::11]:30080",
        "192.168.10.11:30081",
        "[fd00:192::11]:30081",
    ];
    let mut lines = kernel(node);
    for (of, lines) in &mut lines {
        lines.retain(|line| {
            let mut words = line.split([' ', ':']);
            match of.as_str() {
                "ipvs" => !servers
                    .iter()
                    .any(|server| line.contains(&format!(" {server} "))),
                "ipset" => !words.nth(1).is_some_and(|name| sets.contains(name)),
                "links" => !line.contains("kube-ipvs0"),
                table if table.ends_with("nat") || table.ends_with("filter") => {
                    !words.any(|word| CHAINS.contains(&word))
                }
                table if table.ends_with("mangle") => !words.any(|word| MANGLE.contains(&word)),
                _ => true,
            }
        });
    }
    lines
}

fn ours(node: &Namespace) -> BTreeMap<String, Vec<String>> {
    let foreign = foreign(node);
    let mut lines = kernel(node);
    for (of, lines) in &mut lines {
        lines.retain(|line| !foreign[of].contains(line));
    }
    lines.retain(|_, lines| !lines.is_empty());
    lines
}

#[test]
fn what_is_not_ours_stays_as_it_was() {
    let topology = Topology::new(3);
    let node = topology.node();
    for line in FOREIGN {
        node.tool(line);
    }
    let _servers = [0, 1, 2].map(|pod| topology.serve(pod, 8080));
    // Tables that nobody asked for exist from here on.
    let before = kernel(node);
    assert!(
        before["ipvs"].len() == 9 && before["iptables-legacy-save nat"].len() > 8,
        "{before:#?}"
    );
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web(30080, &[0, 1]));
    let flags = [&node_ips(), "--sync-period=1s"];
    let mut daemon = Daemon::start(node, &manifests, &flags);
    daemon.settle();
    let started = ours(node);
    assert!(started.len() >= 7, "{started:#?}");
    assert_eq!(foreign(node), before, "after the start");

    let vip = "10.96.0.10:80".parse().unwrap();
    topology.outside().enter(|| http_get(vip)).unwrap();
    manifests.write("web.yaml", &web(30081, &[1, 2]));
    manifests.write(
        "more.yaml",
        &service("more", &["10.96.7.7"], &[("", "TCP", 80, 0)]),
    );
    wait_until("the change is in force", || {
        let table = node.tool("ipvsadm -Sn");
        table.contains("10.96.7.7:80")
            && table.contains("30081 -r 10.0.0.4:8080")
            && !table.contains(":30080")
    });
    manifests.remove("more.yaml");
    wait_until("the removal is in force", || {
        !node.tool("ipvsadm -Sn").contains("10.96.7.7:80")
    });
    // An audit that repairs.
    node.tool("iptables-legacy -t nat -D PREROUTING 1");
    node.tool("ipset flush KUBE-CLUSTER-IP");
    wait_until("the repair is in force", || {
        node.tool("iptables-legacy-save -t nat")
            .contains("-A PREROUTING -m comment --comment \"kubernetes")
            && node
                .tool("ipset list KUBE-CLUSTER-IP")
                .contains("10.96.0.10")
    });
    assert_eq!(foreign(node), before, "after changes");
    assert!(daemon.stop().success());
    assert!(ours(node).len() >= 7);
    assert_eq!(foreign(node), before, "after the stop");

    let (code, said) = cleanup(node);
    assert_eq!(code, 0, "{said}");
    assert_eq!(kernel(node), before, "after the cleanup");
    let (code, said) = cleanup(node);
    assert_eq!(
        (code, said.as_str()),
        (0, "ipvs-proxy: nothing of ours is in the kernel\n")
    );
    assert_eq!(kernel(node), before, "after another cleanup");
}

#[test]
fn a_mark_is_ours_by_its_set_alone() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web(30080, &[0, 1]));
    let start = || {
        let mut daemon = Daemon::start(&node, &manifests, &[&node_ips()]);
        daemon.settle();
        daemon
    };
    assert!(start().stop().success());
    for foreign in [
        "ipvsadm -A -f 7 -s wlc -p 60",
        "ipvsadm -a -f 7 -r 10.1.0.4:0 -g -w 2",
        "ipvsadm -A -f 8 -6 -s rr",
        "ipvsadm -a -f 8 -6 -r [fd00:1::4]:0 -m -w 2",
        // Of the mark that is ours, but of the other family.
        "ipvsadm -A -f 4294967295 -6 -s rr",
    ] {
        node.tool(foreign);
    }
    let before = node.tool("ipvsadm -Sn");
    let foreign: Vec<&str> = before
        .lines()
        .filter(|line| line.contains(" -f "))
        .collect();
    assert_eq!(foreign.len(), 5, "{before}");
    // An earlier process left these.
    let left_behind = || {
        for ours in [
            "ipset add KUBE-IPVS-MARKS 255.255.255.255",
            "ipset add KUBE-IPVS-MARKS 0.0.0.9",
            "ipset add KUBE-6-IPVS-MARKS ::9",
            "ipvsadm -A -f 4294967295 -s rr",
            "ipvsadm -a -f 4294967295 -r 10.0.0.2:8080 -m -w 1",
            "ipvsadm -A -f 9 -6 -s rr",
            "ipvsadm -a -f 9 -6 -r [fd00:10::2]:8080 -m -w 1",
        ] {
            node.tool(ours);
        }
    };
    let marked = || -> Vec<String> {
        let table = node.tool("ipvsadm -Sn");
        let lines = table.lines().filter(|line| line.contains(" -f "));
        lines.map(str::to_owned).collect()
    };
    left_behind();
    assert_eq!(marked().len(), 9);
    let daemon = start();
    assert_eq!(marked(), foreign);
    for set in ["KUBE-IPVS-MARKS", "KUBE-6-IPVS-MARKS"] {
        let text = node.tool(&format!("ipset save {set}"));
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    assert!(daemon.stop().success());
    left_behind();
    let (code, said) = cleanup(&node);
    assert_eq!(code, 0, "{said}");
    assert_eq!(marked(), foreign);
    assert_eq!(node.tool("ipset list -n"), "");
    assert_eq!(node.tool("ipvsadm -Sn").lines().count(), foreign.len());
}

#[test]
fn a_cleanup_does_not_touch_what_a_daemon_works_on() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web(30080, &[0, 1]));
    let mut daemon = Daemon::start(&node, &manifests, &[&node_ips()]);
    daemon.settle();
    let before = kernel(&node);
    let (code, said) = cleanup(&node);
    let pid = format!("with process id {}:", daemon.pid());
    assert!(
        code == 1 && said.contains(&pid) && said.lines().count() == 1,
        "{code}, {said}"
    );
    assert_eq!(kernel(&node), before);
    daemon.crash();

    // As a container: its number of itself is another process's here.
    let container = ["unshare", "--pid", "--fork", "--kill-child"];
    let flags = [node_ips()];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let mut daemon = Daemon::start_by(&node, &manifests, &container, &flags);
    daemon.settle();
    let second = ask(&node, &["run", "--manifests", "/nonexistent"]);
    let said = [String::from_utf8(second.stderr).unwrap(), cleanup(&node).1];
    for said in said {
        assert!(
            said.contains("an ipvs-proxy runs here in a container: ")
                && !said.contains("process id"),
            "{said}"
        );
    }
    assert_eq!(second.status.code(), Some(1));
    assert_eq!(kernel(&node), before);
    daemon.crash();
    let (code, said) = cleanup(&node);
    assert_eq!(code, 0, "{said}");
    assert_eq!(ours(&node), BTreeMap::new());
}

#[test]
fn a_cleanup_names_the_rules_that_hold_a_set() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web(30080, &[0, 1]));
    let mut daemon = Daemon::start(&node, &manifests, &[&node_ips()]);
    daemon.settle();
    assert!(daemon.stop().success());
    let rules = [
        (
            "iptables-legacy -t filter",
            "INPUT -p tcp -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT",
        ),
        (
            "ip6tables-legacy -t mangle",
            "PREROUTING -m set ! --match-set KUBE-6-IPVS-IPS dst -m comment --comment mine -j ACCEPT",
        ),
        (
            "iptables-legacy -t mangle",
            "FORWARD -j SET --add-set KUBE-NODE-PORT-TCP dst",
        ),
    ];
    for (tool, rule) in rules {
        node.tool(&format!("{tool} -A {rule}"));
    }
    let (code, said) = cleanup(&node);
    assert_eq!(code, 1, "{said}");
    for (set, (tool, rule)) in ["KUBE-CLUSTER-IP", "KUBE-6-IPVS-IPS", "KUBE-NODE-PORT-TCP"]
        .iter()
        .zip(rules)
    {
        let line = format!(
            "ipvs-proxy: remove set {set}: a rule that is not ours uses the set: delete it ({tool} -D {rule})"
        );
        assert!(
            said.lines().any(|said| said == line),
            "{said}\nlacks\n{line}"
        );
    }
    assert!(
        said.lines().count() == 4 && said.contains(" 3 left\n"),
        "{said}"
    );
    let mut sets: Vec<String> = node
        .tool("ipset list -n")
        .lines()
        .map(str::to_owned)
        .collect();
    sets.sort_unstable();
    assert_eq!(
        sets,
        ["KUBE-6-IPVS-IPS", "KUBE-CLUSTER-IP", "KUBE-NODE-PORT-TCP"]
    );
    let mut left = ours(&node);
    left.remove("ipset");
    assert_eq!(left, BTreeMap::new());
    // What it says is what helps.
    for line in said
        .lines()
        .filter_map(|line| line.split_once("delete it ("))
    {
        node.tool(line.1.trim_end_matches(')'));
    }
    let (code, said) = cleanup(&node);
    assert_eq!((code, said.as_str()), (0, "ipvs-proxy: removed 3 things\n"));
    assert_eq!(node.tool("ipset list -n"), "");
}

#[test]
fn a_cleanup_names_the_rules_that_hold_a_chain() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web(30080, &[0, 1]));
    let mut daemon = Daemon::start(&node, &manifests, &[&node_ips()]);
    daemon.settle();
    assert!(daemon.stop().success());
    for foreign in [
        "iptables-legacy -t nat -N MINE",
        "iptables-legacy -t nat -A MINE -j KUBE-MARK-MASQ",
        "iptables-legacy -t nat -A MINE -p tcp -j KUBE-MARK-MASQ",
        "ip6tables-legacy -N MINE",
        "ip6tables-legacy -A MINE -g KUBE-FORWARD",
    ] {
        node.tool(foreign);
    }
    let commands = [
        "iptables-legacy -t nat -D MINE -j KUBE-MARK-MASQ",
        "iptables-legacy -t nat -D MINE -p tcp -j KUBE-MARK-MASQ",
        "ip6tables-legacy -t filter -D MINE -g KUBE-FORWARD",
    ];
    let why = "a rule that is not ours goes to it: delete it";
    let held = format!(
        "ipvs-proxy: remove chain KUBE-MARK-MASQ of table nat: {why} ({} && {})\n\
         ipvs-proxy: remove chain KUBE-FORWARD of table filter: {why} ({})\n",
        commands[0], commands[1], commands[2]
    );
    let (code, said) = cleanup(&node);
    assert!(
        code == 1 && said.starts_with(&held) && said.ends_with(" things removed, 2 left\n"),
        "{code}, {said}"
    );
    // There is nothing more that it could remove.
    for _ in 0..2 {
        let left = ours(&node);
        let (code, said) = cleanup(&node);
        let sum = "ipvs-proxy: 0 things removed, 2 left\n";
        assert_eq!((code, said), (1, format!("{held}{sum}")));
        assert_eq!(ours(&node), left);
    }
    // The chains are empty, and the rest is gone.
    let left: Vec<(String, Vec<String>)> = ours(&node).into_iter().collect();
    let declared = |chain: &str| format!(":{chain} -");
    let rule = |command: &str| command.split_once(" -D ").unwrap().1.to_owned();
    let added = |number: usize| format!("-A {}", rule(commands[number]));
    assert_eq!(
        left,
        [
            (
                "ip6tables-legacy-save filter".to_owned(),
                vec![declared("KUBE-FORWARD"), added(2)]
            ),
            (
                "iptables-legacy-save nat".to_owned(),
                vec![declared("KUBE-MARK-MASQ"), added(0), added(1)]
            ),
        ]
    );
    for command in commands {
        node.tool(command);
    }
    let (code, said) = cleanup(&node);
    assert_eq!((code, said.as_str()), (0, "ipvs-proxy: removed 2 things\n"));
    assert_eq!(ours(&node), BTreeMap::new());
}

/// `plan` in a node's namespace, with more words.
fn plan(node: &Namespace, manifests: &Manifests, words: &[&str]) -> (i32, String) {
    let node_ips = node_ips();
    let mut all = vec!["plan", "--manifests", manifests.path().to_str().unwrap()];
    all.extend(["--node-name", "node", &node_ips]);
    all.extend(words);
    let output = ask(node, &all);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    (output.status.code().unwrap(), said)
}

#[test]
fn a_plan_is_compared_with_the_kernel() {
    let node = Namespace::new();
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web(30080, &[0, 1]));
    let (code, said) = plan(&node, &manifests, &["--diff"]);
    assert!(
        code == 1 && said.contains("+-A -t 10.96.0.10:80 -s rr\n") && !said.contains("\n-"),
        "{said}"
    );
    let mut daemon = Daemon::start(&node, &manifests, &[&node_ips()]);
    daemon.settle();
    assert_eq!(plan(&node, &manifests, &["--diff"]), (0, String::new()));
    assert!(daemon.stop().success());
    assert_eq!(plan(&node, &manifests, &["--diff"]), (0, String::new()));
    // Rules of others that come before ours; one that only refuses keeps no packet from a Service.
    let before = "INPUT -i cbr0 -j ACCEPT";
    node.tool(&format!("iptables-legacy -I {before}"));
    node.tool("iptables-legacy -I INPUT -i cbr1 -j DROP");
    let line = format!("-iptables before ours: -t filter -A {before}\n");
    assert_eq!(plan(&node, &manifests, &["--diff"]), (1, line));
    node.tool(&format!("iptables-legacy -D {before}"));
    assert_eq!(plan(&node, &manifests, &["--diff"]), (0, String::new()));
    node.tool("iptables-legacy -D INPUT -i cbr1 -j DROP");
    assert_eq!(
        rules_of_plan(&plan(&node, &manifests, &["-o", "iptables"]).1),
        rules_of_kernel(&node)
    );

    for edit in [
        "ipvsadm -e -t 10.96.0.10:80 -r 10.0.0.2:8080 -m -w 3",
        "ipvsadm -E -u [fd96::10]:80 -s wlc",
        "ipvsadm -d -t 192.168.10.11:30080 -r 10.0.0.3:8080",
        "ipset add KUBE-CLUSTER-IP 10.96.0.99,tcp:80",
        "ip address del fd96::10/128 dev kube-ipvs0",
        "iptables-legacy -t nat -D KUBE-SERVICES -m addrtype ! --dst-type LOCAL -j RETURN",
        "iptables-legacy -t nat -A KUBE-SERVICES -j RETURN",
    ] {
        node.tool(edit);
    }
    let expected = [
        "--A -u [fd96::10]:80 -s wlc",
        "--a -t 10.96.0.10:80 -r 10.0.0.2:8080 -m -w 3",
        "-add KUBE-CLUSTER-IP 10.96.0.99,tcp:80",
        "+-A -u [fd96::10]:80 -s rr",
        "+-a -t 10.96.0.10:80 -r 10.0.0.2:8080 -m -w 1",
        "+-a -t 192.168.10.11:30080 -r 10.0.0.3:8080 -m -w 1",
        "+fd96::10/128",
        "-iptables -t nat -A KUBE-SERVICES -j RETURN",
        "+iptables -t nat -A KUBE-SERVICES -m addrtype ! --dst-type LOCAL -j RETURN",
    ];
    let (code, said) = plan(&node, &manifests, &["--diff"]);
    assert_eq!(
        (code, said.lines().collect::<Vec<_>>()),
        (1, expected.to_vec())
    );

    let (code, said) = plan(&node, &manifests, &["-o", "json"]);
    let json: serde_json::Value = serde_json::from_str(&said).unwrap();
    let list = |name: &str| json[name].as_array().unwrap();
    let entries = |name: &str| {
        let set = list("sets").iter().find(|set| set["name"] == name).unwrap();
        set["entries"].as_array().unwrap().len()
    };
    // ClusterIP and node port, TCP and UDP, two families.
    assert_eq!(
        (code, list("virtualServers").len(), list("sets").len()),
        (0, 8, 42)
    );
    for server in list("virtualServers") {
        assert_eq!(
            server["realServers"].as_array().unwrap().len(),
            2,
            "{server}"
        );
    }
    assert_eq!(
        (entries("KUBE-CLUSTER-IP"), entries("KUBE-6-CLUSTER-IP")),
        (2, 2)
    );
    assert_eq!(list("addresses").len(), 2);
}

/// By family, table and chain: the rules in order.
type Rules = BTreeMap<(String, String, String), Vec<String>>;

fn rules_of_plan(text: &str) -> Rules {
    let mut rules = Rules::new();
    let (mut tool, mut table) = (String::new(), String::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("# ") {
            assert!(["iptables", "ip6tables"].contains(&name), "{line}");
            name.clone_into(&mut tool);
        } else if let Some(name) = line.strip_prefix('*') {
            name.clone_into(&mut table);
        } else if let Some(chain) = line.strip_prefix(':') {
            let chain = chain.strip_suffix(" - [0:0]").unwrap();
            rules
                .entry((tool.clone(), table.clone(), chain.to_owned()))
                .or_default();
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let chain = rule.split(' ').next().unwrap();
            let rules = rules.entry((tool.clone(), table.clone(), chain.to_owned()));
            rules.or_default().push(line.to_owned());
        } else {
            assert_eq!(line, "COMMIT");
        }
    }
    rules
}

fn rules_of_kernel(node: &Namespace) -> Rules {
    let mut rules = Rules::new();
    for tool in ["iptables", "ip6tables"] {
        let mut table = String::new();
        for line in node.tool(&format!("{tool}-legacy-save")).lines() {
            if let Some(name) = line.strip_prefix('*') {
                name.clone_into(&mut table);
            }
            let words: Vec<&str> = line.split([' ', ':']).collect();
            if !words
                .iter()
                .any(|word| CHAINS.contains(word) || MANGLE.contains(word))
            {
                continue;
            }
            let key = (tool.to_owned(), table.clone(), words[1].to_owned());
            let rules = rules.entry(key).or_default();
            rules.extend(line.starts_with("-A").then(|| line.to_owned()));
        }
    }
    rules
}

#[test]
fn a_set_of_another_type_makes_room() {
    let topology = Topology::new(2);
    let node = topology.node();
    let _servers = [0, 1].map(|pod| topology.serve(pod, 8080));
    node.tool("ipset create KUBE-CLUSTER-IP hash:ip");
    node.tool("ipset add KUBE-CLUSTER-IP 10.96.0.10");
    node.tool("ipset create KUBE-6-IPVS-IPS hash:net family inet6");
    node.tool("ipset create KUBE-LOOP-BACK list:set");
    let manifests = Manifests::new();
    manifests.write("web.yaml", &web(30080, &[0, 1]));
    let answers = || {
        for vip in ["10.96.0.10:80", "[fd96::10]:80", "192.168.10.11:30080"] {
            let to = vip.parse().unwrap();
            topology
                .outside()
                .enter(|| http_get(to))
                .unwrap_or_else(|error| panic!("{vip}: {error}"));
        }
    };
    let as_planned = || plan(node, &manifests, &["--diff"]) == (0, String::new());
    let mut daemon = Daemon::start(node, &manifests, &[&node_ips(), "--sync-period=1s"]);
    daemon.settle();
    assert!(as_planned(), "{:?}", plan(node, &manifests, &["--diff"]));
    answers();

    // While it runs, and a rule of ours looks into the new one.
    let replace = |rule_between: &str| {
        for family in ["", "6"] {
            for table in ["nat", "filter"] {
                node.tool(&format!("ip{family}tables-legacy -t {table} -F"));
            }
        }
        node.tool("ipset destroy KUBE-CLUSTER-IP");
        node.tool("ipset create KUBE-CLUSTER-IP hash:ip");
        if !rule_between.is_empty() {
            node.tool(&format!("iptables-legacy -A {rule_between}"));
        }
    };
    assert!(daemon.stop().success());
    replace("");
    let mut daemon = Daemon::start(node, &manifests, &[&node_ips(), "--sync-period=1s"]);
    daemon.settle();
    assert!(as_planned(), "{:?}", plan(node, &manifests, &["--diff"]));
    answers();
    assert!(daemon.stop().success());

    // A rule of other software holds it: it stays, the rule is named, all else is in force.
    let rule = "INPUT -m set --match-set KUBE-CLUSTER-IP dst -j ACCEPT";
    replace(rule);
    let mut daemon = Daemon::start(node, &manifests, &[&node_ips(), "--sync-period=1s"]);
    daemon.settle();
    let named = format!("delete it (iptables-legacy -t filter -D {rule})");
    assert!(daemon.log().contains(&named), "{}", daemon.log());
    for vip in ["[fd96::10]:80", "192.168.10.11:30080"] {
        let to = vip.parse().unwrap();
        wait_until(&format!("{vip} answers"), || {
            topology.outside().enter(|| http_get(to)).is_ok()
        });
    }
    node.tool(&format!("iptables-legacy -t filter -D {rule}"));
    wait_until("all is as planned", as_planned);
    answers();
}

/// Lines of the IPVS table on an address.
fn table_of(node: &Namespace, address: &str) -> Vec<String> {
    let saved = node.tool("ipvsadm -Sn");
    let lines = saved.lines().filter(|line| line.contains(address));
    lines.map(str::to_owned).collect()
}

/// Virtual servers in excluded networks that no Service has, though they are ours by all signs: start, audit and cleanup leave
/// them, real servers and all.
#[test]
fn excluded_virtual_servers_stay_as_they_are() {
    const EXCLUDED: &str = "203.0.113.7:80";
    const BESIDE: &str = "203.0.113.200:80";
    const EXCLUDE: &str = "--ipvs-exclude-cidrs=203.0.113.0/25,fd99::/64";
    let node = Namespace::new();
    let manifests = Manifests::new();
    let put = |name: &str, address: &str, pods: &[u8]| {
        let pods: Vec<_> = pods
            .iter()
            .map(|pod| (pod_addresses(*pod)[0], true, "node"))
            .collect();
        let ports = [("", "TCP", 80, 0)];
        let text =
            service(name, &[address], &ports) + &slice(name, name, &[("", "TCP", 8080)], &pods);
        manifests.write(&format!("{name}.yaml"), &text);
    };
    put("a", "10.96.0.10", &[0]);
    put("old", "203.0.113.7", &[0, 1]);
    put("beside", "203.0.113.200", &[0]);
    let node_ips = node_ips();
    let mut daemon = Daemon::start(&node, &manifests, &[&node_ips]);
    daemon.settle();
    assert!(daemon.stop().success());
    node.tool(&format!("ipvsadm -E -t {EXCLUDED} -s wrr -p 60"));
    node.tool(&format!(
        "ipvsadm -e -t {EXCLUDED} -r 10.0.0.2:8080 -m -w 7"
    ));
    manifests.remove("old.yaml");
    manifests.remove("beside.yaml");
    let before = table_of(&node, EXCLUDED);
    assert_eq!((before.len(), table_of(&node, BESIDE).len()), (3, 2));

    let flags = [EXCLUDE, "--sync-period=300ms", &node_ips];
    let mut daemon = Daemon::start(&node, &manifests, &flags);
    daemon.settle();
    wait_until("what no Service has goes", || {
        table_of(&node, BESIDE).is_empty()
    });
    assert_eq!(table_of(&node, EXCLUDED), before, "start");

    // The audit sees the one change, and not the other.
    node.tool(&format!("ipvsadm -a -t {EXCLUDED} -r 10.1.0.9:80 -g -w 3"));
    let changed = table_of(&node, EXCLUDED);
    for _ in 0..2 {
        node.tool("ipvsadm -d -t 10.96.0.10:80 -r 10.0.0.2:8080");
        wait_until("an audit repairs", || {
            table_of(&node, "10.96.0.10:80").len() == 2
        });
    }
    assert_eq!(table_of(&node, EXCLUDED), changed, "audit");
    let log = daemon.log();
    assert!(!log.contains("203.0.113.7"), "{log}");

    // A Service of that address is served as any other, and leaves its virtual server behind.
    put("new", "203.0.113.7", &[2]);
    let new = "-a -t 203.0.113.7:80 -r 10.0.0.4:8080 -m -w 1";
    wait_until("the Service is served", || {
        let table = table_of(&node, EXCLUDED);
        table.len() == 2 && table[1] == new && !table[0].contains("wrr")
    });
    let served = table_of(&node, EXCLUDED);
    assert!(daemon.stop().success());
    let output = ask(&node, &["cleanup", EXCLUDE]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(table_of(&node, EXCLUDED), served, "cleanup");
    assert_eq!(node.tool("ipvsadm -Sn").lines().count(), 2);
    assert_eq!(node.tool("ipset list -n"), "");
    assert!(!node.tool("iptables-save").contains("KUBE-"));
    assert!(!node.tool("ip -o link").contains("kube-ipvs0"));
    // Not ours any more by any sign: also without the flag it stays.
    let output = ask(&node, &["cleanup"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(table_of(&node, EXCLUDED), served);
}
