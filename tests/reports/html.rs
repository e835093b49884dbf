//! The HTML report in real headless Chromium. Without one the test says SKIP; PARITY_REQUIRE_CHROMIUM=1 makes
//! that a failure.

use std::path::Path;
use std::process::Command;

use parity::checkpoint::Checkpoint;
use parity::report::{Report, html};

use crate::support::fixture;
use crate::support::fixture::{Shape, TINY};

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

/// The same with what each checkpoint is computed by and from: the one before it, and sometimes one further back.
fn wired(mut report: Report) -> Report {
    let ids: Vec<_> = report.checkpoints.iter().map(|entry| entry.id).collect();
    for (place, entry) in report.checkpoints.iter_mut().enumerate().skip(1) {
        entry.op = Some(if place % 3 == 0 { "ADD" } else { "MUL_MAT" }.to_owned());
        entry.inputs.push(ids[place - 1]);
        if place % 3 == 0 {
            entry.inputs.push(ids[place - 3]);
        }
    }
    report
}

#[test]
fn a_injected_fault_in_a_browser() {
    check("injected", &wired(fixture::injected(TINY, 2)));
}

/// Architectures that parity has no graph of have names of their own, and many: 40 layers of 50 nodes.
#[test]
fn two_thousand_nodes_in_a_browser() {
    let small = fixture::injected(TINY, 2);
    let template = small.checkpoints.iter().find(|entry| entry.layer == Some(2)).unwrap();
    let mut report = fixture::injected(TINY, 2);
    report.details.clear();
    report.checkpoints.clear();
    for layer in 0..40 {
        for node in 0..50 {
            let id: Checkpoint = format!("blk.{layer}.ffn_moe_part_{node}").parse().unwrap();
            report.checkpoints.push(parity::report::Entry { id, layer: Some(layer), ..template.clone() });
        }
    }
    assert_eq!(report.checkpoints.len(), 2000);
    report.first_divergence = None;
    report.origins.clear();
    check("many", &wired(report));
}

#[test]
fn a_clean_run_in_a_browser() {
    check("clean", &fixture::clean(TINY));
}

/// 28 layers and 290 tokens: as large as the reports that people look at.
#[test]
fn a_large_report_in_a_browser() {
    check("large", &fixture::injected(Shape { layers: 28, tokens: 290, width: 384, ffn: 768 }, 3));
}

/// An audit of one dump has no reference, no tokens and no pictures.
#[test]
fn an_audit_in_a_browser() {
    let mut report = fixture::injected(TINY, 2);
    (report.reference, report.tokens) = (None, None);
    report.details.clear();
    for entry in &mut report.checkpoints {
        (entry.numbers, entry.parts, entry.local.reference) = (None, None, None);
    }
    check("audit", &report);
}
