//! Recurrent states that a context keeps to go back to: rows in planes of so many cells, the newest states first.

use crate::graph::{Graph, Id, Leaf};
use crate::op::Op;
use crate::params::field;

/// How many states an op leaves for each sequence.
const SNAPSHOTS: &str = "snapshots";

/// Cells of one plane of a state, of which there are several; `None` of any other tensor, and where the graph does not show it.
pub fn plane(graph: &Graph, state: Id) -> Option<usize> {
    let rows = graph.get(state).ne[1];
    if graph.leaf(state) != Some(Leaf::State) {
        return None;
    }
    let planes = graph.computed().filter_map(|id| {
        let tensor = graph.get(id);
        Some(tensor.params.int(field(&tensor.op, SNAPSHOTS)?.word))
    });
    let planes = planes.max().and_then(|most| usize::try_from(most).ok()).filter(|most| *most > 1);
    let cells = planes.map_or_else(|| between_writes(graph, state), |planes| Some(rows / planes))?;
    (cells > 0 && cells < rows && rows.is_multiple_of(cells)).then_some(cells)
}

/// How far apart the planes lie that one step writes.
fn between_writes(graph: &Graph, state: Id) -> Option<usize> {
    let row = graph.get(state).nb[1].max(1);
    // What is copied from one cell to another is no new state.
    let is_new = |id: &Id| {
        let source = graph.src(*id, 0).map(|source| graph.get(graph.origin(source)));
        graph.get(*id).elements() > 0 && source.is_some_and(|source| source.op != Op::GetRows)
    };
    let writes = graph.writers(state).filter(is_new);
    let mut first: Vec<usize> = writes.filter_map(|id| Some(graph.get(id).view?.offset / row)).collect();
    first.sort_unstable();
    first.dedup();
    first.windows(2).map(|pair| pair[1] - pair[0]).min()
}

/// The node that picks, of a state in planes, the rows that a tensor comes from through what only moves them; with the cells of
/// a plane.
pub fn picked(graph: &Graph, id: Id) -> Option<(Id, usize)> {
    let (mut open, mut seen) = (vec![id], 0);
    // A graph is foreign data: the walk is bounded.
    while let Some(id) = open.pop().filter(|_| seen < graph.tensors.len()) {
        seen += 1;
        let op = &graph.get(id).op;
        let state = |slot| graph.src(id, slot).and_then(|table| plane(graph, graph.root(table)));
        match op {
            Op::GetRows => match state(0) {
                Some(cells) => return Some((id, cells)),
                None => continue,
            },
            op if !graph.is_leaf(id) && op.is_movement() => open.extend(graph.sources(id)),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    /// A convolution behind the state that a step picks, in planes of two cells; `writes` are the planes that it writes.
    fn graph(writes: &[usize]) -> Graph {
        let (nodes, leaf) = (6 + writes.len(), 6 + writes.len());
        let mut lines = format!(
            "graph {nodes} of {} on=CPU\n\
             RESHAPE f32 6,10 view={leaf} < {leaf} : cache_r_l0 (reshaped)\n\
             VIEW i32 1 view={1} < {1} : rs_s_copy (view)\n\
             GET_ROWS f32 6 < 0 1 : conv_states-0\n\
             RESHAPE f32 3,2 view=2 < 2 : conv_states_reshaped-0\n\
             CONCAT f32 5,2 < 3 {2} : conv_input-0\n",
            nodes + 4,
            leaf + 1,
            leaf + 2,
        );
        for plane in writes {
            lines += &format!("CPY f32 6 view={leaf}+{} < 4 4 : cache_r_l0 (view)\n", plane * 2 * 6 * 4);
        }
        lines += &format!("SSM_CONV f32 2,2 < 4 {} : conv_output_raw-0\n", leaf + 3);
        lines += "NONE f32 6,10 : cache_r_l0\nNONE i32 2 : rs_s_copy\nNONE f32 2,2 : x\nNONE f32 4,2 : blk.0.ssm_conv1d.weight\n";
        text::read(&lines).unwrap().remove(0)
    }

    #[test]
    fn planes_are_told_by_the_places_that_a_step_writes() {
        let several = graph(&[1, 0]);
        let last = several.nodes - 1;
        assert_eq!(plane(&several, several.nodes), Some(2));
        assert_eq!(picked(&several, last), None, "it computes");
        assert_eq!(picked(&several, several.src(last, 0).unwrap()), Some((2, 2)));
        // Of a step that writes one place nobody knows how far the next lies.
        let one = graph(&[0]);
        assert_eq!((plane(&one, one.nodes), plane(&one, one.nodes + 1)), (None, None));
        assert_eq!(picked(&one, one.src(one.nodes - 1, 0).unwrap()), None);
    }
}
