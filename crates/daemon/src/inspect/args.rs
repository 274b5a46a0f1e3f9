//! ipvsadm's command line: `parse_options`, `generic_opt_check` and `process_options` of
//! `ipvsadm.c` 1.31, on top of popt(3).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipvs_netlink::VirtualServerKey;
use ipvs_proxy_netlink::{Family, Protocol};

use super::Names;
use super::names::look_up;

/// What a command line asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// `-L`, or no arguments at all.
    List(ListOptions),
    /// `-L -c`.
    Connections {
        /// `--persistent-conn`: with what a persistence engine keeps.
        engines: bool,
        /// `-n`: no names.
        numeric: bool,
    },
    /// `-L --timeout`.
    Timeouts,
    /// `-L --daemon`.
    Daemons,
    /// `-S`.
    Save {
        /// `-n`: no names.
        numeric: bool,
    },
    /// `-h`.
    Help,
    /// `-v`.
    Version,
}

/// How to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListOptions {
    /// What to show.
    pub view: View,
    /// `-n`: no names.
    pub numeric: bool,
    /// `--exact`: no `K`, `M`, `G`, `T`.
    pub exact: bool,
    /// Not `--nosort`.
    pub sort: bool,
    /// The only virtual server to list.
    pub service: Option<VirtualServerKey>,
}

/// What a listing shows. Of several the first in this order counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum View {
    /// `--stats`.
    Stats,
    /// `--rate`.
    Rates,
    /// `--thresholds`.
    Thresholds,
    /// `--persistent-conn`.
    PersistentConnections,
    /// `--tun-info`.
    Tunnels,
    /// None of them.
    Plain,
}

/// A command line that can't be carried out: what to write to standard error, and the exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageError {
    /// The text, without the last line break.
    pub text: String,
    /// The exit code.
    pub exit: u8,
}

type Refused<T> = Result<T, UsageError>;

/// Exit code for what `ipvsadm` finds wrong itself.
const WRONG: u8 = 2;
/// Exit code (-1) for what popt finds wrong.
const POPT: u8 = 255;

fn wrong<T>(text: impl Into<String>) -> Refused<T> {
    Err(UsageError {
        text: text.into(),
        exit: WRONG,
    })
}

fn popt<T>(text: impl Into<String>) -> Refused<T> {
    Err(UsageError {
        text: text.into(),
        exit: POPT,
    })
}

/// An option of popt's table.
struct Spec {
    long: &'static str,
    short: char,
    value: Takes,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    Nothing,
    Value,
    /// `-p`: a value where the next word does not look like an option.
    MayTakeValue,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Command(Verb),
    Option(Opt),
    /// `-6`.
    Ipv6,
    /// `--sort`.
    NoEffect,
}

/// A command, and whether it is here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    List,
    Save,
    Help,
    Version,
    /// Changes something, so it is not here. By ipvsadm's own name.
    Change(&'static str),
}

/// An option that commands take or not, in the order in which they are checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Opt {
    Numeric,
    Connection,
    Service(Target),
    Scheduler,
    Persistent,
    Netmask,
    RealServer,
    Forwarding,
    Weight,
    UpperThreshold,
    LowerThreshold,
    McastInterface,
    Timeout,
    Daemon,
    Stats,
    Rate,
    Thresholds,
    PersistentConn,
    NoSort,
    SyncId,
    Exact,
    Ops,
    Engine,
    SchedulerFlags,
    TunInfo,
    TunType,
    TunPort,
    TunNoCsum,
    TunCsum,
    TunRemCsum,
    SyncMaxLen,
    McastGroup,
    McastPort,
    McastTtl,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Tcp,
    Udp,
    Sctp,
    Mark,
}

const fn command(long: &'static str, short: char, verb: Verb) -> Spec {
    Spec {
        long,
        short,
        value: Takes::Nothing,
        what: What::Command(verb),
    }
}

const fn flag(long: &'static str, short: char, option: Opt) -> Spec {
    Spec {
        long,
        short,
        value: Takes::Nothing,
        what: What::Option(option),
    }
}

const fn value(long: &'static str, short: char, option: Opt) -> Spec {
    Spec {
        long,
        short,
        value: Takes::Value,
        what: What::Option(option),
    }
}

/// No short form.
const NO: char = '\0';

const TABLE: &[Spec] = &[
    command("add-service", 'A', Verb::Change("add-service")),
    command("edit-service", 'E', Verb::Change("edit-service")),
    command("delete-service", 'D', Verb::Change("delete-service")),
    command("clear", 'C', Verb::Change("flush")),
    command("list", 'L', Verb::List),
    command("list", 'l', Verb::List),
    command("zero", 'Z', Verb::Change("zero")),
    command("add-server", 'a', Verb::Change("add-server")),
    command("edit-server", 'e', Verb::Change("edit-server")),
    command("delete-server", 'd', Verb::Change("delete-server")),
    command("set", NO, Verb::Change("set")),
    command("help", 'h', Verb::Help),
    command("version", 'v', Verb::Version),
    command("restore", 'R', Verb::Change("restore")),
    command("save", 'S', Verb::Save),
    Spec {
        value: Takes::Value,
        ..command("start-daemon", NO, Verb::Change("start-daemon"))
    },
    Spec {
        value: Takes::Value,
        ..command("stop-daemon", NO, Verb::Change("stop-daemon"))
    },
    value("tcp-service", 't', Opt::Service(Target::Tcp)),
    value("udp-service", 'u', Opt::Service(Target::Udp)),
    value("sctp-service", NO, Opt::Service(Target::Sctp)),
    value("fwmark-service", 'f', Opt::Service(Target::Mark)),
    value("scheduler", 's', Opt::Scheduler),
    Spec {
        value: Takes::MayTakeValue,
        ..flag("persistent", 'p', Opt::Persistent)
    },
    value("netmask", 'M', Opt::Netmask),
    value("real-server", 'r', Opt::RealServer),
    flag("masquerading", 'm', Opt::Forwarding),
    flag("ipip", 'i', Opt::Forwarding),
    flag("gatewaying", 'g', Opt::Forwarding),
    value("weight", 'w', Opt::Weight),
    value("u-threshold", 'x', Opt::UpperThreshold),
    value("l-threshold", 'y', Opt::LowerThreshold),
    flag("numeric", 'n', Opt::Numeric),
    flag("connection", 'c', Opt::Connection),
    value("mcast-interface", NO, Opt::McastInterface),
    value("syncid", NO, Opt::SyncId),
    flag("timeout", NO, Opt::Timeout),
    flag("daemon", NO, Opt::Daemon),
    flag("stats", NO, Opt::Stats),
    flag("rate", NO, Opt::Rate),
    flag("thresholds", NO, Opt::Thresholds),
    flag("persistent-conn", NO, Opt::PersistentConn),
    flag("nosort", NO, Opt::NoSort),
    Spec {
        what: What::NoEffect,
        ..flag("sort", NO, Opt::NoSort)
    },
    flag("exact", 'X', Opt::Exact),
    Spec {
        what: What::Ipv6,
        ..flag("ipv6", '6', Opt::Numeric)
    },
    flag("ops", 'o', Opt::Ops),
    value("pe", NO, Opt::Engine),
    value("sched-flags", 'b', Opt::SchedulerFlags),
    flag("tun-info", NO, Opt::TunInfo),
    value("tun-type", NO, Opt::TunType),
    value("tun-port", NO, Opt::TunPort),
    flag("tun-nocsum", NO, Opt::TunNoCsum),
    flag("tun-csum", NO, Opt::TunCsum),
    flag("tun-remcsum", NO, Opt::TunRemCsum),
    value("sync-maxlen", NO, Opt::SyncMaxLen),
    value("mcast-group", NO, Opt::McastGroup),
    value("mcast-port", NO, Opt::McastPort),
    value("mcast-ttl", NO, Opt::McastTtl),
];

impl Opt {
    /// The name in messages, which is not always the long form.
    fn name(self) -> &'static str {
        match self {
            Opt::Service(_) => "service-address",
            Opt::Forwarding => "forwarding-method",
            other => TABLE
                .iter()
                .find(|spec| spec.what == What::Option(other))
                .map_or("", |spec| spec.long),
        }
    }

    fn fits_list(self) -> bool {
        matches!(
            self,
            Opt::Numeric
                | Opt::Connection
                | Opt::Service(_)
                | Opt::Timeout
                | Opt::Daemon
                | Opt::Stats
                | Opt::Rate
                | Opt::Thresholds
                | Opt::PersistentConn
                | Opt::NoSort
                | Opt::SyncId
                | Opt::Exact
                | Opt::TunInfo
        )
    }
}

/// Reads ipvsadm's arguments, without the program's name. `names` turns names of ports into
/// numbers; names of hosts are asked from the system.
///
/// # Errors
///
/// What `ipvsadm` writes and exits with when the arguments are wrong. Commands that change something are refused by name,
/// with exit code 2.
pub fn parse(args: &[String], names: &Names) -> Result<Command, UsageError> {
    if args.is_empty() {
        return list(&[], None);
    }
    let mut words = Words {
        args: args.iter(),
        cluster: None,
        rest: Vec::new(),
    };
    let verb = match words.next() {
        Some(Ok(Word {
            what: What::Command(verb),
            ..
        })) => verb,
        _ => return popt("Try `ipvsadm -h' or 'ipvsadm --help' for more information."),
    };
    match verb {
        Verb::Help => return Ok(Command::Help),
        Verb::Version => return Ok(Command::Version),
        Verb::Change(name) => {
            return wrong(format!(
                "the '{name}' command is refused: this ipvsadm only lists; {}",
                instead(name)
            ));
        }
        Verb::List | Verb::Save => {}
    }
    let (options, service) = options(&mut words, names)?;
    if verb == Verb::Save {
        if let Some(option) = options.iter().find(|option| **option != Opt::Numeric) {
            return wrong(format!(
                "Illegal '{}' option with the 'save' command",
                option.name()
            ));
        }
        return Ok(Command::Save {
            numeric: !options.is_empty(),
        });
    }
    list(&options, service)
}

/// What to use instead of a command that changes something.
fn instead(command: &str) -> &'static str {
    match command {
        "set" => {
            "set timeouts with the flags --ipvs-tcp-timeout, --ipvs-tcpfin-timeout and --ipvs-udp-timeout of ipvs-proxy"
        }
        "zero" | "start-daemon" | "stop-daemon" => "use the original ipvsadm",
        _ => {
            "change the Service, since ipvs-proxy undoes other changes to its virtual servers; \
             for those of others use the original ipvsadm"
        }
    }
}

/// What stands behind the command: the options, in the order of their checks, and the service.
fn options(words: &mut Words<'_>, names: &Names) -> Refused<(Vec<Opt>, Option<VirtualServerKey>)> {
    let mut options: Vec<Opt> = Vec::new();
    let mut service = None;
    for word in words.by_ref() {
        let Word { what, text, value } = word?;
        let option = match what {
            What::Command(_) => return wrong(format!("invalid option `{text}'")),
            What::NoEffect => continue,
            What::Ipv6 => match &mut service {
                Some(VirtualServerKey::FirewallMark { family, .. }) => {
                    *family = Family::V6;
                    continue;
                }
                _ => return wrong("-6 used before -f\n"),
            },
            What::Option(option) => option,
        };
        if options.iter().any(|other| other.name() == option.name()) {
            return wrong(format!("multiple '{}' options specified", option.name()));
        }
        options.push(option);
        if let Opt::Service(target) = option {
            service = Some(key(target, &value, names)?);
        }
    }
    if let Some(word) = words.rest.first() {
        return wrong(format!("unexpected argument {word}"));
    }
    options.sort_unstable();
    Ok((options, service))
}

fn list(options: &[Opt], service: Option<VirtualServerKey>) -> Refused<Command> {
    if let Some(option) = options.iter().find(|option| !option.fits_list()) {
        return wrong(format!(
            "Illegal '{}' option with the 'list' command",
            option.name()
        ));
    }
    let has = |option| options.contains(&option);
    let numbers = has(Opt::Stats) || has(Opt::Rate) || has(Opt::Thresholds);
    let other = has(Opt::Timeout) || has(Opt::Daemon);
    if (has(Opt::Connection) && numbers) || (other && (numbers || has(Opt::PersistentConn))) {
        return wrong("options conflicts in the list command");
    }
    let whole = |option: &&Opt| {
        matches!(
            option,
            Opt::Connection | Opt::Service(_) | Opt::Timeout | Opt::Daemon
        )
    };
    let mut exclusive = options.iter().filter(whole);
    if let (Some(first), Some(second)) = (exclusive.next(), exclusive.next()) {
        return wrong(format!(
            "The option '{}' conflicts with the '{}' option in the 'list' command",
            second.name(),
            first.name()
        ));
    }
    if has(Opt::Connection) {
        return Ok(Command::Connections {
            engines: has(Opt::PersistentConn),
            numeric: has(Opt::Numeric),
        });
    }
    if has(Opt::Timeout) {
        return Ok(Command::Timeouts);
    }
    if has(Opt::Daemon) {
        return Ok(Command::Daemons);
    }
    let view = |option: &Opt| match option {
        Opt::Stats => View::Stats,
        Opt::Rate => View::Rates,
        Opt::Thresholds => View::Thresholds,
        Opt::PersistentConn => View::PersistentConnections,
        Opt::TunInfo => View::Tunnels,
        _ => View::Plain,
    };
    Ok(Command::List(ListOptions {
        view: options.iter().map(view).min().unwrap_or(View::Plain),
        numeric: has(Opt::Numeric),
        exact: has(Opt::Exact),
        sort: !has(Opt::NoSort),
        service,
    }))
}

/// An option as popt finds it.
struct Word {
    what: What,
    /// The argument it stands in.
    text: String,
    value: String,
}

/// The arguments as popt goes through them: clusters of short options, values that are joined or
/// stand behind, `--` that ends the options.
struct Words<'a> {
    args: std::slice::Iter<'a, String>,
    /// The argument with short options that is being read, and how far (in characters).
    cluster: Option<(&'a str, usize)>,
    /// What is no option.
    rest: Vec<String>,
}

impl Iterator for Words<'_> {
    type Item = Refused<Word>;

    fn next(&mut self) -> Option<Refused<Word>> {
        loop {
            if let Some((text, at)) = self.cluster.take()
                && let Some(letter) = text.chars().nth(at)
            {
                return Some(self.short(text, at, letter));
            }
            let text = self.args.next()?;
            if text == "--" {
                self.rest.extend(self.args.by_ref().cloned());
            } else if let Some(long) = text.strip_prefix("--") {
                return Some(self.long(text, long));
            } else if text.starts_with('-') && text.len() > 1 {
                self.cluster = Some((text, 1));
            } else {
                self.rest.push(text.clone());
            }
        }
    }
}

impl<'a> Words<'a> {
    fn short(&mut self, text: &'a str, at: usize, letter: char) -> Refused<Word> {
        let Some(spec) = TABLE.iter().find(|spec| spec.short == letter) else {
            return popt(format!("{text}: unknown option"));
        };
        let joined: String = text.chars().skip(at + 1).collect();
        let joined = (!joined.is_empty()).then_some(joined);
        let value = match spec.value {
            Takes::Nothing => {
                self.cluster = Some((text, at + 1));
                None
            }
            _ => joined.map(|joined| joined.strip_prefix('=').unwrap_or(&joined).to_owned()),
        };
        self.word(spec, text, value)
    }

    fn long(&mut self, text: &str, long: &str) -> Refused<Word> {
        let (name, value) = match long.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (long, None),
        };
        let Some(spec) = TABLE.iter().find(|spec| spec.long == name) else {
            return popt(format!("{text}: unknown option"));
        };
        if spec.value == Takes::Nothing && value.is_some() {
            return popt(format!("{text}: option does not take an argument"));
        }
        self.word(spec, text, value)
    }

    fn word(&mut self, spec: &Spec, text: &str, joined: Option<String>) -> Refused<Word> {
        let value = match (spec.value, joined) {
            (Takes::Nothing, _) => String::new(),
            (_, Some(joined)) => joined,
            (Takes::Value, None) => match self.args.next() {
                Some(next) => next.clone(),
                None => return popt(format!("{text}: missing argument")),
            },
            (Takes::MayTakeValue, None) => {
                match self
                    .args
                    .as_slice()
                    .first()
                    .filter(|next| !next.starts_with('-'))
                {
                    Some(_) => self.args.next().cloned().unwrap_or_default(),
                    None => String::new(),
                }
            }
        };
        Ok(Word {
            what: spec.what,
            text: text.to_owned(),
            value,
        })
    }
}

fn key(target: Target, value: &str, names: &Names) -> Refused<VirtualServerKey> {
    let protocol = match target {
        Target::Tcp => Protocol::Tcp,
        Target::Udp => Protocol::Udp,
        Target::Sctp => Protocol::Sctp,
        Target::Mark => {
            let Some(mark) = number(value).filter(|mark| *mark != 0) else {
                return wrong(format!("invalid fwmark value `{value}' specified"));
            };
            return Ok(VirtualServerKey::FirewallMark {
                mark,
                family: Family::V4,
            });
        }
    };
    match address_and_port(value, protocol, names) {
        Some((address, port)) => Ok(VirtualServerKey::Address {
            address,
            port,
            protocol,
        }),
        None => wrong("illegal virtual server address[:port] specified"),
    }
}

/// `parse_service` of ipvsadm.c: no port is port 0, and brackets need one.
fn address_and_port(text: &str, protocol: Protocol, names: &Names) -> Option<(IpAddr, u16)> {
    let port = |text: &str| match number(text) {
        Some(number) => u16::try_from(number).ok(),
        None => names.port_of(text, protocol),
    };
    if let Some(rest) = text.strip_prefix('[') {
        let (address, port_text) = rest.split_once("]:")?;
        return match address.parse::<Ipv6Addr>() {
            Ok(address) => Some((address.into(), port(port_text)?)),
            // What is no IPv6 address loses its port there.
            Err(_) => Some((ipv4(address)?.into(), 0)),
        };
    }
    if let Ok(address) = text.parse::<Ipv6Addr>() {
        return Some((address.into(), 0));
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port_text)) => (host, port(port_text)?),
        None => (text, 0),
    };
    // A number alone is taken for a port, which is no address.
    if number(text).is_some() {
        return None;
    }
    Some((ipv4(host)?.into(), port))
}

/// Up to four numbers with dots between, of which the last one stands for all bytes that are left and those with a leading
/// zero are octal (`inet_aton(3)`), or a name.
fn ipv4(host: &str) -> Option<Ipv4Addr> {
    if host.is_empty() {
        return None;
    }
    if !host.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return look_up(host);
    }
    let mut parts = host.split('.').map(|part| {
        let octal = part.len() > 1 && part.starts_with('0');
        u32::from_str_radix(part, if octal { 8 } else { 10 }).ok()
    });
    let last = parts.next_back()??;
    let (mut bits, mut left) = (0_u32, 32_u32);
    for part in parts {
        left = left.checked_sub(8).filter(|left| *left > 0)?;
        bits |= u32::from(u8::try_from(part?).ok()?) << left;
    }
    let most = u32::MAX.checked_shr(32 - left)?;
    (last <= most).then(|| Ipv4Addr::from_bits(bits | last))
}

/// `strtol(3)` in base 10: blanks and a plus sign before it, nothing behind it.
fn number(text: &str) -> Option<u32> {
    let digits = text.trim_start();
    let digits = digits.strip_prefix('+').unwrap_or(digits);
    digits
        .bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| digits.parse().ok())
        .flatten()
}
