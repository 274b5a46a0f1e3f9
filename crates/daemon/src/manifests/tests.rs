use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ipvs_proxy_core::guard::Needed;
use ipvs_proxy_core::model::{Change, ObjectName};

use super::*;
use crate::translate::object_name;

fn good(text: &str, format: Format) -> Vec<Placed> {
    let (placed, errors) = read_text("app.yaml", text, format);
    assert_eq!(errors, []);
    placed
}

fn yaml(text: &str) -> Vec<Placed> {
    good(text, Format::Yaml)
}

/// The only error.
fn error(text: &str, format: Format) -> String {
    let (_, errors) = read_text("app.yaml", text, format);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors[0].to_string()
}

/// Kind, name and line of what is read.
fn shape(placed: &[Placed]) -> Vec<(&'static str, String, usize)> {
    let shape = placed.iter().map(|p| {
        let kind = match p.object {
            Object::Service(_) => "Service",
            Object::EndpointSlice(_) => "EndpointSlice",
            Object::Node(_) => "Node",
        };
        let metadata = p.object.metadata();
        let name = object_name(metadata.namespace.as_deref(), metadata.name.as_deref());
        (kind, name.to_string(), p.line)
    });
    shape.collect()
}

fn service_text(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"
    )
}

#[test]
fn documents_of_all_forms() {
    let text = "\u{feff}# a comment\n---\n# nothing here\n---\napiVersion: v1\nkind: Service\n\
                metadata:\n  name: a\n  annotations:\n    text: |\n      one\n      --- two\n---  # again\r\n\
                apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s, namespace: ns}\n\
                addressType: IPv4\nendpoints: []\n...\n# between\n%YAML 1.2\n---\n\
                {apiVersion: v1, kind: Node, metadata: {name: n}}\n--- {apiVersion: v1, kind: Service, metadata: {name: b}}\n\
                ---\nnull\n---\napiVersion: apps/v1\nkind: Deployment\nspec: {anything: [goes]}\n";
    assert_eq!(
        shape(&yaml(text)),
        [
            ("Service", "default/a".to_owned(), 4),
            ("EndpointSlice", "ns/s".to_owned(), 13),
            ("Node", "default/n".to_owned(), 22),
            ("Service", "default/b".to_owned(), 24),
        ]
    );
    assert_eq!(yaml(""), []);
}

#[test]
fn lists() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: a}}\n\
                - {apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {k: v}}\n\
                - {kind: EndpointSlice, apiVersion: discovery.k8s.io/v1, metadata: {name: s}}\n---\n\
                apiVersion: v1\nkind: ServiceList\nmetadata: {resourceVersion: \"5\"}\nitems:\n- metadata: {name: b}\n---\n\
                apiVersion: discovery.k8s.io/v1\nkind: EndpointSliceList\nitems:\n- metadata: {name: c}\n  addressType: IPv4\n---\n\
                apiVersion: v1\nkind: NodeList\nitems: [{metadata: {name: n}}]\n---\n\
                apiVersion: v1\nkind: List\nitems: null\n---\napiVersion: v1\nkind: List\n";
    let names: Vec<_> = shape(&yaml(text))
        .into_iter()
        .map(|(k, n, _)| (k, n))
        .collect();
    assert_eq!(
        names,
        [
            ("Service", "default/a".to_owned()),
            ("EndpointSlice", "default/s".to_owned()),
            ("Service", "default/b".to_owned()),
            ("EndpointSlice", "default/c".to_owned()),
            ("Node", "default/n".to_owned()),
        ]
    );
}

#[test]
fn json_values_one_after_the_other() {
    let text = "{\"apiVersion\": \"v1\",\n\"kind\": \"Service\", \"metadata\": {\"name\": \"a\"}}\n\n\
                {\"apiVersion\": \"v1\", \"kind\": \"List\", \"items\": [\n{\"apiVersion\": \"v1\", \"kind\": \"Node\",\
                \"metadata\": {\"name\": \"n\", \"labels\": {\"a\": \"\\ud83d\\ude00\"}}}]}";
    let placed = good(text, Format::Json);
    assert_eq!(
        shape(&placed),
        [
            ("Service", "default/a".to_owned(), 1),
            ("Node", "default/n".to_owned(), 4)
        ]
    );
    assert!(is_json(text) && !is_json("{a: b}") && !is_json("a: b"));
}

#[test]
fn errors_name_line_object_and_field() {
    let cases: &[(&str, &str)] = &[
        (
            "# one\n---\napiVersion: v1\nkind: Service\nmetadata: {name: app1}\nspec:\n  ports:\n  - port: x\n",
            "app.yaml:8: Service default/app1: spec.ports[0].port: invalid value: \"x\", expected i32",
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n\
             - apiVersion: v1\n  kind: Service\n  metadata: {name: b, namespace: ns}\n  spec:\n    ports: 5\n",
            "app.yaml:11: Service ns/b: spec.ports: ",
        ),
        (
            "kind: Service\nmetadata: {name: a}\n",
            "app.yaml:1: apiVersion: is missing; write \"v1\"",
        ),
        (
            "apiVersion: v2\nkind: Service\n",
            "app.yaml:1: apiVersion: \"v2\" of a Service is not supported; write \"v1\"",
        ),
        (
            "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\n",
            "app.yaml:1: apiVersion: \"discovery.k8s.io/v1beta1\" of a EndpointSlice is not supported; write \"discovery.k8s.io/v1\"",
        ),
        (
            "a: b\n",
            "app.yaml:1: kind: is missing; is this a Kubernetes object?",
        ),
        ("\n\n- a\n", "app.yaml:3: "),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {namespace: x}\n",
            "app.yaml:1: Service: metadata.name: is missing",
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Node}\n",
            "app.yaml:1: Node: items[0].metadata.name: is missing",
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: List}\n",
            "app.yaml:1: items[0].kind: is a list within a list",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n---\nkind: [\n",
            "app.yaml:",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: a, name: b}\n",
            "app.yaml:3: Service",
        ),
        ("kind: Service\n\tapiVersion: v1\n", "app.yaml:1: "),
    ];
    for (text, expected) in cases {
        let error = error(text, Format::Yaml);
        assert!(error.starts_with(expected), "{error}\n{expected}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    assert_eq!(
        error(
            "{}\n\n{\"apiVersion\": \"v1\", \"kind\": \"Secret\"}",
            Format::Json
        ),
        "app.yaml:1: kind: is missing; is this a Kubernetes object?"
    );
    let json = "{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\"}\n\n{\"apiVersion\": \"v1\", \"kind\": \"Service\",\n\
                \"metadata\": {\"name\": \"a\"}, \"spec\": {\"ports\": [{\"port\":\n\"80\"}]}}";
    assert_eq!(
        error(json, Format::Json),
        "app.yaml:5: Service default/a: spec.ports[0].port: invalid type: string \"80\", expected i32"
    );
    let broken = "{\"kind\": \"A\", \"apiVersion\": \"v1\"}\n{\"kind\":\n\"B\"";
    assert_eq!(
        error(broken, Format::Json),
        "app.yaml:3: EOF while parsing an object"
    );
}

#[test]
fn a_broken_object_leaves_the_others() {
    let text = "apiVersion: v1\nkind: List\nitems:\n\
                - {apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: 5}}\n\
                - {apiVersion: v1, kind: Service, metadata: {name: b}}\n\
                - {apiVersion: v1, kind: Service}\n---\nkind: [\n---\n\
                apiVersion: v1\nkind: Node\nmetadata: {name: n}\n---\n\
                apiVersion: v1\nkind: Service\nmetadata: {name: c}\nspec: 5\n";
    let (placed, errors) = read_text("app.yaml", text, Format::Yaml);
    let names: Vec<_> = shape(&placed)
        .into_iter()
        .map(|(_, name, _)| name)
        .collect();
    assert_eq!(names, ["default/b", "default/n"]);
    let errors: Vec<_> = errors
        .iter()
        .map(|e| (e.line, e.object.as_deref(), e.object_only))
        .collect();
    assert_eq!(
        errors,
        [
            (Some(4), Some("Service default/a"), true),
            (Some(1), Some("Service"), true),
            (Some(8), None, false),
            (Some(17), Some("Service default/c"), true),
        ]
    );
}

#[test]
fn kinds_of_other_groups_are_ignored() {
    let text = "apiVersion: serving.knative.dev/v1\nkind: Service\nspec: 5\n---\n\
                apiVersion: multicluster.x-k8s.io/v1\nkind: EndpointSlice\n";
    assert_eq!(yaml(text), []);
}

#[test]
fn size_is_no_limit_but_aliases_are() {
    // More nodes than the parser takes by default.
    let values = "x, ".repeat(300_000);
    let text = format!("apiVersion: v1\nkind: ConfigMap\ndata: [{values}]\n");
    assert_eq!(yaml(&text), []);

    let mut bomb = "apiVersion: v1\nkind: ConfigMap\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for level in 1..12 {
        let below = format!("*a{}", level - 1);
        bomb.push_str(&format!(
            "a{level}: &a{level} [{}]\n",
            vec![below; 10].join(",")
        ));
    }
    assert_eq!(read_text("bomb.yaml", &bomb, Format::Yaml).1.len(), 1);
    // A few aliases are fine.
    let text = "apiVersion: v1\nkind: Service\nmetadata: &m {name: a}\nspec: {selector: *m}\n";
    assert_eq!(yaml(text).len(), 1);
}

mod following;

/// A directory of its own for a test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let name = format!("ipvs-proxy-manifests-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// In one step.
    fn replace(&self, name: &str, text: &str) {
        self.write("new", text);
        fs::rename(self.path("new"), self.path(name)).unwrap();
    }

    fn source(&self) -> Source {
        Source::new(vec![self.0.clone()], "n1", true)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// `+a` for a Service that is there, `-a` for one that is gone, with its address.
fn changes(source: &mut Source) -> Vec<String> {
    outcome(source).0
}

fn outcome(source: &mut Source) -> (Vec<String>, Vec<String>) {
    let (changes, problems) = source.rescan();
    let problems = problems.iter().map(ToString::to_string);
    (said(changes), problems.collect())
}

fn said(changes: Vec<Change>) -> Vec<String> {
    let changes = changes.into_iter().map(|change| match change {
        Change::Service(name, Some(service)) => {
            format!("+{} {}", name.name, service.cluster_ips[0])
        }
        Change::Service(name, None) => format!("-{}", name.name),
        Change::Slice(name, Some(slice)) => format!("+{} {}", name.name, slice.endpoints.len()),
        Change::Slice(name, None) => format!("-{}", name.name),
        Change::Node(node) => match &node.zone {
            Some(zone) => format!("node {} in {zone}", node.addresses.len()),
            None => format!("node {}", node.addresses.len()),
        },
        Change::PodCidrs(networks) => format!("pods {networks:?}"),
        Change::Needed(by, addresses) => format!("{by} {addresses:?}"),
        Change::NodeAddresses(_) | Change::Listeners(_) => {
            panic!("no manifest tells of links and processes")
        }
    });
    changes.collect()
}

#[test]
fn a_directory_tells_the_difference() {
    let dir = Scratch::new("difference");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    dir.write("b.yml", &service_text("b", "10.0.0.2"));
    dir.write("c.json", r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "c"}, "spec": {"clusterIP": "10.0.0.3"}}"#);
    dir.write("d.txt", "not read");
    dir.write(".hidden.yaml", "not: read");
    fs::create_dir(dir.path("e.yaml")).unwrap();
    let mut source = dir.source();
    assert_eq!(
        changes(&mut source),
        ["+a 10.0.0.1", "+b 10.0.0.2", "+c 10.0.0.3"]
    );
    assert!(source.is_complete());
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    dir.write("b.yml", &service_text("b", "10.0.0.9"));
    assert_eq!(changes(&mut source), ["+b 10.0.0.9"]);
    // Rewritten, but with nothing new.
    dir.write(
        "b.yml",
        &format!("# more\n{}", service_text("b", "10.0.0.9")),
    );
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    // Of the same size at nearly the same time.
    dir.write(
        "b.yml",
        &format!("# more\n{}", service_text("b", "10.0.0.8")),
    );
    assert_eq!(changes(&mut source), ["+b 10.0.0.8"]);
    // From one file to the other at once is no change.
    dir.write("f.yaml", &service_text("a", "10.0.0.1"));
    fs::remove_file(dir.path("a.yaml")).unwrap();
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    fs::remove_file(dir.path("f.yaml")).unwrap();
    dir.write(
        "c.json",
        "{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\"}",
    );
    assert_eq!(changes(&mut source), ["-a", "-c"]);
    // Left out now, so gone.
    dir.write("b.yml", &service_text("b", "None"));
    assert_eq!(changes(&mut source), ["-b"]);
    assert_eq!(outcome(&mut source), (vec![], vec![]));
}

#[test]
fn a_bad_file_keeps_its_last_good_content() {
    let dir = Scratch::new("bad");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    dir.write("b.yaml", "kind: [");
    let mut source = dir.source();
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, ["+a 10.0.0.1"]);
    assert!(problems[0].starts_with(&format!("{}:", dir.path("b.yaml").display())));
    assert!(
        !problems[0].contains("stays in force") && problems.len() == 1,
        "{problems:?}"
    );
    assert!(!source.is_complete());
    let file = |name: &str| dir.path(name).display().to_string();
    assert_eq!(source.faults(), [file("b.yaml")]);
    dir.write("b.yaml", &service_text("b", "10.0.0.2"));
    dir.write(
        "a.yaml",
        "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: 5}\n",
    );
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, ["+b 10.0.0.2"]);
    assert!(
        problems[0].contains("a.yaml:4: Service default/a: spec.ports: "),
        "{problems:?}"
    );
    assert!(problems[0].ends_with("; the file's last good content stays in force"));
    let mended = |file: &str| format!("{}: is good again", dir.path(file).display());
    assert_eq!(problems[1..], [mended("b.yaml")]);
    assert!(source.is_complete());
    assert_eq!(source.faults(), [file("a.yaml")]);
    std::thread::sleep(Duration::from_millis(120));
    dir.write("a.yaml", "\u{0}\u{1}");
    fs::write(dir.path("b.yaml"), [0xff, b'\n']).unwrap();
    let (changes, problems) = outcome(&mut source);
    assert_eq!((changes.len(), problems.len()), (0, 2));
    assert!(
        problems[1].contains("b.yaml:1: is not UTF-8 text"),
        "{problems:?}"
    );
    // Said once.
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    let expected = (vec!["+a 10.0.0.3".to_owned()], vec![mended("a.yaml")]);
    dir.write("a.yaml", &service_text("a", "10.0.0.3"));
    assert_eq!(outcome(&mut source), expected);
    dir.write("a.yaml", &service_text("a", "10.0.0.4"));
    assert_eq!(
        outcome(&mut source),
        (vec!["+a 10.0.0.4".to_owned()], vec![])
    );
    fs::remove_file(dir.path("b.yaml")).unwrap();
    assert_eq!(outcome(&mut source), (vec!["-b".to_owned()], vec![]));
    assert_eq!(source.faults(), [""; 0]);
}

#[test]
fn a_directory_that_vanishes_keeps_its_last_good_content() {
    let dir = Scratch::new("vanish");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    let mut source = dir.source();
    assert_eq!(changes(&mut source), ["+a 10.0.0.1"]);
    let away = dir.0.with_extension("away");
    fs::rename(&dir.0, &away).unwrap();
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, [""; 0]);
    assert_eq!(problems.len(), 1);
    assert!(
        problems[0].ends_with("; what was last read there stays in force"),
        "{problems:?}"
    );
    assert!(!source.is_complete());
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    fs::rename(&away, &dir.0).unwrap();
    let mended = format!("{}: is good again", dir.0.display());
    assert_eq!(outcome(&mut source), (vec![], vec![mended]));
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    assert!(source.is_complete());
    // A file that is named itself is kept too.
    let mut source = Source::new(vec![dir.path("a.yaml")], "n1", true);
    assert_eq!(self::changes(&mut source), ["+a 10.0.0.1"]);
    fs::remove_file(dir.path("a.yaml")).unwrap();
    let (changes, problems) = outcome(&mut source);
    assert_eq!((changes.len(), problems.len()), (0, 1));
}

#[test]
fn an_object_in_two_files_is_the_last_ones() {
    let dir = Scratch::new("twice");
    dir.write("a.yaml", &service_text("x", "10.0.0.1"));
    dir.write("b.yaml", &service_text("x", "10.0.0.2"));
    let mut source = dir.source();
    let (changes, problems) = outcome(&mut source);
    let (a, b) = (dir.path("a.yaml"), dir.path("b.yaml"));
    let (a, b) = (a.display(), b.display());
    assert_eq!(changes, ["+x 10.0.0.2"]);
    assert_eq!(
        problems,
        [format!(
            "Service default/x: is in {a} and in {b}; the one in {b} is used"
        )]
    );
    dir.write("a.yaml", &service_text("x", "10.0.0.3"));
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    dir.write("b.yaml", "# nothing any more\n");
    assert_eq!(outcome(&mut source).0, ["+x 10.0.0.3"]);
    let twice = format!(
        "{}---\n{}",
        service_text("x", "10.0.0.4"),
        service_text("x", "10.0.0.5")
    );
    dir.write("a.yaml", &twice);
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, ["+x 10.0.0.5"]);
    assert_eq!(
        problems,
        [format!(
            "Service default/x: is in {a} and in {a}:5; the one in {a}:5 is used"
        )]
    );
    // Paths count in the order in which they are given.
    let paths = vec![dir.path("b.yaml"), dir.path("a.yaml")];
    dir.write("a.yaml", &service_text("x", "10.0.0.1"));
    dir.write("b.yaml", &service_text("x", "10.0.0.2"));
    assert_eq!(
        self::changes(&mut Source::new(paths, "n1", true)),
        ["+x 10.0.0.1"]
    );
}

#[test]
fn refusals_are_told_once() {
    let dir = Scratch::new("refusals");
    dir.write("a.yaml", &service_text("a", "10.0.0.300"));
    let mut source = dir.source();
    let (changes, problems) = outcome(&mut source);
    let file = dir.path("a.yaml");
    let file = file.display();
    let line = "Service default/a: spec.clusterIP: \"10.0.0.300\" is not an IP address";
    assert_eq!(
        (changes, problems),
        (vec![], vec![format!("{file}:1: {line}")])
    );
    dir.write(
        "a.yaml",
        &format!("# more\n{}", service_text("a", "10.0.0.300")),
    );
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    dir.write("a.yaml", &service_text("a", "10.0.0.30"));
    let mended = format!("{file}: is good again");
    assert_eq!(
        outcome(&mut source),
        (vec!["+a 10.0.0.30".to_owned()], vec![mended])
    );
    dir.write("a.yaml", &service_text("a", "10.0.0.300"));
    let (changes, problems) = outcome(&mut source);
    assert_eq!((changes, problems.len()), (vec!["-a".to_owned()], 1));
}

#[test]
fn slices_and_the_own_node() {
    let dir = Scratch::new("node");
    let node = |name: &str, address: &str| {
        format!(
            "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n\
             status: {{addresses: [{{type: InternalIP, address: {address}}}]}}\n---\n"
        )
    };
    dir.write(
        "n.yaml",
        &(node("n1", "10.0.0.1") + &node("n2", "10.0.0.2")),
    );
    dir.write(
        "s.yaml",
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {name: s, labels: {kubernetes.io/service-name: a}}\naddressType: IPv4\nports: []\n\
         endpoints: [{addresses: [10.1.0.1], nodeName: n1}]\n",
    );
    let (changes, _) = dir.source().rescan();
    let addresses = BTreeSet::from(["10.0.0.1".parse().unwrap()]);
    assert!(matches!(&changes[0], Change::Node(node) if node.addresses == addresses));
    // Another node's addresses are no Service's.
    let of_other = BTreeSet::from([Needed::host("10.0.0.2".parse().unwrap())]);
    assert_eq!(changes[1], Change::Needed("Node n2".into(), of_other));
    let Change::Slice(name, Some(slice)) = &changes[2] else {
        panic!("{changes:?}")
    };
    assert_eq!(*name, ObjectName::new("default", "s"));
    assert!(slice.endpoints[0].local);
    // A Node that is gone leaves its addresses; one that isn't asked for says nothing.
    let mut source = dir.source();
    let _ = source.rescan();
    fs::remove_file(dir.path("n.yaml")).unwrap();
    assert_eq!(
        outcome(&mut source),
        (vec!["Node n2 {}".to_owned()], vec![])
    );
    dir.write("n.yaml", &node("n1", "10.0.0.1"));
    let mut source = Source::new(vec![dir.path("n.yaml")], "n1", false);
    assert_eq!(outcome(&mut source), (vec!["node 0".to_owned()], vec![]));
    // Its zone counts either way, as it changes.
    let in_zone = |zone: &str| {
        let labels = format!("{{name: n1, labels: {{topology.kubernetes.io/zone: {zone}}}}}");
        node("n1", "10.0.0.1").replace("{name: n1}", &labels)
    };
    for zone in ["a", "b"] {
        dir.write("n.yaml", &in_zone(zone));
        assert_eq!(
            outcome(&mut source),
            (vec![format!("node 0 in {zone}")], vec![])
        );
    }
    dir.write("n.yaml", &node("n1", "10.0.0.1"));
    assert_eq!(outcome(&mut source), (vec!["node 0".to_owned()], vec![]));
    // Its pods' networks count either way, and stay when they are taken out.
    let networks = node("n1", "10.0.0.1").replace(
        "\nstatus",
        "\nspec: {podCIDRs: [10.2.1.0/24, 'fd00:2::/64']}\nstatus",
    );
    dir.write("n.yaml", &networks);
    let pods = "pods [10.2.1.0/24, fd00:2::/64]".to_owned();
    let node_and_pods = |addresses: u8| vec![format!("node {addresses}"), pods.clone()];
    assert_eq!(outcome(&mut source), (node_and_pods(0), vec![]));
    let mut both = Source::new(vec![dir.path("n.yaml")], "n1", true);
    assert_eq!(outcome(&mut both), (node_and_pods(1), vec![]));
    dir.write("n.yaml", &node("n1", "10.0.0.1"));
    assert_eq!(outcome(&mut source), (vec!["node 0".to_owned()], vec![]));
}

/// A mounted ConfigMap: names are links through `..data`, which is swapped by a rename.
fn config_map(dir: &Scratch, version: &str, files: &[(&str, &str)]) {
    use std::os::unix::fs::symlink;
    let hidden = dir.path(&format!("..{version}"));
    fs::create_dir(&hidden).unwrap();
    for (name, text) in files {
        fs::write(hidden.join(name), text).unwrap();
    }
    symlink(format!("..{version}"), dir.path("..data_tmp")).unwrap();
    fs::rename(dir.path("..data_tmp"), dir.path("..data")).unwrap();
    for (name, _) in files {
        let _ = symlink(format!("..data/{name}"), dir.path(name));
    }
}

fn watched(path: &std::path::Path) -> (std::sync::mpsc::Receiver<()>, Busy) {
    let (sender, ticks) = std::sync::mpsc::sync_channel(1);
    (ticks, watch(&[path.to_owned()], sender).unwrap())
}

fn wait(ticks: &std::sync::mpsc::Receiver<()>, source: &mut Source, expected: &[&str]) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut seen = Vec::new();
    while seen != expected {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(
            ticks.recv_timeout(left).is_ok(),
            "{seen:?} is not {expected:?}"
        );
        seen.extend(changes(source));
    }
}

#[test]
fn a_watch_notices_what_happens() {
    let dir = Scratch::new("watch");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    let (ticks, _) = watched(&dir.0);
    let mut source = dir.source();
    assert_eq!(changes(&mut source), ["+a 10.0.0.1"]);
    dir.write("a.yaml", &service_text("a", "10.0.0.2"));
    wait(&ticks, &mut source, &["+a 10.0.0.2"]);
    dir.write("a.tmp", &service_text("a", "10.0.0.3"));
    fs::rename(dir.path("a.tmp"), dir.path("a.yaml")).unwrap();
    wait(&ticks, &mut source, &["+a 10.0.0.3"]);
    fs::remove_file(dir.path("a.yaml")).unwrap();
    wait(&ticks, &mut source, &["-a"]);
    config_map(&dir, "v1", &[("c.yaml", &service_text("c", "10.0.0.1"))]);
    wait(&ticks, &mut source, &["+c 10.0.0.1"]);
    config_map(&dir, "v2", &[("c.yaml", &service_text("c", "10.0.0.2"))]);
    wait(&ticks, &mut source, &["+c 10.0.0.2"]);
    // Another directory in its place.
    fs::remove_dir_all(&dir.0).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    fs::create_dir(&dir.0).unwrap();
    dir.write("a.yaml", &service_text("a", "10.0.0.4"));
    dir.write("c.yaml", &service_text("c", "10.0.0.2"));
    wait(&ticks, &mut source, &["+a 10.0.0.4"]);
    // The watch is on the new one: this is seen at once, not by the clock.
    while ticks.recv_timeout(Duration::from_millis(1500)).is_ok() {}
    dir.write("a.yaml", &service_text("a", "10.0.0.5"));
    wait(&ticks, &mut source, &["+a 10.0.0.5"]);
}

#[test]
fn a_file_is_watched_by_its_directory() {
    let dir = Scratch::new("watch-file");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    let path = dir.path("a.yaml");
    let (ticks, _) = watched(&path);
    let mut source = Source::new(vec![path], "n1", true);
    assert_eq!(changes(&mut source), ["+a 10.0.0.1"]);
    dir.write("new", &service_text("a", "10.0.0.2"));
    fs::rename(dir.path("new"), dir.path("a.yaml")).unwrap();
    wait(&ticks, &mut source, &["+a 10.0.0.2"]);
}

#[test]
fn a_file_is_left_alone_while_it_is_written() {
    use std::io::Write as _;
    let dir = Scratch::new("busy");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    dir.write("b.yaml", &service_text("b", "10.0.0.2"));
    let (ticks, busy) = watched(&dir.0);
    let mut source = dir.source().leaving(busy.clone());
    assert_eq!(changes(&mut source), ["+a 10.0.0.1", "+b 10.0.0.2"]);
    // As `kubectl get -o yaml > a.yaml` does it: empty first, its text a while later.
    let mut slow = fs::File::create(dir.path("a.yaml")).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !busy.contains(&dir.path("a.yaml")) {
        assert!(Instant::now() < deadline, "nobody noticed the writer");
    }
    dir.write("b.yaml", &service_text("b", "10.0.0.3"));
    wait(&ticks, &mut source, &["+b 10.0.0.3"]);
    slow.write_all(service_text("a", "10.0.0.4").as_bytes())
        .unwrap();
    drop(slow);
    wait(&ticks, &mut source, &["+a 10.0.0.4"]);
}

#[test]
fn an_emptied_file_is_no_word_on_its_objects() {
    let dir = Scratch::new("emptied");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    let mut source = dir.source();
    assert_eq!(changes(&mut source), ["+a 10.0.0.1"]);
    dir.write("a.yaml", "");
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, [] as [&str; 0]);
    assert!(problems[0].contains("is empty; delete it"), "{problems:?}");
    fs::remove_file(dir.path("a.yaml")).unwrap();
    assert_eq!(outcome(&mut source).0, ["-a"]);
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let dir = Scratch::new("odd");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    nix::unistd::mkfifo(&dir.path("f.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.path("z.yaml")).unwrap();
    let mut source = dir.source();
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, ["+a 10.0.0.1"]);
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(
        problems.iter().all(|p| p.contains("not a regular file")),
        "{problems:?}"
    );
    assert!(!source.is_complete());
}

#[test]
fn a_directory_that_became_a_file_is_no_word_on_its_objects() {
    let dir = Scratch::new("became");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    let mut source = dir.source();
    assert_eq!(changes(&mut source), ["+a 10.0.0.1"]);
    fs::remove_dir_all(&dir.0).unwrap();
    fs::write(&dir.0, "hello").unwrap();
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, [] as [&str; 0]);
    assert!(
        problems[0].contains("not a directory any more"),
        "{problems:?}"
    );
    fs::remove_file(&dir.0).unwrap();
    fs::create_dir(&dir.0).unwrap();
}

/// A directory that lost its mount, or was exchanged for an empty one, is no word on its objects. One whose files were
/// deleted is, and so is one with other manifests.
#[test]
fn another_empty_directory_is_no_word_on_objects() {
    let dir = Scratch::new("unmounted");
    let away = Scratch::new("unmounted-away");
    fs::remove_dir(&away.0).unwrap();
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    let mut source = dir.source();
    assert_eq!(changes(&mut source), ["+a 10.0.0.1"]);
    fs::rename(&dir.0, &away.0).unwrap();
    fs::create_dir(&dir.0).unwrap();
    dir.write("notes.txt", "no manifest");
    let (changes, problems) = outcome(&mut source);
    assert_eq!(changes, [] as [&str; 0]);
    assert!(
        problems.len() == 1 && problems[0].contains("another directory than before"),
        "{problems:?}"
    );
    assert!(problems[0].ends_with("stays in force"), "{problems:?}");
    assert_eq!(source.faults(), [dir.0.display().to_string()]);
    assert!(!source.is_complete());
    // Said once, and as long as it is so.
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    assert_eq!(source.faults().len(), 1);
    // Mounted again.
    fs::rename(&dir.0, dir.0.with_extension("empty")).unwrap();
    fs::rename(&away.0, &dir.0).unwrap();
    let mended = format!("{}: is good again", dir.0.display());
    assert_eq!(outcome(&mut source), (vec![], vec![mended.clone()]));
    // The empty one again, which is filled by and by.
    fs::rename(&dir.0, &away.0).unwrap();
    fs::rename(dir.0.with_extension("empty"), &dir.0).unwrap();
    assert_eq!(outcome(&mut source).0, [] as [&str; 0]);
    dir.write("b.yaml", &service_text("b", "10.0.0.2"));
    assert_eq!(
        outcome(&mut source),
        (
            vec!["-a".to_owned(), "+b 10.0.0.2".to_owned()],
            vec![mended]
        )
    );
    // Its last file is deleted.
    fs::remove_file(dir.path("b.yaml")).unwrap();
    assert_eq!(
        outcome(&mut source),
        (vec!["-b".to_owned()], vec![] as Vec<String>)
    );
    assert!(source.is_complete());
}

/// A daemon that is started again while the directory is not mounted sees an empty one.
#[test]
fn what_a_directory_held_is_known_over_a_restart() {
    let dir = Scratch::new("restart");
    let memory = Scratch::new("restart-memory");
    let file = memory.path("below/manifests.json");
    let restart = || {
        let mut source = dir.source().remembering(Some(file.clone()));
        let (changes, problems) = outcome(&mut source);
        (changes.len(), problems, source.is_complete())
    };
    let refused = |(changes, problems, complete): (usize, Vec<String>, bool), why: &str| {
        let [problem] = &problems[..] else {
            panic!("{problems:?}")
        };
        assert!(
            problem.contains(why) && problem.contains("none.yaml"),
            "{problem}"
        );
        assert!(changes == 0 && !complete);
    };
    // Nothing is known: what is in the kernel may be of manifests that are not there.
    let unknown = "whether it ever did is not known";
    refused(restart(), unknown);
    refused(restart(), unknown);
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    assert_eq!(restart(), (1, vec![], true));
    // Not mounted.
    let mounted = dir.0.with_extension("mounted");
    let _ = fs::remove_dir_all(&mounted);
    fs::rename(&dir.0, &mounted).unwrap();
    fs::create_dir(&dir.0).unwrap();
    let another = "is another directory than before";
    refused(restart(), another);
    refused(restart(), another);
    // Mounted again, and its last file deleted while nobody looked.
    fs::rename(&dir.0, dir.0.with_extension("empty")).unwrap();
    fs::rename(&mounted, &dir.0).unwrap();
    assert_eq!(restart(), (1, vec![], true));
    fs::remove_file(dir.path("a.yaml")).unwrap();
    assert_eq!(restart(), (0, vec![], true));
    // From then on there is nothing to lose, whichever directory it is.
    fs::rename(&dir.0, &mounted).unwrap();
    fs::rename(dir.0.with_extension("empty"), &dir.0).unwrap();
    assert_eq!(restart(), (0, vec![], true));
    fs::remove_dir(&mounted).unwrap();
    // What was kept is lost, or no longer what it was. An empty file says that there is nothing.
    fs::write(&file, "{").unwrap();
    refused(restart(), unknown);
    fs::remove_file(&file).unwrap();
    refused(restart(), unknown);
    dir.write("none.yaml", "");
    assert_eq!(restart(), (0, vec![], true));
    // Where nothing can be kept, nothing is known, and manifests are read all the same.
    fs::remove_dir_all(memory.path("below")).unwrap();
    memory.write("below", "a file");
    assert_eq!(restart(), (0, vec![], true));
    fs::remove_file(dir.path("none.yaml")).unwrap();
    refused(restart(), unknown);
    // `plan` has no kernel to lose.
    let mut source = dir.source();
    assert_eq!(outcome(&mut source), (vec![], vec![]));
    assert!(source.is_complete());
}

/// As `git-sync` does it: the path is a link to a directory, which is pointed to another at once.
#[test]
fn a_link_to_another_directory_is_taken_when_there_are_manifests() {
    use std::os::unix::fs::symlink;
    let dir = Scratch::new("link");
    for version in ["v1", "v2", "v3"] {
        fs::create_dir(dir.path(version)).unwrap();
    }
    dir.write("v1/a.yaml", &service_text("a", "10.0.0.1"));
    dir.write("v2/b.yaml", &service_text("b", "10.0.0.2"));
    let point = |version: &str| {
        symlink(version, dir.path("next")).unwrap();
        fs::rename(dir.path("next"), dir.path("now")).unwrap();
    };
    point("v1");
    let mut source = Source::new(vec![dir.path("now")], "n1", true);
    assert_eq!(changes(&mut source), ["+a 10.0.0.1"]);
    point("v2");
    assert_eq!(changes(&mut source), ["-a", "+b 10.0.0.2"]);
    point("v3");
    assert_eq!(outcome(&mut source).0, [] as [&str; 0]);
    assert!(!source.is_complete());
}

/// A ConfigMap that lost its last key is empty, and says so.
#[test]
fn a_config_map_without_keys_is_empty() {
    let dir = Scratch::new("keys");
    config_map(&dir, "v1", &[("c.yaml", &service_text("c", "10.0.0.1"))]);
    let mut source = dir.source();
    assert_eq!(changes(&mut source), ["+c 10.0.0.1"]);
    config_map(&dir, "v2", &[]);
    assert_eq!(changes(&mut source), [] as [&str; 0], "its link is there");
    fs::remove_file(dir.path("c.yaml")).unwrap();
    assert_eq!(changes(&mut source), ["-c"]);
    assert!(source.is_complete());
}

#[test]
fn a_file_of_absurd_length_is_refused_unread() {
    let dir = Scratch::new("sparse");
    dir.write("a.yaml", "");
    let file = fs::File::options().write(true).open(dir.path("a.yaml"));
    file.unwrap().set_len(10 << 30).unwrap();
    let before = Instant::now();
    let (_, problems) = outcome(&mut dir.source());
    assert!(problems[0].contains("larger than 256 MiB"), "{problems:?}");
    let took = before.elapsed();
    assert!(took < Duration::from_millis(50), "{took:?}");
}

#[test]
fn names_forge_no_lines() {
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: \"x\\nforged \\e[31m\"}\n\
                spec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}\n";
    let (objects, errors) = read_text("a.yaml", text, Format::Yaml);
    assert_eq!(objects.len(), 0);
    let said = errors[0].to_string();
    assert!(
        said.contains("metadata.name") && !said.contains(['\n', '\u{1b}']),
        "{said}"
    );
    let wrong = text.replace("port: 80", "port: [80]");
    let said = read_text("a.yaml", &wrong, Format::Yaml).1[0].to_string();
    assert!(!said.contains(['\n', '\u{1b}']), "{said}");
}

#[test]
fn a_list_loses_only_its_broken_items() {
    let mut text = String::from("apiVersion: v1\nkind: List\nitems:\n- null\n");
    for i in 0..60 {
        let port = if i % 2 == 0 { "x" } else { "80" };
        text.push_str(&format!(
            "- apiVersion: v1\n  kind: Service\n  metadata: {{name: s{i}}}\n  \
             spec: {{clusterIP: 10.0.0.1, ports: [{{port: {port}}}]}}\n"
        ));
    }
    let (objects, errors) = read_text("a.yaml", &text, Format::Yaml);
    assert_eq!((objects.len(), errors.len()), (30, 31));
    assert!(errors.iter().all(|error| error.object_only));
}

#[test]
fn a_list_loses_only_items_that_are_no_objects_or_say_things_twice() {
    let good = |name: &str| {
        format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: {name}}}, spec: {{clusterIP: 10.0.0.1, ports: [{{port: 80}}]}}}}"
        )
    };
    let json = |text: &str| {
        let options = serde_saphyr::options! { strict_booleans: true };
        serde_saphyr::from_str_with_options::<serde_json::Value>(text, options)
            .unwrap()
            .to_string()
    };
    let twice = "{apiVersion: v1, kind: Service, metadata: {name: t}, spec: {clusterIP: 10.0.0.2, clusterIP: 10.0.0.3}}";
    let wrong = "{apiVersion: v1, kind: Service, metadata: {name: w}, spec: {ports: 5}}";
    for (bad, said) in [
        ("5", "items[1]"),
        ("hello", "items[1]"),
        ("[]", "items[1]"),
        ("{kind: [x], apiVersion: v1}", "items[1].kind"),
        (twice, "\"clusterIP\" is there twice"),
    ] {
        let items = [&good("x"), bad, &good("y"), wrong, "7", &good("z")];
        let yaml = format!(
            "apiVersion: v1\nkind: List\nitems:\n- {}\n",
            items.join("\n- ")
        );
        let mut texts = vec![(yaml, Format::Yaml)];
        if bad != twice {
            let items = items.map(json).join(",");
            let text =
                format!("{{\"apiVersion\": \"v1\", \"kind\": \"List\", \"items\": [{items}]}}");
            texts.push((text, Format::Json));
        }
        for (text, format) in texts {
            let (objects, errors) = read_text("a", &text, format);
            let names = objects
                .iter()
                .map(|o| o.object.metadata().name.as_deref().unwrap());
            assert_eq!(names.collect::<Vec<_>>(), ["x", "y", "z"], "{text}");
            let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
            assert_eq!(errors.len(), 3, "{errors:#?}");
            assert!(errors[0].contains(said), "{errors:#?}");
            assert!(
                errors[1].contains("Service default/w") && errors[1].contains("spec.ports"),
                "{errors:#?}"
            );
            assert!(errors[2].contains("items[4]"), "{errors:#?}");
        }
    }
}

/// As kubectl has it, whose YAML is of version 1.1.
#[test]
fn yes_and_on_are_true_where_a_boolean_is_wanted() {
    for word in ["yes", "on", "True", "true"] {
        let text = format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: y}}\n\
             endpoints: [{{conditions: {{terminating: {word}}}}}]\n"
        );
        let (objects, errors) = read_text("a.yaml", &text, Format::Yaml);
        assert_eq!(errors, [], "{word}");
        let Object::EndpointSlice(slice) = &objects[0].object else {
            panic!("{word}: {:?}", objects[0].object);
        };
        assert_eq!(slice.metadata.name.as_deref(), Some("y"));
        let endpoints = slice.endpoints.as_ref().unwrap();
        let conditions = endpoints[0].conditions.as_ref().unwrap();
        assert_eq!(conditions.terminating, Some(true), "{word}");
    }
}

/// What no proxy needs may be of any type, at any place; what one needs is named by its path.
#[test]
fn only_fields_that_a_proxy_needs_are_judged() {
    let odd = "{apiVersion: v1, kind: Service, metadata: {name: s, labels: {app: 5, x: [1]}, annotations: {a: {b: c}}, \
               generation: x, managedFields: 5, ownerReferences: {}, finalizers: 1.5, deletionTimestamp: [x]}, \
               spec: {clusterIP: 10.0.0.1, selector: 5, ipFamilies: x, ipFamilyPolicy: [], ports: [{port: 80, \
               targetPort: [1], appProtocol: {}}], publishNotReadyAddresses: maybe, allocateLoadBalancerNodePorts: 7}, \
               status: {conditions: [{type: A, lastTransitionTime: null}, 5], loadBalancer: {ingress: [{ip: 192.0.2.1, \
               hostname: 5, ports: x}]}}}";
    let slice = "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: e, uid: null, \
                 creationTimestamp: long ago}, addressType: IPv4, endpoints: [{addresses: [10.1.0.1], hostname: 5, \
                 targetRef: x, deprecatedTopology: 5}], ports: [{port: 80, appProtocol: 5}]}";
    let node = "{apiVersion: v1, kind: Node, metadata: {name: n1, creationTimestamp: 5.5}, spec: {providerID: 5, \
                taints: [{key: a, effect: 7}]}, status: {capacity: 5, images: x, conditions: 5, \
                addresses: [{type: InternalIP, address: 10.0.0.1}]}}";
    for text in [odd, slice, node] {
        assert_eq!(read_text("a", text, Format::Yaml).1, [], "{text}");
        let list = format!("{{apiVersion: v1, kind: List, items: [{text}]}}");
        assert_eq!(read_text("a", &list, Format::Yaml).1, [], "{text}");
    }
    for (good, wrong, field) in [
        ("port: 80", "port: x", "spec.ports[0].port"),
        ("port: 80", "port: 3000000000", "spec.ports[0].port"),
        ("clusterIP: 10.0.0.1", "clusterIPs: x", "spec.clusterIPs"),
        ("clusterIP: 10.0.0.1", "type: []", "spec.type"),
        (
            "[{ip: 192.0.2.1",
            "[{ip: {}",
            "status.loadBalancer.ingress[0].ip",
        ),
        ("labels: {app: 5, x: [1]}", "labels: 5", "metadata.labels"),
        ("labels: {app: 5, x: [1]}", "labels: []", "metadata.labels"),
    ] {
        let error = error(&odd.replace(good, wrong), Format::Yaml);
        let start = format!("app.yaml:1: Service default/s: {field}: ");
        assert!(error.starts_with(&start), "{error}\n{start}");
    }
}

/// A number that begins with 0 is octal.
#[test]
fn numbers_are_those_that_kubectl_reads() {
    for (word, port) in [("80", 80), ("0120", 80), ("0o120", 80), ("0x50", 80)] {
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: y}}\nspec: {{clusterIP: 10.0.0.1, ports: [{{port: {word}}}]}}\n"
        );
        let (objects, errors) = read_text("a.yaml", &text, Format::Yaml);
        assert_eq!(errors, [], "{word}");
        let Object::Service(service) = &objects[0].object else {
            panic!("{word}: {:?}", objects[0].object);
        };
        let ports = service.spec.as_ref().unwrap().ports.as_ref().unwrap();
        assert_eq!(ports[0].port, Some(port), "{word}");
    }
}
