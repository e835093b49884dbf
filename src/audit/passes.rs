//! The passes over a recording: one of a producer that computed the graph, several of another, of which nobody knows what it
//! keeps its values in and how its attention multiplies them.
//!
//! What is sharp comes first, and a coarser arithmetic is taken only where a sharper one does not explain a kind of nodes: an
//! engine computes nodes of one kind alike in all layers. One that lies far from the others of its kind, which are explained,
//! is no arithmetic of the engine but a mistake.

mod plainer;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};

use indexmap::IndexSet;

use super::bridge::Unseen;
use super::devices::Devices;
use super::finding::Finding;
use super::needed::needed;
use super::pending::Pending;
use super::{
    Auditor, Findings, How, Labelled, Naming, Steps, attentions, cut_out, kinds, lost_steps, order, parts,
    shown_products, simulate, storage_types,
};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::op_by_op::Machine;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::watch;

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
    let is_recorded = |id: Checkpoint| graphs.iter().any(|(step, _)| steps.rows(*step, id).is_some());
    let of = order(graphs, &|id| (how.wants)(id) && is_recorded(id)).len();
    let passes = Passes { steps, graphs, gguf, how, of: Cell::new(Some(of)) };
    let usual = attentions::attentions(steps).first().map_or(Arithmetic::EXACT, |usual| usual.arithmetic);
    let none = Some(HashSet::new());
    let (kept, shown) = (Storage::F32, Storage::F32);
    let unseen = Unseen { attention: usual, products: None, parts: 1 };
    let may_be_better = true;
    let mut assumed = Assumed { rounds: true, kept, shown, unseen, may_be_better, any_attention: none };
    if steps.is_own_graph() {
        let mut findings = passes.run(&assumed, how.wants)?;
        cut_out::judge(steps, graphs, how.wants, &mut findings);
        passes.name(&assumed, &mut findings)?;
        return Ok(findings);
    }
    assumed.shown = storage_types::shown(steps, graphs);
    let mut findings = passes.in_f32(&mut assumed)?;
    if let Some(late) = watch::over() {
        findings.doubt(late);
        return Ok(findings);
    }
    let open = |findings: &Findings| -> IndexSet<Checkpoint> {
        findings.nodes.iter().filter(|(_, finding)| finding.is_blind()).map(|(id, _)| *id).collect()
    };
    let is_explained = findings.wrong() == 0;
    if is_explained && open(&findings).is_empty() {
        return Ok(findings);
    }
    assumed.kept = assumed.shown;
    if !is_explained {
        let sharp = |id: &Checkpoint| {
            findings.nodes.get(id).is_some_and(|finding| finding.judged > 0 && finding.is_healthy())
        };
        let coarse = passes.run(&assumed, &|id| (how.wants)(id) && !sharp(&id))?;
        findings.nodes.extend(coarse.nodes);
        if let Some(late) = watch::over() {
            findings.doubt(late);
            return Ok(findings);
        }
        passes.goes_on_with_them(&mut assumed, &mut findings)?;
        if assumed.kept != Storage::F32 {
            passes.products(&mut assumed, &mut findings)?;
        }
        passes.name(&assumed, &mut findings)?;
    }
    let mut open = open(&findings);
    let shown = shown_products::operands(&findings, graphs).filter(|_| assumed.kept == Storage::F32);
    let simulated = simulate::simulate(steps, graphs, gguf, (assumed.kept, shown), &open)?;
    simulated.iter().for_each(|(id, simulated)| findings.at(*id).settle(*simulated));
    passes.prefer_plain(&assumed, &simulated, &mut findings)?;
    open.retain(|id| findings.nodes[id].is_wrong() && findings.nodes[id].diagnosis().0.is_empty());
    let bands = open.iter().filter_map(|id| Some((*id, findings.nodes[id].band()?)));
    passes.name_simulated(&assumed, &bands.collect(), &mut findings)?;
    Ok(findings)
}

/// Nodes that are diagnosed: the later ones are mostly the same mistake in other layers.
const DIAGNOSED_MAX: usize = 8;
/// Steps of a node that are diagnosed: the later ones are mostly alike.
const DIAGNOSED_STEPS_MAX: usize = 4;

/// The same of a node far behind what was recorded before it: each mistake is computed through all between.
const SIMULATED_STEPS_MAX: usize = 2;

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

impl Passes<'_> {
    /// Judges some nodes, and names nothing.
    fn run(&self, assumed: &Assumed, wants: Wants<'_>) -> Result<Findings> {
        self.judge(assumed, wants, &|_, _| true, Aim::Judge)
    }

    /// Finds out which of some nodes are explained.
    fn explained(&self, assumed: &Assumed, wants: Wants<'_>) -> Result<Findings> {
        self.judge(assumed, wants, &|_, _| true, Aim::Explain)
    }

    /// Names what is wrong with the first of the nodes that are, each in the first steps in which it is.
    fn name(&self, assumed: &Assumed, findings: &mut Findings) -> Result<()> {
        let is_wrong = |id: &&Checkpoint| findings.nodes.get(*id).is_some_and(Finding::is_wrong);
        let wrong: Vec<Checkpoint> =
            findings.order.iter().filter(is_wrong).take(DIAGNOSED_MAX).copied().collect();
        let is_beyond =
            |id: Checkpoint, step: usize| findings.nodes[&id].is_beyond_in(&self.steps.positions(step));
        let names = self.named(assumed, &wrong, (&HashMap::new(), &findings.all_wrong()), is_beyond)?;
        findings.take_names(names);
        Ok(())
    }

    /// Judges some wrong nodes once more for the names of what is wrong with them, in the first steps in which they are
    /// beyond what rounding explains.
    fn named(
        &self,
        assumed: &Assumed,
        wrong: &[Checkpoint],
        (simulated, all_wrong): (&HashMap<Checkpoint, f64>, &HashSet<Checkpoint>),
        is_beyond: impl Fn(Checkpoint, usize) -> bool,
    ) -> Result<Findings> {
        let (mut named, mut later) = (HashSet::<(usize, Checkpoint)>::new(), HashSet::new());
        for &id in wrong {
            let has_it = |(_, labelled): &&(usize, &Labelled)| labelled.nodes().any(|(_, node)| node == id);
            let there: Vec<usize> = self.graphs.iter().filter(has_it).map(|(step, _)| *step).collect();
            if there.first().is_some_and(|first| !is_beyond(id, *first)) {
                later.insert(id);
            }
            let beyond = there.into_iter().filter(|step| is_beyond(id, *step));
            let steps_max = if simulated.is_empty() { DIAGNOSED_STEPS_MAX } else { SIMULATED_STEPS_MAX };
            named.extend(beyond.take(steps_max).map(|step| (step, id)));
        }
        let Some(diagnose) = self.how.diagnose.filter(|_| !named.is_empty()) else {
            return Ok(Findings::default());
        };
        let (wants, in_step) = (|id| wrong.contains(&id), |step, id| named.contains(&(step, id)));
        let naming = Naming { diagnose, later: &later, wrong: all_wrong, simulated };
        self.judge(assumed, &wants, &in_step, Aim::Name(naming))
    }

    /// Names what is wrong with the first of nodes whose bounds are too wide to tell one mistake from another, since nothing
    /// shows in what attention before them was computed: by what rounding was `simulated` to leave of each.
    fn name_simulated(
        &self,
        assumed: &Assumed,
        simulated: &HashMap<Checkpoint, f64>,
        findings: &mut Findings,
    ) -> Result<()> {
        let Some(first) = findings.order.iter().find(|id| simulated.contains_key(*id)).copied() else {
            return Ok(());
        };
        let names = self.named(assumed, &[first], (simulated, &findings.all_wrong()), |_, _| true)?;
        findings.take_names(names);
        Ok(())
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
        let mut devices = Devices::default();
        let mut pending = Pending::default();
        let of_f32 = kinds::of_f32(steps, graphs, assumed.kept);
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

    /// An engine whose products are those of the narrow values that were recorded, none of better ones, goes on with these in
    /// its attention too.
    fn goes_on_with_them(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        let Some([narrow, better]) = storage_types::readings(assumed.kept) else { return Ok(()) };
        let explains = |id: &Checkpoint, name| {
            findings
                .nodes
                .get(id)
                .is_some_and(|finding| finding.is_healthy() && finding.computed_in.contains(name))
        };
        let graphs = self.graphs.iter().take(1).map(|(_, labelled)| labelled);
        let products: HashSet<Checkpoint> =
            graphs.flat_map(|labelled| labelled.products()).map(|(_, id)| id).collect();
        let attention: HashSet<Checkpoint> = findings
            .nodes
            .keys()
            .filter(|id| attentions::attends(id.kind()) && explains(id, better))
            .copied()
            .collect();
        if attention.is_empty()
            || products.iter().any(|id| explains(id, better))
            || !products.iter().any(|id| explains(id, narrow))
        {
            return Ok(());
        }
        assumed.may_be_better = false;
        let again = self.run(assumed, &|id| attention.contains(&id))?;
        findings.nodes.extend(again.nodes);
        Ok(())
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

    /// An engine rounds operands of all products alike, and sums them in as many parts: those that were not recorded as those
    /// that were, where what follows them is explained by that alone. What was taken for it is noted.
    fn products(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        let (unseen, kept) = (assumed.unseen, assumed.kept);
        let of_operands = storage_types::operands(self.steps.declared()).into_iter();
        let of_operands =
            of_operands.map(|(name, narrow)| (name, Unseen { products: Some(narrow), ..unseen }));
        let of_parts = parts::hypotheses(kept).into_iter().filter(move |_| kept != Storage::F32);
        let of_parts = of_parts.map(|one| (one.name, Unseen { parts: one.arithmetic.parts, ..unseen }));
        for (name, unseen) in of_operands.chain(of_parts) {
            let mut nodes = findings.nodes.values();
            let is_shown = nodes.any(|finding| finding.is_healthy() && finding.computed_in.contains(name));
            let crosses = |finding: &Finding| finding.is_wrong() && !finding.bridged.is_empty();
            if !is_shown || !findings.nodes.values().any(crosses) {
                continue;
            }
            let tried = Assumed { unseen, ..assumed.clone() };
            self.take(findings, assumed, &tried, name)?;
        }
        Ok(())
    }

    /// Takes what is explained where something else is assumed of nodes that were not recorded, which is assumed from then
    /// on: of which kinds that is.
    fn take(
        &self,
        findings: &mut Findings,
        assumed: &mut Assumed,
        tried: &Assumed,
        name: &'static str,
    ) -> Result<HashSet<Kind>> {
        let is_wrong = |id: Checkpoint| findings.nodes.get(&id).is_some_and(Finding::is_wrong);
        let mut other = self.explained(tried, &is_wrong)?;
        let kinds = findings.explained_by(&other);
        if kinds.is_empty() {
            return Ok(kinds);
        }
        // Those that are wrong all the same are shown in all rows.
        let left = |id: Checkpoint| {
            kinds.contains(&id.kind()) && other.nodes.get(&id).is_some_and(|found| !found.is_healthy())
        };
        let wholly = self.run(tried, &left)?;
        other.nodes.extend(wholly.nodes);
        findings.take_kinds(other, &kinds, name);
        assumed.unseen = tried.unseen;
        Ok(kinds)
    }
}

impl Findings {
    /// Takes the names that a pass for names has.
    fn take_names(&mut self, names: Findings) {
        names.nodes.into_iter().for_each(|(id, named)| self.at(id).named_as(named));
    }

    /// The kinds of wrong nodes that another audit explains.
    fn explained_by(&self, other: &Findings) -> HashSet<Kind> {
        let explains =
            |id: &Checkpoint| other.nodes.get(id).is_some_and(|found| found.judged > 0 && found.is_healthy());
        let wrong = self.nodes.iter().filter(|(_, finding)| finding.is_wrong()).map(|(id, _)| id);
        let explained = wrong.filter(|id| explains(id)).map(|id| id.kind());
        explained.filter(|kind| !self.has_exceptions(*kind)).collect()
    }

    /// Takes the wrong nodes of some kinds from another audit, which is for an attention of another arithmetic.
    fn take_kinds(&mut self, mut other: Findings, kinds: &HashSet<Kind>, attention: &'static str) {
        let is_taken =
            |(id, finding): &(&Checkpoint, &Finding)| finding.is_wrong() && kinds.contains(&id.kind());
        let taken: Vec<Checkpoint> = self.nodes.iter().filter(is_taken).map(|(id, _)| *id).collect();
        for id in taken {
            let Some(mut found) = other.nodes.swap_remove(&id) else { continue };
            if found.is_healthy() && !found.bridged.is_empty() {
                found.only_with(attention);
            }
            self.nodes.insert(id, found);
        }
    }

    /// Whether the wrong nodes of a kind are few, and far from all others.
    fn has_exceptions(&self, kind: Kind) -> bool {
        let of_kind = self.nodes.iter().filter(|(id, finding)| id.kind() == kind && finding.judged > 0);
        let (wrong, healthy): (Vec<&Finding>, Vec<&Finding>) =
            of_kind.map(|(_, finding)| finding).partition(|finding| finding.is_wrong());
        let nearest = wrong.iter().map(|finding| finding.over()).fold(f64::INFINITY, f64::min);
        let furthest = healthy.iter().map(|finding| finding.over()).fold(0.0, f64::max);
        wrong.len() < healthy.len() && !(nearest <= APART * furthest)
    }
}
