//! Sets and their entries, as plain values.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipvs_proxy_netlink::{Family, Protocol};

/// A set's name: 1 to 31 bytes (`IPSET_MAXNAMELEN` of `<linux/netfilter/ipset/ip_set.h>` is 32
/// with the closing NUL).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetName([u8; 32]);

/// A name that no set can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("set name {0:?} is not 1 to 31 printable bytes without blanks")]
pub struct InvalidSetName(pub String);

impl SetName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let length = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        self.0
            .get(..length)
            .and_then(|name| std::str::from_utf8(name).ok())
            .unwrap_or("")
    }
}

impl FromStr for SetName {
    type Err = InvalidSetName;

    fn from_str(name: &str) -> Result<SetName, InvalidSetName> {
        let mut bytes = [0; 32];
        match bytes.get_mut(..name.len()) {
            Some(start)
                if (1..=31).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic()) =>
            {
                start.copy_from_slice(name.as_bytes());
                Ok(SetName(bytes))
            }
            _ => Err(InvalidSetName(name.to_owned())),
        }
    }
}

impl fmt::Display for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// What a set holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetType {
    /// `hash:ip`.
    HashIp(Family),
    /// `hash:ip,port`.
    HashIpPort(Family),
    /// `hash:ip,port,ip`.
    HashIpPortIp(Family),
    /// `hash:ip,port,net`.
    HashIpPortNet(Family),
    /// `hash:net`.
    HashNet(Family),
    /// `bitmap:port`, range 0 to 65535.
    BitmapPort,
}

impl SetType {
    /// The type's name, as `ipset list` prints it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SetType::HashIp(_) => "hash:ip",
            SetType::HashIpPort(_) => "hash:ip,port",
            SetType::HashIpPortIp(_) => "hash:ip,port,ip",
            SetType::HashIpPortNet(_) => "hash:ip,port,net",
            SetType::HashNet(_) => "hash:net",
            SetType::BitmapPort => "bitmap:port",
        }
    }

    /// The type with this name and family, `None` for one that this crate can't fill.
    #[must_use]
    pub fn of(name: &str, family: Option<Family>) -> Option<SetType> {
        match (name, family) {
            ("hash:ip", Some(f)) => Some(SetType::HashIp(f)),
            ("hash:ip,port", Some(f)) => Some(SetType::HashIpPort(f)),
            ("hash:ip,port,ip", Some(f)) => Some(SetType::HashIpPortIp(f)),
            ("hash:ip,port,net", Some(f)) => Some(SetType::HashIpPortNet(f)),
            ("hash:net", Some(f)) => Some(SetType::HashNet(f)),
            ("bitmap:port", None) => Some(SetType::BitmapPort),
            _ => None,
        }
    }

    /// The kernel module that has the type, as `modprobe` takes it.
    #[must_use]
    pub fn module(self) -> &'static str {
        match self {
            SetType::HashIp(_) => "ip_set_hash_ip",
            SetType::HashIpPort(_) => "ip_set_hash_ipport",
            SetType::HashIpPortIp(_) => "ip_set_hash_ipportip",
            SetType::HashIpPortNet(_) => "ip_set_hash_ipportnet",
            SetType::HashNet(_) => "ip_set_hash_net",
            SetType::BitmapPort => "ip_set_bitmap_port",
        }
    }

    /// The family of its addresses, `None` for a bitmap.
    #[must_use]
    pub fn family(self) -> Option<Family> {
        match self {
            SetType::HashIp(f)
            | SetType::HashIpPort(f)
            | SetType::HashIpPortIp(f)
            | SetType::HashIpPortNet(f)
            | SetType::HashNet(f) => Some(f),
            SetType::BitmapPort => None,
        }
    }
}

/// A set to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetSpec {
    /// Its name.
    pub name: SetName,
    /// Its type.
    pub kind: SetType,
    /// The hash buckets to start with; a full bucket doubles them. The kernel takes the next power
    /// of two, and at least 64. No meaning for a bitmap.
    pub hash_size: u32,
    /// The most entries that it takes, at least 1. It is a limit and takes no memory. No meaning
    /// for a bitmap.
    pub max_elements: u32,
    /// Its entries count packets and bytes that match them.
    pub counters: bool,
    /// Its entries carry what a rule with `-j SET --map-set` gives to packets ([`SkbInfo`]).
    pub skbinfo: bool,
}

impl SetSpec {
    /// A set with the sizes that `ipset create` takes when it is told none: 1024 buckets, 65536
    /// entries, no extension.
    #[must_use]
    pub fn new(name: SetName, kind: SetType) -> SetSpec {
        SetSpec {
            name,
            kind,
            hash_size: 1024,
            max_elements: 65536,
            counters: false,
            skbinfo: false,
        }
    }
}

/// A set as the kernel lists it, ours or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: SetName,
    /// Its type, as `ipset list` prints it.
    pub type_name: String,
    /// The family of its addresses.
    pub family: Option<Family>,
    /// Its type, where a [`SetSpec`] can say it: `None` for other types, for another port range
    /// and for sets with options such as a timeout or comments.
    pub kind: Option<SetType>,
    /// The revision of its type.
    pub revision: u8,
    /// The hash buckets now, 0 for a bitmap.
    pub hash_size: u32,
    /// The most entries that it takes, 0 for a bitmap.
    pub max_elements: u32,
    /// The seconds that its entries live when they say nothing else, 0 for ever; `None` for a set
    /// whose entries can't expire.
    pub timeout_s: Option<u32>,
    /// Its entries count packets and bytes.
    pub counters: bool,
    /// Its entries carry an [`SkbInfo`].
    pub skbinfo: bool,
    /// How many rules and other sets use it. While there are any, it can't be destroyed.
    pub references: u32,
    /// How many entries it has, where the kernel says so (Linux 4.7 and later).
    pub entries: Option<u32>,
}

/// A change to a set.
///
/// Adding what is there, removing what is absent, creating a set that exists like that and
/// destroying one that does not exist are all no errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// Creates a set.
    Create(SetSpec),
    /// Destroys a set with its entries.
    Destroy(SetName),
    /// Removes all entries of a set.
    Flush(SetName),
    /// Adds an entry. Of one that is there, counters stay, all else is as if it were new.
    Add(SetName, Entry),
    /// Adds an entry with options, or gives them to the one that is there.
    AddWith(SetName, Entry, Options),
    /// Removes an entry.
    Remove(SetName, Entry),
    /// Exchanges the contents, types and sizes of two sets in one step: rules keep looking into
    /// the same name. Both must exist, and look at the same parts of a packet.
    ///
    /// The kernel refuses it (`EBUSY`) while somebody lists one of them.
    Swap(SetName, SetName),
}

impl Change {
    /// The set that changes; of a swap the first.
    #[must_use]
    pub fn set(&self) -> SetName {
        match self {
            Change::Create(spec) => spec.name,
            Change::Destroy(name)
            | Change::Flush(name)
            | Change::Add(name, _)
            | Change::AddWith(name, ..)
            | Change::Remove(name, _)
            | Change::Swap(name, _) => *name,
        }
    }
}

/// One member of a set. Its variant must fit the set's type: the kernel refuses what misses a
/// field, but ignores a field too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// Of a `hash:ip`.
    Ip(IpAddr),
    /// Of a `hash:ip,port`.
    IpPort(IpAddr, Protocol, u16),
    /// Of a `hash:ip,port,ip`.
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// Of a `hash:ip,port,net`: address, protocol, port, network address and its prefix length
    /// (1 to 32 or 128; the kernel refuses 0). The kernel clears the bits behind the prefix.
    IpPortNet(IpAddr, Protocol, u16, IpAddr, u8),
    /// Of a `hash:net`: network address and prefix length, as in [`Entry::IpPortNet`].
    Net(IpAddr, u8),
    /// Of a `bitmap:port`.
    Port(u16),
}

/// The entry as `ipset save` prints it: `10.96.0.10,tcp:80`.
impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entry::Ip(ip) => write!(f, "{ip}"),
            Entry::IpPort(ip, protocol, port) => write!(f, "{ip},{protocol}:{port}"),
            Entry::IpPortIp(ip, protocol, port, ip2) => write!(f, "{ip},{protocol}:{port},{ip2}"),
            Entry::IpPortNet(ip, protocol, port, net, prefix) => {
                write!(f, "{ip},{protocol}:{port},{}", Entry::Net(*net, *prefix))
            }
            Entry::Net(net, prefix) if *prefix == Family::of(*net).host_prefix() => {
                write!(f, "{net}")
            }
            Entry::Net(net, prefix) => write!(f, "{net}/{prefix}"),
            Entry::Port(port) => write!(f, "{port}"),
        }
    }
}

/// What an entry has besides what it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Options {
    /// An exception: what matches it does not match the set, although a wider network in it does.
    /// Only of entries with a network.
    pub nomatch: bool,
    /// What it counted so far. In a listing there in every set with counters, and in no other.
    pub counters: Option<Counters>,
    /// What it gives to packets. All 0 in a set without it.
    pub skbinfo: SkbInfo,
}

/// What an entry counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Counters {
    /// Packets, less than 2⁶⁴ − 1, which the kernel takes for not given.
    pub packets: u64,
    /// Bytes, less than 2⁶⁴ − 1.
    pub bytes: u64,
}

/// What an entry gives to a packet, where a rule says `-j SET --map-set` and which of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SkbInfo {
    /// The bits to flip in the packet's mark, once those of `mask` are cleared in it.
    pub mark: u32,
    /// The bits of the packet's mark to clear.
    pub mask: u32,
    /// The class for queueing disciplines, as `major:minor`.
    pub priority: (u16, u16),
    /// The number of the transmit queue.
    pub queue: u16,
}

/// The options as `ipset save` prints them behind the entry, each with a blank in front:
/// ` nomatch packets 3 bytes 180 skbmark 0x1/0xff`.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nomatch {
            f.write_str(" nomatch")?;
        }
        if let Some(Counters { packets, bytes }) = self.counters {
            write!(f, " packets {packets} bytes {bytes}")?;
        }
        let SkbInfo {
            mark,
            mask,
            priority: (major, minor),
            queue,
        } = self.skbinfo;
        match (mark, mask) {
            (0, 0) => {}
            (_, u32::MAX) => write!(f, " skbmark {mark:#x}")?,
            _ => write!(f, " skbmark {mark:#x}/{mask:#x}")?,
        }
        if (major, minor) != (0, 0) {
            write!(f, " skbprio {major:x}:{minor:x}")?;
        }
        match queue {
            0 => Ok(()),
            _ => write!(f, " skbqueue {queue}"),
        }
    }
}
