//! Which of the arithmetics that an engine may have explains each of some nodes best.
//!
//! An execution as it is says how far each of them lies from what was recorded, and costs a tenth of what it takes to say how
//! much of that is rounding. The engine's own lies much nearer than the others, as a rule: what comes much nearer than all
//! before it is disturbed at once, and the others only where that does not explain the nodes.

use indexmap::{IndexMap, IndexSet};

use super::super::best::{Best, NEARER, Simulated, is_of_unknown, scouts};
use super::super::passes::BARELY;
use super::super::possible;
use super::super::shown_products::Shown;
use super::super::{Labelled, Steps, attentions, storage_types};
use super::{Executions, RUNS, Shows, Stretch};
use crate::arithmetic::{Arithmetic, Fresh, Operands};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::ops::bound::UNIT_F32;
use crate::watch;

/// How many times what a single disturbed execution explains an arithmetic may leave of a scout: several lie a few per cent
/// apart, unless little of what rounds shows in one of them.
pub const SCATTERED: f64 = 4.0;

/// Simulates what lies before `open` nodes, for an engine that keeps its values in `kept`; of the arithmetics that it may
/// have, the one that explains most: of those whose products are computed as the recorded ones are `shown` to be. Of an engine whose
/// recorded products nothing explains none is looked for.
///
/// # Errors
/// Those of the machine.
pub fn simulate(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    (kept, shown): (Storage, Option<Shown>),
    (open, is_hopeless): (&IndexSet<Checkpoint>, bool),
) -> Result<IndexMap<Checkpoint, Simulated>> {
    // Blocks of eight bits are no more f32 than other narrow operands are.
    let is_f32 = |one: &Arithmetic| {
        let in_blocks = matches!(
            one.operands,
            Operands::VecDot | Operands::Candle | Operands::Rows | Operands::Blocks(_)
        );
        storage_types::unit(one) <= UNIT_F32 && (!in_blocks || steps.declared().is_some())
    };
    let is_known = |one: &Arithmetic| is_f32(one) || kept != Storage::F32 || possible::declares_narrow(steps);
    let two_products = steps.declared().and_then(attentions::in_two_products);
    let mut tried = possible::arithmetics(steps, (kept, shown), two_products);
    // As it is, and in the type that its values are kept in.
    tried.truncate(if is_hopeless { 2 } else { usize::MAX });
    let attention = two_products.map(|one| one.flash);
    let stretch = Stretch { is_known: &is_known, shown, attention, ..Stretch::of_known(steps, graphs, gguf) };
    let shows = open.iter().map(|id| (*id, stretch.shows(*id))).collect();
    let mut search = Search { stretch: &stretch, open, shows, best: Best::default() };
    search.all(tried)?;
    let Search { mut best, .. } = search;
    if watch::is_over() {
        // What was tried explains some; of the others nobody knows what the rest would say.
        best.nodes.retain(|_, found| found.is_explained());
        return Ok(best.nodes);
    }
    // Those that nothing explains are shown as far as they are from f32.
    let rest: IndexSet<Checkpoint> = open.iter().copied().filter(|id| !best.nodes.contains_key(id)).collect();
    if !rest.is_empty() {
        best.take(stretch.explained(Arithmetic::EXACT, &rest)?);
    }
    best.settle();
    Ok(best.nodes)
}

/// How far the usual rows of nodes are from what an arithmetic computes, relative.
type Distances = IndexMap<Checkpoint, f64>;

struct Search<'a> {
    stretch: &'a Stretch<'a>,
    open: &'a IndexSet<Checkpoint>,
    shows: IndexMap<Checkpoint, Shows>,
    best: Best,
}

/// An arithmetic that is tried.
#[derive(Clone)]
struct Tried {
    arithmetic: Arithmetic,
    /// The nodes that it may show in: those that nothing was tried on which is the same there, and no coarser.
    shown: IndexSet<Checkpoint>,
}

impl Search<'_> {
    /// Tries arithmetics, the likeliest of which come first.
    fn all(&mut self, tried: IndexSet<Arithmetic>) -> Result<()> {
        // What shows of the arithmetics that were tried, and the unit roundoff of the least coarse of them.
        let mut before: IndexMap<(Shows, Arithmetic), f64> = IndexMap::new();
        let (mut least, mut later) = (Distances::new(), Vec::new());
        for (number, arithmetic) in tried.into_iter().enumerate() {
            let unit = storage_types::unit(&arithmetic);
            let is_new =
                |shows: &Shows| !before.get(&(*shows, shows.of(arithmetic))).is_some_and(|of| *of <= unit);
            let shown = self.shows.iter().filter(|(_, shows)| is_new(shows)).map(|(id, _)| *id).collect();
            for shows in self.shows.values() {
                let least = before.entry((*shows, shows.of(arithmetic))).or_insert(unit);
                *least = least.min(unit);
            }
            let tried = Tried { arithmetic, shown };
            let rest = self.rest(&tried);
            if watch::is_over() || self.is_settled() {
                return Ok(());
            }
            if rest.is_empty() || self.is_idle(&arithmetic) {
                continue;
            }
            let (stretch, some) = (self.stretch, scouts(&rest));
            let executed = stretch.executed(arithmetic, &some, 0)?;
            let apart: Distances =
                executed.found()?.into_iter().map(|(id, found)| (id, found.usual)).collect();
            let is_much_nearer =
                |(id, apart): (&Checkpoint, &f64)| least.get(id).is_none_or(|least| NEARER * apart <= *least);
            let is_first = number == 0 || apart.iter().any(is_much_nearer);
            for (id, apart) in &apart {
                let least = least.entry(*id).or_insert(f64::INFINITY);
                *least = least.min(*apart);
            }
            // Whether a prompt reads what it keeps, or all of one step do, is the same where little else is read.
            let like = |tried: &Tried| Arithmetic { fresh: Fresh::Never, ..tried.arithmetic };
            let is_same = |(other, of): &(Tried, Distances)| like(other) == like(&tried) && *of == apart;
            match is_first {
                true => self.one((&tried, true), executed)?,
                false if later.iter().any(is_same) => {}
                false => later.push((tried, apart)),
            }
        }
        let is_near = |apart: &Distances| apart.iter().any(|(id, apart)| *apart <= NEARER * least[id]);
        later.sort_by_key(|(_, apart)| !is_near(apart));
        for (tried, apart) in later {
            if watch::is_over() || self.is_settled() {
                return Ok(());
            }
            let (stretch, some) = (self.stretch, scouts(&self.rest(&tried)));
            if !some.is_empty()
                && !self.is_idle(&tried.arithmetic)
                && apart.iter().any(|(id, apart)| self.best.may_be(id, *apart))
            {
                let is_f32 = storage_types::unit(&tried.arithmetic) <= UNIT_F32;
                self.one((&tried, is_f32), stretch.executed(tried.arithmetic, &some, 0)?)?;
            }
        }
        Ok(())
    }

    /// Whether an arithmetic changes nothing: of one node alone none that is coarser than f32, and that nobody declares, is known to
    /// be the engine's, however well it explains the node, and one does already.
    fn is_idle(&self, arithmetic: &Arithmetic) -> bool {
        let is_open = |id: &Checkpoint| self.best.nodes.get(id).is_some_and(is_of_unknown);
        self.open.len() == 1 && self.open.iter().all(is_open) && !self.stretch.is_known(arithmetic)
    }

    fn is_settled(&self) -> bool {
        self.open.iter().all(|id| self.best.is_settled(id))
    }

    /// The nodes that an arithmetic may show in and that are not settled.
    fn rest(&self, tried: &Tried) -> IndexSet<Checkpoint> {
        tried.shown.iter().copied().filter(|id| !self.best.is_settled(id)).collect()
    }

    /// Tries one of them, which was `executed` as it is for scouts of the nodes that it may show in. Whether it `weighs` says if it may
    /// be nearer to those that another explains, or is of f32.
    fn one(&mut self, (tried, weighs): (&Tried, bool), mut executed: Executions<'_>) -> Result<()> {
        let (rest, shown) = (self.rest(tried), &tried.shown);
        // What most nodes are explained by in f32 is asked of all of them: by that the others are weighed.
        let asks_all = weighs && !self.best.explains_most_in_f32(shown.len());
        let all = if asks_all { shown } else { &rest };
        // One disturbed execution of a few nodes says of most arithmetics that they are none of this engine's.
        executed.disturb(1)?;
        let scouted = executed.found()?;
        if watch::is_over() {
            return Ok(());
        }
        let may_be = |(id, found): (&Checkpoint, &Simulated)| {
            found.is_within(SCATTERED) && self.best.may_be(id, found.usual)
        };
        if !scouted.iter().any(may_be) {
            self.best.take(scouted.into_iter().filter(|(_, found)| !found.is_explained()).collect());
            return Ok(());
        }
        executed.disturb(RUNS)?;
        let mut found = executed.found()?;
        // All of many nodes cost ten times what scouts do: they are asked of what leaves some scout nearly explained.
        if all != executed.open && found.values().any(|found| found.is_within(BARELY)) {
            found = self.stretch.explained(tried.arithmetic, all)?;
        }
        if !watch::is_over() {
            self.best.take(found);
        }
        Ok(())
    }
}
