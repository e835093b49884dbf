//! Whether recordings have everything that their graphs compute: a value for each arithmetic node of each step, under
//! a name of its own, and each input that a node reads. `complete DUMP…` prints what is missing; exit code 1 if
//! anything is.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::process::ExitCode;

use parity_dump::Dump;
use parity_graph::{Graph, Leaf, axis, label, text};

fn main() -> ExitCode {
    let mut whole = true;
    for path in std::env::args().skip(1) {
        match check(Path::new(&path)) {
            Ok(summary) => println!("{path}: {summary}"),
            Err(problems) => {
                whole = false;
                println!("{path}: {} problems", problems.len());
                problems.iter().take(12).for_each(|problem| println!("  {problem}"));
            }
        }
    }
    if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Nodes, those without a token axis, inputs.
fn check(path: &Path) -> Result<String, Vec<String>> {
    let dump = Dump::open(path).map_err(|error| vec![error.to_string()])?;
    let mut problems: Vec<String> = dump.manifest().unmapped.clone();
    let (mut nodes, mut without, mut inputs) = (0, BTreeSet::new(), 0);
    for step in 0..dump.manifest().steps.len() {
        let text = dump.graph_of(step).map(|index| dump.graph_text(index));
        let graph = match text {
            None => return Err(vec![format!("step {step} has no graph")]),
            Some(text) => text.map_err(|e| e.to_string()).and_then(|text| text::read(&text)),
        };
        let graph = graph.map_err(|e| vec![e])?.remove(0);
        let (labels, axes) = (label::labels(&graph), axis::token_axes(&graph));
        let mut names = HashSet::new();
        for (id, label) in labels.iter().enumerate() {
            let Some(label) = label else { continue };
            nodes += 1;
            if axes[id].is_none() {
                without.insert(format!("{label} {}", graph.get(id).op));
            }
            if !names.insert(*label) {
                problems.push(format!("{label} names two nodes of step {step}"));
            }
            problems.extend(value(&dump, &graph, id, *label, axes[id], step));
        }
        for (id, name) in label::leaf_names(&graph).into_iter().enumerate() {
            let Some(name) = name.filter(|_| graph.leaf(id) == Some(Leaf::Input) && is_read(&graph, id))
            else {
                continue;
            };
            inputs += 1;
            if dump.leaf(step, &name).is_none() {
                problems.push(format!("input {name} of step {step} is missing"));
            }
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let without: Vec<String> = without.into_iter().collect();
    Ok(format!("{nodes} values, {inputs} inputs; without token axis: {}", without.join(", ")))
}

fn is_read(graph: &Graph, leaf: usize) -> bool {
    graph.computed().any(|id| graph.sources(id).any(|src| graph.root(src) == leaf))
}

/// What is wrong with the values of a node in a step.
fn value(
    dump: &Dump,
    graph: &Graph,
    id: usize,
    label: parity_dump::Checkpoint,
    axis: Option<usize>,
    step: usize,
) -> Option<String> {
    if label.kind().is_optional() {
        return None;
    }
    let positions = &dump.manifest().steps[step].positions;
    let Some(recorded) = dump.get(label) else {
        return Some(format!("{label} ({}) is missing", graph.get(id).op));
    };
    let rows: Vec<usize> = positions.iter().filter_map(|&position| recorded.find(position)).collect();
    let elements: usize = rows.iter().map(|&row| recorded.width_of(row)).sum();
    let expected = axis.map_or(1, |axis| graph.get(id).shape()[axis]);
    if rows.len() != expected || elements != graph.get(id).elements() {
        return Some(format!(
            "{label} ({}) has {} rows and {elements} elements in step {step}, not {expected} and {}",
            graph.get(id).op,
            rows.len(),
            graph.get(id).elements()
        ));
    }
    None
}
