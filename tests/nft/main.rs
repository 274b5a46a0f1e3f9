//! The rules with nf_tables, which the guest kernel of the other tests lacks. It needs no IPVS, so it runs in an empty network
//! namespace of this machine: `hack/test nft`.

// clippy.toml allows these in test functions; what they call is test code as well.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation
)]

use ipvs_proxy_iptables::{Choice, Tools};

#[path = "../kernel/rules.rs"]
mod rules;

/// `unshare` made one already, and made us root in it.
const FRESH_NAMESPACE: bool = false;

fn tools() -> Tools {
    let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let links: Vec<&str> = links
        .lines()
        .filter_map(|line| Some(line.split_once(':')?.0.trim()))
        .collect();
    assert_eq!(
        links,
        ["lo"],
        "this changes rules and needs an empty network namespace: hack/test nft"
    );
    Tools::find(Choice::Nft).unwrap()
}
