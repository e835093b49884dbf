//! How long each case took, in a file beside the result: what shards are cut by.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::GateReport;
use crate::error::{Error, Result};
use crate::files;
use crate::report::json;

/// Name and version of the format.
pub const SCHEMA: &str = "parity-times/1";
/// Its name in a folder of results.
pub const FILE: &str = "times.json";

/// Seconds by case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    schema: String,
    cases: BTreeMap<String, f64>,
}

impl Default for Times {
    /// Nothing is known.
    fn default() -> Times {
        Times { schema: SCHEMA.to_owned(), cases: BTreeMap::new() }
    }
}

impl Times {
    /// What a run took.
    pub fn of(report: &GateReport) -> Times {
        let cases = report.cases.iter().filter_map(|case| Some((case.id.clone(), case.seconds?)));
        Times { cases: cases.collect(), ..Times::default() }
    }

    /// Reads a file, or the one in a folder of results.
    ///
    /// # Errors
    /// What is no such file, and times that no case takes.
    pub fn read(path: &Path) -> Result<Times> {
        let path = if path.is_dir() { path.join(FILE) } else { path.to_owned() };
        let text = files::read(&path, files::OUTPUT_BYTES_MAX)
            .map_err(|e| e.hint("`parity gate --report DIR` writes one"))?;
        let times: Times = serde_json::from_str(&text)
            .map_err(|e| Error::file(&path, format!("holds no times of cases: {e}")))?;
        if times.schema != SCHEMA {
            return Err(Error::file(&path, "another format").expected(SCHEMA).found(&times.schema));
        }
        match times.cases.iter().find(|(_, seconds)| !(**seconds >= 0.0 && seconds.is_finite())) {
            Some((id, seconds)) => {
                Err(Error::file(&path, format!("{id} takes no such time")).expected("seconds").found(seconds))
            }
            None => Ok(times),
        }
    }

    /// Adds those of another part.
    pub fn extend(&mut self, other: Times) {
        self.cases.extend(other.cases);
    }

    /// Seconds that a case took, where that is known.
    pub fn seconds(&self, case: &str) -> Option<f64> {
        self.cases.get(case).copied()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.cases.is_empty()
    }

    /// The JSON.
    ///
    /// # Errors
    /// None that a result can cause.
    pub fn render(&self) -> Result<String> {
        json::render(self)
    }
}
