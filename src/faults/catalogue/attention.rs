//! Mistakes in attention.
//!
//! An attention is three nodes (scores, softmax, context) or one that merges them; a fault is made in all
//! of them alike, so that they can still be merged.

use super::{Argument, Fault, Home, PLAIN, Site, diagnose, input, integer, named, number, output, when};
use crate::checkpoint::Kind;
use crate::faults::spell;
use crate::model::edit::Change;
use crate::model::graph::{Anchor, Attention, BySteps, Edge, Mask, Node, Op};
use crate::report::words::count;

pub(super) const HOME: Home = Home::All(&[Kind::AttnScores, Kind::AttnProbs, Kind::AttnCtx]);

/// Factors nearer to one another than this are the same.
const SAME: f64 = 1e-5;

/// Why a mistake in reading the cache may not show.
const IN_DECODE: Option<&str> = Some("in the first step: it shows in decode");

pub(super) fn attention(node: &mut Node) -> Option<&mut Attention> {
    match &mut node.op {
        Op::Scores(op) | Op::Softmax(op) | Op::Context(op) | Op::Attention(op) => Some(op),
        _ => None,
    }
}

fn scale_of(node: &Node) -> f64 {
    match &node.op {
        Op::Scores(op) | Op::Softmax(op) | Op::Context(op) | Op::Attention(op) => op.scale,
        _ => f64::NAN,
    }
}

pub(super) fn mask(node: &mut Node, mask: Mask) -> Option<()> {
    attention(node)?.mask = BySteps::all(mask);
    Some(())
}

/// Changes every cached input.
pub(super) fn cached(node: &mut Node, change: &Change) -> Option<()> {
    attention(node)?;
    let caches: Vec<usize> = (0..node.inputs.len()).filter(|index| node.op.reads_cache(*index)).collect();
    caches.into_iter().try_for_each(|index| input(node, index, change.clone()))
}

/// Changes the context, the last of the nodes; the others stay as they are.
fn context(node: &mut Node, change: Change) -> Option<()> {
    attention(node)?;
    match node.op {
        Op::Context(_) | Op::Attention(_) => output(node, change),
        _ => Some(()),
    }
}

/// Columns of the context when head h is taken from head `order[h]`.
pub fn head_columns(order: &[u32], width: usize) -> Vec<u32> {
    order.iter().flat_map(|&head| (0..width as u32).map(move |e| head * width as u32 + e)).collect()
}

/// Heads counted with the key/value head fastest, (H/K, K), for (K, H/K); reversed where that is the same.
fn default_order(site: &Site<'_>) -> Option<Vec<u32>> {
    let dims = site.model.config.dims;
    let (heads, kv) = (dims.heads as u32, dims.kv_heads as u32);
    let group = heads / kv;
    when(heads > 1)?;
    Some(match kv > 1 && group > 1 {
        true => (0..heads).map(|h| h % kv * group + h / kv).collect(),
        false => (0..heads).rev().collect(),
    })
}

/// Every key/value head replaced by the first.
fn first_kv_head(site: &Site<'_>) -> Option<Vec<u32>> {
    let dims = site.model.config.dims;
    when(dims.kv_heads > 1)?;
    Some(head_columns(&vec![0; dims.kv_heads], dims.head_width))
}

/// Columns of a head fastest, (E, H), for (H, E).
fn width_first(site: &Site<'_>) -> Vec<u32> {
    let (heads, width) = (site.model.config.dims.heads as u32, site.model.config.dims.head_width as u32);
    (0..heads * width).map(|c| c % heads * width + c / heads).collect()
}

/// How a report writes an order of heads.
fn spelt_order(order: &[u32], width: usize) -> String {
    let heads: Vec<String> =
        order.iter().step_by(width.max(1)).map(|c| (*c as usize / width.max(1)).to_string()).collect();
    heads.join(", ")
}

/// Which query heads read which keys and values, of those that read others than the model says: the key/value head of
/// each query head's keys, then of each one's values.
fn heads_read(site: &Site<'_>, read: &[u32]) -> String {
    let dims = site.model.config.dims;
    let group = dims.heads / dims.kv_heads.max(1);
    let own = |head: usize| (head / group.max(1)) as u32;
    let (keys, values) = (read.get(..dims.heads), read.get(dims.heads..));
    let other = |read: Option<&[u32]>, head| {
        read.and_then(|read| read.get(head)).copied().filter(|other| *other != own(head))
    };
    let wrong = (0..dims.heads).filter_map(|head| {
        let what = match (other(keys, head), other(values, head)) {
            (Some(keys), Some(values)) if keys == values => format!("KV head {keys}"),
            (Some(keys), Some(values)) => format!("keys of KV head {keys} and values of KV head {values}"),
            (Some(keys), None) => format!("the keys of KV head {keys}"),
            (None, Some(values)) => format!("the values of KV head {values}"),
            (None, None) => return None,
        };
        Some(format!("query head {head} reads {what}, the model says {}", own(head)))
    });
    let wrong: Vec<String> = wrong.collect();
    match wrong.len().checked_sub(HEADS_SPELT) {
        Some(more @ 1..) => format!("{}; and {more} more heads", wrong[..HEADS_SPELT].join("; ")),
        _ => wrong.join("; "),
    }
}

/// Heads that a sentence spells out.
const HEADS_SPELT: usize = 4;

/// Faults of `attn_scores`, `attn_probs` and `attn_ctx`.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "attn.no_scale",
        summary: "the scores are not scaled",
        place: "a softmax kernel that expects scaled queries",
        fix: "multiply the scores by 1/sqrt(E)",
        home: HOME,
        change: |_, node, _| {
            attention(node)?.scale = 1.0;
            Some(())
        },
        sentence: |_, node, _| format!("the scores are not scaled by 1/sqrt(E) = {}", spell(scale_of(node))),
        ..PLAIN
    },
    Fault {
        name: "attn.scale",
        summary: "another factor on the scores than 1/sqrt(E)",
        place: "1/E for 1/sqrt(E), the model's width for the head's, scaling in both query and scores",
        fix: "multiply the scores by 1/sqrt(E), E the width of one head",
        parameter: number("scale"),
        home: HOME,
        change: |_, node, argument| {
            let scale = argument.number()?;
            let op = attention(node)?;
            // No factor at all has a name of its own.
            when((scale - 1.0).abs() > SAME && (scale / op.scale - 1.0).abs() > SAME)?;
            op.scale = scale;
            Some(())
        },
        default: |site, _| Some(Argument::Number(1.0 / site.model.config.dims.head_width as f64)),
        guess: Some(diagnose::attention_scale),
        sentence: |site, node, argument| {
            let dims = site.model.config.dims;
            let scale = argument.number().unwrap_or(f64::NAN);
            let known = [
                (1.0 / dims.head_width as f64, " = 1/E"),
                (1.0 / (dims.model as f64).sqrt(), " = 1/sqrt(D)"),
                (1.0 / ((dims.kv_heads * dims.head_width) as f64).sqrt(), " = 1/sqrt(K·E)"),
                (1.0 / ((dims.heads * dims.head_width) as f64).sqrt(), " = 1/sqrt(H·E)"),
            ];
            let why = known.iter().find(|(value, _)| (scale / value - 1.0).abs() < 1e-6).map_or("", |k| k.1);
            format!(
                "the scores are scaled by {}{why}, not by 1/sqrt(E) = {}",
                spell(scale),
                spell(scale_of(node))
            )
        },
        ..PLAIN
    },
    Fault {
        name: "attn.kv_head",
        summary: "query head h reads key/value head h % K for h / (H/K)",
        place: "grouped-query attention written with a modulo, or with repeat for repeat_interleave",
        fix: "query head h reads key/value head h / (H/K)",
        home: HOME,
        change: |_, node, _| {
            let op = attention(node)?;
            when(op.kv_heads > 1 && op.kv_heads < op.heads)?;
            op.group = 1;
            Some(())
        },
        sentence: |site, _, _| {
            let dims = site.model.config.dims;
            let (kv, group) = (dims.kv_heads, dims.heads / dims.kv_heads.max(1));
            format!("query head h reads KV head h % {kv}, the model says h / {group}")
        },
        ..PLAIN
    },
    Fault {
        name: "attn.kv_first",
        summary: "all query heads read the first key/value head",
        place: "grouped-query attention run by code for multi-query attention",
        fix: "query head h reads key/value head h / (H/K)",
        home: HOME,
        change: |site, node, _| cached(node, &Change::Columns(first_kv_head(site)?)),
        sentence: |_, _, _| "all query heads read KV head 0".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "attn.wrong_kv_head",
        summary: "some query heads read the keys or values of another key/value head",
        place: "an index of a key/value head that is computed apart for some heads: a tail, a block of heads, one of two caches",
        fix: "query head h reads keys and values of key/value head h / (H/K)",
        home: HOME,
        change: |site, node, argument| {
            let dims = site.model.config.dims;
            let op = attention(node)?;
            when(dims.kv_heads > 1)?;
            let Argument::Order(read) = argument else {
                let heads: Vec<u32> = (0..dims.kv_heads as u32).map(|head| head.max(1)).collect();
                return cached(node, &Change::Columns(head_columns(&heads, dims.head_width)));
            };
            let heads = op.heads;
            when(read.len() == 2 * heads)?;
            (op.kv_heads, op.group) = (heads, 1);
            let [keys, values] = [&read[..heads], &read[heads..]]
                .map(|read| Change::Gathered(head_columns(read, dims.head_width)));
            match node.op {
                Op::Scores(_) => input(node, 1, keys),
                Op::Context(_) => input(node, 1, values),
                Op::Attention(_) => input(node, 1, keys).and_then(|()| input(node, 2, values)),
                _ => Some(()),
            }
        },
        guess: Some(diagnose::kv_reads),
        sentence: |site, _, argument| match argument {
            Argument::Order(read) => heads_read(site, read),
            _ => "query heads of KV head 0 read KV head 1".to_owned(),
        },
        ..PLAIN
    },
    Fault {
        name: "attn.no_mask",
        summary: "rows see the positions after them",
        place: "a prefill without the causal mask",
        fix: "the row at position p sees positions 0 to p",
        home: HOME,
        silent: Some("in steps of one row: it shows in a prefill"),
        change: |_, node, _| mask(node, Mask { behind: Edge::new(Anchor::End, 0), ..Mask::CAUSAL }),
        sentence: |_, _, _| "there is no causal mask: rows see the positions after them".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "attn.mask_shift",
        summary: "the mask is off by one or more positions",
        place: "< for <= in the mask, or the number of cached tokens off by one",
        fix: "the row at position p sees positions 0 to p",
        parameter: integer("positions"),
        home: HOME,
        silent: Some("for shifts above 0, in steps of one row: it shows in a prefill"),
        change: |_, node, argument| {
            let shift = argument.integer().filter(|shift| *shift != 0)?;
            mask(node, Mask { behind: Edge::new(Anchor::Row, shift.checked_add(1)?), ..Mask::CAUSAL })
        },
        default: |_, _| Some(Argument::Number(-1.0)),
        guess: Some(diagnose::mask_shifts),
        sentence: |_, _, argument| match argument.integer().unwrap_or(0) {
            shift @ ..=-1 => format!("rows do not see the last {} positions up to their own", -shift),
            shift => format!("rows see {} after their own", count(shift.unsigned_abs() as usize, "position")),
        },
    },
    Fault {
        name: "attn.self_only",
        summary: "the cache is not read: rows see their own step only",
        place: "decode that attends over the new keys and not over the cache",
        fix: "attend over all cached positions and the new ones",
        home: HOME,
        silent: IN_DECODE,
        change: |_, node, _| mask(node, Mask { first: Edge::new(Anchor::Step, 0), ..Mask::CAUSAL }),
        sentence: |_, _, _| {
            "the cache is not read: after the first step, rows see their own step only".to_owned()
        },
        ..PLAIN
    },
    Fault {
        name: "attn.stale_cache",
        summary: "the cache is read before the step's keys and values are written",
        place: "a cache update that runs after attention, on another stream, or into a copy",
        fix: "write the step's keys and values before attention reads the cache",
        home: HOME,
        silent: IN_DECODE,
        parameter: named("slots"),
        change: |_, node, argument| {
            let Argument::Tensor(slots) = argument else { return None };
            match slots.as_str() {
                "zero" => cached(node, &Change::UnwrittenStep { held: false }),
                "held" => cached(node, &Change::UnwrittenStep { held: true }),
                "unread" => {
                    let before = Mask { behind: Edge::new(Anchor::Step, 0), ..Mask::CAUSAL };
                    attention(node)?.mask.later = before;
                    Some(())
                }
                _ => None,
            }
        },
        default: |_, node| {
            let reads_cache = (0..node.inputs.len()).any(|index| node.op.reads_cache(index));
            reads_cache.then(|| Argument::Tensor("zero".to_owned()))
        },
        guess: Some(diagnose::slots),
        sentence: |_, _, argument| {
            let slots = match argument {
                Argument::Tensor(slots) if slots == "held" => "their slots hold the row before them",
                Argument::Tensor(slots) if slots == "unread" => "rows do not see their own step",
                _ => "their slots hold zeros",
            };
            format!(
                "after the first step, the cache is read before the step's keys and values are written: {slots}"
            )
        },
    },
    Fault {
        name: "attn.head_order",
        summary: "the heads of the context are concatenated in another order",
        place: "grouped heads counted (H/K, K) for (K, H/K)",
        fix: "head h takes columns h·E to (h+1)·E of the context",
        home: HOME,
        change: |site, node, argument| match argument {
            Argument::Order(columns) => context(node, Change::Columns(columns.clone())),
            _ => {
                let width = site.model.config.dims.head_width;
                context(node, Change::Columns(head_columns(&default_order(site)?, width)))
            }
        },
        guess: Some(diagnose::head_order),
        sentence: |site, _, argument| {
            let width = site.model.config.dims.head_width;
            let order = match argument {
                Argument::Order(columns) => spelt_order(columns, width),
                _ => default_order(site).map_or(String::new(), |order| spelt_order(&order, 1)),
            };
            format!("the heads are concatenated in the order {order}")
        },
        ..PLAIN
    },
    Fault {
        name: "attn.width_first",
        summary: "the context is laid out (E, H) for (H, E)",
        place: "a reshape where a transposition is needed",
        fix: "head h takes columns h·E to (h+1)·E of the context",
        home: HOME,
        change: |site, node, _| {
            when(site.model.config.dims.heads > 1)?;
            context(node, Change::Columns(width_first(site)))
        },
        sentence: |_, _, _| "the context is laid out (E, H) for (H, E)".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "attn.heads_first",
        summary: "the context (H, T, E) is read as (T, H, E)",
        place: "transpose(1, 2) left out before the reshape to (T, H·E)",
        fix: "transpose (H, T, E) to (T, H, E) before concatenating the heads",
        home: HOME,
        silent: Some("in steps of one row: it shows in a prefill"),
        change: |site, node, _| {
            let heads = site.model.config.dims.heads;
            when(heads > 1)?;
            context(node, Change::HeadsFirst { heads })
        },
        sentence: |_, _, _| {
            "the context (H, T, E) is read as (T, H, E): a transposition is left out".to_owned()
        },
        ..PLAIN
    },
    Fault {
        name: "attn.no_softmax",
        summary: "the scores are used without a softmax",
        place: "a softmax that was applied to a copy",
        fix: "apply a softmax to the scaled, masked scores",
        home: HOME,
        change: |_, node, _| {
            attention(node)?.softmax = false;
            Some(())
        },
        sentence: |_, _, _| "the scores are used without a softmax".to_owned(),
        ..PLAIN
    },
];
