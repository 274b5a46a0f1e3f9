//! Writing events to the API server.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ipvs_proxy_netlink::Causes;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, PostParams};
use kube::core::Status as Answer;
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::{Due, Finding, Object, Reason, Reporter};
use crate::api::{Access, in_a_line};
use crate::serve::Status;

const CONTROLLER: &str = "ipvs-proxy.io/ipvs-proxy";
/// How many nodes there are as long as nobody said.
const MANY_NODES: u32 = 1000;
/// How often they are counted anew, at most.
const COUNT_AGAIN: Duration = Duration::from_secs(3600);
/// The same, after they could not be counted.
const COUNT_SOON: Duration = Duration::from_secs(60);
/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Writes events until nobody finds anything any more. What can't be written is left.
pub async fn write(
    access: &Access,
    node: &str,
    mut findings: Receiver<Finding>,
    status: &Arc<Status>,
) {
    let mut reporter = Reporter::new(node, MANY_NODES, Instant::now());
    let mut count_at = Instant::now();
    let mut told = false;
    loop {
        let due = reporter.next_at();
        let wait = due.map(|at| at.saturating_duration_since(Instant::now()));
        let finding = match wait {
            Some(wait) => timeout(wait, findings.recv()).await,
            None => Ok(findings.recv().await),
        };
        match finding {
            Ok(None) => return,
            Ok(Some(finding)) => {
                if count_at <= Instant::now() {
                    let nodes = timeout(PATIENCE, count_nodes(access)).await;
                    // What was known, or assumed, holds until then.
                    let again = match nodes.ok().flatten() {
                        Some(nodes) => {
                            debug!(nodes, "counted the nodes");
                            reporter.set_nodes(nodes);
                            COUNT_AGAIN
                        }
                        None => COUNT_SOON,
                    };
                    count_at = Instant::now() + again;
                }
                let wall = SystemTime::now().duration_since(UNIX_EPOCH);
                reporter.note(finding, Instant::now(), wall.unwrap_or_default());
            }
            // Something is due.
            Err(_) => {}
        }
        while let Some(due) = reporter.next(Instant::now()) {
            let written = timeout(PATIENCE, create(access, node, due)).await;
            let error = match written {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(_) => Some("no answer in time".to_owned()),
            };
            let result = if error.is_none() { "written" } else { "failed" };
            status
                .metrics
                .events
                .get_or_create(&[("result", result)])
                .inc();
            match error {
                None => told = false,
                Some(error) if !told => {
                    warn!(%error, "events can't be written; this is said once");
                    told = true;
                }
                Some(_) => {}
            }
        }
    }
}

/// How many nodes the cluster has: a list of one says how many more there are.
async fn count_nodes(access: &Access) -> Option<u32> {
    let (client, _) = access.client().await.ok()?;
    let one = ListParams::default().limit(1);
    let nodes = Api::<Node>::all(client).list_metadata(&one).await.ok()?;
    number(nodes.items.len(), &nodes.metadata)
}

/// How many objects there are, by a list of some of them. A server that has more may not say how many.
fn number(listed: usize, list: &ListMeta) -> Option<u32> {
    let continues = list
        .continue_
        .as_ref()
        .is_some_and(|token| !token.is_empty());
    let more = match list.remaining_item_count {
        None if continues => return None,
        more => more.unwrap_or_default(),
    };
    u32::try_from(more)
        .ok()?
        .checked_add(u32::try_from(listed).ok()?)
}

async fn create(access: &Access, node: &str, due: Due) -> Result<(), String> {
    let (client, _) = access
        .client()
        .await
        .map_err(|error| Causes(&error).to_string())?;
    let regarding = reference(&client, node, &due.finding.object).await;
    let namespace = regarding
        .namespace
        .as_deref()
        .unwrap_or("default")
        .to_owned();
    let event = event(node, &namespace, due, regarding);
    let events = Api::<Event>::namespaced(client, &namespace);
    match events.create(&PostParams::default(), &event).await {
        // Another node said it already.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        // The namespace is going or gone, and with it who would read this.
        Err(kube::Error::Api(status)) if status.code == 404 || is_terminating(&status) => Ok(()),
        Err(error) => Err(in_a_line(&Causes(&error).to_string())),
        Ok(_) => Ok(()),
    }
}

/// Whether the API server takes nothing new into the namespace, because somebody deletes it.
fn is_terminating(status: &Answer) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 403
        && causes
            .into_iter()
            .any(|cause| cause.reason == "NamespaceTerminating")
}

fn event(node: &str, namespace: &str, due: Due, regarding: ObjectReference) -> Event {
    let Due { finding, name } = due;
    let normal = finding.reason == Reason::Starting;
    Event {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(Timestamp::now())),
        action: Some(finding.reason.action().to_owned()),
        reason: Some(finding.reason.to_string()),
        type_: Some(if normal { "Normal" } else { "Warning" }.to_owned()),
        note: Some(finding.note),
        regarding: Some(regarding),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(node.chars().take(128).collect()),
        ..Event::default()
    }
}

/// The object as events name it. Without its UID `kubectl describe` does not show them; a list of
/// one is what a proxy's role allows.
async fn reference(client: &Client, node: &str, object: &Object) -> ObjectReference {
    let one = |name: &str| {
        ListParams::default()
            .fields(&format!("metadata.name={name}"))
            .limit(1)
    };
    let (api_version, kind, name, uid) = match object {
        // Kubelet and kube-proxy put the Node's name there.
        Object::Node => {
            return ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node.to_owned()),
                uid: Some(node.to_owned()),
                ..ObjectReference::default()
            };
        }
        Object::Service(name) => {
            let api = Api::<Service>::namespaced(client.clone(), &name.namespace);
            let list = api.list_metadata(&one(&name.name)).await;
            let uid = list.ok().and_then(|list| list.items.first()?.uid());
            ("v1", "Service", name, uid)
        }
        Object::EndpointSlice(name) => {
            let api = Api::<EndpointSlice>::namespaced(client.clone(), &name.namespace);
            let list = api.list_metadata(&one(&name.name)).await;
            let uid = list.ok().and_then(|list| list.items.first()?.uid());
            ("discovery.k8s.io/v1", "EndpointSlice", name, uid)
        }
    };
    ObjectReference {
        api_version: Some(api_version.to_owned()),
        kind: Some(kind.to_owned()),
        namespace: Some(name.namespace.to_string()),
        name: Some(name.name.to_string()),
        uid,
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::{Answer, ListMeta, is_terminating, number};

    #[test]
    fn a_namespace_that_goes_is_told_from_a_lack_of_rights() {
        let answer = |details: &str| -> Answer {
            let text = format!(r#"{{"status": "Failure", "code": 403, "details": {details}}}"#);
            serde_json::from_str(&text).unwrap()
        };
        let cause =
            r#"{"causes": [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]}"#;
        assert!(is_terminating(&answer(cause)));
        assert!(!is_terminating(&answer(r#"{"kind": "events"}"#)));
        assert!(!is_terminating(&answer("null")));
    }

    #[test]
    fn nodes_are_counted_by_a_list_of_one() {
        let list = |continues: &str, more| ListMeta {
            continue_: Some(continues.to_owned()),
            remaining_item_count: more,
            ..ListMeta::default()
        };
        assert_eq!(number(1, &list("next", Some(20))), Some(21));
        assert_eq!(number(1, &list("", None)), Some(1), "that was all");
        assert_eq!(number(1, &ListMeta::default()), Some(1), "that was all");
        assert_eq!(number(0, &ListMeta::default()), Some(0));
        assert_eq!(number(1, &list("next", None)), None, "nobody says how many");
        assert_eq!(number(1, &list("next", Some(-2))), None);
        assert_eq!(number(1, &list("next", Some(i64::MAX))), None);
    }
}
