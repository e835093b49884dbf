//! Exact arithmetic decides what is rounding and what is a bug.
//!
//! Every node whose inputs a recording holds is computed again in f64 from those inputs, with the model's own
//! weights, and held against the recorded output: the local error. What rounding explains of it follows from
//! the arithmetic that the producer declares ([`bounds`]).

mod attention;
pub mod bounds;
mod bridge;
pub mod budget;
pub mod case;
pub mod declared;
pub mod judge;
mod linear;
pub mod local;
pub mod recorded;
pub mod rows;
mod screen;
pub mod verdict;

use std::collections::BTreeMap;
use std::ops::Range;

use rayon::prelude::*;

use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::graph::{Graph, Node, Op};
use crate::model::weights::Weight;
use crate::numerics::Numerics;
use crate::report::Budget;
use crate::tensor::Matrix;

pub use case::{Case, Context, Missing};
pub use local::NodeAudit;
pub use rows::AuditRows;

/// What is audited.
pub struct Options<'a> {
    /// Positions of the token rows: see [`AuditRows::positions`].
    pub positions: &'a [u32],
    /// Checkpoints.
    pub wants: &'a (dyn Fn(Checkpoint) -> bool + Sync),
    /// Whether the first recording was made in isolation: from the second one's values.
    pub isolated: bool,
}

/// One recording against exact arithmetic.
#[derive(Clone, Debug)]
pub struct Audit {
    /// The arithmetic it is judged by.
    pub numerics: Numerics,
    /// A sentence where that was not declared.
    pub inferred: Option<String>,
    /// See [`Context::recorded_unit`].
    pub recorded_unit: f64,
    /// Positions that were sampled.
    pub positions: Vec<u32>,
    /// Rows that were screened besides, over all nodes: see [`screen`].
    pub screened: u64,
    /// What was found at each node that the recording has the output of.
    pub nodes: BTreeMap<Checkpoint, std::result::Result<NodeAudit, Missing>>,
}

impl Audit {
    /// Nodes whose error is more than rounding, in execution order.
    pub fn origins(&self) -> impl Iterator<Item = Checkpoint> + '_ {
        let faulty =
            |node: &std::result::Result<NodeAudit, Missing>| node.as_ref().is_ok_and(|n| !n.is_healthy());
        self.nodes.iter().filter(move |(_, node)| faulty(node)).map(|(checkpoint, _)| *checkpoint)
    }

    /// Adds what was found at other rows: of each node the worse finding counts.
    fn merge(&mut self, other: Audit) {
        for (checkpoint, node) in other.nodes {
            let faulty = node.as_ref().is_ok_and(|node| !node.is_healthy());
            let better = match self.nodes.get(&checkpoint) {
                None => node.is_ok(),
                Some(Ok(known)) => faulty && known.is_healthy(),
                Some(Err(_)) => faulty,
            };
            if better {
                self.nodes.insert(checkpoint, node);
            }
        }
    }

    /// Token rows whose local error was computed, over all nodes.
    pub fn rows_audited(&self) -> u64 {
        self.nodes.values().filter_map(|node| node.as_ref().ok()).map(|node| node.local.rows).sum()
    }
}

/// Audits of one recording, or of a candidate and a reference, and where their distance comes from.
pub struct Audits {
    /// In the order of the recordings.
    pub sides: Vec<Audit>,
    /// Of each checkpoint whose nodes could be computed on both sides at the same rows.
    pub budgets: BTreeMap<Checkpoint, Budget>,
    /// See [`Options::isolated`].
    pub isolated: bool,
}

impl Audits {
    /// Positions at which an output of the first side is beyond what rounding explains.
    pub fn rows_beyond(&self) -> Vec<u32> {
        let nodes = self.sides.first().into_iter().flat_map(|side| side.nodes.values());
        nodes
            .filter_map(|node| node.as_ref().ok())
            .flat_map(|node| node.rows_beyond.iter().copied())
            .collect()
    }

    /// Adds what was found at other rows: of each node the worse finding counts.
    pub fn merge(&mut self, other: Audits) {
        self.sides.iter_mut().zip(other.sides).for_each(|(side, other)| side.merge(other));
    }

    /// Token rows that were screened, over all nodes and sides.
    pub fn rows_screened(&self) -> u64 {
        self.sides.iter().map(|side| side.screened).sum()
    }

    /// Token rows whose local error was computed, over all nodes and sides.
    pub fn rows_audited(&self) -> u64 {
        self.sides.iter().map(Audit::rows_audited).sum()
    }

    /// What a reader must know of the sides' arithmetic.
    pub fn notes(&self) -> Vec<String> {
        let names = ["candidate", "reference"];
        let inferred =
            self.sides.iter().zip(names).filter_map(|(side, name)| Some((name, side.inferred.as_ref()?)));
        inferred.map(|(name, sentence)| format!("{name}: {sentence}")).collect()
    }
}

/// Audits recordings of one model. Products with the same weight share its decoding.
///
/// # Errors
/// A weight that cannot be read, or inputs that do not have the model's shape. What a recording lacks is no
/// error: the node is [`Missing`] what would be needed.
pub fn audit(
    recordings: &[&dyn Recording],
    gguf: &Gguf,
    graph: &Graph,
    options: &Options<'_>,
) -> Result<Audits> {
    let mut sides: Vec<Side<'_>> =
        recordings.iter().map(|recording| Side::new(*recording, graph, options.positions)).collect();
    if options.isolated
        && let [candidate, reference] = &mut sides[..]
    {
        candidate.fed = Some(reference.recording);
    }
    let budgets = audit_nodes(&mut sides, gguf, graph, options)?;
    for side in &mut sides {
        side.screen(gguf, graph, options)?;
    }
    let sides = sides.into_iter().map(|side| side.audit).collect();
    Ok(Audits { sides, budgets, isolated: options.isolated })
}

/// Audits the wanted nodes on all sides; the budgets where there are two.
fn audit_nodes(
    sides: &mut [Side<'_>],
    gguf: &Gguf,
    graph: &Graph,
    options: &Options<'_>,
) -> Result<BTreeMap<Checkpoint, Budget>> {
    let wanted = graph.nodes.iter().map(|node| node.checkpoint).filter(|c| (options.wants)(*c));
    let wanted: Vec<Checkpoint> = wanted.collect();
    let mut budgets = BTreeMap::new();
    for some in wanted.chunks(NODES_AT_ONCE) {
        let found: Vec<NodeFindings> =
            some.par_iter().map(|checkpoint| audit_node(sides, gguf, *checkpoint)).collect::<Result<_>>()?;
        for (checkpoint, node) in some.iter().zip(found) {
            for (side, found) in sides.iter_mut().zip(node.sides) {
                found.map(|found| side.audit.nodes.insert(*checkpoint, found));
            }
            node.budget.map(|budget| budgets.insert(*checkpoint, budget));
        }
    }
    Ok(budgets)
}

/// Nodes that are looked at at the same time: the small ones keep no core waiting, and the values of so many are
/// in memory.
const NODES_AT_ONCE: usize = 4;

/// What was found at one node.
#[derive(Default)]
struct NodeFindings {
    /// By side; `None` where the output was not recorded.
    sides: Vec<Option<std::result::Result<NodeAudit, Missing>>>,
    budget: Option<Budget>,
}

/// Suspicious rows that are audited in full: where there are more, a node is wrong everywhere.
const SUSPECTS_MAX: usize = 8;

/// One recording on its way.
struct Side<'a> {
    recording: &'a dyn Recording,
    /// See [`Context::fed`].
    fed: Option<&'a dyn Recording>,
    graph: Graph,
    audit: Audit,
}

impl<'a> Side<'a> {
    fn new(recording: &'a dyn Recording, graph: &Graph, positions: &[u32]) -> Self {
        let declared = declared::of(recording, positions);
        let recorded = recording.checkpoints();
        let graph = graph.fused(|checkpoint| recorded.contains(&checkpoint));
        let audit = Audit {
            numerics: declared.numerics,
            inferred: declared.inferred,
            recorded_unit: declared.recorded_unit,
            positions: positions.to_vec(),
            screened: 0,
            nodes: BTreeMap::new(),
        };
        Side { recording, fed: None, graph, audit }
    }

    /// Screens the rows that were not audited, and audits those that rounding may not explain.
    fn screen(&mut self, gguf: &Gguf, graph: &Graph, options: &Options<'_>) -> Result<()> {
        let screened = screen::screen(&self.context(gguf), options.positions, options.wants)?;
        self.audit.screened = screened.rows;
        // Where there are many, some from everywhere.
        let apart = screened.suspects.len().div_ceil(SUSPECTS_MAX).max(1);
        let suspects: Vec<u32> = screened.suspects.into_iter().step_by(apart).collect();
        if suspects.is_empty() {
            return Ok(());
        }
        let mut side = Side { fed: self.fed, ..Side::new(self.recording, graph, &suspects) };
        // The arithmetic is that of the whole recording, not what a few odd rows look like.
        side.audit.numerics = self.audit.numerics;
        side.audit.recorded_unit = self.audit.recorded_unit;
        let mut again = [side];
        audit_nodes(&mut again, gguf, graph, options)?;
        let [again] = again;
        self.audit.merge(again.audit);
        Ok(())
    }

    fn context<'b>(&'b self, gguf: &'b Gguf) -> Context<'b> {
        let Audit { numerics, recorded_unit, .. } = self.audit;
        let Side { recording, fed, .. } = *self;
        Context { gguf, graph: &self.graph, recording, numerics, recorded_unit, fed }
    }

    /// The node with this output and what is recorded of it; `None` where the output is not.
    fn case(
        &self,
        gguf: &Gguf,
        checkpoint: Checkpoint,
    ) -> Result<Option<std::result::Result<Case, Missing>>> {
        let recorded = self.recording.positions(checkpoint);
        let mut positions = rows::of_checkpoint(&self.audit.positions, &recorded);
        let Some(node) = self.graph.node(checkpoint) else { return Ok(None) };
        if let Some(fed) = self.fed {
            // A step whose rows the fed recording lacks in part was computed from the producer's own.
            for input in &node.inputs {
                let there = fed.positions(*input);
                if there.is_empty() {
                    continue;
                }
                let whole = |step: Range<u32>| step.into_iter().all(|p| there.binary_search(&p).is_ok());
                positions.retain(|position| whole(self.recording.step(*position)));
            }
        }
        let node = Some(node).filter(|_| !positions.is_empty());
        node.map(|node| case::gather(&self.context(gguf), node, &positions)).transpose()
    }
}

/// What a budget needs of one side at one node.
pub struct Exact {
    /// The case.
    pub case: Case,
    /// Its output without anybody's rounding, (T, width).
    pub plain: Matrix<f64>,
}

/// Audits one node on all sides.
fn audit_node(sides: &[Side<'_>], gguf: &Gguf, checkpoint: Checkpoint) -> Result<NodeFindings> {
    let mut cases: Vec<Option<Case>> = Vec::with_capacity(sides.len());
    let mut found = NodeFindings::default();
    for side in sides {
        let (case, missing) = match side.case(gguf, checkpoint)? {
            Some(Ok(case)) => (Some(case), None),
            Some(Err(missing)) => (None, Some(Err(missing))),
            None => (None, None),
        };
        cases.push(case);
        found.sides.push(missing);
    }
    let Some(node) = cases.iter().flatten().map(|case| case.node.clone()).next() else {
        return Ok(found);
    };
    let explained = match &node.op {
        Op::Linear { weight, .. } => explain_products(sides, gguf, &Weight::find(gguf, weight)?, &cases),
        _ => explain_each(sides, gguf, &cases)?,
    };
    let mut exact = Vec::with_capacity(sides.len());
    for (((side, found), case), explained) in sides.iter().zip(&mut found.sides).zip(cases).zip(explained) {
        let Some((case, (explained, plain))) = case.zip(explained) else { continue };
        let row_shape = row_shape(side, &case);
        let node = local::judge(&case, &explained, plain.as_ref(), &row_shape);
        *found = Some(node.ok_or_else(|| Missing("an explanation".to_owned())));
        let plain = plain.or_else(|| explained.into_iter().next().map(|first| first.exact));
        exact.extend(plain.map(|plain| Exact { case, plain }));
    }
    if let [candidate, reference] = &exact[..] {
        found.budget = budget::of(candidate, reference);
    }
    Ok(found)
}

/// Shape of one row as the audit computes it.
fn row_shape(side: &Side<'_>, case: &Case) -> Vec<usize> {
    let cached = case.positions.iter().max().map_or(0, |&last| last as usize + 1);
    let mut shape = side.graph.dims.shape(case.node.checkpoint.kind(), 1, cached);
    let token_axis = usize::from(case.node.checkpoint.kind().is_optional());
    shape.remove(token_axis);
    shape
}

type Explanation = (Vec<judge::Explained>, Option<Matrix<f64>>);

/// All sides' products with one weight.
fn explain_products(
    sides: &[Side<'_>],
    gguf: &Gguf,
    weight: &Weight<'_>,
    cases: &[Option<Case>],
) -> Vec<Option<Explanation>> {
    let mut jobs = Vec::new();
    let mut pending = Vec::with_capacity(cases.len());
    for (side, case) in sides.iter().zip(cases) {
        pending.push(case.as_ref().map(|case| {
            let mut pending = judge::Pending::new(&side.context(gguf), case, weight);
            let start = jobs.len();
            jobs.append(&mut pending.jobs);
            (pending, start..jobs.len())
        }));
    }
    let out = linear::products(weight, &jobs);
    let mut explained = Vec::with_capacity(cases.len());
    for (pending, case) in pending.into_iter().zip(cases) {
        explained.push(pending.zip(case.as_ref()).map(|((pending, range), case)| {
            let (explained, plain) = pending.finish(case, &jobs[range.start].columns, &out[range]);
            (vec![explained], plain)
        }));
    }
    explained
}

/// Every side on its own.
fn explain_each(sides: &[Side<'_>], gguf: &Gguf, cases: &[Option<Case>]) -> Result<Vec<Option<Explanation>>> {
    let mut out = Vec::with_capacity(cases.len());
    for (side, case) in sides.iter().zip(cases) {
        let Some(case) = case else {
            out.push(None);
            continue;
        };
        let explained = judge::explain(&side.context(gguf), case)?;
        let emulated = explained.iter().any(|explained| explained.emulated);
        let plain = emulated.then(|| case.execute(&case.node, gguf, &judge::PLAIN)).transpose()?;
        out.push(Some((explained, plain)));
    }
    Ok(out)
}

/// The healthy node of a graph at a checkpoint, with attention fused where the recording lacks its inside.
pub fn node_of(recording: &dyn Recording, graph: &Graph, checkpoint: Checkpoint) -> Option<Node> {
    let recorded = recording.checkpoints();
    graph.fused(|checkpoint| recorded.contains(&checkpoint)).node(checkpoint).cloned()
}
