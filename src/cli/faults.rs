//! `parity faults`: the catalogue of mistakes that it can name, and inject.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table};
use parity_graph::{Op, fault};
use serde::Serialize;

use super::output::print;
use super::{Outcome, Verdict, exit_code};
use crate::audit::recorded::Graphs;
use crate::error::{Error, Result};
use crate::faults::catalogue::graphs;
use crate::faults::{Fault, catalogue};
use crate::foreign;

const EXAMPLES: &str = "\
Examples:
  parity faults rope
  parity faults --of recording moe";

/// Flags of `parity faults`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Only mistakes whose name contains this
    filter: Option<String>,
    /// What can be injected at the nodes of this recording
    #[arg(long, value_name = "DUMP")]
    of: Option<PathBuf>,
    /// Print a table, json or markdown
    #[arg(long, value_enum, default_value_t, hide_possible_values = true)]
    format: CatalogueFormat,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum CatalogueFormat {
    /// Text for people
    #[default]
    Table,
    /// JSON for programs
    Json,
    /// Markdown for documents
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
    /// Checkpoints, or the ops of a recorded graph.
    nodes: Vec<&'static str>,
    silent: Option<&'static str>,
    /// The command whose `--inject` makes it; none of what is only recognised.
    made_by: Option<&'static str>,
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
            made_by: Some("parity run"),
        }
    }

    fn of_graphs(entry: &'static graphs::Entry) -> Entry {
        let graphs::Entry { name, summary, place, fix, ops } = *entry;
        let nodes = ops.iter().map(Op::name).collect();
        let made_by = catalogue::precision::find(name).is_none().then_some("parity run, parity record");
        Entry { name, summary, place, fix, parameter: None, nodes, silent: None, made_by }
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
    if let Some(dump) = &args.of {
        print(&of_recording(dump, wanted)?)?;
        return Ok(exit_code(Verdict::Parity));
    }
    let entries: Vec<Entry> = catalogue::all()
        .map(Entry::new)
        .chain(catalogue::of_recordings().map(Entry::of_graphs))
        .filter(|entry| entry.name.contains(wanted))
        .collect();
    if entries.is_empty() {
        return Err(Error::new(wanted, "no fault has a name with this in it")
            .hint("parity faults lists the catalogue"));
    }
    print(&render(&entries, args.format)?)?;
    Ok(exit_code(Verdict::Parity))
}

/// One line for each mistake at each node of a recording: as `--inject` takes it, and what it is.
fn of_recording(path: &Path, wanted: &str) -> Result<String> {
    let dump = foreign::open(path, &foreign::Options::default())?;
    if dump.manifest().graphs.is_empty() {
        return Err(Error::file(path, "brings no graph").hint("record it again with this parity's tap"));
    }
    let graphs = Graphs::open(&dump)?;
    let mut out = String::new();
    for (_, labelled) in graphs.steps().into_iter().take(1) {
        for (id, checkpoint) in labelled.nodes() {
            let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
            for fault in fault::at(&labelled.program.graph, id) {
                let variant = seen.entry(fault.name).or_insert(0);
                let mark = if *variant == 0 { String::new() } else { format!("#{variant}") };
                *variant += 1;
                if fault.name.contains(wanted) {
                    out += &format!("{}{mark}@{checkpoint}\t{}\n", fault.name, fault.text);
                }
            }
        }
    }
    Ok(out)
}

fn render(entries: &[Entry], format: CatalogueFormat) -> Result<String> {
    Ok(match format {
        CatalogueFormat::Json => {
            let text = serde_json::to_string_pretty(&entries);
            text.map_err(|e| Error::new("faults", format!("cannot be written as JSON: {e}")))? + "\n"
        }
        CatalogueFormat::Markdown => {
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
        CatalogueFormat::Table => table(entries),
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
        "{}\n\n{} faults. Inject one: parity run -p \"def read_lines(path):\" --inject rope.base@3\n\
         In one node: data.zero@blk.3.v    with an argument: rope.base=500000@0..3    everywhere: linear.no_bias\n\
         Those of OPS are made in graphs: parity run -m MODEL --inject moe.top_k@blk.1.ffn_moe_out, of models that run op \
         by op,\nand in llama.cpp itself: parity record --inject moe.top_k@blk.1.ffn_moe_out -- PROGRAM …\n",
        lines.join("\n"),
        entries.len()
    )
}
