//! The answers for all ids, and for the whole.

use std::collections::{HashMap, HashSet};

use super::bracket::bracket;
use super::entry::{Before, Known, entry};
use super::text::{self, refuted, within_tolerance};
use crate::audit::{MISTAKES_SHOW, Reads, SHARP};
use crate::checkpoint::Checkpoint;
use crate::compare::Comparison;
use crate::report::words::count;
use crate::report::{
    CheckpointVerdict as V, Coverage, Entry, FirstDivergence, LocalError, Report, Seen, Tried, Verdict,
};

/// The answers for all ids that are shown.
#[derive(Default)]
pub struct Answers {
    /// One for each, in execution order.
    entries: Vec<Entry>,
    /// All ids that something is known of, shown or not.
    known: HashSet<Checkpoint>,
    /// Of the ids that are not shown, the first that is at fault.
    hidden: Option<Checkpoint>,
    /// How many passed by the tolerance that a user gave.
    tolerated: usize,
    /// Those that were not judged in every step since they read what is lost of a recording, and why.
    lost: Vec<(Checkpoint, String)>,
    /// Those that what rounding carries from the tokens would settle.
    pub open: HashSet<Checkpoint>,
    /// Token rows that were compared, and those that a complete pair of dumps would have.
    rows: [u64; 2],
    /// The first that passes by what rounding carries from the tokens, and what that says.
    carried: Option<(Checkpoint, String)>,
}

/// Answers for all ids, in execution order, of which those that are not `shown` are left out. What is shown may inherit
/// from what is not: from what it `reads`, however far back.
pub fn entries<'a>(
    known: impl Iterator<Item = Known<'a>>,
    shown: &dyn Fn(Checkpoint) -> bool,
    reads: &Reads,
) -> Answers {
    let mut out = Answers::default();
    // By node: what is known of itself and of all that it comes from.
    let mut behind: HashMap<Checkpoint, Before> = HashMap::new();
    let all: Vec<Known<'_>> = known.collect();
    let place: HashMap<Checkpoint, usize> = all.iter().enumerate().map(|(i, known)| (known.id, i)).collect();
    for known in all {
        let mut before = Before::default();
        let (mut open, mut seen) = (vec![known.id], HashSet::new());
        while let Some(reader) = open.pop() {
            for input in reads.get(&reader).into_iter().flatten().filter(|input| seen.insert(**input)) {
                match behind.get(input) {
                    Some(input) => {
                        before.faulty = first(&place, before.faulty, input.faulty);
                        before.unseen = first(&place, before.unseen, input.unseen);
                    }
                    // Left out: it is looked through.
                    None if !place.contains_key(input) => open.push(*input),
                    None => {}
                }
            }
        }
        let (entry, open, carried) = entry(&known, before);
        let at_fault = entry.verdict.is_fault().then_some(entry.id);
        let is_wrong = entry.verdict.is_fault() || entry.verdict == V::Reference;
        let unseen = matches!(entry.verdict, V::Missing | V::Undecided) && !known.across;
        before.faulty = before.faulty.or(is_wrong.then_some(entry.id));
        before.unseen = before.unseen.or(unseen.then_some(entry.id));
        behind.insert(entry.id, before);
        if !shown(entry.id) {
            out.hidden = out.hidden.or(at_fault);
            continue;
        }
        out.open.extend(open.then_some(entry.id));
        if let Some(carried) = carried.filter(|_| entry.verdict == V::Match && out.carried.is_none()) {
            out.carried = Some((entry.id, carried));
        }
        let of = |rows: fn(&Comparison) -> u64| known.comparison.map_or(0, rows);
        out.rows[0] += of(|comparison| comparison.rows_compared);
        out.rows[1] += of(|comparison| comparison.rows_expected);
        let lost = [known.candidate, known.reference].into_iter().flatten().any(|side| side.lost.is_some());
        if lost && entry.verdict == V::Missing {
            out.lost.push((entry.id, entry.evidence.clone().unwrap_or_default()));
        }
        let tolerance = known.comparison.and_then(|comparison| comparison.within_tolerance);
        out.tolerated += usize::from(tolerance == Some(true) && entry.verdict == V::Match);
        out.entries.push(entry);
    }
    out.known = place.into_keys().collect();
    out
}

/// What a node reads of what something is `known` of: what was left out is looked through.
fn inputs(of: Checkpoint, reads: &Reads, known: &HashSet<Checkpoint>) -> Vec<Checkpoint> {
    let (mut out, mut open, mut seen) = (Vec::new(), vec![of], HashSet::new());
    while let Some(reader) = open.pop() {
        for input in reads.get(&reader).into_iter().flatten().filter(|input| seen.insert(**input)) {
            let list = if known.contains(input) { &mut out } else { &mut open };
            list.push(*input);
        }
    }
    out
}

/// What parity does not see, where an engine's type, or what it does not show, makes that more than rounding of f32.
fn unseen(entries: &[Entry]) -> Option<String> {
    // What was crossed to a node widens what rounding explains there; so do scores in a narrow type that are so large that
    // they say nothing of their weights.
    let is_wide = |local: &LocalError| {
        let limit = if local.bridged.is_empty() { MISTAKES_SHOW } else { SHARP };
        local.bound_rel_l2.is_some_and(|band| band > limit)
    };
    let is_said =
        |entry: &Entry| [&entry.local.candidate, &entry.local.reference].into_iter().flatten().any(is_wide);
    if !entries.iter().any(is_said) {
        return None;
    }
    // What is compared with a recording that hides a mistake agrees with it as well as the recording agrees with itself.
    let limits = entries.iter().flat_map(|entry| {
        let limit = |local: &Option<LocalError>| local.as_ref().and_then(LocalError::hides);
        let (candidate, reference) = (limit(&entry.local.candidate), limit(&entry.local.reference));
        // The last of several that are alike is told: the candidate's.
        [(" of the reference", reference), ("", candidate)].map(|(side, limit)| Some((entry, side, limit?)))
    });
    let (entry, side, limit) = limits.flatten().max_by(|a, b| a.2.total_cmp(&b.2))?;
    let judged = entries.iter().filter(|entry| entry.local.candidate.is_some()).count();
    let explained = format!("{} within what rounding explains", count(judged, "node"));
    Some(match limit < 1.0 {
        true => format!(
            "{explained}; a mistake{side} that moves {} by less than {limit:.0e} would not be seen",
            entry.id
        ),
        false => {
            format!("{explained}, which may be all of {}: a mistake{side} there would not be seen", entry.id)
        }
    })
}

/// The one of two ids that stands first.
fn first(
    place: &HashMap<Checkpoint, usize>,
    a: Option<Checkpoint>,
    b: Option<Checkpoint>,
) -> Option<Checkpoint> {
    a.into_iter().chain(b).min_by_key(|id| place.get(id))
}

/// Ids that are named in a sentence.
const NAMED_MAX: usize = 4;

/// Nodes that read what is lost of a recording, in words, if there are any.
fn not_judged(lost: &[(Checkpoint, String)]) -> Option<String> {
    let (_, why) = lost.first()?;
    let ids: Vec<String> = lost.iter().take(NAMED_MAX).map(|(id, _)| id.to_string()).collect();
    let more = if lost.len() > NAMED_MAX { ", …" } else { "" };
    let nodes = count(lost.len(), "node");
    Some(format!("{nodes} could not be judged in every step: {}{more} ({why})", ids.join(", ")))
}

/// The answer of the whole, and why where it is undecided.
fn answer(answers: &Answers, allow_missing: bool) -> (Verdict, Option<String>) {
    let Answers { entries, hidden, lost, .. } = answers;
    let of = |verdict: V| entries.iter().filter(move |entry| entry.verdict == verdict);
    let first = entries.iter().find(|entry| entry.verdict.is_fault());
    let audited = entries.iter().any(|entry| entry.local.candidate.is_some());
    let some = |verdict: V| {
        let ids: Vec<String> = of(verdict).take(NAMED_MAX).map(|entry| entry.id.to_string()).collect();
        let more = if of(verdict).count() > NAMED_MAX { ", …" } else { "" };
        ids.join(", ") + more
    };
    let (missing, undecided) = (of(V::Missing).count(), of(V::Undecided).count());
    if first.is_some() {
        (Verdict::Divergence, None)
    } else if let Some(id) = hidden {
        let text = format!(
            "{id}, which is not among the nodes that were asked for, is at fault: look at it as well"
        );
        (Verdict::Undecided, Some(text))
    } else if let Some(entry) = of(V::Reference).next() {
        (Verdict::Undecided, Some(refuted(entry)))
    } else if !audited {
        let why = |entry: &Entry| Some(format!(": {} ({})", entry.id, entry.evidence.as_ref()?));
        let why = of(V::Undecided).find_map(why).unwrap_or_default();
        (Verdict::Undecided, Some(format!("no node could be judged from what was recorded{why}")))
    } else if let Some(text) = not_judged(lost).filter(|_| !allow_missing) {
        (Verdict::Undecided, Some(format!("{text}; --allow-missing accepts it")))
    } else if missing > 0 && !allow_missing {
        let text = format!(
            "{} not recorded: {}; --allow-missing accepts it",
            count(missing, "node"),
            some(V::Missing)
        );
        (Verdict::Undecided, Some(text))
    } else if let Some(entry) = of(V::Undecided).next() {
        let why = entry.evidence.clone().unwrap_or_default();
        let text =
            format!("{} could not be judged: {} ({why})", count(undecided, "node"), some(V::Undecided));
        (Verdict::Undecided, Some(text))
    } else {
        (Verdict::Parity, None)
    }
}

/// Puts the report together: verdict, first divergence, coverage.
pub fn assemble(
    answers: Answers,
    reads: &Reads,
    tried: &dyn Fn(Checkpoint) -> (Vec<Tried>, Option<String>),
    allow_missing: bool,
    [rows_audited, rows_screened]: [u64; 2],
) -> Report {
    let (verdict, mut reason) = answer(&answers, allow_missing);
    let Answers { mut entries, known, tolerated, lost, carried, rows, .. } = answers;
    let [rows_compared, rows_expected] = rows;
    if let Some((at, text)) = bracket(&entries, true) {
        *entries[at].evidence.get_or_insert_default() += &format!("; {text}");
        reason
            .iter_mut()
            .filter(|_| verdict == Verdict::Undecided)
            .for_each(|reason| *reason += &format!("; {text}"));
    }
    let of = |verdict: V| entries.iter().filter(move |entry| entry.verdict == verdict);
    let first = entries.iter().find(|entry| entry.verdict.is_fault());
    // What is rounded to a narrow type everywhere, without a declaration, is not what makes values infinite later.
    let is = |entry: &&Entry, name: &str| entry.diagnosis.first().is_some_and(|best| best.fault == name);
    let overflow = entries.iter().find(|entry| entry.verdict.is_fault() && is(entry, OVERFLOW));
    let first = first.map(|first| overflow.filter(|_| is(&first, ROUNDED)).unwrap_or(first));
    let unnamed = first.map_or_else(Default::default, |entry| tried(entry.id));
    let first_divergence = first.map(|entry| FirstDivergence {
        inputs: inputs(entry.id, reads, &known),
        diagnosis: entry.diagnosis.clone(),
        residual: unnamed.1.clone(),
        tried: unnamed.0.clone(),
        ..FirstDivergence::at(entry.id, entry.verdict)
    });
    let numbers = || entries.iter().filter_map(|entry| entry.numbers.as_ref());
    let coverage = Coverage {
        checkpoints_compared: numbers().count(),
        checkpoints_missing: of(V::Missing).count(),
        elements_compared: numbers().map(|numbers| numbers.n).sum(),
        rows_compared,
        rows_expected,
        rows_audited: Some(rows_audited),
        rows_screened: Some(rows_screened),
        seen: seen(&entries),
    };
    let looked_at = of(V::Match).count();
    let carried = carried.map(|(id, limit)| {
        let looked_at = count(looked_at, "checkpoint");
        format!("{looked_at} within what rounding explains, as far as they were looked at; {id} {limit}")
    });
    let basis = || {
        let tolerated = within_tolerance(tolerated, &coverage, &entries);
        tolerated
            .or_else(|| Some(text::seen_alone(coverage.seen.as_ref()?)))
            .or(carried)
            .or_else(|| unseen(&entries))
    };
    let reason = reason.or_else(|| if verdict == Verdict::Parity { basis() } else { None });
    let by_itself = |entry: &&Entry| matches!(entry.verdict, V::Origin | V::Nonfinite);
    let origins = entries.iter().filter(by_itself).map(|entry| entry.id).collect();
    let notes = not_judged(&lost).filter(|_| allow_missing).into_iter().collect();
    let checkpoints = entries;
    Report { verdict, reason, first_divergence, origins, coverage, checkpoints, notes, ..Report::default() }
}

/// A type that is too narrow, and one that is only narrow.
const OVERFLOW: &str = crate::faults::diagnosis::OVERFLOW;
const ROUNDED: &str = "data.f16_rounded";

/// How much was seen of all nodes of which a side was only printed.
fn seen(entries: &[Entry]) -> Option<Seen> {
    let parts = || entries.iter().filter_map(|entry| entry.seen);
    parts().next()?;
    Some(Seen { values: parts().map(|s| s.values).sum(), of: parts().map(|s| s.of).sum(), sum: None })
}
