//! `parity completions` and `parity man`: what shells and `man` need to know of the command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use super::output::print;
use super::{Cli, Outcome};
use crate::error::Error;

/// Flags of `parity completions`.
#[derive(clap::Args)]
pub struct CompletionArgs {
    /// Your shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Flags of `parity man`.
#[derive(clap::Args)]
pub struct ManArgs {
    /// Folder for the pages, e.g. ~/.local/share/man/man1
    folder: PathBuf,
}

/// Prints the completions.
pub fn completions(args: &CompletionArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "parity", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages.
pub fn man(args: &ManArgs) -> Outcome {
    let failed = |e: std::io::Error| Error::file(&args.folder, format!("cannot be written: {e}"));
    std::fs::create_dir_all(&args.folder).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.folder).map_err(failed)?;
    print(&format!("man pages: {}\n", args.folder.display()))?;
    Ok(ExitCode::SUCCESS)
}
