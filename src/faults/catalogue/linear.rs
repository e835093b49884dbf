//! Mistakes in matrix products and biases.

use super::{Argument, Fault, Home, PLAIN, Site, diagnose, input, integer, named, output, weight_name, when};
use crate::checkpoint::{Checkpoint, Kind};
use crate::model::edit::{Change, Reading};
use crate::model::graph::{Node, Op, WeightRef};
use crate::numerics::Storage;
use parity_graph::weights;

const PRODUCTS: Home = Home::First(&[Kind::QProj]);

fn weight(node: &mut Node) -> Option<&mut WeightRef> {
    match &mut node.op {
        Op::Linear { weight, .. } => Some(weight),
        Op::Bias { bias, .. } => bias.as_mut(),
        _ => None,
    }
}

/// The bias that belongs to a product, where the model has one.
fn bias_of(site: &Site<'_>, node: &Node) -> Option<String> {
    when(matches!(node.checkpoint.kind(), Kind::QProj | Kind::KProj | Kind::VProj))?;
    let name = weight_name(node).strip_suffix(".weight")?.to_owned() + ".bias";
    site.shape(&name).map(|_| name)
}

/// The tensor of the same role in another layer.
pub fn in_layer(name: &str, layer: i64) -> Option<String> {
    let (own, role) = weights::layer_weight(name)?;
    (i64::from(own) != layer).then(|| weights::in_layer(layer, role))
}

/// Tensors of the same layer (or of the model's ends) that have a node's weight's shape and another role.
pub fn same_shape(site: &Site<'_>, node: &Node) -> Vec<String> {
    let own = weight_name(node);
    let Some(shape) = site.shape(own) else { return vec![] };
    let prefix = node.checkpoint.layer_index().map_or(String::new(), |layer| weights::in_layer(layer, ""));
    let tensors = site.model.gguf.tensors();
    let outside = |name: &str| prefix.is_empty() && name.starts_with(weights::LAYER_PREFIX);
    tensors
        .filter(|info| info.name != own && info.shape == shape && info.dtype.is_decodable())
        .filter(|info| info.name.starts_with(&prefix) && !outside(&info.name))
        .map(|info| info.name.clone())
        .collect()
}

/// What the norm before a product reads.
fn before_norm(site: &Site<'_>, node: &Node) -> Option<Checkpoint> {
    when(matches!(node.op, Op::Linear { .. }))?;
    let norm = site.model.graph.node(*node.inputs.first()?)?;
    when(matches!(norm.op, Op::Norm(_)))?;
    norm.inputs.first().copied()
}

/// Weight and input rounded to a narrow type before they are multiplied.
fn rounded(node: &mut Node, storage: Storage) -> Option<()> {
    when(matches!(node.op, Op::Linear { .. }))?;
    input(node, 0, Change::Round(storage))
}

/// Faults of all products, and of `q`, `k`, `v` where the model has biases.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "linear.no_bias",
        summary: "the bias is not added",
        place: "Q, K, V of Qwen2 loaded by the code of Llama, which has no biases",
        fix: "add blk.N.attn_{q,k,v}.bias to the outputs of the matmuls before RoPE",
        home: Home::All(&[Kind::Q, Kind::K, Kind::V]),
        change: |_, node, _| match &mut node.op {
            Op::Bias { bias, times } if bias.is_some() => {
                *times = 0;
                Some(())
            }
            _ => None,
        },
        sentence: |_, node, _| format!("the bias {} is not added", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "linear.bias_twice",
        summary: "the bias is added twice",
        place: "a fused matmul that adds the bias, followed by code that adds it again",
        fix: "add the bias once",
        home: Home::All(&[Kind::Q, Kind::K, Kind::V]),
        change: |_, node, _| match &mut node.op {
            Op::Bias { bias, times } if bias.is_some() => {
                *times = 2;
                Some(())
            }
            _ => None,
        },
        sentence: |_, node, _| format!("the bias {} is added twice", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "linear.bias_included",
        summary: "the output of the matmul already contains the bias",
        place: "a fused matmul that adds the bias, or a dump that takes the value after the bias",
        fix: "record the output of the matmul before the bias, or add the bias in one place only",
        home: PRODUCTS,
        change: |site, node, _| {
            let vector = WeightRef::new(bias_of(site, node)?);
            output(node, Change::AddVector { vector, times: 1.0 })
        },
        sentence: |site, node, _| {
            format!("the difference equals {}", bias_of(site, node).unwrap_or_default())
        },
        ..PLAIN
    },
    Fault {
        name: "linear.transposed",
        summary: "the weight (O, I) is read as (I, O)",
        place: "row-major weights given to a column-major GEMM (cuBLAS) with the wrong op or leading dimension",
        fix: "out = x·Wᵀ with W (O, I) row-major: in cuBLAS op(A) = T with lda = I",
        home: PRODUCTS,
        change: |_, node, _| match &mut node.op {
            Op::Linear { weight, .. } => {
                weight.reading = Reading::Transposed;
                Some(())
            }
            _ => None,
        },
        sentence: |_, node, _| format!("{} is read transposed: (I, O) for (O, I)", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "linear.wrong_layer",
        summary: "the weight of another layer is used",
        place: "a loop over layers that is off by one, or names matched by prefix (blk.1 and blk.10)",
        fix: "take the tensor of the node's own layer",
        parameter: integer("layer"),
        home: PRODUCTS,
        change: |site, node, argument| {
            let layer = argument.integer()?;
            let weight = weight(node)?;
            let other = in_layer(&weight.name, layer)?;
            when(site.shape(&other)? == site.shape(&weight.name)?)?;
            weight.name = other;
            Some(())
        },
        default: |site, node| {
            let layer = node.checkpoint.layer_index()?;
            when(site.layers() > 1)?;
            Some(Argument::Number(f64::from(layer.checked_sub(1).unwrap_or(1))))
        },
        guess: Some(diagnose::layers),
        sentence: |_, node, argument| {
            let other = argument.integer().and_then(|layer| in_layer(weight_name(node), layer));
            format!("{} is used in place of {}", other.unwrap_or_default(), weight_name(node))
        },
        ..PLAIN
    },
    Fault {
        name: "linear.wrong_weight",
        summary: "a weight of another role is used",
        place: "tensors of one shape that change places: k and v, gate and up, q and output",
        fix: "check the table of tensor names, and the order in which a fused QKV or gate/up tensor is split",
        parameter: named("tensor"),
        home: Home::First(&[Kind::KProj, Kind::FfnGate]),
        change: |site, node, argument| {
            let Argument::Tensor(other) = argument else { return None };
            let weight = weight(node)?;
            when(*other != weight.name && site.shape(other)? == site.shape(&weight.name)?)?;
            weight.name.clone_from(other);
            Some(())
        },
        default: |site, node| {
            let pairs = [
                (weights::ATTN_K, weights::ATTN_V),
                (weights::ATTN_Q, weights::ATTN_OUTPUT),
                (weights::FFN_GATE, weights::FFN_UP),
            ];
            let own = weight_name(node);
            let others = same_shape(site, node);
            let twin = pairs.iter().flat_map(|&(a, b)| [(a, b), (b, a)]).find_map(|(a, b)| {
                let twin = own.replace(&format!(".{a}."), &format!(".{b}."));
                others.contains(&twin).then_some(twin)
            });
            twin.or_else(|| others.first().cloned()).map(Argument::Tensor)
        },
        guess: Some(diagnose::weights),
        sentence: |_, node, argument| format!("{argument} is used in place of {}", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "linear.truncated_k",
        summary: "the sum stops before the last input columns",
        place: "a kernel whose inner loop handles whole tiles only and drops the tail",
        fix: "handle the columns after the last whole tile",
        parameter: integer("columns"),
        home: Home::First(&[Kind::FfnOut]),
        change: |site, node, argument| {
            let Op::Linear { weight, columns } = &mut node.op else { return None };
            let all = *site.shape(&weight.name)?.last()?;
            let kept = usize::try_from(argument.integer()?).ok().filter(|kept| *kept < all)?;
            *columns = Some(kept);
            Some(())
        },
        default: |site, node| {
            when(matches!(node.op, Op::Linear { .. }))?;
            let all = *site.shape(weight_name(node))?.last()?;
            Some(Argument::Number((all - (all / 8).clamp(1, 32)) as f64))
        },
        guess: Some(diagnose::truncation),
        sentence: |site, node, argument| {
            let all = site.shape(weight_name(node)).and_then(|shape| shape.last().copied()).unwrap_or(0);
            format!("only the first {argument} of {all} input columns are summed")
        },
        ..PLAIN
    },
    Fault {
        name: "linear.no_norm",
        summary: "the matmul reads the row before its norm",
        place: "the norm computed into a buffer that the matmul does not read",
        fix: "feed the normalised row to the matmul",
        home: Home::First(&[Kind::QProj, Kind::FfnGate]),
        change: |site, node, _| {
            when(node.checkpoint.kind() != Kind::Logits)?;
            node.inputs[0] = before_norm(site, node)?;
            Some(())
        },
        sentence: |site, node, _| {
            let source = before_norm(site, node).map_or(String::new(), |source| source.to_string());
            let own = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!("the matmul reads {source} in place of {own}")
        },
        ..PLAIN
    },
    Fault {
        name: "linear.qk_permuted",
        summary: "the rows of every head are in the other order: pairs for halves, or halves for pairs",
        place: "Q and K of Llama files, which convert_hf_to_gguf.py permutes for llama.cpp's RoPE",
        fix: "permute Q and K exactly when the rotation pairs neighbours, and undo it when loading a GGUF \
              file into code that pairs halves",
        parameter: integer("direction"),
        home: Home::All(&[Kind::QProj, Kind::KProj]),
        change: |site, node, argument| {
            when(matches!(node.checkpoint.kind(), Kind::QProj | Kind::KProj))?;
            let Op::Linear { weight, .. } = &mut node.op else { return None };
            let width = site.model.config.dims.head_width;
            when(width % 2 == 0 && width > 2)?;
            let pairs_for_halves = argument.integer()? > 0;
            weight.reading = Reading::HeadRows { width, pairs_for_halves };
            Some(())
        },
        default: |_, _| Some(Argument::Number(1.0)),
        guess: Some(diagnose::directions),
        sentence: |_, node, argument| {
            let (read, stored) =
                if argument.integer() == Some(1) { ("halves", "pairs") } else { ("pairs", "halves") };
            format!("the rows of every head of {} are read as {read} of {stored}", weight_name(node))
        },
        ..PLAIN
    },
    Fault {
        name: "linear.f16_input",
        summary: "the input of the matmul is rounded to f16, which the producer does not declare",
        place: "a GEMM in f16 (cuBLAS HGEMM, tensor cores) where f32 is believed",
        fix: "declare f16 matmuls in the dump's numerics, or multiply in f32",
        home: PRODUCTS,
        change: |_, node, _| rounded(node, Storage::F16),
        sentence: |_, node, _| {
            let own = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!("{own} is rounded to f16 before the matmul, which the numerics do not declare")
        },
        ..PLAIN
    },
    Fault {
        name: "linear.bf16_input",
        summary: "the input of the matmul is rounded to bf16, which the producer does not declare",
        place: "a GEMM in bf16 (autocast, tensor cores) where f32 is believed",
        fix: "declare bf16 matmuls in the dump's numerics, or multiply in f32",
        home: PRODUCTS,
        change: |_, node, _| rounded(node, Storage::Bf16),
        sentence: |_, node, _| {
            let own = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!("{own} is rounded to bf16 before the matmul, which the numerics do not declare")
        },
        ..PLAIN
    },
];
