//! The graphs of a dump, and what it recorded of them.

use std::fs;

use super::{Labelled, Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use parity_dump::Dump;
use parity_graph::{axis, label, text};

/// The graphs of a recording, each once.
pub struct Graphs {
    graphs: Vec<Labelled>,
    /// (step, graph), in the order of the steps.
    of_steps: Vec<(usize, usize)>,
}

impl Graphs {
    /// Reads the graphs that a dump lists.
    ///
    /// # Errors
    /// A file that cannot be read or is no graph, a step without one.
    pub fn open(dump: &Dump) -> Result<Graphs> {
        let (mut graphs, mut of_steps) = (Vec::new(), Vec::new());
        for listed in &dump.manifest().graphs {
            let path = dump.path().join(&listed.file);
            if listed.file.contains(['/', '\\']) {
                return Err(Error::file(dump.path(), "a graph lies outside the folder").found(&listed.file));
            }
            let written =
                fs::read_to_string(&path).map_err(|e| Error::file(&path, format!("cannot be read: {e}")))?;
            let read = text::read(&written)
                .map_err(|found| Error::file(&path, "is no graph").found(found).hint("record it again"))?;
            for graph in read {
                let (labels, axes) = (label::labels(&graph), axis::token_axes(&graph));
                of_steps.extend(listed.steps.iter().map(|&step| (step, graphs.len())));
                graphs.push(Labelled::new(graph, labels, axes)?);
            }
        }
        of_steps.sort_unstable();
        let lacking = (0..dump.manifest().steps.len()).find(|step| of_steps.iter().all(|(s, _)| s != step));
        if let Some(step) = lacking {
            return Err(Error::file(dump.path(), format!("step {step} has no graph"))
                .expected("a graph of every step")
                .hint("record it again"));
        }
        Ok(Graphs { graphs, of_steps })
    }

    /// The graph of each step, in order.
    pub fn steps(&self) -> Vec<(usize, &Labelled)> {
        self.of_steps.iter().map(|&(step, graph)| (step, &self.graphs[graph])).collect()
    }
}

impl Steps for Dump {
    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        let (shape, positions, values) = self.in_step(step, checkpoint)?;
        Some(Tensor { shape, positions, values })
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        self.leaf(step, name)
    }
}
