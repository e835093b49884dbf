//! FLASH_ATTN_EXT and SOFT_MAX of scores: scale, mask, window and its size, soft cap, sinks, ALiBi.

use super::{Fault, Site};
use crate::graph::{Id, Tensor};
use crate::label::leaf_names;
use crate::op::Op;
use crate::rewrite::{Change, Edit};

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    let (mask, sinks, width) = match site.op() {
        Op::FlashAttn => (3, 4, site.src(0).map_or(1, |q| q.ne[0])),
        // A softmax without a mask is a router's.
        Op::SoftMax if site.src(1).is_some() || site.src(2).is_some() => (1, 2, score_width(site)),
        Op::Tanh => return softcap(site, out),
        _ => return,
    };
    let scale = site.float("scale");
    if scale != 1.0 {
        out.push(site.fault("attn.no_scale", "the scores are not scaled", site.with_float("scale", 1.0)));
    }
    let usual = 1.0 / (width as f32).sqrt();
    let heads = site.src(0).map_or(1, |src| src.ne[2]);
    let others = [
        (usual, "1/sqrt(head width)"),
        (1.0 / ((heads * width) as f32).sqrt(), "1/sqrt(width of all heads)"),
        (1.0 / width as f32, "1/(head width)"),
        (scale * 2f32.sqrt(), "sqrt(2) times too large"),
    ];
    for (other, text) in
        others.into_iter().filter(|(other, _)| (other / scale - 1.0).abs() > 1e-6 && *other != 1.0)
    {
        let text = format!("the scores are scaled by {other} ({text}), the graph says {scale}");
        out.push(site.fault("attn.scale", text, site.with_float("scale", other)));
    }
    if let Some(own) = site.graph.src(site.id, mask) {
        let none = Change::Source { slot: mask, with: None };
        out.push(site.fault("attn.no_mask", "the mask is left out", none));
        let shifted = site.edit(mask, Edit::Rotate(1));
        out.push(site.fault("attn.mask_shift", "the mask is one position off", shifted));
        for other in other_masks(site, own) {
            let text = format!(
                "{}: the sliding window is lost, or applied where there is none",
                exchange(site, other, own)
            );
            out.push(site.fault("attn.window", text, Change::Source { slot: mask, with: Some(other) }));
        }
        // Distances stand in a mask with ALiBi.
        if site.float("max_bias") == 0.0 {
            let windows = [(true, "one position too wide"), (false, "one position too narrow")];
            for (wider, text) in windows {
                let text = format!("the sliding window is {text}");
                out.push(site.fault("attn.window_size", text, site.edit(mask, Edit::Window { wider })));
            }
        }
    }
    if site.src(sinks).is_some() {
        let none = Change::Source { slot: sinks, with: None };
        out.push(site.fault("attn.sinks", "the attention sinks are left out", none));
    }
    if site.float("max_bias") > 0.0 {
        out.push(site.fault(
            "attn.alibi",
            "the position bias (ALiBi) is left out",
            site.with_float("max_bias", 0.0),
        ));
    }
    if *site.op() == Op::FlashAttn && site.float("softcap") != 0.0 {
        out.push(site.fault(
            "attn.softcap",
            "the soft cap of the scores is left out",
            site.with_float("softcap", 0.0),
        ));
    }
}

/// The head width of the scores that a softmax reads.
fn score_width(site: Site<'_>) -> usize {
    let scores = site.origin(0).map(|id| Site { graph: site.graph, id });
    scores.and_then(|scores| scores.src(1)).map_or(1, |query| query.ne[0])
}

/// One mask for another, in words; several may have one name.
fn exchange(site: Site<'_>, other: Id, own: Id) -> String {
    let names = [other, own].map(|id| site.graph.get(id).name.as_str());
    if names[0] != names[1] {
        return format!("the mask {} is used for {}", names[0], names[1]);
    }
    let leaves = leaf_names(site.graph);
    match [other, own].map(|id| leaves[id].as_deref()) {
        [Some(other), Some(own)] => format!("the mask {other} is used for {own}"),
        _ => format!("another {} is used for the node's own", names[0]),
    }
}

/// Other masks of the same shape in the same graph.
fn other_masks(site: Site<'_>, own: Id) -> impl Iterator<Item = Id> {
    let (graph, mask) = (site.graph, site.graph.get(own));
    let same = move |other: &Tensor| other.ne == mask.ne && other.dtype == mask.dtype && other.nb == mask.nb;
    (0..graph.tensors.len())
        .filter(move |&id| id != own && same(graph.get(id)))
        // What a node reads must have been computed before it.
        .filter(move |&id| (graph.is_leaf(id) || id < site.id) && graph.get(id).name.contains("mask"))
}

/// cap·tanh(x/cap): the tanh is left out.
fn softcap(site: Site<'_>, out: &mut Vec<Fault>) {
    if site.origin_op(0) == Some(&Op::Scale) {
        out.push(site.fault("attn.softcap", "the soft cap is left out", Change::Bypass { slot: 0 }));
    }
}
