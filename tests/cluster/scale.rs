//! Many Services.

use std::time::Duration;

use tests::daemon::wait_up_to;

use crate::api::start;
use crate::cluster::{Cluster, collection, service, slice, with};
use crate::faults::Faults;
use crate::node::{NAME, pod_address};
use crate::plane::HOST;

/// 2,000 Services are there before the first start: the API server's own is served first.
#[test]
fn the_api_server_comes_first_among_2000() {
    const SERVICES: usize = 2_000;
    with(|cluster| {
        cluster.plane.create_all(&objects(0..SERVICES, &[0, 1]));
        let kubeconfig = cluster
            .plane
            .kubeconfig(&format!("https://{HOST}:6443"), "proxy-token");
        let node = &cluster.node;
        node.start_daemon(&kubeconfig, "");
        let lines = |table: &str| table.lines().filter(|l| l.starts_with("-A")).count();
        let mut first_seen = None;
        wait_up_to(Duration::from_secs(120), "all are served", || {
            let table = node.table();
            if first_seen.is_none() && lines(&table) > 0 {
                assert!(
                    table.contains("-a -t 10.96.0.1:443 "),
                    "the API server's own Service is the first:\n{}",
                    table.lines().take(5).collect::<Vec<_>>().join("\n")
                );
                first_seen = Some(lines(&table));
            }
            lines(&table) == SERVICES + 1
        });
        node.wait_in_force();
        start_again_writes_nothing(cluster);
    });
}

/// 10,000 Services of 10 endpoints: a start from nothing, and one that finds all of it in the kernel, stay below the half of the
/// memory limit that the DaemonSet sets.
#[test]
fn the_memory_limit_of_the_daemonset_holds_10000_services() {
    const SERVICES: usize = 10_000;
    const DAEMON_SET: &str = include_str!("../../deploy/kubernetes/base/daemonset.yaml");
    let limit = DAEMON_SET
        .lines()
        .filter_map(|line| line.trim().strip_prefix("memory: ")?.strip_suffix("Mi"))
        .map(|number| number.parse::<u64>().unwrap())
        .max()
        .unwrap();
    with(|cluster| {
        let pods: Vec<u8> = (0..10).collect();
        cluster.plane.create_all(&objects(0..SERVICES, &pods));
        let kubeconfig = cluster
            .plane
            .kubeconfig(&format!("https://{HOST}:6443"), "proxy-token");
        for what in ["a start from nothing", "a restart"] {
            cluster.node.start_daemon(&kubeconfig, "");
            wait_up_to(Duration::from_secs(900), "all are served", || {
                std::thread::sleep(Duration::from_secs(1));
                cluster.node.log().contains("is in force")
            });
            let servers = cluster.node.run("ipvsadm -Sn | grep -c '^-a -t 10.10'");
            assert_eq!(servers.trim(), (SERVICES * pods.len()).to_string());
            let peak = "sed -n 's/^VmHWM:[^0-9]*\\([0-9]*\\) kB$/\\1/p' /proc/$(cat /run/daemon.pid)/status";
            let peak_mib = cluster.node.run(peak).trim().parse::<u64>().unwrap() / 1024;
            println!("{what}: {peak_mib} MiB at most, the limit is {limit} MiB");
            assert!(peak_mib * 2 < limit, "{what}: {peak_mib} of {limit} MiB");
            cluster.node.end_daemon("TERM");
        }
    });
}

/// One endpoint changes: the time from the API server to the kernel is the same whatever else there is. With `--long` the
/// real kube-proxy in IPVS mode does the same in the same guest.
#[test]
fn the_time_of_a_change_does_not_grow_with_the_table() {
    let many = if tests::long() { 5_000 } else { 1_000 };
    with(|cluster| {
        let faults = Faults::start(&cluster.plane.authority());
        cluster.serve("web", "10.96.0.80", &[0]);
        let both = |cluster: &mut Cluster, services: usize| {
            start(cluster, "");
            wait_served(cluster, services);
            let ours = measure(cluster, &faults, 21);
            println!("{services} Services: {ours}");
            let theirs = tests::long().then(|| {
                cluster.node.clean();
                let theirs = by_kube_proxy(cluster, &faults, services);
                println!("{services} Services, kube-proxy: {theirs}");
                theirs
            });
            (ours, theirs)
        };
        cluster.plane.create_all(&objects(0..10, &[0, 1]));
        let (few, _) = both(cluster, 10);
        if !tests::long() {
            cluster.node.clean();
        }
        cluster.plane.create_all(&objects(10..many, &[0, 1]));
        let (more, theirs) = both(cluster, many);
        assert!(
            more.from_request < few.from_request * 3,
            "{few} with 10 Services, {more} with {many}"
        );
        if let Some(theirs) = theirs {
            assert!(
                more.from_answer * 20 < theirs.from_answer,
                "{more}, kube-proxy: {theirs}"
            );
        }
    });
}

/// Starts kube-proxy, measures it, and removes what it leaves.
fn by_kube_proxy(cluster: &Cluster, faults: &Faults, services: usize) -> Times {
    let node = &cluster.node;
    let programs = std::env::var("UPSTREAM_PROGRAMS").unwrap();
    let kube_proxy = format!("{programs}/kube-proxy");
    let kubeconfig = cluster
        .plane
        .kubeconfig(&format!("https://{HOST}:6443"), "proxy-token");
    node.write("/run/kubeconfig", &kubeconfig);
    node.run(&format!(
        "setsid {kube_proxy} --proxy-mode ipvs --kubeconfig /run/kubeconfig --hostname-override {NAME} \
         --cluster-cidr 10.244.0.0/16 --conntrack-max-per-core 0 --conntrack-min 0 \
         >/dev/null 2>/run/kube-proxy.log </dev/null &\necho $! > /run/kube-proxy.pid"
    ));
    wait_served(cluster, services);
    // Its virtual servers come first of what it does for both families.
    let passes = "curl -s http://127.0.0.1:10249/metrics | grep -c '^kubeproxy_sync_proxy_rules_duration_seconds_count.* [1-9]'";
    wait_up_to(
        Duration::from_secs(600),
        "kube-proxy's first passes end",
        || {
            std::thread::sleep(Duration::from_secs(1));
            node.try_run(passes)
                .is_some_and(|(_, count)| count.trim() == "2")
        },
    );
    let times = measure(cluster, faults, 5);
    // Its own --cleanup leaves chains, and its virtual servers.
    node.run(
        "pid=$(cat /run/kube-proxy.pid); kill $pid; while kill -0 $pid 2>/dev/null; do sleep 0.1; done\nset -e\n\
         for tool in iptables ip6tables; do for table in nat filter mangle; do\n\
         $tool -t $table -F; $tool -t $table -X\ndone; done\n\
         ipvsadm -C; ipset destroy; ip link del kube-ipvs0",
    );
    times
}

/// Waits until that many of [`objects`] are served, and the Service whose changes are measured.
fn wait_served(cluster: &Cluster, services: usize) {
    let node = &cluster.node;
    wait_up_to(Duration::from_secs(900), "all are served", || {
        std::thread::sleep(Duration::from_millis(500));
        let (_, table) = node
            .try_run("ipvsadm -Sn | grep -cE '^-a -t 10.(10|96.0.80)'")
            .expect("the guest answers");
        table.trim() == (services * 2 + 1).to_string()
    });
}

/// Medians of the time of a change, in microseconds: from the request, and from the API server's answer.
struct Times {
    from_request: i64,
    from_answer: i64,
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (request, answer) = (self.from_request, self.from_answer);
        write!(
            f,
            "{request} µs from the request, {answer} µs from the answer"
        )
    }
}

/// Changes one endpoint that many times.
fn measure(cluster: &Cluster, faults: &Faults, rounds: usize) -> Times {
    for pod in 0..2 {
        let body = slice("web", &[pod]).to_string();
        cluster.node.write(&format!("/run/pod{pod}.json"), &body);
    }
    let program = tests::daemon::binary().with_file_name("api-to-kernel");
    let output = cluster.node.run(&format!(
        "{} {} {}/web 10.96.0.80:80 {rounds} {}:8080=/run/pod1.json {}:8080=/run/pod0.json",
        program.display(),
        faults.url().trim_start_matches("http://"),
        collection("endpointslices"),
        pod_address(1),
        pod_address(0),
    ));
    let numbers = |column: usize| {
        let words = output.lines().map(|line| line.split(' ').nth(column));
        let mut numbers: Vec<i64> = words.map(|word| word.unwrap().parse().unwrap()).collect();
        numbers.sort_unstable();
        numbers[numbers.len() / 2]
    };
    Times {
        from_request: numbers(0),
        from_answer: numbers(1),
    }
}

fn objects(numbers: std::ops::Range<usize>, pods: &[u8]) -> Vec<(String, String)> {
    numbers
        .flat_map(|number| {
            let name = format!("s{number}");
            let address = format!(
                "10.{}.{}.{}",
                100 + number / 50_000,
                number / 250,
                number % 250 + 1
            );
            [
                (collection("services"), service(&name, &address).to_string()),
                (collection("endpointslices"), slice(&name, pods).to_string()),
            ]
        })
        .collect()
}

fn start_again_writes_nothing(cluster: &Cluster) {
    let before = cluster.node.table();
    cluster.node.end_daemon("TERM");
    start(cluster, "");
    assert_eq!(cluster.node.table(), before);
    let log = cluster.node.log();
    assert!(
        !log.contains("ops="),
        "a second start writes nothing:\n{log}"
    );
}
