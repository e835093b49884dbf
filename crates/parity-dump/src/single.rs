//! A dump in one `.safetensors` file, as foreign engines write it in one line.
//!
//! Tensors are named by checkpoint ids, or by names that a map translates; `tokens` (I32, U32 or I64) is one
//! more tensor, for positions 0 to T-1. `steps` in the file's metadata says how many of them each forward pass
//! computed, `[5, 1, 1]`: one pass where it is absent.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use crate::checkpoint::Checkpoint;
use crate::error::DumpError;
use crate::files::{POSITIONS_MAX, element_of, map_file, too_many_tokens, unreadable};
use crate::manifest::{Manifest, Producer, SCHEMA, Step};
use crate::reader::{Dump, Part};

/// Name of the tensor that holds the tokens.
const TOKENS: &str = "tokens";
/// Key of `__metadata__` that holds the token rows of each step.
const STEPS: &str = "steps";
/// Steps times tensors at most: each is a part that is kept account of.
const PARTS_MAX: usize = 1 << 21;

/// Opens one file; `names` translates its tensor names to checkpoints where they are no ids already.
pub fn open(path: &Path, names: &BTreeMap<String, Checkpoint>) -> Result<Dump, DumpError> {
    let map = map_file(path)?;
    let tensors = SafeTensors::deserialize(&map).map_err(|e| unreadable(path, &e))?;
    let tokens = read_tokens(path, &tensors)?;
    let counts = read_steps(path, &map, tokens.len())?;
    if counts.len().saturating_mul(tensors.len()) > PARTS_MAX {
        return Err(DumpError::new(path, format!("has too many steps for its {} tensors", tensors.len()))
            .expected_found(format!("at most {}", PARTS_MAX / tensors.len().max(1)), counts.len().to_string()));
    }
    let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let manifest = Manifest {
        schema: SCHEMA.to_owned(),
        producer: Producer { name: file_name.clone(), ..Producer::default() },
        model: Default::default(),
        tokens,
        prompt: None,
        steps: steps(&file_name, &counts),
        rows: BTreeMap::new(),
        graphs: Vec::new(),
        unmapped: Vec::new(),
        provenance: BTreeMap::new(),
        complete: true,
    };
    let mut dump = Dump::from_parts(path, manifest, Vec::new());
    let mut parts: Vec<(Checkpoint, &str, Part)> = Vec::new();
    let mut foreign = Vec::new();
    let mut named: Vec<_> = tensors.iter().filter(|(name, _)| *name != TOKENS).collect();
    named.sort_by_key(|(name, _)| name.to_owned());
    for (name, view) in named {
        let Some(checkpoint) = names.get(name).copied().or_else(|| dump.checkpoint_of(name)) else {
            foreign.push(name.to_owned());
            continue;
        };
        let offset = view.data().as_ptr() as usize - map.as_ptr() as usize;
        let element = element_of(path, name, view.dtype())?;
        if let Some((_, other, _)) = parts.iter().find(|part| part.0 == checkpoint) {
            return Err(DumpError::new(path, format!("two tensors are {checkpoint}"))
                .expected_found("one tensor for each checkpoint", format!("`{other}` and `{name}`"))
                .hint("a name map gives each tensor an id of its own"));
        }
        let part = Part::new(checkpoint, (0, 0), offset, element, view.shape().to_vec());
        parts.push((checkpoint, name, part));
    }
    dump.set_foreign(foreign);
    dump.set_unused_names(names.keys().filter(|name| tensors.tensor(name).is_err()).cloned().collect());
    for (checkpoint, _, part) in parts {
        let whole = part.rows().filter(|rows| *rows == dump.manifest.tokens.len());
        if whole.is_none() || counts.len() == 1 {
            // Refused, where it is not of all tokens.
            let all: Vec<u32> = (0..dump.manifest.tokens.len() as u32).collect();
            dump.add_part(path, checkpoint, part, &all)?;
            continue;
        }
        for (step, positions) in dump.manifest.steps.clone().into_iter().map(|s| s.positions).enumerate() {
            let first = positions.first().map_or(0, |first| *first as usize);
            dump.add_part(path, checkpoint, part.of_step(step, first, positions.len()), &positions)?;
        }
    }
    dump.add_map(map);
    dump.sort_rows();
    Ok(dump)
}

/// Steps of consecutive positions.
fn steps(file: &str, counts: &[usize]) -> Vec<Step> {
    let mut first = 0;
    let step = |rows: &usize| {
        let positions = (first..first + *rows as u32).collect();
        first += *rows as u32;
        Step { file: file.to_owned(), positions }
    };
    counts.iter().map(step).collect()
}

/// Token rows of each step, as the metadata of the file have them.
fn read_steps(path: &Path, map: &[u8], tokens: usize) -> Result<Vec<usize>, DumpError> {
    let (_, header) = SafeTensors::read_metadata(map).map_err(|e| unreadable(path, &e))?;
    let Some(text) = header.metadata().as_ref().and_then(|metadata| metadata.get(STEPS)) else {
        return Ok(vec![tokens]);
    };
    let counts: Option<Vec<usize>> = serde_json::from_str(text).ok();
    let sum = counts.iter().flatten().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
    match counts.filter(|counts| sum == Some(tokens) && !counts.contains(&0)) {
        Some(counts) => Ok(counts),
        None => Err(DumpError::new(path, format!("`{STEPS}` in its metadata does not fit its tokens"))
            .expected_found(
                format!("token rows of each forward pass, {tokens} in all, such as [5, 1, 1]"),
                text.chars().take(80).collect::<String>(),
            )
            .hint("a prefill of 5 tokens and two decode steps are [5, 1, 1]")),
    }
}

fn read_tokens(path: &Path, tensors: &SafeTensors<'_>) -> Result<Vec<u32>, DumpError> {
    let missing = |found: String| {
        DumpError::new(path, format!("no usable tensor `{TOKENS}`"))
            .expected_found("token ids (T,) as I32, U32 or I64", found)
            .hint("save the prompt's token ids beside the activations")
    };
    let view = tensors.tensor(TOKENS).map_err(|_| missing("none".to_owned()))?;
    let size = match view.dtype() {
        Dtype::I32 | Dtype::U32 => 4,
        Dtype::I64 => 8,
        other => return Err(missing(format!("{other:?}"))),
    };
    // Before a value is read: a sparse file holds as many as it likes.
    let rows =
        tensors.iter().find(|(name, _)| *name != TOKENS).and_then(|(_, view)| view.shape().first().copied());
    let n = view.data().len() / size;
    if n > POSITIONS_MAX {
        let error = too_many_tokens(path, n);
        return Err(match rows {
            Some(rows) => error.hint(format!("`{TOKENS}` is (T,), and the other tensors have {rows} rows")),
            None => error,
        });
    }
    let mut tokens = Vec::with_capacity(n);
    for bytes in view.data().chunks_exact(size) {
        let token = if size == 8 {
            i64::from_le_bytes([
                bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
            ])
        } else {
            i64::from(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        tokens.push(u32::try_from(token).map_err(|_| missing(format!("token {token}")))?);
    }
    Ok(tokens)
}
