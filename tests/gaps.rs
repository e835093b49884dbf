//! Dumps that leave nodes out: what they have is looked at in every row, whatever it is computed from.

#[path = "support/edited.rs"]
mod edited;

use edited::{audited, edit, made};

const TOKENS: usize = 40;
/// A row that no sample holds, and in whose place the next one stands.
const ROW: usize = 17;

/// Exit codes and first wrong checkpoints of an audit of what is kept, healthy and with a stale row at `at`.
fn both(keeps: &dyn Fn(&str) -> bool, at: &str, flags: &[&str]) {
    for stale in [None, Some(at)] {
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("dump");
        made(&dump, TOKENS, &[]);
        edit(&dump, |name, shape, values| {
            if Some(name) == stale {
                let width = values.len() / shape[0];
                values.copy_within((ROW + 1) * width..(ROW + 2) * width, ROW * width);
            }
            keeps(name)
        });
        let (code, first, reason) = audited(&dump, flags);
        let wanted = if stale.is_some() { (1, at) } else { (0, "") };
        assert_eq!((code, &first[..]), wanted, "{flags:?}: {reason}");
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
