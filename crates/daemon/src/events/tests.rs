use std::time::{Duration, Instant};

use ipvs_proxy_core::guard::{Cause, Refused};
use ipvs_proxy_core::model::ObjectName;

use super::{
    BURST, Finding, HOUR, NOTE, Object, REFILL, REMEMBERED, REPORTERS, Reason, Reporter, WAITING,
    hash,
};
use crate::translate::Refusal;

const LONG: Duration = Duration::from_secs(1000);

fn service(name: &str, reason: Reason) -> Finding {
    Finding {
        object: Object::Service(ObjectName::new("default", name)),
        reason,
        note: "spec.clusterIP: it can't be".to_owned(),
        cause: "spec.clusterIP".to_owned(),
    }
}

fn all_due(reporter: &mut Reporter, now: Instant) -> Vec<String> {
    std::iter::from_fn(|| reporter.next(now))
        .map(|due| due.name)
        .collect()
}

#[test]
fn a_cause_is_reported_once_an_hour() {
    let now = Instant::now();
    let mut reporter = Reporter::new("node1", 1, now);
    let hour = 491_000 * HOUR;
    let cases = [
        ("first", service("a", Reason::InvalidField), hour, true),
        (
            "again",
            service("a", Reason::InvalidField),
            hour + HOUR / 2,
            false,
        ),
        (
            "another reason",
            service("a", Reason::FailedToProgram),
            hour,
            true,
        ),
        (
            "another object",
            service("b", Reason::InvalidField),
            hour,
            true,
        ),
        (
            "the next hour",
            service("a", Reason::InvalidField),
            hour + HOUR,
            true,
        ),
    ];
    for (what, finding, at, expected) in cases {
        assert_eq!(reporter.note(finding, now, at), expected, "{what}");
    }
    let mut other = service("a", Reason::InvalidField);
    other.cause = "spec.ports[0].port".to_owned();
    assert!(reporter.note(other, now, hour + HOUR), "another cause");
    assert_eq!(all_due(&mut reporter, now + LONG).len(), 5);
}

#[test]
fn events_wait_and_come_at_a_rate() {
    let now = Instant::now();
    let mut reporter = Reporter::new("node1", 1, now);
    assert_eq!(reporter.next_at(), None);
    for number in 0..25 {
        let finding = service(&format!("s{number}"), Reason::FailedToProgram);
        assert!(reporter.note(finding, now, HOUR));
    }
    assert!(reporter.next_at().unwrap() > now);
    assert_eq!(reporter.next(now), None, "nothing is due at once");
    let later = now + LONG;
    assert_eq!(all_due(&mut reporter, later).len(), BURST as usize);
    assert_eq!(reporter.next_at(), Some(later + REFILL));
    assert_eq!(all_due(&mut reporter, later + REFILL / 2), [""; 0]);
    assert_eq!(all_due(&mut reporter, later + REFILL).len(), 1);
    assert_eq!(all_due(&mut reporter, later + REFILL * 4).len(), 3);
}

/// A wave of findings on every node: few nodes report, and what they report is one event.
#[test]
fn of_what_all_find_few_report() {
    let now = Instant::now();
    for nodes in [1_u32, 5, 100, 5000] {
        let (mut reported, mut names, mut first_minute) = (0_u32, Vec::new(), 0_u32);
        let (mut own, services) = (0_u32, 4);
        for node in 0..nodes {
            let mut reporter = Reporter::new(&format!("node{node}"), nodes, now);
            for number in 0..services {
                let name = format!("s{number}");
                let finding = service(&name, Reason::InvalidField);
                reported += u32::from(reporter.note(finding, now, HOUR * 7));
            }
            names.extend(all_due(&mut reporter, now + LONG));
            let finding = Finding::of_node(Reason::Starting, "started".to_owned());
            own += u32::from(reporter.note(finding, now, HOUR * 7));
            let started = all_due(&mut reporter, now + Duration::from_secs(60));
            first_minute += u32::try_from(started.len()).unwrap();
        }
        names.sort();
        names.dedup();
        let expected = REPORTERS.min(nodes) * services;
        assert!(
            reported >= expected / 3 && reported <= expected * 3,
            "{nodes}: {reported}"
        );
        assert!(names.len() <= services as usize, "{nodes}: {names:?}");
        assert_eq!(own, nodes, "each node reports what is its own");
        if nodes == 5000 {
            assert!(
                first_minute < nodes / 5,
                "{first_minute} of {nodes} in the first minute"
            );
        }
    }
}

#[test]
fn memory_is_bounded() {
    let now = Instant::now();
    let mut reporter = Reporter::new("node1", 1, now);
    let mut take = |number: usize, hour: Duration| {
        let finding = service(&format!("s{number}"), Reason::FailedToProgram);
        let noted = reporter.note(finding, now, hour);
        (noted, reporter.waiting.len(), reporter.known.len())
    };
    let last = (0..REMEMBERED * 2).map(|number| take(number, HOUR)).last();
    assert_eq!(last, Some((false, WAITING, WAITING)));
    // What waits goes on waiting, and what was known in an older hour is forgotten.
    reporter.waiting.clear();
    for number in 0..REMEMBERED * 2 {
        let finding = service(&format!("s{number}"), Reason::FailedToProgram);
        reporter.note(finding, now, HOUR * 2);
        reporter.waiting.clear();
    }
    assert_eq!(reporter.known.len(), REMEMBERED);
    assert!(!reporter.note(service("more", Reason::Starting), now, HOUR * 2));
    assert!(reporter.note(service("more", Reason::Starting), now, HOUR * 3));
}

#[test]
fn a_refusal_is_about_its_object() {
    let refusal = |object: &str| Refusal {
        object: object.to_owned(),
        field: "spec.clusterIP".to_owned(),
        value: "\"x\"".to_owned(),
        reason: "is not an IP address".to_owned(),
    };
    let name = ObjectName::new("shop", "web");
    let cases = [
        ("Service shop/web", Object::Service(name.clone())),
        ("EndpointSlice shop/web", Object::EndpointSlice(name)),
        ("Node node1", Object::Node),
    ];
    for (text, object) in cases {
        let finding = Finding::from(&refusal(text));
        assert_eq!(
            (finding.object, finding.cause.as_str()),
            (object, "spec.clusterIP")
        );
        assert_eq!(
            finding.note,
            format!("{text}: spec.clusterIP: \"x\" is not an IP address")
        );
    }
}

#[test]
fn a_long_note_is_cut() {
    let now = Instant::now();
    let mut reporter = Reporter::new("node1", 1, now);
    let mut finding = service("a", Reason::FailedToProgram);
    finding.note = "ö".repeat(NOTE);
    assert!(reporter.note(finding, now, HOUR));
    let note = reporter.next(now + LONG).unwrap().finding.note;
    assert!(note.ends_with("ö…") && note.len() <= 1024, "{}", note.len());
}

/// Two releases run side by side during an upgrade, on machines of two kinds.
#[test]
fn names_are_those_of_every_release_and_machine() {
    assert_eq!(hash(&[]), 0xefd0_1f60_ba99_2926);
    assert_eq!(hash(&["ab", "c"]), 0x04f3_60e5_0ae8_8219);
    assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
}

/// Processes and addresses of a node are its own: where nobody else finds it, nobody else reports it.
#[test]
fn what_a_process_of_the_node_keeps_is_reported_by_each_node_that_finds_it() {
    let now = Instant::now();
    let found = |cause: Cause| {
        let nodes = (0..100).map(|node| {
            let mut reporter = Reporter::new(&format!("node{node}"), 100, now);
            let refused = Refused {
                service: ObjectName::new("default", "web"),
                cause,
                first: "192.168.10.11:22/tcp".to_owned(),
                count: 1,
            };
            reporter.note(Finding::from(&refused), now, HOUR * 7);
            all_due(&mut reporter, now + LONG)
        });
        let mut names: Vec<String> = nodes.flatten().collect();
        let reported = names.len();
        names.sort();
        names.dedup();
        (reported, names.len())
    };
    assert_eq!(found(Cause::Listener), (100, 100));
    for cause in [Cause::Reserved, Cause::Endpoint, Cause::RealServers(5)] {
        let (reported, names) = found(cause);
        assert!(reported < 20 && names == 1, "{cause:?}: {reported} {names}");
    }
}
