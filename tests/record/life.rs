//! The whole life of a context in a real llama.cpp: rollback, shift, sequences in one cache and in one each, copies, states.
//! SKIP where no shared libraries of one are named (`PARITY_TEST_LLAMA`, `PARITY_TEST_LLAMA_OLDER`).
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::path::Path;

use crate::support::driven::{LIBRARIES, OLDER, driver, libraries, model};
use crate::support::program::{flat, manifest, output, parity};

const ROLLBACK: &str = "b0:9 b0:1 b0:3 r0@10 b0:2 b0:1";
const SHIFT: &str = "b0:12 b0:1 s0@1,6 b0:1 b0:1";
const FIVE: &str = "b0:4,1:3 b2:5,0:1,1:1 b3:2,4:6 b0:1,1:1,2:1,3:1,4:1";
/// A prompt as short as a warm-up, and another one beside it.
const SHORT: &str = "b0:2 b1:1 b0:1,1:1";
const COPIES: &str = "b0:8 c0>1 b0:1,1:1 b1:2,0:1";
const STATES: &str = "b0:8 w0 l1 b0:1,1:1 W b1:2 L b1:1";
/// A draft of four tokens, of which two are rejected, and the next.
const DRAFT: &str = "b0:8 m1 b0:8 b0:1 b0:1 b0:1 m0 b0:4 r0@10 m1 r0@10 b0:1 b0:1 b0:1 m0 b0:4 r0@13";
/// Everything is forgotten, with what the cells hold.
const AGAIN: &str = "b0:7,1:2 b0:1 x b0:3 b0:1,1:2";
const TOKENS: [&str; 7] = ["3", "17", "91", "42", "8", "120", "64"];

/// Records a life of a context with room for so many sequences, in one cache or one each.
fn record(
    out: &Path,
    libraries: &Path,
    life: &str,
    (sequences, unified): (&str, Option<&str>),
    flags: &[&str],
) {
    let unified = unified.map(|unified| ("DRIVER_UNIFIED", unified));
    let environment: Vec<_> = unified.into_iter().chain([("DRIVER_SEQUENCES", sequences)]).collect();
    record_with(out, libraries, life, &environment, flags);
}

/// Records a life in a driver that is told what stands in its environment; what the recording says.
fn record_with(
    out: &Path,
    libraries: &Path,
    life: &str,
    environment: &[(&str, &str)],
    flags: &[&str],
) -> String {
    let mut command = parity(&["record", "-o"]);
    command.arg(out).args(flags).arg("--").arg(driver().unwrap()).arg(libraries).args([&model("F16"), life]);
    command.args(TOKENS).env("DRIVER_THREADS", "1").envs(environment.iter().copied());
    let done = command.output().unwrap();
    let said = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
    assert_eq!(done.status.code(), Some(0), "{life}: {said}");
    flat(&said)
}

/// Exit code of an audit, and what it says.
fn audit(dump: &Path) -> (i32, String) {
    let (code, said) = output(&["audit", dump.to_str().unwrap(), "-m", &model("F16")]);
    (code, flat(&said))
}

/// From 512 cells on llama.cpp's CPU shares them among its threads where one query attends to them, however many these are.
#[test]
fn attention_is_shared_among_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let Some(libraries) = libraries(LIBRARIES) else { return };
    for threads in ["3", "5", "7"] {
        let environment = [("DRIVER_FLASH", "on"), ("DRIVER_THREADS", threads)];
        let out = dir.path().join(threads);
        record_with(&out, &libraries, "b0:257 b0:1 b0:1", &environment, &[]);
        let (code, said) = audit(&out);
        assert_eq!(code, 0, "{threads} threads: {said}");
    }
}

#[test]
fn a_life_is_recorded_and_judged_whole() {
    let dir = tempfile::tempdir().unwrap();
    for variable in [LIBRARIES, OLDER] {
        let Some(libraries) = libraries(variable) else { continue };
        let lives = [
            (ROLLBACK, ("1", None), "seq_rm"),
            (SHIFT, ("1", None), "seq_add"),
            (FIVE, ("5", None), ""),
            (FIVE, ("5", Some("1")), ""),
            (SHORT, ("2", None), ""),
            (COPIES, ("2", None), "seq_cp"),
            (COPIES, ("2", Some("1")), "seq_cp"),
            (STATES, ("2", None), "load"),
            (AGAIN, ("2", None), "clear"),
        ];
        for (life, of, event) in lives {
            // What an older release has no switch for is its own affair.
            if variable == OLDER && of.1.is_some() {
                continue;
            }
            let dump = dir.path().join("dump");
            let _ = std::fs::remove_dir_all(&dump);
            record(&dump, &libraries, life, of, &[]);
            let json = manifest(&dump);
            assert_eq!(json["requires"], serde_json::json!(["sequences"]), "{life}");
            assert_eq!(
                (&json["complete"], &json["stopped"]),
                (&true.into(), &serde_json::Value::Null),
                "{life}"
            );
            assert_eq!(json["provenance"]["sequences"], "of the program's batches");
            assert!(
                event.is_empty() || json["steps"].to_string().contains(event),
                "{life}: {}",
                json["steps"]
            );
            let (code, said) = audit(&dump);
            assert_eq!(code, 0, "{variable} {life}: {said}");
        }
    }
}

#[test]
fn scores_of_several_caches_are_judged_row_by_row() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let environment = [("DRIVER_FLASH", "off"), ("DRIVER_SEQUENCES", "5"), ("DRIVER_UNIFIED", "0")];
    let healthy = dir.path().join("healthy");
    record_with(&healthy, &libraries, FIVE, &environment, &[]);
    let (code, said) = audit(&healthy);
    assert_eq!(code, 0, "{said}");
    let wrong = dir.path().join("wrong");
    record_with(&wrong, &libraries, FIVE, &environment, &["--inject", "data.scaled=1.5@blk.1.attn_ctx"]);
    let (code, said) = audit(&wrong);
    assert!(
        code == 1 && said.contains("DIVERGES at blk.1.attn_ctx:") && said.contains("(data.scaled"),
        "{said}"
    );
}

#[test]
fn embeddings_are_judged_with_what_pools_them() {
    let dir = tempfile::tempdir().unwrap();
    for variable in [LIBRARIES, OLDER] {
        let Some(libraries) = libraries(variable) else { continue };
        for pooling in ["0", "1", "2", "3"] {
            let dump = dir.path().join(format!("{variable}{pooling}"));
            let environment = [("DRIVER_EMBEDDINGS", pooling), ("DRIVER_SEQUENCES", "2")];
            let said = record_with(&dump, &libraries, "b0:5,1:3 b0:2", &environment, &["--verify"]);
            assert!(said.contains("bit-equal to a run without recording"), "{said}");
            let (code, said) = audit(&dump);
            assert_eq!(code, 0, "{variable} {pooling}: {said}");
        }
        let wrong = dir.path().join(variable);
        let flags = ["--inject", "data.scaled=1.5@result_embd_pooled"];
        record_with(&wrong, &libraries, "b0:5", &[("DRIVER_EMBEDDINGS", "1")], &flags);
        let (code, said) = audit(&wrong);
        assert!(code == 1 && said.contains("DIVERGES at result_embd_pooled:"), "{said}");
    }
}

#[test]
fn a_draft_model_has_a_recording_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let draft = model("Q4_K_M");
    for variable in [LIBRARIES, OLDER] {
        let Some(libraries) = libraries(variable) else { continue };
        let dump = dir.path().join(variable);
        let other = dump.join("context-1");
        let environment = [("DRIVER_DRAFT", draft.as_str())];
        let said = record_with(&dump, &libraries, DRAFT, &environment, &[]);
        assert!(said.contains("of another context, of qwen2-tiny-py-Q4_K_M.gguf"), "{said}");
        let (of_target, of_draft) = (manifest(&dump), manifest(&other));
        assert_eq!(
            (of_target["tokens"].as_array().unwrap().len(), of_draft["steps"].as_array().unwrap().len()),
            (16, 7)
        );
        for json in [&of_target, &of_draft] {
            assert!(json["steps"].to_string().contains("seq_rm") && json["complete"] == true, "{json}");
        }
        assert_eq!(of_draft["model"]["file"], "qwen2-tiny-py-Q4_K_M.gguf");
        let of = |dump: &Path, model: &str| output(&["audit", dump.to_str().unwrap(), "-m", model]);
        assert_eq!((of(&dump, &model("F16")).0, of(&other, &draft).0), (0, 0));
        // A mistake is made in the first context alone.
        let flags = ["--force", "--inject", "attn.stale_cache@blk.1.attn_ctx"];
        record_with(&dump, &libraries, DRAFT, &environment, &flags);
        assert_eq!((audit(&dump).0, of(&other, &draft).0), (1, 0));
        // What is replaced by a recording of one context leaves none of another.
        record(&dump, &libraries, "b0:3", ("1", None), &["--force"]);
        assert!(!other.exists());
    }
}

#[test]
fn rows_are_paired_by_sequence_and_position() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    // The same tokens, so that the order of batches does not matter.
    let one = |name: &str, life: &str, flags: &[&str]| {
        let mut command = parity(&["record", "-o"]);
        // Rows of logits are those that each batch asks for.
        command.arg(at(name)).arg("--own-rows").args(flags).arg("--").arg(driver().unwrap()).arg(&libraries);
        command.args([&model("F16"), life, "7"]).env("DRIVER_SEQUENCES", "2").env("DRIVER_THREADS", "1");
        assert_eq!(command.output().unwrap().status.code(), Some(0));
        at(name).to_str().unwrap().to_owned()
    };
    let mixed = one("mixed", "b0:4,1:3 b0:1,1:1", &[]);
    let apart = one("apart", "b1:3 b0:4 b1:1 b0:1", &[]);
    let model = model("F16");
    for flags in [&[][..], &["--sequence", "1"]] {
        let (code, said) = output(&[&["diff", &mixed, &apart, "-m", &model], flags].concat());
        assert_eq!(code, 0, "{said}");
    }
    let wrong = one("wrong", "b1:3 b0:4 b1:1 b0:1", &["--inject", "cache.stale_cell@2"]);
    let (code, said) = output(&["diff", &wrong, &mixed, "-m", &model]);
    assert!(code == 1 && said.contains("DIVERGES at blk.2.attn_ctx"), "{said}");
}

#[test]
fn mistakes_of_a_life_are_found_and_named() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    for (life, of, fault, node) in [
        (SHIFT, ("1", None), "cache.no_shift", "blk.1.cache_k"),
        (ROLLBACK, ("1", None), "cache.stale_cell", "blk.2.attn_ctx"),
        (FIVE, ("5", Some("1")), "cache.wrong_sequence", "blk.1.attn_ctx"),
        (FIVE, ("5", None), "attn.stale_cache", "blk.0.attn_ctx"),
        (FIVE, ("5", Some("1")), "attn.mask_shift", "blk.1.attn_ctx"),
        (COPIES, ("2", None), "rope.decode_shift", "blk.3.q_rope"),
    ] {
        let dump = dir.path().join(fault);
        record(&dump, &libraries, life, of, &["--inject", &format!("{fault}@{node}")]);
        let (code, said) = audit(&dump);
        assert_eq!(code, 1, "{fault}: {said}");
        assert!(said.contains(&format!("DIVERGES at {node}:")), "{fault}: {said}");
        let named = said.contains(&format!("({fault}")) || said.contains("cached keys stay where they were");
        assert!(named, "{fault}: {said}");
    }
}
