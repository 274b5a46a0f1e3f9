//! Types to messages and back: `nfgenmsg` and attributes of nfnetlink subsystem 6.
//!
//! Public for tests and for tools that look at messages; [`crate::Client`] is what sends them.
//! Constants are those of `<linux/netfilter/ipset/ip_set.h>` unless said otherwise. Addresses,
//! ports and sizes are big-endian on the wire and carry `NLA_F_NET_BYTEORDER` when we write them;
//! the kernel leaves the flag out of listed addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipvs_proxy_netlink::{Attribute, Attributes, Error, Family, Protocol, Request, attributes};

use crate::{Counters, Entry, Options, Set, SetName, SetSpec, SetType};

const NFNL_SUBSYS_IPSET: u16 = 6; // <linux/netfilter/nfnetlink.h>
const NLA_F_NET_BYTEORDER: u16 = 1 << 14; // <linux/netlink.h>

/// `nfgenmsg` of `<linux/netfilter/nfnetlink.h>`: family, version, resource. ipset ignores the
/// family; its own tool always says `AF_INET`.
const NFGENMSG: [u8; 4] = [2, 0, 0, 0];

/// Every kernel since 2.6.39 takes version 6. Version 7 (4.20) adds only commands that we don't
/// use.
const IPSET_PROTOCOL_MIN: u8 = 6;

const IPSET_CMD_PROTOCOL: u16 = 1;
const IPSET_CMD_CREATE: u16 = 2;
const IPSET_CMD_DESTROY: u16 = 3;
const IPSET_CMD_FLUSH: u16 = 4;
const IPSET_CMD_SWAP: u16 = 6;
const IPSET_CMD_LIST: u16 = 7;
const IPSET_CMD_ADD: u16 = 9;
const IPSET_CMD_DEL: u16 = 10;
const IPSET_CMD_TEST: u16 = 11;
const IPSET_CMD_HEADER: u16 = 12;
const IPSET_CMD_TYPE: u16 = 13;

const IPSET_ATTR_PROTOCOL: u16 = 1;
const IPSET_ATTR_SETNAME: u16 = 2;
const IPSET_ATTR_TYPENAME: u16 = 3;
const IPSET_ATTR_SETNAME2: u16 = 3; // of a swap
const IPSET_ATTR_REVISION: u16 = 4;
const IPSET_ATTR_FAMILY: u16 = 5;
const IPSET_ATTR_FLAGS: u16 = 6;
const IPSET_ATTR_DATA: u16 = 7;
const IPSET_ATTR_ADT: u16 = 8;
const IPSET_ATTR_LINENO: u16 = 9;
const IPSET_ATTR_REVISION_MIN: u16 = 10;

const IPSET_ATTR_IP: u16 = 1;
const IPSET_ATTR_CIDR: u16 = 3;
const IPSET_ATTR_PORT: u16 = 4;
const IPSET_ATTR_PORT_TO: u16 = 5;
const IPSET_ATTR_TIMEOUT: u16 = 6;
const IPSET_ATTR_PROTO: u16 = 7;
const IPSET_ATTR_CADT_FLAGS: u16 = 8;
const IPSET_ATTR_MARKMASK: u16 = 11;
const IPSET_ATTR_BITMASK: u16 = 12;
const IPSET_ATTR_HASHSIZE: u16 = 18;
const IPSET_ATTR_MAXELEM: u16 = 19;
const IPSET_ATTR_NETMASK: u16 = 20;
const IPSET_ATTR_ELEMENTS: u16 = 24;
const IPSET_ATTR_REFERENCES: u16 = 25;
// The numbers of entries and of set headers overlap from here on.
const IPSET_ATTR_IP2: u16 = 20;
const IPSET_ATTR_CIDR2: u16 = 21;
const IPSET_ATTR_BYTES: u16 = 24;
const IPSET_ATTR_PACKETS: u16 = 25;
const IPSET_ATTR_SKBMARK: u16 = 27;
const IPSET_ATTR_SKBPRIO: u16 = 28;
const IPSET_ATTR_SKBQUEUE: u16 = 29;

const IPSET_ATTR_IPADDR_IPV4: u16 = 1;
const IPSET_ATTR_IPADDR_IPV6: u16 = 2;

const IPSET_FLAG_LIST_HEADER: u32 = 1 << 2;

// In IPSET_ATTR_CADT_FLAGS
const IPSET_FLAG_NOMATCH: u32 = 1 << 2;
const IPSET_FLAG_WITH_COUNTERS: u32 = 1 << 3;
const IPSET_FLAG_WITH_SKBINFO: u32 = 1 << 6;

pub(crate) const IPSET_ERR_FIND_TYPE: i32 = 4098;
pub(crate) const IPSET_ERR_BUSY: i32 = 4100;
pub(crate) const IPSET_ERR_EXIST_SETNAME2: i32 = 4101;
pub(crate) const IPSET_ERR_EXIST: i32 = 4103;
pub(crate) const IPSET_ERR_REFERENCED: i32 = 4108;
pub(crate) const IPSET_ERR_TYPE_SPECIFIC: i32 = 4352;
pub(crate) const IPSET_ERR_HASH_FULL: i32 = IPSET_ERR_TYPE_SPECIFIC; // ip_set_hash.h

/// The constant of one of ipset's own error codes; those from 4352 as the hash types use them
/// (`<linux/netfilter/ipset/ip_set_hash.h>`).
pub(crate) fn private_error_name(code: i32) -> Option<&'static str> {
    Some(match code {
        4097 => "IPSET_ERR_PROTOCOL",
        4098 => "IPSET_ERR_FIND_TYPE",
        4099 => "IPSET_ERR_MAX_SETS",
        4100 => "IPSET_ERR_BUSY",
        4101 => "IPSET_ERR_EXIST_SETNAME2",
        4102 => "IPSET_ERR_TYPE_MISMATCH",
        4103 => "IPSET_ERR_EXIST",
        4104 => "IPSET_ERR_INVALID_CIDR",
        4105 => "IPSET_ERR_INVALID_NETMASK",
        4106 => "IPSET_ERR_INVALID_FAMILY",
        4107 => "IPSET_ERR_TIMEOUT",
        4108 => "IPSET_ERR_REFERENCED",
        4109 => "IPSET_ERR_IPADDR_IPV4",
        4110 => "IPSET_ERR_IPADDR_IPV6",
        4111 => "IPSET_ERR_COUNTER",
        4112 => "IPSET_ERR_COMMENT",
        4113 => "IPSET_ERR_INVALID_MARKMASK",
        4114 => "IPSET_ERR_SKBINFO",
        4352 => "IPSET_ERR_HASH_FULL",
        4353 => "IPSET_ERR_HASH_ELEM",
        4354 => "IPSET_ERR_INVALID_PROTO",
        4355 => "IPSET_ERR_MISSING_PROTO",
        4356 => "IPSET_ERR_HASH_RANGE_UNSUPPORTED",
        4357 => "IPSET_ERR_HASH_RANGE",
        _ => return None,
    })
}

/// The revision of a type that we ask for, where the kernel has it: the lowest with what the set
/// shall have.
///
/// Higher ones add options that we don't use, and an older `ipset` tool can't list a set whose
/// revision it doesn't know. Revision 1 of the types with a port brought SCTP; the tool does not
/// know revision 0 of them. Those of the types with a network here brought `nomatch`, without
/// which the tool prints an exception as if it were none.
#[must_use]
pub fn revision(spec: &SetSpec) -> u8 {
    let (plain, counters, skbinfo) = match spec.kind {
        SetType::HashIp(_) => (0, 1, 4),
        SetType::HashIpPort(_) | SetType::HashIpPortIp(_) => (1, 2, 5),
        SetType::HashIpPortNet(_) => (3, 4, 7),
        SetType::HashNet(_) => (2, 3, 6),
        SetType::BitmapPort => (0, 1, 3),
    };
    match spec {
        SetSpec { skbinfo: true, .. } => skbinfo,
        SetSpec { counters: true, .. } => counters,
        _ => plain,
    }
}

fn request(command: u16, write: impl FnOnce(&mut Attributes)) -> Result<Request, Error> {
    let mut attributes = Attributes::after(&NFGENMSG);
    attributes.push_u8(IPSET_ATTR_PROTOCOL, IPSET_PROTOCOL_MIN);
    write(&mut attributes);
    // Without NLM_F_EXCL the kernel accepts what is there or gone already.
    Ok(Request {
        kind: NFNL_SUBSYS_IPSET << 8 | command,
        flags: 0,
        payload: attributes.finish()?,
    })
}

fn push_name(attributes: &mut Attributes, name: &SetName) {
    attributes.push_str(IPSET_ATTR_SETNAME, name.as_str());
}

fn family_number(kind: SetType) -> u8 {
    kind.family().map_or(0, Family::number) // NFPROTO_UNSPEC
}

/// Asks for the protocol versions (`IPSET_CMD_PROTOCOL`).
///
/// # Errors
///
/// [`Error::TooLong`], never for what the types of this crate can hold; so for all below.
pub fn protocol() -> Result<Request, Error> {
    request(IPSET_CMD_PROTOCOL, |_| {})
}

/// Asks for the revisions of a type (`IPSET_CMD_TYPE`); the kernel loads its module.
///
/// # Errors
///
/// See [`protocol`].
pub fn set_type(kind: SetType) -> Result<Request, Error> {
    request(IPSET_CMD_TYPE, |a| {
        a.push_str(IPSET_ATTR_TYPENAME, kind.name());
        a.push_u8(IPSET_ATTR_FAMILY, family_number(kind));
    })
}

/// Asks for a set's name, type and family alone (`IPSET_CMD_HEADER`). [`decode_list`] reads the
/// answer.
///
/// # Errors
///
/// See [`protocol`].
pub fn header(name: &SetName) -> Result<Request, Error> {
    request(IPSET_CMD_HEADER, |a| push_name(a, name))
}

/// Creates a set (`IPSET_CMD_CREATE`).
///
/// # Errors
///
/// See [`protocol`].
pub fn create(spec: &SetSpec, revision: u8) -> Result<Request, Error> {
    request(IPSET_CMD_CREATE, |a| {
        push_name(a, &spec.name);
        a.push_str(IPSET_ATTR_TYPENAME, spec.kind.name());
        a.push_u8(IPSET_ATTR_REVISION, revision);
        a.push_u8(IPSET_ATTR_FAMILY, family_number(spec.kind));
        a.nested(IPSET_ATTR_DATA, |data| {
            match spec.kind {
                SetType::BitmapPort => {
                    data.push_u16_be(IPSET_ATTR_PORT | NLA_F_NET_BYTEORDER, 0);
                    data.push_u16_be(IPSET_ATTR_PORT_TO | NLA_F_NET_BYTEORDER, u16::MAX);
                }
                _ => {
                    data.push_u32_be(IPSET_ATTR_HASHSIZE | NLA_F_NET_BYTEORDER, spec.hash_size);
                    data.push_u32_be(IPSET_ATTR_MAXELEM | NLA_F_NET_BYTEORDER, spec.max_elements);
                }
            }
            let counters = u32::from(spec.counters) * IPSET_FLAG_WITH_COUNTERS;
            let skbinfo = u32::from(spec.skbinfo) * IPSET_FLAG_WITH_SKBINFO;
            push_flags(data, counters | skbinfo);
        });
    })
}

fn push_flags(data: &mut Attributes, flags: u32) {
    if flags != 0 {
        data.push_u32_be(IPSET_ATTR_CADT_FLAGS | NLA_F_NET_BYTEORDER, flags);
    }
}

/// Destroys a set (`IPSET_CMD_DESTROY`).
///
/// # Errors
///
/// See [`protocol`].
pub fn destroy(name: &SetName) -> Result<Request, Error> {
    request(IPSET_CMD_DESTROY, |a| push_name(a, name))
}

/// Removes all entries of a set (`IPSET_CMD_FLUSH`).
///
/// # Errors
///
/// See [`protocol`].
pub fn flush(name: &SetName) -> Result<Request, Error> {
    request(IPSET_CMD_FLUSH, |a| push_name(a, name))
}

/// Exchanges two sets (`IPSET_CMD_SWAP`).
///
/// # Errors
///
/// See [`protocol`].
pub fn swap(name: &SetName, other: &SetName) -> Result<Request, Error> {
    request(IPSET_CMD_SWAP, |a| {
        push_name(a, name);
        a.push_str(IPSET_ATTR_SETNAME2, other.as_str());
    })
}

/// Asks whether an entry is in a set (`IPSET_CMD_TEST`).
///
/// # Errors
///
/// See [`protocol`].
pub fn test(name: &SetName, entry: &Entry) -> Result<Request, Error> {
    request(IPSET_CMD_TEST, |a| {
        push_name(a, name);
        a.nested(IPSET_ATTR_DATA, |data| push_entry(data, entry));
    })
}

/// Adds entries with their options (`IPSET_CMD_ADD`). The kernel stops at the first that it
/// refuses.
///
/// # Errors
///
/// See [`protocol`]; here for more than about 400 entries.
pub fn add<'a>(
    name: &SetName,
    entries: impl IntoIterator<Item = (&'a Entry, Options)>,
) -> Result<Request, Error> {
    change_entries(IPSET_CMD_ADD, name, entries)
}

/// Removes entries (`IPSET_CMD_DEL`). The kernel stops at the first that it refuses.
///
/// # Errors
///
/// See [`add`].
pub fn remove<'a>(
    name: &SetName,
    entries: impl IntoIterator<Item = &'a Entry>,
) -> Result<Request, Error> {
    let plain = entries.into_iter().map(|e| (e, Options::default()));
    change_entries(IPSET_CMD_DEL, name, plain)
}

fn change_entries<'a>(
    command: u16,
    name: &SetName,
    entries: impl IntoIterator<Item = (&'a Entry, Options)>,
) -> Result<Request, Error> {
    request(command, |a| {
        push_name(a, name);
        a.nested(IPSET_ATTR_ADT, |list| {
            for (entry, options) in entries {
                list.nested(IPSET_ATTR_DATA, |data| {
                    push_entry(data, entry);
                    push_options(data, &options);
                });
            }
        });
        // A list must come with a line number. Entries without numbers of their own get an
        // ordinary refusal, in place of one that repeats the whole request.
        a.push_u32(IPSET_ATTR_LINENO, 0);
    })
}

fn push_entry(data: &mut Attributes, entry: &Entry) {
    match *entry {
        Entry::Ip(ip) => push_ip(data, IPSET_ATTR_IP, ip),
        Entry::IpPort(ip, protocol, port) => push_ip_port(data, ip, protocol, port),
        Entry::IpPortIp(ip, protocol, port, ip2) => {
            push_ip_port(data, ip, protocol, port);
            push_ip(data, IPSET_ATTR_IP2, ip2);
        }
        Entry::IpPortNet(ip, protocol, port, net, prefix) => {
            push_ip_port(data, ip, protocol, port);
            push_ip(data, IPSET_ATTR_IP2, net);
            data.push_u8(IPSET_ATTR_CIDR2, prefix);
        }
        Entry::Net(net, prefix) => {
            push_ip(data, IPSET_ATTR_IP, net);
            data.push_u8(IPSET_ATTR_CIDR, prefix);
        }
        Entry::Port(port) => data.push_u16_be(IPSET_ATTR_PORT | NLA_F_NET_BYTEORDER, port),
    }
}

/// Writes what is not 0: the kernel refuses an extension that the set has not.
fn push_options(data: &mut Attributes, options: &Options) {
    push_flags(data, u32::from(options.nomatch) * IPSET_FLAG_NOMATCH);
    let mut push_u64_be = |kind, value: u64| {
        data.push_bytes(kind | NLA_F_NET_BYTEORDER, &value.to_be_bytes());
    };
    if let Some(Counters { packets, bytes }) = options.counters {
        push_u64_be(IPSET_ATTR_PACKETS, packets);
        push_u64_be(IPSET_ATTR_BYTES, bytes);
    }
    let info = &options.skbinfo;
    if (info.mark, info.mask) != (0, 0) {
        let both = u64::from(info.mark) << 32 | u64::from(info.mask);
        push_u64_be(IPSET_ATTR_SKBMARK, both);
    }
    if info.priority != (0, 0) {
        let (major, minor) = info.priority;
        let both = u32::from(major) << 16 | u32::from(minor);
        data.push_u32_be(IPSET_ATTR_SKBPRIO | NLA_F_NET_BYTEORDER, both);
    }
    if info.queue != 0 {
        data.push_u16_be(IPSET_ATTR_SKBQUEUE | NLA_F_NET_BYTEORDER, info.queue);
    }
}

fn push_ip_port(data: &mut Attributes, ip: IpAddr, protocol: Protocol, port: u16) {
    push_ip(data, IPSET_ATTR_IP, ip);
    data.push_u16_be(IPSET_ATTR_PORT | NLA_F_NET_BYTEORDER, port);
    data.push_u8(IPSET_ATTR_PROTO, protocol.number());
}

fn push_ip(data: &mut Attributes, kind: u16, ip: IpAddr) {
    data.nested(kind, |a| match ip {
        IpAddr::V4(ip) => a.push_bytes(IPSET_ATTR_IPADDR_IPV4 | NLA_F_NET_BYTEORDER, &ip.octets()),
        IpAddr::V6(ip) => a.push_bytes(IPSET_ATTR_IPADDR_IPV6 | NLA_F_NET_BYTEORDER, &ip.octets()),
    });
}

/// Lists one set or all, with or without entries (`IPSET_CMD_LIST`); a dump.
///
/// # Errors
///
/// See [`protocol`].
pub fn list(name: Option<&SetName>, with_entries: bool) -> Result<Request, Error> {
    request(IPSET_CMD_LIST, |a| {
        if let Some(name) = name {
            push_name(a, name);
        }
        if !with_entries {
            a.push_u32_be(
                IPSET_ATTR_FLAGS | NLA_F_NET_BYTEORDER,
                IPSET_FLAG_LIST_HEADER,
            );
        }
    })
}

/// The attributes behind `nfgenmsg`.
fn body(payload: &[u8]) -> Result<impl Iterator<Item = Result<Attribute<'_>, Error>>, Error> {
    let body = payload
        .get(NFGENMSG.len()..)
        .ok_or(Error::Decode("nfgenmsg cut short"))?;
    Ok(attributes(body))
}

/// Reads the answer to [`set_type`]: the lowest and the highest revision that the kernel has.
///
/// # Errors
///
/// [`Error::Decode`] when the answer does not have that form.
pub fn decode_set_type(payload: &[u8]) -> Result<(u8, u8), Error> {
    let (mut lowest, mut highest) = (None, None);
    for attribute in body(payload)? {
        let attribute = attribute?;
        match attribute.kind {
            IPSET_ATTR_REVISION => highest = Some(attribute.u8()?),
            IPSET_ATTR_REVISION_MIN => lowest = Some(attribute.u8()?),
            _ => {}
        }
    }
    let highest = highest.ok_or(Error::Decode("set type without revision"))?;
    Ok((lowest.unwrap_or(highest), highest))
}

/// Reads the answers to [`list`] or [`header()`]. Entries come only of sets whose [`Set::kind`] is known. A set
/// whose name no [`SetName`] can hold is left out. Unknown attributes are skipped.
///
/// # Errors
///
/// [`Error::Decode`] when an answer does not have that form.
pub fn decode_list<P: AsRef<[u8]>>(payloads: &[P]) -> Result<Vec<(Set, Vec<Member>)>, Error> {
    let mut sets: Vec<(Set, Vec<Member>)> = Vec::new();
    for payload in payloads {
        let part = Part::decode(payload.as_ref())?;
        let Ok(name) = part.name.parse::<SetName>() else {
            continue;
        };
        // Only the first message of a set has its header, the others more entries.
        if let Some(type_name) = part.type_name {
            sets.push((part.header(name, type_name)?, Vec::new()));
        }
        let Some((set, entries)) = sets.last_mut().filter(|(set, _)| set.name == name) else {
            continue;
        };
        if let (Some(kind), Some(list)) = (set.kind, part.entries) {
            for data in list.nested() {
                entries.push(decode_entry(kind, &data?)?);
            }
        }
    }
    Ok(sets)
}

/// An entry of a listing.
pub type Member = (Entry, Options);

/// One message of a listing.
#[derive(Default)]
struct Part<'a> {
    name: &'a str,
    type_name: Option<&'a str>,
    family: u8,
    revision: u8,
    data: Option<Attribute<'a>>,
    entries: Option<Attribute<'a>>,
}

impl<'a> Part<'a> {
    fn decode(payload: &'a [u8]) -> Result<Part<'a>, Error> {
        let mut part = Part::default();
        for attribute in body(payload)? {
            let attribute = attribute?;
            match attribute.kind {
                IPSET_ATTR_SETNAME => part.name = attribute.str().unwrap_or_default(),
                IPSET_ATTR_TYPENAME => part.type_name = Some(attribute.str()?),
                IPSET_ATTR_FAMILY => part.family = attribute.u8()?,
                IPSET_ATTR_REVISION => part.revision = attribute.u8()?,
                IPSET_ATTR_DATA => part.data = Some(attribute),
                IPSET_ATTR_ADT => part.entries = Some(attribute),
                _ => {}
            }
        }
        Ok(part)
    }

    fn header(&self, name: SetName, type_name: &str) -> Result<Set, Error> {
        let family = Family::from_number(self.family);
        let mut set = Set {
            name,
            type_name: type_name.to_owned(),
            family,
            kind: SetType::of(type_name, family),
            revision: self.revision,
            hash_size: 0,
            max_elements: 0,
            timeout_s: None,
            counters: false,
            skbinfo: false,
            references: 0,
            entries: None,
        };
        let mut ports = (0, u16::MAX);
        let mut has_options = false;
        for attribute in self.data.iter().flat_map(Attribute::nested) {
            let attribute = attribute?;
            match attribute.kind {
                IPSET_ATTR_HASHSIZE => set.hash_size = attribute.u32_be()?,
                IPSET_ATTR_MAXELEM => set.max_elements = attribute.u32_be()?,
                IPSET_ATTR_REFERENCES => set.references = attribute.u32_be()?,
                IPSET_ATTR_ELEMENTS => set.entries = Some(attribute.u32_be()?),
                IPSET_ATTR_PORT => ports.0 = attribute.u16_be()?,
                IPSET_ATTR_PORT_TO => ports.1 = attribute.u16_be()?,
                IPSET_ATTR_TIMEOUT => set.timeout_s = Some(attribute.u32_be()?),
                IPSET_ATTR_CADT_FLAGS => {
                    let flags = attribute.u32_be()?;
                    set.counters = flags & IPSET_FLAG_WITH_COUNTERS != 0;
                    set.skbinfo = flags & IPSET_FLAG_WITH_SKBINFO != 0;
                    has_options |=
                        flags & !(IPSET_FLAG_WITH_COUNTERS | IPSET_FLAG_WITH_SKBINFO) != 0;
                }
                IPSET_ATTR_MARKMASK | IPSET_ATTR_BITMASK | IPSET_ATTR_NETMASK => has_options = true,
                _ => {}
            }
        }
        if has_options || set.timeout_s.is_some() || ports != (0, u16::MAX) {
            set.kind = None;
        }
        Ok(set)
    }
}

fn decode_entry(kind: SetType, data: &Attribute<'_>) -> Result<Member, Error> {
    let (mut ip, mut ip2, mut port, mut protocol) = (None, None, None, None);
    let mut prefix = None;
    let mut options = Options::default();
    let info = &mut options.skbinfo;
    for attribute in data.nested() {
        let attribute = attribute?;
        match attribute.kind {
            IPSET_ATTR_IP => ip = Some(decode_ip(&attribute)?),
            IPSET_ATTR_IP2 => ip2 = Some(decode_ip(&attribute)?),
            IPSET_ATTR_PORT => port = Some(attribute.u16_be()?),
            IPSET_ATTR_PROTO => protocol = Some(Protocol::from_number(attribute.u8()?)),
            IPSET_ATTR_CIDR | IPSET_ATTR_CIDR2 => prefix = Some(attribute.u8()?),
            IPSET_ATTR_CADT_FLAGS => {
                options.nomatch = attribute.u32_be()? & IPSET_FLAG_NOMATCH != 0;
            }
            IPSET_ATTR_PACKETS => {
                options.counters.get_or_insert_default().packets = u64_be(&attribute)?;
            }
            IPSET_ATTR_BYTES => {
                options.counters.get_or_insert_default().bytes = u64_be(&attribute)?;
            }
            IPSET_ATTR_SKBMARK => {
                let [a, b, c, d, e, f, g, h] = u64_be(&attribute)?.to_be_bytes();
                info.mark = u32::from_be_bytes([a, b, c, d]);
                info.mask = u32::from_be_bytes([e, f, g, h]);
            }
            IPSET_ATTR_SKBPRIO => {
                let [a, b, c, d] = attribute.u32_be()?.to_be_bytes();
                info.priority = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            }
            IPSET_ATTR_SKBQUEUE => info.queue = attribute.u16_be()?,
            _ => {}
        }
    }
    let net_prefix = |net| prefix.unwrap_or(Family::of(net).host_prefix());
    let entry = match kind {
        SetType::HashIp(_) => ip.map(Entry::Ip),
        SetType::HashIpPort(_) => ip
            .zip(protocol)
            .zip(port)
            .map(|((ip, protocol), port)| Entry::IpPort(ip, protocol, port)),
        SetType::HashIpPortIp(_) => ip
            .zip(protocol)
            .zip(port.zip(ip2))
            .map(|((ip, protocol), (port, ip2))| Entry::IpPortIp(ip, protocol, port, ip2)),
        SetType::HashIpPortNet(_) => {
            ip.zip(protocol)
                .zip(port.zip(ip2))
                .map(|((ip, protocol), (port, net))| {
                    Entry::IpPortNet(ip, protocol, port, net, net_prefix(net))
                })
        }
        SetType::HashNet(_) => ip.map(|net| Entry::Net(net, net_prefix(net))),
        SetType::BitmapPort => port.map(Entry::Port),
    };
    let entry = entry.ok_or(Error::Decode("set entry without one of its fields"))?;
    Ok((entry, options))
}

fn u64_be(attribute: &Attribute<'_>) -> Result<u64, Error> {
    let bytes = attribute.value.try_into();
    bytes
        .map(u64::from_be_bytes)
        .map_err(|_| Error::Decode("64-bit value of an unexpected length"))
}

fn decode_ip(attribute: &Attribute<'_>) -> Result<IpAddr, Error> {
    for address in attribute.nested() {
        let address = address?;
        let wrong_length = |_| Error::Decode("address of an unexpected length");
        match address.kind {
            IPSET_ATTR_IPADDR_IPV4 => {
                let octets: [u8; 4] = address.value.try_into().map_err(wrong_length)?;
                return Ok(Ipv4Addr::from(octets).into());
            }
            IPSET_ATTR_IPADDR_IPV6 => {
                let octets: [u8; 16] = address.value.try_into().map_err(wrong_length)?;
                return Ok(Ipv6Addr::from(octets).into());
            }
            _ => {}
        }
    }
    Err(Error::Decode("address attribute without an address"))
}
