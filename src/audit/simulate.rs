//! What rounding explains between two recorded nodes with many others between them, simulated.
//!
//! The worst case that every rounding may come to (`bridge.rs`) grows from node to node until it hides mistakes. So the
//! stretch is executed in f64 once as it is and several times with each result disturbed at random by what rounding
//! explains of it (D. S. Parker, "Monte Carlo arithmetic", 1997; CADNA): how far these lie apart at the next recorded
//! node is what rounding explains there. What was recorded takes the place of what was computed, so that nothing is
//! carried past it.

use std::cell::RefCell;
use std::collections::HashMap;

use indexmap::{IndexMap, IndexSet};
use parity_graph::Op;

use super::finding::most;
use super::needed::needed;
use super::passes::APART;
use super::stored::Narrowed;
use super::{Labelled, Steps, chosen_experts};
use super::{attentions, lost_steps, storage_types};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value, compute};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::{Numerics, Products, Storage};
use crate::ops::bound::HEALTHY;
use crate::ops::bound::{CONFIDENCE, UNIT_F32, storage_unit};
use crate::ops::{Args, Check};
use crate::random;

/// Disturbed executions.
const RUNS: u64 = 3;

/// How many times further than the furthest disturbed execution a row may lie: norms of rows of many independent roundings
/// scatter by a few per cent, and the bounds that they are disturbed by are those of the worst case.
const SCATTER: f64 = 2.0;

/// Stands for the scale of a norm among the slots of sources that are disturbed.
const ROOT: usize = usize::MAX;

/// What a simulation says of one recorded node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simulated {
    /// Distance of what was recorded from exact arithmetic, relative.
    pub distance: f64,
    /// What rounding explains of it.
    pub band: f64,
    /// The largest distance of a row over what rounding explains there; NaN where a value is no number.
    pub over: f64,
    /// Position of that row.
    pub position: u32,
    /// Unit roundoff of the type that values were taken to be kept in.
    pub unit: f64,
    /// The type that keys and values were taken to be cached in, where it is not that of other values.
    pub cache: Option<Storage>,
    /// Whether the recording declares that.
    pub declares_cache: bool,
    /// Whether the arithmetic is known: it is f32, the recording declares it or its values show it, or it explains most of
    /// several nodes.
    pub known: bool,
}

impl Simulated {
    /// How much of the node may be rounding, so that mistakes still show.
    fn most(&self) -> f64 {
        most(if self.known { self.unit } else { UNIT_F32 }, self.declares_cache)
    }
}

/// What is rounded to the type of a cache, by step, node and slot: its exact values, and how far at most disturbed ones lie
/// from them.
pub type Cached = HashMap<(usize, usize, usize), (Vec<f64>, Vec<f64>)>;

/// One execution of the stretch.
#[derive(Clone, Copy)]
pub enum Run {
    /// As it is.
    Exact,
    /// With every result disturbed; a seed.
    Disturbed(u64),
    /// With keys and values moved to one side, as far as disturbed ones lay, before they are rounded: one that lies near the middle between two numbers of
    /// its type falls to another one in few executions, and then by a whole step.
    Aside(f64),
}

/// Rows of a node, by (step, id).
pub type Rows = IndexMap<(usize, Checkpoint), Vec<f64>>;

/// Simulates what lies before `open` nodes, for an engine that keeps its values in `kept`; of the arithmetics that it may
/// have, the one that explains most.
///
/// # Errors
/// Those of the machine.
pub fn simulate(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    kept: Storage,
    open: &IndexSet<Checkpoint>,
) -> Result<IndexMap<Checkpoint, Simulated>> {
    let own = Arithmetic { narrow: kept, cache: kept, ..Arithmetic::EXACT };
    let mut best: IndexMap<Checkpoint, Simulated> = IndexMap::new();
    let is_explained = |found: &Simulated| found.over <= HEALTHY;
    let mut of_f32: Vec<IndexMap<Checkpoint, Simulated>> = Vec::new();
    let is_known = |unit: f64| unit <= UNIT_F32 || kept != Storage::F32 || declares_narrow(steps);
    let candle = [storage_types::CANDLE, Arithmetic { narrow: kept, cache: kept, ..storage_types::CANDLE }];
    let candle = candle.into_iter().filter(|_| steps.declared().is_none());
    let tried = [Arithmetic::EXACT, own, Arithmetic::LLAMA_CPU].into_iter().chain(candle);
    let tried: Vec<Arithmetic> = tried.chain(attentions::with_operands(steps.declared())).collect();
    let with = |cache: Storage| tried.iter().map(move |one| with_cache(*one, cache)).collect::<Vec<_>>();
    let tried: IndexSet<Arithmetic> = attentions::caches(steps).into_iter().flat_map(with).collect();
    let needed = needed(steps, graphs, &|id| open.contains(&id));
    for arithmetic in tried {
        let is_settled = |found: &Simulated| is_explained(found) && found.band <= found.most();
        if open.iter().all(|id| best.get(id).is_some_and(is_settled)) {
            break;
        }
        let cached = RefCell::new(Cached::new());
        let run = |how: Run| -> Result<Rows> {
            let mut machine: Machine<'_, f64> = Machine::new(gguf, arithmetic).rounding(steps.is_own_graph());
            let mut rows = Rows::new();
            for (&(step, labelled), needed) in graphs.iter().zip(&needed) {
                let (cached, rows) = (&cached, &mut rows);
                let lost = &lost_steps::before(steps, step)[..];
                let mut disturbed =
                    Disturbed { step, steps, labelled, lost, arithmetic, how, cached, open, rows };
                let input = |id| labelled.input(steps, step, id);
                machine.step_of(&labelled.program, &|id| needed[id], &input, &mut disturbed)?;
            }
            Ok(rows)
        };
        let exact = run(Run::Exact)?;
        let mut others: Vec<Run> = (0..RUNS).map(Run::Disturbed).collect();
        if !cached.borrow().is_empty() {
            others.extend([-1.0, 1.0].map(Run::Aside));
        }
        let runs = others.into_iter().map(run).collect::<Result<Vec<Rows>>>()?;
        let mut all = IndexMap::new();
        for &id in open {
            let Some(found) = weigh(steps, id, &exact, &runs) else { continue };
            let cache = Some(arithmetic.cache).filter(|cache| *cache != arithmetic.narrow);
            let declares_cache = cache.is_some() && steps.declared().map(|numerics| numerics.kv) == cache;
            let unit = storage_types::unit(&arithmetic);
            let found = Simulated { unit, cache, declares_cache, known: is_known(unit), ..found };
            all.insert(id, found);
            // The first that explains it and hides nothing, otherwise the one that comes nearest.
            let better = |known: &Simulated| match (is_explained(&found), is_explained(known)) {
                // What may turn out to be the engine's is kept for that.
                (true, true) => !is_settled(known) && (is_settled(&found) || known.known && !found.known),
                (explained, false) => explained || !(found.over >= known.over),
                (false, true) => false,
            };
            if best.get(&id).is_none_or(better) {
                best.insert(id, found);
            }
        }
        of_f32.extend(Some(all).filter(|all| all.values().all(|found| found.unit <= UNIT_F32)));
    }
    settle(&mut best, &of_f32);
    Ok(best)
}

/// Whether a producer says that it rounds to a type narrower than f32.
fn declares_narrow(steps: &dyn Steps) -> bool {
    let narrow = |numerics: Numerics| {
        numerics.storage != Storage::F32 || matches!(numerics.products, Products::F16 | Products::Bf16)
    };
    steps.declared().is_some_and(narrow)
}

/// Settles what is explained by an arithmetic alone that nobody declared, coarser than f32. Where an arithmetic of f32
/// explains most nodes, one that lies far from them is a mistake; where the coarse one explains most of several, it is the
/// engine's.
fn settle(best: &mut IndexMap<Checkpoint, Simulated>, of_f32: &[IndexMap<Checkpoint, Simulated>]) {
    let explained = |all: &IndexMap<Checkpoint, Simulated>| -> Vec<Simulated> {
        all.values().copied().filter(|found| found.over <= HEALTHY).collect()
    };
    let sharpest = of_f32.iter().max_by_key(|all| explained(all).len());
    let (healthy, furthest) = sharpest.map_or((0, 0.0), |all| {
        let healthy = explained(all);
        (healthy.len(), healthy.iter().map(|found| found.over).fold(0.0, f64::max))
    });
    let coarse = best.values().filter(|found| !found.known && found.over <= HEALTHY).count();
    for (id, found) in best.iter_mut().filter(|(_, found)| !found.known && found.over <= HEALTHY) {
        let in_f32 = sharpest.and_then(|all| all.get(id)).filter(|_| coarse < healthy);
        match in_f32 {
            Some(in_f32) if !(in_f32.over <= APART * furthest) => *found = *in_f32,
            // As all others, and but for what rounds in it.
            Some(in_f32) if in_f32.over <= HEALTHY => found.known = healthy > 1,
            _ => found.known = coarse > 1 && coarse >= healthy,
        }
    }
}

/// An arithmetic with keys and values in a cache of a type, unless its own is narrower than f32.
fn with_cache(one: Arithmetic, cache: Storage) -> Arithmetic {
    Arithmetic { cache: if one.cache == Storage::F32 { cache } else { one.cache }, ..one }
}

/// One node over all its rows.
fn weigh(steps: &dyn Steps, id: Checkpoint, exact: &Rows, runs: &[Rows]) -> Option<Simulated> {
    // Of each row: its position, its distance and the largest of the disturbed ones', both absolute, and its size.
    let mut rows: Vec<(u32, f64, f64, f64)> = Vec::new();
    for ((step, _), exact) in exact.iter().filter(|((_, known), _)| *known == id) {
        let recorded = steps.tensor(*step, id)?;
        let width = exact.len().checked_div(recorded.positions.len()).filter(|width| *width > 0)?;
        let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        for (row, (&position, exact)) in recorded.positions.iter().zip(exact.chunks(width)).enumerate() {
            let values: Vec<f64> =
                recorded.values[row * width..][..width].iter().map(|x| f64::from(*x)).collect();
            let spread = runs
                .iter()
                .map(|run| run.get(&(*step, id)).map(|all| apart(&all[row * width..][..width], exact)));
            let spread = spread.collect::<Option<Vec<f64>>>()?.into_iter().fold(0.0, f64::max);
            rows.push((position, apart(&values, exact), spread, apart(exact, &vec![0.0; width])));
        }
    }
    let total =
        |of: fn(&(u32, f64, f64, f64)) -> f64| rows.iter().map(|row| of(row).powi(2)).sum::<f64>().sqrt();
    let size = total(|row| row.3);
    let (distance, spread) = (total(|row| row.1) / size, total(|row| row.2) / size);
    let over = |row: &(u32, f64, f64, f64)| row.1 / (SCATTER * row.2.max(spread * row.3));
    let worst = rows.iter().max_by(|a, b| over(a).total_cmp(&over(b)))?;
    let band = SCATTER * spread;
    let (over, position, unit) = (over(worst), worst.0, storage_unit(Storage::F32));
    Some(Simulated { distance, band, over, position, unit, cache: None, declares_cache: false, known: true })
}

/// Goes on with what was recorded, and with disturbed values of what was not.
pub struct Disturbed<'a> {
    pub step: usize,
    pub steps: &'a dyn Steps,
    pub labelled: &'a Labelled,
    pub lost: &'a [std::ops::Range<u32>],
    pub arithmetic: Arithmetic,
    pub how: Run,
    pub cached: &'a RefCell<Cached>,
    pub open: &'a IndexSet<Checkpoint>,
    pub rows: &'a mut Rows,
}

impl Conductor<f64> for Disturbed<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let lost = lost_steps::read_by(self.lost, (self.steps, self.step), self.labelled, node.id);
        let args = lost.as_ref().map_or(args, Err);
        let Some(checkpoint) = self.labelled.labels.get(node.id).copied().flatten() else {
            return Ok(self.own(node, args, false).map(Into::into));
        };
        // Which experts were chosen is known: where scores are nearly alike, a disturbed choice would be another.
        let recorded = self.steps.tensor(self.step, checkpoint);
        let recorded =
            recorded.or_else(|| chosen_experts::order(self.steps, self.step, node, checkpoint, args));
        let arranged =
            recorded.as_ref().and_then(|recorded| self.labelled.arrange(node.id, checkpoint, recorded));
        let (Some(recorded), Some(arranged)) = (recorded, arranged) else {
            return Ok(self.own(node, args, true).map(Into::into));
        };
        if self.open.contains(&checkpoint)
            && let Ok(own) = self.own(node, args, true)
        {
            self.rows.insert((self.step, checkpoint), arranged.of_rows(&own));
        }
        let cut = std::cell::OnceCell::new();
        let own = || self.own(node, args, false).unwrap_or_default();
        let beyond = |element: usize| cut.get_or_init(own).get(element).copied().unwrap_or_default();
        Ok(Ok(arranged.of_node(&recorded.values, beyond).into()))
    }
}

impl Disturbed<'_> {
    /// A node's own values, disturbed where that is asked for.
    pub fn own(
        &self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
        disturb: bool,
    ) -> std::result::Result<Vec<f64>, Unknown> {
        let args = args.map_err(Clone::clone)?;
        let rule =
            node.rule.ok_or_else(|| Unknown::no_rule(args.name, &node.program.graph.get(node.id).op))?;
        let mut narrowed = Narrowed::of(&rule.op, args, &self.arithmetic);
        let seed = match self.how {
            Run::Disturbed(seed) if disturb => Some(seed),
            _ => None,
        };
        self.beside(node.id, &rule.op, args, &mut narrowed);
        let key = |seed: u64, slot: usize, i: usize| {
            draw([seed, self.step as u64, node.id as u64, slot as u64, i as u64])
        };
        if let Some(seed) = seed {
            narrowed.disturb(&rule.op, args, self.arithmetic.narrow, |slot, i| key(seed, slot + 1, i));
        }
        let arithmetic = attentions::of_product(&self.arithmetic, &rule.op, args);
        let args = Args { arithmetic: &arithmetic, sources: narrowed.sources(args), ..*args };
        let mut values = compute::<f64>(rule, &args)?;
        let bound = match &rule.check {
            Check::Bound(bound) | Check::Settled { bound, .. } => Some(bound),
            Check::Exact | Check::Choice(_) => None,
        };
        if let Some((seed, bound)) = seed.zip(bound) {
            let explained = bound(&args, &values);
            for (i, (value, explained)) in values.iter_mut().zip(explained).enumerate() {
                let rounded = storage_types::rounding(self.arithmetic.narrow, *value);
                *value += (explained / CONFIDENCE + rounded) * key(seed, 0, i);
            }
            let roots = storage_types::roots(self.arithmetic.narrow, &rule.op, &args).into_iter().flatten();
            for (row, (values, off)) in values.chunks_mut(args.shape[3].max(1)).zip(roots).enumerate() {
                let factor = 1.0 + off * key(seed, ROOT, row);
                values.iter_mut().for_each(|value| *value *= factor);
            }
        }
        Ok(values)
    }
}

impl Disturbed<'_> {
    /// Notes keys and values as they are before they are rounded to the type of a cache, or moves them aside.
    fn beside(&self, node: usize, op: &Op, args: &Args<'_, f64>, narrowed: &mut Narrowed) {
        for (slot, values) in Narrowed::cached(op, args, &self.arithmetic) {
            let (key, mut cached) = ((self.step, node, slot), self.cached.borrow_mut());
            match (self.how, cached.get_mut(&key)) {
                (Run::Exact, _) => {
                    let none = vec![0.0; values.len()];
                    cached.insert(key, (values, none));
                }
                (Run::Disturbed(_), Some((exact, apart))) => {
                    let off = values.iter().zip(exact.iter()).map(|(value, exact)| (value - exact).abs());
                    apart.iter_mut().zip(off).for_each(|(apart, off)| *apart = apart.max(off));
                }
                (Run::Aside(sign), Some((_, apart))) => {
                    let moved = values.iter().zip(apart).map(|(value, apart)| value + sign * *apart);
                    narrowed.put(slot, moved.collect(), &self.arithmetic);
                }
                (_, None) => {}
            }
        }
    }
}

/// A number in [-1, 1), the same for the same key.
fn draw(key: [u64; 5]) -> f64 {
    let mut z = 0u64;
    for word in key {
        z = random::mixed((z ^ word).wrapping_add(random::GAMMA));
    }
    random::unit(z)
}
