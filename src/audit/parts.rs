//! Where the difference between candidate and reference comes from, node by node.
//!
//! With f the exact node, a and b the recorded outputs and x, y the recorded inputs of candidate and
//! reference, a - b = (a - f(x)) + (f(x) - f(y)) + (f(y) - b): the candidate's rounding, what the inputs
//! differed by, and the reference's rounding.

use super::Exact;
use super::local::relative;
use crate::report::DifferenceParts;
use crate::tensor::Matrix;

/// The parts, each relative to the reference. `None` where the sides were not audited at the same rows, or
/// the reference is all zeros.
pub fn of(candidate: &Exact, reference: &Exact) -> Option<DifferenceParts> {
    let (a, b) = (&candidate.case.recorded, &reference.case.recorded);
    let (fx, fy) = (&candidate.plain, &reference.plain);
    if candidate.case.positions != reference.case.positions || a.cols != b.cols || fx.cols != fy.cols {
        return None;
    }
    let scale = norm(b);
    if !(scale > 0.0) {
        return None;
    }
    let inherited = distance(fx, fy) / scale;
    Some(DifferenceParts {
        candidate: distance(a, fx) / scale,
        reference: distance(fy, b) / scale,
        inherited,
        amplification: amplification(candidate, reference, inherited),
    })
}

/// Output distance over the largest input distance, both relative.
fn amplification(candidate: &Exact, reference: &Exact, inherited: f64) -> Option<f64> {
    let pairs = candidate.case.inputs.iter().zip(&reference.case.inputs);
    let same_shape = |(x, y): &(&super::case::Input, &super::case::Input)| {
        (x.value.rows, x.value.cols) == (y.value.rows, y.value.cols)
    };
    let distances = pairs.filter(same_shape).map(|(x, y)| relative(&x.value, &y.value));
    let largest = distances.fold(0.0f64, f64::max);
    (largest > 0.0 && largest.is_finite()).then_some(inherited / largest)
}

fn distance(a: &Matrix<f64>, b: &Matrix<f64>) -> f64 {
    a.data.iter().zip(&b.data).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
}

fn norm(a: &Matrix<f64>) -> f64 {
    a.data.iter().map(|a| a * a).sum::<f64>().sqrt()
}
