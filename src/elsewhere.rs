//! What systems other than Unix do in its place: built by CI for Windows, and run there alone.

use std::path::Path;
use std::process::ExitStatus;

/// Where files have no bits that say who may do what with them, everybody may execute them.
pub fn mode(_: &std::fs::Metadata) -> u32 {
    0o111
}

/// Reports are as private as their folder.
pub fn readable_by_all(_: &Path) -> std::io::Result<()> {
    Ok(())
}

/// Nothing limits the address space.
pub fn address_space() -> Option<u64> {
    None
}

/// What a template takes is not limited.
pub fn limit() {}

/// Programs end by a code alone.
pub fn signal(_: ExitStatus) -> Option<i32> {
    None
}

/// Files that are too large, or cut short, are errors of the call.
pub fn heed_signals() {}
