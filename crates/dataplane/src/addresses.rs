//! Tells when addresses of the node change.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use ipvs_proxy_netlink::{Causes, Error, Monitor, Notice, Subsystem};
use netlink_packet_core::Parseable;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;

use crate::links::{LinkError, Links, address_of, failed, is_link_local, is_named_as_ours};

const RTNLGRP_IPV4_IFADDR: u32 = 5; // <linux/rtnetlink.h>
const RTNLGRP_IPV6_IFADDR: u32 = 9; // <linux/rtnetlink.h>
const RTNLGRP_LINK: u32 = 1; // <linux/rtnetlink.h>
const RTM_NEWADDR: u16 = 20; // <linux/rtnetlink.h>
const RTM_DELADDR: u16 = 21; // <linux/rtnetlink.h>
const RTM_NEWLINK: u16 = 16; // <linux/rtnetlink.h>
const RTM_DELLINK: u16 = 17; // <linux/rtnetlink.h>

/// How often at most it is told that addresses of the node changed: whoever hears of it lists them all.
const PAUSE: Duration = Duration::from_millis(100);

/// A change of the node's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressNotice {
    /// An address came to our link.
    Added(IpAddr),
    /// An address went from our link.
    Removed(IpAddr),
    /// An address that others can reach came to another link of the node, or went from it.
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
        known: BTreeSet::new(),
    };
    reader.find();
    let mut pace = Pace::default();
    let listen = move || {
        loop {
            let heard = match pace.due {
                Some(at) => monitor.wait_for(at.saturating_duration_since(Instant::now())),
                None => monitor.wait(),
            };
            let read = match heard {
                Ok(notices) => notices.iter().filter_map(|n| reader.read(n)).collect(),
                Err(error) => {
                    // Whoever listens goes on by listing at times.
                    tracing::error!(error = %Causes(&error), "address changes are not told any more");
                    return;
                }
            };
            let news = pace.news(read, Instant::now());
            if !news.is_empty() && !tell(news) {
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

/// Makes one of many changes of the node's addresses.
#[derive(Default)]
struct Pace {
    told: Option<Instant>,
    /// When it is told that there were more.
    due: Option<Instant>,
}

impl Pace {
    fn news(&mut self, read: Vec<AddressNotice>, now: Instant) -> Vec<AddressNotice> {
        let of_node = |notice: &AddressNotice| *notice == AddressNotice::Node;
        let node = self.due.is_some() || read.iter().any(of_node);
        let mut news: Vec<_> = read.into_iter().filter(|notice| !of_node(notice)).collect();
        let next = self.told.map_or(now, |told| told + PAUSE);
        if node && now >= next {
            news.push(AddressNotice::Node);
            self.told = Some(now);
            self.due = None;
        } else if node {
            self.due = Some(next);
        }
        news
    }
}

/// Tells our link from the others by its index.
struct Reader {
    links: Links,
    ours: Option<u32>,
    /// The addresses on other links of which it was told that they came: the kernel tells so again when
    /// only their lifetime changes.
    known: BTreeSet<(u32, IpAddr)>,
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
            self.known.clear();
            return Some(AddressNotice::Unknown);
        };
        match *kind {
            RTM_NEWADDR | RTM_DELADDR => {
                let Ok(message) = AddressMessage::parse(payload) else {
                    return Some(AddressNotice::Unknown);
                };
                let address = address_of(&message).filter(|address| !is_link_local(address))?;
                let (index, added) = (message.header.index, *kind == RTM_NEWADDR);
                if self.ours != Some(index) {
                    if address.is_loopback() {
                        return None;
                    }
                    let changed = match added {
                        true => self.known.insert((index, address)),
                        false => {
                            self.known.remove(&(index, address));
                            true
                        }
                    };
                    return changed.then_some(AddressNotice::Node);
                }
                Some(match added {
                    true => AddressNotice::Added(address),
                    false => AddressNotice::Removed(address),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_changes_are_one() {
        use AddressNotice::{Added, Node};
        let mut pace = Pace::default();
        let start = Instant::now();
        let vip = Added([10, 96, 0, 10].into());
        assert_eq!(pace.news(vec![Node, vip, Node], start), [vip, Node]);
        // The rest waits, but for what is ours.
        let ms = Duration::from_millis;
        assert_eq!(pace.news(vec![Node], start + ms(10)), []);
        assert_eq!(pace.news(vec![Node, vip], start + ms(20)), [vip]);
        assert_eq!(pace.due, Some(start + PAUSE));
        assert_eq!(pace.news(vec![], start + PAUSE), [Node]);
        assert_eq!(pace.due, None);
        assert_eq!(pace.news(vec![], start + PAUSE * 2), []);
        assert_eq!(pace.news(vec![Node], start + PAUSE * 2), [Node]);
    }
}
