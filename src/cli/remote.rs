//! `parity push` and `parity pull`: dumps that a team shares.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use super::output::print;
use super::progress::Progress;
use super::shared::{SelectArgs, room_for_a_dump};
use crate::error::Error;
use crate::memory::size;
use crate::remote;

const PUSH: &str = "\
Examples:
  parity push recording s3://bucket/references/qwen-1.5b/hello
  parity push recording /mnt/shared/references/hello

Credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; AWS_REGION, AWS_ENDPOINT_URL (docs/remote.md).";

/// Flags of `parity push`.
#[derive(clap::Args)]
#[command(after_help = PUSH)]
pub struct PushArgs {
    /// Dump folder
    dump: PathBuf,
    /// Where to: s3://BUCKET/PATH, https://HOST/PATH of a WebDAV server, or a folder
    to: PathBuf,
    /// Replace a dump that is there
    #[arg(long)]
    force: bool,
}

const PULL: &str = "\
Examples:
  parity pull s3://bucket/references/qwen-1.5b/hello -o hello
  parity pull https://example.org/references/hello -o hello --layer 7

Commands that read dumps take such an address too, and fetch what they need.";

/// Flags of `parity pull`.
#[derive(clap::Args)]
#[command(after_help = PULL)]
pub struct PullArgs {
    /// Where from: s3://BUCKET/PATH, https://HOST/PATH, or a folder
    from: PathBuf,
    /// Folder for the dump
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Let -o replace a dump
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    select: SelectArgs,
}

/// Runs `parity push`.
pub fn push(args: &PushArgs) -> Outcome {
    let progress = Progress::new("pushing");
    let pushed = remote::push(&args.dump, &args.to, args.force, &|done, all| progress.set(done, all))?;
    drop(progress);
    print(&format!(
        "{}: {} steps, {} of {}\n",
        args.to.display(),
        pushed.steps,
        size(pushed.stored),
        size(pushed.plain)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `parity pull`.
pub fn pull(args: &PullArgs) -> Outcome {
    if !remote::is_remote(&args.from) && !args.from.is_dir() {
        return Err(Error::file(&args.from, "there is no such folder"));
    }
    let _room = room_for_a_dump("-o", &args.output, args.force)?;
    let got = remote::pull(&args.from, &args.output, &args.select.selection()?)?;
    print(&format!(
        "{}: {} of {} tensors; {} fetched, {} from the cache\n",
        args.output.display(),
        got.tensors,
        got.of,
        size(got.fetched),
        size(got.cached)
    ))?;
    Ok(ExitCode::SUCCESS)
}
