//! What one launch of `linear_few` or `linear_one` computes beside the products: the bits of the kernels that do it alone.

use parity::engine::cuda::calls::{
    self, Follow, LinearData, LinearKernel, LinearPart, NormFirst, Pairs, RopeData, RopePart, TensorCores,
};
use parity::engine::fused::graph::{BySteps, Glu, Pairing, Position, Rope};
use parity::gguf::DType;
use parity::numerics::Storage;

use crate::data::{Memory, Random, RandomWeight};
use crate::linear::{self, check_products, data_for};
use crate::{U32, check, host, run, storage_rounding};

const FAST: Storage = Storage::F16;

/// Products of `x` by the kernel for so few rows.
fn few(x: &Memory, first: &Memory, rows: usize) -> LinearData {
    let kernel = LinearKernel::for_step(rows, FAST, false, TensorCores::default());
    LinearData { first: first.address(), ..data_for(kernel, x.address(), rows, FAST) }
}

fn alone(w: &RandomWeight, out: &Memory) -> LinearPart {
    linear::alone(&w.weight, out.address())
}

#[test]
fn heads_are_rotated_as_by_rope() {
    let Some(kernels) = host::kernels() else { return };
    let (heads, first) = (2, 2);
    let cases = [
        (3, DType::Q8_0, 160, Pairing::Half, 48),
        (3, DType::Q8_0, 160, Pairing::Interleaved, 32),
        (3, DType::Q8_0, 160, Pairing::Half, 16),
        (1, DType::F16, 256, Pairing::Half, 48),
        (1, DType::F16, 160, Pairing::Half, 48),
        (1, DType::Q4_K, 512, Pairing::Interleaved, 32),
        (1, DType::Q6_K, 512, Pairing::Half, 16),
    ];
    for (rows, dtype, columns, pairing, head_width) in cases {
        let outputs = heads * head_width;
        let mut random = Random(31);
        let w = RandomWeight::new(&mut random, dtype, outputs, columns);
        let x = Memory::stored(&random.values(rows * columns), FAST);
        let bias = Memory::of_f32(&random.values(outputs));
        let angles = Memory::of_f32(&random.values((first + rows) * head_width));
        let start = Memory::of_bytes(&(first as i32).to_le_bytes());
        let room = || Memory::room(rows * outputs, FAST);
        let (product, then, turned, cache) =
            (room(), room(), room(), Memory::room((first + rows) * outputs, FAST));
        let follow = |then: &Memory| Follow::Bias { bias: bias.address(), times: 1, then: then.address() };
        let pairs = Pairs::Rotated { angles: angles.address(), head_width, pairing, out: turned.address() };
        let part = LinearPart { follow: follow(&then), cache: cache.address(), pairs, ..alone(&w, &product) };
        run(kernels, &[calls::linear(&[part], few(&x, &start, rows))], &turned, FAST);

        let (own, own_then, own_turned) = (room(), room(), room());
        let own_cache = Memory::room((first + rows) * outputs, FAST);
        let part = LinearPart { follow: follow(&own_then), ..alone(&w, &own) };
        run(kernels, &[calls::linear(&[part], few(&x, &start, rows))], &own_then, FAST);
        let rope = Rope {
            base: 1e4,
            head_width,
            dims: head_width,
            pairing,
            freqs: None,
            position: BySteps::all(Position::OWN),
            sign: 1,
            times: 1,
        };
        let part = RopePart {
            x: own_then.address(),
            out: own_turned.address(),
            cache: own_cache.address(),
            heads: heads as i64,
        };
        let data =
            RopeData { table: angles.address(), first: start.address(), rows, storage: FAST, kv: FAST };
        run(kernels, &[calls::rope(&rope, &[part], data)], &own_turned, FAST);
        for (fused, own) in
            [(&product, &own), (&then, &own_then), (&turned, &own_turned), (&cache, &own_cache)]
        {
            assert_eq!(fused.bytes(), own.bytes(), "{pairing:?}, heads of {head_width}");
        }
    }
}

#[test]
fn gate_and_up_are_combined_as_by_glu() {
    let Some(kernels) = host::kernels() else { return };
    for (rows, outputs, dtype) in
        [(1, 24, DType::Q4_K), (1, 8 * 140 + 3, DType::F16), (1, 20, DType::Q8_0), (11, 20, DType::Q6_K)]
    {
        let columns = 512;
        let mut random = Random(33);
        let weights = [0, 1].map(|_| RandomWeight::new(&mut random, dtype, outputs, columns));
        let x = Memory::stored(&random.values(rows * columns), FAST);
        let start = Memory::of_bytes(&[0; 4]);
        let room = || Memory::room(rows * outputs, FAST);
        let (fused, act, own, own_act) = ([room(), room()], room(), [room(), room()], room());
        let parts = [0, 1].map(|i| alone(&weights[i], &own[i]));
        run(kernels, &[calls::linear(&parts, few(&x, &start, rows))], &own[1], FAST);
        let addresses = [own[0].address(), own[1].address(), own_act.address()];
        run(kernels, &[calls::glu(Glu::SWIGLU, addresses, rows * outputs, FAST).unwrap()], &own_act, FAST);

        let mut parts = [0, 1].map(|i| alone(&weights[i], &fused[i]));
        parts[0].pairs = Pairs::GateUp { out: act.address() };
        run(kernels, &[calls::linear(&parts, few(&x, &start, rows))], &act, FAST);
        assert_eq!(fused[0].bytes(), own[0].bytes(), "gate");
        assert_eq!(fused[1].bytes(), own[1].bytes(), "up");
        assert_eq!(act.bytes(), own_act.bytes(), "silu(gate)·up");
    }
}

/// By warpgroups in every shape that takes both: gate and up as f64 has them, and what follows with the bits of glu.
#[test]
fn gate_and_up_of_many_rows() {
    let Some(kernels) = host::kernels() else { return };
    for (rows, outputs, columns) in [(67, 75, 72), (33, 40, 64 * 21)] {
        let mut random = Random(37);
        let weights = [0, 1].map(|_| RandomWeight::new(&mut random, DType::F16, outputs, columns));
        let x = Memory::stored(&random.values(rows * columns), FAST);
        let room = || Memory::room(rows * outputs, FAST);
        let data = data_for(LinearKernel::Warpgroup, x.address(), rows, FAST);
        let calls_into = |[gate, up, act]: [&Memory; 3]| {
            let mut parts = [alone(&weights[0], gate), alone(&weights[1], up)];
            parts[0].pairs = Pairs::GateUp { out: act.address() };
            calls::linear_in_every_shape(&parts, data)
        };
        for shape in 0..calls_into([&room(), &room(), &room()]).len() {
            // Memory that no other shape has written.
            let (fused, act, own_act) = ([room(), room()], room(), room());
            let call = calls_into([&fused[0], &fused[1], &act]).swap_remove(shape);
            host::in_two_orders(kernels, &call, &act);
            let addresses = [fused[0].address(), fused[1].address(), own_act.address()];
            let glu = calls::glu(Glu::SWIGLU, addresses, rows * outputs, FAST).unwrap();
            run(kernels, &[glu], &own_act, FAST);
            assert_eq!(act.bytes(), own_act.bytes(), "{}: silu(gate)·up", call.kernel);
            for (weight, out) in weights.iter().zip(&fused) {
                check_products(&call.kernel, &out.values(FAST), weight, &x.values(FAST), FAST);
            }
        }
    }
}

#[test]
fn a_row_is_normed_first() {
    let Some(kernels) = host::kernels() else { return };
    let (outputs, eps) = (40, 1e-6);
    for (dtype, columns) in
        [(DType::F16, 128 * 25), (DType::F16, 1160), (DType::Q5_K, 256 * 13), (DType::Q8_0, 1152)]
    {
        let mut random = Random(35);
        let w = RandomWeight::new(&mut random, dtype, outputs, columns);
        let x = Memory::stored(&random.values(columns), FAST);
        let weight = random.values(columns);
        let norm_weight = Memory::of_f32(&weight);
        let start = Memory::of_bytes(&[0; 4]);
        let (normed, out, own) =
            (Memory::room(columns, FAST), Memory::room(outputs, FAST), Memory::room(outputs, FAST));
        let norm = NormFirst { weight: norm_weight.address(), out: normed.address(), eps };
        let data = LinearData { norm: Some(norm), ..few(&x, &start, 1) };
        run(kernels, &[calls::linear(&[alone(&w, &out)], data)], &out, FAST);
        let xs = x.values(FAST);
        let mean = xs.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / columns as f64;
        // Chains of columns/128 squares, five levels of a tree, up to twenty warps one after another, mean, root,
        // reciprocal and two factors.
        let roundings = columns as f64 / 128.0 + 5.0 + 20.0 + 8.0;
        check("norm", &normed.values(FAST), |i| {
            let exact = f64::from(xs[i]) / (mean + eps).sqrt() * f64::from(weight[i]);
            (exact, roundings * U32 * exact.abs() + 2.0 * storage_rounding(exact, FAST))
        });
        run(kernels, &[calls::linear(&[alone(&w, &own)], few(&normed, &start, 1))], &own, FAST);
        assert_eq!(out.bytes(), own.bytes(), "the products are those of the row as it was stored");
    }
}
