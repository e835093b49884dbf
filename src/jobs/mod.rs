//! What commands do, without flags or printing: options as meant -> a report.

pub mod ab;
pub mod audit;
pub mod bench;
mod biases;
mod bitwise;
pub mod diff;
pub mod doctor;
pub mod explain;
mod graph_limits;
mod graphs;
pub mod guess;
mod hashed;
mod head_rows;
mod limits;
pub mod logprobs;
pub mod map;
mod overflow;
pub mod port;
pub mod run;
mod second_names;
pub mod testcase;

use indexmap::IndexSet;

use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::foreign;
use crate::gguf::Gguf;
use crate::numerics::Numerics;
use crate::report::{Report, words};
use crate::select::Selection;
use crate::verdict;
use parity_dump::Dump;

/// Runs of rows that are said of a dump in which positions repeat.
const RUNS_SAID: usize = 24;

/// What a reader must know of a side's dump: an interrupted recording, an arithmetic or names that are not understood.
fn notes_of(dump: &Dump, side: &str) -> Vec<String> {
    let interrupted = !dump.manifest().is_whole();
    let note = format!("the {side} is an interrupted recording; what is whole in it is looked at");
    let declared = dump.manifest().producer.numerics.as_deref();
    let unknown = declared.filter(|words| words.parse::<Numerics>().is_err()).map(|words| {
        let flag = if side == "reference" { "--reference-numerics" } else { "--numerics" };
        format!(
            "the {side} declares `{words}`, which is no arithmetic that parity knows: {flag} declares one"
        )
    });
    let rows = dump.manifest().rows_in_words(RUNS_SAID).map(|said| {
        format!("rows of the {side} have numbers, since positions repeat (SEQUENCE:POSITION#TIME, the last time without): {said}")
    });
    let notes = interrupted.then_some(note).into_iter().chain(unknown).chain(rows);
    notes.chain(foreign::names_not_understood(dump, side)).collect()
}

/// Says what lies behind the verdicts of a report: another model's weights, values beyond their type; in the words of the
/// model and of the engine.
fn put_in_words(report: &mut Report, dump: &Dump, gguf: &Gguf) -> Result<()> {
    verdict::weigh(report, dump, gguf)?;
    overflow::explain(report, dump, gguf)?;
    verdict::name_models(report, gguf);
    verdict::speak_of_engines(report);
    Ok(())
}

/// Reads a dump as its values show it to be meant, whatever order its rows lie in and whatever they are called; what a
/// report then says of that.
fn settle(dump: &mut Dump, gguf: &Gguf) -> Result<Vec<String>> {
    let names = second_names::settle(dump, gguf);
    let order = head_rows::settle(dump, gguf)?;
    Ok(names.into_iter().chain(order).chain(biases::settle(dump, gguf)?).collect())
}

/// What is chosen, and attention matrices that were recorded: of all dumps, or with NaN or Inf in one. An infinite score is a
/// mask.
fn with_matrices<'a>(selection: &Selection, dumps: impl IntoIterator<Item = &'a Dump>) -> Selection {
    let dumps: Vec<&Dump> = dumps.into_iter().collect();
    let all: IndexSet<Checkpoint> = dumps.iter().flat_map(|dump| Recording::checkpoints(*dump)).collect();
    let is_odd = |dump: &Dump, id: Checkpoint| {
        let found = Recording::unfinite(dump, id).count;
        if id.kind() == Kind::AttnScores { found.nan > 0 } else { found.total() > 0 }
    };
    let everywhere = |id| dumps.iter().all(|dump| Recording::checkpoints(*dump).contains(&id));
    let all: Vec<Checkpoint> = all.into_iter().collect();
    selection.and_unnamed(&all, |id| everywhere(id) || dumps.iter().any(|dump| is_odd(dump, id)))
}

/// Of two dumps: that nobody looked at the attention matrices that one of them alone has.
fn matrices_of_one(selection: &Selection, sides: [(&str, &Dump); 2]) -> Vec<String> {
    let held = sides.map(|(_, dump)| Recording::checkpoints(dump));
    let mut notes = Vec::new();
    for (own, other) in [(0, 1), (1, 0)] {
        let unseen =
            |id: &&Checkpoint| id.kind().is_optional() && !held[other].contains(id) && !selection.names(**id);
        let unseen = held[own].iter().filter(unseen).count();
        if unseen > 0 {
            notes.push(format!(
                "{} of the {}, which the {} does not have, {} not looked at: parity audit judges attention matrices",
                words::count(unseen, "tensor"),
                sides[own].0,
                sides[other].0,
                if unseen == 1 { "was" } else { "were" },
            ));
        }
    }
    notes
}

fn path_of(dump: &Dump) -> Option<String> {
    Some(dump.path().display().to_string())
}

/// Logits of which none is a number say nothing of what leads to them, however right it is.
fn refuse_no_numbers(report: &mut Report, dumps: &[&Dump]) {
    let logits = Checkpoint::global(Kind::Logits);
    let is_number = |dump: &Dump, position: u32| {
        let mut buffer = Vec::new();
        let row = Recording::row(dump, logits, position, &mut buffer);
        row.is_some_and(|row| row.iter().any(|value| value.is_finite()))
    };
    for dump in dumps {
        let rows = Recording::positions(*dump, logits);
        if !rows.is_empty() && !rows.iter().any(|row| is_number(dump, *row)) {
            report.leave_open(format!(
                "the logits of {} are NaN or Inf throughout, as in exact arithmetic: nothing shows in what leads to them",
                words::count(rows.len(), "row")
            ));
        }
    }
}

fn tokens_of(recording: &dyn Recording) -> &[u32] {
    recording.tokens()
}
