//! Which known mistake explains what an engine said, where none of its intermediate tensors is there.
//!
//! A mistake is a rewrite of the graph, so what an engine would say with each can be computed. What it said is forced:
//! one prefill of prompt and output gives the logits that a hypothesis has at every place. Every kind of evidence says how
//! well logits explain it (`evidence`), one list has the hypotheses (`hypotheses`), and `answer` says what follows.

mod answer;
mod discriminate;
mod evidence;
mod hidden;
mod hypotheses;
mod input;
mod passes;
mod said;
mod tokens;

pub use answer::Answer;
pub use evidence::{Evidence, Sampling};
pub use hidden::hidden;
pub use input::{Observed, ids, observed};
pub use said::{Guess, render};

use crate::error::Result;
use crate::gguf::Gguf;
use answer::Tried;
use evidence::{Noise, Score};
use hypotheses::{Change, EXACT, HEALTHY, Hypothesis, Layers, Rows, WAYS};
use passes::Prompt;

/// Rows after which a hypothesis that does not explain them is given up.
const FEW: usize = 8;
/// Rows among them that something else than the hypothesis may have gone wrong in.
const STRAY: usize = 1;
/// Hypotheses that a single layer is looked for with, times layers: beyond, the search takes longer than anybody waits.
const SINGLE_MAX: usize = 4096;

/// Hypotheses that one prompt is looked for that tells them apart.
const SEVERAL_MAX: usize = 4;

/// What is known of a run.
pub struct Known<'a> {
    /// The model.
    pub gguf: &'a Gguf,
    /// (P,) tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Its text, where it was given as one.
    pub text: Option<String>,
    /// Tokens behind the prompt, as they were seen.
    pub forced: Vec<u32>,
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
    let search = Search::new(known, evidence, progress)?;
    let (mut tried, noise) = search.healthy();
    let mut all = hypotheses::everywhere(&search.full.labelled);
    all.extend(tokens::variants(known)?);
    let whole: Vec<Hypothesis> = hypotheses::everywhere(&search.full.labelled);
    tried.extend(search.each(all, &noise)?);
    let mut found = answer::answer(&mut tried, &noise);
    let mut notes = Vec::new();
    for stage in [Stage::Parts, Stage::Single] {
        if found != Answer::Nothing {
            break;
        }
        let mut more = stage.of(&whole, search.full.layers());
        if stage == Stage::Parts {
            more.extend(hypotheses::skipped(&search.full.labelled));
        }
        if stage == Stage::Single && more.len() > SINGLE_MAX {
            let not = "mistakes in one layer between the first and the last were not tried: there are";
            notes.push(format!(
                "{not} {}, and no more than {SINGLE_MAX} are; --hidden finds the layer",
                more.len()
            ));
            break;
        }
        tried.extend(search.each(more, &noise)?);
        found = answer::answer(&mut tried, &noise);
    }
    notes.push(
        "mistakes that leave a prefill as it is (attn.stale_cache, attn.self_only) were not tried".to_owned(),
    );
    let mut said = said::said(known, evidence, &found, &tried);
    said.notes = notes;
    if let (Answer::Several(which), true) = (&found, discriminate) {
        let which: Vec<&Hypothesis> = which.iter().map(|&i| &tried[i].hypothesis).take(SEVERAL_MAX).collect();
        said.apart(discriminate::apart(known, &which)?, which.len());
    }
    Ok(said)
}

/// What is tried where nothing before explains the output.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// Mistakes in some of the layers, or in one of prefill and decode.
    Parts,
    /// Mistakes in one layer.
    Single,
}

impl Stage {
    fn of(self, whole: &[Hypothesis], layers: u32) -> Vec<Hypothesis> {
        let parts: Vec<(Layers, Rows)> = match self {
            Stage::Parts => [Layers::First, Layers::Last, Layers::Odd, Layers::Even]
                .into_iter()
                .map(|layers| (layers, Rows::All))
                .chain([(Layers::All, Rows::Decode), (Layers::All, Rows::Prefill)])
                .collect(),
            Stage::Single => {
                (1..layers.saturating_sub(1)).map(|layer| (Layers::One(layer), Rows::All)).collect()
            }
        };
        let made = whole.iter().flat_map(|one| {
            parts.iter().filter_map(|&(at, rows)| hypotheses::part(one, at, rows, layers)).collect::<Vec<_>>()
        });
        made.collect()
    }
}

/// What every hypothesis is tried on.
struct Search<'a> {
    known: &'a Known<'a>,
    evidence: &'a dyn Evidence,
    progress: Progress<'a>,
    /// All rows.
    full: Prompt<'a>,
    /// The first few, where there are more.
    few: Option<Prompt<'a>>,
}

impl<'a> Search<'a> {
    fn new(known: &'a Known<'a>, evidence: &'a dyn Evidence, progress: Progress<'a>) -> Result<Search<'a>> {
        let prompt = |rows: usize| Search::prompt(known, evidence, &known.prompt, rows);
        let (full, rows) = (prompt(evidence.rows())?, evidence.rows());
        let few = (rows > 2 * FEW).then(|| prompt(FEW)).transpose()?;
        Ok(Search { known, evidence, progress, full, few })
    }

    /// The first rows of the evidence, behind a prompt.
    fn prompt(known: &Known<'a>, evidence: &dyn Evidence, prompt: &[u32], rows: usize) -> Result<Prompt<'a>> {
        let behind = known.forced.iter().copied();
        // Other prompts may be of another length.
        let end = evidence.first() + rows + prompt.len() - known.prompt.len();
        let tokens: Vec<u32> = prompt.iter().copied().chain(behind).take(end).collect();
        Prompt::new(known.gguf, &tokens, prompt.len(), rows)
    }

    /// A healthy engine in each arithmetic, and how far these lie apart.
    fn healthy(&self) -> (Vec<Tried>, Noise) {
        let ways: Vec<Hypothesis> = WAYS.into_iter().map(Hypothesis::healthy).collect();
        let asked: Vec<&Hypothesis> = ways.iter().collect();
        let mut logits = self.full.logits(&asked).into_iter().map(Option::unwrap_or_default);
        let exact = logits.next().unwrap_or_default();
        let others: Vec<Vec<f32>> = logits.collect();
        let noise = Noise::new(self.full.width, &exact, &others);
        let all = std::iter::once((Hypothesis::healthy(EXACT), &exact)).chain(ways.into_iter().zip(&others));
        let tried = all.map(|(hypothesis, logits)| {
            let score = self.evidence.weigh(logits, &noise);
            Tried { hypothesis, score, whole: true }
        });
        (tried.collect(), noise)
    }

    /// Tries hypotheses: all on a few rows, and on all rows those that explain these.
    fn each(&self, all: Vec<Hypothesis>, noise: &Noise) -> Result<Vec<Tried>> {
        let (count, mut done) = (all.len(), 0);
        let (of_tokens, of_nodes): (Vec<Hypothesis>, Vec<Hypothesis>) =
            all.into_iter().partition(|one| matches!(one.change, Change::Tokens(_)));
        let mut out = Vec::with_capacity(count);
        let mut best: (f64, String) = (f64::NEG_INFINITY, String::new());
        let mut tell = |tried: &Tried| {
            done += 1;
            if tried.score.log_likelihood > best.0 && tried.hypothesis.name != HEALTHY {
                best = (tried.score.log_likelihood, tried.hypothesis.name.clone());
            }
            (self.progress)(done, count, &best.1);
        };
        let (mut open, short) = match &self.few {
            None => (of_nodes, Vec::new()),
            Some(few) => self.after_few(few, of_nodes, noise, &mut tell),
        };
        out.extend(short);
        while !open.is_empty() {
            let rest = open.split_off(self.full.at_once().min(open.len()));
            let batch: Vec<&Hypothesis> = open.iter().collect();
            let scores: Vec<Score> = self.scores(&self.full, &batch, noise);
            for (hypothesis, score) in open.into_iter().zip(scores) {
                let tried = Tried { hypothesis, score, whole: true };
                tell(&tried);
                out.push(tried);
            }
            open = rest;
        }
        for hypothesis in of_tokens {
            let Change::Tokens(prompt) = &hypothesis.change else { continue };
            let rows = self.evidence.rows();
            // A shorter prompt has no rows for what was seen of its first tokens.
            let pass = match self.evidence.first() + prompt.len() >= self.known.prompt.len() {
                true => Some(Search::prompt(self.known, self.evidence, prompt, rows)?),
                false => None,
            };
            let logits = pass.and_then(|pass| pass.logits(&[]).into_iter().next().flatten());
            let score = logits.map(|logits| self.evidence.weigh(&logits, noise)).unwrap_or_default();
            let tried = Tried { hypothesis, score, whole: true };
            tell(&tried);
            out.push(tried);
        }
        Ok(out)
    }

    /// Those that are not hopeless after a few rows, and those that are.
    fn after_few(
        &self,
        few: &Prompt<'_>,
        all: Vec<Hypothesis>,
        noise: &Noise,
        tell: &mut dyn FnMut(&Tried),
    ) -> (Vec<Hypothesis>, Vec<Tried>) {
        let (mut open, mut short) = (Vec::new(), Vec::new());
        // The same mistakes in the shorter graph, whose nodes are others.
        let shorter = hypotheses::again(&few.labelled, few.layers(), &all.iter().collect::<Vec<_>>());
        let mut queue: Vec<(Hypothesis, Hypothesis)> = Vec::new();
        for (one, shorter) in all.into_iter().zip(shorter) {
            match shorter {
                Some(shorter) => queue.push((one, shorter)),
                None => open.push(one),
            }
        }
        while !queue.is_empty() {
            let rest = queue.split_off(few.at_once().min(queue.len()));
            let batch: Vec<&Hypothesis> = queue.iter().map(|(_, shorter)| shorter).collect();
            let scores = self.scores(few, &batch, noise);
            for ((one, _), score) in queue.into_iter().zip(scores) {
                if score.hits + STRAY >= score.of {
                    open.push(one);
                    continue;
                }
                let tried = Tried { hypothesis: one, score, whole: false };
                tell(&tried);
                short.push(tried);
            }
            queue = rest;
        }
        (open, short)
    }

    fn scores(&self, pass: &Prompt<'_>, batch: &[&Hypothesis], noise: &Noise) -> Vec<Score> {
        let logits = pass.logits(batch).into_iter().skip(1);
        // One that no node has a place for explains nothing.
        logits
            .map(|found| found.map(|logits| self.evidence.weigh(&logits, noise)).unwrap_or_default())
            .collect()
    }
}
