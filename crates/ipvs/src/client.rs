//! The client: changes and lists the IPVS table of the network namespace it was opened in.

use std::fmt;

use ipvs_proxy_netlink::{
    Error as NetlinkError, KernelError, Request as Message, Socket, Subsystem, errno_name,
};

use crate::codec;
use crate::types::{
    Info, RealServer, RealServerEntry, RealServerKey, Scheduler, SyncDaemon, Timeouts,
    VirtualServer, VirtualServerEntry, VirtualServerKey,
};

const EPERM: i32 = 1; // <asm-generic/errno-base.h>
const ENOENT: i32 = 2; // <asm-generic/errno-base.h>
const ESRCH: i32 = 3; // <asm-generic/errno-base.h>
const EEXIST: i32 = 17; // <asm-generic/errno-base.h>
const EINVAL: i32 = 22; // <asm-generic/errno-base.h>
const EAFNOSUPPORT: i32 = 97; // <asm-generic/errno.h>

/// One change of the IPVS table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// Adds a virtual server without real servers. The kernel loads the scheduler's module.
    AddVirtualServer(&'a VirtualServer),
    /// Replaces all settings of a virtual server in place: connections and counters stay, and the
    /// scheduler starts anew when it changes. Its key can't change.
    UpdateVirtualServer(&'a VirtualServer),
    /// Removes a virtual server and its real servers.
    RemoveVirtualServer(VirtualServerKey),
    /// Adds a real server. Connections of one that was removed lately continue.
    AddRealServer(VirtualServerKey, RealServer),
    /// Replaces all settings of a real server in place; its connections stay.
    UpdateRealServer(VirtualServerKey, RealServer),
    /// Removes a real server; packets of its connections are dropped from then on.
    RemoveRealServer(VirtualServerKey, RealServerKey),
}

/// `add real server 10.1.0.7:8080 of 10.0.0.1:80/tcp`.
impl fmt::Display for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::AddVirtualServer(server) => {
                write!(
                    f,
                    "add virtual server {} ({})",
                    server.key, server.scheduler
                )
            }
            Request::UpdateVirtualServer(server) => {
                write!(
                    f,
                    "update virtual server {} ({})",
                    server.key, server.scheduler
                )
            }
            Request::RemoveVirtualServer(key) => write!(f, "remove virtual server {key}"),
            Request::AddRealServer(of, server) => {
                write!(f, "add real server {} of {of}", server.key)
            }
            Request::UpdateRealServer(of, server) => {
                write!(f, "update real server {} of {of}", server.key)
            }
            Request::RemoveRealServer(of, key) => write!(f, "remove real server {key} of {of}"),
        }
    }
}

/// Why IPVS did not do what it was asked for. `request` says what that was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The kernel has no IPVS (yet).
    #[error("the kernel has no IPVS: load its module with `modprobe ip_vs`")]
    NoModule,
    /// The virtual or real server to add is there already (`EEXIST`).
    #[error("{request}: exists already (EEXIST)")]
    Exists {
        /// What was asked for.
        request: String,
    },
    /// The virtual server is not there (`ESRCH`).
    #[error("{request}: no such virtual server (ESRCH)")]
    NoVirtualServer {
        /// What was asked for.
        request: String,
    },
    /// The virtual server is there, the real server is not (`ENOENT`).
    #[error("{request}: no such real server (ENOENT)")]
    NoRealServer {
        /// What was asked for.
        request: String,
    },
    /// The kernel finds neither the scheduler nor a module that has it, or the same for the
    /// persistence engine where one is named (`ENOENT`).
    #[error("{request}: no such scheduler or persistence engine (ENOENT)")]
    NoScheduler {
        /// What was asked for.
        request: String,
    },
    /// The process lacks `CAP_NET_ADMIN` in its network namespace (`EPERM`).
    #[error("{request}: not permitted without CAP_NET_ADMIN (EPERM)")]
    Permission {
        /// What was asked for.
        request: String,
    },
    /// Any other refusal. Among those that can be had: `EINVAL` for a persistence prefix, a real
    /// server address or a forwarding method that does not fit, `ERANGE` for a lower threshold
    /// above the upper one or a weight above 2^31 - 1, `EAFNOSUPPORT` for IPv6 without it.
    #[error("{request}: {source}")]
    Kernel {
        /// What was asked for, with all its settings.
        request: String,
        /// The errno, and the kernel's explanation if there is one.
        source: KernelError,
    },
    /// The request has no form on the wire; the kernel was not asked.
    #[error("{request}: {source}")]
    Unsendable {
        /// What was asked for, with all its settings.
        request: String,
        /// What is wrong with it.
        source: codec::Unsendable,
    },
    /// The answer was lost: whether the change was made is unknown. List and compare.
    #[error("{request}: the kernel's answer was lost")]
    Overrun {
        /// What was asked for.
        request: String,
    },
    /// The socket failed or the answer can't be read.
    #[error("{request}: {source}")]
    Transport {
        /// What was asked for.
        request: String,
        /// What failed.
        source: NetlinkError,
    },
}

impl Error {
    /// The name of the errno behind the error, where there is one: `EEXIST`.
    #[must_use]
    pub fn errno_name(&self) -> Option<String> {
        match self {
            Error::Exists { .. } => Some("EEXIST".to_owned()),
            Error::NoVirtualServer { .. } => Some("ESRCH".to_owned()),
            Error::NoRealServer { .. } | Error::NoScheduler { .. } => Some("ENOENT".to_owned()),
            Error::Permission { .. } => Some("EPERM".to_owned()),
            Error::Kernel { source, .. } => Some(errno_name(source.code)),
            Error::Transport {
                source: NetlinkError::Socket { errno, .. },
                ..
            } => Some(errno_name(*errno)),
            _ => None,
        }
    }

    /// The error of a question, for which the errnos that tell apart changes mean nothing special.
    fn of(error: NetlinkError, request: &str) -> Error {
        let request = request.to_owned();
        match error {
            NetlinkError::Kernel(refusal) => match refusal.code {
                ESRCH => Error::NoVirtualServer { request },
                EPERM => Error::Permission { request },
                _ => Error::Kernel {
                    request,
                    source: refusal,
                },
            },
            NetlinkError::Overrun => Error::Overrun { request },
            NetlinkError::NoFamily { .. } => Error::NoModule,
            source => Error::Transport { request, source },
        }
    }

    /// The error of a change (`ip_vs_genl_set_cmd` of net/netfilter/ipvs/ip_vs_ctl.c).
    fn of_change(error: NetlinkError, change: &Request<'_>) -> Error {
        let request = change.to_string();
        let on_real_server = match change {
            Request::AddVirtualServer(_)
            | Request::UpdateVirtualServer(_)
            | Request::RemoveVirtualServer(_) => false,
            Request::AddRealServer(..)
            | Request::UpdateRealServer(..)
            | Request::RemoveRealServer(..) => true,
        };
        match Error::of(error, &request) {
            Error::Kernel { source, .. } => match source.code {
                EEXIST => Error::Exists { request },
                ENOENT if on_real_server => Error::NoRealServer { request },
                ENOENT => Error::NoScheduler { request },
                _ => Error::Kernel {
                    request: format!("{change:?}"),
                    source,
                },
            },
            other => other,
        }
    }
}

/// What is behind the message headers of the answers to a question.
type Answers = Result<Vec<Vec<u8>>, NetlinkError>;

/// A client of the IPVS of one network namespace.
///
/// Blocking, and owned by one thread. Every call needs `CAP_NET_ADMIN` in the namespace, also the
/// listing ones.
#[derive(Debug)]
pub struct Client {
    socket: Socket,
    family: u16,
}

impl Client {
    /// Connects to the IPVS of the calling thread's network namespace. When the module is unloaded and loaded
    /// again later, the client goes on with the new one, whose table is empty.
    ///
    /// [`Error::NoModule`] when the kernel does not know the netlink family `IPVS`. Kernels differ
    /// in whether the question loads the module (Linux 5.10 never does).
    pub fn open() -> Result<Client, Error> {
        let socket = Socket::open(Subsystem::Generic)
            .map_err(|error| Error::of(error, "open a netlink socket"))?;
        let mut client = Client { socket, family: 0 };
        client.find_family()?;
        Ok(client)
    }

    /// The number of IPVS's netlink family when it was last asked for: another one after the module was unloaded and loaded.
    #[must_use]
    pub fn family(&self) -> u16 {
        self.family
    }

    /// Asks for the number of the netlink family, which the module gets anew when it is loaded; whether
    /// it is another one than before.
    fn find_family(&mut self) -> Result<bool, Error> {
        match self.socket.family(codec::IPVS_GENL_NAME) {
            Ok(family) => Ok(std::mem::replace(&mut self.family, family) != family),
            Err(NetlinkError::NoFamily { .. }) => Err(Error::NoModule),
            Err(error) => Err(Error::of(error, "find the netlink family of IPVS")),
        }
    }

    /// Makes changes in the order given, many in one system call, and returns one result for each.
    /// A refused change does not stop those behind it.
    pub fn apply(&mut self, requests: &[Request<'_>]) -> Vec<Result<(), Error>> {
        let mut results: Vec<Result<(), Error>> = Vec::with_capacity(requests.len());
        let mut messages = Vec::with_capacity(requests.len());
        for (n, request) in requests.iter().enumerate() {
            results.push(match codec::change(self.family, request) {
                Ok(message) => {
                    messages.push((n, message));
                    Ok(())
                }
                Err(source) => Err(Error::Unsendable {
                    request: format!("{request:?}"),
                    source,
                }),
            });
        }
        let (places, messages): (Vec<usize>, Vec<Message>) = messages.into_iter().unzip();
        let mut answers = self.socket.batch(&messages);
        let unknown = |answer: &Result<(), NetlinkError>| matches!(answer, Err(error) if may_be_no_family(error));
        // Nothing was done by those, whether it is the family that is unknown or something else.
        if answers.iter().any(unknown) {
            match self.find_family() {
                Ok(true) => {
                    let again = messages
                        .iter()
                        .zip(&answers)
                        .filter(|(_, answer)| unknown(answer));
                    let again: Vec<Message> = again
                        .map(|(message, _)| Message {
                            kind: self.family,
                            ..message.clone()
                        })
                        .collect();
                    let mut answered = self.socket.batch(&again).into_iter();
                    for answer in answers.iter_mut().filter(|answer| unknown(answer)) {
                        *answer = answered.next().unwrap_or(Err(NetlinkError::Overrun));
                    }
                }
                Err(Error::NoModule) => {
                    for answer in answers.iter_mut().filter(|answer| unknown(answer)) {
                        let name = codec::IPVS_GENL_NAME.to_owned();
                        *answer = Err(NetlinkError::NoFamily { name });
                    }
                }
                Ok(false) | Err(_) => {}
            }
        }
        for (n, answer) in places.into_iter().zip(answers) {
            if let (Some(slot), Some(request)) = (results.get_mut(n), requests.get(n)) {
                *slot = answer.map_err(|error| Error::of_change(error, request));
            }
        }
        results
    }

    /// All virtual servers.
    ///
    /// The kernel sends the list in parts and walks its table anew for each: one that changes
    /// meanwhile may yield entries twice or not at all, without a sign of it.
    pub fn virtual_servers(&mut self) -> Result<Vec<VirtualServerEntry>, Error> {
        let what = "list virtual servers";
        let ask = |family| codec::get_virtual_server(family, None);
        let answers = self.ask(ask, Socket::dump, what)?;
        decode_all(&answers, what, codec::virtual_server)
    }

    /// One virtual server, `None` when the kernel has none of this key.
    pub fn virtual_server(
        &mut self,
        key: VirtualServerKey,
    ) -> Result<Option<VirtualServerEntry>, Error> {
        let what = format!("get virtual server {key}");
        let ask = |family| codec::get_virtual_server(family, Some(&key));
        match self.query(ask, &what, codec::virtual_server) {
            Err(Error::NoVirtualServer { .. }) => Ok(None),
            result => result.map(Some),
        }
    }

    /// The real servers of a virtual server. The kernel answers with an empty list when there is
    /// no such virtual server. As to changes meanwhile, see [`Client::virtual_servers`].
    pub fn real_servers(&mut self, of: VirtualServerKey) -> Result<Vec<RealServerEntry>, Error> {
        let what = format!("list real servers of {of}");
        let ask = |family| codec::get_real_servers(family, &of);
        let answers = self.ask(ask, Socket::dump, &what)?;
        decode_all(&answers, &what, |payload| {
            codec::real_server(payload, of.family())
        })
    }

    /// How long connections without traffic are kept.
    pub fn timeouts(&mut self) -> Result<Timeouts, Error> {
        let what = "get timeouts";
        self.query(codec::get_timeouts, what, codec::timeouts)
    }

    /// Sets how long connections without traffic are kept, of those to come and of those whose
    /// timer starts anew. Zero leaves a timeout as it is; the rest of a second counts as one.
    ///
    /// [`Error::Kernel`] with `EINVAL` when one is beyond 2^31 - 1 ticks of the kernel's clock.
    pub fn set_timeouts(&mut self, timeouts: &Timeouts) -> Result<(), Error> {
        let ask = |family| codec::set_timeouts(family, timeouts);
        self.command(ask, &format!("set timeouts to {timeouts:?}"))
    }

    /// The synchronization daemons that run in the network namespace, of each role one at most.
    pub fn sync_daemons(&mut self) -> Result<Vec<SyncDaemon>, Error> {
        let what = "list synchronization daemons";
        let answers = self.ask(codec::get_sync_daemons, Socket::dump, what)?;
        decode_all(&answers, what, codec::sync_daemon)
    }

    /// IPVS's version and the size of its connection table.
    pub fn info(&mut self) -> Result<Info, Error> {
        let what = "get the version of IPVS";
        self.query(codec::get_info, what, codec::info)
    }

    /// Whether the kernel has a scheduler, or a module that has it, which it then loads. Changes
    /// nothing in the table.
    ///
    /// A kernel without IPv6 in IPVS can't tell; the answer is yes then, and the first virtual
    /// server that uses the scheduler will show.
    pub fn has_scheduler(&mut self, scheduler: Scheduler) -> Result<bool, Error> {
        let what = format!("look for scheduler {scheduler}");
        let ask = |family| codec::probe_scheduler(family, &scheduler);
        match self.ask(ask, Socket::query, &what) {
            Err(Error::Kernel { source, .. }) if source.code == ENOENT => Ok(false),
            Err(Error::Kernel { source, .. })
                if source.code == EINVAL || source.code == EAFNOSUPPORT =>
            {
                Ok(true)
            }
            answer => answer.map(|_| true),
        }
    }

    /// Removes all virtual servers of the network namespace, whoever made them.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.command(codec::flush, "remove all virtual servers")
    }

    /// Sets the counters of one virtual server and its real servers to zero; `None` stands for all
    /// and the namespace's total.
    ///
    /// [`Error::NoVirtualServer`] when there is none of this key.
    pub fn zero(&mut self, key: Option<VirtualServerKey>) -> Result<(), Error> {
        let what = match key {
            Some(key) => format!("zero the counters of {key}"),
            None => "zero all counters".to_owned(),
        };
        self.command(|family| codec::zero(family, key.as_ref()), &what)
    }

    fn command(
        &mut self,
        message: impl Fn(u16) -> Result<Message, codec::Unsendable>,
        what: &str,
    ) -> Result<(), Error> {
        self.ask(message, Socket::query, what).map(drop)
    }

    fn query<T>(
        &mut self,
        message: impl Fn(u16) -> Result<Message, codec::Unsendable>,
        what: &str,
        decode: impl Fn(&[u8]) -> Result<T, NetlinkError>,
    ) -> Result<T, Error> {
        let answers = self.ask(message, Socket::query, what)?;
        let answer = answers.first().ok_or(NetlinkError::Decode("no answer"));
        answer
            .and_then(|answer| decode(answer))
            .map_err(|error| Error::of(error, what))
    }

    /// Asks, and once more where the family of the question has another number by now.
    fn ask(
        &mut self,
        message: impl Fn(u16) -> Result<Message, codec::Unsendable>,
        by: fn(&mut Socket, &Message) -> Answers,
        what: &str,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let ask = sendable(message(self.family), what)?;
        let answers = match by(&mut self.socket, &ask) {
            Err(error) if may_be_no_family(&error) && self.find_family()? => {
                let ask = sendable(message(self.family), what)?;
                by(&mut self.socket, &ask)
            }
            answers => answers,
        };
        answers.map_err(|error| Error::of(error, what))
    }
}

/// What the kernel answers where it does not know the family (`genl_rcv_msg`), and to some that it knows.
fn may_be_no_family(error: &NetlinkError) -> bool {
    matches!(error, NetlinkError::Kernel(refusal) if refusal.code == ENOENT)
}

fn sendable(message: Result<Message, codec::Unsendable>, what: &str) -> Result<Message, Error> {
    message.map_err(|source| Error::Unsendable {
        request: what.to_owned(),
        source,
    })
}

fn decode_all<T>(
    answers: &[Vec<u8>],
    what: &str,
    decode: impl Fn(&[u8]) -> Result<T, NetlinkError>,
) -> Result<Vec<T>, Error> {
    let entries = answers.iter().map(|answer| decode(answer));
    entries
        .collect::<Result<_, _>>()
        .map_err(|error| Error::of(error, what))
}
