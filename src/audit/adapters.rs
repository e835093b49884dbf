//! Matrices of several adapters in a recorded graph: llama.cpp calls those of all adapters alike.

use parity_graph::weights::{LORA_A, in_adapter, of_adapter};
use parity_graph::{Graph, Id, Op};

use crate::gguf::{Adapter, Gguf, Pair};

/// B·(A·x), scaled, where a graph draws it.
struct Drawn {
    a: Id,
    b: Id,
    scale: f32,
}

/// Gives the matrices of each adapter names of their own: the first adapter of the model's with a pair of that size and
/// scale has them, in whatever order llama.cpp drew them.
pub fn name_apart(graph: &mut Graph, gguf: &Gguf) {
    if gguf.adapters().nth(1).is_none() {
        return;
    }
    let drawn: Vec<Drawn> = graph.computed().filter_map(|id| drawn(graph, id)).collect();
    let mut taken: Vec<(String, usize)> = Vec::new();
    for one in drawn {
        let Some((weight, ..)) = of_adapter(&graph.get(one.a).name) else { continue };
        let weight = weight.to_owned();
        let is_free = |number: usize| !taken.contains(&(weight.clone(), number));
        let all = || gguf.adapters_of(&weight).enumerate().filter(|(number, _)| is_free(*number));
        let found =
            all().find(|(_, (adapter, pair))| is_it(graph, &one, adapter, pair)).or_else(|| all().next());
        let Some((number, _)) = found else { continue };
        for id in [one.a, one.b] {
            let kind = of_adapter(&graph.get(id).name).map_or(LORA_A, |(_, kind, _)| kind).to_owned();
            graph.tensors[id].name = in_adapter(&weight, &kind, number);
        }
        taken.push((weight, number));
    }
}

fn drawn(graph: &Graph, id: Id) -> Option<Drawn> {
    (graph.get(id).op == Op::Scale).then_some(())?;
    let product = graph.src(id, 0)?;
    let (b, inner) = (graph.src(product, 0)?, graph.src(product, 1)?);
    let a = graph.src(inner, 0)?;
    let is_matrix = |leaf: Id| graph.is_leaf(leaf) && of_adapter(&graph.get(leaf).name).is_some();
    (is_matrix(a) && is_matrix(b)).then(|| Drawn { a, b, scale: graph.get(id).params.float(0) })
}

fn is_it(graph: &Graph, drawn: &Drawn, adapter: &Adapter, pair: &Pair) -> bool {
    let is_of = |id: Id, stored: &[usize]| {
        let shape = graph.get(id).shape();
        let long =
            |shape: &[usize]| shape.iter().copied().skip_while(|extent| *extent == 1).collect::<Vec<_>>();
        long(&shape) == long(stored)
    };
    is_of(drawn.a, &pair.a.0.shape)
        && is_of(drawn.b, &pair.b.0.shape)
        && Adapter::is_scale(drawn.scale, adapter.scale(pair))
}
