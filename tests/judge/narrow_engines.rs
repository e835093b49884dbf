//! Engines that keep everything in f16 or bf16 and round more than results: healthy ones are not accused, and what is wrong
//! in them is found. What they round is written down here as they do it, and not as parity allows for it.

use std::path::Path;

use half::{bf16, f16};
use parity::arithmetic::{Arithmetic, Narrow, Operands};
use parity::audit::Labelled;
use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::op_by_op::compute;
use parity::gguf::Gguf;
use parity::model::builders::{Cache, Shape, build};
use parity::ops::source::Data;
use parity::ops::{Args, rule};
use parity_dump::Element;
use parity_graph::Op;

use crate::support::edited::{MODEL, edit, made, undeclare, without_graph};
use crate::support::graphs::foreign::Engine;
use crate::support::graphs::record::{Mistake, record_as, record_some};
use crate::support::graphs::{fill_with, head, recorded};
use crate::support::program::{Audited, answer, audit};

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

/// What autocast to bf16 makes of a node: products of operands in bf16 come out in it, and what is computed of these; sums and
/// weights of experts are in f32. `of_expert` is what one product's results are multiplied by.
fn autocast(labelled: &Labelled, id: Checkpoint, args: &Args<'_, f64>, of_expert: f64) -> Option<Vec<f64>> {
    let node = labelled.labels.iter().position(|label| *label == Some(id))?;
    let op = &labelled.program.graph.get(node).op;
    let is_weight = || matches!(args.get(0).unwrap().data, Data::Weight(_));
    let arithmetic = match op {
        Op::MulMat | Op::MulMatId if is_weight() => {
            Arithmetic { operands: Operands::Both(Narrow::Bf16), ..Arithmetic::EXACT }
        }
        Op::Swiglu => Arithmetic::EXACT,
        _ => return None,
    };
    let args = Args { arithmetic: &arithmetic, sources: args.sources.clone(), ..*args };
    let factor = if id.to_string() == "blk.1.ffn_down_exps" { of_expert } else { 1.0 };
    let values = compute::<f64>(rule(op).unwrap(), &args).unwrap().into_iter();
    Some(values.map(|x| f64::from(bf16::from_f32((x * factor) as f32).to_f32())).collect())
}

#[test]
fn experts_under_autocast_round_between_what_is_recorded_of_them() {
    let is_shown = |id: Checkpoint| {
        let name = id.to_string();
        !name.contains("ffn_moe") && !name.contains("_exps")
            || name.ends_with("ffn_moe_logits")
            || name.ends_with("ffn_moe_out")
    };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    fill_with(&head("qwen3moe-moe"), &model, |x| x);
    let graph = build(&Gguf::open(&model).unwrap(), Shape::step(0, 12, 12, true, Cache::F32)).unwrap().graph;
    let labelled = Labelled::new(graph.clone()).unwrap();
    for (factor, wanted) in [(1.0, (0, "")), (1.3, (1, "blk.1.ffn_moe_out"))] {
        let dump = folder.path().join(factor.to_string());
        let mistake = |id, args: &Args<'_, f64>| autocast(&labelled, id, args, factor);
        record_some(&model, &graph, &dump, &mistake, &is_shown);
        undeclare(&dump);
        without_graph(&dump);
        let found = audit(&dump, &model, &["--allow-missing"]);
        assert_eq!((found.code, &found.first[..]), wanted, "{factor}: {}", found.notes);
    }
}

/// A mixture of two experts of which one is chosen; where they are `alike`, by router weights of the same scores.
fn of_two_experts(model: &Path, alike: bool) {
    const USED: &[u8] = b"qwen3moe.expert_used_count";
    fill_with(&head("qwen3moe-moe"), model, |x| x);
    let mut file = std::fs::read(model).unwrap();
    // Behind the key lies its type, and behind that a number of 32 bits.
    let used = file.windows(USED.len()).position(|window| window == USED).unwrap() + USED.len() + 4;
    file[used] = 1;
    let gguf = Gguf::open(model).unwrap();
    for info in gguf.tensors().filter(|info| alike && info.name.ends_with("ffn_gate_inp.weight")) {
        let bytes = gguf.tensor(&info.name).unwrap().bytes;
        let at = file.windows(bytes.len()).position(|window| window == bytes).unwrap();
        let (first, second) = file[at..][..bytes.len()].split_at_mut(bytes.len() / 2);
        second.copy_from_slice(first);
    }
    drop(gguf);
    std::fs::write(model, file).unwrap();
}

/// Where the scores of two experts are alike an engine may choose either, and need not record which: what follows the experts tells.
/// One that takes another expert is wrong all the same.
#[test]
fn a_choice_between_experts_that_are_alike_is_told_by_what_follows() {
    let folder = tempfile::tempdir().unwrap();
    let is_shown = |id: Checkpoint| {
        let name = id.to_string();
        !name.contains("ffn_moe") && !name.contains("_exps")
            || name.ends_with("ffn_moe_logits")
            || name.ends_with("ffn_moe_out")
    };
    for (alike, wanted) in [(true, (0, "")), (false, (1, "blk.1.layer_out"))] {
        let [model, dump] = ["model.gguf", "dump"].map(|name| folder.path().join(format!("{alike}-{name}")));
        of_two_experts(&model, alike);
        let shape = Shape::step(0, 12, 12, true, Cache::F32);
        let graph = build(&Gguf::open(&model).unwrap(), shape).unwrap().graph;
        let mistake = |id: Checkpoint, args: &Args<'_, f64>| {
            let order = || compute::<f64>(rule(&Op::Argsort).unwrap(), args).unwrap();
            let mut order = (id.to_string() == "blk.1.ffn_moe_argsort").then(order)?;
            order.chunks_mut(2).step_by(3).for_each(<[f64]>::reverse);
            Some(order)
        };
        record_some(&model, &graph, &dump, &mistake, &is_shown);
        undeclare(&dump);
        without_graph(&dump);
        let found = audit(&dump, &model, &["--allow-missing"]);
        assert_eq!((found.code, &found.first[..]), wanted, "{alike}: {}", found.report["reason"]);
    }
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

/// What an audit says of an engine that runs steps of so many tokens, and whose nodes are `computes`' where it has any.
fn audited_steps(model: &Path, steps: &[usize], kept: Element, computes: Mistake<'_>) -> Audited {
    let arithmetic = Arithmetic::EXACT;
    let engine = Engine { kept, computes, some: &|_| true, arithmetic, stores: |_, x| x };
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    engine.record_steps(model, steps, &dump);
    audit(&dump, model, &["--allow-missing"])
}

/// Values of Q6_K as vLLM decodes them: the product of scale and quant as a whole number, and that times d, each rounded to f16.
fn decoded_in_half(block: &[u8]) -> Vec<f64> {
    let half = |x: f64| f16::from_f64(x).to_f64();
    let d = f16::from_le_bytes([block[208], block[209]]).to_f64();
    let value = |i: usize| {
        let (part, column) = (i / 128, i % 128);
        let low = block[64 * part + column % 64] >> (4 * (column / 64));
        let high = block[128 + 32 * part + column % 32] >> (2 * (column / 32));
        let quant = i32::from((low & 15) | ((high & 3) << 4)) - 32;
        let scale = i32::from(block[192 + i / 16] as i8);
        half(d * half(f64::from(scale * quant)))
    };
    (0..256).map(value).collect()
}

/// Rows of a table of Q6_K, decoded so, in an engine of any type; and one row of them that is off by a two-hundredth.
#[test]
fn kernels_that_decode_tables_in_f16_are_no_mistake() {
    let model = Path::new("reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf");
    let gguf = Gguf::open(model).unwrap();
    let table = gguf.weight("token_embd.weight").unwrap();
    for (kept, factor, wanted) in [
        (Element::F32, 1.0, ""),
        (Element::F16, 1.0, ""),
        (Element::Bf16, 1.0, ""),
        (Element::F32, 1.005, "embed"),
        (Element::F16, 1.005, "embed"),
    ] {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let ids = (id.kind() == Kind::Embed).then(|| args.get(1).unwrap().values())?;
            let row = |(row, id): (usize, &f64)| {
                let values = decoded_in_half(table.row_bytes(*id as usize..*id as usize + 1));
                let factor = if row == 3 { factor } else { 1.0 };
                values.into_iter().map(move |value| value * factor)
            };
            Some(ids.iter().enumerate().flat_map(row).collect())
        };
        let audited = audited_steps(model, &[12], kept, &computes);
        let code = i32::from(!wanted.is_empty());
        assert_eq!(
            (audited.code, &audited.first[..]),
            (code, wanted),
            "{kept:?}, {factor}: {}",
            audited.report
        );
    }
}

/// CUDA gives products of a prompt in bf16, and those of a decode step, which have a kernel of their own, in f32.
#[test]
fn products_may_be_narrow_in_a_prompt_alone() {
    let brain = |x: f64| bf16::from_f64(x).to_f64();
    let found = |spoiled: &str| {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let is_of_weight = args.get(0).is_some_and(|source| matches!(source.data, Data::Weight(_)));
            let is_several = args.sources.len() == 2 && args.shape[2] > 1;
            let is_product = is_of_weight && is_several && id.kind() != Kind::Embed;
            let [w, x] =
                is_product.then(|| [0, 1].map(|slot| args.get(slot).unwrap().values().into_owned()))?;
            let [_, _, tokens, outputs] = args.shape;
            let k = x.len() / tokens;
            let rows = x.chunks(k).flat_map(|row| (0..outputs).map(move |output| (row, output)));
            let factor = if id.to_string() == spoiled { 1.1 } else { 1.0 };
            let sum =
                |row: &[f64], w: &[f64]| row.iter().zip(w).map(|(x, w)| brain(*x) * brain(*w)).sum::<f64>();
            Some(rows.map(|(row, output)| brain(factor * sum(row, &w[output * k..][..k]))).collect())
        };
        audited_steps(Path::new(MODEL), &[12, 1, 1, 1], Element::F32, &computes)
    };
    let audited = found("");
    assert_eq!((audited.code, &audited.first[..]), (0, ""), "{}", audited.report);
    let audited = found("blk.2.ffn_gate");
    assert_eq!((audited.code, &audited.first[..]), (1, "blk.2.ffn_gate"), "{}", audited.report);
}

/// Which experts were chosen is told by what follows, in whole numbers, which are numbers of bf16 too: they make no engine of f32
/// one of bf16, whose roundings would hide a mistake.
#[test]
fn chosen_experts_show_no_type() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    fill_with(&head("qwen3moe-moe"), &model, |x| x);
    for (factor, wanted) in [(1.0, (0, "")), (1.01, (1, "blk.1.layer_out"))] {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let is_wrong = id.to_string() == "blk.1.attn_out" && factor != 1.0;
            let values = || compute::<f64>(rule(&Op::MulMat).unwrap(), args).unwrap();
            is_wrong.then(|| values().into_iter().map(|value| factor * value).collect())
        };
        let some = |id: Checkpoint| matches!(id.kind(), Kind::Embed | Kind::LayerOut | Kind::Logits);
        let kept = Element::F32;
        let engine = Engine {
            kept,
            computes: &computes,
            some: &some,
            arithmetic: Arithmetic::EXACT,
            stores: |_, x| x,
        };
        let dump = folder.path().join(format!("dump-{factor}"));
        engine.record(&model, 24, &dump);
        let found = audit(&dump, &model, &["--allow-missing", "--numerics", "f32"]);
        assert_eq!((found.code, &found.first[..]), wanted, "{factor}: {}", found.report);
    }
}

/// A weight of f16 is rounded by an engine of bf16, and its norm is not recorded: a row that is off by one factor shows all the same.
#[test]
fn a_row_of_a_norm_that_is_off_by_one_factor_is_found_in_bf16() {
    let to_bf16 = |x: f32| bf16::from_f32(x).to_f32();
    for (node, tokens) in [("blk.2.attn_norm", 20), ("blk.1.ffn_norm", 40), ("final_norm", 20)] {
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("dump");
        made(&dump, tokens, &["--numerics", "bf16 storage=bf16 kv=bf16"]);
        undeclare(&dump);
        edit(&dump, |name, shape, values| {
            let width = values.len() / shape[0];
            let row = values.chunks_mut(width).nth(7).filter(|_| name == node);
            row.into_iter().flatten().for_each(|x| *x = to_bf16(*x * 1.012));
            true
        });
        let audited = audit(&dump, Path::new(MODEL), &[]);
        assert_eq!((audited.code, &audited.first[..]), (1, node), "{}", audited.reason());
    }
}
