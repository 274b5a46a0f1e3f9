//! The kinds of Services and of their addresses, the ways in which endpoints leave, and sysctls: with real traffic. The daemon
//! follows the node's addresses itself, as it does where nobody gives it any.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use tests::daemon::{Daemon, Manifests, service, wait_until};
use tests::netns::Namespace;
use tests::topology::Topology;
use tests::traffic::{Server, http_get};

use crate::scene::{self, CLUSTER_CIDR, NODE_PORT, PORT, TARGET, ready, slices};

mod addresses;
mod drains;
mod flows;
mod policies;
mod privilege;
mod refused;
mod sctp;
mod sysctls;
mod udp;

/// ClusterIPs of the Service `web`.
const WEB: [&str; 2] = ["10.96.0.10", "fd96::10"];

struct Scene {
    // First, so that it is gone before what it works on.
    daemon: Option<Daemon>,
    topology: Topology,
    manifests: Manifests,
    _servers: Vec<Server>,
}

impl Scene {
    /// A node with pods that all serve, without a daemon.
    fn new(pods: u8) -> Self {
        let topology = Topology::new(pods);
        Self {
            daemon: None,
            _servers: (0..pods).map(|pod| topology.serve(pod, TARGET)).collect(),
            topology,
            manifests: Manifests::new(),
        }
    }

    /// The Service `web` with those pods as endpoints, more lines below its `spec`, and a daemon with these flags that serves it.
    fn web(pods: u8, endpoints: &[u8], more: &str, flags: &[&str]) -> Self {
        Self::serving(pods, endpoints, &web(more), flags)
    }

    /// As [`web`](Self::web), with the Service's whole text.
    fn serving(pods: u8, endpoints: &[u8], service: &str, flags: &[&str]) -> Self {
        let mut this = Self::new(pods);
        this.manifests.write("web.yaml", service);
        this.endpoints(endpoints);
        this.launch(flags);
        let vip = vips()[0];
        this.topology.outside().enter(|| {
            wait_until(&format!("{vip} answers"), || http_get(vip).is_ok());
        });
        this
    }

    fn launch(&mut self, flags: &[&str]) {
        self.daemon = None;
        let flags: Vec<&str> = [CLUSTER_CIDR]
            .into_iter()
            .chain(flags.iter().copied())
            .collect();
        self.daemon = Some(Daemon::start(self.topology.node(), &self.manifests, &flags));
    }

    /// Makes these pods the endpoints of `web`, without waiting.
    fn endpoints(&self, pods: &[u8]) {
        let ports = [("tcp", "TCP", TARGET), ("udp", "UDP", TARGET)];
        self.manifests
            .write("web-slices.yaml", &slices("web", &ports, &ready(pods)));
    }

    /// The real servers of a virtual server as pod and weight, by `ipvsadm`; `None` when there is no such virtual server.
    fn servers(&self, protocol: &str, vip: SocketAddr) -> Option<BTreeMap<u8, u32>> {
        scene::servers(self.topology.node(), protocol, vip)
    }

    fn await_servers(&self, protocol: &str, vip: SocketAddr, wanted: &[(u8, u32)]) {
        let wanted: BTreeMap<u8, u32> = wanted.iter().copied().collect();
        wait_until(&format!("{protocol} {vip} has {wanted:?}"), || {
            self.servers(protocol, vip).as_ref() == Some(&wanted)
        });
    }

    /// The members of a set.
    fn members(&self, set: &str) -> Vec<String> {
        let text = self.topology.node().tool(&format!("ipset list {set}"));
        let members = text.lines().skip_while(|line| *line != "Members:").skip(1);
        members.map(str::to_owned).collect()
    }

    /// The addresses of a link of the node, IPv6 link-local ones left out.
    fn addresses(&self, link: &str) -> Vec<IpAddr> {
        let text = self
            .topology
            .node()
            .tool(&format!("ip -o addr show dev {link}"));
        let address = |line: &str| {
            let with_length = line.split_whitespace().nth(3).unwrap();
            with_length.split('/').next().unwrap().parse().unwrap()
        };
        let all = text.lines().map(address);
        all.filter(|address| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()))
            .collect()
    }

    /// Who asks: a pod (the one with that number), the node, the machine outside.
    fn clients(&self, pod: u8) -> [(&'static str, &Namespace); 3] {
        scene::clients(&self.topology, pod)
    }
}

/// `web` by its ClusterIPs.
fn vips() -> [SocketAddr; 2] {
    WEB.map(|address| SocketAddr::new(address.parse().unwrap(), PORT))
}

/// The Service `web`, TCP and UDP, with more lines below its `spec`.
fn web(more: &str) -> String {
    let ports = [
        ("tcp", "TCP", PORT, NODE_PORT),
        ("udp", "UDP", PORT, NODE_PORT),
    ];
    service("web", &WEB, &ports) + more
}
