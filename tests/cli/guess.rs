//! The mistake behind an output, where no tensor is there: parity's own engine makes a mistake, and what it then says is
//! all that `parity guess` is given.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;

use parity::checkpoint::{Checkpoint, Kind};
use parity::ops::Args;
use parity_dump::Dump;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::edited::keep;
use crate::support::gguf_writer::GgufWriter;
use crate::support::graphs;
use crate::support::graphs::record::record_with;
use crate::support::program::parity;
use crate::support::samples::sample;
use crate::support::tiny_model::{VOCAB, change, tiny_qwen2};

pub const PROMPT: &str = "def read_lines(path):";
pub const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";

/// An engine with a mistake, or none, that has said something.
pub struct Engine {
    folder: TempDir,
    pub tokens: Vec<u32>,
    pub prompt: usize,
}

impl Engine {
    pub fn with(inject: Option<&str>, checkpoint: &str) -> Engine {
        let folder = TempDir::new().unwrap();
        let mut command =
            parity(&["run", "--device", "cpu", "-m", MODEL, "-p", PROMPT, "-n", "24", "--no-audit"]);
        command.args(["--checkpoint", checkpoint, "--dump"]).arg(folder.path().join("dump"));
        inject.map(|fault| command.args(["--inject", fault]));
        command.output().unwrap();
        let dump = Dump::open(&folder.path().join("dump")).unwrap();
        let prompt = dump.manifest().steps[0].positions.len();
        Engine { tokens: dump.tokens().to_vec(), prompt, folder }
    }

    pub fn dump(&self) -> std::path::PathBuf {
        self.folder.path().join("dump")
    }

    /// (n, V) logits of the first rows.
    pub fn logits(&self, rows: usize) -> Vec<Vec<f32>> {
        let dump = Dump::open(&self.dump()).unwrap();
        let (logits, mut buffer) = ("logits".parse().unwrap(), Vec::new());
        let row =
            |position| parity::dump::Recording::row(&dump, logits, position, &mut buffer).unwrap().to_vec();
        (0..rows as u32).map(row).collect()
    }

    pub fn seen(&self) -> String {
        ids(&self.tokens[self.prompt..])
    }

    pub fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    }
}

pub fn ids(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Exit code and answer.
pub fn guess(args: &[&str]) -> (i32, Value) {
    let out = parity(&["guess", "-m", MODEL, "--format", "json"]).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let told = serde_json::from_str(&text);
    (
        out.status.code().unwrap(),
        told.unwrap_or_else(|_| String::from_utf8_lossy(&out.stderr).into_owned().into()),
    )
}

#[test]
fn a_mistake_is_named_by_the_tokens_alone() {
    let engine = Engine::with(Some("rope.base=10000"), "logits");
    let (code, told) = guess(&["-p", PROMPT, "--tokens-seen", &engine.seen()]);
    assert_eq!((code, &told["answer"]), (1, &Value::from("rope.base")), "{told}");
    assert_eq!(told["schema"], "parity-guess/1");
    let (first, text) = (&told["hypotheses"][0], told["text"].as_str().unwrap());
    assert_eq!((&first["share"], &first["layers"]), (&Value::from(1.0), &Value::from("all")));
    assert!(text.contains("RoPE base is 10000") && text.contains("explains 24 of 24"), "{text}");
}

#[test]
fn a_healthy_output_is_called_so_with_how_surely() {
    let engine = Engine::with(None, "logits");
    let (code, told) = guess(&["-p", PROMPT, "--tokens-seen", &engine.seen()]);
    assert_eq!((code, &told["answer"]), (0, &Value::from("healthy")), "{told}");
    assert!(told["excluded"]["count"].as_u64() > Some(90), "{told}");
    // The same as a text, with the prompt in front of it as programs print it.
    let gguf = parity::gguf::Gguf::open(Path::new(MODEL)).unwrap();
    let text = parity::tokenizer::Tokenizer::from_gguf(&gguf).unwrap().decode(&engine.tokens);
    let path = engine.file("text", format!("{text}\n").as_bytes());
    let (code, told) = guess(&["-p", PROMPT, "--text", &path]);
    assert_eq!((code, &told["answer"]), (0, &Value::from("healthy")), "{told}");
}

#[test]
fn one_row_of_logits_names_a_mistake_in_one_layer() {
    // So weak that a healthy engine in bf16 might have said the same.
    let engine = Engine::with(Some("linear.no_bias@2"), "logits");
    let last = engine.logits(engine.prompt).pop().unwrap();
    let bytes: Vec<u8> = last.iter().flat_map(|value| value.to_le_bytes()).collect();
    let path = engine.file("last.f32", &bytes);
    // Numbers that begin as a text, or a file of tensors, does.
    for (at, byte) in [(0, b'{'), (8, b'{')] {
        let numbers: Vec<u8> =
            bytes.iter().enumerate().map(|(i, old)| if i == at { byte } else { *old }).collect();
        let path = engine.file("like-another.f32", &numbers);
        assert!(guess(&["-p", PROMPT, "--logits", &path]).1.is_object());
    }
    let (code, told) = guess(&["-p", PROMPT, "--logits", &path]);
    assert_eq!((code, &told["answer"]), (1, &Value::from("linear.no_bias")), "{told}");
    assert_eq!(told["hypotheses"][0]["layers"], serde_json::json!({"one": 2}));
}

#[test]
fn logits_name_a_mistake_in_one_node_of_a_layer() {
    let engine = Engine::with(Some("residual.missing@blk.1.attn_residual"), "logits");
    let rows = engine.logits(engine.prompt).concat().into_iter().flat_map(f32::to_le_bytes);
    let path = engine.file("all.f32", &rows.collect::<Vec<u8>>());
    let (code, told) = guess(&["-p", PROMPT, "--logits", &path]);
    assert_eq!((code, &told["answer"]), (1, &Value::from("residual.missing")), "{told}");
    assert!(told["next"][0].as_str().unwrap().ends_with("--inject residual.missing@blk.1.attn_residual"));
}

#[test]
fn a_text_is_read_in_the_tokens_that_an_engine_with_the_mistake_says_it_in() {
    // What they say is no text that a tokenizer would split so; the second says a token that nothing is for.
    for mistake in ["data.sign", "ranks.exchanged"] {
        let engine = Engine::with(Some(mistake), "logits");
        let gguf = parity::gguf::Gguf::open(Path::new(MODEL)).unwrap();
        let tokenizer = parity::tokenizer::Tokenizer::from_gguf(&gguf).unwrap();
        let said = &engine.tokens[engine.prompt..];
        let piece = |token: &u32| match tokenizer.is_unused(*token) {
            true => tokenizer.spelt(*token).unwrap().into(),
            false => tokenizer.bytes(*token).unwrap().into_owned(),
        };
        let text: Vec<u8> = said.iter().flat_map(piece).collect();
        assert_ne!(tokenizer.encode_without_bos(&text).unwrap(), said);
        let path = engine.file("text", &text);
        let (code, told) = guess(&["-p", PROMPT, "--text", &path]);
        assert_eq!((code, &told["answer"]), (1, &Value::from(mistake)), "{told}");
    }
}

#[test]
fn a_text_that_llama_server_drew_in_other_tokens_than_a_tokenizer_makes_of_it_is_healthy() {
    // Of this file, with keys and values in Q8_0: "0", ")" and "):" where a tokenizer makes "0", "))" and ":" of it.
    let text =
        "0)): %(2) + (self, *args) + ' ' ' + tag + 1\n                else:\n                    v = self._";
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("drawn");
    fs::write(&path, text).unwrap();
    let seen = ["-p", "return sorted(", "--text", path.to_str().unwrap(), "--temp", "0.8", "--seed"];
    for (seed, expected) in [("7", (0, Some("healthy"))), ("8", (2, None))] {
        let (code, told) = guess(&[&seen[..], &[seed]].concat());
        assert_eq!((code, told["answer"].as_str()), expected, "{told}");
    }
}

#[test]
fn what_nothing_explains_has_no_name() {
    let (code, told) = guess(&["-p", PROMPT, "--tokens-seen", "900,17,2222,5,901,18,2223,6,902,19,2224,7"]);
    assert_eq!((code, &told["answer"]), (2, &Value::Null), "{told}");
    assert_eq!(told["healthy_until"], 0);
    assert!(told["next"][0].as_str().unwrap().contains("--hidden"), "{told}");
}

#[test]
fn log_probabilities_of_a_server_name_a_mistake_or_none() {
    for (inject, expected) in [(None, (0, "healthy")), (Some("attn.no_scale"), (1, "attn.no_scale"))] {
        let engine = Engine::with(inject, "logits");
        let rows = engine.logits(engine.tokens.len() - 1);
        let content: Vec<Value> =
            (engine.prompt - 1..rows.len()).map(|at| said(&rows[at], engine.tokens[at + 1])).collect();
        let answer = serde_json::json!({"choices": [{"index": 0, "logprobs": {"content": content}}]});
        let path = engine.file("answer.json", answer.to_string().as_bytes());
        let (code, told) = guess(&["-p", PROMPT, "--logprobs", &path]);
        assert_eq!((code, told["answer"].as_str()), (expected.0, Some(expected.1)), "{told}");
        // Asked for in place of read: with the key, which is told to nobody else.
        let url = serve(answer.to_string());
        let asked = ["guess", "-m", MODEL, "--format", "json", "-p", PROMPT, "--url", &url];
        for (key, code) in [("secret", expected.0), ("another", 2)] {
            let out = parity(&asked).env("PARITY_API_KEY", key).output().unwrap();
            assert_eq!(out.status.code(), Some(code), "{out:?}");
            assert!(!String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).contains("secret"));
        }
    }
}

/// A server with this answer for who has the key.
fn serve(answer: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let lines = reader.by_ref().lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let header = |name: &str| {
                let value = head.iter().filter_map(|line| line.split_once(": "));
                value.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
            };
            let mut asked = vec![0; header("content-length").unwrap().parse().unwrap()];
            reader.read_exact(&mut asked).unwrap();
            let is_known = header("authorization") == Some("Bearer secret");
            let status = match is_known && head[0].starts_with("POST /v1/completions ") {
                true => "200 OK",
                false => "401 Unauthorized",
            };
            let length = answer.len();
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{answer}");
            let _ = stream.write_all(head.as_bytes());
        }
    });
    address
}

/// What a server says of one row.
fn said(row: &[f32], token: u32) -> Value {
    let sum: f64 = row.iter().map(|z| f64::from(*z).exp()).sum();
    let one = |id: usize| {
        let value = f64::from(row[id]) - sum.ln();
        serde_json::json!({"id": id, "token": "", "logprob": (value * 1e6).round() / 1e6})
    };
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    let mut entry = one(token as usize);
    entry["top_logprobs"] = order.into_iter().take(10).map(one).collect();
    entry
}

#[test]
fn hidden_states_name_the_layer_and_the_mistake() {
    for (mistake, expected) in [
        (Some("rope.base=10000@2"), "rope.base"),
        // Three nodes of a layer are wrong at once, and none of them was recorded.
        (Some("linear.no_bias"), "linear.no_bias"),
        (Some("norm.eps=1e-5@1"), "norm.eps"),
        // Another order of sums changes more.
        (Some("norm.eps=1e-8@1"), "healthy"),
        (None, "healthy"),
    ] {
        let engine = Engine::with(mistake, "blk.*.layer_out");
        let (code, told) = guess(&["--hidden", &engine.dump().display().to_string()]);
        assert_eq!((code, &told["answer"]), (i32::from(expected != "healthy"), &expected.into()), "{told}");
        let layer = mistake.and_then(|mistake| mistake.split_once('@')?.1.parse::<u32>().ok());
        let is_at = |layer: u32| told["hypotheses"][0]["layers"] == serde_json::json!({"one": layer});
        assert!(expected == "healthy" || layer.is_none_or(is_at), "{told}");
    }
}

#[test]
fn layer_outputs_of_llama_cpp_are_healthy_though_its_graph_begins_with_what_was_not_recorded() {
    let (folder, from) = (TempDir::new().unwrap(), Path::new("tests/data/engines/ik_llama-ok"));
    for file in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let to = folder.path().join(file.file_name().unwrap());
        fs::copy(&file, &to).unwrap();
        if to.extension().is_some_and(|end| end == "safetensors") {
            keep(&to, |name| name.ends_with("layer_out"));
        }
    }
    let (code, told) = guess(&["--hidden", &folder.path().display().to_string()]);
    assert_eq!((code, &told["answer"]), (0, &Value::from("healthy")), "{told}");
    // Bounds across layers of which nothing was recorded are too wide here: the layers computed again say it.
    let dump = folder.path().join("dump").display().to_string();
    let mut run =
        parity(&["run", "-m", MODEL, "-p", "class Node:\n    def __init__(self", "--device", "cpu"]);
    run.args(["--numerics", "llama-cpu", "--checkpoint", "blk.*.layer_out", "--no-audit", "--dump", &dump]);
    run.output().unwrap();
    let (code, told) = guess(&["--hidden", &dump]);
    assert_eq!((code, &told["answer"]), (0, &Value::from("healthy")), "{told}");
    assert!(told["text"].as_str().unwrap().contains("known mistakes would have shown"), "{told}");
}

#[test]
fn outputs_of_layers_of_real_engines_name_what_is_wrong() {
    let (folder, from) = (TempDir::new().unwrap(), Path::new("tests/data/engines"));
    let cases = [
        ("tinygrad-ok-module_names", "healthy"),
        ("openvino-ok", "healthy"),
        ("openvino-theta", "rope.base"),
        ("mlx-theta", "rope.base"),
        ("mlx-gqa", "attn.kv_head"),
        // Every step behind the prompt begins at position 0.
        ("mlx-shift1", "rope.position_in_step"),
        ("jax-gemma_scale", "embed.scaled"),
    ];
    for (engine, name) in sample("engines", 3, cases) {
        let file = folder.path().join(format!("{engine}.safetensors"));
        fs::copy(from.join(format!("{engine}.safetensors")), &file).unwrap();
        let of_layer = |name: &str| {
            name.ends_with("layer_out")
                || name.rsplit_once("layers.").is_some_and(|(_, n)| n.parse::<u32>().is_ok())
        };
        keep(&file, |name| of_layer(name) || name == "tokens");
        let tokens = "312,863,2039,1444,1518,285,314,511,435,408,280,285,314";
        let (code, told) = guess(&["--tokens", tokens, "--hidden", &file.display().to_string()]);
        let names: Vec<&Value> =
            [&told["answer"]].into_iter().chain(told["aliases"].as_array().unwrap()).collect();
        assert!(
            code == i32::from(name != "healthy") && names.iter().any(|one| *one == name),
            "{engine}: {told}"
        );
    }
}

/// Logits of another model's engine behind tokens, as `guess` of a model sees them.
pub fn of_another(model: &GgufWriter, engine: &GgufWriter, flags: &[&str]) -> (i32, Value) {
    const TOKENS: &str = "3,14,15,92,65";
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("model.gguf"), model.bytes()).unwrap();
    fs::write(path("engine.gguf"), engine.bytes()).unwrap();
    let (of_engine, dump) = (path("engine.gguf"), path("dump"));
    let said =
        ["run", "--device", "cpu", "-m", &of_engine, "--tokens", TOKENS, "--no-audit", "--dump", &dump];
    parity(&said).output().unwrap();
    let dump = Dump::open(&folder.path().join("dump")).unwrap();
    let (logits, mut buffer) = ("logits".parse().unwrap(), Vec::new());
    let mut row =
        |position| parity::dump::Recording::row(&dump, logits, position, &mut buffer).unwrap().to_vec();
    let seen: Vec<u8> = (0..5).flat_map(&mut row).flat_map(f32::to_le_bytes).collect();
    assert_eq!(seen.len(), 5 * 4 * VOCAB);
    fs::write(path("seen.f32"), seen).unwrap();
    let (file, seen) = (path("model.gguf"), path("seen.f32"));
    let asked = ["guess", "-m", &file, "--tokens", TOKENS, "--logits", &seen, "--format", "json"];
    let out =
        parity(&asked).args(flags.iter().map(|flag| flag.replace("ENGINE", &of_engine))).output().unwrap();
    (out.status.code().unwrap(), serde_json::from_slice(&out.stdout).unwrap())
}

#[test]
fn what_shows_in_decode_steps_alone_is_named() {
    // A single pass over prompt and output would read what the cache does not hold yet, or see what nobody has said.
    for mistake in ["attn.stale_cache", "attn.no_mask", "attn.self_only"] {
        let engine = Engine::with(Some(mistake), "logits");
        let (code, told) = guess(&["-p", PROMPT, "--tokens-seen", &engine.seen()]);
        assert_eq!((code, &told["answer"]), (1, &Value::from(mistake)), "{told}");
    }
}

#[test]
fn a_recorded_graph_is_executed_where_one_is_given() {
    let folder = TempDir::new().unwrap();
    let (model, graph) = (folder.path().join("model.gguf"), graphs::recorded("llama-dense", ""));
    graphs::fill(&graphs::head("llama-dense"), &model);
    let nothing = |id: Checkpoint, args: &Args<'_, f64>| {
        let adds = id.layer_index() == Some(1) && [Kind::AttnOut, Kind::FfnOut].contains(&id.kind());
        adds.then(|| vec![0.0; args.elements()])
    };
    let dump = |name: &str| folder.path().join(name);
    record_with(&model, &graph, &dump("healthy"), &|_, _| None);
    record_with(&model, &graph, &dump("layer.skipped"), &nothing);
    for (name, code) in [("healthy", 0), ("layer.skipped", 1)] {
        let step = dump(name).join("step-0000.safetensors").display().to_string();
        let recording = dump("healthy").display().to_string();
        let path = model.display().to_string();
        let mut asked = parity(&["guess", "-m", &path, "--tokens", "1,17,33,42,5,99,101,7,64,12,88,3"]);
        asked.args(["--logits", &step, "--reference", &recording, "--format", "json"]);
        let out = asked.output().unwrap();
        let told: Value = serde_json::from_slice(&out.stdout).unwrap();
        let names = [&told["answer"]].into_iter().chain(told["aliases"].as_array().unwrap());
        assert!(out.status.code() == Some(code) && names.into_iter().any(|one| one == name), "{told}");
    }
    // Other tokens than the recording's.
    let (path, recording) = (model.display().to_string(), dump("healthy").display().to_string());
    let other = ["guess", "-m", &path, "--tokens", "1,18", "--tokens-seen", "3", "--reference", &recording];
    let out = parity(&other).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("is none of the prompt"), "{said}");
}

#[test]
fn what_f16_cannot_hold_is_named_where_logits_are_nothing_and_other_weights_where_they_are_given() {
    let (mut model, mut engine) = (tiny_qwen2(), tiny_qwen2());
    change(&mut model, "blk.1.ffn_down.weight", |_, weight| 1e7 * weight);
    change(&mut engine, "output_norm.weight", |_, _| f32::NAN);
    let (code, told) = of_another(&model, &engine, &[]);
    assert_eq!((code, &told["answer"]), (1, &Value::from("data.f16_overflow")), "{told}");
    assert!(told["text"].as_str().unwrap().contains("at blk.1.ffn_out, and f16 holds 65504"), "{told}");
    // Another file that the engine loaded.
    let mut engine = tiny_qwen2();
    change(&mut engine, "blk.0.ffn_down.weight", |i, _| (i % 89) as f32 / 89.0);
    let (code, told) = of_another(&tiny_qwen2(), &engine, &["--other", "ENGINE"]);
    assert_eq!((code, &told["answer"]), (1, &Value::from("weights.other_file")), "{told}");
}

#[test]
fn what_cannot_be_looked_at_is_refused_with_what_was_expected() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("short.f32");
    fs::write(&path, [0u8; 40]).unwrap();
    let short = path.display().to_string();
    for (args, why) in [
        (vec!["--tokens-seen", "1,2"], "nothing stands in front of what was seen"),
        (vec!["-p", PROMPT, "--tokens-seen", "1,x"], "no token id"),
        (vec!["-p", PROMPT, "--tokens-seen", ""], "holds no token"),
        (vec!["-p", PROMPT, "--tokens-seen", "5000"], "a token beyond the vocabulary"),
        (vec!["-p", PROMPT, "--logits", &short], "no logits of this model"),
        (vec!["-p", PROMPT, "--logprobs", &short], "no log-probabilities"),
        (vec!["-p", PROMPT, "--url", "http://127.0.0.1:9"], "did not answer"),
        (vec!["-p", PROMPT], "required"),
    ] {
        let (code, told) = guess(&args);
        assert_eq!(code, 2, "{args:?}");
        assert!(told.as_str().unwrap_or_default().contains(why), "{args:?}: {told}");
    }
}
