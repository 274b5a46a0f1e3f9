//! The addresses of the API server, which no Service may take from the node.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use ipvs_proxy_core::guard::Needed;
use ipvs_proxy_core::model::Change;

use super::{Access, ApiEvent, News};
use crate::controller::Event;
use crate::surroundings::API_SERVER;

/// How often the API server's name is looked up, and how many of its addresses are remembered.
const RESOLVE_AGAIN: Duration = Duration::from_secs(30);
const MOST_ADDRESSES: usize = 64;

/// Tells the addresses of the API server, again when its name leads elsewhere or it is reached elsewhere, until nobody listens
/// any more.
pub(super) async fn tell_addresses(server: &str, access: &Access, sender: &SyncSender<Event>) {
    let uri: hyper::Uri = server.parse().unwrap_or_default();
    let host = uri.host().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = uri.port_u16().unwrap_or(match uri.scheme_str() {
        Some("http") => 80,
        _ => 443,
    });
    let mut peers = access.peers.subscribe();
    let mut known = BTreeSet::new();
    loop {
        let named = tokio::net::lookup_host((host, port)).await;
        let mut found: BTreeSet<SocketAddr> = named.into_iter().flatten().collect();
        found.extend(peers.borrow_and_update().iter());
        let found: BTreeSet<Needed> = found
            .into_iter()
            .map(|at| Needed {
                address: at.ip().to_canonical(),
                port: Some(at.port()),
            })
            .collect();
        // One that is not named any more may still be connected to.
        if !found.is_subset(&known) {
            if known.len() > MOST_ADDRESSES {
                known.clear();
            }
            known.extend(found);
            let change = Change::Needed(API_SERVER.into(), known.clone());
            let news = News {
                changes: vec![change],
                ..News::default()
            };
            if sender.send(Event::Api(ApiEvent::News(news))).is_err() {
                return;
            }
        }
        // Either way it is looked at again.
        let _ = tokio::time::timeout(RESOLVE_AGAIN, peers.changed()).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    /// Whatever form the URL has: what the server's name stands for is told, before it is ever reached.
    #[test]
    fn the_addresses_of_the_api_server_are_told() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        for (server, at) in [
            ("https://192.0.2.1:6443/", "192.0.2.1:6443"),
            ("https://[2001:db8::1]:6443/", "[2001:db8::1]:6443"),
            ("https://192.0.2.1/path", "192.0.2.1:443"),
            ("http://192.0.2.1/path", "192.0.2.1:80"),
            ("https://localhost:6443/", "127.0.0.1:6443"),
        ] {
            let (sender, events) = sync_channel(4);
            let access = Access::default();
            // By way of a proxy.
            access
                .peers
                .send_replace(["192.0.2.7:3128".parse().unwrap()].into());
            let told = tell_addresses(server, &access, &sender);
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
            for at in [at, "192.0.2.7:3128"] {
                let at: SocketAddr = at.parse().unwrap();
                let needed = Needed {
                    address: at.ip(),
                    port: Some(at.port()),
                };
                assert!(addresses.contains(&needed), "{addresses:?}");
            }
        }
    }
}
