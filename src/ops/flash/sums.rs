//! Sums of values in f16 as kernels of GPUs keep them, and between what they may be where f32 decides a rounding.

use super::super::bound::{
    EXP_ROUNDINGS, NORMALISE_ROUNDINGS, SCORE_ROUNDINGS, TINY_F32, UNIT_F32, accumulation,
};
use super::explain::UNKNOWN;
use crate::scalar::half;
use crate::scalar::vectorized;

/// What is added to the largest score, so that weights stay below 1/8: `3.0f * 0.6931f`.
#[expect(clippy::approx_constant, reason = "the kernel's own constant, not the logarithm")]
pub const OFFSET: f64 = (3.0f32 * 0.6931f32) as f64;
/// An exponential through exp2 rounds its argument, and a fast one its factor as well.
const EXP_ARGUMENT: f64 = 2.0;
/// A matrix unit aligns the products of a group to the largest of them, and cuts off what is below f32.
const CUT: f64 = 2.0 * UNIT_F32;

/// The sums of one thread, warp or part of a row.
#[derive(Clone, Debug)]
pub struct Sums {
    /// Maximum that weights are relative to; -inf where nothing was seen.
    pub max: f64,
    /// Error of it.
    pub of_max: f64,
    /// Sum of the weights.
    pub total: f64,
    /// Error of it.
    pub error: f64,
    /// (DV,) Sum of the weighted values,
    pub value: Vec<f64>,
    /// from where
    pub low: Vec<f64>,
    /// to where.
    pub high: Vec<f64>,
}

/// How far what a row is computed from may be off.
#[derive(Clone, Copy)]
pub struct Off<'e> {
    /// The scores of the seen positions.
    pub scores: &'e [f64],
    /// The value of a cached position, (DV,); nothing where values are known.
    pub values: &'e (dyn Fn(usize) -> Vec<f64> + Sync),
}

/// A weight, and between what it may be.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

impl Weight {
    /// e^(z - max), of a score and a maximum with these errors.
    pub fn of(z: f64, max: f64, error: f64) -> Weight {
        let value = (z - max).exp();
        let rounded =
            SCORE_ROUNDINGS * (z.abs() + max.abs()) + EXP_ROUNDINGS + EXP_ARGUMENT * (z - max).abs();
        let off = (error + UNIT_F32 * rounded).min(UNKNOWN).exp_m1();
        Weight { value, low: value * (1.0 - off).max(0.0), high: value * (1.0 + off) }
    }

    /// Rounded to f16.
    pub fn half(self) -> Weight {
        Weight { value: half(self.value), low: half(self.low), high: half(self.high) }
    }

    /// How far it may be off.
    pub fn off(self) -> f64 {
        (self.high - self.value).max(self.value - self.low)
    }
}

impl Sums {
    /// Nothing yet.
    pub fn new(width: usize) -> Sums {
        let zeros = || vec![0.0; width];
        Sums {
            max: f64::NEG_INFINITY,
            of_max: 0.0,
            total: 0.0,
            error: 0.0,
            value: zeros(),
            low: zeros(),
            high: zeros(),
        }
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.max == f64::NEG_INFINITY
    }

    /// Goes on relative to a maximum that may be larger; a factor below `least` becomes 0.
    pub fn raise(&mut self, max: f64, of_max: f64, least: f64) {
        if !(max > self.max) {
            return;
        }
        if !self.is_empty() {
            let mut factor = Weight::of(self.max, max, self.of_max + of_max);
            if factor.value < least {
                factor = Weight { value: 0.0, low: 0.0, high: 0.0 };
            }
            self.error = self.error * factor.high + self.total * factor.off();
            self.total *= factor.value;
            self.scale(factor.half());
        }
        (self.max, self.of_max) = (max, of_max);
    }

    /// Multiplies the values by a factor in f16 that is not negative.
    pub fn scale(&mut self, by: Weight) {
        vectorized(
            #[inline(always)]
            || {
                let bounds = self.low.iter_mut().zip(&mut self.high);
                for (value, (low, high)) in self.value.iter_mut().zip(bounds) {
                    *value = half(*value * by.value);
                    *low = half(least(*low * by.low, *low * by.high));
                    *high = half(-least(-*high * by.low, -*high * by.high));
                }
            },
        );
    }

    /// Adds a value, (DV,), times a weight in f16: product and sum are each rounded. The value may be `off` by so much,
    /// where that is not empty.
    pub fn add(&mut self, p: Weight, v: &[f64], off: &[f64]) {
        vectorized(
            #[inline(always)]
            || {
                let bounds = self.low.iter_mut().zip(&mut self.high);
                for (d, ((value, (low, high)), v)) in self.value.iter_mut().zip(bounds).zip(v).enumerate() {
                    let off = p.high * off.get(d).copied().unwrap_or(0.0);
                    *value = half(*value + half(p.value * v));
                    *low = half(*low + half(least(p.low * v, p.high * v) - off));
                    *high = half(*high + half(off - least(-p.low * v, -p.high * v)));
                }
            },
        );
    }

    /// Adds a group of values, each (DV,), times weights in f16, which a matrix unit sums up before it rounds. How far
    /// each value may be off stands behind it, where that is not known to be nothing.
    pub fn add_group(&mut self, group: &[(Weight, Vec<f64>, Vec<f64>)]) {
        let width = self.value.len();
        let (mut sums, mut largest) = (vec![[0.0f64; 3]; width], vec![0.0f64; width]);
        for (p, v, off) in group {
            for ((sum, largest), v) in sums.iter_mut().zip(&mut largest).zip(v) {
                sum[0] += p.value * v;
                sum[1] += least(p.low * v, p.high * v);
                sum[2] -= least(-p.low * v, -p.high * v);
                *largest = largest.max((p.value * v).abs());
            }
            for (sum, off) in sums.iter_mut().zip(off) {
                sum[1] -= p.high * off;
                sum[2] += p.high * off;
            }
        }
        for (d, ([sum, low, high], largest)) in sums.into_iter().zip(largest).enumerate() {
            let cut = CUT * group.len() as f64 * largest.max(self.value[d].abs());
            self.value[d] = half(self.value[d] + sum);
            self.low[d] = half(self.low[d] + low - cut);
            self.high[d] = half(self.high[d] + high + cut);
        }
    }

    /// What is added for a value that `other` has, sum by sum in f16.
    pub fn join(&mut self, other: &Sums) {
        for (into, from) in
            [(&mut self.value, &other.value), (&mut self.low, &other.low), (&mut self.high, &other.high)]
        {
            into.iter_mut().zip(from).for_each(|(into, from)| *into = half(*into + from));
        }
        self.total += other.total;
        self.error += other.error;
    }
}

/// A row, and between what it may be.
pub struct Outcome {
    /// (DV,) each
    pub value: Vec<f64>,
    low: Vec<f64>,
    high: Vec<f64>,
    /// Error relative to the value.
    relative: f64,
}

impl Outcome {
    /// Of sums whose total is 0: nothing was seen.
    pub fn nothing(width: usize) -> Outcome {
        let zeros = || vec![0.0; width];
        Outcome { value: zeros(), low: zeros(), high: zeros(), relative: 0.0 }
    }

    /// Parts that are joined in f32, with a sink.
    pub fn joined(parts: &[Sums], sink: Option<f64>, width: usize) -> Outcome {
        let seen: Vec<&Sums> = parts.iter().filter(|part| !part.is_empty()).collect();
        let largest = seen.iter().map(|part| part.max).chain(sink).fold(f64::NEG_INFINITY, f64::max);
        if seen.is_empty() {
            return Outcome::nothing(width);
        }
        let of_largest = seen.iter().find(|part| part.max == largest).map_or(0.0, |part| part.of_max);
        let mut out = Outcome::nothing(width);
        let (mut total, mut error) = (0.0, 0.0);
        for part in &seen {
            let own = if part.max == largest { 0.0 } else { part.of_max + of_largest };
            let weight = match part.max == largest {
                true => Weight { value: 1.0, low: 1.0, high: 1.0 },
                false => Weight::of(part.max, largest, own),
            };
            total += weight.value * part.total;
            error += weight.high * part.error + weight.off() * part.total;
            for d in 0..width {
                out.value[d] += weight.value * part.value[d];
                out.low[d] += least(weight.low * part.low[d], weight.high * part.low[d]);
                out.high[d] -= least(-weight.low * part.high[d], -weight.high * part.high[d]);
            }
        }
        if let Some(sink) = sink {
            let weight = Weight::of(sink, largest, of_largest);
            total += weight.value;
            error += weight.off();
        }
        out.divide(total, error, seen.len())
    }

    fn divide(mut self, total: f64, error: f64, terms: usize) -> Outcome {
        if total == 0.0 {
            return Outcome::nothing(self.value.len());
        }
        for values in [&mut self.value, &mut self.low, &mut self.high] {
            values.iter_mut().for_each(|value| *value /= total);
        }
        self.relative = error / total + accumulation(terms, UNIT_F32) + NORMALISE_ROUNDINGS * UNIT_F32;
        self
    }

    /// One sum, times the inverse of its total, both in f16.
    pub fn in_half(mut sums: Sums) -> Outcome {
        if sums.total == 0.0 {
            return Outcome::nothing(sums.value.len());
        }
        let off = sums.error / sums.total + NORMALISE_ROUNDINGS * UNIT_F32;
        let inverse = 1.0 / sums.total;
        let inverse = Weight { value: inverse, low: inverse * (1.0 - off), high: inverse * (1.0 + off) };
        sums.scale(inverse.half());
        Outcome { value: sums.value, low: sums.low, high: sums.high, relative: 0.0 }
    }

    /// How far a recorded row may be from `exact`.
    pub fn bound(&self, exact: &[f64]) -> Vec<f64> {
        let of = |(d, exact): (usize, &f64)| {
            let off = (self.high[d] - exact).max(exact - self.low[d]).max(0.0);
            off + (self.relative + UNIT_F32) * exact.abs() + TINY_F32
        };
        exact.iter().enumerate().map(of).collect()
    }
}

#[inline(always)]
fn least(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}
