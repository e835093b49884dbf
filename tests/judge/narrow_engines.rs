//! Engines that keep everything in f16 or bf16 and round more than results: healthy ones are not accused, and what is wrong
//! in them is found. What they round is written down here as they do it, and not as parity allows for it.

use std::path::Path;

use half::{bf16, f16};
use parity::checkpoint::Checkpoint;
use parity::ops::Args;
use parity_dump::Element;

use crate::support::edited::undeclare;
use crate::support::graphs::record::{Mistake, record_as};
use crate::support::graphs::{fill_with, head, recorded};
use crate::support::program::{answer, audit};

/// To the nearest number of a type.
type Round = fn(f32) -> f32;

/// What an audit says of an engine whose nodes are `mistake`'s where it has any: exit code, and the first checkpoint that
/// is wrong.
fn audited(kept: Element, mistake: Mistake<'_>) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let (model, dump) = (folder.path().join("model.gguf"), folder.path().join("dump"));
    let half: Round = |x| f16::from_f32(x).to_f32();
    let brain: Round = |x| bf16::from_f32(x).to_f32();
    fill_with(&head("qwen2-dense"), &model, if kept == Element::F16 { half } else { brain });
    record_as(&model, &recorded("qwen2-dense", ""), &dump, kept, mistake);
    let audited = audit(&dump, &model, &["--allow-missing"]);
    (audited.code, audited.first)
}

/// A row divided by the root of its mean square and an epsilon, as `rms_norm` of candle-nn has it: mean and root in f32,
/// the root rounded, and every quotient.
fn divided(args: &Args<'_, f64>, epsilon: impl Fn(f32) -> f32, round: Round) -> Vec<f64> {
    let x: Vec<f32> = args.get(0).unwrap().values().iter().map(|x| *x as f32).collect();
    let mut out = Vec::new();
    for row in x.chunks(args.shape[3]) {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let root = round((mean + epsilon(mean)).sqrt());
        out.extend(row.iter().map(|x| f64::from(round(x / root))));
    }
    out
}

fn is_norm(id: Checkpoint) -> bool {
    let name = id.to_string();
    name == "norm" || name.ends_with(".norm") || name.ends_with(".norm#2")
}

#[test]
fn a_norm_may_round_its_root() {
    let kinds: [(Element, Round); 2] =
        [(Element::F16, |x| f16::from_f32(x).to_f32()), (Element::Bf16, |x| bf16::from_f32(x).to_f32())];
    for (kept, round) in kinds {
        let healthy =
            audited(kept, &|id, args| is_norm(id).then(|| divided(args, |_| args.params.float(0), round)));
        assert_eq!(healthy, (0, String::new()), "{kept:?}");
    }
}

#[test]
fn what_is_wrong_in_such_a_norm_is_found() {
    let round: Round = |x| f16::from_f32(x).to_f32();
    // An epsilon of a hundredth of the mean square: ten steps of f16.
    let epsilon = audited(Element::F16, &|id, args| {
        let wrong = id.to_string() == "blk.1.norm";
        is_norm(id)
            .then(|| divided(args, |mean| if wrong { mean / 100.0 } else { args.params.float(0) }, round))
    });
    assert_eq!(epsilon, (1, "blk.1.attn_norm".to_owned()));
    let no_weight = audited(Element::F16, &|id, args| match id.to_string().as_str() {
        "blk.1.ffn_norm" => Some(args.get(0).unwrap().values().into_owned()),
        _ => is_norm(id).then(|| divided(args, |_| args.params.float(0), round)),
    });
    assert_eq!(no_weight, (1, "blk.1.ffn_norm".to_owned()));
}

#[test]
fn a_prefill_and_decode_steps_may_be_computed_by_kernels_that_round_weights_otherwise() {
    const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";
    let folder = tempfile::tempdir().unwrap();
    let made = |name: &str, numerics: &str, mistake: &[&str]| {
        let dump = folder.path().join(name);
        let run =
            ["run", "-m", MODEL, "--device", "cpu", "--no-audit", "--tokens", "10,47,84,121,158,195,232,269"];
        let how = ["-n", "3", "--numerics", numerics, "--dump", dump.to_str().unwrap()];
        answer(&[&run[..], &how, mistake].concat());
        dump
    };
    // The first step of the one, which rounds weights to f16, and the decode steps of the other, which does not.
    let narrow = made("narrow", "f16", &[]);
    for (name, mistake, wanted) in
        [("healthy", &[][..], (0, "")), ("wrong", &["--inject", "data.scaled=1.001@logits"], (1, "logits"))]
    {
        let dump = made(name, "f32", mistake);
        std::fs::copy(narrow.join("step-0000.safetensors"), dump.join("step-0000.safetensors")).unwrap();
        undeclare(&dump);
        let found = audit(&dump, Path::new(MODEL), &["--checkpoint", "logits"]);
        assert_eq!((found.code, &found.first[..]), wanted, "{name}: {}", found.report["reason"]);
    }
}
