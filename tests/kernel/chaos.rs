//! Chaos on a real kernel: objects change at random, other hands change what is ours, the daemon is killed and stopped, locks are
//! held and tools hang, all of it chosen by a seed. What must hold then:
//!
//! * within [`CLEAN`] of the last disturbance `plan --diff` finds no difference, and the daemon says that it is healthy and ready
//! * no request to a Service fails that no disturbance touches
//! * a change of another small Service is in the kernel within [`BOUND`] (at the speed of this machine), less the time for
//!   which the daemon was stopped or away, and the longest for which the machine left the one who watches waiting
//! * what other software has in the kernel is as it was
//!
//! A run goes through phases. Phase n of a run is made from its seed + n alone, so a run with the seed that a failure prints
//! begins with the phase that failed. Two phases of three hold only what may cost no request; in every third there is also
//! what takes the Service that is watched out of the kernel (`ipvsadm -C`), so its requests and the latency do not count there
//! until `plan --diff` is clean again. `CHAOS_SEED` and `CHAOS_MINUTES` are set by `hack/test chaos`.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ipvs_netlink::{Client, VirtualServerKey};
use ipvs_proxy_netlink::Protocol;
use tests::daemon::{Daemon, Manifests, binary, service, wait_up_to};
use tests::netns::Namespace;
use tests::topology::{NODE, Topology, pod_addresses};
use tests::traffic::{Server, http_get, udp_ask};
use tests::{foreign, traffic};

use crate::scene::{CLUSTER_CIDR, NODE_PORT, PORT, Stop, TARGET, ready, slices};
use disturbances::TABLE;

mod disturbances;
mod objects;

/// Of the run that belongs to every test run: a phase of the one kind, and one of the other.
const SEED: u64 = 2;
/// How long after the last disturbance the kernel may differ from what it should hold: a sync period, and the time to repair.
const CLEAN: Duration = Duration::from_secs(35);
/// How long a change of an untouched Service may take, where it takes [`ALONE`] without disturbances.
const BOUND: Duration = Duration::from_millis(500);
const ALONE: Duration = Duration::from_millis(40);
/// For how long at most a start excuses a late change.
const START: Duration = Duration::from_secs(10);
/// The VIPs of the Service to which requests go, and the one of the Service whose endpoint is flipped.
const STEADY: [&str; 2] = ["10.96.0.10", "fd96::10"];
const FLIPPED: &str = "10.96.0.11";

#[test]
fn nothing_that_goes_wrong_harms_the_rest() {
    let number = |name: &str| {
        let text = std::env::var(name).ok();
        text.map(|text| {
            text.parse()
                .unwrap_or_else(|_| panic!("{name} is {text:?}, not a number"))
        })
    };
    let seed = number("CHAOS_SEED").unwrap_or(SEED);
    let time = number("CHAOS_MINUTES").map(|minutes| Duration::from_secs(60 * minutes));
    let world = World::new();
    let mut run = Run::new(&world);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| world.ask_from(world.topology.pod(3), &stop));
        scope.spawn(|| world.ask_from(world.topology.outside(), &stop));
        scope.spawn(|| world.flip(&stop));
        wait_up_to(CLEAN, "the speed of this machine is known", || {
            world.seen.lock().unwrap().took.len() >= 8
        });
        let alone = world.set_pace();
        run.quiet();
        let began = Instant::now();
        println!("seed {seed}, a change takes {alone:?} alone");
        for phase in (0..).map(|number| seed.wrapping_add(number)) {
            if time.map_or(phase >= seed + 2, |time| began.elapsed() >= time) {
                break;
            }
            run.phase(phase);
        }
    });
    println!("{}", world.summary());
}

/// Numbers by chance, the same ones for the same seed: SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.next() % (range.end() - range.start() + 1)
    }

    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.next().is_multiple_of(times)
    }

    pub(crate) fn one<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        let place = self.next() % u64::try_from(of.len()).ok()?.max(1);
        of.get(usize::try_from(place).ok()?)
    }

    pub(crate) fn seconds(&mut self, range: RangeInclusive<u64>) -> Duration {
        Duration::from_secs(self.within(range))
    }
}

/// What the load and the flips saw.
#[derive(Default)]
struct Seen {
    faults: Vec<String>,
    /// How long changes took, without what is excused.
    took: Vec<Duration>,
    /// What a change may take; `None` until the speed of this machine is known.
    bound: Option<Duration>,
    /// When the daemon was stopped or away; the last may go on.
    away: Vec<(Instant, Option<Instant>)>,
}

impl Seen {
    /// For how long of the time since then the daemon could do nothing.
    fn excused(&self, since: Instant) -> Duration {
        let now = Instant::now();
        let within = |(from, to): &(Instant, Option<Instant>)| {
            to.unwrap_or(now)
                .saturating_duration_since((*from).max(since))
        };
        self.away.iter().map(within).sum()
    }
}

/// What the threads share.
struct World {
    topology: Topology,
    manifests: Manifests,
    _servers: Vec<Server>,
    seen: Mutex<Seen>,
    /// Whether requests and latency count.
    counts: AtomicBool,
    answered: AtomicU32,
    /// Held by who needs the manifests to stay as they are.
    quiet: Mutex<()>,
    foreign: String,
}

impl World {
    fn new() -> World {
        let topology = Topology::new(4);
        std::fs::write("/proc/sys/net/netfilter/nf_conntrack_max", "65536").unwrap();
        foreign::make(topology.node());
        let manifests = Manifests::new();
        let ports = [("tcp", "TCP", PORT, NODE_PORT), ("udp", "UDP", PORT, 0)];
        let targets = [("tcp", "TCP", TARGET), ("udp", "UDP", TARGET)];
        let steady = slices("steady", &targets, &ready(&[0, 1]));
        manifests.write(
            "steady.yaml",
            &(service("steady", &STEADY, &ports) + &steady),
        );
        let flipped = service("flipped", &[FLIPPED], &[("", "TCP", PORT, 0)]);
        manifests.write("flipped.yaml", &flipped);
        manifests.write("other-node.yaml", &objects::other_node());
        World {
            _servers: [0, 1].map(|pod| topology.serve(pod, TARGET)).into(),
            foreign: foreign::said(topology.node()),
            topology,
            manifests,
            seen: Mutex::default(),
            counts: AtomicBool::new(false),
            answered: AtomicU32::new(0),
            quiet: Mutex::default(),
        }
    }

    fn counts(&self) -> bool {
        self.counts.load(Ordering::SeqCst)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    /// Requests to the steady Service, one after the other.
    fn ask_from(&self, client: &Namespace, stop: &AtomicBool) {
        let vips = STEADY.map(|vip| SocketAddr::new(vip.parse().unwrap(), PORT));
        let node = SocketAddr::new(NODE[0], NODE_PORT);
        type Ask = fn(SocketAddr) -> Result<traffic::Answer, traffic::Error>;
        let [v4, v6] = vips;
        let asks: [(&str, Ask, SocketAddr); 5] = [
            ("TCP", http_get, v4),
            ("UDP", udp_ask, v4),
            ("TCP", http_get, v6),
            ("UDP", udp_ask, v6),
            ("TCP", http_get, node),
        ];
        client.enter(|| {
            for (protocol, ask, to) in asks.iter().cycle() {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                let counted = self.counts();
                match ask(*to) {
                    Ok(_) => {
                        self.answered.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(error) if counted && self.counts() => {
                        self.seen().faults.push(format!("{protocol} {to}: {error}"));
                    }
                    Err(_) => {}
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
    }

    /// Brings and takes an endpoint of a small Service, about once a second, and takes the time until the kernel has it.
    fn flip(&self, stop: &AtomicBool) {
        let key = VirtualServerKey::Address {
            address: FLIPPED.parse().unwrap(),
            port: PORT,
            protocol: Protocol::Tcp,
        };
        let [flips, _] = pod_addresses(2);
        self.topology.node().enter(|| {
            let mut client = Client::open().unwrap();
            let mut takes_new = || {
                let servers = client.real_servers(key).unwrap_or_default();
                let is_up = |up: bool, weight| up || weight > 0;
                let of_pod = servers.iter().filter(|s| s.server.key.address == flips);
                (!servers.is_empty(), of_pod.map(|s| s.server.weight).fold(false, is_up))
            };
            for up in [true, false].into_iter().cycle() {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                let quiet = self.quiet.lock().unwrap();
                let pods: &[u8] = if up { &[0, 2] } else { &[0] };
                let counted = self.counts();
                let text = slices("flipped", &[("", "TCP", TARGET)], &ready(pods));
                self.manifests.write("flipped-slices.yaml", &text);
                let began = Instant::now();
                // How long this thread itself had to wait at a time: what a busy machine explains.
                let (mut looked, mut waited) = (began, Duration::ZERO);
                while takes_new() != (true, up) && !stop.load(Ordering::SeqCst) {
                    if began.elapsed() > 2 * CLEAN {
                        break;
                    }
                    thread::sleep(Duration::from_millis(2));
                    waited = waited.max(looked.elapsed());
                    looked = Instant::now();
                }
                drop(quiet);
                let mut seen = self.seen();
                let took = began.elapsed();
                let excused = seen.excused(began);
                let late = took.saturating_sub(excused + waited);
                if seen.bound.is_none() || counted && self.counts() {
                    seen.took.push(late);
                    if seen.bound.is_some_and(|bound| late > bound) {
                        seen.faults.push(format!(
                            "a change of an untouched Service took {took:?}, of which {excused:?} without the \
                             daemon; whoever watched had to wait {waited:?} at a time"
                        ));
                    }
                }
                drop(seen);
                thread::sleep(Duration::from_millis(if self.counts() { 800 } else { 100 }));
            }
        });
    }

    /// From here on a change has to be in the kernel in time; the time that it takes now, the median.
    fn set_pace(&self) -> Duration {
        let mut seen = self.seen();
        let mut took = std::mem::take(&mut seen.took);
        took.sort_unstable();
        let alone = took[took.len() / 2];
        seen.bound = Some(BOUND.mul_f64((alone.as_secs_f64() / ALONE.as_secs_f64()).max(1.0)));
        alone
    }

    fn summary(&self) -> String {
        let mut took = self.seen().took.clone();
        took.sort_unstable();
        let at = |percent: usize| took.get(took.len().saturating_sub(1) * percent / 100);
        format!(
            "{} requests answered; {} changes took {:?} (median), {:?} (99 %), {:?} (most)",
            self.answered.load(Ordering::SeqCst),
            took.len(),
            at(50),
            at(99),
            at(100)
        )
    }
}

/// The run: who disturbs, and who checks.
struct Run<'a> {
    world: &'a World,
    random: Random,
    daemon: Option<Daemon>,
    /// The tools of iptables as the daemon finds them: they may hang.
    tools: PathBuf,
    began: Instant,
    seed: u64,
    /// What goes on beside: locks held, tools that hang.
    beside: Vec<JoinHandle<()>>,
    /// Undone at the end of the phase, after the check.
    undo: Vec<String>,
}

impl<'a> Run<'a> {
    fn new(world: &'a World) -> Run<'a> {
        let mut run = Run {
            world,
            random: Random(0),
            daemon: None,
            tools: disturbances::tools_that_may_hang(&world.manifests),
            began: Instant::now(),
            seed: 0,
            beside: Vec::new(),
            undo: Vec::new(),
        };
        run.launch();
        run
    }

    fn node(&self) -> &'a Namespace {
        self.world.topology.node()
    }

    fn launch(&mut self) {
        let path = format!(
            "PATH={}:/usr/sbin:/usr/bin:/sbin:/bin",
            self.tools.display()
        );
        let flags = [&node_ips(), CLUSTER_CIDR];
        let by = ["env", path.as_str()];
        let world = self.world;
        self.daemon = Some(Daemon::start_by(self.node(), &world.manifests, &by, &flags));
    }

    /// Waits until the daemon says that all is in force, for so long at most.
    fn await_start(&self, patience: Duration) {
        let began = Instant::now();
        let log = || self.daemon.as_ref().map(Daemon::log).unwrap_or_default();
        while !log().contains("is in force") && began.elapsed() < patience {
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn tell(&self, what: &str) {
        eprintln!("{:7.2} s  {what}", self.began.elapsed().as_secs_f64());
    }

    fn phase(&mut self, seed: u64) {
        self.seed = seed;
        let costs = seed.is_multiple_of(3);
        self.tell(&format!(
            "phase {seed}, {}",
            if costs {
                "requests may fail"
            } else {
                "no request may fail"
            }
        ));
        self.world.counts.store(!costs, Ordering::SeqCst);
        // One for what comes next and one for how, so that the state of the kernel changes nothing of what comes next.
        let mut next = Random(seed);
        self.random = Random(next.next());
        objects::all_anew(self);
        let table: Vec<_> = TABLE.iter().filter(|(.., cost)| costs || !cost).collect();
        for _ in 0..next.within(10..=16) {
            let Some((name, act, _)) = next.one(&table) else {
                continue;
            };
            self.random = Random(next.next());
            let how = act(self);
            self.tell(&format!("{name} {how}"));
            thread::sleep(Duration::from_millis(next.within(50..=2500)));
            self.check();
        }
        self.quiet();
    }

    fn check(&mut self) {
        assert!(
            self.daemon.as_mut().is_none_or(Daemon::runs),
            "the daemon ended by itself"
        );
        let faults = std::mem::take(&mut self.world.seen().faults);
        assert!(faults.is_empty(), "{faults:#?}");
    }

    /// Nothing is disturbed any more: all has to be as it should in time.
    fn quiet(&mut self) {
        for beside in std::mem::take(&mut self.beside) {
            beside.join().unwrap();
        }
        let world = self.world;
        self.tell("quiet");
        let began = Instant::now();
        let quiet = world.quiet.lock().unwrap();
        loop {
            let differs = self.plan_diff();
            if differs.is_empty() {
                break;
            }
            assert!(
                began.elapsed() < CLEAN,
                "after {CLEAN:?} the kernel still differs:\n{differs}"
            );
            thread::sleep(Duration::from_millis(200));
        }
        drop(quiet);
        self.tell(&format!("clean after {:?}", began.elapsed()));
        assert_eq!(
            foreign::said(self.node()),
            world.foreign,
            "things of other software"
        );
        self.await_start(CLEAN);
        for path in ["/livez", "/healthz", "/readyz"] {
            let mut said = String::new();
            wait_up_to(CLEAN.saturating_sub(began.elapsed()), path, || {
                said = self.health(path);
                said.starts_with("HTTP/1.1 200")
            });
        }
        world.counts.store(true, Ordering::SeqCst);
        let before = world.answered.load(Ordering::SeqCst);
        wait_up_to(CLEAN, "requests are answered", || {
            world.answered.load(Ordering::SeqCst) >= before + 20
        });
        self.check();
        // Another disturbance may have flushed the chain.
        for undo in std::mem::take(&mut self.undo) {
            disturbances::tool(self, &undo);
        }
    }

    /// How the kernel differs from what it should hold.
    fn plan_diff(&self) -> String {
        let mut command = Command::new(binary());
        command
            .args([
                "plan",
                "--diff",
                "--node-name=node",
                CLUSTER_CIDR,
                &node_ips(),
            ])
            .arg("--manifests")
            .arg(self.world.manifests.path());
        let output = self.node().enter(|| command.output()).unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        match output.status.code() {
            Some(0) => String::new(),
            code => format!("plan --diff ended with {code:?}: {said}"),
        }
    }

    fn health(&self, path: &str) -> String {
        use std::io::{Read, Write};
        let ask = || -> std::io::Result<String> {
            let mut stream = std::net::TcpStream::connect("127.0.0.1:10256")?;
            write!(
                stream,
                "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
            )?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        self.node().enter(ask).unwrap_or_default()
    }

    /// Does what makes the daemon do nothing for a while.
    fn away(&mut self, act: impl FnOnce(&mut Self)) {
        self.world.seen().away.push((Instant::now(), None));
        act(self);
        if let Some((_, end)) = self.world.seen().away.last_mut() {
            *end = Some(Instant::now());
        }
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.tools);
        if thread::panicking() {
            let seed = self.seed;
            eprintln!("in phase {seed}, with which `hack/test chaos -- {seed}` begins");
        }
    }
}

fn node_ips() -> String {
    let [v4, v6] = NODE;
    format!("--node-ips={v4},{v6}")
}
