//! The report in every format: whole-file snapshots, the schema, and what each format promises.

mod fixture;

use fixture::{Shape, TINY};
use parity::report::{Report, csv, github, html, json, junit, markdown, table};

fn formats(report: &Report) -> Vec<(&'static str, String)> {
    vec![
        ("json", json::render(report).unwrap()),
        ("csv", csv::render(report).unwrap()),
        ("junit", junit::render(report).unwrap()),
        ("markdown", markdown::render(report)),
        ("github", github::render(report, "parity")),
        ("table", table::render(report, &table::Layout::default())),
    ]
}

#[test]
fn a_large_report_stays_small() {
    let report = fixture::planted(Shape { layers: 28, tokens: 290, width: 1536, ffn: 8960 }, 3);
    let page = html::render(&report).unwrap();
    assert!(page.len() < 5_000_000, "{} bytes", page.len());
    if let Some(dir) = std::env::var_os("PARITY_KEEP_HTML") {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(std::path::Path::new(&dir).join("large.html"), page).unwrap();
        let tiny = html::render(&fixture::planted(TINY, 2)).unwrap();
        std::fs::write(std::path::Path::new(&dir).join("tiny.html"), tiny).unwrap();
        for (name, text) in formats(&fixture::planted(TINY, 2)) {
            std::fs::write(std::path::Path::new(&dir).join(name), text).unwrap();
        }
    }
}
