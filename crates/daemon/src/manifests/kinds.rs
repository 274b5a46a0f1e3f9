//! The kinds of objects that manifests may hold, and how each is read.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Object;
use super::document::Fault;

/// What says of which kind an object is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an object")]
pub(super) struct Head {
    pub(super) api_version: Option<String>,
    pub(super) kind: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Service,
    EndpointSlice,
    Node,
    /// `kind: List`, or a list of one kind, whose items need not repeat it.
    List(Option<&'static str>),
    Ignored,
}

pub(super) const CORE: &str = "v1";
pub(super) const DISCOVERY: &str = "discovery.k8s.io/v1";

impl Kind {
    pub(super) fn of(head: &Head) -> Result<Kind, Fault> {
        let Some(kind) = head.kind.as_deref() else {
            return Err(Fault::new(
                "kind",
                "is missing; is this a Kubernetes object?",
            ));
        };
        let (version, taken) = match kind {
            "Service" => (CORE, Kind::Service),
            "EndpointSlice" => (DISCOVERY, Kind::EndpointSlice),
            "Node" => (CORE, Kind::Node),
            "List" => (CORE, Kind::List(None)),
            "ServiceList" => (CORE, Kind::List(Some("Service"))),
            "EndpointSliceList" => (DISCOVERY, Kind::List(Some("EndpointSlice"))),
            "NodeList" => (CORE, Kind::List(Some("Node"))),
            _ => return Ok(Kind::Ignored),
        };
        let group = |version: &str| version.rsplit_once('/').map_or("", |(g, _)| g).to_owned();
        match head.api_version.as_deref() {
            Some(found) if found == version => Ok(taken),
            // Another project's object of the same name, such as a Knative Service.
            Some(found) if group(found) != group(version) => Ok(Kind::Ignored),
            Some(found) => {
                let message = format!("{found:?} of a {kind} is not supported; write {version:?}");
                Err(Fault::new("apiVersion", message).of_object())
            }
            None => {
                let message = format!("is missing; write {version:?}");
                Err(Fault::new("apiVersion", message).of_object())
            }
        }
    }

    /// As [`Kind::of`], of an item of a list, which may say of which kind its items are.
    pub(super) fn of_item(mut head: Head, of: Option<&'static str>) -> Result<Kind, Fault> {
        if of.is_some() {
            head.kind = head.kind.or(of.map(str::to_owned));
            let listed = if of == Some("EndpointSlice") {
                DISCOVERY
            } else {
                CORE
            };
            head.api_version = head.api_version.or(Some(listed.to_owned()));
        }
        match Kind::of(&head)? {
            Kind::List(_) => Err(Fault::new("kind", "is a list within a list")),
            kind => Ok(kind),
        }
    }

    pub(super) fn name(self) -> Option<&'static str> {
        match self {
            Kind::Service => Some("Service"),
            Kind::EndpointSlice => Some("EndpointSlice"),
            Kind::Node => Some("Node"),
            Kind::List(_) | Kind::Ignored => None,
        }
    }
}

impl<'de> DeserializeSeed<'de> for Kind {
    type Value = Option<Object>;

    fn deserialize<D: Deserializer<'de>>(self, de: D) -> Result<Option<Object>, D::Error> {
        Ok(match self {
            Kind::Service => Some(Object::Service(Deserialize::deserialize(de)?)),
            Kind::EndpointSlice => Some(Object::EndpointSlice(Deserialize::deserialize(de)?)),
            Kind::Node => Some(Object::Node(Deserialize::deserialize(de)?)),
            Kind::List(_) | Kind::Ignored => {
                IgnoredAny::deserialize(de)?;
                None
            }
        })
    }
}

/// A list whose items have these kinds. Typed at once, so that errors keep their place.
#[derive(Clone, Copy)]
pub(super) struct List<'a>(pub(super) &'a [Kind]);

impl<'de> DeserializeSeed<'de> for List<'_> {
    type Value = Vec<Option<Object>>;

    fn deserialize<D: Deserializer<'de>>(self, de: D) -> Result<Self::Value, D::Error> {
        de.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for List<'_> {
    type Value = Vec<Option<Object>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut objects = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == "items" {
                objects = map.next_value_seed(Items(self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(objects)
    }
}

pub(super) struct Items<'a>(pub(super) &'a [Kind]);

impl<'de> DeserializeSeed<'de> for Items<'_> {
    type Value = Vec<Option<Object>>;

    fn deserialize<D: Deserializer<'de>>(self, de: D) -> Result<Self::Value, D::Error> {
        // `items: null` is an empty list, as Go writes it.
        de.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Items<'_> {
    type Value = Vec<Option<Object>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_some<D: Deserializer<'de>>(self, de: D) -> Result<Self::Value, D::Error> {
        de.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut objects = Vec::with_capacity(self.0.len());
        for kind in self.0 {
            match seq.next_element_seed(*kind)? {
                Some(object) => objects.push(object),
                None => break,
            }
        }
        // The kinds were counted on these very items, so none is left; a sequence must be read
        // to its end all the same.
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(objects)
    }
}
