//! One case against exact arithmetic: under each arithmetic that its producer's words allow, the exact output
//! and what rounding explains.

use super::attention::{Operands, attend};
use super::bounds::{self, CONFIDENCE, Units};
use super::bridge;
use super::case::{Case, Context};
use super::linear::{Job, Magnitude, Product, products};
use crate::arithmetic::round::{self, AttentionRounding, Rounding, Tie};
use crate::error::Result;
use crate::gguf::DType;
use crate::model::graph::{Attention, Op};
use crate::model::weights::Weight;
use crate::numerics::{Numerics, Products, Storage};
use crate::tensor::Matrix;

/// The exact output of a node under one arithmetic, and the bound of a producer's distance from it.
pub struct Explained {
    /// (T, width)
    pub exact: Matrix<f64>,
    /// (T, width), not negative.
    pub bound: Matrix<f64>,
    /// Whether roundings of the producer are followed in `exact`.
    pub emulated: bool,
}

/// Exact arithmetic that follows nobody's rounding.
pub const PLAIN: Numerics =
    Numerics { products: Products::F64, storage: Storage::F32, kv: Storage::F32, flash: false };

/// Explains a case on its own. Products that share a weight are explained together by [`explain_products`].
pub fn explain(context: &Context<'_>, case: &Case) -> Result<Vec<Explained>> {
    if let Op::Linear { weight, .. } = &case.node.op {
        let weight = Weight::find(context.gguf, weight)?;
        let pending = Pending::new(context, case, &weight);
        let out = products(&weight, &pending.jobs);
        return Ok(vec![pending.finish(case, &pending.jobs[0].columns, &out).0]);
    }
    let units = Units::of(&context.numerics);
    let mut explained = match &case.node.op {
        Op::Attention(op) => attention(context, case, op, &units),
        _ => vec![elementwise(context, case, &units)?],
    };
    if let Some(first) = explained.first_mut()
        && let Some(carried) = bridge::carried(context, case, &first.exact)
    {
        first.bound = bounds::zip(&first.bound, &carried, |a, b| a + b);
    }
    Ok(explained)
}

/// All ops but products and whole attention.
fn elementwise(context: &Context<'_>, case: &Case, units: &Units) -> Result<Explained> {
    let numerics = &context.numerics;
    let exact = match case.node.op {
        Op::Embed { .. } => embed_exact(context, case)?,
        _ => case.execute(&case.node, context.gguf, numerics)?,
    };
    let x = |index: usize| case.inputs[index].value.view();
    let bound = match &case.node.op {
        Op::Embed { table } => {
            let dtype = Weight::find(context.gguf, table)?.dtype();
            bounds::embed(units, &exact, !matches!(dtype, DType::F32 | DType::F16 | DType::BF16))
        }
        Op::Norm(norm) => bounds::norm(units, norm.width, x(0), &exact),
        Op::Bias { bias: None, .. } => bounds::map(&exact, |_| 0.0),
        Op::Bias { .. } | Op::Add { .. } => bounds::sum(units, x(0), &exact),
        Op::Glu(_) => bounds::glu(units, x(0), x(1), &exact),
        Op::Rope(rope) => {
            let freqs = match &rope.freqs {
                Some(freqs) => Weight::find(context.gguf, freqs)?.decode(),
                None => Vec::new(),
            };
            bounds::rope(units, rope, &freqs, case.rows(), x(0))
        }
        Op::Softmax(op) => bounds::softmax(units, op.scale, op.heads, x(0), &exact),
        Op::Scores(op) => products_of_heads(context, case, op.head_width, &exact, units)?,
        Op::Context(_) => products_of_heads(context, case, case.inputs[1].value.rows, &exact, units)?,
        Op::Linear { .. } | Op::Attention(_) => unreachable!("explained by their own functions"),
    };
    Ok(Explained { emulated: follows_rounding(numerics, &case.node.op), exact, bound })
}

/// Table rows as engines decode them: in f32.
fn embed_exact(context: &Context<'_>, case: &Case) -> Result<Matrix<f64>> {
    let inputs = crate::dense::Inputs { rows: case.rows(), values: &[] };
    let rows: Matrix<f32> = crate::dense::execute(&case.node, context.gguf, inputs, &PLAIN)?;
    Ok(Matrix::new(rows.rows, rows.cols, rows.data.iter().map(|&x| f64::from(x)).collect()))
}

/// Scores or context: the same product of squares gives the size of their terms.
fn products_of_heads(
    context: &Context<'_>,
    case: &Case,
    inner: usize,
    exact: &Matrix<f64>,
    units: &Units,
) -> Result<Matrix<f64>> {
    let squares: Vec<Matrix<f64>> =
        case.inputs.iter().map(|input| bounds::map(&input.value, |x| x * x)).collect();
    let values: Vec<_> = squares.iter().map(Matrix::view).collect();
    let inputs = crate::dense::Inputs { rows: case.rows(), values: &values };
    let sums = crate::dense::execute(&case.node, context.gguf, inputs, &PLAIN)?;
    Ok(bounds::linear(units, inner, &bounds::map(&sums, f64::sqrt), exact))
}

fn attention(context: &Context<'_>, case: &Case, op: &Attention, units: &Units) -> Vec<Explained> {
    let [q, k, v] = &case.inputs[..] else { return Vec::new() };
    let operands = Operands {
        q: q.value.view(),
        k: k.value.view(),
        v: v.value.view(),
        bounds: [q, k, v].map(|input| input.bound.as_ref().map(Matrix::view)),
    };
    let step_rows = case.steps.iter().map(|step| step.len()).max().unwrap_or(1);
    AttentionRounding::all(&context.numerics, step_rows)
        .into_iter()
        .map(|rounding| {
            let (exact, bound) = attend(op, &operands, case.rows(), rounding, units);
            Explained { exact, bound, emulated: follows_rounding(&context.numerics, &case.node.op) }
        })
        .collect()
}

/// Whether the exact output of an op follows a rounding that its producer declares.
pub fn follows_rounding(numerics: &Numerics, op: &Op) -> bool {
    let plain = AttentionRounding::of(&PLAIN);
    match op {
        Op::Scores(_) | Op::Context(_) | Op::Attention(_) => AttentionRounding::of(numerics) != plain,
        Op::Rope(_) => numerics.products == Products::LlamaCpu,
        _ => false,
    }
}

/// A product whose pass over the weight is still to come.
pub struct Pending {
    /// What to ask of the weight. The first is the product under the producer's own rounding.
    pub jobs: Vec<Job>,
    /// Which of them is the product without anybody's rounding, where that differs.
    plain: Option<usize>,
    /// Whether the producer may compute that instead.
    plain_too: bool,
    /// Which of them is the product with weights that are not rounded, where the producer may leave them so.
    unrounded: Option<usize>,
    /// Which of them gives the bound of roundings that are not followed.
    unfollowed: Option<usize>,
    /// Which of them carries the bound of bridged inputs on.
    carried: Option<usize>,
    ties: Vec<Tie>,
    units: Units,
    inner: usize,
}

impl Pending {
    /// Prepares the jobs of a linear case.
    pub fn new(context: &Context<'_>, case: &Case, weight: &Weight<'_>) -> Pending {
        let products = context.numerics.products;
        let input = &case.inputs[0];
        let x = &input.value;
        let declared = Rounding::of(products, weight.dtype());
        // Where the activations themselves are only known within a bound, their rounding cannot be followed.
        let followed = if input.bound.is_some() { Rounding::None } else { declared };
        let rounded = round::activations(followed, x.view());
        let ties = round::few_per_row(rounded.ties, x.rows);
        let mut columns: Vec<usize> = ties.iter().map(|tie| tie.col).collect();
        columns.sort_unstable();
        columns.dedup();
        let weights = round::weight_storage(products);
        let own =
            Job { x: rounded.values, sums: rounded.sums, columns, weights, magnitude: Magnitude::Terms };
        let scales_sums = round::may_scale_sums(products, weight.dtype()).then(|| own.x.clone());
        let mut jobs = vec![own];
        let mut add = |x: Matrix<f64>, magnitude| {
            let sums = Matrix::zeros(x.rows, 0);
            jobs.push(Job { x, sums, columns: Vec::new(), weights: Storage::F32, magnitude });
            jobs.len() - 1
        };
        let unrounded = scales_sums.map(|x| add(x, Magnitude::None));
        let no_rows = || Matrix::zeros(0, x.cols);
        let plain = (declared != Rounding::None).then(|| add(x.clone(), Magnitude::None));
        let unfollowed = unfollowed_steps(products, weight.dtype(), declared, followed, x)
            .map(|steps| add(no_rows(), Magnitude::Quadrature(steps)));
        let carried = input.bound.as_ref().map(|bound| match input.independent {
            true => add(no_rows(), Magnitude::Quadrature(bounds::map(bound, |b| CONFIDENCE * b))),
            false => add(no_rows(), Magnitude::Sum(bound.clone())),
        });
        let units = Units::of(&context.numerics);
        let plain_too = round::may_leave_activations(products, weight.dtype());
        Pending { jobs, plain, plain_too, unrounded, unfollowed, carried, ties, units, inner: x.cols }
    }

    /// The explanation, and the plain exact product where it differs.
    ///
    /// `columns` are those that the first job asked for, `out` what its jobs gave.
    pub fn finish(
        &self,
        case: &Case,
        columns: &[usize],
        out: &[Product],
    ) -> (Explained, Option<Matrix<f64>>) {
        let own = &out[0];
        let mut exact = own.exact.clone();
        let mut bound = bounds::linear(&self.units, self.inner, &own.magnitude, &exact);
        if let Some(unfollowed) = self.unfollowed {
            bound = bounds::zip(&bound, &out[unfollowed].magnitude, |bound, q| bound + CONFIDENCE * q);
        }
        if let Some(carried) = self.carried {
            bound = bounds::zip(&bound, &out[carried].magnitude, |bound, carried| bound + carried);
        }
        if case.recorded.rows == exact.rows && case.recorded.cols == exact.cols {
            self.settle_ties(case, columns, own, &mut exact);
            if let Some(unrounded) = self.unrounded {
                likelier_rows(&case.recorded, &out[unrounded].exact, &bound, &mut exact);
            }
            if let Some(plain) = self.plain.filter(|_| self.plain_too) {
                explained_rows(&case.recorded, &out[plain].exact, &bound, &mut exact);
            }
        }
        let plain = self.plain.map(|plain| out[plain].exact.clone());
        (Explained { exact, bound, emulated: plain.is_some() }, plain)
    }

    /// A tie is rounded to the side that the recorded output says: each moves all outputs of its row by a
    /// known column of the weight, so that the output shows it hundreds of times over.
    fn settle_ties(&self, case: &Case, wanted: &[usize], own: &Product, exact: &mut Matrix<f64>) {
        for tie in &self.ties {
            let Ok(column) = wanted.binary_search(&tie.col) else { continue };
            let w = own.columns.row(column);
            let minima = if own.minima.rows > 0 { own.minima.row(column) } else { &[] };
            let moved = |o: usize| w[o] * tie.value + minima.get(o).map_or(0.0, |m| m * tie.sum);
            let residual = case.recorded.row(tie.row).iter().zip(exact.row(tie.row));
            let (mut along, mut square) = (0.0, 0.0);
            for (o, (recorded, exact)) in residual.enumerate() {
                along += (recorded - exact) * moved(o);
                square += moved(o) * moved(o);
            }
            // Nearer to having been rounded to the other side than to this one.
            if along > 0.5 * square && along < 1.5 * square {
                exact.row_mut(tie.row).iter_mut().enumerate().for_each(|(o, exact)| *exact += moved(o));
            }
        }
    }
}

/// Takes the rows of `other` that explain what was recorded better: a producer may compute a step of one row in another
/// way than one of many. Each value is held to its own bound: in a sum over the row a few large values, whose rounding is
/// large too, would decide for all.
fn likelier_rows(recorded: &Matrix<f64>, other: &Matrix<f64>, bound: &Matrix<f64>, exact: &mut Matrix<f64>) {
    for t in 0..recorded.rows {
        if over(recorded, other, bound, t) < over(recorded, exact, bound, t) {
            exact.row_mut(t).copy_from_slice(other.row(t));
        }
    }
}

/// Takes the rows of `other` that explain what was recorded where `exact` does not.
fn explained_rows(recorded: &Matrix<f64>, other: &Matrix<f64>, bound: &Matrix<f64>, exact: &mut Matrix<f64>) {
    for t in 0..recorded.rows {
        if over(recorded, other, bound, t) <= 1.0 && !(over(recorded, exact, bound, t) <= 1.0) {
            exact.row_mut(t).copy_from_slice(other.row(t));
        }
    }
}

/// How far row `t` of what was recorded lies from another, over its bound, at the value where that is most.
fn over(recorded: &Matrix<f64>, exact: &Matrix<f64>, bound: &Matrix<f64>, t: usize) -> f64 {
    let values = recorded.row(t).iter().zip(exact.row(t)).zip(bound.row(t));
    values.map(|((recorded, exact), bound)| (recorded - exact).abs() / bound).fold(0.0, f64::max)
}

/// Half a rounding step of each activation that meets a weight of this type, where none is followed.
pub fn half_steps_unfollowed(products: Products, dtype: DType, x: &Matrix<f64>) -> Option<Matrix<f64>> {
    unfollowed_steps(products, dtype, Rounding::of(products, dtype), Rounding::None, x)
}

/// Half a rounding step of each activation whose declared rounding is not followed value by value.
fn unfollowed_steps(
    products: Products,
    dtype: DType,
    declared: Rounding,
    followed: Rounding,
    x: &Matrix<f64>,
) -> Option<Matrix<f64>> {
    let floating = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    match products {
        Products::LlamaCuda if dtype == DType::F32 => Some(round::half_steps(Rounding::F16, x)),
        Products::LlamaCuda if floating => Some(round::half_steps(Rounding::Bf16, x)),
        Products::LlamaCuda => Some(round::half_steps(Rounding::Q8_0, x)),
        _ if declared != followed => Some(round::half_steps(declared, x)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_held_to_what_explains_each_of_its_values() {
        // A large value whose rounding lies towards `other`, and a small one that `exact` alone explains.
        let bound = Matrix::new(3, 2, [1.0, 1e-3].repeat(3));
        let other = Matrix::new(3, 2, [1000.5, 0.02].repeat(3));
        let exact = Matrix::new(3, 2, [1000.0, 0.01].repeat(3));
        let recorded = Matrix::new(3, 2, vec![1000.5, 0.0101, 1000.0, 0.0201, f64::NAN, 0.01]);
        let mut chosen = exact.clone();
        likelier_rows(&recorded, &other, &bound, &mut chosen);
        assert_eq!(chosen.row(0), exact.row(0));
        assert_eq!(chosen.row(1), other.row(1));
        assert_eq!(chosen.row(2), exact.row(2));
    }
}
