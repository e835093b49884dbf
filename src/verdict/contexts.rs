//! Which tokens stand before a row: those that its sequence holds, as the batches of a recording and the calls between them put
//! them there. Rows of one key may be computed behind other tokens, where a sequence goes on from another one's copy or state;
//! each is healthy by itself then, and the sides say nothing of each other.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use super::cells::are_seen;
use parity_dump::{Dump, Event, Manifest, RowKey, Step};

/// What a sequence holds: by position its token, and a hash of all up to it.
#[derive(Clone, Debug, Default)]
struct Held {
    /// The hash of what was there before all of this: of a state that was saved elsewhere.
    from: Option<i64>,
    tokens: BTreeMap<i64, (u32, u64)>,
}

impl Held {
    /// Computes the hashes anew from a position on.
    fn chain(&mut self, from: i64) {
        let before = self.tokens.range(..from).next_back().map(|(_, (_, hash))| *hash);
        let mut hash = before.unwrap_or_else(|| hash_of(&self.from));
        for (position, (token, own)) in self.tokens.range_mut(from..) {
            hash = hash_of(&(hash, position, *token));
            *own = hash;
        }
    }

    /// Takes over what another sequence holds at some positions.
    fn take(&mut self, other: &Held, range: &Range<i64>) {
        if *range == (0..i64::MAX) {
            self.clone_from(other);
            return;
        }
        self.tokens.extend(other.tokens.range(range.clone()).map(|(at, held)| (*at, *held)));
        self.chain(range.start);
    }

    /// Moves what it holds at some positions.
    fn place(&mut self, range: &Range<i64>, place: impl Fn(i64) -> i64) {
        let all = std::mem::take(&mut self.tokens).into_iter();
        let moved = all.map(|(at, held)| (if range.contains(&at) { place(at) } else { at }, held));
        self.tokens = moved.filter(|(at, _)| *at >= 0).collect();
        self.chain(0);
    }
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// What stands before a row, up to and with itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Before {
    hash: u64,
    /// Whether a part of it is not known.
    from_elsewhere: bool,
}

/// What is known of a context.
#[derive(Clone, Debug, Default)]
struct Context {
    sequences: HashMap<u32, Held>,
    /// By the hash of a state: what it is of, and what that held.
    saved: HashMap<i64, Arc<HashMap<u32, Held>>>,
}

impl Context {
    fn event(&mut self, event: &Event) {
        let (number, id) = (|at| event.number(at), |at| event.id(at));
        let range = |from| event.range(from);
        match event.call.as_str() {
            "clear" => self.sequences.clear(),
            "seq_rm" => {
                let range = range(1);
                let of = id(0);
                for (sequence, held) in &mut self.sequences {
                    if of.is_none_or(|of| of == *sequence) {
                        held.tokens.retain(|at, _| !range.contains(at));
                        held.chain(range.start);
                    }
                }
            }
            "seq_keep" => self.sequences.retain(|sequence, _| Some(*sequence) == id(0)),
            "seq_add" | "seq_div" => {
                let (by, adds) = (number(3), event.call == "seq_add");
                let place = |at: i64| if adds { at + by } else { at / by.max(1) };
                if let Some(held) = id(0).and_then(|id| self.sequences.get_mut(&id)) {
                    held.place(&range(1), place);
                }
            }
            "seq_cp" => {
                if let (Some(from), Some(to)) = (id(0), id(1)) {
                    let source = self.sequences.get(&from).cloned().unwrap_or_default();
                    self.sequences.entry(to).or_default().take(&source, &range(2));
                }
            }
            "save" => {
                let all =
                    self.sequences.iter().filter(|(sequence, _)| id(0).is_none_or(|id| id == **sequence));
                let all = all.map(|(sequence, held)| (*sequence, held.clone())).collect();
                self.saved.insert(number(1), Arc::new(all));
            }
            "load" => self.load(id(0), number(1)),
            _ => {}
        }
    }

    /// Goes on with a state: what it was saved of, or something that is known by its hash alone.
    fn load(&mut self, sequence: Option<u32>, hash: i64) {
        let saved = self.saved.get(&hash).cloned();
        let elsewhere = || Held { from: Some(hash), tokens: BTreeMap::new() };
        match (sequence, saved) {
            (None, Some(all)) => self.sequences = HashMap::clone(&all),
            (None, None) => self.sequences.values_mut().for_each(|held| *held = elsewhere()),
            (Some(to), saved) => {
                // One sequence may come back as another.
                let of_one =
                    saved.as_ref().filter(|all| all.len() <= 1).map(|all| all.values().next().cloned());
                self.sequences.insert(to, of_one.map_or_else(elsewhere, Option::unwrap_or_default));
            }
        }
    }

    /// Takes the rows of a step, and says what stands before each.
    fn step(&mut self, step: &Step, tokens: &[u32]) -> Vec<Before> {
        let rows = step.at().iter().zip(tokens).enumerate();
        let positions =
            rows.clone().map(|(row, (at, token))| (step.sequences_of(row).to_vec(), i64::from(*at), *token));
        for (sequences, at, token) in positions {
            for sequence in sequences {
                let held = self.sequences.entry(sequence).or_default();
                held.tokens.insert(at, (token, 0));
                held.chain(at);
            }
        }
        let before = |(row, (at, _)): (usize, (&u32, &u32))| {
            let held = step.sequences_of(row).first().and_then(|first| self.sequences.get(first));
            let hash = held.and_then(|held| Some(held.tokens.get(&i64::from(*at))?.1));
            Before { hash: hash.unwrap_or(0), from_elsewhere: held.is_some_and(|held| held.from.is_some()) }
        };
        rows.map(before).collect()
    }
}

/// By key of its rows: what stands before each; nothing of a recording whose calls were not seen.
fn of(manifest: &Manifest) -> HashMap<RowKey, Before> {
    if !are_seen(manifest) {
        return HashMap::new();
    }
    let (mut context, mut out, keys) = (Context::default(), HashMap::new(), manifest.keys());
    for step in &manifest.steps {
        step.life.events.iter().for_each(|event| context.event(event));
        let tokens = step.positions.iter().map(|row| manifest.tokens.get(*row as usize).copied());
        let tokens: Vec<u32> = tokens.map(Option::unwrap_or_default).collect();
        for (row, before) in step.positions.iter().zip(context.step(step, &tokens)) {
            out.extend(keys.get(*row as usize).map(|key| (*key, before)));
        }
    }
    out
}

/// The first row that the sides computed behind other tokens, and whether that is known, or one of them went on from a state of
/// which nobody knows what it was saved of.
pub(super) fn first_apart(candidate: &Dump, reference: &Dump) -> Option<(RowKey, bool)> {
    let (of_reference, candidate) = (reference.manifest(), candidate.manifest());
    if !candidate.has_life() && !of_reference.has_life() {
        return None;
    }
    let (ours, theirs) = (of(candidate), of(of_reference));
    let apart = |key: RowKey| {
        let (ours, theirs) = (ours.get(&key)?, theirs.get(&key)?);
        (ours.hash != theirs.hash).then_some((key, !ours.from_elsewhere && !theirs.from_elsewhere))
    };
    let keys = of_reference.keys().into_iter().zip(0..);
    keys.filter(|(_, row)| reference.is_chosen(Some(*row))).find_map(|(key, _)| apart(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(call: &str, arguments: &[i64]) -> Event {
        Event { call: call.to_owned(), arguments: arguments.to_vec() }
    }

    /// Three sequences of other tokens: what stands before the next row of the third, after some calls.
    fn after(events: &[Event]) -> Before {
        let mut context = Context::default();
        let mut rows = |sequence: u32, first: u32, tokens: &[u32]| {
            let positions = (first..first + tokens.len() as u32).collect();
            let mut step = Step { positions, ..Step::default() };
            step.life.sequences = vec![vec![sequence]; tokens.len()];
            context.step(&step, tokens)
        };
        rows(0, 0, &[5, 6, 7]);
        rows(1, 0, &[5, 6, 8]);
        events.iter().for_each(|event| context.event(event));
        let mut step = Step { positions: vec![3], ..Step::default() };
        step.life.sequences = vec![vec![2]];
        context.step(&step, &[9])[0]
    }

    #[test]
    fn a_sequence_that_goes_on_from_another_one_has_its_tokens() {
        let of_first = after(&[call("seq_cp", &[0, 2, -1, -1])]);
        let of_second = after(&[call("seq_cp", &[1, 2, -1, -1])]);
        assert_ne!(of_first.hash, of_second.hash);
        let saved = |sequence| [call("save", &[sequence, 77]), call("load", &[2, 77])];
        assert_eq!(after(&saved(0)), of_first);
        assert_eq!(after(&saved(1)), of_second);
        // What differs was taken back, and what is alike is copied.
        let cut = |sequence| after(&[call("seq_cp", &[sequence, 2, -1, -1]), call("seq_rm", &[2, 2, -1])]);
        assert_eq!(cut(0), cut(1));
        assert_ne!(cut(0).hash, of_first.hash);
    }

    #[test]
    fn a_state_from_elsewhere_is_known_by_its_hash_alone() {
        let [one, again, other] = [7, 7, 8].map(|hash| after(&[call("load", &[2, hash])]));
        assert!(one.from_elsewhere && one == again && one.hash != other.hash);
    }
}
