//! An inspection for people: what looks wrong first.

use std::fmt::Write;

use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::checks::without_layer;
use super::dump::{CheckpointReport, DumpInspection};
use super::model::{Dims, Glance, ModelInspection, TensorReport};
use super::stats::Stats;
use super::{Finding, Level};
use parity_graph::weights;

/// Width of the labels on the left.
const LABEL: usize = 12;
/// What stands for a number that is not there.
const ABSENT: &str = "-";

/// Adds `label    text`.
fn line(out: &mut String, label: &str, text: impl AsRef<str>) {
    let _ = writeln!(out, "{label:<LABEL$}{}", text.as_ref());
}

fn shown<T: ToString>(value: Option<T>) -> String {
    value.map_or(ABSENT.to_owned(), |value| value.to_string())
}

/// 4070000 -> 4.07 M
fn short(count: u64) -> String {
    let value = count as f64;
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{:.2} k", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} M", value / 1e6),
        _ => format!("{:.2} G", value / 1e9),
    }
}

/// Four significant digits, whatever the size.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if (1e-3..1e4).contains(&size) => {
            format!("{value:.*}", (3 - size.log10().floor() as i32).max(0) as usize)
        }
        _ => format!("{value:.3e}"),
    }
}

fn shape(axes: &[usize]) -> String {
    format!("({})", axes.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
}

/// A table without lines; the first `left` columns are text, the others numbers.
pub(super) fn table(header: &[&str], left: usize, rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.to_vec());
    table.add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        column.set_cell_alignment(if index < left { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.trim_fmt()
}

fn findings(out: &mut String, findings: &[Finding]) {
    let wrong = findings.iter().filter(|finding| finding.level == Level::Wrong).count();
    let headline = match (wrong, findings.len()) {
        (0, 0) => "nothing looks wrong".to_owned(),
        (0, unusual) => format!("nothing looks wrong; unusual: {unusual}"),
        (wrong, _) => format!("LOOKS WRONG: {wrong}"),
    };
    let _ = writeln!(out, "\n{headline}");
    for finding in findings {
        let level = match finding.level {
            Level::Wrong => "wrong",
            Level::Unusual => "unusual",
        };
        // The lines of an error stand under its first.
        let text = finding.text.replace('\n', &format!("\n  {:8} ", ""));
        let _ = writeln!(out, "  {level:8} {} {text}", finding.subject);
    }
    out.push('\n');
}

/// A model. Layers are summed up in one line unless `all_tensors`.
pub fn model(model: &ModelInspection, all_tensors: bool) -> String {
    let mut out = String::new();
    let quantisation = &model.quantisation;
    let name = model.name.as_deref().unwrap_or("unnamed");
    let architecture = model.architecture.as_deref().unwrap_or("no architecture");
    let bits = quantisation.bits_per_weight.map_or(ABSENT.to_owned(), |bits| format!("{bits:.2}"));
    let parts = [
        name.to_owned(),
        architecture.to_owned(),
        format!("{} weights", short(quantisation.values)),
        format!("{bits} bits each"),
    ];
    line(&mut out, "model", parts.join(" · "));
    let split = if model.files > 1 { format!(", {} files", model.files) } else { String::new() };
    line(&mut out, "file", format!("{} (GGUF {}{split})", model.file, model.gguf_version));
    findings(&mut out, &model.findings);
    glance(&mut out, &model.glance, &model.dims, &model.tensors);
    line(&mut out, "dims", dims(&model.dims));
    for (index, share) in quantisation.types.iter().enumerate() {
        let text = format!(
            "{:8} {:4} tensors {:>9} values, {:.2} bits each",
            share.dtype,
            share.tensors,
            short(share.values),
            share.bits_per_weight
        );
        line(&mut out, if index == 0 { "types" } else { "" }, text);
    }
    if let Some(tokens) = &model.tokens {
        line(&mut out, "tokens", format!("{tokens:?}"));
    }
    let groups =
        if all_tensors { model.tensors.iter().map(|t| vec![t]).collect() } else { grouped(&model.tensors) };
    let header = ["tensor", "", "type", "shape", "GGUF ne", "min", "max", "rms"];
    let _ = write!(out, "\n{}", table(&header, 5, groups.iter().map(|group| tensor_row(group))));
    out.push('\n');
    out
}

fn glance(out: &mut String, glance: &Glance, dims: &Dims, tensors: &[TensorReport]) {
    let runs = match &glance.refused {
        None => "yes".to_owned(),
        Some(reason) => format!("on a recorded graph alone: {}", reason.lines().next().unwrap_or_default()),
    };
    line(out, "parity runs", runs);
    let table = tensors.iter().find(|tensor| tensor.name == weights::weight(weights::TOKEN_EMBD));
    let embedding = match (table, glance.embedding_transposed) {
        (None, _) => "none".to_owned(),
        (Some(_), Some(true)) => "TRANSPOSED: its rows are not tokens".to_owned(),
        (Some(table), Some(false)) => format!("not transposed: {} is (V, D)", shape(&table.shape)),
        (Some(table), None) => {
            format!("{}; the values do not say whether it is transposed", shape(&table.shape))
        }
    };
    let evidence = glance.embedding_layout.map_or(String::new(), |layout| {
        format!(
            " (spread of the column means: {:.1} of chance, {:.1} read the other way)",
            layout.as_stored, layout.transposed
        )
    });
    line(out, "embedding", embedding + &evidence);
    let logits = glance.tied.map_or(ABSENT, |tied| match tied {
        true => "tied: the logits use token_embd.weight",
        false => "untied: the logits use output.weight",
    });
    line(out, "logits", logits);
    let biases = if glance.biases.is_empty() { "none".to_owned() } else { glance.biases.join(", ") };
    line(out, "biases", biases);
    let half = dims.rope_dims.map_or("dims/2".to_owned(), |dims| (dims / 2).to_string());
    let pairing = match glance.rope_pairing {
        Some("half") => format!("half: columns i and i + {half} of a head are one pair"),
        Some(_) => "interleaved: columns 2i and 2i + 1 of a head are one pair".to_owned(),
        None => "pairing unknown to parity".to_owned(),
    };
    let turned = format!("{} of {} columns", shown(dims.rope_dims), shown(dims.head_width));
    line(out, "rope", format!("{pairing}; base {}; {turned}", shown(dims.rope_base)));
    let vocabulary = match (glance.vocab_rows, glance.vocab_tokens, glance.vocab_padding) {
        (Some(rows), Some(tokens), Some(0)) => format!("not padded: {rows} rows, {tokens} tokens"),
        (Some(rows), Some(tokens), Some(padding)) => {
            format!("padded: {rows} rows, {} of them padding; the tokenizer has {tokens} entries", padding)
        }
        (rows, tokens, _) => format!("{} rows, {} tokens", shown(rows), shown(tokens)),
    };
    line(out, "vocabulary", vocabulary);
}

fn dims(dims: &Dims) -> String {
    let axes = [
        ("L", dims.layers),
        ("D", dims.model),
        ("H", dims.heads),
        ("K", dims.kv_heads),
        ("E", dims.head_width),
        ("F", dims.ffn),
        ("V", dims.vocab),
        ("context", dims.context),
    ];
    let axes: Vec<String> =
        axes.iter().map(|(letter, value)| format!("{letter} {}", shown(*value))).collect();
    format!(
        "{} · norm eps {}",
        axes.join(" · "),
        dims.norm_eps.map_or(ABSENT.to_owned(), |eps| format!("{eps:e}"))
    )
}

/// Tensors of different layers that differ in nothing but layer and values.
fn grouped(tensors: &[TensorReport]) -> Vec<Vec<&TensorReport>> {
    let mut groups: Vec<Vec<&TensorReport>> = Vec::new();
    let key = |tensor: &TensorReport| {
        let (layer, name) = without_layer(&tensor.name);
        (layer.is_some(), name.to_owned(), tensor.dtype, tensor.shape.clone())
    };
    for tensor in tensors {
        match groups.iter_mut().find(|group| key(tensor).0 && key(group[0]) == key(tensor)) {
            Some(group) => group.push(tensor),
            None => groups.push(vec![tensor]),
        }
    }
    groups
}

fn tensor_row(group: &[&TensorReport]) -> Vec<String> {
    let first = group[0];
    let name = match without_layer(&first.name) {
        (Some(_), name) if group.len() > 1 => format!("blk.*.{name}"),
        _ => first.name.clone(),
    };
    let count = if group.len() > 1 { format!("x {}", group.len()) } else { String::new() };
    let stats: Vec<Stats> = group.iter().filter_map(|tensor| tensor.stats).collect();
    let min = stats.iter().filter_map(|s| s.min).reduce(f32::min);
    let max = stats.iter().filter_map(|s| s.max).reduce(f32::max);
    let rms = || stats.iter().filter_map(|s| s.rms);
    let rms = match (rms().reduce(f64::min), rms().reduce(f64::max)) {
        (Some(least), Some(most)) if group.len() > 1 => format!("{} .. {}", number(least), number(most)),
        (least, _) => least.map_or(ABSENT.to_owned(), number),
    };
    let float = |value: Option<f32>| value.map_or(ABSENT.to_owned(), |v| number(f64::from(v)));
    let (shape, ne) = (shape(&first.shape), format!("{:?}", first.gguf_ne));
    vec![name, count, first.dtype.to_owned(), shape, ne, float(min), float(max), rms]
}

/// A dump.
pub fn dump(dump: &DumpInspection) -> String {
    let mut out = String::new();
    let producer = &dump.producer;
    let parts = [
        Some(&producer.name),
        producer.version.as_ref(),
        producer.backend.as_ref(),
        producer.device.as_ref(),
    ];
    let parts: Vec<&str> = parts.into_iter().flatten().map(String::as_str).collect();
    line(&mut out, "producer", parts.join(" · "));
    line(&mut out, "numerics", shown(producer.numerics.as_ref()));
    let model = &dump.model;
    let parts: Vec<&str> =
        [&model.name, &model.architecture, &model.file].into_iter().flatten().map(String::as_str).collect();
    line(&mut out, "model", if parts.is_empty() { ABSENT.to_owned() } else { parts.join(" · ") });
    line(&mut out, "dump", &dump.file);
    findings(&mut out, &dump.findings);
    line(&mut out, "prompt", dump.prompt.as_ref().map_or(ABSENT.to_owned(), |prompt| format!("{prompt:?}")));
    line(&mut out, "tokens", format!("{:?}", dump.tokens));
    let steps: Vec<String> = dump.steps.iter().map(|step| step.positions.to_string()).collect();
    line(&mut out, "steps", format!("{} of {} positions", steps.len(), steps.join(" + ")));
    let rows: Vec<String> = dump.rows.iter().cloned().collect();
    let beside =
        [("rows", &rows), ("events", &dump.events), ("not ids", &dump.foreign), ("unmapped", &dump.unmapped)];
    for (label, names) in beside {
        if !names.is_empty() {
            line(&mut out, label, names.join(", "));
        }
    }
    out += &super::graph::text::text(&dump.graphs);
    let header = ["checkpoint", "type", "shape", "rows", "missing", "min", "max", "rms"];
    let _ = write!(out, "\n{}", table(&header, 3, dump.checkpoints.iter().map(checkpoint_row)));
    out.push('\n');
    out
}

fn checkpoint_row(report: &CheckpointReport) -> Vec<String> {
    let float = |value: Option<f32>| value.map_or(ABSENT.to_owned(), |v| number(f64::from(v)));
    vec![
        report.id.to_string(),
        report.dtype.to_owned(),
        report.shapes.first().map_or(ABSENT.to_owned(), |axes| shape(axes)),
        report.rows.to_string(),
        report.missing.len().to_string(),
        float(report.stats.min),
        float(report.stats.max),
        report.stats.rms.map_or(ABSENT.to_owned(), number),
    ]
}
