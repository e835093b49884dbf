//! Holds two recordings against each other, row by row: numbers, what is missing, what has another shape.
//!
//! Which of two differing sides is wrong is for the audit to say.

use std::collections::BTreeSet;

use rayon::prelude::*;

use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::{Recording, Unfinite};
use crate::report::{Numbers, Seen, TokenReport};
use parity_dump::Dump;
use whole::Whole;

mod aligned;
pub mod bits;
pub mod fed;
mod partial;
mod stats;
mod tokens;
mod tolerance;
mod whole;

pub use aligned::{Hunk, aligned};
pub use partial::Partial;
pub use stats::{Accumulator, index};
pub use tokens::{TokenSums, argmax};
pub use tolerance::{Tolerance, Tolerances};

/// One checkpoint of either side.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// Whether there was something to compare.
    pub status: Status,
    /// Shape of one token row, e.g. [H, E].
    pub row_shape: Vec<usize>,
    /// The numbers, where a row was compared.
    pub numbers: Option<Numbers>,
    /// Whether the user's tolerance holds; `None` where none was given.
    pub within_tolerance: Option<bool>,
    /// Token rows that both sides have.
    pub rows_compared: u64,
    /// Token rows of the positions that both sides computed.
    pub rows_expected: u64,
    /// How much of it is known, where one side was only printed.
    pub seen: Option<Seen>,
}

impl Comparison {
    /// A checkpoint of a recording that is compared with nothing but exact arithmetic.
    pub fn alone(checkpoint: Checkpoint, row_shape: Vec<usize>) -> Comparison {
        let status = if row_shape.is_empty() { Status::MissingCandidate } else { Status::Compared };
        Comparison {
            checkpoint,
            status,
            row_shape,
            numbers: None,
            within_tolerance: None,
            rows_compared: 0,
            rows_expected: 0,
            seen: None,
        }
    }
}

/// Whether a checkpoint could be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// On both sides, in one shape.
    Compared,
    /// Only in the reference.
    MissingCandidate,
    /// Only in the candidate.
    MissingReference,
    /// On both sides, but for so many rows that the candidate lacks.
    MissingRows(u64),
    /// On both sides; but so many of its tensors are not of tokens but of steps, which the other side has not, or in another
    /// form.
    OtherSteps(u64),
    /// In neither, though the model has it.
    MissingBoth,
    /// On both sides, in these two row shapes.
    Shape(Vec<usize>, Vec<usize>),
}

impl Status {
    /// Of two sides, which may be empty, with rows of these shapes.
    fn of(checkpoint: Checkpoint, empty: [bool; 2], [ours, theirs]: [&[usize]; 2]) -> Status {
        match empty {
            [true, true] => Status::MissingBoth,
            [true, false] => Status::MissingCandidate,
            [false, true] => Status::MissingReference,
            [false, false] if !same_row(checkpoint, ours, theirs) => {
                Status::Shape(ours.to_vec(), theirs.to_vec())
            }
            [false, false] => Status::Compared,
        }
    }

    /// Whether a side lacks something.
    pub fn is_missing(&self) -> bool {
        use Status::{MissingBoth, MissingCandidate, MissingReference, MissingRows};
        matches!(self, MissingCandidate | MissingReference | MissingBoth | MissingRows(_))
    }
}

/// Positions from 0 at which both sides have the same tokens: rows behind the first difference are of other
/// texts.
pub fn common_positions(candidate: &[u32], reference: &[u32]) -> u32 {
    candidate.iter().zip(reference).take_while(|(a, b)| a == b).count() as u32
}

/// Compares every wanted checkpoint of two dumps, all cores, in execution order. What their graphs show to belong to a step
/// is compared where both sides have that step.
pub fn dumps(
    candidate: &Dump,
    reference: &Dump,
    checkpoints: &[Checkpoint],
    tolerances: &Tolerances,
) -> Vec<Comparison> {
    all([candidate, reference], &Whole::of(candidate, reference), checkpoints, tolerances)
}

fn all(
    sides: [&dyn Recording; 2],
    whole: &Whole,
    checkpoints: &[Checkpoint],
    tolerances: &Tolerances,
) -> Vec<Comparison> {
    let common = common_positions(sides[0].tokens(), sides[1].tokens());
    checkpoints.par_iter().map(|&checkpoint| pair(sides, whole, checkpoint, common, tolerances)).collect()
}

/// What the difference of the logits means for tokens; `None` where no row of both was recorded.
pub fn tokens(candidate: &dyn Recording, reference: &dyn Recording) -> Option<TokenReport> {
    let logits = Checkpoint::global(Kind::Logits);
    let common = common_positions(candidate.tokens(), reference.tokens());
    let positions = candidate.positions(logits);
    let rows = positions.par_iter().filter(|position| **position < common).map(|&position| {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let mut sums = TokenSums::default();
        let rows = candidate.row(logits, position, &mut a).zip(reference.row(logits, position, &mut b));
        if let Some((a, b)) = rows.filter(|(a, b)| a.len() == b.len()) {
            sums.row(position, a, b);
        }
        sums
    });
    let merged = rows.reduce(TokenSums::default, |mut all, part| {
        all.merge(part);
        all
    });
    merged.report()
}

fn pair(
    [candidate, reference]: [&dyn Recording; 2],
    whole: &Whole,
    checkpoint: Checkpoint,
    common: u32,
    tolerances: &Tolerances,
) -> Comparison {
    let in_common = |recording: &dyn Recording| {
        let mut positions = recording.positions(checkpoint);
        positions.retain(|position| *position < common);
        positions
    };
    let tolerance = tolerances.of(checkpoint);
    let (ours, theirs) = (in_common(candidate), in_common(reference));
    let printed = reference.seen(checkpoint);
    if !printed.is_empty() && !ours.is_empty() {
        let mut partial = Partial::new(checkpoint, printed, tolerance);
        let mut row = Vec::new();
        let mut fits = |&position: &u32| {
            let row = candidate.row(checkpoint, position, &mut row);
            row.is_some_and(|row| partial.row(position, row))
        };
        let fits = ours.iter().all(&mut fits);
        let shapes = [candidate, reference].map(|side| shape_of(side, checkpoint));
        return finish_seen(checkpoint, fits, shapes, partial, &tolerance, u64::from(common));
    }
    let rows = [&ours[..], &theirs[..]];
    let status = match whole.has(checkpoint) && !ours.is_empty() && !theirs.is_empty() {
        true => of_steps([candidate, reference], whole, checkpoint, rows),
        false => match of_rows([candidate, reference], checkpoint, rows) {
            Status::Shape(..) if whole.is_another_node(checkpoint) => Status::OtherSteps(ours.len() as u64),
            status => status,
        },
    };
    let mut sums = Accumulator::new(tolerance);
    if matches!(status, Status::Compared | Status::MissingRows(_) | Status::OtherSteps(_)) {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let (both, alone): (Vec<u32>, Vec<u32>) = candidate
            .positions(checkpoint)
            .into_iter()
            .partition(|p| ours.binary_search(p).is_ok() && theirs.binary_search(p).is_ok());
        for position in alone {
            let row = candidate.row(checkpoint, position, &mut a);
            sums.count_unfinite(row.map_or(0, |row| Unfinite::of(row).total()));
        }
        for position in both {
            let ours = candidate.row(checkpoint, position, &mut a);
            let rows = ours.zip(reference.row(checkpoint, position, &mut b));
            match rows {
                Some((a, b)) if a.len() == b.len() => sums.row(position, a, b),
                // Of another step: it counts as what only one side has.
                Some((a, _)) => sums.count_unfinite(Unfinite::of(a).total()),
                None => {}
            }
        }
    }
    finish(checkpoint, status, candidate.row_shape(checkpoint), sums, &tolerance, u64::from(common))
}

/// How rows of tokens can be compared that each side has at such positions.
fn of_rows(sides: [&dyn Recording; 2], checkpoint: Checkpoint, [ours, theirs]: [&[u32]; 2]) -> Status {
    let [first, second] = sides.map(|side| side.row_shape(checkpoint));
    match Status::of(checkpoint, [ours.is_empty(), theirs.is_empty()], [&first, &second]) {
        Status::Compared => match theirs.iter().filter(|p| ours.binary_search(p).is_err()).count() {
            0 => Status::Compared,
            lacking => Status::MissingRows(lacking as u64),
        },
        other => other,
    }
}

/// As [`of_rows`], of a tensor that belongs to its step. Where widths differ it is no divergence by itself: a cache in one piece
/// or in several, states to go back to, and heads that are rotated make other tensors of the same computation, which each side's
/// own graph says and judges.
fn of_steps(
    sides: [&dyn Recording; 2],
    whole: &Whole,
    checkpoint: Checkpoint,
    [ours, theirs]: [&[u32]; 2],
) -> Status {
    let width = |side: &dyn Recording, position: u32| {
        side.row(checkpoint, position, &mut Vec::new()).map(<[f32]>::len)
    };
    let all: BTreeSet<u32> = ours.iter().chain(theirs).copied().collect();
    let (mut lacking, mut apart, mut in_another_form) = (0, 0, false);
    for position in all {
        let widths = sides.map(|side| width(side, position));
        let is_apart = whole.is_apart(checkpoint, position, [ours, theirs], widths);
        match widths {
            [Some(one), Some(other)] if one == other => {}
            [Some(one), Some(other)] => {
                if !is_apart && !whole.is_in_another_form(checkpoint, position, widths) {
                    return Status::Shape(vec![one], vec![other]);
                }
                (apart, in_another_form) = (apart + 1, true);
            }
            _ if is_apart => apart += 1,
            [None, Some(_)] => lacking += 1,
            [_, None] => {}
        }
    }
    match (lacking, apart) {
        (0, 0) => Status::Compared,
        // What is one tensor here and rows of tokens there lacks none of them.
        (lacking, apart) if in_another_form || lacking == 0 => Status::OtherSteps(apart),
        (lacking, _) => Status::MissingRows(lacking),
    }
}

/// Shape of one token row, whole or printed; none where there is neither.
fn shape_of(recording: &dyn Recording, checkpoint: Checkpoint) -> Vec<usize> {
    let whole = recording.row_shape(checkpoint);
    let printed = || recording.seen(checkpoint).first().map_or(Vec::new(), |part| part.row_shape.clone());
    if whole.is_empty() { printed() } else { whole }
}

/// [`finish`] of a comparison with printed values; `fits` says whether the rows had the same widths.
fn finish_seen(
    checkpoint: Checkpoint,
    fits: bool,
    [ours, theirs]: [Vec<usize>; 2],
    partial: Partial<'_>,
    tolerance: &Tolerance,
    rows_expected: u64,
) -> Comparison {
    let (sums, seen) = partial.finish();
    if !fits {
        let status = Status::Shape(ours.clone(), theirs);
        return finish(checkpoint, status, ours, Accumulator::default(), tolerance, rows_expected);
    }
    let compared = finish(checkpoint, Status::Compared, ours, sums, tolerance, rows_expected);
    Comparison { seen: Some(seen), ..compared }
}

/// Whether rows of these shapes hold the same elements. Heads may be written as one axis or as two, and the
/// attention matrices' rows grow with the position.
fn same_row(checkpoint: Checkpoint, a: &[usize], b: &[usize]) -> bool {
    let alike = a.len() != b.len() || a == b;
    checkpoint.kind().is_optional() || alike && a.iter().product::<usize>() == b.iter().product::<usize>()
}

/// Gives the place of the worst element of an attention matrix its axes, (H, T, S): rows are (H, position + 1),
/// so that a column means another element in each of them.
fn of_matrix(mut numbers: Numbers, cached: usize) -> Numbers {
    if let [position, column] = numbers.worst.index[..] {
        let seen = cached.min(position + 1).max(1);
        numbers.worst.index = vec![column / seen, position, column % seen];
    }
    numbers
}

fn finish(
    checkpoint: Checkpoint,
    status: Status,
    row_shape: Vec<usize>,
    sums: Accumulator,
    tolerance: &Tolerance,
    rows_expected: u64,
) -> Comparison {
    let within = (!tolerance.is_empty() && sums.n_rows() > 0).then(|| sums.within_tolerance());
    let rows_compared = sums.n_rows() as u64;
    let numbers = match (checkpoint.kind().is_optional(), &row_shape[..]) {
        (true, &[_, cached]) => sums.numbers(&[1]).map(|numbers| of_matrix(numbers, cached)),
        _ => sums.numbers(&row_shape),
    };
    Comparison {
        checkpoint,
        status,
        row_shape,
        numbers,
        within_tolerance: within,
        rows_compared,
        rows_expected,
        seen: None,
    }
}
