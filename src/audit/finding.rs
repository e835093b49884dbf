//! What was found at a node over all steps: the worst of them counts.

use std::collections::BTreeSet;

use indexmap::IndexSet;

use super::best::Simulated;
use super::named::{Agreed, Names};
use super::node::Held;
use super::past_faults::{Beside, Overwritten};
use super::rows::Arrangement;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::Unknown;
use crate::ops::bound::{HEALTHY, UNIT_F32};
use crate::report::{Diagnosis, LocalError, Tried};

/// The faintest mistake of the catalogue that is none of rounding, a wrong epsilon in one norm, moves the logits of the
/// models that ship with parity by this much; the next ones by 8e-3 and more (`docs/verdicts.md`).
const FAINTEST: f64 = 5.6e-4;
/// The next ones.
const NEXT: f64 = 8e-3;
/// A band up to which such a mistake stands out.
pub const SHARP: f64 = FAINTEST / 2.0;
/// A band up to which all but that one do.
const SHARP_ENOUGH: f64 = NEXT / 2.0;

/// What an audit found at one node.
#[derive(Clone, Debug)]
pub struct NodeAudit {
    /// Distance from exact arithmetic.
    pub local: LocalError,
    /// NaN and Inf in the rows looked at.
    pub nonfinite: u64,
    /// Token rows where the error is beyond its bound, by position.
    pub rows_beyond: Vec<u32>,
}

impl NodeAudit {
    /// Whether rounding explains the node's output.
    pub fn is_healthy(&self) -> bool {
        self.local.over_bound <= HEALTHY
    }
}

/// Most mistakes move a node by a tenth or more (`docs/verdicts.md`): half of that may be rounding in an engine whose type
/// is narrower than f32, between two recorded nodes. The answer says that less than this is not seen.
pub const MISTAKES_SHOW: f64 = 0.1 / 2.0;

/// How much of a node a cache of eight bits is off by at most: half of that of most mistakes, three times (of fp8 with two bits of
/// mantissa 0.13 was measured).
pub const OF_EIGHT_BITS: f64 = 3.0 * MISTAKES_SHOW;

/// How much of a node may be rounding, in an engine of this unit roundoff, so that mistakes still show. One that declares a
/// `narrow_cache` says by that that more of it is.
pub fn most(unit: f64, narrow_cache: bool) -> f64 {
    match narrow_cache {
        _ if unit > UNIT_F32 => MISTAKES_SHOW,
        true => SHARP_ENOUGH,
        false => SHARP,
    }
}

/// A near-tie of a discrete node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NearTie {
    /// Token position.
    pub position: u32,
    /// By how much the values that were chosen fall short.
    pub margin: f64,
    /// Up to what that is rounding.
    pub near: f64,
}

/// What stands among the arithmetics of a node that was simulated.
const SIMULATED: &str = "what rounding explains between the recorded nodes was simulated";

/// What was found at one node.
#[derive(Clone, Debug, Default)]
pub struct Finding {
    /// In how many steps it was judged.
    pub judged: usize,
    /// What is missing in a step where it could not be judged.
    pub undecided: Option<String>,
    /// What of steps that the recording lacks it reads, where that kept it from being judged in a step.
    pub lost: Option<String>,
    /// Why there was no time left to judge it in every step, or by all that may explain it.
    pub late: Option<&'static str>,
    /// Whether it was not recorded where what it reads is of such steps.
    pub is_behind_lost: bool,
    /// In how many steps it was computed and not recorded.
    pub unrecorded: usize,
    /// Shape of one recorded row.
    pub row_shape: Vec<usize>,
    /// What the producer's arithmetic was, where it was not the usual one.
    pub arithmetic: BTreeSet<&'static str>,
    /// Every arithmetic that explains it in some step.
    pub computed_in: BTreeSet<&'static str>,
    /// Rows of a discrete node where rounding decides.
    pub near_ties: Vec<NearTie>,
    /// Positions of rows whose operands were rounded, where those of others of the same step were not.
    pub rounded_rows: BTreeSet<u32>,
    /// NaN and Inf that exact arithmetic has too.
    pub explained_nonfinite: u64,
    /// Nodes that were not recorded and computed again for it.
    pub bridged: IndexSet<Checkpoint>,
    /// A row that is not as wide as the graph's: its shape, and that width.
    pub misshapen: Option<(Vec<usize>, usize)>,
    /// A node that reads it and was computed from what it should be, where it is wrong.
    pub contradicted_by: Option<Checkpoint>,
    /// What stands in its place then.
    pub overwritten: Option<Overwritten>,
    /// What is not right, or not known to be, where the recording is wrong here.
    pub beside: Option<Beside>,
    /// What it needs to be judged where it is wrong and no mistake has its name.
    pub needs: Option<&'static str>,
    /// Whether simulated rounding explains a step of it that was looked at for its name.
    pub was_healthy: bool,
    /// Mistakes that explain it in every step in which rounding does not; `None` where it was never suspicious.
    diagnosis: Option<Agreed>,
    squares: [f64; 3],
    over: f64,
    worst: Vec<usize>,
    at_worst: Option<[f64; 2]>,
    /// The coarsest type that its values were taken to be kept in: its unit roundoff.
    pub unit: f64,
    /// Whether it was simulated with keys and values in a narrower type than others, as the recording declares it.
    narrow_cache: bool,
    /// Whether it was simulated in an arithmetic that nothing shows to be the producer's.
    is_of_unknown: bool,
    rows: u64,
    screened: u64,
    rows_beyond: BTreeSet<u32>,
    nonfinite: u64,
    uneven: f64,
}

impl Finding {
    /// Adds a step, in which `rows` token rows were recorded.
    pub fn add(&mut self, held: Held, arranged: &Arrangement, rows: usize) {
        self.judged += 1;
        for (sum, square) in self.squares.iter_mut().zip(held.squares) {
            *sum += square;
        }
        if self.worst.is_empty() || !(held.over <= self.over) && !self.over.is_nan() {
            (self.over, self.worst, self.at_worst) = (held.over, arranged.index(held.worst), held.at_worst);
        }
        self.rows += rows.saturating_sub(held.screened) as u64;
        self.screened += held.screened as u64;
        self.unit = self.unit.max(held.unit);
        self.uneven = self.uneven.max(held.uneven);
        // Where nothing fits, these are all elements: one after the other they lie in the same row.
        let mut beyond: Vec<u32> = held.beyond.iter().map(|&element| arranged.position(element)).collect();
        beyond.dedup();
        self.rows_beyond.extend(beyond);
        self.rounded_rows.extend(held.rounded.iter().map(|&element| arranged.position(element)));
        self.nonfinite += held.nonfinite;
        self.explained_nonfinite += held.explained_nonfinite;
        self.arithmetic.extend(held.arithmetic);
        self.computed_in.extend(held.computed_in);
        let [_, b, c, d] = arranged.extents();
        self.near_ties.extend(held.near_ties.iter().map(|choice| {
            let [i, j, k] = choice.row;
            let position = arranged.position(((i * b + j) * c + k) * d);
            NearTie { position, margin: choice.margin, near: choice.near }
        }));
    }

    /// Notes that its kernel would be another one than that of all nodes of its kind, which is known.
    pub fn is_other_kernel(&mut self, over: f64) {
        self.over = self.over.max(over);
    }

    /// Whether rows of these positions are beyond their bounds.
    pub fn is_beyond_in(&self, positions: &[u32]) -> bool {
        positions.iter().any(|position| self.rows_beyond.contains(position))
    }

    /// How many times as far off its furthest row is as the usual one of those that are off, at most of any step.
    pub fn uneven(&self) -> f64 {
        self.uneven
    }

    /// How many rows are beyond their bounds.
    pub fn rows_beyond(&self) -> usize {
        self.rows_beyond.len()
    }

    /// Whether one row is beyond its bound, of several that were judged.
    pub fn is_beyond_in_one_of_many(&self) -> bool {
        self.rows_beyond.len() == 1 && self.rows + self.screened > 1
    }

    /// Takes the names of what is wrong with it.
    pub fn named_as(&mut self, other: Finding) {
        self.diagnosis = other.diagnosis.or(self.diagnosis.take());
    }

    /// Takes back what it was named.
    pub fn forget_names(&mut self) {
        self.diagnosis = None;
    }

    /// Adds what a diagnosis says of it in a step.
    pub fn diagnosed(&mut self, names: Names) {
        self.diagnosis = Some(Agreed::with(self.diagnosis.take(), names));
    }

    /// Whether the mistakes that explain it are in nodes before it that were not recorded.
    pub fn is_named_out_of_sight(&self) -> bool {
        self.diagnosis.as_ref().is_some_and(|agreed| agreed.out_of_sight)
    }

    /// Mistakes that explain it, the likeliest first, and what was tried where there are none.
    pub fn diagnosis(&self) -> (&[Diagnosis], &[Tried]) {
        self.diagnosis.as_ref().map_or((&[], &[]), Agreed::names)
    }

    /// The mistakes that explain the steps so far, as they are injected.
    pub fn spellings(&self) -> Vec<String> {
        self.diagnosis.as_ref().map_or_else(Vec::new, Agreed::spellings)
    }

    /// What its error looks like, where no mistake explains it.
    pub fn residual(&self) -> Option<String> {
        self.diagnosis.as_ref().and_then(Agreed::residual).map(str::to_owned)
    }

    /// Takes what a simulation says of it in place of the worst case.
    pub fn settle(&mut self, simulated: Simulated) {
        let Simulated { distance, band, over, position, unit, named, declares_cache, known, .. } = simulated;
        // An arithmetic that nobody declared, and that no other node needs, may as well be a mistake.
        (self.unit, self.narrow_cache) = (if known { unit } else { UNIT_F32 }, declares_cache);
        self.is_of_unknown = !known;
        self.squares = [distance.powi(2), 1.0, band.powi(2)];
        (self.over, self.worst, self.at_worst) = (over, vec![position as usize], None);
        self.rows_beyond = if over <= HEALTHY { BTreeSet::new() } else { BTreeSet::from([position]) };
        self.arithmetic.insert(SIMULATED);
        self.computed_in = named.into_iter().collect();
        self.arithmetic.extend(&self.computed_in);
    }

    /// Takes what was simulated for what rounding explains of it, relative.
    pub fn narrow(&mut self, band: f64) {
        let [_, values, bounds] = &mut self.squares;
        *bounds = band.powi(2) * *values;
        self.arithmetic.insert("what rounding explains of it was simulated");
    }

    /// Notes that nothing but this attention before it explains it.
    pub fn only_with(&mut self, attention: &'static str) {
        self.computed_in.insert(attention);
        self.arithmetic.insert(attention);
    }

    /// Whether simulated rounding of an arithmetic coarser than f32 explains it.
    pub fn is_simulated_coarsely(&self) -> bool {
        self.is_healthy() && self.unit > UNIT_F32 && self.arithmetic.contains(SIMULATED)
    }

    /// Whether nothing but an arithmetic explains it that nothing shows to be the producer's.
    pub fn is_of_unknown(&self) -> bool {
        self.is_of_unknown
    }

    /// What rounding explains of it, relative; `None` where it is not known.
    pub fn band(&self) -> Option<f64> {
        self.audit()?.local.bound_rel_l2
    }

    /// Whether what rounding explains of nodes that were crossed to it is as much as mistakes come to. Attention matrices
    /// are left out of recordings as a rule: one op lies between them and what is recorded.
    pub fn is_blind(&self) -> bool {
        let crossed = self.bridged.iter().any(|id| !id.kind().is_optional());
        crossed && self.is_healthy() && self.band().is_some_and(|band| !(band <= self.most()))
    }

    /// Whether it is known to be wrong or healthy. Whose bound is so wide that it hides mistakes is neither.
    pub fn is_certain(&self) -> bool {
        self.is_wrong() || self.judged > 0 && !self.is_blind()
    }

    /// How much of such a node may be a mistake, relative: what rounding explains of it. Where the arithmetic is the engine's, no more
    /// than what its error does not show. `None` where that is too little for one.
    pub fn hidden(&self) -> Option<f64> {
        let local = self.audit().filter(|_| self.is_blind())?.local;
        let band = local.bound_rel_l2?;
        let hidden = if self.is_of_unknown { band } else { local.hides()?.min(band) };
        Some(hidden).filter(|hidden| !(*hidden <= self.most()))
    }

    fn most(&self) -> f64 {
        most(self.unit, self.narrow_cache)
    }

    /// The same node, not judged for want of something.
    pub fn as_undecided(&self, needs: &str) -> Finding {
        let undecided = Some(needs.to_owned());
        Finding { undecided, row_shape: self.row_shape.clone(), ..Finding::default() }
    }

    /// Notes a step in which it could not be judged; the first reason is kept.
    pub fn cannot(&mut self, why: &str) {
        self.undecided.get_or_insert_with(|| why.to_owned());
    }

    /// Notes that it was recorded in another shape than its graph's, where a row has so many values; and what is unknown then.
    pub fn does_not_fit(
        &mut self,
        checkpoint: Checkpoint,
        shape: &[usize],
        expected: Option<usize>,
    ) -> Unknown {
        let found = format!("{checkpoint} in its graph's shape: {shape:?} is recorded");
        self.cannot(&found);
        let row = shape.get(1..).unwrap_or_default();
        let width = expected.filter(|width| row.iter().product::<usize>() != *width);
        if let Some(width) = width.filter(|_| !checkpoint.kind().is_optional()) {
            self.misshapen = Some((row.to_vec(), width));
        }
        Unknown::new(found)
    }

    /// Notes a step in which it could not be judged since it reads what is lost; the last one tells all of that.
    pub fn lost(&mut self, what: &str) {
        self.lost = Some(what.to_owned());
    }

    /// Takes back whatever was found, and says what judging it would need.
    pub fn give_up(&mut self, why: &str) {
        *self = Finding {
            undecided: Some(why.to_owned()),
            row_shape: std::mem::take(&mut self.row_shape),
            unrecorded: self.unrecorded,
            ..Finding::default()
        };
    }

    /// In numbers; `None` where it was judged in no step.
    pub fn audit(&self) -> Option<NodeAudit> {
        let [errors, values, bounds] = self.squares.map(f64::sqrt);
        let local = LocalError {
            rel_l2: if errors == 0.0 { 0.0 } else { errors / values },
            over_bound: self.over,
            bound_rel_l2: Some(bounds / values).filter(|ratio| ratio.is_finite()),
            rel_l2_plain: None,
            worst: self.worst.clone(),
            worst_recorded: self.at_worst.map(|[recorded, _]| recorded),
            worst_exact: self.at_worst.map(|[_, exact]| exact),
            rows: self.rows,
            bridged: self.bridged.iter().copied().collect(),
            arithmetic: self.computed_in.iter().map(ToString::to_string).collect(),
        };
        (self.judged > 0).then(|| NodeAudit {
            local,
            nonfinite: self.nonfinite,
            rows_beyond: self.rows_beyond.iter().copied().collect(),
        })
    }

    /// Whether it has NaN or Inf that exact arithmetic does not have.
    pub fn has_nonfinite(&self) -> bool {
        self.nonfinite > 0
    }

    /// Token rows that were screened.
    pub fn rows_screened(&self) -> u64 {
        self.screened
    }

    /// The largest error over its bound.
    pub fn over(&self) -> f64 {
        self.over
    }

    /// Whether it was judged and rounding does not explain it.
    pub fn is_wrong(&self) -> bool {
        self.judged > 0 && !self.is_healthy()
    }

    /// Whether rounding explains what was judged of it.
    pub fn is_healthy(&self) -> bool {
        self.over <= HEALTHY
    }
}
