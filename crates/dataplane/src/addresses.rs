//! Tells when addresses of the node change.

use std::net::IpAddr;
use std::thread;

use ipvs_proxy_netlink::{Causes, Error, Monitor, Notice, Subsystem};
use netlink_packet_core::Parseable;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;

use crate::links::{LinkError, Links, address_of, failed, is_named_as_ours};

const RTNLGRP_IPV4_IFADDR: u32 = 5; // <linux/rtnetlink.h>
const RTNLGRP_IPV6_IFADDR: u32 = 9; // <linux/rtnetlink.h>
const RTNLGRP_LINK: u32 = 1; // <linux/rtnetlink.h>
const RTM_NEWADDR: u16 = 20; // <linux/rtnetlink.h>
const RTM_DELADDR: u16 = 21; // <linux/rtnetlink.h>
const RTM_NEWLINK: u16 = 16; // <linux/rtnetlink.h>
const RTM_DELLINK: u16 = 17; // <linux/rtnetlink.h>

/// A change of the node's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressNotice {
    /// An address came to our link.
    Added(IpAddr),
    /// An address went from our link.
    Removed(IpAddr),
    /// An address came to another link of the node, or went from it.
    Node,
    /// Our link went, or notices were lost: look at all of it.
    Unknown,
}

/// Listens on a thread of its own, in the calling thread's network namespace, and calls `tell`
/// with what changed, until it answers that nobody listens any more.
///
/// # Errors
/// When the kernel gives no socket, or the thread can't be started.
pub fn watch(tell: impl Fn(Vec<AddressNotice>) -> bool + Send + 'static) -> Result<(), LinkError> {
    let groups = [RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR];
    let cannot = failed("listen to address changes");
    let mut monitor = Monitor::open(Subsystem::Route, &groups).map_err(&cannot)?;
    let mut reader = Reader {
        links: Links::open()?,
        ours: None,
    };
    reader.find();
    let listen = move || {
        loop {
            let notices = match monitor.wait() {
                Ok(notices) => notices.iter().filter_map(|n| reader.read(n)).collect(),
                Err(error) => {
                    // Whoever listens goes on by listing at times.
                    tracing::error!(error = %Causes(&error), "address changes are not told any more");
                    return;
                }
            };
            if !tell(notices) {
                return;
            }
        }
    };
    let started = thread::Builder::new()
        .name("addresses".to_owned())
        .spawn(listen);
    let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(0);
    started.map(drop).map_err(|e| {
        cannot(Error::Socket {
            call: "clone",
            errno: errno(e),
        })
    })
}

/// Tells our link from the others by its index.
struct Reader {
    links: Links,
    ours: Option<u32>,
}

impl Reader {
    /// Without its index, all is taken for another link's: that costs listings and misses nothing
    /// of the node's.
    fn find(&mut self) {
        self.ours = self.links.index().ok().flatten();
    }

    fn read(&mut self, notice: &Notice) -> Option<AddressNotice> {
        let Notice::Changed { kind, payload } = notice else {
            self.find();
            return Some(AddressNotice::Unknown);
        };
        match *kind {
            RTM_NEWADDR | RTM_DELADDR => {
                let Ok(message) = AddressMessage::parse(payload) else {
                    return Some(AddressNotice::Unknown);
                };
                let address = address_of(&message)?;
                Some(match *kind {
                    _ if self.ours != Some(message.header.index) => AddressNotice::Node,
                    RTM_NEWADDR => AddressNotice::Added(address),
                    _ => AddressNotice::Removed(address),
                })
            }
            RTM_NEWLINK => {
                let link = LinkMessage::parse(payload).ok()?;
                if is_named_as_ours(&link) {
                    self.ours = Some(link.header.index);
                }
                None
            }
            RTM_DELLINK => {
                // Addresses that go with a link are told one by one.
                let other = LinkMessage::parse(payload).is_ok_and(|m| !is_named_as_ours(&m));
                (!other).then_some(AddressNotice::Unknown)
            }
            _ => None,
        }
    }
}
