//! Where a difference arose whose node could not be judged: between two checkpoints that were compared.

use crate::checkpoint::Kind;
use crate::report::{CheckpointVerdict, Entry};

/// Between which checkpoints a difference arose whose node could not be judged, by the index of the later one;
/// and what to record to know more, where more nodes are known to lie between them.
pub fn bracket(entries: &[Entry], audited: bool) -> Option<(usize, String)> {
    let compared = |entry: &&Entry| entry.numbers.is_some();
    let at = entries.iter().position(|entry| compared(&entry) && !entry.verdict.is_healthy())?;
    let first = &entries[at];
    let beyond = matches!(first.verdict, CheckpointVerdict::Beyond | CheckpointVerdict::Nonfinite);
    if first.verdict != CheckpointVerdict::Undecided && !(beyond && first.local.candidate.is_none()) {
        return None;
    }
    let last = entries[..at].iter().rfind(compared);
    let end = last.is_none_or(|last| matches!(last.id.kind(), Kind::Embed | Kind::LayerOut));
    let from = last.and_then(|last| last.layer).map_or(0, |layer| layer + u32::from(end));
    let known = audited || last.is_none_or(|last| last.layer != first.layer);
    let next = !known
        || end && first.id.kind() == Kind::AttnNorm && first.layer == Some(from)
        || first.id.kind() == Kind::Embed;
    let arose = match last {
        Some(last) => {
            format!("the difference arose between {}, the last that agrees, and {}", last.id, first.id)
        }
        None if first.id.kind() == Kind::Embed => format!("the difference arose at {}", first.id),
        None => format!("the difference arose at {} or before it", first.id),
    };
    let text = match first.layer {
        _ if next => arose,
        Some(to) if from == to => format!("{arose}: record and compare all of it with --layer {to}"),
        Some(to) => format!("{arose}: record and compare all of them with --layer {from}..{to}"),
        None => format!("{arose}: record and compare all of them with --layer {from}.."),
    };
    Some((at, text))
}
