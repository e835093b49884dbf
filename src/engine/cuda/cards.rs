//! Several GPUs as one engine: each has the weights and the cache of some layers and hands its last residual to the
//! next. Kernels are chosen by shapes alone, so that values have the bits that one GPU gives them.

use super::calls::Address;
use super::cut::{self, Part};
use super::device::{Device, error};
use super::link::Link;
use super::{CudaEngine, Planned};
use crate::checkpoint::Checkpoint;
use crate::engine::fused::graph::Graph;
use crate::engine::{Batch, Engine, Probe};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Numerics;
use parity_dump::manifest::Producer;

/// A graph on several GPUs.
pub struct Cards<'m> {
    /// From each to the next.
    links: Vec<Link>,
    /// In the order of the layers, at least one.
    stages: Vec<CudaEngine<'m>>,
}

impl<'m> Cards<'m> {
    /// An engine for `graph` whose layers are split over the GPUs of these numbers, in their order, about equally in
    /// bytes of weights; with an arithmetic that is [`super::supported`]. A number that stands there twice has two parts.
    ///
    /// # Errors
    /// A GPU that is not there, fewer layers than GPUs, layers that cannot be told apart, not enough memory.
    pub fn new(gguf: &'m Gguf, graph: Graph, ordinals: &[usize], numerics: Numerics) -> Result<Self> {
        let size = |weight: &str| gguf.tensor(weight).map_or(0, |tensor| tensor.bytes.len());
        let parts = cut::parts(graph, ordinals.len(), size)?;
        let devices: Vec<Device> =
            ordinals.iter().map(|&ordinal| Device::open(ordinal)).collect::<Result<_>>()?;
        let stage = |(part, device): (Part, Device)| CudaEngine::of_part(gguf, part, device, numerics);
        let stages: Vec<CudaEngine<'m>> = parts.into_iter().zip(devices).map(stage).collect::<Result<_>>()?;
        let pairs = stages.iter().zip(stages.iter().skip(1));
        let links = pairs.map(|(from, to)| Link::open(&from.device, &to.device)).collect::<Result<_>>()?;
        Ok(Cards { links, stages })
    }

    /// Layers on each GPU, in the order of the layers.
    pub fn layers(&self) -> Vec<usize> {
        self.stages.iter().map(|stage| cut::layers(&stage.graph).len()).collect()
    }

    /// The step on every GPU: all of it is enqueued before anything is waited for.
    fn compute(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<Option<Vec<f32>>> {
        for index in 0..self.stages.len() {
            let (before, rest) = self.stages.split_at_mut(index);
            let Some(stage) = rest.first_mut() else { break };
            stage.prepare(batch, probe)?;
            if let Some((from, link)) = before.last().zip(self.links.get(index.wrapping_sub(1))) {
                from.hand_over(stage, link)?;
            }
            stage.launch(batch, probe)?;
        }
        let mut logits = None;
        for stage in &mut self.stages {
            logits = stage.finish(batch, probe)?;
        }
        Ok(logits)
    }
}

impl CudaEngine<'_> {
    /// Hands the last residual of a step that has been launched to the next part, which has been prepared for it.
    fn hand_over(&self, next: &CudaEngine<'_>, link: &Link) -> Result<()> {
        let ends = self.handed.and_then(|handed| Some((self.place(handed)?, next.place(handed)?)));
        match ends {
            Some(((source, bytes), (target, room))) if bytes == room => {
                link.hand_over((&self.device, source), (&next.device, target), bytes)
            }
            _ => Err(error("two parts of a model that do not fit one another")),
        }
    }

    /// Address and bytes of a value of the step.
    fn place(&self, checkpoint: Checkpoint) -> Option<(Address, usize)> {
        let Planned { plan, .. } = self.plan.as_ref()?;
        let place = plan.layout.places.get(&checkpoint)?;
        Some((self.arena.as_ref()?.address + place.offset as Address, place.bytes()))
    }
}

impl Engine for Cards<'_> {
    fn producer(&self) -> Producer {
        let names: Vec<&str> = self.stages.iter().map(|stage| stage.device.name.as_str()).collect();
        let own = self.stages.first().map(Engine::producer).unwrap_or_default();
        Producer { device: Some(together(&names)), ..own }
    }

    fn reset(&mut self) {
        self.stages.iter_mut().for_each(Engine::reset);
    }

    fn step(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<Option<Vec<f32>>> {
        match self.compute(batch, probe) {
            Ok(logits) => {
                for stage in &mut self.stages {
                    stage.computed = batch.first + batch.tokens.len();
                }
                Ok(logits)
            }
            Err(error) => {
                // The error that is reported is the first.
                self.stages.iter_mut().for_each(|stage| drop(stage.settle()));
                Err(error)
            }
        }
    }
}

/// `2 x NVIDIA H200` for GPUs of one name, else all names.
fn together(names: &[&str]) -> String {
    match names {
        [name] => (*name).to_owned(),
        [first, rest @ ..] if rest.iter().all(|name| name == first) => format!("{} x {first}", names.len()),
        _ => names.join(" + "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_gpus_have_one_name() {
        assert_eq!(together(&["NVIDIA H200"]), "NVIDIA H200");
        assert_eq!(together(&["NVIDIA H200"; 2]), "2 x NVIDIA H200");
        assert_eq!(
            together(&["NVIDIA H200", "NVIDIA L4", "NVIDIA H200"]),
            "NVIDIA H200 + NVIDIA L4 + NVIDIA H200"
        );
    }
}
