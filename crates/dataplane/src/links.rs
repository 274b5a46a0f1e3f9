//! The dummy link and the addresses on it, over rtnetlink.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipvs_proxy_core::state::LINK;
use ipvs_proxy_netlink::{Error, Family, KernelError, Request, Socket, Subsystem};
use netlink_packet_core::{Emitable, Parseable};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

pub(crate) const NLM_F_CREATE: u16 = 0x400; // <linux/netlink.h>
pub(crate) const NLM_F_EXCL: u16 = 0x200; // <linux/netlink.h>
const ENODEV: i32 = 19; // <asm-generic/errno-base.h>
const EEXIST: i32 = 17; // <asm-generic/errno-base.h>
const EOPNOTSUPP: i32 = 95; // <asm-generic/errno.h>
const EADDRNOTAVAIL: i32 = 99; // <asm-generic/errno.h>

/// How often a list that changed while it was read is read again.
pub(crate) const LISTINGS: usize = 10;

/// Why a link or an address can't be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// A link of our name is of another kind.
    #[error("the link {LINK} is not of kind dummy: rename or delete it (ip link delete {LINK})")]
    NotDummy,
    /// The kernel has no dummy links.
    #[error(
        "create link {LINK}: the kernel has no links of kind dummy: load the module (modprobe dummy)"
    )]
    NoDummy,
    /// The kernel said no, or could not be asked.
    #[error("{what}: {source}")]
    Kernel {
        /// What was tried.
        what: String,
        /// Why not.
        source: Error,
    },
}

impl LinkError {
    /// The kernel's error, where it is one.
    #[must_use]
    pub fn kernel(&self) -> Option<&Error> {
        match self {
            LinkError::NotDummy | LinkError::NoDummy => None,
            LinkError::Kernel { source, .. } => Some(source),
        }
    }
}

/// One change of the link's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressChange {
    /// Add it with a host prefix.
    Add(IpAddr),
    /// Remove it.
    Remove(IpAddr),
}

/// A client of rtnetlink for the one link that is ours.
#[derive(Debug)]
pub struct Links {
    socket: Socket,
}

impl Links {
    /// Opens a socket in the thread's network namespace.
    ///
    /// # Errors
    /// If the kernel gives no socket.
    pub fn open() -> Result<Links, LinkError> {
        let socket = Socket::open(Subsystem::Route).map_err(failed("open rtnetlink"))?;
        Ok(Links { socket })
    }

    /// Creates the dummy link, which stays down: only its addresses count. Does nothing when it
    /// is there.
    ///
    /// # Errors
    /// [`LinkError::NotDummy`], [`LinkError::NoDummy`], or the kernel's refusal.
    pub fn create(&mut self) -> Result<(), LinkError> {
        if self.index()?.is_some() {
            return Ok(());
        }
        let mut message = LinkMessage::default();
        message
            .attributes
            .push(LinkAttribute::IfName(LINK.to_owned()));
        message
            .attributes
            .push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(
                InfoKind::Dummy,
            )]));
        let request = request(
            RouteNetlinkMessage::NewLink(message),
            NLM_F_CREATE | NLM_F_EXCL,
        );
        self.one(&request).map_err(|error| match error {
            Error::Kernel(KernelError {
                code: EOPNOTSUPP, ..
            }) => LinkError::NoDummy,
            error => failed(&format!("create link {LINK}"))(error),
        })
    }

    /// Deletes the link with its addresses. Does nothing when it is not there.
    ///
    /// # Errors
    /// [`LinkError::NotDummy`], or the kernel's refusal.
    pub fn delete(&mut self) -> Result<(), LinkError> {
        let Some(index) = self.index()? else {
            return Ok(());
        };
        let mut message = LinkMessage::default();
        message.header.index = index;
        let request = request(RouteNetlinkMessage::DelLink(message), 0);
        self.one(&request)
            .map_err(failed(&format!("delete link {LINK}")))
    }

    /// The link's index, `None` when there is no such link.
    ///
    /// # Errors
    /// [`LinkError::NotDummy`], or the kernel's refusal.
    pub fn index(&mut self) -> Result<Option<u32>, LinkError> {
        let mut message = LinkMessage::default();
        message
            .attributes
            .push(LinkAttribute::IfName(LINK.to_owned()));
        let answers = match self
            .socket
            .query(&request(RouteNetlinkMessage::GetLink(message), 0))
        {
            Ok(answers) => answers,
            Err(Error::Kernel(KernelError { code: ENODEV, .. })) => return Ok(None),
            Err(error) => return Err(failed(&format!("find link {LINK}"))(error)),
        };
        let Some(answer) = answers.first() else {
            return Ok(None);
        };
        let link = LinkMessage::parse(answer).map_err(|_| {
            failed(&format!("find link {LINK}"))(Error::Decode("a link message has another form"))
        })?;
        let dummy = link.attributes.iter().any(|attribute| {
            matches!(attribute, LinkAttribute::LinkInfo(infos)
                if infos.contains(&LinkInfo::Kind(InfoKind::Dummy)))
        });
        if dummy {
            Ok(Some(link.header.index))
        } else {
            Err(LinkError::NotDummy)
        }
    }

    /// The addresses on the link, and those on all other links, of the latter without loopback ones;
    /// both without IPv6 link-local ones.
    ///
    /// # Errors
    /// The kernel's refusal. A link of our name and another kind is another's.
    pub fn addresses(&mut self) -> Result<(BTreeSet<IpAddr>, BTreeSet<IpAddr>), LinkError> {
        let index = match self.index() {
            Err(LinkError::NotDummy) => None,
            index => index?,
        };
        let messages = self.list_addresses().map_err(failed("list addresses"))?;
        let (mut ours, mut others) = (BTreeSet::new(), BTreeSet::new());
        for message in messages {
            let Some(address) = address_of(&message).filter(|address| !is_link_local(address))
            else {
                continue;
            };
            if Some(message.header.index) == index {
                ours.insert(address);
            } else if !address.is_loopback() {
                others.insert(address);
            }
        }
        Ok((ours, others))
    }

    /// Lists anew where the kernel says that the list may lack something.
    fn list_addresses(&mut self) -> Result<Vec<AddressMessage>, Error> {
        let ask = request(
            RouteNetlinkMessage::GetAddress(AddressMessage::default()),
            0,
        );
        let mut answers = self.socket.dump(&ask);
        for _ in 0..LISTINGS {
            if answers != Err(Error::Interrupted) {
                break;
            }
            answers = self.socket.dump(&ask);
        }
        let parse = |answer: &Vec<u8>| {
            AddressMessage::parse(answer)
                .map_err(|_| Error::Decode("an address message has another form"))
        };
        answers?.iter().map(parse).collect()
    }

    /// Adds and removes addresses, in order; one result for each. Adding one that is there and
    /// removing one that is not are fine.
    pub fn change(&mut self, changes: &[AddressChange]) -> Vec<Result<(), LinkError>> {
        let index = match self.index() {
            Ok(Some(index)) => index,
            Ok(None) => {
                let gone = Error::Kernel(KernelError {
                    code: ENODEV,
                    message: None,
                });
                let error = failed(&format!("find link {LINK}"))(gone);
                return vec![Err(error); changes.len()];
            }
            Err(error) => return vec![Err(error); changes.len()],
        };
        let requests: Vec<Request> = changes
            .iter()
            .map(|change| match change {
                AddressChange::Add(address) => request(
                    RouteNetlinkMessage::NewAddress(message_of(*address, index)),
                    NLM_F_CREATE | NLM_F_EXCL,
                ),
                AddressChange::Remove(address) => request(
                    RouteNetlinkMessage::DelAddress(message_of(*address, index)),
                    0,
                ),
            })
            .collect();
        let results = self.socket.batch(&requests);
        changes
            .iter()
            .zip(results)
            .map(|(change, result)| match (change, result) {
                (
                    AddressChange::Remove(address),
                    Err(Error::Kernel(KernelError {
                        code: EADDRNOTAVAIL,
                        ..
                    })),
                ) => (change, self.remove_as_listed(*address, index)),
                (_, result) => (change, result),
            })
            .map(|(change, result)| match (change, result) {
                (AddressChange::Add(_), Err(Error::Kernel(KernelError { code: EEXIST, .. }))) => {
                    Ok(())
                }
                (AddressChange::Add(address), Err(error)) => {
                    Err(failed(&format!("add address {address} to {LINK}"))(error))
                }
                (AddressChange::Remove(address), Err(error)) => Err(failed(&format!(
                    "remove address {address} from {LINK}"
                ))(error)),
                (_, Ok(())) => Ok(()),
            })
            .collect()
    }

    /// Removes an address whatever its prefix: the kernel finds it by the right one only, and other
    /// hands may have given it another than ours.
    fn remove_as_listed(&mut self, address: IpAddr, index: u32) -> Result<(), Error> {
        for listed in self.list_addresses()? {
            if listed.header.index == index && address_of(&listed) == Some(address) {
                let mut message = message_of(address, index);
                message.header.prefix_len = listed.header.prefix_len;
                self.one(&request(RouteNetlinkMessage::DelAddress(message), 0))?;
            }
        }
        Ok(())
    }

    fn one(&mut self, request: &Request) -> Result<(), Error> {
        let results = self.socket.batch(std::slice::from_ref(request));
        results.into_iter().next().unwrap_or(Err(Error::Overrun))
    }
}

pub(crate) fn failed(what: &str) -> impl Fn(Error) -> LinkError + use<> {
    let what = what.to_owned();
    move |source| LinkError::Kernel {
        what: what.clone(),
        source,
    }
}

pub(crate) fn request(message: RouteNetlinkMessage, flags: u16) -> Request {
    let mut payload = vec![0; message.buffer_len()];
    message.emit(&mut payload);
    Request {
        kind: message.message_type(),
        flags,
        payload,
    }
}

/// The address with its host prefix. IPv6 skips duplicate detection: a VIP is on every node.
fn message_of(address: IpAddr, index: u32) -> AddressMessage {
    let family = Family::of(address);
    let mut message = AddressMessage::default();
    message.header.family = match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    };
    message.header.prefix_len = family.host_prefix();
    message.header.index = index;
    message.attributes.push(AddressAttribute::Local(address));
    message.attributes.push(AddressAttribute::Address(address));
    if family == Family::V6 {
        message
            .attributes
            .push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    message
}

pub(crate) fn is_named_as_ours(link: &LinkMessage) -> bool {
    link.attributes
        .iter()
        .any(|attribute| matches!(attribute, LinkAttribute::IfName(name) if name == LINK))
}

/// Whether it is one of the IPv6 addresses that the kernel gives every link that is up.
pub(crate) fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

pub(crate) fn address_of(message: &AddressMessage) -> Option<IpAddr> {
    // IPv4 has both; `Local` is the node's own where they differ (point to point).
    let local = message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            AddressAttribute::Local(address) => Some(*address),
            _ => None,
        });
    local.or_else(|| {
        message
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            })
    })
}
