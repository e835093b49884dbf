//! ROPE_BACK: pairs of channels rotated backwards: `y0 = x0·c + x1·s`, `y1 = x1·c - x0·s`.
//!
//! Sources, words, shapes and precision are those of ROPE: the sine has the other sign (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::{Check, Rule, rope};

pub const RULE: Rule = Rule {
    op: Op::RopeBack,
    formula: "pairs of channels rotated backwards by an angle that grows with the position",
    single: |args| rope::compute(args, -1.0),
    double: |args| rope::compute(args, -1.0),
    check: Check::Bound(rope::bound),
    carry: rope::carry,
    rows: rope::needed,
};
