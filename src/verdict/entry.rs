//! The answer for one id, from what audits and comparisons found.

use super::left_out::remarks;
use crate::audit::{Beside, Carried, Finding};
use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, Status};
use crate::dump::Unfinite;
use crate::report::words::{count, number};
use crate::report::{CheckpointVerdict as V, Diagnosis, Entry, Local, LocalError, Numbers};
use crate::verdict::Why;
use crate::verdict::text::{self, alone};

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
pub struct Before {
    /// The first that is at fault on either side.
    pub faulty: Option<Checkpoint>,
    /// The first that was not looked at.
    pub unseen: Option<Checkpoint>,
}

/// The answer for one id.
pub fn entry(known: &Known<'_>, before: Before) -> (Entry, bool, Option<String>) {
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
        bits: None,
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
    if let Some(late) = own.late {
        return (V::Undecided, format!("not judged: {late}")).into();
    }
    let open = own.undecided.as_ref().map(|needs| format!("to judge it, the recording needs {needs}"));
    if let Some(why) = open.or_else(|| audit.as_ref().and_then(|_| blind(own))) {
        return (V::Undecided, why).into();
    }
    // Behind the others: that some steps lack a node is no answer for those that have it.
    if own.unrecorded > 0 {
        return (V::Missing, format!("not recorded in {}", count(own.unrecorded, "step"))).into();
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

/// How a recording comes to hold another tensor.
const IN_PLACE: &str = "which was written in its place: copy a tensor in the hook";

/// Where the bug of a node is.
fn place(own: &Finding) -> String {
    if let Some(reader) = own.contradicted_by {
        let engine = "the dump is wrong here, the engine is not";
        let place = own.overwritten.map_or_else(String::new, |held| match held.before {
            None => format!(" (it holds {}, {IN_PLACE})", held.by),
            Some(factor) => {
                format!(" (it holds {} before {factor} is multiplied with it, {IN_PLACE})", held.by)
            }
        });
        let beside = match own.beside {
            None => String::new(),
            Some(Beside::Wrong(id)) => format!("; {id} is wrong by itself, whatever was recorded here"),
            Some(Beside::Unknown(id)) => format!(
                "; {id}, which reads it, is not judged: whether the engine is right there is not known"
            ),
        };
        return format!(", but {reader} was computed from what it should be: {engine}{place}{beside}");
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
    if let Some(late) = reference.filter(|finding| !finding.is_wrong()).and_then(|finding| finding.late) {
        return Err((V::Undecided, format!("the reference was not judged: {late}")));
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

/// What a simulation of the nodes before says: both the candidate's distance from the exact forward pass and that
/// of the two sides have to be rounding, and rounding has to be small enough for mistakes to show.
fn by_carried(carried: &Carried, comparison: &Comparison, open: Why) -> (V, Why) {
    // A few printed values may be small ones: they are measured by the size of all.
    let distance = |numbers: &crate::report::Numbers| match comparison.seen {
        Some(_) => numbers.rmse / carried.size,
        None => numbers.rel_l2,
    };
    let distance = comparison.numbers.as_ref().map(distance);
    let why = |sharp| Why::Carried { carried: *carried, distance, sharp, local: Box::new(open.clone()) };
    let candidate = carried.candidate.is_none_or(|own| own.over <= 1.0);
    let apart = distance.is_none_or(|distance| distance <= carried.apart);
    match (candidate && apart && (carried.candidate.is_some() || distance.is_some()), carried.is_sharp()) {
        (true, true) => (V::Match, why(true)),
        (true, false) => (V::Undecided, why(false)),
        (false, _) => (V::Undecided, why(true)),
    }
}

/// Why nothing can be said of a node that was judged across others: what rounding explains of those is as much as
/// mistakes come to.
fn blind(own: &Finding) -> Option<String> {
    let band = own.hidden()?;
    let last = own.bridged.iter().rfind(|id| !id.kind().is_optional())?;
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
