//! Batches of the newer kind, which a program fills row by row through functions: what it has put into each.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, MutexGuard};

use parity_record::recorder::BatchRow;

use crate::symbols;

/// By address of a batch, its rows of tokens by their numbers; rows of embeddings are not among them.
static ALL: Mutex<BTreeMap<usize, BTreeMap<i32, BatchRow>>> = Mutex::new(BTreeMap::new());

fn all() -> MutexGuard<'static, BTreeMap<usize, BTreeMap<i32, BatchRow>>> {
    ALL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The rows of a batch; none of one that has rows of embeddings.
pub fn rows(batch: *mut c_void) -> Vec<BatchRow> {
    let all = all();
    let rows = all.get(&(batch as usize)).into_iter().flatten();
    let of_tokens: Vec<BatchRow> = rows
        .zip(0..)
        .take_while(|((row, _), number)| *row == number)
        .map(|((_, row), _)| row.clone())
        .collect();
    let count = all.get(&(batch as usize)).map_or(0, BTreeMap::len);
    if of_tokens.len() == count { of_tokens } else { Vec::new() }
}

/// llama.cpp's function of up to three words, called with the program's; 0 where it could not be found.
unsafe fn call(name: &'static CStr, words: [usize; 3], caller: *const c_void) -> u64 {
    let real = symbols::real(name, caller);
    if real.is_null() {
        return 0;
    }
    type Real = unsafe extern "C" fn(usize, usize, usize) -> u64;
    let [a, b, c] = words;
    // SAFETY: llama.cpp's function under its own name, with the program's arguments; registers behind them are not read.
    unsafe { std::mem::transmute::<*mut c_void, Real>(real)(a, b, c) }
}

/// Stands in for `llama_batch_ext_clear`.
pub unsafe extern "C" fn clear(batch: *mut c_void, caller: *const c_void) {
    all().remove(&(batch as usize));
    // SAFETY: the program's argument.
    unsafe { call(c"llama_batch_ext_clear", [batch as usize, 0, 0], caller) };
}

/// Stands in for `llama_batch_ext_free`.
pub unsafe extern "C" fn free(batch: *mut c_void, caller: *const c_void) {
    all().remove(&(batch as usize));
    // SAFETY: the program's argument.
    unsafe { call(c"llama_batch_ext_free", [batch as usize, 0, 0], caller) };
}

/// Stands in for `llama_batch_ext_add_token`.
pub unsafe extern "C" fn add_token(
    batch: *mut c_void,
    sequence: i32,
    token: i32,
    caller: *const c_void,
) -> i32 {
    let words = [batch as usize, sequence as usize, token as usize];
    // SAFETY: the program's arguments.
    let number = unsafe { call(c"llama_batch_ext_add_token", words, caller) } as i32;
    if number >= 0 {
        let sequences = u32::try_from(sequence).into_iter().collect();
        let row = BatchRow { token: token as u32, position: None, sequences };
        all().entry(batch as usize).or_default().insert(number, row);
    }
    number
}

/// Changes a row that is there.
fn change(batch: *mut c_void, number: i32, change: impl FnOnce(&mut BatchRow)) {
    if let Some(row) = all().get_mut(&(batch as usize)).and_then(|rows| rows.get_mut(&number)) {
        change(row);
    }
}

/// Stands in for `llama_batch_ext_add_seq`.
pub unsafe extern "C" fn add_seq(
    batch: *mut c_void,
    number: i32,
    sequence: i32,
    caller: *const c_void,
) -> bool {
    let words = [batch as usize, number as usize, sequence as usize];
    // SAFETY: the program's arguments.
    let done = unsafe { call(c"llama_batch_ext_add_seq", words, caller) } & 0xff != 0;
    if done {
        change(batch, number, |row| row.sequences.extend(u32::try_from(sequence)));
    }
    done
}

/// Stands in for `llama_batch_ext_set_pos`: the first number is the position in the cache.
pub unsafe extern "C" fn set_pos(
    batch: *mut c_void,
    number: i32,
    position: *const i32,
    caller: *const c_void,
) -> bool {
    let words = [batch as usize, number as usize, position as usize];
    // SAFETY: the program's arguments.
    let done = unsafe { call(c"llama_batch_ext_set_pos", words, caller) } & 0xff != 0;
    if done && !position.is_null() {
        // SAFETY: a position, which llama.cpp has read too.
        let position = unsafe { position.read() };
        change(batch, number, |row| row.position = u32::try_from(position).ok());
    }
    done
}
