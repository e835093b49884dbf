//! Values that are rounded to a narrower type before they are read, moved to one side and to the other before that.
//!
//! One that lies near the middle between two numbers of the type falls to another one in few disturbed executions, and then
//! by a whole step: three executions do not show how far a row with one such value may be from the others. So how far
//! disturbed values lie from the exact ones is noted, and two more executions move all of them that far, down and up.

use std::cell::RefCell;
use std::collections::HashMap;

use parity_graph::Op;

use super::attentions::reads_cache;
use super::simulate::{Run, SCATTER};
use super::storage_types::is_product;
use super::stored::Narrowed;
use crate::arithmetic::round::{self, Rounding};
use crate::arithmetic::{Arithmetic, Flash};
use crate::ops::{Args, rounding_of};
use crate::tensor::View;

/// Rows of what a product reads that are kept to see how far disturbed ones lie from them: rows of a node are rounded alike.
const ROWS: usize = 16;

/// Values of a row that fall to another number, on average: where more do, each disturbed execution has many of them, and
/// shows by itself how far they move a row. Moved all to one side they would move it much further than rounding does.
const FEW: usize = 16;

/// Where a source is read: step, node and slot.
type Read = (usize, usize, usize);

/// Exact values, and how far at most disturbed ones lay from each.
type Apart = (Vec<f64>, Vec<f64>);

/// What is rounded before it is read, as the exact execution has it, and how far disturbed ones lay from that at most.
#[derive(Default)]
pub struct Aside {
    /// Of keys and values that are rounded to the type of a cache: each value.
    caches: RefCell<HashMap<Read, Apart>>,
    /// Of what meets a weight, or is multiplied in attention: the first rows, and the largest share of its size, by [`sizes`],
    /// that any value was off by.
    operands: RefCell<HashMap<Read, (Vec<f64>, f64)>>,
}

impl Aside {
    /// Whether there is anything to move.
    pub fn moves(&self) -> bool {
        !self.caches.borrow().is_empty() || self.operands.borrow().values().any(|(_, off)| *off > 0.0)
    }

    /// Notes what a node at `(step, node)` rounds before it reads it, or moves it.
    pub fn note(
        &self,
        (step, node): (usize, usize),
        how: Run,
        (op, args, arithmetic): (&Op, &Args<'_, f64>, &Arithmetic),
        narrowed: &mut Narrowed,
    ) {
        let cached = Narrowed::cached(op, args, arithmetic);
        let is_cached = |slot: usize| cached.iter().any(|(known, _)| *known == slot);
        let operands: Vec<(usize, Rounding)> =
            operands(op, args, arithmetic).into_iter().filter(|(slot, _)| !is_cached(*slot)).collect();
        for (slot, values) in cached {
            self.cached((step, node, slot), how, values, |moved| narrowed.put(slot, moved, arithmetic));
        }
        for (slot, rounding) in operands {
            let Some(source) = args.get(slot).filter(|_| rounding != Rounding::None) else { continue };
            let (shape, values) = (source.shape(), source.values());
            let rows = View::new(values.len() / shape[3].max(1), shape[3], &values);
            if let Some(moved) = self.operand((step, node, slot), how, rows, rounding) {
                narrowed.replace(slot, moved, shape);
            }
        }
    }

    /// Keys and values of a cache.
    fn cached(&self, read: Read, how: Run, values: Vec<f64>, put: impl FnOnce(Vec<f64>)) {
        let mut caches = self.caches.borrow_mut();
        match (how, caches.get_mut(&read)) {
            (Run::Exact, _) => {
                let none = vec![0.0; values.len()];
                caches.insert(read, (values, none));
            }
            (Run::Disturbed(_), Some((exact, apart))) => {
                let off = values.iter().zip(exact.iter()).map(|(value, exact)| (value - exact).abs());
                apart.iter_mut().zip(off).for_each(|(apart, off)| *apart = apart.max(off));
            }
            (Run::Aside(sign), Some((_, apart))) => {
                let moved = values.iter().zip(apart).map(|(value, apart)| value + sign * *apart);
                put(moved.collect());
            }
            (_, None) => {}
        }
    }

    /// What a product reads (R, K); in an execution that moves values aside, with those moved that fall to another number.
    fn operand(&self, read: Read, how: Run, x: View<'_, f64>, rounding: Rounding) -> Option<Vec<f64>> {
        let mut operands = self.operands.borrow_mut();
        match (how, operands.get_mut(&read)) {
            (Run::Exact, _) => {
                let kept = x.data.len().min(ROWS * x.cols);
                operands.insert(read, (x.data[..kept].to_vec(), 0.0));
                None
            }
            (Run::Disturbed(_), Some((exact, off))) => {
                let rows = exact.chunks(x.cols.max(1)).zip(x.data.chunks(x.cols.max(1)));
                let of = |(exact, row): (&[f64], &[f64])| {
                    let off = exact.iter().zip(row).zip(sizes(exact));
                    off.map(|((a, b), size)| (a - b).abs() / size).fold(0.0, f64::max)
                };
                *off = rows.map(of).fold(*off, f64::max);
                None
            }
            (Run::Aside(sign), Some((_, off))) if *off > 0.0 => fallen(x, sign * SCATTER * *off, rounding),
            _ => None,
        }
    }
}

/// What an op rounds before it multiplies, and to what: what meets a weight; queries, keys and values of an attention whose
/// operands are narrow.
fn operands(op: &Op, args: &Args<'_, f64>, arithmetic: &Arithmetic) -> Vec<(usize, Rounding)> {
    if is_product(op, args) {
        return args.get(0).map(|weight| (1, rounding_of(arithmetic, weight.dtype))).into_iter().collect();
    }
    let Flash::Rounded(narrow, of, _) = arithmetic.flash else { return Vec::new() };
    let slots = match op {
        Op::FlashAttn => 0..3,
        Op::MulMat if reads_cache(op, args) && of.is_whole() => 0..2,
        _ => 0..0,
    };
    slots.filter(|slot| of.read[*slot]).map(|slot| (slot, narrow.rounding())).collect()
}

/// What the error of each value of a row (K,) is in proportion to: the value, and the row's root mean square where the error
/// comes from sums. Above zero.
fn sizes(row: &[f64]) -> impl Iterator<Item = f64> {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len().max(1) as f64;
    row.iter().map(move |x| x.abs() + mean.sqrt() + f64::MIN_POSITIVE)
}

/// Rows (R, K), with those values moved by `off` of their size that are rounded to another number then; `None` where none
/// or more than [`FEW`] of a row are.
fn fallen(x: View<'_, f64>, off: f64, rounding: Rounding) -> Option<Vec<f64>> {
    let sized = x.data.chunks(x.cols.max(1)).flat_map(sizes);
    let moved: Vec<f64> = x.data.iter().zip(sized).map(|(value, size)| value + off * size).collect();
    let rounded =
        |values: &[f64]| round::activations(rounding, View::new(x.rows, x.cols, values)).values.data;
    let (before, after) = (rounded(x.data), rounded(&moved));
    let mut count = 0;
    let mut out = x.data.to_vec();
    for (((out, moved), before), after) in out.iter_mut().zip(moved).zip(before).zip(after) {
        // What moves with its block's scale stays as far apart as it was moved.
        if (after - before).abs() > SCATTER * (moved - *out).abs() {
            *out = moved;
            count += 1;
        }
    }
    (1..=FEW * x.rows).contains(&count).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of a block of Q8_K, the last of which lies a millionth below the middle between two quants.
    fn near_a_tie() -> Vec<f64> {
        let mut row: Vec<f64> = (0..256).map(|i| f64::from(i % 100)).collect();
        row[0] = 127.0;
        row[255] = 40.5 - 1e-6;
        row
    }

    #[test]
    fn a_value_near_the_middle_is_moved_to_the_other_side_and_no_other_is() {
        let row = near_a_tie();
        let moved = |off: f64| fallen(View::new(1, 256, &row), off, Rounding::Q8K);
        assert_eq!(moved(-1e-6), None);
        let up = moved(1e-6).expect("one value falls to another quant");
        assert!(up[255] > 40.5);
        assert_eq!(up[..255], row[..255]);
    }

    #[test]
    fn where_most_values_fall_to_another_number_none_is_moved() {
        let row = near_a_tie();
        assert_eq!(fallen(View::new(1, 256, &row), 0.1, Rounding::Q8K), None);
    }
}
