//! The inside of attention: queries, keys and values from separate or fused weights, RoPE, scores.

use std::collections::BTreeMap;

use parity_dump::{Checkpoint, Kind};

use crate::graph::{Graph, Id};
use crate::known::{Found, Mapper, layers};
use crate::op::Op;
use crate::weights::{ATTN_QKV, BIAS, Name, WEIGHT};

/// Finds what [`Mapper::by_weight`] could not: nodes of attention that have no weight of their own.
pub(crate) fn find(mapper: &mut Mapper<'_>) {
    split_fused(mapper);
    ropes(mapper);
    without_bias(mapper);
    matrices(mapper);
    other_matrices(mapper);
    heads(mapper);
}

/// A product with `attn_qkv.weight` and the sum with its bias.
struct Fused {
    layer: u32,
    product: Id,
    sum: Option<Id>,
}

/// Byte offset of a view in the memory that it lies in.
fn offset_of(graph: &Graph, id: Id) -> usize {
    graph.get(id).view.map_or(0, |view| view.offset)
}

/// Queries, keys and values that are windows into one product: which is which is said by their order.
fn split_fused(mapper: &mut Mapper<'_>) {
    let graph = mapper.graph;
    let mut fused: Vec<Fused> = Vec::new();
    for id in graph.computed() {
        let mut names = [1, 0].into_iter().filter_map(|index| mapper.weight(id, index)).map(Name::of);
        let Some(Name { layer: Some(layer), part, kind }) = names.find(|name| name.layer.is_some()) else {
            continue;
        };
        match (&graph.get(id).op, part, kind) {
            (Op::MulMat, ATTN_QKV, WEIGHT) => fused.push(Fused { layer, product: id, sum: None }),
            (Op::Add, ATTN_QKV, BIAS) => {
                if let Some(known) = fused.iter_mut().find(|known| known.layer == layer) {
                    known.sum = Some(id);
                }
            }
            _ => {}
        }
    }
    for Fused { layer, product, sum } in fused {
        let whole = sum.unwrap_or(product);
        // One window of each offset: later views of views repeat them.
        let mut windows: Vec<(usize, Id)> = Vec::new();
        for id in 0..graph.nodes {
            let offset = offset_of(graph, id);
            let is_window = graph.get(id).op == Op::View && graph.storage(id) == whole;
            if is_window && windows.iter().all(|&(known, _)| known != offset) {
                windows.push((offset, id));
            }
        }
        windows.sort_unstable();
        let [q, k, v] = windows[..] else { continue };
        for ((_, window), (proj, biased)) in [q, k, v].into_iter().zip([
            (Kind::QProj, Kind::Q),
            (Kind::KProj, Kind::K),
            (Kind::VProj, Kind::V),
        ]) {
            let place = |within| Found { tensor: window, within, heads: None };
            mapper.known.found.insert(Checkpoint::layer(proj, layer), place(Some(product)));
            mapper.known.found.insert(Checkpoint::layer(biased, layer), place(None));
        }
    }
}

/// RoPE nodes by what they turn.
fn ropes(mapper: &mut Mapper<'_>) {
    let graph = mapper.graph;
    for id in graph.computed() {
        if graph.get(id).op != Op::Rope {
            continue;
        }
        let Some(src) = graph.src(id, 0) else { continue };
        let (origin, offset) = (graph.origin(src), window_offset(mapper, src));
        let turned = mapper.known.each().find_map(|(checkpoint, found)| {
            let kind = match checkpoint.kind() {
                Kind::Q | Kind::QProj | Kind::QNorm => Kind::QRope,
                Kind::K | Kind::KProj | Kind::KNorm => Kind::KRope,
                _ => return None,
            };
            let same = graph.storage(found.tensor) == origin && offset_of(graph, found.tensor) == offset;
            same.then(|| checkpoint.sibling(kind))
        });
        if let Some(checkpoint) = turned {
            mapper.note(checkpoint, id);
        }
    }
}

/// Byte offset at which a chain of views and copies enters the node that it starts from.
fn window_offset(mapper: &Mapper<'_>, mut id: Id) -> usize {
    let graph = mapper.graph;
    let origin = graph.origin(id);
    let mut offset = 0;
    while id != origin {
        // Offsets of nested views add up in ggml itself; a copy starts again at nothing.
        if graph.storage(id) == origin {
            return offset_of(graph, id);
        }
        offset = 0;
        match graph.src(id, 0) {
            Some(src) => id = src,
            None => break,
        }
    }
    offset
}

/// A model without biases has queries equal to their products.
fn without_bias(mapper: &mut Mapper<'_>) {
    for (proj, biased) in [(Kind::QProj, Kind::Q), (Kind::KProj, Kind::K), (Kind::VProj, Kind::V)] {
        let products: Vec<(u32, Id)> = mapper.layers_with(proj).collect();
        for (layer, product) in products {
            mapper.note(Checkpoint::layer(biased, layer), product);
        }
    }
}

/// Layers by the node that attention reads their queries from.
fn query_layers(mapper: &Mapper<'_>) -> BTreeMap<Id, u32> {
    let kinds = [Kind::Q, Kind::QNorm, Kind::QRope];
    kinds
        .into_iter()
        .flat_map(|kind| mapper.layers_with(kind))
        .map(|(layer, tensor)| (mapper.graph.storage(tensor), layer))
        .collect()
}

/// Scores and probabilities, or the one node that computes both and the context.
fn matrices(mapper: &mut Mapper<'_>) {
    let graph = mapper.graph;
    let queries = query_layers(mapper);
    let mut scored: BTreeMap<Id, u32> = BTreeMap::new();
    let origin = |id: Id, index: usize| graph.src(id, index).map(|src| graph.origin(src));
    for id in graph.computed() {
        match graph.get(id).op {
            Op::MulMat if mapper.weight(id, 0).is_none() => {
                let Some(&layer) = origin(id, 1).and_then(|query| queries.get(&query)) else { continue };
                mapper.note(Checkpoint::layer(Kind::AttnScores, layer), id);
                scored.insert(id, layer);
                cache(mapper, id, 0);
            }
            Op::SoftMax => {
                let Some(&layer) = origin(id, 0).and_then(|scores| scored.get(&scores)) else { continue };
                mapper.note(Checkpoint::layer(Kind::AttnProbs, layer), id);
                mapper.known.mask = graph.src(id, 1).map(|mask| graph.storage(mask));
            }
            Op::FlashAttn if origin(id, 0).is_some_and(|query| queries.contains_key(&query)) => {
                mapper.known.flash = true;
                cache(mapper, id, 1);
                cache(mapper, id, 2);
            }
            _ => {}
        }
    }
}

/// Attention whose queries have no id of their own: a softmax of products of two things that were computed.
fn other_matrices(mapper: &mut Mapper<'_>) {
    let graph = mapper.graph;
    let mut of_layer: Option<Vec<Option<u32>>> = None;
    for id in graph.computed().filter(|&id| graph.get(id).op == Op::SoftMax) {
        let mut scores = graph.src(id, 0);
        let pointwise = |op: &Op| matches!(op, Op::Scale | Op::Tanh | Op::Add | Op::Clamp);
        while let Some(src) = scores.filter(|&src| pointwise(&graph.get(graph.origin(src)).op)) {
            scores = graph.src(graph.origin(src), 0);
        }
        let Some(scores) = scores.map(|src| graph.origin(src)) else { continue };
        let known = mapper.known.found.values().any(|found| found.tensor == id || found.tensor == scores);
        if graph.get(scores).op != Op::MulMat || mapper.weight(scores, 0).is_some() || known {
            continue;
        }
        let Some(layer) = of_layer.get_or_insert_with(|| layers(graph))[id] else { continue };
        if mapper.tensor_of(Kind::AttnProbs, layer).is_none() {
            mapper.note(Checkpoint::layer(Kind::AttnScores, layer), scores);
            mapper.note(Checkpoint::layer(Kind::AttnProbs, layer), id);
            mapper.known.mask = mapper.known.mask.or(graph.src(id, 1).map(|mask| graph.storage(mask)));
            cache(mapper, scores, 0);
        }
    }
}

/// Notes the type in which source `index` of an attention node, keys or values, is read.
fn cache(mapper: &mut Mapper<'_>, id: Id, index: usize) {
    if let Some(src) = mapper.graph.src(id, index) {
        mapper.known.cache_types.insert(mapper.graph.get(src).dtype.clone());
    }
}

/// How rows are split into heads: RoPE nodes know, the others follow.
fn heads(mapper: &mut Mapper<'_>) {
    let graph = mapper.graph;
    let split = |mapper: &Mapper<'_>, kind: Kind, layer: u32| {
        let tensor = mapper.tensor_of(kind, layer)?;
        let [width, heads, ..] = graph.get(tensor).ne;
        Some((heads, width))
    };
    let layers: Vec<u32> = mapper.layers_with(Kind::Q).map(|(layer, _)| layer).collect();
    let embed = mapper.known.found.get(&Checkpoint::global(Kind::Embed));
    let rows = embed.map(|found| graph.get(found.tensor).ne[1]);
    for layer in layers {
        let query = split(mapper, Kind::QRope, layer);
        let key = split(mapper, Kind::KRope, layer);
        for (kind, of) in [
            (Kind::Q, query),
            (Kind::QNorm, query),
            (Kind::QRope, query),
            (Kind::K, key),
            (Kind::KNorm, key),
            (Kind::KRope, key),
        ] {
            if let Some(found) = mapper.known.found.get_mut(&Checkpoint::layer(kind, layer)) {
                found.heads = of;
            }
        }
        // Values have as many heads as keys, perhaps of another width.
        let value = Checkpoint::layer(Kind::V, layer);
        if let (Some((heads, _)), Some(found)) = (key, mapper.known.found.get_mut(&value)) {
            let ne = graph.get(found.tensor).ne;
            let elements: usize = ne.iter().product();
            let width = match rows {
                Some(rows) if rows > 0 && elements.is_multiple_of(rows) => elements / rows,
                _ if ne[2] > 1 && ne[1] == heads => ne[0] * ne[1],
                _ => ne[0],
            };
            found.heads = (heads > 0 && width % heads == 0).then(|| (heads, width / heads));
        }
    }
}
