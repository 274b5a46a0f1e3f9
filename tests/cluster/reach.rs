//! The daemon as a pod of the cluster: how it finds the API server.

use std::fs;
use std::time::Duration;

use tests::daemon::wait_up_to;

use crate::cluster::with;
use crate::node::NAME;
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
