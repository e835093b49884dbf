//! Every rule on cases that llama.cpp's own CPU kernels computed: `scripts/op-cases.py` made `cases.txt`.

mod cases;
mod facts;
mod properties;

use super::*;

/// Ops that have no rule yet. Views and leaves have none by nature.
const MISSING: &[Op] = &[
    Op::Argsort,
    Op::TopK,
    Op::MulMat,
    Op::MulMatId,
    Op::FlashAttn,
    Op::SsmConv,
    Op::SsmScan,
    Op::GatedDeltaNet,
    Op::LightningIndexer,
    Op::Dsv4HcComb,
    Op::Dsv4HcPre,
    Op::Dsv4HcPost,
];

#[test]
fn every_op_has_one_rule() {
    for (i, rule) in RULES.iter().enumerate() {
        assert!(RULES[i + 1..].iter().all(|other| other.op != rule.op), "{}", rule.op);
    }
    for op in Op::all().filter(|op| !op.is_view() && **op != Op::None) {
        assert_eq!(rule(op).is_none(), MISSING.contains(op), "{op}");
    }
}
