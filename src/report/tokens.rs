//! What differing logits come to in tokens.

use serde::{Deserialize, Serialize};

use super::{nan_if_null, rows_nan_if_null};

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
    /// How many of the top tokens are compared with each other.
    #[serde(default)]
    pub top_k: usize,
    /// First row whose most likely token differs.
    pub first_flip: Option<Flip>,
    /// The most likely tokens of the last row, or of the first flipped row.
    #[serde(default)]
    pub top: Vec<TopToken>,
    /// The most likely token of each row, in order of position.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chosen: Vec<Chosen>,
    /// KL of each row by position, nats.
    #[serde(default, deserialize_with = "rows_nan_if_null")]
    pub kl_rows: Vec<(u32, f64)>,
}

/// What each side would say behind a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chosen {
    /// Token position of the row.
    pub position: u32,
    /// The candidate's most likely token.
    pub candidate: u32,
    /// The reference's.
    pub reference: u32,
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
