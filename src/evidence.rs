//! From audits to answers: what exact arithmetic says of each compared checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use crate::audit::verdict::{self, Evidence};
use crate::audit::{Audits, Context, Missing, NodeAudit};
use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, Status};
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::diagnose::{Diagnosed, diagnose};
use crate::findings::{self, Judged, Judgement};
use crate::model::Model;
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
    let mut judged = judged(comparisons, audits);
    let mut notes = audits.notes();
    let named = name(&mut judged, &mut notes, audits, recordings, model)?;
    Ok(Judgement { judged, named, notes, rows_audited: Some(audits.rows_audited()) })
}

/// Judges every comparison by the audits of candidate and, where there is one, reference.
fn judged(comparisons: &[Comparison], audits: &Audits) -> BTreeMap<Checkpoint, Judged> {
    let mut out = BTreeMap::new();
    let mut faulty: Option<Checkpoint> = None;
    for comparison in comparisons {
        let judged = one(comparison, audits, faulty);
        let healthy = matches!(judged.verdict, CheckpointVerdict::Match | CheckpointVerdict::Missing);
        if faulty.is_none() && !healthy {
            faulty = Some(comparison.checkpoint);
        }
        out.insert(comparison.checkpoint, judged);
    }
    out
}

/// One checkpoint; `faulty` is the first before it that is not healthy.
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
    let alone = audits.sides.len() == 1 && comparison.status == Status::Compared;
    let (verdict, text) = match findings::unmeasured(comparison) {
        Some(unmeasured) if !alone => unmeasured,
        _ => verdict::judge(&evidence),
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
