//! A step whose nodes are looked at in isolation: each is launched by itself and read back, and then what the probe
//! feeds takes the place of its value, in the arena and in the cache. Slow, and apart from the way that every other
//! step takes.

use std::collections::HashMap;

use super::calls::{self, Address};
use super::device::address_of;
use super::host::Host;
use super::plan::Work;
use super::step::unplanned;
use super::{Batch, CudaEngine, Planned, Probe};
use crate::checkpoint::Kind;
use crate::engine::Values;
use crate::error::Result;
use crate::tensor::Matrix;

impl CudaEngine<'_> {
    /// Computes a step by the plan, which has been made for a probe that feeds values.
    pub(super) fn launch_fed(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<()> {
        let Some(Planned { plan, .. }) = &self.plan else { return Err(unplanned()) };
        let (dims, rows) = (&self.graph.dims, batch.tokens.len());
        let end = batch.first + rows;
        let first = address_of(&self.step_data);
        let mut host = Host {
            gguf: self.gguf,
            graph: &self.graph,
            numerics: &self.numerics,
            device: &self.device,
            layout: &plan.layout,
            cache: &self.cache,
            arena: address_of(&self.arena),
            kept: HashMap::new(),
        };
        let mut done = 0;
        for (node, ready) in plan.nodes.iter().zip(&plan.ends) {
            for work in &plan.work[done..*ready] {
                match work {
                    Work::Launch(call) => {
                        self.device.launch(self.modules.function(call, &self.device)?, call)?;
                    }
                    Work::Host(index) => host.execute(&plan.nodes[*index], batch, probe)?,
                }
            }
            done = *ready;
            let (checkpoint, kind) = (node.checkpoint, node.checkpoint.kind());
            if let Some(own) = host.kept.get_mut(&checkpoint) {
                if let Some(fed) = probe.fed(checkpoint, batch, own.cols) {
                    *own = Matrix::new(rows, own.cols, fed);
                }
                continue;
            }
            if plan.outputs.iter().any(|output| output.checkpoint == checkpoint) {
                let own = host.download(checkpoint, rows)?;
                probe.record(checkpoint, batch, &dims.shape(kind, rows, end), Values::F32(&own.data))?;
            }
            // No node reads the logits, and the caller gets the engine's own.
            if kind == Kind::Logits {
                continue;
            }
            let width = dims.width(kind, 0);
            let Some(fed) = probe.fed(checkpoint, batch, width) else { continue };
            host.upload(checkpoint, &Matrix::new(rows, width, fed))?;
            if let Some(cache) = self.cache.get(&checkpoint) {
                let x = host.arena + host.place(checkpoint)?.offset as Address;
                let (storage, kv) = (self.numerics.storage, self.numerics.kv);
                let call = calls::cache([x, cache.address, first], [rows, width], storage, kv);
                self.device.launch(self.modules.function(&call, &self.device)?, &call)?;
            }
        }
        Ok(())
    }
}
