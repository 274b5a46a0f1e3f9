//! Load balancers ask a node for its endpoints, on its own addresses and on theirs, whatever the host's firewall says.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use tests::daemon::{slice, wait_until};
use tests::netns::Namespace;
use tests::topology::{BRIDGE, NODE, pod_addresses};

use super::{CLUSTER_CIDR, PORT, Scene, TARGET};

const HEALTH_PORT: u16 = 30100;

fn balanced() -> [IpAddr; 2] {
    ["203.0.113.10", "fd00:203::10"].map(|address| address.parse().unwrap())
}

/// A Service of a load balancer that keeps to nodes with endpoints, without node ports.
fn balancer(name: &str, last: u16, health_port: u16) -> String {
    let vips = balanced().map(|vip| match last {
        10 => format!("{{ip: \"{vip}\"}}"),
        _ => String::new(),
    });
    let vips: Vec<String> = vips.into_iter().filter(|vip| !vip.is_empty()).collect();
    let (high, low) = (last / 250, last % 250);
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  \
         type: LoadBalancer\n  externalTrafficPolicy: Local\n  allocateLoadBalancerNodePorts: false\n  \
         healthCheckNodePort: {health_port}\n  clusterIP: 10.96.{high}.{low}\n  \
         clusterIPs: [10.96.{high}.{low}, \"fd96::{high}:{low}\"]\n  \
         ports: [{{protocol: TCP, port: {PORT}}}]\n\
         status: {{loadBalancer: {{ingress: [{}]}}}}\n",
        vips.join(", ")
    )
}

/// One pod on this node, ready or not, and one elsewhere.
fn endpoints(name: &str, ready: bool) -> String {
    let of_family = |family: usize| {
        let pods = [
            (pod_addresses(0)[family], ready, "node"),
            (pod_addresses(1)[family], true, "other"),
        ];
        slice(
            &format!("{name}-{family}"),
            name,
            &[("", "TCP", TARGET)],
            &pods,
        )
    };
    [0, 1].map(of_family).concat()
}

/// Code and body, as a load balancer asks: within a second.
fn ask(from: &Namespace, to: SocketAddr) -> Option<(u16, String)> {
    from.enter(|| {
        let second = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&to, second).ok()?;
        stream.set_read_timeout(Some(second)).ok()?;
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let code = answer.split(' ').nth(1)?.parse().ok()?;
        Some((code, answer.split_once("\r\n\r\n")?.1.to_owned()))
    })
}

fn code(from: &Namespace, to: SocketAddr) -> Option<u16> {
    Some(ask(from, to)?.0)
}

/// A host that lets nothing in by default, not even what it asked for, but from itself.
fn close(node: &Namespace) {
    node.tool("iptables -A INPUT -i lo -j ACCEPT");
    node.tool("ip6tables -A INPUT -i lo -j ACCEPT");
    node.tool("iptables -P INPUT DROP");
    node.tool("ip6tables -P INPUT DROP");
    // Else nobody finds the neighbours.
    node.tool("ip6tables -A INPUT -p icmpv6 -j ACCEPT");
}

fn rules(node: &Namespace) -> usize {
    let saved = ["iptables-save", "ip6tables-save"].map(|tool| node.tool(tool));
    let rules = saved.iter().flat_map(|text| text.lines());
    rules.filter(|line| line.starts_with("-A ")).count()
}

#[test]
fn load_balancers_are_answered_through_a_closed_firewall() {
    let mut scene = Scene::start(2, &[CLUSTER_CIDR]);
    scene.manifests.write("none.yaml", "");
    scene.daemon.as_mut().unwrap().settle();
    let (node, outside) = (scene.topology.node(), scene.topology.outside());
    close(node);
    scene
        .manifests
        .write("slices.yaml", &endpoints("web", true));
    let at = |address: IpAddr| SocketAddr::new(address, HEALTH_PORT);
    assert_eq!(code(outside, at(NODE[0])), None);
    let before = rules(node);

    scene
        .manifests
        .write("web.yaml", &balancer("web", 10, HEALTH_PORT));
    wait_until("the health check is answered", || {
        code(outside, at(NODE[0])) == Some(200)
    });
    let everywhere = NODE.into_iter().chain(balanced()).chain(BRIDGE);
    for to in everywhere.map(at) {
        for (client, from) in scene.clients(1) {
            let (code, body) = ask(from, to).unwrap_or_else(|| panic!("{client} to {to}"));
            assert_eq!(code, 200, "{client} to {to}");
            let expected = "{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\
                 \"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": true\n}";
            assert_eq!(body, expected, "{client} to {to}");
        }
    }
    assert_eq!(rules(node), before, "the rules are constant");
    // That port and no other, of the daemon's neither.
    for port in [HEALTH_PORT + 1, 10249, 10256] {
        for to in NODE.into_iter().chain(balanced()) {
            assert_eq!(
                code(outside, SocketAddr::new(to, port)),
                None,
                "{to} {port}"
            );
        }
    }
    let vip = at(balanced()[0]);
    for (ready, expected) in [(false, 503), (true, 200), (false, 503)] {
        scene
            .manifests
            .write("slices.yaml", &endpoints("web", ready));
        wait_until("readiness is told", || code(outside, vip) == Some(expected));
        assert_eq!(code(outside, at(NODE[1])), Some(expected));
    }
    // Another port; then no load balancer at all.
    scene
        .manifests
        .write("web.yaml", &balancer("web", 10, HEALTH_PORT + 5));
    let moved = SocketAddr::new(NODE[0], HEALTH_PORT + 5);
    wait_until("the port moved", || code(outside, moved) == Some(503));
    assert_eq!(code(outside, at(NODE[0])), None);
    let plain = balancer("web", 10, HEALTH_PORT + 5).replace("Policy: Local", "Policy: Cluster");
    scene.manifests.write("web.yaml", &plain);
    wait_until("the port is closed", || code(outside, moved).is_none());
    wait_until("the sets are empty", || {
        let saved = node.tool("ipset save");
        !saved
            .lines()
            .any(|line| line.starts_with("add") && line.contains("HEALTH-CHECK"))
    });
}

/// A port that a process of the node has stays its own, and its firewall's; it is taken when that is gone.
#[test]
fn a_busy_port_is_not_opened_and_taken_later() {
    let mut scene = Scene::start(2, &[CLUSTER_CIDR]);
    let (manifests, topology) = (&scene.manifests, &scene.topology);
    let (node, outside) = (topology.node(), topology.outside());
    close(node);
    let other = HEALTH_PORT + 1;
    let taken = node.enter(|| TcpListener::bind(("0.0.0.0", HEALTH_PORT)).unwrap());
    manifests.write(
        "slices.yaml",
        &(endpoints("web", true) + &endpoints("other", true)),
    );
    let services = balancer("web", 10, HEALTH_PORT) + &balancer("other", 11, other);
    manifests.write("services.yaml", &services);
    let at = |family: usize, port| SocketAddr::new(NODE[family], port);
    wait_until("the other Service's is answered", || {
        code(outside, at(0, other)) == Some(200)
    });
    wait_until("IPv6 is answered", || {
        code(outside, at(1, HEALTH_PORT)) == Some(200)
    });
    let connects = || {
        let second = Duration::from_secs(1);
        outside.enter(|| TcpStream::connect_timeout(&at(0, HEALTH_PORT), second).is_ok())
    };
    assert!(!connects(), "the firewall is opened to another process");
    let log = scene.daemon.as_ref().unwrap().log();
    let told: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("no health check node port"))
        .collect();
    assert!(
        matches!(told[..], [line] if line.contains("default/web") && line.contains("Address already in use")),
        "{told:#?}"
    );
    drop(taken);
    wait_until("the port is answered", || {
        code(outside, at(0, HEALTH_PORT)) == Some(200)
    });
    wait_until("it is told", || {
        let log = scene.daemon.as_ref().unwrap().log();
        log.contains("listened on again")
    });

    // A restart finds all as it was.
    let set = |node: &Namespace| {
        let saved = node.tool("ipset save KUBE-HEALTH-CHECK-NODE-PORT");
        saved.lines().filter(|line| line.starts_with("add")).count()
    };
    assert_eq!(set(node), 2);
    scene.launch(&[CLUSTER_CIDR]);
    scene.daemon.as_mut().unwrap().settle();
    let (node, outside) = (scene.topology.node(), scene.topology.outside());
    wait_until("it is answered again", || {
        code(outside, at(0, HEALTH_PORT)) == Some(200)
    });
    let log = scene.daemon.as_ref().unwrap().log();
    assert!(!log.contains("applied"), "{log}");
    assert_eq!(set(node), 2);
}

/// Hundreds of them take no thread each, nor end at the usual limit of open files.
#[test]
fn hundreds_of_health_check_node_ports_share_a_thread() {
    const SERVICES: u16 = 400;
    let scene = Scene::start(2, &[CLUSTER_CIDR]);
    let manifests = &scene.manifests;
    drop(scene.daemon);
    let by = ["sh", "-c", "ulimit -Sn 256; exec \"$0\" \"$@\""];
    let node = scene.topology.node();
    let [v4, v6] = NODE;
    let node_ips = format!("--node-ips={v4},{v6}");
    let mut daemon = tests::daemon::Daemon::start_by(node, manifests, &by, &[&node_ips]);
    manifests.write("none.yaml", "");
    daemon.settle();
    let count = |of: &str| {
        let folder = format!("/proc/{}/{of}", daemon.pid());
        fs::read_dir(folder).unwrap().count()
    };
    let (threads, files) = (count("task"), count("fd"));
    let mut services = String::new();
    for n in 0..SERVICES {
        let name = format!("s{n}");
        let _ = write!(services, "{}", balancer(&name, n + 20, HEALTH_PORT + n));
        let _ = write!(services, "{}", endpoints(&name, n % 2 == 0));
    }
    manifests.write("services.yaml", &services);
    let outside = scene.topology.outside();
    let ports = || {
        (0..SERVICES).map(|n| {
            (
                n,
                SocketAddr::new(NODE[usize::from(n % 2)], HEALTH_PORT + n),
            )
        })
    };
    wait_until("the last is answered", || {
        ports().all(|(_, to)| code(outside, to).is_some())
    });
    for (n, to) in ports() {
        let (code, body) = ask(outside, to).unwrap();
        assert_eq!(code, if n % 2 == 0 { 200 } else { 503 }, "{to}: {body}");
        assert!(body.contains(&format!("\"name\": \"s{n}\"")), "{body}");
    }
    assert_eq!(count("task"), threads);
    assert!(count("fd") >= files + 2 * usize::from(SERVICES));
    manifests.remove("services.yaml");
    wait_until("all are closed", || count("fd") <= files);
}
