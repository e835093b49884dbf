//! The report in every format: whole-file snapshots, the schema, and what each format promises.

use parity::report::{Report, csv, files, github, html, json, junit, markdown, sarif, table};

use crate::support::fixture;
use crate::support::fixture::{Shape, TINY};

fn formats(report: &Report) -> Vec<(&'static str, String)> {
    vec![
        ("json", json::render(report).unwrap()),
        ("csv", csv::render(report).unwrap()),
        ("junit", junit::render(report).unwrap()),
        ("sarif", sarif::render(report).unwrap()),
        ("markdown", markdown::render(report)),
        ("github", github::render(report, "parity")),
        ("table", table::render(report, &table::Terminal::default())),
    ]
}

#[test]
fn a_large_report_stays_small() {
    let report = fixture::injected(Shape { layers: 28, tokens: 290, width: 1536, ffn: 8960 }, 3);
    let page = html::render(&report).unwrap();
    assert!(page.len() < 5_000_000, "{} bytes", page.len());
    if let Some(dir) = std::env::var_os("PARITY_KEEP_HTML") {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(std::path::Path::new(&dir).join("large.html"), page).unwrap();
        let tiny = html::render(&fixture::injected(TINY, 2)).unwrap();
        std::fs::write(std::path::Path::new(&dir).join("tiny.html"), tiny).unwrap();
        for (name, text) in formats(&fixture::injected(TINY, 2)) {
            std::fs::write(std::path::Path::new(&dir).join(name), text).unwrap();
        }
    }
}

/// Every format of an injected fault, byte for byte; the fixture has no times or paths of the machine.
#[test]
fn formats_of_a_injected_fault() {
    for (name, text) in formats(&fixture::injected(fixture::SMALL, 1)) {
        insta::assert_snapshot!(format!("injected_{name}"), text);
    }
}

#[test]
fn formats_of_a_clean_run() {
    for (name, text) in formats(&fixture::clean(fixture::SMALL)) {
        insta::assert_snapshot!(format!("clean_{name}"), text);
    }
}

/// The page without its style, script and pictures, which are files or data of their own.
#[test]
fn page_of_a_injected_fault() {
    let mut report = fixture::injected(fixture::SMALL, 1);
    report.details.clear();
    let page = html::render(&report).unwrap();
    assert!(page.contains("DIVERGES at blk.1.q_rope"));
    let page = cut(&page, "<style>", "</style>");
    let page = cut(&page, "<script>", "</script>");
    insta::assert_snapshot!("injected_html", page);
}

fn cut(text: &str, from: &str, to: &str) -> String {
    let start = text.find(from).unwrap() + from.len();
    let end = start + text[start..].find(to).unwrap();
    format!("{}…{}", &text[..start], &text[end..])
}

#[test]
fn terminals_of_any_width() {
    let report = fixture::injected(TINY, 2);
    for width in [40, 60, 80, 120, 160] {
        let text = table::render(&report, &table::Terminal { width, ..table::Terminal::default() });
        insta::assert_snapshot!(format!("table_{width}"), text);
        // Commands and the line for a bug report are there to be copied and are never broken.
        let copied = |line: &&str| line.starts_with("  next: ") || line.starts_with("parity ");
        for line in text.lines().filter(|line| !copied(line)) {
            let limit = width.max(56);
            assert!(line.chars().count() <= limit, "{width} columns: {line}");
        }
    }
    let colored = table::render(&report, &table::Terminal { color: true, ..table::Terminal::default() });
    assert!(colored.contains("\x1b["));
    assert!(!table::render(&report, &table::Terminal::default()).contains('\x1b'));
}

#[test]
fn json_follows_its_schema_and_reads_back() {
    let schema: serde_json::Value =
        serde_json::from_str(include_str!("../../docs/report.schema.json")).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    for report in [fixture::injected(TINY, 2), fixture::clean(TINY), hostile(), Report::default()] {
        let text = json::render(&report).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let errors: Vec<String> =
            validator.iter_errors(&value).map(|e| format!("{} {e}", e.instance_path())).collect();
        assert!(errors.is_empty(), "{errors:#?}");
        let again: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(json::render(&again).unwrap(), text);
    }
    // The schema is not a formality: a renamed field is noticed.
    let text = json::render(&fixture::clean(TINY)).unwrap().replace("\"rel_l2\"", "\"rel_l1\"");
    assert!(!validator.is_valid(&serde_json::from_str(&text).unwrap()));
}

#[test]
fn sarif_follows_its_schema_and_has_one_result_per_fault() {
    let schema = include_str!("../data/sarif/sarif-schema-2.1.0.json");
    // A pattern of the schema, that of languages, has a stray bracket, which strict readers refuse.
    let schema: serde_json::Value = serde_json::from_str(&schema.replace("{2}]?$", "{2}$")).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let read = |report: &Report| -> serde_json::Value {
        let value = serde_json::from_str(&sarif::render(report).unwrap()).unwrap();
        let errors: Vec<String> =
            validator.iter_errors(&value).map(|e| format!("{} {e}", e.instance_path())).collect();
        assert!(errors.is_empty(), "{errors:#?}");
        value
    };
    let of = |report: &Report| -> Vec<String> {
        let value = read(report);
        let results = value["runs"][0]["results"].as_array().unwrap();
        let place =
            |r: &serde_json::Value| r["locations"][0]["logicalLocations"][0]["fullyQualifiedName"].clone();
        results
            .iter()
            .map(|r| format!("{} {} {}", r["level"], r["ruleId"], place(r)).replace('"', ""))
            .collect()
    };
    let mut injected = fixture::injected(TINY, 2);
    assert_eq!(of(&injected), ["error rope.base blk.2.q_rope"]);
    injected.candidate.path = Some("a dump/of: 100 %".to_owned());
    assert_eq!(
        read(&injected)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
        "a%20dump/of%3A%20100%20%25"
    );
    assert_eq!(of(&fixture::clean(TINY)), [""; 0]);
    assert_eq!(of(&Report::default()), ["error undecided run"], "nothing compared must not look clean");
    let finding = parity::report::Finding {
        name: "config.rope_theta".to_owned(),
        location: "config.json".to_owned(),
        original: Some("1000000".to_owned()),
        converted: None,
        effect: "RoPE base is 10000".to_owned(),
    };
    let mut other = fixture::clean(TINY);
    (other.findings, other.verdict) = (vec![finding], parity::report::Verdict::Divergence);
    assert_eq!(of(&other), ["error config.rope_theta config.json"]);
    other.findings.clear();
    assert_eq!(of(&other), ["error divergence run"], "a divergence without a place is one still");
    read(&hostile());
    // The schema is not a formality.
    let text = sarif::render(&injected).unwrap().replace("\"ruleId\"", "\"rule\"");
    assert!(!validator.is_valid(&serde_json::from_str(&text).unwrap()));
}

/// NaN everywhere, a missing checkpoint, a shape that differs, and texts that every format must escape.
fn hostile() -> Report {
    let mut report = fixture::injected(fixture::SMALL, 1);
    let nasty = "</script><b>&\"'|`*_\n\u{7}%::error::\u{202e}日本語";
    report.notes.push(nasty.to_owned());
    report.reason = Some(nasty.to_owned());
    let first = report.first_divergence.as_mut().unwrap();
    first.diagnosis[0].text = nasty.to_owned();
    first.tried[0].explains = f64::NAN;
    for (i, entry) in report.checkpoints.iter_mut().enumerate() {
        entry.evidence = Some(nasty.to_owned());
        let numbers = entry.numbers.as_mut().unwrap();
        (numbers.rel_l2, numbers.abs_err_max) = (f64::NAN, f64::INFINITY);
        numbers.row_rel_l2[0].1 = f64::NAN;
        numbers.worst.candidate = None;
        entry.local.candidate.as_mut().unwrap().over_bound = f64::INFINITY;
        entry.verdict = parity::report::CheckpointVerdict::ALL[i % 9];
        if entry.verdict == parity::report::CheckpointVerdict::Missing {
            (entry.numbers, entry.parts, entry.local) = (None, None, Default::default());
        }
    }
    report
}

#[test]
fn hostile_texts_stay_texts() {
    let report = hostile();
    let page = html::render(&report).unwrap();
    assert_eq!(page.matches("</script>").count(), 2, "only the two script elements end");
    assert!(!page.contains("<b>&\""));
    assert_eq!(
        github::render(&report, "run").lines().count(),
        2,
        "one annotation for the answer, one for the note"
    );
    let text = csv::render(&report).unwrap();
    let mut reader = ::csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().unwrap().clone();
    assert_eq!(header.iter().collect::<Vec<_>>(), csv::HEADER);
    let rows: Vec<_> = reader.records().map(Result::unwrap).collect();
    assert_eq!(rows.len(), report.checkpoints.len());
    assert_eq!(&rows[0][26], report.checkpoints[0].evidence.as_ref().unwrap());
    let xml = junit::render(&report).unwrap();
    assert!(!xml.contains('\u{7}'), "XML has no place for control characters");
    assert!(table::render(&report, &table::Terminal::default()).contains("NaN"));
}

#[test]
fn a_nan_that_was_written_is_no_match_when_read_back() {
    let text = json::render(&hostile()).unwrap();
    let again: Report = serde_json::from_str(&text).unwrap();
    let numbers = again.checkpoints[0].numbers.as_ref().unwrap();
    assert!(numbers.rel_l2.is_nan() && numbers.row_rel_l2[0].1.is_nan());
}

#[test]
fn a_folder_holds_every_format_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let folder = files::Folder::create(&dir.path().join("deep/report")).unwrap();
    let written = folder.write(&fixture::injected(fixture::SMALL, 1)).unwrap();
    folder.write(&fixture::injected(fixture::SMALL, 1)).unwrap();
    let mut names: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        ["junit.xml", "report.csv", "report.html", "report.json", "report.sarif", "summary.md"]
    );
    assert_eq!(written.len(), names.len());
    assert_eq!(json::read(folder.path()).unwrap().origins.len(), 1);
}

#[test]
fn junit_counts_what_it_lists() {
    let xml = junit::render(&fixture::injected(TINY, 2)).unwrap();
    assert!(xml.contains("tests=\"75\" skipped=\"0\" errors=\"0\" failures=\"1\""), "{}", &xml[..300]);
    let undecided = junit::render(&Report::default()).unwrap();
    assert!(undecided.contains("errors=\"1\""), "nothing compared must not look green: {undecided}");
}
