//! An object as the server sent it.

use std::borrow::Cow;

use ipvs_proxy_core::model::ObjectName;
use k8s_openapi::ClusterResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::Followed;
use crate::translate;

/// An object, or why it can't be read: one of them must not stop what is told of all others.
#[derive(Clone, Debug)]
pub(super) struct Sent<K> {
    pub(super) metadata: ObjectMeta,
    /// The error names the field by its path, and says what is wrong.
    pub(super) object: Result<K, (String, String)>,
}

impl<K> Sent<K> {
    pub(super) fn name(&self) -> ObjectName {
        let metadata = &self.metadata;
        translate::object_name(metadata.namespace.as_deref(), metadata.name.as_deref())
    }
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Sent<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let metadata = value.get("metadata");
        let word = |name: &str| Some(metadata?.get(name)?.as_str()?.to_owned());
        Ok(Sent {
            // What names the object, also where the rest can't be read.
            metadata: ObjectMeta {
                name: word("name"),
                namespace: word("namespace"),
                resource_version: word("resourceVersion"),
                ..ObjectMeta::default()
            },
            object: serde_path_to_error::deserialize(&value)
                .map_err(|error| (error.path().to_string(), error.inner().to_string())),
        })
    }
}

impl<K: Followed> Resource for Sent<K> {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        K::KIND.object().into()
    }

    fn group(_: &()) -> Cow<'_, str> {
        K::KIND.group().into()
    }

    fn version(_: &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural(_: &()) -> Cow<'_, str> {
        K::KIND.resource().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use kube::api::WatchEvent;

    use super::Sent;
    use crate::objects::Service;

    fn modified(service: &str) -> Sent<Service> {
        let line = format!(r#"{{"type": "MODIFIED", "object": {service}}}"#);
        match serde_json::from_str(&line).unwrap() {
            WatchEvent::Modified(sent) => sent,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_condition_without_its_time_does_not_matter() {
        let sent = modified(
            r#"{"metadata": {"name": "s"}, "spec": {"clusterIP": "10.0.0.1"}, "status": {
                "loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]},
                "conditions": [{"type": "A", "status": "True", "lastTransitionTime": null}]}}"#,
        );
        let service = sent.object.unwrap();
        let balancer = service.status.unwrap().load_balancer.unwrap();
        assert_eq!(balancer.ingress.unwrap().len(), 1);
    }

    #[test]
    fn an_object_that_cannot_be_read_has_its_name() {
        let sent = modified(r#"{"metadata": {"name": "s"}, "spec": {"ports": 5}}"#);
        assert_eq!(sent.metadata.name.as_deref(), Some("s"));
        let (field, error) = sent.object.unwrap_err();
        assert_eq!(field, "spec.ports");
        assert!(error.contains("invalid type: integer `5`"), "{error}");
        let sent = modified(
            r#"{"metadata": {"name": "s", "namespace": "n", "resourceVersion": "7", "labels": 5}}"#,
        );
        let metadata = &sent.metadata;
        let words = [
            &metadata.namespace,
            &metadata.name,
            &metadata.resource_version,
        ];
        assert_eq!(words.map(|word| word.as_deref().unwrap()), ["n", "s", "7"]);
        assert_eq!(sent.object.unwrap_err().0, "metadata.labels");
    }
}
