//! The two number types that nodes are executed in: f32 as engines do, f64 as the judge.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// A floating-point type that every op is written for.
pub trait Scalar:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + Sum
{
    /// Additive identity.
    const ZERO: Self;
    /// Multiplicative identity.
    const ONE: Self;
    /// Rounding unit u: half the distance from 1 to the next number, 2^-24 or 2^-53.
    const UNIT_ROUNDOFF: f64;

    /// Exact for both types.
    fn from_f32(value: f32) -> Self;
    /// Rounds to nearest for f32.
    fn from_f64(value: f64) -> Self;
    /// Rounds to nearest for f64.
    fn to_f32(self) -> f32;
    /// Exact for both types.
    fn to_f64(self) -> f64;
    /// Square root.
    fn sqrt(self) -> Self;
    /// e to the power of `self`.
    fn exp(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// The larger of two numbers; NaN where either is NaN, so that a NaN is never lost in a maximum.
    #[inline]
    fn max_nan(self, other: Self) -> Self {
        if self > other || self.to_f64().is_nan() { self } else { other }
    }
}

macro_rules! scalar {
    ($t:ty, $unit:expr) => {
        impl Scalar for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const UNIT_ROUNDOFF: f64 = $unit;

            #[inline]
            fn from_f32(value: f32) -> Self {
                value as $t
            }
            #[inline]
            fn from_f64(value: f64) -> Self {
                value as $t
            }
            #[inline]
            fn to_f32(self) -> f32 {
                self as f32
            }
            #[inline]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline]
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            #[inline]
            fn tanh(self) -> Self {
                <$t>::tanh(self)
            }
            #[inline]
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
        }
    };
}

scalar!(f32, f32::EPSILON as f64 / 2.0);
scalar!(f64, f64::EPSILON / 2.0);
