//! How much memory this process may still take: asked before something large is begun.

use std::fs;
use std::sync::mpsc::{SyncSender, sync_channel};

use rayon::{ThreadBuilder, ThreadPool, ThreadPoolBuilder};

#[cfg(not(unix))]
use crate::elsewhere::address_space;
use crate::error::{Error, Result};

/// Limits what a run may need, in bytes or as `8G`: less than what is there, or more where the system is wrong.
pub const VARIABLE: &str = "PARITY_MEMORY";

/// Bytes of a thread's stack, and those that there must be besides for what it is to do.
const STACK: usize = 2 << 20;
const ROOM: usize = 16 << 20;

/// Refuses work that needs more than there is; `parts` are what it needs memory for, in bytes.
///
/// # Errors
/// Names the largest part, what is needed and what there is. Nothing is refused where the system tells no limit.
pub fn require(subject: &str, parts: &[(&str, u64)], hint: &str) -> Result<()> {
    let needed = parts.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let Some((limit, bytes)) = available()? else { return Ok(()) };
    if needed <= bytes {
        return Ok(());
    }
    let largest = parts.iter().max_by_key(|(_, bytes)| *bytes).map_or("", |(name, _)| name);
    Err(Error::new(subject, "needs more memory than there is")
        .expected(format!("at most {} ({limit})", size(bytes)))
        .found(format!("{}, most of it for {largest}", size(needed)))
        .hint(hint))
}

/// The smallest limit and its name, in bytes.
pub fn available() -> Result<Option<(&'static str, u64)>> {
    if let Ok(text) = std::env::var(VARIABLE) {
        let bytes = parse(&text).ok_or_else(|| {
            Error::new(VARIABLE, "is no amount of memory").expected("bytes, or 512M, or 8G").found(&text)
        })?;
        return Ok(Some((VARIABLE, bytes)));
    }
    let limits = [
        ("memory that is available", system()),
        ("memory that the control group leaves", control_group()),
        ("address space: ulimit -v", address_space()),
    ];
    Ok(limits.into_iter().filter_map(|(name, bytes)| Some((name, bytes?))).min_by_key(|(_, bytes)| *bytes))
}

/// `1000`, `512M`, `8G`: units of 1024.
pub fn parse(text: &str) -> Option<u64> {
    let units = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];
    let unit = units.iter().find_map(|(unit, bits)| Some((text.strip_suffix(unit)?, *bits)));
    let (digits, bits) = unit.unwrap_or((text, 0));
    digits.parse::<u64>().ok()?.checked_mul(1 << bits)
}

/// A field of a file in /proc, `Name:  123 kB`, in bytes.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn system() -> Option<u64> {
    field("/proc/meminfo", "MemAvailable")
}

/// What the process's control group has left (cgroups version 2, or version 1 at its root). Cached files count for the
/// group too, and make room when it is needed.
fn control_group() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
    let left = |folder: &str, limit: &str, used: &str| {
        let number =
            |file: &str| fs::read_to_string(format!("{folder}/{file}")).ok()?.trim().parse::<u64>().ok();
        let used =
            number(used)?.saturating_sub(cached(&fs::read_to_string(format!("{folder}/memory.stat")).ok()?));
        Some(number(limit)?.saturating_sub(used))
    };
    let two = |path: &str| left(&format!("/sys/fs/cgroup{path}"), "memory.max", "memory.current");
    let one = || left("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes");
    two(path.trim_end_matches('/')).or_else(|| two("")).or_else(one)
}

/// Bytes of cached files in a control group's `memory.stat`.
fn cached(stat: &str) -> u64 {
    let fields = stat.lines().filter_map(|line| line.split_once(' '));
    let files = fields.filter(|(name, _)| matches!(*name, "inactive_file" | "active_file"));
    files.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum()
}

/// What `ulimit -v` leaves of the address space.
#[cfg(unix)]
fn address_space() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the system fills the struct that it is given.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0;
    let limit = Some(limit.rlim_cur).filter(|limit| known && *limit != libc::RLIM_INFINITY)?;
    Some(limit.saturating_sub(field("/proc/self/status", "VmSize")?))
}

/// Bytes in words: 1.6 GB.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Starts a thread, where there is memory for it and what it does.
///
/// # Errors
/// The system's, where there is not.
pub fn thread() -> std::io::Result<std::thread::Builder> {
    drop(memmap2::MmapMut::map_anon(STACK + ROOM)?);
    Ok(std::thread::Builder::new().stack_size(STACK))
}

/// The first thing a thread does. The C library keeps a record of a thread that has something to clear away at its end,
/// and ends the program where it finds no memory for that: made while there is some.
pub fn begin_thread() {
    thread_local!(static KEPT: String = const { String::new() });
    KEPT.with(|_| ());
}

/// Threads that do what they are given, once. (A thread pool that starts threads itself ends the program where one is refused.)
pub struct Waiting(Vec<SyncSender<ThreadBuilder>>);

impl Waiting {
    /// As many as can be started of those that are wanted.
    pub fn start(wanted: usize) -> Waiting {
        Waiting((0..wanted).map_while(|_| waiting().ok()).collect())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Gives each what it is to do, which then begins; an error where all have something to do.
    pub fn handed_over(mut self) -> impl FnMut(ThreadBuilder) -> std::io::Result<()> {
        move |worker| {
            let next = self.0.pop();
            next.and_then(|thread| thread.send(worker).ok()).ok_or(std::io::ErrorKind::NotFound.into())
        }
    }
}

fn waiting() -> std::io::Result<SyncSender<ThreadBuilder>> {
    let (give, take) = sync_channel::<ThreadBuilder>(1);
    let (say, hear) = sync_channel(1);
    thread()?.spawn(move || {
        begin_thread();
        let _ = say.send(());
        take.recv().into_iter().for_each(ThreadBuilder::run);
    })?;
    hear.recv().map_err(|_| std::io::ErrorKind::NotFound)?;
    Ok(give)
}

/// A pool of so many threads, or of as many of them as can be started; `None` where that is none.
pub fn pool(wanted: usize) -> Option<ThreadPool> {
    let waiting = Waiting::start(wanted);
    // Of 0 a pool would start as many as there are cores.
    let count = Some(waiting.count()).filter(|count| *count > 0)?;
    ThreadPoolBuilder::new().num_threads(count).spawn_handler(waiting.handed_over()).build().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_and_shown() {
        assert_eq!(parse("512M"), Some(512 << 20));
        assert_eq!(parse("1000"), Some(1000));
        assert_eq!((parse("8 GB"), parse("-1"), parse("99999999999T")), (None, None, None));
        assert_eq!((size(999), size(1_600_000_000)), ("999 B".to_owned(), "1.6 GB".to_owned()));
    }

    #[test]
    fn cached_files_are_no_obstacle() {
        assert_eq!(cached("anon 5\nfile 100\ninactive_file 60\nactive_file 30\nslab 1"), 90);
        assert_eq!(cached(""), 0);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let error = require("-n", &[("a", 1), ("the cache", u64::MAX)], "ask for less");
        if available().unwrap().is_some() {
            let text = error.unwrap_err().to_string();
            assert!(text.contains("the cache") && text.contains("ask for less"), "{text}");
        }
        assert!(require("-n", &[("a", 1)], "").is_ok());
    }
}
