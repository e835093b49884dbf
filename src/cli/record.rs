//! `parity record`: runs a llama.cpp program and keeps its tensors; or the one that is built in; or takes
//! over what a program printed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use parity_record::filter::Filter;

use super::output::print;
use super::run::PromptArgs;
use super::{Outcome, exit_code, record_builtin, rpc, shared};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::memory::size;
use crate::record::import::{ImportOptions, Imported, import};
use crate::record::{Observe, Options, Summary, Way, record};
use crate::report::{Verdict, words};
use crate::select::Layers;

const EXAMPLES: &str = "\
Examples:
  parity record -o ref -- llama-completion -m model.gguf -p \"Hello\" -n 8 -no-cnv
  parity record -o ref --layer 0..3 -- python app.py
  parity record -o ref --import printed.txt -m model.gguf";

/// Where a dump is written, and what of a recording it holds.
#[derive(clap::Args)]
pub struct Kept {
    /// Folder of the dump
    #[arg(short, long, value_name = "DIR", default_value = "recording")]
    pub output: PathBuf,

    /// Replace a dump that is in the folder
    #[arg(long)]
    pub force: bool,

    /// Only these layers: 3, 0..3, 5..
    #[arg(long, value_name = "LAYERS")]
    pub layer: Option<Layers>,

    /// Only these checkpoints, e.g. 'blk.*.q_rope'
    ///
    /// A pattern of ids, in which * stands for anything. The flag may be repeated.
    #[arg(long, value_name = "GLOB")]
    pub checkpoint: Vec<String>,
}

impl Kept {
    /// What is recorded.
    pub fn filter(&self) -> Filter {
        Filter {
            layers: self.layer.map(|layers| (layers.first, layers.last)),
            globs: self.checkpoint.clone(),
        }
    }
}

/// Flags of `parity record`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    kept: Kept,

    /// Only the logits that the program asks for
    ///
    /// Programs ask llama.cpp for the logits of the last token only. parity makes it compute those of every token, so
    /// that every row can be compared; this flag turns that off.
    #[arg(long)]
    own_rows: bool,

    /// Which of several prompts to record alone, from 0 [default: everything]
    ///
    /// The recording ends where the program evaluates another, goes back or mixes sequences. To look at one of the sequences
    /// that were recorded, give --sequence to audit and diff.
    #[arg(long, value_name = "N")]
    sequence: Option<usize>,

    /// Check that recording changes no bit
    ///
    /// Runs the program again without the recorder, and compares the logits of both runs bit by bit.
    #[arg(long)]
    verify: bool,

    /// Have ggml load the recorder, not the system
    ///
    /// Through GGML_BACKEND_PATH in the place of LD_PRELOAD: for programs that the system preloads nothing into, and that have
    /// ggml load its backends, as llama.cpp's tools do. The recording is the same.
    #[arg(long, requires = "command", conflicts_with = "rpc")]
    load: bool,

    /// Leave the prompt's text out of the dump
    #[arg(long, requires = "command")]
    no_text: bool,

    /// How closely to look: auto, none, outputs or nodes
    ///
    /// auto: outputs on backends where that was shown to have the same bits as nodes, and nodes elsewhere.
    /// nodes: one by one, with a callback, which makes llama.cpp wait behind each. outputs: the graph runs whole, with
    /// its nodes kept as outputs, and is read afterwards: fast, and what happens between nodes happens as ever, but for
    /// fusion. none: the logits alone, of a run that is otherwise as without parity.
    #[arg(long, value_name = "LEVEL", default_value_t, requires = "command")]
    observe: Observe,

    /// Keep hashes and norms, not values
    ///
    /// A small part of the size. `parity diff` of two such recordings finds the first node whose bits differ; for a
    /// verdict it needs values.
    #[arg(long, requires = "command")]
    hash: bool,

    /// Compress the dump when it is recorded (docs/dumps.md)
    ///
    /// About a seventh smaller. It is unpacked into a temporary file whenever it is read.
    #[cfg(feature = "remote")]
    #[arg(long, conflicts_with = "hash")]
    compress: bool,

    /// Take printed values from this text instead
    ///
    /// The file holds what llama-eval-callback or llama-debug printed. Only what was printed can then be compared.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["command", "layer", "checkpoint", "verify"])]
    import: Option<PathBuf>,

    /// GGUF model of the text, or to run
    ///
    /// With --import, the model that printed the text. Without a command, the model that the built-in llama.cpp runs.
    /// With --rpc, the client's model, where its command line does not name it.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,

    #[command(flatten)]
    rpc: rpc::Args,

    /// Also write each graph as text, for bug reports
    #[arg(long, value_name = "FILE", requires = "command")]
    graphs: Option<PathBuf>,

    /// Make llama.cpp compute with a mistake
    ///
    /// A test of what parity says, written as for `parity run`: rope.base=10000@blk.1.q_rope. `parity faults --of DUMP`
    /// lists what can be injected. The recorded graph stays the healthy one.
    #[arg(long, value_name = "FAULT", requires = "command")]
    inject: Option<String>,

    /// The llama.cpp program and its arguments
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "PromptArgs")]
    command: Vec<OsString>,

    #[command(flatten)]
    prompt: PromptArgs,

    #[command(flatten)]
    builtin: record_builtin::Args,
}

/// Records, and says what was recorded.
pub fn main(args: &Args) -> Outcome {
    let _room = shared::room_for_a_dump("-o", &args.kept.output, args.kept.force)?;
    if let Some(printed) = &args.import {
        return imported(args, printed);
    }
    let filter = args.kept.filter();
    let with_command = !args.command.is_empty();
    if args.model.is_some() && with_command && !args.rpc.is_asked() {
        return Err(Error::new("-m", "a command names its model itself").hint("leave -m out, or the command"));
    }
    let summary = match &args.model {
        Some(model) if !with_command => record_builtin::record(record_builtin::Job {
            dir: args.kept.output.clone(),
            model: model.clone(),
            prompt: args.prompt.text()?,
            tokens: args.prompt.tokens.clone(),
            filter,
            verify: args.verify,
            args: &args.builtin,
        })?,
        _ => record_program(args, filter)?,
    };
    print(&text(&summary))?;
    #[cfg(feature = "remote")]
    if args.compress {
        let [before, after] = parity_dump::packed::pack_folder(&args.kept.output)?;
        print(&format!("compressed {} to {}\n", size(before), size(after)))?;
    }
    Ok(ending(&summary))
}

/// The exit code of a recording.
pub fn ending(summary: &Summary) -> std::process::ExitCode {
    exit_code(match &summary.verified {
        _ if summary.incomplete.is_some()
            || summary.others.iter().any(|other| other.incomplete.is_some()) =>
        {
            Verdict::Undecided
        }
        Some(verified) if !verified.is_equal() => Verdict::Divergence,
        _ => Verdict::Parity,
    })
}

fn record_program(args: &Args, filter: Filter) -> Result<Summary> {
    let options = Options {
        way: if args.load { Way::Loaded } else { Way::default() },
        dir: args.kept.output.clone(),
        filter,
        sequence: args.sequence,
        // A client's own rows are all that cross the wire.
        all_rows: !args.own_rows && !args.rpc.is_asked(),
        verify: args.verify,
        graphs: args.graphs.clone(),
        inject: args.inject.as_deref().map(super::shared::mistake).transpose()?,
        observe: args.observe,
        no_text: args.no_text,
        hashed: args.hash,
        command: args.command.clone(),
        ..Options::default()
    };
    match args.rpc.between(args.model.clone())? {
        Some(between) => crate::record::rpc::record(&options, &between),
        None => record(&options),
    }
}

/// Makes a dump of a printed text, and says how much of the tensors it holds.
fn imported(args: &Args, printed: &Path) -> Outcome {
    let (prompt, tokens) = match &args.model {
        Some(model) if args.prompt.is_given() => args.prompt.read(&Gguf::open(model)?)?,
        None if args.prompt.text()?.is_some() => {
            return Err(Error::new("parity record --import", "a prompt is tokenized with its model")
                .expected("-m MODEL beside the prompt")
                .found("no model"));
        }
        _ => (None, args.prompt.tokens.clone()),
    };
    let options = ImportOptions {
        text: printed.to_owned(),
        dir: args.kept.output.clone(),
        model: args.model.clone(),
        prompt,
        tokens,
    };
    print(&import_text(&import(&options)?))?;
    Ok(exit_code(Verdict::Parity))
}

/// What was imported, for people.
fn import_text(imported: &Imported) -> String {
    let Imported { dir, steps, tokens, checkpoints, values, of, sums_of_printed, unmapped } = imported;
    let share = 100.0 * *values as f64 / (*of).max(1) as f64;
    let sums = if *sums_of_printed { "of the printed values" } else { "of all values" };
    let mut lines = vec![
        format!(
            "imported   {checkpoints} checkpoints · {tokens} tokens in {steps} steps · {} in {}",
            if *checkpoints == 1 { "seen in part" } else { "each seen in part" },
            dir.display()
        ),
        format!(
            "seen       {} of {} values ({share:.2} %), to 4 decimals · sums {sums}, to 6",
            words::thousands(*values),
            words::thousands(*of)
        ),
    ];
    lines.extend(unmapped_line(unmapped));
    lines.join("\n") + "\n"
}

/// What belongs to no checkpoint, if anything does.
fn unmapped_line(unmapped: &[String]) -> Option<String> {
    const SHOWN: usize = 4;
    let some = unmapped.get(..SHOWN.min(unmapped.len()))?.join(", ");
    let more = if unmapped.len() > SHOWN { ", …" } else { "" };
    let n = unmapped.len();
    (n > 0).then(|| format!("unmapped   {n} nodes are no checkpoint: {some}{more}"))
}

/// What was recorded, for people.
pub fn text(summary: &Summary) -> String {
    let Summary { dir, steps, tokens, checkpoints, bytes, .. } = summary;
    let mut lines = vec![format!(
        "recorded   {checkpoints} checkpoints · {tokens} tokens in {steps} steps · {} in {}",
        size(*bytes),
        dir.display()
    )];
    for Summary { dir, steps, tokens, checkpoints, bytes, model, .. } in &summary.others {
        let model = model.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        lines.push(format!(
            "and        {checkpoints} checkpoints · {tokens} tokens in {steps} steps · {} of another context, of {model}, in {}",
            size(*bytes),
            dir.display()
        ));
    }
    if summary.sequences > 1 {
        lines.push("           more token sequences were computed: --sequence N records another".to_owned());
    }
    lines.extend(unmapped_line(&summary.unmapped));
    if let Some(reason) = &summary.incomplete {
        lines.push(format!("stopped    {reason}: the steps above are whole, what came then is not known"));
    }
    if let Some(program) = summary.program.filter(|program| !program.success()) {
        lines.push(format!("program    {program}"));
    }
    if let Some(verified) = &summary.verified {
        let verdict = match (verified.is_equal(), verified.other_token, verified.different.first()) {
            (true, _, None) => "bit-equal to a run without recording".to_owned(),
            (true, _, Some(position)) => format!(
                "bit-equal to a run without recording, with all rows; by itself the program computes the row at position \
                 {position} alone, with other rounding (--own-rows records that)"
            ),
            (_, _, Some(position)) => {
                format!(
                    "{} rows DIFFER from a run without recording, the first at position {position}",
                    verified.different.len()
                )
            }
            (_, Some(position), _) => {
                format!(
                    "without recording, the run took another token at position {position}: is the sampler greedy (--temp 0)?"
                )
            }
            _ => "no row of both runs could be compared".to_owned(),
        };
        lines.push(format!("verified   {} rows of logits: {verdict}", verified.rows));
    }
    lines.join("\n") + "\n"
}
