//! The attention kernels against f64: head widths, masks, storing the inside, NaN.

use parity::engine::cuda::calls::{self, AttentionData, AttentionKernel};
use parity::engine::fused::graph::{Anchor, Attention, BySteps, Edge, Mask};
use parity::numerics::Storage;

use crate::data::{Memory, Random};
use crate::ops::words;
use crate::samples::sample;
use crate::{U32, check, host, run, storage_rounding};

/// Cases of a sample.
const ATTENTIONS: usize = 20;
const STRANGE: usize = 3;

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
        let Mask { first, behind } = self.op.mask.at(self.first as u32);
        let at = |edge: Edge| edge.offset + [0, self.first as i64, own, cached][edge.from as usize];
        let (from, to) = (at(first), at(behind));
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
        // More than is cached, as the engine has it.
        let capacity = cached + 300;
        let room = Memory::of_bytes(&vec![0; calls::attention_room(heads, head_width, capacity)]);
        let mut data = AttentionData {
            q: q.address(),
            k: k.address(),
            v: v.address(),
            out: out.address(),
            scores: scores.address(),
            probs: probs.address(),
            first: start.address(),
            room: room.address(),
            capacity,
        };
        let types = [self.storage, self.kv];
        let kernel = AttentionKernel::for_step(&self.op, self.rows, types);
        let call = |data| calls::attention(&self.op, data, kernel, self.rows, types).unwrap();
        let found = run(kernels, &[call(data)], &out, self.storage);
        (data.scores, data.probs) = (0, 0);
        let untraced = run(kernels, &[call(data)], &out, self.storage);
        assert_eq!(found, untraced, "storing scores and probabilities changes nothing");

        let (q, k, v) = (q.values(self.storage), k.values(self.kv), v.values(self.kv));
        let kv_head = |h: usize| (h / self.op.group) % kv_heads;
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
        let weights: Vec<Vec<f64>> =
            (0..heads * self.rows).map(|i| probabilities(i / self.rows, i % self.rows)).collect();
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
            let p = weights[i / cached][i % cached];
            (p, prob_error * if self.op.softmax { p } else { self.op.scale })
        });
        check("context", &found, |i| {
            let (t, h, c) = (i / head_width / heads, i / head_width % heads, i % head_width);
            let p = &weights[h * self.rows + t];
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
        group: heads / kv_heads,
        mask: BySteps::all(Mask::CAUSAL),
        softmax: true,
        limit: parity::engine::fused::graph::ScoreLimit::None,
    };
    let (f32s, f16s) = (Storage::F32, Storage::F16);
    let mut cases = Vec::new();
    let mut case = |op, rows, first, storage, kv| cases.push(AttentionCase { op, rows, first, storage, kv });
    case(healthy(4, 2, 32), 9, 0, f32s, f32s);
    case(healthy(2, 1, 64), 1, 270, f32s, f16s);
    case(healthy(6, 2, 80), 11, 30, f16s, f16s);
    case(healthy(2, 2, 128), 10, 57, f32s, f32s);
    case(healthy(3, 1, 40), 8, 300, f16s, f16s);
    case(healthy(2, 1, 64), 1, 700, f16s, f16s);
    case(healthy(2, 1, 128), 2, 255, f16s, f16s);
    case(healthy(2, 1, 24), 3, 510, f16s, f16s);
    case(healthy(14, 2, 64), 1, 20, f16s, f16s);
    case(healthy(20, 2, 128), 2, 300, f16s, f16s);
    // Before and behind the position from which blocks have more than 256 each.
    case(healthy(2, 1, 32), 2, 16_383, f16s, f16s);
    case(healthy(3, 1, 64), 1, 16_400, f16s, f16s);
    case(healthy(2, 1, 64), 70, 3, f16s, f16s);
    case(healthy(2, 2, 128), 33, 41, f16s, f16s);
    case(healthy(3, 1, 40), 9, 130, f16s, f16s);
    case(healthy(2, 1, 24), 66, 0, f16s, f16s);
    // Several chunks for each group of warps, and not as many for all.
    case(healthy(2, 1, 64), 20, 370, f16s, f16s);
    case(healthy(1, 1, 128), 12, 200, f16s, f16s);
    let until = |from, offset| Mask { behind: Edge::new(from, offset), ..Mask::CAUSAL };
    let own_step = Mask { first: Edge::new(Anchor::Step, 0), ..Mask::CAUSAL };
    for mask in [
        until(Anchor::End, 0),
        until(Anchor::Row, 2),
        until(Anchor::Row, 0),
        until(Anchor::Row, -3),
        own_step,
    ] {
        let mask = BySteps::all(mask);
        case(Attention { mask, ..healthy(2, 1, 32) }, 10, 35, f32s, f32s);
        case(Attention { mask, ..healthy(2, 1, 32) }, 3, 0, f32s, f32s);
        case(Attention { mask, ..healthy(2, 1, 32) }, 67, 35, f16s, f16s);
        case(Attention { mask, ..healthy(2, 1, 32) }, 4, 254, f16s, f16s);
        case(Attention { mask, ..healthy(2, 1, 32) }, 9, 250, f16s, f16s);
    }
    case(Attention { group: 1, ..healthy(6, 2, 32) }, 5, 3, f32s, f32s);
    case(Attention { group: 1, ..healthy(6, 2, 32) }, 5, 300, f16s, f16s);
    case(Attention { scale: 1.0, ..healthy(2, 2, 32) }, 5, 3, f32s, f32s);
    case(Attention { softmax: false, ..healthy(2, 2, 32) }, 10, 40, f32s, f32s);
    case(Attention { softmax: false, ..healthy(2, 2, 32) }, 10, 40, f16s, f16s);
    sample("attentions", ATTENTIONS, cases).iter().for_each(AttentionCase::check);
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
        group: 1,
        mask: BySteps::all(Mask::CAUSAL),
        softmax: true,
        limit: parity::engine::fused::graph::ScoreLimit::None,
    };
    let cases = [
        (12, 7, Storage::F32),
        (5, 3, Storage::F16),
        (30, 11, Storage::F16),
        (140, 65, Storage::F16),
        (140, 130, Storage::F16),
    ];
    for (rows, strange, storage) in sample("rows that are NaN", STRANGE, cases) {
        let mut values = Random(4).values(rows * 32);
        values[strange * 32..][..32].fill(f32::NAN);
        let (x, start, out) =
            (Memory::stored(&values, storage), words(&[0]), Memory::room(rows * 32, storage));
        let room = Memory::of_bytes(&vec![0; calls::attention_room(1, 32, rows)]);
        let address = x.address();
        let data = AttentionData {
            q: address,
            k: address,
            v: address,
            out: out.address(),
            scores: 0,
            probs: 0,
            first: start.address(),
            room: room.address(),
            capacity: rows,
        };
        let kernel = AttentionKernel::for_step(&op, rows, [storage; 2]);
        let call = calls::attention(&op, data, kernel, rows, [storage; 2]).unwrap();
        let found = run(kernels, &[call], &out, storage);
        let (before, after) = found.split_at(strange * 32);
        assert!(before.iter().all(|v| v.is_finite()), "{kernel:?}: rows before the NaN are numbers");
        assert!(after.iter().all(|v| v.is_nan()), "{kernel:?}: rows that see the NaN are NaN");
    }
}

/// A position has one result, however much room there is in the cache.
#[test]
fn room_in_the_cache_changes_nothing() {
    let Some(kernels) = host::kernels() else { return };
    let op = Attention {
        heads: 2,
        kv_heads: 1,
        head_width: 64,
        scale: 0.125,
        group: 2,
        mask: BySteps::all(Mask::CAUSAL),
        softmax: true,
        limit: parity::engine::fused::graph::ScoreLimit::None,
    };
    let first = 600;
    let mut random = Random(8);
    let q = Memory::stored(&random.values(2 * 64), Storage::F16);
    let kv = Memory::stored(&random.values((first + 1) * 64), Storage::F16);
    let start = words(&[first as i32]);
    let found = [first + 1, 1024, 4096].map(|capacity| {
        let room = Memory::of_bytes(&vec![0; calls::attention_room(2, 64, capacity)]);
        let out = Memory::room(2 * 64, Storage::F16);
        let data = AttentionData {
            q: q.address(),
            k: kv.address(),
            v: kv.address(),
            out: out.address(),
            scores: 0,
            probs: 0,
            first: start.address(),
            room: room.address(),
            capacity,
        };
        let call = calls::attention(&op, data, AttentionKernel::Few, 1, [Storage::F16; 2]).unwrap();
        run(kernels, &[call], &out, Storage::F16)
    });
    assert!(found[0] == found[1] && found[0] == found[2]);
}
