//! The model of the kernel's schedulers by which the core's tests show that nodes don't herd, held against the kernel itself.

use std::net::SocketAddr;

use ipvs_netlink::Scheduler;
use tests::topology::{Topology, pod_addresses};
use tests::traffic::{Client, HeldConnection};

use crate::world::rs;
use crate::world::schedulers::Model;

const VIP: &str = "10.96.0.10";
/// The order in which pods become real servers.
const ADDED: [u8; 4] = [2, 0, 3, 1];

#[test]
fn schedulers_pick_as_the_model_does() {
    let topology = Topology::new(6);
    let _servers: Vec<_> = (0..5).map(|pod| topology.serve(pod, 8080)).collect();
    let (node, client) = (topology.node(), topology.pod(5));
    node.sysctl("ipv4/vs/conntrack", "1");
    node.tool_with_input(
        "ip -batch -",
        "link add kube-ipvs0 type dummy\naddr add 10.96.0.10/32 dev kube-ipvs0\n",
    );
    let real = |pod: u8| SocketAddr::new(pod_addresses(pod)[0], 8080).to_string();
    for (port, scheduler) in (80..).zip([
        Scheduler::RoundRobin,
        Scheduler::WeightedRoundRobin,
        Scheduler::LeastConnection,
        Scheduler::WeightedLeastConnection,
        Scheduler::ShortestExpectedDelay,
        Scheduler::NeverQueue,
    ]) {
        // A port for each: a real server that comes back to its virtual server still has the connections of before.
        let vip = SocketAddr::new(VIP.parse().unwrap(), port);
        node.tool(&format!("ipvsadm -A -t {vip} -s {scheduler}"));
        let mut model = Model::new(scheduler);
        let add = |model: &mut Model, pod| {
            node.tool(&format!("ipvsadm -a -t {vip} -r {} -m", real(pod)));
            model.add(rs(&real(pod)));
        };
        let pick = |model: &mut Model, when: &str| -> HeldConnection {
            let held = client.enter(|| Client::default().hold(vip)).unwrap();
            let expected = model.pick();
            let pods = (0..5).map(|pod| (format!("pod{pod}"), rs(&real(pod))));
            let (pod, _) = pods.into_iter().find(|(_, rs)| *rs == expected).unwrap();
            assert_eq!(held.answer.name, pod, "{scheduler}, {when}");
            held
        };
        for pod in ADDED {
            add(&mut model, pod);
        }
        let mut held: Vec<HeldConnection> = (0..6)
            .map(|n| pick(&mut model, &format!("connection {n}")))
            .collect();
        // Another one comes, and gets its share.
        add(&mut model, 4);
        held.extend((6..14).map(|n| pick(&mut model, &format!("connection {n}"))));
    }
}
