//! How long somebody waits: `--time-limit`, and Ctrl-C.

use std::process::Stdio;
use std::time::Duration;

use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;

use crate::support::program::{answer, parity};

const DUMP: &str = "reference-dumps/qwen2-tiny-py-Q4_K_M/read_lines";
const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";
const AUDIT: [&str; 4] = ["audit", DUMP, "-m", MODEL];
const DIFF: [&str; 5] = ["diff", DUMP, DUMP, "-m", MODEL];

fn verdicts(report: &Value) -> Vec<&str> {
    report["checkpoints"].as_array().unwrap().iter().map(|entry| entry["verdict"].as_str().unwrap()).collect()
}

#[test]
fn without_time_nothing_is_healthy_and_nothing_wrong() {
    for command in [&AUDIT[..], &DIFF[..]] {
        let command = [command, &["--time-limit", "0", "--format", "json"]].concat();
        let (code, report) = answer(&command);
        assert_eq!(code, 2);
        assert_eq!(report["verdict"], "undecided");
        assert!(report["reason"].as_str().unwrap().contains("--time-limit"), "{}", report["reason"]);
        let verdicts = verdicts(&report);
        let is_open = |verdict: &&str| ["undecided", "missing"].contains(verdict);
        assert!(verdicts.len() > 50 && verdicts.iter().all(is_open), "{verdicts:?}");
    }
    // Nor is anything of a run whose engine was not done.
    let run = ["run", "--device", "cpu", "-p", "def read_lines(path):", "--time-limit", "0"];
    parity(&run)
        .assert()
        .code(2)
        .stderr(contains("did not finish: its time was over").and(contains("hint:")));
}

#[test]
fn with_time_enough_the_answer_is_the_same() {
    for command in [&AUDIT[..], &DIFF[..]] {
        let (code, whole) = answer(&[command, &["--format", "json"]].concat());
        let (same, limited) = answer(&[command, &["--time-limit", "3600", "--format", "json"]].concat());
        assert_eq!(code, same);
        for field in ["verdict", "reason", "checkpoints", "coverage", "notes", "origins"] {
            assert_eq!(whole[field], limited[field], "{field}");
        }
    }
    for wrong in ["soon", "nan", "1e300"] {
        parity(&[&AUDIT[..], &["--time-limit", wrong]].concat())
            .assert()
            .code(2)
            .stderr(contains("a number of seconds"));
    }
}

/// An interrupted audit ends by itself, with a report.
#[cfg(target_os = "linux")]
#[test]
fn an_interrupt_ends_with_what_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let dump = dir.path().join("dump").to_str().unwrap().to_owned();
    let tokens: Vec<String> = (1..400).map(|i| (i * 37 % 250 + 1).to_string()).collect();
    let run = ["run", "--device", "cpu", "--tokens", &tokens.join(","), "--no-audit", "--dump", &dump];
    parity(&run).assert().code(2);
    let program = env!("CARGO_BIN_EXE_parity");
    let audit = ["audit", &dump, "--audit-rows", "all", "--threads", "1", "--format", "json"];
    let mut child = std::process::Command::new(program)
        .args(audit)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Not before it is heeded: by default it ends the process.
    let heeds = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let caught =
            status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map(str::trim).unwrap_or("0");
        u64::from_str_radix(caught, 16).unwrap_or(0) & (1 << (libc::SIGINT - 1)) != 0
    };
    while !heeds(child.id()) && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: a signal to a child that was not waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let output = child.wait_with_output().unwrap();
    // On a machine that was done before, the answer is whole.
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    match output.status.code() {
        Some(0) => assert_eq!(report["verdict"], "parity"),
        code => {
            assert_eq!(code, Some(2));
            assert!(report["reason"].as_str().unwrap().contains("interrupted"), "{}", report["reason"]);
            assert!(
                verdicts(&report).iter().all(|verdict| ["match", "undecided", "missing"].contains(verdict))
            );
        }
    }
}
