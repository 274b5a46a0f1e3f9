//! Sets made by `ipset-rs`, read back by the `ipset` tool, and the other way round.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipset_rs::{
    Change, Client, Counters, Entry, Error, Options, SetName, SetSpec, SetType, SkbInfo,
};
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
            SetType::HashNet(Family::V4),
            vec![
                Entry::Net(net, 16),
                Entry::Net(b, 32),
                Entry::Net(ip("128.0.0.0"), 1),
            ],
        ),
        (
            SetType::HashNet(Family::V6),
            vec![Entry::Net(net6, 48), Entry::Net(b6, 128)],
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
create COMMENTED hash:net comment counters
create LIST list:set
add PLAIN 10.0.0.1,tcp:80
add PORTS 80
add RANGE 150
add TIMED 10.0.0.1
add NET fd00::/64
add COMMENTED 10.0.0.0/8
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
            (
                "NET".into(),
                "hash:net",
                Some(Family::V6),
                Some(SetType::HashNet(Family::V6)),
                vec![Entry::Net(ip("fd00::"), 64)]
            ),
            ("COMMENTED".into(), "hash:net", v4, None, vec![]),
            ("LIST".into(), "list:set", None, None, vec![]),
        ]
    );
    let extensions: Vec<_> = sets
        .iter()
        .map(|(set, _)| (set.timeout_s, set.counters))
        .filter(|extensions| *extensions != (None, false))
        .collect();
    assert_eq!(extensions, [(Some(100), false), (None, true)]);
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

    // What the kernel would take for something else, or refuse without a word about the field.
    let counted = Options {
        counters: Some(Counters {
            packets: 1,
            bytes: u64::MAX,
        }),
        ..Options::default()
    };
    let exception = Options {
        nomatch: true,
        ..Options::default()
    };
    let empty = SetSpec {
        max_elements: 0,
        ..spec
    };
    for (change, message) in [
        (
            Change::Add(net, everywhere),
            "prefix is 0.0.0.0/0: 1 to 32 for IPv4, 1 to 128 for IPv6",
        ),
        (
            Change::Remove(net, Entry::Net(ip("fd00::"), 129)),
            "prefix is fd00::/129: 1 to 32 for IPv4, 1 to 128 for IPv6",
        ),
        (
            Change::AddWith(set, entry, counted),
            "bytes is 18446744073709551615: at most 18446744073709551614",
        ),
        (
            Change::AddWith(set, entry, exception),
            "nomatch is 10.0.0.1: only an entry with a network can be an exception",
        ),
        (
            Change::Create(empty),
            "max_elements is 0: a set takes at least 1 entry",
        ),
    ] {
        let refused = one(&mut client, change).expect_err("a bad value");
        assert_eq!(refused.to_string(), message, "{change:?}");
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

/// `create` and `add` lines of `ipset save`, without what newer kernels choose by themselves.
fn saved(node: &Namespace) -> Vec<String> {
    let saved = node.tool("ipset save -sorted");
    let lines = saved
        .lines()
        .map(|line| match line.split_once(" bucketsize ") {
            Some((line, _)) => line.to_owned(),
            None => line.to_owned(),
        });
    lines.collect()
}

/// Options in all combinations that matter, as `ipset save` has them.
const EXTENDED: &str = "\
create ALL hash:net family inet hashsize 64 maxelem 100 counters skbinfo
add ALL 10.0.0.0/8 packets 18446744073709551614 bytes 4 skbmark 0x1/0xff skbprio 1:a skbqueue 3
add ALL 10.1.0.0/16 nomatch packets 0 bytes 0
add ALL 10.2.0.1 packets 0 bytes 0 skbmark 0x5
create COUNTED bitmap:port range 0-65535 counters
add COUNTED 80 packets 7 bytes 420
create EXCEPT hash:ip,port,net family inet6 hashsize 64 maxelem 100
add EXCEPT fd00::1,tcp:80,fd01::/48 nomatch
add EXCEPT fd00::1,tcp:80,fd01::/16
create MARKED hash:ip,port family inet hashsize 64 maxelem 100 skbinfo
add MARKED 10.0.0.1,udp:53 skbmark 0x0/0xf skbprio ffff:ffff skbqueue 65535
";

fn extended() -> Vec<(SetSpec, Vec<(Entry, Options)>)> {
    let spec = |set, kind, counters, skbinfo| SetSpec {
        hash_size: 64,
        max_elements: 100,
        counters,
        skbinfo,
        ..SetSpec::new(name(set), kind)
    };
    let counted = |packets, bytes| Options {
        counters: Some(Counters { packets, bytes }),
        ..Options::default()
    };
    let exception = |options| Options {
        nomatch: true,
        ..options
    };
    let skb = |mark, mask, priority, queue| SkbInfo {
        mark,
        mask,
        priority,
        queue,
    };
    let (tcp, a6) = (Protocol::Tcp, ip("fd00::1"));
    vec![
        (
            spec("ALL", SetType::HashNet(Family::V4), true, true),
            vec![
                (
                    Entry::Net(ip("10.0.0.0"), 8),
                    Options {
                        skbinfo: skb(1, 0xff, (1, 10), 3),
                        ..counted(u64::MAX - 1, 4)
                    },
                ),
                (Entry::Net(ip("10.1.0.0"), 16), exception(counted(0, 0))),
                (
                    Entry::Net(ip("10.2.0.1"), 32),
                    Options {
                        skbinfo: skb(5, u32::MAX, (0, 0), 0),
                        ..counted(0, 0)
                    },
                ),
            ],
        ),
        (
            spec("COUNTED", SetType::BitmapPort, true, false),
            vec![(Entry::Port(80), counted(7, 420))],
        ),
        (
            spec("EXCEPT", SetType::HashIpPortNet(Family::V6), false, false),
            vec![
                (
                    Entry::IpPortNet(a6, tcp, 80, ip("fd01::"), 48),
                    exception(Options::default()),
                ),
                (
                    Entry::IpPortNet(a6, tcp, 80, ip("fd01::"), 16),
                    Options::default(),
                ),
            ],
        ),
        (
            spec("MARKED", SetType::HashIpPort(Family::V4), false, true),
            vec![(
                Entry::IpPort(ip("10.0.0.1"), Protocol::Udp, 53),
                Options {
                    skbinfo: skb(0, 0xf, (u16::MAX, u16::MAX), u16::MAX),
                    ..Options::default()
                },
            )],
        ),
    ]
}

#[test]
fn options_are_the_tools_both_ways() {
    let text: BTreeSet<String> = EXTENDED.lines().map(str::to_owned).collect();

    let node = Namespace::new();
    let mut client = open(&node);
    let mut changes = Vec::new();
    for (spec, members) in extended() {
        changes.push(Change::Create(spec));
        let add = |(entry, options)| Change::AddWith(spec.name, entry, options);
        changes.extend(members.into_iter().map(add));
    }
    all(&mut client, &changes);
    assert_eq!(BTreeSet::from_iter(saved(&node)), text);

    let other = Namespace::new();
    other.tool_with_input("ipset restore", EXTENDED);
    for node in [&node, &other] {
        let mut client = open(node);
        for (spec, mut members) in extended() {
            let (set, mut listed) = client.list_with_options(&spec.name).expect("the set");
            listed.sort_unstable();
            members.sort_unstable();
            assert_eq!(listed, members, "{}", spec.name);
            assert_eq!(
                (set.kind, set.counters, set.skbinfo, set.timeout_s),
                (Some(spec.kind), spec.counters, spec.skbinfo, None)
            );
        }
    }

    // What is added again has the new options; counters stay unless they are given.
    let all_set = name("ALL");
    let net = Entry::Net(ip("10.0.0.0"), 8);
    let spec = extended().remove(0).0;
    all(
        &mut client,
        &[Change::Create(spec), Change::Add(all_set, net)],
    );
    let (_, members) = client.list_with_options(&all_set).expect("the set");
    let again = members.iter().find(|(entry, _)| *entry == net);
    let counters = Some(Counters {
        packets: u64::MAX - 1,
        bytes: 4,
    });
    let kept = Options {
        counters,
        ..Options::default()
    };
    assert_eq!(again, Some(&(net, kept)));

    // The same set with other extensions is another set.
    let without = SetSpec {
        skbinfo: false,
        ..spec
    };
    assert_eq!(
        one(&mut client, Change::Create(without)),
        Err(Error::Exists)
    );

    // A set without the extension refuses it, and only that entry.
    let plain = name("EXCEPT");
    let entry = |port| Entry::IpPortNet(ip("fd00::1"), Protocol::Tcp, port, ip("fd02::"), 16);
    let marked = Options {
        skbinfo: SkbInfo {
            queue: 1,
            ..SkbInfo::default()
        },
        ..Options::default()
    };
    assert_eq!(
        client.change(&[
            Change::Add(plain, entry(1)),
            Change::AddWith(plain, entry(2), kept),
            Change::AddWith(plain, entry(3), marked),
            Change::Add(plain, entry(4)),
        ]),
        [
            Ok(()),
            Err(Error::Invalid("IPSET_ERR_COUNTER")),
            Err(Error::Invalid("IPSET_ERR_SKBINFO")),
            Ok(()),
        ]
    );
    let there = |client: &mut Client, port| client.contains(&plain, &entry(port));
    let found = [1, 2, 3, 4].map(|port| there(&mut client, port));
    assert_eq!(found, [Ok(true), Ok(false), Ok(false), Ok(true)]);
    // An exception is no member.
    let of_all = |address| Entry::Net(ip(address), 32);
    let found = ["10.9.0.1", "10.1.0.1", "11.0.0.1"];
    let found = found.map(|address| client.contains(&all_set, &of_all(address)));
    assert_eq!(found, [Ok(true), Ok(false), Ok(false)]);
    assert_eq!(client.contains(&name("ABSENT"), &net), Err(Error::NoSet));
}

#[test]
fn two_sets_are_swapped() {
    let node = Namespace::new();
    let mut client = open(&node);
    let (a, b) = (name("A"), name("B"));
    let kind = SetType::HashIp(Family::V4);
    let entry = |number| Entry::Ip(numbered(number));
    let spec = |set, max_elements| SetSpec {
        max_elements,
        ..SetSpec::new(set, kind)
    };
    // A refused entry before a swap is tried again before it, not behind it.
    let bad = Entry::Ip(ip("fd00::1"));
    let changes = [
        Change::Create(spec(a, 10)),
        Change::Create(spec(b, 20)),
        Change::Add(a, entry(1)),
        Change::Add(a, bad),
        Change::Swap(a, b),
        Change::Add(a, entry(2)),
    ];
    for (change, result) in changes.iter().zip(client.change(&changes)) {
        let refused = *change == Change::Add(a, bad);
        assert_eq!(result.is_err(), refused, "{change:?}: {result:?}");
    }
    let held = |client: &mut Client, set| {
        let (header, entries) = client.list(&set).expect("the set");
        (header.max_elements, entries)
    };
    assert_eq!(held(&mut client, a), (20, vec![entry(2)]));
    assert_eq!(held(&mut client, b), (10, vec![entry(1)]));

    // A rule goes on looking into the name.
    node.tool("iptables-legacy -I OUTPUT -m set --match-set A dst -j ACCEPT");
    all(&mut client, &[Change::Swap(b, a), Change::Destroy(b)]);
    assert_eq!(held(&mut client, a), (10, vec![entry(1)]));
    let header = client.list(&a).expect("the set").0;
    assert_eq!(header.references, 1);

    let ports = name("PORTS");
    all(
        &mut client,
        &[Change::Create(SetSpec::new(ports, SetType::BitmapPort))],
    );
    for (change, error) in [
        (Change::Swap(a, b), Error::NoSet),
        (Change::Swap(b, a), Error::NoSet),
        (
            Change::Swap(a, ports),
            Error::Invalid("IPSET_ERR_TYPE_MISMATCH"),
        ),
    ] {
        assert_eq!(one(&mut client, change), Err(error), "{change:?}");
    }
    assert_eq!(held(&mut client, a), (10, vec![entry(1)]));
}
