//! What follows from how well every hypothesis explains an output. A wrong name is worse than none.

use super::evidence::{Noise, Score};
use super::hypotheses::{HEALTHY, Hypothesis};

/// How many times likelier an explanation has to be than the next, or than chance among all that were tried.
pub const LIKELIER: f64 = 100.0;

/// A hypothesis and how well it explains what was seen.
pub struct Tried {
    /// Which.
    pub hypothesis: Hypothesis,
    /// On as many rows as it was given.
    pub score: Score,
    /// Whether it was given all rows: others were hopeless after a few.
    pub whole: bool,
}

impl Tried {
    fn is_healthy(&self) -> bool {
        self.hypothesis.name == HEALTHY
    }

    /// Whether nothing that was seen speaks against it.
    pub fn explains(&self) -> bool {
        self.whole && self.score.explains()
    }
}

/// What is said of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing is wrong.
    Healthy,
    /// One mistake explains it: the index of the hypothesis.
    Mistake(usize),
    /// Several different ones do, and nothing that was seen tells them apart.
    Several(Vec<usize>),
    /// None that was tried does.
    Nothing,
}

/// How much likelier than a healthy engine one of so many hypotheses has to be: one is as good by chance.
fn chance(mistakes: usize) -> f64 {
    (LIKELIER * mistakes.max(1) as f64).ln()
}

/// Whether a mistake that was not tried could be named where a healthy engine explains the output, if the best that any
/// explanation comes to is `ceiling`.
pub fn may_be_beaten(tried: &[Tried], ceiling: f64) -> bool {
    ceiling >= generous(tried) + chance(tried.len())
}

/// How well a healthy engine explains it, with as much noise as that takes.
fn generous(tried: &[Tried]) -> f64 {
    tried
        .iter()
        .filter(|one| one.is_healthy())
        .map(|one| one.score.generous)
        .fold(f64::NEG_INFINITY, f64::max)
}

/// Sorts hypotheses, the best explanation first, joins those that are one function of the model, and answers.
pub fn answer(tried: &mut [Tried], noise: &Noise) -> Answer {
    let mistakes = tried.iter().filter(|one| !one.is_healthy()).count();
    let is_healthy = tried.iter().any(|one| one.is_healthy() && one.explains());
    let least = generous(tried) + chance(mistakes);
    // What a mistake changes must be more than rounding in f32 changes, or it is that rounding which it explains.
    let exact = tried.iter().find(|one| one.is_healthy() && one.hypothesis.way.is_exact());
    let exact = exact.map(|one| one.score.clone());
    let is_apart = |one: &Tried| exact.as_ref().is_none_or(|exact| !one.score.is_same(exact, noise));
    let is_better = |one: &Tried| {
        !one.is_healthy() && one.explains() && one.score.log_likelihood >= least && is_apart(one)
    };
    let order = |one: &Tried| (is_better(one), one.whole, one.score.share(), one.score.log_likelihood);
    tried.sort_by(|a, b| {
        let (a, b) = (order(a), order(b));
        let numbers = b.2.total_cmp(&a.2).then(b.3.total_cmp(&a.3));
        (b.0, b.1).cmp(&(a.0, a.1)).then(numbers)
    });
    let good: Vec<usize> = (0..tried.len()).filter(|&i| is_better(&tried[i])).collect();
    let Some(&best) = good
        .iter()
        .max_by(|&&a, &&b| tried[a].score.log_likelihood.total_cmp(&tried[b].score.log_likelihood))
    else {
        return if is_healthy { Answer::Healthy } else { Answer::Nothing };
    };
    let near = tried[best].score.log_likelihood - LIKELIER.ln();
    let rivals = good.into_iter().filter(|&i| i != best && tried[i].score.log_likelihood >= near);
    let (same, other): (Vec<usize>, Vec<usize>) =
        rivals.partition(|&i| is_one(&tried[best], &tried[i], noise));
    let names: Vec<String> = same.iter().flat_map(|&i| names(&tried[i].hypothesis)).collect();
    let own = &mut tried[best].hypothesis;
    for name in names {
        if name != own.name && !own.aliases.contains(&name) {
            own.aliases.push(name);
        }
    }
    match other.is_empty() {
        true => Answer::Mistake(best),
        false => Answer::Several(std::iter::once(best).chain(other).collect()),
    }
}

fn names(one: &Hypothesis) -> impl Iterator<Item = String> + '_ {
    std::iter::once(&one.name).chain(&one.aliases).cloned()
}

/// Whether two have one name, or come to the same logits.
fn is_one(a: &Tried, b: &Tried, noise: &Noise) -> bool {
    names(&a.hypothesis).any(|name| names(&b.hypothesis).any(|other| other == name))
        || a.score.is_same(&b.score, noise)
}

/// The mistakes that a healthy answer does not exclude: they explain the output as well.
pub fn unseen(tried: &[Tried]) -> impl Iterator<Item = &Tried> {
    let healthy = tried.iter().filter(|one| one.is_healthy());
    let own = healthy.map(|one| one.score.log_likelihood).fold(f64::NEG_INFINITY, f64::max);
    let out = move |one: &Tried| !one.explains() || one.score.log_likelihood < own - LIKELIER.ln();
    tried.iter().filter(move |one| !one.is_healthy() && !out(one))
}
