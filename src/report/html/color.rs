//! Colours that readers with any colour vision can tell apart.

/// Viridis (Smith and van der Walt, matplotlib) at ninths of its range: lightness grows evenly along it.
const VIRIDIS: [[f64; 3]; 9] = [
    [68.0, 1.0, 84.0],
    [71.0, 44.0, 122.0],
    [59.0, 81.0, 139.0],
    [44.0, 113.0, 142.0],
    [33.0, 144.0, 141.0],
    [39.0, 173.0, 129.0],
    [92.0, 200.0, 99.0],
    [170.0, 220.0, 50.0],
    [253.0, 231.0, 37.0],
];

/// Viridis at `t`, 0 to 1, as `#rrggbb`.
pub fn viridis(t: f64) -> String {
    let scaled = t.clamp(0.0, 1.0) * (VIRIDIS.len() - 1) as f64;
    let below = (scaled as usize).min(VIRIDIS.len() - 2);
    let share = scaled - below as f64;
    let channel = |i: usize| VIRIDIS[below][i] * (1.0 - share) + VIRIDIS[below + 1][i] * share;
    format!(
        "#{:02x}{:02x}{:02x}",
        channel(0).round() as u8,
        channel(1).round() as u8,
        channel(2).round() as u8
    )
}

/// A logarithmic scale with a bend: `low` stands at 0, `middle` at 0.45, `high` at 1.
pub struct Scale {
    /// Values at or below have the darkest colour.
    pub low: f64,
    /// Where the colours turn from quiet to loud.
    pub middle: f64,
    /// Values at or above have the brightest colour.
    pub high: f64,
}

/// Error over bound: what is loud is a bug, and six orders of magnitude of it can be told apart.
pub const OWN: Scale = Scale { low: 1e-2, middle: 1.0, high: 1e6 };
/// Relative L2 difference.
pub const DIFFERENCE: Scale = Scale { low: 1e-8, middle: 1e-4, high: 1.0 };

impl Scale {
    /// Place of `value` on the scale, 0 to 1; what is not a number is as loud as can be.
    pub fn place(&self, value: f64) -> f64 {
        const BEND: f64 = 0.45;
        if value.is_nan() {
            return 1.0;
        }
        let share = |from: f64, to: f64| ((value / from).log10() / (to / from).log10()).clamp(0.0, 1.0);
        if value <= self.middle {
            BEND * share(self.low, self.middle)
        } else {
            // A step at the bend: a value just above its bound must not look like one just below.
            0.55 + BEND * share(self.middle, self.high)
        }
    }

    /// Colour of `value`.
    pub fn color(&self, value: f64) -> String {
        viridis(self.place(value))
    }

    /// Values to write beside the scale, with their places.
    pub fn ticks(&self) -> Vec<(f64, f64)> {
        let ticks = [self.low, self.middle, (self.middle * self.high).sqrt(), self.high];
        ticks.iter().map(|&value| (value, self.place(value))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_steps_at_the_bound() {
        assert_eq!(OWN.place(1.0), 0.45);
        assert!(OWN.place(1.01) > 0.55);
        assert_eq!(OWN.place(f64::NAN), 1.0);
        assert_eq!(OWN.place(f64::INFINITY), 1.0);
        assert_eq!(OWN.place(0.0), 0.0);
        assert_eq!(viridis(1.0), "#fde725");
        assert_eq!(viridis(0.0), "#440154");
    }
}
