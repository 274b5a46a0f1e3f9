//! A Service with an SCTP port, by associations of the kernel's own SCTP.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect,
    listen, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use tests::daemon::{service, wait_until};
use tests::topology::{NODE, pod_addresses};

use super::{Scene, ready, slices};

const VIPS: [&str; 2] = ["10.96.0.20", "fd96::20"];
const SERVICE_PORT: u16 = 132;
const SCTP_NODE_PORT: u16 = 30132;
const SCTP_TARGET: u16 = 9132;

/// A one-to-one SCTP socket. With one address at each end nothing in an association names addresses, so translation works.
fn sctp(of: SocketAddr) -> OwnedFd {
    let family = if of.is_ipv4() {
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
    .expect("an SCTP socket");
    if of.is_ipv6() {
        setsockopt(&made, sockopt::Ipv6V6Only, &true).unwrap();
    }
    made
}

/// Answers each association with a name and whom it saw asking.
fn serve(name: &str, at: SocketAddr) {
    let name = name.to_owned();
    let made = sctp(at);
    bind(made.as_raw_fd(), &SockaddrStorage::from(at)).unwrap();
    listen(&made, Backlog::new(16).unwrap()).unwrap();
    // accept(), read() and write() are the same for both.
    let listener = TcpListener::from(made);
    thread::spawn(move || {
        while let Ok((mut stream, peer)) = listener.accept() {
            let _ = stream.read(&mut [0; 16]);
            // One write, one message.
            let _ = stream.write_all(format!("{name} {}", peer.ip()).as_bytes());
        }
    });
}

fn ask(to: SocketAddr) -> Result<String, String> {
    let made = sctp(to);
    let timeout = TimeVal::seconds(4);
    setsockopt(&made, sockopt::SendTimeout, &timeout).unwrap();
    setsockopt(&made, sockopt::ReceiveTimeout, &timeout).unwrap();
    connect(made.as_raw_fd(), &SockaddrStorage::from(to)).map_err(|e| e.to_string())?;
    let mut stream = TcpStream::from(made);
    stream.write_all(b"?").map_err(|e| e.to_string())?;
    let mut answer = [0; 128];
    let length = stream.read(&mut answer).map_err(|e| e.to_string())?;
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
}

#[test]
fn an_sctp_service_is_served_by_cluster_ip_and_node_port() {
    let mut scene = Scene::new(3);
    for pod in [0, 1] {
        for address in pod_addresses(pod) {
            let at = SocketAddr::new(address, SCTP_TARGET);
            scene
                .topology
                .pod(pod)
                .enter(|| serve(&format!("pod{pod}"), at));
        }
    }
    let ports = [("sctp", "SCTP", SERVICE_PORT, SCTP_NODE_PORT)];
    scene
        .manifests
        .write("app.yaml", &service("app", &VIPS, &ports));
    let targets = [("sctp", "SCTP", SCTP_TARGET)];
    scene
        .manifests
        .write("app-slices.yaml", &slices("app", &targets, &ready(&[0, 1])));
    scene.launch(&[]);
    scene.daemon.as_mut().unwrap().settle();

    let cluster_ips = VIPS.map(|vip| SocketAddr::new(vip.parse().unwrap(), SERVICE_PORT));
    let node_ports = NODE.map(|node| SocketAddr::new(node, SCTP_NODE_PORT));
    let listed = scene.topology.node().tool("ipvsadm -Ln");
    for to in cluster_ips.into_iter().chain(node_ports) {
        assert!(listed.contains(&format!("SCTP {to} rr")), "{to}: {listed}");
        let servers = scene.servers("--sctp-service", to);
        assert_eq!(servers, Some([(0, 1), (1, 1)].into()), "{to}");
    }
    let [v4, v6] = ["KUBE-NODE-PORT-SCTP-HASH", "KUBE-6-NODE-PORT-SCTP-HASH"]
        .map(|set| scene.members(set).join(" "));
    assert!(v4.contains("192.168.10.11,sctp:30132"), "{v4}");
    assert!(v6.contains("fd00:192::11,sctp:30132"), "{v6}");
    assert!(
        scene
            .members("KUBE-CLUSTER-IP")
            .contains(&"10.96.0.20,sctp:132".to_owned())
    );

    let (pod, outside) = (scene.topology.pod(2), scene.topology.outside());
    for (client, namespace) in [("pod", pod), ("outside", outside)] {
        for to in cluster_ips.into_iter().chain(node_ports) {
            let mut names: Vec<String> = (0..2)
                .map(|_| {
                    let answer = namespace.enter(|| ask(to));
                    answer.unwrap_or_else(|error| panic!("{client} {to}: {error}"))
                })
                .collect();
            // A pod keeps its address on the way to a ClusterIP, everybody else is masqueraded.
            let bridge = tests::topology::BRIDGE[usize::from(to.is_ipv6())];
            let own = pod_addresses(2)[usize::from(to.is_ipv6())];
            let keeps = client == "pod" && cluster_ips.contains(&to);
            let peer = if keeps { own } else { bridge };
            names.sort_unstable();
            let wanted = ["pod0", "pod1"].map(|name| format!("{name} {peer}"));
            assert_eq!(names, wanted, "{client} {to}");
        }
    }

    // It drains as TCP does, and leaves when no association is left.
    scene
        .manifests
        .write("app-slices.yaml", &slices("app", &targets, &ready(&[1])));
    for to in cluster_ips.into_iter().chain(node_ports) {
        wait_until(&format!("pod0 takes no new association of {to}"), || {
            scene
                .servers("--sctp-service", to)
                .is_some_and(|servers| servers.get(&0).is_none_or(|weight| *weight == 0))
        });
        let answer = pod.enter(|| ask(to)).unwrap();
        assert!(answer.starts_with("pod1 "), "{to}: {answer}");
    }
}
