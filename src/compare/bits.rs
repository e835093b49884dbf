//! Whether two recordings are equal in every bit: 0 and -0 differ, and so do two NaN of other bits.

use rayon::prelude::*;

use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::report::Bits;

/// The rows of a checkpoint that both sides have and that differ in a bit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differing {
    /// Positions of rows with an element that differs, ascending.
    pub rows: Vec<u32>,
    /// How many elements differ.
    pub elements: u64,
    /// Rows that both have.
    pub compared: usize,
}

impl Differing {
    /// As a report has it.
    pub fn bits(&self) -> Bits {
        Bits {
            equal: self.rows.is_empty(),
            first_row: self.rows.first().copied(),
            elements: Some(self.elements),
        }
    }
}

/// Compares the rows of a checkpoint at positions before `common`; `None` where no row is on both sides.
pub fn differing(
    candidate: &dyn Recording,
    reference: &dyn Recording,
    checkpoint: Checkpoint,
    common: u32,
) -> Option<Differing> {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let mut found = Differing::default();
    for position in candidate.positions(checkpoint).into_iter().filter(|position| *position < common) {
        let rows =
            candidate.row(checkpoint, position, &mut a).zip(reference.row(checkpoint, position, &mut b));
        let Some((a, b)) = rows else { continue };
        found.compared += 1;
        let apart = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let more = a.len().abs_diff(b.len());
        if apart + more > 0 {
            found.rows.push(position);
            found.elements += (apart + more) as u64;
        }
    }
    (found.compared > 0).then_some(found)
}

/// [`differing`] of several checkpoints, on all cores.
pub fn all(
    candidate: &dyn Recording,
    reference: &dyn Recording,
    checkpoints: &[Checkpoint],
) -> Vec<(Checkpoint, Differing)> {
    let common = super::common_positions(candidate.tokens(), reference.tokens());
    let of = |id: &Checkpoint| Some((*id, differing(candidate, reference, *id, common)?));
    checkpoints.par_iter().filter_map(of).collect()
}
