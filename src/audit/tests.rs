//! Recordings of small graphs by hand: healthy, wrong, incomplete, with ops that nobody knows.

use std::path::Path;

use parity_graph::graph::contiguous as bytes;
use parity_graph::{Graph, Op, Params, Tensor as GraphTensor};

use std::collections::BTreeMap;

use super::*;

/// (1, 1, T, D) tensors: x and y are inputs, `sum` = x + y, `norm` = rms(sum), `strange` is an op without a rule,
/// `after` = strange + norm.
fn labelled(tokens: usize) -> Labelled {
    let mut params = Params::default();
    params.set_float(0, 1e-6);
    let tensor = |name: &str, op: Op, srcs: &[Id]| GraphTensor {
        name: name.into(),
        computed: op != Op::None,
        op,
        params,
        dtype: "f32".into(),
        ne: [4, tokens, 1, 1],
        nb: bytes("f32", [4, tokens, 1, 1]),
        srcs: srcs.iter().map(|&src| Some(src)).collect(),
        view: None,
        backend: None,
    };
    let tensors = vec![
        tensor("sum", Op::Add, &[4, 5]),
        tensor("norm", Op::RmsNorm, &[0]),
        tensor("strange", Op::Other("RWKV_WKV7".into()), &[1]),
        tensor("after", Op::Add, &[2, 1]),
        tensor("x", Op::None, &[]),
        tensor("y", Op::None, &[]),
    ];
    let id = |name: &str| Some(format!("blk.0.{name}").parse().unwrap());
    let labels = vec![id("sum"), id("norm"), id("strange"), id("after"), None, None];
    let leaf = |name: &str| Some(name.to_owned());
    let leaves = vec![None, None, None, None, leaf("x"), leaf("y")];
    Labelled::of(Graph { tensors, nodes: 4 }, labels, vec![Some(2); 6], leaves).unwrap()
}

/// Steps in memory.
#[derive(Default)]
struct Held(BTreeMap<(usize, String), Tensor>);

impl Steps for Held {
    fn positions(&self, step: usize) -> Vec<u32> {
        if step == 0 { vec![0, 1, 2] } else { vec![3] }
    }

    fn is_own_graph(&self) -> bool {
        true
    }

    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        self.0.get(&(step, checkpoint.to_string())).cloned()
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        let leaf = self.0.get(&(step, name.to_owned()))?;
        Some(leaf.values.iter().map(|&x| f64::from(x)).collect())
    }
}

/// A healthy recording of two steps, of 3 tokens and of 1.
fn healthy() -> Held {
    let mut held = Held::default();
    for (step, positions) in [(0, vec![0u32, 1, 2]), (1, vec![3])] {
        let n = positions.len();
        let mut put = |name: &str, values: Vec<f32>| {
            let tensor = Tensor { shape: vec![n, 4], positions: positions.clone(), values };
            held.0.insert((step, name.to_owned()), tensor);
        };
        let x: Vec<f32> = (0..n * 4).map(|i| 0.1 + i as f32 * 0.37).collect();
        let y: Vec<f32> = (0..n * 4).map(|i| 1.3 - i as f32 * 0.21).collect();
        let sum: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        let rms = |row: &[f32]| {
            let scale = 1.0 / (row.iter().map(|x| x * x).sum::<f32>() / 4.0 + 1e-6).sqrt();
            row.iter().map(|x| x * scale).collect::<Vec<f32>>()
        };
        let norm: Vec<f32> = sum.chunks(4).flat_map(rms).collect();
        let strange: Vec<f32> = norm.iter().map(|x| x.cos()).collect();
        put("blk.0.after", strange.iter().zip(&norm).map(|(a, b)| a + b).collect());
        for (name, values) in [("x", x), ("y", y)] {
            put(name, values);
        }
        for (name, values) in [("blk.0.sum", sum), ("blk.0.norm", norm), ("blk.0.strange", strange)] {
            put(name, values);
        }
    }
    held
}

fn found(held: &Held) -> Findings {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models/qwen2-tiny-py-F16.gguf");
    let gguf = Gguf::open(&path).unwrap();
    let (prefill, decode) = (labelled(3), labelled(1));
    let how = How { rows: AuditRows::default(), wants: &|_| true, diagnose: None, look: None, only: None };
    audit(held, &[(0, &prefill), (1, &decode)], &gguf, &how).unwrap()
}

fn at<'a>(findings: &'a Findings, name: &str) -> &'a Finding {
    &findings.nodes[&format!("blk.0.{name}").parse::<Checkpoint>().unwrap()]
}

#[test]
fn a_healthy_recording_is_healthy_and_what_has_no_rule_is_undecided_by_name() {
    let findings = found(&healthy());
    let order: Vec<String> = findings.order.iter().map(ToString::to_string).collect();
    assert_eq!(order, ["blk.0.sum", "blk.0.norm", "blk.0.strange", "blk.0.after"]);
    for name in ["sum", "norm", "after"] {
        let finding = at(&findings, name);
        let audit = finding.audit().unwrap();
        assert!(finding.is_healthy() && finding.undecided.is_none(), "{name}: {audit:?}");
        assert_eq!((finding.judged, audit.local.rows), (2, 4));
    }
    let strange = at(&findings, "strange");
    assert!(strange.audit().is_none() && strange.undecided.as_ref().unwrap().contains("RWKV_WKV7"));
    let said = findings.by_itself("reference");
    assert_eq!(said, "by itself the reference is healthy in 3 nodes, and 1 more could not be judged");
}

#[test]
fn a_wrong_value_is_one_origin_at_its_place() {
    let mut held = healthy();
    let norm = held.0.get_mut(&(0, "blk.0.norm".to_owned())).unwrap();
    norm.values[2 * 4 + 1] *= 1.0 + 1e-4;
    let findings = found(&held);
    let audit = at(&findings, "norm").audit().unwrap();
    assert!(!audit.is_healthy() && audit.local.worst == [2, 1] && audit.rows_beyond == [2], "{audit:?}");
    assert_eq!(findings.by_itself("candidate"), "by itself the candidate is wrong from blk.0.norm on");
    assert!(at(&findings, "sum").is_healthy());
    // What follows was computed from the value that it should be: it is no fault of its own, and says that the dump is wrong.
    assert!(at(&findings, "after").is_healthy());
    assert_eq!(at(&findings, "norm").contradicted_by, Some("blk.0.after".parse().unwrap()));
    // What was computed from the wrong value contradicts nothing, and what is neither is a second origin.
    for (off, is_healthy) in [(0.0, true), (1e-4, false)] {
        let mut held = healthy();
        let norm = held.0.get_mut(&(0, "blk.0.norm".to_owned())).unwrap();
        norm.values[2 * 4 + 1] *= 1.0 + 1e-4;
        let wrong = norm.values[2 * 4 + 1];
        let strange = held.0[&(0, "blk.0.strange".to_owned())].values[2 * 4 + 1];
        held.0.get_mut(&(0, "blk.0.after".to_owned())).unwrap().values[2 * 4 + 1] =
            (strange + wrong) * (1.0 + off);
        let findings = found(&held);
        let (norm, after) = (at(&findings, "norm"), at(&findings, "after"));
        assert_eq!((norm.is_healthy(), after.is_healthy()), (false, is_healthy));
        assert_eq!((norm.contradicted_by, after.contradicted_by), (None, None));
    }
}

#[test]
fn what_is_not_recorded_is_missing_and_named_where_it_is_needed() {
    let mut held = healthy();
    held.0.remove(&(1, "blk.0.strange".to_owned()));
    held.0.remove(&(0, "x".to_owned()));
    let findings = found(&held);
    assert!(at(&findings, "sum").undecided.as_ref().unwrap().contains("input x"));
    assert_eq!(at(&findings, "strange").unrecorded, 1);
    assert_eq!(at(&findings, "after").judged, 1);
    assert!(at(&findings, "after").undecided.as_ref().unwrap().contains("blk.0.strange"));
}

#[test]
fn what_is_not_recorded_is_bridged_and_a_mistake_behind_it_is_seen() {
    let mut held = healthy();
    held.0.remove(&(1, "blk.0.sum".to_owned()));
    let findings = found(&held);
    let (sum, norm) = (at(&findings, "sum"), at(&findings, "norm"));
    assert_eq!((sum.unrecorded, sum.judged, norm.judged), (1, 1, 2));
    assert!(norm.is_healthy() && norm.bridged.iter().map(ToString::to_string).eq(["blk.0.sum"]));
    held.0.get_mut(&(1, "blk.0.norm".to_owned())).unwrap().values[2] *= 1.0 + 1e-5;
    assert!(!at(&found(&held), "norm").is_healthy());
}

#[test]
fn a_nan_that_exact_arithmetic_has_too_is_healthy_and_any_other_is_not() {
    let mut held = healthy();
    for name in ["x", "blk.0.sum"] {
        held.0.get_mut(&(1, name.to_owned())).unwrap().values[1] = f32::INFINITY;
    }
    let findings = found(&held);
    let sum = at(&findings, "sum");
    assert!(sum.is_healthy() && sum.explained_nonfinite == 1 && sum.audit().unwrap().nonfinite == 0);
    held.0.get_mut(&(1, "blk.0.sum".to_owned())).unwrap().values[1] = f32::NAN;
    let audit = at(&found(&held), "sum").audit().unwrap();
    assert!(!audit.is_healthy() && audit.nonfinite == 1, "{audit:?}");
}
