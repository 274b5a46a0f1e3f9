//! The real servers that the kernel holds, compactly: they are most of what it holds.

use std::collections::BTreeMap;

use ipvs_netlink::{RealServerKey, VirtualServerKey};

use crate::state::{Key, Value};

/// Real servers with their values, by virtual server.
#[derive(Debug, Default)]
pub(super) struct RealServers(BTreeMap<VirtualServerKey, Vec<(RealServerKey, Value)>>);

impl RealServers {
    pub(super) fn get(&self, vs: &VirtualServerKey, rs: &RealServerKey) -> Option<&Value> {
        let servers = self.0.get(vs)?;
        let index = servers.binary_search_by_key(rs, |(key, _)| *key).ok()?;
        servers.get(index).map(|(_, value)| value)
    }

    pub(super) fn set(&mut self, vs: VirtualServerKey, rs: RealServerKey, value: Option<Value>) {
        let servers = self.0.entry(vs).or_default();
        match (servers.binary_search_by_key(&rs, |(key, _)| *key), value) {
            (Ok(index), Some(value)) => {
                if let Some(entry) = servers.get_mut(index) {
                    entry.1 = value;
                }
            }
            (Ok(index), None) => {
                servers.remove(index);
            }
            (Err(index), Some(value)) => {
                // Most virtual servers have few real servers: doubling would waste half.
                if servers.len() == servers.capacity() {
                    servers.reserve_exact(servers.len() / 8 + 1);
                }
                servers.insert(index, (rs, value));
            }
            (Err(_), None) => {}
        }
        if servers.is_empty() {
            self.0.remove(&vs);
        }
    }

    /// The keys of the real servers of a virtual server.
    pub(super) fn of(&self, vs: VirtualServerKey) -> impl Iterator<Item = Key> {
        let servers = self.0.get(&vs).into_iter().flatten();
        servers.map(move |(rs, _)| Key::RealServer(vs, *rs))
    }

    /// Forgets the real servers of a virtual server; their keys.
    pub(super) fn remove(&mut self, vs: VirtualServerKey) -> impl Iterator<Item = Key> + use<> {
        let servers = self.0.remove(&vs).unwrap_or_default().into_iter();
        servers.map(move |(rs, _)| Key::RealServer(vs, rs))
    }

    /// How many real servers a virtual server has.
    pub(super) fn count(&self, vs: &VirtualServerKey) -> usize {
        self.0.get(vs).map_or(0, Vec::len)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = Key> {
        self.0
            .iter()
            .flat_map(|(vs, servers)| servers.iter().map(|(rs, _)| Key::RealServer(*vs, *rs)))
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
