//! The stories of the field, each in one command: what people hunted for days is the first line of the answer.

use crate::support::program::{answer as answered, flat, parity};

use parity_graph::fault;

/// Runs `parity run` on a recorded prompt with a mistake injected; standard output.
fn answer(inject: &str) -> String {
    let mut command = parity(&["run", "-p", "def read_lines(path):", "-n", "2", "--inject", inject]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{inject}: {}", String::from_utf8_lossy(&output.stderr));
    flat(&String::from_utf8_lossy(&output.stdout))
}

#[test]
fn the_stories_of_the_field_come_out_in_one_command_each() {
    for (inject, first_line) in [
        ("linear.no_bias", "DIVERGES at blk.0.q: the bias blk.0.attn_q.bias is not added"),
        ("rope.base@2", "DIVERGES at blk.2.q_rope: RoPE base is 10000, the model says 1000000"),
        ("embed.transposed", "DIVERGES at embed: the embedding table is read transposed: (D, V) for (V, D)"),
        (
            "logits.stride",
            "DIVERGES at logits: rows of the logits buffer lie 4352 values apart but are read 4096 apart",
        ),
        ("rope.position_zero@1", "DIVERGES at blk.1.q_rope: the position is stuck at 0: no row is rotated"),
        ("norm.weight_twice@3", "DIVERGES at blk.3.attn_norm: blk.3.attn_norm.weight is multiplied in twice"),
        ("norm.none@2", "DIVERGES at blk.2.attn_norm: the norm is left out: blk.1.layer_out is passed on"),
        ("attn.window=4@1", "DIVERGES at blk.1.attn_ctx: rows see the last 4 positions only"),
        ("attn.softcap=5@1", "DIVERGES at blk.1.attn_ctx: the scores are soft-capped at 5"),
        ("attn.clamp=1@1", "DIVERGES at blk.1.attn_ctx: scores beyond ±1 are cut off"),
        (
            "attn.kv_head@1",
            "DIVERGES at blk.1.attn_ctx: query head h reads KV head h % 2, the model says h / 4",
        ),
    ] {
        let said = answer(inject);
        assert!(said.contains(first_line), "{inject}: {said}");
        let name = inject.split('@').next().unwrap();
        assert!(said.contains(name), "{inject}: {said}");
        assert!(said.contains("fix:"), "{inject}: {said}");
    }
}

#[test]
fn every_one_of_several_wrong_nodes_is_named() {
    let mut command = parity(&["run", "-p", "def read_lines(path):", "--format", "json"]);
    // In the order in which llama.cpp's graph has them.
    let nodes = ["blk.0.q", "blk.0.v", "blk.0.k", "blk.1.q", "blk.1.v", "blk.1.k"];
    command.args(nodes.iter().flat_map(|node| ["--inject".to_owned(), format!("linear.no_bias@{node}")]));
    let report: serde_json::Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    let entries = report["checkpoints"].as_array().unwrap();
    let named: Vec<_> = entries
        .iter()
        .filter(|entry| entry["diagnosis"][0]["fault"] == "linear.no_bias")
        .map(|entry| entry["id"].as_str().unwrap())
        .collect();
    assert_eq!(named, nodes);
}

#[test]
fn the_catalogue_is_listed() {
    let run = |args: &[&str]| parity(args).output().unwrap();
    let table = run(&["faults"]);
    assert!(table.status.success());
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(text.contains("rope.base") && text.contains("--inject"), "{text}");
    let json = run(&["faults", "--format", "json"]);
    let entries: Vec<serde_json::Value> = serde_json::from_slice(&json.stdout).unwrap();
    let names: Vec<&str> = entries.iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    let known = fault::entries().map(|entry| entry.name).chain(fault::ALIASES.map(|(alias, _)| alias));
    assert_eq!(names, known.collect::<Vec<_>>());
    for (entry, name) in entries.iter().zip(names) {
        for key in ["summary", "place", "fix"] {
            assert!(entry[key].as_str().is_some_and(|text| !text.is_empty()), "{name}: {key}");
        }
    }
    assert_eq!(run(&["faults", "no-such-fault"]).status.code(), Some(2));
}

/// Names that other people's scripts depend on: DESIGN, "Fault names".
#[test]
fn every_name_of_the_contract_is_in_the_catalogue() {
    let names = "embed.transposed embed.row_shift embed.scaled norm.eps norm.no_weight norm.weight_twice \
        norm.layernorm norm.unit_offset linear.no_bias linear.bias_twice linear.transposed linear.wrong_layer \
        linear.wrong_weight linear.truncated_k rope.base rope.interleaved rope.position_shift \
        rope.position_zero rope.sign rope.none rope.twice rope.partial rope.on_v attn.no_scale attn.scale \
        attn.kv_head attn.no_mask attn.mask_shift attn.self_only attn.stale_cache attn.head_order \
        attn.no_softmax residual.missing residual.twice residual.wrong_source ffn.swapped ffn.gelu \
        ffn.act_on_up ffn.no_up logits.untied logits.wrong_row logits.stride logits.no_norm data.zero \
        data.stale_row data.scaled data.offset data.sign data.permuted data.row_garbage data.nan \
        data.f16_overflow data.bf16_as_f16";
    for name in names.split_whitespace() {
        assert!(fault::find(name).is_some(), "{name}");
    }
}

/// One node's values in a type that no other node's are in: named for what it is, and never held to one arithmetic alone.
#[test]
fn values_rounded_behind_a_quantised_weight_are_no_coarser_product() {
    let model = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";
    for fault in ["data.bf16_rounded", "data.f16_as_bf16"] {
        for numerics in ["f32", "llama-cpu"] {
            let spec = format!("{fault}@blk.2.ffn_out");
            let tokens = "100,1119,2138,157,1176,2195,214,1233,2252,271,1290,2309";
            let run =
                ["run", "-m", model, "--device", "cpu", "--tokens", tokens, "-n", "3", "--format", "json"];
            let (code, report) = answered(&[&run[..], &["--numerics", numerics, "--inject", &spec]].concat());
            let first = &report["first_divergence"];
            let named = (code, first["checkpoint"].as_str(), first["diagnosis"][0]["fault"].as_str());
            assert_eq!(named, (1, Some("blk.2.ffn_out"), Some(fault)), "{numerics}");
        }
    }
}
