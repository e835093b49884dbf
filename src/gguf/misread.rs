//! Weights decoded wrongly, as engines do by mistake: the stored blocks are changed so that the right
//! decoder gives what the wrong one would.

use std::ops::Range;

use super::{DType, TensorInfo, TensorRef};
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

/// Blocks that one thread rewrites at a time.
const TASK: usize = 1 << 12;

/// Some rows as the mistaken reader has them: what describes them, and blocks of which the right decoder makes what the wrong one
/// makes of those that are stored. As stored where the type cannot be misread so.
///
/// # Panics
/// If there are fewer rows (a mistake in the caller, not in data).
pub fn read(how: Misreading, tensor: &TensorRef<'_>, rows: Range<usize>) -> (TensorInfo, Vec<u8>) {
    let (own, stored) = (tensor.info.dtype, tensor.row_bytes(rows.clone()));
    let layout = layout(own);
    let dtype = match (how, own) {
        (Misreading::OtherHalf, DType::F16) => DType::BF16,
        (Misreading::OtherHalf, DType::BF16) => DType::F16,
        // What nothing is subtracted from has a minimum, of zero.
        (Misreading::NoMinimum, DType::Q4_0) => DType::Q4_1,
        (Misreading::NoMinimum, DType::Q5_0) => DType::Q5_1,
        _ => own,
    };
    let (from, to) = (own.block_bytes(), dtype.block_bytes());
    let first = rows.start * tensor.info.row_len_bytes() / from;
    let mut bytes = vec![0; stored.len() / from * to];
    let tasks = bytes.par_chunks_mut(TASK * to).zip(stored.par_chunks(TASK * from)).enumerate();
    tasks.for_each(|(task, (bytes, stored))| {
        let both = bytes.chunks_exact_mut(to).zip(stored.chunks_exact(from)).enumerate();
        for (i, (block, stored)) in both {
            let (scale, rest) = stored.split_at(SCALE.min(from));
            block[..scale.len()].copy_from_slice(scale);
            block[to - rest.len()..].copy_from_slice(rest);
            if let Some(layout) = layout.as_ref().filter(|_| own == dtype) {
                change(how, layout, block, tensor.bytes, (first + task * TASK + i + 1) * from);
            }
        }
    });
    let shape = vec![rows.len(), tensor.cols()];
    (TensorInfo { dtype, shape, byte_len: bytes.len(), ..tensor.info.clone() }, bytes)
}

/// The same of rows in any order; `None` where there are none, or fewer.
pub fn gather(how: Misreading, tensor: &TensorRef<'_>, rows: &[usize]) -> Option<(TensorInfo, Vec<u8>)> {
    rows.iter().all(|row| *row < tensor.rows()).then_some(())?;
    let mut read = rows.iter().map(|&row| self::read(how, tensor, row..row + 1));
    let (first, mut bytes) = read.next()?;
    read.for_each(|(_, row)| bytes.extend(row));
    Some((TensorInfo { shape: vec![rows.len(), tensor.cols()], byte_len: bytes.len(), ..first }, bytes))
}

/// Bytes of a scale, which a minimum stands behind.
const SCALE: usize = size_of::<half::f16>();

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

/// Bytes of the longest unit.
const UNIT_MAX: usize = 64;

/// Byte i holds values i and i + n; the mistaken reader takes them for 2i and 2i + 1.
fn in_sequence(unit: &mut [u8]) {
    let n = unit.len();
    let mut read = [0; 2 * UNIT_MAX];
    for (values, byte) in read.chunks_exact_mut(2).zip(&*unit) {
        values.copy_from_slice(&[byte & 15, byte >> 4]);
    }
    for (i, byte) in unit.iter_mut().enumerate() {
        *byte = read[i] | (read[i + n] << 4);
    }
}
