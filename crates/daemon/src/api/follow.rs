//! List and watch.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::error::Error as _;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt as _;
use ipvs_proxy_core::model::Change;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Client};
use tracing::info;

use super::sent::Sent;
use super::told::Told;
use super::{Access, ApiEvent, Followed, Kind, News};
use crate::controller::Event;
use crate::translate;

/// kube-proxy's own selection, made by the server.
const SELECTOR: &str = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";
/// Objects in one answer to a list.
const PAGE: u32 = 500;
/// How long one watch lasts, in seconds; the next goes on where it ended.
const WATCH_S: u32 = 290;
/// A watch that lasted less than this, and brought nothing, was hardly one.
const SHORT: Duration = Duration::from_secs(1);
/// After a watch that lasted that long a failure is the first of its kind.
const LONG: Duration = Duration::from_secs(10);
/// The most characters of an error that are told: an answer may be a page for a person.
const LONGEST_TEXT: usize = 500;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Objects that are told together.
const TOGETHER: usize = 256;
/// How often the API server's name is looked up, and how many of its addresses are remembered.
const RESOLVE_AGAIN: Duration = Duration::from_secs(30);
const MOST_ADDRESSES: usize = 64;
/// How often the files behind a client are looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Follows until nobody listens any more. Never returns before.
pub async fn follow(access: &Access, node_name: &str, sender: &SyncSender<Event>) {
    let mut known = Known::default();
    let mut told = String::new();
    loop {
        let fingerprint = access.fingerprint();
        match access.client().await {
            Ok((client, server)) => {
                info!(server, "following the API server");
                told.clear();
                let ended = tokio::select! {
                    ended = follow_all(&client, access, node_name, sender, &mut known) => ended,
                    () = tell_addresses(&server, sender) => Ended::Nobody,
                    () = changed(access, fingerprint) => {
                        info!("credentials or the API server's address changed: connecting anew");
                        Ended::Unknown
                    }
                };
                if matches!(ended, Ended::Nobody) {
                    return;
                }
            }
            Err(error) => {
                let text = error.to_string();
                if told != text {
                    for kind in Kind::ALL {
                        let failed = ApiEvent::Failed(kind, text.clone());
                        if sender.send(Event::Api(failed)).is_err() {
                            return;
                        }
                    }
                    told = text;
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

/// Returns when the files from which the client was made changed.
async fn changed(access: &Access, fingerprint: u64) {
    while access.fingerprint() == fingerprint {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Tells the addresses of the API server, again when its name leads elsewhere, until nobody listens any more.
async fn tell_addresses(server: &str, sender: &SyncSender<Event>) {
    let uri: hyper::Uri = server.parse().unwrap_or_default();
    let host = uri.host().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let mut known = BTreeSet::new();
    loop {
        let found = tokio::net::lookup_host((host, 0)).await;
        let found: BTreeSet<IpAddr> = found.into_iter().flatten().map(|a| a.ip()).collect();
        // One that is not named any more may still be connected to.
        if !found.is_subset(&known) {
            if known.len() > MOST_ADDRESSES {
                known.clear();
            }
            known.extend(found);
            let change = Change::Needed("API server".into(), known.clone());
            let news = News {
                changes: vec![change],
                ..News::default()
            };
            if sender.send(Event::Api(ApiEvent::News(news))).is_err() {
                return;
            }
        }
        tokio::time::sleep(RESOLVE_AGAIN).await;
    }
}

/// What was told of each kind, so that what vanished unseen is told gone by the next list.
#[derive(Debug, Default)]
struct Known {
    services: Told,
    slices: Told,
    node: Told,
    /// The latest change of an endpoint that was told.
    latest: Cell<Option<SystemTime>>,
}

/// Why following ended.
enum Ended {
    /// Nobody listens any more.
    Nobody,
    /// The server does not know us (401): a token may have been renewed.
    Unknown,
}

/// What stands between two answers of the server.
enum Stop {
    Nobody,
    Failed(kube::Error),
}

impl From<kube::Error> for Stop {
    fn from(error: kube::Error) -> Stop {
        Stop::Failed(error)
    }
}

fn is(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

async fn follow_all(
    client: &Client,
    access: &Access,
    node_name: &str,
    sender: &SyncSender<Event>,
    known: &mut Known,
) -> Ended {
    let everywhere = Some(SELECTOR);
    let own = format!("metadata.name={node_name}");
    let latest = &known.latest;
    let follower = |labels: Option<&str>, fields: Option<&str>| Follower {
        client: client.clone(),
        access,
        node_name,
        sender,
        latest,
        labels: labels.map(str::to_owned),
        fields: fields.map(str::to_owned),
    };
    tokio::select! {
        ended = follower(everywhere, None).run::<Service>(&mut known.services) => ended,
        ended = follower(everywhere, None).run::<EndpointSlice>(&mut known.slices) => ended,
        ended = follower(None, Some(&own)).run::<Node>(&mut known.node) => ended,
    }
}

/// Follows one kind.
struct Follower<'a> {
    client: Client,
    access: &'a Access,
    node_name: &'a str,
    sender: &'a SyncSender<Event>,
    latest: &'a Cell<Option<SystemTime>>,
    labels: Option<String>,
    fields: Option<String>,
}

impl Follower<'_> {
    async fn run<K: Followed>(self, told: &mut Told) -> Ended {
        let api = Api::<Sent<K>>::all(self.client.clone());
        let mut version = None;
        let mut failures = 0;
        loop {
            let started = Instant::now();
            let error = match self.once(&api, told, &mut version).await {
                Ok(()) => {
                    failures = 0;
                    // One that ends after its first event is not asked as fast as it answers.
                    if started.elapsed() < SHORT {
                        tokio::time::sleep(FIRST_PAUSE).await;
                    }
                    continue;
                }
                Err(Stop::Nobody) => return Ended::Nobody,
                Err(Stop::Failed(error)) => error,
            };
            if started.elapsed() > LONG {
                failures = 0;
            }
            let pause = pause(failures, &error);
            // The server no longer has what came after the last answer: that happens, once.
            let expired = is(&error, 410);
            if expired {
                version = None;
            }
            if !(expired && failures == 0) {
                let failed = ApiEvent::Failed(K::KIND, self.say(&error));
                if self.tell(failed).is_err() {
                    return Ended::Nobody;
                }
            }
            failures += 1;
            tokio::time::sleep(pause).await;
            if is(&error, 401) {
                return Ended::Unknown;
            }
        }
    }

    /// A list, where there is no version to go on from, and a watch until it ends.
    async fn once<K: Followed>(
        &self,
        api: &Api<Sent<K>>,
        told: &mut Told,
        version: &mut Option<String>,
    ) -> Result<(), Stop> {
        let from = match version.take() {
            Some(version) => version,
            None => self.list(api, told).await?,
        };
        let mut params = WatchParams::default().timeout(WATCH_S);
        params.label_selector.clone_from(&self.labels);
        params.field_selector.clone_from(&self.fields);
        // Whatever ends the watch, the next goes on from here.
        let last = version.insert(from);
        let stream = api.watch(&params, last).await?;
        let mut stream = std::pin::pin!(stream.ready_chunks(TOGETHER));
        // An answer has begun: whether it is a watch shows by its first event, or by its silence.
        let mut follows = false;
        loop {
            let events = if follows {
                stream.next().await
            } else {
                match tokio::time::timeout(SHORT, stream.next()).await {
                    Ok(events) => events,
                    Err(_) => Some(Vec::new()),
                }
            };
            let Some(events) = events else { break };
            let mut news = News::default();
            let mut stop = None;
            for event in events {
                let object = match event {
                    Ok(WatchEvent::Bookmark(bookmark)) => {
                        last.clone_from(&bookmark.metadata.resource_version);
                        continue;
                    }
                    Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                        told.put(&object, self.node_name, &mut news);
                        object
                    }
                    Ok(WatchEvent::Deleted(object)) => {
                        let name = translate::object_name(&object.metadata);
                        told.remove::<K>(name, &mut news);
                        object
                    }
                    Ok(WatchEvent::Error(status)) => {
                        stop = Some(Stop::from(kube::Error::Api(status)));
                        break;
                    }
                    Err(error) => {
                        stop = Some(Stop::from(error));
                        break;
                    }
                };
                if let Some(version) = &object.metadata.resource_version {
                    last.clone_from(version);
                }
            }
            self.tell_news(news)?;
            if let Some(stop) = stop {
                return Err(stop);
            }
            if !std::mem::replace(&mut follows, true) {
                // Also of a failure that another client met.
                self.tell(ApiEvent::Followed(K::KIND))?;
            }
        }
        match follows {
            true => Ok(()),
            false => Err(odd("the API server ends the watch at once")),
        }
    }

    /// Tells all objects of the kind, and those gone that were known and are not listed; the version of the list.
    async fn list<K: Followed>(&self, api: &Api<Sent<K>>, told: &mut Told) -> Result<String, Stop> {
        let mut params = ListParams::default().limit(PAGE);
        params.label_selector.clone_from(&self.labels);
        params.field_selector.clone_from(&self.fields);
        let mut listed = BTreeSet::new();
        // A list tells again what was told; only what happened since is news.
        let latest = self.latest.get();
        loop {
            let page = api.list(&params).await?;
            let types = (&*page.types.api_version, &*page.types.kind);
            let (version, kind) = (K::api_version(&()), format!("{}List", K::kind(&())));
            // Else all that is in force would go for something that is no answer.
            if types != (&*version, &*kind) {
                return Err(odd(format!(
                    "the API server answers a list of {} with {} {}",
                    K::KIND.resource(),
                    types.0,
                    types.1
                )));
            }
            let mut news = News::default();
            let before = listed.len();
            for object in &page.items {
                listed.insert(translate::object_name(&object.metadata));
                told.put(object, self.node_name, &mut news);
            }
            news.triggers.retain(|(_, at)| Some(*at) > latest);
            let next = page.metadata.continue_.filter(|token| !token.is_empty());
            if next.is_none() {
                told.retain::<K>(&listed, &mut news);
                news.listed = Some(K::KIND);
            }
            self.tell_news(news)?;
            match next {
                Some(_) if before > 0 && listed.len() == before => {
                    return Err(odd(format!(
                        "the API server's list of {} does not end: a page brings what others have brought",
                        K::KIND.resource()
                    )));
                }
                Some(token) => params.continue_token = Some(token),
                None => return Ok(page.metadata.resource_version.unwrap_or_default()),
            }
        }
    }

    fn tell_news(&self, news: News) -> Result<(), Stop> {
        let latest = news.triggers.iter().map(|(_, at)| *at).max();
        self.latest.set(self.latest.get().max(latest));
        self.tell(ApiEvent::News(news))
    }

    fn tell(&self, event: ApiEvent) -> Result<(), Stop> {
        let sent = self.sender.send(Event::Api(event));
        sent.map_err(|_| Stop::Nobody)
    }

    /// The error in one line: verb and resource, and what is behind it.
    fn say(&self, error: &kube::Error) -> String {
        if let kube::Error::Api(status) = error {
            return in_a_line(&match &*status.message {
                "" => "what the API server sent is neither an object nor a Status".to_owned(),
                message => format!("{message} ({})", status.code),
            });
        }
        let mut text = error.to_string();
        let mut unreachable = false;
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            // What answers, but not as it should, is no question of the way.
            let failure = cause.downcast_ref::<std::io::Error>();
            unreachable |= failure.is_some_and(|e| e.kind() != ErrorKind::InvalidData);
            source = cause.source();
        }
        let text = in_a_line(&text);
        match self.access.hint() {
            Some(hint) if unreachable => format!("{text}; {hint}"),
            _ => text,
        }
    }
}

/// A failure that the client library has no word for.
fn odd(text: impl Into<String>) -> Stop {
    Stop::Failed(kube::Error::Service(text.into().into()))
}

/// What somebody else wrote, as a part of a line: without what forges lines or speaks to a terminal, and not longer than a
/// person reads.
pub(crate) fn in_a_line(text: &str) -> String {
    let words = text.split(|c: char| c.is_whitespace() || c.is_control());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    let text = text.strip_prefix("ServiceError: ").unwrap_or(&text);
    match text.char_indices().nth(LONGEST_TEXT) {
        Some((end, _)) => format!("{} …", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// How long to wait after an error: twice as long each time, no two processes alike; longer if the server asks for it.
fn pause(failures: u32, error: &kube::Error) -> Duration {
    let longest = FIRST_PAUSE * 2_u32.saturating_pow(failures.min(6));
    let longest = longest.min(LONGEST_PAUSE);
    // From 50 % to 100 %.
    let share = 0.5 + 0.5 * share();
    let asked = match error {
        kube::Error::Api(status) => status.details.as_ref().map_or(0, |d| d.retry_after_seconds),
        _ => 0,
    };
    longest.mul_f64(share) + Duration::from_secs(u64::from(asked))
}

/// A number from 0 to 1 that differs from process to process and from call to call.
fn share() -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    // The keys of the hash are random.
    let number = RandomState::new().hash_one(0_u8) >> 32;
    f64::from(u32::try_from(number).unwrap_or_default()) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    /// Whatever form the URL has: what the server's name stands for is told, before it is ever reached.
    #[test]
    fn the_addresses_of_the_api_server_are_told() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        for (server, address) in [
            ("https://192.0.2.1:6443/", "192.0.2.1"),
            ("https://[2001:db8::1]:6443/", "2001:db8::1"),
            ("https://192.0.2.1/path", "192.0.2.1"),
            ("https://localhost:6443/", "127.0.0.1"),
        ] {
            let (sender, events) = sync_channel(4);
            let told = tell_addresses(server, &sender);
            let waited = runtime
                .block_on(async { tokio::time::timeout(Duration::from_millis(500), told).await });
            assert!(waited.is_err(), "it goes on looking");
            let Ok(Event::Api(ApiEvent::News(news))) = events.try_recv() else {
                panic!("{server}: nothing was told");
            };
            let [Change::Needed(by, addresses)] = &*news.changes else {
                panic!("{:?}", news.changes);
            };
            assert_eq!(&**by, "API server");
            assert!(
                addresses.contains(&address.parse().unwrap()),
                "{addresses:?}"
            );
        }
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
}
