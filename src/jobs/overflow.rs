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
use crate::report::{CheckpointVerdict, Report};
use parity_dump::Dump;

/// The largest number of f16.
const F16_MAX: f64 = 65504.0;

/// Says of the first divergence what an exact pass comes to before it, where it is NaN or Inf and has no name.
///
/// # Errors
/// Those of the machine that executes the graph.
pub fn explain(report: &mut Report, dump: &Dump, gguf: &Gguf) -> Result<()> {
    let Some(first) = report.first_divergence.as_mut() else { return Ok(()) };
    if first.verdict != CheckpointVerdict::Nonfinite || !first.diagnosis.is_empty() {
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
    let most = peaks.values().copied().fold(0.0, f64::max);
    first.residual = Some(match beyond {
        Some((id, peak)) => format!(
            "an exact forward pass reaches {} at {id}, and f16 holds {F16_MAX}: what an engine keeps in f16 is infinite from \
             there on ({OVERFLOW})",
            number(peak)
        ),
        None => format!(
            "there are NaN or Inf, and an exact forward pass reaches {} at most, which f16 holds: it is no overflow",
            number(most)
        ),
    });
    Ok(())
}
