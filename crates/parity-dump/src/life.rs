//! The life of a context: rows of several sequences, positions that are computed again, and what happened to the cache
//! between steps.
//!
//! A row's key is (sequence, position, occurrence). In memory rows have numbers, which stand where positions stand in a
//! dump of one sequence: there the two are the same, and everything that follows rows by position follows these.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::DumpError;
use crate::manifest::{Manifest, Step, null_is_default};
use crate::reader::Dump;

/// What a manifest requires where a position repeats: `tokens` holds one token for each row, and `rows` holds numbers of
/// rows, both counted over all steps in their order.
pub const SEQUENCES: &str = "sequences";

/// What a step's rows are, and what happened before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// (T,) positions of its rows, where the step's own numbers are others; in a file these are its `positions`.
    #[serde(skip)]
    pub at: Vec<u32>,
    /// (T,) ids of the sequences of each row; none where all are of sequence 0. A row of no sequence is the cache's own: what
    /// was computed of it when it was shifted.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub sequences: Vec<Vec<u32>>,
    /// (T,) cells of the cache that its rows were written to, where that is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub cells: Vec<u32>,
    /// What happened to the context since the step before.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub events: Vec<Event>,
}

/// Something that happened to a context between two steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// `seq_rm`, `seq_cp`, `seq_keep`, `seq_add`, `seq_div`, `clear`, `save`, `load`, `encode` or `causal`; `write` where
    /// something wrote into a cache that was none of these.
    pub call: String,
    /// The numbers that it was given, in the order of llama.cpp's function. Of `save` and `load` the sequence, -1 of the whole
    /// context, and a hash of the state; a `load` of which neither is known has none.
    #[serde(default)]
    pub arguments: Vec<i64>,
}

impl Event {
    /// One of its numbers; -1, as llama.cpp has it for all, where it has none.
    pub fn number(&self, at: usize) -> i64 {
        self.arguments.get(at).copied().unwrap_or(-1)
    }

    /// The sequence that one of its numbers is; `None` of all.
    pub fn id(&self, at: usize) -> Option<u32> {
        u32::try_from(self.number(at)).ok()
    }

    /// The positions that two of its numbers bound, where a negative one is no bound.
    pub fn range(&self, from: usize) -> Range<i64> {
        let end = Some(self.number(from + 1)).filter(|end| *end >= 0).unwrap_or(i64::MAX);
        self.number(from).max(0)..end
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arguments: Vec<String> = self.arguments.iter().map(i64::to_string).collect();
        write!(f, "{}({})", self.call, arguments.join(", "))
    }
}

/// The rows of a dump that are looked at.
pub(crate) struct Chosen {
    rows: HashSet<u32>,
    /// By number of a row: its token, 0 of one that is not looked at.
    pub(crate) tokens: Vec<u32>,
}

/// Which row it is, whatever the steps that it was computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// Its sequence, the first where it is of several; none of a row of the cache.
    pub sequence: Option<u32>,
    /// Its position there.
    pub position: u32,
    /// Which time, from 1, where the position was computed again later; none of the last time, which counts.
    pub occurrence: Option<u32>,
}

impl fmt::Display for RowKey {
    /// `12`, of another sequence than 0 `1:12`, and `#1` behind it where the position was computed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sequence {
            Some(0) => write!(f, "{}", self.position)?,
            Some(sequence) => write!(f, "{sequence}:{}", self.position)?,
            None => write!(f, "shift:{}", self.position)?,
        }
        self.occurrence.map_or(Ok(()), |occurrence| write!(f, "#{occurrence}"))
    }
}

impl Step {
    /// (T,) positions of its rows.
    pub fn at(&self) -> &[u32] {
        if self.life.at.is_empty() { &self.positions } else { &self.life.at }
    }

    /// Ids of the sequences of a row.
    pub fn sequences_of(&self, row: usize) -> &[u32] {
        self.life.sequences.get(row).map_or(&[0], Vec::as_slice)
    }
}

impl Manifest {
    /// Whether rows have numbers that are no positions.
    pub fn is_numbered(&self) -> bool {
        self.steps.iter().any(|step| !step.life.at.is_empty())
    }

    /// The key of each row, by its number; none where rows are positions.
    pub fn row_keys(&self) -> Option<Vec<RowKey>> {
        self.is_numbered().then(|| self.keys())
    }

    /// Whether there is more than one text to follow: rows of several sequences, positions that repeat, or calls in between.
    pub fn has_life(&self) -> bool {
        let has_more = |life: &Life| !life.sequences.is_empty() || !life.events.is_empty();
        self.is_numbered() || self.steps.iter().any(|step| has_more(&step.life))
    }

    /// Which rows the numbers of a numbered dump are, in words: the first `most` runs of them.
    pub fn rows_in_words(&self, most: usize) -> Option<String> {
        let there: HashSet<u32> = self.steps.iter().flat_map(|step| step.positions.iter().copied()).collect();
        let keys = self.row_keys()?.into_iter().zip(0..);
        let keys: Vec<(RowKey, u32)> = keys.filter(|(_, number)| there.contains(number)).collect();
        let follows = |(a, number): &(RowKey, u32), (b, next): &(RowKey, u32)| {
            (a.sequence, a.position + 1, a.occurrence) == (b.sequence, b.position, b.occurrence)
                && number + 1 == *next
        };
        let runs: Vec<String> = keys
            .chunk_by(follows)
            .map(|run| match run {
                [(key, number)] => format!("{number} is {key}"),
                _ => {
                    let [(key, number), (last_key, last)] = [run[0], run[run.len() - 1]];
                    format!("{number} to {last} are {key} to {last_key}")
                }
            })
            .collect();
        let more = if runs.len() > most { ", …" } else { "" };
        Some(format!("{}{more}", runs[..runs.len().min(most)].join(", ")))
    }

    /// The key of each row, by its number.
    pub fn keys(&self) -> Vec<RowKey> {
        let rows = self.steps.iter().flat_map(|step| {
            let key = |(row, &position)| (step.sequences_of(row).first().copied(), position);
            step.positions.iter().copied().zip(step.at().iter().enumerate().map(key))
        });
        let rows: Vec<(u32, (Option<u32>, u32))> = rows.collect();
        let mut times: HashMap<(Option<u32>, u32), u32> = HashMap::new();
        rows.iter().for_each(|(_, key)| *times.entry(*key).or_default() += 1);
        let blank = RowKey { sequence: None, position: 0, occurrence: None };
        let mut keys = vec![blank; self.tokens.len()];
        let mut seen: HashMap<(Option<u32>, u32), u32> = HashMap::new();
        for (number, (sequence, position)) in rows {
            let (count, all) = (seen.entry((sequence, position)).or_default(), times[&(sequence, position)]);
            *count += 1;
            let occurrence = Some(*count).filter(|count| *count < all);
            if let Some(known) = keys.get_mut(number as usize) {
                *known = RowKey { sequence, position, occurrence };
            }
        }
        keys
    }

    /// Gives the rows of a manifest that was read numbers, where it says that positions repeat.
    ///
    /// # Errors
    /// What of it does not fit together: what was expected, and what was found.
    pub(crate) fn number_rows(&mut self) -> Result<(), (String, String)> {
        if let Some(step) = self.steps.iter().find(|step| !step.life.fits(step.positions.len())) {
            let rows = step.positions.len();
            return Err((format!("sequences and cells of {rows} rows"), format!("others in {}", step.file)));
        }
        if !self.requires.iter().any(|name| name == SEQUENCES) {
            return Ok(());
        }
        let rows: usize = self.steps.iter().map(|step| step.positions.len()).sum();
        if rows != self.tokens.len() {
            return Err((
                format!("a token for each of {rows} rows"),
                format!("{} tokens", self.tokens.len()),
            ));
        }
        self.requires.retain(|name| name != SEQUENCES);
        let mut first = 0;
        for step in &mut self.steps {
            let next = first + step.positions.len() as u32;
            step.life.at = std::mem::replace(&mut step.positions, (first..next).collect());
            first = next;
        }
        Ok(())
    }

    /// As a file has it: positions, and the numbers of rows only where these repeat.
    pub fn for_file(&self) -> Cow<'_, Manifest> {
        if !self.is_numbered() {
            return Cow::Borrowed(self);
        }
        let mut out = self.clone();
        let mut of_number: HashMap<u32, u32> = HashMap::new();
        let mut seen = HashSet::new();
        let mut repeats = false;
        for (step, own) in out.steps.iter_mut().zip(&self.steps) {
            of_number.extend(own.positions.iter().copied().zip(own.at().iter().copied()));
            repeats |= own.life.sequences.iter().any(Vec::is_empty);
            repeats |= own.at().iter().any(|position| !seen.insert(*position));
            step.positions = own.at().to_vec();
        }
        if repeats {
            out.requires.push(SEQUENCES.to_owned());
            return Cow::Owned(out);
        }
        out.tokens = vec![0; seen.iter().max().map_or(0, |last| *last as usize + 1)];
        for (number, &token) in self.tokens.iter().enumerate() {
            if let Some(&position) = of_number.get(&(number as u32)) {
                out.tokens[position as usize] = token;
            }
        }
        for rows in out.rows.values_mut() {
            rows.iter_mut().for_each(|row| *row = of_number.get(row).copied().unwrap_or(*row));
        }
        Cow::Owned(out)
    }
}

impl Dump {
    /// Looks at the rows of one sequence alone from here on; those of the others are what they are computed beside.
    ///
    /// # Errors
    /// Where no row is of it.
    pub fn choose_sequence(&mut self, sequence: u32) -> Result<(), DumpError> {
        let manifest = &self.manifest;
        let rows = manifest.steps.iter().flat_map(|step| {
            let is_of = move |(row, _): &(usize, &u32)| step.sequences_of(*row).contains(&sequence);
            step.positions.iter().enumerate().filter(is_of).map(|(_, &number)| number)
        });
        let chosen: HashSet<u32> = rows.collect();
        if chosen.is_empty() {
            let all = manifest
                .steps
                .iter()
                .flat_map(|step| (0..step.positions.len()).flat_map(|row| step.sequences_of(row)));
            let known: BTreeSet<u32> = all.copied().collect();
            return Err(DumpError::new(&self.path, format!("no row is of sequence {sequence}"))
                .expected_found(format!("one of {known:?}"), sequence)
                .hint("parity inspect DUMP shows the sequences of a dump"));
        }
        self.choose(chosen);
        Ok(())
    }

    /// Looks at these rows alone: tokens of others are no part of the text.
    fn choose(&mut self, rows: HashSet<u32>) {
        let behind = rows.iter().max().map_or(0, |last| *last as usize + 1);
        let tokens = self.manifest.tokens.iter().take(behind).zip(0..);
        let tokens = tokens.map(|(token, row)| if rows.contains(&row) { *token } else { 0 }).collect();
        self.chosen = Some(Chosen { rows, tokens });
    }

    /// Calls the sequence of a dump that has one alone by this id, as another dump has it.
    pub fn call_sequence(&mut self, id: u32) {
        let steps = &mut self.manifest.steps;
        let rows =
            |step: &Step| (0..step.positions.len()).map(|row| step.sequences_of(row).to_vec()).collect();
        let all: BTreeSet<Vec<u32>> = steps.iter().flat_map(|step| -> Vec<Vec<u32>> { rows(step) }).collect();
        if all.len() == 1 && !all.contains(&vec![id]) {
            steps.iter_mut().for_each(|step| step.life.sequences = vec![vec![id]; step.positions.len()]);
        }
    }

    /// Whether a row, by its number, is of the sequence that is looked at; `None` asks whether all are.
    pub fn is_chosen(&self, row: Option<u32>) -> bool {
        match (&self.chosen, row) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(chosen), Some(row)) => chosen.rows.contains(&row),
        }
    }

    /// Gives the rows the numbers that rows of the same keys have in another dump; others come behind all of them. Nothing
    /// where they have these already, or where the first row that both have is of another token: of two texts no rows belong
    /// together, and numbers with gaps between them would keep a dump from being judged by itself.
    pub fn number_as(&mut self, other: &Manifest) {
        let (own, theirs) = (self.manifest.keys(), other.keys());
        let both_plain = !self.manifest.is_numbered() && !other.is_numbered();
        if both_plain || own.iter().zip(&theirs).all(|(a, b)| a == b) {
            return;
        }
        let known: HashMap<RowKey, u32> = theirs.iter().copied().zip(0..).collect();
        let both = own.iter().zip(&self.manifest.tokens).find_map(|(key, token)| {
            known.get(key).map(|&number| Some(token) == other.tokens.get(number as usize))
        });
        if both != Some(true) {
            return;
        }
        let mut next = own.len().max(theirs.len()) as u32;
        let mut number = |key: &RowKey| {
            known.get(key).copied().unwrap_or_else(|| {
                next += 1;
                next - 1
            })
        };
        let numbers: Vec<u32> = own.iter().map(&mut number).collect();
        let renumbered = |row: u32| numbers.get(row as usize).copied().unwrap_or(row);
        let of = |row: &mut u32| *row = renumbered(*row);
        let mut tokens = vec![0; numbers.iter().max().map_or(0, |last| *last as usize + 1)];
        for (&number, &token) in numbers.iter().zip(&self.manifest.tokens) {
            tokens[number as usize] = token;
        }
        self.manifest.tokens = tokens;
        for step in &mut self.manifest.steps {
            step.life.at = step.at().to_vec();
            step.positions.iter_mut().for_each(of);
        }
        self.manifest.rows.values_mut().flatten().for_each(of);
        for recorded in self.tensors.values_mut() {
            recorded.rows.iter_mut().for_each(|row| of(&mut row.0));
        }
        if let Some(chosen) = self.chosen.take() {
            self.choose(chosen.rows.into_iter().map(renumbered).collect());
        }
        self.sort_rows();
    }
}

impl Life {
    /// Whether it is of so many rows.
    fn fits(&self, rows: usize) -> bool {
        [self.sequences.len(), self.cells.len()].iter().all(|found| *found == 0 || *found == rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{ModelInfo, Producer};

    /// Rows with these numbers at these positions of these sequences, step by step.
    fn manifest(steps: &[&[(u32, u32)]]) -> Manifest {
        let mut manifest = Manifest::new(Producer::default(), ModelInfo::default());
        for rows in steps {
            let first = manifest.tokens.len() as u32;
            let positions: Vec<u32> = (first..first + rows.len() as u32).collect();
            let life = Life {
                at: rows.iter().map(|row| row.1).collect(),
                sequences: rows.iter().map(|row| vec![row.0]).collect(),
                ..Life::default()
            };
            manifest.tokens.extend(positions.iter().map(|row| 100 + row));
            manifest.steps.push(Step { positions, life, ..Step::default() });
        }
        manifest
    }

    fn read_again(manifest: &Manifest) -> Manifest {
        let text = serde_json::to_string(&*manifest.for_file()).unwrap();
        let mut read: Manifest = serde_json::from_str(&text).unwrap();
        read.number_rows().unwrap();
        read
    }

    #[test]
    fn positions_that_repeat_are_rows_of_their_own() {
        let rolled_back = manifest(&[&[(0, 0), (0, 1), (0, 2)], &[(0, 2), (1, 0)], &[(0, 2)]]);
        let file = rolled_back.for_file();
        assert_eq!(file.requires, [SEQUENCES]);
        assert_eq!(file.steps[1].positions, [2, 0]);
        assert_eq!(read_again(&rolled_back), rolled_back);
        let keys: Vec<String> = rolled_back.row_keys().unwrap().iter().map(RowKey::to_string).collect();
        assert_eq!(keys, ["0", "1", "2#1", "2#2", "1:0", "2"]);
    }

    #[test]
    fn positions_that_do_not_repeat_are_as_they_were() {
        let mut continued = manifest(&[&[(0, 3), (0, 4)], &[(1, 5)]]);
        continued.rows.insert("logits".parse().unwrap(), vec![1, 2]);
        let file = continued.for_file();
        assert!(file.requires.is_empty());
        assert_eq!(
            (&file.tokens[3..], &file.rows[&"logits".parse().unwrap()][..]),
            (&[100, 101, 102][..], &[4, 5][..])
        );
        assert!(!read_again(&continued).is_numbered());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut short = manifest(&[&[(0, 0)], &[(0, 0)]]).for_file().into_owned();
        short.tokens.pop();
        assert_eq!(short.number_rows().unwrap_err().1, "1 tokens");
        let mut cells = manifest(&[&[(0, 0)]]);
        cells.steps[0].life.cells = vec![1, 2];
        assert!(cells.number_rows().is_err());
    }
}
