//! Manifests are read on a thread of their own, so that nobody else waits for a file.

use std::sync::mpsc::sync_channel;

use ipvs_proxy_core::model::Change;

use super::aside::Aside;
use super::{Problem, Source, watch};

/// What manifests say that they did not say before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct News {
    /// The changes of objects.
    pub changes: Vec<Change>,
    /// The problems that are new.
    pub problems: Vec<Problem>,
    /// What can't be read or used now ([`Source::faults`]).
    pub faults: Vec<String>,
    /// Whether all could be read ([`Source::is_complete`]).
    pub complete: bool,
}

/// Follows manifests: reads all, and tells what they say; then reads what changes, and tells that. While `tell` waits, what
/// changes meanwhile is merged. The threads end when it returns false.
///
/// # Errors
/// When the manifests can't be watched, or a thread can't be started.
pub fn follow(
    source: Source,
    mut tell: impl FnMut(News) -> bool + Send + 'static,
) -> std::io::Result<()> {
    let (ticks, to_look) = sync_channel(1);
    let busy = watch(source.paths(), ticks.clone())?;
    let mut source = source.leaving(busy).with_aside(Aside::start(ticks)?);
    let read = move || {
        let mut news = News::default();
        let mut told: Option<(Vec<String>, bool)> = None;
        loop {
            let (changes, problems) = source.rescan();
            news.changes.extend(changes);
            news.problems.extend(problems);
            let now = (source.faults(), source.is_complete());
            let first = told.is_none();
            let is_news = told.as_ref() != Some(&now)
                || !news.changes.is_empty()
                || !news.problems.is_empty();
            // What was said first is the whole: a part of it could take what another part has.
            if is_news && !(first && source.is_behind()) {
                (news.faults, news.complete) = now.clone();
                told = Some(now);
                if !tell(std::mem::take(&mut news)) {
                    return;
                }
            }
            if !source.has_more() && to_look.recv().is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("manifests".to_owned())
        .spawn(read)?;
    Ok(())
}
