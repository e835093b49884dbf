//! The matrix products of Hopper's warpgroups, in every shape that the kernel has.

use parity::engine::cuda::calls::{self, LinearKernel, Weight};
use parity::gguf::DType;

use crate::data::{Memory, Random, RandomWeight};
use crate::host;
use crate::linear::{FAST, alone, check_products, data_for, plain, product};

/// In every shape, with more steps than lie in shared memory at once, also where several blocks share them.
#[test]
fn many_rows_by_warpgroups() {
    product(DType::F16, LinearKernel::Warpgroup, FAST, 1, 1, 8);
    let Some(kernels) = host::kernels() else { return };
    for (rows, outputs, columns) in [(130, 200, 72), (65, 129, 64 * 26 + 8)] {
        let mut random = Random(columns as u64);
        let w = RandomWeight::new(&mut random, DType::F16, outputs, columns);
        let x = Memory::stored(&random.values(rows * columns), FAST);
        let data = data_for(LinearKernel::Warpgroup, x.address(), rows, FAST);
        let calls_into = |out| calls::linear_in_every_shape(&[alone(&w.weight, out)], data);
        for shape in 0..calls_into(0).len() {
            let out = Memory::room(rows * outputs, FAST);
            let call = calls_into(out.address()).swap_remove(shape);
            let what = call.kernel.clone();
            let found = host::in_two_orders(kernels, &call, &out);
            check_products(&what, &found, &w, &x.values(FAST), FAST);
        }
    }
}

/// Every shape of the kernel is chosen by some product.
#[test]
fn shapes_of_warpgroups() {
    let weight = |outputs, columns| Weight { address: 0, dtype: DType::F16, outputs, columns };
    let kernel = |rows, outputs, columns| {
        let kernel = LinearKernel::Warpgroup;
        plain(&weight(outputs, columns), kernel, [0, 0], rows, FAST).kernel.replace("linear_warpgroup_", "")
    };
    let chosen = [
        kernel(512, 8960, 1536),
        kernel(512, 9728, 896),
        kernel(512, 896, 4864),
        kernel(128, 8960, 1536),
        kernel(512, 1536, 8960),
        kernel(512, 896, 896),
        kernel(128, 896, 4864),
    ];
    assert_eq!(chosen, ["128x160", "128x128", "128x128_4", "64x128", "64x128_2", "64x64", "64x64_4"]);
}
