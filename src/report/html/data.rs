//! What the page's script draws the selected checkpoint from: short names, four digits.

use std::collections::{BTreeMap, HashMap};

use serde::{Serialize, Serializer};

use crate::checkpoint::Checkpoint;
use crate::report::detail::Detail;
use crate::report::{CheckpointVerdict, Entry, LocalError, Report};

/// The `<script type="application/json">` of the page.
#[derive(Serialize)]
pub struct Data<'a> {
    first: Option<String>,
    meanings: BTreeMap<&'static str, &'static str>,
    checkpoints: Vec<Item<'a>>,
}

#[derive(Serialize)]
struct Item<'a> {
    id: Checkpoint,
    verdict: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    evidence: Option<&'a str>,
    shape: &'a [usize],
    #[serde(skip_serializing_if = "Option::is_none")]
    numbers: Option<Measures<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    candidate: Option<Local<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<Local<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<[Digits; 3]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    amplification: Option<Digits>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a Detail>,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<&'a str>,
    /// Places in the list of checkpoints.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    inputs: Vec<usize>,
}

#[derive(Serialize)]
struct Measures<'a> {
    n: u64,
    max: Digits,
    mean: Digits,
    rmse: Digits,
    rel_l2: Digits,
    cosine: Option<f64>,
    sign: Option<Digits>,
    at: &'a [usize],
    a: Option<Digits>,
    b: Option<Digits>,
    nonfinite: [u64; 2],
    rtol: Option<Digits>,
    atol: Digits,
}

#[derive(Serialize)]
struct Local<'a> {
    rel_l2: Digits,
    over_bound: Digits,
    #[serde(skip_serializing_if = "Option::is_none")]
    plain: Option<Digits>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<Digits>,
    #[serde(skip_serializing_if = "<[usize]>::is_empty")]
    at: &'a [usize],
    /// What was recorded at that element, and what exact arithmetic has.
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<[f64; 2]>,
}

/// A number of four significant digits; what JSON cannot hold is a word.
struct Digits(f64);

impl Serialize for Digits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rounded: f64 = format!("{:.3e}", self.0).parse().unwrap_or(self.0);
        if rounded.is_finite() { serializer.serialize_f64(rounded) } else { serializer.collect_str(&rounded) }
    }
}

/// Gathers the data; `report.details` supplies the pictures.
pub fn data(report: &Report) -> Data<'_> {
    let details: HashMap<Checkpoint, &Detail> = report.details.iter().map(|d| (d.checkpoint, d)).collect();
    let first = report.first_divergence.as_ref().map(|first| first.checkpoint);
    let loudest = || report.checkpoints.iter().max_by(|a, b| loudness(a).total_cmp(&loudness(b)));
    let places: HashMap<Checkpoint, usize> =
        report.checkpoints.iter().enumerate().map(|(place, entry)| (entry.id, place)).collect();
    Data {
        first: first.or_else(|| loudest().map(|entry| entry.id)).map(|id| id.to_string()),
        meanings: CheckpointVerdict::ALL.iter().map(|v| (v.name(), v.meaning())).collect(),
        checkpoints: report
            .checkpoints
            .iter()
            .map(|entry| item(entry, details.get(&entry.id).copied(), &places))
            .collect(),
    }
}

/// Which checkpoint is worth a look where nothing diverges.
fn loudness(entry: &Entry) -> f64 {
    entry.local.candidate.as_ref().map(|local| local.over_bound).unwrap_or(-1.0)
}

fn item<'a>(entry: &'a Entry, detail: Option<&'a Detail>, places: &HashMap<Checkpoint, usize>) -> Item<'a> {
    Item {
        id: entry.id,
        verdict: entry.verdict.name(),
        evidence: entry.evidence.as_deref(),
        shape: &entry.shape,
        numbers: entry.numbers.as_ref().map(|n| Measures {
            n: n.n,
            max: Digits(n.abs_err_max),
            mean: Digits(n.abs_err_mean),
            rmse: Digits(n.rmse),
            rel_l2: Digits(n.rel_l2),
            cosine: n.cosine,
            sign: n.sign_positive.map(Digits),
            at: &n.worst.index,
            a: n.worst.candidate.map(Digits),
            b: n.worst.reference.map(Digits),
            nonfinite: [n.nonfinite.candidate, n.nonfinite.reference],
            rtol: n.tolerance_needed.rtol.map(Digits),
            atol: Digits(n.tolerance_needed.atol),
        }),
        candidate: entry.local.candidate.as_ref().map(local),
        reference: entry.local.reference.as_ref().map(local),
        parts: entry.parts.as_ref().map(|b| [Digits(b.candidate), Digits(b.reference), Digits(b.inherited)]),
        amplification: entry.parts.as_ref().and_then(|b| b.amplification).map(Digits),
        detail,
        op: entry.op.as_deref(),
        inputs: entry.inputs.iter().filter_map(|id| places.get(id).copied()).collect(),
    }
}

fn local(local: &LocalError) -> Local<'_> {
    Local {
        rel_l2: Digits(local.rel_l2),
        over_bound: Digits(local.over_bound),
        plain: local.rel_l2_plain.map(Digits),
        bound: local.bound_rel_l2.map(Digits),
        at: &local.worst,
        values: local.worst_recorded.zip(local.worst_exact).map(Into::into),
    }
}
