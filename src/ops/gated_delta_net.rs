//! GATED_DELTA_NET: the gated delta rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464), token by token.
//!
//! s0 q (S, T, Hq, D), s1 k (S, T, Hk, D), s2 v (S, T, H, D), s3 gate (S, T, H, 1) or (S, T, H, D), one per key channel, s4
//! beta (S, T, H, 1), s5 state (S, H, D, D) with the key channel on the fastest axis. Heads of q and k repeat modulo.
//! For each token `M[j,i] *= exp(gate)`, `delta[j] = (v[j] - Σ_i M[j,i]·k[i])·beta`, `M[j,i] += k[i]·delta[j]` and
//! `o[j] = Σ_i M[j,i]·q[i] / sqrt(D)`. Words: `snapshots` K. The result (S·T + K·S·D, H·D) is flat: o (S, T, H, D), then K
//! blocks of states (S, H, D, D), block j as of j tokens before the last; blocks of tokens that are not there are never
//! written. The CPU computes in f32, states too (ggml-cpu/ops.cpp).

mod explain;

use parity_graph::Op;
use rayon::prelude::*;

use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::GatedDeltaNet,
    formula: "the gated delta rule, token by token, and its last states: S = e^gate·S, S = S + k·(β·(v - \
        S·k))ᵀ, y = S·q/√d",
    explained: "the roundings of every token's products and sums in f32, carried on through the states",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(explain::bound),
    carry: explain::carry,
};

/// The sources in logical order, and their extents.
struct Net {
    s: usize,
    t: usize,
    h: usize,
    d: usize,
    /// Heads of q and of k.
    heads: [usize; 2],
    /// Extent of the gate's fastest axis, 1 or D.
    gates: usize,
    /// Blocks of states in the result.
    blocks: usize,
    /// q, k, v, gate, beta, state.
    values: [Vec<f64>; 6],
}

/// Where what one token does to one head is in the sources.
#[derive(Clone, Copy)]
struct Token {
    q: usize,
    k: usize,
    v: usize,
    gate: usize,
    beta: usize,
}

/// What each (sequence, head) gives: o (T, D), and the states after each token of a block.
type Part = (Vec<f64>, Vec<(usize, Vec<f64>)>);

impl Net {
    fn new<S: Scalar>(args: &Args<'_, S>) -> Result<Net> {
        let mut shapes = [[0; 4]; 6];
        let mut values: [Vec<f64>; 6] = Default::default();
        for slot in 0..6 {
            let source = args.source(slot)?;
            shapes[slot] = source.shape();
            values[slot] = source.values().iter().map(|v| v.to_f64()).collect();
        }
        let [s, t, h, d] = shapes[2];
        let (heads, gates) = ([shapes[0][2], shapes[1][2]], shapes[3][3]);
        let blocks = args.params.int(0).max(1) as usize;
        let fits = shapes[0] == [s, t, heads[0], d]
            && shapes[1] == [s, t, heads[1], d]
            && heads.iter().all(|heads| *heads > 0)
            && (gates == 1 || gates == d)
            && shapes[3] == [s, t, h, gates]
            && shapes[4] == [s, t, h, 1]
            && values[5].len() == s * h * d * d;
        if !fits || args.elements() != s * t * h * d + blocks * s * h * d * d {
            return Err(args.misfit(
                "q and k (S, T, Hq and Hk, D), v (S, T, H, D), a gate (S, T, H, 1 or D), beta (S, T, H, 1), a state \
                 (S, H, D, D), for a result of S·T·H·D + K·S·H·D·D",
            ));
        }
        Ok(Net { s, t, h, d, heads, gates, blocks, values })
    }

    fn token(&self, s: usize, t: usize, h: usize) -> Token {
        let at = s * self.t + t;
        let own = at * self.h + h;
        let [q, k] = self.heads.map(|heads| (at * heads + h % heads) * self.d);
        Token { q, k, v: own * self.d, gate: own * self.gates, beta: own }
    }

    /// (D,) of source `slot` at `at`.
    fn row(&self, slot: usize, at: usize) -> &[f64] {
        &self.values[slot][at..at + self.d]
    }

    fn gate(&self, token: Token, i: usize) -> f64 {
        self.values[3][token.gate + i % self.gates]
    }

    /// Which block of the result takes the states after token t.
    fn block(&self, t: usize) -> Option<usize> {
        Some(self.t - 1 - t).filter(|block| *block < self.blocks)
    }

    /// The result from what `run` gives of each (sequence, head). What is never written is `unwritten`.
    fn assemble(&self, unwritten: f64, run: impl Fn(usize, usize) -> Part + Sync) -> Vec<f64> {
        let tasks = (0..self.s * self.h).into_par_iter();
        let parts: Vec<Part> = tasks.map(|task| run(task / self.h, task % self.h)).collect();
        let (outputs, size) = (self.s * self.t * self.h * self.d, self.d * self.d);
        let mut out = vec![unwritten; outputs + self.blocks * self.s * self.h * size];
        for (task, (o, states)) in parts.iter().enumerate() {
            for (t, o) in o.chunks(self.d.max(1)).enumerate() {
                let at = self.token(task / self.h, t, task % self.h).v;
                out[at..at + self.d].copy_from_slice(o);
            }
            for (block, state) in states {
                let at = outputs + (block * self.s * self.h + task) * size;
                out[at..at + size].copy_from_slice(state);
            }
        }
        out
    }

    /// The state (D, D) that a head starts from.
    fn first(&self, s: usize, h: usize) -> &[f64] {
        let size = self.d * self.d;
        &self.values[5][(s * self.h + h) * size..][..size]
    }

    /// Applies one token to row j of a state; delta of the row.
    fn step(&self, row: &mut [f64], token: Token, decays: &[f64], j: usize) -> f64 {
        let k = self.row(1, token.k);
        row.iter_mut().zip(decays).for_each(|(m, decay)| *m *= decay);
        let dot: f64 = row.iter().zip(k).map(|(m, k)| m * k).sum();
        let delta = (self.values[2][token.v + j] - dot) * self.values[4][token.beta];
        row.iter_mut().zip(k).for_each(|(m, k)| *m += k * delta);
        delta
    }

    fn decays(&self, token: Token) -> Vec<f64> {
        (0..self.d).map(|i| self.gate(token, i).exp()).collect()
    }

    fn run(&self, s: usize, h: usize) -> Part {
        let mut state = self.first(s, h).to_vec();
        let (mut outputs, mut states) = (Vec::with_capacity(self.t * self.d), Vec::new());
        let scale = 1.0 / (self.d as f64).sqrt();
        for t in 0..self.t {
            let token = self.token(s, t, h);
            let decays = self.decays(token);
            let q = self.row(0, token.q);
            for (j, row) in state.chunks_mut(self.d.max(1)).enumerate() {
                self.step(row, token, &decays, j);
                outputs.push(row.iter().zip(q).map(|(m, q)| m * q).sum::<f64>() * scale);
            }
            states.extend(self.block(t).map(|block| (block, state.clone())));
        }
        (outputs, states)
    }
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let net = Net::new(args)?;
    Ok(net.assemble(0.0, |s, h| net.run(s, h)).into_iter().map(S::from_f64).collect())
}

#[cfg(test)]
mod tests;
