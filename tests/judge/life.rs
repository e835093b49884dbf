//! The life of a context: several sequences, positions that are computed again, a context that is shifted. Recorded with
//! `scripts/record/driver.c`, layer 0 alone: `b0:3,1:2 b0:1,1:1 r0@3 b0:1` in one cache, and `b0:5 b0:1 s0@1,3 b0:1`.

use serde_json::{Value, json};

use crate::support::program::{Copied, answer, flat, output};

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const MIXED: &str = "tests/data/life/mixed";
const SHIFT: &str = "tests/data/life/shift";

/// Exit code of an audit of layer 0, and what was said without breaks of lines.
fn audit(dump: &str, flags: &[&str]) -> (i32, String) {
    let (code, text) = output(&[&["audit", dump, "-m", MODEL, "--layer", "0"], flags].concat());
    (code, flat(&text))
}

#[test]
fn what_a_context_lived_through_is_judged() {
    for (dump, rows) in [
        (MIXED, "0 to 2 are 0 to 2, 3 to 4 are 1:0 to 1:1, 5 is 3#1, 6 is 1:2, 7 is 3"),
        (SHIFT, "0 to 3 are 0 to 3, 4 is 4#1, 5 is 5, 6 is shift:0, 7 is 4"),
    ] {
        let (code, said) = audit(dump, &[]);
        assert_eq!(code, 0, "{dump}: {said}");
        assert!(said.contains(rows), "{said}");
        let (code, said) = output(&["diff", dump, dump, "-m", MODEL, "--layer", "0"]);
        assert_eq!(code, 0, "{said}");
        let (code, said) =
            output(&["run", "-m", MODEL, "--reference", dump, "--device", "cpu", "--layer", "0"]);
        assert_eq!(code, 0, "{said}");
        let (code, said) = output(&["inspect", dump]);
        assert!(code == 0 && flat(&said).contains(rows) && said.contains("seq_rm(0, "), "{said}");
    }
}

#[test]
fn one_sequence_can_be_looked_at_alone() {
    let rows = |flags: &[&str]| {
        let wanted = ["audit", MIXED, "-m", MODEL, "--layer", "0", "--format", "json"];
        let (code, report) = answer(&[&wanted, flags].concat());
        assert_eq!(code, 0, "{report}");
        let of = |entry: &Value| entry["id"] == "blk.0.attn_ctx";
        let entry = report["checkpoints"].as_array().unwrap().iter().find(|entry| of(entry)).unwrap().clone();
        entry["local"]["candidate"]["rows"].as_u64().unwrap()
    };
    let all = [rows(&[]), rows(&["--sequence", "0"]), rows(&["--sequence", "1"])];
    assert_eq!(all[0], 8);
    // Step by step: where a step has a row of the sequence, its attention is looked at.
    assert!(all[1] <= 8 && all[2] < 8, "{all:?}");
    let (code, said) = audit(MIXED, &["--sequence", "7"]);
    assert!(code == 2 && said.contains("no row is of sequence 7"), "{said}");
}

#[test]
fn a_row_that_sees_other_cells_than_its_sequence_holds_is_wrong() {
    let event = |call: &str, arguments: Value| json!({"call": call, "arguments": arguments});
    let removed = event("seq_rm", json!([0, 1, 2]));
    for (change, name, said) in [
        (
            ("sequences", json!([[1]])),
            "cache.wrong_sequence",
            "cells 0..3, 5, and its sequence holds cells 3..7",
        ),
        (
            ("events", json!([removed])),
            "cache.stale_cell",
            "cells 0..3, 5, and its sequence holds cells 0, 2, 5",
        ),
        (("events", json!([event("seq_cp", json!([1, 0, 0, -1]))])), "attn.mask_shift", "position 3"),
    ] {
        let dump = Copied::of(MIXED);
        dump.change(|manifest| manifest["steps"][2][change.0] = change.1);
        let (code, text) = audit(dump.path(), &[]);
        assert_eq!(code, 1, "{text}");
        assert!(text.contains("DIVERGES at blk.0.attn_ctx") && text.contains(name), "{text}");
        assert!(text.contains(said), "{text}");
    }
    // Of a state that was loaded nobody knows the cells.
    let dump = Copied::of(MIXED);
    dump.change(|manifest| manifest["steps"][2]["events"] = json!([event("load", json!([])), removed]));
    assert_eq!(audit(dump.path(), &[]).0, 0);
}

#[test]
fn a_manifest_whose_rows_do_not_fit_is_refused() {
    type Change = fn(&mut Value);
    let changes: [(Change, &str); 4] = [
        (|m| drop(m["tokens"].as_array_mut().unwrap().pop()), "a token for each of 8 rows"),
        (|m| drop(m["steps"][0]["cells"].as_array_mut().unwrap().pop()), "sequences and cells of 5 rows"),
        (|m| m["requires"] = json!(["sequences", "tomorrow"]), "`tomorrow`"),
        (|m| drop(m.as_object_mut().unwrap().remove("graphs")), "the graphs that computed them"),
    ];
    for (change, expected) in changes {
        let dump = Copied::of(MIXED);
        dump.change(change);
        let (code, said) = audit(dump.path(), &[]);
        assert!(code == 2 && said.contains(expected), "{expected}: {said}");
    }
}
