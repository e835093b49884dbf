//! IM2COL: the windows of a plane as rows: `dst[n, i, j, (c·K1 + k)·K0 + l] = s1[n, c, i·s1 - p1 + k·d1, j·s0 - p0 + l·d0]`, 0 outside.
//!
//! s0 (.., C, K1, K0) gives the extents of a window alone, s1 (N, C, H, W); the result is (N, H', W', C·K1·K0), in F32 or F16. Over
//! lines instead of planes s0 is (.., C, K0), s1 (1, N, C, W) and the result (1, N, W', C·K0). Words, all i32: strides s0, s1,
//! paddings p0, p1, dilations d0, d1, and whether it is over planes (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::movement::{self, MOVED, Movement, Read};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule =
    movement::rule::<Windows>(Op::Im2col, "windows of a plane as rows", MOVED, Check::Exact);

enum Windows {}

/// The word that says that it is over planes.
const PLANES: usize = 6;

/// Channels, and what a window has of the slower axis and of the faster one.
struct Extents {
    planes: bool,
    channels: usize,
    kernel: [usize; 2],
    image: [usize; 2],
}

impl Extents {
    fn of<S: Scalar>(args: &Args<'_, S>) -> Result<Extents> {
        let planes = args.params.int(PLANES) == 1;
        let [_, _, k1, k0] = args.source(0)?.shape();
        let [_, channels, height, width] = args.source(1)?.shape();
        let kernel = if planes { [k1, k0] } else { [1, k0] };
        // Of lines the channels lie where planes have their rows.
        Ok(match planes {
            true => Extents { planes, channels, kernel, image: [height, width] },
            false => Extents { planes, channels: height, kernel, image: [1, width] },
        })
    }
}

/// Which place of the image place `at` of window `window` is, along the faster axis (0) or the slower one; `None` outside.
fn place<S>(args: &Args<'_, S>, axis: usize, (window, at): (usize, usize), extent: usize) -> Option<usize> {
    let word = |word: usize| i64::from(args.params.int(word + axis));
    let place = i64::try_from(window).ok()? * word(0) + i64::try_from(at).ok()? * word(4) - word(2);
    usize::try_from(place).ok().filter(|place| *place < extent)
}

impl Movement for Windows {
    fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
        let Extents { planes, channels, kernel: [k1, k0], .. } = Extents::of(args)?;
        let [a, b, ..] = args.source(1)?.shape();
        let batch = if planes { args.shape[0] == a } else { args.shape[..2] == [1, b] && a == 1 };
        match batch && args.shape[3] == channels * k1 * k0 {
            true => Ok(()),
            false => Err(args.misfit(
                "a kernel (.., C, K1, K0) and images (N, C, H, W) for a result (N, H', W', C·K1·K0)",
            )),
        }
    }

    fn row<S: Scalar, T: Scalar>(
        args: &Args<'_, S>,
        [a, b, c]: [usize; 3],
        read: Read<'_, '_, T>,
        out: &mut Vec<T>,
    ) -> Result<()> {
        let Extents { planes, channels, kernel: [k1, k0], image: [height, width] } = Extents::of(args)?;
        for channel in 0..channels {
            for k in 0..k1 {
                let row = match planes {
                    true => place(args, 1, (b, k), height).map(|row| [a, channel, row]),
                    false => Some([a, b, channel]),
                };
                let row = row.map(|row| read(1, row));
                out.extend((0..k0).map(|l| {
                    let column = place(args, 0, (c, l), width);
                    row.as_ref().zip(column).map_or(T::ZERO, |(row, column)| row[column])
                }));
            }
        }
        Ok(())
    }
}
