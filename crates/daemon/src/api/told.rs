//! What was told of the objects of a kind: which of them are in force, and which can't be read.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};

use ipvs_proxy_core::model::ObjectName;

use super::follow::in_a_line;
use super::sent::Sent;
use super::{Followed, News, Unread};
use crate::translate::Refusal;

/// What was told of the objects of a kind.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Objects that were told and not told gone.
    known: BTreeSet<ObjectName>,
    /// Objects whose last version can't be read, and why.
    unread: BTreeMap<ObjectName, String>,
    /// `unread` is not as it was told last.
    changed: bool,
    /// What was refused of the last version of an object, as hashes.
    refused: BTreeMap<ObjectName, BTreeSet<u64>>,
}

impl Told {
    /// Takes in an object as it is now. When it can't be read, what it said before stays in force; when
    /// nothing was read of it before, nothing of it counts.
    pub(super) fn put<K: Followed>(&mut self, sent: &Sent<K>, node_name: &str, news: &mut News) {
        let name = sent.name();
        let nameless = ("metadata.name".to_owned(), "missing".to_owned());
        let (field, error) = match &sent.object {
            Ok(_) if name.name.is_empty() => &nameless,
            Ok(object) => {
                self.known.insert(name.clone());
                self.changed |= self.unread.remove(&name).is_some();
                let before = news.refusals.len();
                object.tell(node_name, news);
                let refusals = news.refusals.split_off(before);
                news.refusals.extend(self.new_ones(name, refusals));
                return;
            }
            Err(error) => error,
        };
        let kept = self.known.contains(&name);
        let refusal = Refusal {
            object: format!("{} {name}", K::KIND.object()),
            field: field.clone(),
            // It may quote the value.
            value: in_a_line(error),
            reason: match kept {
                true => "so what the object said before stays in force".to_owned(),
                false => "so nothing of the object is used".to_owned(),
            },
        };
        // The same of each version would hide all else.
        let why = refusal.to_string();
        if self.unread.get(&name) != Some(&why) {
            self.unread.insert(name, why);
            news.refusals.push(refusal);
            self.changed = true;
        }
    }

    /// The refusals of an object that its last version did not have: the same of each version would hide all else.
    fn new_ones(&mut self, name: ObjectName, refusals: Vec<Refusal>) -> Vec<Refusal> {
        let hash =
            |refusal: &Refusal| BuildHasherDefault::<DefaultHasher>::default().hash_one(refusal);
        let hashes: BTreeSet<u64> = refusals.iter().map(hash).collect();
        let told = match hashes.is_empty() {
            true => self.refused.remove(&name),
            false => self.refused.insert(name, hashes),
        };
        let told = told.unwrap_or_default();
        let new = refusals.into_iter();
        new.filter(|refusal| !told.contains(&hash(refusal)))
            .collect()
    }

    /// An object is gone.
    pub(super) fn remove<K: Followed>(
        &mut self,
        name: ObjectName,
        node_name: &str,
        news: &mut News,
    ) {
        self.changed |= self.unread.remove(&name).is_some();
        self.refused.remove(&name);
        self.known.remove(&name);
        K::tell_gone(name, node_name, news);
    }

    /// Tells what can't be read now, where that changed: once for all objects of the news.
    pub(super) fn tell_unread<K: Followed>(&mut self, news: &mut News) {
        if std::mem::take(&mut self.changed) {
            news.unread = Some(Unread {
                kind: K::KIND,
                objects: self.unread.values().cloned().collect(),
                never_read: self.unread.keys().any(|name| !self.known.contains(name)),
            });
        }
    }

    /// There are these objects and no others: the rest went unseen.
    pub(super) fn retain<K: Followed>(
        &mut self,
        listed: &BTreeSet<ObjectName>,
        node_name: &str,
        news: &mut News,
    ) {
        let all: BTreeSet<_> = self.known.iter().chain(self.unread.keys()).collect();
        let gone = all.into_iter().filter(|name| !listed.contains(name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.remove::<K>(name, node_name, news);
        }
    }
}

#[cfg(test)]
mod tests {
    use ipvs_proxy_core::model::Change;

    use super::*;
    use crate::api::Kind;
    use crate::objects::Service;

    const GOOD: &str = r#"{"metadata": {"name": "web"}, "spec": {"clusterIP": "10.0.0.1"}}"#;
    const OTHER: &str = r#"{"metadata": {"name": "web"}, "spec": {"clusterIP": "10.0.0.2"}}"#;
    const BAD: &str = r#"{"metadata": {"name": "web"}, "spec": {"ports": 5}}"#;

    /// `web 10.0.0.1`, or `web gone`; then refusals, then what can't be read now.
    fn said(news: &News) -> Vec<String> {
        let changes = news.changes.iter().map(|change| match change {
            Change::Service(name, Some(service)) => {
                format!("{} {}", name.name, service.cluster_ips[0])
            }
            Change::Service(name, None) => format!("{} gone", name.name),
            other => panic!("{other:?}"),
        });
        let refusals = news.refusals.iter().map(ToString::to_string);
        let unread = news.unread.iter().map(|unread| {
            assert_eq!(unread.kind, Kind::Services);
            let never = if unread.never_read {
                ", never read"
            } else {
                ""
            };
            format!("{} unread{never}", unread.objects.len())
        });
        changes.chain(refusals).chain(unread).collect()
    }

    fn put(told: &mut Told, text: &str) -> Vec<String> {
        let mut news = News::default();
        let sent: Sent<Service> = serde_json::from_str(text).unwrap();
        told.put(&sent, "n1", &mut news);
        told.tell_unread::<Service>(&mut news);
        said(&news)
    }

    #[test]
    fn an_object_without_a_name_is_none() {
        let mut told = Told::default();
        let text = r#"{"metadata": {}, "spec": {"clusterIP": "10.0.0.1"}}"#;
        assert_eq!(
            put(&mut told, text),
            [
                "Service default/: metadata.name: missing so nothing of the object is used",
                "1 unread, never read"
            ]
        );
        assert_eq!(listed(&mut told, &["web"]), [" gone", "0 unread"]);
    }

    fn listed(told: &mut Told, names: &[&str]) -> Vec<String> {
        let mut news = News::default();
        let names = names.iter().map(|name| ObjectName::new("default", name));
        told.retain::<Service>(&names.collect(), "n1", &mut news);
        told.tell_unread::<Service>(&mut news);
        said(&news)
    }

    fn refused(end: &str) -> String {
        format!(
            "Service default/web: spec.ports: invalid type: integer `5`, expected a sequence so {end}"
        )
    }

    #[test]
    fn the_last_good_word_stays() {
        let mut told = Told::default();
        assert_eq!(put(&mut told, GOOD), ["web 10.0.0.1"]);
        let kept = refused("what the object said before stays in force");
        assert_eq!(put(&mut told, BAD), [kept, "1 unread".to_owned()]);
        // The same in the next version, and in a list.
        assert_eq!(put(&mut told, BAD), [""; 0]);
        assert_eq!(listed(&mut told, &["web"]), [""; 0]);
        assert_eq!(put(&mut told, OTHER), ["web 10.0.0.2", "0 unread"]);
    }

    #[test]
    fn what_cannot_be_read_goes_when_it_is_gone() {
        for by_list in [true, false] {
            let mut told = Told::default();
            put(&mut told, GOOD);
            put(&mut told, BAD);
            let gone = match by_list {
                true => listed(&mut told, &["another"]),
                false => {
                    let mut news = News::default();
                    told.remove::<Service>(ObjectName::new("default", "web"), "n1", &mut news);
                    told.tell_unread::<Service>(&mut news);
                    said(&news)
                }
            };
            assert_eq!(gone, ["web gone", "0 unread"]);
            // Made again, it has said nothing before.
            let refused = refused("nothing of the object is used");
            assert_eq!(
                put(&mut told, BAD),
                [refused, "1 unread, never read".to_owned()]
            );
        }
    }

    #[test]
    fn nothing_counts_of_what_was_never_read() {
        let mut told = Told::default();
        let refused = refused("nothing of the object is used");
        assert_eq!(
            put(&mut told, BAD),
            [refused, "1 unread, never read".to_owned()]
        );
        assert_eq!(listed(&mut told, &["web"]), [""; 0]);
        assert_eq!(put(&mut told, GOOD), ["web 10.0.0.1", "0 unread"]);
    }

    /// One line per object and cause, not per version.
    #[test]
    fn a_refusal_is_told_once() {
        let mut told = Told::default();
        let part = |address: &str, more: &str| {
            let good = GOOD.replace('}', "").replace(r#""web""#, r#""web"}"#);
            format!(r#"{good}, "externalIPs": ["{address}"]{more}}}}}"#)
        };
        let refused = |address: &str| {
            format!("Service default/web: spec.externalIPs[0]: \"{address}\" is not an IP address")
        };
        let good = || "web 10.0.0.1".to_owned();
        assert_eq!(put(&mut told, &part("x", "")), [good(), refused("x")]);
        let more = r#", "type": "NodePort""#;
        assert_eq!(put(&mut told, &part("x", more)), [good()]);
        assert_eq!(put(&mut told, &part("y", more)), [good(), refused("y")]);
        assert_eq!(put(&mut told, GOOD), [good()]);
        assert_eq!(put(&mut told, &part("y", more)), [good(), refused("y")]);
        assert_eq!(listed(&mut told, &[]), ["web gone"]);
        assert_eq!(put(&mut told, &part("y", more)), [good(), refused("y")]);
    }

    /// Thousands at once: told once for all, and not longer than a person reads.
    #[test]
    fn many_that_cannot_be_read_cost_little() {
        let mut told = Told::default();
        let mut news = News::default();
        let long = "x".repeat(100_000);
        for number in 0..1000 {
            let text = format!(
                r#"{{"metadata": {{"name": "s{number}"}}, "spec": {{"ports": [{{"port": "{long}"}}]}}}}"#
            );
            let sent: Sent<Service> = serde_json::from_str(&text).unwrap();
            told.put(&sent, "n1", &mut news);
            assert!(news.unread.is_none());
        }
        told.tell_unread::<Service>(&mut news);
        let unread = news.unread.unwrap();
        assert_eq!(unread.objects.len(), 1000);
        assert!(unread.objects.iter().all(|why| why.len() < 700));
        told.tell_unread::<Service>(&mut News::default());
        assert!(!told.changed);
    }
}
