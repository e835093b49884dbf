//! Dumps without some of their steps, or without some rows: what attention reads of lost steps is a gap and no mistake,
//! everything else is judged as ever, and rows that are not there are said to be lacking.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::edited;
use crate::support::edited::{MODEL, audited, made, undeclare};
use crate::support::program::answer;

const TOKENS: usize = 6;

/// Takes a step out of a dump, and out of the list of graphs.
fn lose(dump: &Path, lost: u64) {
    change(dump, |manifest| {
        manifest["steps"].as_array_mut().unwrap().remove(lost as usize);
        for graph in manifest["graphs"].as_array_mut().into_iter().flatten() {
            let steps = graph["steps"].as_array().unwrap().iter().map(|step| step.as_u64().unwrap());
            let kept: Vec<u64> =
                steps.filter(|step| *step != lost).map(|step| step - u64::from(step > lost)).collect();
            graph["steps"] = json!(kept);
        }
        let graphs = manifest["graphs"].as_array_mut();
        graphs.into_iter().for_each(|all| all.retain(|graph| graph["steps"] != json!([])));
    });
}

fn change(dump: &Path, change: impl FnOnce(&mut Value)) {
    let path = dump.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    std::fs::write(&path, manifest.to_string()).unwrap();
}

/// A run of our own engine, a step for each token, and the folder that it lies in.
fn stepped(how: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    made(&dump, TOKENS, &[&["--chunk", "1"], how].concat());
    (folder, dump)
}

#[test]
fn attention_over_lost_steps_is_a_gap_and_no_mistake() {
    for lost in [0, 2] {
        for declared in [true, false] {
            let (_folder, dump) = stepped(&[]);
            lose(&dump, lost);
            if !declared {
                undeclare(&dump);
            }
            let (code, first, reason) = audited(&dump, &[]);
            assert_eq!((code, &first[..]), (2, ""), "{lost}: {reason}");
            let (code, first, reason) = audited(&dump, &["--allow-missing"]);
            assert_eq!((code, &first[..]), (0, ""), "{lost}: {reason}");
        }
    }
}

#[test]
fn the_last_step_is_read_by_nobody() {
    let (_folder, dump) = stepped(&[]);
    lose(&dump, TOKENS as u64 - 1);
    assert_eq!(audited(&dump, &["--allow-missing"]).0, 0);
    let (_, report) =
        answer(&["audit", dump.to_str().unwrap(), "-m", MODEL, "--format", "json", "--allow-missing"]);
    assert!(!report["notes"].to_string().contains("keys and values"), "{}", report["notes"]);
}

#[test]
fn a_mistake_elsewhere_is_found_though_steps_are_lost() {
    for (fault, at) in [("ffn.swapped@1", "blk.1.ffn_act"), ("attn.no_scale@1", "blk.1.attn_ctx")] {
        let (_folder, dump) = stepped(&["--inject", fault]);
        // Attention before the lost step is judged: with a scale that is left out it is wrong there.
        lose(&dump, 4);
        for flags in [&[][..], &["--allow-missing"]] {
            let (code, first, reason) = audited(&dump, flags);
            assert_eq!((code, &first[..]), (1, at), "{fault}: {reason}");
        }
    }
}

#[test]
fn beside_a_whole_recording_lost_steps_are_a_gap_on_either_side() {
    let (_first, whole) = stepped(&[]);
    let (_second, dump) = stepped(&[]);
    lose(&dump, 0);
    for [a, b] in [[&dump, &whole], [&whole, &dump]] {
        let diff = ["diff", a.to_str().unwrap(), b.to_str().unwrap(), "-m", MODEL, "--format", "json"];
        let (code, report) = answer(&diff);
        assert_eq!((code, &report["verdict"]), (2, &json!("undecided")), "{}", report["reason"]);
        let (code, report) = answer(&[&diff[..], &["--allow-missing"]].concat());
        assert_eq!((code, &report["verdict"]), (0, &json!("parity")), "{}", report["reason"]);
    }
}

/// Attention that is not judged and differs from the reference is no parity, whatever is accepted.
#[test]
fn what_differs_where_nothing_is_judged_is_undecided() {
    let (_first, whole) = stepped(&[]);
    let (_second, dump) = stepped(&["--inject", "attn.no_scale@1"]);
    lose(&dump, 0);
    let [dump, whole] = [&dump, &whole].map(|path| path.to_str().unwrap());
    let (code, report) = answer(&["diff", dump, whole, "-m", MODEL, "--format", "json", "--allow-missing"]);
    assert_eq!((code, &report["verdict"]), (2, &json!("undecided")), "{}", report["reason"]);
}

/// Rows that a dump without a graph lacks of its logits may have been computed wrongly.
#[test]
fn rows_that_are_not_there_are_a_gap() {
    let (_folder, dump) = stepped(&[]);
    for step in 0..TOKENS - 1 {
        edited::keep(&dump.join(format!("step-{step:04}.safetensors")), |name| name != "logits");
    }
    let folder = tempfile::tempdir().unwrap();
    let single = folder.path().join("single");
    made(&single, TOKENS, &[]);
    edited::keep_last_row(&single.join("step-0000.safetensors"), "logits");
    change(&single, |manifest| manifest["rows"] = json!({ "logits": [TOKENS - 1] }));
    for (dump, named) in [(dump, "logits"), (single, "1 of 6 rows of logits")] {
        let (code, first, reason) = audited(&dump, &[]);
        assert_eq!((code, &first[..]), (2, ""), "{reason}");
        assert!(reason.as_str().unwrap().contains(named), "{reason}");
        assert_eq!(audited(&dump, &["--allow-missing"]).0, 0);
        assert_eq!(audited(&dump, &["--layer", "0"]).0, 0);
    }
}
