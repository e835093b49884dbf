//! Readers of other people's dumps: which format lies there, and what is in it, pass by pass.

mod archive;
mod folders;
mod npy;
mod pickle;
mod sglang;
mod single;
mod torch;

pub use folders::folder;
pub use single::{file, is_safetensors, logits_of, map};

use std::path::{Path, PathBuf};

use super::Foreign;
use crate::error::{Error, Result};

/// What lies at `path`, of each rank in order; one where there are none.
///
/// # Errors
/// What is no dump that can be read, with the line that makes one of it.
pub fn read(path: &Path) -> Result<Vec<Foreign>> {
    if !path.is_dir() {
        return file(path).map(|one| vec![one]);
    }
    let ranks = folders::ranks(path)?;
    match ranks.is_empty() {
        true => folder(path),
        false => {
            let mut all = Vec::with_capacity(ranks.len());
            for rank in &ranks {
                all.extend(folder(rank)?.into_iter().map(|one| one.of_rank(rank, path)));
            }
            match all.len() == ranks.len() {
                true => Ok(all),
                false => Err(Error::file(path, "has ranks within ranks")
                    .expected(format!("{} folders, one a rank", ranks.len()))
                    .found(format!("{} dumps", all.len()))),
            }
        }
    }
}

/// Files and folders of a folder, by name.
///
/// # Errors
/// A folder that cannot be listed, or has more files than any dump.
fn entries(path: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e: std::io::Error| Error::file(path, format!("cannot be listed: {e}"));
    let mut all = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        all.push(entry.map_err(failed)?.path());
        if all.len() > ENTRIES_MAX {
            return Err(Error::file(path, "holds more files than any dump")
                .expected(format!("at most {ENTRIES_MAX}")));
        }
    }
    all.sort();
    Ok(all)
}

/// Files of a folder.
const ENTRIES_MAX: usize = 1 << 20;

/// The name of a file or folder.
fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The name of a file without its ending.
fn stem_of(path: &Path) -> String {
    path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Whether a file's name ends so.
fn has_ending(path: &Path, endings: &[&str]) -> bool {
    path.extension().is_some_and(|ending| endings.iter().any(|known| ending.eq_ignore_ascii_case(known)))
}

/// The number behind a word at the start of a name: 3 of `rank_3`, of `TP3_PP0`.
fn number_behind(name: &str, word: &str) -> Option<usize> {
    let head = name.get(..word.len()).filter(|head| head.eq_ignore_ascii_case(word))?;
    let rest = name[head.len()..].trim_start_matches(['-', '_', '=', '.']);
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}
