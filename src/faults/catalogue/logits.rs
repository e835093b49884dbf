//! Mistakes in the output product and its buffer.

use super::{Argument, Fault, Home, PLAIN, Site, diagnose, input, integer, output, when};
use crate::checkpoint::{Checkpoint, Kind};
use crate::model::edit::{Change, Reading};
use crate::model::graph::{Node, Op};
use parity_graph::weights;

const HOME: Home = Home::First(&[Kind::Logits]);

/// Rows to which engines pad a vocabulary.
const PADDING: usize = 256;

fn is_logits(node: &Node) -> Option<()> {
    when(node.checkpoint.kind() == Kind::Logits)
}

/// What `final_norm` reads.
pub fn before_final_norm(site: &Site<'_>) -> Option<Checkpoint> {
    site.model.graph.node(Checkpoint::global(Kind::FinalNorm))?.inputs.first().copied()
}

/// Faults of `logits`.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "logits.untied",
        summary: "the output weight is taken from the wrong place: tied for untied, or the reverse",
        place: "tie_word_embeddings not honoured: an lm_head that no file fills, or the embedding table \
                used though the file has output.weight",
        fix: "use output.weight where the file has it, token_embd.weight where it does not",
        home: HOME,
        change: |site, node, _| {
            is_logits(node)?;
            let Op::Linear { weight, .. } = &mut node.op else { return None };
            if site.model.config.tied {
                weight.reading = Reading::Unfilled;
            } else {
                let table = weights::weight(weights::TOKEN_EMBD);
                when(site.shape(&table)? == site.shape(&weight.name)?)?;
                weight.name = table;
            }
            Some(())
        },
        sentence: |site, _, _| match site.model.config.tied {
            true => "the output matmul has a weight of its own that was never filled; the model ties it to \
                     token_embd.weight"
                .to_owned(),
            false => {
                "token_embd.weight is used for the output matmul; the model has output.weight".to_owned()
            }
        },
        ..PLAIN
    },
    Fault {
        name: "logits.wrong_row",
        summary: "the logits of a row come from another row",
        place: "the first row of a step taken for the last, or batch indices mixed up",
        fix: "the logits that follow a prompt are those of its last row",
        home: HOME,
        silent: Some("in steps of one row: it shows in a prefill"),
        change: |_, node, _| {
            is_logits(node)?;
            input(node, 0, Change::FirstRow)
        },
        sentence: |_, _, _| "every row has the logits of the first row of its step".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "logits.stride",
        summary: "the rows of the logits buffer lie further apart (or closer) than they are read",
        place: "a vocabulary padded for the GEMM and a buffer read with the tokenizer's vocabulary size",
        fix: "read row t at t times the number of rows of the output weight",
        parameter: integer("stride"),
        home: HOME,
        silent: Some("in steps of one row: it shows in a prefill"),
        change: |site, node, argument| {
            is_logits(node)?;
            let stride = usize::try_from(argument.integer()?).ok()?;
            when(stride > 0 && stride != site.model.config.dims.vocab)?;
            output(node, Change::Stride(stride))
        },
        default: |site, _| {
            let vocab = site.model.config.dims.vocab;
            Some(Argument::Number((vocab + 1).next_multiple_of(PADDING) as f64))
        },
        guess: Some(diagnose::stride),
        sentence: |site, _, argument| {
            let vocab = site.model.config.dims.vocab;
            format!("rows of the logits buffer lie {argument} values apart but are read {vocab} apart")
        },
    },
    Fault {
        name: "logits.no_norm",
        summary: "the logits are taken of the row before the final norm",
        place: "the final norm computed into a buffer that the output matmul does not read",
        fix: "feed the row after output_norm to the output matmul",
        home: HOME,
        change: |site, node, _| {
            is_logits(node)?;
            node.inputs[0] = before_final_norm(site)?;
            Some(())
        },
        sentence: |site, _, _| {
            let source = before_final_norm(site).map_or(String::new(), |source| source.to_string());
            format!("the logits are taken of {source}, before the final norm")
        },
        ..PLAIN
    },
];
