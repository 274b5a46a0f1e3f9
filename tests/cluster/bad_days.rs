//! The API server fails in many ways; the kernel's state stays, and all goes on by itself.

use std::time::Duration;

use nix::sys::signal::Signal;
use tests::daemon::{wait_until, wait_up_to};

use crate::api::{health, start};
use crate::cluster::{Cluster, collection, slice, with};
use crate::faults::{Faults, Mode};
use crate::node::pod_address;
use crate::plane::HOST;

/// A daemon that reaches the API server through the proxy.
pub(crate) fn start_behind(cluster: &Cluster) -> Faults {
    let faults = Faults::start(&cluster.plane.authority());
    let kubeconfig = cluster.plane.kubeconfig(&faults.url(), "proxy-token");
    cluster.node.start_daemon(&kubeconfig, "");
    cluster.node.wait_in_force();
    faults
}

fn served(pod: u8) -> impl Fn(&str) -> bool {
    let line = format!("-a -t 10.96.0.80:80 -r {}:8080 -m -w 1", pod_address(pod));
    move |table| table.contains(&line)
}

/// Whether the last word of the log on each resource is that it is followed.
fn all_followed(log: &str) -> bool {
    ["services", "endpointslices", "nodes"]
        .iter()
        .all(|resource| {
            let named = format!("resource=\"{resource}\"");
            let mut lines = log.lines().rev().filter(|line| line.contains(&named));
            lines
                .find(|line| line.contains("follow"))
                .is_none_or(|line| line.contains("is followed again"))
        })
}

/// A list of another kind is no word on what there is, and a watch that fails at once is asked for ever more seldom.
#[test]
fn an_answer_that_is_none_changes_nothing() {
    with(|cluster| {
        let faults = start_behind(cluster);
        cluster.serve("web", "10.96.0.80", &[0]);
        cluster.node.wait_table("it is served", served(0));
        let table = cluster.node.table();
        cluster.node.end_daemon("TERM");

        faults.set(Mode::Replace("\"ServiceList\"", "\"ServiceZist\""));
        let kubeconfig = cluster.plane.kubeconfig(&faults.url(), "proxy-token");
        cluster.node.start_daemon(&kubeconfig, "");
        let told = "answers a list of services with v1 ServiceZist";
        wait_up_to(Duration::from_secs(60), "it is told", || {
            std::thread::sleep(Duration::from_millis(200));
            cluster.node.log().contains(told)
        });
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(cluster.node.table(), table);
        faults.set(Mode::Pass);
        cluster.node.wait_in_force();
        assert_eq!(cluster.node.table(), table);

        // A word of a watch that no decoder takes.
        faults.set(Mode::Replace("\"type\":\"ADDED\"", "\"type\":\"OTHER\""));
        let requests = || {
            let metrics = cluster.node.run("curl -s http://127.0.0.1:10249/metrics");
            let counts = metrics
                .lines()
                .filter(|l| l.starts_with("rest_client_requests_total"));
            let counts = counts.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
            counts.sum::<u64>()
        };
        std::thread::sleep(Duration::from_secs(2));
        cluster.serve("more", "10.96.0.81", &[0]);
        let before = requests();
        std::thread::sleep(Duration::from_secs(8));
        let asked = requests() - before;
        // Two kinds fail, and wait 0.5, 1, 2, 4 s at most.
        assert!(asked <= 30, "{asked} requests in 8 s");
        let log = cluster.node.log();
        assert!(log.contains("the API server can't be followed"), "{log}");
        assert!(
            log.lines()
                .filter(|l| l.contains("can't be followed"))
                .count()
                < 20,
            "{log}"
        );
        faults.set(Mode::Pass);
        cluster
            .node
            .wait_table("news come", |table| table.contains("-a -t 10.96.0.81:80"));
    });
}

/// In each kind of failure: the table stays, the log says so once, and what changed meanwhile (also what was
/// deleted) is in the kernel soon after.
#[test]
fn the_kernel_stays_and_recovers_by_itself() {
    with(|cluster| {
        let faults = start_behind(cluster);
        cluster.serve("web", "10.96.0.80", &[0]);
        cluster.node.wait_table("it is served", served(0));
        let web = format!("{}/web", collection("endpointslices"));
        for (number, mode) in [
            Mode::Refuse,
            Mode::Status(500),
            Mode::Status(429),
            Mode::Status(410),
            Mode::Status(401),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("gone{number}");
            cluster.serve(&name, &format!("10.96.1.{number}"), &[1]);
            cluster.node.wait_table("the one to go is there", |table| {
                table.contains(&format!("-a -t 10.96.1.{number}:80"))
            });
            let before = cluster.node.table();
            let told = |what: &str| cluster.node.log().matches(what).count();
            let failures = told("can't be followed");
            faults.set(mode);
            cluster.replace(
                &web,
                &slice("web", &[u8::try_from(number).unwrap() % 2 + 1]),
            );
            cluster.delete(&format!("{}/{name}", collection("services")));
            cluster.delete(&format!("{}/{name}", collection("endpointslices")));
            wait_until("the failure is told", || {
                told("can't be followed") > failures
            });
            assert_eq!(
                cluster.node.table(),
                before,
                "{mode:?}: the kernel's state stays"
            );
            assert!(
                cluster.node.ask("pod3", "10.96.0.80").starts_with("pod"),
                "{mode:?}"
            );
            assert_eq!(health(cluster), "200 200", "{mode:?}: it is not ours");
            faults.set(Mode::Pass);
            let now = served(u8::try_from(number).unwrap() % 2 + 1);
            wait_up_to(Duration::from_secs(60), "it catches up", || {
                std::thread::sleep(Duration::from_millis(200));
                let table = cluster.node.table();
                now(&table) && !table.contains(&format!("10.96.1.{number}"))
            });
            wait_up_to(Duration::from_secs(60), "each recovery is told", || {
                std::thread::sleep(Duration::from_millis(200));
                all_followed(&cluster.node.log())
            });
        }
    });
}

/// A server that takes connections and says nothing: noticed by its silence.
#[test]
fn a_server_that_hangs_is_noticed() {
    with(|cluster| {
        let faults = start_behind(cluster);
        cluster.serve("web", "10.96.0.80", &[0]);
        cluster.node.wait_table("it is served", served(0));
        faults.set(Mode::Hang);
        cluster.replace(
            &format!("{}/web", collection("endpointslices")),
            &slice("web", &[1]),
        );
        wait_up_to(Duration::from_secs(150), "the silence is told", || {
            std::thread::sleep(Duration::from_secs(1));
            cluster.node.log().contains("can't be followed")
        });
        assert!(served(0)(&cluster.node.table()), "the kernel's state stays");
        faults.set(Mode::Pass);
        wait_up_to(Duration::from_secs(60), "it catches up", || {
            std::thread::sleep(Duration::from_millis(200));
            served(1)(&cluster.node.table())
        });
    });
}

/// The API server is killed in the middle of a burst and started again; its watch cache then knows nothing of the versions
/// before.
#[test]
fn the_server_restarts_in_a_burst() {
    with(|cluster| {
        start(cluster, "");
        for number in 0..10 {
            cluster.serve(&format!("s{number}"), &format!("10.96.2.{number}"), &[0]);
        }
        cluster.plane.kill_api();
        cluster.plane.start_api();
        for number in 10..20 {
            cluster.serve(&format!("s{number}"), &format!("10.96.2.{number}"), &[1]);
        }
        for number in 0..5 {
            cluster.delete(&format!("{}/s{number}", collection("services")));
        }
        wait_up_to(
            Duration::from_secs(60),
            "the sum of it is in the kernel",
            || {
                std::thread::sleep(Duration::from_millis(200));
                let table = cluster.node.table();
                (0..20).all(|number| {
                    table.contains(&format!("-a -t 10.96.2.{number}:80 ")) == (number >= 5)
                })
            },
        );
        assert!(cluster.node.daemon_runs());
    });
}

/// The daemon is killed in the middle of a burst and started again.
#[test]
fn the_daemon_is_killed_in_a_burst() {
    with(|cluster| {
        start(cluster, "");
        for number in 0..40 {
            cluster.serve(&format!("s{number}"), &format!("10.96.2.{number}"), &[0]);
            if number == 20 {
                cluster.node.end_daemon("KILL");
            }
        }
        for number in 10..30 {
            cluster.delete(&format!("{}/s{number}", collection("services")));
        }
        start(cluster, "");
        cluster
            .node
            .wait_table("the sum of it is in the kernel", |table| {
                (0..40).all(|number| {
                    let there = table.contains(&format!("-a -t 10.96.2.{number}:80 "));
                    there != (10..30).contains(&number)
                })
            });
    });
}

/// Another token, and another authority: the files change, and the daemon connects by what they say.
#[test]
fn credentials_and_certificates_change() {
    with(|cluster| {
        start(cluster, "");
        cluster.serve("web", "10.96.0.80", &[0]);
        cluster.node.wait_table("it is served", served(0));
        let server = format!("https://{HOST}:6443");
        let second = cluster.plane.kubeconfig(&server, "second-token");
        cluster.node.write("/run/kubeconfig", &second);
        wait_until("the new token is used", || {
            cluster.node.log().contains("connecting anew")
        });
        let web = format!("{}/web", collection("endpointslices"));
        cluster.replace(&web, &slice("web", &[1]));
        cluster.node.wait_table("news go on", served(1));

        cluster.plane.kill_api();
        cluster.plane.forget_certificate();
        cluster.plane.start_api();
        wait_until("the other authority is not believed", || {
            cluster.node.log().contains("certificate")
        });
        cluster.replace(&web, &slice("web", &[2]));
        let renewed = cluster.plane.kubeconfig(&server, "second-token");
        cluster.node.write("/run/kubeconfig", &renewed);
        cluster.node.wait_table("it catches up", served(2));
    });
}

/// The server stands still for a while, as on an overloaded machine, and goes on.
#[test]
fn a_server_that_stands_still_for_a_moment() {
    with(|cluster| {
        start(cluster, "");
        cluster.serve("web", "10.96.0.80", &[0]);
        cluster.node.wait_table("it is served", served(0));
        cluster.plane.signal_api(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_secs(3));
        assert!(cluster.node.ask("pod3", "10.96.0.80").starts_with("pod0"));
        cluster.plane.signal_api(Signal::SIGCONT);
        cluster.replace(
            &format!("{}/web", collection("endpointslices")),
            &slice("web", &[1]),
        );
        cluster.node.wait_table("news go on", served(1));
    });
}
