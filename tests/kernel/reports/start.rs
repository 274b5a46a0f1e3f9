//! Starts, restarts, and what other software does beside us.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;

use tests::daemon::{service, slice, wait_until, wait_up_to};
use tests::tap::{Asked, Tap};
use tests::topology::{NODE, pod_addresses};

use super::{PORT, Scene, TARGET, WEB, slices, web, writes};

#[test]
fn e01_the_api_servers_service_is_served_before_thousands_of_others() {
    let others = if tests::long() { 5_000 } else { 500_u16 };
    let mut scene = Scene::new(1);
    let one = |name: &str, vip: &str, target: u16| {
        let endpoint = (pod_addresses(0)[0], true, "node");
        service(name, &[vip], &[("", "TCP", 443, 0)])
            + &slice(name, name, &[("", "TCP", target)], &[endpoint])
    };
    let mut text = String::new();
    for number in 0..others {
        let [high, low] = number.to_be_bytes();
        text += &one(&format!("a{number}"), &format!("10.97.{high}.{low}"), 9000);
    }
    // The last in the file, and by its name.
    text += &one("kubernetes", "10.96.0.1", TARGET);
    scene.manifests.write("all.yaml", &text);
    let tap = Tap::new(scene.node());
    scene.launch(&[]);
    let mut asked: Vec<Asked> = Vec::new();
    wait_up_to(
        std::time::Duration::from_secs(600),
        "all is in force",
        || {
            asked.extend(tap.take());
            scene.log().contains("is in force")
        },
    );
    let place = |text: &str| asked.iter().position(|asked| asked.text.starts_with(text));
    // Its address waits for the filter's rules, which are on their way meanwhile.
    let served = place("ipset ADD KUBE-IPVS-SERVING").unwrap();
    let server = place("ipvs NEW_SERVICE 10.96.0.1:443").unwrap();
    assert!(server < served && server < place("ipvs NEW_SERVICE 10.97.").unwrap());
    let made = asked
        .iter()
        .filter(|asked| asked.text.starts_with("ipvs NEW_SERVICE 10.97."));
    assert_eq!(made.count(), usize::from(others));
    let answer = scene
        .node()
        .enter(|| tests::traffic::http_get("10.96.0.1:443".parse().unwrap()));
    assert_eq!(answer.unwrap().name, "pod0");
}

#[test]
fn e02_what_is_ours_and_stale_goes_and_what_is_not_ours_stays() {
    let mut scene = Scene::new(1);
    let node = scene.topology.node();
    node.tool("ip link add kube-ipvs0 type dummy");
    let stale = |vip: &str| {
        node.tool(&format!("ipvsadm -A -t {vip}:80 -s rr"));
        node.tool(&format!("ipvsadm -a -t {vip}:80 -r 10.1.9.9:80 -m"));
        // From here on it is ours.
        node.tool(&format!("ip addr add {vip}/32 dev kube-ipvs0"));
    };
    let is_there = |vip: &str| {
        node.tool("ipvsadm -Sn").contains(vip)
            || node.tool("ip -o addr show dev kube-ipvs0").contains(vip)
    };
    stale("10.96.9.9");
    scene.manifests.write("web.yaml", &web(""));
    scene.endpoints(&[0]);
    let node_ips = format!("--node-ips={},{}", NODE[0], NODE[1]);
    let flags = [node_ips.as_str(), "--sync-period=1s"];
    scene.daemon = Some(tests::daemon::Daemon::start(node, &scene.manifests, &flags));
    scene.daemon.as_mut().unwrap().settle();
    wait_until("the stale one is gone", || !is_there("10.96.9.9"));
    stale("10.96.9.8");
    wait_until("a stale one that came later is gone", || {
        !is_there("10.96.9.8")
    });
    assert!(is_there(WEB[0]));
}

#[test]
fn e07_chains_of_kube_proxy_that_are_not_ours_stay() {
    const CHAINS: &str = "\
*nat
:KUBE-SVC-AAAA - [0:0]
:KUBE-SEP-BBBB - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A KUBE-SVC-AAAA -m comment --comment \"default/x\" -j KUBE-SEP-BBBB
-A KUBE-SEP-BBBB -p tcp -m tcp -j DNAT --to-destination 10.1.0.1:80
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
-A OUTPUT -j KUBE-FIREWALL
-A INPUT -j KUBE-EXTERNAL-SERVICES
COMMIT
";
    let mut scene = Scene::new(1);
    let of_kube_proxy = |node: &tests::netns::Namespace| {
        let saved = node.tool("iptables-save") + &node.tool("ip6tables-save");
        let names = ["SVC-", "SEP-", "CANARY", "FIREWALL", "EXTERNAL-SERVICES"];
        let lines = saved
            .lines()
            .filter(|line| names.iter().any(|name| line.contains(name)));
        lines
            .map(|line| line.split(" [").next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    for family in ["", "6"] {
        let text = if family.is_empty() {
            CHAINS.to_owned()
        } else {
            CHAINS.replace("10.1.0.1:80", "[fd00:1::1]:80")
        };
        scene
            .node()
            .tool_with_input(&format!("ip{family}tables-restore --noflush"), &text);
    }
    let before = of_kube_proxy(scene.node());
    assert_eq!(before.len(), 22, "{before:#?}");
    scene.manifests.write("web.yaml", &web(""));
    scene.endpoints(&[0]);
    for _ in 0..2 {
        scene.launch(&["--sync-period=1s"]);
        scene.settle();
        assert_eq!(scene.answers("10.96.0.20:80"), "pod0");
        assert_eq!(of_kube_proxy(scene.node()), before);
        assert!(scene.daemon.take().unwrap().stop().success());
        assert_eq!(of_kube_proxy(scene.node()), before);
    }
}

#[test]
fn f02_node_ports_stay_while_other_links_come_and_go() {
    let mut scene = Scene::new(1);
    let mut text = String::new();
    for number in 0..100_u16 {
        let name = format!("n{number}");
        text += &service(
            &name,
            &[&format!("10.96.1.{number}")],
            &[("", "TCP", PORT, 30000 + number)],
        );
        text += &slices(&name, TARGET, &[(0, true)]);
    }
    scene.manifests.write("all.yaml", &text);
    // It follows the node's addresses, and lists them again and again.
    let flags = ["--nodeport-addresses=192.168.10.0/24", "--sync-period=1s"];
    let daemon = tests::daemon::Daemon::start(scene.topology.node(), &scene.manifests, &flags);
    scene.daemon = Some(daemon);
    scene.settle();
    let node = scene.node();
    let node_ports = || {
        let saved = node.tool("ipvsadm -Sn");
        saved
            .lines()
            .filter(|line| line.starts_with("-A -t 192.168.10.11:30"))
            .count()
    };
    assert_eq!(node_ports(), 100);
    let tap = Tap::new(node);
    node.tool("ip link add churn type dummy");
    node.tool("ip link set churn up");
    for round in 0..10 {
        let mut batch = String::new();
        for number in 0..10 {
            let _ = writeln!(batch, "addr add 172.16.{round}.{number}/24 dev churn");
            let _ = writeln!(batch, "link add v{number} type veth peer name w{number}");
            let _ = writeln!(batch, "addr del 172.16.{round}.{number}/24 dev churn");
            let _ = writeln!(batch, "link del v{number}");
        }
        node.tool_with_input("ip -batch -", &batch);
        assert_eq!(node_ports(), 100, "round {round}");
    }
    let changed: Vec<String> = writes(&tap)
        .into_iter()
        .filter(|text| text.starts_with("ipvs"))
        .collect();
    assert_eq!(changed, [""; 0]);
}

#[test]
fn g07_it_runs_where_there_is_nothing_but_itself_and_iptables() {
    // The system's libraries and iptables' own folder; no /etc, no shell, no ipset, no ipvsadm.
    const SCRIPT: &str = r#"#!/bin/sh
set -e
root=$(mktemp -d)
mount -t tmpfs root "$root"
for folder in proc dev usr/lib sbin run tmp lib64; do mkdir -p "$root/$folder"; done
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind /usr/lib "$root/usr/lib"
mount --bind /lib64 "$root/lib64"
ln -s usr/lib "$root/lib"
cp "$(readlink -f /usr/sbin/xtables-legacy-multi)" "$root/sbin/"
for name in iptables ip6tables; do for what in '' -save -restore; do
    ln -s xtables-legacy-multi "$root/sbin/$name-legacy$what"
    ln -s xtables-legacy-multi "$root/sbin/$name$what"
done; done
cp "$1" "$root/ipvs-proxy"
shift
mkdir -p "$root$MANIFESTS"
mount --bind "$MANIFESTS" "$root$MANIFESTS"
PATH=/sbin exec chroot "$root" /ipvs-proxy "$@"
"#;
    let mut scene = Scene::new(2);
    let ports = [("", "TCP", PORT, 30080)];
    let udp = service("dns", &["10.96.0.21"], &[("", "UDP", 53, 30053)]);
    let endpoint = (pod_addresses(1)[0], true, "node");
    let text = service("web", &WEB, &ports)
        + &slices("web", TARGET, &[(0, true)])
        + &udp
        + &slice("dns", "dns", &[("", "UDP", TARGET)], &[endpoint]);
    scene.manifests.write("all.yaml", &text);
    let script = scene.manifests.path().with_extension("sh");
    std::fs::write(&script, SCRIPT).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = format!("MANIFESTS={}", scene.manifests.path().display());
    let by = [
        "env",
        &folder,
        "unshare",
        "--mount",
        script.to_str().unwrap(),
    ];
    // The number of connections can be set in the first network namespace alone.
    scene.launch_by(&by, &["--conntrack-max-per-core=0"]);
    scene.settle();
    for to in ["10.96.0.20:80", "[fd96::20]:80", "192.168.10.11:30080"] {
        assert_eq!(scene.answers(to), "pod0");
    }
    let dns = scene
        .topology
        .outside()
        .enter(|| tests::traffic::udp_ask("10.96.0.21:53".parse().unwrap()));
    assert_eq!(dns.unwrap().name, "pod1");
    let root = std::fs::read_dir(format!(
        "/proc/{}/root",
        scene.daemon.as_ref().unwrap().pid()
    ))
    .unwrap();
    let names: Vec<String> = root
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    assert!(
        names.contains(&"ipvs-proxy".to_owned()) && !names.contains(&"etc".to_owned()),
        "{names:?}"
    );
    let log = scene.log();
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
    let _ = std::fs::remove_file(script);
}

#[test]
fn j04_a_vip_of_ipv6_is_there_for_all_at_once() {
    let scene = Scene::web(1, &[0], "", &[]);
    let node = scene.node();
    // As a machine has it: the kernel asks around first, for a second, unless told not to.
    for what in ["all", "default", "kube-ipvs0"] {
        node.sysctl(&format!("ipv6/conf/{what}/accept_dad"), "1");
    }
    node.tool("ip link set kube-ipvs0 up");
    for number in 0..5 {
        let vip = format!("fd96::9{number}");
        let name = format!("s{number}");
        let text =
            service(&name, &[&vip], &[("", "TCP", PORT, 0)]) + &slices(&name, TARGET, &[(0, true)]);
        scene.manifests.write("more.yaml", &text);
        let mut line = String::new();
        wait_until("the VIP is there", || {
            let listed = node.tool("ip -o -6 addr show dev kube-ipvs0");
            line = listed
                .lines()
                .find(|line| line.contains(&vip))
                .unwrap_or_default()
                .to_owned();
            !line.is_empty()
        });
        assert!(
            line.contains("nodad") && !line.contains("tentative"),
            "{line}"
        );
        assert_eq!(scene.answers(&format!("[{vip}]:80")), "pod0");
    }
}
