//! NaN and Inf of which nothing recorded says where they come from: whether an exact forward pass reaches values that f16
//! cannot hold, and where first.

use std::collections::{HashMap, HashSet};

use crate::audit::{Prompt, order, simulated};
use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::diagnosis::OVERFLOW;
use crate::gguf::Gguf;
use crate::report::words::number;
use crate::report::{CheckpointVerdict, Diagnosis, Report};
use parity_dump::Dump;

/// The largest number of f16.
const F16_MAX: f64 = 65504.0;
/// What NaN are called that nothing else explains.
const NAN: &str = "data.nan";

/// Whether an engine that declares this arithmetic may keep values in f16; one that declares nothing may.
fn may_be_narrow(numerics: Option<&str>) -> bool {
    numerics
        .is_none_or(|words| words.split(|c: char| c == '=' || c.is_whitespace()).any(|word| word == "f16"))
}

/// Names an overflow at the first divergence, where that is NaN or Inf, nothing before it was recorded that says more, and
/// an exact pass comes to values before it that f16 cannot hold.
///
/// # Errors
/// Those of the machine that executes the graph.
pub fn explain(report: &mut Report, dump: &Dump, gguf: &Gguf) -> Result<()> {
    let Some(first) = report.first_divergence.as_mut() else { return Ok(()) };
    let unnamed = first.diagnosis.first().is_none_or(|best| best.fault == NAN);
    let whole = first.inputs.is_empty() && may_be_narrow(dump.producer().numerics.as_deref());
    if first.verdict != CheckpointVerdict::Nonfinite || !unnamed || !whole {
        return Ok(());
    }
    let found = Recording::unfinite(dump, first.checkpoint);
    let tokens = Recording::tokens(dump);
    // Up to the first token whose row holds one: later ones say no more.
    let length = found.positions.first().map_or(tokens.len(), |last| tokens.len().min(*last as usize + 1));
    let Ok(prompt) = Prompt::new(gguf, &tokens[..length], true, 0) else { return Ok(()) };
    let steps = prompt.steps();
    let all: Vec<Checkpoint> = order(&steps, &|id| !id.kind().is_optional());
    let before = all.iter().position(|id| *id == first.checkpoint).map_or(all.len(), |at| at + 1);
    let ids: HashSet<Checkpoint> = all[..before].iter().copied().collect();
    let mut peaks: HashMap<Checkpoint, f64> = HashMap::new();
    simulated(&prompt, &steps, gguf, &[None], &ids, &mut |row| {
        let peak = peaks.entry(row.id).or_default();
        *peak = row.values.iter().fold(*peak, |peak, value| peak.max(value.abs()));
    })?;
    let beyond = all.iter().find_map(|id| Some((*id, *peaks.get(id).filter(|peak| !(**peak <= F16_MAX))?)));
    if let Some((id, peak)) = beyond {
        let text = format!(
            "an exact forward pass reaches {} at {id}, and f16 holds {F16_MAX}: what is kept in f16 is infinite from there on",
            number(peak)
        );
        let fix = parity_graph::fault::find(OVERFLOW).map(|entry| entry.fix.to_owned());
        first.diagnosis.insert(0, Diagnosis { fault: OVERFLOW.to_owned(), explains: 1.0, text, fix });
    }
    Ok(())
}
