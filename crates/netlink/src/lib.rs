//! Requests to the kernel.

mod types;

pub use types::{Family, Protocol};
