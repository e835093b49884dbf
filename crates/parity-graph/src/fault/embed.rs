//! The two ends of a model: the table of the embeddings, the product of the logits and its buffer.

use super::evidence::numbers;
use super::linear::{before_norm, direct};
use super::site::{edit, made};
use super::{Argument, Entry, Evidence, Made, PLAIN, Site, plain, spell, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit};
use crate::weights::{OUTPUT, TOKEN_EMBD, weight};

const TABLE: &[Op] = &[Op::GetRows];
const PRODUCT: &[Op] = &[Op::MulMat];

/// Rows to which engines pad a vocabulary.
const PADDING: usize = 256;

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "embed.transposed",
        TABLE,
        [
            "the embedding table (V, D) is read as (D, V)",
            "loading: ggml's ne[0] is the fastest axis, so token_embd.weight is stored (V, D) row-major",
            "take row `token` as D consecutive values; do not transpose after reversing ggml's `ne`",
        ],
        |site, _| {
            is_table(site)?;
            made(edit(0, Edit::Transposed), "the embedding table is read transposed: (D, V) for (V, D)")
        },
    ),
    Entry {
        name: "embed.row_shift",
        summary: "every token takes the embedding of a neighbouring token",
        place: "token ids: special tokens counted in or out, a 1-based vocabulary, an added padding row",
        fix: "use the token id as the row of token_embd.weight, without an offset",
        parameter: Some("rows"),
        ops: TABLE,
        values: |_| Argument::numbers([1.0]),
        make: |site, argument| {
            is_table(site)?;
            let rows = i32::try_from(site.src(0)?.ne[1]).ok()?;
            let by = argument.integer().filter(|by| *by != 0 && by.unsigned_abs() < rows.unsigned_abs())?;
            made(
                edit(1, Edit::AddModulo(by, rows)),
                format!("token t takes row t{by:+} of the embedding table"),
            )
        },
        guess: Some(row_shift),
        ..PLAIN
    },
    Entry {
        name: "embed.scaled",
        summary: "the embedding is multiplied by a constant, as Gemma does by sqrt(D)",
        place: "a model file shared with Gemma, whose embeddings are scaled by sqrt(D)",
        fix: "use the rows of the table as they are",
        parameter: Some("factor"),
        ops: TABLE,
        values: |site| Argument::numbers([(site.tensor().ne[0] as f64).sqrt()]),
        make: |site, argument| {
            is_table(site)?;
            let (factor, root) = (argument.number()?, (site.tensor().ne[0] as f64).sqrt());
            when(factor != 1.0)?;
            let why = if (factor / root - 1.0).abs() < 1e-6 { " = sqrt(D), as in Gemma" } else { "" };
            let text = format!("the embedding is multiplied by {}{why}", spell(factor));
            made(Change::ResultEdit(Edit::Multiply(factor as f32)), text)
        },
        guess: Some(|site, evidence| match is_table(site) {
            Some(()) => evidence.factor().map_or(vec![], numbers),
            None => vec![],
        }),
        ..PLAIN
    },
    plain(
        "logits.untied",
        PRODUCT,
        [
            "the output weight is taken from the wrong place: tied for untied, or the reverse",
            "tie_word_embeddings not honoured: an lm_head that no file fills, or the embedding table used though the \
             file has output.weight",
            "use output.weight where the file has it, token_embd.weight where it does not",
        ],
        untied,
    ),
    Entry {
        silent: Some("in steps of one row: it shows in a prefill"),
        ..plain(
            "logits.wrong_row",
            PRODUCT,
            [
                "the logits of a row come from another row",
                "the first row of a step taken for the last, or batch indices mixed up",
                "the logits that follow a prompt are those of its last row",
            ],
            |site, _| {
                is_logits(site)?;
                let row = site.src(1)?.ne[0];
                made(edit(1, Edit::FirstRow { row }), "every row has the logits of the first row of its step")
            },
        )
    },
    Entry {
        name: "logits.stride",
        summary: "the rows of the logits buffer lie further apart (or closer) than they are read",
        place: "a vocabulary padded for the GEMM and a buffer read with the tokenizer's vocabulary size",
        fix: "read row t at t times the number of rows of the output weight",
        parameter: Some("stride"),
        silent: Some("in steps of one row: it shows in a prefill"),
        ops: PRODUCT,
        values: |site| Argument::numbers([(site.tensor().ne[0] + 1).next_multiple_of(PADDING) as f64]),
        make: |site, argument| {
            is_logits(site)?;
            let row = site.tensor().ne[0];
            let stride = usize::try_from(argument.integer()?).ok().filter(|s| *s > 0 && *s != row)?;
            let text =
                format!("rows of the logits buffer lie {stride} values apart but are read {row} apart");
            made(Change::ResultEdit(Edit::Stride { row, stride }), text)
        },
        guess: Some(stride),
        ..PLAIN
    },
    plain(
        "logits.no_norm",
        PRODUCT,
        [
            "the logits are taken of the row before the final norm",
            "the final norm computed into a buffer that the output matmul does not read",
            "feed the row after output_norm to the output matmul",
        ],
        |site, _| {
            is_logits(site)?;
            let (_, before) = before_norm(site)?;
            let text = format!("the logits are taken of {}, before the final norm", site.name_of(before));
            made(Change::Source { slot: 1, with: Some(before) }, text)
        },
    ),
];

fn is_table(site: Site<'_>) -> Option<()> {
    when(site.weight_name()?.part == TOKEN_EMBD && site.weight()?.0 == 0)
}

fn is_logits(site: Site<'_>) -> Option<()> {
    when(site.is_product_with(&[OUTPUT, TOKEN_EMBD]) && direct(site).is_some())
}

fn untied(site: Site<'_>, _: &Argument) -> Made {
    is_logits(site)?;
    let (slot, own) = direct(site)?;
    let table = site.called(&weight(TOKEN_EMBD));
    if site.graph.get(own).name == weight(TOKEN_EMBD) {
        let text = "the output matmul has a weight of its own that was never filled; the model ties it to \
                    token_embd.weight";
        return made(Change::ResultEdit(Edit::Set(0.0)), text);
    }
    let table = table.filter(|&table| site.graph.get(table).ne == site.graph.get(own).ne)?;
    let text = "token_embd.weight is used for the output matmul; the model has output.weight";
    made(Change::Source { slot, with: Some(table) }, text)
}

/// Shifts of the table's rows within which a token's row is looked for.
const ROW_SHIFTS: i32 = 300;

fn row_shift(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    if is_table(site).is_none() {
        return vec![];
    }
    let shifts = (-ROW_SHIFTS..=ROW_SHIFTS).filter(|shift| *shift != 0);
    let rows = site.src(0).map_or(1, |table| i32::try_from(table.ne[1]).unwrap_or(1));
    let best = evidence.nearest(shifts, |by| Some(edit(1, Edit::AddModulo(*by, rows))));
    Argument::numbers(best.map(f64::from))
}

/// How far apart the rows of the logits buffer lie, from where the second row's first values are found.
fn stride(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    const PROOF: usize = 4;
    let width = site.tensor().ne[0];
    if is_logits(site).is_none() || site.rows() < 2 || width <= PROOF {
        return vec![];
    }
    let row = |values: &[f64], t: usize| values[t * width..(t + 1) * width].to_vec();
    let (first, second) = (row(evidence.exact, 0), row(evidence.exact, 1));
    let recorded = row(evidence.recorded, 1);
    let found = |within: &[f64], what: &[f64]| {
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-3 * (a.abs() + b.abs());
        within.windows(what.len()).position(|window| window.iter().zip(what).all(close))
    };
    // Further apart: the row starts later. Closer: it starts within the row before.
    let further = found(&recorded, &second[..PROOF]).map(|gap| width + gap);
    let closer = found(&first, &recorded[..PROOF]);
    let all = further.into_iter().chain(closer).filter(|stride| *stride != width && *stride > 0);
    Argument::numbers(all.map(|stride| stride as f64))
}
