//! Across nodes that were not recorded: computed again, with how far the producer's values may be from that.
//!
//! What rounding explains of an unrecorded node, and what the errors of its sources come to, is carried on through
//! every node up to the next one that was recorded, whose bound it widens.

use parity_graph::{Op, Tensor};

use super::Steps;
use super::chosen_experts;
use super::node::hypotheses;
use super::stored::Narrowed;
use super::{attentions, operands, storage_types};
use crate::arithmetic::backend::Backend;
use crate::arithmetic::{Arithmetic, Flash, Operands, Sums};
use crate::engine::op_by_op::{Carried, Node, Unknown, Value, Values, compute};
use crate::numerics::Storage;
use crate::ops::{Args, Check, Rule, Strided};

/// What nodes that were not recorded are taken to be computed in, where nothing shows it but what follows them.
#[derive(Clone, Copy)]
pub struct Unseen {
    /// What attention multiplies.
    pub attention: Arithmetic,
    /// What operands of products with weights are rounded to; `None`: as llama.cpp has them, or not at all.
    pub products: Option<Operands>,
    /// In how many parts products with weights are summed, each of which is rounded to the type that values are kept in.
    pub parts: usize,
    /// The type that recorded values were rounded to only when they were recorded: what was not recorded was computed from
    /// better ones.
    pub recorded: Option<Storage>,
    /// The same of what sums read alone: a compiler adds a product as it has it, and rounds what is recorded of it.
    pub added: Option<Storage>,
}

impl Unseen {
    /// Nothing beside what attention multiplies.
    pub fn of(attention: Arithmetic) -> Unseen {
        Unseen { attention, products: None, parts: 1, recorded: None, added: None }
    }
}

/// What errors of the sources come to in the result, for each of its values; `None` where there are none.
pub fn carry(
    rule: &Rule,
    args: &Args<'_, f64>,
    exact: &[f64],
    sources: &[Option<Carried>],
) -> Option<Vec<f64>> {
    let mut sum: Option<Vec<f64>> = None;
    for (slot, carried) in sources.iter().enumerate() {
        let Some(carried) = carried else { continue };
        let other = further(&rule.op, args, sources, slot);
        let moved = match &other {
            Some((other, values, shape)) => {
                let sources = args.replaced(|slot| (slot == *other).then(|| Strided::whole(values, *shape)));
                (rule.carry)(&Args { sources, ..*args }, exact, slot, &carried.error)
            }
            None => (rule.carry)(args, exact, slot, &carried.error),
        };
        match &mut sum {
            Some(sum) => sum.iter_mut().zip(moved).for_each(|(sum, error)| *sum += error),
            None => sum = Some(moved),
        }
    }
    sum
}

/// Of an op that multiplies two sources which are both off: the second, its values as far from where it counts for nothing as
/// their errors let them be, and their shape. The product of both errors is part of what the result moves by: gates and ups near
/// 0, computed again from weights that an engine rounds to bf16, accused every such engine without that.
fn further(
    op: &Op,
    args: &Args<'_, f64>,
    carried: &[Option<Carried>],
    slot: usize,
) -> Option<(usize, Vec<f64>, [usize; 4])> {
    use Op::{Geglu, GegluErf, Mul, Reglu, Swiglu, SwigluClamp, SwigluOai};
    if slot != 0 || !matches!(op, Mul | Reglu | Geglu | GegluErf | Swiglu | SwigluOai | SwigluClamp) {
        return None;
    }
    let (other, error) = (args.get(1)?, &carried.get(1)?.as_ref()?.error);
    // It multiplies with up + 1.
    let nothing = if *op == SwigluOai { -1.0 } else { 0.0 };
    let off = |(x, error): (&f64, &f64)| x + error.copysign(x - nothing);
    Some((1, other.values().iter().zip(error).map(off).collect(), other.shape()))
}

/// The nodes that sources were computed again through, each once.
fn through(sources: &[Option<Carried>]) -> Vec<usize> {
    let mut through: Vec<usize> =
        sources.iter().flatten().flat_map(|carried| carried.through.clone()).collect();
    through.sort_unstable();
    through.dedup();
    through
}

/// A movement: its values, and the errors that are moved with them.
pub fn moved(node: &Node<'_>, args: std::result::Result<&Args<'_, f64>, &Unknown>) -> Value<f64> {
    let mut values = crate::engine::op_by_op::own(node, args)?;
    if let (Ok(args), Some(rule)) = (args, node.rule) {
        let error = carry(rule, args, &values.data, &node.carried);
        values.carried = error.map(|error| Carried { error, through: through(&node.carried) });
    }
    Ok(values)
}

/// A node that was not recorded: its exact values, and unless it is `alone`, up to how far those of a producer that keeps
/// them in `kept` may be from them.
///
/// # Errors
/// Where nothing can be said of it: its sources are not known, it has no rule, or rounding decides what it chooses.
pub fn across(
    steps: &dyn Steps,
    node: &Node<'_>,
    args: std::result::Result<&Args<'_, f64>, &Unknown>,
    (kept, unseen, alone): (Storage, &Unseen, bool),
) -> Value<f64> {
    let args = args.map_err(Clone::clone)?;
    let rule = node.rule.ok_or_else(|| Unknown::no_rule(args.name, &node.program.graph.get(node.id).op))?;
    let bound = match &rule.check {
        Check::Bound(bound) | Check::Settled { bound, .. } => Some(bound),
        Check::Exact => None,
        Check::Choice(_) => {
            let data = chosen_experts::settled(node, args).ok_or_else(|| Unknown::new(args.name))?;
            let carried = Carried { error: vec![0.0; data.len()], through: with(node) };
            return Ok(Values { data, carried: Some(carried) });
        }
    };
    // An engine of a narrower type has its cache in that: below.
    let attention = if kept == Storage::F32 { &unseen.attention } else { &Arithmetic::EXACT };
    let narrowed = Narrowed::of(&rule.op, args, attention);
    let carried = narrowed.carried(&rule.op, args, attention, &node.carried);
    let args = &Args { sources: narrowed.sources(args), ..*args };
    let tensor = node.program.graph.get(node.id);
    let products = unseen.products.filter(|_| storage_types::is_product(&rule.op, args));
    let arithmetics = match products {
        Some(operands) => vec![Arithmetic { operands, ..Arithmetic::EXACT }],
        None if attentions::reads_cache(&rule.op, args) && attention.is_of_a_device() => vec![*attention],
        None => followed(steps, tensor, args),
    };
    let added = unseen.added.filter(|_| rule.op == Op::Add);
    let better = Arithmetic { recorded: unseen.recorded.or(added), ..Arithmetic::EXACT };
    let under = |arithmetic| Args { arithmetic, sources: args.sources.clone(), ..*args };
    let cpu = under(&arithmetics[0]);
    let data = compute::<f64>(rule, &cpu)?;
    if alone {
        return Ok(data.into());
    }
    // llama.cpp adds rows up in f64; in which order and type another engine does is not known.
    let sums = if tensor.backend.is_none() { Sums::Single } else { cpu.arithmetic.sums };
    let sums = Arithmetic { sums, ..*cpu.arithmetic };
    let in_any_order = under(&sums);
    let mut error = bound.map_or_else(|| vec![0.0; data.len()], |bound| bound(&in_any_order, &data));
    // Of scores over a cache in blocks ties come to more than mistakes of attention do, in recordings that have none: they
    // are taken to be as the likeliest kernel rounds them.
    if let Check::Settled { unsettled, .. } = &rule.check
        && storage_types::is_product(&rule.op, args)
    {
        error.iter_mut().zip(unsettled(&cpu)).for_each(|(error, off)| *error += off);
    }
    let differ = |error: &mut [f64], other: &[f64]| {
        error.iter_mut().zip(data.iter().zip(other)).for_each(|(error, (a, b))| *error += apart(*a, *b));
    };
    let others = furthest(rule, args, &arithmetics[1..], &data)?;
    error.iter_mut().zip(others).for_each(|(error, other)| *error += other);
    // An engine that is not llama.cpp may round activations as candle does.
    if tensor.backend.is_none() && products.is_none() && matches!(rule.op, Op::MulMat | Op::MulMatId) {
        differ(&mut error, &compute::<f64>(rule, &under(&operands::CANDLE))?);
    }
    if kept != Storage::F32 {
        let first = node.carried.iter().all(Option::is_none);
        in_narrow(rule, args, (kept, unseen.parts, first), &data, &mut error)?;
    }
    storage_types::widen(rule, &under(&better), &data, &mut error);
    if let Some(carried) = carry(rule, &cpu, &data, &carried) {
        let own = Arithmetic { narrow: kept, ..Arithmetic::EXACT };
        storage_types::add_carried(&own, &data, &carried, &mut error);
    }
    Ok(Values { data, carried: Some(Carried { error, through: with(node) }) })
}

/// Adds what a producer that keeps its values in `kept` may round; where what a node reads was recorded it is the `first` of
/// those that were not.
fn in_narrow(
    rule: &Rule,
    args: &Args<'_, f64>,
    (kept, parts, first): (Storage, usize, bool),
    data: &[f64],
    error: &mut [f64],
) -> std::result::Result<(), Unknown> {
    let arithmetic = Arithmetic { narrow: kept, cache: kept, parts, ..Arithmetic::EXACT };
    let narrowed = Narrowed::of(&rule.op, args, &arithmetic);
    let rounded = Args { arithmetic: &arithmetic, sources: narrowed.sources(args), ..*args };
    let third = compute::<f64>(rule, &rounded)?;
    match storage_types::is_one_step(&rule.op) && first {
        // Of recorded values it is known which are numbers of that type already.
        true => {
            let mut stored = third.clone();
            kept.store(&mut stored);
            error.iter_mut().zip(stored.iter().zip(&third)).for_each(|(error, (stored, exact))| {
                *error += if stored == exact { 0.0 } else { storage_types::rounding(kept, *exact) };
            });
            storage_types::add_roots(kept, &rule.op, &rounded, &third, error);
        }
        false => storage_types::widen(rule, &rounded, data, error),
    }
    error.iter_mut().zip(data.iter().zip(&third)).for_each(|(error, (a, b))| *error += apart(*a, *b));
    storage_types::add_lost(kept, rule, &rounded, data, error);
    Ok(())
}

/// How far two values are apart; where both are the same infinity nothing differs.
fn apart(a: f64, b: f64) -> f64 {
    if a == b { 0.0 } else { (a - b).abs() }
}

/// How far from `data` a node's values are in other arithmetics, the furthest of each.
fn furthest(
    rule: &Rule,
    args: &Args<'_, f64>,
    others: &[Arithmetic],
    data: &[f64],
) -> std::result::Result<Vec<f64>, Unknown> {
    let mut furthest = vec![0.0; data.len()];
    for arithmetic in others {
        let other = compute::<f64>(rule, &Args { arithmetic, sources: args.sources.clone(), ..*args })?;
        for (furthest, (a, b)) in furthest.iter_mut().zip(data.iter().zip(&other)) {
            let own = apart(*a, *b);
            *furthest = if own <= *furthest { *furthest } else { own };
        }
    }
    Ok(furthest)
}

/// The arithmetics that a node's producer may have followed, the likeliest first. Which of them is not seen where the
/// node was not recorded: all are allowed for.
fn followed(steps: &dyn Steps, tensor: &Tensor, args: &Args<'_, f64>) -> Vec<Arithmetic> {
    let tried = hypotheses(&tensor.op, tensor.backend.as_deref(), args);
    // Of sums in an order that nobody knows a product that was not recorded does not show which one it was: following the
    // likeliest accused what reads it, by a million times its bound.
    if let Some(any) = tried.iter().find(|one| one.is_unordered()) {
        return vec![any.arithmetic];
    }
    let mut tried = tried.into_iter().map(|one| one.arithmetic);
    // A producer may declare that it rounds no operand.
    let plain = storage_types::is_declared_plain(steps, &tensor.op, args);
    let likeliest = tried.next().filter(|_| !plain).unwrap_or(Arithmetic::EXACT);
    let others: Vec<Arithmetic> = match tensor.backend.as_deref().and_then(Backend::of) {
        // How CUDA's attention is cut depends on the card, and what meets a cache in blocks on the build.
        Some(Backend::Cuda) if tensor.op == Op::FlashAttn => {
            let sums = |flash: &Flash| matches!((likeliest.flash, flash), (Flash::Units(_), Flash::Units(_)));
            tried.filter(|one| sums(&one.flash) || matches!(one.flash, Flash::Vector(_))).collect()
        }
        // Of a device the shape says else which kernel it was.
        Some(_) => Vec::new(),
        None => vec![Arithmetic::EXACT],
    };
    [likeliest].into_iter().chain(others.into_iter().filter(|other| *other != likeliest)).collect()
}

/// The nodes that a node's sources were computed again through, and itself.
fn with(node: &Node<'_>) -> Vec<usize> {
    let mut through = through(&node.carried);
    through.push(node.id);
    through
}
