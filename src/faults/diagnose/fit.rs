//! Fits the parameters of families of mistakes to a recorded output.
//!
//! A fit proposes arguments, the likeliest first; the diagnosis keeps only what reproduces the output.

use super::predict::Lab;
use super::ranks::Sums;
use super::sample::{Base, columns_of_product};
use crate::checkpoint::Kind;
use crate::faults::Argument;
use crate::faults::catalogue::{in_layer, residual_sources, same_shape, swapped_gate};
use crate::model::graph::Op;
use crate::model::weights::Weight;
use crate::tensor::Matrix;

/// How far from a fitted number a rounder one may lie.
const NEAR: f64 = 2e-6;

/// The shortest decimal near a fitted number, then the number itself.
pub(super) fn numbers(fitted: f64) -> Vec<Argument> {
    if !fitted.is_finite() {
        return vec![];
    }
    let mut out: Vec<f64> = (1..=6).map(|digits| rounded(fitted, digits)).collect();
    out.retain(|number| (number / fitted - 1.0).abs() < NEAR || fitted == 0.0);
    out.truncate(1);
    let inverse = 1.0 / fitted;
    if (inverse / inverse.round() - 1.0).abs() < NEAR {
        out.insert(0, 1.0 / inverse.round());
    }
    let root = fitted * fitted;
    for square in [root.round(), 1.0 / (1.0 / root).round()] {
        if square > 0.0 && square.is_finite() && (root / square - 1.0).abs() < NEAR {
            out.push(square.sqrt().copysign(fitted));
        }
    }
    out.push(fitted);
    out.dedup();
    out.into_iter().map(Argument::Number).collect()
}

/// A number to so many significant digits.
pub(super) fn rounded(number: f64, digits: usize) -> f64 {
    format!("{number:.*e}", digits - 1).parse().unwrap_or(number)
}

pub(super) fn integers(range: impl Iterator<Item = i64>) -> Vec<Argument> {
    range.filter(|i| *i != 0).map(|i| Argument::Number(i as f64)).collect()
}

/// Pairs (recorded, predicted) that are finite.
fn pairs<'a>(lab: &'a Lab<'_>, base: &'a Base) -> impl Iterator<Item = (f64, f64)> + 'a {
    let both = lab.case.recorded.data.iter().zip(&base.value.data);
    both.map(|(y, p)| (*y, *p)).filter(|(y, p)| y.is_finite() && p.is_finite())
}

/// y = factor·p
pub fn scale(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let (yp, pp) = pairs(lab, base).fold((0.0, 0.0), |(yp, pp), (y, p)| (yp + y * p, pp + p * p));
    if pp > 0.0 { numbers(yp / pp) } else { vec![] }
}

/// y = p + offset
pub fn offset(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let (sum, n) = pairs(lab, base).fold((0.0, 0.0), |(sum, n), (y, p)| (sum + (y - p), n + 1.0));
    if n > 0.0 { numbers(sum / n) } else { vec![] }
}

/// Epsilons that frameworks have as defaults.
const KNOWN_EPS: [f64; 8] = [1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-4, 1e-2, 0.0];

/// y = s·(x·w) with s = 1/sqrt(mean(x²) + eps): each group gives an eps, those of the smallest mean the
/// sharpest.
pub fn eps(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Op::Norm(norm) = &base.node.op else { return vec![] };
    let Ok(weight) = Weight::find(lab.context.gguf, &norm.weight) else { return vec![] };
    let weight: Vec<f64> = weight.decode();
    let x = &lab.case.inputs[0].value;
    let groups = x.data.chunks_exact(norm.width).zip(lab.case.recorded.data.chunks_exact(norm.width));
    let mut fits: Vec<(f64, f64)> = groups
        .filter_map(|(x, y)| {
            let square = x.iter().map(|x| x * x).sum::<f64>() / norm.width as f64;
            let terms = x.iter().zip(&weight).zip(y);
            let (mut xy, mut xx) = (0.0, 0.0);
            for ((x, w), y) in terms {
                xy += x * w * y;
                xx += (x * w).powi(2);
            }
            let scale = xy / xx;
            (scale > 0.0 && scale.is_finite()).then(|| (square, 1.0 / (scale * scale) - square))
        })
        .collect();
    fits.sort_by(|a, b| a.0.total_cmp(&b.0));
    let Some(&(square, fitted)) = fits.first() else { return vec![] };
    let uncertainty = square * NEAR + fitted.abs() * NEAR;
    let known = KNOWN_EPS.iter().filter(|eps| (*eps - fitted).abs() <= uncertainty && **eps != norm.eps);
    let mut out: Vec<Argument> = known.map(|eps| Argument::Number(*eps)).collect();
    if fitted > 0.0 {
        out.extend((1..=4).map(|digits| Argument::Number(rounded(fitted, digits))));
        out.push(Argument::Number(fitted));
    }
    out
}

/// Shifts of the table's rows within which a token's row is looked for.
const ROW_SHIFTS: i64 = 300;

/// Which row of the table the recorded rows are.
pub fn row_shift(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Op::Embed { table } = &base.node.op else { return vec![] };
    let Ok(table) = Weight::find(lab.context.gguf, table) else { return vec![] };
    let Some(&row) = base.rows.last() else { return vec![] };
    let (token, recorded) = (i64::from(lab.case.tokens[row]), lab.case.recorded.row(row));
    let mut out = vec![0.0f64; table.cols()];
    let mut best: Option<(f64, i64)> = None;
    for shift in (-ROW_SHIFTS..=ROW_SHIFTS).filter(|shift| *shift != 0) {
        let from = (token + shift).rem_euclid(table.rows() as i64) as usize;
        table.decode_rows(from..from + 1, &mut out);
        let distance: f64 = out.iter().zip(recorded).map(|(a, b)| (a - b).powi(2)).sum();
        if best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, shift));
        }
    }
    best.map(|(_, shift)| Argument::Number(shift as f64)).into_iter().collect()
}

/// All other layers.
pub fn layers(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let own = base.node.op.weight().map_or("", |weight| &weight.name);
    let layers = (0..i64::from(lab.site.layers())).filter(|layer| in_layer(own, *layer).is_some());
    layers.map(|layer| Argument::Number(layer as f64)).collect()
}

/// All other weights of the layer that fit.
pub fn weights(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    same_shape(&lab.site, &base.node).into_iter().map(Argument::Tensor).collect()
}

/// Both directions.
pub fn directions(_: &Lab<'_>, _: &Base) -> Vec<Argument> {
    integers([1, -1].into_iter())
}

/// Where the sum over the input columns meets the recorded output.
pub fn truncation(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some(sums) = Sums::new(lab, base) else { return vec![] };
    let kept = 1..sums.width();
    let best = kept.map(|kept| (sums.distance(kept..sums.width()), kept)).min_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, kept)| Argument::Number(kept as f64)).into_iter().collect()
}

/// Which column of the exact output each recorded column is, where each is one.
pub fn column_order(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let (recorded, exact, bound) = (&lab.case.recorded, &base.value, &base.bound);
    let Some(&first) = base.rows.first() else { return vec![] };
    if base.node.checkpoint.kind().is_optional() {
        return vec![];
    }
    let mut sorted: Vec<u32> = (0..exact.cols as u32).collect();
    let key = |c: u32| exact.row(first)[c as usize];
    sorted.sort_by(|a, b| key(*a).total_cmp(&key(*b)));
    let widest = bound.row(first).iter().fold(0.0f64, |max, b| max.max(*b));
    let mut taken = vec![false; exact.cols];
    let mut order = Vec::with_capacity(exact.cols);
    for c in 0..exact.cols {
        let value = recorded.row(first)[c];
        let start = sorted.partition_point(|&from| key(from) < value - widest);
        let near = sorted[start..].iter().take_while(|&&from| key(from) <= value + widest);
        let fits = |from: u32| {
            let from = from as usize;
            (0..exact.rows).all(|t| {
                (recorded.row(t)[c] - exact.row(t)[from]).abs() <= bound.row(t)[from] + bound.row(t)[c]
            })
        };
        let mut free = near.copied().filter(|&from| !taken[from as usize] && fits(from));
        // Its own place before any other of the same value.
        let own = !taken[c] && fits(c as u32);
        let Some(from) = (if own { Some(c as u32) } else { free.next() }) else { return vec![] };
        taken[from as usize] = true;
        order.push(from);
    }
    let moved = order.iter().enumerate().any(|(i, from)| i as u32 != *from);
    if moved { vec![Argument::Order(order)] } else { vec![] }
}

/// Checkpoints that a residual sum may take by mistake.
pub fn sources(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    residual_sources(&lab.site, &base.node).into_iter().map(Argument::Checkpoint).collect()
}

/// Both approximations of GELU.
pub fn gelu(_: &Lab<'_>, _: &Base) -> Vec<Argument> {
    ["tanh", "erf"].map(|form| Argument::Tensor(form.to_owned())).into()
}

/// How far apart the rows of the logits buffer lie, from where the second row's first values are found.
pub fn stride(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let width = base.value.cols;
    let Some(step) = lab.steps().into_iter().find(|step| step.len() > 1) else { return vec![] };
    let (first, second) = (base.value.row(step.start), base.value.row(step.start + 1));
    let recorded = lab.case.recorded.row(step.start + 1);
    let found = |within: &[f64], what: &[f64]| {
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * (a.abs() + b.abs());
        within.windows(what.len()).position(|window| window.iter().zip(what).all(close))
    };
    const PROOF: usize = 4;
    let mut out = Vec::new();
    if width > PROOF {
        // Further apart: the row starts later. Closer: it starts within the row before.
        out.extend(found(recorded, &second[..PROOF]).map(|gap| width + gap));
        out.extend(found(first, &recorded[..PROOF]));
    }
    out.retain(|stride| *stride != width && *stride > 0);
    out.into_iter().map(|stride| Argument::Number(stride as f64)).collect()
}

/// Gate and up as swapped weights: only where the other of the two is swapped as well.
pub fn swapped(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let kind = base.node.checkpoint.kind();
    let twin = match kind {
        Kind::FfnGate => base.node.checkpoint.sibling(Kind::FfnUp),
        Kind::FfnUp => base.node.checkpoint.sibling(Kind::FfnGate),
        _ => return vec![Argument::None],
    };
    let both = other_is_swapped(lab, base, twin).unwrap_or(false);
    if both { vec![Argument::None] } else { vec![] }
}

fn other_is_swapped(lab: &Lab<'_>, base: &Base, twin: crate::checkpoint::Checkpoint) -> Option<bool> {
    let mut node = lab.site.model.graph.node(twin)?.clone();
    let positions: Vec<u32> = base.rows.iter().map(|&row| lab.case.positions[row]).collect();
    let recorded = lab.context.recording.gather(twin, &positions)?;
    swapped_gate(&mut node)?;
    let weight = Weight::find(lab.context.gguf, node.op.weight()?).ok()?;
    let x = &lab.case.inputs.first()?.value;
    let rounding = crate::arithmetic::round::Rounding::of(lab.context.numerics.products, weight.dtype());
    let x = crate::arithmetic::round::activations(rounding, x.view()).values;
    let rows: Vec<f64> = base.rows.iter().flat_map(|&t| x.row(t).iter().copied()).collect();
    let swapped = columns_of_product(&weight, &Matrix::new(base.rows.len(), x.cols, rows), &base.columns);
    let (mut distance, mut size) = (0.0, 0.0);
    for t in 0..recorded.rows {
        for (i, &c) in base.columns.iter().enumerate() {
            distance += (f64::from(recorded.row(t)[c]) - swapped.row(t)[i]).powi(2);
            size += swapped.row(t)[i].powi(2);
        }
    }
    // Far within what tells two weights apart, far beyond rounding.
    Some(distance <= 1e-4 * size)
}

/// The limit beyond which values are infinite: between the largest finite and the smallest infinite one.
pub fn overflow(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let both = lab.case.recorded.data.iter().zip(&base.value.data);
    let (mut below, mut above) = (0.0f64, f64::INFINITY);
    for (recorded, exact) in both {
        match recorded.is_infinite() {
            true => above = above.min(exact.abs()),
            false => below = below.max(exact.abs()),
        }
    }
    const F16_MAX: f64 = 65504.0;
    if !above.is_finite() {
        return vec![];
    }
    let limit = if (below..above).contains(&F16_MAX) { F16_MAX } else { below };
    // Else the largest of each step.
    vec![Argument::Number(limit), Argument::None]
}
