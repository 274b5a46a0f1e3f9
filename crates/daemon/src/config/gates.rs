//! Feature gates: those of kube-proxy 1.37 (`pkg/features`, `component-base`), each obeyed or named as saying nothing
//! here, whether it is true or false.

use super::file::Configuration;

/// Off, it takes all external IPs away (CVE-2020-8554).
const EXTERNAL_IPS: &str = "AllowServiceExternalIPs";

/// The gates that kube-proxy's own code asks for. All others are of other components, which share the list.
const OF_KUBE_PROXY: [(&str, &str); 17] = [
    ("AllAlpha", "no gate that is obeyed here is alpha"),
    ("AllBeta", "no gate that is obeyed here is beta"),
    (
        "ComponentFlagz",
        "there is no /flagz; /configz shows what counts",
    ),
    (
        "ComponentStatusz",
        "there is no /statusz; /readyz?verbose shows the state",
    ),
    ("ContextualLogging", "every line has its fields"),
    ("KubeProxyIPVS", "the mode is always ipvs"),
    (
        "KubeProxyNFTablesLocalhostNodePorts",
        "it is for mode nftables",
    ),
    ("LoggingAlphaOptions", "the log has no such options"),
    ("LoggingBetaOptions", "the log has no such options"),
    ("LoggingStableOptions", "the log has no such options"),
    (
        "MultiCIDRServiceAllocator",
        "ServiceCIDRs are not looked at",
    ),
    ("NFTablesNetlink", "it is for mode nftables"),
    ("NFTablesProxyMode", "it is for mode nftables"),
    ("NativeHistograms", "metrics have no native histograms"),
    (
        "PreferSameTrafficDistribution",
        "hints are not looked at yet: every endpoint is used",
    ),
    ("WinDSR", "it is for Windows"),
    ("WinOverlay", "it is for Windows"),
];

/// Whether no external IP is to be served.
pub(super) fn denies_external_ips(c: &Configuration) -> bool {
    c.feature_gates.get(EXTERNAL_IPS) == Some(&false)
}

/// Names the gates that say nothing here.
pub(super) fn check(c: &Configuration, mut warn: impl FnMut(&str, &str)) {
    for (name, on) in &c.feature_gates {
        if name == EXTERNAL_IPS {
            continue;
        }
        let known = OF_KUBE_PROXY.iter().find(|(known, _)| known == name);
        let why = known.map_or("it is none that kube-proxy asks for", |(_, why)| why);
        warn(
            "featureGates",
            &format!("{name}={on} is not applicable: {why}"),
        );
    }
}
