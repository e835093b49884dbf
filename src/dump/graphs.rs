//! The graph that computed a step of a dump, as it was recorded beside the values.

use parity_dump::{Dump, DumpError};
use parity_graph::{Graph, Id, Leaf, Op, label, params, text, weights};

use super::inputs;
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

    /// The same with a factor as such where rows are multiplied each by an input that is one number in all of them: llama.cpp scales
    /// embeddings so since pictures have some that are not scaled.
    #[must_use]
    pub fn with_factors(mut self, dump: &Dump) -> Graphs {
        for (number, graph) in self.graphs.iter_mut().enumerate() {
            let steps = (0..self.of_step.len()).filter(|step| self.of_step[*step] == Some(number));
            let steps: Vec<usize> = steps.collect();
            let names = label::leaf_names(graph);
            let by_rows: Vec<(Id, Id)> =
                graph.computed().filter_map(|id| Some((id, by_rows(graph, id)?))).collect();
            for (id, input) in by_rows {
                let values = |step: &usize| inputs::numbers(dump.leaf(*step, names[input].as_deref()?)?);
                let Some(values) = steps.iter().map(values).collect::<Option<Vec<_>>>() else { continue };
                let mut all = values.into_iter().flatten();
                let Some(factor) = all.next().filter(|first| all.all(|other| other == *first)) else {
                    continue;
                };
                let word = params::field(&Op::Scale, "scale").map_or(0, |field| field.word);
                let tensor = &mut graph.tensors[id];
                (tensor.op, tensor.srcs) = (Op::Scale, vec![tensor.srcs[0]]);
                tensor.params.set_float(word, factor as f32);
            }
        }
        self
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

/// The input by which a node multiplies each row, where it does.
fn by_rows(graph: &Graph, id: Id) -> Option<Id> {
    let input = graph.src(id, 1).filter(|_| graph.get(id).op == Op::Mul)?;
    let [one, rows, ..] = graph.get(input).ne;
    let is_one_each = one == 1 && rows == graph.get(id).ne[1] && graph.get(id).ne[0] > 1;
    (is_one_each && graph.leaf(input) == Some(Leaf::Input)).then_some(input)
}
