//! The iptables tests with nf_tables, which the guest kernel of the others lacks. They need no IPVS, so they run on this
//! machine's kernel, in namespaces of their own: `hack/test nft`.

// clippy.toml allows these in test functions; what they call is test code as well.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod incompatible;
#[path = "../kernel/iptables.rs"]
mod iptables;
mod notices;
mod privilege;
#[path = "../kernel/rules.rs"]
mod rules;

fn tools() -> ipvs_proxy_iptables::Tools {
    ipvs_proxy_iptables::Tools::find(ipvs_proxy_iptables::Choice::Nft).unwrap()
}
