//! The passes over a recording: one of a producer that computed the graph, several of another, of which nobody knows what it
//! keeps its values in and how its attention multiplies them.
//!
//! What is sharp comes first, and a coarser arithmetic is taken only where a sharper one does not explain a kind of nodes: an
//! engine computes nodes of one kind alike in all layers. One that lies far from the others of its kind, which are explained,
//! is no arithmetic of the engine but a mistake.

mod activations;
mod copies;
mod first_row;
mod mixed;
mod names;
mod noise;
mod packed;
mod plainer;
mod stored;
mod taken;
mod unlike;
mod unrounded;
mod unseen_caches;

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

use indexmap::IndexSet;

use super::bridge::Unseen;
use super::devices::Devices;
use super::finding::Finding;
use super::needed::needed;
use super::pending::Pending;
use super::{
    Auditor, Findings, How, Labelled, Naming, Steps, attentions, best, cut_out, is_recorded, kinds,
    lost_steps, order, shown_products, simulate, storage_types,
};
use crate::arithmetic::{Arithmetic, Cached, Storing};
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::op_by_op::Machine;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::watch;
pub use activations::NEAR;
pub use unlike::BARELY;

/// What is assumed of a producer in one pass.
#[derive(Clone)]
pub struct Assumed {
    /// Whether its memory rounds to the types that the graph has.
    rounds: bool,
    /// The type that values are taken to be kept in.
    kept: Storage,
    /// The type that values show.
    shown: Storage,
    /// What nodes are computed in that were not recorded.
    pub unseen: Unseen,
    /// Whether values may be of a narrow type only as they were recorded.
    pub may_be_better: bool,
    /// Kinds of nodes that may have been computed in any attention, where they were recorded; `None`: all kinds.
    any_attention: Option<HashSet<Kind>>,
    /// What becomes of values that are stored in a narrow type.
    pub storing: Storing,
    /// What keys and values are kept as, where attention shows it.
    packed: Option<(&'static str, Cached)>,
    /// What products read that was not rounded yet.
    unrounded: Rc<unrounded::Unrounded>,
}

impl Assumed {
    /// Whether values taken for those of f32 are those of a narrower type, which nothing explains that rounds less.
    pub fn is_hopeless(&self, kept: Storage, recorded: &[f32]) -> bool {
        let is_first = self.kept == Storage::F32 && kept == Storage::F32;
        is_first && self.shown != Storage::F32 && storage_types::holds(self.shown, recorded)
    }

    /// Whether recorded nodes of a kind may have been computed in any attention.
    pub fn may_be_any(&self, kind: Kind) -> bool {
        self.any_attention.as_ref().is_none_or(|kinds| kinds.contains(&kind))
    }
}

/// How many times further than any healthy node of its kind a node must lie from exact arithmetic, both over their bounds, to
/// be a mistake in it instead of an arithmetic: nodes of a kind use up their bounds alike within a factor of about three.
pub const APART: f64 = 3.0 * 3.0;

/// A recording with what it is judged by.
struct Passes<'a> {
    steps: &'a dyn Steps,
    graphs: &'a [(usize, &'a Labelled)],
    gguf: &'a Gguf,
    how: &'a How<'a>,
    /// Nodes that are looked at, until all of them were once.
    of: Cell<Option<usize>>,
}

/// Audits a recording: `graphs` are the graphs of its steps, in order, those that are the same given once. Of a
/// producer that computed another graph nobody knows which type it keeps its values in: those of f32 come first, and
/// only what that does not explain is held to what its values show.
///
/// # Errors
/// None that concerns a single node: that is undecided.
pub fn audit(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    how: &How<'_>,
) -> Result<Findings> {
    let passes = Passes::of(steps, graphs, gguf, how);
    let (mut assumed, mut findings) = passes.bounded()?;
    unlike::doubt(&mut findings);
    if watch::over().is_none() && !steps.is_own_graph() {
        passes.simulate(&mut assumed, &mut findings)?;
        unlike::doubt_barely(steps, &mut findings);
        passes.doubt_activations(&mut findings)?;
        passes.doubt_noise(&mut findings)?;
    }
    Ok(findings)
}

/// The same by the bounds of the worst case alone, however far they reach; what they leave wrong, or would not see, is simulated in
/// the type that the engine shows, and in no other.
///
/// # Errors
/// As [`audit`].
pub fn bounded(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    how: &How<'_>,
) -> Result<Findings> {
    let passes = Passes::of(steps, graphs, gguf, how);
    let (Assumed { kept, .. }, mut findings) = passes.bounded()?;
    let is_open = |(_, finding): &(&Checkpoint, &Finding)| finding.is_wrong() || finding.is_blind();
    let open: IndexSet<Checkpoint> = findings.nodes.iter().filter(is_open).map(|(id, _)| *id).collect();
    if !open.is_empty() {
        let own = Arithmetic { narrow: kept, cache: kept, ..Arithmetic::EXACT };
        let simulated = passes.known().explained(own, &open)?;
        let explained = simulated.values().filter(|found| found.is_explained()).count();
        // Of an engine whose arithmetic explains most of them the others are wrong.
        let takes = |found: &best::Simulated| found.is_explained() || 2 * explained > open.len();
        let taken = simulated.into_iter().filter(|(_, found)| takes(found));
        taken.for_each(|(id, found)| findings.at(id).settle(found));
    }
    Ok(findings)
}

/// The same of nodes each by itself: by nothing that is found out of all of them together, such as activations in eight bits.
///
/// # Errors
/// As [`audit`].
pub fn alone(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    how: &How<'_>,
) -> Result<Findings> {
    Passes::of(steps, graphs, gguf, how).alone()
}

/// Which nodes a pass judges.
type Wants<'b> = &'b dyn Fn(Checkpoint) -> bool;

/// What a pass is for.
#[derive(Clone, Copy)]
enum Aim<'a> {
    /// Whether what is assumed explains nodes: what is wrong in a sample of rows is not looked at in all.
    Explain,
    /// What is wrong with nodes, in all rows.
    Judge,
    /// The names of what is wrong with them.
    Name(Naming<'a>),
}

impl<'a> Passes<'a> {
    fn of(
        steps: &'a dyn Steps,
        graphs: &'a [(usize, &'a Labelled)],
        gguf: &'a Gguf,
        how: &'a How<'a>,
    ) -> Passes<'a> {
        let of = order(graphs, &|id| (how.wants)(id) && is_recorded(steps, graphs, id)).len();
        Passes { steps, graphs, gguf, how, of: Cell::new(Some(of)) }
    }

    /// What is assumed at first.
    fn assumed(&self) -> Assumed {
        let usual =
            attentions::attentions(self.steps).first().map_or(Arithmetic::EXACT, |usual| usual.arithmetic);
        Assumed {
            rounds: true,
            kept: Storage::F32,
            shown: Storage::F32,
            unseen: Unseen::of(usual),
            may_be_better: true,
            any_attention: Some(HashSet::new()),
            storing: Storing::Nearest,
            packed: None,
            unrounded: Rc::default(),
        }
    }

    /// Judges nodes each by itself, in f32 and in the type that the recording shows, and names what is wrong with them.
    fn alone(&self) -> Result<Findings> {
        let (is_own, mut assumed) = (self.steps.is_own_graph(), self.assumed());
        (assumed.rounds, assumed.any_attention) = (is_own, None);
        let mut findings = self.run(&assumed, self.how.wants)?;
        let shown = storage_types::shown(self.steps, self.graphs);
        if !is_own && shown != Storage::F32 {
            (assumed.kept, assumed.shown) = (shown, shown);
            let is_wrong = findings.all_wrong();
            findings.nodes.extend(self.run(&assumed, &|id| is_wrong.contains(&id))?.nodes);
        }
        self.name(&assumed, &mut findings)?;
        Ok(findings)
    }

    /// Judges all nodes by the bounds of the worst case; what was assumed in the end.
    fn bounded(&self) -> Result<(Assumed, Findings)> {
        let Passes { steps, graphs, how, .. } = *self;
        let mut assumed = self.assumed();
        if steps.is_own_graph() {
            let mut findings = self.run(&assumed, how.wants)?;
            cut_out::judge(steps, graphs, how.wants, &mut findings);
            self.name(&assumed, &mut findings)?;
            findings.doubt_unnamed();
            return Ok((assumed, findings));
        }
        assumed.shown = storage_types::shown(steps, graphs);
        let mut findings = self.in_f32(&mut assumed)?;
        if let Some(late) = watch::over() {
            findings.doubt(late);
            return Ok((assumed, findings));
        }
        let is_explained = findings.wrong() == 0;
        if !is_explained || findings.nodes.values().any(Finding::is_blind) {
            assumed.kept = assumed.shown;
        }
        if is_explained {
            return Ok((assumed, findings));
        }
        let sharp = |id: &Checkpoint| {
            findings.nodes.get(id).is_some_and(|finding| finding.judged > 0 && finding.is_healthy())
        };
        let coarse = self.run(&assumed, &|id| (how.wants)(id) && !sharp(&id))?;
        findings.nodes.extend(coarse.nodes);
        if let Some(late) = watch::over() {
            findings.doubt(late);
            return Ok((assumed, findings));
        }
        self.goes_on_with_them(&mut assumed, &mut findings)?;
        if assumed.kept != Storage::F32 {
            self.products(&mut assumed, &mut findings)?;
        }
        self.unrounded(&mut assumed, &mut findings)?;
        self.attends_in_both(&assumed, &mut findings)?;
        self.stored(&mut assumed, &mut findings)?;
        self.packed(&mut assumed, &mut findings, true)?;
        self.name(&assumed, &mut findings)?;
        unlike::unname(&mut findings);
        self.packed(&mut assumed, &mut findings, false)?;
        self.doubt_packed(&mut assumed, &mut findings)?;
        Ok((assumed, findings))
    }

    /// What is simulated of an engine whose arithmetic is known.
    fn known(&self) -> simulate::Stretch<'_> {
        simulate::Stretch::of_known(self.steps, self.graphs, self.gguf)
    }

    /// Simulates what lies before nodes whose bounds are too wide to show a mistake.
    fn simulate(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        let Passes { steps, graphs, gguf, .. } = *self;
        let blind = findings.nodes.iter().filter(|(_, finding)| finding.is_blind());
        let mut open: IndexSet<Checkpoint> = blind.map(|(id, _)| *id).collect();
        let all = open.iter().copied().chain(unlike::hiding(findings)).collect::<IndexSet<_>>();
        if all.is_empty() && findings.wrong() == 0 {
            return Ok(());
        }
        let shown = shown_products::operands(findings, graphs).filter(|_| assumed.kept == Storage::F32);
        // What nothing explains of products that were recorded does not explain those that were not.
        let is_hopeless = shown_products::are_unexplained(findings, graphs);
        let mut simulated =
            simulate::simulate(steps, graphs, gguf, (assumed.kept, shown), (&all, is_hopeless))?;
        unlike::take(findings, &mut simulated);
        simulated.iter().for_each(|(id, simulated)| findings.at(*id).settle(*simulated));
        self.prefer_plain((assumed, shown), &simulated, findings)?;
        self.mixed(assumed, findings)?;
        open.retain(|id| findings.nodes[id].is_wrong() && findings.nodes[id].diagnosis().0.is_empty());
        let bands = open.iter().filter_map(|id| Some((*id, findings.nodes[id].band()?))).collect();
        let is_named = self.name_simulated(assumed, &bands, findings)?;
        self.unseen_caches((assumed.kept, shown), findings)?;
        // An engine of f32 of which a mistake or a cache leaves nothing reads no copies, which would explain it as well.
        if !is_named {
            self.copies(assumed, shown, findings)?;
        }
        Ok(())
    }

    /// Judges some nodes, and names nothing.
    fn run(&self, assumed: &Assumed, wants: Wants<'_>) -> Result<Findings> {
        self.judge(assumed, wants, &|_, _| true, Aim::Judge)
    }

    /// Finds out which of some nodes are explained.
    fn explained(&self, assumed: &Assumed, wants: Wants<'_>) -> Result<Findings> {
        self.judge(assumed, wants, &|_, _| true, Aim::Explain)
    }

    /// A pass over all steps in which any node is looked at; with a diagnosis, rows of different steps stand by themselves.
    fn judge(
        &self,
        assumed: &Assumed,
        wants: Wants<'_>,
        in_step: &dyn Fn(usize, Checkpoint) -> bool,
        aim: Aim<'_>,
    ) -> Result<Findings> {
        let Passes { steps, graphs, gguf, how, ref of } = *self;
        let (naming, rows) = match aim {
            Aim::Explain => (None, how.rows.only()),
            Aim::Judge => (None, how.rows),
            Aim::Name(naming) => (Some(naming), how.rows),
        };
        let mut machine: Machine<'_, f64> =
            Machine::new(gguf, Arithmetic::LLAMA_CPU).rounding(assumed.rounds);
        let mut findings = Findings { order: order(graphs, &|_| true), ..Findings::default() };
        let mut devices = Devices::knowing(naming.and_then(|naming| naming.usual));
        let mut pending = Pending::default();
        let of_f32 = kinds::OfF32::of(steps, graphs, assumed.kept);
        for (&(step, labelled), needed) in graphs.iter().zip(needed(steps, graphs, wants)) {
            let (findings, devices, pending) = (&mut findings, &mut devices, &mut pending);
            let here = |id: Checkpoint| wants(id) && in_step(step, id);
            let kept = kinds::kept(steps, (step, labelled), &of_f32, assumed.kept);
            let lost = &lost_steps::before(steps, step)[..];
            let mut auditor = Auditor {
                step,
                steps,
                labelled,
                graphs,
                gguf,
                kept,
                assumed,
                rows,
                lost,
                naming,
                look: how.look,
                only: how.only,
                newest: BTreeMap::new(),
                pending: Some(&mut *pending)
                    .filter(|_| naming.is_none() && how.look.is_none() && graphs.len() > 1),
                findings,
                devices,
                of: of.get(),
                wants: &here,
            };
            let input = |id| labelled.input(steps, step, id);
            machine.step_of(&labelled.program, &|id| needed[id], &input, &mut auditor)?;
            let unseen = labelled.nodes().filter(|(node, id)| !needed[*node] && wants(*id));
            unseen.for_each(|(_, id)| auditor.findings.at(id).unrecorded += 1);
            if pending.is_full() {
                pending.judge(gguf, rows, findings, devices);
            }
        }
        pending.judge(gguf, rows, &mut findings, &mut devices);
        devices.excuse(&mut findings);
        of.set(None);
        Ok(findings)
    }

    /// What values of f32 explain, in the sharpest attention that explains a kind of nodes; what was taken for that is
    /// noted.
    fn in_f32(&self, assumed: &mut Assumed) -> Result<Findings> {
        assumed.rounds = false;
        let mut findings = self.run(assumed, self.how.wants)?;
        // Another producer's memory may be of the graph's types all the same.
        if findings.wrong() > 0 {
            let rounding = Assumed { rounds: true, ..assumed.clone() };
            // Where it explains no more of what is wrong, it does not explain more of all.
            let is_wrong = |id: Checkpoint| findings.nodes.get(&id).is_some_and(Finding::is_wrong);
            if self.explained(&rounding, &is_wrong)?.wrong() < findings.wrong() {
                let rounded = self.run(&rounding, self.how.wants)?;
                if rounded.wrong() < findings.wrong() {
                    (*assumed, findings) = (rounding, rounded);
                }
            }
        }
        self.products(assumed, &mut findings)?;
        let mut taken = HashSet::new();
        let attends = |id: &Checkpoint| attentions::attends(id.kind());
        // Engines of a narrower type have their attention in that, or keys and values at most.
        let count = if assumed.shown == Storage::F32 { usize::MAX } else { 1 };
        for (number, other) in attentions::attentions(self.steps).iter().skip(1).take(count).enumerate() {
            // Where keys, values or attention itself were not recorded, nothing shows what they were computed in. What was
            // recorded of them is held to all that there is at once.
            let may_be = |(id, finding): (&Checkpoint, &Finding)| {
                let reads = number == 0 && attends(id);
                finding.is_wrong() && (reads || finding.bridged.iter().any(attends))
            };
            if !findings.nodes.iter().any(may_be) {
                break;
            }
            let unseen = Unseen { attention: other.arithmetic, ..assumed.unseen };
            let tried = Assumed { unseen, any_attention: None, ..assumed.clone() };
            taken.extend(self.take(&mut findings, assumed, &tried, other.name)?);
        }
        assumed.any_attention = Some(taken);
        Ok(findings)
    }
}
