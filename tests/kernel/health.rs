//! What the daemon tells over HTTP.

use std::fs::{self, File, Permissions};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::daemon::{Daemon, Manifests, service, slice, wait_until, wait_up_to};
use tests::netns::{Namespace, loopback_up};
use tests::topology::pod_addresses;

const METRICS: &str = "127.0.0.1:10249";
const HEALTH: &str = "[::1]:10256";

/// Code and body of a path, asked on the node itself; `None` when nobody listens.
pub(crate) fn get(node: &Namespace, address: &str, path: &str) -> Option<(u16, String)> {
    let address: SocketAddr = address.parse().unwrap();
    let answer = node.enter(|| {
        let mut stream = TcpStream::connect(address).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    })?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let code = head.split(' ').nth(1)?.parse().ok()?;
    Some((code, body.to_owned()))
}

/// A sample of the metrics, by its name and labels.
fn metric(node: &Namespace, name: &str) -> f64 {
    let text = get(node, METRICS, "/metrics").unwrap().1;
    let mut samples = text.lines().filter_map(|line| line.rsplit_once(' '));
    let found = samples.find(|(of, _)| *of == name);
    found.map_or(0.0, |(_, value)| value.parse().unwrap())
}

/// Lines of `ipset list` that are entries.
fn entries(node: &Namespace, set: &str) -> f64 {
    let listed = node.tool(&format!("ipset list {set}"));
    let members = listed.split_once("Members:\n").unwrap().1;
    f64::from(u32::try_from(members.lines().count()).unwrap())
}

fn endpoints(manifests: &Manifests, number: u8) {
    let pods: Vec<_> = (0..number)
        .map(|pod| (pod_addresses(pod)[0], true, "node"))
        .collect();
    manifests.write("slice.yaml", &slice("a", "a", &[("", "TCP", 80)], &pods));
}

/// A node, and a Service with two endpoints.
fn one_service() -> (Namespace, Manifests) {
    let node = Namespace::new();
    node.enter(loopback_up).unwrap();
    let manifests = Manifests::new();
    let text = service("a", &["10.96.0.10"], &[("", "TCP", 80, 0)]);
    manifests.write("service.yaml", &text);
    endpoints(&manifests, 2);
    (node, manifests)
}

#[test]
fn the_daemon_tells_how_it_is() {
    let (node, manifests) = one_service();
    let health = ["--healthz-bind-address", HEALTH];
    let mut daemon = Daemon::start(&node, &manifests, &health);
    daemon.settle();

    let answer = |address, path: &str| get(&node, address, path).unwrap();
    for path in ["/healthz", "/livez", "/readyz"] {
        let (code, body) = answer(HEALTH, path);
        assert_eq!(code, 200, "{path}: {body}");
    }
    let body: serde_json::Value = serde_json::from_str(&answer(HEALTH, "/healthz").1).unwrap();
    assert_eq!(body["nodeEligible"], true);
    let verbose = answer(HEALTH, "/readyz?verbose").1;
    assert!(verbose.contains("[+]in-force ok since 20"), "{verbose}");
    assert!(!verbose.contains("api-"), "{verbose}");
    assert_eq!(answer(METRICS, "/proxyMode"), (200, "ipvs".to_owned()));
    assert_eq!(answer(METRICS, "/healthz"), (200, "ok".to_owned()));
    let config: serde_json::Value = serde_json::from_str(&answer(METRICS, "/configz").1).unwrap();
    assert_eq!(config["ipvs-proxy"]["nodeName"], "node");
    let kube_proxy = &config["kubeproxy.config.k8s.io"];
    assert_eq!(kube_proxy["kind"], "KubeProxyConfiguration");
    assert!(kube_proxy["ipvs"].is_object(), "{kube_proxy}");

    // A change is counted, and what the kernel holds is told as it is.
    let v4 = "{ip_family=\"IPv4\"}";
    let added = "ipvs_proxy_kernel_ops_total{kind=\"real_server\",op=\"add\",result=\"done\"}";
    let changes = format!("kubeproxy_sync_proxy_rules_endpoint_changes_total{v4}");
    let passes = format!("kubeproxy_sync_proxy_rules_duration_seconds_count{v4}");
    let servers = format!("ipvs_proxy_real_servers{v4}");
    let names = [added, &changes, &passes, &servers];
    let values = || names.map(|name| metric(&node, name));
    let before = values();
    assert_eq!(before[3], 2.0);
    endpoints(&manifests, 3);
    wait_until("the new real server is counted", || values()[3] == 3.0);
    let after = values();
    assert_eq!([after[0], after[1]], [before[0] + 1.0, before[1] + 1.0]);
    assert!(after[2] > before[2]);
    let listed = node.tool("ipvsadm -S -n");
    assert_eq!(
        listed.lines().filter(|line| line.starts_with("-a")).count(),
        3
    );
    for set in ["KUBE-CLUSTER-IP", "KUBE-IPVS-SERVING", "KUBE-LOOP-BACK"] {
        let told = metric(&node, &format!("ipvs_proxy_set_entries{{set=\"{set}\"}}"));
        assert_eq!(told, entries(&node, set), "{set}");
        assert!(told > 0.0, "{set}");
        let most = format!("ipvs_proxy_set_max_entries{{set=\"{set}\"}}");
        assert_eq!(metric(&node, &most), 65536.0, "{set}");
    }

    // What it finds after a restart is counted, too.
    daemon.stop();
    let mut daemon = Daemon::start(&node, &manifests, &health);
    daemon.settle();
    wait_until("what was found is counted", || {
        metric(&node, &servers) == 3.0
    });
    assert_eq!(metric(&node, added), 0.0);
}

#[test]
fn a_taken_address_ends_the_daemon_only_if_it_should() {
    let node = Namespace::new();
    node.enter(loopback_up).unwrap();
    let taken = node.enter(|| std::net::TcpListener::bind(HEALTH)).unwrap();
    let manifests = Manifests::new();
    manifests.write(
        "service.yaml",
        &service("a", &["10.96.0.10"], &[("", "TCP", 80, 0)]),
    );
    let flags = [
        "--healthz-bind-address",
        HEALTH,
        "--metrics-bind-address",
        "",
    ];
    let hard = [&flags[..], &["--bind-address-hard-fail"]].concat();
    let (status, log) = Daemon::start(&node, &manifests, &hard).ended();
    assert!(!status.success());
    assert!(log.contains("health: can't listen on [::1]:10256"), "{log}");

    let mut daemon = Daemon::start(&node, &manifests, &flags);
    daemon.settle();
    drop(taken);
    wait_until("the address is listened on", || {
        get(&node, HEALTH, "/readyz").is_some_and(|(code, _)| code == 200)
    });
    assert_eq!(daemon.log().matches("can't listen").count(), 1);
    assert_eq!(get(&node, METRICS, "/metrics"), None, "switched off");
}

/// Clients that connect and say nothing neither keep probes out nor take the daemon's descriptors.
#[test]
fn silent_clients_keep_no_probe_out() {
    let node = Namespace::new();
    node.enter(loopback_up).unwrap();
    let mut daemon = Daemon::start(
        &node,
        &Manifests::new(),
        &["--healthz-bind-address", HEALTH],
    );
    daemon.settle();
    let descriptors = || {
        let folder = format!("/proc/{}/fd", daemon.pid());
        fs::read_dir(folder).unwrap().count()
    };
    let before = descriptors();
    let mut silent = Vec::new();
    for address in [HEALTH, METRICS] {
        let address: SocketAddr = address.parse().unwrap();
        let connect = || TcpStream::connect(address).unwrap();
        silent.extend(node.enter(|| (0..500).map(|_| connect()).collect::<Vec<_>>()));
        let asked = Instant::now();
        let path = if address.port() == 10256 {
            "/livez"
        } else {
            "/healthz"
        };
        assert_eq!(get(&node, &address.to_string(), path).unwrap().0, 200);
        assert!(
            asked.elapsed() < Duration::from_secs(1),
            "{:?}",
            asked.elapsed()
        );
    }
    let most = before + 2 * 64 + 2;
    wait_until("no more than its limit stay open", || descriptors() <= most);
    wait_until("those that stay silent are closed", || {
        descriptors() <= before
    });
    drop(silent);
}

/// Codes of /healthz, /livez and /readyz; 0 without an answer within a second, as a probe counts.
fn codes(node: &Namespace) -> [u16; 3] {
    let address: SocketAddr = HEALTH.parse().unwrap();
    ["/healthz", "/livez", "/readyz"].map(|path| {
        let answer = node.enter(|| {
            let mut stream = TcpStream::connect(address).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
            write!(
                stream,
                "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            .ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            Some(answer)
        });
        let code = answer.and_then(|answer| answer.split(' ').nth(1)?.parse().ok());
        code.unwrap_or_default()
    })
}

/// A node with one Service and a daemon whose patience is short, by the words of another program.
fn with_service(by: &[&str]) -> (Namespace, Manifests, Daemon) {
    let (node, manifests) = one_service();
    let flags = ["--healthz-bind-address", HEALTH, "--sync-period=1s"];
    let mut daemon = Daemon::start_by(&node, &manifests, by, &flags);
    daemon.settle();
    assert_eq!(codes(&node), [200; 3]);
    (node, manifests, daemon)
}

#[test]
fn a_daemon_that_was_stopped_goes_on() {
    let (node, manifests, daemon) = with_service(&[]);
    daemon.signal(Signal::SIGSTOP);
    assert_eq!(codes(&node), [0; 3], "it is told as long as it lasts");
    endpoints(&manifests, 3);
    sleep(Duration::from_secs(4));
    daemon.signal(Signal::SIGCONT);
    wait_up_to(Duration::from_secs(2), "it is well again", || {
        codes(&node) == [200; 3]
    });
    for _ in 0..20 {
        assert_eq!(codes(&node), [200; 3]);
        sleep(Duration::from_millis(50));
    }
    let servers = "ipvs_proxy_real_servers{ip_family=\"IPv4\"}";
    wait_until("what was missed is made up", || {
        metric(&node, servers) == 3.0
    });
}

/// Who waits for the lock that others hold is not stuck: a restart would not help.
#[test]
fn a_lock_of_iptables_that_others_hold_is_no_lack_of_life() {
    let (node, _manifests, daemon) = with_service(&[]);
    node.tool("iptables -t nat -F KUBE-SERVICES");
    let file = File::create("/run/xtables.lock").unwrap();
    let lock = Flock::lock(file, FlockArg::LockExclusive).unwrap();
    let until = Instant::now() + Duration::from_secs(35);
    let mut healths = Vec::new();
    while Instant::now() < until {
        let [health, life, _] = codes(&node);
        assert_eq!(life, 200, "{}", daemon.log());
        healths.push(health);
        sleep(Duration::from_millis(250));
    }
    assert_eq!(healths.last(), Some(&503), "{healths:?}");
    drop(lock);
    wait_until("it is well again", || codes(&node) == [200; 3]);
    wait_until("the rules are back", || {
        node.tool("iptables-save").contains("-A KUBE-SERVICES")
    });
}

/// It is killed when its time is over, so a restart is not needed.
#[test]
fn a_tool_that_never_ends_is_told_and_does_not_stop_the_loop() {
    let tools = Manifests::new();
    let at = |name: &str| tools.path().join(name);
    let (hang, pid) = (at("hang"), at("pid"));
    let tool = crate::tools().command(ipvs_proxy_netlink::Family::V4) + "-restore";
    let script = format!(
        "#!/bin/sh\nif [ -e {hang} ]; then echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 1000; fi\n\
         exec /usr/sbin/{tool} \"$@\"\n",
        hang = hang.display(),
        pid = pid.display(),
    );
    tools.write(&tool, &script);
    fs::set_permissions(at(&tool), Permissions::from_mode(0o755)).unwrap();
    let path = format!(
        "PATH={}:/usr/sbin:/usr/bin:/sbin:/bin",
        tools.path().display()
    );
    let (node, _manifests, daemon) = with_service(&["env", &path]);

    fs::write(&hang, "").unwrap();
    node.tool("iptables -t nat -F KUBE-SERVICES");
    wait_until("the tool hangs", || pid.exists());
    let killed = format!("{tool} did not end within 15s and was killed");
    wait_up_to(Duration::from_secs(45), "it is told", || {
        sleep(Duration::from_millis(500));
        assert_eq!(codes(&node)[1], 200, "it is alive");
        daemon.log().contains(&killed)
    });
    let hung: i32 = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    wait_until("the last one is gone", || {
        let next: i32 = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
        next != hung || kill(Pid::from_raw(hung), None).is_err()
    });
    fs::remove_file(&hang).unwrap();
    wait_until("the rules are back", || {
        node.tool("iptables-save").contains("-A KUBE-SERVICES")
    });
}

/// The check of this name in /readyz?verbose.
fn check(node: &Namespace, name: &str) -> String {
    let verbose =
        get(node, "127.0.0.1:10256", "/readyz?verbose").map_or_else(String::new, |(_, body)| body);
    let line = verbose
        .lines()
        .find(|line| line[3..].starts_with(&format!("{name} ")));
    line.unwrap_or_default().to_owned()
}

#[test]
fn sysctls_of_connection_tracking_that_can_not_be_set_are_a_finding() {
    let (node, manifests) = (Namespace::new(), Manifests::new());
    node.enter(loopback_up).unwrap();
    // That of the machine can't be set in this namespace.
    let flags = ["--conntrack-max-per-core=77777", "--sync-period=300ms"];
    let mut daemon = Daemon::start(&node, &manifests, &flags);
    daemon.settle();
    let line = check(&node, "sysctls");
    assert!(line.starts_with("[~]"), "{line}");
    assert!(line.contains("net.netfilter.nf_conntrack_max is"), "{line}");
    let metrics = get(&node, METRICS, "/metrics").unwrap().1;
    let failed = metrics
        .lines()
        .find(|line| line.starts_with("ipvs_proxy_failed_sysctls "));
    assert!(
        failed.is_some_and(|line| !line.ends_with(" 0")),
        "{failed:?}"
    );
    // Once for all audits; and one that was set is nobody's business any more.
    node.sysctl("netfilter/nf_conntrack_tcp_timeout_close_wait", "55");
    sleep(Duration::from_secs(1));
    let log = daemon.log();
    assert_eq!(log.matches("nf_conntrack_max is").count(), 1, "{log}");
    let close_wait = node.tool("sysctl -n net.netfilter.nf_conntrack_tcp_timeout_close_wait");
    assert_eq!(close_wait.trim(), "55");
}

#[test]
fn strict_arp_ends_as_it_began() {
    let (node, manifests) = (Namespace::new(), Manifests::new());
    let arp = || {
        let names = "net.ipv4.conf.all.arp_ignore net.ipv4.conf.all.arp_announce";
        let said = node.tool(&format!("sysctl -n {names}"));
        said.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let run = |flags: &[&str]| {
        let mut daemon = Daemon::start(&node, &manifests, flags);
        daemon.settle();
        daemon
    };
    node.sysctl("ipv4/conf/all/arp_announce", "1");
    for (before, strict) in [("0", "1 2"), ("2", "2 2")] {
        node.sysctl("ipv4/conf/all/arp_ignore", before);
        run(&["--ipvs-strict-arp"]).crash();
        assert_eq!(arp(), strict);
        run(&["--ipvs-strict-arp"]).crash();
        assert_eq!(arp(), strict);
        run(&[]).crash();
        assert_eq!(arp(), format!("{before} 1"));
    }
}

#[test]
fn node_ports_that_the_kernel_may_give_away_are_told_once() {
    let (node, manifests) = (Namespace::new(), Manifests::new());
    node.enter(loopback_up).unwrap();
    let ports = [("", "TCP", 80, 30080)];
    manifests.write("web.yaml", &service("web", &["10.96.0.10"], &ports));
    let mut daemon = Daemon::start(&node, &manifests, &["--sync-period=300ms"]);
    daemon.settle();
    assert!(check(&node, "node-ports").starts_with("[+]"));
    node.sysctl("ipv4/ip_local_port_range", "1024 65535");
    wait_until("it is a finding", || {
        check(&node, "node-ports").starts_with("[~]")
    });
    let told = || {
        daemon
            .log()
            .matches("ip_local_port_range is 1024 65535")
            .count()
    };
    sleep(Duration::from_secs(1));
    assert_eq!(told(), 1, "{}", daemon.log());
    node.sysctl("ipv4/ip_local_reserved_ports", "30000-32767");
    wait_until("it is none any more", || {
        check(&node, "node-ports").starts_with("[+]")
    });
}
