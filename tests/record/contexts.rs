//! What stands before a row and behind a pass in a real llama.cpp: sequences that go on from others, states that nobody wrote,
//! embeddings that are pooled otherwise, weights of another file, adapters. SKIP where no shared libraries of one are named
//! (`PARITY_TEST_LLAMA`).
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::path::Path;

use serde_json::Value;

use crate::support::driven::{LIBRARIES, PROMPT, driver, libraries, model, python};
use crate::support::program::{flat, output, parity};

const TOKENS: [&str; 11] = ["3", "17", "91", "42", "8", "12", "64", "5", "9", "11", "22"];

/// Exit code and report of `parity ab` on the driver with these words and `environment`.
fn ab(flags: &[&str], words: &[&str], environment: &[(&str, &str)]) -> (i32, Value) {
    let mut command = parity(&["ab", "--format", "json", "--no-verify"]);
    command.args(flags).arg("--").arg(driver().unwrap()).args(words).envs(environment.iter().copied());
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    for folder in said.lines().filter_map(|line| line.strip_prefix("recordings: ")) {
        std::fs::remove_dir_all(folder).unwrap();
    }
    let report = serde_json::from_slice(&done.stdout).unwrap_or(Value::String(said));
    (done.status.code().unwrap(), report)
}

fn reason(report: &Value) -> &str {
    report["reason"].as_str().unwrap_or_default()
}

#[test]
fn a_row_that_stands_behind_other_tokens_is_no_other_run_of_the_same() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&[libraries, &model, "{}"], &TOKENS[..]].concat();
    let of = |a: &str, b: &str| {
        let [a, b] = [a, b].map(|life| format!("'b0:4 b1:4 {life} b2:3'"));
        ab(&["--a", &a, "--b", &b], &words, &[("DRIVER_SEQUENCES", "4")])
    };
    for [a, b] in [["c0>2", "c1>2"], ["w0 l2", "w1 l2"], ["c0>2", "w1 l2"]] {
        let (code, report) = of(a, b);
        assert_eq!(code, 1, "{a}, {b}: {report:#}");
        assert!(reason(&report).contains("row 2:4 stands behind other tokens"), "{a}, {b}: {report:#}");
    }
    // A copy and a state of one sequence are the same tokens.
    let (code, report) = of("c1>2", "w1 l2");
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn a_sequence_alone_is_compared_with_itself_among_others() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [libraries, &model, "{}"];
    let alone = "'b0:5 b0:1 b0:1' 3 17 91 42 8 12 64";
    let of = |b: &str| {
        let flags = ["--sequence", "1", "--own-rows", "--a", alone, "--b", b];
        ab(&flags, &words, &[("DRIVER_SEQUENCES", "2")])
    };
    // The second of two sequences, which are decoded side by side.
    let (code, report) = of("'b0:4,1:5 b1:1,0:1 b1:1,0:1' 7 9 11 22 3 17 91 42 8 12 33 64 44");
    assert_eq!(code, 0, "{report:#}");
    assert!(report["coverage"]["rows_compared"].as_u64().is_some_and(|rows| rows > 0), "{report:#}");
    let (code, report) = of("'b0:4,1:5 b1:1,0:1 b1:1,0:1' 7 9 11 22 3 17 91 43 8 12 33 64 44");
    assert_eq!(code, 1, "{report:#}");
    assert!(reason(&report).contains("not the same tokens: the first 3 are"), "{report:#}");
}

#[test]
fn a_state_that_nobody_is_seen_to_write_leaves_the_answer_open() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let Some(_) = python(&["tests/data/archs/fill.py", dir.path().to_str().unwrap(), "mamba2-dense"]) else {
        return;
    };
    let file = dir.path().join("mamba2-dense.gguf");
    for (noise, wanted) in [(None, 0), (Some("cache_r_l0 (view) (copy of  (view))"), 2)] {
        let dump = dir.path().join(wanted.to_string());
        let mut command = parity(&["record", "-o"]);
        command.arg(&dump).arg("--").arg(driver().unwrap()).arg(&libraries).arg(&file).arg("5").args(TOKENS);
        let done = command.envs(noise.map(|noise| ("DRIVER_NOISE", noise))).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let (code, said) = output(&["audit", dump.to_str().unwrap(), "-m", file.to_str().unwrap()]);
        assert_eq!(code, wanted, "{said}");
        let told = flat(&said).contains("before step 1 of the dump something wrote into the caches");
        assert_eq!(told, noise.is_some(), "{said}");
    }
}

#[test]
fn embeddings_that_are_pooled_otherwise_are_the_finding() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&[libraries, &model, "5"], &PROMPT[..]].concat();
    let of = |a: &str, b: &str| {
        let [a, b] = [a, b].map(|way| format!("DRIVER_EMBEDDINGS={way}"));
        ab(&["--a-env", &a, "--b-env", &b, "--b-env", "DRIVER_THREADS=1"], &words, &[])
    };
    for [a, b, said] in [["1", "3", "by mean"], ["2", "3", "by cls [0]"], ["0", "3", "the reference nothing"]]
    {
        let (code, report) = of(a, b);
        assert_eq!(code, 1, "{a}, {b}: {report:#}");
        assert!(reason(&report).contains("do not get the same"), "{a}, {b}: {report:#}");
        assert!(reason(&report).contains(said), "{a}, {b}: {report:#}");
    }
    assert_eq!(of("3", "3").0, 0);
}

#[test]
fn files_of_one_type_with_other_numbers_are_two_models() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(model("F16")).unwrap();
    let mut changed = bytes.clone();
    // A number in the middle of the data.
    let middle = changed.len() / 2;
    changed[middle] ^= 1;
    let [same, other] = ["same.gguf", "other.gguf"].map(|name| dir.path().join(name));
    std::fs::write(&same, bytes).unwrap();
    std::fs::write(&other, changed).unwrap();
    let words = [&[libraries.to_str().unwrap(), "{}", "5"], &PROMPT[..]].concat();
    let of = |b: &Path| ab(&["--a", &model("F16"), "--b", b.to_str().unwrap()], &words, &[]);
    let (code, report) = of(&same);
    assert_eq!(code, 0, "{report:#}");
    let (code, report) = of(&other);
    assert_eq!(code, 1, "{report:#}");
    assert!(
        reason(&report).contains("1 weight with other numbers than types explain, or in one alone, first "),
        "{report:#}"
    );
}

#[test]
fn files_of_two_types_are_one_model_where_types_explain_the_numbers() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let changed = dir.path().join("changed.gguf");
    let mut bytes = std::fs::read(model("F16")).unwrap();
    // The rows of a matrix in another order: both halves of what lies in the middle of the data.
    let (middle, half) = (bytes.len() / 2, 1 << 15);
    let (first, second) = bytes[middle..middle + 2 * half].split_at_mut(half);
    first.swap_with_slice(second);
    std::fs::write(&changed, bytes).unwrap();
    let words = [&[libraries.to_str().unwrap(), "{}", "5"], &PROMPT[..]].concat();
    let of = |a: &str| ab(&["--a", a, "--b", &model("Q4_K_M")], &words, &[]);
    let (code, report) = of(&model("F16"));
    assert_eq!(code, 0, "{report:#}");
    let (code, report) = of(changed.to_str().unwrap());
    assert_eq!(code, 1, "{report:#}");
    assert!(reason(&report).contains("with other numbers than types explain"), "{report:#}");
}

#[test]
fn tokens_of_a_run_go_into_the_rows_of_their_sequences() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let prompts = "'b0:5 b1:4 b0:1,1:1 b0:1,1:1' 1 2 3 4 5 11 12 13 14";
    let [a, b] = ["50 51 52 53", "60 61 62 63"].map(|answer| format!("{prompts} {answer}"));
    let words = [libraries, &model, "{}"];
    let (code, report) = ab(&["--a", &a, "--b", &b], &words, &[("DRIVER_SEQUENCES", "2")]);
    assert_eq!(code, 0, "{report:#}");
    assert!(report["answer"].to_string().contains("not its own first choice at 4 positions"), "{report:#}");
}

#[test]
fn a_second_sequence_in_a_cache_of_its_own_is_read_where_it_lies() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&[libraries, &model, "b0:6 b1:3 b0:2"], &TOKENS[..]].concat();
    // In blocks, turned before them, and in f32, which is cast for attention.
    for cache in ["8,8", "0,0"] {
        let flags = ["--own-rows", "--b-env", &format!("DRIVER_CACHE={cache}")];
        let (code, report) = ab(&flags, &words, &[("DRIVER_SEQUENCES", "2"), ("DRIVER_FLASH", "on")]);
        assert_eq!(code, 0, "{cache}: {report:#}");
    }
}

#[test]
fn runs_that_fail_are_not_identical() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&[libraries, &model, "b0:5 L"], &TOKENS[..]].concat();
    let (code, found) = ab(&["--repeat", "2"], &words, &[]);
    assert_eq!(code, 2, "{found:#}");
    assert!(
        found["open"] == true && found["answer"].to_string().contains("ended with exit status 1"),
        "{found:#}"
    );
}

#[test]
fn adapters_are_given_with_a_flag_and_one_of_one_side_alone_is_the_finding() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let Some(lora) = adapter(dir.path()) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&[libraries, &model, "5"], &PROMPT[..]].concat();
    let adapted = format!("DRIVER_LORA={lora}");
    let of = |flags: &[&str]| ab(&[&["--b-env", &adapted], flags].concat(), &words, &[]);
    let both = ["--a-env", &adapted, "--a-env", "DRIVER_FLASH=off", "--lora", &lora];
    let (code, report) = of(&both);
    assert_eq!(code, 0, "{report:#}");
    let (code, report) = of(&["--lora", &lora]);
    assert_eq!(code, 1, "{report:#}");
    assert!(report.to_string().contains("A with none, B with an adapter"), "{report:#}");
    let (code, said) = of(&[]);
    assert!(code == 2 && said.to_string().contains("--lora FILE[:SCALE]"), "{said:#}");
}

/// A random adapter of the shipped model.
fn adapter(folder: &Path) -> Option<String> {
    let lora = folder.join("lora.gguf").to_str().unwrap().to_owned();
    python(&["scripts/record/lora.py", &model("F16"), &lora, "4", "8"])?;
    Some(lora)
}

#[test]
fn a_program_that_fails_is_said_to() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&[libraries, &model, "{}"], &TOKENS[..]].concat();
    // Nothing was saved that could be loaded.
    let (code, report) = ab(&["--a", "'b0:5'", "--b", "'b0:5 L'"], &words, &[]);
    assert_eq!(code, 2, "{report:#}");
    assert!(reason(&report).contains("B's program ended with exit status 1"), "{report:#}");
}
