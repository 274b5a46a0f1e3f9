//! What the kernel tells to all who listen.

use std::thread;
use std::time::Duration;

use netlink_packet_core::NetlinkBuffer;
use netlink_sys::SocketAddr;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::{Error, Subsystem};

/// About how many notices are returned at once.
const MANY: usize = 1024;

/// A notice of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// Something changed.
    Changed {
        /// The message type, `nlmsg_type`.
        kind: u16,
        /// Everything behind the message header.
        payload: Vec<u8>,
    },
    /// Notices were lost (`ENOBUFS`, or a socket that failed): list again.
    Lost,
}

/// How long a socket that failed is left alone before it is opened again.
const PAUSE: Duration = Duration::from_secs(1);

/// A socket that listens to multicast groups. It blocks; give it a thread of its own.
#[derive(Debug)]
pub struct Monitor {
    socket: netlink_sys::Socket,
    subsystem: Subsystem,
    groups: Vec<u32>,
    buffer: Vec<u8>,
}

impl Monitor {
    /// Listens to groups (`RTNLGRP_*` of `<linux/rtnetlink.h>`) of the calling thread's network
    /// namespace.
    ///
    /// [`Error::Socket`] when the kernel lacks the subsystem or a group.
    pub fn open(subsystem: Subsystem, groups: &[u32]) -> Result<Monitor, Error> {
        Ok(Monitor {
            socket: listen(subsystem, groups)?,
            subsystem,
            groups: groups.to_vec(),
            buffer: vec![0; 64 * 1024],
        })
    }

    /// Waits for the next notices, at least one, and returns all that have come. A socket that failed is opened again after
    /// a second, which counts as [`Notice::Lost`]. It belongs to the calling thread's network namespace then.
    ///
    /// [`Error::Socket`] when that can't be done; the next call tries it again.
    pub fn wait(&mut self) -> Result<Vec<Notice>, Error> {
        self.wait_up_to(None)
    }

    /// As [`wait`](Self::wait), for so long at most: then there are none.
    ///
    /// [`Error::Socket`] when the socket can't be used any more.
    pub fn wait_for(&mut self, time: Duration) -> Result<Vec<Notice>, Error> {
        // No time at all would stand for no limit.
        self.wait_up_to(Some(time.max(Duration::from_millis(1))))
    }

    fn wait_up_to(&mut self, time: Option<Duration>) -> Result<Vec<Notice>, Error> {
        let micros = time.unwrap_or_default().as_micros();
        let limit = TimeVal::microseconds(i64::try_from(micros).unwrap_or(i64::MAX));
        if setsockopt(&self.socket, sockopt::ReceiveTimeout, &limit).is_err() {
            return self.listen_again();
        }
        let mut notices = Vec::new();
        while notices.len() < MANY {
            let flags = match notices.is_empty() {
                true => MsgFlags::empty(),
                false => MsgFlags::MSG_DONTWAIT,
            };
            match self
                .socket
                .recv(&mut self.buffer.as_mut_slice(), flags.bits())
            {
                Ok(length) => notices.extend(read(self.buffer.get(..length).unwrap_or_default())),
                Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
                    Errno::ENOBUFS => notices.push(Notice::Lost),
                    Errno::EINTR => {}
                    Errno::EAGAIN if time.is_some() || !notices.is_empty() => break,
                    _ => return self.listen_again(),
                },
            }
        }
        Ok(notices)
    }

    fn listen_again(&mut self) -> Result<Vec<Notice>, Error> {
        thread::sleep(PAUSE);
        self.socket = listen(self.subsystem, &self.groups)?;
        Ok(vec![Notice::Lost])
    }
}

fn listen(subsystem: Subsystem, groups: &[u32]) -> Result<netlink_sys::Socket, Error> {
    let failed = |call| {
        move |e: std::io::Error| Error::Socket {
            call,
            errno: e.raw_os_error().unwrap_or(0),
        }
    };
    let mut socket = netlink_sys::Socket::new(subsystem.number()).map_err(failed("socket"))?;
    socket
        .bind(&SocketAddr::new(0, 0))
        .map_err(failed("bind"))?;
    // More room is better and not needed: what is lost is told.
    let room = 1024 * 1024;
    let _ = setsockopt(&socket, sockopt::RcvBufForce, &room);
    for group in groups {
        socket
            .add_membership(*group)
            .map_err(failed("NETLINK_ADD_MEMBERSHIP"))?;
    }
    Ok(socket)
}

/// The notices of a datagram; what can't be read counts as lost.
fn read(mut datagram: &[u8]) -> Vec<Notice> {
    let mut notices = Vec::new();
    while !datagram.is_empty() {
        let Ok(message) = NetlinkBuffer::new_checked(datagram) else {
            notices.push(Notice::Lost);
            break;
        };
        notices.push(Notice::Changed {
            kind: message.message_type(),
            payload: message.payload().to_vec(),
        });
        let length = usize::try_from(message.length()).unwrap_or(usize::MAX);
        let next = length.saturating_add(3) & !3;
        datagram = datagram.get(next..).unwrap_or_default();
    }
    notices
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_datagram_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }

    #[test]
    fn a_socket_that_failed_is_opened_again() {
        let mut monitor = Monitor::open(Subsystem::Route, &[1]).unwrap();
        // Not to wait is a failure where there is no limit.
        monitor.socket.set_non_blocking(true).unwrap();
        assert_eq!(monitor.wait(), Ok(vec![Notice::Lost]));
        assert_eq!(monitor.wait_for(Duration::from_millis(1)), Ok(Vec::new()));
    }

    #[test]
    fn several_messages_in_a_datagram() {
        let mut datagram = Vec::new();
        for kind in [20_u16, 21] {
            datagram.extend(18_u32.to_ne_bytes());
            datagram.extend(kind.to_ne_bytes());
            datagram.extend([0; 10]);
            datagram.extend([7, 8, 0, 0]);
        }
        let changed = |kind| Notice::Changed {
            kind,
            payload: vec![7, 8],
        };
        assert_eq!(read(&datagram), [changed(20), changed(21)]);
    }
}
