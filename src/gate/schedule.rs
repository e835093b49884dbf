//! Runs the cases of a suite: a part of them, several at a time, again where they do not pass.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::execute::{Attempt, Execute};
use super::judge::{Against, judge};
use super::suite::{Case, Suite};
use super::{CaseResult, GateReport, Problem, SCHEMA, Status};
use crate::memory;
use crate::report::Report;

/// The k-th of n parts: every n-th case from the k-th on, so that neighbours, which cost alike, are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    k: usize,
    n: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Shard, String> {
        let numbers = text.split_once('/').and_then(|(k, n)| k.parse().ok().zip(n.parse().ok()));
        match numbers {
            Some((k, n)) if 1 <= k && k <= n => Ok(Shard { k, n }),
            _ => Err(format!("`{text}` is no shard; expected K/N with K from 1 to N, e.g. 2/5")),
        }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.k, self.n)
    }
}

impl Shard {
    fn has(&self, index: usize) -> bool {
        index % self.n == self.k - 1
    }
}

/// How to run a suite.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// The part; all where absent.
    pub shard: Option<Shard>,
    /// Cases at a time; at least one.
    pub jobs: usize,
    /// Retries of a case that does not pass, where its own are fewer.
    pub retries: u32,
    /// Whether the reports are to hold pictures.
    pub pictures: bool,
}

/// Is shown every case when it is done, with its report; the report is dropped afterwards.
pub type Watch<'a> = &'a (dyn Fn(&CaseResult, Option<&Report>) + Sync);

/// Runs the suite's cases, or the shard's part of them.
pub fn run(
    suite: &Suite,
    executor: &dyn Execute,
    against: &Against<'_>,
    plan: &Pace,
    watch: Watch<'_>,
) -> GateReport {
    let mine = |index: &usize| plan.shard.is_none_or(|shard| shard.has(*index));
    let cases: Vec<usize> = (0..suite.n_cases()).filter(mine).collect();
    let results: Mutex<Vec<Option<CaseResult>>> = Mutex::new(vec![None; cases.len()]);
    let next = AtomicUsize::new(0);
    let work = || {
        memory::begin_thread();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(index) else { break };
            let result = run_case(&suite.case(*case), executor, against, plan, watch);
            results.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[index] = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..plan.jobs.clamp(1, cases.len().max(1)) {
            // Where there is none to be had, the others do its work.
            let started = memory::thread().and_then(|thread| thread.spawn_scoped(scope, work));
            if started.is_err() {
                break;
            }
        }
        work();
    });
    let results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    GateReport {
        schema: SCHEMA.to_owned(),
        suite: suite.name.clone(),
        all: suite.ids().collect(),
        shard: plan.shard.map(|shard| shard.to_string()),
        cases: results.into_iter().flatten().collect(),
        created: None,
    }
}

/// Runs one case until it passes or its tries are used up. Every try is counted, and an earlier failure of a
/// case that passes in the end stays in its problems.
fn run_case(
    case: &Case,
    executor: &dyn Execute,
    against: &Against<'_>,
    plan: &Pace,
    watch: Watch<'_>,
) -> CaseResult {
    let tries = 1 + case.retries.max(plan.retries);
    let mut earlier: Vec<Problem> = Vec::new();
    let mut attempts = 0;
    loop {
        let attempt = executor.execute(case, plan.pictures);
        let mut result = judge(case, &attempt, against);
        attempts += 1;
        result.attempts = attempts;
        let done = matches!(result.status, Status::Passed | Status::Allowed);
        if !done && attempts < tries {
            earlier = result.problems;
            continue;
        }
        if done {
            result.problems.extend(earlier);
        }
        let report = match &attempt {
            Attempt::Report(report) => Some(&**report),
            _ => None,
        };
        watch(&result, report);
        return result;
    }
}
