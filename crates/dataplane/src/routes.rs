//! The routing table with the VIPs that are not on the dummy link, and the rules that lead to it, over rtnetlink.

use std::net::IpAddr;

use ipvs_proxy_core::op::Op;
use ipvs_proxy_core::state::{Key, ROUTING_TABLE, State, Value};
use ipvs_proxy_netlink::{Error, Family, KernelError, Request, Socket, Subsystem};
use netlink_packet_core::Parseable;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::links::{LISTINGS, LinkError, NLM_F_CREATE, NLM_F_EXCL, failed, request};

/// By which routes and rules are known as ours: none of <linux/rtnetlink.h>, none of iproute2's rt_protos.
const PROTOCOL: RouteProtocol = RouteProtocol::Other(73);
/// Behind the table `local`, before what other software routes.
const PRIORITY: u32 = 50;
/// The loopback link of every network namespace, `LOOPBACK_IFINDEX` of <net/net_namespace.h>.
const LOOPBACK: u32 = 1;
const ENOENT: i32 = 2; // <asm-generic/errno-base.h>
const ESRCH: i32 = 3; // <asm-generic/errno-base.h>
const EEXIST: i32 = 17; // <asm-generic/errno-base.h>
const EAFNOSUPPORT: i32 = 97; // <asm-generic/errno.h>
const EOPNOTSUPP: i32 = 95; // <asm-generic/errno.h>

/// A client of rtnetlink for [`ROUTING_TABLE`].
#[derive(Debug)]
pub struct Routes {
    socket: Socket,
}

impl Routes {
    /// Opens a socket in the thread's network namespace.
    ///
    /// # Errors
    /// If the kernel gives no socket.
    pub fn open() -> Result<Routes, LinkError> {
        let socket = Socket::open(Subsystem::Route).map_err(failed("open rtnetlink"))?;
        Ok(Routes { socket })
    }

    /// Carries out ops on [`Key::Route`] and [`Key::RoutingRule`], in order; one result for each. Adding what is there and
    /// removing what is not are fine.
    pub fn apply(&mut self, ops: &[Op]) -> Vec<Result<(), LinkError>> {
        let requests: Vec<Request> = ops.iter().filter_map(request_of).collect();
        let results = self.socket.batch(&requests);
        let all = ops.iter().zip(results);
        all.map(|(op, result)| match (op, result) {
            (Op::Remove(_), Err(Error::Kernel(KernelError { code, .. })))
                if matches!(code, ENOENT | ESRCH | EAFNOSUPPORT) =>
            {
                Ok(())
            }
            (Op::Add(..), Err(Error::Kernel(KernelError { code: EEXIST, .. }))) => Ok(()),
            (_, result) => result.map_err(failed(&op.to_string())),
        })
        .collect()
    }

    /// Adds the routes and rules of a family that are ours to what was read.
    ///
    /// # Errors
    /// The kernel's refusal. A kernel without policy routing has none.
    pub fn read(&mut self, family: Family, state: &mut State) -> Result<(), LinkError> {
        let header_family = address_family(family);
        let mut rules = RuleMessage::default();
        rules.header.family = header_family;
        for answer in self.list(RouteNetlinkMessage::GetRule(rules))? {
            if let Ok(rule) = RuleMessage::parse(&answer)
                && let Some(mark) = mark_of(&rule)
            {
                state.insert(Key::RoutingRule(family, mark), Value::Present);
            }
        }
        let mut routes = RouteMessage::default();
        routes.header.address_family = header_family;
        routes.header.protocol = PROTOCOL;
        routes.attributes.push(RouteAttribute::Table(ROUTING_TABLE));
        for answer in self.list(RouteNetlinkMessage::GetRoute(routes))? {
            if let Ok(route) = RouteMessage::parse(&answer)
                && let Some(address) = address_of(&route)
            {
                state.insert(Key::Route(address), Value::Present);
            }
        }
        Ok(())
    }

    /// Lists anew where the kernel says that the list may lack something. Nothing where there is no such table, or no such family.
    fn list(&mut self, message: RouteNetlinkMessage) -> Result<Vec<Vec<u8>>, LinkError> {
        let ask = request(message, 0);
        let mut answers = self.socket.dump(&ask);
        for _ in 0..LISTINGS {
            if answers != Err(Error::Interrupted) {
                break;
            }
            answers = self.socket.dump(&ask);
        }
        match answers {
            Err(Error::Kernel(KernelError { code, .. }))
                if matches!(code, ENOENT | EAFNOSUPPORT | EOPNOTSUPP) =>
            {
                Ok(Vec::new())
            }
            answers => answers.map_err(failed("list routes and routing rules")),
        }
    }
}

fn request_of(op: &Op) -> Option<Request> {
    let key = op.key();
    let message = match (key, op) {
        (Key::Route(address), Op::Remove(_)) => RouteNetlinkMessage::DelRoute(route(address)),
        (Key::Route(address), _) => RouteNetlinkMessage::NewRoute(route(address)),
        (Key::RoutingRule(family, mark), Op::Remove(_)) => {
            RouteNetlinkMessage::DelRule(rule(family, mark))
        }
        (Key::RoutingRule(family, mark), _) => RouteNetlinkMessage::NewRule(rule(family, mark)),
        _ => return None,
    };
    let flags = match op {
        Op::Remove(_) => 0,
        _ => NLM_F_CREATE | NLM_F_EXCL,
    };
    Some(request(message, flags))
}

fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

fn route(address: IpAddr) -> RouteMessage {
    let family = Family::of(address);
    let mut message = RouteMessage::default();
    message.header.address_family = address_family(family);
    message.header.destination_prefix_length = family.host_prefix();
    message.header.protocol = PROTOCOL;
    message.header.scope = RouteScope::Host;
    message.header.kind = RouteType::Local;
    message.attributes = vec![
        RouteAttribute::Table(ROUTING_TABLE),
        RouteAttribute::Destination(match address {
            IpAddr::V4(v4) => RouteAddress::Inet(v4),
            IpAddr::V6(v6) => RouteAddress::Inet6(v6),
        }),
        RouteAttribute::Oif(LOOPBACK),
    ];
    message
}

/// The address that a route of ours leads to this node.
fn address_of(route: &RouteMessage) -> Option<IpAddr> {
    let ours = route.header.protocol == PROTOCOL
        && route.header.kind == RouteType::Local
        && route
            .attributes
            .contains(&RouteAttribute::Table(ROUTING_TABLE));
    let destination = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
            RouteAttribute::Destination(RouteAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
            _ => None,
        });
    destination.filter(|address| {
        ours && route.header.destination_prefix_length == Family::of(*address).host_prefix()
    })
}

fn rule(family: Family, mark: u32) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = address_family(family);
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Table(ROUTING_TABLE),
        RuleAttribute::FwMark(mark),
        RuleAttribute::FwMask(mark),
        RuleAttribute::Priority(PRIORITY),
        // Linux before 4.17 does not keep it.
        RuleAttribute::Protocol(PROTOCOL),
    ];
    message
}

/// The mark of a rule of ours.
fn mark_of(rule: &RuleMessage) -> Option<u32> {
    let has = |attribute| rule.attributes.contains(&attribute);
    let mark = rule
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RuleAttribute::FwMark(mark) => Some(*mark),
            _ => None,
        });
    let ours = has(RuleAttribute::Table(ROUTING_TABLE)) && has(RuleAttribute::Priority(PRIORITY));
    mark.filter(|mark| ours && has(RuleAttribute::FwMask(*mark)))
}
