//! The audit of a recording that brings its graph: every node that computes, whatever the architecture.
//!
//! A machine in f64 walks the recorded graph step by step. Each node is computed from what was *recorded* of the
//! nodes before it, judged, and then replaced by what was recorded of itself: so views, copies, caches and states are exact, and an
//! error never spreads. What is not recorded, and an op that nobody wrote a rule for, leaves undecided what depends on it, by name.

mod adapters;
mod aside;
mod attentions;
pub(crate) mod audit_rows;
mod best;
mod bridge;
mod carried;
mod chosen_experts;
mod coarseness;
mod cut_out;
mod devices;
mod exact;
mod factor_of_row;
mod factor_of_scores;
mod finding;
mod findings;
mod form;
pub mod further;
mod fused_ops;
mod graphs;
mod history;
mod instead;
mod kinds;
mod labelled;
mod likely;
mod loaded;
mod lost_steps;
mod named;
mod needed;
mod newest;
mod node;
mod open_choices;
mod operands;
mod order;
mod parts;
mod passes;
mod past_faults;
mod pending;
mod possible;
mod prompt;
mod replay;
mod rows;
mod sample;
pub(crate) mod screen;
mod shown_products;
pub(crate) mod signed_sum;
mod simulate;
mod storage_types;
mod stored;
mod suspect;
mod together;
mod tokens;
mod uneven;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};

use parity_graph::{Id, Op};

use crate::arithmetic::Storing;
use crate::arithmetic::backend::Backend;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Conductor, Node, Unknown, Value, own};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::{Numerics, Storage};
use crate::ops::{Args, bound};
use crate::watch;
pub use attentions::{ATTENTIONS, LLAMA_ATTENTION, attends, name_of_cache};
pub use audit_rows::AuditRows;
pub use carried::{Carried, OwnDistance, Simulated, carried, simulated};
pub use coarseness::{coarseness, coarsest, is_of_recording};
pub use cut_out::with_cut_out;
use devices::Devices;
pub use exact::{Exact, exact};
pub use finding::{Finding, MISTAKES_SHOW, NearTie, NodeAudit, OF_EIGHT_BITS, SHARP};
pub use findings::Findings;
pub use graphs::{Fed, Graphs, Judged};
pub use labelled::{Labelled, Reads, reads};
use named::Naming;
pub use named::{Named, Names};
pub use needed::needed;
pub use node::{Held, Hypothesis, Sight, expected, hypotheses, judge};
pub use operands::{PRODUCTS, narrow, of_name, products};
pub use order::{is_recorded, order};
use passes::Assumed;
pub use past_faults::{Beside, audit};
use pending::Pending;
pub use prompt::Prompt;
pub use replay::{Across, Replay, Said};
pub use rows::Arrangement;
use rows::Partial;
pub use sample::judge_sampled;
pub use shown_products::is_as_f16;
pub use stored::Narrowed;
pub use suspect::Suspect;
pub use tokens::Tokens;

/// What was recorded of one node in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensor {
    /// (T, …) or, without token rows, (1, elements).
    pub shape: Vec<usize>,
    /// Position of each row.
    pub positions: Vec<u32>,
    /// Row by row.
    pub values: Vec<f32>,
}

/// What a recording holds, step by step.
pub trait Steps {
    /// What was recorded of a node.
    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor>;

    /// How many token rows of a node were recorded; `None` where it was not.
    fn rows(&self, step: usize, checkpoint: Checkpoint) -> Option<usize> {
        Some(self.tensor(step, checkpoint)?.positions.len())
    }

    /// What nodes behind it read in place of what was recorded of a node, where its producer was given values of somebody
    /// else's: a run of nodes in isolation.
    fn fed(&self, _step: usize, _checkpoint: Checkpoint) -> Option<Tensor> {
        None
    }

    /// The values of a leaf that is neither a weight nor a state.
    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>>;

    /// Positions of the tokens of a step.
    fn positions(&self, step: usize) -> Vec<u32>;

    /// Whether what caches hold before a step is known whatever positions the steps before it have: rows are numbered, or
    /// the caches were recorded.
    fn knows_caches(&self, _step: usize) -> bool {
        false
    }

    /// Whether a row is looked at; of none, whether all are.
    fn is_chosen(&self, _row: Option<u32>) -> bool {
        true
    }

    /// Whether the graph that it is judged by is the one that its producer computed.
    fn is_own_graph(&self) -> bool;

    /// What its producer says that it computes in.
    fn declared(&self) -> Option<Numerics> {
        None
    }

    /// Of how many ranks of a tensor-parallel engine it was put together, where it was.
    fn ranks(&self) -> Option<usize> {
        None
    }
}

/// How an audit is made.
pub struct How<'a> {
    /// Token rows of matmuls with weights that are computed again in full; of anything else all are.
    pub rows: AuditRows,
    /// The nodes that are judged; others are taken as they were recorded.
    pub wants: &'a dyn Fn(Checkpoint) -> bool,
    /// Names what is wrong; `None` where nobody asks for names.
    pub diagnose: Option<Diagnose<'a>>,
    /// Looks at every node that was judged.
    pub look: Option<Look<'a>>,
    /// The arithmetics that a node may have been computed in, by their names; `None` where any may be.
    pub only: Option<Only<'a>>,
}

/// Whether a node may have been computed in an arithmetic of a name.
pub type Only<'a> = &'a dyn Fn(Checkpoint, &str) -> bool;

/// Looks at what was judged of a node in a step, healthy or not.
pub type Look<'a> = &'a dyn Fn(usize, Checkpoint, &Suspect<'_>);

/// Names the mistakes that explain a node's output, or says what was tried.
pub type Diagnose<'a> = &'a dyn Fn(&Suspect<'_>) -> Names;

/// Judges every node and goes on with what was recorded of it.
struct Auditor<'a> {
    step: usize,
    steps: &'a dyn Steps,
    labelled: &'a Labelled,
    /// The graphs of all steps.
    graphs: &'a [(usize, &'a Labelled)],
    gguf: &'a Gguf,
    /// By tensor: what its values show the producer to keep them in.
    kept: Vec<Storage>,
    assumed: &'a Assumed,
    rows: AuditRows,
    /// Positions before the step's last that nothing was recorded of.
    lost: &'a [std::ops::Range<u32>],
    /// Where nodes are judged once more for the names of what is wrong with them.
    naming: Option<Naming<'a>>,
    look: Option<Look<'a>>,
    only: Option<Only<'a>>,
    /// By node that picks rows of a state that its sequence went back to: the newest ones.
    newest: BTreeMap<Id, Vec<f64>>,
    /// Rows that wait for those of other steps, where there are other steps.
    pending: Option<&'a mut Pending>,
    findings: &'a mut Findings,
    devices: &'a mut Devices,
    /// Of how many nodes what is known is told, in the first pass over them.
    of: Option<usize>,
    wants: &'a dyn Fn(Checkpoint) -> bool,
}

impl Conductor<f64> for Auditor<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        if let Some(late) = watch::over() {
            self.leave_out(node.id, late);
            return Ok(Err(Unknown::new(late)));
        }
        let lost = lost_steps::read_by(self.lost, (self.steps, self.step), self.labelled, node.id);
        let args = lost.as_ref().map_or(args, Err);
        let (steps, kept) = (self.steps, (self.kept[node.id], &self.assumed.unseen, false));
        let across = || bridge::across(steps, node, args, kept);
        let Some(checkpoint) = self.labelled.labels.get(node.id).copied().flatten() else {
            // A part of an op that was taken for several computes, though nobody could have recorded it.
            let computes = node.program.graph.is_arithmetic(node.id);
            if let (Some(_), Ok(args)) = (self.naming, args) {
                self.newest.extend(newest::rows(node, args).map(|rows| (node.id, rows)));
            }
            return Ok(if computes { across() } else { bridge::moved(node, args) });
        };
        watch::at(|| checkpoint.to_string(), || Some(self.findings.known(self.of?)));
        let there = self
            .steps
            .tensor(self.step, checkpoint)
            .or_else(|| chosen_experts::order(self.steps, self.step, node, checkpoint, args));
        let Some(recorded) = there else {
            let own = across();
            let is_lost = own.as_ref().is_err_and(|unknown| unknown.is_lost);
            let finding = self.findings.at(checkpoint);
            finding.unrecorded += 1;
            finding.is_behind_lost |= is_lost;
            let named = |why| if is_lost { why } else { Unknown::new(checkpoint.to_string()) };
            return Ok(own.map_err(named));
        };
        let rows = self.labelled.axes[node.id].map(|axis| node.program.graph.get(node.id).shape()[axis]);
        let partial = Partial::of(&recorded, rows, &self.steps.positions(self.step));
        let whole = partial.as_ref().map_or(&recorded, |partial| &partial.tensor);
        let Some(arranged) = self.labelled.arrange(node.id, checkpoint, whole) else {
            let width = rows.map(|rows| node.program.graph.get(node.id).elements() / rows.max(1));
            return Ok(Err(self.findings.at(checkpoint).does_not_fit(checkpoint, &recorded.shape, width)));
        };
        let arranged = arranged.up_to(rows::columns(self.steps, self.step));
        // What was cut of a matrix is masked: whatever stands there, nothing that follows reads it.
        let own_values = || own(node, args).map(|values| values.data).unwrap_or_default();
        let cut = std::cell::OnceCell::new();
        let beyond = |element: usize| cut.get_or_init(own_values).get(element).copied().unwrap_or_default();
        let values = arranged.of_node(&whole.values, beyond);
        let lacks = |element: usize| partial.as_ref().is_some_and(|p| p.lacks(arranged.position(element)));
        let chosen = self.chosen(&recorded);
        let is_chosen =
            |element: usize| chosen.as_ref().is_none_or(|rows| rows.contains(&arranged.position(element)));
        let looked_at =
            |element: usize| arranged.is_recorded(element) && !lacks(element) && is_chosen(element);
        let whole = partial.is_none() && arranged.is_whole() && chosen.is_none();
        let looked_at: &(dyn Fn(usize) -> bool + Sync) = if whole { &|_| true } else { &looked_at };
        if (self.wants)(checkpoint) && chosen.as_ref().is_none_or(|rows| !rows.is_empty()) {
            self.judge(node, checkpoint, args, (&values, &recorded), &arranged, looked_at);
        }
        if let Some(fed) = self.steps.fed(self.step, checkpoint).filter(|_| partial.is_none()) {
            return Ok(Ok(arranged.of_node(&fed.values, beyond).into()));
        }
        let is_read = node.program.is_used_after(node.program.graph.root(node.id), node.id);
        match &partial {
            // Rows that were not recorded are computed again, for what reads them.
            Some(_) if is_read => Ok(across().map(|own| chosen_experts::filled(own, &values, lacks))),
            _ => Ok(Ok(self.assumed.read(self.step, checkpoint).unwrap_or_else(|| values.into()))),
        }
    }
}

impl Auditor<'_> {
    /// The rows of what was recorded that are looked at; none where all are.
    fn chosen(&self, recorded: &Tensor) -> Option<HashSet<u32>> {
        let rows = || recorded.positions.iter().copied().filter(|row| self.steps.is_chosen(Some(*row)));
        (!self.steps.is_chosen(None)).then(|| rows().collect())
    }

    /// Notes that a node which was recorded was not judged.
    fn leave_out(&mut self, node: Id, late: &'static str) {
        let label = self.labelled.labels.get(node).copied().flatten();
        let is_late = |id: &Checkpoint| (self.wants)(*id) && self.steps.rows(self.step, *id).is_some();
        label.filter(is_late).into_iter().for_each(|id| self.findings.at(id).late = Some(late));
    }

    /// Notes what is found of a node whose `values` were recorded.
    fn judge(
        &mut self,
        node: &Node<'_>,
        checkpoint: Checkpoint,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
        (values, recorded): (&[f64], &Tensor),
        arranged: &Arrangement,
        looked_at: &(dyn Fn(usize) -> bool + Sync),
    ) {
        let (tensor, kept) = (node.program.graph.get(node.id), self.kept[node.id]);
        let any_attention = self.assumed.may_be_any(checkpoint.kind());
        let mut tried = args.map_or_else(
            |_| Vec::new(),
            |args| storage_types::tried(self.steps, (kept, any_attention), tensor, args, &recorded.values),
        );
        if !self.assumed.may_be_better && tensor.op == Op::FlashAttn {
            tried.retain(|one| one.arithmetic.recorded.is_none_or(|kept| kept == Storage::F32));
        }
        if self.assumed.is_hopeless(kept, &recorded.values) {
            tried.truncate(1);
        }
        let (tried, centred) = self.assumed.as_stored(self.steps, (kept, recorded), node, (tried, values));
        let (mut tried, values) = (tried, &*centred);
        if let Some(only) = self.only
            && tried.iter().any(|one| only(checkpoint, one.name))
        {
            tried.retain(|one| only(checkpoint, one.name));
        }
        self.findings.at(checkpoint).row_shape = recorded.shape.get(1..).unwrap_or_default().to_vec();
        if let (Some(pending), Ok(args)) = (&mut self.pending, args)
            && values.len() == recorded.values.len()
            && self.assumed.storing == Storing::Nearest
            && self.steps.is_chosen(None)
            && pending.takes(node, checkpoint, args, recorded, &tried)
        {
            return;
        }
        if let Ok(args) = args {
            tried = self.devices.likely(tensor.backend.as_deref(), args, tried);
        }
        let held = match (args, node.rule) {
            (Err(unknown), _) => Err(unknown.clone()),
            (Ok(args), None) => Err(Unknown::no_rule(args.name, &tensor.op)),
            (Ok(args), Some(rule)) => {
                let (row, carried) = (self.labelled.row_of(node.id), &node.carried[..]);
                let norm = self.labelled.norm_before(node, &self.kept);
                let sight = Sight { looked_at, carried, row, norm };
                let held = judge_sampled(rule, args, values, &sight, &tried, self.rows);
                if let Ok(held) = &held {
                    let backend = tensor.backend.as_deref();
                    self.devices.note(checkpoint, backend, (rule, args), (values, &sight), held);
                    self.name(node, checkpoint, (rule, args), (values, &sight), (held, &tried), arranged);
                }
                held
            }
        };
        let rows = self.chosen(recorded).map_or(recorded.positions.len(), |rows| rows.len());
        self.add(node, checkpoint, held, (arranged, rows));
    }

    /// Adds what was found of a node in this step, of which so many rows were recorded.
    fn add(
        &mut self,
        node: &Node<'_>,
        checkpoint: Checkpoint,
        held: std::result::Result<Held, Unknown>,
        (arranged, rows): (&Arrangement, usize),
    ) {
        let (tensor, kept) = (node.program.graph.get(node.id), self.kept[node.id]);
        let finding = self.findings.at(checkpoint);
        match held {
            Ok(held) => {
                finding.add(held, arranged, rows);
                let through = node.carried.iter().flatten().flat_map(|carried| &carried.through);
                finding.bridged.extend(through.filter_map(|&id| self.labelled.labels[id]));
                if !finding.bridged.is_empty() {
                    // Kernels of a device round operands, and sums, to f16.
                    let is_device = tensor.backend.as_deref().and_then(Backend::of).is_some();
                    let unit = if is_device { bound::UNIT_F16 } else { bound::storage_unit(kept) };
                    finding.unit = finding.unit.max(unit);
                }
            }
            Err(unknown) if unknown.is_lost => finding.lost(&unknown.reason),
            Err(unknown) => finding.cannot(&unknown.reason),
        }
    }
}
