//! An ipset manager: creates, swaps and destroys sets, adds and removes entries by the thousand,
//! also exceptions (`nomatch`), counters and what `-j SET --map-set` gives to packets, and lists.
//! It speaks netlink itself and needs neither the `ipset` tool nor its library.
//!
//! | module | |
//! |---|---|
//! | `types` | sets, entries and changes as plain values |
//! | `client` | [`Client`]: makes changes, many in one system call, and lists |
//! | [`codec`] | types to messages and back |
//! | `error` | [`Error`]: what the caller can act on |
//!
//! ```no_run
//! use ipset_rs::{Change, Client, Entry, SetName, SetSpec, SetType};
//! use ipvs_proxy_netlink::{Family, Protocol};
//!
//! let name: SetName = "KUBE-CLUSTER-IP".parse()?;
//! let entry = Entry::IpPort("10.96.0.10".parse()?, Protocol::Tcp, 53);
//! let mut client = Client::open()?;
//! for result in client.change(&[
//!     Change::Create(SetSpec::new(name, SetType::HashIpPort(Family::V4))),
//!     Change::Add(name, entry),
//! ]) {
//!     result?;
//! }
//! let (set, entries) = client.list(&name)?;
//! assert_eq!((set.type_name.as_str(), entries), ("hash:ip,port", vec![entry]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod client;
pub mod codec;
mod error;
mod types;

pub use client::Client;
pub use error::Error;
pub use types::*;
