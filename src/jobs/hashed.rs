//! Two recordings of hashes: the first node whose bits differ, and no verdict on what that means.

use std::collections::HashMap;

use indexmap::IndexMap;
use parity_dump::Dump;
use parity_dump::hashes::HashedRow;
use parity_graph::label;

use super::diff::Options;
use super::{notes_of, path_of, tokens_of};
use crate::checkpoint::Checkpoint;
use crate::compare::common_positions;
use crate::dump::Graphs;
use crate::error::{Error, Result};
use crate::report::words::{count, number};
use crate::report::{Bits, CheckpointVerdict, Coverage, Entry, FirstDivergence, Local, Report, Verdict};
use crate::verdict::{self, Gap, refuse_gaps};

/// The rows of a checkpoint, by position, with the step that computed each.
type Rows = HashMap<u32, (usize, HashedRow)>;

/// Compares the hashes of two recordings.
///
/// # Errors
/// A side that holds values, hashes that cannot be read.
pub fn diff(candidate: &Dump, reference: &Dump, options: &Options) -> Result<Report> {
    if let Some(values) = [candidate, reference].into_iter().find(|dump| !dump.is_hashed()) {
        return Err(Error::file(values.path(), "holds values, and the other side hashes alone")
            .expected("two recordings of hashes, or two of values")
            .hint("record both in one way: parity record with --hash, or without it"));
    }
    let (ours, theirs) = (rows_of(candidate)?, rows_of(reference)?);
    let common = common_positions(tokens_of(candidate), tokens_of(reference));
    let order = order(reference, &theirs)?;
    let mut report = Report {
        candidate: verdict::side(candidate, path_of(candidate)),
        reference: Some(verdict::side(reference, path_of(reference))),
        ..Report::default()
    };
    let selected = options.selection.among(order.iter().copied());
    // The step and the place in it of the first difference.
    let mut first: Option<(usize, Checkpoint, String)> = None;
    for id in selected {
        let (Some(a), Some(b)) = (ours.get(&id), theirs.get(&id)) else {
            report.coverage.checkpoints_missing += 1;
            report.checkpoints.push(entry(id, CheckpointVerdict::Missing, None));
            continue;
        };
        let (bits, differs) = compare(a, b, common);
        add(&mut report.coverage, a, b, common);
        let mut entry = entry(id, CheckpointVerdict::Match, Some(bits));
        if let Some((step, text)) = differs {
            (entry.verdict, entry.evidence) = (CheckpointVerdict::Undecided, Some(text.clone()));
            if first.as_ref().is_none_or(|(earliest, ..)| step < *earliest) {
                first = Some((step, id, text));
            }
        }
        report.checkpoints.push(entry);
    }
    judge(&mut report, first, options.bitwise);
    report.notes.extend(notes_of(candidate, "candidate"));
    report.notes.extend(notes_of(reference, "reference"));
    let gaps: Vec<Gap> = verdict::gaps(tokens_of(candidate), tokens_of(reference))
        .into_iter()
        .chain(Gap::of_end("candidate", candidate))
        .chain(Gap::of_end("reference", reference))
        .chain(Gap::of_contexts(candidate, reference))
        .collect();
    refuse_gaps(&mut report, &gaps, options.allow_missing);
    Ok(report)
}

fn judge(report: &mut Report, first: Option<(usize, Checkpoint, String)>, bitwise: bool) {
    let missing = report.coverage.checkpoints_missing;
    match first {
        None if report.coverage.rows_compared == 0 => report.reason = Some("nothing was compared".to_owned()),
        None if missing > 0 => {
            report.reason = Some(format!("{} missing on a side", count(missing, "checkpoint")));
        }
        None => {
            report.verdict = Verdict::Parity;
            report.reason = Some(format!(
                "the hashes of all {} are equal: so are the bits",
                count(report.checkpoints.len(), "checkpoint")
            ));
        }
        Some((_, id, text)) if bitwise => {
            if let Some(entry) = report.checkpoints.iter_mut().find(|entry| entry.id == id) {
                entry.verdict = CheckpointVerdict::Bits;
            }
            let first = FirstDivergence::at(id, CheckpointVerdict::Bits);
            report.diverge(FirstDivergence { residual: Some(text), ..first });
        }
        Some((_, id, text)) => {
            report.reason = Some(format!(
                "{id} is the first node to differ: {text}; whether rounding explains it, values say: record both sides \
                 without --hash, or with --checkpoint '{id}'"
            ));
        }
    }
}

fn entry(id: Checkpoint, verdict: CheckpointVerdict, bits: Option<Bits>) -> Entry {
    Entry {
        id,
        layer: id.layer_index(),
        verdict,
        evidence: None,
        numbers: None,
        local: Local::default(),
        parts: None,
        diagnosis: Vec::new(),
        shape: Vec::new(),
        seen: None,
        bits,
        op: None,
        inputs: Vec::new(),
    }
}

/// The rows of every checkpoint of a dump; where a position was computed twice the later row counts.
fn rows_of(dump: &Dump) -> Result<IndexMap<Checkpoint, Rows>> {
    let mut all: IndexMap<Checkpoint, Rows> = IndexMap::new();
    for step in 0..dump.manifest().steps.len() {
        for hashed in dump.hashes(step)? {
            let rows = all.entry(hashed.id).or_default();
            rows.extend(hashed.rows.into_iter().filter_map(|row| Some((row.position?, (step, row)))));
        }
    }
    Ok(all)
}

/// The checkpoints in the order in which a dump's graphs compute them.
fn order(dump: &Dump, recorded: &IndexMap<Checkpoint, Rows>) -> Result<Vec<Checkpoint>> {
    let mut order: Vec<Checkpoint> = Vec::new();
    let mut take = |id: Checkpoint| {
        if recorded.contains_key(&id) && !order.contains(&id) {
            order.push(id);
        }
    };
    for graph in Graphs::read(dump)?.all() {
        let labels = label::labels(graph);
        graph.computed().filter_map(|id| labels[id]).for_each(&mut take);
    }
    recorded.keys().copied().for_each(&mut take);
    Ok(order)
}

fn add(coverage: &mut Coverage, a: &Rows, b: &Rows, common: u32) {
    let both = |position: &&u32| **position < common && b.contains_key(*position);
    coverage.checkpoints_compared += 1;
    coverage.rows_compared += a.keys().filter(both).count() as u64;
    coverage.rows_expected += b.keys().filter(|position| **position < common).count() as u64;
}

/// Whether rows have equal hashes; where they do not, the step of the first and what its norms tell.
fn compare(a: &Rows, b: &Rows, common: u32) -> (Bits, Option<(usize, String)>) {
    let mut differing: Vec<u32> = a
        .iter()
        .filter(|(position, (_, row))| {
            **position < common && b.get(*position).is_some_and(|(_, other)| other.hash != row.hash)
        })
        .map(|(position, _)| *position)
        .collect();
    differing.sort_unstable();
    let (equal, first_row) = (differing.is_empty(), differing.first().copied());
    let bits = Bits { equal, first_row, elements: equal.then_some(0) };
    let text = differing.first().and_then(|position| {
        let ((_, ours), (step, theirs)) = (a.get(position)?, b.get(position)?);
        let norms = match ours.norm.zip(theirs.norm) {
            Some((a, b)) => format!("norms {} and {}", number(a), number(b)),
            None => format!("{} and {} values are NaN or Inf", ours.nonfinite, theirs.nonfinite),
        };
        Some((*step, format!("{}, the first at position {position}, {norms}", count(differing.len(), "row"))))
    });
    (bits, text)
}
