//! The graphs of a dump, and what it recorded of them.

use super::{Labelled, Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::dump;
use crate::error::{Error, Result};
use parity_dump::Dump;
use parity_graph::Graph;

/// The graphs of a recording, each once, with the names that their nodes have in it.
pub struct Graphs {
    graphs: Vec<Labelled>,
    /// By step.
    of_steps: Vec<usize>,
}

impl Graphs {
    /// Reads the graphs that a dump lists.
    ///
    /// # Errors
    /// A file that cannot be read or is no graph, a step without one.
    pub fn open(dump: &Dump) -> Result<Graphs> {
        let read = dump::Graphs::read(dump)?;
        let of_steps = (0..dump.manifest().steps.len()).map(|step| {
            read.index_of_step(step).ok_or_else(|| {
                Error::file(dump.path(), format!("step {step} has no graph"))
                    .expected("a graph of every step")
                    .hint("record it again")
            })
        });
        let of_steps = of_steps.collect::<Result<_>>()?;
        let graphs = read.all().iter().map(|graph| Labelled::new(graph.clone())).collect::<Result<_>>()?;
        Ok(Graphs { graphs, of_steps })
    }

    /// Every graph once.
    pub fn each(&self) -> impl Iterator<Item = &Graph> {
        self.graphs.iter().map(|labelled| &labelled.program.graph)
    }

    /// The graph of each step, in order.
    pub fn steps(&self) -> Vec<(usize, &Labelled)> {
        self.of_steps.iter().enumerate().map(|(step, &graph)| (step, &self.graphs[graph])).collect()
    }
}

impl Steps for Dump {
    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        let (shape, positions, values) = self.in_step(step, checkpoint)?;
        Some(Tensor { shape, positions, values })
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        let leaf = Dump::leaf(self, step, name)?;
        let numbers = |size: usize, read: fn(&[u8]) -> f64| leaf.bytes.chunks_exact(size).map(read).collect();
        Some(match leaf.dtype {
            "F32" => numbers(4, |b| f64::from(f32::from_le_bytes(b.try_into().unwrap_or_default()))),
            "F16" => numbers(2, |b| f64::from(half::f16::from_le_bytes(b.try_into().unwrap_or_default()))),
            "I32" => numbers(4, |b| f64::from(i32::from_le_bytes(b.try_into().unwrap_or_default()))),
            "I64" => numbers(8, |b| i64::from_le_bytes(b.try_into().unwrap_or_default()) as f64),
            _ => return None,
        })
    }
}
