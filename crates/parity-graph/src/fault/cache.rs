//! What a cache holds over the life of a context: cells of other sequences, of what was removed, keys that were not moved.

use super::attention::ATTENTION;
use super::mask::masked;
use super::site::{edit, made};
use super::{Argument, Entry, PLAIN, count, plain, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "cache.no_shift",
        &[Op::Rope],
        [
            "cached keys are not turned when the context is shifted",
            "seq_add without the graph that shifts the keys, or one that is skipped for a quantised cache",
            "turn every key that moves by as many positions as it moves",
        ],
        |site, _| {
            when(site.graph.is_shift())?;
            made(
                Change::Bypass { slot: 0 },
                "the context is shifted, and its cached keys stay where they were",
            )
        },
    ),
    Entry {
        name: "cache.stale_cell",
        summary: "rows see cells whose positions were removed",
        place: "a rollback that forgets to clear the cells of rejected tokens, a length that is not reduced",
        fix: "hide the cells that seq_rm empties until they are written again",
        parameter: Some("cells"),
        silent: Some("where nothing was removed"),
        ops: ATTENTION,
        values: |_| Argument::numbers((1..=4).map(f64::from)),
        make: |site, argument| {
            let cells = usize::try_from(argument.integer()?).ok().filter(|cells| *cells > 0)?;
            let text = format!("rows see {} behind those of their step", count(cells, "cell"));
            made(edit(masked(site)?, Edit::Behind(cells)), text)
        },
        ..PLAIN
    },
    Entry {
        name: "cache.wrong_sequence",
        summary: "rows see the cells of another sequence",
        place: "an index of a batch taken for the id of a sequence, a slot's cells that another gets",
        fix: "a row sees the cells that its own sequence holds",
        parameter: Some("rows"),
        silent: Some("in batches of one row, or of one sequence"),
        ops: ATTENTION,
        values: |_| Argument::numbers([1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0]),
        make: |site, argument| {
            let by = argument.integer().filter(|by| *by != 0)?;
            let text = format!("rows see the cells of the row {by:+} from their own, of another sequence");
            made(edit(masked(site)?, Edit::RowsTurned(by)), text)
        },
        ..PLAIN
    },
];
