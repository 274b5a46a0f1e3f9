//! The rules, what a host has of them, and the text that makes the two equal.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use ipvs_proxy_netlink::Family;

use self::others::Others;

mod others;

/// The options of the match and the target that name a set.
const SET_OPTIONS: [&str; 4] = ["--match-set", "--map-set", "--add-set", "--del-set"];

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

    /// The input for `iptables-restore --noflush` that makes what the host has of the ruleset look into another set, in
    /// one step for each table. Empty when nothing of it names the set.
    #[must_use]
    pub fn other_set_text(&self, present: &Present, set: &str, other: &str) -> String {
        let renamed = |rule: &String| {
            let mut words = words(rule);
            for n in 1..words.len() {
                if let Some([option, name]) = words.get_mut(n - 1..=n)
                    && SET_OPTIONS.contains(option)
                    && *name == set
                {
                    *name = other;
                }
            }
            words.join(" ")
        };
        let names = |rules: &Vec<String>| rules.iter().any(|rule| renamed(rule) != *rule);
        let mut text = String::new();
        for (table, theirs) in &present.0 {
            let chains: Vec<_> = theirs
                .chains
                .iter()
                .filter(|(_, rules)| names(rules))
                .collect();
            let jumps: Vec<_> = theirs
                .jumps
                .iter()
                .filter(|(_, rules)| names(rules))
                .collect();
            if chains.is_empty() && jumps.is_empty() {
                continue;
            }
            line(&mut text, format_args!("*{table}"));
            for (chain, _) in &chains {
                line(&mut text, format_args!(":{chain} - [0:0]"));
            }
            for (chain, rules) in chains {
                for rule in rules {
                    line(&mut text, format_args!("-A {chain} {}", renamed(rule)));
                }
            }
            for (from, rules) in jumps {
                for rule in rules {
                    line(&mut text, format_args!("-D {from} {rule}"));
                }
                for rule in rules.iter().rev() {
                    line(&mut text, format_args!("-I {from} 1 {}", renamed(rule)));
                }
            }
            line(&mut text, format_args!("COMMIT"));
        }
        text
    }

    /// The sets that these rules name, each as often as they do: so many references to it does the kernel count for them.
    #[must_use]
    pub fn references(&self) -> BTreeMap<&str, u32> {
        let tables = self.tables.iter();
        let chains = tables.clone().flat_map(|table| &table.chains);
        let jumps = tables.flat_map(|table| &table.jumps);
        let rules = chains.flat_map(|chain| &chain.rules);
        let mut references = BTreeMap::new();
        for rule in rules.chain(jumps.map(|jump| &jump.rule)) {
            for pair in words(rule).windows(2) {
                if let [option, name] = pair
                    && SET_OPTIONS.contains(option)
                {
                    *references.entry(*name).or_default() += 1;
                }
            }
        }
        references
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
mod tests;
