//! The functions that stand in for llama.cpp's own.
//!
//! Each starts with two or three instructions that hand on its return address: the library that called is
//! the one whose real function must be called, and a process may hold several llama.cpp.

use std::ffi::{c_int, c_void};

use crate::{batches, layout, life, limits, rows, tap};

/// Makes `$name` an exported function of `$n` arguments that calls `$implementation` with the return address as one more.
macro_rules! with_caller {
    ($($(#[$doc:meta])* $name:ident => $implementation:path, $n:tt;)*) => {$(
        $(#[$doc])*
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() {
            hand_on!($n, $implementation)
        }
    )*};
}

with_caller! {
    /// `(sched, callback, user_data)`: the program installs a callback of its own.
    ggml_backend_sched_set_eval_callback => tap::set_eval_callback, 3;
    /// `(sched, graph)`
    ggml_backend_sched_graph_compute_async => tap::graph_compute_async, 2;
    /// `(sched, graph)`
    ggml_backend_sched_graph_compute => tap::graph_compute, 2;
    /// `(sched, graph)`: memory is laid out for the largest graph.
    ggml_backend_sched_reserve => layout::reserve, 2;
    /// `(sched, graph, sizes)`: the same, without memory yet.
    ggml_backend_sched_reserve_size => layout::reserve_size, 3;
    /// `(sched, graph)`: a graph gets its memory.
    ggml_backend_sched_alloc_graph => layout::alloc_graph, 2;
    /// `(file name, two words of parameters)`: a model is opened.
    gguf_init_from_file => tap::gguf_init_from_file, 3;
    /// `(context, on)`
    llama_set_warmup => tap::llama_set_warmup, 2;
    /// `(context, kind, batch)`
    llama_process => rows::llama_process, 3;
    /// `(batch)`
    llama_batch_ext_clear => batches::clear, 1;
    /// `(batch)`
    llama_batch_ext_free => batches::free, 1;
    /// `(batch, sequence, token)`
    llama_batch_ext_add_token => batches::add_token, 3;
    /// `(batch, row, sequence)`
    llama_batch_ext_add_seq => batches::add_seq, 3;
    /// `(batch, row, position)`
    llama_batch_ext_set_pos => batches::set_pos, 3;
    /// `(tensor, data, offset, size)`
    ggml_backend_tensor_set => life::tensor_set, 4;
    /// `(from, to)`
    ggml_backend_tensor_copy => life::tensor_copy, 2;
    /// `(context)`
    llama_get_logits => rows::llama_get_logits, 1;
}

/// Makes `$name` an exported function with one pointer and one struct by value. The struct lies in memory that belongs to the
/// function that is called, so `$before(pointer, struct, caller)` may change it there.
/// It returns the real function, which then takes over as if it had been called.
macro_rules! with_struct {
    ($($(#[$doc:meta])* $name:ident => $before:path;)*) => {$(
        $(#[$doc])*
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() {
            hand_on_struct!($before)
        }
    )*};
}

with_struct! {
    /// `(context, batch)`
    llama_decode => rows::before_decode;
    /// `(context, batch)`
    llama_encode => rows::before_encode;
    /// `(model, parameters)`
    llama_init_from_model => limits::before_init;
    /// `(model, parameters)`: the older name.
    llama_new_context_with_model => limits::before_new_context;
}

/// `bool (*)(struct ggml_tensor *, bool ask, void * user_data)`
pub type EvalCallback = Option<unsafe extern "C" fn(*mut c_void, bool, *mut c_void) -> bool>;

/// What the real functions return that could not be found: an error of llama.cpp's own kind.
pub extern "C" fn unavailable() -> c_int {
    -1
}
