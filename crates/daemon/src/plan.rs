//! `plan`: what given objects need on a given node, without touching a kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Instant;

use ipset_rs::{SetSpec, SetType};
use ipvs_netlink::{RealServer, VirtualServer, VirtualServerKey};
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::op::Dataplane as _;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, ROUTING_TABLE, State, Value};
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_netlink::{Causes, Family};
use serde_json::json;

use crate::cli::{Output, Plan, Run};
use crate::config;
use crate::findings::NO_POD_CIDRS;
use crate::inspect;
use crate::manifests::{Problem, Source};
use crate::surroundings::Surroundings;

/// What `plan` has to say.
#[derive(Debug)]
pub struct Planned {
    /// For stdout.
    pub text: String,
    /// For stderr, one line each.
    pub problems: Vec<String>,
    /// Every manifest could be read, single refused objects aside.
    pub whole: bool,
    /// The kernel that it was compared with is not so.
    pub differs: bool,
}

/// Reads the manifests and plans.
///
/// # Errors
/// Where flags contradict each other, or where a kernel to compare with can't be read.
pub fn plan(flags: &Plan) -> Result<Planned, String> {
    let flags_of_run = Run {
        shape: flags.shape.clone(),
        ..Run::default()
    };
    let loaded = config::load(&flags_of_run).map_err(|problems| problems.join("\n"))?;
    let node = loaded.settings.node();
    let mut source = Source::new(flags.manifests.clone(), &flags.node_name, node.is_none());
    let (changes, found) = source.rescan();
    let nowhere = node.is_none() && !flags.diff && has_no_node_for_its_ports(&changes);
    let lost = |problem: &Problem| match problem {
        Problem::BadFile { error, .. } => !error.object_only,
        Problem::Unreachable { .. } => true,
        Problem::Refused { .. } | Problem::Twice { .. } | Problem::Mended { .. } => false,
    };
    let mut whole = !found.iter().any(lost);
    let live = (flags.diff && whole).then(|| Kernel::open(&Family::ALL, flags.iptables_backend));
    let mut live = live
        .transpose()
        .map_err(|error| Causes(&error).to_string())?;
    let mut config = loaded.settings.config;
    let mut problems = loaded.warnings;
    if let Some(kernel) = &mut live {
        let no_ipv6 = kernel.keep_working_families();
        problems.extend(no_ipv6.map(|why| format!("IPv4 only: {why}")));
        config.families = kernel.families().to_vec();
    }
    let mut planner = Planner::new(config);
    if let Some(node) = node {
        planner.apply(Change::Node(node));
    }
    changes.into_iter().for_each(|change| planner.apply(change));
    problems.extend(found.iter().map(ToString::to_string));
    if planner.awaits_pod_cidrs() {
        problems.push(NO_POD_CIDRS.to_owned());
    }
    if nowhere {
        problems.push(format!(
            "no Node {:?} with an address is among the manifests, and --node-ips is not given: node ports are served nowhere",
            flags.node_name
        ));
    }
    if flags.diff && !whole {
        problems
            .push("there is nothing to compare with: not all manifests could be read".to_owned());
        return Err(problems.join("\n"));
    }
    if let Some(kernel) = &mut live
        && flags.shape.node_ips.is_empty()
    {
        let addresses = kernel
            .node_addresses()
            .map_err(|error| Causes(&error).to_string())?;
        planner.apply(Change::NodeAddresses(addresses));
    }
    if live.is_some() {
        let changes = Surroundings::default().look(Instant::now());
        changes.into_iter().for_each(|c| planner.apply(c));
    }
    let state = planner.desired();
    problems.extend(planner.take_conflicts().iter().map(ToString::to_string));
    problems.extend(planner.take_refused().iter().map(ToString::to_string));
    if let Some(kernel) = &mut live {
        let read = kernel
            .read(&State::new())
            .map_err(|error| Causes(&error).to_string())?;
        let mut text = difference(&read.state, &state);
        for value in state.values() {
            let Value::Rules(rules) = value else { continue };
            let present = match kernel.tools().present(rules) {
                Ok(present) => present,
                Err(error) => {
                    whole = false;
                    problems.push(Causes(&error).to_string());
                    continue;
                }
            };
            let tool = tool(rules.family);
            text.push_str(&lines_between(
                &present.lines(),
                &rules.lines(),
                &format!("{tool} "),
            ));
            for line in rules.misplaced(&present) {
                let _ = writeln!(text, "-{tool} {line}");
            }
        }
        return Ok(Planned {
            differs: !text.is_empty(),
            text,
            problems,
            whole,
        });
    }
    let text = match flags.output {
        Output::Summary => summary(&planner, &state),
        Output::Ipvsadm => inspect::save(&servers(&state), None),
        Output::Ipset => sets(&state),
        Output::Addresses => addresses_of(&state),
        Output::Routes => routes_of(&state),
        Output::Iptables => rules(&state),
        Output::Json => json(&state),
    };
    Ok(Planned {
        text,
        problems,
        whole,
        differs: false,
    })
}

/// Whether there are node ports, and nothing that says on which addresses.
fn has_no_node_for_its_ports(changes: &[Change]) -> bool {
    let has_node_port = |change: &Change| match change {
        Change::Service(_, Some(service)) => service.ports.iter().any(|p| p.node_port.is_some()),
        _ => false,
    };
    let is_node =
        |change: &Change| matches!(change, Change::Node(node) if !node.addresses.is_empty());
    changes.iter().any(has_node_port) && !changes.iter().any(is_node)
}

/// The virtual servers of a state, each with its real servers.
fn servers(state: &State) -> Vec<(VirtualServer, Vec<RealServer>)> {
    let mut servers: BTreeMap<VirtualServerKey, (VirtualServer, Vec<RealServer>)> = state
        .iter()
        .filter_map(|(key, value)| match (key, value) {
            (Key::VirtualServer(key), Value::VirtualServer(server)) => {
                Some((*key, ((**server).clone(), Vec::new())))
            }
            _ => None,
        })
        .collect();
    for (key, value) in state {
        if let Key::RealServer(of, key) = key
            && let Some((_, real_servers)) = servers.get_mut(of)
        {
            real_servers.extend(value.real_server(*key));
        }
    }
    servers.into_values().collect()
}

/// The sets in the form of `ipset save`.
fn sets(state: &State) -> String {
    let mut text = String::new();
    for (key, value) in state {
        let Key::Set(set) = key else { continue };
        let name = set.name();
        if *value == Value::OddSet {
            let _ = writeln!(text, "create {name} of another type");
            continue;
        }
        let spec = SetSpec::new(name, set.kind());
        let _ = match (set.kind(), set.kind().family()) {
            (SetType::BitmapPort, _) => {
                writeln!(text, "create {name} bitmap:port range 0-65535")
            }
            (kind, family) => writeln!(
                text,
                "create {name} {} family {} hashsize {} maxelem {}",
                kind.name(),
                if family == Some(Family::V6) {
                    "inet6"
                } else {
                    "inet"
                },
                spec.hash_size,
                spec.max_elements,
            ),
        };
        for key in state.keys() {
            if let Key::Entry(of, entry) = key
                && of == set
            {
                let _ = writeln!(text, "add {name} {entry}");
            }
        }
    }
    text
}

fn addresses_of(state: &State) -> String {
    let mut text = String::new();
    for key in state.keys() {
        if let Key::Address(address) = key {
            let _ = writeln!(text, "{address}/{}", Family::of(*address).host_prefix());
        }
    }
    text
}

/// What is routed to the node by a mark, in the words of `ip`.
fn routes_of(state: &State) -> String {
    let mut text = String::new();
    for key in state.keys() {
        let _ = match key {
            Key::RoutingRule(family, mark) => {
                let ip = if *family == Family::V6 { "ip -6" } else { "ip" };
                writeln!(
                    text,
                    "{ip} rule add fwmark {mark:#x}/{mark:#x} table {ROUTING_TABLE}"
                )
            }
            Key::Route(address) => {
                writeln!(
                    text,
                    "ip route add local {address} dev lo table {ROUTING_TABLE}"
                )
            }
            _ => Ok(()),
        };
    }
    text
}

/// The rules in the form of `iptables-save`, both families.
fn rules(state: &State) -> String {
    let mut text = String::new();
    for value in state.values() {
        if let Value::Rules(rules) = value {
            let tool = tool(rules.family);
            let _ = write!(text, "# {tool}\n{}", rules.save_text());
        }
    }
    text
}

/// What the kernel has and should not have (`-`), and what it lacks (`+`), line by line, rules
/// aside. Real servers that drain are no difference.
fn difference(read: &State, wanted: &State) -> String {
    let lines = |state: &State| -> Vec<String> {
        let mut text = inspect::save(&servers(state), None);
        text.push_str(&sets(state));
        text.push_str(&addresses_of(state));
        text.push_str(&routes_of(state));
        text.lines().map(str::to_owned).collect()
    };
    let mut read = read.clone();
    read.retain(|key, value| wanted.contains_key(key) || *value != Value::RealServer(0));
    lines_between(&lines(&read), &lines(wanted), "")
}

fn lines_between(has: &[String], needs: &[String], prefix: &str) -> String {
    let (has, needs): (BTreeSet<&String>, BTreeSet<&String>) =
        (has.iter().collect(), needs.iter().collect());
    let mut text = String::new();
    for line in has.difference(&needs) {
        let _ = writeln!(text, "-{prefix}{line}");
    }
    for line in needs.difference(&has) {
        let _ = writeln!(text, "+{prefix}{line}");
    }
    text
}

fn tool(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

fn json(state: &State) -> String {
    let servers: Vec<_> = servers(state)
        .iter()
        .map(|(server, real_servers)| {
            let VirtualServerKey::Address {
                address,
                port,
                protocol,
            } = server.key
            else {
                return serde_json::Value::Null;
            };
            let persistence = server.persistence.map(|p| p.timeout_s);
            let real_servers: Vec<_> = real_servers
                .iter()
                .map(|r| json!({"address": r.key.address, "port": r.key.port, "weight": r.weight}))
                .collect();
            json!({
                "address": address,
                "port": port,
                "protocol": protocol.to_string(),
                "scheduler": server.scheduler.name(),
                "schedulerFlags": server.scheduler_flags.bits(),
                "persistenceSeconds": persistence,
                "realServers": real_servers,
            })
        })
        .collect();
    let sets: Vec<_> = state
        .keys()
        .filter_map(|key| {
            let Key::Set(set) = key else { return None };
            let entries: Vec<String> = state
                .keys()
                .filter_map(|key| match key {
                    Key::Entry(of, entry) if of == set => Some(entry.to_string()),
                    _ => None,
                })
                .collect();
            let kind = set.kind().name();
            Some(json!({"name": set.name().as_str(), "type": kind, "entries": entries}))
        })
        .collect();
    let addresses: Vec<String> = addresses_of(state).lines().map(str::to_owned).collect();
    let rules: Vec<String> = rules(state).lines().map(str::to_owned).collect();
    let all = json!({
        "virtualServers": servers,
        "sets": sets,
        "addresses": addresses,
        "iptables": rules,
    });
    format!("{all:#}\n")
}

/// For a person: each virtual server with its Service and real servers, then counts.
fn summary(planner: &Planner, state: &State) -> String {
    let mut text = String::new();
    let servers = servers(state);
    let mut real_servers = 0;
    for (server, reals) in &servers {
        let owner = planner.owner(&Key::VirtualServer(server.key));
        let owner = owner.map_or_else(String::new, ToString::to_string);
        let _ = write!(text, "{owner}: {} {}", server.key, server.scheduler);
        if let Some(persistence) = server.persistence {
            let _ = write!(text, ", persistent {} s", persistence.timeout_s);
        }
        let _ = writeln!(text);
        for real in reals {
            let _ = writeln!(text, "  -> {}", real.key);
        }
        if reals.is_empty() {
            let _ = writeln!(text, "  -> no endpoint: refused");
        }
        real_servers += reals.len();
    }
    let count = |wanted: fn(&Key) -> bool| state.keys().filter(|key| wanted(key)).count();
    let _ = writeln!(
        text,
        "{} virtual servers, {real_servers} real servers, {} set entries, {} addresses",
        servers.len(),
        count(|key| matches!(key, Key::Entry(..))),
        count(|key| matches!(key, Key::Address(_))),
    );
    text
}
