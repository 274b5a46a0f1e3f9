//! What the log says of drift and of drains: each thing in a line, and of many things a few lines
//! and a sum.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::report::{Reports, Say, Topic, say};
use ipvs_proxy_core::op::Dataplane;
use ipvs_proxy_core::planner::{DrainNews, DrainStep, Planner};
use ipvs_proxy_core::state::{Key, State, Value};

/// While pods are to be told by the Node's networks, and there are none.
pub const NO_POD_CIDRS: &str = "detectLocalMode NodeCIDR: there is no Node of this name with spec.podCIDRs; \
     until there is, only the node's own packets are masqueraded on their way to a ClusterIP";

/// One thing that somebody else changed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    key: Key,
    /// `missing`, `added`, `changed`; of rules with the rule.
    found: String,
}

impl Finding {
    /// Whether it is about this key.
    pub(crate) fn is_of(&self, key: &Key) -> bool {
        self.key == *key
    }

    /// Whether it is about rules, which are read apart from all else.
    pub(crate) fn is_of_rules(&self) -> bool {
        matches!(self.key, Key::Rules(..))
    }
}

/// What there is to say of keys at which the kernel is not as it was left. The real servers of a
/// virtual server that came or went are not named.
pub fn of_drift(
    drift: &BTreeSet<Key>,
    read: &State,
    planner: &Planner,
    kernel: &mut impl Dataplane,
) -> BTreeSet<Finding> {
    let found = |key: &Key| match (planner.holds(key), read.contains_key(key)) {
        (true, true) => "changed",
        (false, true) => "added",
        (_, false) => "missing",
    };
    let mut findings = BTreeSet::new();
    for key in drift {
        match (key, planner.base().get(key)) {
            (Key::RealServer(vs, _), _) => {
                let server = Key::VirtualServer(*vs);
                if drift.contains(&server) && found(&server) != "changed" {
                    continue;
                }
            }
            (_, Some(Value::Rules(rules))) => {
                let lines = kernel.rule_differences(rules).unwrap_or_default();
                let finding = |found| Finding { key: *key, found };
                let before = findings.len();
                findings.extend(lines.into_iter().map(finding));
                if findings.len() > before {
                    continue;
                }
            }
            _ => {}
        }
        let found = found(key).to_owned();
        findings.insert(Finding { key: *key, found });
    }
    findings
}

/// Tells of the findings that were not told before.
pub fn tell(
    findings: &BTreeSet<Finding>,
    told: &BTreeSet<Finding>,
    planner: &Planner,
    reports: &mut Reports,
    now: Instant,
) {
    let new: Vec<&Finding> = findings.difference(told).collect();
    let mut lines = 0_usize;
    for Finding { key, found } in &new {
        let service = planner.owner(key).map(ToString::to_string);
        let say = reports.line(Topic::Drift, now);
        lines += usize::from(say == Say::Line);
        say!(say, warn, service, %key, %found, "changed by somebody else");
    }
    if lines < new.len() {
        let kinds = sum(new.iter().map(|finding| kind(&finding.key)));
        let say = reports.sum(Topic::Drift, now);
        say!(say, warn, findings = new.len(), told = lines, %kinds, "much was changed by somebody else");
    }
}

/// Tells of drains.
pub fn tell_drains(news: &[DrainNews], reports: &mut Reports, now: Instant) {
    for news in news {
        let topic = match news.step {
            DrainStep::Began(_) => Topic::Drain,
            _ => Topic::DrainEnd,
        };
        let say = reports.line(topic, now);
        let service = news.service.as_ref().map(ToString::to_string);
        let (server, real_server) = (news.virtual_server, news.real_server);
        match news.step {
            DrainStep::Began(deadline) => {
                let ends_in_ms = deadline.map(|at| at.saturating_duration_since(now).as_millis());
                say!(say, info, service, %server, %real_server, ends_in_ms, "drain began");
            }
            DrainStep::Emptied => {
                say!(say, info, service, %server, %real_server, "drain ended: no connection is left");
            }
            DrainStep::Cut(connections) => {
                say!(say, warn, service, %server, %real_server, connections, "drain was cut at its deadline");
            }
            DrainStep::Returned => {
                say!(say, info, service, %server, %real_server, "drain ended: the endpoint is back");
            }
            DrainStep::Gone => {
                say!(say, info, service, %server, %real_server, "drain ended: the real server is gone");
            }
        }
    }
}

fn kind(key: &Key) -> &'static str {
    match key {
        Key::Set(_) => "sets",
        Key::Rules(..) => "rules",
        Key::Link => "links",
        Key::Entry(..) => "entries",
        Key::VirtualServer(_) => "virtual servers",
        Key::RealServer(..) => "real servers",
        Key::Address(_) => "addresses",
        Key::Route(_) => "routes",
        Key::RoutingRule(..) => "routing rules",
    }
}

/// `3 rules, 4000 virtual servers`.
fn sum(kinds: impl Iterator<Item = &'static str>) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    kinds.for_each(|kind| *counts.entry(kind).or_default() += 1);
    let counts = counts.iter().map(|(kind, count)| format!("{count} {kind}"));
    counts.collect::<Vec<_>>().join(", ")
}
