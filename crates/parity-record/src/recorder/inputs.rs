//! What a pass is computed of: its tokens and positions, and another run's token in the place of the program's.

use parity_dump::Life;

use super::Recorder;
use crate::api::{RawSched, RawTensor};
use crate::describe::{Described, Reader};
use crate::map::Mapping;

impl Recorder {
    /// Tokens and positions of the pass, both (T,).
    pub(super) unsafe fn inputs(
        &self,
        reader: Reader<'_>,
        sched: RawSched,
        described: &Described,
        mapping: &Mapping,
        tokens: usize,
    ) -> Option<(Vec<u32>, Vec<u32>)> {
        // SAFETY: the scheduler of the graph; what reads leaves must not overtake what writes them.
        unsafe { (reader.api.sched_synchronize)(sched) };
        // SAFETY: leaves of a graph whose inputs are set.
        let read = |id: usize| unsafe { reader.i32s(described.address[id]) };
        let unsigned = |values: Vec<i32>| {
            values
                .into_iter()
                .take(mapping.known.rows)
                .map(|v| u32::try_from(v).ok())
                .collect::<Option<Vec<u32>>>()
        };
        let tokens = unsigned(read(tokens)?)?;
        let positions = match mapping.known.positions {
            Some(leaf) => unsigned(read(leaf)?)?,
            None => self.unsaid_positions(&tokens),
        };
        (tokens.len() == mapping.known.rows && positions.len() == mapping.known.rows)
            .then_some((tokens, positions))
    }

    /// Puts another run's token into a decode step, where that is asked for, and tells the parent process what the program
    /// had chosen.
    ///
    /// # Safety
    /// `leaf` holds the ids of the tokens of a pass that is about to be computed.
    pub(super) unsafe fn force(
        &mut self,
        reader: Reader<'_>,
        leaf: RawTensor,
        (tokens, numbers, life): (&mut [u32], &[u32], &Life),
    ) {
        let Some(forced) = &mut self.options.forced else { return };
        let at = if life.at.is_empty() { numbers } else { &life.at };
        let sequence = |row: usize| life.sequences.get(row).and_then(|ids| ids.first()).copied().unwrap_or(0);
        let rows: Vec<(u32, u32)> = at.iter().enumerate().map(|(row, at)| (sequence(row), *at)).collect();
        // SAFETY: by the caller's promise.
        for (row, own) in unsafe { forced.put(reader.api, leaf, tokens, &rows) } {
            self.host.status("replaced", &format!("{} {own}", numbers[row]));
        }
    }
}
