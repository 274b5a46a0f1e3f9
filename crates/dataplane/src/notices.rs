//! Tells when somebody else changes iptables rules in nf_tables.
//!
//! Of the things that others can change, only nf_tables and rtnetlink tell: `<linux/netfilter/
//! nfnetlink.h>` has no multicast group for ipset, IPVS's netlink family has none at all, and
//! xtables (iptables-legacy) has no netlink.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules;
use ipvs_proxy_netlink::{
    Attribute, Error, Family, Monitor, Notice, Request, Socket, Subsystem, attributes,
};

const NFNLGRP_NFTABLES: u32 = 7; // <linux/netfilter/nfnetlink.h>
const NFNL_SUBSYS_NFTABLES: u16 = 10; // <linux/netfilter/nfnetlink.h>
const NFT_MSG_DELTABLE: u16 = 2; // <linux/netfilter/nf_tables.h>
const NFT_MSG_DELCHAIN: u16 = 5; // <linux/netfilter/nf_tables.h>
const NFT_MSG_NEWRULE: u16 = 6; // <linux/netfilter/nf_tables.h>
const NFT_MSG_DELRULE: u16 = 8; // <linux/netfilter/nf_tables.h>
const NFT_MSG_NEWGEN: u16 = 15; // <linux/netfilter/nf_tables.h>
const NFT_MSG_GETGEN: u16 = 16; // <linux/netfilter/nf_tables.h>
const NFTA_TABLE: u16 = 1; // NFTA_TABLE_NAME, NFTA_CHAIN_TABLE, NFTA_RULE_TABLE
const NFTA_RULE_CHAIN: u16 = 2; // <linux/netfilter/nf_tables.h>
const NFTA_CHAIN_NAME: u16 = 3; // <linux/netfilter/nf_tables.h>
const NFTA_GEN_ID: u16 = 1; // <linux/netfilter/nf_tables.h>

/// `nfgenmsg` of `<linux/netfilter/nfnetlink.h>`: family, version, resource.
const NFGENMSG: usize = 4;

/// How many own generations are kept for a listener that lags behind.
const KEPT: usize = 64;

/// The transactions of this process, by the generation of the ruleset that each made. (A notice
/// names its process, too, but by a number that means nothing in the pid namespace of a pod.)
#[derive(Debug, Clone, Default)]
pub struct OwnRules(Arc<Mutex<BTreeSet<u32>>>);

impl OwnRules {
    /// Runs `write`, which changes rules in at most so many transactions; notices that come
    /// meanwhile are looked at when it is done. When there were more, others wrote as well, and
    /// all of them count as others'. `socket` is one of [`Subsystem::Netfilter`].
    pub fn during<T>(
        &self,
        socket: &mut Socket,
        transactions: usize,
        write: impl FnOnce() -> T,
    ) -> T {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = generation(socket);
        let written = write();
        if let (Ok(before), Ok(after)) = (before, generation(socket)) {
            let made = after.wrapping_sub(before);
            if usize::try_from(made).is_ok_and(|made| made <= transactions) {
                own.extend((0..made).map(|n| after.wrapping_sub(n)));
            }
        }
        while own.len() > KEPT {
            own.pop_first();
        }
        written
    }

    fn made(&self, generation: u32) -> bool {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        own.remove(&generation)
    }
}

/// The number of the ruleset in force; each transaction makes the next.
fn generation(socket: &mut Socket) -> Result<u32, Error> {
    let answers = socket.query(&Request {
        kind: NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN,
        flags: 0,
        payload: vec![0; NFGENMSG],
    })?;
    answers
        .iter()
        .find_map(|answer| attribute(answer, NFTA_GEN_ID)?.u32_be().ok())
        .ok_or(Error::Decode("generation without a number"))
}

/// Listens on a thread of its own, in the calling thread's network namespace, and calls `tell`
/// after each transaction of others on a chain of ours, or one that we jump from, until it answers
/// that nobody listens any more.
///
/// # Errors
/// When the kernel gives no socket, or the thread can't be started.
pub fn watch(
    own: OwnRules,
    families: &[Family],
    tell: impl Fn() -> bool + Send + 'static,
) -> Result<(), Error> {
    let mut monitor = Monitor::open(Subsystem::Netfilter, &[NFNLGRP_NFTABLES])?;
    let mut reader = Reader {
        own,
        chains: chains(families),
        touched: false,
    };
    let listen = move || {
        let mut failing = false;
        loop {
            let notices = match monitor.wait() {
                Ok(notices) => notices,
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(
                            %error,
                            "changes of iptables rules are not told, but found by the next audit; will listen again"
                        );
                    }
                    continue;
                }
            };
            failing = false;
            // All are read: each belongs to a transaction.
            let told = notices.iter().filter(|notice| reader.read(notice)).count();
            if told > 0 && !tell() {
                return;
            }
        }
    };
    let started = thread::Builder::new()
        .name("rules".to_owned())
        .spawn(listen);
    started.map(drop).map_err(|error| Error::Socket {
        call: "clone",
        errno: error.raw_os_error().unwrap_or(0),
    })
}

/// A chain, or of an empty name the table: family, table, chain.
type Chain = (u8, String, String);

/// The chains of our rules, those that we jump from, and their tables.
fn chains(families: &[Family]) -> BTreeSet<Chain> {
    let mut chains = BTreeSet::new();
    for family in families {
        for table in rules::rules(&Config::default(), *family).tables {
            let ours = table.chains.into_iter().map(|chain| chain.name);
            let others = table.jumps.into_iter().map(|jump| jump.from);
            let name = table.table.name();
            chains.extend(
                ours.chain(others)
                    .chain([String::new()])
                    .map(|chain| (family.number(), name.to_owned(), chain)),
            );
        }
    }
    chains
}

struct Reader {
    own: OwnRules,
    chains: BTreeSet<Chain>,
    /// The transaction whose notices come now touches one of the chains.
    touched: bool,
}

impl Reader {
    /// Whether others changed rules, as far as this notice tells: that of a transaction's end.
    fn read(&mut self, notice: &Notice) -> bool {
        let Notice::Changed { kind, payload } = notice else {
            self.touched = false;
            return true;
        };
        let text = |kind| attribute(payload, kind).and_then(|a| a.str().ok());
        let chain = match kind.checked_sub(NFNL_SUBSYS_NFTABLES << 8) {
            Some(NFT_MSG_NEWGEN) => {
                let touched = std::mem::take(&mut self.touched);
                let generation = attribute(payload, NFTA_GEN_ID).and_then(|a| a.u32_be().ok());
                return !generation.is_some_and(|number| self.own.made(number)) && touched;
            }
            Some(NFT_MSG_NEWRULE | NFT_MSG_DELRULE) => text(NFTA_RULE_CHAIN),
            Some(NFT_MSG_DELCHAIN) => text(NFTA_CHAIN_NAME),
            Some(NFT_MSG_DELTABLE) => Some(""),
            _ => return false,
        };
        if let (Some(family), Some(table), Some(chain)) = (payload.first(), text(NFTA_TABLE), chain)
        {
            let chain = (*family, table.to_owned(), chain.to_owned());
            self.touched |= self.chains.contains(&chain);
        }
        false
    }
}

fn attribute(payload: &[u8], kind: u16) -> Option<Attribute<'_>> {
    let mut attributes = attributes(payload.get(NFGENMSG..)?).flatten();
    attributes.find(|attribute| attribute.kind == kind)
}
