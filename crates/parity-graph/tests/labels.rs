//! Names and token axes on graphs that were recorded from llama.cpp 0.5.0: a prefill of 12 tokens, then one decode
//! step, of a hybrid with a state, of a mixture of experts with attention of another kind, and of one beside a dense
//! part.

use std::collections::{BTreeSet, HashMap, HashSet};

use parity_dump::Checkpoint;
use parity_graph::{Graph, Leaf, axis, label, text};

fn graphs(name: &str) -> [Graph; 2] {
    let path = format!("{}/tests/graphs/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    text::read(&std::fs::read_to_string(path).unwrap()).unwrap().try_into().unwrap()
}

/// Axis of each label.
fn axes(graph: &Graph) -> HashMap<Checkpoint, Option<usize>> {
    let axes = axis::token_axes(graph);
    let labels = label::labels(graph).into_iter().enumerate();
    labels.filter_map(|(id, label)| Some((label?, axes[id]))).collect()
}

#[test]
fn every_arithmetic_node_has_a_name_of_its_own() {
    for name in ["jamba-dense", "deepseek4-moe", "arctic-moe"] {
        for graph in graphs(name) {
            let labels = label::labels(&graph);
            let arithmetic: Vec<usize> = (0..graph.nodes).filter(|&id| graph.is_arithmetic(id)).collect();
            let named: HashSet<Checkpoint> = labels.iter().flatten().copied().collect();
            assert_eq!(named.len(), arithmetic.len(), "{name}: a name comes twice");
            assert!(arithmetic.iter().all(|&id| labels[id].is_some()), "{name}");
            assert!(named.iter().all(|label| label.to_string().parse() == Ok(*label)), "{name}");
            let leaves = label::leaf_names(&graph);
            let names: BTreeSet<&String> = leaves.iter().flatten().collect();
            assert_eq!(names.len(), leaves.iter().flatten().count(), "{name}: an input's name comes twice");
        }
    }
}

#[test]
fn a_decode_step_has_the_names_and_the_axes_of_the_prefill() {
    for name in ["jamba-dense", "arctic-moe"] {
        let [prefill, decode] = graphs(name).map(|graph| axes(&graph));
        let with = |axes: &HashMap<Checkpoint, Option<usize>>| -> BTreeSet<String> {
            axes.iter().filter(|(_, axis)| axis.is_some()).map(|(label, _)| label.to_string()).collect()
        };
        assert_eq!(with(&prefill), with(&decode), "{name}");
        let names = |axes: &HashMap<Checkpoint, Option<usize>>| axes.keys().copied().collect::<HashSet<_>>();
        let lost: Vec<String> =
            names(&decode).difference(&names(&prefill)).map(ToString::to_string).collect();
        assert!(lost.is_empty(), "{name}: {lost:?}");
    }
}

#[test]
fn a_state_has_no_token_axis_and_what_is_read_of_it_has() {
    let [graph, _] = graphs("jamba-dense");
    let (labels, axes) = (label::labels(&graph), axis::token_axes(&graph));
    let at =
        |name: &str| labels.iter().position(|label| label.is_some_and(|l| l.to_string() == name)).unwrap();
    assert_eq!(axes[at("blk.1.ssm_scan")], None, "output and states in one tensor");
    assert_eq!(axes[at("blk.1.ssm_conv1d.bias")], Some(2), "(T, C)");
    let states = (graph.nodes..graph.tensors.len()).filter(|&id| graph.leaf(id) == Some(Leaf::State));
    assert!(states.clone().any(|id| graph.get(id).name == "cache_s_l1"));
    assert!(states.into_iter().all(|id| axes[id].is_none()));
}
