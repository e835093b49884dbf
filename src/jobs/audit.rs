//! One dump against exact arithmetic.

use super::graphs::{self, ByGraph, JudgedBy};
use super::{head_rows, is_sharper_by_tensor, notes_of, path_of, with_matrices};
use crate::audit::{self, AuditRows};
use crate::compare::Comparison;
use crate::dump::Recording;
use crate::error::Result;
use crate::model::Model;
use crate::model::file::ModelFile;
use crate::report::Report;
use crate::report::sensitivity::Sensitivity;
use crate::select::Selection;
use crate::sensitivity;
use crate::verdict::{self, Gap, Parts, recorded};
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
    let mut report = match JudgedBy::of(file, &[&*dump])? {
        JudgedBy::Graphs(by) => graphs::audit(dump, &by, options)?,
        JudgedBy::Nodes(model) => {
            let sharper = is_sharper_by_tensor(dump, &options.rows.positions(&dump.manifest().steps));
            let by_tensor = || graphs::audit(dump, &ByGraph::of(file)?, options);
            recorded::explained(sharper, || on_nodes(dump, model, options), by_tensor)?
        }
    };
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

fn on_nodes(dump: &Dump, model: &Model, options: &Options) -> Result<Report> {
    let wanted = options.selection.among(model.graph.checkpoints());
    if wanted.is_empty() {
        return Err(options.selection.refused(model.graph.checkpoints(), model.config.dims.layers));
    }
    let wants = |checkpoint| wanted.contains(&checkpoint);
    let positions = options.rows.positions(&dump.manifest().steps);
    let how = audit::Options { positions: &positions, wants: &wants, isolated: false };
    let recordings: [&dyn Recording; 1] = [dump];
    let audits = audit::audit(&recordings, &model.gguf, &model.graph, &how)?;
    let wanted = model.graph.checkpoints().filter(|checkpoint| wants(*checkpoint));
    let rows = Gap::of_rows("dump", dump, model.graph.checkpoints().filter(|id| wants(*id)));
    let comparisons: Vec<Comparison> =
        wanted.map(|c| Comparison::alone(c, Recording::row_shape(dump, c))).collect();
    let mut report = verdict::assemble(Parts {
        judgement: verdict::judge(model, &recordings, &comparisons, Some(&audits))?,
        comparisons,
        candidate: verdict::side(dump, path_of(dump)),
        notes: notes_of(dump, "dump"),
        gaps: Gap::of_steps("dump", dump).into_iter().chain(rows).collect(),
        allow_missing: options.allow_missing,
        ..Parts::default()
    });
    verdict::describe(&mut report, &model.graph);
    Ok(report)
}
