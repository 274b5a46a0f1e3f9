//! The daemon on a node of a real control plane: etcd and kube-apiserver on this side, in a network namespace of the test; the
//! node is a guest kernel on a tap.
//!
//! All tests share one control plane and one guest, and run one after the other.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a test"
)]

mod api;
mod bad_days;
mod cluster;
mod faults;
mod node;
mod nodes;
mod plane;
mod reach;
mod scale;
mod unreadable;
