//! `parity faults`: the catalogue of mistakes that it can name, and plant.

use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table};
use serde::Serialize;

use super::output::print;
use super::{Outcome, Verdict, exit_code};
use crate::error::{Error, Result};
use crate::faults::{Fault, catalogue};

/// Flags of `parity faults`.
#[derive(clap::Args)]
pub struct Args {
    /// Only those whose name contains this
    filter: Option<String>,
    /// What standard output carries
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
    /// For documents
    Markdown,
}

/// One entry, as programs read it.
#[derive(Serialize)]
struct Entry {
    name: &'static str,
    summary: &'static str,
    place: &'static str,
    fix: &'static str,
    parameter: Option<&'static str>,
    nodes: Vec<&'static str>,
    silent: Option<&'static str>,
}

impl Entry {
    fn new(fault: &Fault) -> Entry {
        Entry {
            name: fault.name,
            summary: fault.summary,
            place: fault.place,
            fix: fault.fix,
            parameter: fault.parameter.map(|parameter| parameter.name),
            nodes: fault.home.kinds().iter().map(|kind| kind.name()).collect(),
            silent: fault.silent,
        }
    }

    /// `rope.base=BASE`
    fn spelling(&self) -> String {
        match self.parameter {
            Some(parameter) => format!("{}[={}]", self.name, parameter.to_uppercase()),
            None => self.name.to_owned(),
        }
    }
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let wanted = args.filter.as_deref().unwrap_or_default();
    let entries: Vec<Entry> =
        catalogue::all().filter(|fault| fault.name.contains(wanted)).map(Entry::new).collect();
    if entries.is_empty() {
        return Err(Error::new(wanted, "no fault has a name with this in it")
            .hint("parity faults lists the catalogue"));
    }
    print(&render(&entries, args.format)?)?;
    Ok(exit_code(Verdict::Parity))
}

fn render(entries: &[Entry], format: Format) -> Result<String> {
    Ok(match format {
        Format::Json => {
            let text = serde_json::to_string_pretty(&entries);
            text.map_err(|e| Error::new("faults", format!("cannot be written as JSON: {e}")))? + "\n"
        }
        Format::Markdown => {
            let row = |e: &Entry| {
                format!(
                    "| `{}` | {} | {} | {} | {} |\n",
                    e.spelling(),
                    e.summary,
                    e.place,
                    e.fix,
                    e.nodes.join(", ")
                )
            };
            let rows: String = entries.iter().map(row).collect();
            format!(
                "| fault | what goes wrong | where people make it | fix | nodes |\n| --- | --- | --- | --- | --- |\n{rows}"
            )
        }
        Format::Table => table(entries),
    })
}

fn table(entries: &[Entry]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["fault", "what goes wrong", "where people make it", "nodes"]);
    for entry in entries {
        table.add_row([entry.spelling(), entry.summary.into(), entry.place.into(), entry.nodes.join(" ")]);
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    format!(
        "{}\n\n{} faults. Plant one: parity run -p \"def read_lines(path):\" --inject rope.base@3\n\
         In one node: data.zero@blk.3.v    with an argument: rope.base=500000@0..3    everywhere: linear.no_bias\n",
        lines.join("\n"),
        entries.len()
    )
}
