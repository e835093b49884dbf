//! A dump in one `.safetensors` file, as foreign engines write it in one line.
//!
//! Tensors are named by checkpoint ids; `tokens` (I32, U32 or I64) is one more tensor, for positions 0 to T-1.

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

/// Opens one file.
pub(crate) fn open(path: &Path) -> Result<Dump, DumpError> {
    let map = map_file(path)?;
    let tensors = SafeTensors::deserialize(&map).map_err(|e| unreadable(path, &e))?;
    let tokens = read_tokens(path, &tensors)?;
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let manifest = Manifest {
        schema: SCHEMA.to_owned(),
        producer: Producer { name: file_name.clone(), ..Producer::default() },
        model: Default::default(),
        tokens,
        prompt: None,
        steps: vec![Step { file: file_name, positions: positions.clone() }],
        rows: BTreeMap::new(),
        graphs: Vec::new(),
        unmapped: Vec::new(),
        provenance: BTreeMap::new(),
        complete: true,
    };
    let mut dump = Dump::from_parts(path, manifest, Vec::new());
    let mut parts: Vec<(Checkpoint, Part)> = Vec::new();
    let mut foreign = Vec::new();
    let mut named: Vec<_> = tensors.iter().filter(|(name, _)| *name != TOKENS).collect();
    named.sort_by_key(|(name, _)| name.to_owned());
    for (name, view) in named {
        let Some(checkpoint) = dump.checkpoint_of(name) else {
            foreign.push(name.to_owned());
            continue;
        };
        let offset = view.data().as_ptr() as usize - map.as_ptr() as usize;
        let element = element_of(path, name, view.dtype())?;
        parts.push((checkpoint, Part::new(checkpoint, 0, offset, element, view.shape().to_vec())));
    }
    dump.set_foreign(foreign);
    for (checkpoint, part) in parts {
        dump.add_part(path, checkpoint, part, &positions)?;
    }
    dump.add_map(map);
    dump.sort_rows();
    Ok(dump)
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
