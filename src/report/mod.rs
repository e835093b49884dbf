//! What parity found, as data: the documented `parity-report/1`, and one file per format that renders it.
//!
//! Absence is null, never 0: a number that was not measured is `None`. JSON has no NaN: a measure that is
//! not finite is written as null and read back as NaN, which no tolerance passes.

pub mod csv;
pub mod detail;
pub mod diff;
pub mod files;
pub mod github;
pub mod html;
pub mod json;
pub mod junit;
pub mod markdown;
pub mod sensitivity;
pub mod table;
pub mod words;

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
    /// The side that it is held against; null in an audit of one dump.
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

/// A fault that was tried on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// Name in the catalogue.
    pub fault: String,
    /// Share of the squared local error that it accounts for; below 0 where it makes things worse.
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

/// One checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The checkpoint.
    pub id: Checkpoint,
    /// Its layer; null outside the layers.
    pub layer: Option<u32>,
    /// The answer.
    pub verdict: CheckpointVerdict,
    /// The answer's evidence in one sentence.
    #[serde(default)]
    pub evidence: Option<String>,
    /// The numbers; null where the two sides were not compared.
    #[serde(flatten, serialize_with = "numbers_or_nulls")]
    pub numbers: Option<Numbers>,
    /// Each side's distance from exact arithmetic on its own inputs.
    #[serde(default)]
    pub local: Local,
    /// Where the difference comes from; older reports call it `budget`.
    #[serde(default, alias = "budget")]
    pub parts: Option<DifferenceParts>,
    /// What the mistake is at an origin, best first, where it was looked for and found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diagnosis: Vec<Diagnosis>,
    /// Shape of the compared rows, slowest axis first.
    #[serde(default)]
    pub shape: Vec<usize>,
    /// How much of it was seen, where a side was only printed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<Seen>,
    /// What computes it, in ggml's words; absent where no graph is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub op: Option<String>,
    /// The checkpoints that it is computed from; absent where no graph is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<Checkpoint>,
}

/// The numbers of DESIGN section 5 for one pair of tensors a (candidate) and b (reference).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    /// Elements compared.
    pub n: u64,
    /// max |a-b|
    #[serde(deserialize_with = "nan_if_null")]
    pub abs_err_max: f64,
    /// mean |a-b|
    #[serde(deserialize_with = "nan_if_null")]
    pub abs_err_mean: f64,
    /// sqrt(mean (a-b)²)
    #[serde(deserialize_with = "nan_if_null")]
    pub rmse: f64,
    /// ‖a-b‖ / ‖b‖
    #[serde(deserialize_with = "nan_if_null")]
    pub rel_l2: f64,
    /// rel_l2²
    #[serde(deserialize_with = "nan_if_null")]
    pub nmse: f64,
    /// a·b / (‖a‖·‖b‖); null where a side is all zeros.
    pub cosine: Option<f64>,
    /// Share of a-b > 0 among the elements that differ; null where none does.
    #[serde(default)]
    pub sign_positive: Option<f64>,
    /// The largest difference.
    pub worst: Worst,
    /// NaN and Inf on each side.
    pub nonfinite: Nonfinite,
    /// The smallest tolerances that would have passed.
    pub tolerance_needed: ToleranceNeeded,
    /// rel_l2 of each token row, by position.
    #[serde(default, deserialize_with = "rows_nan_if_null")]
    pub row_rel_l2: Vec<(u32, f64)>,
}

/// The element that differs most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// Slowest axis first; the token row is given by its position.
    pub index: Vec<usize>,
    /// The candidate's value; null where it is not finite.
    pub candidate: Option<f64>,
    /// The reference's value; null where it is not finite.
    pub reference: Option<f64>,
}

/// Counts of NaN and Inf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nonfinite {
    /// In the candidate.
    pub candidate: u64,
    /// In the reference.
    pub reference: u64,
}

/// The smallest tolerances that would have passed, each alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToleranceNeeded {
    /// max |a-b| / |b| with atol 0; null where b is 0 and a is not.
    pub rtol: Option<f64>,
    /// max |a-b| with rtol 0.
    #[serde(deserialize_with = "nan_if_null")]
    pub atol: f64,
}

/// Both sides' distance from exact arithmetic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Local {
    /// The candidate's; null where it was not audited.
    pub candidate: Option<LocalError>,
    /// The reference's; null where it was not audited.
    pub reference: Option<LocalError>,
}

/// Distance of one recorded output from the exact output of its own recorded inputs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LocalError {
    /// ‖recorded - exact‖ / ‖exact‖
    #[serde(deserialize_with = "nan_if_null")]
    pub rel_l2: f64,
    /// max over elements of |recorded - exact| / bound: about 1 or less is healthy.
    #[serde(deserialize_with = "nan_if_null")]
    pub over_bound: f64,
    /// ‖bound‖ / ‖exact‖: the rounding band that `rel_l2` is to be held against.
    #[serde(default)]
    pub bound_rel_l2: Option<f64>,
    /// The same distance without the producer's declared rounding of activations ("from exact"); null
    /// where nothing is emulated.
    #[serde(default)]
    pub rel_l2_plain: Option<f64>,
    /// Element where `over_bound` is reached, slowest axis first, token row by position.
    #[serde(default)]
    pub worst: Vec<usize>,
    /// Token rows looked at.
    #[serde(default)]
    pub rows: u64,
    /// Nodes that were bridged because a checkpoint between was not recorded.
    #[serde(default)]
    pub bridged: Vec<Checkpoint>,
}

impl LocalError {
    /// Distance from exact arithmetic without anybody's rounding.
    pub fn from_exact(&self) -> f64 {
        self.rel_l2_plain.unwrap_or(self.rel_l2)
    }
}

/// The parts of the difference between candidate and reference, each relative to ‖reference‖.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DifferenceParts {
    /// The candidate's own rounding.
    #[serde(deserialize_with = "nan_if_null")]
    pub candidate: f64,
    /// The reference's own rounding.
    #[serde(deserialize_with = "nan_if_null")]
    pub reference: f64,
    /// What the inputs already differed by, carried through the node.
    #[serde(deserialize_with = "nan_if_null")]
    pub inherited: f64,
    /// Output distance over input distance, both relative: how the node amplifies what it inherits.
    #[serde(default)]
    pub amplification: Option<f64>,
}

/// From tensors to tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenReport {
    /// Share of rows whose most likely token is the same.
    pub top1_agree: f64,
    /// Mean over rows of KL(reference ‖ candidate), nats.
    #[serde(deserialize_with = "nan_if_null")]
    pub kl_mean: f64,
    /// Largest row's KL, nats.
    #[serde(default, deserialize_with = "nan_if_null")]
    pub kl_max: f64,
    /// Mean overlap of the top tokens, `top_k` of them.
    #[serde(default)]
    pub top_k_agree: f64,
    /// How many of the top tokens are held against each other.
    #[serde(default)]
    pub top_k: usize,
    /// First row whose most likely token differs.
    pub first_flip: Option<Flip>,
    /// The most likely tokens of the last row, or of the first flipped row.
    #[serde(default)]
    pub top: Vec<TopToken>,
    /// KL of each row by position, nats.
    #[serde(default, deserialize_with = "rows_nan_if_null")]
    pub kl_rows: Vec<(u32, f64)>,
}

/// A row whose most likely token differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flip {
    /// Token position of the row.
    pub position: u32,
    /// The candidate's most likely token.
    pub candidate: u32,
    /// The reference's.
    pub reference: u32,
    /// By how much the reference prefers its own, in logits.
    #[serde(deserialize_with = "nan_if_null")]
    pub margin: f64,
    /// max |a-b| over this row's logits.
    #[serde(deserialize_with = "nan_if_null")]
    pub logit_error: f64,
    /// Whether the margin is within twice the logit error: then rounding can have flipped it.
    pub explained_by_error: bool,
}

/// One of the most likely tokens of a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopToken {
    /// Token id.
    pub token: u32,
    /// Its text, where a tokenizer is at hand.
    pub text: Option<String>,
    /// The candidate's logit.
    #[serde(deserialize_with = "nan_if_null")]
    pub candidate: f64,
    /// The reference's logit.
    #[serde(deserialize_with = "nan_if_null")]
    pub reference: f64,
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

/// Writes the fields of absent numbers as null rather than leaving them out.
fn numbers_or_nulls<S: Serializer>(numbers: &Option<Numbers>, serializer: S) -> Result<S::Ok, S::Error> {
    /// The fields of [`Numbers`], all null.
    #[derive(Default, Serialize)]
    struct NoNumbers {
        n: (),
        abs_err_max: (),
        abs_err_mean: (),
        rmse: (),
        rel_l2: (),
        nmse: (),
        cosine: (),
        sign_positive: (),
        worst: (),
        nonfinite: (),
        tolerance_needed: (),
        row_rel_l2: (),
    }
    match numbers {
        Some(numbers) => numbers.serialize(serializer),
        None => NoNumbers::default().serialize(serializer),
    }
}
