//! What was fetched once: bytes by the hash of their content, up to a size.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::SIZE_VARIABLE;
use crate::error::{Error, Result};
use crate::memory;
use crate::references;

/// Bytes that the cache holds where nobody says how many.
const SIZE: u64 = 10 << 30;

/// The cache.
pub struct Cache {
    /// `None` where there is no place for it.
    folder: Option<PathBuf>,
    limit: u64,
}

/// Hexadecimal SHA-256.
pub fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Cache {
    /// Opens the user's.
    ///
    /// # Errors
    /// A limit that is no size.
    pub fn open() -> Result<Cache> {
        let limit = match std::env::var(SIZE_VARIABLE) {
            Err(_) => SIZE,
            Ok(text) => memory::parse(&text).ok_or_else(|| {
                Error::new(SIZE_VARIABLE, "is no size")
                    .expected("bytes, or 512M, 8G; 0 keeps nothing")
                    .found(text)
            })?,
        };
        let folder = references::kept().map(|kept| kept.join(references::REMOTE));
        Ok(Cache { folder: folder.filter(|_| limit > 0), limit })
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(key.get(..2)?).join(key))
    }

    /// The bytes with this key, where they are `length` many. Whoever uses one keeps it from going first.
    pub fn get(&self, key: &str, length: u64) -> Option<Vec<u8>> {
        self.get_any(key).filter(|bytes| bytes.len() as u64 == length)
    }

    /// The bytes with this key, however many.
    pub fn get_any(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        let bytes = fs::read(&path).ok()?;
        let _ =
            File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(bytes)
    }

    /// Keeps bytes. A cache that cannot be written to is none, and no failure.
    pub fn put(&self, key: &str, bytes: &[u8]) {
        let write = |path: PathBuf| -> std::io::Result<()> {
            let folder = path.parent().ok_or(std::io::ErrorKind::NotFound)?;
            fs::create_dir_all(folder)?;
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            file.write_all(bytes)?;
            file.persist(&path).map(|_| ()).map_err(|e| e.error)
        };
        if bytes.len() as u64 <= self.limit {
            let _ = self.path(key).map(write);
        }
    }

    /// Removes what was not used for the longest time, until the rest is within the limit.
    pub fn shrink(&self) {
        let below = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
        let files = self.folder.iter().cloned().flat_map(below).flat_map(|entry| below(entry.path()));
        let known = |entry: fs::DirEntry| {
            let about = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            Some((about.modified().ok()?, about.len(), entry.path()))
        };
        let mut files: Vec<(SystemTime, u64, PathBuf)> = files.filter_map(known).collect();
        files.sort();
        let mut all: u64 = files.iter().map(|(_, size, _)| size).sum();
        for (_, size, path) in files {
            if all <= self.limit {
                return;
            }
            if fs::remove_file(path).is_ok() {
                all -= size;
            }
        }
    }
}
