//! Files that people and programs of theirs wrote, read within limits.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};

/// Bytes of a text that a person or a program of theirs wrote: prompts, suites, maps of names, tolerances.
pub const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Reads a text file of at most `limit` bytes. Devices and pipes have no end that could be waited for.
///
/// # Errors
/// No regular file, too many bytes, no UTF-8, or the system's.
pub fn read(path: &Path, limit: u64) -> Result<String> {
    let failed = |e: std::io::Error| Error::file(path, format!("cannot be read: {e}"));
    let meta = std::fs::metadata(path).map_err(failed)?;
    if !meta.is_file() {
        return Err(Error::file(path, "cannot be read")
            .expected("a regular file")
            .found("something else")
            .hint("a text from a pipe can be written to a file first"));
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(limit.saturating_add(1)).read_to_end(&mut bytes))
        .map_err(failed)?;
    if !(bytes.len() as u64 <= limit) {
        return Err(Error::file(path, "is too large for a text that is read at once")
            .expected(format!("at most {limit} bytes"))
            .found(format!("{} bytes", meta.len().max(bytes.len() as u64))));
    }
    String::from_utf8(bytes).map_err(|e| {
        Error::file(path, "is no text")
            .expected("UTF-8")
            .found(format!("another byte at {}", e.utf8_error().valid_up_to()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, "1234").unwrap();
        assert_eq!(read(&path, 4).unwrap(), "1234");
        assert!(read(&path, 3).is_err());
        assert!(read(Path::new("/dev/zero"), 4).is_err());
        assert!(read(dir.path(), 4).is_err());
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(read(&path, 4).is_err());
    }
}
