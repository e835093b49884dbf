//! Activations that an engine rounds in a form that nobody knows, and sums that it rounds to f16 as they come.
//!
//! Kernels quantise what meets a weight in blocks of 16 to 128, in rows or with one scale for all, with a zero or without, and no
//! list has every form. What they have in common is that the error of a product is that of what it multiplies: E = W·Δx. A
//! product with more outputs than inputs shows that whatever the form is: its errors lie in the space of the columns of W, where
//! those of other weights, of sums or of a wrong row do not. Of n outputs and k inputs chance leaves 1 - k/n of their squares.

pub(super) mod fit;

use std::collections::HashMap;

use indexmap::{IndexMap, IndexSet};
use parity_graph::{Id, fault};

use super::unlike::BARELY;
use super::{APART, Findings, Passes};
use crate::audit::operands::IN_EIGHT_BITS;
use crate::audit::storage_types::shown;
use crate::audit::tokens::spread;
use crate::audit::{Finding, Labelled, OF_EIGHT_BITS, exact, parts};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::gguf::TensorRef;
use crate::numerics::{Products, Storage};
use crate::ops::bound::UNIT_F16;
use crate::report::words::number;
use crate::tensor::Matrix;
use fit::{Fit, linear};

/// Share of the nodes of a kind, and of all behind a product, that must be off for it to be how the engine multiplies.
const MOST: [usize; 2] = [3, 4];
/// The same of those that nothing explains, where eight bits explain the others.
const SOME: [usize; 2] = [1, 4];
/// Kinds of nodes that must be off: one alone may be a mistake in all layers.
const KINDS_MIN: usize = 2;
/// Kinds that are enough where all others are left as they are: the products of a feed-forward block.
const KINDS_ALONE: usize = 3;
/// How many times as far off as the usual one of its kind a node may be: they use up their bounds alike within that.
pub const NEAR: f64 = 3.0;
/// Rows of a product that are looked at.
const ROWS: usize = 8;
/// Products that are.
const PRODUCTS: usize = 4;
/// Outputs for each input that such a product must have at least.
const OUTPUTS_MIN: usize = 2;
/// Values of a weight that are read at most.
const WEIGHT_MAX: usize = 1 << 25;
/// How much of what their inputs have in common errors of sums have at most: of other weights it is all.
const LINEAR: f64 = 0.5;

/// What such nodes need.
const OF_ACTIVATIONS: &str = "what it multiplies as the engine's kernel rounds it: nothing but activations in about eight bits, of \
                              a form that is not known, explains the matmuls of this dump";
const OF_SUMS: &str = "the order of its sums: nothing but sums in f16 explains the matmuls of this dump";

/// Nodes behind products that are wrong by about as much as each other.
#[derive(Default)]
struct OffAlike {
    nodes: IndexSet<Checkpoint>,
    /// How far off the furthest of them may be, relative.
    most: f64,
    /// Those that nothing but a coarse arithmetic explains that nothing shows.
    unknown: IndexSet<Checkpoint>,
    /// Whether, with those that activations in eight bits explain, they are nearly all that were judged, or may be: the roundings
    /// of a narrow type hide others.
    are_most: bool,
    /// Those that sums in f16 may explain.
    of_sums: IndexSet<Checkpoint>,
}

impl Passes<'_> {
    /// Takes nodes behind products for undecided where nearly all are off alike, none of them by a mistake that has a name, and
    /// rounding of what is multiplied, or of sums in f16, would explain that.
    pub(super) fn doubt_activations(&self, findings: &mut Findings) -> Result<()> {
        let declared = self.steps.declared().map(|numerics| numerics.products);
        if self.steps.is_own_graph()
            || matches!(declared, Some(Products::F32 | Products::F64))
            || !findings.nodes.values().any(is_unsettled)
        {
            return Ok(());
        }
        let kept = shown(self.steps, self.graphs);
        let off = self.off_alike(findings, kept);
        let is_eight_bits = declared.is_none() && findings.has_eight_bits();
        let are_of_inputs =
            off.are_most && (is_eight_bits || self.are_of_inputs(findings, &off.nodes, kept)?);
        let (needs, doubted, most) = if are_of_inputs {
            let (doubted, most) = self.of_such_activations(findings, off)?;
            (OF_ACTIVATIONS, doubted, most)
        } else if kept == Storage::F16 && !off.of_sums.is_empty() {
            let sums = self.sums_in_f16(findings, off.of_sums)?;
            let most = sums.iter().map(|id| size(&findings.nodes[id])).fold(0.0, f64::max);
            (OF_SUMS, sums, most)
        } else if is_eight_bits {
            // What lies between nodes may be rounded in the rows of some steps, and not of others.
            let (doubted, most) = self.of_such_activations(findings, OffAlike::default())?;
            (OF_ACTIVATIONS, doubted, most)
        } else {
            return Ok(());
        };
        let needs = format!("{needs}, and hides mistakes of {} of a node", number(most));
        doubted.iter().for_each(|id| findings.nodes[id] = findings.nodes[id].as_undecided(&needs));
        Ok(())
    }

    /// The nodes that such activations explain, and how much of one they hide: those that are off alike, and others behind products that
    /// are off at random. How far off each is depends on what else explains some of it, sums in f16 for one.
    fn of_such_activations(&self, findings: &Findings, off: OffAlike) -> Result<(IndexSet<Checkpoint>, f64)> {
        let OffAlike { nodes, unknown, mut most, .. } = off;
        let mut doubted: IndexSet<Checkpoint> = nodes.union(&unknown).copied().collect();
        for (id, finding) in findings.nodes.iter().filter(|(_, finding)| is_unsettled(finding)) {
            let may_be = !doubted.contains(id) && size(finding) <= OF_EIGHT_BITS;
            if may_be && self.product_before(*id).is_some() && self.is_noise(finding, *id)? {
                doubted.insert(*id);
                most = most.max(size(finding));
            }
        }
        Ok((doubted, most))
    }

    /// The nodes behind products that are wrong by about as much as each other.
    fn off_alike(&self, findings: &Findings, kept: Storage) -> OffAlike {
        let judged = findings.nodes.iter().filter(|(_, finding)| finding.judged > 0);
        let behind: Vec<(&Checkpoint, &Finding)> =
            judged.filter(|(id, _)| self.product_before(**id).is_some()).collect();
        let some = |is: &dyn Fn(&Finding) -> bool| -> IndexSet<Checkpoint> {
            behind.iter().filter(|(_, finding)| is(finding)).map(|(id, _)| **id).collect()
        };
        let (open, unknown) = (some(&is_unsettled), some(&Finding::is_of_unknown));
        let are = |some: usize, [part, of]: [usize; 2], all: usize| of * some >= part * all;
        let mut kinds: HashMap<Kind, [usize; 3]> = HashMap::new();
        for (id, finding) in &behind {
            let [some, off, of] = kinds.entry(id.kind()).or_default();
            let is_off = is_unsettled(finding) || is_like_them(finding);
            (*some, *off, *of) =
                (*some + usize::from(is_unsettled(finding)), *off + usize::from(is_off), *of + 1);
        }
        let off_in_all: usize = kinds.values().map(|[_, off, _]| off).sum();
        kinds.retain(|_, [some, ..]| *some > 0);
        let is_whole = |[_, off, of]: &[usize; 3]| are(*off, MOST, *of);
        let whole = kinds.values().filter(|counts| is_whole(counts)).count();
        let are_many = whole >= KINDS_MIN && are(open.len(), SOME, behind.len());
        let is_narrow = kept != Storage::F32;
        let in_kinds = |id: &Checkpoint| is_narrow || is_whole(&kinds[&id.kind()]);
        let off: IndexSet<Checkpoint> = open.iter().filter(|id| in_kinds(id)).copied().collect();
        // Those that a coarse arithmetic hides are off as they are.
        let [alone, with_them] =
            [&off, &off.union(&unknown).copied().collect()].map(|all| limits(findings, all));
        let limits: HashMap<Kind, f64> =
            alone.into_iter().map(|(kind, limit)| (kind, limit.max(with_them[&kind]))).collect();
        let is_like = |id: &Checkpoint| {
            let finding = &findings.nodes[id];
            size(finding) <= limits[&id.kind()] && finding.uneven() <= APART
        };
        let nodes: IndexSet<Checkpoint> = off.iter().filter(|id| is_like(id)).copied().collect();
        let are_alike = 2 * nodes.len() > off.len();
        let are_most = if is_narrow {
            kinds.len() >= KINDS_MIN
        } else {
            are_many && (whole >= KINDS_ALONE || are(off_in_all, MOST, behind.len()))
        };
        // Where nearly all are sums in parts of f16 what is barely wrong has more of them.
        let in_parts =
            some(&|one| one.is_healthy() && one.computed_in.iter().any(|name| parts::is_in_f16(name)));
        let of_sums = match (are_many, are(open.len() + in_parts.len(), MOST, behind.len())) {
            (true, _) => open,
            (false, true) => some(&|finding| is_unsettled(finding) && finding.over() <= BARELY),
            _ => IndexSet::new(),
        };
        let most = nodes.iter().map(|id| limits[&id.kind()]).fold(0.0, f64::max);
        OffAlike { nodes, most, unknown, are_most: are_most && are_alike, of_sums }
    }

    /// The product with a weight that lies between a node and what was recorded before it, and its graph.
    pub(super) fn product_before(&self, id: Checkpoint) -> Option<(&Labelled, Id)> {
        let &(step, labelled) = self.graphs.first()?;
        let graph = &labelled.program.graph;
        let is_recorded = |node: Id| {
            labelled.labels[node].is_some_and(|label| label != id && self.steps.rows(step, label).is_some())
        };
        let itself = labelled.nodes().filter(|(_, known)| *known == id);
        let mut open: Vec<Id> = itself.map(|(node, _)| node).collect();
        let mut seen = vec![false; graph.tensors.len()];
        while let Some(node) = open.pop() {
            if labelled.multiplies_weight(node) {
                return Some((labelled, node));
            }
            let before =
                graph.sources(node).filter(|source| !graph.is_leaf(*source) && !is_recorded(*source));
            open.extend(before.filter(|source| !std::mem::replace(&mut seen[*source], true)));
        }
        None
    }

    /// The weight of that product.
    fn weight_before(&self, id: Checkpoint) -> Option<TensorRef<'_>> {
        let (labelled, product) = self.product_before(id)?;
        let graph = &labelled.program.graph;
        self.gguf.tensor(&graph.get(graph.src(product, 0)?).name)
    }

    /// A product that has so many more outputs than inputs that errors of what it multiplies show, and its weight.
    fn wide(&self, findings: &Findings, id: Checkpoint) -> Option<(Checkpoint, TensorRef<'_>)> {
        let weight = self.weight_before(id).filter(|_| findings.nodes[&id].bridged.is_empty())?;
        let is_wide = weight.rows() >= OUTPUTS_MIN * weight.cols() && weight.info.dtype.is_decodable();
        let fits = OUTPUTS_MIN * weight.cols() * weight.cols() <= WEIGHT_MAX;
        (is_wide && fits).then_some((id, weight))
    }

    /// Whether the errors of wide products are those of what they multiply: of those that are off, and of all in an engine of a
    /// narrow type, the roundings of which hide in some what shows in others.
    fn are_of_inputs(&self, findings: &Findings, off: &IndexSet<Checkpoint>, kept: Storage) -> Result<bool> {
        let is_narrow = kept != Storage::F32;
        let judged = findings.nodes.iter().filter(|(_, finding)| finding.judged > 0).map(|(id, _)| id);
        // The last product is left as it is by most engines that round those before.
        let is_asked = |id: &Checkpoint| off.contains(id) || is_narrow && id.kind() != Kind::Logits;
        let asked = judged.filter(|id| is_asked(id));
        let wide: IndexMap<Checkpoint, TensorRef<'_>> =
            asked.filter_map(|id| self.wide(findings, *id)).collect();
        let order: Vec<usize> = (0..wide.len()).collect();
        let beyond = off.iter().map(|id| rows_beyond(findings, *id)).max_by_key(Vec::len).unwrap_or_default();
        let mut asked = 0;
        for (id, weight) in spread(&order, PRODUCTS).into_iter().filter_map(|at| wide.get_index(at)) {
            let Some((errors, inputs)) = self.errors(*id, &beyond)? else { continue };
            if inputs.cols != weight.cols() || errors.cols != weight.rows() {
                continue;
            }
            if !Fit::of(weight, &errors, &inputs).is_rounding(is_narrow) {
                return Ok(false);
            }
            asked += 1;
        }
        Ok(asked > 0)
    }

    /// What some of the rows of a product at such positions are off by (T, n), and what was multiplied (T, k).
    fn errors(&self, id: Checkpoint, positions: &[u32]) -> Result<Option<(Matrix<f64>, Matrix<f64>)>> {
        let rows = exact(self.steps, self.graphs, self.gguf, id, &spread(positions, ROWS))?;
        Ok(rows.and_then(|rows| Some((rows.errors(), rows.multiplied?))))
    }

    /// How far off sums that are rounded to f16 one after the other leave a node, relative; NaN where no product lies before it.
    pub(super) fn most_of_sums(&self, id: Checkpoint) -> f64 {
        self.weight_before(id).map_or(f64::NAN, |weight| (weight.cols() as f64).sqrt() * UNIT_F16)
    }

    /// Those of some nodes that sums come to which are rounded to f16 one after the other, in an engine that keeps its values in f16:
    /// each rounds half a unit of what was summed up so far, so that of `k` terms a relative error of √k units is the most that
    /// chance makes of it. Errors of other weights go along with what is multiplied, those of sums do not.
    fn sums_in_f16(&self, findings: &Findings, open: IndexSet<Checkpoint>) -> Result<IndexSet<Checkpoint>> {
        let is_of_sums = |id: &Checkpoint| size(&findings.nodes[id]) <= self.most_of_sums(*id);
        let sums: IndexSet<Checkpoint> = open.into_iter().filter(is_of_sums).collect();
        let next: Vec<Checkpoint> =
            sums.iter().filter(|id| findings.nodes[*id].bridged.is_empty()).copied().collect();
        let order: Vec<usize> = (0..next.len()).collect();
        for id in spread(&order, PRODUCTS).into_iter().map(|at| next[at]) {
            let rows = self.errors(id, &rows_beyond(findings, id))?;
            if rows.is_some_and(|(errors, inputs)| linear(&errors, &inputs) > LINEAR) {
                return Ok(IndexSet::new());
            }
        }
        Ok(sums)
    }
}

/// By kind, how far off a node of it may be that is so as the others are.
fn limits(findings: &Findings, off: &IndexSet<Checkpoint>) -> HashMap<Kind, f64> {
    let usual = |ids: &mut dyn Iterator<Item = &Checkpoint>| {
        let mut sizes: Vec<f64> = ids.map(|id| size(&findings.nodes[id])).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.get(sizes.len() / 2).copied().unwrap_or(0.0)
    };
    let of_all = (APART * usual(&mut off.iter())).min(OF_EIGHT_BITS);
    let kinds = off.iter().map(|id| id.kind());
    let limit = |kind: Kind| {
        let of_kind = || off.iter().filter(move |id| id.kind() == kind);
        let own = NEAR * usual(&mut of_kind());
        if of_kind().nth(1).is_some() { own.min(of_all) } else { of_all }
    };
    kinds.map(|kind| (kind, limit(kind))).collect()
}

/// How far what was recorded of a node is from exact arithmetic, relative.
pub(super) fn size(finding: &Finding) -> f64 {
    finding.audit().map_or(f64::NAN, |audit| audit.local.rel_l2)
}

/// Positions of the rows of a node that are beyond their bounds.
fn rows_beyond(findings: &Findings, id: Checkpoint) -> Vec<u32> {
    findings.nodes[&id].audit().map_or_else(Vec::new, |audit| audit.rows_beyond)
}

impl Findings {
    /// Whether products are explained by activations in eight bits alone.
    fn has_eight_bits(&self) -> bool {
        self.nodes.values().any(|finding| finding.is_healthy() && is_in_eight_bits(finding))
    }
}

/// Whether a node is wrong, and has no name.
pub(super) fn is_open(finding: &Finding) -> bool {
    finding.is_wrong() && finding.diagnosis().0.is_empty()
}

/// Whether a node is wrong, and has no name but that of a rounding: where most of its kind are off alike it is one of them.
fn is_unsettled(finding: &Finding) -> bool {
    let rounds = |name: &str| fault::find(name).is_some_and(|entry| entry.rounds);
    finding.is_wrong() && finding.diagnosis().0.iter().all(|name| rounds(&name.fault))
}

/// Whether nothing but a coarse arithmetic explains a node that nothing shows, or activations in eight bits.
fn is_like_them(finding: &Finding) -> bool {
    finding.is_healthy() && (is_in_eight_bits(finding) || finding.is_of_unknown())
}

/// Whether a node is explained by activations in eight bits, and those of no llama.cpp.
pub(super) fn is_in_eight_bits(finding: &Finding) -> bool {
    let mut names = finding.computed_in.iter();
    finding.judged > 0 && names.any(|name| IN_EIGHT_BITS.contains(name))
}
