//! Graphs built from a model file: equal to those that llama.cpp computed, different in exactly what was edited, and
//! executed to the same values.

use std::collections::BTreeMap;

use parity::arithmetic::Arithmetic;
use parity::engine::op_by_op::{Conductor, Machine, Node, Program, Value, own};
use parity::error::Result;
use parity::gguf::Gguf;
use parity::model::builders::{Built, Cache, Shape, build, inputs};
use parity::model::diff::{Diff, Difference, diff};
use parity::ops::Args;
use parity_graph::params::fields;
use parity_graph::{Graph, Op, text};

use crate::support::graphs::{MODELS, filled, head, hollow, recorded, renamed, with_f32, with_u32};

fn built(gguf: &Gguf, shape: Shape) -> Built {
    build(gguf, shape).unwrap_or_else(|error| panic!("{error}"))
}

fn assert_equal(found: &Diff, what: &str) {
    assert!(found.is_equal(), "{what}\n{found}");
    assert!(found.nodes > 20 && found.to_string().contains(&found.nodes.to_string()), "{found}");
}

#[test]
fn built_graphs_are_those_that_llama_cpp_computes() {
    for model in MODELS {
        let gguf = hollow(&head(model));
        for kind in ["", "-plain-decode"] {
            let recorded = recorded(model, kind);
            let built = built(&gguf, Shape::of(&recorded)).graph;
            assert_equal(&diff(&recorded, &built), &format!("{model}{kind}"));
            // The same ops in the same order, tensor by tensor, but for names and rounding words.
            let ops = |graph: &Graph| {
                graph.computed().map(|id| (graph.get(id).op.clone(), graph.get(id).ne)).collect::<Vec<_>>()
            };
            let (a, b) = (ops(&recorded), ops(&built));
            for (at, (one, other)) in a.iter().zip(&b).enumerate() {
                assert_eq!(one, other, "{model}{kind}: node {at}");
            }
            assert_eq!(a.len(), b.len(), "{model}{kind}");
        }
    }
}

/// Names too, so that what is computed on a built graph can be compared with a recording node by node.
#[test]
fn nodes_of_built_graphs_are_called_as_in_recordings() {
    for model in MODELS {
        let gguf = hollow(&head(model));
        for kind in ["", "-plain-decode"] {
            let recorded = recorded(model, kind);
            let built = built(&gguf, Shape::of(&recorded)).graph;
            let names = |graph: &Graph| {
                let labels = parity_graph::label::labels(graph).into_iter().flatten();
                labels.map(|label| label.to_string()).collect::<Vec<_>>()
            };
            assert_eq!(names(&built), names(&recorded), "{model}{kind}");
        }
    }
}

#[test]
fn neither_form_of_attention_nor_padding_nor_the_step_is_wiring() {
    for model in MODELS {
        let gguf = hollow(&head(model));
        let prefill = recorded(model, "");
        for shape in [
            Shape::step(0, 12, 512, false, Cache::F32),
            Shape::step(700, 1, 2048, true, Cache::F16),
            Shape::step(3, 5, 256, false, Cache::F16),
        ] {
            assert_equal(&diff(&prefill, &built(&gguf, shape).graph), &format!("{model} {shape:?}"));
        }
    }
}

/// Graphs that were recorded of releases since 2024, before parameters were written down: sources and ops alone.
#[test]
fn the_wiring_of_qwen2_is_that_of_every_release() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let gguf = Gguf::open(&root.join("reference-dumps/models/qwen2-tiny-py-F16.gguf")).unwrap();
    let mut seen = 0;
    for entry in std::fs::read_dir(root.join("crates/parity-record/tests/graphs")).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        for recorded in text::read(&without_self_sources(&text)).unwrap() {
            let last = recorded.computed().last().map(|id| recorded.get(id).name.clone());
            let built = built(&gguf, Shape::of(&recorded)).graph;
            let found = diff(&recorded, &built);
            let wiring: Vec<&Difference> = found
                .differences
                .iter()
                .filter(|difference| !matches!(difference, Difference::Number { .. }))
                .filter(|difference| layer(difference).is_none_or(|layer| layer < layers(&recorded)))
                .collect();
            assert!(wiring.is_empty(), "{}: {last:?}\n{wiring:#?}", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 14, "{seen} graphs");
}

/// ggml's casts name themselves as a source, which older texts wrote down.
fn without_self_sources(text: &str) -> String {
    let mut node = 0;
    let line = |line: &str| {
        if line.starts_with("graph ") {
            node = 0;
            return line.to_owned();
        }
        node += 1;
        let (fields, name) = line.split_once(" : ").unwrap();
        let words: Vec<&str> = fields.split(' ').collect();
        let sources = words.iter().position(|word| *word == "<").unwrap_or(words.len());
        let own = (node - 1).to_string();
        let kept: Vec<&str> = words
            .iter()
            .enumerate()
            .filter(|(at, word)| *at <= sources || **word != own)
            .map(|(_, word)| *word)
            .collect();
        format!("{} : {name}", kept.join(" "))
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

fn layer(difference: &&Difference) -> Option<u32> {
    match difference {
        Difference::Number { node, .. }
        | Difference::Op { node, .. }
        | Difference::Source { node, .. }
        | Difference::Missing { node, .. }
        | Difference::Extra { node, .. } => node.layer,
    }
}

fn layers(graph: &Graph) -> u32 {
    let of = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u32>().ok();
    graph.tensors.iter().filter_map(|tensor| of(&tensor.name)).max().map_or(0, |last| last + 1)
}

/// Words that say how a result is rounded, or what the op's name says already.
const NO_WIRING: [&str; 6] = ["prec", "hint", "prec_src1", "n_kv_max", "unary", "glu"];

#[test]
fn every_number_that_is_edited_is_named_alone() {
    for model in MODELS {
        let gguf = hollow(&head(model));
        for flash in [true, false] {
            let graph = built(&gguf, Shape::step(0, 4, 256, flash, Cache::F16)).graph;
            for id in graph.computed().filter(|&id| !graph.get(id).op.is_movement()) {
                for field in fields(&graph.get(id).op).iter().filter(|f| !NO_WIRING.contains(&f.name)) {
                    let mut edited = graph.clone();
                    // The last bit of an integer; a good part of a float.
                    edited.tensors[id].params.0[field.word] ^= match field.kind {
                        parity_graph::params::Kind::Int => 1,
                        parity_graph::params::Kind::Float => 1 << 22,
                    };
                    let found = diff(&edited, &graph);
                    let [Difference::Number { .. }] = found.differences.as_slice() else {
                        panic!("{model}: {} of {}:\n{found}", field.name, graph.get(id).name);
                    };
                }
            }
        }
    }
}

#[test]
fn every_source_that_is_edited_is_named_alone() {
    for model in MODELS {
        let gguf = hollow(&head(model));
        // One row of logits: rows before and after they are picked have other shapes.
        let shape = Shape { outputs: 1, ..Shape::step(0, 4, 256, true, Cache::F16) };
        let graph = built(&gguf, shape).graph;
        let nodes: Vec<usize> = graph.computed().filter(|&id| !graph.get(id).op.is_movement()).collect();
        let mut edits = 0;
        for &id in &nodes {
            for slot in 0..graph.get(id).srcs.len() {
                let Some(src) = graph.src(id, slot) else { continue };
                let alike = |&other: &usize| {
                    let (one, other_tensor) = (graph.get(src), graph.get(other));
                    let same = one.ne == other_tensor.ne && one.dtype == other_tensor.dtype;
                    same && other < id
                        && graph.origin(other) != graph.origin(src)
                        && !graph.sources(id).any(|s| s == other)
                };
                // The nearest one before that it could be mistaken for.
                let Some(&wrong) = nodes.iter().rev().find(|other| alike(other)) else { continue };
                let mut edited = graph.clone();
                edited.tensors[id].srcs[slot] = Some(wrong);
                let found = diff(&edited, &graph);
                let told = found.sentences();
                assert!(
                    !found.is_equal(),
                    "{model}: slot {slot} of {} is {}",
                    graph.get(id).name,
                    graph.get(wrong).name
                );
                let alone = matches!(found.differences.as_slice(), [Difference::Source { .. }]);
                assert!(
                    alone,
                    "{model}: slot {slot} of {} {}:\n{}",
                    graph.get(id).op,
                    graph.get(id).name,
                    told.join("\n")
                );
                edits += 1;
            }
        }
        assert!(edits > 30, "{model}: {edits}");
    }
}

#[test]
fn weights_of_another_layer_are_named() {
    let gguf = hollow(&head("qwen3moe-moe"));
    let graph = built(&gguf, Shape::step(0, 4, 256, true, Cache::F16)).graph;
    let leaf = |name: &str| graph.tensors.iter().position(|tensor| tensor.name == name).unwrap();
    let (own, other) = (leaf("blk.1.ffn_norm.weight"), leaf("blk.0.ffn_norm.weight"));
    let mut edited = graph.clone();
    for slot in edited.tensors.iter_mut().flat_map(|tensor| tensor.srcs.iter_mut().flatten()) {
        if *slot == own {
            *slot = other;
        }
    }
    let text = diff(&edited, &graph).to_string();
    assert_eq!(
        text,
        "blk.1.ffn_norm reads blk.0.ffn_norm.weight in the graph, blk.1.ffn_norm.weight in the file"
    );
}

#[test]
fn a_node_that_is_missing_or_extra_is_named_alone() {
    for model in MODELS {
        let gguf = hollow(&head(model));
        let graph = built(&gguf, Shape::step(0, 4, 256, true, Cache::F16)).graph;
        // Left out: every node that passes on something of its first source's shape.
        for id in graph.computed().filter(|&id| !graph.get(id).op.is_movement()) {
            let Some(src) = graph.src(id, 0).filter(|&src| graph.get(src).ne == graph.get(id).ne) else {
                continue;
            };
            let dtype = &graph.get(id).dtype;
            if graph.is_leaf(src) || &graph.get(src).dtype != dtype || graph.computed().last() == Some(id) {
                continue;
            }
            let mut edited = graph.clone();
            for tensor in &mut edited.tensors {
                tensor.srcs.iter_mut().flatten().filter(|slot| **slot == id).for_each(|slot| *slot = src);
            }
            edited.tensors[id].computed = false;
            let found = diff(&edited, &graph);
            let alone = matches!(found.differences.as_slice(), [Difference::Missing { .. }]);
            assert!(alone, "{model}: without {} {}\n{found}", graph.get(id).op, graph.get(id).name);
            let found = diff(&graph, &edited);
            let alone = matches!(found.differences.as_slice(), [Difference::Extra { .. }]);
            assert!(alone, "{model}: with {} {}\n{found}", graph.get(id).op, graph.get(id).name);
        }
    }
}

#[test]
fn another_op_is_named() {
    let gguf = hollow(&head("gemma3-dense"));
    let graph = built(&gguf, Shape::step(0, 4, 256, true, Cache::F16)).graph;
    let mut edited = graph.clone();
    let glu = graph.computed().find(|&id| graph.get(id).op == Op::Geglu).unwrap();
    edited.tensors[glu].op = Op::Swiglu;
    assert_eq!(diff(&edited, &graph).to_string(), "blk.0.ffn_act is SWIGLU in the graph, GEGLU in the file");
}

#[test]
fn a_file_that_was_edited_after_the_recording_is_told() {
    let told = |model: &str, head: Vec<u8>| {
        let recorded = recorded(model, "");
        diff(&recorded, &built(&hollow(&head), Shape::of(&recorded)).graph).to_string()
    };
    let edited = with_f32(head("qwen2-dense"), "qwen2.rope.freq_base", 1e6);
    assert_eq!(told("qwen2-dense", edited), "blk.0..1: RoPE base 10000 in the graph, 1000000 in the file");
    let edited = with_f32(head("gemma3-dense"), "gemma3.rope.freq_base", 1e6);
    assert_eq!(told("gemma3-dense", edited), "blk.1: RoPE base 10000 in the graph, 1000000 in the file");
    let edited = with_f32(head("llama-moe"), "llama.attention.layer_norm_rms_epsilon", 1e-6);
    let text = told("llama-moe", edited);
    assert!(text.contains("epsilon 1e-05 in the graph, 1e-06 in the file"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let edited = with_f32(head("gpt-oss-moe"), "gpt-oss.rope.scaling.factor", 4.0);
    assert_eq!(told("gpt-oss-moe", edited), "blk.0..1: RoPE scale 1 in the graph, 0.25 in the file");
    // Two heads of 128 become four of 64: the widths are consistent, the heads are not those of the graph.
    let mut edited = with_u32(head("qwen2-dense"), "qwen2.attention.head_count", 4);
    for key in [
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_swa",
    ] {
        let value = if key.ends_with("kv") { 4 } else { 64 };
        edited = with_u32(edited, &format!("qwen2.{key}"), value);
    }
    for key in ["attention.value_length_swa", "rope.dimension_count", "rope.dimension_count_swa"] {
        edited = with_u32(edited, &format!("qwen2.{key}"), 64);
    }
    let text = told("qwen2-dense", edited);
    for part in ["heads 2 in the graph, 4 in the file", "head width 128 in the graph, 64 in the file"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn what_a_builder_does_not_know_is_refused() {
    let shape = Shape::step(0, 4, 256, true, Cache::F16);
    let refused = |head: Vec<u8>| build(&hollow(&head), shape).unwrap_err().to_string();
    let text = refused(renamed(head("qwen2-dense"), "blk.1.attn_q.bias", "blk.1.attn_z.bias"));
    assert!(text.contains("a tensor that the graph has no place for") && text.contains("attn_z"), "{text}");
    let text = refused(renamed(head("qwen2-dense"), "qwen2.token_shift_count", "qwen2.token_shift_colnt"));
    assert!(text.contains("token_shift_colnt may change the computation"), "{text}");
    let text = refused(with_u32(head("llama-dense"), "llama.nextn_predict_layers", 1));
    assert!(text.contains("nextn_predict_layers") && text.contains("none, or 0"), "{text}");
    let text = refused(with_u32(head("qwen2-dense"), "qwen2.attention.head_count", 3));
    assert!(text.contains("head_count"), "{text}");
    let text = refused(with_u32(head("gpt-oss-moe"), "gpt-oss.attention.sliding_window", 0));
    assert!(text.contains("sliding_window"), "{text}");
    let text = refused(renamed(head("qwen2-dense"), "qwen2", "qwen9"));
    assert!(text.contains("an architecture that parity has no builder for"), "{text}");
    let gguf = hollow(&head("qwen2-dense"));
    for shape in [Shape { tokens: 0, ..shape }, Shape { outputs: 5, ..shape }] {
        assert!(build(&gguf, shape).is_err());
    }
}

/// Goes on with the machine's own values and keeps those of the last node.
struct Last(Vec<f64>);

impl Conductor<f64> for Last {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &parity::engine::op_by_op::Unknown>,
    ) -> Result<Value<f64>> {
        let value = own(node, args);
        match &value {
            Ok(values) => self.0 = values.data.clone(),
            Err(unknown) => panic!("{}: {}", node.program.names[node.id], unknown.reason),
        }
        Ok(value)
    }
}

/// The logits of the last row of each step.
fn run(gguf: &Gguf, steps: &[(Graph, BTreeMap<String, Vec<f64>>)]) -> Vec<Vec<f64>> {
    let mut machine = Machine::<f64>::new(gguf, Arithmetic::LLAMA_CPU);
    let mut logits = Vec::new();
    for (graph, inputs) in steps {
        let program = Program::new(graph.clone(), Vec::new()).unwrap();
        let mut last = Last(Vec::new());
        machine.step(&program, &|id| inputs.get(&program.graph.get(id).name).cloned(), &mut last).unwrap();
        let width = graph.get(graph.computed().last().unwrap()).ne[0];
        logits.push(last.0[last.0.len() - width..].to_vec());
    }
    logits
}

/// A prefill of 12 tokens, then a step of one, on graphs that were recorded and on those that are built.
#[test]
fn a_built_graph_computes_what_the_recorded_one_computes() {
    let tokens: [u32; 13] = [1, 17, 33, 42, 5, 99, 101, 7, 64, 12, 88, 3, 21];
    for model in MODELS {
        let gguf = filled(model);
        let prefill = recorded(model, "");
        let first = built(&gguf, Shape::of(&prefill));
        let given = inputs(&first, &tokens[..12], 0).unwrap();
        let second = Shape { tokens: 1, outputs: 1, ..first.shape };
        let second = built(&gguf, second);
        let then = inputs(&second, &tokens[12..], 12).unwrap();
        let ours = run(&gguf, &[(first.graph, given.clone()), (second.graph.clone(), then.clone())]);
        let theirs = run(&gguf, &[(prefill, given), (second.graph, then)]);
        assert_eq!(ours, theirs, "{model}");
        assert!(ours.iter().flatten().all(|value| value.is_finite() && *value != 0.0), "{model}");
        // All at once, without flash attention and in f32: other rounding, the same function.
        let whole = built(&gguf, Shape::step(0, 13, 256, false, Cache::F32));
        let given = inputs(&whole, &tokens, 0).unwrap();
        let at_once = run(&gguf, &[(whole.graph, given)]);
        let norm = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();
        let apart: Vec<f64> = at_once[0].iter().zip(&ours[1]).map(|(a, b)| a - b).collect();
        let error = norm(&apart) / norm(&ours[1]);
        assert!(error <= F16_CACHE, "{model}: {error:e}");
    }
}

/// Keys and values rounded to f16, Q and the sums of attention as well, through two layers.
const F16_CACHE: f64 = 16.0 / 2048.0;
