//! The kernel holds what `plan` prints, `ipvs-proxy ipvsadm` prints what `ipvsadm` prints, and nothing is written that is there.

use std::collections::BTreeSet;
use std::fs;
use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tests::daemon::{Daemon, Manifests, binary, service, slice, wait_until};
use tests::netns::Namespace;
use tests::strace::Trace;
use tests::tap::{Asked, Tap};

/// A world's manifests in a directory, and its flags.
struct World {
    manifests: Manifests,
    flags: Vec<String>,
}

impl World {
    fn new(name: &str) -> World {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("worlds")
            .join(name);
        let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
        let manifests = Manifests::new();
        manifests.write("world.yaml", &read("manifests.yaml"));
        let flags = read("args").split_whitespace().map(str::to_owned).collect();
        World { manifests, flags }
    }

    fn flags(&self) -> Vec<&str> {
        self.flags.iter().map(String::as_str).collect()
    }

    fn plan(&self, form: &str) -> String {
        let mut command = Command::new(binary());
        command
            .arg("plan")
            .arg("--manifests")
            .arg(self.manifests.path())
            .args(&self.flags)
            .args(["-o", form]);
        let output = command.output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The lines, without what the kernel chooses by itself.
fn lines(text: &str) -> BTreeSet<String> {
    let chosen = ["hashsize", "bucketsize", "initval"];
    text.lines()
        .map(|line| {
            let mut words = line.split(' ');
            let mut kept = Vec::new();
            while let Some(word) = words.next() {
                if line.starts_with("create ") && chosen.contains(&word) {
                    words.next();
                } else {
                    kept.push(word);
                }
            }
            kept.join(" ")
        })
        .collect()
}

/// The addresses of the dummy link, ADDRESS/PREFIX.
fn bound(node: &Namespace) -> BTreeSet<String> {
    let listed = node.tool("ip -o address show dev kube-ipvs0");
    listed
        .lines()
        .map(|line| line.split_whitespace().nth(3).unwrap().to_owned())
        .collect()
}

fn the_kernel_holds_the_plan(world: &str) {
    let node = Namespace::new();
    let world = World::new(world);
    let mut daemon = Daemon::start(&node, &world.manifests, &world.flags());
    daemon.settle();
    for (form, held) in [
        ("ipvsadm", lines(&node.tool("ipvsadm -S -n"))),
        ("ipset", lines(&node.tool("ipset save"))),
        ("addresses", bound(&node)),
    ] {
        let planned = lines(&world.plan(form));
        assert!(planned.len() > 5, "a world is bigger than {planned:?}");
        let missing: Vec<_> = planned.difference(&held).collect();
        let unplanned: Vec<_> = held.difference(&planned).collect();
        assert!(
            missing.is_empty() && unplanned.is_empty(),
            "{form}: missing {missing:#?}, not planned {unplanned:#?}"
        );
    }
    assert!(daemon.stop().success());
    listings_are_ipvsadms(&node);
}

/// In every form, by either name.
fn listings_are_ipvsadms(node: &Namespace) {
    // Kinds of servers that the daemon does not make
    let foreign = "-A -f 7 -s wrr\n-a -f 7 -r 10.0.0.9:0 -i -w 3\n-A -u 192.0.2.1:53 -s lc -p 60 -o\n-a -u 192.0.2.1:53 -r 10.0.0.9:53 -g -w 2\n";
    node.tool_with_input("ipvsadm --restore", foreign);
    let link = std::env::temp_dir().join("listing").join("ipvsadm");
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(binary(), &link).unwrap();
    let print = |program: &Path, words: &[&str]| {
        let output = node
            .enter(|| Command::new(program).args(words).output())
            .unwrap();
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{program:?} {words:?}: {output:?}"
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let forms: [&[&str]; 8] = [
        &["-Ln"],
        &["-L", "-n", "--stats"],
        &["-Sn"],
        &["-L", "-n", "--rate"],
        &["-L", "-n", "--thresholds"],
        &["-L", "-n", "--persistent-conn"],
        &["-Ln", "--nosort", "--exact"],
        &["-Ln", "-f", "7"],
    ];
    for words in forms {
        let real = print(Path::new("ipvsadm"), words);
        assert!(real.contains('7'), "{words:?}: {real}");
        let mut all = vec!["ipvsadm"];
        all.extend(words);
        assert_eq!(print(&binary(), &all), real, "{words:?}");
        assert_eq!(print(&link, words), real, "{words:?}, started as ipvsadm");
    }
}

/// What it is not told in time, it shows as a number.
#[test]
fn a_name_server_that_does_not_answer_holds_up_no_listing() {
    let node = Namespace::new();
    let _silent = node.enter(|| UdpSocket::bind("127.0.0.1:53")).unwrap();
    let mut servers = "-A -t 192.0.2.1:12345 -s rr\n".to_owned();
    for n in 1..=100 {
        servers += &format!("-a -t 192.0.2.1:12345 -r 198.51.100.{n}:12345 -m -w 1\n");
    }
    node.tool_with_input("ipvsadm --restore", &servers);
    let file = std::env::temp_dir().join("silent-name-server");
    fs::write(&file, "nameserver 127.0.0.1\n").unwrap();
    let line = format!(
        "mount --bind {} /etc/resolv.conf && exec {} ipvsadm -L",
        file.display(),
        binary().display()
    );
    let mut listing = Command::new("unshare");
    listing.args(["--mount", "sh", "-c", &line]);
    let started = Instant::now();
    let output = node.enter(|| listing.output()).unwrap();
    let took = started.elapsed();
    assert!(output.status.success(), "{output:?}");
    let listed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(listed, node.tool("ipvsadm -Ln"));
    assert!(
        took > Duration::from_secs(1),
        "the name server was not asked: {took:?}"
    );
    assert!(took < Duration::from_secs(15), "{took:?}");
    // The name of a virtual server, which the original asks for as long as it takes.
    let line = line.replace("ipvsadm -L", "ipvsadm -L -t nobody.example:80");
    let started = Instant::now();
    let mut listing = Command::new("unshare");
    listing.args(["--mount", "sh", "-c", &line]);
    let output = node.enter(|| listing.output()).unwrap();
    let took = started.elapsed();
    let answer = String::from_utf8(output.stderr).unwrap();
    assert_eq!(answer, "illegal virtual server address[:port] specified\n");
    assert_eq!(output.status.code(), Some(2));
    assert!(took > Duration::from_secs(1), "it was not asked: {took:?}");
    assert!(took < Duration::from_secs(9), "{took:?}");
}

#[test]
fn world_0_is_as_planned() {
    the_kernel_holds_the_plan("basic-0");
}

#[test]
fn world_1_is_as_planned() {
    the_kernel_holds_the_plan("basic-1");
}

#[test]
fn world_2_is_as_planned() {
    the_kernel_holds_the_plan("basic-2");
}

#[test]
fn world_3_is_as_planned() {
    the_kernel_holds_the_plan("basic-3");
}

fn writes(asked: Vec<Asked>) -> Vec<String> {
    asked
        .into_iter()
        .filter(|asked| asked.writes)
        .map(|asked| asked.text)
        .collect()
}

#[test]
fn what_is_there_is_never_written_again() {
    let node = Namespace::new();
    let world = World::new("basic-2");
    let tap = Tap::new(&node);
    let start =
        |trace: &Trace| Daemon::start_by(&node, &world.manifests, &trace.by(), &world.flags());

    // The first start writes all of it, and both counters see it.
    let trace = Trace::new();
    let mut daemon = start(&trace);
    daemon.settle();
    let first = writes(tap.until("ipset ADD KUBE-IPVS-SERVING"));
    let count = |what: &str| first.iter().filter(|text| text.starts_with(what)).count();
    let servers = node.tool("ipvsadm -S -n");
    let adds = |prefix: &str| {
        servers
            .lines()
            .filter(|line| line.starts_with(prefix))
            .count()
    };
    // One more asks for the scheduler.
    assert_eq!(count("ipvs NEW_SERVICE"), adds("-A") + 1);
    assert_eq!(count("ipvs NEW_DEST"), adds("-a"));
    assert!(
        count("ipset CREATE") > 30 && count("ipset ADD") > 0,
        "{first:#?}"
    );
    assert_eq!(count("route 16"), 1, "the link");
    assert_eq!(count("route 20"), bound(&node).len());
    let others = trace.writes();
    for written in [
        "/ip6tables-legacy-restore\"",
        "/proc/sys/net/ipv4/vs/conntrack",
    ] {
        assert!(
            others.iter().any(|call| call.contains(written)),
            "{others:#?}"
        );
    }

    // A file written again with the same content, in place and by a new one.
    let file = world.manifests.path().join("world.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let in_place = || fs::write(&file, &text).unwrap();
    let by_a_new_one = || world.manifests.write("world.yaml", &text);
    for rewrite in [&in_place, &by_a_new_one] as [&dyn Fn(); 2] {
        let opened = trace.opened("world.yaml");
        rewrite();
        wait_until("the file is read again", || {
            trace.opened("world.yaml") > opened
        });
        let asked = one_service_comes_and_goes(&world, &tap);
        // What is looked at each second is no dump: headers of sets, single virtual servers.
        let glance = |text: &str| text == "ipset LIST" || text.starts_with("ipvs GET_SERVICE ");
        let dumps =
            |asked: &&Asked| asked.text.starts_with("ip") && !asked.writes && !glance(&asked.text);
        assert_eq!(asked.iter().find(dumps), None);
    }
    assert_eq!(trace.writes(), others);

    // Ended and started again: the new process reads what is there and leaves it.
    assert!(daemon.stop().success());
    trace.finish();
    for crash in [false, true] {
        let trace = Trace::new();
        let daemon = start(&trace);
        let asked = one_service_comes_and_goes(&world, &tap);
        assert!(
            asked
                .iter()
                .any(|asked| asked.text.starts_with("ipvs GET_DEST")),
            "{asked:#?}"
        );
        if crash {
            daemon.crash();
        } else {
            assert!(daemon.stop().success());
        }
        trace.finish();
        assert!(
            trace.started().iter().any(|call| call.contains("-save")),
            "{trace:?}"
        );
        assert_eq!(trace.writes(), [] as [&str; 0]);
    }
    assert_eq!(node.tool("ipvsadm -S -n"), servers);
}

/// Adds and removes a Service, and with that shows that the daemon is past all that came before it. Nothing else is written
/// until then. What was asked for.
fn one_service_comes_and_goes(world: &World, tap: &Tap) -> Vec<Asked> {
    tap.take(); // what this test's own tools asked
    let endpoint = ("10.9.9.9".parse().unwrap(), true, "elsewhere");
    let late = [
        service("late", &["10.96.9.9"], &[("", "TCP", 80, 0)]),
        slice("late", "late", &[("", "TCP", 8080)], &[endpoint]),
    ];
    world.manifests.write("late.yaml", &late.concat());
    let mut asked = tap.until("ipset ADD KUBE-IPVS-SERVING");
    let added = [
        "ipset ADD KUBE-CLUSTER-IP",
        "ipset ADD KUBE-IPVS-IPS",
        "ipvs NEW_SERVICE 10.96.9.9:80",
        "ipvs NEW_DEST 10.96.9.9:80 10.9.9.9:8080 weight 1",
        "route 20",
        "ipset ADD KUBE-IPVS-SERVING",
    ];
    assert_eq!(writes(asked.clone()), added);
    world.manifests.remove("late.yaml");
    let gone = tap.until("ipset DEL KUBE-CLUSTER-IP");
    let removed = [
        "ipset DEL KUBE-IPVS-SERVING",
        "route 21",
        "ipvs DEL_SERVICE 10.96.9.9:80",
        "ipset DEL KUBE-CLUSTER-IP",
        "ipset DEL KUBE-IPVS-IPS",
    ];
    assert_eq!(writes(gone.clone()), removed);
    asked.extend(gone);
    asked
}
