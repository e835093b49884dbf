//! What an audit of a recording can see: every mistake of the catalogue, injected at every node.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use indexmap::IndexMap;
use parity_graph::fault;

use crate::arithmetic::Hypothesis;
use crate::audit::{AuditRows, Finding, How, Labelled, Sight, Steps, Suspect, Tokens, audit, judge, order};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::compute;
use crate::error::Result;
use crate::faults::between::unlike;
use crate::faults::changed;
use crate::gguf::Gguf;
use crate::ops::bound::HEALTHY;
use crate::ops::{Args, Check, Rule};
use crate::report::sensitivity::{Injected, Node, SCHEMA, Sensitivity};

/// Rows from the start of the run that are looked at besides the sample: mistakes that take one row for
/// another show in rows that follow one another.
const ROWS_FIRST: u32 = 4;

/// The graphs of a recording with what it holds.
#[derive(Clone, Copy)]
pub struct Recorded<'a> {
    /// Its values.
    pub steps: &'a dyn Steps,
    /// By step.
    pub graphs: &'a [(usize, &'a Labelled)],
    /// The model.
    pub gguf: &'a Gguf,
}

/// Injects every mistake at every wanted node of a recording, one at a time, in the rows at `positions`. The
/// recorded output, moved by what the mistake changes in exact arithmetic, is judged as an audit judges it.
///
/// # Errors
/// Those of an audit.
pub fn measure(
    of: Recorded<'_>,
    positions: &[u32],
    wants: &dyn Fn(Checkpoint) -> bool,
    progress: &dyn Fn(usize, usize),
) -> Result<Sensitivity> {
    let Recorded { steps, graphs, gguf } = of;
    let last = graphs.iter().flat_map(|(step, _)| steps.positions(*step)).max().map_or(0, |last| last + 1);
    let mut positions = positions.to_vec();
    positions.extend(0..ROWS_FIRST.min(last));
    positions.sort_unstable();
    positions.dedup();
    let ids = order(graphs, wants);
    let measured: RefCell<HashMap<Checkpoint, IndexMap<usize, Measured>>> = RefCell::default();
    let look = |step: usize, id: Checkpoint, suspect: &Suspect<'_>| {
        let some: BTreeSet<usize> = steps
            .positions(step)
            .iter()
            .enumerate()
            .filter_map(|(token, position)| positions.binary_search(position).is_ok().then_some(token))
            .collect();
        let is_known = measured.borrow().get(&id).is_some_and(|steps| steps.contains_key(&step));
        if some.is_empty() || is_known || !suspect.held.is_healthy() {
            return;
        }
        if let Some(found) = Measured::of(suspect, &some, steps.positions(step).len()) {
            measured.borrow_mut().entry(id).or_default().insert(step, found);
            progress(measured.borrow().len(), ids.len());
        }
    };
    let how = How { rows: AuditRows::default(), wants, diagnose: None, look: Some(&look), only: None };
    let findings = audit(steps, graphs, gguf, &how)?;
    let measured = measured.into_inner();
    let nodes = ids.iter().map(|&id| match (findings.nodes.get(&id), measured.get(&id)) {
        (Some(finding), Some(steps)) if !finding.is_wrong() => node_of(id, finding, steps),
        (finding, _) => undecided(id, missing(finding)),
    });
    let nodes = nodes.collect();
    Ok(Sensitivity { schema: SCHEMA, positions, nodes })
}

/// What a node would have to have for anything to be injected.
fn missing(finding: Option<&Finding>) -> String {
    match finding {
        Some(finding) if finding.is_wrong() => "a healthy node: this one has a fault already".to_owned(),
        Some(Finding { judged: 0, undecided: Some(why), .. }) => why.clone(),
        Some(finding) if finding.judged > 0 => "an explanation".to_owned(),
        _ => "its own rows".to_owned(),
    }
}

fn undecided(id: Checkpoint, missing: String) -> Node {
    let undecided = Some(missing);
    Node { id, undecided, rounding: None, scale: None, injected: 0, faintest: None, unseen: Vec::new() }
}

/// What is seen of a node in any of its steps.
fn node_of(id: Checkpoint, finding: &Finding, steps: &IndexMap<usize, Measured>) -> Node {
    let mut node = Node { undecided: None, ..undecided(id, String::new()) };
    node.rounding = finding.band();
    // Where nodes before it were not recorded the worst case may be simulated: then no element is looked at alone.
    let scales = steps.values().map(|step| if step.crosses { f64::INFINITY } else { step.scale });
    let least = scales.fold(f64::INFINITY, f64::min).min(node.rounding.unwrap_or(f64::INFINITY));
    node.scale = Some(least).filter(|least| least.is_finite());
    let mut faults: IndexMap<&str, Option<f64>> = IndexMap::new();
    for (fault, found) in steps.values().flat_map(|step| &step.faults) {
        // What is larger than all that rounding explains is seen, also where the elements have no bound of their own.
        let of_whole = node.rounding.and_then(|band| Some(found.size? / band));
        let over = found.over.map(|over| of_whole.map_or(over, |whole| over.max(whole)));
        let known = faults.entry(fault).or_insert(over);
        *known = match (*known, over) {
            (Some(a), Some(b)) => Some(if b <= a { a } else { b }),
            (a, b) => a.or(b),
        };
    }
    node.injected = faults.len();
    for (fault, over_bound) in faults {
        let injected = Injected { fault: fault.to_owned(), over_bound };
        match over_bound {
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
    node
}

/// What is seen of a node in a step.
struct Measured {
    /// Whether nodes before it were not recorded.
    crosses: bool,
    /// The least factor less 1 that is seen.
    scale: f64,
    /// By mistake.
    faults: Vec<(String, Moved)>,
}

/// How a mistake moves what was recorded.
#[derive(Clone, Copy)]
struct Moved {
    /// The largest error over its bound; `None` where the rows do not decide it.
    over: Option<f64>,
    /// ‖change‖ / ‖exact‖, where nodes before it were not recorded.
    size: Option<f64>,
}

impl Measured {
    /// Of a node that is healthy: of products and attention only `some` of the tokens.
    fn of(suspect: &Suspect<'_>, some: &BTreeSet<usize>, tokens: usize) -> Option<Measured> {
        let rule = suspect.node.rule?;
        let crosses = suspect.sight.carried.iter().any(Option::is_some);
        let apart = Tokens::of(rule, suspect.args, suspect.recorded);
        let apart = apart.filter(|apart| !crosses && apart.count() == tokens && some.len() < tokens);
        let Some(apart) = apart else {
            return Measured::on(suspect, rule, suspect.args, suspect.recorded, suspect.sight);
        };
        let inner = apart.inner();
        let there: BTreeSet<usize> =
            some.iter().copied().filter(|token| (suspect.sight.looked_at)(token * inner)).collect();
        let recorded: Vec<f64> =
            there.iter().flat_map(|token| &suspect.recorded[token * inner..][..inner]).copied().collect();
        let sight = Sight { looked_at: &|_| true, carried: &[], row: Some(inner), norm: None };
        apart.with(&there, |args| Measured::on(suspect, rule, args, &recorded, &sight))
    }

    fn on(
        suspect: &Suspect<'_>,
        rule: &Rule,
        args: &Args<'_, f64>,
        recorded: &[f64],
        sight: &Sight<'_>,
    ) -> Option<Measured> {
        let held = |one: &Hypothesis| {
            let held = judge(rule, args, recorded, sight, &[*one]).ok()?;
            held.is_healthy().then_some((*one, held))
        };
        let (one, own) = suspect.tried.iter().find_map(held)?;
        let args = &Args { arithmetic: &one.arithmetic, sources: args.sources.clone(), ..*args };
        let exact = compute::<f64>(rule, args).ok()?;
        let over = |values: &[f64], tried: &[Hypothesis]| {
            let moved = match rule.check {
                Check::Choice(_) => values.to_vec(),
                _ => moved(recorded, &exact, values),
            };
            judge(rule, args, &moved, sight, tried).ok().map(|held| held.over)
        };
        let twice: Vec<f64> = exact.iter().map(|x| 2.0 * x).collect();
        let crosses = sight.carried.iter().any(Option::is_some);
        let size = |values: &[f64]| {
            let squares = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
                values.iter().zip(&exact).map(|(value, exact)| of(*value, *exact).powi(2)).sum()
            };
            crosses.then(|| (squares(&|value, exact| value - exact) / squares(&|_, exact| exact)).sqrt())
        };
        let mut faults: Vec<(String, Moved)> = Vec::new();
        let graph = &suspect.node.program.graph;
        for mistake in fault::at(graph, suspect.node.id) {
            // A node may have several of one name: the first is what is injected where nothing else is said.
            if faults.iter().any(|(name, _)| name == mistake.name) {
                continue;
            }
            let values = changed(suspect, args, &mistake.rewrite.change);
            let values = values.filter(|values| values.len() == exact.len());
            let moved = Moved {
                over: values.as_ref().and_then(|values| over(values, suspect.tried)),
                size: values.as_ref().and_then(|values| size(values)),
            };
            faults.push((mistake.name.to_owned(), moved));
        }
        for (mistake, over) in unlike(suspect) {
            if !faults.iter().any(|(name, _)| name == mistake.name) {
                faults.push((mistake.name.to_owned(), Moved { over: Some(over), size: None }));
            }
        }
        let scale = match own.squares[2] {
            // Nothing is rounded: every bit counts.
            0.0 => 0.0,
            _ => over(&twice, &[one]).map_or(f64::INFINITY, |over| 1.0 / over),
        };
        Some(Measured { crosses, scale, faults })
    }
}

/// What is recorded where a mistake makes `wrong` of what is `exact`.
fn moved(recorded: &[f64], exact: &[f64], wrong: &[f64]) -> Vec<f64> {
    let one = |((recorded, exact), wrong): ((&f64, &f64), &f64)| match wrong == exact {
        true => *recorded,
        false => recorded + (wrong - exact),
    };
    recorded.iter().zip(exact).zip(wrong).map(one).collect()
}
