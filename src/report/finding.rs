//! What is wrong, or differs between two sides, and is no checkpoint: a number of a file or of a run.

use super::Report;
use crate::inspect::against::Difference;
use serde::{Deserialize, Serialize};

/// One thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Its name, e.g. `config.rope.freq_base`.
    pub name: String,
    /// Where it is: a file, a node.
    #[serde(rename = "where")]
    pub location: String,
    /// What the original, the reference or the first side has; null where it has nothing.
    pub original: Option<String>,
    /// What the other side has; null where it has nothing.
    pub converted: Option<String>,
    /// What follows from it, in a sentence.
    pub effect: String,
}

impl From<&Difference> for Finding {
    fn from(found: &Difference) -> Finding {
        Finding {
            name: found.name.clone(),
            location: found.place.clone(),
            original: Some(found.original.clone()),
            converted: Some(found.converted.clone()),
            effect: found.effect.clone(),
        }
    }
}

/// Families of names whose findings are of a setting that both sides have; all others are of a weight.
const SETTINGS: [&str; 5] = ["config.", "tokens.", "template.", "generation.", "lora."];

/// What it says of both sides, and what follows.
pub fn text(found: &Finding) -> String {
    let said = |side: &Option<String>| side.clone().unwrap_or_else(|| "nothing".to_owned());
    let (original, converted) = (said(&found.original), said(&found.converted));
    if SETTINGS.iter().any(|family| found.name.starts_with(family)) {
        return format!(
            "{}: {converted}, the original says {original}: {} ({})",
            found.name, found.effect, found.location
        );
    }
    let verb = if converted.starts_with("is ") { " " } else { ": " };
    format!("{}: {}{verb}{converted}: {}", found.name, found.location, found.effect)
}

/// What a reader must know beside the answer: what differs and is no checkpoint, unless the answer's sentences say it, then
/// notes on the inputs.
pub fn notes(report: &Report) -> Vec<String> {
    let is_said = |text: &String| report.reason.as_ref().is_some_and(|reason| reason.contains(text));
    let findings = report.findings.iter().filter(|_| report.answer.is_empty()).map(text);
    let findings = findings.filter(|text| !is_said(text));
    findings.chain(report.notes.iter().cloned()).collect()
}
