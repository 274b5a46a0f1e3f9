use std::io::{Read as _, Write as _};
use std::net::{TcpListener as Blocking, TcpStream};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use ipvs_proxy_core::model::ObjectName;

use super::*;
use crate::api::NodeFacts;

/// The thread on loopback, and what wakes the loop.
struct World {
    status: Arc<Status>,
    ports: Arc<HealthPorts>,
    woken: Receiver<()>,
}

impl World {
    fn new() -> World {
        World::with(Listen {
            metrics: None,
            health: None,
            hard_fail: false,
        })
    }

    fn with(listen: Listen) -> World {
        let period = Duration::from_secs(30);
        let status = Status::new(&Family::ALL, period, false, serde_json::Value::Null);
        let status = Arc::new(status);
        let (wake, woken) = sync_channel(64);
        let wake = move || {
            let _ = wake.try_send(());
        };
        let ports = HealthPorts::start(&status, listen, wake).unwrap();
        World {
            status,
            ports,
            woken,
        }
    }

    fn answer(&self, port: u16, on: &[&str], local_endpoints: usize) {
        self.ports
            .answer(vec![(port, Some(health("web", on, local_endpoints)))]);
    }

    fn close(&self, port: u16) {
        self.ports.answer(vec![(port, None)]);
    }

    /// Waits until the thread tells where it listens.
    fn told(&self) -> BTreeMap<u16, Listening> {
        self.woken.recv_timeout(Duration::from_secs(10)).unwrap();
        self.ports.take_listening()
    }

    fn metric(&self, state: &str) -> f64 {
        let name = format!("ipvs_proxy_health_check_node_ports{{state=\"{state}\"}} ");
        let text = self.status.metrics.text();
        let value = text.lines().find_map(|line| line.strip_prefix(&name));
        value.map_or(0.0, |value| value.parse().unwrap())
    }
}

fn health(name: &str, on: &[&str], local_endpoints: usize) -> HealthPort {
    HealthPort {
        service: ObjectName::new("prod", name),
        addresses: on.iter().map(|address| address.parse().unwrap()).collect(),
        local_endpoints,
    }
}

fn listens(families: &[Family]) -> Listening {
    Listening {
        families: families.to_vec(),
        error: None,
    }
}

/// A port that nobody listens on.
fn free_port() -> u16 {
    let port = |at: &str| Blocking::bind(at).unwrap().local_addr().unwrap().port();
    port("0.0.0.0:0")
}

/// Status line, headers and body of an answer to this request line.
fn ask_by(line: &str, address: &str, port: u16) -> io::Result<String> {
    let address: IpAddr = address.parse().unwrap();
    let mut stream = TcpStream::connect((address, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let request = format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn ask(address: &str, port: u16) -> io::Result<String> {
    ask_by("GET /", address, port)
}

fn code(port: u16) -> u16 {
    let answer = ask("127.0.0.1", port).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(std::time::Instant::now() < end, "it did not come true");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_answer_is_kube_proxys() {
    let (world, port) = (World::new(), free_port());
    world.answer(port, &["0.0.0.0", "::"], 2);
    assert_eq!(world.told(), [(port, listens(&Family::ALL))].into());
    for address in ["127.0.0.1", "::1"] {
        for line in ["GET /", "GET /healthz?x", "POST /any/path"] {
            let answer = ask_by(line, address, port).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
            let head = head.to_lowercase();
            for header in [
                "content-type: application/json",
                "x-content-type-options: nosniff",
                "x-load-balancing-endpoint-weight: 2",
            ] {
                assert!(head.lines().any(|line| line == header), "{head}");
            }
            let expected = "{\n\t\"service\": {\n\t\t\"namespace\": \"prod\",\n\t\t\"name\": \"web\"\n\t},\n\t\
                 \"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}";
            assert_eq!(body, expected);
        }
    }
    // No endpoint here.
    world.answer(port, &["0.0.0.0", "::"], 0);
    let answer = ask("127.0.0.1", port).unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("x-load-balancing-endpoint-weight: 0\r\n"));
    assert!(answer.contains("\"localEndpoints\": 0,\n\t\"serviceProxyHealthy\": true"));
    // A name that needs quoting, from a manifest.
    let odd = health("a\"\nb", &["0.0.0.0", "::"], 1);
    world.ports.answer(vec![(port, Some(odd))]);
    let answer = ask("127.0.0.1", port).unwrap();
    assert!(answer.contains(r#""name": "a\"\nb""#), "{answer}");
    assert_eq!(
        world.ports.take_listening(),
        BTreeMap::new(),
        "only words changed"
    );
}

/// A proxy that does not do its work takes no traffic; a node that is to be deleted keeps what its endpoints can serve.
#[test]
fn the_proxy_counts_and_the_node_does_not() {
    let (world, port) = (World::new(), free_port());
    world.answer(port, &["127.0.0.1"], 1);
    world.told();
    let facts = |ineligible| NodeFacts { ineligible };
    world.status.node(&facts(Some("the Node is being deleted")));
    assert_eq!(code(port), 200);
    let now = Moment::now();
    world.status.health().queued = Some(Moment {
        at: now.at.checked_sub(Duration::from_secs(61)).unwrap(),
        ..now
    });
    assert_eq!(code(port), 503);
    let answer = ask("127.0.0.1", port).unwrap();
    assert!(answer.contains("\"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": false\n}"));
    world.status.health().queued = None;
    assert_eq!(code(port), 200);
}

#[test]
fn a_port_closes_moves_and_changes_hands() {
    let (world, port) = (World::new(), free_port());
    world.answer(port, &["0.0.0.0", "::"], 1);
    world.told();
    // A client that stays has no say.
    let mut stays = TcpStream::connect(("127.0.0.1", port)).unwrap();
    world.answer(port, &["127.0.0.1"], 1);
    assert_eq!(world.told(), [(port, listens(&[Family::V4]))].into());
    assert_eq!(code(port), 200);
    ask("127.0.0.2", port).unwrap_err();
    ask("::1", port).unwrap_err();
    world.answer(port, &["::", "127.0.0.1", "127.0.0.2"], 1);
    assert_eq!(world.told(), [(port, listens(&Family::ALL))].into());
    ask("127.0.0.2", port).unwrap();
    ask("::1", port).unwrap();
    // Another Service takes it over: it is answered at once, and not opened anew.
    let other = health("other", &["::", "127.0.0.1", "127.0.0.2"], 0);
    world.ports.answer(vec![(port, Some(other))]);
    let answer = ask("::1", port).unwrap();
    assert!(answer.contains("\"name\": \"other\""), "{answer}");
    assert_eq!(world.ports.take_listening(), BTreeMap::new());
    world.close(port);
    wait_until(|| ask("127.0.0.1", port).is_err());
    stays
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let ended = stays.read(&mut [0; 1]);
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    assert!(!ended.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock));
    // Closed and opened between two looks: the loop has to be told again.
    world.answer(port, &["0.0.0.0"], 1);
    world.told();
    world.ports.answer(vec![
        (port, None),
        (port, Some(health("web", &["0.0.0.0"], 1))),
    ]);
    assert_eq!(world.told(), [(port, listens(&[Family::V4]))].into());
}

#[test]
fn a_busy_port_is_told_and_tried_again() {
    let (world, port) = (World::new(), free_port());
    let taken = Blocking::bind(("0.0.0.0", port)).unwrap();
    world.answer(port, &["0.0.0.0", "::"], 1);
    let error = format!("can't listen on 0.0.0.0:{port}: Address already in use (os error 98)");
    let busy = Listening {
        families: vec![Family::V6],
        error: Some(error),
    };
    assert_eq!(world.told(), [(port, busy.clone())].into());
    assert_eq!(
        [world.metric("listening"), world.metric("failing")],
        [0.0, 1.0]
    );
    // The other family's is there meanwhile, and so are all other ports.
    ask("::1", port).unwrap();
    let other = free_port();
    world.answer(other, &["127.0.0.1"], 1);
    assert_eq!(world.told(), [(other, listens(&[Family::V4]))].into());
    assert_eq!(code(other), 200);
    assert_eq!(world.told(), [(port, busy)].into(), "tried again, in vain");
    drop(taken);
    assert_eq!(world.told(), [(port, listens(&Family::ALL))].into());
    assert_eq!(code(port), 200);
    assert_eq!(
        [world.metric("listening"), world.metric("failing")],
        [2.0, 0.0]
    );
}

/// The daemon's own ports stay its own, also while it does not have them, and on other addresses.
#[test]
fn own_ports_are_never_given_away() {
    let (own, address) = (free_port(), "127.0.0.1");
    let world = World::with(Listen {
        metrics: None,
        health: Some(SocketAddr::new("127.0.0.9".parse().unwrap(), own)),
        hard_fail: false,
    });
    world.answer(own, &[address], 1);
    let told = world.told();
    assert_eq!(told[&own].families, []);
    assert_eq!(
        told[&own].error.as_deref(),
        Some("is the port of --healthz-bind-address")
    );
    ask(address, own).unwrap_err();
}

/// Clients that say nothing, on hundreds of ports, keep nobody out, and hold no more than the bound.
#[test]
fn silent_clients_on_many_ports_keep_nobody_out() {
    let world = World::new();
    let ports: BTreeSet<u16> = (0..300).map(|_| free_port()).collect();
    let web = |port: &u16| (*port, Some(health("web", &["127.0.0.1"], 1)));
    world.ports.answer(ports.iter().map(web).collect());
    let mut open = BTreeSet::new();
    wait_until(|| {
        let told = world.ports.take_listening().into_iter();
        // Another test may have had one for a moment.
        open.extend(
            told.filter(|(_, l)| l.error.is_none())
                .map(|(port, _)| port),
        );
        open.len() >= ports.len() - 5
    });
    let open: Vec<u16> = open.into_iter().collect();
    let connect = |port: &u16| TcpStream::connect(("127.0.0.1", *port)).unwrap();
    let silent: Vec<TcpStream> = open.iter().chain(&open).chain(&open).map(connect).collect();
    assert!(silent.len() > CONNECTIONS);
    for port in &open {
        assert_eq!(code(*port), 200);
    }
    let waiting = silent.iter().filter(|stream| {
        stream.set_nonblocking(true).unwrap();
        let read = (&**stream).read(&mut [0; 1]);
        read.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
    });
    assert!(waiting.count() <= CONNECTIONS);
    // And one port's clients are bounded by themselves.
    let of_one: Vec<TcpStream> = (0..100).map(|_| connect(&open[0])).collect();
    assert_eq!(code(open[0]), 200);
    let waiting = of_one.iter().filter(|stream| {
        stream.set_nonblocking(true).unwrap();
        let read = (&**stream).read(&mut [0; 1]);
        read.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
    });
    let waiting = waiting.count();
    assert!(waiting <= super::super::CONNECTIONS_OF_ONE, "{waiting}");
}
