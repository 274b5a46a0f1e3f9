//! Servers that answer with their name and the address they were asked from, and clients to match.
//!
//! All of it works in the network namespace of the calling thread.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockType, SockaddrIn6, SockaddrStorage, bind, connect,
    recvfrom, setsockopt, shutdown, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// Longer than the first two retransmissions of a SYN (after 1 s and 3 s): what fails after it is no lost packet.
pub const TIMEOUT: Duration = Duration::from_secs(4);

/// A TCP and a UDP server on one port, for both families, until dropped: then the port is closed. Open connections
/// outlive it.
///
/// A request that starts with `GET` gets an HTTP response with the line `NAME PEER`; `HOLD` gets that line and then every
/// further line back; a UDP datagram gets it as a datagram.
#[derive(Debug)]
pub struct Server {
    tcp: Arc<TcpListener>,
    udp: Arc<UdpSocket>,
    stopped: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts it.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn listen(name: &str, port: u16) -> io::Result<Self> {
        let tcp = Arc::new(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))?);
        let udp = Arc::new(UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))?);
        let stopped = Arc::new(AtomicBool::new(false));
        let (listener, stop, own) = (Arc::clone(&tcp), Arc::clone(&stopped), name.to_owned());
        let listening = thread::spawn(move || {
            while let Ok((stream, peer)) = listener.accept() {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                let line = identity(&own, peer);
                // A client that leaves early is none of the server's troubles.
                thread::spawn(move || answer(stream, &line).ok());
            }
        });
        let (socket, stop, own) = (Arc::clone(&udp), Arc::clone(&stopped), name.to_owned());
        let answering = thread::spawn(move || {
            let mut buffer = [0; 64];
            while !stop.load(Ordering::SeqCst) {
                // std's recv_from panics at the end that shutdown() makes, which has no address.
                if let Ok((_, Some(peer))) =
                    recvfrom::<SockaddrIn6>(socket.as_raw_fd(), &mut buffer)
                {
                    let peer = SocketAddr::V6(peer.into());
                    let _ = socket.send_to(identity(&own, peer).as_bytes(), peer);
                }
            }
        });
        Ok(Self {
            tcp,
            udp,
            stopped,
            threads: vec![listening, answering],
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // Wakes the threads; for UDP it also reports that there is no peer.
        let _ = shutdown(self.tcp.as_raw_fd(), Shutdown::Both);
        let _ = shutdown(self.udp.as_raw_fd(), Shutdown::Both);
        // They hold the sockets too: the ports are closed when they have ended, not before.
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn identity(name: &str, peer: SocketAddr) -> String {
    format!(
        "{name} {}\n",
        SocketAddr::new(peer.ip().to_canonical(), peer.port())
    )
}

fn answer(mut stream: TcpStream, identity: &str) -> io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    lines.read_line(&mut line)?;
    if line.starts_with("GET ") {
        while !line.trim_end().is_empty() {
            line.clear();
            lines.read_line(&mut line)?;
        }
        let length = identity.len();
        write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{identity}"
        )?;
    } else {
        stream.write_all(identity.as_bytes())?;
        while line == "HOLD\n" || !line.is_empty() && lines.buffer().is_empty() {
            line.clear();
            if lines.read_line(&mut line)? == 0 {
                break;
            }
            stream.write_all(line.as_bytes())?;
        }
    }
    Ok(())
}

/// Who answered, and whom it saw asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The server's name.
    pub name: String,
    /// The client as the server saw it.
    pub peer: SocketAddr,
}

/// Why there was no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A reset, or an ICMP message that says that the port is closed.
    #[error("refused")]
    Refused,
    /// Silence for [`TIMEOUT`] (or the client's own).
    #[error("timed out")]
    Timeout,
    /// The connection was there, and ended.
    #[error("closed")]
    Closed,
    /// Something else, such as no route.
    #[error("{0}")]
    Other(io::ErrorKind),
    /// Not a server of ours.
    #[error("unexpected answer {0:?}")]
    Answer(String),
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        const EINPROGRESS: i32 = nix::errno::Errno::EINPROGRESS as i32; // a connect that outlasted SO_SNDTIMEO
        match (error.kind(), error.raw_os_error()) {
            (_, Some(EINPROGRESS)) | (io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut, _) => {
                Self::Timeout
            }
            (io::ErrorKind::ConnectionRefused, _) => Self::Refused,
            (
                io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::UnexpectedEof,
                _,
            ) => Self::Closed,
            (kind, _) => Self::Other(kind),
        }
    }
}

/// A client with a source address, a port or a patience of its own.
#[derive(Debug, Clone, Copy)]
pub struct Client {
    /// Bound before connecting; port 0 for any.
    pub source: Option<SocketAddr>,
    /// For connecting and for each answer.
    pub timeout: Duration,
}

impl Default for Client {
    fn default() -> Self {
        Self {
            source: None,
            timeout: TIMEOUT,
        }
    }
}

/// One HTTP request on a connection of its own.
///
/// # Errors
/// See [`Error`].
pub fn http_get(to: SocketAddr) -> Result<Answer, Error> {
    Client::default().http_get(to)
}

/// One datagram and its answer. Nothing is sent twice.
///
/// # Errors
/// See [`Error`].
pub fn udp_ask(to: SocketAddr) -> Result<Answer, Error> {
    Client::default().udp_ask(to)
}

/// A connection that stays open.
///
/// # Errors
/// See [`Error`].
pub fn hold(to: SocketAddr) -> Result<HeldConnection, Error> {
    Client::default().hold(to)
}

impl Client {
    /// See [`http_get`].
    ///
    /// # Errors
    /// See [`Error`].
    pub fn http_get(&self, to: SocketAddr) -> Result<Answer, Error> {
        let mut stream = TcpStream::from(self.connect(to, SockType::Stream)?);
        write!(stream, "GET / HTTP/1.1\r\nHost: test\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        match text.split_once("\r\n\r\n") {
            Some((_, body)) => parse(body),
            None if text.is_empty() => Err(Error::Closed),
            None => Err(Error::Answer(text)),
        }
    }

    /// See [`udp_ask`].
    ///
    /// # Errors
    /// See [`Error`].
    pub fn udp_ask(&self, to: SocketAddr) -> Result<Answer, Error> {
        self.datagrams(to)?.ask()
    }

    /// A UDP socket that asks again and again from the same port.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn datagrams(&self, to: SocketAddr) -> Result<Datagrams, Error> {
        let socket = UdpSocket::from(self.connect(to, SockType::Datagram)?);
        Ok(Datagrams { socket })
    }

    /// See [`hold`].
    ///
    /// # Errors
    /// See [`Error`].
    pub fn hold(&self, to: SocketAddr) -> Result<HeldConnection, Error> {
        let stream = TcpStream::from(self.connect(to, SockType::Stream)?);
        let mut held = HeldConnection {
            answer: Answer {
                name: String::new(),
                peer: to,
            },
            lines: BufReader::new(stream),
        };
        held.answer = parse(&held.exchange("HOLD\n")?)?;
        Ok(held)
    }

    fn connect(&self, to: SocketAddr, kind: SockType) -> Result<OwnedFd, Error> {
        let family = if to.is_ipv4() {
            AddressFamily::Inet
        } else {
            AddressFamily::Inet6
        };
        let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).map_err(io::Error::from)?;
        let timeout =
            TimeVal::milliseconds(i64::try_from(self.timeout.as_millis()).unwrap_or(i64::MAX));
        let set = || {
            setsockopt(&socket, sockopt::SendTimeout, &timeout)?; // connect() honours it too
            setsockopt(&socket, sockopt::ReceiveTimeout, &timeout)?;
            if let Some(source) = self.source {
                setsockopt(&socket, sockopt::ReuseAddr, &true)?;
                bind(socket.as_raw_fd(), &SockaddrStorage::from(source))?;
            }
            connect(socket.as_raw_fd(), &SockaddrStorage::from(to))
        };
        set().map_err(io::Error::from)?;
        Ok(socket)
    }
}

fn parse(text: &str) -> Result<Answer, Error> {
    let answer = text.trim_end().split_once(' ').and_then(|(name, peer)| {
        Some(Answer {
            name: name.to_owned(),
            peer: peer.parse().ok()?,
        })
    });
    answer.ok_or_else(|| Error::Answer(text.to_owned()))
}

/// A UDP socket with one source port and one destination.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
}

impl Datagrams {
    /// One datagram and its answer. Nothing is sent twice.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn ask(&self) -> Result<Answer, Error> {
        self.socket.send(b"?")?;
        let mut buffer = [0; 128];
        let length = self.socket.recv(&mut buffer)?;
        parse(&String::from_utf8_lossy(
            buffer.get(..length).unwrap_or_default(),
        ))
    }
}

/// A connection that stays open until dropped.
#[derive(Debug)]
pub struct HeldConnection {
    /// Who answered.
    pub answer: Answer,
    lines: BufReader<TcpStream>,
}

impl HeldConnection {
    /// Sends a line and waits for it to come back.
    ///
    /// # Errors
    /// [`Error::Closed`] when the other end, or something between, ended the connection; [`Error::Timeout`].
    pub fn ping(&mut self) -> Result<(), Error> {
        match self.exchange("PING\n")? {
            line if line == "PING\n" => Ok(()),
            line => Err(Error::Answer(line)),
        }
    }

    /// Ends the connection by a reset. IPVS forgets such a connection after 10 s, and one that is
    /// closed after 2 min.
    pub fn reset(self) {
        let at_once = nix::libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        setsockopt(self.lines.get_ref(), sockopt::Linger, &at_once).expect("SO_LINGER");
    }

    fn exchange(&mut self, line: &str) -> Result<String, Error> {
        self.lines.get_mut().write_all(line.as_bytes())?;
        let mut answer = String::new();
        match self.lines.read_line(&mut answer)? {
            0 => Err(Error::Closed),
            _ => Ok(answer),
        }
    }
}
