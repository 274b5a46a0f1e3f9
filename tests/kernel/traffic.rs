//! Real connections through the kernel that the daemon programs: one node, its pods, a client
//! outside.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use tests::daemon::{Daemon, Manifests, service, slice, wait_until};
use tests::netns::Namespace;
use tests::topology::{NODE, Topology, pod_addresses};
use tests::traffic::{Answer, Error, Server, http_get, udp_ask};

mod drain;
mod host;
mod objects;
mod paths;
mod restart;
mod schedulers;

/// ClusterIPs of the Service `web`.
const WEB: [&str; 2] = ["10.96.0.10", "fd96::10"];
/// The port of `web`, TCP and UDP.
const PORT: u16 = 80;
/// Its node port.
const NODE_PORT: u16 = 30080;
/// The port of the pods' servers.
const TARGET: u16 = 8080;
/// The pods' networks, as the topology has them.
const CLUSTER_CIDR: &str = "--cluster-cidr=10.0.0.0/24,fd00:10::/64";

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
        let endpoints: Vec<(u8, bool)> = pods.iter().map(|pod| (*pod, true)).collect();
        self.manifests
            .write("web-slices.yaml", &web_slices(&endpoints));
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
        let saved = self.topology.node().tool("ipvsadm -Sn");
        let vip = vip.to_string();
        let lines = saved
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let mut found = None;
        for words in lines.filter(|words| words.get(1..3) == Some(&[protocol, vip.as_str()])) {
            let servers: &mut BTreeMap<u8, u32> = found.get_or_insert_default();
            if words[0] == "-a" {
                servers.insert(pod_of(words[4]), words[7].parse().unwrap());
            }
        }
        found
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
        let topology = &self.topology;
        [
            ("pod", topology.pod(pod)),
            ("node", topology.node()),
            ("outside", topology.outside()),
        ]
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

/// A slice for each family.
fn slices(service: &str, ports: &[(&str, &str, u16)], endpoints: &[(u8, bool)]) -> String {
    let family = |index: usize| {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|(pod, ready)| (pod_addresses(*pod)[index], *ready, "node"))
            .collect();
        slice(&format!("{service}-{index}"), service, ports, &endpoints)
    };
    family(0) + &family(1)
}

/// The pod at an address and port.
fn pod_of(text: &str) -> u8 {
    let address = text.parse::<SocketAddr>().unwrap().ip();
    (0..200)
        .find(|pod| pod_addresses(*pod).contains(&address))
        .unwrap()
}

/// How often each name came.
fn tally(names: impl IntoIterator<Item = String>) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for name in names {
        *counts.entry(name).or_default() += 1;
    }
    counts
}

/// Ends loads also when what goes on beside them panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
