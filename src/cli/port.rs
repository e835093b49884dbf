//! `parity port`: a conversion against its original, step by step.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::shared;
use crate::audit::AuditRows;
use crate::inspect::against::scaled;
use crate::jobs::port::{CONVERTED, ORIGINAL, Options, Ported, port};

const EXAMPLES: &str = "\
Examples:
  parity port --original HF_FOLDER --converted model-f32.gguf -p \"Hello\"
  parity port --original HF_FOLDER --converted model-f32.gguf -p \"Hello\" --program build/bin/llama-completion -o port";

/// Flags of `parity port`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Hugging Face folder of the original
    #[arg(long, value_name = "FOLDER")]
    original: PathBuf,
    /// GGUF file that was made of it
    ///
    /// In F32, F16 or BF16: of a quantised file, tensors are not compared.
    #[arg(long, value_name = "FILE")]
    converted: PathBuf,
    /// LoRA adapter that llama.cpp runs with: FILE[:SCALE]
    ///
    /// A GGUF file of convert_lora_to_gguf.py. transformers runs with what it was made of.
    #[arg(long, value_name = "FILE[:SCALE]", requires = "original_lora", hide_short_help = true)]
    lora: Option<String>,
    /// PEFT folder that the file of --lora was made of
    #[arg(long, value_name = "FOLDER", requires = "lora", hide_short_help = true)]
    original_lora: Option<PathBuf>,
    /// llama.cpp program to record [default: as for `parity run`]
    ///
    /// One that takes the flags of llama-completion, with the new architecture in it.
    #[arg(long, value_name = "LLAMA")]
    program: Option<PathBuf>,
    /// Python with torch, transformers and parity_dump
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Folder for the dumps, and for data/pytorch-*.bin and data/llamacpp-*.bin
    #[arg(short, long = "output", value_name = "DIR", default_value = "port")]
    output_dir: PathBuf,
    /// Replace dumps that are in the folder
    #[arg(long)]
    force: bool,
    /// Rows to recompute in f64: N, or all
    #[arg(long, value_name = "N", default_value_t)]
    audit_rows: AuditRows,
    /// Prompt [default: that of data/pytorch-NAME-prompt.txt]
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    prompt: Option<String>,
    /// File with the prompt
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let folder = args.output.folder()?;
    let room = |side: &str| shared::room_for_a_dump("-o", &args.output_dir.join(side), args.force);
    let _rooms = [room(CONVERTED)?, room(ORIGINAL)?];
    let report = port(&Options {
        original: args.original.clone(),
        converted: args.converted.clone(),
        adapter: args.lora.as_ref().zip(args.original_lora.clone()).map(|(text, original)| {
            let (converted, scale) = scaled(text);
            Ported { original, converted, scale }
        }),
        prompt: match &args.file {
            Some(path) => Some(crate::files::read(path, crate::files::TEXT_BYTES_MAX)?),
            None => args.prompt.clone(),
        },
        program: args.program.clone(),
        python: args.python.clone(),
        dir: args.output_dir.clone(),
        rows: args.audit_rows,
    })?;
    args.output.deliver(folder, report)
}
