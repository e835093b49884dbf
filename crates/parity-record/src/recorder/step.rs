//! The step of a dump that a pass becomes: its rows, its graph and its inputs.

use std::collections::HashMap;
use std::sync::Arc;

use parity_dump::{ModelInfo, Producer, Writer};
use parity_graph::text as graph_text;

use super::Recorder;
use crate::api::{RawSched, text};
use crate::describe::{Described, Reader};
use crate::hashes::Hashes;
use crate::map::Mapping;
use crate::plan::{PassPlan, leaf_dtype};
use crate::producer::{self, of_this_machine};
use crate::store::{Announced, BUFFER_BYTES, Store};

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
        let text = self.written[number]
            .is_none()
            .then(|| graph_text::write(&of_this_machine(&self.graphs[number].0)));
        let in_dump = *self.written[number].get_or_insert(self.graphs_written);
        self.graphs_written += usize::from(text.is_some());
        store.graph(in_dump, text);
        for &checkpoint in &plan.without_rows {
            store.no_rows(checkpoint);
        }
    }

    /// Opens what the recording is written to, at its first pass.
    pub(super) unsafe fn open(
        &mut self,
        reader: Reader<'_>,
        sched: RawSched,
        plan: &PassPlan,
        mapping: &Mapping,
        described: &Described,
    ) -> Result<(), String> {
        if let (Some(path), None) = (&self.options.hashes, &self.hashes) {
            self.hashes = Some(Hashes::create(path).map_err(|e| format!("{}: {e}", path.display()))?);
        }
        let (Some(dir), None) = (&self.options.dir, &self.store) else { return Ok(()) };
        // SAFETY: by the caller's promise.
        let backends = unsafe { backends(reader, sched, plan) };
        let producer: Producer = producer::describe(&backends, &mapping.known, self.options.version.clone());
        let mut writer = Writer::create(dir, producer, ModelInfo::default()).map_err(|e| e.to_string())?;
        // SAFETY: as above.
        let numbers = unsafe { reader.op_numbers(&described.address[..described.graph.nodes]) };
        let numbers: Vec<String> = numbers.iter().map(|(op, number)| format!("{op}={number}")).collect();
        writer.manifest_mut().provenance.insert("ggml ops".to_owned(), numbers.join(" "));
        self.store = Some(
            Store::new(writer, self.options.hashed, Arc::clone(&self.host))
                .map_err(|e| format!("no thread to write with: {e}"))?,
        );
        self.host.status("recording", &dir.display().to_string());
        Ok(())
    }
}

/// Names of the backends that compute the wanted nodes, with how many of them.
unsafe fn backends(reader: Reader<'_>, sched: RawSched, plan: &PassPlan) -> HashMap<String, usize> {
    let mut names = HashMap::new();
    for &tensor in plan.wanted.keys() {
        // SAFETY: nodes of a graph that this scheduler is about to compute.
        let name = unsafe {
            let backend = (reader.api.sched_get_tensor_backend)(sched, tensor);
            (!backend.is_null()).then(|| text((reader.api.backend_name)(backend))).flatten()
        };
        *names.entry(name.unwrap_or_default().into_owned()).or_insert(0) += 1;
    }
    names
}
