//! The launches of the kernel for Hopper's warpgroups.

use super::few::is_gate_up;
use super::{LinearArgs, LinearData, LinearPart, MULTIPROCESSORS, PARTS_MAX};
use crate::engine::cuda::calls::{Address, Call};

/// Columns of a step, and bytes of a row of it: TILE_COLUMNS and TILE_ROW_BYTES of kernels/warpgroup.cuh.
const STEP: usize = 64;
const ROW_BYTES: usize = 2 * STEP;
/// Multiprocessors of a large GPU that clusters find: one lies within a group of them, of which some stay alone.
const IN_CLUSTERS: usize = 120;
/// What a block's shared memory holds beside tiles: 2·HEAD of kernels/linear_warpgroup.cu.
const HEADS: usize = 2048;

/// A matrix of halves in device memory, as the copy engine is told of it before the driver encodes it: `TensorMap` of
/// kernels/warpgroup.cuh, as the CPU takes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct TensorMap {
    /// (rows, columns), a multiple of 16; 0 where there is none.
    pub matrix: Address,
    /// Rows.
    pub rows: u32,
    /// Columns, a multiple of 8.
    pub columns: u32,
    /// Rows that are brought at a time, of 64 columns each.
    pub box_rows: u32,
    rest: [u32; 27],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WarpgroupArgs {
    maps: [TensorMap; 1 + PARTS_MAX],
    linear: LinearArgs,
    constant: i32,
    /// To a multiple of 64.
    rest: [i32; WarpgroupArgs::REST],
}

impl WarpgroupArgs {
    const REST: usize = (64 - (size_of::<LinearArgs>() + 4) % 64) % 64 / 4;
}

/// A kernel: how its blocks share a product, and how long that takes.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Token rows and outputs of a tile.
    rows: usize,
    outputs: usize,
    /// Steps under way.
    stages: usize,
    /// Blocks that read the same rows of x, and of w.
    x: usize,
    w: usize,
    /// Blocks that share the columns of a tile.
    split: usize,
    /// Blocks that a multiprocessor holds at once.
    held: usize,
    /// Nanoseconds of a step of a block that has its multiprocessor to itself, of one among so many that all are full, and
    /// of all that is no step; measured on an H100.
    alone: f64,
    full: f64,
    around: f64,
}

/// LINEAR_WARPGROUP of kernels/linear_warpgroup.cu.
#[rustfmt::skip]
const SHAPES: [Shape; 7] = [
    Shape { rows: 128, outputs: 160, stages: 5, x: 2, w: 2, split: 1, held: 1, alone: 360.0, full: 360.0, around: 8000.0 },
    Shape { rows: 128, outputs: 128, stages: 3, x: 1, w: 2, split: 1, held: 2, alone: 496.0, full: 370.0, around: 7800.0 },
    Shape { rows: 128, outputs: 128, stages: 6, x: 1, w: 2, split: 4, held: 1, alone: 430.0, full: 430.0, around: 9000.0 },
    Shape { rows: 64, outputs: 128, stages: 4, x: 1, w: 2, split: 1, held: 2, alone: 266.0, full: 250.0, around: 7200.0 },
    Shape { rows: 64, outputs: 128, stages: 4, x: 1, w: 2, split: 2, held: 2, alone: 313.0, full: 300.0, around: 7500.0 },
    Shape { rows: 64, outputs: 64, stages: 6, x: 2, w: 2, split: 1, held: 2, alone: 182.0, full: 243.0, around: 6200.0 },
    Shape { rows: 64, outputs: 64, stages: 6, x: 1, w: 1, split: 4, held: 2, alone: 280.0, full: 257.0, around: 6400.0 },
];

impl Shape {
    fn name(self) -> String {
        let split = if self.split > 1 { format!("_{}", self.split) } else { String::new() };
        format!("linear_warpgroup_{}x{}{split}", self.rows, self.outputs)
    }

    /// Blocks, in whole clusters: of so many outputs, of which a tile has half as many where they are of gate and of up,
    /// and of the token rows.
    fn grid(self, rows: usize, outputs: usize, gate_up: bool) -> [usize; 2] {
        let width = if gate_up { self.outputs / 2 } else { self.outputs };
        let tiles = outputs.div_ceil(width).next_multiple_of(self.x);
        [tiles * self.split, rows.div_ceil(self.rows).next_multiple_of(self.w)]
    }

    fn shared(self) -> usize {
        HEADS + self.stages * (self.rows + self.outputs) * ROW_BYTES
    }

    /// Whether it can multiply gate and up at once.
    fn takes_pairs(self) -> bool {
        self.w == 2
    }

    fn call(self, parts: &[LinearPart], data: &LinearData, linear: LinearArgs) -> Call {
        let gate_up = is_gate_up(parts);
        let columns = parts[0].weight.columns as u32;
        let map = |matrix: Address, rows: usize, box_rows: usize| TensorMap {
            matrix,
            rows: rows as u32,
            columns,
            box_rows: box_rows as u32,
            ..TensorMap::default()
        };
        let mut maps = [TensorMap::default(); 1 + PARTS_MAX];
        maps[0] = map(data.x, data.rows, self.rows / self.x);
        for (to, part) in maps[1..].iter_mut().zip(parts) {
            *to = map(part.weight.address, part.weight.outputs, self.outputs / self.w);
        }
        let outputs = parts.iter().map(|part| part.weight.outputs).max().unwrap_or(0);
        let [x, y] = self.grid(data.rows, outputs, gate_up);
        let grid = [x, y, if gate_up { 1 } else { parts.len() }];
        let constant = i32::from(data.constant);
        let args = WarpgroupArgs { maps, linear, constant, rest: [0; WarpgroupArgs::REST] };
        let threads = (2 * self.rows + 32) as u32;
        Call::new(self.name(), grid, threads, args).sized(self.shared() as u32).mapped(maps.len())
    }

    /// Nanoseconds that the launch takes, roughly: the steps of the blocks that a multiprocessor gets, and what comes before
    /// and after those that it holds at once.
    fn cost(self, rows: usize, parts: &[LinearPart]) -> f64 {
        let gate_up = is_gate_up(parts);
        let weights = if gate_up { &parts[..1] } else { parts };
        let of = |part: &LinearPart| self.grid(rows, part.weight.outputs, gate_up).iter().product::<usize>();
        let blocks: usize = weights.iter().map(of).sum();
        let steps = parts[0].weight.columns.div_ceil(STEP).div_ceil(self.split) as f64;
        let turns = blocks.div_ceil(IN_CLUSTERS * self.held) as f64;
        let each = if self.held == 1 { turns } else { blocks as f64 / MULTIPROCESSORS as f64 };
        steps * self.alone.max(each * self.full) + turns * self.around
    }
}

/// The launch of `linear_warpgroup`, in the shape that takes the least time.
pub fn warpgroup(parts: &[LinearPart], data: &LinearData, linear: LinearArgs) -> Call {
    let cost = |shape: &Shape| shape.cost(data.rows, parts);
    let shape = shapes(parts).min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(SHAPES[0]);
    shape.call(parts, data, linear)
}

/// The launches of all shapes, of which [`warpgroup`] takes one.
pub fn in_every_shape(parts: &[LinearPart], data: &LinearData, linear: LinearArgs) -> Vec<Call> {
    shapes(parts).map(|shape| shape.call(parts, data, linear)).collect()
}

/// The shapes that can multiply with these weights.
fn shapes(parts: &[LinearPart]) -> impl Iterator<Item = Shape> {
    let gate_up = is_gate_up(parts);
    SHAPES.into_iter().filter(move |shape| shape.takes_pairs() || !gate_up)
}
