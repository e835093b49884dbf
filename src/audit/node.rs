//! One recorded node against its rule, under each arithmetic that its producer may have.

use std::collections::HashSet;

use parity_graph::{CPU_OF_ARM, Op};
use rayon::prelude::*;

use super::audit_rows::AuditRows;
use super::bridge::carry;
use super::further::is_nearer;
use super::likely::likely;
use super::sample::attention;
use super::stored::Narrowed;
use super::tokens::Tokens;
use super::{factor_of_row, factor_of_scores, parts, storage_types, together, uneven};
pub use crate::arithmetic::Hypothesis;
use crate::arithmetic::backend::{Backend, Product, Queries};
use crate::arithmetic::{Arithmetic, Flash, Operands, bounded_by};
use crate::engine::op_by_op::{Carried, Unknown};
use crate::gguf::DType;
use crate::numerics::Storage;
use crate::ops::bound::{HEALTHY, storage_unit};
use crate::ops::{Args, Check, Choice, Rule};

/// What a node may have been computed in by `backend`, the likeliest first. Of a backend that is not known all that are
/// tried of llama.cpp's CPU kernels.
pub fn hypotheses(op: &Op, backend: Option<&str>, args: &Args<'_, f64>) -> Vec<Hypothesis> {
    let Some(backend) = backend.and_then(Backend::of) else {
        let on_arm = backend == Some(CPU_OF_ARM) && *op == Op::FlashAttn;
        return on_cpu(op, args).into_iter().chain(on_arm.then_some(IN_F16)).collect();
    };
    let shape = |slot: usize| args.get(slot).map_or([1; 4], |source| source.shape());
    let [_, _, rows, width] = shape(1);
    match op {
        Op::MulMat | Op::MulMatId => backend.products(&Product {
            weight: args.get(0).map_or(DType::F32, |weight| weight.dtype),
            // The rows of a batch of matrices stand apart; those that go to experts are all rows.
            rows: if *op == Op::MulMat { rows } else { args.shape[1] * args.shape[2] },
            batched: *op == Op::MulMat && args.shape[0] * args.shape[1] > 1,
            width,
            precise: *op == Op::MulMat && args.params.int(0) == PRECISE,
        }),
        Op::FlashAttn => backend.attention(&Queries {
            rows: shape(0)[2],
            heads: shape(0)[1] / shape(1)[1].max(1),
            keys: shape(1)[0] * shape(1)[1],
            width: shape(0)[3],
            positions: shape(1)[2],
            cached: [1, 2].map(|slot| args.get(slot).map_or(DType::F16, |source| source.dtype)),
        }),
        _ => backend.others(),
    }
}

/// `GGML_PREC_F32`
const PRECISE: i32 = 10;
/// Queries in a tile of llama.cpp's CPU flash attention.
pub const FLASH_TILE: usize = 64;
/// Threads that a split flash attention is tried with first.
const THREADS: [usize; 8] = [2, 4, 8, 1, 16, 6, 12, 32];
/// The most that it is tried with, and from how many positions on llama.cpp shares them among threads (ggml-cpu/ops.cpp).
const THREADS_MAX: usize = 256;
const SHARED_FROM: usize = 512;

/// What is called that llama.cpp's CPU kernels round.
pub const ON_CPU: &str = "llama.cpp's CPU kernels";
/// What is called that nothing is rounded but to f32.
pub const IN_F32: &str = "nothing but f32 rounding";

/// ARM, and other CPUs that compute in f16, multiply and add so: coarser than all else, and the last.
pub const IN_F16: Hypothesis = Hypothesis {
    name: "attention with products and sums in f16, in any order",
    arithmetic: Arithmetic { flash: Flash::NativeF16, ..Arithmetic::LLAMA_CPU },
};

/// What is tried of llama.cpp's CPU kernels, the likeliest first.
pub fn on_cpu(op: &Op, args: &Args<'_, f64>) -> Vec<Hypothesis> {
    let flash = |name, flash| Hypothesis { name, arithmetic: Arithmetic { flash, ..Arithmetic::LLAMA_CPU } };
    let cpu = Hypothesis { name: ON_CPU, arithmetic: Arithmetic::LLAMA_CPU };
    let exact = Hypothesis { name: IN_F32, arithmetic: Arithmetic::EXACT };
    if *op != Op::FlashAttn {
        return vec![cpu, exact];
    }
    let by_row = flash("attention row by row with sums in f16", Flash::ByRow);
    let tiled = flash("attention with sums in f32", Flash::Exact);
    match args.get(0).map(|q| q.shape()[2]) {
        Some(rows) if rows >= FLASH_TILE => vec![tiled, by_row],
        Some(1) => {
            let positions = args.get(1).map_or(0, |keys| keys.shape()[2]);
            let split =
                threads(positions).map(|parts| flash("attention split over threads", Flash::Split(parts)));
            [by_row].into_iter().chain(split).chain([tiled, exact]).collect()
        }
        _ => vec![by_row, tiled, exact],
    }
}

/// Numbers of threads that so many positions may have been shared among, of those that cut them alike one: the usual ones first.
fn threads(positions: usize) -> impl Iterator<Item = usize> {
    let most = if positions >= SHARED_FROM { THREADS_MAX } else { 0 };
    let all = THREADS.into_iter().chain(1..=most);
    let mut seen = HashSet::new();
    all.filter(move |parts| seen.insert(positions.div_ceil(*parts)))
}

/// A recorded node against exact arithmetic.
pub struct Held {
    /// Name of the arithmetic, where it is not the usual one.
    pub arithmetic: Option<&'static str>,
    /// Name of the arithmetic that explains it.
    pub computed_in: Option<&'static str>,
    /// Whether that rounds on purpose, as a device does.
    pub followed: bool,
    /// That arithmetic, or the one that comes nearest.
    pub under: Option<Arithmetic>,
    /// Σ (recorded - exact)², Σ exact², Σ bound², over finite elements.
    pub squares: [f64; 3],
    /// Largest error over its bound; NaN where the bound explains nothing.
    pub over: f64,
    /// Where that is.
    pub worst: usize,
    /// What was recorded there, and what exact arithmetic has; `None` where the element has no value of its own.
    pub at_worst: Option<[f64; 2]>,
    /// Elements that are beyond their bound.
    pub beyond: Vec<usize>,
    /// See [`super::Finding::uneven`].
    pub uneven: f64,
    /// NaN and Inf that exact arithmetic does not have there.
    pub nonfinite: u64,
    /// NaN and Inf that it has too.
    pub explained_nonfinite: u64,
    /// Rows of a discrete result in which rounding decides.
    pub near_ties: Vec<Choice>,
    /// An element of each row whose operands were rounded, where those of others were not.
    pub rounded: Vec<usize>,
    /// Token rows that were screened instead, see `sample.rs`.
    pub screened: usize,
    /// Unit roundoff of the type that values were taken to be kept in.
    pub unit: f64,
    /// Where sums in any order explain it alone: how far the nearest kernel whose order is known is, over its bound.
    pub otherwise: Option<f64>,
}

impl Held {
    /// Whether rounding explains it.
    pub fn is_healthy(&self) -> bool {
        self.over <= HEALTHY
    }
}

/// What is seen of a node besides its values.
pub struct Sight<'a> {
    /// Which elements were recorded.
    pub looked_at: &'a (dyn Fn(usize) -> bool + Sync),
    /// By slot, what of its sources was not recorded but computed again.
    pub carried: &'a [Option<Carried>],
    /// Elements of a token's row, which lie side by side; `None` where they do not.
    pub row: Option<usize>,
    /// What a norm that was not recorded is kept in, of values that were, where a weight meets it here.
    pub norm: Option<Storage>,
}

/// Holds a recorded result, contiguous in the shape of `args`, to its rule, under the first of `tried` that explains
/// it.
///
/// # Errors
/// What the rule refuses.
pub fn judge(
    rule: &Rule,
    args: &Args<'_, f64>,
    recorded: &[f64],
    sight: &Sight<'_>,
    tried: &[Hypothesis],
) -> Result<Held, Unknown> {
    if let Some(tokens) = Tokens::judged(rule, args, recorded, sight) {
        let there = tokens.looked_at(sight);
        if rule.op == Op::FlashAttn {
            return attention(&tokens, sight, &there, tried, AuditRows::All);
        }
        if let Some(likely) = likely(&tokens, &there, tried) {
            return tokens.whole(sight, tried, Some(&likely));
        }
    }
    judge_each(rule, args, recorded, sight, tried)
}

/// As [`judge`], each of `tried` in full.
pub(super) fn judge_each(
    rule: &Rule,
    args: &Args<'_, f64>,
    recorded: &[f64],
    sight: &Sight<'_>,
    tried: &[Hypothesis],
) -> Result<Held, Unknown> {
    let mut best: Option<Held> = None;
    let elements = || sight.count(recorded.len());
    for Hypothesis { name, arithmetic } in tried {
        let narrowed = Narrowed::of(&rule.op, args, arithmetic);
        let carried = narrowed.carried(&rule.op, args, arithmetic, sight.carried);
        let sight = &Sight { carried: &carried, ..*sight };
        let args = Args { arithmetic, sources: narrowed.sources(args), ..*args };
        let mut held = match &rule.check {
            Check::Choice(choices) => by_choice(&args, choices(&args, recorded), sight)?,
            _ => by_values(rule, &args, recorded, sight)?,
        };
        // Kernels of one kind that differ in their order alone have one name.
        held.arithmetic = tried.first().filter(|usual| usual.name != *name).map(|_| *name);
        held.computed_in = Some(*name);
        held.followed = arithmetic.is_of_a_device();
        held.under = Some(*arithmetic);
        held.unit = storage_unit(arithmetic.narrow);
        let width = args.shape[3];
        let is_taken = arithmetic.parts == 1 || parts::are_shown(rule, &args, recorded, width);
        if held.is_healthy() && is_taken {
            return Ok(held);
        }
        if !is_taken {
            continue;
        }
        let by = |held: &Held| (held.beyond.len(), held.squares[0]);
        if best.as_ref().is_none_or(|best| is_nearer(by(&held), by(best), &elements)) {
            best = Some(Held { arithmetic: None, computed_in: None, ..held });
        }
    }
    best.ok_or_else(|| Unknown::new("an arithmetic"))
}

/// What a node comes to in an arithmetic, and how far rounding explains that a recorded one is off.
///
/// # Errors
/// What the rule refuses.
pub fn expected(
    rule: &Rule,
    args: &Args<'_, f64>,
    recorded: &[f64],
    sight: &Sight<'_>,
    Hypothesis { arithmetic, .. }: &Hypothesis,
) -> Result<(Vec<f64>, Vec<f64>), Unknown> {
    let narrowed = Narrowed::of(&rule.op, args, arithmetic);
    let carried = narrowed.carried(&rule.op, args, arithmetic, sight.carried);
    let args = &Args { arithmetic, sources: narrowed.sources(args), ..*args };
    let (exact, mut bound) = computed(rule, args, recorded)?;
    storage_types::widen(rule, args, &exact, &mut bound);
    if let Some(carried) = carry(rule, args, &exact, &carried) {
        storage_types::add_carried(arithmetic, &exact, &carried, &mut bound);
    }
    Ok((exact, bound))
}

/// The exact result, with what is decided by a tie as it was recorded.
pub(super) fn settled(rule: &Rule, args: &Args<'_, f64>, recorded: &[f64]) -> Result<Vec<f64>, Unknown> {
    let mut exact = crate::engine::op_by_op::compute::<f64>(rule, args)?;
    if let Check::Settled { settle, .. } = &rule.check {
        settle(args, &mut exact, recorded);
    }
    Ok(exact)
}

/// The exact result, and the bound of its rule.
fn computed(rule: &Rule, args: &Args<'_, f64>, recorded: &[f64]) -> Result<(Vec<f64>, Vec<f64>), Unknown> {
    let exact = settled(rule, args, recorded)?;
    let bound = match &rule.check {
        Check::Exact | Check::Choice(_) => vec![0.0; exact.len()],
        Check::Bound(bound) | Check::Settled { bound, .. } => bound(args, &exact),
    };
    if exact.len() != recorded.len() || bound.len() != recorded.len() {
        return Err(Unknown::new(format!("as many elements of {} as are recorded", args.name)));
    }
    Ok((exact, bound))
}

fn by_values(
    rule: &Rule,
    args: &Args<'_, f64>,
    recorded: &[f64],
    sight: &Sight<'_>,
) -> Result<Held, Unknown> {
    let (exact, mut bound) = computed(rule, args, recorded)?;
    let width = sight.row.filter(|_| factor_of_row::is_known(&rule.op, args, sight.norm));
    let mut own = width.map(|_| bound.clone());
    storage_types::widen(rule, args, &exact, &mut bound);
    if let Some(own) = &mut own {
        factor_of_row::widen(&rule.op, args, &exact, own, &bound);
    }
    let carried = carry(rule, args, &exact, sight.carried);
    if let Some(carried) = &carried {
        storage_types::add_carried(args.arithmetic, &exact, carried, &mut bound);
    }
    let written = crate::ops::written(&rule.op, args);
    let elements = recorded.par_chunks(CHUNK).zip(exact.par_chunks(CHUNK)).zip(bound.par_chunks(CHUNK));
    let parts = elements.enumerate().map(|(chunk, ((recorded, exact), bound))| {
        let mut held = nothing();
        for (i, ((&recorded, &exact), &bound)) in recorded.iter().zip(exact).zip(bound).enumerate() {
            let index = chunk * CHUNK + i;
            if index < written && (sight.looked_at)(index) {
                element(&mut held, index, recorded, exact, bound);
            }
        }
        held
    });
    let mut held = parts.collect::<Vec<Held>>().into_iter().fold(nothing(), joined);
    // Of sums in parts errors have either sign alike too.
    if args.arithmetic.operands == Operands::Unordered || args.arithmetic.parts > 1 {
        let terms = args.get(1).map_or(0, |x| x.shape()[3]);
        let width = args.shape[3];
        let values = together::Values { recorded, exact: &exact, bound: &bound, width, terms };
        for (element, over) in together::factors(&values, sight.looked_at) {
            note(&mut held, element, over);
        }
    }
    if carried.is_none() || bounded_by(args.arithmetic.packed).is_some() {
        for (element, over) in factor_of_scores::over(&rule.op, args, [recorded, &exact], sight.looked_at) {
            note(&mut held, element, over);
        }
    }
    if let Some((width, own)) = width.zip(own) {
        let (carried, norm) = (carried.as_deref(), sight.norm);
        let values = factor_of_row::Values { recorded, exact: &exact, own: &own, carried, norm };
        for (row, over) in factor_of_row::factors(&rule.op, args, &values, width).into_iter().enumerate() {
            if (sight.looked_at)(row * width) {
                note(&mut held, row * width, over);
            }
        }
    }
    let width = sight.row.filter(|_| !held.is_healthy());
    held.uneven = width.map_or(0.0, |width| uneven::of([recorded, &exact], width, sight.looked_at));
    held.at_worst = (sight.looked_at)(held.worst)
        .then(|| Some([*recorded.get(held.worst)?, *exact.get(held.worst)?]))
        .flatten();
    Ok(held)
}

/// Elements that one thread looks at: a fixed number, so that sums do not depend on how many threads there are.
const CHUNK: usize = 1 << 15;

/// What was found of a part, beside what was found of the whole by a wider bound: the larger of both is shown.
pub(super) fn with_worst(mut part: Held, whole: Held) -> Held {
    part.beyond.extend(whole.beyond);
    part.nonfinite = whole.nonfinite;
    part.explained_nonfinite = whole.explained_nonfinite;
    if !(whole.over <= part.over) && !part.over.is_nan() {
        (part.over, part.worst, part.at_worst) = (whole.over, whole.worst, whole.at_worst);
    }
    part
}

/// Two parts of one result, in their order.
pub(super) fn joined(mut held: Held, part: Held) -> Held {
    held.squares.iter_mut().zip(part.squares).for_each(|(sum, more)| *sum += more);
    held.beyond.extend(part.beyond);
    held.uneven = held.uneven.max(part.uneven);
    held.nonfinite += part.nonfinite;
    held.explained_nonfinite += part.explained_nonfinite;
    if !(part.over <= held.over) && !held.over.is_nan() {
        (held.over, held.worst) = (part.over, part.worst);
    }
    held
}

/// Of no element yet.
pub(super) fn nothing() -> Held {
    Held {
        arithmetic: None,
        computed_in: None,
        followed: false,
        under: None,
        squares: [0.0; 3],
        over: 0.0,
        worst: 0,
        at_worst: None,
        beyond: Vec::new(),
        uneven: 0.0,
        nonfinite: 0,
        explained_nonfinite: 0,
        near_ties: Vec::new(),
        rounded: Vec::new(),
        screened: 0,
        unit: storage_unit(Storage::F32),
        otherwise: None,
    }
}

/// Adds one element.
pub(super) fn element(held: &mut Held, index: usize, recorded: f64, exact: f64, bound: f64) {
    let off = recorded - exact;
    if off.is_finite() && bound.is_finite() && off.abs() <= held.over.min(HEALTHY) * bound {
        let [errors, values, bounds] = &mut held.squares;
        (*errors, *values, *bounds) = (*errors + off * off, *values + exact * exact, *bounds + bound * bound);
        return;
    }
    let same = recorded == exact || recorded.is_nan() && exact.is_nan();
    if !recorded.is_finite() {
        *(if same { &mut held.explained_nonfinite } else { &mut held.nonfinite }) += 1;
    }
    let over = match (recorded - exact).abs() {
        _ if same => 0.0,
        _ if !bound.is_finite() || !recorded.is_finite() || !exact.is_finite() => f64::NAN,
        _ if bound == 0.0 => f64::MAX.sqrt(),
        error => error / bound,
    };
    if recorded.is_finite() && exact.is_finite() {
        let [errors, values, bounds] = &mut held.squares;
        *errors += (recorded - exact).powi(2);
        *values += exact.powi(2);
        *bounds += if bound.is_finite() { bound.powi(2) } else { 0.0 };
    }
    note(held, index, over);
}

/// Notes a ratio; NaN is the largest of all.
fn note(held: &mut Held, index: usize, over: f64) {
    if !(over <= HEALTHY) {
        held.beyond.push(index);
    }
    if !(over <= held.over) && !held.over.is_nan() {
        (held.over, held.worst) = (over, index);
    }
}

/// A choice of indices by the values that it chose.
fn by_choice(args: &Args<'_, f64>, choices: Vec<Choice>, sight: &Sight<'_>) -> Result<Held, Unknown> {
    // Two scores that were computed again may each be off by so much.
    let errors = sight.carried.iter().flatten().flat_map(|carried| &carried.error);
    let off = 2.0 * errors.fold(0.0, |max: f64, error| if *error <= max { max } else { *error });
    if !off.is_finite() {
        return Err(Unknown::new(format!("the scores of {}", args.name)));
    }
    let mut held = nothing();
    let [_, b, c, d] = args.shape;
    for choice in choices {
        let choice = Choice { near: choice.near + off, ..choice };
        let over = match choice.margin {
            0.0 => 0.0,
            margin if choice.near == 0.0 && !margin.is_nan() => f64::MAX.sqrt(),
            margin => margin / choice.near,
        };
        let [i, j, k] = choice.row;
        note(&mut held, ((i * b + j) * c + k) * d, over);
        if over <= HEALTHY {
            held.near_ties.push(choice);
        }
    }
    Ok(held)
}
