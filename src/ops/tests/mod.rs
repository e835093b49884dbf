//! Every rule on cases that llama.cpp's own CPU kernels computed: `scripts/op-cases.py` made `cases.txt`.

mod cases;
mod facts;
mod properties;

use super::*;

#[test]
fn every_op_has_one_rule() {
    for (i, rule) in RULES.iter().enumerate() {
        assert!(RULES[i + 1..].iter().all(|other| other.op != rule.op), "{}", rule.op);
    }
    for op in Op::all().filter(|op| !op.is_view() && **op != Op::None) {
        // Views and leaves compute nothing.
        assert!(rule(op).is_some(), "{op}");
    }
}
