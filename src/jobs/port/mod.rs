//! A conversion against its original: what it carries, tokens, weights, tensors, in this order; the first that explains
//! the rest ends it.

mod exchange;
mod original;

use std::path::{Path, PathBuf};

use parity_dump::Dump;

use crate::audit::AuditRows;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::foreign;
use crate::gguf::{DType, Gguf};
use crate::inspect::against::{Difference, adapter, compare, compare_adapters, tokens_of_original};
use crate::jobs::{audit, diff};
use crate::record;
use crate::references::{self, quoted, recording_command};
use crate::report::{Finding, Report, Verdict, finding};
use crate::text::tell;
use crate::tokenizer::Tokenizer;
use exchange::{Output, nmse, stem};
use original::Python;

/// What is ported.
pub struct Options {
    /// Folder of Hugging Face's.
    pub original: PathBuf,
    /// The GGUF file that was made of it.
    pub converted: PathBuf,
    /// The adapter that both sides run with.
    pub adapter: Option<Ported>,
    /// The text; where there is none, that of the files of llama.cpp's guide.
    pub prompt: Option<String>,
    /// The llama.cpp program; where there is none, what records references.
    pub program: Option<PathBuf>,
    /// The Python that has transformers.
    pub python: PathBuf,
    /// Where dumps and files go.
    pub dir: PathBuf,
    /// Token rows that are computed again.
    pub rows: AuditRows,
}

/// An adapter of low rank.
pub struct Ported {
    /// Folder of PEFT's.
    pub original: PathBuf,
    /// The GGUF file that was made of it.
    pub converted: PathBuf,
    /// What the user scales both by.
    pub scale: f32,
}

/// Compares step by step.
///
/// # Errors
/// A file that cannot be read, a Python without transformers, a llama.cpp that cannot be recorded.
pub fn port(options: &Options) -> Result<Report> {
    let Options { original, converted, .. } = options;
    tell(format_args!("1/3 config, tokenizer, template, weights"));
    let found = compare(converted, original)?;
    let mut differences = found.all();
    let mut report = Report::default();
    report.notes.extend(found.not_compared.iter().map(|what| format!("not compared: {what}")));
    let mut gguf = Gguf::open(converted)?;
    report.candidate.model = crate::model::info(&gguf);
    report.candidate.path = Some(converted.display().to_string());
    let against = format!("parity inspect {} --against {}", shown(converted), shown(original));
    if found.differs() {
        return Ok(ended(report, &differences, against));
    }
    if let Some(ported) = &options.adapter {
        let [ours, theirs] =
            [&ported.converted, &ported.original].map(|path| adapter(path, ported.scale, &gguf));
        let (ours, theirs) = (ours?, theirs?);
        let other = compare_adapters(&ours, &theirs);
        if !other.is_empty() {
            let next = format!("convert_lora_to_gguf.py {} --base FOLDER", shown(&ported.original));
            return Ok(ended(report, &other, next));
        }
        gguf = gguf.with_adapter(ours)?;
    }
    let data = options.dir.join("data");
    let stems = [stem(&data, "pytorch", original), stem(&data, "llamacpp", converted)];
    let prompt = match &options.prompt {
        Some(prompt) => prompt.clone(),
        None => exchange::prompt(&stems[0])?.ok_or_else(|| {
            Error::file(&data, "holds no prompt of the original")
                .expected("-p PROMPT, or the files of llama.cpp's guide")
        })?,
    };
    tell(format_args!("2/3 tokens"));
    if let Some(difference) = tokens(&gguf, original, &prompt)? {
        differences.insert(0, difference);
        return Ok(ended(
            report,
            &differences,
            format!("parity inspect {} -p {}", shown(converted), quoted(&prompt)),
        ));
    }
    report.findings = differences.iter().map(Finding::from).collect();
    if let Some(stored) = quantised(&gguf) {
        report.reason = Some(format!(
            "config, tokens and weights are the original's; tensors were not compared, because {stored} is quantised and \
             every product differs by it"
        ));
        report.next.push(
            "convert_hf_to_gguf.py FOLDER --outtype f32, and port that file; quantise afterwards".to_owned(),
        );
        return Ok(report);
    }
    tensors(options, gguf, report, &prompt, &stems)
}

/// What differs ends the comparison.
fn ended(mut report: Report, differences: &[Difference], next: String) -> Report {
    report.verdict = Verdict::Divergence;
    let grave: Vec<Finding> =
        differences.iter().filter(|found| found.changes_logits).map(Finding::from).collect();
    report.findings = differences.iter().map(Finding::from).collect();
    report.reason = grave.first().map(|first| {
        let more =
            if grave.len() > 1 { format!("; {} more differences", grave.len() - 1) } else { String::new() };
        format!("{}{more}", finding::text(first))
    });
    report.next.push(next);
    report
}

fn shown(path: &Path) -> String {
    quoted(&path.display().to_string())
}

/// Whether the two tokenizers cut the prompt alike.
fn tokens(gguf: &Gguf, original: &Path, prompt: &str) -> Result<Option<Difference>> {
    let Some(theirs) = tokens_of_original(original, prompt)? else { return Ok(None) };
    let Ok(tokenizer) = Tokenizer::from_gguf(gguf) else { return Ok(None) };
    let ours = tokenizer.encode_without_bos(prompt)?;
    Ok((ours != theirs).then(|| other_tokens(&theirs, &ours)))
}

fn other_tokens(theirs: &[u32], ours: &[u32]) -> Difference {
    let at = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    let shown = |ids: &[u32]| {
        let some: Vec<String> = ids.iter().skip(at).take(6).map(u32::to_string).collect();
        format!("{} from token {at} of {}", some.join(" "), ids.len())
    };
    Difference {
        name: "tokens.prompt".to_owned(),
        place: "the prompt".to_owned(),
        original: shown(theirs),
        converted: shown(ours),
        effect: "the model reads other tokens".to_owned(),
        changes_logits: true,
    }
}

/// The first matrix of a type that is more than a rounding of each value.
fn quantised(gguf: &Gguf) -> Option<String> {
    let plain = |dtype: DType| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    gguf.tensors().find(|info| !plain(info.dtype)).map(|info| format!("{} ({})", info.name, info.dtype))
}

/// The type of the matrices, where they have one; those of several are left as the original has them.
fn stored(gguf: &Gguf) -> String {
    let mut types: Vec<String> =
        gguf.tensors().filter(|info| info.shape.len() > 1).map(|info| info.dtype.to_string()).collect();
    types.sort();
    types.dedup();
    if types.len() == 1 { types.remove(0) } else { "F32".to_owned() }
}

/// Both sides run, and their tensors.
fn tensors(
    options: &Options,
    gguf: Gguf,
    report: Report,
    prompt: &str,
    stems: &[PathBuf; 2],
) -> Result<Report> {
    let Options { original, converted, dir, .. } = options;
    let adapter = options.adapter.as_ref().map(|ported| (ported.original.as_path(), ported.scale));
    let python = Python::find(&options.python, adapter.is_some());
    // Without transformers, what llama.cpp's guide had written of it is compared.
    let written = match &python {
        Ok(_) => None,
        Err(error) => Some(Output::read(&stems[0])?.ok_or_else(|| error.clone())?),
    };
    tell(format_args!("3/3 tensors: llama.cpp"));
    let mut candidate = recorded(options, &gguf, prompt)?;
    let tokens = Recording::tokens(&candidate).to_vec();
    let theirs = match &written {
        Some(output) => Some(output.tokens.clone()),
        None => tokens_of_original(original, prompt)?,
    };
    if let Some(theirs) = theirs.filter(|theirs| !contains(&tokens, theirs)) {
        let other = [other_tokens(&theirs, &tokens)];
        return Ok(ended(
            report,
            &other,
            format!("llama-tokenize -m {} -p {}", shown(converted), quoted(prompt)),
        ));
    }
    let ours = output(&candidate, &tokens)?;
    ours.write(&stems[1], prompt)?;
    let stores = stored(&gguf);
    let file = ModelFile::of(gguf);
    let (mut judged, theirs) = match (python, written) {
        (Ok(python), _) => {
            tell(format_args!("3/3 tensors: transformers"));
            let dump = dir.join(ORIGINAL);
            python.run((original, adapter), &dump, &tokens, prompt, &stores)?;
            let mut reference = foreign::open(&dump, &foreign::Options::default())?;
            let theirs = output(&reference, &tokens)?;
            theirs.write(&stems[0], prompt)?;
            let how = diff::Options { audit: Some(options.rows), ..diff::Options::default() };
            (diff::diff(&mut candidate, &mut reference, Some(&file), &how)?, theirs)
        }
        (Err(_), Some(theirs)) => (alone(&mut candidate, &file, options.rows)?, theirs),
        (Err(error), None) => return Err(error),
    };
    let said = nmse(&theirs.logits, &ours.logits);
    judged.notes.extend(said.map(|nmse| format!("NMSE: {nmse:.6e} of the last token's logits")));
    judged.notes.extend(report.notes);
    judged.findings = report.findings;
    Ok(judged)
}

/// The dump of llama.cpp, within the folder.
pub const CONVERTED: &str = "converted";
/// The dump of transformers.
pub const ORIGINAL: &str = "original";

/// llama.cpp on the prompt.
fn recorded(options: &Options, gguf: &Gguf, prompt: &str) -> Result<Dump> {
    let program = options.program.clone().or_else(references::program).ok_or_else(|| {
        Error::new("llama.cpp", "no program to record")
            .expected("llama-completion on the PATH, or --program LLAMA")
            .hint("scripts/build-llama.sh builds one")
    })?;
    let counted = Tokenizer::from_gguf(gguf).and_then(|tokenizer| tokenizer.encode(prompt));
    // Where parity cannot count the tokens: a byte is one at most, BOS and EOS are two.
    let count = counted.map_or(prompt.len() + 2, |tokens| tokens.len());
    let dir = options.dir.join(CONVERTED);
    let summary = record::record(&record::Options {
        dir: dir.clone(),
        all_rows: true,
        output: record::Output::Nowhere,
        command: recording_command(&program, gguf, prompt, count, 0),
        ..record::Options::default()
    })?;
    match summary.incomplete {
        Some(reason) => Err(Error::file(&dir, format!("the recording is not complete: {reason}"))),
        None => Ok(Dump::open(&dir)?),
    }
}

/// llama.cpp's recording by itself: the original's tensors are not known, so that health is no parity.
fn alone(candidate: &mut Dump, file: &ModelFile, rows: AuditRows) -> Result<Report> {
    let mut report = audit::audit(candidate, file, &audit::Options { rows, ..audit::Options::default() })?;
    report.leave_open(
        "every node of llama.cpp is right by itself; the original's tensors are not known, because transformers is not \
         installed, only its logits"
            .to_owned(),
    );
    Ok(report)
}

/// Whether tokens are these, with what stands before and behind every text.
fn contains(tokens: &[u32], theirs: &[u32]) -> bool {
    theirs.is_empty() || tokens.windows(theirs.len()).any(|part| part == theirs)
}

/// Logits of the last of the prompt's tokens.
fn output(dump: &Dump, tokens: &[u32]) -> Result<Output> {
    let logits = Checkpoint::global(Kind::Logits);
    let last = tokens.len().saturating_sub(1) as u32;
    let mut row = Vec::new();
    let found = dump.get(logits).and_then(|recorded| Some((recorded, recorded.find(last)?)));
    let Some((recorded, index)) = found else {
        return Err(
            Error::file(dump.path(), "has no logits of the last token").expected(format!("position {last}"))
        );
    };
    dump.row(recorded, index, &mut row);
    Ok(Output { logits: row, tokens: tokens.to_vec() })
}
