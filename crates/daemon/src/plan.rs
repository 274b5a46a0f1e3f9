//! `plan`: what given objects need on a given node, without touching a kernel.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ipset_rs::{SetSpec, SetType};
use ipvs_netlink::{RealServer, VirtualServer, VirtualServerKey};
use ipvs_proxy_core::model::{Change, Node};
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_core::state::{Key, State};
use ipvs_proxy_core::state::Value;
use ipvs_proxy_netlink::Family;

use crate::cli::{Output, Plan};
use crate::inspect;
use crate::manifests::{Problem, Source};

/// What `plan` has to say.
#[derive(Debug)]
pub struct Planned {
    /// For stdout.
    pub text: String,
    /// For stderr, one line each.
    pub problems: Vec<String>,
    /// Every manifest could be read, single refused objects aside.
    pub whole: bool,
}

/// Reads the manifests and plans.
///
/// # Errors
/// Where flags contradict each other.
pub fn plan(flags: &Plan) -> Result<Planned, String> {
    let addresses = flags.shape.node_addresses();
    let mut source =
        Source::new(flags.manifests.clone(), &flags.node_name, addresses.is_none());
    let (changes, found) = source.rescan();
    let mut planner = Planner::new(flags.shape.config(&Family::ALL)?);
    if let Some(addresses) = addresses {
        planner.apply(Change::Node(Node { addresses }));
    }
    changes.into_iter().for_each(|change| planner.apply(change));
    let lost = |problem: &Problem| match problem {
        Problem::BadFile { error, .. } => !error.object_only,
        Problem::Unreachable { .. } => true,
        Problem::Refused { .. } | Problem::Twice { .. } => false,
    };
    let whole = !found.iter().any(lost);
    let mut problems: Vec<String> = found.iter().map(ToString::to_string).collect();
    problems.extend(planner.take_conflicts().iter().map(ToString::to_string));
    let state = planner.desired();
    let text = match flags.output {
        Output::Summary => summary(&planner, &state),
        Output::Ipvsadm => inspect::save(&servers(&state), None),
        Output::Ipset => sets(&state),
        Output::Addresses => addresses_of(&state),
    };
    Ok(Planned { text, problems, whole })
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
    for key in state.keys() {
        let Key::Set(set) = key else { continue };
        let name = set.name();
        let spec = SetSpec::new(name, set.kind());
        let _ = match (set.kind(), set.kind().family()) {
            (SetType::BitmapPort, _) => {
                writeln!(text, "create {name} bitmap:port range 0-65535")
            }
            (kind, family) => writeln!(
                text,
                "create {name} {} family {} hashsize {} maxelem {}",
                kind.name(),
                if family == Some(Family::V6) { "inet6" } else { "inet" },
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
