//! The report as text for a terminal: what is wrong and what to type next first, the evidence below.

use comfy_table::{Cell, Color, Table};

use super::words::{self, number, number_or_dash};
use super::{CheckpointVerdict, Entry, Report, TokenReport, Verdict, finding};
use crate::text::printable;

/// Narrowest layout; a narrower terminal wraps lines itself.
const NARROWEST: usize = 40;
/// Rows of a run of one kind that are shown before the rest is folded, for healthy nodes and for others.
const SHOWN: [usize; 2] = [2, 6];

/// A table of up to so many checkpoints, one layer of a model, is shown whole.
const SHORT: usize = 24;

/// How to lay the text out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// Columns of the terminal.
    pub width: usize,
    /// Whether to use ANSI colours.
    pub color: bool,
    /// Whether to show every checkpoint instead of folding long runs.
    pub all: bool,
}

impl Default for Terminal {
    /// 80 columns, no colour, folded: what a pipe gets.
    fn default() -> Self {
        Terminal { width: 80, color: false, all: false }
    }
}

impl Terminal {
    /// What standard output is: the terminal's width, and colour unless `NO_COLOR` is set or it is a pipe.
    pub fn of_stdout() -> Terminal {
        let terminal = console_width();
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Terminal {
            width: terminal.unwrap_or(Terminal::default().width),
            color: terminal.is_some() && !no_color && !dumb,
            all: false,
        }
    }
}

/// Columns of the terminal on standard output; `None` for a pipe or a file.
fn console_width() -> Option<usize> {
    use std::io::IsTerminal;
    let is_terminal = std::io::stdout().is_terminal();
    is_terminal.then(|| Table::new().width().map_or(Terminal::default().width, usize::from))
}

/// The text, lines ended by newlines.
pub fn render(report: &Report, layout: &Terminal) -> String {
    let width = layout.width.max(NARROWEST);
    let mut out = Vec::new();
    header(report, width, &mut out);
    out.push(String::new());
    answer(report, width, layout.color, &mut out);
    if !report.checkpoints.is_empty() {
        out.push(String::new());
        out.extend(table(report, layout, width));
    }
    if let Some(tokens) = &report.tokens {
        out.push(String::new());
        out.extend(words::wrap(&tokens_line(tokens), width));
    }
    for note in &finding::notes(report) {
        hang("note: ", note, width, &mut out);
    }
    out.push(String::new());
    hang("", &coverage_line(report), width, &mut out);
    out.push(words::summary_line(report));
    out.push(String::new());
    out.join("\n")
}

fn header(report: &Report, width: usize, out: &mut Vec<String>) {
    let side = &report.candidate;
    hang("model      ", &words::model(side), width, out);
    hang("tokens     ", &words::tokens(side), width, out);
    hang("candidate  ", &words::producer(side), width, out);
    if let Some(reference) = &report.reference {
        hang("reference  ", &words::producer(reference), width, out);
    }
}

fn answer(report: &Report, width: usize, color: bool, out: &mut Vec<String>) {
    let answer = words::answer(report);
    let note = words::diagnosis_note(report).map(|note| format!("  ({note})")).unwrap_or_default();
    let mut lines = words::wrap(&format!("{answer}: {}{note}", words::because(report)), width - 2);
    if color {
        let code = match report.verdict {
            Verdict::Parity => 32,
            Verdict::Divergence => 31,
            Verdict::Undecided => 33,
        };
        // The answer's words are on the first line unless the terminal is narrower than they are.
        lines[0] = lines[0].replacen(&answer, &format!("\x1b[1;{code}m{answer}\x1b[0m"), 1);
    }
    for (i, line) in lines.into_iter().enumerate() {
        out.push(if i == 0 { line } else { format!("  {line}") });
    }
    for sentence in &report.answer {
        hang("  ", sentence, width, out);
    }
    if let Some(around) = words::surroundings(report) {
        hang("  ", &around, width, out);
    }
    if let Some(first) = &report.first_divergence {
        if let Some(fix) = first.diagnosis.first().and_then(|diagnosis| diagnosis.fix.as_ref()) {
            hang("  fix:  ", fix, width, out);
        }
        if first.diagnosis.is_empty() && !first.tried.is_empty() {
            hang("  tried: ", &tried(first), width, out);
        }
    }
    for command in words::next_commands(report).iter().take(2) {
        // A command is never broken: it is there to be copied.
        out.push(format!("  next: {command}"));
    }
}

fn tried(first: &super::FirstDivergence) -> String {
    let best = first.tried.iter().take(3);
    let best: Vec<String> = best.map(words::tried).collect();
    format!("{}; the best of them: {}", words::count(first.tried.len(), "fault"), best.join(", "))
}

/// A column: header, its text for an entry, least width of a terminal that has room for it.
type Column = (&'static str, fn(&Entry) -> String, usize);

const COLUMNS: [Column; 10] = [
    ("checkpoint", |entry| entry.id.to_string(), 0),
    ("rel L2", |entry| measure(entry, |n| Some(n.rel_l2)), 0),
    ("max |a-b|", |entry| measure(entry, |n| Some(n.abs_err_max)), 66),
    ("at", worst_index, 76),
    ("a", |entry| value(entry, |n| n.worst.candidate), 120),
    ("b", |entry| value(entry, |n| n.worst.reference), 120),
    ("cosine", |entry| entry.numbers.as_ref().and_then(|n| n.cosine).map_or("–".into(), cosine), 150),
    ("error/bound", |entry| number_or_dash(words::over_bound(entry)), 0),
    (
        "of reference",
        |entry| number_or_dash(entry.local.reference.as_ref().map(|local| local.over_bound)),
        100,
    ),
    ("verdict", |entry| verdict(entry).to_owned(), 0),
];

/// The verdict; of a node that was compared with exact arithmetic alone no match is claimed.
fn verdict(entry: &Entry) -> &'static str {
    match (entry.verdict, &entry.numbers) {
        (CheckpointVerdict::Match, None) => "healthy",
        (verdict, _) => verdict.name(),
    }
}

fn measure(entry: &Entry, pick: impl Fn(&super::Numbers) -> Option<f64>) -> String {
    number_or_dash(entry.numbers.as_ref().and_then(pick))
}

fn value(entry: &Entry, pick: impl Fn(&super::Numbers) -> Option<f64>) -> String {
    entry.numbers.as_ref().and_then(pick).map_or_else(|| "–".to_owned(), words::precise)
}

fn worst_index(entry: &Entry) -> String {
    match &entry.numbers {
        Some(numbers) if numbers.abs_err_max != 0.0 => words::index(&numbers.worst.index),
        _ => String::new(),
    }
}

/// 1 - cosine says more than the cosine: `1-3e-9`.
fn cosine(value: f64) -> String {
    if 1.0 - value < 1e-3 { format!("1-{}", number(1.0 - value)) } else { format!("{value:.4}") }
}

fn table(report: &Report, layout: &Terminal, width: usize) -> Vec<String> {
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| column.2 <= width).collect();
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).force_no_tty();
    if layout.color {
        table.enforce_styling();
    }
    table.set_header(columns.iter().map(|column| column.0));
    let all = layout.all || report.checkpoints.len() <= SHORT;
    for line in fold(&report.checkpoints, all) {
        match line {
            Line::Entry(entry) => {
                table.add_row(columns.iter().map(|column| cell(entry, column)));
            }
            Line::More(n, text) => {
                let mut row = vec![String::new(); columns.len()];
                row[0] = "…".to_owned();
                row[columns.len() - 1] = if width < 76 { format!("({n} more)") } else { text };
                table.add_row(row);
            }
        }
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

fn cell(entry: &Entry, column: &Column) -> Cell {
    let cell = Cell::new(column.1(entry));
    match (column.0, entry.verdict) {
        ("checkpoint" | "verdict", verdict) if verdict.is_fault() => cell.fg(Color::Red),
        ("verdict", CheckpointVerdict::Match) => cell.fg(Color::Green),
        ("verdict", CheckpointVerdict::Inherited) => cell.fg(Color::DarkGrey),
        ("verdict", _) => cell.fg(Color::Yellow),
        _ => cell,
    }
}

/// A line of the table.
enum Line<'a> {
    Entry(&'a Entry),
    More(usize, String),
}

/// Long runs of healthy nodes, and of nodes with one other verdict, keep their first and last lines.
fn fold(entries: &[Entry], all: bool) -> Vec<Line<'_>> {
    let class = |entry: &Entry| match entry.verdict {
        verdict if verdict.is_healthy() => CheckpointVerdict::Match,
        verdict => verdict,
    };
    let mut lines = Vec::new();
    for run in entries.chunk_by(|a, b| class(a) == class(b)) {
        let shown = SHOWN[usize::from(!run[0].verdict.is_healthy())];
        if all || run.len() <= shown + 2 {
            lines.extend(run.iter().map(Line::Entry));
            continue;
        }
        let (last, rest) = run.split_last().expect("a run has an entry");
        lines.extend(rest[..shown].iter().map(Line::Entry));
        lines.push(Line::More(rest.len() - shown, more(&rest[shown..])));
        lines.push(Line::Entry(last));
    }
    lines
}

/// `(38 more match, 3 inherited)`
fn more(entries: &[Entry]) -> String {
    let names = std::iter::once("healthy").chain(CheckpointVerdict::ALL.map(CheckpointVerdict::name));
    let counts = names.filter_map(|name| {
        let n = entries.iter().filter(|entry| verdict(entry) == name).count();
        (n > 0).then_some((n, name))
    });
    let words: Vec<String> = counts
        .enumerate()
        .map(|(i, (n, name))| if i == 0 { format!("{n} more {name}") } else { format!("{n} {name}") })
        .collect();
    format!("({})", words.join(", "))
}

fn tokens_line(tokens: &TokenReport) -> String {
    let mut line = format!(
        "tokens: the most likely one agrees in {} of the rows, KL {} nats on average, {} at most",
        words::percent(tokens.top1_agree),
        number(tokens.kl_mean),
        number(tokens.kl_max),
    );
    if let Some(flip) = &tokens.first_flip {
        let why = if flip.explained_by_error { "within" } else { "beyond" };
        line += &format!(
            "; first flip at position {}: {} for {}, margin {} {why} the logit error {}",
            flip.position,
            flip.candidate,
            flip.reference,
            number(flip.margin),
            number(flip.logit_error),
        );
    }
    line
}

fn coverage_line(report: &Report) -> String {
    let coverage = &report.coverage;
    let mut line = match coverage.checkpoints_compared {
        0 => "nothing compared".to_owned(),
        compared => format!(
            "{} compared ({} elements, {} of {} rows)",
            words::count(compared, "checkpoint"),
            words::thousands(coverage.elements_compared),
            words::thousands(coverage.rows_compared),
            words::thousands(coverage.rows_expected),
        ),
    };
    if coverage.checkpoints_missing > 0 {
        line += &format!(", {} missing on a side", coverage.checkpoints_missing);
    }
    if let Some(rows) = coverage.rows_audited {
        line += &format!(", {} rows audited", words::thousands(rows));
    }
    if let Some(rows) = coverage.rows_screened.filter(|rows| *rows > 0) {
        line += &format!(", {} more screened", words::thousands(rows));
    }
    line
}

/// Wraps `text` behind `label`, later lines indented to it.
fn hang(label: &str, text: &str, width: usize, out: &mut Vec<String>) {
    let indent = label.chars().count();
    let text = printable(text);
    for (i, line) in words::wrap(&text, width.saturating_sub(indent).max(16)).into_iter().enumerate() {
        out.push(if i == 0 { format!("{label}{line}") } else { format!("{:indent$}{line}", "") });
    }
}
