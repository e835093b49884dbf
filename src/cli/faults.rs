//! `parity faults`: the catalogue of mistakes that it can name, and inject.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table};
use parity_graph::Op;
use parity_graph::fault::{self, ALIASES, Entry, Scene, find};
use serde::Serialize;

use super::output::print;
use super::shared::{FormatArgs, HasJson};
use super::{Outcome, Verdict, exit_code};
use crate::audit::Graphs;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::foreign;
use crate::model::builders::{self, Cache, Shape};

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
    /// What can be injected at the nodes of this model or recording
    #[arg(long, value_name = "MODEL|DUMP")]
    of: Option<PathBuf>,
    #[command(flatten)]
    format: FormatArgs<CatalogueFormat>,
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

impl HasJson for CatalogueFormat {
    const JSON: CatalogueFormat = CatalogueFormat::Json;
}

/// One entry, as programs read it.
#[derive(Serialize)]
struct Listed {
    name: &'static str,
    summary: &'static str,
    place: &'static str,
    fix: &'static str,
    parameter: Option<&'static str>,
    /// The ops that have a place for it; any where there are none.
    nodes: Vec<&'static str>,
    silent: Option<&'static str>,
    /// The commands whose `--inject` makes it; none of what is only recognised.
    made_by: Option<&'static str>,
    /// The entry that it is another name of.
    alias_of: Option<&'static str>,
}

impl Listed {
    fn new(entry: &'static Entry) -> Listed {
        let Entry { name, summary, place, fix, parameter, silent, recognised, ops, .. } = *entry;
        let made_by = (!recognised).then_some("parity run, parity record");
        let nodes = ops.iter().map(Op::name).collect();
        Listed { name, summary, place, fix, parameter, nodes, silent, made_by, alias_of: None }
    }

    /// The catalogue, and the other names in it.
    fn all() -> impl Iterator<Item = Listed> {
        let aliases = ALIASES
            .iter()
            .filter_map(|&(name, own)| Some(Listed { name, alias_of: Some(own), ..Listed::new(find(own)?) }));
        fault::entries().map(Listed::new).chain(aliases)
    }

    /// `rope.base[=BASE]`
    fn spelling(&self) -> String {
        match (self.alias_of, self.parameter) {
            (Some(own), _) => format!("{} = {own}", self.name),
            (None, Some(parameter)) => format!("{}[={}]", self.name, parameter.to_uppercase()),
            (None, None) => self.name.to_owned(),
        }
    }

    /// Where it has a place.
    fn nodes(&self, between: &str) -> String {
        if self.nodes.is_empty() { "any".to_owned() } else { self.nodes.join(between) }
    }
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let wanted = args.filter.as_deref().unwrap_or_default();
    if let Some(of) = &args.of {
        print(&fitting(of, wanted)?)?;
        return Ok(exit_code(Verdict::Parity));
    }
    let entries: Vec<Listed> = Listed::all().filter(|entry| entry.name.contains(wanted)).collect();
    if entries.is_empty() {
        return Err(Error::new(wanted, "no fault has a name with this in it")
            .hint("parity faults lists the catalogue"));
    }
    print(&render(&entries, args.format.format())?)?;
    Ok(exit_code(Verdict::Parity))
}

/// Values of one mistake at one node that are listed.
const VALUES_LISTED: usize = 3;

/// One line for each mistake at each node of a recording, or of the graph that is built of a model file: as `--inject`
/// takes it, and what it is.
fn fitting(path: &Path, wanted: &str) -> Result<String> {
    let graphs = match path.extension().is_some_and(|extension| extension == "gguf") {
        true => {
            let file = ModelFile::open(path)?;
            let built = builders::build(file.gguf(), Shape::step(0, 2, 2, true, Cache::F32))?;
            Graphs::of([built.graph].into_iter(), vec![0])?
        }
        false => {
            let dump = foreign::open(path, &foreign::Options::default())?;
            if dump.manifest().graphs.is_empty() {
                return Err(Error::file(path, "brings no graph")
                    .hint("record it again with this parity's tap, or name the model file"));
            }
            Graphs::open(&dump)?
        }
    };
    let mut out = String::new();
    for (_, labelled) in graphs.steps().into_iter().take(1) {
        let scene = Scene::new(&labelled.program.graph);
        for (id, checkpoint) in labelled.nodes() {
            for entry in fault::entries().filter(|entry| entry.name.contains(wanted)) {
                for fault in entry.all_at(&scene, id).into_iter().take(VALUES_LISTED) {
                    out += &format!("{}@{checkpoint}\t{}\n", fault.spelling(), fault.text);
                }
            }
        }
    }
    Ok(out)
}

fn render(entries: &[Listed], format: CatalogueFormat) -> Result<String> {
    Ok(match format {
        CatalogueFormat::Json => {
            let text = serde_json::to_string_pretty(&entries);
            text.map_err(|e| Error::new("faults", format!("cannot be written as JSON: {e}")))? + "\n"
        }
        CatalogueFormat::Markdown => {
            let row = |e: &Listed| {
                format!(
                    "| `{}` | {} | {} | {} | {} |\n",
                    e.spelling(),
                    e.summary,
                    e.place,
                    e.fix,
                    e.nodes(", ")
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

fn table(entries: &[Listed]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["fault", "what goes wrong", "where people make it", "nodes"]);
    for entry in entries {
        table.add_row([entry.spelling(), entry.summary.into(), entry.place.into(), entry.nodes(" ")]);
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    format!(
        "{}\n\n{} faults. Inject one: parity run -p \"def read_lines(path):\" --inject rope.base@3\n\
         In one node: data.zero@blk.3.v    with a value: rope.base=500000@0..3    everywhere: linear.no_bias\n\
         In llama.cpp itself: parity record --inject moe.top_k@blk.1.ffn_moe_out -- PROGRAM …\n\
         What fits a model or a recording, node by node: parity faults --of MODEL|DUMP\n",
        lines.join("\n"),
        entries.len()
    )
}
