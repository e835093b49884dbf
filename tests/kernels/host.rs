//! Runs the kernels of `kernels/` on the CPU: compiled by the C++ compiler against `kernels/host`, loaded as a
//! shared library, one fiber per CUDA thread. With `PARITY_KERNELS_ON=cuda` the same tests run the built kernels
//! on the first GPU.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use parity::engine::cuda::calls::Call;
use parity::engine::cuda::single::{Shared, Single};
use parity::numerics::Storage;

use crate::cxx;
use crate::data::Memory;

/// `int parity_kernels_launch(...)` in `kernels/host/kernels.cpp`.
type Launch = unsafe extern "C" fn(
    *const c_char,
    *const c_void,
    usize,
    *const c_uint,
    c_uint,
    c_uint,
    *mut c_char,
    usize,
) -> c_int;

/// A compiled set of kernels.
pub enum Kernels {
    /// For the CPU.
    Host(Launch),
    /// For the first GPU.
    Gpu,
}

/// The first GPU, where `PARITY_KERNELS_ON=cuda` asks for it.
fn gpu() -> Option<&'static Mutex<Single>> {
    static OPEN: OnceLock<Option<Mutex<Single>>> = OnceLock::new();
    OPEN.get_or_init(|| {
        let asked = std::env::var_os("PARITY_KERNELS_ON").is_some_and(|value| value == "cuda");
        asked.then(|| Mutex::new(Single::open(0).unwrap_or_else(|error| panic!("{error}"))))
    })
    .as_ref()
}

/// Memory that the GPU sees too, where there is to be one.
pub fn shared(bytes: usize) -> Option<Shared> {
    let gpu = gpu()?.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Some(gpu.memory(bytes).unwrap_or_else(|error| panic!("{error}")))
}

impl Kernels {
    /// Compiles the kernels of `folder`. An error is the compiler's.
    pub fn build(folder: &Path, out: &Path) -> Result<Kernels, String> {
        cxx::library(&folder.join("host/kernels.cpp"), out)?;
        let path = CString::new(out.to_str().expect("a path in UTF-8")).expect("a path without zeros");
        // SAFETY: the library was just built from our sources; it is never unloaded.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            let symbol = libc::dlsym(library, c"parity_kernels_launch".as_ptr());
            assert!(!symbol.is_null(), "the library has the function");
            Ok(Kernels::Host(std::mem::transmute::<*mut c_void, Launch>(symbol)))
        }
    }

    /// Runs one call; `seed` 0 runs the threads of a block in order, any other in a random order of its own, as
    /// far as there is a choice.
    pub fn run(&self, call: &Call, seed: u32) -> Result<(), String> {
        let Kernels::Host(launch) = self else {
            let mut gpu =
                gpu().expect("a GPU was asked for").lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            return gpu.run(call).map_err(|error| error.to_string());
        };
        let name = CString::new(call.kernel.as_str()).expect("a name without zeros");
        let (args, size) = call.args();
        let mut message = [0u8; 256];
        // SAFETY: the arguments are those of the kernel, by name and size; the addresses in them are the test's.
        let code = unsafe {
            launch(
                name.as_ptr(),
                args.start().cast(),
                size,
                call.grid.as_ptr(),
                call.threads,
                seed,
                message.as_mut_ptr().cast(),
                message.len(),
            )
        };
        match code {
            0 => Ok(()),
            1 => Err(format!("no kernel {}", call.kernel)),
            2 => Err(format!("{}: the argument struct has another size", call.kernel)),
            _ => Err(String::from_utf8_lossy(&message).trim_end_matches('\0').to_owned()),
        }
    }
}

/// Runs a call that takes long here in two orders of the threads, which must give the same bits.
pub fn in_two_orders(kernels: &Kernels, call: &Call, out: &Memory) -> Vec<f32> {
    let bits = [0, 3].map(|seed| {
        kernels.run(call, seed).unwrap_or_else(|error| panic!("{}, order {seed}: {error}", call.kernel));
        out.bytes().to_vec()
    });
    assert!(bits[0] == bits[1], "{}: another order of the threads gives another result", call.kernel);
    out.values(Storage::F16)
}

/// The folder of the kernels.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// The kernels as they are in the repository, or `None` (said and counted) where they cannot be compiled here.
pub fn kernels() -> Option<&'static Kernels> {
    static BUILT: OnceLock<Option<Kernels>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        if gpu().is_some() {
            return Some(Kernels::Gpu);
        }
        cxx::compiler()?;
        let out = tempfile::tempdir().expect("a temporary folder").keep().join("kernels.so");
        let kernels = Kernels::build(&folder(), &out);
        let _ = std::fs::remove_dir_all(out.parent().expect("a folder"));
        Some(kernels.unwrap_or_else(|error| panic!("the kernels do not compile for the host:\n{error}")))
    });
    if built.is_none() {
        cxx::skip("no C++ compiler to run the kernels with");
    }
    built.as_ref()
}
