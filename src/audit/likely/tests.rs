//! A product that a device sums up in f16 in an order that is none of those that are known, and what is wrong with it.

use half::f16;
use parity_graph::Params;

use super::super::audit_rows::AuditRows;
use super::super::node::{Held, Sight, judge};
use super::super::sample::judge_sampled;
use crate::arithmetic::backend::{Backend, Product};
use crate::arithmetic::{Arithmetic, Hypothesis};
use crate::gguf::{DType, TensorInfo, TensorRef};
use crate::numerics::Storage;
use crate::ops::source::Data;
use crate::ops::{Args, Source, Strided, rule};
use crate::random;

/// So many that sums are followed in a part of the product, and a part of its rows is screened.
const ROWS: usize = 80;
const OUTPUTS: usize = 128;
const COLUMNS: usize = 896;

/// Uniform in [-1, 1), as f16 has it.
fn draw(seed: u64, i: usize) -> f64 {
    let bits = random::mixed(seed.wrapping_mul(random::GAMMA) ^ random::mixed(i as u64 + 1));
    half((bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
}

fn half(value: f64) -> f64 {
    f16::from_f64(value).to_f64()
}

/// A product (ROWS, OUTPUTS) of f16 numbers.
struct Made {
    weight: Vec<u8>,
    x: Vec<f64>,
    y: Vec<f64>,
}

/// Columns are cut into `parts`, whose terms are added `group` at a time; then the parts are added up.
fn made(parts: usize, group: usize) -> Made {
    let w: Vec<f64> = (0..OUTPUTS * COLUMNS).map(|i| draw(3, i)).collect();
    let x: Vec<f64> = (0..ROWS * COLUMNS).map(|i| draw(5, i)).collect();
    let mut y = Vec::new();
    for x in x.chunks(COLUMNS) {
        for w in w.chunks(COLUMNS) {
            let terms: Vec<f64> = w.iter().zip(x).map(|(w, x)| w * x).collect();
            let part = |terms: &[f64]| {
                terms.chunks(group).fold(0.0, |sum, group| half(sum + group.iter().sum::<f64>()))
            };
            y.push(terms.chunks(COLUMNS / parts).fold(0.0, |sum, terms| half(sum + part(terms))));
        }
    }
    Made { weight: w.iter().flat_map(|w| f16::from_f64(*w).to_le_bytes()).collect(), x, y }
}

impl Made {
    /// `y` by all that CUDA may have computed it in; a sample of the rows, or all.
    fn held(&self, y: &[f64], rows: Option<AuditRows>) -> Held {
        let (weight, width, shape) = (DType::F16, COLUMNS, vec![OUTPUTS, COLUMNS]);
        let product = Product { weight, rows: ROWS, batched: false, width, precise: false };
        let tried: Vec<Hypothesis> = Backend::Cuda.products(&product);
        let byte_len = self.weight.len();
        let info = TensorInfo {
            name: "w".into(),
            dtype: weight,
            shape,
            offset: 0,
            byte_len,
            shard: 0,
            loaded: Storage::F32,
        };
        let matrix =
            Source { dtype: weight, data: Data::Weight(TensorRef { info: &info, bytes: &self.weight }) };
        let x = Strided::whole(&self.x, [1, 1, ROWS, COLUMNS]);
        let args = Args {
            name: "y",
            params: &Params::default(),
            sources: vec![Some(matrix), Some(Source { dtype: DType::F32, data: Data::Values(x) })],
            shape: [1, 1, ROWS, OUTPUTS],
            dtype: DType::F32,
            arithmetic: &Arithmetic::EXACT,
            tokens: None,
        };
        let rule = rule(&parity_graph::Op::MulMat).unwrap();
        let sight = Sight { looked_at: &|_| true, carried: &[], row: Some(OUTPUTS), norm: None };
        match rows {
            Some(rows) => judge_sampled(rule, &args, y, &sight, &tried, rows).unwrap(),
            None => judge(rule, &args, y, &sight, &tried).unwrap(),
        }
    }

    /// The same with a factor on some elements, by row and column.
    fn scaled(&self, factor: f64, is_off: impl Fn(usize, usize) -> bool) -> Held {
        let y = self.y.iter().enumerate();
        let y = y.map(|(i, y)| if is_off(i / OUTPUTS, i % OUTPUTS) { y * factor } else { *y });
        self.held(&y.collect::<Vec<f64>>(), Some(AuditRows::default()))
    }
}

#[test]
fn an_order_that_nobody_knows_is_no_mistake() {
    for (parts, group) in [(7, 32), (14, 64), (1, 1), (1, 128), (28, 4)] {
        let made = made(parts, group);
        for rows in [Some(AuditRows::default()), Some(AuditRows::All), None] {
            let held = made.held(&made.y, rows);
            assert!(held.is_healthy() && held.otherwise.is_some(), "{parts}, {group}: {}", held.over);
        }
    }
}

#[test]
fn a_known_order_is_followed() {
    let made = made(4, 16);
    let held = made.held(&made.y, Some(AuditRows::default()));
    assert!(held.is_healthy() && held.otherwise.is_none(), "{}", held.over);
    let [_, values, bounds] = held.squares;
    assert!((bounds / values).sqrt() < 1e-3, "an interval of a rounding at most");
    assert!(held.screened > 0, "rows of an order that is followed are no suspects");
}

#[test]
fn a_factor_is_found_in_an_order_that_nobody_knows() {
    let made = made(7, 32);
    assert!(!made.scaled(1.005, |_, _| true).is_healthy(), "all");
    assert!(!made.scaled(1.005, |row, _| row == 21).is_healthy(), "a row");
    assert!(!made.scaled(1.005, |_, column| column == 77).is_healthy(), "a column");
    assert!(!made.scaled(1.005, |_, column| (64..128).contains(&column)).is_healthy(), "a head");
    assert!(!made.scaled(-1.0, |row, column| row == 39 && column < 3).is_healthy(), "a few values");
}
