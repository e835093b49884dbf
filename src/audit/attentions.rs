//! How engines that bring no graph compute attention, which nobody sees where keys, values or attention were not recorded.

use parity_graph::Op;

use super::Steps;
use super::node::{self, Hypothesis};
use super::operands::{operands, products};
use crate::arithmetic::{
    Arithmetic, Flash, Fresh, Narrow, OfAttention, Operands, Scale, Scaled, Softmax, Weights, cache_blocks,
};
use crate::checkpoint::Kind;
use crate::numerics::{Numerics, Products, Storage};
use crate::ops::Args;
use crate::ops::source::Data;

/// f32 but for keys and values, which lie in a cache of this type.
pub fn cached(cache: Storage) -> Arithmetic {
    Arithmetic { cache, ..Arithmetic::EXACT }
}

/// What keys and values in a cache of this type are called.
pub fn name_of_cache(cache: Storage) -> &'static str {
    match cache {
        Storage::F32 => "keys and values in f32",
        Storage::F16 => "keys and values in f16",
        Storage::Bf16 => "keys and values in bf16",
    }
}

/// The types that an engine's keys and values may be cached in, the likeliest first: what it declares, and the other of
/// those that engines have for values of f32. Of one that declares nothing all are likely.
pub fn caches(steps: &dyn Steps) -> Vec<Storage> {
    if steps.is_own_graph() {
        return vec![Storage::F32];
    }
    match steps.declared().map(|numerics| numerics.kv) {
        None => vec![Storage::F32, Storage::F16, Storage::Bf16],
        Some(Storage::F32) => vec![Storage::F32, Storage::F16],
        Some(declared) => vec![declared, Storage::F32],
    }
}

/// Attention with operands of its products in narrow types, what rounds least first.
pub const ATTENTIONS: [(&str, Narrow); 5] = [
    ("attention with f16 operands", Narrow::F16),
    ("attention with TF32 operands", Narrow::Tf32),
    ("attention with TF32 operands", Narrow::Tf32Away),
    ("attention with TF32 operands, cut", Narrow::Tf32Cut),
    ("attention with bf16 operands", Narrow::Bf16),
];

/// What llama.cpp's attention does with keys and values in f16, where no graph says that they are.
pub const LLAMA_ATTENTION: &str = "attention as llama.cpp has it, keys and values in f16";

/// The same over what its graph keeps in quantised blocks.
const LLAMA_ATTENTION_OVER_BLOCKS: &str =
    "attention as llama.cpp has it, keys and values in quantised blocks";

/// What the attention of an engine that brings no graph may be computed in, the likeliest first: its keys and values cached
/// in the type that it declares, or in those that engines of f32 have; as llama.cpp does it; with operands of its products
/// rounded.
pub fn attentions(steps: &dyn Steps) -> Vec<Hypothesis> {
    let named = |kv| Hypothesis { name: name_of_cache(kv), arithmetic: cached(kv) };
    let cached = caches(steps).into_iter().map(named);
    if steps.is_own_graph() {
        return cached.collect();
    }
    let declared = steps.declared();
    // Of what else there is, more is allowed for than what reads some keys before they are kept.
    let kept = declared.map(|numerics| named(numerics.kv)).filter(|one| one.arithmetic.cache != Storage::F32);
    let fresh = kept.into_iter().flat_map(|kept| Fresh::KINDS.map(|fresh| before_kept(&kept, fresh)));
    let cached = cached.chain(fresh);
    // Which of its kernels it was is seen where it was recorded; elsewhere what the coarsest may round is allowed for.
    let coarsest = Arithmetic { flash: Flash::NativeF16, ..products(Narrow::F16) };
    let llama = Arithmetic { cache: Storage::F16, ..coarsest };
    let mut more = rounded_attentions(declared);
    if is_as_llama(declared) {
        // What it rounds lies between f16 operands and bf16 ones.
        more.insert(more.len().saturating_sub(1), Hypothesis { name: LLAMA_ATTENTION, arithmetic: llama });
    }
    cached.chain(more).collect()
}

/// What an engine may compute in, whatever it keeps values in, when it rounds operands of products: those of weights, of
/// attention, or of both.
pub fn with_operands(declared: Option<Numerics>) -> Vec<Arithmetic> {
    let each = |(_, narrow)| {
        // What is cut off weights lies on one side, and differs with what is cut. Of what is rounded it is as much before they are
        // divided by their sum as behind: that was tried as well, and only hid mistakes.
        let undivided = (narrow == Narrow::Tf32Cut).then_some(Weights::Undivided);
        let kinds = [Some(Weights::Divided), undivided].into_iter().flatten();
        let attentions = kinds.flat_map(move |when| {
            [Arithmetic::EXACT, products(narrow)].map(|one| Arithmetic {
                flash: Flash::Rounded(narrow, OfAttention::all(when), Scaled::Scores),
                ..one
            })
        });
        std::iter::once(products(narrow)).chain(attentions)
    };
    // What an engine rarely has is tried by itself.
    let is_simulated = |narrow: Narrow| !matches!(narrow, Narrow::Pair | Narrow::Tf32Away);
    let several = operands(declared).into_iter().filter(|(_, narrow)| is_simulated(*narrow));
    several.flat_map(each).collect()
}

/// Whether an engine may have llama.cpp's attention.
fn is_as_llama(declared: Option<Numerics>) -> bool {
    declared.is_none_or(|numerics| matches!(numerics.products, Products::LlamaCpu | Products::LlamaCuda))
}

/// Attention with operands of its products in types that an engine may round them to.
fn rounded_attentions(declared: Option<Numerics>) -> Vec<Hypothesis> {
    let may = operands(declared);
    let cast = declared.and_then(cast);
    let is_cast = |narrow: &Narrow| cast.is_some_and(|(to, when)| to == *narrow && when == Weights::Divided);
    let all = ATTENTIONS
        .into_iter()
        .filter(|(_, narrow)| may.iter().any(|(_, one)| one == narrow) || is_cast(narrow))
        .map(|(name, narrow)| Hypothesis { name, arithmetic: attention(narrow) });
    let kept = cast.filter(|(_, when)| *when == Weights::Kept);
    all.chain(kept.map(|(narrow, when)| {
        let flash = Flash::Rounded(narrow, OfAttention::all(when), Scaled::Scores);
        Hypothesis { name: IN_ONE_NODE, arithmetic: Arithmetic { flash, ..products(narrow) } }
    }))
    .collect()
}

/// Attention of an engine that rounds what llama.cpp's CPU kernel does, but for its sums in f16.
const IN_ONE_NODE: &str = "attention as llama.cpp has it, sums in f32";

/// What llama.cpp's CPU kernels convert the operands of attention to, and when its weights: to the type of the cache where it
/// is two products, never where it is one node, which has no cache of f32.
fn cast(declared: Numerics) -> Option<(Narrow, Weights)> {
    if declared.products != Products::LlamaCpu {
        return None;
    }
    match (declared.kv, declared.flash) {
        (Storage::F32, false) => None,
        (Storage::F16, false) => Some((Narrow::F16, Weights::Divided)),
        (Storage::Bf16, false) => Some((Narrow::Bf16, Weights::Divided)),
        (Storage::F32 | Storage::F16, true) => Some((Narrow::F16, Weights::Kept)),
        (Storage::Bf16, true) => Some((Narrow::Bf16, Weights::Kept)),
    }
}

/// What llama.cpp's CPU kernels compute where attention was declared to be two products over keys and values in a narrow type:
/// queries and weights are rounded to that type.
pub fn in_two_products(declared: Numerics) -> Option<Arithmetic> {
    let (narrow, when) = cast(declared).filter(|(_, when)| *when == Weights::Divided)?;
    Some(Arithmetic {
        flash: Flash::Rounded(narrow, OfAttention::all(when), Scaled::Scores),
        ..Arithmetic::LLAMA_CPU
    })
}

/// f32 but for the operands of all products, those of attention too.
pub fn attention(narrow: Narrow) -> Arithmetic {
    Arithmetic {
        flash: Flash::Rounded(narrow, OfAttention::all(Weights::Divided), Scaled::Scores),
        ..products(narrow)
    }
}

/// What attention, or one of its products, may be computed in: as [`attentions`] has it for all of them, and by every kernel
/// of llama.cpp.
pub fn of_cache(steps: &dyn Steps, any: bool, op: &Op, args: &Args<'_, f64>) -> Vec<Hypothesis> {
    let declared = steps.declared();
    // Blocks are read as they are.
    let is_plain = |slot| args.get(slot).is_none_or(|source| !cache_blocks::is_kept(source.dtype));
    let (name, cache) = match is_plain(1) && is_plain(2) {
        true => (LLAMA_ATTENTION, Storage::F16),
        false => (LLAMA_ATTENTION_OVER_BLOCKS, Storage::F32),
    };
    let in_half = |one: Hypothesis| Hypothesis { name, arithmetic: Arithmetic { cache, ..one.arithmetic } };
    let kernels =
        node::on_cpu(op, args).into_iter().filter(|_| *op == Op::FlashAttn && is_as_llama(declared));
    let kernels = kernels.filter(|one| one.arithmetic.flash != Flash::Exact).map(in_half);
    // Of llama.cpp's kernels the one that was taken is followed: more exactly than operands that are only bounded.
    let all = attentions(steps).into_iter().filter(|one| one.arithmetic.flash != Flash::NativeF16);
    let (mut cached, rounded): (Vec<_>, Vec<_>) =
        all.partition(|one| one.arithmetic.operands == Operands::Exact);
    cached.retain(|one| one.arithmetic.fresh == Fresh::Never);
    let before = if *op == Op::FlashAttn { scaled_before(&rounded) } else { Vec::new() };
    // Whether a step does is seen where it was recorded.
    let narrow = cached.iter().filter(|one| *op == Op::FlashAttn && one.arithmetic.cache != Storage::F32);
    let fresh: Vec<_> = narrow.map(|one| before_kept(one, Fresh::Always)).collect();
    match any {
        true => cached.into_iter().chain(fresh).chain(kernels).chain(rounded).chain(before).collect(),
        false => cached.into_iter().take(1).collect(),
    }
}

/// Attention over a narrow cache that reads the keys and values of some steps before they are kept.
fn before_kept(one: &Hypothesis, fresh: Fresh) -> Hypothesis {
    Hypothesis { arithmetic: Arithmetic { fresh, ..one.arithmetic }, ..*one }
}

/// Attention of engines that keep everything in a narrow type, what rounds least first: scores in f32 (fused kernels), or
/// rounded once, or after each step; the scale in the scores, in the queries, or its root in queries and keys. All of these
/// once more with keys and values that an engine of f16 may cache in bf16: it declares that, or nothing.
pub fn in_narrow(kept: Storage, declared: Option<Numerics>) -> Vec<Hypothesis> {
    let (narrow, names) = match kept {
        Storage::F32 => return Vec::new(),
        Storage::F16 => {
            (Narrow::F16, ["attention in f16, scores in f32", "attention in f16, scores rounded"])
        }
        Storage::Bf16 => {
            (Narrow::Bf16, ["attention in bf16, scores in f32", "attention in bf16, scores rounded"])
        }
    };
    let f32 = Softmax::F32;
    let once = Softmax { scores: kept, ..f32 };
    let steps = Softmax { steps: true, ..once };
    let all = [
        (f32, Scaled::Scores),
        (steps, Scaled::Scores),
        (f32, Scaled::Queries),
        (once, Scaled::Both),
        (once, Scaled::Queries),
        (once, Scaled::Scores),
        (f32, Scaled::Both),
    ];
    let of = |(softmax, scaled)| {
        let flash = Flash::Rounded(narrow, OfAttention::all(Weights::Divided), scaled);
        let arithmetic = Arithmetic { narrow: kept, cache: kept, flash, softmax, ..Arithmetic::EXACT };
        Hypothesis { name: names[usize::from(softmax != f32)], arithmetic }
    };
    let all: Vec<Hypothesis> = all.into_iter().map(of).collect();
    let bf16 = Storage::Bf16;
    let is_cached = kept == Storage::F16 && declared.is_none_or(|numerics| numerics.kv == bf16);
    let cached = |one: &Hypothesis| Hypothesis {
        name: name_of_cache(bf16),
        arithmetic: Arithmetic { cache: bf16, ..one.arithmetic },
    };
    let cached: Vec<Hypothesis> = all.iter().filter(|_| is_cached).map(cached).collect();
    [all, cached].concat()
}

/// The same with a scale that is kept in the engine's type, or with log2 e folded into it, or both, where that gives other numbers.
/// With a cap, which is a product more, neither was seen.
pub fn with_scales(kept: Storage, narrow: &[Hypothesis], args: &Args<'_, f64>) -> Vec<Hypothesis> {
    let [scale, cap] = [0, 2].map(|at| f64::from(args.params.float(at)));
    let kinds =
        [(kept, false), (Storage::F32, true), (kept, true)].map(|(kept, folded)| Scale { kept, folded });
    let with = |one: &Hypothesis, scale| {
        let arithmetic =
            Arithmetic { softmax: Softmax { scale, ..one.arithmetic.softmax }, ..one.arithmetic };
        Hypothesis { arithmetic, ..*one }
    };
    // Folded in f32 it moves what is rounded behind it alone.
    let rounds_behind = |one: &Hypothesis| {
        let before = matches!(one.arithmetic.flash, Flash::Rounded(_, _, Scaled::Queries));
        before || one.arithmetic.softmax.scores != Storage::F32
    };
    let is_another = |of: Scale, one: &Hypothesis| match of.folded {
        false => of.of(scale) != scale,
        true => of.kept != Storage::F32 || rounds_behind(one),
    };
    // The root of a scale is that of a program in single operations, which fold nothing.
    let is_whole = |one: &&Hypothesis| !matches!(one.arithmetic.flash, Flash::Rounded(_, _, Scaled::Both));
    let narrow = narrow.iter().filter(|one| cap == 0.0 && one.arithmetic.cache == kept && is_whole(one));
    let all = narrow.flat_map(|one| kinds.map(|of| (of, one)));
    all.filter(|(of, one)| is_another(*of, one)).map(|(of, one)| with(one, of)).collect()
}

/// The same with the scale in what is rounded. Where it is a power of two, nothing else comes of it but for its root.
fn scaled_before(rounded: &[Hypothesis]) -> Vec<Hypothesis> {
    let before = |one: &Hypothesis, scaled| match one.arithmetic.flash {
        Flash::Rounded(narrow, of, _) => {
            let arithmetic = Arithmetic { flash: Flash::Rounded(narrow, of, scaled), ..one.arithmetic };
            Some(Hypothesis { name: one.name, arithmetic })
        }
        _ => None,
    };
    let kinds = [Scaled::Queries, Scaled::Both].into_iter();
    kinds.flat_map(|scaled| rounded.iter().filter_map(move |one| before(one, scaled))).collect()
}

/// The arithmetic of a node where attention alone rounds its operands, and its products stand by themselves.
pub fn of_product(one: &Arithmetic, op: &Op, args: &Args<'_, f64>) -> Arithmetic {
    match one.flash {
        Flash::Rounded(narrow, of, _) if of.is_whole() && reads_cache(op, args) => {
            Arithmetic { operands: Operands::Both(narrow), ..*one }
        }
        _ => *one,
    }
}

/// Whether nodes of a kind are attention, or lie within it.
pub fn attends(kind: Kind) -> bool {
    kind == Kind::AttnCtx || kind.is_optional()
}

/// Whether a node reads keys or values: attention, or one of its products.
pub fn reads_cache(op: &Op, args: &Args<'_, f64>) -> bool {
    let values = || args.get(0).is_some_and(|source| matches!(source.data, Data::Values(_)));
    *op == Op::FlashAttn || *op == Op::MulMat && values()
}
