//! The real functions behind those that this library stands in for.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use crate::images;

/// Functions found so far, by name, return address of the caller, and whether it must be the library's own.
static FOUND: Mutex<Option<HashMap<(&'static CStr, usize, bool), usize>>> = Mutex::new(None);

/// The function that would be called as `name` by code at address `caller` if this library were not there; null
/// where there is none.
///
/// Another preloaded library that stands in for the same function comes first where it was loaded behind this
/// one, and is passed over where it is the caller. Then come the library of the caller and those that it depends
/// on, everything that was loaded behind this library, and any loaded library that has it.
pub fn real(name: &'static CStr, caller: *const c_void) -> *mut c_void {
    remembered(name, caller, false)
}

/// The llama.cpp's own function that [`real`] comes to in the end, whoever stands in for it too.
pub fn own(name: &'static CStr, caller: *const c_void) -> *mut c_void {
    remembered(name, caller, true)
}

fn remembered(name: &'static CStr, caller: *const c_void, own: bool) -> *mut c_void {
    let key = (name, caller as usize, own);
    let mut found = FOUND.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let found = found.get_or_insert_with(HashMap::new);
    if let Some(&symbol) = found.get(&key) {
        return symbol as *mut c_void;
    }
    let symbol = find(name, caller, own);
    found.insert(key, symbol as usize);
    symbol
}

/// The symbol `name` of the library that the function at address `member` comes from.
pub fn beside(member: *const c_void, name: &CStr) -> *mut c_void {
    object_of(member).map_or(std::ptr::null_mut(), |path| in_object(&path, name))
}

/// Path of the library that holds an address.
pub fn object_of(address: *const c_void) -> Option<CString> {
    // SAFETY: `info` is written by dladdr before it is read, and its strings live with the library.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(address, &mut info) != 0 && !info.dli_fname.is_null())
            .then(|| CStr::from_ptr(info.dli_fname).to_owned())
    }
}

fn find(name: &'static CStr, caller: *const c_void, own: bool) -> *mut c_void {
    let object = object_of(caller);
    let from_stand_in = object.as_deref().is_some_and(is_preloaded);
    // What the loader finds behind this library, or, where it was not preloaded, for everyone.
    // SAFETY: lookups.
    let next =
        [libc::RTLD_NEXT, libc::RTLD_DEFAULT].map(|place| unsafe { libc::dlsym(place, name.as_ptr()) });
    let next = next.into_iter().find(|&symbol| is_foreign(symbol)).unwrap_or(std::ptr::null_mut());
    if is_foreign(next) && !own && (from_stand_in || stands_in(next)) {
        return next;
    }
    let wanted = |symbol: *mut c_void| is_foreign(symbol) && !stands_in(symbol);
    let near = object.filter(|_| !from_stand_in).map_or(std::ptr::null_mut(), |path| in_object(&path, name));
    [near, next].into_iter().find(|&symbol| wanted(symbol)).unwrap_or_else(|| any(name))
}

/// Whether a function is another preloaded library's.
fn stands_in(symbol: *mut c_void) -> bool {
    object_of(symbol).is_some_and(|path| is_preloaded(&path))
}

/// Has this library stay loaded: ggml unloads one that has no backend, and llama.cpp's calls lead here by then.
pub fn stay_loaded() {
    if let Some(path) = object_of(is_foreign as *const c_void) {
        // SAFETY: a library that is loaded already is counted once more.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NODELETE) };
    }
}

/// The function of this library that stands in for llama.cpp's of that name.
pub fn stand_in(name: &str) -> Option<*mut c_void> {
    // What ggml calls to load a backend is called once, and not for others.
    let is_llamas = ["llama_", "ggml_", "gguf_"].iter().any(|start| name.starts_with(start))
        && name != "ggml_backend_init";
    let name = CString::new(name).ok().filter(|_| is_llamas)?;
    let symbol = in_object(&object_of(is_foreign as *const c_void)?, &name);
    (!symbol.is_null() && !is_foreign(symbol)).then_some(symbol)
}

/// Whether a file is this library, or another that was preloaded and finds llama.cpp's functions in its own way.
pub fn is_ours_or_preloaded(path: &Path) -> bool {
    let ours = object_of(is_foreign as *const c_void);
    let path = CString::new(path.as_os_str().as_bytes()).ok();
    path.is_some_and(|path| ours.as_ref() == Some(&path) || is_preloaded(&path))
}

/// Whether the loader was told to load this object ahead of all that the program asks for.
fn is_preloaded(path: &CStr) -> bool {
    static NAMED: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let named = NAMED.get_or_init(|| {
        let list = std::env::var_os("LD_PRELOAD").unwrap_or_default();
        let names = list.as_bytes().split(|byte| b": ".contains(byte)).filter(|name| !name.is_empty());
        names.map(|name| PathBuf::from(OsStr::from_bytes(name))).collect()
    });
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    let same = |named: &PathBuf| match named.parent() {
        // A bare name is looked for in the loader's own folders.
        Some(folder) if folder.as_os_str().is_empty() => named.file_name() == path.file_name(),
        _ => {
            named == path
                || named.canonicalize().ok().zip(path.canonicalize().ok()).is_some_and(|(a, b)| a == b)
        }
    };
    named.iter().any(same)
}

/// A symbol of any loaded library but this one and those that stand in for it too.
pub fn any(name: &CStr) -> *mut c_void {
    let paths =
        images::all().into_iter().filter_map(|image| CString::new(image.path.as_os_str().as_bytes()).ok());
    let mut symbols = paths.map(|path| in_object(&path, name));
    let found = symbols.find(|&symbol| is_foreign(symbol) && !stands_in(symbol));
    found.unwrap_or(std::ptr::null_mut())
}

/// A symbol of a library that is already loaded, or of one that it depends on.
fn in_object(path: &CStr, name: &CStr) -> *mut c_void {
    // SAFETY: lookups; the handle is given back, and the library stays loaded as it was before.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if handle.is_null() {
            return std::ptr::null_mut();
        }
        let symbol = libc::dlsym(handle, name.as_ptr());
        libc::dlclose(handle);
        symbol
    }
}

/// Whether a symbol was found, and is not one of this library's own.
fn is_foreign(symbol: *mut c_void) -> bool {
    !symbol.is_null() && object_of(symbol) != object_of(is_foreign as *const c_void)
}
