//! The newest states of a recording whose sequences went back to older ones: what a rollback that was forgotten goes on from.

use parity_graph::rewrite::Edit;
use parity_graph::{Op, states};

use crate::engine::op_by_op::{Node, compute};
use crate::ops::source::Data;
use crate::ops::{Args, Source, Strided};

/// The newest rows of the state that a node picks rows of, where it picks older ones.
pub fn rows(node: &Node<'_>, args: &Args<'_, f64>) -> Option<Vec<f64>> {
    let (graph, rule) = (&node.program.graph, node.rule?);
    let table = graph.src(node.id, 0).filter(|_| graph.get(node.id).op == Op::GetRows)?;
    let cells = i32::try_from(states::plane(graph, graph.root(table))?).ok()?;
    let indices = args.get(1)?;
    let [d, c, b, a] = indices.shape();
    let own = indices.values();
    let mut newest = own.to_vec();
    Edit::AddModulo(0, cells).apply(&mut [a, b, c, d], &mut newest);
    if newest[..] == own[..] {
        return None;
    }
    let mut sources = args.sources.clone();
    let data = Data::Values(Strided::whole(&newest, indices.shape()));
    sources[1] = Some(Source { dtype: indices.dtype, data });
    compute(rule, &Args { sources, ..*args }).ok()
}
