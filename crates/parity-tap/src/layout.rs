//! Where memory is laid out: nodes that are to be read when a graph is computed are marked as its outputs before.
//!
//! It must be so when memory is reserved too: otherwise the old layout is taken, in which most values are written over.

use std::ffi::{CStr, c_void};

use parity_record::api::{RawGraph, RawSched};

use crate::{symbols, tap};

type Allocate = unsafe extern "C" fn(RawSched, RawGraph) -> bool;
type Measure = unsafe extern "C" fn(RawSched, RawGraph, *mut usize);

/// Stands in for `ggml_backend_sched_reserve`.
pub unsafe extern "C" fn reserve(sched: RawSched, graph: RawGraph, caller: *const c_void) -> bool {
    // SAFETY: the program's arguments.
    unsafe { allocate(c"ggml_backend_sched_reserve", sched, graph, caller) }
}

/// Stands in for `ggml_backend_sched_alloc_graph`.
pub unsafe extern "C" fn alloc_graph(sched: RawSched, graph: RawGraph, caller: *const c_void) -> bool {
    // SAFETY: the program's arguments.
    unsafe { allocate(c"ggml_backend_sched_alloc_graph", sched, graph, caller) }
}

/// Stands in for `ggml_backend_sched_reserve_size`.
pub unsafe extern "C" fn reserve_size(
    sched: RawSched,
    graph: RawGraph,
    sizes: *mut usize,
    caller: *const c_void,
) {
    let name = c"ggml_backend_sched_reserve_size";
    let real = symbols::real(name, caller);
    if real.is_null() {
        return;
    }
    // SAFETY: the program's graph.
    unsafe { tap::mark(symbols::own(name, caller), sched, graph) };
    // SAFETY: ggml's function under its own name, with the program's arguments.
    unsafe { std::mem::transmute::<*mut c_void, Measure>(real)(sched, graph, sizes) }
}

unsafe fn allocate(name: &'static CStr, sched: RawSched, graph: RawGraph, caller: *const c_void) -> bool {
    let real = symbols::real(name, caller);
    if real.is_null() {
        return false;
    }
    // SAFETY: ggml's function under its own name.
    let real = unsafe { std::mem::transmute::<*mut c_void, Allocate>(real) };
    let own = symbols::own(name, caller);
    // SAFETY: the program's graph.
    let marked = unsafe { tap::mark(own, sched, graph) };
    // SAFETY: the program's arguments.
    let done = unsafe { real(sched, graph) };
    if done || marked.is_empty() {
        return done;
    }
    // SAFETY: what was marked just now.
    unsafe { tap::unmark(own, sched, &marked) };
    // SAFETY: the program's arguments, as it gave them.
    unsafe { real(sched, graph) }
}
