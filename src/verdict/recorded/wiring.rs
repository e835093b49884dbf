//! Whether a recorded graph is wired as the model file says: compared, where there is a builder for the architecture,
//! with the graph that is built from the file, without looking at a value.

use crate::audit::recorded::Graphs;
use crate::gguf::Gguf;
use crate::model::builders::{self, Shape};
use crate::model::diff::{self, Diff};
use crate::report::{Report, Verdict};
use crate::verdict::describe_recorded;
use parity_graph::Graph;

/// What the comparison of two graphs says.
struct Wiring {
    /// What a reader must know, in sentences.
    notes: Vec<String>,
    /// The first thing that differs, if anything does.
    differs: Option<String>,
}

/// Numbers that options of a run set as well.
const OPTIONS: [&str; 4] = ["RoPE base", "RoPE scale", "RoPE original context", "YaRN"];
const OPTIONS_SAID: &str = "wiring: options of the run set this too (--rope-freq-base, --rope-freq-scale, --rope-scaling, \
    --yarn-orig-ctx and its like): where one was given, the recording is of another model than the file; where none was, \
    the metadata is misread";

/// Differences that are spelt out.
const SHOWN_MAX: usize = 8;

/// Says of recorded graphs whether they are the model file's, or that nobody knows; `refused` is why parity's own
/// engines do not run the file, where they do not.
pub fn weigh_wiring(
    report: &mut Report,
    graphs: &Graphs,
    gguf: &Gguf,
    architecture: &str,
    refused: Option<&str>,
) {
    describe_recorded(report, graphs);
    if graphs.are_built() {
        report.notes.push(format!(
            "the dump brings no graph: it was judged by the one that parity builds of the file, for {architecture}"
        ));
        return;
    }
    match wiring(gguf, architecture, graphs) {
        Some(wiring) => wiring.weigh(report),
        None => report.notes.push(format!(
            "the wiring is as the producer declares it: parity has no graph of its own for {architecture}{}, so that a \
             parameter that was read from the wrong place looks right here",
            refused.map_or_else(String::new, |why| format!(" ({why})"))
        )),
    }
}

/// A candidate that is healthy by a graph of its own is no parity where that graph is not the reference's: a parameter
/// that was read from the wrong place is in the graph and in the values alike.
pub fn refuse_other_graph(report: &mut Report, own: &Graphs, reference: &Graphs) {
    let differences = own.each().zip(reference.each()).flat_map(|(ours, theirs)| {
        let found = diff::diff(ours, theirs);
        let sentences = if found.is_equal() { Vec::new() } else { found.sentences() };
        sentences.into_iter().map(|text| {
            text.replace(" in the graph", " in the candidate's graph")
                .replace(" in the file", " in the reference's")
        })
    });
    let Some(first) = differences.into_iter().next() else { return };
    let text = format!("the graphs of the two sides are not the same: {first}");
    match report.verdict {
        Verdict::Parity => {
            report.verdict = Verdict::Undecided;
            report.reason = Some(text);
        }
        Verdict::Divergence | Verdict::Undecided => report.notes.push(text),
    }
}

/// Compares each graph of a recording with the one that is built from the model file; `None` where there is no
/// builder for the architecture.
fn wiring(gguf: &Gguf, architecture: &str, graphs: &Graphs) -> Option<Wiring> {
    if !builders::knows(architecture) {
        return None;
    }
    let (mut differences, mut chosen): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    for graph in graphs.each() {
        let built = match builders::build(gguf, Shape::of(graph)) {
            Ok(built) => built,
            Err(error) => {
                let why = error.to_string().replace('\n', ",");
                if let Some(differs) = heads_differ(gguf, architecture, graph) {
                    let notes = vec![
                        format!("wiring: {differs}"),
                        format!("no graph could be built of the file: {why}"),
                    ];
                    return Some(Wiring { notes, differs: Some(differs) });
                }
                let note = format!(
                    "the wiring is as the producer declares it: no graph could be built of the file ({why})"
                );
                return Some(Wiring { notes: vec![note], differs: None });
            }
        };
        let found: Diff = diff::diff(graph, &built.graph);
        // The graphs of prefill and decode mostly differ in the same things.
        let sentences = if found.is_equal() { Vec::new() } else { found.sentences() };
        for sentence in sentences {
            if !differences.contains(&sentence) {
                differences.push(sentence);
            }
        }
        let choices = Shape::of(graph).choices();
        if !chosen.contains(&choices) {
            chosen.push(choices);
        }
    }
    if differences.is_empty() {
        let note = format!(
            "the wiring is the model file's: op by op, parameter by parameter, the recorded graph is the one that parity \
             builds for {architecture}; chosen for the run and not by the file: {}",
            chosen.join(", or ")
        );
        return Some(Wiring { notes: vec![note], differs: None });
    }
    let more = differences.len().saturating_sub(SHOWN_MAX);
    let first = differences.first().cloned();
    let mut notes: Vec<String> =
        differences.into_iter().take(SHOWN_MAX).map(|text| format!("wiring: {text}")).collect();
    if more > 0 {
        notes.push(format!("wiring: {more} more differences"));
    }
    if first.iter().any(|text| OPTIONS.iter().any(|word| text.contains(word))) {
        notes.push(OPTIONS_SAID.to_owned());
    }
    Some(Wiring { notes, differs: first })
}

/// What a graph has other numbers of heads of than the file says, which then need not fit its own tensors.
fn heads_differ(gguf: &Gguf, architecture: &str, graph: &Graph) -> Option<String> {
    let said = |key: &str| gguf.u32(&format!("{architecture}.attention.{key}")).ok().flatten().map(i64::from);
    let queries = said("head_count")?;
    let file = [queries, said("head_count_kv").unwrap_or(queries)];
    let recorded = diff::heads(graph).into_iter().find(|heads| *heads != file)?;
    let both = ["query heads", "key heads"].into_iter().zip(recorded.into_iter().zip(file));
    let told = both.filter(|(_, (recorded, file))| recorded != file);
    let told =
        told.map(|(name, (recorded, file))| format!("{name} {recorded} in the graph, {file} in the file"));
    Some(told.collect::<Vec<_>>().join("; "))
}

impl Wiring {
    /// Adds what was found to a report: a graph that is wired otherwise than the file says is a divergence, however
    /// well its nodes compute.
    fn weigh(self, report: &mut Report) {
        report.notes.extend(self.notes);
        if let Some(differs) = self.differs
            && report.first_divergence.is_none()
        {
            report.verdict = Verdict::Divergence;
            report.reason = Some(format!("the recorded graph is not the model file's: {differs}"));
        }
    }
}
