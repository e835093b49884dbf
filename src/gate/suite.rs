//! A suite: which cases there are, and what is to come of each.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use globset::GlobMatcher;

use super::ProblemKind;
use super::definition;
use crate::checkpoint::Checkpoint;
use crate::compare::Tolerances;
use crate::engine::device::Device;
use crate::error::{Error, Result};
use crate::faults::inject::Spec;
use crate::files;
use crate::numerics::Numerics;
use crate::report::Verdict;
use crate::select::{self, Selection};

/// A suite, its cases spelt out.
pub struct Suite {
    /// Its name.
    pub name: String,
    /// File of its baseline, where it has one.
    pub baseline: Option<PathBuf>,
    /// In the order of the file.
    pub cases: Vec<Case>,
}

/// One thing to run and judge.
#[derive(Clone)]
pub struct Case {
    /// Name of the definition, then the values of the axes that have several, e.g. `prompts/tiny/cpu`.
    pub id: String,
    /// Number of its `[[case]]`, from 0.
    pub definition: usize,
    /// Model file; the shipped one where absent.
    pub model: Option<PathBuf>,
    /// What it runs on.
    pub input: Input,
    /// Decode steps.
    pub n_predict: Option<usize>,
    /// Where it runs.
    pub device: Device,
    /// The engine's arithmetic.
    pub numerics: Numerics,
    /// Prefill in pieces of so many tokens.
    pub chunk: Option<usize>,
    /// Dump that is judged in place of a run: compared with the reference, audited by itself where there is none.
    pub dump: Option<PathBuf>,
    /// Dump to compare with; looked for by model and tokens where absent.
    pub reference: Option<PathBuf>,
    /// Which checkpoints are looked at.
    pub selection: Selection,
    /// Tolerances of the case.
    pub tolerances: Tolerances,
    /// Faults to plant.
    pub inject: Vec<Spec>,
    /// What is to come of it.
    pub expect: Expect,
    /// What may differ.
    pub waivers: Vec<Waiver>,
    /// Problems that are no obstacle.
    pub allow: BTreeSet<ProblemKind>,
    /// How often to try again where it does not pass.
    pub retries: u32,
}

/// What a case runs on.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// The tokens of the reference.
    Reference,
    /// A text.
    Prompt(String),
    /// (T,) token ids.
    Tokens(Vec<u32>),
}

/// What is to come of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Expect {
    /// Parity, or the divergence that a planted fault must leave.
    pub verdict: Verdict,
    /// Where the fault must be found.
    pub at: Option<Checkpoint>,
    /// The name that it must be given.
    pub fault: Option<String>,
}

/// Checkpoints that may differ, why, and for how long.
#[derive(Clone)]
pub struct Waiver {
    /// As it is written.
    pub pattern: String,
    /// Which checkpoints.
    pub checkpoints: GlobMatcher,
    /// Why.
    pub reason: String,
    /// Last day on which it holds, YYYY-MM-DD.
    pub until: String,
}

impl Suite {
    /// Reads a suite; its paths are relative to its folder, and may begin with `$NAME/` for a folder that the
    /// environment names.
    pub fn read(path: &Path) -> Result<Suite> {
        let text = files::read(path, files::TEXT_BYTES_MAX)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        Suite::parse(&text, folder).map_err(|e| Error::file(path, e).hint("docs/ci.md describes suites"))
    }

    /// Keeps the cases whose ids match one of the patterns; all where there is none.
    pub fn only(&mut self, patterns: &[String]) -> Result<()> {
        let globs = select::patterns("--case", patterns)?;
        self.cases.retain(|case| globs.is_empty() || globs.is_match(&case.id));
        match self.cases.first() {
            Some(_) => Ok(()),
            None => Err(Error::new("--case", "no case has such a name").found(patterns.join(", "))),
        }
    }

    /// [`Suite::read`] from text.
    pub fn parse(text: &str, folder: &Path) -> std::result::Result<Suite, String> {
        let definition::Cases { name, baseline, cases } = definition::read(text, folder)?;
        if cases.is_empty() {
            return Err("the suite has no case".to_owned());
        }
        let mut ids = BTreeSet::new();
        if let Some(twice) = cases.iter().find(|case| !ids.insert(case.id.clone())) {
            return Err(format!("two cases are called `{}`", twice.id));
        }
        Ok(Suite { name, baseline, cases })
    }
}
