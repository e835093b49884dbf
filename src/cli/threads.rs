//! The threads of this process: as many as can be started, where no number is asked for.

use std::thread::available_parallelism;

use rayon::ThreadPoolBuilder;

use crate::error::{Error, Result};
use crate::memory::{self, Waiting};

/// More threads than this for each core only wait for one another.
const PER_CORE_MAX: usize = 64;

/// Uses `asked` threads for everything, or one for each core. Where memory or processes are limited and fewer can be
/// started, those are used; if there is none, this one.
///
/// # Errors
/// A number that this machine has no use for, or that cannot be started.
pub fn start(asked: Option<usize>) -> Result<()> {
    let cores = available_parallelism().map_or(1, usize::from);
    let wanted = asked.unwrap_or(cores);
    if !(wanted <= PER_CORE_MAX * cores) {
        return Err(Error::new("--threads", "more threads than this machine has a use for")
            .expected(format!("at most {}", PER_CORE_MAX * cores))
            .found(wanted));
    }
    memory::begin_thread();
    let waiting = Waiting::start(wanted);
    let started = waiting.count();
    if asked.is_some() && started < wanted {
        return Err(Error::new("--threads", "not all threads could be started")
            .expected(wanted)
            .found(started)
            .hint("where memory or processes are limited: fewer, or a larger limit"));
    }
    let pool = ThreadPoolBuilder::new();
    let built = if started == 0 {
        pool.num_threads(1).use_current_thread().build_global()
    } else {
        pool.num_threads(started).spawn_handler(waiting.handed_over()).build_global()
    };
    built.map_err(|e| Error::new("--threads", e))
}
