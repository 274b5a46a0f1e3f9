//! Which rules of others may take a packet from ours.

use std::collections::{BTreeMap, BTreeSet};

use super::{TableRules, target, words};

/// Targets that take no packet from the rules behind that these would treat otherwise.
const PASSING: [&str; 20] = [
    "AUDIT",
    "CHECKSUM",
    "CLASSIFY",
    "CONNMARK",
    "CONNSECMARK",
    "CT",
    "DROP",
    "DSCP",
    "HL",
    "LOG",
    "MARK",
    "MASQUERADE",
    "NFLOG",
    "REJECT",
    "SECMARK",
    "SET",
    "SNAT",
    "TCPMSS",
    "TRACE",
    "TTL",
];

/// What others have in a table.
#[derive(Default)]
pub(super) struct Others<'a> {
    /// The built-in chains, and how many rules of others come before the last jump to ours.
    pub(super) built_in: BTreeMap<&'a str, usize>,
    /// The rules by chain, but for our chains and the jumps to them.
    pub(super) rules: BTreeMap<&'a str, Vec<&'a str>>,
}

impl Others<'_> {
    /// Whether a rule, or a chain that it goes to, may take a new connection from the rules behind. One
    /// that refuses it does no harm: what is refused does not depend on who is first. One that only
    /// masquerades does what ours would do at most.
    pub(super) fn take_packets<'a>(
        &'a self,
        ours: &TableRules,
        rule: &'a str,
        built_in: bool,
        seen: &mut BTreeSet<&'a str>,
    ) -> bool {
        let words = words(rule);
        let old = |pair: &[&str]| match pair {
            ["!", ..] => false,
            [_, "--ctstate" | "--state", states] => !states.split(',').any(|state| state == "NEW"),
            _ => false,
        };
        if words.windows(3).any(old) {
            return false;
        }
        match target(rule) {
            None => false,
            Some("RETURN") => built_in,
            Some(target) if PASSING.contains(&target) || ours.owns(target) => false,
            // Nothing comes back to a chain from which a packet goes for good.
            Some(_) if built_in && words.contains(&"-g") => true,
            Some(target) => match self.rules.get(target) {
                Some(_) if !seen.insert(target) => false,
                Some(rules) => rules
                    .iter()
                    .any(|rule| self.take_packets(ours, rule, false, seen)),
                // A target that this does not know.
                None => true,
            },
        }
    }
}
