//! Which address families a node can serve: IPv4 always, IPv6 where all that it takes works.
//!
//! As kube-proxy does, IPv6 is served whole or not at all: without its `nat` table, say, it would be
//! served without masquerading, and some connections would hang.

use std::fs;
use std::path::Path;

use ipvs_proxy_core::state::LINK;
use ipvs_proxy_iptables::{Backend, Error, Table, Tools};
use ipvs_proxy_netlink::Family;

/// Of the calling thread's network namespace, which is not that of every thread.
const IF_INET6: &str = "/proc/thread-self/net/if_inet6";

/// Why the node can't serve IPv6, as far as that can be had for almost nothing; `None` when it can.
#[must_use]
pub fn no_ipv6() -> Option<String> {
    if !Path::new(IF_INET6).exists() {
        return Some("the kernel has no IPv6, or it is switched off (ipv6.disable)".to_owned());
    }
    // That of the link was taken from the default when it was made.
    let disabled = |of: &str| {
        let file = format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6");
        let value = fs::read_to_string(file).ok()?;
        let name = format!("net.ipv6.conf.{of}.disable_ipv6");
        Some((name, value.trim() != "0"))
    };
    match disabled(LINK).or_else(|| disabled("default")) {
        Some((sysctl, true)) => Some(format!(
            "the sysctl {sysctl} is 1: addresses can't be bound to {LINK}"
        )),
        _ => None,
    }
}

/// As [`no_ipv6`], and whether the kernel has the tables. Only xtables can be asked without a write: it
/// makes a table that is listed, or loads its module. With nf_tables all comes along.
pub(crate) fn no_ipv6_by(tools: &Tools) -> Option<String> {
    let no_table = |table| match tools.save(Family::V6, table) {
        Err(error @ Error::NoTable { .. }) => Some(error.to_string()),
        // What works at other times works.
        _ => None,
    };
    no_ipv6().or_else(|| match tools.backend() {
        Ok(Backend::Legacy) => no_table(Table::Nat).or_else(|| no_table(Table::Filter)),
        Ok(Backend::Nft) | Err(_) => None,
    })
}
