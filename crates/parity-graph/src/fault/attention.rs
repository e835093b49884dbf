//! FLASH_ATTN_EXT and SOFT_MAX of scores: scale, soft cap, limits, sinks, ALiBi.

use super::evidence::shorter;
use super::site::{edit, made};
use super::{Argument, Entry, Made, PLAIN, Searched, Site, plain, spell, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit, Scores};

pub(super) const ATTENTION: &[Op] = &[Op::FlashAttn, Op::SoftMax];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "attn.no_scale",
        ATTENTION,
        [
            "the scores are not scaled",
            "a softmax kernel that expects scaled queries",
            "multiply the scores by 1/sqrt(E)",
        ],
        |site, _| {
            of(site)?;
            let own = site.float("scale");
            when(own != 1.0)?;
            let text = format!("the scores are not scaled by {}", spell(f64::from(own)));
            made(site.with_float("scale", 1.0), text)
        },
    ),
    Entry {
        name: "attn.scale",
        summary: "another factor on the scores than 1/sqrt(E)",
        place: "1/E for 1/sqrt(E), the model's width for the head's, scaling in both query and scores",
        fix: "multiply the scores by 1/sqrt(E), E the width of one head",
        parameter: Some("scale"),
        ops: ATTENTION,
        values: |site| match of(site) {
            Some(Attention { width, heads, .. }) => {
                let (width, all) = (width as f64, (heads * width) as f64);
                let own = f64::from(site.float("scale"));
                Argument::numbers([1.0 / width, 1.0 / width.sqrt(), 1.0 / all.sqrt(), own * 2f64.sqrt()])
            }
            None => vec![],
        },
        make: scale,
        searched: Some(Searched {
            around: |site| of(site).map(|_| f64::from(site.float("scale"))),
            told: scales,
        }),
        ..PLAIN
    },
    plain(
        "attn.no_softmax",
        ATTENTION,
        [
            "the scores are used without a softmax",
            "a softmax that was applied to a copy",
            "apply a softmax to the scaled, masked scores",
        ],
        |site, _| {
            of(site)?;
            when(site.float("max_bias") == 0.0 && site.src(of(site)?.mask + 1).is_none())?;
            made(Change::Scores(Scores::NoSoftmax), "the scores are used without a softmax")
        },
    ),
    Entry {
        name: "attn.softcap",
        summary: "a soft cap, cap·tanh(x/cap), is left out, or applied where the model has none",
        place: "attn_logit_softcapping of Gemma 2 forgotten, or applied to every model",
        fix: "cap the scores before the mask is added, where the file has {arch}.attn_logit_softcapping",
        parameter: Some("cap"),
        ops: &[Op::FlashAttn, Op::SoftMax, Op::Tanh],
        values: |site| match has_cap(site) {
            true => vec![Argument::name("none")],
            false => Argument::numbers([5.0]),
        },
        make: soft_cap,
        searched: Some(Searched {
            around: |site| of(site).filter(|_| !has_cap(site)).map(|_| LIMIT),
            told: shorter,
        }),
        ..PLAIN
    },
    Entry {
        name: "attn.clamp",
        summary: "scores beyond a limit are cut off at it",
        place: "clamp against overflow in f16, or a clip of the logits applied to the scores",
        fix: "leave the scores as they are; subtract the largest before the exponential",
        parameter: Some("limit"),
        silent: Some("where no score is beyond the limit"),
        ops: ATTENTION,
        values: |_| Argument::numbers([1.0]),
        make: clamp,
        searched: Some(Searched { around: |site| of(site).map(|_| LIMIT), told: shorter }),
        ..PLAIN
    },
    plain(
        "attn.sinks",
        ATTENTION,
        [
            "the attention sinks are left out",
            "attn_sinks.weight of gpt-oss that nothing reads",
            "add exp(sink - max) to the sum of each head's softmax",
        ],
        |site, _| {
            let slot = of(site)?.mask + 1;
            site.src(slot)?;
            made(Change::Source { slot, with: None }, "the attention sinks are left out")
        },
    ),
    plain(
        "attn.alibi",
        ATTENTION,
        [
            "the position bias (ALiBi) is left out",
            "models without RoPE run as if positions were told elsewhere",
            "add slope·distance to the scores, one slope for each head",
        ],
        |site, _| {
            of(site)?;
            when(site.float("max_bias") > 0.0)?;
            made(site.with_float("max_bias", 0.0), "the position bias (ALiBi) is left out")
        },
    ),
];

/// What an attention is.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    /// The slot of its mask; sinks come behind it.
    pub mask: usize,
    /// E
    pub width: usize,
    /// H
    pub heads: usize,
}

/// An attention in one node, or the softmax of one.
pub(super) fn of(site: Site<'_>) -> Option<Attention> {
    let heads = site.src(0)?.ne[2];
    match site.op() {
        Op::FlashAttn => Some(Attention { mask: 3, width: site.src(0)?.ne[0], heads }),
        // A softmax without a mask is a router's.
        Op::SoftMax if site.src(1).is_some() || site.src(2).is_some() => {
            let scores = site.other(site.origin(0)?);
            Some(Attention { mask: 1, width: scores.src(1).map_or(1, |query| query.ne[0]), heads })
        }
        _ => None,
    }
}

fn scale(site: Site<'_>, argument: &Argument) -> Made {
    let Attention { width, heads, .. } = of(site)?;
    let (scale, own) = (argument.number()?, f64::from(site.float("scale")));
    // No factor at all has a name of its own.
    when((scale - 1.0).abs() > 1e-5 && (scale / own - 1.0).abs() > 1e-5)?;
    let (width, all) = (width as f64, (heads * width) as f64);
    let known =
        [(1.0 / width, " = 1/E"), (1.0 / width.sqrt(), " = 1/sqrt(E)"), (1.0 / all.sqrt(), " = 1/sqrt(H·E)")];
    let named =
        |value: f64| known.iter().find(|(known, _)| (value / known - 1.0).abs() < 1e-6).map_or("", |k| k.1);
    let text = format!(
        "the scores are scaled by {}{}, not by {}{}",
        spell(scale),
        named(scale),
        spell(own),
        named(own)
    );
    made(site.with_float("scale", scale as f32), text)
}

/// What is told of the factor on the scores that was found.
fn scales(found: f64) -> Vec<Argument> {
    // A minimum is flat: it is known to the square root of what the distance is known to.
    let mut out: Vec<f64> = Vec::new();
    for square in [1.0 / (found * found), 1.0 / found] {
        if (square / square.round() - 1.0).abs() < 1e-3 {
            let n = square.round();
            out.push(if square == 1.0 / found { 1.0 / n } else { 1.0 / n.sqrt() });
        }
    }
    [Argument::numbers(out), shorter(found)].concat()
}

/// Whether scores, or what a tanh is of, are capped.
fn has_cap(site: Site<'_>) -> bool {
    match site.op() {
        Op::FlashAttn => site.float("softcap") != 0.0,
        Op::Tanh => site.origin_op(0) == Some(&Op::Scale),
        // Between the scores and their softmax.
        _ => matches!(site.origin_op(0), Some(Op::Scale | Op::Tanh)),
    }
}

fn soft_cap(site: Site<'_>, argument: &Argument) -> Made {
    if argument.text() == Some("none") {
        when(has_cap(site))?;
        return match site.op() {
            Op::FlashAttn => made(site.with_float("softcap", 0.0), "the soft cap of the scores is left out"),
            Op::Tanh => made(Change::Bypass { slot: 0 }, "the soft cap is left out"),
            _ => None,
        };
    }
    let cap = argument.number().filter(|cap| *cap > 0.0)?;
    of(site)?;
    when(!has_cap(site))?;
    let text = format!("the scores are soft-capped at {}, the model has no soft cap", spell(cap));
    match site.op() {
        Op::FlashAttn => made(site.with_float("softcap", cap as f32), text),
        // Scores are scaled behind it.
        _ => made(edit(0, Edit::SoftCap(cap as f32 / site.float("scale"))), text),
    }
}

fn clamp(site: Site<'_>, argument: &Argument) -> Made {
    let limit = argument.number().filter(|limit| *limit > 0.0)?;
    of(site)?;
    when(site.float("max_bias") == 0.0 && site.src(of(site)?.mask + 1).is_none() && !has_cap(site))?;
    let text = format!("scores beyond ±{} are cut off there", spell(limit));
    match site.op() {
        Op::FlashAttn => made(Change::Scores(Scores::Clamp(limit as f32)), text),
        _ => made(edit(0, Edit::Clamp(limit as f32 / site.float("scale"))), text),
    }
}

/// A limit of scores to begin with: those of models are within some octaves of it.
const LIMIT: f64 = 16.0;
