//! The functions of one loaded ggml, by name: all that is ever called of it.

use std::ffi::{CStr, c_char, c_int, c_void};

/// A `ggml_tensor`, whose layout only [`crate::layout::TensorLayout`] knows.
pub type RawTensor = *mut c_void;
/// A `ggml_cgraph`.
pub type RawGraph = *mut c_void;
/// A `ggml_backend_sched`.
pub type RawSched = *mut c_void;

/// `ggml_init_params`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct InitParams {
    /// Bytes of the arena.
    pub mem_size: usize,
    /// Null for an arena that ggml allocates.
    pub mem_buffer: *mut c_void,
    /// Whether tensors get no data.
    pub no_alloc: bool,
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident: $symbol:literal fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions, by their names without prefix.
        #[derive(Clone, Copy, Debug)]
        pub struct Api {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            /// Null before July 2025.
            pub version: Option<unsafe extern "C" fn() -> *const c_char>,
            /// Null before July 2025.
            pub commit: Option<unsafe extern "C" fn() -> *const c_char>,
            /// The device of a backend. Null before October 2024.
            pub backend_get_device: Option<unsafe extern "C" fn(*mut c_void) -> *mut c_void>,
            /// Free and total bytes of a device. Null before October 2024.
            pub dev_memory: Option<unsafe extern "C" fn(*mut c_void, *mut usize, *mut usize)>,
            /// Whether a buffer's bytes lie in the program's own memory. Null before February 2024.
            pub buffer_is_host: Option<unsafe extern "C" fn(*mut c_void) -> bool>,
            /// Whether graphs may hold nodes that are never computed, told by their flags.
            pub has_compute_flag: bool,
        }

        impl Api {
            /// Finds the functions.
            ///
            /// # Errors
            /// The name of the first one that is missing.
            ///
            /// # Safety
            /// What `find` returns for a name is null or the function that ggml declares under it.
            pub unsafe fn new(mut find: impl FnMut(&CStr) -> *mut c_void) -> Result<Api, &'static str> {
                Ok(Api {
                    $($field: {
                        let symbol = find($symbol);
                        if symbol.is_null() {
                            return Err($symbol.to_str().unwrap_or_default());
                        }
                        // SAFETY: by the caller's promise; function and data pointers have one size here.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(symbol)
                        }
                    },)*
                    // SAFETY: as above; a null pointer is `None`.
                    version: unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn() -> *const c_char>>(find(c"ggml_version")) },
                    // SAFETY: as above.
                    commit: unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn() -> *const c_char>>(find(c"ggml_commit")) },
                    // SAFETY: as above.
                    backend_get_device: unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut c_void) -> *mut c_void>>(find(c"ggml_backend_get_device")) },
                    // SAFETY: as above.
                    dev_memory: unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut c_void, *mut usize, *mut usize)>>(find(c"ggml_backend_dev_memory")) },
                    // SAFETY: as above.
                    buffer_is_host: unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut c_void) -> bool>>(find(c"ggml_backend_buffer_is_host")) },
                    has_compute_flag: !find(c"ggml_build_forward_select").is_null(),
                })
            }
        }
    };
}

functions! {
    /// Makes an arena.
    init: c"ggml_init" fn(InitParams) -> *mut c_void;
    /// Frees an arena.
    free: c"ggml_free" fn(*mut c_void);
    /// Makes a tensor of a type and four extents.
    new_tensor_4d: c"ggml_new_tensor_4d" fn(*mut c_void, c_int, i64, i64, i64, i64) -> RawTensor;
    /// Makes a sum.
    add: c"ggml_add" fn(*mut c_void, RawTensor, RawTensor) -> RawTensor;
    /// Makes a norm with an epsilon.
    rms_norm: c"ggml_rms_norm" fn(*mut c_void, RawTensor, f32) -> RawTensor;
    /// Makes a view of some elements from a byte offset.
    view_1d: c"ggml_view_1d" fn(*mut c_void, RawTensor, i64, usize) -> RawTensor;
    /// Flags a tensor as an input.
    set_input: c"ggml_set_input" fn(RawTensor);
    /// Address of the name within the tensor.
    get_name: c"ggml_get_name" fn(RawTensor) -> *const c_char;
    /// The data pointer.
    get_data: c"ggml_get_data" fn(RawTensor) -> *mut c_void;
    /// What computes the tensor, with unary and gated ops by their own names.
    op_desc: c"ggml_op_desc" fn(RawTensor) -> *const c_char;
    /// Name of an element type.
    type_name: c"ggml_type_name" fn(c_int) -> *const c_char;
    /// Bytes that the elements span.
    nbytes: c"ggml_nbytes" fn(RawTensor) -> usize;
    /// Name of an op by its number.
    op_name: c"ggml_op_name" fn(c_int) -> *const c_char;
    /// Writes bytes of a tensor on any backend.
    tensor_set: c"ggml_backend_tensor_set" fn(RawTensor, *const c_void, usize, usize);
    /// Reads bytes of a tensor on any backend.
    tensor_get: c"ggml_backend_tensor_get" fn(RawTensor, *mut c_void, usize, usize);
    /// Number of nodes.
    graph_n_nodes: c"ggml_graph_n_nodes" fn(RawGraph) -> c_int;
    /// One node.
    graph_node: c"ggml_graph_node" fn(RawGraph, c_int) -> RawTensor;
    /// A node or leaf by name.
    graph_get_tensor: c"ggml_graph_get_tensor" fn(RawGraph, *const c_char) -> RawTensor;
    /// The backend that computes a node.
    sched_get_tensor_backend: c"ggml_backend_sched_get_tensor_backend" fn(RawSched, RawTensor) -> *mut c_void;
    /// Number of backends of a scheduler.
    sched_get_n_backends: c"ggml_backend_sched_get_n_backends" fn(RawSched) -> c_int;
    /// One of them.
    sched_get_backend: c"ggml_backend_sched_get_backend" fn(RawSched, c_int) -> *mut c_void;
    /// Waits for everything under way.
    sched_synchronize: c"ggml_backend_sched_synchronize" fn(RawSched);
    /// Name of a backend.
    backend_name: c"ggml_backend_name" fn(*mut c_void) -> *const c_char;
}

/// A C string of ggml's, or nothing.
///
/// # Safety
/// `text` is null or a C string that lives while the result does.
pub unsafe fn text<'a>(text: *const c_char) -> Option<std::borrow::Cow<'a, str>> {
    // SAFETY: not null, and a C string by the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
}
