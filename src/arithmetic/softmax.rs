//! Softmax over scores: which of its steps a kernel rounds, and what it multiplies scores by.

use crate::numerics::Storage;

/// What a softmax keeps in a narrow type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Softmax {
    /// Scaled scores with their mask.
    pub scores: Storage,
    /// Whether scores are rounded after each step too: as products, scaled, capped.
    pub steps: bool,
    /// The result.
    pub weights: Storage,
    /// What scores are multiplied by.
    pub scale: Scale,
}

/// The factor of scores, as a kernel keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scale {
    /// Its type: JAX takes a number of the program for one of the values' type.
    pub kept: Storage,
    /// Whether log2 e is multiplied into it, since 2^x is what processors compute: Triton's kernels. Scores are in that unit then.
    pub folded: bool,
}

impl Softmax {
    /// Nothing.
    pub const F32: Softmax =
        Softmax { scores: Storage::F32, steps: false, weights: Storage::F32, scale: Scale::F32 };

    /// A score as it is kept, in units of e.
    pub fn kept(self, score: f64) -> f64 {
        let unit = self.scale.unit();
        match self.scores {
            Storage::F32 => score,
            kept => unit * f64::from(kept.nearest((score / unit) as f32)),
        }
    }
}

impl Scale {
    /// As it is.
    pub const F32: Scale = Scale { kept: Storage::F32, folded: false };

    /// What it is multiplied by once more for scores in units of e.
    pub fn unit(self) -> f64 {
        if self.folded { std::f64::consts::LN_2 } else { 1.0 }
    }

    /// What queries, or scores, are multiplied by, where it is so much.
    pub fn of(self, scale: f64) -> f64 {
        if self == Scale::F32 { scale } else { f64::from(self.kept.nearest((scale / self.unit()) as f32)) }
    }
}
