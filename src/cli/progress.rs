//! Progress on standard error for anything that takes long: a line where somebody is watching, a few of them elsewhere.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::TypedValueParser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::report::{CheckpointVerdict, Report, Verdict};
use crate::text::tell;
use crate::watch::{self, Known};

/// How long nothing is shown.
const PATIENCE: Duration = Duration::from_secs(1);

/// A bar that appears after a second.
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
}

impl Progress {
    /// A bar for work described by `what`.
    pub fn new(what: &'static str) -> Progress {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{msg} {bar:32} {pos}/{len} {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what);
        Progress { bar, started: Instant::now() }
    }

    /// `done` of `all` are done, and what the best so far is called.
    pub fn set_with(&self, done: usize, all: usize, best: &str) {
        if !best.is_empty() && self.bar.message() != best {
            self.bar.set_message(best.to_owned());
        }
        self.set(done, all);
    }

    /// `done` of `all` are done.
    pub fn set(&self, done: usize, all: usize) {
        if self.bar.is_hidden() && self.started.elapsed() >= PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
        if done == all {
            self.bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// How long somebody waits for an answer.
#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct TimeArgs {
    /// Answer after S seconds with what is known by then
    ///
    /// So does the first Ctrl-C. What was not judged by then is undecided: exit code 2, or 1 where a node is proven wrong.
    #[arg(long, value_name = "S", value_parser = seconds())]
    time_limit: Option<Duration>,
}

/// Seconds from which a line says what is worked at.
const PLACE: u64 = 2;
/// Seconds from which it says what is known so far. Where nobody is watching, a line is written then, and others after twice
/// the time each.
const KNOWN: u64 = 10;

/// Shows how far a judgement is for as long as it lives.
pub struct Waiting(ProgressBar);

impl TimeArgs {
    /// Begins to wait.
    pub fn start(&self) -> Waiting {
        self.time_limit.into_iter().for_each(watch::limit);
        watch::heed_interrupts();
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{elapsed} {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        let (line, is_watched, next) = (bar.clone(), std::io::stderr().is_terminal(), AtomicU64::new(KNOWN));
        watch::observe(move |place, known| {
            let seconds = line.elapsed().as_secs();
            if line.is_finished() || seconds < PLACE {
                return;
            }
            let said = said(place, (seconds >= KNOWN).then_some(known));
            if is_watched {
                line.set_draw_target(ProgressDrawTarget::stderr());
                line.set_message(said);
                line.tick();
            } else if seconds >= next.load(Ordering::Relaxed) {
                next.store(2 * seconds, Ordering::Relaxed);
                tell(format_args!("{seconds} s: {said}"));
            }
        });
        Waiting(bar)
    }
}

impl Waiting {
    /// Notes in a report what was left out of it, since nobody waited any longer.
    pub fn end(self, mut report: Report) -> Report {
        let Some(why) = watch::cut().filter(|_| report.verdict != Verdict::Parity) else { return report };
        let of =
            |verdict: CheckpointVerdict| report.checkpoints.iter().filter(|e| e.verdict == verdict).count();
        let (all, healthy) = (report.checkpoints.len(), of(CheckpointVerdict::Match));
        let said = format!(
            "{why}: {healthy} of {all} nodes are healthy so far, {} were not judged",
            of(CheckpointVerdict::Undecided)
        );
        match report.verdict {
            Verdict::Undecided => report.reason = Some(said),
            _ => report.notes.push(said),
        }
        report
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// `31 of 75 healthy, none wrong; blk.4.attn_out`
fn said(place: &str, known: Option<Known>) -> String {
    match known.filter(|known| known.of > 0) {
        None => place.to_owned(),
        Some(Known { of, healthy, wrong: 0 }) => format!("{healthy} of {of} healthy, none wrong; {place}"),
        Some(Known { of, healthy, wrong }) => format!("{healthy} of {of} healthy, {wrong} not yet; {place}"),
    }
}

/// A time in seconds, with a fraction.
fn seconds() -> impl TypedValueParser<Value = Duration> {
    |text: &str| {
        let time = text.parse::<f64>().ok().and_then(|time| Duration::try_from_secs_f64(time).ok());
        time.ok_or_else(|| "a number of seconds, such as 60 or 0.5".to_owned())
    }
}
