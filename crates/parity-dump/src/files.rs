//! The files of a dump, opened and checked.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use memmap2::Mmap;
use safetensors::Dtype;
use serde::Deserialize;

use crate::dtype::Element;
use crate::error::DumpError;
use crate::life::SEQUENCES;
use crate::manifest::{KNOWN, MANIFEST_FILE, Manifest, SCHEMA};

/// Bytes of a manifest, a graph or a list of seen values. A token takes some twenty in all places together.
pub(crate) const TEXT_BYTES_MAX: u64 = 256 << 20;

/// Token positions of a dump: some hundred times those of the longest contexts. What is made for each position
/// must not be decided by a length that a file only claims.
pub const POSITIONS_MAX: usize = 1 << 24;

/// Reads a text file of at most `limit` bytes. Devices and pipes have no end that could be waited for.
///
/// # Errors
/// No regular file, too many bytes, no UTF-8, or the system's.
pub fn read_text(path: &Path, limit: u64) -> Result<String, DumpError> {
    let failed = |e: std::io::Error| DumpError::new(path, format!("cannot be read: {e}"));
    let file = open_regular(path, "cannot be read")?;
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    if !(bytes.len() as u64 <= limit) {
        let size = fs::metadata(path).map_or(0, |meta| meta.len()).max(bytes.len() as u64);
        return Err(DumpError::new(path, "is too large for a text that is read at once")
            .expected_found(format!("at most {limit} bytes"), format!("{size} bytes")));
    }
    String::from_utf8(bytes).map_err(|e| {
        DumpError::new(path, "is no text")
            .expected_found("UTF-8", format!("another byte at {}", e.utf8_error().valid_up_to()))
    })
}

/// Opens a regular file: opening a pipe would wait for somebody to write to it.
pub fn open_regular(path: &Path, what: &str) -> Result<File, DumpError> {
    let failed = |e: std::io::Error| DumpError::new(path, format!("{what}: {e}"));
    let kind = fs::metadata(path).map_err(failed)?.file_type();
    if kind.is_dir() {
        return Err(DumpError::new(path, what).expected_found("a regular file", "a folder"));
    }
    if !kind.is_file() {
        return Err(DumpError::new(path, what)
            .expected_found("a regular file", "a pipe or a device")
            .hint("what comes from a pipe can be written to a file first"));
    }
    File::open(path).map_err(failed)
}

/// Reads and checks `manifest.json`.
pub fn read_manifest(dir: &Path) -> Result<Manifest, DumpError> {
    let path = dir.join(MANIFEST_FILE);
    if !path.exists() {
        return Err(DumpError::new(dir, format!("has no {MANIFEST_FILE}"))
            .expected_found("a dump folder", "another folder")
            .hint("record one with `parity record`, or `parity run --dump DIR`"));
    }
    let text = read_text(&path, TEXT_BYTES_MAX)?;
    let wrong = |e| DumpError::new(&path, format!("is no manifest of a dump: {e}"));
    let head: Head = serde_json::from_str(&text).map_err(wrong)?;
    if head.schema != SCHEMA {
        return Err(DumpError::new(&path, "another dump format").expected_found(SCHEMA, &head.schema));
    }
    refuse_unknown(&path, &head.requires.unwrap_or_default())?;
    let mut manifest: Manifest = serde_json::from_str(&text).map_err(wrong)?;
    let unfit =
        |(expected, found)| DumpError::new(&path, "its rows do not fit").expected_found(expected, found);
    manifest.number_rows().map_err(unfit)?;
    if manifest.tokens.len() > POSITIONS_MAX {
        return Err(too_many_tokens(&path, manifest.tokens.len()));
    }
    for step in &manifest.steps {
        if let Some(p) = step.positions.iter().find(|&&p| p as usize >= manifest.tokens.len()) {
            return Err(DumpError::new(&path, format!("{} has a position without a token", step.file))
                .expected_found(format!("positions below {}", manifest.tokens.len()), p));
        }
    }
    Ok(manifest)
}

/// Writes `manifest.json` under a temporary name, and renames it.
///
/// # Errors
/// The system's, with the file.
pub fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<(), DumpError> {
    let path = dir.join(MANIFEST_FILE);
    let part = dir.join(format!("{MANIFEST_FILE}.part"));
    let mut text = serde_json::to_string_pretty(&*manifest.for_file())
        .map_err(|e| DumpError::new(&path, format!("cannot be written as JSON: {e}")))?;
    text.push('\n');
    fs::write(&part, text).map_err(|e| failed(&part, "cannot write", &e))?;
    fs::rename(&part, &path).map_err(|e| failed(&part, "cannot rename", &e))
}

/// What the system said, about a file.
pub(crate) fn failed(path: &Path, what: &str, cause: &std::io::Error) -> DumpError {
    let error = DumpError::new(path, format!("{what}: {cause}"));
    match cause.kind() {
        std::io::ErrorKind::StorageFull => error.hint("free some space, or record fewer layers (--layer)"),
        _ => error,
    }
}

/// What says whether the rest of a manifest can be read: looked at first, since the rest may have changed its form.
#[derive(Deserialize)]
struct Head {
    schema: String,
    #[serde(default)]
    requires: Option<Vec<String>>,
}

/// Refuses what a dump requires of its readers and this one does not know.
///
/// # Errors
/// The first such thing.
pub fn refuse_unknown(path: &Path, requires: &[String]) -> Result<(), DumpError> {
    let Some(unknown) = requires.iter().find(|name| !KNOWN.contains(&name.as_str())) else { return Ok(()) };
    Err(DumpError::new(
        path,
        "was made by a newer parity, and cannot be read rightly without what it requires",
    )
    .expected_found(format!("nothing required, or one of {KNOWN:?}"), format!("`{unknown}`"))
    .hint("a newer parity reads it"))
}

/// Refuses rows by sequence where only a dump folder has them.
///
/// # Errors
/// Where a dump requires them.
pub fn refuse_numbered(path: &Path, requires: &[String]) -> Result<(), DumpError> {
    match requires.iter().any(|name| name == SEQUENCES) {
        true => Err(DumpError::new(
            path,
            "holds rows of several sequences, which a dump folder of its own ids alone can",
        )
        .expected_found("positions that do not repeat", format!("`{SEQUENCES}` in `requires`"))),
        false => Ok(()),
    }
}

/// More tokens than a dump has.
pub(crate) fn too_many_tokens(path: &Path, found: usize) -> DumpError {
    DumpError::new(path, "more tokens than any context has")
        .expected_found(format!("at most {POSITIONS_MAX}"), found)
}

pub(crate) fn map_file(path: &Path) -> Result<Mmap, DumpError> {
    let file = open_regular(path, "cannot be opened")?;
    // SAFETY: the map is read-only; a file that another process truncates meanwhile is outside what any
    // reader of mapped files can guard against.
    unsafe { Mmap::map(&file) }.map_err(|e| DumpError::new(path, format!("cannot be mapped: {e}")))
}

pub(crate) fn unreadable(path: &Path, cause: &dyn std::fmt::Display) -> DumpError {
    DumpError::new(path, format!("is no safetensors file: {cause}")).hint(
        "an interrupted recording leaves its last step under a .part name; the finished steps are whole",
    )
}

pub(crate) fn element_of(path: &Path, name: &str, dtype: Dtype) -> Result<Element, DumpError> {
    Element::from_safetensors(dtype).ok_or_else(|| {
        DumpError::new(path, format!("tensor {name} has an element type that dumps do not have"))
            .expected_found("F32, F16 or BF16", format!("{dtype:?}"))
    })
}
