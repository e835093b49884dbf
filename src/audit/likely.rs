//! Which kernel of a device computed a product: found out by a few outputs of a few tokens, since a product may be tried in a
//! dozen orders of sums, each of which costs a hundred times as much as the product.
//!
//! A kernel that explains nearly all of these is recognised, and the node is held to it. Where none is, the sums were in an
//! order that nobody knows, and are bounded: a healthy node is healthy in either case.

use super::node::Hypothesis;
use super::tokens::{Tokens, spread};

/// Tokens that are tried.
pub const TOKENS: usize = 4;
/// Outputs of each.
const OUTPUTS: usize = 16;
/// Of so many elements one may be unexplained where a kernel is recognised. Of the results of two orders of sums in f16
/// less than half are the same.
const ONE_OF: usize = 8;

/// What a product was likely computed in.
pub struct Likely {
    /// What it is held to.
    pub chosen: Hypothesis,
    /// Of kernels that are not recognised the one that comes nearest.
    pub nearest: Option<Hypothesis>,
    /// How far that is from it, over its bound.
    pub otherwise: Option<f64>,
    /// What the kernel is called that the device usually takes.
    pub usual: &'static str,
}

/// Of all that is tried; `None` unless one of them is sums in any order.
pub fn likely(tokens: &Tokens<'_, '_>, there: &[usize], tried: &[Hypothesis]) -> Option<Likely> {
    let unordered = *tried.iter().find(|one| one.is_unordered())?;
    let usual = tried.first()?.name;
    let (some, outputs) = (spread(there, TOKENS), tokens.outputs(OUTPUTS));
    let elements = some.len() * outputs.as_ref().map_or_else(|| tokens.inner(), Vec::len);
    let mut nearest: Option<(Hypothesis, f64)> = None;
    for one in tried.iter().filter(|one| !one.is_unordered()) {
        let Ok(held) = tokens.judge(&some, outputs.as_deref(), &[*one]) else { continue };
        if ONE_OF * held.beyond.len() <= elements && held.nonfinite == 0 {
            return Some(Likely { chosen: *one, nearest: None, otherwise: None, usual });
        }
        if !nearest.is_some_and(|(_, over)| !(held.over < over)) {
            nearest = Some((*one, held.over));
        }
    }
    let (nearest, otherwise) = nearest.unzip();
    Some(Likely { chosen: unordered, nearest, otherwise, usual })
}

#[cfg(test)]
mod tests;
