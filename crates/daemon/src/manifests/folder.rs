//! The files of a path.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A directory, by what tells it from another one that stands in its place: a mount, or one that was renamed there.
/// The time it was made tells apart what a file system mounted anew numbers alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Folder(u64, u64, Option<SystemTime>);

impl Folder {
    fn of(path: &Path) -> std::io::Result<Option<Folder>> {
        let m = std::fs::metadata(path)?;
        let folder = Folder(m.dev(), m.ino(), m.created().ok());
        Ok(m.is_dir().then_some(folder))
    }
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
