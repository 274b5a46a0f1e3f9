//! What the process is told: kube-proxy's own configuration file, unchanged, and flags, which go
//! before it. Both become [`Settings`], or all that is wrong with them.
//!
//! A field or flag that says nothing here (of another mode, of Windows) is named in a warning. A
//! field that kube-proxy's configuration has not is, too, and ignored, as kube-proxy does it.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipvs_netlink::Timeouts;
use ipvs_proxy_core::model::Node;
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_iptables::Choice;

use crate::cli::{Drift, LogFormat, Run};

mod check;
mod duration;
pub(crate) mod file;
mod gates;
#[cfg(test)]
mod tests;

pub use duration::{format_drain_timeout, format_duration, parse_drain_timeout, parse_duration};
use file::Configuration;

/// Everything that `run` and `plan` are told, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Where Services, EndpointSlices and Nodes come from.
    pub objects: Objects,
    /// The API server's address, where it is not the one that the kubeconfig or the pod's environment names.
    pub master: Option<String>,
    /// Whether the addresses of all Nodes are followed, so that no Service takes one from its node.
    pub all_nodes: bool,
    /// The name of this node; the host's where there is none.
    pub node_name: Option<String>,
    /// The node's addresses; those of its links where there are none.
    pub node_ips: Vec<IpAddr>,
    /// What shapes the kernel's state. Families, and what iptables can do, show later.
    pub config: Config,
    /// The iptables to use.
    pub iptables_backend: Choice,
    /// How often the kernel is compared with what it should hold. Never 0.
    pub sync_period: Duration,
    /// What to do with what somebody else changed.
    pub drift: Drift,
    /// Whether the sysctls of strict ARP are kept.
    pub strict_arp: bool,
    /// The timeouts of IPVS; zero leaves one as it is.
    pub timeouts: Timeouts,
    /// The sysctls of connection tracking.
    pub conntrack: Conntrack,
    /// Where the health server listens, if it does.
    pub healthz_bind_address: Option<SocketAddr>,
    /// Where the metrics server listens, if it does.
    pub metrics_bind_address: Option<SocketAddr>,
    /// A server that can't listen ends the process.
    pub bind_address_hard_fail: bool,
    /// `/proc/self/oom_score_adj`, -1000 to 1000.
    pub oom_score_adj: i32,
    /// The form of the log.
    pub log_format: LogFormat,
    /// How much is logged: 4 and more is debug, 6 and more is trace.
    pub verbosity: u32,
}

/// Where objects come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Objects {
    /// Files and directories, watched.
    Manifests(Vec<PathBuf>),
    /// The API server that this file names.
    Kubeconfig(PathBuf),
    /// The API server of the cluster in which this process is a pod.
    InCluster,
}

/// The sysctls of connection tracking. Zero leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conntrack {
    /// Connections for each processor.
    pub max_per_core: u32,
    /// Connections whatever the number of processors.
    pub min: u32,
    /// How long an established TCP connection is kept without traffic.
    pub tcp_established: Duration,
    /// The same of one whose client is gone (`CLOSE_WAIT`).
    pub tcp_close_wait: Duration,
    /// Packets out of a TCP connection's window are not INVALID. `false` leaves it as it is.
    pub tcp_be_liberal: bool,
    /// How long a flow of UDP is kept without traffic.
    pub udp: Duration,
    /// The same of one that was answered for some time.
    pub udp_stream: Duration,
}

/// No more connections than this come out of [`Conntrack::max`], as in kube-proxy.
const MOST_CONNECTIONS: u32 = 1 << 20;

impl Conntrack {
    /// `nf_conntrack_max` with so many processors; `None` leaves it as it is.
    #[must_use]
    pub fn max(&self, processors: u32) -> Option<u32> {
        let wanted = self.max_per_core.saturating_mul(processors).max(self.min);
        (self.max_per_core > 0).then_some(wanted.min(MOST_CONNECTIONS))
    }
}

impl Settings {
    /// The node as flags say it, `None` where they don't.
    #[must_use]
    pub fn node(&self) -> Option<Node> {
        (!self.node_ips.is_empty()).then(|| Node {
            addresses: self.node_ips.iter().copied().collect(),
            primary: Node::primary_of(&self.node_ips),
            zone: None,
        })
    }

    /// From where on the log is left out.
    #[must_use]
    pub fn log_level(&self) -> tracing::Level {
        match self.verbosity {
            0..4 => tracing::Level::INFO,
            4..6 => tracing::Level::DEBUG,
            _ => tracing::Level::TRACE,
        }
    }
}

/// Settings, and what a user should know about them.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// What counts.
    pub settings: Settings,
    /// What says nothing here, a line each.
    pub warnings: Vec<String>,
    configuration: Configuration,
}

impl Loaded {
    /// What counts, as `/configz` shows it: kube-proxy's form, and beside it what kube-proxy has not.
    #[must_use]
    pub fn running(&self, node_name: &str) -> serde_json::Value {
        let settings = &self.settings;
        let addresses = settings.node_ips.iter().map(ToString::to_string);
        serde_json::json!({
            "kubeproxy.config.k8s.io": self.configuration,
            "ipvs-proxy": {
                "nodeName": node_name,
                "nodeIPs": addresses.collect::<Vec<_>>(),
                "drainTimeout": format_drain_timeout(settings.config.drain_timeout),
                "drift": format!("{:?}", settings.drift).to_lowercase(),
                "master": settings.master,
                "watchAllNodes": settings.all_nodes,
            },
        })
    }

    /// Writes a file that says the same to kube-proxy, and here together with those flags that
    /// kube-proxy has not.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        use anyhow::Context as _;
        let text = self.configuration.write()?;
        fs::write(path, text).with_context(|| format!("{} can't be written", path.display()))
    }
}

/// Reads the file that the flags name, if they do, and lets the flags go before it.
///
/// # Errors
/// All that is wrong, a line each.
pub fn load(flags: &Run) -> Result<Loaded, Vec<String>> {
    let Some(path) = &flags.shape.config else {
        return resolve(flags, None);
    };
    let name = path.display().to_string();
    match crate::manifests::read_text_file(path) {
        Ok(text) => resolve(flags, Some((&name, &text))),
        Err(error) => Err(vec![format!("{name}: can't be read: {error}")]),
    }
}

/// As [`load`], with a file's name and text.
///
/// # Errors
/// All that is wrong, a line each.
pub fn resolve(flags: &Run, file: Option<(&str, &str)>) -> Result<Loaded, Vec<String>> {
    let (mut configuration, mut warnings) = match file {
        None => (Configuration::default(), Vec::new()),
        Some((name, text)) => {
            let named = |line: String| format!("{name}: {line}");
            let (read, warnings) = Configuration::read(text).map_err(|error| vec![named(error)])?;
            (read, warnings.into_iter().map(named).collect())
        }
    };
    let of_file = configuration.ipvs.scheduler.clone();
    flags.overlay(&mut configuration);
    let scheduler = &configuration.ipvs.scheduler;
    // The manifests name a scheduler, and the file may be kube-proxy's own.
    if !of_file.is_empty() && of_file != *scheduler {
        warnings.push(format!(
            "ipvs.scheduler: {of_file:?} of the file gives way to --scheduler={scheduler}"
        ));
    }
    configuration.fill_addresses(flags.healthz_port, flags.metrics_port);
    let (settings, more) = check::check(&mut configuration, flags)?;
    warnings.extend(flags.no_effect());
    warnings.extend(more);
    Ok(Loaded {
        settings,
        warnings,
        configuration,
    })
}
