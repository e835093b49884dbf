//! The gate: a suite of cases, each judged against what is expected of it and against its baseline.
//!
//! Nothing missing passes in silence: an absent reference, a device that is not there and a case in which
//! nothing was compared fail unless the suite allows them by name.

pub mod baseline;
mod definition;
pub mod execute;
mod family;
pub mod judge;
pub mod render;
pub mod schedule;
pub mod suite;
pub mod times;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files;
use crate::report::{Coverage, Verdict};
use baseline::{Measures, Moved};
use schedule::Shard;

/// Name and version of the result format.
pub const SCHEMA: &str = "parity-gate/1";

/// What a suite came to. Serialised as `gate.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// Name of the suite.
    pub suite: String,
    /// Ids of all its cases, in order; a shard has run only some of them.
    pub all: Vec<String>,
    /// Which part was run, e.g. `2/5`; null where all was.
    pub shard: Option<String>,
    /// The cases that were run, in the order of the suite.
    pub cases: Vec<CaseResult>,
    /// When, RFC 3339 in UTC; `SOURCE_DATE_EPOCH` fixes it.
    pub created: Option<String>,
}

/// What one case came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    /// Name of the case and what tells it from others of its definition.
    pub id: String,
    /// Number of its `[[case]]` in the suite, from 0.
    pub definition: usize,
    /// The answer.
    pub status: Status,
    /// What the report said; null where there is none.
    pub verdict: Option<Verdict>,
    /// The report's answer in one sentence.
    pub answer: String,
    /// Why it does not pass; of an allowed case, what was allowed.
    pub problems: Vec<Problem>,
    /// The waivers of its definition.
    pub waivers: Vec<WaiverUse>,
    /// Checkpoints that moved away from the baseline, in execution order.
    pub moved: Vec<Moved>,
    /// How often it was run; more than once is worth a look even where it passed.
    pub attempts: u32,
    /// How much was compared.
    pub coverage: Coverage,
    /// A command that shows the problem alone.
    pub next: Option<String>,
    /// What a baseline keeps.
    pub measures: Measures,
    /// How long it took; kept apart from the result, which is the same from run to run.
    #[serde(skip)]
    pub seconds: Option<f64>,
}

/// The answer of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As expected.
    Passed,
    /// Not run or not judged, and the suite allows that by name.
    Allowed,
    /// Not as expected.
    Failed,
    /// It could not be judged.
    Undecided,
}

/// Why a case does not pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// The kind; also the name by which a suite allows those that can be allowed.
    pub kind: ProblemKind,
    /// One sentence.
    pub text: String,
}

/// Kinds of problems. The suite's `allow` names those that concern what is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// The candidate has a fault.
    Divergence,
    /// An injected fault left no divergence.
    FaultNotFound,
    /// It was found at another node, or under another name.
    FaultMistaken,
    /// Worse than the baseline.
    Regression,
    /// A waiver is past its date.
    ExpiredWaiver,
    /// The case could not be executed.
    Error,
    /// The report could not decide.
    Undecided,
    /// The model is not there.
    MissingModel,
    /// There is no recording to compare with.
    MissingReference,
    /// The device is not there.
    SkippedDevice,
    /// Nothing was compared.
    NothingCompared,
    /// Checkpoints are missing on a side.
    MissingCheckpoints,
    /// The baseline has no entry for the case.
    MissingBaseline,
    /// No shard has run the case.
    NotRun,
    /// The baseline has an entry for a case that the suite has not.
    MissingCase,
}

impl ProblemKind {
    /// Whether it is a judgement, and not the lack of one.
    pub fn is_judgement(self) -> bool {
        matches!(
            self,
            ProblemKind::Divergence
                | ProblemKind::FaultNotFound
                | ProblemKind::FaultMistaken
                | ProblemKind::Regression
                | ProblemKind::ExpiredWaiver
        )
    }

    /// Whether a suite can allow it by name.
    pub fn can_be_allowed(self) -> bool {
        matches!(
            self,
            ProblemKind::MissingModel
                | ProblemKind::MissingReference
                | ProblemKind::SkippedDevice
                | ProblemKind::NothingCompared
                | ProblemKind::MissingCheckpoints
                | ProblemKind::MissingBaseline
        )
    }
}

/// A waiver and whether it was needed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WaiverUse {
    /// Pattern of the checkpoints.
    pub checkpoint: String,
    /// Why they may differ.
    pub reason: String,
    /// Last day on which it holds, YYYY-MM-DD.
    pub until: String,
    /// How many problems it covered.
    pub fired: usize,
}

impl GateReport {
    /// The answer of the whole: failed cases first, then those that could not be judged. A gate that ran
    /// nothing has judged nothing.
    pub fn verdict(&self) -> Verdict {
        let any = |status| self.cases.iter().any(|case| case.status == status);
        if any(Status::Failed) {
            Verdict::Divergence
        } else if any(Status::Undecided) || !any(Status::Passed) {
            Verdict::Undecided
        } else {
            Verdict::Parity
        }
    }

    /// Number of cases with this answer.
    pub fn count(&self, status: Status) -> usize {
        self.cases.iter().filter(|case| case.status == status).count()
    }

    /// Waivers that covered nothing in any case of their definition, with the first case that carries them.
    /// A shard cannot tell: others may need them.
    pub fn stale_waivers(&self) -> Vec<(&CaseResult, &WaiverUse)> {
        if self.shard.is_some() {
            return Vec::new();
        }
        let mut uses: BTreeMap<(usize, usize), (&CaseResult, usize)> = BTreeMap::new();
        for case in &self.cases {
            for (index, waiver) in case.waivers.iter().enumerate() {
                uses.entry((case.definition, index)).or_insert((case, 0)).1 += waiver.fired;
            }
        }
        let stale = uses.into_iter().filter(|(_, (_, fired))| *fired == 0);
        stale.map(|((_, index), (case, _))| (case, &case.waivers[index])).collect()
    }
}

/// Puts the results of shards together. What none of them ran is a case that could not be judged.
///
/// # Errors
/// Results of different suites, and cases that two of them ran.
pub fn merge(parts: Vec<GateReport>) -> Result<GateReport> {
    let lost = lost(&parts);
    let mut parts = parts.into_iter();
    let mut whole = parts.next().ok_or_else(|| {
        Error::new("parity gate merge", "there is nothing to merge").expected("gate.json files")
    })?;
    for part in parts {
        if (&part.suite, &part.all) != (&whole.suite, &whole.all) {
            return Err(Error::new("parity gate merge", "the results belong to different suites")
                .expected(format!("{} with {} cases", whole.suite, whole.all.len()))
                .found(format!("{} with {} cases", part.suite, part.all.len())));
        }
        whole.created = whole.created.max(part.created);
        whole.cases.extend(part.cases);
    }
    // Every shard says which cases the suite lacks.
    let mut lacking = BTreeSet::new();
    let all: BTreeSet<&String> = whole.all.iter().collect();
    whole.cases.retain(|case| all.contains(&case.id) || lacking.insert(case.id.clone()));
    let mut seen = BTreeSet::new();
    if let Some(twice) = whole.cases.iter().find(|case| !seen.insert(case.id.clone())) {
        return Err(Error::new(&twice.id, "two results have this case").hint("merge each shard once"));
    }
    let mut by_id: BTreeMap<String, CaseResult> =
        whole.cases.into_iter().map(|case| (case.id.clone(), case)).collect();
    whole.cases = whole.all.iter().map(|id| by_id.remove(id).unwrap_or_else(|| not_run(id, &lost))).collect();
    whole.cases.extend(by_id.into_values());
    whole.shard = None;
    Ok(whole)
}

/// A case that only a baseline knows.
pub fn missing(id: &str) -> CaseResult {
    let text =
        "the baseline has an entry for it, the suite has no such case: --accept takes it out".to_owned();
    CaseResult { problems: vec![Problem { kind: ProblemKind::MissingCase, text }], ..not_run(id, "") }
}

/// Which shards have left no result, where those that did say how many there were: `shards 2/5 and 4/5 left no result`.
fn lost(parts: &[GateReport]) -> String {
    let shards: Vec<Shard> =
        parts.iter().filter_map(|part| part.shard.as_ref()).filter_map(|name| name.parse().ok()).collect();
    let lost: Vec<String> = Shard::missing(&shards).iter().map(Shard::to_string).collect();
    match lost.as_slice() {
        [] => String::new(),
        [one] => format!("; shard {one} left no result"),
        [most @ .., last] => format!("; shards {} and {last} left no result", most.join(", ")),
    }
}

/// A case without a result; `lost` says of which shards there is none.
fn not_run(id: &str, lost: &str) -> CaseResult {
    CaseResult {
        id: id.to_owned(),
        definition: usize::MAX,
        status: Status::Undecided,
        verdict: None,
        answer: "not run".to_owned(),
        problems: vec![Problem { kind: ProblemKind::NotRun, text: format!("no shard has run it{lost}") }],
        waivers: Vec::new(),
        moved: Vec::new(),
        attempts: 0,
        coverage: Coverage::default(),
        next: None,
        measures: Measures::default(),
        seconds: None,
    }
}

/// Reads a `gate.json`; `path` may be the folder that holds it.
pub fn read(path: &Path) -> Result<GateReport> {
    let path = if path.is_dir() { path.join("gate.json") } else { path.to_owned() };
    let text = files::read(&path, files::OUTPUT_BYTES_MAX)
        .map_err(|e| e.hint("`parity gate --report DIR` writes one"))?;
    let report: GateReport = serde_json::from_str(&text)
        .map_err(|e| Error::file(&path, format!("is no result of a gate: {e}")))?;
    if report.schema != SCHEMA {
        return Err(Error::file(&path, "another result format").expected(SCHEMA).found(&report.schema));
    }
    Ok(report)
}
