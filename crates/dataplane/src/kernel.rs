//! The kernel as a [`Dataplane`]: ops become batches, dumps become the same [`State`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ipset_rs::{Change, Entry};
use ipvs_netlink::{
    RealServer, RealServerKey, Request, Scheduler, VirtualServer, VirtualServerKey,
};
use ipvs_proxy_core::op::{
    Dataplane, Failure, FailureKind, Op, Outcome, ReadError, Reading, StaleFlows,
};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules;
use ipvs_proxy_core::state::{Key, Set, State, Value, is_ours};
use ipvs_proxy_iptables::{Backend, Choice, Ruleset, Tools};
use ipvs_proxy_netlink::{Error as NetlinkError, Family, Socket, Subsystem as NetlinkSubsystem};

use crate::capabilities::{self, Capability};
use crate::flows::{Flows, Forgotten};
use crate::growth::{self, GROWING};
use crate::links::{self, AddressChange, LinkError, Links};
use crate::notices::OwnRules;

/// Why the kernel can't be worked with at all.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This process lacks capabilities.
    #[error(
        "not permitted without CAP_{}: run it as root, or name {} in the container's capabilities.add",
        .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and CAP_"),
        .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
    )]
    Capabilities(Vec<Capability>),
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
    nfnetlink: Socket,
    flows: Flows,
    tools: Tools,
    own_rules: OwnRules,
    families: Vec<Family>,
}

impl Kernel {
    /// Opens all that is needed. `families` limits what is read.
    ///
    /// # Errors
    /// An error that names what is missing: the module, the tool, the privilege.
    pub fn open(families: &[Family], iptables: Choice) -> Result<Kernel, OpenError> {
        let missing = capabilities::missing();
        if !missing.is_empty() {
            return Err(OpenError::Capabilities(missing));
        }
        let mut ipvs = ipvs_netlink::Client::open()?;
        // A listing needs CAP_NET_ADMIN as a change does, so a lack of it shows here.
        ipvs.info()?;
        Ok(Kernel {
            ipvs,
            ipset: ipset_rs::Client::open()?,
            links: Links::open()?,
            nfnetlink: Socket::open(NetlinkSubsystem::Netfilter)
                .map_err(links::failed("open nfnetlink"))?,
            tools: Tools::find(iptables)?,
            own_rules: OwnRules::default(),
            flows: Flows::open().map_err(links::failed("open nfnetlink"))?,
            families: families.to_vec(),
        })
    }

    /// The iptables tools in use.
    #[must_use]
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// The changes of rules that this value makes, by which [`notices`](crate::notices) leaves
    /// them out.
    #[must_use]
    pub fn own_rules(&self) -> OwnRules {
        self.own_rules.clone()
    }

    /// Has `report` called with what became of each pass over connection tracking's table. To be called
    /// before the first op.
    pub fn report_flows(&mut self, report: impl Fn(&Forgotten) + Send + 'static) {
        self.flows.report_to(report);
    }

    /// Waits until the UDP flows are forgotten that were to be; false when they could not be, or not in
    /// this time.
    #[must_use]
    pub fn finish_flows(&self, within: Duration) -> bool {
        self.flows.finish(within)
    }

    /// Checks that the kernel has a scheduler, without a change of the table. The kernel may load
    /// the scheduler's module.
    ///
    /// # Errors
    /// [`OpenError::Scheduler`] when it has not.
    pub fn require_scheduler(&mut self, scheduler: Scheduler) -> Result<(), OpenError> {
        let known = self.ipvs.virtual_servers()?;
        if known
            .iter()
            .any(|entry| entry.server.scheduler == scheduler)
        {
            return Ok(());
        }
        if self.ipvs.has_scheduler(scheduler)? {
            Ok(())
        } else {
            Err(OpenError::Scheduler(scheduler))
        }
    }

    fn sets(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let replaced = |op: &Op| match op {
            Op::Update(Key::Set(set), _) => Some(*set),
            _ => None,
        };
        let mut outcomes = Vec::with_capacity(ops.len());
        for run in ops.chunk_by(|a, b| replaced(a).is_none() && replaced(b).is_none()) {
            match run.first().and_then(replaced) {
                Some(set) => outcomes.push(self.replace(set)),
                None => outcomes.extend(self.change_sets(run)),
            }
        }
        outcomes
    }

    fn change_sets(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let changes: Vec<Change> = ops
            .iter()
            .filter_map(|op| match op {
                Op::Add(Key::Set(set), _) => Some(create(*set)),
                Op::Remove(Key::Set(set)) => Some(Change::Destroy(set.name())),
                Op::Add(Key::Entry(set, entry), _) | Op::Update(Key::Entry(set, entry), _) => {
                    Some(Change::Add(set.name(), *entry))
                }
                Op::Remove(Key::Entry(set, entry)) => Some(Change::Remove(set.name(), *entry)),
                _ => None,
            })
            .collect();
        let mut full = BTreeMap::<Set, BTreeSet<Entry>>::new();
        let results = self.ipset.change(&changes);
        let mut outcomes: Vec<Outcome> = ops
            .iter()
            .zip(results)
            .map(|(op, result)| match (op, result) {
                (Op::Remove(Key::Set(set)), Err(ipset_rs::Error::Busy)) => self.destroy(*set),
                (op, result) => {
                    if let (Key::Entry(set, entry), Err(ipset_rs::Error::Full)) =
                        (op.key(), &result)
                    {
                        full.entry(set).or_default().insert(entry);
                    }
                    outcome_of_set(op, result)
                }
            })
            .collect();
        for (set, refused) in &full {
            let outcome = self.grow(*set, refused);
            for (op, slot) in ops.iter().zip(&mut outcomes) {
                // All keys of a run differ.
                if let Key::Entry(of, entry) = op.key()
                    && of == *set
                    && refused.contains(&entry)
                {
                    slot.clone_from(&outcome);
                }
            }
        }
        outcomes
    }

    /// Adds entries that a set refused as full, by giving it more room.
    fn grow(&mut self, set: Set, refused: &BTreeSet<Entry>) -> Outcome {
        match growth::grow(&mut self.ipset, set, refused) {
            Ok(limit) => {
                tracing::info!(set = %set.name(), maxelem = limit, "a full set got more room");
                Outcome::Done
            }
            Err(error) => {
                let op = Op::Add(Key::Set(set), Value::Present);
                match outcome_of_set(&op, Err(error)) {
                    Outcome::Done => Outcome::Done,
                    Outcome::Failed(Failure { kind, text }) => failed(
                        kind,
                        &format!("the set is full, and {GROWING} could not take its place: {text}"),
                    ),
                }
            }
        }
    }

    /// Removes what is left of a process that crashed while a set grew; whether there was any.
    /// Only for the one process that works here.
    ///
    /// # Errors
    /// When the kernel refuses it: a rule that is not ours uses the set.
    pub fn remove_leftover(&mut self) -> Result<bool, ipset_rs::Error> {
        growth::remove_leftover(&mut self.ipset)
    }

    /// Destroys a set that was in use a moment ago. nf_tables lets go of the sets of deleted rules
    /// a little later; a rule of other software does not.
    fn destroy(&mut self, set: Set) -> Outcome {
        let op = Op::Remove(Key::Set(set));
        let mut left = BUSY_ATTEMPTS;
        loop {
            let outcome = outcome_of_set(&op, self.change_set(Change::Destroy(set.name())));
            left -= 1;
            match outcome {
                Outcome::Failed(Failure {
                    kind: FailureKind::Busy,
                    ..
                }) if left > 0 => {
                    if let Some(outcome) = self.in_use(set) {
                        return outcome;
                    }
                    thread::sleep(BUSY_PAUSE);
                }
                outcome => return outcome,
            }
        }
    }

    /// A failure that names the rule of other software that holds a set of ours, if one does.
    fn in_use(&self, set: Set) -> Option<Outcome> {
        let ours = rules::rules(&Config::default(), set.family);
        let rule = self
            .tools
            .rule_of_set(set.name().as_str(), &ours)?
            .replacen(" -A ", " -D ", 1);
        let text = format!("a rule that is not ours uses the set: delete it ({rule})");
        Some(failed(FailureKind::Busy, &text))
    }

    /// Puts a set of ours in the place of one of another type. A set can't go while rules look into
    /// it, so the family's rules go as well, and the caller puts them back.
    fn replace(&mut self, set: Set) -> Outcome {
        if let Some(outcome) = self.in_use(set) {
            return outcome;
        }
        let outcome = self.rules(&Op::Remove(Key::Rules(set.family)));
        if outcome != Outcome::Done {
            return outcome;
        }
        let outcome = match self.destroy(set) {
            Outcome::Done => {
                let op = Op::Add(Key::Set(set), Value::Present);
                outcome_of_set(&op, self.change_set(create(set)))
            }
            failed => failed,
        };
        match outcome {
            Outcome::Done => Outcome::Done,
            // The rules are gone: the kernel is not as it was.
            Outcome::Failed(failure) => failed(FailureKind::Drift, &failure),
        }
    }

    fn change_set(&mut self, change: Change) -> Result<(), ipset_rs::Error> {
        let results = self.ipset.change(&[change]);
        results
            .into_iter()
            .next()
            .unwrap_or(Err(ipset_rs::Error::Overrun))
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
        let (rules, removed) = match op {
            Op::Add(_, Value::Rules(rules)) | Op::Update(_, Value::Rules(rules)) => {
                (rules.clone(), false)
            }
            Op::Remove(Key::Rules(family)) => {
                (Box::new(rules::rules(&Config::default(), *family)), true)
            }
            _ => return failed(FailureKind::Refused, &"not an op of rules"),
        };
        let written = self.tools.present(&rules).and_then(|present| {
            let text = match removed {
                true => rules.removal_text(&present),
                false => rules.restore_text(&present),
            };
            let write = || self.tools.restore(rules.family, &text);
            match self.tools.backend() {
                Backend::Nft => {
                    let transactions = text.lines().filter(|line| *line == "COMMIT").count();
                    let socket = &mut self.nfnetlink;
                    self.own_rules.during(socket, transactions, write)
                }
                Backend::Legacy => write(),
            }
        });
        match written {
            Ok(()) => Outcome::Done,
            Err(error) => failed(FailureKind::Busy, &error),
        }
    }

    fn link(&mut self, op: &Op) -> Outcome {
        outcome_of_link(match op {
            Op::Remove(_) => self.links.delete(),
            _ => self.links.create(),
        })
    }

    /// Reads all that is ours, whatever it should be: also rules and sets that are not as they
    /// should be.
    ///
    /// # Errors
    /// If it could not be read whole.
    pub fn read_whatever(&mut self) -> Result<State, ReadError> {
        let mut state = self.read(&State::new())?;
        for family in self.families.clone() {
            let rules = rules::rules(&Config::default(), family);
            let present = self.tools.present(&rules).map_err(|e| unread(&e))?;
            if !rules.removal_text(&present).is_empty() {
                state.insert(Key::Rules(family), Value::Rules(Box::new(rules)));
            }
        }
        let names: BTreeSet<_> = self
            .ipset
            .list_headers()
            .map_err(|e| unread(&e))?
            .into_iter()
            .map(|set| set.name)
            .collect();
        let ours = self.families.iter().flat_map(|family| Set::all(*family));
        let there = ours.filter(|set| names.contains(&set.name()));
        state.extend(there.map(|set| (Key::Set(set), Value::Present)));
        Ok(state)
    }

    /// The chains of ours that have to stay because rules of other software go to them, a line each
    /// that names these rules. They stay empty.
    ///
    /// # Errors
    /// If the rules could not be read.
    pub fn held_chains(&self) -> Result<Vec<String>, ReadError> {
        let mut held = Vec::new();
        for family in &self.families {
            let rules = rules::rules(&Config::default(), *family);
            let present = self.tools.present(&rules).map_err(|e| unread(&e))?;
            let command = self.tools.command(*family);
            for (table, chain, rules) in present.referenced() {
                let delete = |rule| format!("{command} -t {table} -D {rule}");
                let delete: Vec<String> = rules.iter().map(delete).collect();
                held.push(format!(
                    "remove chain {chain} of table {table}: a rule that is not ours goes to it: \
                     delete it ({})",
                    delete.join(" && ")
                ));
            }
        }
        Ok(held)
    }

    fn read_sets(&mut self, state: &mut State) -> Result<(), ReadError> {
        let sets: BTreeMap<_, Set> = self
            .families
            .iter()
            .flat_map(|family| Set::all(*family))
            .map(|set| (set.name(), set))
            .collect();
        for header in self.ipset.list_headers().map_err(|e| unread(&e))? {
            let Some(set) = sets.get(&header.name) else {
                continue;
            };
            if header.kind != Some(set.kind()) || header.counters || header.skbinfo {
                state.insert(Key::Set(*set), Value::OddSet);
                continue;
            }
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

    /// Reads everything but real servers; the virtual servers of ours.
    fn read_all_but_real_servers(
        &mut self,
        wanted: &State,
        state: &mut State,
    ) -> Result<Vec<VirtualServerKey>, ReadError> {
        if self.links.index().map_err(|e| unread(&e))?.is_some() {
            state.insert(Key::Link, Value::Present);
        }
        let (vips, _) = self.links.addresses().map_err(|e| unread(&e))?;
        let ours = vips
            .iter()
            .filter(|vip| self.families.contains(&Family::of(**vip)));
        state.extend(ours.map(|vip| (Key::Address(*vip), Value::Present)));
        self.read_sets(state)?;
        let mut servers = Vec::new();
        for entry in self.ipvs.virtual_servers().map_err(|e| unread(&e))? {
            let key = entry.server.key;
            if is_ours(&key, state) {
                servers.push(key);
                state.insert(
                    Key::VirtualServer(key),
                    Value::VirtualServer(Arc::new(entry.server)),
                );
            }
        }
        for (key, value) in wanted {
            let Value::Rules(rules) = value else { continue };
            let present = self.tools.present(rules).map_err(|e| unread(&e))?;
            if rules.differences(&present).is_empty() {
                state.insert(*key, value.clone());
            }
        }
        Ok(servers)
    }
}

/// How often a set in use is destroyed before that is a failure.
const BUSY_ATTEMPTS: u32 = 5;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// The virtual servers whose real servers are read in one part: some milliseconds.
const PART: usize = 64;

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
                Subsystem::Link => outcomes.extend(run.iter().map(|op| self.link(op))),
            }
        }
        outcomes
    }

    fn read_part(&mut self, wanted: &State, reading: &mut Reading) -> Result<bool, ReadError> {
        let Some(todo) = &mut reading.todo else {
            reading.todo = Some(self.read_all_but_real_servers(wanted, &mut reading.state)?);
            return Ok(false);
        };
        for key in todo.split_off(todo.len().saturating_sub(PART)) {
            for real in self.ipvs.real_servers(key).map_err(|e| unread(&e))? {
                let value = Value::of_real_server(&real.server);
                reading
                    .state
                    .insert(Key::RealServer(key, real.server.key), value);
            }
        }
        Ok(todo.is_empty())
    }

    fn rule_differences(&mut self, wanted: &Ruleset) -> Result<Vec<String>, ReadError> {
        let present = self.tools.present(wanted).map_err(|e| unread(&e))?;
        Ok(wanted.difference_lines(&present))
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

    fn node_addresses(&mut self) -> Result<BTreeSet<IpAddr>, ReadError> {
        let (_, others) = self.links.addresses().map_err(|e| unread(&e))?;
        Ok(others)
    }

    fn forget_flows(&mut self, stale: &StaleFlows) {
        self.flows.forget(stale);
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

fn create(set: Set) -> Change {
    Change::Create(ipset_rs::SetSpec::new(set.name(), set.kind()))
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
