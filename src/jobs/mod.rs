//! What commands do, without flags or printing: options as meant -> a report.

pub mod audit;
pub mod bench;
pub mod diff;
pub mod doctor;
pub mod explain;
mod graphs;
mod head_rows;
mod limits;
pub mod logprobs;
pub mod machine;
pub mod map;
mod plan;
pub mod run;

use indexmap::IndexSet;

use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::foreign;
use crate::numerics::Numerics;
use crate::select::Selection;
use parity_dump::Dump;

/// What a reader must know of a side's dump: an interrupted recording, an arithmetic or names that are not understood.
fn notes_of(dump: &Dump, side: &str) -> Vec<String> {
    let interrupted = !dump.manifest().complete;
    let note = format!("the {side} is an interrupted recording; what is whole in it is looked at");
    let declared = dump.manifest().producer.numerics.as_deref();
    let unknown = declared.filter(|words| words.parse::<Numerics>().is_err()).map(|words| {
        let flag = if side == "reference" { "--reference-numerics" } else { "--numerics" };
        format!(
            "the {side} declares `{words}`, which is no arithmetic that parity knows: {flag} declares one"
        )
    });
    let notes = interrupted.then_some(note).into_iter().chain(unknown);
    notes.chain(foreign::names_not_understood(dump, side)).collect()
}

/// What is chosen, and recorded attention matrices that hold NaN or Inf: those are looked at unasked. An infinite score is
/// a mask.
fn with_nonfinite<'a>(selection: &Selection, dumps: impl IntoIterator<Item = &'a Dump>) -> Selection {
    let dumps: Vec<&Dump> = dumps.into_iter().collect();
    let all: IndexSet<Checkpoint> = dumps.iter().flat_map(|dump| Recording::checkpoints(*dump)).collect();
    let is_odd = |dump: &Dump, id: Checkpoint| {
        let found = Recording::unfinite(dump, id).count;
        if id.kind() == Kind::AttnScores { found.nan > 0 } else { found.total() > 0 }
    };
    let all: Vec<Checkpoint> = all.into_iter().collect();
    selection.and_odd(&all, |id| dumps.iter().any(|dump| is_odd(dump, id)))
}

fn path_of(dump: &Dump) -> Option<String> {
    Some(dump.path().display().to_string())
}

fn tokens_of(recording: &dyn Recording) -> &[u32] {
    recording.tokens()
}
