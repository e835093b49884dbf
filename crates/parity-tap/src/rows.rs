//! Logits for every token: programs ask for the last one's only, and llama.cpp then computes the tail of
//! the last layer for that row alone.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI8, AtomicUsize, Ordering};

use parity_record::recorder::BatchRow;

use crate::{batches, life, limits, symbols, tap};

/// The start of a `llama_batch`; older releases have more fields behind.
#[repr(C)]
pub struct Batch {
    n_tokens: i32,
    token: *mut i32,
    embd: *mut f32,
    pos: *mut i32,
    n_seq_id: *mut i32,
    seq_id: *mut *mut i32,
    logits: *mut i8,
}

/// Longest batch that is given ones; llama.cpp's own limit is usually 2048.
const MOST_TOKENS: usize = 1 << 16;
static ONES: [AtomicI8; MOST_TOKENS] = [const { AtomicI8::new(1) }; MOST_TOKENS];

/// The context whose last batch got more rows of logits than it asked for, and how many it got.
static CHANGED: AtomicUsize = AtomicUsize::new(0);

/// Changes the batch of a `llama_decode` that is about to run. Returns the real function.
pub unsafe extern "C" fn before_decode(
    context: *mut c_void,
    batch: *mut Batch,
    caller: *const c_void,
) -> *mut c_void {
    CHANGED.store(0, Ordering::Relaxed);
    life::decodes(context);
    // SAFETY: the program's argument.
    tap::batch(|| unsafe { rows_of(&*batch) });
    if tap::wants_all_rows(|| layers(context, caller)) && limits::allow_all_rows() {
        // SAFETY: the batch is the callee's own copy, and its arrays hold `n_tokens` elements.
        let batch = unsafe { &mut *batch };
        let n = usize::try_from(batch.n_tokens).unwrap_or(0);
        // SAFETY: as above.
        if (2..=MOST_TOKENS).contains(&n) && unsafe { asks_for_last_only(batch, n) } {
            batch.logits = ONES.as_ptr().cast_mut().cast();
            CHANGED.store(context as usize, Ordering::Relaxed);
        }
    }
    tap::real_or_unavailable(c"llama_decode", caller)
}

/// Before a `llama_encode`, which computes every row. Returns the real function.
pub unsafe extern "C" fn before_encode(
    context: *mut c_void,
    batch: *mut Batch,
    caller: *const c_void,
) -> *mut c_void {
    life::decodes(context);
    // SAFETY: the program's argument.
    tap::batch(|| unsafe { rows_of(&*batch) });
    tap::event(|known| known == context as usize, "encode", &[], false);
    tap::real_or_unavailable(c"llama_encode", caller)
}

/// How many layers the model of a context has.
fn layers(context: *mut c_void, caller: *const c_void) -> Option<u32> {
    let real = symbols::real(c"llama_get_model", caller);
    if real.is_null() {
        return None;
    }
    type Model = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    // SAFETY: llama.cpp's function under its own name, on a context that it was just given.
    layers_of(unsafe { std::mem::transmute::<*mut c_void, Model>(real)(context) }, caller)
}

/// How many layers a model has, where its llama.cpp tells: rows cost time, and a recording of the first layers
/// has all of them anyway.
pub fn layers_of(model: *mut c_void, caller: *const c_void) -> Option<u32> {
    let named = [c"llama_model_n_layer", c"llama_n_layer"].map(|name| symbols::real(name, caller));
    let count = named.into_iter().find(|symbol| !symbol.is_null()).filter(|_| !model.is_null())?;
    type Layers = unsafe extern "C" fn(*mut c_void) -> i32;
    // SAFETY: llama.cpp's function under its own name, on one of its models.
    u32::try_from(unsafe { std::mem::transmute::<*mut c_void, Layers>(count)(model) }).ok()
}

/// The rows of a batch; none of one of embeddings.
unsafe fn rows_of(batch: &Batch) -> Vec<BatchRow> {
    let n = usize::try_from(batch.n_tokens).unwrap_or(0);
    if batch.token.is_null() {
        return Vec::new();
    }
    let row = |at: usize| {
        // SAFETY: arrays of a batch hold `n_tokens` elements where there are any, and lists of ids as many as they say.
        unsafe {
            let position = (!batch.pos.is_null()).then(|| batch.pos.add(at).read());
            let ids = match batch.n_seq_id.is_null() || batch.seq_id.is_null() {
                true => &[0][..],
                false => {
                    let count = usize::try_from(batch.n_seq_id.add(at).read()).unwrap_or(0);
                    std::slice::from_raw_parts(batch.seq_id.add(at).read(), count)
                }
            };
            BatchRow {
                token: batch.token.add(at).read() as u32,
                position: position.and_then(|position| u32::try_from(position).ok()),
                sequences: ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect(),
            }
        }
    };
    (0..n).map(row).collect()
}

/// A batch that asks for other rows is left alone: its program may find them by counting.
unsafe fn asks_for_last_only(batch: &Batch, n: usize) -> bool {
    if batch.logits.is_null() {
        return true;
    }
    // SAFETY: by the caller's promise.
    let flags = unsafe { std::slice::from_raw_parts(batch.logits, n) };
    flags[n - 1] != 0 && flags[..n - 1].iter().all(|&flag| flag == 0)
}

/// Stands in for `llama_get_logits`: a program that asked for the last row reads that row.
pub unsafe extern "C" fn llama_get_logits(context: *mut c_void, caller: *const c_void) -> *mut f32 {
    if CHANGED.load(Ordering::Relaxed) == context as usize {
        let row = symbols::real(c"llama_get_logits_ith", caller);
        if !row.is_null() {
            type Row = unsafe extern "C" fn(*mut c_void, i32) -> *mut f32;
            // SAFETY: llama.cpp's function under its own name; -1 is the last row.
            return unsafe { std::mem::transmute::<*mut c_void, Row>(row)(context, -1) };
        }
    }
    let real = symbols::real(c"llama_get_logits", caller);
    if real.is_null() {
        return std::ptr::null_mut();
    }
    type All = unsafe extern "C" fn(*mut c_void) -> *mut f32;
    // SAFETY: llama.cpp's function under its own name.
    unsafe { std::mem::transmute::<*mut c_void, All>(real)(context) }
}

/// llama.cpp's number of an encoder's pass among the kinds of passes.
const PROCESS_ENCODE: c_int = 0;

/// Stands in for `llama_process`, which takes batches of the newer kind.
pub unsafe extern "C" fn llama_process(
    context: *mut c_void,
    kind: c_int,
    batch: *mut c_void,
    caller: *const c_void,
) -> c_int {
    life::decodes(context);
    tap::batch(|| batches::rows(batch));
    if kind == PROCESS_ENCODE {
        tap::event(|known| known == context as usize, "encode", &[], false);
    }
    if tap::wants_all_rows(|| layers(context, caller)) && limits::allow_all_rows() {
        let set = symbols::real(c"llama_batch_ext_set_output_logits", caller);
        if !set.is_null() {
            type Set = unsafe extern "C" fn(*mut c_void, i32, bool) -> bool;
            // SAFETY: llama.cpp's function under its own name.
            let set = unsafe { std::mem::transmute::<*mut c_void, Set>(set) };
            // SAFETY: it says where the batch ends.
            let _ = (0..).take_while(|&index| unsafe { set(batch, index, true) }).count();
        }
    }
    let real = tap::real_or_unavailable(c"llama_process", caller);
    type Process = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
    // SAFETY: llama.cpp's function under its own name, with the program's arguments.
    unsafe { std::mem::transmute::<*mut c_void, Process>(real)(context, kind, batch) }
}
