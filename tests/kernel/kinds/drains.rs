//! Drains that end at a deadline, whatever connections there are and whatever becomes of the daemon.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tests::daemon::{wait_until, wait_up_to};
use tests::topology::pod_addresses;
use tests::traffic::{Client, Error, HeldConnection, hold};

use super::{Scene, vips, web};

/// How much later than its deadline a real server may go, on a busy machine.
const LATE: Duration = Duration::from_secs(3);
/// How much earlier it may go: the file counts milliseconds, and clocks are set.
const EARLY: Duration = Duration::from_millis(50);
const ANNOTATION: &str = "ipvs-proxy.io/drain-timeout";

/// A connection to each of two endpoints of each VIP, from each place; those to pod0 and the others.
fn hold_all(scene: &Scene) -> (Vec<HeldConnection>, Vec<HeldConnection>) {
    let mut held = Vec::new();
    for (_, namespace) in scene.clients(2) {
        for vip in vips() {
            held.extend((0..2).map(|_| namespace.enter(|| hold(vip)).unwrap()));
        }
    }
    held.into_iter()
        .partition(|held| held.answer.name == "pod0")
}

/// When something began: after the first moment, and before the second.
type Begin = (Instant, Instant);

/// Takes pod0 away, and waits until its weight is 0 at every VIP.
fn remove_pod0(scene: &Scene) -> Begin {
    let before = Instant::now();
    scene.endpoints(&[1]);
    for vip in vips() {
        scene.await_servers("-t", vip, &[(0, 0), (1, 1)]);
    }
    (before, Instant::now())
}

/// Waits until pod0 has left every VIP, and says when.
fn await_gone(scene: &Scene, patience: Duration) -> Instant {
    for vip in vips() {
        wait_up_to(patience, &format!("pod0 leaves {vip}"), || {
            scene.servers("-t", vip) == Some([(1, 1)].into())
        });
    }
    Instant::now()
}

fn assert_ended(what: &str, at: Instant, (after, before): Begin, limit: Duration) {
    let (shortest, longest) = (at - before, at - after);
    assert!(
        longest + EARLY >= limit && shortest <= limit + LATE,
        "{what}: after {shortest:?} to {longest:?} instead of {limit:?}"
    );
}

/// Lets a moment come, and asks for a connection each time in between.
fn ping_until(at: Instant, held: &mut [HeldConnection], when: &str) {
    wait_until(when, || {
        for held in &mut *held {
            held.ping().unwrap_or_else(|error| {
                panic!("{when}: the connection to {}: {error}", held.answer.name)
            });
        }
        Instant::now() >= at
    });
}

fn drains_file(scene: &Scene) -> PathBuf {
    let namespace = fs::metadata(scene.topology.node().path()).unwrap().ino();
    PathBuf::from(format!("/run/ipvs-proxy/net-{namespace}/drains.json"))
}

fn ends_at_the_deadline(service: &str, flags: &[&str]) {
    const LIMIT: Duration = Duration::from_secs(3);
    let scene = Scene::serving(3, &[0, 1], service, flags);
    let (mut of_pod0, mut others) = hold_all(&scene);
    assert_eq!(of_pod0.len(), 6);
    let removed = remove_pod0(&scene);
    ping_until(removed.0 + LIMIT / 2, &mut of_pod0, "before the deadline");
    let gone = await_gone(&scene, LIMIT + LATE);
    assert_ended("the deadline", gone, removed, LIMIT);
    for held in &mut of_pod0 {
        // The first packet is lost, the second one is refused.
        wait_until("the connection ends", || {
            matches!(held.ping(), Err(Error::Closed))
        });
    }
    ping_until(Instant::now(), &mut others, "pod0 is gone");
    let left = fs::read_to_string(drains_file(&scene)).unwrap();
    assert!(left.ends_with("\"drains\":[]}"), "{left}");
    for (vip, real_server) in ["10.96.0.10:80", "[fd96::10]:80"]
        .iter()
        .zip(["10.0.0.2:8080", "[fd00:10::2]:8080"])
    {
        let of = format!("service=\"default/web\" server={vip}/tcp real_server={real_server}");
        let log = scene.daemon.as_ref().unwrap().log();
        for told in [
            format!("drain began {of} ends_in_ms="),
            format!("drain was cut at its deadline {of} connections=3"),
        ] {
            assert_eq!(log.matches(&told).count(), 1, "{told}\n{log}");
        }
    }
}

#[test]
fn the_flag_ends_a_drain() {
    ends_at_the_deadline(&web(""), &["--drain-timeout=3s"]);
}

#[test]
fn the_annotation_goes_before_the_flag() {
    let annotated = web("").replace(
        "metadata:\n",
        &format!("metadata:\n  annotations: {{{ANNOTATION}: 3s}}\n"),
    );
    ends_at_the_deadline(&annotated, &["--drain-timeout=1h"]);
}

#[test]
fn where_there_is_no_drain_a_real_server_goes_at_once() {
    let scene = Scene::web(3, &[0, 1], "", &["--drain-timeout=now"]);
    let (mut of_pod0, mut others) = hold_all(&scene);
    scene.endpoints(&[1]);
    for vip in vips() {
        wait_up_to(Duration::from_secs(1), "pod0 is gone", || {
            scene.servers("-t", vip) == Some([(1, 1)].into())
        });
    }
    for held in &mut of_pod0 {
        wait_until("the connection ends", || {
            matches!(held.ping(), Err(Error::Closed))
        });
    }
    ping_until(Instant::now(), &mut others, "pod0 is gone");
    let log = scene.daemon.as_ref().unwrap().log();
    assert!(!log.contains("drain began"), "{log}");
}

/// The machine's clock, which goes forward for the time of this value.
struct Clock(Duration);

impl Clock {
    fn forward(by: Duration) -> Clock {
        Clock::set(SystemTime::now() + by);
        Clock(by)
    }

    fn set(to: SystemTime) {
        let since_1970 = to.duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        let date = Command::new("date")
            .arg("-s")
            .arg(format!("@{since_1970}"))
            .output();
        assert!(date.unwrap().status.success());
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        Clock::set(SystemTime::now() - self.0);
    }
}

#[test]
fn a_restart_keeps_the_deadline() {
    const LIMIT: Duration = Duration::from_secs(10);
    let flags = ["--drain-timeout=10s"];
    let mut scene = Scene::web(3, &[0, 1], "", &flags);
    let (mut of_pod0, mut others) = hold_all(&scene);
    let removed = remove_pod0(&scene);
    let file = drains_file(&scene);
    wait_until("the deadlines are kept", || {
        fs::read_to_string(&file).is_ok_and(|text| text.matches("until").count() >= 2)
    });
    scene.daemon.take().unwrap().crash();
    // Late enough to tell a deadline that is kept from one that begins anew.
    ping_until(removed.0 + LIMIT / 2, &mut of_pod0, "without a daemon");
    // Somebody sets the clock.
    let clock = Clock::forward(Duration::from_hours(1));
    scene.launch(&flags);
    scene.daemon.as_mut().unwrap().settle();
    drop(clock);
    ping_until(
        removed.0 + LIMIT * 7 / 10,
        &mut of_pod0,
        "the daemon is back",
    );
    let gone = await_gone(&scene, LIMIT);
    assert_ended("the kept deadline", gone, removed, LIMIT);
    ping_until(Instant::now(), &mut others, "pod0 is gone");
}

#[test]
fn without_its_file_a_deadline_begins_anew_once() {
    const LIMIT: Duration = Duration::from_secs(8);
    let flags = ["--drain-timeout=8s"];
    let mut scene = Scene::web(3, &[0, 1], "", &flags);
    let (mut of_pod0, _others) = hold_all(&scene);
    let removed = remove_pod0(&scene);
    let file = drains_file(&scene);
    wait_until("the deadlines are kept", || file.exists());
    ping_until(removed.0 + LIMIT / 2, &mut of_pod0, "draining");
    scene.daemon.take().unwrap().crash();
    fs::remove_file(&file).unwrap();
    let launched = Instant::now();
    scene.launch(&flags);
    scene.daemon.as_mut().unwrap().settle();
    let anew = (launched, Instant::now());
    // Killed again: this time the file is there.
    ping_until(anew.1 + LIMIT / 2, &mut of_pod0, "draining anew");
    scene.daemon.take().unwrap().crash();
    scene.launch(&flags);
    scene.daemon.as_mut().unwrap().settle();
    let gone = await_gone(&scene, LIMIT);
    assert_ended("the new deadline", gone, anew, LIMIT);
}

#[test]
fn a_deadline_of_before_a_restart_is_not_of_a_later_drain() {
    const LIMIT: Duration = Duration::from_secs(4);
    let flags = ["--drain-timeout=4s"];
    let mut scene = Scene::web(3, &[0, 1], "", &flags);
    let (mut of_pod0, _others) = hold_all(&scene);
    let removed = remove_pod0(&scene);
    wait_until("the deadlines are kept", || drains_file(&scene).exists());
    scene.daemon.take().unwrap().crash();
    // It comes back while there is no daemon.
    scene.endpoints(&[0, 1]);
    scene.launch(&flags);
    for vip in vips() {
        scene.await_servers("-t", vip, &[(0, 1), (1, 1)]);
    }
    ping_until(
        removed.0 + LIMIT + EARLY,
        &mut of_pod0,
        "it is back for good",
    );
    let removed = remove_pod0(&scene);
    ping_until(removed.0 + LIMIT / 2, &mut of_pod0, "it drains anew");
    let gone = await_gone(&scene, LIMIT + LATE);
    assert_ended("the later deadline", gone, removed, LIMIT);
}

#[test]
fn a_client_that_reuses_its_port_cannot_hold_a_real_server() {
    const LIMIT: Duration = Duration::from_secs(4);
    let scene = Scene::web(3, &[0], "", &["--drain-timeout=4s"]);
    let stop = AtomicBool::new(false);
    let (connected, to_pod1) = (AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let _stopper = Stop(&stop);
        let (stop, connected, to_pod1) = (&stop, &connected, &to_pod1);
        let pod = scene.topology.pod(2);
        for (vip, own) in vips().into_iter().zip(pod_addresses(2)) {
            let client = Client {
                source: Some(SocketAddr::new(own, 40_000)),
                timeout: Duration::from_millis(1500),
            };
            scope.spawn(move || {
                pod.enter(|| {
                    while !stop.load(Ordering::SeqCst) {
                        if let Ok(held) = client.hold(vip) {
                            connected.fetch_add(1, Ordering::SeqCst);
                            if held.answer.name == "pod1" {
                                to_pod1.fetch_add(1, Ordering::SeqCst);
                            }
                            held.reset();
                        }
                        thread::sleep(Duration::from_millis(2));
                    }
                });
            });
        }
        let more = |count: &AtomicU32, what: &str| {
            let before = count.load(Ordering::SeqCst);
            wait_until(what, || count.load(Ordering::SeqCst) > before + 20);
        };
        more(connected, "the clients connect");
        let removed = remove_pod0(&scene);
        let gone = await_gone(&scene, LIMIT + LATE);
        // Earlier is fine: no connection was left.
        assert!(gone <= removed.1 + LIMIT + LATE);
        more(to_pod1, "the clients connect to the other endpoint");
    });
}
