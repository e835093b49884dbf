//! The report as `report.csv`: one row per checkpoint. The header is stable; new columns are added at its end.

use super::{Entry, Report};
use crate::error::{Error, Result};

/// Column names, documented in `docs/report.md`.
pub const HEADER: [&str; 27] = [
    "checkpoint",
    "layer",
    "verdict",
    "n",
    "abs_err_max",
    "abs_err_mean",
    "rmse",
    "rel_l2",
    "nmse",
    "cosine",
    "sign_positive",
    "worst_index",
    "worst_candidate",
    "worst_reference",
    "nonfinite_candidate",
    "nonfinite_reference",
    "tolerance_rtol",
    "tolerance_atol",
    "local_candidate_rel_l2",
    "local_candidate_over_bound",
    "local_reference_rel_l2",
    "local_reference_over_bound",
    "part_candidate",
    "part_reference",
    "part_inherited",
    "amplification",
    "evidence",
];

/// The rows in execution order. A cell is empty where nothing was measured.
pub fn render(report: &Report) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let failed = |e: &dyn std::fmt::Display| Error::new("report.csv", format!("cannot be written: {e}"));
    writer.write_record(HEADER).map_err(|e| failed(&e))?;
    for entry in &report.checkpoints {
        writer.write_record(row(entry)).map_err(|e| failed(&e))?;
    }
    let bytes = writer.into_inner().map_err(|e| failed(&e))?;
    String::from_utf8(bytes).map_err(|e| failed(&e))
}

fn row(entry: &Entry) -> [String; HEADER.len()] {
    let numbers = entry.numbers.as_ref();
    let measure = |pick: fn(&super::Numbers) -> f64| cell(numbers.map(pick));
    let (ours, theirs) = (entry.local.candidate.as_ref(), entry.local.reference.as_ref());
    let parts = entry.parts.as_ref();
    [
        entry.id.to_string(),
        entry.layer.map(|layer| layer.to_string()).unwrap_or_default(),
        entry.verdict.name().to_owned(),
        numbers.map(|n| n.n.to_string()).unwrap_or_default(),
        measure(|n| n.abs_err_max),
        measure(|n| n.abs_err_mean),
        measure(|n| n.rmse),
        measure(|n| n.rel_l2),
        measure(|n| n.nmse),
        cell(numbers.and_then(|n| n.cosine)),
        cell(numbers.and_then(|n| n.sign_positive)),
        numbers.map(|n| coordinates(&n.worst.index)).unwrap_or_default(),
        cell(numbers.and_then(|n| n.worst.candidate)),
        cell(numbers.and_then(|n| n.worst.reference)),
        numbers.map(|n| n.nonfinite.candidate.to_string()).unwrap_or_default(),
        numbers.map(|n| n.nonfinite.reference.to_string()).unwrap_or_default(),
        cell(numbers.and_then(|n| n.tolerance_needed.rtol)),
        measure(|n| n.tolerance_needed.atol),
        cell(ours.map(|local| local.rel_l2)),
        cell(ours.map(|local| local.over_bound)),
        cell(theirs.map(|local| local.rel_l2)),
        cell(theirs.map(|local| local.over_bound)),
        cell(parts.map(|parts| parts.candidate)),
        cell(parts.map(|parts| parts.reference)),
        cell(parts.map(|parts| parts.inherited)),
        cell(parts.and_then(|parts| parts.amplification)),
        entry.evidence.clone().unwrap_or_default(),
    ]
}

/// The shortest text that reads back as the same f64.
fn cell(value: Option<f64>) -> String {
    match value.filter(|value| value.is_finite()) {
        Some(value) if value != 0.0 && !(1e-4..1e6).contains(&value.abs()) => format!("{value:e}"),
        Some(value) => value.to_string(),
        None => String::new(),
    }
}

/// `3 17`: no comma, no quotes needed.
fn coordinates(index: &[usize]) -> String {
    let words: Vec<String> = index.iter().map(ToString::to_string).collect();
    words.join(" ")
}
