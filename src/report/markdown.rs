//! The report as `summary.md`, for the step summary of a CI run.

use std::fmt::Write;

use super::words::{self, number_or_dash};
use super::{Entry, Report, Verdict, finding};
use crate::text::printable_lines;

/// Rows of the table that are shown; the CSV has them all.
const ROWS: usize = 20;

/// GitHub-flavoured Markdown.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    let sign = match report.verdict {
        Verdict::Parity => "✅",
        Verdict::Divergence => "❌",
        Verdict::Undecided => "⚠️",
    };
    let _ = writeln!(out, "## {sign} {}\n", escape(&words::answer(report)));
    let _ = writeln!(out, "**{}**", escape(&words::because(report)));
    if let Some(note) = words::diagnosis_note(report) {
        let _ = writeln!(out, "({})", escape(&note));
    }
    for sentence in &report.answer {
        let _ = writeln!(out, "\n{}", escape(sentence));
    }
    if let Some(around) = words::surroundings(report) {
        let _ = writeln!(out, "\n{}", escape(&around));
    }
    let commands = words::next_commands(report);
    if !commands.is_empty() {
        let _ = writeln!(out, "\n```console\n{}\n```", commands.join("\n"));
    }
    let _ = writeln!(out, "\n| | |\n| --- | --- |");
    let _ = writeln!(out, "| model | {} |", escape(&words::model(&report.candidate)));
    let _ = writeln!(out, "| tokens | {} |", words::tokens(&report.candidate));
    let _ = writeln!(out, "| candidate | {} |", escape(&words::producer(&report.candidate)));
    if let Some(reference) = &report.reference {
        let _ = writeln!(out, "| reference | {} |", escape(&words::producer(reference)));
    }
    let _ =
        writeln!(out, "| compared | {} |", words::count(report.coverage.checkpoints_compared, "checkpoint"));
    faults(report, &mut out);
    // One quotation: a blank line between two would be read as either.
    for (place, note) in finding::notes(report).iter().enumerate() {
        let before = if place == 0 { "" } else { ">" };
        let _ = writeln!(out, "{before}\n> {}", escape(note));
    }
    out
}

/// The checkpoints that are not in order, and nothing where all are.
fn faults(report: &Report, out: &mut String) {
    let faulty: Vec<&Entry> = report.checkpoints.iter().filter(|entry| !entry.verdict.is_healthy()).collect();
    if faulty.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "\n| checkpoint | verdict | rel L2 | max \\|a-b\\| | local error / bound |\n| --- | --- | ---: | ---: | ---: |"
    );
    for entry in faulty.iter().take(ROWS) {
        let numbers = entry.numbers.as_ref();
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} | {} |",
            entry.id,
            entry.verdict.name(),
            number_or_dash(numbers.map(|n| n.rel_l2)),
            number_or_dash(numbers.map(|n| n.abs_err_max)),
            number_or_dash(words::over_bound(entry)),
        );
    }
    if faulty.len() > ROWS {
        let _ = writeln!(out, "\n{} more in `report.csv`.", faulty.len() - ROWS);
    }
}

/// Text that Markdown takes literally, on one line.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable_lines(text).chars() {
        match c {
            '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '|' | '#' | '~' => {
                out.push('\\');
                out.push(c);
            }
            '\n' | '\r' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
