//! ROPE: base, pairs, positions, direction, scaling, sections.

use super::{Fault, Site};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// Bases that models use.
const BASES: [f32; 6] = [10_000.0, 1_000_000.0, 500_000.0, 5_000_000.0, 100_000.0, 160_000.0];
/// Pairs (2i, 2i + 1), `GGML_ROPE_TYPE_NORMAL`.
const NORMAL: i32 = 0;
/// Pairs (i, i + n/2), `GGML_ROPE_TYPE_NEOX`.
const NEOX: i32 = 2;
/// Several position planes, `GGML_ROPE_TYPE_MROPE`.
const SECTIONS: i32 = 8;
/// Sections counted from 0, `GGML_ROPE_TYPE_VISION`.
const VISION: i32 = 24;

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    if *site.op() != Op::Rope {
        return;
    }
    let (base, mode, dims) = (site.float("freq_base"), site.int("mode"), site.int("n_dims"));
    for other in BASES.into_iter().filter(|other| *other != base) {
        let text = format!("RoPE base is {other}, the graph says {base}");
        out.push(site.fault("rope.base", text, site.with_float("freq_base", other)));
    }
    match mode {
        NORMAL => out.push(site.fault(
            "rope.interleaved",
            "halves are rotated where the model has pairs",
            site.with_int("mode", NEOX),
        )),
        NEOX => out.push(site.fault(
            "rope.interleaved",
            "pairs are rotated where the model has halves",
            site.with_int("mode", NORMAL),
        )),
        // With one position for all sections pairs are halves too.
        _ if mode & SECTIONS != 0 && mode != VISION => out.push(site.fault(
            "rope.interleaved",
            "pairs are rotated where the model has halves",
            site.with_int("mode", NORMAL),
        )),
        _ => {}
    }
    // Position 0 turns nothing: only where lengths change too is that another mistake than leaving RoPE out.
    if keeps_lengths(site) {
        let text = "RoPE is left out, or every row is rotated by position 0";
        out.push(site.fault("rope.none", text, Change::Bypass { slot: 0 }));
    } else {
        out.push(site.fault("rope.none", "RoPE is left out", Change::Bypass { slot: 0 }));
        let text = "every row is rotated by position 0";
        out.push(site.fault("rope.position_zero", text, site.edit(1, Edit::Set(0.0))));
    }
    let back = site.with_float("freq_scale", -site.float("freq_scale"));
    out.push(site.fault("rope.sign", "RoPE rotates backwards", back));
    positions(site, out);
    if dims % 4 == 0 && mode < SECTIONS {
        let text = format!("{} of {dims} columns are rotated", dims / 2);
        out.push(site.fault("rope.partial", text, site.with_int("n_dims", dims / 2)));
    }
    let width = site.src(0).map_or(0, |x| i32::try_from(x.ne[0]).unwrap_or(0));
    if width > dims && mode < SECTIONS && site.int("offset") == 0 {
        let text = format!("all {width} columns are rotated, the graph says {dims}");
        out.push(site.fault("rope.partial", text, site.with_int("n_dims", width)));
    }
    scaling(site, out);
    sections(site, out);
}

fn positions(site: Site<'_>, out: &mut Vec<Fault>) {
    let shifts = [(1.0, "one too high"), (-1.0, "one too low")];
    for (by, text) in shifts {
        let text = format!("positions are {text}");
        out.push(site.fault("rope.position_shift", text, site.edit(1, Edit::Add(by))));
    }
}

/// Whether rows are only turned: no factor, of YaRN or of its own, changes their lengths.
fn keeps_lengths(site: Site<'_>) -> bool {
    site.float("ext_factor") == 0.0 && site.float("attn_factor") == 1.0
}

/// Frequency factors, linear scaling and YaRN.
fn scaling(site: Site<'_>, out: &mut Vec<Fault>) {
    if site.src(2).is_some() {
        let none = Change::Source { slot: 2, with: None };
        out.push(site.fault("rope.factors", "the frequency factors are left out", none));
        let inverse = site.edit(2, Edit::Reciprocal);
        let text = "frequencies are multiplied by their factors, not divided";
        out.push(site.fault("rope.factors", text, inverse));
    }
    let (scale, ext, attn) = (site.float("freq_scale"), site.float("ext_factor"), site.float("attn_factor"));
    if ext != 0.0 {
        let text = "the frequencies are not interpolated (YaRN's ext_factor is 0)";
        out.push(site.fault("rope.yarn", text, site.with_float("ext_factor", 0.0)));
        ramp(site, out);
    }
    if scale != 1.0 {
        let text = format!("the positions are not scaled by {scale}");
        out.push(site.fault("rope.scale", text, site.with_float("freq_scale", 1.0)));
    }
    if attn != 1.0 {
        let text = format!("the magnitude factor {attn} is left out");
        out.push(site.fault("rope.yarn", text, site.with_float("attn_factor", 1.0)));
    }
}

/// Between which pairs YaRN goes over from one frequency to the other.
fn ramp(site: Site<'_>, out: &mut Vec<Fault>) {
    let (fast, slow, context) = (site.float("beta_fast"), site.float("beta_slow"), site.int("n_ctx_orig"));
    if fast != slow {
        let text = format!("YaRN's limits {fast} and {slow} are exchanged");
        let both = |name, value| match site.with_float(name, value) {
            Change::Words(words) => words,
            _ => Vec::new(),
        };
        let words = [both("beta_fast", slow), both("beta_slow", fast)].concat();
        out.push(site.fault("rope.yarn_ramp", text, Change::Words(words)));
    }
    for other in [context.saturating_mul(2), context / 2].into_iter().filter(|other| *other > 0) {
        let text = format!("YaRN's original context is {other}, the graph says {context}");
        out.push(site.fault("rope.yarn_ramp", text, site.with_int("n_ctx_orig", other)));
    }
}

fn sections(site: Site<'_>, out: &mut Vec<Fault>) {
    if site.int("mode") & SECTIONS == 0 {
        return;
    }
    let own = [11, 12, 13, 14].map(|word| site.tensor().params.int(word));
    let mut exchanged = own;
    exchanged.swap(0, 1);
    if exchanged != own {
        let words = [(11, exchanged[0] as u32), (12, exchanged[1] as u32)].to_vec();
        let text = format!("sections are {exchanged:?}, the graph says {own:?}");
        out.push(site.fault("rope.sections", text, Change::Words(words)));
    }
    let text = "all pairs take the first position: the sections are ignored";
    out.push(site.fault("rope.sections", text, site.with_int("mode", NEOX)));
}
