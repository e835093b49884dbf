//! A graph for people: one line a node, layers that are alike once.

use std::fmt::Write;

use super::{GraphReport, NodeReport, Part};

/// All graphs of a recording: those that differ from an earlier one in nothing but extents in one line.
pub fn text(graphs: &[GraphReport]) -> String {
    let mut out = String::new();
    for (number, graph) in graphs.iter().enumerate() {
        let steps = steps(&graph.steps);
        let _ = write!(out, "\ngraph       {} ({steps})", graph.file);
        if let Some(same) = graphs[..number].iter().find(|known| graph.is_alike(known)) {
            let _ = writeln!(out, ": the ops of {} on other extents", same.file);
            continue;
        }
        let backends: Vec<&str> = graph.backends().into_iter().collect();
        let on = if backends.is_empty() { String::new() } else { format!(" on {}", backends.join(", ")) };
        let (nodes, moved) = (graph.nodes.len(), graph.moved);
        let _ = writeln!(out, ": {nodes} nodes that compute{on}, {moved} that only move values");
        let parts = graph.parts();
        let widths = widths(&parts);
        for part in &parts {
            let _ = writeln!(out, "{}", title(&part.layers));
            for node in &part.nodes {
                let _ = writeln!(out, "{}", line(node, part, widths, backends.len() > 1));
            }
        }
    }
    out
}

fn steps(steps: &[usize]) -> String {
    let numbers: Vec<u32> = steps.iter().filter_map(|&step| u32::try_from(step).ok()).collect();
    match steps {
        [] => "no step".to_owned(),
        [one] => format!("step {one}"),
        _ => format!("steps {}", runs(&numbers)),
    }
}

fn title(layers: &[u32]) -> String {
    match layers {
        [] => "outside of layers".to_owned(),
        [one] => format!("blk.{one}"),
        _ => format!("blk.{}, alike", runs(layers)),
    }
}

/// `0..3, 5, 7..9`
fn runs(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let run = |run: &[u32]| match run {
        [first, .., last] => format!("{first}..{last}"),
        other => other.first().map_or(String::new(), u32::to_string),
    };
    runs.map(run).collect::<Vec<_>>().join(", ")
}

/// Widths of the columns of names and of ops.
fn widths(parts: &[Part<'_>]) -> [usize; 3] {
    let nodes = || parts.iter().flat_map(|part| part.nodes.iter());
    let widest = |width: fn(&NodeReport) -> usize| nodes().map(|node| width(node)).max().unwrap_or(0);
    [
        widest(|node| node.id.kind().name().len()),
        widest(|node| node.op.len()),
        widest(|node| node.extents().len()),
    ]
}

fn line(node: &NodeReport, part: &Part<'_>, [names, ops, shapes]: [usize; 3], backends: bool) -> String {
    let layer = part.layers.first().copied().unwrap_or(u32::MAX);
    let mut line =
        format!("  {:<names$}  {:<ops$}  {:<shapes$}", node.id.kind().name(), node.op, node.extents());
    let on = node.backend.as_deref().filter(|_| backends).map(|backend| format!("on {backend}"));
    let reads = format!("< {}", node.reads(layer).join(", "));
    let words = Some(node.words.clone()).filter(|words| !words.is_empty());
    for word in [words, Some(reads), on].into_iter().flatten() {
        line += "  ";
        line += &word;
    }
    line.trim_end().to_owned()
}
