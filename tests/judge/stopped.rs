//! A recording that ended early is undecided, whatever flags are given; what is wrong in it is wrong.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::program::{Copied, flat, manifest, output};

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const REFERENCE: &str = "reference-dumps/qwen2-tiny-py-F16/read_lines";
const TOLERANT: [&str; 5] = ["--allow-missing", "--rtol", "1e9", "--atol", "1e9"];

/// Exit code, and what was said without breaks of lines.
fn said(args: &[&str]) -> (i32, String) {
    let (code, text) = output(args);
    (code, flat(&text))
}

/// The shipped recording, which says that it stopped.
fn shifted() -> Copied {
    let dump = Copied::of(REFERENCE);
    let stopped = json!({"after_step": 8, "position": 15, "reason": "the context was shifted"});
    dump.change(|m| {
        m["complete"] = json!(false);
        m["stopped"] = stopped;
    });
    dump
}

/// Checks that an answer is undecided, and says of which dump, after which step and why.
fn undecided(args: &[&str], dump: &Copied, words: &[&str]) {
    let (code, text) = said(args);
    assert_eq!(code, 2, "{args:?}: {text}");
    assert!(text.contains("UNDECIDED: the ") && text.contains(dump.path()), "{args:?}: {text}");
    words.iter().for_each(|word| assert!(text.contains(word), "{args:?}: {word}: {text}"));
}

#[test]
fn a_recording_that_stopped_is_undecided_everywhere() {
    let dump = shifted();
    let words = ["stopped after step 8, before position 15: the context was shifted", "record it again"];
    let path = dump.path();
    undecided(&["audit", path, "-m", MODEL], &dump, &words);
    undecided(&["audit", path, "-m", MODEL, "--allow-missing"], &dump, &words);
    for (candidate, reference) in [(path, REFERENCE), (REFERENCE, path)] {
        undecided(&["diff", candidate, reference, "-m", MODEL], &dump, &words);
        undecided(&["diff", candidate, reference], &dump, &words);
        let tolerant = [&["diff", candidate, reference, "-m", MODEL][..], &TOLERANT].concat();
        undecided(&tolerant, &dump, &words);
        undecided(&[&tolerant[..], &["--no-audit"]].concat(), &dump, &words);
    }
    let run = ["run", "--device", "cpu", "-m", MODEL, "--reference", path];
    undecided(&run, &dump, &words);
    undecided(&[&run[..], &TOLERANT].concat(), &dump, &words);
    undecided(&[&run[..], &["-p", "def read_lines(path):"]].concat(), &dump, &words);
}

#[test]
fn one_without_a_reason_is_undecided_too() {
    let dump = Copied::of(REFERENCE);
    for (complete, stopped) in [(json!(false), None), (json!(null), None), (json!(true), Some(json!({})))] {
        dump.change(|m| {
            m["complete"] = complete;
            m["stopped"] = stopped.into();
        });
        undecided(&["audit", dump.path(), "-m", MODEL], &dump, &["step 8", "record it again"]);
    }
}

#[test]
fn what_is_wrong_in_one_is_wrong() {
    let dump = shifted();
    let run = ["run", "--device", "cpu", "-m", MODEL, "-p", "def read_lines(path):", "--no-audit"];
    let faulty = dump.path();
    let _ = said(&[&run[..], &["--dump", faulty, "--force", "--inject", "rope.base@1"]].concat());
    dump.change(|m| m["complete"] = json!(false));
    for args in [vec!["audit", faulty], vec!["diff", faulty, REFERENCE]] {
        let (code, text) = said(&[&args[..], &["-m", MODEL]].concat());
        assert_eq!(code, 1, "{args:?}: {text}");
        assert!(text.contains("interrupted recording"), "{text}");
    }
    let (code, text) = said(&["diff", REFERENCE, faulty, "-m", MODEL]);
    assert_eq!(code, 2, "{text}");
}

#[test]
fn no_gate_lets_one_pass() {
    let (dump, folder) = (shifted(), tempfile::tempdir().unwrap());
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let suite = folder.path().join("suite.toml");
    let gate = |case: &str| {
        let head = format!("name = \"test\"\n[models]\ntiny = {:?}\n", root.join(MODEL));
        fs::write(&suite, format!("{head}[[case]]\nname = \"it\"\nmodel = \"tiny\"\n{case}\n")).unwrap();
        said(&["gate", suite.to_str().unwrap()])
    };
    let (path, whole) = (dump.path(), root.join(REFERENCE));
    let waiver = "waive = [{ checkpoint = \"*\", reason = \"any\", until = \"2999-12-31\" }]";
    for case in [
        format!("dump = {path:?}\nallow = [\"missing-checkpoints\"]"),
        format!("dump = {whole:?}\nreference = {path:?}\n{waiver}"),
        format!(
            "dump = {path:?}\nreference = {whole:?}\ntolerance = [{{ checkpoint = \"*\", rtol = 1e9, atol = 1e9 }}]"
        ),
        format!("reference = {path:?}"),
    ] {
        let (code, text) = gate(&case);
        assert_eq!(code, 2, "{case}: {text}");
        assert!(text.contains("stopped after step 8"), "{case}: {text}");
    }
}

#[test]
fn a_run_that_is_killed_leaves_one() {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    let path = dump.to_str().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["run", "--device", "cpu", "-m", MODEL, "--tokens", "1,2,3", "-n", "400"]);
    command.args(["--no-audit", "--dump", path]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    let steps = || manifest(&dump)["steps"].as_array().unwrap().len();
    while !(dump.join("manifest.json").exists() && steps() > 2) {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing is recorded");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(manifest(&dump)["complete"], json!(false));
    let (code, text) = said(&["audit", path, "-m", MODEL, "--allow-missing"]);
    assert_eq!(code, 2, "{text}");
    let last = format!("interrupted recording, which ends after step {}", steps() - 1);
    assert!(text.contains(&last) && text.contains(path), "{text}");
}

#[test]
fn what_a_newer_parity_requires_is_not_guessed() {
    let dump = Copied::of(REFERENCE);
    // What is required may change the form of everything else.
    dump.change(|m| {
        m["requires"] = json!(["tomorrow"]);
        m["steps"] = json!({"of": "another form"});
    });
    for args in
        [vec!["audit", dump.path()], vec!["diff", dump.path(), REFERENCE], vec!["inspect", dump.path()]]
    {
        let (code, text) = said(&args);
        assert_eq!(code, 2, "{args:?}: {text}");
        assert!(text.contains("made by a newer parity") && text.contains("`tomorrow`"), "{text}");
    }
}
