//! Mistakes that only recorded graphs have a place for: mixtures of experts, recurrent states, windows, scaled RoPE.
//!
//! What they change is in `parity_graph::fault`; here stands what people are told of them.

use parity_graph::Op;

/// A mistake in an op of a recorded graph.
pub struct Entry {
    /// E.g. `moe.top_k`.
    pub name: &'static str,
    /// What goes wrong, one line.
    pub summary: &'static str,
    /// Where in an engine people make it.
    pub place: &'static str,
    /// How to mend it.
    pub fix: &'static str,
    /// The ops that have a place for it.
    pub ops: &'static [Op],
}

const ATTENTION: &[Op] = &[Op::FlashAttn, Op::SoftMax];
const ROPE: &[Op] = &[Op::Rope];
const SCAN: &[Op] = &[Op::SsmScan, Op::GatedDeltaNet];

pub(super) const fn entry(
    name: &'static str,
    ops: &'static [Op],
    summary: &'static str,
    place: &'static str,
    fix: &'static str,
) -> Entry {
    Entry { name, summary, place, fix, ops }
}

/// All of them, by the part of the model that they sit in.
pub const ENTRIES: &[Entry] = &[
    entry(
        "norm.rms",
        &[Op::Norm],
        "the mean is not subtracted",
        "an RMS norm where the model has LayerNorm",
        "subtract the mean before the variance is taken",
    ),
    entry(
        "linear.no_scale",
        &[Op::Mul],
        "a multiplication by a weight that is no norm's is left out",
        "a scale tensor of the file that nothing reads",
        "multiply by the tensor that the report names",
    ),
    entry(
        "scale.missing",
        &[Op::Scale],
        "a factor of the model is left out",
        "embedding, residual or logit scales that most architectures do not have",
        "read the architecture's scales from the file and apply each where the graph has it",
    ),
    entry(
        "rope.factors",
        ROPE,
        "frequency factors are left out, or multiplied instead of divided by",
        "rope_freqs.weight of Llama 3.1, the long and short factors of Phi-3 and of others",
        "divide each pair's frequency by its factor",
    ),
    entry(
        "rope.scale",
        ROPE,
        "positions are not scaled",
        "linear scaling ({arch}.rope.scaling.factor) that is not read",
        "multiply positions by 1/factor before angles are computed from them",
    ),
    entry(
        "rope.yarn",
        ROPE,
        "YaRN's interpolation or its magnitude factor is left out",
        "rope scaling of type yarn taken for none or linear",
        "mix both frequencies by the ramp, and multiply sine and cosine by the magnitude factor",
    ),
    entry(
        "rope.yarn_ramp",
        ROPE,
        "YaRN mixes the two frequencies over other pairs than the model",
        "the limits exchanged, or the context after scaling taken for the original one",
        "read {arch}.rope.scaling.original_context_length, and beta_fast before beta_slow",
    ),
    entry(
        "rope.sections",
        ROPE,
        "sections of multimodal RoPE exchanged or ignored",
        "one position for all pairs, which text alone does not show",
        "take each pair's position by {arch}.rope.dimension_sections",
    ),
    entry(
        "attn.window",
        ATTENTION,
        "another layer's mask: the sliding window is lost, or applied where there is none",
        "the pattern of windowed and full layers counted from the other end",
        "read {arch}.attention.sliding_window_pattern",
    ),
    entry(
        "attn.window_size",
        ATTENTION,
        "the sliding window is one position too wide or too narrow",
        "i - j < window written as i - j <= window, or the reverse",
        "a window of W sees W positions, the token's own among them",
    ),
    entry(
        "attn.sinks",
        ATTENTION,
        "the attention sinks are left out",
        "attn_sinks.weight of gpt-oss that nothing reads",
        "add exp(sink - max) to the sum of each head's softmax",
    ),
    entry(
        "attn.softcap",
        &[Op::FlashAttn, Op::Tanh],
        "a soft cap, cap·tanh(x/cap), is left out",
        "attention kernels without soft cap, or capped logits forgotten",
        "cap the scores before the mask is added",
    ),
    entry(
        "attn.alibi",
        ATTENTION,
        "the position bias (ALiBi) is left out",
        "models without RoPE run as if positions were told elsewhere",
        "add slope·distance to the scores, one slope for each head",
    ),
    entry(
        "residual.parallel",
        &[Op::RmsNorm, Op::Norm],
        "the feed-forward part reads the layer's input, not what attention added to",
        "a parallel layer (GPT-J, Falcon, Cohere) written where the model has a sequential one",
        "normalise the sum of attention's output and the layer's input",
    ),
    entry(
        "ffn.silu",
        &[Op::Geglu, Op::Reglu, Op::Gelu],
        "SiLU is used for the model's activation",
        "the default of Llama for an architecture with GELU or ReLU",
        "use the activation of the architecture",
    ),
    entry(
        "ffn.relu",
        &[Op::Swiglu, Op::Geglu, Op::Gelu],
        "ReLU is used for the model's activation",
        "an activation chosen by its place in a list",
        "use the activation of the architecture",
    ),
    entry(
        "ffn.no_square",
        &[Op::Sqr],
        "the square behind ReLU is left out",
        "squared ReLU (Nemotron, Arcee) taken for ReLU",
        "square what ReLU gives",
    ),
    entry(
        "ffn.clamp",
        &[Op::SwigluOai, Op::SwigluClamp],
        "gate and up are not limited",
        "the limit of gpt-oss' SwiGLU forgotten: only large activations show it",
        "limit the gate from above, up from both sides",
    ),
    entry(
        "ffn.alpha",
        &[Op::SwigluOai],
        "the slope of the gate's sigmoid is 1",
        "gpt-oss' 1.702 forgotten",
        "gate/(1 + exp(-alpha·gate))",
    ),
    entry(
        "ffn.glu",
        &[Op::SwigluOai],
        "the plain SwiGLU is used",
        "gpt-oss' variant taken for Llama's",
        "limit gate and up, and multiply by up + 1",
    ),
    entry(
        "moe.routing",
        &[Op::SoftMax, Op::Sigmoid],
        "experts are weighted by another function of the scores",
        "softmax for sigmoid (DeepSeek-V3, GLM) or the reverse; softmax before or after the choice",
        "read {arch}.expert_gating_func",
    ),
    entry(
        "moe.top_k",
        &[Op::Add, Op::SumRows, Op::SoftMax],
        "one expert too few is used, or normalised over",
        "k read from another key, or shared experts counted in",
        "use {arch}.expert_used_count experts, all of them in the sum of the weights",
    ),
    entry(
        "moe.order",
        &[Op::Argsort],
        "the experts with the lowest scores are chosen",
        "scores sorted upwards",
        "take the k largest",
    ),
    entry(
        "moe.expert_index",
        &[Op::MulMatId],
        "another expert's weights are read",
        "experts counted from 1, or expert and token exchanged in a stride",
        "expert e is matrix e of the stacked tensor",
    ),
    entry(
        "moe.no_renorm",
        &[Op::Div],
        "the weights of the chosen experts are not renormalised",
        "norm_topk_prob not read",
        "divide the chosen weights by their sum",
    ),
    entry(
        "moe.no_scale",
        &[Op::Scale],
        "the scale of the routed experts is left out",
        "routed_scaling_factor not read",
        "multiply the weights by {arch}.expert_weights_scale",
    ),
    entry(
        "moe.no_shared",
        &[Op::Add],
        "the shared expert is left out",
        "a mixture of routed experts alone",
        "add the shared expert's output to that of the routed ones",
    ),
    entry(
        "state.not_carried",
        &[Op::SsmConv, Op::SsmScan, Op::GatedDeltaNet],
        "every step starts with an empty state",
        "a state that is not written behind the prefill, or cleared before each decode step",
        "keep what is behind the last token for the next step",
    ),
    entry(
        "state.stale",
        &[Op::SsmConv],
        "what is kept of the past is one token old",
        "the state written before the last token is taken in",
        "keep the last K - 1 columns, the newest token's among them",
    ),
    entry(
        "state.shifted",
        &[Op::SsmConv],
        "the convolution reads one position too early",
        "padding with K columns where K - 1 are kept",
        "token t is convolved with itself and the K - 1 before it",
    ),
    entry(
        "state.conv_kernel",
        &[Op::SsmConv],
        "the convolution's weights are one place off",
        "a kernel stored in the other order of its taps",
        "the last weight belongs to the newest token",
    ),
    entry(
        "state.exchanged",
        SCAN,
        "what is written into the state and what is read from it are exchanged",
        "B and C of Mamba, or q and k of a delta net, split in the wrong order",
        "split the projection in the order of the model",
    ),
    entry(
        "state.decay_sign",
        &[Op::SsmScan],
        "the decay has the wrong sign",
        "A stored as log(-A) taken for A, or negated twice",
        "A is negative: states fade",
    ),
    entry(
        "state.no_gate",
        &[Op::GatedDeltaNet],
        "the state does not decay",
        "a plain delta rule where the model has a gated one",
        "multiply the state by exp(gate) for each token",
    ),
    entry(
        "state.no_softplus",
        &[Op::Softplus],
        "the softplus is left out",
        "the step width of Mamba taken as it is",
        "log(1 + exp(x)) of the width and its bias",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use parity_graph::{fault, text};

    use super::*;
    use crate::faults::catalogue::fix;

    #[test]
    fn every_mistake_of_a_recorded_graph_is_in_the_catalogue_once() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folders =
            ["tests/data/graphs", "crates/parity-graph/tests/graphs"].map(|folder| root.join(folder));
        let (mut graphs, mut seen) = (0, BTreeSet::new());
        for entry in folders.into_iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "txt") {
                continue;
            }
            for graph in text::read(&std::fs::read_to_string(&path).unwrap()).unwrap() {
                graphs += 1;
                for fault in (0..graph.nodes).flat_map(|id| fault::at(&graph, id)) {
                    let op = &graph.get(fault.rewrite.node).op;
                    assert!(fix(fault.name).is_some(), "{} is not in the catalogue", fault.name);
                    if let Some(entry) = ENTRIES.iter().find(|entry| entry.name == fault.name) {
                        assert!(entry.ops.contains(op), "{} of {op}", fault.name);
                        seen.insert(fault.name);
                    }
                }
            }
        }
        assert!(graphs > 0);
        // A window and a limit of scores are mistakes of both kinds of graph, under one name.
        let names: BTreeSet<&str> = ENTRIES.iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), ENTRIES.len());
        // The shipped graphs have a place for most of them.
        assert!(2 * seen.len() > ENTRIES.len(), "{seen:?}");
    }
}
