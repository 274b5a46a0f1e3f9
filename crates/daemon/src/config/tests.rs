use clap::Parser as _;
use ipvs_proxy_core::guard::Allowed;
use proptest::prelude::*;

use super::*;
use crate::cli::{Cli, Command};

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

fn flags(words: &[&str]) -> Run {
    let words = ["ipvs-proxy", "run"].iter().chain(words);
    match Cli::try_parse_from(words).unwrap().command {
        Command::Run(run) => *run,
        other => panic!("{other:?}"),
    }
}

fn both(text: &str, words: &[&str]) -> Result<Loaded, Vec<String>> {
    resolve(&flags(words), Some(("c.yaml", text)))
}

fn of_file(text: &str) -> Result<Loaded, Vec<String>> {
    both(&format!("{HEAD}{text}"), &[])
}

fn of_flags(words: &[&str]) -> Result<Loaded, Vec<String>> {
    resolve(&flags(words), None)
}

/// Both as text of all they hold, so that a case can say what it looks for in one word.
fn said(settings: &Settings) -> String {
    format!("{settings:?}")
}

#[test]
fn the_file_of_kubeadm_is_taken_without_a_word() {
    let text = include_str!("kubeadm.yaml");
    let Loaded {
        settings, warnings, ..
    } = both(text, &[]).unwrap();
    assert_eq!(warnings, [""; 0]);
    let file = "/var/lib/kube-proxy/kubeconfig.conf".into();
    assert_eq!(settings.objects, Objects::Kubeconfig(file));
    let cidrs = ["10.244.0.0/16".parse().unwrap()];
    assert_eq!(settings.config.cluster_cidrs, cidrs);
    assert!(settings.strict_arp);
    let name = settings.config.scheduler.to_string();
    assert_eq!(
        (&*name, settings.sync_period),
        ("lc", Duration::from_secs(30))
    );
    // What it leaves empty is kube-proxy's default.
    let default = of_flags(&[]).unwrap().settings;
    assert_eq!(
        Settings {
            objects: Objects::InCluster,
            strict_arp: false,
            config: default.config.clone(),
            ..settings
        },
        default
    );
}

#[test]
fn nothing_given_is_the_defaults() {
    let settings = of_flags(&[]).unwrap().settings;
    assert_eq!(settings, of_file("").unwrap().settings);
    assert_eq!(settings.healthz_bind_address, "0.0.0.0:10256".parse().ok());
    assert_eq!(
        settings.metrics_bind_address,
        "127.0.0.1:10249".parse().ok()
    );
    assert_eq!(settings.config, Config::default());
    assert_eq!(
        (settings.oom_score_adj, settings.log_level()),
        (-999, tracing::Level::INFO)
    );
    assert_eq!(settings.master, None);
    let conntrack = settings.conntrack;
    assert_eq!(conntrack.tcp_established, Duration::from_secs(86_400));
    assert_eq!(conntrack.tcp_close_wait, Duration::from_secs(3_600));
    // The greater of both, and a bound.
    for (processors, max) in [(1, 131_072), (8, 262_144), (64, 1 << 20)] {
        assert_eq!(conntrack.max(processors), Some(max));
    }
    let off = Conntrack {
        max_per_core: 0,
        ..conntrack
    };
    assert_eq!(off.max(8), None);
}

/// Each field with its flag: both say the same, and the flag goes before a field that says else.
#[test]
fn fields_and_flags() {
    for (field, flag, other, seen) in [
        (
            "bindAddress: 10.0.0.7",
            "--bind-address=10.0.0.7",
            "bindAddress: 10.0.0.8",
            "bind_address: Some(10.0.0.7)",
        ),
        (
            "bindAddressHardFail: true",
            "--bind-address-hard-fail",
            "bindAddressHardFail: false",
            "hard_fail: true",
        ),
        (
            "clientConnection: {kubeconfig: /a}",
            "--kubeconfig=/a",
            "clientConnection: {kubeconfig: /b}",
            "Kubeconfig(\"/a\")",
        ),
        (
            "clusterCIDR: '10.1.0.0/16,fd00::/64'",
            "--cluster-cidr=10.1.0.0/16,fd00::/64",
            "clusterCIDR: 10.2.0.0/16",
            "[10.1.0.0/16, fd00::/64]",
        ),
        (
            "conntrack: {maxPerCore: 5}",
            "--conntrack-max-per-core=5",
            "conntrack: {maxPerCore: 6}",
            "max_per_core: 5,",
        ),
        (
            "conntrack: {min: 5}",
            "--conntrack-min=5",
            "conntrack: {min: 6}",
            " min: 5,",
        ),
        (
            "conntrack: {tcpBeLiberal: true}",
            "--conntrack-tcp-be-liberal=true",
            "conntrack: {tcpBeLiberal: false}",
            "be_liberal: true",
        ),
        (
            "conntrack: {tcpCloseWaitTimeout: 5s}",
            "--conntrack-tcp-timeout-close-wait=5s",
            "conntrack: {tcpCloseWaitTimeout: 6s}",
            "close_wait: 5s",
        ),
        (
            "conntrack: {tcpEstablishedTimeout: 0s}",
            "--conntrack-tcp-timeout-established=0",
            "conntrack: {tcpEstablishedTimeout: 6s}",
            "established: 0ns",
        ),
        (
            "conntrack: {udpTimeout: 5s}",
            "--conntrack-udp-timeout=5s",
            "conntrack: {udpTimeout: 6s}",
            "udp: 5s, udp_stream: 0ns",
        ),
        (
            "conntrack: {udpStreamTimeout: 5s}",
            "--conntrack-udp-timeout-stream=5s",
            "conntrack: {udpStreamTimeout: 6s}",
            "udp_stream: 5s",
        ),
        (
            "healthzBindAddress: '10.0.0.7:1'",
            "--healthz-bind-address=10.0.0.7:1",
            "healthzBindAddress: '10.0.0.7:2'",
            "healthz_bind_address: Some(10.0.0.7:1)",
        ),
        (
            "healthzBindAddress: '0.0.0.0:0'",
            "--healthz-bind-address=",
            "healthzBindAddress: '10.0.0.7:2'",
            "healthz_bind_address: None",
        ),
        (
            "healthzBindAddress: '0.0.0.0:7'",
            "--healthz-port=7",
            "healthzBindAddress: ''",
            "healthz_bind_address: Some(0.0.0.0:7)",
        ),
        (
            "metricsBindAddress: '127.0.0.1:0'",
            "--metrics-port=0",
            "metricsBindAddress: 127.0.0.1",
            "metrics_bind_address: None",
        ),
        (
            "metricsBindAddress: '::1'",
            "--metrics-bind-address=::1",
            "metricsBindAddress: 10.0.0.7",
            "metrics_bind_address: Some([::1]:10249)",
        ),
        (
            "hostnameOverride: ' Node1'",
            "--hostname-override=Node1",
            "hostnameOverride: node2",
            "node_name: Some(\"node1\")",
        ),
        (
            "iptables: {masqueradeAll: true}",
            "--masquerade-all",
            "iptables: {masqueradeAll: false}",
            "masquerade_all: true",
        ),
        (
            "iptables: {masqueradeBit: 0}",
            "--iptables-masquerade-bit=0",
            "iptables: {masqueradeBit: 15}",
            "masquerade_bit: 0",
        ),
        (
            "iptables: {masqueradeBit: 014}",
            "--iptables-masquerade-bit=12",
            "iptables: {masqueradeBit: 15}",
            "masquerade_bit: 12",
        ),
        (
            "ipvs: {excludeCIDRs: [10.1.0.0/16, 'fd00::/64']}",
            "--ipvs-exclude-cidrs=10.1.0.0/16,fd00::/64",
            "ipvs: {excludeCIDRs: [10.2.0.0/16]}",
            "exclude_cidrs: [10.1.0.0/16, fd00::/64]",
        ),
        (
            "ipvs: {scheduler: sh}",
            "--ipvs-scheduler=sh",
            "ipvs: {scheduler: lc}",
            "scheduler: SourceHash",
        ),
        (
            "ipvs: {scheduler: ''}",
            "--scheduler=",
            "ipvs: {scheduler: lc}",
            "scheduler: RoundRobin",
        ),
        (
            "ipvs: {strictARP: true}",
            "--ipvs-strict-arp",
            "ipvs: {strictARP: false}",
            "strict_arp: true",
        ),
        (
            "ipvs: {syncPeriod: 2h22m}",
            "--ipvs-sync-period=2h22m",
            "ipvs: {syncPeriod: 7s}",
            "sync_period: 8520s",
        ),
        (
            "ipvs: {tcpTimeout: 2h0m0s}",
            "--ipvs-tcp-timeout=2h",
            "ipvs: {tcpTimeout: 7s}",
            "tcp: 7200s",
        ),
        (
            "ipvs: {tcpFinTimeout: 2m}",
            "--ipvs-tcpfin-timeout=2m",
            "ipvs: {tcpFinTimeout: 7s}",
            "tcp_fin: 120s",
        ),
        (
            "ipvs: {udpTimeout: 30s}",
            "--ipvs-udp-timeout=30s",
            "ipvs: {udpTimeout: 7s}",
            "udp: 30s }, conntrack",
        ),
        (
            "logging: {format: json}",
            "--logging-format=json",
            "logging: {format: text}",
            "log_format: Json",
        ),
        (
            "logging: {verbosity: 4}",
            "--v=4",
            "logging: {verbosity: 1}",
            "verbosity: 4",
        ),
        (
            "nodePortAddresses: [primary, 10.0.0.0/8]",
            "--nodeport-addresses=primary,10.0.0.0/8",
            "nodePortAddresses: [all]",
            "networks: [10.0.0.0/8], primary: true",
        ),
        (
            "nodePortAddresses: []",
            "--nodeport-addresses=",
            "nodePortAddresses: [primary]",
            "primary: false",
        ),
        (
            "oomScoreAdj: 0",
            "--oom-score-adj=0",
            "oomScoreAdj: -7",
            "oom_score_adj: 0",
        ),
    ] {
        let file = of_file(field).unwrap();
        assert!(said(&file.settings).contains(seen), "{field}: {file:#?}");
        let of_flag = of_flags(&[flag]).unwrap();
        assert_eq!(of_flag.settings, file.settings, "{flag}");
        let mixed = both(&format!("{HEAD}{other}"), &[flag]).unwrap();
        assert_eq!(mixed.settings, file.settings, "{flag} before {other}");
        let without = of_file(other).unwrap();
        assert_ne!(without.settings, file.settings, "{other} is another");
        for loaded in [file, of_flag, mixed] {
            let mut warnings = loaded.warnings;
            warnings.retain(|warning| !warning.contains("gives way to --scheduler"));
            assert_eq!(warnings, [""; 0], "{field}");
        }
    }
    for (mode, field, flags, seen) in [
        (
            "BridgeInterface",
            "bridgeInterface: cbr0",
            "--pod-bridge-interface=cbr0",
            "Some(\"cbr0\")",
        ),
        (
            "InterfaceNamePrefix",
            "interfaceNamePrefix: cali",
            "--pod-interface-name-prefix=cali",
            "Some(\"cali+\")",
        ),
    ] {
        let file = of_file(&format!(
            "detectLocalMode: {mode}\ndetectLocal: {{{field}}}"
        ))
        .unwrap();
        let of_flags = of_flags(&[&format!("--detect-local-mode={mode}"), flags]).unwrap();
        assert_eq!(file.settings, of_flags.settings);
        assert!(said(&file.settings).contains(seen), "{file:?}");
    }
    // The Node's networks go before those of the cluster.
    let of_node = both(
        &format!("{HEAD}detectLocalMode: NodeCIDR\nclusterCIDR: 10.244.0.0/16"),
        &[],
    )
    .unwrap();
    assert_eq!(of_node.warnings, [""; 0]);
    assert_eq!(
        of_node.settings,
        of_flags(&["--detect-local-mode=NodeCIDR"])
            .unwrap()
            .settings
    );
    assert!(of_node.settings.config.node_cidrs);
    assert_eq!(of_node.settings.config.cluster_cidrs, []);
    let six = of_flags(&["--bind-address=::"]).unwrap().settings;
    assert_eq!(six.healthz_bind_address, "[::]:10256".parse().ok());
    assert_eq!(six.metrics_bind_address, "[::1]:10249".parse().ok());
}

#[test]
fn the_source_of_objects() {
    let manifests = Objects::Manifests(vec!["/m".into()]);
    let given = of_flags(&["--manifests=/m"]).unwrap();
    assert_eq!(given.settings.objects, manifests);
    assert_eq!(of_flags(&[]).unwrap().settings.objects, Objects::InCluster);
    let master = of_flags(&["--master=https://a:6443"])
        .unwrap()
        .settings
        .master;
    assert_eq!(master.as_deref(), Some("https://a:6443"));
    for other in ["--kubeconfig=/k", "--master=https://a"] {
        let problems = of_flags(&["--manifests=/m", other]).unwrap_err();
        assert!(problems[0].contains("exclude each other"), "{problems:?}");
    }
    let file = format!("{HEAD}clientConnection: {{kubeconfig: /k}}");
    let beaten = both(&file, &["--manifests=/m"]).unwrap();
    assert_eq!(beaten.settings.objects, manifests);
    assert!(
        beaten.warnings[0].contains("\"/k\" is not used"),
        "{:?}",
        beaten.warnings
    );
}

/// What is not applicable is named with its value, by file and by flag; as it is by default, it is not.
#[test]
fn what_is_not_applicable() {
    for (field, flag, texts) in [
        (
            "clientConnection: {acceptContentTypes: a/b}",
            "",
            ["clientConnection.acceptContentTypes", "a/b"],
        ),
        (
            "clientConnection: {contentType: a/b}",
            "--kube-api-content-type=a/b",
            [
                "clientConnection.contentType (--kube-api-content-type)",
                "a/b",
            ],
        ),
        (
            "clientConnection: {qps: 7.5}",
            "--kube-api-qps=7.5",
            ["clientConnection.qps (--kube-api-qps)", "7.5"],
        ),
        (
            "clientConnection: {burst: 77}",
            "--kube-api-burst=77",
            ["clientConnection.burst (--kube-api-burst)", "77"],
        ),
        (
            "configSyncPeriod: 1m",
            "--config-sync-period=1m",
            ["configSyncPeriod (--config-sync-period)", "1m0s"],
        ),
        (
            "enableProfiling: true",
            "--profiling",
            ["enableProfiling", "true"],
        ),
        (
            "iptables: {syncPeriod: 1m}",
            "--iptables-sync-period=1m",
            ["iptables.syncPeriod", "1m0s"],
        ),
        (
            "iptables: {minSyncPeriod: 2s}",
            "--iptables-min-sync-period=2s",
            ["iptables.minSyncPeriod", "2s"],
        ),
        (
            "ipvs: {minSyncPeriod: 2s}",
            "--ipvs-min-sync-period=2s",
            ["ipvs.minSyncPeriod (--ipvs-min-sync-period)", "2s"],
        ),
        (
            "logging: {flushFrequency: 7000}",
            "",
            ["logging.flushFrequency", "7000"],
        ),
        (
            "logging: {flushFrequency: 7s}",
            "--log-flush-frequency=7s",
            ["logging.flushFrequency", "7s"],
        ),
        (
            "logging: {options: {json: {infoBufferSize: 1k}, text: {infoBufferSize: '0'}}}",
            "--log-json-info-buffer-size=1k",
            ["logging.options", "1k"],
        ),
        (
            "logging: {vmodule: [{filePattern: a, verbosity: 5}]}",
            "--vmodule=a=5",
            ["logging.vmodule", r#"{"filePattern":"a","verbosity":5}"#],
        ),
        (
            "mode: nftables",
            "--proxy-mode=nftables",
            ["mode (--proxy-mode)", "nftables"],
        ),
        (
            "nftables: {masqueradeAll: true}",
            "",
            ["nftables.masqueradeAll", "true"],
        ),
        (
            "nftables: {masqueradeBit: 15}",
            "",
            ["nftables.masqueradeBit", "15"],
        ),
        (
            "nftables: {syncPeriod: 1m}",
            "",
            ["nftables.syncPeriod", "1m0s"],
        ),
        (
            "nftables: {minSyncPeriod: 2s}",
            "",
            ["nftables.minSyncPeriod", "2s"],
        ),
        ("portRange: 1-2", "", ["portRange", "1-2"]),
        (
            "showHiddenMetricsForVersion: '1.30'",
            "--show-hidden-metrics-for-version=1.30",
            ["showHiddenMetricsForVersion", "1.30"],
        ),
        (
            "windowsRunAsService: true",
            "",
            ["windowsRunAsService", "true"],
        ),
        (
            "winkernel: {enableDSR: true}",
            "",
            ["winkernel.enableDSR", "true"],
        ),
        (
            "winkernel: {forwardHealthCheckVip: true}",
            "",
            ["winkernel.forwardHealthCheckVip", "true"],
        ),
        (
            "winkernel: {networkName: net7}",
            "",
            ["winkernel.networkName", "net7"],
        ),
        (
            "winkernel: {rootHnsEndpointName: end7}",
            "",
            ["winkernel.rootHnsEndpointName", "end7"],
        ),
        (
            "winkernel: {sourceVip: vip7}",
            "",
            ["winkernel.sourceVip", "vip7"],
        ),
    ] {
        let file = of_file(field).unwrap();
        let [warning] = &file.warnings[..] else {
            panic!("{field}: {:?}", file.warnings)
        };
        for text in texts.into_iter().chain(["is not applicable"]) {
            assert!(warning.contains(text), "{text} is not in {warning}");
        }
        if !flag.is_empty() {
            let of_flag = of_flags(&[flag]).unwrap();
            assert_eq!(of_flag.warnings, file.warnings, "{flag}");
        }
    }
    // Flags of old releases.
    let old = of_flags(&[
        "--logtostderr",
        "--alsologtostderr=true",
        "--log-dir",
        "/var/log",
    ]);
    let old = old.unwrap().warnings;
    assert_eq!(old.len(), 3, "{old:?}");
    assert!(old[0].starts_with("--log-dir: "), "{old:?}");
}

#[test]
fn fields_that_are_not_known_are_named_and_ignored() {
    let text = "resourceContainer: /kube-proxy\nudpIdleTimeout: 250ms\nipvs: {masqueradeAll: true, strictARP: true}\nconntrack: {max: null}\n";
    let loaded = of_file(text).unwrap();
    assert!(loaded.settings.strict_arp);
    let start = "c.yaml: ";
    for (line, texts) in loaded.warnings.iter().zip([
        ["ipvs.masqueradeAll", "true"],
        ["resourceContainer", "/kube-proxy"],
        ["udpIdleTimeout", "250ms"],
    ]) {
        let all = line.starts_with(start) && texts.iter().all(|text| line.contains(text));
        assert!(all, "{line}");
    }
    assert_eq!(loaded.warnings.len(), 3, "{:?}", loaded.warnings);
    let twice = of_file("mode: iptables\nmode: ipvs\n").unwrap();
    let [warning] = &twice.warnings[..] else {
        panic!("{:?}", twice.warnings)
    };
    assert!(
        warning.starts_with("c.yaml: line 4: \"mode\" is there twice"),
        "{warning}"
    );
}

#[test]
fn a_file_that_is_none() {
    let json = format!(
        "{{\"apiVersion\": \"{}\", \"kind\": \"{}\", \"mode\": \"ipvs\"}}",
        file::API_VERSION,
        file::KIND
    );
    assert_eq!(both(&json, &[]).unwrap().warnings, [""; 0]);
    for (text, texts) in [
        ("", ["c.yaml: ", "KubeProxyConfiguration"]),
        ("kind: [", ["c.yaml: ", "line"]),
        (
            "apiVersion: v1\nkind: ConfigMap\n",
            [
                "c.yaml: kind: \"ConfigMap\"",
                "must be \"KubeProxyConfiguration\"",
            ],
        ),
        (
            "kind: KubeProxyConfiguration\n",
            [
                "c.yaml: apiVersion: null",
                "must be \"kubeproxy.config.k8s.io/v1alpha1\"",
            ],
        ),
    ] {
        let problems = both(text, &[]).unwrap_err();
        let all = problems.len() == 1 && texts.iter().all(|text| problems[0].contains(text));
        assert!(all, "{text}: {problems:?}");
    }
    for (text, texts) in [
        (
            "ipvs: {syncPeriod: 30}",
            [
                "c.yaml: ipvs.syncPeriod: ",
                "integer `30`",
                "a time such as \"30s\"",
            ],
        ),
        (
            "ipvs: {syncPeriod: ''}",
            [
                "c.yaml: ipvs.syncPeriod: ",
                "string \"\"",
                "a time such as \"30s\"",
            ],
        ),
        (
            "ipvs: {strictARP: maybe}",
            [
                "c.yaml: ipvs.strictARP: ",
                "string \"maybe\"",
                "expected a boolean",
            ],
        ),
        (
            "conntrack: {maxPerCore: many}",
            [
                "c.yaml: conntrack.maxPerCore: ",
                "string \"many\"",
                "expected i32",
            ],
        ),
        (
            "nodePortAddresses: primary",
            [
                "c.yaml: nodePortAddresses: ",
                "string \"primary\"",
                "expected a sequence",
            ],
        ),
        (
            "featureGates: {A: 7}",
            [
                "c.yaml: featureGates.A: ",
                "integer `7`",
                "expected a boolean",
            ],
        ),
    ] {
        let problems = of_file(text).unwrap_err();
        let all = problems.len() == 1 && texts.iter().all(|text| problems[0].contains(text));
        assert!(all, "{text}: {problems:?}");
    }
}

/// One line for each value that can't be: the field with its flag, the value, what is allowed.
#[test]
fn all_that_is_wrong_at_once() {
    let cases = [
        (
            "bindAddress: host",
            "bindAddress (--bind-address): \"host\" must be an IP address",
        ),
        (
            "clientConnection: {burst: -1}",
            "clientConnection.burst (--kube-api-burst): -1 must be 0 or more",
        ),
        (
            "clusterCIDR: '10.0.0.0/33'",
            "clusterCIDR (--cluster-cidr): \"10.0.0.0/33\" is not a network such as",
        ),
        (
            "configSyncPeriod: -1m",
            "configSyncPeriod (--config-sync-period): \"-1m\" must be a time",
        ),
        (
            "conntrack: {maxPerCore: -1, min: -2, udpTimeout: -3s, tcpEstablishedTimeout: x}",
            "conntrack.min (--conntrack-min): -2 must be 0 or more",
        ),
        (
            "detectLocalMode: Magic",
            "detectLocalMode (--detect-local-mode): \"Magic\" must be one of ClusterCIDR, NodeCIDR",
        ),
        (
            "healthzBindAddress: 'host:1'",
            "healthzBindAddress (--healthz-bind-address): \"host:1\" must be IP:PORT",
        ),
        (
            "hostnameOverride: ' '",
            "hostnameOverride (--node-name): \" \" must be the name",
        ),
        (
            "iptables: {masqueradeBit: 32}",
            "iptables.masqueradeBit (--iptables-masquerade-bit): 32 must be from 0 to 31",
        ),
        (
            "ipvs: {scheduler: r r, excludeCIDRs: [10.0.0.1], tcpTimeout: 1d}",
            "ipvs.excludeCIDRs (--ipvs-exclude-cidrs): \"10.0.0.1\" is not a network",
        ),
        (
            "logging: {format: xml}",
            "logging.format (--log-format): \"xml\" must be text or json",
        ),
        (
            "metricsBindAddress: '[::1]:70000'",
            "metricsBindAddress (--metrics-bind-address): \"[::1]:70000\" must be IP:PORT",
        ),
        (
            "mode: userspace",
            "mode (--proxy-mode): \"userspace\" must be one of ipvs, iptables, nftables, or empty",
        ),
        (
            "nodePortAddresses: [eth0]",
            "nodePortAddresses (--nodeport-addresses): \"eth0\" is not a network",
        ),
        (
            "oomScoreAdj: 1001",
            "oomScoreAdj (--oom-score-adj): 1001 must be from -1000 to 1000",
        ),
    ];
    let mut all = String::new();
    for (text, wanted) in cases {
        let problems = of_file(text).unwrap_err();
        assert!(
            problems.iter().any(|line| line.starts_with(wanted)),
            "{problems:?}"
        );
        all += text;
        all += "\n";
    }
    let problems = of_file(&all).unwrap_err();
    for (_, wanted) in cases {
        assert!(
            problems.iter().any(|line| line.starts_with(wanted)),
            "{wanted}: {problems:#?}"
        );
    }
    // Three more in conntrack, two more in ipvs.
    assert_eq!(problems.len(), cases.len() + 5, "{problems:#?}");
    for (text, wanted) in [
        (
            "clusterCIDR: '10.1.0.0/16,10.2.0.0/16'",
            "clusterCIDR (--cluster-cidr): 10.1.0.0/16 and 10.2.0.0/16 are of one family",
        ),
        (
            "ipvs: {minSyncPeriod: 31s}",
            "ipvs.minSyncPeriod (--ipvs-min-sync-period): 31s must be at most ipvs.syncPeriod, which is 30s",
        ),
        (
            "detectLocalMode: BridgeInterface",
            "detectLocal.bridgeInterface (--pod-bridge-interface): \"\" must be the name",
        ),
        (
            "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: 'a b'}",
            "detectLocal.interfaceNamePrefix (--pod-interface-name-prefix): \"a b\" must be",
        ),
    ] {
        let problems = of_file(text).unwrap_err();
        let one = problems.len() == 1 && problems[0].starts_with(wanted);
        assert!(one, "{problems:?}");
    }
    let problems = of_flags(&[
        "--sync-period=0",
        "--drain-timeout=-1s",
        "--kube-api-burst=-1",
    ]);
    let problems = problems.unwrap_err().join("\n");
    for wanted in [
        "ipvs.syncPeriod (--sync-period): 0s must be longer",
        "--drain-timeout: \"-1s\" must be",
        "-1 must be 0",
    ] {
        assert!(problems.contains(wanted), "{problems}");
    }
}

/// Every flag that a message names is there.
#[test]
fn the_flags_of_fields_are_there() {
    use clap::CommandFactory as _;
    let command = Cli::command();
    let run = command.find_subcommand("run").unwrap();
    let known: Vec<&str> = run.get_arguments().filter_map(|a| a.get_long()).collect();
    let default = file::tree_of(&Configuration::default());
    for (path, flag) in check::FLAGS {
        assert!(known.contains(&flag.trim_start_matches("--")), "{flag}");
        let pointer = format!("/{}", path.replace('.', "/"));
        assert!(default.pointer(&pointer).is_some(), "{path}");
    }
}

#[test]
fn kube_proxy_takes_underscores_for_hyphens() {
    let words = ["run", "--cluster_cidr=a_b", "--sync_period", "--", "x_y"];
    let words = crate::cli::with_hyphens(words.into_iter().map(Into::into));
    let words: Vec<_> = words.collect();
    assert_eq!(
        words,
        ["run", "--cluster-cidr=a_b", "--sync-period", "--", "x_y"]
    );
}

fn time() -> impl Strategy<Value = String> {
    (1..1_000_000_000_000_u64).prop_map(|us| format_duration(Duration::from_micros(us)))
}

fn one_of(words: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop::sample::select(words).prop_map(str::to_owned)
}

/// A file's lines and flags, each there or not.
fn anything() -> impl Strategy<Value = (String, Vec<String>)> {
    let fields = (
        prop::option::of(one_of(&["10.0.0.7", "fd00::7", "'::'", "0.0.0.0"])),
        prop::option::of(one_of(&["''", "node-1", "'yes'", "'1e3'", "'0x7'", "'~'"])),
        prop::option::of(one_of(&["''", "rr", "sh", "mh", "'no'"])),
        prop::option::of(one_of(&[
            "[]",
            "[10.0.0.0/8, 'fd00::/8']",
            "[primary, localhost]",
        ])),
        prop::option::of((time(), time(), time())),
        prop::option::of(-1000..=1000_i32),
        prop::option::of(0..=31_i32),
        prop::option::of((0..i32::MAX, time(), any::<bool>())),
        prop::option::of(one_of(&["''", "0.0.0.0", "'[::]:7'", "127.0.0.1:0"])),
        prop::option::of((0.5..1e6_f32, 1..i32::MAX)),
    );
    let lines = fields.prop_map(
        |(bind, name, scheduler, ports, times, oom, bit, track, health, api)| {
            let mut lines = HEAD.to_owned();
            let mut line =
                |text: Option<String>| lines.extend(text.into_iter().map(|text| text + "\n"));
            line(bind.map(|v| format!("bindAddress: {v}")));
            line(name.map(|v| format!("hostnameOverride: {v}")));
            line(ports.map(|v| format!("nodePortAddresses: {v}")));
            line(oom.map(|v| format!("oomScoreAdj: {v}")));
            line(bit.map(|v| format!("iptables: {{masqueradeBit: {v}, masqueradeAll: true}}")));
            line(track.map(|(max, t, on)| {
                format!("conntrack: {{maxPerCore: {max}, udpTimeout: {t}, tcpBeLiberal: {on}}}")
            }));
            line(health.map(|v| format!("healthzBindAddress: {v}\nmetricsBindAddress: {v}")));
            line(api.map(|(q, b)| {
                format!("clientConnection: {{qps: {q}, burst: {b}, kubeconfig: '/a b: c'}}")
            }));
            line(Some(format!(
                "ipvs: {{{}{}}}",
                scheduler.map_or(String::new(), |v| format!("scheduler: {v}, ")),
                times.map_or(String::new(), |(a, b, c)| format!(
                    "syncPeriod: {a}, tcpTimeout: {b}, udpTimeout: {c}, excludeCIDRs: ['::/0']"
                )),
            )));
            lines
        },
    );
    let flags = prop::sample::subsequence(
        vec![
            "--healthz-bind-address=",
            "--metrics-port=9",
            "--proxy-mode=ipvs",
            "--feature-gates=A=true,B=false",
            "--vmodule=a=1,b=2",
            "--log-text-split-stream",
            "--cluster-cidr=10.1.0.0/16,fd00::/64",
            "--detect-local-mode=NodeCIDR",
            "--node-name=true",
            "--v=7",
            "--drain-timeout=7s",
            "--log-format=json",
        ],
        0..=12,
    );
    (
        lines,
        flags.prop_map(|flags| flags.into_iter().map(str::to_owned).collect()),
    )
}

proptest! {
    #[test]
    fn what_is_written_says_the_same((text, words) in anything()) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let first = both(&text, &words).unwrap();
        let written = first.configuration.write().unwrap();
        // Those that no file has are given again.
        let own: Vec<&str> = words.into_iter().filter(|w| w.starts_with("--drain-timeout")).collect();
        let second = both(&written, &own).unwrap();
        prop_assert_eq!(&second.settings, &first.settings, "{}", &written);
        prop_assert_eq!(second.warnings, first.warnings);
        prop_assert_eq!(second.configuration.write().unwrap(), written);
    }
}

#[test]
fn the_first_document_counts() {
    let one = of_file("mode: ipvs\nipvs: {scheduler: sh}\n---\n").unwrap();
    assert_eq!(one.warnings, [""; 0]);
    let two = both(
        &format!(
            "# text\n---\n{HEAD}ipvs: {{scheduler: sh}}\n---\n{HEAD}ipvs: {{scheduler: lc}}\n"
        ),
        &[],
    );
    let two = two.unwrap();
    let lines = 4 + HEAD.lines().count();
    assert_eq!(
        two.warnings,
        [format!(
            "c.yaml: line {lines}: only the first document counts"
        )]
    );
    assert_eq!(two.configuration.ipvs.scheduler, "sh");
}

#[test]
fn a_scheduler_of_the_file_that_a_flag_replaces_is_named() {
    let warnings = |words: &[&str]| {
        let text = format!("{HEAD}ipvs: {{scheduler: sh}}\n");
        both(&text, words).unwrap().warnings
    };
    assert_eq!(
        warnings(&["--scheduler=lc"]),
        ["ipvs.scheduler: \"sh\" of the file gives way to --scheduler=lc"]
    );
    assert_eq!(warnings(&["--scheduler=sh"]), [""; 0]);
    assert_eq!(warnings(&[]), [""; 0]);
}

/// As kube-proxy has it: a port that stands alone is for an address without one.
#[test]
fn ports_that_stand_alone() {
    for (words, health) in [
        (&["--healthz-port=5"][..], "Some(0.0.0.0:5)"),
        (
            &["--healthz-port=5", "--healthz-bind-address=10.0.0.7"],
            "Some(10.0.0.7:5)",
        ),
        (
            &["--healthz-port=5", "--healthz-bind-address=10.0.0.7:1"],
            "Some(10.0.0.7:1)",
        ),
        (&["--healthz-port=5", "--healthz-bind-address="], "None"),
        (
            &["--healthz-port=0", "--healthz-bind-address=10.0.0.7:1"],
            "None",
        ),
    ] {
        let said = said(&of_flags(words).unwrap().settings);
        let wanted = format!("healthz_bind_address: {health}");
        assert!(said.contains(&wanted), "{words:?}: {said}");
    }
}

/// A gate says something, or that it does not is said: also of one that is false.
#[test]
fn every_feature_gate_is_obeyed_or_named() {
    let why = "is not applicable:";
    for (gates, flag, denied, named) in [
        (
            "{AllowServiceExternalIPs: false}",
            "AllowServiceExternalIPs=false",
            true,
            &[][..],
        ),
        (
            "{AllowServiceExternalIPs: true}",
            "AllowServiceExternalIPs=true",
            false,
            &[],
        ),
        (
            "{KubeProxyIPVS: false}",
            "KubeProxyIPVS=false",
            false,
            &["KubeProxyIPVS=false"],
        ),
        (
            "{A: true, WinDSR: false}",
            ",A=true,WinDSR=false,",
            false,
            &["A=true", "WinDSR=false"],
        ),
    ] {
        let text = format!("featureGates: {gates}");
        let by_file = of_file(&text).unwrap();
        let by_flag = of_flags(&[&format!("--feature-gates={flag}")]).unwrap();
        for loaded in [by_file, by_flag] {
            let external = &loaded.settings.config.external_ips;
            assert_eq!(*external == Allowed::Nothing, denied, "{gates}");
            assert_eq!(loaded.warnings.len(), named.len(), "{:?}", loaded.warnings);
            for (line, name) in loaded.warnings.iter().zip(named) {
                let line = line.trim_start_matches("c.yaml: ");
                let begin = format!("featureGates (--feature-gates): {name} {why} ");
                assert!(line.starts_with(&begin), "{line}");
            }
        }
    }
}

#[test]
fn external_addresses_are_allowed_by_networks() {
    let of = of_flags;
    let networks = |text: &str| Allowed::Networks(vec![text.parse().unwrap()]);
    for (word, allowed) in [
        ("allow", Allowed::All),
        ("deny", Allowed::Nothing),
        ("203.0.113.0/24", networks("203.0.113.0/24")),
    ] {
        let config = of(&[&format!("--external-ips={word}")])
            .unwrap()
            .settings
            .config;
        assert_eq!(
            (config.external_ips, config.load_balancer_ips),
            (allowed.clone(), Allowed::All)
        );
        let config = of(&[&format!("--load-balancer-ips={word}")])
            .unwrap()
            .settings
            .config;
        assert_eq!(
            (config.external_ips, config.load_balancer_ips),
            (Allowed::All, allowed)
        );
    }
    for flag in ["--external-ips", "--load-balancer-ips"] {
        let problems = of(&[&format!("{flag}=deny,10.0.0.0/8")]).unwrap_err();
        let allowed = "must be allow, deny, or networks such as 203.0.113.0/24";
        assert_eq!(problems, [format!("{flag}: \"deny\" {allowed}")]);
    }
    // The gate is the cluster's word.
    let both = of(&[
        "--external-ips=203.0.113.0/24",
        "--feature-gates=AllowServiceExternalIPs=false",
    ])
    .unwrap();
    assert_eq!(both.settings.config.external_ips, Allowed::Nothing);
    assert_eq!(both.warnings.len(), 1);
}

#[test]
fn the_bounds_of_a_service_are_set() {
    let config = |flags: &[&str]| of_flags(flags).unwrap().settings.config;
    let bounds = |c: ipvs_proxy_core::plan::Config| (c.max_virtual_servers, c.max_real_servers);
    assert_eq!(bounds(config(&[])), (5_000, 100_000));
    let flags = [
        "--max-virtual-servers-per-service=0",
        "--max-real-servers-per-service=7",
    ];
    assert_eq!(bounds(config(&flags)), (0, 7));
}

#[test]
fn the_bit_of_routed_packets_is_another_than_that_of_masquerading() {
    let bits = |flags: &[&str]| {
        let config = of_flags(flags).unwrap().settings.config;
        (config.masquerade_bit, config.route_bit)
    };
    assert_eq!(bits(&[]), (14, 13));
    assert_eq!(bits(&["--iptables-masquerade-bit=13"]), (13, 12));
    assert_eq!(bits(&["--route-bit=31"]), (14, 31));
    for flags in [
        &["--route-bit=14"],
        &["--route-bit=32"],
        &["--route-bit=-1"],
    ] {
        assert!(of_flags(flags).is_err(), "{flags:?}");
    }
}
