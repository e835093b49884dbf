//! Mistakes in looking up the embedding table.

use super::{Argument, Fault, Home, PLAIN, diagnose, integer, number, output, when};
use crate::checkpoint::Kind;
use crate::faults::spell;
use crate::model::edit::{Change, Reading};
use crate::model::graph::{Node, Op};

const HOME: Home = Home::First(&[Kind::Embed]);

/// Reads the table in another way.
fn reread(node: &mut Node, reading: Reading) -> Option<()> {
    let Op::Embed { table } = &mut node.op else { return None };
    table.reading = reading;
    Some(())
}

/// Faults of `embed`.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "embed.transposed",
        summary: "the embedding table (V, D) is read as (D, V)",
        place: "loading: ggml's ne[0] is the fastest axis, so token_embd.weight is stored (V, D) row-major",
        fix: "take row `token` as D consecutive values; do not transpose after reversing ggml's `ne`",
        home: HOME,
        change: |_, node, _| reread(node, Reading::Transposed),
        sentence: |_, _, _| "the embedding table is read transposed: (D, V) for (V, D)".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "embed.row_shift",
        summary: "every token takes the embedding of a neighbouring token",
        place: "token ids: special tokens counted in or out, a 1-based vocabulary, an added padding row",
        fix: "use the token id as the row of token_embd.weight, without an offset",
        parameter: integer("rows"),
        home: HOME,
        change: |site, node, argument| {
            let rows = site.model.config.dims.vocab as u64;
            let shift = argument.integer().filter(|shift| *shift != 0 && shift.unsigned_abs() < rows)?;
            reread(node, Reading::RowShift(shift))
        },
        default: |_, _| Some(Argument::Number(1.0)),
        guess: Some(diagnose::row_shift),
        sentence: |_, _, argument| {
            format!("token t takes row t{:+} of the embedding table", argument.integer().unwrap_or(0))
        },
        ..PLAIN
    },
    Fault {
        name: "embed.scaled",
        summary: "the embedding is multiplied by a constant, as Gemma does by sqrt(D)",
        place: "a model file shared with Gemma, whose embeddings are scaled by sqrt(D)",
        fix: "use the rows of the table as they are",
        parameter: number("factor"),
        home: HOME,
        change: |_, node, argument| {
            when(matches!(node.op, Op::Embed { .. }))?;
            output(node, Change::Scale(argument.number()?))
        },
        default: |site, _| Some(Argument::Number((site.model.config.dims.model as f64).sqrt())),
        guess: Some(diagnose::scale),
        sentence: |site, _, argument| {
            let factor = argument.number().unwrap_or(f64::NAN);
            let root = (site.model.config.dims.model as f64).sqrt();
            let why = if (factor / root - 1.0).abs() < 1e-6 { " = sqrt(D), as in Gemma" } else { "" };
            format!("the embedding is multiplied by {}{why}", spell(factor))
        },
        ..PLAIN
    },
];
