//! Who may hold a connection.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tower::Service as _;

/// The most connections that are open on a port.
pub const CONNECTIONS: usize = 64;
/// The most of them that one source holds: an IPv4 address, or a network of IPv6 with 64 bits.
pub const CONNECTIONS_OF_ONE: usize = 16;
/// How long a client may take for the header of a request, and be silent between two.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Who connected a moment ago is not silent yet.
const GRACE: Duration = Duration::from_millis(100);

/// An open connection.
#[derive(Debug)]
struct Connection {
    /// The port of ours that it came to.
    port: u16,
    source: IpAddr,
    /// From an address of the node to itself, as kubelet's probes are.
    own: bool,
    since: Instant,
    /// A request came and is not answered yet.
    asks: Arc<AtomicBool>,
    task: AbortHandle,
}

/// The open connections of all ports that share a bound.
#[derive(Debug)]
pub(super) struct Connections {
    open: Mutex<Vec<Connection>>,
    most: usize,
}

impl Connections {
    /// None yet, and never more than this.
    pub(super) fn at_most(most: usize) -> Connections {
        Connections {
            open: Mutex::default(),
            most,
        }
    }

    /// Ends those of a port that is closed.
    pub(super) fn end(&self, port: u16) {
        for closed in self.open().extract_if(.., |open| open.port == port) {
            closed.task.abort();
        }
    }

    /// Adds one; others end to make room for it.
    fn add(&self, connection: Connection) {
        let mut open = self.open();
        open.retain(|connection| !connection.task.is_finished());
        while let Some(victim) = victim(&open, &connection, self.most) {
            open.swap_remove(victim).task.abort();
        }
        open.push(connection);
    }

    fn open(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves those who connect to a port, each by a task of its own.
pub(super) async fn accept(
    mut listener: TcpListener,
    port: u16,
    router: &Router,
    connections: &Connections,
) -> ! {
    loop {
        // Where the process has no descriptor left, this waits for one.
        let (stream, peer) = Listener::accept(&mut listener).await;
        let own = stream.local_addr().is_ok_and(|own| own.ip() == peer.ip());
        let asks = Arc::new(AtomicBool::new(false));
        connections.add(Connection {
            port,
            source: source(peer.ip()),
            own,
            since: Instant::now(),
            asks: Arc::clone(&asks),
            task: tokio::spawn(answer(stream, router.clone(), asks)).abort_handle(),
        });
        // Whose request is there gets its answer before the next one is let in.
        tokio::task::yield_now().await;
    }
}

async fn answer(stream: TcpStream, router: Router, asks: Arc<AtomicBool>) {
    let service = service_fn(|request| {
        asks.store(true, Ordering::Relaxed);
        let (answer, asks) = (router.clone().call(request), Arc::clone(&asks));
        async move {
            let answer = answer.await;
            asks.store(false, Ordering::Relaxed);
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    // A client that leaves early, or speaks something else, is none of our troubles.
    drop(connection.await);
}

/// Whose connections count together: who has one address of IPv6 has many.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = address.to_bits() & !u128::from(u64::MAX);
            Ipv6Addr::from_bits(network).into()
        }
        address => address,
    }
}

/// Which connection makes room for a new one, if there is none: one of its source on its port, when that has as many as one may
/// have; else one of its port, when that has as many as a port may have; else any. Of these one of those who have the most, before
/// that one that asks nothing, before that the oldest. What comes from the node itself goes last.
fn victim(open: &[Connection], new: &Connection, most: usize) -> Option<usize> {
    let of_port = |other: &Connection| other.port == new.port;
    let of_one = |other: &Connection| of_port(other) && other.source == new.source;
    let number = |which: &dyn Fn(&Connection) -> bool| open.iter().filter(|c| which(c)).count();
    let which: &dyn Fn(&Connection) -> bool = if number(&of_one) >= CONNECTIONS_OF_ONE {
        &of_one
    } else if number(&of_port) >= CONNECTIONS {
        &of_port
    } else if open.len() >= most {
        &|_| true
    } else {
        return None;
    };
    let candidates = || open.iter().enumerate().filter(|(_, c)| which(c));
    let mut of = HashMap::<IpAddr, usize>::new();
    for (_, connection) in candidates() {
        *of.entry(connection.source).or_default() += 1;
    }
    let order = |connection: &Connection| {
        let silent = !connection.asks.load(Ordering::Relaxed)
            && new.since.saturating_duration_since(connection.since) >= GRACE;
        (
            connection.own,
            Reverse(of.get(&connection.source).copied().unwrap_or_default()),
            !silent,
            connection.since,
        )
    };
    let victim = candidates().min_by_key(|(_, connection)| order(connection));
    victim.map(|(index, _)| index)
}
