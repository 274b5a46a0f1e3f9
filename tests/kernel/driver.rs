//! The planner and the dataplane in a network namespace, driven as the daemon drives them but step by step and with a clock that the
//! test moves; and the kernel as the tools show it, in the same words.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::op::{
    Dataplane, Finished, Glance, Op, Outcome, ReadError, Reading, StaleFlows,
};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, State};
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_iptables::{Choice, Ruleset};
use tests::netns::Namespace;

/// A process: it knows what it was told and what it read.
pub(crate) struct Driver {
    planner: Planner,
    kernel: Plane,
    now: Instant,
}

/// The kernel, whose rules may be taken for granted: reading them starts eight programs.
struct Plane {
    kernel: Kernel,
    rules: bool,
}

impl Dataplane for Plane {
    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        self.kernel.apply(ops)
    }

    fn read_part(&mut self, wanted: &State, reading: &mut Reading) -> Result<bool, ReadError> {
        if self.rules {
            return self.kernel.read_part(wanted, reading);
        }
        let rules = wanted
            .iter()
            .filter(|(key, _)| matches!(key, Key::Rules(..)));
        reading
            .state
            .extend(rules.map(|(key, value)| (*key, value.clone())));
        self.kernel.read_part(&State::new(), reading)
    }

    fn finished(&mut self) -> Vec<Finished> {
        self.kernel.finished()
    }

    fn read_rules(&mut self, key: Key, wanted: &Ruleset) {
        self.kernel.read_rules(key, wanted);
    }

    fn glance(&mut self, servers: &[VirtualServerKey]) -> Result<Glance, ReadError> {
        self.kernel.glance(servers)
    }

    fn rule_differences(&mut self, rules: &Ruleset) -> Result<Vec<String>, ReadError> {
        self.kernel.rule_differences(rules)
    }

    fn connections(
        &mut self,
        of: VirtualServerKey,
    ) -> Result<BTreeMap<RealServerKey, u64>, ReadError> {
        self.kernel.connections(of)
    }

    fn node_addresses(&mut self) -> Result<BTreeSet<IpAddr>, ReadError> {
        self.kernel.node_addresses()
    }

    fn forget_flows(&mut self, stale: &StaleFlows) {
        self.kernel.forget_flows(stale);
        let done = self.kernel.finish_flows(Duration::from_secs(20));
        assert!(done, "UDP flows can't be forgotten");
    }
}

impl Driver {
    /// Starts in the namespace of the calling thread, hears of all objects, and reads the kernel.
    pub(crate) fn start<'a>(
        config: &Config,
        objects: impl IntoIterator<Item = &'a Change>,
    ) -> Driver {
        Driver::with(open(config), true, config, objects)
    }

    /// As [`start`](Self::start), by the sockets of an earlier process. Rules are read, or taken for granted.
    pub(crate) fn with<'a>(
        kernel: Kernel,
        rules: bool,
        config: &Config,
        objects: impl IntoIterator<Item = &'a Change>,
    ) -> Driver {
        let mut this = Driver {
            planner: Planner::new(config.clone()),
            kernel: Plane { kernel, rules },
            now: Instant::now(),
        };
        this.tell(objects);
        this.read();
        this
    }

    /// Ends the process; its sockets.
    pub(crate) fn end(self) -> Kernel {
        self.kernel.kernel
    }

    pub(crate) fn tell<'a>(&mut self, objects: impl IntoIterator<Item = &'a Change>) {
        for object in objects {
            self.planner.apply(object.clone());
        }
    }

    pub(crate) fn read(&mut self) {
        self.planner
            .read_kernel(&mut self.kernel, true, self.now)
            .unwrap();
    }

    /// Carries out that many ops at most; what they were. The last round may be cut short.
    pub(crate) fn some(&mut self, most: usize) -> Vec<Op> {
        let mut done = Vec::new();
        while done.len() < most {
            let mut ops = self.planner.next(self.now);
            if ops.is_empty() {
                break;
            }
            ops.truncate(most - done.len());
            done.extend(ops.iter().cloned());
            let outcomes = self.kernel.apply(&ops);
            self.planner.commit(ops.into_iter().zip(outcomes), self.now);
        }
        done
    }

    /// Works until there is nothing to do, also later; what was done. Nothing may fail.
    pub(crate) fn rest(&mut self) -> Vec<Op> {
        let mut done = Vec::new();
        // What drains is looked at every 3 s.
        for _ in 0..3 {
            done.extend(self.work());
            self.now += Duration::from_secs(5);
        }
        done
    }

    /// As [`rest`](Self::rest), where ops may fail because the kernel is not as this process knows it: it reads it again then.
    pub(crate) fn rest_whatever(&mut self) {
        for _ in 0..10 {
            if self.planner.in_doubt() {
                self.read();
            }
            self.some(usize::MAX);
            self.now += Duration::from_secs(5);
        }
        assert!(!self.planner.in_doubt());
    }

    /// Works until there is nothing to do now; what was done.
    pub(crate) fn work(&mut self) -> Vec<Op> {
        let now = self.now;
        let mut done = Vec::new();
        loop {
            let step = self.planner.step(&mut self.kernel, &|| now);
            for (op, outcome) in step.ops {
                assert_eq!(outcome, Outcome::Done, "{op}");
                done.push(op);
            }
            if step.rests {
                return done;
            }
        }
    }
}

/// Opens what a process needs, in the namespace of the calling thread.
pub(crate) fn open(config: &Config) -> Kernel {
    Kernel::open(&config.families, Choice::Auto).unwrap()
}

/// What a namespace holds, in the words of [`Op`]: each thing, and what there is to say about it.
pub(crate) type Held = BTreeMap<String, String>;

/// Reads IPVS, sets and the dummy link by the tools.
pub(crate) fn held(node: &Namespace) -> Held {
    let mut held = Held::new();
    for line in node.tool("ipvsadm -Sn").lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let server = match words[1] {
            "-t" => format!("{}/tcp", words[2]),
            "-u" => format!("{}/udp", words[2]),
            _ => words[1..3].join(" "),
        };
        match words[0] {
            "-A" => held.insert(format!("virtual server {server}"), words[3..].join(" ")),
            _ => held.insert(
                format!("real server {} of {server}", words[4]),
                words[5..].join(" "),
            ),
        };
    }
    for line in node.tool("ipset save").lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "create" => held.insert(format!("set {}", words[1]), words[2].to_owned()),
            _ => held.insert(
                format!("entry {} of set {}", words[2], words[1]),
                String::new(),
            ),
        };
    }
    for line in node.tool("ip -o addr show").lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words[1] == "kube-ipvs0" {
            let (address, length) = words[3].split_once('/').unwrap();
            held.insert(
                format!("address {address} on kube-ipvs0"),
                length.to_owned(),
            );
        }
    }
    held
}

/// Our rules in a namespace by the tools, without counters: those of a chain in order.
pub(crate) fn rules(node: &Namespace) -> Vec<String> {
    let mut rules = Vec::new();
    for tool in ["iptables-save", "ip6tables-save"] {
        let mut table = String::new();
        for line in node.tool(tool).lines() {
            if line.starts_with('*') {
                line.clone_into(&mut table);
            }
            if line.starts_with("-A") && line.contains("KUBE-") {
                rules.push((tool, table.clone(), line.to_owned()));
            }
        }
    }
    // Which table is the first depends on which was used first.
    rules.sort_by_key(|(tool, table, _)| (*tool, table.clone()));
    let text = rules.into_iter();
    text.map(|(tool, table, rule)| format!("{tool} {table} {rule}"))
        .collect()
}

/// The ops that lead from one to the other, and no more: what the kernel removes along with a virtual server needs none, and a TCP
/// real server drains before it goes. Sorted.
pub(crate) fn least(now: &Held, wanted: &Held) -> Vec<String> {
    let mut ops = Vec::new();
    for (key, value) in wanted {
        match now.get(key) {
            None => ops.push(format!("add {key}")),
            Some(is) if is != value => ops.push(format!("update {key}")),
            Some(_) => {}
        }
    }
    for (key, value) in now.iter().filter(|(key, _)| !wanted.contains_key(*key)) {
        if let Some((_, server)) = key
            .strip_prefix("real server ")
            .and_then(|rest| rest.split_once(" of "))
        {
            if !wanted.contains_key(&format!("virtual server {server}")) {
                continue;
            }
            if server.ends_with("/tcp") && !value.ends_with("-w 0") {
                ops.push(format!("update {key}"));
            }
        }
        ops.push(format!("remove {key}"));
    }
    ops.sort_unstable();
    ops
}

/// The ops without their values. Sorted.
pub(crate) fn words(ops: &[Op]) -> Vec<String> {
    let words = ops.iter().map(|op| {
        let verb = match op {
            Op::Add(..) => "add",
            Op::Update(..) => "update",
            Op::Remove(_) => "remove",
        };
        format!("{verb} {}", op.key())
    });
    let mut words: Vec<String> = words.collect();
    words.sort_unstable();
    words
}
