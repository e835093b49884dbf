//! The other kernels: norm, bias, RoPE, cache, residual sum, gated activation.

use parity::engine::cuda::calls::{self, NormShape, RopeData, RopePart};
use parity::engine::fused::graph::{Activation, Anchor, BySteps, Glu, NormStyle, Pairing, Position, Rope};
use parity::numerics::Storage;

use crate::data::{Memory, Random};
use crate::{U32, check, host, run, storage_rounding};

const STORAGES: [Storage; 2] = [Storage::F32, Storage::F16];

pub fn words(values: &[i32]) -> Memory {
    Memory::of_bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

#[test]
fn norms() {
    let Some(kernels) = host::kernels() else { return };
    let styles = [
        NormStyle::RMS,
        NormStyle { times: 0, ..NormStyle::RMS },
        NormStyle { times: 2, ..NormStyle::RMS },
        NormStyle { centred: true, ..NormStyle::RMS },
        NormStyle { offset: 1.0, ..NormStyle::RMS },
    ];
    for (storage, style) in STORAGES.into_iter().flat_map(|s| styles.map(|style| (s, style))) {
        for width in [1, 32, 77, 600] {
            let (mut random, groups, eps) = (Random(width as u64), 3, 1e-6);
            let x = Memory::stored(&random.values(groups * width), storage);
            let xs = x.values(storage);
            let weight = random.values(width);
            let w = Memory::of_f32(&weight);
            let out = Memory::room(groups * width, storage);
            let number = calls::norm_style(style).unwrap();
            let shape = NormShape { groups, width, eps, style: number };
            let call = calls::norm(x.address(), w.address(), out.address(), shape, storage);
            let found = run(kernels, &[call], &out, storage);
            check(&format!("norm {style:?}"), &found, |i| {
                let x: Vec<f64> = xs[i / width * width..][..width].iter().map(|x| f64::from(*x)).collect();
                let n = width as f64;
                let mean = if style.centred { x.iter().sum::<f64>() / n } else { 0.0 };
                let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
                let (normed, w) =
                    ((x[i % width] - mean) / (square + eps).sqrt(), f64::from(weight[i % width]));
                let exact = normed * (style.offset + w).powi(style.times as i32);
                // The mean's rounding matters where it is nearly all of x; with one column x - mean is 0.
                let cancelled = mean.abs() / (square + eps).sqrt();
                (exact, 8.0 * U32 * (exact.abs() + cancelled) + storage_rounding(exact, storage))
            });
        }
    }
}

/// The first of the largest logits; no NaN, and token 0 where there is nothing else.
#[test]
fn the_next_token() {
    let Some(kernels) = host::kernels() else { return };
    let vocab = 5003;
    let mut logits = Random(3).values(vocab);
    (logits[17], logits[4000], logits[4999]) = (f32::NAN, 40.0, 40.0);
    for (logits, expected) in
        [(logits, 4000), (vec![f32::NAN; vocab], 0), (vec![f32::NEG_INFINITY; vocab], 0)]
    {
        let logits = Memory::of_f32(&logits);
        let tokens = Memory::of_bytes(&[0; 4 * 8]);
        let room = Memory::of_bytes(&[0; calls::NEXT_ROOM]);
        let [at, to, found] = [&logits, &tokens, &room].map(Memory::address);
        for seed in crate::seeds() {
            let step = words(&[5, 1]);
            let call = calls::next_token(at, step.address(), to, found, vocab);
            kernels.run(&call, seed).unwrap();
            let word = |memory: &Memory, i: usize| memory.bytes()[4 * i..4 * i + 4].to_vec();
            assert_eq!(word(&step, 0), 6i32.to_le_bytes(), "one position further on");
            assert_eq!(word(&step, 1), i32::to_le_bytes(expected));
            assert_eq!(word(&tokens, 6), i32::to_le_bytes(expected));
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
    let own = BySteps::all(Position::OWN);
    for (storage, (head_width, dims)) in STORAGES.into_iter().flat_map(|s| shapes.map(|shape| (s, shape))) {
        for (pairing, times, position) in [
            (Pairing::Half, 1, own),
            (Pairing::Interleaved, 1, own),
            (Pairing::Half, 2, own),
            (Pairing::Interleaved, 0, own),
            (Pairing::Half, 1, BySteps::all(Position { from: Anchor::Step, ..Position::OWN })),
        ] {
            let (rows, heads, first, base) = (3, 5, 11, 1e4);
            let x = Memory::stored(&Random(1).values(rows * heads * head_width), storage);
            let xs = x.values(storage);
            let out = Memory::room(xs.len(), storage);
            let rope =
                Rope { base, head_width, dims, pairing, freqs: None, position, sign: 1, times: times as u32 };
            let table = Memory::of_f32(&angles(first + rows, dims, base));
            let start = words(&[first as i32]);
            // A second tensor, of one head, turns in the same launch and goes to the cache.
            let key = Memory::stored(&xs[..rows * head_width], storage);
            let (turned, cache) = (
                Memory::room(rows * head_width, storage),
                Memory::room((first + rows) * head_width, storage),
            );
            let parts = [
                RopePart { x: x.address(), out: out.address(), cache: 0, heads: heads as i64 },
                RopePart { x: key.address(), out: turned.address(), cache: cache.address(), heads: 1 },
            ];
            let (table, first_at) = (table.address(), start.address());
            let data = RopeData { table, first: first_at, rows, storage, kv: storage };
            let found = run(kernels, &[calls::rope(&rope, &parts, data)], &out, storage);
            let alone = Memory::room(rows * head_width, storage);
            let part = RopePart { x: key.address(), out: alone.address(), cache: 0, heads: 1 };
            run(kernels, &[calls::rope(&rope, &[part], data)], &alone, storage);
            assert_eq!(alone.bytes(), turned.bytes(), "tensors turn independently");
            assert_eq!(cache.values(storage)[first * head_width..], alone.values(storage));
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
                let position = if position.first.from == Anchor::Step { t } else { first + t };
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
        let forms = [(false, true), (true, true), (false, false)];
        for (activation, (swapped, gated)) in glus.into_iter().flat_map(|a| forms.map(|form| (a, form))) {
            let glu = Glu { activation, swapped, gated };
            let call = calls::glu(glu, addresses, n, storage).unwrap();
            let found = run(kernels, &[call], &out, storage);
            check(&format!("{glu:?}"), &found, |i| {
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
                let (turned, other) = if swapped { (up, gate) } else { (gate, up) };
                let factor = if gated { other } else { 1.0 };
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
