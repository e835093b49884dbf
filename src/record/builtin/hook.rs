//! Between the built-in llama.cpp and its ggml, as the tap stands between those of a program.
//!
//! The linker sends llama.cpp's call of `ggml_backend_sched_graph_compute_async` here (`--wrap`, see build.rs),
//! since a graph has to be known before its first node is computed: the callback alone is told of one node
//! after the other.

use std::ffi::{CStr, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};

use llama_cpp_sys_2 as llama;
use parity_record::api::{Api, RawGraph, RawSched, RawTensor};
use parity_record::describe::Reader;
use parity_record::layout::TensorLayout;
use parity_record::recorder::{Host, Options, Recorder};

use crate::error::{Error, Result};

/// What records while a session is on.
struct State {
    recorder: Recorder,
    api: Api,
    layout: TensorLayout,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Held by the one session that may be on.
static ONE: Mutex<()> = Mutex::new(());

/// What the recorder said.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Whether a forward pass was seen.
    pub recording: bool,
    /// Why recording stopped early.
    pub stopped: Option<String>,
}

/// A recording that is on until it is finished.
pub struct Session {
    said: Arc<Mutex<Outcome>>,
    _one: MutexGuard<'static, ()>,
}

impl Session {
    /// Records what is computed from now on.
    pub fn start(options: Options) -> Result<Session> {
        let one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let unreadable =
            |what: String| Error::new("llama.cpp", "the one that is built in cannot be read").found(what);
        // SAFETY: each name gets the function that ggml declares under it.
        let api = unsafe { Api::new(function) }.map_err(|missing| unreadable(format!("no `{missing}`")))?;
        // SAFETY: the functions of the one ggml that is linked.
        let layout = unsafe { TensorLayout::measure(&api) }.map_err(unreadable)?;
        let said = Arc::new(Mutex::new(Outcome::default()));
        let recorder = Recorder::new(options, Arc::new(Ears(Arc::clone(&said))));
        if let Some(mut state) = state() {
            *state = Some(State { recorder, api, layout });
        }
        Ok(Session { said, _one: one })
    }

    /// Ends the recording; its files are written.
    pub fn finish(self) -> Outcome {
        let ended = state().and_then(|mut state| state.take());
        drop(ended);
        self.said.lock().map(|said| said.clone()).unwrap_or_default()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(mut state) = state() {
            *state = None;
        }
    }
}

/// Hears what the recorder says, in this process.
struct Ears(Arc<Mutex<Outcome>>);

impl Host for Ears {
    fn say(&self, message: &str) {
        crate::text::tell(format_args!("parity: {message}"));
    }

    fn status(&self, key: &str, value: &str) {
        let Ok(mut said) = self.0.lock() else { return };
        match key {
            "recording" => said.recording = true,
            "stopped" => said.stopped = Some(value.to_owned()),
            _ => {}
        }
    }

    fn claim(&self) -> bool {
        true
    }
}

fn state() -> Option<MutexGuard<'static, Option<State>>> {
    STATE.lock().ok()
}

macro_rules! linked {
    ($name:expr, $($function:ident),*) => {
        $(if $name.to_bytes() == stringify!($function).as_bytes() {
            return llama::$function as *mut c_void;
        })*
    };
}

/// The linked function of a name; null where parity has no use for it.
fn function(name: &CStr) -> *mut c_void {
    linked!(
        name,
        ggml_init,
        ggml_free,
        ggml_new_tensor_4d,
        ggml_add,
        ggml_rms_norm,
        ggml_view_1d,
        ggml_set_input,
        ggml_get_name,
        ggml_get_data,
        ggml_op_desc,
        ggml_type_name,
        ggml_nbytes,
        ggml_op_name,
        ggml_backend_tensor_set,
        ggml_backend_tensor_get,
        ggml_graph_n_nodes,
        ggml_graph_node,
        ggml_graph_get_tensor,
        ggml_backend_sched_get_tensor_backend,
        ggml_backend_sched_get_n_backends,
        ggml_backend_sched_get_backend,
        ggml_backend_sched_synchronize,
        ggml_backend_name,
        ggml_version,
        ggml_commit,
        ggml_build_forward_select
    );
    std::ptr::null_mut()
}

unsafe extern "C" {
    /// ggml's own function, behind the linker's back.
    fn __real_ggml_backend_sched_graph_compute_async(sched: RawSched, graph: RawGraph) -> c_int;
}

/// Stands in for `ggml_backend_sched_graph_compute_async` in what llama.cpp calls.
///
/// # Safety
/// As ggml's: a scheduler and a graph that is allocated on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __wrap_ggml_backend_sched_graph_compute_async(
    sched: RawSched,
    graph: RawGraph,
) -> c_int {
    // SAFETY: the caller's arguments.
    let begun = guarded(|| unsafe { before(sched, graph) });
    // SAFETY: as above.
    let status = unsafe { __real_ggml_backend_sched_graph_compute_async(sched, graph) };
    if begun {
        // SAFETY: as above.
        guarded(|| unsafe { after(sched, status == 0) });
    }
    status
}

/// Runs what may panic only by a mistake of ours: it must not unwind into C.
fn guarded(ours: impl FnOnce() -> bool) -> bool {
    catch_unwind(AssertUnwindSafe(ours)).unwrap_or(false)
}

/// Whether a pass has begun.
unsafe fn before(sched: RawSched, graph: RawGraph) -> bool {
    let Some(mut guard) = state() else { return false };
    let Some(State { recorder, api, layout }) = guard.as_mut() else { return false };
    // SAFETY: llama.cpp computes this graph on this scheduler.
    let wanted = unsafe { recorder.begin(Reader { api, layout }, sched, graph) };
    if wanted {
        // SAFETY: a live scheduler.
        unsafe {
            llama::ggml_backend_sched_set_eval_callback(sched.cast(), Some(on_node), std::ptr::null_mut())
        };
    }
    recorder.is_in_pass()
}

unsafe fn after(sched: RawSched, whole: bool) -> bool {
    let Some(mut guard) = state() else { return false };
    let Some(State { recorder, api, layout }) = guard.as_mut() else { return false };
    // SAFETY: the pass that `before` began.
    unsafe {
        llama::ggml_backend_sched_set_eval_callback(sched.cast(), None, std::ptr::null_mut());
        recorder.end(Reader { api, layout }, sched, whole);
    }
    true
}

/// Asked before each node, and called after each that is wanted. Never ends a computation.
unsafe extern "C" fn on_node(tensor: *mut llama::ggml_tensor, ask: bool, _: *mut c_void) -> bool {
    let tensor: RawTensor = tensor.cast();
    let wanted = guarded(|| {
        let Some(mut guard) = state() else { return false };
        let Some(State { recorder, api, layout }) = guard.as_mut() else { return false };
        if ask {
            // SAFETY: ggml is about to compute this node.
            return unsafe { recorder.wants(Reader { api, layout }, tensor) };
        }
        // SAFETY: ggml has just computed this node.
        unsafe { recorder.computed(Reader { api, layout }, tensor) };
        true
    });
    wanted || !ask
}
