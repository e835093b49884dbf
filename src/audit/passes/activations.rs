//! Activations that an engine rounds in a form that nobody knows, and sums that it rounds to f16 as they come.
//!
//! Kernels quantise what meets a weight in blocks of 16 to 128, in rows or with one scale for all, with a zero or without, and no
//! list has every form. What they have in common is that the error of a product is that of what it multiplies: E = W·Δx. A
//! product with more outputs than inputs shows that whatever the form is: its errors lie in the space of the columns of W, where
//! those of other weights, of sums or of a wrong row do not. Of n outputs and k inputs chance leaves 1 - k/n of their squares.

use std::collections::{BTreeSet, HashMap};

use indexmap::IndexSet;
use parity_graph::Id;
use rayon::prelude::*;

use super::unlike::BARELY;
use super::{APART, Findings, Passes};
use crate::audit::storage_types::{IN_ROWS, ON_CANDLE, shown};
use crate::audit::{Finding, Labelled, OF_EIGHT_BITS, exact, parts};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::gguf::TensorRef;
use crate::numerics::{Products, Storage};
use crate::ops::bound::UNIT_F16;
use crate::tensor::Matrix;

/// Share of the nodes of a kind, and of all behind a product, that must be off for it to be how the engine multiplies.
const MOST: [usize; 2] = [3, 4];
/// The same of those that nothing explains, where eight bits explain the others.
const SOME: [usize; 2] = [1, 4];
/// Kinds of nodes that must be off: one alone may be a mistake in all layers.
const KINDS_MIN: usize = 2;
/// Rows of a product that are looked at.
const ROWS: usize = 4;
/// Outputs for each input that are.
const OUTPUTS: usize = 4;
/// Outputs for each input that a product must have at least.
const OUTPUTS_MIN: usize = 2;
/// Values of a weight that are read at most.
const WEIGHT_MAX: usize = 1 << 25;
/// Share of what chance would leave that errors of what was multiplied leave at most: what results are rounded to stays.
const LEFT: f64 = 1.0 / 4.0;
/// Steps of the method of conjugate gradients: noise is nearly fitted after a few.
const STEPS: usize = 32;

/// What such nodes need.
const NEEDS: &str = "what it multiplies as the engine's kernel rounds it: nothing but activations in about eight bits, of a form \
                     that is not known, explains the matmuls of this dump, and hides mistakes of their size";
const NEEDS_SUMS: &str = "the order of its sums: nothing but sums in f16 explains the matmuls of this dump, and hides mistakes of \
                          their size";

/// Nodes behind products that are wrong by about as much as each other.
struct OffAlike {
    nodes: IndexSet<Checkpoint>,
    /// All that are wrong, and have no name.
    open: IndexSet<Checkpoint>,
    /// Those that nothing but a coarse arithmetic explains that nothing shows.
    unknown: IndexSet<Checkpoint>,
    /// Whether, with those that activations in eight bits explain, they are nearly all that were judged.
    are_most: bool,
}

impl Passes<'_> {
    /// Takes nodes behind products for undecided where nearly all are off alike, none of them by a mistake that has a name, and
    /// rounding of what is multiplied, or of sums in f16, would explain that.
    pub(super) fn doubt_activations(&self, findings: &mut Findings) -> Result<()> {
        let declared = self.steps.declared().map(|numerics| numerics.products);
        if self.steps.is_own_graph() || matches!(declared, Some(Products::F32 | Products::F64)) {
            return Ok(());
        }
        let Some(OffAlike { nodes: off, open, unknown, are_most }) = self.off_alike(findings) else {
            return Ok(());
        };
        let is_eight_bits = declared.is_none() && findings.has_eight_bits();
        let (needs, doubted) = match are_most && (is_eight_bits || self.is_of_inputs(findings, &off)?) {
            true => (NEEDS, off.union(&unknown).copied().collect()),
            false => (NEEDS_SUMS, self.may_be_sums_in_f16(findings, open)),
        };
        doubted.iter().for_each(|id| findings.nodes[id] = findings.nodes[id].as_undecided(needs));
        Ok(())
    }

    /// The nodes behind products that are wrong by about as much as each other; `None` where these are too few.
    fn off_alike(&self, findings: &Findings) -> Option<OffAlike> {
        if !findings.nodes.values().any(is_open) {
            return None;
        }
        let judged = findings.nodes.iter().filter(|(_, finding)| finding.judged > 0);
        let behind: Vec<(&Checkpoint, &Finding)> =
            judged.filter(|(id, _)| self.product_before(**id).is_some()).collect();
        let some = |is: &dyn Fn(&Finding) -> bool| -> IndexSet<Checkpoint> {
            behind.iter().filter(|(_, finding)| is(finding)).map(|(id, _)| **id).collect()
        };
        let (open, unknown) = (some(&is_open), some(&Finding::is_of_unknown));
        let in_parts =
            some(&|one| one.is_healthy() && one.computed_in.iter().any(|name| parts::is_in_f16(name)));
        let are = |some: usize, [part, of]: [usize; 2], all: usize| of * some >= part * all;
        let mut kinds: HashMap<Kind, [usize; 3]> = HashMap::new();
        for (id, finding) in &behind {
            let [some, off, of] = kinds.entry(id.kind()).or_default();
            let is_off = is_open(finding) || is_like_them(finding);
            (*some, *off, *of) = (*some + usize::from(is_open(finding)), *off + usize::from(is_off), *of + 1);
        }
        let off_in_all: usize = kinds.values().map(|[_, off, _]| off).sum();
        kinds.retain(|_, [some, off, of]| *some > 0 && are(*off, MOST, *of));
        if kinds.len() < KINDS_MIN || !are(open.len(), SOME, behind.len()) {
            // Where nearly all are sums in parts of f16 what is barely wrong has more of them.
            let barely = some(&|finding| is_open(finding) && finding.over() <= BARELY);
            let are_in_parts = are(open.len() + in_parts.len(), MOST, behind.len());
            let (nodes, unknown) = (IndexSet::new(), IndexSet::new());
            return are_in_parts.then_some(OffAlike { nodes, open: barely, unknown, are_most: false });
        }
        let sizes = |id: &Checkpoint| size(&findings.nodes[id]);
        let off: Vec<Checkpoint> = open.iter().filter(|id| kinds.contains_key(&id.kind())).copied().collect();
        let mut sorted: Vec<f64> = off.iter().map(sizes).collect();
        sorted.sort_by(f64::total_cmp);
        let most = (APART * sorted[sorted.len() / 2]).min(OF_EIGHT_BITS);
        let nodes: IndexSet<Checkpoint> = off.into_iter().filter(|id| sizes(id) <= most).collect();
        let are_most = are(off_in_all, MOST, behind.len());
        (2 * nodes.len() > sorted.len()).then_some(OffAlike { nodes, open, unknown, are_most })
    }

    /// The product with a weight that lies between a node and what was recorded before it, and its graph.
    fn product_before(&self, id: Checkpoint) -> Option<(&Labelled, Id)> {
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

    /// Whether the errors of a product are those of what it multiplies, as small ones that do not go along with it.
    fn is_of_inputs(&self, findings: &Findings, off: &IndexSet<Checkpoint>) -> Result<bool> {
        let is_next = |id: &&Checkpoint| findings.nodes[*id].bridged.is_empty();
        let wide = off.iter().filter(is_next).filter_map(|id| {
            let weight = self.weight_before(*id)?;
            let is_wide = weight.rows() >= OUTPUTS_MIN * weight.cols() && weight.info.dtype.is_decodable();
            let fits = OUTPUTS_MIN * weight.cols() * weight.cols() <= WEIGHT_MAX;
            (is_wide && fits).then_some((*id, weight))
        });
        let Some((id, weight)) = wide.min_by_key(|(_, weight)| weight.cols()) else { return Ok(false) };
        let beyond = findings.nodes[&id].audit().map_or_else(Vec::new, |audit| audit.rows_beyond);
        let positions: BTreeSet<u32> = beyond.into_iter().take(ROWS).collect();
        let Some(rows) = exact(self.steps, self.graphs, self.gguf, id, &positions)? else { return Ok(false) };
        let fits = |inputs: &Matrix<f64>| inputs.cols == weight.cols() && rows.exact.cols == weight.rows();
        let Some(inputs) = rows.multiplied.as_ref().filter(|inputs| fits(inputs)) else { return Ok(false) };
        let errors = rows.recorded.data.iter().zip(&rows.exact.data).map(|(a, b)| a - b).collect();
        let errors = Matrix::new(rows.exact.rows, rows.exact.cols, errors);
        Ok(Fit::of(&weight, &errors, inputs).is_rounding())
    }

    /// Those of some nodes that sums come to which are rounded to f16 one after the other, in an engine that keeps its values in f16:
    /// each rounds half a unit of what was summed up so far, so that of `k` terms a relative error of √k units is the most that
    /// chance makes of it.
    fn may_be_sums_in_f16(&self, findings: &Findings, open: IndexSet<Checkpoint>) -> IndexSet<Checkpoint> {
        if shown(self.steps, self.graphs) != Storage::F16 {
            return IndexSet::new();
        }
        let most = |id: &Checkpoint| {
            self.weight_before(*id).map_or(f64::NAN, |weight| (weight.cols() as f64).sqrt() * UNIT_F16)
        };
        open.into_iter().filter(|id| size(&findings.nodes[id]) <= most(id)).collect()
    }
}

/// How far what was recorded of a node is from exact arithmetic, relative.
fn size(finding: &Finding) -> f64 {
    finding.audit().map_or(f64::NAN, |audit| audit.local.rel_l2)
}

impl Findings {
    /// Whether products are explained by activations in eight bits alone.
    fn has_eight_bits(&self) -> bool {
        self.nodes.values().any(|finding| finding.is_healthy() && is_in_eight_bits(finding))
    }
}

/// Whether a node is wrong, and has no name.
fn is_open(finding: &Finding) -> bool {
    finding.is_wrong() && finding.diagnosis().0.is_empty()
}

/// Whether nothing but a coarse arithmetic explains a node that nothing shows, or activations in eight bits.
fn is_like_them(finding: &Finding) -> bool {
    finding.is_healthy() && (is_in_eight_bits(finding) || finding.is_of_unknown())
}

/// Whether a node is explained by activations in eight bits, and those of no llama.cpp.
fn is_in_eight_bits(finding: &Finding) -> bool {
    let mut names = finding.computed_in.iter();
    finding.judged > 0 && names.any(|name| [IN_ROWS.name, ON_CANDLE].contains(name))
}

/// How much of the errors of a product is W·Δx, for some Δx.
struct Fit {
    /// Squares that are left of the errors, relative to what chance would leave.
    left: f64,
    /// |Δx| relative to |x|.
    size: f64,
    /// Share of |Δx|² that does not go along with x.
    across: f64,
}

impl Fit {
    /// Of errors (T, n) of a product of a weight (n, k) with inputs (T, k).
    fn of(weight: &TensorRef<'_>, errors: &Matrix<f64>, inputs: &Matrix<f64>) -> Fit {
        let (n, k) = (weight.rows(), weight.cols());
        let count = n.min(OUTPUTS * k).min(WEIGHT_MAX / k);
        let outputs: Vec<usize> = (0..count).map(|i| i * n / count).collect();
        let mut values = vec![0.0_f32; count * k];
        values
            .par_chunks_mut(k)
            .zip(&outputs)
            .for_each(|(row, &output)| weight.decode_rows(output..output + 1, row));
        let [mut left, mut all, mut moved, mut whole, mut along] = [0.0; 5];
        for row in 0..errors.rows {
            let errors: Vec<f64> = outputs.iter().map(|output| errors.row(row)[*output]).collect();
            let input = inputs.row(row);
            let (found, rest) = least_squares(&values, k, errors.clone());
            let squared = dot(input, input);
            left += dot(&rest, &rest);
            all += dot(&errors, &errors);
            moved += dot(&found, &found);
            whole += squared;
            along += if squared > 0.0 { dot(&found, input).powi(2) / squared } else { 0.0 };
        }
        let chance = 1.0 - k as f64 / count as f64;
        Fit { left: left / all / chance, size: (moved / whole).sqrt(), across: 1.0 - along / moved }
    }

    /// Whether that is how rounding of what is multiplied looks: small, and no factor of it.
    fn is_rounding(&self) -> bool {
        self.left <= LEFT && self.size <= OF_EIGHT_BITS && self.across >= 0.5
    }
}

/// The x for which W·x is nearest to `rest`, and what that leaves; W (n, k), row by row. Conjugate gradients on the normal
/// equations (Hestenes and Stiefel, 1952).
fn least_squares(w: &[f32], k: usize, mut rest: Vec<f64>) -> (Vec<f64>, Vec<f64>) {
    let times = |x: &[f64]| -> Vec<f64> {
        w.par_chunks(k).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    };
    // In blocks of a fixed number of rows, so that sums do not depend on how many threads there are.
    const BLOCK: usize = 256;
    let transposed = |y: &[f64]| -> Vec<f64> {
        let parts = w.par_chunks(k * BLOCK).zip(y.par_chunks(BLOCK)).map(|(rows, y)| {
            let mut sum = vec![0.0; k];
            for (row, y) in rows.chunks(k).zip(y) {
                sum.iter_mut().zip(row).for_each(|(sum, w)| *sum += f64::from(*w) * y);
            }
            sum
        });
        let parts: Vec<Vec<f64>> = parts.collect();
        let mut sum = vec![0.0; k];
        parts.iter().for_each(|part| sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x));
        sum
    };
    let mut found = vec![0.0; k];
    let mut gradient = transposed(&rest);
    let mut direction = gradient.clone();
    let mut squared = dot(&gradient, &gradient);
    for _ in 0..STEPS {
        let moved = times(&direction);
        let length = dot(&moved, &moved);
        if !(length > 0.0 && squared > 0.0) {
            break;
        }
        let step = squared / length;
        found.iter_mut().zip(&direction).for_each(|(x, p)| *x += step * p);
        rest.iter_mut().zip(&moved).for_each(|(r, q)| *r -= step * q);
        gradient = transposed(&rest);
        let next = dot(&gradient, &gradient);
        let share = next / squared;
        direction.iter_mut().zip(&gradient).for_each(|(p, s)| *p = s + share * *p);
        squared = next;
    }
    (found, rest)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
