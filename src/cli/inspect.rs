//! `parity inspect`: what a file holds, and what looks wrong in it.

use std::io::Write;
use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::inspect::{Inspection, inspect};

/// Values that `--raw-f32` decodes at a time, about.
const RAW_CHUNK: usize = 1 << 20;

/// What a GGUF file or a dump holds, and what looks wrong in it.
#[derive(Debug, clap::Args)]
pub struct Inspect {
    /// A GGUF model, a dump folder, or a .safetensors file of activations
    pub file: PathBuf,

    /// Also print the token ids of TEXT
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,

    /// List every tensor on a line of its own
    #[arg(long)]
    pub all: bool,

    /// How to print it
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,

    /// Print nothing but the values of one tensor, as little-endian f32
    #[arg(long, value_name = "TENSOR", hide = true)]
    pub raw_f32: Option<String>,
}

/// How an inspection is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
}

impl Inspect {
    /// Prints the inspection to `out`. Whatever looks wrong is the result, not an error.
    pub fn run(&self, out: &mut dyn Write) -> Result<()> {
        if let Some(name) = &self.raw_f32 {
            return self.raw(name, out);
        }
        let mut inspection = inspect(&self.file)?;
        if let Some(text) = &self.prompt {
            inspection = self.with_tokens(inspection, text)?;
        }
        match self.format {
            Format::Table => out.write_all(inspection.to_text(self.all).as_bytes()).map_err(unwritten),
            Format::Json => {
                serde_json::to_writer_pretty(&mut *out, &inspection)
                    .map_err(|error| Error::new("standard output", error))?;
                writeln!(out).map_err(unwritten)
            }
        }
    }

    /// Adds the token ids of `text`, as the model's own tokenizer makes them.
    fn with_tokens(&self, inspection: Inspection, text: &str) -> Result<Inspection> {
        let Inspection::Model(mut model) = inspection else {
            let error = Error::file(&self.file, "is a dump: only models have a tokenizer");
            return Err(error.hint("parity inspect MODEL.gguf -p TEXT"));
        };
        let tokenizer = crate::tokenizer::Tokenizer::from_gguf(&Gguf::open(&self.file)?)?;
        model.tokens = Some(tokenizer.encode(text)?);
        Ok(Inspection::Model(model))
    }

    fn raw(&self, name: &str, out: &mut dyn Write) -> Result<()> {
        let gguf = Gguf::open(&self.file)?;
        let shape = gguf.tensor(name).map(|tensor| tensor.info.shape.clone()).unwrap_or_default();
        let tensor = gguf.require_tensor(name, &shape)?;
        if tensor.info.elements() == 0 {
            return Ok(());
        }
        let rows_at_a_time = (RAW_CHUNK / tensor.cols()).max(1);
        for start in (0..tensor.rows()).step_by(rows_at_a_time) {
            let rows = start..tensor.rows().min(start + rows_at_a_time);
            let mut values = vec![0f32; rows.len() * tensor.cols()];
            tensor.decode_rows(rows, &mut values);
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            out.write_all(&bytes).map_err(unwritten)?;
        }
        Ok(())
    }
}

/// Runs the command.
pub fn main(args: &Inspect) -> super::Outcome {
    let mut text = Vec::new();
    if args.raw_f32.is_some() {
        args.run(&mut std::io::stdout().lock())?;
    } else {
        args.run(&mut text)?;
        super::output::print(&String::from_utf8_lossy(&text))?;
    }
    Ok(std::process::ExitCode::SUCCESS)
}

fn unwritten(error: std::io::Error) -> Error {
    Error::new("standard output", format!("cannot be written: {error}"))
}
