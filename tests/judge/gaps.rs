//! Dumps that leave nodes out: what they have is looked at in every row, whatever it is computed from.

use crate::support::edited::{audited, edit, made, undeclare};
use crate::support::samples::sample;

const TOKENS: usize = 40;
/// A row that no sample holds, and in whose place the next one stands.
const ROW: usize = 17;

/// Exit codes and first wrong checkpoints of an audit of what is kept, healthy and with a stale row at `at`.
fn both(keeps: &dyn Fn(&str) -> bool, at: &str, flags: &[&str]) {
    both_of(&[], keeps, at, flags);
}

/// The same of a run in an arithmetic that the dump does not declare.
fn both_of(how: &[&str], keeps: &dyn Fn(&str) -> bool, at: &str, flags: &[&str]) {
    for stale in [None, Some(at)] {
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("dump");
        made(&dump, TOKENS, how);
        if !how.is_empty() {
            undeclare(&dump);
        }
        edit(&dump, |name, shape, values| {
            if Some(name) == stale {
                let width = values.len() / shape[0];
                values.copy_within((ROW + 1) * width..(ROW + 2) * width, ROW * width);
            }
            keeps(name)
        });
        let (code, first, reason) = audited(&dump, flags);
        let wanted = if stale.is_some() { (1, at) } else { (0, "") };
        assert_eq!((code, &first[..]), wanted, "{how:?} {flags:?}: {reason}");
    }
}

#[test]
fn a_row_behind_a_node_that_was_not_recorded_is_looked_at() {
    let fused = |name: &str| !name.ends_with("ffn_act");
    both(&fused, "blk.2.ffn_out", &["--allow-missing"]);
    both(&fused, "blk.2.ffn_out", &["--checkpoint", "blk.2.ffn_out"]);
    both(&fused, "blk.2.ffn_out", &[]);
}

#[test]
fn so_is_one_behind_keys_that_were_not_recorded() {
    let rotated = |name: &str| !name.ends_with("_rope") && !name.ends_with(".k");
    both(&rotated, "blk.1.attn_ctx", &["--allow-missing"]);
}

#[test]
fn hidden_states_and_logits_alone_are_looked_at_in_every_row() {
    let states = |name: &str| name == "embed" || name.ends_with(".layer_out");
    both(&states, "blk.2.layer_out", &["--allow-missing"]);
    both(&|name| name == "logits", "logits", &["--allow-missing"]);
}

/// Products that were not recorded are computed as those that were.
#[test]
fn operands_that_are_rounded_are_so_where_nobody_recorded_it() {
    let left_out = [("q_proj", "blk.2.q"), ("ffn_gate", "blk.2.ffn_act"), ("ffn_out", "blk.2.layer_out")];
    let arithmetics = ["bf16", "bf16 storage=f32 kv=bf16"];
    let cases = left_out.into_iter().flat_map(|case| arithmetics.map(|numerics| (case, numerics)));
    for ((left_out, at), numerics) in sample("nodes and arithmetics", 2, cases) {
        let keeps = |name: &str| !name.ends_with(left_out);
        both_of(&["--numerics", numerics], &keeps, at, &["--allow-missing"]);
    }
}

/// The first of steps of one token shows the type of the cache alone, which values need not have.
#[test]
fn a_step_that_sees_one_position_shows_no_type_of_values() {
    let folder = tempfile::tempdir().unwrap();
    let fault = ["--inject", "attn.no_scale@blk.1.attn_ctx"];
    for numerics in ["f16 kv=f16", "bf16 kv=bf16"] {
        for (name, fault, wanted) in [("healthy", &[][..], (0, "")), ("wrong", &fault, (1, "blk.1.attn_ctx"))]
        {
            let dump = folder.path().join(format!("{name} {numerics}"));
            made(&dump, 8, &[&["--chunk", "1", "--numerics", numerics], fault].concat());
            undeclare(&dump);
            let (code, first, reason) = audited(&dump, &[]);
            assert_eq!((code, &first[..]), wanted, "{name} {numerics}: {reason}");
        }
    }
}
