//! Adapters of low rank, as PEFT saves them: an engine that applies one rightly is healthy beside the model with it, one that
//! takes alpha for alpha / rank is named.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::{Value, json};

use crate::support::program::{audit, flat, output, parity};

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
/// Of enough tokens that a difference of this rank shows.
const PROMPT: &str =
    "def read_lines(path):\n    with open(path) as lines:\n        return [line for line in lines]\n";
/// Of both adapters.
const RANK: usize = 4;
const ALPHA: f64 = 8.0;
/// Modules with an adapter: (name, outputs, inputs).
const MODULES: [(&str, usize, usize); 3] =
    [("self_attn.q_proj", 256, 256), ("self_attn.v_proj", 64, 256), ("mlp.down_proj", 256, 768)];

/// What an engine hands over: the ids that every one has, none of what is inside an adapter.
const FIXED: [&str; 22] = [
    "embed",
    "attn_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "q",
    "k",
    "v",
    "q_rope",
    "k_rope",
    "attn_ctx",
    "attn_out",
    "attn_residual",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_act",
    "ffn_out",
    "layer_out",
    "final_norm",
    "logits",
    "tokens",
];

/// Writes an adapter of all four layers.
fn adapter(folder: &Path) {
    let mut state = 1u64;
    let mut draw = |count: usize, size: f32| -> Vec<u8> {
        let mut one = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            size * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        };
        (0..count).flat_map(|_| one().to_le_bytes()).collect()
    };
    let mut all: HashMap<String, (Vec<usize>, Vec<u8>)> = HashMap::new();
    for layer in 0..4 {
        for (module, outputs, inputs) in MODULES {
            let name = format!("base_model.model.model.layers.{layer}.{module}");
            let a = draw(RANK * inputs, (inputs as f32).sqrt().recip());
            all.insert(format!("{name}.lora_A.weight"), (vec![RANK, inputs], a));
            all.insert(format!("{name}.lora_B.weight"), (vec![outputs, RANK], draw(outputs * RANK, 0.2)));
        }
    }
    let views = all.iter().map(|(name, (shape, data))| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap())
    });
    fs::write(folder.join("adapter_model.safetensors"), serialize(views, None).unwrap()).unwrap();
    let config = json!({ "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_rslora": false, "use_dora": false });
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

/// What our own engine computes with an adapter, as an engine without a graph hands it over.
fn dump(lora: &str, folder: &Path) {
    let run = [
        "run",
        "-m",
        MODEL,
        "-p",
        PROMPT,
        "-n",
        "2",
        "--device",
        "cpu",
        "--no-audit",
        "--lora",
        lora,
        "--dump",
    ];
    let done = parity(&run).arg(folder).output().unwrap();
    assert!(folder.join("manifest.json").exists(), "{}", String::from_utf8_lossy(&done.stderr));
    without_graph(folder);
}

/// Leaves what an engine hands over of a dump.
fn without_graph(folder: &Path) {
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("graphs");
    for step in manifest["steps"].as_array().unwrap() {
        let path = folder.join(step["file"].as_str().unwrap());
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let fixed = |name: &str| FIXED.contains(&name.split('.').next_back().unwrap());
        let kept = file.iter().filter(|(name, _)| fixed(name));
        fs::write(&path, serialize(kept, None).unwrap()).unwrap();
    }
    fs::write(path, manifest.to_string()).unwrap();
}

#[test]
fn an_adapter_is_judged_with_the_model_and_its_scale_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let [lora, right, wrong] = ["lora", "right", "wrong"].map(|name| folder.path().join(name));
    fs::create_dir(&lora).unwrap();
    adapter(&lora);
    let lora = lora.to_str().unwrap();
    dump(lora, &right);
    // alpha for alpha / rank.
    dump(&format!("{lora}:{RANK}"), &wrong);
    let model = Path::new(MODEL);

    let healthy = audit(&right, model, &["--lora", lora]);
    let said = output(&["audit", right.to_str().unwrap(), "-m", MODEL, "--lora", lora]).1;
    assert_eq!((healthy.code, &healthy.first[..]), (0, ""), "{said}");
    let same =
        output(&["diff", right.to_str().unwrap(), right.to_str().unwrap(), "-m", MODEL, "--lora", lora]);
    assert_eq!(same.0, 0, "{}", same.1);
    let found = audit(&wrong, model, &["--lora", lora]);
    assert_eq!((found.code, &found.first[..], &found.fault[..]), (1, "blk.0.q_proj", "lora.alpha"));
    // Without it the model is another one, and by how little is said.
    let without = audit(&right, model, &[]);
    assert_eq!((without.code, &without.first[..]), (1, "blk.0.q_proj"));
    let said = flat(&output(&["audit", right.to_str().unwrap(), "-m", MODEL]).1);
    let rank = "the difference of 12 matmuls has rank 4, as an adapter (LoRA) makes it: --lora FILE[:SCALE]";
    assert!(said.contains(rank), "{said}");
}

#[test]
fn several_adapters_add_up_and_one_that_is_not_given_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let [lora, one, two, both] = ["lora", "one", "two", "both"].map(|name| folder.path().join(name));
    fs::create_dir(&lora).unwrap();
    adapter(&lora);
    let lora = lora.to_str().unwrap();
    let half = format!("{lora}:0.5");
    // With the graph, as a recording of llama.cpp has it, and without.
    let run =
        ["run", "-m", MODEL, "-p", PROMPT, "--device", "cpu", "--no-audit", "--lora", lora, "--lora", &half];
    for dump in [&two, &both] {
        let done = parity(&run).arg("--dump").arg(dump).output().unwrap();
        assert!(dump.join("manifest.json").exists(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    without_graph(&both);
    dump(&format!("{lora}:1.5"), &one);
    let model = Path::new(MODEL);
    for dump in [&two, &both] {
        let healthy = audit(dump, model, &["--lora", &half, "--lora", lora]);
        assert_eq!((healthy.code, &healthy.first[..]), (0, ""), "{}", dump.display());
    }
    // One and a half of it is the same sum.
    let healthy = audit(&one, model, &["--lora", lora, "--lora", &half]);
    assert_eq!((healthy.code, &healthy.first[..]), (0, ""));
    let (code, text) = output(&["audit", two.to_str().unwrap(), "-m", MODEL]);
    assert!(code == 2 && flat(&text).contains("with an adapter (LoRA) that parity was not given"), "{text}");
    assert!(flat(&text).contains("--lora FILE[:SCALE]"), "{text}");
    // The shipped reference is of the model alone.
    let beside =
        ["run", "-m", MODEL, "--reference", "reference-dumps/qwen2-tiny-py-F16/read_lines", "--lora", lora];
    let (code, text) = output(&beside);
    assert!(
        code == 2
            && flat(&text).contains("the reference itself is wrong at blk.0.q_proj: what the adapter adds"),
        "{text}"
    );
}

#[test]
fn what_is_no_adapter_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let lora = folder.path().to_str().unwrap();
    fs::write(folder.path().join("adapter_config.json"), "{").unwrap();
    let run = ["run", "-m", MODEL, "-p", PROMPT, "--lora"];
    for (given, said) in [
        (lora.to_owned(), "safetensors"),
        (format!("{MODEL}:1"), "adapter"),
        (format!("{MODEL}:x"), "x"),
        (format!("{MODEL}:nan"), ":nan"),
    ] {
        let (code, text) = output(&[&run[..], &[&given]].concat());
        assert!(code == 2 && flat(&text).contains(said), "{given}: {code}\n{text}");
    }
}
