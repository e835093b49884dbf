//! Fits what attention was computed with: factor, limits, window, slots of the cache.

use super::fit::{integers, rounded};
use super::predict::Lab;
use super::sample::Base;
use crate::faults::Argument;
use crate::faults::catalogue::window;
use crate::model::graph::{Attention, BySteps, Node, Op, ScoreLimit};

/// How far rows of the sample are from what the node gives with another attention: squares, added up.
struct Distance<'a> {
    lab: &'a Lab<'a>,
    base: &'a Base,
    /// Each row with what it reads.
    cases: Vec<(usize, crate::audit::Case)>,
}

impl<'a> Distance<'a> {
    /// The rows of the sample that see more than themselves.
    fn new(lab: &'a Lab<'a>, base: &'a Base) -> Option<Distance<'a>> {
        attention(&base.node.op)?;
        let inputs = lab.inputs(&base.node).ok()??;
        let rows = base.rows.iter().filter(|&&row| lab.case.positions[row] > 0);
        let cases = rows.filter_map(|&row| Some((row, lab.edited(&base.node, &inputs, row..row + 1).ok()?)));
        Some(Distance { lab, base, cases: cases.collect() }).filter(|distance| !distance.cases.is_empty())
    }

    fn of(&self, change: impl Fn(&mut Attention)) -> f64 {
        let Some(op) = changed(&self.base.node.op, change) else { return f64::INFINITY };
        let mut sum = 0.0;
        for (row, case) in &self.cases {
            let node = Node { op: op.clone(), ..case.node.clone() };
            let Ok(out) = case.execute(&node, self.lab.context.gguf, &self.lab.context.numerics) else {
                return f64::INFINITY;
            };
            let recorded = self.lab.case.recorded.row(*row);
            sum += out.data.iter().zip(recorded).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        }
        sum
    }
}

/// An attention that has a softmax within it.
fn attention(op: &Op) -> Option<&Attention> {
    match op {
        Op::Attention(op) | Op::Softmax(op) => Some(op),
        _ => None,
    }
}

fn changed(op: &Op, change: impl Fn(&mut Attention)) -> Option<Op> {
    let mut op = op.clone();
    match &mut op {
        Op::Attention(own) | Op::Softmax(own) => change(own),
        _ => return None,
    }
    Some(op)
}

/// Steps of a search for a factor, each a twentieth of an octave.
const STEPS: i32 = 320;

/// The factor on the scores that gives the recorded rows best: a scan, then golden sections.
pub fn attention_scale(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some((distance, own)) = Distance::new(lab, base).zip(attention(&base.node.op)) else { return vec![] };
    let fitted = fitted(own.scale, |scale| distance.of(|op| op.scale = scale));
    // A minimum is flat: it is known to the square root of what the distance is known to.
    let mut out: Vec<Argument> = Vec::new();
    for square in [1.0 / (fitted * fitted), 1.0 / fitted] {
        if (square / square.round() - 1.0).abs() < 1e-3 {
            let n = square.round();
            out.push(Argument::Number(if square == 1.0 / fitted { 1.0 / n } else { 1.0 / n.sqrt() }));
        }
    }
    out.extend(shorter(fitted));
    out
}

/// A limit of scores to begin with: those of models are within some octaves of it.
const LIMIT: f64 = 16.0;

/// The soft cap that gives the recorded rows best.
pub fn soft_cap(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    limits(lab, base, ScoreLimit::SoftCap)
}

/// The limit beyond which scores are cut off.
pub fn clamp_limit(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    limits(lab, base, ScoreLimit::Clamp)
}

fn limits(lab: &Lab<'_>, base: &Base, limit: fn(f64) -> ScoreLimit) -> Vec<Argument> {
    let Some(distance) = Distance::new(lab, base) else { return vec![] };
    shorter(fitted(LIMIT, |at| distance.of(|op| op.limit = limit(at))))
}

/// A fitted number rounded to ever more digits, then itself.
fn shorter(fitted: f64) -> Vec<Argument> {
    (1..=5).map(|digits| rounded(fitted, digits)).chain([fitted]).map(Argument::Number).collect()
}

/// The number of least distance within some octaves of `around`.
fn fitted(around: f64, distance: impl Fn(f64) -> f64) -> f64 {
    const GOLDEN: f64 = 0.618_033_988_749_895;
    let at = |step: f64| around * (step / 20.0).exp2();
    let scan = (-STEPS / 2..=STEPS / 2).map(|step| (distance(at(f64::from(step))), step));
    let Some((_, step)) = scan.min_by(|a, b| a.0.total_cmp(&b.0)) else { return around };
    let (mut low, mut high) = (f64::from(step) - 1.0, f64::from(step) + 1.0);
    for _ in 0..60 {
        let (a, b) = (high - GOLDEN * (high - low), low + GOLDEN * (high - low));
        if distance(at(a)) < distance(at(b)) { high = b } else { low = a }
    }
    at(0.5 * (low + high))
}

/// Windows up to this one are all tried; of wider ones powers of two, and one and a half times those.
const WINDOW: u32 = 64;

/// The widest sliding window that gives the recorded rows best.
pub fn windows(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some(distance) = Distance::new(lab, base) else { return vec![] };
    // A window that holds all is none.
    let last = distance.cases.iter().map(|(row, _)| lab.case.positions[*row]).max().unwrap_or(0);
    let wide = (6..32).flat_map(|octave| [1u32 << octave, 3 << (octave - 1)]);
    let widths = (1..=WINDOW).chain(wide.filter(|width| *width > WINDOW)).filter(|width| *width <= last);
    let best = widths.map(|width| (distance.of(|op| op.mask = BySteps::all(window(width))), width));
    let best = best.min_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, width)| Argument::Number(f64::from(width))).into_iter().collect()
}

/// Masks that are off by a few positions.
pub fn mask_shifts(_: &Lab<'_>, _: &Base) -> Vec<Argument> {
    integers([-1, 1, -2, 2, -3, 3].into_iter())
}

/// What slots of the cache may hold before they are written, where they are read at all.
pub fn slots(_: &Lab<'_>, _: &Base) -> Vec<Argument> {
    ["zero", "held", "unread"].map(|slots| Argument::Tensor(slots.to_owned())).into()
}
