//! The same run again and again: the first node whose bits differ.

use std::fs;
use std::path::Path;

use parity_dump::Dump;
use serde::Serialize;

use super::side::{Recorded, Recording, record};
use super::{Side, diff};
use crate::checkpoint::Checkpoint;
use crate::compare::{self, Tolerances};
use crate::error::{Error, Result};
use crate::jobs::bitwise::{execution_order, first_of};
use crate::ops::bound::HEALTHY;
use crate::report::Verdict;
use crate::report::words::{count, number};

/// Name and version of what is printed.
pub const SCHEMA: &str = "parity-repeat/1";

/// What came of identical runs.
#[derive(Clone, Debug, Serialize)]
pub struct Repeated {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// How many runs there were.
    pub runs: usize,
    /// The first node whose bits differ in any of them; null where none does.
    pub first: Option<Checkpoint>,
    /// Whether a run computed other tokens or failed: then equal bits of what was compared are no parity.
    pub open: bool,
    /// Every node that differs, in execution order.
    pub nodes: Vec<Node>,
    /// The answer, in sentences.
    pub answer: Vec<String>,
}

/// A node whose bits are not the same in all runs.
#[derive(Clone, Debug, Serialize)]
pub struct Node {
    /// Which.
    pub id: Checkpoint,
    /// In how many runs it is not as in the first.
    pub differs_in: usize,
    /// Positions of the rows that differ in any run.
    pub rows: Vec<u32>,
    /// ‖run - first‖ / ‖first‖ in the run that is farthest away; null where a side is not finite.
    pub rel_l2: f64,
}

impl Repeated {
    /// Equal bits are parity.
    pub fn verdict(&self) -> Verdict {
        match (self.first, self.open) {
            (Some(_), _) => Verdict::Divergence,
            (None, true) => Verdict::Undecided,
            (None, false) => Verdict::Parity,
        }
    }

    /// For people.
    pub fn render(&self) -> String {
        const SHOWN: usize = 12;
        let mut lines = match self.first {
            None if self.open => vec![format!(
                "UNDECIDED: {} are equal in every bit that all of them recorded, and did not do the same",
                count(self.runs, "run")
            )],
            None => vec![format!(
                "IDENTICAL: {} are equal in every bit that was recorded",
                count(self.runs, "run")
            )],
            Some(first) => vec![format!("DIFFERS at {first}")],
        };
        lines.extend(self.answer.iter().map(|sentence| format!("  {sentence}")));
        if !self.nodes.is_empty() {
            lines.push(String::new());
            lines.push(format!("{:<26}{:<12}{:<10}rows", "checkpoint", "differs in", "rel L2"));
        }
        for node in self.nodes.iter().take(SHOWN) {
            let rows: Vec<String> = node.rows.iter().take(8).map(ToString::to_string).collect();
            let more = if node.rows.len() > rows.len() { " …" } else { "" };
            let runs = format!("{} of {}", node.differs_in, self.runs - 1);
            let id = node.id.to_string();
            lines.push(format!("{id:<26}{runs:<12}{:<10}{}{more}", number(node.rel_l2), rows.join(" ")));
        }
        if self.nodes.len() > SHOWN {
            lines.push(format!("… {} more", self.nodes.len() - SHOWN));
        }
        lines.join("\n") + "\n"
    }
}

/// Where the runs of one command differ from the first of them.
struct Found {
    /// In the order of execution, from the first run's graphs.
    order: Vec<Checkpoint>,
    nodes: Vec<Node>,
    /// The first node that differs in each run that does.
    firsts: Vec<Checkpoint>,
    /// The first run that differs.
    kept: Option<Recorded>,
    /// Sentences on runs that computed other tokens, or failed.
    open: Vec<String>,
}

/// Records a command so many times, each with the first run's tokens, and compares the bits.
///
/// # Errors
/// A program that cannot be recorded, fewer than two runs.
pub fn repeat(side: &Side, runs: usize, how: &Recording<'_>, judged: &diff::Options) -> Result<Repeated> {
    if runs < 2 {
        return Err(Error::new("--repeat", format!("{runs} run is nothing to compare")).expected("2 or more"));
    }
    let named = |run: usize| Side { name: format!("run{run}"), ..side.clone() };
    let first = record(&named(1), how, None)?;
    let reference = Dump::open(&first.dir)?;
    let order = execution_order(&reference)?;
    let mut found = Found { order, nodes: Vec::new(), firsts: Vec::new(), kept: None, open: Vec::new() };
    found.open.extend(ended(&first, &reference));
    for run in 2..=runs {
        let again = record(&named(run), how, Some(&first.forced()))?;
        found.add(&again, &reference)?;
        let is_kept = found.kept.as_ref().is_some_and(|kept| kept.dir == again.dir);
        if !is_kept {
            remove(&again.dir)?;
        }
    }
    let place = |id: &Checkpoint| found.order.iter().position(|known| known == id);
    found.nodes.sort_by_key(|node| place(&node.id));
    let earliest = found.firsts.iter().min_by_key(|id| place(id)).copied();
    let mut answer = std::mem::take(&mut found.open);
    let open = !answer.is_empty();
    if let (Some(id), Some(kept)) = (earliest, &found.kept) {
        answer.push(how_often(&found, id, runs));
        answer.push(explained(&first, kept, id, judged)?);
    }
    Ok(Repeated { schema: SCHEMA, runs, first: earliest, open, nodes: found.nodes, answer })
}

impl Found {
    /// What a run did otherwise than the first, or did not do: its bits say nothing of what is not there.
    fn note_other_work(&mut self, again: &Recorded, candidate: &Dump, reference: &Dump) {
        let name = &again.name;
        let (ours, theirs) = (candidate.tokens(), reference.tokens());
        let common = compare::common_positions(ours, theirs) as usize;
        if common < ours.len().max(theirs.len()) {
            self.open.push(format!(
                "{name} computed other tokens than run1: the first {common} of {} and {} are the same",
                ours.len(),
                theirs.len()
            ));
        }
        self.open.extend(ended(again, candidate));
    }

    /// What a further run differs in.
    fn add(&mut self, again: &Recorded, reference: &Dump) -> Result<()> {
        let candidate = Dump::open(&again.dir)?;
        self.note_other_work(again, &candidate, reference);
        let all = compare::bits::all(&candidate, reference, &self.order);
        let Some((first, _)) = first_of(&all, reference) else { return Ok(()) };
        self.firsts.push(first);
        self.kept.get_or_insert_with(|| again.clone());
        let ids: Vec<Checkpoint> =
            all.iter().filter(|(_, found)| !found.rows.is_empty()).map(|(id, _)| *id).collect();
        let numbers = compare::dumps(&candidate, reference, &ids, &Tolerances::default());
        for (id, found) in all.iter().filter(|(_, found)| !found.rows.is_empty()) {
            let comparison = numbers.iter().find(|comparison| comparison.checkpoint == *id);
            let rel_l2 = comparison.and_then(|c| c.numbers.as_ref()).map_or(f64::NAN, |n| n.rel_l2);
            let known = self.nodes.iter().position(|node| node.id == *id);
            let at = known.unwrap_or_else(|| {
                self.nodes.push(Node { id: *id, differs_in: 0, rows: Vec::new(), rel_l2: 0.0 });
                self.nodes.len() - 1
            });
            let node = &mut self.nodes[at];
            node.differs_in += 1;
            node.rows.extend(&found.rows);
            node.rows.sort_unstable();
            node.rows.dedup();
            // NaN stays.
            node.rel_l2 = if node.rel_l2 >= rel_l2 || node.rel_l2.is_nan() { node.rel_l2 } else { rel_l2 };
        }
        Ok(())
    }
}

/// That a run did not come to its end.
pub(super) fn ended(run: &Recorded, dump: &Dump) -> Option<String> {
    let failed = run.failed.as_ref().map(|how| format!("the program of {} ended with {how}", run.name));
    let stopped =
        || (!dump.manifest().is_whole()).then(|| format!("the recording of {} is cut short", run.name));
    failed.or_else(stopped)
}

/// In how many runs a node is the first to differ.
fn how_often(found: &Found, id: Checkpoint, runs: usize) -> String {
    let first = found.firsts.iter().filter(|first| **first == id).count();
    let rows = found.nodes.iter().find(|node| node.id == id).map_or(0, |node| node.rows.len());
    format!(
        "{} of {} differ from the first run; {id} is the first node to differ in {first} of them, in {}",
        found.firsts.len(),
        count(runs - 1, "further run"),
        count(rows, "row")
    )
}

/// Whether rounding explains the size of what a run differs by.
fn explained(first: &Recorded, other: &Recorded, id: Checkpoint, judged: &diff::Options) -> Result<String> {
    let file = first.file()?;
    let [mut candidate, mut reference] = [Dump::open(&other.dir)?, Dump::open(&first.dir)?];
    let report = diff::diff(&mut candidate, &mut reference, Some(&file), judged)?;
    let entry = report.checkpoints.iter().find(|entry| entry.id == id);
    let locals = entry.map(|entry| [&entry.local.reference, &entry.local.candidate]);
    let over = locals.map(|locals| locals.map(|local| local.as_ref().map(|local| local.over_bound)));
    // What a step begins with is no node's result: both runs may go on rightly from it.
    if let Some(gap) = report.gaps.first() {
        return Ok(format!("whether rounding explains the size is not known: {gap}"));
    }
    Ok(match over {
        Some([Some(a), Some(b)]) if a <= HEALTHY && b <= HEALTHY => {
            "rounding explains the size: both runs compute the node rightly, in an order of sums that changes from run to run \
             (threads, atomics, a kernel that is chosen anew)"
                .to_owned()
        }
        Some([a, b]) if a.is_some() || b.is_some() => {
            let told = |over: Option<f64>| over.map_or_else(|| "not judged".to_owned(), number);
            format!(
                "rounding does not explain it: the node's error over its bound is {} in run1 and {} in {}: a race, or a value \
                 that nobody wrote",
                told(a),
                told(b),
                other.name
            )
        }
        _ => format!("whether rounding explains it is not known: {id} was not judged"),
    })
}

/// Removes a run that was equal to the first.
fn remove(dir: &Path) -> Result<()> {
    fs::remove_dir_all(dir).map_err(|e| Error::file(dir, format!("cannot be removed: {e}")))
}
