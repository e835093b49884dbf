//! Cuts a graph into contiguous parts of whole layers, one for each GPU, about equal in bytes of weights.

use std::collections::{HashMap, HashSet};

use crate::checkpoint::Checkpoint;
use crate::engine::fused::graph::{Graph, Node};
use crate::error::{Error, Result};

/// Contiguous nodes of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The nodes.
    pub graph: Graph,
    /// The one value of earlier nodes that these read.
    pub given: Option<Checkpoint>,
    /// The one value of these that later nodes read.
    pub handed: Option<Checkpoint>,
}

impl Part {
    /// All of it.
    pub fn whole(graph: Graph) -> Part {
        Part { graph, given: None, handed: None }
    }
}

/// The parts for so many GPUs, of which the first has what comes before the layers and the last what comes after them.
/// `bytes` tells the size of a weight. A graph that ends before its last layer may have fewer layers than there are
/// GPUs, and then has fewer parts.
///
/// # Errors
/// More GPUs than the model has layers; layers that read more of earlier ones than one value.
pub fn parts(graph: Graph, gpus: usize, bytes: impl Fn(&str) -> usize) -> Result<Vec<Part>> {
    if gpus > graph.dims.layers.max(1) {
        return Err(Error::new("--device", "the model has fewer layers than there are GPUs")
            .expected(format!("at most {} GPUs", graph.dims.layers))
            .found(gpus)
            .hint("name fewer: --device cuda:0,cuda:1"));
    }
    let count = gpus.min(layers(&graph).len()).max(1);
    let cuts = cuts(&graph);
    if cuts.len() + 1 < count {
        return Err(Error::new("--device", "the layers of this graph cannot be split over so many GPUs")
            .expected("layers that read one value of those before them")
            .found(format!("{} parts that do, for {count} GPUs", cuts.len() + 1))
            .hint("--device cuda:N for one GPU"));
    }
    let starts: Vec<usize> = [0].into_iter().chain(cuts).collect();
    let ends = starts.iter().skip(1).copied().chain([graph.nodes.len()]);
    let sizes: Vec<usize> =
        starts.iter().zip(ends).map(|(&start, end)| weight_bytes(&graph.nodes[start..end], &bytes)).collect();
    let firsts: Vec<usize> = balanced(&sizes, count).into_iter().map(|first| starts[first]).collect();
    let mut nodes = graph.nodes;
    let mut parts = Vec::with_capacity(count);
    let mut handed = None;
    for first in firsts.into_iter().rev() {
        let own = nodes.split_off(first);
        let given = nodes.last().map(|node| node.checkpoint);
        parts.push(Part { graph: Graph { nodes: own, dims: graph.dims }, given, handed });
        handed = given;
    }
    parts.reverse();
    Ok(parts)
}

/// Numbers of the layers of a graph, or of a part.
pub fn layers(graph: &Graph) -> HashSet<u32> {
    graph.checkpoints().filter_map(Checkpoint::layer_index).collect()
}

/// The first nodes of layers that read, they and all nodes after them, of those before them the value of the node right
/// before alone.
fn cuts(graph: &Graph) -> Vec<usize> {
    let nodes = &graph.nodes;
    let places: HashMap<Checkpoint, usize> =
        nodes.iter().enumerate().map(|(place, node)| (node.checkpoint, place)).collect();
    let reads_no_more = |cut: usize| {
        nodes[cut..].iter().all(|node| {
            let mut inputs = node.inputs.iter().enumerate();
            inputs.all(|(index, input)| match places.get(input) {
                Some(&place) if place < cut => place + 1 == cut && !node.op.reads_cache(index),
                _ => true,
            })
        })
    };
    let layer = |place: usize| nodes[place].checkpoint.layer_index();
    (1..nodes.len())
        .filter(|&cut| layer(cut - 1).is_some() && layer(cut).is_some() && layer(cut - 1) != layer(cut))
        .filter(|&cut| reads_no_more(cut))
        .collect()
}

/// Bytes of the weights of nodes, each counted once.
fn weight_bytes(nodes: &[Node], bytes: impl Fn(&str) -> usize) -> usize {
    let mut seen = HashSet::new();
    let weights = nodes.iter().filter_map(|node| node.op.weight());
    weights.filter(|weight| seen.insert(*weight)).map(bytes).sum()
}

/// The first of the sizes of each of `count` contiguous groups, none empty, whose sums have the smallest sum of squares:
/// they are equal where they can be. There are at least so many sizes.
fn balanced(sizes: &[usize], count: usize) -> Vec<usize> {
    let mut sums = vec![0u128];
    for size in sizes {
        sums.push(sums[sums.len() - 1] + *size as u128);
    }
    let square = |from: usize, to: usize| (sums[to] - sums[from]).pow(2);
    // By the number of groups, and by where the last of them ends: the smallest sum, and where that group begins.
    let mut best: Vec<Vec<Option<(u128, usize)>>> =
        vec![(0..=sizes.len()).map(|end| (end > 0).then(|| (square(0, end), 0))).collect()];
    for groups in 1..count {
        let before = &best[groups - 1];
        let of = |end: usize| {
            (0..end).filter_map(|from| before[from].map(|(sum, _)| (sum + square(from, end), from))).min()
        };
        best.push((0..=sizes.len()).map(of).collect());
    }
    let (mut firsts, mut end) = (Vec::with_capacity(count), sizes.len());
    for groups in best.iter().rev() {
        end = groups[end].map_or(0, |(_, from)| from);
        firsts.push(end);
    }
    firsts.reverse();
    firsts
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::Kind;
    use crate::engine::fused::Model;
    use crate::gguf::Gguf;

    fn tiny() -> Model {
        let path = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";
        Model::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
    }

    fn size(gguf: &Gguf) -> impl Fn(&str) -> usize + '_ {
        |weight| gguf.tensor(weight).map_or(0, |tensor| tensor.bytes.len())
    }

    #[test]
    fn every_node_is_on_one_gpu_and_reads_one_value_of_those_before() {
        let model = tiny();
        for gpus in 1..=model.graph.dims.layers {
            let parts = parts(model.graph.clone(), gpus, size(&model.gguf)).unwrap();
            assert_eq!(parts.len(), gpus);
            let all: Vec<Node> = parts.iter().flat_map(|part| part.graph.nodes.clone()).collect();
            assert_eq!(all, model.graph.nodes, "the same nodes in the same order");
            assert_eq!((parts[0].given, parts[gpus - 1].handed), (None, None));
            assert!(parts[0].graph.node(Checkpoint::global(Kind::Embed)).is_some());
            assert!(parts[gpus - 1].graph.node(Checkpoint::global(Kind::Logits)).is_some());
            let mut layers_before = 0;
            for pair in parts.windows(2) {
                layers_before += layers(&pair[0].graph).len();
                let residual = Checkpoint::layer(Kind::LayerOut, layers_before as u32 - 1);
                assert_eq!((pair[0].handed, pair[1].given), (Some(residual), Some(residual)));
                assert!(layers(&pair[0].graph).is_disjoint(&layers(&pair[1].graph)), "whole layers");
            }
            for part in &parts {
                let own: HashSet<Checkpoint> = part.graph.checkpoints().collect();
                let read: HashSet<Checkpoint> =
                    part.graph.nodes.iter().flat_map(|node| node.inputs.clone()).collect();
                let given: Vec<Checkpoint> = read.difference(&own).copied().collect();
                assert_eq!(given, part.given.into_iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn layers_go_where_bytes_are_fewest() {
        // Embedding with the first layer, the head with the last.
        assert_eq!(balanced(&[9, 1, 1, 1], 2), [0, 1]);
        assert_eq!(balanced(&[1, 1, 1, 1], 2), [0, 2]);
        assert_eq!(balanced(&[1, 1, 1, 9], 2), [0, 3]);
        assert_eq!(balanced(&[5, 2, 2, 2, 2, 5], 3), [0, 1, 4], "5, 6 and 7");
        assert_eq!(balanced(&[0, 0, 0], 3), [0, 1, 2], "none is empty");
        assert_eq!(balanced(&[usize::MAX; 5], 1), [0]);
        // No other cut has a smaller sum of squares.
        let sizes = [7usize, 3, 11, 2, 5, 13, 1, 8];
        let sum = |cuts: &[usize]| -> usize {
            let ends = cuts.iter().skip(1).copied().chain([sizes.len()]);
            cuts.iter().zip(ends).map(|(&from, to)| sizes[from..to].iter().sum::<usize>().pow(2)).sum()
        };
        let found = sum(&balanced(&sizes, 3));
        for a in 1..sizes.len() - 1 {
            for b in a + 1..sizes.len() {
                assert!(found <= sum(&[0, a, b]), "{a}, {b}");
            }
        }
    }

    #[test]
    fn more_gpus_than_layers_are_refused() {
        let model = tiny();
        let gpus = model.graph.dims.layers + 1;
        let error = parts(model.graph.clone(), gpus, size(&model.gguf)).unwrap_err().to_string();
        assert!(error.contains("fewer layers") && error.contains("at most 4 GPUs"), "{error}");
        // A graph that ends early has fewer parts.
        let early = model.graph.until(Checkpoint::layer(Kind::Q, 1));
        assert_eq!(parts(early, 3, size(&model.gguf)).unwrap().len(), 2);
        let embedding = model.graph.until(Checkpoint::global(Kind::Embed));
        assert_eq!(parts(embedding.clone(), 2, size(&model.gguf)).unwrap(), [Part::whole(embedding)]);
    }

    fn node_mut(graph: &mut Graph, id: Checkpoint) -> &mut Node {
        graph.nodes.iter_mut().find(|node| node.checkpoint == id).unwrap()
    }

    #[test]
    fn layers_that_read_more_of_earlier_ones_stay_together() {
        let model = tiny();
        let mut graph = model.graph.clone();
        let read = Checkpoint::layer(Kind::AttnResidual, 1);
        node_mut(&mut graph, Checkpoint::layer(Kind::FfnOut, 2)).inputs[0] = read;
        let cut = |gpus| parts(graph.clone(), gpus, size(&model.gguf));
        for part in cut(3).unwrap() {
            let layers = layers(&part.graph);
            assert_eq!(layers.contains(&1), layers.contains(&2));
        }
        let error = cut(4).unwrap_err().to_string();
        assert!(
            error.contains("cannot be split") && error.contains("3 parts that do, for 4 GPUs"),
            "{error}"
        );
        // A cache of another layer cannot be read from another GPU.
        let mut graph = model.graph.clone();
        let scores = node_mut(&mut graph, Checkpoint::layer(Kind::AttnScores, 3));
        scores.inputs[1] = Checkpoint::layer(Kind::KRope, 2);
        assert_eq!(cuts(&graph).len(), cuts(&model.graph).len() - 1);
    }
}
