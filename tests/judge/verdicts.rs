//! What passes and what does not, as a user meets it: nothing passes that was not looked at, nothing healthy is
//! accused, and what is wrong first is named first.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use half::bf16;
use parity::ops::bound::{CONFIDENCE, UNIT_F32};
use parity_graph::fault::entries;
use predicates::str::contains;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::program::{flat, parity, report};
use crate::support::samples::sample;

const PROMPT: &str = "def read_lines(path):";
const F16: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const Q4: &str = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";
const REFERENCE: &str = "reference-dumps/qwen2-tiny-py-F16/read_lines";

/// A dump of the tiny model in a folder of its own.
fn dump(args: &[&str]) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump").to_str().unwrap().to_owned();
    let run = ["run", "--device", "cpu", "--no-audit", "--dump", &path];
    parity(&run).args(args).assert().failure();
    (dir, path)
}

/// Text of so many tokens, whatever they are.
fn long(tokens: u32) -> String {
    let ids: Vec<String> = (0..tokens).map(|i| (10 + i * 37 % 3000).to_string()).collect();
    ids.join(",")
}

fn entry<'a>(report: &'a Value, id: &str) -> &'a Value {
    report["checkpoints"].as_array().unwrap().iter().find(|entry| entry["id"] == id).unwrap()
}

fn spaced(command: &mut Command, code: i32) -> String {
    flat(&String::from_utf8(command.assert().code(code).get_output().stdout.clone()).unwrap())
}

/// Of a tensor: its name, width and values.
type Edit<'a> = &'a dyn Fn(&str, usize, &mut Vec<f32>);

/// Changes the first step of a dump; all of it is written as `dtype`.
fn edit(path: &str, dtype: Dtype, change: Edit<'_>) {
    let file = Path::new(path).join("step-0000.safetensors");
    let bytes = fs::read(&file).unwrap();
    let step = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = step
        .iter()
        .map(|(name, view)| {
            assert_eq!(view.dtype(), Dtype::F32);
            let four = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
            let mut values: Vec<f32> = view.data().chunks_exact(4).map(four).collect();
            if dtype == Dtype::BF16 {
                values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
            change(name, view.shape()[1..].iter().product(), &mut values);
            let data = match dtype {
                Dtype::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            (name.to_owned(), view.shape().to_vec(), data)
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, data)| (name.clone(), TensorView::new(dtype, shape.clone(), data).unwrap()));
    fs::write(&file, serialize(views, None).unwrap()).unwrap();
}

fn manifest(path: &str, change: impl Fn(&mut Value)) {
    let file = Path::new(path).join("manifest.json");
    let mut text: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    change(&mut text);
    fs::write(&file, text.to_string()).unwrap();
}

/// Roundings of a sum over the columns of the models, √256.
const SUM: f64 = 16.0;
/// Sums so far wander as far as all terms do, and on to the result.
const WANDER: f64 = 2.0;
/// In quadrature: two results that are added to the stream in each of four layers, and the logits' own product.
const RESULTS: f64 = 3.0;
/// Root mean square of roundings that are uniform within ±1.
const UNIFORM: f64 = 0.577;
/// What an engine in f32 may be blind to in logits alone: what rounding moves them by, and how many times further it may.
const BLIND: f64 = CONFIDENCE * UNIT_F32 * SUM * WANDER * RESULTS * UNIFORM;

#[test]
fn no_fault_passes_where_only_the_logits_are_looked_at() {
    for model in sample("models", 1, [F16, Q4]) {
        let run = ["run", "--device", "cpu", "-m", model, "-p", PROMPT, "--checkpoint", "logits"];
        let healthy = report(&mut parity(&run), 0);
        assert!(healthy["reason"].as_str().unwrap().contains("an exact forward pass"), "{healthy}");
        let (mut injected, mut unseen) = (0, 0);
        for fault in entries().filter(|entry| !entry.recognised) {
            for place in [format!("{}@1", fault.name), fault.name.to_owned()] {
                let output = parity(&run).args(["--inject", &place, "--format", "json"]).output().unwrap();
                // A mistake that has no place in a layer has one outside of them.
                let Ok(found) = serde_json::from_slice::<Value>(&output.stdout) else { continue };
                injected += 1;
                let evidence = entry(&found, "logits")["evidence"].as_str().unwrap();
                let distance = evidence.split("it is ").nth(1).and_then(|rest| rest.split(' ').next());
                let distance: f64 = distance.and_then(|number| number.parse().ok()).unwrap_or(f64::NAN);
                // Cache and decode step play no part here, rotations of queries and keys alike cancel, and an epsilon
                // is lost in large rows: what leaves the logits as they are but for rounding cannot show. The next ones
                // move them by ten times that.
                let passes = output.status.code() == Some(0);
                assert!(!passes || distance <= BLIND, "{model}: {place} passes: {evidence}");
                unseen += usize::from(passes);
                break;
            }
        }
        assert!(injected > 80 && unseen < 10, "{unseen} of {injected}");
    }
}

#[test]
fn other_tokens_are_no_parity() {
    let other = ["run", "--device", "cpu", "-p", "def read_words(path):", "--reference", REFERENCE];
    let said = spaced(&mut parity(&other), 2);
    assert!(said.contains("UNDECIDED: the tokens differ: from position 2 on the candidate has"), "{said}");
    parity(&other).arg("--allow-missing").assert().code(2);
    let suite = |case: &str| {
        let dir = tempfile::tempdir().unwrap();
        let root = env!("CARGO_MANIFEST_DIR");
        let text = format!(
            "name = \"t\"\n[prompts]\nother = \"def read_words(path):\"\n[[case]]\nname = \"a\"\nreference = \
             \"{root}/{REFERENCE}\"\n{case}\n"
        );
        fs::write(dir.path().join("suite.toml"), text).unwrap();
        dir
    };
    let gate = |dir: &TempDir| parity(&["gate", dir.path().join("suite.toml").to_str().unwrap()]);
    let said = contains("the tokens differ");
    gate(&suite("prompt = \"other\"")).assert().code(2).stdout(said.clone());
    let waived =
        "prompt = \"other\"\n[[case.waive]]\ncheckpoint = \"*\"\nreason = \"r\"\nuntil = \"2999-01-01\"";
    gate(&suite(waived)).assert().code(2).stdout(said);
    // The gate takes dumps as they are, too.
    let ((_a, whole), (_b, bad)) =
        (dump(&["-p", PROMPT, "-n", "8"]), dump(&["-p", PROMPT, "-n", "8", "--inject", "norm.eps@1"]));
    gate(&suite(&format!("dump = \"{whole}\""))).assert().code(0);
    gate(&suite(&format!("dump = \"{bad}\""))).assert().code(1).stdout(contains("the norm's eps is 1e-5"));
}

#[test]
fn token_lists_are_aligned_and_each_side_is_judged_by_itself() {
    let with = |tokens: &str, more: &[&str]| dump(&[&["--tokens", tokens], more].concat());
    let (_a, right) = with("312,863,2039,1444,1518", &[]);
    let healthy = "by itself the candidate is healthy, in all 75 nodes; by itself the reference is healthy, in all 75 nodes";
    for (tokens, expected) in [
        ("7,312,863,2039,1444,1518", "the candidate has one token more at position 0; the other 5 are alike"),
        ("863,2039,1444,1518", "the reference has one token more at position 0; the other 4 are alike"),
        (
            "312,863,9,9,2039,1444,1518",
            "the candidate has 2 tokens more at positions 2 to 3; the other 5 are alike",
        ),
        (
            "8,9,312,863,2039,1444,1518,10",
            "the candidate has 2 tokens more at positions 0 to 1, and the candidate has one token more at position 7; \
             the other 5 are alike",
        ),
        (
            "312,11,12,1444,1518",
            "from position 1 on the candidate has 2 tokens in place of the reference's 2; the other 3 are alike",
        ),
    ] {
        let (_b, other) = with(tokens, &[]);
        let said = spaced(&mut parity(&["diff", &other, &right]), 2);
        assert!(said.contains(&format!("UNDECIDED: the tokens differ: {expected}")), "{said}");
        let said = spaced(&mut parity(&["diff", &other, &right, "-m", F16]), 2);
        assert!(said.contains(&format!("UNDECIDED: the tokens differ: {expected}; {healthy}")), "{said}");
    }
    // A node that does not follow from its own inputs is wrong behind any tokens.
    let (_b, wrong) = with("7,312,863,2039,1444,1518", &["--inject", "norm.unit_offset@1"]);
    let said = spaced(&mut parity(&["diff", &wrong, &right, "-m", F16]), 1);
    assert!(said.contains("DIVERGES at blk.1.attn_norm") && said.contains("begins with token 7"), "{said}");
    let said = spaced(&mut parity(&["diff", &right, &wrong, "-m", F16]), 2);
    assert!(said.contains("by itself the reference is wrong from blk.1.attn_norm on"), "{said}");
}

#[test]
fn a_candidate_of_a_few_tokens_is_no_parity() {
    let ((_a, whole), (_b, short)) = (dump(&["--tokens", &long(19)]), dump(&["--tokens", &long(2)]));
    for (more, code) in [(vec![], 2), (vec!["-m", F16], 2), (vec!["-m", F16, "--allow-missing"], 0)] {
        let said = spaced(parity(&["diff", &short, &whole]).args(more), code);
        assert!(said.contains("the candidate has 2 tokens and the reference 19"), "{said}");
    }
}

#[test]
fn positions_are_each_recorded_once_and_all_of_them_counted() {
    let (_a, path) = dump(&["--tokens", &long(19)]);
    manifest(&path, |m| m["steps"][0]["positions"] = json!(vec![0; 19]));
    for command in [vec!["audit", &path, "-m", F16], vec!["diff", &path, REFERENCE]] {
        parity(&command).assert().code(2).stderr(contains("position 0 is recorded twice"));
    }
    let (_b, path) = dump(&["--tokens", &long(19)]);
    let step = |m: &mut Value| {
        let again = m["steps"][0].clone();
        m["steps"].as_array_mut().unwrap().push(again);
    };
    manifest(&path, step);
    parity(&["audit", &path]).assert().code(2).stderr(contains("position 0 is recorded twice"));
    // A step of one token of nineteen.
    let (_c, one) = dump(&["--tokens", &long(1)]);
    let tokens: Vec<u32> = long(19).split(',').map(|id| id.parse().unwrap()).collect();
    manifest(&one, |m| m["tokens"] = json!(tokens));
    let said = spaced(&mut parity(&["audit", &one]), 2);
    assert!(said.contains("the dump has rows at 1 of its 19 tokens"), "{said}");
}

#[test]
fn an_interrupted_dump_is_said_to_be_one() {
    let (_a, path) = dump(&["-p", PROMPT]);
    manifest(&path, |m| m["complete"] = json!(false));
    parity(&["audit", &path]).assert().stdout(contains("the dump is an interrupted recording"));
}

#[test]
fn a_tolerance_explains_nothing() {
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--rtol", "1e9"];
    let said = spaced(parity(&run).arg("--no-audit"), 0);
    assert!(said.contains("tolerance given; neither side") && !said.contains("rounding explains"), "{said}");
}

#[test]
fn rows_outside_of_the_sample_are_looked_at_in_every_arithmetic() {
    let zero = |id: &'static str, row: usize| {
        move |name: &str, width: usize, values: &mut Vec<f32>| {
            if name == id {
                values[row * width..(row + 1) * width].fill(0.0);
            }
        }
    };
    let nan = |name: &str, width: usize, values: &mut Vec<f32>| {
        if name == "logits" {
            values[7 * width + 3] = f32::NAN;
        }
    };
    let exchanged = |name: &str, width: usize, values: &mut Vec<f32>| {
        if name == "logits" {
            values.swap(7 * width + 11, 7 * width + 900);
        }
    };
    for dtype in [Dtype::F32, Dtype::BF16] {
        let (_a, healthy) = dump(&["--tokens", &long(19)]);
        manifest(&healthy, |m| m["producer"] = json!({ "name": "other" }));
        edit(&healthy, dtype, &|_, _, _| {});
        parity(&["audit", &healthy]).assert().code(0);
        let cases: [(&str, Edit<'_>); 5] = [
            ("logits", &zero("logits", 7)),
            ("blk.1.ffn_up", &zero("blk.1.ffn_up", 7)),
            ("blk.2.attn_ctx", &zero("blk.2.attn_ctx", 6)),
            ("logits", &nan),
            ("logits", &exchanged),
        ];
        for (id, change) in cases {
            let (_b, path) = dump(&["--tokens", &long(19)]);
            manifest(&path, |m| m["producer"] = json!({ "name": "other" }));
            edit(&path, dtype, change);
            let found = report(&mut parity(&["audit", &path]), 1);
            assert_eq!(found["first_divergence"]["checkpoint"], id, "{dtype:?}");
        }
    }
}

#[test]
fn attention_is_looked_at_at_any_length() {
    let (_a, path) = dump(&["--tokens", &long(200)]);
    parity(&["audit", &path]).assert().code(0);
    for rows in sample("wrong rows", 1, [77..78, 2..198]) {
        let (_b, path) = dump(&["--tokens", &long(200)]);
        edit(&path, Dtype::F32, &|name, width, values| {
            if name == "blk.1.attn_ctx" {
                values[rows.start * width..rows.end * width].fill(0.0);
            }
        });
        let found = report(&mut parity(&["audit", &path]), 1);
        assert_eq!(found["first_divergence"]["checkpoint"], "blk.1.attn_ctx");
    }
}

#[test]
fn a_fault_of_the_reference_alone_is_no_divergence() {
    let ((_a, good), (_b, bad)) = (dump(&["-p", PROMPT]), dump(&["-p", PROMPT, "--inject", "ffn.gelu@1"]));
    for more in [&[][..], &["--rtol", "1e-6"]] {
        let found = report(parity(&["diff", &good, &bad, "-m", F16]).args(more), 2);
        assert_eq!(found["verdict"], "undecided");
        assert_eq!(entry(&found, "blk.1.ffn_act")["verdict"], "reference");
    }
    let (_c, nan) = dump(&["-p", PROMPT, "--inject", "data.nan@blk.1.v"]);
    for more in [&[][..], &["-m", F16], &["--rtol", "1e9"]] {
        let found = report(parity(&["diff", &good, &nan]).args(more), 2);
        assert_eq!(entry(&found, "blk.1.v")["verdict"], "reference", "{more:?}");
        assert_eq!(found["first_divergence"], Value::Null);
    }
}

#[test]
fn what_a_verdict_rests_on_is_judged_itself() {
    let keep = ["--checkpoint", "*"];
    let without_scores = |args: &[&str], change: Edit<'_>| {
        let (dir, path) = dump(&[&["-p", PROMPT], &keep[..], args].concat());
        edit(&path, Dtype::F32, change);
        let file = Path::new(&path).join("step-0000.safetensors");
        let bytes = fs::read(&file).unwrap();
        let step = SafeTensors::deserialize(&bytes).unwrap();
        let kept: Vec<_> =
            step.tensors().into_iter().filter(|(name, _)| !name.ends_with("attn_scores")).collect();
        fs::write(&file, serialize(kept, None).unwrap()).unwrap();
        (dir, path)
    };
    let nothing: Edit<'_> = &|_, _, _| {};
    let (_a, healthy) = without_scores(&[], nothing);
    parity(&["audit", &healthy]).assert().code(0);
    parity(&["audit", &healthy, "--checkpoint", "*.attn_probs"]).assert().code(0);
    let (_b, faulty) = without_scores(&["--inject", "attn.no_scale@1"], nothing);
    let found = report(&mut parity(&["audit", &faulty]), 1);
    assert_eq!(found["first_divergence"]["checkpoint"], "blk.1.attn_probs");
    // Probabilities of zeros are wrong themselves, and what was computed beside them is not.
    let zeros: Edit<'_> = &|name, _, values| {
        if name == "blk.1.attn_probs" {
            values.fill(0.0);
        }
    };
    let (_c, probs_alone) = without_scores(&[], zeros);
    let (_d, all) = dump(&[&["-p", PROMPT], &keep[..]].concat());
    edit(&all, Dtype::F32, zeros);
    for (path, more) in [(&probs_alone, "--allow-missing"), (&all, "--allow-missing")] {
        let found = report(&mut parity(&["audit", path, "--checkpoint", "*", more]), 1);
        assert_eq!(found["origins"], json!(["blk.1.attn_probs"]), "{path}");
    }
    parity(&["audit", &all]).assert().code(1).stdout(contains("blk.1.attn_probs"));
}

#[test]
fn names_and_declarations_decide_nothing() {
    let (dir, path) = dump(&["-p", PROMPT]);
    let other = dir.path().join("llama-4.1");
    fs::rename(&path, &other).unwrap();
    let other = other.to_str().unwrap();
    manifest(other, |m| m["producer"] = json!({ "name": "llama.cpp-like", "backend": "cpu" }));
    parity(&["audit", other]).assert().code(0);
    for producer in [json!({ "name": "x" }), json!({ "name": "x", "numerics": "bf16 storage=bf16 kv=bf16" })]
    {
        let (_b, path) = dump(&["-p", PROMPT]);
        edit(&path, Dtype::BF16, &|_, _, _| {});
        manifest(&path, |m| m["producer"] = producer.clone());
        parity(&["audit", &path]).assert().code(0);
    }
}

#[test]
fn tiny_rows_are_rounding() {
    let (_a, path) = dump(&["-p", PROMPT]);
    // What is added to such a row leaves it as it is; what flushes small numbers to zero loses it.
    edit(&path, Dtype::F32, &|name, _, values| {
        if name == "blk.1.attn_ctx" || name == "blk.1.attn_out" {
            values.iter_mut().for_each(|x| *x *= 1e-38);
        }
    });
    let found = report(&mut parity(&["audit", &path, "--checkpoint", "blk.1.attn_out"]), 0);
    assert_eq!(entry(&found, "blk.1.attn_out")["verdict"], "match");
}

#[test]
fn the_first_of_many_faults_is_found_first() {
    let (_a, path) = dump(&["--tokens", &long(60)]);
    // One row early, and a later node wrong in many rows that the sample leaves out.
    edit(&path, Dtype::F32, &|name, width, values| {
        if name == "blk.0.ffn_up" {
            values[33 * width..34 * width].iter_mut().for_each(|x| *x *= 1.01);
        }
        if name == "blk.2.ffn_gate" {
            for row in (4..58).filter(|row| row % 2 == 0) {
                values[row * width..(row + 1) * width].fill(0.25);
            }
        }
    });
    let found = report(&mut parity(&["audit", &path]), 1);
    assert_eq!(found["origins"], json!(["blk.0.ffn_up", "blk.2.ffn_gate"]));
    // A NaN of a node is not the next one's.
    for id in ["blk.1.v", "blk.1.attn_norm", "blk.2.ffn_act"] {
        let (_b, path) = dump(&["--tokens", &long(40), "--inject", &format!("data.nan@{id}")]);
        for command in [vec!["audit", &path], vec!["diff", &path, &path, "-m", F16]] {
            let found = report(&mut parity(&command), 1);
            assert_eq!(found["first_divergence"]["checkpoint"], id);
            assert_eq!(found["first_divergence"]["verdict"], "nonfinite", "{found}");
            let blamed =
                found["checkpoints"].as_array().unwrap().iter().filter(|e| e["verdict"] == "nonfinite");
            assert_eq!(blamed.count(), 1);
        }
    }
}

#[test]
fn a_dump_that_is_wrong_where_its_engine_is_not_is_said_so() {
    let (_a, path) = dump(&["-p", PROMPT]);
    edit(&path, Dtype::F32, &|name, _, values| {
        if name == "blk.1.q" {
            values.reverse();
        }
    });
    let found = report(&mut parity(&["audit", &path]), 1);
    assert_eq!(found["origins"], json!(["blk.1.q"]));
    let evidence = entry(&found, "blk.1.q")["evidence"].as_str().unwrap();
    assert!(evidence.contains("the dump is wrong here, the engine is not"), "{evidence}");
}

#[test]
fn hidden_states_and_logits_alone_are_judged_by_what_rounding_carries() {
    for only in [["--checkpoint", "blk.*.layer_out"], ["--checkpoint", "logits"]] {
        let audit = |path: &str, code| report(parity(&["audit", path]).args(only), code);
        for numerics in sample("arithmetics", 1, ["f32", "bf16", "f16"]) {
            let (_a, healthy) = dump(&[&["--tokens", &long(19), "--numerics", numerics][..], &only].concat());
            audit(&healthy, 0);
            manifest(&healthy, |manifest| manifest["producer"]["numerics"] = Value::Null);
            // One tensor alone tells a coarser arithmetic from a faint mistake only where hardly anything is left once its
            // roundings are followed.
            let output = parity(&["audit", &healthy]).args(only).output().unwrap();
            let is_told = numerics == "f32" || only[1] != "logits";
            let right: &[i32] = if is_told { &[0] } else { &[0, 2] };
            let code = output.status.code();
            assert!(code.is_some_and(|code| right.contains(&code)), "{numerics}, {only:?}: exit {code:?}");
        }
        let fault = ["--tokens", &long(19), "--inject", "rope.base=10000@2"];
        let (_b, faulty) = dump(&[&fault[..], &only].concat());
        assert_eq!(audit(&faulty, 1)["first_divergence"]["checkpoint"], only[1].replace('*', "2"));
    }
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "3", "--inject", "rope.base@2"];
    parity(&run).assert().code(2).stdout(contains("exact forward pass"));
}
