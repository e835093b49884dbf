//! States of a context that a program saves and loads: which sequence each is of, and by its hash which one comes back.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::hash::Hasher;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use twox_hash::XxHash3_64;

use crate::{symbols, tap};

/// Calls that are loading a state now.
static LOADING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether a call of the program's is under way: one function calls the other.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Whether what is written into a cache now is a state that is being loaded.
pub fn is_loading() -> bool {
    LOADING.load(Ordering::Relaxed) > 0
}

/// What a function does with a state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    Save,
    Load,
}

/// Where the bytes of a state are: behind a pointer, as many as the function returns, or in a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum In {
    Memory,
    File,
}

/// Six words that a function may be given; what it does not take is not read.
type Words = [usize; 6];

/// Makes a call, and notes what was saved or loaded. `sequence` is the word that names one; none is of the whole context.
unsafe fn call(
    (name, does, of, sequence): (&'static CStr, Does, In, Option<usize>),
    words: Words,
    caller: *const c_void,
) -> usize {
    let real = symbols::real(name, caller);
    if real.is_null() {
        return 0;
    }
    type Real = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> usize;
    let [context, place, c, d, e, f] = words;
    let (loads, is_first) = (does == Does::Load, !WITHIN.replace(true));
    LOADING.fetch_add(usize::from(loads), Ordering::Relaxed);
    // SAFETY: llama.cpp's function under its own name, with the program's arguments; words behind them are not read.
    let result = unsafe { std::mem::transmute::<*mut c_void, Real>(real)(context, place, c, d, e, f) };
    LOADING.fetch_sub(usize::from(loads), Ordering::Relaxed);
    WITHIN.set(!is_first);
    // Some return a bool, of which one byte counts, the others how many bytes they wrote or read.
    let counts = if of == In::File && sequence.is_none() { result & 0xff } else { result };
    if !is_first || counts == 0 {
        return result;
    }
    let sequence = sequence.map_or(-1, |word| i64::from(words[word] as i32));
    let digest = match of {
        // SAFETY: the function has just read or written so many bytes there.
        In::Memory => XxHash3_64::oneshot(unsafe { std::slice::from_raw_parts(place as *const u8, result) }),
        // SAFETY: a path that the function has just opened.
        In::File => unsafe { of_file(CStr::from_ptr(place as *const c_char)) }.unwrap_or(0),
    };
    let call = if loads { "load" } else { "save" };
    tap::event(|known| known == context, call, &[sequence, digest.cast_signed()], false);
    result
}

/// The hash of a file's content.
fn of_file(path: &CStr) -> Option<u64> {
    let mut file = File::open(Path::new(path.to_str().ok()?)).ok()?;
    let (mut hash, mut piece) = (XxHash3_64::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece).ok()? {
            0 => return Some(hash.finish()),
            read => hash.write(&piece[..read]),
        }
    }
}

/// Makes `$name` an exported function of up to six words that saves or loads a state. The return address is a
/// seventh.
macro_rules! states {
    ($($name:ident => $does:ident $of:ident $sequence:expr;)*) => {$(
        #[allow(missing_docs, reason = "the functions are llama.cpp's")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() {
            hand_on!(6, of::$name)
        }
    )*
    mod of {
        use super::{CStr, Does, In, c_void};
        $(pub unsafe extern "C" fn $name(
            a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, caller: *const c_void,
        ) -> usize {
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            };
            // SAFETY: the program's arguments.
            unsafe { super::call((NAME, Does::$does, In::$of, $sequence), [a, b, c, d, e, f], caller) }
        })*
    }};
}

states! {
    llama_copy_state_data => Save Memory None;
    llama_set_state_data => Load Memory None;
    llama_state_get_data => Save Memory None;
    llama_state_set_data => Load Memory None;
    llama_state_seq_get_data => Save Memory Some(3);
    llama_state_seq_set_data => Load Memory Some(3);
    llama_state_seq_get_data_ext => Save Memory Some(3);
    llama_state_seq_set_data_ext => Load Memory Some(3);
    llama_save_session_file => Save File None;
    llama_load_session_file => Load File None;
    llama_state_save_file => Save File None;
    llama_state_load_file => Load File None;
    llama_state_seq_save_file => Save File Some(2);
    llama_state_seq_load_file => Load File Some(2);
}
