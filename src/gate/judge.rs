//! A case and what came of its run -> passed, failed, or not to be judged.

use super::baseline::{Baseline, Measures, Moved};
use super::execute::Attempt;
use super::suite::{Case, Waiver};
use super::{CaseResult, Problem, ProblemKind, Status, WaiverUse};
use crate::report::words::{self, number};
use crate::report::{CheckpointVerdict, Entry, Numbers, Report, Verdict};

/// What a case is compared with.
pub struct Against<'a> {
    /// Today, YYYY-MM-DD.
    pub today: &'a str,
    /// The baseline, where the suite has one.
    pub baseline: Option<&'a Baseline>,
    /// Whether the run is to become the baseline: then a case that has none yet is no problem.
    pub accepting: bool,
}

/// Judges one attempt.
pub fn judge(case: &Case, attempt: &Attempt, against: &Against<'_>) -> CaseResult {
    let mut judgement = Judgement::new(case, against);
    let report = match attempt {
        Attempt::Report(report) => Some(&**report),
        Attempt::Missing(kind, text) => {
            judgement.problem(*kind, text.clone());
            None
        }
        Attempt::Failed(error) => {
            judgement.problem(ProblemKind::Error, error.to_string());
            None
        }
    };
    if let Some(report) = report {
        judgement.report(report);
    }
    judgement.result(report)
}

struct Judgement<'a> {
    case: &'a Case,
    against: &'a Against<'a>,
    problems: Vec<Problem>,
    fired: Vec<usize>,
    moved: Vec<Moved>,
}

impl<'a> Judgement<'a> {
    fn new(case: &'a Case, against: &'a Against<'a>) -> Self {
        let mut judgement = Judgement {
            case,
            against,
            problems: Vec::new(),
            fired: vec![0; case.waivers.len()],
            moved: Vec::new(),
        };
        for waiver in case.waivers.iter().filter(|waiver| expired(waiver, against.today)) {
            judgement.problem(
                ProblemKind::ExpiredWaiver,
                format!("the waiver of `{}` ended on {}: {}", waiver.pattern, waiver.until, waiver.reason),
            );
        }
        judgement
    }

    fn problem(&mut self, kind: ProblemKind, text: String) {
        self.problems.push(Problem { kind, text });
    }

    fn report(&mut self, report: &Report) {
        let audited = report.checkpoints.iter().any(|entry| entry.local.candidate.is_some());
        // A dump without a reference is audited by itself.
        if report.reference.is_none() && self.case.dump.is_none() {
            self.problem(ProblemKind::MissingReference, "there is no recording to compare with".to_owned());
        }
        if report.coverage.checkpoints_compared == 0 && (!audited || report.reference.is_some()) {
            self.problem(ProblemKind::NothingCompared, "nothing was compared".to_owned());
        }
        match self.case.expect.verdict {
            Verdict::Divergence => self.injected(report),
            _ => {
                self.clean(report);
                self.baseline(report);
            }
        }
    }

    /// An injected fault must be found, where and under the name that the suite says.
    fn injected(&mut self, report: &Report) {
        let expect = &self.case.expect;
        let first = match (report.verdict, &report.first_divergence) {
            (Verdict::Divergence, Some(first)) => first,
            _ => {
                let text = format!("the injected fault left no divergence: {}", words::because(report));
                return self.problem(ProblemKind::FaultNotFound, text);
            }
        };
        if let Some(at) = expect.at.filter(|at| *at != first.checkpoint) {
            let text = format!("the fault was found at {}, expected at {at}", first.checkpoint);
            self.problem(ProblemKind::FaultMistaken, text);
        }
        let named = first.diagnosis.first().map(|diagnosis| diagnosis.fault.as_str());
        if let Some(fault) = expect.fault.as_deref().filter(|fault| named != Some(fault)) {
            let text = format!("the fault was called {}, expected {fault}", named.unwrap_or("nothing"));
            self.problem(ProblemKind::FaultMistaken, text);
        }
    }

    /// Everything that is not in order and not waived.
    fn clean(&mut self, report: &Report) {
        let mut faults: Vec<&Entry> = Vec::new();
        let mut open: Vec<&Entry> = Vec::new();
        let mut missing = 0;
        for entry in &report.checkpoints {
            let nonfinite = is_nonfinite(entry);
            // A coarser arithmetic than was declared.
            let is_refused =
                entry.verdict == CheckpointVerdict::Precision && report.origins.contains(&entry.id);
            if (entry.verdict.is_healthy() && !nonfinite && !is_refused) || self.waives(entry) {
                continue;
            }
            match entry.verdict {
                verdict if verdict.is_fault() || is_refused || nonfinite => faults.push(entry),
                CheckpointVerdict::Missing => missing += 1,
                _ => open.push(entry),
            }
        }
        if let Some(first) = faults.first() {
            self.problem(ProblemKind::Divergence, sentence(report, first, faults.len()));
        }
        if self.is_unlisted(report) {
            self.problem(ProblemKind::Divergence, words::because(report));
        }
        if missing > 0 {
            let text = format!("{} missing on a side", words::count(missing, "checkpoint"));
            self.problem(ProblemKind::MissingCheckpoints, text);
        }
        if let Some(first) = open.first() {
            let text = first.evidence.clone().unwrap_or_else(|| first.verdict.meaning().to_owned());
            let text = format!(
                "{} could not be judged: {}: {text}",
                words::count(open.len(), "checkpoint"),
                first.id
            );
            self.problem(ProblemKind::Undecided, text);
        }
        for gap in &report.gaps {
            self.problem(ProblemKind::Undecided, gap.clone());
        }
        let nothing_said = self.problems.is_empty() && self.fired.iter().all(|fired| *fired == 0);
        if report.verdict != Verdict::Parity && nothing_said {
            let kind = match report.verdict {
                Verdict::Divergence => ProblemKind::Divergence,
                _ => ProblemKind::Undecided,
            };
            self.problem(kind, words::because(report));
        }
    }

    /// Whether the divergence is none of the checkpoints that are listed, as a node that a graph lacks.
    fn is_unlisted(&mut self, report: &Report) -> bool {
        let Some(first) = report.first_divergence.as_ref().filter(|_| report.verdict == Verdict::Divergence)
        else {
            return false;
        };
        let is_listed = report.checkpoints.iter().any(|entry| entry.id == first.checkpoint);
        !is_listed && !self.waives_checkpoint(&first.checkpoint.to_string())
    }

    /// Whether a waiver that still holds covers the checkpoint.
    fn waives(&mut self, entry: &Entry) -> bool {
        self.waives_checkpoint(&entry.id.to_string())
    }

    fn waives_checkpoint(&mut self, id: &str) -> bool {
        let today = self.against.today;
        let holds = |waiver: &Waiver| !expired(waiver, today) && waiver.checkpoints.is_match(id);
        match self.case.waivers.iter().position(holds) {
            Some(index) => {
                self.fired[index] += 1;
                true
            }
            None => false,
        }
    }

    fn baseline(&mut self, report: &Report) {
        let Some(baseline) = self.against.baseline else { return };
        let Some(moved) = baseline.moved(&self.case.id, &Measures::of(report)) else {
            if !self.against.accepting {
                self.problem(ProblemKind::MissingBaseline, "the baseline has no entry for it".to_owned());
            }
            return;
        };
        let worse: Vec<&Moved> = moved.iter().filter(|moved| moved.worse).collect();
        let unwaived: Vec<&Moved> = worse
            .into_iter()
            .filter(|moved| !moved.checkpoint.is_some_and(|id| self.waives_checkpoint(&id.to_string())))
            .collect();
        if let Some(first) = unwaived.first() {
            let rest = match unwaived.len() - 1 {
                0 => String::new(),
                n => format!(", and {}", words::count(n, "more number")),
            };
            self.problem(ProblemKind::Regression, format!("{}{rest}", describe(first)));
        }
        self.moved = moved;
    }

    fn result(self, report: Option<&Report>) -> CaseResult {
        let allowed = |problem: &Problem| self.case.allow.contains(&problem.kind);
        let obstacles: Vec<&Problem> = self.problems.iter().filter(|problem| !allowed(problem)).collect();
        let judged = report.is_some_and(|report| {
            let coverage = &report.coverage;
            coverage.checkpoints_compared > 0 || coverage.rows_audited.is_some_and(|rows| rows > 0)
        });
        let status = match () {
            () if obstacles.iter().any(|problem| problem.kind.is_judgement()) => Status::Failed,
            () if !obstacles.is_empty() => Status::Undecided,
            // What is allowed to be absent is still shown as such.
            () if !self.problems.is_empty() && !judged => Status::Allowed,
            () => Status::Passed,
        };
        let uses = self.case.waivers.iter().zip(&self.fired).map(|(waiver, &fired)| WaiverUse {
            checkpoint: waiver.pattern.clone(),
            reason: waiver.reason.clone(),
            until: waiver.until.clone(),
            fired,
        });
        CaseResult {
            id: self.case.id.clone(),
            definition: self.case.definition,
            status,
            verdict: report.map(|report| report.verdict),
            answer: report.map(answer).unwrap_or_else(|| "not run".to_owned()),
            waivers: uses.collect(),
            problems: self.problems,
            moved: self.moved,
            attempts: 1,
            coverage: report.map(|report| report.coverage.clone()).unwrap_or_default(),
            next: report.and_then(|report| words::next_commands(report).into_iter().next()),
            measures: report.map(Measures::of).unwrap_or_default(),
            seconds: None,
        }
    }
}

/// The last day of a waiver is a day on which it holds. Dates compare as texts.
fn expired(waiver: &Waiver, today: &str) -> bool {
    *waiver.until < *today
}

/// Whether there is a NaN or Inf, not of the reference alone, whatever the verdict says.
fn is_nonfinite(entry: &Entry) -> bool {
    let numbers = entry.numbers.as_ref();
    let of_reference = |n: &Numbers| n.nonfinite.reference > 0 && n.nonfinite.candidate == 0;
    numbers.is_some_and(|n| !of_reference(n) && (n.nonfinite.candidate > 0 || !n.rel_l2.is_finite()))
}

fn answer(report: &Report) -> String {
    let note = words::diagnosis_note(report).map(|note| format!(" ({note})")).unwrap_or_default();
    format!("{}: {}{note}", words::answer(report), words::because(report))
}

fn sentence(report: &Report, first: &Entry, faults: usize) -> String {
    let is_first = report.first_divergence.as_ref().is_some_and(|f| f.checkpoint == first.id);
    let text = match (is_first, &first.evidence) {
        (true, _) => words::because(report),
        (false, Some(evidence)) => evidence.clone(),
        (false, None) => first.verdict.meaning().to_owned(),
    };
    let more =
        if faults > 1 { format!(" ({} in all)", words::count(faults, "fault")) } else { String::new() };
    format!("{} {}: {text}{more}", first.verdict.name(), first.id)
}

/// `blk.3.q_rope: local error 4.1e-8 -> 4.4e-6 (108 times)`
pub fn describe(moved: &Moved) -> String {
    let place = moved.checkpoint.map_or_else(|| "tokens".to_owned(), |id| id.to_string());
    if let Some([baseline, today]) = &moved.arithmetic {
        return format!("{place}: explained by {today}; in the baseline by {baseline}");
    }
    let times = moved.ratio.map(|ratio| format!(" ({} times)", number(ratio))).unwrap_or_default();
    let today = moved.today.map_or_else(|| "not a number".to_owned(), number);
    format!("{place}: {} {} -> {today}{times}", moved.what, number(moved.baseline))
}
