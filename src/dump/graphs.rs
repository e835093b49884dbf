//! The graph that computed a step of a dump, as it was recorded beside the values.

use parity_dump::{Dump, DumpError};
use parity_graph::{Graph, text, weights};

use crate::error::{Error, Result};

/// The recorded graphs of a dump, each read once.
#[derive(Clone, Debug, Default)]
pub struct Graphs {
    graphs: Vec<Graph>,
    of_step: Vec<Option<usize>>,
}

impl Graphs {
    /// Reads the graphs that the manifest lists; none where the dump has none.
    ///
    /// # Errors
    /// A graph that cannot be read, by its file.
    pub fn read(dump: &Dump) -> Result<Graphs> {
        let listed = &dump.manifest().graphs;
        let mut graphs = Vec::with_capacity(listed.len());
        for (index, entry) in listed.iter().enumerate() {
            let text = dump.graph_text(index)?;
            let wrong = |found: String| {
                DumpError::new(&dump.path().join(&entry.file), "is no graph")
                    .expected_found("one graph, a line for each tensor", found)
                    .hint("record again: parity record -o DIR -- CMD…")
            };
            let mut read = text::read(&text).map_err(wrong)?;
            if read.len() != 1 {
                return Err(Error::from(wrong(format!("{} graphs", read.len()))));
            }
            graphs.append(&mut read);
        }
        let of_step = (0..dump.manifest().steps.len()).map(|step| dump.graph_of(step)).collect();
        Ok(Graphs { graphs, of_step })
    }

    /// The graph that computed step `step`.
    pub fn of_step(&self, step: usize) -> Option<&Graph> {
        self.graphs.get((*self.of_step.get(step)?)?)
    }

    /// Index of that graph among all.
    pub fn index_of_step(&self, step: usize) -> Option<usize> {
        self.of_step.get(step).copied().flatten()
    }

    /// A matrix of an adapter that some graph multiplies with, if there is one.
    pub fn adapter_matrix(&self) -> Option<&str> {
        let mut tensors = self.graphs.iter().flat_map(|graph| &graph.tensors);
        tensors.find(|tensor| weights::of_adapter(&tensor.name).is_some()).map(|tensor| tensor.name.as_str())
    }

    /// All graphs, in the order in which they were first computed.
    pub fn all(&self) -> &[Graph] {
        &self.graphs
    }
}
