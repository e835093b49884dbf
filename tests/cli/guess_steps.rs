//! What `parity guess` makes of rows that were computed in a prefill and in decode steps, and of mistakes in one node or a whole layer.

use std::fs;

use parity_dump::Dump;
use serde_json::Value;
use tempfile::TempDir;

use crate::guess::{Engine, PROMPT, guess, ids, of_another};
use crate::support::program::parity;
use crate::support::samples::sample;
use crate::support::tiny_model::{change, tensor, tiny_qwen2};

/// Rows of logits as raw f32.
fn raw(rows: &[Vec<f32>]) -> Vec<u8> {
    rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn what_was_said_later_is_not_seen_by_who_says_one_token_after_the_other() {
    // Each is the likeliest token where rows see two positions after their own, the token itself among them; no engine has it yet.
    let seen = "11,220,15,13,20,9,18,46,19,45,1370,46";
    let (code, told) = guess(&["--tokens", "511,435", "--tokens-seen", seen]);
    assert_eq!((code, &told["answer"]), (2, &Value::Null), "{told}");
}

#[test]
fn a_healthy_answer_names_what_would_not_show_in_steps() {
    // Behind one token every step has one row: whether a mask hides later ones nobody sees, as a single pass of all rows would.
    let (code, told) = guess(&["--tokens", "285", "--tokens-seen", "314,365,392,82,342,314,1434,731"]);
    assert_eq!((code, &told["answer"]), (0, &Value::from("healthy")), "{told}");
    for name in ["attn.no_mask", "attn.mask_shift"] {
        assert!(told["unseen"].as_array().unwrap().iter().any(|one| one == name), "{name}: {told}");
    }
}

#[test]
fn logits_of_a_dump_are_those_of_its_steps() {
    let mistakes = ["attn.no_mask", "attn.mask_shift", "rope.position_in_step", "attn.self_only"];
    for mistake in sample("mistakes", 1, mistakes) {
        let inject = if mistake == "attn.mask_shift" { "attn.mask_shift=1" } else { mistake };
        let engine = Engine::with(Some(inject), "logits");
        let (code, told) = guess(&["--logits", &engine.dump().display().to_string()]);
        assert_eq!((code, &told["answer"]), (1, &Value::from(mistake)), "{told}");
        assert_eq!(told["evidence"]["prompt"], engine.prompt, "{told}");
    }
    let engine = Engine::with(None, "logits");
    let dump = engine.dump().display().to_string();
    let (code, told) = guess(&["--logits", &dump]);
    assert_eq!((code, &told["answer"]), (0, &Value::from("healthy")), "{told}");
    // Some of its rows, and the tokens of another prompt.
    let (code, told) = guess(&["--logits", &dump, "--rows", "3..9"]);
    assert_eq!((code, &told["evidence"]["rows"]), (0, &Value::from(6)), "{told}");
    let (code, told) = guess(&["--tokens", "1,2", "--logits", &dump]);
    assert!(code == 2 && told.as_str().unwrap().contains("is of another prompt"), "{told}");
}

#[test]
fn rows_that_a_healthy_engine_does_not_explain_may_be_those_of_decode_steps() {
    let engine = Engine::with(Some("rope.decode_shift"), "logits");
    let rows = 12;
    let path = engine.file("all.f32", &raw(&engine.logits(rows)));
    let (code, told) = guess(&["--tokens", &ids(&engine.tokens[..rows]), "--logits", &path]);
    let named = [&told["answer"]].into_iter().chain(told["aliases"].as_array().unwrap());
    assert!(code == 1 && named.into_iter().any(|one| one == "rope.decode_shift"), "{told}");
    assert!(told["notes"].to_string().contains("are taken for decode steps"), "{told}");
}

#[test]
fn a_mistake_in_one_node_is_named_where_a_coarser_arithmetic_explains_it_too() {
    let cases = [
        ("norm.layernorm@blk.1.norm", "norm.layernorm"),
        ("data.scaled=0.5@logits", "data.scaled"),
        ("data.scaled=1.2345@logits", "data.scaled"),
    ];
    for (inject, name) in sample("mistakes in one node", 1, cases) {
        let engine = Engine::with(Some(inject), "logits");
        let path = engine.file("all.f32", &raw(&engine.logits(engine.prompt)));
        let (code, told) = guess(&["-p", PROMPT, "--logits", &path]);
        assert_eq!((code, &told["answer"]), (1, &Value::from(name)), "{inject}: {told}");
    }
}

#[test]
fn a_number_that_no_list_has_is_searched_for() {
    let numbers =
        ["attn.clamp=2", "attn.softcap=3.5", "attn.scale=0.3", "rope.base=34567", "rope.partial=16,32"];
    for inject in sample("numbers", 2, numbers) {
        let engine = Engine::with(Some(inject), "logits");
        let path = engine.file("all.f32", &raw(&engine.logits(engine.prompt)));
        let (code, told) = guess(&["-p", PROMPT, "--logits", &path]);
        assert_eq!((code, &told["hypotheses"][0]["inject"]), (1, &Value::from(inject)), "{told}");
    }
}

#[test]
fn weights_that_changed_places_and_whole_modules_of_another_layer_are_named() {
    // In layer 1, of queries and outputs, which have one shape; keys of layer 2 with their bias; keys of layers 1 and 2.
    let cases = [
        &[
            ("blk.1.attn_q.weight", "blk.1.attn_output.weight"),
            ("blk.1.attn_output.weight", "blk.1.attn_q.weight"),
        ],
        &[("blk.1.attn_k.weight", "blk.2.attn_k.weight"), ("blk.1.attn_k.bias", "blk.2.attn_k.bias")],
        &[("blk.1.attn_k.weight", "blk.2.attn_k.weight"), ("blk.2.attn_k.weight", "blk.1.attn_k.weight")],
    ];
    for pairs in sample("pairs", 1, cases) {
        let (mut model, mut engine) = (tiny_qwen2(), tiny_qwen2());
        for (name, from) in pairs {
            tensor(&mut engine, name).3 = tensor(&mut model, from).3.clone();
        }
        let (code, told) = of_another(&tiny_qwen2(), &engine, &[]);
        let name = if pairs[0].1.contains("output") { "linear.wrong_weight" } else { "linear.wrong_layer" };
        assert_eq!((code, &told["answer"]), (1, &Value::from(name)), "{told}");
        assert_eq!(told["hypotheses"][0]["layers"], serde_json::json!({"one": 1}), "{told}");
    }
}

#[test]
fn log_probabilities_of_all_tokens_are_read_as_such_and_probabilities_are_refused() {
    let of_row = |row: &[f32]| {
        let sum: f64 = row.iter().map(|z| f64::from(*z).exp()).sum();
        row.iter().map(|z| (f64::from(*z) - sum.ln()) as f32).collect::<Vec<f32>>()
    };
    for (inject, name) in [(None, "healthy"), (Some("rope.base=10000"), "rope.base")] {
        let engine = Engine::with(inject, "logits");
        let rows: Vec<Vec<f32>> = engine.logits(engine.prompt).iter().map(|row| of_row(row)).collect();
        let path = engine.file("log-softmax.f32", &raw(&rows));
        let (code, told) = guess(&["-p", PROMPT, "--logits", &path]);
        assert_eq!((code, &told["answer"]), (i32::from(inject.is_some()), &Value::from(name)), "{told}");
        let rows: Vec<Vec<f32>> = rows.iter().map(|row| row.iter().map(|p| p.exp()).collect()).collect();
        let path = engine.file("softmax.f32", &raw(&rows));
        let (code, told) = guess(&["-p", PROMPT, "--logits", &path]);
        assert!(code == 2 && told.as_str().unwrap().contains("holds probabilities"), "{told}");
    }
    let (code, told) = guess(&["-p", PROMPT, "--tokens-seen", "285", "--rows", "1..2"]);
    assert!(code == 2 && told.as_str().unwrap().contains("--logits"), "{told}");
}

#[test]
fn tokens_of_a_model_whose_values_f16_cannot_hold_are_explained() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let mut model = tiny_qwen2();
    change(&mut model, "blk.1.ffn_down.weight", |_, weight| 1e7 * weight);
    fs::write(path("model.gguf"), model.bytes()).unwrap();
    for (inject, code, name) in [(None, 0, "healthy"), (Some("rope.interleaved"), 1, "rope.interleaved")] {
        let (file, dump) = (path("model.gguf"), path(name));
        let mut run =
            parity(&["run", "--device", "cpu", "-m", &file, "--tokens", "3,14,15,92,65", "-n", "16"]);
        run.args(["--no-audit", "--checkpoint", "logits", "--dump", &dump]);
        inject.map(|fault| run.args(["--inject", fault]));
        run.output().unwrap();
        let tokens = Dump::open(&folder.path().join(name)).unwrap().tokens().to_vec();
        let seen = ids(&tokens[5..]);
        let asked =
            ["guess", "-m", &file, "--tokens", "3,14,15,92,65", "--tokens-seen", &seen, "--format", "json"];
        let out = parity(&asked).output().unwrap();
        let told: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(told["hypotheses"][0]["log_likelihood"].is_number(), "{told}");
        // A model of random weights may say the same with several mistakes.
        let is_first = told["hypotheses"][0]["share"] == 1.0;
        assert!(is_first && (inject.is_some() || out.status.code() == Some(code)), "{told}");
    }
}

#[test]
fn a_layer_that_is_run_twice_or_not_at_all_is_named() {
    // Its last layer is the one before it once more, and the other way round.
    let cases = [("blk.1", "layer.repeated", 1), ("blk.9", "layer.skipped", 2)];
    for (last, name, layer) in sample("layers", 1, cases) {
        let (mut model, mut engine) = (tiny_qwen2(), tiny_qwen2());
        let names: Vec<String> = model.tensors.iter().map(|(name, ..)| name.clone()).collect();
        for of_last in names.iter().filter(|name| name.starts_with("blk.2.")) {
            match last {
                // The model's own last layer does nothing, so that an engine may repeat the one before it.
                "blk.1" => {
                    change(&mut model, "blk.2.attn_output.weight", |_, _| 0.0);
                    change(&mut model, "blk.2.ffn_down.weight", |_, _| 0.0);
                    let bytes = tensor(&mut engine, &of_last.replace("blk.2", "blk.1")).3.clone();
                    tensor(&mut engine, of_last).3 = bytes;
                }
                _ => {
                    change(&mut engine, "blk.2.attn_output.weight", |_, _| 0.0);
                    change(&mut engine, "blk.2.ffn_down.weight", |_, _| 0.0);
                }
            }
        }
        let (code, told) = of_another(&model, &engine, &[]);
        let first = &told["hypotheses"][0];
        let names = [&told["answer"]].into_iter().chain(told["aliases"].as_array().unwrap());
        assert!(code == 1 && names.into_iter().any(|one| one == name), "{told}");
        assert!([serde_json::json!({"one": layer}), "last".into()].contains(&first["layers"]), "{told}");
    }
}
