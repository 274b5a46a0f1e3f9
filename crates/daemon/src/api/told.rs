//! What was told of the objects of a kind: which of them are in force, and which can't be read.

use std::collections::{BTreeMap, BTreeSet};

use ipvs_proxy_core::model::ObjectName;

use super::sent::Sent;
use super::{Followed, News};
use crate::translate::Refusal;

/// What was told of the objects of a kind.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Objects that were told and not told gone.
    known: BTreeSet<ObjectName>,
    /// Objects whose last version can't be read, and why.
    unread: BTreeMap<ObjectName, String>,
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
                self.forget_unread::<K>(&name, news);
                object.tell(node_name, news);
                return;
            }
            Err(error) => error,
        };
        let kept = self.known.contains(&name);
        let refusal = Refusal {
            object: format!("{} {name}", K::KIND.object()),
            field: field.clone(),
            value: error.clone(),
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
            self.tell_unread::<K>(news);
        }
    }

    /// An object is gone.
    pub(super) fn remove<K: Followed>(&mut self, name: ObjectName, news: &mut News) {
        self.forget_unread::<K>(&name, news);
        self.known.remove(&name);
        K::tell_gone(name, news);
    }

    /// There are these objects and no others: the rest went unseen.
    pub(super) fn retain<K: Followed>(&mut self, listed: &BTreeSet<ObjectName>, news: &mut News) {
        let all: BTreeSet<_> = self.known.iter().chain(self.unread.keys()).collect();
        let gone = all.into_iter().filter(|name| !listed.contains(name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.remove::<K>(name, news);
        }
    }

    fn forget_unread<K: Followed>(&mut self, name: &ObjectName, news: &mut News) {
        if self.unread.remove(name).is_some() {
            self.tell_unread::<K>(news);
        }
    }

    fn tell_unread<K: Followed>(&self, news: &mut News) {
        let why = self.unread.values().cloned().collect();
        news.unread = Some((K::KIND, why));
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
        let unread = news.unread.iter().map(|(kind, why)| {
            assert_eq!(*kind, Kind::Services);
            format!("{} unread", why.len())
        });
        changes.chain(refusals).chain(unread).collect()
    }

    fn put(told: &mut Told, text: &str) -> Vec<String> {
        let mut news = News::default();
        let sent: Sent<Service> = serde_json::from_str(text).unwrap();
        told.put(&sent, "n1", &mut news);
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
                "1 unread"
            ]
        );
        assert_eq!(listed(&mut told, &["web"]), [" gone", "0 unread"]);
    }

    fn listed(told: &mut Told, names: &[&str]) -> Vec<String> {
        let mut news = News::default();
        let names = names.iter().map(|name| ObjectName::new("default", name));
        told.retain::<Service>(&names.collect(), &mut news);
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
                    told.remove::<Service>(ObjectName::new("default", "web"), &mut news);
                    said(&news)
                }
            };
            assert_eq!(gone, ["web gone", "0 unread"]);
            // Made again, it has said nothing before.
            let refused = refused("nothing of the object is used");
            assert_eq!(put(&mut told, BAD), [refused, "1 unread".to_owned()]);
        }
    }

    #[test]
    fn nothing_counts_of_what_was_never_read() {
        let mut told = Told::default();
        let refused = refused("nothing of the object is used");
        assert_eq!(put(&mut told, BAD), [refused, "1 unread".to_owned()]);
        assert_eq!(listed(&mut told, &["web"]), [""; 0]);
        assert_eq!(put(&mut told, GOOD), ["web 10.0.0.1", "0 unread"]);
    }
}
