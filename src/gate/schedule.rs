//! Runs the cases of a suite: a part of them, several at a time, again where they do not pass.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::execute::{Attempt, Execute};
use super::judge::{Against, judge};
use super::suite::{Case, Suite};
use super::times::Times;
use super::{CaseResult, GateReport, Problem, SCHEMA, Status};
use crate::memory;
use crate::report::Report;

/// The k-th of n parts: by time where times are known, else every n-th case from the k-th on, so that neighbours, which cost
/// alike, are spread.
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

    /// The shards that `found` are parts of a whole with and that are not among them; none where they do not belong together.
    pub fn missing(found: &[Shard]) -> Vec<Shard> {
        let Some(first) = found.first().filter(|first| found.iter().all(|other| other.n == first.n)) else {
            return Vec::new();
        };
        (1..=first.n).map(|k| Shard { k, n: first.n }).filter(|shard| !found.contains(shard)).collect()
    }

    /// This shard's part of cases that take `seconds`, in their order: the longest goes first, to the shard with the least
    /// to do so far. Equal times give equal parts on every machine. A case of which no time is known counts as the mean
    /// of the others; where none is, every n-th case is this shard's.
    pub fn part(&self, seconds: &[Option<f64>]) -> Vec<usize> {
        let known: Vec<f64> = seconds.iter().flatten().copied().collect();
        if known.is_empty() {
            return (0..seconds.len()).filter(|index| self.has(*index)).collect();
        }
        let mean = known.iter().sum::<f64>() / known.len() as f64;
        let mut order: Vec<(usize, f64)> =
            seconds.iter().map(|time| time.unwrap_or(mean)).enumerate().collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut sums = vec![0.0; self.n.min(seconds.len()).max(1)];
        let mut mine = Vec::new();
        for (index, time) in order {
            let least = (0..sums.len()).min_by(|a, b| f64::total_cmp(&sums[*a], &sums[*b])).unwrap_or(0);
            sums[least] += time;
            if least + 1 == self.k {
                mine.push(index);
            }
        }
        mine.sort_unstable();
        mine
    }
}

/// How to run a suite.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    /// The part; all where absent.
    pub shard: Option<Shard>,
    /// How long cases took, for shards that take equally long.
    pub times: Times,
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
    let cases: Vec<usize> = match plan.shard {
        None => (0..suite.n_cases()).collect(),
        Some(shard) => shard.part(&suite.ids().map(|id| plan.times.seconds(&id)).collect::<Vec<_>>()),
    };
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
    let begun = Instant::now();
    loop {
        let attempt = executor.execute(case, plan.pictures);
        let mut result = judge(case, &attempt, against);
        attempts += 1;
        result.attempts = attempts;
        result.seconds = Some(begun.elapsed().as_secs_f64());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_by_time_are_a_partition_that_takes_equally_long() {
        let seconds: Vec<Option<f64>> =
            (0..97).map(|i| (i % 13 != 0).then_some(f64::from(i * i % 31) + 0.1)).collect();
        for n in [1, 2, 3, 7, 96, 97, 200] {
            let parts: Vec<Vec<usize>> = (1..=n).map(|k| Shard { k, n }.part(&seconds)).collect();
            let mut all: Vec<usize> = parts.iter().flatten().copied().collect();
            all.sort_unstable();
            assert_eq!(all, (0..97).collect::<Vec<_>>(), "{n}");
            let known: Vec<f64> = seconds.iter().flatten().copied().collect();
            let mean = known.iter().sum::<f64>() / known.len() as f64;
            let time = |part: &Vec<usize>| part.iter().map(|i| seconds[*i].unwrap_or(mean)).sum::<f64>();
            let longest = known.iter().copied().fold(0.0, f64::max);
            let whole: f64 = parts.iter().map(time).sum();
            // Graham's bound of greedy schedules.
            assert!(parts.iter().map(time).all(|t| t <= whole / n as f64 + longest + 1e-9), "{n}");
        }
        // Without times, as ever.
        assert_eq!(Shard { k: 2, n: 3 }.part(&[None; 7]), [1, 4]);
    }

    #[test]
    fn a_lost_shard_has_a_name() {
        let shard = |text: &str| text.parse::<Shard>().unwrap();
        let names = |found: &[&str]| -> Vec<String> {
            Shard::missing(&found.iter().map(|f| shard(f)).collect::<Vec<_>>())
                .iter()
                .map(Shard::to_string)
                .collect()
        };
        assert_eq!(names(&["1/4", "3/4"]), ["2/4", "4/4"]);
        assert_eq!(names(&["1/2", "2/2"]), [""; 0]);
        assert_eq!(names(&["1/2", "2/3"]), [""; 0], "of different wholes nothing is known");
        assert_eq!(names(&[]), [""; 0]);
    }
}
