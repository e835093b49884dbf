//! The graphs of a recording: which ops with which parameters, weights and sources, layer by layer.

pub mod dot;
pub mod text;

use std::collections::{BTreeMap, BTreeSet};

use parity_graph::params::{Kind as Word, fields};
use parity_graph::reads::reads;
use parity_graph::{Graph, Id, Leaf, axis, label};
use serde::Serialize;

use crate::checkpoint::Checkpoint;

/// One graph of a recording.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GraphReport {
    /// Its file within the dump.
    pub file: String,
    /// The forward passes that it computed, counted from 0.
    pub steps: Vec<usize>,
    /// What computes, in execution order.
    pub nodes: Vec<NodeReport>,
    /// Nodes that only move values.
    pub moved: usize,
}

/// One node that computes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeReport {
    /// The id that its values are recorded under.
    pub id: Checkpoint,
    /// ggml's name of its op.
    pub op: String,
    /// The words of `op_params` that are not zero, by name.
    pub parameters: BTreeMap<String, serde_json::Number>,
    /// The same in the words of the graph's text.
    #[serde(skip)]
    pub words: String,
    /// Element type.
    pub dtype: String,
    /// Extents, slowest axis first, without ones in front.
    pub shape: Vec<usize>,
    /// Which of them counts token rows, if any.
    pub token_axis: Option<usize>,
    /// Weights that it reads.
    pub weights: Vec<String>,
    /// Ids of the nodes that its other sources come from.
    pub nodes: Vec<Checkpoint>,
    /// Inputs and states that it reads.
    pub inputs: Vec<String>,
    /// What computes it, if that was recorded.
    pub backend: Option<String>,
}

/// Reads a graph.
pub fn report(file: &str, steps: &[usize], graph: &Graph) -> GraphReport {
    let names = Names {
        labels: label::labels(graph),
        leaves: label::leaf_names(graph),
        axes: axis::token_axes(graph),
    };
    let nodes: Vec<NodeReport> =
        graph.computed().filter_map(|id| Some(node(graph, id, names.labels[id]?, &names))).collect();
    let moved = graph.computed().count() - nodes.len();
    GraphReport { file: file.to_owned(), steps: steps.to_vec(), nodes, moved }
}

/// What is known of the tensors of a graph.
struct Names {
    labels: Vec<Option<Checkpoint>>,
    leaves: Vec<Option<String>>,
    axes: Vec<Option<usize>>,
}

fn node(graph: &Graph, id: Id, label: Checkpoint, names: &Names) -> NodeReport {
    let tensor = graph.get(id);
    let (extents, tokens) = (tensor.shape(), names.axes[id]);
    // A single token row is shown as one.
    let ones = extents.iter().take_while(|extent| **extent == 1).count();
    let first = tokens.map_or(ones, |axis| ones.min(axis));
    let mut report = NodeReport {
        id: label,
        op: tensor.op.name().to_owned(),
        parameters: parameters(graph, id),
        words: parity_graph::text::params(&tensor.op, &tensor.params).trim_start().to_owned(),
        dtype: tensor.dtype.clone(),
        shape: extents[first..].to_vec(),
        token_axis: tokens.map(|axis| axis - first),
        weights: Vec::new(),
        nodes: Vec::new(),
        inputs: Vec::new(),
        backend: tensor.backend.clone(),
    };
    for source in reads(graph, id) {
        match (names.labels[source], graph.leaf(source)) {
            (Some(node), _) => report.nodes.push(node),
            (None, Some(Leaf::Weight)) => report.weights.push(graph.get(source).name.clone()),
            (None, _) => {
                let name = names.leaves[source].clone().unwrap_or_else(|| graph.get(source).name.clone());
                report.inputs.push(name);
            }
        }
    }
    report
}

/// The words of `op_params` that are not zero; what is no finite number is left out, the text has it.
fn parameters(graph: &Graph, id: Id) -> BTreeMap<String, serde_json::Number> {
    let tensor = graph.get(id);
    let number = |index: usize, bits: u32| match fields(&tensor.op).iter().find(|field| field.word == index) {
        Some(field) if field.kind == Word::Float => {
            // The shortest decimal that is the same f32: 1e-06, not 9.999999974752427e-07.
            let shortest =
                f32::from_bits(bits).to_string().parse().ok().and_then(serde_json::Number::from_f64);
            Some((field.name.to_owned(), shortest?))
        }
        Some(field) => Some((field.name.to_owned(), (bits as i32).into())),
        None => Some((format!("w{index}"), bits.into())),
    };
    let words = tensor.params.0.iter().enumerate().filter(|(_, bits)| **bits != 0);
    words.filter_map(|(index, bits)| number(index, *bits)).collect()
}

/// Layers that are alike, or what stands outside of layers.
pub struct Part<'a> {
    /// The layers; none of what stands outside.
    pub layers: Vec<u32>,
    /// Its nodes, of the first of the layers.
    pub nodes: Vec<&'a NodeReport>,
}

impl GraphReport {
    /// Leaves nothing but the layers that `wants` names.
    pub fn keep(&mut self, wants: impl Fn(u32) -> bool) {
        self.nodes.retain(|node| node.id.layer_index().is_some_and(&wants));
    }

    /// The layers, those that are alike once, between what stands before and behind them.
    pub fn parts(&self) -> Vec<Part<'_>> {
        let mut of_layer: BTreeMap<u32, Vec<&NodeReport>> = BTreeMap::new();
        for node in &self.nodes {
            if let Some(layer) = node.id.layer_index() {
                of_layer.entry(layer).or_default().push(node);
            }
        }
        let first = self.nodes.iter().position(|node| node.id.layer_index().is_some());
        let (before, behind): (Vec<_>, Vec<_>) = self
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.id.layer_index().is_none())
            .partition(|(at, _)| first.is_none_or(|first| *at < first));
        let mut layers: Vec<(Vec<Alike>, Part<'_>)> = Vec::new();
        for (layer, nodes) in of_layer {
            let alike: Vec<Alike> = nodes.iter().map(|node| node.alike(layer)).collect();
            match layers.iter_mut().find(|(known, _)| *known == alike) {
                Some((_, part)) => part.layers.push(layer),
                None => layers.push((alike, Part { layers: vec![layer], nodes })),
            }
        }
        let [before, behind] = [before, behind]
            .map(|nodes| nodes.into_iter().map(|(_, node)| node).collect())
            .map(|nodes| Part { layers: Vec::new(), nodes });
        let parts = [before].into_iter().chain(layers.into_iter().map(|(_, part)| part));
        parts.chain([behind]).filter(|part| !part.nodes.is_empty()).collect()
    }

    /// Whether another graph has the same ops on other extents, as the step after a prefill.
    pub fn is_alike(&self, other: &GraphReport) -> bool {
        let alike = |graph: &GraphReport| -> Vec<(Checkpoint, Alike)> {
            let nodes = graph.nodes.iter();
            nodes.map(|node| (node.id, Alike { extents: String::new(), ..node.alike(0) })).collect()
        };
        alike(self) == alike(other)
    }

    /// What computes its nodes.
    pub fn backends(&self) -> BTreeSet<&str> {
        self.nodes.iter().filter_map(|node| node.backend.as_deref()).collect()
    }
}

/// What nodes of layers that are alike agree in.
#[derive(PartialEq)]
struct Alike {
    op: String,
    words: String,
    extents: String,
    reads: Vec<String>,
    backend: Option<String>,
}

impl NodeReport {
    fn alike(&self, layer: u32) -> Alike {
        let name = self.id.kind().name().to_owned();
        Alike {
            op: format!("{name} {}", self.op),
            words: self.words.clone(),
            extents: self.extents(),
            reads: self.reads(layer),
            backend: self.backend.clone(),
        }
    }

    /// Type and extents, `T` for the number of token rows, inner axes of extent 1 left out: `f32 (T, 2, 128)`. Where there
    /// is but one token, any of these might be called its axis.
    pub fn extents(&self) -> String {
        let axis = |(axis, extent): (usize, &usize)| match self.token_axis == Some(axis) {
            true => "T".to_owned(),
            false => extent.to_string(),
        };
        let last = self.shape.len().saturating_sub(1);
        let told = |(axis, extent): &(usize, &usize)| {
            **extent != 1 || *axis == last || self.token_axis == Some(*axis)
        };
        let axes: Vec<String> = self.shape.iter().enumerate().filter(told).map(axis).collect();
        format!("{} ({})", self.dtype, axes.join(", "))
    }

    /// What it reads as seen from within a layer: names without the layer's number, and `input` for what comes from
    /// before it.
    pub fn reads(&self, layer: u32) -> Vec<String> {
        let own = format!("blk.{layer}.");
        let node = |id: &Checkpoint| match id.layer_index() {
            Some(at) if at == layer => id.kind().name().to_owned(),
            _ if self.id.layer_index().is_none() => id.to_string(),
            _ => INPUT.to_owned(),
        };
        let weights = self.weights.iter().map(|name| name.strip_prefix(&own).unwrap_or(name).to_owned());
        // States are named by their layer: `cache_k_l3`.
        let number = format!("_l{layer}");
        let inputs = self.inputs.iter().map(|name| name.strip_suffix(&number).unwrap_or(name).to_owned());
        weights.chain(self.nodes.iter().map(node)).chain(inputs).collect()
    }
}

/// What a layer reads of those before it.
const INPUT: &str = "input";
