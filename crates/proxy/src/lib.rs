//! The pure core of ipvs-proxy: decides what the kernel of a node should hold for given Services,
//! and which ops lead there. No I/O, no clock, no async, no Kubernetes types.
//!
//! ```text
//! Change → Cluster (last word on each object) → plan (what one Service needs)
//!        → Planner (what differs, per key) → rounds of Op → a Dataplane → outcomes → commit
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`model`] | what the cluster says, compact |
//! | [`endpoints`] | which endpoints serve a port, and why the others don't |
//! | [`plan`] | what one Service needs: the one place that says so |
//! | [`guard`] | which addresses a Service may have, and what of it is left out |
//! | [`rules`] | the constant iptables rules |
//! | [`state`] | keys and values: what a kernel holds |
//! | [`op`] | one change, its outcome, and the [`op::Dataplane`] that carries it out |
//! | [`planner`] | wanted against applied: pending keys, rounds of ops, drains |
//! | [`step`] | one step of the work, used by whoever drives a planner |
//! | [`memory`] | a kernel in memory, for tests |
//!
//! ```
//! use std::time::Instant;
//! use ipvs_proxy_core::{memory::MemoryKernel, op::Dataplane, plan::Config, planner::Planner};
//!
//! let mut kernel = MemoryKernel::new();
//! let mut planner = Planner::new(Config::default());
//! planner.work(&mut kernel, &Instant::now, 100).unwrap();
//! assert_eq!(kernel.state, planner.desired());
//! ```

mod cluster;
pub mod endpoints;
pub mod guard;
pub mod health;
pub mod memory;
pub mod model;
pub mod op;
pub mod plan;
pub mod planner;
pub mod rules;
pub mod state;
pub mod step;
