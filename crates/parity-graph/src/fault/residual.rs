//! Residual sums, and layers that are not run.

use parity_dump::Kind;

use super::moe::one_more_expert;
use super::site::{edit, made};
use super::{Argument, Entry, PLAIN, Site, plain, when};
use crate::graph::Id;
use crate::known::adapter_sum;
use crate::op::Op;
use crate::rewrite::{Change, Edit};

const SUM: &[Op] = &[Op::Add];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "residual.missing",
        SUM,
        [
            "the residual is not added: the output is the branch alone",
            "a sum that writes into the branch's buffer before it is filled",
            "add the input of the branch to its output",
        ],
        |site, _| {
            let [branch, residual] = summands(site)?;
            let text = format!("the residual {} is not added", site.name_of(site.origin(residual)?));
            made(Change::Bypass { slot: branch }, text)
        },
    ),
    plain(
        "residual.no_branch",
        SUM,
        [
            "the branch is not added: the output is the residual alone",
            "a branch whose result stays in a temporary",
            "add the output of the branch to its input",
        ],
        |site, _| {
            let [branch, residual] = summands(site)?;
            let text = format!("the branch {} is not added", site.name_of(site.origin(branch)?));
            made(Change::Bypass { slot: residual }, text)
        },
    ),
    Entry {
        name: "residual.twice",
        summary: "the residual, or the branch, is added twice",
        place: "a kernel that fuses the sum into the matmul, and a sum after it",
        fix: "add the residual once",
        parameter: Some("what"),
        ops: SUM,
        values: |_| vec![Argument::name("residual"), Argument::name("branch")],
        make: |site, argument| {
            let [branch, residual] = summands(site)?;
            let (slot, what) = match argument.text()? {
                "residual" => (residual, "residual"),
                "branch" => (branch, "branch"),
                _ => return None,
            };
            let text = format!("the {what} {} is added twice", site.name_of(site.origin(slot)?));
            made(edit(slot, Edit::Multiply(2.0)), text)
        },
        ..PLAIN
    },
    plain(
        "layer.skipped",
        SUM,
        [
            "a layer is not run: what it reads is passed on",
            "a range of layers that ends one too early, a part of a pipeline that nobody holds",
            "run every layer of the file, in order",
        ],
        |site, _| {
            when(site.kind() == Some(Kind::LayerOut))?;
            let [_, within] = summands(site)?;
            let sum = site.other(site.origin(within).filter(|&id| site.graph.get(id).op == Op::Add)?);
            let [_, residual] = summands(sum)?;
            let from = site.graph.src(sum.id, residual)?;
            let layer = site.label()?.layer_index()?;
            made(Change::Pass(from), format!("layer {layer} is not run: {} is passed on", site.name_of(from)))
        },
    ),
    Entry {
        name: "residual.wrong_source",
        summary: "another row is added in place of the residual",
        place: "post-norm for pre-norm (the normalised row is added), or a buffer that was overwritten",
        fix: "keep the row before the norm and add that",
        parameter: Some("checkpoint"),
        ops: SUM,
        values: |site| match summands(site) {
            Some([_, residual]) => rows_before(site, residual).collect(),
            None => vec![],
        },
        make: |site, argument| {
            let [branch, residual] = summands(site)?;
            let (own, other) = (site.origin(residual)?, site.called(argument.text()?)?);
            when(other < site.id && Some(other) != site.origin(branch) && other != own)?;
            when(site.graph.get(other).ne == site.tensor().ne)?;
            let text = format!("{} is added in place of {}", site.name_of(other), site.name_of(own));
            made(Change::Source { slot: residual, with: Some(other) }, text)
        },
        ..PLAIN
    },
];

/// The slots of the branch and of the residual of a sum: what was computed first goes round the other.
fn summands(site: Site<'_>) -> Option<[usize; 2]> {
    when(site.weight().is_none() && !one_more_expert(site) && adapter_sum(site.graph, site.id).is_none())?;
    let [a, b] = [site.origin(0)?, site.origin(1)?];
    when(a != b && site.src(0)?.ne == site.src(1)?.ne && !site.graph.is_leaf(a) && !site.graph.is_leaf(b))?;
    Some(if b < a { [0, 1] } else { [1, 0] })
}

/// Nodes that are looked back at: about as many as two layers have.
const LOOKED_BACK: usize = 90;

/// Rows of the model's width that a node may take in a slot by mistake, the likeliest first: what reads the same row first
/// (the norm of the branch), then the others, the latest first.
pub(super) fn rows_before<'s>(site: Site<'s>, slot: usize) -> impl Iterator<Item = Argument> + 's {
    let own = site.origin(slot);
    let is_one = move |id: &Id| {
        let tensor = site.graph.get(*id);
        let is_source = site.graph.sources(site.id).any(|src| site.graph.origin(src) == *id);
        tensor.ne == site.tensor().ne
            && !is_source
            && site.graph.is_arithmetic(*id)
            && site.other(*id).row().is_some()
    };
    let first = site.id.saturating_sub(LOOKED_BACK);
    let norm = own.and_then(|own| {
        let of_own = move |id: &Id| site.graph.sources(*id).any(|src| site.graph.origin(src) == own);
        let norm = (own..site.id)
            .find(|id| matches!(site.graph.get(*id).op, Op::RmsNorm | Op::Norm) && of_own(id))?;
        let weighted =
            site.other(norm).readers().find(|reader| *reader.op() == Op::Mul && reader.id < site.id);
        Some(weighted.map_or(norm, |weighted| weighted.id))
    });
    let around =
        own.into_iter().flat_map(move |own| site.graph.sources(own)).map(move |src| site.graph.origin(src));
    let likely = norm.into_iter().chain(around).filter(is_one);
    let all = likely.chain((first..site.id).rev().filter(is_one));
    let mut seen = Vec::new();
    let new = all.filter(move |id| {
        let new = !seen.contains(id);
        seen.push(*id);
        new
    });
    new.filter(move |id| site.other(*id).label().is_some()).map(move |id| Argument::Name(site.name_of(id)))
}
