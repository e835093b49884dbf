//! Matrix products with weights, and their biases.

use super::site::{edit, made, weights_of_other_layers};
use super::{Argument, Entry, Evidence, Made, PLAIN, Site, plain, when};
use crate::graph::Id;
use crate::op::Op;
use crate::params::Params;
use crate::rewrite::{Change, Edit, Narrow};
use crate::weights::{
    ATTN_K, ATTN_OUTPUT, ATTN_Q, ATTN_V, FFN_GATE, FFN_UP, LAYER_PREFIX, Name, OUTPUT, TOKEN_EMBD, in_layer,
};

const PRODUCT: &[Op] = &[Op::MulMat];
const PRODUCTS: &[Op] = &[Op::MulMat, Op::MulMatId];
const BIASES: &[Op] = &[Op::Add, Op::AddId];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "linear.no_bias",
        BIASES,
        [
            "the bias is not added",
            "Q, K, V of Qwen2 loaded by the code of Llama, which has no biases",
            "add blk.N.attn_{q,k,v}.bias to the outputs of the matmuls before RoPE",
        ],
        |site, _| {
            let (slot, bias) = bias(site)?;
            let text = format!("the bias {} is not added", site.name_of(bias));
            made(Change::Bypass { slot: 1 - slot.min(1) }, text)
        },
    ),
    plain(
        "linear.bias_twice",
        BIASES,
        [
            "the bias is added twice",
            "a fused matmul that adds the bias, followed by code that adds it again",
            "add the bias once",
        ],
        |site, _| {
            let (slot, bias) = bias(site)?;
            made(edit(slot, Edit::Multiply(2.0)), format!("the bias {} is added twice", site.name_of(bias)))
        },
    ),
    plain(
        "linear.bias_included",
        PRODUCT,
        [
            "the output of the matmul already contains the bias",
            "a fused matmul that adds the bias, or a dump that takes the value after the bias",
            "record the output of the matmul before the bias, or add the bias in one place only",
        ],
        |site, _| {
            site.weight()?;
            let sum = site.readers().find(|reader| bias(*reader).is_some_and(|(slot, _)| slot == 1))?;
            let (_, bias) = bias(sum)?;
            let (params, ne) = (Params::default(), site.tensor().ne);
            let change = Change::After { op: Op::Add, params, ne, srcs: vec![Some(bias)] };
            made(change, format!("the difference equals {}", site.name_of(bias)))
        },
    ),
    plain(
        "linear.no_scale",
        &[Op::Mul],
        [
            "a multiplication by a weight that is no norm's is left out",
            "a scale tensor of the file that nothing reads",
            "multiply by the tensor that the report names",
        ],
        |site, _| {
            let (slot, weight) = site.weight()?;
            when(!site.graph.get(weight).name.contains("norm"))?;
            made(Change::Bypass { slot: 1 - slot.min(1) }, format!("{} is left out", site.name_of(weight)))
        },
    ),
    plain(
        "linear.transposed",
        PRODUCT,
        [
            "the weight (O, I) is read as (I, O)",
            "row-major weights given to a column-major GEMM (cuBLAS) with the wrong op or leading dimension",
            "out = x·Wᵀ with W (O, I) row-major: in cuBLAS op(A) = T with lda = I",
        ],
        |site, _| {
            let (slot, weight) = direct(site)?;
            let text = format!("{} is read transposed: (I, O) for (O, I)", site.name_of(weight));
            made(edit(slot, Edit::Transposed), text)
        },
    ),
    Entry {
        name: "linear.wrong_layer",
        summary: "the weight of another layer is used",
        place: "a loop over layers that is off by one, or names matched by prefix (blk.1 and blk.10)",
        fix: "take the tensor of the node's own layer",
        parameter: Some("layer"),
        ops: &[Op::MulMat, Op::MulMatId, Op::Add, Op::AddId],
        values: |site| other_layers(site, of_product_or_bias(site)),
        make: |site, argument| of_layer(site, of_product_or_bias(site)?, argument),
        ..PLAIN
    },
    Entry {
        name: "linear.wrong_weight",
        summary: "a weight of another role is used",
        place: "tensors of one shape that change places: k and v, gate and up, q and output",
        fix: "check the table of tensor names, and the order in which a fused QKV or gate/up tensor is split",
        parameter: Some("tensor"),
        ops: &[Op::MulMat, Op::MulMatId, Op::Add, Op::AddId],
        values: twins,
        make: |site, argument| of_tensor(site, of_product_or_bias(site)?, argument),
        ..PLAIN
    },
    Entry {
        name: "linear.truncated_k",
        summary: "the sum stops before the last input columns",
        place: "a kernel whose inner loop handles whole tiles only and drops the tail",
        fix: "handle the columns after the last whole tile",
        parameter: Some("columns"),
        ops: PRODUCT,
        values: |site| {
            let all = site.src(1).map_or(0, |x| x.ne[0]);
            Argument::numbers([(all - (all / 8).clamp(1, 32).min(all)) as f64])
        },
        make: |site, argument| {
            direct(site)?;
            let all = site.src(1)?.ne[0];
            let kept = usize::try_from(argument.integer()?).ok().filter(|kept| *kept > 0 && *kept < all)?;
            let text = format!("only the first {kept} of {all} input columns are summed");
            made(without(all, kept..all), text)
        },
        guess: Some(truncation),
        ..PLAIN
    },
    plain(
        "linear.no_norm",
        PRODUCT,
        [
            "the matmul reads the row before its norm",
            "the norm computed into a buffer that the matmul does not read",
            "feed the normalised row to the matmul",
        ],
        |site, _| {
            when(!site.is_product_with(&[OUTPUT, TOKEN_EMBD]))?;
            let (own, before) = before_norm(site)?;
            let text = format!("the matmul reads {} in place of {}", site.name_of(before), site.name_of(own));
            made(Change::Source { slot: 1, with: Some(before) }, text)
        },
    ),
    Entry {
        name: "linear.qk_permuted",
        summary: "the rows of every head are in the other order: pairs for halves, or halves for pairs",
        place: "Q and K of Llama files, which convert_hf_to_gguf.py permutes for llama.cpp's RoPE",
        fix: "permute Q and K exactly when the rotation pairs neighbours, and undo it when loading a GGUF file into \
              code that pairs halves",
        parameter: Some("direction"),
        ops: PRODUCT,
        values: |_| Argument::numbers([1.0, -1.0]),
        make: qk_permuted,
        ..PLAIN
    },
    Entry {
        name: "linear.merged_order",
        summary: "the parts of a merged matmul stand in another order",
        place: "a fused QKV, gate/up or input projection whose weights were put together in another order",
        fix: "put the parts together in the order in which the graph takes them apart",
        parameter: Some("order"),
        ops: PRODUCT,
        values: |site| {
            let all = [&[1, 0][..], &[0, 2, 1], &[1, 0, 2], &[2, 1, 0], &[1, 2, 0], &[2, 0, 1]];
            let parts = windows(site).len();
            let fit = all.into_iter().filter(|order| order.len() == parts);
            fit.map(|order| Argument::Order(order.to_vec())).collect()
        },
        make: merged,
        ..PLAIN
    },
    Entry {
        rounds: true,
        silent: Some("where the weight is F16: llama.cpp's CPU kernels round so too"),
        ..plain(
            "linear.f16_input",
            PRODUCTS,
            [
                "the input of the matmul is rounded to f16, which the producer does not declare",
                "a GEMM in f16 (cuBLAS HGEMM, tensor cores) where f32 is believed",
                "declare f16 matmuls in the dump's numerics, or multiply in f32",
            ],
            |site, _| rounded(site, Narrow::F16, "f16"),
        )
    },
    Entry {
        rounds: true,
        ..plain(
            "linear.bf16_input",
            PRODUCTS,
            [
                "the input of the matmul is rounded to bf16, which the producer does not declare",
                "a GEMM in bf16 (autocast, tensor cores) where f32 is believed",
                "declare bf16 matmuls in the dump's numerics, or multiply in f32",
            ],
            |site, _| rounded(site, Narrow::Bf16, "bf16"),
        )
    },
];

/// A bias that is added.
pub(super) fn bias(site: Site<'_>) -> Option<(usize, Id)> {
    when(matches!(site.op(), Op::Add | Op::AddId))?;
    site.weight().filter(|(_, weight)| site.graph.get(*weight).name.contains("bias"))
}

/// The weight of a product, read without a view.
pub(super) fn direct(site: Site<'_>) -> Option<(usize, Id)> {
    site.weight().filter(|(slot, weight)| *slot == 0 && site.graph.src(site.id, 0) == Some(*weight))
}

fn of_product_or_bias(site: Site<'_>) -> Option<(usize, Id)> {
    match site.op() {
        Op::MulMat | Op::MulMatId => site.weight(),
        _ => bias(site),
    }
}

/// All other layers that have such a weight, the one before the node's own first.
pub(super) fn other_layers(site: Site<'_>, weight: Option<(usize, Id)>) -> Vec<Argument> {
    let own = weight.and_then(|(_, id)| Name::of(&site.graph.get(id).name).layer).unwrap_or(0);
    let all = weight.into_iter().flat_map(|(_, id)| weights_of_other_layers(site.graph, id));
    let mut layers: Vec<u32> = all.map(|(layer, _)| layer).collect();
    layers.sort_by_key(|layer| (layer + 1 != own, *layer));
    Argument::numbers(layers.into_iter().map(f64::from))
}

/// The weight of another layer.
pub(super) fn of_layer(site: Site<'_>, weight: (usize, Id), argument: &Argument) -> Made {
    let wanted = u32::try_from(argument.integer()?).ok()?;
    let (_, other) = weights_of_other_layers(site.graph, weight.1).find(|(layer, _)| *layer == wanted)?;
    replaced(site, weight, other)
}

/// Another weight by its name.
pub(super) fn of_tensor(site: Site<'_>, weight: (usize, Id), argument: &Argument) -> Made {
    let other = site.called(argument.text()?).filter(|&other| site.graph.is_leaf(other))?;
    when(other != weight.1 && site.graph.get(other).ne == site.graph.get(weight.1).ne)?;
    replaced(site, weight, other)
}

fn replaced(site: Site<'_>, (slot, weight): (usize, Id), other: Id) -> Made {
    // A weight that is seen through a view would need the view of the other one.
    when(site.graph.src(site.id, slot) == Some(weight))?;
    let text = format!("{} is used in place of {}", site.name_of(other), site.name_of(weight));
    made(Change::Source { slot, with: Some(other) }, text)
}

/// Tensors of the same layer, or of the model's ends, that have the shape of a weight, and another role.
pub(super) fn same_shape<'s>(
    site: Site<'s>,
    weight: Option<(usize, Id)>,
    part: &'static str,
) -> impl Iterator<Item = Argument> + 's {
    let own = weight.map(|(_, id)| site.graph.get(id));
    let prefix = own.and_then(|own| Name::of(&own.name).layer).map_or(String::new(), |l| in_layer(l, ""));
    let leaves = (site.graph.nodes..site.graph.tensors.len()).map(|id| site.graph.get(id));
    let fits = move |name: &str| {
        let outside = prefix.is_empty() && name.starts_with(LAYER_PREFIX);
        name.contains('.') && name.starts_with(&prefix) && !outside && name.contains(part)
    };
    let same = leaves.filter(move |leaf| own.is_some_and(|own| own.ne == leaf.ne && own.name != leaf.name));
    same.filter(move |leaf| fits(&leaf.name)).map(|leaf| Argument::name(&leaf.name))
}

/// Weights of the same shape, the one first that is most likely taken for a node's own.
fn twins(site: Site<'_>) -> Vec<Argument> {
    let Some((_, weight)) = of_product_or_bias(site) else { return Vec::new() };
    let own = &site.graph.get(weight).name;
    let all: Vec<Argument> = same_shape(site, Some((0, weight)), "").collect();
    let pairs = [(ATTN_K, ATTN_V), (ATTN_Q, ATTN_OUTPUT), (FFN_GATE, FFN_UP)];
    let both = pairs.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
    let twin = both.map(|(a, b)| Argument::Name(own.replace(&format!(".{a}."), &format!(".{b}."))));
    let twin = twin.into_iter().find(|twin| all.contains(twin));
    twin.into_iter().chain(all.iter().cloned()).collect()
}

/// Input columns that are not summed.
pub(super) fn without(row: usize, columns: std::ops::Range<usize>) -> Change {
    edit(1, Edit::SetColumns { row, columns, to: 0.0 })
}

/// Where the sum over the input columns meets what was recorded.
fn truncation(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some(all) = site.src(1).map(|x| x.ne[0]).filter(|_| direct(site).is_some()) else { return vec![] };
    let distance = |kept: usize| evidence.distance(&without(all, kept..all));
    // Coarse first: the distance falls on both sides towards the place.
    let (mut low, mut high) = (1, all.saturating_sub(1));
    while high > low + TRIED {
        let step = (high - low) / TRIED;
        let tried = (0..=TRIED).map(|i| low + i * step).map(|kept| (distance(kept), kept));
        let Some((_, best)) = tried.min_by(|a, b| a.0.total_cmp(&b.0)) else { return vec![] };
        (low, high) = (best.saturating_sub(step).max(1), (best + step).min(all - 1));
    }
    let best = (low..=high).map(|kept| (distance(kept), kept)).min_by(|a, b| a.0.total_cmp(&b.0));
    Argument::numbers(best.map(|(_, kept)| kept as f64))
}

/// Places that are tried at once.
const TRIED: usize = 16;

/// The normalised row that a node reads, and the row before the norm.
pub(super) fn before_norm(site: Site<'_>) -> Option<(Id, Id)> {
    direct(site)?;
    let own = site.origin(1)?;
    let is_norm = |id: Id| matches!(site.graph.get(id).op, Op::RmsNorm | Op::Norm);
    let mut norm = Some(own).filter(|&id| !site.graph.is_leaf(id))?;
    // Weight and bias come behind it.
    while matches!(site.graph.get(norm).op, Op::Mul | Op::Add) && site.other(norm).weight().is_some() {
        norm = site.other(norm).origin(0)?;
    }
    let before = site.graph.src(norm, 0).filter(|_| is_norm(norm))?;
    (site.graph.get(before).ne == site.src(1)?.ne).then_some((own, before))
}

fn qk_permuted(site: Site<'_>, argument: &Argument) -> Made {
    when(site.is_product_with(&[ATTN_Q, ATTN_K]))?;
    let (_, weight) = direct(site)?;
    // Biases and norms may come between.
    let mut behind = vec![site];
    let width = loop {
        let next = behind.pop()?;
        if *next.op() == Op::Rope {
            break next.tensor().ne[0];
        }
        when(behind.len() < 8)?;
        behind.extend(next.readers().take(2));
    };
    when(width % 2 == 0 && width > 2)?;
    let pairs_for_halves = argument.integer()? > 0;
    let (half, head) = (width / 2, |c: usize| c / width * width);
    let from = |c: usize| match pairs_for_halves {
        true => head(c) + c % half * 2 + c % width / half,
        false => head(c) + c % 2 * half + c % width / 2,
    };
    let order = (0..site.tensor().ne[0]).map(|c| from(c) as u32).collect();
    let (read, stored) = if pairs_for_halves { ("halves", "pairs") } else { ("pairs", "halves") };
    let text = format!("the rows of every head of {} are read as {read} of {stored}", site.name_of(weight));
    made(Change::ResultEdit(Edit::Columns(order)), text)
}

/// The windows of different columns that a merged product is taken apart by: offsets in columns.
fn windows(site: Site<'_>) -> Vec<usize> {
    let (graph, width) = (site.graph, site.tensor().ne[0]);
    let Some((_, weight)) = direct(site) else { return Vec::new() };
    let merged = ["qkv", "gate_up", "ssm_in", "kv_b"];
    if !merged.iter().any(|part| graph.get(weight).name.contains(part)) {
        return Vec::new();
    }
    let views = (0..graph.nodes).filter(|&id| graph.get(id).op == Op::View && graph.storage(id) == site.id);
    let offset = |id: Id| graph.get(id).view.map_or(0, |view| view.offset) / 4 % width.max(1);
    let mut offsets: Vec<usize> = views.map(offset).collect();
    offsets.sort_unstable();
    offsets.dedup();
    if offsets.first() == Some(&0) { offsets } else { Vec::new() }
}

fn merged(site: Site<'_>, argument: &Argument) -> Made {
    let Argument::Order(order) = argument else { return None };
    let starts = windows(site);
    let mut sorted = order.clone();
    sorted.sort_unstable();
    when(starts.len() > 1 && sorted.iter().map(|i| *i as usize).eq(0..starts.len()))?;
    let width = site.tensor().ne[0];
    let part = |i: usize| starts[i]..starts.get(i + 1).copied().unwrap_or(width);
    let columns: Vec<u32> = order.iter().flat_map(|i| part(*i as usize)).map(|c| c as u32).collect();
    let (_, weight) = direct(site)?;
    let text =
        format!("the parts of {} stand in the order {}", site.name_of(weight), super::spell_order(order));
    made(Change::ResultEdit(Edit::Columns(columns)), text)
}

fn rounded(site: Site<'_>, narrow: Narrow, name: &str) -> Made {
    direct(site)?;
    let text = format!(
        "{} is rounded to {name} before the matmul, which the numerics do not declare",
        site.name_of(site.origin(1)?)
    );
    made(edit(1, Edit::Round(narrow)), text)
}
