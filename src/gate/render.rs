//! What a suite came to, for people and for CI.

use std::fmt::Write;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestRerun, TestSuite};

use super::judge::describe;
use super::{CaseResult, GateReport, Status};
use crate::error::{Error, Result};
use crate::report::markdown::escape;
use crate::report::{Verdict, github, sarif, words};

/// The result as `gate.json`.
pub fn json(report: &GateReport) -> Result<String> {
    let mut text = serde_json::to_string_pretty(report)
        .map_err(|e| Error::new("gate.json", format!("cannot be written as JSON: {e}")))?;
    text.push('\n');
    Ok(text)
}

/// One line: `suite nightly: 12 cases, 10 passed, 1 failed, 1 could not be judged`.
pub fn summary(report: &GateReport) -> String {
    let mut line = format!("suite {}: {}", report.suite, words::count(report.cases.len(), "case"));
    if let Some(shard) = &report.shard {
        let _ = write!(line, " (shard {shard} of {})", report.all.len());
    }
    let counts = [
        (Status::Passed, "passed"),
        (Status::Allowed, "allowed by name"),
        (Status::Failed, "failed"),
        (Status::Undecided, "could not be judged"),
    ];
    for (status, name) in counts {
        let n = report.count(status);
        if n > 0 {
            let _ = write!(line, ", {n} {name}");
        }
    }
    let retried = report.cases.iter().filter(|case| case.attempts > 1).count();
    if retried > 0 {
        let _ = write!(line, ", {retried} needed a retry");
    }
    line
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Passed => "passed",
        Status::Allowed => "allowed",
        Status::Failed => "FAILED",
        Status::Undecided => "UNDECIDED",
    }
}

/// For a terminal: the summary, then every case that deserves a look.
pub fn text(report: &GateReport) -> String {
    let mut out = summary(report) + "\n";
    for case in report.cases.iter().filter(|case| is_worth_a_look(case)) {
        let _ = writeln!(out, "\n{} {}", word(case.status), case.id);
        for problem in &case.problems {
            // Error texts have lines of their own.
            let _ = writeln!(out, "  {}", problem.text.replace('\n', "\n  "));
        }
        if case.attempts > 1 {
            let _ = writeln!(out, "  run {} times", case.attempts);
        }
        let shown = case.moved.iter().filter(|moved| moved.worse).skip(1).take(3);
        for moved in shown {
            let _ = writeln!(out, "  {}", describe(moved));
        }
        let better = case.moved.iter().filter(|moved| !moved.worse).count();
        if better > 0 {
            let _ = writeln!(
                out,
                "  {} better than the baseline; --accept keeps it",
                words::count(better, "number")
            );
        }
        if let Some(next) =
            case.next.as_ref().filter(|_| matches!(case.status, Status::Failed | Status::Undecided))
        {
            let _ = writeln!(out, "  next: {next}");
        }
    }
    for line in stale(report) {
        let _ = writeln!(out, "\n{line}");
    }
    out
}

fn is_worth_a_look(case: &CaseResult) -> bool {
    case.status != Status::Passed || case.attempts > 1 || !case.moved.is_empty()
}

fn stale(report: &GateReport) -> Vec<String> {
    let stale = report.stale_waivers();
    let line = |(case, waiver): &(&CaseResult, &super::WaiverUse)| {
        format!(
            "waiver no longer needed: `{}` in {} ({}); remove it from the suite",
            waiver.checkpoint, case.id, waiver.reason
        )
    };
    stale.iter().map(line).collect()
}

/// JUnit: one test case per case. A retry is a rerun, an allowed absence is skipped.
pub fn junit(report: &GateReport) -> Result<String> {
    let mut suite = TestSuite::new(report.suite.as_str());
    suite.add_property(("parity.summary", summary(report).as_str()));
    for line in stale(report) {
        suite.add_property(("parity.stale-waiver", line.as_str()));
    }
    for case in &report.cases {
        let texts: Vec<&str> = case.problems.iter().map(|problem| problem.text.as_str()).collect();
        let texts = texts.join("\n");
        let mut status = match case.status {
            Status::Passed => TestCaseStatus::success(),
            Status::Allowed => TestCaseStatus::skipped(),
            Status::Failed => TestCaseStatus::non_success(NonSuccessKind::Failure),
            Status::Undecided => TestCaseStatus::non_success(NonSuccessKind::Error),
        };
        if case.status == Status::Passed {
            for _ in 1..case.attempts {
                let mut rerun = TestRerun::new(NonSuccessKind::Failure);
                rerun.set_type("retried").set_message(texts.as_str());
                status.add_rerun(rerun);
            }
        } else {
            status.set_message(texts.lines().next().unwrap_or_default()).set_description(texts.as_str());
        }
        let mut test = TestCase::new(case.id.as_str(), status);
        test.set_classname(format!("parity.{}", report.suite));
        test.set_system_out(case.answer.as_str());
        suite.add_test_case(test);
    }
    let mut document = quick_junit::Report::new(report.suite.as_str());
    document.add_test_suite(suite);
    crate::report::junit::text(&document)
}

/// SARIF: one result per problem of a case that does not pass.
pub fn sarif(report: &GateReport) -> Result<String> {
    let of = |case: &&CaseResult| matches!(case.status, Status::Failed | Status::Undecided);
    let results = report.cases.iter().filter(of).flat_map(|case| {
        case.problems.iter().map(|problem| {
            let kind = serde_json::to_value(problem.kind).unwrap_or_default();
            let rule = (kind.as_str().unwrap_or_default(), "error");
            sarif::result_in(&report.suite, rule, &case.id, &problem.text)
        })
    });
    let mut results: Vec<_> = results.collect();
    if results.is_empty() && report.verdict() != Verdict::Parity {
        results.push(sarif::result_in(&report.suite, ("undecided", "error"), "suite", &summary(report)));
    }
    sarif::document(sarif::run(results, report.verdict(), &summary(report), |_| None))
}

/// Markdown for the step summary of a CI run.
pub fn markdown(report: &GateReport) -> String {
    let sign = match report.verdict() {
        Verdict::Parity => "✅",
        Verdict::Divergence => "❌",
        Verdict::Undecided => "⚠️",
    };
    let mut out = format!("## {sign} {}\n", escape(&summary(report)));
    let worth: Vec<&CaseResult> = report.cases.iter().filter(|case| is_worth_a_look(case)).collect();
    if !worth.is_empty() {
        out += "\n| case | result | why |\n| --- | --- | --- |\n";
    }
    for case in worth {
        let mut why: Vec<String> = case.problems.iter().map(|problem| escape(&problem.text)).collect();
        if case.attempts > 1 {
            why.push(format!("run {} times", case.attempts));
        }
        if case.problems.is_empty() && !case.moved.is_empty() {
            why.push(format!("{} left the baseline", words::count(case.moved.len(), "number")));
        }
        let _ = writeln!(out, "| {} | {} | {} |", escape(&case.id), word(case.status), why.join("<br>"));
    }
    for line in stale(report) {
        let _ = writeln!(out, "\n> {}", escape(&line));
    }
    out
}

/// Annotations for GitHub Actions: one per case that does not pass, one per waiver that is not needed.
pub fn annotations(report: &GateReport) -> String {
    let mut out = String::new();
    for case in report.cases.iter().filter(|case| matches!(case.status, Status::Failed | Status::Undecided)) {
        let texts: Vec<&str> = case.problems.iter().map(|problem| problem.text.as_str()).collect();
        out += &github::annotation("error", &case.id, &texts.join("\n"));
    }
    for case in report.cases.iter().filter(|case| case.attempts > 1) {
        out += &github::annotation("warning", &case.id, &format!("run {} times", case.attempts));
    }
    for line in stale(report) {
        out += &github::annotation("warning", &report.suite, &line);
    }
    out
}
