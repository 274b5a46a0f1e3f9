//! What the processes of a network namespace ask of the kernel by netlink, seen from outside: the kernel's own tap (`nlmon`) shows
//! every message, whoever sends it and by whatever library.
//!
//! Not seen: legacy iptables, which speaks by socket options, and files. [`strace`](crate::strace) sees the start of its tools and
//! what is opened.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use ipvs_proxy_netlink::{Attribute, Socket, Subsystem, attributes};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
    sockopt::RcvBufForce,
};

use crate::daemon::wait_until;
use crate::netns::Namespace;

const QUIET: Duration = Duration::from_secs(1);
const ARPHRD_NETLINK: u16 = 824; // <linux/if_arp.h>
const NLM_F_REQUEST: u16 = 1; // <linux/netlink.h>
const NETLINK_ROUTE: u16 = 0; // <linux/netlink.h>, as the next three
const NETLINK_SOCK_DIAG: u16 = 4;
const NETLINK_NETFILTER: u16 = 12;
const NETLINK_GENERIC: u16 = 16;
const GENL_ID_CTRL: u16 = 16; // <linux/genetlink.h>

/// The commands of IPVS by number (`enum` of `<linux/ip_vs.h>`); those that start with GET read.
const IPVS: [&str; 18] = [
    "UNSPEC",
    "NEW_SERVICE",
    "SET_SERVICE",
    "DEL_SERVICE",
    "GET_SERVICE",
    "NEW_DEST",
    "SET_DEST",
    "DEL_DEST",
    "GET_DEST",
    "NEW_DAEMON",
    "DEL_DAEMON",
    "GET_DAEMON",
    "SET_CONFIG",
    "GET_CONFIG",
    "SET_INFO",
    "GET_INFO",
    "ZERO",
    "FLUSH",
];
/// The commands of ipset (`enum ipset_cmd` of `<linux/netfilter/ipset/ip_set.h>`).
const IPSET: [&str; 16] = [
    "NONE",
    "PROTOCOL",
    "CREATE",
    "DESTROY",
    "FLUSH",
    "RENAME",
    "SWAP",
    "LIST",
    "SAVE",
    "ADD",
    "DEL",
    "TEST",
    "HEADER",
    "TYPE",
    "GET_BYNAME",
    "GET_BYINDEX",
];
const IPSET_READS: [u8; 8] = [1, 7, 8, 11, 12, 13, 14, 15];
/// The commands of nf_tables that read (`enum nf_tables_msg_types` of `<linux/netfilter/nf_tables.h>`).
const NFT_READS: [u8; 8] = [1, 4, 7, 10, 13, 16, 19, 23];

/// One request of a process to the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Asked {
    /// Whether it asks for a change. What is not known to read counts as one.
    pub writes: bool,
    /// What it asks for, as in `ipvs SET_DEST 10.96.0.1:80 10.0.0.2:8080 weight 0`.
    pub text: String,
}

/// A tap on a network namespace.
#[derive(Debug)]
pub struct Tap {
    socket: OwnedFd,
    ipvs: u16,
}

impl Tap {
    /// Makes the link `nlmon0` in the namespace and listens on it.
    pub fn new(namespace: &Namespace) -> Self {
        namespace.tool_with_input(
            "ip -batch -",
            "link add nlmon0 type nlmon\nlink set nlmon0 up\n",
        );
        let (socket, ipvs) = namespace.enter(|| {
            let socket = socket(
                AddressFamily::Packet,
                SockType::Datagram,
                SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
                SockProtocol::EthAll,
            )
            .expect("a packet socket");
            setsockopt(&socket, RcvBufForce, &(64 << 20)).expect("a buffer for all of it");
            let ipvs =
                Socket::open(Subsystem::Generic).and_then(|mut socket| socket.family("IPVS"));
            (socket, ipvs.expect("IPVS in the kernel"))
        });
        let tap = Self { socket, ipvs };
        tap.take(); // the question above
        tap
    }

    /// What was asked since the last call, in order.
    pub fn take(&self) -> Vec<Asked> {
        let mut asked = Vec::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), &mut buffer) {
                Ok((length, Some(from))) if from.hatype() == ARPHRD_NETLINK => {
                    let messages = buffer.get(..length).unwrap_or_default();
                    asked.extend(self.read(u16::from_be(from.protocol()), messages));
                }
                Ok(_) => {} // traffic of the namespace's other links
                Err(Errno::EAGAIN) => return asked,
                Err(error) => panic!("reading nlmon0: {error}"),
            }
        }
    }

    /// Waits until something that contains this text was asked, and then nothing more for a second. All of it, in order.
    pub fn until(&self, text: &str) -> Vec<Asked> {
        let mut all = Vec::new();
        let mut last = Instant::now();
        wait_until(&format!("{text:?} is asked, and then no more"), || {
            let new = self.take();
            // The daemon looks at what costs nothing to read each second.
            if new.iter().any(|asked| asked.writes) {
                last = Instant::now();
            }
            all.extend(new);
            last.elapsed() > QUIET && all.iter().any(|asked: &Asked| asked.text.contains(text))
        });
        all
    }

    /// The requests among the messages of one datagram. Answers and news of the kernel are left out.
    fn read(&self, protocol: u16, mut bytes: &[u8]) -> Vec<Asked> {
        let mut asked = Vec::new();
        // struct nlmsghdr: length, type, flags, sequence number, sender
        while let Some((header, _)) = bytes.split_first_chunk::<16>() {
            let [a, b, c, d, type_low, type_high, flags_low, flags_high, ..] = *header;
            let length = usize::try_from(u32::from_ne_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            let kind = u16::from_ne_bytes([type_low, type_high]);
            let flags = u16::from_ne_bytes([flags_low, flags_high]);
            // NLMSG_OK: some senders, such as ip, send their whole buffer.
            let Some(payload) = bytes.get(16..length) else {
                break;
            };
            if flags & NLM_F_REQUEST != 0 {
                asked.push(self.asked(protocol, kind, payload));
            }
            bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        asked
    }

    fn asked(&self, protocol: u16, kind: u16, payload: &[u8]) -> Asked {
        let [subsystem, command] = kind.to_be_bytes();
        let asked = |writes, text: String| Asked { writes, text };
        match (protocol, kind) {
            (NETLINK_GENERIC, kind) if kind == self.ipvs => ipvs(payload),
            (NETLINK_GENERIC, GENL_ID_CTRL) => asked(false, "generic".to_owned()),
            (NETLINK_SOCK_DIAG, _) => asked(false, "socket diagnosis".to_owned()),
            // Each object has four: new, delete, get, set (RTM_BASE = 16, <linux/rtnetlink.h>).
            (NETLINK_ROUTE, 16..) => asked(kind % 4 != 2, format!("route {kind}")),
            (NETLINK_NETFILTER, _) => match subsystem {
                1 => asked(
                    command % 3 == 0 || command == 2,
                    format!("conntrack {command}"),
                ),
                6 => ipset(command, payload),
                10 => asked(!NFT_READS.contains(&command), format!("nftables {command}")),
                11 => asked(false, "nftables compatibility".to_owned()),
                _ => asked(true, format!("netfilter {subsystem} {command}")),
            },
            _ => asked(true, format!("protocol {protocol} message {kind}")),
        }
    }
}

type Found<'a> = BTreeMap<u16, Attribute<'a>>;

/// The attributes behind a fixed header of four bytes.
fn found(payload: &[u8]) -> Found<'_> {
    let body = payload.get(4..).unwrap_or_default();
    attributes(body)
        .filter_map(Result::ok)
        .map(|attribute| (attribute.kind, attribute))
        .collect()
}

fn inner<'a>(of: Option<&Attribute<'a>>) -> Found<'a> {
    let nested = of.into_iter().flat_map(Attribute::nested);
    nested
        .filter_map(Result::ok)
        .map(|attribute| (attribute.kind, attribute))
        .collect()
}

fn ipvs(payload: &[u8]) -> Asked {
    let command = payload.first().copied().unwrap_or_default();
    let name = IPVS.get(usize::from(command)).copied().unwrap_or("UNKNOWN");
    let attributes = found(payload);
    let mut text = format!("ipvs {name}");
    // IPVS_CMD_ATTR_SERVICE with IPVS_SVC_ATTR_AF, _ADDR, _PORT, _FWMARK
    let server = inner(attributes.get(&1));
    let v6 = server.get(&1).and_then(|family| family.u16().ok()) == Some(10);
    if let Some(mark) = server.get(&5).and_then(|mark| mark.u32().ok()) {
        text.push_str(&format!(" mark {mark}"));
    } else if let (Some(address), Some(port)) = (server.get(&3), server.get(&4)) {
        text.push_str(&socket_address(v6, address, port));
    }
    // IPVS_CMD_ATTR_DEST with IPVS_DEST_ATTR_ADDR, _PORT, _WEIGHT
    let real = inner(attributes.get(&2));
    if let (Some(address), Some(port)) = (real.get(&1), real.get(&2)) {
        text.push_str(&socket_address(v6, address, port));
    }
    if let Some(weight) = real.get(&4).and_then(|weight| weight.u32().ok()) {
        text.push_str(&format!(" weight {weight}"));
    }
    Asked {
        writes: !name.starts_with("GET"),
        text,
    }
}

fn socket_address(v6: bool, address: &Attribute<'_>, port: &Attribute<'_>) -> String {
    let bytes: Option<[u8; 16]> = address.value.try_into().ok();
    let ip = match bytes {
        Some(bytes) if v6 => IpAddr::from(bytes),
        Some([a, b, c, d, ..]) => IpAddr::from([a, b, c, d]),
        None => return " ?".to_owned(),
    };
    port.u16_be().map_or_else(
        |_| " ?".to_owned(),
        |port| format!(" {}", std::net::SocketAddr::new(ip, port)),
    )
}

fn ipset(command: u8, payload: &[u8]) -> Asked {
    let name = IPSET
        .get(usize::from(command))
        .copied()
        .unwrap_or("UNKNOWN");
    let attributes = found(payload);
    let mut text = format!("ipset {name}");
    // IPSET_ATTR_SETNAME
    if let Some(set) = attributes.get(&2).and_then(|set| set.str().ok()) {
        text.push_str(&format!(" {set}"));
    }
    // IPSET_ATTR_ADT, a list, where there is more than one entry
    let entries = attributes.get(&8).map_or(0, |list| list.nested().count());
    if entries > 1 {
        text.push_str(&format!(" {entries} entries"));
    }
    Asked {
        writes: !IPSET_READS.contains(&command),
        text,
    }
}
