//! The kernel as a [`Dataplane`]: ops become batches, dumps become the same [`State`].

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipset_rs::{Change, Entry};
use ipvs_netlink::{
    RealServer, RealServerKey, Request, Scheduler, VirtualServer, VirtualServerKey,
};
use ipvs_proxy_core::op::{
    Dataplane, Failure, Finished, Glance, Op, Outcome, ReadError, Reading, StaleFlows,
};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules as core_rules;
use ipvs_proxy_core::state::{Key, Set, State, Value, is_ours};
use ipvs_proxy_iptables::{Choice, Ruleset, Tools};
use ipvs_proxy_netlink::{Family, Socket, Subsystem as NetlinkSubsystem};

use crate::capabilities::{self, Capability};
use crate::families;
use crate::flows::{Flows, Forgotten};
use crate::growth::{self, GROWING};
use crate::links::{self, AddressChange, LinkError, Links};
use crate::modules::{self, Loading};
use crate::notices::OwnRules;
use crate::outcomes::{failed, outcome_of_link, outcome_of_server, outcome_of_set, unread};
use crate::routes::Routes;
use crate::rules::{Differences, Rules, present};
use crate::worker::{Answer, Job, Worker};

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
    routes: Routes,
    flows: Flows,
    tools: Tools,
    own_rules: OwnRules,
    rules: Hands,
    families: Vec<Family>,
    finished: Vec<Finished>,
    /// By which the rules differed that were last read.
    differences: Differences,
    loading: Loading,
}

/// The module of IPVS.
const IP_VS: &str = "ip_vs";

/// Who works on rules.
#[derive(Debug)]
enum Hands {
    /// The calling thread.
    Here(Box<Rules>),
    /// A thread of its own.
    Away(Worker),
}

impl Kernel {
    /// Opens all that is needed. `families` limits what is read.
    ///
    /// # Errors
    /// An error that names what is missing: the module, the tool, the privilege.
    pub fn open(families: &[Family], iptables: Choice) -> Result<Kernel, OpenError> {
        let tools = Tools::find(iptables)?;
        Kernel::open_with(families, tools)
    }

    /// As [`open`](Kernel::open), with tools that may still have to be found.
    ///
    /// # Errors
    /// As there, but for those of the tools.
    pub fn open_with(families: &[Family], tools: Tools) -> Result<Kernel, OpenError> {
        let missing = capabilities::missing();
        if !missing.is_empty() {
            return Err(OpenError::Capabilities(missing));
        }
        let mut ipvs = match ipvs_netlink::Client::open() {
            Err(ipvs_netlink::Error::NoModule) if modules::load(IP_VS).is_ok() => {
                ipvs_netlink::Client::open()
            }
            opened => opened,
        }?;
        // A listing needs CAP_NET_ADMIN as a change does, so a lack of it shows here.
        ipvs.info()?;
        let netfilter = || {
            let open = Socket::open(NetlinkSubsystem::Netfilter);
            open.map_err(links::failed("open nfnetlink"))
        };
        let ipset = ipset_rs::Client::open()?;
        let own_rules = OwnRules::default();
        let rules = Rules {
            tools: tools.clone(),
            own: own_rules.clone(),
            netfilter: netfilter()?,
            ipset: ipset_rs::Client::open()?,
            replaced: None,
        };
        Ok(Kernel {
            ipvs,
            ipset,
            links: Links::open()?,
            routes: Routes::open()?,
            flows: Flows::open().map_err(links::failed("open nfnetlink"))?,
            tools,
            own_rules,
            rules: Hands::Here(Box::new(rules)),
            families: families.to_vec(),
            finished: Vec::new(),
            differences: Differences::new(),
            loading: Loading::default(),
        })
    }

    /// From now on what runs iptables is done on a thread of its own, and nothing else waits for it: ops
    /// that need it are [`Outcome::Started`], and all rules are [unread](Reading::unread) first.
    /// `notify` is called on that thread when [`Dataplane::finished`] has something to tell. Tools that are not found yet
    /// are found there, and `found` is called then; what they [show](Finished::Tools) is told.
    ///
    /// # Errors
    /// If the thread can't be started; nothing can be done with rules then.
    pub fn detach_rules(
        self,
        found: impl FnOnce(&Tools) + Send + 'static,
        notify: impl Fn() + Send + 'static,
    ) -> io::Result<Kernel> {
        let rules = match self.rules {
            Hands::Here(rules) => Hands::Away(Worker::start(*rules, found, notify)?),
            away @ Hands::Away(_) => away,
        };
        Ok(Kernel { rules, ..self })
    }

    /// Waits for tools that are found [on another thread](Kernel::detach_rules), no longer than this: so long the families
    /// are those that work as far as can be known without tools. Whether they were found.
    ///
    /// # Errors
    /// When there are no such tools. One that hangs is none: it is looked for again with each op on rules.
    pub fn await_tools(&mut self, within: Duration) -> Result<bool, OpenError> {
        let end = Instant::now() + within;
        let mut hang = false;
        while let Hands::Away(worker) = &self.rules
            && !hang
            && Instant::now() < end
        {
            for answer in worker.answers() {
                match answer {
                    Answer::Tools(Ok(shown)) => {
                        self.take(Answer::Tools(Ok(shown)));
                        return Ok(true);
                    }
                    Answer::Tools(Err(error)) if error.may_pass() => {
                        tracing::debug!(%error, "tools of iptables hang");
                        hang = true;
                    }
                    Answer::Tools(Err(error)) => return Err(error.into()),
                    other => self.take(other),
                }
            }
            thread::sleep(Duration::from_millis(1));
        }
        if let Some(why) = families::no_ipv6() {
            self.leave_ipv6(&why);
        }
        Ok(false)
    }

    fn leave_ipv6(&mut self, why: &str) {
        if self.families.contains(&Family::V6) {
            self.families.retain(|family| *family != Family::V6);
            tracing::warn!("IPv4 only: {why}");
        }
    }

    /// From now on reads only the families that the node can serve: IPv4, and IPv6 unless it is told why not
    /// ([`families`]).
    #[must_use]
    pub fn keep_working_families(&mut self) -> Option<String> {
        if !self.families.contains(&Family::V6) {
            return None;
        }
        let why = families::no_ipv6_by(&self.tools)?;
        self.families.retain(|family| *family != Family::V6);
        Some(why)
    }

    /// The families that are read.
    #[must_use]
    pub fn families(&self) -> &[Family] {
        &self.families
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
            match (run, run.first().and_then(replaced)) {
                ([op, ..], Some(set)) => outcomes.push(self.work(Job::Replace(op.clone(), set))),
                _ => outcomes.extend(self.change_sets(run)),
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
                (Op::Remove(Key::Set(set)), Err(ipset_rs::Error::Busy)) => {
                    self.work(Job::Destroy(op.clone(), *set))
                }
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
                    Outcome::Done | Outcome::Started => Outcome::Done,
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

    /// Does what runs iptables, or lets it be done.
    fn work(&mut self, job: Job) -> Outcome {
        match &mut self.rules {
            Hands::Here(rules) => match job.run(rules) {
                Answer::Done(_, outcome) => outcome,
                other => {
                    self.take(other);
                    Outcome::Done
                }
            },
            Hands::Away(worker) => {
                worker.give(job);
                Outcome::Started
            }
        }
    }

    /// Takes in what became of a job, for [`Dataplane::finished`] to tell.
    fn take(&mut self, answer: Answer) {
        match answer {
            Answer::Tools(Ok(shown)) => {
                if let Some(why) = shown.no_ipv6 {
                    self.leave_ipv6(&why);
                }
                self.tell(Finished::Tools(self.families.clone(), shown.random_fully));
            }
            // Each job tells it.
            Answer::Tools(Err(_)) => {}
            Answer::Done(op, outcome) => self.tell(Finished::Op(op, outcome)),
            Answer::Read(key, wanted, read) => {
                let (told, misplaced) = match read {
                    Ok(compared) => {
                        let same = compared.differences.is_empty();
                        self.differences.insert(key, Ok(compared.differences));
                        (Ok(same.then_some(Value::Rules(wanted))), compared.misplaced)
                    }
                    Err(error) => {
                        self.differences.insert(key, Err(error.clone()));
                        (Err(error), Vec::new())
                    }
                };
                self.tell(Finished::Read(key, told));
                self.tell_misplaced(key, misplaced);
            }
        }
    }

    fn tell_misplaced(&mut self, key: Key, lines: Vec<String>) {
        if !lines.is_empty() {
            self.tell(Finished::Misplaced(key, lines));
        }
    }

    /// Tells it with the next [`Dataplane::finished`], in the place of what it makes old.
    fn tell(&mut self, news: Finished) {
        self.finished.retain(|told| match (told, &news) {
            (Finished::Read(of, _) | Finished::Misplaced(of, _), Finished::Read(key, _))
            | (Finished::Misplaced(of, _), Finished::Misplaced(key, _)) => of != key,
            _ => true,
        });
        self.finished.push(news);
    }

    fn servers(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let requests: Vec<Request<'_>> = ops.iter().filter_map(request_of).collect();
        let results = self.ipvs.apply(&requests);
        if results.contains(&Err(ipvs_netlink::Error::NoModule)) {
            self.loading.begin(IP_VS);
        }
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

    fn link(&mut self, op: &Op) -> Outcome {
        outcome_of_link(match op {
            Op::Remove(_) => self.links.delete(),
            _ => self.links.create(),
        })
    }

    /// Reads all that is ours, whatever it should be: also rules and sets that are not as they
    /// should be. Of tables whose rules can't be read it tells why, a line each.
    ///
    /// # Errors
    /// If anything else could not be read whole.
    pub fn read_whatever(&mut self) -> Result<(State, Vec<String>), ReadError> {
        let mut state = self.read(&State::new())?.state;
        let mut unread = Vec::new();
        for (key, rules) in self.tables() {
            match present(&self.tools, &rules) {
                Ok(present) if rules.removal_text(&present).is_empty() => {}
                Ok(_) => drop(state.insert(key, Value::Rules(Box::new(rules)))),
                Err(error) => unread.push(format!("{key}: {error}")),
            }
        }
        let names: BTreeSet<_> = self
            .ipset
            .list_headers()
            .map_err(|e| self::unread(&e))?
            .into_iter()
            .map(|set| set.name)
            .collect();
        let ours = self.families.iter().flat_map(|family| Set::all(*family));
        let there = ours.filter(|set| names.contains(&set.name()));
        state.extend(there.map(|set| (Key::Set(set), Value::Present)));
        Ok((state, unread))
    }

    /// The tables of the families, with the chains and jumps that are ours.
    fn tables(&self) -> Vec<(Key, Ruleset)> {
        let tables = self.families.iter().flat_map(|family| {
            let tables = core_rules::by_table(&Config::default(), *family);
            tables.map(|(table, rules)| (Key::Rules(*family, table), rules))
        });
        tables.collect()
    }

    /// The chains of ours that have to stay because rules of other software go to them, a line each
    /// that names these rules. They stay empty. Tables that can't be read are left out.
    #[must_use]
    pub fn held_chains(&self) -> Vec<String> {
        let mut held = Vec::new();
        for (_, rules) in self.tables() {
            let Ok(present) = present(&self.tools, &rules) else {
                continue;
            };
            let command = self.tools.command(rules.family);
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
        held
    }

    /// What was read of IPVS. Where the kernel has none by now, its module is loaded meanwhile.
    fn of_ipvs<T>(&mut self, read: Result<T, ipvs_netlink::Error>) -> Result<T, ReadError> {
        if let Err(ipvs_netlink::Error::NoModule) = read {
            self.loading.begin(IP_VS);
        }
        read.map_err(|e| unread(&e))
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
        state: &mut State,
    ) -> Result<Vec<VirtualServerKey>, ReadError> {
        match self.links.index() {
            Ok(Some(_)) => drop(state.insert(Key::Link, Value::Present)),
            Ok(None) => {}
            Err(LinkError::NotDummy) => drop(state.insert(Key::Link, Value::OddLink)),
            Err(error) => return Err(unread(&error)),
        }
        let (vips, _) = self.links.addresses().map_err(|e| unread(&e))?;
        let ours = vips
            .iter()
            .filter(|vip| self.families.contains(&Family::of(**vip)));
        state.extend(ours.map(|vip| (Key::Address(*vip), Value::Present)));
        for family in self.families.clone() {
            self.routes.read(family, state).map_err(|e| unread(&e))?;
        }
        self.read_sets(state)?;
        let mut servers = Vec::new();
        let servers_there = self.ipvs.virtual_servers();
        for entry in self.of_ipvs(servers_there)? {
            let key = entry.server.key;
            if is_ours(&key, state) {
                servers.push(key);
                state.insert(
                    Key::VirtualServer(key),
                    Value::VirtualServer(Arc::new(entry.server)),
                );
            }
        }
        Ok(servers)
    }
}

/// The virtual servers whose real servers are read in one part, and the real servers after which it ends: some
/// milliseconds.
const PART: usize = 64;
const PART_REAL_SERVERS: usize = 2000;

impl Dataplane for Kernel {
    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(ops.len());
        for run in ops.chunk_by(|a, b| subsystem(a) == subsystem(b)) {
            let Some(first) = run.first() else { continue };
            match subsystem(first) {
                Subsystem::Ipset => outcomes.extend(self.sets(run)),
                Subsystem::Ipvs => outcomes.extend(self.servers(run)),
                Subsystem::Address => outcomes.extend(self.addresses(run)),
                Subsystem::Routes => {
                    outcomes.extend(self.routes.apply(run).into_iter().map(outcome_of_link));
                }
                Subsystem::Rules => {
                    outcomes.extend(run.iter().map(|op| self.work(Job::Rules(op.clone()))));
                }
                Subsystem::Link => outcomes.extend(run.iter().map(|op| self.link(op))),
            }
        }
        outcomes
    }

    fn read_part(&mut self, wanted: &State, reading: &mut Reading) -> Result<bool, ReadError> {
        let Some(todo) = &mut reading.todo else {
            reading.todo = Some(self.read_all_but_real_servers(&mut reading.state)?);
            for (key, value) in wanted {
                let Value::Rules(rules) = value else { continue };
                let Hands::Here(here) = &self.rules else {
                    reading.unread.insert(*key);
                    self.read_rules(*key, rules);
                    continue;
                };
                match here.compare(rules) {
                    Ok(compared) => {
                        if compared.differences.is_empty() {
                            reading.state.insert(*key, value.clone());
                        }
                        self.tell_misplaced(*key, compared.misplaced);
                    }
                    Err(error) => {
                        reading.unread.insert(*key);
                        self.tell(Finished::Read(*key, Err(error)));
                    }
                }
            }
            return Ok(false);
        };
        let (mut servers, mut real_servers) = (0, 0);
        while servers < PART
            && real_servers < PART_REAL_SERVERS
            && let Some(key) = todo.pop()
        {
            let read = self.ipvs.real_servers(key);
            let read = self.of_ipvs(read)?;
            servers += 1;
            real_servers += read.len();
            for real in read {
                let value = Value::of_real_server(&real.server);
                reading
                    .state
                    .insert(Key::RealServer(key, real.server.key), value);
            }
        }
        Ok(todo.is_empty())
    }

    fn finished(&mut self) -> Vec<Finished> {
        if let Hands::Away(worker) = &self.rules {
            let answers = worker.answers();
            answers.into_iter().for_each(|answer| self.take(answer));
        }
        std::mem::take(&mut self.finished)
    }

    fn read_rules(&mut self, key: Key, wanted: &Ruleset) {
        self.work(Job::Read(key, Box::new(wanted.clone())));
    }

    fn glance(&mut self, servers: &[VirtualServerKey]) -> Result<Glance, ReadError> {
        let mut glance = Glance::default();
        let ours = self.families.iter().flat_map(|family| Set::all(*family));
        let ours: BTreeMap<_, Set> = ours.map(|set| (set.name(), set)).collect();
        for header in self.ipset.list_headers().map_err(|e| unread(&e))? {
            if let Some(set) = ours.get(&header.name) {
                // Before Linux 4.7 only the references tell something.
                let numbers = (header.entries.unwrap_or(0), header.references);
                glance.sets.insert(*set, numbers);
            }
        }
        for key in servers {
            let server = self.ipvs.virtual_server(*key);
            if self.of_ipvs(server)?.is_none() {
                glance.missing.insert(*key);
            }
        }
        // Whoever asked last, a change of a virtual server among them.
        glance.module = self.ipvs.family();
        Ok(glance)
    }

    fn rule_differences(&mut self, wanted: &Ruleset) -> Result<Vec<String>, ReadError> {
        if let Hands::Here(rules) = &self.rules {
            return Ok(rules.compare(wanted)?.differences);
        }
        let mut lines = Vec::new();
        for rules in &wanted.tables {
            let key = Key::Rules(wanted.family, rules.table);
            let not_yet = || Err(ReadError(format!("the {key} were not read yet")));
            lines.extend(
                self.differences
                    .get(&key)
                    .cloned()
                    .unwrap_or_else(not_yet)?,
            );
        }
        Ok(lines)
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
    Routes,
    Rules,
    Link,
}

fn subsystem(op: &Op) -> Subsystem {
    match op.key() {
        Key::Set(_) | Key::Entry(..) => Subsystem::Ipset,
        Key::VirtualServer(_) | Key::RealServer(..) => Subsystem::Ipvs,
        Key::Address(_) => Subsystem::Address,
        Key::Route(_) | Key::RoutingRule(..) => Subsystem::Routes,
        Key::Rules(..) => Subsystem::Rules,
        Key::Link => Subsystem::Link,
    }
}

pub(crate) fn change_set(
    ipset: &mut ipset_rs::Client,
    change: Change,
) -> Result<(), ipset_rs::Error> {
    let results = ipset.change(&[change]);
    results
        .into_iter()
        .next()
        .unwrap_or(Err(ipset_rs::Error::Overrun))
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
