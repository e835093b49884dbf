//! ROPE: base, pairs, positions, direction, columns that are rotated.

use super::evidence::{numbers, rounded};
use super::site::{edit, made};
use super::{Argument, Entry, Evidence, Made, PLAIN, Searched, Site, plain, spell, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit};
use crate::weights::{ATTN_V, Name};

pub(super) const ROPE: &[Op] = &[Op::Rope];

/// Bases of models in the field, the likeliest first.
const BASES: [f64; 9] = [1e4, 1e6, 5e5, 5e6, 1e5, 1.6e5, 1e7, 2.5e5, 8e6];
/// Pairs (2i, 2i + 1), `GGML_ROPE_TYPE_NORMAL`.
const NORMAL: i32 = 0;
/// Pairs (i, i + n/2), `GGML_ROPE_TYPE_NEOX`.
pub(super) const NEOX: i32 = 2;
/// Several position planes, `GGML_ROPE_TYPE_MROPE`.
pub(super) const SECTIONS: i32 = 8;
/// Sections counted from 0, `GGML_ROPE_TYPE_VISION`.
const VISION: i32 = 24;

const AT_ZERO: Option<&str> = Some("at position 0, which is not rotated");
const IN_DECODE: Option<&str> = Some("in the first step: it shows in decode");

/// All of them. Of those that come to the same values the first is told: leading columns alone before some columns or other.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "rope.base",
        summary: "another base than the model's",
        place: "the default 10000 of early Llama where the file says {arch}.rope.freq_base",
        fix: "read {arch}.rope.freq_base from the file",
        parameter: Some("base"),
        silent: AT_ZERO,
        ops: ROPE,
        values: |_| Argument::numbers(BASES),
        make: |site, argument| {
            let (base, own) = (argument.number()?, site.float("freq_base"));
            when(base > 0.0 && (base as f32) != own)?;
            let text = format!("RoPE base is {}, the model says {}", spell(base), spell(f64::from(own)));
            made(site.with_float("freq_base", base as f32), text)
        },
        guess: Some(base),
        searched: Some(Searched { around: |site| Some(f64::from(site.float("freq_base"))), told: bases }),
        ..PLAIN
    },
    Entry {
        name: "rope.interleaved",
        summary: "neighbouring columns are paired where halves should be, or the reverse",
        place: "GPT-J's pairing for NeoX's: llama files pair neighbours (2i, 2i + 1), qwen2 and qwen3 pair halves",
        fix: "pair as llama.cpp's llama_model_rope_type says for the architecture",
        parameter: Some("form"),
        silent: AT_ZERO,
        ops: ROPE,
        values: |_| vec![Argument::name("other"), Argument::name("halves")],
        make: interleaved,
        ..PLAIN
    },
    Entry {
        silent: AT_ZERO,
        ..plain(
            "rope.position_zero",
            ROPE,
            [
                "every row is rotated for position 0",
                "a position that is never advanced, or positions that were not handed to the kernel",
                "hand each row its own position",
            ],
            |_, _| made(edit(1, Edit::Set(0.0)), "the position is stuck at 0: no row is rotated"),
        )
    },
    Entry {
        name: "rope.partial",
        summary: "only some leading columns of a head are rotated",
        place: "a partial rotary factor of another model (Phi, GPT-NeoX)",
        fix: "rotate {arch}.rope.dimension_count columns, or all where the key is absent",
        parameter: Some("columns"),
        silent: AT_ZERO,
        ops: ROPE,
        values: |site| {
            let (dims, width) = (f64::from(site.int("n_dims")), site.tensor().ne[0] as f64);
            let half = (dims / 4.0).floor() * 2.0;
            let all = (2..=site.tensor().ne[0]).step_by(2).map(|dims| dims as f64);
            // With the frequencies of so many columns, or of all that the model rotates.
            let mut out = Argument::numbers([half, width]);
            out.push(Argument::Order(vec![half as u32, dims as u32]));
            out.extend(Argument::numbers(all));
            out
        },
        make: partial,
        ..PLAIN
    },
    Entry {
        name: "rope.none",
        summary: "RoPE is left out, of all columns or of some",
        place: "a branch that is skipped for one of Q and K, in one of prefill and decode, or for some heads",
        fix: "rotate Q and K before the scores",
        parameter: Some("columns"),
        silent: AT_ZERO,
        ops: ROPE,
        values: |_| vec![Argument::name("all")],
        make: none,
        guess: Some(super::data::wrong_columns),
        ..PLAIN
    },
    Entry {
        silent: AT_ZERO,
        ..plain(
            "rope.sign",
            ROPE,
            [
                "rows are rotated backwards",
                "the sign of the sine in the rotation matrix",
                "(a, b) -> (a·cos - b·sin, a·sin + b·cos)",
            ],
            |site, _| {
                let back = site.with_float("freq_scale", -site.float("freq_scale"));
                made(back, "RoPE rotates backwards: the sign of the sine is wrong")
            },
        )
    },
    Entry {
        silent: AT_ZERO,
        ..plain(
            "rope.twice",
            ROPE,
            [
                "RoPE is applied twice",
                "keys rotated before they enter the cache and again when they are read",
                "rotate once",
            ],
            |site, _| {
                // Without factors of length, twice is by twice the position.
                when(keeps_lengths(site))?;
                made(edit(1, Edit::Multiply(2.0)), "RoPE is applied twice")
            },
        )
    },
    Entry {
        name: "rope.position_shift",
        summary: "every row is rotated for the position before or after its own",
        place: "positions counted from 1, or a BOS counted twice",
        fix: "the first token has position 0",
        parameter: Some("positions"),
        ops: ROPE,
        values: |_| Argument::numbers([1.0, -1.0]),
        make: |_, argument| {
            let by = argument.integer().filter(|by| *by != 0)?;
            made(
                edit(1, Edit::Add(by as f32)),
                format!("rows are rotated for the position {by:+} from their own"),
            )
        },
        guess: Some(|_, evidence| shifts(evidence, Edit::Add)),
        ..PLAIN
    },
    Entry {
        silent: IN_DECODE,
        later: true,
        ..plain(
            "rope.position_in_step",
            ROPE,
            [
                "positions start at 0 again in every step",
                "decode that forgets how many tokens are cached (seqlen_offset, past_length, start_pos)",
                "add the number of cached tokens to the row's index in its step",
            ],
            |_, _| {
                let text = "positions start at 0 again in every step: the cached tokens are not counted";
                made(edit(1, Edit::FromFirst), text)
            },
        )
    },
    Entry {
        name: "rope.decode_shift",
        summary: "positions are off by a constant in every step after the first",
        place: "a token count that already includes the token about to be computed",
        fix: "the first decoded token's position is the number of tokens before it",
        parameter: Some("positions"),
        silent: IN_DECODE,
        later: true,
        ops: ROPE,
        values: |_| Argument::numbers([1.0, -1.0]),
        make: |_, argument| {
            let by = argument.integer().filter(|by| *by != 0)?;
            let text =
                format!("after the first step, rows are rotated for the position {by:+} from their own");
            made(edit(1, Edit::AddLater(by as f32)), text)
        },
        guess: Some(|_, evidence| shifts(evidence, Edit::AddLater)),
        ..PLAIN
    },
    Entry {
        name: "rope.scaled",
        summary: "positions are multiplied by a factor, as in linear RoPE scaling",
        place: "rope.scaling applied to a model that was not trained with it, or a factor inverted",
        fix: "use a factor only where the file has {arch}.rope.scaling",
        parameter: Some("factor"),
        silent: AT_ZERO,
        ops: ROPE,
        values: |_| Argument::numbers([0.25, 0.5, 0.125, 2.0, 4.0, 8.0]),
        make: |site, argument| {
            let factor = argument.number().filter(|factor| *factor > 0.0 && *factor != 1.0)?;
            // With YaRN the scale is of some pairs only, and no factor is one that a model has has its own name.
            when(site.float("ext_factor") == 0.0)?;
            let scale = f64::from(site.float("freq_scale")) * factor;
            when(scale as f32 != 1.0)?;
            let text = format!("positions are multiplied by {} before RoPE", spell(factor));
            made(site.with_float("freq_scale", scale as f32), text)
        },
        guess: Some(factor),
        ..PLAIN
    },
    Entry {
        silent: AT_ZERO,
        ..plain(
            "rope.on_v",
            &[Op::MulMat, Op::Add],
            [
                "the values are rotated like the keys",
                "a fused QKV row that is rotated as a whole",
                "rotate Q and K only",
            ],
            on_v,
        )
    },
];

/// Whether rows are only turned: no factor, of YaRN or of its own, changes their lengths.
fn keeps_lengths(site: Site<'_>) -> bool {
    site.float("ext_factor") == 0.0 && site.float("attn_factor") == 1.0
}

fn interleaved(site: Site<'_>, argument: &Argument) -> Made {
    let mode = site.int("mode");
    let (width, dims) = (site.tensor().ne[0], usize::try_from(site.int("n_dims")).ok()?);
    if argument.text()? == "halves" {
        when(mode == NORMAL && dims == width && width % 2 == 0)?;
        let half = width / 2;
        let order = |from: fn(usize, usize) -> usize| (0..width).map(|c| from(c, half) as u32).collect();
        let laid = Edit::Columns(order(|c, half| c % half * 2 + c / half));
        let back = Edit::Columns(order(|c, half| c % 2 * half + c / 2));
        let text = "RoPE pairs neighbours (2i, 2i + 1) of rows in Hugging Face order, which pair halves (i, i + d/2)";
        return made(Change::All(vec![edit(0, laid), Change::ResultEdit(back)]), text);
    }
    match mode {
        NORMAL => made(
            site.with_int("mode", NEOX),
            "RoPE pairs halves (i, i + d/2), the model pairs neighbours (2i, 2i + 1)",
        ),
        // With one position for all sections pairs are halves too.
        _ if mode == NEOX || mode & SECTIONS != 0 && mode != VISION => made(
            site.with_int("mode", NORMAL),
            "RoPE pairs neighbours (2i, 2i + 1), the model pairs halves (i, i + d/2)",
        ),
        _ => None,
    }
}

/// So many leading columns alone are rotated: `16`, or `16,32` with the frequencies that the first 16 of 32 have.
fn partial(site: Site<'_>, argument: &Argument) -> Made {
    let own = site.int("n_dims");
    let (dims, of) = match argument {
        Argument::Order(both) => match both[..] {
            [dims, of] => (i32::try_from(dims).ok()?, Some(f64::from(of))),
            _ => return None,
        },
        other => (other.integer()?, None),
    };
    let width = i32::try_from(site.tensor().ne[0]).ok()?;
    when(dims > 0 && dims % 2 == 0 && dims <= width && dims != own)?;
    when(site.int("mode") < SECTIONS && site.int("offset") == 0)?;
    let mut text = format!("RoPE rotates {dims} columns of a head, the model says {own}");
    let mut words = site.words("n_dims", dims as u32);
    if let Some(of) = of {
        when(of > f64::from(dims) && site.float("ext_factor") == 0.0)?;
        // base^(-2i/of) over pairs of so many columns.
        let base = f64::from(site.float("freq_base")).powf(f64::from(dims) / of);
        words.extend(site.words("freq_base", (base as f32).to_bits()));
        text += &format!(", with frequencies of {}", spell(of));
    }
    made(Change::Words(words), text)
}

fn none(site: Site<'_>, argument: &Argument) -> Made {
    let whole = Change::Bypass { slot: 0 };
    if argument.text()? == "all" {
        return made(whole, "RoPE is left out");
    }
    let row = site.row()?;
    let columns = super::data::columns(argument, row)?;
    let text = format!("{} are not rotated", super::data::in_words(site, &columns));
    made(Change::Part { row, columns, change: Box::new(whole) }, text)
}

/// Values turned as the layer's keys are.
fn on_v(site: Site<'_>, _: &Argument) -> Made {
    let Name { layer, part, .. } = site.weight_name()?;
    when(part == ATTN_V)?;
    // Where there is a bias it is what comes behind that is turned.
    let is_sum =
        |reader: Site<'_>| *reader.op() == Op::Add && reader.weight_name().is_some_and(|n| n.part == ATTN_V);
    when(!site.readers().any(is_sum))?;
    let of_layer = |id: usize| {
        let mut id = id;
        for _ in 0..6 {
            let known = site.other(id).weight_name().and_then(|name| name.layer);
            if known.is_some() {
                return known;
            }
            id = site.other(id).origin(0)?;
        }
        None
    };
    let is_rope = |id: &usize| *site.other(*id).op() == Op::Rope && of_layer(*id) == layer;
    let elements = site.tensor().elements();
    let rope = site.graph.computed().filter(is_rope).find(|&id| site.graph.get(id).elements() == elements)?;
    let (tensor, srcs) = (site.graph.get(rope), site.graph.get(rope).srcs.iter().skip(1).copied().collect());
    let change = Change::After { op: Op::Rope, params: tensor.params, ne: tensor.ne, srcs };
    made(change, "RoPE is applied to the values")
}

/// A row by its token: what went in, what came out, its position.
struct Turned<'a> {
    x: &'a [f64],
    y: &'a [f64],
    position: f64,
}

/// The rows that were recorded.
fn rows<'a>(site: Site<'_>, x: &'a [f64], positions: &[f64], evidence: &'a Evidence<'_>) -> Vec<Turned<'a>> {
    let [width, heads, tokens, _] = site.tensor().ne;
    let row = width * heads;
    let rows = (0..tokens.min(positions.len())).filter(|t| (evidence.looked_at)(t * row));
    let of = |t: usize| t * row..(t + 1) * row;
    rows.map(|t| Turned { x: &x[of(t)], y: &evidence.recorded[of(t)], position: positions[t] }).collect()
}

/// The angle by which the recording turned each pair of a row, with the weight of the evidence: (i, θ, |x|²).
fn angles(site: Site<'_>, row: &Turned<'_>) -> Vec<(usize, f64, f64)> {
    let (width, pairs) = (site.tensor().ne[0], usize::try_from(site.int("n_dims")).unwrap_or(0) / 2);
    let of = |i: usize| {
        let (first, second) = if site.int("mode") == NORMAL { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
        let (mut along, mut across, mut weight) = (0.0, 0.0, 0.0);
        for (x, y) in row.x.chunks_exact(width).zip(row.y.chunks_exact(width)) {
            let (a, b, c, d) = (x[first], x[second], y[first], y[second]);
            along += a * c + b * d;
            across += a * d - b * c;
            weight += a * a + b * b;
        }
        (i, across.atan2(along), weight)
    };
    (0..pairs.min(width / 2)).map(of).collect()
}

/// Angles that are unambiguous and well above rounding.
const CLEAR_ANGLES: std::ops::Range<f64> = 1e-4..1.5;

/// θ_i = p·base^(-2i/d): a line through the origin of ln(θ_i/p) over i.
fn base(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some((x, positions)) = (evidence.source)(0).zip((evidence.source)(1)) else { return vec![] };
    let (own, dims) = (f64::from(site.float("freq_base")), f64::from(site.int("n_dims")));
    let mut fits: Vec<f64> = Vec::new();
    for row in rows(site, &x, &positions, evidence) {
        let position = row.position * f64::from(site.float("freq_scale"));
        let (mut numerator, mut denominator) = (0.0, 0.0);
        for (i, angle, weight) in angles(site, &row) {
            let small = i > 0 && position * own.min(1e4).powf(-2.0 * i as f64 / dims) < 1.5;
            if position > 0.0 && small && CLEAR_ANGLES.contains(&angle) {
                let weight = weight * (i as f64 * angle).powi(2);
                numerator -= weight * (angle / position).ln() / (2.0 * i as f64 / dims);
                denominator += weight;
            }
        }
        if denominator > 0.0 {
            fits.push((numerator / denominator).exp());
        }
    }
    fits.sort_by(f64::total_cmp);
    let Some(&fitted) = fits.get(fits.len() / 2).filter(|base| base.is_finite()) else { return vec![] };
    bases(fitted)
}

/// What is told of a base that was found.
fn bases(fitted: f64) -> Vec<Argument> {
    let known = BASES.into_iter().filter(|known| (known / fitted - 1.0).abs() < 0.05);
    let digits = (1..=5).map(|digits| rounded(fitted, digits));
    Argument::numbers(known.chain(digits).chain([fitted]))
}

/// θ_i = factor·p·rate_i
fn factor(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some((x, positions)) = (evidence.source)(0).zip((evidence.source)(1)) else { return vec![] };
    if site.src(2).is_some() {
        return vec![];
    }
    let (base, dims) = (f64::from(site.float("freq_base")), f64::from(site.int("n_dims")));
    let (mut numerator, mut denominator) = (0.0, 0.0);
    for row in rows(site, &x, &positions, evidence) {
        for (i, angle, weight) in angles(site, &row) {
            let rate = f64::from(site.float("freq_scale")) * base.powf(-2.0 * i as f64 / dims);
            let expected = row.position * rate;
            if expected > 0.0 && CLEAR_ANGLES.contains(&angle) && expected < 0.3 {
                numerator += weight * angle * expected;
                denominator += weight * expected.powi(2);
            }
        }
    }
    if denominator > 0.0 { numbers(numerator / denominator) } else { vec![] }
}

/// Shifts of the position that are tried.
const SHIFTS: i32 = 64;

/// The shift of the position that fits best.
fn shifts(evidence: &Evidence<'_>, shifted: fn(f32) -> Edit) -> Vec<Argument> {
    let Some(positions) = (evidence.source)(1) else { return vec![] };
    // A position that counts the prompt twice is off by its length.
    let start = positions.first().map_or(0, |first| *first as i32);
    let all = (-SHIFTS..=SHIFTS).chain([start, -start]).filter(|shift| *shift != 0);
    let best = evidence.nearest(all, |shift| Some(edit(1, shifted(*shift as f32))));
    Argument::numbers(best.map(f64::from))
}
