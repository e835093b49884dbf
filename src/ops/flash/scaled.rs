//! What queries are rounded to, and queries and keys that are multiplied by the scale before they are.

use std::borrow::Cow;

use super::super::bound::UNIT_F32;
use crate::arithmetic::cuda_blocks::QUERIES;
use crate::arithmetic::round::{Rounding, Tie};
use crate::arithmetic::{Flash, Narrow, OfAttention, Scale, Scaled, Vector};
use crate::gguf::DType;
use crate::numerics::Products;
use crate::scalar::{Scalar, half};

/// The factor in f32, which one engine divides by and another multiplies with, and the product.
const PRODUCT_ROUNDINGS: f64 = 4.0;

/// What queries are rounded to before they meet keys of a type.
pub fn rounding_of_queries(kind: Flash, keys: DType) -> Rounding {
    match kind {
        Flash::Exact | Flash::Vector(Vector::Converted) => Rounding::None,
        Flash::Lanes(_) | Flash::Units(_) => Rounding::F16,
        Flash::Rounded(narrow, OfAttention { read: [true, ..], .. }, _) => narrow.rounding(),
        Flash::Rounded(..) => Rounding::None,
        Flash::Vector(Vector::Integers) => Rounding::Cuda(QUERIES),
        _ => Rounding::of(Products::LlamaCpu, keys),
    }
}

/// Whether a kernel of llama.cpp multiplies queries by the scale, and not scores.
pub fn scales_queries(kind: Flash) -> bool {
    matches!(kind, Flash::Lanes(_) | Flash::Units(_) | Flash::Vector(Vector::Integers))
}

/// What an engine multiplies by before it rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    pub queries: f32,
    pub keys: f32,
}

impl Factors {
    const NONE: Factors = Factors { queries: 1.0, keys: 1.0 };

    /// Of a kind of attention with this scale, which is kept so, and what is left of it for their products. What llama.cpp's
    /// kernels multiply is none of it, see [`scaled`].
    pub fn of(kind: Flash, kept: Scale, scale: f64) -> (Factors, f64) {
        let (own, unit) = (kept.of(scale), kept.unit());
        match kind {
            Flash::Rounded(_, _, Scaled::Both) if own >= 0.0 => {
                let root = own.sqrt() as f32;
                (Factors { queries: root, keys: root }, unit)
            }
            // The root of a scale that is negative would be none.
            Flash::Rounded(_, _, Scaled::Queries | Scaled::Both) => {
                (Factors { queries: own as f32, keys: 1.0 }, unit)
            }
            _ => (Factors::NONE, own * unit),
        }
    }

    pub fn any(self) -> bool {
        self != Factors::NONE
    }

    pub fn of_queries<S: Scalar>(self, values: &mut [S]) {
        multiplied(self.queries, values);
    }

    pub fn of_keys<S: Scalar>(self, mut key: Cow<'_, [S]>) -> Cow<'_, [S]> {
        if self.keys != 1.0 {
            multiplied(self.keys, key.to_mut());
        }
        key
    }

    /// Scaled queries, rows of `width`, that the last bits of a factor may round to the other side.
    pub fn ties<S: Scalar>(self, kind: Flash, width: usize, values: &[S]) -> Vec<Tie> {
        let Flash::Rounded(narrow, ..) = kind else { return Vec::new() };
        if self.queries == 1.0 {
            return Vec::new();
        }
        let tie = |(i, value): (usize, &S)| {
            let value = undecided(narrow, value.to_f64());
            (value != 0.0).then(|| Tie { row: i / width, col: i % width, value, sum: 0.0 })
        };
        values.iter().enumerate().filter_map(tie).collect()
    }

    /// How far such values of a key may move its product with a scaled query.
    pub fn tied_keys(self, kind: Flash, key: &[f64], q: &[f64]) -> f64 {
        let Flash::Rounded(narrow, ..) = kind else { return 0.0 };
        if self.keys == 1.0 {
            return 0.0;
        }
        let scaled = key.iter().map(|key| f64::from(self.keys * *key as f32));
        scaled.zip(q).map(|(key, q)| (undecided(narrow, key) * q).abs()).sum()
    }
}

/// By how much a value changes that lies between two numbers of a type but for the roundings of a product.
fn undecided(narrow: Narrow, value: f64) -> f64 {
    let off = PRODUCT_ROUNDINGS * UNIT_F32;
    let mut ends = [value * (1.0 - off), value * (1.0 + off)];
    narrow.store(&mut ends);
    // What is beyond the type is so either way.
    if ends.iter().all(|end| end.is_finite()) { ends[1] - ends[0] } else { 0.0 }
}

fn multiplied<S: Scalar>(factor: f32, values: &mut [S]) {
    values.iter_mut().for_each(|value| *value = S::from_f32(factor * value.to_f32()));
}

/// Queries times the scale, as a kernel does it before it rounds the product to f16.
pub fn scaled<S: Scalar>(kind: Flash, scale: f32, values: &mut [S]) {
    match kind {
        Flash::Units(_) => {
            let scale = half(f64::from(scale));
            values.iter_mut().for_each(|q| *q = S::from_f64(scale * half(q.to_f64())));
        }
        _ => multiplied(scale, values),
    }
}
