//! One op with its parameters, sources and what a kernel made of them; and the kernels against the rules.

use std::collections::BTreeMap;

use half::f16;
use parity_graph::{Op, Params};

use crate::arithmetic::Arithmetic;
use crate::gguf::DType;
use crate::ops::source::{Data, Source, Strided, contiguous, rows};
use crate::ops::{Args, Check, Rule, rule};
use crate::scalar::Scalar;

/// Values through strides.
#[derive(Clone)]
pub struct Values {
    pub dtype: DType,
    pub shape: [usize; 4],
    pub strides: [usize; 4],
    pub data: Vec<f64>,
}

impl Values {
    pub fn whole(dtype: DType, shape: [usize; 4], data: Vec<f64>) -> Values {
        Values { dtype, shape, strides: contiguous(shape), data }
    }

    /// The same values in logical order without gaps.
    pub fn compact(&self) -> Values {
        let strided = Strided { data: &self.data, offset: 0, shape: self.shape, strides: self.strides };
        Values::whole(self.dtype, self.shape, strided.to_vec())
    }

    /// The same values in reversed order of axes in memory, with gaps that hold what must not be read.
    pub fn scattered(&self) -> Values {
        let compact = self.compact();
        let [a, b, c, d] = self.shape;
        let strides = [2, 3 * a, 3 * a * b, 3 * a * b * c];
        let mut data = vec![f64::NAN; 3 * a * b * c * d + 3];
        for [i, j, k] in rows(self.shape) {
            for l in 0..d {
                let at = i * strides[0] + j * strides[1] + k * strides[2] + l * strides[3];
                data[at] = compact.data[((i * b + j) * c + k) * d + l];
            }
        }
        Values { strides, data, ..compact }
    }
}

/// A computed node.
#[derive(Clone)]
pub struct Case {
    pub op: Op,
    pub params: Params,
    pub sources: Vec<Option<Values>>,
    pub result: Values,
}

impl Case {
    pub fn rule(&self) -> &'static Rule {
        rule(&self.op).unwrap_or_else(|| panic!("{} has no rule", self.op))
    }

    /// Hands the arguments of the rule to `f`.
    pub fn with<S: Scalar, R>(&self, arithmetic: &Arithmetic, f: impl FnOnce(&Args<'_, S>) -> R) -> R {
        let data: Vec<Option<Vec<S>>> = self
            .sources
            .iter()
            .map(|source| Some(source.as_ref()?.data.iter().map(|&x| S::from_f64(x)).collect()))
            .collect();
        let sources = self.sources.iter().zip(&data).map(|(source, data)| {
            let (source, data) = (source.as_ref()?, data.as_ref()?);
            let values = Strided { data, offset: 0, shape: source.shape, strides: source.strides };
            Some(Source { dtype: source.dtype, data: Data::Values(values) })
        });
        f(&Args {
            name: "a node",
            params: &self.params,
            sources: sources.collect(),
            shape: self.result.shape,
            dtype: self.result.dtype,
            arithmetic,
            tokens: None,
        })
    }

    pub fn single(&self, arithmetic: &Arithmetic) -> Vec<f32> {
        self.with(arithmetic, |args| (self.rule().single)(args)).unwrap()
    }

    pub fn double(&self, arithmetic: &Arithmetic) -> Vec<f64> {
        self.with(arithmetic, |args| (self.rule().double)(args)).unwrap()
    }

    pub fn bound(&self, arithmetic: &Arithmetic, exact: &[f64]) -> Vec<f64> {
        self.with(arithmetic, |args| match self.rule().check {
            Check::Bound(bound) | Check::Settled { bound, .. } => bound(args, exact),
            _ => vec![0.0; exact.len()],
        })
    }

    /// The same op of other source values, without gaps.
    pub fn replaced(&self, slot: usize, data: Vec<f64>) -> Case {
        let mut case = self.clone();
        let source = case.sources[slot].as_ref().unwrap();
        case.sources[slot] = Some(Values::whole(source.dtype, source.shape, data));
        case
    }
}

/// The dtype of a name as ggml spells it in small letters.
fn dtype(name: &str) -> DType {
    DType::all().find(|dtype| dtype.name().eq_ignore_ascii_case(name)).unwrap()
}

fn axes(words: &[&str]) -> [usize; 4] {
    std::array::from_fn(|i| words[3 - i].parse().unwrap())
}

fn values(dtype: DType, line: &str) -> Vec<f64> {
    let bits = |word: &str| u32::from_str_radix(word, 16).unwrap();
    let value = |word: &str| match dtype {
        DType::F32 => f64::from(f32::from_bits(bits(word))),
        DType::F16 => f64::from(f16::from_bits(bits(word) as u16)),
        _ => word.parse().unwrap(),
    };
    line.split(' ').map(value).collect()
}

/// Reads what `scripts/op-cases.py` wrote.
pub fn parse(text: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split(' ').collect();
        let next = lines.next().unwrap();
        if let ["case", op] = words[..] {
            let mut params = Params::default();
            for (word, text) in params.0.iter_mut().zip(next.split(' ')) {
                *word = u32::from_str_radix(text, 16).unwrap();
            }
            let result = Values::whole(DType::F32, [0; 4], Vec::new());
            cases.push(Case { op: Op::parse(op), params, sources: Vec::new(), result });
            continue;
        }
        let case = cases.last_mut().unwrap();
        match words[0] {
            "src" => {
                let (slot, dtype): (usize, DType) = (words[1].parse().unwrap(), dtype(words[2]));
                let (shape, strides) = (axes(&words[3..7]), axes(&words[7..11]));
                case.sources.resize(case.sources.len().max(slot + 1), None);
                case.sources[slot] = Some(Values { dtype, shape, strides, data: values(dtype, next) });
            }
            "dst" => {
                let dtype = dtype(words[1]);
                case.result = Values::whole(dtype, axes(&words[2..6]), values(dtype, next));
            }
            other => panic!("{other}"),
        }
    }
    cases
}

/// What the kernels of a Haswell CPU made.
pub fn recorded() -> Vec<Case> {
    match std::env::var_os("PARITY_OP_CASES") {
        Some(path) => parse(&std::fs::read_to_string(path).unwrap()),
        None => parse(include_str!("cases.txt")),
    }
}

/// |a - b| over the bound; 0 where both are the same, also infinite or no number.
pub fn ratio(a: f64, b: f64, bound: f64) -> f64 {
    if a == b || (a.is_nan() && b.is_nan()) {
        return 0.0;
    }
    let off = (a - b).abs();
    if off <= bound { off / bound } else { f64::INFINITY }
}

#[test]
fn llama_cpps_kernels_are_within_the_bounds() {
    let mut worst: BTreeMap<String, f64> = BTreeMap::new();
    for (number, case) in recorded().iter().enumerate() {
        let exact = case.double(&Arithmetic::LLAMA_CPU);
        let bound = case.bound(&Arithmetic::LLAMA_CPU, &exact);
        assert_eq!(exact.len(), case.result.data.len());
        for (i, (&found, &exact)) in case.result.data.iter().zip(&exact).enumerate() {
            let ratio = ratio(found, exact, bound[i]);
            let off = found - exact;
            assert!(
                ratio <= 1.0,
                "case {number}, {} [{i}]: {found:e}, not {exact:e}, off by {off:e}, bound {:e}",
                case.op,
                bound[i]
            );
            let worst = worst.entry(case.op.to_string()).or_default();
            *worst = worst.max(ratio);
        }
    }
    // How much of each bound the kernels need: `cargo test -- --nocapture` shows it.
    println!("{worst:#.2?}");
    assert!(worst.len() >= 39, "{} ops", worst.len());
}
