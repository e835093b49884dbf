//! The answer of the whole.

use std::path::PathBuf;

use super::{Why, text};
use crate::checkpoint::Checkpoint;
use crate::compare::common_positions;
use crate::dump::Recording;
use crate::ops::bound::HEALTHY;
use crate::report::{CheckpointVerdict, Coverage, Entry, TokenReport, Verdict, words};
use parity_dump::{Dump, Stopped};

/// Tokens that there is nothing to say about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gap {
    /// The sides' tokens differ behind so many; the numbers of each.
    OtherTokens(usize, [usize; 2]),
    /// One side ends before the other: the numbers of tokens of each.
    FewerTokens([usize; 2]),
    /// A side has rows at only so many of its tokens: the side, and the two numbers.
    Unrecorded(&'static str, usize, usize),
    /// A side has rows of a checkpoint at only so many of the positions of its steps: the side, which, and the two numbers.
    Rows(&'static str, Checkpoint, [usize; 2]),
    /// A side's dump ends before what it records did: the side, where it lies, behind which step, and why, where it says so.
    Ended(&'static str, PathBuf, Option<usize>, Option<Stopped>),
}

impl Gap {
    /// Whether a user can accept it.
    pub fn is_acceptable(&self) -> bool {
        !matches!(self, Gap::OtherTokens(..) | Gap::Ended(..))
    }
}

/// What is not compared of the tokens of candidate and reference.
pub fn gaps(candidate: &[u32], reference: &[u32]) -> Vec<Gap> {
    let common = common_positions(candidate, reference) as usize;
    let both = [candidate.len(), reference.len()];
    match common < candidate.len().min(reference.len()) {
        true => vec![Gap::OtherTokens(common, both)],
        false if both[0] != both[1] => vec![Gap::FewerTokens(both)],
        false => Vec::new(),
    }
}

impl Gap {
    /// What nobody knows of a side since its dump ends early, or has no rows of some of its tokens.
    pub fn of_dump(side: &'static str, dump: &Dump) -> Vec<Gap> {
        Gap::of_end(side, dump).into_iter().chain(Gap::of_steps(side, dump)).collect()
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

/// What the answer is made from.
pub struct Whole<'a> {
    pub entries: &'a [Entry],
    /// In the order of the entries.
    pub whys: &'a [Why],
    pub coverage: &'a Coverage,
    /// Whether one recording was audited by itself.
    pub alone: bool,
    pub gaps: &'a [Gap],
    pub allow_missing: bool,
    pub tokens: Option<&'a TokenReport>,
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
    let given = words::count(tolerated, "checkpoint");
    Some(format!("{given} within the tolerance given{rest}{but}"))
}

impl Whole<'_> {
    fn count(&self, verdict: CheckpointVerdict) -> usize {
        self.entries.iter().filter(|entry| entry.verdict == verdict).count()
    }

    /// The answer, and why where it is undecided; what limits it, or what it rests on, where it is parity.
    pub fn verdict(&self) -> (Verdict, Option<String>) {
        if self.entries.iter().any(|entry| entry.verdict.is_fault()) {
            return (Verdict::Divergence, None);
        }
        match self.obstacle() {
            Some(reason) => (Verdict::Undecided, Some(reason)),
            None => (Verdict::Parity, self.basis()),
        }
    }

    /// What stands in the way of parity.
    fn obstacle(&self) -> Option<String> {
        let coverage = self.coverage;
        let audited = self.entries.iter().any(|entry| entry.local.candidate.is_some());
        let simulated = self.whys.iter().any(|why| matches!(why, Why::Carried { .. }));
        if coverage.checkpoints_compared == 0 && !(self.alone && (audited || simulated)) {
            let reason = match self.alone && coverage.rows_audited.is_some() {
                true => "no checkpoint could be computed again: what the nodes read was not recorded",
                false => "nothing was compared",
            };
            return Some(reason.to_owned());
        }
        if let Some(entry) = self.entries.iter().find(|e| e.verdict == CheckpointVerdict::Reference) {
            return Some(refuted(entry));
        }
        let (gaps, _) = spoken(self.gaps, self.allow_missing);
        if let Some(gap) = gaps.into_iter().next() {
            return Some(gap);
        }
        let missing = self.count(CheckpointVerdict::Missing);
        if missing > 0 && !self.allow_missing {
            return Some(format!(
                "{} missing on a side; --layer or --checkpoint narrows the comparison, --allow-missing accepts it",
                words::count(missing, "checkpoint")
            ));
        }
        self.open(audited)
    }

    /// Checkpoints that could not be judged.
    fn open(&self, audited: bool) -> Option<String> {
        let open = self.count(CheckpointVerdict::Undecided);
        let checkpoints = words::count(open, "checkpoint");
        let is_open = |(entry, _): &(&Entry, &Why)| entry.verdict == CheckpointVerdict::Undecided;
        let mut undecided = self.entries.iter().zip(self.whys).filter(is_open);
        let blind = undecided.find(|(_, why)| matches!(why, Why::Carried { .. } | Why::Unseen { .. }));
        match (open, blind) {
            (0, _) => None,
            (_, Some((entry, why))) => Some(format!(
                "{checkpoints} could not be judged; {} {}",
                entry.id,
                text::carried_on(why).unwrap_or_default()
            )),
            _ if audited => Some(format!("{checkpoints} could not be judged")),
            _ if self.coverage.rows_audited.is_some() => Some(format!(
                "{checkpoints} could not be judged, since what the nodes read was not recorded; --rtol, --atol or \
                 --nmse would decide",
            )),
            _ => Some(format!(
                "{open} checkpoints differ and nothing says by how much they may; an audit (-m MODEL, no \
                 --no-audit) or --rtol, --atol, --nmse would"
            )),
        }
    }

    /// What parity rests on where that is not an audit of everything.
    fn basis(&self) -> Option<String> {
        let compared = words::count(self.coverage.checkpoints_compared, "checkpoint");
        let tokens = words::tokens_agree(self.tokens);
        let tolerated = self.whys.iter().filter(|why| matches!(why, Why::Tolerance { .. })).count();
        if let Some(said) = within_tolerance(tolerated, self.coverage, self.entries) {
            return Some(said + tokens);
        }
        if let Some(seen) = &self.coverage.seen {
            return Some(text::seen_alone(seen));
        }
        if self.coverage.rows_audited.is_none() {
            return Some(format!("{compared} equal{tokens}"));
        }
        let mut all = self.entries.iter().zip(self.whys);
        let (entry, limit) = all.find_map(|(entry, why)| Some((entry, text::carried_on(why)?)))?;
        let looked_at = self.entries.iter().filter(|entry| entry.verdict == CheckpointVerdict::Match).count();
        let looked_at = words::count(looked_at, "checkpoint");
        Some(format!(
            "{looked_at} within what rounding explains, as far as they were looked at; {} {limit}",
            entry.id
        ))
    }
}
