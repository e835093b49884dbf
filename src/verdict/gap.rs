//! What nobody knows of the sides: tokens that differ, rows that were not recorded, dumps that end early.

use std::path::PathBuf;

use super::{contexts, text};
use crate::checkpoint::Checkpoint;
use crate::compare::{Hunk, aligned, common_positions};
use crate::dump::Recording;
use crate::report::{CheckpointVerdict, Report, Verdict};
use parity_dump::{Dump, Manifest, RowKey, Step, Stopped};

/// Tokens that there is nothing to say about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gap {
    /// The sides' tokens differ: where, and the numbers of each.
    OtherTokens(Vec<Hunk>, [usize; 2]),
    /// One side ends before the other: the numbers of tokens of each.
    FewerTokens([usize; 2]),
    /// A side has rows at only so many of its tokens: the side, and the two numbers.
    Unrecorded(&'static str, usize, usize),
    /// A side has rows of a checkpoint at only so many of the positions of its steps: the side, which, and the two numbers.
    Rows(&'static str, Checkpoint, [usize; 2]),
    /// A row that the sides computed behind other tokens, and whether that is known of both: else one went on from a state that
    /// was saved elsewhere.
    OtherContext(RowKey, bool),
    /// Before a step of a side something wrote into the caches that was no call of llama.cpp's: the side, and which step.
    Written(&'static str, usize),
    /// A side's dump ends before what it records did: the side, where it lies, behind which step, and why, where it says so.
    Ended(&'static str, PathBuf, Option<usize>, Option<Stopped>),
}

impl Gap {
    /// Whether a user can accept it.
    pub fn is_acceptable(&self) -> bool {
        !matches!(self, Gap::OtherTokens(..) | Gap::Ended(..) | Gap::OtherContext(..) | Gap::Written(..))
    }
}

/// What is not compared of the tokens of candidate and reference.
pub fn gaps(candidate: &[u32], reference: &[u32]) -> Vec<Gap> {
    let common = common_positions(candidate, reference) as usize;
    let both = [candidate.len(), reference.len()];
    match common < candidate.len().min(reference.len()) {
        true => vec![Gap::other_tokens(candidate, reference)],
        false if both[0] != both[1] => vec![Gap::FewerTokens(both)],
        false => Vec::new(),
    }
}

impl Gap {
    /// That the tokens of the sides differ.
    pub fn other_tokens(candidate: &[u32], reference: &[u32]) -> Gap {
        Gap::OtherTokens(aligned(candidate, reference), [candidate.len(), reference.len()])
    }

    /// What nobody knows of a side since its dump ends early, or has no rows of some of its tokens.
    pub fn of_dump(side: &'static str, dump: &Dump) -> Vec<Gap> {
        let ends = Gap::of_end(side, dump).into_iter().chain(Gap::of_steps(side, dump));
        ends.chain(Gap::of_writes(side, dump.manifest())).collect()
    }

    /// That what a step begins with is not what the steps before left, and nothing says why: whoever wrote it may be the bug.
    pub fn of_writes(side: &'static str, manifest: &Manifest) -> Option<Gap> {
        let is_written = |step: &Step| step.life.events.iter().any(|event| event.call == "write");
        Some(Gap::Written(side, manifest.steps.iter().position(is_written)?))
    }

    /// That rows of the sides are of one key and stand behind other tokens.
    pub fn of_contexts(candidate: &Dump, reference: &Dump) -> Option<Gap> {
        contexts::first_apart(candidate, reference).map(|(key, known)| Gap::OtherContext(key, known))
    }

    /// That a dump ends before what it records did: whatever follows may be wrong.
    pub fn of_end(side: &'static str, dump: &Dump) -> Option<Gap> {
        let manifest = dump.manifest();
        let last = manifest.steps.len().checked_sub(1);
        let ended = || Gap::Ended(side, dump.path().to_owned(), last, manifest.stopped.clone());
        (!manifest.is_whole()).then(ended)
    }

    /// Tokens of a recording that none of its steps has a row of.
    pub fn of_steps(side: &'static str, recording: &dyn Recording) -> Option<Gap> {
        let tokens = recording.tokens().len();
        let positions = stepped(recording);
        (positions < tokens).then_some(Gap::Unrecorded(side, positions, tokens))
    }

    /// Rows that an audited recording, which brings no graph, lacks of what it has otherwise: nothing says that they were not
    /// computed. Attention matrices are recorded as somebody asks for them.
    pub fn of_rows(
        side: &'static str,
        recording: &dyn Recording,
        wanted: impl Iterator<Item = Checkpoint>,
    ) -> Vec<Gap> {
        let all = stepped(recording);
        let wanted = wanted.filter(|id| id.kind().is_fixed() && !id.kind().is_optional());
        let rows = wanted.map(|id| (id, recording.positions(id).len()));
        let lacking = rows.filter(|(_, rows)| (1..all).contains(rows));
        lacking.map(|(id, rows)| Gap::Rows(side, id, [rows, all])).collect()
    }
}

/// How many positions the steps of a recording compute.
fn stepped(recording: &dyn Recording) -> usize {
    let steps = &recording.manifest().steps;
    let mut positions: Vec<u32> = steps.iter().flat_map(|step| step.positions.iter().copied()).collect();
    positions.sort_unstable();
    positions.dedup();
    positions.len()
}

/// Gaps in words: those that stand in the way of parity, and those that were accepted.
pub fn spoken(gaps: &[Gap], allow_missing: bool) -> (Vec<String>, Vec<String>) {
    let (accepted, obstacles): (Vec<&Gap>, Vec<&Gap>) =
        gaps.iter().partition(|gap| allow_missing && gap.is_acceptable());
    let obstacle = |gap: &&Gap| match gap.is_acceptable() {
        true => text::gap(gap) + "; --allow-missing accepts it",
        false => text::gap(gap),
    };
    // What no flag lifts comes first.
    let (last, first): (Vec<&Gap>, Vec<&Gap>) = obstacles.into_iter().partition(|gap| gap.is_acceptable());
    (first.iter().chain(&last).map(obstacle).collect(), accepted.into_iter().map(text::gap).collect())
}

/// Tokens that there is nothing to say about are no parity.
pub fn refuse_gaps(report: &mut Report, gaps: &[Gap], allow_missing: bool) {
    let (obstacles, accepted) = spoken(gaps, allow_missing);
    let is_final = gaps.iter().any(|gap| !gap.is_acceptable());
    let stands = match report.verdict {
        Verdict::Divergence => true,
        // Another reason, which a flag may lift, is not the whole truth.
        Verdict::Undecided => !is_final || has_wrong_reference(report),
        Verdict::Parity => false,
    };
    if let Some(first) = obstacles.first().filter(|_| !stands) {
        report.verdict = Verdict::Undecided;
        report.reason = Some(first.clone());
    }
    report.notes.extend(accepted);
    report.gaps = obstacles;
}

/// A reference that is wrong stays wrong in any arithmetic of the candidate.
fn has_wrong_reference(report: &Report) -> bool {
    report.checkpoints.iter().any(|entry| entry.verdict == CheckpointVerdict::Reference)
}
