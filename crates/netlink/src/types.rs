//! The two facts that every subsystem shares: an address family and a transport protocol.

use std::fmt;
use std::net::IpAddr;

/// An address family, as the kernel numbers it in `<linux/socket.h>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const ALL: [Family; 2] = [Family::V4, Family::V6];

    /// The family that an address belongs to.
    #[must_use]
    pub fn of(address: IpAddr) -> Family {
        if address.is_ipv4() {
            Family::V4
        } else {
            Family::V6
        }
    }

    /// The kernel's number: `AF_INET` (2) or `AF_INET6` (10), `<linux/socket.h>`.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Family::V4 => 2,
            Family::V6 => 10,
        }
    }

    /// The family of a kernel number, `None` for any other than `AF_INET` and `AF_INET6`.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Family> {
        match number {
            2 => Some(Family::V4),
            10 => Some(Family::V6),
            _ => None,
        }
    }

    /// The length of a host prefix in bits: 32 or 128.
    #[must_use]
    pub fn host_prefix(self) -> u8 {
        match self {
            Family::V4 => 32,
            Family::V6 => 128,
        }
    }
}

/// A transport protocol, as `<linux/in.h>` numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// `IPPROTO_TCP`, 6.
    Tcp,
    /// `IPPROTO_UDP`, 17.
    Udp,
    /// `IPPROTO_SCTP`, 132.
    Sctp,
    /// Any other protocol by its number; IPVS and ipset hold such entries, Services never do.
    Other(u8),
}

impl Protocol {
    /// The protocol's number in the IP header.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Sctp => 132,
            Protocol::Other(number) => number,
        }
    }

    /// The protocol with this number in the IP header.
    #[must_use]
    pub fn from_number(number: u8) -> Protocol {
        match number {
            6 => Protocol::Tcp,
            17 => Protocol::Udp,
            132 => Protocol::Sctp,
            other => Protocol::Other(other),
        }
    }
}

/// The lower-case name, as ipset prints it; the number for any other protocol.
impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Protocol::Tcp => f.write_str("tcp"),
            Protocol::Udp => f.write_str("udp"),
            Protocol::Sctp => f.write_str("sctp"),
            Protocol::Other(number) => write!(f, "{number}"),
        }
    }
}
