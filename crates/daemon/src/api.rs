//! Services, EndpointSlices and the own Node, or all Nodes, from a Kubernetes API server.
//!
//! One thread of its own follows all three by list and watch: bookmarks, a new list after 410,
//! one back-off with jitter for failures of all sorts, and a new client when the files behind the old one changed (a renewed
//! certificate, another CA, another server). Objects are translated as they arrive and dropped.
//!
//! Lists ask for the most recent state (no `resourceVersion`), in pages: an answer from the cache of
//! one API server among several may be older than what this process acted on before.

mod access;
mod backoff;
mod bounded;
mod counting;
mod follow;
mod sent;
mod server;
mod told;

use std::collections::BTreeSet;
use std::time::SystemTime;

use ipvs_proxy_core::guard::Needed;
use ipvs_proxy_core::model::{Change, ObjectName};
use ipvs_proxy_netlink::Family;

use crate::objects::{EndpointSlice, Node, Service};
use crate::translate::{self, Refusal};

pub use access::{Access, AccessError};
pub use counting::Pauses;
pub use follow::follow;
pub(crate) use follow::in_a_line;

/// What is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Services of all namespaces, but those of other proxies.
    Services,
    /// EndpointSlices of all namespaces, but those of headless Services.
    EndpointSlices,
    /// The own Node, or all of them.
    Node,
}

impl Kind {
    /// All that is followed.
    pub const ALL: [Kind; 3] = [Kind::Services, Kind::EndpointSlices, Kind::Node];

    /// The resource as the API names it.
    #[must_use]
    pub fn resource(self) -> &'static str {
        match self {
            Kind::Services => "services",
            Kind::EndpointSlices => "endpointslices",
            Kind::Node => "nodes",
        }
    }

    /// The kind of its objects.
    fn object(self) -> &'static str {
        match self {
            Kind::Services => "Service",
            Kind::EndpointSlices => "EndpointSlice",
            Kind::Node => "Node",
        }
    }

    /// The group of the API that its objects are of.
    fn group(self) -> &'static str {
        match self {
            Kind::Services | Kind::Node => "",
            Kind::EndpointSlices => "discovery.k8s.io",
        }
    }
}

/// What the API server said.
#[derive(Debug, Default)]
pub struct News {
    /// The last word on some objects, in the order in which it was said.
    pub changes: Vec<Change>,
    /// What of them can't be used.
    pub refusals: Vec<Refusal>,
    /// What can't be read now, when that changed.
    pub unread: Option<Unread>,
    /// All objects of this kind are known now.
    pub listed: Option<Kind>,
    /// When the changes of endpoints happened (annotation
    /// `endpoints.kubernetes.io/last-change-trigger-time`), where they say so, and of which family
    /// the endpoints are.
    pub triggers: Vec<(Family, SystemTime)>,
    /// What the Node says besides changes, when it was seen.
    pub node: Option<NodeFacts>,
}

/// All objects of a kind whose last version can't be read.
#[derive(Debug)]
pub struct Unread {
    /// The kind.
    pub kind: Kind,
    /// A line each.
    pub objects: Vec<String>,
    /// There is one of which no version was read: what it is known for in the kernel may seem to be nobody's.
    pub never_read: bool,
}

/// News of following a kind.
#[derive(Debug)]
pub enum ApiEvent {
    /// Objects came, changed or went.
    News(News),
    /// The API server could not be followed; it is tried again, and what the kernel holds stays.
    Failed(Kind, String),
    /// A watch stands: it is followed, whatever was before.
    Followed(Kind),
}

/// What the own Node says besides addresses and its pods' networks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// Why load balancers should send it nothing new: it is being deleted, or the cluster's
    /// autoscaler marked it for removal (KEP-3836).
    pub ineligible: Option<&'static str>,
}

/// The taint by which the cluster's autoscaler says that it removes a node.
const REMOVAL_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// An object of a kind that is followed.
trait Followed: Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static {
    const KIND: Kind;

    /// Adds what the object says now to the news.
    fn tell(&self, node_name: &str, news: &mut News);

    /// Adds that the object of this name is gone.
    fn tell_gone(name: ObjectName, node_name: &str, news: &mut News);
}

impl Followed for Service {
    const KIND: Kind = Kind::Services;

    fn tell(&self, _: &str, news: &mut News) {
        let translated = translate::service(self);
        news.refusals.extend(translated.refusals);
        news.changes
            .push(Change::Service(translated.name, translated.object));
    }

    fn tell_gone(name: ObjectName, _: &str, news: &mut News) {
        news.changes.push(Change::Service(name, None));
    }
}

impl Followed for EndpointSlice {
    const KIND: Kind = Kind::EndpointSlices;

    fn tell(&self, node_name: &str, news: &mut News) {
        let translated = translate::slice(self, node_name);
        news.refusals.extend(translated.refusals);
        let annotations = self.metadata.annotations.as_ref();
        let trigger = annotations.and_then(|a| a.last_change.as_deref());
        let trigger = trigger.and_then(translate::parse_time);
        let family = translated.object.as_ref().map(|slice| slice.family);
        news.triggers.extend(family.zip(trigger));
        news.changes
            .push(Change::Slice(translated.name, translated.object));
    }

    fn tell_gone(name: ObjectName, _: &str, news: &mut News) {
        news.changes.push(Change::Slice(name, None));
    }
}

impl Followed for Node {
    const KIND: Kind = Kind::Node;

    fn tell(&self, node_name: &str, news: &mut News) {
        let translated = translate::node(self);
        // That node says itself what is wrong with it.
        if &*translated.name.name != node_name {
            let addresses = translated.object.map(|node| node.addresses);
            let needed = addresses.into_iter().flatten().map(Needed::host);
            let by = format!("Node {}", translated.name.name);
            return news
                .changes
                .push(Change::Needed(by.into(), needed.collect()));
        }
        news.refusals.extend(translated.refusals);
        news.changes.extend(translated.object.map(Change::Node));
        let (networks, refusals) = translate::pod_cidrs(self);
        news.refusals.extend(refusals);
        news.changes.push(Change::PodCidrs(networks));
        let spec = self.spec.as_ref();
        let taints = spec.and_then(|s| s.taints.as_deref()).unwrap_or_default();
        news.node = Some(NodeFacts {
            ineligible: if self.metadata.deletion_timestamp.is_some() {
                Some("the Node is being deleted")
            } else if taints
                .iter()
                .any(|taint| taint.key.as_deref() == Some(REMOVAL_TAINT))
            {
                Some("the Node has the taint ToBeDeletedByClusterAutoscaler")
            } else {
                None
            },
        });
    }

    /// A Node that is gone is made again, or the machine ends: its addresses and its pods' networks
    /// stay the last word.
    fn tell_gone(name: ObjectName, node_name: &str, news: &mut News) {
        if &*name.name != node_name {
            let by = format!("Node {}", name.name);
            return news
                .changes
                .push(Change::Needed(by.into(), BTreeSet::new()));
        }
        news.node = Some(NodeFacts {
            ineligible: Some("the Node is gone"),
        });
    }
}
