//! Checkpoints of which only some values are known, in `seen.json` of a dump folder: what a program printed.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, by_spelling};
use crate::error::DumpError;
use crate::files::{TEXT_BYTES_MAX, read_text};

/// File name within a dump folder.
pub const SEEN_FILE: &str = "seen.json";

/// The parts of each checkpoint, one for each step that computed it.
pub type SeenTensors = HashMap<Checkpoint, Vec<SeenPart>>;

/// What is known of one checkpoint in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeenPart {
    /// Shape of one token row, e.g. [H, E]; [H, S] of the attention matrices.
    pub row_shape: Vec<usize>,
    /// Half a unit of the last digit of each value.
    pub half_unit: f64,
    /// Every row of the tensor, by position, whether values of it are known or not.
    pub rows: Vec<SeenRow>,
    /// Sum over the tensor, where it is known.
    #[serde(default)]
    pub sum: Option<SeenSum>,
}

/// What is known of one row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeenRow {
    /// Token position.
    pub position: u32,
    /// Indices within the flattened row, ascending. A row of the attention matrices is (H, position + 1).
    pub columns: Vec<u32>,
    /// The value at each of them; null where it is not finite.
    pub values: Vec<Option<f32>>,
}

/// A sum of a tensor's values in f32, as it was printed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeenSum {
    /// The sum; null where it is not finite.
    pub value: Option<f64>,
    /// Half a unit of its last digit.
    pub half_unit: f64,
    /// Whether only the seen values were added up, and not all.
    pub of_seen: bool,
}

impl SeenPart {
    /// How many values a row at `position` has.
    pub fn width(&self, checkpoint: Checkpoint, position: u32) -> Option<usize> {
        match (checkpoint.kind().is_optional(), self.row_shape.first()) {
            (true, Some(heads)) => heads.checked_mul(position as usize + 1),
            _ => self.row_shape.iter().try_fold(1usize, |width, n| width.checked_mul(*n)),
        }
    }

    fn check(&self, checkpoint: Checkpoint, positions: usize) -> Result<(), String> {
        let units = [Some(self.half_unit), self.sum.map(|sum| sum.half_unit)];
        if !units.into_iter().flatten().all(|unit| unit.is_finite() && unit >= 0.0) {
            return Err("a unit of the last digit that is no size".to_owned());
        }
        if !self.rows.is_sorted_by(|a, b| a.position < b.position) {
            return Err("rows that are not in order of position".to_owned());
        }
        for row in &self.rows {
            let width = self.width(checkpoint, row.position).ok_or("rows wider than memory")?;
            let ordered = row.columns.is_sorted_by(|a, b| a < b);
            let inside = row.columns.last().is_none_or(|&last| (last as usize) < width);
            if row.position as usize >= positions {
                return Err(format!("position {} without a token", row.position));
            }
            if !(ordered && inside && row.columns.len() == row.values.len()) {
                return Err(format!("columns and values of position {} that do not fit", row.position));
            }
        }
        Ok(())
    }
}

/// Reads `seen.json` of a dump with `positions` tokens; nothing where there is none.
pub(crate) fn read(dir: &Path, positions: usize) -> Result<SeenTensors, DumpError> {
    let path = dir.join(SEEN_FILE);
    if !path.is_file() {
        return Ok(SeenTensors::new());
    }
    let text = read_text(&path, TEXT_BYTES_MAX)?;
    let seen: SeenTensors = serde_json::from_str(&text)
        .map_err(|e| DumpError::new(&path, format!("is no list of seen values: {e}")))?;
    for (&checkpoint, parts) in &seen {
        for part in parts {
            part.check(checkpoint, positions).map_err(|found| {
                DumpError::new(&path, format!("{checkpoint} contradicts itself"))
                    .expected_found("rows by position, columns ascending within them", found)
                    .hint("make it again: parity record --import TEXT -o DIR")
            })?;
        }
    }
    Ok(seen)
}

/// Writes `seen.json`.
pub(crate) fn write(dir: &Path, seen: &SeenTensors) -> Result<(), DumpError> {
    let path = dir.join(SEEN_FILE);
    let part = dir.join(format!("{SEEN_FILE}.part"));
    let failed = |e: &dyn std::fmt::Display| DumpError::new(&path, format!("cannot be written: {e}"));
    let text = serde_json::to_string(&by_spelling(seen)).map_err(|e| failed(&e))?;
    fs::write(&part, text + "\n").and_then(|()| fs::rename(&part, &path)).map_err(|e| failed(&e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dump, Kind, Producer, Writer};

    fn part() -> SeenPart {
        let row = SeenRow { position: 0, columns: vec![0, 5], values: vec![Some(1.5), None] };
        let sum = SeenSum { value: Some(-2.0), half_unit: 5e-7, of_seen: false };
        SeenPart { row_shape: vec![2, 3], half_unit: 5e-5, rows: vec![row], sum: Some(sum) }
    }

    fn opened(part: SeenPart) -> Result<Dump, DumpError> {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(dir.path(), Producer::default(), Default::default()).unwrap();
        writer.begin_step(&[7], &[0], 0).unwrap();
        writer.end_step().unwrap();
        writer.seen(&SeenTensors::from([(Checkpoint::layer(Kind::Q, 0), vec![part])])).unwrap();
        writer.finish().unwrap();
        // A second recording into the folder takes the first one's place.
        let dump = Dump::open(dir.path());
        Writer::create(dir.path(), Producer::default(), Default::default()).unwrap();
        assert!(!dir.path().join(SEEN_FILE).exists());
        dump
    }

    #[test]
    fn what_was_seen_is_read_as_it_was_written() {
        let dump = opened(part()).unwrap();
        assert_eq!(dump.seen(Checkpoint::layer(Kind::Q, 0)), [part()]);
        assert_eq!(dump.checkpoints().count(), 0, "what is seen in part is not there as a whole");
    }

    #[test]
    fn contradictions_are_errors() {
        type Change = fn(&mut SeenPart);
        let changes: [Change; 7] = [
            |part| part.row_shape = vec![1, 5],
            |part| part.row_shape = vec![usize::MAX, 2],
            |part| part.rows[0].columns = vec![5, 0],
            |part| part.rows[0].values = vec![],
            |part| part.rows[0].position = 1,
            |part| part.rows.push(part.rows[0].clone()),
            |part| part.half_unit = -1.0,
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let mut wrong = part();
            change(&mut wrong);
            assert!(opened(wrong).is_err(), "change {index} was accepted");
        }
    }
}
