//! Shows that recording changed nothing: the program runs once more with no node asked for and no row
//! added, and each row of logits that it computes by itself must have the very bits of the recorded run.
//!
//! Rows that were added for the recording may change bits, since llama.cpp takes other kernels for one row
//! than for many. Then a third run with the same rows, and still no node asked for, tells that from a
//! fault of the tap.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::program::Program;
use super::tap::Session;
use super::{Options, run};
use crate::error::{Error, Result};

/// What two runs of the same program showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Rows of logits that both runs computed for the same token at the same position.
    pub rows: usize,
    /// Positions at which their bits differ.
    pub different: Vec<u32>,
    /// Whether those differ only because the recording asked for every row: a run with all rows and no node
    /// asked for has the recording's bits.
    pub rows_alone: bool,
    /// First position at which the runs had different tokens: a sampler that is not greedy, or a
    /// difference before it.
    pub other_token: Option<u32>,
}

impl Verified {
    /// Whether recording is shown to have changed nothing.
    pub fn is_equal(&self) -> bool {
        self.rows > 0 && (self.different.is_empty() || self.rows_alone) && self.other_token.is_none()
    }
}

/// Position -> token and hash of its logits.
pub(super) type Rows = BTreeMap<u32, (u32, String)>;

/// Runs the program untouched and compares its logits with the `recorded` ones.
pub fn verify(session: &Session, options: &Options, program: &Program, recorded: &Path) -> Result<Verified> {
    let recorded = read(recorded, &program.path)?;
    let untouched = |all_rows: bool| {
        let noted = session.folder().join(format!("untouched-{all_rows}"));
        run(session.untouched(&options.command, options, all_rows, &noted), program)?;
        compare(&recorded, &read(&noted, &program.path)?).ok_or_else(|| {
            Error::file(&program.path, "run without recording, it computed no logits to compare")
        })
    };
    let mut verified = untouched(false)?;
    if options.all_rows && !verified.is_equal() {
        verified.rows_alone = untouched(true)?.is_equal();
    }
    Ok(verified)
}

/// The rows that a run of `program` noted.
pub(super) fn read(path: &Path, program: &Path) -> Result<Rows> {
    let text = fs::read_to_string(path)
        .map_err(|e| Error::file(program, format!("a run for --verify noted no logits: {e}")))?;
    Ok(text.lines().filter_map(row).collect())
}

fn row(line: &str) -> Option<(u32, (u32, String))> {
    let mut words = line.split(' ');
    Some((words.next()?.parse().ok()?, (words.next()?.parse().ok()?, words.next()?.to_owned())))
}

/// What two runs show; `None` where they have no row in common.
pub(super) fn compare(recorded: &Rows, untouched: &Rows) -> Option<Verified> {
    let mut verified = Verified { rows: 0, different: Vec::new(), rows_alone: false, other_token: None };
    for (position, (token, hash)) in untouched {
        match recorded.get(position) {
            // Behind a token of its own, a run has no rows to compare.
            Some((other, _)) if other != token => {
                verified.other_token = Some(*position);
                break;
            }
            Some((_, other)) => {
                verified.rows += 1;
                if other != hash {
                    verified.different.push(*position);
                }
            }
            None => {}
        }
    }
    (verified.rows > 0 || verified.other_token.is_some()).then_some(verified)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Rows {
        text.lines().filter_map(row).collect()
    }

    #[test]
    fn rows_that_only_one_run_has_do_not_count() {
        let recorded = rows("0 5 aa\n1 6 bb\n2 7 cc\n3 8 dd");
        let equal = compare(&recorded, &rows("2 7 cc\n3 8 dd")).unwrap();
        assert_eq!(equal, Verified { rows: 2, different: vec![], rows_alone: false, other_token: None });
        assert!(equal.is_equal());
        assert!(compare(&recorded, &rows("9 1 aa")).is_none());
    }

    #[test]
    fn other_bits_and_other_tokens_are_told() {
        let recorded = rows("2 7 cc\n3 8 dd\n4 9 ee");
        let different = compare(&recorded, &rows("2 7 cx\n3 8 dd")).unwrap();
        assert_eq!(different.different, [2]);
        assert!(!different.is_equal());
        let sampled = compare(&recorded, &rows("2 7 cc\n3 1 xx\n4 2 yy")).unwrap();
        assert_eq!(sampled, Verified { rows: 1, different: vec![], rows_alone: false, other_token: Some(3) });
        assert!(!sampled.is_equal());
    }
}
