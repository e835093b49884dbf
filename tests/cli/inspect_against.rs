//! `parity inspect MODEL --against FOLDER`: a right conversion is the same weights, each wrong one is named.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;

use parity::gguf::{DType, Value};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value as Json;

use crate::support::gguf_writer::GgufWriter;
use crate::support::tiny_model::{
    FFN, HEAD_WIDTH, HEADS, KV_HEADS, LAYERS, MODEL, change, tensor, tiny_qwen2, values,
};

/// Tensors of a folder: shape and values.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

const MODULES: [(&str, &str); 9] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// What a model was converted from: the values of its file under the names of Hugging Face.
pub fn folder_of(model: &mut GgufWriter) -> Tensors {
    let names: Vec<(String, Vec<usize>)> =
        model.tensors.iter().map(|(name, _, shape, _)| (name.clone(), shape.clone())).collect();
    let mut out = Tensors::new();
    for (name, shape) in names {
        let foreign = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, rest)) => {
                let (role, kind) = rest.split_once('.').unwrap();
                let module = MODULES.iter().find(|(known, _)| *known == role).unwrap().1;
                format!("model.layers.{layer}.{module}.{kind}")
            }
            None if name.starts_with("token_embd") => "model.embed_tokens.weight".to_owned(),
            None => "model.norm.weight".to_owned(),
        };
        out.insert(foreign, (shape, values(model, &name)));
    }
    out
}

/// Rows of heads (2, E/2) as (E/2, 2), as the conversion of the Llama family does it.
pub fn pairs(rows: usize, values: &[f32]) -> Vec<f32> {
    let (cols, half) = (values.len() / rows, HEAD_WIDTH / 2);
    let from = |row: usize| row / HEAD_WIDTH * HEAD_WIDTH + row % 2 * half + row % HEAD_WIDTH / 2;
    (0..rows).flat_map(|row| values[from(row) * cols..(from(row) + 1) * cols].to_vec()).collect()
}

pub fn write(path: &Path, tensors: &Tensors) {
    let bytes: BTreeMap<&String, Vec<u8>> = tensors
        .iter()
        .map(|(name, (_, values))| (name, values.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let views = tensors.iter().map(|(name, (shape, _))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), &bytes[name]).unwrap())
    });
    let none: Option<HashMap<String, String>> = None;
    std::fs::write(path, safetensors::serialize(views, none).unwrap()).unwrap();
}

/// Exit code, JSON, and the text.
fn compare(model: &GgufWriter, tensors: &Tensors) -> (i32, Json, String) {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("hf");
    std::fs::create_dir(&folder).unwrap();
    write(&folder.join("model.safetensors"), tensors);
    run(scratch.path(), model, &folder)
}

fn run(scratch: &Path, model: &GgufWriter, folder: &Path) -> (i32, Json, String) {
    let file = scratch.join("model.gguf");
    std::fs::write(&file, model.bytes()).unwrap();
    let parity = |format: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
        command.arg("inspect").arg(&file).arg("--against").arg(folder).args(["--format", format]);
        command.output().unwrap()
    };
    let (json, text) = (parity("json"), parity("table"));
    assert_eq!(json.status.code(), text.status.code());
    let said = String::from_utf8_lossy(&text.stdout).into_owned() + &String::from_utf8_lossy(&text.stderr);
    (json.status.code().unwrap(), serde_json::from_slice(&json.stdout).unwrap_or_default(), said)
}

/// Tensor and fault of everything that is wrong.
fn faults(json: &Json) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for pair in json["tensors"].as_array().unwrap() {
        for wrong in pair["mistakes"].as_array().unwrap() {
            let fault = wrong["fault"].as_str().unwrap_or("none").to_owned();
            out.push((pair["name"].as_str().unwrap().to_owned(), fault));
        }
    }
    for left in json["left_out"].as_array().unwrap() {
        out.push((left["name"].as_str().unwrap().into(), left["fault"].as_str().unwrap_or("none").into()));
    }
    out
}

#[track_caller]
fn same(model: &GgufWriter, tensors: &Tensors) -> (Json, String) {
    let (code, json, text) = compare(model, tensors);
    assert_eq!((code, faults(&json)), (0, Vec::new()), "{text}");
    assert!(text.starts_with("THE SAME WEIGHTS"), "{text}");
    (json, text)
}

#[track_caller]
fn named(model: &GgufWriter, tensors: &Tensors, expected: &[(&str, &str)], says: &str) {
    let (code, json, text) = compare(model, tensors);
    let expected: Vec<(String, String)> =
        expected.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
    assert_eq!((code, faults(&json)), (1, expected), "{text}");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&text).contains(says), "{text}");
}

/// The model as another architecture has it.
fn of_architecture(name: &str) -> GgufWriter {
    let mut model = tiny_qwen2();
    for (key, value) in &mut model.metadata {
        *key = key.replace("qwen2.", &format!("{name}."));
        if key == "general.architecture" {
            *value = Value::String(name.into());
        }
    }
    model
}

#[test]
fn a_right_conversion_is_the_same_weights() {
    let mut model = tiny_qwen2();
    let tensors = folder_of(&mut model);
    let (json, text) = same(&model, &tensors);
    assert!(json["tensors"].as_array().unwrap().iter().all(|pair| pair["rel_l2"] == 0.0), "{text}");
    assert_eq!(json["schema"], "parity-weights/1");
    // F16 in the file: what it cost is measured.
    let exact = values(&mut model, "blk.1.ffn_down.weight");
    let halves: Vec<u8> = exact.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect();
    let stored = tensor(&mut model, "blk.1.ffn_down.weight");
    (stored.1, stored.3) = (DType::F16, halves);
    let (json, _) = same(&model, &tensors);
    let pairs = json["tensors"].as_array().unwrap();
    let pair = pairs.iter().find(|pair| pair["name"] == "blk.1.ffn_down.weight").unwrap();
    let cost = pair["rel_l2"].as_f64().unwrap();
    assert!(cost > 0.0 && cost < 2f64.powi(-11), "{pair}");
}

#[test]
fn splits_and_shards_are_recognised() {
    let mut model = tiny_qwen2();
    let mut tensors = folder_of(&mut model);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        for kind in ["weight", "bias"] {
            let mut fused = Vec::new();
            for part in ["q_proj", "k_proj", "v_proj"] {
                fused.extend(tensors.remove(&name(&format!("self_attn.{part}.{kind}"))).unwrap().1);
            }
            let rows = (HEADS + 2 * KV_HEADS) * HEAD_WIDTH;
            let shape = if kind == "bias" { vec![rows] } else { vec![rows, MODEL] };
            tensors.insert(name(&format!("self_attn.qkv_proj.{kind}")), (shape, fused));
        }
        let mut both = tensors.remove(&name("mlp.gate_proj.weight")).unwrap().1;
        both.extend(tensors.remove(&name("mlp.up_proj.weight")).unwrap().1);
        tensors.insert(name("mlp.gate_up_proj.weight"), (vec![2 * FFN, MODEL], both));
    }
    let (json, _) = same(&model, &tensors);
    let pairs = json["tensors"].as_array().unwrap();
    let pair = pairs.iter().find(|pair| pair["name"] == "blk.2.attn_k.bias").unwrap();
    assert_eq!(
        (&pair["how"], &pair["made_of"][0]),
        (&"rows of keys of".into(), &"model.layers.2.self_attn.qkv_proj.bias".into())
    );
    // The halves exchanged.
    let mut exchanged = tensors.clone();
    exchanged.get_mut("model.layers.1.mlp.gate_up_proj.weight").unwrap().1.rotate_left(FFN * MODEL);
    let expected =
        [("blk.1.ffn_gate.weight", "linear.wrong_weight"), ("blk.1.ffn_up.weight", "linear.wrong_weight")];
    named(&model, &exchanged, &expected, "holds second half of model.layers.1.mlp.gate_up_proj.weight");
    // Two files and their index.
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("hf");
    std::fs::create_dir(&folder).unwrap();
    let (first, second): (Tensors, Tensors) =
        tensors.into_iter().partition(|(name, _)| name.contains("layers.0") || name.contains("embed"));
    let mut map = serde_json::Map::new();
    for (file, tensors) in [("a.safetensors", &first), ("b.safetensors", &second)] {
        write(&folder.join(file), tensors);
        map.extend(tensors.keys().map(|name| (name.clone(), file.into())));
    }
    let index = folder.join("model.safetensors.index.json");
    std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    assert_eq!(run(scratch.path(), &model, &folder).0, 0);
    // A shard that was not fetched, and a name that leads outside.
    map.insert("model.layers.9.x".into(), "b.safetensors".into());
    std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    let (code, _, text) = run(scratch.path(), &model, &folder);
    assert!(code == 2 && text.contains("model.layers.9.x") && text.contains("incomplete"), "{text}");
    map.insert("model.layers.9.x".into(), "../b.safetensors".into());
    std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    let (code, _, text) = run(scratch.path(), &model, &folder);
    assert!(code == 2 && text.contains("outside"), "{text}");
}

#[test]
fn rows_of_queries_and_keys_are_in_the_order_of_the_architecture() {
    let mut model = of_architecture("llama");
    let tensors = folder_of(&mut model);
    let wrong: Vec<(String, &str)> = (0..LAYERS)
        .flat_map(|layer| {
            ["attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias"]
                .map(|role| (format!("blk.{layer}.{role}"), "linear.qk_permuted"))
        })
        .collect();
    let wrong: Vec<(&str, &str)> = wrong.iter().map(|(name, fault)| (name.as_str(), *fault)).collect();
    named(&model, &tensors, &wrong, "llama needs pairs side by side");
    // As the conversion does it.
    for layer in 0..LAYERS {
        for (role, rows) in [("attn_q", HEADS * HEAD_WIDTH), ("attn_k", KV_HEADS * HEAD_WIDTH)] {
            for kind in ["weight", "bias"] {
                let name = format!("blk.{layer}.{role}.{kind}");
                let laid = pairs(rows, &values(&mut model, &name));
                change(&mut model, &name, |index, _| laid[index]);
            }
        }
    }
    let (json, _) = same(&model, &tensors);
    assert!(json.to_string().contains("halves to pairs"));
    // One bias forgotten, and the same file called a qwen2.
    let mut forgotten = model.clone();
    let plain = tensors["model.layers.1.self_attn.k_proj.bias"].1.clone();
    change(&mut forgotten, "blk.1.attn_k.bias", |index, _| plain[index]);
    named(&forgotten, &tensors, &[("blk.1.attn_k.bias", "linear.qk_permuted")], "Hugging Face's order");
    let mut called = model.clone();
    called.metadata.iter_mut().for_each(|(key, value)| {
        *key = key.replace("llama.", "qwen2.");
        if key == "general.architecture" {
            *value = Value::String("qwen2".into());
        }
    });
    assert_eq!(faults(&compare(&called, &tensors).1).len(), 4 * LAYERS);
}

#[test]
fn norms_have_their_one() {
    let mut model = of_architecture("gemma");
    let tensors = folder_of(&mut model);
    let plain = values(&mut model, "blk.2.ffn_norm.weight");
    let norms: Vec<String> = (0..LAYERS)
        .flat_map(|layer| ["attn_norm", "ffn_norm"].map(|role| format!("blk.{layer}.{role}.weight")))
        .chain(["output_norm.weight".to_owned()])
        .collect();
    assert_eq!(faults(&compare(&model, &tensors).1).len(), norms.len());
    for name in &norms {
        change(&mut model, name, |_, w| w + 1.0);
    }
    let (json, _) = same(&model, &tensors);
    assert!(json.to_string().contains("\"how\":\"1 + w\""));
    change(&mut model, "blk.2.ffn_norm.weight", |index, _| plain[index]);
    let almost = "holds w: the norms of gemma hold 1 + w";
    let (code, json, text) = compare(&model, &tensors);
    assert_eq!((code, faults(&json)), (1, vec![("blk.2.ffn_norm.weight".into(), "norm.unit_offset".into())]));
    assert!(text.contains(almost), "{text}");
    // A qwen2 whose norms have a one too many.
    let mut model = tiny_qwen2();
    let tensors = folder_of(&mut model);
    change(&mut model, "blk.0.attn_norm.weight", |_, w| w + 1.0);
    named(&model, &tensors, &[("blk.0.attn_norm.weight", "norm.unit_offset")], "holds 1 + w");
}

#[test]
fn weights_in_the_wrong_place_and_other_weights_are_told_apart() {
    let mut model = tiny_qwen2();
    let tensors = folder_of(&mut model);
    let other = values(&mut model, "blk.2.attn_v.weight");
    let mut moved = model.clone();
    change(&mut moved, "blk.1.attn_v.weight", |index, _| other[index]);
    let holds = "blk.1.attn_v.weight holds model.layers.2.self_attn.v_proj.weight";
    // Nothing of the file was made of the weight that it should hold.
    let expected =
        [("blk.1.attn_v.weight", "linear.wrong_layer"), ("model.layers.1.self_attn.v_proj.weight", "none")];
    named(&moved, &tensors, &expected, holds);
    let mut turned = model.clone();
    let own = values(&mut model, "blk.1.attn_output.weight");
    change(&mut turned, "blk.1.attn_output.weight", |index, _| own[index % MODEL * MODEL + index / MODEL]);
    named(
        &turned,
        &tensors,
        &[("blk.1.attn_output.weight", "linear.transposed")],
        "rows and columns are exchanged",
    );
    let mut spoiled = model.clone();
    change(&mut spoiled, "blk.0.ffn_up.weight", |index, w| if index / MODEL == 7 { -w } else { w });
    named(
        &spoiled,
        &tensors,
        &[("blk.0.ffn_up.weight", "none")],
        "1 of 96 rows are further from it than F32 explains",
    );
    let mut nan = model.clone();
    change(&mut nan, "blk.0.ffn_up.weight", |index, w| if index == 77 { f32::NAN } else { w });
    assert_eq!(compare(&nan, &tensors).0, 1);
    let mut lacking = model.clone();
    lacking.tensors.retain(|(name, ..)| name != "blk.1.attn_q.bias");
    named(
        &lacking,
        &tensors,
        &[("model.layers.1.self_attn.q_proj.bias", "linear.no_bias")],
        "is not in the file",
    );
    let mut more = tensors.clone();
    more.remove("model.layers.1.mlp.up_proj.weight");
    let (code, _, text) = compare(&model, &more);
    assert!(code == 2 && text.contains("blk.1.ffn_up.weight: nothing of the folder"), "{text}");
}

#[test]
fn experts_are_looked_at_one_by_one() {
    const EXPERTS: usize = 4;
    let mut model = tiny_qwen2();
    let (shape, own) = (vec![EXPERTS, FFN / EXPERTS, MODEL], values(&mut model, "blk.0.ffn_gate.weight"));
    let down = values(&mut model, "blk.0.ffn_down.weight");
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    model
        .tensors
        .retain(|(name, ..)| !name.starts_with("blk.0.ffn_gate") && !name.starts_with("blk.0.ffn_down"));
    let mut tensors = folder_of(&mut model);
    model.tensors.push(("blk.0.ffn_gate_exps.weight".into(), DType::F32, shape.clone(), bytes(&own)));
    let transposed = vec![EXPERTS, MODEL, FFN / EXPERTS];
    model.tensors.push(("blk.0.ffn_down_exps.weight".into(), DType::F32, transposed, bytes(&down)));
    let of_one = own.len() / EXPERTS;
    for (number, values) in own.chunks_exact(of_one).enumerate() {
        let name = format!("model.layers.0.mlp.experts.{number}.gate_proj.weight");
        tensors.insert(name, (shape[1..].to_vec(), values.to_vec()));
    }
    // Stacked, and each of them transposed.
    let (rows, cols) = (MODEL, FFN / EXPERTS);
    let turned = (0..down.len()).map(|at| {
        let (expert, within) = (at / of_one, at % of_one);
        down[expert * of_one + within % rows * cols + within / rows]
    });
    let stacked = "model.layers.0.mlp.experts.down_proj";
    tensors.insert(stacked.into(), (vec![EXPERTS, cols, rows], turned.collect()));
    let (json, _) = same(&model, &tensors);
    assert!(json.to_string().contains("4 experts, transposed"), "{json}");
    // Two exchanged.
    let mut swapped = own.clone();
    swapped[of_one..3 * of_one].rotate_left(of_one);
    tensor(&mut model, "blk.0.ffn_gate_exps.weight").3 = bytes(&swapped);
    let says = "expert 1 holds the weights of expert 2, expert 2 holds the weights of expert 1";
    named(&model, &tensors, &[("blk.0.ffn_gate_exps.weight", "moe.expert_index")], says);
}

#[test]
fn what_cannot_be_read_is_said() {
    let model = tiny_qwen2();
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("hf");
    std::fs::create_dir(&folder).unwrap();
    let (code, _, text) = run(scratch.path(), &model, &folder);
    assert!(code == 2 && text.contains("holds no .safetensors file"), "{text}");
    std::fs::write(folder.join("model.safetensors"), "version https://git-lfs.github.com/spec/v1\n").unwrap();
    let (code, _, text) = run(scratch.path(), &model, &folder);
    assert!(code == 2 && text.contains("Git LFS"), "{text}");
}
