//! Whether recurrent states go back with their sequences: a sequence of which the last tokens were taken out goes on from a state
//! that is older by as many. Which one is read is an input, which no node computes.

use std::collections::BTreeMap;

use super::cells::are_seen;
use super::wiring::Differs;
use crate::dump::{Graphs, inputs};
use crate::model::diff::{Aspect, Name, Whose};
use crate::report::words::count;
use parity_dump::{Dump, Event, Step};
use parity_graph::{Graph, Id, Op, label, states};

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Place {
    /// The position behind its last token.
    end: i64,
    /// How many of its last tokens were taken out since it was computed.
    back: i64,
}

/// Sequences of which it is known.
#[derive(Debug, Default)]
struct Places(BTreeMap<u32, Place>);

impl Places {
    /// Follows a call; where a sequence is not followed any more it is not known.
    fn event(&mut self, event: &Event) {
        match event.call.as_str() {
            "save" | "encode" | "causal" => {}
            "seq_rm" => {
                let (of, range) = (event.id(0), event.range(1));
                self.0.retain(|sequence, place| {
                    let within = of.is_none_or(|of| of == *sequence) && range.start < place.end;
                    // A state goes back once, and by some of its tokens.
                    let is_end = range.start > 0 && range.end >= place.end && place.back == 0;
                    if within && is_end {
                        (place.end, place.back) = (range.start, place.end - range.start);
                    }
                    !within || is_end
                });
            }
            "seq_cp" => self.0.retain(|id, _| ![0, 1].map(|at| event.id(at)).contains(&Some(*id))),
            "seq_keep" => self.0.clear(),
            _ => self.0.retain(|id, _| event.id(0).is_some_and(|of| of != *id)),
        }
    }

    /// How far a sequence that goes on at a position went back, where that is known.
    fn back(&self, sequence: u32, position: i64) -> Option<i64> {
        self.0.get(&sequence).filter(|place| place.end == position).map(|place| place.back)
    }

    /// Follows the rows of a step.
    fn step(&mut self, step: &Step) {
        for (row, position) in step.at().iter().enumerate() {
            let end = i64::from(*position) + 1;
            match step.sequences_of(row) {
                &[sequence] => self.0.extend([(sequence, Place { end, back: 0 })]),
                several => self.0.retain(|id, _| !several.contains(id)),
            }
        }
    }
}

/// What reads states in a graph: the first node that computes with them, the input that says which rows these are, and the cells of
/// a plane.
fn read(graph: &Graph) -> Option<(Name, Id, usize)> {
    let labels = label::labels(graph);
    graph.computed().find_map(|id| {
        let label = labels[id]?;
        let (by, cells) = graph.sources(id).find_map(|source| states::picked(graph, source))?;
        let indices = graph.src(by, 1)?;
        let starts = graph.get(indices).view.is_none_or(|view| view.offset == 0);
        let input = graph.root(indices);
        let name = Name { layer: label.layer_index(), name: label.kind().name().to_owned() };
        (starts && graph.is_leaf(input) && graph.get(input).op == Op::None).then_some((name, input, cells))
    })
}

fn spell(back: i64) -> String {
    match back {
        0 => "the newest state".to_owned(),
        back => format!("the state of {} before", count(back.unsigned_abs() as usize, "token")),
    }
}

/// The first sequence of a recording that goes on from another state than that which it went back to.
pub(super) fn first(dump: &Dump, graphs: &Graphs, whose: Whose) -> Option<Differs> {
    let manifest = dump.manifest();
    if !are_seen(manifest) {
        return None;
    }
    let keys = manifest.row_keys();
    let mut places = Places::default();
    let mut known: BTreeMap<Option<usize>, Option<(Name, Id, usize)>> = BTreeMap::new();
    for (number, step) in manifest.steps.iter().enumerate() {
        step.life.events.iter().for_each(|event| places.event(event));
        let Some(graph) = graphs.of_step(number).filter(|graph| !graph.is_shift()) else { continue };
        let read = known.entry(graphs.index_of_step(number)).or_insert_with(|| read(graph));
        if let Some((node, input, cells)) = read {
            let names = label::leaf_names(graph);
            let rows = names[*input].as_deref().and_then(|name| inputs::numbers(dump.leaf(number, name)?));
            let mut begun: Vec<u32> = Vec::new();
            for (row, position) in step.at().iter().enumerate() {
                let &[sequence] = step.sequences_of(row) else { break };
                if begun.contains(&sequence) {
                    continue;
                }
                // States lie in the order in which the sequences of a step begin.
                let own = rows.as_ref().and_then(|rows| rows.get(begun.len()));
                begun.push(sequence);
                let (Some(own), Some(back)) = (own, places.back(sequence, i64::from(*position))) else {
                    continue;
                };
                let read = *own as i64 / i64::try_from(*cells).unwrap_or(i64::MAX);
                if read != back {
                    let number = step.positions[row];
                    let key =
                        keys.as_ref().map_or(number.to_string(), |keys| keys[number as usize].to_string());
                    let has = vec![(whose, Some(spell(read))), (Whose::File, Some(spell(back)))];
                    return Some(Differs { node: node.clone(), aspect: Aspect::State(key, read == 0), has });
                }
            }
        }
        places.step(step);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(call: &str, arguments: &[i64]) -> Event {
        Event { call: call.to_owned(), arguments: arguments.to_vec() }
    }

    /// Sequence 0 behind position 12, sequence 1 behind 4.
    fn two() -> Places {
        Places([(0, 13), (1, 5)].map(|(id, end)| (id, Place { end, back: 0 })).into())
    }

    #[test]
    fn a_sequence_goes_back_by_what_is_taken_out_of_its_end() {
        let mut places = two();
        places.event(&call("seq_rm", &[0, 10, -1]));
        assert_eq!([places.back(0, 10), places.back(0, 13), places.back(1, 5)], [Some(3), None, Some(0)]);
        // A state goes back once.
        places.event(&call("seq_rm", &[0, 9, -1]));
        assert_eq!([places.back(0, 9), places.back(1, 5)], [None, Some(0)]);
        let mut places = two();
        places.event(&call("seq_rm", &[0, 13, -1]));
        assert_eq!(places.back(0, 13), Some(0));
        places.event(&call("seq_rm", &[-1, 4, -1]));
        assert_eq!([places.back(0, 4), places.back(1, 4)], [Some(9), Some(1)]);
    }

    #[test]
    fn what_a_sequence_got_otherwise_is_not_known() {
        for event in [
            call("seq_rm", &[0, 0, -1]),
            call("seq_rm", &[0, 2, 4]),
            call("seq_cp", &[1, 0, -1, -1]),
            call("load", &[0, 7]),
            call("seq_add", &[0, 1, -1, -1]),
        ] {
            let mut places = two();
            places.event(&event);
            assert_eq!(places.back(0, 13).or(places.back(0, 2)), None, "{event}");
            assert_eq!(places.back(1, 5).is_some(), event.call != "seq_cp", "{event}");
        }
        let mut places = two();
        places.event(&call("clear", &[]));
        assert!(places.0.is_empty());
    }
}
