//! What rounding carries from the tokens to a node with nothing recorded in between: simulated.
//!
//! The graph is executed from the tokens once exactly, and once for each side with every node's result disturbed at random
//! by what that side's arithmetic rounds (see `simulate.rs`). How far the disturbed passes are from the exact one is what
//! rounding carries up to there.

use std::collections::{HashMap, HashSet};

use indexmap::{IndexMap, IndexSet};
use parity_graph::{Id, Op};

use super::aside::Aside;
use super::finding::SHARP;
use super::simulate::{Disturbed, Rows, Run};
use super::{Labelled, Steps, Tensor, attentions, hypotheses, lost_steps};
use crate::arithmetic::backend::Backend;
use crate::arithmetic::{Arithmetic, Flash, Narrow, OfAttention, Scaled, Weights};
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::{Numerics, Products, Storage};
use crate::ops::Args;
use crate::ops::bound::CONFIDENCE;

/// What rounding carries up to a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Carried {
    /// The candidate against the exact forward pass; `None` where it has none of the simulated rows.
    pub candidate: Option<OwnDistance>,
    /// How far rounding explains the two sides to be apart, relative to the exact pass.
    pub apart: f64,
    /// Root mean square of the exact values.
    pub size: f64,
}

/// How far a recording is from the exact forward pass, at the row where that exceeds rounding most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnDistance {
    /// ‖recorded - exact‖ / ‖exact‖
    pub distance: f64,
    /// What rounding explains of it.
    pub band: f64,
    /// The first over the second.
    pub over: f64,
}

impl Carried {
    /// What is not seen: the band of whatever is judged most sharply.
    pub fn band(&self) -> f64 {
        self.candidate.map_or(self.apart, |own| own.band)
    }

    /// Whether mistakes would show.
    pub fn is_sharp(&self) -> bool {
        self.band() <= SHARP
    }
}

/// What rounding carries from the tokens of a candidate to each of `ids`, over all rows that its graphs compute of them.
///
/// `steps` is the candidate with the inputs of its `graphs` (`Graphs::judged`): of what it recorded nothing but these
/// rows is looked at, as the candidate's distance from the exact pass. `sides` is the arithmetic of candidate and
/// reference, or of the candidate alone. An id whose inputs are not known, and attention matrices, are left out.
///
/// # Errors
/// Those of the machine.
pub fn carried(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    sides: &[Numerics],
    ids: &HashSet<Checkpoint>,
) -> Result<HashMap<Checkpoint, Carried>> {
    let different: IndexSet<Numerics> = sides.iter().copied().collect();
    let passes: Vec<Option<Numerics>> =
        std::iter::once(None).chain(different.iter().copied().map(Some)).collect();
    let mut rows: IndexMap<(Checkpoint, u32), Row> = IndexMap::new();
    simulated(steps, graphs, gguf, &passes, ids, &mut |row| {
        let known = rows.entry((row.id, row.position)).or_insert_with(|| Row {
            distance: row.recorded.as_deref().map(|recorded| apart(recorded, row.values)),
            spreads: Vec::new(),
            square: row.values.iter().map(|x| x * x).sum(),
            width: row.values.len(),
        });
        known.spreads.extend(row.exact.map(|exact| apart(row.values, exact)));
    })?;
    let mut found: HashMap<Checkpoint, Vec<Row>> = HashMap::new();
    for ((id, _), row) in rows.into_iter().filter(|(_, row)| row.spreads.len() == different.len()) {
        let spread = |side: &Numerics| row.spreads.get(different.get_index_of(side)?).copied();
        let spreads = sides.iter().filter_map(spread).collect();
        found.entry(id).or_default().push(Row { spreads, ..row });
    }
    Ok(found.iter().map(|(id, rows)| (*id, weigh(rows))).collect())
}

/// One row of a node in one pass.
pub struct Simulated<'a> {
    /// Which node.
    pub id: Checkpoint,
    /// Of which token.
    pub position: u32,
    /// As it was recorded, where it was.
    pub recorded: Option<Vec<f64>>,
    /// What the pass comes to.
    pub values: &'a [f64],
    /// What the first pass does; `None` of that itself.
    pub exact: Option<&'a [f64]>,
}

/// Executes graphs from the tokens, once for each of `passes`: exactly, or disturbed as an arithmetic rounds; `see` is
/// shown every row of the nodes `ids`, pass by pass. All passes go step by step, so that no more than the rows of one pass
/// and of one step are in memory.
///
/// # Errors
/// Those of the machine.
pub fn simulated(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    passes: &[Option<Numerics>],
    ids: &HashSet<Checkpoint>,
    see: &mut dyn FnMut(Simulated<'_>),
) -> Result<()> {
    let machine = |_: &Option<Numerics>| Machine::<f64>::new(gguf, Arithmetic::EXACT).rounding(false);
    let mut machines: Vec<Machine<'_, f64>> = passes.iter().map(machine).collect();
    for &(step, labelled) in graphs {
        let Some((last, _)) = labelled.nodes().filter(|(_, id)| ids.contains(id)).last() else { continue };
        let lost = &lost_steps::before(steps, step)[..];
        let mut first: HashMap<Checkpoint, Found> = HashMap::new();
        for (number, (machine, numerics)) in machines.iter_mut().zip(passes).enumerate() {
            let (aside, open, mut rows) = (Aside::default(), IndexSet::new(), Rows::new());
            let how = numerics.map_or(Run::Exact, |_| Run::Disturbed(number as u64));
            let (arithmetic, aside, open, rows) = (Arithmetic::EXACT, &aside, &open, &mut rows);
            let (mix, copies, bounds) = (None, None, None);
            let disturbed = Disturbed {
                step,
                steps,
                labelled,
                lost,
                arithmetic,
                mix,
                copies,
                how,
                aside,
                bounds,
                open,
                rows,
            };
            let (first, is_first) = (&mut first, number == 0);
            let mut watch = Watch { disturbed, numerics: *numerics, ids, first, is_first, see };
            machine.step_until(&labelled.program, last, &|id| labelled.input(steps, step, id), &mut watch)?;
        }
    }
    Ok(())
}

/// A node's values in the order of a dump, row by row.
struct Found {
    id: Checkpoint,
    positions: Vec<u32>,
    values: Vec<f64>,
}

/// Goes on with disturbed values, and shows the rows that are asked for.
struct Watch<'a> {
    disturbed: Disturbed<'a>,
    numerics: Option<Numerics>,
    ids: &'a HashSet<Checkpoint>,
    /// What the first pass came to in this step.
    first: &'a mut HashMap<Checkpoint, Found>,
    is_first: bool,
    see: &'a mut dyn FnMut(Simulated<'_>),
}

impl Watch<'_> {
    /// Shows the rows of a node; of another pass than the first those that the first has.
    fn show(&mut self, found: Found) {
        let Disturbed { steps, step, .. } = self.disturbed;
        let first = self.first.get(&found.id);
        let recorded = steps.tensor(step, found.id).filter(|_| self.is_first);
        let width = found.values.len() / found.positions.len().max(1);
        for (number, &position) in found.positions.iter().enumerate() {
            let row = number * width..(number + 1) * width;
            let recorded = recorded.as_ref().and_then(|tensor| {
                let at = tensor.positions.iter().position(|known| *known == position)?;
                let values = tensor.values.get(at * width..)?.get(..width)?;
                Some(values.iter().map(|&x| f64::from(x)).collect())
            });
            let exact = first.and_then(|first| first.values.get(row.clone()));
            if self.is_first || exact.is_some() {
                (self.see)(Simulated { id: found.id, position, recorded, values: &found.values[row], exact });
            }
        }
        if self.is_first {
            self.first.insert(found.id, found);
        }
    }
}

impl Conductor<f64> for Watch<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let Disturbed { lost, steps, step, labelled, .. } = self.disturbed;
        let lost = lost_steps::read_by(lost, (steps, step), labelled, node.id);
        let args = lost.as_ref().map_or(args, Err);
        let id = labelled.labels.get(node.id).copied().flatten();
        if let (Some(numerics), Ok(args)) = (&self.numerics, args) {
            self.disturbed.arithmetic = arithmetic(numerics, id, &node.program.graph.get(node.id).op, args);
        }
        let own = self.disturbed.own(node, args, id.is_some());
        if let (Some(id), Ok(values)) = (id.filter(|id| self.ids.contains(id)), &own)
            && let Some(found) = rows((steps, step), labelled, (node.id, id), values)
        {
            self.show(found);
        }
        Ok(own.map(Into::into))
    }
}

/// The values of a node in the order of a dump; `None` of a matrix, and of what has no token rows.
fn rows(
    (steps, step): (&dyn Steps, usize),
    labelled: &Labelled,
    (node, id): (Id, Checkpoint),
    values: &[f64],
) -> Option<Found> {
    if id.kind().is_optional() {
        return None;
    }
    let positions = steps.positions(step);
    // Logits may be of the last tokens alone.
    let axis = labelled.axes.get(node).copied().flatten();
    let count = axis.map_or(positions.len(), |axis| labelled.program.graph.get(node).shape()[axis]);
    let recorded = steps.tensor(step, id).map(|tensor| tensor.positions);
    let last = || positions[positions.len().saturating_sub(count)..].to_vec();
    let positions = recorded.filter(|recorded| recorded.len() == count).unwrap_or_else(last);
    let shape = vec![positions.len(), values.len() / positions.len().max(1)];
    let like = Tensor { shape, positions, values: vec![0.0; values.len()] };
    let values = labelled.arrange(node, id, &like)?.of_rows(values);
    Some(Found { id, positions: like.positions, values })
}

/// What a producer that declares `numerics` computes a node in.
fn arithmetic(numerics: &Numerics, id: Option<Checkpoint>, op: &Op, args: &Args<'_, f64>) -> Arithmetic {
    let usual =
        |backend| hypotheses(op, backend, args).first().map_or(Arithmetic::EXACT, |one| one.arithmetic);
    let one = match numerics.products {
        Products::F32 | Products::F64 => Arithmetic::EXACT,
        Products::F16 => attentions::attention(Narrow::F16),
        Products::Bf16 => attentions::attention(Narrow::Bf16),
        Products::LlamaCpu | Products::LlamaCuda | Products::LlamaVulkan => {
            usual(Backend::declared(numerics.products))
        }
    };
    let is_llama =
        matches!(numerics.products, Products::LlamaCpu | Products::LlamaCuda | Products::LlamaVulkan);
    // Attention in two products rounds both operands to the type of the cache; in one it has no cache of f32.
    let rounded = |kept| Flash::Rounded(kept, OfAttention::all(Weights::Divided), Scaled::Scores);
    let (flash, cache) = match (is_llama, numerics.flash, numerics.kv) {
        (true, false, Storage::F32) => (Flash::Exact, numerics.kv),
        (true, false, Storage::F16) => (rounded(Narrow::F16), numerics.kv),
        (true, false, Storage::Bf16) => (rounded(Narrow::Bf16), numerics.kv),
        (true, true, Storage::F32) => (one.flash, Storage::F16),
        _ => (one.flash, numerics.kv),
    };
    let kept = numerics.storage_of(id.map_or(Kind::Embed, Checkpoint::kind));
    Arithmetic { flash, cache, narrow: kept, ..one }
}

/// What the passes say of one row.
struct Row {
    /// How far the recorded row is from the exact one; `None` where it was not recorded.
    distance: Option<f64>,
    /// How far the disturbed one of each side is.
    spreads: Vec<f64>,
    /// Sum of the squares of the exact values.
    square: f64,
    width: usize,
}

/// What the passes say of one checkpoint.
fn weigh(rows: &[Row]) -> Carried {
    let spread = |row: &Row| row.spreads.first().copied().unwrap_or(0.0);
    let mean = (rows.iter().map(|row| spread(row).powi(2)).sum::<f64>() / rows.len().max(1) as f64).sqrt();
    let sides = rows.iter().map(|row| row.spreads.len()).max().unwrap_or(0);
    let largest = |side: usize| rows.iter().fold(0.0f64, |max, row| max.max(row.spreads[side]));
    let apart_squared: f64 = (0..sides).map(|side| largest(side).powi(2)).sum();
    let mut own: Option<OwnDistance> = None;
    for (row, distance) in rows.iter().filter_map(|row| Some((row, row.distance?))) {
        let band = CONFIDENCE * spread(row).max(mean);
        let over = if distance == 0.0 { 0.0 } else { distance / band };
        // A NaN is the worst, and stays it.
        if own.is_none_or(|worst| !worst.over.is_nan() && !(over <= worst.over)) {
            own = Some(OwnDistance { distance, band, over });
        }
    }
    let values: usize = rows.iter().map(|row| row.width).sum();
    let size = (rows.iter().map(|row| row.square).sum::<f64>() / values.max(1) as f64).sqrt();
    Carried { candidate: own, apart: CONFIDENCE * apart_squared.sqrt(), size }
}

/// ‖a - b‖ / ‖b‖; NaN where the rows are not of one width.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    if a.len() != b.len() || a.is_empty() {
        return f64::NAN;
    }
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = square(&mut a.iter().zip(b).map(|(a, b)| a - b));
    if difference == 0.0 { 0.0 } else { difference / square(&mut b.iter().copied()) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::super::Prompt;
    use super::*;

    const TOKENS: [u32; 6] = [3, 9, 27, 81, 243, 5];

    /// A prompt of which some rows of the logits were recorded.
    struct Said(Prompt, BTreeMap<u32, Vec<f32>>);

    impl Steps for Said {
        fn tensor(&self, step: usize, id: Checkpoint) -> Option<Tensor> {
            let positions: Vec<u32> =
                self.positions(step).into_iter().filter(|p| self.1.contains_key(p)).collect();
            let values: Vec<f32> = positions.iter().flat_map(|position| self.1[position].clone()).collect();
            let shape = vec![positions.len(), values.len() / positions.len().max(1)];
            (id.kind() == Kind::Logits).then_some(Tensor { shape, positions, values })
        }

        fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
            self.0.leaf(step, name)
        }

        fn positions(&self, step: usize) -> Vec<u32> {
            self.0.positions(step)
        }

        fn is_own_graph(&self) -> bool {
            false
        }
    }

    /// What is carried to logits that are exact but for a factor, for a producer of this arithmetic.
    fn found(factor: f64, numerics: &str) -> Carried {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models/qwen2-tiny-py-F16.gguf");
        let gguf = Gguf::open(&path).unwrap();
        let ids = HashSet::from([Checkpoint::global(Kind::Logits)]);
        let mut said = Said(Prompt::new(&gguf, &TOKENS, true, 2).unwrap(), BTreeMap::new());
        let mut rows = BTreeMap::new();
        simulated(&said.0, &said.0.steps(), &gguf, &[None], &ids, &mut |row| {
            assert!(row.recorded.is_none());
            rows.insert(row.position, row.values.iter().map(|x| (factor * x) as f32).collect());
        })
        .unwrap();
        assert_eq!(rows.keys().copied().collect::<Vec<u32>>(), [2, 3, 4, 5], "logits of the rows asked for");
        said.1 = rows;
        let sides = [numerics.parse().unwrap(), Numerics::default()];
        carried(&said, &said.0.steps(), &gguf, &sides, &ids).unwrap()[&Checkpoint::global(Kind::Logits)]
    }

    #[test]
    fn what_rounding_carries_is_as_wide_as_the_arithmetic_is_coarse() {
        let single = found(1.0, "f32");
        assert!(single.is_sharp() && single.candidate.unwrap().over < 1.0, "{single:?}");
        let half = found(1.0, "f16");
        assert!(half.band() > 20.0 * single.band() && half.apart > single.apart, "{half:?} {single:?}");
        assert!(found(1.0, "llama-cpu kv=f16 flash=on").band() > single.band());
    }

    #[test]
    fn more_than_that_is_beyond() {
        assert!(!(found(1.001, "f32").candidate.unwrap().over <= 1.0));
        assert!(!(found(f64::NAN, "f32").candidate.unwrap().over <= 1.0), "a NaN never passes");
    }
}
