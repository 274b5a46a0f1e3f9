use std::time::{Duration, SystemTime};

use ipset_rs::SetType;
use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_core::model::{Change, ObjectName};
use ipvs_proxy_core::op::{Failure, FailureKind, Op, Outcome};
use ipvs_proxy_core::state::{Key, State, Value};
use ipvs_proxy_netlink::{Family, Protocol};

use super::Metrics;

/// The value of a line, by its name and labels.
fn value(text: &str, name: &str) -> Option<f64> {
    let mut lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    lines
        .find(|(of, _)| *of == name)
        .map(|(_, value)| value.parse().unwrap())
}

fn server(port: u16) -> VirtualServerKey {
    VirtualServerKey::Address {
        address: [10, 96, 0, 10].into(),
        port,
        protocol: Protocol::Tcp,
    }
}

fn real(port: u16) -> RealServerKey {
    RealServerKey {
        address: [10, 0, 0, 2].into(),
        port,
    }
}

/// As a scraper of the text format 0.0.4 reads it: every sample belongs to the family whose HELP
/// and TYPE stand before it, no family comes twice, no sample comes twice.
#[test]
fn text_is_prometheus_text() {
    let metrics = Metrics::new(&Family::ALL);
    metrics.in_kernel(
        &[(Family::V4, SystemTime::now())],
        SystemTime::now() + Duration::from_secs(3),
    );
    let text = metrics.text();
    let (mut families, mut samples) = (Vec::new(), Vec::new());
    let mut family = ("", "");
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let name = help.split_once(' ').unwrap().0;
            assert!(!families.contains(&name), "{name} comes twice");
            families.push(name);
        } else if let Some(of) = line.strip_prefix("# TYPE ") {
            family = of.split_once(' ').unwrap();
            assert_eq!(Some(&family.0), families.last());
            assert!(
                ["counter", "gauge", "histogram"].contains(&family.1),
                "{line}"
            );
        } else {
            assert!(!line.starts_with('#'), "{line}");
            let (name, number) = line.rsplit_once(' ').unwrap();
            number.parse::<f64>().unwrap();
            assert!(!samples.contains(&name), "{name} comes twice");
            samples.push(name);
            let name = name.split('{').next().unwrap();
            let suffix = name.strip_prefix(family.0).unwrap();
            let fits = match family.1 {
                "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
                "counter" => suffix.is_empty() && name.ends_with("_total"),
                _ => suffix.is_empty(),
            };
            assert!(fits, "{line} of {family:?}");
        }
    }
    assert!(text.ends_with('\n'));
    let start = value(&text, "process_start_time_seconds").unwrap();
    assert!(start > 1.7e9 && value(&text, "process_open_fds").unwrap() > 2.0);
    assert!(value(&text, "process_resident_memory_bytes").unwrap() > 1e5);
}

#[test]
fn buckets_are_those_of_kube_proxy() {
    let metrics = Metrics::new(&[Family::V4]);
    let text = metrics.text();
    let of = |name: &str| {
        let start = format!("{name}_bucket{{");
        let lines = text.lines().filter(|line| line.starts_with(&start));
        lines
            .map(|line| {
                line.split("le=\"")
                    .nth(1)
                    .unwrap()
                    .split('"')
                    .next()
                    .unwrap()
            })
            .collect::<Vec<_>>()
    };
    let sync = of("kubeproxy_sync_proxy_rules_duration_seconds");
    assert_eq!(sync.len(), 16);
    assert_eq!([sync[0], sync[14], sync[15]], ["0.001", "16.384", "+Inf"]);
    let programming = of("kubeproxy_network_programming_duration_seconds");
    assert_eq!(programming.len(), 2 + 59 + 12 + 7 + 1);
    assert_eq!(programming[..3], ["0.25", "0.5", "1"]);
    assert_eq!(programming[60..63], ["59", "60", "65"]);
    assert_eq!(programming[72..75], ["115", "120", "150"]);
    assert_eq!(programming[79..], ["300", "+Inf"]);
}

/// Triggers from before the start of the process are no measure of it.
#[test]
fn network_programming_begins_with_the_trigger() {
    let metrics = Metrics::new(&Family::ALL);
    let now = SystemTime::now();
    let after = Duration::from_millis(5500);
    let triggers = [
        (Family::V4, now),
        (Family::V4, now - Duration::from_secs(60)),
        (Family::V6, now + after),
    ];
    metrics.in_kernel(&triggers, now + after);
    let text = metrics.text();
    let of = |suffix: &str, labels: &str| {
        let name = format!("kubeproxy_network_programming_duration_seconds_{suffix}{{{labels}}}");
        value(&text, &name).unwrap_or_else(|| panic!("no {name}"))
    };
    assert_eq!(of("count", "ip_family=\"IPv4\""), 1.0);
    assert_eq!(of("sum", "ip_family=\"IPv4\""), 5.5);
    assert_eq!(of("count", "ip_family=\"IPv6\""), 1.0);
    assert_eq!(of("sum", "ip_family=\"IPv6\""), 0.0);
}

#[test]
fn changes_wait_until_they_are_in_the_kernel() {
    let metrics = Metrics::new(&Family::ALL);
    let name = ObjectName::new("default", "web");
    metrics.queued(&Change::Service(name.clone(), None));
    metrics.queued(&Change::Slice(name, None));
    let family = "{ip_family=\"IPv6\"}";
    for (what, total, pending) in [("waits", 1.0, 1.0), ("is in the kernel", 1.0, 0.0)] {
        let text = metrics.text();
        for kind in ["service", "endpoint"] {
            let name = format!("kubeproxy_sync_proxy_rules_{kind}_changes");
            assert_eq!(
                value(&text, &format!("{name}_total{family}")),
                Some(total),
                "{what}"
            );
            assert_eq!(
                value(&text, &format!("{name}_pending{family}")),
                Some(pending),
                "{what}"
            );
        }
        metrics.in_kernel(&[], SystemTime::now());
    }
    let last = format!("kubeproxy_sync_proxy_rules_last_timestamp_seconds{family}");
    assert!(value(&metrics.text(), &last).unwrap() > 1.7e9);
}

/// What ops count is what a reading of the same things counts.
#[test]
fn things_are_counted_by_ops_and_by_readings_alike() {
    let counted = |metrics: &Metrics| {
        let text = metrics.text();
        [
            "ipvs_proxy_virtual_servers{ip_family=\"IPv4\"}",
            "ipvs_proxy_real_servers{ip_family=\"IPv4\"}",
        ]
        .map(|name| value(&text, name).unwrap_or_else(|| panic!("no {name}")))
    };
    let metrics = Metrics::new(&Family::ALL);
    let keys = [
        Key::VirtualServer(server(80)),
        Key::RealServer(server(80), real(8080)),
        Key::RealServer(server(80), real(8081)),
        Key::VirtualServer(server(81)),
        Key::RealServer(server(81), real(8080)),
    ];
    for key in keys {
        metrics.op(&Op::Add(key, Value::Present), &Outcome::Done);
    }
    assert_eq!(counted(&metrics), [2.0, 3.0]);
    let read = Metrics::new(&Family::ALL);
    read.recount(&keys.map(|key| (key, Value::Present)).into_iter().collect());
    assert_eq!(counted(&read), [2.0, 3.0]);

    let failure = Failure {
        kind: FailureKind::Refused,
        text: String::new(),
    };
    let removal = Op::Remove(Key::VirtualServer(server(80)));
    metrics.op(&removal, &Outcome::Failed(failure));
    assert_eq!(counted(&metrics), [2.0, 3.0], "a failed op takes nothing");
    // A virtual server takes its real servers with it.
    metrics.op(&removal, &Outcome::Done);
    metrics.op(
        &Op::Remove(Key::RealServer(server(81), real(8080))),
        &Outcome::Done,
    );
    assert_eq!(counted(&metrics), [1.0, 0.0]);
    metrics.recount(&State::new());
    assert_eq!(counted(&metrics), [0.0; 2]);

    let text = metrics.text();
    let ops = |result: &str| {
        let labels = format!("kind=\"virtual_server\",op=\"remove\",result=\"{result}\"");
        value(&text, &format!("ipvs_proxy_kernel_ops_total{{{labels}}}"))
    };
    assert_eq!((ops("refused"), ops("done")), (Some(1.0), Some(1.0)));
}

/// How full a set is, is told of ours alone, with the limit that it has now.
#[test]
fn sets_are_told_as_the_kernel_lists_them() {
    let set = |name: &str, kind: SetType, most: u32, entries: u32| ipset_rs::Set {
        name: name.parse().unwrap(),
        type_name: String::new(),
        family: None,
        kind: Some(kind),
        revision: 0,
        hash_size: 0,
        max_elements: most,
        timeout_s: None,
        counters: false,
        skbinfo: false,
        references: 0,
        entries: Some(entries),
    };
    let metrics = Metrics::new(&Family::ALL);
    metrics.sets(&[
        set(
            "KUBE-CLUSTER-IP",
            SetType::HashIpPort(Family::V4),
            131_072,
            70_000,
        ),
        set("KUBE-NODE-PORT-TCP", SetType::BitmapPort, 0, 3),
        set("OTHERS", SetType::BitmapPort, 0, 1),
    ]);
    let text = metrics.text();
    let of =
        |name: &str, set: &str| value(&text, &format!("ipvs_proxy_set_{name}{{set=\"{set}\"}}"));
    assert_eq!(of("entries", "KUBE-CLUSTER-IP"), Some(70_000.0));
    assert_eq!(of("max_entries", "KUBE-CLUSTER-IP"), Some(131_072.0));
    assert_eq!(of("max_entries", "KUBE-NODE-PORT-TCP"), Some(65_536.0));
    assert_eq!(of("entries", "OTHERS"), None);
}
