//! Who may hold a connection.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tower::Service as _;

/// The most connections that are open on an address.
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
    source: IpAddr,
    /// From an address of the node to itself, as kubelet's probes are.
    own: bool,
    since: Instant,
    /// A request came and is not answered yet.
    asks: Arc<AtomicBool>,
    task: AbortHandle,
}

/// Serves those who connect, each by a task of its own.
pub(super) async fn accept(mut listener: TcpListener, router: &Router) -> ! {
    let mut open = Vec::<Connection>::new();
    loop {
        // Where the process has no descriptor left, this waits for one.
        let (stream, peer) = Listener::accept(&mut listener).await;
        let source = source(peer.ip());
        open.retain(|connection| !connection.task.is_finished());
        while let Some(victim) = victim(&open, source, Instant::now()) {
            open.swap_remove(victim).task.abort();
        }
        let own = stream.local_addr().is_ok_and(|own| own.ip() == peer.ip());
        let asks = Arc::new(AtomicBool::new(false));
        open.push(Connection {
            source,
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

/// Which connection makes room for one from this source, if there is none: its own, when it has as many as one may have;
/// else one of those who have the most, before that one that asks nothing, before that the oldest. What comes from the node
/// itself goes last.
fn victim(open: &[Connection], from: IpAddr, now: Instant) -> Option<usize> {
    let mut of = HashMap::<IpAddr, usize>::new();
    for connection in open {
        *of.entry(connection.source).or_default() += 1;
    }
    let number = |source: &IpAddr| of.get(source).copied().unwrap_or_default();
    let full = number(&from) >= CONNECTIONS_OF_ONE;
    if !full && open.len() < CONNECTIONS {
        return None;
    }
    let candidates = open
        .iter()
        .enumerate()
        .filter(|(_, connection)| !full || connection.source == from);
    let order = |connection: &Connection| {
        let silent = !connection.asks.load(Ordering::Relaxed)
            && now.saturating_duration_since(connection.since) >= GRACE;
        (
            connection.own,
            Reverse(number(&connection.source)),
            !silent,
            connection.since,
        )
    };
    let victim = candidates.min_by_key(|(_, connection)| order(connection));
    victim.map(|(index, _)| index)
}
