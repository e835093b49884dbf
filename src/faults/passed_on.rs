//! Values that are passed on from further back than a node's own sources, where what lies between was not recorded either.

use parity_graph::rewrite::{Change, Edit, Rewrite};
use parity_graph::{Graph, Id, Op};

/// Nodes on the way, at most: two of a norm with its weight, two of a layer around its parts.
const WAY_MAX: usize = 4;

/// A rewrite; where it passes on such values, or a node behind those that lie between (`through`) reads them, as one of each
/// node on the way.
pub fn passed_on(graph: &Graph, through: &[Id], rewrite: &Rewrite) -> Vec<Rewrite> {
    let way = match rewrite.change {
        Change::Pass(with) => way((graph, through), rewrite.node, graph.origin(with), WAY_MAX),
        Change::Source { slot, with: Some(with) } if !through.contains(&rewrite.node) => {
            let read = graph.src(rewrite.node, slot).map(|source| graph.origin(source));
            let read = read.filter(|source| through.contains(source));
            read.and_then(|source| way((graph, through), source, graph.origin(with), WAY_MAX))
        }
        _ => None,
    };
    way.unwrap_or_else(|| vec![rewrite.clone()])
}

/// The nodes from `with` to a node, each changed to give what leads there; `None` where one of them does more to it than add,
/// multiply or normalise.
fn way((graph, through): (&Graph, &[Id]), node: Id, with: Id, most: usize) -> Option<Vec<Rewrite>> {
    let most = most.checked_sub(1)?;
    graph.get(node).srcs.iter().enumerate().find_map(|(slot, source)| {
        let source = graph.origin((*source)?);
        let beside = |neutral| {
            let slot = 1_usize.checked_sub(slot)?;
            Some(Change::SourceEdit { slot, edit: Edit::Set(neutral) })
        };
        let change = match graph.get(node).op {
            Op::Add => beside(0.0)?,
            Op::Mul => beside(1.0)?,
            Op::Scale | Op::RmsNorm | Op::Norm => Change::Bypass { slot },
            _ => return None,
        };
        let further = || through.contains(&source).then(|| way((graph, through), source, with, most));
        let before = if source == with { Some(Vec::new()) } else { further().flatten() };
        Some([before?, vec![Rewrite { node, change }]].concat())
    })
}
