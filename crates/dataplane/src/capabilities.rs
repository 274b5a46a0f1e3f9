//! The capabilities without which the kernel's state can be neither read nor changed.

use std::fmt;
use std::fs;

/// A capability that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// `CAP_NET_ADMIN`: IPVS, ipset, iptables and links.
    NetAdmin,
    /// `CAP_NET_RAW`: iptables opens a raw socket to ask for a set, also to print a rule.
    NetRaw,
}

impl Capability {
    const ALL: [Capability; 2] = [Capability::NetAdmin, Capability::NetRaw];

    /// The number of its bit.
    fn bit(self) -> u32 {
        match self {
            Capability::NetAdmin => 12, // CAP_NET_ADMIN, <linux/capability.h>
            Capability::NetRaw => 13,   // CAP_NET_RAW, <linux/capability.h>
        }
    }
}

/// `NET_RAW`, as a container's securityContext names it.
impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Capability::NetAdmin => "NET_ADMIN",
            Capability::NetRaw => "NET_RAW",
        })
    }
}

/// What this process lacks of them. Nothing where /proc does not tell: then the kernel's refusals do.
#[must_use]
pub fn missing() -> Vec<Capability> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    missing_of(&status)
}

fn missing_of(status: &str) -> Vec<Capability> {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let Some(effective) = effective else {
        return Vec::new();
    };
    let lacks = |capability: &Capability| effective >> capability.bit() & 1 == 0;
    Capability::ALL.into_iter().filter(lacks).collect()
}

#[cfg(test)]
mod tests {
    use super::{Capability, missing_of};

    #[test]
    fn the_mask_tells_what_is_missing() {
        let missing = |mask: &str| missing_of(&format!("Name:\tx\nCapEff:\t{mask}\nSeccomp:\t0\n"));
        assert_eq!(missing("000001ffffffffff"), []);
        assert_eq!(missing("0000000000003000"), []);
        assert_eq!(missing("0000000000001000"), [Capability::NetRaw]);
        assert_eq!(missing("0000000000002000"), [Capability::NetAdmin]);
        assert_eq!(missing("0000000000000000"), Capability::ALL);
        assert_eq!(missing_of("Name:\tx\n"), [], "nobody says");
    }
}
