//! The tools: which back end a host uses, and running `iptables-save` and `iptables-restore`.

use std::fmt;
use std::io;
use std::process::Output;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ipvs_proxy_netlink::Family;

use crate::program::{self, Stop, which};
use crate::{Present, Ruleset, Table};

/// How long `iptables-restore` waits for another writer, in seconds (`--wait`).
const LOCK_WAIT_S: &str = "5";

/// How long the tools may take before they are killed. A restore may wait for another writer first.
const RESTORE_TIME: Duration = Duration::from_secs(15);
const SAVE_TIME: Duration = Duration::from_secs(10);
const PROBE_TIME: Duration = Duration::from_secs(5);
const VERSION_TIME: Duration = Duration::from_secs(3);

/// What the tools say of a table that the kernel has not: `ENOENT` and `EAFNOSUPPORT` of libiptc.
const NO_TABLE: [&str; 2] = [
    "Table does not exist",
    "Address family not supported by protocol",
];

/// Chains by which kubelet tells what the host's iptables use (table `mangle`); the second is what
/// releases before 1.24 had.
const KUBELET_CHAINS: [&str; 2] = [":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY "];

/// The kernel interface that an iptables writes to. Each has its own tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backend {
    /// `iptables-nft`: nf_tables.
    Nft,
    /// `iptables-legacy`: xtables.
    Legacy,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Nft => "nft",
            Backend::Legacy => "legacy",
        })
    }
}

/// Which back end to use. From text: `auto`, `nft`, `legacy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// What the host already uses.
    #[default]
    Auto,
    /// nf_tables.
    Nft,
    /// xtables.
    Legacy,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Choice, String> {
        match text {
            "auto" => Ok(Choice::Auto),
            "nft" => Ok(Choice::Nft),
            "legacy" => Ok(Choice::Legacy),
            other => Err(format!(
                "iptables back end {other:?} is not one of auto, nft, legacy"
            )),
        }
    }
}

/// The version of iptables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 1 of 1.8.9.
    pub major: u16,
    /// 8 of 1.8.9.
    pub minor: u16,
    /// 9 of 1.8.9.
    pub patch: u16,
}

impl Version {
    const fn new(major: u16, minor: u16, patch: u16) -> Version {
        Version {
            major,
            minor,
            patch,
        }
    }

    /// `-j MASQUERADE --random-fully` is understood: since 1.6.2.
    #[must_use]
    pub fn has_random_fully(self) -> bool {
        self >= Version::new(1, 6, 2)
    }

    /// `iptables-restore --wait` is understood: since 1.6.2.
    fn has_restore_wait(self) -> bool {
        self >= Version::new(1, 6, 2)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Why the tools did not do it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tool is not installed.
    #[error(
        "{program} is not in PATH, /usr/sbin or /sbin; install the package \"iptables\" \
         (and \"iptables-legacy\" where a distribution has it apart)"
    )]
    Missing {
        /// The tool.
        program: String,
    },
    /// A tool is there but could not be started, or its input not written.
    #[error("{program} could not be run: {cause}")]
    Run {
        /// The tool.
        program: String,
        /// Why.
        cause: io::Error,
    },
    /// A tool took too long. A restore may have changed the tables that it was done with.
    #[error("{program} did not end within {time:?} and was killed")]
    TooLong {
        /// The tool.
        program: String,
        /// How long it had.
        time: Duration,
    },
    /// A tool printed more than any table holds.
    #[error("{program} printed more than {bytes} bytes and was killed")]
    TooMuch {
        /// The tool.
        program: String,
        /// How much it might print.
        bytes: usize,
    },
    /// The tool was not to be waited for any more: this process ends.
    #[error("{program} was killed: this process ends")]
    Stopped {
        /// The tool.
        program: String,
    },
    /// A tool ran and failed; a failed restore has changed nothing in the table that failed.
    #[error("{program}: {status}: {message}{}", input.as_ref().map(|line| format!(", at {line:?}")).unwrap_or_default())]
    Failed {
        /// The tool.
        program: String,
        /// Its exit status: `exit status: 2`.
        status: String,
        /// What it said, on one line.
        message: String,
        /// The line of our input that it blames.
        input: Option<String>,
    },
    /// A table holds rules of nftables that iptables can't show or change.
    #[error("{program} can't read the table: {message}")]
    Incompatible {
        /// The tool.
        program: String,
        /// What it said.
        message: String,
    },
    /// The kernel has no such table, nor the address family, nor a module that has it.
    #[error("{program}: the kernel has no table {table}: {message}")]
    NoTable {
        /// The tool.
        program: String,
        /// The table.
        table: Table,
        /// What the tool said.
        message: String,
    },
    /// A tool hangs that has to be asked which back end the host uses.
    #[error(
        "which back end of iptables the host uses can't be found out: {cause}; \
         give --iptables-backend where that lasts"
    )]
    Undecided {
        /// What it did.
        cause: Box<Error>,
    },
    /// `--version` printed something that is not a version.
    #[error("{program} --version printed {output:?}")]
    Version {
        /// The tool.
        program: String,
        /// What it printed.
        output: String,
    },
}

impl Error {
    /// Whether the tool was killed, so that it shows nothing of the host.
    fn was_killed(&self) -> bool {
        matches!(
            self,
            Error::TooLong { .. } | Error::TooMuch { .. } | Error::Stopped { .. }
        )
    }

    fn undecided(self) -> Error {
        Error::Undecided {
            cause: Box::new(self),
        }
    }

    /// Whether it may pass by itself: a tool hangs.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        self.was_killed() || matches!(self, Error::Undecided { .. })
    }
}

/// The iptables tools of one back end, found when they are first needed ([`Tools::later`]) or before. Clones find them once
/// for all.
#[derive(Debug, Clone)]
pub struct Tools {
    stop: Stop,
    choice: Choice,
    found: Arc<OnceLock<Found>>,
}

#[derive(Debug, Clone, Copy)]
struct Found {
    backend: Backend,
    version: Version,
    /// What stands between `iptables` and `-restore`: `-nft`, `-legacy` or nothing.
    variant: &'static str,
}

impl Tools {
    /// Finds the tools of a back end, or with [`Choice::Auto`] those that the host already uses:
    /// where kubelet keeps its hint chain, else where more rules are, else what plain `iptables`
    /// is, if the kernel can do it, else the other. While a tool hangs that has to be asked for this, none is found: rules of
    /// the other back end would not take effect.
    ///
    /// Only in the last case the kernel is written to: a chain is created and deleted in one
    /// transaction of nf_tables, and xtables is made to have a table `filter`; either may stay, empty.
    /// Nobody's lock is waited for.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] when no iptables of that back end is installed; [`Error::TooLong`] and [`Error::Undecided`] when one
    /// hangs that has to be asked.
    pub fn find(choice: Choice) -> Result<Tools, Error> {
        let tools = Tools::later(choice);
        tools.found()?;
        Ok(tools)
    }

    /// Tools that are [found](Tools::find) by whoever needs them first; until then, each call fails as that does.
    #[must_use]
    pub fn later(choice: Choice) -> Tools {
        Tools {
            stop: Stop::default(),
            choice,
            found: Arc::default(),
        }
    }

    /// Whether they were found already.
    #[must_use]
    pub fn are_found(&self) -> bool {
        self.found.get().is_some()
    }

    fn found(&self) -> Result<Found, Error> {
        if let Some(found) = self.found.get() {
            return Ok(*found);
        }
        let of = |backend| self.of(backend);
        let found = match self.choice {
            Choice::Nft => of(Backend::Nft),
            Choice::Legacy => of(Backend::Legacy),
            Choice::Auto => match (of(Backend::Nft), of(Backend::Legacy)) {
                (Ok(nft), Ok(legacy)) => self.in_use(nft, legacy),
                (Err(error), Ok(_)) | (Ok(_), Err(error)) if error.was_killed() => {
                    Err(error.undecided())
                }
                (Ok(only), Err(_)) | (Err(_), Ok(only)) => Ok(only),
                (Err(Error::Missing { .. }), Err(Error::Missing { .. })) => Err(Error::Missing {
                    program: "iptables-restore".to_owned(),
                }),
                (Err(Error::Missing { .. }), Err(error)) | (Err(error), Err(_)) => Err(error),
            },
        }?;
        // A tool that was killed for it shows nothing.
        if self.stop.is_set() {
            return Err(Error::Stopped {
                program: "iptables".to_owned(),
            });
        }
        Ok(*self.found.get_or_init(|| found))
    }

    /// The tools of one back end, with the same [`Stop`].
    fn only(&self, found: Found) -> Tools {
        Tools {
            stop: self.stop(),
            choice: self.choice,
            found: Arc::new(OnceLock::from(found)),
        }
    }

    fn of(&self, backend: Backend) -> Result<Found, Error> {
        let variant = match backend {
            Backend::Nft => "-nft",
            Backend::Legacy => "-legacy",
        };
        let named = format!("iptables{variant}-restore");
        if which(&named).is_some() {
            let (version, _) = version(&format!("iptables{variant}"), &self.stop)?;
            return Ok(Found {
                backend,
                version,
                variant,
            });
        }
        if which("iptables-restore").is_some() {
            let (version, plain) = version("iptables", &self.stop)?;
            if plain == backend {
                return Ok(Found {
                    backend,
                    version,
                    variant: "",
                });
            }
        }
        Err(Error::Missing { program: named })
    }

    fn in_use(&self, nft: Found, legacy: Found) -> Result<Found, Error> {
        let [of_nft, of_legacy] = [nft, legacy].map(|found| self.only(found));
        let (nft_text, legacy_text) = (of_nft.everything()?, of_legacy.everything()?);
        match backend_in_use(&nft_text, &legacy_text) {
            Some(Backend::Nft) => return Ok(nft),
            Some(Backend::Legacy) => return Ok(legacy),
            None => {}
        }
        let plain = match version("iptables", &self.stop) {
            Ok((_, backend)) => backend,
            Err(error) if error.was_killed() => return Err(error.undecided()),
            Err(_) => Backend::Nft,
        };
        let (first, other) = match plain {
            Backend::Nft => ((nft, of_nft), (legacy, of_legacy)),
            Backend::Legacy => ((legacy, of_legacy), (nft, of_nft)),
        };
        Ok(match first.1.works()? || !other.1.works()? {
            true => first.0,
            false => other.0,
        })
    }

    /// All tables of both families, as far as they can be read. Without `-t` the legacy tool reads
    /// only tables that exist already, and so creates none.
    fn everything(&self) -> Result<String, Error> {
        let mut saved = String::new();
        for family in Family::ALL {
            match self.run(family, "save", &[], None, PROBE_TIME) {
                Ok(output) => saved.push_str(&String::from_utf8_lossy(&output.stdout)),
                Err(error) if error.was_killed() => return Err(error.undecided()),
                Err(_) => {}
            }
        }
        Ok(saved)
    }

    /// The kernel takes rules of this back end. Reading does not tell for nf_tables: where it lacks IPv4
    /// `iptables-nft` prints empty tables. Writing by xtables would have to wait for its lock.
    fn works(&self) -> Result<bool, Error> {
        let probe = "*filter\n:IPVS-PROXY-PROBE - [0:0]\n-X IPVS-PROXY-PROBE\nCOMMIT\n";
        let (action, arguments, input): (_, &[&str], _) = match self.backend() {
            Ok(Backend::Nft) => ("restore", &["--noflush"], Some(probe)),
            _ => ("save", &["-t", "filter"], None),
        };
        match self.run(Family::V4, action, arguments, input, PROBE_TIME) {
            Ok(_) => Ok(true),
            Err(error) if error.was_killed() => Err(error.undecided()),
            Err(_) => Ok(false),
        }
    }

    /// The back end of these tools.
    ///
    /// # Errors
    ///
    /// As [`Tools::find`], where they are not found yet.
    pub fn backend(&self) -> Result<Backend, Error> {
        Ok(self.found()?.backend)
    }

    /// Ends what these tools, and clones of this value, run.
    #[must_use]
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// The version of these tools.
    ///
    /// # Errors
    ///
    /// As [`Tools::backend`].
    pub fn version(&self) -> Result<Version, Error> {
        Ok(self.found()?.version)
    }

    /// What `iptables-save -t TABLE` prints. The legacy tool creates the table when the kernel has
    /// none yet, and may load a module for it.
    ///
    /// # Errors
    ///
    /// [`Error::NoTable`] when the kernel has none, [`Error::Failed`] as the tool says,
    /// [`Error::Incompatible`] when nftables rules in the table hide it.
    pub fn save(&self, family: Family, table: Table) -> Result<String, Error> {
        let saved = self.run(family, "save", &["-t", table.name()], None, SAVE_TIME);
        let output = saved.map_err(|error| match error {
            Error::Failed {
                program, message, ..
            } if NO_TABLE.iter().any(|said| message.contains(said)) => Error::NoTable {
                program,
                table,
                message,
            },
            error => error,
        })?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        match text
            .lines()
            .find(|line| line.contains("is incompatible, use 'nft' tool"))
        {
            Some(message) => Err(Error::Incompatible {
                program: self.program(family, "save"),
                message: message.trim_start_matches(['#', ' ']).to_owned(),
            }),
            None => Ok(text),
        }
    }

    /// What the host has of a ruleset: [`Tools::save`] of each of its tables.
    ///
    /// # Errors
    ///
    /// As [`Tools::save`].
    pub fn present(&self, rules: &Ruleset) -> Result<Present, Error> {
        let saved: Result<String, Error> = rules
            .tables
            .iter()
            .map(|table| self.save(rules.family, table.table))
            .collect();
        Ok(rules.present(&saved?))
    }

    /// The first rule that looks into a set or changes it, in any table of either family and back
    /// end, other than those of a ruleset in this one: `iptables-legacy -t nat -A PREROUTING …`.
    #[must_use]
    pub fn rule_of_set(&self, set: &str, but_for: &Ruleset) -> Option<String> {
        let nothing = Ruleset {
            family: but_for.family,
            tables: Vec::new(),
        };
        let other = self.of(match self.backend().ok()? {
            Backend::Nft => Backend::Legacy,
            Backend::Legacy => Backend::Nft,
        });
        let other = other.ok().map(|found| self.only(found));
        let places = [Some((self, but_for)), other.as_ref().map(|o| (o, &nothing))];
        places.into_iter().flatten().find_map(|(tools, but_for)| {
            Family::ALL.into_iter().find_map(|family| {
                let output = tools.run(family, "save", &[], None, SAVE_TIME).ok()?;
                let saved = String::from_utf8_lossy(&output.stdout);
                let (table, rule) = but_for.other_rule_of_set(&saved, set)?;
                let program = tools.command(family);
                Some(format!("{program} -t {table} {rule}"))
            })
        })
    }

    /// Gives `text` to `iptables-restore --noflush`. Each table in it changes as a whole or not at
    /// all; a table that fails does not undo those before it. Empty text runs nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] with what the tool said and the line of `text` that it blames.
    pub fn restore(&self, family: Family, text: &str) -> Result<(), Error> {
        if text.is_empty() {
            return Ok(());
        }
        let wait: &[&str] = if self.version()?.has_restore_wait() {
            &["--noflush", "--wait", LOCK_WAIT_S]
        } else {
            &["--noflush"]
        };
        self.run(family, "restore", wait, Some(text), RESTORE_TIME)
            .map(drop)
    }

    /// The command by which a person changes single rules: `ip6tables-legacy`.
    #[must_use]
    pub fn command(&self, family: Family) -> String {
        let name = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let variant = self.found.get().map_or("", |found| found.variant);
        format!("{name}{variant}")
    }

    fn program(&self, family: Family, action: &str) -> String {
        format!("{}-{action}", self.command(family))
    }

    fn run(
        &self,
        family: Family,
        action: &str,
        arguments: &[&str],
        input: Option<&str>,
        time: Duration,
    ) -> Result<Output, Error> {
        self.found()?;
        let program = self.program(family, action);
        let output = program::run(&program, arguments, input, time, &self.stop)?;
        if output.status.success() {
            return Ok(output);
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(Error::Failed {
            program,
            status: output.status.to_string(),
            message: message(&stderr),
            input: input.and_then(|text| blamed(&stderr, text)),
        })
    }
}

/// The back end that the printed tables show in use, `None` when they show nothing.
fn backend_in_use(nft: &str, legacy: &str) -> Option<Backend> {
    let hinted = |saved: &str| {
        saved
            .lines()
            .any(|line| KUBELET_CHAINS.iter().any(|chain| line.starts_with(chain)))
    };
    let rules = |saved: &str| saved.lines().filter(|line| line.starts_with("-A ")).count();
    match (hinted(nft), hinted(legacy)) {
        (true, _) => Some(Backend::Nft),
        (false, true) => Some(Backend::Legacy),
        (false, false) => match rules(nft).cmp(&rules(legacy)) {
            std::cmp::Ordering::Greater => Some(Backend::Nft),
            std::cmp::Ordering::Less => Some(Backend::Legacy),
            std::cmp::Ordering::Equal if rules(nft) > 0 => Some(Backend::Nft),
            std::cmp::Ordering::Equal => None,
        },
    }
}

fn version(program: &str, stop: &Stop) -> Result<(Version, Backend), Error> {
    let output = program::run(program, &["--version"], None, VERSION_TIME, stop)?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    parse_version(&text).ok_or(Error::Version {
        program: program.to_owned(),
        output: text,
    })
}

/// Reads `iptables v1.8.9 (nf_tables)`; before 1.8 there was one back end and no brackets.
fn parse_version(text: &str) -> Option<(Version, Backend)> {
    let mut words = text.split_whitespace();
    let mut numbers = words
        .nth(1)?
        .strip_prefix('v')?
        .split('.')
        .map(|n| n.parse().ok());
    let version = Version::new(
        numbers.next()??,
        numbers.next()??,
        numbers.next().unwrap_or(Some(0))?,
    );
    let backend = if words.next() == Some("(nf_tables)") {
        Backend::Nft
    } else {
        Backend::Legacy
    };
    Some((version, backend))
}

/// What a tool said, on one line, without its advice to read the help, at most 300 characters.
fn message(stderr: &str) -> String {
    let lines: Vec<&str> = stderr
        .lines()
        .map(str::trim)
        .filter(|line| {
            !line.is_empty()
                && !line.starts_with("Try `")
                && !line.starts_with("Error occurred at line")
                && !line.starts_with("# Warning:")
        })
        .collect();
    lines
        .join("; ")
        .replace(":; ", ": ")
        .chars()
        .take(300)
        .collect()
}

/// The line of the input that a tool blames: `line 3 failed`, `Error occurred at line: 3`.
fn blamed(stderr: &str, input: &str) -> Option<String> {
    let number: usize = stderr.match_indices("line").find_map(|(at, word)| {
        let rest = stderr
            .get(at + word.len()..)?
            .trim_start_matches([':', ' ']);
        rest.split(|c: char| !c.is_ascii_digit())
            .next()?
            .parse()
            .ok()
    })?;
    input.lines().nth(number.checked_sub(1)?).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let nft = parse_version("iptables v1.8.9 (nf_tables)").expect("a version");
        assert_eq!(nft, (Version::new(1, 8, 9), Backend::Nft));
        let legacy = parse_version("iptables v1.8.9 (legacy)").expect("a version");
        assert_eq!(legacy, (Version::new(1, 8, 9), Backend::Legacy));
        let old = parse_version("iptables v1.6.1").expect("a version");
        assert_eq!(old, (Version::new(1, 6, 1), Backend::Legacy));
        assert!(!old.0.has_random_fully());
        assert!(nft.0.has_random_fully());
        assert_eq!(
            parse_version("iptables v2.0").expect("a version").0,
            Version::new(2, 0, 0)
        );
        for odd in [
            "",
            "iptables",
            "iptables 1.8",
            "iptables v1",
            "iptables v1.x.2",
        ] {
            assert_eq!(parse_version(odd), None, "{odd}");
        }
    }

    #[test]
    fn the_back_end_in_use() {
        let hint = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n";
        let canary = "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n";
        let one = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j DROP\nCOMMIT\n";
        let two = "*filter\n-A INPUT -j DROP\n-A INPUT -j DROP\nCOMMIT\n";
        assert_eq!(backend_in_use(hint, two), Some(Backend::Nft));
        assert_eq!(backend_in_use(two, canary), Some(Backend::Legacy));
        assert_eq!(backend_in_use(one, two), Some(Backend::Legacy));
        assert_eq!(backend_in_use(two, one), Some(Backend::Nft));
        assert_eq!(backend_in_use(one, one), Some(Backend::Nft));
        assert_eq!(backend_in_use("*filter\n:INPUT ACCEPT [0:0]\n", ""), None);
    }

    #[test]
    fn what_the_tools_say() {
        let input = "*filter\n:KX - [0:0]\n-A KX -j NOPE\nCOMMIT\n";
        let legacy = "iptables-restore v1.8.9 (legacy): Couldn't load target `NOPE':No such file \
                      or directory\n\nError occurred at line: 3\nTry `iptables-restore -h' or \
                      'iptables-restore --help' for more information.\n";
        assert_eq!(
            message(legacy),
            "iptables-restore v1.8.9 (legacy): Couldn't load target `NOPE':No such file or directory"
        );
        assert_eq!(blamed(legacy, input).as_deref(), Some("-A KX -j NOPE"));
        let nft = "iptables-nft-restore v1.8.9 (nf_tables): \nline 2: TABLE_ADD failed (Operation \
                   not supported): table filter\nline 3: RULE_APPEND failed (No such file or \
                   directory): rule in chain KX\n";
        assert_eq!(
            message(nft),
            "iptables-nft-restore v1.8.9 (nf_tables): line 2: TABLE_ADD failed (Operation not \
             supported): table filter; line 3: RULE_APPEND failed (No such file or directory): \
             rule in chain KX"
        );
        assert_eq!(blamed(nft, input).as_deref(), Some(":KX - [0:0]"));
        for odd in [
            "",
            "line",
            "line: x",
            "line 0",
            "line 99",
            "line 99999999999999999999999",
        ] {
            assert_eq!(blamed(odd, input), None, "{odd}");
        }
    }

    #[test]
    fn a_missing_tool_names_the_package() {
        let error = version("iptables-of-nowhere", &Stop::default()).expect_err("no such tool");
        assert!(
            error
                .to_string()
                .contains("install the package \"iptables\""),
            "{error}"
        );
    }
}
