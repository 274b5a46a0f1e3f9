//! A configuration and the flags that no file has → [`Settings`], or all that is wrong with them.

use std::net::SocketAddr;
use std::time::Duration;

use ipnet::IpNet;
use ipvs_netlink::{Scheduler, Timeouts};
use ipvs_proxy_core::guard::Allowed;
use ipvs_proxy_core::model::{DrainTimeout, NodePortAddresses};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_netlink::Family;
use serde_json::Value;

use super::file::{Configuration, tree_of};
use super::{
    Conntrack, Objects, Settings, format_duration, gates, parse_drain_timeout, parse_duration,
};
use crate::cli::{Drift, LogFormat, Run};
use crate::translate::parse_address;

/// Where a flag says what a field says.
pub(super) const FLAGS: [(&str, &str); 44] = [
    ("bindAddress", "--bind-address"),
    ("bindAddressHardFail", "--bind-address-hard-fail"),
    ("clientConnection.burst", "--kube-api-burst"),
    ("clientConnection.contentType", "--kube-api-content-type"),
    ("clientConnection.kubeconfig", "--kubeconfig"),
    ("clientConnection.qps", "--kube-api-qps"),
    ("clusterCIDR", "--cluster-cidr"),
    ("configSyncPeriod", "--config-sync-period"),
    ("conntrack.maxPerCore", "--conntrack-max-per-core"),
    ("conntrack.min", "--conntrack-min"),
    ("conntrack.tcpBeLiberal", "--conntrack-tcp-be-liberal"),
    (
        "conntrack.tcpCloseWaitTimeout",
        "--conntrack-tcp-timeout-close-wait",
    ),
    (
        "conntrack.tcpEstablishedTimeout",
        "--conntrack-tcp-timeout-established",
    ),
    (
        "conntrack.udpStreamTimeout",
        "--conntrack-udp-timeout-stream",
    ),
    ("conntrack.udpTimeout", "--conntrack-udp-timeout"),
    ("detectLocal.bridgeInterface", "--pod-bridge-interface"),
    (
        "detectLocal.interfaceNamePrefix",
        "--pod-interface-name-prefix",
    ),
    ("detectLocalMode", "--detect-local-mode"),
    ("enableProfiling", "--profiling"),
    ("featureGates", "--feature-gates"),
    ("healthzBindAddress", "--healthz-bind-address"),
    ("hostnameOverride", "--node-name"),
    (
        "iptables.localhostNodePorts",
        "--iptables-localhost-nodeports",
    ),
    ("iptables.masqueradeAll", "--masquerade-all"),
    ("iptables.masqueradeBit", "--iptables-masquerade-bit"),
    ("iptables.minSyncPeriod", "--iptables-min-sync-period"),
    ("iptables.syncPeriod", "--iptables-sync-period"),
    ("ipvs.excludeCIDRs", "--ipvs-exclude-cidrs"),
    ("ipvs.minSyncPeriod", "--ipvs-min-sync-period"),
    ("ipvs.scheduler", "--scheduler"),
    ("ipvs.strictARP", "--ipvs-strict-arp"),
    ("ipvs.syncPeriod", "--sync-period"),
    ("ipvs.tcpFinTimeout", "--ipvs-tcpfin-timeout"),
    ("ipvs.tcpTimeout", "--ipvs-tcp-timeout"),
    ("ipvs.udpTimeout", "--ipvs-udp-timeout"),
    ("logging.flushFrequency", "--log-flush-frequency"),
    ("logging.format", "--log-format"),
    ("logging.verbosity", "--v"),
    ("logging.vmodule", "--vmodule"),
    ("metricsBindAddress", "--metrics-bind-address"),
    ("mode", "--proxy-mode"),
    ("nodePortAddresses", "--nodeport-addresses"),
    ("oomScoreAdj", "--oom-score-adj"),
    (
        "showHiddenMetricsForVersion",
        "--show-hidden-metrics-for-version",
    ),
];

/// Why no pace can be set.
const PACE: &str = "there is nothing to slow down: three watches, their lists in pages of 500, an Event in 10 s (10 at once)";

/// Fields that say nothing here unless they are as nobody set them, and why.
const NOT_APPLICABLE: [(&str, &str); 26] = [
    (
        "clientConnection.acceptContentTypes",
        "the API server is asked for JSON",
    ),
    ("clientConnection.burst", PACE),
    (
        "clientConnection.contentType",
        "the API server is asked for JSON",
    ),
    ("clientConnection.qps", PACE),
    (
        "configSyncPeriod",
        "changes are never listed again without a reason; the kernel is compared every ipvs.syncPeriod",
    ),
    ("enableProfiling", "there are no handlers for profiling"),
    ("iptables.localhostNodePorts", "it is for mode iptables"),
    ("iptables.minSyncPeriod", "it is for mode iptables"),
    ("iptables.syncPeriod", "it is for mode iptables"),
    (
        "ipvs.minSyncPeriod",
        "a change is applied at once, at the cost of that change alone",
    ),
    ("logging.flushFrequency", "the log is not buffered"),
    ("logging.options", "the log is not buffered"),
    ("logging.vmodule", "the log has one verbosity"),
    ("mode", "the mode is always ipvs"),
    ("nftables.masqueradeAll", "it is for mode nftables"),
    ("nftables.masqueradeBit", "it is for mode nftables"),
    ("nftables.minSyncPeriod", "it is for mode nftables"),
    ("nftables.syncPeriod", "it is for mode nftables"),
    ("portRange", "no port is opened for a Service"),
    ("showHiddenMetricsForVersion", "no metric is hidden"),
    ("windowsRunAsService", "it is for Windows"),
    ("winkernel.enableDSR", "it is for Windows"),
    ("winkernel.forwardHealthCheckVip", "it is for Windows"),
    ("winkernel.networkName", "it is for Windows"),
    ("winkernel.rootHnsEndpointName", "it is for Windows"),
    ("winkernel.sourceVip", "it is for Windows"),
];

/// The longest name of a link, `IFNAMSIZ` of `<linux/if.h>` without its end.
const LINK_NAME: usize = 15;

/// The whole of what is set, and what of it says nothing here; or all that is wrong. Times in the
/// configuration are as Go writes them afterwards.
pub(super) fn check(
    configuration: &mut Configuration,
    flags: &Run,
) -> Result<(Settings, Vec<String>), Vec<String>> {
    let mut check = Check {
        problems: Vec::new(),
        warnings: Vec::new(),
    };
    let times = check.times(configuration);
    let c = &*configuration;
    check.choice(
        "mode",
        &c.mode,
        &["", "ipvs", "iptables", "nftables"],
        "one of ipvs, iptables, nftables, or empty",
    );
    check.choice(
        "logging.format",
        &c.logging.format,
        &["text", "json"],
        "text or json",
    );
    check.range("oomScoreAdj", c.oom_score_adj, -1000, 1000);
    check.range(
        "clientConnection.burst",
        c.client_connection.burst,
        0,
        i32::MAX,
    );
    let max_per_core = check.range(
        "conntrack.maxPerCore",
        c.conntrack.max_per_core,
        0,
        i32::MAX,
    );
    let min = check.range("conntrack.min", c.conntrack.min, 0, i32::MAX);
    let settings = Settings {
        objects: check.objects(c, flags),
        master: flags.master.clone().filter(|master| !master.is_empty()),
        all_nodes: flags.watch_all_nodes.unwrap_or(false),
        node_name: check.node_name(&c.hostname_override),
        node_ips: flags.shape.node_ips.clone(),
        config: check.config(c, flags),
        iptables_backend: flags.iptables_backend.unwrap_or_default(),
        sync_period: times.sync_period,
        drift: flags.drift.unwrap_or(Drift::Repair),
        strict_arp: c.ipvs.strict_arp,
        timeouts: times.ipvs,
        conntrack: Conntrack {
            max_per_core,
            min,
            ..times.conntrack
        },
        healthz_bind_address: check.server("healthzBindAddress", &c.healthz_bind_address),
        metrics_bind_address: check.server("metricsBindAddress", &c.metrics_bind_address),
        bind_address_hard_fail: c.bind_address_hard_fail,
        oom_score_adj: c.oom_score_adj,
        log_format: match &*c.logging.format {
            "json" => LogFormat::Json,
            _ => LogFormat::Text,
        },
        verbosity: c.logging.verbosity,
    };
    check.not_applicable(c);
    gates::check(c, |path, text| check.warn(path, text));
    match check.problems.is_empty() {
        true => Ok((settings, check.warnings)),
        false => Err(check.problems),
    }
}

/// A field, and the flag that says the same.
fn label(path: &str) -> String {
    match FLAGS.iter().find(|(field, _)| *field == path) {
        Some((_, flag)) => format!("{path} ({flag})"),
        None => path.to_owned(),
    }
}

/// The times that are used.
struct Times {
    sync_period: Duration,
    ipvs: Timeouts,
    conntrack: Conntrack,
}

struct Check {
    problems: Vec<String>,
    warnings: Vec<String>,
}

impl Check {
    fn refuse(&mut self, path: &str, text: &str) {
        self.problems.push(format!("{}: {text}", label(path)));
    }

    fn warn(&mut self, path: &str, text: &str) {
        self.warnings.push(format!("{}: {text}", label(path)));
    }

    fn choice(&mut self, path: &str, value: &str, allowed: &[&str], words: &str) {
        if !allowed.contains(&value) {
            self.refuse(path, &format!("{value:?} must be {words}"));
        }
    }

    fn range(&mut self, path: &str, value: i32, from: i32, to: i32) -> u32 {
        if !(from..=to).contains(&value) {
            let allowed = match to {
                i32::MAX => format!("{from} or more"),
                _ => format!("from {from} to {to}"),
            };
            self.refuse(path, &format!("{value} must be {allowed}"));
        }
        u32::try_from(value).unwrap_or(0)
    }

    fn time(&mut self, path: &str, text: &mut String) -> Duration {
        match parse_duration(text) {
            Some(time) => {
                *text = format_duration(time);
                time
            }
            None => {
                let allowed = "must be a time such as 30s, 1h0m0s or 0s, and not below 0";
                self.refuse(path, &format!("{text:?} {allowed}"));
                Duration::ZERO
            }
        }
    }

    fn drain_timeout(&mut self, flags: &Run) -> DrainTimeout {
        let Some(text) = &flags.shape.drain_timeout else {
            return DrainTimeout::Unlimited;
        };
        parse_drain_timeout(text).unwrap_or_else(|| {
            let allowed =
                "must be a time such as 30s or 1h0m0s and not below 0, 0 for no limit, or now";
            self.refuse("--drain-timeout", &format!("{text:?} {allowed}"));
            DrainTimeout::Unlimited
        })
    }

    fn times(&mut self, c: &mut Configuration) -> Times {
        let before = self.problems.len();
        let config_sync = self.time("configSyncPeriod", &mut c.config_sync_period.0);
        let sync_period = self.time("ipvs.syncPeriod", &mut c.ipvs.sync_period.0);
        let min_sync = self.time("ipvs.minSyncPeriod", &mut c.ipvs.min_sync_period.0);
        let iptables_sync = self.time("iptables.syncPeriod", &mut c.iptables.sync_period.0);
        let iptables_min = self.time("iptables.minSyncPeriod", &mut c.iptables.min_sync_period.0);
        self.time("nftables.syncPeriod", &mut c.nftables.sync_period.0);
        self.time("nftables.minSyncPeriod", &mut c.nftables.min_sync_period.0);
        let ipvs = Timeouts {
            tcp: self.time("ipvs.tcpTimeout", &mut c.ipvs.tcp_timeout.0),
            tcp_fin: self.time("ipvs.tcpFinTimeout", &mut c.ipvs.tcp_fin_timeout.0),
            udp: self.time("ipvs.udpTimeout", &mut c.ipvs.udp_timeout.0),
        };
        let t = &mut c.conntrack;
        let conntrack = Conntrack {
            max_per_core: 0,
            min: 0,
            tcp_established: self.time(
                "conntrack.tcpEstablishedTimeout",
                &mut t.tcp_established_timeout.0,
            ),
            tcp_close_wait: self.time(
                "conntrack.tcpCloseWaitTimeout",
                &mut t.tcp_close_wait_timeout.0,
            ),
            tcp_be_liberal: t.tcp_be_liberal,
            udp: self.time("conntrack.udpTimeout", &mut t.udp_timeout.0),
            udp_stream: self.time("conntrack.udpStreamTimeout", &mut t.udp_stream_timeout.0),
        };
        // What could not be read was told of.
        if self.problems.len() == before {
            for (path, period) in [
                ("configSyncPeriod", config_sync),
                ("ipvs.syncPeriod", sync_period),
                ("iptables.syncPeriod", iptables_sync),
            ] {
                if period.is_zero() {
                    self.refuse(path, "0s must be longer than 0");
                }
            }
            for (path, min, of, period) in [
                (
                    "ipvs.minSyncPeriod",
                    min_sync,
                    "ipvs.syncPeriod",
                    sync_period,
                ),
                (
                    "iptables.minSyncPeriod",
                    iptables_min,
                    "iptables.syncPeriod",
                    iptables_sync,
                ),
            ] {
                if min > period && !period.is_zero() {
                    let (min, period) = (format_duration(min), format_duration(period));
                    self.refuse(
                        path,
                        &format!("{min} must be at most {of}, which is {period}"),
                    );
                }
            }
        }
        Times {
            sync_period,
            ipvs,
            conntrack,
        }
    }

    fn objects(&mut self, c: &Configuration, flags: &Run) -> Objects {
        let kubeconfig = &c.client_connection.kubeconfig;
        if flags.manifests.is_empty() {
            return match &**kubeconfig {
                "" => Objects::InCluster,
                file => Objects::Kubeconfig(file.into()),
            };
        }
        let api = [
            ("--kubeconfig", &flags.kubeconfig),
            ("--master", &flags.master),
        ];
        for (flag, value) in api {
            if value.as_ref().is_some_and(|value| !value.is_empty()) {
                self.problems.push(format!(
                    "--manifests and {flag} exclude each other: give one of them"
                ));
            }
        }
        if flags.kubeconfig.is_none() && !kubeconfig.is_empty() {
            let text = format!("{kubeconfig:?} is not used: --manifests goes before it");
            self.warn("clientConnection.kubeconfig", &text);
        }
        Objects::Manifests(flags.manifests.clone())
    }

    fn node_name(&mut self, text: &str) -> Option<String> {
        let name = text.trim().to_lowercase();
        if name.is_empty() && !text.is_empty() {
            self.refuse(
                "hostnameOverride",
                &format!("{text:?} must be the name of a node"),
            );
        }
        Some(name).filter(|name| !name.is_empty())
    }

    fn server(&mut self, path: &str, text: &str) -> Option<SocketAddr> {
        match text.parse::<SocketAddr>() {
            Ok(address) => Some(address).filter(|address| address.port() != 0),
            Err(_) => {
                let allowed =
                    "must be IP:PORT, as 0.0.0.0:10256 or [::]:10256; port 0 for no server";
                self.refuse(path, &format!("{text:?} {allowed}"));
                None
            }
        }
    }

    fn networks<'a>(&mut self, path: &str, texts: impl Iterator<Item = &'a str>) -> Vec<IpNet> {
        let mut networks = Vec::new();
        for text in texts.map(str::trim) {
            match text.parse() {
                Ok(network) => networks.push(network),
                Err(_) => {
                    self.refuse(
                        path,
                        &format!("{text:?} is not a network such as 10.244.0.0/16"),
                    );
                }
            }
        }
        networks
    }

    fn config(&mut self, c: &Configuration, flags: &Run) -> Config {
        let scheduler = match &*c.ipvs.scheduler {
            "" => Scheduler::RoundRobin,
            name => name.parse().unwrap_or_else(|error| {
                self.refuse("ipvs.scheduler", &format!("{error}"));
                Scheduler::RoundRobin
            }),
        };
        let bit = self.range("iptables.masqueradeBit", c.iptables.masquerade_bit, 0, 31);
        let drain_timeout = self.drain_timeout(flags);
        let bind_address = parse_address(c.bind_address.trim());
        if bind_address.is_none() {
            self.refuse(
                "bindAddress",
                &format!("{:?} must be an IP address", c.bind_address),
            );
        }
        let mut external_ips = self.allowed("--external-ips", flags.shape.external_ips.as_deref());
        if gates::denies_external_ips(c) {
            if external_ips != Allowed::All && external_ips != Allowed::Nothing {
                let text = "gives way to the feature gate AllowServiceExternalIPs=false: no external IP is served";
                self.warn("--external-ips", text);
            }
            external_ips = Allowed::Nothing;
        }
        let defaults = Config::default();
        let cluster_cidrs = self.cluster_cidrs(&c.cluster_cidr);
        let node_cidrs = c.detect_local_mode == "NodeCIDR";
        Config {
            scheduler,
            cluster_cidrs: match node_cidrs {
                true => Vec::new(),
                false => cluster_cidrs,
            },
            node_cidrs,
            pod_interface: self.pod_interface(c),
            masquerade_all: c.iptables.masquerade_all,
            masquerade_bit: u8::try_from(bit).unwrap_or(0),
            route_bit: self.route_bit(bit, flags),
            node_port_addresses: NodePortAddresses {
                bind_address: bind_address.filter(|address| !address.is_unspecified()),
                ..self.node_port_addresses(&c.node_port_addresses)
            },
            drain_timeout,
            exclude_cidrs: self.networks(
                "ipvs.excludeCIDRs",
                c.ipvs.exclude_cidrs.iter().map(String::as_str),
            ),
            external_ips,
            load_balancer_ips: self.allowed(
                "--load-balancer-ips",
                flags.shape.load_balancer_ips.as_deref(),
            ),
            keep_node_listeners: flags.shape.keep_node_listeners.unwrap_or(true),
            max_virtual_servers: flags
                .shape
                .max_virtual_servers_per_service
                .unwrap_or(defaults.max_virtual_servers),
            max_real_servers: flags
                .shape
                .max_real_servers_per_service
                .unwrap_or(defaults.max_real_servers),
            ..defaults
        }
    }

    /// Another bit than that which asks for masquerading.
    fn route_bit(&mut self, masquerade: u32, flags: &Run) -> u8 {
        let default = if masquerade == 13 { 12 } else { 13 };
        let bit = flags.shape.route_bit.unwrap_or(default);
        let bit = self.range("--route-bit", bit, 0, 31);
        if bit == masquerade {
            self.refuse(
                "--route-bit",
                &format!("{bit} is the bit that asks for masquerading (iptables.masqueradeBit)"),
            );
        }
        u8::try_from(bit).unwrap_or(0)
    }

    fn allowed(&mut self, flag: &str, words: Option<&[String]>) -> Allowed {
        let words: Vec<&str> = words.into_iter().flatten().map(|w| w.trim()).collect();
        match &*words {
            [] | ["allow"] => Allowed::All,
            ["deny"] => Allowed::Nothing,
            networks => {
                let networks = networks.iter().copied();
                for word in networks.clone().filter(|w| w.parse::<IpNet>().is_err()) {
                    let allowed = "must be allow, deny, or networks such as 203.0.113.0/24";
                    self.refuse(flag, &format!("{word:?} {allowed}"));
                }
                Allowed::Networks(networks.filter_map(|word| word.parse().ok()).collect())
            }
        }
    }

    fn cluster_cidrs(&mut self, text: &str) -> Vec<IpNet> {
        const PATH: &str = "clusterCIDR";
        let texts = text.split(',').filter(|_| !text.is_empty());
        let networks = self.networks(PATH, texts);
        for family in Family::ALL {
            let mut of_family = networks.iter().filter(|n| Family::of(n.addr()) == family);
            if let (Some(first), Some(second)) = (of_family.next(), of_family.next()) {
                let allowed = "at most one network for IPv4 and one for IPv6";
                self.refuse(
                    PATH,
                    &format!("{first} and {second} are of one family: {allowed}"),
                );
            }
        }
        networks
    }

    fn pod_interface(&mut self, c: &Configuration) -> Option<String> {
        let detect = &c.detect_local;
        let (path, name, end) = match &*c.detect_local_mode {
            "ClusterCIDR" | "NodeCIDR" => return None,
            "BridgeInterface" => ("detectLocal.bridgeInterface", &detect.bridge_interface, ""),
            "InterfaceNamePrefix" => {
                let path = "detectLocal.interfaceNamePrefix";
                (path, &detect.interface_name_prefix, "+")
            }
            other => {
                let allowed = "ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix";
                self.refuse(
                    "detectLocalMode",
                    &format!("{other:?} must be one of {allowed}"),
                );
                return None;
            }
        };
        let longest = LINK_NAME - end.len();
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
        if !(1..=longest).contains(&name.len()) || !name.chars().all(plain) {
            let mode = &c.detect_local_mode;
            let text = format!(
                "{name:?} must be the name of a link, or how it begins, of 1 to {longest} letters, digits and \
                 any of . _ - @, with detectLocalMode {mode}"
            );
            self.refuse(path, &text);
            return None;
        }
        Some(format!("{name}{end}"))
    }

    fn node_port_addresses(&mut self, words: &[String]) -> NodePortAddresses {
        const PATH: &str = "nodePortAddresses";
        let mut selected = NodePortAddresses::default();
        let mut all = false;
        for word in words.iter().map(|word| word.trim()) {
            match word {
                "all" => all = true,
                "primary" => selected.primary = true,
                "localhost" => {
                    selected.localhost = true;
                    self.warn(
                        PATH,
                        "localhost: IPVS serves no node port on loopback addresses",
                    );
                }
                _ => match word.parse() {
                    Ok(network) => selected.networks.push(network),
                    Err(_) => {
                        let allowed =
                            "a network such as 10.0.0.0/8, nor one of primary, localhost, all";
                        self.refuse(PATH, &format!("{word:?} is not {allowed}"));
                    }
                },
            }
        }
        match all {
            true => NodePortAddresses::default(),
            false => selected,
        }
    }

    /// Warns of what somebody set and what says nothing here.
    fn not_applicable(&mut self, c: &Configuration) {
        let (set, default) = (tree_of(c), tree_of(&Configuration::default()));
        for (path, why) in NOT_APPLICABLE {
            let at = |tree: &Value| {
                let field = |tree: &Value, name| tree.get(name).cloned();
                path.split('.')
                    .try_fold(tree.clone(), |tree, name| field(&tree, name))
            };
            let value = at(&set).unwrap_or_default();
            let harmless = path == "clientConnection.contentType" && value == "application/json";
            if !harmless && !is_empty(&value) && Some(&value) != at(&default).as_ref() {
                self.warn(path, &format!("{value} is not applicable: {why}"));
            }
        }
    }
}

/// Whether a field is as good as absent.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => matches!(&**text, "" | "0" | "0s"),
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Array(items) => items.iter().all(is_empty),
        Value::Object(fields) => fields.values().all(is_empty),
        Value::Bool(true) => false,
    }
}
