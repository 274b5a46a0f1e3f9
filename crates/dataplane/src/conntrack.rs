//! Forgets UDP flows that lead to a real server that is gone, over ctnetlink.
//!
//! IPVS forgets its own entry with the next packet, since the real server is gone
//! (`expire_nodest_conn`); the connection tracking entry would go on translating.
//!
//! The kernel looks for the flows where it can (`CTA_FILTER`, Linux 5.8 on; before, it lists all of its
//! table). The listing is read in parts and deleted from as it comes, so its length costs no memory.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_core::op::StaleFlows;
use ipvs_proxy_netlink::{
    Attribute, AttributeIter, Attributes, Error, Family, KernelError, MAX_BATCH, Protocol, Request,
    Socket, Subsystem, attributes,
};

const NFNL_SUBSYS_CTNETLINK: u16 = 1 << 8; // <linux/netfilter/nfnetlink.h>
const IPCTNL_MSG_CT_GET: u16 = 1; // <linux/netfilter/nfnetlink_conntrack.h>
const IPCTNL_MSG_CT_DELETE: u16 = 2; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_TUPLE_ORIG: u16 = 1; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_TUPLE_REPLY: u16 = 2; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_ID: u16 = 12; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_TUPLE_IP: u16 = 1; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_TUPLE_PROTO: u16 = 2; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_IP_V4_SRC: u16 = 1; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_IP_V4_DST: u16 = 2; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_IP_V6_SRC: u16 = 3; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_IP_V6_DST: u16 = 4; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_PROTO_NUM: u16 = 1; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_PROTO_SRC_PORT: u16 = 2; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_PROTO_DST_PORT: u16 = 3; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_FILTER: u16 = 25; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_FILTER_ORIG_FLAGS: u16 = 1; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_FILTER_REPLY_FLAGS: u16 = 2; // <linux/netfilter/nfnetlink_conntrack.h>
const CTA_FILTER_F_CTA_IP_SRC: u32 = 1 << 0; // net/netfilter/nf_internals.h
const CTA_FILTER_F_CTA_IP_DST: u32 = 1 << 1; // net/netfilter/nf_internals.h
const CTA_FILTER_F_CTA_PROTO_NUM: u32 = 1 << 3; // net/netfilter/nf_internals.h
const CTA_FILTER_F_CTA_PROTO_SRC_PORT: u32 = 1 << 4; // net/netfilter/nf_internals.h
const CTA_FILTER_F_CTA_PROTO_DST_PORT: u32 = 1 << 5; // net/netfilter/nf_internals.h
const NFGENMSG: usize = 4; // struct nfgenmsg: family, version, resource, <linux/netfilter/nfnetlink.h>
const ENOENT: i32 = 2; // <asm-generic/errno-base.h>
const EINVAL: i32 = 22; // <asm-generic/errno-base.h>

/// The most listings by address that take the place of one of all UDP flows: the kernel walks its
/// whole table for each.
const FEW: usize = 4;
/// The most real servers that are told apart at one address and port; of more, all flows go.
const MANY: usize = 256;
/// The most addresses with port that are kept while flows can't be forgotten.
const MOST: usize = 100_000;
/// How often a listing that was cut short is tried again.
const ATTEMPTS: usize = 3;

/// Why flows can't be forgotten.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetError {
    /// nfnetlink has no ctnetlink, nor a module that it may load.
    #[error(
        "the kernel does not tell of connection tracking: load the module (modprobe nf_conntrack_netlink)"
    )]
    NoModule,
    /// The table can't be listed, or an entry is there and can't be deleted.
    #[error(transparent)]
    Netlink(#[from] Error),
}

/// Where a client sends to.
type To = (IpAddr, u16);

/// The flows to forget of those that are sent to one address and port.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Answered {
    /// Whoever answers.
    ByAny,
    /// By one of these.
    By(BTreeSet<RealServerKey>),
}

/// UDP flows to forget.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stale(BTreeMap<To, Answered>);

impl Stale {
    /// Takes in what is stale, but for what is not UDP; how many addresses there was no room for.
    pub fn add(&mut self, stale: &StaleFlows) -> usize {
        let mut left = 0;
        for (server, real_server) in stale {
            let VirtualServerKey::Address {
                address,
                port,
                protocol: Protocol::Udp,
            } = server
            else {
                continue;
            };
            let answered = match real_server {
                None => Answered::ByAny,
                Some(real_server) => Answered::By([*real_server].into()),
            };
            left += usize::from(!self.take((*address, *port), answered));
        }
        left
    }

    /// Takes in all of another; how many addresses there was no room for.
    pub fn merge(&mut self, other: Stale) -> usize {
        let taken = other.0.into_iter().map(|(to, more)| self.take(to, more));
        taken.filter(|taken| !taken).count()
    }

    fn take(&mut self, to: To, more: Answered) -> bool {
        let full = self.0.len() >= MOST;
        match self.0.get_mut(&to) {
            None if full => return false,
            None => {
                self.0.insert(to, more);
            }
            Some(known) => match (&mut *known, more) {
                (Answered::By(known), Answered::By(more)) if known.len() < MANY => {
                    known.extend(more);
                }
                _ => *known = Answered::ByAny,
            },
        }
        true
    }

    /// Whether there is nothing to forget.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn has(&self, flow: &Flow<'_>) -> bool {
        self.0.get(&flow.to).is_some_and(|answered| match answered {
            Answered::ByAny => true,
            Answered::By(real_servers) => real_servers.contains(&flow.answered_by),
        })
    }

    /// What to list so that all of it is found.
    fn listings(&self, filters: bool) -> Vec<Listing> {
        let few = self.0.iter().flat_map(|(to, answered)| {
            let by: Vec<Option<RealServerKey>> = match answered {
                Answered::ByAny => vec![None],
                Answered::By(real_servers) => real_servers.iter().copied().map(Some).collect(),
            };
            by.into_iter().map(|answered_by| Listing {
                family: Family::of(to.0),
                to: Some(*to),
                answered_by,
            })
        });
        let few: Vec<Listing> = few.take(FEW + 1).collect();
        if filters && few.len() <= FEW {
            return few;
        }
        let families: BTreeSet<Family> = self.0.keys().map(|to| Family::of(to.0)).collect();
        families
            .into_iter()
            .map(|family| Listing {
                family,
                to: None,
                answered_by: None,
            })
            .collect()
    }
}

/// A listing of UDP flows.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Listing {
    family: Family,
    to: Option<To>,
    answered_by: Option<RealServerKey>,
}

/// Of IPv6 by ports alone: Linux 6.1 lists all addresses but the one that is asked for.
impl Listing {
    /// Whether the kernel would list it, if it knows the filter.
    fn includes(&self, flow: &Flow<'_>) -> bool {
        let v6 = self.family == Family::V6;
        self.to
            .is_none_or(|to| to.1 == flow.to.1 && (v6 || to.0 == flow.to.0))
    }

    fn request(&self, filters: bool) -> Result<Request, Error> {
        let mut body = Attributes::after(&[self.family.number(), 0, 0, 0]);
        if filters {
            let (to, by) = (self.to, self.answered_by.map(|rs| (rs.address, rs.port)));
            body.nested(CTA_TUPLE_ORIG, |a| push_tuple(a, to, false));
            if by.is_some() {
                body.nested(CTA_TUPLE_REPLY, |a| push_tuple(a, by, true));
            }
            let udp = CTA_FILTER_F_CTA_PROTO_NUM;
            let mut end = CTA_FILTER_F_CTA_PROTO_DST_PORT;
            let mut other_end = CTA_FILTER_F_CTA_PROTO_SRC_PORT;
            if self.family == Family::V4 {
                end |= CTA_FILTER_F_CTA_IP_DST;
                other_end |= CTA_FILTER_F_CTA_IP_SRC;
            }
            body.nested(CTA_FILTER, |a| {
                a.push_u32(CTA_FILTER_ORIG_FLAGS, udp | to.map_or(0, |_| end));
                if by.is_some() {
                    a.push_u32(CTA_FILTER_REPLY_FLAGS, udp | other_end);
                }
            });
        }
        Ok(Request {
            kind: NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_GET,
            flags: 0,
            payload: body.finish()?,
        })
    }
}

/// A client of ctnetlink, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Conntrack {
    listing: Socket,
    /// Another one, since a socket has room for one listing and its answers.
    deleting: Socket,
    /// Whether the kernel can choose what it lists, as far as is known.
    filters: bool,
}

impl Conntrack {
    /// Opens its sockets.
    ///
    /// # Errors
    /// If the kernel gives none.
    pub fn open() -> Result<Conntrack, Error> {
        Ok(Conntrack {
            listing: Socket::open(Subsystem::Netfilter)?,
            deleting: Socket::open(Subsystem::Netfilter)?,
            filters: true,
        })
    }

    /// Deletes the connection tracking entries of stale flows; how many there were.
    ///
    /// # Errors
    /// If the table can't be listed, or an entry is there and can't be deleted. What was found until
    /// then is deleted.
    pub fn forget(&mut self, stale: &Stale) -> Result<usize, ForgetError> {
        let mut deleted = 0;
        for listing in stale.listings(self.filters) {
            deleted += self.forget_listed(&listing, stale)?;
        }
        Ok(deleted)
    }

    fn forget_listed(&mut self, listing: &Listing, stale: &Stale) -> Result<usize, ForgetError> {
        let mut deleted = 0;
        let mut attempts = ATTEMPTS;
        loop {
            attempts -= 1;
            match self.pass(listing, stale, &mut deleted) {
                Ok(()) => return Ok(deleted),
                Err(Error::Interrupted | Error::Overrun) if attempts > 0 => {}
                // A kernel that knows the filter and not all of it; or one without ctnetlink.
                Err(Error::Kernel(_)) if self.filters => {
                    self.filters = false;
                    if let Err(error) = self.pass(listing, stale, &mut deleted) {
                        self.filters = true;
                        return Err(named(error));
                    }
                    return Ok(deleted);
                }
                Err(error) => return Err(named(error)),
            }
        }
    }

    fn pass(&mut self, listing: &Listing, stale: &Stale, deleted: &mut usize) -> Result<(), Error> {
        let Conntrack {
            listing: socket,
            deleting,
            filters,
        } = self;
        let mut failed = None;
        let mut found = Vec::new();
        let mut asked_for = true;
        let ended = socket.dump_each(&listing.request(*filters)?, |entry| {
            let body = entry.get(NFGENMSG..).unwrap_or_default();
            let deletion = match Flow::read(body) {
                Ok(Some(flow)) => {
                    asked_for &= listing.includes(&flow);
                    stale.has(&flow).then(|| flow.deletion(listing.family))
                }
                Ok(None) => {
                    asked_for = false;
                    None
                }
                Err(error) => Some(Err(error)),
            };
            match deletion {
                Some(Ok(deletion)) => found.push(deletion),
                Some(Err(error)) => failed = Some(error),
                None => {}
            }
            if found.len() >= MAX_BATCH {
                failed = delete(deleting, &mut found, deleted)
                    .err()
                    .or(failed.take());
            }
        });
        failed = delete(deleting, &mut found, deleted).err().or(failed);
        // What it does not know the kernel ignores.
        *filters &= asked_for;
        ended?;
        failed.map_or(Ok(()), Err)
    }
}

/// Deletes entries, all that can be; how many.
fn delete(socket: &mut Socket, found: &mut Vec<Request>, deleted: &mut usize) -> Result<(), Error> {
    let mut failed = Ok(());
    for result in socket.batch(found) {
        match result {
            Ok(()) => *deleted += 1,
            // It ended by itself meanwhile.
            Err(Error::Kernel(KernelError { code: ENOENT, .. })) => {}
            Err(error) => failed = Err(error),
        }
    }
    found.clear();
    failed
}

fn named(error: Error) -> ForgetError {
    match error {
        // nfnetlink's answer for a subsystem that it does not have.
        Error::Kernel(KernelError { code: EINVAL, .. }) => ForgetError::NoModule,
        error => error.into(),
    }
}

/// Writes an end of UDP flows, their source or their destination; of `None` the protocol alone.
fn push_tuple(tuple: &mut Attributes, end: Option<To>, source: bool) {
    if let Some((address, _)) = end {
        tuple.nested(CTA_TUPLE_IP, |a| match (address, source) {
            (IpAddr::V4(v4), true) => a.push_bytes(CTA_IP_V4_SRC, &v4.octets()),
            (IpAddr::V4(v4), false) => a.push_bytes(CTA_IP_V4_DST, &v4.octets()),
            (IpAddr::V6(v6), true) => a.push_bytes(CTA_IP_V6_SRC, &v6.octets()),
            (IpAddr::V6(v6), false) => a.push_bytes(CTA_IP_V6_DST, &v6.octets()),
        });
    }
    tuple.nested(CTA_TUPLE_PROTO, |a| {
        a.push_u8(CTA_PROTO_NUM, Protocol::Udp.number());
        if let Some((_, port)) = end {
            let kind = match source {
                true => CTA_PROTO_SRC_PORT,
                false => CTA_PROTO_DST_PORT,
            };
            a.push_u16_be(kind, port);
        }
    });
}

/// A UDP flow.
struct Flow<'a> {
    /// Where its client sends to.
    to: (IpAddr, u16),
    /// Who answers.
    answered_by: RealServerKey,
    original: AttributeIter<'a>,
    id: Option<&'a [u8]>,
}

impl<'a> Flow<'a> {
    /// `None` for what is not UDP.
    fn read(body: &'a [u8]) -> Result<Option<Flow<'a>>, Error> {
        let (mut original, mut reply, mut id) = (None, None, None);
        for attribute in attributes(body) {
            let attribute = attribute?;
            match attribute.kind {
                CTA_TUPLE_ORIG => original = Some(attribute),
                CTA_TUPLE_REPLY => reply = Some(attribute),
                CTA_ID => id = Some(attribute.value),
                _ => {}
            }
        }
        let (Some(original), Some(reply)) = (original, reply) else {
            return Ok(None);
        };
        let (Some(sent), Some(answered)) = (Ends::read(&original)?, Ends::read(&reply)?) else {
            return Ok(None);
        };
        let (address, port) = answered.from;
        Ok(Some(Flow {
            to: sent.to,
            answered_by: RealServerKey { address, port },
            original: original.nested(),
            id,
        }))
    }
}

impl Flow<'_> {
    fn deletion(&self, family: Family) -> Result<Request, Error> {
        let mut delete = Attributes::after(&[family.number(), 0, 0, 0]);
        delete.nested(CTA_TUPLE_ORIG, |a| copy(a, self.original.clone()));
        if let Some(id) = self.id {
            delete.push_bytes(CTA_ID, id);
        }
        Ok(Request {
            kind: NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_DELETE,
            flags: 0,
            payload: delete.finish()?,
        })
    }
}

/// One direction of a UDP flow.
struct Ends {
    from: (IpAddr, u16),
    to: (IpAddr, u16),
}

impl Ends {
    fn read(tuple: &Attribute<'_>) -> Result<Option<Ends>, Error> {
        let (mut from, mut to) = (None, None);
        let (mut protocol, mut from_port, mut to_port) = (None, None, None);
        for part in tuple.nested() {
            let part = part?;
            for field in part.nested() {
                let field = field?;
                match (part.kind, field.kind) {
                    (CTA_TUPLE_IP, CTA_IP_V4_SRC | CTA_IP_V6_SRC) => from = address(&field),
                    (CTA_TUPLE_IP, CTA_IP_V4_DST | CTA_IP_V6_DST) => to = address(&field),
                    (CTA_TUPLE_PROTO, CTA_PROTO_NUM) => protocol = Some(field.u8()?),
                    (CTA_TUPLE_PROTO, CTA_PROTO_SRC_PORT) => from_port = Some(field.u16_be()?),
                    (CTA_TUPLE_PROTO, CTA_PROTO_DST_PORT) => to_port = Some(field.u16_be()?),
                    _ => {}
                }
            }
        }
        if protocol != Some(Protocol::Udp.number()) {
            return Ok(None);
        }
        Ok(from
            .zip(from_port)
            .zip(to.zip(to_port))
            .map(|(from, to)| Ends { from, to }))
    }
}

fn address(field: &Attribute<'_>) -> Option<IpAddr> {
    let v4 = || {
        <[u8; 4]>::try_from(field.value)
            .ok()
            .map(|o| Ipv4Addr::from(o).into())
    };
    let v6 = || {
        <[u8; 16]>::try_from(field.value)
            .ok()
            .map(|o| Ipv6Addr::from(o).into())
    };
    v4().or_else(v6)
}

/// Writes a tuple as it was read.
fn copy(to: &mut Attributes, from: AttributeIter<'_>) {
    for part in from.flatten() {
        to.nested(part.kind, |a| {
            for field in part.nested().flatten() {
                a.push_bytes(field.kind, field.value);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(n: u8, protocol: Protocol) -> VirtualServerKey {
        VirtualServerKey::Address {
            address: [10, 96, 0, n].into(),
            port: 53,
            protocol,
        }
    }

    fn real_server(n: u16) -> RealServerKey {
        RealServerKey {
            address: [10, 0, 0, 1].into(),
            port: n,
        }
    }

    #[test]
    fn what_is_stale_is_merged() {
        let udp = |n| server(n, Protocol::Udp);
        let mut stale = Stale::default();
        stale.add(&[(server(1, Protocol::Tcp), None)].into());
        assert!(stale.is_empty());
        stale.add(&[(udp(1), Some(real_server(1)))].into());
        stale.add(&[(udp(1), Some(real_server(2))), (udp(2), None)].into());
        stale.add(&[(udp(2), Some(real_server(1)))].into());
        let to = |n| (IpAddr::from([10, 96, 0, n]), 53);
        let expected = [
            (to(1), Answered::By([real_server(1), real_server(2)].into())),
            (to(2), Answered::ByAny),
        ];
        assert_eq!(stale, Stale(expected.into()));
    }

    #[test]
    fn what_is_stale_has_bounds() {
        let mut stale = Stale::default();
        for n in 0..2000 {
            stale.add(&[(server(1, Protocol::Udp), Some(real_server(n)))].into());
        }
        assert_eq!(stale.0.values().next(), Some(&Answered::ByAny));
        let mut many = Stale::default();
        for n in 0..u32::try_from(MOST).unwrap() + 3 {
            many.0
                .insert((Ipv4Addr::from_bits(n).into(), 53), Answered::ByAny);
        }
        let left = stale.merge(many);
        assert_eq!((left, stale.0.len()), (4, MOST));
    }

    #[test]
    fn few_are_listed_one_by_one_and_many_at_once() {
        let mut stale = Stale::default();
        let udp = |n| server(n, Protocol::Udp);
        stale.add(&[(udp(1), Some(real_server(1))), (udp(2), None)].into());
        let listed = stale.listings(true);
        let to: Vec<_> = listed.iter().map(|l| (l.to, l.answered_by)).collect();
        let expected = [
            (Some(([10, 96, 0, 1].into(), 53)), Some(real_server(1))),
            (Some(([10, 96, 0, 2].into(), 53)), None),
        ];
        assert_eq!(to, expected);
        let all = Listing {
            family: Family::V4,
            to: None,
            answered_by: None,
        };
        let all = [all];
        assert_eq!(stale.listings(false), all);
        stale.add(&(3..6).map(|n| (udp(n), None)).collect());
        assert_eq!(stale.listings(true), all);
    }
}
