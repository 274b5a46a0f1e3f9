//! Tests against a real kernel, each in network namespaces of its own. They run in a guest: `hack/test kernel`.

// clippy.toml allows these in test functions; what they call is test code as well.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation
)]

mod audit;
mod bad_input;
mod chaos;
mod cleanup;
mod configuration;
mod crash;
mod driver;
mod events;
mod foreign;
mod growth;
mod health;
mod herd;
mod ipset;
mod iptables;
mod ipvs;
mod kinds;
mod lacking;
mod listing;
mod nftables;
mod order;
mod reports;
mod rules;
mod scene;
mod servers;
mod state;
mod topology;
mod traffic;
mod worker;
#[path = "../../crates/proxy/tests/world/mod.rs"]
mod world;

/// The tools whose rules this kernel takes.
fn tools() -> ipvs_proxy_iptables::Tools {
    ipvs_proxy_iptables::Tools::find(ipvs_proxy_iptables::Choice::Auto).unwrap()
}
