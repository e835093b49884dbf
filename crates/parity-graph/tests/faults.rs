//! Mistakes found in graphs that llama.cpp computed: every rewrite fits its graph, and says what it is.

use std::collections::BTreeSet;
use std::path::Path;

use parity_graph::rewrite::Change;
use parity_graph::{Graph, Id, MAX_SRC, Op, fault, params, text};

/// Graphs of nine architectures, recorded with llama.cpp 0.5.0.
fn graphs() -> Vec<(String, Graph)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut graphs = Vec::new();
    let folders = [crates.join("../../tests/data/graphs"), crates.join("tests/graphs")];
    for entry in folders.into_iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            let read = text::read(&std::fs::read_to_string(&path).unwrap()).unwrap();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            graphs.extend(read.into_iter().map(|graph| (name.clone(), graph)));
        }
    }
    assert!(graphs.len() >= 9, "{} graphs", graphs.len());
    graphs
}

/// Whether a change speaks of what a node has.
fn fits(graph: &Graph, id: Id, change: &Change, at: &str) {
    let slots = graph.get(id).srcs.len();
    let before = |other: Id| assert!(other < id || graph.is_leaf(other), "{at} reads what comes later");
    match change {
        Change::Words(words) | Change::Op(_, words) => {
            assert!(words.iter().all(|(word, _)| *word < params::WORDS), "{at}");
        }
        Change::Source { slot, .. } => assert!(*slot < MAX_SRC, "{at}"),
        Change::Exchange(a, b) => assert!(*a < slots && *b < slots, "{at}"),
        Change::SourceEdit { slot, .. } | Change::Bypass { slot } | Change::Misread { slot, .. } => {
            assert!(graph.src(id, *slot).is_some(), "{at}");
        }
        Change::Unwritten { slots, mask, .. } => {
            assert!(slots.iter().chain([mask]).all(|slot| graph.src(id, *slot).is_some()), "{at}");
        }
        Change::Picked { by, .. } => assert!(*by < id && graph.get(*by).op == Op::GetRows, "{at}"),
        Change::Pass(with) => {
            assert_eq!(graph.get(*with).elements(), graph.get(id).elements(), "{at}");
        }
        Change::After { ne, .. } => {
            assert_eq!(ne.iter().product::<usize>(), graph.get(id).elements(), "{at}");
        }
        Change::Part { row, columns, change } => {
            assert!(columns.end <= *row && graph.get(id).elements().is_multiple_of(*row), "{at}");
            fits(graph, id, change, at);
        }
        Change::All(changes) => changes.iter().for_each(|change| fits(graph, id, change, at)),
        Change::ResultEdit(_) | Change::Scores(_) => {}
    }
    change.others().into_iter().for_each(before);
}

#[test]
fn rewrites_fit_their_graphs_and_change_them() {
    for (name, graph) in graphs() {
        let mut found = 0;
        for id in 0..graph.tensors.len() {
            for fault in fault::at(&graph, id) {
                found += 1;
                let at = format!("{name}, {}: {}", graph.get(id).name, fault.name);
                assert_eq!(fault.rewrite.node, id, "{at}");
                assert!(
                    fault.name.contains('.') && !fault.text.is_empty() && !fault.text.ends_with('.'),
                    "{at}"
                );
                fits(&graph, id, &fault.rewrite.change, &at);
                let told = matches!(
                    fault.rewrite.change,
                    Change::Words(_) | Change::Op(..) | Change::Source { .. } | Change::Exchange(..)
                );
                assert!(!told || fault.rewrite.applied(&graph) != graph, "{at} changes nothing");
            }
        }
        assert!(found > 20, "{name}: {found} mistakes");
    }
}

/// None of the recorded models uses YaRN: a rotation that does has its mistakes.
#[test]
fn yarn_has_its_mistakes() {
    let (_, mut graph) = graphs().swap_remove(0);
    let rope = graph.computed().find(|&id| graph.get(id).op == Op::Rope).expect("a rotation");
    let word = |name: &str| params::fields(&Op::Rope).iter().find(|field| field.name == name).unwrap().word;
    let of =
        |graph: &Graph| fault::at(graph, rope).into_iter().map(|fault| fault.name).collect::<BTreeSet<_>>();
    assert!(!of(&graph).contains("rope.yarn"));
    for (name, value) in [("ext_factor", 1.0), ("attn_factor", 1.2), ("freq_scale", 0.25)] {
        graph.tensors[rope].params.set_float(word(name), value);
    }
    graph.tensors[rope].params.set_int(word("n_ctx_orig"), 4096);
    assert!(of(&graph).contains("rope.yarn") && of(&graph).contains("rope.yarn_ramp"), "{:?}", of(&graph));
}

#[test]
fn each_family_has_a_place_in_some_graph() {
    let names: BTreeSet<&str> = graphs()
        .iter()
        .flat_map(|(_, graph)| (0..graph.nodes).flat_map(|id| fault::at(graph, id)).collect::<Vec<_>>())
        .map(|fault| fault.name)
        .collect();
    for name in [
        "norm.eps",
        "norm.no_weight",
        "linear.no_bias",
        "linear.wrong_layer",
        "rope.base",
        "rope.interleaved",
        "attn.no_scale",
        "attn.no_mask",
        "attn.sinks",
        "moe.routing",
        "moe.no_renorm",
        "moe.expert_index",
        "moe.top_k",
        "moe.order",
        "moe.no_shared",
        "attn.window",
        "attn.window_size",
        "ffn.relu",
        "state.not_carried",
        "state.stale",
        "state.shifted",
        "state.exchanged",
        "residual.parallel",
        "ffn.swapped",
        "ffn.clamp",
        "residual.missing",
    ] {
        assert!(names.contains(name), "{name} has no place in any of {names:?}");
    }
}

#[test]
fn what_is_left_out_of_a_sum_is_one_mistake() {
    let (mut turned, mut experts) = (0, 0);
    for (name, graph) in graphs() {
        for id in 0..graph.nodes {
            let names: Vec<&str> = fault::at(&graph, id).iter().map(|fault| fault.name).collect();
            // Position 0 turns nothing: whoever diagnoses tells both, since they come to the same.
            if names.contains(&"rope.none") {
                assert!(names.contains(&"rope.position_zero"), "{name}: {}", graph.get(id).name);
                turned += 1;
            }
            // A sum over experts is no residual.
            assert!(
                !(names.contains(&"moe.top_k") && names.contains(&"residual.missing")),
                "{name}: {names:?}"
            );
            experts += usize::from(names.contains(&"moe.top_k"));
        }
    }
    assert!(turned > 10 && experts > 5, "{turned} RoPEs, {experts} sums over experts");
}

/// No shipped graph has scaled or multimodal RoPE: the words are set in one that has plain RoPE.
#[test]
fn scaled_and_multimodal_rope_have_their_mistakes() {
    let (_, mut graph) = graphs().into_iter().find(|(name, _)| name == "qwen2-dense").unwrap();
    let rope = (0..graph.nodes).find(|&id| graph.get(id).op == Op::Rope).unwrap();
    let word = |name: &str| params::field(&Op::Rope, name).unwrap().word;
    let names = |graph: &Graph| -> Vec<&'static str> {
        fault::at(graph, rope).into_iter().map(|fault| fault.name).collect()
    };
    assert!(!names(&graph).iter().any(|name| name.starts_with("rope.yarn") || *name == "rope.sections"));
    let words = &mut graph.tensors[rope].params;
    words.set_float(word("ext_factor"), 1.0);
    words.set_float(word("freq_scale"), 0.25);
    words.set_float(word("attn_factor"), 1.1);
    let yarn = names(&graph);
    let count = |names: &[&str], wanted: &str| names.iter().filter(|name| **name == wanted).count();
    // The interpolation and the magnitude; the limits exchanged, and two other contexts; other factors and lengths.
    let counts = ["rope.yarn", "rope.yarn_ramp", "rope.scale", "rope.yarn_factor", "rope.magnitude"];
    assert_eq!(counts.map(|name| count(&yarn, name)), [2, 3, 1, 3, 1]);
    let words = &mut graph.tensors[rope].params;
    words.set_int(word("mode"), 8);
    for (section, pairs) in ["section0", "section1", "section2"].into_iter().zip([16, 24, 24]) {
        words.set_int(word(section), pairs);
    }
    assert_eq!(count(&names(&graph), "rope.sections"), 2);
}
