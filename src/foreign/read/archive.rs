//! Zip archives, as numpy and torch write them: what is stored is used where it lies, what is packed is unpacked into a
//! file without a name.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use zip::{CompressionMethod, ZipArchive};

use crate::error::{Error, Result};
use crate::foreign::array::Bytes;

/// How every zip archive with something in it begins.
pub const MAGIC: &[u8] = b"PK\x03\x04";

/// Entries of an archive: some tensors a layer, of every model.
const ENTRIES_MAX: usize = 1 << 17;

/// Bytes that one byte of deflated data can become at most: 258 of a match that takes two bits.
const EXPANSION_MAX: u64 = 258 * 8 / 2;

/// An archive.
pub struct Archive {
    map: Arc<Mmap>,
    zip: ZipArchive<File>,
    /// Names of the entries.
    pub names: Vec<String>,
}

impl Archive {
    /// Opens one.
    ///
    /// # Errors
    /// What is no archive, or has more entries than any dump.
    pub fn open(path: &Path) -> Result<Archive> {
        let wrong = |what: String| {
            Error::file(path, "is no archive that can be read")
                .expected("a zip archive as numpy.savez and torch.save write it")
                .found(what)
                .hint("a file that was not written to its end has no list of entries: save it again")
        };
        let file = parity_dump::open_regular(path, "cannot be opened")?;
        let map = map(&file).map_err(|e| wrong(e.to_string()))?;
        let zip = ZipArchive::new(file).map_err(|e| wrong(e.to_string()))?;
        if zip.len() > ENTRIES_MAX {
            return Err(wrong(format!("{} entries", zip.len())));
        }
        let names = zip.file_names().filter_map(|name| Some(name.ok()?.into_owned())).collect();
        Ok(Archive { map, zip, names })
    }

    /// The bytes of an entry, and where among them it begins.
    ///
    /// # Errors
    /// An entry that is missing, damaged, or packed in a way that nobody uses for arrays.
    pub fn entry(&mut self, name: &str) -> Result<(Bytes, std::ops::Range<usize>)> {
        let wrong = |what: String| Error::new(name, "cannot be taken out of its archive").found(what);
        let mut entry = self.zip.by_name(name).map_err(|e| wrong(e.to_string()))?;
        let size = entry.size();
        if entry.compression() == CompressionMethod::Stored {
            let start = entry.data_start().ok_or_else(|| wrong("no beginning".to_owned()))?;
            let end = start.checked_add(size).filter(|end| *end <= self.map.len() as u64);
            let end = end.ok_or_else(|| wrong(format!("{size} bytes, beyond the end of the file")))?;
            return Ok((Bytes::Mapped(Arc::clone(&self.map)), start as usize..end as usize));
        }
        if size > entry.compressed_size().saturating_mul(EXPANSION_MAX) {
            return Err(wrong(format!("{size} bytes in {}", entry.compressed_size())));
        }
        let unpacked = (|| -> std::io::Result<Mmap> {
            let mut file = tempfile::tempfile()?;
            std::io::copy(&mut entry.by_ref().take(size), &mut file)?;
            file.flush()?;
            // SAFETY: the file has no name, so nobody else can change it.
            unsafe { Mmap::map(&file) }
        })();
        let unpacked = unpacked.map_err(|e| wrong(e.to_string()))?;
        let length = unpacked.len();
        Ok((Bytes::Mapped(Arc::new(unpacked)), 0..length))
    }
}

/// Maps a file that is read.
pub fn map(file: &File) -> std::io::Result<Arc<Mmap>> {
    // SAFETY: the map is read-only; a file that another process truncates meanwhile is outside what any reader of
    // mapped files can guard against.
    unsafe { Mmap::map(file) }.map(Arc::new)
}
