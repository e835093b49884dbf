//! What a report says of one checkpoint.

use serde::{Deserialize, Serialize, Serializer};

use super::{CheckpointVerdict, Diagnosis, Seen, nan_if_null, rows_nan_if_null};
use crate::checkpoint::Checkpoint;

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
    /// Whether the bits of both sides are equal, where that was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<Bits>,
    /// What computes it, in ggml's words; absent where no graph is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub op: Option<String>,
    /// The checkpoints that it is computed from; absent where no graph is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<Checkpoint>,
}

/// The bits of both sides, of the rows that both have: 0 and -0 differ, and so do two NaN of other bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bits {
    /// Whether all are equal.
    pub equal: bool,
    /// Position of the first row with an element that differs; null where none does.
    pub first_row: Option<u32>,
    /// How many elements differ; null where hashes alone are known.
    pub elements: Option<u64>,
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
    /// ‖bound‖ / ‖exact‖: the rounding band that `rel_l2` is to be compared with.
    #[serde(default)]
    pub bound_rel_l2: Option<f64>,
    /// The same distance without the producer's declared rounding of activations ("from exact"); null
    /// where nothing is emulated.
    #[serde(default)]
    pub rel_l2_plain: Option<f64>,
    /// Element where `over_bound` is reached, slowest axis first, token row by position.
    #[serde(default)]
    pub worst: Vec<usize>,
    /// What was recorded there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worst_recorded: Option<f64>,
    /// What exact arithmetic makes of the recorded inputs there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worst_exact: Option<f64>,
    /// Token rows looked at.
    #[serde(default)]
    pub rows: u64,
    /// Nodes that were bridged because a checkpoint between was not recorded.
    #[serde(default)]
    pub bridged: Vec<Checkpoint>,
    /// Every arithmetic that explains it in some step, where these were looked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arithmetic: Vec<String>,
}

/// A mistake m and a rounding r leave d² = m² + r² − 2mrc, so that m is at most d ⁄ √(1 − c²) whatever r is: with a cosine c of √3⁄2,
/// and thousands of roundings that know nothing of the mistake hardly point in its direction at all, 2d. It is also what leads from
/// one end of what rounding explains to the other.
const IN_ONE_DIRECTION: f64 = 2.0;

impl LocalError {
    /// Up to what a mistake may move the node, relative, that its error does not show.
    pub fn hides(&self) -> Option<f64> {
        Some(IN_ONE_DIRECTION * self.over_bound.min(1.0) * self.bound_rel_l2?)
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
