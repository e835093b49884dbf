//! Progress on standard error for anything over a second, where somebody is watching.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
