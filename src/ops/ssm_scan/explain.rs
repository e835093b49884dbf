//! What rounding explains of a scan, and how errors of its sources are carried: both follow the recurrence.

use rayon::prelude::*;

use super::super::bound::{CONFIDENCE, TINY_F32, UNIT_F32, accumulation};
use super::super::source::Args;
use super::{LINEAR, Part, Scan, Token, softplus};
use crate::arithmetic::Softplus;

/// exp and log in units of u: within 2 ulp, an ulp is up to 2u.
const LIBRARY_ROUNDINGS: f64 = 4.0;
/// d·A is rounded before its exponential is taken.
const ARGUMENT_ROUNDINGS: f64 = 1.0;
/// B·(x·d), and the product of the state with its decay or the sum of both where they are not fused.
const TERM_ROUNDINGS: f64 = 3.0;
/// Larger errors of an exponent say nothing of the exponential.
const UNKNOWN: f64 = 8.0;

/// Independent roundings from token to token: in quadrature for each state; an output adds up its states' in the worst
/// way, since those of one token share the rounding of their decay.
pub fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Ok(scan) = Scan::new(args) else { return vec![0.0; exact.len()] };
    let tasks = (0..scan.s * scan.h).into_par_iter();
    let parts: Vec<_> = tasks
        .map(|task| {
            let (s, h) = scan.place(task);
            rounded(&scan, s, h)
        })
        .collect();
    // Nothing is known of memory that is never written.
    scan.assemble(&parts, f64::INFINITY)
}

fn rounded(scan: &Scan, s: usize, h: usize) -> Part {
    let mut state = scan.first(&scan.states, s, h).to_vec();
    let mut square = vec![0.0; state.len()];
    let (mut outputs, mut states) = (Vec::with_capacity(scan.t * scan.p), Vec::new());
    let factor = accumulation(scan.n, UNIT_F32);
    let error = |square: f64| CONFIDENCE * square.sqrt() + TINY_F32;
    for t in 0..scan.t {
        let token = scan.token(s, t, h);
        let of_d = softplus_error(scan.softplus, &token);
        let decays: Vec<(f64, f64)> = (0..scan.n)
            .map(|n| {
                let exponent = token.d * scan.a(h, n);
                let of_exponent = of_d * scan.a(h, n).abs() + ARGUMENT_ROUNDINGS * UNIT_F32 * exponent.abs();
                (exponent.exp(), of_exponent.min(UNKNOWN).exp_m1() + LIBRARY_ROUNDINGS * UNIT_F32)
            })
            .collect();
        for (p, x) in token.x.iter().enumerate() {
            let (mut y, mut terms, mut spread) = (0.0, 0.0, 0.0);
            for n in 0..scan.n {
                let (st, square) = (&mut state[p * scan.n + n], &mut square[p * scan.n + n]);
                let (decay, of_decay) = decays[n];
                let (kept, term) = (*st * decay, token.b[n] * x * token.d);
                *st = kept + term;
                *square = *square * decay * decay
                    + (kept * of_decay).powi(2)
                    + (TERM_ROUNDINGS * UNIT_F32 * term).powi(2)
                    + (token.b[n] * x * of_d).powi(2)
                    + (UNIT_F32 * kept).powi(2)
                    + (UNIT_F32 * *st).powi(2);
                let product = *st * token.c[n];
                y += product;
                terms += product * product;
                spread += error(*square) * token.c[n].abs();
            }
            outputs.push(spread + factor * (terms.sqrt() + y.abs()) + UNIT_F32 * y.abs() + TINY_F32);
        }
        let bounds = || square.iter().map(|square| error(*square)).collect();
        states.extend(scan.block(t).map(|block| (block, bounds())));
    }
    (outputs, states)
}

/// Absolute error of softplus: where the sum is rounded to f32 first, the exponential's error may round it to a
/// neighbour of what was followed.
fn softplus_error(kind: Softplus, token: &Token<'_>) -> f64 {
    if token.dt > LINEAR {
        return 0.0;
    }
    let off = LIBRARY_ROUNDINGS * UNIT_F32;
    let sum = |factor: f64| f64::from((1.0 + token.dt.exp() * factor) as f32).ln();
    let rounded = match kind {
        Softplus::Exact => off * token.d,
        Softplus::RoundedSum => (sum(1.0 + off) - token.d).max(token.d - sum(1.0 - off)).max(0.0),
    };
    rounded + LIBRARY_ROUNDINGS * UNIT_F32 * token.d
}

/// Errors of the sources are carried at their worst from token to token.
pub fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Ok(scan) = Scan::new(args) else { return vec![0.0; exact.len()] };
    if slot > 5 {
        return vec![0.0; exact.len()];
    }
    let tasks = (0..scan.s * scan.h).into_par_iter();
    let parts: Vec<_> = tasks
        .map(|task| {
            let (s, h) = scan.place(task);
            moved(&scan, slot, error, s, h)
        })
        .collect();
    scan.assemble(&parts, 0.0)
}

fn moved(scan: &Scan, slot: usize, error: &[f64], s: usize, h: usize) -> Part {
    let of = |wanted: usize, at: usize| if slot == wanted { error[at] } else { 0.0 };
    let mut state = scan.first(&scan.states, s, h).to_vec();
    let mut moved = if slot == 0 { scan.first(error, s, h).to_vec() } else { vec![0.0; state.len()] };
    let (mut outputs, mut states) = (Vec::with_capacity(scan.t * scan.p), Vec::new());
    for t in 0..scan.t {
        let token = scan.token(s, t, h);
        let (x_at, group) = (scan.of_x(s, t, h), scan.of_group(s, t, h));
        let of_dt = of(2, scan.of_dt(s, t, h));
        // The slope of softplus grows with x; a sum that is rounded to f32 may be so to a neighbour.
        let step = if of_dt > 0.0 && scan.softplus == Softplus::RoundedSum { 2.0 * UNIT_F32 } else { 0.0 };
        let of_d = softplus(Softplus::Exact, token.dt + of_dt) - softplus(Softplus::Exact, token.dt) + step;
        for (p, x) in token.x.iter().enumerate() {
            let (of_x, mut y) = (of(1, x_at + p), 0.0);
            for n in 0..scan.n {
                let (st, moved) = (&mut state[p * scan.n + n], &mut moved[p * scan.n + n]);
                let a = scan.a(h, n);
                let of_a = of(3, h * scan.a_width + n % scan.a_width);
                let (of_b, of_c) = (of(4, group + n), of(5, group + n));
                let decay = (token.d * a).exp();
                let of_exponent = of_d * (a.abs() + of_a) + token.d * of_a;
                let of_decay = of_exponent.min(UNKNOWN).exp_m1();
                let (b, x, d) = (token.b[n].abs(), x.abs(), token.d);
                *moved = decay * (*moved * (1.0 + of_decay) + st.abs() * of_decay)
                    + (b + of_b) * (x + of_x) * (d + of_d)
                    - b * x * d;
                *st = *st * decay + token.b[n] * token.x[p] * d;
                y += *moved * (token.c[n].abs() + of_c) + st.abs() * of_c;
            }
            outputs.push(y);
        }
        states.extend(scan.block(t).map(|block| (block, moved.clone())));
    }
    (outputs, states)
}
