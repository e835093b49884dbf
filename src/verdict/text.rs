//! Answers in words.

use std::path::Path;

use super::{Gap, Why};
use crate::audit::Carried;
use crate::compare::Hunk;
use crate::ops::bound::HEALTHY;
use crate::report::words::{count, number, thousands};
use crate::report::{CheckpointVerdict, Coverage, Entry, LocalError, Seen};
use crate::text::printable;
use parity_dump::Stopped;

/// The evidence in one sentence without a full stop.
pub fn sentence(why: &Why) -> String {
    match why {
        Why::Equal => "equal".to_owned(),
        Why::Tolerance { within: true } => "within the tolerance given".to_owned(),
        Why::Tolerance { within: false } => "beyond the tolerance given".to_owned(),
        Why::Lacking(what) => (*what).to_owned(),
        Why::LackingRows(rows) => {
            format!("{} of the reference's rows are not in the candidate", thousands(*rows))
        }
        Why::OtherSteps(tensors) => format!(
            "{} of steps that the other side has not: they have no form in common",
            count(*tensors as usize, "tensor")
        ),
        Why::Shapes { candidate, reference } => {
            format!("rows of {candidate:?} in the candidate, {reference:?} in the reference")
        }
        Why::Nonfinite { count, from } => format!("{count}; {from}"),
        Why::ReferenceNonfinite(count) => format!("{} NaN or Inf in the reference alone", thousands(*count)),
        Why::BeyondPass(own) => format!(
            "it is {} from an exact forward pass of the model, {} times what rounding explains: the bug is here or in any \
             node before, none of which is known",
            number(own.distance),
            number(own.over)
        ),
        Why::Alone => "to judge it, the recording needs what it is computed from".to_owned(),
        Why::Differs => "the sides differ; nothing says whether this node or its input is wrong".to_owned(),
        Why::NotRecorded => "not recorded".to_owned(),
        Why::Unseen { .. } => {
            format!("its local error is rounding; it {}", carried_on(why).unwrap_or_default())
        }
        Why::Carried { local, .. } => {
            let rest = carried_on(why).unwrap_or_default();
            match &**local {
                Why::Unseen { .. } => format!("its local error is rounding; it {rest}"),
                other => format!("{}; it {rest}", sentence(other)),
            }
        }
    }
}

/// What is known of a distance that comes from nodes which were not looked at, as a predicate.
pub fn carried_on(why: &Why) -> Option<String> {
    match why {
        Why::Unseen { distance } => Some(format!(
            "is {} from the reference, and the nodes before it were not all looked at",
            number(*distance)
        )),
        Why::Carried { carried, distance, sharp, .. } => Some(simulated(carried, *distance, *sharp)),
        _ => None,
    }
}

fn simulated(carried: &Carried, distance: Option<f64>, sharp: bool) -> String {
    let own = carried.candidate.map(|own| {
        let (distance, band) = (number(own.distance), number(own.band));
        format!(
            "is {distance} from an exact forward pass of the model, and rounding explains up to {band} of it"
        )
    });
    let apart = distance.map(|distance| {
        let (distance, apart) = (number(distance), number(carried.apart));
        format!("is {distance} from the reference, and rounding of both explains up to {apart}")
    });
    let parts: Vec<String> = own.into_iter().chain(apart).collect();
    let blind = match sharp {
        true => "",
        false => ": too much for mistakes to show; looking at all nodes would decide",
    };
    format!("{}{blind}", parts.join("; it "))
}

/// A local error that rounding explains.
pub(super) fn alone(local: &LocalError) -> String {
    format!(
        "its local error is {:.1e}, {:.0} % of what rounding explains",
        local.rel_l2,
        100.0 * local.over_bound
    )
}

/// How much was seen of a checkpoint that was only printed, and whether the sum agrees: goes on a sentence.
pub fn seen_in_part(seen: &Seen) -> String {
    let mut text = format!("; {} of {} values seen", thousands(seen.values), thousands(seen.of));
    if let Some(sum) = seen.sum {
        let (apart, bound) = (number((sum.candidate - sum.reference).abs()), number(sum.bound));
        text += &match sum.over() <= 1.0 {
            true => format!(", sums {apart} apart ({bound} explained)"),
            false => format!(
                ", but the sums are {apart} apart ({bound} explained): values that were not seen differ"
            ),
        };
    }
    text
}

/// What an agreement of printed values does not show.
pub fn seen_alone(seen: &Seen) -> String {
    if seen.values == seen.of {
        return format!("all {} values agree, as far as they were written down", thousands(seen.of));
    }
    let share = 100.0 * seen.values as f64 / seen.of.max(1) as f64;
    format!(
        "of what was printed: {} of {} values seen ({share:.2} %) agree, and nothing is known of the others but \
         their sums",
        thousands(seen.values),
        thousands(seen.of)
    )
}

/// Tokens that there is nothing to say about.
pub fn gap(gap: &Gap) -> String {
    match gap {
        Gap::OtherTokens(hunks, counts) => other_tokens(hunks, *counts),
        Gap::FewerTokens([candidate, reference]) => format!(
            "the candidate has {candidate} tokens and the reference {reference}: the others were not compared"
        ),
        Gap::Unrecorded(side, rows, tokens) => {
            format!("the {side} has rows at {rows} of its {tokens} tokens: nothing is known of the others")
        }
        Gap::Rows(side, id, [rows, all]) => {
            format!("the {side} has {rows} of {all} rows of {id}: nothing is known of the others")
        }
        Gap::OtherContext(key, true) => format!(
            "row {key} stands behind other tokens on the two sides, by what its sequence was copied or loaded from, or what was \
             taken out of it: each may be right, and they say nothing of each other"
        ),
        Gap::OtherContext(key, false) => format!(
            "row {key} goes on from states that were saved elsewhere and are not the same: whether they are of the same tokens, \
             nobody knows"
        ),
        Gap::Written(side, step) => format!(
            "before step {step} of the {side} something wrote into the caches that was no call of llama.cpp's: what that step \
             began with is not what the steps before left, and nothing says why"
        ),
        Gap::Ended(side, path, last, stopped) => ended(side, path, *last, stopped.as_ref()),
    }
}

/// Where token lists differ, and what of them is alike.
fn other_tokens(hunks: &[Hunk], [of, _]: [usize; 2]) -> String {
    let at = |first: usize, n: usize| match n {
        1 => format!("one token more at position {first}"),
        n => format!("{n} tokens more at positions {first} to {}", first + n - 1),
    };
    let one = |hunk: &Hunk| match (hunk.tokens, hunk.at) {
        ([ours, 0], [first, _]) => format!("the candidate has {}", at(first, ours)),
        ([0, theirs], [_, first]) => format!("the reference has {}", at(first, theirs)),
        ([ours, theirs], [first, _]) => format!(
            "from position {first} on the candidate has {} in place of the reference's {theirs}",
            count(ours, "token")
        ),
    };
    let all: Vec<String> = hunks.iter().map(one).collect();
    let alike = of - hunks.iter().map(|hunk| hunk.tokens[0]).sum::<usize>();
    let others = if alike == 0 { String::new() } else { format!("; the other {alike} are alike") };
    format!("the tokens differ: {}{others}", all.join(", and "))
}

/// That a dump ends early, and what to do.
fn ended(side: &str, path: &Path, last: Option<usize>, stopped: Option<&Stopped>) -> String {
    let behind = |step: Option<usize>| match step {
        Some(step) => format!("after step {step}"),
        None => "before its first step".to_owned(),
    };
    let what = match stopped {
        Some(Stopped { after_step, position, reason }) => {
            let position = position.map_or_else(String::new, |next| format!(", before position {next}"));
            let why = if reason.is_empty() { "it does not say why" } else { reason };
            format!("stopped {}{position}: {}", behind(after_step.or(last)), printable(why))
        }
        None => format!("is an interrupted recording, which ends {}", behind(last)),
    };
    format!(
        "the {side} {} {what}; nothing is known of what came then: record it again to its end",
        path.display()
    )
}

/// What is wrong with the reference.
pub fn refuted(entry: &Entry) -> String {
    let named = entry.diagnosis.first();
    let named = named.map_or_else(String::new, |best| format!(": {} ({})", best.text, best.fault));
    format!("the reference itself is wrong at {}{named}", entry.id)
}

/// What an answer claims where so many checkpoints passed by the tolerance that a user gave; and what that accepted of the
/// reference, or that nobody looked.
pub fn within_tolerance(tolerated: usize, coverage: &Coverage, entries: &[Entry]) -> Option<String> {
    if tolerated == 0 {
        return None;
    }
    let rest = match coverage.checkpoints_compared.saturating_sub(tolerated) {
        0 => String::new(),
        rest => format!(", {rest} within what rounding explains"),
    };
    let is_wrong = |entry: &&Entry| {
        let reference = entry.local.reference.as_ref();
        entry.verdict == CheckpointVerdict::Match
            && reference.is_some_and(|local| !(local.over_bound <= HEALTHY))
    };
    let but = match entries.iter().find(is_wrong) {
        Some(entry) => {
            format!("; the reference itself is wrong at {}, which the tolerance accepts", entry.id)
        }
        None if coverage.rows_audited.is_none() => "; neither side was judged by itself".to_owned(),
        None => String::new(),
    };
    let given = count(tolerated, "checkpoint");
    Some(format!("{given} within the tolerance given{rest}{but}"))
}
