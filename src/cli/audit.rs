//! `parity audit`: one dump against exact arithmetic.

use std::path::PathBuf;

use super::output::OutputArgs;
use super::progress::Progress;
use super::shared::{self, ForeignArgs, ModelArgs, SelectArgs};
use super::{Outcome, exit_code};
use crate::audit::AuditRows;
use crate::jobs::audit::{Options, audit, self_test};
use crate::model::file::ModelFile;
use crate::numerics::Numerics;
use crate::references;
use crate::report::{self, Verdict};
use parity_dump::Dump;

/// Flags of `parity audit`.
#[derive(clap::Args)]
pub struct Args {
    /// Dump that is judged: of parity, or of another engine in a format that docs/dumps.md lists
    dump: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    foreign: ForeignArgs,
    /// The arithmetic of the dump's producer, whatever the dump declares: f32, `bf16 storage=bf16 kv=bf16`, … Where
    /// nobody declares it, it is found
    #[arg(long, value_name = "WORDS")]
    numerics: Option<Numerics>,
    /// Token rows to recompute in f64: all, or N of them (the others are screened)
    #[arg(long, value_name = "N", default_value_t)]
    audit_rows: AuditRows,
    /// Inject every known mistake at every node of the dump, one at a time, and say which ones an audit finds
    #[arg(long)]
    self_test: bool,
    /// Threads; all cores where absent
    #[arg(short, long, value_name = "N", value_parser = shared::at_least_one())]
    threads: Option<usize>,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    shared::set_threads(args.threads)?;
    let folder = args.output.folder()?;
    let given = args.model.path()?;
    let mut recording =
        shared::open_declared(&args.dump, &args.foreign.options(given.as_deref()), args.numerics)?;
    let path = match given {
        Some(path) => path,
        None => references::model_of(&args.dump, &recording.manifest().model)?,
    };
    let file = ModelFile::open(&path)?;
    let options = Options {
        selection: args.select.selection()?,
        rows: args.audit_rows,
        allow_missing: args.select.allow_missing,
    };
    match args.self_test {
        true => sensitivity(args, &mut recording, &file, &options),
        false => args.output.deliver(folder, audit(&mut recording, &file, &options)?),
    }
}

/// What the audit can see.
fn sensitivity(args: &Args, recording: &mut Dump, file: &ModelFile, options: &Options) -> Outcome {
    let progress = Progress::new("injecting");
    let found = self_test(recording, file, options, &|done, all| progress.set(done, all))?;
    drop(progress);
    let nothing = found.nodes.iter().all(|node| node.undecided.is_some());
    args.output.show(&found, |layout| report::sensitivity::render(&found, layout))?;
    Ok(exit_code(if nothing { Verdict::Undecided } else { Verdict::Parity }))
}
