//! What the parent process asked for, and how it is told what happened.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use parity_record::forced::Forced;
use parity_record::recorder::{Host, Options};

/// Folder of the dump.
const DIR: &str = "PARITY_TAP_DIR";
/// Which checkpoints, as [`parity_record::filter::Filter`] spells it.
const FILTER: &str = "PARITY_TAP_FILTER";
/// Which token sequence.
const SEQUENCE: &str = "PARITY_TAP_SEQUENCE";
/// File for hashes of the logits.
const HASHES: &str = "PARITY_TAP_HASHES";
/// File for the graphs, as text.
const GRAPHS: &str = "PARITY_TAP_GRAPHS";
/// A mistake that llama.cpp is made to make, as [`parity_record::Wanted`] spells it.
const INJECT: &str = "PARITY_TAP_INJECT";
/// How closely is looked, as [`parity_record::kept::Observe`] spells it.
const OBSERVE: &str = "PARITY_TAP_OBSERVE";
/// Bytes that kept nodes may take.
const MEMORY: &str = "PARITY_TAP_MEMORY";
/// `1` keeps hashes and norms in the place of values.
const HASHED: &str = "PARITY_TAP_HASHED";
/// File with tokens of another run, as [`parity_record::forced::Forced`] spells them.
const FORCED: &str = "PARITY_TAP_FORCED";
/// `0` leaves it to the program which rows it asks logits of.
const ALL_ROWS: &str = "PARITY_TAP_ALL_ROWS";
/// Folder that this library and its parent process share while the program runs.
const SHARED: &str = "PARITY_TAP_SHARED";

/// What was asked for.
pub struct Asked {
    /// What is recorded.
    pub options: Options,
    /// Whether every row gets logits.
    pub all_rows: bool,
    /// See [`SHARED`].
    pub shared: Option<PathBuf>,
}

/// Reads the environment; `None` where nothing is to be recorded.
pub fn asked() -> Result<Option<Asked>, String> {
    let value = |name: &str| std::env::var(name).ok();
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let options = Options {
        dir: path(DIR),
        filter: value(FILTER).unwrap_or_default().parse()?,
        sequence: number(SEQUENCE)?,
        memory: number(MEMORY)?,
        observe: value(OBSERVE).map(|text| text.parse()).transpose()?.unwrap_or_default(),
        hashed: value(HASHED).is_some_and(|value| value == "1"),
        hashes: path(HASHES),
        graphs: path(GRAPHS),
        inject: value(INJECT).map(|text| text.parse()).transpose()?,
        forced: path(FORCED).map(|file| read_forced(&file)).transpose()?,
        version: None,
    };
    if options.dir.is_none() && options.hashes.is_none() {
        return Ok(None);
    }
    let all_rows = value(ALL_ROWS).is_none_or(|value| value != "0");
    Ok(Some(Asked { options, all_rows, shared: path(SHARED) }))
}

/// The number that a variable holds, where it is set.
fn number<T: std::str::FromStr>(name: &str) -> Result<Option<T>, String> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| format!("{name}={text} is no number"))
}

/// The tokens of another run.
fn read_forced(file: &Path) -> Result<Forced, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    text.parse()
}

/// Tells the user through standard error, and the parent process through a file.
pub struct Parent {
    shared: Option<PathBuf>,
    /// Whether it is told of the first context.
    first: bool,
    /// Where passes are counted, as two words: those computed, those written.
    passes: Option<File>,
}

impl Parent {
    /// The parent that shares the folder, as the recording of the `first` context, or of another, sees it.
    pub fn new(shared: Option<PathBuf>, first: bool) -> Parent {
        let file = |dir: &PathBuf| OpenOptions::new().write(true).open(dir.join("passes")).ok();
        let passes = shared.as_ref().and_then(file);
        Parent { shared, first, passes }
    }

    /// Writes a line behind those before it. The parent has written the file ahead, as zeros, so that a
    /// full disk cannot keep a word from it.
    fn write(&self, line: &str) -> std::io::Result<()> {
        let Some(dir) = &self.shared else { return Ok(()) };
        let file = OpenOptions::new().read(true).write(true).open(dir.join("status"))?;
        let mut text = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or(0)];
        file.read_exact_at(&mut text, 0)?;
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
        file.write_all_at(line.as_bytes(), end as u64)
    }
}

/// Passes of all contexts that were computed, and those of them that are written.
static COMPUTED: AtomicU64 = AtomicU64::new(0);
static WRITTEN: AtomicU64 = AtomicU64::new(0);

impl Parent {
    /// Counts one more, in the parent's eyes too: they tell it whether the program ended before all was written.
    fn count(&self, of: &AtomicU64, place: u64) {
        let count = of.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(file) = &self.passes {
            let _ = file.write_all_at(&count.to_le_bytes(), 8 * place);
        }
    }

    /// Says that all is written: counts of several contexts may have come in another order.
    pub fn settled(shared: &Path) {
        let count = COMPUTED.load(Ordering::Relaxed);
        if count == 0 {
            return;
        }
        let count = count.to_le_bytes();
        let file = OpenOptions::new().write(true).open(shared.join("passes"));
        let _ = file.and_then(|file| file.write_all_at(&[count, count].concat(), 0));
    }
}

impl Host for Parent {
    fn say(&self, message: &str) {
        say(message);
    }

    fn status(&self, key: &str, value: &str) {
        // Only the parent's closing words depend on it.
        let _ = self.write(&format!("{key} {}\n", value.replace('\n', " ")));
    }

    fn computed(&self) {
        self.count(&COMPUTED, 0);
    }

    fn written(&self) {
        self.count(&WRITTEN, 1);
    }

    fn claim(&self) -> bool {
        let owner = |dir: &PathBuf| OpenOptions::new().write(true).create_new(true).open(dir.join("owner"));
        !self.first || self.shared.as_ref().is_none_or(|dir| owner(dir).is_ok())
    }
}

/// Says something on the program's standard error, which may be closed.
pub fn say(message: impl std::fmt::Display) {
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("parity: {message}\n"));
}
