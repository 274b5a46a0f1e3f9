//! From where to where, and whom the pod sees.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use tests::daemon::{service, slice};
use tests::topology::{BRIDGE, OUTSIDE, pod_addresses};
use tests::traffic::Error;

use super::{ASKS, CLUSTER_CIDR, PORT, Scene, TARGET, node_ports, vips};

/// How long the filter may take to refuse.
const AT_ONCE: Duration = Duration::from_millis(900);
/// How long IPVS may take. It refuses by an ICMP error, and TCP on the same machine, as all is
/// here, takes note of it with its first retransmission, after a second.
const BY_IPVS: Duration = Duration::from_millis(1900);
/// A pod that is no endpoint.
const CLIENT: u8 = 2;

/// Whom the pods see when each of [`Scene::clients`] goes to a ClusterIP, by family.
struct Seen {
    pod: [IpAddr; 2],
    outside: [IpAddr; 2],
}

/// Every path is served; a ClusterIP's client is seen as `seen`, and all else as the node.
fn check(flags: &[&str], seen: &Seen) {
    let scene = Scene::web(3, &[0, 1], flags);
    for (index, (vip, node_port)) in vips().into_iter().zip(node_ports()).enumerate() {
        let node = BRIDGE[index];
        let expected = [seen.pod[index], node, seen.outside[index]];
        for ((client, namespace), by_vip) in scene.clients(CLIENT).into_iter().zip(expected) {
            for (protocol, ask) in ASKS {
                for (to, source) in [(vip, by_vip), (node_port, node)] {
                    // Both endpoints.
                    for _ in 0..2 {
                        let answer = namespace.enter(|| ask(to));
                        let answer = answer
                            .unwrap_or_else(|error| panic!("{client} {protocol} {to}: {error}"));
                        assert_eq!(answer.peer.ip(), source, "{client} {protocol} {to}");
                    }
                }
            }
        }
    }
}

#[test]
fn with_cluster_cidr_only_pods_keep_their_address() {
    check(
        &[CLUSTER_CIDR],
        &Seen {
            pod: pod_addresses(CLIENT),
            outside: BRIDGE,
        },
    );
}

#[test]
fn without_cluster_cidr_pods_and_the_outside_keep_their_address() {
    check(
        &[],
        &Seen {
            pod: pod_addresses(CLIENT),
            outside: OUTSIDE,
        },
    );
}

#[test]
fn with_masquerade_all_pods_lose_their_address() {
    check(
        &[CLUSTER_CIDR, "--masquerade-all"],
        &Seen {
            pod: BRIDGE,
            outside: BRIDGE,
        },
    );
}

/// By the link that packets come from, whatever their addresses.
#[test]
fn with_bridge_interface_only_what_comes_from_it_keeps_its_address() {
    for (link, pod, outside) in [
        ("cbr0", pod_addresses(CLIENT), BRIDGE),
        ("eth0", BRIDGE, OUTSIDE),
    ] {
        let link = format!("--pod-bridge-interface={link}");
        check(
            &["--detect-local-mode=BridgeInterface", &link],
            &Seen { pod, outside },
        );
    }
}

#[test]
fn with_interface_name_prefix_only_what_comes_from_such_links_keeps_its_address() {
    for (prefix, pod, outside) in [
        ("cb", pod_addresses(CLIENT), BRIDGE),
        ("eth", BRIDGE, OUTSIDE),
        // No link begins like this, though one has it as its whole name and a letter less.
        ("cbr01", BRIDGE, BRIDGE),
    ] {
        let prefix = format!("--pod-interface-name-prefix={prefix}");
        check(
            &["--detect-local-mode=InterfaceNamePrefix", &prefix],
            &Seen { pod, outside },
        );
    }
}

#[test]
fn a_pod_reaches_itself_through_its_own_service() {
    for flags in [&[CLUSTER_CIDR][..], &[]] {
        let scene = Scene::web(2, &[0], flags);
        for (index, to) in vips().into_iter().zip(node_ports()).enumerate() {
            for to in [to.0, to.1] {
                for (protocol, ask) in ASKS {
                    let answer = scene.topology.pod(0).enter(|| ask(to));
                    let answer = answer.unwrap_or_else(|error| panic!("{protocol} {to}: {error}"));
                    // Its own address as the source would make it answer itself past the node.
                    assert_eq!(
                        (answer.name.as_str(), answer.peer.ip()),
                        ("pod0", BRIDGE[index])
                    );
                }
            }
        }
    }
}

#[test]
fn without_endpoints_a_service_refuses_at_once() {
    let mut scene = Scene::start(3, &[CLUSTER_CIDR]);
    scene.manifests.write("web.yaml", &super::web_service());
    // Another Service tells when the file of the first was read.
    scene.manifests.write(
        "zz.yaml",
        &service("zz", &["10.96.9.9"], &[("tcp", "TCP", PORT, 0)]),
    );
    let ports = [("tcp", "TCP", TARGET)];
    let endpoint = (pod_addresses(0)[0], true, "node");
    scene
        .manifests
        .write("zz-slice.yaml", &slice("zz", "zz", &ports, &[endpoint]));
    let other: SocketAddr = "10.96.9.9:80".parse().unwrap();
    scene.topology.outside().enter(|| {
        tests::daemon::wait_until("zz answers", || tests::traffic::http_get(other).is_ok());
    });
    for vip in vips() {
        scene.await_servers("-t", vip, |servers| servers.is_empty());
        scene.await_servers("-u", vip, |servers| servers.is_empty());
    }
    // Each VIP becomes an address of the node, and known to the rules, after its virtual servers are there.
    scene.daemon.as_mut().unwrap().settle();
    let targets: Vec<SocketAddr> = vips().into_iter().chain(node_ports()).collect();
    let refused = |when: &str| {
        // All at once, for each TCP connection may take its second.
        thread::scope(|scope| {
            for (client, namespace) in scene.clients(CLIENT) {
                for ((protocol, ask), to) in ASKS
                    .iter()
                    .flat_map(|ask| targets.iter().map(move |to| (ask, to)))
                {
                    scope.spawn(move || {
                        let start = Instant::now();
                        let answer = namespace.enter(|| ask(*to));
                        let took = start.elapsed();
                        let what =
                            format!("{when}: {client} {protocol} {to}: {answer:?} in {took:?}");
                        // IPVS drops what the node itself sends while it is being sent: EPERM.
                        let own = Err(Error::Other(ErrorKind::PermissionDenied));
                        let refused = answer == Err(Error::Refused)
                            || client == "node" && *protocol == "UDP" && answer == own;
                        // The filter refuses what comes in for a VIP; the rest is IPVS's to refuse.
                        let filtered = client != "node" && vips().contains(to);
                        let limit = if filtered { AT_ONCE } else { BY_IPVS };
                        assert!(refused && took < limit, "{what}");
                    });
                }
            }
        });
    };
    refused("no slice");
    scene.endpoints(&[0, 1]);
    for (client, namespace) in scene.clients(CLIENT) {
        for (protocol, ask) in ASKS {
            for to in &targets {
                let answer = namespace.enter(|| ask(*to));
                assert!(answer.is_ok(), "{client} {protocol} {to}: {answer:?}");
            }
        }
    }
    scene.manifests.write(
        "web-slices.yaml",
        &super::web_slices(&[(0, false), (1, false)]),
    );
    for (protocol, vip) in ["-t", "-u"]
        .into_iter()
        .flat_map(|p| vips().map(|vip| (p, vip)))
    {
        // The TCP connections of before drain.
        scene.await_servers(protocol, vip, |servers| {
            servers.values().all(|weight| *weight == 0)
        });
    }
    refused("all endpoints unready");
}
