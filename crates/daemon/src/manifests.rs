//! Services, EndpointSlices and Nodes from manifests: files and directories of YAML or JSON.
//!
//! - [`read_file`] and [`read_text`] read one file: several documents, lists, JSON; other kinds
//!   are ignored. The first error of a file refuses the file.
//! - [`Source`] keeps what all files together say, reads what changed, and tells the difference.
//! - [`watch`] tells when it is worth looking again.
//! - [`follow`] does all of this on threads of its own, and tells what is new.

mod aside;
mod document;
mod folder;
mod follow;
mod kinds;
mod problem;
mod source;
mod watch;

use std::fmt;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

pub use follow::{News, follow};
pub use problem::Problem;
pub use source::Source;
pub use watch::{Busy, watch};

use crate::objects::{EndpointSlice, Metadata, Node, Service};
use document::split;

/// An object that the proxy reads.
#[derive(Debug, Clone, PartialEq)]
pub enum Object {
    /// A `v1` Service.
    Service(Box<Service>),
    /// A `discovery.k8s.io/v1` EndpointSlice.
    EndpointSlice(Box<EndpointSlice>),
    /// A `v1` Node.
    Node(Box<Node>),
}

impl Object {
    fn metadata(&self) -> &Metadata {
        match self {
            Object::Service(service) => &service.metadata,
            Object::EndpointSlice(slice) => &slice.metadata,
            Object::Node(node) => &node.metadata,
        }
    }
}

/// An object and where it was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// The line on which its document starts, from 1.
    pub line: usize,
    /// The object.
    pub object: Object,
}

/// How a text is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// YAML, any number of documents.
    Yaml,
    /// JSON, any number of values one after the other.
    Json,
}

/// Why a file can't be used. Displays as one line:
/// `app.yaml:12: Service default/app1: spec.ports[0].port: invalid value: "x", expected i32`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ManifestError {
    /// The file as it was named; `stdin` for `-`.
    pub file: String,
    /// The line, from 1, where the error has one.
    pub line: Option<usize>,
    /// Kind, namespace and name of the object, as far as they can be read.
    pub object: Option<String>,
    /// The path of the field.
    pub field: Option<String>,
    /// What is wrong.
    pub message: String,
    /// Only the named object is lost; without it, nobody knows what is.
    pub object_only: bool,
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        for part in [&self.object, &self.field].into_iter().flatten() {
            write!(f, ": {part}")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ManifestError {}

/// Reads a file, or standard input for `-`.
///
/// A name that ends in `.json` is JSON; any other text is JSON when it is valid JSON, and YAML
/// otherwise.
///
/// The objects that can be read, and an error for each thing that can't.
#[must_use]
pub fn read_file(path: &Path) -> (Vec<Placed>, Vec<ManifestError>) {
    parse(path, text_of(path))
}

fn parse(
    path: &Path,
    read: Result<(String, String), ManifestError>,
) -> (Vec<Placed>, Vec<ManifestError>) {
    let (file, text) = match read {
        Ok(read) => read,
        Err(error) => return (Vec::new(), vec![error]),
    };
    let format = if path.extension().is_some_and(|e| e == "json") || is_json(&text) {
        Format::Json
    } else {
        Format::Yaml
    };
    read_text(&file, &text, format)
}

/// The most that is read of a file: a cluster of 50,000 Services has a third of it.
const MAX_FILE_BYTES: u64 = 1 << 28;

/// The documents of a YAML text that have content, each with its first line's number.
pub(crate) fn yaml_documents(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let documents = split(text, Format::Yaml).into_iter();
    documents.map(|document| (document.line, document.text))
}

/// The text of a file, read as [`read_regular`] does.
pub(crate) fn read_text_file(path: &Path) -> std::io::Result<String> {
    let bytes = read_regular(path)?;
    String::from_utf8(bytes).map_err(|_| std::io::Error::other("it is not UTF-8"))
}

/// Reads a file that has an end, and waits for nobody: neither a FIFO nor a device.
pub(crate) fn read_regular(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut options = std::fs::OpenOptions::new();
    let nonblocking = nix::fcntl::OFlag::O_NONBLOCK.bits();
    let file = options.read(true).custom_flags(nonblocking).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(std::io::Error::other("it is not a regular file"));
    }
    // A length is no promise: files grow, and those of the kernel have none.
    if metadata.len() > MAX_FILE_BYTES {
        return Err(too_large());
    }
    read_bounded(file)
}

fn read_bounded(from: impl Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    match u64::try_from(bytes.len()) {
        Ok(..=MAX_FILE_BYTES) => Ok(bytes),
        _ => Err(too_large()),
    }
}

fn too_large() -> std::io::Error {
    let megabytes = MAX_FILE_BYTES >> 20;
    std::io::Error::other(format!("it is larger than {megabytes} MiB; split it"))
}

/// Text that may come from anybody, on one line and without control characters.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let odd =
                c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}');
            let escaped = odd.then(|| c.escape_default().collect::<Vec<char>>());
            escaped.unwrap_or_else(|| vec![c])
        })
        .collect()
}

/// The name of a file, and its content.
fn text_of(path: &Path) -> Result<(String, String), ManifestError> {
    let stdin = path == Path::new("-");
    let file = if stdin {
        "stdin".to_owned()
    } else {
        printable(&path.display().to_string())
    };
    let fail = |line: Option<usize>, message: String| ManifestError {
        file: file.clone(),
        line,
        object: None,
        field: None,
        message,
        object_only: false,
    };
    let read = match stdin {
        true => read_bounded(std::io::stdin().lock()),
        false => read_regular(path),
    };
    let bytes = read.map_err(|error| fail(None, format!("can't be read: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let good = error
            .as_bytes()
            .get(..error.utf8_error().valid_up_to())
            .unwrap_or_default();
        fail(Some(1 + newlines(good)), "is not UTF-8 text".to_owned())
    })?;
    Ok((file, text))
}

/// Reads a text; `file` is its name in errors. Kinds other than Service, EndpointSlice, Node and
/// lists of them are ignored.
///
/// The objects that can be read, and an error for each thing that can't.
#[must_use]
pub fn read_text(file: &str, text: &str, format: Format) -> (Vec<Placed>, Vec<ManifestError>) {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (mut placed, mut errors) = (Vec::new(), Vec::new());
    for document in split(text, format) {
        let line = document.line;
        let (objects, faults) = document.read();
        placed.extend(objects.into_iter().map(|object| Placed { line, object }));
        errors.extend(faults.into_iter().map(|fault| fault.in_file(file, line)));
    }
    (placed, errors)
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|b| **b == b'\n').count()
}

fn is_json(text: &str) -> bool {
    text.trim_start().starts_with('{')
        && split(text, Format::Json)
            .iter()
            .all(|document| document.syntax.is_ok())
}

#[cfg(test)]
mod tests;
