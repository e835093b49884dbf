//! What the tests of all rules need: sources in memory with gaps and exchanged axes, and the same questions to each.

use parity_graph::{Op, Params};

use super::source::{Data, Source, Strided, contiguous, rows};
use super::{Args, Check, Rule, rule};
use crate::arithmetic::Arithmetic;
use crate::gguf::{DType, TensorInfo, TensorRef};
use crate::scalar::Scalar;

/// Numbers from a fixed seed (xorshift64*; Vigna, "An experimental exploration of Marsaglia's xorshift generators").
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f64 / f64::from(1 << 24)
    }

    /// Uniform in [-1, 1), and an f32.
    pub fn signed(&mut self) -> f64 {
        f64::from((2.0 * self.unit() - 1.0) as f32)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.unit() * limit as f64) as usize
    }

    pub fn many(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.signed()).collect()
    }
}

/// One source.
#[derive(Clone)]
pub enum Given {
    Values { dtype: DType, data: Vec<f64>, shape: [usize; 4], strides: [usize; 4], offset: usize },
    Weight { info: TensorInfo, bytes: Vec<u8> },
}

impl Given {
    /// Without gaps.
    pub fn new(shape: [usize; 4], data: Vec<f64>) -> Given {
        assert_eq!(data.len(), shape.iter().product::<usize>());
        Given::Values { dtype: DType::F32, data, shape, strides: contiguous(shape), offset: 0 }
    }

    pub fn random(numbers: &mut Numbers, shape: [usize; 4]) -> Given {
        Given::new(shape, numbers.many(shape.iter().product()))
    }

    /// The same values with the axes in memory in another order (slowest first), and gaps between rows.
    pub fn laid_out(&self, order: [usize; 4]) -> Given {
        let Given::Values { dtype, shape, .. } = self else { panic!("a weight has no strides") };
        let (mut strides, mut step) = ([0; 4], 1);
        for axis in order.into_iter().rev() {
            strides[axis] = step;
            step = step * shape[axis] + 3;
        }
        let offset = 5;
        let mut data = vec![f64::NAN; offset + step * shape[order[0]].max(1) + 1];
        let all = self.to_vec();
        for (row, values) in rows(*shape).zip(all.chunks(shape[3].max(1))) {
            for (i, value) in values.iter().enumerate() {
                let [a, b, c] = row;
                data[offset + a * strides[0] + b * strides[1] + c * strides[2] + i * strides[3]] = *value;
            }
        }
        Given::Values { dtype: *dtype, data, shape: *shape, strides, offset }
    }

    /// Held in another type: the values are not changed.
    pub fn held_as(mut self, to: DType) -> Given {
        if let Given::Values { dtype, .. } = &mut self {
            *dtype = to;
        }
        self
    }

    pub fn shape(&self) -> [usize; 4] {
        match self {
            Given::Values { shape, .. } => *shape,
            Given::Weight { info, .. } => {
                let mut shape = [1; 4];
                shape[4 - info.shape.len()..].copy_from_slice(&info.shape);
                shape
            }
        }
    }

    /// In logical order.
    pub fn to_vec(&self) -> Vec<f64> {
        match self {
            Given::Values { data, shape, strides, offset, .. } => {
                Strided { data, shape: *shape, strides: *strides, offset: *offset }.to_vec()
            }
            Given::Weight { info, bytes } => TensorRef { info, bytes }.decode(),
        }
    }

    /// The same layout with other values, given in logical order.
    pub fn with(&self, values: &[f64]) -> Given {
        let mut out = self.clone();
        let Given::Values { data, shape, strides, offset, .. } = &mut out else {
            panic!("a weight is fixed")
        };
        for (row, values) in rows(*shape).zip(values.chunks(shape[3].max(1))) {
            for (i, value) in values.iter().enumerate() {
                let at = (0..3).map(|axis| row[axis] * strides[axis]).sum::<usize>() + i * strides[3];
                data[*offset + at] = *value;
            }
        }
        out
    }
}

/// One node.
#[derive(Clone)]
pub struct Trial {
    pub op: Op,
    pub params: Params,
    pub given: Vec<Option<Given>>,
    pub shape: [usize; 4],
    pub arithmetic: Arithmetic,
}

impl Trial {
    pub fn new(op: Op, given: Vec<Option<Given>>, shape: [usize; 4]) -> Trial {
        Trial { op, params: Params::default(), given, shape, arithmetic: Arithmetic::LLAMA_CPU }
    }

    pub fn rule(&self) -> &'static Rule {
        rule(&self.op).expect("an op with a rule")
    }

    /// Calls `f` with the sources as numbers of type S.
    pub fn with<S: Scalar, R>(&self, f: impl FnOnce(&Args<'_, S>) -> R) -> R {
        let stored: Vec<Vec<S>> = self
            .given
            .iter()
            .map(|given| match given {
                Some(Given::Values { data, .. }) => data.iter().map(|v| S::from_f64(*v)).collect(),
                _ => Vec::new(),
            })
            .collect();
        let sources = self.given.iter().zip(&stored).map(|(given, data)| {
            given.as_ref().map(|given| match given {
                Given::Values { dtype, shape, strides, offset, .. } => Source {
                    dtype: *dtype,
                    data: Data::Values(Strided { data, offset: *offset, shape: *shape, strides: *strides }),
                },
                Given::Weight { info, bytes } => {
                    Source { dtype: info.dtype, data: Data::Weight(TensorRef { info, bytes }) }
                }
            })
        });
        f(&Args {
            name: "trial",
            params: &self.params,
            sources: sources.collect(),
            shape: self.shape,
            dtype: DType::F32,
            arithmetic: &self.arithmetic,
            tokens: None,
        })
    }

    pub fn single(&self) -> Vec<f64> {
        let out = self.with(|args| (self.rule().single)(args)).expect("sources that fit");
        out.into_iter().map(f64::from).collect()
    }

    pub fn double(&self) -> Vec<f64> {
        self.with(|args| (self.rule().double)(args)).expect("sources that fit")
    }

    pub fn bound(&self, exact: &[f64]) -> Vec<f64> {
        self.with(|args| match &self.rule().check {
            Check::Bound(bound) | Check::Settled { bound, .. } => bound(args, exact),
            _ => panic!("{} has no bound", self.op),
        })
    }

    /// The largest error in units of the bound; the exact result is settled first.
    pub fn excess(&self, recorded: &[f64]) -> f64 {
        let mut exact = self.double();
        if let Check::Settled { settle, .. } = &self.rule().check {
            self.with(|args| settle(args, &mut exact, recorded));
        }
        let bound = self.bound(&exact);
        assert_eq!((exact.len(), bound.len()), (recorded.len(), recorded.len()));
        let of_bound = exact.iter().zip(recorded).zip(bound).map(|((e, r), b)| {
            assert!(b >= 0.0 && b.is_finite(), "a bound {b}");
            if e == r { 0.0 } else { (e - r).abs() / b }
        });
        of_bound.fold(0.0, |max, x| if x > max || x.is_nan() { x } else { max })
    }

    /// f32 stays within the bound of f64.
    pub fn assert_single_within_bound(&self) {
        let excess = self.excess(&self.single());
        assert!(excess <= 1.0, "{}: f32 is at {excess} of its bound", self.op);
    }

    /// Errors of a source up to `size` of its values move the result no more than the rule says, and the rule says
    /// not more than `slack` times what was seen anywhere.
    pub fn assert_carries(&self, slot: usize, size: f64, slack: f64) {
        let mut numbers = Numbers::new(77 + slot as u64);
        let exact = self.double();
        let given = self.given[slot].clone().expect("a source");
        let values = given.to_vec();
        let error: Vec<f64> = values.iter().map(|v| size * v.abs() * numbers.unit()).collect();
        let carried = self.with(|args| (self.rule().carry)(args, &exact, slot, &error));
        assert_eq!(carried.len(), exact.len());
        let mut largest = 0f64;
        for attempt in 0..24 {
            let side = |numbers: &mut Numbers| if attempt == 0 || numbers.unit() < 0.5 { 1.0 } else { -1.0 };
            let moved: Vec<f64> =
                values.iter().zip(&error).map(|(v, e)| v + side(&mut numbers) * e).collect();
            let mut trial = self.clone();
            trial.given[slot] = Some(given.with(&moved));
            for (i, (moved, exact)) in trial.double().iter().zip(&exact).enumerate() {
                let off = if moved == exact { 0.0 } else { (moved - exact).abs() };
                let (moved, rounding) = (off, 1e-12 * exact.abs());
                // Errors of a size are no derivatives: what is quadratic in them is up to as many times larger.
                let limit = carried[i] * (1.0 + 4.0 * size) + rounding;
                assert!(moved <= limit, "{} slot {slot}: element {i} moved by {moved}, not {limit}", self.op);
                largest = if carried[i] > 0.0 { largest.max(moved / carried[i]) } else { largest };
            }
        }
        assert!(largest * slack >= 1.0, "{} slot {slot}: only {largest} of what was carried", self.op);
    }
}
