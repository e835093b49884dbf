//! The report as `report.json`, the contract `parity-report/1` (schema: `docs/report.schema.json`).

use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::{Report, SCHEMA};
use crate::error::{Error, Result};
use crate::files;

/// The report as indented JSON, ended by a newline. What was not measured, or is not finite, is null.
pub fn render(report: &impl Serialize) -> Result<String> {
    let failed = |e: &dyn std::fmt::Display| Error::new("report.json", format!("cannot be written: {e}"));
    let mut bytes = Vec::new();
    report
        .serialize(&mut Serializer::with_formatter(&mut bytes, Indented::default()))
        .map_err(|e| failed(&e))?;
    bytes.push(b'\n');
    String::from_utf8(bytes).map_err(|e| failed(&e))
}

/// Levels that are indented: the report, its checkpoints, the fields of a checkpoint. What lies deeper, such as
/// a number for each token row, stands on the line of its field: a quarter of the size, and easier to read.
const LEVELS: usize = 3;

/// Indents the outer levels, and writes the inner ones on one line.
#[derive(Default)]
struct Indented {
    pretty: PrettyFormatter<'static>,
    depth: usize,
}

impl Indented {
    fn inside(&self) -> bool {
        self.depth > LEVELS
    }

    fn separate<W: ?Sized + Write>(&self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for Indented {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth += 1;
        if self.inside() { writer.write_all(b"[") } else { self.pretty.begin_array(writer) }
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        let inside = self.inside();
        self.depth -= 1;
        if inside { writer.write_all(b"]") } else { self.pretty.end_array(writer) }
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if self.inside() {
            self.separate(writer, first)
        } else {
            self.pretty.begin_array_value(writer, first)
        }
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        if self.inside() { Ok(()) } else { self.pretty.end_array_value(writer) }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth += 1;
        if self.inside() { writer.write_all(b"{") } else { self.pretty.begin_object(writer) }
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        let inside = self.inside();
        self.depth -= 1;
        if inside { writer.write_all(b"}") } else { self.pretty.end_object(writer) }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if self.inside() { self.separate(writer, first) } else { self.pretty.begin_object_key(writer, first) }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.pretty.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        if self.inside() { Ok(()) } else { self.pretty.end_object_value(writer) }
    }
}

/// Reads a `report.json` back; `path` may be the folder that holds it.
pub fn read(path: &Path) -> Result<Report> {
    let path = if path.is_dir() { path.join("report.json") } else { path.to_owned() };
    let text =
        files::read(&path, files::OUTPUT_BYTES_MAX).map_err(|e| e.hint("`--report DIR` writes one"))?;
    let report: Report = serde_json::from_str(&text)
        .map_err(|e| Error::file(&path, format!("is no report: {e}")).expected(SCHEMA))?;
    if report.schema != SCHEMA {
        return Err(Error::file(&path, "another report format").expected(SCHEMA).found(&report.schema));
    }
    Ok(report)
}
