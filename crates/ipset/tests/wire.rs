//! Messages byte by byte: ours as written here, the kernel's as captured from Linux 6.18, and the
//! same again through the eyes of neli, which shares no code with us.

#![cfg(target_endian = "little")]
// A wrong index fails the test, as it should.
#![allow(clippy::indexing_slicing)]

use std::io::Cursor;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipset_rs::codec;
use ipset_rs::{Counters, Entry, Options, Set, SetName, SetSpec, SetType, SkbInfo};
use ipvs_proxy_netlink::{Error, Family, Protocol, Request};
use neli::FromBytesWithInput;
use neli::ToBytes;
use neli::genl::{AttrTypeBuilder, Nlattr, NlattrBuilder};
use neli::types::{Buffer, GenlBuffer};
use proptest::prelude::*;

fn name(text: &str) -> SetName {
    text.parse().expect("a set name")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn hex(text: &str) -> Vec<u8> {
    text.split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).expect("hex"))
        .collect()
}

/// Entries without options.
fn plain(entries: impl IntoIterator<Item = Entry>) -> Vec<(Entry, Options)> {
    let with = |entry| (entry, Options::default());
    entries.into_iter().map(with).collect()
}

fn assert_bytes(request: Result<Request, Error>, command: u16, payload: &str) {
    let request = request.expect("a short request");
    assert_eq!((request.kind, request.flags), (6 << 8 | command, 0));
    let written: Vec<String> = request
        .payload
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(written, payload.split_whitespace().collect::<Vec<_>>());
}

#[test]
fn requests_about_sets() {
    assert_bytes(codec::protocol(), 1, "02 00 00 00 05 00 01 00 06 00 00 00");
    assert_bytes(
        codec::set_type(SetType::HashIp(Family::V6)),
        13,
        "02 00 00 00 05 00 01 00 06 00 00 00
         0c 00 03 00 68 61 73 68 3a 69 70 00  05 00 05 00 0a 00 00 00",
    );
    assert_bytes(
        codec::create(
            &SetSpec::new(name("A"), SetType::HashIpPortNet(Family::V6)),
            1,
        ),
        2,
        "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 41 00 00 00
         15 00 03 00 68 61 73 68 3a 69 70 2c 70 6f 72 74 2c 6e 65 74 00 00 00 00
         05 00 04 00 01 00 00 00  05 00 05 00 0a 00 00 00
         14 00 07 80  08 00 12 40 00 00 04 00  08 00 13 40 00 01 00 00",
    );
    assert_bytes(
        codec::create(&SetSpec::new(name("B"), SetType::BitmapPort), 0),
        2,
        "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 42 00 00 00
         10 00 03 00 62 69 74 6d 61 70 3a 70 6f 72 74 00
         05 00 04 00 00 00 00 00  05 00 05 00 00 00 00 00
         14 00 07 80  06 00 04 40 00 00 00 00  06 00 05 40 ff ff 00 00",
    );
    let named = "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 42 00 00 00";
    assert_bytes(
        codec::create(
            &SetSpec {
                hash_size: 64,
                max_elements: 7,
                counters: true,
                skbinfo: true,
                ..SetSpec::new(name("D"), SetType::HashNet(Family::V4))
            },
            6,
        ),
        2,
        "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 44 00 00 00
         0d 00 03 00 68 61 73 68 3a 6e 65 74 00 00 00 00
         05 00 04 00 06 00 00 00  05 00 05 00 02 00 00 00
         1c 00 07 80  08 00 12 40 00 00 00 40  08 00 13 40 00 00 00 07  08 00 08 40 00 00 00 48",
    );
    assert_bytes(
        codec::swap(&name("B"), &name("D")),
        6,
        "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 42 00 00 00  06 00 03 00 44 00 00 00",
    );
    assert_bytes(codec::destroy(&name("B")), 3, named);
    assert_bytes(codec::flush(&name("B")), 4, named);
    assert_bytes(codec::header(&name("B")), 12, named);
    assert_bytes(codec::list(Some(&name("B")), true), 7, named);
    assert_bytes(
        codec::list(None, false),
        7,
        "02 00 00 00 05 00 01 00 06 00 00 00  08 00 06 40 00 00 00 04",
    );
}

#[test]
fn requests_about_entries() {
    assert_bytes(
        codec::add(
            &name("A"),
            [(
                &Entry::IpPortNet(ip("fd00::1"), Protocol::Tcp, 80, ip("fd00:1::"), 32),
                Options::default(),
            )],
        ),
        9,
        "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 41 00 00 00
         50 00 08 80 4c 00 07 80
         18 00 01 80 14 00 02 40 fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01
         06 00 04 40 00 50 00 00  05 00 07 00 06 00 00 00
         18 00 14 80 14 00 02 40 fd 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00
         05 00 15 00 20 00 00 00
         08 00 09 00 00 00 00 00",
    );
    assert_bytes(
        codec::remove(
            &name("C"),
            &[Entry::Ip(ip("10.0.0.1")), Entry::Port(0x1234)],
        ),
        10,
        "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 43 00 00 00
         20 00 08 80
         10 00 07 80 0c 00 01 80 08 00 01 40 0a 00 00 01
         0c 00 07 80 06 00 04 40 12 34 00 00
         08 00 09 00 00 00 00 00",
    );
}

/// Options that differ in every field.
fn all_options() -> Options {
    Options {
        nomatch: true,
        counters: Some(Counters {
            packets: 3,
            bytes: 0x0102_0304_0506_0708,
        }),
        skbinfo: SkbInfo {
            mark: 0x1000_0001,
            mask: 0xf000_000f,
            priority: (1, 10),
            queue: 0x203,
        },
    }
}

#[test]
fn options_of_entries() {
    assert_eq!(
        all_options().to_string(),
        " nomatch packets 3 bytes 72623859790382856 skbmark 0x10000001/0xf000000f skbprio 1:a skbqueue 515"
    );
    let net = Entry::Net(ip("10.0.0.0"), 8);
    let written = "
        0c 00 01 80 08 00 01 40 0a 00 00 00  05 00 03 00 08 00 00 00";
    let options = "
        08 00 08 40 00 00 00 04
        0c 00 19 40 00 00 00 00 00 00 00 03  0c 00 18 40 01 02 03 04 05 06 07 08
        0c 00 1b 40 10 00 00 01 f0 00 00 0f  08 00 1c 40 00 01 00 0a  06 00 1d 40 02 03 00 00";
    let header = "02 00 00 00 05 00 01 00 06 00 00 00  06 00 02 00 44 00 00 00";
    assert_bytes(
        codec::add(&name("D"), [(&net, all_options())]),
        9,
        &format!("{header} 58 00 08 80 54 00 07 80 {written} {options} 08 00 09 00 00 00 00 00"),
    );
    assert_bytes(
        codec::test(&name("D"), &net),
        11,
        &format!("{header} 18 00 07 80 {written}"),
    );
}

#[test]
fn the_lowest_revision_that_has_it_all() {
    use SetType::{BitmapPort, HashIp, HashIpPort, HashIpPortIp, HashIpPortNet, HashNet};
    let v4 = Family::V4;
    for (kind, revisions) in [
        (HashIp(v4), [0, 1, 4, 4]),
        (HashIpPort(v4), [1, 2, 5, 5]),
        (HashIpPortIp(v4), [1, 2, 5, 5]),
        (HashIpPortNet(v4), [3, 4, 7, 7]),
        (HashNet(v4), [2, 3, 6, 6]),
        (BitmapPort, [0, 1, 3, 3]),
    ] {
        let wanted = [(false, false), (true, false), (false, true), (true, true)];
        let asked = wanted.map(|(counters, skbinfo)| {
            codec::revision(&SetSpec {
                counters,
                skbinfo,
                ..SetSpec::new(name("A"), kind)
            })
        });
        assert_eq!(asked, revisions, "{kind:?}");
    }
}

/// A `hash:ip,port,net` of revision 8, as the kernel listed it.
const LISTED: &str = "
    02 00 00 00 05 00 01 00 07 00 00 00  06 00 02 00 41 00 00 00
    15 00 03 00 68 61 73 68 3a 69 70 2c 70 6f 72 74 2c 6e 65 74 00 00 00 00
    05 00 05 00 0a 00 00 00  05 00 04 00 08 00 00 00  06 00 0b 40 00 00 00 00
    3c 00 07 80  08 00 12 40 00 00 04 00  08 00 13 40 00 01 00 00  05 00 15 00 0c 00 00 00
    08 00 11 40 d4 16 7a 57  08 00 19 40 00 00 00 03  08 00 1a 40 00 00 05 50
    08 00 18 40 00 00 00 01
    50 00 08 80 4c 00 07 80
    18 00 01 80 14 00 02 00 fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01
    18 00 14 80 14 00 02 00 fd 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00
    06 00 04 40 00 50 00 00  05 00 15 00 20 00 00 00  05 00 07 00 06 00 00 00";

/// The next message of the same set, which has no header.
const LISTED_ON: &str = "
    02 00 00 00 05 00 01 00 07 00 00 00  06 00 02 00 41 00 00 00
    48 00 08 80 44 00 07 80
    18 00 01 80 14 00 02 00 fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 02
    18 00 14 80 14 00 02 00 fd 00 00 01 00 00 00 00 00 00 00 00 00 00 00 05
    06 00 04 40 01 bb 00 00  05 00 07 00 84 00 00 00";

/// A `bitmap:port` with one entry.
const LISTED_BITMAP: &str = "
    02 00 00 00 05 00 01 00 07 00 00 00  06 00 02 00 42 00 00 00
    10 00 03 00 62 69 74 6d 61 70 3a 70 6f 72 74 00
    05 00 05 00 00 00 00 00  05 00 04 00 03 00 00 00  06 00 0b 40 00 01 00 00
    2c 00 07 80  06 00 04 40 00 00 00 00  06 00 05 40 ff ff 00 00
    08 00 19 40 00 00 00 00  08 00 1a 40 00 00 20 48  08 00 18 40 00 00 00 01
    10 00 08 80 0c 00 07 80 06 00 04 40 00 35 00 00";

/// A `hash:net` with counters and skbinfo, with one exception in it.
const LISTED_NET: &str = "
    02 00 00 00 05 00 01 00 06 00 00 00 06 00 02 00 44 00 00 00 0d 00 03 00
    68 61 73 68 3a 6e 65 74 00 00 00 00 05 00 05 00 02 00 00 00 05 00 04 00
    07 00 00 00 44 00 07 80 08 00 12 40 00 00 04 00 08 00 13 40 00 01 00 00
    05 00 15 00 0c 00 00 00 08 00 11 40 d4 fa 3b 45 08 00 19 40 00 00 00 00
    08 00 1a 40 00 00 02 a8 08 00 18 40 00 00 00 02 08 00 08 40 00 00 00 48
    88 00 08 80 30 00 07 80 0c 00 01 80 08 00 01 00 0c 00 00 01 05 00 03 00
    20 00 00 00 0c 00 18 40 00 00 00 00 00 00 00 00 0c 00 19 40 00 00 00 00
    00 00 00 00 54 00 07 80 0c 00 01 80 08 00 01 00 0a 00 00 00 05 00 03 00
    08 00 00 00 08 00 08 40 00 00 00 04 0c 00 18 40 01 02 03 04 05 06 07 08
    0c 00 19 40 00 00 00 00 00 00 00 03 0c 00 1b 40 10 00 00 01 f0 00 00 0f
    08 00 1c 40 00 01 00 0a 06 00 1d 40 02 03 00 00";

#[test]
fn a_listing_with_extensions() {
    let sets = codec::decode_list(&[hex(LISTED_NET)]).expect("a listing");
    let [(set, members)] = sets.as_slice() else {
        panic!("{sets:?}");
    };
    assert_eq!(set.kind, Some(SetType::HashNet(Family::V4)));
    assert_eq!(
        (set.counters, set.skbinfo, set.timeout_s),
        (true, true, None)
    );
    let plain = Options {
        counters: Some(Counters::default()),
        ..Options::default()
    };
    let members: std::collections::BTreeMap<_, _> = members.iter().copied().collect();
    assert_eq!(
        members,
        [
            (Entry::Net(ip("10.0.0.0"), 8), all_options()),
            (Entry::Net(ip("12.0.0.1"), 32), plain),
        ]
        .into()
    );
}

#[test]
fn the_kernels_listing() {
    let sets = codec::decode_list(&[hex(LISTED), hex(LISTED_ON), hex(LISTED_BITMAP)]);
    assert_eq!(
        sets,
        Ok(vec![
            (
                Set {
                    name: name("A"),
                    type_name: "hash:ip,port,net".into(),
                    family: Some(Family::V6),
                    kind: Some(SetType::HashIpPortNet(Family::V6)),
                    revision: 8,
                    hash_size: 1024,
                    max_elements: 65536,
                    timeout_s: None,
                    counters: false,
                    skbinfo: false,
                    references: 3,
                    entries: Some(1),
                },
                plain([
                    Entry::IpPortNet(ip("fd00::1"), Protocol::Tcp, 80, ip("fd00:1::"), 32),
                    Entry::IpPortNet(ip("fd00::2"), Protocol::Sctp, 443, ip("fd00:1::5"), 128),
                ]),
            ),
            (
                Set {
                    name: name("B"),
                    type_name: "bitmap:port".into(),
                    family: None,
                    kind: Some(SetType::BitmapPort),
                    revision: 3,
                    hash_size: 0,
                    max_elements: 0,
                    timeout_s: None,
                    counters: false,
                    skbinfo: false,
                    references: 0,
                    entries: Some(1),
                },
                plain([Entry::Port(53)]),
            ),
        ])
    );
}

#[test]
fn sets_that_are_not_ours_to_fill_have_no_kind() {
    // A range that ends at 0x7fff; a timeout (attribute 6) and comments (a flag of attribute 8) in
    // a hash's header; another type.
    let range = LISTED_BITMAP.replace("06 00 05 40 ff ff", "06 00 05 40 7f ff");
    let timeout = LISTED.replace("08 00 11 40 d4 16 7a 57", "08 00 06 40 00 00 00 0a");
    let comments = LISTED.replace("08 00 11 40 d4 16 7a 57", "08 00 08 40 00 00 00 18");
    let other = LISTED.replace("6e 65 74 00", "6e 65 78 00");
    for (listed, timeout_s, counters) in [
        (range, None, false),
        (timeout, Some(10), false),
        (comments, None, true),
        (other, None, false),
    ] {
        let sets = codec::decode_list(&[hex(&listed)]).expect("a listing");
        let (set, entries) = &sets[0];
        assert_eq!((sets.len(), set.kind, entries), (1, None, &vec![]));
        assert_eq!((set.timeout_s, set.counters), (timeout_s, counters));
    }
    // A name with a blank is no name of ours: the set is left out, and what follows of it too.
    let blank = LISTED.replace("06 00 02 00 41 00", "06 00 02 00 20 00");
    assert_eq!(
        codec::decode_list(&[hex(&blank), hex(LISTED_ON)]),
        Ok(vec![])
    );
}

#[test]
fn revisions() {
    let answer = hex(
        "02 00 00 00 05 00 01 00 07 00 00 00 0c 00 03 00 68 61 73 68 3a 69 70 00
         05 00 05 00 02 00 00 00 05 00 04 00 06 00 00 00 05 00 0a 00 00 00 00 00",
    );
    assert_eq!(codec::decode_set_type(&answer), Ok((0, 6)));
    assert!(codec::decode_set_type(&answer[..24]).is_err());
    assert!(codec::decode_set_type(&[]).is_err());
}

/// What neli makes of attributes: kind, is nested, is big-endian, value.
fn neli_attributes(bytes: &[u8]) -> Vec<(u16, bool, bool, Vec<u8>)> {
    let read: GenlBuffer<u16, Buffer> =
        GenlBuffer::from_bytes_with_input(&mut Cursor::new(bytes), bytes.len()).expect("neli");
    read.iter()
        .map(|attribute| {
            let kind = attribute.nla_type();
            let value = attribute.nla_payload().as_ref().to_vec();
            (
                *kind.nla_type(),
                *kind.nla_nested(),
                *kind.nla_network_order(),
                value,
            )
        })
        .collect()
}

fn neli_attribute(kind: u16, nested: bool, payload: &[u8]) -> Nlattr<u16, Buffer> {
    let kind = AttrTypeBuilder::default()
        .nla_type(kind)
        .nla_nested(nested)
        .build()
        .expect("kind");
    NlattrBuilder::default()
        .nla_type(kind)
        .nla_payload(payload)
        .build()
        .expect("attribute")
}

fn neli_bytes(attributes: impl IntoIterator<Item = Nlattr<u16, Buffer>>) -> Vec<u8> {
    let mut list = GenlBuffer::new();
    for attribute in attributes {
        list.push(attribute);
    }
    let mut bytes = Cursor::new(Vec::new());
    list.to_bytes(&mut bytes).expect("bytes");
    bytes.into_inner()
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// The attributes of an entry by the header's numbers: `(kind, address kind or 0, value)`.
fn fields(entry: Entry) -> Vec<(u16, u16, Vec<u8>)> {
    let address = |kind, ip: IpAddr| (kind, if ip.is_ipv4() { 1 } else { 2 }, octets(ip));
    let port = |port: u16| (4, 0, port.to_be_bytes().to_vec());
    match entry {
        Entry::Ip(ip) => vec![address(1, ip)],
        Entry::IpPort(ip, protocol, p) => {
            vec![address(1, ip), port(p), (7, 0, vec![protocol.number()])]
        }
        Entry::IpPortIp(ip, protocol, p, ip2) => [
            fields(Entry::IpPort(ip, protocol, p)),
            vec![address(20, ip2)],
        ]
        .concat(),
        Entry::IpPortNet(ip, protocol, p, net, prefix) => [
            fields(Entry::IpPortIp(ip, protocol, p, net)),
            vec![(21, 0, vec![prefix])],
        ]
        .concat(),
        Entry::Net(net, prefix) => vec![address(1, net), (3, 0, vec![prefix])],
        Entry::Port(p) => vec![port(p)],
    }
}

/// Those of its options. What is 0 is not written, and not listed.
fn option_fields(options: Options) -> Vec<(u16, u16, Vec<u8>)> {
    let SkbInfo {
        mark,
        mask,
        priority: (major, minor),
        queue,
    } = options.skbinfo;
    let counter = |kind, value: u64| (kind, 0, value.to_be_bytes().to_vec());
    let counters = options.counters.map(|c| [(25, c.packets), (24, c.bytes)]);
    let numbers = [
        (8, u32::from(options.nomatch) << 2),
        (28, u32::from(major) * 0x1_0000 + u32::from(minor)),
    ];
    let [flags, priority] = numbers.map(|(kind, n)| (kind, 0, n.to_be_bytes().to_vec()));
    let mut all = vec![flags];
    all.extend(
        counters
            .into_iter()
            .flatten()
            .map(|(kind, n)| counter(kind, n)),
    );
    let marks = [mark.to_be_bytes(), mask.to_be_bytes()].concat();
    all.extend([
        (27, 0, marks),
        priority,
        (29, 0, queue.to_be_bytes().to_vec()),
    ]);
    all.retain(|(kind, _, value)| [24, 25].contains(kind) || value.iter().any(|byte| *byte != 0));
    all
}

/// Our request for entries, read by neli.
fn assert_neli_reads(entries: &[(Entry, Options)]) {
    let given = entries.iter().map(|(entry, options)| (entry, *options));
    let request = codec::add(&name("A"), given).expect("a request");
    let top = neli_attributes(&request.payload[4..]);
    assert_eq!(
        top.iter().map(|(kind, ..)| *kind).collect::<Vec<_>>(),
        [1, 2, 8, 9]
    );
    let list = neli_attributes(&top[2].3);
    assert!(top[2].1 && list.len() == entries.len());
    for ((kind, nested, _, data), (entry, options)) in list.iter().zip(entries) {
        assert_eq!((*kind, *nested), (7, true));
        let read: Vec<(u16, u16, Vec<u8>)> = neli_attributes(data)
            .into_iter()
            .map(|(kind, nested, big_endian, value)| {
                if !nested {
                    // All but the protocol and the prefixes, which are a byte each.
                    assert_eq!(big_endian, ![3, 7, 21].contains(&kind));
                    return (kind, 0, value);
                }
                let mut inner = neli_attributes(&value);
                let (inner_kind, _, big_endian, address) = inner.pop().expect("an address");
                assert!(inner.is_empty() && big_endian);
                (kind, inner_kind, address)
            })
            .collect();
        assert_eq!(read, [fields(*entry), option_fields(*options)].concat());
    }
}

/// The kernel's listing of a set, written by neli.
fn neli_listing(kind: SetType, entries: &[(Entry, Options)]) -> Vec<u8> {
    let data = entries.iter().map(|(entry, options)| {
        let fields = fields(*entry)
            .into_iter()
            .chain(option_fields(*options))
            .map(|(kind, address, value)| match address {
                0 => neli_attribute(kind, false, &value),
                _ => {
                    let inner = neli_bytes([neli_attribute(address, false, &value)]);
                    neli_attribute(kind, true, &inner)
                }
            });
        neli_attribute(7, true, &neli_bytes(fields))
    });
    let header = neli_bytes([
        neli_attribute(18, false, &1024u32.to_be_bytes()),
        neli_attribute(19, false, &65536u32.to_be_bytes()),
        neli_attribute(25, false, &7u32.to_be_bytes()),
        neli_attribute(99, false, b"not known"),
    ]);
    let type_name = [kind.name().as_bytes(), &[0]].concat();
    let family = kind.family().map_or(0, Family::number);
    let body = neli_bytes([
        neli_attribute(1, false, &[7]),
        neli_attribute(2, false, b"A\0"),
        neli_attribute(3, false, &type_name),
        neli_attribute(5, false, &[family]),
        neli_attribute(4, false, &[1]),
        neli_attribute(7, true, &header),
        neli_attribute(8, true, &neli_bytes(data)),
        neli_attribute(88, false, b"not known"),
    ]);
    [&[2, 0, 0, 0][..], &body].concat()
}

fn address(family: Family) -> BoxedStrategy<IpAddr> {
    match family {
        Family::V4 => any::<u32>()
            .prop_map(|bits| Ipv4Addr::from(bits).into())
            .boxed(),
        Family::V6 => any::<u128>()
            .prop_map(|bits| Ipv6Addr::from(bits).into())
            .boxed(),
    }
}

fn entry(kind: SetType) -> BoxedStrategy<Entry> {
    let protocol = any::<u8>().prop_map(Protocol::from_number);
    match kind {
        SetType::HashIp(family) => address(family).prop_map(Entry::Ip).boxed(),
        SetType::HashIpPort(family) => (address(family), protocol, any::<u16>())
            .prop_map(|(ip, protocol, port)| Entry::IpPort(ip, protocol, port))
            .boxed(),
        SetType::HashIpPortIp(family) => (address(family), protocol, any::<u16>(), address(family))
            .prop_map(|(ip, protocol, port, ip2)| Entry::IpPortIp(ip, protocol, port, ip2))
            .boxed(),
        SetType::HashIpPortNet(family) => (
            address(family),
            protocol,
            any::<u16>(),
            address(family),
            1..=family.host_prefix(),
        )
            .prop_map(|(ip, protocol, port, net, prefix)| {
                Entry::IpPortNet(ip, protocol, port, net, prefix)
            })
            .boxed(),
        SetType::HashNet(family) => (address(family), 1..=family.host_prefix())
            .prop_map(|(net, prefix)| Entry::Net(net, prefix))
            .boxed(),
        SetType::BitmapPort => any::<u16>().prop_map(Entry::Port).boxed(),
    }
}

fn options() -> impl Strategy<Value = Options> {
    let skbinfo = any::<(u32, u32, (u16, u16), u16)>();
    any::<(bool, Option<(u64, u64)>)>()
        .prop_flat_map(move |some| (Just(some), prop_oneof![Just((0, 0, (0, 0), 0)), skbinfo]))
        .prop_map(
            |((nomatch, counters), (mark, mask, priority, queue))| Options {
                nomatch,
                counters: counters.map(|(packets, bytes)| Counters { packets, bytes }),
                skbinfo: SkbInfo {
                    mark,
                    mask,
                    priority,
                    queue,
                },
            },
        )
}

fn kind() -> impl Strategy<Value = SetType> {
    let family = prop_oneof![Just(Family::V4), Just(Family::V6)];
    (0..6, family).prop_map(|(kind, family)| match kind {
        0 => SetType::HashIp(family),
        1 => SetType::HashIpPort(family),
        2 => SetType::HashIpPortIp(family),
        3 => SetType::HashIpPortNet(family),
        4 => SetType::HashNet(family),
        _ => SetType::BitmapPort,
    })
}

proptest! {
    #[test]
    fn neli_agrees(
        (kind, entries) in kind().prop_flat_map(|kind| {
            (Just(kind), proptest::collection::vec((entry(kind), options()), 0..20))
        })
    ) {
        assert_neli_reads(&entries);
        let listed = codec::decode_list(&[neli_listing(kind, &entries)]).expect("a listing");
        prop_assert_eq!(listed.len(), 1);
        prop_assert_eq!(listed[0].0.kind, Some(kind));
        prop_assert_eq!(listed[0].0.references, 7);
        prop_assert_eq!(&listed[0].1, &entries);
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = codec::decode_set_type(&bytes);
        let _ = codec::decode_list(&[&bytes]);
    }

    /// Bytes changed and cut within a listing reach deeper than bytes made up.
    #[test]
    fn no_broken_listing_panics(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
        end in any::<proptest::sample::Index>(),
        which in any::<bool>(),
    ) {
        let mut listed = hex(if which { LISTED_NET } else { LISTED });
        for (at, byte) in changes {
            let at = at.index(listed.len());
            listed[at] = byte;
        }
        listed.truncate(end.index(listed.len() * 2));
        let _ = codec::decode_list(&[listed.as_slice(), &hex(LISTED_ON)]);
        let _ = codec::decode_set_type(&listed);
    }
}
