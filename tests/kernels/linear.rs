//! The matrix products and the embedding, in every weight format.

use half::f16;
use parity::engine::cuda::calls::{
    self, Address, Call, Follow, LinearData, LinearKernel, LinearPart, Pairs, Weight,
};
use parity::gguf::DType;
use parity::numerics::Storage;

use crate::data::{Memory, Random, RandomWeight};
use crate::{SHARED, U32, check, host, run, storage_rounding};

const EXACT: Storage = Storage::F32;
pub const FAST: Storage = Storage::F16;

/// A product and nothing behind it.
pub fn alone(weight: &Weight, out: Address) -> LinearPart {
    LinearPart { weight: *weight, out, follow: Follow::Nothing, cache: 0, pairs: Pairs::Alone }
}

/// The launch of one such product.
pub fn plain(
    weight: &Weight,
    kernel: LinearKernel,
    [x, out]: [Address; 2],
    rows: usize,
    storage: Storage,
) -> Call {
    calls::linear(&[alone(weight, out)], data_for(kernel, x, rows, storage))
}

/// What such a product is told of its input.
pub fn data_for(kernel: LinearKernel, x: Address, rows: usize, storage: Storage) -> LinearData {
    LinearData {
        kernel,
        x,
        first: 0,
        rows,
        storage,
        kv: storage,
        out_f32: false,
        norm: None,
        next: (0, 0),
        shared_max: SHARED,
        constant: true,
    }
}

/// All kernels for what values are stored as.
fn kernels_for(storage: Storage) -> Vec<LinearKernel> {
    let of = if storage == FAST {
        &[LinearKernel::Few, LinearKernel::Wide, LinearKernel::Warpgroup][..]
    } else {
        &[LinearKernel::Split]
    };
    [LinearKernel::Row, LinearKernel::Tile].iter().chain(of).copied().collect()
}

/// A product of odd sizes by one kernel, against f64.
pub fn product(
    dtype: DType,
    kernel: LinearKernel,
    storage: Storage,
    rows: usize,
    outputs: usize,
    columns: usize,
) {
    let Some(kernels) = host::kernels() else { return };
    let mut random = Random(columns as u64);
    let w = RandomWeight::new(&mut random, dtype, outputs, columns);
    let x = Memory::stored(&random.values(rows * columns), storage);
    let out = Memory::room(rows * outputs, storage);
    let call = plain(&w.weight, kernel, [x.address(), out.address()], rows, storage);
    let what = call.kernel.clone();
    check_products(&what, &run(kernels, &[call], &out, storage), &w, &x.values(storage), storage);
}

/// Products (T, O) of x (T, I), stored in `storage`, with a weight, against f64.
pub fn check_products(what: &str, found: &[f32], w: &RandomWeight, xs: &[f32], storage: Storage) {
    let (outputs, columns) = (w.weight.outputs, w.weight.columns);
    check(what, found, |i| {
        let (x, w) = (&xs[i / outputs * columns..][..columns], w.row(i % outputs));
        let products = x.iter().zip(w).map(|(x, w)| f64::from(*x) * w);
        let exact: f64 = products.clone().sum();
        let size: f64 = products.map(f64::abs).sum();
        // One rounding for each link of a chain of 32 and of the chains, four in decoding a weight; the fast
        // kernels take f16 operands.
        let links = 32.0 + columns as f64 / 32.0 + 4.0;
        let operands = match storage {
            Storage::F16 => f64::from(f16::EPSILON.to_f32()) / 2.0,
            _ => 0.0,
        };
        (exact, (links * U32 + operands) * size + 2.0 * storage_rounding(exact, storage))
    });
}

/// All formats, in sizes that no tile divides; K-quants come in whole blocks of 256.
fn products(kernel: LinearKernel, storage: Storage, rows: usize, outputs: usize) {
    for dtype in DType::all().filter(|dtype| dtype.is_decodable()) {
        let columns = match dtype.block_len() {
            1 => 88,
            32 => 96,
            len => 2 * len,
        };
        product(dtype, kernel, storage, rows, outputs, columns);
    }
}

#[test]
fn a_warp_per_output_exact() {
    products(LinearKernel::Row, EXACT, 3, 13);
}

#[test]
fn a_warp_per_output_fast() {
    products(LinearKernel::Row, FAST, 2, 11);
}

#[test]
fn tiles_exact() {
    products(LinearKernel::Tile, EXACT, 67, 70);
}

#[test]
fn tiles_exact_on_tensor_cores() {
    products(LinearKernel::Split, EXACT, 67, 70);
    product(DType::F16, LinearKernel::Split, EXACT, 1, 1, 8);
    product(DType::Q8_0, LinearKernel::Split, EXACT, 65, 1, 64);
}

#[test]
fn tiles_fast() {
    products(LinearKernel::Tile, FAST, 66, 69);
}

#[test]
fn one_row_fast() {
    products(LinearKernel::One, FAST, 1, 21);
    // Several tiles at once, of which the last is not whole, and by turns.
    product(DType::F16, LinearKernel::One, FAST, 1, 16 * 132 * 2 + 5, 256);
    product(DType::F16, LinearKernel::One, FAST, 1, 37, 128 * 25);
    // Columns that are no whole chunks, which another kernel takes.
    product(DType::F16, LinearKernel::One, FAST, 1, 37, 264);
    product(DType::Q4_K, LinearKernel::One, FAST, 1, 16 * 132 * 3 + 1, 768);
    product(DType::Q6_K, LinearKernel::One, FAST, 1, 40, 256 * 35);
    product(DType::Q5_K, LinearKernel::One, FAST, 1, 30, 256 * 13);
}

/// Whole chunks, a tile of outputs at least, and gate and up no farther apart than can be counted.
#[test]
fn what_one_row_is_multiplied_by() {
    let weight = |dtype, outputs, address| Weight { address, dtype, outputs, columns: 512 };
    let part = |weight, pairs| LinearPart { pairs, ..alone(&weight, 0) };
    let kernel = |parts: &[LinearPart]| calls::linear(parts, data_for(LinearKernel::One, 0, 1, FAST)).kernel;
    let one = |outputs| kernel(&[part(weight(DType::F16, outputs, 0), Pairs::Alone)]);
    assert_eq!([one(16), one(15)], ["linear_one_f16", "linear_few1_f16"]);
    let gate_up = |apart| {
        let up = part(weight(DType::Q4_K, 64, apart), Pairs::Alone);
        kernel(&[part(weight(DType::Q4_K, 64, 0), Pairs::GateUp { out: 0 }), up])
    };
    assert_eq!([gate_up(1 << 34), gate_up(1 << 36)], ["linear_one_q4_k", "linear_few1_q4_k"]);
    let together = |own, other| calls::together(weight(DType::Q4_K, own, 0), weight(DType::Q6_K, other, 0));
    assert!(together(16, 16));
    assert!(!together(64, 8), "no kernel for few rows has two formats");
}

/// Weights of two formats in one launch: the bits of one launch each.
#[test]
fn two_formats_at_once() {
    let Some(kernels) = host::kernels() else { return };
    for first in [DType::Q4_K, DType::Q5_K] {
        let mut random = Random(13);
        let (columns, outputs) = (768, [40, 24, 17]);
        let dtypes = [first, first, DType::Q6_K];
        let w: Vec<RandomWeight> =
            (0..3).map(|i| RandomWeight::new(&mut random, dtypes[i], outputs[i], columns)).collect();
        let x = Memory::stored(&random.values(columns), FAST);
        let (out, own) = (outputs.map(|o| Memory::room(o, FAST)), outputs.map(|o| Memory::room(o, FAST)));
        let part = |i: usize| alone(&w[i].weight, out[i].address());
        let data = data_for(LinearKernel::One, x.address(), 1, FAST);
        run(kernels, &[calls::linear(&[0, 1, 2].map(part), data)], &out[2], FAST);
        for i in 0..3 {
            let call = plain(&w[i].weight, LinearKernel::One, [x.address(), own[i].address()], 1, FAST);
            run(kernels, &[call], &own[i], FAST);
            assert_eq!(own[i].bytes(), out[i].bytes(), "{}", dtypes[i].name());
        }
    }
}

#[test]
fn few_rows_fast() {
    products(LinearKernel::Few, FAST, 3, 21);
    products(LinearKernel::Few, FAST, 19, 16);
}

/// Many rows: the weights are decoded first, which gives the same bits as the plain kernel's decoding.
#[test]
fn unpacked_weights() {
    let Some(kernels) = host::kernels() else { return };
    for dtype in DType::all().filter(|dtype| dtype.is_decodable()) {
        let columns = dtype.block_len().max(8) * 9;
        let w = RandomWeight::new(&mut Random(5), dtype, 7, columns);
        let out = Memory::room(7 * columns, FAST);
        let found = run(kernels, &[calls::unpack(&w.weight, out.address())], &out, FAST);
        let largest = w.values.iter().fold(0f64, |m, v| m.max(v.abs()));
        check(dtype.name(), &found, |i| {
            (w.values[i], 4.0 * U32 * largest + storage_rounding(w.values[i], FAST))
        });
    }
}

#[test]
fn many_rows_fast() {
    // Of each tile one case: 64 x 64, 128 x 64, 128 x 128.
    for (rows, outputs, columns) in
        [(67, 70, 88), (65, 72, 416), (1, 1, 8), (150, 64 * 67 - 1, 40), (130, 128 * 66 + 8, 40)]
    {
        product(DType::F16, LinearKernel::Wide, FAST, rows, outputs, columns);
    }
}

#[test]
fn one_row_or_output_in_a_tile() {
    product(DType::F16, LinearKernel::Tile, EXACT, 1, 1, 8);
    product(DType::F16, LinearKernel::Tile, FAST, 1, 1, 8);
    product(DType::Q8_0, LinearKernel::Tile, EXACT, 65, 1, 64);
    product(DType::Q8_0, LinearKernel::Tile, FAST, 1, 65, 64);
}

/// Long rows: the error must not grow as in one long chain.
#[test]
fn long_rows() {
    for storage in [EXACT, FAST] {
        product(DType::F32, LinearKernel::Row, storage, 1, 5, 4864);
        product(DType::F32, LinearKernel::Tile, storage, 9, 5, 4864);
    }
    product(DType::F16, LinearKernel::Few, FAST, 1, 5, 4864);
    product(DType::Q6_K, LinearKernel::Few, FAST, 2, 5, 8960);
    product(DType::Q8_0, LinearKernel::Few, FAST, 9, 17, 896);
}

/// The result of a row does not depend on how many rows are computed with it.
#[test]
fn rows_are_independent() {
    let Some(kernels) = host::kernels() else { return };
    let mut random = Random(7);
    let (rows, outputs, columns) = (70, 9, 64);
    let w = RandomWeight::new(&mut random, DType::Q4_0, outputs, columns);
    let halves = RandomWeight::new(&mut random, DType::F16, outputs, columns);
    for storage in [EXACT, FAST] {
        let x = Memory::stored(&random.values(rows * columns), storage);
        let all = Memory::room(rows * outputs, storage);
        let last = Memory::room(outputs, storage);
        let size = if storage == EXACT { 4 } else { 2 };
        let last_x = x.address() + ((rows - 1) * columns * size) as u64;
        for kernel in kernels_for(storage) {
            let weight = if kernel.takes_halves() { halves.weight } else { w.weight };
            let whole = plain(&weight, kernel, [x.address(), all.address()], rows, storage);
            let alone = plain(&weight, kernel, [last_x, last.address()], 1, storage);
            let whole = run(kernels, &[whole], &all, storage);
            let alone = run(kernels, &[alone], &last, storage);
            assert_eq!(whole[(rows - 1) * outputs..], alone);
        }
    }
}

/// Logits are f32 although the values they are computed from are f16.
#[test]
fn fast_products_with_f32_output() {
    let Some(kernels) = host::kernels() else { return };
    let mut random = Random(9);
    let w = RandomWeight::new(&mut random, DType::F16, 12, 32);
    let x = Memory::stored(&random.values(2 * 32), FAST);
    for kernel in kernels_for(FAST) {
        let out = Memory::room(2 * 12, EXACT);
        let part = LinearPart {
            weight: w.weight,
            out: out.address(),
            follow: Follow::Nothing,
            cache: 0,
            pairs: Pairs::Alone,
        };
        let data = LinearData { out_f32: true, ..data_for(kernel, x.address(), 2, FAST) };
        let call = calls::linear(&[part], data);
        let found = run(kernels, &[call], &out, EXACT);
        check("f32 from f16", &found, |i| {
            let x = x.values(FAST);
            let exact = (0..32).map(|k| f64::from(x[i / 12 * 32 + k]) * w.row(i % 12)[k]).sum();
            (exact, 32.0 * 32.0 * U32)
        });
    }
}

/// Three weights in one launch, each with what follows it: the same bits as one launch after the other.
#[test]
fn products_with_what_follows() {
    let Some(kernels) = host::kernels() else { return };
    let (rows, columns, outputs, first) = (3, 512, [16, 72, 4], 2);
    for (storage, kv) in [(EXACT, EXACT), (EXACT, FAST), (FAST, FAST)] {
        let mut random = Random(21);
        let packed = outputs.map(|o| RandomWeight::new(&mut random, DType::Q8_0, o, columns));
        let halves = outputs.map(|o| RandomWeight::new(&mut random, DType::F16, o, columns));
        let x = Memory::stored(&random.values(rows * columns), storage);
        let bias = Memory::of_f32(&random.values(outputs[0]));
        let residual = Memory::stored(&random.values(rows * outputs[1]), storage);
        let start = Memory::of_bytes(&(first as i32).to_le_bytes());
        for kernel in kernels_for(storage) {
            let weights = if kernel.takes_halves() { &halves } else { &packed };
            let out = outputs.map(|o| Memory::room(rows * o, storage));
            let then = outputs.map(|o| Memory::room(rows * o, storage));
            let cache = outputs.map(|o| Memory::room((first + rows) * o, kv));
            let follow = [
                Follow::Bias { bias: bias.address(), times: 1, then: then[0].address() },
                Follow::Residual { residual: residual.address(), scale: [1.0, 1.0], then: then[1].address() },
                Follow::Nothing,
            ];
            let part = |i: usize| LinearPart {
                weight: weights[i].weight,
                out: out[i].address(),
                follow: follow[i],
                cache: if i == 1 { 0 } else { cache[i].address() },
                pairs: Pairs::Alone,
            };
            let (x, first) = (x.address(), start.address());
            let data = LinearData { first, kv, ..data_for(kernel, x, rows, storage) };
            run(kernels, &[calls::linear(&[0, 1, 2].map(part), data)], &out[2], storage);

            for (i, o) in outputs.into_iter().enumerate() {
                let alone = Memory::room(rows * o, storage);
                // The same grouping, so the same number of warps share an output.
                let parts = [0, 1, 2].map(|j| LinearPart {
                    out: if i == j { alone.address() } else { out[j].address() },
                    follow: Follow::Nothing,
                    cache: 0,
                    ..part(j)
                });
                run(kernels, &[calls::linear(&parts, data)], &alone, storage);
                assert_eq!(alone.bytes(), out[i].bytes(), "the product does not depend on what follows");
                let next = Memory::room(rows * o, storage);
                let call = match i {
                    0 => calls::bias(alone.address(), bias.address(), next.address(), [rows, o], 1, storage),
                    1 => {
                        let addresses = [alone.address(), residual.address(), next.address()];
                        calls::add(addresses, rows * o, [1.0, 1.0], storage)
                    }
                    _ => calls::bias(alone.address(), 0, next.address(), [rows, o], 1, storage),
                };
                run(kernels, &[call], &next, storage);
                if i < 2 {
                    assert_eq!(next.bytes(), then[i].bytes(), "what follows is what its own kernel computes");
                }
                if i != 1 {
                    let expected = Memory::room((first_of(&start) + rows) * o, kv);
                    let addresses = [next.address(), expected.address(), start.address()];
                    run(kernels, &[calls::cache(addresses, [rows, o], storage, kv)], &expected, kv);
                    assert_eq!(expected.bytes(), cache[i].bytes(), "the cache holds the last result");
                }
            }
        }
    }
}

fn first_of(start: &Memory) -> usize {
    i32::from_le_bytes(start.bytes()[..4].try_into().unwrap()) as usize
}

#[test]
fn embedding() {
    let Some(kernels) = host::kernels() else { return };
    for dtype in DType::all().filter(|dtype| dtype.is_decodable()) {
        let mut random = Random(3);
        let columns = dtype.block_len().max(8) * 9;
        let table = RandomWeight::new(&mut random, dtype, 7, columns);
        assert_eq!(table.bytes(), 7 * columns / dtype.block_len() * calls::block_bytes(dtype));
        let ids = [6u32, 0, 3];
        let tokens = Memory::of_bytes(&ids.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>());
        for storage in [EXACT, FAST] {
            let out = Memory::room(3 * columns, storage);
            let call = calls::embed(&table.weight, tokens.address(), out.address(), 3, storage);
            let found = run(kernels, &[call], &out, storage);
            check(dtype.name(), &found, |i| {
                let exact = table.row(ids[i / columns] as usize)[i % columns];
                // Scale and minimum are rounded, then the product and the sum of two larger numbers.
                let largest = table.values.iter().fold(0f64, |m, v| m.max(v.abs()));
                (exact, 4.0 * U32 * largest + storage_rounding(exact, storage))
            });
        }
    }
}
