//! The report as `report.sarif`: SARIF 2.1.0, as code scanning reads it. One result per node with a fault of its own, per
//! finding, and for a run that could not judge.

use std::collections::BTreeSet;

use parity_graph::fault;
use serde_json::{Value, json};

use super::words;
use super::{CheckpointVerdict, Entry, Report, Verdict, finding};
use crate::error::Result;

/// Where the format is described.
const SCHEMA: &str = "https://json.schemastore.org/sarif-2.1.0.json";
/// The rule of a run that could not judge.
const UNDECIDED: &str = "undecided";

/// The SARIF. Inherited differences are no result: the bug is reported once, where it is.
pub fn render(report: &Report) -> Result<String> {
    let mut results: Vec<Value> = report.checkpoints.iter().filter_map(|entry| node(report, entry)).collect();
    let findings = report.findings.iter();
    results.extend(findings.map(|f| result(report, (&f.name, "error"), &f.location, &finding::text(f))));
    let named = |first: &super::FirstDivergence| report.checkpoints.iter().any(|e| e.id == first.checkpoint);
    match &report.first_divergence {
        Some(first) if !named(first) => {
            let rule = first.verdict.name();
            let place = first.checkpoint.to_string();
            results.push(result(report, (rule, "error"), &place, &words::because(report)));
        }
        // What diverges must not look clean, whatever it is that diverges.
        None if report.verdict == Verdict::Divergence && results.is_empty() => {
            results.push(result(report, ("divergence", "error"), "run", &words::because(report)));
        }
        _ => {}
    }
    if report.verdict == Verdict::Undecided {
        results.push(result(report, (UNDECIDED, "error"), "run", &words::because(report)));
    }
    let known = |id: &str| CheckpointVerdict::ALL.iter().find(|verdict| verdict.name() == id);
    let meaning = |id: &str| known(id).map(|verdict| verdict.meaning().to_owned());
    let mut run = run(results, report.verdict, &words::summary_line(report), meaning);
    let invocation = &mut run["invocations"][0];
    for (key, value) in [("commandLine", &report.command), ("endTimeUtc", &report.created)] {
        if let Some(value) = value {
            invocation[key] = value.as_str().into();
        }
    }
    let note = |note: &String| json!({"level": "note", "message": {"text": note}});
    invocation["toolExecutionNotifications"] = finding::notes(report).iter().map(note).collect();
    document(run)
}

/// One run with its results. Their rules are mistakes of the catalogue, names of findings, or what has a meaning.
pub fn run(
    results: Vec<Value>,
    verdict: Verdict,
    summary: &str,
    meaning: impl Fn(&str) -> Option<String>,
) -> Value {
    let rules: BTreeSet<&str> = results.iter().filter_map(|result| result["ruleId"].as_str()).collect();
    let rule = |id: &&str| {
        let known = fault::find(id);
        let short = known.map(|entry| entry.summary.to_owned()).or_else(|| meaning(id));
        let mut rule = json!({"id": id, "shortDescription": {"text": short.as_deref().unwrap_or(id)}});
        if let Some(entry) = known {
            rule["help"] = json!({"text": entry.fix});
        }
        rule
    };
    let rules: Vec<Value> = rules.iter().map(rule).collect();
    json!({
        "tool": {"driver": {"name": "parity", "version": env!("CARGO_PKG_VERSION"), "rules": rules}},
        "invocations": [{"executionSuccessful": verdict != Verdict::Undecided, "exitCode": verdict.exit_code()}],
        "results": results,
        "properties": {"verdict": verdict.name(), "summary": summary},
    })
}

/// The whole file.
pub fn document(run: Value) -> Result<String> {
    super::json::render(&json!({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}))
}

/// The result of a node that is wrong by itself; none of one that is in order, inherits, or was not judged.
fn node(report: &Report, entry: &Entry) -> Option<Value> {
    let first = report.first_divergence.as_ref().filter(|first| first.checkpoint == entry.id);
    let level = match entry.verdict {
        verdict if verdict.is_fault() || first.is_some() || report.origins.contains(&entry.id) => "error",
        CheckpointVerdict::Reference => "warning",
        CheckpointVerdict::Precision => "note",
        _ => return None,
    };
    let diagnosis = first.map_or(&entry.diagnosis, |first| &first.diagnosis).first();
    let evidence = entry.evidence.clone().unwrap_or_else(|| entry.verdict.meaning().to_owned());
    let message = match (first, diagnosis) {
        (Some(_), _) => words::because(report),
        (None, Some(diagnosis)) => format!("{}: {evidence}", diagnosis.text),
        (None, None) => evidence,
    };
    let rule = diagnosis.map_or(entry.verdict.name(), |diagnosis| &diagnosis.fault);
    let mut result = result(report, (rule, level), &entry.id.to_string(), &message);
    let mut properties = json!({"verdict": entry.verdict.name()});
    let numbers = [
        ("localErrorOverBound", words::over_bound(entry)),
        ("relL2", entry.numbers.as_ref().map(|numbers| numbers.rel_l2)),
    ];
    for (key, value) in numbers {
        // JSON has no NaN: what is not finite is null, as in report.json.
        properties[key] = value.into();
    }
    if let Some(command) = first.and_then(|first| first.reproduce.as_ref()) {
        properties["reproduce"] = command.as_str().into();
    }
    result["properties"] = properties;
    Some(result)
}

/// A result in the dump or the model of a report.
fn result(report: &Report, rule: (&str, &str), place: &str, message: &str) -> Value {
    let side = &report.candidate;
    let file = side.path.as_deref().or(side.model.file.as_deref()).unwrap_or("report.json");
    result_in(file, rule, place, message)
}

/// A result at a place that is no line of a file: what it lies in stands for one, since viewers show nothing without a file.
pub fn result_in(file: &str, (rule, level): (&str, &str), place: &str, message: &str) -> Value {
    json!({
        "ruleId": rule,
        "level": level,
        "message": {"text": message},
        "locations": [{
            "physicalLocation": {"artifactLocation": {"uri": uri(file)}},
            "logicalLocations": [{"fullyQualifiedName": place}],
        }],
        // The same fault of the same model at the same place is the same alert from run to run.
        "partialFingerprints": {"parity/v1": format!("{rule}@{place}")},
    })
}

/// A path as the reference of a URI: what neither is a letter or digit nor stands for itself is spelt `%20`.
fn uri(path: &str) -> String {
    let mut out = String::new();
    for byte in path.replace('\\', "/").bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}
