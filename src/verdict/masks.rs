//! Whether attention saw what it should, and the same on both sides. A mask is an input, which no node computes: one that
//! is wrong leaves all nodes healthy.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::wiring::{Differs, accuse, refute};
use super::{cells, rollbacks};
use crate::dump::{Graphs, inputs};
use crate::gguf::Gguf;
use crate::model::builders::{self, Built, Shape};
use crate::model::diff::{self, Aspect, Name, Whose};
use crate::report::Report;
use parity_dump::Dump;
use parity_graph::{Graph, Id, Op, label};

const UNSETTLED: &str = "; each side computed as its own mask says, and nothing settles which is right";

/// What a step's masks show, and where it keeps keys and values.
struct Seen {
    /// Tokens' positions.
    positions: Vec<u32>,
    /// By the name of the input that says it: the cells of the tokens.
    cells: BTreeMap<String, Vec<f64>>,
    /// Each attention with the cells that it sees of each token.
    attentions: Vec<(Name, Vec<Vec<usize>>)>,
}

/// Attentions of a graph, each with its mask.
type Masks = Vec<(Name, Id)>;

/// The masks of graphs, each of which serves many steps.
#[derive(Default)]
struct Known {
    /// By the number of a recorded one.
    recorded: RefCell<BTreeMap<usize, Masks>>,
    /// Of the last one that was built.
    built: RefCell<Option<(Built, Masks)>>,
}

impl Seen {
    fn of(
        graph: &Graph,
        masks: &[(Name, Id)],
        positions: &[u32],
        values: &dyn Fn(&str) -> Option<Vec<f64>>,
    ) -> Seen {
        let (names, tokens) = (label::leaf_names(graph), positions.len());
        let named = |id: Id| names[id].as_deref();
        let cells = |id: Id| {
            let name = named(graph.origin(graph.src(id, 1)?))?;
            Some((name.to_owned(), values(name).filter(|cells| cells.len() == tokens)?))
        };
        let rows = |mask: Id| {
            let values = values(named(mask)?)?;
            let row = |row: &[f64]| (0..row.len()).filter(|&cell| row[cell] != f64::NEG_INFINITY).collect();
            let rows: Vec<Vec<usize>> =
                values.chunks(graph.get(mask).ne[0].max(1)).take(tokens).map(row).collect();
            (rows.len() == tokens).then_some(rows)
        };
        let writes = graph.computed().filter(|&id| graph.get(id).op == Op::SetRows);
        let seen = |(name, mask): &(Name, Id)| Some((name.clone(), rows(*mask)?));
        Seen {
            positions: positions.to_vec(),
            cells: writes.filter_map(cells).collect(),
            attentions: masks.iter().filter_map(seen).collect(),
        }
    }

    /// Of a recorded step.
    fn recorded(dump: &Dump, graphs: &Graphs, number: usize, known: &Known) -> Option<Seen> {
        let graph = graphs.of_step(number)?;
        let positions = &dump.manifest().steps.get(number)?.positions;
        let values = |name: &str| inputs::numbers(dump.leaf(number, name)?);
        let mut known = known.recorded.borrow_mut();
        let masks = known.entry(graphs.index_of_step(number)?).or_insert_with(|| diff::masks(graph));
        Some(Seen::of(graph, masks, positions, &values))
    }

    /// Of the same step as the model file has it.
    fn built(dump: &Dump, graphs: &Graphs, number: usize, gguf: &Gguf, known: &Known) -> Option<Seen> {
        let (manifest, graph) = (dump.manifest(), graphs.of_step(number)?);
        let positions = &manifest.steps.get(number)?.positions;
        // Of several sequences the file alone does not say what is seen.
        let first = *positions.first().filter(|_| !manifest.is_numbered())? as usize;
        let tokens = manifest.tokens.get(first..first + positions.len())?;
        let (shape, mut known) = (Shape::of(graph), known.built.borrow_mut());
        if known.as_ref().is_none_or(|(built, _)| built.shape != shape) {
            let built = builders::build(gguf, shape).ok()?;
            let masks = diff::masks(&built.graph);
            *known = Some((built, masks));
        }
        let (built, masks) = known.as_ref()?;
        let given = builders::inputs(built, tokens, first).ok()?;
        let values = |name: &str| given.get(name.split('#').next()?).cloned();
        Some(Seen::of(&built.graph, masks, positions, &values))
    }

    /// What the first attention that sees other cells than in another step sees, and what it does there; `None` in the
    /// outer place where the two are not the same step in the same cells.
    fn differs(&self, other: &Seen) -> Option<Option<(Name, u32, [String; 2])>> {
        if self.positions != other.positions || self.cells.is_empty() || self.cells != other.cells {
            return None;
        }
        let of = |(name, rows): &(Name, Vec<Vec<usize>>)| {
            let (_, others) = other.attentions.iter().find(|(other, _)| other == name)?;
            let row = (0..rows.len()).find(|&row| rows[row] != others[row])?;
            Some((name.clone(), self.positions[row], [spell(&rows[row]), spell(&others[row])]))
        };
        Some(self.attentions.iter().find_map(of))
    }
}

/// The first step in which two recordings see other cells, as long as all before are the same.
fn first(steps: usize, sides: [&dyn Fn(usize) -> Option<Seen>; 2], whose: [Whose; 2]) -> Option<Differs> {
    for step in 0..steps {
        if let Some((node, position, [one, other])) = sides[0](step)?.differs(&sides[1](step)?)? {
            let has = vec![(whose[0], Some(one)), (whose[1], Some(other))];
            return Some(Differs { node, aspect: Aspect::Mask(position), has });
        }
    }
    None
}

/// Compares what attention sees in recordings with what the model file says, where there is a builder for it, and with
/// each other: the first that sees other cells is the divergence.
pub fn weigh_masks(report: &mut Report, sides: &[(Whose, &Dump)], gguf: Option<&Gguf>) {
    let read = |(whose, dump): &(Whose, &'_ Dump)| Some((*whose, Graphs::read(dump).ok()?));
    let graphs: Vec<(Whose, Graphs)> = sides.iter().filter_map(read).collect();
    if graphs.len() < sides.len() {
        return;
    }
    let each = || sides.iter().zip(&graphs).map(|((whose, dump), (_, graphs))| (*whose, *dump, graphs));
    for (whose, dump, graphs) in each() {
        let Some(gguf) = gguf else { break };
        let known = Known::default();
        let own = |step| Seen::recorded(dump, graphs, step, &known);
        let file = |step| Seen::built(dump, graphs, step, gguf, &known);
        let by_file = || first(dump.manifest().steps.len(), [&own, &file], [whose, Whose::File]);
        let by_life = || rollbacks::first(dump, graphs, whose);
        match cells::first(dump, graphs, gguf, whose).or_else(by_life).or_else(by_file) {
            Some(differs) if whose == Whose::Reference => return refute(report, &differs),
            Some(differs) => return accuse(report, &differs, ""),
            None => {}
        }
    }
    let [(one, ours, of_ours), (other, theirs, of_theirs)] = each().collect::<Vec<_>>()[..] else { return };
    let steps = ours.manifest().steps.len().min(theirs.manifest().steps.len());
    let known = [Known::default(), Known::default()];
    let own = |step| Seen::recorded(ours, of_ours, step, &known[0]);
    let its = |step| Seen::recorded(theirs, of_theirs, step, &known[1]);
    if let Some(differs) = first(steps, [&own, &its], [one, other]) {
        accuse(report, &differs, UNSETTLED);
    }
}

/// Cells in words.
pub(super) fn spell(cells: &[usize]) -> String {
    let runs: Vec<String> = cells
        .chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [one] => one.to_string(),
            _ => format!("{}..{}", run[0], run[run.len() - 1] + 1),
        })
        .collect();
    if runs.is_empty() { "no cell".to_owned() } else { format!("cells {}", runs.join(", ")) }
}
