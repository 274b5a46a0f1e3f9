//! One change of the kernel, and what became of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_iptables::Ruleset;
use ipvs_proxy_netlink::Family;

use crate::state::{Key, Set, State, Value};

/// One change of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Make what is not there.
    Add(Key, Value),
    /// Change in place what is there.
    Update(Key, Value),
    /// Take away what is there. A virtual server takes its real servers with it.
    Remove(Key),
}

impl Op {
    /// What the op is about.
    #[must_use]
    pub fn key(&self) -> Key {
        match self {
            Op::Add(key, _) | Op::Update(key, _) | Op::Remove(key) => *key,
        }
    }
}

/// The op in words: `add real server 10.0.0.2:8080 of 10.96.0.10:80/tcp, weight 1`.
impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, value) = match self {
            Op::Add(_, value) => ("add", Some(value)),
            Op::Update(_, value) => ("update", Some(value)),
            Op::Remove(_) => ("remove", None),
        };
        write!(f, "{verb} {}", self.key())?;
        match value {
            Some(Value::VirtualServer(server)) => write!(f, ", scheduler {}", server.scheduler),
            Some(Value::RealServer(weight)) => write!(f, ", weight {weight}"),
            _ => Ok(()),
        }
    }
}

/// What became of an op.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The kernel did it, or it was so already.
    Done,
    /// The kernel did not do it, or nobody knows.
    Failed(Failure),
    /// It is done elsewhere, and may take long: [`Dataplane::finished`] tells what became of it.
    Started,
}

/// What is told later than it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finished {
    /// What became of an op that was [`Outcome::Started`].
    Op(Op, Outcome),
    /// What the kernel holds at a [`Key::Rules`]: the rules that it was compared with, or `None` when its own differ.
    Read(Key, Result<Option<Value>, ReadError>),
    /// The tools that rules take were looked at: the families that the node can serve, and whether MASQUERADE may choose ports
    /// at random.
    Tools(Vec<Family>, bool),
    /// Rules of others come before ours in built-in chains where ours must come first; a line for each of these chains.
    Misplaced(Key, Vec<String>),
}

/// What can be had of the kernel for almost nothing, to see whether others changed much.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Glance {
    /// Our sets that are there: how many entries they have, and how many rules look into them.
    pub sets: BTreeMap<Set, (u32, u32)>,
    /// Of the virtual servers that were asked for, those that are not there.
    pub missing: BTreeSet<VirtualServerKey>,
    /// A number that is another one when IPVS was loaded anew, and with it its sysctls are as at the machine's start.
    pub module: u16,
}

/// Why an op failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What to do about it.
    pub kind: FailureKind,
    /// The kernel's own words.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What a failure means for the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailureKind {
    /// The kernel is not as we thought: read it again.
    Drift,
    /// The answer was lost: the outcome is unknown, read the kernel again.
    Unknown,
    /// The kernel could not do it now: try again.
    Busy,
    /// The kernel refuses it: try again, slowly; a person must act.
    Refused,
    /// This node lacks what it takes, such as a module: others of its kind fail as well. Try again, slowly.
    Node,
}

/// The kernel could not be read whole, so nothing may be concluded from what was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadError(pub String);

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ReadError {}

/// Where ops go: the kernel, or in tests a kernel in memory.
pub trait Dataplane {
    /// Carries out the ops in their order; one outcome for each, in the same order. The failure
    /// of one stops no other.
    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome>;

    /// What was [started](Outcome::Started) and has ended since the last call, and what keys hold that a
    /// reading left [unread](Reading::unread). Never waits.
    fn finished(&mut self) -> Vec<Finished>;

    /// Reads the rules of one table anew and compares them; [`Dataplane::finished`] tells the result.
    fn read_rules(&mut self, key: Key, wanted: &Ruleset);

    /// Looks at what costs almost nothing to read, whatever the size of the table, and at these virtual servers.
    ///
    /// # Errors
    /// If it could not be read.
    fn glance(&mut self, servers: &[VirtualServerKey]) -> Result<Glance, ReadError>;

    /// Reads a part of what is ours, so that something else can be done between two parts; true
    /// when the reading is complete. `wanted` holds the rules to compare the kernel's with: a
    /// [`Key::Rules`] is in the answer only if the kernel's rules equal it. What can't be read now, or not at
    /// once, is named as [unread](Reading::unread).
    ///
    /// # Errors
    /// If the part could not be read whole; the reading is of no use then.
    fn read_part(&mut self, wanted: &State, reading: &mut Reading) -> Result<bool, ReadError>;

    /// How the kernel's rules of a family differ from these, a line each with table, chain and rule.
    ///
    /// # Errors
    /// If they could not be read.
    fn rule_differences(&mut self, wanted: &Ruleset) -> Result<Vec<String>, ReadError>;

    /// Reads all that is ours at once, but for what can't be read now.
    ///
    /// # Errors
    /// As [`Dataplane::read_part`].
    fn read(&mut self, wanted: &State) -> Result<Reading, ReadError> {
        let mut reading = Reading::default();
        while !self.read_part(wanted, &mut reading)? {}
        Ok(reading)
    }

    /// Connections, established or not, of each real server of a virtual server; empty when the
    /// virtual server is not there.
    ///
    /// # Errors
    /// If the kernel could not be read.
    fn connections(
        &mut self,
        of: VirtualServerKey,
    ) -> Result<BTreeMap<RealServerKey, u64>, ReadError>;

    /// The addresses of the node's links, without loopback ones and those of the dummy link.
    ///
    /// # Errors
    /// If they could not be listed whole.
    fn node_addresses(&mut self) -> Result<BTreeSet<IpAddr>, ReadError>;

    /// Makes the kernel forget UDP flows, soon: those of a virtual server to a real server, or all of
    /// a virtual server. Does not wait for it; what can't be forgotten yet is tried again.
    fn forget_flows(&mut self, stale: &StaleFlows);
}

/// A reading of the kernel, on its way or complete.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reading {
    /// What was read so far.
    pub state: State,
    /// The virtual servers whose real servers have yet to be read; `None` before the first part.
    pub todo: Option<Vec<VirtualServerKey>>,
    /// What nobody can tell yet, each a [`Key::Rules`]: [`Dataplane::finished`] does, or says why not.
    pub unread: BTreeSet<Key>,
}

impl From<State> for Reading {
    /// A complete reading that shows this.
    fn from(state: State) -> Reading {
        Reading {
            state,
            todo: Some(Vec::new()),
            unread: BTreeSet::new(),
        }
    }
}

/// UDP flows to forget: a virtual server, and the real server that they went to; `None` for all
/// of the virtual server.
pub type StaleFlows = BTreeSet<(VirtualServerKey, Option<RealServerKey>)>;
