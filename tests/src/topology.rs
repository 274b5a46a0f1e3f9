//! One node as a container network builds it, its pods, and a machine outside: each a network namespace of this process.
//!
//! ```text
//!            pod(0)      pod(1) …                 outside()
//!       10.0.0.2, fd00:10::2   10.0.0.3 …         192.168.10.100, fd00:192::100
//!               \         /                             |
//!  cbr0 (bridge) 10.0.0.1, fd00:10::1 — node() — eth0 192.168.10.11, fd00:192::11
//! ```
//!
//! The node forwards, pods reach themselves through it (hairpin), and traffic within the bridge passes iptables.
//! The outside's default route is the node, so it reaches Service addresses as well.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::netns::Namespace;
use crate::traffic::Server;

/// The node's addresses on its network, IPv4 and IPv6.
pub const NODE: [IpAddr; 2] = both(
    Ipv4Addr::new(192, 168, 10, 11),
    Ipv6Addr::new(0xfd00, 0x192, 0, 0, 0, 0, 0, 0x11),
);
/// The addresses of the machine outside.
pub const OUTSIDE: [IpAddr; 2] = both(
    Ipv4Addr::new(192, 168, 10, 100),
    Ipv6Addr::new(0xfd00, 0x192, 0, 0, 0, 0, 0, 0x100),
);
/// The node's addresses on the pods' bridge.
pub const BRIDGE: [IpAddr; 2] = both(
    Ipv4Addr::new(10, 0, 0, 1),
    Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, 1),
);

const fn both(v4: Ipv4Addr, v6: Ipv6Addr) -> [IpAddr; 2] {
    [IpAddr::V4(v4), IpAddr::V6(v6)]
}

/// The addresses of the pod with that number, counted from 0.
pub fn pod_addresses(number: u8) -> [IpAddr; 2] {
    let host = number + 2;
    both(
        Ipv4Addr::new(10, 0, 0, host),
        Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, host.into()),
    )
}

/// The namespaces, connected. Gone with this value.
#[derive(Debug)]
pub struct Topology {
    node: Namespace,
    pods: Vec<Namespace>,
    outside: Namespace,
}

impl Topology {
    /// Builds it with that many pods, at most 200. Takes one `ip` process for each namespace.
    pub fn new(pods: u8) -> Self {
        let this = Self {
            node: Namespace::new(),
            pods: (0..pods).map(|_| Namespace::new()).collect(),
            outside: Namespace::new(),
        };
        let mut node = String::from("link add cbr0 type bridge\nlink set cbr0 up\n");
        for (number, pod) in this.pods.iter().enumerate() {
            let port = format!("veth{number}");
            let _ = writeln!(
                node,
                "link add {port} type veth peer name eth0 netns {}",
                pod.path()
            );
            let _ = writeln!(
                node,
                "link set {port} master cbr0 up\nlink set {port} type bridge_slave hairpin on"
            );
        }
        let _ = writeln!(
            node,
            "link add eth0 type veth peer name eth0 netns {}\nlink set eth0 up",
            this.outside.path()
        );
        node.push_str(&addresses("cbr0", BRIDGE, 24));
        node.push_str(&addresses("eth0", NODE, 24));
        batch(&this.node, &node);
        for (number, pod) in (0..).zip(&this.pods) {
            batch(pod, &leaf(pod_addresses(number), BRIDGE));
        }
        batch(&this.outside, &leaf(OUTSIDE, NODE));
        this.node.sysctl("ipv4/ip_forward", "1");
        this.node.sysctl("ipv6/conf/all/forwarding", "1");
        this.node.sysctl("bridge/bridge-nf-call-iptables", "1");
        this.node.sysctl("bridge/bridge-nf-call-ip6tables", "1");
        this
    }

    /// The node's namespace: where the daemon runs.
    pub fn node(&self) -> &Namespace {
        &self.node
    }

    /// The namespace of the pod with that number. Panics when there is none.
    pub fn pod(&self, number: u8) -> &Namespace {
        self.pods
            .get(usize::from(number))
            .unwrap_or_else(|| panic!("no pod {number}"))
    }

    /// The namespace of the machine outside.
    pub fn outside(&self) -> &Namespace {
        &self.outside
    }

    /// Starts a server named `podN` on a TCP and a UDP port of that pod.
    pub fn serve(&self, number: u8, port: u16) -> Server {
        let name = format!("pod{number}");
        self.pod(number)
            .enter(|| Server::listen(&name, port))
            .unwrap_or_else(|error| panic!("{name}, port {port}: {error}"))
    }
}

/// The lines for a namespace with one link and everything else behind `router`.
fn leaf(own: [IpAddr; 2], [router4, router6]: [IpAddr; 2]) -> String {
    let addresses = addresses("eth0", own, 24);
    format!(
        "link set eth0 up\n{addresses}route add 0.0.0.0/0 via {router4}\nroute add ::/0 via {router6}\n"
    )
}

fn addresses(link: &str, [v4, v6]: [IpAddr; 2], length: u8) -> String {
    format!("addr add {v4}/{length} dev {link}\naddr add {v6}/64 dev {link} nodad\n")
}

fn batch(namespace: &Namespace, lines: &str) {
    namespace.tool_with_input("ip -batch -", lines);
}
