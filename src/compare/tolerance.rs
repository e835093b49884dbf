//! Tolerances that the user sets: for all checkpoints, or from a file by pattern.

use std::path::Path;

use globset::GlobMatcher;
use serde::Deserialize;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files;
use crate::select;

/// What the user allows: |a-b| <= atol + rtol·|b| for every element, and an NMSE.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Relative to |b|.
    pub rtol: Option<f64>,
    /// Absolute.
    pub atol: Option<f64>,
    /// ‖a-b‖² / ‖b‖²
    pub nmse: Option<f64>,
}

impl Tolerance {
    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Tolerance::default()
    }

    /// Refuses what bounds nothing; `names` are those of rtol, atol and nmse where they were written.
    ///
    /// # Errors
    /// A tolerance that is negative or no number.
    pub fn check(&self, names: [&str; 3]) -> Result<()> {
        for (name, value) in names.into_iter().zip([self.rtol, self.atol, self.nmse]) {
            if let Some(value) = value.filter(|value| !(*value >= 0.0)) {
                return Err(Error::new(name, "is no tolerance").expected("0 or more").found(value));
            }
        }
        Ok(())
    }
}

/// The user's tolerances; the last pattern that matches a checkpoint counts.
#[derive(Clone, Debug, Default)]
pub struct Tolerances {
    all: Tolerance,
    by_pattern: Vec<(GlobMatcher, Tolerance)>,
}

/// `[[tolerance]]` tables of a TOML file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    tolerance: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    checkpoint: String,
    rtol: Option<f64>,
    atol: Option<f64>,
    nmse: Option<f64>,
}

impl Tolerances {
    /// One tolerance for everything.
    pub fn uniform(all: Tolerance) -> Tolerances {
        Tolerances { all, by_pattern: Vec::new() }
    }

    /// Adds the rules of a file with `[[tolerance]]` tables: `checkpoint`, `rtol`, `atol`, `nmse`.
    pub fn with_file(mut self, path: &Path) -> Result<Tolerances> {
        let text = files::read(path, files::TEXT_BYTES_MAX)?;
        let file: File = toml::from_str(&text).map_err(|e| {
            Error::file(path, format!("is no tolerance file: {e}"))
                .expected("[[tolerance]] tables with checkpoint = 'blk.*.q_rope' and rtol, atol or nmse")
        })?;
        for rule in file.tolerance {
            self = self.with_rule(
                &rule.checkpoint,
                Tolerance { rtol: rule.rtol, atol: rule.atol, nmse: rule.nmse },
            )?;
        }
        Ok(self)
    }

    /// Adds a rule for the checkpoints that match a pattern.
    ///
    /// # Errors
    /// A pattern that cannot be read, a tolerance that is negative or no number.
    pub fn with_rule(mut self, pattern: &str, tolerance: Tolerance) -> Result<Tolerances> {
        tolerance.check(["rtol", "atol", "nmse"])?;
        self.by_pattern.push((select::pattern("tolerance", pattern)?, tolerance));
        Ok(self)
    }

    /// The tolerance of one checkpoint; empty where the user set none.
    pub fn of(&self, checkpoint: Checkpoint) -> Tolerance {
        let id = checkpoint.to_string();
        let rule = self.by_pattern.iter().rev().find(|(glob, _)| glob.is_match(&id));
        rule.map_or(self.all, |(_, tolerance)| *tolerance)
    }
}
