//! Records the tensors of a llama.cpp program that runs by itself, as `perf record` does with time; of the
//! llama.cpp that is built in; or takes over what a program printed of them.

#[cfg(feature = "llama-cpp")]
pub mod builtin;
mod finish;
pub mod import;
mod program;
pub mod rpc;
mod tap;
mod verify;
mod ways;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

pub use parity_record::filter::Filter;
pub use parity_record::forced::Forced;
pub use parity_record::kept::Observe;

#[cfg(not(unix))]
use crate::elsewhere::signal;
use crate::error::{Error, Result};
use program::Program;
use tap::Session;

pub use verify::Verified;
pub use ways::{Fit, ways};

/// Where a program's own output goes.
#[derive(Clone, Debug, Default)]
pub enum Output {
    /// Where this process's goes.
    #[default]
    Inherited,
    /// Nowhere, and it reads nothing.
    Nowhere,
    /// Into a file, and it reads nothing.
    File(PathBuf),
}

/// How the recorder gets into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The system loads it before all that the program asks for: Linux alone does.
    Preloaded,
    /// ggml loads it with its backends.
    Loaded,
}

impl Default for Way {
    fn default() -> Way {
        if cfg!(target_os = "macos") { Way::Loaded } else { Way::Preloaded }
    }
}

/// What to record.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How the recorder gets into the program.
    pub way: Way,
    /// Folder of the dump.
    pub dir: PathBuf,
    /// Which checkpoints.
    pub filter: Filter,
    /// Which token sequence of the program alone, counted from 0; warm-ups are not counted. `None` where there should be
    /// only one.
    pub sequence: Option<usize>,
    /// Whether every token gets logits, and not only those that the program asks them of.
    pub all_rows: bool,
    /// Whether to run the program once more without recording, and compare its logits.
    pub verify: bool,
    /// File that takes the graph of each pass as text.
    pub graphs: Option<PathBuf>,
    /// A mistake that llama.cpp is made to make while the recorded graph stays the healthy one: a test aid.
    pub inject: Option<parity_record::Wanted>,
    /// How closely is looked.
    pub observe: Observe,
    /// Whether hashes and norms are kept in the place of values.
    pub hashed: bool,
    /// Tokens of another run, in the place of those that the program chooses.
    pub forced: Option<Forced>,
    /// Variables that the program gets beside those of this process.
    pub environment: Vec<(OsString, OsString)>,
    /// Whether the prompt's text is left out.
    pub no_text: bool,
    /// Where the program's own output goes.
    pub output: Output,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// What was recorded.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Folder of the dump.
    pub dir: PathBuf,
    /// Forward passes.
    pub steps: usize,
    /// Token positions.
    pub tokens: usize,
    /// Different checkpoints.
    pub checkpoints: usize,
    /// Bytes of all step files.
    pub bytes: u64,
    /// Token sequences that the program computed.
    pub sequences: usize,
    /// Nodes that belong to no checkpoint.
    pub unmapped: Vec<String>,
    /// Why the dump is incomplete, where it is.
    pub incomplete: Option<String>,
    /// How the program ended; `None` of the built-in llama.cpp.
    pub program: Option<ExitStatus>,
    /// The model, where one was seen.
    pub model: Option<PathBuf>,
    /// The library that computed, where one was seen.
    pub library: Option<PathBuf>,
    /// Tokens that the program chose where another run's were computed, by position.
    pub replaced: Vec<(u32, u32)>,
    /// The recordings of other contexts of the program, as of a draft model, in the order in which they began to compute.
    pub others: Vec<Summary>,
    /// What the second run, without recording, showed.
    pub verified: Option<Verified>,
}

/// Whether a program can be recorded at all.
///
/// # Errors
/// Says why it cannot, and what to do instead.
pub fn can_record(program: &Path) -> Result<()> {
    Program::find(&[program.as_os_str().to_owned()], Way::default()).map(drop)
}

/// Runs a program and records what its llama.cpp computes.
///
/// # Errors
/// Where the program cannot be recorded at all, or computed nothing that is a checkpoint.
pub fn record(options: &Options) -> Result<Summary> {
    let program = Program::find(&options.command, options.way)?;
    let session = Session::new(options.way)?;
    let hashes = options.verify.then(|| session.folder().join("recorded"));
    let mut tapped = session.command(&options.command, options, hashes.as_deref())?;
    redirect(&mut tapped, &options.output)?;
    let status = run(tapped, &program)?;
    let report = session.report();
    let recorded = finish::finish(options, &program, &report, status)?;
    let verified = match &hashes {
        Some(recorded) => Some(verify::verify(&session, options, &program, recorded)?),
        None => None,
    };
    Ok(Summary { verified, library: report.library, replaced: report.replaced, ..recorded })
}

/// Sends a program's output where it belongs.
fn redirect(command: &mut Command, output: &Output) -> Result<()> {
    match output {
        Output::Inherited => {}
        Output::Nowhere => {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        }
        Output::File(path) => {
            let failed = |e: std::io::Error| Error::file(path, format!("cannot be written: {e}"));
            let file = std::fs::File::create(path).map_err(failed)?;
            let both = file.try_clone().map_err(failed)?;
            command.stdin(Stdio::null()).stdout(file).stderr(both);
        }
    }
    Ok(())
}

/// Runs a program to its end. Ctrl-C is the program's: what it has computed until then is kept.
fn run(mut command: Command, program: &Program) -> Result<ExitStatus> {
    extern "C" fn leave_it_to_the_program(_signal: libc::c_int) {}
    // A handler and not `SIG_IGN`, which the program would inherit.
    // SAFETY: the handler does nothing.
    let before = unsafe { libc::signal(libc::SIGINT, leave_it_to_the_program as *const () as usize) };
    let status = command.status();
    // SAFETY: what was set before.
    unsafe { libc::signal(libc::SIGINT, before) };
    status.map_err(|e| Error::file(&program.path, format!("cannot be run: {e}")))
}

/// How a program ended, in words.
pub fn ending(status: ExitStatus) -> String {
    match (status.code(), signal(status)) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown end".to_owned(),
    }
}

/// The signal that ended a program.
#[cfg(unix)]
fn signal(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

/// A file name without its folders.
fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
