//! Adapters of low rank: what is added to a matmul, and how it is scaled.

use super::evidence::numbers;
use super::site::{edit, made};
use super::{Argument, Entry, Evidence, PLAIN, Site, plain, spell, when};
use crate::known::{AdapterSum, adapter_rank, adapter_sum};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

const SCALE: &[Op] = &[Op::Scale];
const SUM: &[Op] = &[Op::Add];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "lora.alpha",
        SCALE,
        [
            "an adapter is scaled by alpha, not by alpha / rank",
            "lora_alpha of adapter_config.json used as it stands",
            "multiply B·A·x by alpha / rank",
        ],
        |site, _| {
            let (rank, own) = (rank(site)?, own(site));
            let all = own * rank;
            when(rank > 1.0 && !is(all, 1.0))?;
            let text = format!(
                "the adapter is scaled by alpha = {}, not by alpha / rank = {}",
                spell(all),
                spell(own)
            );
            made(site.with_float("scale", all as f32), text)
        },
    ),
    plain(
        "lora.no_scale",
        SCALE,
        ["what an adapter adds is not scaled", "B·A·x added as it is", "multiply B·A·x by alpha / rank"],
        |site, _| {
            let (_, own) = (rank(site)?, own(site));
            when(!is(own, 1.0))?;
            made(
                site.with_float("scale", 1.0),
                format!("what the adapter adds is not scaled by {}", spell(own)),
            )
        },
    ),
    plain(
        "lora.missing",
        SUM,
        [
            "what an adapter adds is left out",
            "an adapter that is loaded and not applied, or applied to other matrices only",
            "add scale·B·A·x wherever the adapter has matrices for the weight",
        ],
        |site, _| {
            adapter_sum(site.graph, site.id)?;
            made(Change::Bypass { slot: 0 }, "what the adapter adds is left out")
        },
    ),
    Entry {
        name: "lora.scale",
        summary: "an adapter is scaled by another factor than alpha / rank",
        place: "alpha / sqrt(rank) (rsLoRA) for alpha / rank, the strength that a user gives applied twice or not at all",
        fix: "multiply B·A·x by strength · alpha / rank, once",
        parameter: Some("scale"),
        ops: SUM,
        values: |site| match scaled(site) {
            Some((own, rank)) => Argument::numbers([own * rank.sqrt(), own * 2.0, own * own, own / 2.0]),
            None => vec![],
        },
        make: |site, argument| {
            let (scale, (own, rank)) = (argument.number()?, scaled(site)?);
            // These have names of their own.
            when(
                scale.abs() > SAME * own.abs()
                    && ![own, own * rank, 1.0].iter().any(|known| is(scale, *known)),
            )?;
            let text = format!("the adapter is scaled by {}, not by {}", spell(scale), spell(own));
            made(edit(1, Edit::Multiply((scale / own) as f32)), text)
        },
        guess: Some(fit),
        ..PLAIN
    },
];

/// How far apart two factors are one.
const SAME: f64 = 1e-5;

fn is(a: f64, b: f64) -> bool {
    (a - b).abs() <= SAME * b.abs().max(SAME)
}

fn rank(site: Site<'_>) -> Option<f64> {
    adapter_rank(site.graph, site.id).map(|rank| rank as f64)
}

fn own(site: Site<'_>) -> f64 {
    f64::from(site.float("scale"))
}

/// What a sum's adapter is scaled by, and its rank.
fn scaled(site: Site<'_>) -> Option<(f64, f64)> {
    let AdapterSum { scale, rank, .. } = adapter_sum(site.graph, site.id)?;
    let own = own(site.other(scale));
    (own != 0.0).then_some((own, rank as f64))
}

/// y = W·x + f·(scale·B·A·x)
fn fit(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some((own, _)) = scaled(site) else { return vec![] };
    let Some((base, added)) = (evidence.source)(0).zip((evidence.source)(1)) else { return vec![] };
    let all = evidence.recorded.iter().zip(base.iter().zip(&added)).enumerate();
    let seen = all.filter(|(i, (y, _))| (evidence.looked_at)(*i) && y.is_finite());
    let (over, under) =
        seen.fold((0.0, 0.0), |(over, under), (_, (y, (w, d)))| (over + (y - w) * d, under + d * d));
    if under > 0.0 { numbers(over / under * own) } else { vec![] }
}
