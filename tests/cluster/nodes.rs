//! The own Node: its name, its addresses, its pods' networks.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tests::daemon::wait_up_to;

use crate::api::start;
use crate::cluster::{Cluster, collection, service, slice, with};
use crate::node::{ADDRESS, NAME, pod_address};
use crate::plane::HOST;

/// The node as pods see it: its address on their bridge.
const BRIDGE: &str = "10.244.1.1";
const PATH: &str = "/api/v1/nodes/n1";
/// The finding while pods can't be told.
const UNKNOWN: &str = "there is no Node of this name with spec.podCIDRs";

/// Makes the Node anew with these networks of its pods.
fn remake(cluster: &Cluster, pod_cidrs: &[&str]) {
    cluster.plane.request("DELETE", PATH, "");
    let spec = match pod_cidrs.first() {
        Some(first) => json!({"podCIDR": first, "podCIDRs": pod_cidrs}),
        None => json!({}),
    };
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME}, "spec": spec,
        "status": {"addresses": [{"type": "InternalIP", "address": ADDRESS}]}});
    cluster.create("/api/v1/nodes", &node);
}

/// The rule that masquerades on the way to a ClusterIP.
fn rule(cluster: &Cluster, family: &str) -> String {
    let rules = cluster.node.run(&format!(
        "{family}-save -t nat | grep -e '-CLUSTER-IP .*-j KUBE-MARK-MASQ' || true"
    ));
    rules.trim().to_owned()
}

fn wait_rule(cluster: &Cluster, family: &str, holds: &str) {
    let what = format!("the rule of {family} says {holds}");
    // The API server is tried again after half a minute at most.
    wait_up_to(Duration::from_secs(60), &what, || {
        std::thread::sleep(Duration::from_millis(100));
        rule(cluster, family).contains(holds)
    });
}

/// Who answers a request from outside of the node, and whom it saw asking.
fn ask_from_outside(address: &str) -> String {
    let url = format!("http://{address}/");
    let asked = Command::new("curl")
        .args(["-s", "--max-time", "5", &url])
        .output();
    let output = asked.expect("curl");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn ready(cluster: &Cluster) -> String {
    let url = "http://127.0.0.1:10256/readyz?verbose";
    cluster.node.run(&format!("curl -s '{url}'"))
}

/// Whom the pod behind 10.96.0.80 sees: from outside, and from another pod of the node.
fn seen(cluster: &Cluster) -> [String; 2] {
    let answers = [
        ask_from_outside("10.96.0.80"),
        cluster.node.ask("pod2", "10.96.0.80"),
    ];
    answers.map(|answer| {
        let asking = answer.strip_prefix("pod0 ");
        let asking = asking.and_then(|asking| asking.rsplit_once(':'));
        asking.unwrap_or_else(|| panic!("{answer:?}")).0.to_owned()
    })
}

/// Services work before the Node has podCIDRs, and the rules follow these as they come.
#[test]
fn the_rules_follow_the_pod_cidrs() {
    with(|cluster| {
        remake(cluster, &[]);
        cluster.serve("web", "10.96.0.80", &[0]);
        start(cluster, "--detect-local-mode=NodeCIDR");
        assert!(cluster.node.log().contains(UNKNOWN));
        assert!(ready(cluster).contains("[~]pod-cidrs failed since"));
        wait_rule(cluster, "iptables", "KUBE-CLUSTER-IP src,dst");
        let (outside, pod) = (HOST.to_owned(), pod_address(2));
        assert_eq!(
            seen(cluster),
            [outside, pod.clone()],
            "nobody is masqueraded"
        );

        // They come: what is not from them is masqueraded.
        let (_, mut node) = cluster.plane.request("GET", PATH, "");
        node["spec"]["podCIDR"] = json!("10.244.1.0/24");
        node["spec"]["podCIDRs"] = json!(["10.244.1.0/24", "fd00:244:1::/64"]);
        cluster.replace(PATH, &node);
        wait_rule(cluster, "iptables", "! -s 10.244.1.0/24");
        wait_rule(cluster, "ip6tables", "! -s fd00:244:1::/64");
        assert!(rule(cluster, "iptables").contains("KUBE-CLUSTER-IP dst,dst"));
        assert_eq!(seen(cluster), [BRIDGE.to_owned(), pod.clone()]);
        assert!(ready(cluster).contains("[+]pod-cidrs ok since"));

        // The Node is made anew without any: what was known stays. Then it gets others.
        remake(cluster, &[]);
        cluster.serve("after", "10.96.0.81", &[0]);
        cluster
            .node
            .wait_table("news go on", |table| table.contains("-a -t 10.96.0.81:80"));
        assert!(rule(cluster, "iptables").contains("! -s 10.244.1.0/24"));
        remake(cluster, &["10.244.9.0/24"]);
        wait_rule(cluster, "iptables", "! -s 10.244.9.0/24");
        wait_rule(cluster, "ip6tables", "KUBE-6-CLUSTER-IP src,dst");
        assert_eq!(seen(cluster), [BRIDGE, BRIDGE], "these are no pods of it");

        remake(cluster, &["10.244.1.0/24"]);
        wait_rule(cluster, "iptables", "! -s 10.244.1.0/24");
        assert_eq!(seen(cluster), [BRIDGE.to_owned(), pod]);
        assert_eq!(cluster.node.run("pidof ipvs-proxy | wc -w").trim(), "1");
        // A restart knows them before it writes the first time.
        cluster.node.end_daemon("TERM");
        start(cluster, "--detect-local-mode=NodeCIDR");
        let log = cluster.node.log();
        assert!(!log.contains("ops=") && !log.contains(UNKNOWN), "{log}");
    });
}

/// The Node may not be read: Services work all the same, after as long as kube-proxy would wait.
#[test]
fn a_node_that_cannot_be_read_holds_up_nothing() {
    with(|cluster| {
        cluster.serve("web", "10.96.0.80", &[0]);
        let rights = "/apis/rbac.authorization.k8s.io/v1";
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": "no-nodes"}, "rules": [
                {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch"]},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]});
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "no-nodes"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "no-nodes"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "stranger"}]});
        cluster.create(&format!("{rights}/clusterroles"), &role);
        cluster.create(&format!("{rights}/clusterrolebindings"), &binding);
        let server = format!("https://{HOST}:6443");
        let kubeconfig = cluster.plane.kubeconfig(&server, "stranger-token");
        let flags = "--detect-local-mode=NodeCIDR";
        cluster.node.start_daemon(&kubeconfig, flags);
        cluster.node.wait_in_force();
        assert!(cluster.node.log().contains(UNKNOWN));
        assert_eq!(seen(cluster)[0], HOST);
        // A right that comes later is enough.
        let everyone =
            json!({"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]});
        let mut more = role;
        more["rules"].as_array_mut().unwrap().push(everyone);
        cluster.replace(&format!("{rights}/clusterroles/no-nodes"), &more);
        wait_rule(cluster, "iptables", "! -s 10.244.1.0/24");
        assert_eq!(seen(cluster)[0], BRIDGE);
        for kind in ["clusterrolebindings", "clusterroles"] {
            cluster.delete(&format!("{rights}/{kind}/no-nodes"));
        }
    });
}

/// Manifests have no Node of this name: an error says so, and Services work.
#[test]
fn manifests_without_the_node() {
    with(|cluster| {
        let node = &cluster.node;
        let mut web = service("web", "10.96.0.80");
        web["metadata"]["namespace"] = json!("default");
        node.run("rm -rf /run/manifests; mkdir /run/manifests");
        node.write("/run/manifests/web.json", &web.to_string());
        let of_web = slice("web", &[0]).to_string();
        node.write("/run/manifests/slice.json", &of_web);
        node.start_daemon_by("--manifests /run/manifests --detect-local-mode=NodeCIDR");
        node.wait_in_force();
        let log = node.log();
        let told = log.lines().find(|line| line.contains(UNKNOWN));
        assert!(told.is_some_and(|line| line.contains("ERROR")), "{log}");
        assert_eq!(seen(cluster)[0], HOST);
        let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME},
            "spec": {"podCIDRs": ["10.244.1.0/24"]}});
        node.write("/run/manifests/node.json", &object.to_string());
        wait_rule(cluster, "iptables", "! -s 10.244.1.0/24");
        assert_eq!(seen(cluster), [BRIDGE.to_owned(), pod_address(2)]);
    });
}

/// The node's name is not the host's: by it the Node is found, and the endpoints of this node.
#[test]
fn the_name_is_told() {
    with(|cluster| {
        cluster.serve("web", "10.96.0.80", &[0]);
        let server = format!("https://{HOST}:6443");
        let kubeconfig = cluster.plane.kubeconfig(&server, "proxy-token");
        let node = &cluster.node;
        node.write("/run/kubeconfig", &kubeconfig);
        let flags = "--kubeconfig /run/kubeconfig --detect-local-mode=NodeCIDR";
        let own = format!("{},tcp:8080,{}", pod_address(0), pod_address(0));
        for (name, found) in [(" N1 ", true), ("another", false)] {
            node.run_daemon("", &format!("{flags} --hostname-override='{name}'"));
            node.wait_in_force();
            node.wait_table("it is served", |table| {
                table.contains("-a -t 10.96.0.80:80")
            });
            assert_eq!(node.log().contains(UNKNOWN), !found, "{name}");
            let loop_back = node.run("ipset list KUBE-LOOP-BACK");
            assert_eq!(loop_back.contains(&own), found, "{loop_back}");
            node.clean();
        }
    });
}

/// Sets the Node's addresses, all of the type InternalIP.
fn set_addresses(cluster: &Cluster, addresses: &[&str]) {
    let (_, mut node) = cluster.plane.request("GET", PATH, "");
    let listed = addresses
        .iter()
        .map(|address| json!({"type": "InternalIP", "address": address}));
    node["status"]["addresses"] = listed.collect::<Value>();
    cluster.replace(&format!("{PATH}/status"), &node);
}

/// Of the Node's addresses, the first of each family serve node ports where these are to be on the primary ones; the
/// addresses of links say the rest. Labels change nothing.
#[test]
fn node_ports_follow_the_primary_addresses() {
    const SECOND: &str = "192.168.60.12";
    const SIX: &str = "fd60::11";
    with(|cluster| {
        let node = &cluster.node;
        node.run(&format!(
            "ip addr add {SECOND}/24 dev vec0; ip -6 addr add {SIX}/64 dev vec0 nodad"
        ));
        let mut web = service("web", "10.96.0.80");
        web["spec"] = json!({"type": "NodePort", "ipFamilyPolicy": "RequireDualStack",
            "clusterIP": "10.96.0.80", "clusterIPs": ["10.96.0.80", "fd96::80"],
            "ports": [{"port": 80, "targetPort": 8080, "nodePort": 30080}]});
        cluster.create(&collection("services"), &web);
        cluster.create(&collection("endpointslices"), &slice("web", &[0]));
        start(cluster, "--nodeport-addresses=primary");
        // Which addresses have the node port.
        let on = |table: &str, expected: &[&str]| {
            [ADDRESS, SECOND, "[fd60::11]"].iter().all(|address| {
                table.contains(&format!("-A -t {address}:30080")) == expected.contains(address)
            })
        };
        node.wait_table("on the first", |table| on(table, &[ADDRESS]));
        set_addresses(cluster, &[ADDRESS, SIX]);
        let both = [ADDRESS, "[fd60::11]"];
        node.wait_table("on both families", |table| on(table, &both));
        set_addresses(cluster, &[SIX, SECOND, ADDRESS]);
        let moved = [SECOND, "[fd60::11]"];
        node.wait_table("on another", |table| on(table, &moved));
        assert!(ask_from_outside(&format!("{SECOND}:30080")).starts_with("pod0"));

        // No address at all is no word; labels and annotations say nothing here.
        let passes = || node.log().matches("ops=").count();
        let before = passes();
        set_addresses(cluster, &[]);
        let (_, mut labelled) = cluster.plane.request("GET", PATH, "");
        labelled["metadata"]["labels"] = json!({"topology.kubernetes.io/zone": "z1"});
        labelled["metadata"]["annotations"] = json!({"a": "b"});
        cluster.replace(PATH, &labelled);
        cluster.serve("after", "10.96.0.81", &[0]);
        node.wait_table("news go on", |table| table.contains("-a -t 10.96.0.81:80"));
        assert!(on(&node.table(), &moved), "{}", node.table());
        let after = passes() - before;
        assert!(after <= 2, "the Node makes no pass: {}", node.log());

        // An address that the node's links have no more is gone, whatever the Node says.
        set_addresses(cluster, &[SECOND, SIX]);
        node.run(&format!("ip addr del {SECOND}/24 dev vec0"));
        node.wait_table("IPv6 is left", |table| on(table, &["[fd60::11]"]));
        set_addresses(cluster, &[ADDRESS]);
        node.wait_table("as at first", |table| on(table, &[ADDRESS]));

        // Addresses that a flag names are the last word.
        node.clean();
        start(cluster, &format!("--node-ips={ADDRESS}"));
        node.wait_table("on the named one", |table| on(table, &[ADDRESS]));
        set_addresses(cluster, &[SIX, ADDRESS]);
        cluster.serve("last", "10.96.0.82", &[0]);
        node.wait_table("news go on", |table| table.contains("-a -t 10.96.0.82:80"));
        assert!(on(&node.table(), &[ADDRESS]), "{}", node.table());
        node.run(&format!("ip addr del {SIX}/64 dev vec0"));
        remake(cluster, &["10.244.1.0/24"]);
    });
}
