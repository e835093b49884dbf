//! In which type nodes may be kept: in that of their class.
//!
//! An engine computes nodes of one kind alike in all layers. Where the values of most nodes of a kind need f32, one whose
//! values are numbers of a narrower type is no arithmetic of the engine but a mistake in this node: it is judged in f32 like
//! the others, and so is what was not recorded before it.

use std::collections::{HashMap, HashSet};

use super::{Labelled, Steps, storage_types};
use crate::checkpoint::Checkpoint;
use crate::numerics::Storage;
use parity_dump::checkpoint::Kind;
use parity_graph::Op;

/// The kinds of nodes that most need f32 for, of a recording of which some values are numbers of the type `kept`: those of steps
/// of one row, which have kernels of their own (CUDA gives products of a prompt in bf16 and those of a decode step in f32), and
/// those of others.
pub struct OfF32 {
    of_one_row: HashSet<Kind>,
    of_several: HashSet<Kind>,
}

impl OfF32 {
    /// Of all steps.
    pub fn of(steps: &dyn Steps, graphs: &[(usize, &Labelled)], kept: Storage) -> OfF32 {
        let (one, several): (Vec<_>, Vec<_>) =
            graphs.iter().copied().partition(|(step, _)| steps.positions(*step).len() == 1);
        let of = |graphs| of_f32(steps, graphs, kept);
        OfF32 { of_one_row: of(&one), of_several: of(&several) }
    }

    /// Those of steps like one.
    fn like(&self, steps: &dyn Steps, step: usize) -> &HashSet<Kind> {
        if steps.positions(step).len() == 1 { &self.of_one_row } else { &self.of_several }
    }
}

fn of_f32(steps: &dyn Steps, graphs: &[(usize, &Labelled)], kept: Storage) -> HashSet<Kind> {
    let mut counts: HashMap<Kind, [usize; 2]> = HashMap::new();
    for (step, labelled) in graphs.iter().filter(|_| kept != Storage::F32) {
        for (_, checkpoint) in labelled.nodes() {
            let Some(recorded) = steps.tensor(*step, checkpoint) else { continue };
            let [narrow, all] = counts.entry(checkpoint.kind()).or_default();
            *narrow += usize::from(storage_types::holds(kept, &recorded.values));
            *all += 1;
        }
    }
    let are_of_f32 = |[narrow, all]: &[usize; 2]| 2 * narrow < *all;
    let mut found: HashSet<Kind> =
        counts.iter().filter(|(_, counts)| are_of_f32(counts)).map(|(kind, _)| *kind).collect();
    // One function computes all norms: where those of the layers need f32, and f32 is what was declared, so does the last one, which is
    // alone of its kind.
    let is_declared = steps.declared().is_some_and(|numerics| numerics.storage == Storage::F32);
    if is_declared && [Kind::AttnNorm, Kind::FfnNorm].iter().any(|kind| found.contains(kind)) {
        found.insert(Kind::FinalNorm);
    }
    found
}

/// Whether most products with weights that were recorded are of kinds whose values are numbers of the narrow type.
fn has_narrow_products(
    steps: &dyn Steps,
    (step, labelled): (usize, &Labelled),
    of_f32: &HashSet<Kind>,
) -> bool {
    let is_recorded = |id: &Checkpoint| steps.rows(step, *id).is_some();
    let recorded = labelled.products().map(|(_, checkpoint)| checkpoint).filter(is_recorded);
    let (in_f32, narrow): (Vec<Checkpoint>, Vec<Checkpoint>) =
        recorded.partition(|id| of_f32.contains(&id.kind()));
    narrow.len() > in_f32.len()
}

/// By tensor of a step's graph: the type that it is taken to be kept in. What was not recorded is as what reads it; but where
/// recorded products with weights show the narrow type, others have it too, and what is computed of these alone.
pub fn kept(
    steps: &dyn Steps,
    (step, labelled): (usize, &Labelled),
    of_f32: &OfF32,
    kept: Storage,
) -> Vec<Storage> {
    let of_f32 = of_f32.like(steps, step);
    let graph = &labelled.program.graph;
    let mut all = vec![kept; graph.tensors.len()];
    if of_f32.is_empty() {
        return all;
    }
    let mut read_in_f32 = vec![false; graph.tensors.len()];
    let mut read_otherwise = vec![false; graph.tensors.len()];
    for id in (0..graph.tensors.len()).rev() {
        let label = labelled.labels[id];
        let in_f32 = match label.filter(|label| steps.tensor(step, *label).is_some()) {
            Some(label) => of_f32.contains(&label.kind()),
            None => read_in_f32[id] && !read_otherwise[id],
        };
        if in_f32 {
            all[id] = Storage::F32;
        }
        let readers = if in_f32 { &mut read_in_f32 } else { &mut read_otherwise };
        graph.sources(id).for_each(|source| readers[source] = true);
    }
    if has_narrow_products(steps, (step, labelled), of_f32) {
        // Autocast: products come out narrow, and so does what is computed of these until it meets what is not.
        // Of a recorded product that is its sum with a bias: what chooses experts by it may well be in f32.
        let mut is_narrow = vec![false; graph.tensors.len()];
        let mut is_shown = is_narrow.clone();
        for id in graph.computed() {
            let is_product = labelled.multiplies_weight(id);
            let mut computed = graph.sources(id).filter(|source| !graph.is_leaf(*source)).peekable();
            let adds = graph.get(id).op == Op::Add;
            let is_of_products = computed.peek().is_some()
                && computed.all(|source| is_narrow[source] || adds && is_shown[source]);
            let recorded = labelled.labels[id].filter(|label| steps.rows(step, *label).is_some());
            match recorded {
                Some(label) => is_shown[id] = is_product && !of_f32.contains(&label.kind()),
                None => is_narrow[id] = is_product || is_of_products,
            }
            if is_narrow[id] {
                all[id] = kept;
            }
        }
    }
    all
}
