//! Fits what a rotation was made with: base, factor, position, columns.

use super::fit::{numbers, rounded};
use super::predict::Lab;
use super::sample::Base;
use crate::dense::rope::{columns, rates};
use crate::faults::Argument;
use crate::faults::catalogue::shifted;
use crate::model::graph::{BySteps, Node, Op, Pairing, Position, Rope};

/// Bases of models in the field.
pub(super) const KNOWN_BASES: [f64; 9] = [1e4, 1e6, 5e5, 1e5, 5e6, 1e7, 2.5e5, 8e6, 1.6e5];

/// The angle by which the recording turned each pair of a row, with the weight of the evidence: (i, θ, |x|²).
fn angles(lab: &Lab<'_>, rope: &Rope, row: usize) -> Vec<(usize, f64, f64)> {
    let (x, y) = (lab.case.inputs[0].value.row(row), lab.case.recorded.row(row));
    let pairs = rope.dims / 2;
    let mut out = Vec::with_capacity(pairs);
    for i in 0..pairs {
        let (first, second) = columns(rope.pairing, i, pairs);
        let (mut along, mut across, mut weight) = (0.0, 0.0, 0.0);
        for (x, y) in x.chunks_exact(rope.head_width).zip(y.chunks_exact(rope.head_width)) {
            let (a, b, c, d) = (x[first], x[second], y[first], y[second]);
            along += a * c + b * d;
            across += a * d - b * c;
            weight += a * a + b * b;
        }
        out.push((i, across.atan2(along), weight));
    }
    out
}

fn rope(node: &Node) -> Option<&Rope> {
    match &node.op {
        Op::Rope(rope) => Some(rope),
        _ => None,
    }
}

/// Angles that are unambiguous and well above rounding.
const CLEAR_ANGLES: std::ops::Range<f64> = 1e-4..1.5;

/// θ_i = p·base^(-2i/d): a line through the origin of ln(θ_i/p) over i.
pub fn rope_base(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some(rope) = rope(&base.node) else { return vec![] };
    let mut fits: Vec<f64> = Vec::new();
    for &row in &base.rows {
        let position = f64::from(lab.case.positions[row]);
        let (mut numerator, mut denominator) = (0.0, 0.0);
        for (i, angle, weight) in angles(lab, rope, row) {
            let small = i > 0 && position * rope.base.min(1e4).powf(-2.0 * i as f64 / rope.dims as f64) < 1.5;
            if position > 0.0 && small && CLEAR_ANGLES.contains(&angle) {
                let weight = weight * (i as f64 * angle).powi(2);
                numerator -= weight * (angle / position).ln() / (2.0 * i as f64 / rope.dims as f64);
                denominator += weight;
            }
        }
        if denominator > 0.0 {
            fits.push((numerator / denominator).exp());
        }
    }
    fits.sort_by(f64::total_cmp);
    let Some(&fitted) = fits.get(fits.len() / 2).filter(|base| base.is_finite()) else { return vec![] };
    let mut out: Vec<f64> =
        KNOWN_BASES.into_iter().filter(|known| (known / fitted - 1.0).abs() < 0.05).collect();
    out.extend((1..=5).map(|digits| rounded(fitted, digits)));
    out.push(fitted);
    out.retain(|found| (found / rope.base - 1.0).abs() > 1e-9);
    out.into_iter().map(Argument::Number).collect()
}

/// θ_i = factor·p·rate_i
pub fn rope_factor(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some(rope) = rope(&base.node).filter(|rope| rope.freqs.is_none()) else { return vec![] };
    let rates = rates(rope, &[]);
    let (mut numerator, mut denominator) = (0.0, 0.0);
    for &row in &base.rows {
        let position = f64::from(lab.case.positions[row]);
        for (i, angle, weight) in angles(lab, rope, row) {
            if position > 0.0 && CLEAR_ANGLES.contains(&angle) && position * rates[i] < 0.3 {
                numerator += weight * angle * position * rates[i];
                denominator += weight * (position * rates[i]).powi(2);
            }
        }
    }
    if denominator > 0.0 { numbers(numerator / denominator) } else { vec![] }
}

/// Shifts of the position that are tried.
const SHIFTS: i64 = 64;

/// Shifts of the position, the ones that fit one row best.
fn shifts(
    lab: &Lab<'_>,
    base: &Base,
    rows: &[usize],
    shifted: fn(i64) -> BySteps<Position>,
) -> Vec<Argument> {
    let Some(rope) = rope(&base.node) else { return vec![] };
    let Some(&row) = rows.first() else { return vec![] };
    let Ok(inputs) = lab.inputs(&base.node) else { return vec![] };
    let Some(inputs) = inputs else { return vec![] };
    let own = i64::from(lab.case.positions[row]);
    // A position that counts the prompt twice is off by its length.
    let start = i64::from(lab.case.steps[row].start);
    let candidates = (-SHIFTS..=SHIFTS).chain([own, start, -start]).filter(|shift| *shift != 0);
    let mut best: Option<(f64, i64)> = None;
    for shift in candidates {
        let op = Op::Rope(Rope { position: shifted(shift), ..rope.clone() });
        let node = Node { op, ..base.node.clone() };
        let Ok(case) = lab.edited(&node, &inputs, row..row + 1) else { continue };
        let Ok(out) = case.execute(&case.node, lab.context.gguf, &lab.context.numerics) else { continue };
        let distance: f64 =
            out.data.iter().zip(lab.case.recorded.row(row)).map(|(a, b)| (a - b).powi(2)).sum();
        if best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, shift));
        }
    }
    best.map(|(_, shift)| Argument::Number(shift as f64)).into_iter().collect()
}

/// One shift for all rows.
pub fn position_shift(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    shifts(lab, base, &base.rows, |shift| BySteps::all(shifted(shift)))
}

/// One shift for the rows after the first step.
pub fn decode_shift(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let decoded: Vec<usize> =
        (0..lab.case.steps.len()).filter(|&row| lab.case.steps[row].start > 0).collect();
    let later = |shift| BySteps { later: shifted(shift), first: Position::OWN };
    shifts(lab, base, &decoded, later)
}

/// Every even number of columns.
pub fn rope_dims(_: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some(rope) = rope(&base.node) else { return vec![] };
    let dims = (2..=rope.head_width).step_by(2).filter(|dims| *dims != rope.dims);
    dims.map(|dims| Argument::Number(dims as f64)).collect()
}

/// The other pairing; and of a model with pairs neighbours of rows that lie in halves.
pub fn pairings(_: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some(rope) = rope(&base.node) else { return vec![] };
    let mut out = vec![Argument::None];
    out.extend((rope.pairing == Pairing::Interleaved).then(|| Argument::Tensor("halves".to_owned())));
    out
}
