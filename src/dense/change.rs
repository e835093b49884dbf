//! Applies injected mistakes to what a node reads and writes.

use half::{bf16, f16};

use super::{Inputs, Rows, Value, rope};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::edit::{Change, Edit, Limit};
use crate::model::graph::Node;
use crate::model::weights::Weight;
use crate::numerics::{Numerics, Storage};
use crate::random;
use crate::scalar::Scalar;
use crate::tensor::Matrix;

/// The node's inputs, copied only where an edit changes them.
pub(super) fn inputs<'a, S: Scalar>(
    node: &Node,
    gguf: &Gguf,
    inputs: &Inputs<'a, S>,
) -> Result<Vec<Value<'a, S>>> {
    let mut values: Vec<Value<'a, S>> = inputs.values.iter().map(|view| Value::Given(*view)).collect();
    for edit in &node.edits {
        let Edit::Input { index, change } = edit else { continue };
        let Some(value) = values.get_mut(*index) else { continue };
        let mut matrix = value.view().to_matrix();
        apply(change, gguf, &mut matrix, inputs.rows)?;
        *value = Value::Changed(matrix);
    }
    Ok(values)
}

/// Changes (rows, width) in place.
pub fn apply<S: Scalar>(change: &Change, gguf: &Gguf, matrix: &mut Matrix<S>, rows: Rows<'_>) -> Result<()> {
    match change {
        Change::Scale(factor) => each(matrix, |value| value * S::from_f64(*factor)),
        Change::Offset(offset) => each(matrix, |value| value + S::from_f64(*offset)),
        Change::Fill(constant) => each(matrix, |_| S::from_f64(*constant)),
        Change::AddVector { vector, times } => {
            add_vector(&Weight::find(gguf, vector)?, S::from_f64(*times), matrix)?;
        }
        Change::Rope(op) => {
            check(op.head_width > 0 && matrix.cols.is_multiple_of(op.head_width), "heads of RoPE's width")?;
            let freqs = op.freqs.as_ref().map(|freqs| Weight::find(gguf, freqs)).transpose()?;
            *matrix = rope::execute(op, freqs.as_ref(), matrix.view(), rows, &Numerics::default());
        }
        Change::Columns(from) => reorder_columns(from, matrix)?,
        Change::Gathered(from) => {
            check(from.iter().all(|&c| (c as usize) < matrix.cols), "columns of the row")?;
            let mut data = Vec::with_capacity(matrix.rows * from.len());
            (0..matrix.rows).for_each(|r| data.extend(from.iter().map(|&c| matrix.row(r)[c as usize])));
            *matrix = Matrix::new(matrix.rows, from.len(), data);
        }
        Change::Without(part) => {
            check(part.start <= part.end && part.end <= matrix.cols, "columns of the row")?;
            (0..matrix.rows).for_each(|r| matrix.row_mut(r)[part.clone()].fill(S::ZERO));
        }
        Change::RowsBehind(behind) => {
            for r in (*behind..matrix.rows).rev() {
                let source = (r - behind) * matrix.cols;
                matrix.data.copy_within(source..source + matrix.cols, r * matrix.cols);
            }
        }
        Change::FirstRow => {
            for r in 1..matrix.rows {
                matrix.data.copy_within(0..matrix.cols, r * matrix.cols);
            }
        }
        Change::HeadsFirst { heads } => heads_first(*heads, matrix)?,
        Change::Stride(stride) => restride(*stride, matrix),
        Change::Nan => {
            if let Some(last) = matrix.rows.checked_sub(1).filter(|_| matrix.cols > 0) {
                let column = matrix.cols / 2;
                matrix.row_mut(last)[column] = S::from_f64(f64::NAN);
            }
        }
        Change::Overflow(limit) => overflow(*limit, matrix),
        Change::Garbage => garbage(matrix),
        Change::Round(storage) => each(matrix, |value| round(*storage, value)),
        Change::Reinterpret { from, to } => each(matrix, |value| reinterpret(*from, *to, value)),
        Change::UnwrittenStep { held } => {
            let start = rows.steps.first().map_or(0, |step| step.start as usize);
            for row in start.max(1)..if start > 0 { matrix.rows } else { 0 } {
                match held {
                    true => {
                        let source = (start - 1) * matrix.cols;
                        matrix.data.copy_within(source..source + matrix.cols, row * matrix.cols);
                    }
                    false => matrix.row_mut(row).fill(S::ZERO),
                }
            }
        }
    }
    Ok(())
}

fn each<S: Scalar>(matrix: &mut Matrix<S>, f: impl Fn(S) -> S) {
    matrix.data.iter_mut().for_each(|value| *value = f(*value));
}

/// A change that does not fit the matrix is a mistake of whoever injected it.
fn check(fits: bool, expected: &str) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(Error::new("fault", "the injected change does not fit the value").expected(expected))
}

fn add_vector<S: Scalar>(vector: &Weight<'_>, times: S, matrix: &mut Matrix<S>) -> Result<()> {
    let vector: Vec<S> = vector.decode();
    check(vector.len() == matrix.cols, "a vector of the row's width")?;
    for row in matrix.data.chunks_exact_mut(matrix.cols.max(1)) {
        row.iter_mut().zip(&vector).for_each(|(x, v)| *x += times * *v);
    }
    Ok(())
}

fn reorder_columns<S: Scalar>(from: &[u32], matrix: &mut Matrix<S>) -> Result<()> {
    let known = from.len() == matrix.cols && from.iter().all(|&c| (c as usize) < matrix.cols);
    check(known, "one source for every column")?;
    let mut old = vec![S::ZERO; matrix.cols];
    for row in matrix.data.chunks_exact_mut(matrix.cols.max(1)) {
        old.copy_from_slice(row);
        row.iter_mut().zip(from).for_each(|(value, &c)| *value = old[c as usize]);
    }
    Ok(())
}

/// (T, H, E) laid out as (H, T, E) and read as (T, H, E).
fn heads_first<S: Scalar>(heads: usize, matrix: &mut Matrix<S>) -> Result<()> {
    check(heads > 0 && matrix.cols.is_multiple_of(heads), "a multiple of the heads")?;
    let width = matrix.cols / heads;
    let mut laid = Vec::with_capacity(matrix.data.len());
    for head in 0..heads {
        for t in 0..matrix.rows {
            laid.extend_from_slice(&matrix.row(t)[head * width..(head + 1) * width]);
        }
    }
    matrix.data = laid;
    Ok(())
}

/// What lies at r·cols + c in a buffer whose rows start `stride` apart.
fn restride<S: Scalar>(stride: usize, matrix: &mut Matrix<S>) {
    let cols = matrix.cols;
    let read = (0..matrix.data.len()).map(|at| {
        if stride >= cols {
            let (row, column) = (at / stride.max(1), at % stride.max(1));
            if column < cols { matrix.data[row * cols + column] } else { S::ZERO }
        } else {
            matrix.data[at / cols * stride + at % cols]
        }
    });
    matrix.data = read.collect();
}

fn overflow<S: Scalar>(limit: Limit, matrix: &mut Matrix<S>) {
    let magnitudes = matrix.data.iter().map(|value| value.to_f64().abs());
    let largest = magnitudes.filter(|m| m.is_finite()).fold(0.0, f64::max);
    let over = |magnitude: f64| match limit {
        Limit::Above(limit) => magnitude > limit,
        Limit::Largest => largest > 0.0 && magnitude >= largest,
    };
    each(matrix, |value| {
        let value_f64 = value.to_f64();
        if over(value_f64.abs()) { S::from_f64(f64::INFINITY.copysign(value_f64)) } else { value }
    });
}

/// Magnitudes of [`Change::Garbage`]: wide enough to look like nothing computed, narrow enough that the
/// later nodes do not overflow f32.
const GARBAGE_EXPONENTS: (i32, u64) = (-60, 72);

/// Fills the last row from a fixed sequence.
fn garbage<S: Scalar>(matrix: &mut Matrix<S>) {
    let Some(last) = matrix.rows.checked_sub(1) else { return };
    let mut state = random::GAMMA;
    for value in matrix.row_mut(last) {
        state = state.wrapping_add(random::GAMMA);
        let bits = random::mixed(state);
        let exponent = GARBAGE_EXPONENTS.0 + ((bits >> 8) % GARBAGE_EXPONENTS.1) as i32;
        let mantissa = 1.0 + f64::from((bits >> 40) as u32) / f64::from(1u32 << 24);
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        *value = S::from_f64(sign * mantissa * f64::from(exponent).exp2());
    }
}

fn round<S: Scalar>(storage: Storage, value: S) -> S {
    match storage {
        Storage::F32 => S::from_f32(value.to_f32()),
        Storage::F16 => S::from_f32(f16::from_f64(value.to_f64()).to_f32()),
        Storage::Bf16 => S::from_f32(bf16::from_f64(value.to_f64()).to_f32()),
    }
}

/// The 16 bits of one type taken for those of another; f32 is left alone.
fn reinterpret<S: Scalar>(from: Storage, to: Storage, value: S) -> S {
    let bits = match from {
        Storage::F16 => f16::from_f64(value.to_f64()).to_bits(),
        Storage::Bf16 => bf16::from_f64(value.to_f64()).to_bits(),
        Storage::F32 => return value,
    };
    match to {
        Storage::F16 => S::from_f32(f16::from_bits(bits).to_f32()),
        Storage::Bf16 => S::from_f32(bf16::from_bits(bits).to_f32()),
        Storage::F32 => value,
    }
}
