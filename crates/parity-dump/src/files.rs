//! The files of a dump, opened and checked.

use std::fs::{self, File};
use std::path::Path;

use memmap2::Mmap;
use safetensors::Dtype;

use crate::dtype::Element;
use crate::error::DumpError;
use crate::manifest::{MANIFEST_FILE, Manifest, SCHEMA};

/// Reads and checks `manifest.json`.
pub(crate) fn read_manifest(dir: &Path) -> Result<Manifest, DumpError> {
    let path = dir.join(MANIFEST_FILE);
    let text = fs::read_to_string(&path).map_err(|e| {
        DumpError::new(dir, format!("no readable {MANIFEST_FILE}: {e}"))
            .expected_found("a dump folder", "something else")
            .hint("record one with `parity record`, or `parity run --dump DIR`")
    })?;
    let manifest: Manifest = serde_json::from_str(&text)
        .map_err(|e| DumpError::new(&path, format!("is no manifest of a dump: {e}")))?;
    if manifest.schema != SCHEMA {
        return Err(DumpError::new(&path, "another dump format").expected_found(SCHEMA, &manifest.schema));
    }
    for step in &manifest.steps {
        if let Some(p) = step.positions.iter().find(|&&p| p as usize >= manifest.tokens.len()) {
            return Err(DumpError::new(&path, format!("{} has a position without a token", step.file))
                .expected_found(format!("positions below {}", manifest.tokens.len()), p));
        }
    }
    Ok(manifest)
}

pub(crate) fn map_file(path: &Path) -> Result<Mmap, DumpError> {
    let file = File::open(path).map_err(|e| DumpError::new(path, format!("cannot be opened: {e}")))?;
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
