//! What a dump holds.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

use indexmap::IndexMap;
use parity_dump::manifest::{ModelInfo, Producer};
use parity_dump::{Dump, Recorded};
use parity_graph::label::labels;
use serde::Serialize;

use super::graph::{self, GraphReport};
use super::stats::{RowKind, Stats, Sums};
use super::{Finding, Level};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Graphs;
use crate::error::Result;
use crate::foreign;

/// What a dump holds.
#[derive(Clone, Debug, Serialize)]
pub struct DumpInspection {
    /// The folder or file that was given.
    pub file: String,
    /// Who computed the values.
    pub producer: Producer,
    /// The model it was made with.
    pub model: ModelInfo,
    /// The text that the first tokens come from.
    pub prompt: Option<String>,
    /// Token at each position.
    pub tokens: Vec<u32>,
    /// Forward passes.
    pub steps: Vec<StepReport>,
    /// Which rows the numbers of rows are, where these are no positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<String>,
    /// What happened to the context between steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<String>,
    /// `false` for an interrupted recording.
    pub complete: bool,
    /// What looks wrong, the worst first.
    pub findings: Vec<Finding>,
    /// The graphs that it brings.
    pub graphs: Vec<GraphReport>,
    /// In the order in which ids are listed: see [`crate::checkpoint::usual_order`].
    pub checkpoints: Vec<CheckpointReport>,
    /// Tensors whose names are no checkpoint ids.
    pub foreign: Vec<String>,
    /// Nodes of the producer that no checkpoint id could be given to.
    pub unmapped: Vec<String>,
}

/// One forward pass.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// File within the folder.
    pub file: String,
    /// First position.
    pub first: Option<u32>,
    /// Number of positions.
    pub positions: usize,
}

/// One checkpoint over all steps.
#[derive(Clone, Debug, Serialize)]
pub struct CheckpointReport {
    /// E.g. `blk.3.q_rope`.
    pub id: Checkpoint,
    /// Element type of the first step.
    pub dtype: &'static str,
    /// As recorded in each step, slowest axis first.
    pub shapes: Vec<Vec<usize>>,
    /// Number of positions that were recorded.
    pub rows: usize,
    /// Positions of the steps that were not.
    pub missing: Vec<u32>,
    /// Of all rows.
    pub stats: Stats,
    /// Positions whose row holds a NaN or an infinity.
    pub nonfinite: Vec<u32>,
    /// Positions whose row is all zero.
    pub zero: Vec<u32>,
    /// Positions whose row is one value throughout, not zero.
    pub constant: Vec<u32>,
    /// (position, earlier position) with the same row, though another token.
    pub repeated: Vec<(u32, u32)>,
}

/// Reads everything, every value included.
pub fn inspect(path: &Path) -> Result<DumpInspection> {
    let dump = foreign::open(path, &foreign::Options::default())?;
    let manifest = dump.manifest();
    let positions: BTreeSet<u32> =
        manifest.steps.iter().flat_map(|step| step.positions.iter().copied()).collect();
    let checkpoints: Vec<CheckpointReport> =
        dump.checkpoints().filter_map(|id| Some(checkpoint(&dump, id, dump.get(id)?, &positions))).collect();
    let steps = manifest.steps.iter().map(|step| StepReport {
        file: step.file.clone(),
        first: step.positions.iter().min().copied(),
        positions: step.positions.len(),
    });
    let events = manifest.steps.iter().enumerate().flat_map(|(number, step)| {
        step.life.events.iter().map(move |event| format!("{event} before step {number}"))
    });
    Ok(DumpInspection {
        file: path.display().to_string(),
        producer: manifest.producer.clone(),
        model: manifest.model.clone(),
        prompt: manifest.prompt.clone(),
        tokens: manifest.tokens.clone(),
        steps: steps.collect(),
        rows: manifest.rows_in_words(usize::MAX),
        events: events.collect(),
        complete: manifest.complete,
        findings: findings(&dump, &checkpoints)?,
        graphs: graphs(&dump)?,
        checkpoints,
        foreign: dump.foreign().to_vec(),
        unmapped: manifest.unmapped.clone(),
    })
}

fn graphs(dump: &Dump) -> Result<Vec<GraphReport>> {
    let read = Graphs::read(dump)?;
    let listed = dump.manifest().graphs.iter().zip(read.all());
    Ok(listed.map(|(entry, graph)| graph::report(&entry.file, &entry.steps, graph)).collect())
}

impl DumpInspection {
    /// Leaves nothing but the layers that `wants` names, in graphs and checkpoints.
    pub fn keep(&mut self, wants: impl Fn(u32) -> bool) {
        self.graphs.iter_mut().for_each(|graph| graph.keep(&wants));
        self.checkpoints.retain(|report| report.id.layer_index().is_some_and(&wants));
    }
}

fn checkpoint(
    dump: &Dump,
    id: Checkpoint,
    recorded: &Recorded,
    positions: &BTreeSet<u32>,
) -> CheckpointReport {
    let mut report = CheckpointReport {
        id,
        dtype: recorded.parts().first().map_or("", |part| part.element.name()),
        shapes: recorded.parts().iter().map(|part| part.shape.clone()).collect(),
        rows: recorded.len(),
        missing: positions.iter().copied().filter(|p| recorded.find(*p).is_none()).collect(),
        stats: Sums::new().stats(),
        nonfinite: vec![],
        zero: vec![],
        constant: vec![],
        repeated: vec![],
    };
    let mut sums = Sums::new();
    let mut seen: HashMap<Vec<u32>, u32> = HashMap::new();
    let mut row = Vec::new();
    for (index, position) in recorded.positions().enumerate() {
        dump.row(recorded, index, &mut row);
        let kind = sums.add_row(&row);
        match kind {
            RowKind::Plain => {}
            RowKind::Nonfinite => report.nonfinite.push(position),
            RowKind::Zero => report.zero.push(position),
            // The first row of the probabilities is 1 for every head: it sees only itself.
            RowKind::Constant if id.kind() == Kind::AttnProbs && position == 0 => {}
            RowKind::Constant => report.constant.push(position),
        }
        if kind != RowKind::Plain {
            // Odd in itself already: rows of NaN or zeros are all the same.
            continue;
        }
        let bits = row.iter().map(|value| value.to_bits()).collect();
        let earlier = *seen.entry(bits).or_insert(position);
        let token = |position: u32| dump.tokens().get(position as usize);
        // Choices and counts, which other nodes hold, may well be those of another token.
        if id.kind().is_fixed() && earlier != position && token(earlier) != token(position) {
            report.repeated.push((position, earlier));
        }
    }
    report.stats = sums.stats();
    report
}

fn listed(positions: &[u32]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = positions.iter().take(SHOWN).map(u32::to_string).collect();
    let more =
        if positions.len() > SHOWN { format!(", … ({} in all)", positions.len()) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

fn findings(dump: &Dump, checkpoints: &[CheckpointReport]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let manifest = dump.manifest();
    if let Some(stopped) = &manifest.stopped {
        let next = stopped.position.map_or_else(String::new, |next| format!(", before position {next}"));
        findings
            .push(Finding::unusual("stopped", format!("the recording ends early{next}: {}", stopped.reason)));
    } else if !manifest.complete {
        let text = "is false: the recording was interrupted, what follows is what was whole";
        findings.push(Finding::unusual("complete", text));
    }
    if dump.seen_checkpoints().next().is_some() {
        let text = "only printed values are known: a reference for `parity run` and `parity diff`";
        findings.push(Finding::unusual("checkpoints", text));
    } else if checkpoints.is_empty() {
        findings.push(Finding::wrong("checkpoints", "there are none: nothing can be compared"));
    }
    for (position, token) in manifest.tokens.iter().enumerate() {
        let computed = manifest.steps.iter().any(|step| step.positions.contains(&(position as u32)));
        if !computed {
            let text = format!("position {position} (token {token}) was computed in no step");
            findings.push(Finding::unusual("steps", text));
        }
    }
    let graphs = Graphs::read(dump)?;
    let cleared: HashSet<Checkpoint> =
        graphs.all().iter().flat_map(super::cleared::of_cleared_state).collect();
    let of_graphs: HashSet<Checkpoint> = graphs.all().iter().flat_map(labels).flatten().collect();
    let begins =
        |position: &u32| manifest.steps.first().is_some_and(|step| step.positions.contains(position));
    for report in checkpoints {
        let id = report.id.to_string();
        let is_cleared = |position: &u32| cleared.contains(&report.id) && begins(position);
        let zero: Vec<u32> = report.zero.iter().copied().filter(|position| !is_cleared(position)).collect();
        let mut add = |level, positions: &[u32], what: &str| {
            if !positions.is_empty() {
                let text = format!("{what} at position {}", listed(positions));
                findings.push(Finding { level, subject: id.clone(), text });
            }
        };
        let (nan, inf) = (report.stats.nan, report.stats.inf);
        add(Level::Wrong, &report.nonfinite, &format!("holds {nan} NaN and {inf} infinities,"));
        add(Level::Wrong, &zero, "is all zero");
        add(Level::Wrong, &report.constant, "has one value throughout");
        if let Some((position, earlier)) = report.repeated.first() {
            let text = format!(
                "has the same row at positions {earlier} and {position}, whose tokens differ ({} such rows)",
                report.repeated.len()
            );
            findings.push(Finding::wrong(id, text));
        }
    }
    findings.extend(uneven(checkpoints, &of_graphs));
    findings.sort_by_key(|finding| finding.level);
    Ok(findings)
}

/// Kinds that some layers have and others lack, though they compute them where the dump brings the graph: layers of a
/// hybrid model differ.
fn uneven(checkpoints: &[CheckpointReport], of_graphs: &HashSet<Checkpoint>) -> Vec<Finding> {
    let mut kinds: IndexMap<Kind, BTreeSet<u32>> = IndexMap::new();
    for id in checkpoints.iter().map(|report| report.id) {
        if let Some(layer) = id.layer_index() {
            kinds.entry(id.kind()).or_default().insert(layer);
        }
    }
    let layers: BTreeSet<u32> = kinds.values().flatten().copied().collect();
    let lacking = kinds.iter().filter_map(|(kind, present)| {
        let computes =
            |layer: &u32| of_graphs.is_empty() || of_graphs.contains(&Checkpoint::layer(*kind, *layer));
        let absent: Vec<u32> = layers.difference(present).copied().filter(computes).collect();
        let text = format!("is missing in layer {}", listed(&absent));
        (!absent.is_empty()).then(|| Finding::unusual(kind.name(), text))
    });
    lacking.collect()
}
