//! Dumps in which one tensor is a little off that rounding in some arithmetic would explain, or that is only screened: what reads it
//! was computed from what it should be, and is not accused in its place.

use half::bf16;

use crate::support::edited::{self, MODEL};
use crate::support::program;
use crate::support::samples::sample;

/// Its values are rounded to this type.
const NUMERICS: [&str; 2] = ["--numerics", "bf16 storage=bf16 kv=bf16"];
const ROW: usize = 13;

/// What is done to a row.
#[derive(Clone, Copy, Debug)]
enum Off {
    /// All of it times so much.
    Row(f32),
    /// An element by so much of the tensor's root mean square.
    Element(usize, f64),
}

impl Off {
    fn apply(self, values: &mut [f32], width: usize) {
        let square = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / values.len() as f64;
        let row = &mut values[ROW * width..][..width];
        match self {
            Off::Row(times) => row.iter_mut().for_each(|x| *x = bf16::from_f32(*x * times).to_f32()),
            Off::Element(at, off) => {
                row[at] = bf16::from_f64(f64::from(row[at]) + off * square.sqrt()).to_f32();
            }
        }
    }
}

/// The first wrong checkpoint of a recording of so many tokens of which one tensor is off, and all that are wrong.
fn judged(tokens: usize, declares: bool, tensor: &str, off: Off) -> (String, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    edited::made(&dump, tokens, &NUMERICS);
    edited::edit(&dump, |name, shape, values| {
        if name == tensor {
            off.apply(values, shape[1..].iter().product());
        }
        true
    });
    if !declares {
        edited::undeclare(&dump);
    }
    let audited = program::audit(&dump, MODEL.as_ref(), &["--allow-missing"]);
    let origins = audited.report["origins"].as_array().unwrap().iter();
    (audited.first, origins.map(|id| id.as_str().unwrap().to_owned()).collect())
}

/// Of products and attention; what reads them computes in one step, and shows less than they do.
#[test]
fn what_reads_a_tensor_that_is_a_little_off_is_not_accused_for_it() {
    let cases = [
        ("blk.3.v_proj", Off::Row(1.0061)),
        ("blk.0.k_proj", Off::Row(1.0089)),
        ("blk.2.ffn_up", Off::Row(1.0065)),
        ("blk.2.ffn_up", Off::Element(108, 0.1)),
        ("blk.1.ffn_gate", Off::Element(10, 0.1)),
        ("blk.3.attn_ctx", Off::Element(181, 0.2)),
    ];
    let cases =
        cases.into_iter().flat_map(|case| [(20, true), (20, false), (64, false)].map(|how| (case, how)));
    for ((tensor, off), (tokens, declares)) in sample("tensors that are off", 6, cases) {
        let (first, origins) = judged(tokens, declares, tensor, off);
        assert_eq!((&*first, &*origins), (tensor, &[tensor.to_owned()][..]), "{off:?}, {tokens}, {declares}");
    }
}

/// What is itself off is told, and not what it reads.
#[test]
fn what_is_healthy_before_a_node_that_is_off_is_not_accused_for_it() {
    let cases = [
        ("blk.3.v", Off::Row(1.0089)),
        ("blk.2.ffn_act", Off::Element(108, 0.1)),
        ("blk.1.attn_residual", Off::Row(1.0089)),
        ("blk.0.q_rope", Off::Row(1.0089)),
    ];
    for (tensor, off) in sample("nodes that are off", 2, cases) {
        let (first, _) = judged(20, false, tensor, off);
        assert_eq!(first, tensor, "{off:?}");
    }
}
