//! The tools: which back end a host uses, and running `iptables-save` and `iptables-restore`.

use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::str::FromStr;

use ipvs_proxy_netlink::Family;

use crate::{Present, Ruleset, Table};

/// How long `iptables-restore` waits for another writer, in seconds (`--wait`).
const LOCK_WAIT_S: &str = "5";

/// Where the tools are when `PATH` does not say so.
const SYSTEM_FOLDERS: [&str; 2] = ["/usr/sbin", "/sbin"];

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
    #[error("{program} could not be run")]
    Run {
        /// The tool.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
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
    /// `--version` printed something that is not a version.
    #[error("{program} --version printed {output:?}")]
    Version {
        /// The tool.
        program: String,
        /// What it printed.
        output: String,
    },
}

/// The iptables tools of one back end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tools {
    backend: Backend,
    version: Version,
    /// What stands between `iptables` and `-restore`: `-nft`, `-legacy` or nothing.
    variant: &'static str,
}

impl Tools {
    /// Finds the tools of a back end, or with [`Choice::Auto`] those that the host already uses:
    /// where kubelet keeps its hint chain, else where more rules are, else what plain `iptables`
    /// is, if the kernel can do it, else the other.
    ///
    /// Only in the last case the kernel is written to: a chain is created and deleted in one
    /// transaction, which may leave an empty table `filter`.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] when no iptables of that back end is installed.
    pub fn find(choice: Choice) -> Result<Tools, Error> {
        match choice {
            Choice::Nft => Tools::of(Backend::Nft),
            Choice::Legacy => Tools::of(Backend::Legacy),
            Choice::Auto => match (Tools::of(Backend::Nft), Tools::of(Backend::Legacy)) {
                (Ok(nft), Ok(legacy)) => Ok(Tools::in_use(nft, legacy)),
                (Ok(only), Err(_)) | (Err(_), Ok(only)) => Ok(only),
                (Err(_), Err(_)) => Err(Error::Missing {
                    program: "iptables-restore".to_owned(),
                }),
            },
        }
    }

    fn of(backend: Backend) -> Result<Tools, Error> {
        let variant = match backend {
            Backend::Nft => "-nft",
            Backend::Legacy => "-legacy",
        };
        let named = format!("iptables{variant}-restore");
        if which(&named).is_some() {
            let (version, _) = version(&format!("iptables{variant}"))?;
            return Ok(Tools {
                backend,
                version,
                variant,
            });
        }
        if which("iptables-restore").is_some() {
            let (version, plain) = version("iptables")?;
            if plain == backend {
                return Ok(Tools {
                    backend,
                    version,
                    variant: "",
                });
            }
        }
        Err(Error::Missing { program: named })
    }

    fn in_use(nft: Tools, legacy: Tools) -> Tools {
        let (nft_text, legacy_text) = (nft.everything(), legacy.everything());
        let plain = version("iptables").map_or(Backend::Nft, |(_, backend)| backend);
        match backend_in_use(&nft_text, &legacy_text) {
            Some(Backend::Nft) => nft,
            Some(Backend::Legacy) => legacy,
            None if plain == Backend::Nft => {
                if nft.works() || !legacy.works() {
                    nft
                } else {
                    legacy
                }
            }
            None => {
                if legacy.works() || !nft.works() {
                    legacy
                } else {
                    nft
                }
            }
        }
    }

    /// All tables of both families, as far as they can be read. Without `-t` the legacy tool reads
    /// only tables that exist already, and so creates none.
    fn everything(&self) -> String {
        let saved = Family::ALL.map(|family| {
            self.run(family, "save", &[], None)
                .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
                .unwrap_or_default()
        });
        saved.concat()
    }

    /// The kernel takes rules of this back end. Reading does not tell: without nf_tables for IPv4
    /// `iptables-nft` prints empty tables.
    fn works(&self) -> bool {
        let probe = "*filter\n:IPVS-PROXY-PROBE - [0:0]\n-X IPVS-PROXY-PROBE\nCOMMIT\n";
        self.restore(Family::V4, probe).is_ok()
    }

    /// The back end of these tools.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// The version of these tools.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// What `iptables-save -t TABLE` prints. The legacy tool creates the table when the kernel has
    /// none yet, and may load a module for it.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] as the tool says, [`Error::Incompatible`] when nftables rules in the
    /// table hide it.
    pub fn save(&self, family: Family, table: Table) -> Result<String, Error> {
        let output = self.run(family, "save", &["-t", table.name()], None)?;
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
        let other = Tools::of(match self.backend {
            Backend::Nft => Backend::Legacy,
            Backend::Legacy => Backend::Nft,
        })
        .ok();
        let places = [Some((self, but_for)), other.as_ref().map(|o| (o, &nothing))];
        places.into_iter().flatten().find_map(|(tools, but_for)| {
            Family::ALL.into_iter().find_map(|family| {
                let output = tools.run(family, "save", &[], None).ok()?;
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
        let wait: &[&str] = if self.version.has_restore_wait() {
            &["--noflush", "--wait", LOCK_WAIT_S]
        } else {
            &["--noflush"]
        };
        self.run(family, "restore", wait, Some(text)).map(drop)
    }

    /// The command by which a person changes single rules: `ip6tables-legacy`.
    #[must_use]
    pub fn command(&self, family: Family) -> String {
        let name = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        format!("{name}{}", self.variant)
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
    ) -> Result<Output, Error> {
        let program = self.program(family, action);
        let output = run(&program, arguments, input)?;
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

fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_FOLDERS.iter().map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

fn version(program: &str) -> Result<(Version, Backend), Error> {
    let output = run(program, &["--version"], None)?;
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

fn run(program: &str, arguments: &[&str], input: Option<&str>) -> Result<Output, Error> {
    let file = which(program).ok_or_else(|| Error::Missing {
        program: program.to_owned(),
    })?;
    let failed = |source| Error::Run {
        program: program.to_owned(),
        source,
    };
    let mut child = Command::new(file)
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(if input.is_some() {
            Stdio::piped()
        } else {
            Stdio::null()
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    // The tools read all of their input before they say anything that could fill a pipe.
    let written = match (child.stdin.take(), input) {
        (Some(mut stdin), Some(text)) => stdin.write_all(text.as_bytes()),
        _ => Ok(()),
    };
    let output = child.wait_with_output().map_err(failed)?;
    match written {
        // A tool that stops at a bad line closes its input early, and says why itself.
        Err(error) if output.status.success() => Err(failed(error)),
        _ => Ok(output),
    }
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
        let error = run("iptables-of-nowhere", &[], None).expect_err("no such tool");
        assert!(
            error
                .to_string()
                .contains("install the package \"iptables\""),
            "{error}"
        );
    }
}
