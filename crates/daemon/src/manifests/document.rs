//! Documents of a text: told apart, read, and what is wrong with them.

use serde::Deserialize;
use serde::de::{DeserializeSeed, IgnoredAny};
use serde_json::Value;
use serde_saphyr::options::DuplicateKeyPolicy;

use super::kinds::{Head, Kind, List};
use super::{Format, ManifestError, Object, newlines, printable};
use crate::api::in_a_line;
use crate::translate::object_name;

/// One document of a text.
pub(super) struct Document<'a> {
    /// Its first line in the file, from 1.
    pub(super) line: usize,
    pub(super) text: &'a str,
    pub(super) format: Format,
    /// The end of a JSON text is known only by parsing it.
    pub(super) syntax: Result<(), Fault>,
}

/// An error within a document; its line counts from the document's first.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    pub(super) line: Option<usize>,
    pub(super) object: Option<String>,
    pub(super) field: Option<String>,
    pub(super) message: String,
    /// Only this object is lost, the document's other objects are not.
    pub(super) object_only: bool,
}

impl Fault {
    pub(super) fn new(field: &str, message: impl Into<String>) -> Fault {
        let field = Some(field.to_owned()).filter(|field| !field.is_empty());
        Fault {
            line: None,
            object: None,
            field,
            message: message.into(),
            object_only: false,
        }
    }

    pub(super) fn of_object(self) -> Fault {
        Fault {
            object_only: true,
            ..self
        }
    }

    pub(super) fn in_file(self, file: &str, first_line: usize) -> ManifestError {
        ManifestError {
            file: file.to_owned(),
            line: Some(first_line + self.line.map_or(0, |line| line.saturating_sub(1))),
            object: self.object,
            field: self.field,
            // It may quote a value of any length.
            message: in_a_line(&self.message),
            object_only: self.object_only,
        }
    }
}

pub(super) fn split(text: &str, format: Format) -> Vec<Document<'_>> {
    match format {
        Format::Yaml => split_yaml(text),
        Format::Json => split_json(text),
    }
}

/// A line that starts with `---` or `...` is a document marker wherever it stands, also in block
/// scalars (`c-forbidden` of YAML 1.2), so documents can be told apart without a parser.
pub(super) fn split_yaml(text: &str) -> Vec<Document<'_>> {
    let mut starts = vec![(0, 1)];
    let mut at = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        if is_marker(line, "---") {
            starts.push((at, number + 1));
        } else if is_marker(line, "...") {
            starts.push((at + line.len(), number + 2));
        }
        at += line.len();
    }
    let ends = starts.iter().skip(1).map(|(at, _)| *at).chain([text.len()]);
    let parts = starts.iter().zip(ends).filter_map(|((at, line), end)| {
        let part = text.get(*at..end).filter(|part| has_content(part))?;
        Some(Document {
            line: *line,
            text: part,
            format: Format::Yaml,
            syntax: Ok(()),
        })
    });
    parts.collect()
}

pub(super) fn is_marker(line: &str, marker: &str) -> bool {
    line.strip_prefix(marker)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

pub(super) fn has_content(part: &str) -> bool {
    part.lines().any(|line| {
        let line = if is_marker(line, "---") {
            line.get(3..).unwrap_or_default()
        } else {
            line
        };
        let start = line.trim_start();
        !(start.is_empty() || start.starts_with('#') || line.starts_with('%'))
    })
}

pub(super) fn split_json(text: &str) -> Vec<Document<'_>> {
    let mut documents = Vec::new();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    let mut at = 0;
    let mut line = 1;
    while let Some(read) = values.next() {
        let end = if read.is_ok() {
            values.byte_offset()
        } else {
            text.len()
        };
        let part = text.get(at..end).unwrap_or_default();
        let value = part.trim_start();
        let before = part.get(..part.len() - value.len()).unwrap_or_default();
        line += newlines(before.as_bytes());
        let syntax = read.map(|_| ()).map_err(|error| {
            let mut fault = json_fault(&error);
            fault.line = fault.line.map(|number| (number + 1).saturating_sub(line));
            fault
        });
        let failed = syntax.is_err();
        documents.push(Document {
            line,
            text: value,
            format: Format::Json,
            syntax,
        });
        if failed {
            break;
        }
        line += newlines(value.as_bytes());
        at = end;
    }
    documents
}

/// A list is read again for each broken item; this bounds the work, and this many are always told.
pub(super) const MAX_REPEATED_BYTES: usize = 1 << 28;
pub(super) const MIN_FAULTS: usize = 20;

#[derive(Debug, Default, Deserialize)]
pub(super) struct ListHead {
    items: Option<Vec<Option<Head>>>,
}

/// What names an object; read only to make an error better.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Named {
    #[serde(default)]
    metadata: Name,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Name {
    namespace: Option<String>,
    name: Option<String>,
}

impl Document<'_> {
    /// The objects that can be read, and why others can't.
    pub(super) fn read(&self) -> (Vec<Object>, Vec<Fault>) {
        match self.kind() {
            Ok(None | Some(Kind::Ignored)) => (Vec::new(), Vec::new()),
            Ok(Some(Kind::List(of))) => self.read_list(of).unwrap_or_else(nothing_but),
            Ok(Some(kind)) => {
                let read = self
                    .parse_seed(kind)
                    .map_err(|fault| self.named(fault, kind));
                let object = read.and_then(|object| object.map(|o| checked(o, "")).transpose());
                match object {
                    Ok(object) => (Vec::from_iter(object), Vec::new()),
                    Err(fault) => nothing_but(fault.of_object()),
                }
            }
            Err(fault) => nothing_but(fault),
        }
    }

    /// The kind of the document's object; none of an empty document.
    fn kind(&self) -> Result<Option<Kind>, Fault> {
        self.syntax.clone()?;
        if let Some(kind) = self.plain_head().and_then(|head| Kind::of(&head).ok())
            && kind != Kind::Ignored
        {
            return Ok(Some(kind));
        }
        self.parse::<Option<Head>>()?
            .map(|head| Kind::of(&head))
            .transpose()
    }

    /// What a document in plain block style says about its kind, without a parser, which takes
    /// as long for this as for the whole object. `None` in all cases that are not plain.
    fn plain_head(&self) -> Option<Head> {
        if self.format != Format::Yaml {
            return None;
        }
        let mut head = Head::default();
        for line in self.text.lines() {
            let field = match line.split_once(':') {
                Some(("kind", value)) => Some((&mut head.kind, value)),
                Some(("apiVersion", value)) => Some((&mut head.api_version, value)),
                // A key, a nested line, an item or a comment: nothing else starts a line here.
                _ if line.starts_with(|c: char| c.is_ascii_alphabetic() || " #-".contains(c)) => {
                    None
                }
                _ if line.trim().is_empty() => None,
                _ => return None,
            };
            if let Some((field, value)) = field {
                let value = value.trim();
                let word = |b: u8| b.is_ascii_alphanumeric() || b == b'.' || b == b'/';
                if field.is_some() || value.is_empty() || !value.bytes().all(word) {
                    return None;
                }
                *field = Some(value.to_owned());
            }
        }
        Some(head).filter(|head| head.kind.is_some() && head.api_version.is_some())
    }

    fn read_list(&self, of: Option<&'static str>) -> Result<(Vec<Object>, Vec<Fault>), Fault> {
        let heads = match self.parse::<ListHead>() {
            Ok(list) => list.items.unwrap_or_default(),
            Err(fault) => return self.read_items(of, fault),
        };
        let mut kinds = Vec::with_capacity(heads.len());
        let mut faults = Vec::new();
        for (i, head) in heads.into_iter().enumerate() {
            let kind = match head {
                Some(head) => Kind::of_item(head, of).map_err(|fault| fault.within(&item(i))),
                None => Err(Fault::new(item(i).trim_end_matches('.'), "is null").of_object()),
            };
            kinds.push(kind.unwrap_or_else(|fault| {
                faults.push(fault);
                Kind::Ignored
            }));
        }
        let most = (MAX_REPEATED_BYTES / self.text.len().max(1)).max(MIN_FAULTS);
        // The parser ends at the first item that can't be read: leave that one out and go on.
        loop {
            match self.parse_seed(List(&kinds)) {
                Ok(objects) => {
                    let items = objects.into_iter().enumerate();
                    let checked = items.filter_map(|(i, o)| o.map(|o| checked(o, &item(i))));
                    let (good, bad): (Vec<_>, Vec<_>) = checked.partition(Result::is_ok);
                    faults.extend(
                        bad.into_iter()
                            .filter_map(Result::err)
                            .map(Fault::of_object),
                    );
                    return Ok((good.into_iter().flatten().collect(), faults));
                }
                Err(fault) => {
                    let at = fault.item().filter(|_| faults.len() < most);
                    let mut fault = self.named_item(fault, &kinds);
                    match at.and_then(|i| kinds.get_mut(i)) {
                        Some(kind) if *kind != Kind::Ignored => *kind = Kind::Ignored,
                        _ => {
                            if faults.len() >= most {
                                fault
                                    .message
                                    .push_str("; so many are broken that none is used");
                            }
                            faults.push(fault);
                            return Ok((Vec::new(), faults));
                        }
                    }
                    faults.push(fault.of_object());
                }
            }
        }
    }

    /// A list of which an item is no object, or has a key twice, so that no parser goes past it: item
    /// by item, by a tree in which the last of equal keys counts.
    fn read_items(
        &self,
        of: Option<&'static str>,
        fault: Fault,
    ) -> Result<(Vec<Object>, Vec<Fault>), Fault> {
        let Some(broken) = fault.item() else {
            return Err(fault);
        };
        let Ok(Value::Object(mut tree)) = self.tree() else {
            return Err(fault);
        };
        let Some(Value::Array(items)) = tree.remove("items") else {
            return Err(fault);
        };
        let mut objects = Vec::new();
        let mut faults = vec![fault.of_object()];
        for (i, value) in items.into_iter().enumerate() {
            if i == broken {
                continue;
            }
            let read = match Head::deserialize(&value) {
                Ok(head) => Kind::of_item(head, of)
                    .map_err(|fault| fault.within(&item(i)))
                    .and_then(|kind| read_item(kind, value)),
                Err(error) => Err(Fault::new(item(i).trim_end_matches('.'), error.to_string())),
            };
            match read.and_then(|object| object.map(|o| checked(o, &item(i))).transpose()) {
                Ok(object) => objects.extend(object),
                Err(fault) => faults.push(fault.of_object()),
            }
        }
        Ok((objects, faults))
    }

    fn tree(&self) -> Result<Value, Fault> {
        match self.format {
            Format::Yaml => {
                let mut options = yaml_options();
                options.duplicate_keys = DuplicateKeyPolicy::LastWins;
                // A name such as `y` is one, although nothing says here that a name is wanted.
                options.strict_booleans = true;
                serde_saphyr::from_str_with_options(self.text, options)
                    .map_err(|error| yaml_fault(&error, self.text))
            }
            Format::Json => serde_json::from_str(self.text).map_err(|error| json_fault(&error)),
        }
    }

    fn parse<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Fault> {
        self.parse_seed(std::marker::PhantomData)
    }

    fn parse_seed<'a, S: DeserializeSeed<'a> + Copy>(&'a self, seed: S) -> Result<S::Value, Fault> {
        self.parse_at(seed, None).or_else(|_| {
            // To note where in the object the parser is takes time on every key: only for errors.
            let mut track = serde_path_to_error::Track::new();
            let parsed = self.parse_at(seed, Some(&mut track));
            parsed.map_err(|mut fault| {
                let path = track.path();
                fault.field = (path.iter().len() > 0).then(|| path.to_string());
                fault
            })
        })
    }

    fn parse_at<'a, S: DeserializeSeed<'a>>(
        &'a self,
        seed: S,
        track: Option<&mut serde_path_to_error::Track>,
    ) -> Result<S::Value, Fault> {
        use serde_path_to_error::Deserializer as Tracking;
        match self.format {
            Format::Yaml => serde_saphyr::with_deserializer_from_str_with_options(
                self.text,
                yaml_options(),
                |de| match track {
                    Some(track) => seed.deserialize(Tracking::new(de, track)),
                    None => seed.deserialize(de),
                },
            )
            .map_err(|error| yaml_fault(&error, self.text)),
            Format::Json => {
                let mut de = serde_json::Deserializer::from_str(self.text);
                let parsed = match track {
                    Some(track) => seed.deserialize(Tracking::new(&mut de, track)),
                    None => seed.deserialize(&mut de),
                };
                parsed.map_err(|error| json_fault(&error))
            }
        }
    }

    /// Adds the name of the object, if it can be read at all.
    fn named(&self, mut fault: Fault, kind: Kind) -> Fault {
        let named = self.parse::<Named>().unwrap_or_default();
        fault.object = kind.name().map(|kind| describe(kind, &named.metadata));
        fault
    }

    /// Adds the name of the item that the error is in, and cuts the item from the field.
    fn named_item(&self, mut fault: Fault, kinds: &[Kind]) -> Fault {
        #[derive(Default, Deserialize)]
        struct NamedItems {
            items: Vec<Named>,
        }
        let Some(path) = fault.field.clone() else {
            return fault;
        };
        let (Some(index), Some((_, field))) = (fault.item(), path.split_once("].")) else {
            return fault;
        };
        let named = self.parse::<NamedItems>().unwrap_or_default();
        let metadata = named
            .items
            .into_iter()
            .nth(index)
            .unwrap_or_default()
            .metadata;
        if let Some(kind) = kinds.get(index).and_then(|kind| kind.name()) {
            fault.object = Some(describe(kind, &metadata));
            fault.field = Some(field.to_owned());
        }
        fault
    }
}

fn read_item(kind: Kind, value: Value) -> Result<Option<Object>, Fault> {
    let named = Named::deserialize(&value).unwrap_or_default();
    let mut track = serde_path_to_error::Track::new();
    let read = kind.deserialize(serde_path_to_error::Deserializer::new(value, &mut track));
    read.map_err(|error| {
        let mut fault = Fault::new(&track.path().to_string(), error.to_string());
        fault.object = kind.name().map(|kind| describe(kind, &named.metadata));
        fault
    })
}

pub(super) fn nothing_but(fault: Fault) -> (Vec<Object>, Vec<Fault>) {
    (Vec::new(), vec![fault])
}

impl Fault {
    /// The number of the list's item that the error is in.
    pub(super) fn item(&self) -> Option<usize> {
        let (index, _) = self
            .field
            .as_deref()?
            .strip_prefix("items[")?
            .split_once(']')?;
        index.parse().ok()
    }

    pub(super) fn within(mut self, outer: &str) -> Fault {
        self.field = self.field.map(|field| format!("{outer}{field}"));
        self
    }
}

pub(super) fn item(index: usize) -> String {
    format!("items[{index}].")
}

pub(super) fn describe(kind: &str, metadata: &Name) -> String {
    printable(&described(kind, metadata))
}

pub(super) fn described(kind: &str, metadata: &Name) -> String {
    match object_name(metadata.namespace.as_deref(), metadata.name.as_deref()) {
        name if name.name.is_empty() => kind.to_owned(),
        name if kind == "Node" => format!("{kind} {}", name.name),
        name => format!("{kind} {name}"),
    }
}

/// Without a name nothing can be told from anything else.
pub(super) fn checked(object: Object, outer: &str) -> Result<Object, Fault> {
    let kind = match object {
        Object::Service(_) => "Service",
        Object::EndpointSlice(_) => "EndpointSlice",
        Object::Node(_) => "Node",
    };
    let metadata = object.metadata();
    let refused = |field: &str, message: String| {
        let mut fault = Fault::new(&format!("{outer}metadata.{field}"), message);
        fault.object = Some(kind.to_owned());
        fault
    };
    let name = metadata.name.as_deref().unwrap_or_default();
    if name.is_empty() {
        return Err(refused("name", "is missing".to_owned()));
    }
    // Names end up in logs, and a name as the API server takes it is harmless there.
    for (field, name) in [
        ("name", name),
        (
            "namespace",
            metadata.namespace.as_deref().unwrap_or_default(),
        ),
    ] {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if name.len() > 253 || !name.chars().all(plain) {
            let shown: String = name.chars().take(60).collect();
            let message =
                format!("{shown:?} is not a name of up to 253 letters, digits, '-' and '.'");
            return Err(refused(field, message));
        }
    }
    Ok(object)
}

pub(super) fn yaml_fault(error: &serde_saphyr::Error, text: &str) -> Fault {
    use serde_saphyr::{Error, MessageFormatter as _};
    let line = error
        .location()
        .and_then(|at| usize::try_from(at.line()).ok());
    let error = error.without_snippet();
    let message = match error {
        // The parser's own words leave out the value.
        Error::InvalidScalar { ty, location } => {
            let span = location.span();
            let start = span.byte_offset().and_then(|at| usize::try_from(at).ok());
            let length = span
                .byte_len()
                .and_then(|length| usize::try_from(length).ok());
            let value = start
                .zip(length)
                .and_then(|(at, length)| text.get(at..at + length));
            format!(
                "invalid value: {:?}, expected {ty}",
                value.unwrap_or_default()
            )
        }
        Error::DuplicateMappingKey { key: Some(key), .. } => format!("{key:?} is there twice"),
        other => one_line(&serde_saphyr::DefaultMessageFormatter.format_message(other)),
    };
    Fault {
        line,
        ..Fault::new("", message)
    }
}

pub(super) fn json_fault(error: &serde_json::Error) -> Fault {
    let text = error.to_string();
    let message = text
        .rsplit_once(" at line ")
        .map_or(text.as_str(), |(message, _)| message);
    Fault {
        line: Some(error.line()),
        ..Fault::new("", one_line(message))
    }
}

pub(super) fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A whole cluster may stand in one document, so size is no limit; what aliases may blow up is. `014` is 12, as for kubectl.
pub(super) fn yaml_options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        with_snippet: false,
        legacy_octal_numbers: true,
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 250_000 },
    }
}
