//! The ipset manager.

mod types;

pub use types::*;
