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
            | SetType::HashIpPortNet(f) => Some(f),
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
    /// The hash buckets to start with; a full bucket doubles them. No meaning for a bitmap.
    pub hash_size: u32,
    /// The most entries that it takes. No meaning for a bitmap.
    pub max_elements: u32,
}

impl SetSpec {
    /// A set with the sizes that `ipset create` takes when it is told none: 1024 buckets, 65536
    /// entries.
    #[must_use]
    pub fn new(name: SetName, kind: SetType) -> SetSpec {
        SetSpec {
            name,
            kind,
            hash_size: 1024,
            max_elements: 65536,
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
    /// and for sets with options such as a timeout or counters.
    pub kind: Option<SetType>,
    /// The revision of its type.
    pub revision: u8,
    /// The hash buckets now, 0 for a bitmap.
    pub hash_size: u32,
    /// The most entries that it takes, 0 for a bitmap.
    pub max_elements: u32,
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
    /// Adds an entry.
    Add(SetName, Entry),
    /// Removes an entry.
    Remove(SetName, Entry),
}

impl Change {
    /// The set that changes.
    #[must_use]
    pub fn set(&self) -> SetName {
        match self {
            Change::Create(spec) => spec.name,
            Change::Destroy(name)
            | Change::Flush(name)
            | Change::Add(name, _)
            | Change::Remove(name, _) => *name,
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
                write!(f, "{ip},{protocol}:{port},{net}")?;
                if *prefix == Family::of(*net).host_prefix() {
                    Ok(())
                } else {
                    write!(f, "/{prefix}")
                }
            }
            Entry::Port(port) => write!(f, "{port}"),
        }
    }
}
