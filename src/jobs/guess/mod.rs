//! Which known mistake explains what an engine said, where none of its intermediate tensors is there.
//!
//! A mistake is a rewrite of the graph, so what an engine would say with each can be computed. What it said is forced:
//! one prefill of prompt and output gives the logits that a hypothesis has at every place. Every kind of evidence says how
//! well logits explain it (`evidence`), one list has the hypotheses (`hypotheses`), and `answer` says what follows.

mod answer;
mod batches;
mod discriminate;
mod evidence;
mod exchanged;
mod hidden;
mod hypotheses;
mod input;
mod passes;
mod said;
mod search;
mod searched;
mod spelling;
mod steps;
mod tokens;
mod ways;

pub use answer::Answer;
pub use evidence::{Evidence, Sampling};
pub use hidden::hidden;
pub use input::{Observed, Read, ids, observed};
pub use said::{Guess, render};

use crate::engine::op_by_op::Multiplier;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use answer::Tried;
use evidence::Noise;
use hypotheses::{HEALTHY, Hypothesis, Layers, Rows};
use parity_dump::Dump;
use search::Search;

/// Multiplications that one stage of the search may take: some minutes of two cores.
const WORK_MAX: f64 = 1e13;
/// The same of mistakes in one kind of nodes, where a healthy engine explains the output, if only in a coarse arithmetic.
const WORK_OF_HEALTHY: f64 = WORK_MAX / 10.0;

/// Hypotheses that one prompt is looked for that tells them apart.
const SEVERAL_MAX: usize = 8;

/// What is known of a run.
pub struct Known<'a> {
    /// The model.
    pub gguf: &'a Gguf,
    /// Who multiplies by its weights, where that is not the CPU.
    pub multiplier: Option<&'a dyn Multiplier>,
    /// (P,) tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Its text, where it was given as one.
    pub text: Option<String>,
    /// Tokens behind the prompt, as they were seen.
    pub forced: Vec<u32>,
    /// How many of all these were computed together, step after step, where that was told; the prompt, then one after the
    /// other, where it was not.
    pub steps: Option<Vec<usize>>,
    /// Other files that the engine may have loaded in place of the model.
    pub others: &'a [Gguf],
    /// A recording whose graph is executed, of an architecture that parity has no builder for.
    pub recording: Option<&'a Dump>,
}

/// A model file, and who multiplies by its weights.
#[derive(Clone, Copy)]
pub struct Model<'a> {
    /// The file.
    pub gguf: &'a Gguf,
    /// In place of the CPU.
    pub multiplier: Option<&'a dyn Multiplier>,
}

impl Model<'_> {
    /// Batches of hypotheses that are computed at a time: on the CPU alone one keeps all cores busy, and decodes each weight once.
    fn side_by_side(&self) -> usize {
        self.multiplier.map_or(1, |_| batches::side_by_side())
    }
}

impl<'a> Known<'a> {
    fn model(&self) -> Model<'a> {
        Model { gguf: self.gguf, multiplier: self.multiplier }
    }

    fn refuse_other_vocabularies(&self) -> Result<()> {
        let width = input::vocabulary(self.gguf);
        match self.others.iter().find(|other| input::vocabulary(other) != width) {
            Some(other) => Err(Error::file(other.path(), "has another vocabulary than the model")
                .expected(format!("{width} tokens"))
                .found(input::vocabulary(other))),
            None => Ok(()),
        }
    }

    /// How many tokens each step computes.
    fn steps(&self) -> Vec<usize> {
        let given = self.steps.clone();
        given.unwrap_or_else(|| steps::one_by_one(self.prompt.len(), self.forced.len()))
    }
}

/// Tells how far it is: hypotheses done, of how many, and the best so far.
pub type Progress<'a> = &'a (dyn Fn(usize, usize, &str) + Sync);

/// Tries every hypothesis; where several explain the output, and that is asked for, looks for a prompt that tells them
/// apart.
///
/// # Errors
/// An architecture without a builder, tokens beyond the vocabulary.
pub fn guess(
    known: &Known<'_>,
    evidence: &dyn Evidence,
    discriminate: bool,
    progress: Progress<'_>,
) -> Result<Guess> {
    guess_in(known, (evidence, false), discriminate, progress)
}

/// What was seen may be `respelt` already.
fn guess_in(
    known: &Known<'_>,
    (evidence, respelt): (&dyn Evidence, bool),
    discriminate: bool,
    progress: Progress<'_>,
) -> Result<Guess> {
    known.refuse_other_vocabularies()?;
    let search = Search::new(known, evidence, progress)?;
    let (mut tried, noise) = search.healthy()?;
    if let (false, Some(spelling)) = (respelt, search.spelling(&tried, &noise)?) {
        let (prompt, text, forced) = (known.prompt.clone(), known.text.clone(), spelling.tokens().to_vec());
        let known = Known { prompt, text, forced, steps: None, ..*known };
        return guess_in(&known, (&*spelling, true), discriminate, progress);
    }
    let mut all = hypotheses::everywhere(&search.full.labelled);
    let mut notes = Vec::new();
    match known.recording {
        Some(_) => notes.push(
            "the graph is the recording's: other tokens and layers run twice were not tried".to_owned(),
        ),
        None => all.extend(tokens::variants(known)?),
    }
    all.extend(known.others.iter().enumerate().map(|(number, file)| Hypothesis::weights(number, file)));
    tried.extend(search.each(all, &noise, &tried)?);
    let found = search.answer(&mut tried, &noise)?;
    let mut found = in_steps(&search, &mut tried, &noise, found, &mut notes)?;
    for stage in [Stage::Parts, Stage::Single, Stage::Kinds, Stage::Numbers] {
        let is_open = stage.is_asked(evidence, &found) && is_open(&found, &tried, evidence.ceiling(&noise));
        let is_extra = stage == Stage::Kinds && found == Answer::Healthy;
        let most = if is_extra { WORK_OF_HEALTHY } else { WORK_MAX };
        let why = match is_open.then(|| stage.all(&search, &noise, most)) {
            Some(Some(more)) => {
                tried.extend(search.each(more, &noise, &tried)?);
                found = search.answer(&mut tried, &noise)?;
                continue;
            }
            Some(None) => "they are too many to be computed; --hidden finds the layer",
            None => "the output says too little of them",
        };
        if [Answer::Healthy, Answer::Nothing].contains(&found) {
            notes.push(format!("{} were not tried: {why}", stage.words()));
        }
    }
    if found == Answer::Nothing
        && let Some(alone) = in_decode(known, evidence, &tried, progress)?
    {
        return Ok(alone);
    }
    if let Some(why) = known.multiplier.and_then(|multiplier| multiplier.failed()) {
        notes.push(format!("the CPU computed what the GPU did not: {why}"));
    }
    let mut said = said::said(known, evidence, &found, &tried);
    said.notes = notes;
    if let (Answer::Several(which), true) = (&found, discriminate && known.recording.is_none()) {
        let which: Vec<&Hypothesis> = which.iter().map(|&i| &tried[i].hypothesis).take(SEVERAL_MAX).collect();
        said.apart(discriminate::apart(known, &which)?, which.len());
    }
    Ok(said)
}

/// What follows with mistakes as an engine makes them that computes one step after the other. A single pass excludes none that
/// depends on which rows are computed together: a healthy answer says whether these would show.
fn in_steps(
    search: &Search<'_>,
    tried: &mut Vec<Tried>,
    noise: &Noise,
    found: Answer,
    notes: &mut Vec<String>,
) -> Result<Answer> {
    let is_open = is_open(&found, tried, search.evidence.ceiling(noise));
    let stepwise = match is_open || found == Answer::Healthy {
        true => search.stepwise(tried, noise, !is_open)?,
        false => Vec::new(),
    };
    if stepwise.is_empty() || !is_open {
        notes.push(STEPWISE_LEFT_OUT.to_owned());
    }
    if stepwise.is_empty() {
        return Ok(found);
    }
    tried.extend(stepwise);
    search.answer(tried, noise)
}

/// A mistake in decode steps alone, where nobody told which rows are of them: those from the first on that a healthy engine
/// does not explain.
fn in_decode(
    known: &Known<'_>,
    evidence: &dyn Evidence,
    tried: &[Tried],
    progress: Progress<'_>,
) -> Result<Option<Guess>> {
    let healthy = tried.iter().filter(|one| one.hypothesis.name == HEALTHY);
    let miss = healthy.filter_map(|one| one.score.first_miss).max();
    let first =
        miss.map(|row| evidence.first() + row).filter(|first| (1..known.prompt.len()).contains(first));
    let is_told = known.steps.is_some() || !known.forced.is_empty() || known.recording.is_some();
    let Some(first) = first.filter(|_| !is_told) else { return Ok(None) };
    let (prompt, forced) = known.prompt.split_at(first);
    let known = Known { prompt: prompt.to_vec(), forced: forced.to_vec(), text: None, steps: None, ..*known };
    let search = Search::new(&known, evidence, progress)?;
    let (mut tried, noise) = search.healthy()?;
    let layers = search.full.layers();
    let all = hypotheses::everywhere(&search.full.labelled);
    let parts = all.iter().filter_map(|one| hypotheses::part(one, Layers::All, Rows::Decode, layers));
    tried.extend(search.each(parts.collect(), &noise, &tried)?);
    let mut found = search.answer(&mut tried, &noise)?;
    if found == Answer::Nothing {
        tried.extend(search.stepwise(&tried, &noise, false)?);
        found = search.answer(&mut tried, &noise)?;
    }
    let mut said = said::said(&known, evidence, &found, &tried);
    said.notes.push(format!(
        "rows from {first} on are taken for decode steps: the file does not say of which they are"
    ));
    Ok(matches!(found, Answer::Mistake(_)).then_some(said))
}

/// Whether something that was not tried yet may be named, where the best of explanations comes to `ceiling`, if that is known.
fn is_open(found: &Answer, tried: &[Tried], ceiling: f64) -> bool {
    match found {
        Answer::Healthy => answer::may_be_beaten(tried, ceiling),
        Answer::Nothing => !ceiling.is_finite() || answer::may_be_beaten(tried, ceiling),
        Answer::Mistake(_) | Answer::Several(_) => false,
    }
}

/// What is said where single steps behind the prompt were not tried.
const STEPWISE_LEFT_OUT: &str =
    "mistakes that show in decode steps alone (attn.stale_cache, attn.self_only) were not tried";

/// What is tried where nothing before explains the output.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// Mistakes in some of the layers, or in one of prefill and decode.
    Parts,
    /// Mistakes in one layer.
    Single,
    /// Mistakes in one kind of nodes, in one layer or in all, of those that several kinds have a place for.
    Kinds,
    /// Mistakes of a number that no list has, in all layers.
    Numbers,
}

impl Stage {
    /// Of so many hypotheses tokens may speak for one by chance; numbers do not.
    fn is_asked(self, evidence: &dyn Evidence, found: &Answer) -> bool {
        let is_numbers = evidence.tokens().is_empty();
        match self {
            Stage::Parts | Stage::Single => true,
            Stage::Kinds => is_numbers,
            Stage::Numbers => is_numbers && *found == Answer::Nothing,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Stage::Numbers => "mistakes of a number that no list has",
            Stage::Parts => "mistakes in some layers, or in one of prefill and decode steps alone,",
            Stage::Single => "mistakes in one layer between the first and the last",
            Stage::Kinds => "mistakes in one node of a layer of several that they may be in",
        }
    }

    /// Whether what happens to a whole layer is tried beside what happens in it.
    fn is_of(self, layer: Layers, layers: u32) -> bool {
        let at_end = layer == Layers::One(0) || layer == Layers::One(layers.saturating_sub(1));
        at_end == (self == Stage::Parts)
    }

    /// Its hypotheses; `None` where they would take more than so many multiplications.
    fn all(self, search: &Search<'_>, noise: &Noise, most: f64) -> Option<Vec<Hypothesis>> {
        let all = match self {
            Stage::Numbers => {
                return (search.work(searched::TRIED) <= most).then(|| searched::searched(search, noise));
            }
            Stage::Kinds => {
                let (labelled, layers) = (&search.full.labelled, search.full.layers());
                let all = hypotheses::everywhere(labelled);
                let of_kind = all.iter().flat_map(|one| hypotheses::by_kind(one, layers));
                of_kind.chain(exchanged::exchanged(labelled, layers)).collect()
            }
            Stage::Parts | Stage::Single => self.in_layers(search),
        };
        Some(all).filter(|all: &Vec<Hypothesis>| search.work(all.len()) <= most)
    }

    /// Mistakes in some layers, and what happens to whole ones.
    fn in_layers(self, search: &Search<'_>) -> Vec<Hypothesis> {
        let (labelled, layers) = (&search.full.labelled, search.full.layers());
        let parts: Vec<(Layers, Rows)> = if self == Stage::Parts {
            [Layers::First, Layers::Last, Layers::Odd, Layers::Even]
                .into_iter()
                .map(|layers| (layers, Rows::All))
                .chain([(Layers::All, Rows::Decode), (Layers::All, Rows::Prefill)])
                .collect()
        } else {
            (1..layers.saturating_sub(1)).map(|layer| (Layers::One(layer), Rows::All)).collect()
        };
        let made = hypotheses::everywhere(labelled).into_iter().flat_map(|one| {
            parts
                .iter()
                .filter_map(|&(at, rows)| hypotheses::part(&one, at, rows, layers))
                .collect::<Vec<_>>()
        });
        let whole_layers = hypotheses::skipped(labelled).into_iter().chain(hypotheses::repeated(layers));
        let can_be = |one: &Hypothesis| search.known.recording.is_none() || one.repeats().is_none();
        let whole_layers = whole_layers.filter(can_be).filter(|one| self.is_of(one.layers, layers));
        let scaled = (self == Stage::Parts).then(|| search.scaled()).flatten();
        made.chain(whole_layers).chain(scaled).collect()
    }
}
