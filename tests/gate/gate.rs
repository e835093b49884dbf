//! The gate: what passes, and everything that must not.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use globset::GlobSet;
use parity::gate::baseline::{Baseline, Measures};
use parity::gate::execute::{Attempt, Execute};
use parity::gate::judge::Against;
use parity::gate::schedule::{Pace, run};
use parity::gate::suite::{Case, Suite};
use parity::gate::{CaseResult, GateReport, ProblemKind, Status, merge, render};
use parity::report::diff::{Direction, diff};
use parity::report::{CheckpointVerdict, Report, Verdict};

use crate::support::fixture::{SMALL, clean, injected};

const TODAY: &str = "2026-11-21";

fn suite(text: &str) -> Suite {
    Suite::parse(&format!("name = \"test\"\n{text}"), Path::new(".")).unwrap()
}

fn with(text: &str, baseline: Option<&Baseline>, executor: impl Execute, plan: &Pace) -> GateReport {
    let against = Against { today: TODAY, baseline, accepting: false };
    run(&suite(text), &executor, &against, plan, &|_, _| {})
}

fn gate(text: &str, executor: impl Fn(&Case) -> Report + Sync) -> GateReport {
    with(text, None, |case: &Case| Attempt::Report(Box::new(executor(case))), &Pace::default())
}

fn only(report: &GateReport) -> &CaseResult {
    assert_eq!(report.cases.len(), 1);
    &report.cases[0]
}

fn kinds(case: &CaseResult) -> Vec<ProblemKind> {
    case.problems.iter().map(|problem| problem.kind).collect()
}

#[test]
fn a_clean_suite_passes() {
    let report = gate("[[case]]\nname = \"a\"\ndevice = [\"cpu\", \"cpu:0\"]", |_| clean(SMALL));
    assert_eq!(report.verdict(), Verdict::Parity);
    assert_eq!(report.all, ["a/cpu", "a/cpu:0"]);
    insta::assert_snapshot!("gate_clean_text", render::text(&report));
}

#[test]
fn a_fault_fails_and_is_named() {
    let report = gate("[[case]]\nname = \"a\"", |_| injected(SMALL, 1));
    assert_eq!(
        (report.verdict(), kinds(only(&report))),
        (Verdict::Divergence, vec![ProblemKind::Divergence])
    );
    insta::assert_snapshot!("gate_fault_text", render::text(&report));
    insta::assert_snapshot!("gate_fault_junit", render::junit(&report).unwrap());
    insta::assert_snapshot!("gate_fault_markdown", render::markdown(&report));
    insta::assert_snapshot!("gate_fault_github", render::annotations(&report));
}

const INJECTED: &str = "[[case]]\nname = \"a\"\ninject = \"rope.base@1\"\nexpect = \"divergence\"\n";

#[test]
fn a_injected_fault_must_be_found_where_it_is_and_by_its_name() {
    let at = |rest: &str, report: fn() -> Report| {
        let report = gate(&format!("{INJECTED}{rest}"), move |_| report());
        (report.verdict(), kinds(only(&report)))
    };
    let found = || injected(SMALL, 1);
    assert_eq!(at("at = \"blk.1.q_rope\"\nfault = \"rope.base\"", found), (Verdict::Parity, vec![]));
    assert_eq!(at("", || clean(SMALL)), (Verdict::Divergence, vec![ProblemKind::FaultNotFound]));
    assert_eq!(at("at = \"blk.1.q\"", found), (Verdict::Divergence, vec![ProblemKind::FaultMistaken]));
    assert_eq!(at("fault = \"norm.eps\"", found), (Verdict::Divergence, vec![ProblemKind::FaultMistaken]));
}

/// A clean report whose `blk.0.q` has the fault that the gate must see.
fn with_verdict(verdict: CheckpointVerdict) -> Report {
    let mut report = clean(SMALL);
    let entry = report.checkpoints.iter_mut().find(|entry| entry.id.to_string() == "blk.0.q").unwrap();
    entry.verdict = verdict;
    report.verdict = if verdict.is_fault() { Verdict::Divergence } else { Verdict::Undecided };
    report
}

const WAIVED: &str =
    "[[case]]\nname = \"a\"\nwaive = [{ checkpoint = \"blk.0.q*\", reason = \"issue 7\", until = ";

#[test]
fn a_waiver_covers_until_its_last_day_and_says_when_it_is_not_needed() {
    let run =
        |until: &str, verdict| gate(&format!("{WAIVED}\"{until}\" }}]"), move |_| with_verdict(verdict));
    let covered = run(TODAY, CheckpointVerdict::Origin);
    assert_eq!((covered.verdict(), covered.stale_waivers().len()), (Verdict::Parity, 0));
    let expired = run("2026-11-20", CheckpointVerdict::Origin);
    assert_eq!(kinds(only(&expired)), [ProblemKind::ExpiredWaiver, ProblemKind::Divergence]);
    let expired_and_idle = run("2026-11-20", CheckpointVerdict::Match);
    assert_eq!(
        expired_and_idle.verdict(),
        Verdict::Divergence,
        "an expired waiver fails even where it is idle"
    );
    let idle = gate(&format!("{WAIVED}\"2027-01-01\" }}]"), |_| clean(SMALL));
    assert_eq!((idle.verdict(), idle.stale_waivers().len()), (Verdict::Parity, 1));
    assert!(render::text(&idle).contains("waiver no longer needed"));
}

#[test]
fn a_nan_fails_whatever_the_verdict_says() {
    let report = gate("[[case]]\nname = \"a\"", |_| {
        let mut report = clean(SMALL);
        report.checkpoints[3].numbers.as_mut().unwrap().rel_l2 = f64::NAN;
        report
    });
    assert_eq!(report.verdict(), Verdict::Divergence);
    let nonfinite = gate("[[case]]\nname = \"a\"", |_| with_verdict(CheckpointVerdict::Nonfinite));
    assert_eq!(nonfinite.verdict(), Verdict::Divergence);
}

#[test]
fn what_is_missing_fails_unless_it_is_allowed_by_name() {
    let missing = |kind: ProblemKind, name: &str| {
        let executor = move |_: &Case| Attempt::Missing(kind, "not there".to_owned());
        let refused = with("[[case]]\nname = \"a\"", None, executor, &Pace::default());
        assert_eq!((refused.verdict(), only(&refused).status), (Verdict::Undecided, Status::Undecided));
        let both = format!("[[case]]\nname = \"a\"\nallow = [\"{name}\"]\n[[case]]\nname = \"b\"");
        let executor = move |case: &Case| match case.id.as_str() {
            "a" => Attempt::Missing(kind, "not there".to_owned()),
            _ => Attempt::Report(Box::new(clean(SMALL))),
        };
        let allowed = with(&both, None, executor, &Pace::default());
        assert_eq!(
            (allowed.verdict(), allowed.cases[0].status),
            (Verdict::Parity, Status::Allowed),
            "{name}"
        );
        assert!(render::text(&allowed).contains("allowed a"), "what is allowed is still shown");
    };
    missing(ProblemKind::MissingReference, "missing-reference");
    missing(ProblemKind::SkippedDevice, "skipped-device");
    missing(ProblemKind::MissingModel, "missing-model");
    let no_reference = gate("[[case]]\nname = \"a\"", |_| Report { reference: None, ..clean(SMALL) });
    assert_eq!(kinds(only(&no_reference)), [ProblemKind::MissingReference]);
    let nothing =
        gate("[[case]]\nname = \"a\"", |_| Report { reference: clean(SMALL).reference, ..Report::default() });
    assert!(kinds(only(&nothing)).contains(&ProblemKind::NothingCompared));
    assert_eq!(nothing.verdict(), Verdict::Undecided);
    let hole = gate("[[case]]\nname = \"a\"", |_| with_verdict(CheckpointVerdict::Missing));
    assert_eq!(kinds(only(&hole)), [ProblemKind::MissingCheckpoints]);
}

#[test]
fn a_gate_that_allowed_everything_has_judged_nothing() {
    let executor = |_: &Case| Attempt::Missing(ProblemKind::SkippedDevice, "no GPU".to_owned());
    let report =
        with("[[case]]\nname = \"a\"\nallow = [\"skipped-device\"]", None, executor, &Pace::default());
    assert_eq!(report.verdict(), Verdict::Undecided);
}

fn accepted(measures: &Measures) -> Baseline {
    let mut baseline = Baseline::read(Path::new("/nonexistent/baseline.json")).unwrap();
    baseline.accept("a", measures, TODAY);
    baseline
}

fn scaled(report: &Report, factor: f64) -> Measures {
    let mut measures = Measures::of(report);
    let values = measures.checkpoints.values_mut().flatten().flatten();
    values.for_each(|value| *value *= factor);
    measures
}

#[test]
fn a_baseline_ten_times_better_than_today_fails() {
    let today = clean(SMALL);
    let executor = |_: &Case| Attempt::Report(Box::new(clean(SMALL)));
    let against = |factor: f64| {
        with("[[case]]\nname = \"a\"", Some(&accepted(&scaled(&today, factor))), executor, &Pace::default())
    };
    assert_eq!(against(1.0).verdict(), Verdict::Parity);
    let worse = against(0.1);
    assert_eq!(kinds(only(&worse)), [ProblemKind::Regression]);
    assert_eq!(worse.verdict(), Verdict::Divergence);
    let first = &only(&worse).moved[0];
    assert_eq!(
        first.checkpoint.unwrap().to_string(),
        "embed",
        "the first one that moved, in execution order"
    );
    let better = against(10.0);
    assert_eq!(better.verdict(), Verdict::Parity);
    assert!(render::text(&better).contains("better than the baseline"));
    let none =
        with("[[case]]\nname = \"b\"", Some(&accepted(&Measures::of(&today))), executor, &Pace::default());
    assert_eq!(kinds(only(&none)), [ProblemKind::MissingBaseline]);
}

#[test]
fn a_baseline_knows_its_own_noise() {
    let today = clean(SMALL);
    let mut baseline = accepted(&scaled(&today, 1.0));
    assert!(!baseline.moved("a", &scaled(&today, 2.5)).unwrap().is_empty(), "beyond the least factor");
    // Two accepted runs 1.9 times apart, then one 1.8 times above: within twice the range's upper end.
    baseline.accept("a", &scaled(&today, 1.9), TODAY);
    assert!(baseline.moved("a", &scaled(&today, 3.0)).unwrap().is_empty());
    assert_eq!(baseline.cases["a"].runs, 2);
    let text = baseline.render();
    let again: Baseline = serde_json::from_str(&text).unwrap();
    assert_eq!(again, baseline);
    assert_eq!(again.render(), text);
    let nan = Measures { kl: None, ..Measures::of(&today) };
    assert!(baseline.moved("a", &nan).unwrap().iter().any(|moved| moved.what == "KL" && moved.worse));
}

#[test]
fn a_coarser_arithmetic_than_the_baselines_is_a_regression() {
    let explained = |name: &str| {
        let mut report = clean(SMALL);
        for entry in &mut report.checkpoints {
            entry.local.candidate.iter_mut().for_each(|local| local.arithmetic = vec![name.to_owned()]);
        }
        report
    };
    let f32 = "nothing but f32 rounding";
    let judged = |old: &str, new: &str| {
        let baseline = accepted(&Measures::of(&explained(old)));
        let new = explained(new);
        let executor = move |_: &Case| Attempt::Report(Box::new(new.clone()));
        with("[[case]]\nname = \"a\"", Some(&baseline), executor, &Pace::default())
    };
    let coarser = ["matmuls with TF32 operands", "matmuls with f16 operands", "keys and values in f16"];
    for name in coarser {
        let report = judged(f32, name);
        assert_eq!(
            (report.verdict(), kinds(only(&report))),
            (Verdict::Divergence, vec![ProblemKind::Regression])
        );
        let text = render::text(&report);
        assert!(text.contains(name) && text.contains(f32), "{text}");
        assert_eq!(judged(name, f32).verdict(), Verdict::Parity, "a finer one");
        assert_eq!(judged(name, name).verdict(), Verdict::Parity);
    }
    assert_eq!(judged("some kernel of a device", "another").verdict(), Verdict::Parity, "nobody knows");
}

/// Fails every case on its first try.
struct Flaky(AtomicUsize);

impl Execute for Flaky {
    fn execute(&self, _: &Case, _: bool) -> Attempt {
        let first = self.0.fetch_add(1, Ordering::Relaxed) == 0;
        Attempt::Report(Box::new(if first { injected(SMALL, 1) } else { clean(SMALL) }))
    }
}

#[test]
fn a_retry_is_visible() {
    let plan = Pace { retries: 2, ..Pace::default() };
    let report = with("[[case]]\nname = \"a\"", None, Flaky(AtomicUsize::new(0)), &plan);
    assert_eq!((report.verdict(), only(&report).attempts), (Verdict::Parity, 2));
    assert!(render::text(&report).contains("1 needed a retry"));
    assert!(render::junit(&report).unwrap().contains("flakyFailure"));
    assert!(render::markdown(&report).contains("run 2 times"));
    assert!(render::annotations(&report).starts_with("::warning"));
    let without = with("[[case]]\nname = \"a\"", None, Flaky(AtomicUsize::new(0)), &Pace::default());
    assert_eq!(without.verdict(), Verdict::Divergence);
}

const MANY: &str = "[prompts]\np0 = 'a'\np1 = 'b'\np2 = 'c'\np3 = 'd'\np4 = 'e'\np5 = 'f'\np6 = 'g'\n\
    [[case]]\nname = \"many\"\nprompt = [\"p0\", \"p1\", \"p2\", \"p3\", \"p4\", \"p5\", \"p6\"]\n\
    waive = [{ checkpoint = \"blk.0.q\", reason = \"x\", until = \"2027-01-01\" }]";

#[test]
fn shards_put_together_are_the_whole() {
    let executor = |case: &Case| {
        let report =
            if case.id.ends_with("p3") { with_verdict(CheckpointVerdict::Origin) } else { clean(SMALL) };
        Attempt::Report(Box::new(report))
    };
    let part = |shard: Option<&str>| {
        let plan = Pace { shard: shard.map(|text| text.parse().unwrap()), jobs: 3, ..Pace::default() };
        with(MANY, None, executor, &plan)
    };
    let whole = part(None);
    assert_eq!(
        (whole.cases.len(), whole.stale_waivers().len()),
        (7, 0),
        "one firing case keeps the waiver alive"
    );
    let parts = || vec![part(Some("3/3")), part(Some("1/3")), part(Some("2/3"))];
    let merged = merge(parts()).unwrap();
    assert_eq!(render::json(&merged).unwrap(), render::json(&whole).unwrap());
    assert_eq!(render::junit(&merged).unwrap(), render::junit(&whole).unwrap());
    let short = merge(parts().into_iter().take(2).collect()).unwrap();
    assert_eq!(short.verdict(), Verdict::Undecided, "a lost shard is noticed");
    assert!(merge(vec![part(Some("1/3")), part(Some("1/3"))]).is_err());
    assert!("0/3".parse::<parity::gate::schedule::Shard>().is_err());
    assert!("4/3".parse::<parity::gate::schedule::Shard>().is_err());
}

#[test]
fn suites_that_would_hide_something_are_refused() {
    let refused = [
        ("", "no case"),
        ("[[case]]\nname = \"a\"\n[[case]]\nname = \"a\"", "two cases"),
        ("[[case]]\nname = \"a\"\nmodel = \"x\"", "no model `x`"),
        ("[[case]]\nname = \"a\"\ninject = \"rope.base@1\"", "expect = \"divergence\""),
        ("[[case]]\nname = \"a\"\nallow = [\"divergence\"]", "cannot be allowed"),
        (
            "[[case]]\nname = \"a\"\nwaive = [{ checkpoint = \"x\", reason = \" \", until = \"2027-01-01\" }]",
            "no reason",
        ),
        (
            "[[case]]\nname = \"a\"\nwaive = [{ checkpoint = \"x\", reason = \"y\", until = \"soon\" }]",
            "no date",
        ),
        ("[[case]]\nname = \"a\"\nwaive = [{ checkpoint = \"x\", reason = \"y\" }]", "until"),
        ("[[case]]\nname = \"a\"\nretry = 3", "unknown field"),
    ];
    for (text, expected) in refused {
        let error = Suite::parse(&format!("name = \"t\"\n{text}"), Path::new(".")).err().unwrap();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

fn with_own_error(factor: f64, distance: f64) -> Report {
    let mut report = clean(SMALL);
    let entry = &mut report.checkpoints[5];
    entry.local.candidate.as_mut().unwrap().rel_l2 *= factor;
    entry.numbers.as_mut().unwrap().rel_l2 *= distance;
    report
}

#[test]
fn reports_are_compared_by_ratio() {
    let old = clean(SMALL);
    let none = GlobSet::empty();
    let same = diff(&old, &with_own_error(1.9, 0.6), &none);
    assert!(!same.worse && same.changes.is_empty());
    let worse = diff(&old, &with_own_error(10.0, 1.0), &none);
    assert!(worse.worse);
    assert_eq!(worse.first_worse().unwrap().checkpoint, old.checkpoints[5].id);
    let nearer_to_exact = diff(&old, &with_own_error(0.1, 10.0), &none);
    assert!(!nearer_to_exact.worse, "nearer to exact arithmetic is no regression: {nearer_to_exact:?}");
    assert!(nearer_to_exact.changes.iter().all(|change| change.direction == Direction::Better));
    let broken = diff(&old, &injected(SMALL, 1), &none);
    assert!(broken.worse);
    assert!(!diff(&injected(SMALL, 1), &old, &none).worse);
    let mut allowed = globset::GlobSetBuilder::new();
    allowed.add(globset::Glob::new("*").unwrap());
    let declared = diff(&old, &injected(SMALL, 1), &allowed.build().unwrap());
    assert!(!declared.worse && declared.changes.iter().any(|c| c.direction == Direction::Declared));
    insta::assert_snapshot!("diff_worse", parity::report::diff::render(&worse));
}
