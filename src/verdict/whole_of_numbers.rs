//! The answer of the whole where sides were compared and neither was judged by a graph.

use super::text::{self, refuted, within_tolerance};
use super::{Gap, Why, spoken};
use crate::report::{CheckpointVerdict, Coverage, Entry, TokenReport, Verdict, words};

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
            let other = self.gaps.iter().find(|gap| matches!(gap, Gap::OtherTokens(..)));
            return Some(other.map_or(reason.to_owned(), text::gap));
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
