//! What rounding explains between two recorded nodes with many others between them, simulated.
//!
//! The worst case that every rounding may come to (`bridge.rs`) grows from node to node until it hides mistakes. So the
//! stretch is executed in f64 once as it is and several times with each result disturbed at random by what rounding
//! explains of it (D. S. Parker, "Monte Carlo arithmetic", 1997; CADNA): how far these lie apart at the next recorded
//! node is what rounding explains there. What was recorded takes the place of what was computed, so that nothing is
//! carried past it.

mod disturbed;
mod search;

use std::cell::RefCell;

use indexmap::{IndexMap, IndexSet};
use parity_graph::Op;
use parity_graph::known::is_weight;

use super::aside::Aside;
use super::best::Simulated;
use super::needed::needed;
use super::possible::Mix;
use super::shown_products::Shown;
use super::{Labelled, Steps};
use super::{attentions, lost_steps, storage_types};
use crate::arithmetic::{Arithmetic, Flash, Operands, name_of};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::Machine;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::ops::bound::{UNIT_F16, UNIT_F32};
use disturbed::Bounds;
pub use disturbed::Disturbed;
pub use search::{SCATTERED, simulate};

/// Disturbed executions.
const RUNS: u64 = 3;

/// How many times further than the furthest disturbed execution a row may lie: norms of rows of many independent roundings
/// scatter by a few per cent, and the bounds that they are disturbed by are those of the worst case.
pub const SCATTER: f64 = 2.0;

/// One execution of the stretch.
#[derive(Clone, Copy)]
pub enum Run {
    /// As it is.
    Exact,
    /// With every result disturbed; a seed.
    Disturbed(u64),
    /// With what is rounded to a narrower type moved to one side before (`aside.rs`).
    Aside(f64),
}

/// Rows of a node, by (step, id).
pub type Rows = IndexMap<(usize, Checkpoint), Vec<f64>>;

/// What is simulated.
pub struct Stretch<'a> {
    steps: &'a dyn Steps,
    graphs: &'a [(usize, &'a Labelled)],
    gguf: &'a Gguf,
    /// Whether an arithmetic is known to be the producer's by what it declares, or its values show.
    is_known: &'a dyn Fn(&Arithmetic) -> bool,
    /// What recorded products round operands to, where they show it.
    shown: Option<Shown>,
    /// What attention was declared to be, where that rounds more than its cache.
    attention: Option<Flash>,
    /// Which nodes alone round the operands of their products.
    mix: Option<&'a Mix>,
    /// The type that recorded values may be rounded to where they are read, each reader its own copy.
    copies: Option<Storage>,
}

/// What of an arithmetic shows in a node.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Shows {
    /// How attention is computed, and what it reads.
    attention: bool,
    /// What operands of products are rounded to: not where attention as one node is all that multiplies.
    operands: bool,
}

impl Shows {
    /// An arithmetic without what does not show.
    fn of(self, one: Arithmetic) -> Arithmetic {
        let Arithmetic { flash, cache, operands, .. } = Arithmetic::EXACT;
        let one = if self.attention { one } else { Arithmetic { flash, cache, ..one } };
        if self.operands { one } else { Arithmetic { operands, ..one } }
    }
}

/// Distances of so many nodes as one; NaN where one is not known.
pub fn together(distances: impl ExactSizeIterator<Item = f64>, of: usize) -> f64 {
    let is_known = distances.len() >= of;
    let apart = distances.map(|distance| distance.powi(2)).sum::<f64>().sqrt();
    if is_known { apart } else { f64::NAN }
}

impl<'a> Stretch<'a> {
    /// Of a producer whose arithmetic is known.
    pub fn of_known(
        steps: &'a dyn Steps,
        graphs: &'a [(usize, &'a Labelled)],
        gguf: &'a Gguf,
    ) -> Stretch<'a> {
        Stretch {
            steps,
            graphs,
            gguf,
            is_known: &|_| true,
            shown: None,
            attention: None,
            mix: None,
            copies: None,
        }
    }

    /// The same of an engine whose nodes may read copies in a narrower type of what was recorded.
    pub fn reading_copies(self, kept: Storage) -> Stretch<'a> {
        Stretch { copies: Some(kept), ..self }
    }

    /// The same of one that rounds the operands of some of its products alone.
    pub fn mixed<'b>(&'b self, mix: &'b Mix) -> Stretch<'b> {
        Stretch { mix: Some(mix), ..*self }
    }

    /// What one arithmetic explains of some nodes.
    ///
    /// # Errors
    /// Those of the machine.
    pub fn explained(
        &self,
        arithmetic: Arithmetic,
        open: &IndexSet<Checkpoint>,
    ) -> Result<IndexMap<Checkpoint, Simulated>> {
        self.executed(arithmetic, open, RUNS)?.found()
    }

    /// How far each of some nodes is from what one arithmetic computes, relative; those that are known.
    ///
    /// # Errors
    /// Those of the machine.
    pub fn distances(
        &self,
        arithmetic: Arithmetic,
        open: &IndexSet<Checkpoint>,
    ) -> Result<IndexMap<Checkpoint, f64>> {
        let found = self.executed(arithmetic, open, 0)?.found()?;
        Ok(found.into_iter().map(|(id, found)| (id, found.distance)).collect())
    }

    /// The same of all of them together; NaN where one is not known.
    ///
    /// # Errors
    /// Those of the machine.
    pub fn apart(&self, arithmetic: Arithmetic, open: &IndexSet<Checkpoint>) -> Result<f64> {
        Ok(together(self.distances(arithmetic, open)?.into_values(), open.len()))
    }

    /// What of an arithmetic shows in a node, by what lies before it that was not recorded.
    fn shows(&self, id: Checkpoint) -> Shows {
        let mut shows = Shows::default();
        let needed = needed(self.steps, self.graphs, &|known| known == id);
        for ((_, labelled), needed) in self.graphs.iter().zip(needed) {
            let graph = &labelled.program.graph;
            for id in labelled.program.executed().filter(|id| needed[*id]) {
                let is_written = |source| labelled.program.is_written(graph.root(source));
                let by_weight = || graph.src(id, 0).is_some_and(|weight| is_weight(&graph.get(weight).name));
                // Attention in parts has two products of values, and anything else that reads a cache is as good as that.
                shows.attention |= match graph.get(id).op {
                    Op::MulMat => !by_weight(),
                    Op::FlashAttn | Op::SoftMax => true,
                    _ => graph.sources(id).any(is_written),
                };
                shows.operands |= matches!(graph.get(id).op, Op::MulMat | Op::MulMatId);
            }
        }
        shows
    }

    /// Executes what lies before `open` nodes in one arithmetic as it is, and so often disturbed.
    fn executed<'b>(
        &'b self,
        arithmetic: Arithmetic,
        open: &'b IndexSet<Checkpoint>,
        runs: u64,
    ) -> Result<Executions<'b>> {
        let needed = needed(self.steps, self.graphs, &|id| open.contains(&id));
        let (exact, runs_of) = (Rows::new(), Vec::new());
        let (aside, bounds) = (Aside::default(), RefCell::new(Bounds::default()));
        let mut all =
            Executions { stretch: self, arithmetic, open, needed, aside, bounds, exact, runs: runs_of };
        all.exact = all.run(Run::Exact)?;
        all.disturb(runs)?;
        Ok(all)
    }

    /// Whether an arithmetic is known to be the producer's.
    fn is_known(&self, arithmetic: &Arithmetic) -> bool {
        let is_declared = self.attention == Some(arithmetic.flash);
        let is_rounded = matches!(arithmetic.flash, Flash::Rounded(..));
        (self.is_known)(arithmetic) || is_declared || self.is_shown(arithmetic) && !is_rounded
    }

    /// Whether recorded products show those of an arithmetic.
    fn is_shown(&self, arithmetic: &Arithmetic) -> bool {
        self.shown.is_some_and(|shown| shown.allows(arithmetic.operands))
    }
}

/// Executions of a stretch in one arithmetic.
struct Executions<'a> {
    stretch: &'a Stretch<'a>,
    arithmetic: Arithmetic,
    open: &'a IndexSet<Checkpoint>,
    /// By step, the nodes that are needed for the open ones.
    needed: Vec<Vec<bool>>,
    aside: Aside,
    bounds: RefCell<Bounds>,
    exact: Rows,
    /// The disturbed ones.
    runs: Vec<Rows>,
}

impl Executions<'_> {
    fn run(&self, how: Run) -> Result<Rows> {
        let Stretch { steps, graphs, gguf, mix, copies, .. } = *self.stretch;
        let mut machine: Machine<'_, f64> =
            Machine::new(gguf, self.arithmetic).rounding(steps.is_own_graph());
        let mut rows = Rows::new();
        for (&(step, labelled), needed) in graphs.iter().zip(&self.needed) {
            let arithmetic = self.arithmetic;
            let (aside, bounds, open, rows) = (&self.aside, Some(&self.bounds), self.open, &mut rows);
            let lost = &lost_steps::before(steps, step)[..];
            let mut disturbed = Disturbed {
                step,
                steps,
                labelled,
                lost,
                arithmetic,
                mix,
                copies,
                how,
                aside,
                bounds,
                open,
                rows,
            };
            let input = |id| labelled.input(steps, step, id);
            machine.step_of(&labelled.program, &|id| needed[id], &input, &mut disturbed)?;
        }
        Ok(rows)
    }

    /// Goes on until there are so many disturbed ones.
    fn disturb(&mut self, runs: u64) -> Result<()> {
        for seed in self.runs.len() as u64..runs {
            self.runs.push(self.run(Run::Disturbed(seed))?);
        }
        Ok(())
    }

    /// What they explain of the open nodes.
    fn found(&self) -> Result<IndexMap<Checkpoint, Simulated>> {
        let Executions { stretch, arithmetic, open, .. } = self;
        let mut runs: Vec<&Rows> = self.runs.iter().collect();
        // How far disturbed values lie apart is how far they are moved.
        let aside = match !runs.is_empty() && self.aside.moves() {
            true => vec![self.run(Run::Aside(-1.0))?, self.run(Run::Aside(1.0))?],
            false => Vec::new(),
        };
        runs.extend(&aside);
        let narrow = Some(arithmetic.cache).filter(|cache| *cache != arithmetic.narrow);
        let declares_cache =
            narrow.is_some() && stretch.steps.declared().map(|numerics| numerics.kv) == narrow;
        let named = name_of(arithmetic.packed).or(narrow.map(attentions::name_of_cache));
        let named = named.or(stretch.mix.and_then(|mix| mix.name()));
        let named = named.or(stretch.copies.map(storage_types::name_of_copies));
        let unit = storage_types::unit(arithmetic);
        let is_plain = unit <= UNIT_F32 && arithmetic.operands == Operands::Exact;
        let known = stretch.is_known(arithmetic);
        // Blocks of eight bits round about as much as f16 does.
        let unit = if stretch.is_shown(arithmetic) && !is_plain { unit.max(UNIT_F16) } else { unit };
        let of = |id: Checkpoint| {
            let found = Simulated::of(stretch.steps, id, &self.exact, &runs)?;
            Some((id, Simulated { unit, named, declares_cache, known, is_plain, ..found }))
        };
        Ok(open.iter().copied().filter_map(of).collect())
    }
}
