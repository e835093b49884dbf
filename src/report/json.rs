//! The report as `report.json`, the contract `parity-report/1` (schema: `docs/report.schema.json`).

use std::path::Path;

use super::{Report, SCHEMA};
use crate::error::{Error, Result};

/// The report as indented JSON, ended by a newline. What was not measured, or is not finite, is null.
pub fn render(report: &Report) -> Result<String> {
    let mut text = serde_json::to_string_pretty(report)
        .map_err(|e| Error::new("report.json", format!("cannot be written as JSON: {e}")))?;
    text.push('\n');
    Ok(text)
}

/// Reads a `report.json` back; `path` may be the folder that holds it.
pub fn read(path: &Path) -> Result<Report> {
    let path = if path.is_dir() { path.join("report.json") } else { path.to_owned() };
    let text = std::fs::read_to_string(&path)
        .map_err(|e| Error::file(&path, format!("cannot be read: {e}")).hint("`--report DIR` writes one"))?;
    let report: Report = serde_json::from_str(&text)
        .map_err(|e| Error::file(&path, format!("is no report: {e}")).expected(SCHEMA))?;
    if report.schema != SCHEMA {
        return Err(Error::file(&path, "another report format").expected(SCHEMA).found(&report.schema));
    }
    Ok(report)
}
