//! What explains each simulated node best, of all arithmetics that were tried, and which of them are the engine's.

use indexmap::{IndexMap, IndexSet};

use super::Steps;
use super::finding::most;
use super::passes::{APART, BARELY, NEAR};
use super::simulate::{Rows, SCATTER};
use crate::checkpoint::{Checkpoint, Kind};
use crate::numerics::Storage;
use crate::ops::bound::{HEALTHY, UNIT_F32};

/// What a simulation says of one recorded node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simulated {
    /// Distance of what was recorded from exact arithmetic, relative.
    pub distance: f64,
    /// What rounding explains of it.
    pub band: f64,
    /// The largest distance of a row over what rounding explains there; NaN where a value is no number.
    pub over: f64,
    /// Position of that row.
    pub position: u32,
    /// How many rows are further off than rounding explains there, of all.
    pub beyond: f64,
    /// The same of the steps after the first alone, and their distance from exact arithmetic, relative.
    pub later_beyond: f64,
    pub later_distance: f64,
    /// The largest distance of a row of the first step, as in `over`.
    pub over_in_prompt: f64,
    /// Whether rows of position 0 all are, if any was recorded.
    pub first_beyond: bool,
    /// Distance of the row in the middle of all, relative: a mistake in a few rows does not move it.
    pub usual: f64,
    /// Whether rounding explains most rows where it does not explain all.
    pub explains_most: bool,
    /// Unit roundoff of the type that values were taken to be kept in.
    pub unit: f64,
    /// What keys and values were taken to be cached as, where it is not the type of other values, or what the operands of some
    /// products were taken to be rounded to.
    pub named: Option<&'static str>,
    /// Whether the recording declares that.
    pub declares_cache: bool,
    /// Whether the arithmetic is known: it is f32, the recording declares it or its values show it, or it explains most of
    /// several nodes.
    pub known: bool,
    /// Whether nothing is rounded but to f32.
    pub is_plain: bool,
}

impl Simulated {
    /// One node over all its rows, of an arithmetic of f32.
    pub fn of(steps: &dyn Steps, id: Checkpoint, exact: &Rows, runs: &[&Rows]) -> Option<Simulated> {
        let rows = rows_of(steps, id, exact, runs)?;
        let total = |of: fn(&Row) -> f64| rows.iter().map(|row| of(row).powi(2)).sum::<f64>().sqrt();
        let size = total(|row| row.size);
        let (distance, spread) = (total(|row| row.distance) / size, total(|row| row.spread) / size);
        let over = |row: &Row| row.distance / (SCATTER * row.spread.max(spread * row.size));
        let is_beyond = |row: &Row| !(over(row) <= HEALTHY);
        let worst = rows.iter().max_by(|a, b| over(a).total_cmp(&over(b)))?;
        let band = SCATTER * spread;
        let count = |rows: &[&Row]| rows.iter().filter(|row| is_beyond(row)).count() as f64;
        let (prompt, later): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.step == 0);
        let (beyond, later_beyond) = (count(&prompt) + count(&later), count(&later) / later.len() as f64);
        let beyond = beyond / rows.len() as f64;
        let squares = |of: fn(&Row) -> f64| later.iter().map(|row| of(row).powi(2)).sum::<f64>();
        let later_distance = (squares(|row| row.distance) / squares(|row| row.size)).sqrt();
        let over_in_prompt = prompt.into_iter().map(over).max_by(f64::total_cmp).unwrap_or(0.0);
        let first_beyond = rows.iter().filter(|row| row.position == 0).all(is_beyond);
        let mut apart: Vec<f64> = rows.iter().map(|row| row.distance / row.size).collect();
        apart.sort_by(f64::total_cmp);
        let (usual, explains_most) = (apart[apart.len() / 2], explains_most(&rows, &is_beyond));
        let (over, position, unit) = (over(worst), worst.position, UNIT_F32);
        Some(Simulated {
            distance,
            band,
            over,
            position,
            beyond,
            later_beyond,
            later_distance,
            over_in_prompt,
            first_beyond,
            usual,
            explains_most,
            unit,
            named: None,
            declares_cache: false,
            known: true,
            is_plain: true,
        })
    }

    /// Whether it is no further off than so many times what rounding explains.
    pub fn is_within(&self, times: f64) -> bool {
        self.over <= times * HEALTHY
    }

    /// Whether rounding explains it.
    pub fn is_explained(&self) -> bool {
        self.is_within(1.0)
    }

    /// Whether the roundings of an engine that keeps values in such a type hide in most rows what others, be it in eight bits, show.
    pub fn is_hidden_in(&self, kept: Storage) -> bool {
        kept != Storage::F32 && self.is_within(NEAR)
    }

    /// The same where a row may be so many `times` further off than the furthest execution, and that much be rounding then: a
    /// value that falls to the next number of a narrow type in none of them.
    pub fn widened(self, times: f64) -> Simulated {
        match !self.is_explained() && self.is_within(times) {
            true => Simulated { band: self.band * self.over / HEALTHY, over: HEALTHY, ..self },
            false => self,
        }
    }

    /// How much of the node may be rounding, so that mistakes still show.
    pub fn most(&self) -> f64 {
        most(if self.known { self.unit } else { UNIT_F32 }, self.declares_cache)
    }
}

/// One row of a node.
struct Row {
    step: usize,
    position: u32,
    /// How far it is from what an arithmetic computes, and the largest distance of the disturbed executions from that.
    distance: f64,
    spread: f64,
    size: f64,
}

/// All recorded rows of a node; `None` where one was not executed.
fn rows_of(steps: &dyn Steps, id: Checkpoint, exact: &Rows, runs: &[&Rows]) -> Option<Vec<Row>> {
    let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    let mut rows = Vec::new();
    for ((step, _), exact) in exact.iter().filter(|((_, known), _)| *known == id) {
        let (step, recorded) = (*step, steps.tensor(*step, id)?);
        let width = exact.len().checked_div(recorded.positions.len()).filter(|width| *width > 0)?;
        for (row, (&position, exact)) in recorded.positions.iter().zip(exact.chunks(width)).enumerate() {
            let here = row * width..(row + 1) * width;
            let values: Vec<f64> = recorded.values[here.clone()].iter().map(|x| f64::from(*x)).collect();
            let spread = runs.iter().map(|run| Some(apart(&run.get(&(step, id))?[here.clone()], exact)));
            let spread = spread.collect::<Option<Vec<f64>>>()?.into_iter().fold(0.0, f64::max);
            let size = apart(exact, &vec![0.0; width]);
            rows.push(Row { step, position, distance: apart(&values, exact), spread, size });
        }
    }
    Some(rows)
}

/// Of single rows of steps, which an engine may compute otherwise from step to step as others come and go beside them, how many
/// must be explained for each that is not.
const SINGLE: usize = 4;

/// Whether rounding explains most rows of every step in which some are beyond it, or of all steps of one row together. An engine
/// computes the rows of a step alike: what moves some of them and leaves the others where f32 rounds them is none of its
/// arithmetics. The first token attends to itself alone, in whatever arithmetic.
fn explains_most(rows: &[Row], is_beyond: &dyn Fn(&Row) -> bool) -> bool {
    let mut counts: IndexMap<usize, [usize; 2]> = IndexMap::new();
    for row in rows.iter().filter(|row| row.position > 0) {
        counts.entry(row.step).or_default()[usize::from(is_beyond(row))] += 1;
    }
    let (single, several): (Vec<_>, Vec<_>) =
        counts.into_values().partition(|[explained, beyond]| explained + beyond == 1);
    let [explained, beyond] = single.into_iter().fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
    explained >= SINGLE * beyond
        && several.iter().all(|[explained, beyond]| *beyond == 0 || explained > beyond)
}

/// Whether it does, and is so little that mistakes show.
fn is_settled(found: &Simulated) -> bool {
    found.is_explained() && found.band <= found.most()
}

/// How many times more an arithmetic leaves of a node than the engine's own, where it is another one.
pub const NEARER: f64 = 4.0;

/// What explains each node best, of all that was tried.
#[derive(Default)]
pub struct Best {
    /// By node.
    pub nodes: IndexMap<Checkpoint, Simulated>,
    /// What each arithmetic of f32 says of the nodes that it was tried on.
    of_f32: Vec<IndexMap<Checkpoint, Simulated>>,
}

impl Best {
    /// Whether rounding explains a node by something, and by so little that mistakes show.
    pub fn is_settled(&self, id: &Checkpoint) -> bool {
        self.nodes.get(id).is_some_and(is_settled)
    }

    /// Whether an arithmetic may still be the engine's that is so far from the usual row of a node: one that explains it leaves
    /// no more than another that rounds as the engine does not.
    pub fn may_be(&self, id: &Checkpoint, usual: f64) -> bool {
        let known = self.nodes.get(id).filter(|known| known.explains_most);
        known.is_none_or(|known| usual <= NEARER * known.usual)
    }

    /// Whether an arithmetic of f32 explains most of so many nodes.
    pub fn explains_most_in_f32(&self, all: usize) -> bool {
        self.of_f32.iter().any(|found| 2 * found.values().filter(|found| found.is_explained()).count() > all)
    }

    /// Takes what another arithmetic says where that is better.
    pub fn take(&mut self, all: IndexMap<Checkpoint, Simulated>) {
        for (&id, &found) in &all {
            // The first that explains it and hides nothing, otherwise the one that comes nearest.
            let better = |known: &Simulated| match (found.is_explained(), known.is_explained()) {
                // What comes much nearer is, and what may turn out to be the engine's is kept for that.
                (true, true) if NEARER * found.usual <= known.usual => true,
                (true, true) => !is_settled(known) && (is_settled(&found) || known.known && !found.known),
                (true, false) => !known.explains_most || found.usual <= NEARER * known.usual,
                (false, false) if found.explains_most != known.explains_most => found.explains_most,
                (false, false) => !(found.over >= known.over),
                (false, true) => false,
            };
            if self.nodes.get(&id).is_none_or(better) {
                self.nodes.insert(id, found);
            }
        }
        self.of_f32.extend(Some(all).filter(|all| all.values().all(|found| found.unit <= UNIT_F32)));
    }

    /// Settles what is explained by an arithmetic alone that nobody declared, coarser than f32. Where an arithmetic of f32
    /// explains most nodes, one that lies far from them is a mistake; where the coarse one explains most of several, and is
    /// nearer to them than f32, it is the engine's: another rounds what the engine does not, and is further off for that.
    pub fn settle(&mut self) {
        let explained = |all: &IndexMap<Checkpoint, Simulated>| -> Vec<Simulated> {
            all.values().copied().filter(Simulated::is_explained).collect()
        };
        let sharpest = self.of_f32.iter().max_by_key(|all| explained(all).len());
        let (healthy, furthest) = sharpest.map_or((0, 0.0), |all| {
            let healthy = explained(all);
            (healthy.len(), healthy.iter().map(|found| found.over).fold(0.0, f64::max))
        });
        let coarse = self.nodes.values().filter(|found| is_of_unknown(found)).count();
        let in_f32 = |id: &Checkpoint| sharpest.and_then(|all| all.get(id));
        let is_nearer = |(id, found): (&Checkpoint, &Simulated)| {
            let mut of_f32 = self.of_f32.iter().filter_map(|all| all.get(id));
            of_f32.all(|in_f32| found.usual < in_f32.usual)
        };
        let unknown = || self.nodes.iter().filter(|(_, found)| is_of_unknown(found));
        let undeclared: IndexSet<Checkpoint> = unknown().map(|(id, _)| *id).collect();
        let are_nearer = 2 * unknown().filter(|one| is_nearer(*one)).count() > coarse;
        for (id, found) in self.nodes.iter_mut().filter(|(_, found)| is_of_unknown(found)) {
            match in_f32(id).filter(|_| coarse < healthy) {
                Some(in_f32) if !(in_f32.over <= APART * furthest) => *found = *in_f32,
                // As all others, and but for what rounds in it.
                Some(in_f32) if in_f32.is_explained() => found.known = healthy > 1,
                _ => found.known = coarse > 1 && coarse >= healthy && are_nearer,
            }
        }
        self.doubt_others(&undeclared);
    }

    /// Where what nobody `declared` explains half of the nodes of a kind, one that lies no further from it than a few times as far
    /// as they do is no more wrong than they are: the engine may round a little more than that. One that a known arithmetic comes
    /// nearest to is allowed twice its bound.
    fn doubt_others(&mut self, undeclared: &IndexSet<Checkpoint>) {
        let mut kinds: IndexMap<Kind, (usize, usize, f64)> = IndexMap::new();
        for (id, found) in &self.nodes {
            let (explained, all, furthest) = kinds.entry(id.kind()).or_default();
            *all += 1;
            if undeclared.contains(id) && found.is_explained() {
                (*explained, *furthest) = (*explained + 1, furthest.max(found.over));
            }
        }
        for (id, found) in &mut self.nodes {
            let (explained, all, furthest) = kinds[&id.kind()];
            // Keys and values in f16 come near to what TF32 rounds, which rounds more than that.
            let times = if found.known { BARELY } else { APART * furthest };
            if 2 * explained >= all {
                *found = found.widened(times);
            }
        }
    }
}

/// Whether nothing but an arithmetic explains it that nothing shows to be the engine's.
pub fn is_of_unknown(found: &Simulated) -> bool {
    !found.known && found.is_explained()
}

/// Nodes of each kind that an arithmetic is tried on before all of them: an engine computes nodes of one kind alike in all
/// layers. Mistakes may be in the first or the last one, or in every second: of four such nodes one is healthy.
const SCOUTS: usize = 4;

/// A few of some nodes: of each kind the first two, one in the middle and the last.
pub fn scouts(open: &IndexSet<Checkpoint>) -> IndexSet<Checkpoint> {
    let mut kinds: IndexMap<Kind, Vec<Checkpoint>> = IndexMap::new();
    open.iter().for_each(|id| kinds.entry(id.kind()).or_default().push(*id));
    let of_kind = |ids: Vec<Checkpoint>| match &ids[..] {
        [first, second, .., last] if ids.len() > SCOUTS => vec![*first, *second, ids[ids.len() / 2], *last],
        _ => ids,
    };
    kinds.into_values().flat_map(of_kind).collect()
}
