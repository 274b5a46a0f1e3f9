//! A client for IPVS, the load balancer in the Linux kernel, over generic netlink.
//!
//! It speaks the whole of what `ipvsadm` configures, but only lists the synchronization daemons: virtual
//! servers by address or firewall mark with every scheduler, flag and form of persistence, real
//! servers with every forwarding method, tunnel and threshold, counters and timeouts.
//!
//! * [`Client`] changes ([`Client::apply`], many [`Request`]s in one system call) and lists.
//! * [`VirtualServer`], [`RealServer`] and their keys are what the table holds;
//!   [`VirtualServerEntry`] and [`RealServerEntry`] add the counters.
//! * [`Error`] has a variant for each refusal that a caller can act on.
//! * [`codec`] is the form on the wire.
//!
//! # Example
//!
//! ```no_run
//! use ipvs_netlink::*;
//! use ipvs_proxy_netlink::Protocol;
//!
//! let mut ipvs = Client::open()?;
//! let server = VirtualServer {
//!     key: VirtualServerKey::Address {
//!         address: [10, 0, 0, 1].into(),
//!         port: 80,
//!         protocol: Protocol::Tcp,
//!     },
//!     scheduler: Scheduler::WeightedLeastConnection,
//!     scheduler_flags: SchedulerFlags::NONE,
//!     persistence: None,
//!     one_packet: false,
//!     persistence_engine: None,
//! };
//! let real = RealServer {
//!     key: RealServerKey { address: [10, 1, 0, 7].into(), port: 8080 },
//!     forwarding: Forwarding::Masquerade,
//!     weight: 1,
//!     upper_threshold: 0,
//!     lower_threshold: 0,
//! };
//! let requests =
//!     [Request::AddVirtualServer(&server), Request::AddRealServer(server.key, real)];
//! for result in ipvs.apply(&requests) {
//!     match result {
//!         Err(Error::Exists { .. }) | Ok(()) => {}
//!         Err(error) => return Err(error),
//!     }
//! }
//! assert_eq!(ipvs.real_servers(server.key)?.len(), 1);
//! # Ok::<(), Error>(())
//! ```

mod client;
pub mod codec;
mod types;

pub use client::{Client, Error, Request};
pub use types::*;
