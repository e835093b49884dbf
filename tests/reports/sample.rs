//! `reports/sample/`: a report of a real run with an injected bug, in every format. The formats agree with each
//! other, and a run of today finds the same bug.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use parity::report::{Report, csv, html, json, junit, markdown, sarif, table};

fn sample(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/sample").join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(sample(name)).unwrap()
}

#[test]
fn every_format_says_what_the_json_says() {
    let report = json::read(&sample("report.json")).unwrap();
    let hint = "scripts/make-sample.sh makes the sample again";
    assert!(json::render(&report).unwrap() == text("report.json"), "report.json: {hint}");
    assert!(csv::render(&report).unwrap() == text("report.csv"), "report.csv: {hint}");
    assert!(junit::render(&report).unwrap() == text("junit.xml"), "junit.xml: {hint}");
    assert!(sarif::render(&report).unwrap() == text("report.sarif"), "report.sarif: {hint}");
    assert!(markdown::render(&report) == text("summary.md"), "summary.md: {hint}");
    assert!(table::render(&report, &table::Terminal::default()) == text("table.txt"), "table.txt: {hint}");
    // The page has pictures that the JSON does not hold; all else must agree.
    let page = html::render(&report).unwrap();
    assert!(without_data(&page) == without_data(&text("report.html")), "report.html: {hint}");
}

fn without_data(page: &str) -> String {
    let (head, rest) = page.split_once("<script type=\"application/json\"").unwrap();
    let (_, tail) = rest.split_once("</script>").unwrap();
    format!("{head}{tail}")
}

#[test]
fn the_json_follows_its_schema() {
    let schema: serde_json::Value =
        serde_json::from_str(include_str!("../../docs/report.schema.json")).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text("report.json")).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> =
        validator.iter_errors(&value).map(|e| format!("{} {e}", e.instance_path())).collect();
    assert!(errors.is_empty(), "{errors:#?}");
}

#[test]
fn a_run_of_today_finds_the_same_bug() {
    let args =
        ["run", "-p", "def read_lines(path):", "-n", "8", "--inject", "rope.base@2", "--device", "cpu"];
    let output = Command::cargo_bin("parity")
        .unwrap()
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .envs([("PARITY_LLAMA", "none"), ("PARITY_CACHE", "/nonexistent")])
        .args(args)
        .args(["--format", "json"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let today: Report = serde_json::from_slice(&output.stdout).unwrap();
    let kept = json::read(&sample("report.json")).unwrap();
    let bug = |report: &Report| {
        let first = report.first_divergence.as_ref().unwrap();
        (first.checkpoint, first.diagnosis[0].fault.clone(), first.diagnosis[0].text.clone())
    };
    assert_eq!(bug(&today), bug(&kept));
    assert_eq!(today.origins, kept.origins);
}
