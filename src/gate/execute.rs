//! Executes cases: the same jobs as `parity run`, `diff` and `audit`, with every model opened once and shared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use super::ProblemKind;
use super::suite::{Case, Input};
use crate::audit::AuditRows;
use crate::engine::device;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::foreign;
use crate::inspect::against::with_adapters;
use crate::jobs::run::{RunOptions, run};
use crate::jobs::{audit, diff};
use crate::references;
use crate::remote;
use crate::report::Report;
use crate::tokenizer::Tokenizer;

/// What came of an attempt.
pub enum Attempt {
    /// It ran.
    Report(Box<Report>),
    /// Something that it needs is not there: what, and one sentence.
    Missing(ProblemKind, String),
    /// It failed otherwise.
    Failed(Error),
}

/// Something that runs cases, possibly several at a time.
pub trait Execute: Sync {
    /// Runs one case; `pictures` asks for what the HTML report draws.
    fn execute(&self, case: &Case, pictures: bool) -> Attempt;
}

impl<F: Fn(&Case) -> Attempt + Sync> Execute for F {
    fn execute(&self, case: &Case, _pictures: bool) -> Attempt {
        self(case)
    }
}

/// A model that is opened by the first case that needs it.
type Shared = Arc<OnceLock<Result<Arc<Opened>>>>;

struct Opened {
    file: ModelFile,
    /// Built by the first case with a text.
    tokenizer: OnceLock<Result<Tokenizer>>,
}

/// A file, and adapters, each with the bits of its scale.
type Named = (PathBuf, Vec<(PathBuf, u32)>);

/// Runs cases on the instrumented engine.
#[derive(Default)]
pub struct Engine {
    models: Mutex<BTreeMap<Named, Shared>>,
}

impl Execute for Engine {
    fn execute(&self, case: &Case, pictures: bool) -> Attempt {
        match self.attempt(case, pictures) {
            Ok(attempt) => attempt,
            Err(error) => Attempt::Failed(error),
        }
    }
}

impl Engine {
    fn attempt(&self, case: &Case, pictures: bool) -> Result<Attempt> {
        let path = match &case.model {
            Some(path) => path.clone(),
            None => references::default_model()?,
        };
        if !path.is_file() {
            return Ok(Attempt::Missing(ProblemKind::MissingModel, missing_model(&path)));
        }
        let dumps = case.reference.iter().chain(&case.dump);
        let is_absent = |path: &&PathBuf| !remote::is_remote(path) && !path.exists();
        if let Some(path) = dumps.into_iter().find(is_absent) {
            return Ok(Attempt::Missing(
                ProblemKind::MissingReference,
                format!("no recording {}", path.display()),
            ));
        }
        if !device::is_present(&case.device) {
            return Ok(Attempt::Missing(ProblemKind::SkippedDevice, format!("there is no {}", case.device)));
        }
        let case = &fetched(case)?;
        let opened = self.open(path, &case.lora)?;
        let report = match &case.dump {
            Some(dump) => judge_dump(case, dump, &opened.file, pictures)?,
            None => run(&opened.file, &options(case, &opened, pictures)?, &|_, _| {})?,
        };
        Ok(Attempt::Report(Box::new(report)))
    }

    /// The model of this file with these adapters, opened once however many cases ask for it.
    fn open(&self, path: PathBuf, lora: &[(PathBuf, f32)]) -> Result<Arc<Opened>> {
        let adapters = lora.iter().map(|(path, scale)| (path.clone(), scale.to_bits())).collect();
        let shared = {
            let mut models = self.models.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            models.entry((path.clone(), adapters)).or_default().clone()
        };
        let open = || {
            let file = with_adapters(ModelFile::open(&path)?, lora)?;
            Ok(Arc::new(Opened { file, tokenizer: OnceLock::new() }))
        };
        shared.get_or_init(open).clone()
    }
}

/// The case with what it needs of dumps that lie elsewhere brought here.
fn fetched(case: &Case) -> Result<Case> {
    let mut here = case.clone();
    for path in here.reference.iter_mut().chain(&mut here.dump) {
        *path = remote::local(path, &case.selection)?;
    }
    Ok(here)
}

/// Compares a dump with the case's reference, or audits it by itself.
fn judge_dump(case: &Case, path: &Path, file: &ModelFile, pictures: bool) -> Result<Report> {
    let of_model =
        foreign::Options { model: Some(file.gguf().path().to_owned()), ..foreign::Options::default() };
    let mut dump = foreign::open(path, &of_model)?;
    let (selection, rows) = (case.selection.clone(), AuditRows::default());
    let allow_missing = case.allow.contains(&ProblemKind::MissingCheckpoints);
    let Some(reference) = &case.reference else {
        return audit::audit(&mut dump, file, &audit::Options { selection, rows, allow_missing });
    };
    let tolerances = case.tolerances.clone();
    let (bitwise, audit) = (case.expect.identical, Some(rows));
    let how =
        diff::Options { selection, tolerances, allow_missing, pictures, bitwise, no_text: false, audit };
    diff::diff(&mut dump, &mut foreign::open(reference, &of_model)?, Some(file), &how)
}

/// What is not there, and where the suite's models are looked for.
fn missing_model(path: &Path) -> String {
    let variable = references::MODELS_VARIABLE;
    let set = match std::env::var_os(variable) {
        Some(folder) => format!("is {}", Path::new(&folder).display()),
        None => "is not set".to_owned(),
    };
    format!("no file {}; {variable}, the folder of models that a suite may name, {set}", path.display())
}

fn options(case: &Case, opened: &Opened, pictures: bool) -> Result<RunOptions> {
    let (prompt, tokens) = match &case.input {
        Input::Reference => (None, Vec::new()),
        Input::Tokens(tokens) => (None, tokens.to_vec()),
        Input::Prompt(text) => {
            let build = || Tokenizer::from_gguf(opened.file.gguf());
            let tokenizer = opened.tokenizer.get_or_init(build).as_ref().map_err(Error::clone)?;
            (Some(text.to_string()), tokenizer.encode(&**text)?)
        }
    };
    Ok(RunOptions {
        tokens,
        prompt,
        n_predict: case.n_predict,
        reference: case.reference.clone(),
        device: case.device.clone(),
        numerics: case.numerics,
        selection: case.selection.clone(),
        tolerances: case.tolerances.clone(),
        chunk: case.chunk,
        allow_missing: case.allow.contains(&ProblemKind::MissingCheckpoints),
        pictures,
        audit: Some(AuditRows::default()),
        inject: case.inject.clone(),
        ..RunOptions::default()
    })
}
