//! The cluster's last word on each object, and which Services a change touches.

use std::collections::{BTreeMap, BTreeSet};

use crate::guard::Guard;
use crate::model::{ObjectName, Service, Slice};

/// Services and slices as last heard. Slices may come before their Service, and stay after it.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    services: BTreeMap<ObjectName, Service>,
    /// Slices by the Service that they belong to, then by their own name.
    slices: BTreeMap<ObjectName, BTreeMap<ObjectName, Slice>>,
    /// The Service that each slice belonged to when last heard.
    owners: BTreeMap<ObjectName, ObjectName>,
    /// The slices that have hints for zones: the Service of each, and its own name.
    zoned: BTreeSet<(ObjectName, ObjectName)>,
    pub(crate) guard: Guard,
}

impl Cluster {
    /// Notes a Service; the Services that this touches.
    pub(crate) fn service(
        &mut self,
        name: ObjectName,
        service: Option<Service>,
    ) -> BTreeSet<ObjectName> {
        let old = self.services.get(&name);
        self.guard.note_service(&name, old, service.as_ref());
        let changed = match service {
            Some(service) => {
                let same = self.services.get(&name) == Some(&service);
                self.services.insert(name.clone(), service);
                !same
            }
            None => self.services.remove(&name).is_some(),
        };
        changed.then_some(name).into_iter().collect()
    }

    /// Notes a slice; the Services that this touches: two when it moved from one to another.
    pub(crate) fn slice(&mut self, name: ObjectName, slice: Option<Slice>) -> BTreeSet<ObjectName> {
        let mut touched = BTreeSet::new();
        let owner = slice.as_ref().map(|slice| slice.service.clone());
        if let Some(old) = self.owners.get(&name).cloned()
            && owner.as_ref() != Some(&old)
        {
            self.owners.remove(&name);
            self.zoned.remove(&(old.clone(), name.clone()));
            if let Some(slices) = self.slices.get_mut(&old) {
                let gone = slices.remove(&name);
                touched.extend(self.guard.note_slice(gone.as_ref(), None));
                if slices.is_empty() {
                    self.slices.remove(&old);
                }
            }
            touched.insert(old);
        }
        if let (Some(slice), Some(owner)) = (slice, owner) {
            let known = self.slices.entry(owner.clone()).or_default();
            if known.get(&name) != Some(&slice) {
                touched.insert(owner.clone());
                let old = known.get(&name);
                touched.extend(self.guard.note_slice(old, Some(&slice)));
                let zoned = (owner.clone(), name.clone());
                if slice.zone_hints.is_empty() {
                    self.zoned.remove(&zoned);
                } else {
                    self.zoned.insert(zoned);
                }
                known.insert(name.clone(), slice);
                self.owners.insert(name, owner);
            }
        }
        touched
    }

    pub(crate) fn get(&self, name: &ObjectName) -> Option<&Service> {
        self.services.get(name)
    }

    pub(crate) fn slices_of(&self, name: &ObjectName) -> impl Iterator<Item = &Slice> + Clone {
        self.slices.get(name).into_iter().flat_map(BTreeMap::values)
    }

    /// The Services whose endpoints are hinted for zones.
    pub(crate) fn zoned(&self) -> impl Iterator<Item = &ObjectName> {
        self.zoned.iter().map(|(service, _)| service)
    }

    pub(crate) fn services(&self) -> impl Iterator<Item = (&ObjectName, &Service)> {
        self.services.iter()
    }
}
