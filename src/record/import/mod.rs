//! Makes a dump of what `llama-eval-callback` or `llama-debug` printed: of each checkpoint the few values
//! that were printed and the sum.

mod passes;
pub mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use parity_dump::seen::SeenTensors;
use parity_dump::{Dump, ModelInfo, Producer, Writer};

use super::finish::model_info;
use crate::error::{Error, Result};
use crate::files;

/// What to import.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// The printed text.
    pub text: PathBuf,
    /// Folder of the dump.
    pub dir: PathBuf,
    /// The model that was run.
    pub model: Option<PathBuf>,
    /// The prompt, for the manifest.
    pub prompt: Option<String>,
    /// Its tokens; those that the text lists where empty.
    pub tokens: Vec<u32>,
}

/// What was imported.
#[derive(Clone, Debug)]
pub struct Imported {
    /// Folder of the dump.
    pub dir: PathBuf,
    /// Forward passes.
    pub steps: usize,
    /// Token positions.
    pub tokens: usize,
    /// Different checkpoints.
    pub checkpoints: usize,
    /// Values that were printed.
    pub values: u64,
    /// Values that there are.
    pub of: u64,
    /// Whether sums are of the printed values alone.
    pub sums_of_printed: bool,
    /// What belongs to no checkpoint, could not be placed or was cut off.
    pub unmapped: Vec<String>,
}

/// Reads the text and writes the dump.
///
/// # Errors
/// Where the text holds no node, or its tokens are not known.
pub fn import(options: &ImportOptions) -> Result<Imported> {
    // A terminal's log may hold anything; names and numbers are plain text.
    let printed = text::parse(&files::read_lossy(&options.text, files::OUTPUT_BYTES_MAX)?);
    if printed.nodes.is_empty() {
        return Err(Error::file(&options.text, "holds no printed tensor")
            .expected("lines such as `common_debug_cb_eval: norm-0 = (f32) RMS_NORM(…) = {128, 5, 1, 1}`")
            .found(printed.broken.first().map_or("none", String::as_str))
            .hint("llama-eval-callback -m MODEL -p PROMPT >printed.txt 2>&1"));
    }
    let tokens = tokens(options, &printed)?;
    let rows = || passes::passes(&printed.nodes).iter().map(|pass| pass.rows).collect::<Vec<_>>();
    let Printed { steps, parts, unmapped, sums_of_printed } =
        seen(&printed, tokens.len()).ok_or_else(|| {
            Error::file(&options.text, "was not printed for this prompt")
                .expected(format!("forward passes of {} token rows in all", tokens.len()))
                .found(format!("passes of {:?} rows", rows()))
                .hint("give the prompt that was evaluated with -p, or its ids with --tokens")
        })?;
    if parts.is_empty() {
        return Err(Error::file(&options.text, "holds no checkpoint of a model")
            .expected("matmuls with weights such as blk.0.attn_q.weight")
            .found(unmapped.first().map_or("none", String::as_str)));
    }
    let (values, of) = coverage(&parts);
    let imported = Imported {
        dir: options.dir.clone(),
        steps: steps.len(),
        tokens: tokens.len(),
        checkpoints: parts.len(),
        values,
        of,
        sums_of_printed,
        unmapped,
    };
    write(options, &tokens, &steps, &parts, &imported)?;
    Ok(imported)
}

/// The tokens that were given, or else those of the text.
fn tokens(options: &ImportOptions, printed: &text::Printout) -> Result<Vec<u32>> {
    let given = Some(&options.tokens).filter(|tokens| !tokens.is_empty());
    match (given, &printed.tokens) {
        (Some(given), Some(listed)) if given != listed => {
            Err(Error::file(&options.text, "was printed for other tokens")
                .expected(format!("{given:?}"))
                .found(format!("{listed:?}")))
        }
        (Some(tokens), _) | (None, Some(tokens)) => Ok(tokens.clone()),
        (None, None) => Err(Error::file(&options.text, "does not list the tokens of its prompt")
            .expected("a line `number of input tokens = …` and the ids behind it")
            .found("none")
            .hint("give the prompt: parity record --import TEXT -m MODEL -p PROMPT, or --tokens 1,2,3")),
    }
}

/// What a text holds of the checkpoints of one prompt.
#[derive(Clone, Debug, Default)]
pub struct Printed {
    /// Token rows of each forward pass.
    pub steps: Vec<usize>,
    /// What is known of each checkpoint.
    pub parts: SeenTensors,
    /// What belongs to no checkpoint, could not be placed or was cut off.
    pub unmapped: Vec<String>,
    /// Whether sums are of the printed values alone.
    pub sums_of_printed: bool,
}

/// Takes the last passes that have as many rows as there are tokens: a warm-up comes before them. `None`
/// where no passes have.
pub fn seen(printed: &text::Printout, tokens: usize) -> Option<Printed> {
    let mut passes = passes::passes(&printed.nodes);
    let mut sum = 0usize;
    let start = passes.iter().enumerate().rev().find_map(|(index, pass)| {
        sum = sum.saturating_add(pass.rows);
        (sum == tokens).then_some(index)
    })?;
    passes.drain(..start);
    let sums_of_printed = passes::sums_are_of_printed(&printed.nodes);
    let mut unmapped: BTreeSet<String> =
        passes.iter().flat_map(|pass| pass.mapping.unmapped.iter().cloned()).collect();
    unmapped.extend(printed.broken.iter().map(|header| format!("{header}: its values are cut off")));
    let mut parts = SeenTensors::new();
    let (mut first, mut lost) = (0, Vec::new());
    for pass in &passes {
        for (checkpoint, part) in pass.seen(first, sums_of_printed, &mut lost) {
            parts.entry(checkpoint).or_default().push(part);
        }
        first += pass.rows;
    }
    unmapped.extend(lost);
    let steps = passes.iter().map(|pass| pass.rows).collect();
    Some(Printed { steps, parts, unmapped: unmapped.into_iter().collect(), sums_of_printed })
}

/// Values that were seen, and values that there are.
fn coverage(seen: &SeenTensors) -> (u64, u64) {
    let (mut values, mut of) = (0, 0);
    for (&checkpoint, part) in seen.iter().flat_map(|(id, parts)| parts.iter().map(move |part| (id, part))) {
        for row in &part.rows {
            values += row.values.len() as u64;
            of += part.width(checkpoint, row.position).unwrap_or(0) as u64;
        }
    }
    (values, of)
}

fn write(
    options: &ImportOptions,
    tokens: &[u32],
    steps: &[usize],
    parts: &SeenTensors,
    imported: &Imported,
) -> Result<()> {
    let producer = Producer { name: "llama.cpp".to_owned(), ..Producer::default() };
    let model = options.model.as_deref().map_or_else(ModelInfo::default, model_info);
    let mut writer = Writer::create(&options.dir, producer, model)?;
    let mut first = 0;
    for &rows in steps {
        let positions: Vec<u32> = (first as u32..).take(rows).collect();
        writer.begin_step(&tokens[first..first + rows], &positions, 0)?;
        writer.end_step()?;
        first += rows;
    }
    writer.seen(parts)?;
    let sums = if imported.sums_of_printed { "of the printed values" } else { "of all values" };
    let manifest = writer.manifest_mut();
    manifest.prompt.clone_from(&options.prompt);
    manifest.unmapped.clone_from(&imported.unmapped);
    manifest.provenance = BTreeMap::from([
        ("imported from".to_owned(), super::file_name(&options.text)),
        ("sums".to_owned(), sums.to_owned()),
        ("values".to_owned(), "as printed, with 4 decimals".to_owned()),
    ]);
    Ok(writer.finish()?)
}

/// Checkpoints of a dump of which only printed values are known.
pub fn is_partial(dump: &Dump) -> bool {
    dump.seen_checkpoints().next().is_some()
}
