//! Models split over several files: `NAME-00001-of-00003.gguf`, as llama.cpp's `llama-gguf-split` writes them.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::value::Value;
use crate::error::{Error, Result};

/// This file's number, from 0.
const NUMBER: &str = "split.no";
/// Files of the model.
const COUNT: &str = "split.count";
/// Tensors in all files together.
const TENSORS: &str = "split.tensors.count";
/// Files that one model may have: the five digits of the name.
const MAX_SHARDS: i128 = 99_999;
const HINT: &str = "put all files of the model, whole and under their own names, into one folder";

fn number(metadata: &IndexMap<String, Value>, key: &str) -> Option<i128> {
    metadata.get(key).and_then(Value::as_integer)
}

fn name(prefix: &str, number: usize, count: usize) -> String {
    format!("{prefix}-{number:05}-of-{count:05}.gguf")
}

/// The files of the model that `path` belongs to, in order; `None` where it is whole in itself.
pub fn shards(path: &Path, metadata: &IndexMap<String, Value>) -> Result<Option<Vec<PathBuf>>> {
    let count = match number(metadata, COUNT) {
        None | Some(0 | 1) => return Ok(None),
        Some(count) => count,
    };
    let bad = |message: &str| Error::file(path, message).hint(HINT);
    if !(2..=MAX_SHARDS).contains(&count) {
        return Err(bad("is one of an impossible number of files").found(format!("`{COUNT}` {count}")));
    }
    let count = count as usize;
    let own = number(metadata, NUMBER).filter(|own| (0..count as i128).contains(own)).ok_or_else(|| {
        bad("does not say which file of the model it is").expected(format!("`{NUMBER}` below {count}"))
    })?;
    let suffix = name("", own as usize + 1, count);
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(prefix) = file.strip_suffix(&suffix) else {
        return Err(bad("is one file of a split model and was renamed")
            .expected(format!("a name that ends in `{suffix}`")));
    };
    Ok(Some((1..=count).map(|number| path.with_file_name(name(prefix, number, count))).collect()))
}

/// Whether a file is the one that its name says.
pub fn check(path: &Path, metadata: &IndexMap<String, Value>, index: usize, count: usize) -> Result<()> {
    let found = (number(metadata, NUMBER), number(metadata, COUNT));
    if found == (Some(index as i128), Some(count as i128)) {
        return Ok(());
    }
    let show = |v: Option<i128>| v.map_or("absent".to_owned(), |v| v.to_string());
    Err(Error::file(path, "is not the file of the split model that its name says")
        .expected(format!("`{NUMBER}` {index}, `{COUNT}` {count}"))
        .found(format!("`{NUMBER}` {}, `{COUNT}` {}", show(found.0), show(found.1)))
        .hint(HINT))
}

/// Whether all files together hold the announced number of tensors.
pub fn check_total(path: &Path, metadata: &IndexMap<String, Value>, tensors: usize) -> Result<()> {
    match number(metadata, TENSORS) {
        Some(announced) if announced != tensors as i128 => {
            Err(Error::file(path, "is a split model with another number of tensors than announced")
                .expected(announced)
                .found(tensors)
                .hint(HINT))
        }
        _ => Ok(()),
    }
}
