//! Large files are read on a thread of their own, one at a time.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};

use super::source::FileKey;
use super::{ManifestError, Placed, parse, text_of};

/// What was read of a file.
#[derive(Debug)]
pub(super) struct Read {
    /// A hash of it, so that the same is not judged twice.
    pub(super) content: u64,
    /// There is nothing in it.
    pub(super) empty: bool,
    pub(super) objects: Vec<Placed>,
    pub(super) errors: Vec<ManifestError>,
}

impl Read {
    /// Reads a file, unless it holds what has this hash.
    pub(super) fn of(path: &Path, known: Option<u64>) -> Option<Read> {
        let text = text_of(path);
        let content = BuildHasherDefault::<DefaultHasher>::default().hash_one(&text);
        if known == Some(content) {
            return None;
        }
        let empty = text.as_ref().is_ok_and(|(_, text)| text.trim().is_empty());
        let (objects, errors) = parse(path, text);
        Some(Read {
            content,
            empty,
            objects,
            errors,
        })
    }
}

/// A job's file, its number, and what the file held before.
type Job = (FileKey, u64, Option<u64>);
/// What came of a job: nothing where the file holds what it held before.
type Ended = (FileKey, u64, Option<Read>);

/// The thread that reads large files.
#[derive(Debug)]
pub(super) struct Aside {
    jobs: SyncSender<Job>,
    ended: Receiver<Ended>,
    /// Jobs that were begun.
    number: u64,
    works: bool,
    /// The last file that was read: the next comes after it, so that none has to wait for ever.
    last: Option<FileKey>,
}

impl Aside {
    /// Starts the thread; each time it has ended a job it sends a tick.
    pub(super) fn start(ticks: SyncSender<()>) -> std::io::Result<Aside> {
        let (jobs, to_do) = sync_channel::<Job>(1);
        let (ends, ended) = sync_channel(1);
        let work = move || {
            for (key, number, known) in to_do {
                let read = Read::of(&key.1, known);
                if ends.send((key, number, read)).is_err() {
                    return;
                }
                // When one waits already, that is as good.
                let _ = ticks.try_send(());
            }
        };
        std::thread::Builder::new()
            .name("manifests-large".to_owned())
            .spawn(work)?;
        Ok(Aside {
            jobs,
            ended,
            number: 0,
            works: false,
            last: None,
        })
    }

    /// A job that has ended.
    pub(super) fn ended(&mut self) -> Option<Ended> {
        let ended = self.ended.try_recv();
        self.works &= matches!(ended, Err(TryRecvError::Empty));
        ended.ok()
    }

    /// Which of these files is to be read next, if it is time for one.
    pub(super) fn choose<'a, T>(
        &self,
        files: &'a BTreeMap<FileKey, T>,
    ) -> Option<(&'a FileKey, &'a T)> {
        let next = self.last.as_ref().and_then(|last| {
            let after = (std::ops::Bound::Excluded(last), std::ops::Bound::Unbounded);
            files.range::<FileKey, _>(after).next()
        });
        next.or_else(|| files.first_key_value())
            .filter(|_| !self.works)
    }

    /// Has a file read, and says by which number.
    pub(super) fn read(&mut self, key: &FileKey, known: Option<u64>) -> Option<u64> {
        self.number += 1;
        self.last = Some(key.clone());
        self.works = self
            .jobs
            .try_send((key.clone(), self.number, known))
            .is_ok();
        self.works.then_some(self.number)
    }
}
