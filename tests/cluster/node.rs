//! The node: a guest kernel on a tap of this network namespace, with pods as namespaces of its own.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::daemon::{wait_until, wait_up_to};

use crate::plane::HOST;

/// The node's address on the tap, and its name.
pub(crate) const ADDRESS: &str = "192.168.60.11";
pub(crate) const NAME: &str = "n1";
const TAP: &str = "tap1";
/// Its pods, by number: 10.244.1.2 and so on.
const PODS: u8 = 4;

/// The guest. Ended with this value.
#[derive(Debug)]
pub(crate) struct Node {
    guest: Child,
}

impl Node {
    /// Boots it, on the kernel `GUEST_KERNEL` where that is set, and sets it up.
    pub(crate) fn boot() -> Node {
        for line in [
            "link set lo up",
            &format!("tuntap add {TAP} mode tap"),
            &format!("addr add {HOST}/24 dev {TAP}"),
            &format!("link set {TAP} up"),
            &format!("route add 10.96.0.0/12 via {ADDRESS}"),
            &format!("route add 10.244.1.0/24 via {ADDRESS}"),
        ] {
            let status = Command::new("ip").args(line.split(' ')).status().unwrap();
            assert!(status.success(), "ip {line}");
        }
        let mut guest = Command::new(beside("guest"));
        if let Some(kernel) = std::env::var_os("GUEST_KERNEL") {
            guest.arg("--kernel").arg(kernel).args(["-x", "seccomp=on"]);
        }
        let guest = guest
            .args(["-t", "3000", "-m", "1G", "-x"])
            .arg(format!("vec0:transport=tap,ifname={TAP},depth=128,gro=1"))
            .arg("--")
            .arg(beside("guest-shell"))
            .arg(format!("{ADDRESS}/24"))
            .stdin(Stdio::null())
            .spawn()
            .expect("starting the guest");
        let this = Node { guest };
        wait_up_to(Duration::from_secs(90), "the guest's shell answers", || {
            this.try_run("true").is_some()
        });
        this.set_up();
        this
    }

    fn set_up(&self) {
        let mut script = String::from(
            "set -e\nip link add cbr0 type bridge\nip addr add 10.244.1.1/24 dev cbr0\nip link set cbr0 up\n\
             sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1\n",
        );
        let _ = writeln!(script, "ip route add default via {HOST}");
        for pod in 0..PODS {
            let _ = writeln!(
                script,
                "ip netns add pod{pod}\nip link add veth{pod} type veth peer name eth0 netns pod{pod}\n\
                 ip link set veth{pod} master cbr0 up\nip link set veth{pod} type bridge_slave hairpin on\n\
                 ip -n pod{pod} link set lo up\nip -n pod{pod} addr add {}/24 dev eth0\n\
                 ip -n pod{pod} link set eth0 up\nip -n pod{pod} route add default via 10.244.1.1\n\
                 setsid ip netns exec pod{pod} {} pod{pod} 8080 >/dev/null 2>&1 </dev/null &",
                pod_address(pod),
                beside("pod-server").display()
            );
        }
        self.run(&script);
    }

    /// Runs a script as root in the guest; its output. Panics when it fails.
    pub(crate) fn run(&self, script: &str) -> String {
        let (code, output) = self
            .try_run(script)
            .unwrap_or_else(|| panic!("the guest does not answer: {script}"));
        assert_eq!(code, 0, "{script}\n{output}");
        output
    }

    /// Runs a script; exit code and output, `None` without an answer.
    pub(crate) fn try_run(&self, script: &str) -> Option<(i32, String)> {
        let address = format!("{ADDRESS}:2222").parse().unwrap();
        let mut connection = TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok()?;
        connection
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        connection.write_all(script.as_bytes()).ok()?;
        connection.shutdown(Shutdown::Write).ok()?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).ok()?;
        let (output, code) = answer.rsplit_once('\0')?;
        Some((code.parse().ok()?, output.to_owned()))
    }

    /// Starts the daemon with these flags, and a kubeconfig.
    pub(crate) fn start_daemon(&self, kubeconfig: &str, flags: &str) {
        self.write("/run/kubeconfig", kubeconfig);
        self.start_daemon_by(&format!("--kubeconfig /run/kubeconfig {flags}"));
    }

    /// Starts the daemon with these flags alone.
    pub(crate) fn start_daemon_by(&self, flags: &str) {
        let pods = "--cluster-cidr 10.244.0.0/16";
        self.run_daemon("", &format!("--node-name {NAME} {pods} {flags}"));
    }

    /// Starts the daemon with these variables of its environment, and these flags and no others.
    pub(crate) fn run_daemon(&self, environment: &str, flags: &str) {
        let daemon = tests::daemon::binary();
        let daemon = daemon.display();
        self.run(&format!(
            ": > /run/daemon.log\nsetsid env {environment} {daemon} run {flags} \
             >/dev/null 2>/run/daemon.log </dev/null &\necho $! > /run/daemon.pid"
        ));
    }

    /// Writes a file in the guest, in one step.
    pub(crate) fn write(&self, file: &str, text: &str) {
        self.run(&format!(
            "cat > {file}.new <<'END'\n{text}\nEND\nmv {file}.new {file}"
        ));
    }

    /// Waits until the daemon has programmed everything once.
    pub(crate) fn wait_in_force(&self) {
        wait_up_to(Duration::from_secs(60), "all is in force", || {
            let log = self.log();
            assert!(self.daemon_runs(), "the daemon ended:\n{log}");
            log.contains("in force")
        });
    }

    pub(crate) fn daemon_runs(&self) -> bool {
        self.try_run("kill -0 $(cat /run/daemon.pid)")
            .is_some_and(|(code, _)| code == 0)
    }

    /// Ends the daemon by a signal, and waits.
    pub(crate) fn end_daemon(&self, signal: &str) {
        self.run(&format!(
            "pid=$(cat /run/daemon.pid); kill -{signal} $pid || true; while kill -0 $pid 2>/dev/null; do sleep 0.1; done"
        ));
    }

    /// What the daemon has logged.
    pub(crate) fn log(&self) -> String {
        self.run("cat /run/daemon.log")
    }

    /// The IPVS table as `ipvsadm -Sn` shows it.
    pub(crate) fn table(&self) -> String {
        self.run("ipvsadm -Sn")
    }

    /// Waits until a condition on the IPVS table is true.
    pub(crate) fn wait_table(&self, what: &str, condition: impl Fn(&str) -> bool) {
        wait_until(what, || {
            std::thread::sleep(Duration::from_millis(100));
            condition(&self.table())
        });
    }

    /// Who answers a request from a place (`pod0`, or the node itself for an empty word), and whom it saw asking.
    pub(crate) fn ask(&self, from: &str, address: &str) -> String {
        let by = match from {
            "" => String::new(),
            pod => format!("ip netns exec {pod} "),
        };
        let (_, output) = self
            .try_run(&format!("{by}curl -s --max-time 5 http://{address}/"))
            .expect("the guest answers");
        output.trim().to_owned()
    }

    /// Removes all of ours, so that the next test begins with nothing.
    pub(crate) fn clean(&self) {
        self.end_daemon("TERM");
        self.run(&format!("{} cleanup", tests::daemon::binary().display()));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let pid = i32::try_from(self.guest.id()).unwrap();
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        let _ = self.guest.wait();
        let _ = Command::new("ip").args(["link", "del", TAP]).status();
    }
}

/// The address of a pod of the node.
pub(crate) fn pod_address(number: u8) -> String {
    format!("10.244.1.{}", number + 2)
}

/// A program that cargo built beside this one.
fn beside(name: &str) -> PathBuf {
    tests::daemon::binary().with_file_name(name)
}
