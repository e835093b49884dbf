//! A text in tokens: a hypothesis may say it in others than a tokenizer makes of it.

use super::answer::Tried;
use super::evidence::{Evidence, Noise, Score};
use super::hypotheses::{self, HEALTHY, Hypothesis};
use super::passes::Prompt;
use super::search::{FEW, Search};
use super::steps::{self, Steps, one_by_one};
use crate::error::Result;

impl Search<'_> {
    /// A text in the tokens in which a healthy engine says it, where it says it in others than a tokenizer makes of it alone.
    pub fn spelling(&self, tried: &[Tried], noise: &Noise) -> Result<Option<Box<dyn Evidence>>> {
        let mut healthy = tried.iter().filter(|one| one.hypothesis.name == HEALTHY && one.explains());
        let Some(one) = healthy.next().filter(|one| one.score.respelt) else { return Ok(None) };
        if healthy.any(|one| !one.score.respelt) {
            return Ok(None);
        }
        let logits = self.full.alone(&one.hypothesis).unwrap_or_default();
        let found = self.evidence.weigh(&logits, noise);
        Ok(self.spelt_in(&one.hypothesis, found, noise)?.1)
    }

    /// How well a hypothesis explains a text in the tokens that it spells it in itself.
    pub fn spelt(&self, one: &Hypothesis, found: Score, noise: &Noise) -> Result<Score> {
        let (score, spelling) = self.spelt_in(one, found, noise)?;
        Ok(Score { respelt: spelling.is_some(), ..score })
    }

    /// The same, and in which tokens.
    fn spelt_in(
        &self,
        one: &Hypothesis,
        found: Score,
        noise: &Noise,
    ) -> Result<(Score, Option<Box<dyn Evidence>>)> {
        let (mut found, mut spelling): (Score, Option<Box<dyn Evidence>>) = (found, None);
        for _ in 0..self.full.rows {
            let Some((row, token)) = found.otherwise.filter(|_| !found.explains()) else { break };
            let Some(other) = spelling.as_deref().unwrap_or(self.evidence).respelt(row, token) else { break };
            // A few rows behind it say whether that is hopeless.
            for rows in [self.full.rows.min(row + 1 + FEW), self.full.rows] {
                let Some(logits) = self.respelt(&*other, one, rows)? else { return Ok((found, None)) };
                found = other.weigh(&logits, noise);
                if !found.explains() || found.of == self.full.rows {
                    break;
                }
            }
            spelling = Some(other);
        }
        Ok((found, spelling))
    }

    /// Logits of a hypothesis on the first rows behind a text in other tokens.
    fn respelt(&self, evidence: &dyn Evidence, one: &Hypothesis, rows: usize) -> Result<Option<Vec<f32>>> {
        if self.known.recording.is_some() {
            return Ok(None);
        }
        let given = &self.known.prompt;
        let prompt = one.prompt(given);
        // Where it ends before the rows do, what stands behind it says nothing.
        let behind = evidence.tokens().iter().copied().chain(std::iter::repeat_n(0, rows));
        let tokens = prompt.iter().copied().chain(behind);
        let all = self.full.tokens + prompt.len() + rows - given.len() - self.full.rows;
        let tokens: Vec<u32> = tokens.take(all).collect();
        if one.stepwise {
            let lengths = one_by_one(prompt.len(), rows);
            let steps = Steps { lengths: &lengths, prompt: prompt.len(), from: prompt.len() - 1 };
            return Ok(steps::logits(self.known.model(), &tokens, steps, &[one])?.pop().flatten());
        }
        let pass = Prompt::new(self.file(one), &tokens, prompt.len(), rows)?;
        let same = hypotheses::again(&pass.labelled, pass.layers(), &[one]).pop().flatten();
        let one = if one.nodes().is_some() { same.as_ref() } else { Some(one) };
        Ok(one.and_then(|one| pass.alone(one)))
    }
}
