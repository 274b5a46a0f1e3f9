//! The iptables rules: read, compared, written, and taken away where a set has to go that they look into.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use ipset_rs::Change;
use ipvs_proxy_core::op::{Failure, FailureKind, Op, Outcome, ReadError};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules;
use ipvs_proxy_core::state::{Key, Set, Value};
use ipvs_proxy_iptables::{Backend, Error, Present, Ruleset, Tools};
use ipvs_proxy_netlink::{Family, Socket};

use crate::kernel::{change_set, create};
use crate::notices::OwnRules;
use crate::outcomes::{failed, outcome_of_set, unread};

/// How often a set in use is destroyed before that is a failure.
const BUSY_ATTEMPTS: u32 = 5;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// What changes and reads rules, with sockets of its own: it may be on a thread of its own.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) tools: Tools,
    pub(crate) own: OwnRules,
    pub(crate) netfilter: Socket,
    pub(crate) ipset: ipset_rs::Client,
}

/// How the kernel's rules compare with wanted ones, a line for each difference.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    pub(crate) differences: Vec<String>,
    pub(crate) misplaced: Vec<String>,
}

impl Rules {
    pub(crate) fn compare(&self, wanted: &Ruleset) -> Result<Compared, ReadError> {
        let present = self.tools.present(wanted).map_err(|e| unread(&e))?;
        Ok(Compared {
            differences: wanted.difference_lines(&present),
            misplaced: wanted.misplaced(&present),
        })
    }

    /// Carries out an op on rules.
    pub(crate) fn apply(&mut self, op: &Op) -> Outcome {
        let (rules, removed) = match op {
            Op::Add(_, Value::Rules(rules)) | Op::Update(_, Value::Rules(rules)) => {
                (rules.clone(), false)
            }
            Op::Remove(Key::Rules(family, of)) => {
                let mut tables = rules::by_table(&Config::default(), *family);
                match tables.find(|(table, _)| table == of) {
                    Some((_, rules)) => (Box::new(rules), true),
                    None => return Outcome::Done,
                }
            }
            _ => return failed(FailureKind::Refused, &"not an op of rules"),
        };
        let written = match self.tools.present(&rules) {
            Err(Error::NoTable { .. }) if removed => return Outcome::Done,
            Err(error) => Err(error),
            Ok(present) if removed => self.write(rules.family, &rules.removal_text(&present)),
            Ok(present) => self.write(rules.family, &rules.restore_text(&present)),
        };
        match written {
            Ok(()) => Outcome::Done,
            Err(error) => failed(kind(&error), &error),
        }
    }

    fn write(&mut self, family: Family, text: &str) -> Result<(), Error> {
        let write = || self.tools.restore(family, text);
        match self.tools.backend() {
            Backend::Nft => {
                let transactions = text.lines().filter(|line| *line == "COMMIT").count();
                self.own.during(&mut self.netfilter, transactions, write)
            }
            Backend::Legacy => write(),
        }
    }

    /// Destroys a set that was in use a moment ago. nf_tables lets go of the sets of deleted rules
    /// a little later; a rule of other software does not.
    pub(crate) fn destroy(&mut self, set: Set) -> Outcome {
        let op = Op::Remove(Key::Set(set));
        let mut left = BUSY_ATTEMPTS;
        loop {
            let destroyed = change_set(&mut self.ipset, Change::Destroy(set.name()));
            let outcome = outcome_of_set(&op, destroyed);
            left -= 1;
            match outcome {
                Outcome::Failed(Failure {
                    kind: FailureKind::Busy,
                    ..
                }) if left > 0 => {
                    // What the tools say does not change meanwhile.
                    if left + 1 == BUSY_ATTEMPTS
                        && let Some(outcome) = self.in_use(set)
                    {
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
    pub(crate) fn replace(&mut self, set: Set) -> Outcome {
        if let Some(outcome) = self.in_use(set) {
            return outcome;
        }
        for (table, _) in rules::by_table(&Config::default(), set.family) {
            let outcome = self.apply(&Op::Remove(Key::Rules(set.family, table)));
            if outcome != Outcome::Done {
                return outcome;
            }
        }
        let outcome = match self.destroy(set) {
            Outcome::Done => {
                let op = Op::Add(Key::Set(set), Value::Present);
                outcome_of_set(&op, change_set(&mut self.ipset, create(set)))
            }
            failed => failed,
        };
        match outcome {
            Outcome::Done | Outcome::Started => Outcome::Done,
            // The rules are gone: the kernel is not as it was.
            Outcome::Failed(failure) => failed(FailureKind::Drift, &failure),
        }
    }
}

/// What a host has of a ruleset; nothing where the kernel has no such table.
pub(crate) fn present(tools: &Tools, rules: &Ruleset) -> Result<Present, ReadError> {
    match tools.present(rules) {
        Err(Error::NoTable { .. }) => Ok(Present::default()),
        present => present.map_err(|e| unread(&e)),
    }
}

fn kind(error: &Error) -> FailureKind {
    match error {
        // A person must act.
        Error::Incompatible { .. } | Error::NoTable { .. } | Error::Missing { .. } => {
            FailureKind::Refused
        }
        _ => FailureKind::Busy,
    }
}

/// The lines by which rules differed when they were last read, by their key.
pub(crate) type Differences = BTreeMap<Key, Result<Vec<String>, ReadError>>;
