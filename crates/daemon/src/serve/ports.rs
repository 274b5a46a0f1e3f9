//! Health check node ports: load balancers ask there whether this node has endpoints of a Service.
//!
//! One thread answers on all of them. It is told what to answer, and tells where it listens, by [`HealthPorts`]: neither it nor
//! the loop ever waits for the other. A port that can't be had is tried again every 5 s.
//!
//! Codes, headers and body are kube-proxy's (`pkg/proxy/healthcheck/service_health.go` of Kubernetes), for any path and method.
//! A node that is to be deleted goes on answering: its endpoints leave one by one, and with the last the answer is no (KEP-3836).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use axum::Router;
use axum::extract::State as Shared;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use ipvs_proxy_core::health::HealthPort;
use ipvs_proxy_netlink::Family;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use super::accept::{Connections, accept};
use super::{AGAIN, Listen, Moment, NOSNIFF, Question, Status};

/// The most connections that are open on all health check node ports together.
pub const CONNECTIONS: usize = 512;

/// How many local endpoints a Service has, for load balancers that weigh nodes by it (KEP-3458).
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// Where a health check node port is listened on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listening {
    /// The families in which it is, on one address at least.
    pub families: Vec<Family>,
    /// Why it is not on all addresses.
    pub error: Option<String>,
}

/// What is to be answered on health check node ports, and where they are listened on.
pub struct HealthPorts {
    state: Mutex<State>,
    /// There is something new to listen on, or no longer.
    changed: Notify,
    /// Wakes the loop.
    wake: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for HealthPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HealthPorts").field(&*self.state()).finish()
    }
}

#[derive(Debug, Default)]
struct State {
    answers: BTreeMap<u16, HealthPort>,
    /// The ports of which the addresses changed.
    changed: BTreeSet<u16>,
    listening: BTreeMap<u16, Listening>,
}

impl HealthPorts {
    /// Starts the thread. `wake` is called when [`take_listening`](Self::take_listening) has something new; it must not wait.
    ///
    /// # Errors
    /// If there is no thread to be had.
    pub fn start(
        status: &Arc<Status>,
        listen: Listen,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<HealthPorts>> {
        allow_many_files();
        let ports = Arc::new(HealthPorts {
            state: Mutex::default(),
            changed: Notify::new(),
            wake: Box::new(wake),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("no runtime for health check node ports")?;
        let server = Server {
            ports: Arc::clone(&ports),
            status: Arc::clone(status),
            own: own_ports(listen),
            connections: Arc::new(Connections::at_most(CONNECTIONS)),
            listeners: BTreeMap::new(),
            failing: BTreeMap::new(),
        };
        std::thread::Builder::new()
            .name("http-services".to_owned())
            .spawn(move || runtime.block_on(server.run()))?;
        Ok(ports)
    }

    /// What is to be answered from now on, by port; `None` closes one.
    pub fn answer(&self, news: Vec<(u16, Option<HealthPort>)>) {
        let mut state = self.state();
        for (port, answer) in news {
            let before = match answer.clone() {
                Some(answer) => state.answers.insert(port, answer),
                None => state.answers.remove(&port),
            };
            if before.map(|before| before.addresses) != answer.map(|answer| answer.addresses) {
                state.changed.insert(port);
            }
        }
        if !state.changed.is_empty() {
            self.changed.notify_one();
        }
    }

    /// Where ports are listened on that were opened, changed or tried again since the last call.
    pub fn take_listening(&self) -> BTreeMap<u16, Listening> {
        std::mem::take(&mut self.state().listening)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hundreds of ports need more files than a process may have that asks for none: as many as it may ask for.
fn allow_many_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        warn!(%error, "the limit of open files could not be raised");
    }
}

/// The ports on which this process answers for itself, whoever has them now.
fn own_ports(listen: Listen) -> BTreeMap<u16, &'static str> {
    let own = [
        (listen.metrics, "--metrics-bind-address"),
        (listen.health, "--healthz-bind-address"),
    ];
    let own = own.into_iter();
    own.filter_map(|(address, flag)| Some((address?.port(), flag)))
        .collect()
}

/// The thread that listens.
struct Server {
    ports: Arc<HealthPorts>,
    status: Arc<Status>,
    own: BTreeMap<u16, &'static str>,
    connections: Arc<Connections>,
    listeners: BTreeMap<u16, BTreeMap<IpAddr, JoinHandle<()>>>,
    /// What can't be had, and why.
    failing: BTreeMap<u16, BTreeMap<IpAddr, String>>,
}

impl Server {
    async fn run(mut self) {
        let mut again = Instant::now() + AGAIN;
        loop {
            let changed = Arc::clone(&self.ports);
            tokio::select! {
                () = changed.changed.notified() => {}
                () = sleep_until(again), if !self.failing.is_empty() => {}
            }
            let mut changed = std::mem::take(&mut self.ports.state().changed);
            if again <= Instant::now() {
                again = Instant::now() + AGAIN;
                changed.extend(self.failing.keys());
            }
            self.listen(&changed).await;
        }
    }

    /// Listens on these ports where it is wanted now, and nowhere else.
    async fn listen(&mut self, ports: &BTreeSet<u16>) {
        let wanted: BTreeMap<u16, BTreeSet<IpAddr>> = {
            let state = self.ports.state();
            let wanted = ports.iter().filter_map(|port| {
                let answer = state.answers.get(port)?;
                Some((*port, answer.addresses.clone()))
            });
            wanted.collect()
        };
        // All that goes before anything comes: a port may go from all addresses to one.
        for port in ports {
            self.failing.remove(port);
            let on = wanted.get(port);
            let listeners = self.listeners.remove(port).unwrap_or_default();
            let (stay, go): (BTreeMap<_, _>, BTreeMap<_, _>) = listeners
                .into_iter()
                .partition(|(address, _)| on.is_some_and(|on| on.contains(address)));
            for listener in go.into_values() {
                listener.abort();
                // Its socket is closed when it has ended.
                drop(listener.await);
            }
            if on.is_none() {
                self.connections.end(*port);
            } else {
                self.listeners.insert(*port, stay);
            }
        }
        for (port, addresses) in &wanted {
            for address in addresses {
                self.open(*port, *address);
            }
        }
        self.tell(wanted.keys().copied());
    }

    /// Listens on an address, if it does not.
    fn open(&mut self, port: u16, address: IpAddr) {
        let listeners = self.listeners.entry(port).or_default();
        if listeners.contains_key(&address) {
            return;
        }
        let at = SocketAddr::new(address, port);
        let listener = match self.own.get(&port) {
            Some(flag) => Err(format!("is the port of {flag}")),
            None => bind(at).map_err(|error| format!("can't listen on {at}: {error}")),
        };
        match listener {
            Ok(listener) => {
                debug!(%at, "listening for health checks of a Service");
                let shared = (Arc::clone(&self.ports), Arc::clone(&self.status), port);
                let router = Router::new().fallback(answer).with_state(shared);
                let connections = Arc::clone(&self.connections);
                let serve = async move { accept(listener, port, &router, &connections).await };
                listeners.insert(address, tokio::spawn(serve));
            }
            Err(error) => {
                let failing = self.failing.entry(port).or_default();
                failing.insert(address, error);
            }
        }
    }

    /// Tells the loop, and in metrics, where is listened.
    fn tell(&self, ports: impl Iterator<Item = u16>) {
        let mut state = self.ports.state();
        for port in ports {
            let addresses = self.listeners.get(&port).into_iter().flatten();
            let families: BTreeSet<Family> = addresses.map(|(a, _)| Family::of(*a)).collect();
            let errors = self.failing.get(&port);
            let error = errors.and_then(|errors| errors.values().next().cloned());
            let listening = Listening {
                families: families.into_iter().collect(),
                error,
            };
            state.listening.insert(port, listening);
        }
        let news = !state.listening.is_empty();
        drop(state);
        let failing = self.failing.len();
        let listening = self.listeners.len().saturating_sub(failing);
        self.status.metrics.health_ports(listening, failing);
        if news {
            (self.ports.wake)();
        }
    }
}

/// Listens on an address; where that is all of IPv6, on none of IPv4.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
            socket
        }
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    // As many as the kernel takes.
    socket.listen(i32::MAX.unsigned_abs())
}

type Asked = (Arc<HealthPorts>, Arc<Status>, u16);

async fn answer(Shared((ports, status, port)): Shared<Asked>) -> Response {
    let answer = {
        let state = ports.state();
        let answer = state.answers.get(&port);
        answer.map(|answer| (answer.service.clone(), answer.local_endpoints))
    };
    let Some((service, local_endpoints)) = answer else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let health = status.health().clone();
    let healthy = health.works(Question::Health, Moment::now());
    let code = match local_endpoints > 0 && healthy {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let quoted = |text: &str| serde_json::Value::from(text);
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {},\n\t\t\"name\": {}\n\t}},\n\t\"localEndpoints\": \
         {local_endpoints},\n\t\"serviceProxyHealthy\": {healthy}\n}}",
        quoted(&service.namespace),
        quoted(&service.name),
    );
    let headers = [(CONTENT_TYPE, "application/json"), NOSNIFF];
    let weight = [(WEIGHT, local_endpoints.to_string())];
    (code, headers, weight, body).into_response()
}

#[cfg(test)]
mod tests;
