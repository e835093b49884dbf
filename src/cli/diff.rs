//! `parity diff`: two dumps, compared.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::shared::{self, AuditArgs, ForeignArgs, ModelArgs, SelectArgs, ToleranceArgs};
use crate::foreign;
use crate::jobs::diff::{Options, diff};
use crate::model::file::ModelFile;
use crate::numerics::Numerics;

/// Flags of `parity diff`.
#[derive(clap::Args)]
pub struct Args {
    /// Dump that is judged: of parity, or of another engine in a format that docs/dumps.md lists
    candidate: PathBuf,
    /// Dump that it is compared with
    reference: PathBuf,
    #[command(flatten)]
    foreign: ForeignArgs,
    /// The arithmetic of the candidate's producer, whatever its dump declares: f32, `bf16 storage=bf16 kv=bf16`, …
    /// Where nobody declares it, it is found
    #[arg(long, value_name = "WORDS")]
    numerics: Option<Numerics>,
    /// The arithmetic of the reference's producer
    #[arg(long, value_name = "WORDS")]
    reference_numerics: Option<Numerics>,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    tolerance: ToleranceArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let folder = args.output.folder()?;
    let path = args.model.path()?;
    let told = args.foreign.options(path.as_deref());
    let untold = foreign::Options { model: path.clone(), ..foreign::Options::default() };
    // A map is of the side that is another engine's.
    let turned = told.is_told() && foreign::is_native(&args.candidate);
    let (ours, theirs) = if turned { (&untold, &told) } else { (&told, &untold) };
    let mut candidate = shared::open_declared(&args.candidate, ours, args.numerics)?;
    let mut reference = shared::open_declared(&args.reference, theirs, args.reference_numerics)?;
    let file = path.as_deref().map(ModelFile::open).transpose()?;
    let options = Options {
        selection: args.select.selection()?,
        tolerances: args.tolerance.tolerances()?,
        allow_missing: args.select.allow_missing,
        pictures: folder.is_some(),
        audit: args.audit.rows(),
    };
    args.output.deliver(folder, diff(&mut candidate, &mut reference, file.as_ref(), &options)?)
}
