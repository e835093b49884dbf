//! Mistakes of which a graph has too many to try them all: which experts' weights.
//!
//! The values say which ones are worth it: a wrong row of a product with an expert is computed with each other expert,
//! and what comes nearest is tried on the whole node.

use std::collections::BTreeSet;

use parity_graph::Op;
use parity_graph::fault::{self, Fault};

use crate::audit::Suspect;
use crate::engine::op_by_op::compute;
use crate::ops::source::Data;
use crate::ops::{Args, Source, Strided};

/// Share of the squared error of a row that another expert's weights account for.
const PROMISING: f64 = 0.9;

/// For each expert whose rows are wrong, the one whose weights come to them.
pub fn guesses(suspect: &Suspect<'_>) -> Vec<Fault> {
    let Suspect { node, args, recorded, held, .. } = *suspect;
    let graph = &node.program.graph;
    let (Op::MulMatId, Some(ids)) = (&graph.get(node.id).op, args.get(2)) else { return Vec::new() };
    let (ids, width) = (ids.values(), args.shape[3].max(1));
    let mut out: Vec<Fault> = Vec::new();
    let mut seen = BTreeSet::new();
    for row in held.beyond.iter().map(|element| element / width) {
        let Some(own) = ids.get(row).map(|id| *id as usize) else { continue };
        if !seen.insert(own) {
            continue;
        }
        let wanted = &recorded[row * width..(row + 1) * width];
        if let Some(other) = expert_of(args, row, wanted).filter(|other| *other != own) {
            out.extend(fault::experts(graph, node.id, [own, other]));
        }
    }
    let mut told = BTreeSet::new();
    out.retain(|fault| told.insert(fault.text.clone()));
    out
}

/// The expert whose product with the activations of a row, one of (T, E), comes nearest to `wanted`.
fn expert_of(args: &Args<'_, f64>, row: usize, wanted: &[f64]) -> Option<usize> {
    let rule = crate::ops::rule(&Op::MulMatId)?;
    let ([_, experts, m, k], [_, _, repeated, _]) = (args.get(0)?.shape(), args.get(1)?.shape());
    let chosen = args.shape[2].max(1);
    let x = args.get(1)?.row([0, row / chosen, row % chosen % repeated.max(1)]).to_vec();
    let mut best = (f64::INFINITY, 0);
    for expert in 0..experts {
        let id = [expert as f64];
        let values = |data, shape, slot: usize| {
            let dtype = args.get(slot)?.dtype;
            Some(Some(Source { dtype, data: Data::Values(Strided::whole(data, shape)) }))
        };
        let sources = vec![args.sources[0].clone(), values(&x, [1, 1, 1, k], 1)?, values(&id, [1; 4], 2)?];
        let one = Args { sources, shape: [1, 1, 1, m], ..*args };
        let own = compute::<f64>(rule, &one).ok()?;
        let left: f64 = own.iter().zip(wanted).map(|(own, wanted)| (own - wanted).powi(2)).sum();
        if left < best.0 {
            best = (left, expert);
        }
    }
    let size: f64 = wanted.iter().map(|wanted| wanted.powi(2)).sum();
    (1.0 - best.0 / size >= PROMISING).then_some(best.1)
}
