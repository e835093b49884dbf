//! Bytes that are read at places which the bytes themselves name.

use crate::{Result, Unreadable};

/// The longest name that is read: no function of C has a longer one, and bytes are not walked over again and again.
const LONGEST_NAME: usize = 1 << 10;

/// What is said of a file that ends before something that it names.
const SHORT: Unreadable = Unreadable("it names bytes that it does not have");

/// A file, or a part of one.
#[derive(Clone, Copy)]
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    /// How many there are.
    pub fn len(self) -> u64 {
        self.0.len() as u64
    }

    /// So many from there on.
    pub fn part(self, at: u64, length: u64) -> Result<Bytes<'a>> {
        let end = at.checked_add(length).ok_or(SHORT)?;
        let range = usize::try_from(at).map_err(|_| SHORT)?..usize::try_from(end).map_err(|_| SHORT)?;
        self.0.get(range).map(Bytes).ok_or(SHORT)
    }

    /// All from there on.
    pub fn from(self, at: u64) -> Result<Bytes<'a>> {
        self.part(at, self.len().checked_sub(at).ok_or(SHORT)?)
    }

    fn array<const N: usize>(self, at: u64) -> Result<[u8; N]> {
        self.part(at, N as u64)?.0.try_into().map_err(|_| SHORT)
    }

    /// A number of one byte.
    pub fn u8(self, at: u64) -> Result<u8> {
        self.array(at).map(u8::from_le_bytes)
    }

    /// A number of two bytes, least first.
    pub fn u16(self, at: u64) -> Result<u16> {
        self.array(at).map(u16::from_le_bytes)
    }

    /// A number of four bytes, least first.
    pub fn u32(self, at: u64) -> Result<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    /// A number of four bytes, least last.
    pub fn u32_big(self, at: u64) -> Result<u32> {
        self.array(at).map(u32::from_be_bytes)
    }

    /// A number of eight bytes, least first.
    pub fn u64(self, at: u64) -> Result<u64> {
        self.array(at).map(u64::from_le_bytes)
    }

    /// The name that ends with a zero; `None` where it does not end, or is no text.
    pub fn name(self, at: u64) -> Option<&'a str> {
        let start = self.0.get(usize::try_from(at).ok()?..)?;
        let near = &start[..start.len().min(LONGEST_NAME)];
        let end = near.iter().position(|&byte| byte == 0)?;
        std::str::from_utf8(&near[..end]).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_that_is_not_there() {
        let bytes = Bytes(b"\x01\x02\x03\x04ab\0c");
        assert_eq!(bytes.u16(0).unwrap(), 0x0201);
        assert_eq!(bytes.u32(0).unwrap(), 0x0403_0201);
        assert_eq!(bytes.u32_big(0).unwrap(), 0x0102_0304);
        assert_eq!(bytes.name(4), Some("ab"));
        assert_eq!((bytes.name(7), bytes.name(8), bytes.name(9)), (None, None, None));
        assert!(bytes.u64(1).is_err() && bytes.u8(8).is_err() && bytes.from(9).is_err());
        assert!(bytes.part(u64::MAX, 2).is_err() && bytes.part(2, u64::MAX).is_err());
        assert_eq!(bytes.from(8).unwrap().len(), 0);
    }
}
