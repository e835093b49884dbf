//! What an audit of a recording can see: every mistake of the catalogue, injected at every node.

use crate::audit::case::{Case, gather};
use crate::audit::local::HEALTHY;
use crate::audit::{Context, declared, graph_of, rows};
use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::diagnose::{Lab, Prediction};
use crate::faults::{Argument, Fault, Site, catalogue};
use crate::model::Model;
use crate::report::sensitivity::{Injected, Node, SCHEMA, Sensitivity};

/// Rows from the start of the run that are looked at besides the sample: mistakes that take one row for
/// another show in rows that follow one another.
const ROWS_FIRST: u32 = 4;

/// Injects every mistake at every wanted node of a recording, one at a time, in the rows at `positions`. The
/// recorded output, moved by what the mistake changes in exact arithmetic, is judged as an audit judges it.
///
/// # Errors
/// A weight that cannot be read, or inputs that do not have the model's shape.
pub fn measure(
    recording: &dyn Recording,
    model: &Model,
    positions: &[u32],
    wants: &dyn Fn(Checkpoint) -> bool,
    progress: &dyn Fn(usize, usize),
) -> Result<Sensitivity> {
    let mut positions = positions.to_vec();
    positions.extend(0..ROWS_FIRST.min(recording.tokens().len() as u32));
    positions.sort_unstable();
    positions.dedup();
    let declared = declared::of(recording, &positions);
    let graph = graph_of(&model.graph, recording, wants);
    let context = Context {
        gguf: &model.gguf,
        graph: &graph,
        recording,
        numerics: declared.numerics,
        recorded_unit: declared.recorded_unit,
        fed: None,
    };
    let wanted: Vec<_> = graph.nodes.iter().filter(|node| wants(node.checkpoint)).collect();
    let mut nodes = Vec::with_capacity(wanted.len());
    for (done, node) in wanted.iter().enumerate() {
        progress(done, wanted.len());
        let own = rows::of_checkpoint(&positions, &recording.positions(node.checkpoint));
        if own.is_empty() {
            nodes.push(undecided(node.checkpoint, "its own rows".to_owned()));
            continue;
        }
        nodes.push(match gather(&context, node, &own)? {
            Ok(case) => node_of(&Lab { context: &context, site: Site { model }, case: &case })?,
            Err(missing) => undecided(node.checkpoint, missing.to_string()),
        });
    }
    Ok(Sensitivity { schema: SCHEMA, positions, nodes })
}

fn undecided(id: Checkpoint, missing: String) -> Node {
    let undecided = Some(missing);
    Node { id, undecided, rounding: None, scale: None, injected: 0, faintest: None, unseen: Vec::new() }
}

/// Injects every mistake that has a place in the node.
fn node_of(lab: &Lab<'_>) -> Result<Node> {
    let case = lab.case;
    let checkpoint = case.node.checkpoint;
    let Some(healthy) = lab.predict(&case.node)?.filter(|healthy| !healthy.is_empty()) else {
        return Ok(undecided(checkpoint, "an explanation".to_owned()));
    };
    let own = over_bound(case, &healthy, None);
    if !own.is_some_and(|own| own <= HEALTHY) {
        return Ok(undecided(checkpoint, "a healthy node: this one has a fault already".to_owned()));
    }
    let mut node = Node { undecided: None, ..undecided(checkpoint, String::new()) };
    let best = &healthy[0];
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    node.rounding = Some(norm(&best.bound.data) / norm(&best.value.data)).filter(|ratio| ratio.is_finite());
    let largest = best.value.data.iter().zip(&best.bound.data).map(|(x, bound)| x.abs() / bound);
    node.scale = Some(1.0 / largest.fold(0.0, f64::max)).filter(|scale| scale.is_finite());
    for fault in catalogue::all() {
        let Some(injected) = inject(lab, &healthy, fault)? else { continue };
        node.injected += 1;
        match injected.over_bound {
            // `!(..)`, so that a NaN is seen.
            Some(over) if !(over <= HEALTHY) => {
                let least = node.faintest.as_ref().and_then(|known| known.over_bound);
                if over.is_finite() && least.is_none_or(|least| over < least) {
                    node.faintest = Some(injected);
                }
            }
            _ => node.unseen.push(injected),
        }
    }
    Ok(node)
}

/// One mistake, with its default argument; `None` where the node has no place for it.
fn inject(lab: &Lab<'_>, healthy: &[Prediction], fault: &'static Fault) -> Result<Option<Injected>> {
    let Some(argument) = (fault.default)(&lab.site, &lab.case.node) else { return Ok(None) };
    let mut node = lab.case.node.clone();
    if (fault.change)(&lab.site, &mut node, &argument).is_none() || node == lab.case.node {
        return Ok(None);
    }
    let fault = match &argument {
        Argument::None | Argument::Order(_) => fault.name.to_owned(),
        argument => format!("{}={argument}", fault.name),
    };
    let injected = lab.predict_from(healthy, &node)?;
    let over_bound = injected.and_then(|injected| over_bound(lab.case, healthy, Some(&injected)));
    Ok(Some(Injected { fault, over_bound }))
}

/// max |recorded + injected - 2 healthy| / bound over the rows that are decided, by the arithmetic that explains
/// it best; without a mistake max |recorded - healthy| / bound. `None` where no row is decided.
fn over_bound(case: &Case, healthy: &[Prediction], injected: Option<&[Prediction]>) -> Option<f64> {
    let mut best: Option<f64> = None;
    for (i, judge) in healthy.iter().enumerate() {
        let injected = injected.map(|injected| injected.get(i).unwrap_or(&injected[0]));
        let mut worst: Option<f64> = None;
        for t in 0..judge.value.rows {
            if injected.is_some_and(|injected| !injected.known[t]) {
                continue;
            }
            for c in 0..judge.value.cols {
                let exact = judge.value.row(t)[c];
                let change = injected.map_or(0.0, |injected| injected.value.row(t)[c] - exact);
                let error = (case.recorded.row(t)[c] - exact + change).abs();
                let over = if error == 0.0 { 0.0 } else { error / judge.bound.row(t)[c] };
                worst = Some(if over.is_nan() { f64::INFINITY } else { worst.unwrap_or(0.0).max(over) });
            }
        }
        best = match (best, worst) {
            (Some(best), Some(worst)) => Some(best.min(worst)),
            (best, worst) => best.or(worst),
        };
    }
    best
}
