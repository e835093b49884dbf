//! Log-probabilities against an exact forward pass of the model, and against a recording.
//!
//! log p = z - log Σ exp z says the logits z of a row up to one number, rounded, and often of few columns. Judged is what
//! writing them down so does not explain, in the columns that were said, and no more is claimed.

mod rows;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::audit::{Carried, OwnDistance, Prompt, simulated};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{Accumulator, Comparison, Tolerance, common_positions};
use crate::dump::Recording;
use crate::error::{Error, Result};
use crate::faults::tokens;
use crate::foreign::logprobs::LogProbs;
use crate::gguf::Gguf;
use crate::model::builders;
use crate::numerics::Numerics;
use crate::ops::bound::CONFIDENCE;
use crate::report::words::number;
use crate::report::{CheckpointVerdict, Local, LocalError, Report, Seen, Side};
use crate::verdict::numbers::{self, Judged, Parts};
use crate::verdict::{self, Gap, Why};
use parity_dump::Dump;
use parity_dump::manifest::{ModelInfo, Producer};
pub(super) use rows::{Said, Words, normaliser};

/// How they are judged.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The model file.
    pub model: Option<PathBuf>,
    /// Tokens of the prompt, where the answer does not hold them.
    pub tokens: Option<Vec<u32>>,
    /// The arithmetic that the producer declares.
    pub numerics: Option<Numerics>,
    /// Whether tokens that the reference lacks are no obstacle.
    pub allow_missing: bool,
}

/// What log-probabilities are compared with.
#[derive(Clone, Copy)]
pub enum Beside<'a> {
    /// A recording, which has logits.
    Recording(&'a Dump),
    /// Log-probabilities of another engine.
    Said(&'a LogProbs),
}

/// Judges log-probabilities, against a recording or others where there are any.
///
/// # Errors
/// Neither a model nor a recording, tokens that nobody says, another vocabulary, a weight that cannot be read.
pub fn judge(said: &LogProbs, reference: Option<Beside<'_>>, options: &Options) -> Result<Report> {
    let gguf = options.model.as_deref().map(Gguf::open).transpose()?;
    let architecture = gguf.as_ref().map(|gguf| gguf.str("general.architecture")).transpose()?.flatten();
    let model = gguf.as_ref().filter(|_| architecture.is_some_and(builders::knows));
    if model.is_none() && reference.is_none() {
        let found = options.model.as_deref().map_or("none".to_owned(), |path| path.display().to_string());
        return Err(Error::file(
            &said.path,
            format!("{} are judged by what the model computes", said.format),
        )
        .expected("the model of an architecture that parity builds, or a recording to compare with")
        .found(found)
        .hint("-m MODEL.gguf; or parity diff THIS RECORDING"));
    }
    let words = Words::of(options.model.as_deref())?;
    let said = Said::new(said, options.tokens.as_deref(), &words)?;
    let mut parts = Parts {
        candidate: side(&said, options),
        notes: said.notes(),
        allow_missing: options.allow_missing,
        ..Parts::default()
    };
    let mut comparison = Comparison::alone(logits(), vec![said.width().unwrap_or(0)]);
    match reference {
        Some(Beside::Recording(reference)) => comparison = compared(&said, reference, &mut parts)?,
        Some(Beside::Said(other)) => {
            let other = Said::new(other, options.tokens.as_deref(), &words)?;
            comparison = beside(&said, &other, &mut parts);
            parts.reference = Some(side(&other, options));
            parts.notes.extend(gguf.iter().flat_map(|gguf| tokens::said(&said.tokens, &other.tokens, gguf)));
        }
        None => {}
    }
    let against = model.map(|model| exact(&said, model, options.numerics)).transpose()?;
    parts.judgement.rows_audited = against.as_ref().map(|_| said.rows.len() as u64);
    parts.judgement.rows_screened = parts.judgement.rows_audited.map(|_| 0);
    let judged = verdict_of(against.as_ref(), &comparison);
    if let Some(found) = &against {
        parts.judgement.notes.push(found.told());
    }
    parts.judgement.judged.insert(logits(), judged);
    parts.comparisons = vec![comparison];
    Ok(numbers::assemble(parts))
}

fn logits() -> Checkpoint {
    Checkpoint::global(Kind::Logits)
}

fn side(said: &Said<'_>, options: &Options) -> Side {
    let file = options.model.as_deref().and_then(Path::file_name);
    Side {
        path: Some(said.source.path.display().to_string()),
        producer: Producer {
            name: said.source.producer.clone(),
            numerics: options.numerics.map(|numerics| numerics.to_string()),
            ..Producer::default()
        },
        model: ModelInfo {
            file: file.map(|name| name.to_string_lossy().into_owned()),
            ..ModelInfo::default()
        },
        tokens: said.tokens.len(),
        steps: vec![said.tokens.len()],
        ..Side::default()
    }
}

/// The values that were said against a recording's, at the rows that both have.
fn compared(said: &Said<'_>, reference: &Dump, parts: &mut Parts) -> Result<Comparison> {
    let theirs: &dyn Recording = reference;
    let common = common_positions(&said.tokens, theirs.tokens());
    if (common as usize) < said.tokens.len() {
        parts.gaps.push(Gap::other_tokens(&said.tokens, theirs.tokens()));
    }
    let shape = theirs.row_shape(logits());
    let mut comparison = Comparison::alone(logits(), shape.clone());
    let mut sums = Accumulator::new(Tolerance::default());
    let (mut seen, mut buffer) = (Seen { values: 0, of: 0, sum: None }, Vec::new());
    for row in said.rows.iter().filter(|row| row.position < common) {
        let Some(values) = theirs.row(logits(), row.position, &mut buffer) else { continue };
        let base: Vec<f64> = values.iter().map(|&z| f64::from(z)).collect();
        said.fits(row, base.len())?;
        let columns: Vec<usize> = row.known.iter().map(|(column, _)| *column).collect();
        let (own, other): (Vec<f32>, Vec<f32>) =
            row.nearest(&base).iter().zip(&columns).map(|(z, column)| (*z as f32, values[*column])).unzip();
        sums.row_at(row.position, &columns, &own, &other);
        comparison.rows_compared += 1;
        seen.values += columns.len() as u64;
        seen.of += base.len() as u64;
    }
    comparison.rows_expected = comparison.rows_compared;
    comparison.seen = Some(seen);
    comparison.numbers = sums.numbers(&shape);
    parts.reference = Some(verdict::side(theirs, Some(reference.path().display().to_string())));
    Ok(comparison)
}

/// What two engines said of the same tokens behind the same ones, in the columns that both named.
fn beside(said: &Said<'_>, other: &Said<'_>, parts: &mut Parts) -> Comparison {
    let common = common_positions(&said.tokens, &other.tokens);
    if (common as usize) < said.tokens.len().max(other.tokens.len()) {
        parts.gaps.push(Gap::other_tokens(&said.tokens, &other.tokens));
    }
    let mut comparison = Comparison::alone(logits(), vec![said.width().unwrap_or(0)]);
    let mut sums = Accumulator::new(Tolerance::default());
    let mut seen = Seen { values: 0, of: 0, sum: None };
    for row in said.rows.iter().filter(|row| row.position < common) {
        let Some(theirs) = other.rows.iter().find(|theirs| theirs.position == row.position) else { continue };
        let theirs: HashMap<usize, f64> = theirs.known.iter().copied().collect();
        let both = row.known.iter().filter_map(|(column, own)| Some((*column, *own, *theirs.get(column)?)));
        let both: Vec<(usize, f64, f64)> = both.collect();
        let columns: Vec<usize> = both.iter().map(|(column, ..)| *column).collect();
        let (own, theirs): (Vec<f32>, Vec<f32>) =
            both.iter().map(|(_, own, theirs)| (*own as f32, *theirs as f32)).unzip();
        if columns.is_empty() {
            continue;
        }
        sums.row_at(row.position, &columns, &own, &theirs);
        comparison.rows_compared += 1;
        seen.values += columns.len() as u64;
        seen.of += row.known.len() as u64;
    }
    comparison.rows_expected = said.rows.len() as u64;
    comparison.seen = Some(seen);
    comparison.numbers = sums.numbers(&[said.width().unwrap_or(0)]);
    comparison
}

/// How far what was said is from an exact forward pass.
struct Against {
    numerics: Numerics,
    own: OwnDistance,
    worst: Vec<usize>,
    rows: u64,
    /// More exact arithmetics that do not explain it, and how many times what rounding explains in each it is.
    refuted: Vec<(Numerics, f64)>,
}

impl Against {
    /// In which arithmetic it was judged, and what would follow if it were another.
    fn told(&self) -> String {
        let judged = format!("judged in the arithmetic `{}`", self.numerics);
        let of = |(numerics, over): &(Numerics, f64)| format!("`{numerics}` ({} times over)", number(*over));
        let refuted: Vec<String> = self.refuted.iter().map(of).collect();
        match refuted.is_empty() || !(self.own.over <= 1.0) {
            true => judged,
            false => format!(
                "{judged}, the most exact one whose rounding explains it; that of {} does not: where the engine computes \
                 in one of these, --numerics declares it, and the engine is wrong",
                refuted.join(", ")
            ),
        }
    }
}

/// In the sharpest arithmetic that explains it, or the coarsest.
fn exact(said: &Said<'_>, gguf: &Gguf, declared: Option<Numerics>) -> Result<Against> {
    let known = said.source.arithmetics.iter().filter_map(|words| words.parse().ok());
    let arithmetics: Vec<Numerics> = declared.map_or_else(|| known.collect(), |declared| vec![declared]);
    let first = said.rows.first().map_or(0, |row| row.position as usize);
    let prompt = Prompt::new(gguf, &said.tokens, true, first)?;
    let pass = |numerics: Option<Numerics>| -> Result<Vec<Vec<f64>>> {
        let (mut found, ids) = (HashMap::new(), HashSet::from([logits()]));
        simulated(&prompt, &prompt.steps(), gguf, &[numerics], &ids, &mut |row| {
            found.insert(row.position, row.values.to_vec());
        })?;
        Ok(said.rows.iter().map(|row| found.remove(&row.position).unwrap_or_default()).collect())
    };
    let base = pass(None)?;
    let (mut found, mut refuted) = (None, Vec::new());
    for numerics in arithmetics {
        let against = distance(said, &base, &pass(Some(numerics))?, numerics)?;
        let over = against.own.over;
        found = Some(against);
        if over <= 1.0 {
            break;
        }
        refuted.push((numerics, over));
    }
    found
        .map(|found: Against| Against { refuted, ..found })
        .ok_or_else(|| Error::file(&said.source.path, "no arithmetic was tried"))
}

fn distance(
    said: &Said<'_>,
    base: &[Vec<f64>],
    disturbed: &[Vec<f64>],
    numerics: Numerics,
) -> Result<Against> {
    let mut spreads = Vec::with_capacity(base.len());
    for ((row, exact), other) in said.rows.iter().zip(base).zip(disturbed) {
        said.fits(row, exact.len())?;
        spreads.push(row.spread(exact, other));
    }
    let mean = (spreads.iter().map(|s| s * s).sum::<f64>() / spreads.len().max(1) as f64).sqrt();
    let mut worst: Option<(OwnDistance, Vec<usize>)> = None;
    for ((row, exact), spread) in said.rows.iter().zip(base).zip(&spreads) {
        let (distance, column) = row.distance(exact);
        let band = CONFIDENCE * spread.max(mean);
        let over = if distance == 0.0 { 0.0 } else { distance / band };
        // A NaN is the worst, and stays it.
        if worst.as_ref().is_none_or(|(known, _)| !known.over.is_nan() && !(over <= known.over)) {
            worst = Some((OwnDistance { distance, band, over }, vec![row.position as usize, column]));
        }
    }
    let (own, worst) = worst.ok_or_else(|| Error::file(&said.source.path, "holds no row"))?;
    Ok(Against { numerics, own, worst, rows: base.len() as u64, refuted: Vec::new() })
}

fn verdict_of(against: Option<&Against>, comparison: &Comparison) -> Judged {
    use CheckpointVerdict::{Match, Nonfinite, Origin, Undecided};
    let equal = comparison
        .numbers
        .as_ref()
        .is_some_and(|numbers| numbers.abs_err_max == 0.0 && numbers.nonfinite.candidate == 0);
    let distance = comparison.numbers.as_ref().map(|numbers| numbers.rel_l2);
    let local = against.map(|found| LocalError {
        rel_l2: found.own.distance,
        over_bound: found.own.over,
        bound_rel_l2: Some(found.own.band),
        worst: found.worst.clone(),
        rows: found.rows,
        ..LocalError::default()
    });
    let carried =
        against.map(|found| Carried { candidate: Some(found.own), apart: found.own.band, size: 1.0 });
    let (verdict, why) = match (&local, carried) {
        (Some(local), _) if local.rel_l2.is_nan() => {
            let count = crate::dump::Unfinite::unknown(1);
            (Nonfinite, Why::Nonfinite { count, from: "among the values that were said" })
        }
        (Some(local), _) if !(local.over_bound <= 1.0) => {
            (Origin, against.map_or(Why::Differs, |found| Why::BeyondPass(found.own)))
        }
        _ if equal => (Match, Why::Equal),
        (Some(_), Some(carried)) => {
            let sharp = carried.is_sharp();
            let why = Why::Carried { carried, distance: None, sharp, local: Box::new(Why::Alone) };
            (if sharp { Match } else { Undecided }, why)
        }
        _ => (Undecided, distance.map_or(Why::NotRecorded, |_| Why::Differs)),
    };
    Judged { verdict, why, local: Local { candidate: local, reference: None } }
}
