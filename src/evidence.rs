//! From audits to answers: what exact arithmetic says of each compared checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use crate::arithmetic::round::{QUANT_MAX, Rounding};
use crate::audit::bounds::{CONFIDENCE, UNIT_BF16, UNIT_F16, UNIT_F32};
use crate::audit::verdict::{self, Evidence};
use crate::audit::{Audits, Context, Missing, NodeAudit};
use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, Status};
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::diagnose::{Diagnosed, diagnose};
use crate::findings::{self, Judged, Judgement};
use crate::model::Model;
use crate::model::graph::{Graph, Node, Op};
use crate::model::weights::Weight;
use crate::numerics::{Numerics, Products, Storage};
use crate::report::words::number;
use crate::report::{CheckpointVerdict, Local, LocalError};

/// Weighs what an audit of the candidate, and of the reference, found; nothing where there was none.
/// `recordings` are those of the audits.
pub fn weigh(
    model: &Model,
    recordings: &[&dyn Recording],
    comparisons: &[Comparison],
    audits: Option<&Audits>,
) -> Result<Judgement> {
    let Some(audits) = audits else { return Ok(Judgement::default()) };
    let recorded = recordings.first().map_or(Vec::new(), |candidate| candidate.checkpoints());
    let graph = model.graph.fused(|checkpoint| recorded.contains(&checkpoint));
    let Judgement { mut judged, limit, .. } = judged(comparisons, audits, model, &graph);
    for (checkpoint, judged) in &mut judged {
        refuse_other_widths(*checkpoint, judged, recordings, model);
    }
    for (checkpoint, judged) in &mut judged {
        name_nonfinite(*checkpoint, judged, recordings);
    }
    for comparison in comparisons.iter().filter(|comparison| comparison.seen.is_some()) {
        if let Some(judged) = judged.get_mut(&comparison.checkpoint) {
            hold_unaudited(model, comparison, judged);
        }
    }
    let mut notes = audits.notes();
    let named = name(&mut judged, &mut notes, audits, recordings, model)?;
    let (rows_audited, rows_screened) = (Some(audits.rows_audited()), Some(audits.rows_screened()));
    Ok(Judgement { judged, named, notes, rows_audited, rows_screened, limit })
}

/// Says how many of the values that are not finite are NaN and how many Inf, where all of them were kept.
fn name_nonfinite(checkpoint: Checkpoint, judged: &mut Judged, recordings: &[&dyn Recording]) {
    let (CheckpointVerdict::Nonfinite, Some(evidence)) = (judged.verdict, &mut judged.evidence) else {
        return;
    };
    for recording in recordings {
        let (mut nan, mut inf) = (0u64, 0u64);
        let mut row = Vec::new();
        for position in recording.positions(checkpoint) {
            let Some(row) = recording.row(checkpoint, position, &mut row) else { continue };
            nan += row.iter().filter(|value| value.is_nan()).count() as u64;
            inf += row.iter().filter(|value| value.is_infinite()).count() as u64;
        }
        let counted = format!("{} NaN or Inf", nan + inf);
        if let Some(rest) = evidence.strip_prefix(&counted).filter(|_| nan + inf > 0) {
            *evidence = match (nan, inf) {
                (nan, 0) => format!("{nan} NaN{rest}"),
                (0, inf) => format!("{inf} Inf{rest}"),
                _ => format!("{nan} NaN and {inf} Inf{rest}"),
            };
            return;
        }
    }
}

/// A healthy candidate may stand from printed values as far as llama.cpp's own rounding explains: these cannot
/// be audited themselves.
fn hold_unaudited(model: &Model, comparison: &Comparison, judged: &mut Judged) {
    let Some(numbers) = &comparison.numbers else { return };
    let explained = rounding_carried(model, comparison.checkpoint, &[printed()]);
    if judged.verdict == CheckpointVerdict::Match && !(numbers.rel_l2 <= explained) {
        judged.verdict = CheckpointVerdict::Undecided;
        judged.evidence = Some(format!(
            "the candidate is healthy, but the printed values are {:.1e} from it and llama.cpp's rounding explains \
             {explained:.1e}: another model, another prompt, or a fault of theirs",
            numbers.rel_l2
        ));
    }
}

/// The arithmetic of printed values, which do not say it.
fn printed() -> Numerics {
    Numerics { products: Products::LlamaCpu, kv: Storage::F16, ..Numerics::default() }
}

/// How far the rounding of these sides can carry a checkpoint between them, relative to it: each product before
/// it rounds its input, if at all, and adds up in f32, each attention reads a cache that may be rounded, and each
/// node rounds its output. These are independent.
fn rounding_carried(model: &Model, checkpoint: Checkpoint, sides: &[Numerics]) -> f64 {
    let square = |numerics: &Numerics| {
        let before = model.graph.nodes.iter().filter(|node| node.checkpoint <= checkpoint);
        let own = before.map(|node| match &node.op {
            Op::Linear { weight, .. } => Weight::find(&model.gguf, weight).map_or(0.0, |weight| {
                // llama.cpp on CUDA rounds as on the CPU or less.
                let products = match numerics.products {
                    Products::LlamaCuda => Products::LlamaCpu,
                    products => products,
                };
                let adding = (weight.cols() as f64).sqrt() * UNIT_F32;
                relative_unit(Rounding::of(products, weight.dtype())).powi(2) + adding.powi(2)
            }),
            Op::Attention(_) | Op::Context(_) => {
                unit_of(if numerics.flash { Storage::F16 } else { numerics.kv }).powi(2)
            }
            _ => 0.0,
        });
        own.sum::<f64>() + model.graph.nodes.len() as f64 * unit_of(numerics.storage).powi(2)
    };
    CONFIDENCE * sides.iter().map(square).sum::<f64>().sqrt()
}

fn unit_of(storage: Storage) -> f64 {
    match storage {
        Storage::F32 => UNIT_F32,
        Storage::F16 => UNIT_F16,
        Storage::Bf16 => UNIT_BF16,
    }
}

/// Rounding of a block of activations relative to its size: a quant is off by up to half a step of max/127, by
/// a step/sqrt(12) on average, and the largest of n values is at most sqrt(n) of their root mean square.
fn relative_unit(rounding: Rounding) -> f64 {
    match rounding {
        Rounding::None => 0.0,
        Rounding::F16 => UNIT_F16,
        Rounding::Bf16 => UNIT_BF16,
        Rounding::Q8_0 | Rounding::Q8_1 | Rounding::Q8K => {
            (rounding.block() as f64).sqrt() / (f64::from(QUANT_MAX) * 12f64.sqrt())
        }
    }
}

/// Rows that do not have the model's width are no match, whatever the two sides have in common.
fn refuse_other_widths(
    checkpoint: Checkpoint,
    judged: &mut Judged,
    recordings: &[&dyn Recording],
    model: &Model,
) {
    // The model's own graph knows nothing of names that a recorded graph has.
    if checkpoint.kind().is_optional() || !checkpoint.kind().is_fixed() {
        return;
    }
    let expected = model.graph.dims.width(checkpoint.kind(), 0);
    for (recording, side) in recordings.iter().zip(["candidate", "reference"]) {
        let shape = recording.row_shape(checkpoint);
        if !shape.is_empty() && shape.iter().product::<usize>() != expected {
            judged.verdict = CheckpointVerdict::Shape;
            judged.evidence =
                Some(format!("rows of {shape:?} in the {side}, the model's are {expected} wide"));
        }
    }
}

/// Judges every comparison by the audits of candidate and, where there is one, reference. A node can inherit
/// only from what it reads, however far back, in isolation only from what was not fed; and that a distance is
/// rounding, carried on, can be said only where every node that it may come from was looked at. `graph` has the
/// nodes of the candidate's audit.
fn judged(comparisons: &[Comparison], audits: &Audits, model: &Model, graph: &Graph) -> Judgement {
    let compared: BTreeMap<Checkpoint, &Comparison> = comparisons.iter().map(|c| (c.checkpoint, c)).collect();
    let fed = |input: &Checkpoint| {
        audits.isolated && compared.get(input).is_some_and(|comparison| comparison.numbers.is_some())
    };
    let mut sides: Vec<Numerics> = audits.sides.iter().map(|side| side.numerics).collect();
    sides.extend((sides.len() == 1).then(printed));
    let mut out = Judgement::default();
    let mut faulty: BTreeMap<Checkpoint, Checkpoint> = BTreeMap::new();
    let mut unseen: BTreeSet<Checkpoint> = BTreeSet::new();
    for node in &graph.nodes {
        let own = node.inputs.iter().filter(|input| !fed(input));
        let mut before = own.filter_map(|input| faulty.get(input)).min().copied();
        let mut behind_unseen = true;
        if let Some(comparison) = compared.get(&node.checkpoint) {
            let mut judged = one(comparison, audits, before);
            let bridged = judged.local.candidate.as_ref().map(|local| &local.bridged[..]);
            behind_unseen = reads_any(graph, node, bridged.unwrap_or_default(), &unseen);
            if behind_unseen && bridged.is_some() && judged.verdict == CheckpointVerdict::Match {
                let explained = rounding_carried(model, node.checkpoint, &sides);
                behind_unseen = hold_unseen(comparison, explained, &mut judged, &mut out.limit);
            }
            behind_unseen |= judged.local.candidate.is_none() && judged.verdict != CheckpointVerdict::Match;
            let healthy = matches!(judged.verdict, CheckpointVerdict::Match | CheckpointVerdict::Missing);
            before = before.or(Some(node.checkpoint).filter(|_| !healthy));
            out.judged.insert(node.checkpoint, judged);
        }
        faulty.extend(before.map(|before| (node.checkpoint, before)));
        unseen.extend(Some(node.checkpoint).filter(|checkpoint| behind_unseen && !fed(checkpoint)));
    }
    for comparison in comparisons {
        out.judged.entry(comparison.checkpoint).or_insert_with(|| one(comparison, audits, None));
    }
    out
}

/// Whether a node reads one of `unseen`, itself or through what was bridged for it.
fn reads_any(graph: &Graph, node: &Node, bridged: &[Checkpoint], unseen: &BTreeSet<Checkpoint>) -> bool {
    node.inputs.iter().any(|input| match graph.node(*input).filter(|_| bridged.contains(input)) {
        Some(between) => reads_any(graph, between, bridged, unseen),
        None => unseen.contains(input),
    })
}

/// Judges a healthy node whose distance comes from nodes that were not looked at; `limit` takes what the first
/// match of this kind rests on. Whether they stay open.
fn hold_unseen(
    comparison: &Comparison,
    explained: f64,
    judged: &mut Judged,
    limit: &mut Option<String>,
) -> bool {
    let Some(numbers) = comparison.numbers.as_ref().filter(|_| comparison.within_tolerance.is_none()) else {
        return false;
    };
    if numbers.rel_l2 == 0.0 {
        return false;
    }
    let text = format!(
        "stands {} from the reference, and rounding at the nodes before it, which were not all looked at, explains up \
         to {}",
        number(numbers.rel_l2),
        number(explained)
    );
    judged.evidence = Some(format!("its own error is rounding; it {text}"));
    let open = !(numbers.rel_l2 <= explained);
    if open {
        judged.verdict = CheckpointVerdict::Undecided;
    } else {
        limit.get_or_insert(format!("{} {text}", comparison.checkpoint));
    }
    open
}

/// One checkpoint; `faulty` is the first that is not healthy among those that it depends on.
fn one(comparison: &Comparison, audits: &Audits, faulty: Option<Checkpoint>) -> Judged {
    let side = |index: usize| audits.sides.get(index).and_then(|side| side.nodes.get(&comparison.checkpoint));
    let (candidate, reference) = (side(0), side(1));
    let evidence = Evidence {
        numbers: comparison.numbers.as_ref(),
        candidate,
        reference,
        compared: comparison.status == Status::Compared && comparison.numbers.is_some(),
        tolerated: comparison.within_tolerance,
        faulty,
    };
    // An audit of one dump compares nothing: only what it lacks is missing.
    let alone = audits.sides.len() == 1 && comparison.status == Status::Compared && comparison.seen.is_none();
    // What only the reference lacks may be wrong all the same.
    let wrong = comparison.status == Status::MissingReference
        && candidate.is_some_and(|audit| audit.as_ref().is_ok_and(|audit| !audit.is_healthy()));
    let (verdict, text) = match findings::unmeasured(comparison) {
        Some(unmeasured) if !alone && !wrong => unmeasured,
        _ => verdict::judge(&evidence),
    };
    let text = match (verdict, candidate) {
        (CheckpointVerdict::Nonfinite, Some(Ok(audit))) if audit.nonfinite_inputs => {
            format!("{} NaN or Inf; its inputs, which were not looked at, hold some already", audit.nonfinite)
        }
        (CheckpointVerdict::Beyond, None | Some(Err(_))) => "beyond the tolerance given".to_owned(),
        _ => text,
    };
    Judged {
        verdict,
        evidence: Some(text),
        local: Local { candidate: local(candidate), reference: local(reference) },
        budget: audits.budgets.get(&comparison.checkpoint).cloned(),
    }
}

fn local(node: Option<&std::result::Result<NodeAudit, Missing>>) -> Option<LocalError> {
    node.and_then(|node| node.as_ref().ok()).map(|node| node.local.clone())
}

/// Faulty nodes that are diagnosed: the later ones are mostly the same mistake in other layers.
const DIAGNOSED_MAX: usize = 4;

/// Names the mistakes in the first faulty nodes of the candidate, and says in the evidence what they are, on
/// either side.
fn name(
    judged: &mut BTreeMap<Checkpoint, Judged>,
    notes: &mut Vec<String>,
    audits: &Audits,
    recordings: &[&dyn Recording],
    model: &Model,
) -> Result<BTreeMap<Checkpoint, Diagnosed>> {
    let mut out = BTreeMap::new();
    for (side, (audit, recording)) in audits.sides.iter().zip(recordings).enumerate() {
        let recorded = recording.checkpoints();
        let graph = model.graph.fused(|checkpoint| recorded.contains(&checkpoint));
        let (numerics, recorded_unit) = (audit.numerics, audit.recorded_unit);
        let fed = recordings.get(1).copied().filter(|_| audits.isolated && side == 0);
        let context =
            Context { gguf: &model.gguf, graph: &graph, recording: *recording, numerics, recorded_unit, fed };
        for checkpoint in audit.origins().take(DIAGNOSED_MAX) {
            let node = audit.nodes.get(&checkpoint).and_then(|node| node.as_ref().ok());
            let wrong = node.map_or(&[][..], |node| &node.rows_beyond);
            let mut found = diagnose(&context, model, checkpoint, wrong)?;
            found.inputs = graph.node(checkpoint).map(|node| node.inputs.clone()).unwrap_or_default();
            let verdict = if side == 0 { CheckpointVerdict::Origin } else { CheckpointVerdict::Reference };
            if let Some((judged, best)) = judged.get_mut(&checkpoint).zip(found.diagnosis.first())
                && (judged.verdict == verdict || judged.verdict == CheckpointVerdict::Nonfinite)
            {
                *judged.evidence.get_or_insert_default() += &format!(": {} ({})", best.text, best.fault);
            }
            match found.diagnosis.first() {
                _ if side == 0 => {
                    out.insert(checkpoint, found);
                }
                Some(best) => {
                    notes.push(format!("the reference at {checkpoint}: {} ({})", best.text, best.fault))
                }
                None => {}
            }
        }
    }
    Ok(out)
}

/// A row that differs this many times more than any audited row is audited too: rows of a healthy run differ
/// from one another by a small factor, a mistake in a single row stands out.
const OUTLIER: f64 = 8.0;
/// Outlying rows that are looked at.
const OUTLIERS_MAX: usize = 4;

/// Positions outside of `audited` whose rows stand out among the differences, by the first checkpoint where
/// they do.
pub fn outliers(comparisons: &[Comparison], audited: &BTreeSet<u32>) -> BTreeMap<Checkpoint, u32> {
    let mut found: BTreeMap<Checkpoint, u32> = BTreeMap::new();
    for comparison in comparisons {
        let Some(numbers) = &comparison.numbers else { continue };
        let (known, unknown): (Vec<_>, Vec<_>) =
            numbers.row_rel_l2.iter().partition(|(position, _)| audited.contains(position));
        let largest = known.iter().fold(0.0f64, |max, (_, distance)| max.max(*distance));
        let new = unknown.iter().filter(|(position, _)| !found.values().any(|known| known == position));
        // `!(..)`, so that a NaN stands out.
        let worst = new.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, d)| !(*d <= OUTLIER * largest));
        if let Some((position, _)) = worst {
            found.insert(comparison.checkpoint, *position);
        }
        if found.len() == OUTLIERS_MAX {
            break;
        }
    }
    found
}
