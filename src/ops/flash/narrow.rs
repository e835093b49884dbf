//! Numbers of f16 as kernels come to them that compute in f32.

/// To f32 and from there to the nearest f16, as a kernel does that computes in f32 and stores f16. Without a branch,
/// so that a loop over it becomes vector instructions.
#[inline(always)]
pub fn round_f16(value: f64) -> f64 {
    /// Mantissa bits of f32 that f16 does not have.
    const DROPPED: u32 = 13;
    /// From here on f16 is infinite.
    const INFINITE: f32 = 65_520.0;
    /// Below, f16 numbers are as far apart as f32 numbers between 0.5 and 1.
    const SUBNORMAL: f32 = 1.0 / 16_384.0;
    const SHIFT: f32 = 0.75;
    let value = value as f32;
    let bits = value.to_bits();
    let odd = (bits >> DROPPED) & 1;
    let rounded = bits.wrapping_add((1 << (DROPPED - 1)) - 1 + odd) & !((1 << DROPPED) - 1);
    let normal = f32::from_bits(rounded);
    let small = (value + SHIFT) - SHIFT;
    let finite = if value.abs() < SUBNORMAL { small } else { normal };
    let limited = if value.abs() >= INFINITE { f32::INFINITY.copysign(value) } else { finite };
    f64::from(if value.is_nan() { value } else { limited })
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::round_f16;

    #[test]
    fn rounding_is_that_of_f16() {
        for bits in (0..u32::MAX).step_by(997) {
            let value = f32::from_bits(bits);
            let (own, library) = (round_f16(f64::from(value)), f16::from_f32(value).to_f64());
            assert!(
                own == library || own.is_nan() && library.is_nan(),
                "{value:e}: {own:e}, not {library:e}"
            );
        }
    }
}
