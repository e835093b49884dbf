//! Attention matrices that a dump holds are judged in every row, whatever else it lacks: what follows is computed from them.

use std::path::Path;

use crate::support::edited::{audited, edit, made, undeclare};

const TOKENS: usize = 20;
/// Attention matrices too.
const WITH_MATRICES: [&str; 2] = ["--checkpoint", "*"];

/// What is done to a row.
type Change = fn(&mut [f32]);

/// Leaves nodes of a kind out, and changes one row of the weights of a layer in every head.
fn without(dump: &Path, left_out: &str, row: usize, change: Change) {
    edit(dump, |name, _, values| {
        if name == "blk.2.attn_probs" {
            values
                .chunks_exact_mut(TOKENS * TOKENS)
                .for_each(|head| change(&mut head[row * TOKENS..][..TOKENS]));
        }
        !name.ends_with(left_out)
    });
}

#[test]
fn a_wrong_row_of_weights_is_found_where_scores_were_not_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&str, Change); 4] = [
        ("healthy", |_| {}),
        ("zero", |row| row.fill(0.0)),
        ("reversed", |row| row.reverse()),
        ("threefold", |row| row.iter_mut().for_each(|p| *p *= 3.0)),
    ];
    for (name, change) in cases {
        // Rows that no sample holds.
        for row in [7, 10, 13] {
            let dump = folder.path().join(format!("{name}-{row}"));
            made(&dump, TOKENS, &WITH_MATRICES);
            without(&dump, "attn_scores", row, change);
            let (code, first, reason) = audited(&dump, &[]);
            let wanted = if name == "healthy" { (0, "") } else { (1, "blk.2.attn_probs") };
            assert_eq!((code, &first[..]), wanted, "{name}, row {row}: {reason}");
        }
    }
}

#[test]
fn a_cache_in_f16_is_found_where_matrices_were_recorded_and_what_they_lead_to_was_not() {
    let folder = tempfile::tempdir().unwrap();
    // Keys are of the scores, values of the context, which is seen in what it leads to.
    for (name, fault, wanted) in [
        ("healthy", None, (0, "")),
        ("keys", Some("attn.wrong_kv_head@blk.1.attn_scores"), (1, "blk.1.attn_scores")),
        ("values", Some("attn.wrong_kv_head@blk.1.attn_ctx"), (1, "blk.1.attn_out")),
    ] {
        let dump = folder.path().join(name);
        let mut how = [&WITH_MATRICES[..], &["--numerics", "f32 kv=f16"]].concat();
        how.extend(fault.into_iter().flat_map(|fault| ["--inject", fault]));
        made(&dump, TOKENS, &how);
        without(&dump, "attn_ctx", 0, |_| {});
        undeclare(&dump);
        let (code, first, reason) = audited(&dump, &["--allow-missing"]);
        assert_eq!((code, &first[..]), wanted, "{name}: {reason}");
    }
}

#[test]
fn all_checkpoints_of_an_engine_without_a_graph_are_those_that_have_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    made(&dump, TOKENS, &[&WITH_MATRICES[..], &["--numerics", "f32 kv=f16"]].concat());
    undeclare(&dump);
    let (code, _, reason) = audited(&dump, &["--checkpoint", "*"]);
    assert_eq!(code, 0, "{reason}");
}
