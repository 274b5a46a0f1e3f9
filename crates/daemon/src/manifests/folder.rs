//! The files of a path, and which directory it was.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::place::replace;

/// A directory, by what tells it from another one that stands in its place: a mount, or one that was renamed there.
/// The time it was made tells apart what a file system mounted anew numbers alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Folder(u64, u64, Option<SystemTime>);

impl Folder {
    fn of(path: &Path) -> std::io::Result<Option<Folder>> {
        let m = std::fs::metadata(path)?;
        let folder = Folder(m.dev(), m.ino(), m.created().ok());
        Ok(m.is_dir().then_some(folder))
    }
}

/// Directories as they were listed last, kept over a restart in a small file where there is one.
#[derive(Debug, Default)]
pub(super) struct Folders {
    known: BTreeMap<PathBuf, Known>,
    file: Option<PathBuf>,
    /// An empty directory that nothing is known of is not believed.
    doubts: bool,
    /// What is known is not what the file says.
    unwritten: bool,
    /// It could not be written, as told.
    failed: bool,
}

/// What was there last.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    folder: Folder,
    /// It held manifests.
    held: bool,
}

impl Folders {
    /// What that file says; without it nothing is known.
    pub(super) fn kept_in(file: Option<PathBuf>) -> Folders {
        let read = |file: &PathBuf| -> io::Result<_> {
            Ok(serde_json::from_slice(&std::fs::read(file)?)?)
        };
        let known = match file.as_ref().map(read).transpose() {
            Ok(known) => known.unwrap_or_default(),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(%error, "which directories held manifests could not be read");
                }
                BTreeMap::new()
            }
        };
        Folders {
            known,
            file,
            doubts: true,
            ..Folders::default()
        }
    }

    /// Why an empty directory says nothing, if it does not.
    pub(super) fn doubt(&self, path: &Path, folder: &Folder) -> Option<String> {
        let why = match self.known.get(&absolute(path)) {
            Some(known) if known.held && known.folder != *folder => {
                "is another directory than before and holds no manifest"
            }
            None if self.doubts => "holds no manifest, and whether it ever did is not known",
            _ => return None,
        };
        Some(format!(
            "it {why}; if none is wanted, put an empty file there: none.yaml"
        ))
    }

    /// A directory was listed, and whether there are manifests.
    pub(super) fn note(&mut self, path: &Path, folder: Folder, held: bool) {
        let now = Known { folder, held };
        let path = absolute(path);
        if self.known.get(&path) != Some(&now) {
            self.known.insert(path, now);
            self.unwritten = true;
        }
    }

    /// Writes what is new.
    pub(super) fn keep(&mut self) {
        let Some(file) = self.file.as_ref().filter(|_| self.unwritten) else {
            return;
        };
        let text = serde_json::to_vec(&self.known).map_err(io::Error::from);
        match text.and_then(|text| replace(file, &text)) {
            Ok(()) => (self.unwritten, self.failed) = (false, false),
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    let file = file.display();
                    warn!(%file, %error, "which directories hold manifests could not be kept for a restart");
                }
            }
        }
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The manifests of a path, and which directory they are in, if it is one.
pub(super) fn list(path: &Path) -> std::io::Result<(Vec<PathBuf>, Option<Folder>)> {
    if path == Path::new("-") {
        return Ok((vec![path.to_owned()], None));
    }
    let folder = Folder::of(path)?;
    if folder.is_none() {
        return Ok((vec![path.to_owned()], None));
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let extension = Path::new(&name).extension().unwrap_or_default();
        let hidden = name.as_encoded_bytes().starts_with(b".");
        let wanted = ["yaml", "yml", "json"].iter().any(|e| extension == *e);
        // A link to nowhere stays in the list, so that its last good content stays in force.
        if !hidden && wanted && !entry.path().is_dir() {
            files.push(entry.path());
        }
    }
    // Listed was the one or the other.
    if Folder::of(path)? != folder {
        return Err(std::io::Error::other("it was replaced just now"));
    }
    Ok((files, folder))
}
