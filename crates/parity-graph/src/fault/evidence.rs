//! What the numbers of a wrong node say: values of mistakes are fitted to them. A fit proposes, the likeliest first; a
//! diagnosis keeps only what explains the node.

use super::Argument;
use crate::rewrite::Change;

/// The numbers of a wrong node, in logical order.
pub struct Evidence<'a> {
    /// What was recorded.
    pub recorded: &'a [f64],
    /// What it should be.
    pub exact: &'a [f64],
    /// How far rounding explains that it is off.
    pub bound: &'a [f64],
    /// Whether an element was recorded.
    pub looked_at: &'a (dyn Fn(usize) -> bool + Sync),
    /// The values of a source, in its own logical order.
    pub source: &'a dyn Fn(usize) -> Option<Vec<f64>>,
    /// How far what was recorded is from the node under a change: squares, added up over a sample. Or anything that is more
    /// than a limit, where it is.
    pub within: &'a dyn Fn(&Change, f64) -> f64,
}

impl Evidence<'_> {
    /// Pairs (recorded, exact) that are finite.
    pub fn pairs(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let both = self.recorded.iter().zip(self.exact).enumerate().filter(|(i, _)| (self.looked_at)(*i));
        both.map(|(_, (y, p))| (*y, *p)).filter(|(y, p)| y.is_finite() && p.is_finite())
    }

    /// Whether a recorded element is what another one should be, up to rounding.
    pub fn is(&self, recorded: usize, exact: usize) -> bool {
        let off = (self.recorded[recorded] - self.exact[exact]).abs();
        !(self.looked_at)(recorded) || off <= 2.0 * (self.bound[recorded] + self.bound[exact])
    }

    /// Whether an element is wrong.
    pub fn is_wrong(&self, i: usize) -> bool {
        (self.looked_at)(i) && !((self.recorded[i] - self.exact[i]).abs() <= self.bound[i])
    }

    /// How far what was recorded is from the node under a change.
    pub fn distance(&self, change: &Change) -> f64 {
        (self.within)(change, f64::INFINITY)
    }

    /// The element with the least distance.
    pub fn nearest<T>(
        &self,
        candidates: impl IntoIterator<Item = T>,
        change: impl Fn(&T) -> Option<Change>,
    ) -> Option<T> {
        let mut best: Option<(f64, T)> = None;
        for candidate in candidates {
            let Some(change) = change(&candidate) else { continue };
            let least = best.as_ref().map_or(f64::INFINITY, |(least, _)| *least);
            let distance = (self.within)(&change, least);
            if distance.is_finite() && best.as_ref().is_none_or(|(least, _)| distance < *least) {
                best = Some((distance, candidate));
            }
        }
        best.map(|(_, candidate)| candidate)
    }

    /// y = factor·p
    pub fn factor(&self) -> Option<f64> {
        let (yp, pp) = self.pairs().fold((0.0, 0.0), |(yp, pp), (y, p)| (yp + y * p, pp + p * p));
        (pp > 0.0).then_some(yp / pp)
    }

    /// y = p + offset
    pub fn offset(&self) -> Option<f64> {
        let (sum, n) = self.pairs().fold((0.0, 0.0), |(sum, n), (y, p)| (sum + (y - p), n + 1.0));
        (n > 0.0).then_some(sum / n)
    }

    /// Which column of the exact rows each recorded one is, where each is one; `None` where they are in their places.
    pub fn column_order(&self, row: usize) -> Option<Vec<u32>> {
        let rows = self.exact.len() / row.max(1);
        let seen: Vec<usize> = (0..rows).filter(|&t| (self.looked_at)(t * row)).collect();
        let first = *seen.first()? * row;
        let mut sorted: Vec<u32> = (0..row as u32).collect();
        let key = |c: u32| self.exact[first + c as usize];
        sorted.sort_by(|a, b| key(*a).total_cmp(&key(*b)));
        let widest = 4.0 * self.bound[first..first + row].iter().fold(0.0f64, |max, b| max.max(*b));
        let mut taken = vec![false; row];
        let mut order = Vec::with_capacity(row);
        for c in 0..row {
            let value = self.recorded[first + c];
            let start = sorted.partition_point(|&from| key(from) < value - widest);
            let near = sorted[start..].iter().take_while(|&&from| key(from) <= value + widest);
            let fits = |from: u32| seen.iter().all(|&t| self.is(t * row + c, t * row + from as usize));
            // Its own place before any other of the same value.
            let own = !taken[c] && fits(c as u32);
            let free = || near.copied().find(|&from| !taken[from as usize] && fits(from));
            let from = if own { c as u32 } else { free()? };
            taken[from as usize] = true;
            order.push(from);
        }
        order.iter().enumerate().any(|(i, from)| i as u32 != *from).then_some(order)
    }
}

/// How far from a fitted number a rounder one may lie.
const NEAR: f64 = 2e-6;

/// The shortest decimal near a fitted number, inverses and roots of whole numbers, then the number itself.
pub fn numbers(fitted: f64) -> Vec<Argument> {
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
    Argument::numbers(out)
}

/// A number to so many significant digits.
pub fn rounded(number: f64, digits: usize) -> f64 {
    format!("{number:.*e}", digits - 1).parse().unwrap_or(number)
}

/// A fitted number rounded to ever more digits, then itself.
pub fn shorter(fitted: f64) -> Vec<Argument> {
    Argument::numbers((1..=5).map(|digits| rounded(fitted, digits)).chain([fitted]))
}

/// Octaves down and up that a number is searched in.
const OCTAVES: i32 = 8;
/// Steps of each, where a distance costs one node.
pub const FINE: i32 = 20;
/// Where it costs all nodes on the way.
pub const COARSE: i32 = 3;

/// Golden sections: a step of an octave is narrowed to what f32 tells apart.
const SECTIONS: usize = 36;

/// The number of least distance within some octaves of `around`: a scan in so many steps of each, then golden sections. `None`
/// where no distance is one.
pub fn fitted(around: f64, steps: i32, within: impl Fn(f64, f64) -> f64) -> Option<f64> {
    const GOLDEN: f64 = 0.618_033_988_749_895;
    let at = |step: f64| around * (step / f64::from(steps)).exp2();
    let (mut least, mut step) = (f64::INFINITY, None);
    for tried in -OCTAVES * steps..=OCTAVES * steps {
        let distance = within(at(f64::from(tried)), least);
        if distance < least {
            (least, step) = (distance, Some(tried));
        }
    }
    let (step, distance) = (step?, |step: f64| within(at(step), f64::INFINITY));
    let (mut low, mut high) = (f64::from(step) - 1.0, f64::from(step) + 1.0);
    // What the model has itself is no mistake and has no distance: beside it the least may lie on its other side.
    if step.abs() == 1 && distance(0.0).is_infinite() {
        (low, high) = (low.min(-1.0), high.max(1.0));
    }
    let (mut a, mut b) = (high - GOLDEN * (high - low), low + GOLDEN * (high - low));
    let (mut of_a, mut of_b) = (distance(a), distance(b));
    for _ in 0..SECTIONS {
        if of_a < of_b {
            (high, b, of_b) = (b, a, of_a);
            a = high - GOLDEN * (high - low);
            of_a = distance(a);
        } else {
            (low, a, of_a) = (a, b, of_b);
            b = low + GOLDEN * (high - low);
            of_b = distance(b);
        }
    }
    Some(at(0.5 * (low + high)))
}
