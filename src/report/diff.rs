//! Did parity get better or worse between two reports? `parity diff-reports OLD NEW`.

use std::fmt::Write;

use indexmap::{IndexMap, IndexSet};

use globset::GlobSet;
use serde::Serialize;

use super::words::{self, number};
use super::{CheckpointVerdict, Entry, Report};
use crate::checkpoint::Checkpoint;

/// Unit roundoff of f32.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;
/// One correct rounding to f32: local errors below are one noise, whatever the order of the sums behind them.
pub const FLOOR_OWN: f64 = UNIT / 2.0;
/// Two correct roundings of one value lie up to a unit apart.
pub const FLOOR_DISTANCE: f64 = UNIT;
/// Divergences of distributions grow with the square of the logits' errors; an error of one unit in logits of
/// magnitude 32 is noise.
pub const FLOOR_KL: f64 = (UNIT * 32.0) * (UNIT * 32.0);
/// Another order of summation easily doubles a rounding error; more than that is a change of what is computed.
pub const FACTOR: f64 = 2.0;
/// The same of the KL divergence, which is of second order in the difference of the logits.
pub const FACTOR_KL: f64 = FACTOR * FACTOR;

/// `new / old` of two errors, both raised to `floor`. NaN where one of them is.
pub fn ratio(old: f64, new: f64, floor: f64) -> f64 {
    let raised = |value: f64| if value < floor { floor } else { value };
    raised(new) / raised(old)
}

/// What changed from one report to the next.
#[derive(Clone, Debug, Serialize)]
pub struct ReportDiff {
    /// Verdicts of the old and the new report.
    pub verdicts: [&'static str; 2],
    /// Changes, in execution order.
    pub changes: Vec<Change>,
    /// Whether anything that was not declared got worse.
    pub worse: bool,
}

/// One checkpoint's change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// What of it changed: `verdict`, `local error`, `distance`, `coverage`.
    pub what: &'static str,
    /// As it was.
    pub old: String,
    /// As it is.
    pub new: String,
    /// The direction.
    pub direction: Direction,
}

/// Which way a change goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Parity got better.
    Better,
    /// Parity got worse.
    Worse,
    /// It got worse, and somebody said that it may.
    Declared,
}

/// Holds two reports against each other; checkpoints that match `allowed` may get worse.
pub fn diff(old: &Report, new: &Report, allowed: &GlobSet) -> ReportDiff {
    let by_id = |report: &'_ Report| -> IndexMap<Checkpoint, Entry> {
        report.checkpoints.iter().map(|entry| (entry.id, entry.clone())).collect()
    };
    let (before, after) = (by_id(old), by_id(new));
    let ids: IndexSet<Checkpoint> = before.keys().chain(after.keys()).copied().collect();
    let mut changes: Vec<Change> = Vec::new();
    for id in ids {
        changes.extend(match (before.get(&id), after.get(&id)) {
            (Some(old), Some(new)) => entry_changes(old, new),
            (Some(old), None) => vec![change(id, "coverage", old.verdict.name(), "not there", false)],
            (None, Some(new)) => vec![change(id, "coverage", "not there", new.verdict.name(), true)],
            (None, None) => Vec::new(),
        });
    }
    for change in &mut changes {
        if change.direction == Direction::Worse && allowed.is_match(change.checkpoint.to_string()) {
            change.direction = Direction::Declared;
        }
    }
    let overall = new.verdict.exit_code() > old.verdict.exit_code() && allowed.is_empty();
    let worse = overall || changes.iter().any(|change| change.direction == Direction::Worse);
    ReportDiff { verdicts: [old.verdict.name(), new.verdict.name()], changes, worse }
}

fn change(checkpoint: Checkpoint, what: &'static str, old: &str, new: &str, better: bool) -> Change {
    let direction = if better { Direction::Better } else { Direction::Worse };
    Change { checkpoint, what, old: old.to_owned(), new: new.to_owned(), direction }
}

fn entry_changes(old: &Entry, new: &Entry) -> Vec<Change> {
    let mut changes = Vec::new();
    if rank(old.verdict) != rank(new.verdict) {
        let better = rank(new.verdict) < rank(old.verdict);
        changes.push(change(new.id, "verdict", old.verdict.name(), new.verdict.name(), better));
    }
    let own = |entry: &Entry| entry.local.candidate.as_ref().map(|local| local.rel_l2);
    let moved_own = moved(own(old), own(new), FLOOR_OWN);
    let distance = |entry: &Entry| entry.numbers.as_ref().map(|numbers| numbers.rel_l2);
    let moved_distance = moved(distance(old), distance(new), FLOOR_DISTANCE);
    for (what, values) in [("local error", moved_own), ("distance", moved_distance)] {
        let Some((before, after, better)) = values else { continue };
        // Nearer to exact arithmetic and therefore farther from a rounded reference: that is no regression.
        let explained = what == "distance" && moved_own.is_some_and(|(_, _, better)| better);
        changes.push(change(new.id, what, &number(before), &number(after), better || explained));
    }
    changes
}

/// Both values and whether the new one is better, where they differ by more than rounding may.
fn moved(old: Option<f64>, new: Option<f64>, floor: f64) -> Option<(f64, f64, bool)> {
    let (old, new) = (old?, new?);
    let ratio = ratio(old, new, floor);
    let same = (1.0 / FACTOR..=FACTOR).contains(&ratio) || (old.is_nan() && new.is_nan());
    (!same).then_some((old, new, ratio < 1.0))
}

/// How bad a verdict is. Healthy nodes are all alike: what they inherit is another node's business.
fn rank(verdict: CheckpointVerdict) -> u8 {
    match verdict {
        CheckpointVerdict::Match | CheckpointVerdict::Inherited => 0,
        CheckpointVerdict::Undecided | CheckpointVerdict::Precision => 1,
        CheckpointVerdict::Missing => 2,
        CheckpointVerdict::Reference => 3,
        CheckpointVerdict::Beyond | CheckpointVerdict::Bits => 4,
        CheckpointVerdict::Origin | CheckpointVerdict::Shape => 5,
        CheckpointVerdict::Nonfinite => 6,
    }
}

impl ReportDiff {
    /// The first checkpoint that got worse.
    pub fn first_worse(&self) -> Option<&Change> {
        self.changes.iter().find(|change| change.direction == Direction::Worse)
    }
}

/// Lines of changes that are shown of each direction.
const SHOWN: usize = 12;

/// The answer as text.
pub fn render(diff: &ReportDiff) -> String {
    let mut out = String::new();
    let [old, new] = diff.verdicts;
    let answer = match (diff.first_worse(), diff.worse) {
        (Some(first), _) => {
            format!("WORSE, first at {}: {} {} -> {}", first.checkpoint, first.what, first.old, first.new)
        }
        (None, true) => "WORSE".to_owned(),
        (None, false) if diff.changes.iter().any(|c| c.direction == Direction::Better) => "BETTER".to_owned(),
        (None, false) => "SAME".to_owned(),
    };
    let _ = writeln!(out, "{answer}\n  verdict {old} -> {new}");
    for (direction, title) in [
        (Direction::Worse, "worse"),
        (Direction::Declared, "worse, as declared"),
        (Direction::Better, "better"),
    ] {
        let those: Vec<&Change> =
            diff.changes.iter().filter(|change| change.direction == direction).collect();
        if those.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{title}: {}", words::count(those.len(), "change"));
        for change in those.iter().take(SHOWN) {
            let id = change.checkpoint.to_string();
            let _ = writeln!(out, "  {id:<22}{:<10}  {} -> {}", change.what, change.old, change.new);
        }
        if those.len() > SHOWN {
            let _ = writeln!(out, "  … {} more", those.len() - SHOWN);
        }
    }
    out
}
