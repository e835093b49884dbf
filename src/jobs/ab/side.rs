//! One run of a program, recorded.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use parity_dump::{Dump, Step};
use parity_record::forced::Computed;

use super::Side;
use crate::dump::Graphs;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::inspect::against::with_adapters;
use crate::record::{self, Filter, Forced, Observe, Output};

/// How runs are recorded.
#[derive(Clone)]
pub struct Recording<'a> {
    /// Folder that the dumps are written below, each under its side's name.
    pub dir: &'a Path,
    /// Whether every token gets logits, and not only those that the programs ask them of.
    pub all_rows: bool,
    /// Which checkpoints.
    pub filter: Filter,
    /// How closely is looked.
    pub observe: Observe,
    /// Whether the prompt's text is left out.
    pub no_text: bool,
    /// LoRA adapters of the programs that run with some, each with its scale.
    pub adapters: &'a [(PathBuf, f32)],
    /// Told of each run before it begins.
    pub say: &'a dyn Fn(&str),
}

/// A run that was recorded.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// What it is called.
    pub name: String,
    /// Its command.
    pub command: Vec<OsString>,
    /// Its dump.
    pub dir: PathBuf,
    /// Its model file.
    pub model: PathBuf,
    /// (T,) tokens.
    pub tokens: Vec<u32>,
    /// Number of the first row that its program chose the token of.
    pub prompt: u32,
    /// Its rows, with the tokens that its program chose.
    rows: Vec<Computed>,
    /// The adapters that it ran with.
    pub adapters: Vec<(PathBuf, f32)>,
    /// How its program ended, where that is no success.
    pub failed: Option<String>,
    /// Tokens that its program chose where the first side's were computed, by position.
    pub replaced: Vec<(u32, u32)>,
}

impl Recorded {
    /// Its model, with its adapters.
    ///
    /// # Errors
    /// A file that cannot be read, or that an adapter does not fit.
    pub fn file(&self) -> Result<ModelFile> {
        with_adapters(ModelFile::open(&self.model)?, &self.adapters)
    }

    /// The same, with the rows of its dump that are looked at, in their numbers.
    pub fn read_as(&self, dump: &Dump) -> Recorded {
        Recorded { tokens: dump.tokens().to_vec(), prompt: prompt(dump), ..self.clone() }
    }

    /// Its tokens, for another run.
    pub fn forced(&self) -> Forced {
        Forced::new(self.rows.clone())
    }
}

/// Records a run, with the tokens of another.
///
/// # Errors
/// A program that cannot be recorded, or fails; one that loads other libraries than it was given.
pub fn record(side: &Side, how: &Recording<'_>, forced: Option<&Forced>) -> Result<Recorded> {
    let dir = how.dir.join(&side.name);
    let log = how.dir.join(format!("{}.log", side.name));
    (how.say)(&format!("recording {}", side.name));
    let environment =
        side.environment.iter().cloned().chain(side.libraries.as_deref().map(before_others)).collect();
    let summary = record::record(&record::Options {
        dir: dir.clone(),
        filter: how.filter.clone(),
        all_rows: how.all_rows,
        observe: how.observe,
        no_text: how.no_text,
        forced: forced.cloned(),
        environment,
        output: Output::File(log.clone()),
        command: side.command.clone(),
        ..record::Options::default()
    });
    let summary = summary.map_err(|error| {
        let hint = format!("what the program of side {} said is in {}", side.name, log.display());
        Error::new(format!("side {}", side.name), error).hint(hint)
    })?;
    if let Some(folder) = &side.libraries {
        are_from(folder, summary.library.as_deref(), &side.name)?;
    }
    let model = summary.model.ok_or_else(|| {
        Error::new(format!("side {}", side.name), "its program opened no model file that was seen")
    })?;
    let dump = Dump::open(&dir)?;
    let (tokens, prompt) = (dump.tokens().to_vec(), prompt(&dump));
    let rows = computed(&dump);
    let (name, command) = (side.name.clone(), side.command.clone());
    let has_adapter = Graphs::read(&dump)?.adapter_matrix().is_some();
    let adapters = if has_adapter { how.adapters.to_vec() } else { Vec::new() };
    let failed = summary.program.filter(|status| !status.success()).map(record::ending);
    Ok(Recorded {
        name,
        command,
        dir,
        model,
        tokens,
        prompt,
        rows,
        adapters,
        failed,
        replaced: summary.replaced,
    })
}

/// The rows of a dump, in the order in which they were computed. Its program chose the token of what is the only row of its sequence
/// in a step and not its first: a prompt that was computed token by token looks like an answer from its second token on.
fn computed(dump: &Dump) -> Vec<Computed> {
    let (manifest, mut begun) = (dump.manifest(), HashSet::new());
    let mut all = Vec::new();
    for step in &manifest.steps {
        let ids: Vec<u32> = (0..step.positions.len())
            .map(|row| step.sequences_of(row).first().copied().unwrap_or(0))
            .collect();
        for ((&number, &at), id) in step.positions.iter().zip(step.at()).zip(&ids) {
            let alone = ids.iter().filter(|other| *other == id).count() == 1;
            let token = manifest.tokens.get(number as usize).copied();
            all.push((*id, at, token.filter(|_| alone && begun.contains(id))));
        }
        begun.extend(ids);
    }
    all
}

/// Where the prompt ends: behind the last step that computes several rows of one sequence. A prompt that was computed token by
/// token looks like an answer from its second token on.
fn prompt(dump: &Dump) -> u32 {
    let rows = |step: &Step| -> Vec<(u32, Option<u32>)> {
        let all = step.positions.iter().copied().enumerate();
        let all = all.filter(|(_, number)| dump.is_chosen(Some(*number)));
        all.map(|(row, number)| (number, step.sequences_of(row).first().copied())).collect()
    };
    let is_prompt = |rows: &[(u32, Option<u32>)]| {
        let sequences: HashSet<Option<u32>> = rows.iter().map(|(_, id)| *id).collect();
        sequences.len() < rows.len()
    };
    let steps = dump.manifest().steps.iter().map(rows).filter(|rows| !rows.is_empty());
    let steps: Vec<_> = steps.collect();
    let behind = steps.iter().rev().find(|rows| is_prompt(rows)).or(steps.first());
    behind.and_then(|rows| rows.last()).map_or(0, |(last, _)| last + 1)
}

/// `LD_LIBRARY_PATH` with a folder before what is in it.
fn before_others(folder: &Path) -> (OsString, OsString) {
    const PATH: &str = "LD_LIBRARY_PATH";
    let mut path = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()).into_os_string();
    if let Some(others) = std::env::var_os(PATH).filter(|others| !others.is_empty()) {
        path.push(":");
        path.push(others);
    }
    (PATH.into(), path)
}

/// Refuses a run that did not load the libraries that it was given.
fn are_from(folder: &Path, loaded: Option<&Path>, name: &str) -> Result<()> {
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match loaded {
        Some(loaded) if !whole(loaded).starts_with(whole(folder)) => {
            Err(Error::new(format!("side {name}"), "its program did not load the libraries that it was given")
                .expected(format!("a ggml of {}", folder.display()))
                .found(loaded.display())
                .hint("a program with an RPATH of its own ignores LD_LIBRARY_PATH: patchelf --remove-rpath, or another program"))
        }
        _ => Ok(()),
    }
}
