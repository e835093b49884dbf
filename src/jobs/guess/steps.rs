//! What an engine says that computes one step after the other, with mistakes whose effect depends on which rows are computed
//! together: a single pass over all of them makes them otherwise.

use parity_graph::fault::Entry;

use super::Model;
use super::hypotheses::{self, Hypothesis};
use super::passes::Prompt;
use super::ways::EXACT;
use crate::engine::op_by_op::Lane;
use crate::error::Result;
use crate::model::builders::{Cache, Shape};

/// Mistakes that read or write rows of their step by their place in it, besides those that need several steps.
const BY_ROW: [&str; 9] = [
    "attn.no_mask",
    "attn.mask_shift",
    "attn.heads_first",
    "cache.stale_cell",
    "cache.wrong_sequence",
    "data.row_garbage",
    "data.stale_row",
    "logits.stride",
    "logits.wrong_row",
];

/// Whether a mistake depends on which rows are computed together.
pub fn is_by_row(one: &Hypothesis) -> bool {
    BY_ROW.contains(&hypotheses::mistake(&one.key))
}

/// Those that have a place in a step of one token behind the prompt, or in the prompt.
///
/// # Errors
/// As [`Prompt::new`].
pub fn stepwise(model: Model<'_>, prompt: &[u32]) -> Result<Vec<Hypothesis>> {
    let mut out: Vec<Hypothesis> = Vec::new();
    for (ids, first) in [(&[0][..], prompt.len()), (prompt, 0)] {
        let at = At { first, context: prompt.len() + 1, outputs: 1, prompt: prompt.len() - first };
        let pass = Prompt::step(model, ids, at)?;
        let is_one = |entry: &Entry| entry.later || BY_ROW.contains(&entry.name);
        for one in hypotheses::unmerged(&pass.labelled, is_one) {
            if !out.iter().any(|known| known.key == one.key) {
                out.push(Hypothesis { stepwise: true, ..one });
            }
        }
    }
    Ok(out)
}

/// Where a step is among others.
#[derive(Clone, Copy)]
pub struct At {
    /// Position of its first token.
    pub first: usize,
    /// Positions of all steps.
    pub context: usize,
    /// Rows that logits are computed of, its last.
    pub outputs: usize,
    /// Its tokens that are of the prefill.
    pub prompt: usize,
}

impl At {
    /// What a graph of so many tokens is built for.
    pub fn shape(self, tokens: usize) -> Shape {
        let shape = Shape::step(self.first, tokens, self.context, true, Cache::F32);
        Shape { outputs: self.outputs, ..shape }
    }
}

/// How many tokens each step computes, how many of all are the prefill, and the position of the first row that is wanted.
#[derive(Clone, Copy)]
pub struct Steps<'a> {
    pub lengths: &'a [usize],
    pub prompt: usize,
    pub from: usize,
}

/// Steps of a prompt with single tokens behind it.
pub fn one_by_one(prompt: usize, behind: usize) -> Vec<usize> {
    std::iter::once(prompt).chain(std::iter::repeat_n(1, behind)).collect()
}

/// (rows, V) logits of each behind these tokens, computed step after step; `None` where a mistake leaves nothing.
///
/// # Errors
/// As [`Prompt::new`].
pub fn logits(
    model: Model<'_>,
    ids: &[u32],
    steps: Steps<'_>,
    which: &[&Hypothesis],
) -> Result<Vec<Option<Vec<f32>>>> {
    let mut out: Vec<Option<Vec<f32>>> = which.iter().map(|_| Some(Vec::new())).collect();
    let exact = Hypothesis::healthy(EXACT);
    let mut lanes: Vec<Lane<'_>> =
        (0..=which.len()).map(|_| Lane::new(model.gguf, EXACT.arithmetic)).collect();
    let mut pass: Option<(Prompt<'_>, Vec<Hypothesis>)> = None;
    let (mut first, context) = (0, ids.len());
    for length in steps.lengths {
        let end = context.min(first + length);
        let of_step = &ids[first..end];
        if of_step.is_empty() {
            break;
        }
        let wanted = end - first.max(steps.from).min(end);
        let prompt = steps.prompt.saturating_sub(first).min(of_step.len());
        let at = At { first, context, outputs: wanted.max(1), prompt };
        first = end;
        let is_alike = match &mut pass {
            Some((known, _)) => known.moves(of_step, at)?,
            None => false,
        };
        if !is_alike {
            let made = Prompt::step(model, of_step, at)?;
            let again = hypotheses::again(&made.labelled, made.layers(), which);
            // A step in which a mistake has no place is a healthy one.
            let again = again.into_iter().map(|one| one.unwrap_or_else(|| Hypothesis::healthy(EXACT)));
            pass = Some((made, again.collect()));
        }
        let Some((pass, again)) = &pass else { continue };
        let all: Vec<&Hypothesis> = std::iter::once(&exact).chain(again).collect();
        let found = pass.logits_in(&mut lanes, &all);
        for (all, rows) in out.iter_mut().zip(found.into_iter().skip(1)) {
            match rows {
                // Of a step that nothing is wanted of, its last row was computed all the same.
                Some(_) if wanted == 0 => {}
                Some(rows) => all.iter_mut().for_each(|all| all.extend(&rows)),
                None => *all = None,
            }
        }
    }
    Ok(out)
}
