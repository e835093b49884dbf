//! A suite: which cases there are, and what is to come of each.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use globset::GlobMatcher;

use super::ProblemKind;
use super::definition::{self, Families};
use super::family::Family;
use crate::checkpoint::Checkpoint;
use crate::compare::Tolerances;
use crate::engine::device::Device;
use crate::error::{Error, Result};
use crate::files;
use crate::numerics::Numerics;
use crate::report::Verdict;
use crate::select::{self, Selection};

/// A suite. Its cases are made when they are run: a few lines of a file can stand for very many.
pub struct Suite {
    /// Its name.
    pub name: String,
    /// File of its baseline, where it has one.
    pub baseline: Option<PathBuf>,
    families: Vec<Family>,
    /// Family and index of each case, in the order of the file.
    cases: Vec<(usize, usize)>,
}

/// Cases of a suite: the name and the result of each are held until the last one is done.
const CASES_MAX: usize = 100_000;

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
    /// LoRA adapters of the model, each with its scale.
    pub lora: Vec<(PathBuf, f32)>,
    /// Which checkpoints are looked at.
    pub selection: Selection,
    /// Tolerances of the case.
    pub tolerances: Tolerances,
    /// Faults to inject.
    pub inject: Vec<parity_graph::fault::Wanted>,
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
    /// A text, shared by all cases that it is the prompt of.
    Prompt(Arc<str>),
    /// (T,) token ids.
    Tokens(Arc<[u32]>),
}

/// What is to come of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Expect {
    /// Parity, or the divergence that an injected fault must leave.
    pub verdict: Verdict,
    /// Whether equal bits are asked for.
    pub identical: bool,
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

    /// Number of cases.
    pub fn n_cases(&self) -> usize {
        self.cases.len()
    }

    /// Names of the cases, in the order of the file.
    pub fn ids(&self) -> impl Iterator<Item = String> + '_ {
        self.cases.iter().map(|&(family, index)| self.families[family].id(index))
    }

    /// The case with this index, below [`Suite::n_cases`].
    pub fn case(&self, index: usize) -> Case {
        let (family, index) = self.cases[index];
        self.families[family].case(index)
    }

    /// Keeps the cases whose ids match one of the patterns; all where there is none.
    pub fn only(&mut self, patterns: &[String]) -> Result<()> {
        let globs = select::patterns("--case", patterns)?;
        let families = &self.families;
        self.cases.retain(|&(family, index)| globs.is_empty() || globs.is_match(families[family].id(index)));
        match self.cases.first() {
            Some(_) => Ok(()),
            None => Err(Error::new("--case", "no case has such a name").found(patterns.join(", "))),
        }
    }

    /// [`Suite::read`] from text.
    pub fn parse(text: &str, folder: &Path) -> std::result::Result<Suite, String> {
        let Families { name, baseline, families } = definition::read(text, folder)?;
        let all = families.iter().try_fold(0usize, |sum, family| sum.checked_add(family.len()?));
        match all {
            Some(0) => return Err("the suite has no case".to_owned()),
            Some(1..=CASES_MAX) => {}
            _ => {
                let n = all.map_or("more than can be counted".to_owned(), |n| n.to_string());
                return Err(format!(
                    "its axes stand for too many cases: {n}, and at most {CASES_MAX} are run at once; split the suite"
                ));
            }
        }
        let of =
            |(family, of): (usize, &Family)| (0..of.len().unwrap_or(0)).map(move |index| (family, index));
        let cases = families.iter().enumerate().flat_map(of).collect();
        let suite = Suite { name, baseline, families, cases };
        let mut ids = BTreeSet::new();
        let twice = suite.ids().find(|id| !ids.insert(id.clone()));
        match twice {
            Some(twice) => Err(format!("two cases are called `{twice}`")),
            None => Ok(suite),
        }
    }
}
