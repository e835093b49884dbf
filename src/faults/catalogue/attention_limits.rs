//! Attention as other families have it: a sliding window, scores that are kept small.

use super::attention::{HOME, attention, mask};
use super::{Argument, Fault, PLAIN, diagnose, integer, number};
use crate::faults::spell;
use crate::model::graph::{Anchor, Edge, Mask, ScoreLimit};

/// The last `width` positions up to a row's own.
pub fn window(width: u32) -> Mask {
    Mask { first: Edge::new(Anchor::Row, 1 - i64::from(width)), ..Mask::CAUSAL }
}

/// Faults of `attn_scores`, `attn_probs` and `attn_ctx` besides those of every attention.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "attn.window",
        summary: "rows see a sliding window where the model sees every position before them",
        place: "sliding_window of a configuration that use_sliding_window switches off, or a ring buffer for a cache",
        fix: "apply a window only in layers that have one ({arch}.attention.sliding_window)",
        parameter: integer("positions"),
        home: HOME,
        silent: Some("in rows that the window holds all of"),
        change: |_, node, argument| {
            let width = u32::try_from(argument.integer()?).ok().filter(|width| *width > 0)?;
            mask(node, window(width))
        },
        default: |_, _| Some(Argument::Number(3.0)),
        guess: Some(diagnose::windows),
        sentence: |_, _, argument| {
            format!(
                "rows see the last {argument} positions only: a sliding window that the model does not have"
            )
        },
    },
    Fault {
        name: "attn.softcap",
        summary: "scores pass cap·tanh(x/cap) where the model has no soft cap",
        place: "attn_logit_softcapping of Gemma 2 applied to every model",
        fix: "cap scores only where the file has {arch}.attn_logit_softcapping",
        parameter: number("cap"),
        home: HOME,
        change: |_, node, argument| {
            let cap = argument.number().filter(|cap| *cap > 0.0)?;
            attention(node)?.limit = ScoreLimit::SoftCap(cap);
            Some(())
        },
        default: |_, _| Some(Argument::Number(5.0)),
        guess: Some(diagnose::soft_cap),
        sentence: |_, _, argument| {
            let cap = argument.number().map_or(String::new(), spell);
            format!("the scores are soft-capped at {cap}, the model has no soft cap")
        },
        ..PLAIN
    },
    Fault {
        name: "attn.clamp",
        summary: "scores beyond a limit are cut off at it",
        place: "clamp against overflow in f16, or a clip of the logits applied to the scores",
        fix: "leave the scores as they are; subtract the largest before the exponential",
        parameter: number("limit"),
        home: HOME,
        silent: Some("where no score is beyond the limit"),
        change: |_, node, argument| {
            let limit = argument.number().filter(|limit| *limit > 0.0)?;
            attention(node)?.limit = ScoreLimit::Clamp(limit);
            Some(())
        },
        default: |_, _| Some(Argument::Number(1.0)),
        guess: Some(diagnose::clamp_limit),
        sentence: |_, _, argument| {
            let limit = argument.number().map_or(String::new(), spell);
            format!("scores beyond ±{limit} are cut off there")
        },
    },
];
