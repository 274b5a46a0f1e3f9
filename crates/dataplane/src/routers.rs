//! Addresses that the node's routes show to be other hosts' or no host's.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipvs_proxy_netlink::{Error, Family, Request, Socket, Subsystem};
use netlink_packet_core::{Emitable, Parseable};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

/// The routers through which routes of all tables lead, IPv6 link-local ones aside, and the broadcast addresses of the links
/// (`RTN_BROADCAST`, <linux/rtnetlink.h>).
///
/// # Errors
/// If the routes can't be listed.
pub fn routers_and_broadcasts() -> Result<BTreeSet<IpAddr>, Error> {
    let mut socket = Socket::open(Subsystem::Route)?;
    let mut addresses = BTreeSet::new();
    for family in Family::ALL {
        let mut message = RouteMessage::default();
        message.header.address_family = match family {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        };
        let message = RouteNetlinkMessage::GetRoute(message);
        let mut payload = vec![0; message.buffer_len()];
        message.emit(&mut payload);
        let request = Request {
            kind: message.message_type(),
            flags: 0,
            payload,
        };
        for answer in socket.dump(&request)? {
            // A form that is not known is no router that is known.
            let Ok(route) = RouteMessage::parse(&answer) else {
                continue;
            };
            addresses.extend(gateways(&route.attributes));
            if route.header.kind == RouteType::Broadcast {
                addresses.extend(destination(&route.attributes));
            }
        }
    }
    addresses.retain(|address| match address {
        IpAddr::V4(v4) => !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local() && !v6.is_unspecified(),
    });
    Ok(addresses)
}

fn destination(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(v4)) => Some((*v4).into()),
        _ => None,
    })
}

fn gateways(attributes: &[RouteAttribute]) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for attribute in attributes {
        match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(v4))
            | RouteAttribute::Via(RouteVia::Inet(v4)) => found.push((*v4).into()),
            RouteAttribute::Gateway(RouteAddress::Inet6(v6))
            | RouteAttribute::Via(RouteVia::Inet6(v6)) => found.push((*v6).into()),
            RouteAttribute::MultiPath(hops) => {
                found.extend(hops.iter().flat_map(|hop| gateways(&hop.attributes)));
            }
            _ => {}
        }
    }
    found
}
