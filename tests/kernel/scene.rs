//! What the scenes of several modules are made of: one node, its pods, the Service `web`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use tests::daemon::slice;
use tests::netns::Namespace;
use tests::topology::{Topology, pod_addresses};

/// The port of `web`.
pub(crate) const PORT: u16 = 80;
/// Its node port.
pub(crate) const NODE_PORT: u16 = 30080;
/// The port of the pods' servers.
pub(crate) const TARGET: u16 = 8080;
/// The pods' networks, as the topology has them.
pub(crate) const CLUSTER_CIDR: &str = "--cluster-cidr=10.0.0.0/24,fd00:10::/64";

/// The real servers of a virtual server as pod and weight, by `ipvsadm`; `None` when there is no such virtual server.
pub(crate) fn servers(
    node: &Namespace,
    protocol: &str,
    vip: SocketAddr,
) -> Option<BTreeMap<u8, u32>> {
    let saved = node.tool("ipvsadm -Sn");
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

/// The pod at an address and port.
pub(crate) fn pod_of(text: &str) -> u8 {
    let address = text.parse::<SocketAddr>().unwrap().ip();
    (0..200)
        .find(|pod| pod_addresses(*pod).contains(&address))
        .unwrap()
}

/// A slice for each family, with pods that are ready or not.
pub(crate) fn slices(
    service: &str,
    ports: &[(&str, &str, u16)],
    endpoints: &[(u8, bool)],
) -> String {
    let family = |index: usize| {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|(pod, ready)| (pod_addresses(*pod)[index], *ready, "node"))
            .collect();
        slice(&format!("{service}-{index}"), service, ports, &endpoints)
    };
    family(0) + &family(1)
}

/// Pods that are all ready.
pub(crate) fn ready(pods: &[u8]) -> Vec<(u8, bool)> {
    pods.iter().map(|pod| (*pod, true)).collect()
}

/// Who asks: a pod (the one with that number), the node, the machine outside.
pub(crate) fn clients(topology: &Topology, pod: u8) -> [(&'static str, &Namespace); 3] {
    [
        ("pod", topology.pod(pod)),
        ("node", topology.node()),
        ("outside", topology.outside()),
    ]
}

/// Ends a load also when what goes on beside it panics.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
