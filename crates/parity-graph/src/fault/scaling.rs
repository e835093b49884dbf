//! ROPE of scaled models: frequency factors, linear scaling, YaRN, sections.

use super::evidence::shorter;
use super::rope::{NEOX, ROPE, SECTIONS};
use super::site::{edit, made};
use super::{Argument, Entry, Made, PLAIN, Searched, Site, plain, spell, when};
use crate::rewrite::{Change, Edit};

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "rope.factors",
        summary: "frequency factors are left out, or multiplied instead of divided by",
        place: "rope_freqs.weight of Llama 3.1, the long and short factors of Phi-3 and of others",
        fix: "divide each pair's frequency by its factor",
        parameter: Some("form"),
        silent: Some("at position 0, which is not rotated"),
        ops: ROPE,
        values: |_| vec![Argument::name("none"), Argument::name("multiplied")],
        make: |site, argument| {
            site.src(2)?;
            match argument.text()? {
                "none" => made(Change::Source { slot: 2, with: None }, "the frequency factors are left out"),
                "multiplied" => {
                    let text = "frequencies are multiplied by their factors, not divided";
                    made(edit(2, Edit::Reciprocal), text)
                }
                _ => None,
            }
        },
        ..PLAIN
    },
    plain(
        "rope.scale",
        ROPE,
        [
            "positions are not scaled",
            "linear scaling ({arch}.rope.scaling.factor) that is not read",
            "multiply positions by 1/factor before angles are computed from them",
        ],
        |site, _| {
            let scale = site.float("freq_scale");
            when(scale != 1.0)?;
            made(site.with_float("freq_scale", 1.0), format!("the positions are not scaled by {scale}"))
        },
    ),
    Entry {
        name: "rope.yarn",
        summary: "YaRN's interpolation or its magnitude factor is left out",
        place: "rope scaling of type yarn taken for none or linear",
        fix: "mix both frequencies by the ramp, and multiply sine and cosine by the magnitude factor",
        parameter: Some("form"),
        ops: ROPE,
        values: |_| vec![Argument::name("none"), Argument::name("no_magnitude")],
        make: |site, argument| match argument.text()? {
            "none" if site.float("ext_factor") != 0.0 => made(
                site.with_float("ext_factor", 0.0),
                "the frequencies are not interpolated (YaRN's ext_factor is 0)",
            ),
            "no_magnitude" if site.float("attn_factor") != 1.0 => made(
                site.with_float("attn_factor", 1.0),
                format!("the magnitude factor {} is left out", site.float("attn_factor")),
            ),
            _ => None,
        },
        ..PLAIN
    },
    Entry {
        name: "rope.yarn_factor",
        summary: "YaRN scales by another factor than the model",
        place: "{arch}.rope.scaling.factor not read, or its inverse taken",
        fix: "scale frequencies by 1/factor below the ramp",
        parameter: Some("factor"),
        ops: ROPE,
        values: |site| {
            let own = 1.0 / f64::from(site.float("freq_scale"));
            Argument::numbers([own * 2.0, own / 2.0, 1.0 / own])
        },
        make: |site, argument| {
            let (factor, own) = (argument.number().filter(|f| *f > 0.0)?, site.float("freq_scale"));
            let scale = (1.0 / factor) as f32;
            when(site.float("ext_factor") != 0.0 && scale != own)?;
            let own = spell(f64::from(1.0 / own));
            made(
                site.with_float("freq_scale", scale),
                format!("YaRN's factor is {}, the model says {own}", spell(factor)),
            )
        },
        searched: Some(Searched {
            around: |site| (site.float("ext_factor") != 0.0).then_some(8.0),
            told: shorter,
        }),
        ..PLAIN
    },
    Entry {
        name: "rope.magnitude",
        summary: "rotated rows are longer or shorter than the model says",
        place: "YaRN's magnitude factor (attn_factor, mscale) computed from another factor, or applied without YaRN",
        fix: "multiply sine and cosine by {arch}.rope.scaling.attn_factor, once",
        parameter: Some("factor"),
        ops: ROPE,
        values: |site| match site.float("ext_factor") {
            0.0 => vec![],
            _ => Argument::numbers([f64::from(site.float("attn_factor")) * 1.1]),
        },
        make: |site, argument| {
            let (factor, own) = (argument.number().filter(|f| *f > 0.0)?, site.float("attn_factor"));
            when(factor as f32 != own && factor != 1.0)?;
            let text = format!(
                "the magnitude factor is {}, the model says {}",
                spell(factor),
                spell(f64::from(own))
            );
            made(site.with_float("attn_factor", factor as f32), text)
        },
        guess: Some(|site, evidence| {
            let own = f64::from(site.float("attn_factor"));
            evidence.factor().map_or(vec![], |factor| shorter(factor * own))
        }),
        ..PLAIN
    },
    Entry {
        name: "rope.yarn_ramp",
        summary: "YaRN mixes the two frequencies over other pairs than the model",
        place: "the limits exchanged, or the context after scaling taken for the original one",
        fix: "read {arch}.rope.scaling.original_context_length, and beta_fast before beta_slow",
        parameter: Some("context"),
        ops: ROPE,
        values: |site| {
            let context = f64::from(site.int("n_ctx_orig"));
            let others = Argument::numbers([context * 2.0, (context / 2.0).floor()]);
            [vec![Argument::name("exchanged")], others].concat()
        },
        make: ramp,
        ..PLAIN
    },
    Entry {
        name: "rope.sections",
        summary: "sections of multimodal RoPE exchanged or ignored",
        place: "one position for all pairs, which text alone does not show",
        fix: "take each pair's position by {arch}.rope.dimension_sections",
        parameter: Some("form"),
        ops: ROPE,
        values: |_| vec![Argument::name("exchanged"), Argument::name("ignored")],
        make: sections,
        ..PLAIN
    },
];

/// Between which pairs YaRN goes over from one frequency to the other.
fn ramp(site: Site<'_>, argument: &Argument) -> Made {
    when(site.float("ext_factor") != 0.0)?;
    let (fast, slow, own) = (site.float("beta_fast"), site.float("beta_slow"), site.int("n_ctx_orig"));
    if argument.text() == Some("exchanged") {
        when(fast != slow)?;
        let words = [site.words("beta_fast", slow.to_bits()), site.words("beta_slow", fast.to_bits())];
        return made(Change::Words(words.concat()), format!("YaRN's limits {fast} and {slow} are exchanged"));
    }
    let other = argument.integer().filter(|other| *other > 0 && *other != own)?;
    let text = format!("YaRN's original context is {other}, the model says {own}");
    made(site.with_int("n_ctx_orig", other), text)
}

fn sections(site: Site<'_>, argument: &Argument) -> Made {
    when(site.int("mode") & SECTIONS != 0)?;
    if argument.text()? == "ignored" {
        let text = "all pairs take the first position: the sections are ignored";
        return made(site.with_int("mode", NEOX), text);
    }
    let own = [11, 12, 13, 14].map(|word| site.tensor().params.int(word));
    let mut exchanged = own;
    exchanged.swap(0, 1);
    when(exchanged != own && argument.text()? == "exchanged")?;
    let words = [(11, exchanged[0] as u32), (12, exchanged[1] as u32)].to_vec();
    made(Change::Words(words), format!("sections are {exchanged:?}, the model says {own:?}"))
}
