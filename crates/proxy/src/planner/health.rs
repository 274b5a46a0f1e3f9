//! Health check node ports: what is to be answered on them, and when they may be reached.
//!
//! Whoever listens on them is told by [`Planner::take_health_ports`]. A port is opened, and more endpoints are told than before,
//! when the kernel holds what the Service needs; fewer are told at once.

use std::collections::{BTreeMap, BTreeSet};

use ipset_rs::Entry;
use ipvs_proxy_netlink::Family;

use super::claims::Rank;
use super::{Planner, ServiceId};
use crate::guard::{Cause, Refused};
use crate::health::HealthPort;
use crate::model::ObjectName;
use crate::state::{Key, Role, Set};

#[derive(Debug, Default)]
pub(super) struct HealthPorts {
    planned: BTreeMap<ServiceId, (u16, Order, HealthPort)>,
    /// The Services that ask for a port: the first has it.
    asking: BTreeMap<u16, BTreeSet<(Order, ServiceId)>>,
    told: BTreeMap<u16, HealthPort>,
    /// Of these something else may have to be told than was.
    changed: BTreeSet<u16>,
    /// The families in which ports are listened on, as far as that was told; `None` where nobody tells.
    listening: Option<BTreeMap<u16, Vec<Family>>>,
}

/// By what the first of those that ask for a port is found.
type Order = (Rank, ObjectName);

impl HealthPorts {
    /// Notes the port of a Service as it was planned, `None` for none. Who goes without the port, or with another one's, from now on.
    pub(super) fn plan(
        &mut self,
        id: ServiceId,
        order: Order,
        health: Option<(u16, HealthPort)>,
    ) -> Option<Refused> {
        let old = self.planned.remove(&id);
        if let Some((port, order, _)) = &old
            && let Some(asking) = self.asking.get_mut(port)
        {
            asking.remove(&(order.clone(), id));
            if asking.is_empty() {
                self.asking.remove(port);
            }
            self.changed.insert(*port);
        }
        let (port, health) = health?;
        self.changed.insert(port);
        self.planned.insert(id, (port, order.clone(), health));
        let asking = self.asking.entry(port).or_default();
        asking.insert((order, id));
        if old.is_some_and(|(old, ..)| old == port) {
            return None;
        }
        // Of those after the first, the one that did not ask before, or had it.
        let own = asking.iter().position(|(_, of)| *of == id);
        let ((_, loser), _) = asking.iter().nth(own.unwrap_or_default().max(1))?;
        Some(Refused {
            service: loser.clone(),
            cause: Cause::HealthCheckNodePort,
            first: format!("spec.healthCheckNodePort {port}"),
            count: 1,
        })
    }

    /// Whether a key may be in the kernel by what is listened on, `None` while nobody knows: an entry that lets packets pass to a
    /// port must not lead them to a process that has it instead.
    pub(super) fn listens(&self, key: &Key) -> Option<bool> {
        match (key, &self.listening) {
            (Key::Entry(set, Entry::Port(port)), Some(listening))
                if set.role == Role::HealthCheckNodePort =>
            {
                Some(listening.get(port)?.contains(&set.family))
            }
            _ => Some(true),
        }
    }
}

impl Planner {
    /// Says that [`Planner::note_health_port`] will tell which health check node ports are listened on: the entries that let
    /// packets pass to them come after that.
    pub fn await_health_ports(&mut self) {
        self.health.listening.get_or_insert_default();
    }

    /// The families in which a health check node port is listened on now.
    pub fn note_health_port(&mut self, port: u16, families: Vec<Family>) {
        // It may be closed by now.
        let Some((_, id)) = self.health.asking.get(&port).and_then(BTreeSet::first) else {
            return;
        };
        let group = self.group(*id);
        if let Some(listening) = &mut self.health.listening
            && self.health.told.contains_key(&port)
        {
            listening.insert(port, families);
        }
        let role = Role::HealthCheckNodePort;
        for family in Family::ALL {
            let key = Key::Entry(Set { family, role }, Entry::Port(port));
            if self.records.contains_key(&key) {
                self.mark(key, group);
            }
        }
    }

    /// The Service for which a health check node port is answered.
    #[must_use]
    pub fn health_port(&self, port: u16) -> Option<&ObjectName> {
        Some(&self.health.told.get(&port)?.service)
    }

    /// The health check node ports on which something else is to be answered than at the last call, `None` where nothing is.
    pub fn take_health_ports(&mut self) -> Vec<(u16, Option<HealthPort>)> {
        let mut news = Vec::new();
        for port in std::mem::take(&mut self.health.changed) {
            let first = self.health.asking.get(&port).and_then(BTreeSet::first);
            let first = first.and_then(|(_, id)| Some((*id, &self.health.planned.get(id)?.2)));
            let told = self.health.told.get(&port);
            let answer = match (first, told) {
                (None, None) => continue,
                (None, Some(_)) => None,
                (Some((id, planned)), _)
                    if !self.pending.has(self.group(id)) && !self.is_marking(self.group(id)) =>
                {
                    Some(planned.clone())
                }
                (Some((_, planned)), told) => {
                    self.health.changed.insert(port);
                    let Some(told) = told else { continue };
                    let known = match told.service == planned.service {
                        true => told.local_endpoints,
                        false => 0,
                    };
                    Some(HealthPort {
                        service: planned.service.clone(),
                        addresses: told.addresses.clone(),
                        local_endpoints: planned.local_endpoints.min(known),
                    })
                }
            };
            if answer.as_ref() == told {
                continue;
            }
            match &answer {
                Some(answer) => {
                    self.health.told.insert(port, answer.clone());
                }
                None => {
                    self.health.told.remove(&port);
                    if let Some(listening) = &mut self.health.listening {
                        listening.remove(&port);
                    }
                }
            }
            news.push((port, answer));
        }
        news
    }
}
