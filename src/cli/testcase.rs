//! `parity testcase`: a wrong node as a test that upstream can run, and as a file to replay.

use std::path::PathBuf;

use super::output::print;
use super::shared::{self, ModelArgs};
use super::{Outcome, exit_code};
use crate::checkpoint::Checkpoint;
use crate::engine::fused::file::ModelFile;
use crate::error::Error;
use crate::foreign;
use crate::jobs::testcase::{dump_of, run, write};
use crate::references;
use crate::report::words::number;
use crate::report::{Verdict, json};

const EXAMPLES: &str = "\
Examples:
  parity ab --b \"-ngl 99\" -o kept --report out -- llama-completion -m M -p P
  parity testcase out blk.2.ffn_norm -m model.gguf -o case
  parity testcase --run case/blk.2.ffn_norm.safetensors";

/// Flags of `parity testcase`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// What --report DIR wrote: the folder, or its report.json
    #[arg(required_unless_present = "run")]
    report: Option<PathBuf>,
    /// The node, e.g. blk.2.ffn_norm
    #[arg(required_unless_present = "run")]
    node: Option<Checkpoint>,
    /// Dump of the node [default: the one that the report is of]
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Folder for NODE.txt and NODE.safetensors
    #[arg(short, long, value_name = "DIR", required_unless_present = "run")]
    output: Option<PathBuf>,
    /// Judge a file again that was written so: exit code 1 where its result is wrong, 0 where it is not
    #[arg(long, value_name = "FILE", conflicts_with_all = ["report", "node", "dump", "output"])]
    run: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    if let Some(file) = &args.run {
        let replayed = run(file)?;
        print(&(replayed.answer.join("\n  ") + "\n"))?;
        return Ok(exit_code(if replayed.is_healthy { Verdict::Parity } else { Verdict::Divergence }));
    }
    let (Some(report), Some(node), Some(dir)) = (&args.report, args.node, &args.output) else {
        return Err(
            Error::new("parity testcase", "nothing was named").expected("REPORT NODE -o DIR, or --run FILE")
        );
    };
    let path = dump_of(&json::read(report)?, node, args.dump.as_deref())?;
    let given = args.model.path()?;
    let how = foreign::Options { model: given.clone(), ..foreign::Options::default() };
    let mut dump = shared::open_declared(&path, &how, None)?;
    let model = match given {
        Some(model) => model,
        None => references::model_of(&path, &dump.manifest().model)?,
    };
    let written = write(&mut dump, &ModelFile::open(&model)?, node, dir)?;
    let mut lines = vec![format!(
        "{node} of step {}: its error over what rounding explains is {}",
        written.step,
        number(written.over_bound)
    )];
    lines.push(match &written.line {
        Ok(line) => format!(
            "{}: for test-backend-ops --test-file, which fills tensors at random and need not fail",
            line.display()
        ),
        Err(why) => format!("no line for test-backend-ops: {why}"),
    });
    lines.push(format!("{}: the proof; parity testcase --run judges it again", written.replay.display()));
    print(&(lines.join("\n") + "\n"))?;
    Ok(exit_code(Verdict::Parity))
}
