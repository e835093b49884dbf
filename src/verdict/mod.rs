//! From comparisons and audits to answers: one for each checkpoint, one for the whole.
//!
//! Answers are data until the report is put together: a verdict and [`Why`], which `text` puts into a sentence.

use crate::audit::{Carried, OwnDistance};
use crate::dump::{Recording, Unfinite};
use crate::gguf::Gguf;
use crate::report::{Report, Side};

mod bracket;
mod cells;
mod computed;
mod contexts;
mod engines;
mod entry;
mod gap;
mod left_out;
mod masks;
mod nodes;
pub mod numbers;
mod pooled;
mod rollbacks;
mod text;
mod weights;
mod whole;
mod whole_of_numbers;
mod wiring;

pub use computed::{notes, weigh_precision};
pub use engines::speak_of_engines;
pub use entry::Known;
pub use gap::{Gap, gaps, refuse_gaps, spoken};
pub use left_out::{is_left_out, left_out, not_compared, not_looked_at, tried};
pub use masks::weigh_masks;
pub use nodes::describe_recorded;
pub use pooled::weigh_pooled;
pub use weights::weigh;
pub use whole::{assemble, entries};
pub use wiring::{Claim, File, apart, unlike, weigh_wiring};

/// What an answer rests on.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// The values are equal, and nothing was audited.
    Equal,
    /// A tolerance that the user gave.
    Tolerance {
        /// Whether it holds.
        within: bool,
    },
    /// What is not there.
    Lacking(&'static str),
    /// So many of the reference's rows are not there.
    LackingRows(u64),
    /// So many of its tensors are of steps that the other side has not.
    OtherSteps(u64),
    /// Two shapes of a row.
    Shapes {
        /// The candidate's.
        candidate: Vec<usize>,
        /// The reference's.
        reference: Vec<usize>,
    },
    /// NaN and Inf in the candidate.
    Nonfinite {
        /// How many.
        count: Unfinite,
        /// Where they come from, in words.
        from: &'static str,
    },
    /// So many NaN and Inf in the reference alone.
    ReferenceNonfinite(u64),
    /// The output alone is known, and farther from an exact forward pass than rounding explains.
    BeyondPass(OwnDistance),
    /// Nothing that it is computed from is known.
    Alone,
    /// The sides differ, and nothing was audited.
    Differs,
    /// There is no row of it.
    NotRecorded,
    /// Nodes before it were not looked at, and what rounding carries through them is not known.
    Unseen {
        /// From the reference.
        distance: f64,
    },
    /// Nodes before it were not looked at; what rounding carries through them was simulated.
    Carried {
        /// What the simulation says.
        carried: Carried,
        /// From the reference, where there is one.
        distance: Option<f64>,
        /// Whether mistakes would show.
        sharp: bool,
        /// What else is known.
        local: Box<Why>,
    },
}

/// Where a recording comes from.
pub fn side(recording: &dyn Recording, path: Option<String>) -> Side {
    let manifest = recording.manifest();
    Side {
        path,
        producer: manifest.producer.clone(),
        model: manifest.model.clone(),
        tokens: manifest.tokens.len(),
        steps: manifest.steps.iter().map(|step| step.positions.len()).collect(),
        provenance: manifest.provenance.clone(),
    }
}

/// Names the model of a side whose dump does not by the file that it was judged by.
pub fn name_models(report: &mut Report, gguf: &Gguf) {
    let file = gguf.path().file_name().map(|name| name.to_string_lossy().into_owned());
    let architecture = gguf.str("general.architecture").ok().flatten();
    for side in std::iter::once(&mut report.candidate).chain(&mut report.reference) {
        let model = &mut side.model;
        if model.file.is_none() && model.name.is_none() {
            model.file.clone_from(&file);
            model.architecture = model.architecture.take().or(architecture.map(str::to_owned));
        }
    }
}

#[cfg(test)]
mod tests;
