//! Engines that compute in f32 and keep keys and values in f16, of which a dump shows neither: healthy ones are at parity,
//! and what is wrong in their attention is found, in the prompt and in decode steps.

use std::path::{Path, PathBuf};

use parity_dump::checkpoint::Kind;
use tempfile::TempDir;

use crate::support::program::{answer, audit};
use crate::support::samples::sample;
use crate::support::subset;

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const TOKENS: &str = "312,863,2039,1444,1518,285,314,511,435,408,280,285";

/// What engines declare of such a cache.
const DECLARED: [Option<&str>; 3] = [Some("f32 kv=f16"), Some("f32"), None];

/// A run of our engine with such a cache: a prompt, and three decode steps.
fn made(fault: Option<&str>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("whole");
    let to = dump.to_str().unwrap();
    let run = ["run", "-m", MODEL, "--device", "cpu", "--tokens", TOKENS, "-n", "3", "--no-audit"];
    let how = ["--numerics", "f32 kv=f16", "--dump", to];
    let fault: Vec<&str> = fault.map_or_else(Vec::new, |fault| vec!["--inject", fault]);
    answer(&[&run[..], &how[..], &fault[..]].concat());
    (folder, dump)
}

/// What an audit says of those of its tensors that `some` names, declared as that: exit code, the first checkpoint that is
/// wrong, and the notes.
fn audited(whole: &Path, declared: Option<&str>, some: &dyn Fn(Kind) -> bool) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    subset::copy(whole, &dump, declared, some);
    let audited = audit(&dump, Path::new(MODEL), &["--allow-missing"]);
    (audited.code, audited.first, audited.notes)
}

/// The context and all that follows.
fn from_context(kind: Kind) -> bool {
    kind == Kind::AttnCtx || from_output(kind)
}

/// The projected context and all that follows.
fn from_output(kind: Kind) -> bool {
    use Kind::*;
    matches!(kind, AttnOut | AttnResidual | FfnNorm | FfnOut) || of_layers(kind)
}

/// One tensor of each layer.
fn of_layers(kind: Kind) -> bool {
    matches!(kind, Kind::Embed | Kind::LayerOut | Kind::FinalNorm | Kind::Logits)
}

type Some<'a> = &'a dyn Fn(Kind) -> bool;

const SUBSETS: [(&str, Some<'static>); 3] =
    [("attn_ctx", &from_context), ("attn_out", &from_output), ("layer_out", &of_layers)];

#[test]
fn a_healthy_one_is_at_parity_and_told_what_its_cache_was_taken_to_be() {
    let (_folder, whole) = made(None);
    let cases = SUBSETS.into_iter().flat_map(|subset| DECLARED.map(|declared| (subset, declared)));
    for ((name, some), declared) in sample("subsets and declarations", 4, cases) {
        let (code, first, notes) = audited(&whole, declared, some);
        assert_eq!((code, first.as_str()), (0, ""), "{name}, {declared:?}: {notes}");
        let said = notes.contains("keys and values in f16");
        assert_eq!(said, declared != Some("f32 kv=f16"), "{name}, {declared:?}: {notes}");
    }
}

#[test]
fn logits_alone_are_at_parity_where_the_cache_is_declared_and_the_answer_says_what_it_does_not_see() {
    let (_folder, whole) = made(None);
    let (code, first, notes) = audited(&whole, Some("f32 kv=f16"), &|kind| kind == Kind::Logits);
    assert_eq!((code, first.as_str()), (0, ""), "{notes}");
    for fault in sample("mistakes", 1, ["attn.no_scale@2", "rope.base@1", "ffn.gelu@3"]) {
        let (_folder, wrong) = made(Some(fault));
        let (code, first, notes) = audited(&wrong, Some("f32 kv=f16"), &|kind| kind == Kind::Logits);
        assert_eq!((code, first.as_str()), (1, "logits"), "{fault}: {notes}");
    }
}

#[test]
fn mistakes_behind_a_cache_are_named() {
    let faults = ["rope.base@1", "attn.kv_head@1", "rope.none@1", "linear.no_bias@blk.1.q"];
    for fault in sample("mistakes", 2, faults) {
        let (_folder, whole) = made(Some(fault));
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("dump");
        subset::copy(&whole, &dump, Some("f32 kv=f16"), &from_context);
        let found = audit(&dump, Path::new(MODEL), &["--allow-missing"]);
        let named = fault.split('@').next().unwrap();
        assert_eq!((found.code, &*found.first), (1, "blk.1.attn_ctx"), "{fault}");
        // Rows that are not rotated are those of position 0.
        let diagnosis = found.report["first_divergence"]["diagnosis"][0]["text"].to_string();
        let is_same = diagnosis.contains(&format!("indistinguishable here from {named})"));
        assert!(found.fault == named || is_same, "{fault}: {}, {diagnosis}", found.fault);
    }
}

#[test]
fn a_mistake_in_attention_is_found_where_the_cache_explains_none_of_it() {
    // In decode steps alone, and in all.
    for fault in ["attn.stale_cache@1", "attn.no_scale@2", "attn.kv_head@1"] {
        let (_folder, whole) = made(Some(fault));
        let layer = if fault.contains("@1") { 1 } else { 2 };
        let cases = SUBSETS.into_iter().flat_map(|some| [Some("f32 kv=f16"), None].map(|how| (some, how)));
        for ((name, some), declared) in sample("subsets and declarations", 2, cases) {
            let (code, first, notes) = audited(&whole, declared, some);
            let expected = format!("blk.{layer}.{name}");
            assert_eq!((code, first), (1, expected), "{fault}, {declared:?}: {notes}");
        }
    }
}
