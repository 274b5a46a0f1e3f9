//! What goes wrong, one function each. All choose by chance, and say what they did.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use tests::daemon::{Daemon, Manifests};
use tests::foreign;

use super::objects::{self, TENANTS};
use super::{Run, START};

/// Its name, what does it, and whether it may cost requests to a Service that it does not name: what is emptied is everybody's.
type Disturbance = (&'static str, fn(&mut Run<'_>) -> String, bool);

pub(super) const TABLE: [Disturbance; 36] = [
    ("a Service changes:", tenant_changes, false),
    ("a Service changes:", tenant_changes, false),
    ("a Service goes:", tenant_goes, false),
    ("a big Service comes", big_comes, false),
    ("a big Service goes", big_goes, false),
    ("a manifest can't be read", unreadable, false),
    ("virtual server", virtual_server_goes, false),
    ("virtual server", virtual_server_changes, false),
    ("virtual server", virtual_server_comes, false),
    ("real server", real_server_goes, false),
    ("real server", real_server_changes, false),
    ("real server", real_server_comes, false),
    ("entry", entry_goes, false),
    ("entry", entry_comes, false),
    ("address", address_goes, false),
    ("address", address_comes, false),
    ("a link comes and goes", link_of_others, false),
    ("routes", routes_go, false),
    ("routing rule", routing_rule_goes, false),
    ("rules", filter_rules_go, false),
    ("a rule before ours", rule_before_ours, false),
    ("the daemon is killed,", killed, false),
    ("the daemon is killed,", killed, false),
    ("the daemon is asked to end,", ended, false),
    ("the daemon is stopped", stopped, false),
    ("the lock of iptables is held", lock_held, false),
    ("the tools of iptables hang", tools_hang, false),
    // These may cost requests.
    ("ipvsadm -C", all_virtual_servers_go, true),
    ("set", set_is_emptied, true),
    ("sets are destroyed:", sets_are_destroyed, true),
    ("rules", nat_rules_go, true),
    ("addresses flushed", addresses_go, true),
    ("link", link_goes, true),
    ("link", link_goes_down, true),
    ("link", link_of_another_kind, true),
    ("set of another type:", set_of_another_type, true),
];

fn tenant_changes(run: &mut Run<'_>) -> String {
    let number = run.random.within(1..=TENANTS);
    let text = objects::tenant(&mut run.random, number);
    run.world
        .manifests
        .write(&format!("tenant{number}.yaml"), &text);
    format!("tenant{number}")
}

fn tenant_goes(run: &mut Run<'_>) -> String {
    let number = run.random.within(1..=TENANTS);
    gone(run, &format!("tenant{number}.yaml"))
}

fn big_comes(run: &mut Run<'_>) -> String {
    let (what, text) = objects::big(&mut run.random);
    run.world.manifests.write("big.yaml", &text);
    what
}

fn big_goes(run: &mut Run<'_>) -> String {
    gone(run, "big.yaml")
}

pub(super) fn gone(run: &Run<'_>, file: &str) -> String {
    let there = run.world.manifests.path().join(file).exists();
    if there {
        run.world.manifests.remove(file);
    }
    format!("{file}{}", if there { "" } else { " (is not there)" })
}

fn unreadable(run: &mut Run<'_>) -> String {
    run.world.manifests.write("odd.yaml", "kind: [Service\n");
    thread::sleep(Duration::from_millis(run.random.within(0..=500)));
    run.world.manifests.remove("odd.yaml");
    String::new()
}

/// Runs a tool in the node's namespace; that what it names is gone already is no failure.
pub(super) fn tool(run: &Run<'_>, line: &str) -> String {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("{line} 2>&1")]);
    let output = run.node().enter(|| command.output()).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let said = said.lines().next().unwrap_or_default();
    match output.status.success() {
        true => format!("`{line}`"),
        false => format!("`{line}` ({said})"),
    }
}

/// A line of `ipvsadm -Sn` about a small or a big Service.
fn line_of_ipvs(run: &mut Run<'_>, command: &str) -> Option<Vec<String>> {
    let saved = run.node().tool("ipvsadm -Sn");
    let others = [
        "10.96.1.",
        "[fd96::1:",
        "198.18.",
        "198.19.",
        "10.96.0.200:",
    ];
    let lines: Vec<Vec<String>> = saved
        .lines()
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .filter(|words: &Vec<String>| {
            words[0] == command && others.iter().any(|net| words[2].starts_with(net))
        })
        .collect();
    run.random.one(&lines).cloned()
}

const NONE: &str = "(there is none)";

fn virtual_server_goes(run: &mut Run<'_>) -> String {
    match line_of_ipvs(run, "-A") {
        Some(words) => tool(run, &format!("ipvsadm -D {} {}", words[1], words[2])),
        None => NONE.to_owned(),
    }
}

fn virtual_server_changes(run: &mut Run<'_>) -> String {
    let Some(words) = line_of_ipvs(run, "-A") else {
        return NONE.to_owned();
    };
    let more = run
        .random
        .one(&["-s wlc", "-s sh -b sh-port", "-s rr -p 77"])
        .unwrap();
    tool(run, &format!("ipvsadm -E {} {} {more}", words[1], words[2]))
}

fn virtual_server_comes(run: &mut Run<'_>) -> String {
    let [v4, v6] = objects::vips(run.random.within(1..=TENANTS));
    let port = run.random.within(2000..=2010);
    let address = if run.random.once_in(2) {
        v4
    } else {
        format!("[{v6}]")
    };
    // On an address that is not ours it would be somebody else's.
    let ours = run.node().tool("ip -o address show dev kube-ipvs0");
    if !ours.contains(&format!(" {}/", address.trim_matches(['[', ']']))) {
        return NONE.to_owned();
    }
    tool(run, &format!("ipvsadm -A -t {address}:{port} -s rr"))
}

fn real_server_goes(run: &mut Run<'_>) -> String {
    match line_of_ipvs(run, "-a") {
        Some(words) => tool(
            run,
            &format!("ipvsadm -d {} {} -r {}", words[1], words[2], words[4]),
        ),
        None => NONE.to_owned(),
    }
}

fn real_server_changes(run: &mut Run<'_>) -> String {
    let Some(words) = line_of_ipvs(run, "-a") else {
        return NONE.to_owned();
    };
    let more = run
        .random
        .one(&["-m -w 0", "-m -w 9", "-m -w 1 -x 5 -y 2"])
        .unwrap();
    tool(
        run,
        &format!(
            "ipvsadm -e {} {} -r {} {more}",
            words[1], words[2], words[4]
        ),
    )
}

fn real_server_comes(run: &mut Run<'_>) -> String {
    let Some(words) = line_of_ipvs(run, "-A") else {
        return NONE.to_owned();
    };
    let number = run.random.within(2..=5);
    let server = if words[2].starts_with('[') {
        format!("[fd00:10::{number}]")
    } else {
        format!("10.0.0.{number}")
    };
    tool(
        run,
        &format!("ipvsadm -a {} {} -r {server}:9999 -m", words[1], words[2]),
    )
}

fn entry_goes(run: &mut Run<'_>) -> String {
    let saved = run.node().tool("ipset save");
    let others = ["10.96.1.", "fd96::1:", "198.18.", "198.19.", "10.96.0.200,"];
    let lines: Vec<&str> = saved
        .lines()
        .filter_map(|line| line.strip_prefix("add KUBE-"))
        .filter(|line| {
            line.split(' ')
                .nth(1)
                .is_some_and(|entry| others.iter().any(|net| entry.starts_with(net)))
        })
        .collect();
    match run.random.one(&lines) {
        Some(line) => tool(run, &format!("ipset del KUBE-{line}")),
        None => NONE.to_owned(),
    }
}

fn entry_comes(run: &mut Run<'_>) -> String {
    let number = run.random.within(1..=250);
    let line = match run.random.within(0..=4) {
        0 => format!("KUBE-CLUSTER-IP 10.96.9.{number},tcp:80"),
        1 => format!("KUBE-6-CLUSTER-IP fd96::9:{number},udp:80"),
        2 => format!("KUBE-EXTERNAL-IP 10.96.9.{number},tcp:80"),
        3 => format!("KUBE-NODE-PORT-TCP {}", 32000 + number),
        _ => format!("KUBE-IPVS-SERVING 10.96.9.{number},tcp:80"),
    };
    tool(run, &format!("ipset add {line}"))
}

fn address_goes(run: &mut Run<'_>) -> String {
    let [v4, v6] = objects::vips(run.random.within(1..=TENANTS));
    let address = if run.random.once_in(2) {
        format!("{v4}/32")
    } else {
        format!("{v6}/128")
    };
    tool(run, &format!("ip address del {address} dev kube-ipvs0"))
}

fn address_comes(run: &mut Run<'_>) -> String {
    let number = run.random.within(1..=99);
    let address = if run.random.once_in(2) {
        format!("203.0.113.{number}/24")
    } else {
        format!("fd99::{number}/64")
    };
    tool(run, &format!("ip address add {address} dev kube-ipvs0"))
}

fn link_of_others(run: &mut Run<'_>) -> String {
    tool(run, "ip link add other0 type veth peer name other1") + &tool(run, "ip link del other0")
}

/// Those of addresses that are routed, of which a small Service may have one.
fn routes_go(run: &mut Run<'_>) -> String {
    let family = run.random.one(&["-4", "-6"]).unwrap();
    tool(run, &format!("ip {family} route flush table 18768"))
}

fn routing_rule_goes(run: &mut Run<'_>) -> String {
    tool(run, "ip -4 rule del lookup 18768")
}

/// Without these more reaches the node, not less.
fn filter_rules_go(run: &mut Run<'_>) -> String {
    let program = *run.random.one(&["iptables", "ip6tables"]).unwrap();
    let chain = *run
        .random
        .one(&["INPUT", "FORWARD", "KUBE-FORWARD", "KUBE-IPVS-FILTER"])
        .unwrap();
    flush(run, program, "filter", chain)
}

fn nat_rules_go(run: &mut Run<'_>) -> String {
    let program = *run.random.one(&["iptables", "ip6tables"]).unwrap();
    let chains = [
        "PREROUTING",
        "OUTPUT",
        "POSTROUTING",
        "KUBE-SERVICES",
        "KUBE-LOAD-BALANCER",
        "KUBE-NODE-PORT",
        "KUBE-MARK-MASQ",
        "KUBE-POSTROUTING",
    ];
    let chain = *run.random.one(&chains).unwrap();
    flush(run, program, "nat", chain)
}

/// Flushes a chain, and leaves other software's rule in it, as one who knows only of that would.
fn flush(run: &Run<'_>, program: &str, table: &str, chain: &str) -> String {
    let line = format!("{program} -w 60 -t {table} -S {chain}");
    let rules = run.node().tool(&line);
    let others: Vec<&str> = rules.lines().filter(|rule| rule.contains("ELSE")).collect();
    let text = format!("*{table}\n-F {chain}\n{}\nCOMMIT\n", others.join("\n"));
    run.node()
        .tool_with_input(&format!("{program}-restore -w 60 --noflush"), &text);
    format!("{program} -t {table} -F {chain}")
}

/// It takes packets before ours see them, where it stays first.
fn rule_before_ours(run: &mut Run<'_>) -> String {
    let program = *run.random.one(&["iptables", "ip6tables"]).unwrap();
    let place = *run
        .random
        .one(&["-t filter INPUT", "-t nat PREROUTING", "-t nat OUTPUT"])
        .unwrap();
    let (table, chain) = place.rsplit_once(' ').unwrap();
    let rule = format!("{chain} -p tcp -m tcp --dport 7 -j ACCEPT");
    let undo = format!("{program} -w 60 {table} -D {rule}");
    if run.undo.contains(&undo) {
        return "(is there)".to_owned();
    }
    run.undo.push(undo);
    tool(run, &format!("{program} -w 60 {table} -I {rule}"))
}

fn killed(run: &mut Run<'_>) -> String {
    again(run, Daemon::crash)
}

fn ended(run: &mut Run<'_>) -> String {
    again(run, |daemon| {
        daemon.stop();
    })
}

fn again(run: &mut Run<'_>, end: fn(Daemon)) -> String {
    let pause = Duration::from_millis(run.random.within(0..=1500));
    run.away(|run| {
        run.daemon.take().map(end);
        thread::sleep(pause);
        run.launch();
        run.await_start(START);
    });
    format!("and started again after {pause:?}")
}

fn stopped(run: &mut Run<'_>) -> String {
    let pause = run.random.seconds(1..=6);
    run.away(|run| {
        let signal = |signal| run.daemon.iter().for_each(|daemon| daemon.signal(signal));
        signal(Signal::SIGSTOP);
        thread::sleep(pause);
        signal(Signal::SIGCONT);
    });
    format!("for {pause:?}")
}

fn lock_held(run: &mut Run<'_>) -> String {
    let time = run.random.seconds(3..=20);
    run.beside.push(thread::spawn(move || {
        let lock = File::create("/run/xtables.lock").unwrap();
        lock.lock().unwrap();
        thread::sleep(time);
    }));
    format!("for {time:?}")
}

/// Where there is such a file, the tools sleep for as many seconds as it says.
fn hang_file(tools: &Path) -> PathBuf {
    tools.join("hang")
}

/// A folder with all tools of iptables, for a daemon's PATH.
pub(super) fn tools_that_may_hang(manifests: &Manifests) -> PathBuf {
    let folder = manifests.path().with_extension("tools");
    fs::create_dir_all(&folder).unwrap();
    let hang = hang_file(&folder);
    let hang = hang.display();
    for tool in ["iptables", "ip6tables"] {
        for variant in ["", "-legacy", "-nft"] {
            for action in ["", "-save", "-restore"] {
                let name = format!("{tool}{variant}{action}");
                let script = format!(
                    "#!/bin/sh\n[ ! -e {hang} ] || sleep $(cat {hang})\nexec /usr/sbin/{name} \"$@\"\n"
                );
                let file = folder.join(name);
                fs::write(&file, script).unwrap();
                fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
            }
        }
    }
    folder
}

fn tools_hang(run: &mut Run<'_>) -> String {
    let (each, time) = (run.random.seconds(1..=15), run.random.seconds(2..=15));
    let hang = hang_file(&run.tools);
    fs::write(&hang, each.as_secs().to_string()).unwrap();
    run.beside.push(thread::spawn(move || {
        thread::sleep(time);
        // Another one may have taken it away.
        let _ = fs::remove_file(hang);
        thread::sleep(each);
    }));
    format!("for {each:?} each, for {time:?}")
}

fn all_virtual_servers_go(run: &mut Run<'_>) -> String {
    run.node().tool("ipvsadm -C");
    foreign::make_servers(run.node());
    String::new()
}

fn our_sets(run: &Run<'_>) -> Vec<String> {
    let listed = run.node().tool("ipset list -n");
    listed
        .lines()
        .filter(|name| name.starts_with("KUBE-"))
        .map(str::to_owned)
        .collect()
}

fn set_is_emptied(run: &mut Run<'_>) -> String {
    match run.random.one(&our_sets(run)) {
        Some(set) => tool(run, &format!("ipset flush {set}")),
        None => NONE.to_owned(),
    }
}

/// As far as no rule holds them.
fn sets_are_destroyed(run: &mut Run<'_>) -> String {
    let sets = our_sets(run);
    let gone: Vec<String> = sets
        .iter()
        .map(|set| tool(run, &format!("ipset destroy {set}")))
        .filter(|did| did.ends_with('`'))
        .collect();
    gone.join(", ")
}

fn addresses_go(run: &mut Run<'_>) -> String {
    tool(run, "ip address flush dev kube-ipvs0")
}

fn link_goes(run: &mut Run<'_>) -> String {
    tool(run, "ip link del kube-ipvs0")
}

fn link_goes_down(run: &mut Run<'_>) -> String {
    tool(run, "ip link set kube-ipvs0 down")
}

/// While it is there nothing can be bound, and it stays until its owner takes it away.
fn link_of_another_kind(run: &mut Run<'_>) -> String {
    let time = run.random.seconds(1..=8);
    run.node().tool("ip link add other2 type bridge");
    // At once, before the daemon makes its own anew.
    let did = tool(
        run,
        r"printf 'link del kube-ipvs0\nlink set other2 name kube-ipvs0\n' | ip -force -batch -",
    );
    thread::sleep(time);
    tool(
        run,
        "ip link del kube-ipvs0 type bridge; ip link del other2",
    );
    format!("{did}, for {time:?}")
}

/// A set that no rule holds, made anew with a type that takes no entry of ours.
fn set_of_another_type(run: &mut Run<'_>) -> String {
    let sets = our_sets(run);
    let destroyed = |set: &&String| tool(run, &format!("ipset destroy {set}")).ends_with('`');
    match sets.iter().find(destroyed) {
        Some(set) => tool(run, &format!("ipset create {set} hash:mac")),
        None => NONE.to_owned(),
    }
}
