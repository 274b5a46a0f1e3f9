//! The folder under /run of the daemon of this network namespace.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

const RUN: &str = "/run/ipvs-proxy";

/// The folder, one for each network namespace: `/run/ipvs-proxy/net-NUMBER`.
#[derive(Debug, Clone)]
pub struct Place {
    folder: PathBuf,
}

/// Held while a daemon, or a cleanup, works on the kernel of this network namespace.
#[derive(Debug)]
pub struct Alone {
    _file: Flock<File>,
}

impl Place {
    /// The folder of this process's network namespace. Makes it.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn here() -> Result<Place> {
        let namespace = fs::metadata("/proc/self/ns/net").context("which network namespace?")?;
        let folder = Path::new(RUN).join(format!("net-{}", namespace.ino()));
        fs::create_dir_all(&folder)
            .with_context(|| format!("{} can't be made", folder.display()))?;
        Ok(Place { folder })
    }

    /// A file in it.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Takes the folder's lock, and writes this process's id into it. The kernel gives it back
    /// when the process ends, however that happens.
    ///
    /// # Errors
    /// [`LockError::Taken`] when another process has it, [`LockError::File`] when there can be none.
    pub fn lock(&self) -> Result<Alone, LockError> {
        let path = self.file("pid");
        let cannot = |source: io::Error| LockError::File {
            path: path.clone(),
            source,
        };
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        match Flock::lock(file.map_err(cannot)?, FlockArg::LockExclusiveNonblock) {
            Ok(mut file) => {
                file.set_len(0).map_err(cannot)?;
                writeln!(&mut *file, "{}\n{}", std::process::id(), namespace()).map_err(cannot)?;
                Ok(Alone { _file: file })
            }
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut said = String::new();
                file.read_to_string(&mut said).map_err(cannot)?;
                let mut words = said.lines();
                let pid = words.next().unwrap_or_default();
                // The number says nothing in another container, or out of one.
                Err(LockError::Taken(match words.next() == Some(&namespace()) {
                    true => format!("with process id {pid}: stop it first"),
                    false => {
                        "in a container: stop that first (the pod of its DaemonSet)".to_owned()
                    }
                }))
            }
            Err((_, errno)) => Err(cannot(errno.into())),
        }
    }
}

/// Replaces a file's content in one step, and makes its folder.
///
/// # Errors
/// When it can't be written.
pub(crate) fn replace(file: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = file.with_extension("new");
    fs::write(&new, content)?;
    fs::rename(new, file)
}

/// What names the namespace of this process's number.
fn namespace() -> String {
    let link = fs::read_link("/proc/self/ns/pid");
    link.map_or_else(|_| String::new(), |link| link.display().to_string())
}

/// Why the lock can't be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it: which, and what to do.
    #[error("an ipvs-proxy runs here {0}")]
    Taken(String),
    /// There can be no lock.
    #[error("{} can't be used", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}
