//! The most rows of logits that a context allows: a program that means to ask for one row only may say so
//! when it makes the context, and llama.cpp then aborts where it is asked for more.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{host, rows, symbols, tap};

/// Words of a `llama_context_params`, whose meaning depends on the release: more than any has.
const WORDS: usize = 256;
/// Words that are read of one: every release has more.
const FIRST_WORDS: usize = 16;
/// Words that every release begins with: n_ctx, n_batch, n_ubatch, n_seq_max.
const COMMON_WORDS: usize = 4;
/// `GGML_DEFAULT_N_THREADS`, the default of the two words n_threads and n_threads_batch.
const DEFAULT_THREADS: u32 = 4;
/// The words that newer releases have in between: n_rs_seq, n_outputs_max, n_outputs_max_per_seq.
const DEFAULTS_BETWEEN: [u32; 3] = [0, 0, 1];
/// Place of n_outputs_max, 0 for no limit below n_batch, in releases that have it.
const N_OUTPUTS_MAX: usize = 5;

/// A `llama_context_params`, and room behind it.
#[repr(C)]
struct Params([u32; WORDS]);

static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether every row may be asked for in the contexts made so far.
pub fn allow_all_rows() -> bool {
    !REFUSED.load(Ordering::Relaxed)
}

/// Before `llama_init_from_model`. Returns the real function.
pub unsafe extern "C" fn before_init(
    model: *mut c_void,
    params: *mut u32,
    caller: *const c_void,
) -> *mut c_void {
    // SAFETY: the program's arguments.
    unsafe { before(c"llama_init_from_model", model, params, caller) }
}

/// Before `llama_new_context_with_model`. Returns the real function.
pub unsafe extern "C" fn before_new_context(
    model: *mut c_void,
    params: *mut u32,
    caller: *const c_void,
) -> *mut c_void {
    // SAFETY: the program's arguments.
    unsafe { before(c"llama_new_context_with_model", model, params, caller) }
}

unsafe fn before(
    name: &'static CStr,
    model: *mut c_void,
    params: *mut u32,
    caller: *const c_void,
) -> *mut c_void {
    if tap::wants_all_rows(|| rows::layers_of(model, caller)) {
        match place_of_limit(caller) {
            Some(Some(place)) => {
                // SAFETY: the struct is the callee's own copy, and longer than its first words.
                unsafe { params.add(place).write(0) };
            }
            Some(None) => {}
            None => {
                if !REFUSED.swap(true, Ordering::Relaxed) {
                    host::say(
                        "the parameters of this llama.cpp are not known: only the rows that the program asks for \
                         get logits",
                    );
                }
            }
        }
    }
    // A program that looks for the newer name finds ours even where the library has only the older one.
    let names = [name, c"llama_init_from_model", c"llama_new_context_with_model"];
    let found = names.iter().map(|name| symbols::real(name, caller)).find(|real| !real.is_null());
    found.unwrap_or(tap::no_object as *mut c_void)
}

/// Which word limits the rows: told by the library's own defaults. `Some(None)` in releases that have no
/// limit, `None` in one that is not known.
fn place_of_limit(caller: *const c_void) -> Option<Option<usize>> {
    let defaults = symbols::real(c"llama_context_default_params", caller);
    if defaults.is_null() {
        return None;
    }
    type Defaults = unsafe extern "C" fn() -> MaybeUninit<Params>;
    // SAFETY: llama.cpp's function under its own name. A struct this long is returned through a pointer to where it goes, and
    // the function fills its start, which is longer than the words that are read.
    let words = unsafe {
        let params = std::mem::transmute::<*mut c_void, Defaults>(defaults)();
        params.as_ptr().cast::<[u32; FIRST_WORDS]>().read()
    };
    let threads = words.windows(2).skip(COMMON_WORDS).position(|pair| pair == [DEFAULT_THREADS; 2])?;
    if words[COMMON_WORDS..COMMON_WORDS + threads] != *DEFAULTS_BETWEEN.get(..threads)? {
        return None;
    }
    Some((COMMON_WORDS + threads > N_OUTPUTS_MAX).then_some(N_OUTPUTS_MAX))
}
