//! Products with weights of a file on the GPU are those of the host, whatever the weight's type and however many the lanes.

use std::borrow::Cow;

use parity::engine::cuda::Multiplier;
use parity::engine::op_by_op;
use parity::gguf::Gguf;
use parity::tensor::View;

use crate::{has_gpu, path};

/// Threads that multiply at a time.
const THREADS: usize = 3;

#[test]
fn products_of_several_lanes_are_the_hosts() {
    if !has_gpu() {
        return;
    }
    let gguf = Gguf::open(&path()).unwrap();
    let on_device = Multiplier::open(&gguf, 0).unwrap();
    let on_device: &dyn op_by_op::Multiplier = &on_device;
    let names = ["blk.0.attn_k.weight", "blk.1.ffn_down.weight", "blk.1.attn_v.weight"];
    // All of them want each weight at once, the first time.
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| names.iter().for_each(|name| check_products(&gguf, on_device, name)));
        }
    });
    // No matrix.
    let one = [Cow::Borrowed(&[1.0f32; 8][..])];
    assert!(on_device.products(&gguf.weight("blk.0.attn_norm.weight").unwrap(), &one).is_none());
}

/// Products of one lane, and of several.
fn check_products(gguf: &Gguf, on_device: &dyn op_by_op::Multiplier, name: &str) {
    let weight = gguf.weight(name).unwrap();
    let (outputs, width) = (weight.rows(), weight.cols());
    let matrix: Vec<f64> = weight.decode();
    let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 504.0;
    let lanes = [1, 3, 9].map(|rows| (0..rows * width).map(|i| value(i + rows)).collect::<Vec<f32>>());
    for some in [&lanes[..1], &lanes[..]] {
        let rows: Vec<Cow<'_, [f32]>> = some.iter().map(|rows| Cow::Borrowed(&rows[..])).collect();
        let found = on_device.products(&weight, &rows).expect("the weight is one that kernels read");
        assert_eq!(on_device.failed(), None);
        assert_eq!(found.len(), some.len());
        for (found, rows) in found.iter().zip(some) {
            let rows = View::new(rows.len() / width, width, rows);
            assert_eq!(found.len(), rows.rows * outputs);
            for (i, found) in found.iter().enumerate() {
                let terms = rows.row(i / outputs).iter().zip(&matrix[i % outputs * width..][..width]);
                let terms: Vec<f64> = terms.map(|(x, w)| f64::from(*x) * w).collect();
                // Each term is rounded, and each sum of a chain.
                let bound =
                    width as f64 * f64::from(f32::EPSILON) * terms.iter().map(|t| t.abs()).sum::<f64>();
                let exact: f64 = terms.iter().sum();
                assert!((f64::from(*found) - exact).abs() <= bound, "{name} {i}: {found}, not {exact}");
            }
        }
    }
}
