//! ROPE_BACK: pairs of channels rotated backwards: `y0 = x0·c + x1·s`, `y1 = x1·c - x0·s`.
//!
//! Sources, words, shapes and precision are those of ROPE: the sine has the other sign (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::{Check, Rule, rope};

pub const RULE: Rule = Rule {
    op: Op::RopeBack,
    formula: "pairs of channels (x0, x1) rotated backwards by an angle that grows with the position: y0 = \
        x0·cos a + x1·sin a, y1 = x1·cos a - x0·sin a",
    explained: "as much as of ROPE: 8·u·(|x0| + |x1|), u = 2^-24, and the angle's own error where its steps \
        are not followed",
    single: |args| rope::compute(args, -1.0),
    double: |args| rope::compute(args, -1.0),
    check: Check::Bound(rope::bound),
    carry: rope::carry,
};
