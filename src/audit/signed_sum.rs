//! Signed sums of the outputs of a matmul: what a row of them has to add up to, at the cost of one output.

use std::ops::Range;

use rayon::prelude::*;

use crate::arithmetic::product::group_sums;
use crate::arithmetic::round::Tie;
use crate::numerics::Storage;
use crate::ops::bound::{CONFIDENCE, SUBNORMAL_F16, TINY_F32, UNIT_F32, accumulation, storage_unit};
use crate::random;
use crate::scalar::{Scalar, in_lanes, vectorized};
use crate::tensor::Matrix;

/// Outputs that one signed sum is taken over: one that is wrong stands out of the roundings of so many by as
/// many times as it exceeds the root of this times its own bound.
const OUTPUTS: usize = 2048;
/// Rows of a weight that are added up in f32: what that rounds is far below what a sum of products does.
const ADDED: usize = 16;

/// Ties of a row whose sides are all tried.
const TIES_MAX: usize = 6;

/// The signed sums of some rows of a matrix.
pub struct SignedSum {
    /// Rows of the matrix: outputs of the matmul.
    pub outputs: Range<usize>,
    /// By both r.
    signed: [Signed; 2],
    /// (I,) Σ_o w[o, i]²
    squares: Vec<f32>,
    /// (I/group,) Σ_o minimum[o, b]²
    minima_squares: Vec<f64>,
    /// Columns that share a minimum; 0 where there are none.
    group: usize,
    /// Whether what meets minima is summed apart from the quants.
    apart: bool,
}

/// A matrix as its producer multiplies it.
pub struct Rows<'a> {
    /// How many rows it has.
    pub count: usize,
    /// (I,) of each.
    pub cols: usize,
    /// Columns that share a minimum; 0 where there are none.
    pub group: usize,
    /// Whether what meets minima is summed apart from the quants, and given.
    pub apart: bool,
    /// Writes some rows.
    pub read: &'a (dyn Fn(Range<usize>, &mut [f32]) + Sync),
    /// Writes their minima, (rows, I/group).
    pub minima: &'a (dyn Fn(Range<usize>, &mut [f64]) + Sync),
}

/// What a producer rounds of outputs.
#[derive(Clone, Copy)]
pub struct Rounds {
    /// The unit roundoff of the type that sums are kept in.
    pub accumulator: f64,
    /// The type that outputs are kept in.
    pub kept: Storage,
}

impl Rounds {
    /// Sums in f32.
    pub fn of(kept: Storage) -> Rounds {
        Rounds { accumulator: UNIT_F32, kept }
    }
}

/// The sum by one r.
#[derive(Default)]
struct Signed {
    /// (outputs,) r
    factors: Vec<f32>,
    /// (I,) Σ_o r[o]·w[o, i]
    weights: Vec<f32>,
    /// (I/group,) Σ_o r[o]·minimum[o, b], where blocks have minima.
    minima: Vec<f64>,
}

/// Standard deviations, 1/√3 of a unit roundoff at most, that the factor of a row is held to by its signed sums.
const DEVIATIONS: f64 = CONFIDENCE / 1.732_050_807_568_877_2;

/// The largest factor of each r.
const LARGEST: [f64; 2] = [1.0, 1.5];

impl SignedSum {
    /// Of all rows of a matrix, by so many draws of both r: those of the first draw stand first.
    pub fn of(rows: &Rows<'_>, draws: usize) -> Vec<SignedSum> {
        let starts: Vec<usize> = (0..rows.count).step_by(OUTPUTS).collect();
        let end = |start: usize| (start + OUTPUTS).min(rows.count);
        let read = starts.into_par_iter().map(|start| SignedSum::drawn(rows, start..end(start), draws));
        let mut by_start: Vec<_> = read.map(Vec::into_iter).collect::<Vec<_>>();
        (0..draws).flat_map(|_| by_start.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()).collect()
    }

    /// Of some outputs, by all draws: a weight is decoded once for them.
    fn drawn(matrix: &Rows<'_>, outputs: Range<usize>, draws: usize) -> Vec<SignedSum> {
        let Rows { cols, group, apart, .. } = *matrix;
        let new = |draw: usize| {
            let factors = |r: usize| outputs.clone().map(|o| factor(2 * draw + r, o)).collect();
            let signed = [0, 1].map(|r| Signed { factors: factors(r), ..Signed::default() });
            let (squares, minima_squares) = (vec![0.0; cols], Vec::new());
            SignedSum { outputs: outputs.clone(), signed, squares, minima_squares, group, apart }
        };
        let mut sums: Vec<SignedSum> = (0..draws).map(new).collect();
        let mut weights = vec![[vec![0f64; cols], vec![0f64; cols]]; draws];
        f32::with_scratch(ADDED * cols, |rows| {
            for start in (0..outputs.len()).step_by(ADDED) {
                let end = (start + ADDED).min(outputs.len());
                let rows = &mut rows[..(end - start) * cols];
                (matrix.read)(outputs.start + start..outputs.start + end, rows);
                for (sum, weights) in sums.iter_mut().zip(&mut weights) {
                    let factors = [0, 1].map(|r| &sum.signed[r].factors[start..end]);
                    vectorized(
                        #[inline(always)]
                        || add_rows(rows, factors, weights, &mut sum.squares),
                    );
                }
            }
        });
        let groups = cols.checked_div(group).unwrap_or(0);
        let mut minima = vec![0.0; outputs.len() * groups];
        if groups > 0 {
            (matrix.minima)(outputs, &mut minima);
        }
        for (sum, weights) in sums.iter_mut().zip(weights) {
            for (signed, weights) in sum.signed.iter_mut().zip(weights) {
                signed.weights = weights.into_iter().map(|w| w as f32).collect();
            }
            sum.meet(&minima, groups);
        }
        sums
    }

    /// Adds the minima of its outputs, (outputs, groups).
    fn meet(&mut self, minima: &[f64], groups: usize) {
        self.minima_squares = vec![0.0; groups];
        self.signed.iter_mut().for_each(|signed| signed.minima = vec![0.0; groups]);
        for (o, minima) in minima.chunks_exact(groups.max(1)).enumerate() {
            for (b, minimum) in minima.iter().enumerate() {
                self.minima_squares[b] += minimum * minimum;
                for signed in &mut self.signed {
                    signed.minima[b] += f64::from(signed.factors[o]) * minimum;
                }
            }
        }
    }

    /// What those of a row come to: x (I,) rounded activations, `excess` what meets the minima, or nothing.
    fn expected(&self, x: &[f32], excess: &[f32]) -> [f64; 2] {
        self.signed.each_ref().map(|signed| {
            let met = signed.minima.iter().zip(excess).map(|(minimum, x)| minimum * f64::from(*x));
            dot(&signed.weights, x) + met.sum::<f64>()
        })
    }

    /// By how much those of a row of recorded outputs are off.
    pub fn off(&self, x: &[f32], excess: &[f32], recorded: &[f32]) -> [f64; 2] {
        let expected = self.expected(x, excess);
        let found = self.signed.each_ref().map(|s| dot(&s.factors, &recorded[self.outputs.clone()]));
        [found[0] - expected[0], found[1] - expected[1]]
    }

    /// What the exact one changes by where a tie is rounded to the other side.
    pub fn moved(&self, r: usize, tie: &Tie) -> f64 {
        let signed = &self.signed[r];
        let minimum = tie.col.checked_div(self.group).map_or(0.0, |group| signed.minima[group]);
        f64::from(signed.weights[tie.col]) * tie.value + minimum * tie.sum
    }

    /// Whether rounding explains an error: the bounds of the outputs in quadrature, since each
    /// is as many standard deviations of an independent error; and what the activations may be off by.
    pub fn explains(
        &self,
        r: usize,
        error: f64,
        rounds: &Rounds,
        (x, excess): (&[f32], &[f32]),
        steps: &[f64],
        recorded: &[f32],
    ) -> bool {
        let outputs = &recorded[self.outputs.clone()];
        let squares = vectorized(
            #[inline(always)]
            || in_lanes(outputs, outputs, |a, b| f64::from(a) * f64::from(b)),
        );
        let factor = LARGEST[r] * accumulation(x.len(), rounds.accumulator);
        let subnormal = if rounds.kept == Storage::F16 { SUBNORMAL_F16 } else { 0.0 };
        let tiny = (x.len() as f64).sqrt() * TINY_F32;
        let of_size = (factor + LARGEST[r] * storage_unit(rounds.kept)) * squares.sqrt()
            + LARGEST[r] * (subnormal + tiny) * (outputs.len() as f64).sqrt();
        let off = steps.iter().zip(&self.signed[r].weights).map(|(step, w)| (step * f64::from(*w)).powi(2));
        let of_size = of_size + CONFIDENCE * off.sum::<f64>().sqrt();
        // What is infinite explains nothing. The terms need not be looked at where what the outputs allow is enough.
        let within = |bound: f64| bound.is_finite() && error <= bound;
        within(of_size) || within(of_size + factor * self.terms(x, excess))
    }

    /// All terms of the outputs in quadrature, and what cancels between minima and quants.
    fn terms(&self, x: &[f32], excess: &[f32]) -> f64 {
        let x = Matrix::new(1, x.len(), x.iter().map(|&x| f64::from(x)).collect());
        let met = match self.apart {
            true => excess.iter().copied().map(f64::from).collect(),
            false if self.group > 0 => group_sums(&x, self.group).data,
            false => Vec::new(),
        };
        let cancelled: f64 = self.minima_squares.iter().zip(&met).map(|(w, met)| w * met * met).sum();
        let terms: f64 = self.squares.iter().zip(&x.data).map(|(w, x)| f64::from(*w) * x * x).sum();
        (terms + cancelled).sqrt()
    }
}

/// Whether rounding explains the signed sums of a row of recorded outputs: x (I,) rounded activations, which may be off
/// by `steps` (I,), or nothing; `excess` what meets the minima; `ties` activations that may be rounded to either side.
pub fn explained(
    sums: &[SignedSum],
    x: &[f32],
    excess: &[f32],
    ties: &[&Tie],
    recorded: &[f32],
    steps: &[f64],
    rounds: &Rounds,
) -> bool {
    if ties.len() > TIES_MAX || recorded.len() != sums.last().map_or(0, |sum| sum.outputs.end) {
        return false;
    }
    let errors: Vec<[f64; 2]> = sums.iter().map(|sum| sum.off(x, excess, recorded)).collect();
    // Some choice of sides explains all the sums.
    (0..1u32 << ties.len()).any(|sides| {
        let chosen: Vec<&&Tie> =
            ties.iter().enumerate().filter(|(i, _)| sides >> i & 1 == 1).map(|(_, tie)| tie).collect();
        sums.iter().zip(&errors).all(|(sum, errors)| {
            let moved = |r: usize| chosen.iter().map(|tie| sum.moved(r, tie)).sum::<f64>();
            (0..2)
                .all(|r| sum.explains(r, (errors[r] - moved(r)).abs(), rounds, (x, excess), steps, recorded))
        })
    })
}

/// Whether rounding explains what the sums of a row have in common: where all of it is off by one factor f, so is every
/// sum, and Σ expected·off = f·Σ expected². Outputs that are stored with a unit roundoff move that by this much, times the
/// size of the row, in every sum independently. What is beyond is only looked at more closely.
pub fn is_to_scale(sums: &[SignedSum], x: &[f32], excess: &[f32], recorded: &[f32], unit: f64) -> bool {
    let (mut common, mut squares) = (0.0, 0.0);
    for sum in sums {
        let (expected, off) = (sum.expected(x, excess), sum.off(x, excess, recorded));
        let outputs = &recorded[sum.outputs.clone()];
        let size: f64 = outputs.iter().map(|y| f64::from(*y).powi(2)).sum();
        for r in 0..2 {
            common += expected[r] * off[r];
            squares += (expected[r] * LARGEST[r]).powi(2) * size;
        }
    }
    // A NaN is not within.
    common.abs() <= DEVIATIONS * unit * squares.sqrt()
}

/// Σ a·b: so few products in f32 that what they round is far below what a sum of all does, the others in f64.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    vectorized(
        #[inline(always)]
        || {
            const LANES: usize = 8;
            const ADDED: usize = 8;
            let mut sums = [0f64; LANES];
            let ((chunks_a, rest_a), (chunks_b, rest_b)) =
                (a.as_chunks::<{ LANES * ADDED }>(), b.as_chunks::<{ LANES * ADDED }>());
            for (a, b) in chunks_a.iter().zip(chunks_b) {
                let mut some = [0f32; LANES];
                for i in 0..ADDED {
                    for lane in 0..LANES {
                        some[lane] += a[i * LANES + lane] * b[i * LANES + lane];
                    }
                }
                for lane in 0..LANES {
                    sums[lane] += f64::from(some[lane]);
                }
            }
            let rest: f64 = rest_a.iter().zip(rest_b).map(|(a, b)| f64::from(a * b)).sum();
            sums.iter().sum::<f64>() + rest
        },
    )
}

/// Adds rows (factors, I) to Σ r·w for both r and Σ w²: up to [`ADDED`] of them in f32.
#[inline(always)]
fn add_rows(rows: &[f32], factors: [&[f32]; 2], sums: &mut [Vec<f64>; 2], squares: &mut [f32]) {
    const LANES: usize = 16;
    let cols = squares.len();
    for start in (0..cols).step_by(LANES) {
        let width = LANES.min(cols - start);
        let (mut first, mut second, mut square) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for (row, (a, b)) in rows.chunks_exact(cols).zip(factors[0].iter().zip(factors[1])) {
            let mut last = [0f32; LANES];
            let w = match row[start..].first_chunk::<LANES>() {
                Some(w) => w,
                None => {
                    last[..width].copy_from_slice(&row[start..start + width]);
                    &last
                }
            };
            for lane in 0..LANES {
                first[lane] += a * w[lane];
                second[lane] += b * w[lane];
                square[lane] += w[lane] * w[lane];
            }
        }
        for lane in 0..width {
            sums[0][start + lane] += f64::from(first[lane]);
            sums[1][start + lane] += f64::from(second[lane]);
            squares[start + lane] += square[lane];
        }
    }
}

/// r[o]: ±1 for even r, ±[0.5, 1.5) in steps of 1/256 for odd ones; random bits.
pub fn factor(r: usize, o: usize) -> f32 {
    let key = (2 * o as u64 + (r % 2) as u64 + 1).wrapping_mul(random::GAMMA);
    // Of the first two r the draw is 0.
    let z = random::mixed(key ^ random::mixed((r / 2) as u64));
    let size = if r.is_multiple_of(2) { 1.0 } else { 0.5 + (z & 255) as f32 / 256.0 };
    if z >> 63 == 1 { size } else { -size }
}
