//! Sets, and the rules that look into them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, setsockopt,
    socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use std::os::fd::AsRawFd;
use tests::daemon::{binary, service, slice, wait_until};
use tests::netns::Namespace;
use tests::topology::{NODE, OUTSIDE, pod_addresses};
use tests::traffic::Client;

use super::{PORT, Scene, TARGET, WEB, slices};

#[test]
fn g05_a_set_that_something_holds_costs_only_itself() {
    let mut scene = Scene::web(1, &[0], "", &[]);
    assert!(scene.daemon.take().unwrap().stop().success());
    let cleanup = |node: &Namespace| {
        let mut command = Command::new(binary());
        command.arg("cleanup");
        let output = node.enter(|| command.output()).unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    // A set of sets holds its members as a rule does, and no rule tells.
    scene.node().tool("ipset create HOLDER list:set");
    scene.node().tool("ipset add HOLDER KUBE-CLUSTER-IP");
    let (code, said) = cleanup(scene.node());
    assert!(
        code == Some(1) && said.contains("remove set KUBE-CLUSTER-IP: "),
        "{code:?}, {said}"
    );
    let left = scene.node().tool("ipset list -n");
    let ours: Vec<&str> = left
        .lines()
        .filter(|name| name.starts_with("KUBE-"))
        .collect();
    assert_eq!(ours, ["KUBE-CLUSTER-IP"]);
    // A daemon works with it as it is.
    scene.launch(&[]);
    scene.settle();
    assert_eq!(scene.answers("10.96.0.20:80"), "pod0");
    assert!(scene.daemon.take().unwrap().stop().success());
    scene.node().tool("ipset destroy HOLDER");
    let (code, said) = cleanup(scene.node());
    assert_eq!(code, Some(0), "{said}");
    assert!(!scene.node().tool("ipset list -n").contains("KUBE-"));
}

#[test]
fn g09_others_make_and_destroy_sets_all_the_time() {
    let scene = Scene::web(2, &[0, 1], "", &["--sync-period=1s"]);
    let stop = AtomicBool::new(false);
    let rounds = AtomicU32::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                let number = rounds.fetch_add(1, Ordering::SeqCst) % 7;
                let input = format!(
                    "create LOOP{number} hash:ip,port\nadd LOOP{number} 10.96.0.20,tcp:80\n\
                     create LOOP-TMP hash:ip,port\nswap LOOP{number} LOOP-TMP\n\
                     destroy LOOP{number}\ndestroy LOOP-TMP\n"
                );
                scene.node().tool_with_input("ipset restore", &input);
            }
        });
        let stopper = super::Stop(&stop);
        for round in 0..6_u8 {
            let name = format!("more{round}");
            let vip = format!("10.96.3.{round}");
            let text = service(&name, &[&vip], &[("", "TCP", PORT, 0)])
                + &slices(&name, TARGET, &[(0, true)]);
            scene.manifests.write("more.yaml", &text);
            let before = rounds.load(Ordering::SeqCst);
            wait_until("it is served", || {
                let to = format!("{vip}:80").parse().unwrap();
                rounds.load(Ordering::SeqCst) > before + 3
                    && scene
                        .topology
                        .outside()
                        .enter(|| tests::traffic::http_get(to))
                        .is_ok()
            });
        }
        drop(stopper);
    });
    assert!(rounds.load(Ordering::SeqCst) > 20);
    let log = scene.log();
    assert!(
        !log.contains("changed by somebody else") && !log.contains("will be tried again"),
        "{log}"
    );
    let entries = scene.node().tool("ipset save KUBE-CLUSTER-IP");
    let entries: Vec<&str> = entries
        .lines()
        .filter(|line| line.starts_with("add"))
        .collect();
    assert_eq!(entries.len(), 2, "{entries:?}");
}

/// How often each rule that looks into a set was met, by the name of the set and the rule. Without those that every packet
/// matches, which name a set only to be counted.
fn met(node: &Namespace, tool: &str) -> BTreeMap<(String, String), u64> {
    let mut met = BTreeMap::new();
    for line in node.tool(&format!("{tool}-save -c")).lines() {
        let counted = line.strip_prefix('[').and_then(|rest| rest.split_once(':'));
        let Some((count, rule)) = counted else {
            continue;
        };
        let words: Vec<&str> = rule.split(' ').collect();
        let set = words.windows(2).find(|words| words[0] == "--match-set");
        if let Some([_, set]) = set
            && !words.contains(&"!")
            && set.starts_with("KUBE-")
        {
            let rule = rule.split_once(' ').unwrap().1.to_owned();
            met.insert(((*set).to_owned(), rule), count.parse().unwrap());
        }
    }
    met
}

/// The rules of a set that were met between two readings.
fn hit(
    set: &str,
    before: &BTreeMap<(String, String), u64>,
    after: &BTreeMap<(String, String), u64>,
) -> Vec<(String, String)> {
    let more = after
        .iter()
        .filter(|(key, count)| key.0 == set && before[*key] < **count);
    more.map(|(key, _)| key.clone()).collect()
}

/// Sends a first packet of a protocol; whether it is answered is another question.
fn knock(from: &Namespace, protocol: &str, to: SocketAddr) {
    let quick = Client {
        timeout: Duration::from_millis(300),
        ..Client::default()
    };
    from.enter(|| match protocol {
        "TCP" => drop(quick.http_get(to)),
        "UDP" => drop(quick.udp_ask(to)),
        _ => {
            let family = if to.is_ipv4() {
                AddressFamily::Inet
            } else {
                AddressFamily::Inet6
            };
            let made = socket(
                family,
                SockType::Stream,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::Sctp,
            )
            .unwrap();
            setsockopt(&made, sockopt::SendTimeout, &TimeVal::milliseconds(300)).unwrap();
            if to.is_ipv6() {
                setsockopt(&made, sockopt::Ipv6V6Only, &true).unwrap();
                bind(
                    made.as_raw_fd(),
                    &SockaddrStorage::from(SocketAddr::new("::".parse().unwrap(), 0)),
                )
                .unwrap();
            }
            let _ = connect(made.as_raw_fd(), &SockaddrStorage::from(to));
        }
    });
}

#[test]
fn g06_each_rule_meets_what_its_set_holds_and_not_the_port_beside() {
    const EXTERNAL: [&str; 2] = ["198.51.100.7", "2001:db8:7::7"];
    const BALANCED: [&str; 2] = ["203.0.113.5", "2001:db8:5::5"];
    const NODE_PORTS: [(&str, u16); 3] = [("TCP", 30080), ("UDP", 30080), ("SCTP", 30080)];
    let mut scene = Scene::new(2);
    let ports = [
        ("tcp", "TCP", PORT, NODE_PORTS[0].1),
        ("udp", "UDP", PORT, NODE_PORTS[1].1),
        ("sctp", "SCTP", PORT, NODE_PORTS[2].1),
    ];
    let ([v4, v6], [routed4, routed6]) = (EXTERNAL, OUTSIDE);
    let mut text = service("web", &WEB, &ports)
        + &format!("  externalIPs: [{v4}, \"{v6}\", {routed4}, \"{routed6}\"]\n");
    let [v4, v6] = BALANCED;
    text += &format!("status: {{loadBalancer: {{ingress: [{{ip: {v4}}}, {{ip: \"{v6}\"}}]}}}}\n");
    for family in [0, 1] {
        let endpoint = (pod_addresses(0)[family], true, "node");
        let ports = ["tcp", "udp", "sctp"].map(|name| {
            (
                name,
                match name {
                    "tcp" => "TCP",
                    "udp" => "UDP",
                    _ => "SCTP",
                },
                TARGET,
            )
        });
        text += &slice(&format!("web-{family}"), "web", &ports, &[endpoint]);
    }
    scene.manifests.write("web.yaml", &text);
    // The address of another node.
    let other = format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: n2}}\nstatus:\n  addresses:\n  \
         - {{type: InternalIP, address: {routed4}}}\n  - {{type: InternalIP, address: \"{routed6}\"}}\n"
    );
    scene.manifests.write("n2.yaml", &other);
    scene.launch(&[]);
    scene.settle();
    let node = scene.node();
    let tools = ["iptables", "ip6tables"];
    let all: BTreeSet<(String, String)> = tools
        .iter()
        .flat_map(|tool| met(node, tool).into_keys())
        .collect();
    let mut seen = BTreeSet::new();
    // What a first packet to that place meets, and one to the port beside.
    let mut case =
        |set: &str, from: &Namespace, protocol: &str, to: SocketAddr, beside_matches: bool| {
            let read = || met(node, tools[usize::from(to.is_ipv6())]);
            let before = read();
            knock(from, protocol, to);
            let between = read();
            let hits = hit(set, &before, &between);
            assert!(!hits.is_empty(), "{protocol} {to} does not meet {set}");
            knock(from, protocol, SocketAddr::new(to.ip(), to.port() + 1));
            let beside = hit(set, &between, &read());
            assert_eq!(
                !beside.is_empty(),
                beside_matches,
                "{protocol} beside {to}: {beside:?}"
            );
            seen.extend(hits);
        };
    for family in [0, 1] {
        let name = |role: &str| format!("KUBE-{}{role}", ["", "6-"][family]);
        let at = |address: &str, port| SocketAddr::new(address.parse().unwrap(), port);
        let outside = scene.topology.outside();
        for (role, address) in [
            ("CLUSTER-IP", WEB[family]),
            ("EXTERNAL-IP", EXTERNAL[family]),
            ("LOAD-BALANCER", BALANCED[family]),
            ("IPVS-SERVING", WEB[family]),
        ] {
            for protocol in ["TCP", "UDP", "SCTP"] {
                case(&name(role), outside, protocol, at(address, PORT), false);
            }
        }
        // By address alone.
        case(
            &name("IPVS-IPS"),
            outside,
            "TCP",
            at(WEB[family], PORT),
            true,
        );
        for ((protocol, port), role) in
            NODE_PORTS
                .into_iter()
                .zip(["NODE-PORT-TCP", "NODE-PORT-UDP", "NODE-PORT-SCTP-HASH"])
        {
            case(
                &name(role),
                outside,
                protocol,
                SocketAddr::new(NODE[family], port),
                false,
            );
        }
        for from in [scene.topology.pod(1), scene.topology.node()] {
            let to = SocketAddr::new(OUTSIDE[family], PORT);
            case(&name("IPVS-ROUTED"), from, "TCP", to, false);
        }
        case(
            &name("LOOP-BACK"),
            scene.topology.pod(0),
            "TCP",
            at(WEB[family], PORT),
            false,
        );
    }
    // This scene has no Service with a Local policy, and the set that routes is met first: the tests of policies, health check
    // node ports and routed addresses look at what becomes of such packets.
    let elsewhere = |(set, rule): &&(String, String)| {
        set.contains("-LOCAL")
            || set.contains("-HEALTH-CHECK-")
            || rule.contains("-A KUBE-IPVS-ROUTE ")
    };
    let missed: Vec<_> = all
        .difference(&seen)
        .filter(|met| !elsewhere(met))
        .collect();
    assert!(
        missed.is_empty() && all.len() >= 20,
        "never met: {missed:#?} of {}",
        all.len()
    );
}
