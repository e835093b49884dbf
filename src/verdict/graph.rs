//! The answers for all checkpoints: what a node inherits, what it was not looked at behind, and what rounding carries.

use std::collections::{BTreeSet, HashMap, HashSet};

use indexmap::IndexMap;

use super::checkpoint::{Evidence, Source, judge as judge_one};
use super::{Judged, Judgement, Why, named};
use crate::audit::recorded::Carried;
use crate::audit::simulate::simulate;
use crate::audit::{Audits, NodeAudit};
use crate::checkpoint::Checkpoint;
use crate::compare::Comparison;
use crate::dump::{Recording, Unfinite};
use crate::error::Result;
use crate::model::Model;
use crate::model::graph::{Graph, Node};
use crate::numerics::{Numerics, Products, Storage};
use crate::report::{CheckpointVerdict, Local, LocalError};

/// Judges every comparison by the audits of candidate and, where there is one, reference: `recordings` are those of
/// the audits. Nothing where there was none: then [`by_numbers`] is all that can be said.
///
/// # Errors
/// A weight that cannot be read, where a forward pass is simulated or a mistake is looked for.
pub fn judge(
    model: &Model,
    recordings: &[&dyn Recording],
    comparisons: &[Comparison],
    audits: Option<&Audits>,
) -> Result<Judgement> {
    let Some(audits) = audits.filter(|audits| !audits.sides.is_empty()) else {
        return Ok(Judgement::default());
    };
    let known = Known {
        comparisons: comparisons.iter().map(|c| (c.checkpoint, c)).collect(),
        audits,
        recordings,
        model,
        graph: &audits.sides[0].graph,
    };
    let first = known.judge(None);
    // Only where something is open that a simulation may settle is there one.
    let open: HashSet<Checkpoint> = first.open.into_iter().filter(|_| !audits.isolated).collect();
    let mut judged = match open.is_empty() {
        true => first.judged,
        false => known.judge(Some(&known.simulated(&open)?)).judged,
    };
    for (checkpoint, judged) in &mut judged {
        judged.parts = audits.parts.get(checkpoint).cloned();
    }
    let mut judgement = Judgement {
        judged,
        notes: audits.notes(),
        rows_audited: Some(audits.rows_audited()),
        rows_screened: Some(audits.rows_screened()),
        ..Judgement::default()
    };
    named::name(&mut judgement, audits, recordings, model)?;
    Ok(judgement)
}

/// The answer that needs no evidence of exact arithmetic.
pub fn by_numbers(comparison: &Comparison) -> Judged {
    let evidence = Evidence {
        comparison,
        candidate: None,
        reference: None,
        alone: false,
        unfinite: Unfinite::default(),
        source: Source::Here,
        width: None,
        before: None,
        unseen: false,
        carried: None,
        contradicted_by: None,
    };
    let (verdict, why) = judge_one(&evidence);
    Judged { verdict, why, local: Local::default(), parts: None }
}

/// What is known of all nodes.
struct Known<'a> {
    comparisons: IndexMap<Checkpoint, &'a Comparison>,
    audits: &'a Audits,
    recordings: &'a [&'a dyn Recording],
    model: &'a Model,
    /// The nodes of the candidate's audit.
    graph: &'a Graph,
}

#[derive(Default)]
struct Answers {
    judged: IndexMap<Checkpoint, Judged>,
    /// Checkpoints that a simulation may settle.
    open: Vec<Checkpoint>,
}

impl Known<'_> {
    /// A node can inherit only from what it reads, however far back, in isolation only from what was not fed; and that
    /// a distance is rounding, carried on, can be said only where every node that it may come from was looked at.
    fn judge(&self, carried: Option<&HashMap<Checkpoint, Carried>>) -> Answers {
        let settling = carried.is_none() && !self.audits.isolated;
        let mut out = Answers::default();
        // Of each node the first one that is not healthy among those that it depends on, by its place in the graph.
        let mut faulty: HashMap<Checkpoint, usize> = HashMap::new();
        let mut unseen: HashSet<Checkpoint> = HashSet::new();
        for (place, node) in self.graph.nodes.iter().enumerate() {
            let own = node.inputs.iter().filter(|input| !self.is_fed(**input));
            let mut before: Option<usize> = own.filter_map(|input| faulty.get(input)).min().copied();
            let mut behind_unseen = true;
            if let Some(comparison) = self.comparisons.get(&node.checkpoint) {
                let audit = self.audit(0, node.checkpoint);
                let bridged = audit.map_or(&[][..], |audit| &audit.local.bridged);
                let unseen_inputs = self.reads_any(node, bridged, &unseen);
                let printed = comparison.seen.is_some();
                let carried = carried.and_then(|carried| carried.get(&node.checkpoint));
                let first = before.map(|place| self.graph.nodes[place].checkpoint);
                let judged = self.one(comparison, first, unseen_inputs || printed, carried);
                use Why::{Carried, Needs, Unseen};
                if matches!(judged.why, Carried { .. } | Needs(_) | Unseen { .. }) {
                    out.open.push(node.checkpoint);
                }
                let healthy = judged.verdict == CheckpointVerdict::Match;
                // Equal values, a tolerance and the exact forward pass settle what lies before, too.
                let equal = comparison.numbers.as_ref().is_some_and(|numbers| numbers.rel_l2 == 0.0);
                let settled =
                    healthy && (equal || matches!(judged.why, Carried { .. } | Why::Tolerance { .. }));
                behind_unseen = !settled && (unseen_inputs || audit.is_none());
                let faulty_here = !healthy && judged.verdict != CheckpointVerdict::Missing;
                // What a simulation may still settle is no fault yet.
                let waits = carried.is_none() && out.open.last() == Some(&node.checkpoint);
                before = before.or(Some(place).filter(|_| faulty_here && !(waits && settling)));
                out.judged.insert(node.checkpoint, judged);
            }
            faulty.extend(before.map(|before| (node.checkpoint, before)));
            let hidden = behind_unseen && !self.is_fed(node.checkpoint);
            unseen.extend(Some(node.checkpoint).filter(|_| hidden));
        }
        for comparison in self.comparisons.values() {
            let judge = || self.one(comparison, None, false, None);
            out.judged.entry(comparison.checkpoint).or_insert_with(judge);
        }
        out
    }

    /// One checkpoint; `before` is the first that is not healthy among those that it depends on.
    fn one(
        &self,
        comparison: &Comparison,
        before: Option<Checkpoint>,
        unseen: bool,
        carried: Option<&Carried>,
    ) -> Judged {
        let checkpoint = comparison.checkpoint;
        let side = |index: usize| self.audits.sides.get(index).and_then(|side| side.nodes.get(&checkpoint));
        let (candidate, reference) = (side(0), side(1));
        let shapes: Vec<Vec<usize>> = self.recordings.iter().map(|side| side.row_shape(checkpoint)).collect();
        let evidence = Evidence {
            comparison,
            candidate,
            reference,
            alone: self.audits.sides.len() == 1 && comparison.seen.is_none(),
            unfinite: self.unfinite(checkpoint).map_or(Unfinite::default(), |rows| rows.count),
            source: self.source(checkpoint),
            width: self.other_width(checkpoint, &shapes),
            before,
            unseen,
            carried,
            contradicted_by: self.audits.sides[0].contradicted.get(&checkpoint).copied(),
        };
        let (verdict, why) = judge_one(&evidence);
        let local = |side: Option<&std::result::Result<NodeAudit, _>>| -> Option<LocalError> {
            side.and_then(|node| node.as_ref().ok()).map(|node| node.local.clone())
        };
        let local = Local { candidate: local(candidate), reference: local(reference) };
        Judged { verdict, why, local, parts: None }
    }

    fn audit(&self, side: usize, checkpoint: Checkpoint) -> Option<&NodeAudit> {
        self.audits.sides.get(side)?.nodes.get(&checkpoint)?.as_ref().ok()
    }

    /// Whether a node read the reference's values of this checkpoint.
    fn is_fed(&self, checkpoint: Checkpoint) -> bool {
        let there = |reference: &&dyn Recording| !reference.positions(checkpoint).is_empty();
        self.audits.isolated && self.recordings.get(1).is_some_and(there)
    }

    /// Whether a node reads one of `unseen`, itself or through what was bridged for it.
    fn reads_any(&self, node: &Node, bridged: &[Checkpoint], unseen: &HashSet<Checkpoint>) -> bool {
        node.inputs.iter().any(|input| match self.graph.node(*input).filter(|_| bridged.contains(input)) {
            Some(between) => self.reads_any(between, bridged, unseen),
            None => unseen.contains(input),
        })
    }

    fn unfinite(&self, checkpoint: Checkpoint) -> Option<&crate::dump::UnfiniteRows> {
        self.audits.sides.first()?.unfinite.get(&checkpoint)
    }

    /// Where a checkpoint's NaN and Inf come from: from its inputs where every row that has some reads some.
    fn source(&self, checkpoint: Checkpoint) -> Source {
        let Some((rows, node)) = self.unfinite(checkpoint).zip(self.graph.node(checkpoint)) else {
            return Source::Here;
        };
        match rows.positions.iter().all(|position| self.reads_unfinite(node, *position)) {
            true => Source::Inputs,
            false => Source::Here,
        }
    }

    fn reads_unfinite(&self, node: &Node, position: u32) -> bool {
        node.inputs.iter().enumerate().any(|(index, input)| {
            if self.is_fed(*input) {
                let reference = self.audits.sides.get(1).and_then(|side| side.unfinite.get(input));
                return reference.is_some_and(|rows| rows.positions.contains(&position));
            }
            match self.unfinite(*input) {
                Some(rows) if node.op.reads_cache(index) => rows.positions.iter().any(|p| *p <= position),
                Some(rows) => rows.positions.contains(&position),
                // What was not recorded may hold what it read.
                None if self.recordings[0].positions(*input).is_empty() => {
                    self.graph.node(*input).is_some_and(|node| self.reads_unfinite(node, position))
                }
                None => false,
            }
        })
    }

    /// Rows that do not have the model's width are no match, whatever the two sides have in common.
    fn other_width<'b>(
        &self,
        checkpoint: Checkpoint,
        shapes: &'b [Vec<usize>],
    ) -> Option<(&'static str, &'b [usize], usize)> {
        // The model's own graph knows nothing of names that a recorded graph has.
        if checkpoint.kind().is_optional() || !checkpoint.kind().is_fixed() {
            return None;
        }
        let expected = self.model.graph.dims.width(checkpoint.kind(), 0);
        let other = |shape: &[usize]| !shape.is_empty() && shape.iter().product::<usize>() != expected;
        let sides = shapes.iter().zip(["candidate", "reference"]);
        sides.filter(|(shape, _)| other(shape)).map(|(shape, side)| (side, &shape[..], expected)).next_back()
    }

    /// Simulates what rounding carries up to `open` checkpoints.
    fn simulated(&self, open: &HashSet<Checkpoint>) -> Result<HashMap<Checkpoint, Carried>> {
        let mut sides: Vec<Numerics> = self.audits.sides.iter().map(|side| side.numerics).collect();
        sides.extend((sides.len() == 1).then(printed));
        simulate(self.model, self.recordings[0], &sides, open)
    }
}

/// The arithmetic of printed values, which do not say it.
fn printed() -> Numerics {
    Numerics { products: Products::LlamaCpu, kv: Storage::F16, ..Numerics::default() }
}

/// A row that differs this many times more than any audited row is audited too: rows of a healthy run differ
/// from one another by a small factor, a mistake in a single row stands out.
const OUTLIER: f64 = 8.0;
/// Outlying rows that are looked at.
const OUTLIERS_MAX: usize = 4;

/// Positions outside of `audited` whose rows stand out among the differences, by the first checkpoint where
/// they do.
pub fn outliers(comparisons: &[Comparison], audited: &BTreeSet<u32>) -> IndexMap<Checkpoint, u32> {
    let mut found: IndexMap<Checkpoint, u32> = IndexMap::new();
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
