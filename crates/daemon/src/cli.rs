//! The command line. Names and meanings of flags are kube-proxy's where it has them.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use ipvs_netlink::Scheduler;
use ipvs_proxy_core::model::{Node, NodePortAddresses};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_iptables::Choice;
use ipvs_proxy_netlink::Family;

use crate::translate::{parse_address, parse_duration};

/// IPVS service proxy for Kubernetes: a replacement of kube-proxy's IPVS mode.
#[derive(Debug, Parser)]
#[command(name = "ipvs-proxy", version, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Keeps this node's kernel as the Services say, until it is told to stop
    Run(Run),
    /// Prints the kernel state that given objects need on a given node; touches no kernel
    Plan(Plan),
    /// Removes all that is ours from the kernel, and nothing else
    Cleanup(Cleanup),
    /// Lists the virtual servers as `ipvsadm` does: -L, -S and their options
    #[command(disable_help_flag = true)]
    Ipvsadm {
        /// ipvsadm's own arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

/// Flags of `run`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct Run {
    /// Files or directories of Services, EndpointSlices and Nodes (YAML or JSON), watched
    #[arg(long, value_name = "PATH", required = true)]
    pub manifests: Vec<PathBuf>,
    /// Name of this node; the host name in lower case when it is not given
    #[arg(long, alias = "hostname-override", value_name = "NAME")]
    pub node_name: Option<String>,
    /// What shapes the state.
    #[command(flatten)]
    pub shape: Shape,
    /// The iptables to use; auto: what the host already uses
    #[arg(long, value_name = "auto|nft|legacy", default_value = "auto", value_parser = backend)]
    pub iptables_backend: Choice,
    /// How often the kernel is compared with what it should hold
    #[arg(long, alias = "ipvs-sync-period", value_name = "TIME", default_value = "30s", value_parser = positive)]
    pub sync_period: Duration,
    /// What to do with what somebody else changed
    #[arg(long, value_name = "repair|report", default_value = "repair")]
    pub drift: Drift,
    /// Answer ARP only for addresses of the link that is asked, as MetalLB's layer 2 mode needs
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_value = "false",
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub ipvs_strict_arp: bool,
    /// Form of the log on stderr
    #[arg(long, value_name = "text|json", default_value = "text")]
    pub log_format: LogFormat,
}

/// What to do with what somebody else changed of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Drift {
    /// Put it right and say so.
    Repair,
    /// Say so.
    Report,
}

/// Flags of `plan`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct Plan {
    /// A file, a directory, or - for standard input; may be given again
    #[arg(long, value_name = "PATH", required = true)]
    pub manifests: Vec<PathBuf>,
    /// Name of the node to plan for
    #[arg(long, alias = "hostname-override", value_name = "NAME")]
    pub node_name: String,
    /// What shapes the state.
    #[command(flatten)]
    pub shape: Shape,
    /// Form of the output
    #[arg(short, long, value_name = "FORM", default_value = "summary")]
    pub output: Output,
    /// Prints how the kernel of this machine differs instead: - what it has and should not, + what
    /// it lacks; exit code 1 when it differs
    #[arg(long, conflicts_with = "output")]
    pub diff: bool,
    /// The iptables to use with --diff; auto: what the host already uses
    #[arg(long, value_name = "auto|nft|legacy", default_value = "auto", value_parser = backend)]
    pub iptables_backend: Choice,
}

/// Flags of `cleanup`.
#[derive(Debug, Args)]
pub struct Cleanup {
    /// The iptables to use; auto: what the host already uses
    #[arg(long, value_name = "auto|nft|legacy", default_value = "auto", value_parser = backend)]
    pub iptables_backend: Choice,
}

/// The flags that shape the kernel's state, the same for `run` and `plan`.
#[derive(Debug, Args)]
pub struct Shape {
    /// Addresses of the node, on which node ports are served; else `run` follows those of its links,
    /// and `plan` takes the Node object's
    #[arg(long, value_name = "IP,IP,…", value_delimiter = ',', value_parser = address)]
    pub node_ips: Vec<IpAddr>,
    /// Networks of the pods, one for each family; what comes from elsewhere is masqueraded on
    /// its way to a ClusterIP
    #[arg(long, value_name = "CIDR,CIDR", value_delimiter = ',', value_parser = cidr)]
    pub cluster_cidr: Vec<IpNet>,
    /// The IPVS scheduler: rr, wrr, lc, wlc, lblc, lblcr, dh, sh, mh, sed, nq, fo, ovf, …
    #[arg(long, alias = "ipvs-scheduler", value_name = "NAME", default_value = "rr", value_parser = scheduler)]
    pub scheduler: Scheduler,
    /// Masquerade everything that goes to a ClusterIP
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_value = "false",
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub masquerade_all: bool,
    /// The bit of the packet mark that asks for masquerading, 0 to 31
    #[arg(
        long,
        value_name = "BIT",
        default_value = "14",
        value_parser = clap::value_parser!(u8).range(0..=31)
    )]
    pub iptables_masquerade_bit: u8,
    /// How long a real server may drain, 0 for no limit; a Service's annotation
    /// ipvs-proxy.io/drain-timeout goes before
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub drain_timeout: Duration,
    /// Where node ports are served: networks, or the words primary, localhost, all
    #[arg(long, value_name = "CIDR|WORD,…", value_delimiter = ',')]
    pub nodeport_addresses: Vec<String>,
}

impl Shape {
    /// The settings of the core for these families.
    ///
    /// # Errors
    /// Where flags contradict each other.
    pub fn config(&self, families: &[Family]) -> Result<Config, String> {
        for family in Family::ALL {
            let of_family: Vec<&IpNet> = self
                .cluster_cidr
                .iter()
                .filter(|c| Family::of(c.addr()) == family)
                .collect();
            if let [first, second, ..] = of_family.as_slice() {
                return Err(format!(
                    "--cluster-cidr: {first} and {second} are of one family: give at most one \
                     network for IPv4 and one for IPv6"
                ));
            }
        }
        Ok(Config {
            families: families.to_vec(),
            scheduler: self.scheduler,
            cluster_cidrs: self.cluster_cidr.clone(),
            masquerade_all: self.masquerade_all,
            masquerade_bit: self.iptables_masquerade_bit,
            node_port_addresses: self.node_port_addresses()?,
            drain_timeout: Some(self.drain_timeout),
            random_fully: true,
        })
    }

    fn node_port_addresses(&self) -> Result<NodePortAddresses, String> {
        let mut selected = NodePortAddresses::default();
        let mut all = false;
        for word in self.nodeport_addresses.iter().map(|word| word.trim()) {
            match word {
                "all" => all = true,
                "primary" => selected.primary = true,
                "localhost" => selected.localhost = true,
                _ => selected.networks.push(word.parse().map_err(|_| {
                    format!(
                        "--nodeport-addresses: {word:?} is not a network such as 10.0.0.0/8, nor \
                         one of primary, localhost, all"
                    )
                })?),
            }
        }
        Ok(if all {
            NodePortAddresses::default()
        } else {
            selected
        })
    }

    /// The node from the flag, `None` when it was not given.
    #[must_use]
    pub fn node(&self) -> Option<Node> {
        let addresses = || self.node_ips.iter().copied();
        (!self.node_ips.is_empty()).then(|| Node {
            addresses: addresses().collect(),
            primary: Node::primary_of(&self.node_ips),
        })
    }
}

/// The form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line of text for each event.
    Text,
    /// A JSON object for each event.
    Json,
}

/// What `plan` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// What a person wants to read.
    Summary,
    /// As `ipvsadm -Sn`.
    Ipvsadm,
    /// As `ipset save`.
    Ipset,
    /// The addresses of kube-ipvs0, one ADDRESS/PREFIX a line.
    Addresses,
    /// As `iptables-save` and `ip6tables-save`.
    Iptables,
    /// All of it, for programs.
    Json,
}

fn backend(text: &str) -> Result<Choice, String> {
    text.parse()
}

fn scheduler(text: &str) -> Result<Scheduler, String> {
    if text.is_empty() {
        return Ok(Scheduler::RoundRobin);
    }
    text.parse()
        .map_err(|error: ipvs_netlink::InvalidScheduler| error.to_string())
}

fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("{text:?} is not a time such as 30s, 1m30s or 0"))
}

fn positive(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|time| match time {
        Duration::ZERO => Err("must be longer than 0".to_owned()),
        time => Ok(time),
    })
}

/// As Go's flags take it.
fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("{text:?} is not one of true, false")),
    }
}

fn address(text: &str) -> Result<IpAddr, String> {
    match parse_address(text.trim()) {
        None => Err(format!("{text:?} is not an IP address")),
        Some(address) if address.is_unspecified() || address.is_multicast() => {
            Err(format!("{text:?} is not an address that a node can have"))
        }
        Some(address) => Ok(address),
    }
}

fn cidr(text: &str) -> Result<IpNet, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("{text:?} is not a network such as 10.244.0.0/16"))
}

/// A command line that can't be used, in one line.
#[must_use]
pub fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let said: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
        .collect();
    let said = said.join(" ");
    let said = said.strip_prefix("error: ").unwrap_or(&said);
    format!("{said} (see --help)")
}
