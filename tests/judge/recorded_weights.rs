//! Recordings of a model whose weights are in another place than in the file: the answer names which ones.

use std::path::Path;

use parity::checkpoint::Checkpoint;
use parity::gguf::{Gguf, Value as Metadata};
use parity::model::builders::{Cache, Shape, build};
use parity_graph::Graph;
use tempfile::TempDir;

use crate::support::gguf_writer::GgufWriter;
use crate::support::graphs::record::{record, record_some};
use crate::support::graphs::{head, hollow, values};
use crate::support::program::audit;

const MODEL: &str = "qwen3moe-moe";
/// Of which each token goes to two.
const EXPERTS: usize = 4;
const TOKENS: usize = 12;

/// What engines show of a mixture of experts: what goes in, the scores, what comes out.
fn is_shown(id: Checkpoint) -> bool {
    let name = id.to_string();
    let inside = name.contains("ffn_moe") || name.contains("_exps");
    !inside || name.ends_with("ffn_moe_logits") || name.ends_with("ffn_moe_out")
}

/// The model with more experts than two: of two, the next one is the other one.
fn model() -> Vec<u8> {
    let layout = hollow(&head(MODEL));
    let mut out = GgufWriter::new();
    for (key, value) in layout.metadata() {
        let value = match key.ends_with(".expert_count") {
            true => Metadata::U32(EXPERTS as u32),
            false => value.clone(),
        };
        out.metadata.push((key.clone(), value));
    }
    for info in layout.tensors() {
        let mut shape = info.shape.clone();
        if info.name.contains("_exps") || info.name.contains("ffn_gate_inp") {
            shape[0] = EXPERTS;
        }
        let bytes = values(&info.name, shape.iter().product());
        out.tensors.push((info.name.clone(), info.dtype, shape, bytes));
    }
    out.bytes()
}

/// A folder with the model's file as it is, and one that `spoil` changed.
fn files(spoil: impl Fn(&Gguf, &mut [u8])) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["right", "wrong"] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
    }
    let [right, wrong] = ["right", "wrong"].map(|name| folder.path().join(name).join("model.gguf"));
    let mut bytes = model();
    std::fs::write(&right, &bytes).unwrap();
    spoil(&Gguf::open(&right).unwrap(), &mut bytes);
    std::fs::write(wrong, bytes).unwrap();
    folder
}

/// A prefill with flash attention.
fn graph(model: &Path) -> Graph {
    let shape = Shape::step(0, TOKENS, TOKENS, true, Cache::F32);
    build(&Gguf::open(model).unwrap(), shape).unwrap().graph
}

/// Where the bytes of a tensor stand in the file.
fn place(gguf: &Gguf, name: &str) -> std::ops::Range<usize> {
    let info = gguf.tensors().find(|info| info.name == name).unwrap();
    info.offset..info.offset + 4 * info.elements()
}

fn exchanged(gguf: &Gguf, bytes: &mut [u8], name: &str, [a, b]: [usize; 2]) {
    let experts = gguf.tensors().find(|info| info.name == name).unwrap().shape[0];
    let all = &mut bytes[place(gguf, name)];
    let size = all.len() / experts;
    for byte in 0..size {
        all.swap(a * size + byte, b * size + byte);
    }
}

/// Exit code, and place, mistake and sentence of the first divergence.
fn audited(folder: &Path, dump: &Path) -> (i32, [String; 3]) {
    let audited = audit(dump, &folder.join("right/model.gguf"), &["--allow-missing"]);
    let text = audited.report["first_divergence"]["diagnosis"][0]["text"].as_str();
    (audited.code, [audited.first, audited.fault, text.unwrap_or_default().to_owned()])
}

#[test]
fn experts_that_are_exchanged_are_named_where_their_product_was_recorded() {
    let folder = files(|gguf, bytes| exchanged(gguf, bytes, "blk.1.ffn_up_exps.weight", [0, 1]));
    let (dump, wrong) = (folder.path().join("dump"), folder.path().join("wrong/model.gguf"));
    record(&wrong, &graph(&wrong), &dump);
    let (code, [place, fault, text]) = audited(folder.path(), &dump);
    assert_eq!((code, &*place, &*fault), (1, "blk.1.ffn_up_exps", "moe.expert_index"), "{text}");
    assert_eq!(text, "experts 0 and 1 are exchanged in blk.1.ffn_up_exps.weight");
}

#[test]
fn experts_that_are_exchanged_are_named_where_only_their_sum_was_recorded() {
    let cases = [
        (&["up"][..], "which was not recorded"),
        (&["down"][..], "which was not recorded"),
        (&["gate", "up", "down"][..], "which were not recorded"),
    ];
    for (matrices, unseen) in cases {
        let folder = files(|gguf, bytes| {
            for matrix in matrices {
                exchanged(gguf, bytes, &format!("blk.1.ffn_{matrix}_exps.weight"), [0, 1]);
            }
        });
        let (dump, wrong) = (folder.path().join("dump"), folder.path().join("wrong/model.gguf"));
        record_some(&wrong, &graph(&wrong), &dump, &|_, _| None, &is_shown);
        let (code, [place, fault, text]) = audited(folder.path(), &dump);
        assert_eq!((code, &*place, &*fault), (1, "blk.1.ffn_moe_out", "moe.expert_index"), "{text}");
        assert!(text.starts_with("experts 0 and 1 are exchanged in blk.1.ffn_"), "{text}");
        assert!(text.ends_with(unseen) && matrices.iter().all(|one| text.contains(one)), "{text}");
    }
}

#[test]
fn a_choice_of_experts_that_rounding_cannot_change_need_not_be_recorded() {
    let folder = files(|_, _| {});
    let (dump, right) = (folder.path().join("dump"), folder.path().join("right/model.gguf"));
    record_some(&right, &graph(&right), &dump, &|_, _| None, &is_shown);
    assert_eq!(audited(folder.path(), &dump).0, 0);
}

#[test]
fn any_other_layers_weight_is_named() {
    let folder = files(|gguf, bytes| {
        let layers =
            (0..).take_while(|n| gguf.tensor(&format!("blk.{n}.attn_norm.weight")).is_some()).count();
        let last = place(gguf, &format!("blk.{}.attn_output.weight", layers - 1));
        bytes.copy_within(last, place(gguf, "blk.0.attn_output.weight").start);
    });
    let (dump, wrong) = (folder.path().join("dump"), folder.path().join("wrong/model.gguf"));
    record(&wrong, &graph(&wrong), &dump);
    let (code, [place, fault, text]) = audited(folder.path(), &dump);
    assert_eq!((code, &*place, &*fault), (1, "blk.0.attn_out", "linear.wrong_layer"), "{text}");
}
