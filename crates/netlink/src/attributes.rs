//! Netlink attributes: `struct nlattr` of `<linux/netlink.h>`, a length, a kind and a value padded
//! to four bytes.

use netlink_packet_core::{NLA_F_NESTED, NLA_HEADER_SIZE, NLA_TYPE_MASK};

use crate::Error;

/// Writes attributes one behind the other.
///
/// A value that does not fit into an attribute is left out and makes [`Attributes::finish`] fail,
/// so that the single writes need no check.
#[derive(Debug, Clone, Default)]
pub struct Attributes {
    bytes: Vec<u8>,
    too_long: bool,
}

impl Attributes {
    /// No attribute.
    #[must_use]
    pub fn new() -> Attributes {
        Attributes::default()
    }

    /// Attributes behind a subsystem's own fixed header (`nfgenmsg`, `genlmsghdr`, …), whose
    /// length must be a multiple of four.
    #[must_use]
    pub fn after(header: &[u8]) -> Attributes {
        Attributes {
            bytes: header.to_vec(),
            too_long: false,
        }
    }

    /// The bytes written so far, the header included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing was written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes to send. [`Error::TooLong`] when a value or a nested attribute was too long.
    pub fn finish(self) -> Result<Vec<u8>, Error> {
        if self.too_long {
            return Err(Error::TooLong);
        }
        Ok(self.bytes)
    }

    /// Writes one byte.
    pub fn push_u8(&mut self, kind: u16, value: u8) {
        self.push_bytes(kind, &[value]);
    }

    /// Writes 16 bits in the machine's byte order.
    pub fn push_u16(&mut self, kind: u16, value: u16) {
        self.push_bytes(kind, &value.to_ne_bytes());
    }

    /// Writes 32 bits in the machine's byte order.
    pub fn push_u32(&mut self, kind: u16, value: u32) {
        self.push_bytes(kind, &value.to_ne_bytes());
    }

    /// Writes 64 bits in the machine's byte order.
    pub fn push_u64(&mut self, kind: u16, value: u64) {
        self.push_bytes(kind, &value.to_ne_bytes());
    }

    /// Writes 16 bits, most significant byte first. The kind goes out as it is given: add
    /// `NLA_F_NET_BYTEORDER` to it where the subsystem wants that flag (ipset does).
    pub fn push_u16_be(&mut self, kind: u16, value: u16) {
        self.push_bytes(kind, &value.to_be_bytes());
    }

    /// Writes 32 bits, most significant byte first; for the kind see [`Attributes::push_u16_be`].
    pub fn push_u32_be(&mut self, kind: u16, value: u32) {
        self.push_bytes(kind, &value.to_be_bytes());
    }

    /// Writes a text and a closing NUL.
    pub fn push_str(&mut self, kind: u16, value: &str) {
        let mut bytes = Vec::with_capacity(value.len() + 1);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
        self.push_bytes(kind, &bytes);
    }

    /// Writes an attribute without a value.
    pub fn push_flag(&mut self, kind: u16) {
        self.push_bytes(kind, &[]);
    }

    /// Writes bytes as they are.
    pub fn push_bytes(&mut self, kind: u16, value: &[u8]) {
        let Ok(length) = u16::try_from(NLA_HEADER_SIZE + value.len()) else {
            self.too_long = true;
            return;
        };
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Writes an attribute that holds the attributes written by `inner`, with `NLA_F_NESTED` set.
    pub fn nested(&mut self, kind: u16, inner: impl FnOnce(&mut Attributes)) {
        let start = self.bytes.len();
        self.push_flag(kind | NLA_F_NESTED);
        inner(self);
        match (
            u16::try_from(self.bytes.len() - start),
            self.bytes.get_mut(start..start + 2),
        ) {
            (Ok(length), Some(field)) => field.copy_from_slice(&length.to_ne_bytes()),
            _ => self.too_long = true,
        }
    }
}

/// One attribute of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// Its kind, without `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
    pub kind: u16,
    /// Its value, without padding.
    pub value: &'a [u8],
}

impl<'a> Attribute<'a> {
    fn array<const N: usize>(&self) -> Result<[u8; N], Error> {
        self.value
            .try_into()
            .map_err(|_| Error::Decode("attribute of an unexpected length"))
    }

    /// The value as one byte; [`Error::Decode`] when its length is not 1.
    pub fn u8(&self) -> Result<u8, Error> {
        self.array().map(u8::from_ne_bytes)
    }

    /// The value as 16 bits in the machine's byte order; [`Error::Decode`] when it is not 2 bytes.
    pub fn u16(&self) -> Result<u16, Error> {
        self.array().map(u16::from_ne_bytes)
    }

    /// The value as 32 bits in the machine's byte order; [`Error::Decode`] when it is not 4 bytes.
    pub fn u32(&self) -> Result<u32, Error> {
        self.array().map(u32::from_ne_bytes)
    }

    /// The value as 64 bits in the machine's byte order; [`Error::Decode`] when it is not 8 bytes.
    pub fn u64(&self) -> Result<u64, Error> {
        self.array().map(u64::from_ne_bytes)
    }

    /// The value as 16 bits, most significant byte first; [`Error::Decode`] when it is not 2 bytes.
    pub fn u16_be(&self) -> Result<u16, Error> {
        self.array().map(u16::from_be_bytes)
    }

    /// The value as 32 bits, most significant byte first; [`Error::Decode`] when it is not 4 bytes.
    pub fn u32_be(&self) -> Result<u32, Error> {
        self.array().map(u32::from_be_bytes)
    }

    /// The value as text up to the first NUL; [`Error::Decode`] when it is not UTF-8.
    pub fn str(&self) -> Result<&'a str, Error> {
        let text = self.value.split(|b| *b == 0).next().unwrap_or_default();
        std::str::from_utf8(text).map_err(|_| Error::Decode("text that is not UTF-8"))
    }

    /// The attributes within this one.
    #[must_use]
    pub fn nested(&self) -> AttributeIter<'a> {
        attributes(self.value)
    }
}

/// The attributes in `bytes`. An attribute that reaches past the end is an [`Error::Decode`] and
/// ends the iteration.
#[must_use]
pub fn attributes(bytes: &[u8]) -> AttributeIter<'_> {
    AttributeIter { rest: bytes }
}

/// The iterator that [`attributes()`] returns.
#[derive(Debug, Clone)]
pub struct AttributeIter<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for AttributeIter<'a> {
    type Item = Result<Attribute<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = std::mem::take(&mut self.rest);
        if bytes.is_empty() {
            return None;
        }
        let Some(([l0, l1, k0, k1], _)) = bytes.split_first_chunk::<4>() else {
            return Some(Err(Error::Decode("attribute header cut short")));
        };
        let length = usize::from(u16::from_ne_bytes([*l0, *l1]));
        let Some(value) = bytes.get(NLA_HEADER_SIZE..length) else {
            return Some(Err(Error::Decode("attribute length out of bounds")));
        };
        // The last attribute may come without its padding.
        self.rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        let kind = u16::from_ne_bytes([*k0, *k1]) & NLA_TYPE_MASK;
        Some(Ok(Attribute { kind, value }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_attributes_are_read_back() {
        let mut written = Attributes::after(&[1, 2, 3, 4]);
        written.push_u8(1, 7);
        written.push_u16(2, 0x1234);
        written.push_u16_be(3, 0x1234);
        written.nested(4, |inner| {
            inner.push_str(1, "wlc");
            inner.nested(2, |deep| deep.push_u64(1, u64::MAX));
            inner.push_flag(3);
        });
        written.push_u32_be(5 | netlink_packet_core::NLA_F_NET_BYTEORDER, 0x0102_0304);
        let bytes = written.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);

        let read: Vec<_> = attributes(&bytes[4..]).map(Result::unwrap).collect();
        assert_eq!(
            read.iter().map(|a| a.kind).collect::<Vec<_>>(),
            [1, 2, 3, 4, 5]
        );
        assert_eq!(read[0].u8(), Ok(7));
        assert_eq!(read[1].u16(), Ok(0x1234));
        assert_eq!(read[2].value, [0x12, 0x34]);
        assert_eq!(read[4].u32_be(), Ok(0x0102_0304));
        let inner: Vec<_> = read[3].nested().map(Result::unwrap).collect();
        assert_eq!(inner[0].str(), Ok("wlc"));
        assert_eq!(
            inner[1].nested().next().unwrap().unwrap().u64(),
            Ok(u64::MAX)
        );
        assert_eq!(inner[2].value, b"");
    }

    #[test]
    fn the_bytes_are_those_of_the_header() {
        let mut written = Attributes::new();
        written.nested(1, |inner| inner.push_u8(2, 9));
        let expected: &[u8] = if cfg!(target_endian = "little") {
            &[12, 0, 1, 0x80, 5, 0, 2, 0, 9, 0, 0, 0]
        } else {
            &[0, 12, 0x80, 1, 0, 5, 0, 2, 9, 0, 0, 0]
        };
        assert_eq!(written.finish().unwrap(), expected);
    }

    #[test]
    fn what_does_not_fit_fails_at_the_end() {
        let mut value = Attributes::new();
        value.push_bytes(1, &[0; 65_532]);
        assert_eq!(value.finish(), Err(Error::TooLong));
        let mut nested = Attributes::new();
        nested.nested(1, |inner| {
            (0..2).for_each(|_| inner.push_bytes(1, &[0; 40_000]))
        });
        assert_eq!(nested.finish(), Err(Error::TooLong));
    }

    #[test]
    fn broken_bytes_end_the_iteration() {
        for bytes in [
            &[1][..],
            &[3, 0, 0, 0],
            &[0, 0, 0, 0],
            &[9, 0, 0, 0, 1],
            &[8, 0, 1, 0, 1, 2],
        ] {
            let read: Vec<_> = attributes(bytes).collect();
            assert!(
                matches!(read[..], [Err(Error::Decode(_))]),
                "{bytes:?}: {read:?}"
            );
        }
        let short = Attribute {
            kind: 1,
            value: &[0xff],
        };
        assert!(short.u32().is_err() && short.str().is_err() && short.nested().next().is_some());
    }
}
