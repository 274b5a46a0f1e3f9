//! Events (`events.k8s.io/v1`) on Services, EndpointSlices and the Node: what a person should know
//! and would not look for in a log.
//!
//! The loop hands findings over and never waits; what, when and how often is decided by
//! [`Reporter`], which does no I/O. Thousands of nodes may find the same at the same time, so
//!
//! - of what every node finds alike, a share of the nodes reports, chosen anew each hour by a hash;
//!   the share is such that about [`REPORTERS`] do, however many nodes there are;
//! - such an event's name is the same from all nodes, so that there is one of it;
//! - everything waits for a time that grows with the number of nodes, no two nodes alike;
//! - a node reports each cause of an object once an hour, and no more than [`BURST`] at once and one
//!   in [`REFILL`] in the long run.

mod write;

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use ipvs_proxy_core::guard::{Cause, Refused};
use ipvs_proxy_core::model::ObjectName;
use ipvs_proxy_core::planner::Conflict;

use crate::translate::Refusal;

pub use write::write;

/// About how many nodes report what all find alike.
pub const REPORTERS: u32 = 5;
/// The most events at once.
pub const BURST: u32 = 10;
/// How often there may be one more.
pub const REFILL: Duration = Duration::from_secs(10);
/// The longest that an event waits in a cluster of one node.
const SPREAD: Duration = Duration::from_secs(30);
/// By how much longer for each node more.
const SPREAD_A_NODE: Duration = Duration::from_millis(100);
const HOUR: Duration = Duration::from_secs(3600);
/// Most causes that are remembered, and most events that wait. What is beyond is not reported.
const REMEMBERED: usize = 4096;
const WAITING: usize = 256;
/// The longest note that the API takes is 1 KiB.
const NOTE: usize = 1000;

/// Why there is an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The proxy started.
    Starting,
    /// A part of the object can't be used.
    InvalidField,
    /// Another Service has the VIP and port.
    AddressConflict,
    /// An address that is somebody else's, or that is not allowed.
    AddressRefused,
    /// A process of the node listens on an address and port of the node for which the Service asks.
    PortInUse,
    /// An address that the node needs is served without being local to the node.
    AddressNotBound,
    /// The Service has more virtual or real servers than a Service may have.
    TooLarge,
    /// The kernel refuses what the object needs, for a minute or longer.
    FailedToProgram,
    /// A health check node port can't be listened on: kube-proxy's word.
    FailedToStartServiceHealthcheck,
    /// A sysctl is not as it must be and can't be set.
    FailedToSetSysctl,
    /// The kernel can't be read.
    FailedToReadKernel,
    /// Rules of other software come before ours, and may keep packets from Services.
    RulesMisplaced,
    /// The configuration's file changed and can't be used: the next start will fail.
    UnusableConfiguration,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl Reason {
    /// Whether every node finds it alike: it follows from objects alone.
    fn is_everywhere(self) -> bool {
        matches!(
            self,
            Reason::InvalidField
                | Reason::AddressConflict
                | Reason::AddressRefused
                | Reason::AddressNotBound
                | Reason::TooLarge
        )
    }

    /// What was done or not done, as the API wants it.
    fn action(self) -> &'static str {
        match self {
            Reason::Starting => "Start",
            Reason::InvalidField
            | Reason::AddressConflict
            | Reason::AddressRefused
            | Reason::PortInUse
            | Reason::TooLarge => "IgnoreField",
            Reason::AddressNotBound => "RouteByMark",
            Reason::FailedToProgram => "ProgramKernel",
            Reason::FailedToStartServiceHealthcheck => "Listen",
            Reason::FailedToSetSysctl => "SetSysctl",
            Reason::FailedToReadKernel => "ReadKernel",
            Reason::RulesMisplaced => "MoveRules",
            Reason::UnusableConfiguration => "ReadConfiguration",
        }
    }
}

/// What an event is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Object {
    /// The own Node.
    Node,
    /// A Service.
    Service(ObjectName),
    /// An EndpointSlice.
    EndpointSlice(ObjectName),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Node => f.write_str("Node"),
            Object::Service(name) => write!(f, "Service {name}"),
            Object::EndpointSlice(name) => write!(f, "EndpointSlice {name}"),
        }
    }
}

/// Something that a person should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is about.
    pub object: Object,
    /// Why.
    pub reason: Reason,
    /// In words.
    pub note: String,
    /// What tells two findings of one object and reason apart: a field, a key.
    pub cause: String,
}

impl Finding {
    /// Of the own Node.
    #[must_use]
    pub fn of_node(reason: Reason, note: String) -> Finding {
        Finding {
            object: Object::Node,
            reason,
            cause: note.clone(),
            note,
        }
    }

    /// What the kernel refuses, for a Service or, without one, for all.
    #[must_use]
    pub fn failed(service: Option<&ObjectName>, op: String, error: &str) -> Finding {
        Finding {
            object: service.cloned().map_or(Object::Node, Object::Service),
            reason: Reason::FailedToProgram,
            note: format!("{op}: {error}"),
            // A Service with many endpoints would have as many events.
            cause: error.to_owned(),
        }
    }
}

impl Finding {
    /// A health check node port of a Service can't be listened on.
    #[must_use]
    pub fn health_port(service: &ObjectName, port: u16, error: &str) -> Finding {
        Finding {
            object: Object::Service(service.clone()),
            reason: Reason::FailedToStartServiceHealthcheck,
            note: format!(
                "Service {service}: spec.healthCheckNodePort {port} {error}; will be tried again"
            ),
            cause: format!("{port}"),
        }
    }
}

impl From<&Conflict> for Finding {
    fn from(conflict: &Conflict) -> Finding {
        Finding {
            object: Object::Service(conflict.loser.clone()),
            reason: Reason::AddressConflict,
            note: conflict.to_string(),
            // A Service may claim a thousand of them.
            cause: conflict.winner.to_string(),
        }
    }
}

impl From<&Refused> for Finding {
    fn from(refused: &Refused) -> Finding {
        Finding {
            object: Object::Service(refused.service.clone()),
            reason: match refused.cause {
                Cause::VirtualServers(_) | Cause::RealServers(_) => Reason::TooLarge,
                Cause::Listener => Reason::PortInUse,
                Cause::Routed => Reason::AddressNotBound,
                Cause::HealthCheckNodePort => Reason::AddressConflict,
                _ => Reason::AddressRefused,
            },
            note: refused.to_string(),
            cause: format!("{} {}", refused.cause.name(), refused.first),
        }
    }
}

impl From<&Refusal> for Finding {
    fn from(refusal: &Refusal) -> Finding {
        let (kind, name) = refusal.object.split_once(' ').unwrap_or_default();
        let name = name
            .split_once('/')
            .map(|(namespace, name)| ObjectName::new(namespace, name))
            .filter(|name| !name.name.is_empty());
        let object = match (kind, name) {
            ("Service", Some(name)) => Object::Service(name),
            ("EndpointSlice", Some(name)) => Object::EndpointSlice(name),
            _ => Object::Node,
        };
        Finding {
            object,
            reason: Reason::InvalidField,
            note: refusal.to_string(),
            cause: refusal.field.clone(),
        }
    }
}

/// An event that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Due {
    /// What it says.
    pub finding: Finding,
    /// Its name; the same from all nodes where all find the same.
    pub name: String,
}

/// Decides what is reported and when.
#[derive(Debug)]
pub struct Reporter {
    node: String,
    nodes: u32,
    /// The hour in which a cause was reported, or left to other nodes.
    known: BTreeMap<u64, u64>,
    waiting: BTreeMap<(Instant, u64), Due>,
    tokens: u32,
    refilled: Instant,
}

impl Reporter {
    /// For a node of this name in a cluster of `nodes` nodes.
    #[must_use]
    pub fn new(node: &str, nodes: u32, now: Instant) -> Reporter {
        Reporter {
            node: node.to_owned(),
            nodes,
            known: BTreeMap::new(),
            waiting: BTreeMap::new(),
            tokens: BURST,
            refilled: now,
        }
    }

    /// The number of nodes is another.
    pub fn set_nodes(&mut self, nodes: u32) {
        self.nodes = nodes;
    }

    /// Takes a finding; `since_1970` is the time on the wall clock. Whether it will be reported.
    pub fn note(&mut self, mut finding: Finding, now: Instant, since_1970: Duration) -> bool {
        let hour = since_1970.as_secs() / HOUR.as_secs();
        let cause = hash(&[
            &finding.object.to_string(),
            &finding.reason.to_string(),
            &finding.cause,
        ]);
        if self.known.get(&cause) == Some(&hour) {
            return false;
        }
        if self.known.len() >= REMEMBERED {
            self.known.retain(|_, known| *known == hour);
        }
        if self.known.len() >= REMEMBERED || self.waiting.len() >= WAITING {
            return false;
        }
        self.known.insert(cause, hour);
        let [of_cause, of_hour] = [cause, hour].map(|number| number.to_string());
        let own = hash(&[&self.node, &of_cause, &of_hour]);
        let everywhere = finding.reason.is_everywhere();
        if everywhere && !is_chosen(own, self.nodes) {
            return false;
        }
        let id = if everywhere {
            hash(&[&of_cause, &of_hour])
        } else {
            own
        };
        let about = match &finding.object {
            Object::Node => self.node.as_str(),
            Object::Service(name) | Object::EndpointSlice(name) => &name.name,
        };
        // The API's longest name has 253 characters, and no part of it ends with a hyphen.
        let about: String = about.chars().take(230).collect();
        let about = about.trim_end_matches(['-', '.']);
        let name = format!("{about}.{id:016x}");
        let longest = SPREAD + SPREAD_A_NODE * self.nodes;
        let after = longest.mul_f64(share(own.rotate_left(32)));
        shorten(&mut finding.note);
        self.waiting
            .insert((now + after, cause), Due { finding, name });
        true
    }

    /// When [`Reporter::next`] has something, unless more is noted before.
    #[must_use]
    pub fn next_at(&self) -> Option<Instant> {
        let ((at, _), _) = self.waiting.first_key_value()?;
        let token = match self.tokens {
            0 => self.refilled + REFILL,
            _ => self.refilled,
        };
        Some((*at).max(token))
    }

    /// What is due, if there is something and it is time for one more.
    pub fn next(&mut self, now: Instant) -> Option<Due> {
        while self.refilled + REFILL <= now && self.tokens < BURST {
            self.refilled += REFILL;
            self.tokens += 1;
        }
        if self.tokens == BURST {
            self.refilled = now;
        }
        let first = self
            .waiting
            .first_entry()
            .filter(|first| first.key().0 <= now)?;
        self.tokens = self.tokens.checked_sub(1)?;
        Some(first.remove())
    }
}

/// A number that is the same on every node, whatever built this program: FNV-1a, its bits mixed as at the end of MurmurHash3.
fn hash(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0xff]));
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}

/// From 0 to 1, by the upper half of a hash.
fn share(hash: u64) -> f64 {
    f64::from(u32::try_from(hash >> 32).unwrap_or_default()) / f64::from(u32::MAX)
}

/// Whether a node with this hash is one of the few that report.
fn is_chosen(own: u64, nodes: u32) -> bool {
    share(own) * f64::from(nodes) <= f64::from(REPORTERS)
}

/// Cuts a note that is longer than the API takes.
fn shorten(note: &mut String) {
    if note.len() > NOTE {
        let end = (0..=NOTE).rev().find(|end| note.is_char_boundary(*end));
        note.truncate(end.unwrap_or_default());
        note.push('…');
    }
}

#[cfg(test)]
mod tests;
