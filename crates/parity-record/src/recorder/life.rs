//! What happens to a context between passes, and of which sequences the rows of a pass are.

use std::collections::HashMap;

use parity_dump::{Event, Life};
use parity_graph::{Graph, Id, Leaf, label};

use super::Recorder;
use crate::api::RawTensor;
use crate::describe::{Described, Reader};
use crate::map::Mapping;
use crate::plan::leaf_dtype;

/// One row of a batch that a program hands over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRow {
    /// Token id.
    pub token: u32,
    /// Its position, where the program says it.
    pub position: Option<u32>,
    /// Ids of its sequences.
    pub sequences: Vec<u32>,
}

/// Who wrote to a cache, other than a recorded pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// A call that is an event itself.
    ByCall,
    /// A pass that was not recorded, or not computed to its end.
    ByLostPass,
    /// Nobody that was seen.
    ByNobody,
}

/// What is known of the recorded context.
#[derive(Clone, Debug, Default)]
pub(super) struct Context {
    /// Rows of the last batch that no pass has computed yet.
    batch: Vec<BatchRow>,
    /// What happened since the last step.
    events: Vec<Event>,
    /// Whether the cache was written to out of sight since then.
    touched: bool,
    /// Whether it was filled with zeros.
    zeros: bool,
    /// Who did so beside the calls that were noted.
    by: Option<Touch>,
    /// How many rows were recorded.
    rows: u32,
    /// Whether there are rows of which nobody said the sequences.
    unknown: bool,
    /// The position behind the last of each sequence.
    next: HashMap<u32, u32>,
}

impl Context {
    /// Takes the rows of the batch that these tokens are of, in the order of a pass: llama.cpp computes a batch in several
    /// passes, and puts rows of one sequence beside each other. `None` where they are of no batch that was seen.
    fn take(&mut self, tokens: &[u32], positions: Option<&[u32]>) -> Option<Vec<BatchRow>> {
        let (mut left, mut taken) = (self.batch.clone(), Vec::with_capacity(tokens.len()));
        for (number, &token) in tokens.iter().enumerate() {
            let at = positions.map(|positions| positions[number]);
            let fits =
                |row: &BatchRow| row.token == token && row.position.zip(at).is_none_or(|(own, at)| own == at);
            let last = taken.last().map(|row: &BatchRow| row.sequences.clone());
            let same = |row: &BatchRow| Some(&row.sequences) == last.as_ref();
            let found =
                left.iter().position(|row| fits(row) && same(row)).or_else(|| left.iter().position(fits))?;
            taken.push(left.remove(found));
        }
        self.batch = left;
        Some(taken)
    }

    /// Whether a pass may compute once more what was computed before: its first row is of no sequence that begins beside
    /// others.
    pub(super) fn begins_again(&self, tokens: &[u32], positions: &[u32]) -> bool {
        let known = |row: &BatchRow| row.sequences.iter().any(|id| self.next.contains_key(id));
        let rows = self.clone().take(tokens, Some(positions));
        self.next.is_empty() || rows.is_none_or(|rows| rows.first().is_some_and(known))
    }

    /// Where the sequences of the rows are from, for the manifest.
    pub(super) fn source(&self) -> String {
        if self.unknown { "unknown" } else { "of the program's batches" }.to_owned()
    }

    /// That a cache was written to by no call that is an event, if that is so since this was asked last. Where the program's
    /// calls are not seen, it may have loaded a state.
    pub(super) fn unsaid(&mut self) -> Option<Event> {
        let call = match self.by.take()? {
            Touch::ByCall => return None,
            Touch::ByNobody if !self.unknown => "write",
            Touch::ByLostPass | Touch::ByNobody => "load",
        };
        Some(Event { call: call.to_owned(), arguments: Vec::new() })
    }

    /// Numbers of `n` rows more.
    fn numbers(&mut self, n: usize) -> Vec<u32> {
        let first = self.rows;
        self.rows += n as u32;
        (first..self.rows).collect()
    }

    /// The position of a row that nobody said one of: behind the last of its sequence.
    fn following(&self, row: &BatchRow, before: &[u32]) -> u32 {
        let first = row.sequences.first().copied().unwrap_or(0);
        row.position.or(before.last().map(|last| last + 1)).or(self.next.get(&first).copied()).unwrap_or(0)
    }
}

impl Recorder {
    /// Whether it is the recording of this scheduler's context.
    pub fn is_of(&self, sched: usize) -> bool {
        self.sched == Some(sched)
    }

    /// Notes that a pass was computed out of sight.
    pub fn missed(&mut self) {
        match self.sched {
            Some(_) => self.stop("two contexts computed at the same time"),
            None => drop(self.sequences.unknown()),
        }
    }

    /// Notes the batch that the program is about to have computed.
    pub fn batch(&mut self, rows: Vec<BatchRow>) {
        self.context.batch = rows;
    }

    /// Notes what the program does with its context, and whether that fills the caches with `zeros`.
    pub fn event(&mut self, call: &str, arguments: &[i64], zeros: bool) {
        self.context.zeros |= zeros && self.context.rows > 0;
        self.context.touched |= call == "load";
        let sequence = |at: usize| arguments.get(at).and_then(|id| u32::try_from(*id).ok());
        let next = &mut self.context.next;
        match (call, sequence(0), sequence(1)) {
            ("clear", ..) => next.clear(),
            ("seq_rm", Some(id), Some(from)) => {
                next.entry(id).and_modify(|known| *known = from.min(*known));
            }
            ("seq_cp", Some(from), Some(to)) => {
                if let Some(&known) = next.get(&from) {
                    next.insert(to, known);
                }
            }
            _ => {}
        }
        self.context.events.push(Event { call: call.to_owned(), arguments: arguments.to_vec() });
    }

    /// Notes that a cache was written to otherwise than by a recorded pass: the next one begins with all that it holds.
    pub fn touched(&mut self, how: Touch) {
        self.context.touched = true;
        // What nobody says weighs more than what was lost.
        if how == Touch::ByNobody || how == Touch::ByLostPass && self.context.by.is_none() {
            self.context.by = Some(how);
        }
    }

    /// Positions of a pass whose graph is not given any, (T,).
    pub(super) fn unsaid_positions(&self, tokens: &[u32]) -> Vec<u32> {
        let Some(rows) = self.context.clone().take(tokens, None) else {
            return self.sequences.following(tokens.len());
        };
        let mut positions: Vec<u32> = Vec::new();
        for (number, row) in rows.iter().enumerate() {
            let goes_on = number > 0 && rows[number - 1].sequences == row.sequences;
            positions.push(self.context.following(row, if goes_on { &positions } else { &[] }));
        }
        positions
    }

    /// Numbers of the rows of a pass, and what they are.
    pub(super) unsafe fn rows(
        &mut self,
        reader: Reader<'_>,
        (described, mapping): (&Described, &Mapping),
        tokens: &[u32],
        positions: &[u32],
    ) -> (Vec<u32>, Life) {
        let rows = self.context.take(tokens, Some(positions));
        self.context.unknown |= rows.is_none();
        let rows = rows.unwrap_or_default();
        for (row, position) in rows.iter().zip(positions) {
            row.sequences.iter().for_each(|id| {
                self.context.next.insert(*id, position + 1);
            });
        }
        let numbers = self.context.numbers(tokens.len());
        let mut sequences: Vec<Vec<u32>> = rows.into_iter().map(|row| row.sequences).collect();
        if sequences.iter().all(|ids| ids == &[0]) {
            sequences.clear();
        }
        let at = if numbers == positions { Vec::new() } else { positions.to_vec() };
        // SAFETY: by the caller's promise.
        let cells = unsafe { cells(reader, described, mapping) };
        (numbers, Life { at, sequences, cells, events: std::mem::take(&mut self.context.events) })
    }

    /// Whether a graph without tokens is a pass of what encodes images or sounds, which has no cache: the first that the context
    /// computes says what it is.
    pub(super) fn encodes(&mut self, mapping: &Mapping, graph: &Graph) -> bool {
        let encodes = !mapping.cache.is_there && !mapping.captures.is_empty() && !graph.is_shift();
        let is_first = self.sched.is_none();
        if !encodes || self.options.sequence.is_some() || !(is_first || self.is_tower) {
            return false;
        }
        self.is_tower = !is_first || self.host.claim();
        self.is_tower
    }

    /// Whether it is the recording of what encodes images or sounds, which no call on a context is about.
    pub fn is_tower(&self) -> bool {
        self.is_tower
    }

    /// Notes a pass of the context's own that is not recorded.
    pub(super) fn lost_pass(&mut self, mapping: &Mapping) {
        if !mapping.captures.is_empty() {
            self.say_once("a pass of embeddings is not recorded: its rows are missing");
        }
        self.touched(Touch::ByLostPass);
    }

    /// The row of a pass without tokens: one, whose position counts the passes.
    pub(super) fn row_of_pass(&mut self) -> Vec<u32> {
        self.context.numbers(1)
    }

    /// The row of a pass that computes what the cache holds: one, of no sequence.
    pub(super) fn row_of_cache(&mut self) -> (Vec<u32>, Life) {
        let at = vec![self.context.next.values().max().map_or(0, |next| next.saturating_sub(1))];
        let events = std::mem::take(&mut self.context.events);
        (self.context.numbers(1), Life { at, sequences: vec![Vec::new()], events, ..Life::default() })
    }

    /// Begins to count again: what was computed so far was a warm-up.
    pub(super) fn forget_rows(&mut self) {
        (self.context.rows, self.context.next, self.context.unknown) = (0, HashMap::new(), false);
    }

    /// Takes back the rows of a pass that was not computed to its end.
    pub(super) fn drop_rows(&mut self, n: usize) {
        self.context.rows = self.context.rows.saturating_sub(n as u32);
        self.touched(Touch::ByLostPass);
    }

    /// What the caches hold before a pass, by name, where they were written to out of sight.
    ///
    /// # Errors
    /// A cache of a type that a dump cannot hold.
    pub(super) fn states(
        &mut self,
        (described, mapping): (&Described, &Mapping),
    ) -> Result<Vec<(String, usize, RawTensor)>, String> {
        // What a shift does not read is needed behind it.
        let graph = &described.graph;
        // An encoder has no cache: the decoder behind it has.
        if !mapping.cache.is_there {
            return Ok(Vec::new());
        }
        let zeros = std::mem::take(&mut self.context.zeros) && mapping.cache.is_shown;
        let touched = std::mem::take(&mut self.context.touched) || zeros;
        self.context.touched = touched && graph.is_shift();
        if !touched {
            return Ok(Vec::new());
        }
        let names = label::leaf_names(graph).into_iter().enumerate();
        let states = names.filter(|(id, _)| graph.leaf(*id) == Some(Leaf::State));
        states
            .filter_map(|(id, name)| Some((name?, id, described.address[id])))
            .map(|(name, id, address)| match leaf_dtype(&graph.get(id).dtype) {
                Some(_) => Ok((name, id, address)),
                None => Err(format!(
                    "{name} was written to between passes, and what a cache of type {} holds is not recorded",
                    graph.get(id).dtype
                )),
            })
            .collect()
    }
}

/// The cells of a cache that the rows of a pass are written to, where an input says so.
unsafe fn cells(reader: Reader<'_>, described: &Described, mapping: &Mapping) -> Vec<u32> {
    // SAFETY: an input of a graph whose inputs are set.
    let read = |leaf: Id| unsafe { reader.bytes(described.address[leaf]) };
    let bytes = mapping.cache.cells.and_then(read).unwrap_or_default();
    let cell = |word: &[u8]| u32::try_from(i64::from_ne_bytes(word.try_into().ok()?)).ok();
    bytes.chunks_exact(8).map(cell).collect::<Option<Vec<u32>>>().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(token: u32, position: u32, sequence: u32) -> BatchRow {
        BatchRow { token, position: Some(position), sequences: vec![sequence] }
    }

    #[test]
    fn rows_of_a_batch_are_found_in_the_order_of_its_passes() {
        let mixed = vec![row(7, 0, 0), row(7, 0, 1), row(8, 1, 0), row(8, 1, 1), row(9, 4, 2)];
        let mut context = Context { batch: mixed, ..Context::default() };
        let ids = |rows: Vec<BatchRow>| rows.into_iter().map(|row| row.sequences[0]).collect::<Vec<_>>();
        // Two sequences that begin alike, one behind the other in a pass, then the third by itself.
        assert_eq!(ids(context.take(&[7, 8, 7, 8], Some(&[0, 1, 0, 1])).unwrap()), [0, 0, 1, 1]);
        assert_eq!(context.take(&[9], Some(&[3])), None);
        assert_eq!(ids(context.take(&[9], Some(&[4])).unwrap()), [2]);
        assert_eq!(context.take(&[9], Some(&[4])), None);
        assert_eq!((context.numbers(2), context.numbers(1)), (vec![0, 1], vec![2]));
    }
}
