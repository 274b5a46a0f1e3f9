//! iptables rules as data, written by `iptables-restore`.
//!
//! A [`Ruleset`] names chains of ours with their rules, and the jumps from the built-in chains to
//! them. It is compared with what `iptables-save` prints and becomes the input of one
//! `iptables-restore --noflush`, which changes a table as a whole or not at all. Rules and chains
//! that are not ours are never touched.
//!
//! | module | |
//! |---|---|
//! | `ruleset` | the rules, what a host has of them ([`Present`]), the text that makes them equal; pure |
//! | `restore` | finds the tools of the right back end and runs them ([`Tools`]) |
//! | [`program`] | runs a program with a deadline |
//!
//! ```
//! use ipvs_proxy_iptables::{Chain, Jump, Present, Ruleset, Table, TableRules};
//! use ipvs_proxy_netlink::Family;
//!
//! let rules = Ruleset {
//!     family: Family::V4,
//!     tables: vec![TableRules {
//!         table: Table::Nat,
//!         chains: vec![Chain { name: "KUBE-MARK".into(), rules: vec!["-j RETURN".into()] }],
//!         jumps: vec![Jump { from: "OUTPUT".into(), rule: "-j KUBE-MARK".into(), first: true }],
//!     }],
//! };
//! assert_eq!(
//!     rules.restore_text(&Present::default()),
//!     "*nat\n:KUBE-MARK - [0:0]\n-A KUBE-MARK -j RETURN\n-I OUTPUT 1 -j KUBE-MARK\nCOMMIT\n"
//! );
//! let saved = "*nat\n:OUTPUT ACCEPT [3:180]\n:KUBE-MARK - [0:0]\n\
//!              -A OUTPUT -j KUBE-MARK\n-A KUBE-MARK -j RETURN\nCOMMIT\n";
//! assert_eq!(rules.restore_text(&rules.present(saved)), "");
//! ```

pub mod program;
mod restore;
mod ruleset;

pub use restore::{Backend, Choice, Error, Tools, Version};
pub use ruleset::{Chain, Difference, Jump, Present, Ruleset, Table, TableRules};
