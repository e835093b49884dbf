//! One checkpoint in sentences: what the node computes, what rounding explains of it, which mistakes are known of it; and
//! of a report what was found, and which code to look at.
//!
//! What an op computes and what rounding explains stands in the op's own file (`ops`), mistakes in the catalogue.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use parity_graph::params::{Kind, fields};
use parity_graph::{Id, fault};

use crate::audit::{Graphs, Labelled, Prompt, reads};
use crate::error::{Error, Result};
use crate::foreign;
use crate::gguf::Gguf;
use crate::ops::{Rule, rules};
use crate::references;
use crate::report::words::{self, number, precise};
use crate::report::{CheckpointVerdict, Entry, LocalError, Report};
use crate::select;

/// Files of llama.cpp's CUDA backend (ggml/src/ggml-cuda) that compute an op; of others the names say it.
const CUDA: [(&str, &str); 18] = [
    ("GET_ROWS", "getrows.cu"),
    ("RMS_NORM", "norm.cu"),
    ("NORM", "norm.cu"),
    ("MUL_MAT", "mmq.cu, mmvq.cu, mmf.cu"),
    ("MUL_MAT_ID", "mmq.cu, mmvq.cu (ids)"),
    ("ADD", "binbcast.cu"),
    ("SUB", "binbcast.cu"),
    ("MUL", "binbcast.cu"),
    ("DIV", "binbcast.cu"),
    ("ROPE", "rope.cu"),
    ("SOFT_MAX", "softmax.cu"),
    ("FLASH_ATTN_EXT", "fattn.cu, fattn-tile.cu, fattn-mma-f16.cuh"),
    ("SWIGLU", "unary.cu (ggml_cuda_op_swiglu)"),
    ("SSM_SCAN", "ssm-scan.cu"),
    ("SSM_CONV", "ssm-conv.cu"),
    ("ARGSORT", "argsort.cu"),
    ("SCALE", "scale.cu"),
    ("CONCAT", "concat.cu"),
];

/// Where a node stands: in a recording's graph, or in the one that is built of a model file.
#[derive(Default)]
pub struct Place {
    /// The model file.
    pub model: Option<PathBuf>,
    /// A recording that brings its graph.
    pub recording: Option<PathBuf>,
}

/// A node in its graph.
struct Found {
    labelled: Labelled,
    node: Id,
}

impl Place {
    /// The graphs that a node may stand in: with attention in one node, and in three.
    fn graphs(&self) -> Result<Vec<Labelled>> {
        if let Some(path) = &self.recording {
            let dump = foreign::open(path, &foreign::Options::default())?;
            return Ok(Graphs::open(&dump)?.into_labelled());
        }
        let model = self.model.clone().map_or_else(references::default_model, Ok)?;
        let gguf = Gguf::open(&model)?;
        let built = |flash| Prompt::new(&gguf, &[0], flash, 0).map(Prompt::into_labelled);
        Ok(built(true)?.into_iter().chain(built(false)?).collect())
    }

    /// Finds a node.
    fn find(&self, checkpoint: &str) -> Result<Found> {
        let mut ids: Vec<String> = Vec::new();
        for labelled in self.graphs()? {
            let found = labelled.nodes().find(|(_, id)| id.to_string() == checkpoint).map(|(node, _)| node);
            if let Some(node) = found {
                return Ok(Found { labelled, node });
            }
            ids.extend(labelled.nodes().map(|(_, id)| id.to_string()));
        }
        Err(unknown(
            checkpoint,
            "the graph has no such checkpoint",
            &ids,
            "parity inspect lists a recording's",
        ))
    }
}

/// An id that is not there, and one like it that is.
fn unknown(checkpoint: &str, what: &str, ids: &[String], hint: &str) -> Error {
    let some = ids[..ids.len().min(SHOWN)].join(", ");
    let count = words::count(ids.len(), "checkpoint");
    let error = Error::new(checkpoint, what).expected(format!("one of {count}, e.g. {some}"));
    match select::alike(checkpoint, ids) {
        Some(meant) => error.hint(format!("parity explain {meant}; {hint}")),
        None => error.hint(hint),
    }
}

/// Explains a node of a graph, in paragraphs of whole sentences.
///
/// # Errors
/// An architecture that nobody builds, where no recording brings a graph; a node that the graph does not have.
pub fn of_graph(place: &Place, checkpoint: &str) -> Result<Vec<String>> {
    let found = place.find(checkpoint)?;
    let Found { labelled, node } = &found;
    let id = labelled.labels[*node].ok_or_else(|| Error::new(checkpoint, "has no id"))?;
    let tensor = labelled.program.graph.get(*node);
    let reads = reads(&[(0, labelled)]);
    let inputs: Vec<String> = reads.get(&id).into_iter().flatten().map(ToString::to_string).collect();
    let op = tensor.op.name();
    let mut paragraphs = vec![computes(checkpoint, id.layer_index(), Some(op), &inputs)];
    paragraphs.extend(found.numbers());
    paragraphs.extend(rule_of(op).map(bound));
    paragraphs.push(found.mistakes(checkpoint));
    paragraphs.push(code(op));
    Ok(paragraphs)
}

impl Found {
    /// The numbers and weights that the node has in this model.
    fn numbers(&self) -> Option<String> {
        let graph = &self.labelled.program.graph;
        let tensor = graph.get(self.node);
        let params = fields(&tensor.op).iter().map(|field| match field.kind {
            Kind::Int => format!("{} {}", field.name, tensor.params.int(field.word)),
            Kind::Float => format!("{} {}", field.name, tensor.params.float(field.word)),
        });
        let leaves = graph.sources(self.node).map(|source| graph.origin(source));
        let leaves = leaves.filter(|leaf| graph.is_leaf(*leaf) && !graph.get(*leaf).name.is_empty());
        let leaves = leaves.map(|leaf| format!("{} ({})", graph.get(leaf).name, graph.get(leaf).dtype));
        let all: Vec<String> = leaves.chain(params).collect();
        (!all.is_empty()).then(|| format!("Here it has {}.", all.join(", ")))
    }

    /// The mistakes that have a place in the node.
    fn mistakes(&self, checkpoint: &str) -> String {
        let all = fault::at(&self.labelled.program.graph, self.node);
        let Some(first) = all.first() else {
            return "No mistake of the catalogue has a place in it.".to_owned();
        };
        let mut by_name: IndexMap<&str, Vec<&str>> = IndexMap::new();
        for fault in &all {
            let texts = by_name.entry(fault.name).or_default();
            if texts.len() < TEXTS {
                texts.push(&fault.text);
            }
        }
        let known: Vec<String> =
            by_name.iter().map(|(name, texts)| format!("{name} ({})", texts.join(", or "))).collect();
        format!(
            "Mistakes that are known of it: {}. `parity run --inject {}@{checkpoint}` makes the first.",
            known.join("; "),
            first.name
        )
    }
}

/// Values of one mistake that are told.
const TEXTS: usize = 3;

/// The rule of an op by its name. In older reports attention is one op of no graph.
fn rule_of(op: &str) -> Option<&'static Rule> {
    let op = if op == "ATTENTION" { "FLASH_ATTN_EXT" } else { op };
    rules().find(|rule| rule.op.name() == op)
}

/// What rounding explains.
fn bound(rule: &Rule) -> String {
    format!("Rounding explains {} (docs/bounds.md).", rule.explained)
}

/// Where llama.cpp computes an op.
fn code(op: &str) -> String {
    let cuda = CUDA.iter().find(|(known, _)| *known == op);
    let cuda =
        cuda.map_or(String::new(), |(_, files)| format!(", on NVIDIA GPUs in {files} (ggml/src/ggml-cuda)"));
    format!(
        "llama.cpp computes it in ggml_compute_forward_{} (ggml/src/ggml-cpu){cuda}.",
        op.trim_end_matches("_EXT").to_ascii_lowercase()
    )
}

/// Explains one checkpoint of a report, in paragraphs of whole sentences.
///
/// # Errors
/// A checkpoint that the report does not have.
pub fn explain(report: &Report, place: &Place, checkpoint: &str) -> Result<Vec<String>> {
    let entry =
        report.checkpoints.iter().find(|entry| entry.id.to_string() == checkpoint).ok_or_else(|| {
            let ids: Vec<String> = report.checkpoints.iter().map(|entry| entry.id.to_string()).collect();
            unknown(checkpoint, "the report has no such checkpoint", &ids, "report.csv lists them all")
        })?;
    let inputs: Vec<String> = entry.inputs.iter().map(ToString::to_string).collect();
    let mut paragraphs = vec![computes(checkpoint, entry.layer, entry.op.as_deref(), &inputs)];
    paragraphs.extend(entry.op.as_deref().and_then(rule_of).map(bound));
    paragraphs.push(verdict(entry));
    paragraphs.extend(difference(report, entry));
    paragraphs.extend(sides(report, entry));
    paragraphs.extend(diagnosis(report, entry));
    paragraphs.extend(look_at(report, place, entry));
    Ok(paragraphs)
}

/// Checkpoints that an error names.
const SHOWN: usize = 3;

/// What a node computes of which others.
fn computes(checkpoint: &str, layer: Option<u32>, op: Option<&str>, inputs: &[String]) -> String {
    let place = match layer {
        Some(layer) => format!("{checkpoint} is a node of layer {layer}."),
        None => format!("{checkpoint} is a node outside of the layers."),
    };
    let reads = match inputs {
        [] => String::new(),
        inputs => format!(" It reads {}.", inputs.join(", ")),
    };
    let what = match (op.and_then(rule_of), op) {
        (Some(rule), _) => format!(" It computes {} (ggml's op {}).", rule.formula, rule.op.name()),
        (None, Some(op)) => format!(" It is computed by ggml's op {op}."),
        (None, None) => " The report does not say what computes it.".to_owned(),
    };
    format!("{place}{what}{reads}")
}

fn verdict(entry: &Entry) -> String {
    let evidence =
        entry.evidence.as_deref().map(|evidence| format!(" Evidence: {evidence}.")).unwrap_or_default();
    format!("The verdict is `{}`: {}.{evidence}", entry.verdict.name(), entry.verdict.meaning())
}

fn difference(report: &Report, entry: &Entry) -> Option<String> {
    let numbers = entry.numbers.as_ref()?;
    let value = |value: Option<f64>| value.map_or("a value that is not finite".to_owned(), precise);
    let mut text = format!(
        "Candidate and reference were compared in {} values. They differ by {} of the reference's length (rel L2)",
        words::thousands(numbers.n),
        number(numbers.rel_l2)
    );
    if numbers.abs_err_max == 0.0 && numbers.nonfinite == Default::default() {
        return Some(text + ": they are equal.");
    }
    text += &format!(
        "; the largest difference, {}, is at {}, where the candidate has {} and the reference {}.",
        number(numbers.abs_err_max),
        words::index(&numbers.worst.index),
        value(numbers.worst.candidate),
        value(numbers.worst.reference)
    );
    let nonfinite = numbers.nonfinite;
    if nonfinite.candidate + nonfinite.reference > 0 {
        text += &format!(
            " NaN or Inf: {} in the candidate, {} in the reference.",
            nonfinite.candidate, nonfinite.reference
        );
    }
    let inherited = entry.parts.as_ref().filter(|_| report.reference.is_some());
    if let Some(parts) = inherited {
        text += &format!(" {} of it was in the inputs already.", number(parts.inherited));
    }
    Some(text)
}

/// What each side computes of its own inputs.
fn sides(report: &Report, entry: &Entry) -> Vec<String> {
    let side = |name: &str, local: &LocalError| {
        let mut text = format!(
            "Computed again in f64 from the inputs that the {name} itself recorded ({}), the {name}'s values are {} away \
             (rel L2).",
            words::count(local.rows as usize, "row"),
            number(local.rel_l2)
        );
        if let Some(band) = local.bound_rel_l2.filter(|band| band.is_finite()) {
            text += &format!(" Rounding explains {}.", number(band));
        }
        let healthy = local.over_bound <= 1.0;
        let worst = if local.worst.is_empty() {
            String::new()
        } else {
            format!(", at {}", words::index(&local.worst))
        };
        text += &format!(
            " The worst element is {} times its bound{worst}: {}.",
            number(local.over_bound),
            if healthy { "the node is healthy" } else { "more than rounding" }
        );
        if !local.bridged.is_empty() {
            let names: Vec<String> = local.bridged.iter().map(ToString::to_string).collect();
            text += &format!(" {} was not recorded: parity computed across it.", names.join(", "));
        }
        text
    };
    let candidate = entry.local.candidate.iter().map(|local| side("candidate", local));
    let mut out: Vec<String> =
        candidate.chain(entry.local.reference.iter().map(|local| side("reference", local))).collect();
    if out.is_empty() && report.checkpoints.iter().any(|other| other.local.candidate.is_some()) {
        out.push("Neither side was computed again here.".to_owned());
    }
    out
}

fn diagnosis(report: &Report, entry: &Entry) -> Option<String> {
    let first = report.first_divergence.as_ref().filter(|first| first.checkpoint == entry.id);
    let best = entry.diagnosis.first().or_else(|| first?.diagnosis.first());
    if let Some(best) = best {
        let fix = best.fix.as_deref().map(|fix| format!(" To fix it: {fix}.")).unwrap_or_default();
        return Some(format!(
            "The mistake has a name: {} ({}), which explains {} of the squared error.{fix}",
            best.text,
            best.fault,
            words::percent(best.explains)
        ));
    }
    let first = first?;
    let tried: Vec<String> = first.tried.iter().take(SHOWN).map(words::tried).collect();
    let residual = first.residual.clone().unwrap_or_else(|| "the error looks like none of them".to_owned());
    let tried =
        if tried.is_empty() { String::new() } else { format!(" The nearest were {}.", tried.join(", ")) };
    Some(format!("No mistake that parity knows explains the error: {residual}.{tried}"))
}

/// Which code computes this, and what goes wrong there.
fn look_at(report: &Report, place: &Place, entry: &Entry) -> Vec<String> {
    let Some(op) = entry.op.as_deref() else { return Vec::new() };
    let mut out = vec![code(op)];
    if entry.verdict.is_fault() || entry.verdict == CheckpointVerdict::Reference {
        let whose = match entry.verdict {
            CheckpointVerdict::Reference => "the reference's".to_owned(),
            _ => format!("{}'s", report.candidate.producer.name),
        };
        out[0] = format!("Look at {whose} kernel for {op}. {}", out[0]);
        out.extend(goes_wrong(report, place, entry, op));
    } else if entry.verdict == CheckpointVerdict::Inherited {
        let first = report.first_divergence.as_ref().map(|first| format!(", first at {}", first.checkpoint));
        out.push(format!(
            "There is nothing to look for in this kernel: the error came from before{}.",
            first.unwrap_or_default()
        ));
    }
    out
}

/// The mistakes that are known of a node: in its graph, where that is at hand, or of its op.
fn goes_wrong(report: &Report, place: &Place, entry: &Entry, op: &str) -> Option<String> {
    let checkpoint = entry.id.to_string();
    let recorded = report.candidate.path.as_deref().map(PathBuf::from);
    let recorded = Place { recording: place.recording.clone().or(recorded), model: None };
    let of_model = || {
        let made_with = references::model_of(Path::new(&checkpoint), &report.candidate.model).ok();
        let model = Some(place.model.clone().or(made_with)?);
        Place { model, recording: None }.find(&checkpoint).ok()
    };
    if let Some(found) =
        recorded.recording.is_some().then(|| recorded.find(&checkpoint).ok()).flatten().or_else(of_model)
    {
        return Some(found.mistakes(&checkpoint));
    }
    let of_op = fault::entries().filter(|entry| entry.ops.iter().any(|known| known.name() == op));
    let known: Vec<String> = of_op.map(|entry| format!("{} ({})", entry.name, entry.summary)).collect();
    (!known.is_empty()).then(|| format!("Mistakes that are known of this op: {}.", known.join("; ")))
}
