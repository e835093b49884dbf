//! Flags that several commands share.

use std::fs::{File, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::builder::TypedValueParser;
use clap::{Args, ValueEnum};
use parity_dump::Dump;
use parity_dump::manifest::MANIFEST_FILE;
use parity_graph::fault::Wanted;

use crate::audit::AuditRows;
use crate::compare::{Tolerance, Tolerances};
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::faults::injected::parse;
use crate::foreign;
use crate::hub;
use crate::inspect::against::{scaled, with_adapters};
use crate::numerics::Numerics;
use crate::references;
use crate::select::{Layers, Selection};

/// Which model.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// GGUF model file
    ///
    /// Without a model, `run` uses the small one that ships with parity, `audit` looks for the model of the dump, and
    /// `diff` compares without an audit.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// GGUF model from Hugging Face, also -hf
    ///
    /// USER/REPO[:QUANT], for example Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q8_0. Without QUANT it is Q4_K_M. The file
    /// is fetched once, into the cache that other programs share.
    #[arg(long, value_name = "REPO", conflicts_with = "model")]
    hf_repo: Option<String>,
}

impl ModelArgs {
    /// The file, if one was named.
    pub fn path(&self) -> Result<Option<PathBuf>> {
        match (&self.model, &self.hf_repo) {
            (Some(path), _) if !path.exists() => Err(Error::file(path, "there is no such file")
                .expected("a GGUF model")
                .hint("-hf USER/REPO[:QUANT] fetches one from Hugging Face")),
            (Some(path), _) => Ok(Some(path.clone())),
            (None, Some(name)) => hub::model(name).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// An adapter of the model.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct LoraArgs {
    /// LoRA adapter that the engine ran with: FILE[:SCALE]
    ///
    /// A GGUF file as llama.cpp writes it, or a safetensors file of PEFT with its adapter_config.json, or their folder. What it
    /// adds is multiplied by SCALE, which is 1 where none is given. The flag may be repeated.
    #[arg(long, value_name = "FILE[:SCALE]", hide_short_help = true)]
    lora: Vec<String>,
}

impl LoraArgs {
    /// The model with the adapters that were given.
    pub fn applied(&self, file: ModelFile) -> Result<ModelFile> {
        with_adapters(file, &self.adapters())
    }

    /// The files, each with its scale.
    pub fn adapters(&self) -> Vec<(PathBuf, f32)> {
        self.lora.iter().map(|text| scaled(text)).collect()
    }
}

/// How a dump of another engine is read.
#[derive(Args)]
#[command(next_help_heading = "Dumps of other engines")]
pub struct ForeignArgs {
    /// Map of tensor names to checkpoint ids
    ///
    /// A TOML file (docs/dumps.md, `parity map`), or one of hf, hf-gemma, vllm, sglang, candle, llama.cpp. Without it,
    /// parity uses the built-in map that knows the names, and says which.
    #[arg(long, value_name = "MAP")]
    names: Option<PathBuf>,
    /// Token ids, if the dump lacks them: 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
}

impl ForeignArgs {
    /// The tokens that were given.
    pub fn given_tokens(&self) -> Option<Vec<u32>> {
        self.tokens.clone()
    }

    /// What they mean, with the model whose widths a map may need.
    pub fn options(&self, model: Option<&Path>) -> foreign::Options {
        let (names, tokens) = (self.names.clone(), self.tokens.clone());
        foreign::Options { names, tokens, model: model.map(Path::to_owned) }
    }
}

/// What standard output carries.
#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct FormatArgs<F: HasJson> {
    /// Another format, e.g. --json
    #[arg(long, value_enum, default_value_t, hide_possible_values = true, long_help = formats::<F>())]
    format: F,
    /// Print JSON: short for --format json
    #[arg(long, conflicts_with = "format", hide_short_help = true)]
    json: bool,
}

impl<F: HasJson> FormatArgs<F> {
    /// The format that was asked for.
    pub fn format(&self) -> F {
        if self.json { F::JSON } else { self.format }
    }
}

/// What the long help says of a command's formats.
fn formats<F: HasJson>() -> String {
    let names = F::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    let names: Vec<String> = names.map(|value| value.get_name().to_owned()).collect();
    format!("Print in another format: {}", names.join(", "))
}

/// The formats of a command.
pub trait HasJson: ValueEnum + Copy + Default + Send + Sync + 'static {
    /// The one for programs.
    const JSON: Self;
}

impl HasJson for Format {
    const JSON: Format = Format::Json;
}

/// What standard output carries, where there is nothing but a text and its data.
#[derive(Clone, Copy, Default, ValueEnum)]
pub enum Format {
    /// Text for people
    #[default]
    Table,
    /// JSON for programs
    Json,
}

/// Which checkpoints are looked at.
#[derive(Args)]
#[command(next_help_heading = "Checkpoints")]
pub struct SelectArgs {
    /// Only these layers: 0, 0..3, 5..
    ///
    /// Both ends are included, and 5.. goes to the last layer. `run` also stops the engine after the last of them.
    #[arg(long, value_name = "LAYERS")]
    layer: Option<Layers>,
    /// Only these, e.g. 'blk.*.q_rope'
    ///
    /// A pattern of checkpoint ids, in which * stands for anything. The flag may be repeated.
    #[arg(long, value_name = "GLOB")]
    checkpoint: Vec<String>,
    /// Accept what only one side has
    ///
    /// Checkpoints and rows that one side lacks make the answer undecided, unless this flag accepts them.
    #[arg(long)]
    pub allow_missing: bool,
}

impl SelectArgs {
    /// The selection they mean.
    pub fn selection(&self) -> Result<Selection> {
        Selection::new(self.layer, &self.checkpoint)
    }
}

/// The user's tolerances.
#[derive(Args)]
#[command(next_help_heading = "What passes")]
pub struct ToleranceArgs {
    /// Largest |a-b| relative to |b|
    ///
    /// A tolerance of your own replaces the bounds that parity derives.
    /// A value passes if |a-b| is at most atol + rtol·|b|; a is the candidate, b the reference.
    #[arg(long, value_name = "X")]
    rtol: Option<f64>,
    /// Largest |a-b|
    #[arg(long, value_name = "X")]
    atol: Option<f64>,
    /// Largest |a-b|² / |b|² of a tensor
    #[arg(long, value_name = "X")]
    nmse: Option<f64>,
    /// TOML file of tolerances by checkpoint
    ///
    /// One table for each pattern: [[tolerance]] with checkpoint = "blk.*.ffn_out" and rtol, atol or nmse.
    #[arg(long, value_name = "FILE")]
    tolerances: Option<PathBuf>,
}

impl ToleranceArgs {
    /// The tolerances they mean.
    pub fn tolerances(&self) -> Result<Tolerances> {
        let given = Tolerance { rtol: self.rtol, atol: self.atol, nmse: self.nmse };
        given.check(["--rtol", "--atol", "--nmse"])?;
        let all = Tolerances::uniform(given);
        match &self.tolerances {
            Some(path) => all.with_file(path),
            None => Ok(all),
        }
    }
}

/// A dump whose arithmetic a flag may declare.
pub fn open_declared(path: &Path, how: &foreign::Options, numerics: Option<Numerics>) -> Result<Dump> {
    Ok(foreign::declared(foreign::open(path, how)?, numerics))
}

/// Whether and where exact arithmetic is asked.
#[derive(Args)]
#[command(next_help_heading = "What passes")]
pub struct AuditArgs {
    /// Rows to recompute in f64: N, or all
    ///
    /// The other rows are screened, which is faster and sees less (docs/bounds.md).
    #[arg(long, value_name = "N", default_value_t)]
    audit_rows: AuditRows,
    /// Compare only, recompute nothing
    ///
    /// Rounding and bugs cannot be told apart then, so only equality or a tolerance (--rtol, --atol, --nmse) can pass.
    #[arg(long, conflicts_with = "audit_rows")]
    no_audit: bool,
}

impl AuditArgs {
    /// The rows, unless there is to be no audit.
    pub fn rows(&self) -> Option<AuditRows> {
        (!self.no_audit).then_some(self.audit_rows)
    }
}

/// Opens the model that was named, or the one that ships with parity.
pub fn model_file(path: Option<&Path>) -> Result<ModelFile> {
    match path {
        Some(path) => ModelFile::open(path),
        None => ModelFile::open(&references::default_model()?),
    }
}

/// A number of things of which there is at least one: 0 is refused with the range.
pub fn at_least_one() -> impl TypedValueParser<Value = usize> {
    |text: &str| match text.parse::<usize>() {
        Ok(number) if number >= 1 => Ok(number),
        Ok(_) => Err("at least 1".to_owned()),
        Err(_) => Err(format!("a whole number from 1 to {}", usize::MAX)),
    }
}

/// A folder for a dump that no other parity writes to as long as this is kept: the system gives it back however a process ends.
#[must_use]
pub struct Room(Option<(File, PathBuf)>);

impl Room {
    /// Takes a folder, which need not be there yet.
    ///
    /// # Errors
    /// Where another process has it. Where nothing can be locked nobody is kept off.
    fn take(flag: &str, dir: &Path) -> Result<Room> {
        let mut digest = DefaultHasher::new();
        std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()).hash(&mut digest);
        let path = std::env::temp_dir().join(format!("parity-{:016x}.lock", digest.finish()));
        let Ok(file) = File::options().create(true).truncate(false).write(true).open(&path) else {
            return Ok(Room(None));
        };
        match file.try_lock() {
            Ok(()) => Ok(Room(Some((file, path)))),
            Err(TryLockError::WouldBlock) => Err(Error::file(dir, "another parity is writing a dump there")
                .hint(format!("wait until it has ended; {flag} DIR chooses another folder"))),
            Err(TryLockError::Error(_)) => Ok(Room(None)),
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some((_file, path)) = &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Tries the folder before a program runs for minutes: it can be written to, by nobody else at the same time, and holds no dump
/// that would be lost.
pub fn room_for_a_dump(flag: &str, dir: &Path, force: bool) -> Result<Room> {
    let room = Room::take(flag, dir)?;
    let manifest = dir.join(MANIFEST_FILE);
    if manifest.exists() && !force {
        return Err(Error::file(dir, "holds a dump already")
            .expected("a folder that is new or empty")
            .found(manifest.display())
            .hint(format!("--force replaces it; {flag} DIR chooses another folder")));
    }
    let unwritable = |e: std::io::Error| {
        Error::file(dir, format!("cannot be written: {e}")).hint(format!("{flag} DIR chooses another folder"))
    };
    // What is made for the trial goes again: a program that cannot be recorded leaves no folder behind.
    let is_new = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.exists();
    let new: Vec<&Path> = dir.ancestors().take_while(is_new).collect();
    std::fs::create_dir_all(dir).map_err(unwritable)?;
    tempfile::NamedTempFile::new_in(dir).map_err(unwritable)?;
    new.into_iter().try_for_each(std::fs::remove_dir).map_err(unwritable)?;
    Ok(room)
}

/// A mistake as it is typed; says what will not be understood any more.
///
/// # Errors
/// Says what is not understood.
pub fn mistake(text: &str) -> Result<Wanted> {
    let wanted = parse(text)?;
    if let Some(warning) = wanted.warning() {
        let _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
    Ok(wanted)
}
