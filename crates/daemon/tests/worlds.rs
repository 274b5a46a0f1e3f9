//! What `plan` prints for sets of objects is what kube-proxy made of them in a real kernel. tests/worlds/README.md says how the
//! files came to be, what is left out of the comparison and where the two differ on purpose.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use ipvs_proxy::cli::{Cli, Command};
use ipvs_proxy::plan::plan;

/// The worlds that are compared.
const COMPARED: [&str; 4] = ["basic-0", "basic-1", "basic-2", "basic-3"];

/// The other worlds, and what each waits for before it can be compared.
const WAITING: [(&str, &[&str]); 15] = [
    (
        "affinity-2",
        &[
            "ETP Local",
            "ITP Local",
            "LB",
            "externalIPs",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "dual-stack-2",
        &[
            "ETP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "hints",
            "left out",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "etp-local-2",
        &[
            "ETP Local",
            "ITP Local",
            "LB",
            "externalIPs",
            "hints",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "hints-2",
        &[
            "ITP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "hints",
            "left out",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "itp-local-2",
        &[
            "ETP Local",
            "ITP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "lb-ranges-2",
        &[
            "ETP Local",
            "ITP Local",
            "LB",
            "externalIPs",
            "nodePortAddresses",
            "several addresses",
            "source ranges",
            "terminating",
        ],
    ),
    (
        "left-out-2",
        &[
            "ETP Local",
            "ITP Local",
            "SCTP",
            "hints",
            "left out",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "masquerade-2",
        &[
            "ETP Local",
            "ITP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "hints",
            "left out",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "mix-2",
        &[
            "ITP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "hints",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "node-vips-2",
        &[
            "ETP Local",
            "LB",
            "externalIPs",
            "left out",
            "nodePortAddresses",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "nodeport-addresses-2",
        &[
            "ETP Local",
            "LB",
            "externalIPs",
            "left out",
            "nodePortAddresses",
            "several addresses",
            "source ranges",
            "terminating",
        ],
    ),
    (
        "ports-2",
        &[
            "ETP Local",
            "ITP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "terminating",
        ],
    ),
    (
        "protocols-2",
        &[
            "ITP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "several addresses",
            "source ranges",
            "terminating",
        ],
    ),
    (
        "slices-2",
        &[
            "LB",
            "externalIPs",
            "hints",
            "left out",
            "several addresses",
            "terminating",
        ],
    ),
    (
        "terminating-2",
        &[
            "ETP Local",
            "ITP Local",
            "LB",
            "SCTP",
            "externalIPs",
            "hints",
            "left out",
            "several addresses",
            "terminating",
        ],
    ),
];

/// Sets that kube-proxy has not.
const OURS: [&str; 4] = [
    "KUBE-IPVS-SERVING",
    "KUBE-6-IPVS-SERVING",
    "KUBE-IPVS-OWNED",
    "KUBE-6-IPVS-OWNED",
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/worlds")
}

#[test]
fn every_world_is_compared_or_waits_for_something() {
    let files = fs::read_dir(folder()).unwrap().map(Result::unwrap);
    let worlds = files
        .filter(|file| file.path().is_dir())
        .map(|file| file.file_name().into_string().unwrap());
    let known = COMPARED
        .into_iter()
        .chain(WAITING.map(|(name, _)| name))
        .map(str::to_owned);
    assert_eq!(worlds.collect::<BTreeSet<_>>(), known.collect());
    assert!(WAITING.iter().all(|(_, missing)| !missing.is_empty()));
}

#[test]
fn the_worlds_are_kube_proxys() {
    for world in COMPARED {
        for form in ["ipvsadm", "ipset", "addresses"] {
            let text =
                fs::read_to_string(folder().join(world).join(format!("{form}.txt"))).unwrap();
            let (theirs, ours) = (lines(&text), lines(&planned(world, form)));
            assert!(theirs.len() > 5, "{world}, {form}: {theirs:?}");
            let missing: Vec<_> = theirs.difference(&ours).collect();
            let more: Vec<_> = ours.difference(&theirs).collect();
            assert!(
                missing.is_empty() && more.is_empty(),
                "{world}, {form}: missing {missing:#?}, too many {more:#?}"
            );
        }
    }
}

fn planned(world: &str, form: &str) -> String {
    let folder = folder().join(world);
    let manifests = folder.join("manifests.yaml");
    let flags = fs::read_to_string(folder.join("args")).unwrap();
    let words = [
        "ipvs-proxy",
        "plan",
        "-o",
        form,
        "--manifests",
        manifests.to_str().unwrap(),
    ];
    let cli = Cli::try_parse_from(words.into_iter().chain(flags.split_whitespace())).unwrap();
    let Command::Plan(flags) = cli.command else {
        unreachable!("the words above")
    };
    let planned = plan(&flags).unwrap();
    let known = |problem: &String| problem.contains("ports: null names no ports");
    assert!(
        planned.problems.iter().all(known),
        "{world}: {:#?}",
        planned.problems
    );
    planned.text
}

/// The lines that count, without the words that do not.
fn lines(text: &str) -> BTreeSet<String> {
    text.lines().filter_map(counts).collect()
}

fn counts(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split(' ').collect();
    match words.as_slice() {
        ["-A" | "-a", "-f", ..] => None,
        ["create" | "add", set, ..] if OURS.contains(set) => None,
        ["create", set, kind, ..] => {
            let family = words
                .iter()
                .find(|word| word.starts_with("inet"))
                .unwrap_or(&"");
            Some(format!("create {set} {kind} {family}"))
        }
        // Scheduler flags are the last words.
        ["-A", ..] => Some(line.split(" -b ").next().unwrap_or(line).to_owned()),
        _ => Some(line.to_owned()),
    }
}
