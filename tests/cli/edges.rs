//! Inputs that are not what they are taken for, as a user meets them: refused, bracketed, or said to be unknown.

use std::fs;
use std::path::{Path, PathBuf};

use predicates::prelude::*;
use predicates::str::contains;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::program::{parity, report};

const PROMPT: &str = "def read_lines(path):";
const F16: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const Q4: &str = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";

/// A dump of [`PROMPT`] in a folder of its own.
fn dump(args: &[&str]) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump").to_str().unwrap().to_owned();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--no-audit", "--dump", &path];
    parity(&run).args(args).assert().failure();
    (dir, path)
}

fn checkpoint<'a>(report: &'a Value, id: &str) -> &'a Value {
    report["checkpoints"].as_array().unwrap().iter().find(|entry| entry["id"] == id).unwrap()
}

#[test]
fn a_dump_of_another_model_is_refused_and_noted_where_no_model_is_given() {
    let ((_a, f16), (_b, q4)) = (dump(&[]), dump(&["-m", Q4]));
    let other = || {
        contains("is a dump of another model")
            .and(contains("qwen2-tiny-py-F16.gguf (fingerprint"))
            .and(contains("qwen2-tiny-py-Q4_K_M.gguf (fingerprint"))
            .and(contains("hint:"))
    };
    parity(&["run", "--device", "cpu", "-m", Q4, "--reference", &f16]).assert().code(2).stderr(other());
    parity(&["diff", &q4, &f16, "-m", F16]).assert().code(2).stderr(other());
    parity(&["diff", &f16, &q4, "-m", F16]).assert().code(2).stderr(other());
    parity(&["audit", &f16, "-m", Q4]).assert().code(2).stderr(other());
    let two = report(&mut parity(&["diff", &q4, &f16]), 2);
    assert!(two["notes"][0].as_str().unwrap().contains("dumps are of two models"), "{}", two["notes"]);
}

#[test]
fn an_injected_mistake_without_effect_is_said_to_be_without() {
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--inject"];
    let same = parity(&run).arg("rope.base=1000000@1").assert().code(2);
    same.stderr(contains("another base than the model's"));
    parity(&run).arg("rope.base=1000001@1").assert().code(0).stdout(contains("left no trace"));
    parity(&run).arg("rope.base=10000@1").assert().code(1).stdout(contains("left no trace").not());
}

#[test]
fn what_was_given_in_place_of_a_file_or_a_number_is_said() {
    parity(&["run", "-m", "/tmp", "-p", "x"]).assert().code(2).stderr(contains("found:    a folder"));
    parity(&["run", "-t", "x", "-p", "x"]).assert().code(2).stderr(contains("a whole number from 1"));
}

#[test]
fn an_audit_takes_the_model_that_the_dump_was_made_with() {
    let (dir, path) = dump(&["-m", Q4]);
    parity(&["audit", &path]).assert().code(0).stdout(contains("Q4_K_M").and(contains("healthy")));
    let manifest = Path::new(&path).join("manifest.json");
    let mut text: Value = serde_json::from_str(&fs::read_to_string(&manifest).unwrap()).unwrap();
    text["model"] = json!({ "file": "renamed.gguf", "fingerprint": text["model"]["fingerprint"] });
    fs::write(&manifest, text.to_string()).unwrap();
    parity(&["audit", &path]).assert().code(0).stdout(contains("renamed.gguf"));
    text["model"] = json!({ "file": "mine.gguf" });
    fs::write(&manifest, text.to_string()).unwrap();
    parity(&["audit", &path]).assert().code(2).stderr(contains("mine.gguf").and(contains("-m MODEL")));
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(Q4), dir.path().join("mine.gguf")).unwrap();
    parity(&["audit", &path]).env("PARITY_MODELS", dir.path()).assert().code(0);
}

/// One `.safetensors` file of `(name, tensor of the dump)`, with the dump's tokens.
fn single(dump: &str, tensors: &[(&str, &str)]) -> PathBuf {
    let folder = Path::new(dump);
    let bytes = fs::read(folder.join("step-0000.safetensors")).unwrap();
    let step = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let manifest: Value =
        serde_json::from_str(&fs::read_to_string(folder.join("manifest.json")).unwrap()).unwrap();
    let tokens = manifest["tokens"].as_array().unwrap();
    let ids: Vec<u8> = tokens.iter().flat_map(|t| (t.as_u64().unwrap() as u32).to_le_bytes()).collect();
    let mut views = vec![("tokens", TensorView::new(Dtype::U32, vec![tokens.len()], &ids).unwrap())];
    views.extend(tensors.iter().map(|(name, id)| (*name, step.tensor(id).unwrap())));
    let file = folder.parent().unwrap().join("mine.safetensors");
    fs::write(&file, serialize(views, None).unwrap()).unwrap();
    file
}

#[test]
fn names_that_are_not_understood_are_said_and_one_checkpoint_has_one_tensor() {
    let (dir, path) = dump(&[]);
    let file = single(&path, &[("embed", "embed"), ("h.0", "blk.0.attn_norm"), ("h.1", "blk.1.attn_norm")]);
    let file = file.to_str().unwrap();
    let map = |lines: &[(&str, &str)]| {
        let map = dir.path().join("map.toml");
        let lines: Vec<String> = lines.iter().map(|(name, id)| format!("\"{name}\" = \"{id}\"\n")).collect();
        fs::write(&map, lines.concat()).unwrap();
        map
    };
    let diff = |names: Option<&PathBuf>| {
        let mut command = parity(&["diff", file, &path, "--allow-missing"]);
        names.map(|names| command.arg("--names").arg(names));
        command
    };
    let named = || contains("2 (h.0, h.1); --names MAP.toml");
    diff(None).assert().code(0).stdout(named());
    parity(&["audit", file, "-m", F16, "--checkpoint", "embed"]).assert().code(0).stdout(named());
    let good = map(&[("h.0", "blk.0.attn_norm"), ("h.1", "blk.1.attn_norm"), ("h.9", "blk.3.attn_norm")]);
    let translated = || contains("h.9").and(contains("--names").not()).and(contains("3 checkpoints"));
    diff(Some(&good)).assert().code(0).stdout(translated());
    // The map is of the side whose names are no ids.
    let turned = ["diff", &path, file, "--allow-missing", "--names", good.to_str().unwrap()];
    parity(&turned).assert().code(0).stdout(translated());
    let pattern = map(&[("h.{n}", "blk.{n}.attn_norm")]);
    diff(Some(&pattern)).assert().code(0).stdout(contains("3 checkpoints"));
    for twice in [&[("h.0", "blk.0.attn_norm"), ("h.1", "blk.0.attn_norm")][..], &[("h.0", "embed")]] {
        diff(Some(&map(twice))).assert().code(2).stderr(contains("two tensors are").and(contains("h.0")));
    }
}

#[test]
fn a_command_is_never_told_to_be_typed_again() {
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--inject", "rope.base=10000@2"];
    let next = |more: &[&str]| {
        let output = parity(&run).args(more).assert().code(1).get_output().stdout.clone();
        let text = String::from_utf8(output).unwrap();
        text.lines().filter(|line| line.starts_with("  next: ")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(next(&[])[0].ends_with("--layer 2 --checkpoint blk.2.q_rope"));
    let narrowed = ["--checkpoint", "blk.2.q_rope", "--layer", "2"];
    assert!(next(&narrowed)[0].ends_with("--report report"), "{:?}", next(&narrowed));
    let dir = tempfile::tempdir().unwrap();
    let kept = ["--report", dir.path().to_str().unwrap()];
    assert!(next(&[&narrowed[..], &kept].concat()).is_empty());
}

#[test]
fn an_origin_that_was_not_looked_at_is_bracketed_and_no_parity() {
    let layer_out = ["--checkpoint", "blk.*.layer_out"];
    let faulty = [&layer_out[..], &["--inject", "rope.base@2"]].concat();
    let between = contains("between blk.1.layer_out, the last that agrees, and blk.2.layer_out")
        .and(contains("--layer 2"));
    let spaced = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let run = ["run", "--device", "cpu", "-p", PROMPT];
    let output = parity(&run).args(&faulty).assert().code(2).get_output().stdout.clone();
    assert!(between.eval(&spaced(&String::from_utf8(output).unwrap())));
    let healthy = parity(&run).args(layer_out).assert().code(0).get_output().stdout.clone();
    assert!(spaced(&String::from_utf8(healthy).unwrap()).contains("as far as they were looked at"));
    // Faults before the layers that were chosen.
    parity(&run).args(["--layer", "3", "--inject", "rope.base@2"]).assert().code(2);
    parity(&run).args(["--layer", "3"]).assert().code(0);

    let ((_a, whole), (_b, part)) = (dump(&[]), dump(&faulty));
    for (more, code) in [(vec![], 2), (vec!["-m", F16], 1), (vec!["-m", F16, "--nmse", "1e-6"], 1)] {
        let mut command = parity(&["diff", &part, &whole]);
        let output = command.args(layer_out).args(&more).assert().code(code).get_output().stdout.clone();
        let text = spaced(&String::from_utf8(output).unwrap());
        // With the model the stretch is computed again.
        let found = text.contains("DIVERGES at blk.2.layer_out")
            && text.contains("in blk.2.q_rope and blk.2.k_rope, which were not recorded (rope.base");
        assert!(between.eval(&text) || found && more.contains(&F16), "{more:?}: {text}");
        assert!(!text.contains("its local error is rounding"), "{more:?}: nothing is known of it: {text}");
    }
}

#[test]
fn a_fault_in_what_only_the_reference_lacks_is_its_origin() {
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--inject", "attn.kv_head@1"];
    assert_eq!(report(&mut parity(&run), 1)["first_divergence"]["checkpoint"], "blk.1.attn_ctx");
    let all = report(parity(&run).args(["--checkpoint", "*"]), 1);
    assert_eq!(all["first_divergence"]["checkpoint"], "blk.1.attn_scores");
}

#[test]
fn nothing_compared_does_not_look_like_a_match() {
    let run = parity(&["run", "--device", "cpu", "-p", "import zlib"]).assert().code(2).get_output().clone();
    let text = String::from_utf8(run.stdout).unwrap();
    assert!(text.contains("UNDECIDED: nothing was compared: no stored reference"), "{text}");
    assert!(!text.contains("match") && text.contains("nothing compared, "), "{text}");
}

#[test]
fn no_pieces_threads_or_jobs_are_refused_with_the_range() {
    for args in [
        &["run", "-p", PROMPT, "--chunk", "0"][..],
        &["run", "-p", PROMPT, "-t", "0"],
        &["audit", "dump", "--threads", "0"],
        &["record", "-m", F16, "-p", PROMPT, "-t", "0"],
        &["gate", "suites/shipped.toml", "--jobs", "0"],
    ] {
        parity(args).assert().code(2).stderr(contains("at least 1"));
    }
    parity(&["run", "-p", PROMPT, "--audit-rows", "0"]).assert().code(2).stderr(contains("number of rows"));
}

#[test]
fn a_recording_is_refused_before_the_program_runs() {
    let (dir, path) = dump(&[]);
    let marker = dir.path().join("ran");
    let record = |to: &str| {
        let mut command = parity(&["record", "-o", to, "--", "touch"]);
        command.arg(&marker);
        command.assert().code(2)
    };
    record("/proc/none").stderr(contains("/proc/none").and(contains("cannot be written")));
    record(&path).stderr(contains("holds a dump already").and(contains("--force")));
    assert!(!marker.exists(), "the program was not run");
    let printed = "tests/data/eval-callback.txt";
    let import = ["record", "--import", printed, "-m", F16, "-o", &path];
    parity(&import).assert().code(2).stderr(contains("--force"));
    parity(&import).arg("--force").assert().code(0);
    parity(&["inspect", &path]).assert().stdout(contains("only printed values"));
}

#[test]
fn attention_matrices_have_their_axes_in_order() {
    // Every value of head 3, position 4 is doubled: the worst element is there, at a cached position up to 4.
    let ((_a, whole), (_b, other)) = (dump(&["--checkpoint", "*"]), dump(&["--checkpoint", "*"]));
    let id = "blk.1.attn_probs";
    let file = Path::new(&other).join("step-0000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let (at, shape) = {
        let step = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let view = step.tensor(id).unwrap();
        (view.data().as_ptr() as usize - bytes.as_ptr() as usize, view.shape().to_vec())
    };
    let [heads, rows, cached] = shape[..] else { panic!("(H, T, S): {shape:?}") };
    assert!(heads > 3 && rows == 5 && cached >= 5, "{shape:?}");
    for s in 0..5 {
        let start = at + ((3 * rows + 4) * cached + s) * 4;
        let value = f32::from_le_bytes(bytes[start..start + 4].try_into().unwrap());
        bytes[start..start + 4].copy_from_slice(&(2.0 * value).to_le_bytes());
    }
    fs::write(&file, bytes).unwrap();
    let report = report(&mut parity(&["diff", &other, &whole, "--checkpoint", id, "--atol", "1e-6"]), 1);
    let index: Vec<u64> = serde_json::from_value(checkpoint(&report, id)["worst"]["index"].clone()).unwrap();
    assert_eq!(index[..2], [3, 4], "(H, T, S): {index:?}");
    assert!(index.len() == 3 && index[2] < 5, "{index:?}");
}

#[test]
fn a_nan_in_a_matrix_that_nobody_asked_for_is_found() {
    let ((_a, whole), (_b, bad)) = (dump(&["--checkpoint", "*"]), dump(&["--checkpoint", "*"]));
    let (id, file) = ("blk.1.attn_probs", Path::new(&bad).join("step-0000.safetensors"));
    let mut bytes = fs::read(&file).unwrap();
    let at = {
        let step = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        step.tensor(id).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize
    };
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    for args in [vec!["audit", &bad], vec!["diff", &bad, &whole], vec!["diff", &bad, &whole, "-m", F16]] {
        let found = report(&mut parity(&args), 1);
        assert_eq!(found["first_divergence"]["checkpoint"], id, "{args:?}");
    }
    // In the reference it says nothing of the candidate.
    for args in [vec!["diff", &whole, &bad, "-m", F16], vec!["run", "--device", "cpu", "--reference", &bad]] {
        let found = report(&mut parity(&args), 2);
        assert_eq!(checkpoint(&found, id)["verdict"], "reference", "{args:?}");
    }
    report(&mut parity(&["audit", &whole]), 0);
}

#[test]
fn a_run_takes_the_reference_for_what_it_is_said_to_be() {
    let (_a, path) = dump(&[]);
    let file = Path::new(&path).join("manifest.json");
    let mut manifest: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    manifest["producer"]["numerics"] = json!("bf16");
    fs::write(&file, manifest.to_string()).unwrap();
    let run = ["run", "--device", "cpu", "--reference", &path];
    // What was declared is one hypothesis of several: the values show a plainer arithmetic.
    let declared = report(&mut parity(&run), 0);
    assert_eq!(declared["reference"]["producer"]["numerics"], "bf16");
    let said = report(parity(&run).args(["--reference-numerics", "f32"]), 0);
    assert_eq!(said["reference"]["producer"]["numerics"], "f32");
}

#[test]
fn what_holds_no_number_is_measured_as_null_and_named() {
    let (_dir, whole) = dump(&[]);
    let (_other, bad) = dump(&[]);
    let file = Path::new(&bad).join("step-0000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let (all, some) = {
        let step = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let place = |id: &str| {
            let view = step.tensor(id).unwrap();
            (view.data().as_ptr() as usize - bytes.as_ptr() as usize, view.data().len())
        };
        (place("blk.2.v"), place("blk.1.v").0)
    };
    for at in (all.0..all.0 + all.1).step_by(4) {
        bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    bytes[some..some + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    bytes[some + 4..some + 8].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let report = report(&mut parity(&["diff", &bad, &whole, "-m", F16]), 1);
    let evidence = |id: &str| checkpoint(&report, id)["evidence"].as_str().unwrap().to_owned();
    assert!(evidence("blk.1.v").starts_with("1 NaN and 1 Inf"), "{}", evidence("blk.1.v"));
    let lost = checkpoint(&report, "blk.2.v");
    for measure in ["abs_err_max", "abs_err_mean", "rmse", "rel_l2", "nmse", "cosine"] {
        assert_eq!(lost[measure], Value::Null, "{measure}");
    }
    assert_eq!(lost["tolerance_needed"], json!({ "rtol": null, "atol": null }));
    assert_eq!(lost["row_rel_l2"][0], json!([0, null]));
    assert_eq!(lost["nonfinite"]["candidate"], lost["n"]);
    assert!(checkpoint(&report, "blk.1.v")["abs_err_max"].is_number());
    // A layer that only received them is not blamed for it.
    let injected = ["--inject", "data.nan@blk.1.attn_norm", "--layer", "3"];
    let output = parity(&["run", "--device", "cpu", "-p", PROMPT]).args(injected).assert().code(1);
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(text.contains("256 NaN; its inputs, which were not looked at, hold some already"), "{text}");
}

#[test]
fn scripts_say_how_they_are_used() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    let scripts = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut asked = 0;
    for script in scripts.filter(|path| path.extension().is_some_and(|extension| extension == "sh")) {
        let text = fs::read_to_string(&script).unwrap();
        // What does not look at the flag would start its work.
        assert!(text.contains("case ${1:-} in -h | --help)"), "{}: no --help", script.display());
        let output = std::process::Command::new(&script).arg("--help").output().unwrap();
        let first = text.lines().nth(1).unwrap().trim_start_matches("# ");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && said.starts_with(first), "{}: {said}", script.display());
        assert!(!said.contains("set -"), "{}: the header alone: {said}", script.display());
        asked += 1;
    }
    assert!(asked > 10);
}

#[test]
fn a_reference_that_is_wrong_is_named_where_a_tolerance_accepts_it() {
    let (_folder, wrong) = dump(&["--inject", "attn.no_scale@1"]);
    let run =
        ["run", "--device", "cpu", "-p", PROMPT, "--reference", &wrong, "--allow-missing", "--rtol", "1e9"];
    let said = report(&mut parity(&run), 0)["reason"].to_string();
    assert!(said.contains("within the tolerance given"), "{said}");
    assert!(said.contains("the reference itself is wrong at blk.1.attn_ctx"), "{said}");
}
