//! Between the program and ggml's scheduler.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use parity_record::api::{Api, RawGraph, RawSched, RawTensor, text};
use parity_record::describe::Reader;
use parity_record::kept;
use parity_record::layout::TensorLayout;
use parity_record::recorder::{BatchRow, Touch};

use crate::entry::{EvalCallback, unavailable};
use crate::host;
use crate::sides::Sides;
use crate::symbols;

type SetCallback = unsafe extern "C" fn(RawSched, EvalCallback, *mut c_void);
type Compute = unsafe extern "C" fn(RawSched, RawGraph) -> c_int;
type GgufInit = unsafe extern "C" fn(*const c_char, usize, usize) -> *mut c_void;
type SetWarmup = unsafe extern "C" fn(*mut c_void, bool);

/// One loaded ggml.
struct Library {
    api: Api,
    layout: TensorLayout,
    set_callback: SetCallback,
}

/// Everything that outlives a call.
struct State {
    sides: Sides,
    /// Callbacks of the program's own, by scheduler.
    theirs: HashMap<usize, (EvalCallback, usize)>,
    /// Libraries by the address of their compute function; `None` where one cannot be read.
    libraries: HashMap<usize, Option<&'static Library>>,
    /// The library and scheduler that are computing.
    active: Option<(&'static Library, usize)>,
    /// Whether the program wanted the node that was asked about last.
    they_want: bool,
    /// Whether this is said to be a warm-up.
    warm_up: bool,
    /// The process that the recording belongs to.
    process: u32,
}

static STATE: OnceLock<Option<Mutex<State>>> = OnceLock::new();
static ALL_ROWS: OnceLock<bool> = OnceLock::new();

/// The state, if this process records and has not failed.
fn state() -> Option<MutexGuard<'static, State>> {
    let state = STATE.get_or_init(start).as_ref()?.lock().ok()?;
    // A forked child has none of the parent's threads, and is not the program that was to be recorded.
    (state.process == std::process::id()).then_some(state)
}

fn start() -> Option<Mutex<State>> {
    let asked = match host::asked() {
        Ok(asked) => asked?,
        Err(message) => {
            host::say(message);
            return None;
        }
    };
    let _ = ALL_ROWS.set(asked.all_rows);
    // SAFETY: a function that may run at any exit of this process.
    unsafe { libc::atexit(at_exit) };
    Some(Mutex::new(State {
        sides: Sides::new(asked),
        theirs: HashMap::new(),
        libraries: HashMap::new(),
        active: None,
        they_want: false,
        warm_up: false,
        process: std::process::id(),
    }))
}

/// How long the end of a process waits for one of its threads to leave us.
const LEAVING: Duration = Duration::from_secs(2);

/// The program ends: what it computed last is written before it does.
extern "C" fn at_exit() {
    guarded((), || {
        let Some(Some(state)) = STATE.get() else { return };
        let since = Instant::now();
        let mut state = loop {
            match state.try_lock() {
                Ok(state) => break state,
                // A thread that was stopped in the middle never leaves; the parent process then counts what is missing.
                Err(TryLockError::WouldBlock) if since.elapsed() < LEAVING => {
                    std::thread::sleep(LEAVING / 1000);
                }
                Err(_) => return,
            }
        };
        if state.process == std::process::id() {
            state.sides.settle();
        }
    });
}

/// Runs what is ours so that a mistake of ours stays ours.
pub fn guarded<T>(otherwise: T, ours: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(ours)).unwrap_or(otherwise)
}

/// Whether caches were written to since a pass was recorded: a flag of its own, since ggml may write to tensors while the
/// state is locked. And whether nobody that was seen did so.
static TOUCHED: AtomicBool = AtomicBool::new(false);
static BY_NOBODY: AtomicBool = AtomicBool::new(false);

/// Notes that a cache was written to otherwise than by a graph.
pub fn touched(how: Touch) {
    BY_NOBODY.fetch_or(how == Touch::ByNobody, Ordering::Relaxed);
    TOUCHED.store(true, Ordering::Relaxed);
}

/// Notes what the program does with the context that `is` it, and whether that fills its caches with `zeros`.
pub fn event(is: impl Fn(usize) -> bool, call: &str, arguments: &[i64], zeros: bool) {
    guarded((), || {
        if let Some(mut state) = state() {
            state.sides.of_context(is).event(call, arguments, zeros);
        }
    });
}

thread_local! {
    /// The batch that this thread handed over last, until a pass of it is computed.
    static BATCH: RefCell<Option<Vec<BatchRow>>> = const { RefCell::new(None) };
}

/// Notes the batch that is about to be computed.
pub fn batch(rows: impl FnOnce() -> Vec<BatchRow>) {
    guarded((), || {
        if state().is_some() {
            BATCH.set(Some(rows()));
        }
    });
}

/// Whether every row of a model with so many layers is to get logits.
pub fn wants_all_rows(layers: impl FnOnce() -> Option<u32>) -> bool {
    guarded(false, || {
        let Some(state) = state() else { return false };
        let asked = !state.warm_up && ALL_ROWS.get().copied().unwrap_or(false);
        asked && state.sides.first().wants_tail(layers())
    })
}

/// The real function `name`, or one that only fails.
pub fn real_or_unavailable(name: &'static CStr, caller: *const c_void) -> *mut c_void {
    let found = symbols::real(name, caller);
    if found.is_null() { unavailable as *mut c_void } else { found }
}

/// Stands for a real function that returns an object and could not be found.
pub extern "C" fn no_object() -> *mut c_void {
    std::ptr::null_mut()
}

/// The library that a compute function belongs to, if its tensors can be read.
fn library(state: &mut State, compute: *mut c_void) -> Option<&'static Library> {
    if let Some(known) = state.libraries.get(&(compute as usize)) {
        return *known;
    }
    let known_elsewhere = symbols::beside(compute, c"ggml_backend_sched_graph_compute_async");
    if !known_elsewhere.is_null() && known_elsewhere != compute {
        return library(state, known_elsewhere);
    }
    let found = open_library(compute).map(|library| &*Box::leak(Box::new(library)));
    let library = match found {
        Ok(library) => Some(library),
        Err(reason) => {
            let reason = format!("this llama.cpp cannot be read: {reason}");
            state.sides.each(|recorder| recorder.stop(&reason));
            None
        }
    };
    state.libraries.insert(compute as usize, library);
    if let Some(library) = library {
        state.sides.set_version(version(library));
        if let Some(path) = symbols::object_of(compute) {
            state.sides.first().status("library", &path.to_string_lossy());
        }
    }
    library
}

fn open_library(compute: *mut c_void) -> Result<Library, String> {
    // SAFETY: symbols of the library that the compute function is from, under ggml's names.
    let api = unsafe { Api::new(|name| symbols::beside(compute, name)) };
    let api = api.map_err(|missing| format!("it has no `{missing}`"))?;
    let set = symbols::beside(compute, c"ggml_backend_sched_set_eval_callback");
    if set.is_null() {
        return Err("it has no `ggml_backend_sched_set_eval_callback`".to_owned());
    }
    // SAFETY: the functions are of one library.
    let layout = unsafe { TensorLayout::measure(&api) }?;
    // SAFETY: ggml's function under its own name.
    let set_callback = unsafe { std::mem::transmute::<*mut c_void, SetCallback>(set) };
    Ok(Library { api, layout, set_callback })
}

/// llama.cpp's version as far as its libraries tell.
fn version(library: &Library) -> Option<String> {
    let mut words: Vec<String> = Vec::new();
    let llama = symbols::any(c"llama_version");
    if !llama.is_null() {
        // SAFETY: llama.cpp's function under its own name.
        let version =
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(llama)() };
        // SAFETY: a string constant of the library.
        words.extend(unsafe { text(version) }.map(|v| v.into_owned()));
    }
    for (label, function) in [("ggml", library.api.version), ("commit", library.api.commit)] {
        // SAFETY: string constants of the library.
        let value = function.and_then(|function| unsafe { text(function()) });
        words.extend(value.map(|value| format!("{label} {value}")));
    }
    if words.is_empty() {
        // Older releases say nothing; some distributors put the version into the library's name.
        let path = symbols::object_of(symbols::any(c"llama_decode"))?;
        let path = path.to_string_lossy();
        let file = path.rsplit('/').next().unwrap_or_default();
        words.extend(file.contains(|c: char| c.is_ascii_digit()).then(|| file.to_owned()));
    }
    (!words.is_empty()).then(|| words.join(", "))
}

/// Stands in for `ggml_backend_sched_set_eval_callback`.
pub unsafe extern "C" fn set_eval_callback(
    sched: RawSched,
    callback: EvalCallback,
    user_data: *mut c_void,
    caller: *const c_void,
) {
    guarded((), || {
        if let Some(mut state) = state() {
            state.theirs.insert(sched as usize, (callback, user_data as usize));
        }
    });
    let real = symbols::real(c"ggml_backend_sched_set_eval_callback", caller);
    if !real.is_null() {
        // SAFETY: ggml's function under its own name, with the program's arguments.
        unsafe { std::mem::transmute::<*mut c_void, SetCallback>(real)(sched, callback, user_data) }
    }
}

/// Stands in for `ggml_backend_sched_graph_compute_async`.
pub unsafe extern "C" fn graph_compute_async(
    sched: RawSched,
    graph: RawGraph,
    caller: *const c_void,
) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { compute(c"ggml_backend_sched_graph_compute_async", sched, graph, caller) }
}

/// Stands in for `ggml_backend_sched_graph_compute`.
pub unsafe extern "C" fn graph_compute(sched: RawSched, graph: RawGraph, caller: *const c_void) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { compute(c"ggml_backend_sched_graph_compute", sched, graph, caller) }
}

unsafe fn compute(name: &'static CStr, sched: RawSched, graph: RawGraph, caller: *const c_void) -> c_int {
    let real = real_or_unavailable(name, caller);
    // SAFETY: the program's arguments.
    let ours = guarded(None, || unsafe { before(symbols::own(name, caller), sched, graph) });
    // SAFETY: ggml's function under its own name.
    let status = unsafe { std::mem::transmute::<*mut c_void, Compute>(real)(sched, graph) };
    if let Some(library) = ours {
        // SAFETY: as before.
        guarded((), || unsafe { after(library, sched, status) });
    }
    status
}

/// Marks what is to be kept of a graph that is about to get its memory, as `function` of its library lays it out: what was
/// marked.
pub unsafe fn mark(function: *mut c_void, sched: RawSched, graph: RawGraph) -> Vec<RawTensor> {
    guarded(Vec::new(), || {
        let Some(mut state) = state() else { return Vec::new() };
        let Some(library) = library(&mut state, function) else { return Vec::new() };
        let reader = Reader { api: &library.api, layout: &library.layout };
        // SAFETY: the program's scheduler and graph, of this library.
        unsafe { state.sides.of_sched(sched as usize).mark(reader, sched, graph) }
    })
}

/// Undoes [`mark`], where there is no memory for what was marked.
pub unsafe fn unmark(function: *mut c_void, sched: RawSched, marked: &[RawTensor]) {
    guarded((), || {
        let Some(mut state) = state() else { return };
        let Some(library) = library(&mut state, function) else { return };
        let reader = Reader { api: &library.api, layout: &library.layout };
        // SAFETY: what was marked just now.
        unsafe { kept::unmark(reader, marked) };
        state
            .sides
            .of_sched(sched as usize)
            .cannot_keep("there is no memory to keep all of its nodes at once");
    });
}

/// Installs our callback where nodes of this graph are wanted. The library, if `after` has to be called.
unsafe fn before(own: *mut c_void, sched: RawSched, graph: RawGraph) -> Option<&'static Library> {
    let mut state = state()?;
    // One function calls the other, and other contexts may compute meanwhile.
    if let Some((_, active)) = state.active {
        if active != sched as usize {
            state.sides.of_sched(sched as usize).missed();
        }
        return None;
    }
    if state.warm_up {
        return None;
    }
    let library = library(&mut state, own)?;
    if TOUCHED.swap(false, Ordering::Relaxed) {
        let by_nobody = BY_NOBODY.swap(false, Ordering::Relaxed);
        let how = if by_nobody { Touch::ByNobody } else { Touch::ByCall };
        state.sides.each(|recorder| recorder.touched(how));
    }
    let reader = Reader { api: &library.api, layout: &library.layout };
    if let Some(rows) = BATCH.take() {
        state.sides.of_sched(sched as usize).batch(rows);
    }
    // SAFETY: the program computes this graph with this library.
    let wanted = unsafe { state.sides.of_sched(sched as usize).begin(reader, sched, graph) };
    state.sides.begun(sched as usize);
    if !state.sides.of_sched(sched as usize).is_in_pass() {
        return None;
    }
    state.active = Some((library, sched as usize));
    if wanted {
        // SAFETY: the library's own function and scheduler.
        unsafe { (library.set_callback)(sched, Some(on_node), std::ptr::null_mut()) };
    }
    Some(library)
}

unsafe fn after(library: &'static Library, sched: RawSched, status: c_int) {
    let Some(mut state) = state() else { return };
    state.active = None;
    let (callback, user_data) = state.theirs.get(&(sched as usize)).copied().unwrap_or((None, 0));
    // SAFETY: what the program itself had set, or nothing.
    unsafe { (library.set_callback)(sched, callback, user_data as *mut c_void) };
    let reader = Reader { api: &library.api, layout: &library.layout };
    // SAFETY: the pass that `before` began.
    unsafe { state.sides.of_sched(sched as usize).end(reader, sched, status == 0) };
}

/// Our callback: asked before each node and called after each node that someone wanted. Never ends a
/// computation, since ggml would go on with the next part of the graph.
unsafe extern "C" fn on_node(tensor: RawTensor, ask: bool, _user_data: *mut c_void) -> bool {
    let theirs = guarded((None, 0), || {
        let Some(state) = state() else { return (None, 0) };
        let Some((_, sched)) = state.active else { return (None, 0) };
        state.theirs.get(&sched).copied().unwrap_or((None, 0))
    });
    // The program's callback runs without our lock: it may compute graphs of its own.
    let call_theirs = |ask: bool| match theirs {
        // SAFETY: the program's callback, as ggml would call it.
        (Some(callback), user_data) => unsafe { callback(tensor, ask, user_data as *mut c_void) },
        (None, _) => false,
    };
    if ask {
        let they_want = call_theirs(true);
        return guarded(they_want, || {
            let Some(mut state) = state() else { return they_want };
            state.they_want = they_want;
            let Some((library, sched)) = state.active else { return they_want };
            let reader = Reader { api: &library.api, layout: &library.layout };
            // SAFETY: ggml is about to compute this node.
            unsafe { state.sides.of_sched(sched).wants(reader, tensor) || they_want }
        });
    }
    let they_want = guarded(false, || {
        let Some(mut state) = state() else { return false };
        if let Some((library, sched)) = state.active {
            let reader = Reader { api: &library.api, layout: &library.layout };
            // SAFETY: ggml has just computed this node.
            unsafe { state.sides.of_sched(sched).computed(reader, tensor) };
        }
        state.they_want
    });
    if they_want {
        call_theirs(false);
    }
    true
}

/// Stands in for `gguf_init_from_file`: notes which model is opened. The parameters are two words.
pub unsafe extern "C" fn gguf_init_from_file(
    path: *const c_char,
    first: usize,
    second: usize,
    caller: *const c_void,
) -> *mut c_void {
    guarded((), || {
        // SAFETY: the program's argument: a C string, or null.
        if let (Some(state), Some(path)) = (state(), unsafe { text(path) }) {
            let path = std::fs::canonicalize(&*path).unwrap_or_else(|_| path.into_owned().into());
            state.sides.first().status("model", &path.to_string_lossy());
        }
    });
    let real = symbols::real(c"gguf_init_from_file", caller);
    if real.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: ggml's function under its own name, with the program's arguments.
    unsafe { std::mem::transmute::<*mut c_void, GgufInit>(real)(path, first, second) }
}

/// Stands in for `llama_set_warmup`: what is computed meanwhile is not recorded.
pub unsafe extern "C" fn llama_set_warmup(context: *mut c_void, on: bool, caller: *const c_void) {
    guarded((), || {
        if let Some(mut state) = state() {
            state.warm_up = on;
        }
    });
    let real = symbols::real(c"llama_set_warmup", caller);
    if !real.is_null() {
        // SAFETY: llama.cpp's function under its own name, with the program's arguments.
        unsafe { std::mem::transmute::<*mut c_void, SetWarmup>(real)(context, on) }
    }
}
