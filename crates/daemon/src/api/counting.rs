//! Counts the requests to the API server, as client-go does: each by its status code, or as an error when there is no
//! answer, and how long it took until its answer was read. A watch lasts as long as it may, and is not timed. Notes for how
//! long the server wants not to be asked and where it was reached, and bounds what is read of an answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Bytes;
use hyper::header::RETRY_AFTER;
use hyper::{Request, Response, Uri};
use hyper_util::client::legacy::connect::HttpInfo;
use kube::client::Body;
use tokio::sync::watch;
use tower::{BoxError, Layer, Service};

use super::bounded::Bounded;
use super::{Access, Kind};
use crate::metrics::Requests;

/// Where answers came from: the addresses and ports to which connections were made, a proxy's among them.
pub(super) type Peers = watch::Sender<BTreeSet<SocketAddr>>;

/// The most of them that are remembered.
const MOST_PEERS: usize = 64;

fn note_peer<B>(peers: &Peers, answer: &Response<B>) {
    let Some(connection) = answer.extensions().get::<HttpInfo>() else {
        return;
    };
    let peer = connection.remote_addr();
    peers.send_if_modified(|known| {
        let new = !known.contains(&peer);
        if new && known.len() >= MOST_PEERS {
            known.clear();
        }
        new && known.insert(peer)
    });
}

/// For how long the server wants not to be asked for a kind, by the header of its last answer. That of a list or a watch of
/// all objects; the client library drops headers.
#[derive(Debug, Clone, Default)]
pub struct Pauses(Arc<Mutex<BTreeMap<Kind, Duration>>>);

impl Pauses {
    /// What the last answer asked for.
    pub(super) fn take(&self, kind: Kind) -> Duration {
        let pause = self.0.lock().ok().and_then(|mut all| all.remove(&kind));
        pause.unwrap_or_default()
    }

    fn note<B>(&self, kind: Kind, answer: &Response<B>) {
        // A date is no form that the API server uses.
        let seconds = answer
            .headers()
            .get(RETRY_AFTER)
            .filter(|_| !answer.status().is_success())
            .and_then(|value| value.to_str().ok()?.trim().parse().ok());
        if let (Some(seconds), Ok(mut all)) = (seconds, self.0.lock()) {
            all.insert(kind, Duration::from_secs(seconds));
        }
    }
}

/// The kind of which a path asks for all objects.
fn listed(path: &str) -> Option<Kind> {
    let (before, resource) = path.rsplit_once('/')?;
    Kind::ALL
        .into_iter()
        .find(|kind| kind.resource() == resource && !before.contains("/namespaces/"))
}

/// The layer of a client that counts.
#[derive(Debug, Clone)]
pub(super) struct Counting {
    requests: Requests,
    pauses: Pauses,
    peers: Peers,
    host: String,
}

impl Counting {
    /// For a client of that server.
    pub(super) fn new(access: &Access, server: &Uri) -> Counting {
        let host = server.host().unwrap_or("none");
        Counting {
            requests: access.requests.clone(),
            pauses: access.pauses.clone(),
            peers: access.peers.clone(),
            host: match server.port_u16() {
                Some(port) => format!("{host}:{port}"),
                None => host.to_owned(),
            },
        }
    }
}

impl<S> Layer<S> for Counting {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted {
            inner,
            counting: self.clone(),
        }
    }
}

/// The body of an answer.
type Answered = UnsyncBoxBody<Bytes, BoxError>;

/// A client whose requests are counted.
#[derive(Debug)]
pub(super) struct Counted<S> {
    inner: S,
    counting: Counting,
}

impl<S, B> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
    S::Future: Send + 'static,
    B: hyper::body::Body<Data = Bytes, Error = BoxError> + Send + 'static,
{
    type Response = Response<Answered>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answered>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let query = request.uri().query().unwrap_or_default();
        let mut underway = Underway {
            counting: self.counting.clone(),
            method: request.method().to_string(),
            watch: query.split('&').any(|word| word == "watch=true"),
            since: Instant::now(),
            answered: false,
        };
        let kind = listed(request.uri().path());
        let (pauses, peers) = (self.counting.pauses.clone(), self.counting.peers.clone());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            underway.answered(answer.status().as_u16());
            note_peer(&peers, &answer);
            if let Some(kind) = kind {
                pauses.note(kind, &answer);
            }
            let watch = underway.watch;
            // It is over when the body was read, or nobody wants it any more.
            Ok(
                answer
                    .map(|body| Bounded::new(body.boxed_unsync(), watch, underway).boxed_unsync()),
            )
        })
    }
}

/// A request that has not ended.
#[derive(Debug)]
struct Underway {
    counting: Counting,
    method: String,
    watch: bool,
    since: Instant,
    answered: bool,
}

impl Underway {
    fn answered(&mut self, code: u16) {
        self.answered = true;
        let Counting { requests, host, .. } = &self.counting;
        requests.ended(Some(code), &self.method, host);
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        let Counting { requests, host, .. } = &self.counting;
        // Also when nobody waited any longer.
        if !self.answered {
            requests.ended(None, &self.method, host);
        }
        if !self.watch {
            requests.took(self.since.elapsed(), &self.method, host);
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;
    use ipvs_proxy_netlink::Family;
    use tower::service_fn;

    use super::*;
    use crate::metrics::Metrics;

    /// A server that answers as the path says, or not at all.
    async fn server(
        request: Request<Body>,
    ) -> Result<Response<impl hyper::body::Body<Data = Bytes, Error = BoxError> + Send>, BoxError>
    {
        let code: u16 = match request.uri().path() {
            "/broken" => return Err("connection refused".into()),
            "/silent" => std::future::pending().await,
            path => path.trim_start_matches('/').parse()?,
        };
        let body = Full::new(Bytes::from_static(b"body")).map_err(BoxError::from);
        Ok(Response::builder().status(code).body(body)?)
    }

    #[test]
    fn each_request_is_counted_once() {
        let metrics = Metrics::new(&Family::ALL);
        let host = Uri::from_static("https://user:secret@192.0.2.1:6443/base");
        let access = Access {
            requests: metrics.requests.clone(),
            ..Access::default()
        };
        let mut client = Counting::new(&access, &host).layer(service_fn(server));
        let mut send = |method: &str, path: &'static str| {
            let request = Request::builder().method(method).uri(path);
            client.call(request.body(Body::empty()).unwrap())
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            for _ in 0..2 {
                let answer = send("GET", "/200?limit=500").await.unwrap();
                assert_eq!(
                    answer.into_body().collect().await.unwrap().to_bytes(),
                    "body"
                );
            }
            send("POST", "/409").await.unwrap();
            send("GET", "/broken").await.unwrap_err();
            drop(send("GET", "/silent"));
            send("GET", "/200?a=b&watch=true").await.unwrap();
        });
        let text = metrics.text();
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("rest_client_"))
            .filter(|line| line.contains("_total") || line.contains("_count"))
            .collect();
        for line in [
            r#"rest_client_requests_total{code="200",method="GET",host="192.0.2.1:6443"} 3"#,
            r#"rest_client_requests_total{code="409",method="POST",host="192.0.2.1:6443"} 1"#,
            r#"rest_client_requests_total{code="<error>",method="GET",host="192.0.2.1:6443"} 2"#,
            r#"rest_client_request_duration_seconds_count{verb="GET",host="192.0.2.1:6443"} 4"#,
            r#"rest_client_request_duration_seconds_count{verb="POST",host="192.0.2.1:6443"} 1"#,
        ] {
            assert!(lines.contains(&line), "{line}: {lines:#?}");
        }
        assert_eq!(lines.len(), 5, "{lines:#?}");
    }
}
