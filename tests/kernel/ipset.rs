//! Sets made by `ipset-rs`, read back by the `ipset` tool, and the other way round.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipset_rs::{Change, Client, Entry, Error, SetName, SetSpec, SetType};
use ipvs_proxy_netlink::{Family, Protocol};
use tests::netns::Namespace;

fn open(node: &Namespace) -> Client {
    node.enter(Client::open).expect("a kernel with ipset")
}

fn name(text: &str) -> SetName {
    text.parse().expect("a set name")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn all(client: &mut Client, changes: &[Change]) {
    for (change, result) in changes.iter().zip(client.change(changes)) {
        assert_eq!(result, Ok(()), "{change:?}");
    }
}

fn one(client: &mut Client, change: Change) -> Result<(), Error> {
    client.change(&[change]).pop().expect("one result")
}

fn numbered(number: u32) -> IpAddr {
    Ipv4Addr::from(0x0a00_0000 | number).into()
}

/// `add NAME ENTRY` lines of `ipset save`, as a set.
fn saved_entries(node: &Namespace, set: &str) -> BTreeSet<String> {
    let saved = node.tool(&format!("ipset save {set}"));
    let prefix = format!("add {set} ");
    saved
        .lines()
        .filter_map(|line| line.strip_prefix(&prefix))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_type_and_family_reads_back() {
    let node = Namespace::new();
    let mut client = open(&node);
    let (a, b, net) = (ip("10.0.0.1"), ip("10.0.0.2"), ip("10.1.0.0"));
    let (a6, b6, net6) = (ip("fd00::1"), ip("fd00::2"), ip("fd01::"));
    let (tcp, udp, sctp) = (Protocol::Tcp, Protocol::Udp, Protocol::Sctp);
    let cases = [
        (
            SetType::HashIp(Family::V4),
            vec![Entry::Ip(a), Entry::Ip(b)],
        ),
        (SetType::HashIp(Family::V6), vec![Entry::Ip(a6)]),
        (
            SetType::HashIpPort(Family::V4),
            vec![
                Entry::IpPort(a, tcp, 80),
                Entry::IpPort(a, udp, 80),
                Entry::IpPort(b, sctp, 9),
            ],
        ),
        (
            SetType::HashIpPort(Family::V6),
            vec![Entry::IpPort(a6, tcp, 65535)],
        ),
        (
            SetType::HashIpPortIp(Family::V4),
            vec![Entry::IpPortIp(a, tcp, 80, b)],
        ),
        (
            SetType::HashIpPortIp(Family::V6),
            vec![Entry::IpPortIp(a6, udp, 53, b6)],
        ),
        (
            SetType::HashIpPortNet(Family::V4),
            vec![
                Entry::IpPortNet(a, tcp, 80, net, 16),
                Entry::IpPortNet(a, tcp, 80, b, 32),
                Entry::IpPortNet(a, tcp, 80, ip("128.0.0.0"), 1),
            ],
        ),
        (
            SetType::HashIpPortNet(Family::V6),
            vec![
                Entry::IpPortNet(a6, sctp, 80, net6, 48),
                Entry::IpPortNet(a6, sctp, 80, b6, 128),
            ],
        ),
        (
            SetType::BitmapPort,
            vec![Entry::Port(0), Entry::Port(30000), Entry::Port(65535)],
        ),
    ];
    for (number, (kind, entries)) in cases.iter().enumerate() {
        let set = name(&format!("TYPE-{number}"));
        let spec = SetSpec {
            hash_size: 64,
            max_elements: 1000,
            ..SetSpec::new(set, *kind)
        };
        let mut changes = vec![Change::Create(spec)];
        changes.extend(entries.iter().map(|entry| Change::Add(set, *entry)));
        all(&mut client, &changes);

        let printed: BTreeSet<String> = entries.iter().map(Entry::to_string).collect();
        assert_eq!(saved_entries(&node, set.as_str()), printed);
        let listing = node.tool(&format!("ipset list {set} -terse"));
        assert!(
            listing.contains(&format!("Type: {}\n", kind.name())),
            "{listing}"
        );

        let (listed, mut read) = client.list(&set).expect("the set");
        read.sort();
        let mut written = entries.clone();
        written.sort();
        assert_eq!(read, written);
        assert_eq!(
            (listed.name, listed.kind, listed.references),
            (set, Some(*kind), 0)
        );
        if kind.family().is_some() {
            assert_eq!((listed.hash_size, listed.max_elements), (64, 1000));
        }

        let removed: Vec<Change> = entries
            .iter()
            .skip(1)
            .map(|entry| Change::Remove(set, *entry))
            .collect();
        all(&mut client, &removed);
        assert_eq!(saved_entries(&node, set.as_str()).len(), 1);
        all(&mut client, &[Change::Flush(set)]);
        assert_eq!(saved_entries(&node, set.as_str()).len(), 0);
    }
    let headers = client.list_headers().expect("headers");
    assert_eq!(headers.len(), cases.len());
    assert!(
        headers
            .iter()
            .all(|set| set.entries.is_none_or(|entries| entries == 0))
    );
    all(
        &mut client,
        &headers
            .iter()
            .map(|set| Change::Destroy(set.name))
            .collect::<Vec<_>>(),
    );
    assert_eq!(node.tool("ipset save"), "");
}

#[test]
fn the_tools_sets_read_the_same() {
    let node = Namespace::new();
    let mut client = open(&node);
    let written = "\
create PLAIN hash:ip,port family inet hashsize 1024 maxelem 65536
create PORTS bitmap:port range 0-65535
create RANGE bitmap:port range 100-200
create TIMED hash:ip family inet timeout 100
create NET hash:net family inet6
create LIST list:set
add PLAIN 10.0.0.1,tcp:80
add PORTS 80
add RANGE 150
add TIMED 10.0.0.1
add NET fd00::/64
add LIST PLAIN
";
    node.tool_with_input("ipset restore", written);
    let sets = client.list_all().expect("all sets");
    let read: Vec<_> = sets
        .iter()
        .map(|(set, entries)| {
            (
                set.name.to_string(),
                set.type_name.as_str(),
                set.family,
                set.kind,
                entries.clone(),
            )
        })
        .collect();
    let v4 = Some(Family::V4);
    let entry = Entry::IpPort(ip("10.0.0.1"), Protocol::Tcp, 80);
    assert_eq!(
        read,
        [
            (
                "PLAIN".into(),
                "hash:ip,port",
                v4,
                Some(SetType::HashIpPort(Family::V4)),
                vec![entry]
            ),
            (
                "PORTS".into(),
                "bitmap:port",
                None,
                Some(SetType::BitmapPort),
                vec![Entry::Port(80)]
            ),
            ("RANGE".into(), "bitmap:port", None, None, vec![]),
            ("TIMED".into(), "hash:ip", v4, None, vec![]),
            ("NET".into(), "hash:net", Some(Family::V6), None, vec![]),
            ("LIST".into(), "list:set", None, None, vec![]),
        ]
    );
    // The list of sets uses PLAIN.
    assert_eq!(sets.first().map(|(set, _)| set.references), Some(1));
    // Sets that the tool made, of another revision, are adopted by creating them again.
    let adopt = |set, kind| Change::Create(SetSpec::new(name(set), kind));
    all(
        &mut client,
        &[
            adopt("PLAIN", SetType::HashIpPort(Family::V4)),
            adopt("PORTS", SetType::BitmapPort),
        ],
    );
    assert_eq!(client.list(&name("PLAIN")).expect("PLAIN").1, [entry]);
}

#[test]
fn ten_thousand_entries() {
    let node = Namespace::new();
    let mut client = open(&node);
    let set = name("MANY");
    let entries: Vec<Entry> = (0..10_000u32)
        .map(|i| Entry::IpPort(numbered(1 + i / 10), Protocol::Tcp, 1 + (i % 10) as u16))
        .collect();
    let mut changes = vec![Change::Create(SetSpec::new(
        set,
        SetType::HashIpPort(Family::V4),
    ))];
    changes.extend(entries.iter().map(|entry| Change::Add(set, *entry)));
    all(&mut client, &changes);
    let read: BTreeSet<Entry> = client.list(&set).expect("the set").1.into_iter().collect();
    assert_eq!(read, entries.iter().copied().collect());
    assert_eq!(saved_entries(&node, "MANY").len(), 10_000);

    all(
        &mut client,
        &entries
            .iter()
            .map(|e| Change::Remove(set, *e))
            .collect::<Vec<_>>(),
    );
    assert_eq!(client.list(&set).expect("the set").1, []);
}

#[test]
fn repeating_is_no_error() {
    let node = Namespace::new();
    let mut client = open(&node);
    let set = name("AGAIN");
    let spec = SetSpec::new(set, SetType::HashIp(Family::V4));
    let entry = Entry::Ip(ip("10.0.0.1"));
    let twice = |change| [change, change];
    all(&mut client, &twice(Change::Create(spec)));
    all(&mut client, &twice(Change::Add(set, entry)));
    assert_eq!(client.list(&set).expect("the set").1, [entry]);
    all(&mut client, &twice(Change::Create(spec)));
    assert_eq!(client.list(&set).expect("the set").1, [entry]);
    all(&mut client, &twice(Change::Remove(set, entry)));
    all(&mut client, &twice(Change::Flush(set)));
    all(&mut client, &twice(Change::Destroy(set)));
}

#[test]
fn refusals_say_why() {
    let node = Namespace::new();
    let mut client = open(&node);
    let (set, absent) = (name("SMALL"), name("ABSENT"));
    let spec = SetSpec {
        max_elements: 2,
        ..SetSpec::new(set, SetType::HashIp(Family::V4))
    };
    all(&mut client, &[Change::Create(spec)]);

    let entry = Entry::Ip(ip("10.0.0.1"));
    assert_eq!(one(&mut client, Change::Flush(absent)), Err(Error::NoSet));
    assert_eq!(
        one(&mut client, Change::Add(absent, entry)),
        Err(Error::NoSet)
    );
    assert_eq!(
        one(&mut client, Change::Remove(absent, entry)),
        Err(Error::NoSet)
    );
    assert_eq!(client.list(&absent), Err(Error::NoSet));
    // The refused listing leaves nothing behind that confuses the next.
    assert_eq!(client.list(&set).expect("the set").1, []);
    let results = client.change(&vec![Change::Add(absent, entry); 300]);
    assert!(results.iter().all(|result| *result == Err(Error::NoSet)));

    // The kernel takes it for the same set when only the family differs.
    let families = SetSpec::new(name("FAMILY"), SetType::HashIpPort(Family::V6));
    all(&mut client, &[Change::Create(families)]);
    let other = SetSpec {
        kind: SetType::HashIpPort(Family::V4),
        ..families
    };
    assert_eq!(one(&mut client, Change::Create(other)), Err(Error::Exists));
    all(
        &mut client,
        &[Change::Destroy(other.name), Change::Create(other)],
    );

    for other in [
        SetSpec::new(set, SetType::HashIp(Family::V4)),
        SetSpec {
            kind: SetType::HashIp(Family::V6),
            ..spec
        },
        SetSpec {
            kind: SetType::HashIpPort(Family::V4),
            ..spec
        },
        SetSpec {
            kind: SetType::BitmapPort,
            ..spec
        },
    ] {
        assert_eq!(
            one(&mut client, Change::Create(other)),
            Err(Error::Exists),
            "{other:?}"
        );
    }

    let net = name("NET");
    let spec = SetSpec::new(net, SetType::HashIpPortNet(Family::V4));
    all(&mut client, &[Change::Create(spec)]);
    let everywhere = Entry::IpPortNet(ip("10.0.0.1"), Protocol::Tcp, 80, ip("0.0.0.0"), 0);
    for (change, error) in [
        (Change::Add(net, everywhere), "IPSET_ERR_INVALID_CIDR"),
        (Change::Add(set, Entry::Port(80)), "IPSET_ERR_PROTOCOL"),
        (
            Change::Add(set, Entry::Ip(ip("fd00::1"))),
            "IPSET_ERR_PROTOCOL",
        ),
    ] {
        assert_eq!(
            one(&mut client, change),
            Err(Error::Invalid(error)),
            "{change:?}"
        );
    }

    let rule = "-t filter -I OUTPUT -m set --match-set SMALL dst -j ACCEPT";
    node.tool(&format!("iptables-legacy {rule}"));
    assert_eq!(one(&mut client, Change::Destroy(set)), Err(Error::Busy));
    assert_eq!(client.list(&set).expect("the set").0.references, 1);
    node.tool("iptables-legacy -t filter -F OUTPUT");
    all(&mut client, &[Change::Destroy(set)]);
}

#[test]
fn a_refused_entry_stops_no_other() {
    let node = Namespace::new();
    let mut client = open(&node);
    let (set, other) = (name("FULL"), name("OTHER"));
    let spec = |set, max_elements| SetSpec {
        max_elements,
        hash_size: 64,
        ..SetSpec::new(set, SetType::HashIp(Family::V4))
    };
    let bad = Entry::Ip(ip("fd00::1"));
    let good = |number| Entry::Ip(numbered(number));
    let changes = [
        Change::Create(spec(set, 65536)),
        Change::Create(spec(other, 65536)),
        Change::Add(set, good(1)),
        Change::Add(set, bad),
        Change::Add(set, good(2)),
        Change::Add(other, good(1)),
        Change::Remove(set, good(2)),
        Change::Remove(set, bad),
        Change::Remove(set, good(3)),
        Change::Add(set, good(4)),
        Change::Add(set, good(2)),
        Change::Remove(set, good(2)),
    ];
    let results = client.change(&changes);
    for (i, result) in results.iter().enumerate() {
        match i {
            3 | 7 => assert_eq!(*result, Err(Error::Invalid("IPSET_ERR_PROTOCOL")), "{i}"),
            _ => assert_eq!(*result, Ok(()), "{i}"),
        }
    }
    let read: BTreeSet<Entry> = client.list(&set).expect("the set").1.into_iter().collect();
    assert_eq!(read, BTreeSet::from([good(1), good(4)]));

    // A full set refuses each entry too many by its own; what is in it may be added again.
    let full = name("LIMIT");
    let mut changes = vec![Change::Create(spec(full, 300))];
    changes.extend((1..=400).map(|number| Change::Add(full, good(number))));
    changes.push(Change::Add(full, good(1)));
    let results = client.change(&changes);
    let refused = results
        .iter()
        .filter(|result| **result == Err(Error::Full))
        .count();
    let done = results.iter().filter(|result| result.is_ok()).count();
    let (_, entries) = client.list(&full).expect("the set");
    assert_eq!((refused + done, entries.len() + 2), (changes.len(), done));
    assert!(refused >= 100, "{refused}");
}
