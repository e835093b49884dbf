//! The search: every hypothesis on a few rows, those that explain these on all, and what follows.

use rayon::prelude::*;

use super::answer::{self, Answer, Tried};
use super::batches;
use super::evidence::{DOUBLINGS, Evidence, Noise, Score, apart, digest};
use super::hypotheses::{self, Change, HEALTHY, Hypothesis};
use super::input::weights;
use super::passes::Prompt;
use super::steps::{self, Steps};
use super::ways::{CACHES, EXACT, WAYS};
use super::{Known, Model, Progress};
use crate::error::Result;
use crate::numerics::Storage;
use crate::ops::bound::CONFIDENCE;

/// Rows after which a hypothesis that does not explain them is given up.
pub const FEW: usize = 8;
/// Rows among them that something else than the hypothesis may have gone wrong in.
const STRAY: usize = 1;
/// Share of tokens that a healthy engine chooses at least whose cache alone is another.
const KEPT: f64 = 0.5;
/// Hypotheses that are weighed by rounding of their own.
const NEAR: usize = 12;

/// What every hypothesis is tried on.
pub struct Search<'a> {
    /// What is known of the run.
    pub known: &'a Known<'a>,
    /// What was seen.
    pub evidence: &'a dyn Evidence,
    /// Is told how far it is.
    pub progress: Progress<'a>,
    /// All rows.
    pub full: Prompt<'a>,
    /// The first few, where there are more.
    pub few: Option<Prompt<'a>>,
}

impl<'a> Search<'a> {
    /// What follows, where nothing is named that sees in a single pass what it is to explain.
    pub fn answer(&self, tried: &mut Vec<Tried>, noise: &Noise) -> Result<Answer> {
        loop {
            let found = self.weighed_anew(tried, noise);
            let named = match &found {
                Answer::Mistake(best) => vec![*best],
                Answer::Several(all) => all.clone(),
                Answer::Healthy | Answer::Nothing => return Ok(found),
            };
            let ahead = self.foreseeing(tried, named, noise)?;
            if ahead.is_empty() {
                return Ok(found);
            }
            let one = |which| Hypothesis { stepwise: true, ..tried.remove(which).hypothesis };
            let open = ahead.into_iter().rev().map(one).collect();
            tried.extend(self.in_steps(open, noise)?);
        }
    }

    /// Those of the named whose logits follow from tokens behind them as well, in their order: an engine that says one token
    /// after the other cannot have them.
    fn foreseeing(&self, tried: &[Tried], mut named: Vec<usize>, noise: &Noise) -> Result<Vec<usize>> {
        let is_single = |one: &Hypothesis| one.nodes().is_some() && !one.stepwise;
        named.retain(|&i| is_single(&tried[i].hypothesis));
        if self.known.steps().len() < 2 || self.full.rows < 2 || self.known.recording.is_some() {
            return Ok(Vec::new());
        }
        let half = match &self.few {
            Some(_) => None,
            None => Some(self.rows_of(self.full.rows / 2)?),
        };
        let Some(shorter) = self.few.as_ref().or(half.as_ref()) else { return Ok(Vec::new()) };
        let which: Vec<&Hypothesis> = named.iter().map(|&i| &tried[i].hypothesis).collect();
        let again = hypotheses::again(&shorter.labelled, shorter.layers(), &which);
        let mut ahead = Vec::new();
        for (i, one) in named.into_iter().zip(again) {
            let logits = one.and_then(|one| shorter.logits(&[&one]).pop().flatten()).unwrap_or_default();
            let (all, few) = (&tried[i].score.digest, digest(&logits, shorter.width));
            let is_same = |from: &[f64]| apart(from, &few) <= CONFIDENCE * noise.digests[0];
            if few.is_empty() || !all.get(..few.len()).is_some_and(is_same) {
                ahead.push(i);
            }
        }
        ahead.sort_unstable();
        Ok(ahead)
    }

    /// What follows. Where nothing explains the output, the best are weighed once more by what rounding does to an engine
    /// with that mistake: it may move its logits farther than a healthy engine's.
    fn weighed_anew(&self, tried: &mut [Tried], noise: &Noise) -> Answer {
        let found = answer::answer(tried, noise);
        if found != Answer::Nothing {
            return found;
        }
        let healthy = tried.iter().filter(|one| one.hypothesis.name == HEALTHY);
        let least = healthy.map(|one| one.score.share()).fold(0.0, f64::max);
        let near = |one: &&mut Tried| {
            let is_node = one.hypothesis.nodes().is_some() && !one.hypothesis.stepwise;
            one.whole && is_node && one.score.otherwise.is_none() && one.score.share() >= least
        };
        for one in tried.iter_mut().filter(near).take(NEAR) {
            let ways: Vec<Hypothesis> =
                WAYS.into_iter().filter_map(|way| one.hypothesis.in_way(way)).collect();
            let asked: Vec<&Hypothesis> = std::iter::once(&one.hypothesis).chain(&ways).collect();
            let logits: Option<Vec<Vec<f32>>> = self.full.logits(&asked).into_iter().skip(1).collect();
            let Some((own, others)) = logits.as_ref().and_then(|all| all.split_first()) else { continue };
            let score = self.evidence.weigh(own, &Noise::new(self.full.width, own, others));
            if score.explains() {
                one.score = score;
            }
        }
        answer::answer(tried, noise)
    }

    /// The answer of hypotheses that are all that there are, where an audit may have accused what was seen.
    pub fn stretch(&self, all: Vec<Hypothesis>, is_accused: bool) -> Result<(Answer, Vec<Tried>)> {
        let (mut tried, noise) = self.healthy()?;
        // Coarser arithmetics than its own may explain it as well, but not as nearly.
        if is_accused && !tried.iter().any(|one| one.hypothesis.way.is_in_blocks()) {
            tried.extend(self.in_blocks(&noise)?);
        }
        tried.extend(self.each(all, &noise, &tried)?);
        let found = self.answer(&mut tried, &noise)?;
        Ok((found, tried))
    }

    /// Multiplications of so many hypotheses, each with a layer of its own to begin in: half of the graph on average.
    pub fn work(&self, hypotheses: usize) -> f64 {
        let tokens = self.few.as_ref().unwrap_or(&self.full).tokens;
        hypotheses as f64 * tokens as f64 * weights(self.known.gguf) / 2.0
    }

    pub fn new(
        known: &'a Known<'a>,
        evidence: &'a dyn Evidence,
        progress: Progress<'a>,
    ) -> Result<Search<'a>> {
        let prompt = |rows: usize| Search::prompt(known, evidence, (known.model(), &known.prompt), rows);
        let (full, rows) = (prompt(evidence.rows())?, evidence.rows());
        let few = (rows > 2 * FEW && known.recording.is_none()).then(|| prompt(FEW)).transpose()?;
        Ok(Search { known, evidence, progress, full, few })
    }

    /// The first rows of the evidence, behind a prompt.
    fn prompt(
        known: &Known<'a>,
        evidence: &dyn Evidence,
        (model, prompt): (Model<'a>, &[u32]),
        rows: usize,
    ) -> Result<Prompt<'a>> {
        let behind = known.forced.iter().copied();
        // Other prompts may be of another length.
        let end = evidence.first() + rows + prompt.len() - known.prompt.len();
        let tokens: Vec<u32> = prompt.iter().copied().chain(behind).take(end).collect();
        match known.recording.filter(|_| std::ptr::eq(model.gguf, known.gguf)) {
            Some(dump) => Prompt::recorded(model, dump, &tokens, prompt.len(), rows),
            None => Prompt::new(model, &tokens, prompt.len(), rows),
        }
    }

    /// More rows than a few and fewer than all: up to where a healthy engine fails, or half of them.
    fn more(&self, before: &[Tried]) -> Result<Option<Prompt<'a>>> {
        let healthy = before.iter().filter(|one| one.hypothesis.name == HEALTHY);
        let miss = healthy.max_by_key(|one| one.score.hits).and_then(|one| one.score.first_miss);
        let rows = miss.filter(|miss| *miss >= FEW).map_or(self.full.rows / 2, |miss| miss + 1);
        let is_worth_it = self.few.is_some() && (FEW + 1..self.full.rows - FEW / 2).contains(&rows);
        is_worth_it.then(|| self.rows_of(rows)).transpose()
    }

    /// The first rows of the evidence.
    fn rows_of(&self, rows: usize) -> Result<Prompt<'a>> {
        Search::prompt(self.known, self.evidence, (self.known.model(), &self.known.prompt), rows)
    }

    fn side_by_side(&self) -> usize {
        self.known.model().side_by_side()
    }

    /// The model file of a hypothesis.
    pub fn file(&self, one: &Hypothesis) -> Model<'a> {
        let other =
            if let Change::Weights(number) = one.change { self.known.others.get(number) } else { None };
        other.map_or(self.known.model(), |gguf| Model { gguf, multiplier: None })
    }

    /// A healthy engine in each arithmetic, and how far these lie apart.
    pub fn healthy(&self) -> Result<(Vec<Tried>, Noise)> {
        let mut ways: Vec<Hypothesis> = WAYS.into_iter().map(Hypothesis::healthy).collect();
        // Exact arithmetic is computed with each batch, and comes with the first of it.
        let with_exact = |ways: Vec<&Hypothesis>| -> Vec<(Vec<f32>, Option<Vec<f32>>)> {
            let mut found = self.full.logits(&ways).into_iter().map(Option::unwrap_or_default);
            let mut exact = found.next();
            found.map(|logits| (logits, exact.take())).collect()
        };
        let found =
            batches::each(ways.iter().collect(), (usize::MAX, self.side_by_side()), with_exact, |_| {});
        let (others, exact): (Vec<Vec<f32>>, Vec<Option<Vec<f32>>>) = found.into_iter().unzip();
        let exact = exact.into_iter().flatten().next().unwrap_or_default();
        let mut noise = Noise::new(self.full.width, &exact, &others);
        noise.doublings = DOUBLINGS;
        let beyond = self.full.beyond_f16();
        let is_narrow = |one: &Hypothesis| one.way.kept == Storage::F16;
        for (one, logits) in ways.iter_mut().zip(&others).filter(|(one, _)| is_narrow(one)) {
            if let (Some(text), true) = (&beyond, logits.iter().any(|z| z.is_nan())) {
                *one = Hypothesis::overflow(one.way, text.clone());
            }
        }
        let all = std::iter::once((Hypothesis::healthy(EXACT), exact)).chain(ways.into_iter().zip(others));
        let mut tried = self.weighed(all.collect(), &noise)?;
        let share = tried.iter().map(|one| one.score.share()).fold(0.0, f64::max);
        let is_near = self.evidence.tokens().is_empty() || share >= KEPT;
        if !tried.iter().any(Tried::explains) && is_near {
            tried.extend(self.in_blocks(&noise)?);
        }
        noise.doublings = 0;
        Ok((tried, noise))
    }

    /// A healthy engine behind each cache in blocks.
    fn in_blocks(&self, noise: &Noise) -> Result<Vec<Tried>> {
        let caches: Vec<Hypothesis> = CACHES.into_iter().map(Hypothesis::healthy).collect();
        let logits = self.full.logits(&caches.iter().collect::<Vec<_>>()).into_iter().skip(1);
        self.weighed(caches.into_iter().zip(logits.map(Option::unwrap_or_default)).collect(), noise)
    }

    /// Healthy hypotheses with their logits.
    fn weighed(&self, all: Vec<(Hypothesis, Vec<f32>)>, noise: &Noise) -> Result<Vec<Tried>> {
        let scores: Vec<Score> =
            all.par_iter().map(|(_, logits)| self.evidence.weigh(logits, noise)).collect();
        let one = |((hypothesis, _), score): ((Hypothesis, Vec<f32>), Score)| -> Result<Tried> {
            let mut score = self.spelt(&hypothesis, score, noise)?;
            if hypothesis.name != HEALTHY {
                // It was computed that it happens; of other mistakes that come to NaN nobody knows that.
                score.log_likelihood += 2.0 * answer::LIKELIER.ln();
            }
            Ok(Tried { hypothesis, score, whole: true })
        };
        all.into_iter().zip(scores).map(one).collect()
    }

    /// Tries hypotheses: all on a few rows, those that explain these on more, and on all rows those that explain these too.
    pub fn each(&self, all: Vec<Hypothesis>, noise: &Noise, before: &[Tried]) -> Result<Vec<Tried>> {
        let (count, mut done) = (all.len(), 0);
        let (of_tokens, of_nodes): (Vec<Hypothesis>, Vec<Hypothesis>) =
            all.into_iter().partition(|one| matches!(one.change, Change::Tokens(_) | Change::Weights(_)));
        let mut out = Vec::with_capacity(count);
        let mut best: (f64, String) = (f64::NEG_INFINITY, String::new());
        let mut tell = |one: &Hypothesis, score: &Score| {
            done += 1;
            if score.log_likelihood > best.0 && one.name != HEALTHY {
                best = (score.log_likelihood, one.name.clone());
            }
            (self.progress)(done, count, &best.1);
        };
        let mut open = of_nodes;
        // Where nothing can be better than a healthy engine, whatever misses one row is excluded.
        let is_shut = before.iter().any(|one| one.hypothesis.name == HEALTHY && one.explains())
            && !answer::may_be_beaten(before, self.evidence.ceiling(noise));
        let stray = if is_shut { 0 } else { STRAY };
        let more = self.more(before)?;
        for few in self.few.iter().chain(&more) {
            let (rest, short) = self.after_few((few, stray), open, noise, &mut tell);
            open = rest;
            out.extend(short);
        }
        let whole = |batch: Vec<Hypothesis>| -> Vec<Result<Tried>> {
            let scores = self.scores(&self.full, &batch.iter().collect::<Vec<_>>(), noise);
            let spelt = |(hypothesis, score): (Hypothesis, Score)| {
                let score = self.spelt(&hypothesis, score, noise)?;
                Ok(Tried { hypothesis, score, whole: true })
            };
            batch.into_iter().zip(scores).map(spelt).collect()
        };
        let other = |batch: Vec<Hypothesis>| -> Vec<Result<Tried>> {
            batch.into_iter().map(|one| self.of_another(one, noise, stray)).collect()
        };
        let mut come = |found: &[Result<Tried>]| {
            found.iter().flatten().for_each(|one| tell(&one.hypothesis, &one.score));
        };
        let mut found = batches::each(open, (self.full.at_once(), self.side_by_side()), whole, &mut come);
        found.extend(batches::each(of_tokens, (1, self.side_by_side()), other, &mut come));
        out.extend(found.into_iter().collect::<Result<Vec<Tried>>>()?);
        Ok(out)
    }

    /// Other tokens, or another file, on a few rows, and on all where it explains these.
    fn of_another(&self, hypothesis: Hypothesis, noise: &Noise, stray: usize) -> Result<Tried> {
        let (prompt, all) = (hypothesis.prompt(&self.known.prompt), self.evidence.rows());
        // A shorter prompt has no rows for what was seen of its first tokens.
        let has_rows = self.evidence.first() + prompt.len() >= self.known.prompt.len();
        let (mut score, few) = (Score::default(), self.few.iter().map(|few| few.rows));
        for rows in few.chain([all]).filter(|_| has_rows) {
            let pass = Search::prompt(self.known, self.evidence, (self.file(&hypothesis), prompt), rows)?;
            let logits = pass.alone(&Hypothesis::healthy(EXACT));
            score = logits.map(|logits| self.evidence.weigh(&logits, noise)).unwrap_or_default();
            if rows < all && score.hits + stray < score.of && score.otherwise.is_none() {
                return Ok(Tried { hypothesis, score, whole: false });
            }
        }
        let score = self.spelt(&hypothesis, score, noise)?;
        Ok(Tried { hypothesis, score, whole: true })
    }

    /// Mistakes that depend on which rows are computed together, as an engine makes them that computes one step after the
    /// other, but for those that were tried so; none where there is one step. Those alone that depend on rows of one step, or
    /// those too that show in later steps alone.
    pub fn stepwise(&self, before: &[Tried], noise: &Noise, by_row: bool) -> Result<Vec<Tried>> {
        if self.known.steps().len() < 2 || self.full.rows < 2 || self.known.recording.is_some() {
            return Ok(Vec::new());
        }
        let mut open = steps::stepwise(self.known.model(), &self.known.prompt)?;
        let is_known = |one: &Hypothesis| {
            before.iter().any(|known| known.hypothesis.stepwise && known.hypothesis.key == one.key)
        };
        open.retain(|one| !is_known(one) && (!by_row || steps::is_by_row(one)));
        self.in_steps(open, noise)
    }

    /// Hypotheses step after step: on a few rows, and on all where they explain these.
    fn in_steps(&self, mut open: Vec<Hypothesis>, noise: &Noise) -> Result<Vec<Tried>> {
        let (known, from, rows) = (self.known, self.evidence.first(), self.full.rows);
        let lengths = known.steps();
        let steps = Steps { lengths: &lengths, prompt: known.prompt.len(), from };
        let all: Vec<u32> = known.prompt.iter().chain(&known.forced).copied().collect();
        let mut out = Vec::new();
        for rows in [rows.min(FEW), rows] {
            if open.is_empty() {
                break;
            }
            let ids = &all[..from + rows];
            let computed = |batch: Vec<Hypothesis>| -> Vec<Result<(Hypothesis, Option<Vec<f32>>)>> {
                let which: Vec<&Hypothesis> = batch.iter().collect();
                match steps::logits(known.model(), ids, steps, &which) {
                    Ok(logits) => batch.into_iter().zip(logits).map(Ok).collect(),
                    Err(error) => vec![Err(error)],
                }
            };
            for found in
                batches::each(std::mem::take(&mut open), (usize::MAX, self.side_by_side()), computed, |_| {})
            {
                let (hypothesis, logits) = found?;
                let score = logits.map(|logits| self.evidence.weigh(&logits, noise)).unwrap_or_default();
                let whole = rows == self.full.rows;
                if !whole && (score.explains() || score.otherwise.is_some()) {
                    open.push(hypothesis);
                    continue;
                }
                let score = if whole { self.spelt(&hypothesis, score, noise)? } else { score };
                out.push(Tried { hypothesis, score, whole });
            }
        }
        Ok(out)
    }

    /// Those that are not hopeless after a few rows, and those that are.
    fn after_few(
        &self,
        (few, stray): (&Prompt<'_>, usize),
        all: Vec<Hypothesis>,
        noise: &Noise,
        tell: &mut dyn FnMut(&Hypothesis, &Score),
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
        let is_open = |score: &Score| score.hits + stray >= score.of || score.otherwise.is_some();
        let scored = |batch: Vec<(Hypothesis, Hypothesis)>| -> Vec<(Hypothesis, Score)> {
            let shorter: Vec<&Hypothesis> = batch.iter().map(|(_, shorter)| shorter).collect();
            let scores = self.scores(few, &shorter, noise);
            batch.into_iter().map(|(one, _)| one).zip(scores).collect()
        };
        let found = batches::each(queue, (few.at_once(), self.side_by_side()), scored, |found| {
            found.iter().filter(|(_, score)| !is_open(score)).for_each(|(one, score)| tell(one, score));
        });
        for (hypothesis, score) in found {
            match is_open(&score) {
                true => open.push(hypothesis),
                false => short.push(Tried { hypothesis, score, whole: false }),
            }
        }
        (open, short)
    }

    /// All logits multiplied by what fits best, where numbers were seen.
    pub fn scaled(&self) -> Option<Hypothesis> {
        let exact = self.full.alone(&Hypothesis::healthy(EXACT))?;
        hypotheses::scaled(&self.full.labelled, self.evidence.factor(&exact)?)
    }

    fn scores(&self, pass: &Prompt<'_>, batch: &[&Hypothesis], noise: &Noise) -> Vec<Score> {
        let logits = pass.logits(batch).into_par_iter().skip(1);
        // One that no node has a place for explains nothing.
        logits
            .map(|found| found.map(|logits| self.evidence.weigh(&logits, noise)).unwrap_or_default())
            .collect()
    }
}
