use std::collections::{BTreeSet, VecDeque};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipvs_proxy_core::model::{Change, Node};
use ipvs_proxy_dataplane::conntrack::ForgetError;
use ipvs_proxy_netlink::Family;
use serde_json::{Value, json};

use super::{CONNECTIONS_OF_ONE, Listen, Moment, Status, health_router, metrics_router, start};
use crate::api::{Kind, NodeFacts};

const PERIOD: Duration = Duration::from_secs(30);

/// Both routers on loopback.
struct Server {
    status: Arc<Status>,
    metrics: SocketAddr,
    health: SocketAddr,
}

impl Server {
    fn new(api: bool) -> Server {
        Server::on("127.0.0.1", api)
    }

    fn on(address: &str, api: bool) -> Server {
        let config = json!({"scheduler": "lc"});
        let status = Arc::new(Status::new(&Family::ALL, PERIOD, api, config));
        let routers = [metrics_router, health_router].map(|router| router(Arc::clone(&status)));
        let [metrics, health] = routers.map(|router| {
            let listener = super::bind(format!("{address}:0").parse().unwrap()).unwrap();
            let address = listener.local_addr().unwrap();
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                    let connections = super::Connections::at_most(super::CONNECTIONS);
                    super::accept(listener, address.port(), &router, &connections).await;
                });
            });
            address
        });
        Server {
            status,
            metrics,
            health,
        }
    }

    /// Codes of /healthz, /livez and /readyz.
    fn codes(&self) -> [u16; 3] {
        ["/healthz", "/livez", "/readyz"].map(|path| get(self.health, path).0)
    }

    fn verbose(&self) -> String {
        get(self.health, "/readyz?verbose").2
    }
}

/// Code, headers in lower case, body.
fn get(address: SocketAddr, path: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, head.to_lowercase(), body.to_owned())
}

/// A moment that is so long ago.
fn ago(seconds: u64) -> Moment {
    let (now, by) = (Moment::now(), Duration::from_secs(seconds));
    Moment {
        at: now.at.checked_sub(by).unwrap(),
        wall: now.wall - by,
    }
}

fn facts(ineligible: Option<&'static str>) -> NodeFacts {
    NodeFacts { ineligible }
}

#[test]
fn codes_by_state() {
    let server = Server::new(false);
    let status = &server.status;
    assert_eq!(server.codes(), [200, 200, 503], "at start");
    status.queued(&[Change::Node(Node::default())], Vec::new(), true);
    assert_eq!(server.codes(), [200, 200, 503], "a change came");
    status.health().queued = Some(ago(59));
    assert_eq!(server.codes(), [200, 200, 503], "it waits, not too long");
    status.health().queued = Some(ago(61));
    assert_eq!(server.codes(), [503, 200, 503], "it waits too long");
    status.rests(std::iter::empty(), None);
    status.ready();
    assert_eq!(server.codes(), [200, 200, 200], "it is in the kernel");

    status.node(&facts(Some("the Node is being deleted")));
    assert_eq!(server.codes(), [503, 200, 200], "not eligible");
    status.node(&facts(None));
    assert_eq!(server.codes(), [200, 200, 200], "eligible again");

    let at = |seconds| ago(seconds).at;
    status.rests([at(3600), at(10)].into_iter(), None);
    assert_eq!(server.codes(), [200, 200, 200], "things of Services fail");
    assert!(server.verbose().contains("\n[~]objects failed since "));
    assert!(server.verbose().contains(": 2 can't be written\n"));
    let base = |seconds| Some(("link kube-ipvs0: gone".to_owned(), at(seconds)));
    status.rests([at(61)].into_iter(), base(61));
    assert_eq!(server.codes(), [503, 200, 503], "what all rest on fails");
    status.rests([at(9)].into_iter(), base(9));
    assert_eq!(server.codes(), [200, 200, 503], "not for long");
    assert!(server.verbose().contains(": link kube-ipvs0: gone\n"));
    status.rests(std::iter::empty(), None);

    status.read(Err("no answer".to_owned()));
    assert_eq!(server.codes(), [200, 200, 503], "the kernel can't be read");
    assert!(server.verbose().contains("[-]kernel-read failed since "));
    status.read(Ok(()));
    status.sysctls(&BTreeSet::from(["sysctl x is 0".to_owned()]));
    assert_eq!(
        server.codes(),
        [200, 200, 200],
        "findings that do not decide"
    );
    assert!(server.verbose().contains("[~]sysctls failed since "));
    assert!(server.verbose().contains("[+]node-ports ok since "));
    assert!(status.node_ports(Some("taken")));
    assert!(!status.node_ports(Some("taken")));
    assert!(server.verbose().contains("[~]node-ports failed since "));
    assert_eq!(server.codes(), [200, 200, 200], "node ports may be taken");
    assert!(status.node_ports(None));
    assert!(server.verbose().contains("[+]node-ports ok since "));
    assert!(server.verbose().contains("[+]udp-flows ok since "));
    status.flows(&Ok(3));
    status.flows(&Err(ForgetError::NoModule));
    let no_module = "[~]udp-flows failed since ";
    assert!(server.verbose().contains(no_module));
    assert!(server.verbose().contains("modprobe nf_conntrack_netlink"));
    assert_eq!(
        server.codes(),
        [200, 200, 200],
        "UDP flows can't be forgotten"
    );
    status.flows(&Ok(4));
    assert!(server.verbose().contains("[+]udp-flows ok since "));
    assert!(!server.verbose().contains("pod-cidrs"));
    status.pod_cidrs(false);
    assert_eq!(server.codes(), [200, 200, 200], "no podCIDRs yet");
    assert!(server.verbose().contains("[~]pod-cidrs failed since "));
    status.pod_cidrs(true);
    assert!(server.verbose().contains("[+]pod-cidrs ok since "));

    status.works();
    assert_eq!(server.codes(), [200, 200, 200], "the loop works");
    status.health().busy = Some(ago(29));
    assert_eq!(
        server.codes(),
        [200, 200, 200],
        "at one thing, not too long"
    );
    status.health().busy = Some(ago(31));
    assert_eq!(server.codes(), [503, 503, 503], "the loop is stuck");
    status.waits();
    assert_eq!(server.codes(), [200, 200, 200], "the loop waits");

    let metrics = get(server.metrics, "/metrics").2;
    let counted = |line: &str| metrics.lines().any(|l| l == line);
    assert!(
        counted("kubeproxy_proxy_livez_total{code=\"503\"} 1"),
        "{metrics}"
    );
    assert!(
        counted("kubeproxy_proxy_healthz_total{code=\"503\"} 4"),
        "{metrics}"
    );
    assert!(counted("ipvs_proxy_failed_sysctls 1"), "{metrics}");
    assert!(counted("ipvs_proxy_forgotten_udp_flows_total 7"));
    assert!(counted("ipvs_proxy_forget_udp_flows_failures_total 1"));
}

#[test]
fn changes_that_wait_for_long_take_no_more_and_more_room() {
    let status = Status::new(&Family::ALL, PERIOD, true, Value::Null);
    let now = std::time::SystemTime::now();
    for _ in 0..1000 {
        status.queued(&[], vec![(Family::V4, now); 100], true);
    }
    assert_eq!(status.triggers().len(), super::TRIGGERS);
    status.rests(std::iter::empty(), None);
    assert_eq!(status.triggers().len(), 0);
}

#[test]
fn an_outage_of_the_api_server_is_shown_and_decides_nothing() {
    let server = Server::new(true);
    let status = &server.status;
    let up = |kind: &str| {
        let metrics = get(server.metrics, "/metrics").2;
        let line = |value| format!("ipvs_proxy_api_up{{resource=\"{kind}\"}} {value}");
        metrics.lines().any(|l| l == line(1)) && !metrics.lines().any(|l| l == line(0))
    };
    assert!(server.verbose().contains("[~]api-services failed since "));
    // Changes that can't be applied before all is listed wait for the API server, not for us.
    status.queued(&[Change::Node(Node::default())], Vec::new(), false);
    assert!(status.health().queued.is_none());
    assert!(!up("services"));
    Kind::ALL.into_iter().for_each(|kind| status.listed(kind));
    status.complete();
    status.rests(std::iter::empty(), None);
    status.ready();
    assert!(server.verbose().contains("[+]api-services ok since "));
    assert!(up("services"));
    status.followed(Kind::Services, Err("connection refused"));
    let since = status.health().api[&Kind::Services]
        .failing
        .clone()
        .unwrap()
        .0;
    status.followed(Kind::Services, Err("no route"));
    let failing = status.health().api[&Kind::Services].failing.clone();
    assert_eq!(
        failing,
        Some((since, "no route".to_owned())),
        "since the first failure"
    );
    assert_eq!(server.codes(), [200, 200, 200]);
    assert!(server.verbose().contains("[~]api-services failed since "));
    assert!(!up("services") && up("nodes"));
    std::thread::sleep(std::time::Duration::from_millis(2));
    status.followed(Kind::Services, Ok(()));
    assert!(server.verbose().contains("[+]api-services ok since ") && up("services"));
    let recovered = status.health().recovered["api-services"];
    assert!(recovered > since.wall, "when it was well again");
    let objects = ["a: x", "b: y", "c", "d"].map(str::to_owned);
    status.unread(Kind::Services, super::unusable(objects.iter()));
    let unread = ": 4 can't be read: a: x; b: y; c\n";
    assert!(server.verbose().contains(unread) && up("services"));
    assert_eq!(server.codes(), [200, 200, 200]);
    status.unread(Kind::Services, None);
    assert!(server.verbose().contains("[+]api-services ok since "));
}

#[test]
fn a_configuration_that_cannot_be_used_is_shown_and_decides_nothing() {
    let server = Server::new(false);
    let status = &server.status;
    let unusable = |value| {
        let metrics = get(server.metrics, "/metrics").2;
        metrics.contains(&format!("\nipvs_proxy_config_unusable {value}\n"))
    };
    assert!(!server.verbose().contains("config") && unusable(0));
    status.config(Some("c.conf: mode: no".to_owned()));
    assert!(server.verbose().contains("[~]config failed since ") && unusable(1));
    assert!(server.verbose().contains(": c.conf: mode: no\n"));
    status.config(None);
    assert!(!server.verbose().contains("config") && unusable(0));
}

#[test]
fn bodies_are_those_of_kube_proxy() {
    let server = Server::new(false);
    server.status.rests(std::iter::empty(), None);
    let json = |path: &str| -> Value {
        let (_, head, body) = get(server.health, path);
        assert!(
            head.contains("content-type: application/json\r\n"),
            "{head}"
        );
        assert!(head.contains("x-content-type-options: nosniff"), "{head}");
        serde_json::from_str(&body).unwrap()
    };
    let healthy = json("/healthz");
    assert_eq!(healthy["nodeEligible"], json!(true));
    assert_eq!(healthy["healthy"], json!(true));
    assert_eq!(healthy["lastUpdated"], healthy["currentTime"]);
    let time: k8s_openapi::jiff::Timestamp =
        healthy["currentTime"].as_str().unwrap().parse().unwrap();
    assert!(
        time.duration_until(k8s_openapi::jiff::Timestamp::now())
            .as_secs()
            < 60
    );
    assert_eq!(json("/livez").get("nodeEligible"), None);

    server.status.node(&facts(Some("the Node is gone")));
    let ineligible = json("/healthz");
    assert_eq!(ineligible["nodeEligible"], json!(false));
    assert_eq!(
        ineligible["healthy"],
        json!(true),
        "the proxy itself is well"
    );
    server.status.health().queued = Some(ago(100));
    let late = json("/healthz");
    assert_eq!(late["healthy"], json!(false));
    assert_ne!(late["lastUpdated"], late["currentTime"]);
}

#[test]
fn other_paths_of_metrics() {
    let server = Server::new(false);
    let cases = [
        ("/healthz", 200, "text/plain", "ok"),
        ("/proxyMode", 200, "text/plain", "ipvs"),
        (
            "/configz",
            200,
            "application/json",
            "{\"scheduler\":\"lc\"}",
        ),
        ("/livez", 404, "", ""),
    ];
    for (path, code, content_type, body) in cases {
        let answer = get(server.metrics, path);
        assert_eq!((answer.0, answer.2.as_str()), (code, body), "{path}");
        assert!(answer.1.contains(content_type), "{path}: {}", answer.1);
    }
    let metrics = get(server.metrics, "/metrics").1;
    assert!(
        metrics.contains("content-type: text/plain; version=0.0.4"),
        "{metrics}"
    );
}

#[test]
fn a_taken_address_is_an_error_or_tried_again() {
    let status = Arc::new(Status::new(&[Family::V4], PERIOD, false, Value::Null));
    let taken = super::bind("[::1]:0".parse().unwrap()).unwrap();
    let address = taken.local_addr().unwrap();
    let listen = |hard_fail| Listen {
        metrics: None,
        health: Some(address),
        hard_fail,
    };
    let error = start(&status, listen(true)).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("health: can't listen on {address}")
    );
    start(&status, listen(false)).unwrap();
    drop(taken);
    let deadline = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < deadline, "nobody listens on {address}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(get(address, "/healthz").0, 200);
}

#[test]
fn silent_clients_keep_nobody_out() {
    let server = Server::new(false);
    for address in [server.health, server.metrics] {
        let mut silent = Vec::new();
        for number in 0..500 {
            let mut stream = TcpStream::connect(address).unwrap();
            if number % 2 == 0 {
                // Half a header is as good as none.
                stream.write_all(b"GET /healthz HT").unwrap();
            }
            silent.push(stream);
            if number % 100 == 99 {
                let asked = Instant::now();
                assert_eq!(get(address, "/healthz").0, 200, "{number}");
                assert!(asked.elapsed() < Duration::from_secs(1), "{number}");
            }
        }
        let open = silent.iter().filter(|stream| {
            let mut stream: &TcpStream = stream;
            let wait = Some(Duration::from_millis(1));
            stream.set_read_timeout(wait).unwrap();
            let read = stream.read(&mut [0; 1]);
            matches!(read, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
        });
        assert!(open.count() <= CONNECTIONS_OF_ONE);
    }
}

/// Connects from addresses 127.0.1.1 to 127.0.1.`sources` without a pause, and leaves at once or, each other time, stays
/// silent for a while, until it is told to stop.
fn flood(
    to: SocketAddr,
    sources: u8,
    stop: Arc<AtomicBool>,
) -> std::thread::JoinHandle<(usize, usize)> {
    let connect = move |number: usize| {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        let last = u8::try_from(number % usize::from(sources)).unwrap() + 1;
        socket.bind(SocketAddr::from(([127, 0, 1, last], 0)))?;
        Ok::<_, std::io::Error>(socket.connect(to))
    };
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let (mut silent, mut connected, mut failed) = (VecDeque::new(), 0, 0);
            for number in 0_usize.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let stream = match connect(number) {
                    Ok(connect) => connect.await,
                    Err(error) => Err(error),
                };
                match stream {
                    Ok(stream) if number % 2 == 0 => silent.push_back(stream),
                    Ok(_) => {}
                    Err(_) => failed += 1,
                }
                connected += 1;
                if silent.len() > 300 {
                    silent.pop_front();
                }
            }
            (connected - failed, failed)
        })
    })
}

#[test]
fn a_flood_of_connections_pushes_no_probe_out() {
    // Connections to 127.0.0.5 come from 127.0.0.1: to this server, from another machine.
    for (address, sources) in [("127.0.0.1", 1), ("127.0.0.5", 1), ("127.0.0.5", 200)] {
        let server = Server::on(address, false);
        let stop = Arc::new(AtomicBool::new(false));
        let floods = [(); 3].map(|()| flood(server.health, sources, Arc::clone(&stop)));
        let mut slowest = Duration::ZERO;
        for number in 0..50 {
            let asked = Instant::now();
            assert_eq!(
                get(server.health, "/livez").0,
                200,
                "{address}, {sources}: {number}"
            );
            slowest = slowest.max(asked.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
        let counted = floods.map(|flood| flood.join().unwrap());
        // Far less than a second where nothing else needs the processor.
        assert!(
            slowest < Duration::from_secs(5),
            "{address}, {sources}: {slowest:?}"
        );
        let connected: usize = counted.iter().map(|(connected, _)| connected).sum();
        assert!(connected > 300, "that is no flood: {counted:?}");
    }
}
