//! The socket: sends requests, pairs each with its answer by sequence number.

use std::{fmt, io};

use netlink_packet_core::{
    Emitable, NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST,
    NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NetlinkBuffer, NetlinkHeader,
};
use netlink_packet_generic::GenlHeader;
use netlink_packet_generic::constants::{
    CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME, CTRL_CMD_GETFAMILY, GENL_HDRLEN, GENL_ID_CTRL,
};
use netlink_sys::SocketAddr;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::{Attributes, Error, KernelError, attributes};

/// The most requests that [`Socket::batch`] puts into one `send()`.
pub const MAX_BATCH: usize = 128;

/// A send buffer holds 212 992 bytes by default; above that, `send()` fails with `EMSGSIZE`.
const MAX_BATCH_BYTES: usize = 128 * 1024;

/// The kernel fills at most 32 KiB of it with one part of a listing (Linux 3.15 on). The rest is
/// room for a refusal that repeats the request, as ipset's do.
const RECEIVE_BYTES: usize = 128 * 1024;

/// What the kernel may queue for us before it drops answers.
const RECEIVE_QUEUE_BYTES: usize = 8 * 1024 * 1024;

/// An answer is queued when `send()` returns, so this only ends a wait for one that was lost.
const ANSWER_TIMEOUT_S: i64 = 10;

const NLMSG_HDRLEN: usize = 16; // <linux/netlink.h>
const NLMSGERR_ATTR_MSG: u16 = 1; // <linux/netlink.h>
const CTRL_VERSION: u8 = 2; // version of nlctrl, net/netlink/genetlink.c

/// The part of the kernel that a socket talks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subsystem {
    /// `NETLINK_ROUTE`: links, addresses, routes.
    Route,
    /// `NETLINK_NETFILTER`: ipset, conntrack.
    Netfilter,
    /// `NETLINK_GENERIC`: IPVS and other families known by name.
    Generic,
}

impl Subsystem {
    pub(crate) fn number(self) -> isize {
        match self {
            Subsystem::Route => 0,      // NETLINK_ROUTE <linux/netlink.h>
            Subsystem::Netfilter => 12, // NETLINK_NETFILTER <linux/netlink.h>
            Subsystem::Generic => 16,   // NETLINK_GENERIC <linux/netlink.h>
        }
    }
}

/// One netlink message to the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The message type, `nlmsg_type`.
    pub kind: u16,
    /// Flags besides `NLM_F_REQUEST` and `NLM_F_ACK`, which the socket sets.
    pub flags: u16,
    /// Everything behind the message header.
    pub payload: Vec<u8>,
}

impl Request {
    /// A request to the generic netlink family with number `family`: `genlmsghdr` of
    /// `<linux/genetlink.h>`, then what `write` writes. [`Error::TooLong`] when that does not fit.
    pub fn generic(
        family: u16,
        command: u8,
        version: u8,
        write: impl FnOnce(&mut Attributes),
    ) -> Result<Request, Error> {
        let mut header = [0; GENL_HDRLEN];
        GenlHeader {
            cmd: command,
            version,
        }
        .emit(&mut header);
        let mut attributes = Attributes::after(&header);
        write(&mut attributes);
        Ok(Request {
            kind: family,
            flags: 0,
            payload: attributes.finish()?,
        })
    }
}

/// A blocking netlink socket. It belongs to the network namespace in which it was opened. After a failure of
/// the socket itself the next request opens it again.
///
/// It is not `Clone`, and one thread owns it: answers are paired with requests by reading them in
/// turn.
pub struct Socket {
    // netlink_sys::Socket is Clone and closes its descriptor on drop: never clone it.
    socket: netlink_sys::Socket,
    subsystem: Subsystem,
    /// It failed in a way that another one might not.
    dead: bool,
    next_sequence: u32,
    buffer: Vec<u8>,
}

/// Without the buffer, which would fill screens.
impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Socket").field(&self.socket).finish()
    }
}

/// What became of the wait for a datagram.
enum Received {
    /// This many bytes of the buffer are filled.
    Bytes(usize),
    /// The kernel had to drop some answers; others may still be queued.
    SomeLost,
    /// Nothing is queued, and nothing came in time.
    Nothing,
}

impl Socket {
    /// Opens a socket to `subsystem`, with explanations of refusals switched on and a receive
    /// queue of 8 MiB, or as much as an unprivileged process may have.
    ///
    /// [`Error::Socket`] when the kernel lacks the subsystem or its sockets can't be set up.
    pub fn open(subsystem: Subsystem) -> Result<Socket, Error> {
        let mut socket = netlink_sys::Socket::new(subsystem.number()).map_err(failed("socket"))?;
        socket.bind_auto().map_err(failed("bind"))?;
        // Once connected, the socket takes messages from nobody but the kernel.
        socket
            .connect(&SocketAddr::new(0, 0))
            .map_err(failed("connect"))?;
        socket
            .set_ext_ack(true)
            .map_err(failed("NETLINK_EXT_ACK"))?;
        socket
            .set_cap_ack(true)
            .map_err(failed("NETLINK_CAP_ACK"))?;
        // So that the kernel filters a listing, from Linux 4.20 on.
        if subsystem == Subsystem::Route {
            let _ = socket.set_netlink_get_strict_chk(true);
        }
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_QUEUE_BYTES)
            .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_QUEUE_BYTES))
            .map_err(|errno| Error::Socket {
                call: "SO_RCVBUF",
                errno: errno as i32,
            })?;
        setsockopt(
            &socket,
            sockopt::ReceiveTimeout,
            &TimeVal::seconds(ANSWER_TIMEOUT_S),
        )
        .map_err(|errno| Error::Socket {
            call: "SO_RCVTIMEO",
            errno: errno as i32,
        })?;
        Ok(Socket {
            socket,
            subsystem,
            dead: false,
            next_sequence: 1,
            buffer: vec![0; RECEIVE_BYTES],
        })
    }

    /// The number of the generic netlink family `name`, for a [`Subsystem::Generic`] socket.
    ///
    /// The kernel may load the family's module for it. [`Error::NoFamily`] when it has none.
    pub fn family(&mut self, name: &str) -> Result<u16, Error> {
        let ask = Request::generic(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, CTRL_VERSION, |a| {
            a.push_str(CTRL_ATTR_FAMILY_NAME, name);
        })?;
        let answers = self.query(&ask).map_err(|error| match error {
            Error::Kernel(refusal) if refusal.code == Errno::ENOENT as i32 => Error::NoFamily {
                name: name.to_owned(),
            },
            other => other,
        })?;
        for answer in &answers {
            for attribute in attributes(answer.get(GENL_HDRLEN..).unwrap_or_default()) {
                let attribute = attribute?;
                if attribute.kind == CTRL_ATTR_FAMILY_ID {
                    return attribute.u16();
                }
            }
        }
        Err(Error::Decode("family without a number"))
    }

    /// Sends all requests, at most [`MAX_BATCH`] in one `send()`, and returns one result for each,
    /// in their order. A refused request does not stop those behind it.
    ///
    /// [`Error::Kernel`] where the kernel refused; [`Error::Overrun`] where the answer was lost and
    /// the outcome is unknown; [`Error::Socket`] where `send()` failed and nothing was done.
    pub fn batch(&mut self, requests: &[Request]) -> Vec<Result<(), Error>> {
        let mut results = Vec::with_capacity(requests.len());
        let mut rest = requests;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(sendable(rest));
            results.extend(self.send_and_collect(now));
            rest = later;
        }
        results
    }

    fn send_and_collect(&mut self, requests: &[Request]) -> Vec<Result<(), Error>> {
        let first = match self.send(requests, NLM_F_ACK) {
            Ok(first) => first,
            Err(error) => return vec![Err(error); requests.len()],
        };
        let mut results = vec![Err(Error::Overrun); requests.len()];
        let mut answered = 0;
        let mut wait = true;
        while answered < requests.len() {
            let length = match self.receive(wait) {
                Ok(Received::Bytes(length)) => length,
                // What was queued before is still there; what is missing then was dropped.
                Ok(Received::SomeLost) => {
                    wait = false;
                    continue;
                }
                Ok(Received::Nothing) | Err(_) => break,
            };
            for message in messages(self.buffer.get(..length).unwrap_or_default()) {
                let Ok(message) = message else { break };
                let index = message.sequence.wrapping_sub(first) as usize;
                // Answers to earlier requests that were given up on have no place here.
                if let (NLMSG_ERROR, Some(result)) = (message.kind, results.get_mut(index)) {
                    *result = message.outcome();
                    answered += 1;
                }
            }
        }
        results
    }

    /// Asks for a listing (`NLM_F_DUMP`) and returns what is behind the message header of every
    /// answer.
    ///
    /// The kernel walks its table anew for each 32 KiB of the listing, and runs only one at a time
    /// for a socket. [`Error::Interrupted`] when the subsystem says that the table changed
    /// meanwhile (IPVS and ipset never do).
    pub fn dump(&mut self, request: &Request) -> Result<Vec<Vec<u8>>, Error> {
        self.collect(request, NLM_F_DUMP)
    }

    /// As [`dump`](Self::dump), one answer at a time, in as much memory as one part of the listing
    /// needs. The listing counts only if the end is well; it is read to its end in any case.
    pub fn dump_each(&mut self, request: &Request, take: impl FnMut(&[u8])) -> Result<(), Error> {
        self.ask(request, NLM_F_DUMP, take)
    }

    /// Asks for one thing, not a listing, and returns what is behind the message header of the
    /// answer.
    pub fn query(&mut self, request: &Request) -> Result<Vec<Vec<u8>>, Error> {
        self.collect(request, NLM_F_ACK)
    }

    fn collect(&mut self, request: &Request, flags: u16) -> Result<Vec<Vec<u8>>, Error> {
        let mut answers = Vec::new();
        self.ask(request, flags, |answer| answers.push(answer.to_vec()))?;
        Ok(answers)
    }

    fn ask(
        &mut self,
        request: &Request,
        flags: u16,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), Error> {
        let sequence = self.send(std::slice::from_ref(request), flags)?;
        let mut lost = false;
        let mut interrupted = false;
        loop {
            let length = match self.receive(!lost)? {
                Received::Bytes(length) => length,
                // A listing that is left half read blocks the next one: read on to its end.
                Received::SomeLost => {
                    lost = true;
                    continue;
                }
                Received::Nothing => return Err(Error::Overrun),
            };
            for message in messages(self.buffer.get(..length).unwrap_or_default()) {
                let message = message?;
                if message.sequence != sequence || message.kind == NLMSG_NOOP {
                    continue;
                }
                interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
                if message.kind != NLMSG_ERROR && message.kind != NLMSG_DONE {
                    take(message.payload);
                    continue;
                }
                message.outcome()?;
                return match (lost, interrupted) {
                    (true, _) => Err(Error::Overrun),
                    (_, true) => Err(Error::Interrupted),
                    _ => Ok(()),
                };
            }
        }
    }

    /// Sends requests in one call and returns the sequence number of the first; the others follow
    /// it one by one.
    fn send(&mut self, requests: &[Request], flags: u16) -> Result<u32, Error> {
        let first = self.next_sequence;
        let mut bytes = Vec::with_capacity(requests.iter().map(size).sum());
        for request in requests {
            let mut header = NetlinkHeader::default();
            header.length =
                u32::try_from(NLMSG_HDRLEN + request.payload.len()).map_err(|_| Error::TooLong)?;
            header.message_type = request.kind;
            header.flags = request.flags | flags | NLM_F_REQUEST;
            header.sequence_number = self.next_sequence;
            self.next_sequence = self.next_sequence.wrapping_add(1);
            let mut raw = [0; NLMSG_HDRLEN];
            header.emit(&mut raw);
            bytes.extend_from_slice(&raw);
            bytes.extend_from_slice(&request.payload);
            // The kernel looks for the next message at the next multiple of four.
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        if self.dead {
            let sequence = self.next_sequence;
            *self = Socket::open(self.subsystem)?;
            self.next_sequence = sequence;
        }
        self.socket.send(&bytes, 0).map_err(|error| {
            self.dead = is_death(&error);
            failed("send")(error)
        })?;
        Ok(first)
    }

    fn receive(&mut self, wait: bool) -> Result<Received, Error> {
        let mut flags = MsgFlags::MSG_TRUNC;
        if !wait {
            flags |= MsgFlags::MSG_DONTWAIT;
        }
        loop {
            let received = self
                .socket
                .recv(&mut self.buffer.as_mut_slice(), flags.bits());
            self.dead = received.as_ref().is_err_and(is_death);
            return match received.map_err(|error| Errno::from_raw(raw_errno(&error))) {
                Ok(length) => Ok(Received::Bytes(length)),
                Err(Errno::EINTR) => continue,
                Err(Errno::ENOBUFS) => Ok(Received::SomeLost),
                Err(Errno::EAGAIN) => Ok(Received::Nothing),
                Err(errno) => Err(Error::Socket {
                    call: "recv",
                    errno: errno as i32,
                }),
            };
        }
    }
}

/// How many of `requests`, at least one, go into the next send.
fn sendable(requests: &[Request]) -> usize {
    let mut bytes = 0;
    let fitting = requests
        .iter()
        .take(MAX_BATCH)
        .take_while(|request| {
            bytes += size(request);
            bytes <= MAX_BATCH_BYTES
        })
        .count();
    fitting.max(1)
}

fn size(request: &Request) -> usize {
    (NLMSG_HDRLEN + request.payload.len()).next_multiple_of(4)
}

fn failed(call: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::Socket {
        call,
        errno: raw_errno(&error),
    }
}

/// Not what a request or the moment is to blame for.
fn is_death(error: &io::Error) -> bool {
    !matches!(
        Errno::from_raw(raw_errno(error)),
        Errno::EAGAIN
            | Errno::EINTR
            | Errno::EMSGSIZE
            | Errno::ENOBUFS
            | Errno::ENOMEM
            | Errno::EPERM
    )
}

fn raw_errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}

/// One message of a datagram.
struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    payload: &'a [u8],
}

/// The messages in a datagram. One that reaches past the end is an error and ends the iteration.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Result<Message<'_>, Error>> {
    std::iter::from_fn(move || {
        let datagram = std::mem::take(&mut bytes);
        if datagram.is_empty() {
            return None;
        }
        let Ok(header) = NetlinkBuffer::new_checked(datagram) else {
            return Some(Err(Error::Decode("message cut short")));
        };
        let length = header.length() as usize;
        bytes = datagram
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
        Some(Ok(Message {
            kind: header.message_type(),
            flags: header.flags(),
            sequence: header.sequence_number(),
            payload: datagram.get(NLMSG_HDRLEN..length).unwrap_or_default(),
        }))
    })
}

impl Message<'_> {
    /// The verdict of an `NLMSG_ERROR` or `NLMSG_DONE`: a negative errno or 0, and for the former
    /// the request it is about, then the kernel's explanation.
    fn outcome(&self) -> Result<(), Error> {
        let Some((code, rest)) = self.payload.split_first_chunk::<4>() else {
            // NLMSG_DONE without a code ends a listing well.
            return match self.kind {
                NLMSG_DONE => Ok(()),
                _ => Err(Error::Decode("refusal without a code")),
            };
        };
        match i32::from_ne_bytes(*code) {
            0 => Ok(()),
            // A listing's end may carry a positive count.
            count if count > 0 && self.kind == NLMSG_DONE => Ok(()),
            code => {
                let message = self.explanation(rest);
                Err(Error::Kernel(KernelError {
                    code: code.saturating_abs(),
                    message,
                }))
            }
        }
    }

    fn explanation(&self, behind_code: &[u8]) -> Option<String> {
        if self.flags & NLM_F_ACK_TLVS == 0 {
            return None;
        }
        let skipped = if self.kind == NLMSG_DONE {
            0
        } else if self.flags & NLM_F_CAPPED != 0 {
            NLMSG_HDRLEN
        } else {
            let request = u32::from_ne_bytes(*behind_code.first_chunk::<4>()?);
            (request as usize).checked_next_multiple_of(4)?
        };
        attributes(behind_code.get(skipped..)?)
            .map_while(Result::ok)
            .find(|attribute| attribute.kind == NLMSGERR_ATTR_MSG)
            .and_then(|attribute| attribute.str().ok().map(str::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn message(kind: u16, flags: u16, payload: &[u8]) -> Message<'_> {
        Message {
            kind,
            flags,
            sequence: 1,
            payload,
        }
    }

    fn ask_family(name: &str) -> Request {
        Request::generic(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, CTRL_VERSION, |a| {
            a.push_str(CTRL_ATTR_FAMILY_NAME, name);
        })
        .unwrap()
    }

    /// Odd lengths on purpose: every message but the first starts behind padding.
    fn refused_link(name: &str) -> Request {
        const RTM_GETLINK: u16 = 18; // <linux/rtnetlink.h>
        const IFLA_IFNAME: u16 = 3; // <linux/if_link.h>
        let mut attributes = Attributes::after(&[0; 16]);
        attributes.push_str(IFLA_IFNAME, name);
        let mut payload = attributes.finish().unwrap();
        payload.truncate(16 + 4 + name.len() + 1);
        Request {
            kind: RTM_GETLINK,
            flags: 0,
            payload,
        }
    }

    #[test]
    fn each_request_of_a_long_batch_has_its_own_result() {
        let mut socket = Socket::open(Subsystem::Generic).unwrap();
        let requests: Vec<_> = (0..3000)
            .map(|i| ask_family(if i % 3 == 0 { "nlctrl" } else { "none" }))
            .collect();
        let results = socket.batch(&requests);
        assert_eq!(results.len(), requests.len());
        for (i, result) in results.iter().enumerate() {
            match result {
                Ok(()) => assert_eq!(i % 3, 0),
                Err(Error::Kernel(refusal)) => assert_eq!((i % 3 != 0, refusal.code), (true, 2)),
                Err(other) => panic!("{i}: {other}"),
            }
        }
        assert_eq!(socket.family("nlctrl"), Ok(16));
    }

    #[test]
    fn messages_behind_padding_are_found() {
        let mut socket = Socket::open(Subsystem::Route).unwrap();
        let results = socket.batch(&[refused_link("a"), refused_link("lo"), refused_link("ab")]);
        assert!(matches!(&results[0], Err(Error::Kernel(e)) if e.code == Errno::ENODEV as i32));
        assert_eq!(results[1], Ok(()));
        assert!(matches!(&results[2], Err(Error::Kernel(e)) if e.code == Errno::ENODEV as i32));
    }

    #[test]
    fn lost_answers_are_told_from_refusals() {
        let mut socket = Socket::open(Subsystem::Generic).unwrap();
        setsockopt(&socket.socket, sockopt::RcvBuf, &4096).unwrap();
        let results = socket.batch(&vec![ask_family("none"); MAX_BATCH]);
        let lost = results
            .iter()
            .filter(|r| **r == Err(Error::Overrun))
            .count();
        let refused = results
            .iter()
            .filter(|r| matches!(r, Err(Error::Kernel(_))))
            .count();
        assert!(
            lost > 0 && refused > 0 && lost + refused == MAX_BATCH,
            "{lost} {refused}"
        );
        // The socket is in order again.
        assert_eq!(socket.family("nlctrl"), Ok(16));
    }

    #[test]
    fn answers_to_earlier_requests_are_skipped() {
        let mut socket = Socket::open(Subsystem::Generic).unwrap();
        socket
            .send(&[ask_family("none"), ask_family("nlctrl")], NLM_F_ACK)
            .unwrap();
        assert_eq!(socket.family("nlctrl"), Ok(16));
        socket.send(&[ask_family("nlctrl")], NLM_F_ACK).unwrap();
        let results = socket.batch(&[ask_family("none")]);
        assert!(matches!(&results[..], [Err(Error::Kernel(e))] if e.code == 2));
    }

    #[test]
    fn a_dead_socket_is_opened_again() {
        let mut socket = Socket::open(Subsystem::Generic).unwrap();
        assert_eq!(socket.family("nlctrl"), Ok(16));
        // Nobody is there.
        let mut dead = netlink_sys::Socket::new(Subsystem::Generic.number()).unwrap();
        dead.bind_auto().unwrap();
        dead.connect(&SocketAddr::new(u32::MAX - 1, 0)).unwrap();
        socket.socket = dead;
        let failed = socket.family("nlctrl");
        assert!(matches!(failed, Err(Error::Socket { .. })), "{failed:?}");
        assert_eq!(socket.family("nlctrl"), Ok(16));
        // A request that is to blame itself does not change the socket.
        let before = socket.socket.as_raw_fd();
        let huge = Request {
            kind: GENL_ID_CTRL,
            flags: 0,
            payload: vec![0; 20_000_000],
        };
        assert!(socket.query(&huge).is_err());
        assert_eq!(socket.family("nlctrl"), Ok(16));
        assert_eq!(socket.socket.as_raw_fd(), before);
    }

    #[test]
    fn a_listing_is_read_to_its_end() {
        let mut socket = Socket::open(Subsystem::Generic).unwrap();
        let list =
            Request::generic(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, CTRL_VERSION, |_| ()).unwrap();
        let families = socket.dump(&list).unwrap();
        assert!(families.len() > 1);
        assert_eq!(socket.dump(&list).unwrap().len(), families.len());
        let mut one_by_one = Vec::new();
        let end = socket.dump_each(&list, |answer| one_by_one.push(answer.to_vec()));
        assert_eq!((end, one_by_one), (Ok(()), families));
    }

    #[test]
    fn a_send_takes_at_most_128_requests_and_128_kib() {
        let small = vec![ask_family("none"); 300];
        assert_eq!(sendable(&small), MAX_BATCH);
        let large = vec![
            Request {
                kind: 1,
                flags: 0,
                payload: vec![0; 60_000]
            };
            5
        ];
        assert_eq!(sendable(&large), 2);
        let huge = [Request {
            kind: 1,
            flags: 0,
            payload: vec![0; 200_000],
        }];
        assert_eq!(sendable(&huge), 1);
    }

    #[test]
    fn explanations_are_found_behind_capped_and_whole_requests() {
        let mut explanation = Attributes::new();
        explanation.push_str(NLMSGERR_ATTR_MSG, "no such thing");
        let explanation = explanation.finish().unwrap();
        let mut request = 20u32.to_ne_bytes().to_vec();
        request.resize(NLMSG_HDRLEN, 0);
        let code = (-95i32).to_ne_bytes();

        let capped = [&code[..], &request, &explanation].concat();
        let whole = [&code[..], &request, &[0; 4], &explanation].concat();
        let refusal = KernelError {
            code: 95,
            message: Some("no such thing".to_owned()),
        };
        for (flags, payload) in [
            (NLM_F_ACK_TLVS | NLM_F_CAPPED, &capped),
            (NLM_F_ACK_TLVS, &whole),
        ] {
            let outcome = message(NLMSG_ERROR, flags, payload).outcome();
            assert_eq!(outcome, Err(Error::Kernel(refusal.clone())));
        }
        let none = message(NLMSG_ERROR, NLM_F_CAPPED, &capped).outcome();
        assert_eq!(
            none,
            Err(Error::Kernel(KernelError {
                code: 95,
                message: None
            }))
        );
    }

    #[test]
    fn broken_answers_do_not_panic() {
        assert!(
            message(NLMSG_ERROR, NLM_F_ACK_TLVS, &[1, 2])
                .outcome()
                .is_err()
        );
        assert!(message(NLMSG_DONE, 0, &[]).outcome().is_ok());
        let lying = [&(-1i32).to_ne_bytes()[..], &[0xff; 20]].concat();
        assert!(
            message(NLMSG_ERROR, NLM_F_ACK_TLVS, &lying)
                .outcome()
                .is_err()
        );
        let worst = i32::MIN.to_ne_bytes();
        assert!(
            message(NLMSG_ERROR, NLM_F_ACK_TLVS, &worst)
                .outcome()
                .is_err()
        );
        for length in [0u32, 15, 16, 17, u32::MAX] {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.resize(16, 0);
            assert_eq!(
                messages(&bytes).filter(Result::is_ok).count(),
                usize::from(length == 16)
            );
        }
    }
}
