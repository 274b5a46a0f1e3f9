//! List and watch.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::error::Error as _;
use std::io::ErrorKind;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, SystemTime};

use futures::StreamExt as _;
use ipvs_proxy_netlink::Causes;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Client, Resource as _};
use tokio::time::Instant;
use tracing::info;

use super::backoff::Backoff;
use super::bounded::TooLong;
use super::sent::Sent;
use super::server::tell_addresses;
use super::told::Told;
use super::{Access, ApiEvent, Followed, Kind, News};
use crate::controller::Event;
use crate::objects::{EndpointSlice, Node, Service};

/// kube-proxy's own selection, made by the server.
const SELECTOR: &str = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";
/// Objects in one answer to a list.
const PAGE: u32 = 500;
/// How long one watch lasts, in seconds; the next goes on where it ended.
const WATCH_S: u32 = 290;
/// A watch that lasted less than this, and brought nothing, was hardly one.
const SHORT: Duration = Duration::from_secs(1);
/// The most characters of an error that are told: an answer may be a page for a person.
const LONGEST_TEXT: usize = 500;
/// Objects that are told together.
const TOGETHER: usize = 256;
/// How often the files behind a client are looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Follows until nobody listens any more; all Nodes, or this one alone. Never returns before.
pub async fn follow(access: &Access, node_name: &str, all_nodes: bool, sender: &SyncSender<Event>) {
    let mut known = Known::default();
    let mut told = String::new();
    let own = format!("metadata.name={node_name}");
    let nodes = (!all_nodes).then_some(&*own);
    loop {
        let fingerprint = access.fingerprint();
        match access.client().await {
            Ok((client, server)) => {
                info!(server, "following the API server");
                told.clear();
                tokio::select! {
                    () = follow_all(&client, access, (node_name, nodes), sender, &mut known) => return,
                    () = tell_addresses(&server, access, sender) => return,
                    () = changed(access, fingerprint) => {
                        info!("credentials or the API server's address changed: connecting anew");
                    }
                }
                for of in [&mut known.services, &mut known.slices, &mut known.node] {
                    of.backoff.try_now();
                }
            }
            Err(error) => {
                let text = in_a_line(&Causes(&error).to_string());
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

/// What is known over all clients.
#[derive(Debug, Default)]
struct Known {
    services: Of,
    slices: Of,
    node: Of,
    /// The latest change of an endpoint that was told.
    latest: Cell<Option<SystemTime>>,
}

/// What is known of a kind.
#[derive(Debug, Default)]
struct Of {
    /// So that what vanished unseen is told gone by the next list.
    told: Told,
    backoff: Backoff,
}

/// Where a watch goes on, and since when one stands.
#[derive(Debug, Default)]
struct Place {
    version: Option<String>,
    stands: Option<Instant>,
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

/// Returns when nobody listens any more.
async fn follow_all(
    client: &Client,
    access: &Access,
    (node_name, nodes): (&str, Option<&str>),
    sender: &SyncSender<Event>,
    known: &mut Known,
) {
    let everywhere = Some(SELECTOR);
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
        () = follower(everywhere, None).run::<Service>(&mut known.services) => {}
        () = follower(everywhere, None).run::<EndpointSlice>(&mut known.slices) => {}
        () = follower(None, nodes).run::<Node>(&mut known.node) => {}
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
    async fn run<K: Followed>(self, of: &mut Of) {
        let mut api = Api::<Sent<K>>::all(self.client.clone());
        let mut place = Place::default();
        loop {
            of.backoff.wait().await;
            let ended = self.once(&api, &mut of.told, &mut place).await;
            let stood = place
                .stands
                .take()
                .map_or(Duration::ZERO, |at| at.elapsed());
            let error = match ended {
                Ok(()) => {
                    of.backoff.ended(stood);
                    continue;
                }
                Err(Stop::Nobody) => return,
                Err(Stop::Failed(error)) => error,
            };
            let asked = self.access.pauses.take(K::KIND).max(asked(&error));
            let first = of.backoff.failed(stood, asked);
            // The server no longer has what came after the last answer: that happens, once.
            let expired = is(&error, 410);
            if expired || is_unreadable(&error) {
                place.version = None;
            }
            if !(expired && first) {
                let failed = ApiEvent::Failed(K::KIND, self.say(&error));
                if self.tell(failed).is_err() {
                    return;
                }
            }
            // The server does not know us: a token may have been renewed, which a new client reads at once.
            if is(&error, 401)
                && let Ok((client, _)) = self.access.client().await
            {
                api = Api::all(client);
            }
        }
    }

    /// A list, where there is no version to go on from, and a watch until it ends.
    async fn once<K: Followed>(
        &self,
        api: &Api<Sent<K>>,
        told: &mut Told,
        place: &mut Place,
    ) -> Result<(), Stop> {
        let from = match place.version.take() {
            Some(version) => version,
            None => self.list(api, told).await?,
        };
        let mut params = WatchParams::default().timeout(WATCH_S);
        params.label_selector.clone_from(&self.labels);
        params.field_selector.clone_from(&self.fields);
        // Whatever ends the watch, the next goes on from here.
        let last = place.version.insert(from);
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
                        told.remove::<K>(object.name(), self.node_name, &mut news);
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
            told.tell_unread::<K>(&mut news);
            self.tell_news(news)?;
            if let Some(stop) = stop {
                return Err(stop);
            }
            if !std::mem::replace(&mut follows, true) {
                place.stands = Some(Instant::now());
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
            let (version, kind) = (
                Sent::<K>::api_version(&()),
                format!("{}List", K::KIND.object()),
            );
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
                listed.insert(object.name());
                told.put(object, self.node_name, &mut news);
            }
            news.triggers.retain(|(_, at)| Some(*at) > latest);
            let next = page.metadata.continue_.filter(|token| !token.is_empty());
            if next.is_none() {
                told.retain::<K>(&listed, self.node_name, &mut news);
                news.listed = Some(K::KIND);
            }
            told.tell_unread::<K>(&mut news);
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
        let mut causes = std::iter::successors(error.source(), |cause| (**cause).source());
        // What answers, but not as it should, is no question of the way.
        let unreachable = causes.any(|cause| {
            let failure = cause.downcast_ref::<std::io::Error>();
            failure.is_some_and(|e| e.kind() != ErrorKind::InvalidData)
        });
        let text = in_a_line(&Causes(error).to_string());
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

/// For how long the server wants not to be asked, by what it says of the failure.
fn asked(error: &kube::Error) -> Duration {
    let seconds = match error {
        kube::Error::Api(status) => status.details.as_ref().map_or(0, |d| d.retry_after_seconds),
        _ => 0,
    };
    Duration::from_secs(seconds.into())
}

/// Whether a watch would come to the same again, while a list may go past it.
fn is_unreadable(error: &kube::Error) -> bool {
    match error {
        kube::Error::SerdeError(_) => true,
        kube::Error::ReadEvents(error) => {
            let mut cause = error.get_ref().map(|e| e as &dyn std::error::Error);
            while let Some(error) = cause {
                if error.is::<TooLong>() {
                    return true;
                }
                cause = error.source();
            }
            false
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
