//! Forgets UDP flows that lead to a real server that is gone, over ctnetlink.
//!
//! IPVS forgets its own entry with the next packet, since the real server is gone
//! (`expire_nodest_conn`); the connection tracking entry would go on translating.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_core::op::StaleFlows;
use ipvs_proxy_netlink::{
    Attribute, AttributeIter, Attributes, Error, Family, KernelError, Protocol, Request, Socket,
    attributes,
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
const NFGENMSG: usize = 4; // struct nfgenmsg: family, version, resource, <linux/netfilter/nfnetlink.h>
const ENOENT: i32 = 2; // <asm-generic/errno-base.h>

/// Deletes the connection tracking entries of stale flows; how many there were. Lists the
/// connection tracking table of each family once.
///
/// # Errors
/// If the table can't be listed, or an entry is there and can't be deleted.
pub fn forget(socket: &mut Socket, stale: &StaleFlows) -> Result<usize, Error> {
    let mut gone: BTreeMap<(IpAddr, u16), Vec<Option<RealServerKey>>> = BTreeMap::new();
    for (server, real_server) in stale {
        if let VirtualServerKey::Address {
            address,
            port,
            protocol: Protocol::Udp,
        } = server
        {
            gone.entry((*address, *port))
                .or_default()
                .push(*real_server);
        }
    }
    let mut deletions = Vec::new();
    for family in Family::ALL {
        if !gone
            .keys()
            .any(|(address, _)| Family::of(*address) == family)
        {
            continue;
        }
        let header = [family.number(), 0, 0, 0];
        let ask = Request {
            kind: NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_GET,
            flags: 0,
            payload: header.to_vec(),
        };
        for entry in socket.dump(&ask)? {
            let body = entry.get(NFGENMSG..).unwrap_or_default();
            let Some(flow) = Flow::read(body)? else {
                continue;
            };
            let stale = gone.get(&flow.to).is_some_and(|real_servers| {
                real_servers
                    .iter()
                    .any(|rs| rs.is_none_or(|rs| rs == flow.answered_by))
            });
            if stale {
                let mut delete = Attributes::after(&header);
                delete.nested(CTA_TUPLE_ORIG, |a| copy(a, flow.original));
                if let Some(id) = flow.id {
                    delete.push_bytes(CTA_ID, id);
                }
                deletions.push(Request {
                    kind: NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_DELETE,
                    flags: 0,
                    payload: delete.finish()?,
                });
            }
        }
    }
    for result in socket.batch(&deletions) {
        match result {
            // It ended by itself meanwhile.
            Ok(()) | Err(Error::Kernel(KernelError { code: ENOENT, .. })) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(deletions.len())
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
