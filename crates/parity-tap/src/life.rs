//! What a program does with a context between its passes: calls on its memory, and what is written into caches.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use parity_record::api::text;
use parity_record::recorder::Touch;

use crate::{states, symbols, tap};

thread_local! {
    /// The context whose batch this thread handed over last.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

/// Whether a tensor is being copied.
static COPIES: AtomicBool = AtomicBool::new(false);

/// Notes the context that is about to compute.
pub fn decodes(context: *mut c_void) {
    LAST.set(context as usize);
}

/// The context that computes, 0 where its batch was not seen.
pub fn last() -> usize {
    LAST.get()
}

/// Whether a context, which has computed, is an object, or an object is its memory.
fn is_of(context: usize, object: *mut c_void, caller: *const c_void) -> bool {
    if context == object as usize {
        return true;
    }
    let memory = symbols::real(c"llama_get_memory", caller);
    type Memory = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    // SAFETY: llama.cpp's function under its own name, on a context that computed a pass.
    !memory.is_null()
        && unsafe { std::mem::transmute::<*mut c_void, Memory>(memory)(context as *mut c_void) } == object
}

/// Notes a call on a memory, or in older releases a context, with so many of the numbers, and makes it.
unsafe fn call(
    (name, of, n): (&'static CStr, &str, usize),
    object: *mut c_void,
    numbers: [i32; 4],
    caller: *const c_void,
) -> u64 {
    let real = symbols::real(name, caller);
    if real.is_null() {
        return 0;
    }
    type Real = unsafe extern "C" fn(*mut c_void, i32, i32, i32, i32) -> u64;
    let [a, b, c, d] = numbers;
    // SAFETY: llama.cpp's function under its own name, with the program's arguments; registers behind them are not read.
    let result = unsafe { std::mem::transmute::<*mut c_void, Real>(real)(object, a, b, c, d) };
    // A recurrent state cannot be cut anywhere: then nothing happened.
    let happened = of != "seq_rm" || result & 0xff != 0;
    if happened {
        // Releases of before fill caches with zeros whenever they are cleared.
        let zeros = of == "clear" && (n == 0 && name != c"llama_memory_clear" || numbers[0] & 0xff != 0);
        let numbers: Vec<i64> = numbers[..n].iter().map(|&number| i64::from(number)).collect();
        tap::event(|context| is_of(context, object, caller), of, &numbers, zeros);
    }
    result
}

/// Makes `$name` an exported function of a memory and up to four numbers, of which `$n` are noted as the event `$of`. The
/// return address is a sixth argument.
macro_rules! calls {
    ($($name:ident => $of:literal, $n:literal;)*) => {$(
        #[allow(missing_docs, reason = "the functions are llama.cpp's")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() {
            hand_on!(5, of::$name)
        }
    )*
    mod of {
        use std::ffi::{CStr, c_void};
        $(pub unsafe extern "C" fn $name(
            object: *mut c_void, a: i32, b: i32, c: i32, d: i32, caller: *const c_void,
        ) -> u64 {
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            };
            // SAFETY: the program's arguments.
            unsafe { super::call((NAME, $of, $n), object, [a, b, c, d], caller) }
        })*
    }};
}

calls! {
    llama_set_causal_attn => "causal", 1;
    llama_memory_clear => "clear", 0;
    llama_memory_seq_rm => "seq_rm", 3;
    llama_memory_seq_cp => "seq_cp", 4;
    llama_memory_seq_keep => "seq_keep", 1;
    llama_memory_seq_add => "seq_add", 4;
    llama_memory_seq_div => "seq_div", 4;
    llama_kv_self_clear => "clear", 0;
    llama_kv_self_seq_rm => "seq_rm", 3;
    llama_kv_self_seq_cp => "seq_cp", 4;
    llama_kv_self_seq_keep => "seq_keep", 1;
    llama_kv_self_seq_add => "seq_add", 4;
    llama_kv_self_seq_div => "seq_div", 4;
    llama_kv_cache_clear => "clear", 0;
    llama_kv_cache_seq_rm => "seq_rm", 3;
    llama_kv_cache_seq_cp => "seq_cp", 4;
    llama_kv_cache_seq_keep => "seq_keep", 1;
    llama_kv_cache_seq_add => "seq_add", 4;
    llama_kv_cache_seq_div => "seq_div", 4;
}

/// Notes that a tensor is written to, from outside or as a copy of another, where it is of a cache: its views begin with its
/// name.
unsafe fn writes(tensor: *mut c_void, caller: *const c_void) {
    let name = symbols::real(c"ggml_get_name", caller);
    if name.is_null() || tensor.is_null() {
        return;
    }
    type Name = unsafe extern "C" fn(*mut c_void) -> *const std::ffi::c_char;
    // SAFETY: ggml's function under its own name, on a tensor that it is given.
    let name = unsafe { text(std::mem::transmute::<*mut c_void, Name>(name)(tensor)) };
    if name.is_some_and(|name| name.starts_with("cache_")) {
        // A copy may be made of a read and a write.
        let is_called_for = COPIES.load(Ordering::Relaxed) || states::is_loading();
        tap::touched(if is_called_for { Touch::ByCall } else { Touch::ByNobody });
    }
}

/// Stands in for `ggml_backend_tensor_set`.
pub unsafe extern "C" fn tensor_set(
    tensor: *mut c_void,
    data: *const c_void,
    offset: usize,
    size: usize,
    caller: *const c_void,
) {
    // SAFETY: the program's argument.
    unsafe { writes(tensor, caller) };
    type Set = unsafe extern "C" fn(*mut c_void, *const c_void, usize, usize);
    let real = symbols::real(c"ggml_backend_tensor_set", caller);
    if !real.is_null() {
        // SAFETY: ggml's function under its own name, with the program's arguments.
        unsafe { std::mem::transmute::<*mut c_void, Set>(real)(tensor, data, offset, size) }
    }
}

/// Stands in for `ggml_backend_tensor_copy`.
pub unsafe extern "C" fn tensor_copy(from: *mut c_void, to: *mut c_void, caller: *const c_void) {
    COPIES.store(true, Ordering::Relaxed);
    // SAFETY: the program's argument.
    unsafe { writes(to, caller) };
    type Copy = unsafe extern "C" fn(*mut c_void, *mut c_void);
    let real = symbols::real(c"ggml_backend_tensor_copy", caller);
    if !real.is_null() {
        // SAFETY: ggml's function under its own name, with the program's arguments.
        unsafe { std::mem::transmute::<*mut c_void, Copy>(real)(from, to) }
    }
    COPIES.store(false, Ordering::Relaxed);
}
