//! The bytes on the wire: those that ipvsadm 1.31 sent and Linux 6.1 answered, neli as a second
//! opinion on both directions, and whatever bytes proptest comes up with.

#![cfg(target_endian = "little")]
// clippy.toml allows these in test functions; what they call is test code as well.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::io::Cursor;
use std::net::IpAddr;
use std::time::Duration;

use ipvs_netlink::codec::{self, Unsendable};
use ipvs_netlink::{
    Forwarding, Info, Persistence, PersistenceMask, RealServer, RealServerEntry, RealServerKey,
    Request, Scheduler, SchedulerFlags, Stats, SyncDaemon, SyncRole, Timeouts, Tunnel,
    TunnelChecksum, VirtualServer, VirtualServerEntry, VirtualServerKey,
};
use ipvs_proxy_netlink::{Error as NetlinkError, Family, Protocol};
use neli::genl::{AttrTypeBuilder, Genlmsghdr, GenlmsghdrBuilder, Nlattr, NlattrBuilder};
use neli::types::{Buffer, GenlBuffer};
use neli::{FromBytesWithInput, Size, ToBytes};
use proptest::prelude::*;

const FAMILY: u16 = 28;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn encode(request: &Request<'_>) -> Vec<u8> {
    codec::change(FAMILY, request).unwrap().payload
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn sip_server() -> VirtualServer {
    VirtualServer {
        key: VirtualServerKey::Address {
            address: ip("10.0.0.1"),
            port: 5060,
            protocol: Protocol::Udp,
        },
        scheduler: Scheduler::SourceHash,
        scheduler_flags: SchedulerFlags::PORT,
        persistence: Some(Persistence {
            timeout_s: 60,
            mask: PersistenceMask::Prefix(24),
        }),
        one_packet: false,
        persistence_engine: Some("sip".to_owned()),
    }
}

fn v6_server() -> VirtualServer {
    VirtualServer {
        key: VirtualServerKey::Address {
            address: ip("fd00::1"),
            port: 443,
            protocol: Protocol::Tcp,
        },
        scheduler: Scheduler::RoundRobin,
        scheduler_flags: SchedulerFlags::NONE,
        persistence: None,
        one_packet: false,
        persistence_engine: None,
    }
}

fn mark_server() -> VirtualServer {
    VirtualServer {
        key: VirtualServerKey::FirewallMark {
            mark: 7,
            family: Family::V6,
        },
        persistence: Some(Persistence {
            timeout_s: 300,
            mask: PersistenceMask::Prefix(64),
        }),
        ..v6_server()
    }
}

fn gue_server() -> RealServer {
    RealServer {
        key: RealServerKey {
            address: ip("10.1.0.2"),
            port: 5060,
        },
        forwarding: Forwarding::Tunnel(Tunnel::Gue {
            port: 6080,
            checksum: TunnelChecksum::Remote,
        }),
        weight: 5,
        upper_threshold: 1000,
        lower_threshold: 500,
    }
}

fn v6_real() -> RealServer {
    RealServer {
        key: RealServerKey {
            address: ip("fd00:1::7"),
            port: 8443,
        },
        forwarding: Forwarding::Masquerade,
        weight: 1,
        upper_threshold: 0,
        lower_threshold: 0,
    }
}

/// `ipvsadm -A -u 10.0.0.1:5060 -s sh -b sh-port -p 60 -M 255.255.255.0 --pe sip`
const ADD_SIP: &str = "
    01010000 5c000180 0600010002000000 0600020011000000
    14000300 0a000001 00000000 00000000 00000000 0600040013c40000
    07000600 73680000 08000b00 73697000 0c000700 11000000 ffffffff
    08000800 3c000000 08000900 ffffff00";

/// `ipvsadm -A -t [fd00::1]:443 -s rr`
const ADD_V6: &str = "
    01010000 54000180 060001000a000000 0600020006000000
    14000300 fd000000 00000000 00000000 00000001 0600040001bb0000
    07000600 72720000 0c000700 00000000 ffffffff 08000800 00000000 08000900 80000000";

/// `ipvsadm -A -f 7 -6 -s rr -p 300 -M 64`
const ADD_MARK: &str = "
    01010000 38000180 060001000a000000 0800050007000000
    07000600 72720000 0c000700 01000000 ffffffff 08000800 2c010000 08000900 40000000";

/// The real server in `ipvsadm -a -u 10.0.0.1:5060 -r 10.1.0.2:5060 -i -w 5 -x 1000 -y 500
/// --tun-type gue --tun-port 6080 --tun-remcsum`
const GUE: &str = "
    60000280 06000b0002000000 14000100 0a010002 00000000 00000000 00000000 0600020013c40000
    08000300 02000000 08000400 05000000
    05000d0001000000 06000e0017c00000 06000f0002000000 08000500 e8030000 08000600 f4010000";

#[test]
fn virtual_servers_are_sent_as_ipvsadm_does() {
    for (server, golden) in [
        (sip_server(), ADD_SIP),
        (v6_server(), ADD_V6),
        (mark_server(), ADD_MARK),
    ] {
        let add = codec::change(FAMILY, &Request::AddVirtualServer(&server)).unwrap();
        assert_eq!((add.kind, add.flags), (FAMILY, 0));
        assert_eq!(add.payload, hex(golden), "{server:?}");
        assert_eq!(codec::virtual_server(&hex(golden)).unwrap().server, server);

        // The same but for the command.
        let mut update = hex(golden);
        update[0] = 2;
        assert_eq!(encode(&Request::UpdateVirtualServer(&server)), update);
    }
}

#[test]
fn real_servers_are_sent_as_ipvsadm_does() {
    let key = sip_server().key;
    // ipvsadm fills in settings of the virtual server that the kernel does not read here.
    let of = "30000180 0600010002000000 0600020011000000
        14000300 0a000001 00000000 00000000 00000000 0600040013c40000";
    let message = |command: &str, dest: &str| hex(&format!("{command}010000 {of} {dest}"));
    let server = gue_server();
    assert_eq!(
        encode(&Request::AddRealServer(key, server)),
        message("05", GUE)
    );
    assert_eq!(
        encode(&Request::UpdateRealServer(key, server)),
        message("06", GUE)
    );
    let removed = "28000280 06000b0002000000
        14000100 0a010002 00000000 00000000 00000000 0600020013c40000";
    assert_eq!(
        encode(&Request::RemoveRealServer(key, server.key)),
        message("07", removed)
    );
    assert_eq!(
        encode(&Request::RemoveVirtualServer(key)),
        message("03", "")
    );
    let read = codec::real_server(&message("05", GUE), Family::V6).unwrap();
    assert_eq!(read.server, server);
}

#[test]
fn questions_and_commands_are_short() {
    let key = mark_server().key;
    let of = "14000180 060001000a000000 0800050007000000";
    for (message, golden) in [
        (
            codec::get_virtual_server(FAMILY, None),
            "04010000".to_owned(),
        ),
        (
            codec::get_virtual_server(FAMILY, Some(&key)),
            format!("04010000 {of}"),
        ),
        (
            codec::get_real_servers(FAMILY, &key),
            format!("08010000 {of}"),
        ),
        (codec::get_timeouts(FAMILY), "0d010000".to_owned()),
        (codec::get_sync_daemons(FAMILY), "0b010000".to_owned()),
        (codec::get_info(FAMILY), "0f010000".to_owned()),
        (codec::zero(FAMILY, None), "10010000".to_owned()),
        (codec::zero(FAMILY, Some(&key)), format!("10010000 {of}")),
        (codec::flush(FAMILY), "11010000".to_owned()),
    ] {
        assert_eq!(message.unwrap().payload, hex(&golden));
    }
    let timeouts = Timeouts {
        tcp: Duration::from_secs(900),
        tcp_fin: Duration::from_millis(119_001),
        udp: Duration::ZERO,
    };
    assert_eq!(
        codec::set_timeouts(FAMILY, &timeouts).unwrap().payload,
        hex("0c010000 0800040084030000 0800050078000000 0800060000000000")
    );
}

/// Counters as Linux 6.1 sends them, `IPVS_SVC_ATTR_STATS` then `STATS64`, with padding attributes
/// (11) where a 64-bit value would not be aligned; the n-th counter is n, in `STATS64` 2^32 + n.
const STATS: &str = "
    60000a00 0800010001000000 0800020002000000 0800030003000000
    0c000400 0400000000000000 04000b00 0c000500 0500000000000000
    0800060006000000 0800070007000000 0800080008000000 0800090009000000 08000a000a000000
    a0000c00 0c000100 0100000001000000 04000b00 0c000200 0200000001000000 04000b00
    0c000300 0300000001000000 04000b00 0c000400 0400000001000000 04000b00
    0c000500 0500000001000000 04000b00 0c000600 0600000001000000 04000b00
    0c000700 0700000001000000 04000b00 0c000800 0800000001000000 04000b00
    0c000900 0900000001000000 04000b00 0c000a00 0a00000001000000";

/// The counters 1 to 10, each with `high` added.
fn counters(high: u64) -> Stats {
    Stats {
        connections: high + 1,
        packets_in: high + 2,
        packets_out: high + 3,
        bytes_in: high + 4,
        bytes_out: high + 5,
        connections_per_s: high + 6,
        packets_in_per_s: high + 7,
        packets_out_per_s: high + 8,
        bytes_in_per_s: high + 9,
        bytes_out_per_s: high + 10,
    }
}

#[test]
fn the_kernels_virtual_servers_are_read() {
    // The flags carry IP_VS_SVC_F_HASHED (2), which is the kernel's own.
    let wide = hex(&format!(
        "01010000 5c010100 0600010002000000 0600020011000000
        14000300 0a000001 00000000 00000000 00000000 0600040013c40000
        07000600 73680000 08000b00 73697000 0c000700 13000000 ffffffff
        08000800 3c000000 08000900 ffffff00 {STATS}"
    ));
    let entry = VirtualServerEntry {
        server: sip_server(),
        stats: counters(1 << 32),
    };
    assert_eq!(codec::virtual_server(&wide), Ok(entry));

    // Linux before 4.1 has no STATS64: here its number is one that nobody knows.
    let position = wide.windows(4).position(|w| w == [0xa0, 0, 12, 0]).unwrap();
    let mut narrow = wide;
    narrow[position + 2] = 99;
    let entry = VirtualServerEntry {
        server: sip_server(),
        stats: counters(0),
    };
    assert_eq!(codec::virtual_server(&narrow), Ok(entry));
}

#[test]
fn the_kernels_real_servers_are_read() {
    let answer = hex(&format!(
        "05010000 78010200 14000100 fd000001 00000000 00000000 00000007 0600020020fb0000
        08000300 00000000 08000400 01000000
        05000d0000000000 06000e0000000000 06000f0000000000
        08000500 00000000 08000600 00000000
        08000700 0b000000 08000800 0c000000 08000900 0d000000 06000b000a000000 {STATS}"
    ));
    let entry = RealServerEntry {
        server: v6_real(),
        stats: counters(1 << 32),
        active_connections: 11,
        inactive_connections: 12,
        persistent_connections: 13,
    };
    assert_eq!(codec::real_server(&answer, Family::V4), Ok(entry));

    // Linux before 3.18 sends no address family.
    let position = answer.windows(4).position(|w| w == [6, 0, 11, 0]).unwrap();
    let mut old = answer;
    old[position + 2] = 99;
    assert_eq!(
        codec::real_server(&old, Family::V6).unwrap().server,
        v6_real()
    );
    let as_v4 = codec::real_server(&old, Family::V4).unwrap().server;
    assert_eq!(as_v4.key.address, ip("253.0.0.1"));
}

#[test]
fn the_kernels_timeouts_and_version_are_read() {
    let answer = hex("0c010000 0800040084030000 0800050078000000 080006002c010000");
    let seconds = Duration::from_secs;
    let expected = Timeouts {
        tcp: seconds(900),
        tcp_fin: seconds(120),
        udp: seconds(300),
    };
    assert_eq!(codec::timeouts(&answer), Ok(expected));
    let answer = hex("0e010000 0800010001020100 0800020000100000");
    let expected = Info {
        version: 0x0001_0201,
        connection_table_size: 4096,
    };
    assert_eq!(codec::info(&answer), Ok(expected));
}

/// Of Linux 6.1 and, with nothing behind the id, of those before 4.3.
#[test]
fn synchronization_daemons_are_read() {
    let start = "08000100 02000000 09000200 6574683100000000 08000300 09000000";
    let group = "08000500 e0000063";
    let group6 = "14000600 ff020000000000000000000000000099";
    let end = "06000400 78050000 06000700 91220000 05000800 02000000";
    let answer = |attributes: &[&str]| {
        let attributes = hex(&attributes.concat());
        let length = u16::try_from(attributes.len() + 4).unwrap().to_le_bytes();
        let nested = [&length[..], &[3, 0x80], &attributes].concat();
        codec::sync_daemon(&[hex("09010000"), nested].concat()).unwrap()
    };
    let expected = SyncDaemon {
        role: SyncRole::Backup,
        interface: "eth1".to_owned(),
        id: 9,
        longest_message: Some(1400),
        group: Some(ip("224.0.0.99")),
        port: Some(8849),
        ttl: Some(2),
    };
    assert_eq!(answer(&[start, group, end]), expected);
    let v6 = SyncDaemon {
        group: Some(ip("ff02::99")),
        ..expected.clone()
    };
    assert_eq!(answer(&[start, group6, end]), v6);
    let old = SyncDaemon {
        longest_message: None,
        group: None,
        port: None,
        ttl: None,
        ..expected
    };
    assert_eq!(answer(&[start]), old);
}

#[test]
fn a_mask_that_is_no_prefix_stays_as_it_is() {
    let scattered = |server: VirtualServer| VirtualServer {
        persistence: Some(Persistence {
            timeout_s: 60,
            mask: PersistenceMask::Scattered([255, 0, 255, 0].into()),
        }),
        ..server
    };
    let server = scattered(sip_server());
    let bytes = encode(&Request::AddVirtualServer(&server));
    assert_eq!(bytes, hex(&ADD_SIP.replace("ffffff00", "ff00ff00")));
    assert_eq!(codec::virtual_server(&bytes).unwrap().server, server);
    let refused = codec::change(FAMILY, &Request::AddVirtualServer(&scattered(v6_server())));
    assert_eq!(refused.unwrap_err(), Unsendable::Prefix);
}

#[test]
fn what_has_no_form_on_the_wire_is_not_sent() {
    let prefix = |family: VirtualServer, prefix| VirtualServer {
        persistence: Some(Persistence {
            timeout_s: 1,
            mask: PersistenceMask::Prefix(prefix),
        }),
        ..family
    };
    let mark = VirtualServerKey::FirewallMark {
        mark: 0,
        family: Family::V4,
    };
    let engine = |name: &str| VirtualServer {
        persistence_engine: Some(name.to_owned()),
        ..sip_server()
    };
    let refused = |server: &VirtualServer| {
        codec::change(FAMILY, &Request::AddVirtualServer(server)).unwrap_err()
    };
    assert_eq!(refused(&prefix(sip_server(), 33)), Unsendable::Prefix);
    assert_eq!(refused(&prefix(v6_server(), 0)), Unsendable::Prefix);
    assert_eq!(refused(&prefix(v6_server(), 129)), Unsendable::Prefix);
    assert_eq!(refused(&engine("")), Unsendable::EngineName);
    assert_eq!(refused(&engine(&"x".repeat(16))), Unsendable::EngineName);
    assert_eq!(
        refused(&engine(&"x".repeat(99_999))),
        Unsendable::EngineName
    );
    let server = VirtualServer {
        key: mark,
        ..v6_server()
    };
    assert_eq!(refused(&server), Unsendable::MarkZero);
    assert_eq!(codec::zero(FAMILY, Some(&mark)), Err(Unsendable::MarkZero));
    assert_eq!(
        codec::change(FAMILY, &Request::RemoveRealServer(mark, v6_real().key)),
        Err(Unsendable::MarkZero)
    );
}

#[test]
fn unknown_values_are_told() {
    for (from, to) in [
        // An address family, a protocol beyond 255, a scheduler's name.
        ("0600010002000000", "0600010003000000"),
        ("0600020011000000", "0600020011010000"),
        ("0700060073680000", "0700060073200000"),
    ] {
        let compact: String = ADD_SIP.split_whitespace().collect();
        assert!(compact.contains(from));
        let answer = codec::virtual_server(&hex(&compact.replace(from, to)));
        assert!(matches!(answer, Err(NetlinkError::Decode(_))), "{answer:?}");
    }
    let compact: String = GUE.split_whitespace().collect();
    for (from, to) in [
        ("0800030002000000", "0800030005000000"),
        ("05000d0001000000", "05000d0003000000"),
    ] {
        assert!(compact.contains(from));
        let message = format!("05010000{}", compact.replace(from, to));
        let answer = codec::real_server(&hex(&message), Family::V4);
        assert!(matches!(answer, Err(NetlinkError::Decode(_))), "{answer:?}");
    }
}

// neli's part: attributes have the numbers of <linux/ip_vs.h> here too, written down once more.

type Attribute = Nlattr<u16, Buffer>;

fn attribute(kind: u16, payload: impl Size + ToBytes) -> Attribute {
    let kind = AttrTypeBuilder::default().nla_type(kind).build().unwrap();
    NlattrBuilder::default()
        .nla_type(kind)
        .nla_payload(payload)
        .build()
        .unwrap()
}

fn raw(kind: u16, payload: &[u8]) -> Attribute {
    attribute(kind, Buffer::from(payload))
}

fn nested(kind: u16, inner: &[Attribute]) -> Attribute {
    let empty = raw(kind, &[]);
    inner
        .iter()
        .fold(empty, |outer, inner| outer.nest(inner).unwrap())
}

fn neli_encodes(command: u8, attributes: Vec<Attribute>) -> Vec<u8> {
    let message = GenlmsghdrBuilder::<u8, u16>::default()
        .cmd(command)
        .version(1)
        .attrs(attributes.into_iter().collect::<GenlBuffer<u16, Buffer>>())
        .build()
        .unwrap();
    let mut bytes = Cursor::new(Vec::new());
    message.to_bytes(&mut bytes).unwrap();
    bytes.into_inner()
}

/// The command, and the attributes in the nested attribute `kind`, as pairs of kind and value.
fn neli_decodes(payload: &[u8], kind: u16) -> (u8, Vec<(u16, Vec<u8>)>) {
    let message =
        Genlmsghdr::<u8, u16>::from_bytes_with_input(&mut Cursor::new(payload), payload.len())
            .unwrap();
    assert_eq!(*message.version(), 1);
    let outer = message.attrs().get_attr_handle();
    assert!(*outer.get_attribute(kind).unwrap().nla_type().nla_nested());
    let inner = outer.get_nested_attributes::<u16>(kind).unwrap();
    let pairs = inner
        .iter()
        .map(|a| (*a.nla_type().nla_type(), a.nla_payload().as_ref().to_vec()))
        .collect();
    (*message.cmd(), pairs)
}

fn sixteen(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => [&v4.octets()[..], &[0; 12]].concat(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn family_number(family: Family) -> u16 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

fn key_pairs(key: VirtualServerKey) -> Vec<(u16, Vec<u8>)> {
    let family = (1, family_number(key.family()).to_ne_bytes().to_vec());
    match key {
        VirtualServerKey::FirewallMark { mark, .. } => {
            vec![family, (5, mark.to_ne_bytes().to_vec())]
        }
        VirtualServerKey::Address {
            address,
            port,
            protocol,
        } => vec![
            family,
            (2, u16::from(protocol.number()).to_ne_bytes().to_vec()),
            (3, sixteen(address)),
            (4, port.to_be_bytes().to_vec()),
        ],
    }
}

fn with_nul(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

fn server_pairs(server: &VirtualServer, extra_flags: u32) -> Vec<(u16, Vec<u8>)> {
    let mut flags = extra_flags | (u32::from(server.scheduler_flags.bits()) << 3);
    if server.one_packet {
        flags |= 4;
    }
    let every_client = PersistenceMask::Prefix(server.key.family().host_prefix());
    let (mut timeout, mut mask) = (0, every_client);
    if let Some(persistence) = server.persistence {
        flags |= 1;
        timeout = persistence.timeout_s;
        mask = persistence.mask;
    }
    let netmask = match (server.key.family(), mask) {
        (Family::V4, PersistenceMask::Prefix(prefix)) => ipv4_netmask(prefix),
        (Family::V6, PersistenceMask::Prefix(prefix)) => u32::from(prefix).to_ne_bytes(),
        (_, PersistenceMask::Scattered(mask)) => mask.octets(),
    };
    let mut pairs = key_pairs(server.key);
    pairs.push((6, with_nul(server.scheduler.name())));
    if let Some(engine) = &server.persistence_engine {
        pairs.push((11, with_nul(engine)));
    }
    pairs.extend([
        (7, [flags.to_ne_bytes(), [0xff; 4]].concat()),
        (8, u32::to_ne_bytes(timeout).to_vec()),
        (9, netmask.to_vec()),
    ]);
    pairs
}

/// Bit by bit, unlike the codec.
fn ipv4_netmask(prefix: u8) -> [u8; 4] {
    let mut netmask = [0; 4];
    for bit in 0..usize::from(prefix) {
        netmask[bit / 8] |= 0x80 >> (bit % 8);
    }
    netmask
}

fn real_key_pairs(key: RealServerKey) -> Vec<(u16, Vec<u8>)> {
    vec![
        (
            11,
            family_number(Family::of(key.address))
                .to_ne_bytes()
                .to_vec(),
        ),
        (1, sixteen(key.address)),
        (2, key.port.to_be_bytes().to_vec()),
    ]
}

fn real_pairs(server: &RealServer) -> Vec<(u16, Vec<u8>)> {
    let checksum_number = |checksum| match checksum {
        TunnelChecksum::None => 0u16,
        TunnelChecksum::On => 1,
        TunnelChecksum::Remote => 2,
    };
    let (method, tunnel) = match server.forwarding {
        Forwarding::Masquerade => (0u32, None),
        Forwarding::Local => (1, None),
        Forwarding::Tunnel(Tunnel::IpIp) => (2, None),
        Forwarding::Tunnel(Tunnel::Gue { port, checksum }) => (2, Some((1u8, port, checksum))),
        Forwarding::Tunnel(Tunnel::Gre { checksum }) => (2, Some((2, 0, checksum))),
        Forwarding::DirectRoute => (3, None),
        Forwarding::Bypass => (4, None),
    };
    let mut pairs = real_key_pairs(server.key);
    pairs.push((3, method.to_ne_bytes().to_vec()));
    pairs.push((4, server.weight.to_ne_bytes().to_vec()));
    if let Some((kind, port, checksum)) = tunnel {
        pairs.push((13, vec![kind]));
        pairs.push((14, port.to_be_bytes().to_vec()));
        pairs.push((15, checksum_number(checksum).to_ne_bytes().to_vec()));
    }
    pairs.push((5, server.upper_threshold.to_ne_bytes().to_vec()));
    pairs.push((6, server.lower_threshold.to_ne_bytes().to_vec()));
    pairs
}

fn as_attributes(pairs: &[(u16, Vec<u8>)]) -> Vec<Attribute> {
    pairs
        .iter()
        .map(|(kind, value)| raw(*kind, value))
        .collect()
}

/// An attribute that no kernel has.
fn unknown() -> Attribute {
    attribute(77, 1u64)
}

fn counter_attributes() -> Attribute {
    let counters: Vec<_> = (1u16..=10)
        .map(|kind| attribute(kind, u64::from(kind) + (1 << 32)))
        .collect();
    nested(12, &counters)
}

// What proptest makes up.

fn family() -> impl Strategy<Value = Family> {
    prop_oneof![Just(Family::V4), Just(Family::V6)]
}

fn address(family: Family) -> BoxedStrategy<IpAddr> {
    match family {
        Family::V4 => any::<[u8; 4]>().prop_map(IpAddr::from).boxed(),
        Family::V6 => any::<[u8; 16]>().prop_map(IpAddr::from).boxed(),
    }
}

fn key() -> impl Strategy<Value = VirtualServerKey> {
    let by_address = (family().prop_flat_map(address), any::<u16>(), any::<u8>()).prop_map(
        |(address, port, protocol)| VirtualServerKey::Address {
            address,
            port,
            protocol: Protocol::from_number(protocol),
        },
    );
    let by_mark = (1..=u32::MAX, family())
        .prop_map(|(mark, family)| VirtualServerKey::FirewallMark { mark, family });
    prop_oneof![by_address, by_mark]
}

fn scheduler() -> impl Strategy<Value = Scheduler> {
    let names: Vec<_> = Scheduler::names().map(str::to_owned).collect();
    prop_oneof![prop::sample::select(names), "[a-z0-9_-]{1,15}"]
        .prop_map(|name| name.parse().unwrap())
}

fn virtual_server() -> impl Strategy<Value = VirtualServer> {
    key().prop_flat_map(|key| {
        let masks = match key.family() {
            Family::V4 => prop_oneof![
                (0..=32u8).prop_map(PersistenceMask::Prefix),
                any::<u32>()
                    .prop_filter("a prefix", |bits| bits.leading_ones() != bits.count_ones())
                    .prop_map(|bits| PersistenceMask::Scattered(bits.into())),
            ]
            .boxed(),
            Family::V6 => (1..=128u8).prop_map(PersistenceMask::Prefix).boxed(),
        };
        let persistence = prop::option::of((any::<u32>(), masks));
        let engine = prop::option::of("[a-z]{1,15}");
        (scheduler(), 0..8u8, persistence, any::<bool>(), engine).prop_map(
            move |(scheduler, flags, persistence, one_packet, persistence_engine)| VirtualServer {
                key,
                scheduler,
                scheduler_flags: SchedulerFlags::from_bits(flags),
                persistence: persistence.map(|(timeout_s, mask)| Persistence { timeout_s, mask }),
                one_packet,
                persistence_engine,
            },
        )
    })
}

fn forwarding() -> impl Strategy<Value = Forwarding> {
    let checksum = || {
        prop::sample::select(vec![
            TunnelChecksum::None,
            TunnelChecksum::On,
            TunnelChecksum::Remote,
        ])
    };
    prop_oneof![
        Just(Forwarding::Masquerade),
        Just(Forwarding::Local),
        Just(Forwarding::DirectRoute),
        Just(Forwarding::Bypass),
        Just(Forwarding::Tunnel(Tunnel::IpIp)),
        (any::<u16>(), checksum())
            .prop_map(|(port, checksum)| Forwarding::Tunnel(Tunnel::Gue { port, checksum })),
        checksum().prop_map(|checksum| Forwarding::Tunnel(Tunnel::Gre { checksum })),
    ]
}

fn real_server() -> impl Strategy<Value = RealServer> {
    let settings = (any::<u32>(), any::<u32>(), any::<u32>());
    let address = family().prop_flat_map(address);
    (address, any::<u16>(), forwarding(), settings).prop_map(
        |(address, port, forwarding, (weight, upper_threshold, lower_threshold))| RealServer {
            key: RealServerKey { address, port },
            forwarding,
            weight,
            upper_threshold,
            lower_threshold,
        },
    )
}

/// Whatever the bytes, the decoders come back.
fn decode_all(bytes: &[u8]) {
    drop(codec::virtual_server(bytes));
    drop(codec::real_server(bytes, Family::V4));
    drop(codec::real_server(bytes, Family::V6));
    drop(codec::timeouts(bytes));
    drop(codec::sync_daemon(bytes));
    drop(codec::info(bytes));
}

proptest! {
    #[test]
    fn virtual_servers_come_back(server in virtual_server()) {
        let entry = codec::virtual_server(&encode(&Request::AddVirtualServer(&server))).unwrap();
        prop_assert_eq!(entry, VirtualServerEntry { server, stats: Stats::default() });
    }

    #[test]
    fn real_servers_come_back(of in key(), server in real_server(), family in family()) {
        let entry = codec::real_server(&encode(&Request::AddRealServer(of, server)), family);
        prop_assert_eq!(entry.unwrap().server, server);
    }

    #[test]
    fn neli_reads_the_same_in_requests(
        server in virtual_server(),
        real in real_server(),
    ) {
        let pairs = server_pairs(&server, 0);
        prop_assert_eq!(
            neli_decodes(&encode(&Request::AddVirtualServer(&server)), 1), (1, pairs.clone())
        );
        prop_assert_eq!(
            neli_decodes(&encode(&Request::UpdateVirtualServer(&server)), 1), (2, pairs)
        );
        let key = server.key;
        for (command, request) in [
            (3, Request::RemoveVirtualServer(key)),
            (5, Request::AddRealServer(key, real)),
            (6, Request::UpdateRealServer(key, real)),
            (7, Request::RemoveRealServer(key, real.key)),
        ] {
            prop_assert_eq!(neli_decodes(&encode(&request), 1), (command, key_pairs(key)));
        }
        for (command, request) in [
            (5, Request::AddRealServer(key, real)),
            (6, Request::UpdateRealServer(key, real)),
        ] {
            prop_assert_eq!(neli_decodes(&encode(&request), 2), (command, real_pairs(&real)));
        }
        prop_assert_eq!(
            neli_decodes(&encode(&Request::RemoveRealServer(key, real.key)), 2),
            (7, real_key_pairs(real.key))
        );
    }

    #[test]
    fn answers_that_neli_writes_are_read(server in virtual_server(), real in real_server()) {
        // Flags that are the kernel's own, and one that no kernel has.
        let mut attributes = as_attributes(&server_pairs(&server, 2 | 0x8000_0000));
        attributes.insert(0, unknown());
        attributes.push(counter_attributes());
        let answer = neli_encodes(1, vec![unknown(), nested(1, &attributes)]);
        let stats = counters(1 << 32);
        prop_assert_eq!(codec::virtual_server(&answer), Ok(VirtualServerEntry { server, stats }));

        let mut attributes = as_attributes(&real_pairs(&real));
        attributes.extend([
            unknown(),
            attribute(7, 11u32),
            attribute(8, 12u32),
            attribute(9, 13u32),
            counter_attributes(),
        ]);
        let answer = neli_encodes(5, vec![nested(2, &attributes), unknown()]);
        let entry = RealServerEntry {
            server: real,
            stats,
            active_connections: 11,
            inactive_connections: 12,
            persistent_connections: 13,
        };
        prop_assert_eq!(codec::real_server(&answer, Family::V4), Ok(entry));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        decode_all(&bytes);
    }

    #[test]
    fn damaged_answers_do_not_panic(
        server in virtual_server(),
        real in real_server(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut virtual_attributes = as_attributes(&server_pairs(&server, 2));
        virtual_attributes.push(counter_attributes());
        let mut real_attributes = as_attributes(&real_pairs(&real));
        real_attributes.push(counter_attributes());
        for attribute in [nested(1, &virtual_attributes), nested(2, &real_attributes)] {
            let mut bytes = neli_encodes(1, vec![attribute]);
            for (position, value) in &damage {
                *position.get_mut(&mut bytes) = *value;
            }
            if let Some(cut) = &cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            decode_all(&bytes);
        }
    }
}
