//! Draining real servers, and UDP flows whose real server did not drain.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use ipvs_netlink::{RealServerKey, Scheduler, VirtualServer, VirtualServerKey};
use ipvs_proxy_netlink::Protocol;

use super::{POLL, Planner, UNCLAIMED, virtual_servers};
use crate::model::{DrainTimeout, ObjectName};
use crate::op::StaleFlows;
use crate::state::{Key, Value, served_by, serving_entries};

/// What became of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainStep {
    /// The real server takes no new connection any more; it goes at the deadline at the latest.
    Began(Option<Instant>),
    /// It was removed when its last connection was gone.
    Emptied,
    /// It was removed at its deadline, with as many connections as it had when last looked at.
    Cut(u64),
    /// It is wanted again.
    Returned,
    /// It went otherwise: with its virtual server, or by other hands.
    Gone,
}

/// News of a drain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainNews {
    /// The Service that had the virtual server when the drain began.
    pub service: Option<ObjectName>,
    /// The virtual server.
    pub virtual_server: VirtualServerKey,
    /// The real server that drains.
    pub real_server: RealServerKey,
    /// What became of it.
    pub step: DrainStep,
}

#[derive(Debug)]
struct Drain {
    service: Option<ObjectName>,
    /// Its connections when they were looked at last.
    connections: u64,
    next_poll: Instant,
    /// When it is removed whatever connections it has.
    deadline: Option<Instant>,
    /// Its last connection is gone, or its deadline is over: it may be removed.
    over: bool,
}

impl Drain {
    /// When there is something to do for it, if it goes on.
    fn due(&self) -> Option<Instant> {
        let due = self
            .deadline
            .map_or(self.next_poll, |deadline| deadline.min(self.next_poll));
        (!self.over).then_some(due)
    }

    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

type DrainKey = (VirtualServerKey, RealServerKey);

/// The real servers that drain, also by when there is something to do.
#[derive(Debug, Default)]
pub(super) struct Drains {
    all: BTreeMap<DrainKey, Drain>,
    due: BTreeSet<(Instant, DrainKey)>,
}

impl Drains {
    pub(super) fn keys(&self) -> impl Iterator<Item = &DrainKey> {
        self.all.keys()
    }

    /// When there is something to do next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    fn due(&self, now: Instant) -> impl Iterator<Item = (&DrainKey, &Drain)> {
        let due = self.due.iter().take_while(move |(at, _)| *at <= now);
        due.filter_map(|(_, key)| Some((key, self.all.get(key)?)))
    }

    /// Ends those whose deadline is over; which these are.
    pub(super) fn cut(&mut self, now: Instant) -> Vec<Key> {
        let late: Vec<DrainKey> = self
            .due(now)
            .filter(|(_, drain)| drain.is_late(now))
            .map(|(key, _)| *key)
            .collect();
        for key in &late {
            self.change(key, |drain| drain.over = true);
        }
        late.into_iter()
            .map(|(vs, rs)| Key::RealServer(vs, rs))
            .collect()
    }

    fn of(&self, server: VirtualServerKey) -> Vec<DrainKey> {
        let lowest = RealServerKey {
            address: IpAddr::from([0, 0, 0, 0]),
            port: 0,
        };
        let ours = self.all.range((server, lowest)..).map(|(key, _)| *key);
        ours.take_while(|(vs, _)| *vs == server).collect()
    }

    fn insert(&mut self, key: DrainKey, drain: Drain) {
        self.remove(&key);
        self.due.extend(drain.due().map(|at| (at, key)));
        self.all.insert(key, drain);
    }

    fn remove(&mut self, key: &DrainKey) -> Option<Drain> {
        let drain = self.all.remove(key)?;
        if let Some(at) = drain.due() {
            self.due.remove(&(at, *key));
        }
        Some(drain)
    }

    fn change(&mut self, key: &DrainKey, change: impl FnOnce(&mut Drain)) {
        if let Some(mut drain) = self.remove(key) {
            change(&mut drain);
            self.insert(*key, drain);
        }
    }
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
    /// The virtual servers whose draining real servers are due for a look at their connections:
    /// every few seconds, and at their deadline.
    #[must_use]
    pub fn drains_due(&self, now: Instant) -> BTreeSet<VirtualServerKey> {
        let due = self.drains.due(now);
        due.map(|((server, _), _)| *server).collect()
    }

    /// How many drains go on.
    #[must_use]
    pub fn draining(&self) -> usize {
        self.drains.all.len()
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
            .all
            .iter()
            .map(|((vs, rs), drain)| (*vs, *rs, drain.deadline));
        (self.drain_changes, drains)
    }

    /// What became of drains since the last call, in order.
    pub fn take_drain_news(&mut self) -> Vec<DrainNews> {
        std::mem::take(&mut self.drain_news)
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
        for (vs, rs) in self.drains.of(of) {
            let there = connections.get(&rs).copied();
            self.drains.change(&(vs, rs), |drain| {
                drain.next_poll = now + POLL;
                drain.connections = there.unwrap_or(0);
                drain.over = there.is_some_and(|there| there == 0 || drain.over);
            });
            let key = Key::RealServer(vs, rs);
            match there {
                None => self.set_applied(key, None),
                Some(0) => {}
                Some(_) => continue,
            }
            self.mark(key, UNCLAIMED);
        }
    }

    /// Puts off the look at the connections of a virtual server's draining real servers.
    pub fn look_later(&mut self, server: VirtualServerKey, now: Instant) {
        for key in self.drains.of(server) {
            self.drains
                .change(&key, |drain| drain.next_poll = now + POLL);
        }
    }

    /// The draining form of a real server that nobody claims: weight 0, all else as it is. `None`
    /// when it has not to drain: it is not there, its virtual server goes, it is UDP, its Service wants
    /// none, it has no connection left, or the scheduler is `dh`, which has one real server for all clients of a
    /// VIP and would refuse them all.
    pub(super) fn drains_to(&self, key: &Key) -> Option<Value> {
        let Key::RealServer(vs, rs) = key else {
            return None;
        };
        let applied = self.applied(key)?;
        if matches!(self.claimed(&Key::VirtualServer(*vs))?, Value::VirtualServer(server) if !drains(server))
            || self
                .drains
                .all
                .get(&(*vs, *rs))
                .is_some_and(|drain| drain.over)
            || self.drain_timeout(vs) == DrainTimeout::Now
        {
            return None;
        }
        let mut server = applied.real_server(*rs)?;
        server.weight = 0;
        Some(Value::of_real_server(&server))
    }

    pub(super) fn begin_drain(&mut self, vs: VirtualServerKey, rs: RealServerKey, now: Instant) {
        if self.drains.all.contains_key(&(vs, rs)) {
            return;
        }
        let service = self.owner(&Key::VirtualServer(vs)).cloned();
        let limit = match self.drain_timeout(&vs) {
            DrainTimeout::After(limit) => now.checked_add(limit),
            DrainTimeout::Unlimited | DrainTimeout::Now => None,
        };
        let deadline = self.remembered.remove(&(vs, rs)).or(limit);
        let drain = Drain {
            service,
            connections: 0,
            next_poll: now + POLL,
            deadline,
            over: false,
        };
        self.tell(vs, rs, &drain, DrainStep::Began(deadline));
        self.drains.insert((vs, rs), drain);
        self.drain_changes += 1;
    }

    /// How long real servers of a virtual server may drain.
    fn drain_timeout(&self, vs: &VirtualServerKey) -> DrainTimeout {
        self.owner(&Key::VirtualServer(*vs))
            .and_then(|name| self.cluster.get(name)?.drain_timeout)
            .unwrap_or(self.config.drain_timeout)
    }

    /// Forgets a drain, if there is one: the real server is wanted again (`returned`), or it is
    /// not there any more.
    pub(super) fn end_drain(&mut self, vs: VirtualServerKey, rs: RealServerKey, returned: bool) {
        let Some(drain) = self.drains.remove(&(vs, rs)) else {
            return;
        };
        let step = match (returned, drain.over, drain.connections) {
            (true, ..) => DrainStep::Returned,
            (false, false, _) => DrainStep::Gone,
            (false, true, 0) => DrainStep::Emptied,
            (false, true, connections) => DrainStep::Cut(connections),
        };
        self.tell(vs, rs, &drain, step);
        self.drain_changes += 1;
    }

    fn tell(&mut self, vs: VirtualServerKey, rs: RealServerKey, drain: &Drain, step: DrainStep) {
        self.drain_news.push(DrainNews {
            service: drain.service.clone(),
            virtual_server: vs,
            real_server: rs,
            step,
        });
    }

    /// Notes the UDP virtual servers to which packets come from now on, or once the rest is there:
    /// by their first real server, by the entry that lets packets pass, or by the address.
    pub(super) fn note_reached(&mut self, added: &Key) {
        match *added {
            Key::RealServer(vs, _) if is_udp(&vs) && !self.has_real_server(vs) => {
                self.reached.insert(vs);
            }
            Key::Entry(set, entry) => {
                let served = served_by(set, &entry).filter(is_udp);
                self.reached.extend(served);
            }
            Key::Address(address) => {
                let servers = self.records.range(virtual_servers(address));
                let servers: Vec<_> = servers
                    .filter_map(|(key, _)| match key {
                        Key::VirtualServer(vs) if is_udp(vs) => Some(*vs),
                        _ => None,
                    })
                    .filter(|vs| self.has_real_server(*vs))
                    .collect();
                self.reached.extend(servers);
            }
            _ => {}
        }
    }

    /// Tells of all flows of the UDP virtual servers that are reached now. Those that came before
    /// were never translated, never masqueraded.
    pub(super) fn look_at_reached(&mut self) {
        let there = |key: Key| self.applied(&key).is_some();
        let served = |vs: &VirtualServerKey| {
            // Without one wanted, the address is the node's.
            let mut entries = serving_entries(vs);
            entries.all(|entry| self.claimed(&entry).is_none() || there(entry))
                && self.is_bound_as_wanted(vs)
        };
        let (served, waiting) = self.reached.iter().partition(|vs| served(vs));
        let served: BTreeSet<VirtualServerKey> = served;
        self.reached = waiting;
        self.stale.extend(served.into_iter().map(|vs| (vs, None)));
    }

    /// Whether the kernel holds any real server of a virtual server.
    pub(super) fn has_real_server(&self, vs: VirtualServerKey) -> bool {
        self.real_servers.of(vs).next().is_some()
    }
}
