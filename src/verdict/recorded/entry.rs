//! The answer for one id, and for the whole, from what audits and comparisons found.

use std::collections::{HashMap, HashSet};

use super::remarks;
use crate::audit::recorded::{Carried, Finding, Labelled, MISTAKES_SHOW, Reads, SHARP};
use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, Status};
use crate::dump::Unfinite;
use crate::report::words::{count, number};
use crate::report::{
    CheckpointVerdict as V, Coverage, Diagnosis, Entry, FirstDivergence, Local, LocalError, Numbers, Report,
    Seen, Tried, Verdict,
};
use crate::verdict::bracket;
use crate::verdict::numbers::by_carried;
use crate::verdict::text::{self, alone};
use crate::verdict::{Why, refuted, within_tolerance};

/// Everything that is known of one id.
pub struct Known<'a> {
    /// The id.
    pub id: Checkpoint,
    /// The sides compared; `None` where one recording is audited.
    pub comparison: Option<&'a Comparison>,
    /// The side that is judged.
    pub candidate: Option<&'a Finding>,
    /// The other side.
    pub reference: Option<&'a Finding>,
    /// Whether nodes behind it were judged across it, where it was not recorded itself.
    pub across: bool,
    /// What rounding carries up to it from the tokens, where that was simulated.
    pub carried: Option<&'a Carried>,
    /// NaN and Inf in all rows that the candidate has of it.
    pub unfinite: Unfinite,
}

/// What is known of the ids before one.
#[derive(Clone, Copy, Default)]
struct Before {
    /// The first that is at fault on either side.
    faulty: Option<Checkpoint>,
    /// The first that was not looked at.
    unseen: Option<Checkpoint>,
}

/// The answer for one id.
fn entry(known: &Known<'_>, before: Before) -> (Entry, bool, Option<String>) {
    let Judged { mut verdict, mut evidence, open, carried } = judge(known, before);
    let seen = known.comparison.and_then(|comparison| comparison.seen);
    if let Some(seen) = &seen {
        evidence += &text::seen_in_part(seen);
        let other_sum = seen.sum.is_some_and(|sum| !(sum.over() <= 1.0));
        if other_sum && verdict == V::Match {
            verdict = V::Undecided;
        }
    }
    let numbers = known.comparison.and_then(|comparison| comparison.numbers.clone());
    let rows = match known.comparison {
        Some(comparison) => comparison.rows_compared,
        None => known.candidate.and_then(Finding::audit).map_or(0, |audit| audit.local.rows),
    };
    let row_shape = known.comparison.map(|comparison| &comparison.row_shape);
    let row_shape = row_shape.or(known.candidate.map(|finding| &finding.row_shape)).into_iter().flatten();
    let entry = Entry {
        id: known.id,
        layer: known.id.layer_index(),
        verdict,
        evidence: Some(evidence),
        numbers,
        local: Local { candidate: local(known.candidate), reference: local(known.reference) },
        parts: None,
        diagnosis: if verdict == V::Reference { known.reference } else { known.candidate }
            .map_or_else(Vec::new, |finding| finding.diagnosis().0.to_vec()),
        shape: std::iter::once(rows as usize).chain(row_shape.copied()).collect(),
        seen,
        op: None,
        inputs: Vec::new(),
    };
    (entry, open, carried)
}

/// An answer in words.
struct Judged {
    verdict: V,
    evidence: String,
    /// Whether what rounding carries up to the node, which was not looked at, would settle it.
    open: bool,
    /// What that says, where it is known.
    carried: Option<String>,
}

impl From<(V, String)> for Judged {
    fn from((verdict, evidence): (V, String)) -> Judged {
        Judged { verdict, evidence, open: false, carried: None }
    }
}

fn local(finding: Option<&Finding>) -> Option<LocalError> {
    finding.and_then(Finding::audit).map(|audit| audit.local)
}

fn judge(known: &Known<'_>, before: Before) -> Judged {
    let Some(own) = known.candidate else { return (V::Missing, "not recorded".to_owned()).into() };
    let audit = own.audit();
    if let Some(audit) = audit.as_ref().filter(|_| !own.is_healthy()) {
        return match audit.nonfinite {
            0 => (V::Origin, format!("its local error is {}{}", beyond(&audit.local), place(own))),
            _ => (V::Nonfinite, format!("{}; its recorded inputs do not explain them", known.unfinite)),
        }
        .into();
    }
    if let Some(Status::Shape(ours, theirs)) = known.comparison.map(|comparison| &comparison.status) {
        return (V::Shape, format!("rows of {ours:?} in the candidate, {theirs:?} in the reference")).into();
    }
    if let Some((shape, expected)) = &own.misshapen {
        return (V::Shape, format!("rows of {shape:?} in the candidate, the model's are {expected} wide"))
            .into();
    }
    if own.unrecorded > 0 {
        return (V::Missing, format!("not recorded in {}", count(own.unrecorded, "step"))).into();
    }
    let open = own.undecided.as_ref().map(|needs| format!("to judge it, the recording needs {needs}"));
    if let Some(why) = open.or_else(|| audit.as_ref().and_then(|_| blind(own))) {
        return (V::Undecided, why).into();
    }
    if let Some(what) = &own.lost {
        return unread(what, known.comparison).into();
    }
    let Some(audit) = audit else { return (V::Missing, "not recorded".to_owned()).into() };
    if let Some(answer) = nonfinite(known, before) {
        return answer.into();
    }
    let Some(comparison) = known.comparison else {
        return (V::Match, format!("{}{}", alone(&audit.local), remarks(own))).into();
    };
    compared(known, comparison, own, &audit.local, before)
}

/// NaN and Inf that exact arithmetic has too, since what the node reads holds some: the fault is before it. Inf alone may be
/// a mask, unless the reference has none.
fn nonfinite(known: &Known<'_>, before: Before) -> Option<(V, String)> {
    let numbers = known.comparison.and_then(|comparison| comparison.numbers.as_ref());
    let more = numbers.is_some_and(|numbers| numbers.nonfinite.candidate > numbers.nonfinite.reference);
    if known.unfinite.nan == 0 && !more {
        return None;
    }
    let count = known.unfinite;
    Some(match before {
        Before { faulty: Some(_), .. } => (V::Inherited, format!("{count}; they come from before it")),
        Before { unseen: Some(_), .. } => {
            (V::Nonfinite, format!("{count}; its inputs, which were not looked at, hold some already"))
        }
        _ if more => (V::Nonfinite, format!("{count}, as in exact arithmetic; the reference has fewer")),
        _ => return None,
    })
}

/// A node that reads what is lost of its recording: a gap, unless it differs from a reference, which nothing explains then.
fn unread(what: &str, comparison: Option<&Comparison>) -> (V, String) {
    let text = format!("{what}, which it reads, were not recorded");
    let open = comparison.filter(|comparison| comparison.within_tolerance != Some(true));
    let numbers = open.and_then(|comparison| comparison.numbers.as_ref());
    match numbers.filter(|numbers| numbers.abs_err_max != 0.0) {
        Some(numbers) => {
            (V::Undecided, format!("{text}, and it differs from the reference by {:.1e}", numbers.rel_l2))
        }
        None => (V::Missing, text),
    }
}

/// The name of a mistake behind what it explains.
fn called(named: Option<&Diagnosis>) -> String {
    named.map_or_else(String::new, |best| format!(": {} ({})", best.text, best.fault))
}

/// Where the bug of a node is.
fn place(own: &Finding) -> String {
    if let Some(reader) = own.contradicted_by {
        let engine = "the dump is wrong here, the engine is not";
        return format!(", but {reader} was computed from what it should be: {engine}");
    }
    match own.bridged.first().zip(own.bridged.last()) {
        None => ": the bug is in this node".to_owned(),
        Some((first, last)) if first == last => {
            format!(": the bug is in this node or in {first}, which was not recorded")
        }
        Some((first, last)) => {
            format!(": the bug is in this node or before it, from {first} to {last}, which were not recorded")
        }
    }
}

/// What two healthy sides lack to be compared.
fn not_in_common(comparison: &Comparison) -> Option<&'static str> {
    match (&comparison.status, &comparison.numbers) {
        // One of them was recorded in another form, such as the experts that were chosen of an order of all.
        (Status::MissingReference | Status::MissingCandidate, _) => Some("form"),
        (Status::OtherSteps(_), None) => Some("step"),
        _ => None,
    }
}

/// Whether two sides are no farther from each other than rounding leaves either of them from exact arithmetic.
pub(super) fn is_explained(numbers: &Numbers, ours: &LocalError, theirs: Option<&LocalError>) -> bool {
    let band = |local: &LocalError| local.bound_rel_l2.unwrap_or(0.0) + local.rel_l2;
    numbers.rel_l2 <= band(ours) + theirs.map_or(0.0, band)
}

/// A healthy candidate beside its reference.
fn compared(
    known: &Known<'_>,
    comparison: &Comparison,
    own: &Finding,
    local: &LocalError,
    before: Before,
) -> Judged {
    if comparison.within_tolerance == Some(true) {
        return (V::Match, "within the tolerance given".to_owned()).into();
    }
    let theirs = witness(known.reference, &comparison.status);
    if let Err(answer @ (V::Reference, _)) = theirs {
        return answer.into();
    }
    if comparison.within_tolerance == Some(false) {
        // What a healthy node got from a faulty one, be it the reference's, is no divergence of its own.
        return match before.faulty {
            Some(faulty) => inherited(local, faulty).into(),
            None => (V::Beyond, "beyond the tolerance given, though its local error is rounding".to_owned())
                .into(),
        };
    }
    if comparison.seen.is_some() {
        return printed(known, comparison, local, before);
    }
    let theirs = match theirs {
        Ok(theirs) => theirs,
        Err(answer) => return answer.into(),
    };
    if let Some(what) = not_in_common(comparison) {
        let text = format!("{}; so is the reference's: they have no {what} in common", alone(local));
        return (V::Match, text).into();
    }
    let Some(numbers) = &comparison.numbers else {
        return (V::Missing, "no token position that both sides have".to_owned()).into();
    };
    if let Status::MissingRows(rows) = comparison.status {
        return (V::Missing, format!("{} of the reference's rows are not in the candidate", rows)).into();
    }
    let witnesses = format!(
        "the candidate is {:.1e} from exact arithmetic here, the reference {:.1e}{}",
        local.rel_l2,
        theirs.rel_l2,
        remarks(own)
    );
    match (before.faulty, before.unseen) {
        _ if is_explained(numbers, local, Some(&theirs)) => (V::Match, witnesses).into(),
        (Some(faulty), _) => inherited(local, faulty).into(),
        (None, Some(_)) => carried_on(known, comparison, local, numbers.rel_l2),
        (None, None) => {
            let text = "every node before it is healthy: the distance is rounding, carried on";
            (V::Match, format!("{witnesses}; {text}")).into()
        }
    }
}

/// A healthy node behind a faulty one.
fn inherited(local: &LocalError, faulty: Checkpoint) -> (V, String) {
    (V::Inherited, format!("{}; what it differs by comes from {faulty} or before it", alone(local)))
}

/// The reference's local error, where it was judged and is healthy; otherwise what that says of the node.
fn witness(reference: Option<&Finding>, status: &Status) -> Result<LocalError, (V, String)> {
    if let Some(what) = reference.and_then(|finding| finding.lost.as_ref()) {
        return Err((V::Missing, format!("{what}, which the reference reads, were not recorded")));
    }
    let (reference, theirs) = match reference.map(|finding| (finding, finding.audit())) {
        None | Some((_, None)) => {
            let why = reference.and_then(|finding| finding.undecided.as_deref());
            return Err(match (why, status) {
                (None, Status::MissingReference) => (V::Missing, "not in the reference".to_owned()),
                (why, _) => (V::Undecided, format!("the reference lacks {}", why.unwrap_or("its values"))),
            });
        }
        Some((finding, Some(audit))) => (finding, audit.local),
    };
    if !reference.is_healthy() {
        let named = called(reference.diagnosis().0.first());
        let text = format!("the reference's local error is {}: it is wrong{named}", beyond(&theirs));
        return Err((V::Reference, text));
    }
    match &reference.undecided {
        Some(needs) => Err((V::Undecided, format!("to judge the reference, its recording needs {needs}"))),
        None => Ok(theirs),
    }
}

/// A healthy candidate beside values that were only printed, of which nothing can be computed again.
fn printed(known: &Known<'_>, comparison: &Comparison, local: &LocalError, before: Before) -> Judged {
    let Some(numbers) = &comparison.numbers else {
        return (V::Missing, "no token position that both sides have".to_owned()).into();
    };
    let within = numbers.rel_l2 <= local.bound_rel_l2.unwrap_or(0.0) + local.rel_l2;
    match before.faulty.filter(|_| !within) {
        Some(faulty) => inherited(local, faulty).into(),
        None if numbers.rel_l2 > 0.0 => carried_on(known, comparison, local, numbers.rel_l2),
        None => (V::Match, alone(local)).into(),
    }
}

/// A healthy node that differs by more than local errors: nodes before it were not looked at, and what rounding carries
/// through them decides.
fn carried_on(known: &Known<'_>, comparison: &Comparison, local: &LocalError, distance: f64) -> Judged {
    let unseen = Why::Unseen { distance };
    let (verdict, why) = match known.carried {
        Some(carried) => by_carried(carried, comparison, unseen),
        None => (V::Undecided, unseen),
    };
    let carried = text::carried_on(&why).unwrap_or_default();
    let evidence = format!("{}; it {carried}", alone(local));
    Judged { verdict, evidence, open: known.carried.is_none(), carried: Some(carried) }
}

/// Why nothing can be said of a node that was judged across others: what rounding explains of those is as much as
/// mistakes come to.
fn blind(own: &Finding) -> Option<String> {
    let last = own.bridged.iter().rfind(|id| !id.kind().is_optional()).filter(|_| own.is_blind())?;
    let band = own.band().unwrap_or(f64::NAN);
    Some(match own.is_of_unknown() {
        true => format!(
            "only an arithmetic coarser than f32, which the dump does not declare, explains it: that rounds {band:.0e} of it, \
             and a mistake may be as large: declare the arithmetic with --numerics, or record {last} as well"
        ),
        false => format!(
            "between it and what was recorded before, rounding explains as much as {band:.0e} of it, which would hide \
             mistakes: record {last} as well"
        ),
    })
}

fn beyond(local: &LocalError) -> String {
    let at: Vec<String> = local.worst.iter().map(ToString::to_string).collect();
    match local.over_bound {
        over if over.is_finite() => {
            format!("{} times what rounding explains, worst at [{}]", number(over), at.join(", "))
        }
        _ => format!("beyond any bound, worst at [{}]", at.join(", ")),
    }
}

/// The answers for all ids that are shown.
#[derive(Default)]
pub struct Answers {
    /// One for each, in execution order.
    entries: Vec<Entry>,
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
    out
}

/// What parity does not see, where an engine's type, or what it does not show, makes that more than rounding of f32.
fn unseen(entries: &[Entry]) -> Option<String> {
    // What was crossed to a node widens what rounding explains there; so do scores in a narrow type that are so large that
    // they say nothing of their weights.
    let wide = |entry: &Entry| {
        let local = entry.local.candidate.as_ref()?;
        let limit = if local.bridged.is_empty() { MISTAKES_SHOW } else { SHARP };
        local.bound_rel_l2.filter(|band| *band > limit)
    };
    let bands = entries.iter().filter_map(|entry| Some((entry, wide(entry)?)));
    let (entry, band) = bands.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let explained = format!("{} within what rounding explains", count(entries.len(), "node"));
    // A mistake may lead from one end of what rounding explains to the other.
    let limit = 2.0 * band;
    Some(match limit < 1.0 {
        true => format!(
            "{explained}; a mistake that moves {} by less than {limit:.0e} would not be seen",
            entry.id
        ),
        false => format!("{explained}, which may be all of {}: a mistake there would not be seen", entry.id),
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
        (Verdict::Undecided, Some("no node could be computed again from what was recorded".to_owned()))
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
    graphs: &[(usize, &Labelled)],
    tried: &dyn Fn(Checkpoint) -> (Vec<Tried>, Option<String>),
    allow_missing: bool,
    [rows_audited, rows_screened]: [u64; 2],
) -> Report {
    let (verdict, mut reason) = answer(&answers, allow_missing);
    let Answers { mut entries, tolerated, lost, rows: [rows_compared, rows_expected], carried, .. } = answers;
    if let Some((at, text)) = bracket::bracket(&entries, true) {
        *entries[at].evidence.get_or_insert_default() += &format!("; {text}");
        reason
            .iter_mut()
            .filter(|_| verdict == Verdict::Undecided)
            .for_each(|reason| *reason += &format!("; {text}"));
    }
    let of = |verdict: V| entries.iter().filter(move |entry| entry.verdict == verdict);
    let first = entries.iter().find(|entry| entry.verdict.is_fault());
    let unnamed = first.map_or_else(Default::default, |entry| tried(entry.id));
    let first_divergence = first.map(|entry| FirstDivergence {
        checkpoint: entry.id,
        layer: entry.layer,
        verdict: entry.verdict,
        inputs: graphs
            .iter()
            .map(|(_, graph)| graph.inputs(entry.id))
            .find(|ids| !ids.is_empty())
            .unwrap_or_default(),
        diagnosis: entry.diagnosis.clone(),
        residual: unnamed.1.clone(),
        tried: unnamed.0.clone(),
        reproduce: None,
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
    let origins = of(V::Origin).map(|entry| entry.id).collect();
    let notes = not_judged(&lost).filter(|_| allow_missing).into_iter().collect();
    let checkpoints = entries;
    Report { verdict, reason, first_divergence, origins, coverage, checkpoints, notes, ..Report::default() }
}

/// How much was seen of all nodes of which a side was only printed.
fn seen(entries: &[Entry]) -> Option<Seen> {
    let parts = || entries.iter().filter_map(|entry| entry.seen);
    parts().next()?;
    Some(Seen { values: parts().map(|s| s.values).sum(), of: parts().map(|s| s.of).sum(), sum: None })
}
