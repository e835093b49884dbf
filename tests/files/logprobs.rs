//! Log-probabilities of llama-perplexity and of servers, through the built program: healthy ones, wrong ones, damaged
//! ones, and what is claimed of them.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use parity_dump::{Checkpoint, Dump, Kind};
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::dumps::{healthy, tensors, tokens};
use crate::support::program::parity;

const F16: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
/// llama.cpp 0.5.0's `llama-perplexity -c 10 -b 10 --chunks 2 --save-all-logits` of [`F16`] on the CPU, and with
/// `--override-kv qwen2.rope.freq_base=float:10000`; and the logits of the first of these runs, recorded.
const REAL: [&str; 3] = [
    "tests/data/foreign/perplexity-tiny.kld",
    "tests/data/foreign/perplexity-tiny-rope.kld",
    "tests/data/foreign/perplexity-tiny.safetensors",
];

/// llama.cpp 0.5.0's llama-server on the CPU, asked for six tokens behind the prompt with `"logprobs": 10`: of the weights
/// of [`F16`] in F32 (llama-quantize), `--cache-type-k f32 --cache-type-v f32 --flash-attn off`; and with
/// `--rope-freq-base 10000`.
const SERVER: [&str; 2] = ["tests/data/foreign/server-tiny.json", "tests/data/foreign/server-tiny-rope.json"];

fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    (dir, path)
}

fn audit(path: &Path) -> Command {
    parity(&["audit", path.to_str().unwrap(), "-m", F16])
}

fn diff(path: &Path, reference: &Path) -> Command {
    parity(&["diff", path.to_str().unwrap(), reference.to_str().unwrap()])
}

/// Logits of the healthy dump, row by row.
fn logits() -> Vec<Vec<f32>> {
    let all = &tensors()[&Checkpoint::global(Kind::Logits)];
    all.values.chunks(all.shape[1]).map(<[f32]>::to_vec).collect()
}

/// As `llama-perplexity` writes them: the second half of the rows but the last, of one chunk.
fn perplexity(rows: &[Vec<f32>]) -> Vec<u8> {
    let (n_ctx, vocabulary) = (rows.len(), rows[0].len());
    let mut out = b"_logits_".to_vec();
    [n_ctx, vocabulary, 1].iter().for_each(|n| out.extend((*n as i32).to_le_bytes()));
    tokens().iter().for_each(|token| out.extend((*token as i32).to_le_bytes()));
    for row in &rows[n_ctx / 2..n_ctx - 1] {
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let min = row.iter().copied().fold(f32::MAX, f32::min).max(max - 16.0);
        let sum: f64 = row.iter().map(|z| f64::from((z - max).exp())).sum();
        let (scale, smallest) = ((max - min) / 65535.0, min - max - sum.ln() as f32);
        [scale, smallest, 0.0, 0.0][..2].iter().for_each(|number| out.extend(number.to_le_bytes()));
        let step = |z: &f32| if *z > min { ((z - min) / scale).round() as u16 } else { 0 };
        row.iter().for_each(|z| out.extend(step(z).to_le_bytes()));
        out.extend(vec![0; 2 * (vocabulary % 2)]);
    }
    out
}

/// The `k` likeliest tokens and their log-probabilities, as a server prints them.
fn likeliest(row: &[f32], k: usize) -> Vec<(usize, f64)> {
    let max = row.iter().copied().fold(f32::MIN, f32::max);
    let sum: f32 = row.iter().map(|z| (z - max).exp()).sum();
    let mut all: Vec<(usize, f64)> =
        row.iter().enumerate().map(|(id, z)| (id, f64::from(((z - max).exp() / sum).ln()))).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(k);
    all
}

/// Tokens that were asked; the others are what was answered.
const ASKED: usize = 2;

/// llama-server's answer to a prompt of the first tokens.
fn chat(rows: &[Vec<f32>], k: usize) -> Value {
    let ids = tokens();
    let said = |at: usize| {
        let entry =
            |(id, logprob): &(usize, f64)| json!({ "id": id, "token": "", "bytes": [], "logprob": logprob });
        let top: Vec<Value> = likeliest(&rows[at], k).iter().map(entry).collect();
        let next = ids.get(at + 1).copied().unwrap_or(0);
        json!({ "id": next, "token": "", "bytes": [], "top_logprobs": top })
    };
    let content: Vec<Value> = (ASKED - 1..rows.len()).map(said).collect();
    json!({ "object": "chat.completion", "choices": [{ "index": 0, "logprobs": { "content": content } }] })
}

fn prompt() -> String {
    tokens().iter().take(ASKED).map(i64::to_string).collect::<Vec<_>>().join(",")
}

/// The healthy rows as an engine with RoPE of another base has them: parity's own, with the mistake injected.
fn wrong(fault: &str) -> Vec<Vec<f32>> {
    let (_dir, at) = folder();
    let ids = tokens().iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    let run =
        ["run", "-m", F16, "--device", "cpu", "--tokens", &ids, "--inject", fault, "--no-audit", "--dump"];
    let _ = parity(&run).arg(at.join("dump")).assert();
    let dump = Dump::open(&at.join("dump")).unwrap();
    let positions: Vec<u32> = (0..tokens().len() as u32).collect();
    let values = dump.gather("logits".parse().unwrap(), &positions).unwrap();
    values.chunks(values.len() / positions.len()).map(<[f32]>::to_vec).collect()
}

#[test]
fn perplexity_of_llama_cpp_is_judged() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let [right, rope, recorded] = REAL.map(|file| root.join(file));
    diff(&right, &recorded).assert().code(0).stdout(contains("all 16 384 values agree"));
    diff(&right, &recorded).args(["-m", F16]).assert().code(0).stdout(contains("PARITY"));
    diff(&rope, &recorded).args(["-m", F16]).assert().code(1).stdout(contains("DIVERGES at logits"));
    diff(&rope, &recorded).assert().code(2).stdout(contains("an audit (-m MODEL"));
    audit(&rope).assert().code(1).stdout(contains("DIVERGES at logits").and(contains("first of 2 chunks")));
    // Half precision in every matmul hides mistakes: logits alone are no parity then.
    audit(&right).assert().code(2).stdout(contains("too much for mistakes to show").and(contains("4 rows")));
}

#[test]
fn what_a_format_hides_is_no_difference_and_what_it_shows_is() {
    let (_dir, at) = folder();
    let (right, other) = (logits(), wrong("rope.base=10000"));
    fs::write(at.join("right.kld"), perplexity(&right)).unwrap();
    fs::write(at.join("wrong.kld"), perplexity(&other)).unwrap();
    audit(&at.join("right.kld")).assert().code(0).stdout(contains("PARITY"));
    diff(&at.join("right.kld"), healthy()).assert().code(0).stdout(contains("PARITY"));
    diff(&at.join("right.kld"), healthy()).args(["-m", F16]).assert().code(0).stdout(contains("PARITY"));
    audit(&at.join("wrong.kld")).assert().code(1).stdout(contains("DIVERGES at logits"));
    diff(&at.join("wrong.kld"), healthy()).args(["-m", F16]).assert().code(1);
    diff(&at.join("wrong.kld"), healthy()).assert().code(2).stdout(contains("an audit (-m MODEL"));
}

#[test]
fn the_likeliest_tokens_of_a_server_are_judged_and_no_more_is_claimed() {
    let (_dir, at) = folder();
    let (right, other) = (logits(), wrong("rope.base=10000"));
    let rows = right.len() - (ASKED - 1);
    for k in [1, 2, 20] {
        let (good, bad) = (at.join(format!("good{k}.json")), at.join(format!("bad{k}.json")));
        fs::write(&good, chat(&right, k).to_string()).unwrap();
        fs::write(&bad, chat(&other, k).to_string()).unwrap();
        let told = ["--tokens", &prompt()];
        let values = format!("{} values of {rows} rows", k * rows);
        audit(&good).args(told).assert().code(0).stdout(contains("PARITY").and(contains(values)));
        audit(&bad)
            .args(told)
            .args(["--numerics", "f32"])
            .assert()
            .code(1)
            .stdout(contains("DIVERGES at logits"));
        audit(&bad).args(told).assert().stdout(contains("PARITY").not());
        diff(&good, healthy()).args(told).assert().code(0).stdout(contains("PARITY"));
    }
    audit(&at.join("good2.json")).assert().code(2).stderr(contains("the tokens of the prompt"));
}

#[test]
fn an_undecided_answer_says_in_which_arithmetic_it_would_be_wrong() {
    let (_dir, at) = folder();
    let file = at.join("near.json");
    fs::write(&file, chat(&wrong("rope.base=900000"), 10).to_string()).unwrap();
    let told = ["--tokens", &prompt()];
    let said = contains("`f32` (").and(contains("times over)")).and(contains("--numerics"));
    audit(&file).args(told).assert().code(2).stdout(contains("UNDECIDED").and(said));
    audit(&file)
        .args(told)
        .args(["--numerics", "f32"])
        .assert()
        .code(1)
        .stdout(contains("DIVERGES at logits"));
    fs::write(&file, chat(&logits(), 10).to_string()).unwrap();
    audit(&file).args(told).assert().code(0).stdout(contains("times over").not());
}

#[test]
fn answers_of_llama_server_are_judged() {
    let whole = tokens().iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    let answer = |path| {
        let mut command = audit(Path::new(path));
        command.args(["--tokens", &whole]);
        command
    };
    let says = contains("PARITY: 1 checkpoint").and(contains("judged in the arithmetic `f32`"));
    answer(SERVER[0]).assert().code(0).stdout(says.and(contains("60 values of 6 rows")));
    answer(SERVER[1]).assert().code(1).stdout(contains("DIVERGES at logits"));
    answer(SERVER[1]).args(["--numerics", "f32"]).assert().code(1).stdout(contains("DIVERGES at logits"));
}

#[test]
fn completions_name_tokens_by_text_and_vllm_by_number() {
    let (_dir, at) = folder();
    let (rows, ids) = (logits(), tokens());
    let spelt = |id: usize| format!("token_id:{id}");
    let top = |at: usize| -> Value {
        likeliest(&rows[at], 5)
            .into_iter()
            .map(|(id, value)| (spelt(id), json!(value)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let echoed: Vec<Value> = ids.iter().map(|id| json!(spelt(*id as usize))).collect();
    let tops: Vec<Value> =
        (0..ids.len()).map(|place| if place == 0 { Value::Null } else { top(place - 1) }).collect();
    let own: Vec<Value> = ids.iter().map(|_| Value::Null).collect();
    let answer = json!({ "object": "text_completion", "choices": [{ "logprobs":
        { "tokens": echoed, "token_logprobs": own, "top_logprobs": tops } }] });
    fs::write(at.join("echo.json"), answer.to_string()).unwrap();
    audit(&at.join("echo.json")).assert().code(0).stdout(contains("PARITY"));
    fs::write(at.join("none.json"), r#"{"choices": [{"logprobs": null}]}"#).unwrap();
    audit(&at.join("none.json")).assert().code(2).stderr(contains("\"top_logprobs\": 20"));
    fs::write(at.join("two.json"), r#"{"choices": [{}, {}]}"#).unwrap();
    audit(&at.join("two.json")).assert().code(2).stderr(contains("\"n\": 1"));
}

#[test]
fn damaged_files_are_refused() {
    let (_dir, at) = folder();
    let whole = perplexity(&logits());
    let refused = |bytes: &[u8], said: &str| {
        fs::write(at.join("damaged.kld"), bytes).unwrap();
        audit(&at.join("damaged.kld")).assert().code(2).stderr(contains(said.to_owned()));
    };
    refused(&whole[..whole.len() - 3], "is damaged");
    refused(&whole[..11], "bytes of header");
    let mut other = whole.clone();
    other[12..16].copy_from_slice(&i32::MAX.to_le_bytes());
    refused(&other, "is damaged");
    other[8..12].copy_from_slice(&(-1i32).to_le_bytes());
    refused(&other, "is damaged");
    let mut nan = whole;
    let row = 20 + 4 * tokens().len();
    nan[row..row + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(at.join("nan.kld"), &nan).unwrap();
    audit(&at.join("nan.kld")).assert().code(1).stdout(contains("NaN"));
}
