//! Exact arithmetic against recordings of real llama.cpp, and against damaged ones.

use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use parity::audit::{Audit, AuditRows, Audits, Options, audit};
use parity::checkpoint::{Checkpoint, Kind};
use parity::dump::{Kept, Recording};
use parity::engine::fused::Model;
use parity::engine::fused::graph::Op;
use parity::faults::inject::inject;
use parity_dump::Dump;
use parity_dump::manifest::Producer;

use crate::support::runs::{audit_all, model, run, run_as};

/// f32 rounding of products of a few thousand terms; measured 5e-8 to 9e-7 over 14 quantisations and three
/// models, where the plain product stands 2e-3 to 3e-2 off.
const EMULATED_PRODUCT: f64 = 1e-6;

const TOKENS: [u32; 9] = [9, 270, 33, 1200, 45, 6, 777, 81, 3];
const PROMPT: usize = 6;

fn shipped() -> Vec<(PathBuf, Model)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps");
    let mut out = Vec::new();
    for name in ["qwen2-tiny-py-F16", "qwen2-tiny-py-Q4_K_M"] {
        for case in fs::read_dir(root.join(name)).unwrap() {
            let model = Model::open(&root.join("models").join(format!("{name}.gguf"))).unwrap();
            out.push((case.unwrap().path(), model));
        }
    }
    assert!(!out.is_empty(), "no recording ships with parity");
    out
}

fn audit_both(model: &Model, sides: &[&dyn Recording]) -> Audits {
    let positions = AuditRows::All.positions(&sides[0].manifest().steps);
    let options = Options {
        positions: &positions,
        wants: &|checkpoint| !checkpoint.kind().is_optional(),
        isolated: false,
    };
    audit(sides, &model.gguf, &model.graph, &options).unwrap()
}

fn origins(audit: &Audit) -> Vec<String> {
    audit.origins().map(|checkpoint| checkpoint.to_string()).collect()
}

#[test]
fn recordings_of_llama_cpp_are_healthy_and_their_products_exact_but_for_f32() {
    for (path, model) in shipped() {
        let dump = Dump::open(&path).unwrap();
        let audit = audit_both(&model, &[&dump]).sides.remove(0);
        assert!(audit.inferred.is_none(), "{}: {:?}", path.display(), audit.inferred);
        assert!(audit.nodes.len() > 70, "{}: {} nodes", path.display(), audit.nodes.len());
        for (checkpoint, node) in &audit.nodes {
            let node = node.as_ref().unwrap_or_else(|e| panic!("{}: {checkpoint}: {e:?}", path.display()));
            let over = node.local.over_bound;
            assert!(over <= 1.0, "{}: {checkpoint} is {over} times its bound", path.display());
            let product = matches!(model.graph.node(*checkpoint).unwrap().op, Op::Linear { .. });
            let distance = node.local.rel_l2;
            assert!(!product || distance <= EMULATED_PRODUCT, "{}: {checkpoint}: {distance}", path.display());
        }
    }
}

#[test]
fn two_mistakes_are_two_origins_and_nothing_else_is() {
    let model = model("qwen2-tiny-py-F16.gguf").unwrap();
    let mut graph = model.graph.clone();
    let specs = ["rope.base=10000@blk.0.k_rope", "ffn.gelu@2"].map(|spec| spec.parse().unwrap());
    inject(&mut graph, &specs, &model).unwrap();
    let audit = audit_all(&model, &run(&model, &graph, &TOKENS, PROMPT, false));
    assert_eq!(origins(&audit), ["blk.0.k_rope", "blk.2.ffn_act"]);
}

#[test]
fn our_engine_rounds_as_it_declares() {
    for file in ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"] {
        let model = model(file).unwrap();
        for numerics in
            ["f32", "f32 kv=f16", "f16", "f16 storage=f16 kv=f16", "bf16", "llama-cpu", "llama-cpu kv=f16"]
        {
            let own = numerics.parse().unwrap();
            let kept = run_as(own, &model, &model.graph, &TOKENS, PROMPT, false, &|_| true);
            assert_eq!(origins(&audit_all(&model, &kept)), Vec::<String>::new(), "{file} {numerics}");
        }
    }
}

/// Copies a dump folder.
fn copied(from: &Path, to: &Path) {
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap().path();
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

#[test]
fn one_flipped_bit_in_the_reference_is_not_blamed_on_the_candidate() {
    let (path, model) =
        shipped().into_iter().find(|(path, _)| path.ends_with("qwen2-tiny-py-F16/read_lines")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    copied(&path, folder.path());
    let checkpoint: Checkpoint = "blk.1.ffn_up".parse().unwrap();
    flip_exponent(&folder.path().join("step-0000.safetensors"), checkpoint, 3);

    let candidate = Dump::open(&path).unwrap();
    let reference = Dump::open(folder.path()).unwrap();
    let audits = audit_both(&model, &[&candidate, &reference]);
    assert_eq!(origins(&audits.sides[0]), Vec::<String>::new());
    assert_eq!(
        origins(&audits.sides[1]),
        ["blk.1.ffn_up"],
        "what reads it was computed from the right value"
    );
    assert_eq!(audits.sides[1].contradicted[&checkpoint].to_string(), "blk.1.ffn_act");
    let node = audits.sides[1].nodes[&checkpoint].as_ref().unwrap();
    assert_eq!(node.columns_beyond, [3]);
    assert_eq!(node.rows_beyond.len(), 1);
}

/// Audits the first row; the others are screened.
fn audit_first_row(model: &Model, dump: &Dump) -> Audit {
    let wants = |checkpoint: Checkpoint| !checkpoint.kind().is_optional();
    let options = Options { positions: &[0], wants: &wants, isolated: false };
    audit(&[dump], &model.gguf, &model.graph, &options).unwrap().sides.remove(0)
}

#[test]
fn rows_outside_of_the_sample_are_screened_and_nothing_healthy_is_suspected() {
    for (path, model) in shipped() {
        let audit = audit_first_row(&model, &Dump::open(&path).unwrap());
        assert_eq!(origins(&audit), Vec::<String>::new(), "{}", path.display());
        // No row but the sampled one of each node was audited: none was suspected.
        assert_eq!(audit.rows_audited(), audit.nodes.len() as u64, "{}", path.display());
        assert!(audit.screened > 4 * audit.rows_audited(), "{}", path.display());
    }
}

#[test]
fn one_flipped_bit_is_found_in_a_row_that_is_not_sampled_whatever_the_node() {
    for (path, model) in shipped().into_iter().filter(|(path, _)| path.ends_with("read_lines")) {
        for checkpoint in model.graph.checkpoints().filter(|c| !c.kind().is_optional()) {
            let folder = tempfile::tempdir().unwrap();
            copied(&path, folder.path());
            let width: usize = Dump::open(&path).unwrap().row_shape(checkpoint).iter().product();
            flip_exponent(&folder.path().join("step-0000.safetensors"), checkpoint, 2 * width + 7);
            let found = origins(&audit_first_row(&model, &Dump::open(folder.path()).unwrap()));
            assert!(found.contains(&checkpoint.to_string()), "{checkpoint}: {found:?}");
        }
    }
}

#[test]
fn what_is_infinite_or_huge_in_a_row_that_is_not_sampled_explains_nothing() {
    let (path, model) =
        shipped().into_iter().find(|(path, _)| path.ends_with("qwen2-tiny-py-F16/read_lines")).unwrap();
    for checkpoint in model.graph.checkpoints().filter(|c| !c.kind().is_optional()) {
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e20, 1e30] {
            let folder = tempfile::tempdir().unwrap();
            copied(&path, folder.path());
            let width: usize = Dump::open(&path).unwrap().row_shape(checkpoint).iter().product();
            let file = folder.path().join("step-0000.safetensors");
            change(&file, checkpoint, 2 * width + 7, |bytes| *bytes = value.to_le_bytes());
            let found = origins(&audit_first_row(&model, &Dump::open(folder.path()).unwrap()));
            assert!(found.contains(&checkpoint.to_string()), "{value} at {checkpoint}: {found:?}");
        }
    }
}

/// Flips a bit of the exponent of one element of an F32 tensor.
fn flip_exponent(file: &Path, checkpoint: Checkpoint, element: usize) {
    change(file, checkpoint, element, |bytes| bytes[3] ^= 0x04);
}

/// Changes one element of an F32 tensor.
fn change(file: &Path, checkpoint: Checkpoint, element: usize, how: impl Fn(&mut [u8; 4])) {
    let mut bytes = fs::read(file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let tensor = &tensors[checkpoint.to_string()];
    assert_eq!(tensor["dtype"], "F32");
    let start = 8 + header + tensor["data_offsets"][0].as_u64().unwrap() as usize;
    how(bytes[start + 4 * element..].first_chunk_mut().unwrap());
    fs::write(file, bytes).unwrap();
}

/// The same rows with some checkpoints left out, values mapped, and another producer.
fn foreign(kept: &Kept, producer: &str, keep: impl Fn(Kind) -> bool, map: impl Fn(f32) -> f32) -> Kept {
    let producer = Producer { name: producer.to_owned(), ..Producer::default() };
    let mut out = Kept::new(producer, kept.manifest().model.clone());
    for step in &kept.manifest().steps {
        let tokens: Vec<u32> = step.positions.iter().map(|&p| kept.tokens()[p as usize]).collect();
        out.add_step(&tokens, step.positions[0] as usize);
    }
    let mut row = Vec::new();
    for checkpoint in kept.checkpoints().into_iter().filter(|checkpoint| keep(checkpoint.kind())) {
        for position in kept.positions(checkpoint) {
            let row = Recording::row(kept, checkpoint, position, &mut row).unwrap();
            let values: Vec<f32> = row.iter().map(|&x| map(x)).collect();
            out.keep(checkpoint, &kept.row_shape(checkpoint), position, &values);
        }
    }
    out
}

/// What hooks on the modules of a Python implementation record.
fn hooked(kind: Kind) -> bool {
    use Kind::{AttnResidual, FfnAct, KProj, QProj, VProj};
    !matches!(kind, QProj | KProj | VProj | AttnResidual | FfnAct)
}

#[test]
fn nodes_are_bridged_where_a_recording_lacks_what_stands_between() {
    let model = model("qwen2-tiny-py-F16.gguf").unwrap();
    let whole = run(&model, &model.graph, &TOKENS, PROMPT, false);
    let audit = audit_both(&model, &[&foreign(&whole, "other", hooked, |x| x)]).sides.remove(0);
    assert_eq!(origins(&audit), Vec::<String>::new());
    for (checkpoint, node) in &audit.nodes {
        let node = node.as_ref().unwrap_or_else(|missing| panic!("{checkpoint}: {missing:?}"));
        let bridged: Vec<String> = node.local.bridged.iter().map(ToString::to_string).collect();
        match checkpoint.to_string().as_str() {
            "blk.1.q" => assert_eq!(bridged, ["blk.1.q_proj"]),
            "blk.1.ffn_norm" => assert_eq!(bridged, ["blk.1.attn_residual"]),
            "blk.1.ffn_out" => assert_eq!(bridged, ["blk.1.ffn_act"]),
            _ => {}
        }
    }

    // A mistake inside of a bridge shows at its end.
    let mut graph = model.graph.clone();
    inject(&mut graph, &["ffn.gelu@2".parse().unwrap()], &model).unwrap();
    let faulty = run(&model, &graph, &TOKENS, PROMPT, false);
    let audit = audit_both(&model, &[&foreign(&faulty, "other", hooked, |x| x)]).sides.remove(0);
    assert_eq!(origins(&audit), ["blk.2.ffn_out"]);
}

#[test]
fn what_cannot_be_bridged_is_missing_what_it_needs() {
    let model = model("qwen2-tiny-py-F16.gguf").unwrap();
    let whole = run(&model, &model.graph, &TOKENS, PROMPT, false);
    let ends = foreign(&whole, "other", |kind| matches!(kind, Kind::Embed | Kind::LayerOut), |x| x);
    let audit = audit_both(&model, &[&ends]).sides.remove(0);
    let node = audit.nodes[&"blk.1.layer_out".parse::<Checkpoint>().unwrap()].clone();
    let missing = node.unwrap_err();
    let attention = missing.tensor().is_some_and(|id| id.kind() == Kind::AttnCtx);
    assert!(attention, "an attention in between is not bridged: {missing}");
}

#[test]
fn undeclared_arithmetic_is_inferred_from_the_values_and_said() {
    let model = model("qwen2-tiny-py-F16.gguf").unwrap();
    let whole = run(&model, &model.graph, &TOKENS, PROMPT, false);
    let f32s = audit_both(&model, &[&foreign(&whole, "other", |_| true, |x| x)]).sides.remove(0);
    assert_eq!(f32s.numerics.to_string(), "f32");
    assert!(f32s.inferred.as_ref().unwrap().contains("does not declare"));
    assert_eq!(origins(&f32s), Vec::<String>::new());

    let narrow = foreign(&whole, "other", |_| true, |x| bf16::from_f32(x).to_f32());
    let narrow = audit_both(&model, &[&narrow]).sides.remove(0);
    assert_eq!(narrow.numerics.to_string(), "bf16 storage=bf16 kv=bf16");
    assert!(narrow.inferred.as_ref().unwrap().contains("bf16"));
    assert_eq!(origins(&narrow), Vec::<String>::new(), "values that were rounded when they were written");

    let mut graph = model.graph.clone();
    inject(&mut graph, &["linear.no_bias@blk.1.k".parse().unwrap()], &model).unwrap();
    let faulty = run(&model, &graph, &TOKENS, PROMPT, false);
    let faulty = foreign(&faulty, "other", |_| true, |x| bf16::from_f32(x).to_f32());
    let faulty = audit_both(&model, &[&faulty]).sides.remove(0);
    assert_eq!(origins(&faulty), ["blk.1.k"]);
}

#[test]
fn a_nan_is_found_where_it_arises_and_passes_nowhere() {
    let model = model("qwen2-tiny-py-F16.gguf").unwrap();
    let mut graph = model.graph.clone();
    inject(&mut graph, &["data.nan@blk.1.ffn_up".parse().unwrap()], &model).unwrap();
    let audit = audit_all(&model, &run(&model, &graph, &TOKENS, PROMPT, false));
    assert_eq!(origins(&audit), ["blk.1.ffn_up"]);
    let node = audit.nodes[&"blk.1.ffn_up".parse::<Checkpoint>().unwrap()].as_ref().unwrap();
    assert!(node.local.over_bound.is_nan() && node.nonfinite > 0 && !node.nonfinite_inputs);
}

#[test]
fn the_parts_of_a_distance_explain_it() {
    let (path, model) =
        shipped().into_iter().find(|(path, _)| path.ends_with("qwen2-tiny-py-Q4_K_M/read_lines")).unwrap();
    let reference = Dump::open(&path).unwrap();
    let tokens = Recording::tokens(&reference).to_vec();
    let prompt = reference.manifest().steps[0].positions.len();
    let candidate = run(&model, &model.graph, &tokens, prompt, false);
    let audits = audit_both(&model, &[&candidate, &reference]);
    assert_eq!(audits.parts.len(), audits.sides[1].nodes.len());
    for (checkpoint, found) in &audits.parts {
        let positions = reference.positions(*checkpoint);
        let a = Recording::gather(&candidate, *checkpoint, &positions).unwrap();
        let b = Recording::gather(&reference, *checkpoint, &positions).unwrap();
        let square = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let norm = square(&mut b.data.iter().map(|&b| f64::from(b)));
        let apart =
            square(&mut a.data.iter().zip(&b.data).map(|(&a, &b)| f64::from(a) - f64::from(b))) / norm;
        // The parts are vectors: their sum is no longer than their lengths together, and no shorter than
        // the longest less the others.
        let parts = [found.candidate, found.reference, found.inherited];
        let (sum, longest) =
            (parts.iter().sum::<f64>(), parts.iter().fold(0.0f64, |max, part| max.max(*part)));
        let slack = 1e-12;
        assert!(apart <= sum + slack, "{checkpoint}: {apart} of {parts:?}");
        assert!(apart >= 2.0 * longest - sum - slack, "{checkpoint}: {apart} of {parts:?}");
    }
    let quantised = &audits.parts[&"blk.0.q_proj".parse::<Checkpoint>().unwrap()];
    assert!(quantised.reference > 1e3 * quantised.candidate, "llama.cpp rounds its activations to Q8_K");
}

/// A dump whose tensors are cut: `edit` says which rows' columns of which checkpoint stay.
fn narrowed(path: &Path, to: &Path, columns: usize, only_decode: bool) {
    copied(path, to);
    for step in fs::read_dir(to).unwrap().map(|file| file.unwrap().path()) {
        let name = step.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("step-") || only_decode && name.starts_with("step-0000") {
            continue;
        }
        let bytes = fs::read(&step).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let cut: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = tensors
            .iter()
            .map(|(name, tensor)| {
                let mut shape = tensor.shape().to_vec();
                let mut data = tensor.data().to_vec();
                if name == "logits" {
                    let width = shape[1];
                    data = data.chunks_exact(4 * width).flat_map(|row| row[..4 * columns].to_vec()).collect();
                    shape[1] = columns;
                }
                (name.to_owned(), tensor.dtype(), shape, data)
            })
            .collect();
        let views = cut.iter().map(|(name, dtype, shape, data)| {
            (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        fs::write(&step, safetensors::serialize(views, None).unwrap()).unwrap();
    }
}

#[test]
fn rows_that_are_not_as_wide_as_the_model_s_are_no_match() {
    let (path, model) = shipped().remove(0);
    let folder = tempfile::tempdir().unwrap();
    narrowed(&path, folder.path(), 100, false);
    let dump = Dump::open(folder.path()).unwrap();
    let audit = audit_both(&model, &[&dump]).sides.remove(0);
    let logits: Checkpoint = "logits".parse().unwrap();
    assert!(audit.nodes[&logits].is_err());
    // Steps that differ among themselves are no dump.
    let folder = tempfile::tempdir().unwrap();
    narrowed(&path, folder.path(), 100, true);
    let error = Dump::open(folder.path()).err().unwrap();
    assert!(error.to_string().contains("changes its shape"), "{error}");
}
