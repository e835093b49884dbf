//! `inspect` names what was spoiled, and is silent on what is whole.

use std::path::Path;

use parity::checkpoint::{Checkpoint, Kind};
use parity::gguf::{Array, DType, Value};
use parity::inspect::{Finding, Inspection, Level, inspect};
use parity_dump::{Producer, Writer};

use crate::support::gguf_writer::GgufWriter;
use crate::support::program::parity;
use crate::support::tiny_model::{
    FFN, HEAD_WIDTH, LAYERS, MODEL, TOKENS, VOCAB, change, set, tensor, tiny_qwen2, values,
};

fn inspected(model: &GgufWriter) -> Inspection {
    inspected_bytes(&model.bytes())
}

fn inspected_bytes(bytes: &[u8]) -> Inspection {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    inspect(&path).unwrap()
}

/// The findings after `spoil`, of which one is about `subject`, has `level` and says `text`.
#[track_caller]
fn finds(spoil: impl FnOnce(&mut GgufWriter), level: Level, subject: &str, text: &str) -> Vec<Finding> {
    let mut model = tiny_qwen2();
    spoil(&mut model);
    let findings = inspected(&model).findings().to_vec();
    expect(&findings, level, subject, text);
    findings
}

#[track_caller]
fn expect(findings: &[Finding], level: Level, subject: &str, text: &str) {
    let found = findings.iter().any(|f| f.level == level && f.subject == subject && f.text.contains(text));
    assert!(found, "{level:?} {subject}: {text}\nis not among {findings:#?}");
}

#[test]
fn a_whole_model_is_whole() {
    let Inspection::Model(model) = inspected(&tiny_qwen2()) else { panic!("a model") };
    assert_eq!(model.findings, []);
    let glance = &model.glance;
    assert_eq!((glance.embedding_transposed, glance.tied, &glance.refused), (Some(false), Some(true), &None));
    assert_eq!(glance.biases, ["attn_k", "attn_q", "attn_v"]);
    assert_eq!(glance.rope_pairing, Some("half"));
    let vocabulary = (glance.vocab_rows, glance.vocab_tokens, glance.vocab_padding);
    assert_eq!(vocabulary, (Some(VOCAB), Some(VOCAB), Some(VOCAB - TOKENS)));
    let embedding = &model.tensors[0];
    assert_eq!((&embedding.shape[..], &embedding.gguf_ne[..]), (&[VOCAB, MODEL][..], &[MODEL, VOCAB][..]));
    assert_eq!(model.quantisation.bits_per_weight, Some(32.0));
    let text = inspected(&tiny_qwen2()).to_text(false);
    assert!(text.contains("nothing looks wrong") && text.contains("blk.*.attn_q.weight"), "{text}");
}

#[test]
fn a_transposed_embedding_is_seen_by_shape_and_by_value() {
    let turned = |model: &mut GgufWriter| {
        let old = values(model, "token_embd.weight");
        change(model, "token_embd.weight", |index, _| old[index % VOCAB * MODEL + index / VOCAB]);
    };
    // The buffer holds the table's transpose, the shape is the right one: only the values tell.
    finds(turned, Level::Wrong, "token_embd.weight", "is transposed: read as stored");
    let both = |model: &mut GgufWriter| {
        turned(model);
        tensor(model, "token_embd.weight").2.reverse();
    };
    finds(both, Level::Wrong, "token_embd.weight", "expected (V, D) = [700, 64], found [64, 700]");
}

#[test]
fn spoiled_values_are_seen() {
    let name = "blk.1.ffn_up.weight";
    let nan = |m: &mut GgufWriter| change(m, name, |i, v| if i == 70 || i == 71 { f32::NAN } else { v });
    finds(nan, Level::Wrong, name, "holds 2 NaN and 0 infinities, in 1 row");
    let inf = |m: &mut GgufWriter| change(m, name, |i, v| if i == 70 { f32::INFINITY } else { v });
    finds(inf, Level::Wrong, name, "holds 0 NaN and 1 infinities, in 1 row");
    finds(|m| change(m, name, |_, _| 0.0), Level::Wrong, name, "is all zero");
    let bias = "blk.2.attn_k.bias";
    finds(|m| change(m, bias, |_, _| 0.0), Level::Unusual, bias, "is all zero");
    let norm = "blk.0.attn_norm.weight";
    finds(|m| change(m, norm, |_, _| 1.0), Level::Unusual, norm, "is 1 throughout");
    let rows = |m: &mut GgufWriter| change(m, name, |i, v| if i < 2 * MODEL { 0.0 } else { v });
    finds(rows, Level::Unusual, name, "has 2 zero rows and 0 of one value");
    let large = |m: &mut GgufWriter| change(m, name, |_, v| v * 32.0);
    finds(large, Level::Unusual, name, "times as large as its like");
    let small = |m: &mut GgufWriter| change(m, name, |_, v| v / 32.0);
    finds(small, Level::Unusual, name, "times as large as its like");
}

#[test]
fn a_layer_stored_twice_is_seen() {
    let twin = |model: &mut GgufWriter| {
        let bytes = tensor(model, "blk.0.attn_q.weight").3.clone();
        tensor(model, "blk.2.attn_q.weight").3 = bytes;
    };
    finds(twin, Level::Wrong, "blk.2.attn_q.weight", "holds the bytes of blk.0.attn_q.weight");
    let tied = |model: &mut GgufWriter| {
        let mut copy = tensor(model, "token_embd.weight").clone();
        copy.0 = "output.weight".into();
        model.tensors.push(copy);
    };
    finds(tied, Level::Unusual, "output.weight", "is token_embd.weight once more");
}

#[test]
fn missing_and_misshapen_tensors_are_seen() {
    let without = |name: &'static str| move |m: &mut GgufWriter| m.tensors.retain(|t| t.0 != name);
    let name = "blk.*.attn_v.bias";
    let findings = finds(without("blk.1.attn_v.bias"), Level::Wrong, name, "in layer 1, 2 layers have it");
    assert_eq!(findings.len(), 1);
    let no_bias = |m: &mut GgufWriter| m.tensors.retain(|t| !t.0.ends_with("attn_v.bias"));
    finds(no_bias, Level::Wrong, name, "is missing in all layers");
    finds(without("output_norm.weight"), Level::Wrong, "output_norm.weight", "is missing");
    let layer = |m: &mut GgufWriter| m.tensors.retain(|t| !t.0.starts_with("blk.1."));
    finds(layer, Level::Wrong, "block_count", "says 3 layers, tensors of 1 of them are missing");
    let fewer = |m: &mut GgufWriter| set(m, "qwen2.block_count", Value::U32(2));
    finds(fewer, Level::Unusual, "block_count", "says 2 layers, the file has 1 more");
    let many = |m: &mut GgufWriter| set(m, "qwen2.block_count", Value::U32(u32::MAX));
    finds(many, Level::Wrong, "block_count", "says 4294967295 layers");
    let down = |m: &mut GgufWriter| tensor(m, "blk.0.ffn_down.weight").2.reverse();
    let text = format!("is transposed: expected (D, F) = [{MODEL}, {FFN}], found [{FFN}, {MODEL}]");
    finds(down, Level::Wrong, "blk.0.ffn_down.weight", &text);
    let heads = |m: &mut GgufWriter| set(m, "qwen2.attention.head_count_kv", Value::U32(4));
    let text = format!("another shape than the metadata says: expected (K·E, D) = [{}, 64]", 4 * HEAD_WIDTH);
    finds(heads, Level::Wrong, "blk.0.attn_k.weight", &text);
}

#[test]
fn metadata_that_does_not_fit_is_seen() {
    let tokens = |count: usize| Value::Array(Array::String(vec![String::new(); count]));
    let more = |m: &mut GgufWriter| set(m, "tokenizer.ggml.tokens", tokens(VOCAB + 1));
    finds(
        more,
        Level::Wrong,
        "token_embd.weight",
        "has 700 rows for 701 tokens: the last 1 tokens have none",
    );
    finds(more, Level::Wrong, "tokenizer.ggml.token_type", "has 700 entries for 701 tokens");
    let fewer = |m: &mut GgufWriter| set(m, "tokenizer.ggml.tokens", tokens(VOCAB - 1));
    finds(fewer, Level::Unusual, "token_embd.weight", "the last 1 rows stand for none");
    let eos = |m: &mut GgufWriter| set(m, "tokenizer.ggml.eos_token_id", Value::U32(VOCAB as u32));
    finds(eos, Level::Wrong, "tokenizer.ggml.eos_token_id", "700 is no token: there are 700");
    let without = |key: &'static str| move |m: &mut GgufWriter| m.metadata.retain(|(known, _)| known != key);
    let merges = "tokenizer.ggml.merges";
    finds(without(merges), Level::Wrong, merges, "is missing");
    finds(without("qwen2.rope.freq_base"), Level::Unusual, "qwen2.rope.freq_base", "engines take 10000");
    let eps = "qwen2.attention.layer_norm_rms_epsilon";
    finds(without(eps), Level::Wrong, eps, "is missing");
    let scaled = |m: &mut GgufWriter| {
        m.metadata.push(("qwen2.rope.scaling.type".into(), Value::String("longrope".into())));
    };
    let findings = finds(scaled, Level::Unusual, "architecture", "cannot be run by parity");
    assert_eq!(findings.len(), 1);
    let other = |m: &mut GgufWriter| set(m, "general.architecture", Value::String("nonesuch".into()));
    finds(other, Level::Unusual, "architecture", "nonesuch");
}

#[test]
fn an_undecodable_type_and_shared_bytes_are_seen() {
    let grid = |m: &mut GgufWriter| {
        let tensor = tensor(m, "token_embd.weight");
        (tensor.1, tensor.2) = (DType::Q8_K, vec![4, 256]);
        tensor.3.truncate(4 * 292);
    };
    finds(grid, Level::Unusual, "token_embd.weight", "has type Q8_K, which parity cannot decode");
    let mut bytes = tiny_qwen2().bytes();
    let name = b"blk.0.attn_norm.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 8 + 4;
    bytes[at..at + 8].copy_from_slice(&64u64.to_le_bytes());
    let findings = inspected_bytes(&bytes).findings().to_vec();
    expect(&findings, Level::Wrong, "blk.0.attn_norm.weight", "starts inside the bytes of token_embd.weight");
}

#[test]
fn a_vocabulary_without_tensors_is_no_wrong_model() {
    let mut model = tiny_qwen2();
    model.tensors.clear();
    assert_eq!(inspected(&model).findings(), []);
}

/// A dump of two steps, 3 + 1 positions, with the values of `value` at (checkpoint, position, column).
fn dump(folder: &Path, complete: bool, value: impl Fn(Checkpoint, u32, usize) -> f32) -> Inspection {
    let producer = Producer { name: "engine".into(), ..Producer::default() };
    let mut writer = Writer::create(folder, producer, Default::default()).unwrap();
    for positions in [vec![0, 1, 2], vec![3]] {
        let tokens: Vec<u32> = positions.iter().map(|p| [5, 6, 5, 7][*p as usize]).collect();
        writer.begin_step(&tokens, &positions, 2 * LAYERS).unwrap();
        for layer in 0..LAYERS as u32 {
            for kind in [Kind::AttnNorm, Kind::FfnOut] {
                let id = Checkpoint::layer(kind, layer);
                let values: Vec<f32> = positions
                    .iter()
                    .flat_map(|p| (0..8).map(|c| value(id, *p, c)).collect::<Vec<_>>())
                    .collect();
                writer.tensor_f32(id, &[positions.len(), 8], &values).unwrap();
            }
        }
        writer.end_step().unwrap();
    }
    if complete {
        writer.finish().unwrap();
    }
    inspect(folder).unwrap()
}

fn healthy(id: Checkpoint, position: u32, column: usize) -> f32 {
    let layer = id.layer_index().unwrap_or(0) as f32;
    layer + position as f32 * 0.5 + (column as f32).sin()
}

#[test]
fn a_whole_dump_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let inspection = dump(folder.path(), true, healthy);
    assert_eq!(inspection.findings(), []);
    let Inspection::Dump(dump) = &inspection else { panic!("a dump") };
    assert_eq!(dump.tokens, [5, 6, 5, 7]);
    assert_eq!(dump.steps.iter().map(|step| step.positions).collect::<Vec<_>>(), [3, 1]);
    assert_eq!(dump.checkpoints.len(), 2 * LAYERS);
    assert_eq!((dump.checkpoints[0].rows, dump.checkpoints[0].missing.len()), (4, 0));
    assert_eq!(dump.checkpoints[0].shapes, [[3, 8], [1, 8]]);
    assert!(inspection.to_text(false).contains("nothing looks wrong"));
}

#[test]
fn spoiled_rows_of_a_dump_are_seen() {
    let folder = tempfile::tempdir().unwrap();
    let bad = Checkpoint::layer(Kind::FfnOut, 1);
    let spoiled = |row: u32, new: fn(u32, usize) -> f32| {
        let value = move |id, p, c| if id == bad && p == row { new(p, c) } else { healthy(id, p, c) };
        dump(folder.path(), true, value).findings().to_vec()
    };
    let findings = spoiled(3, |_, c| if c == 2 { f32::NAN } else { 1.0 });
    expect(&findings, Level::Wrong, "blk.1.ffn_out", "holds 1 NaN and 0 infinities, at position 3");
    expect(&spoiled(1, |_, _| 0.0), Level::Wrong, "blk.1.ffn_out", "is all zero at position 1");
    expect(&spoiled(1, |_, _| 4.0), Level::Wrong, "blk.1.ffn_out", "has one value throughout at position 1");
    let stale = spoiled(3, |_, c| healthy(Checkpoint::layer(Kind::FfnOut, 1), 1, c));
    expect(&stale, Level::Wrong, "blk.1.ffn_out", "the same row at positions 1 and 3");
    assert!([findings, stale].iter().all(|findings| findings.len() == 1));
    // Rows of NaN are all the same, which says nothing more.
    let nan = dump(folder.path(), true, |id, p, c| if p > 0 { f32::NAN } else { healthy(id, p, c) });
    assert!(nan.findings().iter().all(|finding| finding.text.contains("at position 1, 2, 3")));
    // The same row for the same token is what an embedding does.
    let same = dump(folder.path(), true, |id, p, c| healthy(id, if p == 2 { 0 } else { p }, c));
    assert_eq!(same.findings(), []);
}

#[test]
fn an_interrupted_or_uneven_dump_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let findings = dump(folder.path(), false, healthy).findings().to_vec();
    expect(&findings, Level::Unusual, "complete", "interrupted");
    let producer = Producer { name: "engine".into(), ..Producer::default() };
    let mut writer = Writer::create(folder.path(), producer, Default::default()).unwrap();
    writer.begin_step(&[5, 6], &[0, 1], 3).unwrap();
    for (kind, layer) in [(Kind::AttnNorm, 0), (Kind::AttnNorm, 1), (Kind::FfnOut, 1)] {
        writer.tensor_f32(Checkpoint::layer(kind, layer), &[2, 2], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    }
    writer.end_step().unwrap();
    writer.finish().unwrap();
    let inspection = inspect(folder.path()).unwrap();
    expect(inspection.findings(), Level::Unusual, "ffn_out", "is missing in layer 0");
}

#[test]
fn what_is_neither_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let text = inspect(folder.path()).unwrap_err().to_string();
    assert!(text.contains("manifest.json"), "{text}");
    let path = folder.path().join("notes.txt");
    std::fs::write(&path, "no model").unwrap();
    assert!(inspect(&path).unwrap_err().to_string().contains("is not a GGUF file"));
}

const MODEL_FILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf");

#[test]
fn the_command_prints_text_json_and_tokens() {
    let text = parity(&[]).args(["inspect", MODEL_FILE]).assert().success().get_output().stdout.clone();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("nothing looks wrong") && text.contains("[256, 4096]"), "{text}");
    let args = ["inspect", MODEL_FILE, "-p", "def read_lines(path):", "--format", "json"];
    let json = parity(&[]).args(args).assert().success().get_output().stdout.clone();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["tokens"], serde_json::json!([312, 863, 2039, 1444, 1518]));
    assert_eq!(json["kind"], "model");
    assert_eq!(json["findings"], serde_json::json!([]));
    assert_eq!(json["glance"]["vocab_padding"], 96);
    assert_eq!(json["metadata"]["qwen2.block_count"], 4);
}

#[test]
fn the_command_writes_the_values_of_a_tensor() {
    let args = ["inspect", MODEL_FILE, "--raw-f32", "blk.1.attn_v.weight"];
    let bytes = parity(&[]).args(args).assert().success().get_output().stdout.clone();
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let gguf = parity::gguf::Gguf::open(Path::new(MODEL_FILE)).unwrap();
    assert_eq!(values, gguf.require_tensor("blk.1.attn_v.weight", &[64, 256]).unwrap().decode::<f32>());
}

#[test]
fn the_command_cannot_judge_what_is_not_there() {
    let absent = parity(&[]).args(["inspect", "absent.gguf"]).assert().code(2).get_output().stderr.clone();
    assert!(String::from_utf8(absent).unwrap().contains("absent.gguf"));
    let tensor = parity(&[]).args(["inspect", MODEL_FILE, "--raw-f32", "none"]).assert().code(2);
    assert!(String::from_utf8(tensor.get_output().stderr.clone()).unwrap().contains("lacks tensor `none`"));
}
