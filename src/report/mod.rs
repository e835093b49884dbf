//! What parity found, as data: the documented `parity-report/1`, and one file per format that renders it.
//!
//! Absence is null, never 0: a number that was not measured is `None`. JSON has no NaN: a measure that is
//! not finite is written as null and read back as NaN, which no tolerance passes.

pub mod csv;
pub mod detail;
pub mod diff;
mod entry;
pub mod files;
pub mod finding;
pub mod github;
pub mod html;
pub mod json;
pub mod junit;
pub mod markdown;
pub mod sarif;
pub mod sensitivity;
pub mod table;
mod tokens;
pub mod words;

pub use entry::{
    Bits, DifferenceParts, Entry, Local, LocalError, Nonfinite, Numbers, ToleranceNeeded, Worst,
};
pub use finding::Finding;
pub use tokens::{Chosen, Flip, TokenReport, TopToken};

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::checkpoint::Checkpoint;
use parity_dump::manifest::{ModelInfo, Producer};

/// Name and version of the report format.
pub const SCHEMA: &str = "parity-report/1";

/// Everything one command found. Serialised as `report.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// The answer.
    pub verdict: Verdict,
    /// Why the answer is `undecided`, where it is; what limits it otherwise.
    #[serde(default)]
    pub reason: Option<String>,
    /// The first node with a fault of its own.
    pub first_divergence: Option<FirstDivergence>,
    /// Every node with a fault of its own, in execution order.
    pub origins: Vec<Checkpoint>,
    /// The answer in sentences, where there is more of it than a verdict: of two runs of one program, which of them is wrong,
    /// and what each computes with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub answer: Vec<String>,
    /// What is wrong, or differs, and is no checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// Tokens that nothing is known of, so that agreement elsewhere is no parity; absent without any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gaps: Vec<String>,
    /// How much was compared.
    pub coverage: Coverage,
    /// One entry per checkpoint of either side, in execution order.
    pub checkpoints: Vec<Entry>,
    /// From tensors to tokens; null where the logits were not compared.
    pub tokens: Option<TokenReport>,
    /// The side that is judged.
    pub candidate: Side,
    /// The side that it is compared with; null in an audit of one dump.
    pub reference: Option<Side>,
    /// Sentences about the inputs that a reader must know (other tokens, an interrupted dump, …).
    #[serde(default)]
    pub notes: Vec<String>,
    /// The command line that made this report.
    #[serde(default)]
    pub command: Option<String>,
    /// Commands to go on with, the most useful first; [`FirstDivergence::reproduce`] need not be among them.
    #[serde(default)]
    pub next: Vec<String>,
    /// When it was made, RFC 3339 in UTC; `SOURCE_DATE_EPOCH` fixes it.
    #[serde(default)]
    pub created: Option<String>,
    /// Pictures of the differences, for the HTML report; not part of `report.json`.
    #[serde(skip)]
    pub details: Vec<detail::Detail>,
}

impl Default for Report {
    /// A report of nothing: undecided.
    fn default() -> Self {
        Report {
            schema: SCHEMA.to_owned(),
            verdict: Verdict::Undecided,
            reason: None,
            first_divergence: None,
            origins: Vec::new(),
            answer: Vec::new(),
            findings: Vec::new(),
            gaps: Vec::new(),
            coverage: Coverage::default(),
            checkpoints: Vec::new(),
            tokens: None,
            candidate: Side::default(),
            reference: None,
            notes: Vec::new(),
            command: None,
            next: Vec::new(),
            created: None,
            details: Vec::new(),
        }
    }
}

/// The answer of a whole run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Nothing differs by more than rounding explains. Exit code 0.
    Parity,
    /// Something does. Exit code 1.
    Divergence,
    /// It could not be judged, e.g. because nothing was compared. Exit code 2.
    Undecided,
}

/// The answer for one checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointVerdict {
    /// The difference is within what rounding explains.
    Match,
    /// It is larger, but the node is healthy: its input was not.
    Inherited,
    /// The candidate's local error is beyond what rounding explains: the bug is in this node.
    Origin,
    /// The reference's local error is.
    Reference,
    /// Beyond a tolerance that the user gave, without evidence on either side's local error.
    Beyond,
    /// One side does not have it.
    Missing,
    /// The two sides have different shapes.
    Shape,
    /// NaN or Inf on a side.
    Nonfinite,
    /// The first whose bits differ, where equal bits were asked for.
    Bits,
    /// Explained, but only by a coarser arithmetic than was declared or than its class shows. Where it was declared, it is
    /// one of the origins.
    Precision,
    /// No evidence either way.
    Undecided,
}

/// Where and what the bug is, and what to type next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstDivergence {
    /// The node.
    pub checkpoint: Checkpoint,
    /// Its layer; null outside the layers.
    pub layer: Option<u32>,
    /// `origin`, `nonfinite`, `shape`, or `beyond` without audit evidence.
    pub verdict: CheckpointVerdict,
    /// What the node reads.
    #[serde(default)]
    pub inputs: Vec<Checkpoint>,
    /// What the mistake is, best first; empty where no known fault explains the error.
    pub diagnosis: Vec<Diagnosis>,
    /// What the error looks like, and what was tried, where no fault explains it.
    #[serde(default)]
    pub residual: Option<String>,
    /// Faults that were tried and do not explain the error, best first.
    #[serde(default)]
    pub tried: Vec<Tried>,
    /// A command that shows this node alone.
    pub reproduce: Option<String>,
}

impl FirstDivergence {
    /// A node of which nothing but its verdict is known.
    pub fn at(checkpoint: Checkpoint, verdict: CheckpointVerdict) -> FirstDivergence {
        FirstDivergence {
            checkpoint,
            layer: checkpoint.layer_index(),
            verdict,
            inputs: Vec::new(),
            diagnosis: Vec::new(),
            residual: None,
            tried: Vec::new(),
            reproduce: None,
        }
    }
}

impl Report {
    /// Makes it a divergence that begins there.
    pub fn diverge(&mut self, first: FirstDivergence) {
        (self.verdict, self.reason, self.first_divergence) = (Verdict::Divergence, None, Some(first));
    }

    /// Makes it a divergence that is no node's, unless it is one already.
    pub fn diverge_by(&mut self, reason: String) {
        if self.verdict != Verdict::Divergence {
            (self.verdict, self.reason) = (Verdict::Divergence, Some(reason));
        }
    }

    /// Leaves the answer open for a reason that parity does not outweigh; whatever else it is stays.
    pub fn leave_open(&mut self, reason: String) {
        if self.verdict == Verdict::Parity {
            (self.verdict, self.reason) = (Verdict::Undecided, Some(reason));
        }
    }

    /// Says that it could not be judged, unless it is a divergence: the reason stands in the place of any other.
    pub fn cannot_be_judged(&mut self, reason: String) {
        if self.verdict != Verdict::Divergence {
            (self.verdict, self.reason) = (Verdict::Undecided, Some(reason));
        }
    }

    /// Adds a node to those with a fault of their own, in execution order; one that was not looked at comes first.
    pub fn originates(&mut self, id: Checkpoint) {
        let place = |id: Checkpoint| self.checkpoints.iter().position(|entry| entry.id == id);
        let at = self.origins.partition_point(|other| place(*other) < place(id));
        if !self.origins.contains(&id) {
            self.origins.insert(at, id);
        }
    }
}

/// A fault that was tried on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// Name in the catalogue.
    pub fault: String,
    /// Share of the squared local error that it accounts for; 0 where it makes things worse.
    #[serde(deserialize_with = "nan_if_null")]
    pub explains: f64,
}

/// A fault that explains a node's error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Name in the catalogue, e.g. `rope.base`.
    pub fault: String,
    /// Share of the squared local error that the fault accounts for, 0 to 1.
    pub explains: f64,
    /// One sentence with the fitted parameter.
    pub text: String,
    /// How people mend it.
    #[serde(default)]
    pub fix: Option<String>,
}

/// How much of what there was to compare was compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Checkpoints with numbers.
    pub checkpoints_compared: usize,
    /// Checkpoints that one side lacks.
    pub checkpoints_missing: usize,
    /// Elements over all checkpoints.
    pub elements_compared: u64,
    /// Token rows over all checkpoints.
    pub rows_compared: u64,
    /// Token rows that a complete pair of dumps would have.
    pub rows_expected: u64,
    /// Token rows whose local error was computed; null without audit.
    #[serde(default)]
    pub rows_audited: Option<u64>,
    /// Token rows, over checkpoints and sides, that an audit's sample left out and that were screened for values
    /// that rounding may not explain.
    #[serde(default)]
    pub rows_screened: Option<u64>,
    /// How much was seen of the checkpoints of which a side has only printed values; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<Seen>,
}

/// How much of a tensor is known, where a side was only printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Values that were printed.
    pub values: u64,
    /// Values that there are in the rows that were compared.
    pub of: u64,
    /// The printed sum; null where there is none, or rows of it were not computed.
    pub sum: Option<SumCheck>,
}

/// The sum over a tensor on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SumCheck {
    /// The candidate's.
    #[serde(deserialize_with = "nan_if_null")]
    pub candidate: f64,
    /// The reference's.
    #[serde(deserialize_with = "nan_if_null")]
    pub reference: f64,
    /// By how much they may differ where the values agree as far as they were seen.
    #[serde(deserialize_with = "nan_if_null")]
    pub bound: f64,
    /// How many values were added up.
    pub terms: u64,
}

impl SumCheck {
    /// The distance over the bound: about 1 or less is agreement; NaN where a sum is.
    pub fn over(&self) -> f64 {
        (self.candidate - self.reference).abs() / self.bound
    }
}

/// Where one side's values come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Side {
    /// Folder or file of the dump; null where it was never written.
    pub path: Option<String>,
    /// Who computed it.
    pub producer: Producer,
    /// With which model.
    pub model: ModelInfo,
    /// Token positions.
    pub tokens: usize,
    /// Token positions of each step, e.g. [7, 1, 1] for a prompt of 7 and two decode steps.
    pub steps: Vec<usize>,
    /// How the dump was made.
    #[serde(default)]
    pub provenance: BTreeMap<String, String>,
}

/// Reads a number that JSON could not hold: null is NaN.
fn nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// [`nan_if_null`] for numbers by token position.
fn rows_nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(u32, f64)>, D::Error> {
    let rows = Vec::<(u32, Option<f64>)>::deserialize(deserializer)?;
    Ok(rows.into_iter().map(|(position, value)| (position, value.unwrap_or(f64::NAN))).collect())
}
