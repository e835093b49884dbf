//! Whether attention sees the cells that its sequence holds, and no others: a cache is followed from row to row and from
//! call to call, as the recording tells both. A mask is an input, which no node computes.

use std::collections::{BTreeMap, BTreeSet};

use super::masks::spell;
use super::wiring::Differs;
use crate::dump::{Graphs, inputs};
use crate::gguf::Gguf;
use crate::model::diff::{self, Aspect, Name, Whose};
use parity_dump::{Dump, Event, Manifest, Step};
use parity_graph::{Graph, Id, Leaf, Op, label};

/// Key of a recording's provenance, and its value where the sequences of all rows are those of the program's own batches: then
/// its calls were seen too.
const SEQUENCES: (&str, &str) = ("sequences", "of the program's batches");

/// A cell of a cache that holds a position of sequences.
#[derive(Clone, Debug)]
struct Cell {
    position: i64,
    sequences: BTreeSet<u32>,
}

/// What is known of a cache.
#[derive(Clone, Debug, Default)]
struct Cache {
    /// By index over all streams; one that is not here is empty.
    cells: BTreeMap<usize, Cell>,
    /// Whether those that are not here may hold anything: a state was loaded.
    unknown: bool,
    /// Cells of a stream, and streams: one for all sequences, or one for each.
    size: usize,
    streams: usize,
}

impl Cache {
    /// Follows a call.
    fn event(&mut self, event: &Event) {
        let (number, id) = (|at| event.number(at), |at| event.id(at));
        let range = |from| event.range(from);
        match (event.call.as_str(), id(0)) {
            ("clear", _) => (self.cells, self.unknown) = (BTreeMap::new(), false),
            ("load", Some(sequence)) => {
                self.change(Some(sequence), 0..i64::MAX, |cell| {
                    cell.sequences.remove(&sequence);
                });
                self.unknown = true;
            }
            ("load", None) => (self.cells, self.unknown) = (BTreeMap::new(), true),
            ("seq_rm", sequence) => self.change(sequence, range(1), |cell| match sequence {
                Some(sequence) => {
                    cell.sequences.remove(&sequence);
                }
                None => cell.sequences.clear(),
            }),
            ("seq_keep", Some(kept)) => self.change(None, 0..i64::MAX, |cell| {
                cell.sequences.retain(|sequence| *sequence == kept);
            }),
            ("seq_add", Some(sequence)) => {
                let by = number(3);
                self.change(Some(sequence), range(1), |cell| cell.position += by);
            }
            ("seq_div", Some(sequence)) => {
                let by = number(3).max(1);
                self.change(Some(sequence), range(1), |cell| cell.position /= by);
            }
            ("seq_cp", Some(from)) => self.copy(from, id(1).unwrap_or(from), range(2)),
            _ => {}
        }
    }

    /// Changes the cells of a sequence, or of all, at these positions; those of no sequence, and before all positions, are empty.
    fn change(
        &mut self,
        sequence: Option<u32>,
        range: std::ops::Range<i64>,
        mut change: impl FnMut(&mut Cell),
    ) {
        self.cells.retain(|_, cell| {
            let is_of = sequence.is_none_or(|sequence| cell.sequences.contains(&sequence));
            if is_of && range.contains(&cell.position) {
                change(cell);
            }
            !cell.sequences.is_empty() && cell.position >= 0
        });
    }

    /// A sequence gets what another has: the same cells in one stream, copies of all of them in its own.
    fn copy(&mut self, from: u32, to: u32, range: std::ops::Range<i64>) {
        if from == to || self.streams <= 1 {
            return self.change(Some(from), range, |cell| {
                cell.sequences.insert(to);
            });
        }
        let place = |sequence: u32| sequence as usize * self.size;
        let (source, target) = (place(from), place(to));
        let copied = self.cells.range(source..source + self.size);
        let copied: Vec<(usize, Cell)> = copied
            .map(|(at, cell)| {
                (at - source + target, Cell { sequences: BTreeSet::from([to]), ..cell.clone() })
            })
            .collect();
        self.cells.retain(|at, _| !(target..target + self.size).contains(at));
        self.cells.extend(copied);
    }
}

/// An attention, its mask, and where its keys come from: the cache, and the first stream that it sees of it.
struct Attention {
    name: Name,
    mask: Id,
    cache: String,
    first_stream: usize,
}

/// By the input that says the cells of a step's rows: the leaf of keys that is written by it.
fn caches(graph: &Graph, names: &[Option<String>]) -> Vec<(String, Id)> {
    let writes = graph.computed().filter(|&id| graph.get(id).op == Op::SetRows);
    let of = |id: Id| {
        let (root, said) = (graph.root(id), graph.origin(graph.src(id, 1)?));
        (graph.leaf(root) == Some(Leaf::State)).then(|| Some((names[said].clone()?, root)))?
    };
    writes.filter_map(of).collect()
}

/// The keys that an attention reads, and its mask.
fn keys_and_mask(graph: &Graph, id: Id) -> Option<(Id, Id)> {
    match graph.get(id).op {
        Op::FlashAttn => Some((graph.src(id, 1)?, graph.src(id, 3)?)),
        Op::SoftMax => {
            let mut scores = graph.src(id, 0)?;
            for _ in 0..graph.nodes {
                scores = graph.origin(scores);
                match graph.get(scores).op {
                    Op::MulMat => return Some((graph.src(scores, 0)?, graph.src(id, 1)?)),
                    Op::Scale | Op::Tanh | Op::Add | Op::Mul | Op::Clamp => scores = graph.src(scores, 0)?,
                    _ => return None,
                }
            }
            None
        }
        _ => None,
    }
}

/// The attentions of a graph whose masks are inputs, each mask once.
fn attentions(graph: &Graph, names: &[Option<String>]) -> Vec<Attention> {
    let caches = caches(graph, names);
    let mut out: Vec<Attention> = Vec::new();
    for (name, mask) in diff::masks(graph) {
        let reads = graph.computed().filter_map(|id| keys_and_mask(graph, id));
        let Some((keys, _)) = reads.into_iter().find(|(_, own)| graph.origin(*own) == mask) else { continue };
        let leaf = graph.origin(keys);
        let root = graph.root(leaf);
        let Some((cache, _)) = caches.iter().find(|(_, written)| *written == root) else { continue };
        // What reads the cache itself: a view of all its streams or of some, which may be cast or turned behind it. The strides of
        // a leaf in blocks are not known.
        let walk = std::iter::successors(Some(keys), |id| graph.src(*id, 0)).take(graph.tensors.len());
        let reads = walk.into_iter().find(|id| graph.root(*id) == root && graph.get(*id).view.is_some());
        let reads = reads.map(|id| graph.get(id));
        let view = reads.and_then(|tensor| Some((tensor.view?.offset, tensor.nb[3])));
        let streams = graph.get(root).ne[2];
        let first_stream = view.filter(|_| streams > 1).map_or(0, |(offset, stream)| offset / stream.max(1));
        if !out.iter().any(|known| known.mask == mask) {
            out.push(Attention { name, mask, cache: cache.clone(), first_stream });
        }
    }
    out
}

/// What a model says of what its rows see.
struct Sight {
    /// Whether they see no later positions.
    causal: bool,
    /// Whether some layers see the last positions alone.
    windows: bool,
}

impl Sight {
    fn of(gguf: &Gguf, dump: &Dump) -> Sight {
        let architecture = gguf.str("general.architecture").ok().flatten().unwrap_or_default();
        let has = |key: &str| gguf.get(&format!("{architecture}.attention.{key}")).is_some();
        let causal = |event: &Event| event.call == "causal";
        let told = dump.manifest().steps.iter().any(|step| step.life.events.iter().any(causal));
        Sight { causal: !has("causal") && !told, windows: has("sliding_window") || has("chunk_size") }
    }
}

/// What is wrong with the cells that a row at `position` sees, by the catalogue's name, and the cells that it should see.
fn wrong(
    cache: &Cache,
    (sequence, position): (u32, i64),
    (seen, columns, first): (&[usize], usize, usize),
    sight: &Sight,
) -> Option<(&'static str, Vec<usize>)> {
    let cell = |column: usize| cache.cells.get(&(first + column));
    let own = |cell: &Cell| cell.sequences.contains(&sequence) && cell.position <= position;
    let held: Vec<usize> = (0..columns).filter(|&column| cell(column).is_some_and(own)).collect();
    let at = |column: &usize| cell(*column).map_or(i64::MAX, |cell| cell.position);
    for column in seen {
        let name = match cell(*column) {
            None if cache.unknown => continue,
            None => "cache.stale_cell",
            Some(cell) if !cell.sequences.contains(&sequence) => "cache.wrong_sequence",
            Some(cell) if sight.causal && cell.position > position => "attn.mask_shift",
            Some(_) => continue,
        };
        return Some((name, held));
    }
    let hidden: Vec<usize> =
        held.iter().copied().filter(|column| seen.binary_search(column).is_err()).collect();
    let oldest = held.iter().filter(|column| !hidden.contains(column)).map(at).min().unwrap_or(i64::MAX);
    // A window hides what is before it.
    let within = |column: &usize| !sight.windows || at(column) >= oldest;
    (sight.causal && hidden.iter().any(within)).then_some(("attn.mask_shift", held))
}

/// Whether the calls of the program that was recorded were seen.
pub(super) fn are_seen(manifest: &Manifest) -> bool {
    manifest.provenance.get(SEQUENCES.0).map(String::as_str) == Some(SEQUENCES.1)
}

/// The first row of a recording that sees other cells than its sequence holds.
pub(super) fn first(dump: &Dump, graphs: &Graphs, gguf: &Gguf, whose: Whose) -> Option<Differs> {
    let manifest = dump.manifest();
    if !are_seen(manifest) {
        return None;
    }
    let (keys, sight) = (manifest.row_keys(), Sight::of(gguf, dump));
    let mut known: BTreeMap<String, Cache> = BTreeMap::new();
    let mut before: Vec<&Event> = Vec::new();
    let mut seeing: BTreeMap<Option<usize>, Vec<Attention>> = BTreeMap::new();
    for (number, step) in manifest.steps.iter().enumerate() {
        before.extend(&step.life.events);
        known.values_mut().for_each(|cache| step.life.events.iter().for_each(|event| cache.event(event)));
        let Some(graph) = graphs.of_step(number).filter(|graph| !graph.is_shift()) else { continue };
        let names = label::leaf_names(graph);
        let values = |name: &str| inputs::numbers(dump.leaf(number, name)?);
        for (name, root) in caches(graph, &names) {
            let ne = graph.get(root).ne;
            // Keys alone are indexed by row in every form of attention.
            let Some(cells) = values(&name).filter(|cells| cells.len() == step.positions.len()) else {
                continue;
            };
            let cache = known.entry(name).or_insert_with(|| {
                let mut fresh = Cache { size: ne[1], streams: ne[2], ..Cache::default() };
                before.iter().for_each(|event| fresh.event(event));
                fresh
            });
            for (row, cell) in cells.iter().enumerate() {
                let sequences = step.sequences_of(row).iter().copied().collect();
                cache.cells.insert(*cell as usize, Cell { position: i64::from(step.at()[row]), sequences });
            }
        }
        let seeing = seeing.entry(graphs.index_of_step(number));
        for attention in seeing.or_insert_with(|| attentions(graph, &names)) {
            let (Some(cache), Some(mask)) = (known.get(&attention.cache), names[attention.mask].as_deref())
            else {
                continue;
            };
            let (ne, Some(mask)) = (graph.get(attention.mask).ne, values(mask)) else { continue };
            if let Some((row, name, has)) = of_rows(cache, step, (&mask, ne), attention.first_stream, &sight)
            {
                let number = step.positions[row];
                let key = keys.as_ref().map_or(number.to_string(), |keys| keys[number as usize].to_string());
                let aspect = Aspect::Cells(key, name);
                let [seen, held] = has.map(Some);
                return Some(Differs {
                    node: attention.name.clone(),
                    aspect,
                    has: vec![(whose, seen), (Whose::File, held)],
                });
            }
        }
    }
    None
}

/// The first row of a step whose mask is wrong: by which name, what it sees, and what it should.
fn of_rows(
    cache: &Cache,
    step: &Step,
    (mask, ne): (&[f64], [usize; 4]),
    first_stream: usize,
    sight: &Sight,
) -> Option<(usize, &'static str, [String; 2])> {
    let [columns, rows, _, streams] = ne;
    let each = step.positions.len() / streams.max(1);
    (0..step.positions.len()).find_map(|row| {
        let (stream, within) = (row / each.max(1), row % each.max(1));
        let values = mask.get((stream * rows + within) * columns..)?.get(..columns)?;
        let seen: Vec<usize> = (0..columns).filter(|&column| values[column] != f64::NEG_INFINITY).collect();
        let first = if cache.streams > 1 { (first_stream + stream) * cache.size } else { 0 };
        let sequence = *step.sequences_of(row).first()?;
        let of = (sequence, i64::from(step.at()[row]));
        let (name, held) = wrong(cache, of, (&seen, columns, first), sight)?;
        Some((row, name, [spell(&seen), spell(&held)]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequence 0 in cells 0 to 3, sequence 1 in 4 and 5, at positions from 0.
    fn two() -> Cache {
        let cell = |sequence: u32, position| Cell { position, sequences: BTreeSet::from([sequence]) };
        let cells =
            (0..4).map(|at| (at, cell(0, at as i64))).chain((4..6).map(|at| (at, cell(1, at as i64 - 4))));
        Cache { cells: cells.collect(), unknown: false, size: 8, streams: 1 }
    }

    fn call(call: &str, arguments: &[i64]) -> Event {
        Event { call: call.to_owned(), arguments: arguments.to_vec() }
    }

    fn found(cache: &Cache, row: (u32, i64), seen: &[usize], windows: bool) -> Option<&'static str> {
        wrong(cache, row, (seen, 8, 0), &Sight { causal: true, windows }).map(|found| found.0)
    }

    #[test]
    fn a_row_sees_what_its_sequence_holds() {
        let mut cache = two();
        assert_eq!(found(&cache, (0, 3), &[0, 1, 2, 3], false), None);
        assert_eq!(found(&cache, (0, 3), &[0, 1, 2, 3, 4], false), Some("cache.wrong_sequence"));
        assert_eq!(found(&cache, (0, 2), &[0, 1, 2, 3], false), Some("attn.mask_shift"));
        assert_eq!(found(&cache, (0, 3), &[1, 2, 3], false), Some("attn.mask_shift"));
        assert_eq!(found(&cache, (0, 3), &[0, 1, 2], true), Some("attn.mask_shift"));
        assert_eq!(found(&cache, (0, 3), &[2, 3], true), None);
        cache.event(&call("seq_rm", &[0, 2, -1]));
        assert_eq!(found(&cache, (0, 3), &[0, 1, 2], false), Some("cache.stale_cell"));
        cache.event(&call("load", &[]));
        assert_eq!(found(&cache, (0, 3), &[0, 1, 2], false), None);
    }

    #[test]
    fn calls_are_followed() {
        let mut cache = two();
        cache.event(&call("seq_cp", &[0, 1, -1, -1]));
        assert_eq!(found(&cache, (1, 3), &[0, 1, 2, 3, 4, 5], false), None);
        cache.event(&call("seq_keep", &[1]));
        assert_eq!(found(&cache, (0, 3), &[0], false), Some("cache.wrong_sequence"));
        let mut shifted = two();
        shifted.event(&call("seq_rm", &[0, 1, 3]));
        shifted.event(&call("seq_add", &[0, 3, -1, -2]));
        assert_eq!(found(&shifted, (0, 1), &[0, 3], false), None);
        assert_eq!(found(&shifted, (0, 1), &[0], false), Some("attn.mask_shift"));
        let mut apart = Cache { streams: 2, size: 4, ..two() };
        apart.event(&call("seq_cp", &[0, 1, -1, -1]));
        let of_second = |seen: &[usize]| {
            wrong(&apart, (1, 3), (seen, 4, 4), &Sight { causal: true, windows: false }).map(|found| found.0)
        };
        assert_eq!((of_second(&[0, 1, 2, 3]), of_second(&[0, 1, 2])), (None, Some("attn.mask_shift")));
    }
}
