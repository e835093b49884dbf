//! Exact arithmetic decides what is rounding and what is a bug.
//!
//! Every node whose inputs a recording holds is computed again in f64 from those inputs, with the model's own
//! weights, and compared with the recorded output: the local error. What rounding explains of it follows from
//! the arithmetic that the producer declares ([`bounds`]).

mod attention;
pub mod bounds;
pub mod bridge;
pub mod case;
pub mod declared;
pub mod judge;
mod linear;
pub mod local;
mod masked;
pub mod parts;
pub mod recorded;
mod screen;
mod screen_attention;
mod side;

use std::collections::HashMap;

use indexmap::IndexMap;
use rayon::prelude::*;

use crate::checkpoint::Checkpoint;
use crate::dump::{Recording, UnfiniteRows};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::graph::{Graph, Op};
use crate::model::weights::Weight;
use crate::numerics::Numerics;
use crate::report::DifferenceParts;
use crate::tensor::Matrix;

pub use case::{Case, Context, Missing};
pub use recorded::AuditRows;
pub use recorded::NodeAudit;
pub use side::graph_of;

use side::Side;

/// What is audited.
pub struct Options<'a> {
    /// Positions of the token rows: see [`AuditRows::positions`].
    pub positions: &'a [u32],
    /// Checkpoints.
    pub wants: &'a (dyn Fn(Checkpoint) -> bool + Sync),
    /// Whether the first recording was made in isolation: from the second one's values.
    pub isolated: bool,
}

/// What was found at a node, or what the recording would need.
type Found = std::result::Result<NodeAudit, Missing>;

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
    /// Its nodes: attention in one where its inside is not looked at itself.
    pub graph: Graph,
    /// Faulty nodes whose readers were computed from other values than were recorded, each with one of these readers:
    /// the recording is wrong there, and the engine may be right.
    pub contradicted: IndexMap<Checkpoint, Checkpoint>,
    /// NaN and Inf, in all rows of what was recorded.
    pub unfinite: HashMap<Checkpoint, UnfiniteRows>,
    /// What was found at each node that the recording has the output of.
    pub nodes: IndexMap<Checkpoint, Found>,
}

impl Audit {
    /// Nodes whose error is more than rounding, in execution order.
    pub fn origins(&self) -> impl Iterator<Item = Checkpoint> + '_ {
        let faulty = |node: &Found| node.as_ref().is_ok_and(|n| !n.is_healthy());
        self.graph.checkpoints().filter(move |checkpoint| self.nodes.get(checkpoint).is_some_and(faulty))
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

    /// Adds what was found at rows that nobody else looks at: where that is nothing, nothing can be said of the node.
    fn add(&mut self, other: Audit) {
        for (checkpoint, node) in other.nodes {
            match (self.nodes.get_mut(&checkpoint), &node) {
                (Some(Ok(known)), Ok(more)) if more.is_healthy() || !known.is_healthy() => {
                    known.local.rows += more.local.rows;
                }
                (Some(Ok(known)), Err(_)) if !known.is_healthy() => {}
                _ => {
                    self.nodes.insert(checkpoint, node);
                }
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
    pub parts: IndexMap<Checkpoint, DifferenceParts>,
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

/// Whether all values of a recording, in the rows at `positions`, are numbers of a type narrower than f32.
pub fn is_narrow(recording: &dyn Recording, positions: &[u32]) -> bool {
    declared::of(recording, positions).recorded_unit > 0.0
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
        recordings.iter().map(|recording| Side::new(*recording, graph, options)).collect();
    if options.isolated
        && let [candidate, reference] = &mut sides[..]
    {
        candidate.fed = Some(reference.recording);
    }
    let mut parts = audit_nodes(&mut sides, gguf, graph, options)?;
    // Values of a narrow type may be those that the engine went on with, or have been rounded when they were recorded,
    // whatever is declared: the sharper reading counts unless the other explains most of what it leaves.
    let mut sharp: Vec<Option<IndexMap<Checkpoint, Found>>> = Vec::new();
    for side in &mut sides {
        let open = side.stored_unit > 0.0 && side.audit.origins().nth(1).is_some();
        sharp.push(open.then(|| side.audit.nodes.clone()));
        side.audit.recorded_unit = if open { side.stored_unit } else { 0.0 };
    }
    if sharp.iter().any(Option::is_some) {
        parts = audit_nodes(&mut sides, gguf, graph, options)?;
    }
    let faulty = |nodes: &IndexMap<Checkpoint, Found>| {
        nodes.values().filter(|node| node.as_ref().is_ok_and(|node| !node.is_healthy())).count()
    };
    for (side, sharp) in sides.iter_mut().zip(sharp) {
        if let Some(sharp) = sharp.filter(|sharp| 2 * faulty(&side.audit.nodes) > faulty(sharp)) {
            side.audit.nodes = sharp;
            side.audit.recorded_unit = 0.0;
        }
    }
    for side in &mut sides {
        side.screen(gguf, graph, options)?;
        side.look_past_faults(gguf, graph, options)?;
    }
    let sides = sides.into_iter().map(|side| side.audit).collect();
    Ok(Audits { sides, parts, isolated: options.isolated })
}

/// Audits the wanted nodes on all sides; the parts of the difference where there are two.
fn audit_nodes(
    sides: &mut [Side<'_>],
    gguf: &Gguf,
    graph: &Graph,
    options: &Options<'_>,
) -> Result<IndexMap<Checkpoint, DifferenceParts>> {
    let wanted = graph.nodes.iter().map(|node| node.checkpoint).filter(|c| (options.wants)(*c));
    let wanted: Vec<Checkpoint> = wanted.collect();
    let mut parts = IndexMap::new();
    for some in wanted.chunks(NODES_AT_ONCE) {
        let found: Vec<NodeFindings> =
            some.par_iter().map(|checkpoint| audit_node(sides, gguf, *checkpoint)).collect::<Result<_>>()?;
        for (checkpoint, node) in some.iter().zip(found) {
            for (side, found) in sides.iter_mut().zip(node.sides) {
                found.map(|found| side.audit.nodes.insert(*checkpoint, found));
            }
            node.parts.map(|of_node| parts.insert(*checkpoint, of_node));
        }
    }
    Ok(parts)
}

/// Nodes that are looked at at the same time: the small ones keep no core waiting, and the values of so many are
/// in memory.
const NODES_AT_ONCE: usize = 4;

/// What was found at one node.
#[derive(Default)]
struct NodeFindings {
    /// By side; `None` where the output was not recorded.
    sides: Vec<Option<Found>>,
    parts: Option<DifferenceParts>,
}

/// What the parts of a difference need of one side at one node.
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
        *found = Some(node.ok_or(Missing::Explanation));
        let plain = plain.or_else(|| explained.into_iter().next().map(|first| first.exact));
        exact.extend(plain.map(|plain| Exact { case, plain }));
    }
    if let [candidate, reference] = &exact[..] {
        found.parts = parts::of(candidate, reference);
    }
    Ok(found)
}

/// Shape of one row as the audit computes it.
fn row_shape(side: &Side<'_>, case: &Case) -> Vec<usize> {
    let cached = case.positions.iter().max().map_or(0, |&last| last as usize + 1);
    let mut shape = side.audit.graph.dims.shape(case.node.checkpoint.kind(), 1, cached);
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
