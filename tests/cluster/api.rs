//! Objects by the API, packets after them.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::cluster::{Cluster, collection, service, slice, with};
use crate::node::{ADDRESS, NAME, pod_address};
use crate::plane::HOST;

/// A daemon that reaches the API server as kube-proxy does: the server's own address and the user `system:kube-proxy`.
pub(crate) fn start(cluster: &Cluster, flags: &str) {
    let server = format!("https://{HOST}:6443");
    let kubeconfig = cluster.plane.kubeconfig(&server, "proxy-token");
    cluster.node.start_daemon(&kubeconfig, flags);
    cluster.node.wait_in_force();
}

#[test]
fn packets_follow_services_and_slices() {
    with(|cluster| {
        start(cluster, "--scheduler=lc");
        cluster.serve("web", "10.96.0.80", &[0, 1]);
        let node = &cluster.node;
        node.wait_table("two pods serve it", |table| {
            table.contains(&format!("-t 10.96.0.80:80 -r {}:8080", pod_address(0)))
                && table.contains(&format!("-t 10.96.0.80:80 -r {}:8080", pod_address(1)))
        });
        assert!(node.table().contains("-A -t 10.96.0.80:80 -s lc"));
        let answers: Vec<String> = (0..4).map(|_| node.ask("pod2", "10.96.0.80")).collect();
        for pod in ["pod0", "pod1"] {
            assert!(answers.iter().any(|a| a.starts_with(pod)), "{answers:?}");
        }
        // A pod keeps its address.
        assert!(
            answers.iter().all(|a| a.contains(&pod_address(2))),
            "{answers:?}"
        );
        // The API server itself, by its Service: from the node and from a pod.
        for from in ["", "ip netns exec pod2 "] {
            let code = node.run(&format!(
                "{from}curl -sk --max-time 5 -o /dev/null -w '%{{http_code}}' https://10.96.0.1/readyz"
            ));
            assert_eq!(code, "200", "from {from:?}");
        }

        let path = format!("{}/web", collection("endpointslices"));
        cluster.replace(&path, &slice("web", &[1]));
        cluster.node.wait_table("one pod left", |table| {
            !table.contains(&format!("{}:8080 -m -w 1", pod_address(0)))
        });
        for _ in 0..4 {
            assert!(cluster.node.ask("pod2", "10.96.0.80").starts_with("pod1"));
        }
        // An edit of the Service: another port.
        let mut edited = service("web", "10.96.0.80");
        edited["spec"]["ports"][0]["port"] = json!(81);
        cluster.replace(&format!("{}/web", collection("services")), &edited);
        cluster.node.wait_table("the port moved", |table| {
            table.contains("-t 10.96.0.80:81") && !table.contains("-t 10.96.0.80:80")
        });
        cluster.delete(&format!("{}/web", collection("services")));
        cluster
            .node
            .wait_table("the Service is gone", |table| !table.contains("10.96.0.80"));
    });
}

/// Labels that hand an object to somebody else take it out of the server's selection, as if it were deleted.
#[test]
fn labels_take_objects_out_and_bring_them_back() {
    with(|cluster| {
        start(cluster, "");
        cluster.serve("web", "10.96.0.80", &[0]);
        let served = |table: &str| table.contains("-a -t 10.96.0.80:80");
        cluster.node.wait_table("it is served", served);
        let path = format!("{}/web", collection("services"));
        let mut other = service("web", "10.96.0.80");
        other["metadata"]["labels"] =
            json!({"service.kubernetes.io/service-proxy-name": "another"});
        cluster.replace(&path, &other);
        cluster.node.wait_table("it is another proxy's", |table| {
            !table.contains("10.96.0.80")
        });
        cluster.replace(&path, &service("web", "10.96.0.80"));
        cluster.node.wait_table("it is ours again", served);

        let path = format!("{}/web", collection("endpointslices"));
        let mut headless = slice("web", &[0]);
        headless["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
        cluster.replace(&path, &headless);
        cluster
            .node
            .wait_table("the slice does not count", |table| {
                table.contains("-A -t 10.96.0.80:80") && !served(table)
            });
        cluster.replace(&path, &slice("web", &[0]));
        cluster.node.wait_table("it counts again", served);
    });
}

/// The Node goes and comes back; its addresses stay the last word meanwhile.
#[test]
fn a_node_goes_and_comes_back() {
    with(|cluster| {
        start(cluster, "");
        let mut web = service("web", "10.96.0.80");
        web["spec"]["type"] = json!("NodePort");
        web["spec"]["ports"][0]["nodePort"] = json!(30080);
        cluster.create(&collection("services"), &web);
        cluster.create(&collection("endpointslices"), &slice("web", &[0]));
        let node_port = format!("-a -t {ADDRESS}:30080");
        cluster.node.wait_table("the node port is served", |table| {
            table.contains(&node_port)
        });
        cluster.delete(&format!("/api/v1/nodes/{NAME}"));
        // Something after it, so that its news have arrived.
        cluster.serve("after", "10.96.0.81", &[0]);
        cluster
            .node
            .wait_table("news go on", |table| table.contains("-a -t 10.96.0.81:80"));
        assert!(cluster.node.table().contains(&node_port));
        assert_eq!(health(cluster), "503 200", "the Node is gone");
        cluster.make_node();
        cluster.serve("last", "10.96.0.82", &[0]);
        cluster
            .node
            .wait_table("news go on", |table| table.contains("-a -t 10.96.0.82:80"));
        assert!(cluster.node.table().contains(&node_port));
        assert!(
            cluster
                .node
                .ask("pod1", &format!("{ADDRESS}:30080"))
                .starts_with("pod0")
        );
        assert_eq!(health(cluster), "200 200");
        // The autoscaler says that it removes the node: nothing new from load balancers, and no restart.
        let path = format!("/api/v1/nodes/{NAME}");
        let (_, mut node) = cluster.plane.request("GET", &path, "");
        node["spec"]["taints"] = json!([{"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}]);
        cluster.replace(&path, &node);
        tests::daemon::wait_until("the taint is seen", || health(cluster) == "503 200");
        cluster.delete(&path);
        cluster.make_node();
    });
}

/// The codes of /healthz and /livez.
pub(crate) fn health(cluster: &Cluster) -> String {
    let script = "for path in healthz livez; do \
        curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:10256/$path; done";
    cluster.node.run(script).trim().to_owned()
}

/// A list of one Node says how many there are, by which Events are spread; and each request is counted, as client-go does.
#[test]
fn nodes_and_requests_are_counted() {
    const MORE: usize = 20;
    let nodes = "/api/v1/nodes";
    with(|cluster| {
        let node = |number| {
            let name = format!("other-{number}");
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        };
        (0..MORE).for_each(|number| drop(cluster.create(nodes, &node(number))));
        start(cluster, "-v 4");
        let counted = format!("nodes={}", MORE + 1);
        tests::daemon::wait_until("the nodes are counted", || {
            let log = cluster.node.log();
            let line = log.lines().find(|line| line.contains("counted the nodes"));
            line.is_some_and(|line| {
                assert!(line.contains(&counted), "{line}");
                true
            })
        });
        (0..MORE).for_each(|number| cluster.delete(&format!("{nodes}/other-{number}")));

        let metrics = || {
            let text = cluster
                .node
                .run("curl -s http://127.0.0.1:10249/metrics | grep '^rest_client'");
            let value = |name: &str| -> u32 {
                let name = format!("rest_client_{name},host=\"{HOST}:6443\"}} ");
                let line = text.lines().find_map(|line| line.strip_prefix(&name));
                line.map_or(0, |value| value.parse().unwrap())
            };
            assert!(!text.contains("<error>"), "{text}");
            [
                value("requests_total{code=\"200\",method=\"GET\""),
                value("request_duration_seconds_count{verb=\"GET\""),
            ]
        };
        // Three lists, three watches and the count of the nodes; watches are not timed.
        tests::daemon::wait_until("all requests are counted", || metrics() == [7, 4]);
    });
}

/// The objects of deploy/kubernetes, by kind.
fn deployed() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/base");
    let files = ["rbac.yaml", "daemonset.yaml"];
    let texts = files.map(|file| fs::read_to_string(folder.join(file)).unwrap());
    let documents = texts.iter().flat_map(|text| text.split("\n---\n"));
    let kind = |document: &str| {
        let mut kinds = document
            .lines()
            .filter_map(|line| line.strip_prefix("kind: "));
        kinds.next().map(str::to_owned)
    };
    documents
        .filter_map(|document| Some((kind(document)?, document.to_owned())))
        .collect()
}

/// The API server takes what deploy/ has, and knows every field of it.
#[test]
fn the_manifests_are_valid() {
    with(|cluster| {
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let mut kinds = Vec::new();
        for (kind, document) in deployed() {
            let path = match kind.as_str() {
                "ServiceAccount" => "/api/v1/namespaces/kube-system/serviceaccounts".to_owned(),
                "ClusterRole" => format!("{rbac}/clusterroles"),
                "ClusterRoleBinding" => format!("{rbac}/clusterrolebindings"),
                "DaemonSet" => "/apis/apps/v1/namespaces/kube-system/daemonsets".to_owned(),
                other => panic!("no path for {other}"),
            };
            let strict = format!("{path}?dryRun=All&fieldValidation=Strict");
            let (code, answer) = cluster.plane.request("POST", &strict, &document);
            assert_eq!(code, 201, "{kind}: {answer}");
            let wrong = document.replacen("metadata:", "metadatum: {}\nmetadata:", 1);
            let (code, _) = cluster.plane.request("POST", &strict, &wrong);
            assert_eq!(code, 400, "{kind} with a field that is none");
            kinds.push(kind);
        }
        assert!(kinds.contains(&"DaemonSet".to_owned()), "{kinds:?}");
        start(cluster, "");
    });
}

/// Without a right, the error names verb and resource; with it, all goes on by itself.
#[test]
fn a_missing_right_is_named() {
    with(|cluster| {
        let server = format!("https://{HOST}:6443");
        let kubeconfig = cluster.plane.kubeconfig(&server, "stranger-token");
        cluster.node.start_daemon(&kubeconfig, "");
        tests::daemon::wait_until("the refusal is logged", || {
            let log = cluster.node.log();
            ["services", "endpointslices", "nodes"]
                .iter()
                .all(|resource| {
                    log.contains(&format!("cannot list resource \\\"{resource}\\\""))
                        || log.contains(&format!("cannot list resource \"{resource}\""))
                })
        });
        assert_eq!(cluster.node.table(), "", "nothing is written meanwhile");
        // With the rights that deploy/ gives, and no more.
        let (_, role) = deployed()
            .into_iter()
            .find(|(kind, _)| kind == "ClusterRole")
            .unwrap();
        let roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
        let (code, role) = cluster.plane.request("POST", roles, &role);
        assert_eq!(code, 201, "{role}");
        let name = role["metadata"]["name"].as_str().unwrap();
        let rights = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "stranger"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "stranger"}]});
        cluster.create(rights, &binding);
        cluster.node.wait_in_force();
        tests::daemon::wait_until("the end of the failure is logged", || {
            cluster.node.log().contains("is followed again")
        });
        // It may write Events, too: that it started is one, which the first had no right to write.
        cluster.node.end_daemon("TERM");
        let file = "/run/config.conf";
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration";
        cluster.node.write(file, head);
        let flags = format!("--config {file}");
        cluster.node.start_daemon(&kubeconfig, &flags);
        cluster.node.wait_in_force();
        // What would keep the next start from working is known before.
        cluster.node.write(file, &format!("{head}\nmode: none"));
        let told = |reason: &str| {
            tests::daemon::wait_up_to(Duration::from_secs(90), reason, || {
                std::thread::sleep(Duration::from_secs(1));
                let path = "/apis/events.k8s.io/v1/events";
                let (_, events) = cluster.plane.request("GET", path, "");
                let events = events["items"].as_array().cloned().unwrap_or_default();
                events
                    .iter()
                    .any(|event| event["reason"] == reason && event["regarding"]["name"] == NAME)
            });
        };
        told("Starting");
        told("UnusableConfiguration");
        let ready = "curl -s 'http://127.0.0.1:10256/readyz?verbose'";
        assert!(cluster.node.run(ready).contains("[~]config failed since "));
        cluster.delete(&format!("{rights}/stranger"));
        cluster.delete(&format!("{roles}/{name}"));
    });
}
