//! What a recording was computed in, and what that hides, in one line.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use parity_graph::Op;
use parity_graph::known::is_weight;

use crate::arithmetic::backend::{Backend, untested};
use crate::arithmetic::{CACHES, Narrow, Operands, Storing};
use crate::audit::{
    ATTENTIONS, Finding, Findings, LLAMA_ATTENTION, Labelled, NodeAudit, OF_EIGHT_BITS, attends, coarsest,
    is_as_f16, is_of_recording, name_of_cache, narrow, of_name,
};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::engine::op_by_op::dtype;
use crate::gguf::Loaded;
use crate::numerics::{Numerics, Products, Storage};
use crate::ops::bound::storage_unit;
use crate::report::words::{count, number};
use crate::report::{CheckpointVerdict, FirstDivergence, Report};

/// Nodes that are named.
const SHOWN_MAX: usize = 6;

/// Nodes that one arithmetic explains.
struct Class {
    nodes: usize,
    /// The widest bound among them, as a share of the node's values, and where it is.
    blind: Option<(f64, Checkpoint)>,
}

/// What a reader must know of a side's arithmetic, of which it `declared` what it says of it.
pub fn notes(
    side: &str,
    graphs: &[(usize, &Labelled)],
    findings: &Findings,
    declared: Option<Numerics>,
) -> Vec<String> {
    let all = [
        sentence(side, graphs, findings),
        coarser(side, graphs, findings),
        other_cache(side, findings, declared),
        later_cache(side, findings, declared),
        narrow_weights(side, findings),
        storing(side, findings),
        unrounded(side, findings),
        cast(side, findings),
    ];
    all.into_iter().flatten().chain(on_untested(side, graphs)).collect()
}

/// That weights are not the file's but rounded, which all that read them show.
fn narrow_weights(side: &str, findings: &Findings) -> Option<String> {
    let of = |(what, storage): (&str, Option<Storage>)| match storage? {
        Storage::F32 => None,
        Storage::F16 => Some(format!("{what} of {side} are those of the file rounded to f16")),
        Storage::Bf16 => Some(format!("{what} of {side} are those of the file rounded to bf16")),
    };
    let Loaded { norms, biases, tables, head, matrices } = findings.loaded;
    let of_matrices = match (tables == matrices, head == matrices) {
        (true, true) => "weights of matrices",
        (false, true) => "weights of matmuls",
        (_, false) => "weights of matmuls other than the last",
    };
    let of_tables = ("rows of the embedding table", tables.filter(|_| matrices.is_none()));
    let both = norms.filter(|_| norms == biases);
    let [norms, biases] = [norms, biases].map(|own| own.filter(|_| both.is_none()));
    let of_vectors = [("norm weights and biases", both), ("norm weights", norms), ("biases", biases)];
    let rounded = of_vectors.into_iter().chain([(of_matrices, matrices), of_tables]);
    let rounded: Vec<String> = rounded.into_iter().filter_map(of).collect();
    let said = rounded.join(", and ");
    (!said.is_empty()).then(|| format!("{said}, as all that read them show: it was judged with them"))
}

/// That values of some nodes are rounded to a narrower type than those of the others.
fn cast(side: &str, findings: &Findings) -> Option<String> {
    let ids = narrow_values(findings);
    let said =
        || format!("precision: {side} holds numbers of a narrower type at {}, of f32 elsewhere", shown(&ids));
    (!ids.is_empty()).then(said)
}

/// That values are not stored as the nearest numbers of their type.
fn storing(side: &str, findings: &Findings) -> Option<String> {
    let how = match findings.storing {
        Storing::Nearest => return None,
        Storing::Cut => "cuts off the bits that bf16 lacks, as sums of two values show",
        Storing::Flushed => "stores 0 for numbers of f16 that are not normal, as none was recorded",
    };
    Some(format!("{side} {how}: it was judged so"))
}

/// That products read their source before it was rounded.
fn unrounded(side: &str, findings: &Findings) -> Option<String> {
    let ids: Vec<Checkpoint> = findings.read_unrounded.iter().copied().collect();
    (!ids.is_empty()).then(|| {
        format!(
            "{} of {side} multiply their source as it was before it was rounded, as a kernel does that computes both: {}",
            count(ids.len(), "matmul"),
            shown(&ids)
        )
    })
}

/// Of each backend that a side was computed on and that there is no recording of: that nobody tested what it is judged by.
fn on_untested(side: &str, graphs: &[(usize, &Labelled)]) -> Vec<String> {
    let tensors = graphs.iter().flat_map(|(_, labelled)| &labelled.program.graph.tensors);
    let found: BTreeSet<_> =
        tensors.filter_map(|tensor| tensor.backend.as_deref()).filter_map(untested).collect();
    let sentence = |(backend, by)| {
        format!("{side} was computed on {backend}, and judged by {by}: that is not tested (docs/backends.md)")
    };
    found.into_iter().map(sentence).collect()
}

/// Nodes that are explained only by keys and values in another type than was declared, or than values have.
fn other_cache(side: &str, findings: &Findings, declared: Option<Numerics>) -> Option<String> {
    let said = declared.map(|numerics| numerics.kv);
    let types = [Storage::F32, Storage::F16, Storage::Bf16].into_iter();
    let others = types.filter(|kv| *kv != said.unwrap_or_default());
    let of = |name: &'static str| {
        let is_healthy = |id: &Checkpoint| {
            let finding = findings.nodes.get(id).filter(|finding| finding.is_healthy());
            finding.is_some_and(|finding| finding.computed_in.contains(name))
        };
        let ids: Vec<Checkpoint> = findings.order.iter().copied().filter(is_healthy).collect();
        (!ids.is_empty()).then_some((name, ids))
    };
    let packed = CACHES.into_iter().map(|(name, _)| name);
    let found: Vec<String> = others
        .map(name_of_cache)
        .chain(packed)
        .filter_map(of)
        .map(|(name, ids)| format!("{name}: {} ({})", count(ids.len(), "node"), shown(&ids)))
        .collect();
    if found.is_empty() {
        return None;
    }
    let said = match declared {
        None => "which it does not declare".to_owned(),
        Some(Numerics { eight_bits: Some(_), .. }) => "of which it declares no more than that".to_owned(),
        Some(numerics) => format!("though it declares {}", name_of_cache(numerics.kv)),
    };
    Some(format!("{side} was taken to cache {}, {said}: nothing else explains them", found.join("; ")))
}

/// Of attention that is off by little from the same row on, in most layers, and has no name: that a cache of eight bits, read once
/// the prompt is computed, would look so, and how it is declared. A mistake of decode steps looks so as well.
fn later_cache(side: &str, findings: &Findings, declared: Option<Numerics>) -> Option<String> {
    if declared.is_some_and(|numerics| numerics.eight_bits.is_some()) {
        return None;
    }
    let is_attention =
        |(id, found): &(&Checkpoint, &Finding)| id.kind() == Kind::AttnCtx && found.bridged.is_empty();
    let all = findings.nodes.iter().filter(is_attention).filter(|(_, found)| found.judged > 0);
    let (healthy, wrong): (Vec<_>, Vec<_>) =
        all.map(|(_, found)| found).partition(|found| found.is_healthy());
    let audits: Vec<NodeAudit> = wrong.iter().filter_map(|found| found.audit()).collect();
    let first = *audits.first()?.rows_beyond.first().filter(|first| **first > 0)?;
    let is_so =
        |audit: &NodeAudit| audit.rows_beyond.first() == Some(&first) && audit.local.rel_l2 <= OF_EIGHT_BITS;
    let is_named = wrong.iter().any(|found| !found.diagnosis().0.is_empty());
    if is_named || audits.len() < healthy.len() || !audits.iter().all(is_so) {
        return None;
    }
    Some(format!(
        "attention of {side} is off by little from position {first} on: if keys and values are kept in 8 bits once the prompt is \
         computed, declare it (--numerics \"{} kv=int8\", or kv=fp8), and it is judged so",
        declared.map_or_else(|| "f32".to_owned(), |numerics| numerics.to_string())
    ))
}

/// The first of some nodes, by name.
fn shown(ids: &[Checkpoint]) -> String {
    let names = ids.iter().take(SHOWN_MAX).map(ToString::to_string);
    let more = (ids.len() > SHOWN_MAX).then(|| "…".to_owned());
    names.chain(more).collect::<Vec<_>>().join(", ")
}

/// Of a recording that was not all computed in f32 or by llama.cpp's CPU kernels: by arithmetic, how many nodes it
/// explains and below what a mistake in them is not seen.
fn sentence(side: &str, graphs: &[(usize, &Labelled)], findings: &Findings) -> Option<String> {
    let mut tensors = graphs.iter().flat_map(|(_, labelled)| &labelled.program.graph.tensors);
    let on_device = tensors.any(|tensor| tensor.backend.as_deref().and_then(Backend::of).is_some());
    let mut names = findings.nodes.values().flat_map(|finding| &finding.computed_in);
    if !on_device && !names.any(|name| is_coarse(name)) {
        return None;
    }
    let mut classes: BTreeMap<&str, Class> = BTreeMap::new();
    for id in &findings.order {
        let Some(finding) = findings.nodes.get(id) else { continue };
        let bound = finding.audit().and_then(|audit| audit.local.bound_rel_l2);
        for name in &finding.computed_in {
            let class = classes.entry(name).or_insert(Class { nodes: 0, blind: None });
            class.nodes += 1;
            let wider = |bound: &f64| class.blind.is_none_or(|(widest, _)| *bound > widest);
            if let Some(bound) = bound.filter(wider) {
                class.blind = Some((bound, *id));
            }
        }
    }
    let of = |(name, class): (&&str, &Class)| {
        let blind = class.blind.filter(|(bound, _)| *bound > 0.0);
        let blind = blind.map(|(bound, id)| format!(", blind below {} at {id}", number(bound)));
        format!("{name} ({}{})", count(class.nodes, "node"), blind.unwrap_or_default())
    };
    let classes: Vec<String> = classes.iter().map(of).collect();
    (!classes.is_empty()).then(|| format!("{side} computes with: {}", classes.join("; ")))
}

/// Whether an arithmetic of an engine that brings no graph is coarser than f32.
fn is_coarse(name: &str) -> bool {
    let of_attention = name == LLAMA_ATTENTION || ATTENTIONS.iter().any(|(known, _)| *known == name);
    let of_products = of_name(name)
        .is_some_and(|one| matches!(one, Operands::Rows | Operands::Blocks(_)) || narrow(one).is_some());
    of_attention || of_products
}

/// The fault that a product with operands in a narrower type than others of its kind is; none where it stands for one of f32.
fn narrow_product(name: &str) -> Option<&'static str> {
    let operands = of_name(name)?;
    match operands {
        Operands::Rows => return Some("activations in int8"),
        Operands::Blocks(_) => return Some("activations in blocks of Q8_1"),
        _ => {}
    }
    Some(match narrow(operands)? {
        Narrow::F16 => "precision.f16_operands",
        Narrow::Bf16 => "precision.bf16_operands",
        Narrow::Tf32 | Narrow::Tf32Away | Narrow::Tf32Cut => "precision.tf32",
        Narrow::Pair => return None,
    })
}

/// Marks what only a coarser arithmetic explains than the candidate's producer declares, or than most others of its class show.
/// What was declared and is not so is a divergence. Engines that say `f32` and no more mean what they compute with, and not what they
/// cache; numbers of a narrower type in a dump of f32 are what they computed.
pub fn weigh_precision(
    report: &mut Report,
    graphs: &[(usize, &Labelled)],
    findings: &Findings,
    candidate: &dyn Recording,
) {
    let words = candidate.producer().numerics.as_deref().unwrap_or_default();
    let declared = words.parse::<Numerics>().ok().filter(|numerics| numerics.eight_bits.is_none());
    let is_plain =
        |numerics: Numerics| (numerics.storage, numerics.products) == (Storage::F32, Products::F32);
    let values = declared.is_some_and(is_plain);
    let (narrow, all) = narrow_products(graphs, findings);
    let of_few = narrow.iter().filter(|_| 2 * narrow.len() < all).map(|(id, _)| *id);
    let of_few = of_few.chain(narrow_attentions(findings)).map(|id| (id, false));
    // What is wrong beside that comes first: rounding to a narrower type may be a part of it.
    let is_all = report.origins.is_empty();
    let cast = narrow_values(findings);
    let cast = cast.into_iter().map(|id| (id, values && is_all && candidate.is_in_f32(id)));
    let mut marked: HashMap<Checkpoint, bool> = of_few.chain(cast).collect();
    let units = declared.filter(|_| words.contains("kv=")).map(|numerics| storage_unit(numerics.kv));
    for id in &findings.order {
        let Some(finding) = findings.nodes.get(id).filter(|finding| finding.is_healthy()) else { continue };
        let caches = [Storage::F16, Storage::Bf16]
            .into_iter()
            .filter(|kv| finding.computed_in.contains(name_of_cache(*kv)));
        if caches.into_iter().any(|kv| units.is_some_and(|unit| !(storage_unit(kv) <= unit))) {
            marked.insert(*id, true);
        }
    }
    let mut declared_otherwise = Vec::new();
    for entry in report.checkpoints.iter_mut().filter(|entry| entry.verdict == CheckpointVerdict::Match) {
        let Some((&is_declared, finding)) = marked.get(&entry.id).zip(findings.nodes.get(&entry.id)) else {
            continue;
        };
        entry.verdict = CheckpointVerdict::Precision;
        let named = coarsest(finding.computed_in.iter().copied()).map_or("a narrower type", |(name, _)| name);
        let than = if is_declared {
            "coarser than what the dump declares"
        } else {
            "coarser than what its class shows"
        };
        let band = finding.band().map_or_else(String::new, |band| format!(", blind below {}", number(band)));
        *entry.evidence.get_or_insert_default() += &format!("; only {named} explains it, {than}{band}");
        declared_otherwise.extend(is_declared.then_some(entry.id));
    }
    declared_otherwise.into_iter().for_each(|id| report.originates(id));
    let first = report.checkpoints.iter().find(|entry| report.origins.contains(&entry.id));
    let Some(first) = first.filter(|entry| entry.verdict == CheckpointVerdict::Precision) else { return };
    let (inputs, residual) = (first.inputs.clone(), first.evidence.clone());
    let first = FirstDivergence { inputs, residual, ..FirstDivergence::at(first.id, first.verdict) };
    report.diverge(first);
}

/// Products with weights that only narrower operands explain, where f32 explains most others of them: a cast that was
/// meant for all, or for none.
fn coarser(side: &str, graphs: &[(usize, &Labelled)], findings: &Findings) -> Option<String> {
    let (narrow, all) = narrow_products(graphs, findings);
    if narrow.is_empty() || 2 * narrow.len() >= all {
        return None;
    }
    let shown = narrow.iter().take(SHOWN_MAX).map(|(id, fault)| format!("{id} ({fault})"));
    let mut shown: Vec<String> = shown.collect();
    if narrow.len() > SHOWN_MAX {
        shown.push("…".to_owned());
    }
    Some(format!(
        "precision: {} of {} of {side} {} explained only by operands in a narrower type, the others by f32: {}",
        narrow.len(),
        count(all, "matmul"),
        if narrow.len() == 1 { "is" } else { "are" },
        shown.join(", ")
    ))
}

/// Nodes whose values, in some steps at least, only a narrower type explains that they were rounded to when they were recorded, where
/// that of most others is f32: the last product of an engine that casts its logits.
fn narrow_values(findings: &Findings) -> Vec<Checkpoint> {
    let judged = || findings.nodes.iter().filter(|(_, one)| one.judged > 0 && one.is_healthy());
    let is_narrow =
        |(_, one): &(&Checkpoint, &Finding)| one.computed_in.iter().any(|name| is_of_recording(name));
    let narrow: Vec<Checkpoint> = judged().filter(is_narrow).map(|(id, _)| *id).collect();
    if 2 * narrow.len() < judged().count() { narrow } else { Vec::new() }
}

/// Attentions that only a coarser arithmetic explains than most others: a mistake in one may be what a narrower type would round.
fn narrow_attentions(findings: &Findings) -> Vec<Checkpoint> {
    let judged =
        findings.nodes.iter().filter(|(id, one)| attends(id.kind()) && one.judged > 0 && one.is_healthy());
    let unit = |one: &Finding| coarsest(one.computed_in.iter().copied()).map(|(_, unit)| unit);
    let units: Vec<(Checkpoint, f64)> = judged.filter_map(|(id, one)| Some((*id, unit(one)?))).collect();
    let are_most = |usual: f64| 2 * units.iter().filter(|(_, unit)| *unit <= usual).count() > units.len();
    let usual =
        units.iter().map(|(_, unit)| *unit).filter(|unit| are_most(*unit)).fold(f64::INFINITY, f64::min);
    units.into_iter().filter(|(_, unit)| *unit > usual).map(|(id, _)| id).collect()
}

/// Products with weights that only narrower operands explain, each with the fault that it is where others are not so; and
/// how many there are in all.
fn narrow_products(
    graphs: &[(usize, &Labelled)],
    findings: &Findings,
) -> (Vec<(Checkpoint, &'static str)>, usize) {
    let (mut narrow, mut all) = (Vec::new(), HashSet::new());
    for (_, labelled) in graphs {
        let graph = &labelled.program.graph;
        for (id, checkpoint) in labelled.nodes() {
            let product = matches!(graph.get(id).op, Op::MulMat | Op::MulMatId);
            let weight = graph.src(id, 0).map(|src| graph.get(src)).filter(|weight| is_weight(&weight.name));
            let Some((finding, weight)) = findings.nodes.get(&checkpoint).zip(weight).filter(|_| product)
            else {
                continue;
            };
            // What units of other types do as well stands for neither.
            let names = &finding.computed_in;
            let is_open = !names.is_empty() && names.iter().all(|name| is_as_f16(name, dtype(weight)));
            if finding.judged > 0 && !is_open && all.insert(checkpoint) {
                let fault = names.iter().find_map(|name| narrow_product(name));
                narrow.extend(fault.map(|fault| (checkpoint, fault)));
            }
        }
    }
    (narrow, all.len())
}
