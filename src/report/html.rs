//! The report as one self-contained page: no network, light and dark, printable, usable by keyboard.
//!
//! The template draws what a glance needs (the answer, the map, the trajectory, the tables); the page's
//! script draws the checkpoint that the reader selects from the data embedded beside it.

mod color;
mod data;
mod map;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment};
use serde::Serialize;

use super::words::{self, number, number_or_dash};
use super::{CheckpointVerdict, Entry, FirstDivergence, Report, Side, TokenReport, finding};
use crate::error::{Error, Result};

const TEMPLATE: &str = include_str!("html/report.html");
const STYLE: &str = include_str!("html/style.css");
const SCRIPT: &str = concat!(
    include_str!("html/script.js"),
    include_str!("html/layer.js"),
    include_str!("html/find.js"),
    include_str!("html/compare.js"),
    include_str!("html/start.js"),
);

/// The page.
pub fn render(report: &Report) -> Result<String> {
    let failed = |e: &dyn std::fmt::Display| Error::new("report.html", format!("cannot be written: {e}"));
    let json = serde_json::to_string(&data::data(report)).map_err(|e| failed(&e))?;
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let mut environment = Environment::new();
    environment.set_syntax(syntax.map_err(|e| failed(&e))?);
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    // Inside a script element only `<` can end the data.
    let texts =
        [("style", STYLE.to_owned()), ("script", SCRIPT.to_owned()), ("data", json.replace('<', "\\u003c"))];
    for (name, text) in texts {
        environment.add_global(name, Value::from_safe_string(text));
    }
    let template = environment.template_from_str(TEMPLATE).map_err(|e| failed(&e))?;
    template.render(Serde(page(report))).map_err(|e| failed(&e))
}

/// What the template fills in.
#[derive(Serialize)]
struct Page<'a> {
    version: &'static str,
    verdict: &'static str,
    answer: String,
    because: String,
    told: &'a [String],
    note: Option<String>,
    around: Option<String>,
    commands: Vec<String>,
    first: Option<&'a FirstDivergence>,
    tried: Vec<(String, String, f64)>,
    summary: String,
    created: Option<&'a str>,
    command: Option<&'a str>,
    notes: Vec<String>,
    coverage: Facts,
    map: map::Map,
    scales: Vec<Scale>,
    legend: Vec<Count>,
    sides: Vec<SideView>,
    tokens: Option<TokensView>,
    rows: Vec<CheckpointRow>,
}

fn page(report: &Report) -> Page<'_> {
    Page {
        version: env!("CARGO_PKG_VERSION"),
        verdict: report.verdict.name(),
        answer: words::answer(report),
        because: words::because(report),
        told: &report.answer,
        note: words::diagnosis_note(report),
        around: words::surroundings(report),
        commands: words::next_commands(report),
        first: report.first_divergence.as_ref(),
        tried: tried(report),
        summary: words::summary_line(report),
        created: report.created.as_deref(),
        command: report.command.as_deref(),
        notes: finding::notes(report),
        coverage: coverage(report),
        map: map::map(report),
        scales: scales(report),
        legend: legend(report),
        sides: sides(report),
        tokens: report.tokens.as_ref().map(tokens),
        rows: report.checkpoints.iter().map(row).collect(),
    }
}

#[derive(Serialize)]
struct Scale {
    name: &'static str,
    title: &'static str,
    /// (percent, colour) of a CSS gradient.
    stops: Vec<(f64, String)>,
    /// (percent, text)
    ticks: Vec<(f64, String)>,
}

/// The scales that the map can be coloured by; the first is shown.
fn scales(report: &Report) -> Vec<Scale> {
    let scale = |name, title, scale: &color::Scale| Scale {
        name,
        title,
        stops: (0..=20).map(|i| (f64::from(i) * 5.0, color::viridis(f64::from(i) / 20.0))).collect(),
        ticks: scale.ticks().iter().map(|(value, place)| (place * 100.0, power(*value))).collect(),
    };
    let own = || scale("own", "local error / bound", &color::OWN);
    let difference = || scale("difference", "difference, rel L2", &color::DIFFERENCE);
    let audited = report.checkpoints.iter().any(|entry| entry.local.candidate.is_some());
    let compared = report.checkpoints.iter().any(|entry| entry.numbers.is_some());
    match (audited, compared) {
        (true, true) => vec![own(), difference()],
        (true, false) => vec![own()],
        _ => vec![difference()],
    }
}

/// Ticks stand at powers of ten.
fn power(value: f64) -> String {
    match value.log10().round() as i32 {
        0 => "1".to_owned(),
        exponent => format!("1e{exponent}"),
    }
}

#[derive(Serialize)]
struct Count {
    verdict: &'static str,
    mark: &'static str,
    meaning: &'static str,
    n: usize,
    fault: bool,
}

/// How many checkpoints got which verdict.
fn legend(report: &Report) -> Vec<Count> {
    let count = |verdict: CheckpointVerdict| Count {
        verdict: verdict.name(),
        mark: map::mark(verdict),
        meaning: verdict.meaning(),
        n: report.checkpoints.iter().filter(|entry| entry.verdict == verdict).count(),
        fault: verdict.is_fault(),
    };
    CheckpointVerdict::ALL.into_iter().map(count).filter(|count| count.n > 0).collect()
}

/// (fault, share, width of its bar in percent), best first.
fn tried(report: &Report) -> Vec<(String, String, f64)> {
    let first = report.first_divergence.iter();
    let bar = |share: f64| (share.clamp(0.0, 1.0) * 100.0 * 10.0).round() / 10.0;
    first
        .flat_map(|first| &first.tried)
        .take(12)
        .map(|t| (t.fault.clone(), words::percent(t.explains), bar(t.explains)))
        .collect()
}

/// (label, value)
type Facts = Vec<(String, String)>;

fn coverage(report: &Report) -> Facts {
    let coverage = &report.coverage;
    let mut facts = vec![
        ("checkpoints compared".to_owned(), words::thousands(coverage.checkpoints_compared as u64)),
        ("missing on a side".to_owned(), words::thousands(coverage.checkpoints_missing as u64)),
        ("elements".to_owned(), words::thousands(coverage.elements_compared)),
        (
            "token rows".to_owned(),
            format!(
                "{} of {}",
                words::thousands(coverage.rows_compared),
                words::thousands(coverage.rows_expected)
            ),
        ),
    ];
    if let Some(rows) = coverage.rows_audited {
        facts.push(("rows audited".to_owned(), words::thousands(rows)));
    }
    if let Some(rows) = coverage.rows_screened.filter(|rows| *rows > 0) {
        facts.push(("further rows screened".to_owned(), words::thousands(rows)));
    }
    facts
}

#[derive(Serialize)]
struct SideView {
    label: &'static str,
    name: String,
    facts: Facts,
}

fn sides(report: &Report) -> Vec<SideView> {
    let view = |label, side: &Side| SideView { label, name: words::producer(side), facts: facts(side) };
    let candidate = std::iter::once(view("candidate", &report.candidate));
    candidate.chain(report.reference.iter().map(|side| view("reference", side))).collect()
}

fn facts(side: &Side) -> Facts {
    let (producer, model) = (&side.producer, &side.model);
    let known = [
        ("engine", Some(&producer.name)),
        ("version", producer.version.as_ref()),
        ("backend", producer.backend.as_ref()),
        ("device", producer.device.as_ref()),
        ("numerics", producer.numerics.as_ref()),
        ("model file", model.file.as_ref()),
        ("model name", model.name.as_ref()),
        ("architecture", model.architecture.as_ref()),
        ("fingerprint", model.fingerprint.as_ref()),
        ("dump", side.path.as_ref()),
    ];
    let mut facts: Facts =
        known.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.clone()))).collect();
    facts.push(("tokens".to_owned(), words::tokens(side)));
    facts.extend(side.provenance.iter().map(|(key, value)| (key.clone(), value.clone())));
    facts
}

#[derive(Serialize)]
struct TokensView {
    agree: String,
    kl_mean: String,
    kl_max: String,
    top_k: Option<(usize, String)>,
    flip: Option<FlipView>,
    top: Vec<TokenView>,
    kl: Vec<(f64, f64)>,
}

#[derive(Serialize)]
struct FlipView {
    position: u32,
    candidate: u32,
    reference: u32,
    margin: String,
    error: String,
    explained: bool,
}

#[derive(Serialize)]
struct TokenView {
    token: u32,
    text: Option<String>,
    candidate: String,
    reference: String,
    difference: String,
    /// Widths of the bars in percent.
    bars: [f64; 2],
}

fn tokens(tokens: &TokenReport) -> TokensView {
    let logits = || tokens.top.iter().flat_map(|t| [t.candidate, t.reference]).filter(|v| v.is_finite());
    let (low, high) = (logits().fold(f64::INFINITY, f64::min), logits().fold(f64::NEG_INFINITY, f64::max));
    let span = (high - low).max(f64::MIN_POSITIVE);
    // The smallest logit keeps a stub of a bar: bars compare the shown tokens, not absolute logits.
    let bar = |value: f64| if value.is_finite() { 12.0 + 88.0 * (value - low) / span } else { 0.0 };
    TokensView {
        agree: words::percent(tokens.top1_agree),
        kl_mean: number(tokens.kl_mean),
        kl_max: number(tokens.kl_max),
        top_k: (tokens.top_k > 0).then(|| (tokens.top_k, words::percent(tokens.top_k_agree))),
        flip: tokens.first_flip.as_ref().map(|flip| FlipView {
            position: flip.position,
            candidate: flip.candidate,
            reference: flip.reference,
            margin: number(flip.margin),
            error: number(flip.logit_error),
            explained: flip.explained_by_error,
        }),
        top: tokens
            .top
            .iter()
            .map(|t| TokenView {
                token: t.token,
                text: t.text.as_ref().map(|text| format!("{text:?}")),
                candidate: format!("{:.3}", t.candidate),
                reference: format!("{:.3}", t.reference),
                difference: number(t.candidate - t.reference),
                bars: [bar(t.candidate), bar(t.reference)].map(|b| (b * 10.0).round() / 10.0),
            })
            .collect(),
        kl: kl_bars(&tokens.kl_rows),
    }
}

/// (x, height) in percent of at most 160 bars, each the largest KL of its positions on a logarithmic scale.
fn kl_bars(rows: &[(u32, f64)]) -> Vec<(f64, f64)> {
    const BARS: usize = 160;
    const DECADES: f64 = 9.0;
    let bars = rows.len().min(BARS);
    (0..bars)
        .map(|i| {
            let part = &rows[i * rows.len() / bars..(i + 1) * rows.len() / bars];
            let largest =
                part.iter().fold(0.0f64, |most, (_, kl)| if kl.is_nan() { 1.0 } else { most.max(*kl) });
            let height = ((largest.max(1e-12).log10() + DECADES) / DECADES).clamp(0.0, 1.0) * 100.0;
            ((i as f64 / bars as f64 * 10_000.0).round() / 100.0, height.round())
        })
        .collect()
}

#[derive(Serialize)]
struct CheckpointRow {
    id: String,
    verdict: &'static str,
    fault: bool,
    cells: [String; 8],
}

fn row(entry: &Entry) -> CheckpointRow {
    let numbers = entry.numbers.as_ref();
    let local = |side: &Option<super::LocalError>| number_or_dash(side.as_ref().map(|l| l.over_bound));
    CheckpointRow {
        id: entry.id.to_string(),
        verdict: entry.verdict.name(),
        fault: entry.verdict.is_fault(),
        cells: [
            number_or_dash(numbers.map(|n| n.rel_l2)),
            number_or_dash(numbers.map(|n| n.abs_err_max)),
            numbers.map(|n| words::index(&n.worst.index)).unwrap_or_default(),
            number_or_dash(numbers.and_then(|n| n.cosine).map(|c| 1.0 - c)),
            local(&entry.local.candidate),
            local(&entry.local.reference),
            number_or_dash(entry.parts.as_ref().map(|b| b.inherited)),
            number_or_dash(numbers.map(|n| n.tolerance_needed.atol)),
        ],
    }
}
