//! What the input leaves of a built graph hold, for given tokens at given positions.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

use super::Built;
use super::shape::Cells;

/// The mask of layers that see every position up to their own.
pub const CAUSAL_MASK: &str = "attn_inp_kq_mask";

/// The values of input leaves by name: contiguous, integers as numbers.
pub type Values = BTreeMap<String, Vec<f64>>;

/// Refuses tokens that the model does not have.
///
/// # Errors
/// Names the first.
pub fn known(built: &Built, tokens: &[u32]) -> Result<()> {
    let vocab = built.facts.vocab;
    let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) else { return Ok(()) };
    Err(Error::new("tokens", "a token beyond the vocabulary")
        .expected(format!("up to {}", vocab.saturating_sub(1)))
        .found(token))
}

/// The inputs of one step: `tokens` at positions from `first`, of one sequence whose position p lies in cell p of the
/// cache. Logits are those of the last rows of the step, as many as its shape has.
///
/// Masks are (T, S): 0 where row t may see cell s, -inf elsewhere; of a layer with a window of W, only the W last
/// positions up to its own are seen (llama.cpp: `is_masked_swa`).
///
/// # Errors
/// Another number of tokens than the graph was built for, a token beyond the vocabulary, positions beyond the cells
/// that the graph looks at.
pub fn inputs(built: &Built, tokens: &[u32], first: usize) -> Result<Values> {
    let (shape, facts) = (built.shape, &built.facts);
    let wrong = |what: &str, expected: String, found: String| {
        Err(Error::new("inputs of a built graph", what).expected(expected).found(found))
    };
    if tokens.len() != shape.tokens {
        return wrong("another number of tokens", shape.tokens.to_string(), tokens.len().to_string());
    }
    known(built, tokens)?;
    let end = first.saturating_add(shape.tokens);
    for cells in [shape.cells, shape.sliding] {
        if end > cells.seen {
            return wrong("positions beyond the cells", format!("up to {}", cells.seen), end.to_string());
        }
    }
    let positions = first..end;
    let numbers = |range: std::ops::Range<usize>| range.map(|i| i as f64).collect::<Vec<f64>>();
    let mut values = Values::new();
    values.insert("inp_tokens".into(), tokens.iter().map(|&token| f64::from(token)).collect());
    values.insert("inp_pos".into(), numbers(positions.clone()));
    values.insert("out_ids".into(), numbers(shape.tokens - shape.outputs..shape.tokens));
    let width = facts.kv_heads * facts.head_width;
    for (part, kept) in [("k", shape.cache.keys), ("v", shape.cache.values)] {
        let Some(columns) = kept.rotated else { continue };
        for kind in ["", "_swa"] {
            values.insert(format!("attn_inp_{part}_rot{kind}"), hadamard(columns));
        }
    }
    for (kind, cells, window) in [("", shape.cells, None), ("_swa", shape.sliding, facts.window)] {
        values.insert(format!("attn_inp_k_idxs{kind}"), numbers(positions.clone()));
        let v_ids = match shape.flash {
            true => numbers(positions.clone()),
            // V is stored transposed: column c of a position has a row of the cache of its own.
            false => positions
                .clone()
                .flat_map(|cell| (0..width).map(move |column| (column * cells.all + cell) as f64))
                .collect(),
        };
        values.insert(format!("attn_inp_v_idxs{kind}"), v_ids);
        values.insert(format!("{CAUSAL_MASK}{kind}"), mask(positions.clone(), cells, window));
    }
    Ok(values)
}

/// The Hadamard matrix of `n` columns, a power of 2, that is its own inverse: 1/√n times -1 to the number of bits that row
/// and column have in common.
fn hadamard(n: usize) -> Vec<f64> {
    let one = 1.0 / (n as f64).sqrt();
    let sign = |i: usize| if ((i / n) & (i % n)).count_ones().is_multiple_of(2) { one } else { -one };
    (0..n * n).map(sign).collect()
}

fn mask(positions: std::ops::Range<usize>, cells: Cells, window: Option<usize>) -> Vec<f64> {
    let sees = |row: usize, cell: usize| cell <= row && window.is_none_or(|window| row - cell < window);
    positions
        .flat_map(|row| {
            (0..cells.seen).map(move |cell| if sees(row, cell) { 0.0 } else { f64::NEG_INFINITY })
        })
        .collect()
}
