//! Turns the ops of ipvs-proxy-core into kernel calls, and reads the kernel back into the same
//! words. It decides nothing.
//!
//! | module | what it does |
//! |---|---|
//! | [`kernel`] | ops → batches for ipset, IPVS, rtnetlink and iptables; dumps → [`State`] |
//! | [`addresses`] | tells when addresses of the node change |
//! | [`capabilities`] | the capabilities without which nothing can be done |
//! | [`conntrack`] | forgets UDP flows of real servers that are gone |
//! | [`families`] | the address families that the node can serve |
//! | [`growth`] | gives a set that is full more room |
//! | [`links`] | the dummy link and the addresses on it |
//! | [`modules`] | loads kernel modules |
//! | [`notices`] | tells when somebody else changes iptables rules in nf_tables |
//! | `outcomes` | what the kernel's answers mean |
//! | [`routes`] | the routing table with the VIPs that are not on the dummy link |
//! | `rules` | iptables rules: compares, writes |
//! | [`sysctl`] | the sysctls without which Services do not work, and those of connection tracking |
//! | [`timeouts`] | the timeouts of IPVS |
//! | `worker` | a thread for iptables |
//!
//! Everything here blocks, and belongs to the thread and network namespace that opened it. What runs iptables can be
//! given to a thread of its own ([`kernel::Kernel::detach_rules`]).
//!
//! ```no_run
//! use ipvs_proxy_core::{op::Dataplane, plan::{self, Config}};
//! use ipvs_proxy_dataplane::kernel::Kernel;
//! use ipvs_proxy_iptables::Choice;
//!
//! let config = Config::default();
//! let mut kernel = Kernel::open(&config.families, Choice::Auto)?;
//! println!("{:?}", kernel.read(&plan::base(&config))?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`State`]: ipvs_proxy_core::state::State

pub mod addresses;
pub mod capabilities;
pub mod conntrack;
pub mod families;
pub mod flows;
pub mod growth;
pub mod kernel;
pub mod links;
pub mod modules;
pub mod notices;
mod outcomes;
pub mod ports;
pub mod routers;
pub mod routes;
mod rules;
pub mod sysctl;
pub mod timeouts;
mod worker;
