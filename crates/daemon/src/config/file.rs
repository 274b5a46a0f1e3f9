//! kube-proxy's own configuration file: its fields, their defaults, reading and writing it.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifests::yaml_documents;

/// The only version there is.
pub(crate) const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
/// The kind of the file.
pub(crate) const KIND: &str = "KubeProxyConfiguration";

/// The port of the health server, where an address has none.
const HEALTHZ_PORT: u16 = 10_256;
/// The port of the metrics server, where an address has none.
const METRICS_PORT: u16 = 10_249;

/// A time as it is written (`30s`, `1h0m0s`); whether it is one shows when it is checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Time(pub(crate) String);

impl Time {
    fn new(text: &str) -> Time {
        Time(text.to_owned())
    }

    /// Absent by Go's measure.
    fn is_zero(&self) -> bool {
        self.0.is_empty() || super::parse_duration(&self.0).is_some_and(|time| time.is_zero())
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Time;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time such as \"30s\" or \"1h0m0s\"")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Time, E> {
                if text.is_empty() {
                    return Err(E::invalid_value(Unexpected::Str(text), &self));
                }
                Ok(Time::new(text))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// `KubeProxyConfiguration`, with the names and the meaning that kube-proxy's has. Its default is
/// an empty file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Configuration {
    pub(crate) api_version: String,
    pub(crate) bind_address: String,
    pub(crate) bind_address_hard_fail: bool,
    pub(crate) client_connection: ClientConnection,
    #[serde(rename = "clusterCIDR")]
    pub(crate) cluster_cidr: String,
    pub(crate) config_sync_period: Time,
    pub(crate) conntrack: Conntrack,
    pub(crate) detect_local: DetectLocal,
    pub(crate) detect_local_mode: String,
    pub(crate) enable_profiling: bool,
    pub(crate) feature_gates: BTreeMap<String, bool>,
    pub(crate) healthz_bind_address: String,
    pub(crate) hostname_override: String,
    pub(crate) iptables: Iptables,
    pub(crate) ipvs: Ipvs,
    pub(crate) kind: String,
    pub(crate) logging: Logging,
    pub(crate) metrics_bind_address: String,
    pub(crate) mode: String,
    pub(crate) nftables: Nftables,
    pub(crate) node_port_addresses: Vec<String>,
    pub(crate) oom_score_adj: i32,
    pub(crate) port_range: String,
    pub(crate) show_hidden_metrics_for_version: String,
    pub(crate) windows_run_as_service: bool,
    pub(crate) winkernel: Winkernel,
}

/// How the API server is talked to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ClientConnection {
    pub(crate) accept_content_types: String,
    pub(crate) burst: i32,
    pub(crate) content_type: String,
    pub(crate) kubeconfig: String,
    pub(crate) qps: f32,
}

/// The sysctls of connection tracking.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Conntrack {
    pub(crate) max_per_core: i32,
    pub(crate) min: i32,
    pub(crate) tcp_be_liberal: bool,
    pub(crate) tcp_close_wait_timeout: Time,
    pub(crate) tcp_established_timeout: Time,
    pub(crate) udp_stream_timeout: Time,
    pub(crate) udp_timeout: Time,
}

/// By which link pods' packets enter.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct DetectLocal {
    pub(crate) bridge_interface: String,
    pub(crate) interface_name_prefix: String,
}

/// The mode iptables; masquerading is IPVS mode's, too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Iptables {
    pub(crate) localhost_node_ports: bool,
    pub(crate) masquerade_all: bool,
    pub(crate) masquerade_bit: i32,
    pub(crate) min_sync_period: Time,
    pub(crate) sync_period: Time,
}

/// The mode ipvs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Ipvs {
    #[serde(rename = "excludeCIDRs")]
    pub(crate) exclude_cidrs: Vec<String>,
    pub(crate) min_sync_period: Time,
    pub(crate) scheduler: String,
    #[serde(rename = "strictARP")]
    pub(crate) strict_arp: bool,
    pub(crate) sync_period: Time,
    pub(crate) tcp_fin_timeout: Time,
    pub(crate) tcp_timeout: Time,
    pub(crate) udp_timeout: Time,
}

/// The log. `flush_frequency` is a time or a number of nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Logging {
    pub(crate) flush_frequency: Value,
    pub(crate) format: String,
    pub(crate) options: Value,
    pub(crate) verbosity: u32,
    pub(crate) vmodule: Value,
}

/// The mode nftables.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Nftables {
    pub(crate) masquerade_all: bool,
    pub(crate) masquerade_bit: i32,
    pub(crate) min_sync_period: Time,
    pub(crate) sync_period: Time,
}

/// Windows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Winkernel {
    #[serde(rename = "enableDSR")]
    pub(crate) enable_dsr: bool,
    pub(crate) forward_health_check_vip: bool,
    pub(crate) network_name: String,
    pub(crate) root_hns_endpoint_name: String,
    pub(crate) source_vip: String,
}

impl Default for Configuration {
    fn default() -> Configuration {
        Configuration {
            api_version: API_VERSION.to_owned(),
            bind_address: "0.0.0.0".to_owned(),
            bind_address_hard_fail: false,
            client_connection: ClientConnection::default(),
            cluster_cidr: String::new(),
            config_sync_period: Time::new("15m0s"),
            conntrack: Conntrack::default(),
            detect_local: DetectLocal::default(),
            detect_local_mode: "ClusterCIDR".to_owned(),
            enable_profiling: false,
            feature_gates: BTreeMap::new(),
            // These two follow from bind_address.
            healthz_bind_address: String::new(),
            hostname_override: String::new(),
            iptables: Iptables::default(),
            ipvs: Ipvs::default(),
            kind: KIND.to_owned(),
            logging: Logging::default(),
            metrics_bind_address: String::new(),
            mode: "ipvs".to_owned(),
            nftables: Nftables::default(),
            node_port_addresses: Vec::new(),
            oom_score_adj: -999,
            port_range: String::new(),
            show_hidden_metrics_for_version: String::new(),
            windows_run_as_service: false,
            winkernel: Winkernel::default(),
        }
    }
}

impl Default for ClientConnection {
    fn default() -> ClientConnection {
        ClientConnection {
            accept_content_types: String::new(),
            burst: 10,
            content_type: "application/vnd.kubernetes.protobuf".to_owned(),
            kubeconfig: String::new(),
            qps: 5.0,
        }
    }
}

impl Default for Conntrack {
    fn default() -> Conntrack {
        Conntrack {
            max_per_core: 32_768,
            min: 131_072,
            tcp_be_liberal: false,
            tcp_close_wait_timeout: Time::new("1h0m0s"),
            tcp_established_timeout: Time::new("24h0m0s"),
            udp_stream_timeout: Time::new("0s"),
            udp_timeout: Time::new("0s"),
        }
    }
}

impl Default for Iptables {
    fn default() -> Iptables {
        Iptables {
            localhost_node_ports: true,
            masquerade_all: false,
            masquerade_bit: 14,
            min_sync_period: Time::new("1s"),
            sync_period: Time::new("30s"),
        }
    }
}

impl Default for Ipvs {
    fn default() -> Ipvs {
        Ipvs {
            exclude_cidrs: Vec::new(),
            min_sync_period: Time::new("0s"),
            scheduler: String::new(),
            strict_arp: false,
            sync_period: Time::new("30s"),
            tcp_fin_timeout: Time::new("0s"),
            tcp_timeout: Time::new("0s"),
            udp_timeout: Time::new("0s"),
        }
    }
}

impl Default for Logging {
    fn default() -> Logging {
        Logging {
            flush_frequency: Value::from("5s"),
            format: "text".to_owned(),
            options: serde_json::json!({
                "json": {"infoBufferSize": "0"},
                "text": {"infoBufferSize": "0"},
            }),
            verbosity: 0,
            vmodule: Value::Array(Vec::new()),
        }
    }
}

impl Default for Nftables {
    fn default() -> Nftables {
        Nftables {
            masquerade_all: false,
            masquerade_bit: 14,
            min_sync_period: Time::new("1s"),
            sync_period: Time::new("30s"),
        }
    }
}

impl Configuration {
    /// Reads a file's text, YAML or JSON; and what of it is not used, one line each. What is empty
    /// or zero where that can't be meant is the default, as kube-proxy has it.
    ///
    /// # Errors
    /// One line that names the field and what is wrong, without the name of the file.
    pub(crate) fn read(text: &str) -> Result<(Configuration, Vec<String>), String> {
        use serde_saphyr::options::DuplicateKeyPolicy::{Error as Refuse, LastWins};
        let mut warnings = Vec::new();
        let first = first_document(text, &mut warnings);
        let text = first.as_str();
        let mut tree = match parse(text, Refuse) {
            Err(serde_saphyr::Error::DuplicateMappingKey { key, location }) => {
                let key = key.unwrap_or_default();
                warnings.push(format!(
                    "line {}: {key:?} is there twice: the last one counts, as of any other key",
                    location.line()
                ));
                parse(text, LastWins)
            }
            other => other,
        }
        .map_err(|error| plain(&error))?;
        if !tree.is_object() {
            return Err(format!("is no {KIND}"));
        }
        without_nulls(&mut tree);
        let head = |field: &str| tree.get(field).cloned().unwrap_or_default();
        for (field, wanted) in [("kind", KIND), ("apiVersion", API_VERSION)] {
            let value = head(field);
            if value != wanted {
                return Err(format!("{field}: {value} must be {wanted:?}"));
            }
        }
        let known = tree_of(&Configuration::default());
        unknown(&tree, &known, "", &mut warnings);
        let mut read: Configuration = serde_path_to_error::deserialize(&tree)
            .map_err(|error| format!("{}: {}", error.path(), error.inner()))?;
        read.fill();
        Ok((read, warnings))
    }

    /// The text of a file that says this.
    ///
    /// # Errors
    /// Where it has no form in YAML; none is known.
    pub(crate) fn write(&self) -> Result<String, serde_saphyr::ser_error::Error> {
        serde_saphyr::to_string(self)
    }

    fn fill(&mut self) {
        let defaults = Configuration::default();
        let texts = [
            (&mut self.bind_address, defaults.bind_address),
            (&mut self.detect_local_mode, defaults.detect_local_mode),
            (&mut self.mode, defaults.mode),
            (&mut self.logging.format, defaults.logging.format),
            (
                &mut self.client_connection.content_type,
                defaults.client_connection.content_type,
            ),
        ];
        for (text, default) in texts {
            if text.is_empty() {
                *text = default;
            }
        }
        let times = [
            (&mut self.config_sync_period, defaults.config_sync_period),
            (&mut self.ipvs.sync_period, defaults.ipvs.sync_period),
            (
                &mut self.iptables.sync_period,
                defaults.iptables.sync_period,
            ),
            (
                &mut self.iptables.min_sync_period,
                defaults.iptables.min_sync_period,
            ),
            (
                &mut self.nftables.sync_period,
                defaults.nftables.sync_period,
            ),
            (
                &mut self.nftables.min_sync_period,
                defaults.nftables.min_sync_period,
            ),
        ];
        for (time, default) in times {
            if time.is_zero() {
                *time = default;
            }
        }
        if self.client_connection.qps == 0.0 {
            self.client_connection.qps = defaults.client_connection.qps;
        }
        if self.client_connection.burst == 0 {
            self.client_connection.burst = defaults.client_connection.burst;
        }
    }

    /// Fills in the addresses of the servers, which depend on the family of `bindAddress`, and
    /// these ports where an address has none.
    pub(crate) fn fill_addresses(&mut self, healthz: Option<u16>, metrics: Option<u16>) {
        let (any, loopback) = match self.bind_address.contains(':') {
            true => ("[::]", "[::1]"),
            false => ("0.0.0.0", "127.0.0.1"),
        };
        for (address, default, port) in [
            (
                &mut self.healthz_bind_address,
                any,
                healthz.unwrap_or(HEALTHZ_PORT),
            ),
            (
                &mut self.metrics_bind_address,
                loopback,
                metrics.unwrap_or(METRICS_PORT),
            ),
        ] {
            if address.is_empty() {
                *address = format!("{default}:{port}");
            } else if let Ok(alone) = address.parse() {
                *address = std::net::SocketAddr::new(alone, port).to_string();
            }
        }
    }
}

/// A configuration as a tree of fields.
pub(super) fn tree_of(configuration: &Configuration) -> Value {
    serde_json::to_value(configuration).unwrap_or_default()
}

/// The first of a text's documents, at its line; kube-proxy reads no other either.
fn first_document(text: &str, warnings: &mut Vec<String>) -> String {
    let mut documents = yaml_documents(text);
    let first = documents.next();
    if let Some((line, _)) = documents.next() {
        warnings.push(format!("line {line}: only the first document counts"));
    }
    first.map_or_else(String::new, |(line, text)| "\n".repeat(line - 1) + text)
}

fn parse(
    text: &str,
    duplicates: serde_saphyr::options::DuplicateKeyPolicy,
) -> Result<Value, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        duplicate_keys: duplicates,
        legacy_octal_numbers: true,
    };
    serde_saphyr::from_str_with_options(text, options)
}

/// A parser's error in one line.
fn plain(error: &serde_saphyr::Error) -> String {
    let text = error.without_snippet().to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A field that is null is one that is not there.
fn without_nulls(tree: &mut Value) {
    match tree {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

/// Notes the fields that a configuration has not, with their values.
fn unknown(tree: &Value, known: &Value, path: &str, warnings: &mut Vec<String>) {
    let (Value::Object(fields), Value::Object(known)) = (tree, known) else {
        return;
    };
    for (name, value) in fields {
        let path = match path {
            "" => name.clone(),
            path => format!("{path}.{name}"),
        };
        match known.get(name) {
            // Whatever names there are.
            Some(_) if matches!(&*path, "featureGates" | "logging.options") => {}
            Some(known) => unknown(value, known, &path, warnings),
            None => warnings.push(format!(
                "{path}: {value} is no field that is known: ignored"
            )),
        }
    }
}
