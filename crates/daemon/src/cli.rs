//! The command line. Names and meanings of flags are kube-proxy's where it has them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use ipvs_netlink::Scheduler;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_iptables::Choice;
use ipvs_proxy_netlink::Family;

use crate::translate::parse_address;

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
    /// Form of the log on stderr
    #[arg(long, value_name = "text|json", default_value = "text")]
    pub log_format: LogFormat,
}

/// Flags of `plan`.
#[derive(Debug, Args)]
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
}

/// The flags that shape the kernel's state, the same for `run` and `plan`.
#[derive(Debug, Args)]
pub struct Shape {
    /// Addresses of the node, on which node ports are served; they override the Node object's
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
        default_missing_value = "true"
    )]
    pub masquerade_all: bool,
}

impl Shape {
    /// The settings of the core for these families.
    ///
    /// # Errors
    /// Where flags contradict each other.
    pub fn config(&self, families: &[Family]) -> Result<Config, String> {
        for family in Family::ALL {
            let of_family: Vec<&IpNet> =
                self.cluster_cidr.iter().filter(|c| Family::of(c.addr()) == family).collect();
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
            random_fully: true,
        })
    }

    /// The node's addresses from the flag, `None` when it was not given.
    #[must_use]
    pub fn node_addresses(&self) -> Option<BTreeSet<IpAddr>> {
        (!self.node_ips.is_empty()).then(|| self.node_ips.iter().copied().collect())
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
}

fn backend(text: &str) -> Result<Choice, String> {
    text.parse()
}

fn scheduler(text: &str) -> Result<Scheduler, String> {
    if text.is_empty() {
        return Ok(Scheduler::RoundRobin);
    }
    text.parse().map_err(|error: ipvs_netlink::InvalidScheduler| error.to_string())
}

fn address(text: &str) -> Result<IpAddr, String> {
    parse_address(text.trim()).ok_or_else(|| format!("{text:?} is not an IP address"))
}

fn cidr(text: &str) -> Result<IpNet, String> {
    text.trim().parse().map_err(|_| format!("{text:?} is not a network such as 10.244.0.0/16"))
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
