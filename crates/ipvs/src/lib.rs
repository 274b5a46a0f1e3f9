//! IPVS generic netlink client.

mod types;

pub use types::*;
