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

use crate::dump::Recording;
use crate::foreign;
use parity_dump::Dump;

/// What a reader must know of a side's dump: an interrupted recording, names that are not understood.
fn notes_of(dump: &Dump, side: &str) -> Vec<String> {
    let interrupted = !dump.manifest().complete;
    let note = format!("the {side} is an interrupted recording; what is whole in it is looked at");
    interrupted.then_some(note).into_iter().chain(foreign::names_not_understood(dump, side)).collect()
}

fn path_of(dump: &Dump) -> Option<String> {
    Some(dump.path().display().to_string())
}

fn tokens_of(recording: &dyn Recording) -> &[u32] {
    recording.tokens()
}
