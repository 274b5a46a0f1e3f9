//! Many Services.

use std::time::Duration;

use tests::daemon::wait_up_to;

use crate::api::start;
use crate::cluster::{Cluster, collection, service, slice, with};
use crate::faults::Faults;
use crate::node::pod_address;
use crate::plane::HOST;

/// 2,000 Services are there before the first start: the API server's own is served first.
#[test]
fn the_api_server_comes_first_among_2000() {
    const SERVICES: usize = 2_000;
    with(|cluster| {
        cluster.plane.create_all(&objects(0..SERVICES));
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

/// One endpoint changes: the time from the API server to the kernel is the same whatever else there is.
#[test]
fn the_time_of_a_change_does_not_grow_with_the_table() {
    let many = if tests::long() { 5_000 } else { 1_000 };
    with(|cluster| {
        let faults = Faults::start(&cluster.plane.authority());
        cluster.serve("web", "10.96.0.80", &[0]);
        start(cluster, "");
        fill(cluster, 0..10);
        let few = measure(cluster, &faults);
        fill(cluster, 10..many);
        let more = measure(cluster, &faults);
        println!(
            "median of a change, from the request and from the answer, in µs: 10 Services {few:?}, {many} Services {more:?}"
        );
        assert!(
            more.0 < few.0 * 3,
            "{few:?} with 10 Services, {more:?} with {many}"
        );
    });
}

/// Makes Services of that many numbers, and waits until they are served.
fn fill(cluster: &Cluster, numbers: std::ops::Range<usize>) {
    let all = numbers.end;
    cluster.plane.create_all(&objects(numbers));
    let node = &cluster.node;
    wait_up_to(Duration::from_secs(240), "all are served", || {
        std::thread::sleep(Duration::from_millis(500));
        let table = node.run("ipvsadm -Sn | grep -c '^-a -t 10.10'");
        table.trim() == (all * 2).to_string()
    });
}

/// The medians of changes of one endpoint: from the request, and from the answer.
fn measure(cluster: &Cluster, faults: &Faults) -> (i64, i64) {
    for pod in 0..2 {
        let body = slice("web", &[pod]).to_string();
        cluster.node.write(&format!("/run/pod{pod}.json"), &body);
    }
    let program = tests::daemon::binary().with_file_name("api-to-kernel");
    let output = cluster.node.run(&format!(
        "{} {} {}/web 10.96.0.80:80 21 {}:8080=/run/pod1.json {}:8080=/run/pod0.json",
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
    (numbers(0), numbers(1))
}

fn objects(numbers: std::ops::Range<usize>) -> Vec<(String, String)> {
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
                (
                    collection("endpointslices"),
                    slice(&name, &[0, 1]).to_string(),
                ),
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
