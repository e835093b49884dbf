//! Products of one step that two kernels computed: of the last rows of a batch, of a tile's end, or of small batches that a
//! recording has as one.
//!
//! One arithmetic does not explain such a node. A row that is what f32 rounds of the exact one is right, whatever the others
//! were computed in; those must all be explained by one arithmetic that is tried. A mistake is neither.

use std::collections::BTreeSet;

use super::super::node::{Held, Hypothesis, IN_F32, joined};
use super::super::tokens::{Tokens, spread};
use crate::arithmetic::Arithmetic;
use crate::engine::op_by_op::Unknown;
use crate::numerics::Storage;

/// Rows that show whether there are two kinds of them.
const TOKENS: usize = 4;

/// What explains all rows that are `there`, some by f32 and the others by one of `tried`; `None` where nothing does. `held` is
/// what came nearest to all of them alike. Of a healthy one the coarser arithmetic is told.
///
/// # Errors
/// What the rule refuses.
pub fn explained(
    tokens: &Tokens<'_, '_>,
    there: &[usize],
    tried: &[Hypothesis],
    held: &Held,
) -> Result<Option<Held>, Unknown> {
    if there.len() < 2 || held.nonfinite > 0 {
        return Ok(None);
    }
    let exact = Hypothesis { name: IN_F32, arithmetic: Arithmetic::EXACT };
    let rows_of = |elements: &[usize]| -> BTreeSet<usize> {
        elements.iter().map(|element| element / tokens.inner()).collect()
    };
    let beyond: Vec<usize> = rows_of(&held.beyond).into_iter().collect();
    let few: BTreeSet<usize> = spread(there, TOKENS).into_iter().chain(spread(&beyond, TOKENS)).collect();
    let left = rows_of(&tokens.judge(&few, None, &[exact])?.beyond);
    if left.is_empty() || left.len() == few.len() {
        return Ok(None);
    }
    // What rounds results as well, or sums in any order, explains too much of single rows.
    let is_sharp = |one: &&Hypothesis| {
        let Arithmetic { narrow, recorded, .. } = one.arithmetic;
        !one.is_unordered() && narrow == Storage::F32 && recorded.is_none()
    };
    for one in tried.iter().filter(is_sharp).filter(|one| one.arithmetic != Arithmetic::EXACT) {
        if !tokens.judge(&left, None, &[*one])?.is_healthy() {
            continue;
        }
        let all: BTreeSet<usize> = there.iter().copied().collect();
        let left = rows_of(&tokens.judge(&all, None, &[exact])?.beyond);
        let others = tokens.judge(&left, None, &[*one])?;
        if others.is_healthy() {
            let right = tokens.judge(&all.difference(&left).copied().collect(), None, &[exact])?;
            let arithmetic = tried.first().filter(|usual| usual.name != one.name).map(|_| one.name);
            let Held { computed_in, followed, under, unit, .. } = others;
            let rounded = left.iter().map(|row| row * tokens.inner()).collect();
            let both = joined(others, right);
            return Ok(Some(Held { arithmetic, computed_in, followed, under, unit, rounded, ..both }));
        }
    }
    Ok(None)
}
