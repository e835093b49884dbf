//! The step of a dump that a pass becomes: its rows, its graph and its inputs.

use parity_graph::text as graph_text;

use super::Recorder;
use crate::describe::{Described, Reader};
use crate::plan::{PassPlan, leaf_dtype};
use crate::store::{Announced, BUFFER_BYTES};

impl Recorder {
    /// Records the inputs of a pass, which the program has set by now.
    pub(super) unsafe fn record_leaves(
        &mut self,
        reader: Reader<'_>,
        described: &Described,
        plan: &PassPlan,
    ) {
        let Some(store) = &mut self.store else { return };
        let leaves = plan.leaves.iter().map(|(leaf, address)| (&leaf.name, leaf.leaf, *address));
        let states = plan.states.iter().map(|(name, id, address)| (name, *id, *address));
        for (name, id, address) in leaves.chain(states) {
            let tensor = described.graph.get(id);
            let Some(dtype) = leaf_dtype(&tensor.dtype) else { continue };
            // SAFETY: a leaf of a graph whose inputs are set.
            let Some(bytes) = (unsafe { reader.bytes(address) }) else { continue };
            let shape = tensor.shape();
            let leading = shape.iter().take_while(|n| **n == 1).count().min(3);
            let (name, shape) = (name.clone(), shape[leading..].to_vec());
            store.announce(Announced::Leaf { name, dtype, shape, bytes: bytes.len() });
            for piece in bytes.chunks(BUFFER_BYTES) {
                store.bytes(piece.len(), &mut |out| out.copy_from_slice(piece));
            }
        }
    }

    pub(super) fn start_step(&mut self, plan: &PassPlan, number: usize) {
        let Some(store) = &mut self.store else { return };
        let known = self.unmapped.len();
        self.unmapped.extend(plan.unmapped.iter().cloned());
        if self.unmapped.len() > known {
            let unmapped = self.unmapped.iter().cloned().collect();
            store.edit(move |manifest| manifest.unmapped = unmapped);
        }
        let source = self.context.source();
        store.edit(move |manifest| drop(manifest.provenance.insert("sequences".to_owned(), source)));
        store.begin(plan, plan.planned.len() + plan.leaves.len() + plan.states.len());
        let text = self.written[number].is_none().then(|| graph_text::write(&self.graphs[number].0));
        let in_dump = *self.written[number].get_or_insert(self.graphs_written);
        self.graphs_written += usize::from(text.is_some());
        store.graph(in_dump, text);
        for &checkpoint in &plan.without_rows {
            store.no_rows(checkpoint);
        }
    }
}
