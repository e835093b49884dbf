//! `parity inspect`: what a file holds, and what looks wrong in it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::output::print;
use super::shared::{FormatArgs, HasJson};
use super::{Outcome, exit_code};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::inspect::against::compare;
use crate::inspect::{DumpInspection, Inspection, dot, inspect};
use crate::report::{Verdict, json};
use crate::select::Layers;
use crate::tokenizer::Tokenizer;

/// Values that `--raw-f32` decodes at a time, about.
const RAW_CHUNK: usize = 1 << 20;

const EXAMPLES: &str = "\
Examples:
  parity inspect model.gguf
  parity inspect model.gguf -p \"Hello\" --format json
  parity inspect model.gguf --against HF_FOLDER
  parity inspect recording --format dot --layer 3 | dot -Tsvg >layer.svg";

/// Flags of `parity inspect`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// GGUF model, or dump: a folder, or any format in docs/dumps.md
    file: PathBuf,

    /// Also print the token ids of TEXT
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,

    /// Compare a GGUF model with the Hugging Face folder that it was converted from: config, tokenizer, chat template,
    /// generation defaults and weights
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["prompt", "layer", "raw_f32"])]
    against: Option<PathBuf>,

    /// Exit with 1 for notes too: differences by which no logit differs
    #[arg(long, requires = "against")]
    strict: bool,

    /// List every tensor
    #[arg(long)]
    all: bool,

    /// Only these layers of a recording: 3, 0..3, 5..
    #[arg(long, value_name = "LAYERS")]
    layer: Option<Layers>,

    #[command(flatten)]
    format: FormatArgs<InspectionFormat>,

    /// Print nothing but the values of one tensor, as little-endian f32
    #[arg(long, value_name = "TENSOR", hide = true)]
    raw_f32: Option<String>,
}

/// How an inspection is printed.
#[derive(Clone, Copy, Default, clap::ValueEnum)]
enum InspectionFormat {
    /// Text for people
    #[default]
    Table,
    /// JSON for programs
    Json,
    /// The first graph of a recording, for Graphviz
    Dot,
}

impl HasJson for InspectionFormat {
    const JSON: InspectionFormat = InspectionFormat::Json;
}

/// Runs the command. Whatever looks wrong in the file is the result, not a failure; weights that are not those that a
/// file was made of are a divergence.
pub fn main(args: &Args) -> Outcome {
    if let Some(folder) = &args.against {
        return against(args, folder);
    }
    match &args.raw_f32 {
        Some(tensor) => write_raw(args, tensor)?,
        None => print(&text(args)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A model against what it was converted from.
fn against(args: &Args, folder: &Path) -> Outcome {
    if matches!(args.format.format(), InspectionFormat::Dot) {
        return Err(Error::new("--format dot", "is of recordings").expected("table or json with --against"));
    }
    let found = compare(&args.file, folder)?;
    print(&match args.format.format() {
        InspectionFormat::Json => json::render(&found)?,
        InspectionFormat::Table | InspectionFormat::Dot => found.to_text(args.all),
    })?;
    let differs = found.differs() || (args.strict && found.has_notes());
    Ok(exit_code(match (differs, found.is_open()) {
        (true, _) => Verdict::Divergence,
        (false, true) => Verdict::Undecided,
        (false, false) => Verdict::Parity,
    }))
}

fn text(args: &Args) -> Result<String> {
    let mut inspection = inspect(&args.file)?;
    if let Some(prompt) = &args.prompt {
        let Inspection::Model(model) = &mut inspection else {
            let error = Error::file(&args.file, "is a dump: only models have a tokenizer");
            return Err(error.hint("parity inspect MODEL.gguf -p TEXT"));
        };
        model.tokens = Some(Tokenizer::from_gguf(&Gguf::open(&args.file)?)?.encode(prompt)?);
    }
    if let Some(layers) = args.layer {
        let dump = recording(&mut inspection, &args.file, "--layer")?;
        dump.keep(|layer| (layers.first..=layers.last).contains(&layer));
        if dump.checkpoints.is_empty() && dump.graphs.iter().all(|graph| graph.nodes.is_empty()) {
            let error = Error::new("--layer", "nothing of this recording is in these layers");
            return Err(error.hint(format!("parity inspect {} lists its layers", args.file.display())));
        }
    }
    match args.format.format() {
        InspectionFormat::Dot => {
            let dump = recording(&mut inspection, &args.file, "--format dot")?;
            dump.graphs.first().map(dot).ok_or_else(|| {
                Error::file(&args.file, "brings no graph").hint("record it again with this parity's tap")
            })
        }
        InspectionFormat::Table => Ok(inspection.to_text(args.all)),
        InspectionFormat::Json => match serde_json::to_string_pretty(&inspection) {
            Ok(json) => Ok(json + "\n"),
            Err(error) => Err(Error::file(&args.file, format!("cannot be put into JSON: {error}"))),
        },
    }
}

/// The recording that `flag` asks for.
fn recording<'a>(inspection: &'a mut Inspection, file: &Path, flag: &str) -> Result<&'a mut DumpInspection> {
    match inspection {
        Inspection::Dump(dump) => Ok(dump),
        Inspection::Model(_) => {
            let error = Error::file(file, format!("is a model: {flag} is of recordings"));
            Err(error.hint("parity record -o REC -- PROGRAM …, then parity inspect REC"))
        }
    }
}

/// Writes the values of one tensor to standard output.
fn write_raw(args: &Args, name: &str) -> Result<()> {
    let gguf = Gguf::open(&args.file)?;
    let shape = gguf.tensor(name).map(|tensor| tensor.info.shape.clone()).unwrap_or_default();
    let tensor = gguf.require_tensor(name, &shape)?;
    let rows = if tensor.info.elements() == 0 { 0 } else { tensor.rows() };
    let rows_at_a_time = (RAW_CHUNK / tensor.cols().max(1)).max(1);
    let mut out = std::io::stdout().lock();
    for start in (0..rows).step_by(rows_at_a_time) {
        let rows = start..rows.min(start + rows_at_a_time);
        let mut values = vec![0f32; rows.len() * tensor.cols()];
        tensor.decode_rows(rows, &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        out.write_all(&bytes)
            .map_err(|error| Error::new("standard output", format!("cannot be written: {error}")))?;
    }
    Ok(())
}
