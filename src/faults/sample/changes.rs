//! What a change of a node touches.

use parity_graph::Id;
use parity_graph::rewrite::{Change, Edit};

/// Whether a change of the result makes each row of what was in that row.
pub fn is_within_rows(change: &Change) -> bool {
    match change {
        Change::ResultEdit(edit) => edit.is_within_rows(),
        Change::All(changes) => changes.iter().all(is_within_rows),
        _ => false,
    }
}

/// Whether a change may make other values of a source.
pub fn touches(change: &Change, source: usize) -> bool {
    match change {
        Change::Words(_) | Change::Scores(_) | Change::ResultEdit(_) => false,
        Change::Source { slot, .. } | Change::SourceEdit { slot, .. } => *slot == source,
        Change::All(changes) => changes.iter().any(|change| touches(change, source)),
        _ => true,
    }
}

/// Whether scores are changed behind their scale.
pub fn is_of_scores(change: &Change) -> bool {
    match change {
        Change::Scores(_) => true,
        Change::All(changes) => changes.iter().any(is_of_scores),
        _ => false,
    }
}

/// The source whose rows a change takes from elsewhere, where nothing else is done to it, and the rest of the change.
pub fn rows_turned(change: &Change) -> Option<(usize, &Edit, Change)> {
    match change {
        Change::SourceEdit { slot, edit: edit @ Edit::RowsTurned(_) } => {
            Some((*slot, edit, Change::All(Vec::new())))
        }
        Change::All(changes) => {
            let at = changes.iter().position(|change| rows_turned(change).is_some())?;
            let (slot, edit, _) = rows_turned(&changes[at])?;
            let (before, behind) = (&changes[..at], &changes[at + 1..]);
            let rest = Change::All([before, behind].concat());
            (!touches(&rest, slot)).then_some((slot, edit, rest))
        }
        _ => None,
    }
}

/// The slot in which a change reads another tensor.
pub fn place_of(change: &Change, id: Id) -> Option<usize> {
    match change {
        Change::Source { slot, with: Some(with) } if *with == id => Some(*slot),
        Change::All(changes) => changes.iter().find_map(|change| place_of(change, id)),
        _ => None,
    }
}
