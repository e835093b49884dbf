//! How errors of attention's sources are carried.

use super::super::bound::{CONFIDENCE, least_of, unit_of};
use super::super::source::Args;
use super::explain::{TWO_ROUNDINGS, UNKNOWN, each_row, narrow_sums, rounded_weights, weights};
use super::moved::{converted, moved_sums};
use super::row::{Attention, QueryRow, Seen};
use crate::arithmetic::Flash;
use crate::arithmetic::round::{Rounding, half_steps};
use crate::tensor::Matrix;

/// A weight that can become no more than this share is added by itself, and not looked at as the only one.
const REACHED: f64 = 1.0 / 1024.0;

/// First order in the errors of the scores, times what exponentials of larger ones add; of scores that say nothing of
/// their weights what any weights within their reach come to. Where the kernel rounds to f16, everything that is moved may
/// be rounded to the other side.
pub fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let (Ok(attention), Some(source)) = (Attention::new(args), args.get(slot)) else {
        return vec![0.0; exact.len()];
    };
    let [_, sh, sn, width] = source.shape();
    let of_row = |[b, h, n]: [usize; 3]| &error[((b * sh + h) * sn + n) * width..][..width];
    let steps = query_steps(args, &attention);
    each_row(args, &attention, exact, |row, exact| {
        let (p, sink) = weights(row);
        let [b, h, n] = row.at;
        let moves: Vec<f64> = row
            .seen
            .iter()
            .map(|seen| match slot {
                0 | 1 => moved_score(&attention, row, seen, slot, &of_row, &steps),
                3 => {
                    let [mb, mh, _, _] = source.shape();
                    attention.slope(h) * of_row([b % mb, h % mh, n])[seen.position]
                }
                _ => 0.0,
            })
            .collect();
        let of_value = |position: usize| match slot {
            2 => {
                let place = attention.cached(attention.v, row.at, position);
                let (errors, values) = (of_row(place), attention.v.row(place));
                let off = converted(&attention, attention.v, errors, &values).into_iter();
                let beside =
                    errors.iter().zip(values.iter()).map(|(e, v)| step_beside(&attention, VALUES, *e, *v));
                off.zip(beside).map(|(off, beside)| off + beside).collect()
            }
            _ => Vec::new(),
        };
        let of_sink = if slot == 4 { error[h] } else { 0.0 };
        let largest = moves.iter().copied().fold(of_sink, f64::max);
        let mut out = match 2.0 * largest <= UNKNOWN {
            true => first_order(&attention, row, (&p, sink), (&moves, of_sink), exact),
            false => within_reach(&attention, row, (&moves, of_sink), exact),
        };
        for (seen, p) in row.seen.iter().zip(&p).filter(|_| slot == 2) {
            out.iter_mut().zip(of_value(seen.position)).for_each(|(out, own)| *out += p * own);
        }
        if let Flash::Rounded(narrow, ..) = attention.kind
            && out.iter().any(|moved| *moved > 0.0)
        {
            let rounded = rounded_weights(&attention, row, narrow, &p);
            out.iter_mut().zip(rounded).for_each(|(out, rounded)| *out += rounded);
        }
        if attention.is_narrow() && out.iter().any(|moved| *moved > 0.0) {
            let narrow = narrow_sums(&attention, row, &p);
            out.iter_mut().zip(narrow).for_each(|(out, narrow)| *out += TWO_ROUNDINGS * narrow);
        } else if out.iter().any(|moved| *moved > 0.0) {
            let wider = moved_sums(&attention, row, exact, &moves, &of_value);
            out.iter_mut().zip(wider.into_iter().flatten()).for_each(|(out, wider)| *out = wider.max(*out));
        }
        out
    })
}

/// Σ p·moved·|v - out|, times what the exponential of the largest move adds to that.
fn first_order(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    (p, sink): (&[f64], f64),
    (moves, of_sink): (&[f64], f64),
    exact: &[f64],
) -> Vec<f64> {
    let beyond = (2.0 * moves.iter().copied().fold(of_sink, f64::max)).exp();
    let mut out: Vec<f64> = exact.iter().map(|y| sink * of_sink * y.abs() * beyond).collect();
    for ((seen, p), moved) in row.seen.iter().zip(p).zip(moves) {
        let value = attention.value(row.at, seen.position);
        out.iter_mut()
            .zip(value.iter().zip(exact))
            .for_each(|(out, (v, y))| *out += p * moved * beyond * (v - y).abs());
    }
    out
}

/// With every score anywhere within its error, weights w that add up to 1 move the output by Σ w·(v - out): by no more than
/// the furthest value whose weight may become large, and what all others come to together.
fn within_reach(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    (moves, of_sink): (&[f64], f64),
    exact: &[f64],
) -> Vec<f64> {
    let ends = row.seen.iter().zip(moves).map(|(seen, moved)| [seen.z - moved, seen.z + moved]);
    let of_sink = row.sink.map(|sink| [sink - of_sink, sink + of_sink]);
    let ends: Vec<[f64; 2]> = ends.chain(of_sink).collect();
    let top = ends.iter().map(|[_, high]| *high).fold(f64::NEG_INFINITY, f64::max);
    let least: f64 = ends.iter().map(|[low, _]| (low - top).exp()).sum();
    // The largest weight of each: its score at its highest, all others at their lowest.
    let largest = ends.iter().map(|[low, high]| {
        let (own, others) = ((high - top).exp(), (least - (low - top).exp()).max(0.0));
        if own == 0.0 { 0.0 } else { own / (own + others) }
    });
    let largest: Vec<f64> = largest.collect();
    let (mut furthest, mut others) = (vec![0.0f64; exact.len()], vec![0.0; exact.len()]);
    let mut add = |weight: f64, d: usize, away: f64| match weight > REACHED {
        true => furthest[d] = furthest[d].max(away),
        false => others[d] += weight * away,
    };
    for (seen, weight) in row.seen.iter().zip(&largest) {
        let value = attention.value(row.at, seen.position);
        value.iter().zip(exact).enumerate().for_each(|(d, (v, y))| add(*weight, d, (v - y).abs()));
    }
    if let Some(weight) = largest.get(row.seen.len()) {
        exact.iter().enumerate().for_each(|(d, y)| add(*weight, d, y.abs()));
    }
    furthest.into_iter().zip(others).map(|(furthest, others)| furthest + others).collect()
}

/// Half a step of the rounding of each query, (B·H·N, DK); nothing where they are not rounded.
fn query_steps(args: &Args<'_, f64>, attention: &Attention<'_, '_, f64>) -> Option<Matrix<f64>> {
    let query = args.get(0).filter(|_| attention.rounding != Rounding::None)?;
    let (rows, width) = (attention.q.rows, attention.q.cols);
    let mut values = query.values().into_owned();
    if attention.before.any() {
        attention.before.of_queries(&mut values);
    }
    Some(half_steps(attention.rounding, &Matrix::new(rows, width, values)))
}

/// Keys, and values, among those of which it is told whether they are rounded.
const KEYS: usize = 0;
const VALUES: usize = 1;

/// A value of K or V that is moved before it is rounded may be rounded to the next number.
fn step_beside(attention: &Attention<'_, '_, f64>, of: usize, error: f64, value: f64) -> f64 {
    match attention.kind {
        Flash::Rounded(narrow, ..) if error > 0.0 && attention.narrows[of] => {
            2.0 * (unit_of(narrow) * value.abs() + least_of(narrow))
        }
        _ => 0.0,
    }
}

/// How far a score moves, in quadrature, where values of a key are rounded to the next number.
fn fallen(attention: &Attention<'_, '_, f64>, error: &[f64], key: &[f64], q: impl Fn(usize) -> f64) -> f64 {
    let steps = key.iter().zip(error).enumerate();
    let squares = steps.map(|(d, (key, error))| (step_beside(attention, KEYS, *error, *key) * q(d)).powi(2));
    CONFIDENCE * squares.sum::<f64>().sqrt()
}

/// How far a score moves with an error of Q or K.
fn moved_score<'e>(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    seen: &Seen,
    slot: usize,
    of_row: &impl Fn([usize; 3]) -> &'e [f64],
    steps: &Option<Matrix<f64>>,
) -> f64 {
    let query = attention.query(row.at);
    let place = attention.cached(attention.k, row.at, seen.position);
    let (q, k) = (attention.q.row(query), attention.before.of_keys(attention.k.row(place)));
    let [of_query, of_key] = [attention.before.queries, attention.before.keys].map(|x| f64::from(x).abs());
    let along = |error: &[f64], other: &[f64]| error.iter().zip(other).map(|(e, x)| e * x.abs()).sum::<f64>();
    let scale = attention.scale.abs();
    if slot == 1 {
        let error: Vec<f64> = of_row(place).iter().map(|error| error * of_key).collect();
        let beside = fallen(attention, &error, &k, |d| q[d]);
        let error = converted(attention, attention.k, &error, &k);
        return scale * (along(&error, q) + attention.of_offsets(query, &error) + beside);
    }
    let k = attention.reach(&k);
    let error = of_row(row.at);
    let rounded = match steps {
        Some(steps) if error.iter().any(|e| *e > 0.0) => {
            let squares = steps.row(query).iter().zip(k.iter()).map(|(step, k)| (step * k).powi(2));
            CONFIDENCE * TWO_ROUNDINGS * squares.sum::<f64>().sqrt()
        }
        _ => 0.0,
    };
    scale * (of_query * along(error, &k) + rounded)
}
