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
use parity_graph::known::is_weight;

use super::aside::Aside;
use super::best::{Best, Simulated, scouts};
use super::needed::needed;
use super::possible::{self, Mix};
use super::shown_products::Shown;
use super::stored::Narrowed;
use super::{Labelled, Steps, chosen_experts};
use super::{attentions, lost_steps, storage_types};
use crate::arithmetic::{Arithmetic, Flash, Operands, name_of};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value, compute};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::ops::bound::HEALTHY;
use crate::ops::bound::{CONFIDENCE, UNIT_F16, UNIT_F32};
use crate::ops::{Args, Check, Rule};
use crate::random;
use crate::watch;

/// Disturbed executions.
const RUNS: u64 = 3;

/// How many times further than the furthest disturbed execution a row may lie: norms of rows of many independent roundings
/// scatter by a few per cent, and the bounds that they are disturbed by are those of the worst case.
pub const SCATTER: f64 = 2.0;

/// Stands for the scale of a norm among the slots of sources that are disturbed.
const ROOT: usize = usize::MAX;

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

/// What rounding explains of products with weights, by step and node, as the first disturbed execution has it: the others
/// multiply the same weight with the same values but for their roundings, and half of what an execution costs is this.
#[derive(Default)]
pub struct Bounds {
    known: HashMap<(usize, usize), Vec<f32>>,
    values: usize,
}

/// Values of bounds that are kept: a GiB.
const BOUNDS_MAX: usize = 1 << 28;

/// Rows of a node, by (step, id).
pub type Rows = IndexMap<(usize, Checkpoint), Vec<f64>>;

/// Simulates what lies before `open` nodes, for an engine that keeps its values in `kept`; of the arithmetics that it may
/// have, the one that explains most: of those whose products are computed as the recorded ones are `shown` to be.
///
/// # Errors
/// Those of the machine.
pub fn simulate(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    (kept, shown): (Storage, Option<Shown>),
    open: &IndexSet<Checkpoint>,
) -> Result<IndexMap<Checkpoint, Simulated>> {
    let is_known = |unit: f64| unit <= UNIT_F32 || kept != Storage::F32 || possible::declares_narrow(steps);
    let two_products = steps.declared().and_then(attentions::in_two_products);
    let tried = possible::arithmetics(steps, (kept, shown), two_products);
    let attention = two_products.map(|one| one.flash);
    let stretch = Stretch { is_known: &is_known, shown, attention, ..Stretch::of_known(steps, graphs, gguf) };
    let attending = stretch.attending(open);
    let mut best = Best::default();
    // What does not show in attention, of the arithmetics that were tried.
    let mut plain: IndexSet<Arithmetic> = IndexSet::new();
    for arithmetic in tried {
        if watch::is_over() || open.iter().all(|id| best.is_settled(id)) {
            break;
        }
        let Arithmetic { flash, cache, .. } = Arithmetic::EXACT;
        let is_new = plain.insert(Arithmetic { flash, cache, ..arithmetic });
        let shows = |id: &Checkpoint| is_new || attending.contains(id);
        let open: &IndexSet<Checkpoint> = &open.iter().copied().filter(shows).collect();
        let rest: IndexSet<Checkpoint> = open.iter().copied().filter(|id| !best.is_settled(id)).collect();
        if rest.is_empty() {
            continue;
        }
        // What most nodes are explained by in f32 is asked of all of them: by that the others are weighed.
        let all = if best.explains_most_in_f32(open.len()) { &rest } else { open };
        // One disturbed execution of a few nodes says of most arithmetics that they are none of this engine's.
        let scouted = stretch.simulated(arithmetic, &scouts(&rest), 1)?;
        if watch::is_over() {
            break;
        }
        let may_be = |(id, found): (&Checkpoint, &Simulated)| {
            found.over <= SCATTERED * HEALTHY && best.may_be(id, found)
        };
        if !scouted.iter().any(may_be) {
            best.take(scouted.into_iter().filter(|(_, found)| !(found.over <= HEALTHY)).collect());
            continue;
        }
        let found = stretch.simulated(arithmetic, all, RUNS)?;
        if watch::is_over() {
            break;
        }
        best.take(found);
    }
    if watch::is_over() {
        // What was tried explains some; of the others nobody knows what the rest would say.
        best.nodes.retain(|_, found| found.over <= HEALTHY);
        return Ok(best.nodes);
    }
    // Those that nothing explains are shown as far as they are from f32.
    let rest: IndexSet<Checkpoint> = open.iter().copied().filter(|id| !best.nodes.contains_key(id)).collect();
    if !rest.is_empty() {
        best.take(stretch.simulated(Arithmetic::EXACT, &rest, RUNS)?);
    }
    best.settle();
    Ok(best.nodes)
}

/// How many times what a single disturbed execution explains an arithmetic may leave of a scout: several lie a few per cent
/// apart, unless little of what rounds shows in one of them.
pub const SCATTERED: f64 = 4.0;

/// What is simulated.
pub struct Stretch<'a> {
    steps: &'a dyn Steps,
    graphs: &'a [(usize, &'a Labelled)],
    gguf: &'a Gguf,
    /// Whether an arithmetic of this unit roundoff is known to be the producer's.
    is_known: &'a dyn Fn(f64) -> bool,
    /// What recorded products round operands to, where they show it.
    shown: Option<Shown>,
    /// What attention was declared to be, where that rounds more than its cache.
    attention: Option<Flash>,
    /// Whether a prompt is computed from keys and values as they are, before they are kept in eight bits.
    is_kept_later: bool,
    /// Which nodes alone round the operands of their products.
    mix: Option<&'a Mix>,
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
            is_kept_later: false,
            mix: None,
        }
    }

    /// The same of one that rounds the operands of some of its products alone.
    pub fn mixed<'b>(&'b self, mix: &'b Mix) -> Stretch<'b> {
        Stretch { mix: Some(mix), ..*self }
    }

    /// The same of one that may compute a prompt from its keys and values before they are kept.
    pub fn kept_later(self, is_kept_later: bool) -> Stretch<'a> {
        Stretch { is_kept_later, ..self }
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
        self.simulated(arithmetic, open, RUNS)
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
        let found = self.simulated(arithmetic, open, 0)?;
        Ok(found.into_iter().map(|(id, found)| (id, found.distance)).collect())
    }

    /// The same of all of them together; NaN where one is not known.
    ///
    /// # Errors
    /// Those of the machine.
    pub fn apart(&self, arithmetic: Arithmetic, open: &IndexSet<Checkpoint>) -> Result<f64> {
        let found = self.distances(arithmetic, open)?;
        let apart = found.values().map(|distance| distance.powi(2)).sum::<f64>().sqrt();
        Ok(if found.len() < open.len() { f64::NAN } else { apart })
    }

    /// What a step is computed in.
    fn in_step(&self, step: usize, arithmetic: Arithmetic) -> Arithmetic {
        let is_prompt = self.steps.positions(step).first() == Some(&0);
        let packed = if self.is_kept_later && is_prompt { [None; 2] } else { arithmetic.packed };
        Arithmetic { packed, ..arithmetic }
    }

    /// Those of some nodes that attention lies before which was not recorded.
    fn attending(&self, open: &IndexSet<Checkpoint>) -> IndexSet<Checkpoint> {
        let attends = |id: &&Checkpoint| {
            let needed = needed(self.steps, self.graphs, &|known| known == **id);
            self.graphs.iter().zip(needed).any(|((_, labelled), needed)| {
                let graph = &labelled.program.graph;
                // Attention in parts has two products of values, and anything else that reads a cache is as good as that.
                let attends = |id: usize| match graph.get(id).op {
                    Op::MulMat => !graph.src(id, 0).is_some_and(|weight| is_weight(&graph.get(weight).name)),
                    Op::FlashAttn | Op::SoftMax => true,
                    _ => graph.sources(id).any(|source| labelled.program.is_written(graph.root(source))),
                };
                labelled.program.executed().any(|id| needed[id] && attends(id))
            })
        };
        open.iter().filter(attends).copied().collect()
    }

    /// What one arithmetic explains of `open` nodes, by so many disturbed executions.
    fn simulated(
        &self,
        arithmetic: Arithmetic,
        open: &IndexSet<Checkpoint>,
        runs: u64,
    ) -> Result<IndexMap<Checkpoint, Simulated>> {
        let Stretch { steps, graphs, gguf, .. } = *self;
        let needed = needed(steps, graphs, &|id| open.contains(&id));
        let (aside, bounds) = (Aside::default(), RefCell::new(Bounds::default()));
        let run = |how: Run| -> Result<Rows> {
            let mut machine: Machine<'_, f64> = Machine::new(gguf, arithmetic).rounding(steps.is_own_graph());
            let mut rows = Rows::new();
            for (&(step, labelled), needed) in graphs.iter().zip(&needed) {
                let arithmetic = self.in_step(step, arithmetic);
                let (aside, bounds, rows, mix) = (&aside, Some(&bounds), &mut rows, self.mix);
                let lost = &lost_steps::before(steps, step)[..];
                let mut disturbed = Disturbed {
                    step,
                    steps,
                    labelled,
                    lost,
                    arithmetic,
                    mix,
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
        };
        let exact = run(Run::Exact)?;
        let mut runs = (0..runs).map(Run::Disturbed).map(run).collect::<Result<Vec<Rows>>>()?;
        // How far disturbed values lie apart is how far they are moved.
        if !runs.is_empty() && aside.moves() {
            runs.extend([run(Run::Aside(-1.0))?, run(Run::Aside(1.0))?]);
        }
        let narrow = Some(arithmetic.cache).filter(|cache| *cache != arithmetic.narrow);
        let declares_cache = narrow.is_some() && steps.declared().map(|numerics| numerics.kv) == narrow;
        let named = name_of(arithmetic.packed).or(narrow.map(attentions::name_of_cache));
        let named = named.or(self.mix.and_then(|mix| mix.name()));
        let unit = storage_types::unit(&arithmetic);
        let is_plain = unit <= UNIT_F32 && arithmetic.operands == Operands::Exact;
        let is_shown = self.shown.is_some_and(|shown| shown.allows(arithmetic.operands));
        let is_declared = self.attention == Some(arithmetic.flash);
        let known = (self.is_known)(unit)
            || is_declared
            || is_shown && !matches!(arithmetic.flash, Flash::Rounded(..));
        // Blocks of eight bits round about as much as f16 does.
        let unit = if is_shown && !is_plain { unit.max(UNIT_F16) } else { unit };
        let of = |id: Checkpoint| {
            let found = Simulated::of(steps, id, &exact, &runs)?;
            Some((id, Simulated { unit, named, declares_cache, known, is_plain, ..found }))
        };
        Ok(open.iter().copied().filter_map(of).collect())
    }
}

/// Goes on with what was recorded, and with disturbed values of what was not.
pub struct Disturbed<'a> {
    pub step: usize,
    pub steps: &'a dyn Steps,
    pub labelled: &'a Labelled,
    pub lost: &'a [std::ops::Range<u32>],
    pub arithmetic: Arithmetic,
    /// Which nodes alone round the operands of their products.
    pub mix: Option<&'a Mix>,
    pub how: Run,
    pub aside: &'a Aside,
    pub bounds: Option<&'a RefCell<Bounds>>,
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
        watch::at(|| format!("{checkpoint}, whose rounding is simulated"), || None);
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
        if let Some(late) = watch::over() {
            return Err(Unknown::new(late));
        }
        let args = args.map_err(Clone::clone)?;
        let rule =
            node.rule.ok_or_else(|| Unknown::no_rule(args.name, &node.program.graph.get(node.id).op))?;
        let kind = self.labelled.labels[node.id].map(|id| id.kind());
        let rows = self.steps.positions(self.step).len();
        let arithmetic = self.mix.map_or(self.arithmetic, |mix| mix.at(self.arithmetic, kind, rows));
        let mut narrowed = Narrowed::of(&rule.op, args, &arithmetic);
        let seed = match self.how {
            Run::Disturbed(seed) if disturb => Some(seed),
            _ => None,
        };
        self.aside.note((self.step, node.id), self.how, (&rule.op, args, &arithmetic), &mut narrowed);
        let key = |seed: u64, slot: usize, i: usize| {
            draw([seed, self.step as u64, node.id as u64, slot as u64, i as u64])
        };
        if let Some(seed) = seed {
            narrowed.scatter(&rule.op, args, &arithmetic, |slot, i| key(seed, slot + 1, i));
            narrowed.disturb(&rule.op, args, self.arithmetic.narrow, |slot, i| key(seed, slot + 1, i));
        }
        let arithmetic = attentions::of_product(&arithmetic, &rule.op, args);
        let args = Args { arithmetic: &arithmetic, sources: narrowed.sources(args), ..*args };
        let mut values = compute::<f64>(rule, &args)?;
        let bound = match &rule.check {
            Check::Bound(bound) | Check::Settled { bound, .. } => Some(bound),
            Check::Exact | Check::Choice(_) => None,
        };
        if let Some((seed, bound)) = seed.zip(bound) {
            let explained = self.bound(node.id, rule, &args, &|| bound(&args, &values));
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
    /// What rounding explains of a node, which of a product with a weight is computed once.
    fn bound(
        &self,
        node: usize,
        rule: &Rule,
        args: &Args<'_, f64>,
        computed: &dyn Fn() -> Vec<f64>,
    ) -> Vec<f64> {
        let Some(bounds) = self.bounds.filter(|_| storage_types::is_product(&rule.op, args)) else {
            return computed();
        };
        if let Some(known) = bounds.borrow().known.get(&(self.step, node)) {
            return known.iter().copied().map(f64::from).collect();
        }
        let own = computed();
        let mut bounds = bounds.borrow_mut();
        if bounds.values + own.len() <= BOUNDS_MAX {
            bounds.values += own.len();
            bounds.known.insert((self.step, node), own.iter().map(|bound| *bound as f32).collect());
        }
        own
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
