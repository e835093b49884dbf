//! `parity audit`: one dump against exact arithmetic.

use std::path::PathBuf;

use super::output::OutputArgs;
use super::progress::Progress;
use super::shared::{self, ForeignArgs, ModelArgs, SelectArgs};
use super::{Outcome, exit_code};
use crate::audit::AuditRows;
use crate::dump::Recording;
use crate::foreign;
use crate::jobs::audit::{Options, audit};
use crate::jobs::logprobs;
use crate::model::Model;
use crate::numerics::Numerics;
use crate::recorded::{self, Foreign};
use crate::references;
use crate::report::{self, Verdict};
use crate::select::Selection;
use crate::sensitivity;

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
    if let Some(said) = foreign::logprobs::read(&args.dump)? {
        let (tokens, allow_missing) = (args.foreign.given_tokens(), args.select.allow_missing);
        let how = logprobs::Options { model: given, tokens, numerics: args.numerics, allow_missing };
        return args.output.deliver(folder, logprobs::judge(&said, None, &how)?);
    }
    let mut recording =
        shared::open_declared(&args.dump, &args.foreign.options(given.as_deref()), args.numerics)?;
    let path = match given {
        Some(path) => path,
        None => references::model_of(&args.dump, &recording.manifest().model)?,
    };
    let order = recorded::settle(&mut recording, &path)?;
    let selection = args.select.selection()?;
    if args.self_test {
        let model = Model::open(&path)?;
        model.refuse_other(&args.dump, &recording.manifest().model)?;
        return self_test(args, &recording, &model, &selection);
    }
    let model = match recorded::open(&path, &[&recording])? {
        Ok(model) => model,
        Err(foreign) => {
            let mut report = recorded::audit(&recording, &foreign, &selection, args.select.allow_missing)?;
            report.notes.extend(order);
            recorded::weigh(&mut report, &recording, None)?;
            return args.output.deliver(folder, report);
        }
    };
    let allow_missing = args.select.allow_missing;
    let options = Options { selection: selection.clone(), rows: args.audit_rows, allow_missing };
    let report = audit(&recording, &model, &options)?;
    let mut report = recorded::explained(report, || {
        recorded::audit(&recording, &Foreign::of_file(&path)?, &selection, allow_missing)
    });
    report.notes.extend(order);
    recorded::weigh(&mut report, &recording, Some(&model))?;
    args.output.deliver(folder, report)
}

/// What the audit can see.
fn self_test(args: &Args, recording: &dyn Recording, model: &Model, selection: &Selection) -> Outcome {
    let n_layers = model.config.dims.layers;
    let positions = args.audit_rows.positions(&recording.manifest().steps);
    let progress = Progress::new("injecting");
    let found = sensitivity::measure(
        recording,
        model,
        &positions,
        &|checkpoint| selection.wants(checkpoint, n_layers),
        &|done, all| progress.set(done, all),
    )?;
    drop(progress);
    let nothing = found.nodes.iter().all(|node| node.undecided.is_some());
    args.output.show(&found, |layout| report::sensitivity::render(&found, layout))?;
    Ok(exit_code(if nothing { Verdict::Undecided } else { Verdict::Parity }))
}
