//! One dump against exact arithmetic.

use super::graphs::{self, ByGraph};
use super::{head_rows, with_matrices};
use crate::audit::AuditRows;
use crate::error::Result;
use crate::model::file::ModelFile;
use crate::report::Report;
use crate::report::sensitivity::Sensitivity;
use crate::select::Selection;
use crate::sensitivity;
use crate::verdict;
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

/// Audits a dump of a model; its queries and keys are read in the file's order afterwards.
///
/// # Errors
/// Another model's dump, a weight that cannot be read, a model that nothing can be said of.
pub fn audit(dump: &mut Dump, file: &ModelFile, options: &Options) -> Result<Report> {
    let order = head_rows::settle(dump, file)?;
    let selection = with_matrices(&options.selection, [&*dump]);
    let options = &Options { selection, ..options.clone() };
    let by = ByGraph::of_dumps(file, &[&*dump])?;
    let mut report = graphs::audit(dump, &by, options)?;
    report.notes.extend(order);
    verdict::weigh(&mut report, dump, file)?;
    verdict::name_models(&mut report, file.gguf());
    Ok(report)
}

/// What an audit of the dump can see: mistakes made on purpose, one at a time.
///
/// # Errors
/// A model that parity has no nodes for, another model's dump, a weight that cannot be read.
pub fn self_test(
    dump: &mut Dump,
    file: &ModelFile,
    options: &Options,
    progress: &dyn Fn(usize, usize),
) -> Result<Sensitivity> {
    head_rows::settle(dump, file)?;
    let model = file.nodes()?;
    model.refuse_other(dump.path(), &dump.manifest().model)?;
    let wanted = options.selection.among(model.graph.checkpoints());
    let positions = options.rows.positions(&dump.manifest().steps);
    sensitivity::measure(dump, model, &positions, &|checkpoint| wanted.contains(&checkpoint), progress)
}
