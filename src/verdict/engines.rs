//! Fixes in the words of the engine that a dump names.

use parity_graph::fault::fix_in;

use crate::report::{CheckpointVerdict, Diagnosis, Report};

/// Says of every mistake how it is mended in the engine that made it, where that is known.
pub fn speak_of_engines(report: &mut Report) {
    let architecture = report.candidate.model.architecture.clone().unwrap_or_else(|| "{arch}".to_owned());
    let mend = |producer: &str, diagnosis: &mut Diagnosis| {
        if let Some(fix) = fix_in(producer, &diagnosis.fault) {
            diagnosis.fix = Some(fix.replace("{arch}", &architecture));
        }
    };
    let ours = report.candidate.producer.name.clone();
    let theirs = report.reference.as_ref().map_or_else(String::new, |side| side.producer.name.clone());
    for entry in &mut report.checkpoints {
        let producer = if entry.verdict == CheckpointVerdict::Reference { &theirs } else { &ours };
        entry.diagnosis.iter_mut().for_each(|diagnosis| mend(producer, diagnosis));
    }
    for diagnosis in report.first_divergence.iter_mut().flat_map(|first| &mut first.diagnosis) {
        mend(&ours, diagnosis);
    }
}
