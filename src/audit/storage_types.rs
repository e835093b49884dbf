//! Engines that keep their values between nodes, or their keys and values, in f16 or bf16, and declare it or not.
//!
//! What such an engine rounds is followed where it can be (weights and caches are rounded before they are read) and
//! allowed for where its order is its own: the result is rounded once, and an op that is computed in several steps
//! rounds in between, which is as if each source was off by so much. That an engine does so must be seen: a node is
//! given these roundings only where all its recorded values are numbers of that type.

use parity_graph::Op;

use super::attentions::{self, attends, of_cache, reads_cache};
use super::node::{self, Hypothesis};
use super::operands;
use super::parts;
use super::{Labelled, Steps};
use crate::arithmetic::round::NORMAL_F16;
use crate::arithmetic::{Arithmetic, Cached, Flash, Fresh, Functions, Operands, Packed, Storing, both};
use crate::gguf::DType;
use crate::numerics::{Numerics, Products, Storage};
use crate::ops::bound::{SUBNORMAL_F16, UNIT_BF16, UNIT_F16, storage, storage_unit, unit_of};
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, scales_of_rows};

/// Roundings between the steps of an op that an engine computes in several: scaled, multiplied, added.
pub const STEPS: f64 = 3.0;

/// Adds what a narrow type rounds at a node to its bound, and what values were rounded by when they were recorded.
pub fn widen(rule: &Rule, args: &Args<'_, f64>, exact: &[f64], bound: &mut [f64]) {
    if let Some(dtype) = narrow(args.arithmetic.narrow) {
        bound.iter_mut().zip(exact).for_each(|(bound, y)| *bound += storage(dtype, *y));
        if args.arithmetic.storing == Storing::Flushed {
            let is_flushed = |y: f64| y.abs() < NORMAL_F16 * (1.0 + UNIT_F16);
            let small = bound.iter_mut().zip(exact).filter(|(_, y)| is_flushed(**y));
            small.for_each(|(bound, y)| *bound += y.abs());
        }
        add_roots(args.arithmetic.narrow, &rule.op, args, exact, bound);
        parts::widen(&rule.op, args, exact, bound);
        if !is_one_step(&rule.op) && !is_followed(&rule.op, args.arithmetic) {
            add_errors_of_sources(rule, args, exact, bound, |x| STEPS * storage(dtype, x));
        }
        // The sigmoid, its product with the gate, and up + 1 are no sources.
        if rule.op == Op::SwigluOai {
            bound.iter_mut().zip(exact).for_each(|(bound, y)| *bound += STEPS * storage(dtype, *y));
        }
    }
    let Some(kept) = args.arithmetic.recorded else { return };
    let unit = storage_unit(kept);
    let least = if kept == Storage::F16 { SUBNORMAL_F16 } else { 0.0 };
    bound.iter_mut().zip(exact).for_each(|(bound, y)| *bound += unit * y.abs() + least);
    match crate::ops::problem(&rule.op, args) {
        Ok(problem) if matches!(problem.weight.data, Data::Weight(_)) => {
            bound.iter_mut().zip(problem.off(unit)).for_each(|(bound, off)| *bound += off);
        }
        _ => add_errors_of_sources(rule, args, exact, bound, |x| unit * x.abs() + least),
    }
}

/// Adds what errors of the sources, which are `carried`, come to, and what rounding to the type that values are kept in comes to
/// beyond what it is at the exact ones: so much further from 0 its steps may be twice as wide.
pub fn add_carried(arithmetic: &Arithmetic, exact: &[f64], carried: &[f64], bound: &mut [f64]) {
    let recorded = arithmetic.recorded.map_or(0.0, storage_unit);
    for ((bound, carried), y) in bound.iter_mut().zip(carried).zip(exact) {
        let at = |y: f64| rounding(arithmetic.narrow, y);
        *bound += carried * (1.0 + recorded) + at(y.abs() + carried) - at(*y);
    }
}

/// By how much the scale of each row of a norm may be off, relative, where an engine keeps it in a narrow type: it squares
/// and averages in f32, and rounds the root or its inverse before it meets the row (`rms_norm` of candle-nn). All of a row
/// is then off by one factor. `None` of any other op.
pub fn roots(kept: Storage, op: &Op, args: &Args<'_, f64>) -> Option<Vec<f64>> {
    let dtype = narrow(kept)?;
    let relative = |value: f64| storage(dtype, value) / value;
    let off = |scale: f64| relative(scale).max(relative(1.0 / scale));
    // Of a row of zeros without an epsilon nothing is known but its zeros.
    let finite = |off: f64| if off.is_finite() { off } else { 0.0 };
    Some(scales_of_rows(op, args)?.into_iter().map(|scale| finite(off(scale))).collect())
}

/// Adds [`roots`] to a bound.
pub fn add_roots(kept: Storage, op: &Op, args: &Args<'_, f64>, exact: &[f64], bound: &mut [f64]) {
    let width = args.shape[3].max(1);
    let rows = bound.chunks_mut(width).zip(exact.chunks(width));
    for (off, (bound, exact)) in roots(kept, op, args).into_iter().flatten().zip(rows) {
        bound.iter_mut().zip(exact).for_each(|(bound, y)| *bound += off * y.abs());
    }
}

/// Adds what the least values of the sources lost where they were only recorded in f16: of those that are no normal
/// numbers of it, more than a rounding's share.
pub fn add_lost(kept: Storage, rule: &Rule, args: &Args<'_, f64>, exact: &[f64], bound: &mut [f64]) {
    if kept == Storage::F16 {
        add_errors_of_sources(rule, args, exact, bound, |_| SUBNORMAL_F16);
    }
}

/// Up to how much a value is rounded by where it is kept in a narrow type.
pub fn rounding(kept: Storage, value: f64) -> f64 {
    narrow(kept).map_or(0.0, |dtype| storage(dtype, value))
}

/// The type of files that values of a narrow type have.
pub fn narrow(kept: Storage) -> Option<DType> {
    match kept {
        Storage::F32 => None,
        Storage::F16 => Some(DType::F16),
        Storage::Bf16 => Some(DType::BF16),
    }
}

/// Adds what errors of the recorded sources come to in the result.
fn add_errors_of_sources(
    rule: &Rule,
    args: &Args<'_, f64>,
    exact: &[f64],
    bound: &mut [f64],
    error: impl Fn(f64) -> f64,
) {
    for (slot, source) in args.sources.iter().enumerate() {
        let Some(source) = source.as_ref().filter(|source| is_rounded(&rule.op, slot, source)) else {
            continue;
        };
        let errors: Vec<f64> = source.values().iter().map(|x| error(*x)).collect();
        let moved = (rule.carry)(args, exact, slot, &errors);
        bound.iter_mut().zip(moved).for_each(|(bound, moved)| *bound += moved);
    }
}

/// Whether it is known at which of its steps an attention rounds.
pub fn is_followed(op: &Op, arithmetic: &Arithmetic) -> bool {
    *op == Op::FlashAttn && matches!(arithmetic.flash, Flash::Rounded(..))
}

/// Ops that round nothing but their result: of one step, or computed in f32 by engines that keep anything narrower (but
/// for the scale of a norm, see [`roots`]). A norm or a softmax that is not is worth a report.
pub fn is_one_step(op: &Op) -> bool {
    use Op::*;
    matches!(
        op,
        Add | AddId
            | Sub
            | Mul
            | Div
            | Scale
            | MulMat
            | MulMatId
            | GetRows
            | Repeat
            | Concat
            | Sqr
            | Sqrt
            | Relu
            | Abs
            | RmsNorm
            | Norm
            | SoftMax
    )
}

/// Whether a source holds numbers that an engine computed.
pub fn is_rounded(op: &Op, slot: usize, source: &Source<'_, f64>) -> bool {
    let numbers = matches!(source.dtype, DType::F32 | DType::F16 | DType::BF16);
    numbers && !is_mask(op, slot) && !matches!(source.data, Data::Weight(_))
}

/// Masks hold zeros and infinities, which no type rounds.
fn is_mask(op: &Op, slot: usize) -> bool {
    matches!((op, slot), (Op::FlashAttn, 3) | (Op::SoftMax, 1))
}

/// Whether every finite value is a number of a type.
pub fn holds(kept: Storage, values: &[f32]) -> bool {
    kept == Storage::F32 || values.iter().all(|&x| kept.holds(x))
}

/// The narrow type that the values of some node show an engine to use; f32 where none does.
pub fn shown(steps: &dyn Steps, graphs: &[(usize, &Labelled)]) -> Storage {
    let mut counts = [(Storage::Bf16, 0), (Storage::F16, 0)];
    if let Some((step, labelled)) = graphs.first() {
        let sees_one = steps.positions(*step) == [0];
        for (id, checkpoint) in labelled.nodes() {
            // A table row shows the type of the table, and what sees one position alone that of its cache; indices show nothing.
            let tensor = labelled.program.graph.get(id);
            let is_given = tensor.op == Op::GetRows || tensor.dtype == "i32";
            if is_given || sees_one && attends(checkpoint.kind()) {
                continue;
            }
            let Some(recorded) = steps.tensor(*step, checkpoint) else { continue };
            if recorded.values.iter().all(|x| *x == 0.0) {
                continue;
            }
            counts.iter_mut().filter(|(kept, _)| holds(*kept, &recorded.values)).for_each(|(_, n)| *n += 1);
        }
    }
    let [(brain, in_brain), (half, in_half)] = counts;
    match (in_brain, in_half) {
        (0, 0) => Storage::F32,
        (a, b) if a >= b => brain,
        _ => half,
    }
}

/// Unit roundoff of the narrowest type that an arithmetic keeps values or operands in. What a cache of eight bits holds is
/// followed, and leaves about as much as f16 does.
pub fn unit(arithmetic: &Arithmetic) -> f64 {
    let own = match arithmetic.operands {
        Operands::Both(narrow) | Operands::One(_, narrow) => unit_of(narrow),
        _ => match arithmetic.flash {
            Flash::Rounded(narrow, ..) => unit_of(narrow),
            _ => storage_unit(arithmetic.narrow),
        },
    };
    if arithmetic.packed == [None; 2] { own } else { own.max(UNIT_F16) }
}

/// Whether a node multiplies with a weight.
pub fn is_product(op: &Op, args: &Args<'_, f64>) -> bool {
    let weight = || args.get(0).is_some_and(|source| matches!(source.data, Data::Weight(_)));
    matches!(op, Op::MulMat | Op::MulMatId) && weight()
}

/// Computed as it was recorded, but for the rounding of what was recorded.
fn recorded(kept: Storage) -> Arithmetic {
    Arithmetic { recorded: Some(kept), ..Arithmetic::EXACT }
}

/// What it is called that values of f64 were rounded to f32 only when they were recorded.
pub const IN_BETTER: &str = "better than f32, rounded when it was recorded";

/// Computed in f64: what was recorded of a node and of its sources is rounded to f32.
pub fn better_than_f32() -> Hypothesis {
    Hypothesis { name: IN_BETTER, arithmetic: recorded(Storage::F32) }
}

/// Whether an engine declares that it rounds no operand of a product whose weight is no block of integers: then f16
/// operands, as llama.cpp's CPU kernels have them for F16 weights, are coarser than it says (TF32 that is silently on).
pub fn is_declared_plain(steps: &dyn Steps, op: &Op, args: &Args<'_, f64>) -> bool {
    let plain =
        |source: &Source<'_, f64>| matches!(source.data, Data::Weight(_)) && source.dtype.block_len() == 1;
    matches!(op, Op::MulMat | Op::MulMatId)
        && args.get(0).is_some_and(plain)
        && !steps.is_own_graph()
        && declares_plain(steps)
}

/// Whether an engine declares that its products are of f32 or better.
pub fn declares_plain(steps: &dyn Steps) -> bool {
    steps.declared().is_some_and(|numerics| matches!(numerics.products, Products::F32 | Products::F64))
}

/// What a node of a recording may have been computed in, the likeliest first; `kept` is the type that the recording's
/// values show. With `any_attention` keys and values may have been read in every way that engines have, else only in the
/// one that this engine has first, see [`super::attentions`].
pub fn tried(
    steps: &dyn Steps,
    (kept, any_attention): (Storage, bool),
    tensor: &parity_graph::Tensor,
    args: &Args<'_, f64>,
    recorded: &[f32],
) -> Vec<Hypothesis> {
    let (own, declared) = (steps.is_own_graph(), steps.declared());
    if own && declared.is_some_and(|numerics| numerics.products == Products::F64) {
        return vec![better_than_f32()];
    }
    let mut tried = node::hypotheses(&tensor.op, tensor.backend.as_deref(), args);
    if is_declared_plain(steps, &tensor.op, args) {
        tried.retain(|one| one.arithmetic.operands != Operands::VecDot);
    }
    if !own {
        let kept = Some(kept).filter(|kept| holds(*kept, recorded)).unwrap_or_default();
        if reads_cache(&tensor.op, args) {
            tried.extend(of_cache(steps, any_attention, &tensor.op, args));
        }
        tried.extend(hypotheses(&tensor.op, args, kept, declared));
        tried.extend(of_tables(&tensor.op, args, recorded));
    }
    tried
}

/// Other formulas of sigmoids and their like that libraries and compilers have, for values of f32.
fn of_functions(op: &Op) -> Option<[Hypothesis; 2]> {
    use Op::*;
    let named =
        |name, functions| Hypothesis { name, arithmetic: Arithmetic { functions, ..Arithmetic::EXACT } };
    matches!(op, Sigmoid | Silu | Swiglu | SwigluClamp | Gelu | GeluErf | Geglu | GegluErf | Tanh).then(
        || {
            [
                named("functions by fast exponentials and polynomials", Functions::Exponential),
                named("sigmoids by tanh, which is a ratio of polynomials", Functions::Rational),
            ]
        },
    )
}

/// What it is called that an engine goes on with values of a narrow type, and that they were rounded to it only when they were
/// recorded.
pub fn readings(kept: Storage) -> Option<[&'static str; 2]> {
    match kept {
        Storage::F32 => None,
        Storage::F16 => Some(["values and weights in f16", "values rounded to f16 when they were recorded"]),
        Storage::Bf16 => {
            Some(["values and weights in bf16", "values rounded to bf16 when they were recorded"])
        }
    }
}

/// What it is called that nodes read copies in a narrower type of what was recorded.
pub fn name_of_copies(kept: Storage) -> &'static str {
    match kept {
        Storage::F32 => "values read as they were recorded",
        Storage::F16 => "copies in f16 of what was recorded",
        Storage::Bf16 => "copies in bf16 of what was recorded",
    }
}

/// What attention may be computed in over keys and values that are kept so, by an engine that keeps its values in a type: it
/// reads them as they are or rounded to that type.
pub fn over_packed(
    kept: Storage,
    declared: Option<Numerics>,
    (name, packed): (&'static str, Cached),
) -> Vec<Hypothesis> {
    let in_narrow = attentions::in_narrow(kept, declared).into_iter().map(|one| one.arithmetic);
    let in_narrow: Vec<Arithmetic> = in_narrow.filter(|one| one.cache == kept).collect();
    let read = |cache| in_narrow.iter().map(move |one| Arithmetic { cache, ..*one });
    // Rounding in any order beside that hides most mistakes.
    let is_any = kept == Storage::F32 || packed == both(Packed::Eight);
    let in_any = is_any.then_some(Arithmetic { narrow: kept, ..Arithmetic::EXACT });
    let as_type = read(kept).filter(|_| kept != Storage::F32);
    let all = read(Storage::F32).chain(as_type).chain(in_any);
    let all: Vec<Arithmetic> = all.map(|one| Arithmetic { packed, ..one }).collect();
    // In a step keys and values of its own may be read before they are kept.
    let fresh = all.iter().map(|one| Arithmetic { fresh: Fresh::Always, ..*one });
    all.iter().copied().chain(fresh).map(|arithmetic| Hypothesis { name, arithmetic }).collect()
}

/// Values as they lie in the middle of what may have become them where bits were cut off to bf16.
pub fn centred(values: &[f64]) -> Vec<f64> {
    let half =
        |x: f64| if x == 0.0 || !x.is_finite() { 0.0 } else { UNIT_BF16 * x.abs().log2().floor().exp2() };
    values.iter().map(|x| x + half(*x).copysign(*x)).collect()
}

/// What it is called that kernels decode blocks in f16.
pub const IN_HALF: &str = "blocks decoded in f16, each step rounded";

/// Rows of a table in blocks as kernels decode them that compute in f16, whatever the engine keeps its values in (vLLM, SGLang,
/// MLX): what they come to is of f16, or of bf16 where the engine keeps that.
fn of_tables(op: &Op, args: &Args<'_, f64>, recorded: &[f32]) -> Option<Hypothesis> {
    let is_of_blocks = *op == Op::GetRows && args.get(0).is_some_and(|table| table.dtype.block_len() > 1);
    let kept = [Storage::Bf16, Storage::F16].into_iter().find(|kept| holds(*kept, recorded))?;
    let arithmetic = Arithmetic { decoded: Storage::F16, narrow: kept, ..Arithmetic::EXACT };
    is_of_blocks.then_some(Hypothesis { name: IN_HALF, arithmetic })
}

/// What else an engine that is not llama.cpp may compute a node in; `kept` is the type that its recorded values are
/// all numbers of. What was `declared` holds for products.
pub fn hypotheses(
    op: &Op,
    args: &Args<'_, f64>,
    kept: Storage,
    declared: Option<Numerics>,
) -> Vec<Hypothesis> {
    let mut more = Vec::new();
    if is_product(op, args) {
        more.extend(operands::hypotheses(args, declared));
    }
    if let Some(functions) = of_functions(op) {
        more.extend(functions);
    }
    more.push(better_than_f32());
    let Some([name, rounded]) = readings(kept) else { return more };
    let narrow = Arithmetic { narrow: kept, cache: kept, ..Arithmetic::EXACT };
    if *op == Op::FlashAttn {
        let narrow = attentions::in_narrow(kept, declared);
        let with_scales = attentions::with_scales(kept, &narrow, args);
        more.extend(narrow.into_iter().chain(with_scales));
    }
    more.push(Hypothesis { name, arithmetic: narrow });
    if is_product(op, args) && declared.is_none_or(|declared| declared.storage == kept) {
        more.extend(operands::in_narrow(args, [narrow, recorded(kept)]));
    }
    more.push(Hypothesis { name: rounded, arithmetic: recorded(kept) });
    if is_product(op, args) {
        more.extend(parts::hypotheses(kept));
    }
    more
}
