//! Healthy dumps as other engines hand them over.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use indexmap::IndexMap;
use parity_dump::{Checkpoint, Dump, Kind, Producer, Writer};

use super::files::Tensor;
use super::program::parity;

const PROMPT: &str = "def read_lines(path):";

/// What parity's own engine computes of [`PROMPT`], as a dump of one pass.
pub fn healthy() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let path = tempfile::tempdir().unwrap().keep().join("dump");
        let run = ["run", "--device", "cpu", "-p", PROMPT, "--no-audit", "--dump"];
        parity(&run).arg(&path).assert().failure();
        path
    })
}

pub fn kept(id: &Checkpoint) -> bool {
    !matches!(id.kind(), Kind::QProj | Kind::KProj | Kind::VProj)
}

/// Every tensor of the healthy dump, by id.
pub fn tensors() -> IndexMap<Checkpoint, Tensor> {
    tensors_of(&Dump::open(healthy()).unwrap())
}

fn tensors_of(dump: &Dump) -> IndexMap<Checkpoint, Tensor> {
    let of = |id: Checkpoint| {
        let (shape, _, values) = dump.in_step(0, id).unwrap();
        (id, Tensor { shape, values })
    };
    dump.checkpoints().filter(kept).map(of).collect()
}

pub fn tokens() -> Vec<i64> {
    Dump::open(healthy()).unwrap().tokens().iter().map(|&token| i64::from(token)).collect()
}

/// As forward hooks of a transformers model have them: module names, a batch of one, heads before tokens behind RoPE.
pub fn as_hf() -> BTreeMap<String, Tensor> {
    let mut out = BTreeMap::new();
    for (id, tensor) in tensors() {
        let layer = id.layer_index().map(|n| format!("model.layers.{n}")).unwrap_or_default();
        let name = match id.kind() {
            Kind::Embed => "model.embed_tokens".to_owned(),
            Kind::AttnNorm => format!("{layer}.input_layernorm"),
            Kind::Q => format!("{layer}.self_attn.q_proj"),
            Kind::K => format!("{layer}.self_attn.k_proj"),
            Kind::V => format!("{layer}.self_attn.v_proj"),
            Kind::QRope => format!("{layer}.self_attn.q_rope"),
            Kind::KRope => format!("{layer}.self_attn.k_rope"),
            Kind::AttnCtx => format!("{layer}.self_attn.o_proj.input"),
            Kind::AttnOut => format!("{layer}.self_attn.o_proj"),
            Kind::AttnResidual => format!("{layer}.post_attention_layernorm.input"),
            Kind::FfnNorm => format!("{layer}.post_attention_layernorm"),
            Kind::FfnGate => format!("{layer}.mlp.gate_proj"),
            Kind::FfnUp => format!("{layer}.mlp.up_proj"),
            Kind::FfnAct => format!("{layer}.mlp.down_proj.input"),
            Kind::FfnOut => format!("{layer}.mlp.down_proj"),
            Kind::LayerOut => layer.clone(),
            Kind::FinalNorm => "model.norm".to_owned(),
            Kind::Logits => "lm_head".to_owned(),
            _ => continue,
        };
        let tensor = match id.kind() {
            Kind::QRope | Kind::KRope => tensor.permuted(&[1, 0, 2]),
            Kind::Q | Kind::K | Kind::V => tensor.flat(),
            _ => tensor,
        };
        out.insert(name, tensor.batched());
    }
    out
}

/// The healthy dump under names that say nothing, axes in any order, q, k and v in one tensor, gate and up in turn.
pub fn nameless() -> (BTreeMap<String, Tensor>, BTreeMap<String, Vec<String>>) {
    let (all, mut named, mut truth) = (tensors(), BTreeMap::new(), BTreeMap::new());
    for (number, (id, tensor)) in all.iter().enumerate() {
        let sibling = |kind| all[&id.sibling(kind)].flat();
        let ids = |kinds: &[Kind]| kinds.iter().map(|kind| id.sibling(*kind).to_string()).collect();
        let name = format!("t{:03}", (number * 37 + 11) % 101);
        let orders = [[0, 1, 2], [1, 0, 2], [2, 0, 1], [2, 1, 0]];
        let (tensor, is): (Tensor, Vec<String>) = match id.kind() {
            Kind::K | Kind::V | Kind::FfnUp => continue,
            Kind::Q => {
                let kinds = [Kind::Q, Kind::K, Kind::V];
                (Tensor::beside(&kinds.map(sibling)), ids(&kinds))
            }
            Kind::FfnGate => {
                let kinds = [Kind::FfnGate, Kind::FfnUp];
                (Tensor::woven(&kinds.map(sibling)), ids(&kinds))
            }
            kind if tensor.shape.len() == 3 => (tensor.permuted(&orders[number % 4]), ids(&[kind])),
            kind if number % 3 == 0 => (tensor.permuted(&[1, 0]).batched(), ids(&[kind])),
            kind => (tensor.clone(), ids(&[kind])),
        };
        assert!(truth.insert(name.clone(), is).is_none(), "a name for each");
        named.insert(name, tensor);
    }
    (named, truth)
}

/// How two ranks hand over what row-wise matmuls give.
#[derive(Clone, Copy, PartialEq)]
pub enum Sums {
    /// Each rank its summand, before they are added.
    Summands,
    /// So too, and one sum was not added up: the residual of layer 1 differs.
    Unreduced,
    /// Both ranks the sum.
    Reduced,
}

/// What parity's own engine computes with a mistake in it, as a dump of one pass.
pub fn with_fault(fault: &str, at: &Path) -> PathBuf {
    let path = at.join(fault.replace(['/', '='], "-"));
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--no-audit", "--inject", fault, "--dump"];
    parity(&run).arg(&path).assert().failure();
    path
}

/// What two ranks record whose output matmul of layer 1 was not added up: rank 0's summand alone is in the residual, of both
/// or of rank 0, and rank 1's in its own.
pub fn two_ranks_unsummed(at: &Path, own_residuals: bool) {
    std::fs::create_dir_all(at).unwrap();
    let fault = with_fault("ranks.lost_sum=1/2@1", at);
    let sum = Checkpoint::layer(Kind::AttnOut, 1);
    let own = tensors_of(&Dump::open(&fault).unwrap())[&sum].clone();
    let other = tensors()[&sum].with(&own, |sum, own| sum - own);
    write_two_ranks(&fault, at, |id, tensor, rank| match id {
        id if id == sum => [&own, &other][rank].clone(),
        id if id == sum.sibling(Kind::AttnResidual) && rank == 1 && own_residuals => {
            tensor.with(&own, |x, own| x - own).with(&other, |x, other| x + other)
        }
        _ => part_of(id, tensor, rank),
    });
    std::fs::remove_dir_all(fault).unwrap();
}

/// Dumps of two ranks: heads, columns and vocabulary are divided.
pub fn two_ranks(whole: &Path, at: &Path, sums: Sums) {
    write_two_ranks(whole, at, |id, tensor, rank| match id.kind() {
        Kind::AttnOut | Kind::FfnOut if sums != Sums::Reduced => tensor.summand(rank),
        Kind::AttnResidual if sums == Sums::Unreduced && id.layer_index() == Some(1) && rank == 1 => {
            tensor.scaled(0.9)
        }
        _ => part_of(id, tensor, rank),
    });
}

/// What a rank holds of a tensor whose slices are divided.
fn part_of(id: Checkpoint, tensor: Tensor, rank: usize) -> Tensor {
    match id.kind() {
        Kind::Q
        | Kind::K
        | Kind::V
        | Kind::QRope
        | Kind::KRope
        | Kind::AttnCtx
        | Kind::FfnGate
        | Kind::FfnUp
        | Kind::FfnAct
        | Kind::Logits => tensor.half(rank),
        _ => tensor,
    }
}

fn write_two_ranks(whole: &Path, at: &Path, part: impl Fn(Checkpoint, Tensor, usize) -> Tensor) {
    let whole = Dump::open(whole).unwrap();
    let positions = &whole.manifest().steps[0].positions;
    for rank in 0..2 {
        let mut writer = Writer::create(
            &at.join(format!("rank{rank}")),
            Producer { name: "sharded".into(), numerics: Some("f32".into()), ..Producer::default() },
            Default::default(),
        )
        .unwrap();
        writer.begin_step(whole.tokens(), positions, 200).unwrap();
        for (id, tensor) in tensors_of(&whole) {
            let part = part(id, tensor, rank);
            writer.tensor_f32(id, &part.shape, &part.values).unwrap();
        }
        writer.end_step().unwrap();
        writer.finish().unwrap();
    }
}
