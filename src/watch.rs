//! Who waits for an answer: how far the work is, and whether it is to end with what is known by now.
//!
//! Both belong to the process and not to a job: there is one Ctrl-C, one `--time-limit` and one line on standard error. What
//! takes long asks [`is_over`] before each part of it, and leaves out the rest; nothing is stopped within a part, so that
//! whatever was judged was judged whole.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// Whether anything was left out since the work was to end.
static CUT: AtomicBool = AtomicBool::new(false);
static UNTIL: OnceLock<Instant> = OnceLock::new();
static OBSERVER: OnceLock<Observer> = OnceLock::new();
/// Of how many nodes how many are healthy, and how many wrong.
static KNOWN: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
/// When somebody was last told something, in milliseconds since the observer came.
static TOLD: AtomicU64 = AtomicU64::new(0);

/// Milliseconds between two looks at how far the work is.
const OFTEN: u64 = 100;

/// Is told what is worked at, and what is known so far.
type Tell = Box<dyn Fn(&str, Known) + Send + Sync>;

struct Observer {
    since: Instant,
    tell: Tell,
}

/// What is known so far, in nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// How many are looked at.
    pub of: usize,
    /// How many of them are healthy.
    pub healthy: usize,
    /// How many are wrong.
    pub wrong: usize,
}

/// Ends the work so long from now. The first limit holds.
pub fn limit(time: Duration) {
    if let Some(until) = Instant::now().checked_add(time) {
        let _ = UNTIL.set(until);
    }
}

/// Ends the work at the first Ctrl-C, and the process at the second.
pub fn heed_interrupts() {
    extern "C" fn interrupted(_signal: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
        // SAFETY: the default ends the process; `signal` may be called in a handler.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    }
    // SAFETY: the handler stores a flag and sets the default again.
    unsafe { libc::signal(libc::SIGINT, interrupted as *const () as usize) };
}

/// Why the work is to end with what is known by now; `None` where it is not. Who asks leaves the rest out.
pub fn over() -> Option<&'static str> {
    let is_late = || UNTIL.get().is_some_and(|until| Instant::now() >= *until);
    let why = match INTERRUPTED.load(Ordering::Relaxed) {
        true => Some("it was interrupted"),
        false => is_late().then_some("its time was over (--time-limit)"),
    };
    CUT.fetch_or(why.is_some(), Ordering::Relaxed);
    why
}

/// Why work was left out; `None` where all of it was done.
pub fn cut() -> Option<&'static str> {
    CUT.load(Ordering::Relaxed).then(over).flatten()
}

/// Whether the work is to end with what is known by now.
pub fn is_over() -> bool {
    over().is_some()
}

/// Who is told how far the work is. The first one stays.
pub fn observe(tell: impl Fn(&str, Known) + Send + Sync + 'static) {
    let _ = OBSERVER.set(Observer { since: Instant::now(), tell: Box::new(tell) });
}

/// Notes what is known.
fn know(known: Known) {
    KNOWN.iter().zip([known.of, known.healthy, known.wrong]).for_each(|(at, value)| {
        at.store(value, Ordering::Relaxed);
    });
}

/// Says what is worked at and what is known, where somebody waits for it and was not told just now; what was known before
/// where that is `None`.
pub fn at(what: impl FnOnce() -> String, known: impl FnOnce() -> Option<Known>) {
    let Some(observer) = OBSERVER.get() else { return };
    let now = u64::try_from(observer.since.elapsed().as_millis()).unwrap_or(u64::MAX);
    let told = TOLD.load(Ordering::Relaxed);
    if now < told.saturating_add(OFTEN) {
        return;
    }
    TOLD.store(now, Ordering::Relaxed);
    known().into_iter().for_each(know);
    let [of, healthy, wrong] = [0, 1, 2].map(|at| KNOWN[at].load(Ordering::Relaxed));
    (observer.tell)(&what(), Known { of, healthy, wrong });
}
