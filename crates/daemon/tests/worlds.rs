//! What `plan` prints for sets of objects is what kube-proxy made of them in a real kernel. tests/worlds/README.md says how the
//! files came to be, what is left out of the comparison and where the two differ on purpose.

// clippy.toml allows it in test functions; what they call is test code as well.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use ipvs_proxy::cli::{Cli, Command};
use ipvs_proxy::plan::plan;

/// What a line may wait for: things that Services can ask for and that are not there yet.
const REASONS: [&str; 1] = ["source ranges"];

/// Sets that kube-proxy has not.
const OURS: [&str; 8] = [
    "KUBE-IPVS-SERVING",
    "KUBE-6-IPVS-SERVING",
    "KUBE-IPVS-OWNED",
    "KUBE-6-IPVS-OWNED",
    "KUBE-IPVS-MARKS",
    "KUBE-6-IPVS-MARKS",
    "KUBE-IPVS-ROUTED",
    "KUBE-6-IPVS-ROUTED",
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/worlds")
}

#[test]
fn the_worlds_are_kube_proxys() {
    let files = fs::read_dir(folder()).unwrap().map(Result::unwrap);
    let worlds: Vec<String> = files
        .filter(|file| file.path().is_dir())
        .map(|file| file.file_name().into_string().unwrap())
        .collect();
    assert_eq!(worlds.len(), 19, "{worlds:?}");
    for world in &worlds {
        let (waits, intended) = (waits(world), intended(world));
        let mut excused: BTreeSet<String> = intended.iter().map(|(_, line)| line.clone()).collect();
        excused.retain(|line| !waits.contains(&format!("+ {line}")));
        assert!(!world.starts_with("basic-") || waits.is_empty(), "{world}");
        for form in ["ipvsadm", "ipset", "addresses"] {
            let text =
                fs::read_to_string(folder().join(world).join(format!("{form}.txt"))).unwrap();
            let (theirs, ours) = (lines(&text), lines(&planned(world, form)));
            assert!(theirs.len() > 5, "{world}, {form}: {theirs:?}");
            let missing = theirs
                .difference(&ours)
                .map(|line| format!("+ {form} {line}"));
            let more = ours
                .difference(&theirs)
                .map(|line| format!("- {form} {line}"));
            let mut differences: BTreeSet<String> = missing.chain(more).collect();
            differences.retain(|line| !excused.contains(&line[2..]));
            for (mark, line) in &intended {
                let have = line
                    .strip_prefix(&format!("{form} "))
                    .is_some_and(|l| ours.contains(l));
                assert!(*mark == '~' || !have, "{world}: we must not have {line}");
            }
            let word = format!(" {form} ");
            let expected: BTreeSet<String> = waits
                .iter()
                .filter(|line| line.contains(&word))
                .cloned()
                .collect();
            let (new, gone) = (&differences - &expected, &expected - &differences);
            assert!(
                new.is_empty() && gone.is_empty(),
                "{world}: differences that wait for nothing {new:#?}, that wait no more {gone:#?}"
            );
        }
    }
}

/// The lines of a world's waits.txt: `+` kube-proxy has the line and we will, `-` we have it and
/// will not; each says what for.
fn waits(world: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(folder().join(world).join("waits.txt")).unwrap_or_default();
    let line = |line: &str| {
        let (line, reason) = line.split_once("  # ").unwrap();
        assert!(REASONS.contains(&reason), "{world}: {reason}");
        line.to_owned()
    };
    text.lines().map(line).collect()
}

/// The lines of a world's intended.txt, which kube-proxy has: `-` we must not, `~` we need not.
fn intended(world: &str) -> BTreeSet<(char, String)> {
    let text = fs::read_to_string(folder().join(world).join("intended.txt")).unwrap_or_default();
    let line = |line: &str| {
        let (line, _) = line.split_once("  # ").unwrap();
        let mark = line.chars().next().unwrap();
        assert!(['-', '~'].contains(&mark), "{world}: {line}");
        (mark, line[2..].to_owned())
    };
    text.lines().map(line).collect()
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
    let known = |problem: &String| {
        [
            "names no ports",
            "is not used",
            "which comes first",
            "is missing",
            "is not supported yet",
            "that the node needs",
        ]
        .iter()
        .any(|words| problem.contains(words))
    };
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
