//! Requests to the kernel over netlink: a blocking socket that sends many requests at once.
//!
//! This crate knows how to ask and how the kernel answers; it knows no IPVS, no ipset and no
//! Kubernetes. The crates above it turn their own types into [`Request`]s.
//!
//! * [`Socket`] sends requests and pairs each with its answer: [`Socket::batch`] for changes,
//!   [`Socket::dump`] and [`Socket::query`] for questions, [`Socket::family`] for the number of a
//!   generic netlink family.
//! * [`Attributes`] writes attributes, [`attributes()`] reads them; neither panics on any input.
//! * [`Error`] tells a refusal ([`KernelError`]) from an answer that was lost
//!   ([`Error::Overrun`]).
//! * [`Family`] and [`Protocol`] are the two facts that every subsystem shares.
//!
//! # Why blocking
//!
//! The kernel does the work of a request inside `send()`: when the call returns, the answer is
//! already queued. There is nothing to wait for, so one thread with one socket does as much as an
//! asynchronous stack and keeps the order of requests without any effort.
//!
//! # Why 128 requests in one send
//!
//! One system call for many requests saves most of the cost of small ones. Every answer occupies
//! 832 bytes of the receive buffer (Linux 6.18), so that the default buffer of 212 992 bytes holds
//! 256 answers; the kernel drops what does not fit and reports `ENOBUFS`. 128 stays clear of that
//! even where the process may not enlarge the buffer.
//!
//! # Example
//!
//! ```
//! use ipvs_proxy_netlink::{Error, Socket, Subsystem};
//!
//! let mut socket = Socket::open(Subsystem::Generic)?;
//! assert_eq!(socket.family("nlctrl")?, 16);
//! assert!(matches!(socket.family("no-such-one"), Err(Error::NoFamily { .. })));
//! # Ok::<(), Error>(())
//! ```

mod attributes;
mod error;
mod monitor;
mod socket;
mod types;

pub use attributes::{Attribute, AttributeIter, Attributes, attributes};
pub use error::{Causes, Error, KernelError, errno_name};
pub use monitor::{Monitor, Notice};
pub use socket::{MAX_BATCH, Request, Socket, Subsystem};
pub use types::{Family, Protocol};
