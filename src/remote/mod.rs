//! Dumps that lie elsewhere: on `s3://` and `https://`. What is needed of one is fetched by ranges into a folder of its own,
//! which lives as long as the command; what was fetched once is kept in a cache by the hash of its content.

#[cfg(feature = "remote")]
mod cache;
#[cfg(feature = "remote")]
mod connector;
#[cfg(feature = "remote")]
mod fetch;
#[cfg(feature = "remote")]
mod index;
#[cfg(feature = "remote")]
mod needed;
#[cfg(feature = "remote")]
mod push;
#[cfg(feature = "remote")]
mod store;

#[cfg(feature = "remote")]
pub use fetch::{Fetched, pull};
#[cfg(feature = "remote")]
pub use push::{Pushed, push};

use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::select::Selection;

/// Most bytes of the cache of what was fetched.
pub const SIZE_VARIABLE: &str = "PARITY_REMOTE_SIZE";

/// Whether a path is an address: of S3, or of a web server.
pub fn is_remote(path: &Path) -> bool {
    path.to_str().is_some_and(|text| ["s3://", "https://", "http://"].iter().any(|s| text.starts_with(s)))
}

/// The path of a dump here: itself, or the folder that what is needed of a remote one was fetched into.
///
/// # Errors
/// What cannot be fetched, or is no dump.
#[cfg(feature = "remote")]
pub fn local(path: &Path, selection: &Selection) -> Result<PathBuf> {
    if is_remote(path) { fetch::temporary(path, selection) } else { Ok(path.to_owned()) }
}

/// The path of a dump here: this build can fetch none.
///
/// # Errors
/// An address.
#[cfg(not(feature = "remote"))]
pub fn local(path: &Path, _: &Selection) -> Result<PathBuf> {
    if !is_remote(path) {
        return Ok(path.to_owned());
    }
    Err(crate::error::Error::file(path, "this parity was built without what fetches")
        .expected("a program of a release, or one that is built with --features remote"))
}

/// Removes the folders that were fetched into.
pub fn tidy() {
    #[cfg(feature = "remote")]
    fetch::tidy();
}
