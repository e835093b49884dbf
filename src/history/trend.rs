//! Since when a number is worse: the first run from which on every value left the range of those just before it.

use serde::Serialize;

use super::store::{Run, Series, What};
use crate::report::diff::{FACTOR, FACTOR_KL, FLOOR_DISTANCE, FLOOR_KL, FLOOR_OWN, ratio};
use crate::report::words;

/// Runs whose range is the noise that a change is measured by: older ones may be of before another change.
const WINDOW: usize = 10;

/// A number that is worse today.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worse {
    /// Name of the suite.
    pub suite: String,
    /// Where.
    pub machine: String,
    /// The case.
    pub case: String,
    /// The checkpoint; null for the KL of the tokens.
    pub checkpoint: Option<String>,
    /// Which number.
    pub what: What,
    /// The first run with it.
    pub since: Run,
    /// The run before it, of the same series.
    pub before: Run,
    /// The largest value just before.
    pub was: f64,
    /// Today's; null where it is not finite or no longer measured.
    pub is: Option<f64>,
    /// How many times as large; null where today's is.
    pub ratio: Option<f64>,
}

/// The place of the first value from which on all are worse than those just before.
///
/// As with baselines, worse means to exceed the range by more than the range is wide, and by more than a factor; a number that
/// was there and is not any more was NaN, or is not measured.
fn since(what: What, values: &[Option<f64>]) -> Option<usize> {
    let (factor, floor) = limits(what);
    let is_worse = |before: &[Option<f64>], value: Option<f64>| {
        let known = || before.iter().flatten().copied();
        let (low, high) = (known().fold(f64::INFINITY, f64::min), known().fold(f64::NEG_INFINITY, f64::max));
        if high == f64::NEG_INFINITY {
            return false;
        }
        let allowed = factor.max(ratio(low, high, floor));
        value.is_none_or(|value| !(ratio(high, value, floor) <= allowed))
    };
    (1..values.len()).find(|&at| {
        let before = &values[at.saturating_sub(WINDOW)..at];
        values[at..].iter().all(|value| is_worse(before, *value))
    })
}

fn limits(what: What) -> (f64, f64) {
    match what {
        What::Local => (FACTOR, FLOOR_OWN),
        What::Distance => (FACTOR, FLOOR_DISTANCE),
        What::Kl => (FACTOR_KL, FLOOR_KL),
    }
}

/// What is worse today, in the order of the series. A distance that grew where the local error did not is among them: its node
/// has inherited it.
pub fn worse(runs: &[Run], series: &[Series]) -> Vec<Worse> {
    let run = |id: i64| runs.iter().find(|run| run.id == id).cloned();
    let of = |series: &Series| {
        let values: Vec<Option<f64>> = series.values.iter().map(|(_, value)| *value).collect();
        let at = since(series.what, &values)?;
        let was = values[at.saturating_sub(WINDOW)..at].iter().flatten().copied().fold(f64::NAN, f64::max);
        let is = values.last().copied().flatten();
        Some(Worse {
            suite: series.suite.clone(),
            machine: series.machine.clone(),
            case: series.case.clone(),
            checkpoint: series.checkpoint.clone(),
            what: series.what,
            since: run(series.values[at].0)?,
            before: run(series.values[at - 1].0)?,
            was,
            is,
            ratio: is.map(|is| ratio(was, is, limits(series.what).1)),
        })
    };
    series.iter().filter_map(of).collect()
}

/// The commit of a run, shortened, or when it was.
pub fn called(run: &Run) -> String {
    match &run.commit {
        Some(commit) => commit.chars().take(12).collect(),
        None => run.created.clone(),
    }
}

/// For people: one paragraph for each case and run since which it is worse, the first checkpoint first.
pub fn render(runs: &[Run], worse: &[Worse]) -> String {
    let machines: std::collections::BTreeSet<&str> = runs.iter().map(|run| run.machine.as_str()).collect();
    let mut out = format!(
        "{} on {}, {} to {}\n",
        words::count(runs.len(), "run"),
        words::count(machines.len(), "machine"),
        runs.first().map_or("-", |run| &run.created),
        runs.last().map_or("-", |run| &run.created),
    );
    if worse.is_empty() {
        return out + "nothing is worse than in the runs before\n";
    }
    let mut at = 0;
    while let Some(first) = worse.get(at) {
        let alike = |other: &&Worse| {
            (&other.suite, &other.machine, &other.case, other.since.id)
                == (&first.suite, &first.machine, &first.case, first.since.id)
        };
        let n = worse[at..].iter().take_while(alike).count();
        let place = first.checkpoint.as_deref().unwrap_or("the tokens");
        let what = match first.what {
            What::Local => "local error",
            What::Distance => "distance",
            What::Kl => "KL",
        };
        let is = first.is.map_or("not a number any more".to_owned(), words::number);
        out += &format!(
            "\n{} is worse since {} ({})\n  {}, {}\n  {what} {} -> {is}{}; the run before: {}\n",
            place,
            called(&first.since),
            first.since.created,
            first.case,
            first.machine,
            words::number(first.was),
            first.ratio.map_or(String::new(), |ratio| format!(" ({} times)", words::number(ratio))),
            called(&first.before),
        );
        if n > 1 {
            out += &format!("  and {} of the same case since then\n", words::count(n - 1, "number"));
        }
        at += n;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_is_found_since_which_all_are_worse() {
        let since = |values: &[f64]| {
            let values: Vec<Option<f64>> = values.iter().map(|v| v.is_finite().then_some(*v)).collect();
            super::since(What::Local, &values)
        };
        assert_eq!(since(&[1e-4; 8]), None);
        assert_eq!(since(&[1e-4, 1.5e-4, 1e-4, 1.9e-4]), None, "within a factor");
        assert_eq!(since(&[1e-4, 1e-4, 5e-4, 5e-4]), Some(2));
        assert_eq!(since(&[1e-4, 5e-4, 1e-4, 1e-4]), None, "it was mended");
        assert_eq!(since(&[1e-4, 5e-4, 1e-4, 1.1e-4, 6e-3]), Some(4));
        assert_eq!(since(&[1e-4, 8e-4, 1e-4, 9e-4]), None, "noise of its own: a range of eight");
        assert_eq!(since(&[1e-4, 1e-4, f64::NAN]), Some(2));
        assert_eq!(since(&[f64::NAN, f64::NAN]), None);
        assert_eq!(since(&[1e-9, 2e-8]), None, "below one rounding all are alike");
        // What was bad long ago and mended hides nothing today.
        let long: Vec<f64> = [1.0; 3].into_iter().chain([1e-4; 12]).chain([1e-3; 2]).collect();
        assert_eq!(since(&long), Some(15));
        assert_eq!(since(&[]), None);
        assert_eq!(since(&[1.0]), None);
    }
}
