use std::num::NonZeroU16;

use k8s_openapi::serde::de::DeserializeOwned;
use proptest::prelude::*;

use super::*;

fn object<T: DeserializeOwned>(yaml: &str) -> T {
    serde_saphyr::from_str(yaml).unwrap()
}

fn translated(spec: &str) -> Translated<model::Service> {
    service(&object::<Service>(&format!(
        "metadata: {{name: app1}}\nspec: {{{spec}}}"
    )))
}

/// The object, if any, and the refusals as text.
fn taken(spec: &str) -> (Option<model::Service>, Vec<String>) {
    let t = translated(spec);
    (
        t.object,
        t.refusals.iter().map(ToString::to_string).collect(),
    )
}

fn none() -> Vec<String> {
    Vec::new()
}

#[test]
fn a_health_check_node_port_is_a_load_balancers_that_keeps_to_the_node() {
    let all = "type: LoadBalancer, externalTrafficPolicy: Local";
    for (fields, kept, refused) in [
        (
            format!("{all}, healthCheckNodePort: 30000"),
            Some(30000),
            None,
        ),
        (all.to_owned(), None, None),
        (format!("{all}, healthCheckNodePort: 0"), None, None),
        (format!("{all}, healthCheckNodePort: null"), None, None),
        (
            "type: LoadBalancer, healthCheckNodePort: 30000".to_owned(),
            None,
            None,
        ),
        (
            "type: NodePort, externalTrafficPolicy: Local, healthCheckNodePort: 70000".to_owned(),
            None,
            None,
        ),
        (
            format!("{all}, healthCheckNodePort: 65536"),
            None,
            Some("65536 is not a port (1 to 65535)"),
        ),
        (
            format!("{all}, healthCheckNodePort: -1"),
            None,
            Some("-1 is not a port (1 to 65535)"),
        ),
        (
            format!("{all}, healthCheckNodePort: 30080"),
            None,
            Some("30080 is already a TCP nodePort of this Service"),
        ),
        (
            format!("{all}, healthCheckNodePort: 30053, allocateLoadBalancerNodePorts: false"),
            Some(30053),
            None,
        ),
    ] {
        let service = service(&object::<Service>(&format!(
            "metadata: {{name: web}}\nspec: {{clusterIP: 10.96.0.10, {fields}, ports: [\
             {{name: a, port: 80, nodePort: 30080}}, \
             {{name: b, port: 53, protocol: UDP, nodePort: 30053}}]}}"
        )));
        let port = service.object.unwrap().health_check_node_port;
        assert_eq!(port, kept, "{fields}");
        let told: Vec<String> = service.refusals.iter().map(ToString::to_string).collect();
        let of_port = told
            .iter()
            .find(|line| line.contains("healthCheckNodePort"));
        let refused =
            refused.map(|why| format!("Service default/web: spec.healthCheckNodePort: {why}"));
        assert_eq!(of_port, refused.as_ref());
    }
}

#[test]
fn a_whole_service() {
    let service = service(&object::<Service>(
        r#"
metadata:
  name: web
  namespace: prod
  uid: 4f1c
  creationTimestamp: "2024-01-02T03:04:05Z"
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd96::a"]
  sessionAffinity: ClientIP
  ports:
  - {name: http, port: 80, targetPort: 8080, nodePort: 30080}
  - {name: dns, port: 53, protocol: UDP, nodePort: 0}
  - {name: sctp, port: 53, protocol: SCTP}
"#,
    ));
    assert_eq!(service.name, model::ObjectName::new("prod", "web"));
    assert_eq!(service.refusals, []);
    let port = |name: &str, protocol, port, node_port| model::ServicePort {
        name: name.into(),
        protocol,
        port,
        node_port,
    };
    assert_eq!(
        service.object,
        Some(model::Service {
            created: Some(1_704_164_645),
            uid: "4f1c".into(),
            cluster_ips: vec!["10.96.0.10".parse().unwrap(), "fd96::a".parse().unwrap()],
            ports: vec![
                port("http", Protocol::Tcp, 80, Some(30080)),
                port("dns", Protocol::Udp, 53, None),
                port("sctp", Protocol::Sctp, 53, None),
            ],
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            affinity_timeout_s: Some(10_800),
            drain_timeout: None,
            internal_policy: model::TrafficPolicy::Cluster,
            external_policy: model::TrafficPolicy::Cluster,
            health_check_node_port: None,
        })
    );
}

#[test]
fn addresses_from_outside() {
    let text = "metadata: {name: a, annotations: {ipvs-proxy.io/drain-timeout: 1m30s}}\n\
                spec: {clusterIP: 10.0.0.1, ports: [{port: 80}], \
                externalIPs: [50.60.70.81, '2012::0051', 127.0.0.1, 0.0.0.0, nonsense, 169.254.169.254, 'fe80::1', 224.0.0.1, 255.255.255.255, '::1']}\n\
                status: {loadBalancer: {ingress: [{ip: 1.2.3.4}, {ip: 1.2.3.5, ipMode: VIP}, \
                {ip: 127.0.0.1}, {ip: 1.2.3.6, ipMode: Proxy}, {hostname: a.example}, {ip: 1.2.3.7, ipMode: No}]}}";
    let object: Service = serde_saphyr::from_str(text).unwrap();
    let translated = service(&object);
    let object = translated.object.unwrap();
    let texts = |list: &[IpAddr]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(texts(&object.external_ips), ["50.60.70.81", "2012::51"]);
    assert_eq!(texts(&object.load_balancer_ips), ["1.2.3.4", "1.2.3.5"]);
    assert_eq!(
        object.drain_timeout,
        Some(ipvs_proxy_core::model::DrainTimeout::After(
            std::time::Duration::from_secs(90)
        ))
    );
    let refusals: Vec<String> = translated
        .refusals
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        refusals,
        [
            "Service default/a: spec.externalIPs[2]: \"127.0.0.1\" is a loopback address, which can't be a VIP",
            "Service default/a: spec.externalIPs[3]: \"0.0.0.0\" is the unspecified address, which \
             can't be a VIP",
            "Service default/a: spec.externalIPs[4]: \"nonsense\" is not an IP address",
            "Service default/a: spec.externalIPs[5]: \"169.254.169.254\" is a link-local address, which can't be a VIP",
            "Service default/a: spec.externalIPs[6]: \"fe80::1\" is a link-local address, which can't be a VIP",
            "Service default/a: spec.externalIPs[7]: \"224.0.0.1\" is a multicast address, which can't be a VIP",
            "Service default/a: spec.externalIPs[8]: \"255.255.255.255\" is the broadcast address, which can't be a VIP",
            "Service default/a: spec.externalIPs[9]: \"::1\" is a loopback address, which can't be a VIP",
            "Service default/a: status.loadBalancer.ingress[2].ip: \"127.0.0.1\" is a loopback address, which can't be a VIP",
            "Service default/a: status.loadBalancer.ingress[5].ipMode: \"No\" is not VIP or Proxy",
        ]
    );
}

#[test]
fn times_are_read_as_go_prints_them() {
    let ms = |text| crate::config::parse_duration(text).map(|time| time.as_millis());
    assert_eq!(ms("0"), Some(0));
    assert_eq!(ms("0s"), Some(0));
    assert_eq!(ms("1h2m3s"), Some(3_723_000));
    assert_eq!(ms("1.5s"), Some(1500));
    assert_eq!(ms("250ms"), Some(250));
    for bad in ["", "5", "s", "-1s", "1x", "1..2s", "1e3s", " 1s"] {
        assert_eq!(ms(bad), None, "{bad}");
    }
}

#[test]
fn services_that_are_left_out() {
    for spec in [
        "ports: [{port: 80}]",
        r#"clusterIP: """#,
        "clusterIP: None",
        "clusterIPs: [None], clusterIP: None",
        "clusterIPs: [None]",
        "type: ExternalName, externalName: example.org",
        "type: ExternalName, clusterIP: 10.0.0.1",
    ] {
        assert_eq!(taken(spec), (None, none()), "{spec}");
    }
    assert_eq!(
        service(&object::<Service>("metadata: {name: a}")).object,
        None
    );
    let labelled = |label: &str| {
        let yaml =
            format!("metadata: {{name: a, labels: {{{label}}}}}\nspec: {{clusterIP: 10.0.0.1}}");
        service(&object::<Service>(&yaml)).object
    };
    assert_eq!(
        labelled("service.kubernetes.io/service-proxy-name: other"),
        None
    );
    assert_eq!(
        labelled(r#"service.kubernetes.io/service-proxy-name: """#),
        None
    );
    // Headless by label alone is a matter of slices.
    assert!(labelled(r#"service.kubernetes.io/headless: """#).is_some());
}

#[test]
fn addresses_are_read_leniently() {
    for (text, address) in [
        ("10.96.0.1", Some("10.96.0.1")),
        ("010.096.000.001", Some("10.96.0.1")),
        ("10.96.0.000000255", Some("10.96.0.255")),
        ("FD96:0:0:0::00A", Some("fd96::a")),
        ("::ffff:10.0.0.1", Some("10.0.0.1")),
        ("fd00::10.0.0.1", Some("fd00::a00:1")),
        ("10.96.0.300", None),
        ("10.96.0", None),
        ("10.96.0.1.2", None),
        ("10.96..1", None),
        ("+1.2.3.4", None),
        ("0x1.2.3.4", None),
        (" 10.96.0.1", None),
        ("fe80::1%eth0", None),
        ("", None),
        ("10.96.0.0/16", None),
    ] {
        assert_eq!(
            parse_address(text),
            address.map(|a| a.parse().unwrap()),
            "{text}"
        );
    }
}

#[test]
fn cluster_ips() {
    let ips = |spec: &str| {
        let (object, refusals) = taken(spec);
        let ips = object
            .map(|service| service.cluster_ips)
            .unwrap_or_default();
        (
            ips.iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" "),
            refusals,
        )
    };
    assert_eq!(ips("clusterIP: 10.0.0.1"), ("10.0.0.1".to_owned(), none()));
    assert_eq!(
        ips("clusterIP: 10.0.0.1, clusterIPs: []"),
        ("10.0.0.1".to_owned(), none())
    );
    assert_eq!(
        ips(r#"clusterIPs: ["FD00::0:1", 010.0.0.1]"#),
        ("fd00::1 10.0.0.1".to_owned(), none())
    );
    let one = |ip: &str, refusal: &str| {
        (
            ip.to_owned(),
            vec![format!("Service default/app1: {refusal}")],
        )
    };
    for (spec, ip, refusal) in [
        (
            "clusterIP: 10.96.0.300",
            "",
            r#"spec.clusterIP: "10.96.0.300" is not an IP address"#,
        ),
        (
            "clusterIPs: [10.0.0.1, 10.0.0.2]",
            "10.0.0.1",
            r#"spec.clusterIPs[1]: "10.0.0.2" is one too many; a Service has one address a family"#,
        ),
        (
            r#"clusterIPs: ["nonsense\n", 10.0.0.2]"#,
            "10.0.0.2",
            r#"spec.clusterIPs[0]: "nonsense\n" is not an IP address"#,
        ),
        (
            "clusterIP: 0.0.0.0",
            "",
            r#"spec.clusterIP: "0.0.0.0" is the unspecified address, which can't be a clusterIP"#,
        ),
        (
            "clusterIP: 127.0.0.9",
            "",
            r#"spec.clusterIP: "127.0.0.9" is a loopback address, which can't be a clusterIP"#,
        ),
        (
            "clusterIP: 224.0.0.1",
            "",
            r#"spec.clusterIP: "224.0.0.1" is a multicast address, which can't be a clusterIP"#,
        ),
        (
            "clusterIP: 255.255.255.255",
            "",
            r#"spec.clusterIP: "255.255.255.255" is the broadcast address, which can't be a clusterIP"#,
        ),
        (
            r#"clusterIP: "ff02::1""#,
            "",
            r#"spec.clusterIP: "ff02::1" is a multicast address, which can't be a clusterIP"#,
        ),
    ] {
        assert_eq!(ips(spec), one(ip, refusal), "{spec}");
    }
}

#[test]
fn service_ports_that_are_refused_leave_the_others() {
    let ports = |kind: &str, ports: &str| {
        let spec = format!("type: {kind}, clusterIP: 10.0.0.1, ports: [{ports}]");
        let (object, refusals) = taken(&spec);
        let ports = object
            .unwrap()
            .ports
            .iter()
            .map(|p| (p.port, p.node_port))
            .collect::<Vec<_>>();
        let prefix = "Service default/app1: spec.";
        (
            ports,
            refusals
                .iter()
                .map(|r| r.strip_prefix(prefix).unwrap().to_owned())
                .collect::<Vec<_>>(),
        )
    };
    let good = "{name: ok, port: 7}";
    for (entry, refusal) in [
        (
            "{name: a, port: 0}",
            "ports[1].port: 0 is not a port (1 to 65535)",
        ),
        (
            "{name: a, port: -1}",
            "ports[1].port: -1 is not a port (1 to 65535)",
        ),
        (
            "{name: a, port: 65536}",
            "ports[1].port: 65536 is not a port (1 to 65535)",
        ),
        ("{name: a}", "ports[1].port: 0 is not a port (1 to 65535)"),
        (
            "{name: a, port: 80, protocol: TPC}",
            r#"ports[1].protocol: "TPC" is not TCP, UDP or SCTP"#,
        ),
        (
            "{name: a, port: 80, protocol: udp}",
            r#"ports[1].protocol: "udp" is not TCP, UDP or SCTP"#,
        ),
        (
            "{name: a, port: 7}",
            "ports[1].port: 7 is already a TCP port of this Service",
        ),
        (
            "{name: ok, port: 8}",
            r#"ports[1].name: "ok" is already the name of a port of this Service"#,
        ),
    ] {
        let all = format!("{good}, {entry}, {{name: z, port: 9}}");
        let expected = (vec![(7, None), (9, None)], vec![refusal.to_owned()]);
        assert_eq!(ports("ClusterIP", &all), expected, "{entry}");
    }
    // The same number or name over another protocol is another port.
    let both = format!("{good}, {{name: ok, port: 7, protocol: UDP}}");
    assert_eq!(
        ports("ClusterIP", &both),
        (vec![(7, None), (7, None)], none())
    );
    // An empty protocol is the default, as the API server has it.
    assert_eq!(
        ports("ClusterIP", r#"{port: 7, protocol: ""}"#),
        (vec![(7, None)], none())
    );
}

#[test]
fn node_ports() {
    let node_ports = |spec: &str| {
        let (object, refusals) = taken(&format!("clusterIP: 10.0.0.1, {spec}"));
        (
            object
                .unwrap()
                .ports
                .iter()
                .map(|p| p.node_port)
                .collect::<Vec<_>>(),
            refusals,
        )
    };
    let one = "ports: [{port: 80, nodePort: 30000}]";
    for kind in ["NodePort", "LoadBalancer"] {
        assert_eq!(
            node_ports(&format!("type: {kind}, {one}")),
            (vec![Some(30000)], none())
        );
    }
    assert_eq!(
        node_ports(&format!("type: ClusterIP, {one}")),
        (vec![None], none())
    );
    assert_eq!(node_ports(one), (vec![None], none()));
    let refused = |text: &str| vec![format!("Service default/app1: {text}")];
    assert_eq!(
        node_ports("type: NodePort, ports: [{port: 80, nodePort: 70000}]"),
        (
            vec![None],
            refused("spec.ports[0].nodePort: 70000 is not a port (1 to 65535)")
        )
    );
    let twice = "ports: [{name: a, port: 80, nodePort: 30000}, {name: b, port: 81, nodePort: 30000}, \
                 {name: b, port: 81, nodePort: 30000, protocol: UDP}]";
    assert_eq!(
        node_ports(&format!("type: NodePort, {twice}")),
        (
            vec![Some(30000), None, Some(30000)],
            refused("spec.ports[1].nodePort: 30000 is already a TCP nodePort of this Service")
        )
    );
    assert_eq!(
        node_ports(&format!("type: NodeProt, {one}")),
        (
            vec![None],
            refused(
                "spec.type: \"NodeProt\" is not ClusterIP, NodePort, LoadBalancer or \
                 ExternalName; it is served as ClusterIP"
            )
        )
    );
}

#[test]
fn session_affinity() {
    let affinity = |spec: &str| {
        let (object, refusals) = taken(&format!("clusterIP: 10.0.0.1, {spec}"));
        (object.unwrap().affinity_timeout_s, refusals)
    };
    let timeout = |s: &str| {
        affinity(&format!(
            "sessionAffinity: ClientIP, sessionAffinityConfig: {{clientIP: {{timeoutSeconds: {s}}}}}"
        ))
    };
    assert_eq!(affinity("sessionAffinity: None"), (None, none()));
    assert_eq!(affinity(r#"sessionAffinity: """#), (None, none()));
    assert_eq!(
        affinity("sessionAffinity: ClientIP"),
        (Some(10_800), none())
    );
    assert_eq!(timeout("null"), (Some(10_800), none()));
    assert_eq!(timeout("1"), (Some(1), none()));
    assert_eq!(timeout("86400"), (Some(86_400), none()));
    for wrong in ["0", "-1", "86401"] {
        let refusal = format!(
            "Service default/app1: spec.sessionAffinityConfig.clientIP.timeoutSeconds: {wrong} \
             is not 1 to 86400; 10800 is used"
        );
        assert_eq!(timeout(wrong), (Some(10_800), vec![refusal]));
    }
    let refusal =
        r#"Service default/app1: spec.sessionAffinity: "clientIP" is not None or ClientIP"#;
    assert_eq!(
        affinity("sessionAffinity: clientIP"),
        (None, vec![refusal.to_owned()])
    );
}

#[test]
fn traffic_policies() {
    use model::TrafficPolicy::{Cluster, Local};
    let policies = |spec: &str| {
        let (object, refusals) = taken(&format!("clusterIP: 10.0.0.1{spec}"));
        let service = object.unwrap();
        (service.internal_policy, service.external_policy, refusals)
    };
    for none_said in [
        "",
        ", internalTrafficPolicy: null",
        r#", externalTrafficPolicy: """#,
    ] {
        assert_eq!(
            policies(none_said),
            (Cluster, Cluster, none()),
            "{none_said}"
        );
    }
    assert_eq!(
        policies(", internalTrafficPolicy: Local, externalTrafficPolicy: Cluster"),
        (Local, Cluster, none())
    );
    assert_eq!(
        policies(", internalTrafficPolicy: Cluster, externalTrafficPolicy: Local"),
        (Cluster, Local, none())
    );
    let refusal = |field: &str, value: &str| {
        format!(
            "Service default/app1: spec.{field}: \"{value}\" is not Cluster or Local; Cluster is used"
        )
    };
    assert_eq!(
        policies(", internalTrafficPolicy: local, externalTrafficPolicy: PreferLocal"),
        (
            Cluster,
            Cluster,
            vec![
                refusal("internalTrafficPolicy", "local"),
                refusal("externalTrafficPolicy", "PreferLocal"),
            ]
        )
    );
}

#[test]
fn hints() {
    let hinted = |hints: &[&str]| {
        let endpoints: Vec<String> = hints
            .iter()
            .enumerate()
            .map(|(i, hints)| format!("{{addresses: [10.1.0.{}], hints: {hints}}}", i + 1))
            .collect();
        let endpoints = endpoints.join(", ");
        let body = format!("addressType: IPv4\nports: []\nendpoints: [{endpoints}]");
        let (object, refusals) = sliced(OF_WEB, &body);
        let slice = object.unwrap();
        let all = slice.endpoints.iter();
        let places = all.map(|e| (e.node_hint, e.zone_hints.map_or(0, NonZeroU16::get)));
        let zones = slice.zone_hints.iter().map(|zones| zones.join(" "));
        (
            places.collect::<Vec<_>>(),
            zones.collect::<Vec<_>>(),
            refusals,
        )
    };
    use model::Hint::{Absent, Elsewhere, Here};
    // None at all.
    for empty in [
        "null",
        "{}",
        "{forZones: [], forNodes: []}",
        "{forZones: null}",
    ] {
        assert_eq!(
            hinted(&[empty]),
            (vec![(Absent, 0)], vec![], none()),
            "{empty}"
        );
    }
    // Each list of zones is there once, however it is sorted.
    assert_eq!(
        hinted(&[
            "{forZones: [{name: a}]}",
            "{forZones: [{name: b}, {name: a}], forNodes: [{name: n2}, {name: n1}]}",
            "{forZones: [{name: a}], forNodes: [{name: n2}]}",
            "{forZones: [{name: a}, {name: b}, {name: a}]}",
            "{forNodes: [{name: N1}]}",
        ]),
        (
            vec![
                (Absent, 1),
                (Here, 2),
                (Elsewhere, 1),
                (Absent, 2),
                (Elsewhere, 0)
            ],
            vec!["a".to_owned(), "a b".to_owned()],
            none()
        )
    );
    // More than the API takes are fine.
    let many: Vec<String> = (0..20).map(|n| format!("{{name: n{n}}}")).collect();
    let many = many.join(", ");
    let (places, zones, refusals) =
        hinted(&[&format!("{{forZones: [{many}], forNodes: [{many}]}}")]);
    assert_eq!((places, refusals), (vec![(Here, 1)], none()));
    assert_eq!(zones[0].split(' ').count(), 20);
    // What can't be read is a hint for nobody.
    let refusal = |field: &str| {
        format!(
            "EndpointSlice ns/s: endpoints[0].hints.{field}.name: \"\" names nothing, so the hint is for nobody"
        )
    };
    assert_eq!(
        hinted(&["{forZones: [{}, {name: a}], forNodes: [{name: null}]}"]),
        (
            vec![(Elsewhere, 1)],
            vec![" a".to_owned()],
            vec![refusal("forNodes[0]"), refusal("forZones[0]")]
        )
    );
}

fn sliced(head: &str, body: &str) -> (Option<model::Slice>, Vec<String>) {
    let yaml = format!("metadata: {{name: s, namespace: ns{head}}}\n{body}");
    let t = slice(&object::<EndpointSlice>(&yaml), "n1");
    (
        t.object,
        t.refusals.iter().map(ToString::to_string).collect(),
    )
}

const OF_WEB: &str = ", labels: {kubernetes.io/service-name: web}";

#[test]
fn a_whole_slice() {
    let (object, refusals) = sliced(
        OF_WEB,
        r#"
addressType: IPv4
ports:
- {name: http, port: 8080}
- {name: "", port: 53, protocol: UDP}
- {name: x, port: 5, protocol: SCTP}
endpoints:
- {addresses: [010.1.0.1, 10.1.0.9], nodeName: n1}
- {addresses: [10.1.0.2], nodeName: n2, conditions: {ready: false}}
- {addresses: [10.1.0.3], conditions: {ready: false, serving: true, terminating: true}}
- {addresses: [10.1.0.4], conditions: {ready: true, serving: false, terminating: null}}
"#,
    );
    assert_eq!(refusals, none());
    let port = |name: &str, protocol, port| model::SlicePort {
        name: name.into(),
        protocol,
        port,
    };
    let endpoint = |last: u8, ready, serving, terminating, local| model::Endpoint {
        address: [10, 1, 0, last].into(),
        ready,
        serving,
        terminating,
        local,
        placed: last <= 2,
        node_hint: model::Hint::Absent,
        zone_hints: None,
    };
    assert_eq!(
        object,
        Some(model::Slice {
            service: model::ObjectName::new("ns", "web"),
            family: Family::V4,
            ports: vec![
                port("http", Protocol::Tcp, 8080),
                port("", Protocol::Udp, 53),
                port("x", Protocol::Sctp, 5),
            ],
            endpoints: vec![
                endpoint(1, true, true, false, true),
                endpoint(2, false, true, false, false),
                endpoint(3, false, true, true, false),
                endpoint(4, true, false, false, false),
            ],
            zone_hints: Vec::new(),
        })
    );
}

#[test]
fn slices_that_are_left_out_or_refused() {
    let body = "addressType: IPv4\nports: []\nendpoints: []";
    assert!(sliced(OF_WEB, body).0.is_some());
    for head in [
        "",
        ", labels: {}",
        r#", labels: {kubernetes.io/service-name: ""}"#,
        r#", labels: {kubernetes.io/service-name: web, service.kubernetes.io/headless: ""}"#,
    ] {
        assert_eq!(sliced(head, body), (None, none()), "{head}");
    }
    // Only a Service can be another proxy's.
    let head =
        ", labels: {kubernetes.io/service-name: web, service.kubernetes.io/service-proxy-name: x}";
    assert!(sliced(head, body).0.is_some());
    assert_eq!(sliced(OF_WEB, "addressType: FQDN"), (None, none()));
    for (body, value) in [("addressType: IPv5", "\"IPv5\""), ("ports: []", "\"\"")] {
        let refusal = format!("EndpointSlice ns/s: addressType: {value} is not IPv4 or IPv6");
        assert_eq!(sliced(OF_WEB, body), (None, vec![refusal]));
    }
}

#[test]
fn ports_of_slices() {
    let ports = |ports: &str| {
        let endpoint = "endpoints: [{addresses: [fd00::1]}]";
        let (object, refusals) = sliced(OF_WEB, &format!("addressType: IPv6\n{endpoint}\n{ports}"));
        let ports: Vec<u16> = object.unwrap().ports.iter().map(|p| p.port).collect();
        let prefix = "EndpointSlice ns/s: ";
        (
            ports,
            refusals
                .iter()
                .map(|r| r.strip_prefix(prefix).unwrap().to_owned())
                .collect::<Vec<_>>(),
        )
    };
    let unnamed = "ports: null names no ports, so the endpoints of this slice are not used; \
                   list the ports of the Service";
    assert_eq!(ports("ports: null"), (vec![], vec![unnamed.to_owned()]));
    assert_eq!(ports(""), (vec![], vec![unnamed.to_owned()]));
    let (object, refusals) = sliced(OF_WEB, "addressType: IPv6\nendpoints: []\nports: null");
    assert!(object.unwrap().ports.is_empty());
    assert_eq!(refusals, none(), "there is nothing to use");
    assert_eq!(ports("ports: []"), (vec![], none()));
    assert_eq!(
        ports("ports: [{port: 80}, {name: null, protocol: null, port: 81}]"),
        (vec![80, 81], none()),
        "as the API server fills them in"
    );
    for (entry, refusal) in [
        (
            "{name: a}",
            "ports[0].port: null is no number, so this port is not used; write that of the endpoints",
        ),
        (
            "{port: null}",
            "ports[0].port: null is no number, so this port is not used; write that of the endpoints",
        ),
        (
            "{name: b, port: 0}",
            "ports[0].port: 0 is not a port (1 to 65535)",
        ),
        (
            "{name: a, port: 65536}",
            "ports[0].port: 65536 is not a port (1 to 65535)",
        ),
        (
            "{name: a, port: -5}",
            "ports[0].port: -5 is not a port (1 to 65535)",
        ),
        (
            "{name: a, port: 5, protocol: ICMP}",
            "ports[0].protocol: \"ICMP\" is not TCP, UDP or SCTP",
        ),
    ] {
        let all = format!("ports: [{entry}, {{name: z, port: 9}}]");
        assert_eq!(ports(&all), (vec![9], vec![refusal.to_owned()]), "{entry}");
    }
}

#[test]
fn endpoints_that_are_refused_leave_the_others() {
    let endpoints = |family: &str, first: &str, good: &str| {
        let body = format!(
            "addressType: {family}\nports: []\nendpoints: [{{addresses: [{first}]}}, {{addresses: [\"{good}\"]}}]"
        );
        let (object, refusals) = sliced(OF_WEB, &body);
        let addresses: Vec<String> = object
            .unwrap()
            .endpoints
            .iter()
            .map(|e| e.address.to_string())
            .collect();
        assert_eq!(addresses, [good], "{first}");
        refusals
    };
    for (address, reason) in [
        ("\"10.0.0.300\"", "is not an IP address"),
        (
            "\"fd00::1\"",
            "is not an IPv4 address, which this slice holds",
        ),
        (
            "\"127.0.0.1\"",
            "is a loopback address, which can't be an endpoint",
        ),
        (
            "\"0.0.0.0\"",
            "is the unspecified address, which can't be an endpoint",
        ),
        (
            "\"239.1.1.1\"",
            "is a multicast address, which can't be an endpoint",
        ),
        (
            "\"169.254.3.4\"",
            "is a link-local address, which can't be an endpoint",
        ),
    ] {
        let refusal = format!("EndpointSlice ns/s: endpoints[0].addresses[0]: {address} {reason}");
        assert_eq!(endpoints("IPv4", address, "10.0.0.1"), [refusal]);
    }
    for (address, reason) in [
        (
            "\"10.0.0.1\"",
            "is not an IPv6 address, which this slice holds",
        ),
        (
            "\"::ffff:10.0.0.1\"",
            "is not an IPv6 address, which this slice holds",
        ),
        (
            "\"::1\"",
            "is a loopback address, which can't be an endpoint",
        ),
        (
            "\"fe80::1\"",
            "is a link-local address, which can't be an endpoint",
        ),
        (
            "\"ff02::1\"",
            "is a multicast address, which can't be an endpoint",
        ),
    ] {
        let refusal = format!("EndpointSlice ns/s: endpoints[0].addresses[0]: {address} {reason}");
        assert_eq!(endpoints("IPv6", address, "fd00::1"), [refusal]);
    }
    let refusal = "EndpointSlice ns/s: endpoints[0].addresses: [] holds no address";
    assert_eq!(endpoints("IPv4", "", "10.0.0.1"), [refusal]);
}

#[test]
fn refusals_of_one_object_are_few_and_short() {
    let long = "x".repeat(1000);
    let listed = vec![long.as_str(); 5000].join(", ");
    let (object, refusals) = taken(&format!("clusterIP: 10.0.0.1, externalIPs: [{listed}]"));
    assert!(object.is_some());
    assert_eq!(refusals.len(), 11);
    assert!(refusals.iter().all(|refusal| refusal.len() < 300));
    let sum = "Service default/app1: more fields than these 10: also can't be used";
    assert_eq!(refusals[10], sum);
}

#[test]
fn the_node() {
    let t = node(&object::<Node>(
        r#"
metadata: {name: n1}
status:
  addresses:
  - {type: InternalIP, address: 192.168.1.1}
  - {type: InternalIP, address: "FD00::0:1"}
  - {type: ExternalIP, address: 203.0.113.9}
  - {type: Hostname, address: n1}
  - {type: InternalDNS, address: n1.local}
  - {type: InternalIP, address: n1}
  - {type: InternalIP, address: 0.0.0.0}
  - {type: ExternalIP, address: "ff02::1"}
  - {type: InternalIP, address: 127.0.0.1}
"#,
    ));
    let addresses: Vec<String> = t
        .object
        .unwrap()
        .addresses
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(addresses, ["192.168.1.1", "203.0.113.9", "fd00::1"]);
    let refusals: Vec<String> = t.refusals.iter().map(ToString::to_string).collect();
    assert_eq!(
        refusals,
        [
            r#"Node n1: status.addresses[5].address: "n1" is not an IP address"#,
            r#"Node n1: status.addresses[6].address: "0.0.0.0" is the unspecified address"#,
            r#"Node n1: status.addresses[7].address: "ff02::1" is a multicast address"#,
            r#"Node n1: status.addresses[8].address: "127.0.0.1" is a loopback address"#,
        ]
    );
    assert_eq!(
        node(&object::<Node>("metadata: {name: n1}")).object,
        Some(model::Node::default())
    );
    let zone = |labels: &str| {
        let text = format!("metadata: {{name: n1, labels: {labels}}}");
        node(&object::<Node>(&text)).object.unwrap().zone
    };
    assert_eq!(
        zone("{topology.kubernetes.io/zone: a, topology.kubernetes.io/region: b}"),
        Some("a".into())
    );
    for none_said in [
        "null",
        "{}",
        "{topology.kubernetes.io/region: b}",
        r#"{topology.kubernetes.io/zone: ""}"#,
    ] {
        assert_eq!(zone(none_said), None, "{none_said}");
    }
}

#[test]
fn the_primary_addresses_of_the_node() {
    let primary = |addresses: &str| {
        let text = format!("metadata: {{name: n1}}\nstatus: {{addresses: [{addresses}]}}");
        let primary = node(&object::<Node>(&text)).object.unwrap().primary;
        primary.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(
        primary(
            "{type: ExternalIP, address: 203.0.113.9}, {type: InternalIP, address: 'fd00::1'},
             {type: InternalIP, address: 10.0.0.1}, {type: InternalIP, address: 10.0.0.2}"
        ),
        ["10.0.0.1", "fd00::1"]
    );
    assert_eq!(
        primary(
            "{type: ExternalIP, address: 'fd00::9'}, {type: InternalIP, address: 10.0.0.1},
             {type: Hostname, address: n1}"
        ),
        ["10.0.0.1", "fd00::9"]
    );
}

#[test]
fn the_networks_of_the_nodes_pods() {
    let of = |spec: &str| {
        let text = format!("metadata: {{name: n1}}\nspec: {{{spec}}}");
        let (networks, refusals) = pod_cidrs(&object::<Node>(&text));
        let refusals: Vec<String> = refusals.iter().map(ToString::to_string).collect();
        (format!("{networks:?}"), refusals.join("\n"))
    };
    let taken = |networks: &str| (networks.to_owned(), String::new());
    assert_eq!(of(""), taken("[]"));
    assert_eq!(of("podCIDR: '', podCIDRs: []"), taken("[]"));
    assert_eq!(of("podCIDR: 10.244.1.0/24"), taken("[10.244.1.0/24]"));
    let both = of("podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24, 'fd00:1::/64']");
    assert_eq!(both, taken("[10.244.1.0/24, fd00:1::/64]"));
    let (networks, refusals) = of("podCIDRs: [10.244.1.0/33, 10.244.2.0/24, 10.244.3.0/24]");
    assert_eq!(networks, "[10.244.2.0/24]");
    assert_eq!(
        refusals,
        "Node n1: spec.podCIDRs[0]: \"10.244.1.0/33\" is not a network such as 10.244.1.0/24\n\
         Node n1: spec.podCIDRs[2]: \"10.244.3.0/24\" is one too many; a Node has one network a \
         family for its pods"
    );
    let (_, refusals) = of("podCIDR: x");
    assert!(
        refusals.starts_with("Node n1: spec.podCIDR: \"x\" is not"),
        "{refusals}"
    );
}

proptest! {
    #[test]
    fn any_canonical_address_is_itself(bits: u128, v4: u32) {
        let v6 = IpAddr::V6(Ipv6Addr::from_bits(bits));
        let v4 = IpAddr::V4(Ipv4Addr::from_bits(v4));
        prop_assert_eq!(parse_address(&v6.to_string()), Some(v6.to_canonical()));
        prop_assert_eq!(parse_address(&v4.to_string()), Some(v4));
    }

    #[test]
    fn no_text_is_too_strange(text in "[0-9a-f.:]{0,20}|.{0,20}") {
        let _ = parse_address(&text);
    }
}

/// Four times as much takes four times as long, not sixteen times.
#[test]
fn time_grows_with_the_size_of_an_object() {
    use serde_json::json;
    use std::time::Duration;

    use nix::time::ClockId;

    let many = |number: u32| {
        let port = |n: u32| {
            json!({"name": format!("p{n}"), "port": n % 65_535 + 1,
                "protocol": (["TCP", "UDP"][n as usize % 2]), "nodePort": n % 65_535 + 1})
        };
        let ports: Vec<_> = (0..number).map(port).collect();
        let address =
            |n: u32| std::net::Ipv4Addr::from(u32::from_be_bytes([198, 18, 0, 1]) + n).to_string();
        let addresses: Vec<_> = (0..number).map(address).collect();
        let ingress: Vec<_> = addresses.iter().map(|ip| json!({ "ip": ip })).collect();
        let endpoints: Vec<_> = addresses
            .iter()
            .map(|ip| json!({ "addresses": [ip] }))
            .collect();
        let of_node: Vec<_> = addresses
            .iter()
            .map(|ip| json!({"type": "InternalIP", "address": ip}))
            .collect();
        let service: crate::objects::Service = serde_json::from_value(json!({
            "metadata": {"name": "s"},
            "spec": {"type": "NodePort", "clusterIP": "10.0.0.1", "ports": ports, "externalIPs": addresses},
            "status": {"loadBalancer": {"ingress": ingress}},
        }))
        .unwrap();
        let slice: EndpointSlice = serde_json::from_value(json!({
            "metadata": {"name": "e", "labels": {"kubernetes.io/service-name": "s"}},
            "addressType": "IPv4", "ports": ports, "endpoints": endpoints,
        }))
        .unwrap();
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n"}, "status": {"addresses": of_node},
        }))
        .unwrap();
        let took = |work: &dyn Fn() -> usize| {
            // The time of this thread alone, whatever else the machine does.
            let now = || Duration::from(ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap());
            let once = || {
                let start = now();
                assert_eq!(work(), number as usize);
                now() - start
            };
            (0..5).map(|_| once()).min().unwrap()
        };
        [
            took(&|| super::service(&service).object.unwrap().ports.len()),
            took(&|| super::slice(&slice, "n").object.unwrap().endpoints.len()),
            took(&|| super::node(&node).object.unwrap().addresses.len()),
        ]
    };
    for (less, more) in many(5000).into_iter().zip(many(20_000)) {
        assert!(more < less * 10, "{less:?} {more:?}");
    }
}
