//! Weights decoded wrongly, as engines do by mistake: the stored blocks are changed so that the right
//! decoder gives what the wrong one would.

use std::ops::Range;

use super::{DType, TensorRef, decode};
use crate::scalar::{self, Scalar};
use parity_graph::rewrite::Misreading;
use rayon::prelude::*;

/// Where a block keeps its parts, in bytes from its start (`block_*` of ggml-common.h).
struct BlockLayout {
    /// Of the f16 scale of the block.
    scale: usize,
    /// Of the f16 minimum, or scale of the minima.
    minimum: Option<usize>,
    /// What is subtracted from every quant.
    offset: f64,
    /// Nibbles: first byte, bytes of one unit, units. The low nibbles of a unit are its first half.
    nibbles: Option<(usize, usize, usize)>,
    /// Bytes whose two high bits belong to the scales of later groups.
    high_scale_bits: Option<Range<usize>>,
}

fn layout(dtype: DType) -> Option<BlockLayout> {
    let block = |scale, minimum, offset, nibbles, high_scale_bits| BlockLayout {
        scale,
        minimum,
        offset,
        nibbles,
        high_scale_bits,
    };
    Some(match dtype {
        DType::Q4_0 => block(0, None, 8.0, Some((2, 16, 1)), None),
        DType::Q4_1 => block(0, Some(2), 0.0, Some((4, 16, 1)), None),
        DType::Q5_0 => block(0, None, 16.0, Some((6, 16, 1)), None),
        DType::Q5_1 => block(0, Some(2), 0.0, Some((8, 16, 1)), None),
        DType::Q8_0 => block(0, None, 0.0, None, None),
        DType::Q2_K => block(80, Some(82), 0.0, None, None),
        DType::Q3_K => block(108, None, 0.0, None, None),
        DType::Q4_K => block(0, Some(2), 0.0, Some((16, 32, 4)), Some(4..12)),
        DType::Q5_K => block(0, Some(2), 0.0, Some((48, 32, 4)), Some(4..12)),
        DType::Q6_K => block(208, None, 0.0, Some((0, 64, 2)), None),
        DType::IQ4_NL => block(0, None, 0.0, Some((2, 16, 1)), None),
        DType::IQ4_XS => block(0, None, 0.0, Some((8, 16, 8)), None),
        _ => return None,
    })
}

/// Whether a tensor of this type can be misread so.
pub fn applies(misreading: Misreading, dtype: DType) -> bool {
    if misreading == Misreading::OtherHalf {
        return matches!(dtype, DType::F16 | DType::BF16);
    }
    let Some(layout) = layout(dtype) else { return false };
    match misreading {
        Misreading::NibblesSwapped | Misreading::NibblesInSequence => layout.nibbles.is_some(),
        Misreading::NoMinimum => layout.minimum.is_some() || layout.offset != 0.0,
        Misreading::NeighbourScale => true,
        Misreading::LowScaleBits => layout.high_scale_bits.is_some(),
        Misreading::OtherHalf => false,
    }
}

/// Values of a weight that one thread decodes at a time.
const TASK: usize = 1 << 16;

/// All rows, decoded on all threads.
pub fn decode_all<S: Scalar>(misreading: Misreading, tensor: &TensorRef<'_>) -> Vec<S> {
    let width = tensor.cols().max(1);
    let (mut values, rows) = (scalar::zeros(tensor.info.elements()), TASK.div_ceil(width));
    values.par_chunks_mut(rows * width).enumerate().for_each(|(task, part)| {
        decode_rows(misreading, tensor, task * rows..task * rows + part.len() / width, part);
    });
    values
}

/// Some rows, one behind the other; `None` where there are fewer.
pub fn gather<S: Scalar>(misreading: Misreading, tensor: &TensorRef<'_>, rows: &[usize]) -> Option<Vec<S>> {
    let mut values = vec![S::ZERO; rows.len() * tensor.cols()];
    for (row, out) in rows.iter().zip(values.chunks_mut(tensor.cols().max(1))) {
        (*row < tensor.rows()).then(|| decode_rows(misreading, tensor, *row..row + 1, out))?;
    }
    Some(values)
}

/// Rows `rows` into `out`, (rows, cols); as stored where the type cannot be misread so.
pub fn decode_rows<S: Scalar>(
    misreading: Misreading,
    tensor: &TensorRef<'_>,
    rows: Range<usize>,
    out: &mut [S],
) {
    let dtype = tensor.info.dtype;
    let stored = tensor.row_bytes(rows.clone());
    match (misreading, dtype) {
        (Misreading::OtherHalf, DType::F16) => return decode(DType::BF16, stored, out),
        (Misreading::OtherHalf, DType::BF16) => return decode(DType::F16, stored, out),
        _ => {}
    }
    let Some(layout) = layout(dtype) else { return decode(dtype, stored, out) };
    let block_bytes = dtype.block_bytes();
    let mut bytes = stored.to_vec();
    for (index, block) in bytes.chunks_exact_mut(block_bytes).enumerate() {
        let next = rows.start * tensor.info.row_len_bytes() / block_bytes + index + 1;
        change(misreading, &layout, block, tensor.bytes, next * block_bytes);
    }
    decode(dtype, &bytes, out);
    if misreading == Misreading::NoMinimum && layout.offset != 0.0 {
        for (block, out) in bytes.chunks_exact(block_bytes).zip(out.chunks_exact_mut(dtype.block_len())) {
            let scale = half::f16::from_le_bytes([block[layout.scale], block[layout.scale + 1]]);
            let offset = S::from_f64(layout.offset * scale.to_f64());
            out.iter_mut().for_each(|value| *value += offset);
        }
    }
}

/// Changes one block; `next` is the byte in `all` at which the following block starts.
fn change(misreading: Misreading, layout: &BlockLayout, block: &mut [u8], all: &[u8], next: usize) {
    match misreading {
        Misreading::NibblesSwapped | Misreading::NibblesInSequence => {
            let Some((first, len, units)) = layout.nibbles else { return };
            for unit in block[first..first + len * units].chunks_exact_mut(len) {
                match misreading {
                    Misreading::NibblesSwapped => unit.iter_mut().for_each(|b| *b = b.rotate_left(4)),
                    _ => in_sequence(unit),
                }
            }
        }
        Misreading::NoMinimum => {
            if let Some(at) = layout.minimum {
                block[at..at + 2].fill(0);
            }
        }
        Misreading::NeighbourScale => {
            let from = if next < all.len() { next } else { 0 } + layout.scale;
            block[layout.scale..layout.scale + 2].copy_from_slice(&all[from..from + 2]);
        }
        Misreading::LowScaleBits => {
            if let Some(bytes) = layout.high_scale_bits.clone() {
                block[bytes].iter_mut().for_each(|byte| *byte &= 0x3f);
            }
        }
        Misreading::OtherHalf => {}
    }
}

/// Byte i holds values i and i + n; the mistaken reader takes them for 2i and 2i + 1.
fn in_sequence(unit: &mut [u8]) {
    let n = unit.len();
    let read: Vec<u8> = unit.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
    for (i, byte) in unit.iter_mut().enumerate() {
        *byte = read[i] | (read[i + n] << 4);
    }
}
