//! `parity diff`: two dumps, compared.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::shared::{self, AuditArgs, ForeignArgs, ModelArgs, SelectArgs, ToleranceArgs};
use crate::foreign;
use crate::jobs::diff::{Options, diff};
use crate::jobs::logprobs;
use crate::numerics::Numerics;
use crate::record::import::is_partial;
use crate::recorded::{self, Foreign};

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
    if let Some(said) = foreign::logprobs::read(&args.candidate)? {
        let untold = foreign::Options { model: path.clone(), ..foreign::Options::default() };
        let reference = shared::open_declared(&args.reference, &untold, args.reference_numerics)?;
        let (tokens, allow_missing) = (args.foreign.given_tokens(), args.select.allow_missing);
        let how = logprobs::Options { model: path, tokens, numerics: args.numerics, allow_missing };
        return args.output.deliver(folder, logprobs::judge(&said, Some(&reference), &how)?);
    }
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
