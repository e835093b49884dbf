//! RMS_NORM, NORM, and the MUL and ADD by their weights.

use super::evidence::rounded;
use super::site::{edit, made};
use super::{Argument, Entry, Evidence, Made, PLAIN, Site, plain, spell, when};
use crate::graph::Id;
use crate::op::Op;
use crate::rewrite::{Change, Edit};
use crate::weights::{FFN_NORM, POST_ATTENTION_NORM};

const NORMS: &[Op] = &[Op::RmsNorm, Op::Norm];
const WEIGHTED: &[Op] = &[Op::Mul];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "norm.eps",
        summary: "another epsilon than the model's",
        place: "a constant in the code where the file has attention.layer_norm_rms_epsilon",
        fix: "read {arch}.attention.layer_norm_rms_epsilon from the file",
        parameter: Some("eps"),
        silent: Some(
            "where the mean square of the input is above about 1e6 times the difference of the epsilons",
        ),
        ops: NORMS,
        values: |_| Argument::numbers([1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-2, 1e-7, 0.0]),
        make: |site, argument| {
            let (eps, own) = (argument.number()? as f32, site.float("eps"));
            when(eps >= 0.0 && eps != own)?;
            let (given, own) = (spell(argument.number()?), shortest(own));
            made(site.with_float("eps", eps), format!("the norm's eps is {given}, the model says {own}"))
        },
        guess: Some(eps),
        ..PLAIN
    },
    plain(
        "norm.layernorm",
        &[Op::RmsNorm],
        [
            "LayerNorm for RMS norm: the mean is subtracted first",
            "a framework's layer_norm called where the model has RMS norm",
            "divide by the root of the mean square; subtract nothing",
        ],
        |site, _| made(other(site, Op::Norm), "LayerNorm for RMS norm: the row's mean is subtracted first"),
    ),
    plain(
        "norm.rms",
        &[Op::Norm],
        [
            "the mean is not subtracted",
            "an RMS norm where the model has LayerNorm",
            "subtract the mean before the variance is taken",
        ],
        |site, _| made(other(site, Op::RmsNorm), "the mean is not subtracted, as in an RMS norm"),
    ),
    plain(
        "norm.none",
        &[Op::RmsNorm, Op::Norm, Op::Mul],
        [
            "the norm is left out: its input is passed on",
            "a norm whose result is written to a buffer that nobody reads, or a module replaced by the identity",
            "feed what follows the normalised row",
        ],
        none,
    ),
    plain(
        "norm.no_weight",
        WEIGHTED,
        [
            "the norm's weight is left out",
            "a norm kernel that takes the weight as optional, or a weight that was not found by name",
            "multiply the normalised row by the weight",
        ],
        |site, _| {
            let (slot, weight) = weighted(site)?;
            made(Change::Bypass { slot: 1 - slot }, format!("{} is left out", site.name_of(weight)))
        },
    ),
    plain(
        "norm.weight_twice",
        WEIGHTED,
        [
            "the norm's weight is multiplied in twice",
            "the weight folded into the next matrix, or multiplied by the kernel and by its caller",
            "multiply by the weight once",
        ],
        |site, _| {
            let (slot, weight) = weighted(site)?;
            made(edit(slot, Edit::Square), format!("{} is multiplied in twice", site.name_of(weight)))
        },
    ),
    plain(
        "norm.unit_offset",
        WEIGHTED,
        [
            "1 + w for w, as in Gemma checkpoints",
            "a norm shared with Gemma; GGUF files of Gemma already contain 1 + w",
            "multiply by the weight as it is stored",
        ],
        |site, _| {
            let (slot, weight) = weighted(site)?;
            let name = site.name_of(weight);
            made(edit(slot, Edit::Add(1.0)), format!("1 + {name} is multiplied in for {name}"))
        },
    ),
    Entry {
        name: "norm.wrong_layer",
        summary: "the norm's weight of another layer is used",
        place: "a loop over layers that is off by one, or names matched by prefix (blk.1 and blk.10)",
        fix: "take the tensor of the node's own layer",
        parameter: Some("layer"),
        ops: WEIGHTED,
        values: |site| super::linear::other_layers(site, weighted(site)),
        make: |site, argument| super::linear::of_layer(site, weighted(site)?, argument),
        ..PLAIN
    },
    Entry {
        name: "norm.wrong_weight",
        summary: "the weight of another norm is used",
        place: "attn_norm and ffn_norm (input_layernorm, post_attention_layernorm) mixed up",
        fix: "attn_norm is input_layernorm, ffn_norm is post_attention_layernorm",
        parameter: Some("tensor"),
        ops: WEIGHTED,
        values: |site| {
            let of = |part| super::linear::same_shape(site, weighted(site), part);
            of("norm").chain(of("")).collect()
        },
        make: |site, argument| super::linear::of_tensor(site, weighted(site)?, argument),
        ..PLAIN
    },
    plain(
        "residual.parallel",
        NORMS,
        [
            "the feed-forward part reads the layer's input, not what attention added to",
            "a parallel layer (GPT-J, Falcon, Cohere) written where the model has a sequential one",
            "normalise the sum of attention's output and the layer's input",
        ],
        |site, _| {
            let around = around(site)?;
            let text = "the feed-forward part reads the layer's input, as if both parts were parallel";
            made(Change::Source { slot: 0, with: Some(around) }, text)
        },
    ),
    Entry {
        name: "norm.wrong_source",
        summary: "the norm reads another row of the residual stream than it should",
        place: "the attention branch not yet added, or a buffer that was overwritten",
        fix: "feed ffn_norm the sum of the layer's input and the attention branch",
        parameter: Some("checkpoint"),
        ops: NORMS,
        values: |site| super::residual::rows_before(site, 0).collect(),
        make: |site, argument| {
            let (own, other) = (site.origin(0)?, site.called(argument.text()?)?);
            when(other < site.id && other != own && site.graph.get(other).ne == site.src(0)?.ne)?;
            let text = format!("the norm reads {} in place of {}", site.name_of(other), site.name_of(own));
            made(Change::Source { slot: 0, with: Some(other) }, text)
        },
        ..PLAIN
    },
];

fn other(site: Site<'_>, op: Op) -> Change {
    Change::Op(op, vec![(0, site.tensor().params.0[0])])
}

/// An f32 as short as it is told from its neighbours by.
fn shortest(number: f32) -> String {
    let text = format!("{number:e}");
    text.parse().map_or(text, spell)
}

/// The weight of a norm's result.
fn weighted(site: Site<'_>) -> Option<(usize, Id)> {
    let (slot, weight) = site.weight().filter(|(slot, _)| *slot < 2)?;
    matches!(site.origin_op(1 - slot), Some(Op::RmsNorm | Op::Norm)).then_some((slot, weight))
}

/// The norm and its weight, where there is one, are left out.
fn none(site: Site<'_>, _: &Argument) -> Made {
    let text = |source: Id| format!("the norm is left out: {} is passed on", site.name_of(source));
    if *site.op() != Op::Mul {
        let has_weight = site.readers().any(|reader| weighted(reader).is_some());
        when(!has_weight)?;
        return made(Change::Bypass { slot: 0 }, text(site.origin(0)?));
    }
    let (slot, _) = weighted(site)?;
    let norm = site.other(site.origin(1 - slot)?);
    let source = site.graph.src(norm.id, 0)?;
    when(site.graph.get(source).ne == site.tensor().ne)?;
    made(Change::Pass(source), text(source))
}

/// What goes round the part of the layer before a feed-forward part.
fn around(site: Site<'_>) -> Option<Id> {
    let graph = site.graph;
    let of_feed_forward = |id: &Id| {
        let reader = site.other(*id);
        let weight = reader.weight().map(|(_, weight)| graph.get(weight).name.as_str());
        reader.origin(0) == Some(site.id)
            && weight.is_some_and(|name| name.contains(FFN_NORM) || name.contains(POST_ATTENTION_NORM))
    };
    // The weight of a norm is multiplied in right behind it.
    when((site.id + 1..graph.nodes).take(2).any(|id| of_feed_forward(&id)))?;
    let sum = site.other(site.origin(0).filter(|&id| graph.get(id).op == Op::Add)?);
    let is_norm = |id: Id| matches!(graph.get(id).op, Op::RmsNorm | Op::Norm);
    // What goes round the layer's first part was normalised for it.
    let around = [0, 1].into_iter().filter_map(|slot| sum.origin(slot)).find(|&id| {
        graph.is_arithmetic(id) && (id..sum.id).any(|norm| is_norm(norm) && graph.src(norm, 0) == Some(id))
    });
    around.filter(|&id| graph.get(id).ne == sum.tensor().ne)
}

/// Epsilons that frameworks have as defaults.
const KNOWN_EPS: [f64; 8] = [1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-4, 1e-2, 0.0];
/// How far from a fitted number a rounder one may lie.
const NEAR: f64 = 2e-6;

/// y = s·x with s = 1/sqrt(mean(x²) + eps): each row gives an eps, those of the smallest mean the sharpest.
fn eps(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let (Some(x), width) = ((evidence.source)(0), site.tensor().ne[0]) else { return vec![] };
    let centred = *site.op() == Op::Norm;
    let rows = x.chunks_exact(width).zip(evidence.recorded.chunks_exact(width)).enumerate();
    let fits = rows.filter(|(row, _)| (evidence.looked_at)(row * width)).filter_map(|(_, (x, y))| {
        let mean = if centred { x.iter().sum::<f64>() / width as f64 } else { 0.0 };
        let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let along: f64 = x.iter().zip(y).map(|(x, y)| (x - mean) * y).sum();
        let scale = along / (square * width as f64);
        (scale > 0.0 && scale.is_finite()).then(|| (square, 1.0 / (scale * scale) - square))
    });
    let Some((square, fitted)) = fits.min_by(|a, b| a.0.total_cmp(&b.0)) else { return vec![] };
    let uncertainty = square * NEAR + fitted.abs() * NEAR;
    let known = KNOWN_EPS.iter().filter(|eps| (*eps - fitted).abs() <= uncertainty);
    let mut out = Argument::numbers(known.copied());
    if fitted > 0.0 {
        out.extend(Argument::numbers((1..=4).map(|digits| rounded(fitted, digits))));
        out.push(Argument::Number(fitted));
    }
    out
}
