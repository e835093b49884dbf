//! Nodes behind products that were not recorded, of an engine that rounds the operands of some products alone.
//!
//! All products of such a stretch rounded alike do not explain it, and bounds that allow for any of them would hide mistakes.
//! So each kind of them is tried by itself: what brings the stretch nearer to what was recorded is rounded, what takes it further
//! away is not. Roundings of different products do not add up (what is cut off lies on one side, and what a product rounds shows
//! only once what it reads is right): to try each beside none of the others found a third of such engines. What all of them
//! together leave must be a small share of what was left without, which no mistake looks like: hundreds of roundings would have
//! to be those of its numbers by chance.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use indexmap::IndexSet;

use super::super::attentions::attends;
use super::super::best::{NEARER, Simulated};
use super::super::needed::needed;
use super::super::operands;
use super::super::possible::{Mix, Rows};
use super::super::simulate::{SCATTERED, Stretch};
use super::{APART, Assumed, Findings, Passes};
use crate::arithmetic::{Arithmetic, Narrow, OfAttention, Weights};
use crate::audit::{Finding, Labelled};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::numerics::Storage;
use crate::ops::bound::unit_of;
use crate::watch;

/// What operands are rounded to, by what each of it tells from the others: kinds of rounding that agree but for halves, or the
/// least numbers, show the same products.
const ALIKE: [&[Narrow]; 3] =
    [&[Narrow::Tf32, Narrow::Tf32Away, Narrow::F16], &[Narrow::Tf32Cut], &[Narrow::Bf16]];

/// What attention rounds as a rule.
const WHOLE: [OfAttention; 2] = [OfAttention::all(Weights::Divided), OfAttention::all(Weights::Undivided)];

/// The same where that is a part of it: queries and keys, keys alone as a cache holds them, queries alone; values, alone or with
/// the weights that they meet. Weights alone are those of a softmax in a narrow type, which is a mistake.
const PARTS: [OfAttention; 6] = [
    part([true, true, false], Weights::Kept),
    part([false, true, false], Weights::Kept),
    part([true, false, false], Weights::Kept),
    part([false, false, true], Weights::Kept),
    part([false, false, true], Weights::Divided),
    part([false, false, true], Weights::Undivided),
];

const fn part(read: [bool; 3], weights: Weights) -> OfAttention {
    OfAttention { read, weights }
}

/// Nodes of a kind that no such mix explains, before its others are given up: a mistake in one is one in all layers as a rule.
const UNEXPLAINED_MAX: usize = 2;

/// Steps of one row, and of several, that mixes are tried in.
const STEPS: usize = 2;

/// What was taken for a mix.
#[derive(Default)]
struct Taken {
    /// The rows whose operands may be rounded.
    rows: Vec<Rows>,
    /// Each that came near a node.
    mixes: Vec<Mix>,
    /// Kinds of nodes of which one leaves little.
    kinds: HashSet<Kind>,
    nodes: HashSet<Checkpoint>,
}

impl Passes<'_> {
    /// Takes nodes that are wrong, or that nothing explains which the engine shows, for what an engine of f32 computes whose
    /// products are such a mix; where it declares its arithmetic, for that in the rows that show it.
    pub(super) fn mixed(&self, assumed: &Assumed, findings: &mut Findings) -> Result<()> {
        let rows = self.rows(findings);
        if assumed.kept != Storage::F32 || rows.is_empty() {
            return Ok(());
        }
        let is_open =
            |finding: &Finding| finding.is_wrong() || finding.is_healthy() && finding.is_of_unknown();
        let mut open = crossed(findings, &is_open);
        let (mut unexplained, mut taken) =
            (HashMap::<Kind, usize>::new(), Taken { rows, ..Taken::default() });
        while let Some(&first) = open.first().filter(|_| !watch::is_over()) {
            if let Some(mix) = self.mix_before(first, &taken.rows)? {
                self.take_mix(&mix, &mut open, &mut taken, findings)?;
                taken.mixes.push(mix);
            }
            if open.shift_remove(&first) {
                let count = unexplained.entry(first.kind()).or_default();
                *count += 1;
                if *count >= UNEXPLAINED_MAX {
                    open.retain(|id| id.kind() != first.kind());
                }
            }
        }
        self.beside_mixed(&mut taken, findings)
    }

    /// Holds nodes that a coarse arithmetic explains, and hides mistakes in, to what others of their kind show, of which a mix
    /// leaves little: what is far from all that was taken so, and that no other mix explains, is wrong then.
    fn beside_mixed(&self, taken: &mut Taken, findings: &mut Findings) -> Result<()> {
        let mut open = crossed(findings, &Finding::is_simulated_coarsely);
        open.retain(|id| taken.kinds.contains(&id.kind()) && !taken.nodes.contains(id));
        for mix in taken.mixes.clone() {
            self.take_mix(&mix, &mut open, taken, findings)?;
        }
        while let Some(&first) = open.first().filter(|_| !watch::is_over()) {
            if let Some(mix) = self.mix_before(first, &taken.rows)? {
                self.take_mix(&mix, &mut open, taken, findings)?;
                taken.mixes.push(mix);
            }
            if !open.shift_remove(&first) {
                continue;
            }
            let (only, stretch) = (IndexSet::from([first]), self.known());
            let each = taken.mixes.iter().map(|mix| stretch.mixed(mix).explained(mix.arithmetic(), &only));
            let each = each.collect::<Result<Vec<_>>>()?;
            let nearest = each.iter().filter_map(|found| found.get(&first));
            let nearest = nearest.min_by(|a, b| a.over.total_cmp(&b.over));
            if let Some(found) = nearest.filter(|found| !found.is_within(APART)) {
                findings.at(first).settle(*found);
            }
        }
        Ok(())
    }

    /// Takes those of some nodes that a mix explains, of which the others stay: it leaves little of them, or of another of their
    /// kind, as an engine computes nodes of one kind alike in all layers.
    fn take_mix(
        &self,
        mix: &Mix,
        open: &mut IndexSet<Checkpoint>,
        taken: &mut Taken,
        findings: &mut Findings,
    ) -> Result<()> {
        let stretch = self.known();
        let plain = stretch.distances(Arithmetic::EXACT, open)?;
        let explained = stretch.mixed(mix).explained(mix.arithmetic(), open)?;
        let is_sharp = |(id, found): &(&Checkpoint, &Simulated)| {
            plain.get(*id).is_some_and(|plain| NEARER * found.distance <= *plain)
        };
        let sharp = explained.iter().filter(is_sharp).filter(|(_, found)| found.is_within(SCATTERED));
        taken.kinds.extend(sharp.map(|(id, _)| id.kind()));
        for (id, found) in &explained {
            let found = if is_sharp(&(id, found)) { found.widened(SCATTERED) } else { *found };
            if found.is_explained() && (taken.kinds.contains(&id.kind()) || mix.kinds.is_empty()) {
                findings.at(*id).settle(found);
                findings.at(*id).forget_names();
                taken.nodes.insert(*id);
                open.shift_remove(id);
            }
        }
        Ok(())
    }

    /// What an engine may have rounded before a node; `None` where no mix of roundings is much nearer to it than none.
    fn mix_before(&self, id: Checkpoint, rows: &[Rows]) -> Result<Option<Mix>> {
        let few = self.few_steps(id);
        let stretch = Stretch::of_known(self.steps, few, self.gguf);
        let only = IndexSet::from([id]);
        let apart = |mix: &Mix| stretch.mixed(mix).apart(mix.arithmetic(), &only);
        let (classes, layers) = self.multiplying(id);
        // Behind several layers every mix costs an execution of all of them, and what each layer rounds hides what a class does.
        if layers > 1 {
            return Ok(None);
        }
        let plain = stretch.explained(Arithmetic::EXACT, &only)?;
        let Some(plain) = plain.get(&id) else { return Ok(None) };
        if plain.is_explained() {
            return Ok(Some(Mix::none()));
        }
        let of_weights = classes.iter().filter(|kinds| !kinds.iter().any(|kind| attends(*kind))).count();
        let has_attention = of_weights < classes.len();
        let attentions: &[&[OfAttention]] = match has_attention {
            // What is rounded of a part of it shows beside one product at most.
            true if of_weights <= 1 => &[&WHOLE, &PARTS],
            true => &[&WHOLE],
            false => &[&WHOLE[..1]],
        };
        // Each product moves what follows by about as much as its operands are rounded by.
        let may_be = |narrow: Narrow| plain.distance <= classes.len() as f64 * unit_of(narrow);
        let known = operands::operands(self.steps.declared());
        let is_known = |narrow: &Narrow| known.iter().any(|(_, known)| known == narrow);
        for alike in ALIKE {
            let alike: Vec<Narrow> = alike.iter().copied().filter(is_known).collect();
            let Some(first) = alike.first().copied().filter(|first| may_be(*first)) else { continue };
            for attentions in attentions {
                let mut nearest = (plain.distance / NEARER, None);
                for (attention, rows) in
                    attentions.iter().flat_map(|of| rows.iter().map(move |rows| (of, rows)))
                {
                    let from =
                        Mix { narrow: first, attention: *attention, rows: rows.clone(), ..Mix::none() };
                    let is_first = *attention == WHOLE[0];
                    let classes = match rows {
                        // Rows of attention are not told apart: each reads what others gave.
                        Rows::At(_) if is_first => &classes[..of_weights],
                        // An engine that rounds a part of it does so whatever rows there are.
                        Rows::At(_) => continue,
                        Rows::One | Rows::Several if !attention.is_whole() => continue,
                        _ => &classes[..],
                    };
                    let kinds = nearest_kinds((&from, plain.distance), classes, &apart)?;
                    let of = |narrow: &Narrow| Mix { narrow: *narrow, kinds: kinds.clone(), ..from.clone() };
                    for mix in alike.iter().map(of).filter(|mix| !mix.kinds.is_empty()) {
                        let apart = apart(&mix)?;
                        if apart < nearest.0 {
                            nearest = (apart, Some(mix));
                        }
                    }
                }
                if nearest.1.is_some() {
                    return Ok(nearest.1);
                }
            }
        }
        Ok(None)
    }

    /// The first steps, until a node was recorded in a few of several rows and in a few of one: what is rounded in these is in all,
    /// and a hundred mixes are tried.
    fn few_steps(&self, id: Checkpoint) -> &[(usize, &Labelled)] {
        let rows = |(step, _): &(usize, &Labelled)| self.steps.rows(*step, id);
        let of_one = |rows: &usize| *rows == 1;
        let count = |graphs: &[(usize, &Labelled)]| {
            let (one, several): (Vec<usize>, Vec<usize>) = graphs.iter().filter_map(rows).partition(of_one);
            [one, several].map(|steps| steps.len().min(STEPS))
        };
        let all = count(self.graphs);
        let first = (0..self.graphs.len()).find(|last| count(&self.graphs[..=*last]) == all);
        first.map_or(self.graphs, |last| &self.graphs[..=last])
    }

    /// The rows whose operands may be rounded: all, where some steps have one and others several those of either, and those
    /// that recorded products show.
    fn rows(&self, findings: &Findings) -> Vec<Rows> {
        let is_of_one = |step: usize| self.steps.positions(step).len() == 1;
        let is_declared = self.steps.declared().is_some();
        let [one, several] =
            [true, false].map(|of_one| self.graphs.iter().any(|(step, _)| is_of_one(*step) == of_one));
        let either = [Rows::Several, Rows::One].into_iter().filter(move |_| one && several);
        let shown: BTreeSet<u32> =
            findings.nodes.values().flat_map(|finding| &finding.rounded_rows).copied().collect();
        // A step of one row has none beside it that would show it.
        let alone = self.graphs.iter().map(|(step, _)| *step).filter(|step| is_of_one(*step));
        let alone: BTreeSet<u32> = alone.flat_map(|step| self.steps.positions(step)).collect();
        let is_shown = !shown.is_empty();
        let shown: IndexSet<BTreeSet<u32>> = [&shown | &alone, shown].into_iter().rev().collect();
        let shown = shown.into_iter().filter(|_| is_shown).map(|rows| Rows::At(Arc::new(rows)));
        // An engine that declares its arithmetic has it at all products, but for rows that need it less.
        std::iter::once(Rows::Any).chain(either).filter(|_| !is_declared).chain(shown).collect()
    }

    /// The kinds of products that were not recorded between a node and what was recorded before it, those of attention together;
    /// and of how many layers these are.
    fn multiplying(&self, id: Checkpoint) -> (Vec<HashSet<Kind>>, usize) {
        let (mut weights, mut attention) = (IndexSet::new(), HashSet::new());
        let mut layers = HashSet::new();
        let needed = needed(self.steps, self.graphs, &|known| known == id);
        for ((_, labelled), needed) in self.graphs.iter().zip(needed) {
            for (node, label) in labelled.nodes().filter(|(node, _)| needed[*node]) {
                let kind = label.kind();
                let multiplies = labelled.multiplies_weight(node);
                if multiplies || attends(kind) {
                    layers.extend(label.layer_index());
                }
                if multiplies {
                    weights.insert(kind);
                } else if attends(kind) {
                    attention.insert(kind);
                }
            }
        }
        let of_weights = weights.into_iter().map(|kind| HashSet::from([kind]));
        let classes = of_weights.chain(Some(attention).filter(|kinds| !kinds.is_empty())).collect();
        (classes, layers.len())
    }
}

/// Those of some nodes that were computed across others, in the order of the graph.
pub(super) fn crossed(findings: &Findings, is: &dyn Fn(&Finding) -> bool) -> IndexSet<Checkpoint> {
    let crosses = |finding: &Finding| is(finding) && !finding.bridged.is_empty();
    let order = findings.order.iter().copied();
    order.filter(|id| findings.nodes.get(id).is_some_and(crosses)).collect()
}

/// Which of some classes of products bring a node nearest to what was recorded where their operands are rounded, one class changed at a time as long as that helps: what a product reads shows its rounding only once what lies before it is right.
/// From where the node is `plain`, relative, or from where all of them round, whichever is nearer.
fn nearest_kinds(
    (from, plain): (&Mix, f64),
    classes: &[HashSet<Kind>],
    apart: &dyn Fn(&Mix) -> Result<f64>,
) -> Result<HashSet<Kind>> {
    let mix = |kinds: HashSet<Kind>| Mix { kinds, ..from.clone() };
    let all = mix(classes.iter().flatten().copied().collect());
    let of_all = apart(&all)?;
    let (mut least, mut kinds) = if of_all < plain { (of_all, all.kinds) } else { (plain, HashSet::new()) };
    loop {
        let mut nearest = None;
        for class in classes {
            let changed = mix(kinds.symmetric_difference(class).copied().collect());
            let apart = apart(&changed)?;
            if apart < least {
                (least, nearest) = (apart, Some(changed.kinds));
            }
        }
        match nearest {
            Some(nearest) if !watch::is_over() => kinds = nearest,
            _ => return Ok(kinds),
        }
    }
}
