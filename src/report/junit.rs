//! The report as `junit.xml`: one test case per checkpoint.

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::words::{self, number, number_or_dash};
use super::{CheckpointVerdict, Entry, Report, Verdict};
use crate::error::{Error, Result};

/// The XML. Inherited differences pass: the bug is reported once, where it is.
pub fn render(report: &Report) -> Result<String> {
    let mut document = quick_junit::Report::new("parity");
    document.add_test_suite(suite(report, &words::producer(&report.candidate)));
    text(&document)
}

/// A document as the schema of Jenkins' xUnit plugin has it (`junit-10.xsd`): there `testsuites` counts no
/// skipped cases, each `testsuite` does.
pub fn text(document: &quick_junit::Report) -> Result<String> {
    let failed = |e: &dyn std::fmt::Display| Error::new("junit.xml", format!("cannot be written: {e}"));
    let xml = document.to_string().map_err(|e| failed(&e))?;
    let root = xml.find("<testsuites").and_then(|start| Some(start..start + xml[start..].find('>')?));
    let Some(root) = root else { return Err(failed(&"there is no root element")) };
    let count = xml[root.clone()].find(" skipped=\"").map(|at| root.start + at);
    let Some(start) = count else { return Ok(xml) };
    let value = start + " skipped=\"".len();
    let end = xml[value..].find('"').map_or(value, |quote| value + quote + 1);
    Ok(format!("{}{}", &xml[..start], &xml[end..]))
}

/// One suite per report.
pub fn suite(report: &Report, name: &str) -> TestSuite {
    let mut suite = TestSuite::new(name);
    suite.add_property(("parity.verdict", report.verdict.name()));
    suite.add_property(("parity.summary", words::summary_line(report).as_str()));
    if let Some(created) = &report.created {
        suite.add_property(("parity.created", created.as_str()));
    }
    for entry in &report.checkpoints {
        let mut case = TestCase::new(entry.id.to_string(), status(report, entry));
        case.set_classname(match entry.layer {
            Some(layer) => format!("parity.layer{layer}"),
            None => "parity.model".to_owned(),
        });
        suite.add_test_case(case);
    }
    if suite.test_cases.is_empty()
        || (report.verdict == Verdict::Undecided && suite.failures + suite.errors == 0)
    {
        // A run that could not judge must not look green.
        let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
        status.set_message(words::because(report)).set_type("undecided");
        suite.add_test_case(TestCase::new("parity could judge", status));
    }
    suite
}

fn status(report: &Report, entry: &Entry) -> TestCaseStatus {
    let text = entry.evidence.clone().unwrap_or_else(|| entry.verdict.meaning().to_owned());
    let mut status = match entry.verdict {
        verdict if verdict.is_healthy() && !report.origins.contains(&entry.id) => {
            return TestCaseStatus::success();
        }
        CheckpointVerdict::Missing | CheckpointVerdict::Undecided => TestCaseStatus::skipped(),
        CheckpointVerdict::Reference => TestCaseStatus::non_success(NonSuccessKind::Error),
        _ => TestCaseStatus::non_success(NonSuccessKind::Failure),
    };
    let first = report.first_divergence.as_ref().filter(|first| first.checkpoint == entry.id);
    let message = if first.is_some() { words::because(report) } else { text.clone() };
    status
        .set_type(entry.verdict.name())
        .set_message(message)
        .set_description(description(report, entry, &text));
    status
}

fn description(report: &Report, entry: &Entry, text: &str) -> String {
    let mut lines = vec![text.to_owned()];
    if let Some(numbers) = &entry.numbers {
        lines.push(format!(
            "rel L2 {}, max |a-b| {} at {}",
            number(numbers.rel_l2),
            number(numbers.abs_err_max),
            words::index(&numbers.worst.index),
        ));
    }
    lines.push(format!("local error / bound {}", number_or_dash(words::over_bound(entry))));
    let first = report.first_divergence.as_ref().filter(|first| first.checkpoint == entry.id);
    lines.extend(first.and_then(|first| first.reproduce.as_ref()).map(|command| format!("next: {command}")));
    lines.join("\n")
}
