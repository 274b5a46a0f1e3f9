//! One change of the kernel, and what became of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_iptables::Ruleset;

use crate::state::{Key, State, Value};

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

    /// Reads a part of what is ours, so that something else can be done between two parts; true
    /// when the reading is complete. `wanted` holds the rules to compare the kernel's with: a
    /// [`Key::Rules`] is in the answer only if the kernel's rules equal it.
    ///
    /// # Errors
    /// If the part could not be read whole; the reading is of no use then.
    fn read_part(&mut self, wanted: &State, reading: &mut Reading) -> Result<bool, ReadError>;

    /// How the kernel's rules of a family differ from these, a line each with table, chain and rule.
    ///
    /// # Errors
    /// If they could not be read.
    fn rule_differences(&mut self, wanted: &Ruleset) -> Result<Vec<String>, ReadError>;

    /// Reads all that is ours at once.
    ///
    /// # Errors
    /// As [`Dataplane::read_part`].
    fn read(&mut self, wanted: &State) -> Result<State, ReadError> {
        let mut reading = Reading::default();
        while !self.read_part(wanted, &mut reading)? {}
        Ok(reading.state)
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

/// A reading of the kernel on its way.
#[derive(Debug, Default)]
pub struct Reading {
    /// What was read so far.
    pub state: State,
    /// The virtual servers whose real servers have yet to be read; `None` before the first part.
    pub todo: Option<Vec<VirtualServerKey>>,
}

/// UDP flows to forget: a virtual server, and the real server that they went to; `None` for all
/// of the virtual server.
pub type StaleFlows = BTreeSet<(VirtualServerKey, Option<RealServerKey>)>;
