//! What all manifests together say, kept up to date.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use ipvs_proxy_core::guard::Needed;
use ipvs_proxy_core::model::{self, Change, ObjectName};

use super::folder::{Folder, list};
use super::{Busy, ManifestError, Object, Placed, parse, printable, text_of};
use crate::translate::{self, Refusal};

/// A file that was changed this short a time ago may be changed again without a new time stamp.
const SETTLED: Duration = Duration::from_millis(100);

/// Something about the manifests that a person should know. Displays as one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// A file can't be read, or a part of it. Where it was read well before, what it said then
    /// stays in force; else what can be read of it counts.
    BadFile {
        /// Why.
        error: ManifestError,
        /// Whether it is its last good content that is in force.
        kept: bool,
    },
    /// A file or directory can't be looked at. What it said last stays in force.
    Unreachable {
        /// The path.
        path: PathBuf,
        /// Why.
        error: String,
        /// Whether there is something of it in force.
        kept: bool,
    },
    /// A part of an object can't be used.
    Refused {
        /// The file.
        file: String,
        /// The line on which the object's document starts.
        line: usize,
        /// What and why.
        refusal: Refusal,
    },
    /// There was a problem with a file or directory, and there is none any more.
    Mended {
        /// The path.
        path: String,
    },
    /// An object stands twice; the last in the order of paths counts.
    Twice {
        /// Kind, namespace and name.
        object: String,
        /// The file that does not count.
        ignored: String,
        /// The file that counts.
        used: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::BadFile { error, kept: false } => error.fmt(f),
            Problem::BadFile { error, kept: true } => {
                write!(f, "{error}; the file's last good content stays in force")
            }
            Problem::Unreachable { path, error, kept } => {
                write!(f, "{}: {error}", printable(&path.display().to_string()))?;
                if *kept {
                    f.write_str("; what was last read there stays in force")?;
                }
                Ok(())
            }
            Problem::Refused {
                file,
                line,
                refusal,
            } => write!(f, "{file}:{line}: {refusal}"),
            Problem::Mended { path } => write!(f, "{path}: is good again"),
            Problem::Twice {
                object,
                ignored,
                used,
            } => {
                write!(
                    f,
                    "{object}: is in {ignored} and in {used}; the one in {used} is used"
                )
            }
        }
    }
}

/// Manifests in files and directories, and what they said last.
///
/// A directory counts with its files `*.yaml`, `*.yml` and `*.json`, without those whose name
/// starts with a dot and without subdirectories; symbolic links to files are followed. One that is
/// missing, or replaced by an empty one, says nothing: what it said last stays in force. The
/// cost of a look is one `stat` a file and the work on the files that changed.
#[derive(Debug)]
pub struct Source {
    paths: Vec<PathBuf>,
    node_name: String,
    node_addresses: bool,
    files: BTreeMap<FileKey, File>,
    /// The directories among the paths, by number, as they were listed last.
    folders: BTreeMap<usize, Folder>,
    /// The files that somebody is writing now; they are read when that is done.
    busy: Busy,
    /// Who says what about each object. The last file's word counts.
    claims: BTreeMap<Key, BTreeMap<FileKey, Value>>,
    /// The paths that could not be looked at the last time.
    unreachable: BTreeSet<PathBuf>,
}

/// The place of a file in the order of paths: the argument's number, then the name.
type FileKey = Arc<(usize, PathBuf)>;

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
            folders: BTreeMap::new(),
            busy: Busy::default(),
            claims: BTreeMap::new(),
            unreachable: BTreeSet::new(),
        }
    }

    /// Leaves files alone while [`watch`](super::watch()) sees somebody write them.
    #[must_use]
    pub fn leaving(mut self, busy: Busy) -> Source {
        self.busy = busy;
        self
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
        let mut scan = Scan {
            problems: Vec::new(),
            before: BTreeMap::new(),
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
                Ok((paths, folder))
                    if was_directory
                        && paths.is_empty()
                        && self.folders.get(&number) != folder.as_ref() =>
                {
                    Err(std::io::Error::other(
                        "it is another directory than before and holds no manifest; \
                         if none is wanted, restart with it as it is",
                    ))
                }
                found => found,
            };
            match found {
                Ok((paths, folder)) => {
                    if let Some(folder) = folder {
                        self.folders.insert(number, folder);
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
        for key in listed {
            let under = self
                .paths
                .get(key.0)
                .is_some_and(|path| unreachable.contains(path));
            if !under {
                self.refresh(&key, &mut scan);
            }
        }
        for path in self.unreachable.difference(&unreachable) {
            let path = printable(&path.display().to_string());
            scan.problems.push(Problem::Mended { path });
        }
        self.unreachable = unreachable;
        (self.changes(scan.before), scan.problems)
    }

    /// Reads a file again if it is not what it was.
    fn refresh(&mut self, key: &FileKey, scan: &mut Scan) {
        let path = key.1.as_path();
        let stdin = path == Path::new("-");
        let writing = self.busy.contains(path);
        let file = self.files.entry(key.clone()).or_default();
        if writing && file.good {
            return;
        }
        let (stamp, settled) = match Stamp::of(path) {
            Ok(found) => found,
            // A link to nowhere, and what was gone between the listing and now, read as such.
            Err(_) => (Stamp([0; 4], [0; 3]), true),
        };
        if file.stamp.as_ref() == Some(&stamp) {
            return;
        }
        file.stamp = Some(stamp).filter(|_| settled || stdin);
        let text = text_of(path);
        let content = Some(BuildHasherDefault::<DefaultHasher>::default().hash_one(&text));
        if file.content == content {
            return;
        }
        file.content = content;
        let empty = text.as_ref().is_ok_and(|(_, text)| text.trim().is_empty());
        let (objects, mut errors) = parse(path, text);
        if empty && !file.keys.is_empty() {
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
            scan.before.insert(object.clone(), self.in_force(object));
        }
    }

    fn in_force(&self, object: &Key) -> Value {
        let claims = self.claims.get(object);
        claims
            .and_then(|claims| claims.last_key_value())
            .map_or(Value::Nothing, |(_, v)| v.clone())
    }

    fn changes(&self, before: BTreeMap<Key, Value>) -> Vec<Change> {
        let mut changes = Vec::new();
        for (object, before) in before {
            let now = self.in_force(&object);
            if now == before {
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
    /// What was in force before, for each object that any changed file names.
    before: BTreeMap<Key, Value>,
}

fn show(key: &FileKey) -> String {
    if key.1 == Path::new("-") {
        "stdin".to_owned()
    } else {
        printable(&key.1.display().to_string())
    }
}
