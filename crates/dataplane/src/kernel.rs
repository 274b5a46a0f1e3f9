//! The kernel as a [`Dataplane`]: ops become batches, dumps become the same [`State`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipset_rs::{Change, Entry};
use ipvs_netlink::{
    RealServer, RealServerKey, Request, Scheduler, VirtualServer, VirtualServerKey,
};
use ipvs_proxy_core::op::{Dataplane, Failure, FailureKind, Op, Outcome, ReadError};
use ipvs_proxy_core::state::{Key, Set, State, Value};
use ipvs_proxy_iptables::{Choice, Tools};
use ipvs_proxy_netlink::{Error as NetlinkError, Family};

use crate::links::{AddressChange, LinkError, Links};

/// Why the kernel can't be worked with at all.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// IPVS is not there or not ours to change.
    #[error(transparent)]
    Ipvs(#[from] ipvs_netlink::Error),
    /// ipset is not there or not ours to change.
    #[error(transparent)]
    Ipset(#[from] ipset_rs::Error),
    /// iptables is not there.
    #[error(transparent)]
    Iptables(#[from] ipvs_proxy_iptables::Error),
    /// The kernel has no such scheduler, nor a module that has it.
    #[error("the kernel has no scheduler {0}: load it (modprobe ip_vs_{0}) or choose another")]
    Scheduler(Scheduler),
    /// rtnetlink can't be used.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// The sockets and tools by which one thread works on the kernel's state in one network
/// namespace: the one in which it was opened.
#[derive(Debug)]
pub struct Kernel {
    ipvs: ipvs_netlink::Client,
    ipset: ipset_rs::Client,
    links: Links,
    tools: Tools,
    families: Vec<Family>,
}

impl Kernel {
    /// Opens all that is needed. `families` limits what is read.
    ///
    /// # Errors
    /// An error that names what is missing: the module, the tool, the privilege.
    pub fn open(families: &[Family], iptables: Choice) -> Result<Kernel, OpenError> {
        let mut ipvs = ipvs_netlink::Client::open()?;
        // A listing needs CAP_NET_ADMIN as a change does, so a lack of it shows here.
        ipvs.info()?;
        Ok(Kernel {
            ipvs,
            ipset: ipset_rs::Client::open()?,
            links: Links::open()?,
            tools: Tools::find(iptables)?,
            families: families.to_vec(),
        })
    }

    /// The iptables tools in use.
    #[must_use]
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// Checks that the kernel has a scheduler, without a change of the table. The kernel may load
    /// the scheduler's module.
    ///
    /// # Errors
    /// [`OpenError::Scheduler`] when it has not.
    pub fn require_scheduler(&mut self, scheduler: Scheduler) -> Result<(), OpenError> {
        let known = self.ipvs.virtual_servers()?;
        if known.iter().any(|entry| entry.server.scheduler == scheduler) {
            return Ok(());
        }
        if self.ipvs.has_scheduler(scheduler)? {
            Ok(())
        } else {
            Err(OpenError::Scheduler(scheduler))
        }
    }

    fn sets(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let changes: Vec<Change> = ops
            .iter()
            .filter_map(|op| match op {
                Op::Add(Key::Set(set), _) | Op::Update(Key::Set(set), _) => Some(Change::Create(
                    ipset_rs::SetSpec::new(set.name(), set.kind()),
                )),
                Op::Remove(Key::Set(set)) => Some(Change::Destroy(set.name())),
                Op::Add(Key::Entry(set, entry), _) | Op::Update(Key::Entry(set, entry), _) => {
                    Some(Change::Add(set.name(), *entry))
                }
                Op::Remove(Key::Entry(set, entry)) => Some(Change::Remove(set.name(), *entry)),
                _ => None,
            })
            .collect();
        let results = self.ipset.change(&changes);
        ops.iter()
            .zip(results)
            .map(|(op, result)| outcome_of_set(op, result))
            .collect()
    }

    fn servers(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let requests: Vec<Request<'_>> = ops.iter().filter_map(request_of).collect();
        let results = self.ipvs.apply(&requests);
        ops.iter()
            .zip(results)
            .map(|(op, result)| outcome_of_server(op, result))
            .collect()
    }

    fn addresses(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let changes: Vec<AddressChange> = ops
            .iter()
            .filter_map(|op| match op {
                Op::Add(Key::Address(address), _) | Op::Update(Key::Address(address), _) => {
                    Some(AddressChange::Add(*address))
                }
                Op::Remove(Key::Address(address)) => Some(AddressChange::Remove(*address)),
                _ => None,
            })
            .collect();
        self.links
            .change(&changes)
            .into_iter()
            .map(outcome_of_link)
            .collect()
    }

    fn rules(&mut self, op: &Op) -> Outcome {
        let (Op::Add(_, Value::Rules(rules)) | Op::Update(_, Value::Rules(rules))) = op else {
            return failed(
                FailureKind::Refused,
                &"the rules of a family are never removed by an op",
            );
        };
        let written = self.tools.present(rules).and_then(|present| {
            self.tools
                .restore(rules.family, &rules.restore_text(&present))
        });
        match written {
            Ok(()) => Outcome::Done,
            Err(error) => failed(FailureKind::Busy, &error),
        }
    }

    /// The virtual servers of ours: on an address of the link, or on an address and port that one
    /// of our sets holds.
    fn ours(&self, state: &State, vips: &BTreeSet<IpAddr>, key: &VirtualServerKey) -> bool {
        let VirtualServerKey::Address {
            address,
            port,
            protocol,
        } = key
        else {
            return false;
        };
        let family = key.family();
        self.families.contains(&family)
            && (vips.contains(address)
                || OWNING.iter().any(|role| {
                    let entry = Entry::IpPort(*address, *protocol, *port);
                    state.contains_key(&Key::Entry(
                        Set {
                            family,
                            role: *role,
                        },
                        entry,
                    ))
                }))
    }

    fn read_sets(&mut self, state: &mut State) -> Result<(), ReadError> {
        let sets: BTreeMap<_, Set> = self
            .families
            .iter()
            .flat_map(|family| Set::all(*family))
            .map(|set| (set.name(), set))
            .collect();
        for header in self.ipset.list_headers().map_err(|e| unread(&e))? {
            let Some(set) = sets
                .get(&header.name)
                .filter(|s| header.kind == Some(s.kind()))
            else {
                continue;
            };
            let (_, entries) = self.ipset.list(&header.name).map_err(|e| unread(&e))?;
            state.insert(Key::Set(*set), Value::Present);
            state.extend(
                entries
                    .iter()
                    .map(|entry| (Key::Entry(*set, *entry), Value::Present)),
            );
        }
        Ok(())
    }

    fn read_servers(
        &mut self,
        state: &mut State,
        vips: &BTreeSet<IpAddr>,
    ) -> Result<(), ReadError> {
        for entry in self.ipvs.virtual_servers().map_err(|e| unread(&e))? {
            let key = entry.server.key;
            if !self.ours(state, vips, &key) {
                continue;
            }
            for real in self.ipvs.real_servers(key).map_err(|e| unread(&e))? {
                let value = Value::of_real_server(&real.server);
                state.insert(Key::RealServer(key, real.server.key), value);
            }
            state.insert(
                Key::VirtualServer(key),
                Value::VirtualServer(Box::new(entry.server)),
            );
        }
        Ok(())
    }
}

/// The sets whose entries own a virtual server.
const OWNING: [ipvs_proxy_core::state::Role; 2] = [
    ipvs_proxy_core::state::Role::ClusterIp,
    ipvs_proxy_core::state::Role::Owned,
];

impl Dataplane for Kernel {
    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(ops.len());
        for run in ops.chunk_by(|a, b| subsystem(a) == subsystem(b)) {
            let Some(first) = run.first() else { continue };
            match subsystem(first) {
                Subsystem::Ipset => outcomes.extend(self.sets(run)),
                Subsystem::Ipvs => outcomes.extend(self.servers(run)),
                Subsystem::Address => outcomes.extend(self.addresses(run)),
                Subsystem::Rules => outcomes.extend(run.iter().map(|op| self.rules(op))),
                Subsystem::Link => {
                    outcomes.extend(run.iter().map(|_| outcome_of_link(self.links.create())));
                }
            }
        }
        outcomes
    }

    fn read(&mut self, wanted: &State) -> Result<State, ReadError> {
        let mut state = State::new();
        if self.links.index().map_err(|e| unread(&e))?.is_some() {
            state.insert(Key::Link, Value::Present);
        }
        let vips = self.links.addresses().map_err(|e| unread(&e))?;
        self.read_sets(&mut state)?;
        self.read_servers(&mut state, &vips)?;
        let ours = vips
            .iter()
            .filter(|vip| self.families.contains(&Family::of(**vip)));
        state.extend(ours.map(|vip| (Key::Address(*vip), Value::Present)));
        for (key, value) in wanted {
            let Value::Rules(rules) = value else { continue };
            let present = self.tools.present(rules).map_err(|e| unread(&e))?;
            if rules.differences(&present).is_empty() {
                state.insert(*key, value.clone());
            }
        }
        Ok(state)
    }

    fn connections(
        &mut self,
        of: VirtualServerKey,
    ) -> Result<BTreeMap<RealServerKey, u64>, ReadError> {
        match self.ipvs.real_servers(of) {
            Ok(servers) => Ok(servers
                .into_iter()
                .map(|entry| {
                    let count =
                        u64::from(entry.active_connections) + u64::from(entry.inactive_connections);
                    (entry.server.key, count)
                })
                .collect()),
            Err(ipvs_netlink::Error::NoVirtualServer { .. }) => Ok(BTreeMap::new()),
            Err(error) => Err(unread(&error)),
        }
    }
}

#[derive(PartialEq, Eq)]
enum Subsystem {
    Ipset,
    Ipvs,
    Address,
    Rules,
    Link,
}

fn subsystem(op: &Op) -> Subsystem {
    match op.key() {
        Key::Set(_) | Key::Entry(..) => Subsystem::Ipset,
        Key::VirtualServer(_) | Key::RealServer(..) => Subsystem::Ipvs,
        Key::Address(_) => Subsystem::Address,
        Key::Rules(_) => Subsystem::Rules,
        Key::Link => Subsystem::Link,
    }
}

fn request_of(op: &Op) -> Option<Request<'_>> {
    fn virtual_server(value: &Value) -> Option<&VirtualServer> {
        match value {
            Value::VirtualServer(server) => Some(server),
            _ => None,
        }
    }
    let real_server =
        |key: &RealServerKey, value: &Value| -> Option<RealServer> { value.real_server(*key) };
    Some(match op {
        Op::Add(Key::VirtualServer(_), value) => Request::AddVirtualServer(virtual_server(value)?),
        Op::Update(Key::VirtualServer(_), value) => {
            Request::UpdateVirtualServer(virtual_server(value)?)
        }
        Op::Remove(Key::VirtualServer(vs)) => Request::RemoveVirtualServer(*vs),
        Op::Add(Key::RealServer(vs, rs), value) => {
            Request::AddRealServer(*vs, real_server(rs, value)?)
        }
        Op::Update(Key::RealServer(vs, rs), value) => {
            Request::UpdateRealServer(*vs, real_server(rs, value)?)
        }
        Op::Remove(Key::RealServer(vs, rs)) => Request::RemoveRealServer(*vs, *rs),
        _ => return None,
    })
}

fn outcome_of_server(op: &Op, result: Result<(), ipvs_netlink::Error>) -> Outcome {
    use ipvs_netlink::Error;
    let Err(error) = result else {
        return Outcome::Done;
    };
    let kind = match (&error, op) {
        (Error::NoVirtualServer { .. } | Error::NoRealServer { .. }, Op::Remove(_)) => {
            return Outcome::Done;
        }
        (Error::Exists { .. } | Error::NoVirtualServer { .. } | Error::NoRealServer { .. }, _) => {
            FailureKind::Drift
        }
        (Error::Overrun { .. }, _) => FailureKind::Unknown,
        (Error::Kernel { source, .. }, _) => kind_of_errno(source.code),
        (Error::Transport { source, .. }, _) => kind_of_transport(source),
        _ => FailureKind::Refused,
    };
    failed(kind, &error)
}

fn outcome_of_set(op: &Op, result: Result<(), ipset_rs::Error>) -> Outcome {
    use ipset_rs::Error;
    let Err(error) = result else {
        return Outcome::Done;
    };
    let kind = match (&error, op) {
        (Error::NoSet, Op::Remove(_)) => return Outcome::Done,
        (Error::NoSet, _) => FailureKind::Drift,
        (Error::Overrun, _) => FailureKind::Unknown,
        (Error::Busy, _) => FailureKind::Busy,
        (Error::Kernel(source), _) => kind_of_errno(source.code),
        (Error::Transport(source), _) => kind_of_transport(source),
        _ => FailureKind::Refused,
    };
    failed(kind, &error)
}

fn outcome_of_link(result: Result<(), LinkError>) -> Outcome {
    let Err(error) = result else {
        return Outcome::Done;
    };
    let kind = match error.kernel() {
        Some(NetlinkError::Kernel(refusal)) if refusal.code == ENODEV => FailureKind::Drift,
        Some(NetlinkError::Kernel(refusal)) => kind_of_errno(refusal.code),
        Some(error) => kind_of_transport(error),
        None => FailureKind::Refused,
    };
    failed(kind, &error)
}

const EAGAIN: i32 = 11; // <asm-generic/errno-base.h>
const ENOMEM: i32 = 12; // <asm-generic/errno-base.h>
const EBUSY: i32 = 16; // <asm-generic/errno-base.h>
const ENODEV: i32 = 19; // <asm-generic/errno-base.h>

fn kind_of_errno(code: i32) -> FailureKind {
    match code {
        EAGAIN | ENOMEM | EBUSY => FailureKind::Busy,
        _ => FailureKind::Refused,
    }
}

fn kind_of_transport(error: &NetlinkError) -> FailureKind {
    match error {
        NetlinkError::Kernel(refusal) => kind_of_errno(refusal.code),
        NetlinkError::Overrun | NetlinkError::Decode(_) | NetlinkError::Interrupted => {
            FailureKind::Unknown
        }
        _ => FailureKind::Busy,
    }
}

/// The failure with the errors behind it.
fn failed(kind: FailureKind, error: &dyn std::fmt::Display) -> Outcome {
    Outcome::Failed(Failure {
        kind,
        text: error.to_string(),
    })
}

fn unread(error: &dyn std::fmt::Display) -> ReadError {
    ReadError(error.to_string())
}
