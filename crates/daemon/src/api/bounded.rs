//! Answers of the API server, and how much of one is taken into memory.

use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use tower::BoxError;

/// The longest line of a watch, which is one object: etcd takes 1.5 MiB, unless told otherwise.
const MAX_LINE_BYTES: usize = 16 << 20;
/// The longest other answer: a page of 500 EndpointSlices of 1,000 endpoints has two thirds of it.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// What is too long to be read.
#[derive(Debug, thiserror::Error)]
#[error("the API server sends {what} longer than {} MiB", most >> 20)]
pub(super) struct TooLong {
    what: &'static str,
    most: usize,
}

/// The body of an answer that ends with an error when it gets too long. Holds on to `with` until it was read.
#[derive(Debug)]
pub(super) struct Bounded<W> {
    body: UnsyncBoxBody<Bytes, BoxError>,
    watch: bool,
    /// Bytes of the line, or of the whole.
    length: usize,
    _with: W,
}

impl<W> Bounded<W> {
    pub(super) fn new(body: UnsyncBoxBody<Bytes, BoxError>, watch: bool, with: W) -> Bounded<W> {
        Bounded {
            body,
            watch,
            length: 0,
            _with: with,
        }
    }

    fn take(&mut self, bytes: &Bytes) -> Result<(), TooLong> {
        let (what, most) = match self.watch {
            true => ("an event", MAX_LINE_BYTES),
            false => ("an answer", MAX_ANSWER_BYTES),
        };
        // Whatever is in one chunk is in memory already.
        let end = |bytes: &Bytes| bytes.iter().rposition(|byte| *byte == b'\n');
        let last = if self.watch { end(bytes) } else { None };
        self.length = match last {
            Some(at) => bytes.len() - at - 1,
            None => self.length + bytes.len(),
        };
        match self.length > most {
            true => Err(TooLong { what, most }),
            false => Ok(()),
        }
    }
}

impl<W: Unpin> Body for Bounded<W> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        let taken = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(Ok(()), |bytes| self.take(bytes)),
            _ => Ok(()),
        };
        Poll::Ready(match taken {
            Ok(()) => frame,
            Err(error) => Some(Err(error.into())),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, StreamBody};

    use super::*;

    /// What is read of chunks of these lengths, each with a line's end after it or not.
    async fn read(watch: bool, chunks: &[(usize, bool)]) -> Result<usize, String> {
        let frames = chunks.iter().map(|(length, end)| {
            let end: &[u8] = if *end { b"\n" } else { b"" };
            let bytes = [&b"x".repeat(*length)[..], end].concat();
            Ok::<_, BoxError>(Frame::data(Bytes::from(bytes)))
        });
        let frames = futures::stream::iter(frames.collect::<Vec<_>>());
        let body = Bounded::new(StreamBody::new(frames).boxed_unsync(), watch, ());
        let read = body.collect().await.map_err(|error| error.to_string());
        Ok(read?.to_bytes().len())
    }

    #[tokio::test]
    async fn a_line_of_a_watch_has_an_end() {
        let mega = 1 << 20;
        let long = Err("the API server sends an event longer than 16 MiB".to_owned());
        let lines = [(10 * mega, true); 2];
        assert_eq!(read(true, &lines).await, Ok(20 * mega + 2));
        assert_eq!(read(true, &[(9 * mega, false); 2]).await, long);
        assert_eq!(read(true, &[(16 * mega, false), (1, false)]).await, long);
        assert_eq!(read(false, &[(9 * mega, false); 2]).await, Ok(18 * mega));
        let long = Err("the API server sends an answer longer than 256 MiB".to_owned());
        assert_eq!(read(false, &[(60 * mega, true); 5]).await, long);
    }
}
