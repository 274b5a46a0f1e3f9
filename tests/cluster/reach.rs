//! The daemon as a pod of the cluster: how it finds the API server.

use std::fs;
use std::time::Duration;

use serde_json::json;
use tests::daemon::wait_up_to;

use crate::api::start;
use crate::cluster::{collection, service, slice, with};
use crate::node::{NAME, pod_address};
use crate::plane::HOST;

/// The environment of a pod: the API server's ClusterIP.
const POD: &str = "KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_SERVICE_PORT=443";
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// What is said where only this proxy could lead there.
const HINT: &str = "is no virtual server of this node";

#[test]
fn a_pod_needs_another_address_than_the_cluster_ip() {
    with(|cluster| {
        let node = &cluster.node;
        node.run(&format!("mkdir -p {ACCOUNT}"));
        let authority = fs::read_to_string(cluster.plane.authority()).unwrap();
        node.write(&format!("{ACCOUNT}/ca.crt"), &authority);
        // As kubelet writes them, without an end of line.
        node.run(&format!(
            "cd {ACCOUNT}; printf proxy-token > token; printf kube-system > namespace"
        ));
        let flags = format!("--node-name {NAME}");
        node.run_daemon(POD, &flags);
        wait_up_to(Duration::from_secs(60), "the reason is told", || {
            std::thread::sleep(Duration::from_millis(200));
            node.log().contains(HINT)
        });
        let log = node.log();
        let told = log.lines().find(|line| line.contains(HINT)).unwrap();
        for word in [
            "ERROR",
            "10.96.0.1:443",
            "ClusterIP",
            "--master",
            "--kubeconfig",
        ] {
            assert!(told.contains(word), "{word}: {told}");
        }
        let ready = node.run("curl -s 'http://127.0.0.1:10256/readyz?verbose'");
        assert!(
            ready.contains("[-]in-force") && ready.contains(HINT),
            "{ready}"
        );
        assert!(node.daemon_runs());
        assert_eq!(node.table(), "");

        // The server's own address goes before it.
        node.end_daemon("TERM");
        node.run_daemon(POD, &format!("{flags} --master https://{HOST}:6443"));
        node.wait_in_force();
        assert!(node.table().contains("-a -t 10.96.0.1:443 "));
        assert!(!node.log().contains(HINT));

        // Once the ClusterIP is programmed, it leads there, too.
        node.end_daemon("TERM");
        node.run_daemon(POD, &flags);
        node.wait_in_force();
        cluster.serve("web", "10.96.0.80", &[0]);
        node.wait_table("news come", |table| table.contains("-a -t 10.96.0.80:80"));
        assert!(!node.log().contains(HINT));

        // Another authority counts as soon as it is there, as a kubeconfig's does.
        let certificate = format!("{ACCOUNT}/ca.crt");
        node.write(&certificate, "");
        wait_up_to(Duration::from_secs(60), "the new file is read", || {
            std::thread::sleep(Duration::from_millis(200));
            node.log().contains("connecting anew")
        });
        cluster.serve("late", "10.96.0.81", &[0]);
        std::thread::sleep(Duration::from_secs(2));
        assert!(!node.table().contains("10.96.0.81"));
        node.write(&certificate, &authority);
        node.wait_table("news come again", |table| {
            table.contains("-a -t 10.96.0.81:80")
        });
        node.run(&format!("rm -r {ACCOUNT}"));
    });
}

/// A Service that asks for the API server's own address has it but for the API server's port, and the node goes on hearing of
/// changes, also after a restart.
#[test]
fn the_address_of_the_api_server_leads_to_it() {
    with(|cluster| {
        start(cluster, "");
        let node = &cluster.node;
        let mut web = service("web", "10.96.0.80");
        web["spec"]["externalIPs"] = json!([HOST]);
        web["spec"]["ports"] = json!([
            {"name": "web", "port": 80, "targetPort": 8080},
            {"name": "api", "port": 6443, "targetPort": 8080},
        ]);
        let mut endpoints = slice("web", &[0]);
        endpoints["ports"] = json!([
            {"name": "web", "port": 8080, "protocol": "TCP"},
            {"name": "api", "port": 8080, "protocol": "TCP"},
        ]);
        cluster.create(&collection("services"), &web);
        cluster.create(&collection("endpointslices"), &endpoints);
        let reached = |when: &str| {
            node.wait_table(when, |table| {
                table.contains(&format!("-a -t {HOST}:80 -r {}:8080", pod_address(0)))
            });
            let routed = format!("{HOST},tcp:80");
            wait_up_to(Duration::from_secs(30), when, || {
                node.run("ipset list KUBE-IPVS-ROUTED").contains(&routed)
            });
            assert!(
                !node.table().contains(&format!("-A -t {HOST}:6443")),
                "{when}"
            );
            let bound = node.run("ip -o addr show dev kube-ipvs0");
            assert!(!bound.contains(HOST), "{when}: {bound}");
            assert!(node.ask("pod2", HOST).starts_with("pod0"), "{when}");
            for from in ["", "ip netns exec pod2 "] {
                let code = node.run(&format!(
                    "{from}curl -sk --max-time 5 -o /dev/null -w '%{{http_code}}' https://{HOST}:6443/readyz"
                ));
                assert_eq!(code, "200", "{when}, from {from:?}");
            }
        };
        reached("it is served");
        for cause in [
            "is a port that the node needs",
            "is an address that the node needs",
        ] {
            assert!(node.log().contains(cause), "{}", node.log());
        }
        node.end_daemon("KILL");
        start(cluster, "");
        reached("after a restart");
        cluster.serve("later", "10.96.0.81", &[0]);
        node.wait_table("changes are heard", |table| {
            table.contains("-a -t 10.96.0.81:80")
        });
        cluster.delete(&format!("{}/web", collection("services")));
        node.wait_table("its end is heard", |table| {
            !table.contains(&format!("{HOST}:80"))
        });
    });
}
