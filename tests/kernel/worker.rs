//! The dataplane by itself: what runs iptables holds up nothing else where it has a thread of its own, a reading comes in small
//! parts, and a glance shows what others emptied.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use ipset_rs::{Entry, SetType};
use ipvs_netlink::VirtualServerKey;
use ipvs_proxy_core::op::{
    Dataplane as _, Failure, FailureKind, Finished, Glance, Op, Outcome, Reading,
};
use ipvs_proxy_core::plan::{Config, base};
use ipvs_proxy_core::state::{Key, Role, Set, State, Value};
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_iptables::{Backend, Choice, Table, Tools};
use ipvs_proxy_netlink::Family;
use tests::daemon::wait_until;
use tests::netns::Namespace;

use crate::servers::{SET, adds, server, vip};

/// The lock of iptables-legacy, held by somebody else.
struct Lock(Child);

impl Lock {
    fn take() -> Lock {
        let file = "/run/xtables.lock";
        let command = ["--no-fork", file, "sleep", "1000"];
        let lock = Lock(Command::new("flock").args(command).spawn().unwrap());
        wait_until("the lock is held", || {
            let mut free = Command::new("flock");
            !free
                .args(["--nonblock", file, "true"])
                .status()
                .unwrap()
                .success()
        });
        lock
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn v4() -> Config {
    Config {
        families: vec![Family::V4],
        ..Config::default()
    }
}

fn open() -> Kernel {
    Kernel::open(&[Family::V4], Choice::Legacy).unwrap()
}

fn is_rules(op: &Op) -> bool {
    matches!(op.key(), Key::Rules(..))
}

#[test]
fn the_lock_of_iptables_holds_up_rules_alone() {
    Namespace::new().enter(|| {
        let (sender, notices) = channel();
        let notify = move || {
            let _ = sender.send(());
        };
        let mut kernel = open().detach_rules(|_| (), notify).unwrap();
        let mut finished = Vec::new();
        let mut told = |kernel: &mut Kernel, wanted: usize| -> Vec<Finished> {
            while finished.len() < wanted {
                notices.recv_timeout(Duration::from_secs(30)).unwrap();
                finished.extend(kernel.finished());
            }
            std::mem::take(&mut finished)
        };
        let mut wanted = base(&v4());
        wanted.extend(server(1, 2));
        let lock = Lock::take();
        let started = Instant::now();
        let ops = adds(&wanted);
        for (op, outcome) in ops.iter().zip(kernel.apply(&ops)) {
            let expected = if is_rules(op) {
                Outcome::Started
            } else {
                Outcome::Done
            };
            assert_eq!(outcome, expected, "{op}");
        }
        let mut reading = Reading::default();
        while !kernel.read_part(&wanted, &mut reading).unwrap() {}
        let rules = |key: &&Key| matches!(key, Key::Rules(..));
        let unread: BTreeSet<Key> = wanted.keys().filter(rules).copied().collect();
        assert_eq!((unread.len(), &reading.unread), (3, &unread));
        let mut but_rules = wanted.clone();
        but_rules.retain(|key, _| !unread.contains(key));
        assert_eq!(reading.state, but_rules);
        assert_eq!(kernel.finished(), []);
        assert!(
            started.elapsed() < Duration::from_secs(3),
            "{:?}",
            started.elapsed()
        );
        // The first gives up after 5 s and says why; the second waits no less.
        let failed = told(&mut kernel, 1);
        let [Finished::Op(first, Outcome::Failed(Failure { kind, text }))] = &failed[..] else {
            panic!("{failed:?}")
        };
        assert_eq!(*kind, FailureKind::Busy);
        assert!(text.contains("xtables lock"), "{text}");
        drop(lock);
        // The other ops, and the readings, of which the first table differs.
        let rest = told(&mut kernel, 5);
        let done = rest
            .iter()
            .filter(|told| matches!(told, Finished::Op(_, Outcome::Done)));
        assert_eq!(done.count(), 2, "{rest:?}");
        for told in &rest {
            if let Finished::Read(key, read) = told {
                let expected = wanted.get(key).filter(|_| *key != first.key()).cloned();
                assert_eq!(*read, Ok(expected), "{key}");
            }
        }
        // Why the one differs is known without another reading.
        let Some(Value::Rules(rules)) = wanted.get(&first.key()) else {
            panic!()
        };
        let lines = kernel.rule_differences(rules).unwrap();
        assert!(
            lines.iter().all(|line| line.starts_with("missing: -t ")),
            "{lines:?}"
        );
        assert!(!lines.is_empty());
    });
}

#[test]
fn the_back_end_is_found_while_the_lock_is_held() {
    Namespace::new().enter(|| {
        let _lock = Lock::take();
        let started = Instant::now();
        let tools = Tools::find(Choice::Auto).unwrap();
        assert_eq!(tools.backend().unwrap(), Backend::Legacy);
        assert!(
            started.elapsed() < Duration::from_secs(3),
            "{:?}",
            started.elapsed()
        );
    });
}

/// How many programs of these tools run.
fn restores() -> usize {
    let of_tools = |process: &fs::DirEntry| {
        let read = |file| fs::read_to_string(process.path().join(file)).unwrap_or_default();
        read("cmdline").contains("iptables-legacy-restore")
    };
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(of_tools)
        .count()
}

#[test]
fn a_tool_that_waits_ends_with_the_process() {
    Namespace::new().enter(|| {
        let mut kernel = open().detach_rules(|_| (), || ()).unwrap();
        let _lock = Lock::take();
        kernel.apply(&adds(&base(&v4())));
        wait_until("a tool waits for the lock", || restores() > 0);
        let started = Instant::now();
        drop(kernel);
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "{:?}",
            started.elapsed()
        );
        assert_eq!(restores(), 0);
    });
}

#[test]
fn a_set_of_another_type_is_replaced_while_others_go_on() {
    let node = Namespace::new();
    node.enter(|| {
        let mut kernel = open().detach_rules(|_| (), || ()).unwrap();
        node.tool("ipset create KUBE-CLUSTER-IP hash:ip");
        // What a crash left while another set was replaced.
        node.tool("ipset create KUBE-IPVS-REPLACING hash:ip,port");
        node.tool("ipset add KUBE-IPVS-REPLACING 192.0.2.1,tcp:80");
        let replace = Op::Update(Key::Set(SET), Value::Present);
        let other = Op::Add(Key::Link, Value::Present);
        let lock = Lock::take();
        let outcomes = kernel.apply(&[replace.clone(), other]);
        assert_eq!(outcomes, [Outcome::Started, Outcome::Done]);
        drop(lock);
        wait_until("it is replaced", || {
            kernel
                .finished()
                .contains(&Finished::Op(replace.clone(), Outcome::Done))
        });
        let sets = node.tool("ipset save");
        assert!(
            sets.starts_with("create KUBE-CLUSTER-IP hash:ip,port "),
            "{sets}"
        );
        assert_eq!(sets.lines().count(), 1, "{sets}");
    });
}

#[test]
fn no_port_of_a_vip_reaches_the_host_while_a_set_is_replaced() {
    let node = Namespace::new();
    node.enter(|| {
        tests::netns::loopback_up().unwrap();
        let mut kernel = open();
        let mut wanted = base(&v4());
        wanted.extend(server(1, 2));
        let vips = Set {
            family: Family::V4,
            role: Role::IpvsIps,
        };
        let guard = Key::Entry(vips, Entry::Ip(vip(1).into()));
        wanted.insert(guard, Value::Present);
        let ops = adds(&wanted);
        assert!(
            kernel
                .apply(&ops)
                .iter()
                .all(|outcome| *outcome == Outcome::Done)
        );
        // The host listens on all addresses.
        let _host = TcpListener::bind("0.0.0.0:2222").unwrap();
        let connect =
            |to: Ipv4Addr| TcpStream::connect_timeout(&(to, 2222).into(), Duration::from_secs(5));
        connect(Ipv4Addr::LOCALHOST).unwrap();
        connect(vip(1)).unwrap_err();

        let before =
            node.tool("iptables-legacy-save -t filter") + &node.tool("iptables-legacy-save -t nat");
        let rules = |text: &str| -> Vec<String> {
            text.lines()
                .filter(|line| line.starts_with("-A"))
                .map(str::to_owned)
                .collect()
        };
        let others =
            Set::all(Family::V4).filter(|set| *set != vips && set.kind() != SetType::BitmapPort);
        for set in [vips].into_iter().chain(others) {
            // While rules look into it, the kernel lets only a set of its type take its place.
            let name = set.name();
            node.tool(&format!("ipset create ODD {} counters", set.kind().name()));
            node.tool(&format!("ipset swap ODD {name}"));
            node.tool("ipset destroy ODD");
            if set == vips {
                node.tool(&format!("ipset add {name} {}", vip(1)));
            }
            let odd = kernel.read(&State::new()).unwrap();
            assert_eq!(odd.state[&Key::Set(set)], Value::OddSet);
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                let tries = scope.spawn(|| {
                    let mut tries = 0;
                    while !done.load(Ordering::Relaxed) {
                        connect(vip(1)).unwrap_err();
                        tries += 1;
                    }
                    tries
                });
                let replaced = kernel.apply(&[Op::Update(Key::Set(set), Value::Present)]);
                done.store(true, Ordering::Relaxed);
                assert_eq!(replaced, [Outcome::Done], "{name}");
                assert!(tries.join().unwrap() > 10, "{name}");
            });
            let now = kernel.read(&State::new()).unwrap();
            assert_eq!(now.state[&Key::Set(set)], Value::Present);
        }
        let after =
            node.tool("iptables-legacy-save -t filter") + &node.tool("iptables-legacy-save -t nat");
        assert_eq!(rules(&after), rules(&before));
        assert!(!node.tool("ipset list -n").contains("REPLACING"));
    });
}

#[test]
fn a_part_of_a_reading_ends_after_some_thousand_real_servers() {
    Namespace::new().enter(|| {
        let mut kernel = open();
        let mut wanted =
            State::from([(Key::Set(SET), Value::Present), (Key::Link, Value::Present)]);
        for number in 1..=3 {
            wanted.extend(server(number, 1500));
        }
        for outcome in kernel.apply(&adds(&wanted)) {
            assert_eq!(outcome, Outcome::Done);
        }
        let mut reading = Reading::default();
        let mut sizes = Vec::new();
        loop {
            let before = reading.state.len();
            let whole = kernel.read_part(&State::new(), &mut reading).unwrap();
            sizes.push(reading.state.len() - before);
            if whole {
                break;
            }
        }
        assert_eq!(sizes, [11, 3000, 1500]);
        assert_eq!(reading.state, wanted);
    });
}

#[test]
fn a_glance_shows_what_others_emptied() {
    let node = Namespace::new();
    node.enter(|| {
        let mut kernel = open();
        let mut wanted = base(&v4());
        wanted.extend(server(1, 2));
        wanted.extend(server(2, 0));
        let servers: Vec<VirtualServerKey> = wanted
            .keys()
            .filter_map(|key| match key {
                Key::VirtualServer(server) => Some(*server),
                _ => None,
            })
            .collect();
        let mut restore = |damage: &str| -> Glance {
            let outcomes = kernel.apply(&adds(&wanted));
            let whole = outcomes.iter().all(|outcome| {
                // What is there is said to be.
                !matches!(outcome, Outcome::Failed(Failure { kind, .. }) if *kind != FailureKind::Drift)
            });
            assert!(whole, "{damage}: {outcomes:?}");
            let glance = kernel.glance(&servers).unwrap();
            if !damage.is_empty() {
                node.tool(damage);
                let after = kernel.glance(&servers).unwrap();
                assert_ne!(after, glance, "{damage}");
            }
            glance
        };
        let first = restore("");
        assert_eq!(first.sets.len(), Set::all(Family::V4).count());
        assert_eq!(first.sets[&SET].0, 2);
        assert!(first.sets[&SET].1 > 0 && first.missing.is_empty());
        for damage in [
            "iptables-legacy -F",
            "iptables-legacy -F INPUT",
            "iptables-legacy -t nat -F",
            "ipset flush",
            "ipset flush KUBE-CLUSTER-IP",
            "ipvsadm -C",
            "ipvsadm -D -t 10.96.0.2:80",
            "iptables-legacy -t nat -F POSTROUTING",
            "iptables-legacy -F FORWARD",
            "ipset destroy KUBE-IPVS-OWNED",
        ] {
            assert_eq!(restore(damage), first, "before {damage}");
        }
        assert_eq!(restore(""), first);
        let started = Instant::now();
        for _ in 0..100 {
            kernel.glance(&servers).unwrap();
        }
        println!("a glance takes {:?}", started.elapsed() / 100);
    });
}

#[test]
fn a_rule_of_others_before_ours_is_told_until_ours_is_first_again() {
    let node = Namespace::new();
    node.enter(|| {
        let mut kernel = open();
        let wanted = base(&v4());
        let ops = adds(&wanted);
        assert!(kernel.apply(&ops).iter().all(|outcome| *outcome == Outcome::Done));
        let mut misplaced = || {
            let read = kernel.read(&wanted).unwrap();
            assert_eq!(read.state, wanted);
            kernel.finished()
        };
        assert_eq!(misplaced(), []);
        node.tool("iptables-legacy -I INPUT -i cbr0 -j ACCEPT");
        node.tool("iptables-legacy -t nat -I PREROUTING -p tcp --dport 80 -j DNAT --to 10.1.0.1");
        node.tool("iptables-legacy -t nat -I OUTPUT -p udp -j LOG");
        node.tool("iptables-legacy -I FORWARD -j ACCEPT");
        let told = |table, line: &str| {
            Finished::Misplaced(Key::Rules(Family::V4, table), vec![line.to_owned()])
        };
        let expected = [
            told(
                Table::Nat,
                "before ours: -t nat -A PREROUTING -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.1",
            ),
            told(Table::Filter, "before ours: -t filter -A INPUT -i cbr0 -j ACCEPT"),
        ];
        assert_eq!(misplaced(), expected);
        let rules: Vec<Op> = ops.into_iter().filter(is_rules).collect();
        assert_eq!(kernel.apply(&rules), [Outcome::Done, Outcome::Done, Outcome::Done]);
        assert_eq!(kernel.read(&wanted).unwrap().state, wanted);
        assert_eq!(kernel.finished(), []);
        let input = node.tool("iptables-legacy -S INPUT");
        let rules: Vec<&str> = input.lines().skip(1).collect();
        assert!(rules[0].ends_with("-j KUBE-NODE-PORT"), "{input}");
        assert!(rules[1].ends_with("-j KUBE-IPVS-FILTER"), "{input}");
        assert_eq!(rules[2..], ["-A INPUT -i cbr0 -j ACCEPT"]);
    });
}
