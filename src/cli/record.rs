//! `parity record`: runs a llama.cpp program and keeps its tensors.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;

use parity_record::filter::Filter;

use super::{Outcome, exit_code};
use crate::error::Error;
use crate::record::{Options, Summary, record};
use crate::report::Verdict;
use crate::select::Layers;

/// Flags of `parity record`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the dump
    #[arg(short, long, value_name = "DIR", default_value = "recording")]
    output: PathBuf,

    /// Record only these layers: 3, 0..3, 5..
    #[arg(long, value_name = "LAYERS")]
    layer: Option<Layers>,

    /// Record only checkpoints that fit, such as 'blk.*.q_rope'; several allowed
    #[arg(long, value_name = "GLOB")]
    checkpoint: Vec<String>,

    /// Leave it to the program which tokens it computes logits of
    #[arg(long)]
    own_rows: bool,

    /// Record the token sequence number N of a program that evaluates several
    #[arg(long, value_name = "N", default_value_t = 0)]
    sequence: usize,

    /// Run the program once more, untapped, and show that its logits have the same bits
    #[arg(long)]
    verify: bool,

    /// The program and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Records, and says what was recorded.
pub fn main(args: &Args) -> Outcome {
    let summary = record(&Options {
        dir: args.output.clone(),
        filter: Filter {
            layers: args.layer.map(|layers| (layers.first, layers.last)),
            globs: args.checkpoint.clone(),
        },
        sequence: args.sequence,
        all_rows: !args.own_rows,
        verify: args.verify,
        quiet: false,
        command: args.command.clone(),
    })?;
    io::stdout().write_all(text(&summary).as_bytes()).map_err(|e| Error::new("standard output", e))?;
    Ok(exit_code(match &summary.verified {
        _ if summary.incomplete.is_some() => Verdict::Undecided,
        Some(verified) if !verified.is_equal() => Verdict::Divergence,
        _ => Verdict::Parity,
    }))
}

/// What was recorded, for people.
fn text(summary: &Summary) -> String {
    let Summary { dir, steps, tokens, checkpoints, bytes, .. } = summary;
    let mut lines = vec![format!(
        "recorded   {checkpoints} checkpoints · {tokens} tokens in {steps} steps · {} in {}",
        size(*bytes),
        dir.display()
    )];
    if summary.sequences > 1 {
        let others = summary.sequences - 1;
        lines.push(format!(
            "           {others} more token sequences were computed: --sequence N records another"
        ));
    }
    if !summary.unmapped.is_empty() {
        let some: Vec<&str> = summary.unmapped.iter().take(4).map(String::as_str).collect();
        let more = if summary.unmapped.len() > some.len() { ", …" } else { "" };
        let n = summary.unmapped.len();
        lines.push(format!("unmapped   {n} nodes are no checkpoint: {}{more}", some.join(", ")));
    }
    if let Some(reason) = &summary.incomplete {
        lines.push(format!("incomplete {reason}: the steps above are whole"));
    }
    if !summary.program.success() {
        lines.push(format!("program    {}", summary.program));
    }
    if let Some(verified) = &summary.verified {
        let verdict = match (verified.is_equal(), verified.other_token, verified.different.first()) {
            (true, _, None) => "bit-equal to an untapped run".to_owned(),
            (true, _, Some(position)) => format!(
                "bit-equal to an untapped run with all rows; by itself the program computes the row at position \
                 {position} alone, with other rounding (--own-rows records that)"
            ),
            (_, _, Some(position)) => {
                format!(
                    "{} rows DIFFER from an untapped run, the first at position {position}",
                    verified.different.len()
                )
            }
            (_, Some(position), _) => {
                format!(
                    "the untapped run went another way at position {position}: is the sampler greedy (--temp 0)?"
                )
            }
            _ => "no row of both runs could be compared".to_owned(),
        };
        lines.push(format!("verified   {} rows of logits: {verdict}", verified.rows));
    }
    lines.join("\n") + "\n"
}

/// Bytes in words: 1.6 GB.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["B", "kB", "MB", "GB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
