//! SSM_SCAN: the selective scan of Mamba (Gu and Dao, arXiv 2312.00752; Mamba-2: 2405.21060), state by state.
//!
//! s0 states (R, H, P, N), s1 x (S, T, H, P), s2 dt (S, T, H), s3 A (H, 1) or (H, N), s4 B and s5 C (S, T, G, N), s6 ids
//! (S). With d = softplus(dt) and group g = h/(H/G), from the state s0[ids[s]] on, for each token
//! `st[h,p,n] = st·exp(d·A[h,n]) + B[g,n]·x[h,p]·d` and then `y[h,p] = Σ_n st·C[g,n]`. Words: `snapshots` K. The result
//! is one row: y (S, T, H, P), then K blocks of states (S, H, P, N), block j as of j tokens before the last; blocks of
//! tokens that are not there are never written. The CPU computes in f32, states too, with log(1 + e^x) for softplus
//! and x itself above 20 (ggml-cpu/ops.cpp).

mod explain;

use parity_graph::Op;
use rayon::prelude::*;

use super::{Args, Check, Rule};
use crate::arithmetic::Softplus;
use crate::error::{Error, Result};
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::SsmScan,
    formula: "the selective scan of a state-space model, token by token, and its last states: h = \
        e^(dt·A)·h + dt·B·x, y = C·h",
    explained: "the roundings of every token's products, sums and exponentials in f32, carried on through \
        the states",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(explain::bound),
    carry: explain::carry,
};

/// From here on softplus is x itself.
const LINEAR: f64 = 20.0;

/// The sources in logical order, and their extents.
struct Scan {
    s: usize,
    t: usize,
    h: usize,
    p: usize,
    n: usize,
    groups: usize,
    /// Extent of A's fastest axis, 1 or N.
    a_width: usize,
    /// Blocks of states in the result.
    blocks: usize,
    states: Vec<f64>,
    x: Vec<f64>,
    dt: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
    c: Vec<f64>,
    /// The row of the states that each sequence starts from.
    ids: Vec<usize>,
    softplus: Softplus,
}

/// What each (sequence, head) gives: y (T, P), and the states after each token of a block.
type Part = (Vec<f64>, Vec<(usize, Vec<f64>)>);

/// What one token does to one head.
struct Token<'a> {
    /// softplus(dt), and dt.
    d: f64,
    dt: f64,
    /// (P,)
    x: &'a [f64],
    /// (N,)
    b: &'a [f64],
    /// (N,)
    c: &'a [f64],
}

impl Scan {
    fn new<S: Scalar>(args: &Args<'_, S>) -> Result<Scan> {
        let mut shapes = [[0; 4]; 7];
        let mut values: [Vec<f64>; 7] = Default::default();
        for slot in 0..7 {
            let source = args.source(slot)?;
            shapes[slot] = source.shape();
            values[slot] = source.values().iter().map(|v| v.to_f64()).collect();
        }
        let ([rows, h, p, n], [s, t, xh, xp]) = (shapes[0], shapes[1]);
        let (groups, a_width) = (shapes[4][2], shapes[3][3]);
        let blocks = args.params.int(0).max(1) as usize;
        let fits = [xh, xp] == [h, p]
            && shapes[2] == [1, s, t, h]
            && (shapes[3] == [1, 1, h, 1] || shapes[3] == [1, 1, h, n])
            && shapes[4] == [s, t, groups, n]
            && shapes[5] == shapes[4]
            && values[6].len() == s
            && groups > 0
            && h.is_multiple_of(groups);
        if !fits || args.elements() != s * t * h * p + blocks * s * h * p * n {
            return Err(args.misfit(
                "states (R, H, P, N), x (S, T, H, P), dt (S, T, H), A (H, 1 or N), B and C (S, T, G, N), ids (S), for \
                 a result of S·T·H·P + K·S·H·P·N",
            ));
        }
        let ids = values[6].iter().map(|id| {
            let whole = *id >= 0.0 && *id < rows as f64 && id.fract() == 0.0;
            whole.then_some(*id as usize).ok_or_else(|| {
                Error::new(args.name, "an id is no row of the states")
                    .expected(format!("a whole number below {rows}"))
                    .found(id)
                    .hint("were the inputs of this step recorded whole?")
            })
        });
        let ids = ids.collect::<Result<Vec<usize>>>()?;
        let [states, x, dt, a, b, c, _] = values;
        let softplus = args.arithmetic.softplus;
        Ok(Scan { s, t, h, p, n, groups, a_width, blocks, states, x, dt, a, b, c, ids, softplus })
    }

    /// Sequence and head of a task.
    fn place(&self, task: usize) -> (usize, usize) {
        (task / self.h, task % self.h)
    }

    /// The state (P, N) that a sequence's head starts from, out of values like those of source 0.
    fn first<'v>(&self, states: &'v [f64], s: usize, h: usize) -> &'v [f64] {
        let size = self.p * self.n;
        &states[(self.ids[s] * self.h + h) * size..][..size]
    }

    fn a(&self, h: usize, n: usize) -> f64 {
        self.a[h * self.a_width + n % self.a_width]
    }

    fn token(&self, s: usize, t: usize, h: usize) -> Token<'_> {
        let dt = self.dt[self.of_dt(s, t, h)];
        let group = self.of_group(s, t, h);
        Token {
            d: softplus(self.softplus, dt),
            dt,
            x: &self.x[self.of_x(s, t, h)..][..self.p],
            b: &self.b[group..][..self.n],
            c: &self.c[group..][..self.n],
        }
    }

    fn of_dt(&self, s: usize, t: usize, h: usize) -> usize {
        (s * self.t + t) * self.h + h
    }

    /// Where the row of x, or of y, is.
    fn of_x(&self, s: usize, t: usize, h: usize) -> usize {
        self.of_dt(s, t, h) * self.p
    }

    fn of_group(&self, s: usize, t: usize, h: usize) -> usize {
        ((s * self.t + t) * self.groups + h / (self.h / self.groups)) * self.n
    }

    /// Which block of the result takes the states after token t.
    fn block(&self, t: usize) -> Option<usize> {
        Some(self.t - 1 - t).filter(|block| *block < self.blocks)
    }

    /// Puts together what each (sequence, head) gives of y, (T, P), and of the states after each token of a block. What
    /// is never written is `unwritten`.
    fn assemble(&self, parts: &[Part], unwritten: f64) -> Vec<f64> {
        let (outputs, size) = (self.s * self.t * self.h * self.p, self.p * self.n);
        let mut out = vec![unwritten; outputs + self.blocks * self.s * self.h * size];
        for (task, (y, states)) in parts.iter().enumerate() {
            let (s, h) = self.place(task);
            for (t, y) in y.chunks(self.p.max(1)).enumerate() {
                out[self.of_x(s, t, h)..][..self.p].copy_from_slice(y);
            }
            for (block, state) in states {
                let at = outputs + ((block * self.s + s) * self.h + h) * size;
                out[at..at + size].copy_from_slice(state);
            }
        }
        out
    }

    fn run(&self, s: usize, h: usize) -> Part {
        let mut state = self.first(&self.states, s, h).to_vec();
        let (mut outputs, mut states) = (Vec::with_capacity(self.t * self.p), Vec::new());
        for t in 0..self.t {
            let token = self.token(s, t, h);
            let decays: Vec<f64> = (0..self.n).map(|n| (token.d * self.a(h, n)).exp()).collect();
            for (state, x) in state.chunks_mut(self.n.max(1)).zip(token.x) {
                let mut y = 0.0;
                for (n, st) in state.iter_mut().enumerate() {
                    *st = *st * decays[n] + token.b[n] * x * token.d;
                    y += *st * token.c[n];
                }
                outputs.push(y);
            }
            states.extend(self.block(t).map(|block| (block, state.clone())));
        }
        (outputs, states)
    }
}

/// log(1 + e^x), from the sum as f32 rounds it where a producer does so.
fn softplus(kind: Softplus, x: f64) -> f64 {
    match kind {
        _ if x > LINEAR => x,
        Softplus::Exact => x.exp().ln_1p(),
        Softplus::RoundedSum => f64::from((1.0 + x.exp()) as f32).ln(),
    }
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let scan = Scan::new(args)?;
    let tasks = (0..scan.s * scan.h).into_par_iter();
    let parts: Vec<_> = tasks
        .map(|task| {
            let (s, h) = scan.place(task);
            scan.run(s, h)
        })
        .collect();
    Ok(scan.assemble(&parts, 0.0).into_iter().map(S::from_f64).collect())
}

#[cfg(test)]
mod tests;
