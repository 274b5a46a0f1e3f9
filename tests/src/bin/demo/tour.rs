//! The tour: what the daemon made of the manifests, who answers whom, and an endpoint that leaves and comes back.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::daemon::{PATIENCE, service, slice};
use tests::netns::Namespace;
use tests::topology::{BRIDGE, NODE, OUTSIDE, pod_addresses};
use tests::traffic::{Answer, Client, HeldConnection};

use crate::{APP1, CLIENT, FLAGS, Stage, check, kernel, show};

const CLUSTER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10));
const HTTP: SocketAddr = SocketAddr::new(CLUSTER_IP, 80);
const DNS: SocketAddr = SocketAddr::new(CLUSTER_IP, 53);
/// In `ipvsadm -Ln`.
const HTTP_LINE: &str = "TCP  10.96.0.10:80 ";
const NODE_PORT_LINE: &str = "TCP  192.168.10.11:30080 ";
const LEAVING: &str = "10.0.0.4:8080";
/// On a busy machine the whole guest may stand still for seconds, which is no failed request.
const PATIENT: Client = Client {
    source: None,
    timeout: Duration::from_secs(10),
};
/// Requests of one kind.
const REQUESTS: usize = 12;
/// Requests while the endpoints stay as they are.
const STEADY: usize = 60;
/// More Services, to see what they add.
const MORE: u8 = 100;

/// The sets that app1 fills: name, meaning, number of entries.
const SETS: [(&str, &str, usize); 7] = [
    ("KUBE-CLUSTER-IP", "Service addresses and ports", 2),
    ("KUBE-IPVS-IPS", "addresses that only IPVS may serve", 1),
    ("KUBE-IPVS-OWNED", "our servers on the node's addresses", 2),
    ("KUBE-IPVS-SERVING", "ports that IPVS serves now", 2),
    ("KUBE-LOOP-BACK", "a pod that reaches itself", 6),
    ("KUBE-NODE-PORT-TCP", "node ports, to masquerade", 1),
    ("KUBE-NODE-PORT-UDP", "the same for UDP", 1),
];

/// Shows it all; panics where something is not as told.
pub(crate) fn run(stage: Stage) {
    let started = Instant::now();
    introduce();
    servers(&stage);
    requests(&stage);
    rules(&stage);
    sets(&stage);
    drain(&stage);
    stop(stage);
    println!(
        "\nAll went as told, in {:.1} s.",
        started.elapsed().as_secs_f32()
    );
}

fn introduce() {
    let here = std::env::var_os(tests::HERE).is_some();
    let whose = if here {
        "this machine's kernel, in namespaces of their own"
    } else {
        "a kernel of their own"
    };
    println!(
        "A node, its pods and a machine outside, on {whose}: {}.",
        kernel()
    );
    println!("  app1's pods   10.0.0.2, 10.0.0.3, 10.0.0.4   HTTP on 8080, UDP on 5353");
    println!(
        "  one more pod  {}                       asks",
        pod_addresses(CLIENT)[0]
    );
    println!("  the node      {}, {}", BRIDGE[0], NODE[0]);
    println!("  outside       {}", OUTSIDE[0]);
}

fn servers(stage: &Stage) {
    println!(
        "\n1. The daemon reads the Service app1 and its endpoints, and fills IPVS (lc: least connections)."
    );
    println!(
        "   $ ipvs-proxy run --node-name node --manifests deploy/examples \\\n       {}",
        FLAGS.join(" ")
    );
    let listing = stage.listing();
    let seen = show::numbers(&listing);
    check(
        seen == (4, 12),
        "4 virtual servers with 3 real servers each",
        &listing,
    );
    check(
        listing.matches(" lc").count() == 4,
        "the scheduler lc for each",
        &listing,
    );
    println!("   $ ipvs-proxy ipvsadm -Ln");
    print(listing.lines());
}

fn requests(stage: &Stage) {
    println!(
        "\n2. {REQUESTS} requests each, counted by the pod that answered, and whom the pods saw asking."
    );
    println!("   {:<18}{:<26}{:<25}pods saw", "from", "to", "answered by");
    let topology = &stage.topology;
    let (pod, node, outside) = (topology.pod(CLIENT), topology.node(), topology.outside());
    let [pod_address, node_address] = [pod_addresses(CLIENT)[0], BRIDGE[0]];
    let [node_http, node_dns] = [30080, 30053].map(|port| SocketAddr::new(NODE[0], port));
    let rows = [
        ("the pod 10.0.0.5", pod, "HTTP", HTTP, pod_address),
        ("", pod, "UDP", DNS, pod_address),
        ("the node", node, "HTTP", HTTP, node_address),
        ("outside", outside, "HTTP", HTTP, node_address),
        ("", outside, "HTTP", node_http, node_address),
        ("", outside, "UDP", node_dns, node_address),
    ];
    for (who, from, kind, to, seen) in rows {
        let counts = ask(who, from, kind, to, seen);
        let fair = counts.len() == 3 && counts.values().all(|count| (3..=5).contains(count));
        check(fair, "about 4 answers of each pod", &show::spread(&counts));
    }
    println!(
        "   Pods keep their address. Others are masqueraded as the node, so that answers pass it."
    );
}

/// Asks from a namespace, checks the answers and whom the pods saw, and prints who answered.
fn ask(
    who: &str,
    from: &Namespace,
    kind: &str,
    to: SocketAddr,
    seen: IpAddr,
) -> BTreeMap<String, usize> {
    let request = if kind == "UDP" {
        Client::udp_ask
    } else {
        Client::http_get
    };
    let answers: Vec<_> = from.enter(|| (0..REQUESTS).map(|_| request(&PATIENT, to)).collect());
    let mut counts = BTreeMap::new();
    for answer in answers {
        let Answer { name, peer } = answer.unwrap_or_else(|error| {
            panic!("expected an answer by {kind} from {to}, but saw: {error}")
        });
        check(
            peer.ip() == seen,
            &format!("{seen} to be seen asking"),
            &peer.to_string(),
        );
        *counts.entry(name).or_insert(0) += 1;
    }
    let to = format!("{kind:<5}{to}");
    println!("   {who:<18}{to:<26}{:<25}{seen}", show::spread(&counts));
    counts
}

fn rules(stage: &Stage) {
    let node = stage.topology.node();
    let saved = |tool| show::rules(&node.tool(tool));
    let [before, before6] = ["iptables-save", "ip6tables-save"].map(saved);
    check(!before.is_empty(), "iptables rules", "none");
    let (mut services, mut slices) = (String::new(), String::new());
    let endpoints = [0, 1, 2].map(|pod| (pod_addresses(pod)[0], true, "node"));
    for number in 1..=MORE {
        let name = format!("more{number}");
        services += &service(
            &name,
            &[&format!("10.96.1.{number}")],
            &[("http", "TCP", 80, 0)],
        );
        slices += &slice(&name, &name, &[("http", "TCP", 8080)], &endpoints);
    }
    stage.manifests.write("more.yaml", &(services + &slices));
    let more = usize::from(MORE);
    let all = (4 + more, 12 + 3 * more);
    stage.await_listing(&format!("{} virtual servers", all.0), |listing| {
        show::numbers(listing) == all
    });
    let [after, after6] = ["iptables-save", "ip6tables-save"].map(saved);
    check(
        before == after && before6 == after6,
        "the same rules as before",
        &after.join("\n"),
    );
    stage.manifests.remove("more.yaml");
    stage.await_listing("4 virtual servers again", |listing| {
        show::numbers(listing) == (4, 12)
    });

    println!(
        "\n3. iptables: {} rules for IPv4, {} for IPv6; the same with {MORE} more Services, just tried. IPv4:",
        before.len(),
        before6.len()
    );
    print(before.iter().map(String::as_str));
}

fn sets(stage: &Stage) {
    println!("\n4. The sets that those rules look into; empty ones left out.");
    let sets = show::sets(&stage.topology.node().tool("ipset save"));
    let filled: Vec<_> = sets
        .iter()
        .filter(|(_, entries)| !entries.is_empty())
        .collect();
    let names: Vec<_> = filled
        .iter()
        .map(|(name, entries)| (name.as_str(), entries.len()))
        .collect();
    let expected = SETS.map(|(name, _, entries)| (name, entries));
    check(
        names == expected,
        &format!("{expected:?}"),
        &format!("{names:?}"),
    );
    for ((name, entries), (_, meaning, _)) in filled.into_iter().zip(SETS) {
        println!("   {name:<20}{meaning:<37}{}", show::some_of(entries));
    }
}

/// Answers by the phase in which they were asked for.
#[derive(Default)]
struct Traffic {
    phase: AtomicUsize,
    ended: AtomicBool,
    answers: Mutex<Vec<(usize, Result<String, String>)>>,
}

impl Traffic {
    /// Asks, again and again, until the end.
    fn ask(&self, from: &Namespace, to: SocketAddr) {
        from.enter(|| {
            while !self.ended.load(Ordering::SeqCst) {
                let phase = self.phase.load(Ordering::SeqCst);
                let answer = PATIENT.http_get(to).map(|answer| answer.name);
                let answer = answer.map_err(|error| format!("{to} {error}"));
                self.answers
                    .lock()
                    .expect("no panic holds it")
                    .push((phase, answer));
                thread::sleep(Duration::from_millis(5));
            }
        });
    }

    /// Starts a phase, and waits until enough was asked in it; the answers for each pod.
    fn next_phase(&self) -> BTreeMap<String, usize> {
        let phase = self.phase.fetch_add(1, Ordering::SeqCst) + 1;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut counts = BTreeMap::new();
            for (_, answer) in self
                .answers
                .lock()
                .expect("no panic holds it")
                .iter()
                .filter(|(p, _)| *p == phase)
            {
                let name = answer
                    .as_ref()
                    .unwrap_or_else(|error| panic!("expected an answer, but saw: {error}"));
                *counts.entry(name.clone()).or_insert(0) += 1;
            }
            let asked: usize = counts.values().sum();
            if asked >= STEADY {
                return counts;
            }
            check(
                Instant::now() < deadline,
                &format!("{STEADY} requests"),
                &format!("{asked}"),
            );
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn drain(stage: &Stage) {
    let (pod, outside) = (stage.topology.pod(CLIENT), stage.topology.outside());
    println!(
        "\n5. The endpoint 10.0.0.4 leaves and comes back, while requests go on from the pod and from outside."
    );
    let hold = || {
        PATIENT
            .hold(HTTP)
            .unwrap_or_else(|error| panic!("expected {HTTP} to answer, but saw: {error}"))
    };
    let mut held: [HeldConnection; 3] = pod.enter(|| std::array::from_fn(|_| hold()));
    held.sort_by(|a, b| a.answer.name.cmp(&b.answer.name));
    let names: Vec<_> = held.iter().map(|held| held.answer.name.as_str()).collect();
    check(
        names == ["pod2", "pod3", "pod4"],
        "an open connection with each pod",
        &names.join(", "),
    );
    let mut alive = |when: &str| {
        for held in &mut held {
            let name = &held.answer.name;
            let pong = format!("the open connection with {name} to live {when}");
            held.ping()
                .unwrap_or_else(|error| panic!("expected {pong}, but saw: {error}"));
        }
    };

    let traffic = Traffic::default();
    thread::scope(|scope| {
        scope.spawn(|| traffic.ask(pod, HTTP));
        scope.spawn(|| traffic.ask(outside, SocketAddr::new(NODE[0], 30080)));
        // Also when something below panics, which would wait here for the two.
        let _end = EndOf(&traffic);

        let counts = traffic.next_phase();
        check(
            counts.len() == 3,
            "all three pods to answer",
            &show::spread(&counts),
        );
        told("an open connection with each pod", &counts);

        stage
            .manifests
            .write("app1.yaml", &without(APP1, "10.0.0.4"));
        let listing = stage.await_listing(&format!("{LEAVING} with weight 0"), |listing| {
            weights(listing) == [Some(0); 2]
        });
        let counts = traffic.next_phase();
        check(
            !counts.contains_key("pod4"),
            "no new connection to pod4",
            &show::spread(&counts),
        );
        alive("while its pod drains");
        told(
            "removed: it drains at weight 0; its open connection lives",
            &counts,
        );
        print(show::virtual_server(&listing, HTTP_LINE));

        stage.manifests.write("app1.yaml", APP1);
        let listing = stage.await_listing(&format!("{LEAVING} with weight 1"), |listing| {
            weights(listing) == [Some(1); 2]
        });
        let counts = traffic.next_phase();
        check(
            counts.contains_key("pod4"),
            "requests to pod4 again",
            &show::spread(&counts),
        );
        alive("now that its pod is back");
        told("added again: it has weight 1 and is asked again", &counts);
        print(show::virtual_server(&listing, HTTP_LINE));
    });
    let answers = traffic.answers.into_inner().expect("no panic holds it");
    let failed: Vec<_> = answers
        .iter()
        .filter_map(|(_, answer)| answer.as_ref().err())
        .collect();
    check(
        failed.is_empty(),
        "no request to fail",
        &format!("{failed:?}"),
    );
    println!(
        "   {} requests in all, also at the moments of change: none failed. No open connection broke.",
        answers.len()
    );
}

/// Ends the traffic when it goes.
struct EndOf<'a>(&'a Traffic);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::SeqCst);
    }
}

/// The leaving endpoint's weights at the two virtual servers that are asked.
fn weights(listing: &str) -> [Option<u32>; 2] {
    [HTTP_LINE, NODE_PORT_LINE]
        .map(|line| show::weight(&show::virtual_server(listing, line), LEAVING))
}

fn told(what: &str, counts: &BTreeMap<String, usize>) {
    println!("   {what:<59}{}", show::spread(counts));
}

/// A manifest without the endpoint of that address, as an editor would leave it.
fn without(manifest: &str, address: &str) -> String {
    const START: &str = "- addresses:\n";
    let mut parts = manifest.split(START);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if part.trim_start().starts_with(&format!("- {address}\n")) {
            // What follows the list of endpoints is not indented.
            let rest = part.lines().skip_while(|line| line.starts_with(' '));
            rest.for_each(|line| {
                let _ = writeln!(text, "{line}");
            });
        } else {
            let _ = write!(text, "{START}{part}");
        }
    }
    text
}

fn stop(stage: Stage) {
    let Stage {
        topology,
        manifests: _manifests,
        daemon,
        _servers,
    } = stage;
    println!(
        "\n6. The daemon stops; what the kernel holds stays in force: a restart is no outage."
    );
    let status = daemon.stop();
    check(
        status.success(),
        "the daemon to end with success",
        &status.to_string(),
    );
    let [address, _] = pod_addresses(CLIENT);
    ask(
        "the pod 10.0.0.5",
        topology.pod(CLIENT),
        "HTTP",
        HTTP,
        address,
    );
}

fn print<'a>(lines: impl IntoIterator<Item = &'a str>) {
    for line in lines {
        println!("   {}", line.trim_end());
    }
}
