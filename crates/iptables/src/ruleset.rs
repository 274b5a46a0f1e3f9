//! The rules, what a host has of them, and the text that makes the two equal.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use ipvs_proxy_netlink::Family;

/// The options of the match and the target that name a set.
const SET_OPTIONS: [&str; 4] = ["--match-set", "--map-set", "--add-set", "--del-set"];

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

/// A table of iptables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// `raw`: before connection tracking.
    Raw,
    /// `mangle`.
    Mangle,
    /// `nat`: sees only the first packet of a flow.
    Nat,
    /// `filter`.
    Filter,
}

impl Table {
    /// All tables that this crate knows.
    pub const ALL: [Table; 4] = [Table::Raw, Table::Mangle, Table::Nat, Table::Filter];

    /// The table's name, as `iptables -t` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Table::Raw => "raw",
            Table::Mangle => "mangle",
            Table::Nat => "nat",
            Table::Filter => "filter",
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The rules of one address family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ruleset {
    /// Whose rules: `iptables` or `ip6tables`.
    pub family: Family,
    /// The tables, each named once.
    pub tables: Vec<TableRules>,
}

/// The rules in one table.
///
/// A rule is what `iptables-save` prints after `-A CHAIN `, in exactly its form
/// (`-m comment --comment "kubernetes service portals" -j KUBE-SERVICES`): rules are compared as
/// text, and one in another form would be written again at every pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRules {
    /// The table.
    pub table: Table,
    /// The chains that are ours as a whole.
    pub chains: Vec<Chain>,
    /// The rules of built-in chains that lead to our chains, in order.
    pub jumps: Vec<Jump>,
}

/// A chain of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Its name, at most 28 bytes.
    pub name: String,
    /// Its rules, in order.
    pub rules: Vec<String>,
}

/// A rule of a built-in chain that goes to one of our chains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jump {
    /// The built-in chain, such as `PREROUTING`.
    pub from: String,
    /// The rule; its target (`-j` or `-g`) is a chain of the same [`TableRules`].
    pub rule: String,
    /// It is misplaced ([`Ruleset::misplaced`]) behind a rule of others that may take a packet from it.
    pub first: bool,
}

/// What a host has of a [`Ruleset`]: the chains of its names, and the rules that go to them.
/// The default is a host that has nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Present(BTreeMap<Table, PresentTable>);

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct PresentTable {
    /// Our chains that exist, each with its rules.
    chains: BTreeMap<String, Vec<String>>,
    /// By built-in chain: its rules that go to a chain of ours, in order.
    jumps: BTreeMap<String, Vec<String>>,
    /// Our chains that someone else's chain goes to, each with the rules that do (`MINE -j OURS`).
    referenced: BTreeMap<String, Vec<String>>,
    /// By built-in chain: the first rule of others that may take a packet from a jump that shall be first.
    before: BTreeMap<String, String>,
}

impl Present {
    /// The rules of our chains and the jumps to them, as `iptables` takes them:
    /// `-t nat -A KUBE-SERVICES -j RETURN`.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (table, present) in &self.0 {
            for (chain, rules) in present.jumps.iter().chain(&present.chains) {
                lines.extend(
                    rules
                        .iter()
                        .map(|rule| format!("-t {table} -A {chain} {rule}")),
                );
            }
        }
        lines
    }

    /// Takes in what comes before our jumps in a table that was read to its end.
    fn note_before(&mut self, table: Option<(&TableRules, Others<'_>)>) {
        let Some((ours, others)) = table else { return };
        let Some(present) = self.0.get_mut(&ours.table) else {
            return;
        };
        for (chain, before) in &others.built_in {
            let first = |jump: &Jump| jump.first && jump.from == *chain;
            let rules = others.rules.get(chain).into_iter().flatten().take(*before);
            if ours.jumps.iter().any(first)
                && let Some(rule) = { rules }
                    .find(|rule| others.take_packets(ours, rule, true, &mut BTreeSet::new()))
            {
                present
                    .before
                    .insert((*chain).to_owned(), (*rule).to_owned());
            }
        }
    }

    /// No chain of the ruleset exists and nothing goes to one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0
            .values()
            .all(|table| table.chains.is_empty() && table.jumps.is_empty())
    }

    /// Our chains that can't be deleted because chains of other software go to them, each with the
    /// rules that do, as `iptables -D` takes them: `MINE -j KUBE-SERVICES`.
    pub fn referenced(&self) -> impl Iterator<Item = (Table, &str, &[String])> {
        self.0.iter().flat_map(|(table, present)| {
            let chains = present.referenced.iter();
            chains.map(|(chain, rules)| (*table, chain.as_str(), rules.as_slice()))
        })
    }
}

/// What others have in a table.
#[derive(Default)]
struct Others<'a> {
    /// The built-in chains, and how many rules of others come before the last jump to ours.
    built_in: BTreeMap<&'a str, usize>,
    /// The rules by chain, but for our chains and the jumps to them.
    rules: BTreeMap<&'a str, Vec<&'a str>>,
}

impl Others<'_> {
    /// Whether a rule, or a chain that it goes to, may take a new connection from the rules behind. One
    /// that refuses it does no harm: what is refused does not depend on who is first. One that only
    /// masquerades does what ours would do at most.
    fn take_packets<'a>(
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

/// Where a host differs from a [`Ruleset`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// A chain of ours does not exist.
    NoChain(Table, String),
    /// A chain of ours has other rules.
    Rules(Table, String),
    /// A built-in chain does not go to our chains by exactly our rules, each once and in order.
    Jumps(Table, String),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::NoChain(table, chain) => {
                write!(f, "chain {chain} of table {table} is missing")
            }
            Difference::Rules(table, chain) => {
                write!(f, "chain {chain} of table {table} has other rules")
            }
            Difference::Jumps(table, chain) => {
                write!(
                    f,
                    "chain {chain} of table {table} has other jumps to our chains"
                )
            }
        }
    }
}

impl Ruleset {
    /// Reads what `iptables-save` prints, of one table or of several. Packet and byte counters,
    /// comments, tables and chains that are not named in the ruleset are skipped.
    #[must_use]
    pub fn present(&self, saved: &str) -> Present {
        let mut present = Present::default();
        let mut current: Option<(&TableRules, Others<'_>)> = None;
        for line in saved.lines() {
            if let Some(name) = line.strip_prefix('*') {
                present.note_before(current.take());
                current = self
                    .tables
                    .iter()
                    .find(|ours| ours.table.name() == name.trim())
                    .map(|ours| (ours, Others::default()));
                continue;
            }
            let Some((ours, others)) = &mut current else {
                continue;
            };
            let table = present.0.entry(ours.table).or_default();
            if let Some(declaration) = line.strip_prefix(':') {
                let mut words = declaration.split_whitespace();
                match (words.next(), words.next()) {
                    (Some(chain), Some("-")) if ours.owns(chain) => {
                        table.chains.entry(chain.to_owned()).or_default();
                    }
                    // A user-defined chain has no policy.
                    (Some(chain), Some(policy)) if policy != "-" => {
                        others.built_in.insert(chain, 0);
                    }
                    (Some(chain), Some(_)) => {
                        others.rules.entry(chain).or_default();
                    }
                    _ => {}
                }
            } else if let Some((chain, rule)) = appended(line) {
                let goes_to_us = target(rule).filter(|target| ours.owns(target));
                if ours.owns(chain) {
                    table
                        .chains
                        .entry(chain.to_owned())
                        .or_default()
                        .push(rule.to_owned());
                } else if let (Some(before), Some(_)) = (others.built_in.get_mut(chain), goes_to_us)
                {
                    *before = others.rules.get(chain).map_or(0, Vec::len);
                    let jumps = table.jumps.entry(chain.to_owned()).or_default();
                    jumps.push(rule.to_owned());
                } else {
                    others.rules.entry(chain).or_default().push(rule);
                    if let Some(target) = goes_to_us {
                        let rules = table.referenced.entry(target.to_owned()).or_default();
                        rules.push(format!("{chain} {rule}"));
                    }
                }
            }
        }
        present.note_before(current);
        present
    }

    /// The first rule in what `iptables-save` prints that names a set and is not in a chain of ours
    /// nor goes to one, with the table's name.
    pub(crate) fn other_rule_of_set(&self, saved: &str, set: &str) -> Option<(String, String)> {
        let mut table = "";
        for line in saved.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name.trim();
            }
            let Some((chain, rule)) = appended(line) else {
                continue;
            };
            let of_ours = self.tables.iter().any(|ours| {
                ours.table.name() == table
                    && (ours.owns(chain) || target(rule).is_some_and(|target| ours.owns(target)))
            });
            let names = words(rule)
                .windows(2)
                .any(|pair| matches!(pair, [option, name] if SET_OPTIONS.contains(option) && *name == set));
            if names && !of_ours {
                return Some((table.to_owned(), format!("-A {chain} {rule}")));
            }
        }
        None
    }

    /// Where the host differs; empty when there is nothing to write.
    ///
    /// Other software's rules before, between and after our jumps are no difference: whoever moved
    /// its own to the front would otherwise be fought for ever. What comes before matters all the same:
    /// [`Ruleset::misplaced`] tells it.
    #[must_use]
    pub fn differences(&self, present: &Present) -> Vec<Difference> {
        let nothing = PresentTable::default();
        self.tables
            .iter()
            .flat_map(|ours| ours.differences(present.0.get(&ours.table).unwrap_or(&nothing)))
            .collect()
    }

    /// The first rule of others in each built-in chain that may take a packet from a jump of ours that shall be
    /// first: `before ours: -t filter -A INPUT -i eth0 -j ACCEPT`. A rule that only refuses,
    /// notes or marks, or is for established connections, is none, nor one that leads to such rules alone.
    #[must_use]
    pub fn misplaced(&self, present: &Present) -> Vec<String> {
        let mut lines = Vec::new();
        for (table, theirs) in &present.0 {
            let line = |(chain, rule)| format!("before ours: -t {table} -A {chain} {rule}");
            lines.extend(theirs.before.iter().map(line));
        }
        lines
    }

    /// Where the host differs, rule by rule: `missing: -t nat -A KUBE-SERVICES -j RETURN`, `added:`
    /// and the rule, or in words where the order of rules differs. Empty when it does not.
    #[must_use]
    pub fn difference_lines(&self, present: &Present) -> Vec<String> {
        let (ours, theirs) = (self.lines(), present.lines());
        let lacks = ours.iter().filter(|line| !theirs.contains(line));
        let more = theirs.iter().filter(|line| !ours.contains(line));
        let lacks = lacks.map(|line| format!("missing: {line}"));
        let lines: Vec<String> = lacks
            .chain(more.map(|line| format!("added: {line}")))
            .collect();
        if !lines.is_empty() {
            return lines;
        }
        let differences = self.differences(present);
        differences.iter().map(ToString::to_string).collect()
    }

    /// The input for `iptables-restore --noflush` that makes the host equal: empty when it is,
    /// else with the tables that differ, each as a whole.
    ///
    /// Our chains are created or emptied, and filled. Where a built-in chain's jumps to our
    /// chains differ or are misplaced, all that exist are deleted, of whatever form, and ours come
    /// first in it.
    #[must_use]
    pub fn restore_text(&self, present: &Present) -> String {
        let nothing = PresentTable::default();
        let mut text = String::new();
        for ours in &self.tables {
            let theirs = present.0.get(&ours.table).unwrap_or(&nothing);
            if !ours.differences(theirs).is_empty() || !theirs.before.is_empty() {
                ours.write_restore(theirs, &mut text);
            }
        }
        text
    }

    /// The input for `iptables-restore --noflush` that removes the ruleset from the host: the
    /// jumps to our chains, and the chains with their rules. Empty when there is nothing to remove.
    ///
    /// A chain that other software's chain goes to can't be deleted; it stays, empty
    /// ([`Present::referenced`]).
    #[must_use]
    pub fn removal_text(&self, present: &Present) -> String {
        let mut text = String::new();
        for (table, theirs) in &present.0 {
            let stays = |chain: &str| theirs.referenced.contains_key(chain);
            let chains = theirs.chains.iter();
            let chains: Vec<&str> = chains
                .filter(|(chain, rules)| !rules.is_empty() || !stays(chain))
                .map(|(chain, _)| chain.as_str())
                .collect();
            if chains.is_empty() && theirs.jumps.is_empty() {
                continue;
            }
            line(&mut text, format_args!("*{table}"));
            for chain in &chains {
                line(&mut text, format_args!(":{chain} - [0:0]"));
            }
            for (from, rules) in &theirs.jumps {
                for rule in rules {
                    line(&mut text, format_args!("-D {from} {rule}"));
                }
            }
            for chain in chains.into_iter().filter(|chain| !stays(chain)) {
                line(&mut text, format_args!("-X {chain}"));
            }
            line(&mut text, format_args!("COMMIT"));
        }
        text
    }

    /// The rules as [`Present::lines`] gives those of a host.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for TableRules {
            table,
            chains,
            jumps,
        } in &self.tables
        {
            lines.extend(
                jumps
                    .iter()
                    .map(|j| format!("-t {table} -A {} {}", j.from, j.rule)),
            );
            for chain in chains {
                let line = |rule| format!("-t {table} -A {} {rule}", chain.name);
                lines.extend(chain.rules.iter().map(line));
            }
        }
        lines
    }

    /// The ruleset in the form of `iptables-save`, for reading. The built-in chains' own lines are
    /// left out, since their policies are not ours.
    #[must_use]
    pub fn save_text(&self) -> String {
        let mut text = String::new();
        for ours in &self.tables {
            line(&mut text, format_args!("*{}", ours.table));
            ours.write_declarations(&mut text);
            for jump in &ours.jumps {
                line(&mut text, format_args!("-A {} {}", jump.from, jump.rule));
            }
            ours.write_rules(&mut text);
            line(&mut text, format_args!("COMMIT"));
        }
        text
    }
}

impl TableRules {
    fn owns(&self, chain: &str) -> bool {
        self.chains.iter().any(|ours| ours.name == chain)
    }

    fn differences(&self, theirs: &PresentTable) -> Vec<Difference> {
        let mut differences = Vec::new();
        for chain in &self.chains {
            match theirs.chains.get(&chain.name) {
                None => differences.push(Difference::NoChain(self.table, chain.name.clone())),
                Some(rules) if *rules != chain.rules => {
                    differences.push(Difference::Rules(self.table, chain.name.clone()));
                }
                Some(_) => {}
            }
        }
        for from in self.jump_chains(theirs) {
            if !self.jumps_match(from, theirs) {
                differences.push(Difference::Jumps(self.table, from.to_owned()));
            }
        }
        differences
    }

    /// The built-in chains that go, or must go, to our chains.
    fn jump_chains<'a>(&'a self, theirs: &'a PresentTable) -> BTreeSet<&'a str> {
        let ours = self.jumps.iter().map(|jump| jump.from.as_str());
        ours.chain(theirs.jumps.keys().map(String::as_str))
            .collect()
    }

    fn jumps_match(&self, from: &str, theirs: &PresentTable) -> bool {
        let theirs = theirs.jumps.get(from).into_iter().flatten();
        self.jumps_from(from).eq(theirs.map(String::as_str))
    }

    fn jumps_from(&self, from: &str) -> impl DoubleEndedIterator<Item = &str> {
        self.jumps
            .iter()
            .filter(move |jump| jump.from == from)
            .map(|jump| jump.rule.as_str())
    }

    fn write_restore(&self, theirs: &PresentTable, text: &mut String) {
        line(text, format_args!("*{}", self.table));
        self.write_declarations(text);
        self.write_rules(text);
        for from in self.jump_chains(theirs) {
            if self.jumps_match(from, theirs) && !theirs.before.contains_key(from) {
                continue;
            }
            for rule in theirs.jumps.get(from).into_iter().flatten() {
                line(text, format_args!("-D {from} {rule}"));
            }
            // Each goes to the front, so the first in order comes last.
            for rule in self.jumps_from(from).rev() {
                line(text, format_args!("-I {from} 1 {rule}"));
            }
        }
        line(text, format_args!("COMMIT"));
    }

    /// With `--noflush`, declaring a chain creates it or empties it.
    fn write_declarations(&self, text: &mut String) {
        for chain in &self.chains {
            line(text, format_args!(":{} - [0:0]", chain.name));
        }
    }

    fn write_rules(&self, text: &mut String) {
        for chain in &self.chains {
            for rule in &chain.rules {
                line(text, format_args!("-A {} {rule}", chain.name));
            }
        }
    }
}

fn line(text: &mut String, content: fmt::Arguments<'_>) {
    // Writing to a String can't fail.
    let _ = writeln!(text, "{content}");
}

/// Chain and rule of an `-A` line, with or without counters (`[12:3456] -A CHAIN rule`).
fn appended(line: &str) -> Option<(&str, &str)> {
    let line = match line.strip_prefix('[') {
        Some(counted) => counted.split_once("] ")?.1,
        None => line,
    };
    let rest = line.strip_prefix("-A ")?;
    // A rule without matches and target is possible, and counts only.
    let (chain, rule) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((chain, rule.trim_end()))
}

/// The chain or target that a rule jumps (`-j`) or goes (`-g`) to.
fn target(rule: &str) -> Option<&str> {
    let mut words = words(rule).into_iter();
    let mut previous = "";
    while let Some(word) = words.next() {
        // A comment may be the bare word "-j".
        if matches!(word, "-j" | "-g") && previous != "--comment" {
            return words.next();
        }
        previous = word;
    }
    None
}

/// Splits at blanks outside double quotes; quotes and backslashes stay in the words.
fn words(rule: &str) -> Vec<&str> {
    let (mut quoted, mut escaped) = (false, false);
    rule.split(|c: char| {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == '"' {
            quoted = !quoted;
        }
        c == ' ' && !quoted
    })
    .filter(|word| !word.is_empty())
    .collect()
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn rules() -> Ruleset {
        let chain = |name: &str, rules: &[&str]| Chain {
            name: name.into(),
            rules: rules.iter().map(|rule| (*rule).into()).collect(),
        };
        let jump = |from: &str, rule: &str| Jump {
            from: from.into(),
            rule: rule.into(),
            first: from != "FORWARD",
        };
        Ruleset {
            family: Family::V4,
            tables: vec![
                TableRules {
                    table: Table::Nat,
                    chains: vec![
                        chain(
                            "KUBE-SERVICES",
                            &["-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT"],
                        ),
                        chain("KUBE-NODE-PORT", &[]),
                    ],
                    jumps: vec![jump(
                        "PREROUTING",
                        "-m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
                    )],
                },
                TableRules {
                    table: Table::Filter,
                    chains: vec![
                        chain("KUBE-A", &["-j DROP"]),
                        chain("KUBE-B", &["-j RETURN"]),
                    ],
                    jumps: vec![
                        jump("INPUT", "-j KUBE-A"),
                        jump("INPUT", "-j KUBE-B"),
                        jump("FORWARD", "-g KUBE-B"),
                    ],
                },
            ],
        }
    }

    /// What a host with other software's rules holds once ours are in.
    const COMPLETE: &str = "\
# Generated by iptables-save v1.8.9 on Mon Nov 30 14:20:57 2026
*mangle
:PREROUTING ACCEPT [0:0]
:KUBE-A - [0:0]
-A PREROUTING -j KUBE-A
COMMIT
*nat
:PREROUTING ACCEPT [12:720]
:KUBE-NODE-PORT - [0:0]
:KUBE-SERVICES - [0:0]
[3:180] -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A PREROUTING -j DOCKER
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:CNI - [0:0]
:KUBE-A - [0:0]
:KUBE-B - [0:0]
-A INPUT -j CNI
-A INPUT -j KUBE-A
-A INPUT -p tcp
-A INPUT -j KUBE-B
-A FORWARD -g KUBE-B
-A CNI -j KUBE-B
-A KUBE-A -j DROP
-A KUBE-B -j RETURN
COMMIT
# Completed on Mon Nov 30 14:20:57 2026
";

    #[test]
    fn an_empty_host_gets_everything() {
        expect![[r#"
            *nat
            :KUBE-SERVICES - [0:0]
            :KUBE-NODE-PORT - [0:0]
            -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
            -I PREROUTING 1 -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
            COMMIT
            *filter
            :KUBE-A - [0:0]
            :KUBE-B - [0:0]
            -A KUBE-A -j DROP
            -A KUBE-B -j RETURN
            -I FORWARD 1 -g KUBE-B
            -I INPUT 1 -j KUBE-B
            -I INPUT 1 -j KUBE-A
            COMMIT
        "#]]
        .assert_eq(&rules().restore_text(&Present::default()));
        assert!(Present::default().is_empty());
    }

    #[test]
    fn a_complete_host_gets_nothing() {
        let present = rules().present(COMPLETE);
        assert_eq!(rules().differences(&present), []);
        assert_eq!(rules().restore_text(&present), "");
        assert!(!present.is_empty());
    }

    #[test]
    fn only_the_table_that_differs_is_written() {
        let present =
            rules().present(&COMPLETE.replace("-A KUBE-A -j DROP", "-A KUBE-A -j ACCEPT"));
        assert_eq!(
            rules().differences(&present),
            [Difference::Rules(Table::Filter, "KUBE-A".into())]
        );
        expect![[r#"
            *filter
            :KUBE-A - [0:0]
            :KUBE-B - [0:0]
            -A KUBE-A -j DROP
            -A KUBE-B -j RETURN
            COMMIT
        "#]]
        .assert_eq(&rules().restore_text(&present));
    }

    /// What is misplaced when these stand before the jumps, with these chains of others.
    fn misplaced(chain: &str, rule: &str, more: &str) -> Vec<String> {
        let line = format!("-A {chain} {rule}\n");
        let with = |saved: &str, table: &str, line: &str| {
            saved.replace(&format!("*{table}\n"), &format!("*{table}\n{line}"))
        };
        let mut saved = COMPLETE.to_owned();
        let (table, first) = match chain {
            "PREROUTING" => ("nat", "[3:180] -A PREROUTING"),
            "INPUT" => ("filter", "-A INPUT -j CNI"),
            _ => ("filter", "-A FORWARD -g"),
        };
        saved = with(&saved, table, more);
        saved = saved.replacen(first, &format!("{line}{first}"), 1);
        let present = rules().present(&saved);
        assert_eq!(rules().differences(&present), []);
        rules().misplaced(&present)
    }

    #[test]
    fn rules_of_others_before_ours_are_told() {
        let allow = ":ALLOW - [0:0]\n-A ALLOW -p tcp -m tcp --dport 22 -j ACCEPT\n";
        let refuse = ":ALLOW - [0:0]\n-A ALLOW -j REJECT\n-A ALLOW -j RETURN\n";
        let nested = ":ALLOW - [0:0]\n:B - [0:0]\n-A ALLOW -j B\n-A B -j ALLOW\n-A B -j RETURN\n";
        for (chain, rule, more) in [
            ("INPUT", "-i cbr0 -j ACCEPT", ""),
            ("INPUT", "-j RETURN", ""),
            (
                "INPUT",
                "-m conntrack --ctstate NEW,ESTABLISHED -j ACCEPT",
                "",
            ),
            (
                "INPUT",
                "-m conntrack ! --ctstate ESTABLISHED -j ACCEPT",
                "",
            ),
            ("INPUT", "-m comment --comment \"-j DROP\" -j ACCEPT", ""),
            ("INPUT", "-j ALLOW", allow),
            ("INPUT", "-g ALLOW", refuse),
            ("INPUT", "-j NFQUEUE --queue-num 1", ""),
            (
                "PREROUTING",
                "-p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.1:80",
                "",
            ),
        ] {
            let told = misplaced(chain, rule, more);
            let table = if chain == "INPUT" { "filter" } else { "nat" };
            let expected = format!("before ours: -t {table} -A {chain} {rule}");
            assert_eq!(told, [expected], "{more}");
        }
        for (chain, rule, more) in [
            ("INPUT", "-s 192.0.2.1/32 -j DROP", ""),
            (
                "INPUT",
                "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
                "",
            ),
            ("INPUT", "-j LOG --log-prefix \"-j ACCEPT\"", ""),
            ("INPUT", "-p tcp", ""),
            ("INPUT", "-j ALLOW", refuse),
            ("INPUT", "-j ALLOW", nested),
            ("INPUT", "-j ALLOW", ":ALLOW - [0:0]\n"),
            ("FORWARD", "-j ACCEPT", ""),
        ] {
            assert_eq!(
                misplaced(chain, rule, more),
                [""; 0],
                "{chain} {rule} {more}"
            );
        }
    }

    #[test]
    fn misplaced_jumps_come_first_again() {
        let saved = COMPLETE.replace("-A INPUT -p tcp\n", "-A INPUT -i cbr0 -j ACCEPT\n");
        let present = rules().present(&saved);
        // Between two of ours is before the second.
        let told = "before ours: -t filter -A INPUT -i cbr0 -j ACCEPT";
        assert_eq!(rules().misplaced(&present), [told]);
        assert_eq!(rules().differences(&present), []);
        expect![[r#"
            *filter
            :KUBE-A - [0:0]
            :KUBE-B - [0:0]
            -A KUBE-A -j DROP
            -A KUBE-B -j RETURN
            -D INPUT -j KUBE-A
            -D INPUT -j KUBE-B
            -I INPUT 1 -j KUBE-B
            -I INPUT 1 -j KUBE-A
            COMMIT
        "#]]
        .assert_eq(&rules().restore_text(&present));
        let behind = saved.replace("-A INPUT -i cbr0 -j ACCEPT\n", "").replace(
            "-A INPUT -j KUBE-B\n",
            "-A INPUT -j KUBE-B\n-A INPUT -i cbr0 -j ACCEPT\n",
        );
        assert_eq!(rules().restore_text(&rules().present(&behind)), "");
    }

    #[test]
    fn duplicates_and_older_variants_of_jumps_go() {
        let saved = COMPLETE
            .replace(
                "-A INPUT -p tcp\n",
                "-A INPUT -m comment --comment old -j KUBE-A\n",
            )
            .replace(
                "-A FORWARD -g KUBE-B\n",
                "-A FORWARD -g KUBE-B\n-A FORWARD -g KUBE-B\n",
            )
            .replace(":CNI", ":OUTPUT ACCEPT [0:0]\n:CNI")
            .replace("-A CNI", "-A OUTPUT -j KUBE-A\n-A CNI");
        let present = rules().present(&saved);
        assert_eq!(
            rules().differences(&present),
            [
                Difference::Jumps(Table::Filter, "FORWARD".into()),
                Difference::Jumps(Table::Filter, "INPUT".into()),
                Difference::Jumps(Table::Filter, "OUTPUT".into()),
            ]
        );
        expect![[r#"
            *filter
            :KUBE-A - [0:0]
            :KUBE-B - [0:0]
            -A KUBE-A -j DROP
            -A KUBE-B -j RETURN
            -D FORWARD -g KUBE-B
            -D FORWARD -g KUBE-B
            -I FORWARD 1 -g KUBE-B
            -D INPUT -j KUBE-A
            -D INPUT -m comment --comment old -j KUBE-A
            -D INPUT -j KUBE-B
            -I INPUT 1 -j KUBE-B
            -I INPUT 1 -j KUBE-A
            -D OUTPUT -j KUBE-A
            COMMIT
        "#]]
        .assert_eq(&rules().restore_text(&present));
    }

    #[test]
    fn a_missing_chain_is_a_difference() {
        let saved = COMPLETE.replace(":KUBE-NODE-PORT - [0:0]\n", "");
        assert_eq!(
            rules().differences(&rules().present(&saved)),
            [Difference::NoChain(Table::Nat, "KUBE-NODE-PORT".into())]
        );
    }

    #[test]
    fn removal_keeps_what_others_go_to() {
        expect![[r#"
            *nat
            :KUBE-NODE-PORT - [0:0]
            :KUBE-SERVICES - [0:0]
            -D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
            -X KUBE-NODE-PORT
            -X KUBE-SERVICES
            COMMIT
            *filter
            :KUBE-A - [0:0]
            :KUBE-B - [0:0]
            -D FORWARD -g KUBE-B
            -D INPUT -j KUBE-A
            -D INPUT -j KUBE-B
            -X KUBE-A
            COMMIT
        "#]]
        .assert_eq(&rules().removal_text(&rules().present(COMPLETE)));
        assert_eq!(rules().removal_text(&Present::default()), "");
    }

    #[test]
    fn targets_are_told_from_comments() {
        assert_eq!(
            target("-m comment --comment \"x -j KUBE-A\" -j DROP"),
            Some("DROP")
        );
        assert_eq!(
            target("-m comment --comment \"a \\\" -j KUBE-A\" -g KUBE-B"),
            Some("KUBE-B")
        );
        assert_eq!(target("-m comment --comment -j -j KUBE-A"), Some("KUBE-A"));
        assert_eq!(target("-j LOG --log-prefix \"-j KUBE-A\""), Some("LOG"));
        assert_eq!(target("-p tcp"), None);
        assert_eq!(target("-j"), None);
    }

    #[test]
    fn odd_input_is_skipped() {
        let odd = "*\n:\n:X\n-A\n-A \n[1:2 -A X\n[] -A KUBE-A\n*filter\n:\n:KUBE-A\n-A KUBE-A\n";
        let present = rules().present(odd);
        assert_eq!(
            rules().removal_text(&present),
            "*filter\n:KUBE-A - [0:0]\n-X KUBE-A\nCOMMIT\n"
        );
    }

    #[test]
    fn saved_form() {
        expect![[r#"
            *nat
            :KUBE-SERVICES - [0:0]
            :KUBE-NODE-PORT - [0:0]
            -A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
            -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
            COMMIT
            *filter
            :KUBE-A - [0:0]
            :KUBE-B - [0:0]
            -A INPUT -j KUBE-A
            -A INPUT -j KUBE-B
            -A FORWARD -g KUBE-B
            -A KUBE-A -j DROP
            -A KUBE-B -j RETURN
            COMMIT
        "#]]
        .assert_eq(&rules().save_text());
    }

    #[test]
    fn rules_of_others_that_name_a_set_are_found() {
        let found = |saved: &str| {
            let found = rules().other_rule_of_set(saved, "MY-SET");
            found.map(|(table, rule)| format!("{table} {rule}"))
        };
        for not in [
            "*nat\n-A KUBE-SERVICES -m set --match-set MY-SET dst -j ACCEPT\n",
            "*filter\n-A INPUT -m set --match-set MY-SET dst -j KUBE-A\n",
            "*nat\n-A INPUT -m set --match-set MY-SET-2 dst -j ACCEPT\n",
            "*nat\n-A INPUT -m comment --comment \"--match-set MY-SET\" -j ACCEPT\n",
            "*nat\n:MY-SET - [0:0]\n-A INPUT -j MY-SET\n",
        ] {
            assert_eq!(found(not), None, "{not}");
        }
        for (saved, expected) in [
            (
                "*nat\n-A A -j B\n*mangle\n[1:2] -A X -m set ! --match-set MY-SET src -j ACCEPT\n",
                "mangle -A X -m set ! --match-set MY-SET src -j ACCEPT",
            ),
            (
                "*raw\n-A X -j SET --add-set MY-SET src --exist\n",
                "raw -A X -j SET --add-set MY-SET src --exist",
            ),
            (
                "*mangle\n-A KUBE-SERVICES -j SET --map-set MY-SET dst --map-mark\n",
                "mangle -A KUBE-SERVICES -j SET --map-set MY-SET dst --map-mark",
            ),
        ] {
            assert_eq!(found(saved).as_deref(), Some(expected));
        }
    }
}
