//! Ops of a recorded graph that nobody here knows, settled by values: where several known ops in place of one give what was
//! recorded, it is taken for these.

use std::collections::HashSet;

use parity_graph::fusion::{READINGS, Reading, unfolded};
use parity_graph::{Graph, Id, Op};

use super::Graphs;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::report::words::count;
use parity_dump::Dump;

/// Rows of each node that decide.
const ROWS: usize = 4;

impl Graphs {
    /// Takes ops that nobody knows for those that give the recorded values of most nodes of the kind; what none gives stays
    /// as it is, undecided by its name.
    ///
    /// # Errors
    /// Those of an audit.
    pub(super) fn with_known_ops(mut self, dump: &Dump, gguf: &Gguf) -> Result<Graphs> {
        let mut names: Vec<String> = self.each().flat_map(unknown).map(|(_, name)| name.to_owned()).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            let mut best: Option<(usize, Graphs)> = None;
            for reading in READINGS {
                let Some(read) = self.read_as(&name, reading)? else { continue };
                let findings = read.graphs.sampled(dump, gguf, &read.ids, ROWS)?;
                let healthy =
                    findings.nodes.values().filter(|node| node.judged > 0 && node.is_healthy()).count();
                let is_better = best.as_ref().is_none_or(|(most, _)| healthy > *most);
                if is_better && 2 * healthy > read.ids.len() {
                    best = Some((healthy, read.graphs));
                }
            }
            self = best.map_or(self, |(_, graphs)| graphs);
        }
        Ok(self)
    }

    /// The same graphs with ops of that name read so; `None` where none of them can be.
    fn read_as(&self, name: &str, reading: Reading) -> Result<Option<Read>> {
        let (mut ids, mut graphs, mut ops) = (HashSet::new(), Vec::new(), Vec::new());
        for labelled in self.labelled() {
            let graph = &labelled.program.graph;
            let is_it = |id: Id| matches!(&graph.get(id).op, Op::Other(other) if other == name);
            let found: Vec<Id> = graph.computed().filter(|&id| is_it(id)).collect();
            for &id in &found {
                match reading.ops(graph, id) {
                    Some(read) => ops = read,
                    None => return Ok(None),
                }
                ids.extend(labelled.labels[id]);
            }
            let (unfolded, place) = unfolded(graph, |id| is_it(id).then_some(reading));
            graphs.push(labelled.moved(unfolded, &place)?);
        }
        let said = format!(
            "{name} is known by what it computes: {} {} the recorded values of {}",
            ops.join(" and "),
            if ops.len() == 1 { "gives" } else { "give" },
            count(ids.len(), "node")
        );
        let graphs = self.replaced(graphs, said);
        Ok((!ids.is_empty()).then_some(Read { ids, graphs }))
    }
}

/// The computed nodes of a graph whose op nobody knows, with its name.
fn unknown(graph: &Graph) -> impl Iterator<Item = (Id, &str)> {
    graph.computed().filter_map(|id| match &graph.get(id).op {
        Op::Other(name) => Some((id, name.as_str())),
        _ => None,
    })
}

/// Graphs in which ops of one name are others.
struct Read {
    ids: HashSet<Checkpoint>,
    graphs: Graphs,
}
