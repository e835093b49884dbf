//! A node as a line of `test-backend-ops --test-file`: op, type, extents, words of `op_params`, and of each source type,
//! extents and strides, all as numbers of the release that was recorded.

use std::collections::HashMap;

use parity_dump::Dump;
use parity_graph::graph::contiguous;
use parity_graph::{Graph, Id, MAX_SRC};

use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::dtype;
use crate::gguf::DType;

/// What a recorder calls the numbers of ggml's ops in a manifest: they move from release to release.
const OP_NUMBERS: &str = "ggml ops";

/// Numbers of ops by ggml's description, as the recording of a dump noted them.
pub fn numbers(dump: &Dump) -> Option<HashMap<String, u32>> {
    let noted = dump.manifest().provenance.get(OP_NUMBERS)?;
    let each = noted.split_whitespace().filter_map(|word| word.split_once('='));
    Some(each.filter_map(|(name, number)| Some((name.to_owned(), number.parse().ok()?))).collect())
}

/// The line of a node, or why there is none.
pub fn line(
    graph: &Graph,
    node: Id,
    id: Checkpoint,
    numbers: Option<&HashMap<String, u32>>,
) -> Result<String, String> {
    let numbers = numbers.ok_or("the dump does not say which numbers its ops have: record it again")?;
    let tensor = graph.get(node);
    let op = numbers.get(tensor.op.name()).ok_or_else(|| {
        format!("the dump does not say which number {} has: record it again", tensor.op.name())
    })?;
    let number = |at: Id| -> Result<DType, String> {
        let tensor = graph.get(at);
        dtype(tensor).ok_or_else(|| format!("{} is of the unknown type {}", tensor.name, tensor.dtype))
    };
    let mut words = vec![op.to_string(), number(node)?.number().to_string()];
    words.extend(tensor.ne.map(|extent| extent.to_string()));
    words.push(tensor.params.0.len().to_string());
    words.extend(tensor.params.0.map(|word| word.cast_signed().to_string()));
    // Upstream's reader takes sources up to the first empty slot.
    let sources: Vec<Id> = tensor.srcs.iter().map_while(|source| *source).take(MAX_SRC).collect();
    words.push(sources.len().to_string());
    for source in sources {
        let (dtype, tensor) = (number(source)?, graph.get(source));
        words.push(dtype.number().to_string());
        words.extend(tensor.ne.map(|extent| extent.to_string()));
        words.extend(strides(dtype, tensor.ne, tensor.nb, &tensor.dtype).map(|stride| stride.to_string()));
    }
    words.push(id.to_string());
    Ok(words.join(" ") + "\n")
}

/// ggml's strides in bytes: of block-quantised weights a graph has none of its own, and they have no gaps.
fn strides(dtype: DType, ne: [usize; 4], nb: [usize; 4], name: &str) -> [usize; 4] {
    if nb != contiguous(name, ne) || dtype.block_len() == 1 {
        return nb;
    }
    let row = ne[0] / dtype.block_len() * dtype.block_bytes();
    [dtype.block_bytes(), row, row * ne[1], row * ne[1] * ne[2]]
}
