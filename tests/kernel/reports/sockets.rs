//! Netlink sockets: many at once, and small ones.

use std::fmt::Write as _;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use ipset_rs::{Change, Entry, SetName, SetSpec, SetType};
use ipvs_netlink::{
    Forwarding, RealServer, RealServerKey, Request, VirtualServer, VirtualServerKey,
};
use ipvs_proxy_dataplane::addresses::{self, AddressNotice};
use ipvs_proxy_netlink::{Family, Protocol};
use tests::daemon::PATIENCE;
use tests::netns::{self, Namespace};

const SMALL: &str = "SMALL_BUFFERS";

/// What the kernel queues at most for a socket that asks for no more: the least that there is.
const RMEM_DEFAULT: &str = "/proc/sys/net/core/rmem_default";

/// Runs this test again in a process that asks in vain for larger receive buffers; true in that process.
fn with_small_buffers(test: &str) -> bool {
    if std::env::var_os(SMALL).is_some() {
        return true;
    }
    tests::require_guest();
    let before = std::fs::read_to_string(RMEM_DEFAULT).unwrap();
    std::fs::write(RMEM_DEFAULT, "4096").unwrap();
    let mut command = Command::new("strace");
    command
        .args([
            "-f",
            "--seccomp-bpf",
            "-e",
            "trace=setsockopt",
            "-e",
            "inject=setsockopt:retval=0",
            "-o",
            "/dev/null",
        ])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &format!("reports::sockets::{test}"),
            "--nocapture",
        ])
        .env(SMALL, "1");
    let output = command.output().unwrap();
    std::fs::write(RMEM_DEFAULT, before).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    false
}

fn key(thread: u8, number: u16) -> VirtualServerKey {
    let [high, low] = number.to_be_bytes();
    VirtualServerKey::Address {
        address: [10, 100 + thread, high, low].into(),
        port: 80,
        protocol: Protocol::Tcp,
    }
}

fn server(key: VirtualServerKey) -> VirtualServer {
    VirtualServer {
        key,
        scheduler: "rr".parse().unwrap(),
        scheduler_flags: ipvs_netlink::SchedulerFlags::NONE,
        one_packet: false,
        persistence: None,
        persistence_engine: None,
    }
}

fn real(number: u16, weight: u32) -> RealServer {
    let [high, low] = number.to_be_bytes();
    RealServer {
        key: RealServerKey {
            address: [10, 1, high, low].into(),
            port: 8080,
        },
        forwarding: Forwarding::Masquerade,
        weight,
        upper_threshold: 0,
        lower_threshold: 0,
    }
}

fn name(text: &str) -> SetName {
    text.parse().unwrap()
}

#[test]
fn f01_eight_threads_change_get_and_list_at_once() {
    const ROUNDS: u16 = 125;
    netns::run(|| {
        let here = Namespace::current();
        thread::scope(|scope| {
            for of in 0..8_u8 {
                let here = &here;
                scope.spawn(move || here.enter(|| one_of_eight(of, ROUNDS)));
            }
        });
        let saved = here.tool("ipvsadm -Sn");
        assert_eq!(
            saved.lines().filter(|line| line.starts_with("-A")).count(),
            8 * usize::from(ROUNDS)
        );
    });
}

/// Ten requests a round; each answer must be that of its request.
fn one_of_eight(of: u8, rounds: u16) {
    let mut ipvs = ipvs_netlink::Client::open().unwrap();
    let mut sets = ipset_rs::Client::open().unwrap();
    let set = name(&format!("OF{of}"));
    let create = Change::Create(SetSpec::new(set, SetType::HashIpPort(Family::V4)));
    assert!(sets.change(&[create]).iter().all(Result::is_ok));
    for number in 0..rounds {
        let key = key(of, number);
        let added = server(key);
        let requests = [
            Request::AddVirtualServer(&added),
            Request::AddRealServer(key, real(number, 1)),
            Request::AddRealServer(key, real(number, 1)),
            Request::UpdateRealServer(key, real(number, 7)),
            Request::RemoveRealServer(key, real(number + 1, 1).key),
        ];
        let results = ipvs.apply(&requests);
        let kinds: Vec<bool> = results.iter().map(Result::is_ok).collect();
        assert_eq!(kinds, [true, true, false, true, false], "{results:?}");
        assert!(
            matches!(results[2], Err(ipvs_netlink::Error::Exists { .. })),
            "{results:?}"
        );
        assert!(
            matches!(results[4], Err(ipvs_netlink::Error::NoRealServer { .. })),
            "{results:?}"
        );
        assert_eq!(ipvs.virtual_server(key).unwrap().unwrap().server, added);
        let reals = ipvs.real_servers(key).unwrap();
        assert_eq!(
            reals.iter().map(|entry| entry.server).collect::<Vec<_>>(),
            [real(number, 7)]
        );
        let VirtualServerKey::Address {
            address,
            port,
            protocol,
        } = key
        else {
            unreachable!("by address")
        };
        let entry = Entry::IpPort(address, protocol, port);
        assert!(
            sets.change(&[Change::Add(set, entry)])
                .iter()
                .all(Result::is_ok)
        );
        let (_, entries) = sets.list(&set).unwrap();
        assert_eq!(entries.len(), usize::from(number) + 1);
        if number % 25 == 0 {
            // Others add theirs meanwhile; ours are all there.
            let listed = ipvs.virtual_servers().unwrap();
            let ours = (0..=number).all(|n| {
                listed
                    .iter()
                    .any(|entry| entry.server.key == self::key(of, n))
            });
            assert!(ours, "{of}, {number}");
        }
    }
}

#[test]
fn f03_a_small_buffer_makes_no_listing_short() {
    const SERVERS: u16 = 5000;
    const REALS: u16 = 20;
    if !with_small_buffers("f03_a_small_buffer_makes_no_listing_short") {
        return;
    }
    netns::run(|| {
        let mut client = ipvs_netlink::Client::open().unwrap();
        let servers: Vec<VirtualServer> =
            (0..SERVERS).map(|number| server(key(0, number))).collect();
        let mut requests: Vec<Request<'_>> =
            servers.iter().map(Request::AddVirtualServer).collect();
        for server in &servers {
            requests.extend(
                (0..REALS).map(|number| Request::AddRealServer(server.key, real(number, 1))),
            );
        }
        // Most answers are lost: what is not known to be done may be done.
        let results = client.apply(&requests);
        let lost = results
            .iter()
            .filter(|result| matches!(result, Err(ipvs_netlink::Error::Overrun { .. })))
            .count();
        assert!(lost > 0, "the buffers are not small");
        assert!(
            results
                .iter()
                .all(|result| matches!(result, Ok(()) | Err(ipvs_netlink::Error::Overrun { .. })))
        );
        let whole =
            |what: &str, result: Result<usize, ipvs_netlink::Error>, wanted: usize| match result {
                Ok(count) => assert_eq!(count, wanted, "{what}"),
                Err(error) => assert!(
                    matches!(error, ipvs_netlink::Error::Overrun { .. }),
                    "{what}: {error}"
                ),
            };
        whole(
            "virtual servers",
            client.virtual_servers().map(|all| all.len()),
            SERVERS.into(),
        );
        for server in &servers {
            whole(
                "real servers",
                client.real_servers(server.key).map(|all| all.len()),
                REALS.into(),
            );
        }
        println!("{lost} of {} answers were lost", results.len());
    });
}

#[test]
fn f03_a_small_buffer_loses_no_change_of_a_set() {
    const ENTRIES: u32 = 10_000;
    if !with_small_buffers("f03_a_small_buffer_loses_no_change_of_a_set") {
        return;
    }
    netns::run(|| {
        let mut client = ipset_rs::Client::open().unwrap();
        let sets: Vec<SetName> = (0..16)
            .map(|number| name(&format!("SET{number}")))
            .collect();
        for set in &sets {
            let create = Change::Create(SetSpec::new(*set, SetType::HashIpPort(Family::V4)));
            assert!(client.change(&[create]).iter().all(Result::is_ok));
        }
        // Every neighbour is in another set, so that each change is a message.
        let changes: Vec<Change> = (0..ENTRIES)
            .map(|number| {
                let [_, a, b, c] = number.to_be_bytes();
                let entry = Entry::IpPort([10, a, b, c].into(), Protocol::Tcp, 80);
                let at = usize::try_from(number).unwrap() % sets.len();
                Change::Add(sets[at], entry)
            })
            .collect();
        let results = client.change(&changes);
        let lost = results
            .iter()
            .filter(|result| **result == Err(ipset_rs::Error::Overrun))
            .count();
        assert!(lost > 0, "the buffers are not small");
        assert!(
            results
                .iter()
                .all(|result| matches!(result, Ok(()) | Err(ipset_rs::Error::Overrun)))
        );
        let here = Namespace::current();
        let saved = here.tool("ipset save");
        assert_eq!(
            saved
                .lines()
                .filter(|line| line.starts_with("add "))
                .count(),
            ENTRIES as usize
        );
        println!("{lost} of {} answers were lost", results.len());
        let total: usize = sets
            .iter()
            .map(|set| client.list(set).map_or(0, |(_, entries)| entries.len()))
            .sum();
        assert!(
            total == ENTRIES as usize || total.is_multiple_of(625),
            "{total}"
        );
    });
}

#[test]
fn f03_unread_notices_of_addresses_are_told_as_lost() {
    netns::run(|| {
        let here = Namespace::current();
        here.tool("ip link add churn type dummy");
        let (told, notices) = channel();
        let (go, wait) = channel::<()>();
        // Whoever is told is busy until all has happened.
        addresses::watch(move |notices| {
            let _ = wait.recv();
            told.send(notices).is_ok()
        })
        .unwrap();
        let mut batch = String::new();
        for number in 0..5000_u16 {
            let [high, low] = number.to_be_bytes();
            let _ = writeln!(
                batch,
                "addr add 172.16.{high}.{low}/32 dev churn\naddr del 172.16.{high}.{low}/32 dev churn"
            );
        }
        here.tool_with_input("ip -batch -", &batch);
        drop(go);
        let from_watch = || std::iter::from_fn(|| notices.recv_timeout(PATIENCE).ok());
        let mut seen = 0;
        let lost = from_watch()
            .flatten()
            .inspect(|_| seen += 1)
            .any(|notice| notice == AddressNotice::Unknown);
        assert!(lost && seen < 10_000, "{seen}");
        // It goes on after that.
        here.tool("ip addr add 172.17.0.1/32 dev churn");
        assert!(
            notices
                .iter()
                .flatten()
                .any(|notice| notice == AddressNotice::Node)
        );
    });
}

/// Links of pods come and go all the time, and a router says again and again how long an address is good for.
#[test]
fn addresses_are_news_when_the_node_gets_or_loses_one() {
    netns::run(|| {
        let here = Namespace::current();
        let (told, notices) = channel();
        addresses::watch(move |notices| told.send(notices).is_ok()).unwrap();
        let quiet = Duration::from_millis(500);
        for number in 0..20 {
            here.tool(&format!(
                "ip link add pod{number} type veth peer name peer{number}"
            ));
            here.tool(&format!("ip link set pod{number} up"));
            here.tool(&format!("ip link set peer{number} up"));
        }
        here.tool("ip link set lo up");
        assert!(notices.recv_timeout(quiet).is_err());
        let links = here.tool("ip -6 addr show");
        assert!(links.matches("fe80::").count() >= 20, "{links}");

        for address in ["172.17.0.1/32", "fd00:17::1/128"] {
            let life = |seconds| {
                here.tool(&format!(
                    "ip addr replace {address} dev pod0 valid_lft {seconds} preferred_lft {seconds}"
                ));
            };
            life(1000);
            assert_eq!(
                notices.recv_timeout(PATIENCE),
                Ok(vec![AddressNotice::Node])
            );
            life(2000);
            assert!(notices.recv_timeout(quiet).is_err(), "{address}");
            here.tool(&format!("ip addr del {address} dev pod0"));
            assert_eq!(
                notices.recv_timeout(PATIENCE),
                Ok(vec![AddressNotice::Node])
            );
        }

        let batch: String = (0..2000_u16)
            .map(|n| format!("addr add 172.18.{}.{}/32 dev pod0\n", n >> 8, n & 255))
            .collect();
        let began = Instant::now();
        here.tool_with_input("ip -batch -", &batch);
        let tenths = began.elapsed().as_millis() / 100;
        let mut listings = 0;
        while notices.recv_timeout(quiet).is_ok() {
            listings += 1;
        }
        assert!(
            listings > 0 && listings <= tenths + 3,
            "{listings} in {tenths}"
        );
        here.tool("ip link del pod0");
        assert!(notices.recv_timeout(PATIENCE).is_ok());
    });
}
