//! The command line. Names and meanings of flags are kube-proxy's where it has them.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, FromArgMatches, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use ipvs_proxy_iptables::Choice;
use serde_json::{Value, json};

use crate::config::file::{Configuration, Time};
use crate::translate::parse_address;

/// IPVS service proxy for Kubernetes: a replacement of kube-proxy's IPVS mode.
#[derive(Debug, Parser)]
#[command(
    name = "ipvs-proxy",
    version,
    propagate_version = true,
    disable_help_subcommand = true
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Keeps this node's kernel as the Services say, until it is told to stop
    Run(Box<Run>),
    /// Prints the kernel state that given objects need on a given node; touches no kernel
    Plan(Box<Plan>),
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
#[derive(Debug, Clone, Default, Args)]
#[command(args_override_self = true)]
pub struct Run {
    /// Files or directories of Services, EndpointSlices and Nodes (YAML or JSON), watched, instead of
    /// the API server
    #[arg(long, value_name = "PATH")]
    pub manifests: Vec<PathBuf>,
    /// How the API server is reached; as a pod of its cluster if not given
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<String>,
    /// The API server's address, instead of the one known otherwise
    #[arg(long, value_name = "URL")]
    pub master: Option<String>,
    /// Follow the addresses of all Nodes, so that no Service takes one from its node; false if not given
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub watch_all_nodes: Option<bool>,
    /// Name of this node; the host name in lower case when it is not given
    #[arg(long, alias = "hostname-override", value_name = "NAME")]
    pub node_name: Option<String>,
    /// What shapes the state.
    #[command(flatten)]
    pub shape: Shape,
    /// The iptables to use; auto (if not given): what the host already uses
    #[arg(long, value_name = "auto|nft|legacy", value_parser = backend)]
    pub iptables_backend: Option<Choice>,
    /// How often the kernel is compared with what it should hold; 30s if not given
    #[arg(long, alias = "ipvs-sync-period", value_name = "TIME")]
    pub sync_period: Option<String>,
    /// What to do when somebody else changes what is ours while this runs: put it right, or only
    /// say so; repair if not given. A start puts all right either way, and so does a later need to
    /// write there
    #[arg(long, value_name = "repair|report")]
    pub drift: Option<Drift>,
    /// Answer ARP only for addresses of the link that is asked, as MetalLB's layer 2 mode needs
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub ipvs_strict_arp: Option<bool>,
    /// How long IPVS keeps a TCP connection without traffic; 0 leaves it as it is
    #[arg(long, value_name = "TIME")]
    pub ipvs_tcp_timeout: Option<String>,
    /// The same of a TCP connection that is closing
    #[arg(long, value_name = "TIME")]
    pub ipvs_tcpfin_timeout: Option<String>,
    /// The same of a flow of UDP
    #[arg(long, value_name = "TIME")]
    pub ipvs_udp_timeout: Option<String>,
    /// Connections that are tracked for each processor, 0 to leave it as it is; 32768 if not given
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub conntrack_max_per_core: Option<i32>,
    /// Connections that are tracked whatever the number of processors; 131072 if not given
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub conntrack_min: Option<i32>,
    /// How long a TCP connection is tracked without traffic, 0 to leave it as it is; 24h if not given
    #[arg(long, value_name = "TIME")]
    pub conntrack_tcp_timeout_established: Option<String>,
    /// The same of one in CLOSE_WAIT; 1h if not given
    #[arg(long, value_name = "TIME")]
    pub conntrack_tcp_timeout_close_wait: Option<String>,
    /// The same of a flow of UDP; 0 if not given
    #[arg(long, value_name = "TIME")]
    pub conntrack_udp_timeout: Option<String>,
    /// The same of one that was answered for some time; 0 if not given
    #[arg(long, value_name = "TIME")]
    pub conntrack_udp_timeout_stream: Option<String>,
    /// Packets out of a TCP connection's window are not INVALID
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub conntrack_tcp_be_liberal: Option<bool>,
    /// Where the health server listens, empty for not at all; 0.0.0.0:10256 if not given
    #[arg(long, value_name = "IP:PORT")]
    pub healthz_bind_address: Option<String>,
    /// Where the metrics server listens, empty for not at all; 127.0.0.1:10249 if not given
    #[arg(long, value_name = "IP:PORT")]
    pub metrics_bind_address: Option<String>,
    /// The health server's port, 0 for no server
    #[arg(long, hide = true, value_name = "PORT")]
    pub healthz_port: Option<u16>,
    /// The metrics server's port, 0 for no server
    #[arg(long, hide = true, value_name = "PORT")]
    pub metrics_port: Option<u16>,
    /// A server that can not listen ends the process
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub bind_address_hard_fail: Option<bool>,
    /// How early the kernel ends this process for want of memory, -1000 to 1000; -999 if not given
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub oom_score_adj: Option<i32>,
    /// Form of the log on stderr; text if not given
    #[arg(long, alias = "logging-format", value_name = "text|json", value_parser = ["text", "json"])]
    pub log_format: Option<String>,
    /// How much is logged: 4 and more is debug, 6 and more is trace
    #[arg(long = "v", short = 'v', value_name = "LEVEL")]
    pub v: Option<u32>,
    /// Write a KubeProxyConfiguration that says what counts, and end
    #[arg(long, value_name = "FILE")]
    pub write_config_to: Option<PathBuf>,
    /// Load modules, set sysctls and make the link, and end: what needs more privilege than the
    /// rest
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub init_only: Option<bool>,
    /// Remove all that is ours, as the subcommand cleanup does, and end
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub cleanup: Option<bool>,
    /// What kube-proxy knows and what says nothing here.
    #[command(flatten)]
    pub others: Others,
    /// Flags without any field or meaning.
    #[command(flatten)]
    pub ignored: Ignored,
}

/// Flags of kube-proxy that have a field of its configuration, and say nothing here: a warning names
/// them. `--write-config-to` hands them on.
#[derive(Debug, Clone, Default, Args)]
#[expect(missing_docs, reason = "kube-proxy's documentation has them")]
pub struct Others {
    #[arg(long, hide = true, value_name = "MODE")]
    pub proxy_mode: Option<String>,
    #[arg(
        long,
        hide = true,
        value_name = "NUMBER",
        allow_negative_numbers = true
    )]
    pub kube_api_qps: Option<f32>,
    #[arg(
        long,
        hide = true,
        value_name = "NUMBER",
        allow_negative_numbers = true
    )]
    pub kube_api_burst: Option<i32>,
    #[arg(long, hide = true, value_name = "TYPE")]
    pub kube_api_content_type: Option<String>,
    #[arg(long, hide = true, value_name = "TIME")]
    pub config_sync_period: Option<String>,
    #[arg(
        long, hide = true,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub iptables_localhost_nodeports: Option<bool>,
    #[arg(long, hide = true, value_name = "TIME")]
    pub iptables_sync_period: Option<String>,
    #[arg(long, hide = true, value_name = "TIME")]
    pub iptables_min_sync_period: Option<String>,
    #[arg(long, hide = true, value_name = "TIME")]
    pub ipvs_min_sync_period: Option<String>,
    #[arg(
        long, hide = true,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub profiling: Option<bool>,
    #[arg(long, hide = true, value_name = "VERSION")]
    pub show_hidden_metrics_for_version: Option<String>,
    #[arg(long, hide = true, value_parser = module, value_name = "FILE=LEVEL,…", value_delimiter = ',')]
    pub vmodule: Option<Vec<Option<(String, u32)>>>,
    #[arg(long, hide = true, value_name = "TIME")]
    pub log_flush_frequency: Option<String>,
    #[arg(long, hide = true, value_name = "SIZE")]
    pub log_json_info_buffer_size: Option<String>,
    #[arg(
        long, hide = true,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub log_json_split_stream: Option<bool>,
    #[arg(long, hide = true, value_name = "SIZE")]
    pub log_text_info_buffer_size: Option<String>,
    #[arg(
        long, hide = true,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub log_text_split_stream: Option<bool>,
}

/// Flags of old releases of kube-proxy that are taken without effect, as they are given.
#[derive(Debug, Clone, Default)]
pub struct Ignored {
    given: Vec<&'static str>,
}

/// Those with a value, and those that may have one.
const IGNORED: [(&str, bool); 17] = [
    ("boot-id-file", true),
    ("cleanup-ipvs", false),
    ("log-backtrace-at", true),
    ("log-dir", true),
    ("log-file", true),
    ("log-file-max-size", true),
    ("machine-id-file", true),
    ("proxy-port-range", true),
    ("resource-container", true),
    ("stderrthreshold", true),
    ("udp-timeout", true),
    ("add-dir-header", false),
    ("alsologtostderr", false),
    ("logtostderr", false),
    ("one-output", false),
    ("skip-headers", false),
    ("skip-log-headers", false),
];

impl Args for Ignored {
    fn augment_args(command: clap::Command) -> clap::Command {
        let flags = IGNORED.iter().map(|(name, value)| {
            let flag = Arg::new(name).long(name).hide(true);
            match value {
                true => flag.num_args(1),
                false => flag
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("true"),
            }
        });
        command.args(flags)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Ignored::augment_args(command)
    }
}

impl FromArgMatches for Ignored {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Ignored, clap::Error> {
        let names = IGNORED.iter().map(|(name, _)| *name);
        let given = names.filter(|name| matches.contains_id(name));
        Ok(Ignored {
            given: given.collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Ignored::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Run {
    /// Lets the flags go before what the configuration says.
    pub(crate) fn overlay(&self, c: &mut Configuration) {
        let shape = &self.shape;
        set(&mut c.bind_address, &shape.bind_address);
        set(&mut c.cluster_cidr, &shape.cluster_cidr);
        set(&mut c.detect_local_mode, &shape.detect_local_mode);
        let detect = &mut c.detect_local;
        set(&mut detect.bridge_interface, &shape.pod_bridge_interface);
        set(
            &mut detect.interface_name_prefix,
            &shape.pod_interface_name_prefix,
        );
        set(&mut c.ipvs.scheduler, &shape.scheduler);
        set_list(
            &mut c.ipvs.exclude_cidrs,
            shape.ipvs_exclude_cidrs.as_deref(),
        );
        set(&mut c.iptables.masquerade_all, &shape.masquerade_all);
        set(
            &mut c.iptables.masquerade_bit,
            &shape.iptables_masquerade_bit,
        );
        set_list(
            &mut c.node_port_addresses,
            shape.nodeport_addresses.as_deref(),
        );

        let gates = shape.feature_gates.iter().flatten().flatten();
        c.feature_gates
            .extend(gates.map(|(name, on)| (name.clone(), *on)));

        set(&mut c.client_connection.kubeconfig, &self.kubeconfig);
        set(&mut c.hostname_override, &self.node_name);
        set_time(&mut c.ipvs.sync_period, &self.sync_period);
        set(&mut c.ipvs.strict_arp, &self.ipvs_strict_arp);
        set_time(&mut c.ipvs.tcp_timeout, &self.ipvs_tcp_timeout);
        set_time(&mut c.ipvs.tcp_fin_timeout, &self.ipvs_tcpfin_timeout);
        set_time(&mut c.ipvs.udp_timeout, &self.ipvs_udp_timeout);
        let conntrack = &mut c.conntrack;
        set(&mut conntrack.max_per_core, &self.conntrack_max_per_core);
        set(&mut conntrack.min, &self.conntrack_min);
        for (time, flag) in [
            (
                &mut conntrack.tcp_established_timeout,
                &self.conntrack_tcp_timeout_established,
            ),
            (
                &mut conntrack.tcp_close_wait_timeout,
                &self.conntrack_tcp_timeout_close_wait,
            ),
            (&mut conntrack.udp_timeout, &self.conntrack_udp_timeout),
            (
                &mut conntrack.udp_stream_timeout,
                &self.conntrack_udp_timeout_stream,
            ),
        ] {
            set_time(time, flag);
        }
        set(
            &mut conntrack.tcp_be_liberal,
            &self.conntrack_tcp_be_liberal,
        );
        for (address, flag, port) in [
            (
                &mut c.healthz_bind_address,
                &self.healthz_bind_address,
                self.healthz_port,
            ),
            (
                &mut c.metrics_bind_address,
                &self.metrics_bind_address,
                self.metrics_port,
            ),
        ] {
            set(address, flag);
            // In a file the empty address is the default; only port 0 says that there is no server.
            if flag.as_deref() == Some("") || port == Some(0) {
                "0.0.0.0:0".clone_into(address);
            }
        }
        set(&mut c.bind_address_hard_fail, &self.bind_address_hard_fail);
        set(&mut c.oom_score_adj, &self.oom_score_adj);
        set(&mut c.logging.format, &self.log_format);
        set(&mut c.logging.verbosity, &self.v);
        self.others.overlay(c);
    }

    /// The flags that have no effect and no field, a line each.
    pub(crate) fn no_effect(&self) -> impl Iterator<Item = String> {
        let line = |name: &&str| format!("--{name}: has no effect here");
        self.ignored.given.iter().map(line)
    }
}

impl Others {
    fn overlay(&self, c: &mut Configuration) {
        set(&mut c.mode, &self.proxy_mode);
        set(&mut c.client_connection.qps, &self.kube_api_qps);
        set(&mut c.client_connection.burst, &self.kube_api_burst);
        set(
            &mut c.client_connection.content_type,
            &self.kube_api_content_type,
        );
        set_time(&mut c.config_sync_period, &self.config_sync_period);
        set(
            &mut c.iptables.localhost_node_ports,
            &self.iptables_localhost_nodeports,
        );
        set_time(&mut c.iptables.sync_period, &self.iptables_sync_period);
        set_time(
            &mut c.iptables.min_sync_period,
            &self.iptables_min_sync_period,
        );
        set_time(&mut c.ipvs.min_sync_period, &self.ipvs_min_sync_period);
        set(&mut c.enable_profiling, &self.profiling);
        set(
            &mut c.show_hidden_metrics_for_version,
            &self.show_hidden_metrics_for_version,
        );
        if let Some(modules) = &self.vmodule {
            let rule =
                |(file, level): &(String, u32)| json!({"filePattern": file, "verbosity": level});
            c.logging.vmodule = modules.iter().flatten().map(rule).collect();
        }
        if let Some(time) = &self.log_flush_frequency {
            c.logging.flush_frequency = Value::from(time.as_str());
        }
        let buffer = |size: &Option<String>| size.as_ref().map(|size| json!(size));
        let split = |on: Option<bool>| on.map(|on| json!(on));
        for (format, option, value) in [
            (
                "json",
                "infoBufferSize",
                buffer(&self.log_json_info_buffer_size),
            ),
            ("json", "splitStream", split(self.log_json_split_stream)),
            (
                "text",
                "infoBufferSize",
                buffer(&self.log_text_info_buffer_size),
            ),
            ("text", "splitStream", split(self.log_text_split_stream)),
        ] {
            let options = c.logging.options.as_object_mut();
            if let (Some(options), Some(value)) = (options, value) {
                let of_format = options.entry(format).or_insert(json!({}));
                if let Some(of_format) = of_format.as_object_mut() {
                    of_format.insert(option.to_owned(), value);
                }
            }
        }
    }
}

fn set<T: Clone>(field: &mut T, flag: &Option<T>) {
    if let Some(value) = flag {
        field.clone_from(value);
    }
}

fn set_time(field: &mut Time, flag: &Option<String>) {
    set(&mut field.0, flag);
}

/// An empty flag is an empty list.
fn set_list(field: &mut Vec<String>, flag: Option<&[String]>) {
    if let Some(values) = flag {
        *field = values.to_vec();
        field.retain(|value| !value.is_empty());
    }
}

/// What to do with what somebody else changed of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Drift {
    /// Put it right and say so.
    Repair,
    /// Say so, and leave it until the same thing is to be written for another reason: at the next
    /// start, for a changed object, or after an op of unknown outcome.
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
    /// Networks in which no virtual server is ever removed
    #[arg(long, value_name = "CIDR,…", value_delimiter = ',')]
    pub ipvs_exclude_cidrs: Vec<IpNet>,
}

/// The flags that shape the kernel's state, the same for `run` and `plan`. One that is not given
/// leaves what the file says, or what kube-proxy does without it.
#[derive(Debug, Clone, Default, Args)]
pub struct Shape {
    /// A KubeProxyConfiguration, as kube-proxy reads it; flags go before it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Addresses of the node, on which node ports are served; else `run` follows those of its links,
    /// and `plan` takes the Node object's
    #[arg(long, value_name = "IP,IP,…", value_delimiter = ',', value_parser = address)]
    pub node_ips: Vec<IpAddr>,
    /// The primary address of the node in its family, for --nodeport-addresses primary; nothing listens on it
    #[arg(long, value_name = "IP")]
    pub bind_address: Option<String>,
    /// Networks of the pods, one for each family; what comes from elsewhere is masqueraded on
    /// its way to a ClusterIP
    #[arg(long, value_name = "CIDR,CIDR")]
    pub cluster_cidr: Option<String>,
    /// How packets of pods are told: ClusterCIDR (if not given), NodeCIDR, BridgeInterface,
    /// InterfaceNamePrefix
    #[arg(long, value_name = "MODE")]
    pub detect_local_mode: Option<String>,
    /// The bridge of the pods, for BridgeInterface
    #[arg(long, value_name = "NAME")]
    pub pod_bridge_interface: Option<String>,
    /// How the names of the pods' links begin, for InterfaceNamePrefix
    #[arg(long, value_name = "NAME")]
    pub pod_interface_name_prefix: Option<String>,
    /// The IPVS scheduler, rr if not given: rr, wrr, lc, wlc, lblc, lblcr, dh, sh, mh, sed, nq, fo, ovf, …
    #[arg(long, alias = "ipvs-scheduler", value_name = "NAME")]
    pub scheduler: Option<String>,
    /// Networks in which no virtual server is ever removed
    #[arg(long, value_name = "CIDR,…", value_delimiter = ',')]
    pub ipvs_exclude_cidrs: Option<Vec<String>>,
    /// Masquerade everything that goes to a ClusterIP
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub masquerade_all: Option<bool>,
    /// The bit of the packet mark that asks for masquerading, 0 to 31; 14 if not given
    #[arg(long, value_name = "BIT", allow_negative_numbers = true)]
    pub iptables_masquerade_bit: Option<i32>,
    /// The bit of the packet mark by which packets to an external address are routed to this node that is an address of another
    /// host the node needs, 0 to 31; 13 if not given
    #[arg(long, value_name = "BIT", allow_negative_numbers = true)]
    pub route_bit: Option<i32>,
    /// How long a real server may drain, 0 (if not given) for no limit, now for not at all; a
    /// Service's annotation ipvs-proxy.io/drain-timeout goes before
    #[arg(long, value_name = "TIME|now")]
    pub drain_timeout: Option<String>,
    /// Which externalIPs of Services are served: allow (if not given), deny, or those in networks
    #[arg(long, value_name = "allow|deny|CIDR,…", value_delimiter = ',')]
    pub external_ips: Option<Vec<String>>,
    /// Which addresses of load balancers are served: allow (if not given), deny, or those in networks
    #[arg(long, value_name = "allow|deny|CIDR,…", value_delimiter = ',')]
    pub load_balancer_ips: Option<Vec<String>>,
    /// Where an address of the node is an external IP or a load balancer's, ports on which the node
    /// listens stay its own; true if not given
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub keep_node_listeners: Option<bool>,
    /// The most virtual servers of one Service, 0 for no bound; 5000 if not given
    #[arg(long, value_name = "NUMBER")]
    pub max_virtual_servers_per_service: Option<usize>,
    /// The most real servers of one Service, counted for each virtual server, 0 for no bound; 100000 if
    /// not given
    #[arg(long, value_name = "NUMBER")]
    pub max_real_servers_per_service: Option<usize>,
    /// Feature gates of kube-proxy; AllowServiceExternalIPs=false is --external-ips=deny
    #[arg(long, value_parser = gate, value_name = "NAME=true,…", value_delimiter = ',')]
    pub feature_gates: Option<Vec<Option<(String, bool)>>>,
    /// Where node ports are served: networks, or the words primary, localhost, all
    #[arg(long, value_name = "CIDR|WORD,…", value_delimiter = ',')]
    pub nodeport_addresses: Option<Vec<String>>,
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
    /// What is routed to the node by a mark, in the words of `ip`: external addresses that the node needs.
    Routes,
    /// As `iptables-save` and `ip6tables-save`.
    Iptables,
    /// All of it, for programs.
    Json,
}

fn backend(text: &str) -> Result<Choice, String> {
    text.parse()
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

/// A feature gate, as `NAME=true`; nothing between two commas is none.
fn gate(text: &str) -> Result<Option<(String, bool)>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let (name, on) = text
        .split_once('=')
        .ok_or("must be NAME=true or NAME=false")?;
    Ok(Some((name.trim().to_owned(), boolean(on.trim())?)))
}

/// The verbosity of a source file, as `FILE=LEVEL`; nothing between two commas is none.
fn module(text: &str) -> Result<Option<(String, u32)>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let pair = text
        .split_once('=')
        .and_then(|(file, level)| Some((file.to_owned(), level.parse().ok()?)));
    pair.map(Some).ok_or("must be FILE=LEVEL".to_owned())
}

/// A command line with the names of flags as they are known here: kube-proxy takes `_` for `-`.
pub fn with_hyphens(words: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    words.map(|word| match word.to_str() {
        Some(text) if text.starts_with("--") => {
            let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
            (name.replace('_', "-") + value).into()
        }
        _ => word,
    })
}

/// A command line with its subcommand: flags alone are those of `run`, as kube-proxy has no subcommands.
pub fn with_subcommand(words: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut words = words.peekable();
    let name = words.next();
    let flag = words.peek().and_then(|word| word.to_str());
    let own = ["-h", "--help", "-V", "--version"];
    let runs = flag.is_some_and(|flag| flag.starts_with('-') && !own.contains(&flag));
    name.into_iter()
        .chain(runs.then(|| "run".into()))
        .chain(words)
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
