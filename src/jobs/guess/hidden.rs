//! Hidden states: each is judged from the one before it, so that the layer is known and what is wrong in it is looked
//! for there alone. That is an audit of a dump that has nothing else.

use std::path::Path;

use super::hypotheses::HEALTHY;
use super::said::{Guess, Named, of_audit};
use crate::audit::AuditRows;
use crate::dump::Recording;
use crate::engine::fused::file::ModelFile;
use crate::error::Result;
use crate::foreign;
use crate::jobs::audit::{Options, audit};
use crate::report::{Report, Verdict};
use crate::select::Selection;

/// Judges hidden states of `prompt`, whose tokens the file may say itself.
///
/// # Errors
/// What is no dump, or another model's.
pub fn hidden(file: &ModelFile, path: &Path, prompt: &[u32]) -> Result<Guess> {
    let tokens = (!prompt.is_empty()).then(|| prompt.to_vec());
    let model = Some(file.gguf().path().to_owned());
    let own = foreign::is_native(path);
    let options = foreign::Options { names: None, tokens: tokens.filter(|_| !own), model };
    let mut dump = foreign::open(path, &options)?;
    let rows = Recording::tokens(&dump).len();
    let how = Options { selection: Selection::default(), rows: AuditRows::default(), allow_missing: true };
    let report = audit(&mut dump, file, &how)?;
    Ok(of_audit(named(&report), rows))
}

fn named(report: &Report) -> Named {
    let first = report.first_divergence.as_ref();
    let diagnosis = first.map(|first| first.diagnosis.clone()).unwrap_or_default();
    let at = first.map(|first| first.checkpoint.to_string());
    let answer = match report.verdict {
        Verdict::Parity => Some(HEALTHY.to_owned()),
        Verdict::Divergence => diagnosis.first().map(|one| one.fault.clone()),
        Verdict::Undecided => None,
    };
    let text = match (report.verdict, &at, diagnosis.first()) {
        (Verdict::Parity, ..) => "HEALTHY: every hidden state follows from the one before it".to_owned(),
        (_, Some(at), Some(one)) => format!("{}: {} (at {at})", one.fault, one.text),
        (_, Some(at), None) => format!(
            "UNDECIDED: {at} does not follow from the state before it, and no known mistake explains it"
        ),
        (_, None, _) => format!(
            "UNDECIDED: {}",
            report.reason.clone().unwrap_or_else(|| "the states do not say it".to_owned())
        ),
    };
    let next =
        at.map(|at| format!("the one tensor to dump next: those between {at} and the layer before it"));
    Named {
        answer,
        text,
        layer: first.and_then(|first| first.layer),
        diagnosis,
        next: next.into_iter().collect(),
    }
}
