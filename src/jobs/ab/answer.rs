//! The answer for two runs of one program, in sentences: which side leaves exact arithmetic and where first, what each
//! computes with, and how far rounding moved the text.

use std::collections::BTreeSet;

use parity_dump::Dump;
use parity_graph::Graph;

use super::numbers;
use super::observation::Observation;
use super::side::Recorded;
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{argmax, common_positions};
use crate::dump::{Graphs, Recording};
use crate::error::{Error, Result};
use crate::faults::tokens;
use crate::gguf::Gguf;
use crate::model::builders::Shape;
use crate::model::diff::Whose;
use crate::ops::bound::HEALTHY;
use crate::report::words::{count, number};
use crate::report::{CheckpointVerdict, Entry, Finding, FirstDivergence, LocalError, Report, Verdict};
use crate::verdict::{Claim, File, Gap, apart, unlike};

/// Two runs: A is the reference, B the candidate.
pub struct Sides<'a> {
    /// The first run.
    pub a: &'a Recorded,
    /// The other.
    pub b: &'a Recorded,
    /// A's dump.
    pub reference: &'a Dump,
    /// B's dump.
    pub candidate: &'a Dump,
    /// Their model.
    pub gguf: &'a Gguf,
}

/// The prompts became other tokens behind `common` of them: that is the finding, whatever the values are.
pub fn of_other_prompts(report: &mut Report, sides: &Sides<'_>, common: u32, no_text: bool) {
    let [ours, theirs] = [&sides.b.tokens, &sides.a.tokens];
    let said = match no_text {
        true => tokens::sentences(tokens::diagnose(ours, theirs, tokens::Vocabulary::default())),
        false => tokens::said(ours, theirs, sides.gguf),
    };
    report.verdict = Verdict::Divergence;
    report.first_divergence = None;
    report.reason = Some(format!(
        "the prompts are not the same tokens: the first {common} are{}",
        said.iter().map(|said| format!("; {said}")).collect::<String>()
    ));
    report.answer.push(
        "A is the reference, B the candidate; rows behind the first token that differs are of other texts"
            .to_owned(),
    );
}

/// Rows that stand behind other tokens are the finding too, where no node is: the runs did not do the same.
pub fn add_other_contexts(report: &mut Report, sides: &Sides<'_>) {
    let apart = Gap::of_contexts(sides.candidate, sides.reference);
    if let Some(Gap::OtherContext(key, true)) = apart {
        report.diverge_by(format!(
            "the runs did not do the same: row {key} stands behind other tokens in A and in B, by what its sequence was copied \
             or loaded from, or what was taken out of it"
        ));
    }
}

/// Programs that say of themselves that they failed. Where one alone does, nothing is known of what it would have gone on with.
pub fn add_failures(report: &mut Report, sides: [&Recorded; 2]) {
    let said = sides.iter().filter_map(|side| {
        Some(format!("{}'s program ended with {}", side.name.to_uppercase(), side.failed.as_ref()?))
    });
    let said: Vec<String> = said.collect();
    if let [said] = &said[..] {
        report.leave_open(format!("{said}, and the other's did not"));
    }
    report.answer.extend(said);
}

/// The answer for runs of one prompt.
///
/// # Errors
/// A graph that cannot be read.
pub fn of_one_text(report: &mut Report, sides: &Sides<'_>) -> Result<()> {
    let read = |dump| Ok::<_, Error>(Graphs::read(dump)?.with_factors(dump));
    let (ours, theirs) = (read(sides.candidate)?, read(sides.reference)?);
    let (ours, theirs) = (ours.all(), theirs.all());
    let claims = [
        Claim { side: Whose::Candidate, graphs: ours.iter().collect() },
        Claim { side: Whose::Reference, graphs: theirs.iter().collect() },
    ];
    let architecture = sides.gguf.str("general.architecture")?.unwrap_or_default();
    let file = File { gguf: sides.gguf, architecture, refused: None };
    let commands = [&sides.b.command[..], &sides.a.command[..]];
    let groups = apart(&claims, Some(&file));
    report.findings = groups.iter().map(|group| numbers::finding(group, sides.gguf, commands)).collect();
    accuse_either(report);
    if let Some(unlike) = unlike(&claims).filter(|_| sides.a.model != sides.b.model) {
        report.leave_open(format!("the graphs of the two files are not the same: {unlike}"));
    }
    report.answer.push(who(report));
    report.answer.extend(report.findings.iter().map(|finding| finding.effect.clone()));
    report.answer.extend(computes(sides, theirs, ours));
    report.answer.extend(texts(report, sides));
    report.answer.extend(chosen(sides));
    report.answer.extend(not_computed(sides));
    Ok(())
}

/// Neither side is the measure: numbers that differ are a divergence, and so is a fault of A alone.
fn accuse_either(report: &mut Report) {
    let wrong = report.checkpoints.iter().find(|entry| entry.verdict == CheckpointVerdict::Reference);
    if let Some(entry) = wrong.filter(|_| report.first_divergence.is_none()) {
        let first = FirstDivergence {
            inputs: entry.inputs.clone(),
            diagnosis: entry.diagnosis.clone(),
            residual: entry.evidence.clone(),
            ..FirstDivergence::at(entry.id, entry.verdict)
        };
        report.diverge(first);
    }
    if let Some(effect) = report.findings.first().map(|finding| finding.effect.clone()) {
        report.diverge_by(effect);
    }
}

/// The first node of a side whose local error is beyond what rounding explains.
fn first_wrong(
    report: &Report,
    own: CheckpointVerdict,
    local: fn(&Entry) -> Option<&LocalError>,
) -> Option<&Entry> {
    report.checkpoints.iter().find(|entry| {
        let beyond = |local: &LocalError| !(local.over_bound <= HEALTHY);
        let nonfinite = entry.verdict == own && local(entry).is_none();
        local(entry).is_some_and(beyond) || nonfinite
    })
}

/// The first node of B that is wrong, and the first of A.
fn wrong(report: &Report) -> [Option<&Entry>; 2] {
    [
        first_wrong(report, CheckpointVerdict::Nonfinite, |entry| entry.local.candidate.as_ref()),
        first_wrong(report, CheckpointVerdict::Reference, |entry| entry.local.reference.as_ref()),
    ]
}

/// Which sides compute nothing wrong that was looked at.
pub struct Healthy {
    /// The first.
    pub a: bool,
    /// The other.
    pub b: bool,
}

/// Which sides of a report are healthy.
pub fn are_healthy(report: &Report) -> Healthy {
    let [b, a] = wrong(report).map(|wrong| wrong.is_none());
    Healthy { a, b }
}

/// Adds what a side computes when nobody looks, where that is not what was recorded: a divergence where rounding does not
/// explain it.
pub fn add_unseen(report: &mut Report, found: &Observation, whose: Whose) {
    if found.differing.is_empty() || found.explained.is_none() && found.answer.len() < 2 {
        return;
    }
    let (name, own) = match whose {
        Whose::Reference => ("A", CheckpointVerdict::Reference),
        _ => ("B", CheckpointVerdict::Origin),
    };
    // Its first sentence counts rows, which is of no interest here.
    report
        .answer
        .extend(found.answer.iter().skip(1).map(|sentence| format!("{name} unobserved: {sentence}")));
    if found.explained == Some(true) {
        report.answer.push(format!(
            "{name} unobserved: what nobody looks at may be fused; parity ab --observation judges those kernels node by node"
        ));
    }
    if found.explained != Some(false) {
        return;
    }
    if let Some(first) = report.answer.first_mut().filter(|_| report.first_divergence.is_none()) {
        *first = format!("as they were recorded, {first}");
    }
    report.findings.push(Finding {
        name: "observation".to_owned(),
        location: found.node.map_or_else(|| Kind::Logits.name().to_owned(), |node| node.to_string()),
        original: None,
        converted: None,
        effect: format!("{name} unobserved: {}", found.answer[1..].join("; ")),
    });
    if report.first_divergence.is_some() {
        return;
    }
    match &found.wrong {
        Some(first) => {
            // Origins are the candidate's.
            if own == CheckpointVerdict::Origin {
                report.originates(first.checkpoint);
            }
            report.diverge(FirstDivergence { verdict: own, ..first.clone() });
        }
        None => {
            let said = found.answer.get(1).map_or("", String::as_str);
            report.diverge_by(format!("{name} unobserved: {said}"));
        }
    }
}

/// Which side leaves exact arithmetic, and where first.
fn who(report: &Report) -> String {
    let [b, a] = wrong(report);
    let told = |name: &str, entry: &Entry, local: Option<&LocalError>| {
        let size = local.map_or_else(String::new, |local| {
            format!(", by {} times what rounding explains", number(local.over_bound))
        });
        format!("{name} leaves exact arithmetic first at {}{size}", entry.id)
    };
    let of_b = b.map(|entry| told("B", entry, entry.local.candidate.as_ref()));
    let of_a = a.map(|entry| told("A", entry, entry.local.reference.as_ref()));
    let judged = |local: fn(&Entry) -> bool| report.checkpoints.iter().filter(|entry| local(entry)).count();
    match (of_a, of_b) {
        (None, Some(b)) => {
            let nodes = judged(|entry| entry.local.reference.is_some());
            format!("{b}; A is healthy in all {} that were judged", count(nodes, "node"))
        }
        (Some(a), None) => {
            let nodes = judged(|entry| entry.local.candidate.is_some());
            format!("{a}; B is healthy in all {} that were judged", count(nodes, "node"))
        }
        (Some(a), Some(b)) => format!("both sides are wrong: {a}; {b}"),
        (None, None) if judged(|entry| entry.local.candidate.is_some()) == 0 => {
            "neither side was held to exact arithmetic: no node was judged".to_owned()
        }
        (None, None) => both_healthy(report),
    }
}

fn both_healthy(report: &Report) -> String {
    let numbers = || report.checkpoints.iter().filter_map(|entry| Some((entry.id, entry.numbers.as_ref()?)));
    let farthest = numbers().max_by(|(_, a), (_, b)| a.rel_l2.total_cmp(&b.rel_l2));
    match (farthest, report.findings.is_empty()) {
        (Some((_, farthest)), true) if farthest.rel_l2 == 0.0 => {
            "both sides are healthy, and their values are equal".to_owned()
        }
        (Some((id, farthest)), true) => format!(
            "both sides are healthy: each computes every node that was judged to within rounding; they are farthest apart at \
             {id}, by rel L2 {}",
            number(farthest.rel_l2)
        ),
        (_, false) => {
            "every node of both sides computes what its own graph says, but the graphs differ".to_owned()
        }
        (None, true) => "both sides are healthy, and there was nothing to compare".to_owned(),
    }
}

/// What each side computes with, and in what of that they differ.
fn computes(sides: &Sides<'_>, a: &[Graph], b: &[Graph]) -> Vec<String> {
    let facts = |dump: &Dump, graphs: &[Graph]| {
        let producer = dump.producer();
        let choices = graphs.first().map_or_else(Vec::new, |graph| {
            Shape::of(graph).choices().split(", ").map(str::to_owned).collect::<Vec<_>>()
        });
        let version =
            format!("{} {}", producer.name, producer.version.as_deref().unwrap_or("of an unknown version"));
        let device = format!("on {}", producer.device.as_deref().unwrap_or("an unknown device"));
        [vec![version, device], choices].concat()
    };
    let (of_a, of_b) = (facts(sides.reference, a), facts(sides.candidate, b));
    let mut told = vec![format!("A: {}", of_a.join(", "))];
    let only = |own: &[String], other: &[String]| {
        let own: Vec<String> = own.iter().filter(|fact| !other.contains(fact)).cloned().collect();
        if own.is_empty() { "none of that".to_owned() } else { own.join(", ") }
    };
    match of_a == of_b {
        true => told.push("B: the same".to_owned()),
        false => told.push(format!("B: {} where A has {}", only(&of_b, &of_a), only(&of_a, &of_b))),
    }
    let ops = |graphs: &[Graph]| -> BTreeSet<String> {
        let all =
            graphs.iter().flat_map(|graph| graph.computed().map(|id| graph.get(id).op.name().to_owned()));
        all.collect()
    };
    let (ours, theirs) = (ops(b), ops(a));
    let alone = |name: &str, own: &BTreeSet<String>, other: &BTreeSet<String>| {
        let own: Vec<&str> = own.difference(other).map(String::as_str).collect();
        (!own.is_empty()).then(|| format!("ops that only {name} has: {}", own.join(", ")))
    };
    let forms: Vec<String> =
        [alone("A", &theirs, &ours), alone("B", &ours, &theirs)].into_iter().flatten().collect();
    if !forms.is_empty() {
        told.push(format!("forms of the same arithmetic: {}", forms.join("; ")));
    }
    let steps =
        |dump: &Dump| dump.manifest().steps.iter().map(|step| step.positions.len()).collect::<Vec<_>>();
    let (a, b) = (steps(sides.reference), steps(sides.candidate));
    if a != b {
        told.push(format!("rows of each step: {} in A, {} in B", runs(&a), runs(&b)));
    }
    told
}

/// `32 x 4, 9, 1 x 8`
fn runs(steps: &[usize]) -> String {
    let run = |run: &[usize]| match run {
        [one] => one.to_string(),
        _ => format!("{} x {}", run[0], run.len()),
    };
    steps.chunk_by(|a, b| a == b).map(run).collect::<Vec<_>>().join(", ")
}

/// Where B would have gone on with another token than A, and whether that is a near-tie.
fn texts(report: &Report, sides: &Sides<'_>) -> Option<String> {
    let logits = Checkpoint::global(Kind::Logits);
    let common = common_positions(sides.candidate.tokens(), sides.reference.tokens());
    let answer = sides.a.prompt.saturating_sub(1);
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let mut compared = 0;
    let models = [sides.candidate, sides.reference].map(|dump| &dump.manifest().model.fingerprint);
    let other_weights = models[0] != models[1];
    for position in
        Recording::positions(sides.candidate, logits).into_iter().filter(|p| (answer..common).contains(p))
    {
        let ours = Recording::row(sides.candidate, logits, position, &mut b);
        let Some((ours, theirs)) = ours.zip(Recording::row(sides.reference, logits, position, &mut a)) else {
            continue;
        };
        let Some((own, other)) = argmax(ours).zip(argmax(theirs)) else { continue };
        compared += 1;
        if own == other {
            continue;
        }
        let apart = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs();
        let moved = theirs.iter().zip(ours).map(apart).fold(0.0, f64::max);
        let margin = f64::from(theirs[other as usize]) - f64::from(theirs[own as usize]);
        let healthy = report.verdict == Verdict::Parity;
        let near = margin <= 2.0 * moved;
        let by = if other_weights { "other weights" } else { "rounding" };
        let what = match (healthy, near) {
            (true, true) => format!(
                "a near-tie, {} between A's first two choices; {by} moved the logits of that row by up to {}",
                number(margin),
                number(moved)
            ),
            _ => format!(
                "{} between A's first two choices, and the logits of that row are up to {} apart",
                number(margin),
                number(moved)
            ),
        };
        let token = position - answer + 1;
        return Some(format!(
            "the texts part at token {token} of the answer ({other} in A, {own} in B): {what}"
        ));
    }
    (compared > 0)
        .then(|| format!("the texts are the same: B's first choice is A's at {}", count(compared, "token")))
}

/// What the programs put in that nobody's logits ask for: a sampler that is not greedy, or another prompt.
fn chosen(sides: &Sides<'_>) -> Option<String> {
    let logits = Checkpoint::global(Kind::Logits);
    let mut buffer = Vec::new();
    let mut odd = Vec::new();
    for &(position, own) in &sides.b.replaced {
        let Some(before) = position.checked_sub(1) else { continue };
        let row = Recording::row(sides.candidate, logits, before, &mut buffer);
        if row.and_then(argmax).is_some_and(|best| best != own) {
            odd.push(position);
        }
    }
    let first = odd.first()?;
    Some(format!(
        "B's program put in a token that is not its own first choice at {} (the first at position {first}): A's was computed \
         instead; is its sampler greedy (--temp 0), and its prompt A's?",
        count(odd.len(), "position")
    ))
}

/// Rows that one program alone computed.
fn not_computed(sides: &Sides<'_>) -> Option<String> {
    let (a, b) = (sides.a.tokens.len(), sides.b.tokens.len());
    let told = |name: &str, other: &str, more: usize| {
        format!(
            "{name}'s program ended {} before {other}'s: those rows have nothing to be compared with (--ignore-eos lets both \
             go on; --allow-missing accepts it)",
            count(more, "token")
        )
    };
    match a.cmp(&b) {
        std::cmp::Ordering::Greater => Some(told("B", "A", a - b)),
        std::cmp::Ordering::Less => Some(told("A", "B", b - a)),
        std::cmp::Ordering::Equal => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_the_same_size_are_counted() {
        assert_eq!(runs(&[32, 32, 9, 1, 1, 1]), "32 x 2, 9, 1 x 3");
        assert_eq!(runs(&[7]), "7");
    }
}
