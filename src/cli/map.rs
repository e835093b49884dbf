//! `parity map`: which tensor of another engine's dump is which checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use super::output::print;
use super::shared::{self, ModelArgs};
use crate::error::Error;
use crate::gguf::Gguf;
use crate::jobs::map::propose;
use crate::references::quoted;
use crate::text::tell;

/// Lines of which it is said at once why they are unsure.
const UNSURE_MAX: usize = 6;

const EXAMPLES: &str = "\
Examples:
  parity map hooks.npz -m model.gguf -o map.toml
  parity audit hooks.npz -m model.gguf --names map.toml";

/// Flags of `parity map`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Dump of another engine, in any format in docs/dumps.md
    foreign: PathBuf,
    /// File for the map [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Token ids of the first pass, if the dump lacks them: 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
    /// Threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = shared::at_least_one())]
    pub threads: Option<usize>,
    #[command(flatten)]
    model: ModelArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let Some(model) = args.model.path()? else {
        return Err(Error::new("-m", "a map is found by what a model computes: give the model file")
            .hint(format!("parity map {} -m MODEL.gguf", quoted(&args.foreign.to_string_lossy()))));
    };
    if let Some(output) = args.output.as_ref().filter(|output| output.exists()) {
        return Err(Error::file(output, "is there already").hint("-o FILE chooses another"));
    }
    let proposal = propose(&args.foreign, &Gguf::open(&model)?, args.tokens.as_deref())?;
    let text = proposal.toml();
    match &args.output {
        None => print(&text)?,
        Some(output) => {
            let failed = |e: std::io::Error| Error::file(output, format!("cannot be written: {e}"));
            let folder = output.parent().filter(|parent| !parent.as_os_str().is_empty());
            let folder = folder.map_or_else(|| PathBuf::from("."), PathBuf::from);
            let mut part = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
            std::io::Write::write_all(&mut part, text.as_bytes()).map_err(failed)?;
            part.persist_noclobber(output).map_err(|e| failed(e.error))?;
        }
    }
    tell(format_args!(
        "map: {} of {} lines are sure; {} tensors are no node of the model",
        proposal.sure(),
        proposal.groups.len(),
        proposal.unknown.len()
    ));
    let unsure = proposal.unsure();
    unsure.iter().take(UNSURE_MAX).for_each(|line| tell(format_args!("unsure: {line}")));
    if unsure.len() > UNSURE_MAX {
        tell(format_args!("{} more lines are unsure: the map says why of each", unsure.len() - UNSURE_MAX));
    }
    Ok(ExitCode::SUCCESS)
}
