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

/// One member of a set. Its variant must fit the set's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// Of a `hash:ip`.
    Ip(IpAddr),
    /// Of a `hash:ip,port`.
    IpPort(IpAddr, Protocol, u16),
    /// Of a `hash:ip,port,ip`.
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// Of a `hash:ip,port,net`: address, protocol, port, network address and its prefix length.
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
