//! The two number types that nodes are executed in: f32 as engines do, f64 as the judge.

use std::cell::RefCell;
use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

use gemm_common::Parallelism;
use rayon::prelude::*;

/// Runs `f`, and what is inlined into it, with the widest vector instructions that this CPU has. The results are
/// the same bit for bit: nothing is fused or reordered.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Rounds values in place, each by itself.
pub fn each<S: Scalar>(values: &mut [S], round: impl Fn(f64) -> f64) {
    vectorized(
        #[inline(always)]
        || values.iter_mut().for_each(|value| *value = S::from_f64(round(value.to_f64()))),
    );
}

/// To the nearest f16, halves to the even one; beyond its range infinite. It is rounded once, unlike what goes through
/// f32 first: a multiplication that is fused with an addition needs that.
#[inline(always)]
pub fn half(value: f64) -> f64 {
    /// Mantissa bits of f64 that f16 does not have.
    const DROPPED: u32 = 42;
    /// From here on f16 is infinite.
    const INFINITE: f64 = 65_520.0;
    /// Below, f16 numbers are as far apart as f64 numbers beside `SHIFT`.
    const SUBNORMAL: f64 = 1.0 / 16_384.0;
    /// 1.5·2^(52 - 24)
    const SHIFT: f64 = 402_653_184.0;
    let bits = value.to_bits();
    let odd = (bits >> DROPPED) & 1;
    let rounded = bits.wrapping_add((1 << (DROPPED - 1)) - 1 + odd) & !((1 << DROPPED) - 1);
    let normal = f64::from_bits(rounded);
    let small = ((value + SHIFT) - SHIFT).copysign(value);
    let finite = if value.abs() < SUBNORMAL { small } else { normal };
    let limited = if value.abs() >= INFINITE { f64::INFINITY.copysign(value) } else { finite };
    if value.is_nan() { value } else { limited }
}

/// To the nearest of 8 significant bits, halves to the even one.
#[inline(always)]
pub fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & !0xffff;
    if value.is_nan() { value } else { f32::from_bits(rounded) }
}

/// So many zeros, written by all threads: one alone would bring the pages of a large weight into memory.
pub fn zeros<S: Scalar>(n: usize) -> Vec<S> {
    rayon::iter::repeat_n(S::ZERO, n).with_min_len(ZEROS_PER_TASK).collect()
}

/// Zeros that one task writes, at least.
const ZEROS_PER_TASK: usize = 1 << 16;

/// Σ term(x[i], y[i]), in as many parts as vector instructions add at a time; of two slices of the same length.
#[inline(always)]
pub fn in_lanes<X: Copy, Y: Copy>(x: &[X], y: &[Y], term: impl Fn(X, Y) -> f64) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0f64; LANES];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for lane in 0..LANES {
            sums[lane] += term(x[lane], y[lane]);
        }
    }
    let rest: f64 = x_rest.iter().zip(y_rest).map(|(x, y)| term(*x, *y)).sum();
    sums.iter().sum::<f64>() + rest
}

/// e^x within 2u of f64, without a branch or a call, so that a loop over it becomes vector instructions; beyond
/// ±708, where results are not normal numbers, e^±708. NaN stays NaN.
///
/// x = k·ln 2 + r with ln 2 in two parts (Cody and Waite, "Software Manual for the Elementary Functions", 1980),
/// e^r by its Taylor series: |r| <= ln 2 / 2, so that degree 13 leaves less than 5e-18.
#[inline(always)]
pub fn exp(x: f64) -> f64 {
    const LIMIT: f64 = 708.0;
    /// 1.5·2^52: what is added to it is rounded to a whole number, which stands in the lowest bits.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    /// The upper bits of ln 2: times a whole number below 2^11 it is exact.
    const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// 1/13!, 1/12! … 1/0!
    const TAYLOR: [f64; 14] = {
        let mut terms = [1.0; 14];
        let mut i = 13;
        while i > 0 {
            // terms[13 - n] = 1/n!
            let mut n = 1;
            while n <= i {
                terms[13 - i] /= n as f64;
                n += 1;
            }
            i -= 1;
        }
        terms
    };
    let x = if x < -LIMIT { -LIMIT } else { x };
    let x = if x > LIMIT { LIMIT } else { x };
    let shifted = x * std::f64::consts::LOG2_E + SHIFT;
    let k = shifted - SHIFT;
    let r = (x - k * LN_2_HIGH) - k * LN_2_LOW;
    let mut series = TAYLOR[0];
    for term in &TAYLOR[1..] {
        series = series * r + term;
    }
    let exponent_bias = f64::MAX_EXP as u64 - 1;
    series * f64::from_bits(shifted.to_bits().wrapping_add(exponent_bias) << (f64::MANTISSA_DIGITS - 1))
}

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
    /// Hands `len` numbers of any value to `f`, from a memory of this thread's own that is kept: a buffer of
    /// megabytes that is written before it is read need not be cleared each time.
    fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [Self]) -> R) -> R;
    /// [`gemm`] for a destination that lies in columns.
    ///
    /// # Safety
    /// As of [`gemm`].
    unsafe fn gemm_in_columns(
        size: [usize; 3],
        dst: Placed<*mut Self>,
        lhs: Placed<*const Self>,
        rhs: Placed<*const Self>,
    );
    /// The larger of two numbers; NaN where either is NaN, so that a NaN is never lost in a maximum.
    #[inline]
    fn max_nan(self, other: Self) -> Self {
        if self > other || self.to_f64().is_nan() { self } else { other }
    }
}

/// A matrix in memory: where it begins, and the distance of its rows and of its columns in elements.
#[derive(Clone, Copy)]
pub struct Placed<P> {
    /// Element (0, 0).
    pub at: P,
    /// From row to row.
    pub row: usize,
    /// From column to column.
    pub col: usize,
}

impl<P> Placed<P> {
    fn transposed(self) -> Self {
        Placed { at: self.at, row: self.col, col: self.row }
    }
}

/// dst = lhs·rhs: dst (m, n), lhs (m, k), rhs (k, n), on the calling thread.
///
/// # Safety
/// lhs and rhs are valid for reads and dst is for writes at r·row + c·col for all rows r and columns c that they have
/// by `[m, n, k]`.
pub unsafe fn gemm<S: Scalar>(
    [m, n, k]: [usize; 3],
    dst: Placed<*mut S>,
    lhs: Placed<*const S>,
    rhs: Placed<*const S>,
) {
    // The kernels write along columns: what lies in rows is the product of the transposed, the other way round.
    // SAFETY: the caller's promise, in either order.
    unsafe {
        if dst.col < dst.row {
            S::gemm_in_columns([n, m, k], dst.transposed(), rhs.transposed(), lhs.transposed());
        } else {
            S::gemm_in_columns([m, n, k], dst, lhs, rhs);
        }
    }
}

macro_rules! scalar {
    ($t:ty, $unit:expr, $gemm:path) => {
        impl Scalar for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const UNIT_ROUNDOFF: f64 = $unit;

            fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [Self]) -> R) -> R {
                thread_local!(static SCRATCH: RefCell<Vec<$t>> = const { RefCell::new(Vec::new()) });
                // Taken out, so that who asks for more meanwhile gets another one.
                let mut scratch = SCRATCH.take();
                if scratch.len() < len {
                    scratch.resize(len, 0.0);
                }
                let result = f(&mut scratch[..len]);
                SCRATCH.set(scratch);
                result
            }
            unsafe fn gemm_in_columns(
                [m, n, k]: [usize; 3],
                dst: Placed<*mut Self>,
                lhs: Placed<*const Self>,
                rhs: Placed<*const Self>,
            ) {
                let stride = |elements: usize| elements as isize;
                let [dst_col, dst_row] = [dst.col, dst.row].map(stride);
                let [lhs_col, lhs_row] = [lhs.col, lhs.row].map(stride);
                let [rhs_col, rhs_row] = [rhs.col, rhs.row].map(stride);
                // dst = 0·dst + 1·lhs·rhs, of which dst is not read.
                // SAFETY: the caller's promise.
                unsafe {
                    $gemm()(
                        m, n, k, dst.at, dst_col, dst_row, false, lhs.at, lhs_col, lhs_row, rhs.at, rhs_col,
                        rhs_row, 0.0, 1.0, false, false, false, Parallelism::None,
                    );
                }
            }
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

scalar!(f32, f32::EPSILON as f64 / 2.0, gemm_f32::gemm::f32::get_gemm_fn);
scalar!(f64, f64::EPSILON / 2.0, gemm_f64::gemm::f64::get_gemm_fn);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_that_of_the_library() {
        let u = <f64 as Scalar>::UNIT_ROUNDOFF;
        for i in -70_000..=70_000 {
            let x = f64::from(i) * 0.010_1;
            let (own, library) = (exp(x), x.exp());
            // 2u of its own, an ulp, which is up to 2u, of the library's.
            assert!((own - library).abs() <= 4.0 * u * library, "e^{x}: {own:e}, not {library:e}");
        }
        assert_eq!((exp(0.0), exp(f64::NEG_INFINITY)), (1.0, exp(-708.0)));
        assert!(exp(f64::NAN).is_nan());
    }
}
