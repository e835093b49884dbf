//! Layers that llama.cpp computed on the CPU, of dumps that bring no graph: `-ngl N` leaves the first ones there, and the
//! others, with the last product behind them, are on a device. Of many rows those layers are there as well, with copies of
//! their weights (`ggml_backend_cuda_device_offload_op`), but for attention as one node, which reads its cache where that lies.

use parity_dump::Dump;
use parity_graph::{Graph, Op};

use super::super::Graphs;
use super::{CPU, Form, LAYERS, ROWS};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;

/// Rows from which on weights are copied to a device.
const OFFLOADED_FROM: usize = 32;

impl Graphs {
    /// The graphs whose first layers are on the CPU: up to the last layer of which the CPU explains more than the device does.
    /// `None` where the device explains the first ones.
    pub(super) fn begun_on_cpu(dump: &Dump, gguf: &Gguf, form: Form) -> Result<Option<Graphs>> {
        let held = Recording::checkpoints(dump);
        let layers = held.iter().filter_map(|id| id.layer_index()).max().map_or(0, |last| last + 1);
        let unexplained = |on_cpu: u32, of: u32| -> Result<Vec<u32>> {
            let ids = held.iter().copied().filter(|id| tells(*id) && id.layer_index() < Some(of)).collect();
            let graphs = Graphs::built_in(dump, gguf, Form { on_cpu, ..form })?;
            let found = graphs.sampled(dump, gguf, &ids, ROWS)?;
            let open = found.nodes.iter().filter(|(_, one)| one.is_wrong() || one.judged == 0);
            Ok(open.filter_map(|(id, _)| id.layer_index()).collect())
        };
        if unexplained(0, LAYERS as u32)?.is_empty() {
            return Ok(None);
        }
        let [on_device, on_cpu] = [unexplained(0, layers)?, unexplained(layers, layers)?];
        let count = |open: &[u32], layer: u32| open.iter().filter(|one| **one == layer).count();
        let is_on_cpu = |layer: &u32| count(&on_cpu, *layer) < count(&on_device, *layer);
        let Some(last) = (0..layers).rev().find(is_on_cpu) else { return Ok(None) };
        let said = format!(
            "what computed it is known by its values: {} of {layers} layers on the CPU, what is behind them on a device",
            last + 1
        );
        Ok(Some(Graphs::built_in(dump, gguf, Form { on_cpu: last + 1, ..form })?.saying(said)))
    }
}

impl Form {
    /// Notes of the nodes of a graph over so many tokens in which buffer they are.
    pub fn place(&self, graph: &mut Graph, tokens: usize) {
        // llama.cpp has a layer's number behind the names of its nodes.
        let last = self.on_cpu.checked_sub(1).map(|last| format!("-{last}"));
        let is_last = |name: &str| last.as_ref().is_some_and(|last| name.ends_with(last));
        let begun = graph.tensors.iter().rposition(|tensor| is_last(&tensor.name)).map_or(0, |last| last + 1);
        for (id, tensor) in graph.tensors.iter_mut().enumerate().filter(|(_, tensor)| tensor.computed) {
            let is_moved = tokens >= OFFLOADED_FROM && tensor.op != Op::FlashAttn;
            let buffer = if id < begun && !is_moved { Some(CPU) } else { self.backend };
            tensor.backend = buffer.map(str::to_owned);
        }
    }
}

/// Whether a node tells a device from the CPU: kernels differ in products and attention.
fn tells(id: Checkpoint) -> bool {
    use Kind::{AttnCtx, AttnOut, FfnGate, FfnOut, FfnUp, KProj, QProj, VProj};
    matches!(id.kind(), AttnCtx | QProj | KProj | VProj | AttnOut | FfnGate | FfnUp | FfnOut)
}
