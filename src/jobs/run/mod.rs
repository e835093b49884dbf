//! The main job: an engine computes a prompt into a dump, which is judged beside the reference as any other dump is.
//!
//! Where parity has fast kernels for a model, they compute (`fused`); any other graph is executed op by op. Either way the
//! judge reads nothing but what was written down: what it says of a run it says of the dump that `--dump` keeps.

mod fused;
mod mistakes;
mod op_by_op;
mod plan;
mod spoken;
mod steps;
mod writer;

pub(super) use mistakes::rewritten;
pub(super) use plan::RunPlan;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use parity_dump::Dump;
use tempfile::TempDir;

use super::diff::{self, Sides};
use super::graphs::{ByGraph, refuse_adapter};
use super::limits::{self, Room};
use super::{audit, settle, with_matrices};
use crate::audit::AuditRows;
use crate::audit::Fed;
use crate::checkpoint::Checkpoint;
use crate::compare::Tolerances;
use crate::engine::device::Device;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::foreign;
use crate::gguf::Gguf;
use crate::model;
use crate::model::diff::Whose;
use crate::numerics::Numerics;
use crate::record::import::is_partial;
use crate::references;
use crate::report::{Report, Verdict};
use crate::select::Selection;
use crate::verdict::{self, Gap};

/// What to run and how to judge it.
#[derive(Clone, Default)]
pub struct RunOptions {
    /// (T,) tokens of the prompt; those of the reference where empty.
    pub tokens: Vec<u32>,
    /// The text that they come from, for the dump's manifest.
    pub prompt: Option<String>,
    /// Decode steps; as many as the reference has where neither this nor a prompt is given.
    pub n_predict: Option<usize>,
    /// Folder or file of the reference; looked for by model and tokens where absent.
    pub reference: Option<PathBuf>,
    /// Folder that the candidate's dump is written to.
    pub dump: Option<PathBuf>,
    /// Where the engine runs.
    pub device: Device,
    /// The engine's arithmetic.
    pub numerics: Numerics,
    /// The reference's, whatever it declares.
    pub reference_numerics: Option<Numerics>,
    /// Which checkpoints are looked at.
    pub selection: Selection,
    /// The user's tolerances.
    pub tolerances: Tolerances,
    /// Prefill in pieces of so many tokens; in the reference's steps where absent.
    pub chunk: Option<usize>,
    /// Whether checkpoints that a side lacks are no obstacle to parity.
    pub allow_missing: bool,
    /// Whether to draw the differences, for the HTML report.
    pub pictures: bool,
    /// Whether every node is computed from the reference's inputs: each is judged on its own.
    pub isolated: bool,
    /// Whether tokens' text is left out.
    pub no_text: bool,
    /// Token rows that both sides are audited at; no audit where absent.
    pub audit: Option<AuditRows>,
    /// Mistakes that are made on purpose.
    pub inject: Vec<parity_graph::fault::Wanted>,
}

/// Tells how far a run is: checkpoints computed so far, of how many.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// What an execution came to, besides its dump.
#[derive(Default)]
struct Executed {
    /// What a reader must know.
    notes: Vec<String>,
    /// Whether the graph that was executed is the reference's.
    borrowed: bool,
    /// Choices of the reference's that were followed.
    followed: HashSet<Checkpoint>,
}

/// Runs a model and reports.
///
/// # Errors
/// A model that cannot be run, a mistake that it has no place for, and everything that a run needs and does not find.
pub fn run(file: &ModelFile, options: &RunOptions, progress: Progress<'_>) -> Result<Report> {
    let by = ByGraph::to_be_executed(file, options.reference.as_deref())?;
    let room = match file {
        ModelFile::Nodes(model) => Room::of(model),
        ModelFile::Refused(..) => steps::room(&by, options)?,
    };
    let mut reference = reference(by.gguf, room, options)?;
    // Before anything is planned: what is looked at is chosen by name, and a name can have two meanings.
    let settled = match &mut reference {
        Some(reference) => settle(reference, by.gguf)?,
        None => Vec::new(),
    };
    spare_the_reference(options, reference.as_ref())?;
    refuse_isolation(by.gguf, options, reference.as_ref())?;
    let selection = with_matrices(&options.selection, reference.as_ref());
    let options = &RunOptions { selection, ..options.clone() };
    let folder = Folder::of(options)?;
    // Rows of several sequences are computed as they were recorded.
    let numbered = reference.as_ref().is_some_and(|dump| dump.manifest().is_numbered());
    let executed = match file {
        ModelFile::Nodes(model) if !numbered => {
            fused::execute(model, options, reference.as_ref(), folder.path(), progress)?
        }
        _ => op_by_op::execute(&by, room, options, reference.as_ref(), folder.path(), progress)?,
    };
    let candidate = Dump::open(folder.path())?;
    let mut report = match &reference {
        Some(reference) => {
            let fed = if options.isolated { Fed::Everything } else { Fed::Some(executed.followed) };
            let sides = Sides { candidate: &candidate, reference, fed: &fed, borrowed: executed.borrowed };
            beside(&sides, &by, options)?
        }
        None => alone(&candidate, &by, options)?,
    };
    report.candidate.path = options.dump.as_ref().map(|dir| dir.display().to_string());
    report.notes.extend(settled.into_iter().map(|said| format!("reference: {said}")));
    report.notes.extend(executed.notes);
    report.notes.extend(unseen_mistake(options, &report));
    report.notes.extend(spoken::notes(&report, &candidate, by.gguf));
    if options.isolated {
        let what = "isolated: every node read the reference's values, so that nothing is inherited";
        report.notes.push(what.to_owned());
    }
    Ok(report)
}

/// The candidate beside the reference.
fn beside(sides: &Sides<'_>, by: &ByGraph<'_>, options: &RunOptions) -> Result<Report> {
    let gaps = gaps(options, super::tokens_of(sides.candidate), sides.reference);
    let how = diff::Options {
        selection: options.selection.clone(),
        tolerances: options.tolerances.clone(),
        allow_missing: options.allow_missing,
        pictures: options.pictures,
        bitwise: false,
        no_text: options.no_text,
        audit: options.audit,
    };
    match options.audit {
        Some(rows) => diff::judged(sides, by, rows, gaps, &how),
        None => {
            let mut report = diff::by_numbers(sides, Some(by.gguf), gaps, &how);
            match sides.borrowed {
                true => by.weigh_wiring(&[(Whose::Reference, &by.graphs(sides.reference)?)], &mut report),
                false => by.weigh_wiring_of(sides.candidate, sides.reference, &mut report)?,
            }
            Ok(report)
        }
    }
}

/// The candidate by itself: nothing was compared.
fn alone(candidate: &Dump, by: &ByGraph<'_>, options: &RunOptions) -> Result<Report> {
    let mut report = match options.audit {
        Some(rows) => {
            let (selection, allow_missing) = (options.selection.clone(), options.allow_missing);
            audit::judged(candidate, by, &audit::Options { selection, rows, allow_missing })?
        }
        None => Report { candidate: verdict::side(candidate, None), ..Report::default() },
    };
    if report.verdict != Verdict::Divergence {
        let lacking = match references::adapter_flags(by.gguf).map(|flags| flags.is_empty()) {
            Some(true) => NO_REFERENCE,
            Some(false) => NO_ADAPTED,
            None => NOT_READ,
        };
        report.cannot_be_judged(format!("nothing was compared: {lacking}"));
        report.next.insert(0, to_record(by.gguf, options));
    }
    Ok(report)
}

/// Where what the engine computes is written to: the folder that the user named, or one that is gone afterwards.
enum Folder {
    Named(PathBuf),
    Temporary(TempDir),
}

impl Folder {
    fn of(options: &RunOptions) -> Result<Folder> {
        match &options.dump {
            Some(dir) => Ok(Folder::Named(dir.clone())),
            None => {
                let made = tempfile::Builder::new().prefix("parity-run-").tempdir();
                let dir = std::env::temp_dir();
                made.map(Folder::Temporary).map_err(|e| {
                    Error::file(&dir, format!("no folder for what the engine computes: {e}"))
                        .hint("--dump DIR keeps it elsewhere, or set TMPDIR")
                })
            }
        }
    }

    fn path(&self) -> &Path {
        match self {
            Folder::Named(dir) => dir,
            Folder::Temporary(dir) => dir.path(),
        }
    }
}

/// Refuses isolation where there is nothing to feed.
fn refuse_isolation(gguf: &Gguf, options: &RunOptions, reference: Option<&Dump>) -> Result<()> {
    if !options.isolated || reference.is_some_and(|dump| !is_partial(dump)) {
        return Ok(());
    }
    Err(Error::new("--isolate", "there are no inputs to feed")
        .expected("a reference")
        .found(if reference.is_some() { "printed values" } else { "none" })
        .hint(no_reference(gguf, options)))
}

/// What a user should know whose injected mistake left no trace.
pub fn unseen_mistake(options: &RunOptions, report: &Report) -> Option<String> {
    let silent = !options.inject.is_empty() && report.verdict == Verdict::Parity;
    silent.then(|| {
        let one = "the injected mistake left no trace: on these tokens it moves no value that was looked at beyond \
                   what rounding explains";
        one.to_owned()
    })
}

/// Refuses to write the candidate's dump over the reference that it is compared with, and to write one of which no node
/// was computed from the others: an audit would call all of them wrong.
pub fn spare_the_reference(options: &RunOptions, reference: Option<&Dump>) -> Result<()> {
    if options.isolated && options.dump.is_some() {
        let why = "nodes of an isolated run read the reference's values, not one another's";
        return Err(Error::new("--dump", why).expected("--dump without --isolate").found("both"));
    }
    let (Some(dir), Some(reference)) = (&options.dump, reference) else { return Ok(()) };
    let same = std::fs::canonicalize(dir).ok().zip(std::fs::canonicalize(reference.path()).ok());
    match same {
        Some((ours, theirs)) if ours == theirs => {
            Err(Error::new("--dump", "would replace the reference itself")
                .expected("another folder")
                .found(dir.display()))
        }
        _ => Ok(()),
    }
}

/// The reference that was named, or a stored one that fits.
///
/// # Errors
/// A recording of another model, nothing to run, a recording that could not be made.
pub fn reference(gguf: &Gguf, room: Room<'_>, options: &RunOptions) -> Result<Option<Dump>> {
    if let Some(path) = &options.reference {
        let dump = foreign::open(path, &foreign::Options::default())?;
        model::refuse_other(gguf, path, &dump.manifest().model)?;
        refuse_adapter(gguf, &dump)?;
        return Ok(Some(foreign::declared(dump, options.reference_numerics)));
    }
    if options.tokens.is_empty() {
        return Err(Error::new("prompt", "there is nothing to run")
            .expected("a text or tokens")
            .found("no token")
            .hint("parity run -p \"def read_lines(path):\", or --tokens 1,2,3, or --reference DIR"));
    }
    let asked = options.tokens.len().checked_add(options.n_predict.unwrap_or(0));
    limits::positions(room, options, options.tokens.len(), asked, 0)?;
    let fingerprint = model::fingerprint(gguf);
    let n_decode = options.n_predict.unwrap_or(0);
    let is_adapted = gguf.adapters().next().is_some();
    let stored = (!is_adapted).then(|| references::find(&fingerprint, &options.tokens, n_decode)).flatten();
    let found = match (&stored, &options.prompt) {
        (None, Some(prompt)) => {
            references::record(gguf, &fingerprint, prompt, options.tokens.len(), n_decode)?
        }
        _ => stored,
    };
    Ok(found.map(|dump| foreign::declared(dump, options.reference_numerics)))
}

/// Tokens of the two sides that are not compared. That a prompt is only the beginning of the reference's text is
/// what was asked for.
pub fn gaps(options: &RunOptions, ours: &[u32], reference: &Dump) -> Vec<Gap> {
    let theirs = super::tokens_of(reference);
    let whole = options.tokens.is_empty() && options.n_predict.is_none();
    let asked_for = !whole && theirs.starts_with(ours);
    let mut gaps = if asked_for { Vec::new() } else { verdict::gaps(ours, theirs) };
    gaps.extend(Gap::of_steps("reference", reference).filter(|_| whole));
    gaps.extend(Gap::of_end("reference", reference));
    gaps.extend(Gap::of_writes("reference", reference.manifest()));
    gaps
}

const NO_REFERENCE: &str =
    "no stored reference for these tokens; record one with a llama.cpp, and name it with --reference";

const NO_ADAPTED: &str =
    "no reference with the adapter; record one with a llama.cpp, and name it with --reference";
const NOT_READ: &str = "no reference with the adapter, which llama.cpp does not read: convert_lora_to_gguf.py makes one \
                        that it does";

/// The same for an error's hint.
pub fn no_reference(gguf: &Gguf, options: &RunOptions) -> String {
    format!("{NO_REFERENCE}: {}", to_record(gguf, options))
}

/// The command that records a reference.
fn to_record(gguf: &Gguf, options: &RunOptions) -> String {
    let n_decode = options.n_predict.unwrap_or(0);
    let prompt = options.prompt.as_deref().unwrap_or("…");
    let words = references::recording_command(
        "llama-completion".as_ref(),
        gguf,
        prompt,
        options.tokens.len(),
        n_decode,
    );
    let words: Vec<String> = words.iter().map(|word| references::quoted(&word.to_string_lossy())).collect();
    format!("parity record -o ref -- {}", words.join(" "))
}
