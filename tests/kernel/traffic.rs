//! Real connections through the kernel that the daemon programs: one node, its pods, a client
//! outside.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use tests::daemon::{Daemon, Manifests, service, wait_until};
use tests::netns::Namespace;
use tests::topology::{NODE, Topology};
use tests::traffic::{Answer, Error, Server, http_get, udp_ask};

use crate::scene::{self, CLUSTER_CIDR, NODE_PORT, PORT, Stop, TARGET, pod_of, ready, slices};

mod drain;
mod health_ports;
mod host;
mod objects;
mod paths;
mod restart;
mod schedulers;

/// ClusterIPs of the Service `web`.
const WEB: [&str; 2] = ["10.96.0.10", "fd96::10"];

/// A running daemon on a node with pods that all serve.
struct Scene {
    // First, so that it is gone before what it works on.
    daemon: Option<Daemon>,
    topology: Topology,
    manifests: Manifests,
    _servers: Vec<Server>,
}

impl Scene {
    fn start(pods: u8, flags: &[&str]) -> Self {
        let topology = Topology::new(pods);
        // A load needs more than a small guest's default. It is one number for all namespaces.
        std::fs::write("/proc/sys/net/netfilter/nf_conntrack_max", "65536").unwrap();
        // Every refusal is heard, also after many.
        topology.node().sysctl("ipv4/icmp_ratelimit", "0");
        topology.node().sysctl("ipv6/icmp/ratelimit", "0");
        let mut this = Self {
            daemon: None,
            _servers: (0..pods).map(|pod| topology.serve(pod, TARGET)).collect(),
            topology,
            manifests: Manifests::new(),
        };
        this.launch(flags);
        this
    }

    /// The Service `web` with those pods as ready endpoints, served.
    fn web(pods: u8, endpoints: &[u8], flags: &[&str]) -> Self {
        let this = Self::start(pods, flags);
        this.manifests.write("web.yaml", &web_service());
        this.endpoints(endpoints);
        for vip in vips() {
            this.await_answer(vip);
        }
        this
    }

    /// Starts the daemon, in place of the one before.
    fn launch(&mut self, flags: &[&str]) {
        self.daemon = None;
        let [v4, v6] = NODE;
        let node_ips = format!("--node-ips={v4},{v6}");
        let flags: Vec<&str> = [node_ips.as_str()]
            .into_iter()
            .chain(flags.iter().copied())
            .collect();
        self.daemon = Some(Daemon::start(self.topology.node(), &self.manifests, &flags));
    }

    /// Makes these pods the ready endpoints of `web`, without waiting.
    fn write_endpoints(&self, pods: &[u8]) {
        self.manifests
            .write("web-slices.yaml", &web_slices(&ready(pods)));
    }

    /// Makes these pods the ready endpoints of `web`, and waits until the kernel has them.
    fn endpoints(&self, pods: &[u8]) {
        self.write_endpoints(pods);
        for vip in vips() {
            for protocol in ["-t", "-u"] {
                self.await_servers(protocol, vip, |servers| {
                    let up = servers.iter().filter(|(_, weight)| **weight > 0);
                    up.map(|(pod, _)| *pod).eq(pods.iter().copied())
                });
            }
        }
    }

    /// The real servers of a virtual server as pod and weight, by `ipvsadm`; `None` when there is
    /// no such virtual server.
    fn servers(&self, protocol: &str, vip: SocketAddr) -> Option<BTreeMap<u8, u32>> {
        scene::servers(self.topology.node(), protocol, vip)
    }

    fn await_servers(
        &self,
        protocol: &str,
        vip: SocketAddr,
        mut condition: impl FnMut(BTreeMap<u8, u32>) -> bool,
    ) {
        wait_until(&format!("the real servers of {protocol} {vip}"), || {
            self.servers(protocol, vip).is_some_and(&mut condition)
        });
    }

    /// The open connections of each pod in a virtual server, by `ipvsadm`.
    fn active(&self, vip: SocketAddr) -> BTreeMap<u8, u32> {
        let listed = self.topology.node().tool(&format!("ipvsadm -Ln -t {vip}"));
        let words = listed
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let servers = words.filter(|words| words.first() == Some(&"->") && words[3] != "Weight");
        servers
            .map(|words| (pod_of(words[1]), words[4].parse().unwrap()))
            .collect()
    }

    /// Waits until a TCP and a UDP request from outside are answered.
    fn await_answer(&self, to: SocketAddr) {
        self.topology.outside().enter(|| {
            wait_until(&format!("{to} answers"), || {
                http_get(to).is_ok() && udp_ask(to).is_ok()
            });
        });
    }

    /// Who asks: a pod (the one with that number), the node, the machine outside.
    fn clients(&self, pod: u8) -> [(&'static str, &Namespace); 3] {
        scene::clients(&self.topology, pod)
    }
}

/// A request of one kind.
type Ask = fn(SocketAddr) -> Result<Answer, Error>;
const ASKS: [(&str, Ask); 2] = [("TCP", http_get), ("UDP", udp_ask)];

/// `web` by its ClusterIPs.
fn vips() -> [SocketAddr; 2] {
    at(PORT)
}

/// That port of the ClusterIPs of `web`.
fn at(port: u16) -> [SocketAddr; 2] {
    WEB.map(|address| SocketAddr::new(address.parse().unwrap(), port))
}

/// `web` by its node port.
fn node_ports() -> [SocketAddr; 2] {
    NODE.map(|address| SocketAddr::new(address, NODE_PORT))
}

fn web_service() -> String {
    service(
        "web",
        &WEB,
        &[
            ("tcp", "TCP", PORT, NODE_PORT),
            ("udp", "UDP", PORT, NODE_PORT),
        ],
    )
}

/// The slices of `web`, with pods that are ready or not.
fn web_slices(endpoints: &[(u8, bool)]) -> String {
    slices(
        "web",
        &[("tcp", "TCP", TARGET), ("udp", "UDP", TARGET)],
        endpoints,
    )
}

/// How often each name came.
fn tally(names: impl IntoIterator<Item = String>) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for name in names {
        *counts.entry(name).or_default() += 1;
    }
    counts
}
