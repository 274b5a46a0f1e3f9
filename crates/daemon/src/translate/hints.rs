//! For which nodes and zones endpoints are meant.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU16;
use std::sync::Arc;

use ipvs_proxy_core::model;

use super::Refusals;
use crate::objects::{Endpoint, EndpointHint};

/// The hints of a slice's endpoints. One whose name can't be read still is a hint, for nobody (as with kube-proxy).
pub(super) struct Hints<'a> {
    pub(super) node_name: &'a str,
    pub(super) zones: Vec<Vec<Arc<str>>>,
    /// Where a list of zones is among [`Hints::zones`], counted from 1.
    places: HashMap<BTreeSet<&'a str>, NonZeroU16>,
}

impl<'a> Hints<'a> {
    pub(super) fn new(node_name: &'a str) -> Hints<'a> {
        Hints {
            node_name,
            zones: Vec::new(),
            places: HashMap::new(),
        }
    }

    pub(super) fn node(
        &self,
        i: usize,
        endpoint: &Endpoint,
        refusals: &mut Refusals,
    ) -> model::Hint {
        let listed = endpoint.hints.as_ref().and_then(|h| h.for_nodes.as_deref());
        let names = hinted(i, "forNodes", listed, refusals);
        match names.as_slice() {
            [] => model::Hint::Absent,
            names if names.contains(&self.node_name) => model::Hint::Here,
            _ => model::Hint::Elsewhere,
        }
    }

    pub(super) fn zones(
        &mut self,
        i: usize,
        endpoint: &'a Endpoint,
        refusals: &mut Refusals,
    ) -> Option<NonZeroU16> {
        let listed = endpoint.hints.as_ref().and_then(|h| h.for_zones.as_deref());
        let names = hinted(i, "forZones", listed, refusals);
        let names: BTreeSet<&str> = names.into_iter().collect();
        if names.is_empty() {
            return None;
        }
        if let Some(place) = self.places.get(&names) {
            return Some(*place);
        }
        let place = u16::try_from(self.zones.len() + 1).ok();
        let Some(place) = place.and_then(NonZeroU16::new) else {
            let field = format!("endpoints[{i}].hints.forZones");
            let reason = "is one list of zones too many; this hint does not count";
            refusals.add(field, format_args!("{names:?}"), reason);
            return None;
        };
        self.zones
            .push(names.iter().copied().map(Arc::from).collect());
        self.places.insert(names, place);
        Some(place)
    }
}

/// The names that hints list.
fn hinted<'a>(
    i: usize,
    kind: &str,
    listed: Option<&'a [EndpointHint]>,
    refusals: &mut Refusals,
) -> Vec<&'a str> {
    let mut names = Vec::new();
    for (n, hint) in listed.unwrap_or_default().iter().enumerate() {
        let name = hint.name.as_deref().unwrap_or_default();
        if name.is_empty() {
            let field = format!("endpoints[{i}].hints.{kind}[{n}].name");
            refusals.text(field, name, "names nothing, so the hint is for nobody");
        }
        names.push(name);
    }
    names
}
