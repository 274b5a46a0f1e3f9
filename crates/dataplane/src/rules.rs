//! The iptables rules: read, compared, written, and taken away where a set has to go that they look into.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use ipset_rs::{Change, Entry, SetName, SetSpec};
use ipvs_proxy_core::op::{Failure, FailureKind, Op, Outcome, ReadError};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules;
use ipvs_proxy_core::state::{Key, Role, Set, Value};
use ipvs_proxy_iptables::{Backend, Error, Present, Ruleset, Tools};
use ipvs_proxy_netlink::{Family, Socket};

use crate::kernel::change_set;
use crate::links::Links;
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
    /// The set for which [`REPLACING`] stands, where rules still look into that after a failure.
    pub(crate) replaced: Option<Set>,
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
        match self.tools.backend()? {
            Backend::Nft => {
                let transactions = text.lines().filter(|line| *line == "COMMIT").count();
                self.own.during(&mut self.netfilter, transactions, write)
            }
            Backend::Legacy => write(),
        }
    }

    /// Destroys a set of ours that was in use a moment ago.
    pub(crate) fn destroy(&mut self, set: Set) -> Outcome {
        self.destroy_by_name(set, set.name())
    }

    /// Destroys a set, or what stands for it. nf_tables lets go of the sets of deleted rules a little later; a rule
    /// of other software does not.
    fn destroy_by_name(&mut self, set: Set, name: SetName) -> Outcome {
        let op = Op::Remove(Key::Set(set));
        let mut left = BUSY_ATTEMPTS;
        loop {
            let destroyed = change_set(&mut self.ipset, Change::Destroy(name));
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
    /// it, so they look into a third one meanwhile: there is no moment in which the addresses of the dummy link are
    /// not filtered.
    pub(crate) fn replace(&mut self, set: Set) -> Outcome {
        if let Some(outcome) = self.in_use(set) {
            return outcome;
        }
        let (old, new) = (set.name(), replacing());
        // It is of another set, or of a process before.
        if self.replaced != Some(set)
            && let Err(outcome) = done(self.destroy_by_name(set, new))
        {
            return outcome;
        }
        self.replaced = Some(set);
        let done = self.fill(set, new).and_then(|()| {
            self.look_into(set.family, old, new)?;
            done(self.destroy(set))?;
            self.fill(set, old)?;
            self.look_into(set.family, new, old)
        });
        // Nothing looks into it any more, or all of it is tried again.
        match self.destroy_by_name(set, new) {
            Outcome::Failed(error) => {
                tracing::warn!(set = REPLACING, %error, "a temporary set could not be removed");
            }
            _ => self.replaced = None,
        }
        match done {
            Ok(()) => Outcome::Done,
            Err(outcome) => outcome,
        }
    }

    /// Makes a set of this name, with the entries that are known: of a set of ours with other options those
    /// that it has, else the addresses of the dummy link, where the set holds these.
    fn fill(&mut self, set: Set, name: SetName) -> Result<(), Outcome> {
        let op = Op::Add(Key::Set(set), Value::Present);
        let entries = match [replacing(), set.name()].map(|from| self.ipset.list(&from)) {
            [Ok((_, entries)), _] => entries,
            [_, Ok((there, entries))] if there.kind == Some(set.kind()) => entries,
            _ if set.role == Role::IpvsIps => {
                let addresses = Links::open().and_then(|mut links| links.addresses());
                let (vips, _) = addresses.map_err(|e| failed(FailureKind::Busy, &e))?;
                let ours = vips
                    .into_iter()
                    .filter(|vip| Family::of(*vip) == set.family);
                ours.map(Entry::Ip).collect()
            }
            _ => Vec::new(),
        };
        let mut changes = vec![Change::Create(SetSpec::new(name, set.kind()))];
        changes.extend(entries.into_iter().map(|entry| Change::Add(name, entry)));
        let results = self.ipset.change(&changes);
        let made: Result<(), ipset_rs::Error> = results.into_iter().collect();
        done(outcome_of_set(&op, made))
    }

    /// Makes the rules of a family look into one set instead of another.
    fn look_into(&mut self, family: Family, from: SetName, to: SetName) -> Result<(), Outcome> {
        for (_, rules) in rules::by_table(&Config::default(), family) {
            let written = match self.tools.present(&rules) {
                // It has no rules of ours, or the set can't be destroyed, which says so.
                Err(Error::NoTable { .. } | Error::Incompatible { .. }) => Ok(()),
                Err(error) => Err(error),
                Ok(present) => {
                    let text = rules.other_set_text(&present, from.as_str(), to.as_str());
                    self.write(family, &text)
                }
            };
            written.map_err(|error| failed(kind(&error), &error))?;
        }
        Ok(())
    }
}

fn done(outcome: Outcome) -> Result<(), Outcome> {
    match outcome {
        Outcome::Done => Ok(()),
        outcome => Err(outcome),
    }
}

/// The set that rules look into while another one is replaced, and after a crash in that moment.
pub(crate) const REPLACING: &str = "KUBE-IPVS-REPLACING";

pub(crate) fn replacing() -> SetName {
    REPLACING.parse().expect("the constant is a set name")
}

/// What a host has of a ruleset; nothing where the kernel has no such table.
pub(crate) fn present(tools: &Tools, rules: &Ruleset) -> Result<Present, ReadError> {
    match tools.present(rules) {
        Err(Error::NoTable { .. }) => Ok(Present::default()),
        present => present.map_err(|e| unread(&e)),
    }
}

pub(crate) fn kind(error: &Error) -> FailureKind {
    match error {
        Error::Incompatible { .. } | Error::NoTable { .. } | Error::Missing { .. } => {
            FailureKind::Node
        }
        _ => FailureKind::Busy,
    }
}

/// The lines by which rules differed when they were last read, by their key.
pub(crate) type Differences = BTreeMap<Key, Result<Vec<String>, ReadError>>;
