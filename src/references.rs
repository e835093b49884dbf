//! Finds the model and the reference dumps that ship with parity, and recordings that were kept.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::dump::{Graphs, Recording};
use crate::error::{Error, Result};
use crate::gguf::{Adapter, Gguf};
use crate::model::{fingerprint, spelt};
use crate::record;
use crate::text::tell;
use parity_dump::manifest::ModelInfo;
use parity_dump::{Dump, DumpError};

/// Overrides where shipped models and dumps are looked for.
pub const SHIPPED_VARIABLE: &str = "PARITY_REFERENCE_DUMPS";
/// Overrides where recordings are kept.
pub const KEPT_VARIABLE: &str = "PARITY_CACHE";
/// Folder of the cache that what was fetched is kept in; no dump lies there.
pub const REMOTE: &str = "remote";
/// Name of the shipped folder.
const SHIPPED: &str = "reference-dumps";
/// Where a wheel puts it, within the folder of its environment.
const SHARED: &str = "share/parity";
/// The model that is used where none is named, within the shipped folder.
const DEFAULT_MODEL: &str = "models/qwen2-tiny-py-F16.gguf";
/// Folders below a root that are searched for dumps: `reference-dumps/MODEL/PROMPT`.
const SEARCH_DEPTH: usize = 3;

/// The folder of shipped models and dumps: named by [`SHIPPED_VARIABLE`], in the current folder, beside the
/// program or a folder above it, or where it was built.
pub fn shipped() -> Option<PathBuf> {
    let named = std::env::var_os(SHIPPED_VARIABLE).map(PathBuf::from);
    let here = Some(PathBuf::from(SHIPPED));
    let program = std::env::current_exe().ok();
    let above = program.iter().flat_map(|exe| exe.ancestors().skip(1));
    let above = above.flat_map(|dir| [dir.join(SHIPPED), dir.join(SHARED).join(SHIPPED)]);
    let built = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join(SHIPPED));
    named.into_iter().chain(here).chain(above).chain(built).find(|dir| dir.is_dir())
}

/// Names a folder of GGUF models.
pub const MODELS_VARIABLE: &str = "PARITY_MODELS";

/// The model that a dump was made with: the one of its fingerprint, or of its file name where it has none, in
/// the folder that [`MODELS_VARIABLE`] names or among the shipped ones.
///
/// # Errors
/// Says which model was looked for where; tells which files could not be opened: the model may be one of them.
pub fn model_of(dump: &Path, made_with: &ModelInfo) -> Result<PathBuf> {
    let named = std::env::var_os(MODELS_VARIABLE).map(PathBuf::from);
    let folders: Vec<PathBuf> = named.into_iter().chain(shipped().map(|dir| dir.join("models"))).collect();
    let entries = folders.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    let has_name = |path: &Path| path.file_name().and_then(|name| name.to_str()) == made_with.file.as_deref();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    // The file of that name is tried first: the others may be many.
    files.sort_by_key(|path| (!has_name(path), path.clone()));
    let mut unread = Vec::new();
    let fits = |path: &PathBuf| match &made_with.fingerprint {
        Some(print) => match Gguf::open(path) {
            Ok(gguf) => fingerprint(&gguf) == *print,
            Err(error) => {
                unread.push(error);
                false
            }
        },
        None => has_name(path),
    };
    let found = files.into_iter().find(fits);
    found.ok_or_else(|| {
        unread.into_iter().for_each(passed_over);
        let looked: Vec<String> = folders.iter().map(|dir| dir.display().to_string()).collect();
        let known = made_with.file.is_some() || made_with.fingerprint.is_some();
        Error::file(dump, "no model is given, and the one that the dump was made with is not at hand")
            .expected(if known { spelt(made_with) } else { "-m MODEL: the dump names no model".to_owned() })
            .found(format!("nothing that fits in {}", looked.join(", ")))
            .hint(format!("parity audit {} -m MODEL, or its folder in {MODELS_VARIABLE}", dump.display()))
    })
}

/// The model that is used where none is named.
pub fn default_model() -> Result<PathBuf> {
    shipped().map(|dir| dir.join(DEFAULT_MODEL)).filter(|path| path.is_file()).ok_or_else(|| {
        Error::new(SHIPPED, "the shipped model is not to be found")
            .expected(format!("{SHIPPED}/{DEFAULT_MODEL} here or beside the program"))
            .hint(format!("name a model with -m MODEL, or the folder in ${SHIPPED_VARIABLE}"))
    })
}

/// Where recordings are kept for later runs: named by [`KEPT_VARIABLE`], or parity's folder in the user's cache.
pub fn kept() -> Option<PathBuf> {
    let named = std::env::var_os(KEPT_VARIABLE).map(PathBuf::from);
    let cache = || std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    named.or_else(|| cache().or_else(home).map(|dir| dir.join("parity")))
}

/// A stored reference of the model with this fingerprint whose tokens begin with `tokens`, and that has
/// `n_decode` more. Cleaner numerics (F32 cache, no flash attention) come first, then longer ones. Where there is none, it
/// tells which dumps could not be read: it may be one of them.
pub fn find(fingerprint: &str, tokens: &[u32], n_decode: usize) -> Option<Dump> {
    let roots = [shipped(), kept()];
    let (mut found, mut unread) = (Vec::new(), Vec::new());
    for dump in roots.into_iter().flatten().flat_map(|root| dumps_below(&root, SEARCH_DEPTH)) {
        match dump {
            Ok(dump) => found.push(dump),
            Err(error) => unread.push(error),
        }
    }
    found.retain(|dump| {
        let manifest = dump.manifest();
        let same_model = manifest.model.fingerprint.as_deref() == Some(fingerprint);
        let long_enough = dump.tokens().len() >= tokens.len() + n_decode;
        let same_prompt = manifest.steps.first().is_some_and(|step| step.positions.len() >= tokens.len());
        // Printed values are a reference only where they are asked for.
        let whole = dump.seen_checkpoints().next().is_none();
        let fits = whole && same_model && long_enough && same_prompt && dump.tokens().starts_with(tokens);
        fits && !has_adapter(dump)
    });
    found.sort_by_key(|dump| {
        let numerics = dump.producer().numerics.clone().unwrap_or_default();
        (numerics.contains("flash=on"), numerics.contains("kv="), std::cmp::Reverse(dump.tokens().len()))
    });
    if found.is_empty() {
        unread.into_iter().map(Error::from).for_each(passed_over);
    }
    found.into_iter().next()
}

/// Whether what was recorded is a model with an adapter: its fingerprint is that of the model alone.
fn has_adapter(dump: &Dump) -> bool {
    Graphs::read(dump).unwrap_or_default().adapter_matrix().is_some()
}

/// Tells of a file that may be what was looked for, and cannot be read.
fn passed_over(error: Error) {
    tell(format_args!("passed over: {error}"));
}

/// Names the llama.cpp program that records references where there is none; `none` forbids it.
pub const PROGRAM_VARIABLE: &str = "PARITY_LLAMA";
/// What is looked for on the PATH instead.
const PROGRAM: &str = "llama-completion";
/// Flags for the cleanest reference: F32 cache, no flash attention, weights as they are stored, greedy.
const CLEAN_FLAGS: [&str; 14] = [
    "-ctk",
    "f32",
    "-ctv",
    "f32",
    "-fa",
    "off",
    "--no-repack",
    "-ngl",
    "0",
    "--temp",
    "0",
    "-no-cnv",
    "--no-warmup",
    "--no-escape",
];

/// The flags that tell llama.cpp of the model's adapters; `None` where it does not read one of them.
pub fn adapter_flags(gguf: &Gguf) -> Option<Vec<String>> {
    let flags = gguf.adapters().map(Adapter::flags).collect::<Option<Vec<_>>>()?;
    Some(flags.into_iter().flatten().collect())
}

/// The command that records a prompt and `n_decode` decode steps; the last token is sampled, not computed. An adapter that
/// llama.cpp does not read is left out.
pub fn recording_command(
    program: &Path,
    gguf: &Gguf,
    prompt: &str,
    n_tokens: usize,
    n_decode: usize,
) -> Vec<OsString> {
    let batch = n_tokens.max(1).to_string();
    let context = n_tokens.saturating_add(n_decode).saturating_add(1).to_string();
    let mut command: Vec<OsString> =
        vec![program.into(), "-m".into(), gguf.path().into(), "-p".into(), prompt.into()];
    command.extend(["-n".into(), n_decode.saturating_add(1).to_string().into()]);
    command.extend(["-b", &batch, "-ub", &batch, "-c", &context].map(OsString::from));
    command.extend(CLEAN_FLAGS.map(OsString::from));
    command.extend(adapter_flags(gguf).into_iter().flatten().map(OsString::from));
    command
}

/// A llama.cpp to record with: named by [`PROGRAM_VARIABLE`], or `llama-completion` on the PATH.
pub fn program() -> Option<PathBuf> {
    match std::env::var_os(PROGRAM_VARIABLE) {
        Some(named) if named == "none" => None,
        Some(named) => Some(PathBuf::from(named)),
        None => std::env::var_os("PATH").and_then(|path| {
            std::env::split_paths(&path).map(|dir| dir.join(PROGRAM)).find(|file| file.is_file())
        }),
    }
}

/// Records a reference with a llama.cpp at hand and keeps it; `None` where there is none, or one that does not read an adapter
/// of the model. Of a model with adapters, what was kept of it before is taken.
pub fn record(
    gguf: &Gguf,
    fingerprint: &str,
    prompt: &str,
    n_tokens: usize,
    n_decode: usize,
) -> Result<Option<Dump>> {
    let Some(adapters) = adapter_flags(gguf) else { return Ok(None) };
    let (Some(program), Some(kept)) = (program(), kept()) else { return Ok(None) };
    let mut of = format!("{n_decode} {prompt}");
    for (adapter, flag) in gguf.adapters().zip(adapters.chunks(2)) {
        let mut contents = Sha256::new();
        adapter.pairs().flat_map(|(_, pair)| [&pair.a.1, &pair.b.1]).for_each(|bytes| contents.update(bytes));
        of += &format!("\n{} {:?}", flag.join(" "), contents.finalize());
    }
    let name: String = Sha256::digest(of).iter().take(6).map(|b| format!("{b:02x}")).collect();
    let dir = kept.join(fingerprint.get(..12).unwrap_or(fingerprint)).join(name);
    if !adapters.is_empty() && dir.join(parity_dump::manifest::MANIFEST_FILE).exists() {
        return Ok(Some(Dump::open(&dir)?));
    }
    std::fs::create_dir_all(&dir).map_err(|e| Error::file(&dir, format!("cannot be created: {e}")))?;
    tell(format_args!("no stored reference; recording one with {}", program.display()));
    let summary = record::record(&record::Options {
        dir: dir.clone(),
        all_rows: true,
        output: record::Output::Nowhere,
        command: recording_command(&program, gguf, prompt, n_tokens, n_decode),
        ..record::Options::default()
    })?;
    if let Some(reason) = summary.incomplete {
        return Err(Error::file(&dir, format!("the recording is not complete: {reason}")));
    }
    Ok(Some(Dump::open(&dir)?))
}

/// The dumps below a folder; what is no dump is passed over.
fn dumps_below(dir: &Path, depth: usize) -> Vec<std::result::Result<Dump, DumpError>> {
    if dir.join(parity_dump::manifest::MANIFEST_FILE).is_file() {
        return vec![Dump::open(dir)];
    }
    let Some(entries) = std::fs::read_dir(dir).ok().filter(|_| depth > 0) else { return Vec::new() };
    let mut folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.retain(|path| !path.ends_with(REMOTE));
    folders.sort();
    folders.iter().flat_map(|folder| dumps_below(folder, depth - 1)).collect()
}

/// A word as a shell takes it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:=,@+%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
