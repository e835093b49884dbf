//! Nodes that are off at random, alike in all layers or all over a layer: rounding of a form that nobody knows.
//!
//! Ranks exchange partial sums in blocks of eight, six or four bits, a part of the layers may be on another device, one block of
//! matmuls in integers: no list has every form. What they have in common is that what rows are off by has nothing to do with each
//! other, nor with what is right there. Mistakes are not like that: what another weight, formula or constant makes of a row is
//! a function of it, so that rows that are alike are off alike.

use std::collections::BTreeSet;

use indexmap::{IndexMap, IndexSet};

use super::super::attentions::attends;
use super::activations::fit::cosine;
use super::activations::{NEAR, is_open, size};
use super::packed::OF_FOUR_BITS;
use super::{APART, Findings, Passes};
use crate::audit::tokens::spread;
use crate::audit::{Finding, exact};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::numerics::Products;
use crate::report::words::number;
use crate::tensor::Matrix;

/// What such nodes need.
const NEEDS: &str = "what is rounded there, or `--numerics`: its rows are off by what is as good as random, as rounding in a form that \
                     is not known leaves it";

/// Share of the nodes of a kind, or of a layer, that must be as far off as those that nothing explains.
const MOST: [usize; 2] = [3, 4];
/// Kinds of nodes of one layer that must be, where other layers are not: it is computed by something else.
const KINDS_MIN: usize = 3;
/// How names of coarser arithmetic begin.
const PRECISION: &str = "precision.";
/// Layers of a kind that must be.
const LAYERS_MIN: usize = 2;
/// Rows of a node that are looked at.
const ROWS: usize = 16;
/// How much of errors may be alike in rows, or go along with what rows have in common, at most: of mistakes most of it does.
const RELATED: f64 = 1.0 / 4.0;
/// How much of the errors of one row may be a factor of it, at most: of 32 values chance makes a third of it now and then.
const RELATED_IN_ROW: f64 = 1.0 / 2.0;
/// Cosine from which on two rows are the same one, which is rounded alike.
const SAME: f64 = 0.99;
/// Of so many values at random (Σe²)²/Σe⁴ counts a third, of a few large ones these: at least this share is off.
const FEW: f64 = 1.0 / 32.0;

impl Passes<'_> {
    /// Takes nodes that nothing explains for undecided where they are off at random, and as far as most others of their kind or of
    /// their layer are.
    pub(super) fn doubt_noise(&self, findings: &mut Findings) -> Result<()> {
        let declared = self.steps.declared().map(|numerics| numerics.products);
        if self.steps.is_own_graph() || matches!(declared, Some(Products::F32 | Products::F64)) {
            return Ok(());
        }
        // Attention mixes rows, so that what it does to them looks random even where it is wrong: there it is taken for rounding no
        // further than other nodes show it.
        let crosses = |id: &Checkpoint| {
            attends(id.kind()) || findings.nodes[id].bridged.iter().any(|id| attends(id.kind()))
        };
        let (behind, others): (Vec<_>, Vec<_>) =
            self.groups(findings).into_iter().partition(|group| group.iter().any(crosses));
        // So is the last product, which is the only one of its kind, or what sums in f16 come to.
        let is_last = |(id, one): &(&Checkpoint, &Finding)| {
            id.layer_index().is_none() && is_open(one) && self.product_before(**id).is_some()
        };
        let last = findings.nodes.iter().filter(is_last).map(|(id, _)| *id).collect();
        let behind = behind.into_iter().chain([last]);
        let unknown = findings.nodes.values().filter(|one| one.is_healthy() && one.is_of_unknown());
        let mut shown = unknown.map(size).fold(0.0, f64::max);
        let all = others.into_iter().map(|group| (group, false));
        for (group, is_behind) in all.chain(behind.map(|group| (group, true))) {
            let mut noise = Noise::default();
            let mut nodes = Vec::new();
            for id in group.into_iter().filter(|id| findings.nodes[id].is_wrong()) {
                let Some((all, beyond)) = self.errors_of(&findings.nodes[&id], id)? else { continue };
                let one = &findings.nodes[&id];
                let is_of_sums = id.layer_index().is_none() && size(one) <= self.most_of_sums(id);
                let is_shown = !is_behind || is_of_sums || size(one) <= NEAR * shown;
                if is_shown && beyond.each_is_random() && all.is_even(&|_| true) {
                    noise.join(&all);
                    nodes.push(id);
                }
            }
            // An arithmetic of a layer is beyond its bound in more than one of its rows.
            let is_one_row =
                !is_behind && nodes.len() == 1 && findings.nodes[&nodes[0]].is_beyond_in_one_of_many();
            if noise.is_random() && !is_one_row {
                let most = nodes.iter().map(|id| size(&findings.nodes[id])).fold(0.0, f64::max);
                shown = shown.max(most);
                let name = nodes.iter().flat_map(|id| findings.nodes[id].diagnosis().0).next();
                let named =
                    name.map_or(String::new(), |name| format!(" ({} would explain some)", name.fault));
                let needs = format!("{NEEDS}{named}, and hides mistakes of {} of a node", number(most));
                nodes.iter().for_each(|id| findings.nodes[id] = findings.nodes[id].as_undecided(&needs));
            }
        }
        Ok(())
    }

    /// Whether a node is off at random by itself.
    pub(super) fn is_noise(&self, finding: &Finding, id: Checkpoint) -> Result<bool> {
        let errors = self.errors_of(finding, id)?;
        let is_noise = |(all, beyond): (Noise, Noise)| {
            // Rows that come alone may be multiplied by another kernel than a prompt.
            let are_even = [true, false].into_iter().all(|alone| all.is_even(&|row| row.alone == alone));
            beyond.each_is_random() && are_even && all.is_random()
        };
        Ok(errors.is_some_and(is_noise))
    }

    /// What rows of a node are off by: some of all, with those that are beyond their bounds, and of these alone.
    fn errors_of(&self, finding: &Finding, id: Checkpoint) -> Result<Option<(Noise, Noise)>> {
        let all: BTreeSet<u32> =
            self.graphs.iter().flat_map(|(step, _)| self.steps.positions(*step)).collect();
        let alone = self.graphs.iter().map(|(step, _)| self.steps.positions(*step));
        let alone: BTreeSet<u32> = alone.filter(|step| step.len() == 1).flatten().collect();
        let Some(audit) = finding.audit() else { return Ok(None) };
        // What is wrong in a single row is in the one that is furthest off.
        let furthest = audit.local.worst.first().map(|position| *position as u32);
        let furthest = furthest.filter(|position| audit.rows_beyond.contains(position));
        let beyond: BTreeSet<u32> = spread(&audit.rows_beyond, ROWS).into_iter().chain(furthest).collect();
        let looked_at: BTreeSet<u32> = spread(&Vec::from_iter(all), ROWS).union(&beyond).copied().collect();
        let Some(rows) = exact(self.steps, self.graphs, self.gguf, id, &looked_at)? else { return Ok(None) };
        let errors = rows.errors();
        let inputs = rows.multiplied.as_ref().filter(|_| finding.bridged.is_empty()).unwrap_or(&rows.exact);
        let of = |is: &dyn Fn(&u32) -> bool| {
            let order = looked_at.iter().enumerate().filter(|(_, position)| is(position));
            let order: Vec<(usize, bool)> =
                order.map(|(row, position)| (row, alone.contains(position))).collect();
            Noise::of(&errors, &rows.exact, inputs, &order)
        };
        Ok(Some((of(&|_| true), of(&|position| beyond.contains(position)))))
    }

    /// Nodes that nothing explains which are about as far off as most others of their kind, or behind products of their layer.
    fn groups(&self, findings: &Findings) -> Vec<IndexSet<Checkpoint>> {
        let (mut kinds, mut layers) = (IndexMap::<Kind, Nodes<'_>>::new(), IndexMap::<u32, Nodes<'_>>::new());
        for (&id, finding) in findings.nodes.iter().filter(|(_, finding)| finding.judged > 0) {
            let Some(layer) = id.layer_index() else { continue };
            kinds.entry(id.kind()).or_default().push((id, finding));
            if self.product_before(id).is_some() {
                layers.entry(layer).or_default().push((id, finding));
            }
        }
        // A layer of another device may be named for what that computes in.
        let names = |one: &Finding| one.diagnosis().0.iter().all(|name| name.fault.starts_with(PRECISION));
        let is_another = |one: &Finding| one.is_wrong() && names(one);
        let of_kinds = kinds.values().filter_map(|nodes| alike(nodes, LAYERS_MIN, &is_open));
        let of_layers = layers.values().filter_map(|nodes| alike(nodes, KINDS_MIN, &is_another));
        of_kinds.chain(of_layers).collect()
    }
}

/// Some nodes, and what was found at each.
type Nodes<'a> = Vec<(Checkpoint, &'a Finding)>;

/// Of some nodes those that nothing explains and that are off alike, where most and so many are.
fn alike(
    nodes: &[(Checkpoint, &Finding)],
    enough: usize,
    is_open: &dyn Fn(&Finding) -> bool,
) -> Option<IndexSet<Checkpoint>> {
    let mut open: Vec<f64> = nodes.iter().filter(|(_, one)| is_open(one)).map(|(_, one)| size(one)).collect();
    open.sort_by(f64::total_cmp);
    let usual = open.get(open.len() / 2).copied()?;
    let is_alike = |one: &Finding| usual <= NEAR * size(one) && size(one) <= NEAR * usual;
    let alike: Vec<&(Checkpoint, &Finding)> = nodes.iter().filter(|(_, one)| is_alike(one)).collect();
    let are_most = MOST[1] * alike.len() >= MOST[0] * nodes.len() && alike.len() >= enough;
    let is_little = |one: &Finding| is_open(one) && size(one) <= OF_FOUR_BITS;
    let group: IndexSet<Checkpoint> =
        alike.iter().filter(|(_, one)| is_little(one)).map(|(id, _)| *id).collect();
    (are_most && !group.is_empty()).then_some(group)
}

/// What errors of rows have in common.
#[derive(Default)]
struct Noise {
    /// Σ cos(e, e')·cos(x, x'), Σ cos²(x, x'), Σ cos(e, e') and the number of pairs of rows.
    pairs: [f64; 4],
    rows: Vec<Row>,
}

/// What one row is off by.
#[derive(Clone, Copy)]
struct Row {
    /// cos²(e, y) of its errors with what is right there.
    along: f64,
    /// How many of its values are off, as a share of all.
    off: f64,
    /// How far off it is, relative.
    size: f64,
    /// Whether it is the only one of its step.
    alone: bool,
}

impl Noise {
    /// Of some rows of errors (T, n) of a node that is exactly `exact` (T, n), and a function of `inputs` (T, k).
    fn of(errors: &Matrix<f64>, exact: &Matrix<f64>, inputs: &Matrix<f64>, some: &[(usize, bool)]) -> Noise {
        let mut noise = Noise::default();
        let sizes = column_sizes(exact);
        let over = |row: &[f64]| row.iter().zip(&sizes).map(|(x, size)| x / size).collect::<Vec<f64>>();
        for (i, &(a, alone)) in some.iter().enumerate() {
            for &(b, _) in &some[..i] {
                let like = cosine(inputs.row(a), inputs.row(b));
                if like.abs() < SAME {
                    let both = cosine(errors.row(a), errors.row(b));
                    let pair = [both * like, like * like, both, 1.0];
                    noise.pairs.iter_mut().zip(pair).for_each(|(sum, one)| *sum += one);
                }
            }
            // A type with an exponent rounds large values by more: where a few columns are, as biases make them, errors are in
            // those, and spread over all columns as shares of their size.
            let (e, y) = (errors.row(a), exact.row(a));
            let (share_e, share_y) = (over(e), over(y));
            let along = cosine(e, y).powi(2).min(cosine(&share_e, &share_y).powi(2));
            let off = spread_over(e).max(spread_over(&share_e));
            let size = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>();
            noise.rows.push(Row { along, off, size: (size(e) / size(y)).sqrt(), alone });
        }
        noise
    }

    fn join(&mut self, other: &Noise) {
        self.pairs.iter_mut().zip(other.pairs).for_each(|(sum, one)| *sum += one);
        self.rows.extend_from_slice(&other.rows);
    }

    /// Whether no row is a factor of what is right, nor off in a few values alone.
    fn each_is_random(&self) -> bool {
        self.rows.iter().all(|row| row.along <= RELATED_IN_ROW && row.off >= FEW)
    }

    /// Whether none of some rows is much further off than the usual one of them.
    fn is_even(&self, is: &dyn Fn(&Row) -> bool) -> bool {
        let mut sizes: Vec<f64> = self.rows.iter().filter(|row| is(row)).map(|row| row.size).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.last().is_none_or(|furthest| *furthest <= APART * sizes[sizes.len() / 2])
    }

    /// Whether they have nothing in common, neither with each other nor with what they are a function of.
    fn is_random(&self) -> bool {
        let [both, of_inputs, alike, pairs] = self.pairs;
        (both / of_inputs).abs() <= RELATED && (alike / pairs).abs() <= RELATED
    }
}

/// By column, how large values of it are (n): their root mean square, or 1 where all are 0.
fn column_sizes(values: &Matrix<f64>) -> Vec<f64> {
    let mut squares = vec![0.0; values.cols];
    for row in values.data.chunks(values.cols.max(1)) {
        squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
    }
    let size = |square: f64| if square > 0.0 { (square / values.rows as f64).sqrt() } else { 1.0 };
    squares.into_iter().map(size).collect()
}

/// (Σe²)²/Σe⁴ as a share of all values: as if so many of them were off, all by as much.
fn spread_over(errors: &[f64]) -> f64 {
    let (squares, fourth) = errors.iter().fold((0.0, 0.0), |(s, f), e| (s + e * e, f + e.powi(4)));
    squares * squares / fourth / errors.len() as f64
}
