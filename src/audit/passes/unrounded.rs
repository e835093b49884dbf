//! Products of an engine of a narrow type that read what they multiply as it was before it was rounded.
//!
//! Compilers (XLA, Inductor) compute a norm or an activation in the kernel of the products that read it where these have a single
//! row, and round what they write of it alone. Products of such rows are then off by what was rounded of their source, all alike:
//! in a recording of q_proj in f32 they look like other weights, and in bf16 like activations in blocks of eight bits. So the
//! source is computed again in f32 of what was recorded before it, and the products are held to that as sharply as to any other.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use parity_graph::{Id, Op};

use super::activations::is_in_eight_bits;
use super::{Assumed, Findings, Passes};
use crate::arithmetic::Arithmetic;
use crate::audit::attentions::attends;
use crate::audit::bridge::{Unseen, across};
use crate::audit::instead::Instead;
use crate::audit::needed::needed;
use crate::audit::stored::stored_apart;
use crate::audit::{Finding, Labelled, Steps, storage_types};
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value, Values};
use crate::error::Result;
use crate::numerics::Storage;
use crate::ops::Args;
use crate::watch;

/// What products read in place of what was recorded, by step and node, with how far it may be from what they did read.
pub type Unrounded = HashMap<(usize, Checkpoint), Values<f64>>;

impl Assumed {
    /// What products read of a recorded node, where that is not what was recorded.
    pub fn read(&self, step: usize, id: Checkpoint) -> Option<Values<f64>> {
        self.unrounded.get(&(step, id)).cloned()
    }
}

/// Whether a node reads such a source: a kernel that computes both rounds nothing in between.
pub fn reads_unrounded(node: &Node<'_>) -> bool {
    node.carried.iter().flatten().any(|carried| carried.through.is_empty())
}

impl Passes<'_> {
    /// Takes products for explained that read their sources before these were rounded to the type that values are kept in.
    pub(super) fn unrounded(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        let kept = assumed.kept;
        if kept == Storage::F32 {
            return Ok(());
        }
        let of_one = |step: usize| self.steps.positions(step).len() == 1;
        let has = |one: bool| self.graphs.iter().any(|(step, _)| of_one(*step) == one);
        // What is read of a norm was kept in the narrow type before a weight met it, or not.
        for of_norm in [kept, Storage::F32] {
            let sources = self.sources_of_open(kept, findings);
            if sources.is_empty() || watch::is_over() {
                return Ok(());
            }
            let all = self.computed_again(&sources, of_norm)?;
            if has(true) && has(false) {
                let of_one = all.iter().filter(|((step, _), _)| of_one(*step));
                let of_one = of_one.map(|(at, read)| (*at, read.clone())).collect();
                self.take_unrounded(assumed, findings, of_one)?;
            }
            self.take_unrounded(assumed, findings, all)?;
        }
        Ok(())
    }

    /// Of such a reading: takes what it explains of what is wrong, and what was explained by activations in eight bits alone. The
    /// sources of what it explains are read so from then on.
    fn take_unrounded(
        &self,
        assumed: &mut Assumed,
        findings: &mut Findings,
        mut read: Unrounded,
    ) -> Result<()> {
        let is_known = |at: &(usize, Checkpoint)| assumed.unrounded.contains_key(at);
        read.retain(|at, _| !is_known(at));
        if read.is_empty() {
            return Ok(());
        }
        let known = assumed.unrounded.iter().map(|(at, own)| (*at, own.clone()));
        let mut tried =
            Assumed { unrounded: Rc::new(read.into_iter().chain(known).collect()), ..assumed.clone() };
        let wrong = findings.all_wrong();
        self.take(findings, assumed, &tried, "")?;
        let is_healthy = |id: &&Checkpoint| findings.nodes[*id].is_healthy();
        let mut taken: HashSet<Checkpoint> = wrong.iter().filter(is_healthy).copied().collect();
        let in_eight_bits = |id: Checkpoint| findings.nodes.get(&id).is_some_and(is_in_eight_bits);
        let is_sharper = |one: &Finding| one.judged > 0 && one.is_healthy() && !is_in_eight_bits(one);
        let others = self.run(&tried, &in_eight_bits)?;
        let others: Vec<_> = others.nodes.into_iter().filter(|(_, one)| is_sharper(one)).collect();
        taken.extend(others.iter().map(|(id, _)| *id));
        findings.nodes.extend(others);
        let inputs = |id: &Checkpoint| self.graphs.first().map(|(_, labelled)| labelled.inputs(*id));
        let kinds: HashSet<Kind> = taken.iter().filter_map(inputs).flatten().map(|id| id.kind()).collect();
        Rc::make_mut(&mut tried.unrounded)
            .retain(|at, _| kinds.contains(&at.1.kind()) || assumed.unrounded.contains_key(at));
        assumed.unrounded = tried.unrounded;
        findings.read_unrounded.extend(taken);
        let place = |id: &Checkpoint| findings.order.iter().position(|own| own == id);
        findings.read_unrounded.sort_by_cached_key(place);
        Ok(())
    }

    /// What the products read that are wrong, or explained by activations in eight bits alone, where it was recorded in the type
    /// that values are kept in.
    fn sources_of_open(&self, kept: Storage, findings: &Findings) -> HashSet<Checkpoint> {
        let is_open = |id: &Checkpoint| {
            let finding = findings.nodes.get(id).filter(|one| one.bridged.is_empty());
            finding.is_some_and(|one| one.is_wrong() || is_in_eight_bits(one))
        };
        let is_narrow = |step: usize, id: &Checkpoint| {
            !attends(id.kind())
                && self.steps.tensor(step, *id).is_some_and(|own| storage_types::holds(kept, &own.values))
        };
        let of_step = |(step, labelled): &(usize, &Labelled)| -> Vec<Checkpoint> {
            let open = labelled.products().map(|(_, id)| id).filter(is_open);
            let sources: HashSet<Checkpoint> = open.flat_map(|id| labelled.inputs(id)).collect();
            sources.into_iter().filter(|id| is_narrow(*step, id)).collect()
        };
        self.graphs.iter().flat_map(of_step).collect()
    }

    /// Such sources as f32 has them of what was recorded before them, where norms that a weight meets are kept in a type. Behind
    /// products that were not recorded nothing is known so well.
    fn computed_again(&self, sources: &HashSet<Checkpoint>, of_norm: Storage) -> Result<Unrounded> {
        let Passes { steps, graphs, gguf, .. } = *self;
        let hidden = |_: usize, id: Checkpoint| sources.contains(&id).then_some(None);
        let without = Instead { steps, of: &hidden, chosen: &|_| true };
        let reads = |(labelled, id): &(&Labelled, Checkpoint)| {
            labelled.inputs(*id).iter().any(|source| sources.contains(source))
        };
        let products = graphs.iter().flat_map(|(_, own)| own.products().map(move |(_, id)| (*own, id)));
        let readers: HashSet<Checkpoint> = products.filter(reads).map(|(_, id)| id).collect();
        let mut machine: Machine<'_, f64> = Machine::new(gguf, Arithmetic::EXACT).rounding(false);
        let mut found = Unrounded::new();
        for (&(step, labelled), needed) in
            graphs.iter().zip(needed(&without, graphs, &|id| readers.contains(&id)))
        {
            let mut again = Again { step, steps, labelled, sources, of_norm, found: &mut found };
            let input = |leaf| labelled.input(steps, step, leaf);
            machine.step_of(&labelled.program, &|node| needed[node], &input, &mut again)?;
        }
        Ok(found)
    }
}

/// Goes on with what was recorded, and computes some nodes again.
struct Again<'a> {
    step: usize,
    steps: &'a dyn Steps,
    labelled: &'a Labelled,
    sources: &'a HashSet<Checkpoint>,
    of_norm: Storage,
    found: &'a mut Unrounded,
}

impl Conductor<f64> for Again<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let own = || across(self.steps, node, args, (Storage::F32, &Unseen::of(Arithmetic::EXACT), false));
        let label = self.labelled.labels.get(node.id).copied().flatten();
        let recorded = label.and_then(|id| Some((id, self.steps.tensor(self.step, id)?)));
        let arranged = recorded.as_ref().and_then(|(id, own)| self.labelled.arrange(node.id, *id, own));
        let Some(((id, recorded), arranged)) = recorded.as_ref().zip(arranged) else {
            return Ok(own().map(|own| self.kept(node, own)));
        };
        let multiplies = |id: &Id| self.labelled.multiplies_weight(*id);
        let is_near = |own: &Values<f64>| {
            own.carried.as_ref().is_none_or(|carried| !carried.through.iter().any(multiplies))
        };
        if self.sources.contains(id)
            && let Some(mut own) = own().ok().filter(is_near)
        {
            // It was recorded: nothing was crossed.
            own.carried.iter_mut().for_each(|carried| carried.through.clear());
            self.found.insert((self.step, *id), own);
        }
        Ok(Ok(arranged.of_node(&recorded.values, |_| 0.0).into()))
    }
}

impl Again<'_> {
    /// A norm as it is kept: where its last bits are not known, it may be the next number of its type.
    fn kept(&self, node: &Node<'_>, mut own: Values<f64>) -> Values<f64> {
        if node.program.graph.get(node.id).op == Op::RmsNorm {
            own.carried
                .iter_mut()
                .for_each(|carried| carried.error = stored_apart(self.of_norm, &own.data, &carried.error));
            self.of_norm.store(&mut own.data);
        }
        own
    }
}
