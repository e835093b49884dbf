//! A recorded output against its exact one: the local error of a node.

use super::case::Case;
use super::judge::Explained;
use super::recorded::NodeAudit;
use crate::ops::bound::HEALTHY;
use crate::report::LocalError;
use crate::tensor::Matrix;

/// Judges a case by the explanation that fits best: the declared arithmetic may be one of several.
pub fn judge(
    case: &Case,
    explained: &[Explained],
    plain: Option<&Matrix<f64>>,
    row_shape: &[usize],
) -> Option<NodeAudit> {
    let audits = explained.iter().map(|explained| against(case, explained, plain, row_shape));
    audits.reduce(|best, next| if better(&next, &best) { next } else { best })
}

/// Healthy before not, then nearer to exact; without health, nearer to its bound.
fn better(a: &NodeAudit, b: &NodeAudit) -> bool {
    match (a.is_healthy(), b.is_healthy()) {
        (true, true) => a.local.rel_l2 < b.local.rel_l2,
        (false, false) => a.local.over_bound < b.local.over_bound,
        (a, _) => a,
    }
}

fn against(
    case: &Case,
    explained: &Explained,
    plain: Option<&Matrix<f64>>,
    row_shape: &[usize],
) -> NodeAudit {
    let (recorded, exact, bound) = (&case.recorded, &explained.exact, &explained.bound);
    let mut worst = Worst::default();
    let (mut rows_beyond, mut beyond) = (Vec::new(), vec![false; exact.cols]);
    for t in 0..exact.rows {
        let before = rows_beyond.len();
        for (column, ((recorded, exact), bound)) in
            recorded.row(t).iter().zip(exact.row(t)).zip(bound.row(t)).enumerate()
        {
            let error = (recorded - exact).abs();
            // Neither the worst nor beyond: most are, and a division is dear.
            if bound.is_finite() && error <= bound * worst.over.min(HEALTHY) {
                continue;
            }
            let over = over_bound(error, *bound);
            worst.note(over, t, column);
            if !(over <= HEALTHY) {
                beyond[column] = true;
                if rows_beyond.len() == before {
                    rows_beyond.push(case.positions[t]);
                }
            }
        }
    }
    let finite = |m: &Matrix<f64>| m.data.iter().all(|x| x.is_finite());
    let local = LocalError {
        rel_l2: relative(recorded, exact),
        over_bound: worst.over,
        bound_rel_l2: Some(norm(bound) / norm(exact)).filter(|ratio| ratio.is_finite()),
        rel_l2_plain: plain.map(|plain| relative(recorded, plain)),
        worst: index(case.positions.get(worst.row).copied().unwrap_or(0), worst.column, row_shape),
        rows: exact.rows as u64,
        bridged: case.bridged.clone(),
        arithmetic: Vec::new(),
    };
    NodeAudit {
        local,
        nonfinite: recorded.data.iter().filter(|x| !x.is_finite()).count() as u64,
        nonfinite_inputs: !case.inputs.iter().all(|input| finite(&input.value)),
        rows_beyond,
        columns_beyond: (0..exact.cols).filter(|&column| beyond[column]).collect(),
    }
}

/// error / bound, as large as can be written where nothing is allowed; an exact value needs no bound. NaN, also
/// of a bound that is not finite: what explains everything explains nothing.
fn over_bound(error: f64, bound: f64) -> f64 {
    match error {
        0.0 => 0.0,
        _ if !bound.is_finite() => f64::NAN,
        _ if bound == 0.0 && !error.is_nan() => f64::MAX.sqrt(),
        _ => error / bound,
    }
}

/// The largest ratio so far; NaN is the largest of all.
#[derive(Default)]
struct Worst {
    over: f64,
    row: usize,
    column: usize,
}

impl Worst {
    fn note(&mut self, over: f64, row: usize, column: usize) {
        if !(over <= self.over) && !self.over.is_nan() {
            *self = Worst { over, row, column };
        }
    }
}

/// ‖a - b‖ / ‖b‖; 0 where both are nothing.
pub fn relative(a: &Matrix<f64>, b: &Matrix<f64>) -> f64 {
    let difference = a.data.iter().zip(&b.data).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
    if difference == 0.0 { 0.0 } else { difference / norm(b) }
}

fn norm(a: &Matrix<f64>) -> f64 {
    a.data.iter().map(|a| a * a).sum::<f64>().sqrt()
}

/// Coordinates of a column, slowest axis first, the token row by its position.
pub fn index(position: u32, column: usize, row_shape: &[usize]) -> Vec<usize> {
    let mut rest = column;
    let mut inner: Vec<usize> = Vec::with_capacity(row_shape.len() + 1);
    for &axis in row_shape.iter().rev() {
        inner.push(rest % axis.max(1));
        rest /= axis.max(1);
    }
    inner.push(position as usize);
    inner.reverse();
    inner
}
