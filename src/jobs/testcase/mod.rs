//! One node as a test: a line for llama.cpp's `test-backend-ops --test-file`, and a file with what the node read and
//! computed, which is judged again without model or recording.

mod line;
mod replay;

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use parity_dump::Dump;

use super::graphs::ByGraph;
use crate::arithmetic::Arithmetic;
use crate::audit::{self, AuditRows, How, Suspect};
use crate::checkpoint::Checkpoint;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::ops::Args;
use crate::report::Report;

pub use replay::{Replayed, run};

/// What was written.
pub struct Written {
    /// The step whose node it is.
    pub step: usize,
    /// Its local error over what rounding explains.
    pub over_bound: f64,
    /// The line for upstream's test, and why there is none.
    pub line: std::result::Result<PathBuf, String>,
    /// The file to replay.
    pub replay: PathBuf,
}

/// A node in the step in which its error is largest.
struct Worst {
    step: usize,
    over: f64,
    case: replay::Case,
    line: std::result::Result<String, String>,
}

/// Writes a node of a dump as a test, in the step in which it is farthest from what rounding explains.
///
/// # Errors
/// A dump without that node, or in which it cannot be judged; a folder that cannot be written.
pub fn write(dump: &mut Dump, file: &ModelFile, id: Checkpoint, dir: &Path) -> Result<Written> {
    super::settle(dump, file.gguf())?;
    let by = ByGraph::of_dumps(file, &[&*dump])?;
    let own = by.graphs(dump)?;
    let (graphs, judged) = (own.steps(), own.judged(dump, dump));
    let numbers = line::numbers(dump);
    let worst: RefCell<Option<Worst>> = RefCell::default();
    let failed: RefCell<Option<Error>> = RefCell::default();
    let look = |step: usize, found: Checkpoint, suspect: &Suspect<'_>| {
        let over = if suspect.held.over.is_nan() { f64::INFINITY } else { suspect.held.over };
        let is_worse = worst.borrow().as_ref().is_none_or(|known| over > known.over);
        if found != id || !is_worse {
            return;
        }
        let graph = &suspect.node.program.graph;
        match case(suspect, id, step, dump) {
            Ok(case) => {
                let line = line::line(graph, suspect.node.id, id, numbers.as_ref());
                worst.replace(Some(Worst { step, over, case, line }));
            }
            Err(error) => drop(failed.replace(Some(error))),
        }
    };
    let wants = |other: Checkpoint| other == id;
    let how =
        How { rows: AuditRows::default(), wants: &wants, diagnose: None, look: Some(&look), only: None };
    audit::audit(&judged, &graphs, file.gguf(), &how)?;
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let worst = worst.into_inner().ok_or_else(|| {
        Error::new(id, "cannot be judged in this dump")
            .expected("a node whose inputs and output were recorded")
            .hint(format!("parity audit {} says what is missing", dump.path().display()))
    })?;
    let Worst { step, over, case, line } = worst;
    std::fs::create_dir_all(dir).map_err(|e| Error::file(dir, format!("cannot be written: {e}")))?;
    let replay = dir.join(format!("{id}.safetensors"));
    case.write(&replay)?;
    let line = line.and_then(|line| {
        let path = dir.join(format!("{id}.txt"));
        let written =
            std::fs::write(&path, line).map_err(|e| format!("{} cannot be written: {e}", path.display()));
        written.map(|()| path)
    });
    Ok(Written { step, over_bound: over, line, replay })
}

/// What a node read and computed.
fn case(suspect: &Suspect<'_>, id: Checkpoint, step: usize, dump: &Dump) -> Result<replay::Case> {
    let rule = suspect.node.rule.ok_or_else(|| Error::new(id, "is of an op without a rule"))?;
    let args = suspect.args;
    let exact = Args {
        name: args.name,
        params: args.params,
        sources: args.sources.clone(),
        shape: args.shape,
        dtype: args.dtype,
        arithmetic: &Arithmetic::EXACT,
        tokens: args.tokens,
    };
    let exact = (rule.double)(&exact)?;
    let node = suspect.node.program.graph.get(suspect.node.id);
    let of = replay::Of {
        checkpoint: id,
        op: rule.op.name().to_owned(),
        backend: node.backend.clone(),
        step,
        producer: dump.manifest().producer.name.clone(),
        version: dump.manifest().producer.version.clone(),
        model: dump.manifest().model.file.clone(),
    };
    replay::Case::of(of, args, suspect.recorded, &exact)
}

/// The dump that a report's node is of: the given one, or the side whose node is wrong.
///
/// # Errors
/// A report of dumps that were not kept.
pub fn dump_of(report: &Report, id: Checkpoint, given: Option<&Path>) -> Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let entry = report.checkpoints.iter().find(|entry| entry.id == id);
    let entry = entry
        .ok_or_else(|| Error::new(id, "is no checkpoint of this report").hint("its report.csv lists them"))?;
    let is_of_reference = entry.verdict == crate::report::CheckpointVerdict::Reference;
    let side = if is_of_reference { report.reference.as_ref() } else { Some(&report.candidate) };
    let path = side.and_then(|side| side.path.clone()).map(PathBuf::from);
    path.filter(|path| path.exists()).ok_or_else(|| {
        Error::new(id, "the dump that the report is of was not kept")
            .hint("--dump DIR names one; parity ab -o DIR and parity run --dump DIR keep them")
    })
}
