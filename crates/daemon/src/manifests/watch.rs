//! Tells when manifests may have changed.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tracing::warn;

use super::printable;

/// Editors and kubelet change several names at a time; one look afterwards is enough.
const SETTLE: Duration = Duration::from_millis(20);
/// How often it is checked that a watch still watches what its path names.
const CHECK_MS: u16 = 1000;

/// A directory, and the watch on what its path named last.
struct Watched {
    path: PathBuf,
    on: Option<(WatchDescriptor, Identity)>,
    /// Why what is there can't be watched, as told.
    failed: Option<Errno>,
}

type Identity = (u64, u64);

/// The files that somebody has begun to write and not closed yet.
#[derive(Debug, Clone, Default)]
pub struct Busy(Arc<Mutex<BTreeSet<PathBuf>>>);

impl Busy {
    /// Whether somebody is writing that file.
    #[must_use]
    pub fn contains(&self, file: &Path) -> bool {
        self.0.lock().is_ok_and(|files| files.contains(file))
    }

    fn set(&self, file: PathBuf, writing: bool) {
        if let Ok(mut files) = self.0.lock() {
            if writing {
                files.insert(file);
            } else {
                files.remove(&file);
            }
        }
    }
}

/// Watches directories, and the directories of files, on a thread of its own (`inotify(7)`). A
/// tick says that something may have changed since the last: time for
/// [`rescan`](super::Source::rescan). None is sent while one waits.
///
/// A directory that is replaced, unmounted, or reached by a symbolic link that was pointed
/// elsewhere, is watched anew within a second; while a path can't be watched there is a tick
/// each second. Changes behind symbolic links within a directory are not seen, other than by the
/// swap of `..data` that kubelet does with ConfigMaps. The thread ends some time after the
/// receiver is dropped.
///
/// # Errors
///
/// When the kernel gives no inotify instance (`EMFILE`) or the thread can't be started.
/// A directory that can't be watched (`ENOSPC`) is no error: it is logged, and the directory looked at each second.
pub fn watch(paths: &[PathBuf], ticks: SyncSender<()>) -> std::io::Result<Busy> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(limit)?;
    let busy = Busy::default();
    let writing = busy.clone();
    let stdin = Path::new("-");
    let mut watched: Vec<_> = paths
        .iter()
        .filter(|p| *p != stdin)
        .map(|p| Watched {
            path: directory(p),
            on: None,
            failed: None,
        })
        .collect();
    for entry in &mut watched {
        entry.check(&inotify);
    }
    std::thread::Builder::new()
        .name("manifests-watch".to_owned())
        .spawn(move || run(&inotify, &mut watched, &ticks, &writing))?;
    Ok(busy)
}

/// An error of inotify, with the limit that it speaks of (`inotify(7)`).
fn limit(errno: Errno) -> std::io::Error {
    let raise = match errno {
        Errno::EMFILE => {
            "raise the sysctl fs.inotify.max_user_instances or the limit of open files"
        }
        Errno::ENFILE => "raise the sysctl fs.file-max",
        Errno::ENOSPC => "raise the sysctl fs.inotify.max_user_watches",
        other => return other.into(),
    };
    std::io::Error::other(format!("inotify: {errno}; {raise}"))
}

/// The directory to watch for a path: itself, or where the file is.
fn directory(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if path.is_file() && parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) if path.is_file() => parent.to_owned(),
        _ => path.to_owned(),
    }
}

fn run(inotify: &Inotify, watched: &mut [Watched], sender: &SyncSender<()>, busy: &Busy) {
    loop {
        let mut fds = [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)];
        let mut changed = match poll(&mut fds, PollTimeout::from(CHECK_MS)) {
            Ok(0) | Err(Errno::EINTR) => false,
            Ok(_) => {
                std::thread::sleep(SETTLE);
                drain(inotify, watched, busy)
            }
            Err(_) => {
                // No event will come any more; the check below goes on by the clock.
                std::thread::sleep(Duration::from_millis(CHECK_MS.into()));
                true
            }
        };
        for entry in watched.iter_mut() {
            changed |= entry.check(inotify);
        }
        if changed && sender.try_send(()) == Err(TrySendError::Disconnected(())) {
            return;
        }
    }
}

/// Takes all events; whether there were any that are worth a look.
fn drain(inotify: &Inotify, watched: &mut [Watched], busy: &Busy) -> bool {
    let mut any = false;
    while let Ok(events) = inotify.read_events() {
        for event in &events {
            let writing = event.mask.contains(AddWatchFlags::IN_MODIFY);
            any |= !writing;
            let of_event = |w: &&Watched| w.on.is_some_and(|(on, _)| on == event.wd);
            if let (Some(folder), Some(name)) = (watched.iter().find(of_event), &event.name) {
                let ends = AddWatchFlags::IN_CLOSE_WRITE
                    | AddWatchFlags::IN_DELETE
                    | AddWatchFlags::IN_MOVED_FROM
                    | AddWatchFlags::IN_MOVED_TO;
                if writing || event.mask.intersects(ends) {
                    busy.set(folder.path.join(name), writing);
                }
            }
        }
        let gone = events
            .iter()
            .filter(|event| event.mask.contains(AddWatchFlags::IN_IGNORED));
        for event in gone {
            for entry in watched.iter_mut() {
                entry.on.take_if(|(descriptor, _)| *descriptor == event.wd);
            }
        }
    }
    any
}

impl Watched {
    /// Makes the watch watch what the path names now. Whether it is worth a look.
    fn check(&mut self, inotify: &Inotify) -> bool {
        let now = std::fs::metadata(&self.path)
            .ok()
            .map(|m| (m.dev(), m.ino()));
        match (&self.on, now) {
            (Some((_, identity)), Some(now)) if *identity == now => return false,
            (Some((descriptor, _)), _) => {
                // It may be gone already, which is as good.
                let _ = inotify.rm_watch(*descriptor);
                self.on = None;
            }
            (None, _) => {}
        }
        let events = AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_ONLYDIR;
        let Some(now) = now else { return true };
        match inotify.add_watch(&self.path, events) {
            Ok(descriptor) => {
                self.on = Some((descriptor, now));
                self.failed = None;
            }
            Err(errno) => {
                if self.failed.replace(errno) != Some(errno) {
                    let path = printable(&self.path.display().to_string());
                    let error = limit(errno);
                    warn!(%path, %error, "can't be watched; is looked at each second");
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_by_its_sysctl() {
        for (errno, sysctl) in [
            (Errno::EMFILE, "fs.inotify.max_user_instances"),
            (Errno::ENOSPC, "fs.inotify.max_user_watches"),
        ] {
            let error = limit(errno).to_string();
            assert!(error.contains(sysctl), "{error}");
            assert!(error.contains(&errno.to_string()), "{error}");
        }
    }
}
