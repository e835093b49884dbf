//! The threads of this process: as many as can be started, where no number is asked for.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use rayon::{ThreadBuilder, ThreadPoolBuilder};

use crate::error::{Error, Result};
use crate::memory;

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
    let waiting: Vec<_> = (0..wanted).map_while(|_| waiting().ok()).collect();
    let started = waiting.len();
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
        let waiting = Mutex::new(waiting);
        let hand_over = |worker| {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
            next.and_then(|thread| thread.send(worker).ok()).ok_or(std::io::ErrorKind::NotFound.into())
        };
        pool.num_threads(started).spawn_handler(hand_over).build_global()
    };
    built.map_err(|e| Error::new("--threads", e))
}

/// A thread that does what it is given. (A thread pool that starts threads itself ends the program where one is refused.)
fn waiting() -> std::io::Result<SyncSender<ThreadBuilder>> {
    let (give, take) = sync_channel::<ThreadBuilder>(1);
    let (say, hear) = sync_channel(1);
    memory::thread()?.spawn(move || {
        memory::begin_thread();
        let _ = say.send(());
        take.recv().into_iter().for_each(ThreadBuilder::run);
    })?;
    hear.recv().map_err(|_| std::io::ErrorKind::NotFound)?;
    Ok(give)
}
