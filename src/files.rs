//! Files that people and programs of theirs wrote, read within limits.

use std::io::Read;
use std::path::Path;

#[cfg(not(unix))]
pub use crate::elsewhere::mode;
use crate::error::{Error, Result};

/// Bytes of a text that a person or a program of theirs wrote: prompts, suites, maps of names, tolerances.
pub const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Bytes of what a program of ours wrote, or printed of its tensors: reports, results of gates, logs.
pub const OUTPUT_BYTES_MAX: u64 = 1 << 30;

/// Reads a text file of at most `limit` bytes.
///
/// # Errors
/// No regular file, too many bytes, no UTF-8, or the system's.
pub fn read(path: &Path, limit: u64) -> Result<String> {
    Ok(parity_dump::read_text(path, limit)?)
}

/// Reads what another program printed: as [`read`], but that bytes which are no text are replaced.
///
/// # Errors
/// No regular file, too many bytes, or the system's.
pub fn read_lossy(path: &Path, limit: u64) -> Result<String> {
    Ok(String::from_utf8_lossy(&read_bytes(path, limit)?).into_owned())
}

/// Reads what another program printed, byte by byte: tokens may end within a character.
///
/// # Errors
/// As [`read_lossy`].
pub fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = parity_dump::open_regular(path, "cannot be read")?;
    let read = file.take(limit.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    if !(bytes.len() as u64 <= limit) {
        return Err(Error::file(path, "is too large for a text that is read at once")
            .expected(format!("at most {limit} bytes")));
    }
    Ok(bytes)
}

/// The bits of a file that say who may do what with it.
#[cfg(unix)]
pub fn mode(about: &std::fs::Metadata) -> u32 {
    std::os::unix::fs::PermissionsExt::mode(&about.permissions())
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
