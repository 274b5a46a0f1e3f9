//! Runs a command where other software has its own virtual servers, sets, rules, links and addresses, in the network namespace
//! of this process, and fails when the command changed any of that, or a sysctl: `unharmed COMMAND...`

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use tests::foreign;
use tests::netns::Namespace;

const CHANGED: u8 = 97;
/// Sysctls that change by themselves, or that are one for all namespaces and set by tests.
const VOLATILE: [&str; 5] = [
    "/net/nf_conntrack_max",
    "/netfilter/nf_conntrack_",
    "/core/rmem_",
    "/netfilter/nf_log",
    "stable_secret",
];

fn main() -> Result<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let program = words.next().context("usage: unharmed COMMAND...")?;
    let here = Namespace::current();
    foreign::make(&here);
    let before = state(&here);
    let status = Command::new(&program)
        .args(words)
        .status()
        .with_context(|| format!("starting {}", program.display()))?;
    let after = state(&here);
    let mut harmed = false;
    for line in before.keys().chain(after.keys()) {
        let (was, is) = (before.get(line), after.get(line));
        // A module that was loaded meanwhile brings its own.
        let came = was.is_none() && line.starts_with("/proc/sys/");
        if was != is && !came {
            harmed = true;
            eprintln!("unharmed: {line}: was {was:?}, is {is:?}");
        }
    }
    Ok(match (harmed, status.code()) {
        (false, Some(code)) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        (false, None) => ExitCode::FAILURE,
        (true, _) => ExitCode::from(CHANGED),
    })
}

/// How often each line is said, and the value of each sysctl.
fn state(here: &Namespace) -> BTreeMap<String, String> {
    let mut state = BTreeMap::new();
    let (mut tool, mut place) = (String::new(), 0_u32);
    for line in foreign::all(here).lines() {
        if line.starts_with('$') {
            (tool, place) = (line.to_owned(), 0);
        }
        place += 1;
        state.insert(format!("{tool}, line {place}"), line.to_owned());
    }
    sysctls(Path::new("/proc/sys/net"), &mut state);
    state
}

fn sysctls(folder: &Path, state: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.to_string_lossy().into_owned();
        if path.is_dir() {
            sysctls(&path, state);
        } else if !VOLATILE.iter().any(|part| name.contains(part)) {
            // Some can be written only.
            state.insert(name, fs::read_to_string(&path).unwrap_or_default());
        }
    }
}
