//! Batches of hypotheses, several of which are computed at a time.
//!
//! Within a batch many steps are of one thread: values are gathered and given out, a GPU is waited for. Another batch has the
//! other cores meanwhile.

use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::thread;

use rayon::ThreadPool;

use crate::memory;

/// Cores that one batch keeps busy, beside what it waits for: of 16, two were enough for five batches out of six.
const CORES_OF_ONE: usize = 2;
/// Batches at a time, at most: each holds values of its own in memory.
const SIDE_BY_SIDE_MAX: usize = 6;
/// Threads of all batches for each core: some of them wait.
const THREADS_PER_CORE: usize = 2;

/// Batches that are computed at a time on this machine, where each waits for somebody else most of the time.
pub fn side_by_side() -> usize {
    (rayon::current_num_threads() / CORES_OF_ONE).clamp(1, SIDE_BY_SIDE_MAX)
}

/// What `work` makes of each, in batches of up to so many, so many at a time; `come` sees the results of a batch as they come.
///
/// Each batch has threads of its own: one that is shared and holds a lock, as who multiplies does, may be given another batch
/// to compute while it waits for its own, and would then wait for itself.
pub fn each<T: Send, R: Send>(
    all: Vec<T>,
    (at_once, side_by_side): (usize, usize),
    work: impl Fn(Vec<T>) -> Vec<R> + Sync,
    mut come: impl FnMut(&[R]),
) -> Vec<R> {
    let (n, side_by_side) = (all.len(), side_by_side.min(all.len()));
    let batches = dealt(all, at_once, side_by_side);
    let count = batches.len();
    let queue = Mutex::new(batches.into_iter().enumerate());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let mut out: Vec<Option<R>> = (0..n).map(|_| None).collect();
    let mut put = |(batch, results): (usize, Vec<R>)| {
        come(&results);
        // As they were dealt.
        out[batch..].iter_mut().step_by(count).zip(results).for_each(|(place, result)| *place = Some(result));
    };
    let pools = pools(side_by_side);
    let all_of = |pool: Option<&ThreadPool>, (number, batch): (usize, Vec<T>)| {
        // What no threads could be started for is computed by those that there are.
        let found = match pool {
            Some(pool) => pool.install(|| work(batch)),
            None => work(batch),
        };
        (number, found)
    };
    thread::scope(|scope| {
        let (done, results) = mpsc::channel();
        for pool in pools.iter().skip(1) {
            let (done, next, all_of) = (done.clone(), &next, &all_of);
            let of_pool = move || {
                memory::begin_thread();
                while let Some(batch) = next() {
                    if done.send(all_of(Some(pool), batch)).is_err() {
                        break;
                    }
                }
            };
            // Where none is to be had, the others do its work.
            if memory::thread().and_then(|thread| thread.spawn_scoped(scope, of_pool)).is_err() {
                break;
            }
        }
        drop(done);
        while let Some(batch) = next() {
            put(all_of(pools.first(), batch));
            results.try_iter().for_each(&mut put);
        }
        results.into_iter().for_each(&mut put);
    });
    out.into_iter().flatten().collect()
}

/// Threads for so many batches at a time; none for a single one.
fn pools(side_by_side: usize) -> Vec<ThreadPool> {
    let threads = THREADS_PER_CORE * rayon::current_num_threads() / side_by_side.max(1);
    let wanted = if side_by_side > 1 { side_by_side } else { 0 };
    (0..wanted).map_while(|_| memory::pool(threads)).collect()
}

/// Batches of up to `at_once`, dealt one by one, so that each gets as many of those that take long: as many as keep all threads
/// busy to the end.
fn dealt<T>(all: Vec<T>, at_once: usize, threads: usize) -> Vec<Vec<T>> {
    let least = all.len().div_ceil(at_once.max(1));
    let count = least.next_multiple_of(threads.max(1)).min(all.len());
    let mut batches: Vec<Vec<T>> = (0..count).map(|_| Vec::new()).collect();
    for (i, one) in all.into_iter().enumerate() {
        batches[i % count].push(one);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_of_one_length_and_of_all() {
        let lengths = |n: usize, at_once: usize, threads: usize| -> Vec<usize> {
            let batches = dealt((0..n).collect(), at_once, threads);
            let mut all = batches.concat();
            all.sort_unstable();
            assert_eq!(all, (0..n).collect::<Vec<usize>>());
            batches.iter().map(Vec::len).collect()
        };
        assert!(lengths(0, 3, 4).is_empty());
        assert_eq!(lengths(7, 3, 1), [3, 2, 2]);
        assert_eq!(lengths(19, 20, 4), [5, 5, 5, 4]);
        assert_eq!(lengths(160, 39, 4), [20; 8]);
        assert_eq!(lengths(3, usize::MAX, 4), [1, 1, 1]);
    }

    #[test]
    fn results_are_in_the_order_of_what_they_are_of() {
        let slow_first = |batch: Vec<u64>| {
            thread::sleep(std::time::Duration::from_millis(20 / (1 + batch[0])));
            batch.into_iter().map(|one| 2 * one).collect()
        };
        for side_by_side in [1, 2, SIDE_BY_SIDE_MAX] {
            let mut seen = 0;
            let out = each((0..50).collect(), (3, side_by_side), slow_first, |results| seen += results.len());
            assert_eq!((out, seen), ((0..100).step_by(2).collect(), 50));
        }
    }
}
