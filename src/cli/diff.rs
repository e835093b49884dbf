//! `parity diff`: two dumps, compared.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::shared::{self, AuditArgs, ForeignArgs, ModelArgs, SelectArgs, ToleranceArgs};
use crate::foreign;
use crate::jobs::diff::{Options, diff};
use crate::numerics::Numerics;
use crate::record::import::is_partial;
use crate::recorded::{self, Foreign};

const EXAMPLES: &str = "\
Examples:
  parity diff mine reference -m model.gguf
  parity diff mine reference -m model.gguf --layer 0..3 --report out
  parity diff mine reference --rtol 1e-3 --atol 1e-5";

/// Flags of `parity diff`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Dump to judge: a folder, or any format in docs/dumps.md
    candidate: PathBuf,
    /// Dump to compare with, usually of llama.cpp
    reference: PathBuf,
    /// Arithmetic of the candidate
    ///
    /// For example f32, or "bf16 storage=bf16 kv=bf16" (docs/dumps.md). It overrides what the dump declares. If
    /// neither declares it, parity infers it from the values.
    #[arg(long, value_name = "WORDS")]
    numerics: Option<Numerics>,
    /// Arithmetic of the reference
    #[arg(long, value_name = "WORDS")]
    reference_numerics: Option<Numerics>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    foreign: ForeignArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    tolerance: ToleranceArgs,
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
    let mut orders: Vec<String> = Vec::new();
    for (side, dump) in [("candidate", &mut candidate), ("reference", &mut reference)] {
        let order = path.as_deref().map(|path| recorded::settle(dump, path)).transpose()?.flatten();
        orders.extend(order.map(|order| format!("{side}: {order}")));
    }
    let opened = path.as_deref().map(|path| recorded::open(path, &[&candidate, &reference])).transpose()?;
    let model = match opened {
        Some(Err(foreign)) => {
            let sides = recorded::Sides { candidate: &candidate, reference: &reference };
            let (selection, tolerances) = (args.select.selection()?, args.tolerance.tolerances()?);
            let mut report =
                recorded::diff(&sides, &foreign, &selection, &tolerances, args.select.allow_missing)?;
            report.notes.extend(orders);
            recorded::weigh(&mut report, &candidate, None)?;
            return args.output.deliver(folder, report);
        }
        Some(Ok(model)) => Some(model),
        None => None,
    };
    let options = Options {
        selection: args.select.selection()?,
        tolerances: args.tolerance.tolerances()?,
        allow_missing: args.select.allow_missing,
        pictures: folder.is_some(),
        audit: args.audit.rows(),
    };
    let mut report = diff(&candidate, &reference, model.as_ref(), &options)?;
    if let Some(path) = path.filter(|_| options.audit.is_some() && !is_partial(&reference)) {
        report = recorded::explained(report, || {
            let sides = recorded::Sides { candidate: &candidate, reference: &reference };
            let Options { selection, tolerances, allow_missing, .. } = &options;
            recorded::diff(&sides, &Foreign::of_file(&path)?, selection, tolerances, *allow_missing)
        });
    }
    report.notes.extend(orders);
    recorded::weigh(&mut report, &candidate, model.as_ref())?;
    args.output.deliver(folder, report)
}
