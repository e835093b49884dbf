//! One step in three parts, so that several GPUs can take turns without the host's waiting between them: what is
//! needed is made ready, everything is enqueued, and then what arrives is shown.

use std::collections::HashMap;

use cudarc::driver::CudaGraph;

use super::calls::{self, Address};
use super::device::{Device, address_of, error, failed};
use super::held::Held;
use super::host::Host;
use super::layout::Value;
use super::plan::{Output, Work};
use super::readback::{Reading, Ring};
use super::schedule::Task;
use super::{Batch, CudaEngine, Planned, Probe};
use crate::engine::Values;
use crate::engine::fused::graph::{Dims, Node};
use crate::error::{Error, Result};

/// A step that is computed before it is prepared.
pub(super) fn unplanned() -> Error {
    error("a step that has not been planned")
}

/// What is read back of a step, whose values lie in the arena.
fn reading<'a>(device: &'a Device, ring: &'a mut Ring, planned: &'a Planned, arena: Address) -> Reading<'a> {
    Reading { device, ring, transfers: &planned.transfers, outputs: &planned.plan.outputs, arena }
}

/// Shows a value of a step to the probe.
fn show(
    dims: &Dims,
    batch: &Batch<'_>,
    probe: &mut dyn Probe,
    output: &Output,
    values: Values<'_>,
) -> Result<()> {
    let (rows, end) = (batch.tokens.len(), batch.first + batch.tokens.len());
    probe.record(output.checkpoint, batch, &dims.shape(output.checkpoint.kind(), rows, end), values)
}

impl CudaEngine<'_> {
    /// All parts of a step.
    pub(super) fn prepared_step(
        &mut self,
        batch: &Batch<'_>,
        probe: &mut dyn Probe,
    ) -> Result<Option<Vec<f32>>> {
        self.prepare(batch, probe)?;
        self.launch(batch, probe)?;
        self.finish(batch, probe)
    }

    /// Makes memory and plan ready for a step, and sends its tokens.
    pub(super) fn prepare(&mut self, batch: &Batch<'_>, probe: &dyn Probe) -> Result<()> {
        self.check(batch)?;
        self.device.bind()?;
        self.compare.settle(&self.device)?;
        self.make_room(batch.first + batch.tokens.len())?;
        self.make_plan(batch, probe)?;
        self.send_tokens(batch)
    }

    /// Enqueues everything; a probe that feeds values is shown them here.
    pub(super) fn launch(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<()> {
        self.device.bind()?;
        let Some(Planned { plan, transfers, .. }) = &self.plan else { return Err(unplanned()) };
        if plan.key.fed {
            return self.launch_fed(batch, probe);
        }
        let arena = address_of(&self.arena);
        self.ring.prepare(&self.device, transfers)?;
        self.compare.begin(&self.device, (&plan.compared, arena), batch, probe)?;
        let recordable = plan.outputs.is_empty() && plan.is_all_gpu();
        let logits = plan.logits;
        if recordable && self.launch_recorded(batch, probe)? {
            // Everything has been enqueued.
        } else if let Some(planned @ Planned { plan, graph: Some(graph), .. }) = &self.plan {
            graph.launch().map_err(failed("the graph of a step"))?;
            let done = plan.work.len();
            reading(&self.device, &mut self.ring, planned, arena).after(done)?;
            if let Some(held) = &mut self.compare.held {
                held.after(&self.device, &mut self.modules, done)?;
            }
        } else {
            self.enqueue_each(batch, probe)?;
        }
        match self.logits.as_mut().zip(logits) {
            Some((logits, from)) => logits.start(&self.device, from),
            None => Ok(()),
        }
    }

    /// Records the plan, which is used once more, as one CUDA graph: one launch a step. Not where the host has something to
    /// do, and not a longer step of which something is copied or compared: that overlaps with computing, and
    /// comparisons are recorded with what they compare ([`super::held`]).
    pub(super) fn capture(&mut self) -> Result<()> {
        let Some(Planned { plan, graph, recordable, .. }) = &self.plan else { return Err(unplanned()) };
        let unread = plan.outputs.is_empty() && plan.compared.is_empty();
        let at_once = plan.key.rows <= calls::ROWS_MAX_UNTILED || unread;
        if graph.is_some() || !recordable || plan.key.fed || !plan.is_all_gpu() || !at_once {
            return Ok(());
        }
        let captured = self.captured(|engine| engine.enqueue(None));
        if let Some(Planned { graph, recordable, .. }) = &mut self.plan {
            // Where it cannot be (an old driver, too little memory), launches stay single.
            *recordable = captured.is_ok();
            *graph = captured.ok();
        }
        Ok(())
    }

    /// What `enqueue` enqueues, recorded as one launch instead of done.
    fn captured(&mut self, enqueue: impl FnOnce(&mut Self) -> Result<()>) -> Result<CudaGraph> {
        self.device.begin_capture()?;
        let enqueued = enqueue(self);
        let captured = self.device.end_capture();
        enqueued.and(captured)
    }

    /// Launches a step of which everything is compared as one graph, which is recorded when it is made for the second time;
    /// `false` where it is made for the first, or that fails (an old driver, too little memory).
    fn launch_recorded(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<bool> {
        if self.compare.held.as_ref().is_some_and(Held::wants_recording) {
            let captured = self.captured(|engine| {
                engine.enqueue_each(batch, probe)?;
                engine.compare.held.as_ref().map_or(Ok(()), |held| held.join(&engine.device))
            });
            if let Some(held) = &mut self.compare.held {
                held.keep(captured.ok());
            }
        }
        self.compare.held.as_mut().map_or(Ok(false), |held| held.launch(&self.device))
    }

    /// Enqueues the work of the plan, and behind each piece of it copies and comparisons of what it has computed.
    fn enqueue_each(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<()> {
        let Some(planned @ Planned { plan, .. }) = &self.plan else { return Err(unplanned()) };
        let (device, dims) = (&self.device, &self.graph.dims);
        let arena = address_of(&self.arena);
        let mut reading = reading(device, &mut self.ring, planned, arena);
        let mut host = Host {
            gguf: self.gguf,
            graph: &self.graph,
            numerics: &self.numerics,
            device,
            layout: &plan.layout,
            cache: &self.cache,
            arena,
            kept: HashMap::new(),
        };
        for (done, work) in plan.work.iter().enumerate() {
            match work {
                Work::Launch(call) => device.launch(self.modules.function(call, device)?, call)?,
                Work::Host(index) => host.execute(&plan.nodes[*index], batch, probe)?,
            }
            reading.after(done + 1)?;
            if let Some(held) = &mut self.compare.held {
                held.after(device, &mut self.modules, done + 1)?;
            }
            while reading.is_full()? {
                reading.show_next(|output, values| show(dims, batch, probe, output, values))?;
            }
        }
        Ok(())
    }

    /// Shows what arrives, and waits for the end: the logits of the last row, where the graph has them.
    pub(super) fn finish(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<Option<Vec<f32>>> {
        self.device.bind()?;
        let Some(planned @ Planned { plan, .. }) = &self.plan else { return Err(unplanned()) };
        let (device, dims) = (&self.device, &self.graph.dims);
        if plan.key.fed {
            let Some(logits) = plan.logits else { return device.synchronize().map(|()| None) };
            return device.download(logits, dims.vocab).map(Some);
        }
        let arena = address_of(&self.arena);
        let mut reading = reading(device, &mut self.ring, planned, arena);
        let logits = self.logits.as_ref().filter(|_| plan.logits.is_some());
        let mut last_row = None;
        while reading.show_next(|output, values| show(dims, batch, probe, output, values))? {
            // The caller's copy is made while others are on their way.
            if let Some(logits) = logits.filter(|_| last_row.is_none())
                && logits.are_there()?
            {
                last_row = Some(logits.take()?);
            }
        }
        let on = (device, &mut self.modules);
        self.compare.show(on, (&plan.compared, arena), dims, batch, probe)?;
        match (last_row, logits) {
            (None, Some(logits)) => logits.take().map(Some),
            (None, None) => device.synchronize().map(|()| None),
            (last_row, _) => Ok(last_row),
        }
    }

    /// Waits for what a step that failed has left under way.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.device.bind()?;
        self.compare.settle(&self.device)?;
        self.device.synchronize()?;
        self.device.copy.synchronize().map_err(failed("a copy"))
    }

    /// Adds what the part of the graph before this one gives, which is there before the first task, and keeps what the
    /// part after it takes until the last has run.
    pub(super) fn add_border(&self, values: &mut Vec<Value>, nodes: &[Node], tasks: &[Task], rows: usize) {
        for value in values.iter_mut().filter(|value| Some(value.checkpoint) == self.handed) {
            value.life.1 = tasks.len();
        }
        if let Some(checkpoint) = self.given {
            let reads = |task: &Task| task.nodes().iter().any(|&i| nodes[i].inputs.contains(&checkpoint));
            let last = tasks.iter().rposition(reads).unwrap_or(0);
            let len = rows * self.graph.dims.width(checkpoint.kind(), 0);
            values.insert(0, Value { checkpoint, len, wanted: false, life: (0, last) });
        }
    }
}
