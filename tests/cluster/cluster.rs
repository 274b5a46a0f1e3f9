//! The control plane and the node that all tests share.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tests::daemon::wait_up_to;

use crate::node::{ADDRESS, NAME, Node, pod_address};
use crate::plane::Plane;

/// Both. Their processes end with the test program, which is the first of a process namespace: libtest drops no statics.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) plane: Plane,
    pub(crate) node: Node,
}

static CLUSTER: Mutex<Option<Cluster>> = Mutex::new(None);

/// Runs a test on the cluster, which the first one starts. What the test leaves is cleaned away.
pub(crate) fn with(test: impl FnOnce(&mut Cluster)) {
    let mut shared: MutexGuard<'_, Option<Cluster>> =
        CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = shared.get_or_insert_with(|| {
        let node = Node::boot();
        let folder = std::env::temp_dir().join(format!("plane-{}", std::process::id()));
        let cluster = Cluster {
            plane: Plane::start(&folder),
            node,
        };
        cluster.make_node();
        cluster
    });
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(cluster)));
    if let Err(panic) = result {
        eprintln!(
            "the daemon's log:\n{:?}",
            cluster.node.try_run("cat /run/daemon.log")
        );
        // What a failed test left is nobody's to build on; statics are never dropped.
        *shared = None;
        std::panic::resume_unwind(panic);
    }
    cluster.clean();
}

impl Cluster {
    fn clean(&mut self) {
        self.node.clean();
        for kind in ["services", "endpointslices"] {
            let path = collection(kind);
            let others = format!("{path}?fieldSelector=metadata.name!=kubernetes");
            // A server that is short of time ends the request in the middle.
            wait_up_to(Duration::from_secs(300), "all objects are deleted", || {
                self.plane.try_request("DELETE", &others, "");
                self.names(&path).iter().all(|name| name == "kubernetes")
            });
        }
    }

    fn names(&self, path: &str) -> Vec<String> {
        let (_, list) = self.plane.request("GET", path, "");
        let items = list["items"].as_array().cloned().unwrap_or_default();
        items
            .iter()
            .filter_map(|item| Some(item["metadata"]["name"].as_str()?.to_owned()))
            .collect()
    }

    /// Makes the node's own Node.
    pub(crate) fn make_node(&self) {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME},
            "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]},
            "status": {"addresses": [{"type": "InternalIP", "address": ADDRESS}]}});
        self.create("/api/v1/nodes", &node);
    }

    /// Creates an object; panics when the API server refuses it.
    pub(crate) fn create(&self, path: &str, object: &Value) -> Value {
        let (code, answer) = self.plane.request("POST", path, &object.to_string());
        assert_eq!(code, 201, "{path}: {answer}");
        answer
    }

    /// Replaces an object, whatever version it has.
    pub(crate) fn replace(&self, path: &str, object: &Value) {
        let (code, answer) = self.plane.request("PUT", path, &object.to_string());
        assert_eq!(code, 200, "{path}: {answer}");
    }

    pub(crate) fn delete(&self, path: &str) {
        let (code, answer) = self.plane.request("DELETE", path, "");
        assert_eq!(code, 200, "{path}: {answer}");
    }

    /// A Service and a slice of these pods.
    pub(crate) fn serve(&self, name: &str, address: &str, pods: &[u8]) {
        self.create(&collection("services"), &service(name, address));
        self.create(&collection("endpointslices"), &slice(name, pods));
    }
}

/// Where objects of a kind are, in the namespace `default`.
pub(crate) fn collection(kind: &str) -> String {
    match kind {
        "services" => "/api/v1/namespaces/default/services".to_owned(),
        other => format!("/apis/discovery.k8s.io/v1/namespaces/default/{other}"),
    }
}

/// A Service on port 80.
pub(crate) fn service(name: &str, address: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"clusterIP": address, "ports": [{"port": 80, "targetPort": 8080}]}})
}

/// Its slice.
pub(crate) fn slice(service: &str, pods: &[u8]) -> Value {
    let endpoints: Vec<Value> = pods
        .iter()
        .map(|pod| json!({"addresses": [pod_address(*pod)], "nodeName": NAME, "conditions": {"ready": true}}))
        .collect();
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": service, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}], "endpoints": endpoints})
}
