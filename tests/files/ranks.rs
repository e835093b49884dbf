//! Ranks of a tensor-parallel engine: put together, told where one is missing, and what they do wrong named.

use std::fs;
use std::path::Path;

use parity_dump::{Checkpoint, Kind};
use predicates::prelude::*;
use predicates::str::contains;

use super::foreign::{F16, audit, folder};
use crate::support::dumps::{
    Sums, as_hf, healthy, tensors, tokens, two_ranks, two_ranks_unsummed, with_fault,
};
use crate::support::files::{Tensor, npz, safetensors};
use crate::support::program::parity;

#[test]
fn ranks_are_put_together() {
    let (_dir, at) = folder();
    two_ranks(healthy(), &at, Sums::Summands);
    audit(&at).assert().code(0).stdout(contains("PARITY").and(contains("2 ranks")));
    let reference = healthy().to_str().unwrap();
    parity(&["diff", at.to_str().unwrap(), reference, "-m", F16]).assert().code(0).stdout(contains("PARITY"));
    two_ranks(healthy(), &at, Sums::Unreduced);
    audit(&at).assert().code(2).stderr(contains("blk.1.attn_residual: differs between ranks"));
    fs::rename(at.join("rank1"), at.join("rank3")).unwrap();
    audit(&at).assert().code(2).stderr(contains("some ranks are missing"));
}

/// The first divergence of an audit, and what names it.
fn named(path: &Path) -> (String, Vec<(String, String)>) {
    let output = audit(path).args(["--format", "json"]).assert().code(1).get_output().stdout.clone();
    let report: serde_json::Value = serde_json::from_slice(&output).unwrap();
    let (first, text) =
        (&report["first_divergence"], |value: &serde_json::Value| value.as_str().unwrap().to_owned());
    let names = first["diagnosis"].as_array().unwrap().iter();
    (text(&first["checkpoint"]), names.map(|item| (text(&item["fault"]), text(&item["text"]))).collect())
}

#[test]
fn a_sum_over_ranks_that_was_left_out_is_named_where_summands_were_recorded() {
    let (_dir, at) = folder();
    two_ranks_unsummed(&at.join("alike"), false);
    let (node, names) = named(&at.join("alike"));
    let [(name, text)] = &names[..] else { panic!("{node}: {names:?}") };
    assert_eq!((node.as_str(), name.as_str()), ("blk.1.attn_residual", "ranks.lost_sum"));
    assert!(text.contains("the sum lacks what rank 1 of 2 computes"), "{text}");
    two_ranks_unsummed(&at.join("own"), true);
    audit(&at.join("own")).assert().code(2).stderr(contains(
        "blk.1.attn_residual: lacks a sum over ranks (ranks.lost_sum): each added its own part of blk.1.attn_out alone",
    ));
}

#[test]
fn what_ranks_do_wrong_is_named() {
    let (_dir, at) = folder();
    for (fault, node, says) in [
        ("ranks.lost_sum=1/2@1", "blk.1.attn_out", "the sum lacks what rank 1 of 2 computes"),
        ("ranks.lost_sum=0/2@blk.2.ffn_out", "blk.2.ffn_out", "the sum lacks what rank 0 of 2 computes"),
        ("ranks.repeated@1", "blk.1.q", "one a rank, these stand there: 0, 0"),
        ("ranks.repeated@blk.1.ffn_gate", "blk.1.ffn_gate", "one a rank, these stand there: 0, 0"),
        ("ranks.repeated@blk.2.v", "blk.2.v", "one a rank, these stand there: 0, 0"),
        ("ranks.exchanged@blk.0.ffn_up", "blk.0.ffn_up", "stand in the order 1, 0"),
    ] {
        let ranks = at.join("ranks");
        two_ranks(&with_fault(fault, &at), &ranks, Sums::Reduced);
        let (found, names) = named(&ranks);
        let name = fault.split(['=', '@']).next().unwrap();
        let alone = names.len() == 1 && names[0].0 == name && names[0].1.contains(says);
        assert!(alone && found == node, "{fault}: {found} {names:?}");
        fs::remove_dir_all(&ranks).unwrap();
    }
    // In one folder nothing says that there are ranks: half a sum may have ended early as well.
    let names = named(&at.join("ranks.lost_sum-1-2@1")).1;
    let [(name, text)] = &names[..] else { panic!("{names:?}") };
    assert_eq!(name, "linear.truncated_k");
    assert!(text.ends_with("(indistinguishable here from ranks.lost_sum)"), "{text}");
}

#[test]
fn one_rank_of_several_is_told_so() {
    let (_dir, at) = folder();
    two_ranks(healthy(), &at, Sums::Reduced);
    fs::remove_dir_all(at.join("rank1")).unwrap();
    for one in [at.clone(), at.join("rank0")] {
        audit(&one).assert().code(2).stderr(
            contains("is one rank's part of the model: the other 1 of 2 are missing")
                .and(contains("blk.0.ffn_gate"))
                .and(contains("all/rank0 to all/rank1"))
                .and(contains("parity audit all -m MODEL.gguf")),
        );
    }
    // A whole model whose feed-forward rows alone are short is no rank of anything.
    let file = at.join("short.safetensors");
    let short = |(id, tensor): (Checkpoint, Tensor)| match id.kind() {
        Kind::FfnGate | Kind::FfnUp | Kind::FfnAct => (id.to_string(), tensor.half(0)),
        _ => (id.to_string(), tensor),
    };
    fs::write(&file, safetensors(&tensors().into_iter().map(short).collect(), &tokens())).unwrap();
    audit(&file).assert().code(1).stdout(contains("DIVERGES at blk.0.ffn_gate: rows of [384]"));
}

#[test]
fn ranks_are_called_by_their_folder() {
    let (_dir, at) = folder();
    let engine = at.join("my-engine");
    for rank in ["rank0", "rank1"] {
        fs::create_dir_all(engine.join(rank)).unwrap();
        fs::write(engine.join(rank).join("dump.npz"), npz(&as_hf(), &tokens(), false)).unwrap();
    }
    let output = audit(&engine).args(["--format", "json"]).assert().code(0).get_output().stdout.clone();
    let report: serde_json::Value = serde_json::from_slice(&output).unwrap();
    assert_eq!(report["candidate"]["producer"]["name"], "my-engine");
    assert_eq!(report["candidate"]["path"], engine.to_str().unwrap());
}
