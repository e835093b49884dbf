//! A node in a coarser arithmetic than the engine around it: TF32 that is silently on, a bf16 RoPE, softmax or norm.
//!
//! Each way of rounding is repeated step by step from the node's recorded inputs. What a rounding leaves is as good as
//! random: a repetition that accounts for nine tenths of the squared error is no accident, and no other mistake looks
//! like it. What is left are values that lie so near the middle between two numbers of the type that f32 decides.

use parity_graph::{Id, Op};

use super::sample::Sample;
use crate::arithmetic::{
    Angles, Arithmetic, Flash, HalfSums, Narrow, OfAttention, Operands, Scaled, Softmax, Weights,
};
use crate::audit::products;
use crate::audit::{Named, Suspect};
use crate::engine::op_by_op::compute;
use crate::numerics::Storage;
use crate::ops::bound::storage_unit;
use crate::ops::source::Data;
use crate::ops::{Args, Source};
use crate::report::Diagnosis;
use parity_graph::fault::find;

/// Share of the squared error that a rounding accounts for, see above.
const EXPLAINS_MIN: f64 = 0.9;

/// Two roundings that leave squared errors within this factor are not told apart: each is f32's own, over the same values.
pub const ALIKE: f64 = 2.0;

/// The types that are tried, with their names.
const TYPES: [(Storage, &str); 2] = [(Storage::Bf16, "bf16"), (Storage::F16, "f16")];

/// Types that operands of products are rounded to, with the names of the faults.
const OPERANDS: [(&str, Narrow); 5] = [
    ("precision.tf32", Narrow::Tf32),
    ("precision.tf32", Narrow::Tf32Away),
    ("precision.tf32", Narrow::Tf32Cut),
    ("precision.f16_operands", Narrow::F16),
    ("precision.bf16_operands", Narrow::Bf16),
];

/// The roundings that explain a node's output, the likeliest first.
pub fn coarser(suspect: &Suspect<'_>, sample: Option<&Sample<'_, '_>>) -> Vec<Named> {
    let mut found: Vec<Named> = Vec::new();
    for (name, values) in attempts(suspect, sample) {
        let Some(named) = named(suspect, &name, &values) else { continue };
        // Several orders of one kind of rounding: what leaves least.
        match found.iter_mut().find(|known| known.diagnosis.fault == named.diagnosis.fault) {
            Some(known) if named.left < known.left => *known = named,
            Some(_) => {}
            None => found.push(named),
        }
    }
    // TF32 and f16 have the same significant bits: where they leave the same but for f32's own rounding, the first of
    // the catalogue is told.
    let least = found.iter().map(|named| named.left).fold(f64::INFINITY, f64::min);
    found.retain(|named| named.left <= ALIKE * least);
    found.truncate(1);
    found
}

fn named(suspect: &Suspect<'_>, name: &str, values: &[f64]) -> Option<Named> {
    let Suspect { recorded, sight, held, .. } = *suspect;
    let pairs = recorded.iter().zip(values).enumerate().filter(|(i, _)| (sight.looked_at)(*i));
    let left: f64 = pairs.map(|(_, (recorded, own))| (recorded - own).powi(2)).sum();
    let explains = 1.0 - left / held.squares[0];
    told(name, explains, left).filter(|_| values.len() == recorded.len() && explains >= EXPLAINS_MIN)
}

/// A coarser arithmetic by the name of its fault, which accounts for so much of a squared error and leaves the rest.
pub fn told(name: &str, explains: f64, left: f64) -> Option<Named> {
    let entry = find(name)?;
    let (text, fix) = (entry.summary.to_owned(), Some(entry.fix.to_owned()));
    let diagnosis = Diagnosis { fault: entry.name.to_owned(), explains, text, fix };
    Some(Named { diagnosis, spelling: entry.name.to_owned(), left, rest: 0.0, reaches: None, values: 0 })
}

/// What the node comes to in every coarser arithmetic that does not leave too much in a sample of it.
fn attempts(suspect: &Suspect<'_>, sample: Option<&Sample<'_, '_>>) -> Vec<(String, Vec<f64>)> {
    let args = suspect.args;
    let Some(rule) = suspect.node.rule else { return Vec::new() };
    let most = (1.0 - EXPLAINS_MIN) * suspect.held.squares[0];
    let under = |arithmetic: &Arithmetic| {
        if sample.is_some_and(|sample| sample.is_hopeless_in(arithmetic, most)) {
            return None;
        }
        compute::<f64>(rule, &Args { arithmetic, sources: args.sources.clone(), ..*args }).ok()
    };
    let weight = args.get(0).is_some_and(|source| matches!(source.data, Data::Weight(_)));
    let all: Vec<(String, Arithmetic)> = match rule.op {
        Op::MulMat | Op::MulMatId if weight => of_products(),
        Op::MulMat => operands().collect(),
        Op::Rope | Op::SoftMax => out_of_products(&rule.op),
        Op::FlashAttn => out_of_products(&rule.op).into_iter().chain(of_attention()).collect(),
        Op::RmsNorm | Op::Mul => return of_norm(suspect),
        _ => return Vec::new(),
    };
    all.into_iter().filter_map(|(name, arithmetic)| Some((name, under(&arithmetic)?))).collect()
}

/// Coarser arithmetics of an op that are none of its products, with the names of the faults.
pub fn out_of_products(op: &Op) -> Vec<(String, Arithmetic)> {
    match op {
        Op::Rope => TYPES.into_iter().flat_map(|(kept, name)| angles(kept, name)).collect(),
        Op::FlashAttn | Op::SoftMax => of_softmax().collect(),
        _ => Vec::new(),
    }
}

/// Products with both operands rounded.
fn operands() -> impl Iterator<Item = (String, Arithmetic)> {
    OPERANDS.into_iter().map(|(name, narrow)| (name.to_owned(), products(narrow)))
}

fn of_products() -> Vec<(String, Arithmetic)> {
    let sums = [
        HalfSums::Plain { fused: false },
        HalfSums::Plain { fused: true },
        HalfSums::Running { fused: false },
        HalfSums::Running { fused: true },
        HalfSums::Groups { parts: 1, narrow: true },
    ];
    let of = |sums| Arithmetic { operands: Operands::Half(sums), ..Arithmetic::EXACT };
    operands().chain(sums.map(|sums| ("precision.f16_sum".to_owned(), of(sums)))).collect()
}

/// Attention with the operands of both products rounded, queries and keys before or after they are scaled, its weights
/// before or after they are divided by their sum.
fn of_attention() -> impl Iterator<Item = (String, Arithmetic)> {
    operands().zip(OPERANDS).flat_map(|((name, one), (_, narrow))| {
        let each = [Scaled::Scores, Scaled::Queries, Scaled::Both]
            .map(|scaled| [Weights::Divided, Weights::Undivided].map(|when| (when, scaled)));
        each.into_iter().flatten().map(move |(when, scaled)| {
            (
                name.clone(),
                Arithmetic { flash: Flash::Rounded(narrow, OfAttention::all(when), scaled), ..one },
            )
        })
    })
}

fn angles(kept: Storage, name: &str) -> Vec<(String, Arithmetic)> {
    let arithmetic =
        |throughout| Arithmetic { angles: Angles::Coarse { kept, throughout }, ..Arithmetic::EXACT };
    let frequencies = Arithmetic { angles: Angles::OfFrequencies(kept), ..Arithmetic::EXACT };
    let mut out = vec![(format!("precision.{name}_frequencies"), frequencies)];
    out.extend([false, true].map(|throughout| (format!("precision.{name}_angles"), arithmetic(throughout))));
    out
}

fn of_softmax() -> impl Iterator<Item = (String, Arithmetic)> {
    TYPES.into_iter().flat_map(|(kept, name)| softmax(kept, name))
}

fn softmax(kept: Storage, name: &str) -> Vec<(String, Arithmetic)> {
    let arithmetic = |scores| Arithmetic {
        softmax: Softmax { scores, weights: kept, ..Softmax::F32 },
        ..Arithmetic::EXACT
    };
    [kept, Storage::F32].map(|scores| (format!("precision.{name}_softmax"), arithmetic(scores))).to_vec()
}

/// A norm, and the product of one with its weight, in every order of the roundings.
fn of_norm(suspect: &Suspect<'_>) -> Vec<(String, Vec<f64>)> {
    let Some(norm) = Norm::of(suspect) else { return Vec::new() };
    let mut out = Vec::new();
    for (kept, name) in TYPES {
        for (mean, order) in [false, true].into_iter().flat_map(|mean| Order::ALL.map(|order| (mean, order)))
        {
            out.push((format!("precision.{name}_norm"), norm.values(kept, mean, order, suspect.recorded)));
        }
    }
    out
}

/// In which order a norm multiplies, and what of it is rounded.
#[derive(Clone, Copy)]
enum Order {
    /// The row times its scale, then the weight, all rounded.
    ScaleFirst,
    /// The row times the weight, then the scale, all rounded.
    WeightFirst,
    /// Only the row and the result are rounded.
    Ends,
    /// The row times its scale, rounded; the weight is of the wider type, and so is the result.
    RowAlone,
}

impl Order {
    const ALL: [Order; 4] = [Order::ScaleFirst, Order::WeightFirst, Order::Ends, Order::RowAlone];
}

/// An RMS norm with its weight, if it has one.
struct Norm {
    x: Vec<f64>,
    width: usize,
    eps: f64,
    weight: Vec<f64>,
}

impl Norm {
    /// Of a norm, or of a product of one with a weight.
    fn of(suspect: &Suspect<'_>) -> Option<Norm> {
        let graph = &suspect.node.program.graph;
        let own = suspect.node.id;
        let is_norm = |id: Id| !graph.is_leaf(id) && graph.get(id).op == Op::RmsNorm;
        let (norm, weight) = match graph.get(own).op {
            Op::RmsNorm => (own, None),
            _ => {
                let slot = (0..2).find(|slot| graph.src(own, *slot).is_some_and(is_norm))?;
                (graph.src(own, slot)?, Some(suspect.args.get(1 - slot)?))
            }
        };
        let x = match weight {
            None => suspect.args.get(0)?.values().into_owned(),
            Some(_) => (suspect.others)(graph.origin(graph.src(norm, 0)?))?,
        };
        let width = graph.get(norm).ne[0];
        let weight = match weight {
            None => vec![1.0; width],
            Some(weight) => of_weight(weight, width)?,
        };
        let eps = f64::from(graph.get(norm).params.float(0));
        (width > 0 && x.len().is_multiple_of(width)).then_some(Norm { x, width, eps, weight })
    }

    /// The result where everything is kept in a narrow type; `mean` where the mean square is too. In which order the squares
    /// were added is not known: the scale of a row may be a number of the type beside, and what was recorded tells.
    fn values(&self, kept: Storage, mean: bool, order: Order, recorded: &[f64]) -> Vec<f64> {
        let round = |value: f64| rounded(kept, value);
        let inner = |value: f64| if mean { round(value) } else { value };
        let weights: Vec<f64> = self.weight.iter().map(|w| round(*w)).collect();
        let mut out = Vec::with_capacity(self.x.len());
        for (row, recorded) in self.x.chunks(self.width).zip(recorded.chunks(self.width)) {
            let row: Vec<f64> = row.iter().map(|x| round(*x)).collect();
            let square = row.iter().map(|x| inner(x * x)).sum::<f64>() / self.width as f64;
            let scale = inner(1.0 / inner(inner(square) + inner(self.eps)).sqrt());
            let scaled = |scale: f64| -> Vec<f64> {
                let of = |(x, w): (&f64, &f64)| match order {
                    Order::ScaleFirst => round(w * round(x * scale)),
                    Order::WeightFirst => round(round(w * x) * scale),
                    Order::Ends => round(w * x * scale),
                    Order::RowAlone => w * round(x * scale),
                };
                match order {
                    Order::RowAlone => row.iter().zip(&self.weight).map(of).collect(),
                    _ => row.iter().zip(&weights).map(of).collect(),
                }
            };
            let scales = if mean { beside(kept, scale) } else { vec![scale] };
            let left = |values: &Vec<f64>| -> f64 {
                values.iter().zip(recorded).map(|(own, recorded)| (own - recorded).powi(2)).sum()
            };
            let nearest = scales.into_iter().map(scaled).min_by(|a, b| left(a).total_cmp(&left(b)));
            out.extend(nearest.unwrap_or_default());
        }
        out
    }
}

fn rounded(kept: Storage, value: f64) -> f64 {
    let mut values = [value];
    kept.store(&mut values);
    values[0]
}

/// A number of a narrow type, and those before and behind it.
fn beside(kept: Storage, value: f64) -> Vec<f64> {
    // Between 0.6 and 1.3 steps, wherever the number lies between two powers of two: rounded, the next one.
    let away = 1.25 * storage_unit(kept);
    [value, value * (1.0 - away), value * (1.0 + away)].map(|value| rounded(kept, value)).to_vec()
}

/// The values of a norm's weight.
fn of_weight(weight: &Source<'_, f64>, width: usize) -> Option<Vec<f64>> {
    let values = weight.values().into_owned();
    (values.len() == width).then_some(values)
}
