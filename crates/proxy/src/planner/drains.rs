//! Draining real servers, and UDP flows whose real server did not drain.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use ipvs_netlink::{RealServerKey, Scheduler, VirtualServer, VirtualServerKey};
use ipvs_proxy_netlink::Protocol;

use super::{POLL, Planner, UNCLAIMED};
use crate::op::StaleFlows;
use crate::state::{Key, Value};

#[derive(Debug)]
pub(super) struct Drain {
    pub(super) next_poll: Instant,
    /// When it is removed whatever connections it has.
    pub(super) deadline: Option<Instant>,
    /// Its last connection is gone, or its deadline is over: it may be removed.
    pub(super) over: bool,
}

pub(super) fn is_udp(key: &VirtualServerKey) -> bool {
    matches!(
        key,
        VirtualServerKey::Address {
            protocol: Protocol::Udp,
            ..
        }
    )
}

/// Whether a real server of this virtual server drains when it goes.
pub(super) fn drains(server: &VirtualServer) -> bool {
    let tcp_like = match server.key {
        VirtualServerKey::Address { protocol, .. } => {
            matches!(protocol, Protocol::Tcp | Protocol::Sctp)
        }
        VirtualServerKey::FirewallMark { .. } => false,
    };
    tcp_like && server.scheduler != Scheduler::DestinationHash
}

impl Planner {
    /// The virtual servers whose draining real servers are due for a look at their connections.
    #[must_use]
    pub fn drains_due(&self, now: Instant) -> BTreeSet<VirtualServerKey> {
        let due = self
            .drains
            .iter()
            .filter(|(_, drain)| !drain.over && drain.next_poll <= now);
        due.map(|((server, _), _)| *server).collect()
    }

    /// The drains that go on, with their deadlines; and a number that changes whenever one begins
    /// or ends.
    pub fn drains(
        &self,
    ) -> (
        u64,
        impl Iterator<Item = (VirtualServerKey, RealServerKey, Option<Instant>)>,
    ) {
        let drains = self
            .drains
            .iter()
            .map(|((vs, rs), drain)| (*vs, *rs, drain.deadline));
        (self.drain_changes, drains)
    }

    /// Tells of the deadlines of drains that an earlier process began. To be called before the
    /// first [`Planner::resync`].
    pub fn remember_drains(
        &mut self,
        deadlines: impl IntoIterator<Item = (VirtualServerKey, RealServerKey, Instant)>,
    ) {
        self.remembered
            .extend(deadlines.into_iter().map(|(vs, rs, at)| ((vs, rs), at)));
    }

    /// The UDP flows that became stale since the last call: to a real server that went, or to a
    /// virtual server that went as a whole or got its first real server.
    pub fn take_stale_flows(&mut self) -> StaleFlows {
        std::mem::take(&mut self.stale)
    }

    /// Takes in the connections of the real servers of a virtual server: a draining one without
    /// any is removed in the next round, and one that is not there any more is forgotten.
    pub fn observe(
        &mut self,
        of: VirtualServerKey,
        connections: &BTreeMap<RealServerKey, u64>,
        now: Instant,
    ) {
        let lowest = RealServerKey {
            address: IpAddr::from([0, 0, 0, 0]),
            port: 0,
        };
        let ours = self
            .drains
            .range_mut((of, lowest)..)
            .take_while(|((vs, _), _)| *vs == of);
        let mut finished = Vec::new();
        for ((vs, rs), drain) in ours {
            drain.next_poll = now + POLL;
            if connections.get(rs).is_some_and(|count| *count > 0) {
                continue;
            }
            drain.over = true;
            finished.push((Key::RealServer(*vs, *rs), connections.contains_key(rs)));
        }
        for (key, there) in finished {
            if !there {
                self.set_applied(key, None);
            }
            self.mark(key, UNCLAIMED);
        }
    }

    /// Puts off the look at the connections of a virtual server's draining real servers.
    pub fn look_later(&mut self, server: VirtualServerKey, now: Instant) {
        let ours = self.drains.iter_mut().filter(|((vs, _), _)| *vs == server);
        ours.for_each(|(_, drain)| drain.next_poll = now + POLL);
    }

    /// The draining form of a real server that nobody claims: weight 0, all else as it is. `None`
    /// when it has not to drain: it is not there, its virtual server goes, it is UDP, it has no
    /// connection left, or the scheduler is `dh`, which has one real server for all clients of a
    /// VIP and would refuse them all.
    pub(super) fn drains_to(&self, key: &Key) -> Option<Value> {
        let Key::RealServer(vs, rs) = key else {
            return None;
        };
        let applied = self.applied(key)?;
        if matches!(self.claimed(&Key::VirtualServer(*vs))?, Value::VirtualServer(server) if !drains(server))
            || self.drains.get(&(*vs, *rs)).is_some_and(|drain| drain.over)
        {
            return None;
        }
        let mut server = applied.real_server(*rs)?;
        server.weight = 0;
        Some(Value::of_real_server(&server))
    }

    pub(super) fn begin_drain(&mut self, vs: VirtualServerKey, rs: RealServerKey, now: Instant) {
        if self.drains.contains_key(&(vs, rs)) {
            return;
        }
        let owner = self
            .owner(&Key::VirtualServer(vs))
            .and_then(|name| self.cluster.get(name));
        let limit = owner
            .and_then(|s| s.drain_timeout)
            .or(self.config.drain_timeout);
        let deadline = match self.remembered.remove(&(vs, rs)) {
            Some(remembered) => Some(remembered),
            None => limit
                .filter(|limit| !limit.is_zero())
                .map(|limit| now + limit),
        };
        let drain = Drain {
            next_poll: now + POLL,
            deadline,
            over: false,
        };
        self.drains.insert((vs, rs), drain);
        self.drain_changes += 1;
    }

    /// Whether the kernel holds any real server of a virtual server.
    pub(super) fn has_real_server(&self, vs: VirtualServerKey) -> bool {
        self.real_servers.of(vs).next().is_some()
    }
}
