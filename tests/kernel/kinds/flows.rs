//! Connection tracking tables that are long: what is stale is found, and nobody waits for it.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ipvs_netlink::{Client, RealServerKey, VirtualServerKey};
use ipvs_proxy_core::op::{Dataplane as _, StaleFlows};
use ipvs_proxy_dataplane::conntrack::{Conntrack, Stale};
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_iptables::Choice;
use ipvs_proxy_netlink::{Attributes, Family, Protocol, Request, Socket, Subsystem};
use tests::daemon::{Daemon, Manifests, PATIENCE, service, slice, wait_until, wait_up_to};
use tests::long;
use tests::netns::Namespace;
use tests::topology::{Topology, pod_addresses};

use crate::scene::Stop;

/// Room for so many entries; put back with this value.
struct Room(Vec<(&'static str, String)>);

impl Room {
    fn new(entries: u32) -> Room {
        const SYSCTLS: [(&str, u32); 2] = [
            ("/proc/sys/net/netfilter/nf_conntrack_max", 1),
            ("/proc/sys/net/netfilter/nf_conntrack_buckets", 8),
        ];
        let set = |(path, part): (&'static str, u32)| {
            let before = fs::read_to_string(path).unwrap();
            fs::write(path, (entries / part).to_string()).unwrap();
            (path, before)
        };
        Room(SYSCTLS.map(set).into())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        for (path, before) in &self.0 {
            let _ = fs::write(path, before);
        }
    }
}

/// A flow: from where, to where, and who answers.
#[derive(Debug, Clone, Copy)]
struct Flow {
    protocol: Protocol,
    from: SocketAddr,
    to: SocketAddr,
    by: SocketAddr,
}

/// Makes entries of connection tracking as packets would.
fn track(socket: &mut Socket, flows: &[Flow]) {
    const CT_NEW: u16 = 1 << 8; // <linux/netfilter/nfnetlink_conntrack.h>
    const NLM_F_CREATE_EXCL: u16 = 0x600; // <linux/netlink.h>
    let tuple = |a: &mut Attributes, protocol: Protocol, from: SocketAddr, to: SocketAddr| {
        a.nested(1, |a| {
            for (kind, end) in [(1, from), (2, to)] {
                match end.ip() {
                    IpAddr::V4(v4) => a.push_bytes(kind, &v4.octets()),
                    IpAddr::V6(v6) => a.push_bytes(kind + 2, &v6.octets()),
                }
            }
        });
        a.nested(2, |a| {
            a.push_u8(1, protocol.number());
            a.push_u16_be(2, from.port());
            a.push_u16_be(3, to.port());
        });
    };
    let request = |flow: &Flow| {
        let mut body = Attributes::after(&[Family::of(flow.to.ip()).number(), 0, 0, 0]);
        body.nested(1, |a| tuple(a, flow.protocol, flow.from, flow.to));
        body.nested(2, |a| tuple(a, flow.protocol, flow.by, flow.from));
        body.push_u32_be(7, 3600);
        if flow.protocol == Protocol::Tcp {
            body.nested(4, |a| a.nested(1, |a| a.push_u8(1, 3)));
        }
        Request {
            kind: CT_NEW,
            flags: NLM_F_CREATE_EXCL,
            payload: body.finish().unwrap(),
        }
    };
    for some in flows.chunks(1024) {
        let requests: Vec<Request> = some.iter().map(request).collect();
        for (result, flow) in socket.batch(&requests).iter().zip(some) {
            assert_eq!(*result, Ok(()), "{flow:?}");
        }
    }
}

/// UDP flows of so many clients.
fn udp_flows(clients: u32, to: SocketAddr, by: SocketAddr) -> Vec<Flow> {
    let from = |n: u32| {
        let [_, high, middle, low] = n.to_be_bytes();
        SocketAddr::from(([198, 18 + high, middle, low], 5353))
    };
    let flow = |n| Flow {
        protocol: Protocol::Udp,
        from: from(n),
        to,
        by,
    };
    (0..clients).map(flow).collect()
}

/// How many entries there are.
fn tracked(node: &Namespace) -> u32 {
    let said = node.tool("conntrack -C");
    said.trim().parse().unwrap()
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn stale(to: &str, by: Option<&str>) -> StaleFlows {
    let server = VirtualServerKey::Address {
        address: addr(to).ip(),
        port: addr(to).port(),
        protocol: Protocol::Udp,
    };
    let real_server = |by: &str| RealServerKey {
        address: addr(by).ip(),
        port: addr(by).port(),
    };
    [(server, by.map(real_server))].into()
}

/// Whichever way it is listed, what is stale goes and nothing else.
#[test]
fn only_what_is_stale_is_forgotten() {
    let node = Namespace::new();
    let (mut socket, mut conntrack) = node.enter(|| {
        (
            Socket::open(Subsystem::Netfilter).unwrap(),
            Conntrack::open().unwrap(),
        )
    });
    // Tracked from the first rule on that asks for it.
    node.tool("iptables-legacy -A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT");
    let servers = [
        ("10.96.0.10:53", ["10.0.0.2:8053", "10.0.0.3:8053"]),
        ("10.96.0.10:54", ["10.0.0.2:8053", "10.0.0.3:8053"]),
        ("10.96.0.11:53", ["10.0.0.2:8053", "10.0.0.2:8054"]),
        ("[fd96::10]:53", ["[fd00:10::2]:8053", "[fd00:10::3]:8053"]),
    ];
    let mut flows = Vec::new();
    for (to, by) in servers {
        for by in by {
            for protocol in [Protocol::Udp, Protocol::Udp, Protocol::Tcp] {
                let client = 1000 + u16::try_from(flows.len()).unwrap();
                let from = match addr(to).is_ipv4() {
                    true => SocketAddr::from(([10, 0, 0, 99], client)),
                    false => SocketAddr::new("fd00:10::99".parse().unwrap(), client),
                };
                flows.push(Flow {
                    protocol,
                    from,
                    to: addr(to),
                    by: addr(by),
                });
            }
        }
    }
    let unrelated = |n: u8| stale(&format!("10.99.0.{n}:53"), None);
    for more in [0, 10] {
        for (to, by, gone) in [
            ("10.96.0.10:53", Some("10.0.0.2:8053"), 2),
            ("10.96.0.10:53", None, 4),
            ("10.96.0.11:53", Some("10.0.0.2:8054"), 2),
            ("[fd96::10]:53", Some("[fd00:10::3]:8053"), 2),
            ("[fd96::10]:53", None, 4),
            ("10.96.0.12:53", None, 0),
        ] {
            node.tool("conntrack -F");
            track(&mut socket, &flows);
            let mut all = Stale::default();
            all.add(&stale(to, by));
            // Of many, all are listed at once.
            (0..more).for_each(|n| assert_eq!(all.add(&unrelated(n)), 0));
            assert_eq!(conntrack.forget(&all), Ok(gone), "{to} {by:?} {more}");
            let wanted = |flow: &&Flow| {
                let ours = flow.to == addr(to) && by.is_none_or(|by| flow.by == addr(by));
                !(ours && flow.protocol == Protocol::Udp)
            };
            let listed = |family: &str| node.tool(&format!("conntrack -L -f {family}"));
            let left: Vec<&Flow> = flows.iter().filter(wanted).collect();
            let lines = listed("ipv4").lines().count() + listed("ipv6").lines().count();
            assert_eq!((lines, flows.len() - left.len()), (left.len(), gone));
        }
    }
}

/// Wherever it is asked for: in the namespace in which the kernel was opened.
#[test]
fn whoever_waits_finds_them_forgotten() {
    let node = Namespace::new();
    let (mut socket, mut kernel) = node.enter(|| {
        let kernel = Kernel::open(&[Family::V4], Choice::Legacy).unwrap();
        (Socket::open(Subsystem::Netfilter).unwrap(), kernel)
    });
    node.tool("iptables-legacy -A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT");
    let to = "10.96.0.11:53";
    for _ in 0..3 {
        track(
            &mut socket,
            &udp_flows(1000, addr(to), addr("10.0.0.2:8053")),
        );
        assert_eq!(tracked(&node), 1000);
        kernel.forget_flows(&stale(to, None));
        assert!(kernel.finish_flows(PATIENCE));
        assert_eq!(tracked(&node), 0);
    }
}

/// The largest memory that a process ever had, in KiB.
fn peak_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    line.unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap()
}

/// How long each of some changes of `web` takes until it is in the kernel, sorted.
fn changes(node: &Namespace, manifests: &Manifests, vip: SocketAddr) -> Vec<Duration> {
    let mut client = node.enter(Client::open).unwrap();
    let server = VirtualServerKey::Address {
        address: vip.ip(),
        port: vip.port(),
        protocol: Protocol::Tcp,
    };
    let mut took: Vec<Duration> = (0..20_u8)
        .map(|round| {
            let address = pod_addresses(10 + round)[0];
            let endpoints = [(address, true, "node")];
            let began = Instant::now();
            manifests.write(
                "web.yaml",
                &slice("web-0", "web", &[("", "TCP", 8080)], &endpoints),
            );
            wait_until("another Service's change is in force", || {
                let there = client.real_servers(server).unwrap();
                there
                    .iter()
                    .any(|entry| entry.server.key.address == address)
            });
            let took = began.elapsed();
            thread::sleep(Duration::from_millis(130));
            took
        })
        .collect();
    took.sort();
    took
}

/// UDP endpoints that change ten times a second beside a long table: another Service's changes take as long as beside a short
/// one, and memory does not grow with the table.
#[test]
fn a_long_table_and_endpoints_that_change_hold_up_nobody() {
    let entries = if long() { 1_000_000 } else { 60_000 };
    let room = Room::new(entries * 2);
    let topology = Topology::new(1);
    let node = topology.node();
    let manifests = Manifests::new();
    let (web, dns) = (addr("10.96.0.10:80"), addr("10.96.0.11:53"));
    let services = service("web", &["10.96.0.10"], &[("", "TCP", 80, 0)])
        + &service("dns", &["10.96.0.11"], &[("", "UDP", 53, 0)]);
    manifests.write("services.yaml", &services);
    let endpoints = |pods: &[u8]| {
        let all: Vec<_> = pods
            .iter()
            .map(|pod| (pod_addresses(*pod)[0], true, "node"))
            .collect();
        manifests.write(
            "dns.yaml",
            &slice("dns-0", "dns", &[("", "UDP", 8053)], &all),
        );
    };
    endpoints(&[1, 2]);
    let mut daemon = Daemon::start(node, &manifests, &["--sync-period=1h"]);
    daemon.settle();
    let stop = AtomicBool::new(false);
    let (short, long, before, after) = thread::scope(|scope| {
        let _stopper = Stop(&stop);
        scope.spawn(|| {
            let mut away = false;
            while !stop.load(Ordering::SeqCst) {
                away = !away;
                endpoints(if away { &[1] } else { &[1, 2] });
                thread::sleep(Duration::from_millis(100));
            }
        });
        let short = changes(node, &manifests, web);
        let before = peak_kib(daemon.pid());
        let mut socket = node.enter(|| Socket::open(Subsystem::Netfilter)).unwrap();
        // Answered by the endpoint that stays.
        let stays = SocketAddr::new(pod_addresses(1)[0], 8053);
        track(&mut socket, &udp_flows(entries, dns, stays));
        let long = changes(node, &manifests, web);
        (short, long, before, peak_kib(daemon.pid()))
    });
    let [short_median, long_median] = [&short, &long].map(|took| took[took.len() / 2]);
    let worst = *long.last().unwrap();
    println!(
        "{entries} entries: {short_median:?}, {long_median:?}, at worst {worst:?}; {before} KiB, {after} KiB"
    );
    let slack = Duration::from_millis(100);
    assert!(long_median < short_median * 3 + slack, "{short:?} {long:?}");
    assert!(worst < Duration::from_secs(1), "{long:?}");
    assert!(after < before + 4096, "{before} KiB, {after} KiB");
    assert!(tracked(node) >= entries);

    // And with the endpoint that they lead to, all of them go.
    endpoints(&[2]);
    let patience = Duration::from_millis(u64::from(entries) / 5).max(PATIENCE);
    wait_up_to(patience, "they are forgotten", || tracked(node) < 100);
    wait_up_to(patience, "the log says so", || {
        daemon.log().contains("forgot UDP flows")
    });
    drop(room);
}
