use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};

use futures::stream::BoxStream;
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};
use hyper::{Request, Response, Uri};
use kube::client::Body;
use tower::{BoxError, Layer as _, service_fn};

use super::super::counting::Counting;
use super::*;

/// What a server says to each request for Services. All other kinds are well.
#[derive(Debug, Clone, Copy)]
enum Answer {
    /// This status, with this header and this body.
    Status(u16, Option<&'static str>, &'static str),
    /// The connection breaks.
    Broken,
    /// A list, and a watch that says this and goes on that long; then it ends, or breaks.
    Watch(&'static str, Duration, bool),
}

const LIST: &str =
    r#"{"kind": "KIND", "apiVersion": "GROUP", "metadata": {"resourceVersion": "5"}, "items": []}"#;
const DAY: Duration = Duration::from_secs(86_400);

type Frames = BoxStream<'static, Result<Frame<Bytes>, BoxError>>;

fn frame(text: &str) -> Result<Frame<Bytes>, BoxError> {
    Ok(Frame::data(Bytes::from(text.to_owned())))
}

fn whole(text: &str) -> Frames {
    futures::stream::iter([frame(text)]).boxed()
}

fn answer(uri: &Uri, services: Answer) -> Result<Response<StreamBody<Frames>>, BoxError> {
    let kind = Kind::ALL
        .into_iter()
        .find(|kind| uri.path().ends_with(kind.resource()))
        .unwrap();
    let answer = match kind {
        Kind::Services => services,
        _ => Answer::Watch("", DAY, true),
    };
    let (code, after, frames) = match answer {
        Answer::Broken => return Err("connection refused".into()),
        Answer::Status(code, after, body) => (code, after, whole(body)),
        Answer::Watch(said, long, ends) if uri.query().unwrap().contains("watch=true") => {
            let end = async move {
                tokio::time::sleep(long).await;
                match ends {
                    true => None,
                    false => Some(Err("reset".into())),
                }
            };
            let end = futures::stream::once(end).filter_map(std::future::ready);
            (200, None, whole(said).chain(end).boxed())
        }
        Answer::Watch(..) => {
            let (kind, group) = match kind {
                Kind::Services => ("ServiceList", "v1"),
                Kind::EndpointSlices => ("EndpointSliceList", "discovery.k8s.io/v1"),
                Kind::Node => ("NodeList", "v1"),
            };
            let list = LIST.replace("KIND", kind).replace("GROUP", group);
            (200, None, whole(&list))
        }
    };
    let mut response = Response::builder().status(code);
    if let Some(after) = after {
        response = response.header("Retry-After", after);
    }
    Ok(response.body(StreamBody::new(frames))?)
}

/// Follows a server that answers like that for a time; when it was asked, for each kind, and what was told.
async fn followed(
    services: impl Fn(Duration) -> Answer + Clone + Send + 'static,
    long: Duration,
) -> (BTreeMap<String, Vec<Duration>>, Receiver<Event>) {
    let asked: Arc<Mutex<BTreeMap<String, Vec<Duration>>>> = Arc::default();
    let started = Instant::now();
    let noted = Arc::clone(&asked);
    let server = service_fn(move |request: Request<Body>| {
        let resource = request.uri().path().rsplit('/').next().unwrap().to_owned();
        let at = started.elapsed();
        noted.lock().unwrap().entry(resource).or_default().push(at);
        std::future::ready(answer(request.uri(), services(at)))
    });
    let access = Access::default();
    let host = Uri::from_static("https://192.0.2.1:6443");
    let counting = Counting::new(&access, &host);
    let client = Client::new(counting.layer(server), "default");
    let (sender, events) = sync_channel(100_000);
    let mut known = Known::default();
    let follows = follow_all(&client, &access, ("n1", None), &sender, &mut known);
    tokio::time::timeout(long, follows).await.unwrap_err();
    let asked = asked.lock().unwrap().clone();
    (asked, events)
}

const STATUS: &str = r#"{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": 429, "details": {"retryAfterSeconds": 4000000000}}"#;
const EXPIRED: &str = concat!(
    r#"{"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "old", "code": 410}}"#,
    "\n"
);
const ADDED: &str = concat!(
    r#"{"type": "ADDED", "object": {"kind": "Service", "metadata": {"name": "a", "resourceVersion": "6"}}}"#,
    "\n"
);

/// Whatever fails: one request at a time, and ever more seldom; a refused client does not begin anew, nor make those anew
/// that are well.
#[tokio::test(start_paused = true)]
async fn failures_of_all_sorts_have_one_back_off() {
    let minutes = Duration::from_secs(600);
    // Pauses of 15 to 30 s after some shorter ones.
    let seldom = 20..=50;
    // A list and a watch.
    let both = 40..=100;
    // Of 5 to 10 s.
    let ended = 60..=130;
    // Of 45 to 60 s.
    let as_asked = 10..=17;
    let zero = Duration::ZERO;
    for (answer, expected) in [
        (Answer::Status(401, None, "Unauthorized"), &seldom),
        (Answer::Status(403, None, "no"), &seldom),
        (Answer::Status(404, None, ""), &seldom),
        (Answer::Status(500, None, "no"), &seldom),
        (Answer::Status(503, None, "<html>"), &seldom),
        (Answer::Status(200, None, "no JSON"), &seldom),
        (Answer::Status(200, None, LIST), &seldom),
        (Answer::Status(429, Some("9999999"), "later"), &as_asked),
        (Answer::Status(503, Some("30"), "later"), &as_asked),
        (Answer::Status(429, None, STATUS), &as_asked),
        (
            Answer::Status(429, Some("Wed, 21 Oct 2026 07:28:00 GMT"), "later"),
            &seldom,
        ),
        (Answer::Broken, &seldom),
        (Answer::Watch("", zero, true), &seldom),
        (Answer::Watch("", zero, false), &seldom),
        (Answer::Watch(ADDED, zero, true), &ended),
        (Answer::Watch(ADDED, zero, false), &seldom),
        (Answer::Watch("", Duration::from_secs(3), false), &seldom),
        (Answer::Watch("what?\n", zero, true), &both),
        (Answer::Watch(EXPIRED, zero, true), &both),
    ] {
        let (asked, _events) = followed(move |_| answer, minutes).await;
        let number = asked["services"].len();
        assert!(expected.contains(&number), "{answer:?}: {number} requests");
        // A list and a watch each: nothing is wrong with them.
        assert_eq!(asked["endpointslices"].len(), 2, "{answer:?}");
        assert_eq!(asked["nodes"].len(), 2, "{answer:?}");
    }
}

/// A mix of failures is one failure that goes on, until a watch stood.
#[tokio::test(start_paused = true)]
async fn only_a_watch_that_stands_ends_the_back_off() {
    let s = Duration::from_secs;
    let fails = [
        Answer::Status(401, None, "no"),
        Answer::Broken,
        Answer::Watch(ADDED, s(5), false),
        Answer::Status(500, None, "no"),
    ];
    let server = move |at: Duration| match at.as_secs() {
        600.. => Answer::Watch(ADDED, s(11), false),
        seconds => fails[usize::try_from(seconds / 7).unwrap() % 4],
    };
    let (asked, events) = followed(server, s(900)).await;
    let mut requests = asked["services"].clone();
    let well: Vec<_> = requests.extract_if(.., |at| *at >= s(600)).collect();
    assert!((20..=70).contains(&requests.len()), "{requests:?}");
    // Each goes on where the last one broke, half a second after it.
    for pair in well[1..].windows(2) {
        let pause = pair[1] - pair[0] - s(11);
        assert!(pause <= Duration::from_millis(501), "{well:?}");
    }
    assert!(well.len() > 20, "{well:?}");
    let told = events
        .try_iter()
        .filter(|event| matches!(event, Event::Api(ApiEvent::Followed(Kind::Services))));
    assert!(told.count() > 20);
}

/// An event that can't be read is not asked for for ever: a list goes past it.
#[tokio::test(start_paused = true)]
async fn an_event_that_is_too_long_is_gone_past_by_a_list() {
    let long: &'static str = Box::leak("x".repeat((16 << 20) + 1).into_boxed_str());
    // A pause is a quarter of a second at least.
    let server = move |at: Duration| match at.as_millis() {
        0..200 => Answer::Watch(long, DAY, true),
        _ => Answer::Watch("", DAY, true),
    };
    let (asked, events) = followed(server, Duration::from_secs(60)).await;
    let told: Vec<_> = events
        .try_iter()
        .filter_map(|event| match event {
            Event::Api(ApiEvent::Failed(_, why)) => Some(why),
            _ => None,
        })
        .collect();
    assert!(told[0].contains("an event longer than 16 MiB"), "{told:?}");
    // A list and a watch, twice.
    assert_eq!(asked["services"].len(), 4);
}

#[test]
fn what_others_wrote_is_one_short_line() {
    for (text, line) in [
        ("services is forbidden", "services is forbidden"),
        (
            "ServiceError: client error (Connect)",
            "client error (Connect)",
        ),
        (
            "<html>\n  <b>\u{1b}[31mred</b>\r\nERROR forged",
            "<html> <b> [31mred</b> ERROR forged",
        ),
    ] {
        assert_eq!(in_a_line(text), line);
    }
    let long = in_a_line(&"é".repeat(10_000));
    assert_eq!(long.chars().count(), 502);
}
