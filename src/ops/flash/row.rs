//! One row of attention: its scores, and the sums over the cached positions as a kernel takes them.

use std::borrow::Cow;
use std::ops::Range;

use super::super::source::{Args, Source};
use super::narrow::round_f16;
use super::rows::{Converted, Rows};
use super::scaled::{Factors, rounding_of_queries, scaled, scales_queries};
use super::shared::KeyProducts;
use crate::arithmetic::cache_blocks;
use crate::arithmetic::round::{self, Rounding, Tie};
use crate::arithmetic::{Flash, Narrow, OfAttention, Scaled, Softmax, Storing, Vector, Weights};
use crate::error::Result;
use crate::gguf::DType;
use crate::numerics::Storage;
use crate::scalar::{self, Scalar, in_lanes, vectorized};
use crate::tensor::{Matrix, View};

/// A node, with its queries rounded.
pub struct Attention<'b, 'a, S> {
    /// (B·H·N, DK)
    pub q: Matrix<S>,
    /// What they were rounded to.
    pub rounding: Rounding,
    /// What the sums of their blocks have over the sums of their values, see [`round::Rounded::sums`].
    pub sums: Matrix<S>,
    /// Values that may have been rounded to the other side, in the order of their rows.
    pub ties: Vec<Tie>,
    pub k: &'b Source<'a, S>,
    pub v: &'b Source<'a, S>,
    /// Rows of K and V, where a kernel reads them otherwise than they lie in memory.
    converted: [Converted<S>; 2],
    /// Rows of K and V, where a kernel reads them as they lie in memory.
    plain: [Option<Rows<'a, S>>; 2],
    /// Products of queries and keys that are known.
    products: Option<&'b KeyProducts>,
    mask: Option<&'b Source<'a, S>>,
    sinks: Option<Vec<f64>>,
    /// (B, H, N)
    pub shape: [usize; 3],
    /// Which of how many queries these are, where they are not all.
    tokens: Option<(&'a [usize], usize)>,
    pub scale: f64,
    /// What queries and keys are multiplied by before they are rounded to a narrow type.
    pub before: Factors,
    pub cap: f64,
    max_bias: f64,
    pub kind: Flash,
    softmax: Softmax,
    /// Whether weights that are no normal numbers of f16 are 0.
    pub flushes: bool,
    /// Whether keys, and values, are rounded to a narrow type.
    pub narrows: [bool; 2],
}

/// One query of one head.
pub struct QueryRow {
    /// Batch, head, query.
    pub at: [usize; 3],
    /// The positions that are not masked.
    pub seen: Vec<Seen>,
    /// The score of the head's sink.
    pub sink: Option<f64>,
}

/// One position that is not masked.
#[derive(Clone, Copy)]
pub struct Seen {
    /// Cached position.
    pub position: usize,
    /// slope·mask
    pub bias: f64,
    /// Product of query and key.
    pub product: f64,
    /// Scaled score before cap and mask.
    pub scaled: f64,
    /// Score.
    pub z: f64,
}

/// The sums of a kernel over a range of positions.
pub struct Part {
    /// Largest score; -inf where nothing is seen.
    pub max: f64,
    /// Σ exp(z - max)
    pub sum: f64,
    /// (DV,) Σ exp(z - max)·v
    pub values: Vec<f64>,
}

impl<'b, 'a, S: Scalar> Attention<'b, 'a, S> {
    pub fn new(args: &'b Args<'a, S>) -> Result<Self> {
        let [q, k, v] = [args.source(0)?, args.source(1)?, args.source(2)?];
        let ([b, h, n, dk], [kb, kh, m, kd], [vb, vh, vm, dv]) = (q.shape(), k.shape(), v.shape());
        let shares = |own: usize, all: usize| own > 0 && all.is_multiple_of(own);
        let grouped = shares(kb, b) && shares(kh, h) && shares(vb, b) && shares(vh, h);
        let mask = args.get(3);
        let masked = mask.is_none_or(|mask| {
            let [mb, mh, mn, mm] = mask.shape();
            mb > 0 && mh > 0 && mn >= n && mm == m
        });
        let sinks = args.get(4).map(|sinks| sinks.values().iter().map(|s| s.to_f64()).collect::<Vec<_>>());
        let sunk = sinks.as_ref().is_none_or(|sinks| sinks.len() == h);
        if !(grouped && masked && sunk) || kd != dk || vm != m || args.shape != [b, n, h, dv] {
            return Err(args.misfit(
                "Q (B, H, N, DK), K (B', Hk, M, DK), V (B'', Hv, M, DV), a mask (b, h, N or more, M) and H sinks \
                 where there are any, for a result (B, N, H, DV)",
            ));
        }
        let kind = args.arithmetic.flash;
        let rounding = rounding_of_queries(kind, k.dtype);
        let (mut scale, cap) = (f64::from(args.params.float(0)), f64::from(args.params.float(2)));
        let mut values = q.values();
        if scales_queries(kind) {
            // The scale, which a cap divides before, goes into the queries.
            let own = if cap == 0.0 { scale as f32 } else { scale as f32 / cap as f32 };
            scaled(kind, own, values.to_mut());
            scale = if cap == 0.0 { 1.0 } else { cap };
        }
        let (before, scale) = Factors::of(kind, args.arithmetic.softmax.scale, scale);
        if before.any() {
            before.of_queries(values.to_mut());
        }
        let mut rounded = round::activations(rounding, View::new(b * h * n, dk, &values));
        rounded.ties.extend(before.ties(kind, dk, &values));
        let narrows = args.arithmetic.rounds_cache();
        let converted = [(k, before.any() || narrows[0]), (v, narrows[1])];
        let converted =
            converted.map(|(source, is_converted)| match is_converted || converts(kind, source) {
                true => Converted::of(source, [b, h]),
                false => Converted::none(),
            });
        let [keys, values] = [k, v].map(|source| Rows::of(source, [b, h]));
        let plain = [keys.filter(|_| converted[0].is_none()), values.filter(|_| converted[1].is_none())];
        Ok(Attention {
            converted,
            plain,
            products: None,
            q: rounded.values,
            sums: rounded.sums,
            rounding,
            ties: rounded.ties,
            k,
            v,
            mask,
            sinks,
            shape: [b, h, n],
            tokens: args.tokens,
            scale,
            before,
            max_bias: f64::from(args.params.float(1)),
            cap,
            kind,
            softmax: args.arithmetic.softmax,
            flushes: args.arithmetic.storing == Storing::Flushed,
            narrows,
        })
    }

    /// The same with products that are known of the same queries and keys.
    pub fn with(self, products: Option<&'b KeyProducts>) -> Self {
        Attention { products: products.filter(|_| !self.scales_before()), ..self }
    }

    /// Whether what scores are multiplied by goes into queries or keys.
    pub fn scales_before(&self) -> bool {
        let is_rounded = matches!(self.kind, Flash::Rounded(_, _, Scaled::Queries | Scaled::Both));
        is_rounded || scales_queries(self.kind)
    }

    /// The place of a query among all, and how many these are.
    pub fn place(&self, n: usize) -> (usize, usize) {
        self.tokens.map_or((n, self.shape[2]), |(order, all)| (order[n], all))
    }

    /// Which row of the queries.
    pub fn query(&self, [b, h, n]: [usize; 3]) -> usize {
        (b * self.shape[1] + h) * self.shape[2] + n
    }

    /// The row of K or V that a head reads.
    pub fn cached(&self, source: &Source<'a, S>, [b, h, _]: [usize; 3], position: usize) -> [usize; 3] {
        let [sb, sh, _, _] = source.shape();
        [b / (self.shape[0] / sb), h / (self.shape[1] / sh), position]
    }

    /// The slope of a head (Press et al., "Train Short, Test Long", arXiv 2108.12409). Its base is rounded to f32 before
    /// it is raised to a power, as by the kernels: an error of the base would be that power's times as large.
    pub fn slope(&self, head: usize) -> f64 {
        if self.max_bias <= 0.0 {
            return 1.0;
        }
        let power = 1usize << self.shape[1].ilog2();
        let base = |bias: f64| f64::from((-bias / power as f64).exp2() as f32);
        let slope = match head < power {
            true => base(self.max_bias).powi(head as i32 + 1),
            false => base(self.max_bias / 2.0).powi(2 * (head - power) as i32 + 1),
        };
        f64::from(slope as f32)
    }

    /// The positions that are not masked, and slope·mask of each.
    pub fn visible(&self, b: usize, h: usize, n: usize) -> Vec<(usize, f64)> {
        let positions = self.k.shape()[2];
        let Some(mask) = self.mask else { return (0..positions).map(|m| (m, 0.0)).collect() };
        let [mb, mh, _, _] = mask.shape();
        let (slope, mask) = (self.slope(h), mask.row([b % mb, h % mh, n]));
        let biases = mask.iter().map(|mask| slope * mask.to_f64()).enumerate();
        biases.filter(|(_, bias)| *bias != f64::NEG_INFINITY).collect()
    }

    pub fn row(&self, b: usize, h: usize, n: usize) -> QueryRow {
        let at = [b, h, n];
        let known = self.products.map(|products| products.row(self.query(at)));
        let visible = self.visible(b, h, n);
        let mut seen = Vec::with_capacity(visible.len());
        vectorized(
            #[inline(always)]
            || {
                for (position, bias) in visible {
                    let product = match known {
                        Some(known) => known[position],
                        None => self.product(at, position),
                    };
                    let (scaled, z) = self.score(product, bias);
                    seen.push(Seen { position, bias, product, scaled, z });
                }
            },
        );
        QueryRow { at, seen, sink: self.sinks.as_ref().map(|sinks| sinks[h]) }
    }

    /// Of a query and the key of a position.
    #[inline(always)]
    pub fn product(&self, at: [usize; 3], position: usize) -> f64 {
        let (q, k) = (self.q.row(self.query(at)), self.key(at, position));
        in_lanes(q, &k, |q, k| q.to_f64() * k.to_f64()) + self.of_minima(at, &k)
    }

    /// A product scaled, and with cap and mask, as an engine rounds them.
    #[inline(always)]
    pub fn score(&self, product: f64, bias: f64) -> (f64, f64) {
        let Softmax { scores, steps, .. } = self.softmax;
        let last = |value: f64| self.softmax.kept(value);
        let step = |value: f64| if steps { last(value) } else { value };
        let product = if steps { f64::from(scores.nearest(product as f32)) } else { product };
        let scaled = step(self.scale * product);
        let capped = match self.cap {
            0.0 => scaled,
            cap => step(cap * step(step(scaled / cap).tanh())),
        };
        (scaled, last(capped + bias))
    }

    /// Whether scores are rounded to a narrow type.
    pub fn rounds_scores(&self) -> bool {
        self.softmax.scores != Storage::F32
    }

    /// What the sums of a query's blocks add to its product with a key, where they meet the minima of the key's blocks.
    fn of_minima(&self, at: [usize; 3], k: &[S]) -> f64 {
        if self.sums.cols == 0 {
            return 0.0;
        }
        let sums = self.sums.row(self.query(at));
        let blocks = sums.iter().zip(k.chunks(self.rounding.block(k.len())));
        blocks.map(|(sum, block)| sum.to_f64() * self.minimum(block)).sum()
    }

    /// What the values of a key's block have in common, which the sum of the query's block meets.
    pub fn minimum(&self, block: &[S]) -> f64 {
        cache_blocks::group(self.k.dtype, block).1
    }

    #[inline(always)]
    pub fn key(&self, at: [usize; 3], position: usize) -> Cow<'_, [S]> {
        let head = at[0] * self.shape[1] + at[1];
        if let Some(rows) = &self.plain[0] {
            return Cow::Borrowed(rows.row(head, position));
        }
        self.stored(0, (head, position), || {
            self.before.of_keys(self.k.row(self.cached(self.k, at, position)))
        })
    }

    #[inline(always)]
    pub fn value(&self, at: [usize; 3], position: usize) -> Cow<'_, [S]> {
        let head = at[0] * self.shape[1] + at[1];
        if let Some(rows) = &self.plain[1] {
            return Cow::Borrowed(rows.row(head, position));
        }
        self.stored(1, (head, position), || self.v.row(self.cached(self.v, at, position)))
    }

    /// A row of K or V, which a head, counted over all batches, reads of a position.
    #[inline(always)]
    fn stored(
        &self,
        of: usize,
        (head, position): (usize, usize),
        row: impl Fn() -> Cow<'a, [S]>,
    ) -> Cow<'_, [S]> {
        match &self.converted[of] {
            none if none.is_none() => row(),
            known => Cow::Borrowed(known.row(head, position, || self.narrowed(of, row()))),
        }
    }

    /// A row of the cache, which kernels on narrower numbers convert.
    fn narrowed(&self, of: usize, mut row: Cow<'a, [S]>) -> Vec<S> {
        if converts(self.kind, [self.k, self.v][of]) {
            match self.kind {
                // Blocks are decoded in f32 before they are converted.
                Flash::Units(_) | Flash::Vector(_) => {
                    row.to_mut().iter_mut().for_each(|value| *value = S::from_f64(round_f16(value.to_f64())));
                }
                _ => Narrow::F16.store(row.to_mut()),
            }
        }
        if let Flash::Rounded(narrow, ..) = self.kind
            && self.narrows[of]
        {
            narrow.store(row.to_mut());
        }
        row.into_owned()
    }

    /// Whether the sum of the values is rounded to f16 after every position.
    pub fn is_narrow(&self) -> bool {
        self.v.dtype == DType::F16 && matches!(self.kind, Flash::ByRow | Flash::Split(_))
    }

    /// The ranges of a row's seen positions that are summed apart.
    pub fn parts(&self, row: &QueryRow) -> Vec<Range<usize>> {
        let Flash::Split(parts) = self.kind else { return std::iter::once(0..row.seen.len()).collect() };
        let positions = self.k.shape()[2];
        let chunk = positions.div_ceil(parts.max(1)).max(1);
        let first = |position: usize| row.seen.partition_point(|seen| seen.position < position);
        (0..positions).step_by(chunk).map(|start| first(start)..first(start + chunk)).collect()
    }

    /// (DV,)
    pub fn output(&self, row: &QueryRow) -> Vec<f64> {
        match self.kind {
            Flash::Lanes(lanes) => return self.on_lanes(row, lanes, None).value,
            Flash::Units(units) => return self.on_units(row, units, None).value,
            Flash::Rounded(narrow, OfAttention { weights: when, .. }, _) => {
                let is_rounded = when != Weights::Kept;
                return self.by_softmax(row, when, |weights| {
                    if is_rounded {
                        narrow.store(weights);
                    }
                    if is_rounded && self.flushes {
                        round::flush(weights);
                    }
                });
            }
            _ if self.softmax != Softmax::F32 => {
                return self.by_softmax(row, Weights::Divided, |weights| self.softmax.weights.store(weights));
            }
            _ => {}
        }
        let parts: Vec<Part> = self.parts(row).into_iter().map(|range| self.part(row, range)).collect();
        let (max, sum) = total(&parts, row.sink);
        let mut out = vec![0.0; self.v.shape()[3]];
        if sum == 0.0 {
            return out;
        }
        for part in parts.iter().filter(|part| part.sum != 0.0) {
            let weight = (part.max - max).exp() / sum;
            out.iter_mut().zip(&part.values).for_each(|(out, v)| *out += weight * v);
        }
        out
    }

    /// A softmax whose result is rounded before it meets the values.
    fn by_softmax(&self, row: &QueryRow, when: Weights, round: impl Fn(&mut [f64])) -> Vec<f64> {
        let mut weights: Vec<f64> = row.seen.iter().map(|seen| seen.z).collect();
        let max = weights.iter().copied().chain(row.sink).fold(f64::NEG_INFINITY, f64::max);
        scalar::each(&mut weights, |z| scalar::exp(z - max));
        let sum = weights.iter().sum::<f64>() + row.sink.map_or(0.0, |sink| (sink - max).exp());
        let [before, after] = if when == Weights::Undivided { [1.0, sum] } else { [sum, 1.0] };
        scalar::each(&mut weights, |weight| weight / before);
        round(&mut weights);
        let mut out = vec![0.0; self.v.shape()[3]];
        vectorized(
            #[inline(always)]
            || {
                for (seen, weight) in row.seen.iter().zip(&weights) {
                    let (value, weight) = (self.value(row.at, seen.position), weight / after);
                    out.iter_mut().zip(value.iter()).for_each(|(out, v)| *out += weight * v.to_f64());
                }
            },
        );
        out
    }

    /// Online softmax in the order of the positions.
    fn part(&self, row: &QueryRow, range: Range<usize>) -> Part {
        let narrow = self.is_narrow();
        let mut part = Part { max: f64::NEG_INFINITY, sum: 0.0, values: vec![0.0; self.v.shape()[3]] };
        vectorized(
            #[inline(always)]
            || {
                for seen in &row.seen[range] {
                    let value = self.value(row.at, seen.position);
                    let (mut scale, mut p) = (1.0, 1.0);
                    if seen.z > part.max {
                        scale = (part.max - seen.z).exp();
                        part.max = seen.z;
                    } else {
                        p = (seen.z - part.max).exp();
                    }
                    part.sum = part.sum * scale + p;
                    let rescaled = scale != 1.0;
                    let pairs = part.values.iter_mut().zip(value.iter());
                    match (narrow, rescaled) {
                        (true, true) => pairs.for_each(|(sum, v)| {
                            *sum = round_f16(round_f16(*sum * scale) + v.to_f64() * p);
                        }),
                        (true, false) => pairs.for_each(|(sum, v)| *sum = round_f16(*sum + v.to_f64() * p)),
                        (false, _) => pairs.for_each(|(sum, v)| *sum = *sum * scale + v.to_f64() * p),
                    }
                }
            },
        );
        part
    }
}

/// Whether a kernel on f16 converts a cache first.
pub fn converts<S>(kind: Flash, source: &Source<'_, S>) -> bool {
    let in_half = matches!(kind, Flash::Lanes(_) | Flash::Units(_) | Flash::Vector(Vector::Converted));
    in_half && source.dtype != DType::F16
}

/// The largest score of all, and the sum over all relative to it, with the sink.
pub fn total(parts: &[Part], sink: Option<f64>) -> (f64, f64) {
    let largest = parts.iter().map(|part| part.max).chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let seen = parts.iter().filter(|part| part.sum != 0.0);
    let sum: f64 = seen.map(|part| part.sum * (part.max - largest).exp()).sum();
    (largest, sum + sink.map_or(0.0, |sink| (sink - largest).exp()))
}
