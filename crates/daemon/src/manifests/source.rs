//! What all manifests together say, kept up to date.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use ipvs_proxy_core::guard::Needed;
use ipvs_proxy_core::model::{self, Change, ObjectName};

use super::aside::{Aside, Read};
use super::folder::{Folders, list};
use super::{Busy, ManifestError, Object, Placed, Problem, printable};
use crate::translate::{self, Refusal};

/// A file of more bytes is read aside, where there is such a thread: it takes 10 ms and more.
const LARGE: u64 = 32 << 10;
/// So many bytes of other files are read in one look.
const LOOK: u64 = 128 << 10;
/// A file that was changed this short a time ago may be changed again without a new time stamp.
const SETTLED: Duration = Duration::from_millis(100);

/// Manifests in files and directories, and what they said last.
///
/// A directory counts with its files `*.yaml`, `*.yml` and `*.json`, without those whose name
/// starts with a dot and without subdirectories; symbolic links to files are followed. One that is
/// missing, or replaced by an empty one, says nothing: what it said last stays in force. The
/// cost of a look is one `stat` a file and the work on the files that changed.
///
/// With a thread aside a look is short: large files are read there, and of many small ones some, the newest first. An
/// object is gone only when the files are read that were known to be changed by then: it may stand in one of them now.
#[derive(Debug)]
pub struct Source {
    paths: Vec<PathBuf>,
    node_name: String,
    node_addresses: bool,
    files: BTreeMap<FileKey, File>,
    /// The directories among the paths, as they were listed last.
    folders: Folders,
    /// The files that somebody is writing now; they are read when that is done.
    busy: Busy,
    /// Who says what about each object. The last file's word counts.
    claims: BTreeMap<Key, BTreeMap<FileKey, Value>>,
    /// The paths that could not be looked at the last time.
    unreachable: BTreeSet<PathBuf>,
    /// Where large files are read.
    aside: Option<Aside>,
    /// How many looks there were.
    looks: u64,
    /// The last one left small files for the next.
    more: bool,
    /// Objects that no file names any more, what was in force about them, and since which look.
    leaving: BTreeMap<Key, (Value, u64)>,
}

/// The place of a file in the order of paths: the argument's number, then the name.
pub(super) type FileKey = Arc<(usize, PathBuf)>;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Node,
    OtherNode(Arc<str>),
    Service(ObjectName),
    Slice(ObjectName),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Node => write!(f, "this node's Node"),
            Key::OtherNode(name) => write!(f, "Node {name}"),
            Key::Service(name) => write!(f, "Service {name}"),
            Key::Slice(name) => write!(f, "EndpointSlice {name}"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    /// The node, and the networks of its pods.
    Node(Arc<(model::Node, Vec<IpNet>)>),
    /// The addresses of another node.
    OtherNode(Arc<BTreeSet<IpAddr>>),
    Service(Arc<model::Service>),
    Slice(Arc<model::Slice>),
    /// Left out or refused whole. It still counts against the same object in an earlier file.
    Nothing,
}

#[derive(Debug, Default)]
struct File {
    /// What the file was when it was read; `None` when it must be read again.
    stamp: Option<Stamp>,
    /// A hash of what was read, so that the same is not judged twice.
    content: Option<u64>,
    keys: BTreeSet<Key>,
    refusals: HashSet<Refusal>,
    /// It was read well at least once.
    good: bool,
    /// It was not read well the last time, or not all of it can be used.
    faulty: bool,
    /// Since which look it is known to be another than what was read.
    waits: Option<u64>,
    /// The number of the job that reads it aside.
    job: Option<u64>,
}

/// A file that is not what it was.
#[derive(Debug, Clone)]
struct Changed {
    key: FileKey,
    stamp: Stamp,
    settled: bool,
    /// It was read; only its time stamp is too young to be trusted.
    again: bool,
}

impl Changed {
    /// Its time stamp, if a later change will make another.
    fn stamp(&self) -> Option<Stamp> {
        Some(self.stamp.clone()).filter(|_| self.settled)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp([i64; 4], [u64; 3]);

impl Stamp {
    fn of(path: &Path) -> std::io::Result<(Stamp, bool)> {
        let m = std::fs::metadata(path)?;
        let stamp = Stamp(
            [m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec()],
            [m.size(), m.ino(), m.dev()],
        );
        let age = m
            .modified()
            .ok()
            .and_then(|time| SystemTime::now().duration_since(time).ok());
        Ok((stamp, age.is_some_and(|age| age > SETTLED)))
    }

    /// What sorts the newest first.
    fn age(&self) -> impl Ord + use<> {
        let Stamp([seconds, nanoseconds, ..], _) = self;
        std::cmp::Reverse((*seconds, *nanoseconds))
    }

    fn bytes(&self) -> u64 {
        let Stamp(_, [bytes, ..]) = self;
        *bytes
    }
}

impl Source {
    /// The manifests at `paths`; `-` is standard input, read once. Nothing is read yet.
    ///
    /// `node_name` says which endpoints are local. With `node_addresses`, the Node of that name
    /// says the node's addresses; it always says its pods' networks.
    #[must_use]
    pub fn new(paths: Vec<PathBuf>, node_name: &str, node_addresses: bool) -> Source {
        Source {
            paths,
            node_name: node_name.to_owned(),
            node_addresses,
            files: BTreeMap::new(),
            folders: Folders::default(),
            busy: Busy::default(),
            claims: BTreeMap::new(),
            unreachable: BTreeSet::new(),
            aside: None,
            looks: 0,
            more: false,
            leaving: BTreeMap::new(),
        }
    }

    /// Leaves files alone while [`watch`](super::watch()) sees somebody write them.
    #[must_use]
    pub fn leaving(mut self, busy: Busy) -> Source {
        self.busy = busy;
        self
    }

    /// Keeps in that file, if there is one, over a restart, which directories held manifests. An empty one says nothing
    /// where that is not known, or where another one held some.
    #[must_use]
    pub fn remembering(mut self, file: Option<PathBuf>) -> Source {
        self.folders = Folders::kept_in(file);
        self
    }

    /// Has large files read by that thread.
    pub(super) fn with_aside(mut self, aside: Aside) -> Source {
        self.aside = Some(aside);
        self
    }

    pub(super) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Whether files are known to be others than what was read.
    pub(super) fn is_behind(&self) -> bool {
        self.files.values().any(|file| file.waits.is_some())
    }

    /// Whether another look goes on with them at once.
    pub(super) fn has_more(&self) -> bool {
        self.more
    }

    /// Whether every path was reached and every file there was read well at least once: only
    /// then may what no manifest names be removed from the kernel.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.unreachable.is_empty() && self.files.values().all(|file| file.good)
    }

    /// The paths and files that can't be read, or not all of which can be used, as of the last look.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let files = self.files.iter().filter(|(_, file)| file.faulty);
        let paths = self.unreachable.iter().chain(files.map(|(key, _)| &key.1));
        paths
            .map(|path| printable(&path.display().to_string()))
            .collect()
    }

    /// Reads what changed since the last time. Returns the changes of objects, and the problems
    /// that are new. A Node that is gone is no change: its addresses and its pods' networks stay the
    /// last word.
    pub fn rescan(&mut self) -> (Vec<Change>, Vec<Problem>) {
        self.looks += 1;
        let mut scan = Scan {
            problems: Vec::new(),
            before: std::mem::take(&mut self.leaving),
            left: LOOK,
        };
        let mut listed = BTreeSet::new();
        let mut unreachable = BTreeSet::new();
        for (number, path) in self.paths.iter().enumerate() {
            // A directory with manifests that turned into something else is no word on them.
            let under = |key: &&FileKey| key.0 == number;
            let was_directory = self.files.keys().filter(under).any(|key| key.1 != *path);
            let found = match list(path) {
                Ok((_, None)) if was_directory => {
                    Err(std::io::Error::other("it is not a directory any more"))
                }
                // As it is where nothing is mounted any more. Files that were deleted leave the same one.
                Ok((paths, Some(folder))) if paths.is_empty() => {
                    match self.folders.doubt(path, &folder) {
                        Some(why) => Err(std::io::Error::other(why)),
                        None => Ok((paths, Some(folder))),
                    }
                }
                found => found,
            };
            match found {
                Ok((paths, folder)) => {
                    if let Some(folder) = folder {
                        self.folders.note(path, folder, !paths.is_empty());
                    }
                    listed.extend(paths.into_iter().map(|p| Arc::new((number, p))));
                }
                Err(error) => {
                    let known = self.files.keys().filter(|key| key.0 == number);
                    listed.extend(known.cloned());
                    if !self.unreachable.contains(path) {
                        let error = format!("can't be read: {error}");
                        let kept = self.files.keys().any(|key| key.0 == number);
                        let path = path.clone();
                        scan.problems
                            .push(Problem::Unreachable { path, error, kept });
                    }
                    unreachable.insert(path.clone());
                }
            }
        }
        let gone: Vec<_> = self
            .files
            .keys()
            .filter(|k| !listed.contains(*k))
            .cloned()
            .collect();
        for key in gone {
            let file = self.files.remove(&key).unwrap_or_default();
            self.replace(&key, file.keys, BTreeMap::new(), &mut scan);
        }
        listed.retain(|key: &FileKey| {
            let path = self.paths.get(key.0);
            !path.is_some_and(|path| unreachable.contains(path))
        });
        self.refresh(listed, &mut scan);
        for path in self.unreachable.difference(&unreachable) {
            let path = printable(&path.display().to_string());
            scan.problems.push(Problem::Mended { path });
        }
        self.unreachable = unreachable;
        self.folders.keep();
        (self.changes(scan.before), scan.problems)
    }

    /// Reads files that are not what they were, or has them read aside, or leaves them for the next look.
    fn refresh(&mut self, listed: BTreeSet<FileKey>, scan: &mut Scan) {
        let ended = self.aside.as_mut().and_then(Aside::ended);
        if let Some((key, number, read)) = ended
            && let Some(file) = self.files.get_mut(&key)
            && file.job.take_if(|job| *job == number).is_some()
        {
            file.waits = None;
            self.take(&key, read, scan);
        }
        let changed = listed.into_iter().filter_map(|key| self.changed(key));
        let mut changed: Vec<Changed> = changed.collect();
        if self.aside.is_some() {
            changed.sort_by_key(|changed| (changed.again, changed.stamp.age()));
        }
        self.more = false;
        let mut large = BTreeMap::new();
        for changed in changed {
            let (bytes, again) = (changed.stamp.bytes(), changed.again);
            let key = changed.key.clone();
            let file = self.files.entry(key.clone()).or_default();
            match &mut self.aside {
                Some(_) if bytes > LARGE => {
                    large.insert(key, changed);
                }
                Some(_) if scan.left < bytes => self.more = true,
                _ => {
                    scan.left = scan.left.saturating_sub(bytes);
                    file.waits = None;
                    file.job = None;
                    file.stamp = changed.stamp();
                    let read = Read::of(&key.1, file.content);
                    self.take(&key, read, scan);
                    continue;
                }
            }
            if !again {
                file.waits.get_or_insert(self.looks);
            }
        }
        if let Some(aside) = &mut self.aside
            && let Some((key, changed)) = aside.choose(&large)
            && let Some(file) = self.files.get_mut(key)
        {
            file.job = aside.read(key, file.content);
            file.stamp = changed.stamp();
        }
    }

    /// What a file is now, if that is not what it was, and nobody writes it.
    fn changed(&mut self, key: FileKey) -> Option<Changed> {
        let path = key.1.as_path();
        let file = self.files.entry(key.clone()).or_default();
        if file.good && self.busy.contains(path) {
            file.waits = None;
            return None;
        }
        let (stamp, settled) = match Stamp::of(path) {
            Ok(found) => found,
            // A link to nowhere, and what was gone between the listing and now, read as such.
            Err(_) => (Stamp([0; 4], [0; 3]), true),
        };
        let other = file.stamp.as_ref() != Some(&stamp);
        other.then(|| Changed {
            again: file.stamp.is_none() && file.content.is_some() && file.waits.is_none(),
            settled: settled || key.1 == Path::new("-"),
            stamp,
            key,
        })
    }

    /// Takes in what was read of a file.
    fn take(&mut self, key: &FileKey, read: Option<Read>, scan: &mut Scan) {
        let Some(read) = read else { return };
        let file = self.files.entry(key.clone()).or_default();
        file.content = Some(read.content);
        let (objects, mut errors) = (read.objects, read.errors);
        if read.empty && !file.keys.is_empty() {
            // A writer that has yet to write, or one that failed: nobody says that objects are gone.
            errors.push(ManifestError {
                file: show(key),
                line: None,
                object: None,
                field: None,
                message: "is empty; delete it to remove what it held".to_owned(),
                object_only: false,
            });
        }
        let faulty = std::mem::replace(&mut file.faulty, !errors.is_empty());
        let kept = file.good && !errors.is_empty();
        let whole = errors.is_empty();
        scan.problems.extend(
            errors
                .into_iter()
                .map(|error| Problem::BadFile { error, kept }),
        );
        if kept {
            return;
        }
        // A file that was never read well is used as far as it can be.
        let read = self.translate(key, objects, scan);
        let file = self.files.entry(key.clone()).or_default();
        file.good = whole;
        file.faulty |= !file.refusals.is_empty();
        if faulty && !file.faulty {
            let path = show(key);
            scan.problems.push(Problem::Mended { path });
        }
        let old = std::mem::take(&mut file.keys);
        file.keys = read.keys().cloned().collect();
        self.replace(key, old, read, scan);
    }

    /// Translates a file's objects; refusals that were not there before are problems.
    fn translate(
        &mut self,
        key: &FileKey,
        objects: Vec<Placed>,
        scan: &mut Scan,
    ) -> BTreeMap<Key, Value> {
        let file_name = show(key);
        let mut read = BTreeMap::new();
        let mut refusals = HashSet::new();
        for Placed { line, object } in objects {
            let (object, value, refused) = match object {
                Object::Service(service) => {
                    let t = translate::service(&service);
                    let value = t
                        .object
                        .map_or(Value::Nothing, |o| Value::Service(o.into()));
                    (Key::Service(t.name), value, t.refusals)
                }
                Object::EndpointSlice(slice) => {
                    let t = translate::slice(&slice, &self.node_name);
                    let value = t.object.map_or(Value::Nothing, |o| Value::Slice(o.into()));
                    (Key::Slice(t.name), value, t.refusals)
                }
                Object::Node(node) if node.metadata.name.as_deref() != Some(&*self.node_name) => {
                    let t = translate::node(&node);
                    let addresses = t.object.map(|node| node.addresses).unwrap_or_default();
                    let value = Value::OtherNode(addresses.into());
                    (Key::OtherNode(t.name.name), value, Vec::new())
                }
                Object::Node(node) => {
                    let mut t = translate::node(&node);
                    if !self.node_addresses {
                        t.object = Some(model::Node::default());
                        t.refusals.clear();
                    }
                    let (networks, refused) = translate::pod_cidrs(&node);
                    t.refusals.extend(refused);
                    let word = t.object.map(|node| Value::Node((node, networks).into()));
                    (Key::Node, word.unwrap_or(Value::Nothing), t.refusals)
                }
            };
            let known = self.files.get(key).map(|file| &file.refusals);
            for refusal in refused {
                if known.is_none_or(|known| !known.contains(&refusal)) {
                    let (file, refusal) = (file_name.clone(), refusal.clone());
                    scan.problems.push(Problem::Refused {
                        file,
                        line,
                        refusal,
                    });
                }
                refusals.insert(refusal);
            }
            if read.insert(object.clone(), (line, value)).is_some() {
                let (ignored, used) = (file_name.clone(), format!("{file_name}:{line}"));
                let object = object.to_string();
                scan.problems.push(Problem::Twice {
                    object,
                    ignored,
                    used,
                });
            }
        }
        if let Some(file) = self.files.get_mut(key) {
            file.refusals = refusals;
        }
        read.into_iter()
            .map(|(key, (_, value))| (key, value))
            .collect()
    }

    /// Puts a file's word on objects in the place of its last word.
    fn replace(
        &mut self,
        key: &FileKey,
        old: BTreeSet<Key>,
        new: BTreeMap<Key, Value>,
        scan: &mut Scan,
    ) {
        for object in &old {
            self.remember(object, scan);
            if !new.contains_key(object)
                && let Some(claims) = self.claims.get_mut(object)
            {
                claims.remove(key);
                if claims.is_empty() {
                    self.claims.remove(object);
                }
            }
        }
        for (object, value) in new {
            self.remember(&object, scan);
            let claims = self.claims.entry(object.clone()).or_default();
            if !old.contains(&object) {
                let mut files: BTreeSet<&FileKey> = claims.keys().collect();
                files.insert(key);
                let mut last = files.into_iter().rev();
                if let (Some(used), Some(ignored)) = (last.next(), last.next()) {
                    let (used, ignored) = (show(used), show(ignored));
                    let object = object.to_string();
                    scan.problems.push(Problem::Twice {
                        object,
                        ignored,
                        used,
                    });
                }
            }
            claims.insert(key.clone(), value);
        }
    }

    /// Keeps what was in force about an object before this look.
    fn remember(&self, object: &Key, scan: &mut Scan) {
        if !scan.before.contains_key(object) {
            let before = (self.in_force(object), self.looks);
            scan.before.insert(object.clone(), before);
        }
    }

    fn in_force(&self, object: &Key) -> Value {
        let claims = self.claims.get(object);
        claims
            .and_then(|claims| claims.last_key_value())
            .map_or(Value::Nothing, |(_, v)| v.clone())
    }

    fn changes(&mut self, before: BTreeMap<Key, (Value, u64)>) -> Vec<Change> {
        let unread_since = self.files.values().filter_map(|file| file.waits).min();
        let mut changes = Vec::new();
        for (object, (before, since)) in before {
            let now = self.in_force(&object);
            if now == before {
                continue;
            }
            if now == Value::Nothing && unread_since.is_some_and(|look| look <= since) {
                self.leaving.insert(object, (before, since));
                continue;
            }
            match (object, now) {
                (Key::Service(name), Value::Service(service)) => {
                    changes.push(Change::Service(name, Some(model::Service::clone(&service))));
                }
                (Key::Service(name), _) => changes.push(Change::Service(name, None)),
                (Key::Slice(name), Value::Slice(slice)) => {
                    changes.push(Change::Slice(name, Some(model::Slice::clone(&slice))));
                }
                (Key::Slice(name), _) => changes.push(Change::Slice(name, None)),
                (Key::Node, Value::Node(node)) => {
                    let (node, networks) = &*node;
                    let node = self.node_addresses.then(|| Change::Node(node.clone()));
                    let some = Some(networks).filter(|networks| !networks.is_empty());
                    changes.extend(node);
                    changes.extend(some.cloned().map(Change::PodCidrs));
                }
                (Key::Node, _) => {}
                (Key::OtherNode(name), value) => {
                    let addresses = match &value {
                        Value::OtherNode(addresses) => {
                            addresses.iter().copied().map(Needed::host).collect()
                        }
                        _ => BTreeSet::new(),
                    };
                    changes.push(Change::Needed(format!("Node {name}").into(), addresses));
                }
            }
        }
        changes
    }
}

/// What one look gathers.
struct Scan {
    problems: Vec<Problem>,
    /// What was in force before, and at which look, for each object that any changed file names.
    before: BTreeMap<Key, (Value, u64)>,
    /// How many bytes may be read yet.
    left: u64,
}

fn show(key: &FileKey) -> String {
    if key.1 == Path::new("-") {
        "stdin".to_owned()
    } else {
        printable(&key.1.display().to_string())
    }
}
