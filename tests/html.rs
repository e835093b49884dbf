//! The HTML report in real headless Chromium. Without one the test says SKIP; PARITY_REQUIRE_CHROMIUM=1 makes
//! that a failure.

mod fixture;

use std::path::Path;
use std::process::Command;

use fixture::{Shape, TINY};
use parity::report::{Report, html};

/// Checks a page; screenshots go to `PARITY_SCREENSHOTS`, where that is set.
fn check(name: &str, report: &Report) {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join(format!("{name}.html"));
    std::fs::write(&page, html::render(report).unwrap()).unwrap();
    let mut script = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/check-html.sh"));
    script.arg(&page);
    if let Some(shots) = std::env::var_os("PARITY_SCREENSHOTS") {
        script.arg(Path::new(&shots).join(name));
    }
    let output = script.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_planted_fault_in_a_browser() {
    check("planted", &fixture::planted(TINY, 2));
}

#[test]
fn a_clean_run_in_a_browser() {
    check("clean", &fixture::clean(TINY));
}

/// 28 layers and 290 tokens: as large as the reports that people look at.
#[test]
fn a_large_report_in_a_browser() {
    check("large", &fixture::planted(Shape { layers: 28, tokens: 290, width: 384, ffn: 768 }, 3));
}

/// An audit of one dump has no reference, no tokens and no pictures.
#[test]
fn an_audit_in_a_browser() {
    let mut report = fixture::planted(TINY, 2);
    (report.reference, report.tokens) = (None, None);
    report.details.clear();
    for entry in &mut report.checkpoints {
        (entry.numbers, entry.budget, entry.local.reference) = (None, None, None);
    }
    check("audit", &report);
}
