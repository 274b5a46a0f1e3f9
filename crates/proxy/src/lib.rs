//! The pure core.

pub mod model;
