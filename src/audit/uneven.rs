//! How unlike the rows of a node are off: what an engine's arithmetic rounds is about as much in each.

/// Share of what the furthest row is off by that one must be to count: others are in another arithmetic, or right.
const OFF: f64 = 1e-3;

/// How many times as far off, relative to its size, the furthest of the rows of so many values is as the usual one of those that
/// are off; `values` are the recorded and the exact ones.
pub fn of([recorded, exact]: [&[f64]; 2], width: usize, looked_at: &dyn Fn(usize) -> bool) -> f64 {
    let rows = recorded.chunks(width.max(1)).zip(exact.chunks(width.max(1))).enumerate();
    let off = rows.filter(|(row, _)| looked_at(row * width)).map(|(_, (recorded, exact))| {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let size = squares(&mut exact.iter().copied());
        squares(&mut recorded.iter().zip(exact).map(|(a, b)| a - b)) / size.max(f64::MIN_POSITIVE)
    });
    let mut off: Vec<f64> = off.collect();
    off.sort_by(f64::total_cmp);
    let Some(&furthest) = off.last() else { return 0.0 };
    off.retain(|off| *off >= OFF * furthest);
    off.get(off.len() / 2).map_or(f64::INFINITY, |usual| furthest / usual)
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_row_that_is_further_off_than_the_others_shows() {
        let exact = [1.0; 8];
        let of = |off: [f64; 4]| {
            let recorded: Vec<f64> = (0..8).map(|i| 1.0 + off[i / 2]).collect();
            super::of([&recorded, &exact], 2, &|_| true)
        };
        assert!((of([0.01, 0.02, 0.01, 0.01]) - 2.0).abs() < 1e-9);
        assert!((of([0.01, 0.5, 0.01, 0.01]) - 50.0).abs() < 1e-6);
        // Rows that are right are none of those that are off.
        assert!((of([0.0, 0.0, 0.0, 0.02]) - 1.0).abs() < 1e-9);
    }
}
