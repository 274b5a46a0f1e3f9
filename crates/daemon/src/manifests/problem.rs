//! What is told of manifests.

use std::fmt;
use std::path::PathBuf;

use super::{ManifestError, printable};
use crate::translate::Refusal;

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
