//! Services by chance. Each has a VIP of its own, so that only where it is meant two want the same.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use tests::daemon::{service, slice};
use tests::topology::pod_addresses;

use super::disturbances::gone;
use super::{Random, Run, TARGET};

/// How many small Services there may be.
pub(super) const TENANTS: u64 = 8;

/// The address of a node beside the daemon's.
const OTHER_NODE: &str = "198.18.0.9";

/// The manifest of that node.
pub(super) fn other_node() -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: other}}\nstatus:\n  addresses: [{{type: InternalIP, address: {OTHER_NODE}}}]\n"
    )
}

/// The ClusterIPs of a small Service.
pub(super) fn vips(tenant: u64) -> [String; 2] {
    [format!("10.96.1.{tenant}"), format!("fd96::1:{tenant}")]
}

/// The objects with which a phase begins, whatever the one before left.
pub(super) fn all_anew(run: &mut Run<'_>) {
    for number in 1..=TENANTS {
        let file = format!("tenant{number}.yaml");
        if run.random.once_in(4) {
            gone(run, &file);
        } else {
            let text = tenant(&mut run.random, number);
            run.world.manifests.write(&file, &text);
        }
    }
    gone(run, "big.yaml");
}

/// A small Service as it may be at some time: its manifest.
pub(super) fn tenant(random: &mut Random, number: u64) -> String {
    let name = format!("tenant{number}");
    let vips = vips(number);
    let families = if random.once_in(2) { 1 } else { 2 };
    let ips: Vec<&str> = vips.iter().take(families).map(String::as_str).collect();
    let has_node_ports = random.once_in(4);
    let names: Vec<String> = (0..random.within(1..=3))
        .map(|port| format!("p{port}"))
        .collect();
    let mut ports = Vec::new();
    for (place, name) in (0..).zip(&names) {
        let protocol = if random.once_in(3) { "UDP" } else { "TCP" };
        let port = u16::try_from(random.within(80..=89)).unwrap() + 10 * place;
        let node_port = 31000 + 10 * u16::try_from(number).unwrap() + place;
        ports.push((
            name.as_str(),
            protocol,
            port,
            if has_node_ports { node_port } else { 0 },
        ));
    }
    let mut text = service(&name, &ips, &ports);
    if random.once_in(3) {
        text.push_str("  sessionAffinity: ClientIP\n");
    }
    // Few addresses, so that some are wanted twice; one is another node's, and so is routed.
    if random.once_in(3) {
        let address = *random
            .one(&["198.18.0.1", "198.18.0.2", "198.18.0.3", OTHER_NODE])
            .unwrap();
        let _ = writeln!(text, "  externalIPs: [\"{address}\"]");
    }
    let targets: Vec<_> = ports
        .iter()
        .map(|(name, protocol, ..)| (*name, *protocol, TARGET))
        .collect();
    let all = [0, 1, 2, 3].map(|pod| (random.once_in(2), pod, !random.once_in(4)));
    let pods = all.iter().filter(|(chosen, ..)| *chosen);
    for family in 0..families {
        let endpoints: Vec<_> = pods
            .clone()
            .map(|(_, pod, ready)| (pod_addresses(*pod)[family], *ready, "node"))
            .collect();
        text += &slice(&format!("{name}-{family}"), &name, &targets, &endpoints);
    }
    text
}

/// A Service that is big in one way or another: what it is, and its manifest.
pub(super) fn big(random: &mut Random) -> (String, String) {
    let net = |base: [u8; 2], number: u64| -> IpAddr {
        let [.., high, low] = number.to_be_bytes();
        Ipv4Addr::new(base[0], base[1], high, low).into()
    };
    let (ips, ports, endpoints) = match random.within(0..=2) {
        0 => (0, 1, random.within(1000..=4000)),
        1 => (random.within(500..=2000), 1, random.within(0..=2)),
        _ => (
            random.within(20..=40),
            random.within(20..=50),
            random.within(0..=1),
        ),
    };
    let names: Vec<String> = (0..ports).map(|port| format!("p{port}")).collect();
    let numbered = || (1000..).zip(&names);
    let of_service: Vec<_> = numbered()
        .map(|(port, name)| (name.as_str(), "TCP", port, 0))
        .collect();
    let targets: Vec<_> = numbered()
        .map(|(port, name)| (name.as_str(), "TCP", port))
        .collect();
    let mut text = service("big", &["10.96.0.200"], &of_service);
    let external: Vec<String> = (1..=ips)
        .map(|number| format!("\"{}\"", net([198, 19], number)))
        .collect();
    let _ = writeln!(text, "  externalIPs: [{}]", external.join(", "));
    let numbers: Vec<u64> = (1..=endpoints).collect();
    for (place, part) in numbers.chunks(1000).enumerate() {
        let endpoints: Vec<_> = part
            .iter()
            .map(|number| (net([10, 250], *number), true, "elsewhere"))
            .collect();
        text += &slice(&format!("big-{place}"), "big", &targets, &endpoints);
    }
    (
        format!("with {ips} external addresses, {ports} ports, {endpoints} endpoints"),
        text,
    )
}
