//! How far the values of a file are from those that they were made of, and what storing them in a type explains.

use rayon::prelude::*;
use serde::Serialize;

use super::view::View;
use crate::gguf::{DType, TensorRef};

/// Half a unit in the last place of each type, relative: what rounding to the nearest number changes at most.
const UNIT_F32: f64 = 1.0 / (1u64 << 24) as f64;
const UNIT_F16: f64 = 1.0 / (1u64 << 11) as f64;
const UNIT_BF16: f64 = 1.0 / (1u64 << 8) as f64;
/// Half the distance of the subnormal numbers of f16.
const SUBNORMAL_F16: f64 = 1.0 / (1u64 << 25) as f64;
/// Root mean square of an error that is as likely anywhere within half a step, in half steps: 1/sqrt(3).
const ROUNDED: f64 = 0.577_350_269_189_625_8;
/// By how much that may be more: the scale of a block is rounded too, and fitted to some values of it more than to
/// others. Every row of what llama.cpp quantises in thirteen types is within it (docs/porting.md).
const MARGIN: f64 = 2.0;

/// Values of rows against those that they were made of.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Distance {
    /// ‖a - b‖²
    #[serde(skip)]
    pub square: f64,
    /// ‖b‖²
    #[serde(skip)]
    pub size: f64,
    /// Largest |a - b|.
    pub max_abs: f64,
    /// Rows.
    pub rows: usize,
    /// Rows that the type of the file does not explain.
    pub rows_beyond: usize,
}

impl Distance {
    /// ‖a - b‖ / ‖b‖
    pub fn rel_l2(&self) -> f64 {
        if self.square == 0.0 { 0.0 } else { (self.square / self.size).sqrt() }
    }

    /// Whether the type explains all.
    pub fn is_explained(&self) -> bool {
        self.rows > 0 && self.rows_beyond == 0
    }

    /// Both together.
    #[must_use]
    pub fn and(self, other: Distance) -> Distance {
        Distance {
            square: self.square + other.square,
            size: self.size + other.size,
            // A NaN stays.
            max_abs: if self.max_abs >= other.max_abs || self.max_abs.is_nan() {
                self.max_abs
            } else {
                other.max_abs
            },
            rows: self.rows + other.rows,
            rows_beyond: self.rows_beyond + other.rows_beyond,
        }
    }
}

/// Rows that one task takes, about so many values.
const VALUES_AT_ONCE: usize = 1 << 16;

/// All rows of a slice of a tensor, which begins at row `first`, against a view of as many rows.
pub fn whole(tensor: TensorRef<'_>, first: usize, view: &View<'_>) -> Distance {
    let [rows, cols] = view.shape;
    let at_once = (VALUES_AT_ONCE / cols.max(1)).max(1);
    let starts: Vec<usize> = (0..rows).step_by(at_once).collect();
    let parts: Vec<Distance> = starts
        .into_par_iter()
        .map(|start| some(tensor, first, view, start..(start + at_once).min(rows)))
        .collect();
    // In the order of the rows, so that threads change no bit.
    parts.into_iter().fold(Distance::default(), Distance::and)
}

/// Some rows, which are given by their numbers in the view.
pub fn some(
    tensor: TensorRef<'_>,
    first: usize,
    view: &View<'_>,
    rows: impl IntoIterator<Item = usize>,
) -> Distance {
    let cols = view.shape[1];
    let (mut own, mut made_of) = (vec![0f32; cols], vec![0f32; cols]);
    rows.into_iter().fold(Distance::default(), |sum, row| {
        tensor.decode_rows(first + row..first + row + 1, &mut own);
        view.read(row, &mut made_of);
        sum.and(one(tensor.info.dtype, &own, &made_of))
    })
}

fn one(dtype: DType, own: &[f32], made_of: &[f32]) -> Distance {
    let (mut square, mut size, mut max_abs) = (0.0f64, 0.0f64, 0.0f64);
    for (a, b) in own.iter().zip(made_of) {
        let (a, b) = (f64::from(*a), f64::from(*b));
        let error = (a - b).abs();
        square += error * error;
        size += b * b;
        max_abs = if error > max_abs || error.is_nan() { error } else { max_abs };
    }
    let explained = square <= explained(dtype, made_of);
    Distance { square, size, max_abs, rows: 1, rows_beyond: usize::from(!explained) }
}

/// ‖what storing a row in a type may change of it‖²: of numbers half a unit in the last place of each, of blocks the
/// root mean square of half a step of the range that the largest value spans.
fn explained(dtype: DType, row: &[f32]) -> f64 {
    let each = |of: &dyn Fn(f64) -> f64| row.iter().map(|x| of(f64::from(*x)).powi(2)).sum();
    match dtype {
        DType::F64 => 0.0,
        DType::F32 => each(&|x| UNIT_F32 * x.abs()),
        DType::F16 => each(&|x| UNIT_F16 * x.abs() + SUBNORMAL_F16),
        DType::BF16 => each(&|x| UNIT_BF16 * x.abs()),
        _ => {
            let levels = f64::exp2(bits(dtype));
            let of_block = |block: &[f32]| {
                let largest = block.iter().fold(0f32, |max, x| max.max(x.abs()));
                let half_step = f64::from(largest) / levels;
                block.len() as f64 * (MARGIN * ROUNDED * half_step).powi(2)
            };
            row.chunks(of_one_scale(dtype)).map(of_block).sum()
        }
    }
}

/// Bits of a value, without what its block takes for scales.
fn bits(dtype: DType) -> f64 {
    match dtype {
        DType::Q4_1 => 4.0,
        DType::Q5_1 => 5.0,
        _ => dtype.bits_per_value().floor(),
    }
}

/// Values that share a scale: blocks of K types have several.
fn of_one_scale(dtype: DType) -> usize {
    match dtype {
        DType::Q2_K | DType::Q3_K | DType::Q6_K => 16,
        DType::Q4_K | DType::Q5_K | DType::IQ4_XS => 32,
        _ => dtype.block_len(),
    }
}

/// Rows of a sample: the first, the last, and some between.
pub fn sample(rows: usize) -> Vec<usize> {
    const ROWS: usize = 8;
    let mut chosen: Vec<usize> = (0..ROWS).map(|i| i * rows.saturating_sub(1) / (ROWS - 1)).collect();
    chosen.dedup();
    chosen
}
