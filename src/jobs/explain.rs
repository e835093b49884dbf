//! One checkpoint of a report in sentences: what the node computes, what was found, which code to look at.

use crate::error::{Error, Result};
use crate::report::words::{self, number, precise};
use crate::report::{CheckpointVerdict, Entry, LocalError, Report};
use crate::select;

/// What an op computes, and where llama.cpp does.
struct OpText {
    /// As ggml calls it.
    op: &'static str,
    /// What it computes of its sources.
    computes: &'static str,
    /// Function of ggml's CPU backend.
    cpu: &'static str,
    /// File of its CUDA backend.
    cuda: &'static str,
    /// What people get wrong in it.
    traps: &'static str,
}

const OPS: [OpText; 17] = [
    OpText {
        op: "GET_ROWS",
        computes: "picks one row of a table for each token: y[t] = table[token[t]]",
        cpu: "ggml_compute_forward_get_rows",
        cuda: "getrows.cu",
        traps: "the table read transposed, token ids off by one, a row decoded as another type",
    },
    OpText {
        op: "RMS_NORM",
        computes: "divides each row by its root mean square and multiplies by a weight: y = x / sqrt(mean(x²) + eps) · w",
        cpu: "ggml_compute_forward_rms_norm",
        cuda: "norm.cu",
        traps: "the epsilon, the weight left out or applied twice, a sum over the wrong axis, a mean taken away as in LayerNorm",
    },
    OpText {
        op: "NORM",
        computes: "subtracts the mean of each row and divides by its standard deviation",
        cpu: "ggml_compute_forward_norm",
        cuda: "norm.cu",
        traps: "the epsilon, a biased variance for an unbiased one",
    },
    OpText {
        op: "MUL_MAT",
        computes: "multiplies each row by a matrix: y[o] = Σ_i w[o, i] · x[i]",
        cpu: "ggml_compute_forward_mul_mat",
        cuda: "mmq.cu, mmvq.cu, mmf.cu",
        traps: "a transposed or a wrong weight, a tile's edge left out, blocks of the weight decoded wrongly, sums in f16",
    },
    OpText {
        op: "MUL_MAT_ID",
        computes: "multiplies each row by the matrices of the experts that were chosen for it",
        cpu: "ggml_compute_forward_mul_mat_id",
        cuda: "mmq.cu, mmvq.cu (ids)",
        traps: "experts in another order, the rows of one expert written to those of another",
    },
    OpText {
        op: "ADD",
        computes: "adds two tensors: a bias to each row, or the input of a block to its output",
        cpu: "ggml_compute_forward_add (binary-ops.cpp)",
        cuda: "binbcast.cu",
        traps: "the bias or the residual left out, added twice, or taken from another place",
    },
    OpText {
        op: "MUL",
        computes: "multiplies two tensors element by element",
        cpu: "ggml_compute_forward_mul (binary-ops.cpp)",
        cuda: "binbcast.cu",
        traps: "the factor of another layer, broadcasting over the wrong axis",
    },
    OpText {
        op: "ROPE",
        computes: "rotates pairs of columns of each head by an angle that grows with the token's position and falls with the \
                   column: position · base^(-2i/d)",
        cpu: "ggml_compute_forward_rope",
        cuda: "rope.cu",
        traps: "the base, neighbours for halves as pairs, positions that start anew, the share of columns, the scaling of long contexts",
    },
    OpText {
        op: "SOFT_MAX",
        computes: "scales and masks the scores of each head and makes them probabilities: exp(s - max) / Σ exp(s - max)",
        cpu: "ggml_compute_forward_soft_max",
        cuda: "softmax.cu",
        traps: "the scale, the mask, a row without its maximum subtracted",
    },
    OpText {
        op: "FLASH_ATTN_EXT",
        computes: "attention in one pass: softmax(scale · q·kᵀ + mask) · v for each head, tile by tile",
        cpu: "ggml_compute_forward_flash_attn_ext",
        cuda: "fattn.cu, fattn-tile.cu, fattn-mma-f16.cuh",
        traps: "the scale, the mask, which key/value head a query head reads, the last tile, sums in f16",
    },
    OpText {
        op: "ATTENTION",
        computes: "attention: softmax(scale · q·kᵀ + mask) · v for each head, the heads side by side",
        cpu: "ggml_compute_forward_soft_max between two ggml_compute_forward_mul_mat",
        cuda: "fattn.cu, softmax.cu",
        traps: "the scale, the mask, which key/value head a query head reads, the order of the heads, an old row of the cache",
    },
    OpText {
        op: "SWIGLU",
        computes: "gates the feed-forward part: silu(gate) · up, with silu(x) = x / (1 + e^-x)",
        cpu: "ggml_compute_forward_swiglu",
        cuda: "unary.cu (ggml_cuda_op_swiglu)",
        traps: "gate and up exchanged, GELU for SiLU",
    },
    OpText {
        op: "SSM_SCAN",
        computes: "runs the recurrence of a state-space layer over the tokens: h = exp(dt·A)·h + dt·B·x, y = C·h",
        cpu: "ggml_compute_forward_ssm_scan",
        cuda: "ssm-scan.cu",
        traps: "a state that is not carried over, the sequence's state of another slot",
    },
    OpText {
        op: "SSM_CONV",
        computes: "a causal convolution over the last tokens of each column",
        cpu: "ggml_compute_forward_ssm_conv",
        cuda: "ssm-conv.cu",
        traps: "the window off by one, its first tokens not taken from the state",
    },
    OpText {
        op: "ARGSORT",
        computes: "sorts the scores of each row: which experts are chosen",
        cpu: "ggml_compute_forward_argsort",
        cuda: "argsort.cu",
        traps: "the direction, ties",
    },
    OpText {
        op: "SCALE",
        computes: "multiplies by a constant and adds another",
        cpu: "ggml_compute_forward_scale",
        cuda: "scale.cu",
        traps: "the constant of another model",
    },
    OpText {
        op: "CONCAT",
        computes: "puts two tensors one behind the other",
        cpu: "ggml_compute_forward_concat",
        cuda: "concat.cu",
        traps: "the axis, the order",
    },
];

/// Explains one checkpoint of a report, in paragraphs of whole sentences.
///
/// # Errors
/// A checkpoint that the report does not have.
pub fn explain(report: &Report, checkpoint: &str) -> Result<Vec<String>> {
    let entry =
        report.checkpoints.iter().find(|entry| entry.id.to_string() == checkpoint).ok_or_else(|| {
            let ids: Vec<String> = report.checkpoints.iter().map(|entry| entry.id.to_string()).collect();
            let some = ids[..ids.len().min(SHOWN)].join(", ");
            let count = words::count(ids.len(), "checkpoint");
            let error = Error::new(checkpoint, "the report has no such checkpoint");
            let error = error.expected(format!("one of {count}, e.g. {some}"));
            match select::alike(checkpoint, &ids) {
                Some(meant) => error.hint(format!("parity explain {meant}; report.csv lists them all")),
                None => error.hint("report.csv lists them all"),
            }
        })?;
    let mut paragraphs = vec![computes(entry), verdict(entry)];
    paragraphs.extend(difference(report, entry));
    paragraphs.extend(sides(report, entry));
    paragraphs.extend(diagnosis(report, entry));
    paragraphs.extend(look_at(report, entry));
    Ok(paragraphs)
}

/// Checkpoints that an error names.
const SHOWN: usize = 3;

fn text_of(entry: &Entry) -> Option<&'static OpText> {
    let op = entry.op.as_deref()?;
    OPS.iter().find(|text| text.op == op)
}

fn computes(entry: &Entry) -> String {
    let place = match entry.layer {
        Some(layer) => format!("{} is a node of layer {layer}.", entry.id),
        None => format!("{} is a node outside of the layers.", entry.id),
    };
    let reads = match &entry.inputs[..] {
        [] => String::new(),
        inputs => {
            let names: Vec<String> = inputs.iter().map(ToString::to_string).collect();
            format!(" It reads {}.", names.join(", "))
        }
    };
    let what = match (text_of(entry), &entry.op) {
        (Some(text), _) => format!(" It {}.", text.computes),
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
    let tried: Vec<String> = first
        .tried
        .iter()
        .take(SHOWN)
        .map(|tried| format!("{} ({})", tried.fault, words::percent(tried.explains)))
        .collect();
    let residual = first.residual.clone().unwrap_or_else(|| "the error looks like none of them".to_owned());
    let tried =
        if tried.is_empty() { String::new() } else { format!(" The nearest were {}.", tried.join(", ")) };
    Some(format!("No mistake that parity knows explains the error: {residual}.{tried}"))
}

/// Which code computes this.
fn look_at(report: &Report, entry: &Entry) -> Vec<String> {
    let Some(text) = text_of(entry) else {
        return entry
            .op
            .iter()
            .map(|op| {
                format!(
                    "llama.cpp computes it in ggml_compute_forward_{} (ggml/src/ggml-cpu/ops.cpp).",
                    op.to_ascii_lowercase()
                )
            })
            .collect();
    };
    let engine = &report.candidate.producer.name;
    let faulty = entry.verdict.is_fault() || entry.verdict == CheckpointVerdict::Reference;
    let mut out = vec![format!(
        "llama.cpp computes it in {} (ggml/src/ggml-cpu), on NVIDIA GPUs in {} (ggml/src/ggml-cuda).",
        text.cpu, text.cuda
    )];
    if faulty {
        let whose = if entry.verdict == CheckpointVerdict::Reference {
            "the reference's".to_owned()
        } else {
            format!("{engine}'s")
        };
        out[0] = format!("Look at {whose} kernel for {}. {}", text.op, out[0]);
        out.push(format!("What goes wrong there: {}.", text.traps));
    } else if entry.verdict == CheckpointVerdict::Inherited {
        let first = report.first_divergence.as_ref().map(|first| format!(", first at {}", first.checkpoint));
        out.push(format!(
            "There is nothing to look for in this kernel: the error came from before{}.",
            first.unwrap_or_default()
        ));
    }
    out
}
