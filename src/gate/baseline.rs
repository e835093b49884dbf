//! Baselines: what each case measured when somebody last accepted it, as small JSON.
//!
//! Every number is kept as the range over all accepted runs, and that range is its own noise: a run has moved
//! away where it exceeds the range by more than the range is wide, and by more than [`FACTOR`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use crate::audit::coarsest;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files;
use crate::report::Report;
use crate::report::diff::{FACTOR, FACTOR_KL, FLOOR_DISTANCE, FLOOR_KL, FLOOR_OWN, ratio};

/// Name and version of the format.
pub const SCHEMA: &str = "parity-baseline/1";

/// What a run measured, by checkpoint. Not a number where the measure was not finite.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measures {
    /// Mean KL of the tokens, nats.
    pub kl: Option<f64>,
    /// The candidate's local error, and its distance from the reference, both relative L2.
    pub checkpoints: IndexMap<Checkpoint, [Option<f64>; 2]>,
    /// What explains each, of all that was tried.
    #[serde(default)]
    pub arithmetic: IndexMap<Checkpoint, BTreeSet<String>>,
}

/// The file: one entry per case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// [`SCHEMA`].
    pub schema: String,
    /// By the id of the case.
    pub cases: BTreeMap<String, Accepted>,
}

/// What was accepted of a case.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Accepted {
    /// Number of accepted runs.
    pub runs: u32,
    /// Day of the last one, YYYY-MM-DD.
    pub date: String,
    /// Least and largest mean KL.
    pub kl: Option<[f64; 2]>,
    /// Least and largest local error, least and largest distance; null where not measured.
    pub checkpoints: IndexMap<Checkpoint, [Option<[f64; 2]>; 2]>,
    /// The arithmetic that explains each; nothing in a baseline of before this was kept.
    #[serde(default)]
    pub arithmetic: IndexMap<Checkpoint, BTreeSet<String>>,
}

/// A number that left its baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// The checkpoint; null for the KL of the tokens.
    pub checkpoint: Option<Checkpoint>,
    /// `local error`, `distance`, `KL` or `arithmetic`, which is measured by its unit roundoff.
    pub what: String,
    /// The baseline's largest value where it got worse, its least where it got better.
    pub baseline: f64,
    /// Today's.
    pub today: Option<f64>,
    /// How many times as large it is; null where today's is not finite.
    pub ratio: Option<f64>,
    /// Whether it got worse.
    pub worse: bool,
    /// The names of what explains it, in the baseline and today, where that is what moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arithmetic: Option<[String; 2]>,
}

impl Measures {
    /// What a baseline keeps of a report.
    pub fn of(report: &Report) -> Measures {
        let digits = |value: f64| format!("{value:.3e}").parse().ok().filter(|value: &f64| value.is_finite());
        let entries = report.checkpoints.iter().map(|entry| {
            let own = entry.local.candidate.as_ref().and_then(|local| digits(local.rel_l2));
            let distance = entry.numbers.as_ref().and_then(|numbers| digits(numbers.rel_l2));
            (entry.id, [own, distance])
        });
        let kl = report.tokens.as_ref().and_then(|tokens| digits(tokens.kl_mean));
        let explained = report.checkpoints.iter().filter(|entry| entry.verdict.is_healthy());
        let names = explained.filter_map(|entry| {
            let names = &entry.local.candidate.as_ref()?.arithmetic;
            (!names.is_empty()).then(|| (entry.id, names.iter().cloned().collect()))
        });
        let checkpoints = entries.filter(|(_, both)| both.iter().any(Option::is_some)).collect();
        Measures { kl, checkpoints, arithmetic: names.collect() }
    }
}

impl Baseline {
    /// Reads a baseline; one that is not there is empty, so that `--accept` can make the first.
    pub fn read(path: &Path) -> Result<Baseline> {
        if !path.exists() {
            return Ok(Baseline { schema: SCHEMA.to_owned(), cases: BTreeMap::new() });
        }
        let text = files::read(path, files::TEXT_BYTES_MAX)?;
        let baseline: Baseline =
            serde_json::from_str(&text).map_err(|e| Error::file(path, format!("is no baseline: {e}")))?;
        if baseline.schema != SCHEMA {
            return Err(Error::file(path, "another baseline format")
                .expected(SCHEMA)
                .found(&baseline.schema));
        }
        Ok(baseline)
    }

    /// The JSON, one line per checkpoint: a change of one number is a change of one line.
    pub fn render(&self) -> String {
        let mut out = format!("{{\n \"schema\": {},\n \"cases\": {{", json(&self.schema));
        for (i, (id, case)) in self.cases.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let _ = write!(
                out,
                "{comma}\n  {}: {{ \"runs\": {}, \"date\": {}, \"kl\": {}, \"checkpoints\": {{",
                json(id),
                case.runs,
                json(&case.date),
                json(&case.kl)
            );
            for (i, (checkpoint, ranges)) in case.checkpoints.iter().enumerate() {
                let comma = if i == 0 { "" } else { "," };
                let _ = write!(out, "{comma}\n   {}: {}", json(checkpoint), json(ranges));
            }
            out += " }, \"arithmetic\": {";
            for (i, (checkpoint, names)) in case.arithmetic.iter().enumerate() {
                let comma = if i == 0 { "" } else { "," };
                let _ = write!(out, "{comma}\n   {}: {}", json(checkpoint), json(names));
            }
            out += " } }";
        }
        out += " }\n}\n";
        out
    }

    /// What left the baseline of a case, in execution order; `None` where it has none.
    pub fn moved(&self, case: &str, measures: &Measures) -> Option<Vec<Moved>> {
        let accepted = self.cases.get(case)?;
        let mut moved = Vec::new();
        for (&checkpoint, ranges) in &accepted.checkpoints {
            let today = measures.checkpoints.get(&checkpoint).copied().unwrap_or_default();
            let kinds = [("local error", FLOOR_OWN), ("distance", FLOOR_DISTANCE)];
            for ((what, floor), (range, today)) in kinds.into_iter().zip(ranges.iter().zip(today)) {
                let limits = (FACTOR, floor);
                moved.extend(range.and_then(|range| leaves(Some(checkpoint), what, range, today, limits)));
            }
        }
        moved.extend(
            accepted.kl.and_then(|range| leaves(None, "KL", range, measures.kl, (FACTOR_KL, FLOOR_KL))),
        );
        forgive_distance(&mut moved);
        let known = accepted.arithmetic.iter();
        moved.extend(known.filter_map(|(id, names)| coarser(*id, names, measures.arithmetic.get(id)?)));
        Some(moved)
    }

    /// Takes a run in: its numbers widen the ranges, or replace those that they have left.
    pub fn accept(&mut self, case: &str, measures: &Measures, date: &str) {
        let moved = self.moved(case, measures).unwrap_or_default();
        let accepted = self.cases.entry(case.to_owned()).or_default();
        let left =
            |checkpoint, what: &str| moved.iter().any(|m| m.checkpoint == checkpoint && m.what == what);
        let widen = |old: Option<[f64; 2]>, today: Option<f64>, left: bool| match (old, today) {
            (Some([low, high]), Some(today)) if !left => Some([low.min(today), high.max(today)]),
            (_, today) => today.map(|today| [today, today]),
        };
        accepted.kl = widen(accepted.kl, measures.kl, left(None, "KL"));
        accepted.checkpoints = measures
            .checkpoints
            .iter()
            .map(|(&id, today)| {
                let old = accepted.checkpoints.get(&id).copied().unwrap_or_default();
                let own = widen(old[0], today[0], left(Some(id), "local error"));
                (id, [own, widen(old[1], today[1], left(Some(id), "distance"))])
            })
            .collect();
        accepted.arithmetic.clone_from(&measures.arithmetic);
        accepted.runs += 1;
        accepted.date = date.to_owned();
    }
}

/// That a checkpoint is explained by a coarser arithmetic than in its baseline, or by a finer one.
fn coarser(checkpoint: Checkpoint, old: &BTreeSet<String>, new: &BTreeSet<String>) -> Option<Moved> {
    let [(old, baseline), (new, today)] =
        [coarsest(old.iter().map(String::as_str))?, coarsest(new.iter().map(String::as_str))?];
    (baseline != today).then(|| Moved {
        checkpoint: Some(checkpoint),
        what: "arithmetic".to_owned(),
        baseline,
        today: Some(today),
        ratio: Some(today / baseline),
        worse: !(today <= baseline),
        arithmetic: Some([old.to_owned(), new.to_owned()]),
    })
}

/// A distance that grew where the local error shrank: nearer to exact arithmetic, farther from a rounded
/// reference. That is no regression.
fn forgive_distance(moved: &mut [Moved]) {
    let better: Vec<Option<Checkpoint>> =
        moved.iter().filter(|m| m.what == "local error" && !m.worse).map(|m| m.checkpoint).collect();
    for entry in moved.iter_mut().filter(|m| m.what == "distance") {
        entry.worse &= !better.contains(&entry.checkpoint);
    }
}

/// Whether today's value left its range by more than a factor; below the floor all values are alike.
fn leaves(
    checkpoint: Option<Checkpoint>,
    what: &str,
    [low, high]: [f64; 2],
    today: Option<f64>,
    (factor, floor): (f64, f64),
) -> Option<Moved> {
    let allowed = factor.max(ratio(low, high, floor));
    let make = |baseline: f64, worse: bool| Moved {
        checkpoint,
        what: what.to_owned(),
        baseline,
        today,
        ratio: today.map(|today| ratio(baseline, today, floor)),
        worse,
        arithmetic: None,
    };
    // A number that was there and is not any more has moved: it was NaN, or was not measured.
    let Some(value) = today else { return Some(make(high, true)) };
    let grown = ratio(high, value, floor);
    if grown.is_nan() || grown > allowed {
        return Some(make(high, true));
    }
    (ratio(low, value, floor) < 1.0 / allowed).then(|| make(low, false))
}

/// Texts, numbers and lists of them as one line of JSON.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}
