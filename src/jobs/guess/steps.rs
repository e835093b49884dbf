//! What an engine says that computes the prompt first and then one token after the other, with mistakes whose effect
//! depends on which rows are computed together: a single pass over prompt and output makes them otherwise.

use parity_graph::fault::find;

use super::Model;
use super::hypotheses::{self, Hypothesis};
use super::passes::Prompt;
use super::ways::EXACT;
use crate::engine::op_by_op::Lane;
use crate::error::Result;

/// Mistakes that read or write rows of their step by their place in it, besides those that need several steps.
const BY_ROW: [&str; 8] = [
    "attn.no_mask",
    "attn.heads_first",
    "cache.stale_cell",
    "cache.wrong_sequence",
    "data.row_garbage",
    "data.stale_row",
    "logits.stride",
    "logits.wrong_row",
];

/// Those that have a place in a step of one token behind the prompt, or in the prompt.
///
/// # Errors
/// As [`Prompt::new`].
pub fn stepwise(model: Model<'_>, prompt: &[u32]) -> Result<Vec<Hypothesis>> {
    let mut out: Vec<Hypothesis> = Vec::new();
    for (ids, first) in [(&[0][..], prompt.len()), (prompt, 0)] {
        let pass = Prompt::step(model, ids, first, prompt.len() + 1)?;
        for (_, one) in hypotheses::unmerged(&pass.labelled) {
            let name = one.key.split(' ').next().unwrap_or_default();
            let is_one = BY_ROW.contains(&name) || find(name).is_some_and(|entry| entry.later);
            if is_one && !out.iter().any(|known| known.key == one.key) {
                out.push(Hypothesis { stepwise: true, ..one });
            }
        }
    }
    Ok(out)
}

/// (rows, V) logits of each behind a prompt of so many tokens, where every token behind it is a step of its own; `None`
/// where a mistake leaves nothing.
///
/// # Errors
/// As [`Prompt::new`].
pub fn logits(
    model: Model<'_>,
    ids: &[u32],
    prompt: usize,
    which: &[&Hypothesis],
) -> Result<Vec<Option<Vec<f32>>>> {
    let mut out: Vec<Option<Vec<f32>>> = which.iter().map(|_| Some(Vec::new())).collect();
    let exact = Hypothesis::healthy(EXACT);
    let mut lanes: Vec<Lane<'_>> =
        (0..=which.len()).map(|_| Lane::new(model.gguf, EXACT.arithmetic)).collect();
    let mut pass: Option<(Prompt<'_>, Vec<Hypothesis>)> = None;
    let firsts = std::iter::once(0).chain(prompt..ids.len());
    for first in firsts {
        let of_step = if first == 0 { &ids[..prompt] } else { &ids[first..=first] };
        let is_alike = match &mut pass {
            Some((known, _)) => known.moves(of_step, first, ids.len())?,
            None => false,
        };
        if !is_alike {
            let made = Prompt::step(model, of_step, first, ids.len())?;
            let again = hypotheses::again(&made.labelled, made.layers(), which);
            // A step in which a mistake has no place is a healthy one.
            let again = again.into_iter().map(|one| one.unwrap_or_else(|| Hypothesis::healthy(EXACT)));
            pass = Some((made, again.collect()));
        }
        let Some((pass, again)) = &pass else { continue };
        let all: Vec<&Hypothesis> = std::iter::once(&exact).chain(again).collect();
        let found = pass.logits_in(&mut lanes, &all);
        for (all, row) in out.iter_mut().zip(found.into_iter().skip(1)) {
            match row {
                Some(row) => all.iter_mut().for_each(|all| all.extend(&row)),
                None => *all = None,
            }
        }
    }
    Ok(out)
}
