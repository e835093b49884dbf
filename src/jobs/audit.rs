//! One dump against exact arithmetic.

use crate::audit::{self, AuditRows};
use crate::compare::Comparison;
use crate::dump::Recording;
use crate::error::Result;
use crate::model::Model;
use crate::report::Report;
use crate::select::Selection;
use crate::verdict::{self, Gap, Parts};
use parity_dump::Dump;

/// What is audited.
#[derive(Clone, Default)]
pub struct Options {
    /// Which checkpoints are looked at.
    pub selection: Selection,
    /// Token rows that are computed again; the others are screened.
    pub rows: AuditRows,
    /// Whether what the dump lacks is no obstacle to parity.
    pub allow_missing: bool,
}

/// Audits a dump of `model`.
///
/// # Errors
/// Another model's dump, a weight that cannot be read.
pub fn audit(dump: &Dump, model: &Model, options: &Options) -> Result<Report> {
    model.refuse_other(dump.path(), &dump.manifest().model)?;
    let n_layers = model.config.dims.layers;
    let wants = |checkpoint| options.selection.wants(checkpoint, n_layers);
    let positions = options.rows.positions(&dump.manifest().steps);
    let how = audit::Options { positions: &positions, wants: &wants, isolated: false };
    let recordings: [&dyn Recording; 1] = [dump];
    let audits = audit::audit(&recordings, &model.gguf, &model.graph, &how)?;
    let wanted = model.graph.checkpoints().filter(|checkpoint| wants(*checkpoint));
    let comparisons: Vec<Comparison> =
        wanted.map(|c| Comparison::alone(c, Recording::row_shape(dump, c))).collect();
    let mut report = verdict::assemble(Parts {
        judgement: verdict::judge(model, &recordings, &comparisons, Some(&audits))?,
        comparisons,
        candidate: verdict::side(dump, super::path_of(dump)),
        notes: super::notes_of(dump, "dump"),
        gaps: Gap::of_steps("dump", dump).into_iter().collect(),
        allow_missing: options.allow_missing,
        ..Parts::default()
    });
    verdict::describe(&mut report, &model.graph);
    Ok(report)
}
