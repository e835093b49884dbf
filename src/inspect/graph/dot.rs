//! A graph as Graphviz: `dot -Tsvg`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::{GraphReport, NodeReport};

/// The graph: a box for each node that computes, in one cluster for each layer; weights stand in the boxes, inputs are
/// ellipses, and what is read of nodes that are not shown is dashed.
pub fn dot(graph: &GraphReport) -> String {
    let mut out = format!("digraph {} {{\n", quoted(&graph.file));
    out += "  rankdir=TB;\n  node [shape=box, fontname=\"monospace\", fontsize=10];\n";
    let mut clusters: BTreeMap<Option<u32>, Vec<&NodeReport>> = BTreeMap::new();
    for node in &graph.nodes {
        clusters.entry(node.id.layer_index()).or_default().push(node);
    }
    for (layer, nodes) in &clusters {
        let indent = if layer.is_some() { "    " } else { "  " };
        if let Some(layer) = layer {
            let _ = writeln!(out, "  subgraph cluster_{layer} {{\n    label=\"blk.{layer}\";");
        }
        for node in nodes {
            let _ = writeln!(out, "{indent}{} [label={}];", quoted(&node.id.to_string()), label(node));
        }
        if layer.is_some() {
            out += "  }\n";
        }
    }
    let shown: BTreeSet<String> = graph.nodes.iter().map(|node| node.id.to_string()).collect();
    let sources = graph.nodes.iter().flat_map(|node| node.nodes.iter().map(ToString::to_string));
    for absent in sources.filter(|source| !shown.contains(source)).collect::<BTreeSet<String>>() {
        let _ = writeln!(out, "  {} [style=dashed];", quoted(&absent));
    }
    // An input may be called as a node is.
    let inputs: BTreeSet<&String> = graph.nodes.iter().flat_map(|node| &node.inputs).collect();
    for input in inputs {
        let _ = writeln!(out, "  {} [label={}, shape=ellipse];", leaf(input), quoted(input));
    }
    for node in &graph.nodes {
        let to = quoted(&node.id.to_string());
        let nodes = node.nodes.iter().map(|from| quoted(&from.to_string()));
        for from in nodes.chain(node.inputs.iter().map(|input| leaf(input))) {
            let _ = writeln!(out, "  {from} -> {to};");
        }
    }
    out + "}\n"
}

fn leaf(name: &str) -> String {
    quoted(&format!("leaf.{name}"))
}

/// Name, op and parameters, weights, one below the other.
fn label(node: &NodeReport) -> String {
    let mut lines = vec![node.id.to_string(), format!("{} {}", node.op, node.words).trim_end().to_owned()];
    lines.extend(node.weights.iter().cloned());
    lines.extend(node.backend.clone());
    quoted(&lines.join("\n"))
}

/// A string of the language: quotes and backslashes are escaped, whatever controls a terminal is left out.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push('?'),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
