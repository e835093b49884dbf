//! What rounding explains of the delta rule, and how errors of its sources are carried.
//!
//! A row of the state is multiplied by exp(gate)·(1 - beta·k·kᵀ) from token to token. Magnitudes of its elements would
//! grow without end where the values do not: so the error of a row is carried as its Euclidean norm, which that
//! matrix changes by max(exp(gate))·max(1, |1 - beta·‖k‖²|) at most, and no element is off by more than it.

use super::super::bound::{CONFIDENCE, TINY_F32, UNIT_F32, accumulation};
use super::super::source::Args;
use super::{Net, Part, Token};

/// exp in units of u: within 2 ulp, an ulp is up to 2u.
const EXP_ROUNDINGS: f64 = 4.0;
/// The difference v - dot and its product with beta.
const DELTA_ROUNDINGS: f64 = 2.0;
/// k·delta and its sum with the state, where they are not fused.
const UPDATE_ROUNDINGS: f64 = 2.0;
/// The product with 1/sqrt(D), which is rounded too.
const OUTPUT_ROUNDINGS: f64 = 2.0;
/// Larger errors of an exponent say nothing of the exponential.
const UNKNOWN: f64 = 8.0;

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

/// By how much a token multiplies the norm of an error at most.
fn growth(net: &Net, token: Token, decays: &[f64]) -> f64 {
    let square: f64 = net.row(1, token.k).iter().map(|k| k * k).sum();
    let decay = decays.iter().copied().fold(0.0, f64::max);
    decay * (1.0 - net.values[4][token.beta] * square).abs().max(1.0)
}

/// Roundings are independent from token to token: the norms of what each adds in quadrature.
pub fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Ok(net) = Net::new(args) else { return vec![0.0; exact.len()] };
    // Nothing is known of memory that is never written.
    net.assemble(f64::INFINITY, |s, h| rounded(&net, s, h))
}

fn rounded(net: &Net, s: usize, h: usize) -> Part {
    let d = net.d;
    let mut state = net.first(s, h).to_vec();
    let mut square = vec![0.0; d];
    let (mut outputs, mut states) = (Vec::with_capacity(net.t * d), Vec::new());
    let (scale, factor) = (1.0 / (d as f64).sqrt(), accumulation(d, UNIT_F32) / CONFIDENCE);
    let error = |square: f64| CONFIDENCE * square.sqrt() + TINY_F32;
    for t in 0..net.t {
        let token = net.token(s, t, h);
        let (decays, q, k) = (net.decays(token), net.row(0, token.q), net.row(1, token.k));
        let growth = growth(net, token, &decays);
        let (of_k, of_q) = (norm(k.iter().copied()), norm(q.iter().copied()));
        for (j, (row, square)) in state.chunks_mut(d.max(1)).zip(&mut square).enumerate() {
            let kept: Vec<f64> = row.iter().zip(&decays).map(|(m, decay)| m * decay).collect();
            let delta = net.step(row, token, &decays, j);
            let dot: f64 = kept.iter().zip(k).map(|(m, k)| m * k).sum();
            let terms = norm(kept.iter().zip(k).map(|(m, k)| m * k));
            let beta = net.values[4][token.beta];
            let of_dot = factor * (terms + dot.abs());
            let of_delta = beta.abs() * (of_dot + UNIT_F32 * (net.values[2][token.v + j].abs() + dot.abs()))
                + DELTA_ROUNDINGS * UNIT_F32 * delta.abs();
            *square = *square * growth * growth
                + ((EXP_ROUNDINGS + 1.0) * UNIT_F32 * norm(kept.into_iter())).powi(2)
                + (of_k * (of_delta + UPDATE_ROUNDINGS * UNIT_F32 * delta.abs())).powi(2)
                + (UNIT_F32 * norm(row.iter().copied())).powi(2);
            let products = row.iter().zip(q).map(|(m, q)| m * q);
            let (sum, terms) = (products.clone().sum::<f64>(), norm(products));
            let summed = CONFIDENCE * factor * (terms + sum.abs()) + OUTPUT_ROUNDINGS * UNIT_F32 * sum.abs();
            outputs.push(scale * (error(*square) * of_q + summed) + UNIT_F32 * scale * sum.abs() + TINY_F32);
        }
        let bounds = || square.iter().flat_map(|square| vec![error(*square); d]).collect();
        states.extend(net.block(t).map(|block| (block, bounds())));
    }
    (outputs, states)
}

/// Errors of the sources at their worst: norms are added.
pub fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Ok(net) = Net::new(args) else { return vec![0.0; exact.len()] };
    if slot > 5 {
        return vec![0.0; exact.len()];
    }
    net.assemble(0.0, |s, h| moved(&net, slot, error, s, h))
}

fn moved(net: &Net, slot: usize, error: &[f64], s: usize, h: usize) -> Part {
    let (d, size) = (net.d, net.d * net.d);
    let mut state = net.first(s, h).to_vec();
    let mut moved: Vec<f64> = match slot {
        5 => error[(s * net.h + h) * size..][..size].chunks(d).map(|e| norm(e.iter().copied())).collect(),
        _ => vec![0.0; d],
    };
    let none = vec![0.0; d];
    let (mut outputs, mut states) = (Vec::with_capacity(net.t * d), Vec::new());
    let scale = 1.0 / (d as f64).sqrt();
    for t in 0..net.t {
        let token = net.token(s, t, h);
        let of = |wanted: usize, at: usize| if slot == wanted { &error[at..at + d] } else { &none[..] };
        let (decays, q, k) = (net.decays(token), net.row(0, token.q), net.row(1, token.k));
        let (error_q, error_k, error_v) = (of(0, token.q), of(1, token.k), of(2, token.v));
        let of_beta = if slot == 4 { error[token.beta] } else { 0.0 };
        let of_gate = match slot {
            3 => error[token.gate..token.gate + net.gates].iter().copied().fold(0.0, f64::max),
            _ => 0.0,
        };
        let of_decay = of_gate.min(UNKNOWN).exp_m1();
        let beta = net.values[4][token.beta].abs() + of_beta;
        let (of_q, of_k) = (norm(q.iter().copied()), norm(k.iter().copied()));
        let (more_q, more_k) = (norm(error_q.iter().copied()), norm(error_k.iter().copied()));
        // The errors of k and beta change the matrix as well.
        let longer = (of_k + more_k).powi(2) - of_k * of_k;
        let growth = growth(net, token, &decays) * (1.0 + of_decay) + beta * longer + of_beta * of_k * of_k;
        for (j, (row, moved)) in state.chunks_mut(d.max(1)).zip(&mut moved).enumerate() {
            let kept = norm(row.iter().zip(&decays).map(|(m, decay)| m * decay));
            let delta = net.step(row, token, &decays, j).abs();
            let own_beta = net.values[4][token.beta].abs();
            let difference = if own_beta > 0.0 {
                delta / own_beta
            } else {
                net.values[2][token.v + j].abs() + kept * of_k
            };
            let of_dot = kept * (1.0 + of_decay) * more_k + error_v[j];
            let of_delta = beta * of_dot + of_beta * difference;
            *moved = *moved * growth
                + kept * of_decay * (1.0 + beta * of_k * of_k)
                + (of_k + more_k) * of_delta
                + delta * more_k;
            let along: f64 = row.iter().zip(error_q).map(|(m, e)| m.abs() * e).sum();
            outputs.push(scale * (*moved * (of_q + more_q) + along));
        }
        let bounds = || moved.iter().flat_map(|moved| vec![*moved; d]).collect();
        states.extend(net.block(t).map(|block| (block, bounds())));
    }
    (outputs, states)
}
