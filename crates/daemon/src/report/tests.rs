use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_core::model::{Change, ObjectName};
use ipvs_proxy_core::op::{Failure, FailureKind, Op};
use ipvs_proxy_core::planner::{Conflict, Takeover};
use ipvs_proxy_core::state::{Key, Value};
use ipvs_proxy_netlink::Protocol;

use super::{AGAIN, BURST, FEW, REFILL, REMEMBERED, Reports, Say, Topic, WINDOW};
use crate::findings;
use crate::translate::Refusal;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Reports, a clock, and the log.
struct Log {
    reports: Reports,
    now: Instant,
}

impl Log {
    fn new() -> Log {
        let now = Instant::now();
        Log {
            reports: Reports::new(super::Lines::default(), now),
            now,
        }
    }

    /// The lines that this writes, without time, sums that are due included.
    fn says(&mut self, what: impl FnOnce(&mut Reports, Instant)) -> Vec<String> {
        let written = Written::default();
        let to = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_writer(move || to.clone())
            .with_ansi(false)
            .with_target(false)
            .without_time()
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            what(&mut self.reports, self.now);
            self.reports.flush(self.now);
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        text.lines().map(|line| line.trim().to_owned()).collect()
    }

    fn refused(&mut self, object: &str, refusals: &[Refusal]) -> Vec<String> {
        let changes = [Change::Service(ObjectName::new("default", object), None)];
        let refusals = refusals.to_vec();
        self.says(|reports, now| {
            reports.refused(&changes, refusals.into_iter().map(|r| (None, r)), now);
        })
    }

    fn counted(&self, topic: Topic, line: &'static str) -> u64 {
        let labels = [("topic", topic.word()), ("line", line)];
        self.reports.lines.get_or_create(&labels).get()
    }
}

fn refusal(object: &str, field: &str, value: &str) -> Refusal {
    Refusal {
        object: format!("Service default/{object}"),
        field: field.to_owned(),
        value: format!("{value:?}"),
        reason: "is not an IP address".to_owned(),
    }
}

#[test]
fn a_refusal_is_told_once_however_often_its_object_changes() {
    let mut log = Log::new();
    let bad = [refusal("a", "spec.externalIPs[3]", "10.0.0.300")];
    assert_eq!(
        log.refused("a", &bad),
        [
            r#"WARN refused a part of an object object="Service default/a" field=spec.externalIPs[3] value="10.0.0.300" reason=is not an IP address"#
        ]
    );
    for _ in 0..100 {
        log.now += SECOND;
        assert_eq!(log.refused("a", &bad), [""; 0]);
        // Another place in the list is no other fault.
        let moved = [refusal("a", "spec.externalIPs[0]", "10.0.0.300")];
        assert_eq!(log.refused("a", &moved), [""; 0]);
    }
    assert_eq!(log.counted(Topic::Refused, "known"), 200);
    // Mended, and for a time that a person would need.
    assert_eq!(log.refused("a", &[]), [""; 0]);
    log.now += AGAIN;
    assert_eq!(log.refused("a", &bad).len(), 1, "it is so again");
    log.now += AGAIN;
    let other = [refusal("a", "spec.externalIPs[0]", "10.0.0.301")];
    assert_eq!(log.refused("a", &other).len(), 1, "another value");
    // It comes and goes all the time.
    for _ in 0..50 {
        log.now += SECOND;
        assert_eq!(log.refused("a", &[]), [""; 0]);
        assert_eq!(log.refused("a", &other), [""; 0]);
    }
}

#[test]
fn a_thousand_faults_of_a_kind_in_an_object_are_one_line() {
    let mut log = Log::new();
    let bad: Vec<_> = (0..1000)
        .map(|n| refusal("a", &format!("spec.externalIPs[{n}]"), &format!("x{n}")))
        .collect();
    let lines = log.refused("a", &bad);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("value=\"x0\"") && lines[0].ends_with(" count=1000"));
}

#[test]
fn what_is_gone_is_forgotten() {
    let mut log = Log::new();
    for n in 0..1000 {
        let name = format!("s{n}");
        log.refused(&name, &[refusal(&name, "spec.clusterIP", "x")]);
    }
    assert_eq!(log.reports.causes, 1000);
    log.now += AGAIN * 10;
    log.says(|_, _| ());
    assert_eq!(log.reports.causes, 1000, "they stand");
    for n in 0..1000 {
        log.refused(&format!("s{n}"), &[]);
    }
    log.now += AGAIN;
    log.says(|_, _| ());
    assert!(log.reports.known.is_empty() && log.reports.causes == 0);
}

#[test]
fn no_more_is_remembered_than_there_is_room_for() {
    let mut log = Log::new();
    log.says(|reports, now| {
        for n in 0..REMEMBERED + 100 {
            let _ = reports.about(Topic::Conflict, &n.to_string(), (), now);
        }
    });
    assert_eq!(log.reports.causes, REMEMBERED);
    log.now += AGAIN;
    log.says(|_, _| ());
    assert_eq!(log.reports.causes, 0);
}

fn virtual_server(port: u16) -> VirtualServerKey {
    VirtualServerKey::Address {
        address: [10, 96, 0, 1].into(),
        port,
        protocol: Protocol::Tcp,
    }
}

/// Claims of one address by so many Services, each with two ports.
fn claims(losers: usize) -> Vec<Conflict> {
    let conflict = |n: usize, port: u16| Conflict {
        key: virtual_server(port),
        winner: ObjectName::new("default", "winner"),
        loser: ObjectName::new("default", &format!("loser{n}")),
    };
    (0..losers)
        .flat_map(|n| [conflict(n, 80), conflict(n, 443)])
        .collect()
}

#[test]
fn three_thousand_claimants_of_an_address_are_ten_lines_and_a_sum() {
    let mut log = Log::new();
    let lines = log.says(|reports, now| reports.conflicts(claims(3000), now));
    assert_eq!(lines.len(), FEW);
    assert_eq!(
        lines[0],
        "WARN not served: a Service that comes first has it service=default/loser0 \
         winner=default/winner virtual_server=10.96.0.1:80/tcp virtual_servers=2"
    );
    // At each toggle the same again.
    for _ in 0..9 {
        log.now += SECOND;
        let lines = log.says(|reports, now| reports.conflicts(claims(3000), now));
        assert_eq!(lines, [""; 0]);
    }
    assert_eq!(log.reports.next_at(), Some(log.now + SECOND));
    log.now += SECOND;
    let sum = "WARN more of the same topic=\"conflict\" told=10 left_out=2990";
    assert_eq!(log.says(|_, _| ()), [sum]);
    assert_eq!(log.reports.next_at(), None);
    assert_eq!(log.counted(Topic::Conflict, "told"), 10);
    assert_eq!(log.counted(Topic::Conflict, "left_out"), 2990);
    assert_eq!(log.counted(Topic::Conflict, "known"), 27_000);
}

#[test]
fn takeovers_are_told_by_pair() {
    let mut log = Log::new();
    let takeovers = claims(1).into_iter().map(|conflict| Takeover {
        key: conflict.key,
        from: conflict.winner,
        to: conflict.loser,
    });
    assert_eq!(
        log.says(|reports, now| reports.takeovers(takeovers, now)),
        [
            "INFO took over service=default/loser0 from=default/winner virtual_server=10.96.0.1:80/tcp virtual_servers=2"
        ]
    );
}

/// Ops that add an endpoint to each of the ports, and fail.
fn failing(ports: u16) -> Vec<(Op, Failure)> {
    let op = |port| {
        let endpoint = RealServerKey {
            address: [10, 0, 0, 2].into(),
            port: 8080,
        };
        let key = Key::RealServer(virtual_server(port), endpoint);
        let op = Op::Add(key, Value::RealServer(1));
        let text = format!(
            "add real server 10.0.0.2:8080 of 10.96.0.1:{port}/tcp: invalid argument (EINVAL)"
        );
        let kind = FailureKind::Refused;
        (op, Failure { kind, text })
    };
    (1..=ports).map(op).collect()
}

fn fail(log: &mut Log, service: &ObjectName, ops: &[(Op, Failure)]) -> Vec<String> {
    log.says(|reports, now| {
        let failed = ops.iter().map(|(op, f)| (Some(service), op, f));
        reports.failed(failed, now);
        reports.applied(0, ops.len(), Duration::ZERO, now);
        reports.still_fail([Some(service)].into_iter(), now);
    })
}

#[test]
fn an_endpoint_that_the_kernel_refuses_on_a_thousand_ports_is_one_line_for_all_time() {
    let mut log = Log::new();
    let (service, ops) = (ObjectName::new("default", "web"), failing(1000));
    let lines = fail(&mut log, &service, &ops);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert_eq!(
        lines[0],
        "WARN failed; will be tried again service=\"default/web\" \
         op=add real server 10.0.0.2:8080 of 10.96.0.1:1/tcp, weight 1 \
         error=add real server 10.0.0.2:8080 of 10.96.0.1:1/tcp: invalid argument (EINVAL) count=1000"
    );
    assert_eq!(lines[1], "INFO applied ops=0 failed=1000 took_ms=0");
    let mut found = 0;
    for minutes in 1..=60 {
        log.now += Duration::from_secs(60);
        let failed = ops.iter().map(|(op, f)| (Some(&service), op, f));
        log.reports.failed(failed.clone(), log.now);
        let findings = log.reports.flush(log.now);
        assert_eq!(findings.len(), 1, "the Event comes again, {minutes}");
        assert!(!findings[0].cause.contains("10."), "{:?}", findings[0]);
        found += 1;
        assert_eq!(fail(&mut log, &service, &ops[..500]), [""; 0], "{minutes}");
    }
    assert_eq!(found, 60);
    // It is over, once.
    let over = |log: &mut Log| log.says(|reports, now| reports.still_fail([].into_iter(), now));
    let line = "INFO no longer fails service=\"default/web\" failures=121 after_s=3600";
    assert_eq!(over(&mut log), [line]);
    assert_eq!(over(&mut log), [""; 0]);
    // What fails now and then is told at its first time.
    for _ in 0..20 {
        log.now += SECOND;
        assert_eq!(fail(&mut log, &service, &ops), [""; 0]);
        assert_eq!(over(&mut log), [""; 0]);
    }
    log.now += AGAIN;
    assert_eq!(
        fail(&mut log, &service, &ops).len(),
        2,
        "after a while it is news"
    );
}

#[test]
fn another_service_still_fails() {
    let mut log = Log::new();
    let [a, b] = ["a", "b"].map(|name| ObjectName::new("default", name));
    let ops = failing(1);
    let two = log.says(|reports, now| {
        let failed = [Some(&a), Some(&b), None].map(|name| (name, &ops[0].0, &ops[0].1));
        reports.failed(failed, now);
        reports.still_fail([Some(&a), Some(&b), None].into_iter(), now);
    });
    assert_eq!(two.len(), 3);
    let lines = log.says(|reports, now| reports.still_fail([Some(&b)].into_iter(), now));
    assert_eq!(
        lines,
        [
            "INFO no longer fails failures=1 after_s=0",
            "INFO no longer fails service=\"default/a\" failures=1 after_s=0"
        ]
    );
}

#[test]
fn passes_within_a_second_are_one_line() {
    let mut log = Log::new();
    let mut lines = Vec::new();
    for _ in 0..20 {
        lines.extend(log.says(|reports, now| reports.applied(3, 0, SECOND / 1000, now)));
        log.now += SECOND / 10;
    }
    log.now += SECOND;
    lines.extend(log.says(|_, _| ()));
    assert_eq!(
        lines,
        [
            "INFO applied ops=3 failed=0 took_ms=1",
            "INFO applied ops=30 failed=0 took_ms=10 passes=10",
            "INFO applied ops=27 failed=0 took_ms=9 passes=9"
        ]
    );
    assert_eq!(log.reports.next_at(), None);
}

#[test]
fn a_flood_is_bounded_per_second() {
    let mut log = Log::new();
    let topics = [Topic::Refused, Topic::Drain, Topic::Conflict, Topic::Failed];
    let (mut lines, mut calls, mut sums) = (0_u64, 0_u64, 0_u64);
    let seconds = 60;
    for second in 0..seconds * 10 {
        for topic in topics {
            for n in 0..20 {
                calls += 1;
                let object = format!("{second}.{n}");
                let say = log.reports.about(topic, &object, (), log.now);
                lines += u64::from(say == Say::Line);
            }
        }
        let written = log.says(|_, _| ());
        lines += u64::try_from(written.len()).unwrap();
        let left = |line: &String| line.split("left_out=").nth(1)?.parse::<u64>().ok();
        sums += written.iter().filter_map(left).sum::<u64>();
        if let Some(next) = log.reports.next_at() {
            assert!(next > log.now, "the loop would turn without a pause");
        }
        log.now += SECOND / 10;
    }
    let most = u64::from(BURST) + seconds / REFILL.as_secs();
    assert!(lines <= most, "{lines} of {most}");
    // In the end all that was left out was told as a number.
    log.now += WINDOW * 2;
    for line in log.says(|_, _| ()) {
        sums += line
            .split("left_out=")
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap();
    }
    let counted = |what| {
        topics
            .iter()
            .map(|topic| log.counted(*topic, what))
            .sum::<u64>()
    };
    assert_eq!(counted("left_out"), sums);
    assert_eq!(counted("told") + counted("left_out"), calls);
}

/// What others change all the time is under the bound of all lines.
#[test]
fn much_drift_is_a_few_lines_and_a_sum() {
    let planner = ipvs_proxy_core::planner::Planner::new(Default::default());
    let mut kernel = ipvs_proxy_core::memory::MemoryKernel::new();
    let mut log = Log::new();
    let mut audit = |log: &mut Log, ports: std::ops::Range<u16>| {
        let keys = ports
            .map(|port| Key::VirtualServer(virtual_server(port)))
            .collect();
        let read = Default::default();
        let found = findings::of_drift(&keys, &read, &planner, &mut kernel);
        let told = Default::default();
        log.says(|reports, now| findings::tell(&found, &told, &planner, reports, now))
    };
    assert_eq!(audit(&mut log, 1..3).len(), 2);
    let lines = audit(&mut log, 1..1001);
    assert_eq!(lines.len(), FEW - 2 + 1, "{lines:?}");
    assert_eq!(
        lines.last().unwrap(),
        "WARN much was changed by somebody else findings=1000 told=8 kinds=1000 virtual servers"
    );
    // Each five seconds for ten minutes, each time others.
    let mut lines = 0;
    for n in 0..120_u16 {
        log.now += 5 * SECOND;
        lines += audit(&mut log, 1 + n * 100..101 + n * 100).len();
    }
    assert!(lines <= 600 + BURST as usize, "{lines}");
    assert!(log.counted(Topic::Drift, "left_out") > 10_000);
    // Where there is no room at all, the sum comes when there is.
    let mut log = Log::new();
    for topic in [
        Topic::Refused,
        Topic::Manifest,
        Topic::Conflict,
        Topic::Takeover,
        Topic::Drain,
        Topic::Failed,
    ] {
        log.says(|reports, now| (0..20).for_each(|_| _ = reports.line(topic, now)));
    }
    let lines = audit(&mut log, 1..1001);
    assert_eq!(lines.len(), 1, "{lines:?}");
}
