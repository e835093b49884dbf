//! Names the mistake in a failing node: tries what people do wrong on the node's own recorded inputs, and
//! keeps what reproduces its recorded output to the node's rounding.

mod bridged;
mod fit;
mod heads;
mod predict;
mod ranks;
mod recognise;
mod residual;
mod sample;
mod scores;
mod turns;
mod unsummed;

pub use fit::*;
pub use heads::*;
pub use predict::{Lab, Prediction};
pub use ranks::*;
pub use sample::Base;
pub use scores::*;
pub use turns::*;

use super::{Argument, Fault, Site, catalogue};
use crate::audit::Context;
use crate::audit::case::{Case, gather};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::model::Model;
use crate::model::graph::{Node, Op};
use crate::report::{Diagnosis, Tried};
use parity_dump::manifest::Step;

/// What is known of a faulty node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diagnosed {
    /// What the node reads.
    pub inputs: Vec<Checkpoint>,
    /// Mistakes that reproduce its output, the likeliest first. Where there are several, the data do not
    /// tell them apart.
    pub diagnosis: Vec<Diagnosis>,
    /// What the error looks like, where no mistake does.
    pub residual: Option<String>,
    /// What was tried, with its share of the error, where no mistake does.
    pub tried: Vec<Tried>,
}

/// Token rows up to which all are looked at.
const ROWS_MAX: usize = 32;
/// Rows that are known to be wrong, of which so many are looked at.
const WRONG_MAX: usize = 8;
/// Share of the error on a sample above which a hypothesis is worth computing in full.
const PROMISING: f64 = 0.9;
/// Share of the error above which a second mistake is looked for besides the first.
const PARTIAL: f64 = 0.3;
/// First mistakes that a second one is tried with.
const PARTIAL_MAX: usize = 4;
/// Weight values beyond which combinations of two are not tried: each costs a pass over the weight.
const PAIR_WEIGHT_MAX: usize = 1 << 25;

/// Rows from the start of a run: what shows when rows are mixed up.
const ROWS_FIRST: usize = 16;
/// Rows of later steps: what shows in decode.
const ROWS_DECODED: usize = 8;

/// Positions that a diagnosis wants of a run in `steps`: rows that follow one another, so that a row can be
/// recognised where another belongs, both ends of the first step, and the first decoded ones.
pub fn wanted_rows(steps: &[Step]) -> Vec<u32> {
    let mut positions: Vec<u32> = steps.iter().flat_map(|step| step.positions.iter().copied()).collect();
    positions.sort_unstable();
    positions.dedup();
    if positions.len() <= ROWS_MAX {
        return positions;
    }
    let first = steps.iter().map(|step| step.positions.len()).find(|n| *n > 0).unwrap_or(0);
    let ends = [first.saturating_sub(2), positions.len() - 2];
    let keep = |i: usize| {
        let of_first = i < ROWS_FIRST || (first..first + ROWS_DECODED).contains(&i);
        of_first || ends.iter().any(|end| (*end..end + 2).contains(&i))
    };
    positions.into_iter().enumerate().filter(|(i, _)| keep(*i)).map(|(_, position)| position).collect()
}

/// Diagnoses the node at `checkpoint`, at the rows that are known to be wrong and some others. Everything is
/// empty where the node is healthy.
///
/// # Errors
/// A weight that cannot be read, or inputs that do not have the model's shape.
pub fn diagnose(
    context: &Context<'_>,
    model: &Model,
    checkpoint: Checkpoint,
    wrong: &[u32],
) -> Result<Diagnosed> {
    let Some(node) = context.graph.node(checkpoint) else { return Ok(Diagnosed::default()) };
    let recording = context.recording;
    let mut positions = recording.positions(checkpoint);
    if positions.len() > ROWS_MAX {
        let wanted = wanted_rows(&recording.manifest().steps);
        let wrong = &wrong[..wrong.len().min(WRONG_MAX)];
        positions.retain(|position| wanted.contains(position) || wrong.contains(position));
    }
    match gather(context, node, &positions)? {
        Ok(case) => diagnose_case(context, model, &case),
        Err(missing) => Ok(Diagnosed {
            residual: Some(format!("nothing could be tried: the dump lacks {}", missing)),
            ..Diagnosed::default()
        }),
    }
}

/// As [`diagnose`], of a node whose rows are at hand.
pub fn diagnose_case(context: &Context<'_>, model: &Model, case: &Case) -> Result<Diagnosed> {
    let lab = Lab { context, site: Site { model }, case };
    let Some(healthy) = lab.predict(&case.node)? else { return Ok(Diagnosed::default()) };
    let Some(healthy) = nearest(&lab, healthy) else { return Ok(Diagnosed::default()) };
    if over_bound(&lab, &healthy) <= crate::ops::bound::HEALTHY {
        return Ok(Diagnosed::default());
    }
    let base = Base::new(&lab, case.node.clone(), healthy.value, healthy.bound);
    let mut trial = Trial { lab: &lab, origin: &base, tried: Vec::new(), found: Vec::new() };
    trial.singles(&base, None)?;
    let recognised = recognise::recognise(&lab, &base, !trial.found.is_empty());
    if trial.found.is_empty() && recognised.is_empty() {
        trial.found = unsummed::found(&lab, &base)?;
    }
    if trial.found.is_empty() && recognised.is_empty() {
        trial.found = bridged::found(&lab, &base)?;
    }
    if trial.found.is_empty() && recognised.is_empty() {
        trial.pairs()?;
    }
    Ok(trial.finish(recognised))
}

/// One mistake, or two, that reproduces the output.
struct Found {
    faults: Vec<&'static str>,
    explains: f64,
    text: String,
    fix: String,
}

/// A hypothesis and its share of the error on the sample.
struct Attempt {
    fault: &'static Fault,
    argument: Argument,
    node: Node,
    share: f64,
}

struct Trial<'a> {
    lab: &'a Lab<'a>,
    /// The healthy node.
    origin: &'a Base,
    tried: Vec<Attempt>,
    found: Vec<Found>,
}

impl Trial<'_> {
    /// Tries every fault on `base`: the healthy node, or one with a `first` mistake.
    fn singles(&mut self, base: &Base, first: Option<&(&'static Fault, String)>) -> Result<()> {
        for fault in catalogue::all() {
            if first.is_some_and(|(first, _)| first.name == fault.name) {
                continue;
            }
            let arguments = match fault.guess {
                Some(guess) => guess(self.lab, base),
                None => (fault.default)(&self.lab.site, &base.node).into_iter().collect(),
            };
            for argument in arguments {
                if self.attempt(base, fault, argument, first)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether the fault reproduces the output.
    fn attempt(
        &mut self,
        base: &Base,
        fault: &'static Fault,
        argument: Argument,
        first: Option<&(&'static Fault, String)>,
    ) -> Result<bool> {
        let mut node = base.node.clone();
        if (fault.change)(&self.lab.site, &mut node, &argument).is_none() || node == base.node {
            return Ok(false);
        }
        // A change that does not fit what the node reads explains nothing.
        let Ok(Some(share)) = sample::share(self.lab, base, &node) else { return Ok(false) };
        let promising = share > PROMISING;
        if !promising {
            if first.is_none() {
                self.tried.push(Attempt { fault, argument, node, share });
            }
            return Ok(false);
        }
        let Ok(Some(predicted)) = self.lab.predict(&node) else { return Ok(false) };
        let Some(prediction) = nearest(self.lab, predicted) else { return Ok(false) };
        let explains = explained(self.lab, self.origin, &prediction);
        let reproduced = over_bound(self.lab, &prediction) <= SLACK;
        if !reproduced {
            if first.is_none() {
                self.tried.push(Attempt { fault, argument, node, share: explains });
            }
            return Ok(false);
        }
        // A second mistake that leaves nothing of the first is one alone.
        let mut alone = self.origin.node.clone();
        let changed = (fault.change)(&self.lab.site, &mut alone, &argument);
        let first = first.filter(|_| changed.is_none() || alone != node);
        let healthy = if first.is_none() { &self.origin.node } else { &base.node };
        let own = (fault.sentence)(&self.lab.site, healthy, &argument);
        let found = match first {
            None => Found { faults: vec![fault.name], explains, text: own, fix: fault.fix.to_owned() },
            Some((other, text)) => Found {
                faults: vec![other.name, fault.name],
                explains,
                text: format!("{text}; and {own}"),
                fix: format!("{}; {}", other.fix, fault.fix),
            },
        };
        self.found.push(found);
        Ok(true)
    }

    /// Tries a second mistake besides each of the first ones that explain much.
    fn pairs(&mut self) -> Result<()> {
        let values = match &self.origin.node.op {
            Op::Linear { weight, .. } => {
                self.lab.site.shape(&weight.name).map_or(0, |shape| shape.iter().product())
            }
            _ => 0,
        };
        if values > PAIR_WEIGHT_MAX {
            return Ok(());
        }
        let mut order: Vec<usize> =
            (0..self.tried.len()).filter(|&i| self.tried[i].share > PARTIAL).collect();
        order.sort_by(|a, b| self.tried[*b].share.total_cmp(&self.tried[*a].share));
        let mut seen: Vec<&str> = Vec::new();
        order.retain(|&i| {
            let name = self.tried[i].fault.name;
            let new = !seen.contains(&name);
            seen.push(name);
            new
        });
        for i in order.into_iter().take(PARTIAL_MAX) {
            let attempt = &self.tried[i];
            let node = attempt.node.clone();
            let text = (attempt.fault.sentence)(&self.lab.site, &self.origin.node, &attempt.argument);
            let first = (attempt.fault, text);
            let Some(prediction) = self.lab.predict(&node)?.and_then(|p| nearest(self.lab, p)) else {
                continue;
            };
            let base = Base::new(self.lab, node, prediction.value, prediction.bound);
            self.singles(&base, Some(&first))?;
            if !self.found.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Puts the answer together.
    fn finish(mut self, recognised: Vec<Diagnosis>) -> Diagnosed {
        self.drop_what_a_special_case_says_better();
        let mut diagnosis: Vec<Diagnosis> = Vec::new();
        let found = self.found.iter().map(|found| Diagnosis {
            fault: found.faults.join(" + "),
            explains: found.explains,
            text: found.text.clone(),
            fix: Some(found.fix.replace("{arch}", self.lab.site.model.config.architecture.name())),
        });
        for item in found.chain(recognised) {
            if diagnosis.iter().all(|known| known.fault != item.fault) {
                diagnosis.push(item);
            }
        }
        if !diagnosis.is_empty() {
            tell_apart(&mut diagnosis);
            return Diagnosed { diagnosis, ..Diagnosed::default() };
        }
        let of = |attempt: &Attempt| Tried { fault: attempt.fault.name.to_owned(), explains: attempt.share };
        let tried = super::nearest(self.tried.iter().map(of).collect());
        let residual = residual::describe(self.lab, self.origin);
        Diagnosed { diagnosis, residual: Some(residual), tried, ..Diagnosed::default() }
    }

    /// A permutation of columns is what a permutation of heads is too; the special case says more.
    fn drop_what_a_special_case_says_better(&mut self) {
        let special = |found: &Found| found.faults.iter().any(|name| REORDERINGS.contains(name));
        if self.found.iter().any(special) {
            self.found.retain(|found| found.faults != ["data.permuted"]);
        }
        let general = |found: &Found| found.faults == ["attn.wrong_kv_head"];
        if !self.found.iter().all(general) {
            self.found.retain(|found| !general(found));
        }
        let lost = |found: &Found| found.faults == ["ranks.lost_sum"];
        if has_ranks(self.lab) && self.found.iter().any(lost) {
            self.found.retain(|found| found.faults != ["linear.truncated_k"]);
        }
        // What is usual at this node before what is not, what needs no parameter before what is fitted, and of what is
        // left, none of which the bounds refute, what explains more.
        let kind = self.origin.node.checkpoint.kind();
        let rank = |name: &&str| {
            let fault = catalogue::find(name);
            let usual = fault.is_some_and(|fault| fault.home.kinds().contains(&kind));
            let special = fault.is_some_and(|fault| !fault.name.starts_with("data."));
            (!special, !usual, fault.is_some_and(|fault| fault.parameter.is_some()))
        };
        let key = |found: &Found| (found.faults.len(), found.faults.first().map(rank));
        self.found.sort_by(|a, b| key(a).cmp(&key(b)).then(b.explains.total_cmp(&a.explains)));
    }
}

/// Says of mistakes that explain the output equally that these data do not tell them apart.
fn tell_apart(diagnosis: &mut [Diagnosis]) {
    let names: Vec<String> = diagnosis.iter().map(|item| item.fault.clone()).collect();
    if names.len() < 2 {
        return;
    }
    for item in diagnosis {
        let others: Vec<&str> =
            names.iter().filter(|name| **name != item.fault).map(String::as_str).collect();
        item.text += &format!(" (indistinguishable here from {})", others.join(", "));
    }
}

/// Faults whose effect is a reordering of columns.
const REORDERINGS: [&str; 5] =
    ["attn.head_order", "attn.width_first", "attn.kv_head", "linear.qk_permuted", "ranks.exchanged"];

/// Bounds are derived for right ops; a mistaken variant may round a few operations more.
const SLACK: f64 = 4.0;

/// max |recorded - predicted| / bound over the rows that are decided, NaN where a value is not finite on one side only.
fn over_bound(lab: &Lab<'_>, prediction: &Prediction) -> f64 {
    let mut worst = 0.0f64;
    for t in (0..prediction.value.rows).filter(|&t| prediction.known[t]) {
        let (value, bound) = (prediction.value.row(t), prediction.bound.row(t));
        for ((recorded, predicted), bound) in lab.case.recorded.row(t).iter().zip(value).zip(bound) {
            let over = if recorded == predicted || recorded.is_nan() && predicted.is_nan() {
                0.0
            } else {
                (recorded - predicted).abs() / bound
            };
            if over.is_nan() {
                return f64::NAN;
            }
            worst = worst.max(over);
        }
    }
    worst
}

/// The prediction that fits best: the declared arithmetic may be one of several.
fn nearest(lab: &Lab<'_>, predictions: Vec<Prediction>) -> Option<Prediction> {
    predictions.into_iter().min_by(|a, b| over_bound(lab, a).total_cmp(&over_bound(lab, b)))
}

/// Share of the squared local error that a prediction accounts for.
fn explained(lab: &Lab<'_>, origin: &Base, prediction: &Prediction) -> f64 {
    let (mut before, mut after) = (0.0, 0.0);
    for t in (0..prediction.value.rows).filter(|&t| prediction.known[t]) {
        let both = origin.value.row(t).iter().zip(prediction.value.row(t));
        for (recorded, (healthy, predicted)) in lab.case.recorded.row(t).iter().zip(both) {
            if recorded.is_finite() && healthy.is_finite() && predicted.is_finite() {
                before += (recorded - healthy).powi(2);
                after += (recorded - predicted).powi(2);
            }
        }
    }
    // Where only NaN and Inf are wrong, they are all there is to explain.
    if before > 0.0 { (1.0 - after / before).max(0.0) } else { 1.0 }
}
