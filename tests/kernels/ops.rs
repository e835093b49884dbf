//! The other kernels: norm, bias, RoPE, cache, attention, residual sum, gated activation, statistics.

use parity::engine::cuda::calls::{self, AttentionData, NormShape, Stats};
use parity::model::graph::{
    Activation, Attention, Glu, GluForm, KvMap, Mask, NormStyle, Pairing, Rope, RopePosition,
};
use parity::numerics::Storage;

use crate::data::{Memory, Random};
use crate::{U32, check, host, run, storage_rounding};

const STORAGES: [Storage; 2] = [Storage::F32, Storage::F16];

fn words(values: &[i32]) -> Memory {
    Memory::of_bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

#[test]
fn norms() {
    let Some(kernels) = host::kernels() else { return };
    let styles = [
        NormStyle::Rms,
        NormStyle::NoWeight,
        NormStyle::WeightTwice,
        NormStyle::LayerNorm,
        NormStyle::UnitOffset,
    ];
    for (storage, style) in STORAGES.into_iter().flat_map(|s| styles.map(|style| (s, style))) {
        for width in [1, 32, 77, 600] {
            let (mut random, groups, eps) = (Random(width as u64), 3, 1e-6);
            let x = Memory::stored(&random.values(groups * width), storage);
            let xs = x.values(storage);
            let weight = random.values(width);
            let w = Memory::of_f32(&weight);
            let out = Memory::room(groups * width, storage);
            let shape = NormShape { groups, width, eps, style };
            let call = calls::norm(x.address(), w.address(), out.address(), shape, storage);
            let found = run(kernels, &[call], &out, storage);
            check(&format!("norm {style:?}"), &found, |i| {
                let x: Vec<f64> = xs[i / width * width..][..width].iter().map(|x| f64::from(*x)).collect();
                let n = width as f64;
                let mean = if style == NormStyle::LayerNorm { x.iter().sum::<f64>() / n } else { 0.0 };
                let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
                let (normed, w) =
                    ((x[i % width] - mean) / (square + eps).sqrt(), f64::from(weight[i % width]));
                let exact = match style {
                    NormStyle::Rms | NormStyle::LayerNorm => normed * w,
                    NormStyle::NoWeight => normed,
                    NormStyle::WeightTwice => normed * w * w,
                    NormStyle::UnitOffset => normed * (1.0 + w),
                };
                // The mean's rounding matters where it is nearly all of x; with one column x - mean is 0.
                let cancelled = mean.abs() / (square + eps).sqrt();
                (exact, 8.0 * U32 * (exact.abs() + cancelled) + storage_rounding(exact, storage))
            });
        }
    }
}

#[test]
fn biases() {
    let Some(kernels) = host::kernels() else { return };
    for (storage, times) in STORAGES.into_iter().flat_map(|s| [(s, 0), (s, 1), (s, 2)]) {
        let (mut random, rows, width) = (Random(5), 3, 101);
        let x = Memory::stored(&random.values(rows * width), storage);
        let xs = x.values(storage);
        let bias = random.values(width);
        let b = Memory::of_f32(&bias);
        for address in [b.address(), 0] {
            let out = Memory::room(rows * width, storage);
            let call = calls::bias(x.address(), address, out.address(), [rows, width], times, storage);
            let found = run(kernels, &[call], &out, storage);
            check("bias", &found, |i| {
                let added = if address == 0 { 0.0 } else { f64::from(times) * f64::from(bias[i % width]) };
                let exact = f64::from(xs[i]) + added;
                (exact, 2.0 * U32 * (exact.abs() + added.abs()) + storage_rounding(exact, storage))
            });
        }
    }
}

/// The table that the engine builds: cosine and sine of position · base^(-2i/dims).
fn angles(positions: usize, dims: usize, base: f64) -> Vec<f32> {
    let pair = |p: usize, i: usize| (p as f64 * base.powf(-2.0 * i as f64 / dims as f64)).sin_cos();
    (0..positions)
        .flat_map(|p| (0..dims / 2).map(move |i| pair(p, i)))
        .flat_map(|(sin, cos)| [cos as f32, sin as f32])
        .collect()
}

#[test]
fn ropes() {
    let Some(kernels) = host::kernels() else { return };
    let shapes = [(32, 32), (80, 80), (64, 24), (7, 4)];
    for (storage, (head_width, dims)) in STORAGES.into_iter().flat_map(|s| shapes.map(|shape| (s, shape))) {
        for (pairing, times, position) in [
            (Pairing::Half, 1, RopePosition::Own),
            (Pairing::Interleaved, 1, RopePosition::Own),
            (Pairing::Half, 2, RopePosition::Own),
            (Pairing::Interleaved, 0, RopePosition::Own),
            (Pairing::Half, 1, RopePosition::InStep),
        ] {
            let (rows, heads, first, base) = (3, 5, 11, 1e4);
            let x = Memory::stored(&Random(1).values(rows * heads * head_width), storage);
            let xs = x.values(storage);
            let out = Memory::room(xs.len(), storage);
            let rope =
                Rope { base, head_width, dims, pairing, freqs: None, position, sign: 1, times: times as u32 };
            let table = Memory::of_f32(&angles(first + rows, dims, base));
            let start = words(&[first as i32]);
            let addresses = [x.address(), table.address(), start.address(), out.address()];
            let call = calls::rope(&rope, addresses, [rows, heads], storage);
            let found = run(kernels, &[call], &out, storage);
            check(&format!("rope {pairing:?} {dims} of {head_width}"), &found, |index| {
                let (t, c) = (index / (heads * head_width), index % head_width);
                let own = f64::from(xs[index]);
                if c >= dims {
                    return (own, storage_rounding(own, storage));
                }
                let half = dims / 2;
                let (i, is_second, partner) = match pairing {
                    Pairing::Half if c < half => (c, false, index + half),
                    Pairing::Half => (c - half, true, index - half),
                    Pairing::Interleaved => (c / 2, c % 2 == 1, index ^ 1),
                };
                // Heads may have an odd width: the partner is within the head, not within aligned pairs.
                let partner = match pairing {
                    Pairing::Interleaved => index - c + (c ^ 1),
                    Pairing::Half => partner,
                };
                let position = if position == RopePosition::InStep { t } else { first + t };
                let angle = times as f64 * position as f64 * f64::powf(base, -2.0 * i as f64 / dims as f64);
                let other = f64::from(xs[partner]);
                let exact = own * angle.cos() + if is_second { 1.0 } else { -1.0 } * other * angle.sin();
                let size = own.abs() + other.abs();
                let roundings = 1.0 + 4.0 * times as f64;
                (exact, roundings * U32 * size + storage_rounding(exact, storage))
            });
        }
    }
}

#[test]
fn caches() {
    let Some(kernels) = host::kernels() else { return };
    for (storage, kv) in
        [(Storage::F32, Storage::F32), (Storage::F32, Storage::F16), (Storage::F16, Storage::F16)]
    {
        let (rows, width, first) = (3, 37, 2);
        let x = Memory::stored(&Random(2).values(rows * width), storage);
        let cache = Memory::room((first + rows + 1) * width, kv);
        let start = words(&[first as i32]);
        let addresses = [x.address(), cache.address(), start.address()];
        let call = calls::cache(addresses, [rows, width], storage, kv);
        let found = run(kernels, &[call], &cache, kv);
        assert!(found[..first * width].iter().all(|v| v.is_nan()), "earlier positions are left alone");
        assert!(found[(first + rows) * width..].iter().all(|v| v.is_nan()), "later positions are left alone");
        let written = &found[first * width..(first + rows) * width];
        assert_eq!(written, Memory::stored(&x.values(storage), kv).values(kv));
    }
}

/// One attention with random inputs: (call's result, scores, probs, exact result, exact probs).
struct AttentionCase {
    op: Attention,
    rows: usize,
    first: usize,
    storage: Storage,
    kv: Storage,
}

impl AttentionCase {
    fn visible(&self, t: usize) -> std::ops::Range<usize> {
        let (own, cached) = ((self.first + t) as i64, (self.first + self.rows) as i64);
        let (from, to) = match self.op.mask {
            Mask::Causal => (0, own + 1),
            Mask::None => (0, cached),
            Mask::Shift(shift) => (0, own + 1 + shift),
            Mask::StepOnly => (self.first as i64, own + 1),
        };
        let to = to.clamp(0, cached) as usize;
        (from as usize).min(to)..to
    }

    fn check(&self) {
        let Some(kernels) = host::kernels() else { return };
        let Attention { heads, kv_heads, head_width, .. } = self.op;
        let cached = self.first + self.rows;
        let mut random = Random(cached as u64);
        let q = Memory::stored(&random.values(self.rows * heads * head_width), self.storage);
        let k = Memory::stored(&random.values(cached * kv_heads * head_width), self.kv);
        let v = Memory::stored(&random.values(cached * kv_heads * head_width), self.kv);
        let start = words(&[self.first as i32]);
        let scores = Memory::room(heads * self.rows * cached, Storage::F32);
        let probs = Memory::room(heads * self.rows * cached, Storage::F32);
        let out = Memory::room(self.rows * heads * head_width, self.storage);
        let mut data = AttentionData {
            q: q.address(),
            k: k.address(),
            v: v.address(),
            out: out.address(),
            scores: scores.address(),
            probs: probs.address(),
            first: start.address(),
        };
        let call = |data| calls::attention(&self.op, data, self.rows, self.storage, self.kv).unwrap();
        let found = run(kernels, &[call(data)], &out, self.storage);
        (data.scores, data.probs) = (0, 0);
        let untraced = run(kernels, &[call(data)], &out, self.storage);
        assert_eq!(found, untraced, "storing scores and probabilities changes nothing");

        let (q, k, v) = (q.values(self.storage), k.values(self.kv), v.values(self.kv));
        let kv_head = |h: usize| match self.op.kv_map {
            KvMap::Group => h / (heads / kv_heads),
            KvMap::Modulo => h % kv_heads,
        };
        let key = |h: usize, s: usize, c: usize| (s * kv_heads + kv_head(h)) * head_width + c;
        let query = |h: usize, t: usize, c: usize| (t * heads + h) * head_width + c;
        let score = |h: usize, t: usize, s: usize| -> f64 {
            (0..head_width).map(|c| f64::from(q[query(h, t, c)]) * f64::from(k[key(h, s, c)])).sum()
        };
        let probabilities = |h: usize, t: usize| -> Vec<f64> {
            let seen = self.visible(t);
            let scaled: Vec<f64> = (0..cached)
                .map(|s| if seen.contains(&s) { score(h, t, s) * self.op.scale } else { 0.0 })
                .collect();
            if !self.op.softmax {
                return scaled;
            }
            let exp: Vec<f64> = scaled
                .iter()
                .enumerate()
                .map(|(s, x)| if seen.contains(&s) { x.exp() } else { 0.0 })
                .collect();
            let sum: f64 = exp.iter().sum();
            exp.iter().map(|p| if sum == 0.0 { 0.0 } else { p / sum }).collect()
        };
        // |q·k| <= E with values up to 1: 10 roundings of a dot product by lanes, at most.
        let width = head_width as f64;
        let score_error = 10.0 * U32 * width;
        check("scores", &scores.values(Storage::F32), |i| {
            (score(i / cached / self.rows, i / cached % self.rows, i % cached), score_error)
        });
        // An error of a scaled score is the same relative error of its probability; exp adds two roundings.
        let prob_error =
            if self.op.softmax { 2.0 * (score_error * self.op.scale + 4.0 * U32) } else { score_error };
        check("probs", &probs.values(Storage::F32), |i| {
            let p = probabilities(i / cached / self.rows, i / cached % self.rows)[i % cached];
            (p, prob_error * if self.op.softmax { p } else { self.op.scale })
        });
        check("context", &found, |i| {
            let (t, h, c) = (i / head_width / heads, i / head_width % heads, i % head_width);
            let p = probabilities(h, t);
            let products = p.iter().enumerate().map(|(s, p)| p * f64::from(v[key(h, s, c)]));
            let exact: f64 = products.clone().sum();
            let size: f64 = if self.op.softmax { products.map(f64::abs).sum() } else { cached as f64 };
            let chain = U32 * (cached as f64 / 8.0 + 16.0);
            (exact, (prob_error + chain) * size + storage_rounding(exact, self.storage))
        });
    }
}

#[test]
fn attentions() {
    let healthy = |heads, kv_heads, head_width: usize| Attention {
        heads,
        kv_heads,
        head_width,
        scale: 1.0 / (head_width as f64).sqrt(),
        kv_map: KvMap::Group,
        mask: Mask::Causal,
        softmax: true,
    };
    let (f32s, f16s) = (Storage::F32, Storage::F16);
    let case = |op, rows, first, storage, kv| AttentionCase { op, rows, first, storage, kv }.check();
    case(healthy(4, 2, 32), 9, 0, f32s, f32s);
    case(healthy(2, 1, 64), 1, 270, f32s, f16s);
    case(healthy(6, 2, 80), 11, 30, f16s, f16s);
    case(healthy(2, 2, 128), 10, 57, f32s, f32s);
    case(healthy(3, 1, 40), 8, 300, f16s, f16s);
    for mask in [Mask::None, Mask::Shift(1), Mask::Shift(-1), Mask::Shift(-4), Mask::StepOnly] {
        case(Attention { mask, ..healthy(2, 1, 32) }, 10, 35, f32s, f32s);
        case(Attention { mask, ..healthy(2, 1, 32) }, 3, 0, f32s, f32s);
    }
    case(Attention { kv_map: KvMap::Modulo, ..healthy(6, 2, 32) }, 5, 3, f32s, f32s);
    case(Attention { scale: 1.0, ..healthy(2, 2, 32) }, 5, 3, f32s, f32s);
    case(Attention { softmax: false, ..healthy(2, 2, 32) }, 10, 40, f32s, f32s);
}

/// What a row does not see must not reach it, not even as 0·NaN.
#[test]
fn masked_nan_stays_out() {
    let Some(kernels) = host::kernels() else { return };
    let op = Attention {
        heads: 1,
        kv_heads: 1,
        head_width: 32,
        scale: 1.0,
        kv_map: KvMap::Group,
        mask: Mask::Causal,
        softmax: true,
    };
    let rows = 12;
    let mut values = Random(4).values(rows * 32);
    values[7 * 32..8 * 32].fill(f32::NAN);
    let (x, start, out) = (Memory::of_f32(&values), words(&[0]), Memory::room(rows * 32, Storage::F32));
    let address = x.address();
    let data = AttentionData {
        q: address,
        k: address,
        v: address,
        out: out.address(),
        scores: 0,
        probs: 0,
        first: start.address(),
    };
    let call = calls::attention(&op, data, rows, Storage::F32, Storage::F32).unwrap();
    let found = run(kernels, &[call], &out, Storage::F32);
    assert!(found[..7 * 32].iter().all(|v| v.is_finite()), "rows before the NaN are numbers");
    assert!(found[7 * 32..].iter().all(|v| v.is_nan()), "rows that see the NaN are NaN");
}

#[test]
fn sums_and_activations() {
    let Some(kernels) = host::kernels() else { return };
    let n = 1001;
    for storage in STORAGES {
        let mut random = Random(8);
        let a = Memory::stored(&random.values(n), storage);
        let b = Memory::stored(&random.values(n).iter().map(|v| 8.0 * v).collect::<Vec<f32>>(), storage);
        let (xs, ys) = (a.values(storage), b.values(storage));
        let out = Memory::room(n, storage);
        let addresses = [a.address(), b.address(), out.address()];
        for scale in [[1.0, 1.0], [0.0, 1.0], [1.0, 2.0]] {
            let found = run(kernels, &[calls::add(addresses, n, scale, storage)], &out, storage);
            check("add", &found, |i| {
                let (x, y) = (scale[0] * f64::from(xs[i]), scale[1] * f64::from(ys[i]));
                (x + y, U32 * (x.abs() + y.abs()) + storage_rounding(x + y, storage))
            });
        }
        let glus = [Activation::Silu, Activation::GeluTanh, Activation::GeluErf];
        let forms = [GluForm::GateTimesUp, GluForm::ActOnUp, GluForm::NoUp];
        for (activation, form) in glus.into_iter().flat_map(|a| forms.map(|form| (a, form))) {
            let glu = Glu { activation, form };
            let found = run(kernels, &[calls::glu(glu, addresses, n, storage)], &out, storage);
            check(&format!("{activation:?} {form:?}"), &found, |i| {
                let (gate, up) = (f64::from(xs[i]), f64::from(ys[i]));
                let act = |x: f64| match activation {
                    Activation::Silu => x / (1.0 + (-x).exp()),
                    Activation::GeluTanh => {
                        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                        0.5 * x * (1.0 + inner.tanh())
                    }
                    // SAFETY: erf of the C library takes any number.
                    Activation::GeluErf => 0.5 * x * (1.0 + unsafe { erf(x / std::f64::consts::SQRT_2) }),
                };
                let (turned, factor) = match form {
                    GluForm::GateTimesUp => (gate, up),
                    GluForm::ActOnUp => (up, gate),
                    GluForm::NoUp => (gate, 1.0),
                };
                let exact = act(turned) * factor;
                // 1 + tanh and 1 + erf cancel for negative x: absolute in x, not relative to the result.
                let size = exact.abs() + (turned * factor).abs();
                (exact, 8.0 * U32 * size + storage_rounding(exact, storage))
            });
        }
    }
}

unsafe extern "C" {
    fn erf(x: f64) -> f64;
}

#[test]
fn statistics() {
    let Some(kernels) = host::kernels() else { return };
    for (n, storage) in [(1, Storage::F32), (999, Storage::F16), (70_001, Storage::F32)] {
        let mut random = Random(n as u64);
        let (mut x, y) = (random.values(n), random.values(n));
        if n > 500 {
            (x[3], x[400]) = (f32::NAN, f32::INFINITY);
            (x[77], x[88]) = (y[77] + 50.0, y[88] + 50.0);
        }
        let a = Memory::stored(&x, storage);
        let b = Memory::of_f32(&y);
        let x = a.values(storage);
        let parts = Memory::new(calls::STATS_PARTS * size_of::<Stats>());
        let out = Memory::new(size_of::<Stats>());
        let addresses = [a.address(), b.address(), parts.address(), out.address()];
        run(kernels, &calls::stats(addresses, n, storage), &out, Storage::F32);
        // SAFETY: the kernel wrote one.
        let found = unsafe { *(out.address() as *const Stats) };

        let pairs = x.iter().zip(&y).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        let finite: Vec<(usize, (f64, f64))> =
            pairs.enumerate().filter(|(_, (a, b))| a.is_finite() && b.is_finite()).collect();
        let sum = |f: &dyn Fn(f64, f64) -> f64| finite.iter().map(|(_, (a, b))| f(*a, *b)).sum::<f64>();
        let max = finite.iter().map(|(_, (a, b))| (a - b).abs()).fold(-1.0, f64::max);
        let worst = finite.iter().find(|(_, (a, b))| (a - b).abs() == max).map_or(0, |(i, _)| *i);
        assert_eq!((found.abs_err_max, found.worst), (max, worst as i64));
        assert_eq!(found.nonfinite_a, x.iter().filter(|v| !v.is_finite()).count() as i64);
        assert_eq!(found.nonfinite_b, 0);
        assert_eq!(found.positive, sum(&|a, b| f64::from(u8::from(a > b))) as i64);
        let sums = [
            (found.squared_error, sum(&|a, b| (a - b).powi(2))),
            (found.squared_a, sum(&|a, _| a * a)),
            (found.squared_b, sum(&|_, b| b * b)),
            (found.abs_error, sum(&|a, b| (a - b).abs())),
        ];
        for (found, exact) in sums {
            assert!((found - exact).abs() <= n as f64 * f64::EPSILON * exact, "{found} for {exact}");
        }
        let products = sum(&|a, b| (a * b).abs());
        assert!((found.product - sum(&|a, b| a * b)).abs() <= n as f64 * f64::EPSILON * products);
    }
}
