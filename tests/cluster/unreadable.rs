//! An object that can't be read: what it said before stays in force, and the others go on.

use serde_json::{Value, json};
use tests::daemon::wait_until;

use crate::bad_days::start_behind;
use crate::cluster::{Cluster, collection, service, slice, with};
use crate::faults::Mode;

/// A number that the API server is made to send as text of the same length.
const BAD: Mode = Mode::Replace("\"nodePort\":30085", "\"nodePort\":\"300\"");

/// A Service with this node port; 30085 can't be read.
fn web(port: u16, node_port: u16) -> Value {
    let mut web = service("web", "10.96.0.80");
    web["spec"]["type"] = json!("NodePort");
    web["spec"]["ports"][0]["port"] = json!(port);
    web["spec"]["ports"][0]["nodePort"] = json!(node_port);
    web
}

fn ready(cluster: &Cluster) -> String {
    let url = "http://127.0.0.1:10256/readyz?verbose";
    cluster.node.run(&format!("curl -s '{url}'"))
}

/// Another Service comes into the kernel: the news before it did, too.
fn others_go_on(cluster: &Cluster, number: u8) {
    let address = format!("10.96.3.{number}");
    cluster.serve(&format!("other{number}"), &address, &[1]);
    cluster.node.wait_table("others go on", |table| {
        table.contains(&format!("-a -t {address}:80"))
    });
}

#[test]
fn the_last_good_state_of_an_object_stays() {
    with(|cluster| {
        let faults = start_behind(cluster);
        let path = format!("{}/web", collection("services"));
        let served = |table: &str| table.contains("-a -t 10.96.0.80:80 ");
        cluster.create(&collection("services"), &web(80, 30080));
        cluster.create(&collection("endpointslices"), &slice("web", &[0]));
        cluster.node.wait_table("it is served", served);

        // A watch tells a version that can't be read.
        faults.set(BAD);
        cluster.replace(&path, &web(81, 30085));
        let kept = "object=\"Service default/web\" field=spec.ports[0].nodePort value=invalid type: string \"300\", \
                    expected i32 reason=so what the object said before stays in force";
        wait_until("it is named", || cluster.node.log().contains(kept));
        others_go_on(cluster, 1);
        assert!(served(&cluster.node.table()));
        assert!(cluster.node.ask("pod2", "10.96.0.80").starts_with("pod0"));
        let verbose = ready(cluster);
        assert!(verbose.contains(": 1 can't be read: Service default/web: spec.ports[0]"));

        // So does a list.
        faults.set(Mode::Status(410));
        wait_until("the failure is told", || {
            cluster.node.log().contains("can't be followed")
        });
        faults.set(BAD);
        others_go_on(cluster, 2);
        assert!(served(&cluster.node.table()));
        assert_eq!(cluster.node.log().matches(kept).count(), 1, "told once");

        // A version that can be read counts.
        cluster.replace(&path, &web(82, 30086));
        cluster.node.wait_table("it follows", |table| {
            table.contains("-a -t 10.96.0.80:82 ") && !served(table)
        });
        assert!(ready(cluster).contains("[+]api-services ok since"));

        // One that goes while it can't be read is gone.
        cluster.replace(&path, &web(83, 30085));
        wait_until("it is named again", || {
            ready(cluster).contains(": 1 can't be read: Service default/web: spec.ports[0]")
        });
        cluster.delete(&path);
        cluster
            .node
            .wait_table("it is gone", |table| !table.contains("10.96.0.80"));

        // Of one that was never read nothing is in force.
        cluster.create(&collection("services"), &web(80, 30085));
        wait_until("it is named", || {
            cluster
                .node
                .log()
                .contains("so nothing of the object is used")
        });
        others_go_on(cluster, 3);
        assert!(!cluster.node.table().contains("10.96.0.80"));
        // It is sent as it is: there is nothing in the way.
        faults.set(Mode::Status(410));
        std::thread::sleep(std::time::Duration::from_secs(2));
        faults.set(Mode::Pass);
        cluster.node.wait_table("it is served", served);
    });
}

/// A restart knows nothing of an object that can't be read: what the kernel holds may be its, and stays.
#[test]
fn what_was_never_read_is_not_pruned_at_a_restart() {
    with(|cluster| {
        let faults = start_behind(cluster);
        let served = |table: &str| table.contains("-a -t 10.96.0.80:80 ");
        let gone = |table: &str| !table.contains("-t 10.96.0.90:80 ");
        cluster.create(&collection("services"), &web(80, 30085));
        cluster.create(&collection("endpointslices"), &slice("web", &[0]));
        cluster.serve("gone", "10.96.0.90", &[0]);
        cluster.node.wait_table("both are served", |table| {
            served(table) && table.contains("-a -t 10.96.0.90:80 ")
        });

        cluster.node.end_daemon("KILL");
        for kind in ["services", "endpointslices"] {
            cluster.delete(&format!("{}/gone", collection(kind)));
        }
        faults.set(BAD);
        let kubeconfig = cluster.plane.kubeconfig(&faults.url(), "proxy-token");
        cluster.node.start_daemon(&kubeconfig, "");
        cluster.node.wait_in_force();
        let log = cluster.node.log();
        assert!(log.contains("what nobody claims stays"), "{log}");
        others_go_on(cluster, 4);
        let table = cluster.node.table();
        assert!(served(&table) && !gone(&table), "{table}");
        assert!(cluster.node.ask("pod2", "10.96.0.80").starts_with("pod0"));

        // All can be read: what is nobody's goes.
        faults.set(Mode::Status(410));
        std::thread::sleep(std::time::Duration::from_secs(2));
        faults.set(Mode::Pass);
        cluster
            .node
            .wait_table("what is nobody's is gone", |table| {
                served(table) && gone(table)
            });
    });
}
